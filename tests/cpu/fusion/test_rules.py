"""What each rule fuses, how it lowers, and what stays apart with which reason."""

from __future__ import annotations

import itertools

import fusion_graphs as fg  # type: ignore[import-not-found]
import pytest
from fusion_graphs import BF16, FLOAT, Parts, VerdictKind, chosen, codes, plan, said  # type: ignore[import-not-found]
from opfuse.fusion_rules import RULES, fuse, support_table
from opfuse.graph_ops.ir import DataType, GluLayout, GraphError
from opfuse.kernels.arch import ARCHES, ArchRange
from opfuse.kernels.problem import ROLES


@pytest.mark.parametrize("rule", fg.FUSIONS)
@pytest.mark.parametrize("kernels", [fg.ANY_KERNELS, fg.EXACT_KERNELS], ids=["any", "exact"])
def test_every_rule_fuses_its_whole_graph(rule, kernels):
    graph = fg.WHOLE[rule]().freeze()
    report = plan(graph, kernels=kernels)
    assert chosen(report, rule) == [tuple(range(len(graph.nodes)))]
    (match,) = report.matches
    written = {r.name for r in ROLES[rule] if r.is_output} & set(match.roles)
    assert {match.roles[r] for r in written} == {t.uid for t in graph.graph_outputs}


def test_patterns_name_roles_only():
    for rule in RULES:
        for pattern in rule.patterns:
            shape = pattern.shape(tuple(a.label for a in pattern.attachments))
            assert set(shape.operands) <= set(rule.roles), rule.id
            assert all(not rule.roles[n].is_output for n in shape.operands), rule.id
            assert set(pattern.always_written) <= {n for n, r in rule.roles.items() if r.is_output}


def test_rules_open_with_their_algebra_and_number_their_conditions():
    import importlib

    for rule in RULES:
        doc = importlib.import_module(f"opfuse.fusion_rules.rules.{rule.id}").__doc__
        assert "=" in doc.splitlines()[0] and "\n1. " in doc and rule.doc


def test_c92_seven_outputs_all_come_from_the_fused_node():
    p = fg.dglu(recompute=True, parts=Parts())
    p.outputs.append(p["d"])
    graph = p.freeze()
    (match,) = plan(graph).matches
    assert len(graph.graph_outputs) == 9
    assert {uid for role, uid in match.roles.items() if ROLES["grouped_gemm_dglu"][0]} >= {
        t.uid for t in graph.graph_outputs
    }
    for role, tensor in match.problem.tensors.items():
        assert graph.tensors[match.roles[role]] is tensor
    assert match.problem.tensors["d"].uid == p["d"].uid and "d" not in match.problem.rounding


def test_rounding_names_each_absorbed_value():
    (match,) = plan(fg.dglu(r_type=BF16).freeze()).matches
    assert match.problem.rounding == {"r": BF16, "d": FLOAT}
    (match,) = plan(fg.glu().freeze()).matches
    assert match.problem.rounding == {"c": FLOAT, "d": FLOAT}
    (match,) = plan(fg.quant().freeze()).matches
    assert match.problem.rounding == {"y": FLOAT, "d": FLOAT}
    (match,) = plan(fg.wgrad().freeze()).matches
    assert match.problem.rounding == {"a_values": FLOAT, "dy_values": FLOAT}


def test_a_dead_output_is_not_asked_for():
    p = fg.dglu()
    p.outputs.remove(p["dprob"])
    (match,) = plan(p.freeze()).matches
    assert "dprob" not in match.roles and "dprob" not in match.problem.rounding


def test_the_activation_reads_only_its_own_parameters():
    (match,) = plan(fg.dglu(act="swiglu").freeze()).matches
    assert "geglu_alpha" not in match.problem.attributes and match.problem.attributes["act"] == "swiglu"
    (match,) = plan(fg.dglu(act="geglu").freeze()).matches
    assert match.problem.attributes["clamp_max"] == 7.0


def test_c35_clamps_are_part_of_what_is_fused():
    problems = [
        plan(fg.dglu(parameters=parameters).freeze()).matches[0].problem
        for parameters in ({}, {"clamp_max": 10.0}, {"clamp_min": -10.0}, {"linear_offset": 0.0}, {"geglu_alpha": 1.0})
    ]
    for one, other in itertools.combinations(problems, 2):
        assert one.attributes != other.attributes


def test_pre_activation_is_written_where_it_is_wanted():
    p = fg.glu()
    p.outputs.append(p["c"])
    (match,) = plan(p.freeze()).matches
    assert match.roles["c"] == p["c"].uid and "c" not in match.problem.rounding
    p = fg.glu()
    p.outputs.append(p.g.relu(p["c"]))  # read outside, but no output: still written
    (match,) = plan(p.freeze()).matches
    assert match.roles["c"] == p["c"].uid


def test_c95_an_interior_value_that_is_an_output_is_declined_or_written():
    p = fg.dglu()
    p.outputs.append(p["d"])
    (match,) = plan(p.freeze()).matches
    assert match.roles["d"] == p["d"].uid
    p.outputs.append(p["r"])
    report = plan(p.freeze(), disable=("quantize_row_col", "grouped_gemm_quant"))
    assert not report.matches
    assert codes(report, "grouped_gemm_dglu", VerdictKind.UNSUPPORTED) == {"INTERIOR_VALUE_IS_OUTPUT"}


def test_c94_escape_names_the_value_and_its_reader():
    p = fg.dglu()
    p.outputs.append(p.g.reduction(p["r"], "AMAX", 1, name="stats"))
    report = plan(p.freeze())
    (verdict,) = said(report, "grouped_gemm_dglu", VerdictKind.UNSUPPORTED)
    (reason,) = verdict.reasons
    assert reason.code == "INTERIOR_VALUE_ESCAPES" and "-> stats" in reason.observed and verdict.kernel is None


def test_c98_two_blocks_that_share_tensors_both_fuse():
    p = fg.dglu()
    for block in ("2", "3"):
        p.t["a" + block] = p["a"]
        fg.dglu(parts=p, suffix=block)
    report = plan(p.freeze())
    assert [len(nodes) for nodes in chosen(report, "grouped_gemm_dglu")] == [6, 6, 6]
    assert len({i for m in report.matches for i in m.nodes}) == 18


@pytest.mark.parametrize("order", [False, True])
def test_c90_commutative_operands_match_in_both_orders(order):
    p = Parts()
    fg.operands(p)
    factor = p.g.tensor("factor", dim=(p["a"].dim[0], 1), data_type=FLOAT)
    y = p.g.grouped_matmul(p["a"], p["b"], p["offsets"])
    d = p.g.mul(factor, y) if order else p.g.mul(y, factor)
    fg.quantize(p, d, 1)
    report = plan(p.freeze())
    assert chosen(report, "grouped_gemm_quant") == [(0, 1, 2)]
    assert report.matches[0].roles["prob"] == factor.uid


def test_an_operand_order_that_does_not_commute_is_another_function():
    p = Parts()
    fg.operands(p)
    y = p.g.grouped_matmul(p["a"], p["b"], p["offsets"])
    d = p.g.sub(p.g.tensor("x", dim=y.dim), y)
    fg.quantize(p, d, 1)
    report = plan(p.freeze())
    assert not report.matches
    assert codes(report, "grouped_gemm_quant", VerdictKind.NO_MATCH) == {"ATTACHMENT_MISSING"}


@pytest.mark.parametrize("lacking", ["q_row", "dbias", "amax"])
def test_a_kernel_may_serve_fewer_attachments(lacking):
    roles = {"q_row": ("q_row", "sf_row")}.get(lacking, (lacking,))
    kernels = [fg.kernel("grouped_gemm_dglu", fg.without(*roles))]
    graph = fg.dglu().freeze()
    report = plan(graph, kernels=kernels)
    (nodes,) = chosen(report, "grouped_gemm_dglu")
    assert len(nodes) == 5 and not set(roles) & set(report.matches[0].roles)
    assert report.matches[0].roles["d"] == next(t.uid for t in graph.tensors.values() if t.name == "glu_backward.0::dx")
    left = [v for v in said(report, "grouped_gemm_dglu", VerdictKind.UNSUPPORTED) if v.kernel]
    assert [set(v.nodes) for v in left] == [set(range(6)) - set(nodes)]
    assert {r.code for v in left for r in v.reasons} == {f"NO_{r.upper()}" for r in roles}


def test_a_left_pair_of_quantizations_fuses_on_its_own():
    kernels = [fg.kernel("grouped_gemm_dglu", fg.without("q_row", "q_col")), fg.kernel("quantize_row_col")]
    report = plan(fg.dglu().freeze(), kernels=kernels)
    assert chosen(report, "grouped_gemm_dglu") == [(0, 1, 4, 5)]
    assert chosen(report, "quantize_row_col") == [(2, 3)]


def test_a_second_reader_of_the_same_kind_stays_apart_with_its_reason():
    p = fg.dglu(which=("dbias",))
    p.outputs += [
        p.g.group_sum(p["d"], p["offsets"], name="again"),
        p.g.group_sum(p["d"], p["other_offsets"], name="other"),
    ]
    report = plan(p.freeze())
    assert chosen(report, "grouped_gemm_dglu") == [(0, 1, 2)]
    left = {v.nodes: {r.code for r in v.reasons} for v in said(report, "grouped_gemm_dglu", VerdictKind.NO_MATCH)}
    assert left == {(3,): {"NODE_TAKEN"}, (4,): {"OPERAND"}}


@pytest.mark.parametrize("quantized", [(), ("a",), ("dy",), ("a", "dy")])
def test_wgrad_takes_the_dequantized_operands_there_are(quantized):
    graph = fg.wgrad(quantized=quantized).freeze()
    (match,) = plan(graph).matches
    assert match.nodes == tuple(range(len(graph.nodes)))
    assert {r for r in match.roles if r.startswith("sf_")} == {f"sf_{q}" for q in quantized}


def test_wgrad_that_accumulates_is_its_kernel_s_to_take():
    """Alone: beside a dequantize it stays apart."""
    (match,) = plan(fg.wgrad(quantized=(), accumulate=True).freeze()).matches
    assert match.problem.attributes["accumulate"] is True
    report = plan(fg.wgrad(accumulate=True).freeze())
    assert chosen(report, "grouped_gemm_wgrad") == [(2,)]
    assert "IN_PLACE_WRITER" in codes(report, "grouped_gemm_wgrad", VerdictKind.UNSUPPORTED)


def test_wgrad_leaves_a_shared_dequantized_operand_apart():
    p = fg.wgrad()
    p.outputs.append(p.g.relu(p["a_values"]))
    report = plan(p.freeze())
    (match,) = report.matches
    assert match.nodes == (1, 2) and match.roles["a"] == p["a_values"].uid
    assert "INTERIOR_VALUE_ESCAPES" in codes(report, "grouped_gemm_wgrad", VerdictKind.UNSUPPORTED)


def test_disabled_by_rule_or_kernel_is_said_so():
    graph = fg.dglu().freeze()
    for what in ("grouped_gemm_dglu", "test.grouped_gemm_dglu"):
        report = plan(graph, disable=[what])
        assert not chosen(report, "grouped_gemm_dglu")
        assert codes(report, "grouped_gemm_dglu", VerdictKind.NOT_CHOSEN) == {"DISABLED"}
    with pytest.raises(GraphError, match="DISABLE_UNKNOWN"):
        plan(graph, disable=["grouped_gemm_dlgu"])
    with pytest.raises(GraphError, match="DISABLE_TYPE"):
        plan(graph, disable="grouped_gemm_dglu")


def test_the_earlier_of_equal_kernels_is_chosen_and_the_other_says_why():
    kernels = [fg.kernel("grouped_gemm_dglu", name=name) for name in ("first", "second")]
    report = plan(fg.dglu().freeze(), kernels=kernels)
    assert [m.kernel for m in report.matches] == ["first"]
    (verdict,) = said(report, "grouped_gemm_dglu", VerdictKind.NOT_CHOSEN)
    assert verdict.kernel == "second" and verdict.reasons[0].code == "PRIORITY"
    slow = [fg.kernel("grouped_gemm_dglu", name="first", launches=lambda p: 3), kernels[1]]
    report = plan(fg.dglu().freeze(), kernels=slow)
    assert [m.kernel for m in report.matches] == ["second"]
    assert codes(report, "grouped_gemm_dglu", VerdictKind.NOT_CHOSEN) == {"COST"}


def test_fusion_that_loses_is_not_chosen():
    kernels = [fg.kernel("quantize_row_col", launches=lambda p: 1000)]
    report = plan(fg.row_col().freeze(), kernels=kernels)
    assert not report.matches and codes(report, "quantize_row_col", VerdictKind.NOT_CHOSEN) == {"COST"}


def test_the_larger_of_overlapping_fusions_is_chosen():
    report = plan(fg.dglu().freeze())
    (verdict,) = said(report, "quantize_row_col", VerdictKind.NOT_CHOSEN)
    assert verdict.reasons[0].code == "OVERLAP" and "grouped_gemm_dglu" in verdict.reasons[0].observed


def test_no_kernel_is_a_reason_of_its_own():
    report = plan(fg.row_col().freeze(), kernels=())
    assert codes(report, "quantize_row_col", VerdictKind.UNSUPPORTED) == {"NO_KERNEL"}


def test_deterministic_graphs_decline_kernels_that_are_not():
    p = fg.dglu()
    p.g.deterministic = True
    report = plan(p.freeze(), kernels=[fg.kernel("grouped_gemm_dglu", deterministic=False)])
    assert codes(report, "grouped_gemm_dglu", VerdictKind.UNSUPPORTED) == {"NONDETERMINISTIC"}
    assert plan(fg.dglu().freeze(), kernels=[fg.kernel("grouped_gemm_dglu", deterministic=False)]).matches


CAPABILITIES = {"8.0": "sm80", "8.9": "sm89", "9.0": "sm90", "10.0": "sm100", "10.3": "sm103", "10.7": "sm107",
                "11.0": "sm110", "12.0": "sm120", "12.1": "sm121"}  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "inside"),
    [
        ((9, 0), (9, 1), {"9.0"}),
        ((9, 0), (10, 0), {"9.0"}),
        ((10, 0), (10, 7), {"10.0", "10.3"}),
        ((10, 0), (11, 0), {"10.0", "10.3", "10.7"}),
        ((12, 0), (12, 1), {"12.0"}),
        ((8, 0), (9, 0), {"8.0", "8.9"}),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_c79_arch_ranges_are_half_open(low, high, inside, capability):
    kernels = [fg.kernel("quantize_row_col", arches=ArchRange(low, high))]
    report = plan(fg.row_col().freeze(), ARCHES[CAPABILITIES[capability]], kernels=kernels)
    assert bool(report.matches) is (capability in inside)
    if capability not in inside:
        assert codes(report, "quantize_row_col", VerdictKind.UNSUPPORTED) == {"ARCH"}


def test_the_cpu_has_no_fused_kernel():
    assert not plan(fg.dglu().freeze(), ARCHES["cpu"]).matches


def test_every_failing_condition_is_collected():
    p = fg.dglu(act="swiglu", glu=GluLayout.concatenated(), exponent=1, a_type=DataType.HALF, r_type=BF16)
    report = plan(p.freeze(), kernels=fg.EXACT_KERNELS)
    wanted = {"ALPHA_EXPONENT", "ACT", "GLU_LAYOUT", "A_TYPE", "R_ROUNDING"}
    assert codes(report, "grouped_gemm_dglu", VerdictKind.UNSUPPORTED) == wanted


def test_the_choice_is_deterministic():
    graphs = [fg.dglu().freeze() for _ in range(2)]
    first, second = (plan(g) for g in graphs)
    assert [(m.rule, m.nodes, m.kernel) for m in first.matches] == [(m.rule, m.nodes, m.kernel) for m in second.matches]
    assert [(v.kind, v.rule, v.anchor, v.nodes) for v in first.verdicts] == [
        (v.kind, v.rule, v.anchor, v.nodes) for v in second.verdicts
    ]


def test_verdicts_of_one_anchor_stand_together_in_rule_order():
    p = fg.dglu()
    fg.dglu(parts=p, suffix="2")
    report = plan(p.freeze())
    rank = {r: i for i, r in enumerate(fg.RULE_IDS)}
    keys = [(v.anchor, rank[v.rule]) for v in report.verdicts]
    assert keys == sorted(keys)


def test_support_table_lists_every_rule_and_kernel():
    rows = support_table(kernels=[fg.kernel("grouped_gemm_dglu", fg.EXACT["grouped_gemm_dglu"])])
    assert [r.rule for r in rows] == list(fg.RULE_IDS)
    assert rows[0].kernel == "test.grouped_gemm_dglu" and rows[0].arches == "sm90"
    assert len(rows[0].codes) == len(rows[0].requires) and "ACT" in rows[0].codes
    assert all(r.kernel is None for r in rows[1:])
    assert {r.rule for r in support_table()} == set(fg.RULE_IDS)


def test_the_shipped_table_is_the_default():
    report = fuse(fg.row_col().freeze(), ARCHES["sm90"])
    assert {v.rule for v in report.verdicts} == {"quantize_row_col", "quantize"}


WIDE = {"grouped_gemm_dglu": fg.dglu, "grouped_gemm_glu": fg.glu, "grouped_gemm_quant": fg.quant}


@pytest.mark.parametrize("rule", WIDE)
def test_a_rounded_copy_is_written_by_the_kernel_and_sums_take_the_wide_value(rule):
    p = WIDE[rule]()
    copy = p.g.identity(p["d"]).set_data_type(BF16)
    p.outputs.append(copy)
    graph = p.freeze()
    (match,) = plan(graph).matches
    assert match.nodes == tuple(range(len(graph.nodes)))
    assert match.roles["d"] == copy.uid and match.problem["d"].data_type is BF16
    assert match.problem.rounding["d_wide"] is FLOAT and "d" not in match.problem.rounding


@pytest.mark.parametrize("rule", WIDE)
def test_a_copy_of_a_value_that_was_rounded_before_stays_apart(rule):
    p = WIDE[rule](which=("q_row",))
    p["d"].set_data_type(BF16)
    p.outputs.append(p.g.identity(p["d"]).set_data_type(FLOAT))
    graph = p.freeze()
    report = plan(graph)
    (match,) = report.matches
    assert len(graph.nodes) - 1 not in match.nodes and match.problem["d"].data_type is BF16
    assert "WIDE_TYPE" in {r.code for v in report.verdicts for r in v.reasons}


def test_a_wide_value_that_is_an_output_itself_keeps_its_copy_apart():
    p = fg.dglu()
    p.outputs += [p["d"], p.g.identity(p["d"]).set_data_type(BF16)]
    graph = p.freeze()
    (match,) = plan(graph).matches
    assert match.roles["d"] == p["d"].uid and len(graph.nodes) - 1 not in match.nodes
