"""Every kernel of cudnn-frontend that the registry names cross-compiles for sm_100a from a graph, without a GPU.

One configuration for each kernel, activation, family of data types and weight mode; the other outputs and knobs, and
the other arches, take longer and are marked slow.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from opfuse.kernels.registry import KERNELS

PROGRAM = Path(__file__).parent / "cross_compile_cudnn.py"
PROCESSES = 2
OTHER_ARCHES = {"sm_103a": "sm103", "sm_107a": "sm107"}
pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("cudnn") is None, reason="needs the extra `cuda`: cudnn-frontend is not installed"
    ),
]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("cross_compile_cudnn", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES: dict[str, dict[str, Any]] = load().CASES
USUAL = [name for name, case in CASES.items() if not {"extras", "major", "deterministic", "variant"} & set(case)]
UNUSUAL = [name for name in CASES if name not in USUAL]


def compile_for(arch: str, folder: Path, cases: list[str]) -> dict[str, dict[str, Any]]:
    """What the program compiled, by case, in a few processes at once."""

    def compile_some(index: int) -> dict[str, dict[str, Any]]:
        some = cases[index::PROCESSES]
        if not some:
            return {}
        (into := folder / str(index)).mkdir()
        command = [sys.executable, str(PROGRAM), str(into), arch, *some]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return found

    with ThreadPoolExecutor(PROCESSES) as pool:
        return {name: result for part in pool.map(compile_some, range(PROCESSES)) for name, result in part.items()}


def check(result: dict[str, Any], arch: str) -> None:
    assert result["reasons"] == []
    assert result["left"] == 0, "nodes stayed outside the fusion"
    assert result["ptx"] == {f".target {arch}": True, "tcgen05.mma": True}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return compile_for("sm_100a", tmp_path_factory.mktemp("ptx"), USUAL)


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return compile_for("sm_100a", tmp_path_factory.mktemp("ptx"), UNUSUAL)


@pytest.mark.parametrize("case", USUAL)
def test_compiles_for_sm100a(usual: dict, case: str) -> None:
    check(usual[case], "sm_100a")


@pytest.mark.slow
@pytest.mark.parametrize("case", UNUSUAL)
def test_other_outputs_and_knobs_compile_for_sm100a(unusual: dict, case: str) -> None:
    check(unusual[case], "sm_100a")


@pytest.mark.slow
@pytest.mark.parametrize("arch", OTHER_ARCHES)
def test_other_arches_compile(tmp_path: Path, arch: str) -> None:
    """Each kernel that serves the arch, once: MXFP8 where it has it, since sm107 runs nothing else."""
    serving = [k.id for k in KERNELS if k.id.startswith("cudnn.") and OTHER_ARCHES[arch] in str(k.arches).split(", ")]
    chosen: dict[tuple[str, bool], str] = {}
    for name, case in CASES.items():
        if case["kernel"] in serving and case["family"] in ("mxfp8", "bf16") and case["act"] != "situglu":
            chosen.setdefault((case["kernel"], case["discrete"]), name)
    assert {kernel for kernel, _ in chosen} == set(serving) - {"cudnn.grouped_gemm_dglu.bf16"}
    for result in compile_for(arch, tmp_path, list(chosen.values())).values():
        check(result, arch)


def test_the_cases_cover_every_kernel_activation_and_weight_mode() -> None:
    covered = {(c["kernel"], c["act"], c["discrete"]) for c in CASES.values()}
    kernels = {k.id for k in KERNELS if k.id.startswith("cudnn.")} - {"cudnn.grouped_gemm_dglu.bf16"}
    assert {kernel for kernel, _, _ in covered} == kernels
    for kernel in (k for k in kernels if "glu" in k):
        acts = ("swiglu", "geglu", "situglu") if "block_scaled" in kernel else ("swiglu", "geglu")
        modes = (True,) if "discrete" in kernel else (False, True)
        assert {(kernel, a, m) for a in acts for m in modes} <= covered
