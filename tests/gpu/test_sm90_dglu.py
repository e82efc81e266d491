"""The Hopper grouped GEMM + dGLU kernel on a GPU, against float64 of the same inputs."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an sm_90 GPU", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import harness  # type: ignore[import-not-found]  # noqa: E402
from opfuse.kernels.sm90 import dglu_host  # noqa: E402
from opfuse.kernels.sm90.dglu_config import DgluConfig  # noqa: E402
from sm90_cases import CASES, RANDOM, splits  # type: ignore[import-not-found]  # noqa: E402

pytestmark = pytest.mark.gpu
SINGLE = ("base", "deterministic", "recompute", "largest")


def kernels_of(item: pytest.Item) -> Iterable[DgluConfig]:
    """What a test launches; one that is not parametrised by name takes single cases."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if "seed" in given:
        return [RANDOM[given["seed"]]]
    return [CASES[given["name"]]] if "name" in given else [CASES[name] for name in SINGLE]


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    config = CASES[name]
    for seed, sizes in enumerate(splits(config)):
        tail = 128 if config.q_row_dtype or config.q_col_dtype else 70
        for (K, N), rows_past in (((256, 384), 0), ((328, 416), tail)):
            harness.check(config, sizes, K, N, rows_past, seed)


@pytest.mark.parametrize("seed", range(len(RANDOM)))
def test_random_configuration(seed):
    config = RANDOM[seed]
    r = random.Random(seed)
    sizes = r.choice(splits(config))
    harness.check(config, sizes, r.choice([64, 200, 512]), r.choice([32, 256, 416]), r.choice([0, 128]), seed)


@pytest.mark.parametrize("name", ["base", "discrete", "deterministic"])
@pytest.mark.parametrize("experts", [64, 1024])
def test_many_experts_most_empty(experts, name):
    """1024 is the most that the kernel takes."""
    sizes = [0] * experts
    for i in range(0, experts, experts // 4):
        sizes[i] = 37 + i % 100
    harness.check(CASES[name], sizes, 128, 128)


def test_all_experts_empty():
    """C10: no tile at all; everything is zero."""
    config = CASES["deterministic"]
    t = harness.make(config, [0] * 5, 128, 128, tail=64)
    harness.launch(config, t)
    torch.cuda.synchronize()
    assert bool((t["dbias"] == 0).all()) and bool((t["amax"] == 0).all()) and bool((t["dprob"] == 0).all())
    assert bool((t["d"] == 0).all())


def test_offsets_past_the_rows_write_nothing_outside():
    """C11: a last offset beyond M; rows that exist come out right, and the memory behind every output stays."""
    config = CASES["recompute"]
    t = harness.make(config, [300, 212], 256, 384)
    guards = {}
    for name in ("dy", "c", "d", "activation", "dprob", "prob"):
        x = t[name]
        whole = torch.full((x.shape[0] + 64, *x.shape[1:]), harness.POISON, dtype=x.dtype, device="cuda")
        whole[: x.shape[0]] = x
        guards[name], t[name] = whole[x.shape[0] :], whole[: x.shape[0]]
    ref = harness.oracle(config, t)
    t["offsets"][1] = 100_000
    harness.launch(config, t)
    torch.cuda.synchronize()
    assert all(bool((x == harness.POISON).all()) for x in guards.values())
    assert harness.relative(t["d"], ref["d"]) < 3e-3
    assert harness.relative(t["activation"], ref["activation"]) < 3e-3


def test_no_rows():
    """C26: M == 0 is a no-op that leaves sums zero."""
    config = CASES["deterministic"]
    t = harness.make(config, [0, 0], 128, 128)
    harness.launch(config, t)
    assert bool((t["dbias"] == 0).all()) and bool((t["amax"] == 0).all())


@pytest.mark.parametrize("name", ["deterministic", "everything"])
def test_a_row_of_nan_stays_in_its_group(name):
    """Every tile reads past its group's end: what lies there never reaches the group's own rows, sums or scales."""
    config = CASES[name]
    sizes = splits(config)[1]
    spoiled = max(range(len(sizes)), key=sizes.__getitem__)
    t = harness.make(config, sizes, 256, 384, tail=128, seed=1)
    harness.launch(config, t)
    torch.cuda.synchronize()
    clean = {k: v.clone() for k, v in t.items() if k in ("d", "dprob", "activation", "dbias", "amax", "q_row", "q_col")}
    end = sum(sizes[: spoiled + 1])
    begin = end - sizes[spoiled]
    for at in (begin, end - 1):
        t["dy"][at], t["c"][at] = float("nan"), float("nan")
    harness.launch(config, t)
    torch.cuda.synchronize()
    for k, before in clean.items():
        own = slice(spoiled, spoiled + 1) if k in ("dbias", "amax") else slice(begin, end)
        same = (t[k].view(torch.uint8) == before.view(torch.uint8)).view(before.shape[0], -1).all(1)
        same[own] = True
        assert bool(same.all()), f"{k}: rows {(~same).nonzero().flatten().tolist()[:8]} of other groups changed"
    assert bool(t["d"][begin].isnan().all() and t["d"][end - 1].isnan().all())


def test_c85_the_largest_configuration_fits_in_shared_memory():
    """C85: all that a CTA may use, to the kilobyte, is launched and right."""
    from opfuse.kernels.sm90.config import SMEM_LIMIT
    from opfuse.kernels.sm90.dglu_config import smem_bytes

    assert SMEM_LIMIT - smem_bytes(CASES["largest"]) < 4096
    harness.check(CASES["largest"], [300, 0, 212], 512, 416)


@pytest.mark.parametrize("name", ["deterministic", "everything", "c256", "dbias bf16 c256"])
def test_twenty_repeats_are_bitwise_equal(name):
    config = CASES[name]
    t = harness.make(config, splits(config)[0], 512, 416)
    outputs = [k for k in t if k in ("d", "dprob", "activation", "dbias", "amax") or k.startswith(("q_", "sf_"))]
    first = None
    for _ in range(20):
        harness.launch(config, t)
        torch.cuda.synchronize()
        now = {k: t[k].clone() for k in outputs}
        first = first or now
        assert all(torch.equal(first[k].view(torch.uint8), now[k].view(torch.uint8)) for k in outputs)


def test_graph_replay_follows_changed_offsets():
    """C64, C75: captured without a synchronisation; replays read the offsets and weights that are there then."""
    config = CASES["base"]
    t = harness.make(config, [300, 212, 0, 256], 256, 384)
    stream = torch.cuda.Stream()
    harness.launch(config, t)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph, stream=stream):
            harness.launch(config, t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for sizes in ([768, 0, 0, 0], [1, 500, 200, 67], [0, 0, 0, 768]):
        t["offsets"].copy_(torch.tensor(sizes).cumsum(0).to(torch.int32))
        t["b"].mul_(-0.5)
        t["d"].fill_(harness.POISON)
        graph.replay()
        torch.cuda.synchronize()
        ref = harness.oracle(config, t)
        assert harness.relative(t["d"], ref["d"]) < 3e-3
        assert harness.relative(t["dprob"], ref["dprob"]) < 1e-4


def test_eight_threads_on_own_streams():
    """C68, C77: every thread's launch goes to its current stream."""
    config, wrong = CASES["base"], []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            t = harness.make(config, [100 + seed, 0, 156], 256, 256, seed=seed)
            for _ in range(10):
                harness.launch(config, t)
            stream.synchronize()
            error = harness.relative(t["d"], harness.oracle(config, t)["d"])
        if not error < 3e-3:
            wrong.append((seed, error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_views_with_an_offset():
    """C23: tensors that begin inside an allocation."""
    config = CASES["base"]
    t = harness.make(config, [200, 100], 256, 256)
    whole = {k: torch.cat([x[:8], x]) for k, x in t.items() if k in ("dy", "c", "d")}
    t |= {k: x[8:] for k, x in whole.items()}
    harness.launch(config, t)
    torch.cuda.synchronize()
    assert harness.relative(t["d"], harness.oracle(config, t)["d"]) < 3e-3


def test_rows_with_a_pitch():
    """dy, c and d may be columns of wider matrices."""
    config = CASES["base"]
    t = harness.make(config, [200, 100], 256, 256)
    for k in ("dy", "c", "d"):
        wide = torch.zeros(t[k].shape[0], t[k].shape[1] + 64, dtype=t[k].dtype, device="cuda")
        wide[:, : t[k].shape[1]] = t[k]
        t[k] = wide[:, : t[k].shape[1]]
    harness.launch(config, t)
    torch.cuda.synchronize()
    assert harness.relative(t["d"], harness.oracle(config, t)["d"]) < 3e-3


@pytest.mark.parametrize("name", ["base", "n-major"])
def test_square_weights_keep_their_major(name):
    """C22: N == K, where a wrong major would still fit."""
    harness.check(CASES[name], [130, 126], 256, 256)


@pytest.mark.parametrize("name", ["row", "row col"])
def test_special_values_quantize_to_the_bit(name):
    """Zero blocks, NaN and infinity in single elements, and huge and tiny magnitudes."""
    from opfuse.graph_ops.ir.dtypes import DataType
    from opfuse.kernels.reference.quantize import quantize_blocks

    config = CASES[name]
    t = harness.make(config, [256, 128], 64, 64)
    t["dy"][3] = 0
    t["dy"][5, 0], t["dy"][40, 0] = float("nan"), float("inf")
    t["dy"][64:96] *= 1e30
    t["dy"][128:160] *= 1e-30
    harness.launch(config, t)
    torch.cuda.synchronize()
    x = t["d"].cpu()
    for side in ("row", "col"):
        if f"q_{side}" not in t:
            continue
        along = x if side == "row" else x.T.contiguous()
        codes, scales = quantize_blocks(along, 32, DataType.FP8_E4M3, DataType.FP8_E8M0)
        if side == "col":
            codes, scales = codes.T, scales.T
        assert torch.equal(t[f"q_{side}"].cpu(), codes.contiguous())
        assert torch.equal(harness.stored_scales(config, t, side).cpu(), scales.contiguous())


def test_past_two_to_the_31_elements():
    """C60, C63: c and d of 2.4e9 elements, and weights of 3.7e9 of which only the last expert's are used."""
    config = CASES["base"]
    M, K, N = 600_000, 64, 2048
    t = {
        "dy": torch.randn(M, K, device="cuda", dtype=torch.bfloat16),
        "b": torch.randn(1, N, K, device="cuda", dtype=torch.bfloat16).transpose(1, 2),
        "offsets": torch.tensor([M], dtype=torch.int32, device="cuda"),
        "c": torch.randn(M, 2 * N, device="cuda", dtype=torch.bfloat16),
        "d": torch.empty(M, 2 * N, device="cuda", dtype=torch.bfloat16),
        "prob": torch.rand(M, device="cuda"), "dprob": torch.empty(M, device="cuda"),
        "workspace": torch.empty(dglu_host.workspace_bytes(config, 1, M, N), dtype=torch.uint8, device="cuda"),
    }  # fmt: skip
    harness.launch(config, t)
    torch.cuda.synchronize()
    tail = {k: t[k][-100:] for k in ("dy", "c", "prob")} | {"b": t["b"], "offsets": torch.tensor([100])}
    assert harness.relative(t["d"][-100:], harness.oracle(config, tail)["d"]) < 3e-3
    del t
    L, K, N = 64, 4096, 14336
    b = torch.empty(L, N, K, device="cuda", dtype=torch.bfloat16)
    b[-1].normal_().mul_(K**-0.5)
    small = harness.make(config, [0] * 63 + [100], 64, N)
    small["dy"] = torch.randn(100, K, device="cuda", dtype=torch.bfloat16)
    small["b"] = b.transpose(1, 2)
    harness.launch(config, small)
    torch.cuda.synchronize()
    assert harness.relative(small["d"], harness.oracle(config, small)["d"]) < 3e-3


@pytest.mark.parametrize(
    "offsets", [[-5, 300, -100, 512], [512, 0] * 8, [-(2**31), 2**31 - 1] * 4, [7, 7, 3, 600]], ids=str
)
def test_offsets_that_descend_write_nothing_outside(offsets):
    """Whatever the offsets hold, what lies behind every output, the inputs and the workspace stays."""
    config = CASES["deterministic"]
    sizes = [512] + [0] * (len(offsets) - 1)
    t = harness.make(config, sizes, 128, 256)
    poisons = dict.fromkeys(("dy", "c", "d", "dprob", "prob", "dbias", "amax"), harness.POISON) | {"workspace": 0xA5}
    guards = {}
    for name, poison in poisons.items():
        x, edge = t[name], 512 if name == "workspace" else 32
        whole = torch.full((x.shape[0] + 2 * edge, *x.shape[1:]), poison, dtype=x.dtype, device="cuda")
        whole[edge:-edge] = x
        guards[name], t[name] = (whole[:edge], whole[-edge:]), whole[edge:-edge]
    t["offsets"].copy_(torch.tensor(offsets))
    harness.launch(config, t)
    torch.cuda.synchronize()
    for name, bands in guards.items():
        assert all(bool((band == poisons[name]).all()) for band in bands), name


@pytest.mark.parametrize("columns", [96, 128])
@pytest.mark.parametrize("name", ["base", "deterministic", "n-major"])
def test_one_tile_of_columns_writes_dprob_itself(name, columns):
    """No partials to add; the rows past the last offset are zero all the same."""
    harness.check(CASES[name], [300, 0, 212], 256, columns, 70)
    harness.check(CASES[name], [0, 0, 0], 256, columns, 70)


@pytest.mark.parametrize("tail", [0, 70, 300])
@pytest.mark.parametrize("name", ["row", "col", "row col", "everything"])
def test_scales_outside_every_group_become_zero(name, tail):
    """Whatever the buffers held: the kernel writes every byte of swizzled scales where 2N is a multiple of 128."""
    config = CASES[name]
    t = harness.make(config, [128, 0, 256], 128, 192, tail)
    sides = [side for side in ("row", "col") if f"q_{side}" in t]
    harness.launch(config, t)
    torch.cuda.synchronize()
    over_zeros = {side: t[f"sf_{side}"].clone() for side in sides}
    for side in sides:
        t[f"sf_{side}"].fill_(0xA5)
    harness.launch(config, t)
    torch.cuda.synchronize()
    assert all(torch.equal(t[f"sf_{side}"], over_zeros[side]) for side in sides)
