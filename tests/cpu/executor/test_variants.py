"""Variants of a kernel: listed as plans, built and measured under policy ALL, remembered by device and sizes."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opfuse.graph_ops import Graph, GraphNotSupportedError, tuning

MODULE = "opfuse_kernels_with_variants"
KERNEL = "test.grouped_gemm_dglu"
SECONDS = {"unfused": 3e-3, KERNEL: 2e-3, f"{KERNEL}[wide]": 1e-3, f"{KERNEL}[tall]": 4e-3}


@pytest.fixture
def built(tools: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """The variants that were built, in order; a "broken" or "illegal" one does not build."""
    found: list[str | None] = []

    def build(problem: Any, device: Any, variant: str | None = None) -> Any:
        if variant == "broken":
            raise NotImplementedError("no such tile here")
        if variant == "illegal":
            raise ValueError("the compiler fails: too many registers")
        found.append(variant)
        return tools.StandIn(problem, device)

    module = types.ModuleType(MODULE)
    module.build = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    yield found


def make(tools: Any, variants: tuple[str, ...] = ("wide", "tall"), **options: Any) -> Graph:
    kernel = tools.stand_in("grouped_gemm_dglu", module=MODULE, variants=lambda problem: variants)
    graph: Graph = tools.EmulatedGraph(kernels=(kernel,), **options)
    tools.declare_dglu(graph)
    return graph


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that each plan takes, by name, in place of a stopwatch; runs the plan all the same."""
    seconds = dict(SECONDS)

    def measure(executable: Any, bound: Any, workspace: Any) -> float:
        executable.run(bound, workspace)
        return seconds[executable.plan.name]

    monkeypatch.setattr(tuning, "measure", measure)
    return seconds


def test_variants_are_listed_behind_every_other_plan(tools: Any, built: list[str | None]) -> None:
    graph = make(tools).build()
    assert [p.name for p in graph.plans] == [KERNEL, "unfused", f"{KERNEL}[wide]", f"{KERNEL}[tall]"]
    assert (graph.plan.name, built) == (KERNEL, [None]), "the default policy builds the kernel's own choice alone"


@pytest.mark.parametrize("options", [{"heuristics": ["FALLBACK"]}, {"fused": False}, {"disable": [KERNEL]}])
def test_plans_without_the_kernel_have_no_variants(tools: Any, built: list[str | None], options: Any) -> None:
    assert [p.name for p in make(tools).build(**options).plans] == ["unfused"]


def test_policy_all_measures_variants_and_remembers_the_winner(
    tools: Any, built: list[str | None], clock: dict[str, float]
) -> None:
    graph = make(tools).build(policy="ALL", bindings={"M": 64})
    record = graph.tuning
    assert record is not None and built == [None, "wide", "tall"]
    assert {m.plan: m.seconds for m in record.measurements} == SECONDS
    assert record.winners == {("cpu", (("M", 64),)): f"{KERNEL}[wide]"}
    pack = tools.random_pack(graph.operation_graph(), 60, seed=7)
    chosen = graph._plan_set.choice  # type: ignore[union-attr]
    assert graph.plans[chosen({"M": 60})].name == f"{KERNEL}[wide]"
    want = make(tools, fused=False).build()(pack)
    for name, got in graph(pack).items():
        assert torch.equal(got.view(torch.uint8), want[name].view(torch.uint8)), name


def test_the_winner_may_be_unfused(tools: Any, built: list[str | None], clock: dict[str, float]) -> None:
    clock["unfused"] = 1e-6
    graph = make(tools).build(policy="ALL", bindings={"M": 64})
    assert graph.plans[graph._plan_set.choice({"M": 64})].name == "unfused"  # type: ignore[union-attr]


def test_winners_differ_by_sizes(tools: Any, built: list[str | None], clock: dict[str, float]) -> None:
    graph = make(tools)
    for verb in ("validate", "build_operation_graph", "create_execution_plans", "check_support"):
        getattr(graph, verb)()
    sizes = iter([64, 1024])
    rows = {64: f"{KERNEL}[wide]", 1024: f"{KERNEL}[tall]"}

    def buffers(*given: Any, **named: Any) -> Any:
        size = next(sizes)
        clock.update(SECONDS)
        clock[rows[size]] = 1e-6
        return original(*given, **named)

    original = tuning.synthetic_buffers
    tuning.synthetic_buffers = buffers
    try:
        graph.build_plans("ALL", bindings=[{"M": 64}, {"M": 1024}])
    finally:
        tuning.synthetic_buffers = original
    for size, name in rows.items():
        assert graph.plans[graph._plan_set.choice({"M": size})].name == name  # type: ignore[union-attr]


def test_a_serialized_graph_keeps_its_winning_variant(
    tools: Any, built: list[str | None], clock: dict[str, float]
) -> None:
    graph = make(tools).build(policy="ALL", bindings={"M": 64})
    again = type(graph).deserialize(graph.serialize(), kernels=graph._kernels)
    assert again.tuning is not None and again.tuning.winners == graph.tuning.winners  # type: ignore[union-attr]
    built.clear()
    pack = tools.random_pack(graph.operation_graph(), 60, seed=8)
    for name, got in again(pack).items():
        assert torch.equal(got.view(torch.uint8), graph(pack)[name].view(torch.uint8)), name
    assert built == [None, "wide"], "the first plan, and the one that won"
    gone = tools.stand_in("grouped_gemm_dglu", module=MODULE)
    with pytest.raises(GraphNotSupportedError) as caught:
        type(graph).deserialize(graph.serialize(), kernels=(gone,))
    assert caught.value.code == "PLAN_GONE" and "[wide]" in str(caught.value)


@pytest.mark.parametrize("variant", ["broken", "illegal"])
def test_a_variant_that_does_not_build_gives_up_its_plan(
    tools: Any, built: list[str | None], clock: dict[str, float], caplog: pytest.LogCaptureFixture, variant: str
) -> None:
    with caplog.at_level("WARNING", logger="opfuse"):
        graph = make(tools, (variant, "wide")).build(policy="ALL", bindings={"M": 64})
    assert built == [None, "wide"]
    assert graph.tuning is not None and f"{KERNEL}[{variant}]" not in {m.plan for m in graph.tuning.measurements}
    assert [r.code for r in caplog.records if hasattr(r, "code")] == ["BUILD_DECLINED"]


def test_the_plan_told_of_is_the_one_that_execute_takes(
    tools: Any, built: list[str | None], clock: dict[str, float]
) -> None:
    graph = make(tools).build(policy="ALL", bindings={"M": 64})
    again = type(graph).deserialize(graph.serialize(), kernels=graph._kernels)
    again.check_support()
    again.build_plans()
    for one in (graph, again):
        assert one.plan.name == f"{KERNEL}[wide]" and f"FUSED {KERNEL}[wide]" in str(one.explain())
        plans = one._plan_set
        assert plans is not None and plans.plans[plans.choice({"M": 64})] is one.plan


def test_a_variant_can_be_selected_or_barred_by_name(tools: Any, built: list[str | None]) -> None:
    graph = make(tools).build()
    graph.select_plan([p.name for p in graph.plans].index(f"{KERNEL}[tall]"))
    assert built == [None, "tall"] and graph.plan.name == f"{KERNEL}[tall]"
    told = graph.explain()
    assert f"FUSED {KERNEL}[tall] (rule" in str(told) and f"{KERNEL}[tall]" in told.to_mermaid()
    (step,) = [s for s in json.loads(told.to_json())["steps"] if s["rule"]]
    assert (step["kernel"], step["title"]) == (KERNEL, f"{KERNEL}[tall]")
    barred = make(tools)
    for verb in ("validate", "build_operation_graph", "create_execution_plans"):
        getattr(barred, verb)()
    barred.deselect_engines([KERNEL])
    barred.check_support()
    barred.build_plans("ALL")
    assert barred.plan.name == "unfused" and built == [None, "tall"]


def test_progress_tells_what_is_built_and_what_is_measured(
    tools: Any, built: list[str | None], clock: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    make(tools).build(policy="ALL", bindings={"M": 64})
    for name in SECONDS:
        assert f"/4 building {name}" in shown.getvalue() and f"/4 measuring {name}" in shown.getvalue()
