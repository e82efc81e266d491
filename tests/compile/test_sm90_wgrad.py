"""The Hopper weight gradient as the table ships it, cross-compiled: wgmma there, no register spills, shared memory
within an SM; and its legality, in plain Python."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from opfuse.kernels.sm90 import wgrad_tune
from opfuse.kernels.sm90.config import SMEM_LIMIT, Schedule
from opfuse.kernels.sm90.wgrad_config import WgradConfig, illegal, smem_bytes

BASE = WgradConfig()
FLOATS = WgradConfig(dw_dtype="fp32", accumulate=True)
SCRIPT = Path(__file__).with_name("compile_sm90_wgrad.py")
SHIPPED: dict[str, WgradConfig] = {
    **{name: replace(BASE, schedule=schedule) for name, schedule in wgrad_tune.SHIPPED.items()},
    **{f"{name}, float32": replace(FLOATS, schedule=schedule) for name, schedule in wgrad_tune.SHIPPED.items()},
    "fp16": WgradConfig("fp16", "fp16", schedule=wgrad_tune.P192),
}
# Random legal configurations, any schedule: what `illegal` accepts compiles.
SEEDS = range(int(os.environ.get("OPFUSE_RANDOM_COMPILES", "2")))


def random_configuration(seed: int) -> WgradConfig:
    r = random.Random(seed)
    while True:
        pick = r.choice
        config = WgradConfig(
            ab_dtype=pick(["bf16", "fp16"]), dw_dtype=pick(["bf16", "fp16", "fp32"]), accumulate=pick([False, True]),
            schedule=Schedule(
                tile_m=pick([64, 128, 256]), tile_n=pick([64, 96, 128, 192, 256]), pingpong=pick([False, True]),
                cluster_m=pick([1, 2]), cluster_n=pick([1, 2]), ab_stages=pick([2, 3, 4, 5]), ring_chunks=pick([2, 4]),
                band=pick([1, 4, 8]),
            ),
        )  # fmt: skip
        if not illegal(config):
            return config


def configuration(name: str) -> WgradConfig:
    return random_configuration(int(name.split()[1])) if name.startswith("random ") else SHIPPED[name]


NAMES = [*SHIPPED, *(f"random {seed}" for seed in SEEDS)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    folder = tmp_path_factory.mktemp("cubins")
    env = os.environ | {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(folder)}
    given = json.dumps([configuration(name).as_dict() for name in NAMES])
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, input=given, capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(NAMES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.compile
@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_a_gpu(results, name):
    assert results[name]["bytes"] > 10_000


@pytest.mark.compile
@pytest.mark.parametrize("name", SHIPPED)
def test_machine_code(results, name):
    counts = results[name]
    if "HGMMA" not in counts:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    stores = {True: "UTMAREDG", False: "UTMASTG"}
    accumulates = configuration(name).accumulate
    assert counts["HGMMA"] >= 8 and counts["UTMALDG"] >= 2
    assert counts[stores[accumulates]] >= 4 and counts[stores[not accumulates]] == 0
    assert counts["STL"] == counts["LDL"] == 0, "registers spill"


@pytest.mark.parametrize("name", SHIPPED)
def test_fits_shared_memory(name):
    """Tracing the kernel asserts that the model covers the structure."""
    assert smem_bytes(configuration(name)) <= SMEM_LIMIT
    assert not illegal(configuration(name))


def test_shared_memory_counts_every_part():
    s = wgrad_tune.P192
    assert smem_bytes(replace(BASE, schedule=s)) == 4 * (128 + 192) * 64 * 2 + 2 * s.ring_chunks * 8192 + 1024


@pytest.mark.parametrize("n, k", [*itertools.product([8, 256, 768, 1536, 2048, 2880, 28672], [64, 2048, 7168])])
def test_the_table_always_picks_a_legal_schedule(n, k):
    for config, experts in itertools.product((BASE, FLOATS), (1, 16, 1024)):
        chosen = wgrad_tune.schedule_for(config, n=n, k=k, experts=experts)
        assert illegal(chosen, n=n, k=k) == []
        assert wgrad_tune.candidates(config, n=n, k=k, experts=experts)[0] == chosen.schedule


@pytest.mark.parametrize(
    "n, k, experts, chosen, waves",
    [
        (2048, 1536, 128, "p128_n", 187),
        (2880, 5760, 16, "p192", 84),
        (256, 1536, 128, "p128_n", 24),
        (64, 8, 1, "p128_n", 1),
    ],
)
def test_the_table_counts_waves(n, k, experts, chosen, waves):
    schedule = wgrad_tune.schedule_for(BASE, n=n, k=k, experts=experts).schedule
    assert schedule == wgrad_tune.SHIPPED[chosen]
    assert wgrad_tune.waves(schedule, n=n, k=k, experts=experts) == waves


@pytest.mark.parametrize(
    "change, word",
    [
        ({"ab_dtype": "fp32"}, "ab_dtype"),
        ({"dw_dtype": "e4m3"}, "dw_dtype"),
        ({"accumulate": True}, "accumulate adds in float32"),
        ({"schedule": Schedule(tile_n=96)}, "64 columns at a time"),
        ({"schedule": Schedule(tile_n=256)}, "256 accumulators"),
        ({"schedule": Schedule(cluster_m=2, cluster_n=2)}, "cluster 2x2"),
        ({"schedule": Schedule(ab_stages=7)}, "bytes of shared memory"),
    ],
)
def test_declines_name_what_is_wrong(change, word):
    assert any(word in reason for reason in illegal(replace(BASE, **change)))


def test_every_reason_is_given():
    reasons = illegal(replace(BASE, ab_dtype="fp32", dw_dtype="e4m3", schedule=Schedule(tile_n=100)), n=44, k=0)
    assert len(reasons) == 5 and "K is 0" in reasons[3] and "N is 44" in reasons[4]


def test_an_illegal_configuration_is_not_compiled():
    from opfuse.kernels.sm90 import compiling, wgrad_host

    with pytest.raises(compiling.UnsupportedConfig, match=r"ab_dtype is 'fp32'.*cluster 2x2"):
        wgrad_host.FUNCTIONS.compile(replace(BASE, ab_dtype="fp32", schedule=Schedule(cluster_m=2, cluster_n=2)))
