"""The matcher against networkx's monomorphism matcher, and the traps of the latter that ours must not share."""

from __future__ import annotations

import itertools
import random
from typing import Any

import fusion_graphs as fg  # type: ignore[import-not-found]
import networkx as nx
import pytest
from networkx.algorithms.isomorphism import DiGraphMatcher, MultiDiGraphMatcher
from opfuse.fusion_rules import RULES, legality
from opfuse.fusion_rules.matcher import NO_READER, Trace, embeddings, matches
from opfuse.fusion_rules.pattern import NodePattern, Pattern
from opfuse.fusion_rules.view import GraphView
from opfuse.graph_ops.builder import GraphBuilder
from opfuse.graph_ops.ir import OPS, DataType, Node, OpGraph, TensorSpec
from opfuse.kernels.problem import ROLES

Found = tuple[tuple[str, int], ...]
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "block_scale_quantize": {"block_size": 32, "data_type": "FP8_E4M3", "scale_type": "FP8_E8M0", "swizzled": True},
    "grouped_matmul": {"alpha_exponent": 1},
    "grouped_matmul_wgrad": {"accumulate": False},
    "group_amax": {"split_glu": False},
}
VOCABULARY = ("grouped_matmul", "glu_backward", "glu", "block_scale_quantize", "group_sum", "group_amax", "mul", "add",
              "sub", "grouped_matmul_wgrad", "block_scale_dequantize", "relu")  # fmt: skip

THEMES = (
    ("grouped_matmul", "glu_backward", "group_sum"),
    ("grouped_matmul", "glu", "block_scale_quantize"),
    ("grouped_matmul", "mul", "block_scale_quantize"),
    ("block_scale_dequantize", "block_scale_dequantize", "grouped_matmul_wgrad"),
    ("block_scale_quantize", "relu"),
    ("mul", "add", "relu"),
    ("relu", "sub", "mul"),
)


def random_graph(rng: random.Random, size: int) -> OpGraph:
    """A graph of ops wired at random, shapes meaningless: a matcher reads ops, ports, attributes and edges only."""
    tensors: dict[int, TensorSpec] = {}
    made: list[int] = []

    def tensor(*, produced: bool) -> int:
        uid = len(tensors) + 1
        output = produced and rng.random() < 0.1
        tensors[uid] = TensorSpec(uid, f"t{uid}", (4, 4), (4, 1), DataType.FLOAT, is_virtual=produced and not output,
                                  is_output=output)  # fmt: skip
        return uid

    inputs = [tensor(produced=False) for _ in range(3)]
    offsets = tensor(produced=False)
    nodes = []
    few = rng.choice(THEMES) if rng.random() < 0.8 else VOCABULARY  # few ops meet more often
    for index in range(size):
        spec = OPS[rng.choice(few)]
        chosen = []
        for port in spec.inputs:
            if port.optional and rng.random() < 0.8:
                continue
            if port.name == "offsets":
                chosen.append((port.name, offsets))
            elif made and rng.random() < 0.75:
                chosen.append((port.name, rng.choice(made[-6:])))
            else:
                chosen.append((port.name, rng.choice(inputs)))
        outputs = [(p.name, tensor(produced=True)) for p in spec.outputs if not p.optional]
        made += [uid for _, uid in outputs]
        attributes = dict(ATTRIBUTES.get(spec.name, {}))
        if spec.name == "block_scale_quantize":
            attributes["axis"] = rng.choice((0, 1))
        if spec.name == "grouped_matmul_wgrad" and rng.random() < 0.2:
            attributes["accumulate"] = True
        nodes.append(Node(index, spec.name, f"n{index}", tuple(chosen), tuple(outputs), tuple(attributes.items())))
    return OpGraph("random", tensors, tuple(nodes))


def label(op: str, port: str) -> str:
    """The port as the oracle compares it: the operands of a commutative op are alike."""
    return "operand" if OPS[op].commutative else port


def oracle(pattern: Pattern, view: GraphView) -> set[Found]:
    """Every set of (label, node) that networkx finds, with what a MultiDiGraph cannot say checked by hand."""
    graph = nx.MultiDiGraph()
    for source, target, data in view.multigraph().edges(data=True):
        graph.add_edge(source, target, key=(data["output"], label(view.nodes[target].op, data["input"]), data["uid"]))
    graph.add_nodes_from((n.index, {"node": n}) for n in view.nodes)
    wanted = nx.MultiDiGraph()
    wanted.add_nodes_from((p.label, {"part": p}) for p in pattern.core)
    for source, target in itertools.permutations(pattern.core, 2):
        for out, name in source.output_names.items():
            for port, read in target.inputs.items():
                if name == read:
                    wanted.add_edge(source.label, target.label, key=(out, label(target.op, port)))

    def node_match(have: dict, want: dict) -> bool:
        node, part = have["node"], want["part"]
        ports = {p for p, _ in node.inputs}
        return (
            node.op == part.op and set(part.inputs) <= ports <= set(part.input_names)
            and all(node.attribute.get(k) in allowed for k, allowed in part.attributes.items())
        )  # fmt: skip

    def edge_match(have: dict, want: dict) -> bool:
        left = [(out, port) for out, port, _ in have]
        return all(left.count(edge) >= list(want).count(edge) for edge in want)

    matcher = MultiDiGraphMatcher(graph, wanted, node_match=node_match, edge_match=edge_match)
    found = set()
    for mapping in matcher.subgraph_monomorphisms_iter():
        nodes = {part: index for index, part in mapping.items()}
        if shares_operands(pattern, view, nodes):
            found.add(tuple(sorted(nodes.items())))
    return found


def shares_operands(pattern: Pattern, view: GraphView, nodes: dict[str, int]) -> bool:
    """Whether some order of commutative operands gives each name one tensor: edges do not cover graph inputs."""
    orders = []
    for part in pattern.core:
        node = view.nodes[nodes[part.label]]
        given = [dict(node.inputs)]
        if OPS[part.op].commutative:
            first, second = (p.name for p in OPS[part.op].inputs[:2])
            swapped = dict(node.inputs)
            swapped[first], swapped[second] = swapped[second], swapped[first]
            given.append(swapped)
        bindings = []
        for inputs in given:
            bound = [(part.input_names[port], uid) for port, uid in inputs.items()]
            bound += [(part.output_names[port], uid) for port, uid in node.outputs]
            bindings.append(bound)
        orders.append(bindings)
    for choice in itertools.product(*orders):
        tensors: dict[str, int] = {}
        if all(tensors.setdefault(name, uid) == uid for bound in choice for name, uid in bound):
            return True
    return False


CHAIN = Pattern(
    core=(
        NodePattern("one", "relu", {"x": "x"}, {"y": "y"}),
        NodePattern("two", "relu", {"x": "y"}, {"y": "z"}),
    )
)
DIFFERENCE = Pattern(
    core=(
        NodePattern("left", "relu", {"x": "x"}, {"y": "l"}),
        NodePattern("minus", "sub", {"a": "l", "b": "r"}, {"y": "y"}),
    )
)
SUM = Pattern(
    core=(
        NodePattern("first", "mul", {"a": "x", "b": "y"}, {"y": "p"}),
        NodePattern("sum", "add", {"a": "p", "b": "q"}, {"y": "s"}),
        NodePattern("second", "mul", {"a": "x", "b": "z"}, {"y": "q"}),
    )
)
SQUARE = Pattern(
    core=(
        NodePattern("square", "mul", {"a": "x", "b": "x"}, {"y": "y"}),
        NodePattern("after", "relu", {"x": "y"}, {"y": "z"}),
    )
)
PATTERNS = [*(p for rule in RULES for p in rule.patterns), CHAIN, DIFFERENCE, SUM, SQUARE]


def ours(pattern: Pattern, view: GraphView) -> set[Found]:
    found = set()
    for node in view.nodes:
        if node.op == pattern.anchor.op:
            found |= {tuple(sorted(nodes.items())) for nodes, _ in embeddings(pattern, view, node, Trace())}
    return found


def legal(view: GraphView, found: set[Found], pattern: Pattern) -> set[Found]:
    """Those that the legality module allows when the last node's outputs are written and all else is interior."""
    kept = set()
    for match in found:
        nodes = [i for _, i in match]
        last = dict(match)[pattern.core[-1].label]
        outputs = [uid for i in nodes for _, uid in view.nodes[i].outputs]
        written = [uid for _, uid in view.nodes[last].outputs]
        read = [u for i in nodes for _, u in view.nodes[i].inputs if u not in outputs]
        interior = [uid for uid in outputs if uid not in written]
        if not legality.illegalities(view, nodes, read=read, written=written, interior=interior):
            kept.add(match)
    return kept


def oracle_legal(view: GraphView, nodes: list[int], last: int) -> bool:
    """The same question answered by networkx: closed interior, convex, and no part accumulates."""
    graph = view.multigraph()
    inside = set(nodes)
    for i in nodes:
        if len(nodes) > 1 and view.nodes[i].attribute.get("accumulate"):
            return False
        escapes = any(t not in inside for t in graph.successors(i))
        output = any(view.graph.tensors[uid].is_output for _, uid in view.nodes[i].outputs)
        if i != last and (escapes or output):
            return False
    simple = nx.DiGraph(graph)
    below = set().union(*(nx.descendants(simple, i) for i in inside)) - inside
    above = set().union(*(nx.ancestors(simple, i) for i in inside)) - inside
    return not below & above


@pytest.mark.parametrize("block", range(10))
def test_matcher_equals_the_networkx_oracle_on_random_graphs(block):
    """100 graphs a block, 1,000 in all, each named by its seed."""
    found = 0
    pairs = 0
    for seed in range(block * 100, block * 100 + 100):
        rng = random.Random(seed)
        view = GraphView(random_graph(rng, rng.randint(3, 12)))
        for pattern in PATTERNS:
            expected = oracle(pattern, view)
            got = ours(pattern, view)
            assert got == expected, f"seed {seed}, pattern {[p.op for p in pattern.core]}"
            last = pattern.core[-1].label
            allowed = {m for m in expected if oracle_legal(view, [i for _, i in m], dict(m)[last])}
            assert legal(view, got, pattern) == allowed, f"seed {seed}, pattern {[p.op for p in pattern.core]}"
            found += len(allowed)
            pairs += len(expected) * (len(pattern.core) > 1)
    assert found > 50 and pairs > 50, (found, pairs)


def pointwise(*ops: str) -> tuple[GraphBuilder, list]:
    g = GraphBuilder()
    return g, [g.tensor(name, dim=(4, 4)) for name in ops]


def test_c101_1_parallel_edges_are_kept():
    g, (x,) = pointwise("x")
    y = g.relu(x)
    graph = fg.frozen(g, g.mul(y, y))
    view = GraphView(graph)
    assert view.multigraph().number_of_edges(0, 1) == 2
    assert nx.DiGraph(view.multigraph()).number_of_edges(0, 1) == 1  # what a DiGraph would keep
    assert [u.port for u in graph.uses[graph.nodes[0].output_uids["y"]]] == ["a", "b"]


def test_c101_2_an_extra_edge_inside_does_not_hide_a_match():
    a, b, c = (NodePattern("a", "relu", {"x": "x"}, {"y": "y"}), NodePattern("b", "neg", {"x": "y"}, {"y": "z"}),
               NodePattern("c", "add", {"a": "z", "b": "w"}, {"y": "s"}))  # fmt: skip
    g, (x,) = pointwise("x")
    y = g.relu(x)
    graph = fg.frozen(g, g.add(g.neg(y), y))
    view = GraphView(graph)
    assert ours(Pattern(core=(a, b, c)), view) == {(("a", 0), ("b", 1), ("c", 2))}
    simple, want = nx.DiGraph(view.multigraph()), nx.DiGraph([("a", "b"), ("b", "c")])
    assert not list(DiGraphMatcher(simple, want).subgraph_isomorphisms_iter())  # node-induced: misses it


def test_c101_3_the_pattern_and_the_graph_cannot_be_exchanged():
    g, (x,) = pointwise("x")
    view = GraphView(fg.frozen(g, g.relu(g.relu(g.relu(x)))))
    assert len(ours(CHAIN, view)) == 2
    graph, want = nx.DiGraph([(0, 1), (1, 2)]), nx.DiGraph([(0, 1)])
    assert not list(DiGraphMatcher(want, graph).subgraph_monomorphisms_iter())  # exchanged: nothing, and no error


def test_c101_4_ports_tell_a_difference_from_its_opposite():
    for swapped in (False, True):
        g, (x, y) = pointwise("x", "y")
        left = g.relu(x)
        view = GraphView(fg.frozen(g, g.sub(y, left) if swapped else g.sub(left, y)))
        assert bool(ours(DIFFERENCE, view)) is not swapped
        want = nx.MultiDiGraph([("left", "minus")])
        assert list(MultiDiGraphMatcher(view.multigraph(), want).subgraph_monomorphisms_iter())  # blind to the port


def test_c101_5_a_symmetric_pattern_matches_each_set_of_nodes_once():
    g, (x, y) = pointwise("x", "y")
    graph = fg.frozen(g, g.add(g.relu(x), g.relu(y)))
    view = GraphView(graph)
    pattern = Pattern(core=(NodePattern("sum", "add", {"a": "l", "b": "r"}, {"y": "s"}),
                            NodePattern("l", "relu", {"x": "x"}, {"y": "l"}),
                            NodePattern("r", "relu", {"x": "y"}, {"y": "r"})))  # fmt: skip
    found = list(matches(pattern, view, graph.nodes[2], Trace()))
    assert {frozenset(m.nodes.values()) for m in found} == {frozenset((0, 1, 2))}
    p = fg.quant()  # and a rule judges each set once, however many automorphisms there are
    report = fg.plan(p.freeze())
    assert len(fg.said(report, "grouped_gemm_quant", fg.VerdictKind.CHOSEN)) == 1


@pytest.mark.parametrize("trap", ["escape", "convexity"])
def test_c101_6_7_interior_escape_and_convexity_are_judged(trap):
    g, (x,) = pointwise("x")
    y = g.relu(x)
    z = g.relu(y) if trap == "escape" else g.add(g.relu(y), g.neg(y))
    outputs = [z, g.neg(y)] if trap == "escape" else [z]
    view = GraphView(fg.frozen(g, *outputs))
    nodes = [0, 1] if trap == "escape" else [0, 3]
    if trap == "convexity":
        nodes = [0, len(view.nodes) - 1]
    made = [uid for i in nodes for _, uid in view.nodes[i].outputs]
    reasons = legality.illegalities(view, nodes, read=(), written=made[1:], interior=made[:1])
    code = legality.INTERIOR_VALUE_ESCAPES if trap == "escape" else legality.NOT_CONVEX
    assert code in {r.code for r in reasons}


def test_c101_8_matching_leaves_the_recursion_limit_alone():
    import sys

    g, (x,) = pointwise("x")
    for _ in range(3000):
        x = g.relu(x)
    graph = fg.frozen(g, x)
    before = sys.getrecursionlimit()
    view = GraphView(graph)
    assert len(ours(CHAIN, view)) == 2999 and sys.getrecursionlimit() == before


def test_c101_9_a_graph_of_equal_ops_has_no_explosion_of_matches():
    g, (x,) = pointwise("x")
    values = [x]
    for i in range(60):
        values.append(g.mul(values[-1], values[i // 2]))
    view = GraphView(fg.frozen(g, values[-1]))
    pair = Pattern(core=(NodePattern("one", "mul", {"a": "x", "b": "y"}, {"y": "p"}),
                         NodePattern("two", "mul", {"a": "p", "b": "z"}, {"y": "q"})))  # fmt: skip
    assert len(ours(pair, view)) == len({(s, t) for s, t, _ in view.multigraph().edges})


def test_c101_10_edge_match_of_a_multigraph_receives_all_parallel_edges():
    seen = []
    graph = nx.MultiDiGraph([("a", "b"), ("a", "b")])
    matcher = MultiDiGraphMatcher(graph, graph.copy(), edge_match=lambda have, want: seen.append(len(have)) or True)
    assert list(matcher.subgraph_monomorphisms_iter()) and set(seen) == {2}


def test_the_nearest_miss_is_the_one_that_got_furthest():
    g, (x,) = pointwise("x")
    view = GraphView(fg.frozen(g, g.relu(x)))
    trace = Trace()
    assert not list(matches(CHAIN, view, view.nodes[0], trace))
    reason = trace.reason(view)
    assert trace.fitted == (0,) and reason.code == NO_READER and "relu" in reason.required


def test_a_miss_upstream_names_the_caller_or_the_other_op():
    pattern = next(rule for rule in RULES if rule.id == "grouped_gemm_wgrad").patterns[1]
    graph = fg.wgrad(quantized=()).freeze()
    trace = Trace()
    assert not list(matches(pattern, GraphView(graph), graph.nodes[0], trace))
    reason = trace.reason(GraphView(graph))
    assert reason.code == "NO_PRODUCER" and "block_scale_dequantize that writes it" in reason.required


def test_frontend_fault_1_a_product_that_is_an_output_is_not_dropped():
    """cudnn-frontend's matcher accepts a product marked output beside a pointwise reader, and never writes it."""
    p = fg.Parts()
    fg.operands(p)
    y = p.g.grouped_matmul(p["a"], p["b"], p["offsets"])
    factor = p.g.tensor("factor", dim=(p["a"].dim[0], 1), data_type=fg.FLOAT)
    fg.quantize(p, p.g.mul(y, factor), 1)
    p.outputs.append(y)
    report = fg.plan(p.freeze())
    assert not report.matches
    assert "INTERIOR_VALUE_IS_OUTPUT" in fg.codes(report, "grouped_gemm_quant", fg.VerdictKind.UNSUPPORTED)
    p = fg.glu(which=())
    p.outputs.append(p["c"])
    (match,) = fg.plan(p.freeze()).matches
    assert match.roles["c"] == p["c"].uid  # a kernel that can write it has to


def test_frontend_fault_2_a_square_chain_is_not_two_parallel_products():
    """cudnn-frontend's matcher takes x@W1 -> swish -> @W2 -> swish, all square, for two parallel products, and binds
    the virtual value between them as an operand."""
    p = fg.Parts()
    fg.operands(p, columns=fg.DEPTH)
    w2 = p.g.tensor("w2", dim=(fg.EXPERTS, fg.DEPTH, fg.DEPTH))
    h = p.g.swish(p.g.grouped_matmul(p["a"], p["b"], p["offsets"])).set_data_type(fg.BF16)
    y = p.g.grouped_matmul(h, w2, p["offsets"])
    fg.quantize(p, y, 1)
    p.outputs.append(p.g.swish(y))
    graph = p.freeze()
    report = fg.plan(graph)
    (match,) = report.matches
    assert match.nodes == (2, 3) and match.roles["a"] == h.uid
    for m in report.matches:
        made = {uid for i in m.nodes for _, uid in report.graph.nodes[i].outputs}
        inputs = {r.name for r in ROLES[m.rule] if not r.is_output}
        assert not made & {uid for role, uid in m.roles.items() if role in inputs}
