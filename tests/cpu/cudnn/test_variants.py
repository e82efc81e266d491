"""Variants of cudnn-frontend's kernels: what the tables say reaches the class, which accepts it, and is a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from opfuse.graph_ops.plan_set import candidate_plans
from opfuse.graph_ops.target import Target
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.cudnn import (
    block_scaled_dglu,
    block_scaled_glu,
    grouped_dglu,
    grouped_glu,
    grouped_quant,
    grouped_wgrad,
    knobs,
    launch,
)
from opfuse.kernels.cudnn.knobs import Knobs
from opfuse.kernels.cudnn.operands import configure
from opfuse.kernels.registry import KERNELS, KernelEntry

cudnn = pytest.importorskip("cudnn", reason="needs the extra `cuda`: cudnn-frontend is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the class reads the device")

ENTRIES = {k.id: k for k in KERNELS if k.id.startswith("cudnn.")}
ACCEPTED = "CUDA is not available"  # what the classes refuse last
WIDE = {"n": 768}  # three tiles of columns, which clusters of two or four do not divide


FAMILIES = {
    "cudnn.grouped_gemm_dglu.block_scaled": block_scaled_dglu.FAMILY,
    "cudnn.grouped_gemm_glu.bf16": grouped_glu.FAMILY,
    "cudnn.grouped_gemm_glu.block_scaled": block_scaled_glu.FAMILY,
    "cudnn.discrete_grouped_gemm_swiglu": block_scaled_glu.DISCRETE,
    "cudnn.grouped_gemm_quant.block_scaled": grouped_quant.FAMILY,
    "cudnn.grouped_gemm_wgrad.bf16": grouped_wgrad.FAMILY,
    "cudnn.grouped_gemm_wgrad.block_scaled": grouped_wgrad.FAMILY,
}


def target(arch: str) -> Target:
    return Target(ARCHES[arch], None, fused=True, strict=False, disable=())


def refusal(entry: KernelEntry, problem: Any, variant: str | None) -> str:
    """What the class says where everything but the missing GPU is as it wants."""
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as caught:
        entry.build(problem, "cpu", variant)
    return str(caught.value)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The knobs that reached a class's constructor, of each object made."""
    found: list[dict[str, Any]] = []

    def recording(real: Any) -> Any:
        def made(**options: Any) -> Any:
            words = ("mma_tiler_mn", "cluster_shape_mn", "use_dynamic_sched")
            found.append({word: options[word] for word in words if word in options})
            return real(**options)

        return made

    for name in {f.class_name for f in FAMILIES.values()}:
        monkeypatch.setattr(cudnn, name, recording(getattr(cudnn, name)))
    launch._shared.cache_clear()
    grouped_dglu.compiled.cache_clear()
    return found


def problem_of(program: Any, case: dict[str, Any]) -> Any:
    entry = ENTRIES[case["kernel"]]
    plans = candidate_plans(program.declare(case), target("sm100"), ("A",), (entry,))
    (step,) = plans[0].fused_steps
    assert step.match is not None
    return step.match.problem


def test_the_class_accepts_every_variant_of_every_case(program: Any, given: list[dict[str, Any]]) -> None:
    """All activations, families, weight modes and outputs of the compiled table, each also with other columns."""
    known = {k.name: k for k in (*knobs.BLOCK_SCALED, *knobs.BF16, *knobs.WGRAD)}
    seen = set()
    for name, case in program.CASES.items():
        if "variant" in case:
            continue
        entry = ENTRIES[case["kernel"]]
        problem = problem_of(program, case | WIDE)
        variants = entry.variants(problem)
        assert len(set(variants)) == len(variants) >= 4
        for variant in (None, *variants):
            given.clear()
            assert ACCEPTED in refusal(entry, problem, variant), f"{name} {variant}"
            assert given == [known[variant].keywords if variant else {}], f"{name} {variant}"
        seen.add(entry.id)
    assert seen == set(FAMILIES)


@pytest.mark.parametrize("change", [{}, {"act": "geglu"}, {"changes": {"b": {"discrete": True}}}, {"b_major": "n"}])
def test_the_bf16_dglu_class_accepts_every_variant(
    make_problem: Any, entry: KernelEntry, given: list[dict[str, Any]], change: dict[str, Any]
) -> None:
    problem = make_problem(k=256, n=96, roles=("prob", "dbias"), **change)
    for variant in (None, *entry.variants(problem)):
        given.clear()
        assert ACCEPTED in refusal(entry, problem, variant), variant
        assert given == [{k.name: k.keywords for k in knobs.BF16}[variant] if variant else {}]


@pytest.mark.parametrize("kernel", FAMILIES)
@pytest.mark.parametrize("illegal", [Knobs((256, 256), (1, 1)), Knobs((256, 256), (2, 3)), Knobs((128, 96), (1, 1))])
def test_the_classes_do_judge_knobs(program: Any, kernel: str, illegal: Knobs) -> None:
    """An illegal line of a table would be seen by the tests around."""
    case = next(c for c in program.CASES.values() if c["kernel"] == kernel)
    told = configure(problem_of(program, case), FAMILIES[kernel].standing_in, illegal)
    with pytest.raises((ValueError, NotImplementedError)):
        launch.instance(FAMILIES[kernel], told, torch.device("cpu"))


@pytest.mark.parametrize("illegal", [Knobs((256, 256), (1, 1)), Knobs((256, 256), (4, 1)), Knobs((128, 80), (1, 1))])
def test_the_bf16_dglu_class_does_judge_knobs(make_problem: Any, illegal: Knobs) -> None:
    told = replace(grouped_dglu.DgluConfiguration.of(make_problem()), knobs=illegal)
    with pytest.raises(ValueError):
        grouped_dglu.compiled(told, torch.device("cpu"))


def test_an_unknown_variant_is_named(program: Any) -> None:
    case = program.CASES["grouped_gemm_quant.block_scaled-mxfp8-none-dense"]
    with pytest.raises(ValueError, match=r"no variant '64x64_1x1': there are \['256x256_2x1_dynamic'"):
        ENTRIES[case["kernel"]].build(problem_of(program, case), "cpu", "64x64_1x1")


def test_partial_sums_of_dprob_are_of_whole_clusters(program: Any) -> None:
    """`_dprob_n_slots` of the class: ceil(N / (256 cluster_n)) cluster_n, N = 768."""
    name = "grouped_gemm_dglu.block_scaled-nvfp4-swiglu-dense-deterministic"
    problem = problem_of(program, program.CASES[name] | WIDE)
    slots = {}
    for line in (None, *knobs.BLOCK_SCALED):
        slots[line and line.cluster] = block_scaled_dglu.slots(
            configure(problem, block_scaled_dglu.FAMILY.standing_in, line)
        )
    assert slots == {None: 3, (2, 1): 3, (1, 1): 3, (2, 2): 4, (1, 2): 4}


@pytest.mark.parametrize("kernel", FAMILIES)
@pytest.mark.parametrize("arch", ["sm100", "sm103"])
def test_variants_are_plans_behind_every_other(program: Any, kernel: str, arch: str) -> None:
    case = next(c for c in program.CASES.values() if c["kernel"] == kernel)
    entry = ENTRIES[kernel]
    plans = candidate_plans(program.declare(case), target(arch), ("A",), (entry,))
    (step,) = plans[0].fused_steps
    assert step.match is not None
    names = [f"{kernel}[{variant}]" for variant in entry.variants(step.match.problem)]
    assert [p.name for p in plans] == [kernel, "unfused", *names]
