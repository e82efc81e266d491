"""The rows of both pages' tables: what they allow runs, what they exclude is refused by the code of that row."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import GraphError, VariantPackError, scales
from opfuse.graph_ops import api as calls
from opfuse.graph_ops.api import UnsupportedCall, dglu_surface, discrete_swiglu_surface

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
UINT8 = torch.uint8


def dglu(api, kind="bf16", scale="e8m0", block=32, discrete=False, **changes):
    p = api.make(1, kind, scale, block, discrete=discrete)
    t = p.tensors
    arguments = dict(
        a_tensor=t["a_tensor"], c_tensor=api.column(t["c"].bfloat16()), sfa_tensor=t["sfa_tensor"],
        padded_offsets=t["padded_offsets"], alpha_tensor=t["alpha_tensor"], beta_tensor=t["beta_tensor"],
        prob_tensor=t["prob_tensor"], dprob_tensor=t["dprob_tensor"],
        sf_vec_size=16 if kind == "bf16" else block,
    )  # fmt: skip
    if discrete:
        arguments |= dict(b_ptrs=t["b_ptrs"], sfb_ptrs=t.get("sfb_ptrs"), n=api.N, b_dtype=api.STORED.get(kind, BF16))
    else:
        arguments |= dict(b_tensor=t["b"], sfb_tensor=t.get("sfb"))
    if kind in ("e4m3", "e5m2"):
        arguments |= dict(norm_const_tensor=torch.ones(1), d_dtype=E4M3)
    changes = {k: v(arguments) if callable(v) else v for k, v in changes.items()}
    return calls.grouped_gemm_dglu_wrapper(**{**arguments, **changes})


def swiglu(api, kind="e4m3", scale="e8m0", block=32, **changes):
    p = api.make(1, kind, scale, block, columns=2 * api.N, discrete=True)
    t = p.tensors
    arguments = dict(
        a_tensor=t["a_tensor"], b_ptrs=t["b_ptrs"], sfa_tensor=t["sfa_tensor"], sfb_ptrs=t["sfb_ptrs"],
        padded_offsets=t["padded_offsets"], alpha_tensor=t["alpha_tensor"], n=2 * api.N, b_dtype=api.STORED[kind],
        prob_tensor=t["prob_tensor"], sf_vec_size=block,
        norm_const_tensor=torch.ones(1) if kind in ("e4m3", "e5m2") else None,
    )  # fmt: skip
    changes = {k: v(arguments) if callable(v) else v for k, v in changes.items()}
    return calls.discrete_grouped_gemm_swiglu_wrapper(**{**arguments, **changes})


CALLS = {"dglu": dglu, "swiglu": swiglu}

FP4_KINDS, FP8_KINDS = ("fp4", "uint8"), ("e4m3", "e5m2")
ACCEPTED = [
    # dGLU, BF16 contract
    *(("dglu", dict(c_tensor=lambda a, t=t: a["c_tensor"].to(t))) for t in (BF16, HALF, FLOAT)),
    *(("dglu", dict(d_dtype=t)) for t in (BF16, HALF, FLOAT)),
    *(("dglu", dict(act_func=act)) for act in ("dswiglu", "dgeglu")),
    ("dglu", dict(discrete=True)),
    # dGLU, table of data types: MXFP8
    *(("dglu", dict(kind=k, d_dtype=d, discrete=w)) for k in FP8_KINDS for d in (E4M3, E5M2) for w in (False, True)),
    # dGLU, table of data types: NVF4, sf_dtype x sf_vec_size that may go together
    *(("dglu", dict(kind=k, scale=s, block=b, d_dtype=d, generate_dbias=d is FLOAT))
      for k in FP4_KINDS for s, b in (("e4m3", 16), ("e8m0", 16), ("e8m0", 32)) for d in (BF16, FLOAT)),
    ("dglu", dict(kind="fp4", d_dtype=HALF)),
    ("dglu", dict(kind="fp4", block=32, d_dtype=FLOAT)),
    *(("dglu", dict(kind="fp4", c_tensor=lambda a, t=t: a["c_tensor"].to(t))) for t in (FLOAT, HALF, BF16, E4M3, E5M2)),
    *(("dglu", dict(kind="e4m3", act_func=act, beta_tensor=None)) for act in ("dswiglu", "dgeglu", "dsituglu")),
    *(("dglu", dict(kind="fp4", mma_tiler_mn=(rows, 256))) for rows in (128, 256)),
    *(("dglu", dict(kind="fp4", epilogue_op=op)) for op in (None, "none", "identity", "relu", "srelu")),
    ("dglu", dict(kind="e4m3", b_tensor=lambda a: a["b_tensor"].permute(2, 1, 0).contiguous().permute(2, 1, 0))),
    # discrete SwiGLU, table of data types
    *(("swiglu", dict(kind=k, d_dtype=d)) for k in FP8_KINDS for d in (HALF, BF16, E4M3, E5M2, torch.float4_e2m1fn_x2)),
    *(("swiglu", dict(kind=k, scale=s, block=b, d_dtype=d))
      for k in FP4_KINDS for s, b in (("e4m3", 16), ("e8m0", 16), ("e8m0", 32)) for d in (HALF, BF16)),
    ("swiglu", dict(kind="fp4", block=32, d_dtype=FLOAT)),
    *(("swiglu", dict(c_dtype=c)) for c in (FLOAT, HALF, BF16, E4M3, E5M2, torch.float4_e2m1fn_x2)),
    *(("swiglu", dict(kind="uint8", block=16, scale="e4m3", c_dtype=c)) for c in (HALF, BF16)),
    *(("swiglu", dict(act_func=act)) for act in ("swiglu", "geglu")),
    *(("swiglu", dict(mma_tiler_mn=(rows, 256))) for rows in (128, 256)),
    ("swiglu", dict(prob_tensor=None)),
]  # fmt: skip


@pytest.mark.parametrize("call, changes", ACCEPTED, ids=lambda v: v if isinstance(v, str) else str(
    {k: x for k, x in v.items() if not callable(x)}))  # fmt: skip
def test_a_row_that_the_tables_allow_runs(api, call, changes):
    out = CALLS[call](api, **changes)
    written = [v for k, v in out.items() if v is not None and k.startswith(("d_", "c_"))]
    assert written and all(v.dtype not in (BF16, HALF, FLOAT) or v.isfinite().all() for v in written)
    if (asked := changes.get("d_dtype")) is not None:
        assert next(iter(out.values() if call == "dglu" else [out["d_tensor"]])).dtype is asked


def padded(*ends):
    return torch.tensor(ends, dtype=torch.int32)


REFUSED = [
    # --- dGLU: backend dispatch and the BF16 contract
    ("dglu", "OPERAND_TYPE", dict(b_tensor=lambda a: a["b_tensor"].half())),
    ("dglu", "OPERAND_TYPE", dict(a_tensor=lambda a: a["a_tensor"].half(), b_tensor=lambda a: a["b_tensor"].half())),
    ("dglu", "OPERAND_TYPE", dict(kind="e4m3", b_tensor=lambda a: a["b_tensor"].view(UINT8).view(E5M2))),
    ("dglu", "SCALE_CONTROL", dict(norm_const_tensor=torch.ones(1))),
    ("dglu", "SCALE_CONTROL", dict(sf_vec_size=32)),
    ("dglu", "SCALE_CONTROL", dict(discrete_col_sfd=True)),
    ("dglu", "SCALE_CONTROL", dict(epilogue_op="relu")),
    ("dglu", "SCALE_CONTROL", dict(sfa_tensor=torch.zeros(512, dtype=UINT8).view(E8M0))),
    ("dglu", "ACT", dict(act_func="dsituglu")),
    ("dglu", "ACT", dict(kind="fp4", act_func="swiglu")),
    ("dglu", "D_TYPE", dict(d_dtype=E4M3)),
    ("dglu", "C_TYPE", dict(c_tensor=lambda a: a["c_tensor"].to(E4M3))),
    ("dglu", "SINGLE_GROUP", dict(use_single_group_runtime_offsets=True)),
    ("dglu", "SINGLE_GROUP", dict(kind="fp4", use_single_group_runtime_offsets=True)),
    ("dglu", "ROUND_DGRAD", dict(kind="fp4", round_dgrad_to_input_dtype=True)),
    ("dglu", "ACTIVATION_OUTPUT", dict(activation_tensor=torch.zeros(512, 64, 1, dtype=BF16))),
    ("dglu", "WEIGHT_MODE", dict(b_tensor=None)),
    ("dglu", "WEIGHT_MODE", dict(b_ptrs=torch.zeros(3, dtype=torch.int64))),
    ("dglu", "WEIGHT_MODE", dict(n=64)),
    ("dglu", "WEIGHT_MODE", dict(discrete=True, n=None)),
    ("dglu", "WEIGHT_MODE", dict(discrete=True, b_dtype=None)),
    # --- dGLU: table of data types and additional type constraints
    ("dglu", "D_TYPE", dict(kind="e4m3", d_dtype=BF16, norm_const_tensor=None)),
    ("dglu", "D_TYPE", dict(kind="e5m2", d_dtype=FLOAT, norm_const_tensor=None)),
    ("dglu", "D_TYPE", dict(kind="fp4", d_dtype=E4M3)),
    ("dglu", "D_TYPE", dict(kind="uint8", d_dtype=E5M2)),
    ("dglu", "E4M3_SCALES_32", dict(kind="e4m3", scale="e4m3")),
    ("dglu", "E4M3_SCALES_32", dict(kind="fp4", scale="e4m3", block=32)),
    ("dglu", "FP8_BLOCK_16", dict(kind="e4m3", block=16)),
    ("dglu", "FP8_BLOCK_16", dict(kind="e5m2", scale="e4m3", block=16)),
    ("dglu", "FP4_BLOCK_16_FLOAT", dict(kind="fp4", block=16, d_dtype=FLOAT)),
    ("dglu", "VECTOR_F32", dict(kind="fp4", vector_f32=True, c_tensor=lambda a: a["c_tensor"].to(E4M3))),
    ("dglu", "SCALE_TYPES_DIFFER", dict(kind="fp4", sfb_tensor=lambda a: a["sfb_tensor"].view(UINT8).view(E4M3))),
    ("dglu", "SCALE_TYPE", dict(kind="fp4", sfa_tensor=lambda a: a["sfa_tensor"].view(UINT8))),
    ("dglu", "SCALES_MISSING", dict(kind="fp4", sfa_tensor=None)),
    ("dglu", "SCALES_MISSING", dict(kind="fp4", sfb_tensor=None)),
    ("dglu", "BLOCK_SIZE", dict(kind="fp4", sf_vec_size=64)),
    ("dglu", "SCALE_OVERRIDE", dict(kind="fp4", sf_fp8_dtype_override="e5m3")),
    ("dglu", "SFD_REQUIRED", dict(kind="e4m3", norm_const_tensor=None)),
    ("dglu", "SFD_UNUSED", dict(kind="fp4", norm_const_tensor=torch.ones(1))),
    ("dglu", "DISCRETE_COL_SFD", dict(kind="fp4", discrete_col_sfd=True)),
    ("dglu", "ACC_DTYPE", dict(acc_dtype=BF16)),
    ("dglu", "TYPE", dict(padded_offsets=lambda a: a["padded_offsets"].long())),
    ("dglu", "TYPE", dict(alpha_tensor=lambda a: a["alpha_tensor"].half())),
    ("dglu", "TYPE", dict(dprob_tensor=lambda a: a["dprob_tensor"].half())),
    ("dglu", "ACT_PARAMETER_UNUSED", dict(linear_offset=1.0)),
    ("dglu", "ACT_PARAMETER_UNUSED", dict(geglu_alpha=1.0)),
    ("dglu", "ACT_PARAMETER_UNUSED", dict(act_func="dgeglu", situ_beta1=2.0)),
    ("dglu", "ACT_PARAMETER", dict(act_func="dgeglu", glu_clamp_min=7.0)),
    ("dglu", "ACT_PARAMETER", dict(act_func="dgeglu", geglu_alpha=0.0)),
    ("dglu", "ACT_PARAMETER", dict(kind="fp4", act_func="dsituglu", situ_beta2=float("inf"))),
    ("dglu", "ACT_PARAMETER", dict(kind="fp4", act_func="dsituglu", situ_beta1=-1.0)),
    ("dglu", "BETA_UNUSED", dict(kind="fp4", act_func="dgeglu")),
    # --- dGLU: layouts, shapes and divisibility
    ("dglu", "COLUMNS", dict(b_tensor=torch.zeros(3, 48, 64, dtype=BF16).permute(1, 2, 0),
                             c_tensor=torch.zeros(512, 96, 1, dtype=BF16))),
    ("dglu", "EXPERTS", dict(b_tensor=torch.zeros(1025, 32, 64, dtype=BF16).permute(1, 2, 0),
                             padded_offsets=padded(*[512] * 1025), alpha_tensor=torch.ones(1025), beta_tensor=None,
                             c_tensor=torch.zeros(512, 64, 1, dtype=BF16))),
    ("dglu", "M_ALIGNED", dict(m_aligned=128)),
    ("dglu", "CD_MAJOR", dict(cd_major="m")),
    ("dglu", "B_MAJOR", dict(discrete=True, b_major="m")),
    ("dglu", "B_MAJOR", dict(kind="uint8", discrete=True, b_major="n")),
    ("dglu", "B_LAYOUT", dict(b_tensor=torch.zeros(3, 64, 64, dtype=BF16).permute(2, 1, 0))),
    ("dglu", "B_LAYOUT", dict(kind="uint8", b_tensor=torch.zeros(3, 32, 64, dtype=UINT8).permute(2, 1, 0))),
    ("dglu", "B_LAYOUT", dict(b_tensor=torch.zeros(3, 128, 64, dtype=BF16)[:, ::2].permute(1, 2, 0))),
    ("dglu", "LAYOUT", dict(a_tensor=lambda a: torch.zeros(64, 512, 1, dtype=BF16).permute(1, 0, 2))),
    ("dglu", "LAYOUT", dict(c_tensor=lambda a: torch.zeros(128, 512, 1, dtype=BF16).permute(1, 0, 2))),
    ("dglu", "SHAPE", dict(c_tensor=lambda a: a["c_tensor"][:, :64])),
    ("dglu", "SHAPE", dict(prob_tensor=lambda a: a["prob_tensor"][:256])),
    ("dglu", "SHAPE", dict(a_tensor=lambda a: a["a_tensor"][:, :32].contiguous())),
    ("dglu", "SCALE_SHAPE", dict(kind="fp4", sfa_tensor=lambda a: a["sfa_tensor"][:, :, :2])),
    ("dglu", "ALIGNMENT_16", dict(kind="e4m3", a_tensor=torch.zeros(512, 40, 1, dtype=UINT8).view(E4M3),
                                  b_tensor=torch.zeros(3, 64, 40, dtype=UINT8).view(E4M3).permute(1, 2, 0))),
    # --- dGLU: tile and cluster
    ("dglu", "TENSOR_TYPE", dict(a_tensor=None)),
    ("dglu", "TENSOR_TYPE", dict(prob_tensor=[1.0])),
    ("dglu", "TILE", dict(mma_tiler_mn=(256, 256, 64))),
    ("dglu", "TILE", dict(mma_tiler_mn=(64, 256))),
    ("dglu", "TILE", dict(kind="fp4", mma_tiler_mn=(256, 128))),
    ("dglu", "TILE", dict(mma_tiler_mn=(256, 100))),
    ("dglu", "CLUSTER", dict(cluster_shape_mn=(3, 1))),
    ("dglu", "CLUSTER", dict(cluster_shape_mn=(1, 1))),
    ("dglu", "CLUSTER", dict(cluster_shape_mn=(8, 1))),
    ("dglu", "CLUSTER", dict(mma_tiler_mn=(128, 256), cluster_shape_mn=(4, 1))),
    ("dglu", "EPILOGUE_OP", dict(kind="fp4", epilogue_op="gelu")),
    ("dglu", "STREAM", dict(current_stream=7)),
    # --- discrete SwiGLU
    ("swiglu", "OPERAND_TYPE", dict(b_dtype=E5M2)),
    ("swiglu", "TENSOR_TYPE", dict(b_ptrs=None)),
    ("swiglu", "SCALES_MISSING", dict(sfa_tensor=None)),
    ("swiglu", "SCALES_MISSING", dict(sfb_ptrs=None)),
    ("swiglu", "E4M3_SCALES_32", dict(scale="e4m3")),
    ("swiglu", "E4M3_SCALES_32", dict(kind="fp4", scale="e4m3", block=32)),
    ("swiglu", "FP8_BLOCK_16", dict(block=16)),
    ("swiglu", "FP4_BLOCK_16_FLOAT", dict(kind="fp4", scale="e4m3", block=16, d_dtype=FLOAT)),
    ("swiglu", "D_TYPE", dict(d_dtype=FLOAT)),
    ("swiglu", "D_TYPE", dict(kind="fp4", d_dtype=E4M3)),
    ("swiglu", "C_TYPE", dict(kind="fp4", c_dtype=FLOAT)),
    ("swiglu", "C_TYPE", dict(kind="fp4", c_dtype=E4M3)),
    ("swiglu", "B_MAJOR", dict(kind="fp4", b_major="n")),
    ("swiglu", "ACC_DTYPE", dict(acc_dtype=HALF)),
    ("swiglu", "NORM_CONST_REQUIRED", dict(norm_const_tensor=None)),
    ("swiglu", "NORM_CONST_UNUSED", dict(kind="fp4", norm_const_tensor=torch.ones(1))),
    ("swiglu", "DISCRETE_COL_SFD", dict(kind="fp4", discrete_col_sfd=True)),
    ("swiglu", "ACT", dict(act_func="dswiglu")),
    ("swiglu", "ACT_PARAMETER_UNUSED", dict(geglu_alpha=1.0)),
    ("swiglu", "ACT_PARAMETER", dict(act_func="geglu", glu_clamp_max=-8.0)),
    ("swiglu", "COLUMNS", dict(n=96)),
    ("swiglu", "CD_MAJOR", dict(cd_major="m")),
    ("swiglu", "M_ALIGNED", dict(m_aligned=512)),
    ("swiglu", "TILE", dict(mma_tiler_mn=(128, 128))),
    ("swiglu", "CLUSTER", dict(cluster_shape_mn=(1, 2))),
    ("swiglu", "TYPE", dict(bias_tensor=torch.zeros(3, 128).t())),
    ("swiglu", "SHAPE", dict(bias_tensor=torch.zeros(128, 4, dtype=BF16))),
    ("swiglu", "BIAS_LAYOUT", dict(bias_tensor=torch.zeros(128, 3, dtype=BF16))),
    ("swiglu", "TYPE", dict(b_ptrs=lambda a: a["b_ptrs"].int())),
    ("swiglu", "SHAPE", dict(sfb_ptrs=lambda a: a["sfb_ptrs"][:2])),
    ("swiglu", "OFFSETS", dict(padded_offsets=padded(256, 300, 512))),
    ("swiglu", "SCALE_SHAPE", dict(sfa_tensor=lambda a: a["sfa_tensor"][:, :, :1])),
    ("swiglu", "STREAM", dict(current_stream=7)),
]  # fmt: skip


@pytest.mark.parametrize("call, code, changes", REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_row_that_the_tables_exclude_is_refused_by_its_code(api, call, code, changes):
    with pytest.raises(UnsupportedCall) as error:
        CALLS[call](api, **changes)
    reasons = {r.code: r for r in error.value.reasons}
    assert code in reasons, str(error.value)
    assert str(reasons[code].observed).strip() and reasons[code].required and isinstance(error.value, ValueError)


def test_every_requirement_has_a_call_that_breaks_it():
    tried = {code for _, code, _ in REFUSED} | set(CLASS_ONLY)
    rows = (*dglu_surface.DGLU, *discrete_swiglu_surface.DISCRETE_SWIGLU)
    assert {r.code for r in rows} - tried == set()
    assert all(r.row and r.requires for r in rows)


CLASS_ONLY = {
    "SFD_TRIPLE": dict(sample_sfd_row=None),
    "D_COL_TYPE": dict(sample_d_col=torch.zeros(512, 128, 1, dtype=UINT8).view(E5M2)),
    "DBIAS_TYPE": dict(sample_dbias=torch.zeros(3, 128, 1)),
    "AMAX_UNUSED": dict(sample_amax=torch.zeros(3, 2, 1)),
    "SFD_REQUIRED": dict(sample_d_col=None),
    "D_COL_REQUIRED": None,
    "ROW_MULTIPLE": dict(sample_a=lambda t: t["a_tensor"][:300], sample_sfa=lambda t: t["sfa_tensor"][:, :, :3]),
    "DEVICE": dict(sample_alpha=torch.zeros(3, device="meta")),
}


def dglu_samples(api, t):
    d = torch.zeros(api.M, 2 * api.N, 1, dtype=UINT8).view(E4M3)
    atoms = lambda r, c: scales.to_atom_view(torch.zeros(r, c, dtype=UINT8).view(E8M0))  # noqa: E731
    return dict(
        sample_a=t["a_tensor"], sample_c=api.column(t["c"]), sample_d_row=d, sample_d_col=d.clone(),
        sample_sfa=t["sfa_tensor"], sample_padded_offsets=t["padded_offsets"], sample_alpha=t["alpha_tensor"],
        sample_beta=None, sample_prob=None, sample_dprob=None, sample_b=t["b"], sample_sfb=t["sfb"],
        sample_sfd_row=atoms(api.M, 4), sample_sfd_col=atoms(128, api.M // 32), sample_norm_const=torch.ones(1),
        sf_vec_size=32,
    )  # fmt: skip


@pytest.mark.parametrize("code", [c for c, v in CLASS_ONLY.items() if v is not None])
def test_samples_are_held_to_the_same_rows(api, code):
    t = api.make(2, "e4m3").tensors
    changes = {k: v(t) if callable(v) else v for k, v in CLASS_ONLY[code].items()}
    with pytest.raises(UnsupportedCall) as error:
        calls.GroupedGemmDglu(**{**dglu_samples(api, t), **changes}).check_support()
    assert code in {r.code for r in error.value.reasons}, str(error.value)


def test_the_forward_class_wants_a_column_output_beside_scales(api):
    t = api.make(2, "e4m3", columns=2 * api.N, discrete=True).tensors
    atoms = lambda r, c: scales.to_atom_view(torch.zeros(r, c, dtype=UINT8).view(E8M0))  # noqa: E731
    op = calls.DiscreteGroupedGemmSwiglu(
        t["a_tensor"], api.L, (128, api.K), E4M3, torch.zeros(api.M, 128, 1), torch.zeros(api.M, 64, 1, dtype=BF16),
        t["sfa_tensor"], t["padded_offsets"], t["alpha_tensor"], None, sample_sfd_row=atoms(api.M, 4),
        sample_sfd_col=atoms(128, api.M // 32), sample_norm_const=torch.ones(1), sf_vec_size=32,
    )  # fmt: skip
    with pytest.raises(UnsupportedCall, match="D_COL_REQUIRED"):
        op.check_support()


# ---------------------------------------------------------------------- offsets, and what an error says


@pytest.mark.parametrize("ends, says", [
    ((256, 300, 512), r"ends \[300\] of \[256, 300, 512\] \(padded: \[256, 512, 768\]\)"),
    ((512, 256, 512), "which decrease"),
    ((256, 512, 768), "last end 768 of 512 rows"),
    ((-256, 256, 512), "which decrease"),
])  # fmt: skip
def test_c14_offsets_on_the_cpu_are_looked_at(api, ends, says):
    with pytest.raises(UnsupportedCall, match=f"OFFSETS.*{says}"):
        dglu(api, padded_offsets=padded(*ends))


def test_rows_past_the_last_offset_are_zero(api):
    out = dglu(api, padded_offsets=padded(0, 256, 256), generate_dbias=True)
    assert (out["d_row_tensor"][256:] == 0).all() and (out["dprob_tensor"][256:] == 0).all()
    assert (out["d_row_tensor"][:256] != 0).any() and (out["dbias_tensor"][0] == 0).all()


@pytest.mark.parametrize("rows", [0, 256, 768])
def test_any_padded_number_of_rows_including_none(api, rows):
    """One graph serves them all; a call without rows does not poison the next one."""
    from opfuse.graph_ops.api import dglu as module

    dglu(api)
    before = len(module.CACHE)
    take = lambda name: lambda a: a[name][:rows] if rows <= 512 else a[name].repeat(2, 1, 1)[:rows]  # noqa: E731
    names = ("a_tensor", "c_tensor", "prob_tensor", "dprob_tensor")
    out = dglu(api, padded_offsets=padded(0, rows, rows), **{n: take(n) for n in names})
    assert out[0].shape == (rows, 128, 1) and len(module.CACHE) == before


def test_c111_a_refusal_lists_every_reason_with_what_to_do():
    a = torch.zeros(300, 40, 1, dtype=E4M3)
    with pytest.raises(UnsupportedCall) as error:
        calls.grouped_gemm_dglu_wrapper(
            a, torch.zeros(300, 96, 1), None, padded(256, 300), torch.ones(2), None, None, None,
            torch.zeros(2, 48, 40, dtype=UINT8).view(E4M3).permute(1, 2, 0), act_func="gelu", m_aligned=128,
        )  # fmt: skip
    assert [r.code for r in error.value.reasons] == [
        "SCALES_MISSING", "D_TYPE", "ACT", "COLUMNS", "ALIGNMENT_16", "ROW_MULTIPLE", "M_ALIGNED", "OFFSETS",
    ]  # fmt: skip
    assert str(error.value) == GOLDEN


GOLDEN = """\
grouped_gemm_dglu: 8 reasons
  SCALES_MISSING: no sfa and no sfb, requires scales of A and of B
  D_TYPE: D is torch.bfloat16 for fp8 operands, requires a type of D for these operands; the default, bfloat16, \
is none of the types that FP8 operands give: pass d_dtype=torch.float8_e4m3fn
  ACT: act_func = 'gelu' for fp8 operands, requires an activation of these operands
  COLUMNS: N = 48, requires N positive and a multiple of 32
  ALIGNMENT_16: A: 40 elements of torch.float8_e4m3fn, B: 40 elements of torch.float8_e4m3fn, \
requires multiples of 16 bytes
  ROW_MULTIPLE: M = 300, requires M a multiple of 256; pad every expert's rows to a multiple of 256
  M_ALIGNED: 128, requires m_aligned = 256
  OFFSETS: ends [300] of [256, 300] (padded: [256, 512]), requires non-decreasing ends in multiples of 256, at most M; \
pad every expert's rows to a multiple of 256"""


# ---------------------------------------------------------------------- accumulators and the class's life


def run_class(api, p, dprob, dbias, amax=None):
    t = p.tensors
    kind = "fp4" if amax is not None else "bf16"
    d_row = torch.empty(api.M, 2 * api.N, 1, dtype=BF16)
    shared = dict(a=t["a_tensor"], c=api.column(t["c"]), d_row=d_row, d_col=None, sfa=t["sfa_tensor"],
                  alpha=t["alpha_tensor"], beta=t["beta_tensor"], prob=t["prob_tensor"], dprob=dprob, dbias=dbias,
                  b=t["b"], sfb=t.get("sfb"), amax=amax)  # fmt: skip
    op = calls.GroupedGemmDglu(
        **{f"sample_{k}": v for k, v in shared.items()}, sample_padded_offsets=t["padded_offsets"],
        sf_vec_size=32 if kind == "fp4" else 16,
    )  # fmt: skip
    op.compile()
    op.execute(**{f"{k}_tensor": v for k, v in shared.items()}, padded_offsets=t["padded_offsets"])
    return d_row


def test_accumulators_are_added_to_and_a_zeroed_one_gets_exactly_the_gradient(api):
    p = api.make(kind="fp4")
    zeroed = torch.zeros(api.M, 1, 1), torch.zeros(api.L, 128, 1, dtype=BF16), torch.full((api.L, 2, 1), -torch.inf)
    held = torch.full((api.M, 1, 1), 0.5), torch.full((api.L, 128, 1), 2.0, dtype=BF16), torch.full((api.L, 2, 1), 1e6)
    d_row = run_class(api, p, *zeroed)
    run_class(api, p, *held)
    dprob, dbias, amax = zeroed
    r = p.product * p.per_row(p.tensors["alpha_tensor"]) ** 2
    prob = p.tensors["prob_tensor"].double().view(-1, 1)
    d, expected = api.dglu(r, p.tensors["c"].double() * p.per_row(p.tensors["beta_tensor"]), prob)
    api.close(dprob, expected, 1e-5, f"seed {p.seed}")
    assert torch.equal(held[0], dprob + 0.5), f"seed {p.seed}"
    assert torch.equal(held[1], dbias + 2.0), f"seed {p.seed}"
    assert (held[2] == 1e6).all()
    gate, up = api.split(d)
    api.close(amax, torch.stack([api.amax_by_expert(gate), api.amax_by_expert(up)], 1), 1e-5, f"seed {p.seed}")
    api.close(d_row, d, 2**-8, f"seed {p.seed}")


def test_the_class_holds_to_its_samples(api):
    p = api.make(4)
    t = p.tensors
    sampled = dict(a=t["a_tensor"], c=api.column(t["c"]), d_row=torch.empty(api.M, 128, 1), d_col=None, sfa=None,
                   alpha=t["alpha_tensor"], beta=t["beta_tensor"], prob=t["prob_tensor"], dprob=t["dprob_tensor"],
                   b=t["b"])  # fmt: skip
    op = calls.GroupedGemmDglu(
        **{f"sample_{k}": v for k, v in sampled.items()}, sample_padded_offsets=t["padded_offsets"]
    )
    run = lambda **changes: op.execute(  # noqa: E731
        **{f"{k}_tensor": v for k, v in {**sampled, **changes}.items()},
        padded_offsets=t["padded_offsets"])  # fmt: skip
    with pytest.raises(RuntimeError, match=r"NOT_COMPILED.*compile\(\) first"):
        run()
    op.compile()
    run()
    for changes, field in [
        (dict(dbias=torch.zeros(api.L, 128, 1, dtype=BF16)), "optional"),
        (dict(prob=None), "optional"),
        (dict(d_row=torch.empty(api.M, 128, 1, dtype=BF16)), "d_type"),
        (dict(c=api.column(t["c"].half())), "c_type"),
    ]:
        with pytest.raises(UnsupportedCall, match=f"NOT_AS_SAMPLED: .*{field}"):
            run(**changes)
    with pytest.raises(UnsupportedCall, match="WEIGHT_MODE"):
        run(b=None)


def test_outputs_must_not_overlap_inputs(api):
    p = api.make(4)
    t = p.tensors
    c = api.column(t["c"])
    op = calls.GroupedGemmDglu(t["a_tensor"], c, c, None, None, t["padded_offsets"], t["alpha_tensor"], None, None,
                               None,
                               sample_b=t["b"])  # fmt: skip
    op.compile()
    with pytest.raises(VariantPackError, match="ALIASED"):
        op.execute(t["a_tensor"], c, c, None, None, t["padded_offsets"], t["alpha_tensor"], None, None, None, t["b"])


def test_the_graph_cache_is_bounded():
    from opfuse.graph_ops.api.common import GraphCache

    made = []
    cache = GraphCache(limit=2)

    class Made:
        def __init__(self, key):
            made.append(key)

        def build(self):
            return self

    first = cache.get("a", Made)
    cache.get("b", Made)
    assert cache.get("a", Made) is first and made == ["a", "b"]
    cache.get("c", Made)
    assert len(cache) == 2
    cache.get("b", Made)
    assert made == ["a", "b", "c", "b"]
    cache.clear()
    assert len(cache) == 0


def test_tuple_dict_is_a_tuple_and_a_dict():
    made = calls.TupleDict(x=1, y=2)
    assert tuple(made) == (1, 2) and made["y"] == 2 and made[0] == 1 and dict(made.items()) == {"x": 1, "y": 2}
    for index in (-1, 2):
        with pytest.raises(IndexError):
            made[index]


def test_bytes_that_are_not_scales_say_so():
    with pytest.raises(GraphError, match="SCALE_VIEW"):
        scales.from_atom_view(torch.zeros(3, dtype=UINT8), 128, 4)
