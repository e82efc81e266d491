"""The disk cache with the real compiler: one compile for every process, from the table of kernels to `opfuse cache`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None, reason="needs the extra `cuda`: nvidia-cutlass-dsl is missing"
    ),
]

BUILD = """
import warnings
from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.hopper.grouped_dglu import kernel_cache
from opfuse.kernels.registry import KERNELS
from opfuse.kernels.sm90 import dglu_host

g = Graph(arch="sm90")
m = g.symbol("M")
r = g.grouped_matmul(g.tensor("a", (m, 64)), g.tensor("b", (2, 64, 64)), g.tensor("o", (2,), data_type=DataType.INT32))
d, _ = g.glu_backward(r, g.tensor("c", (m, 128), glu_layout=GluLayout.interleaved(32)), act="swiglu")
d.set_output(True)
(step,) = make_plan(g.operation_graph(), ARCHES["sm90"]).steps
entry = next(k for k in KERNELS if k.id == step.kernel)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kernels = [entry.build(step.match.problem, "cpu") for _ in range(2)]
assert callable(dglu_host.FUNCTIONS.of(kernels[0].config)) and kernels[0].config == kernels[1].config
print(kernel_cache().compiles, [w.category.__name__ for w in caught if w.category.__name__ == "CacheWarning"])
"""
COMPILED, LOADED = "1 []", "0 []"


def start(program: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OPFUSE_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, *program], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip


def said(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    return out.strip()


def build(folder: Path) -> str:
    """What one process says: how often it compiled, and how the cache warned."""
    return said(start(["-c", BUILD], folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """C72: two processes start on an empty folder together; one compiles, both have the kernel."""
    made = tmp_path_factory.mktemp("kernels")
    racing = [start(["-c", BUILD], made) for _ in range(2)]
    assert sorted(said(p) for p in racing) == [LOADED, COMPILED]
    return made


def test_c72_c74_what_one_process_compiled_every_other_one_loads(folder: Path) -> None:
    assert build(folder) == LOADED
    objects = list(folder.glob("*.o"))
    assert len(objects) == 1 and objects[0].stat().st_size > 10_000


def test_a_damaged_object_is_compiled_again_with_one_warning(folder: Path) -> None:
    (entry,) = folder.glob("*.o")
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    assert build(folder) == "1 ['CacheWarning']"
    assert entry.stat().st_size > len(whole) // 2


def test_the_command_counts_and_clears(folder: Path) -> None:
    def command(*arguments: str) -> str:
        return said(start(["-m", "opfuse.graph_ops.cli", "cache", *arguments], folder))

    first, second = command("info").splitlines()
    assert first.startswith(f"{folder}: 1 compiled kernels, ") and second == "  sm90.grouped_gemm_dglu: 1"
    assert command("clear") == f"{folder}: 1 compiled kernels removed"
    assert list(folder.glob("*.o")) == []
