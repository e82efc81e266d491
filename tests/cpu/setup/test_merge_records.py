"""Records of GPU test processes that ran side by side add up to one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[3] / "tests" / "gpu" / "merge_records.py"


@pytest.fixture(scope="module")
def merge() -> Any:
    spec = importlib.util.spec_from_file_location("opfuse_merge_records", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def part(**changes: Any) -> dict[str, Any]:
    return {
        "date": "2026-01-01", "gpu": "a GPU", "versions": {"torch": "2"}, "source": "f00d", "exit": 0, "seconds": 5.0,
        "counts": {"passed": 3}, "random_configurations": {"test_a.py": 2}, "passed_by_file": {"test_a.py": 3},
        "not_passed": {}, "measured": {"launch_us": 4.0},
    } | changes  # fmt: skip


def test_counts_add_up_and_failures_stay(merge: Any) -> None:
    kernels = {"found": 0, "compiled": 4, "failed": 0, "seconds": 9.0, "processes": 16}
    record = merge.merged([
        part(measured={"kernels": kernels}),
        part(exit=1, seconds=7.0, counts={"passed": 1, "failed": 2}, passed_by_file={"test_b.py": 1},
             not_passed={"failed": ["test_b.py::x", "test_b.py::y"]}, random_configurations={},
             measured={"kernels": kernels | {"seconds": 8.0}, "execute_us": 9.0}),
    ])  # fmt: skip
    assert record["counts"] == {"passed": 4, "failed": 2} and record["exit"] == 1 and record["seconds"] == 7.0
    assert record["passed_by_file"] == {"test_a.py": 3, "test_b.py": 1}
    assert record["random_configurations"] == {"test_a.py": 2}
    assert record["not_passed"] == {"failed": ["test_b.py::x", "test_b.py::y"]}
    assert record["measured"] == {"kernels": kernels | {"compiled": 8}, "execute_us": 9.0}


@pytest.mark.parametrize("field", ["source", "gpu", "versions", "date"])
def test_parts_of_different_runs_are_no_record(merge: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} differs"):
        merge.merged([part(), part(**{field: "another"})])
