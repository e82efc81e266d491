"""The Hopper grouped GEMM + GLU kernel as users reach it: through Graph, against the unfused plan and float64.

Every failure tells the case and the seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import graph_dglu as shared  # type: ignore[import-not-found]
import pytest
import torch
from graph_glu import (  # type: ignore[import-not-found]
    CASES,
    CODES,
    GluCase,
    build,
    check,
    check_codes,
    configurations,
    operands,
    oracle,
    poisoned,
)

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs an sm_90 GPU")]


def kernels_of(item: pytest.Item) -> Iterable[Any]:
    """What a test launches: its own case's kernel, or that of "prob"."""
    name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    return configurations([{**CASES, **CODES}[name or "prob"]])


def right(case: GluCase, inputs: dict[str, Any], got: dict[str, torch.Tensor]) -> bool:
    want, total = oracle(case, inputs), sum(case.sizes)
    return all(shared.relative(x[:total], want[n][:total]) <= shared.LIMITS[x.dtype] for n, x in got.items())


@pytest.mark.parametrize("name", CASES)
def test_planned_equals_unfused_and_float64(name: str) -> None:
    check(CASES[name], shared.SEED)


@pytest.mark.parametrize("name", CODES)
def test_codes_of_the_activation_equal_unfused(name: str) -> None:
    check_codes(CODES[name], shared.SEED)


def test_one_build_serves_every_row_count_and_split() -> None:
    graph = build(CASES["prob"])
    for sizes, tail in (((0, 0, 0, 0, 0, 1), 0), ((31, 0, 1, 500, 128, 129), 3), ((0, 0, 0, 0, 0, 0), 40)):
        case = replace(CASES["prob"], sizes=sizes, tail=tail)
        inputs = operands(case, shared.SEED)
        buffers = poisoned(case, inputs["a"].shape[0])
        shared.run(graph, inputs, buffers)
        assert right(case, inputs, buffers), (case, shared.SEED)
        assert not any(bool(shared.as_bytes(x[sum(sizes) :]).any()) for x in buffers.values())


def test_columns_of_wider_matrices_on_both_sides() -> None:
    case = CASES["prob"]
    graph = shared.new_graph(name="glu", io_data_type=shared.BF16)
    m, experts, wide = graph.symbol("M"), len(case.sizes), 2 * case.N
    a = graph.tensor("a", (m, case.K), (case.K + 64, 1))
    b = graph.tensor("b", (experts, case.K, wide), (case.K * wide, 1, case.K), glu_layout=case.layout)
    offsets = graph.tensor("offsets", (experts,), data_type=shared.DataType.INT32)
    prob = graph.tensor("prob", (m,), data_type=shared.F32)
    c = graph.grouped_matmul(a, b, offsets).set_name("c").set_output(True).set_stride((wide + 64, 1))
    d = graph.glu(c, act="swiglu", prob=prob).set_name("d").set_output(True).set_stride((case.N + 64, 1))
    for tensor in (c, d):
        tensor.set_data_type(shared.BF16)
    graph.build()
    assert len(graph.plan.fused_steps) == 1
    inputs = operands(case, shared.SEED)

    def widened(x: torch.Tensor) -> torch.Tensor:
        whole = torch.full((x.shape[0], x.shape[1] + 64), 3.0, dtype=x.dtype, device=x.device)
        whole[:, : x.shape[1]] = x
        return whole[:, : x.shape[1]]

    buffers = {name: widened(x) for name, x in poisoned(case, inputs["a"].shape[0]).items()}
    shared.run(graph, {**inputs, "a": widened(inputs["a"])}, buffers)
    assert right(case, inputs, buffers), shared.SEED
    for x in buffers.values():
        assert x._base is not None and bool((x._base[:, x.shape[1] :] == 3.0).all())
