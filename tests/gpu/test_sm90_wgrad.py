"""The Hopper weight gradient on a GPU, against float64 of the same inputs."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an sm_90 GPU", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import wgrad_harness as harness  # type: ignore[import-not-found]  # noqa: E402
from harness import POISON, relative  # type: ignore[import-not-found]  # noqa: E402
from opfuse.kernels.sm90 import wgrad_tune  # noqa: E402
from opfuse.kernels.sm90.wgrad_config import WgradConfig  # noqa: E402
from sm90_cases import ANY  # type: ignore[import-not-found]  # noqa: E402
from wgrad_cases import CASES, RANDOM  # type: ignore[import-not-found]  # noqa: E402

pytestmark = pytest.mark.gpu
SINGLE = ("base", "accumulate", "c256", "largest")
ODD = [1, 7, 63, 64, 65, 0, 128, 2]


GRAPH_K, GRAPH_N = 328, 424


def planned(kind: str, accumulate: bool) -> WgradConfig:
    """What a graph of these types is planned with."""
    half = {"BFLOAT16": "bf16", "HALF": "fp16"}[kind]
    config = WgradConfig(half, "fp32" if accumulate else half, accumulate)
    return wgrad_tune.schedule_for(config, n=GRAPH_N, k=GRAPH_K, experts=len(ODD))


def kernels_of(item: pytest.Item) -> Iterable[WgradConfig]:
    """What a test launches; one that is not parametrised by name takes single cases."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if "seed" in given:
        return [RANDOM[given["seed"]]]
    if "kind" in given:
        return [planned(given["kind"], given["accumulate"])]
    return [CASES[given["name"]]] if "name" in given else [CASES[name] for name in SINGLE]


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    for seed, sizes in enumerate([*ANY, ODD]):
        for (K, N), rows_past in (((256, 384), 0), ((328, 424), 70)):
            harness.check(CASES[name], sizes, K, N, rows_past, seed)


@pytest.mark.parametrize("seed", range(len(RANDOM)))
def test_random_configuration(seed):
    r = random.Random(seed)
    sizes, K, N = r.choice([*ANY, ODD]), r.choice([8, 200, 512]), r.choice([8, 256, 424])
    harness.check(RANDOM[seed], sizes, K, N, r.choice([0, 128]), seed)


@pytest.mark.parametrize("name", ["base", "accumulate", "c256"])
@pytest.mark.parametrize("experts", [64, 1024])
def test_many_experts_most_empty(experts, name):
    """1024 is the most that the kernel takes."""
    sizes = [0] * experts
    for i in range(0, experts, experts // 4):
        sizes[i] = 37 + i % 100
    harness.check(CASES[name], sizes, 72, 136)


@pytest.mark.parametrize("name", ["base", "accumulate"])
def test_no_expert_has_a_row(name):
    """C10, C26: rows are there that nobody owns, or none at all."""
    harness.check(CASES[name], [0] * 5, 128, 128, tail=64)
    harness.check(CASES[name], [0, 0], 128, 128)


@pytest.mark.parametrize("name", ["base", "c256", "p128_n", "fp32"])
@pytest.mark.parametrize("sizes", [[65, 3, 61, 64], [1, 1, 1, 1], [100, 0, 29, 3]])
def test_rows_of_nan_reach_no_other_expert(name, sizes):
    """An expert's first step of the contraction loads rows of the experts before it; its last ends with its own."""
    config = CASES[name]
    for owner, count in enumerate(sizes):
        t = harness.make(config, sizes, 256, 200, seed=owner)
        ref, end = harness.oracle(config, t), t["offsets"].tolist()[owner]
        t["a"][end - count : end] = float("nan")
        t["dy"][end - count : end] = float("inf")
        harness.launch(config, t)
        torch.cuda.synchronize()
        for g, of_expert in enumerate(sizes):
            if of_expert and g == owner:
                assert bool(t["dw"][g].isnan().all())
            elif of_expert:
                assert relative(t["dw"][g], ref[g]) < 3e-3, (owner, g)
            else:
                assert bool((t["dw"][g] == 0).all()), (owner, g)


@pytest.mark.parametrize(
    "offsets", [[300, 100, 512], [-5, 200, 512], [300, 100_000, 512], [2**31 - 1, -(2**31), 400], [600, 700, 800]]
)
@pytest.mark.parametrize("name", ["base", "accumulate", "c256_m"])
def test_offsets_of_no_sense_write_nothing_outside(name, offsets):
    """C11: it ends, every value is finite, and the memory beside dw stays."""
    config = CASES[name]
    t = harness.make(config, [200, 100, 212], 256, 384)
    t["offsets"].copy_(torch.tensor(offsets, dtype=torch.int64).to(torch.int32))
    whole = torch.full((5, 256, 384), POISON, dtype=t["dw"].dtype, device="cuda")
    t["dw"] = whole[1:4].zero_()
    harness.launch(config, t)
    torch.cuda.synchronize()
    assert bool((whole[0] == POISON).all()) and bool((whole[4] == POISON).all())
    assert bool(t["dw"].isfinite().all())


def test_c85_the_largest_configuration_fits_in_shared_memory():
    from opfuse.kernels.sm90.config import SMEM_LIMIT
    from opfuse.kernels.sm90.wgrad_config import smem_bytes

    assert SMEM_LIMIT - smem_bytes(CASES["largest"]) < 16384
    harness.check(CASES["largest"], [300, 0, 212], 512, 416)


@pytest.mark.parametrize("name", ["base", "p128_n", "c256", "accumulate"])
def test_twenty_repeats_are_bitwise_equal(name):
    t = harness.make(CASES[name], ANY[1], 512, 416)
    old, first = t["dw"].clone(), None
    for _ in range(20):
        t["dw"].copy_(old)
        harness.launch(CASES[name], t)
        torch.cuda.synchronize()
        first = t["dw"].clone() if first is None else first
        assert torch.equal(first, t["dw"])


def test_accumulating_twice_adds_twice():
    config = CASES["accumulate"]
    t = harness.make(config, ODD, 136, 72)
    old, ref = t["dw"].double().cpu().numpy(), harness.oracle(config, t)
    for _ in range(2):
        harness.launch(config, t)
    torch.cuda.synchronize()
    assert relative(t["dw"], 2 * ref - old) < 2e-5


@pytest.mark.parametrize("name", ["base", "c256"])
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
        t["a"].mul_(-0.5)
        t["dw"].fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        assert relative(t["dw"], harness.oracle(config, t)) < 3e-3


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
            error = relative(t["dw"], harness.oracle(config, t))
        if not error < 3e-3:
            wrong.append((seed, error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_columns_of_wider_matrices_that_begin_inside_an_allocation():
    """C23: a, dy and dw with a row pitch, and with an offset."""
    config = CASES["base"]
    t = harness.make(config, [200, 101], 136, 328)
    for k in ("a", "dy"):
        wide = torch.full((t[k].shape[0] + 8, t[k].shape[1] + 64), float("nan"), dtype=t[k].dtype, device="cuda")
        wide[8:, : t[k].shape[1]] = t[k]
        t[k] = wide[8:, : t[k].shape[1]]
    wide = torch.full((4, 144, 392), POISON, dtype=t["dw"].dtype, device="cuda")
    t["dw"] = wide[1:3, 4:140, 32:360]
    harness.launch(config, t)
    torch.cuda.synchronize()
    assert relative(t["dw"], harness.oracle(config, t)) < 3e-3
    t["dw"].fill_(POISON)
    assert bool((wide == POISON).all()), "beside dw"


def test_past_two_to_the_31_elements():
    """C60: an a of 2.2e9 elements, of which the last expert's rows lie past 2**31."""
    M, K, N = 1_100_000, 2048, 64
    t: dict[str, Any] = {
        "a": torch.zeros(M, K, device="cuda", dtype=torch.bfloat16),
        "dy": torch.randn(M, N, device="cuda", dtype=torch.bfloat16),
        "offsets": torch.tensor([M - 100, M], dtype=torch.int32, device="cuda"),
        "dw": torch.full((2, K, N), POISON, device="cuda", dtype=torch.bfloat16),
    }
    t["a"][-100:] = torch.randn(100, K, device="cuda", dtype=torch.bfloat16)
    harness.launch(CASES["base"], t)
    torch.cuda.synchronize()
    ref = t["a"][-100:].double().T @ t["dy"][-100:].double()
    assert bool((t["dw"][0] == 0).all()) and relative(t["dw"][1], ref.cpu().numpy()) < 3e-3


@pytest.mark.parametrize("kind", ["BFLOAT16", "HALF"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_graph_planned_with_the_kernel_equals_the_unfused_one(kind, accumulate):
    from opfuse.graph_ops import DataType, Graph

    K, N, sizes = GRAPH_K, GRAPH_N, ODD
    results = []
    given = harness.make(CASES["base"], sizes, K, N, tail=30, seed=3)
    dtype = {"BFLOAT16": torch.bfloat16, "HALF": torch.float16}[kind]
    old = torch.randn(len(sizes), K, N, device="cuda", dtype=torch.float32 if accumulate else dtype)
    for fused in (True, False):
        g = Graph(io_data_type=DataType[kind], intermediate_data_type=DataType.FLOAT)
        m = g.symbol("M")
        a, dy = g.tensor("a", dim=(m, K)), g.tensor("dy", dim=(m, N))
        offsets = g.tensor("offsets", dim=(len(sizes),), data_type=DataType.INT32)
        dw = g.grouped_matmul_wgrad(a, dy, offsets, accumulate=accumulate).set_name("dw").set_output(True)
        if accumulate:
            dw.set_data_type(DataType.FLOAT)
        g.build(device="cuda", fused=fused)
        kernel = "sm90.grouped_gemm_wgrad" if fused else "torch.grouped_matmul_wgrad"
        assert [step.kernel for step in g.plan.steps] == [kernel], g.explain()
        pack = {"a": given["a"].to(dtype), "dy": given["dy"].to(dtype), "offsets": given["offsets"], "dw": old.clone()}
        nbytes = g.get_workspace_size({"M": given["a"].shape[0]})
        g.execute(pack, torch.empty(nbytes, device="cuda", dtype=torch.uint8) if nbytes else None)
        results.append(pack["dw"])
    torch.cuda.synchronize()
    limit = 2e-5 if accumulate else {"BFLOAT16": 3e-3, "HALF": 5e-4}[kind]
    assert relative(results[0], results[1].double().cpu().numpy()) < limit
