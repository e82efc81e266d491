"""A plan is made without a word about why; what is said later is what the same choice says."""

from __future__ import annotations

import copy
import logging
import pickle
from dataclasses import replace
from typing import Any

import fusion_graphs as fg  # type: ignore[import-not-found]
import pytest
from fusion_graphs import plan  # type: ignore[import-not-found]
from opfuse.fusion_rules import VerdictKind, fusion
from opfuse.fusion_rules.matcher import Trace
from opfuse.graph_ops.ir import OpGraph
from opfuse.graph_ops.log import log_fallbacks, rules_log
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.registry import KERNELS
from test_partition import Writer  # type: ignore[import-not-found]

TABLES = (fg.ANY_KERNELS, fg.EXACT_KERNELS, KERNELS, [fg.kernel("grouped_gemm_dglu", fg.without("q_row", "dbias"))], ())
SETTINGS = [
    (arch, kernels, disable)
    for arch in (ARCHES["sm90"], ARCHES["sm100"])
    for kernels in TABLES
    for disable in ((), ("grouped_gemm_dglu", "raise_glu"))
]


def graphs() -> list[OpGraph]:
    escaping = fg.dglu(which=("q_row", "q_col", "dbias"), act="swiglu")
    escaping.outputs.append(escaping.g.relu(escaping["r"]))
    near = [fg.dglu(), fg.glu(), fg.quant(), fg.wgrad(), fg.row_col(), escaping]
    return [*(parts.freeze() for parts in near), *(Writer(seed).write() for seed in range(25))]


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a reason was asked for")


def test_a_plan_works_out_no_verdict(monkeypatch):
    graph = fg.dglu(which=("q_row", "q_col", "dbias"), act="swiglu").freeze()
    with monkeypatch.context() as patch:
        patch.setattr(fusion, "judge", refuse)
        patch.setattr(Trace, "reason", refuse)
        made = make_plan(graph, ARCHES["sm90"], kernels=fg.ANY_KERNELS)
        unfused = make_plan(graph, ARCHES["sm90"], kernels=fg.EXACT_KERNELS)
        assert repr(made.report) and made.fused_steps and not unfused.fused_steps
        with pytest.raises(AssertionError, match="a reason"):
            _ = unfused.report.verdicts
    assert {v.kind for v in made.report.verdicts} >= {VerdictKind.CHOSEN}
    assert unfused.reasons


@pytest.mark.parametrize("place", range(len(SETTINGS)))
def test_what_is_said_later_is_the_choice_that_was_made(place, monkeypatch):
    """Judging with every reason finds the candidates that judging without finds, in the same order."""
    arch, kernels, disable = SETTINGS[place]
    seen: list[list[Any]] = []
    weigh = fusion.weigh

    def spy(candidates: Any, *rest: Any) -> Any:
        seen.append(
            [
                (c.cover.rule.id, c.kernel.id, c.cover.nodes, c.cover.roles, c.cover.problem)
                for c in candidates
                if c.cover.rule.id not in disable
            ]
        )
        return weigh(candidates, *rest)

    monkeypatch.setattr(fusion, "weigh", spy)
    for graph in graphs():
        seen.clear()
        report = plan(graph, arch, kernels=kernels, disable=disable)
        told = [(v.rule, v.kernel, v.nodes) for v in report.verdicts if v.kind is VerdictKind.CHOSEN]
        fast, judged = seen
        assert fast == judged, graph.name
        assert told == [(m.rule, m.kernel, m.nodes) for m in report.matches], graph.name
        assert report.verdicts == plan(replace(graph), arch, kernels=kernels, disable=disable).verdicts


def test_a_report_is_a_value():
    graph = fg.dglu().freeze()
    report, other = plan(graph), plan(replace(graph))
    assert report == other and report.verdicts == other.verdicts
    strict = [fg.kernel("grouped_gemm_dglu"), fg.kernel("grouped_gemm_dglu", name="never", launches=lambda problem: 9)]
    assert plan(graph, kernels=strict).matches == report.matches and plan(graph, kernels=strict) != report
    assert report != "a report" and replace(report, arch="sm91") != report
    for kept in (pickle.loads(pickle.dumps(plan(replace(graph)))), copy.deepcopy(plan(replace(graph)))):
        assert kept == report and kept.verdicts == report.verdicts and kept.verdicts


def test_a_log_that_nobody_hears_asks_for_nothing(monkeypatch, caplog):
    made = make_plan(fg.dglu().freeze(), ARCHES["sm90"], kernels=())
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        log_fallbacks(made)
        patch.setattr(rules_log, "level", logging.ERROR)
        rules_log.manager._clear_cache()  # type: ignore[attr-defined]
        log_fallbacks(made)
    rules_log.manager._clear_cache()  # type: ignore[attr-defined]
    assert "verdicts" not in made.report.__dict__
    with caplog.at_level(logging.WARNING, logger="opfuse"):
        log_fallbacks(made)
    assert "verdicts" in made.report.__dict__ and caplog.records
