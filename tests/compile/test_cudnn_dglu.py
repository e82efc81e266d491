"""The BF16 dGLU adapter cross-compiles for sm_100a and sm_103a without a GPU, in each mode that it serves."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opfuse.kernels.cudnn import knobs

PROGRAM = Path(__file__).parent / "cross_compile_cudnn_dglu.py"
pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("cudnn") is None, reason="needs the extra `cuda`: cudnn-frontend is not installed"
    ),
]


USUAL = (
    "dense_swiglu",
    "dense_geglu_dbias",
    "discrete_swiglu",
    "discrete_n_major_geglu",
    "dense_n_major_activation_rounded",
)
VARIANTS = tuple(f"dense_swiglu_{k.name}" for k in knobs.BF16)


def compile_for(arch: str, folder: Path, *cases: str) -> dict[str, dict[str, Any]]:
    """What the program compiled, by case; all cases unless some are named."""
    command = [sys.executable, str(PROGRAM), str(folder), arch, *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return compile_for("sm_100a", tmp_path_factory.mktemp("ptx"), *USUAL)


@pytest.mark.parametrize("case", USUAL)
def test_compiles_for_sm100a(built: dict, case: str) -> None:
    result = built[case]
    assert result["reasons"] == []
    assert result["ptx"][".target sm_100a"] and result["ptx"]["tcgen05.mma"], result
    assert result["ptx"]["red.global.add.noftz.bf16x2"] == ("dbias" in case), "bf16 atomics belong to dbias alone"


@pytest.mark.slow
def test_variants_compile_for_sm100a(tmp_path: Path) -> None:
    found = compile_for("sm_100a", tmp_path, *VARIANTS)
    assert set(found) == set(VARIANTS)
    for name, result in found.items():
        assert result["reasons"] == [], name
        assert result["ptx"][".target sm_100a"] and result["ptx"]["tcgen05.mma"], name


def test_compiles_for_sm103a(tmp_path: Path) -> None:
    result = compile_for("sm_103a", tmp_path, "dense_geglu_dbias")["dense_geglu_dbias"]
    assert result["reasons"] == [] and all(result["ptx"].values()), result


def test_workspace_has_what_the_graph_does_not_give(built: dict) -> None:
    """768 rows, 3 experts: 128 of scratch (descriptors of 3 experts when discrete), ones, pointers, all in 128s."""
    ones = 768 * 4
    assert built["dense_geglu_dbias"]["workspace"] == 128
    assert built["dense_swiglu"]["workspace"] == 128 + ones
    assert built["discrete_swiglu"]["workspace"] == 3 * 128 + ones + 128
