"""The Hopper grouped GEMM + GLU kernel on a GPU, against float64 of the same inputs."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an sm_90 GPU", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import glu_harness as harness  # type: ignore[import-not-found]  # noqa: E402
from glu_cases import CASES, RANDOM  # type: ignore[import-not-found]  # noqa: E402
from harness import POISON, relative  # type: ignore[import-not-found]  # noqa: E402
from opfuse.kernels.sm90.glu_config import GluConfig, quantizes, scale_bytes, zeroes_scales  # noqa: E402
from sm90_cases import ANY, splits  # type: ignore[import-not-found]  # noqa: E402

pytestmark = pytest.mark.gpu
SINGLE = ("base", "concatenated", "activation alone", "largest")


def kernels_of(item: pytest.Item) -> Iterable[GluConfig]:
    """What a test launches; one that is not parametrised by name takes single cases."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if "seed" in given:
        return [RANDOM[given["seed"]]]
    return [CASES[given["name"]]] if "name" in given else [CASES[name] for name in SINGLE]


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    config = CASES[name]
    ragged, tail = (448, 128) if quantizes(config) else (416, 70)
    for seed, sizes in enumerate(splits(config)):
        for (K, N), rows_past in (((256, 384), 0), ((328, ragged), tail)):
            harness.check(config, sizes, K, N, rows_past, seed)


@pytest.mark.parametrize("seed", range(len(RANDOM)))
def test_random_configuration(seed):
    r = random.Random(seed)
    config = RANDOM[seed]
    sizes, K = r.choice(splits(config)), r.choice([64, 200, 512])
    N = r.choice([64, 256, 448] if quantizes(config) else [32, 256, 416])
    harness.check(config, sizes, K, N, r.choice([0, 128]), seed)


@pytest.mark.parametrize("name", ["codes", "codes of rows and d", "codes of columns, e5m2"])
@pytest.mark.parametrize("tail", [0, 128, 384])
def test_scales_outside_every_group_become_zero(name, tail):
    """Every byte of swizzled scales is written, those of rows past the last group and of an atom's padding as zero."""
    config = CASES[name]
    t = harness.make(config, [128, 0, 256], 128, 256, tail)
    sides = scale_bytes(config, 384 + tail, 256)
    assert zeroes_scales(config, 256)
    for side, count in sides.items():
        t[f"sf_{side}"][:count] = 0xA5
    harness.launch(config, t)
    torch.cuda.synchronize()
    for side, count in sides.items():
        atoms = t[f"sf_{side}"][:count].view(-1, (384 + tail) // 128, 512)  # of columns: atoms of rows run along M
        if side == "row":
            atoms = t["sf_row"][:count].view((384 + tail) // 128, -1, 512).transpose(0, 1)
        assert bool((atoms[:, 3:] == 0).all()) and not bool((atoms[:, :3] == 0xA5).all(2).any())


@pytest.mark.parametrize("name", ["codes", "codes, discrete n-major"])
def test_a_broken_promise_of_row_multiples_writes_nothing_outside(name):
    """A group that ends inside a block of 32 rows: other groups' codes are right, and nothing faults."""
    config = CASES[name]
    t = harness.make(config, [128, 256], 128, 256)
    whole = {k: t[k].clone() for k in ("q_row", "q_col")}
    harness.launch(config, t)
    torch.cuda.synchronize()
    right = {k: t[k].clone() for k in whole}
    for k, poisoned in whole.items():
        t[k].copy_(poisoned)
    t["offsets"].copy_(torch.tensor([128, 371]))
    harness.launch(config, t)
    torch.cuda.synchronize()
    for k in whole:
        assert torch.equal(t[k][:352], right[k][:352])


@pytest.mark.parametrize("name", ["base", "concatenated discrete"])
@pytest.mark.parametrize("experts", [64, 1024])
def test_many_experts_most_empty(experts, name):
    """1024 is the most that the kernel takes."""
    sizes = [0] * experts
    for i in range(0, experts, experts // 4):
        sizes[i] = 37 + i % 100
    harness.check(CASES[name], sizes, 128, 128)


def test_no_tiles():
    """C10, C26: no expert has a row, and no row is there."""
    t = harness.make(CASES["base"], [0] * 5, 128, 128, tail=64)
    harness.launch(CASES["base"], t)
    torch.cuda.synchronize()
    assert bool((t["h"] == 0).all()) and bool((t["d"] == 0).all())
    harness.launch(CASES["base"], harness.make(CASES["base"], [0, 0], 128, 128))


@pytest.mark.parametrize("last", [100_000, 512])
def test_offsets_past_the_rows_write_nothing_outside(last):
    """C11: rows that exist come out right, and the memory beside every output stays."""
    config = CASES["concatenated"]
    t = harness.make(config, [300, 212], 256, 384)
    guards = {}
    for name in ("h", "d"):
        x = t[name]
        whole = torch.full((x.shape[0] + 128, *x.shape[1:]), POISON, dtype=x.dtype, device="cuda")
        guards[name], t[name] = (whole[:64], whole[-64:]), whole[64:-64]
    ref = harness.oracle(config, t)
    t["offsets"][1] = last
    harness.launch(config, t)
    torch.cuda.synchronize()
    assert all(bool((x == POISON).all()) for sides in guards.values() for x in sides)
    assert relative(t["h"], ref["h"]) < 3e-3 and relative(t["d"], ref["d"]) < 3e-3


@pytest.mark.parametrize("name", ["base", "bias"])
def test_a_row_of_nan_stays_its_own(name):
    """Every tile reads past its group's end: what lies there never reaches another row."""
    config, at = CASES[name], [130, 131, 299]
    t = harness.make(config, [131, 169, 80], 256, 384, seed=1)
    harness.launch(config, t)
    torch.cuda.synchronize()
    before = {k: t[k].clone() for k in ("h", "d")}
    t["x"][at] = float("nan")
    harness.launch(config, t)
    torch.cuda.synchronize()
    for k, clean in before.items():
        same = (t[k] == clean).all(1)
        assert same.logical_not().nonzero().flatten().tolist() == at
        assert bool(t[k][at].isnan().all())


def test_the_activation_reads_h_as_it_is_written():
    """Where h rounds before the activation, the activation of the written h is what came out, whatever the GPU's sums;
    where it does not, a third of the elements differ."""
    from harness import split_columns
    from opfuse.kernels.sm90.epilogue_math import NumpyMath
    from opfuse.kernels.sm90.glu_math import glu

    for name, low, high in (("base", 0.0, 0.002), ("written, not rounded", 0.1, 0.9)):
        config = CASES[name]
        t = harness.make(config, [300, 212], 256, 384)
        harness.launch(config, t)
        torch.cuda.synchronize()
        gate, up = split_columns(t["h"].double().cpu().numpy(), config.glu_layout)
        y = glu(gate, up, config.act, NumpyMath()) * t["prob"].double().cpu().numpy()[:, None]
        differ = float((torch.from_numpy(y).to(torch.bfloat16) != t["d"].cpu()).double().mean())
        assert low <= differ <= high, (name, differ)


def test_c85_the_largest_configuration_fits_in_shared_memory():
    from opfuse.kernels.sm90.config import SMEM_LIMIT
    from opfuse.kernels.sm90.glu_config import smem_bytes

    assert SMEM_LIMIT - smem_bytes(CASES["largest"]) < 16384
    harness.check(CASES["largest"], [300, 0, 212], 512, 416)


@pytest.mark.parametrize("name", ["base", "concatenated", "c256", "deep ring"])
def test_twenty_repeats_are_bitwise_equal(name):
    t = harness.make(CASES[name], ANY[1], 512, 416)
    first = None
    for _ in range(20):
        harness.launch(CASES[name], t)
        torch.cuda.synchronize()
        now = {k: t[k].clone() for k in ("h", "d") if k in t}
        first = first or now
        assert all(torch.equal(first[k], now[k]) for k in now)


@pytest.mark.parametrize("name", ["base", "concatenated discrete"])
def test_graph_replay_follows_changed_offsets(name):
    """C64, C75: captured without a synchronisation; replays read the offsets and rows that are there then."""
    config = CASES[name]
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
        t["x"].mul_(-0.5)
        t["h"].fill_(POISON)
        t["d"].fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        ref = harness.oracle(config, t)
        assert relative(t["h"], ref["h"]) < 3e-3 and relative(t["d"], ref["d"]) < 3e-3


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
            error = relative(t["d"], harness.oracle(config, t)["d"])
        if not error < 3e-3:
            wrong.append((seed, error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_columns_of_wider_matrices_that_begin_inside_an_allocation():
    """C23: x, h and d with a row pitch, and with an offset."""
    config = CASES["base"]
    t = harness.make(config, [200, 101], 256, 256)
    for k in ("x", "h", "d"):
        wide = torch.full((t[k].shape[0] + 8, t[k].shape[1] + 64), POISON, dtype=t[k].dtype, device="cuda")
        wide[8:, : t[k].shape[1]] = t[k]
        t[k] = wide[8:, : t[k].shape[1]]
    harness.launch(config, t)
    torch.cuda.synchronize()
    ref = harness.oracle(config, t)
    for k in ("h", "d"):
        assert relative(t[k], ref[k]) < 3e-3
        assert bool((t[k]._base[:8] == POISON).all()) and bool((t[k]._base[:, t[k].shape[1] :] == POISON).all())


@pytest.mark.parametrize("name", ["base", "n-major"])
def test_square_weights_keep_their_major(name):
    """C22: 2N == K, where a wrong major would still fit."""
    harness.check(CASES[name], [130, 126], 256, 128)


def test_past_two_to_the_31_elements():
    """C60: h of 2.4e9 elements, written through shared memory row by row in its last, partial tile."""
    config = CASES["base"]
    M, K, N = 600_001, 64, 2048
    t = {
        "x": torch.randn(M, K, device="cuda", dtype=torch.bfloat16),
        "b": (torch.randn(1, 2 * N, K, device="cuda", dtype=torch.bfloat16) / 4).transpose(1, 2),
        "offsets": torch.tensor([M], dtype=torch.int32, device="cuda"),
        "h": torch.empty(M, 2 * N, device="cuda", dtype=torch.bfloat16),
        "d": torch.empty(M, N, device="cuda", dtype=torch.bfloat16),
        "prob": torch.rand(M, device="cuda"),
    }  # fmt: skip
    harness.launch(config, t)
    torch.cuda.synchronize()
    last = {k: t[k][-100:] for k in ("x", "prob")} | {"b": t["b"], "offsets": torch.tensor([100])}
    ref = harness.oracle(config, last)
    assert relative(t["h"][-100:], ref["h"]) < 3e-3 and relative(t["d"][-100:], ref["d"]) < 3e-3
