"""Plans on sm100 for the graphs behind NVIDIA's two calls: one kernel where the code has one, a reason elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from opfuse.fusion_rules import VerdictKind, fuse
from opfuse.graph_ops.api import dglu_graph, discrete_swiglu
from opfuse.graph_ops.graph import Graph
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.registry import KERNELS

BF16, F32, E4M3, E5M2, E8M0 = (DataType.BFLOAT16, DataType.FLOAT, DataType.FP8_E4M3, DataType.FP8_E5M2,
                               DataType.FP8_E8M0)  # fmt: skip
FORMATS = {"mxfp8": (E4M3, 32, E8M0), "nvfp4": (DataType.FP4_E2M1, 16, E4M3), "mxfp4": (DataType.FP4_E2M1, 32, E8M0)}
GEGLU = {"linear_offset": 1.0, "geglu_alpha": 1.702, "clamp_max": 7.0, "clamp_min": -7.0}
DGLU, GLU, DISCRETE = (
    "cudnn.grouped_gemm_dglu.block_scaled",
    "cudnn.grouped_gemm_glu.block_scaled",
    "cudnn.discrete_grouped_gemm_swiglu",
)


def dglu(format: str, act: str = "dswiglu", d_type: DataType | None = None, **changes: Any) -> Graph:
    a_type, block, scale = FORMATS[format]
    d_type = d_type or (E4M3 if format == "mxfp8" else BF16)
    optional = {"alpha", "prob", "dprob", "dbias"} | ({"beta"} if act != "dgeglu" else set())
    optional |= set() if d_type.info.kind == "code" else {"amax"}
    given: dict[str, Any] = dict(
        device="cpu", depth=256, columns=256, experts=4, a_type=a_type, b_major="k", discrete=False, scale=scale,
        block=block, c_type=BF16, d_type=d_type, quantized=d_type.info.kind == "code", optional=frozenset(optional),
        act=act, parameters=tuple(GEGLU.items()) if act == "dgeglu" else (), epilogue="", rounds_product=False,
        deterministic=False,
    )  # fmt: skip
    return dglu_graph.build(dglu_graph.DgluConfig(**{**given, **changes}))


def swiglu(format: str, act: str = "swiglu", d_type: DataType | None = None, **changes: Any) -> Graph:
    a_type, block, scale = FORMATS[format]
    d_type = d_type or (E4M3 if format == "mxfp8" else BF16)
    code = d_type.info.kind == "code"
    given: dict[str, Any] = dict(
        device="cpu", depth=256, columns=256, experts=4, a_type=a_type, b_major="k", scale=scale, block=block,
        c_type=BF16, d_type=d_type, scaled=code, optional=frozenset({"alpha", "prob"} | (set() if code else {"amax"})),
        bias_type=None, act=act, parameters=tuple(GEGLU.items()) if act == "geglu" else (),
    )  # fmt: skip
    return discrete_swiglu.build(discrete_swiglu.SwigluConfig(**{**given, **changes}))


def kernels(graph: Graph, arch: str = "sm100", **options: Any) -> list[str]:
    return [s.kernel for s in make_plan(graph.operation_graph(), ARCHES[arch], **options).steps]


@pytest.mark.parametrize("arch", ["sm100", "sm103"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("act", ["dswiglu", "dgeglu", "dsituglu"])
def test_a_block_scaled_dglu_call_is_one_kernel(format: str, act: str, arch: str) -> None:
    assert kernels(dglu(format, act), arch) == [DGLU]
    assert kernels(dglu(format, act, discrete=True), arch) == [DGLU]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("act", ["swiglu", "geglu"])
def test_a_discrete_swiglu_call_is_one_kernel(format: str, act: str) -> None:
    assert kernels(swiglu(format, act)) == [GLU]
    assert kernels(swiglu(format, act), disable=[GLU]) == [DISCRETE]
    assert kernels(swiglu(format, act, optional=frozenset({"alpha"}))) == [GLU], "without prob: ones stand in"


def test_sm107_runs_the_mxfp8_calls_as_one_kernel() -> None:
    assert kernels(dglu("mxfp8"), "sm107") == [DGLU]
    assert kernels(swiglu("mxfp8"), "sm107") == [GLU]
    assert DGLU not in kernels(dglu("nvfp4"), "sm107")


def reasons(graph: Graph, kernel: str, arch: str = "sm100") -> set[str]:
    report = fuse(graph.operation_graph(), ARCHES[arch], kernels=[k for k in KERNELS if k.id == kernel])
    return {
        r.code for v in report.verdicts if v.kernel == kernel and v.kind is VerdictKind.UNSUPPORTED for r in v.reasons
    }


REFUSED: dict[str, tuple[Graph, str, str]] = {
    "E5M2 D does not compile": (dglu("mxfp8", d_type=E5M2), DGLU, "CODE_FORMAT"),
    "16-bit D of MXFP8 operands": (dglu("mxfp8", d_type=BF16), DGLU, "D_TYPE"),
    "dbias in a deterministic graph": (dglu("nvfp4", deterministic=True), DGLU, "DETERMINISTIC_DBIAS"),
    "epilogue_op is accepted there and never applied": (dglu("mxfp8", epilogue="relu"), DGLU, "D_TYPE"),
    "E5M2 codes of the activation": (swiglu("mxfp8", d_type=E5M2), DISCRETE, "CODE_FORMAT"),
    "FP4 codes of MXFP8 operands": (swiglu("mxfp8", d_type=DataType.FP4_E2M1), DISCRETE, "CODE_FORMAT"),
    "float32 D of NVFP4 operands": (swiglu("nvfp4", d_type=F32), DISCRETE, "FP4_FLOAT_D"),
    "N-major FP4 weights": (swiglu("nvfp4", b_major="n"), DISCRETE, "FP4_MAJOR"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_code_does_not_do_declines_with_its_code(name: str) -> None:
    graph, kernel, code = REFUSED[name]
    assert code in reasons(graph, kernel)


def test_hopper_declines_codes_by_name_and_takes_their_values() -> None:
    graph = dglu("nvfp4")
    assert "OPERAND_TYPE" in reasons(graph, "sm90.grouped_gemm_dglu", "sm90")
    plan = kernels(graph, "sm90")
    assert plan.count("torch.block_scale_dequantize") == 2 and "sm90.grouped_gemm_dglu" in plan
