"""The support matrix says what the pass says: its rows, its states, and a graph of each kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opfuse.graph_ops import support_matrix as matrix
from opfuse.graph_ops.ir.verify import verify
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.problem import ROLES
from opfuse.kernels.registry import KERNELS


@pytest.fixture(scope="module")
def rows() -> tuple[matrix.MatrixRow, ...]:
    return matrix.support_matrix()


def test_every_rule_and_every_kernel_has_a_cell(rows) -> None:
    assert {r.rule for r in rows} == set(ROLES) == set(matrix.RULES)
    serving = {c.kernel for r in rows for c in r.cells if c.state != matrix.DECLINES}
    # the older discrete class serves what the unified one serves before it
    assert serving == {k.id for k in KERNELS} - {"cudnn.discrete_grouped_gemm_swiglu"}


def test_every_cell_is_one_of_three_states(rows) -> None:
    evidence = {k.id: matrix.STATES[k.evidence] for k in KERNELS}
    for row in rows:
        assert len(row.cells) == len(matrix.ARCH_NAMES)
        for cell in row.cells:
            if cell.state == matrix.DECLINES:
                assert cell.reason and str(cell) == f"declines: {cell.reason}"
            else:
                assert cell.kernel is not None and cell.state == evidence[cell.kernel]


@pytest.mark.parametrize("rule", matrix.RULES)
def test_the_graphs_are_well_formed_and_plan(rule: str) -> None:
    kinds, modes, acts = matrix.RULES[rule]
    for kind in kinds:
        graph = matrix.declare(rule, kind, modes[-1], acts[-1])
        verify(graph)
        assert make_plan(graph, ARCHES["sm100"]).steps


def test_cells_follow_the_table_of_kernels() -> None:
    """Without kernels every cell declines; a kernel that nobody ran is not called measured."""
    graph = matrix.declare("grouped_gemm_dglu", matrix.FLOATS[0], False, "swiglu")
    assert matrix.ask("grouped_gemm_dglu", graph, "sm100", ()).reason == "NO_KERNEL"
    ran = [replace(k, evidence="measured") for k in KERNELS]
    assert matrix.ask("grouped_gemm_dglu", graph, "sm100", ran).state == matrix.MEASURED
    assert matrix.ask("grouped_gemm_dglu", graph, "sm100", KERNELS).state == matrix.COMPILED
    assert matrix.ask("grouped_gemm_dglu", graph, "sm90", KERNELS).state == matrix.MEASURED
