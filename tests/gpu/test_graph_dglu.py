"""The Hopper grouped GEMM + dGLU kernel as users reach it: through Graph, against the unfused plan and float64.

Every failure tells the case and the seed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graph_dglu import (  # type: ignore[import-not-found]
    BF16,
    CASES,
    GRID,
    HEAVY,
    KERNEL,
    LONG,
    MANY,
    POISON,
    SEED,
    Case,
    Exporter,
    as_bytes,
    as_passed,
    build,
    check,
    configurations,
    declare,
    finish_within,
    need_memory,
    new_graph,
    operands,
    oracle,
    pack_of,
    poisoned,
    relative,
    run,
    run_threads,
    separate,
)  # fmt: skip
from opfuse.graph_ops import DataType, StateError

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs an sm_90 GPU")]
DEVICE = "cuda"
ACTIVATIONS = {act: replace(CASES["deterministic"], act=act) for act in ("swiglu", "geglu", "situglu")}
NAMED = ("prob", "everything", "deterministic", "discrete list", "C57: columns that no atom of scales divides")
SINGLE = [MANY, LONG, HEAVY, GRID, *ACTIVATIONS.values(), *(CASES[name] for name in NAMED)]


@functools.cache
def single() -> list[Any]:
    return configurations(SINGLE)


def kernels_of(item: pytest.Item) -> Iterable[Any]:
    """What a test launches: its own case's kernel, or those of the single tests."""
    name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    return configurations([CASES[name]]) if name in CASES else single()


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("name", CASES)
def test_planned_equals_unfused_and_float64(name: str) -> None:
    check(CASES[name], SEED)


def test_c10_sixty_of_64_experts_are_empty() -> None:
    """A hang shows as a failure: the stream is asked, not waited for."""
    inputs = operands(MANY, SEED)
    graph, _ = build(MANY)
    buffers = poisoned(MANY, inputs["a"].shape[0])
    run(graph, inputs, buffers)
    finish_within(10.0, "64 experts of which 60 are empty")
    assert relative(buffers["d"], oracle(MANY, inputs)["d"]) <= 3e-3, f"seed {SEED}"
    nothing = replace(MANY, sizes=(0,) * 64, tail=200)
    inputs = operands(nothing, SEED)
    called = graph(inputs)
    finish_within(10.0, "64 empty experts")
    assert not bool(called["d"].any()) and not bool(called["dprob"].any())


def test_c26_no_rows() -> None:
    """M == 0: nothing is launched, and sums are zero."""
    case = CASES["deterministic"]
    graph, _ = build(case)
    inputs = operands(replace(case, sizes=(0,) * 6, tail=0), SEED)
    called = graph(inputs)
    assert called["d"].shape == (0, 2 * case.N) and not bool(called["dbias"].any()) and not bool(called["amax"].any())


def test_c02_nothing_of_recycled_memory_shows() -> None:
    """Outputs come from memory that held NaN; rows outside the groups are zero, and no NaN is anywhere."""
    case = CASES["everything"]
    graph, _ = build(case)
    inputs = operands(case, SEED)
    for _ in range(2):
        sizes = (2**22, 2**18, 2**14, 2**8)  # the allocator keeps large and small blocks apart
        spoiled = [torch.full((size,), float("nan"), device=DEVICE) for size in sizes for _ in range(12)]
        del spoiled
        called, total = graph(inputs), sum(case.splits[0])
        for name, value in called.items():
            if name.startswith(("q_", "sf_")):
                assert not bool((value.view(torch.uint8) == 0xFF).any()), f"{name}: NaN, seed {SEED}"
            else:
                assert bool(value.isfinite().all()), f"{name}: not finite, seed {SEED}"
            if name in ("d", "dprob", "activation", "q_row", "q_col"):
                assert not bool(as_bytes(value[total:]).any()), f"{name}: rows outside, seed {SEED}"


def test_c36_clamped_gradients_keep_equality() -> None:
    """Gate in {6.9, 7, 7.1}, up in +-{6.9, 7, 7.1}: masks of 0 and 1 on the raw values, equality inside."""
    graph, _ = build(GRID)
    gates, ups = torch.tensor([6.90625, 7.0, 7.125]), torch.tensor([-7.125, -7.0, -6.90625, 6.90625, 7.0, 7.125])
    pairs = torch.cartesian_prod(gates, ups)[torch.arange(9 * 32) % 18].view(9, 32, 2)
    inputs = operands(GRID, SEED)
    inputs["c"] = torch.cat([pairs[..., 0], pairs[..., 1]], 1).to(torch.bfloat16).to(DEVICE)
    want = oracle(GRID, inputs)["d"]
    got = graph(inputs)["d"]
    assert torch.equal((got == 0).cpu(), want == 0), f"a mask differs, seed {SEED}"
    assert relative(got, want) <= 3e-3, f"seed {SEED}"


@pytest.mark.parametrize(
    ("act", "output"),
    [("swiglu", "d"), ("situglu", "d"), ("geglu", "d"), ("swiglu", "dbias"), ("swiglu", "amax")],
)
def test_a_nan_in_the_pre_activation_shows(act: str, output: str) -> None:
    """It reaches what the unfused plan has it reach: a run that diverges is seen."""
    case = ACTIVATIONS[act]
    graph, _ = build(case)
    apart, _ = build(case, fused=False)
    inputs = operands(case, SEED)
    inputs["c"][5, 3], inputs["c"][300, 40] = float("nan"), float("nan")  # a gate and an up
    own = slice(0, sum(case.splits[0])) if output == "d" else slice(None)  # unfused, NaN shows in rows of no group too
    got, want = graph(inputs)[output][own], apart(inputs)[output][own]
    assert bool(want.isnan().any()) and torch.equal(got.isnan(), want.isnan()), f"{output}, seed {SEED}"


def test_deterministic_graph_repeats_bit_by_bit() -> None:
    case = CASES["deterministic"]
    graph, _ = build(case)
    inputs = operands(case, SEED)
    first = dict(graph(inputs))
    for _ in range(20):
        for name, value in graph(inputs).items():
            assert torch.equal(value.view(torch.uint8), first[name].view(torch.uint8)), f"{name}, seed {SEED}"


def test_c17_what_the_tma_cannot_take_is_declined_before_any_launch() -> None:
    """Rows of 24 bytes: the planned graph says so and runs unfused, as does wgrad; the device stays usable."""
    case = Case(K=12, N=64, sizes=(40, 0, 7, 24))
    graph = new_graph(io_data_type=BF16)
    declare(graph, case)
    graph.build()
    assert KERNEL not in [s.kernel for s in graph.plan.steps] and "DEPTH_MULTIPLE" in str(graph.explain())
    inputs = operands(case, SEED)
    want = oracle(case, inputs)
    for name, value in graph(inputs).items():
        assert relative(value, want[name]) <= 4e-3, f"{name}, seed {SEED}"
    wgrad = new_graph(io_data_type=BF16)
    x, dy = wgrad.tensor("x", (71, 12)), wgrad.tensor("dy", (71, 20))
    ends = wgrad.tensor("offsets", (4,), data_type=DataType.INT32)
    wgrad.grouped_matmul_wgrad(x, dy, ends).set_name("dw").set_output(True)
    wgrad.build()
    rows, other = inputs["a"], inputs["c"][:, :20].contiguous()
    got = wgrad({"x": rows, "dy": other, "offsets": inputs["offsets"]})["dw"]
    parts = [slice(0, 40), slice(40, 40), slice(40, 47), slice(47, 71)]
    products = torch.stack([rows[p].double().T @ other[p].double() for p in parts])
    assert relative(got, products.cpu()) <= 4e-3, f"seed {SEED}"
    fused, _ = build(CASES["prob"])
    assert bool(fused(operands(CASES["prob"], SEED))["d"].isfinite().all())


# ------------------------------------------------------------------ buffers


def test_c57_nothing_is_written_beside_the_outputs() -> None:
    """Guard bands on both sides of every output, with columns and rows that no atom of scales divides."""
    case = CASES["C57: columns that no atom of scales divides"]
    graph, _ = build(case)
    inputs = operands(case, SEED)
    guarded, outputs = {}, {}
    for name, buffer in poisoned(case, inputs["a"].shape[0]).items():
        band, size = 512, buffer.numel() * buffer.element_size()
        guarded[name] = torch.full((size + 2 * band,), 0xA5, dtype=torch.uint8, device=DEVICE)
        outputs[name] = guarded[name][band : band + size].view(buffer.dtype).view(buffer.shape)
    run(graph, inputs, outputs)
    for name, memory in guarded.items():
        assert bool((memory[:512] == 0xA5).all()), f"{name}: wrote before its first byte, seed {SEED}"
        assert bool((memory[-512:] == 0xA5).all()), f"{name}: wrote behind its last byte, seed {SEED}"


@pytest.mark.parametrize("shift", [256, 8])
def test_c23_views_that_begin_inside_an_allocation(shift: int) -> None:
    case = CASES["prob"]
    graph, _ = build(case)
    inputs = operands(case, SEED)
    plain = graph(inputs)["d"]
    views = {}
    for name in ("a", "c", "prob"):
        whole = torch.cat([inputs[name][:shift], inputs[name]])
        views[name] = whole[shift:]
        assert views[name].storage_offset() > 0
    assert torch.equal(graph({**inputs, **views})["d"], plain), f"seed {SEED}"


def test_columns_of_wider_matrices_on_both_sides() -> None:
    """Inputs and outputs whose rows are further apart than they are long, as declared."""
    case = CASES["prob"]
    inputs = operands(case, SEED)
    rows, width, pitch = inputs["a"].shape[0], 2 * case.N, 2 * case.N + 64
    graph = new_graph(io_data_type=BF16)
    tensors = declare(graph, case)
    tensors["c"].set_stride((pitch, 1))
    tensors["d"].set_stride((pitch, 1))
    graph.build()
    assert [s.kernel for s in graph.plan.steps] == [KERNEL], graph.explain()
    plain = build(case)[0](inputs)["d"]
    wide_c = torch.full((rows, pitch), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide_c[:, :width] = inputs["c"]
    wide_d = torch.full((rows, pitch), 7.0, dtype=torch.bfloat16, device=DEVICE)
    outputs = {"d": wide_d[:, :width], "dprob": torch.empty(rows, device=DEVICE)}
    run(graph, {**inputs, "c": wide_c[:, :width]}, outputs)
    total = sum(case.splits[0])
    assert torch.equal(wide_d[:total, :width], plain[:total]), f"seed {SEED}"
    assert not bool(wide_d[total:, :width].any()), "rows outside every group are not zero"
    assert bool((wide_d[:, width:] == 7.0).all()), "wrote beside its columns"


def test_c24_versioned_dlpack_capsules() -> None:
    case = CASES["prob"]
    graph, _ = build(case)
    inputs = operands(case, SEED)
    exported = {name: Exporter(value) for name, value in inputs.items()}
    assert torch.equal(graph(exported)["d"], graph(inputs)["d"]) and all(e.asked for e in exported.values())


def test_c63_row_counts_around_two_to_the_31_elements() -> None:
    """65,536, 131,072 and 262,144 rows of 8,192 columns, and 2.15e9 elements: first and last rows are checked."""
    need_memory(16)
    case, most = LONG, LONG.sizes[0]
    assert most * 2 * case.N > 2**31
    graph, _ = build(case)
    g = torch.Generator(device=DEVICE).manual_seed(SEED)
    pack = {
        "a": torch.randn(most, case.K, device=DEVICE, dtype=torch.bfloat16, generator=g),
        "b": torch.randn(1, case.N, case.K, device=DEVICE, dtype=torch.bfloat16, generator=g).transpose(1, 2),
        "c": torch.randn(most, 2 * case.N, device=DEVICE, dtype=torch.bfloat16, generator=g),
    }

    def part_of(rows: slice) -> dict[str, Any]:
        offsets = torch.tensor([rows.stop - rows.start], dtype=torch.int32, device=DEVICE)
        return {**pack, "a": pack["a"][rows], "c": pack["c"][rows], "offsets": offsets}

    for count in (65_536, 131_072, 262_144, most):
        whole = graph(part_of(slice(0, count)))["d"]
        for rows in (slice(0, 100), slice(count - 200, count)):
            want = oracle(case, part_of(rows))["d"]
            assert relative(whole[rows], want) <= 3e-3, f"{count} rows, {rows}, seed {SEED}"


def test_c60_weights_of_more_than_two_to_the_31_elements() -> None:
    """L = 64, K = 4096, N = 14336 with the last expert alone at work."""
    need_memory(12)
    case = HEAVY
    graph, _ = build(case)
    b = torch.empty(64, case.N, case.K, device=DEVICE, dtype=torch.bfloat16)
    b[-1].normal_().mul_(case.K**-0.5)
    small = operands(replace(case, K=64, sizes=(100,)), SEED)
    inputs = {
        "a": torch.randn(100, case.K, device=DEVICE, dtype=torch.bfloat16),
        "b": b.transpose(1, 2),
        "offsets": torch.tensor(case.sizes).cumsum(0).to(torch.int32).to(DEVICE),
        "c": small["c"],
    }
    got = graph(inputs)["d"]
    r = inputs["a"].double() @ b[-1].double().T
    gate, up = inputs["c"].double().view(100, -1, 2, 32).unbind(2)
    r, s = r.view(gate.shape), gate.sigmoid()
    want = torch.stack([r * up * s * (1 + gate * (1 - s)), r * gate * s], 2).reshape(100, -1)
    assert relative(got, want.cpu()) <= 3e-3, f"seed {SEED}"


# ------------------------------------------------------------------ streams, capture, threads


@pytest.mark.parametrize("name", ["prob", "discrete list", "everything"])
def test_c64_c75_capture_and_replay_with_changed_contents(name: str) -> None:
    """Captured without a synchronisation; each replay reads the offsets, rows and weights that are there then."""
    case = CASES[name]
    graph, _ = build(case)
    apart, _ = build(case, fused=False)
    inputs = operands(replace(case, sizes=case.splits[0], tail=0), SEED)
    passed = as_passed(case, inputs)
    rows = inputs["a"].shape[0]
    buffers = poisoned(case, rows)
    workspace = torch.empty(graph.get_workspace_size({"M": rows}), dtype=torch.uint8, device=DEVICE)
    pack = {**pack_of(passed), **buffers}
    graph.execute(pack, workspace)  # pins the experts' addresses, which a capture may not
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(captured):
            graph.execute(pack, workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step, experts = case.multiple, len(case.splits[0])
    whole = rows // step
    for turn, parts in enumerate(
        ([whole] + [0] * (experts - 1), [0] * (experts - 1) + [whole], [whole // experts] * experts)
    ):
        ends = torch.tensor(parts).cumsum(0) * step
        inputs["offsets"].copy_(ends.to(torch.int32))
        inputs["a"].mul_(-0.5)
        inputs["b"].mul_(2.0)
        for i, expert in enumerate(passed["b"] if case.discrete == "list" else ()):
            expert.copy_(inputs["b"][i])
        for value in buffers.values():
            value.view(torch.uint8).fill_(POISON)
        captured.replay()
        torch.cuda.synchronize()
        want = apart({**inputs, "b": separate(inputs["b"])} if case.discrete else inputs)
        total = int(ends[-1])
        for role in ("d", "dprob", "dbias"):
            if role in buffers:
                last = None if role == "dbias" else total
                error = relative(buffers[role][:last], want[role][:last].cpu())
                assert error <= 4e-3, f"{role}, replay {turn}: {error:.2e}, seed {SEED}"


def test_c65_what_cannot_be_captured_says_so_before() -> None:
    """The planned graph of separate experts can be captured; unfused it reads addresses on the host, and says so."""
    case = CASES["discrete list"]
    planned, _ = build(case)
    apart, _ = build(case, fused=False)
    assert all(step.capturable for step in planned.plan.steps)
    reasons = [s.capture_reason for s in apart.plan.steps if not s.capturable]
    assert reasons and "host" in reasons[0] and reasons[0] in str(apart.explain())
    inputs = as_passed(case, operands(case, SEED))
    buffers = poisoned(case, inputs["a"].shape[0])
    workspace = torch.empty(apart.get_workspace_size({"M": inputs["a"].shape[0]}), dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with pytest.raises(StateError, match="NOT_CAPTURABLE"), torch.cuda.graph(captured):
        apart.execute({**inputs, **buffers}, workspace)
    torch.cuda.synchronize()
    assert bool((buffers["d"].view(torch.uint8) == POISON).all()), "it had launched something"


@pytest.mark.parametrize("how", ["current", "handle"])
def test_c68_work_goes_to_the_stream_asked_for(how: str) -> None:
    """The stream sleeps, then makes the input; on any other stream the kernel would read what was there before."""
    case = CASES["prob"]
    graph, _ = build(case)
    inputs = operands(case, SEED)
    want = graph(inputs)["d"]
    late = {**inputs, "a": torch.zeros_like(inputs["a"])}
    buffers = poisoned(case, inputs["a"].shape[0])
    workspace = torch.empty(graph.get_workspace_size({"M": inputs["a"].shape[0]}), dtype=torch.uint8, device=DEVICE)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late["a"].copy_(inputs["a"])
    if how == "handle":
        graph.execute({**late, **buffers}, workspace, handle=stream)
    else:
        with torch.cuda.stream(stream):
            graph.execute({**late, **buffers}, workspace)
    stream.synchronize()
    total = sum(case.splits[0])
    assert torch.equal(buffers["d"][:total], want[:total]), f"seed {SEED}"


def test_c77_eight_threads_share_one_plan() -> None:
    """50 executes each, on streams and buffers of their own, every result checked."""
    case = replace(CASES["prob"], sizes=(100, 0, 156), tail=8)
    graph, _ = build(case)
    wrong: list[str] = []
    data = [operands(case, SEED + i) for i in range(8)]
    wanted = [graph(inputs)["d"].clone() for inputs in data]
    torch.cuda.synchronize()

    def work(i: int) -> None:
        stream, total = torch.cuda.Stream(), sum(case.sizes)
        with torch.cuda.stream(stream):
            workspace = torch.empty(graph.get_workspace_size({"M": total + 8}), dtype=torch.uint8, device=DEVICE)
            for turn in range(50):
                buffers = poisoned(case, total + 8)
                graph.execute({**data[i], **buffers}, workspace)
                if not torch.equal(buffers["d"][:total], wanted[i][:total]):
                    wrong.append(f"thread {i}, turn {turn}")

    run_threads([lambda i=i: work(i) for i in range(8)], wrong)  # type: ignore[misc]
    assert not wrong, f"{wrong}, seed {SEED}"
