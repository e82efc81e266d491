"""The Hopper forward kernel as the table ships it, cross-compiled: wgmma there, no register spills, shared memory
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
from opfuse.kernels.sm90 import glu_tune
from opfuse.kernels.sm90.config import SMEM_LIMIT, Activation, Schedule
from opfuse.kernels.sm90.glu_config import GluConfig, illegal, smem_bytes

BASE = GluConfig(product_dtype="bf16", h_dtype="bf16", has_prob=True)
CODES = replace(BASE, d_dtype=None, q_row_dtype="e4m3", q_col_dtype="e4m3")
SCRIPT = Path(__file__).with_name("compile_sm90_glu.py")
# Options, and the (N, K) whose schedule the table picks.
SHIPPED: dict[str, tuple[GluConfig, int, int]] = {
    "wide": (BASE, 1536, 4096),
    "narrow": (BASE, 1024, 2048),
    "activation alone": (GluConfig(), 768, 2048),
    "rounded, not written": (replace(BASE, h_dtype=None), 768, 2048),
    "written, not rounded": (replace(BASE, product_dtype=None, has_alpha=True), 768, 2048),
    "geglu": (replace(BASE, act=Activation("geglu"), has_alpha=True), 2880, 2880),
    "situglu concatenated": (replace(BASE, act=Activation("situglu"), glu_layout="concatenated"), 1536, 4096),
    "concatenated n-major": (replace(BASE, glu_layout="concatenated", b_major="n"), 1536, 4096),
    "apart": (replace(BASE, glu_layout="concatenated", separate_up=True), 1536, 4096),
    "apart n-major": (replace(BASE, glu_layout="concatenated", separate_up=True, b_major="n"), 1024, 2048),
    "interleaved1": (replace(BASE, glu_layout="interleaved1", act=Activation("geglu")), 768, 2048),
    "n-major": (replace(BASE, b_major="n"), 1536, 4096),
    "discrete": (replace(BASE, discrete_b=True, glu_layout="concatenated"), 1536, 4096),
    "fp16": (replace(BASE, ab_dtype="fp16", product_dtype="fp16", h_dtype="fp16", d_dtype="fp16"), 1536, 4096),
    "bias": (replace(BASE, bias_dtype="bf16", act=Activation("geglu"), has_alpha=True), 2880, 2880),
    "codes": (CODES, 1536, 4096),
    "codes and d": (replace(CODES, d_dtype="bf16", source_dtype="bf16"), 768, 2048),
    "codes and d, of FLOAT": (replace(CODES, d_dtype="bf16", act=Activation("situglu"), has_alpha=True), 768, 2048),
    "codes alone, plain": (replace(CODES, h_dtype=None, sf_swizzled=False, glu_layout="concatenated"), 1536, 4096),
    "codes of rows and d": (replace(CODES, q_col_dtype=None, d_dtype="bf16", source_dtype="bf16"), 1536, 4096),
    "codes, apart": (replace(CODES, glu_layout="concatenated", separate_up=True, b_major="n"), 1024, 2048),
    "codes, discrete, bias": (
        replace(CODES, discrete_b=True, bias_dtype="bf16", act=Activation("geglu"), has_alpha=True),
        2880,
        2880,
    ),
    "bias interleaved1": (replace(BASE, bias_dtype="fp32", glu_layout="interleaved1"), 2880, 2880),
}
# Random legal configurations, any schedule: what `illegal` accepts compiles.
SEEDS = range(int(os.environ.get("OPFUSE_RANDOM_COMPILES", "2")))


def random_configuration(seed: int) -> GluConfig:
    r = random.Random(seed)
    while True:
        pick = r.choice
        config = GluConfig(
            ab_dtype=pick(["bf16", "fp16"]), b_major=pick(["k", "n"]), discrete_b=pick([False, True]),
            glu_layout=pick(["interleaved32", "concatenated", "interleaved1"]),
            act=Activation(pick(["swiglu", "geglu", "situglu"])), product_dtype=pick([None, "bf16", "fp16"]),
            h_dtype=pick([None, "bf16", "fp16"]), d_dtype=pick(["bf16", "fp16"]), has_prob=pick([False, True]),
            has_alpha=pick([False, True]), alpha_exponent=pick([1, 2]),
            bias_dtype=pick([None, None, "bf16", "fp16", "fp32"]),
            schedule=Schedule(
                tile_m=pick([64, 128, 256]), tile_n=pick([64, 96, 128, 192, 256]), pingpong=pick([False, True]),
                cluster_m=pick([1, 2]), cluster_n=pick([1, 2]), ab_stages=pick([2, 3, 4, 5]), ring_chunks=pick([2, 4]),
                band=pick([4, 8, 16]),
            ),
        )  # fmt: skip
        if r.random() < 0.5:
            config = replace(config, q_row_dtype=pick([None, "e4m3"]), q_col_dtype=pick([None, "e5m2"]),
                             d_dtype=pick([None, config.d_dtype]), sf_swizzled=pick([False, True]))  # fmt: skip
        if not illegal(config):
            return config


def configuration(name: str) -> GluConfig:
    if name.startswith("random "):
        return random_configuration(int(name.split()[1]))
    config, n, k = SHIPPED[name]
    return glu_tune.schedule_for(config, n=n, k=k)


NAMES = [*SHIPPED, *(f"random {seed}" for seed in SEEDS)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Both halves of the configurations in two processes at once."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    running = []
    for half in (NAMES[::2], NAMES[1::2]):
        folder = tmp_path_factory.mktemp("cubins")
        env = os.environ | {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(folder)}
        process = subprocess.Popen([sys.executable, str(SCRIPT)], env=env, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(json.dumps([configuration(name).as_dict() for name in half]))
        process.stdin.close()
        running.append((half, process))
    out: dict[str, dict] = {}
    for half, process in running:
        assert process.stdout is not None
        text = process.stdout.read()
        assert process.wait(timeout=300) == 0
        out |= dict(zip(half, json.loads(text.splitlines()[-1]), strict=True))
    return out


@pytest.mark.compile
@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_a_gpu(results, name):
    assert results[name].get("bytes", 0) > 10_000, results[name]


@pytest.mark.compile
@pytest.mark.parametrize("name", SHIPPED)
def test_machine_code(results, name):
    counts = results[name]
    if "HGMMA" not in counts:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    config = configuration(name)
    assert counts["HGMMA"] >= 8 and counts["UTMALDG"] >= 2
    assert counts["UTMASTG"] >= 2 * (bool(config.h_dtype) + bool(config.d_dtype))
    assert counts["STL"] == counts["LDL"] == 0, "registers spill"


@pytest.mark.parametrize("name", SHIPPED)
def test_fits_shared_memory(name):
    """C85: tracing the kernel asserts that the model covers the structure."""
    assert smem_bytes(configuration(name)) <= SMEM_LIMIT
    assert not illegal(configuration(name))


def test_shared_memory_counts_every_part():
    s = glu_tune.P192
    chunks = 2 * s.ring_chunks
    assert smem_bytes(replace(BASE, schedule=s)) == 4 * (128 + 192) * 64 * 2 + chunks * (8192 + 4096) + 1024
    assert smem_bytes(GluConfig(schedule=s)) == 4 * (128 + 192) * 64 * 2 + chunks * 4096 + 1024
    codes = replace(CODES, schedule=glu_tune.P128)
    assert smem_bytes(codes) == 5 * (128 + 128) * 64 * 2 + 4 * 8192 + 8 * 4096 + 1024
    assert smem_bytes(replace(codes, q_col_dtype=None)) == smem_bytes(codes) - 8 * 2048


@pytest.mark.parametrize("n, k", [*itertools.product([32, 256, 768, 1024, 1536, 2048, 2880, 14336], [64, 2048, 7168])])
def test_the_table_always_picks_a_legal_schedule(n, k):
    for layout, h, bias in itertools.product(
        ("interleaved32", "concatenated", "interleaved1"), (None, "bf16"), (None, "bf16")
    ):
        config = replace(BASE, glu_layout=layout, h_dtype=h, bias_dtype=bias)
        if layout != "interleaved1" and n % 64 == 0:
            for coded in (replace(config, q_col_dtype="e4m3"), replace(config, d_dtype=None, q_row_dtype="e4m3")):
                assert illegal(glu_tune.schedule_for(coded, n=n, k=k), n=n, k=k) == []
        chosen = glu_tune.schedule_for(config, n=n, k=k)
        assert illegal(chosen, n=n, k=k) == []
        assert glu_tune.candidates(config, n=n, k=k)[0] == chosen.schedule


@pytest.mark.parametrize(
    "change, word",
    [
        ({"ab_dtype": "fp32"}, "ab_dtype"),
        ({"b_major": "m"}, "b_major"),
        ({"glu_layout": "interleaved16"}, "glu_layout"),
        ({"h_dtype": "fp32"}, "h_dtype"),
        ({"separate_up": True}, "apart"),
        ({"separate_up": True, "glu_layout": "concatenated", "discrete_b": True}, "apart"),
        ({"d_dtype": "fp32"}, "d_dtype"),
        ({"d_dtype": None}, "no output of the activation"),
        ({"source_dtype": "bf16"}, "source_dtype without codes"),
        ({"q_row_dtype": "e2m1"}, "q_row_dtype"),
        ({"q_row_dtype": "e4m3", "source_dtype": "fp16"}, "codes of the activation as fp16"),
        ({"q_row_dtype": "e4m3", "glu_layout": "interleaved1"}, "interleaved1 has 1"),
        ({"q_row_dtype": "e4m3", "schedule": glu_tune.P192}, "multiple of 128"),
        ({"q_col_dtype": "e4m3", "schedule": glu_tune.P128_N}, "cluster_n 1"),
        ({"bias_dtype": "e4m3"}, "bias_dtype"),
        ({"product_dtype": "fp16"}, "the product rounds to fp16"),
        ({"alpha_exponent": 3}, "alpha_exponent"),
        ({"act": Activation("relu")}, "act is 'relu'"),
        ({"act": Activation("situglu", beta2=0.0)}, "beta2"),
        ({"schedule": Schedule(tile_n=96)}, "multiple of 64"),
        ({"schedule": Schedule(tile_n=256)}, "256 accumulators"),
        ({"schedule": Schedule(cluster_m=2, cluster_n=2)}, "cluster 2x2"),
        ({"schedule": Schedule(ab_stages=7)}, "bytes of shared memory"),
    ],
)
def test_declines_name_what_is_wrong(change, word):
    assert any(word in reason for reason in illegal(replace(BASE, **change)))


def test_every_reason_is_given():
    reasons = illegal(replace(BASE, ab_dtype="fp32", h_dtype="e4m3", schedule=Schedule(tile_n=100)), n=40, k=12)
    assert len(reasons) == 6, "the written product of another type than the rounded one counts"
    assert "64 columns" in illegal(replace(CODES, schedule=glu_tune.P128), n=96)[0]
    assert "N is 0" in illegal(BASE, n=0)[0] and "K is 0" in illegal(BASE, k=0)[0]


def test_an_illegal_configuration_is_not_compiled():
    from opfuse.kernels.sm90 import compiling, glu_host

    with pytest.raises(compiling.UnsupportedConfig, match=r"ab_dtype is 'fp32'.*cluster 2x2"):
        glu_host.FUNCTIONS.compile(replace(BASE, ab_dtype="fp32", schedule=Schedule(cluster_m=2, cluster_n=2)))


def test_what_the_compiler_fails_on_is_an_unsupported_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that does not compile is then one that policy ALL leaves out."""
    common = pytest.importorskip("cutlass.base_dsl.common", reason="needs nvidia-cutlass-dsl")
    from opfuse.kernels.sm90 import compiling, glu_entry, glu_host

    def fails(config: GluConfig) -> None:
        raise common.DSLRuntimeError("too many registers")

    monkeypatch.setattr(glu_entry, "compile_entry", fails)
    with pytest.raises(compiling.UnsupportedConfig, match=r"the compiler fails.*too many registers"):
        glu_host.FUNCTIONS.compile(GluConfig())
