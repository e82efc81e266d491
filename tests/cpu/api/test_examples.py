"""The usage examples of NVIDIA's two pages, as calls, against the pages' equations in float64."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import api as cudnn
from opfuse.graph_ops import scales
from opfuse.kernels import reference


def expect_dglu(api, p, act="dswiglu", beta=True, c=None, **parameters):
    t = p.tensors
    r = p.product * p.per_row(t["alpha_tensor"]) ** 2
    x = (t["c"] if c is None else c).double()
    x = x * p.per_row(t["beta_tensor"]) if beta else x
    return api.dglu(r, x, t["prob_tensor"].double().view(-1, 1), act, **parameters)


@pytest.mark.parametrize("act", ["dswiglu", "dgeglu"])
def test_bf16_wrapper_dense(api, act):
    p = api.make(wide_values=True)
    t = p.tensors
    c = t["c"].bfloat16()
    dprob = t["dprob_tensor"]
    dprob.zero_()
    out = cudnn.grouped_gemm_dglu_wrapper_sm100(
        a_tensor=t["a_tensor"],
        c_tensor=api.column(c),
        sfa_tensor=None,
        padded_offsets=t["padded_offsets"],
        alpha_tensor=t["alpha_tensor"],
        beta_tensor=t["beta_tensor"],
        prob_tensor=t["prob_tensor"],
        dprob_tensor=dprob,
        b_tensor=t["b"],
        sfb_tensor=None,
        act_func=act,
        generate_dbias=True,
        use_dynamic_sched=True,
    )
    d_row, d_col, dprob_out, dbias, amax, sfd_row, sfd_col = out
    d, dprob_expected = expect_dglu(api, p, act, c=c)
    assert list(out.keys()) == ["d_row_tensor", "d_col_tensor", "dprob_tensor", "dbias_tensor", "amax_tensor",
                                "sfd_row_tensor", "sfd_col_tensor"]  # fmt: skip
    assert d_col is None and amax is None and sfd_row is None and sfd_col is None and dprob_out is dprob
    assert d_row.shape == (api.M, 2 * api.N, 1) and d_row.stride() == (2 * api.N, 1, 2 * api.M * api.N)
    assert d_row.dtype is torch.bfloat16 and dbias.dtype is torch.bfloat16 and dbias.shape == (api.L, 2 * api.N, 1)
    api.close(d_row, d, 2**-8, f"d, seed {p.seed}")
    api.close(dprob, dprob_expected, 1e-5, f"dprob, seed {p.seed}")
    api.close(dbias, api.by_expert(d), 2**-8, f"dbias, seed {p.seed}")
    assert (dbias[1] == 0).all()
    assert out[0] is d_row and out["dbias_tensor"] is dbias


def test_bf16_wrapper_discrete(api):
    p = api.make(discrete=True, wide_values=True)
    t = p.tensors
    c = t["c"].bfloat16()
    out = cudnn.grouped_gemm_dglu_wrapper_sm100(
        a_tensor=t["a_tensor"], c_tensor=api.column(c), sfa_tensor=None,
        padded_offsets=t["padded_offsets"], alpha_tensor=t["alpha_tensor"], beta_tensor=t["beta_tensor"],
        prob_tensor=t["prob_tensor"], dprob_tensor=t["dprob_tensor"],
        b_ptrs=t["b_ptrs"], sfb_ptrs=None, n=api.N, b_dtype=torch.bfloat16,
        act_func="dgeglu",
    )  # fmt: skip
    d, dprob = expect_dglu(api, p, "dgeglu", c=c)
    api.close(out["d_row_tensor"], d, 2**-8, f"seed {p.seed}")
    api.close(t["dprob_tensor"], dprob, 1e-5, f"seed {p.seed}")


def test_bf16_class(api):
    p = api.make()
    t = p.tensors
    a, b, c = t["a_tensor"], t["b"], api.column(t["c"].bfloat16())
    padded_offsets, alpha, beta, prob, dprob = (t[n] for n in ("padded_offsets", "alpha_tensor", "beta_tensor",
                                                               "prob_tensor", "dprob_tensor"))  # fmt: skip
    d_row = torch.full((api.M, 2 * api.N, 1), torch.nan, dtype=torch.bfloat16)
    dbias = torch.zeros(api.L, 2 * api.N, 1, dtype=torch.bfloat16)
    op = cudnn.GroupedGemmDgluSm100(
        sample_a=a, sample_c=c, sample_d_row=d_row, sample_d_col=None,
        sample_sfa=None, sample_padded_offsets=padded_offsets,
        sample_alpha=alpha, sample_beta=beta, sample_prob=prob,
        sample_dprob=dprob, sample_dbias=dbias,
        sample_b=b, sample_sfb=None, act_func="dswiglu",
    )  # fmt: skip
    assert op.check_support()
    op.compile()
    dprob.zero_()
    dbias.zero_()
    op.execute(
        a_tensor=a, c_tensor=c, d_row_tensor=d_row, d_col_tensor=None,
        sfa_tensor=None, padded_offsets=padded_offsets, alpha_tensor=alpha,
        beta_tensor=beta, prob_tensor=prob, dprob_tensor=dprob,
        dbias_tensor=dbias, b_tensor=b, sfb_tensor=None,
    )  # fmt: skip
    d, dprob_expected = expect_dglu(api, p, c=c[..., 0])
    api.close(d_row, d, 2**-8, f"seed {p.seed}")
    api.close(dprob, dprob_expected, 1e-5, f"seed {p.seed}")
    api.close(dbias, api.by_expert(d), 2**-8, f"seed {p.seed}")


def test_block_scaled_wrapper_dense(api):
    """The page's dense example: FP4 operands in blocks of 32, a 16-bit D (which has no scales, so no norm_const)."""
    p = api.make(kind="fp4", block=32)
    t = p.tensors
    outputs = cudnn.grouped_gemm_dglu_wrapper_sm100(
        a_tensor=t["a_tensor"],
        c_tensor=api.column(t["c"]),
        sfa_tensor=t["sfa_tensor"],
        padded_offsets=t["padded_offsets"],
        alpha_tensor=t["alpha_tensor"],
        beta_tensor=t["beta_tensor"],
        prob_tensor=t["prob_tensor"],
        dprob_tensor=t["dprob_tensor"],
        generate_dbias=True,
        b_tensor=t["b"],
        sfb_tensor=t["sfb"],
        norm_const_tensor=None,
        acc_dtype=torch.float32,
        d_dtype=torch.bfloat16,
        cd_major="n",
        mma_tiler_mn=(256, 256),
        cluster_shape_mn=(2, 1),
        sf_vec_size=32,
        act_func="dswiglu",
        epilogue_op=None,
        current_stream=None,
    )
    d_row, d_col, dprob, dbias, amax, sfd_row, sfd_col = outputs
    d, dprob_expected = expect_dglu(api, p)
    assert d_col is None and sfd_row is None and sfd_col is None
    api.close(d_row, d, 2**-8, f"seed {p.seed}")
    api.close(dprob, dprob_expected, 1e-5, f"seed {p.seed}")
    api.close(dbias, api.by_expert(d), 2**-8, f"seed {p.seed}")
    gate, up = api.split(d)
    assert amax.shape == (api.L, 2, 1) and amax.dtype is torch.float32
    largest = torch.stack([api.amax_by_expert(gate), api.amax_by_expert(up)], 1)
    api.close(amax, largest, 1e-5, f"seed {p.seed}")


def decoded(api, codes, view, kind, axis):
    """(M, X, 1) codes and their six-dimensional scales -> float64 values, block amax-sized error steps per element."""
    stored = codes[..., 0]
    rows, columns = stored.shape
    matrix = (rows, columns // 32) if axis == 1 else (columns, rows // 32)
    memory = scales.from_atom_view(view, *matrix)
    sf = reference.decode_scale(scales.unswizzle(memory, *matrix).view(torch.uint8), api.DataType.FP8_E8M0)
    each = sf.repeat_interleave(32, 1) if axis == 1 else sf.repeat_interleave(32, 1).T
    return reference.decode(stored.view(torch.uint8), api.CODES[kind]) * each, each


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("by_expert", [False, True])
def test_block_scaled_wrapper_with_quantized_d(api, kind, by_expert):
    p = api.make(kind=kind, block=32)
    t = p.tensors
    norm = torch.tensor([0.5])
    dtype = api.STORED[kind]
    out = cudnn.grouped_gemm_dglu_wrapper(
        t["a_tensor"], api.column(t["c"].half()), t["sfa_tensor"], t["padded_offsets"], t["alpha_tensor"],
        t["beta_tensor"],
        t["prob_tensor"], t["dprob_tensor"], t["b"], t["sfb"], norm_const_tensor=norm, d_dtype=dtype, sf_vec_size=32,
        generate_dbias=True, discrete_col_sfd=by_expert,
    )  # fmt: skip
    d, dprob = expect_dglu(api, p, c=t["c"].half())
    d_row, d_col, _, dbias, amax, sfd_row, sfd_col = out
    assert amax is None and d_row.dtype is d_col.dtype is dtype
    assert sfd_row.shape == (32, 4, api.M // 128, 4, 1, 1) and sfd_col.shape == (32, 4, 1, 4, api.M // 128, 1)
    if by_expert:
        memory = scales.from_atom_view(sfd_col, 2 * api.N, api.M // 32)
        sfd_col = scales.to_atom_view(scales.unpack_columns_by_expert(memory, t["padded_offsets"], 32))
    for codes, view, axis in ((d_row, sfd_row, 1), (d_col, sfd_col, 0)):
        values, each = decoded(api, codes, view, kind, axis)
        step = each * (32 if kind == "e4m3" else 8192)  # half a unit in the last place at the top of the range
        assert ((values / 0.5 - d).abs() <= step / 0.5 + 1e-6).all(), f"axis {axis}, seed {p.seed}"
        largest = reference.CODE_FORMATS[api.CODES[kind]].largest
        blocks = d.abs().view(api.M, -1, 32).amax(2) if axis == 1 else d.T.abs().reshape(2 * api.N, -1, 32).amax(2)
        full = each[:, ::32] if axis == 1 else each.T[:, ::32]
        wanted = (blocks * 0.5 / largest).clamp(min=2.0**-127)
        assert ((full >= wanted * (1 - 1e-5)) & (full <= 2 * wanted * (1 + 1e-5))).all(), f"axis {axis}, seed {p.seed}"
    api.close(dbias, api.by_expert(d), 2**-8, f"seed {p.seed}")
    api.close(t["dprob_tensor"], dprob, 1e-5, f"seed {p.seed}")


def test_block_scaled_wrapper_discrete(api):
    """The page's discrete example: uint8 FP4 weights by address, sf_vec_size 16, dGeGLU, which does not read beta."""
    p = api.make(kind="uint8", block=16, scale="e4m3", discrete=True, wide_values=True)
    t = p.tensors
    outputs = cudnn.grouped_gemm_dglu_wrapper_sm100(
        a_tensor=t["a_tensor"],
        c_tensor=api.column(t["c"]),
        sfa_tensor=t["sfa_tensor"],
        padded_offsets=t["padded_offsets"],
        alpha_tensor=t["alpha_tensor"],
        beta_tensor=torch.ones(api.L),
        prob_tensor=t["prob_tensor"],
        dprob_tensor=t["dprob_tensor"],
        b_ptrs=t["b_ptrs"],
        sfb_ptrs=t["sfb_ptrs"],
        n=api.N,
        b_dtype=torch.uint8,
        b_major="k",
        act_func="dgeglu",
        current_stream=None,
    )
    d, dprob = expect_dglu(api, p, "dgeglu", beta=False)
    api.close(outputs["d_row_tensor"], d, 2**-8, f"seed {p.seed}")
    api.close(t["dprob_tensor"], dprob, 1e-5, f"seed {p.seed}")


def test_block_scaled_class_dense(api):
    p = api.make(kind="e4m3", block=32)
    t = p.tensors
    a, b, c, sfa, sfb = t["a_tensor"], t["b"], api.column(t["c"].bfloat16()), t["sfa_tensor"], t["sfb"]
    padded_offsets, alpha, beta, prob, dprob = (t[n] for n in ("padded_offsets", "alpha_tensor", "beta_tensor",
                                                               "prob_tensor", "dprob_tensor"))  # fmt: skip
    poison = torch.full((api.M, 2 * api.N, 1), 255, dtype=torch.uint8)
    d_row, d_col = poison.clone().view(torch.float8_e4m3fn), poison.clone().view(torch.float8_e4m3fn)
    sfd_row = scales.to_atom_view(torch.full((api.M, 4), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    sfd_col = scales.to_atom_view(torch.full((128, api.M // 32), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    dbias, norm_const = torch.zeros(api.L, 2 * api.N, 1, dtype=torch.bfloat16), torch.tensor([1.0])
    op = cudnn.GroupedGemmDgluSm100(
        sample_a=a,
        sample_c=c,
        sample_d_row=d_row,
        sample_d_col=d_col,
        sample_sfa=sfa,
        sample_padded_offsets=padded_offsets,
        sample_alpha=alpha,
        sample_beta=beta,
        sample_prob=prob,
        sample_dprob=dprob,
        sample_dbias=dbias,
        sample_b=b,
        sample_sfb=sfb,
        sample_sfd_row=sfd_row,
        sample_sfd_col=sfd_col,
        sample_amax=None,
        sample_norm_const=norm_const,
        acc_dtype=torch.float32,
        mma_tiler_mn=(256, 256),
        sf_vec_size=32,
        act_func="dswiglu",
        epilogue_op=None,
    )
    assert op.check_support()
    op.compile()
    workspace = torch.empty(op.scratch_workspace_bytes(), dtype=torch.uint8)
    op.execute(
        a_tensor=a, c_tensor=c, d_row_tensor=d_row, d_col_tensor=d_col,
        sfa_tensor=sfa, padded_offsets=padded_offsets, alpha_tensor=alpha,
        beta_tensor=beta, prob_tensor=prob, dprob_tensor=dprob, dbias_tensor=dbias,
        b_tensor=b, sfb_tensor=sfb,
        sfd_row_tensor=sfd_row, sfd_col_tensor=sfd_col,
        amax_tensor=None, norm_const_tensor=norm_const,
        current_stream=None, workspace=workspace,
    )  # fmt: skip
    same = cudnn.grouped_gemm_dglu_wrapper(
        a, c, sfa, padded_offsets, alpha, beta, prob, torch.zeros_like(dprob), b, sfb, generate_dbias=True,
        norm_const_tensor=norm_const, d_dtype=torch.float8_e4m3fn, sf_vec_size=32,
    )  # fmt: skip
    for name, mine in (("d_row", d_row), ("d_col", d_col), ("sfd_row", sfd_row), ("sfd_col", sfd_col)):
        theirs = same[f"{name}_tensor"]
        assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), name
    d, dprob_expected = expect_dglu(api, p, c=c[..., 0])
    # Half a step of E4M3 is at most 1/16 of a value, of the largest too.
    api.close(decoded(api, d_row, sfd_row, "e4m3", 1)[0], d, 2**-4, f"seed {p.seed}")
    api.close(dprob, dprob_expected, 1e-5, f"seed {p.seed}")
    api.close(dbias, same["dbias_tensor"], 0, f"seed {p.seed}")


def test_block_scaled_class_discrete(api):
    """The page's discrete class example, relu included: here it is applied to D; D_col, which has no scales, is D."""
    p = api.make(kind="uint8", block=16, scale="e4m3", discrete=True)
    t = p.tensors
    a, c, sfa = t["a_tensor"], api.column(t["c"]), t["sfa_tensor"]
    d_row = torch.full((api.M, 2 * api.N, 1), torch.nan, dtype=torch.bfloat16)
    d_col = d_row.clone()
    common = {n: t[f"{n}_tensor"] for n in ("alpha", "prob", "dprob")} | {"beta": None}
    op = cudnn.GroupedGemmDgluSm100(
        sample_a=a,
        sample_c=c,
        sample_d_row=d_row,
        sample_d_col=d_col,
        sample_sfa=sfa,
        sample_padded_offsets=t["padded_offsets"],
        **{f"sample_{n}": v for n, v in common.items()},
        num_experts=api.L,
        b_shape=(api.N, api.K),
        b_dtype=torch.uint8,
        act_func="dgeglu",
        b_major="k",
        epilogue_op="relu",
    )
    assert op.check_support()
    op.compile()
    op.execute(
        a_tensor=a, c_tensor=c, d_row_tensor=d_row, d_col_tensor=d_col,
        sfa_tensor=sfa, padded_offsets=t["padded_offsets"], **{f"{n}_tensor": v for n, v in common.items()},
        b_ptrs=t["b_ptrs"], sfb_ptrs=t["sfb_ptrs"],
        current_stream=None,
    )  # fmt: skip
    d, dprob = expect_dglu(api, p, "dgeglu", beta=False)
    api.close(d_row, d.clamp(min=0), 2**-8, f"seed {p.seed}")
    assert torch.equal(d_row, d_col)
    api.close(common["dprob"], dprob, 1e-5, f"seed {p.seed}")


@pytest.mark.parametrize("act", ["swiglu", "geglu"])
def test_discrete_swiglu_wrapper(api, act):
    """The page's wrapper example: FP8 operands, a 16-bit D divided by its scales, prob given."""
    p = api.make(kind="e4m3", block=32, columns=2 * api.N, discrete=True)
    t = p.tensors
    n = 2 * api.N
    outputs = cudnn.discrete_grouped_gemm_swiglu_wrapper_sm100(
        a_tensor=t["a_tensor"],
        b_ptrs=t["b_ptrs"],
        sfa_tensor=t["sfa_tensor"],
        sfb_ptrs=t["sfb_ptrs"],
        padded_offsets=t["padded_offsets"],
        alpha_tensor=t["alpha_tensor"],
        n=n,
        b_dtype=torch.float8_e4m3fn,
        norm_const_tensor=torch.tensor([2.0]),
        prob_tensor=t["prob_tensor"],
        acc_dtype=torch.float32,
        c_dtype=torch.bfloat16,
        d_dtype=torch.bfloat16,
        cd_major="n",
        mma_tiler_mn=(256, 256),
        cluster_shape_mn=(2, 1),
        sf_vec_size=32,
        vector_f32=False,
        m_aligned=256,
        discrete_col_sfd=False,
        act_func=act,
        b_major="k",
        current_stream=None,
    )
    c, d, d_col, amax, sfd_row, sfd_col = outputs
    assert c is outputs["c_tensor"] and d is outputs["d_tensor"] and amax is outputs["amax_tensor"]
    pre = p.product * p.per_row(t["alpha_tensor"])
    expected = api.glu(pre, t["prob_tensor"].double().view(-1, 1), act)
    api.close(c, pre, 2**-8, f"c, seed {p.seed}")
    api.close(amax, api.amax_by_expert(expected), 1e-5, f"amax, seed {p.seed}")
    for values, view, axis in ((d, sfd_row, 1), (d_col, sfd_col, 0)):
        shape = (api.M, api.N // 32) if axis == 1 else (api.N, api.M // 32)
        memory = scales.unswizzle(scales.from_atom_view(view, *shape), *shape)
        sf = reference.decode_scale(memory.view(torch.uint8), api.DataType.FP8_E8M0).repeat_interleave(32, 1)
        sf = sf if axis == 1 else sf.T
        api.close(values[..., 0].double() * sf / 2.0, expected, 2**-8, f"axis {axis}, seed {p.seed}")
        blocks = (
            expected.abs().view(api.M, -1, 32).amax(2) if axis == 1 else expected.T.abs().reshape(api.N, -1, 32).amax(2)
        )
        full, wanted = (sf if axis == 1 else sf.T)[:, ::32], (2.0 * blocks).clamp(min=2.0**-127)
        assert ((full >= wanted * (1 - 1e-5)) & (full <= 2 * wanted * (1 + 1e-5))).all(), f"axis {axis}, seed {p.seed}"


def test_discrete_swiglu_class(api):
    p = api.make(kind="uint8", block=16, scale="e4m3", columns=2 * api.N, discrete=True)
    t = p.tensors
    n, k, num_experts = 2 * api.N, api.K, api.L
    c = torch.full((api.M, n, 1), torch.nan, dtype=torch.bfloat16)
    d = torch.full((api.M, n // 2, 1), torch.nan, dtype=torch.bfloat16)
    d_col, amax = d.clone(), torch.full((num_experts, 1), -torch.inf)
    op = cudnn.DiscreteGroupedGemmSwigluSm100(
        sample_a=t["a_tensor"],
        num_experts=num_experts,
        b_shape=(n, k),
        b_dtype=torch.uint8,
        sample_c=c,
        sample_d=d,
        sample_sfa=t["sfa_tensor"],
        sample_padded_offsets=t["padded_offsets"],
        sample_alpha=t["alpha_tensor"],
        sample_d_col=d_col,
        sample_sfd_row=None,
        sample_sfd_col=None,
        sample_amax=amax,
        sample_norm_const=None,
        sample_prob=t["prob_tensor"],
        acc_dtype=torch.float32,
        mma_tiler_mn=(256, 256),
        cluster_shape_mn=(2, 1),
        sf_vec_size=16,
        vector_f32=False,
        m_aligned=256,
        discrete_col_sfd=False,
        act_func="swiglu",
        b_major="k",
    )
    assert op.check_support()
    op.compile()
    op.execute(
        a_tensor=t["a_tensor"],
        b_ptrs=t["b_ptrs"],
        c_tensor=c,
        d_tensor=d,
        sfa_tensor=t["sfa_tensor"],
        sfb_ptrs=t["sfb_ptrs"],
        padded_offsets=t["padded_offsets"],
        alpha_tensor=t["alpha_tensor"],
        d_col_tensor=d_col,
        amax_tensor=amax,
        prob_tensor=t["prob_tensor"],
        current_stream=None,
    )
    pre = p.product * p.per_row(t["alpha_tensor"])
    expected = api.glu(pre, t["prob_tensor"].double().view(-1, 1))
    api.close(c, pre, 2**-8, f"seed {p.seed}")
    api.close(d, expected, 2**-8, f"seed {p.seed}")
    assert torch.equal(d, d_col)
    api.close(amax, api.amax_by_expert(expected), 1e-5, f"seed {p.seed}")
