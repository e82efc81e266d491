"""Alike matches are judged once: the same report as when each is judged by itself."""

from __future__ import annotations

from dataclasses import replace

import fusion_graphs as fg  # type: ignore[import-not-found]
import pytest
import test_near_misses as near  # type: ignore[import-not-found]
from fusion_graphs import Parts, plan  # type: ignore[import-not-found]
from opfuse.fusion_rules import candidates


def repeated() -> Parts:
    """Alike dGLU blocks of which some let the product escape and some keep d."""
    p = Parts()
    for i in range(8):
        fg.dglu(parts=p, suffix=f".{i}", which=("q_row", "q_col", "dbias"), act="swiglu")
        if i % 4 == 1:
            p.outputs.append(p.g.relu(p["r"]))
        if i % 4 == 2:
            p.outputs.append(p.g.relu(p["d"]))
    return p


@pytest.mark.parametrize("kernels", [fg.ANY_KERNELS, fg.EXACT_KERNELS, ()], ids=["any", "exact", "none"])
def test_repeated_blocks(kernels, monkeypatch):
    graph = repeated().freeze()
    together = plan(graph, kernels=kernels)
    assert together.verdicts  # worked out before the patch
    monkeypatch.setattr(candidates, "_kind", lambda match, view: match)
    apart = plan(replace(graph), kernels=kernels)
    assert together.verdicts == apart.verdicts and together.matches == apart.matches


@pytest.mark.parametrize("place", range(len(near.CASES)))
def test_near_misses(place, monkeypatch):
    rule, _, _, build = near.CASES[place]
    kernels = [k for k in fg.EXACT_KERNELS if k.rule == rule]
    graph = build().freeze()
    together = plan(graph, kernels=kernels)
    assert together.verdicts  # worked out before the patch
    monkeypatch.setattr(candidates, "_kind", lambda match, view: match)
    apart = plan(replace(graph), kernels=kernels)
    assert together.verdicts == apart.verdicts and together.matches == apart.matches


def test_reasons_name_the_tensors_of_their_own_match():
    """Of two alike products whose factor is no row factor, each reason names its own factor."""
    p = Parts()
    fg.operands(p)
    names = ("first", "second")
    for name in names:
        factor = p.g.tensor(name, dim=(1, fg.COLUMNS), data_type=fg.FLOAT)
        fg.quantize(p, p.g.mul(p.g.grouped_matmul(p["a"], p["b"], p["offsets"]), factor), 1)
    said = [str(r.observed) for v in plan(p.freeze()).verdicts for r in v.reasons if r.code == "ROW_FACTOR"]
    assert [text.split()[0] for text in said] == list(names)
