"""Compiles the kernels of the collected tests before the first one that needs them, and writes the run's record.

A test module says what its tests launch: `kernels_of(item)` gives an item's configurations. They are compiled in
parallel into the kernel cache that the library uses (OPFUSE_CACHE_DIR, or the user's cache folder), so that a second
run compiles nothing. OPFUSE_RANDOM_CONFIGS is the number of random configurations, 200 unless it is set.

OPFUSE_GPU_RECORD names a file for the record: versions, sha256 of the kernels' sources, counts, what was measured.
Several processes may share the GPU, each with files of its own; `merge_records.py` makes one record of theirs.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

COUNTS: dict[str, int] = {}
FILES: dict[str, int] = {}
NOT_PASSED: dict[str, list[str]] = {}
MEASURED: dict[str, Any] = {}
BEGIN = time.monotonic()


def source_sha256() -> str:
    """sha256 of the kernels' sources, one after another in byte order of their paths."""
    digest = hashlib.sha256()
    for path in sorted((HERE.parents[1] / "kernels" / "sm90").glob("*.py"), key=lambda p: p.name.encode()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kernels_of(items: list[pytest.Item]) -> list[Any]:
    """The configurations that these tests launch, each once."""
    found: dict[Any, None] = {}
    for item in items:
        declared = getattr(item.module, "kernels_of", None)  # type: ignore[attr-defined]
        if declared is not None and not any(mark.name == "skip" for mark in item.iter_markers()):
            found |= dict.fromkeys(declared(item))
    return list(found)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that declare no kernels first: they run while the kernels of the others are compiled."""
    items.sort(key=lambda item: hasattr(item.module, "kernels_of"))  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[Future[Any] | None]:
    """What becomes of the kernels that the selected tests declare: `parallel_build.Built`."""
    import torch

    if not torch.cuda.is_available() or not (wanted := kernels_of(request.session.items)):
        yield None
        return
    import parallel_build  # type: ignore[import-not-found]

    folder = parallel_build.adapter(wanted[0]).kernel_cache().folder
    with ThreadPoolExecutor(1) as background:
        yield background.submit(parallel_build.fill, folder, wanted)


@pytest.fixture(autouse=True)
def kernels_and_device(request: pytest.FixtureRequest, kernels: Future[Any] | None) -> Iterator[None]:
    """A test of a module that declares its kernels finds them compiled, compiles no other, and leaves the device in
    order."""
    if kernels is None or not hasattr(request.module, "kernels_of"):
        yield
        return
    import torch
    from opfuse.kernels.hopper import grouped_dglu

    if "kernels" not in MEASURED:
        built = kernels.result()
        MEASURED["kernels"] = {"found": built.found, "compiled": built.compiled, "failed": len(built.failed),
                               "seconds": round(built.seconds, 1), "processes": built.processes}  # fmt: skip
        print(built)
    cache = grouped_dglu.kernel_cache()
    before = cache.compiles
    yield
    torch.cuda.synchronize()
    unforeseen = cache.compiles - before
    assert unforeseen == 0, f"{unforeseen} kernels were compiled that kernels_of({request.node.name}) does not give"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        outcome = ("xfailed" if report.skipped else "xpassed") if hasattr(report, "wasxfail") else report.outcome
        COUNTS[outcome] = COUNTS.get(outcome, 0) + 1
        if outcome == "passed":
            name = Path(report.nodeid.partition("::")[0]).name
            FILES[name] = FILES.get(name, 0) + 1
        else:
            NOT_PASSED.setdefault(outcome, []).append(report.nodeid.rpartition("/")[2])
        MEASURED.update(report.user_properties)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    target = os.environ.get("OPFUSE_GPU_RECORD")
    if not target:
        return
    import torch

    versions = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings"):
        versions[name] = importlib.metadata.version(name)
    on_gpu = torch.cuda.is_available()
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "versions": versions,
        "source": source_sha256(),
        "exit": int(exitstatus),
        "seconds": round(time.monotonic() - BEGIN, 1),
        "counts": COUNTS,
        "random_configurations": Counter(
            item.path.name for item in session.items if "random_configuration" in item.name
        ),
        "passed_by_file": FILES,
        "not_passed": NOT_PASSED,
        "measured": MEASURED,
    }
    path = Path(target)
    if path.exists():  # the sanitizer's part, if it ran on the same sources
        before = json.loads(path.read_text())
        if before.get("source") == record["source"] and "sanitizer" in before:
            record["sanitizer"] = before["sanitizer"]
    path.write_text(json.dumps(record, indent=1) + "\n")
