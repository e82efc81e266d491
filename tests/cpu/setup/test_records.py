"""What was measured and tested on a GPU is of the kernels as they are, and the GPU tests leave no option out."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opfuse.kernels.sm90 import dglu_tune, gemm_tune, glu_tune, wgrad_tune
from opfuse.kernels.sm90.config import ACTIVATIONS, GLU_LAYOUTS
from opfuse.kernels.sm90.dglu_config import DgluConfig
from opfuse.kernels.sm90.gemm_config import GemmConfig
from opfuse.kernels.sm90.glu_config import GluConfig
from opfuse.kernels.sm90.wgrad_config import WgradConfig

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "samples" / "results"
ARMS = {"dglu": (30, "fused_q"), "glu": (30, "fused_q"), "gemm": (60, "fused_bias"), "wgrad": (60, "fused_add")}
"""Of each benchmark's record: its rows, three splits of ten shapes or of two products of each, and an arm in all."""
RECORDS = ("tests/gpu/record.json", *(f"samples/results/{name}_h200.json" for name in ARMS))


def sources() -> str:
    digest = hashlib.sha256()
    for path in sorted((ROOT / "kernels" / "sm90").glob("*.py"), key=lambda p: p.name.encode()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@pytest.mark.parametrize("record", RECORDS)
def test_the_record_is_of_these_sources(record: str) -> None:
    """Fails from a change of a kernel until the GPU tests, the sanitizer and the benchmark have run again."""
    content = json.loads((ROOT / record).read_text())
    assert content["source"] == sources()
    if "counts" in content:
        assert content["exit"] == 0 and set(content["counts"]) <= {"passed", "skipped"}, content["not_passed"]
        assert content["random_configurations"]["test_sm90_dglu.py"] == 200
        assert all(content["sanitizer"][tool].startswith("0 ") for tool in ("memcheck", "racecheck"))
    else:
        count, arm = ARMS[Path(record).name.removesuffix("_h200.json")]
        assert len(content["rows"]) == count and all(r["fused"] and r[arm] for r in content["rows"])


def test_the_blocks_of_every_framework_were_measured_on_these_sources() -> None:
    """And in none is opfuse slower than the framework's own grouped_mm."""
    content = json.loads((RESULTS / "moe_h200.json").read_text())
    assert content["source"] == sources() and not content["failed"]
    assert len(content["rows"]) == 30
    for row in content["rows"]:
        ours, theirs = (row["arms"][arm]["both_ms"] for arm in ("opfuse", "grouped_mm"))
        assert ours <= theirs, (row["framework"], row["shape"])


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"opfuse_{name}", ROOT / "tests" / "gpu" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    return _load("sm90_cases")


@pytest.fixture(scope="module")
def glu_cases() -> ModuleType:
    return _load("glu_cases")


OPTIONS: dict[str, tuple[Any, ...]] = {
    "ab_dtype": ("bf16", "fp16"),
    "b_major": ("k", "n"),
    "glu_layout": GLU_LAYOUTS,
    "act": ACTIVATIONS,
    "c_dtype": ("bf16", "fp16", "fp32"),
    "d_dtype": ("bf16", "fp16", "fp32", None),
    "alpha_exponent": (1, 2),
    "activation_dtype": ("bf16", "fp16", None),
    "dbias_dtype": ("bf16", "fp32", None),
    "q_row_dtype": ("e4m3", "e5m2", None),
    "q_col_dtype": ("e4m3", "e5m2", None),
    "schedule": tuple(dglu_tune.SHIPPED.values()),
}


@pytest.mark.parametrize("field", [f.name for f in fields(DgluConfig)])
def test_gpu_cases_have_every_option(cases: Any, field: str) -> None:
    """Each in a case of its own name, and among the 200 random configurations."""
    wanted = set(OPTIONS.get(field, (False, True)))
    for configs in (cases.CASES.values(), cases.RANDOM):
        seen = {getattr(c, field) for c in configs}
        assert wanted <= ({a.name for a in seen} if field == "act" else seen), field


def test_200_random_configurations_differ(cases: Any) -> None:
    assert len(set(cases.RANDOM)) == len(cases.RANDOM) == 200


GLU_OPTIONS: dict[str, tuple[Any, ...]] = {
    "ab_dtype": ("bf16", "fp16"),
    "b_major": ("k", "n"),
    "glu_layout": GLU_LAYOUTS,
    "act": ACTIVATIONS,
    "product_dtype": ("bf16", "fp16", None),
    "h_dtype": ("bf16", "fp16", None),
    "d_dtype": ("bf16", "fp16", None),
    "q_row_dtype": ("e4m3", "e5m2", None),
    "q_col_dtype": ("e4m3", "e5m2", None),
    "source_dtype": ("bf16", "fp16", None),
    "alpha_exponent": (1, 2),
    "bias_dtype": ("bf16", "fp16", "fp32", None),
    "schedule": tuple(glu_tune.SHIPPED.values()),
}


@pytest.mark.parametrize("field", [f.name for f in fields(GluConfig)])
def test_gpu_cases_of_the_forward_have_every_option(glu_cases: Any, field: str) -> None:
    """Each in a case of its own name, and among the random configurations."""
    wanted = set(GLU_OPTIONS.get(field, (False, True)))
    for configs in (glu_cases.CASES.values(), glu_cases.RANDOM):
        seen = {getattr(c, field) for c in configs}
        assert wanted <= ({a.name for a in seen} if field == "act" else seen), field


GEMM_OPTIONS: dict[str, tuple[Any, ...]] = {
    "ab_dtype": ("bf16", "fp16"),
    "b_major": ("k", "n"),
    "y_dtype": ("bf16", "fp16", "fp32"),
    "alpha_exponent": (1, 2),
    "bias_dtype": ("bf16", "fp16", "fp32", None),
    "schedule": tuple(gemm_tune.SHIPPED.values()),
}


@pytest.mark.parametrize("field", [f.name for f in fields(GemmConfig)])
def test_gpu_cases_of_the_plain_gemm_have_every_option(field: str) -> None:
    """Each in a case of its own name, and among the random configurations."""
    cases, wanted = _load("gemm_cases"), set(GEMM_OPTIONS.get(field, (False, True)))
    for configs in (cases.CASES.values(), cases.RANDOM):
        assert wanted <= {getattr(c, field) for c in configs}, field


WGRAD_OPTIONS: dict[str, tuple[Any, ...]] = {
    "ab_dtype": ("bf16", "fp16"),
    "dw_dtype": ("bf16", "fp16", "fp32"),
    "schedule": tuple(wgrad_tune.SHIPPED.values()),
}


@pytest.mark.parametrize("field", [f.name for f in fields(WgradConfig)])
def test_gpu_cases_of_the_weight_gradient_have_every_option(field: str) -> None:
    """Each in a case of its own name, and among the random configurations."""
    cases, wanted = _load("wgrad_cases"), set(WGRAD_OPTIONS.get(field, (False, True)))
    for configs in (cases.CASES.values(), cases.RANDOM):
        assert wanted <= {getattr(c, field) for c in configs}, field
