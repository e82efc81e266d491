"""Plans for sm90: what becomes one launch of our kernel, what stays apart, and the reasons that are then given."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.graph_ops.plan import Plan
from opfuse.graph_ops.planner import make_plan, require_fused
from opfuse.kernels.arch import ARCHES

KERNEL = "sm90.grouped_gemm_dglu"
BF16, F32 = DataType.BFLOAT16, DataType.FLOAT
SAMPLES = Path(__file__).parents[3] / "samples"


@pytest.fixture(scope="module")
def samples() -> ModuleType:
    spec = importlib.util.spec_from_file_location("opfuse_usual_graphs", SAMPLES / "usual_graphs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plan_of(graph: Graph, arch: str = "sm90") -> Plan:
    return make_plan(graph.operation_graph(), ARCHES[arch])


def dglu(
    *,
    outputs: tuple[str, ...] = ("d", "dprob"),
    copy: bool = False,
    hidden: int = 512,
    intermediate: int = 256,
    layout: GluLayout | None = None,
    gradient: DataType = BF16,
    product: DataType = F32,
    multiple_of: int = 128,
    split: bool = True,
    norm: bool = False,
    block: tuple[DataType, int, DataType] = (DataType.FP8_E4M3, 32, DataType.FP8_E8M0),
    **parameters: Any,
) -> Graph:
    """FC2 dgrad -> GLU backward -> what `outputs` say. `copy`: sums and codes of a FLOAT gradient, d its copy."""
    g = Graph(name="fc2_dgrad", arch="sm90", io_data_type=BF16)
    m, experts = g.symbol("M"), 8
    dy = g.tensor("dy", (m, hidden))
    w2 = g.tensor("w2", (experts, hidden, intermediate), (hidden * intermediate, 1, hidden))
    h = g.tensor("h", (m, 2 * intermediate), glu_layout=layout or GluLayout.interleaved(32))
    offsets = g.tensor("offsets", (experts,), data_type=DataType.INT32, multiple_of=multiple_of)
    prob = g.tensor("prob", (m,), data_type=F32)
    r = g.grouped_matmul(dy, w2, offsets, name="fc2").set_data_type(product)
    wide, dprob = g.glu_backward(r, h, prob=prob, **{"act": "swiglu", **parameters}, name="dglu")
    made = {"dprob": dprob, "d": g.identity(wide, name="round") if copy else wide}
    made["d"].set_data_type(gradient)
    if "dbias" in outputs:
        made["dbias"] = g.group_sum(wide, offsets, name="bias_grad")
    if "amax" in outputs:
        made["amax"] = g.group_amax(wide, offsets, split_glu=split, name="largest").set_data_type(F32)
    codes, block_size, scale = block
    for side, axis in (("row", 1), ("col", 0)):
        if f"q_{side}" in outputs:
            factor = g.tensor("norm", (1,), data_type=F32) if norm else None
            made[f"q_{side}"], made[f"sf_{side}"] = g.block_scale_quantize(
                wide, block_size=block_size, axis=axis, data_type=codes, scale_type=scale, norm_const=factor,
                name=f"quantize_{side}",
            )  # fmt: skip
            made[f"sf_{side}"].set_output(True)
    for name in outputs:
        made[name].set_output(True)
    return g


def names(plan: Plan, step: Any) -> set[str]:
    return {plan.graph.nodes[n].name for n in step.nodes}


WHOLE: dict[str, dict[str, Any]] = {
    "d and dprob": dict(),
    "codes both ways": dict(outputs=("d", "dprob", "q_row", "q_col"), gradient=F32),
    "all that derives, beside a copy": dict(outputs=("d", "dprob", "dbias", "amax", "q_row", "q_col"), copy=True),
    "bf16 d with dbias": dict(outputs=("d", "dbias"), copy=True),
    "codes alone": dict(outputs=("q_row", "q_col"), gradient=F32),
    "geglu, any groups": dict(act="geglu", clamp_max=10.0, multiple_of=1),
    "situglu": dict(act="situglu"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_one_launch_on_sm90(name: str) -> None:
    plan = plan_of(dglu(**WHOLE[name]))
    assert [s.kernel for s in plan.steps] == [KERNEL] and plan.steps[0].capturable
    assert plan.name == KERNEL and plan.estimate.seconds < plan.unfused_estimate.seconds
    require_fused(plan)


# graph -> the code, and the nodes that the kernel still takes.
APART: dict[str, tuple[dict[str, Any], str, set[str]]] = {
    "another interleaving": (dict(layout=GluLayout.interleaved(16)), "GLU_LAYOUT", set()),
    "a product that rounds": (dict(product=BF16), "PRODUCT_ROUNDING", set()),
    "K of 500": (dict(hidden=500), "DEPTH_MULTIPLE", set()),
    "N of 48": (dict(intermediate=48, layout=GluLayout.concatenated()), "COLUMN_MULTIPLE", set()),
    "no upper clamp": (dict(act="geglu", clamp_max=float("inf")), "ACT_PARAMETERS", set()),
    "dbias of a rounded gradient": (
        dict(outputs=("d", "dprob", "dbias")), "SOURCE_ROUNDING", {"fc2", "dglu"},
    ),
    "codes of a rounded gradient": (
        dict(outputs=("d", "dprob", "q_row")), "SOURCE_ROUNDING", {"fc2", "dglu"},
    ),
    "groups of any size": (
        dict(outputs=("d", "dprob", "q_row", "dbias"), copy=True, multiple_of=1), "GROUP_MULTIPLE",
        {"fc2", "dglu", "bias_grad"},  # the kernel writes the wide gradient, which is read outside
    ),
    "one amax for gate and up": (
        dict(outputs=("d", "dprob", "amax", "dbias"), copy=True, split=False), "AMAX_FORM",
        {"fc2", "dglu", "bias_grad"},  # the kernel writes the wide gradient, which is read outside
    ),
    "norm_const": (
        dict(outputs=("d", "dprob", "q_row", "dbias"), gradient=F32, norm=True), "NORM_CONST",
        {"fc2", "dglu", "bias_grad"},
    ),
    "NVFP4": (
        dict(outputs=("d", "dprob", "q_row"), gradient=F32, block=(DataType.FP4_E2M1, 16, DataType.FP8_E4M3)),
        "BLOCK_FORMAT", {"fc2", "dglu"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_what_stays_apart_says_why(name: str) -> None:
    options, code, taken = APART[name]
    graph = dglu(**options)
    plan = plan_of(graph)
    assert code in {r.code for v in plan.report.verdicts if v.kernel == KERNEL for r in v.reasons}
    assert [names(plan, s) for s in plan.fusions] == ([taken] if taken else [])
    assert code in str(graph.explain(arch="sm90"))


@pytest.mark.parametrize("arch", ["cpu", "sm80", "sm89", "sm100", "sm103", "sm107", "sm120"])
def test_other_arches_do_without_it(arch: str) -> None:
    plan = plan_of(dglu(multiple_of=256), arch)
    assert KERNEL not in {s.kernel for s in plan.steps}
    assert "ARCH" in {r.code for v in plan.report.verdicts if v.kernel == KERNEL for r in v.reasons}


@pytest.mark.parametrize("name", ["dglu_bf16", "dglu_mxfp8"])
@pytest.mark.parametrize("act", ["swiglu", "geglu", "situglu"])
def test_samples_are_one_launch(samples: Any, name: str, act: str) -> None:
    graph = samples.GRAPHS[name](samples.Sizes(act=act))
    plan = plan_of(graph)
    assert [s.kernel for s in plan.steps] == [KERNEL]
    require_fused(plan)


def test_variants_are_plans_by_name(samples: Any) -> None:
    graph = samples.dglu_bf16()
    for verb in ("validate", "build_operation_graph", "create_execution_plans"):
        getattr(graph, verb)(**({"arch": "sm90"} if verb == "create_execution_plans" else {}))
    listed = [p.name for p in graph.plans]
    assert listed[:3] == [KERNEL, "sm90.grouped_gemm", "unfused"]
    assert len(listed) >= 6 and all(n.startswith(f"{KERNEL}[") for n in listed[3:])
