"""The support surfaces of the block-scaled, forward and weight-gradient kernels: every code alone, every row of the
pages "Grouped GEMM + dGLU" and "Discrete Grouped GEMM + SwiGLU" with what it accepts and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from opfuse.graph_ops.ir.dims import symbol
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout, ScaleLayout
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.cudnn import versions

BF16, F16, F32, I64 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT, DataType.INT64
E4M3, E5M2, E8M0, FP4 = DataType.FP8_E4M3, DataType.FP8_E5M2, DataType.FP8_E8M0, DataType.FP4_E2M1
SM100, SM107 = ARCHES["sm100"], ARCHES["sm107"]
Options = dict[str, Any]
M = symbol("M", 256)
CODES = ("q_row", "sf_row", "q_col", "sf_col")
NORM = ("norm_const_row", "norm_const_col")

DGLU, GLU_BF16, GLU = "grouped_gemm_dglu.block_scaled", "grouped_gemm_glu.bf16", "grouped_gemm_glu.block_scaled"
DISCRETE, QUANT = "discrete_grouped_gemm_swiglu", "grouped_gemm_quant.block_scaled"
WGRAD_BF16, WGRAD = "grouped_gemm_wgrad.bf16", "grouped_gemm_wgrad.block_scaled"
RULES = {DGLU: "grouped_gemm_dglu", GLU_BF16: "grouped_gemm_glu", GLU: "grouped_gemm_glu", DISCRETE: "grouped_gemm_glu",
         QUANT: "grouped_gemm_quant", WGRAD_BF16: "grouped_gemm_wgrad", WGRAD: "grouped_gemm_wgrad"}  # fmt: skip
DEFAULTS: dict[str, Options] = {
    DGLU: dict(roles=(*CODES, "dprob")), GLU_BF16: dict(format="bf16", roles=("d",)), GLU: dict(roles=CODES),
    DISCRETE: dict(roles=CODES, discrete=True), QUANT: dict(roles=CODES),
    WGRAD_BF16: dict(format="bf16"), WGRAD: dict(),
}  # fmt: skip
FP4_D: Options = dict(format="nvfp4", roles=("d",))


def changed(role: str, **fields: Any) -> Options:
    return {"changes": {role: fields}}


def typed(data_type: DataType, *roles: str) -> dict[str, dict[str, Any]]:
    return {role: dict(data_type=data_type) for role in roles}


def merged(kernel: str, given: Options) -> Options:
    """The kernel's served problem with `given` instead; `add` are roles beside the usual ones."""
    options = {**DEFAULTS[kernel], **{k: v for k, v in given.items() if k != "add"}}
    return {**options, "roles": (*options.get("roles", ()), *given.get("add", ()))}


SHAPES: dict[str, Options] = {
    "STATIC_SHAPE": dict(k=symbol("K", 64)),
    "ROW_MULTIPLE": dict(rows=symbol("M", 128)),
    "EXPERTS": dict(experts=1025),
    "OFFSETS_TYPE": changed("offsets", data_type=I64),
    "OFFSETS_ALIGNMENT": changed("offsets", multiple_of=128),
    "ALIGNMENT": changed("a", alignment=8),
}
LAYOUTS: dict[str, Options] = {
    "A_LAYOUT": changed("a", stride=(80, 1)),
    "B_LAYOUT": changed("b", stride=(64, 128, 1)),
    "VECTOR_LAYOUT": dict(add=("prob",), **changed("prob", stride=(2,))),
}
SCALED: dict[str, Options] = {
    **SHAPES, **LAYOUTS,
    "OPERAND_FORMAT": dict(changes=typed(E4M3, "sf_a", "sf_b", "sf_row", "sf_col")),
    "SCALE_STORAGE": changed("sf_a", scale_layout=ScaleLayout(32, 1, swizzled=False)),
    "CODE_ALIGNMENT": dict(k=72),
    "NORM_CONST": dict(add=("norm_const_row",)),
    "CODE_PAIR": dict(roles=("q_row", "sf_row")),
    "CODE_FORMAT": dict(changes=typed(E5M2, "q_row", "q_col")),
    "FP4_CODES": dict(format="mxfp4", n=128),
    "D_OR_CODES": dict(add=("d",), rounding={"d": F32}),
    "D_LAYOUT": changed("q_row", stride=(1, M)),
    "AMAX_FORM": dict(add=("amax",), **changed("amax", data_type=BF16)),
    "SOURCE_ROUNDING": dict(rounding={"d": BF16}),
    "FP4_MAJOR": dict(FP4_D, b_major="n", discrete=True),
}  # fmt: skip
BIAS: dict[str, Options] = {
    "BIAS_TYPE": dict(add=("bias",), **changed("bias", data_type=E4M3)),
    "BIAS_LAYOUT": dict(add=("bias",), **changed("bias", stride=(1, 2))),
}
FORWARD: dict[str, Options] = {
    **BIAS,
    "ALPHA_EXPONENT": dict(add=("alpha",), attributes=dict(alpha_exponent=2)),
    "COLUMN_SUMS": dict(add=("dbias",)),
}
PREACTIVATION: dict[str, Options] = {
    **FORWARD,
    "COLUMN_MULTIPLE": dict(n=96),
    "UP_WEIGHTS": dict(add=("b_up",)),
    "GLU_LAYOUT": changed("b", glu_layout=GluLayout.concatenated()),
    "C_ROUNDING": dict(add=("c",), rounding={"c_wide": BF16}),
    "C_TYPE": dict(add=("c",), **changed("c", data_type=E4M3)),
    "C_LAYOUT": dict(add=("c",), **changed("c", stride=(1, M))),
}
SCALED_GLU: dict[str, Options] = {
    **SCALED, **PREACTIVATION,
    "D_TYPE": dict(roles=("d",), **changed("d", data_type=F32)),
    "FP4_FLOAT_D": dict(FP4_D, **changed("d", data_type=F32)),
    "FP4_C_TYPE": dict(FP4_D, add=("c",), **changed("c", data_type=F32)),
    "GEGLU_PARAMETERS": dict(act="geglu", attributes=dict(clamp_max=float("inf"))),
}  # fmt: skip
SITU: dict[str, Options] = {"SITU_PARAMETERS": dict(act="situglu", attributes=dict(situ_beta1=-1.0))}
WEIGHT_GRADIENT: dict[str, Options] = {
    **SHAPES,
    "MATRIX_LAYOUT": changed("dy", stride=(1, M)),
    "DW_TYPE": changed("dw", data_type=E4M3),
    "ACCUMULATE": dict(attributes=dict(accumulate=True)),
    "ROW_PITCH": dict(k=60),
}

# What breaks each condition alone on sm100.
ALONE: dict[str, dict[str, Options]] = {
    DGLU: {
        **SCALED, **SITU,
        "COLUMN_MULTIPLE": dict(n=48),
        "GLU_LAYOUT": changed("c", glu_layout=GluLayout.interleaved(1)),
        "C_TYPE": changed("c", data_type=E4M3),
        "C_LAYOUT": changed("c", stride=(1, M)),
        "ALPHA_EXPONENT": dict(add=("alpha",), attributes=dict(alpha_exponent=1)),
        "PRODUCT_ROUNDING": dict(rounding={"r": BF16}),
        "GEGLU_PARAMETERS": dict(act="geglu", attributes=dict(clamp_max=float("inf"))),
        "BETA_GEGLU": dict(act="geglu", add=("beta",)),
        "D_TYPE": dict(roles=("d",)),
        "FP4_FLOAT_D": dict(FP4_D, **changed("d", data_type=F32)),
        "DPROB_TYPE": changed("dprob", data_type=BF16),
        "DBIAS_TYPE": dict(add=("dbias",), **changed("dbias", data_type=F32)),
        "DBIAS_LAYOUT": dict(add=("dbias",), **changed("dbias", stride=(1, 2))),
        "DBIAS_SOURCE": dict(format="nvfp4", roles=("d", "dbias"), rounding={"d_wide": BF16}),
        "ACTIVATION_OUTPUT": dict(add=("activation",)),
        "DETERMINISTIC_DBIAS": dict(add=("dbias",), deterministic=True),
    },
    GLU_BF16: {
        **SHAPES, **LAYOUTS, **PREACTIVATION,
        "OPERAND_TYPE": dict(changes=typed(F16, "a", "b")),
        "DEPTH_MULTIPLE": dict(k=60),
        "DENSE_MAJOR": dict(b_major="n"),
        "ACT": dict(act="situglu"),
        "GEGLU_PARAMETERS": dict(act="geglu", attributes=dict(geglu_alpha=1.0)),
        "D_REQUIRED": dict(roles=()),
        "D_TYPE": changed("d", data_type=E4M3),
        "D_LAYOUT": changed("d", stride=(1, M)),
        "BF16_OUTPUTS": dict(add=("amax",)),
    },
    GLU: {**SCALED_GLU, **SITU, "DENSE_MAJOR": dict(b_major="n")},
    DISCRETE: {**SCALED_GLU, "WEIGHT_MODE": dict(discrete=False), "ACT": dict(act="situglu")},
    QUANT: {
        **{code: given for code, given in SCALED.items() if code != "D_OR_CODES"},
        **FORWARD,
        "CODE_COLUMNS": dict(n=72),
        "PRODUCT_ROUNDING": dict(rounding={"y": BF16}),
        "CODES_ONLY": SCALED["D_OR_CODES"],
    },
    WGRAD_BF16: {**WEIGHT_GRADIENT, "OPERAND_TYPE": dict(changes=typed(F16, "a", "dy"))},
    WGRAD: {
        **WEIGHT_GRADIENT,
        "OPERAND_FORMAT": changed("dy", data_type=E5M2),
        "SCALE_STORAGE": changed("sf_dy", scale_layout=ScaleLayout(32, 0, swizzled=False)),
    },
}  # fmt: skip
# Codes that cannot fail alone: what else the same fault breaks.
TOGETHER: dict[tuple[str, str], set[str]] = {
    (DGLU, "D_OR_CODES"): {"D_TYPE"},
    (DGLU, "DBIAS_SOURCE"): {"SOURCE_ROUNDING"},
    (QUANT, "FP4_MAJOR"): {"CODES_ONLY"},
    (QUANT, "SOURCE_ROUNDING"): {"PRODUCT_ROUNDING"},
}
RUBIN: dict[str, dict[str, Options]] = {
    DGLU: {"RUBIN_FORMAT": FP4_D, "RUBIN_ACT": dict(act="situglu"), "DETERMINISTIC_RUBIN": dict(deterministic=True)},
    GLU: {"RUBIN_FORMAT": FP4_D, "RUBIN_ACT": dict(act="situglu")},
    DISCRETE: {}, QUANT: {"RUBIN_FORMAT": dict(FP4_D)}, GLU_BF16: {}, WGRAD_BF16: {}, WGRAD: {},
}  # fmt: skip


def reasons(make: Any, entries: Any, kernel: str, given: Options, arch: Any = SM100) -> list[Any]:
    return list(entries[kernel].supports(make(RULES[kernel], **merged(kernel, given)), arch))


@pytest.mark.parametrize("kernel", RULES)
def test_the_usual_problem_is_served(make_scaled, entries, kernel: str) -> None:
    for name in str(entries[kernel].arches).split(", "):
        assert reasons(make_scaled, entries, kernel, {}, ARCHES[name]) == []


@pytest.mark.parametrize(("kernel", "code"), [(k, c) for k, codes in ALONE.items() for c in codes])
def test_each_condition_fails_with_its_code(make_scaled, entries, kernel: str, code: str) -> None:
    found = reasons(make_scaled, entries, kernel, ALONE[kernel][code])
    also = TOGETHER.get((kernel, code), set())
    assert code in {r.code for r in found}
    assert {r.code for r in found} <= {code} | also, [str(r) for r in found]
    assert all(str(r.observed) and r.required and r.hint for r in found)


@pytest.mark.parametrize(("kernel", "code"), [(k, c) for k, codes in RUBIN.items() for c in codes])
def test_each_condition_of_sm107_fails_with_its_code(make_scaled, entries, kernel: str, code: str) -> None:
    given = RUBIN[kernel][code]
    assert code in {r.code for r in reasons(make_scaled, entries, kernel, given, SM107)}
    assert code not in {r.code for r in reasons(make_scaled, entries, kernel, given, SM100)}


@pytest.mark.parametrize("kernel", RULES)
def test_every_code_has_a_case_a_row_and_a_hint(entries, kernel: str) -> None:
    conditions = entries[kernel].conditions
    codes = [c.code for c in conditions]
    assert len(set(codes)) == len(codes), "a code means one thing"
    rubin = {"RUBIN_FORMAT"} if kernel == DISCRETE else set()  # of the shared operands, on an arch it does not have
    assert set(codes) - rubin == {*ALONE[kernel], *RUBIN[kernel], "CUDNN_VERSION"}
    assert [c.code for c in conditions if not (c.row and c.hint and c.requires)] == []


@pytest.mark.parametrize("kernel", RULES)
def test_a_known_bad_pair_declines_by_name(make_scaled, entries, monkeypatch, kernel: str) -> None:
    monkeypatch.setattr(versions, "installed", lambda: versions.Pair("1.32.0", "4.6.1"))
    assert [r.code for r in reasons(make_scaled, entries, kernel, {})] == ["CUDNN_VERSION"]


@pytest.mark.parametrize("arch", ["cpu", "sm80", "sm90", "sm110", "sm120"])
@pytest.mark.parametrize("kernel", RULES)
def test_other_arches_decline(make_scaled, entries, kernel: str, arch: str) -> None:
    assert "ARCH" in [r.code for r in reasons(make_scaled, entries, kernel, {}, ARCHES[arch])]


# Each row of the two pages: what it accepts, and what it refuses with which code.
Row = tuple[str, list[Options], list[tuple[str, Options]]]
ROWS: dict[str, Row] = {
    "dGLU, Data types, MXFP8: e4m3 or e5m2, e8m0, 32": (
        DGLU, [dict(), dict(format="mxfp8_e5m2")],
        [("OPERAND_FORMAT", ALONE[DGLU]["OPERAND_FORMAT"]),  # e4m3 scales are listed and impossible
         ("CODE_FORMAT", ALONE[DGLU]["CODE_FORMAT"]),  # e5m2 D is listed and does not compile
         ("D_TYPE", dict(roles=("d",)))]),
    "dGLU, Data types, NVF4: fp4, e4m3 or e8m0, 16 or 32, bf16 or f32": (
        DGLU, [FP4_D, dict(format="fp4_e8m0", roles=("d",)), dict(format="mxfp4", roles=("d",)),
               dict(format="mxfp4", roles=("d",), **changed("d", data_type=F32)),
               dict(format="mxfp4", roles=("d",), **changed("d", data_type=F16))],  # f16: in the code alone
        [("FP4_CODES", dict(format="nvfp4", n=128))]),
    "dGLU, types: A and B must have the same dtype": (
        DGLU, [dict()], [("OPERAND_FORMAT", changed("b", data_type=E5M2))]),
    "dGLU, types: scale factor tensors must have the same dtype": (
        DGLU, [dict()], [("OPERAND_FORMAT", changed("sf_b", data_type=E4M3)),
                         ("CODE_FORMAT", dict(changes=typed(E4M3, "sf_row", "sf_col")))]),
    "dGLU, types: D_row and D_col must have the same dtype": (
        DGLU, [dict()], [("CODE_FORMAT", changed("q_col", data_type=E5M2))]),
    "dGLU, types: dbias must be bfloat16": (
        DGLU, [dict(add=("dbias",))], [("DBIAS_TYPE", ALONE[DGLU]["DBIAS_TYPE"])]),
    "dGLU, types: e4m3 scales with sf_vec_size 32": (
        DGLU, [], [("OPERAND_FORMAT", dict(format="mxfp4", roles=("d",), changes=typed(E4M3, "sf_a", "sf_b")))]),
    "dGLU, types: fp8 C with vector_f32": (DGLU, [], [("C_TYPE", ALONE[DGLU]["C_TYPE"])]),
    "dGLU, types: fp4, 16, float32 D without dbias": (
        DGLU, [dict(format="nvfp4", roles=("d", "dbias"), **changed("d", data_type=F32))],
        [("FP4_FLOAT_D", ALONE[DGLU]["FP4_FLOAT_D"])]),
    "dGLU, support: A K-major; B K- or N-major, K-major for FP4; C, D N-major": (
        DGLU, [dict(b_major="n"), dict(b_major="n", discrete=True), dict(discrete=True)],
        [("A_LAYOUT", ALONE[DGLU]["A_LAYOUT"]), ("B_LAYOUT", ALONE[DGLU]["B_LAYOUT"]),
         ("FP4_MAJOR", ALONE[DGLU]["FP4_MAJOR"]), ("C_LAYOUT", ALONE[DGLU]["C_LAYOUT"]),
         ("D_LAYOUT", ALONE[DGLU]["D_LAYOUT"])]),
    "dGLU, support: 16-byte alignment": (
        DGLU, [dict(k=80)], [("CODE_ALIGNMENT", dict(k=72)), ("CODE_ALIGNMENT", dict(FP4_D, k=48)),
                             ("ALIGNMENT", changed("c", alignment=4))]),
    "dGLU, shapes: N divisible by 32; experts at most 1024; groups aligned to 256": (
        DGLU, [dict(n=96), dict(experts=1024)],
        [("COLUMN_MULTIPLE", dict(n=80)), ("EXPERTS", dict(experts=2000)),
         ("OFFSETS_ALIGNMENT", changed("offsets", multiple_of=64))]),
    "dGLU: act_func": (DGLU, [dict(act=a) for a in ("swiglu", "geglu", "situglu")], []),
    "dGLU: parameters of dgeglu": (
        DGLU, [dict(act="geglu", attributes=dict(geglu_alpha=1.0, linear_offset=0.0, clamp_min=-10.0, clamp_max=10.0))],
        [("GEGLU_PARAMETERS", ALONE[DGLU]["GEGLU_PARAMETERS"])]),
    "dGLU: parameters of dsituglu": (
        DGLU, [dict(act="situglu", attributes=dict(situ_beta1=1.0))],
        [("SITU_PARAMETERS", dict(act="situglu", attributes=dict(situ_beta2=float("nan"))))]),
    "dGLU: beta scales C in dSwiGLU, and dGeGLU ignores it": (
        DGLU, [dict(add=("beta",)), dict(add=("beta",), act="situglu")], [("BETA_GEGLU", ALONE[DGLU]["BETA_GEGLU"])]),
    "dGLU: alpha squared": (DGLU, [dict(add=("alpha",))], [("ALPHA_EXPONENT", ALONE[DGLU]["ALPHA_EXPONENT"])]),
    "dGLU: amax (L, 2, 1), dbias, norm_const": (
        DGLU, [dict(FP4_D, roles=("d", "amax")), dict(add=NORM), dict(roles=CODES)],
        [("AMAX_FORM", ALONE[DGLU]["AMAX_FORM"]), ("NORM_CONST", ALONE[DGLU]["NORM_CONST"])]),
    "dGLU: deterministic, without dbias": (
        DGLU, [dict(deterministic=True)], [("DETERMINISTIC_DBIAS", ALONE[DGLU]["DETERMINISTIC_DBIAS"])]),
    "SwiGLU, Data types, MXFP8: d in f16, bf16, e4m3 (e5m2 and fp4 listed)": (
        DISCRETE, [dict(), dict(format="mxfp8_e5m2"), dict(roles=("d",)), dict(roles=("d",), changes=typed(F16, "d"))],
        [("CODE_FORMAT", ALONE[DISCRETE]["CODE_FORMAT"]), ("CODE_FORMAT", dict(changes=typed(FP4, "q_row", "q_col"))),
         ("D_TYPE", ALONE[DISCRETE]["D_TYPE"])]),
    "SwiGLU, Data types, NVF4: e8m0 or e4m3, 16 or 32, d in f16, bf16, f32": (
        DISCRETE, [FP4_D, dict(format="fp4_e8m0", roles=("d",)), dict(FP4_D, changes=typed(F16, "d")),
                   dict(format="mxfp4", roles=("d",), **changed("d", data_type=F32))], []),
    "SwiGLU, types: b_dtype must match A; SFA and SFD share dtype; D and D_col the same": (
        DISCRETE, [dict()], [("OPERAND_FORMAT", changed("b", data_type=E5M2)),
                             ("CODE_FORMAT", dict(changes=typed(E4M3, "sf_row", "sf_col"))),
                             ("CODE_FORMAT", changed("q_row", data_type=E5M2))]),
    "SwiGLU, types: e4m3 scales with 32, FP8 with 16": (
        DISCRETE, [], [("OPERAND_FORMAT", ALONE[DISCRETE]["OPERAND_FORMAT"]),
                       ("OPERAND_FORMAT", changed("sf_a", scale_layout=ScaleLayout(16, 1)))]),
    "SwiGLU, types: fp4, 16, float32 D": (DISCRETE, [], [("FP4_FLOAT_D", ALONE[DISCRETE]["FP4_FLOAT_D"])]),
    "SwiGLU, types: fp4 requires 16-bit C": (
        DISCRETE, [dict(FP4_D, add=("c",)), dict(add=("c",), **changed("c", data_type=F32))],
        [("FP4_C_TYPE", ALONE[DISCRETE]["FP4_C_TYPE"])]),
    "SwiGLU, types: fp4 requires b_major k": (
        DISCRETE, [dict(b_major="n")], [("FP4_MAJOR", ALONE[DISCRETE]["FP4_MAJOR"])]),
    "SwiGLU, scale outputs: all or none": (
        DISCRETE, [dict(add=NORM), dict(roles=("d",))], [("CODE_PAIR", ALONE[DISCRETE]["CODE_PAIR"])]),
    "SwiGLU: amax is optional, and beside 16-bit D by default": (
        DISCRETE, [dict(roles=("d", "amax")), dict(add=("amax",))], [("AMAX_FORM", ALONE[DISCRETE]["AMAX_FORM"])]),
    "SwiGLU: prob is optional (there without it crashes: ones stand in)": (DISCRETE, [dict(add=("prob",)), dict()], []),
    "SwiGLU, shapes: N divisible by 64 (unchecked there), at most 1024 experts": (
        DISCRETE, [dict(n=128)], [("COLUMN_MULTIPLE", dict(n=96)), ("EXPERTS", dict(experts=1025))]),
    "SwiGLU: act_func swiglu or geglu, with parameters at each launch": (
        DISCRETE, [dict(act="geglu", attributes=dict(linear_offset=0.5, geglu_alpha=1.0))],
        [("ACT", ALONE[DISCRETE]["ACT"])]),
    "SwiGLU: weights by address": (DISCRETE, [dict()], [("WEIGHT_MODE", dict(discrete=False))]),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_row_of_a_page(make_scaled, entries, row: str) -> None:
    kernel, accepted, refused = ROWS[row]
    for given in accepted:
        for arch in (SM100, ARCHES["sm103"]):
            found = reasons(make_scaled, entries, kernel, given, arch)
            assert found == [], f"{given}: {[str(r) for r in found]}"
    for code, given in refused:
        assert code in {r.code for r in reasons(make_scaled, entries, kernel, given)}, given


def test_sm107_runs_mxfp8_alone(make_scaled, entries) -> None:
    for kernel in (DGLU, GLU, QUANT, WGRAD):
        assert reasons(make_scaled, entries, kernel, {}, SM107) == []
    for kernel in (GLU_BF16, WGRAD_BF16, DISCRETE):
        assert [r.code for r in reasons(make_scaled, entries, kernel, {}, SM107)] == ["ARCH"]
