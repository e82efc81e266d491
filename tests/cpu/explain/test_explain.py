"""Explanations of hand-made plans: goldens for every kind of verdict, and the facts that they must not lose."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from opfuse.fusion_rules.verdict import Raising, Verdict, VerdictKind
from opfuse.graph_ops.explain import explain
from opfuse.graph_ops.explain.text import bytes_text, flops_text, plural, seconds_text
from opfuse.kernels.condition import Reason

KINDS = list(VerdictKind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name.lower())
def test_a_golden_for_every_kind_of_verdict(plan_of, verdict_of, golden, kind):
    verdicts = dict.fromkeys((verdict_of(VerdictKind.CHOSEN), verdict_of(kind)))
    golden(f"{kind.name.lower()}.txt", str(explain(plan_of(*verdicts))) + "\n")


@pytest.fixture
def everything(plan_of, verdict_of):
    """All kinds at once, an alternative for a fused node, and a raising."""
    alternative = Verdict(
        VerdictKind.NOT_CHOSEN, "grouped_gemm_quant", 0, (0,), (Reason("OVERLAP", "fc2 is taken", "a free node"),)
    )
    return plan_of(*map(verdict_of, KINDS), alternative, raisings=(Raising("raise_glu_backward", (1, 2, 3), "dglu"),))


def test_golden_text_json_and_mermaid(everything, golden):
    told = explain(everything)
    golden("everything.txt", str(told) + "\n")
    golden("everything.json", told.to_json() + "\n")
    golden("everything.mmd", told.to_mermaid())


def test_golden_of_a_plan_that_may_not_fuse(plan_of, golden):
    golden("unfused.txt", str(explain(plan_of(fused=False))) + "\n")


def test_every_failed_condition_is_told_with_observed_required_hint_and_line(everything):
    text = str(explain(everything))
    for verdict in everything.report.verdicts:
        assert verdict.rule in text
        assert verdict.kind is VerdictKind.CHOSEN or verdict.kind.value in text
        for reason in verdict.reasons:
            assert f"{reason.code}: observed {reason.observed}; required {reason.required}" in text
            assert reason.hint in text and reason.where in text
    for node in everything.graph.nodes:
        assert node.path in text, "every node with the user's file and line"


def test_kinds_stay_apart_and_the_nearest_comes_first(everything):
    left = next(x for x in explain(everything).left_alone if x.node.name == "skip")
    assert [v.kind for v in left.verdicts] == [VerdictKind.NOT_CHOSEN, VerdictKind.UNSUPPORTED, VerdictKind.NO_MATCH]


def test_a_verdict_is_told_once_and_pointed_at_from_its_other_nodes(everything):
    told = explain(everything)
    half = next(x for x in told.left_alone if x.node.name == "half")
    assert half.verdicts == () and half.told_at == ("skip",)
    assert "see skip" in str(told)


def test_a_node_that_no_rule_reaches_says_so(everything):
    left = next(x for x in explain(everything).left_alone if x.node.name == "rows")
    assert (left.verdicts, left.told_at) == ((), ())
    assert "no rule reaches it" in str(explain(everything))


def test_what_was_possible_for_fused_nodes_stands_apart(everything):
    told = explain(everything)
    assert [(v.rule, v.with_nodes) for v in told.alternatives] == [("grouped_gemm_quant", ("fc2",))]
    assert all(v.rule != "grouped_gemm_quant" for left in told.left_alone for v in left.verdicts)


def test_a_rule_that_does_not_match_at_a_fused_node_is_in_the_json_only(plan_of):
    miss = Verdict(VerdictKind.NO_MATCH, "grouped_gemm_glu", 0, (0,), (Reason("OP", "dglu is glu_backward", "a glu"),))
    told = explain(plan_of(miss))
    assert [v["rule"] for v in json.loads(told.to_json())["alternatives"]] == ["grouped_gemm_glu"]
    assert "grouped_gemm_glu" not in str(told) and "Also considered" not in str(told)


def test_the_chosen_verdict_is_the_step_itself(plan_of, verdict_of):
    told = explain(plan_of(verdict_of(VerdictKind.CHOSEN)))
    assert not told.alternatives and all(not left.verdicts for left in told.left_alone)
    (step,) = told.fused_steps
    assert [n.name for n in step.nodes] == ["fc2", "dglu", "dbias"] and step.rule == "grouped_gemm_dglu"
    assert dict(step.reads)["b"] == "w2" and dict(step.writes)["dbias"] == "db"
    assert told.fused_nodes == 3


def test_reasons_may_observe_what_does_not_hash(plan_of):
    """`observed` is whatever a condition read: a list, a dict."""
    odd = Reason("STRIDE", ["a", {"b": 1}], "row-major")
    told = explain(plan_of(Verdict(VerdictKind.UNSUPPORTED, "grouped_gemm_quant", 4, (4,), (odd,), "k")))
    assert "STRIDE: observed ['a', {'b': 1}]; required row-major" in str(told)
    assert json.loads(told.to_json())["left_unfused"][1]["verdicts"][0]["reasons"][0]["observed"] == "['a', {'b': 1}]"


def test_json_has_what_the_text_has(everything):
    told = explain(everything)
    data = json.loads(told.to_json())
    assert (data["format"], data["version"]) == ("opfuse.explanation", 1)
    assert data == told.to_dict() == json.loads(told.to_json(indent=None))
    assert data["estimate"]["launches"] == everything.estimate.launches
    assert data["unfused_estimate"]["workspace_bytes"] == everything.unfused_workspace_bytes
    assert [s["kernel"] for s in data["steps"]] == [s.kernel for s in everything.steps]
    codes = {r["code"] for left in data["left_unfused"] for v in left["verdicts"] for r in v["reasons"]}
    assert codes == {"GLU_LAYOUT", "ARCH", "OP", "COST"} and codes == {r.code for r in told.reasons}


# ------------------------------------------------------------------ Mermaid


NODE = re.compile(r'^\s*(\w+)(\[|\(\[)"([^"]*)"(\]\)|\])(:::\w+)?$')
EDGE = re.compile(r'^\s*(\w+) -->(\|"[^"]*"\|)? (\w+)$')


def parse_mermaid(text):
    """(ids, edges, depth-balanced subgraphs) of the subset that GitHub renders; AssertionError for any other line."""
    ids, edges, inside, subgraphs = set(), [], None, {}
    lines = text.rstrip("\n").split("\n")
    assert lines[0] == "flowchart TD"
    for line in lines[1:]:
        if match := re.match(r'^\s*subgraph (\w+)\["([^"]*)"\]$', line):
            assert inside is None
            inside = match[1]
            subgraphs[inside] = set()
        elif line.strip() == "end":
            inside = None
        elif match := NODE.match(line):
            assert match[1] not in ids, "declared twice"
            ids.add(match[1])
            if inside:
                subgraphs[inside].add(match[1])
        elif match := EDGE.match(line):
            edges.append((match[1], match[3]))
        else:
            assert re.match(r"^\s*classDef \w+ [\w:#,\- ]+$", line), line
    assert inside is None
    return ids, edges, subgraphs


def test_mermaid_draws_every_node_buffer_and_edge(everything):
    graph = everything.graph
    ids, edges, subgraphs = parse_mermaid(explain(everything).to_mermaid())
    assert {f"n{n.index}" for n in graph.nodes} <= ids
    assert {f"t{t.uid}" for t in (*graph.graph_inputs, *graph.graph_outputs)} <= ids
    assert all(a in ids and b in ids for a, b in edges)
    reads = sum(not graph.tensors[u].is_constant for n in graph.nodes for _, u in n.inputs)
    assert len(edges) == reads + len(graph.graph_outputs)
    assert list(subgraphs.values()) == [{"n0", "n1", "n2"}]


def test_mermaid_escapes_what_it_would_read_as_markup(everything):
    graph = everything.graph
    nodes = (replace(graph.nodes[0], name='a"b <script> #1'), *graph.nodes[1:])
    told = explain(replace(everything, graph=replace(graph, nodes=nodes)))
    text = told.to_mermaid()
    parse_mermaid(text)
    assert "a#quot;b #lt;script#gt; #35;1<br/>grouped_matmul" in text


# ------------------------------------------------------------------ units


@pytest.mark.parametrize(
    ("render", "value", "text"),
    [
        (seconds_text, 0.0, "0.0 ns"), (seconds_text, 5e-7, "500.0 ns"), (seconds_text, 1.5e-4, "150.0 us"),
        (seconds_text, 0.25, "250.0 ms"), (seconds_text, 90.0, "90.0 s"), (seconds_text, 5000.0, "5000.0 s"),
        (bytes_text, 0, "0 B"), (bytes_text, 1023, "1023 B"), (bytes_text, 1536, "1.5 KiB"),
        (bytes_text, 3 * 2**40, "3.0 TiB"), (flops_text, 999, "999 FLOP"), (flops_text, 2.1e12, "2.1 TFLOP"),
        (flops_text, 5e18, "5000.0 PFLOP"),
    ],
)  # fmt: skip
def test_numbers_read_in_their_unit(render, value, text):
    assert render(value) == text


def test_plurals():
    assert [plural(n, "launch") for n in (0, 1, 2)] == ["0 launches", "1 launch", "2 launches"]
    assert plural(3, "node") == "3 nodes"


def test_explain_loads_neither_torch_nor_a_kernel():
    heavy = "{'torch', 'cutlass', 'cudnn', 'networkx'}"
    code = f"import opfuse.graph_ops.explain, sys; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
