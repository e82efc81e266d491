"""The Hopper grouped GEMM on a GPU, against float64 of the same inputs; and through Graph, against the unfused plan."""

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

import gemm_harness as harness  # type: ignore[import-not-found]  # noqa: E402
from gemm_cases import CASES, RANDOM  # type: ignore[import-not-found]  # noqa: E402
from harness import LIMITS, POISON, relative  # type: ignore[import-not-found]  # noqa: E402
from opfuse.graph_ops import DataType, Graph  # noqa: E402
from opfuse.kernels.sm90 import gemm_tune  # noqa: E402
from opfuse.kernels.sm90.gemm_config import GemmConfig  # noqa: E402
from sm90_cases import ANY  # type: ignore[import-not-found]  # noqa: E402

pytestmark = pytest.mark.gpu
SINGLE = ("base", "largest")


def kernels_of(item: pytest.Item) -> Iterable[GemmConfig]:
    """What a test launches; one that is not parametrised by name takes single cases."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if "seed" in given:
        return [RANDOM[given["seed"]]]
    if item.name.startswith("test_planned"):
        return [gemm_tune.schedule_for(CASES[given["name"]], n=GRAPH_N, k=GRAPH_K)]
    return [CASES[given["name"]]] if "name" in given else [CASES[name] for name in SINGLE]


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    for seed, sizes in enumerate(ANY):
        for (K, N), rows_past in (((256, 384), 0), ((328, 424), 70)):
            harness.check(CASES[name], sizes, K, N, rows_past, seed)


@pytest.mark.parametrize("seed", range(len(RANDOM)))
def test_random_configuration(seed):
    r = random.Random(seed)
    sizes, K, N = r.choice(ANY), r.choice([8, 64, 200, 512]), r.choice([8, 256, 424])
    harness.check(RANDOM[seed], sizes, K, N, r.choice([0, 128]), seed)


@pytest.mark.parametrize("name", ["base", "discrete"])
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
    assert bool((t["y"] == 0).all())
    harness.launch(CASES["base"], harness.make(CASES["base"], [0, 0], 128, 128))


@pytest.mark.parametrize("offsets", [[300, 100_000], [-5, 512], [400, 100], [2**30, 512], [-9, -3]])
@pytest.mark.parametrize("name", ["base", "float"])
def test_offsets_that_break_the_promise_write_nothing_outside(name, offsets):
    """C11: past the rows, negative and descending; the memory beside y stays."""
    t = harness.make(CASES[name], [300, 212], 256, 424)
    y = t["y"]
    whole = torch.full((y.shape[0] + 128, y.shape[1]), POISON, dtype=y.dtype, device="cuda")
    t["y"], t["offsets"] = whole[64:-64], torch.tensor(offsets, dtype=torch.int32, device="cuda")
    ref = harness.oracle(CASES[name], {**t, "offsets": torch.tensor([300, 512])})
    harness.launch(CASES[name], t)
    torch.cuda.synchronize()
    assert bool((whole[:64] == POISON).all()) and bool((whole[-64:] == POISON).all())
    if offsets[0] == 300:
        assert relative(t["y"], ref) < LIMITS[CASES[name].y_dtype]


@pytest.mark.parametrize("name", ["base", "bias", "float"])
def test_a_row_of_nan_stays_its_own(name):
    """Every tile reads past its group's end: what lies there never reaches another row."""
    config, at = CASES[name], [130, 131, 299]
    t = harness.make(config, [131, 169, 80], 256, 384, seed=1)
    harness.launch(config, t)
    torch.cuda.synchronize()
    clean = t["y"].clone()
    t["a"][at] = float("nan")
    harness.launch(config, t)
    torch.cuda.synchronize()
    same = (t["y"] == clean).all(1)
    assert same.logical_not().nonzero().flatten().tolist() == at
    assert bool(t["y"][at].isnan().all())


def test_c85_the_largest_configuration_fits_in_shared_memory():
    from opfuse.kernels.sm90.config import SMEM_LIMIT
    from opfuse.kernels.sm90.gemm_config import smem_bytes

    assert SMEM_LIMIT - smem_bytes(CASES["largest"]) < 16384
    harness.check(CASES["largest"], [300, 0, 212], 512, 424)


@pytest.mark.parametrize("name", ["base", "c256", "deep ring", "float bias"])
def test_twenty_repeats_are_bitwise_equal(name):
    t = harness.make(CASES[name], ANY[1], 512, 424)
    first = None
    for _ in range(20):
        harness.launch(CASES[name], t)
        torch.cuda.synchronize()
        first = t["y"].clone() if first is None else first
        assert torch.equal(first, t["y"])


@pytest.mark.parametrize("name", ["base", "discrete"])
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
        t["y"].fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        assert relative(t["y"], harness.oracle(config, t)) < LIMITS[config.y_dtype]


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
            error = relative(t["y"], harness.oracle(config, t))
        if not error < 3e-3:
            wrong.append((seed, error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_columns_of_wider_matrices_that_begin_inside_an_allocation():
    """C23: a and y with a row pitch, and with an offset."""
    config = CASES["base"]
    t = harness.make(config, [200, 101], 256, 264)
    for k in ("a", "y"):
        wide = torch.full((t[k].shape[0] + 8, t[k].shape[1] + 64), POISON, dtype=t[k].dtype, device="cuda")
        wide[8:, : t[k].shape[1]] = t[k]
        t[k] = wide[8:, : t[k].shape[1]]
    harness.launch(config, t)
    torch.cuda.synchronize()
    y = t["y"]
    assert relative(y, harness.oracle(config, t)) < 3e-3
    assert bool((y._base[:8] == POISON).all()) and bool((y._base[:, y.shape[1] :] == POISON).all())


@pytest.mark.parametrize("name", ["base", "n-major"])
def test_square_weights_keep_their_major(name):
    """C22: N == K, where a wrong major would still fit."""
    harness.check(CASES[name], [130, 126], 256, 256)


def test_past_two_to_the_31_elements():
    """C60: y of 2.4e9 elements, written through shared memory row by row in its last, partial tile."""
    config, (M, K, N) = CASES["base"], (600_001, 64, 4096)
    t = {
        "a": torch.randn(M, K, device="cuda", dtype=torch.bfloat16),
        "b": (torch.randn(1, N, K, device="cuda", dtype=torch.bfloat16) / 8).transpose(1, 2),
        "offsets": torch.tensor([M], dtype=torch.int32, device="cuda"),
        "y": torch.empty(M, N, device="cuda", dtype=torch.bfloat16),
    }
    harness.launch(config, t)
    torch.cuda.synchronize()
    last = {"a": t["a"][-100:], "b": t["b"], "offsets": torch.tensor([100])}
    assert relative(t["y"][-100:], harness.oracle(config, last)) < 3e-3


# ------------------------------------------------------------------ through Graph

GRAPHS = ("base", "n-major", "discrete", "alpha squared", "fp16", "float", "float bias")
GRAPH_K, GRAPH_N = 768, 1024
KINDS = {"bf16": DataType.BFLOAT16, "fp16": DataType.HALF, "fp32": DataType.FLOAT}


def graph_of(config: GemmConfig, experts: int, K: int, N: int, *, fused: bool) -> Graph:
    """One grouped matmul with the configuration's options; M is a symbol."""
    g = Graph(io_data_type=KINDS[config.ab_dtype], device="cuda")
    a = g.tensor("a", dim=(g.symbol("M"), K))
    stride = (K * N, 1, K) if config.b_major == "k" else (K * N, N, 1)
    b = g.tensor("b", dim=(experts, K, N), stride=stride, discrete=config.discrete_b)
    offsets = g.tensor("offsets", dim=(experts,), data_type=DataType.INT32)
    more: dict[str, Any] = {}
    if config.has_alpha:
        more = {"alpha": g.tensor("alpha", dim=(experts,), data_type=DataType.FLOAT),
                "alpha_exponent": config.alpha_exponent}  # fmt: skip
    if config.bias_dtype:
        more["bias"] = g.tensor("bias", dim=(experts, N), data_type=KINDS[config.bias_dtype])
    g.grouped_matmul(a, b, offsets, **more).set_name("y").set_output(True).set_data_type(KINDS[config.y_dtype])
    return g.build(fused=fused)


@pytest.mark.parametrize("name", GRAPHS)
def test_planned_equals_unfused_and_float64(name):
    """Any schedule: the table's own. One build serves every row count."""
    config, K, N = CASES[name], GRAPH_K, GRAPH_N
    planned, unfused = (graph_of(config, 4, K, N, fused=fused) for fused in (True, False))
    assert [s.kernel for s in planned.plan.steps] == ["sm90.grouped_gemm"] and unfused.plan.name == "unfused"
    for sizes, tail in (([300, 0, 77, 129], 10), ([1, 0, 0, 0], 0)):
        t = harness.make(config, sizes, K, N, tail, seed=len(sizes) + tail)
        pack = {n: x for n, x in t.items() if n not in ("_keep", "workspace")}
        if config.discrete_b:
            parts = t["_keep"]["parts"]
            pack["b"] = [one.t() if config.b_major == "k" else one for one in parts]
        for graph in (planned, unfused):
            nbytes = graph.get_workspace_size({"M": sum(sizes) + tail})
            workspace = torch.empty(nbytes, device="cuda", dtype=torch.uint8) if nbytes else None
            t["y"].fill_(POISON)
            graph.execute(pack, workspace)
            torch.cuda.synchronize()
            error = relative(t["y"][: sum(sizes)], harness.oracle(config, t))
            assert error < LIMITS[config.y_dtype], (graph.plan.name, error)
            assert bool((t["y"][sum(sizes) :] == 0).all()), graph.plan.name
