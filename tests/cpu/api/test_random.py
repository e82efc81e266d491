"""Random accepted calls against the documents' equations, in any mixture of operands, scales, splits and outputs."""

from __future__ import annotations

import random

import pytest
import torch
from opfuse.graph_ops import api as calls

SPLITS = [
    (256, 256, 512), (0, 256, 512), (0, 0, 512), (512, 512, 512), (256, 512, 512), (0, 0, 0), (0, 256, 256),
]  # fmt: skip
BLOCKS = {"e4m3": [("e8m0", 32)], "e5m2": [("e8m0", 32)],
          "fp4": [("e8m0", 16), ("e8m0", 32), ("e4m3", 16)], "uint8": [("e8m0", 16), ("e4m3", 16)]}  # fmt: skip


@pytest.mark.parametrize("number", range(40))
def test_a_random_dglu_call(api, number, monkeypatch):
    seed = int(torch.seed() % 2**31) + number
    pick = random.Random(seed)
    kind = pick.choice(["bf16", "bf16", *BLOCKS])
    scale, block = pick.choice(BLOCKS.get(kind, [("e8m0", 16)]))
    discrete = pick.random() < 0.5
    ends = pick.choice(SPLITS)
    monkeypatch.setitem(api.make.__globals__, "ENDS", ends)
    p = api.make(seed, kind, scale, block, discrete=discrete, wide_values=pick.random() < 0.5)
    t = p.tensors
    act = pick.choice(["dswiglu", "dgeglu"] if kind == "bf16" else ["dswiglu", "dgeglu", "dsituglu"])
    parameters, constants = {}, {}
    if act == "dgeglu" and pick.random() < 0.5:
        parameters = dict(linear_offset=0.0, geglu_alpha=1.0, glu_clamp_max=10.0, glu_clamp_min=-10.0)
        constants = dict(offset=0.0, alpha=1.0, top=10.0, low=-10.0)
    if act == "dsituglu" and pick.random() < 0.5:
        parameters, constants = dict(situ_beta1=2.0, situ_beta2=8.0), dict(b1=2.0, b2=8.0)
    c_type = pick.choice([torch.bfloat16, torch.float16, torch.float32]
                         + ([torch.float8_e4m3fn, torch.float8_e5m2] if kind != "bf16" else []))  # fmt: skip
    c = t["c"].to(c_type)
    quantized = kind in ("e4m3", "e5m2")
    dbias = pick.random() < 0.5
    d_types = [torch.bfloat16, torch.float16, torch.float32]
    if kind in ("fp4", "uint8") and block == 16 and not dbias:
        d_types.pop()
    d_type = pick.choice([torch.float8_e4m3fn, torch.float8_e5m2] if quantized else d_types)
    has_prob, has_dprob = pick.random() < 0.7, pick.random() < 0.7
    reads_beta = kind == "bf16" or act != "dgeglu"
    has_beta = reads_beta and pick.random() < 0.7
    given = dict(b_tensor=t["b"], sfb_tensor=t.get("sfb")) if not discrete else dict(
        b_ptrs=t["b_ptrs"], sfb_ptrs=t.get("sfb_ptrs"), n=api.N,
        b_dtype=api.STORED.get(kind, torch.bfloat16))  # fmt: skip
    out = calls.grouped_gemm_dglu_wrapper(
        t["a_tensor"], api.column(c), t["sfa_tensor"], torch.tensor(ends, dtype=torch.int32), t["alpha_tensor"],
        t["beta_tensor"] if has_beta else None, t["prob_tensor"] if has_prob else None,
        t["dprob_tensor"] if has_dprob else None, generate_dbias=dbias, act_func=act, d_dtype=d_type,
        sf_vec_size=block if kind != "bf16" else 16, norm_const_tensor=torch.tensor([0.5]) if quantized else None,
        **parameters, **given,
    )  # fmt: skip
    r = p.product * p.per_row(t["alpha_tensor"]) ** 2
    x = c.double() * p.per_row(t["beta_tensor"]) if has_beta else c.double()
    prob = t["prob_tensor"].double().view(-1, 1) if has_prob else torch.ones(api.M, 1, dtype=torch.float64)
    d, dprob = api.dglu(r, x, prob, act, **constants)
    where = f"seed {seed}: {kind} {scale} {block} {act} {ends} {d_type} c {c_type}"
    if quantized:
        beyond = out["d_row_tensor"].view(torch.uint8)[ends[-1] :]
        assert out["d_row_tensor"].dtype is d_type and (beyond & 0x7F == 0).all(), where  # zero, of either sign
    else:
        api.close(out["d_row_tensor"], d, 2**-8, where)
        if d_type is not torch.float32 and kind != "bf16":
            gate, up = api.split(d)
            largest = torch.stack([api.amax_by_expert(gate), api.amax_by_expert(up)], 1)
            api.close(out["amax_tensor"], largest, 1e-5, where)
    if has_dprob:
        api.close(t["dprob_tensor"], dprob, 1e-5, where)
    if dbias:
        api.close(out["dbias_tensor"], api.by_expert(d), 2**-7, where)
