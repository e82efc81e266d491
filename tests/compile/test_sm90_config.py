"""Legality, workspace and schedule of the Hopper kernel: plain Python, neither torch nor the DSL."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from opfuse.kernels.sm90 import dglu_tune
from opfuse.kernels.sm90.config import SMEM_LIMIT, Activation, Schedule, padded_bytes
from opfuse.kernels.sm90.dglu_config import DgluConfig, illegal, scratch_tensors, smem_bytes

BASE = DgluConfig(has_prob=True, has_dprob=True)


def test_import_loads_nothing_heavy():
    code = (
        "import sys; from opfuse.kernels.sm90 import dglu_tune, glu_tune; print({'torch', 'cutlass'} & {*sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.parametrize("schedule", dglu_tune.SHIPPED.values(), ids=dglu_tune.SHIPPED)
def test_shipped_schedules_are_legal(schedule):
    assert illegal(replace(BASE, schedule=schedule)) == []


@pytest.mark.parametrize("n, k", [*itertools.product([32, 256, 768, 1024, 1536, 2048, 2880, 14336], [64, 2048, 7168])])
@pytest.mark.parametrize("layout", ["interleaved32", "concatenated", "interleaved1"])
def test_the_table_always_picks_a_legal_schedule(n, k, layout):
    for d, row, col, dbias in itertools.product([None, "bf16", "fp32"], [None, "e4m3"], [None, "e5m2"], [None, "bf16"]):
        config = replace(BASE, glu_layout=layout, d_dtype=d, q_row_dtype=row, q_col_dtype=col, dbias_dtype=dbias)
        if illegal(config):
            continue  # the request itself is declined, whatever the schedule
        chosen = dglu_tune.schedule_for(config, n=n, k=k)
        assert illegal(chosen, n=n, k=k) == []
        assert dglu_tune.candidates(config, n=n, k=k)[0] == chosen.schedule


@pytest.mark.parametrize(
    "change, word",
    [
        ({"ab_dtype": "fp32"}, "ab_dtype"),
        ({"b_major": "m"}, "b_major"),
        ({"glu_layout": "interleaved16"}, "glu_layout"),
        ({"c_dtype": "e4m3"}, "c_dtype"),
        ({"d_dtype": "e4m3"}, "d_dtype"),
        ({"d_dtype": None}, "no gradient output"),
        ({"activation_dtype": "fp32"}, "activation_dtype"),
        ({"dbias_dtype": "fp16"}, "dbias_dtype"),
        ({"q_row_dtype": "e2m1"}, "q_row_dtype"),
        ({"q_row_dtype": "e4m3", "glu_layout": "interleaved1"}, "interleaved1"),
        ({"q_col_dtype": "e4m3", "schedule": dglu_tune.C256}, "ping-pong"),
        ({"alpha_exponent": 3}, "alpha_exponent"),
        ({"act": Activation("relu")}, "act is 'relu'"),
        ({"act": Activation("situglu", beta1=0.0)}, "beta1"),
        ({"schedule": Schedule(tile_n=100)}, "tile_n is 100"),
        ({"schedule": Schedule(tile_m=192)}, "tile_m is 192"),
        ({"schedule": Schedule(tile_n=256)}, "256 accumulators"),
        ({"schedule": Schedule(cluster_m=2, cluster_n=2)}, "cluster 2x2"),
        ({"schedule": Schedule(ab_stages=1)}, "ab_stages is 1"),
        ({"schedule": Schedule(ring_chunks=3)}, "ring_chunks is 3"),
        ({"schedule": Schedule(ab_stages=7)}, "bytes of shared memory"),
    ],
)
def test_declines_name_what_is_wrong(change, word):
    assert any(word in reason for reason in illegal(replace(BASE, **change)))


def test_every_reason_is_given():
    reasons = illegal(replace(BASE, ab_dtype="fp32", c_dtype="e4m3", schedule=Schedule(tile_n=100)), n=100, k=12)
    assert len(reasons) == 5


def test_an_illegal_configuration_is_not_compiled():
    """Declined with every reason, before the DSL is imported."""
    from opfuse.kernels.sm90 import compiling, dglu_host

    with pytest.raises(compiling.UnsupportedConfig, match=r"ab_dtype is 'fp32'.*cluster 2x2"):
        dglu_host.FUNCTIONS.compile(replace(BASE, ab_dtype="fp32", schedule=Schedule(cluster_m=2, cluster_n=2)))


def test_problem_sizes():
    assert "N is 40" in illegal(BASE, n=40)[0]
    assert "K is 12" in illegal(BASE, k=12)[0]
    assert "K is 0" in illegal(BASE, k=0)[0]


def test_shared_memory_counts_every_part():
    """C85: stages, rings, scratch and barriers, against the limit."""
    s = dglu_tune.P192
    assert smem_bytes(replace(BASE, schedule=s)) == 4 * (128 + 192) * 64 * 2 + 2 * 4 * 64 * 64 * 2 + 1024
    assert smem_bytes(replace(BASE, schedule=s, dbias_dtype="fp32")) - smem_bytes(replace(BASE, schedule=s)) == 2048
    assert all(smem_bytes(replace(BASE, schedule=s)) <= SMEM_LIMIT for s in dglu_tune.SHIPPED.values())


@pytest.mark.parametrize("sizes", [[128], [0, 1, 300], [1] * 7, [255, 257, 0, 0, 256]])
@pytest.mark.parametrize("schedule", dglu_tune.SHIPPED.values(), ids=dglu_tune.SHIPPED)
def test_workspace_holds_a_partial_for_every_tile(sizes, schedule):
    """However the rows are split, tiles fit in the slots that L and M alone give."""
    config = replace(BASE, schedule=schedule, dbias_dtype="fp32", has_amax=True)
    step = schedule.tile_m * schedule.cluster_m
    tiles = sum(-(-n // step) * schedule.cluster_m for n in sizes)
    shapes = {name: (rows, columns) for name, rows, columns in scratch_tensors(config, len(sizes), sum(sizes), 384)}
    assert shapes["amax"][0] >= tiles
    assert shapes["dbias"] == (shapes["amax"][0] * (1 if schedule.pingpong else 2), 768)
    assert shapes["dprob"] == (-(-384 // schedule.tile_n), sum(sizes))


def test_workspace_sizes_pass_two_to_the_31():
    """C61: Python integers on the host; the kernel computes the same in 64 bits."""
    parts = scratch_tensors(replace(BASE, dbias_dtype="fp32"), 1024, 2**24, 2**15)
    assert sum(padded_bytes(rows, columns) for _, rows, columns in parts) > 2**34


def test_padding_keeps_alignment():
    assert [padded_bytes(1, n) for n in (1, 64, 65)] == [256, 256, 512]


def test_a_configuration_is_its_own_key():
    """C35, C70: two configurations that differ anywhere are different keys, and the plain values say where."""
    other = {"act": Activation("geglu"), "schedule": dglu_tune.C256, "alpha_exponent": 1}
    for f in fields(DgluConfig):
        value = getattr(BASE, f.name)
        changed = replace(BASE, **{f.name: other.get(f.name, (not value) if isinstance(value, bool) else "other")})
        assert changed != BASE and hash(changed) != hash(BASE)
        assert changed.as_dict()[f.name] != BASE.as_dict()[f.name]


def test_what_the_compiler_fails_on_is_an_unsupported_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that does not compile is then one that policy ALL leaves out."""
    common = pytest.importorskip("cutlass.base_dsl.common", reason="needs nvidia-cutlass-dsl")
    from opfuse.kernels.sm90 import compiling, dglu_entry, dglu_host

    def fails(config: DgluConfig) -> None:
        raise common.DSLRuntimeError("too many registers")

    monkeypatch.setattr(dglu_entry, "compile_entry", fails)
    with pytest.raises(compiling.UnsupportedConfig, match=r"the compiler fails.*too many registers"):
        dglu_host.FUNCTIONS.compile(DgluConfig())
