"""The plain Hopper grouped GEMM as the table ships it, cross-compiled: wgmma there, no register spills, shared memory
within an SM; and its legality, in plain Python."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from opfuse.kernels.sm90 import gemm_tune
from opfuse.kernels.sm90.config import SMEM_LIMIT, Schedule
from opfuse.kernels.sm90.gemm_config import GemmConfig, illegal, smem_bytes

BASE = GemmConfig(schedule=gemm_tune.P192)
SCRIPT = Path(__file__).with_name("compile_sm90_gemm.py")
SHIPPED: dict[str, GemmConfig] = {
    **{name: replace(BASE, schedule=schedule) for name, schedule in gemm_tune.SHIPPED.items()},
    "n-major": replace(BASE, b_major="n"),
    "discrete": replace(BASE, discrete_b=True),
    "fp16": replace(BASE, ab_dtype="fp16", y_dtype="fp16"),
    "alpha and bias": replace(BASE, has_alpha=True, bias_dtype="bf16"),
    "fp32 bias, squared alpha": replace(BASE, has_alpha=True, alpha_exponent=2, bias_dtype="fp32"),
    "float": replace(BASE, y_dtype="fp32"),
    "float bias": replace(BASE, y_dtype="fp32", bias_dtype="fp32", has_alpha=True),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Every configuration, compiled in one process: 2 s each."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    folder = tmp_path_factory.mktemp("cubins")
    env = os.environ | {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(folder)}
    asked = json.dumps([config.as_dict() for config in SHIPPED.values()])
    process = subprocess.run([sys.executable, str(SCRIPT)], env=env, input=asked, stdout=subprocess.PIPE, text=True,
                             timeout=300, check=True)  # fmt: skip
    return dict(zip(SHIPPED, json.loads(process.stdout.splitlines()[-1]), strict=True))


@pytest.mark.compile
@pytest.mark.parametrize("name", SHIPPED)
def test_machine_code(results, name):
    counts = results[name]
    assert counts.get("bytes", 0) > 10_000, counts
    if "HGMMA" not in counts:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    assert counts["HGMMA"] >= 8 and counts["UTMALDG"] >= 2
    assert (counts["UTMASTG"] >= 4) is SHIPPED[name].through_ring
    assert counts["STL"] == counts["LDL"] == 0, "registers spill"


@pytest.mark.parametrize("name", SHIPPED)
def test_fits_shared_memory(name):
    """C85: tracing the kernel asserts that the model covers the structure."""
    assert smem_bytes(SHIPPED[name]) <= SMEM_LIMIT
    assert not illegal(SHIPPED[name])


def test_shared_memory_counts_every_part():
    operands = 4 * (128 + 192) * 64 * 2
    assert smem_bytes(BASE) == operands + 2 * BASE.schedule.ring_chunks * 8192 + 1024
    assert smem_bytes(replace(BASE, y_dtype="fp32")) == operands + 1024


@pytest.mark.parametrize("n, k", [*itertools.product([8, 256, 1536, 2048, 2880, 7168], [8, 64, 768, 2048, 14336])])
def test_the_table_always_picks_a_legal_schedule(n, k):
    for y_dtype, bias in itertools.product(("bf16", "fp32"), (None, "bf16")):
        config = replace(BASE, y_dtype=y_dtype, bias_dtype=bias)
        chosen = gemm_tune.schedule_for(config, n=n, k=k)
        assert illegal(chosen, n=n, k=k) == []
        assert gemm_tune.candidates(config, n=n, k=k)[0] == chosen.schedule


@pytest.mark.parametrize(
    "change, word",
    [
        ({"ab_dtype": "fp32"}, "ab_dtype"),
        ({"b_major": "m"}, "b_major"),
        ({"y_dtype": "e4m3"}, "y_dtype"),
        ({"bias_dtype": "e4m3"}, "bias_dtype"),
        ({"alpha_exponent": 3}, "alpha_exponent"),
        ({"schedule": Schedule(tile_n=96)}, "64 columns at a time"),
        ({"schedule": Schedule(tile_n=256)}, "256 accumulators"),
        ({"schedule": Schedule(cluster_m=2, cluster_n=2)}, "cluster 2x2"),
        ({"schedule": Schedule(ab_stages=7)}, "bytes of shared memory"),
    ],
)
def test_declines_name_what_is_wrong(change, word):
    assert any(word in reason for reason in illegal(replace(BASE, **change)))


def test_every_reason_is_given():
    reasons = illegal(replace(BASE, ab_dtype="fp32", y_dtype="e4m3", schedule=Schedule(tile_n=100)), n=36, k=12)
    assert len(reasons) == 5
    assert "N is 0" in illegal(BASE, n=0)[0] and "K is 0" in illegal(BASE, k=0)[0]
