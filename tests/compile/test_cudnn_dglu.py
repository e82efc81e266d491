"""The BF16 dGLU adapter cross-compiles for sm_100a without a GPU, in each mode that it serves."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "cross_compile_cudnn_dglu.py"
pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("cudnn") is None, reason="needs the extra `cuda`: cudnn-frontend is not installed"
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the program compiled, by case."""
    folder = tmp_path_factory.mktemp("ptx")
    done = subprocess.run([sys.executable, str(PROGRAM), str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "case",
    [
        "dense_swiglu",
        "dense_geglu_dbias",
        "discrete_swiglu",
        "discrete_n_major_geglu",
        "dense_n_major_activation_rounded",
    ],
)
def test_compiles_for_sm100a(built: dict, case: str) -> None:
    result = built[case]
    assert result["reasons"] == []
    assert result["ptx"][".target sm_100a"] and result["ptx"]["tcgen05.mma"], result
    assert result["ptx"]["red.global.add.noftz.bf16x2"] == ("dbias" in case), "bf16 atomics belong to dbias alone"


def test_workspace_has_what_the_graph_does_not_give(built: dict) -> None:
    """768 rows, 3 experts: 128 of scratch (descriptors of 3 experts when discrete), ones, pointers, all in 128s."""
    ones = 768 * 4
    assert built["dense_geglu_dbias"]["workspace"] == 128
    assert built["dense_swiglu"]["workspace"] == 128 + ones
    assert built["discrete_swiglu"]["workspace"] == 3 * 128 + ones + 128
