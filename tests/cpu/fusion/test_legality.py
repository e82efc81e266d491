"""The legality module alone, and together with the choice of several fusions."""

from __future__ import annotations

import random

import fusion_graphs as fg  # type: ignore[import-not-found]
import networkx as nx
import pytest
from fusion_graphs import FLOAT, Parts, VerdictKind, plan  # type: ignore[import-not-found]
from opfuse.fusion_rules import legality
from opfuse.fusion_rules.view import GraphView
from opfuse.graph_ops.builder import GraphBuilder


def chain(*, output: bool = False, escape: bool = False) -> GraphView:
    """relu -> neg -> exp, the first value an output or read outside on request."""
    g = GraphBuilder()
    y = g.relu(g.tensor("x", dim=(4, 4)))
    z = g.exp(g.neg(y))
    return GraphView(fg.frozen(g, z, *([y] if output else []), *([g.sigmoid(y)] if escape else [])))


def ask(view: GraphView, nodes: list[int], *, written: int = 1, read: tuple[int, ...] = ()) -> set[str]:
    """The codes for `nodes`, whose last `written` values go to memory."""
    made = [uid for i in nodes for _, uid in view.nodes[i].outputs]
    reasons = legality.illegalities(view, nodes, read=read, written=made[-written:], interior=made[:-written])
    return {r.code for r in reasons}


def test_a_closed_chain_is_legal():
    assert not ask(chain(), [0, 1, 2])


@pytest.mark.parametrize(("change", "code"), [({"escape": True}, "INTERIOR_VALUE_ESCAPES"),
                                              ({"output": True}, "INTERIOR_VALUE_IS_OUTPUT")])  # fmt: skip
def test_interior_values(change, code):
    assert ask(chain(**change), [0, 1, 2]) == {code}
    assert not ask(chain(**change), [0, 1, 2], written=3)


def test_every_reason_is_collected():
    view = chain(output=True, escape=True)
    assert ask(view, [0, 1, 2]) == {"INTERIOR_VALUE_ESCAPES", "INTERIOR_VALUE_IS_OUTPUT"}


def test_cover_is_exact():
    view = chain()
    assert "NOT_EXACT_COVER" in ask(view, [0, 1, 1])
    reasons = legality.illegalities(view, [0, 1], read=(), written=(), interior=[view.nodes[0].output_uids["y"]])
    assert [r.code for r in reasons] == ["NOT_EXACT_COVER"] and "neg" in reasons[0].observed


def test_an_operand_that_the_kernel_makes_itself():
    view = chain()
    assert ask(view, [0, 1], read=(view.nodes[0].output_uids["y"],)) == {"OPERAND_PRODUCED_INSIDE"}


def test_an_accumulating_node_beside_others_is_an_in_place_writer():
    """Alone it is its kernel's to accept or to decline."""
    view = GraphView(fg.wgrad(accumulate=True).freeze())
    assert ask(view, [0, 1, 2]) == {"IN_PLACE_WRITER"}
    assert ask(view, [2]) == set()


def test_convexity_equals_reachability_on_random_graphs():
    for seed in range(300):
        rng = random.Random(seed)
        g = GraphBuilder()
        values = [g.tensor("x", dim=(4, 4))]
        for _ in range(rng.randint(4, 14)):
            values.append(g.add(rng.choice(values[-4:]), rng.choice(values[-6:])))
        view = GraphView(fg.frozen(g, values[-1]))
        nodes = sorted(rng.sample(range(len(view.nodes)), 3))
        graph = nx.DiGraph(view.multigraph())
        inside = set(nodes)
        below = set().union(*(nx.descendants(graph, i) for i in nodes)) - inside
        above = set().union(*(nx.ancestors(graph, i) for i in nodes)) - inside
        made = [uid for i in nodes for _, uid in view.nodes[i].outputs]
        codes = {r.code for r in legality.illegalities(view, nodes, read=(), written=made, interior=())}
        assert ("NOT_CONVEX" in codes) is bool(below & above), f"seed {seed}, nodes {nodes}"
        for target in range(len(view.nodes)):
            assert legality.reaches(view, [nodes[0]], [target]) is nx.has_path(graph, nodes[0], target), f"seed {seed}"


def ring() -> tuple[GraphView, list[list[int]]]:
    """Two groups of two nodes: a0 -> b1 and b0 -> a1. Each is convex; together they wait for each other."""
    g = GraphBuilder()
    x = g.tensor("x", dim=(4, 4))
    a0, b0 = g.relu(x), g.neg(x)
    a1, b1 = g.add(a0, b0), g.mul(a0, b0)
    view = GraphView(fg.frozen(g, a1, b1))
    return view, [[0, 2], [1, 3]]


def test_convex_groups_may_wait_for_each_other():
    view, groups = ring()
    assert all("NOT_CONVEX" not in ask(view, group, written=2) for group in groups)
    assert legality.cyclic_groups(view, groups) == [[0, 1]]
    assert legality.cyclic_groups(view, groups[:1]) == []
    assert legality.cyclic_groups(view, [[0, 1], [2, 3]]) == []


def waiting_pairs() -> Parts:
    """Two quantize_row_col pairs: the columns of each scale by a number taken from the rows of the other."""
    p = Parts()
    g = p.g
    xs = [g.tensor(f"x{i}", dim=(256, fg.COLUMNS)) for i in range(2)]
    rows = [fg.quantize(p, x, 1, swizzled=False) for x in xs]
    ones = g.tensor("ones", dim=(1,), data_type=FLOAT)
    for i, x in enumerate(xs):
        q, sf = rows[1 - i]
        norm = g.mul(g.reduction(g.block_scale_dequantize(q, sf), "AMAX", (0, 1)), ones)
        fg.quantize(p, x, 0, norm_const=norm)
    return p


def test_fusions_that_wait_for_each_other_are_not_both_chosen():
    report = plan(waiting_pairs().freeze())
    assert len(report.matches) == 1
    lost = [v for v in report.verdicts if v.kind is VerdictKind.NOT_CHOSEN]
    assert [r.code for v in lost for r in v.reasons] == ["CONTRACTION_CYCLE"]


def test_an_unsorted_graph_is_ordered_first():
    from dataclasses import replace

    p = fg.glu()
    graph = p.freeze()
    count = len(graph.nodes)
    nodes = tuple(replace(n, index=i) for i, n in enumerate(reversed(graph.nodes)))
    shuffled = replace(graph, nodes=nodes)
    (match,) = plan(shuffled).matches
    assert match.nodes == tuple(range(count))
    view = GraphView(shuffled)
    assert list(view.order) == [n.index for n in shuffled.topological_order]


def test_a_cycle_is_refused():
    from dataclasses import replace

    graph = chain().graph
    first, last = graph.nodes[0], graph.nodes[-1]
    looped = replace(graph, nodes=(replace(first, inputs=(("x", last.output_uids["y"]),)), *graph.nodes[1:]))
    with pytest.raises(ValueError, match="cycle"):
        GraphView(looped)
