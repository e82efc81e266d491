"""Reasons as data: every attribute and shared predicate is asked about, every declared code is produced, and why_not
returns what there is to say."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import fusion_graphs as fg  # type: ignore[import-not-found]
import pytest
import test_legality as alone  # type: ignore[import-not-found]
import test_near_misses as near  # type: ignore[import-not-found]
import test_raising as spelled  # type: ignore[import-not-found]
from fusion_graphs import VerdictKind, codes, plan  # type: ignore[import-not-found]
from opfuse.fusion_rules import RULES, choice, fusion, legality, matcher, raising, support, why_not
from opfuse.fusion_rules.view import GraphView
from opfuse.graph_ops.ir import GraphError, OpGraph
from opfuse.kernels.condition import Reason

OTHER: dict[str, dict[Any, Any]] = {
    "alpha_exponent": {1: 2, 2: 1}, "act": {"geglu": "swiglu"}, "geglu_alpha": {1.702: 1.0}, "clamp_min": {-7.0: -8.0},
    "clamp_max": {7.0: 8.0}, "linear_offset": {1.0: 0.0}, "recompute": {False: True},
    "split_glu": {False: True, True: False},
    "accumulate": {False: True}, "scale_type": {"FP8_E8M0": "FP8_E4M3"}, "data_type": {"FP8_E4M3": "FP8_E5M2"},
    "block_size": {32: 16}, "axis": {0: 1, 1: 0}, "swizzled": {True: False},
}  # fmt: skip
"""For each attribute another legal value."""

SITU = ("situ_beta1", "situ_beta2")


def attributes() -> list[tuple[str, int, str]]:
    """(rule, node, attribute) of every attribute of every node that each rule fuses."""
    found = []
    for rule in fg.FUSIONS:
        for node in fg.WHOLE[rule]().freeze().nodes:
            found += [(rule, node.index, name) for name in node.attribute if name not in SITU]
    return found


def mutated(graph: OpGraph, index: int, name: str) -> OpGraph:
    """The graph with one attribute changed. Its shapes may no longer fit: the pass must not depend on that."""
    node = graph.nodes[index]
    value = OTHER[name][node.attribute[name]]
    changed = replace(node, attributes=tuple((k, value if k == name else v) for k, v in node.attributes))
    return replace(graph, nodes=(*graph.nodes[:index], changed, *graph.nodes[index + 1 :]))


@pytest.mark.parametrize(("rule", "index", "name"), attributes())
def test_c89_c102_every_attribute_is_a_reason(rule, index, name):
    """A kernel for exactly one configuration declines, or leaves out the attachment, and names the attribute."""
    graph = fg.WHOLE[rule]().freeze()
    changed = mutated(graph, index, name)
    report = plan(changed, kernels=[k for k in fg.EXACT_KERNELS if k.rule == rule])
    assert sum(len(m.nodes) for m in report.matches) < len(graph.nodes)
    if name != "axis":  # the other axis is the other attachment's part, of which there are then two
        assert not any(index in m.nodes for m in report.matches)
    reasons = [r for v in report.verdicts if v.rule == rule for r in v.reasons]
    named = [r for r in reasons if name in str(r.observed) or name.upper() in r.code or name in r.required]
    in_place = [r for r in reasons if r.code == "IN_PLACE_WRITER" and name == "accumulate"]
    assert named or in_place, [str(r) for r in reasons]


def test_situ_parameters_are_attributes_of_situ_only():
    problem = plan(fg.dglu(act="situglu", parameters={"situ_beta1": 2.0}).freeze()).matches[0].problem
    assert problem.attributes["situ_beta1"] == 2.0 and "clamp_max" not in problem.attributes


PREDICATES = {
    "grouped_gemm_dglu": ("GLU_LAYOUT", "R_ROUNDING", "INTERIOR_VALUE_ESCAPES", "INTERIOR_VALUE_IS_OUTPUT",
                          "NOT_CONVEX", "OPERAND"),
    "grouped_gemm_glu": ("GLU_LAYOUT", "C_ROUNDING", "NOT_CONVEX"),
    "grouped_gemm_quant": ("ROW_FACTOR", "Y_ROUNDING", "INTERIOR_VALUE_ESCAPES", "INTERIOR_VALUE_IS_OUTPUT",
                           "NOT_CONVEX", "OPERAND_PRODUCED_INSIDE"),
    "grouped_gemm_wgrad": ("SCALE_AXIS", "DEQUANTIZE_ROUNDING", "IN_PLACE_WRITER", "INTERIOR_VALUE_ESCAPES",
                           "INTERIOR_VALUE_IS_OUTPUT", "OPERAND_PRODUCED_INSIDE"),
    "quantize_row_col": ("NOT_CONVEX",),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "code"), [(r, c) for r, found in PREDICATES.items() for c in found])
def test_c103_shared_predicates_guard_each_rule(rule, code):
    """One guard, one place: each shared predicate is seen to hold back each rule that it applies to."""
    cases = [c for c in near.CASES if c[0] == rule and c[2] == code]
    assert cases
    for _, _, _, build in cases:
        report = plan(build().freeze(), kernels=[k for k in fg.EXACT_KERNELS if k.rule == rule])
        assert code in codes(report, rule)


def test_rules_share_one_predicate_object():
    named = {}
    for rule in RULES:
        for condition in rule.conditions:
            assert named.setdefault(condition.code, condition) is condition


def shared_offsets() -> fg.Parts:
    p = fg.dglu(which=("dbias",))
    p.outputs.append(p.g.group_sum(p["d"], p["offsets"]))
    return p


def rounded_before_the_copy() -> fg.Parts:
    p = fg.dglu(which=("q_row",))
    p["d"].set_data_type(fg.BF16)
    p.outputs.append(p.g.identity(p["d"]))
    return p


def produced() -> list[Reason]:
    """The reasons of every report that the tests of this folder make, in a fixed order."""
    found: list[Reason] = []
    graphs = [(build().freeze(), [k for k in fg.EXACT_KERNELS if k.rule == rule]) for rule, _, _, build in near.CASES]
    graphs += [(spelled.forward_miss(c)[0], fg.ANY_KERNELS) for c in spelled.FORWARD_MISSES]
    graphs += [(spelled.backward_miss(c)[0], fg.ANY_KERNELS) for c in spelled.BACKWARD_MISSES]
    graphs += [
        (fg.dglu().freeze(), fg.ANY_KERNELS),
        (fg.dglu().freeze(), []),
        (shared_offsets().freeze(), fg.ANY_KERNELS),
        (rounded_before_the_copy().freeze(), fg.ANY_KERNELS),
        (alone.waiting_pairs().freeze(), fg.ANY_KERNELS),
    ]
    twice = [fg.kernel("quantize_row_col", name=n) for n in ("first", "second")]
    graphs.append((fg.row_col().freeze(), twice))
    graphs.append((fg.row_col().freeze(), [fg.kernel("quantize_row_col", launches=lambda p: 1000)]))
    headless = fg.dglu().freeze()
    lost = replace(headless.nodes[1], outputs=headless.nodes[1].outputs[:1])
    graphs.append((replace(headless, nodes=(headless.nodes[0], lost, *headless.nodes[2:])), fg.ANY_KERNELS))
    for graph, kernels in graphs:
        for report in (plan(graph, kernels=kernels), plan(graph, kernels=kernels, disable=fg.RULE_IDS)):
            found += [r for v in report.verdicts for r in v.reasons]
    p = fg.dglu()
    p.g.deterministic = True
    report = plan(p.freeze(), kernels=[fg.kernel("grouped_gemm_dglu", deterministic=False)])
    found += [r for v in report.verdicts for r in v.reasons]
    return [*found, *why_not(fg.row_col().freeze(), "grouped_gemm_glu", fg.SM90)[0].reasons, *asked_directly()]


def asked_directly() -> list[Reason]:
    """Reasons that no rule of today can meet in a report, from the modules that give them."""
    view = alone.chain()
    twice = legality.illegalities(view, [0, 0], read=(), written=[uid for _, uid in view.nodes[0].outputs], interior=())
    wgrad = next(rule for rule in RULES if rule.id == "grouped_gemm_wgrad")
    plain, trace = GraphView(fg.wgrad(quantized=()).freeze()), matcher.Trace()
    assert not list(matcher.matches(wgrad.patterns[1], plain, plain.nodes[0], trace))
    return [*twice, trace.reason(plain)]


def text(reason: Reason) -> str:
    """A reason as it is printed, without the lines of this file and the numbers of the cost model."""
    return re.sub(r"[0-9.e+]+ us", "# us", str(replace(reason, where="")))


def test_every_reason_reads_as_agreed():
    """One golden text for each code that rules and the pass declare: a change of wording is a change of interface."""
    declared = declared_codes()
    first: dict[str, str] = {}
    for reason in produced():
        if reason.code in declared:
            first.setdefault(reason.code, text(reason))
    golden = json.loads(Path(__file__).with_name("reasons.json").read_text(encoding="utf-8"))
    assert first == golden


def declared_codes() -> set[str]:
    declared = {*matcher.CODES, *legality.CODES, *choice.CODES, *support.CODES, *raising.CODES, fusion.NO_ANCHOR}
    return declared | {c.code for rule in RULES for c in rule.conditions}


def test_every_declared_code_is_produced():
    assert not declared_codes() - {r.code for r in produced()}


def test_declared_codes_have_a_meaning_and_no_two_modules_share_one():
    tables = [matcher.CODES, legality.CODES, choice.CODES, support.CODES, raising.CODES]
    assert all(meaning.strip() for table in tables for meaning in table.values())
    for one, other in itertools.combinations(tables, 2):
        assert not set(one) & set(other)


def test_c100_why_not_returns_every_failed_check_as_data():
    graph = fg.dglu(act="swiglu", exponent=1, glu=fg.GluLayout.concatenated()).freeze()
    (verdict,) = why_not(graph, "grouped_gemm_dglu", fg.SM90, kernels=fg.EXACT_KERNELS)
    assert verdict.kind is VerdictKind.UNSUPPORTED and verdict.kernel == "test.grouped_gemm_dglu"
    assert [r.code for r in verdict.reasons] == ["ALPHA_EXPONENT", "ACT", "GLU_LAYOUT"]
    for reason in verdict.reasons:
        assert str(reason.observed) and reason.required


def test_c100_why_not_at_one_node_by_index_or_name():
    graph = fg.dglu().freeze()
    by_index = why_not(graph, "quantize_row_col", fg.SM90, 3, kernels=fg.ANY_KERNELS)
    assert by_index == why_not(graph, "quantize_row_col", fg.SM90, graph.nodes[3].name, kernels=fg.ANY_KERNELS)
    assert by_index[0].kind is VerdictKind.NOT_CHOSEN and by_index[0].reasons[0].code == "OVERLAP"
    (nowhere,) = why_not(graph, "quantize_row_col", fg.SM90, 0, kernels=fg.ANY_KERNELS)
    assert nowhere.reasons[0].code == "NO_ANCHOR" and graph.nodes[0].name in nowhere.reasons[0].observed


def test_c100_why_not_where_the_rule_could_not_begin():
    (verdict,) = why_not(fg.row_col().freeze(), "grouped_gemm_wgrad", fg.SM90)
    assert verdict.anchor == -1 and verdict.reasons[0].code == "NO_ANCHOR"
    (verdict,) = why_not(fg.row_col().freeze(), "raise_glu", fg.SM90)
    assert verdict.anchor == -1 and "split_glu" in verdict.reasons[0].required


def test_why_not_refuses_unknown_rules_and_nodes():
    graph = fg.row_col().freeze()
    with pytest.raises(GraphError, match="RULE_UNKNOWN"):
        why_not(graph, "grouped_conv", fg.SM90)
    for node in (7, "nobody"):
        with pytest.raises(GraphError, match="NODE_UNKNOWN"):
            why_not(graph, "quantize_row_col", fg.SM90, node)


def test_a_chosen_fusion_is_what_why_not_says():
    graph = fg.dglu().freeze()
    said = why_not(graph, "grouped_gemm_dglu", fg.SM90, kernels=fg.ANY_KERNELS)
    assert [v.kind for v in said] == [VerdictKind.CHOSEN]


def test_best_choice_equals_every_combination():
    """The search over overlapping fusions against all subsets, on random weights and overlaps."""
    for seed in range(200):
        rng = random.Random(seed)
        weighed = []
        for i in range(rng.randint(2, 9)):
            nodes = tuple(sorted(rng.sample(range(10), rng.randint(1, 4))))
            cover = type("Cover", (), {"nodes": nodes, "anchor": nodes[0], "rule": RULES[0]})
            candidate = type("Candidate", (), {"cover": cover, "kernel": fg.kernel("grouped_gemm_dglu", name=f"k{i}")})
            weighed.append(choice.Weighed(candidate, 0.0, rng.choice((1.0, 2.0, 3.5, 7.25))))
        best = sum(w.saved for part in choice._overlapping(weighed) for w in choice._best(part))
        every = max(
            sum(w.saved for w in some)
            for size in range(len(weighed) + 1)
            for some in itertools.combinations(weighed, size)
            if len({i for w in some for i in w.nodes}) == sum(len(w.nodes) for w in some)
        )
        assert best == pytest.approx(every), f"seed {seed}"


def test_many_overlapping_fusions_are_taken_greedily_and_do_not_overlap():
    rng = random.Random(5)
    weighed = []
    for i in range(60):
        nodes = tuple(sorted(rng.sample(range(40), 3)))
        cover = type("Cover", (), {"nodes": nodes, "anchor": nodes[0], "rule": RULES[0]})
        candidate = type("Candidate", (), {"cover": cover, "kernel": fg.kernel("grouped_gemm_dglu", name=f"k{i}")})
        weighed.append(choice.Weighed(candidate, 0.0, rng.random()))
    kept = [w for part in choice._overlapping(weighed) for w in choice._best(part)]
    taken = [i for w in kept for i in w.nodes]
    assert len(taken) == len(set(taken)) and kept
    for w in weighed:
        assert w in kept or set(w.nodes) & set(taken)
