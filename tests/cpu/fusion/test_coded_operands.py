"""Products of codes and scales: absorbed with their scales where both operands are, and left alone otherwise."""

from __future__ import annotations

from collections.abc import Callable

import fusion_graphs as fg  # type: ignore[import-not-found]
import pytest
from fusion_graphs import BF16, FLOAT, plan  # type: ignore[import-not-found]
from opfuse.kernels.registry import KernelEntry

RULES = ("grouped_gemm_dglu", "grouped_gemm_glu", "grouped_gemm_quant")


def takes(rule: str, *, codes: bool) -> list[KernelEntry]:
    """A kernel for codes alone, or for values alone."""
    from opfuse.kernels.condition import Condition

    wanted = Condition("CODES", "codes" if codes else "values", lambda p, a: "sf_a" in p,
                       lambda p, a: ("sf_a" in p) is codes)  # fmt: skip
    return [fg.kernel(rule, [wanted])]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("values", [BF16, FLOAT], ids=str)
def test_both_operands_are_absorbed_with_their_scales(rule: str, values: fg.DataType) -> None:
    p = fg.coded_product(rule, values=values)
    (match,) = plan(p.freeze(), kernels=takes(rule, codes=True)).matches
    uids = {role: p[name].uid for role, name in
            (("a", "a_codes"), ("b", "b_codes"), ("sf_a", "sf_a"), ("sf_b", "sf_b"))}  # fmt: skip
    assert {role: match.roles[role] for role in uids} == uids
    assert len(match.nodes) == len(p.freeze().nodes)
    assert match.problem.rounding["a_values"] is match.problem.rounding["b_values"] is values


@pytest.mark.parametrize("rule", RULES)
def test_a_kernel_for_values_takes_the_rest(rule: str) -> None:
    p = fg.coded_product(rule)
    graph = p.freeze()
    (match,) = plan(graph, kernels=takes(rule, codes=False)).matches
    assert match.roles["a"] == p["a"].uid and "sf_a" not in match.roles
    assert {graph.nodes[i].op for i in range(len(graph.nodes))} - {graph.nodes[i].op for i in match.nodes} == {
        "block_scale_dequantize"
    }


def _extra_reader(p: fg.Parts) -> None:
    p.outputs.append(p.g.relu(p["b"]))


def _output(p: fg.Parts) -> None:
    p.outputs.append(p["a"])


MISSES: dict[str, tuple[dict, Callable[[fg.Parts], None] | None]] = {
    "only a": ({"codes_of": ("a",)}, None),
    "only b": ({"codes_of": ("b",)}, None),
    "norm_const": ({"norm": True}, None),
    "values read elsewhere": ({}, _extra_reader),
    "values are an output": ({}, _output),
    "scales along the rows": ({"axes": (0, 0)}, None),
    "rounds in half": ({"values": fg.DataType.HALF}, None),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("miss", MISSES)
def test_one_step_away_is_not_absorbed(rule: str, miss: str) -> None:
    options, change = MISSES[miss]
    p = fg.coded_product(rule, **options)
    if change is not None:
        change(p)
    assert plan(p.freeze(), kernels=takes(rule, codes=True)).matches == ()


@pytest.mark.parametrize("codes_of", [("a", "b"), ()], ids=["codes", "values"])
def test_the_saved_copy_of_the_preactivation_is_written(codes_of: tuple[str, ...]) -> None:
    p = fg.coded_product("grouped_gemm_glu", copied=FLOAT, codes_of=codes_of)
    graph = p.freeze()
    (match,) = plan(graph, kernels=takes("grouped_gemm_glu", codes=bool(codes_of))).matches
    assert match.roles["c"] == p.outputs[-1].uid and match.problem["c"].data_type is BF16
    assert match.problem.rounding["c_wide"] is FLOAT
    assert len(match.nodes) == len(graph.nodes)


def test_a_second_copy_stays_outside() -> None:
    """One copy leaves through the kernel; the other would have to read the product, which never reaches memory."""
    p = fg.coded_product("grouped_gemm_glu", copied=FLOAT)
    p.outputs.append(p.g.identity(p["y"]).set_data_type(fg.DataType.HALF))
    for match in plan(p.freeze(), kernels=takes("grouped_gemm_glu", codes=True)).matches:
        assert "c_wide" not in match.problem.rounding
