"""NVIDIA's calls on the GPU at hand: the same call on the CPU gives the same tensors."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import DataType, scales
from opfuse.graph_ops import api as cudnn
from opfuse.kernels import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

L, M, K, N = 3, 1024, 256, 128
ENDS = (512, 512, 1024)
FORMATS = {
    "e4m3": (DataType.FP8_E4M3, torch.float8_e4m3fn, DataType.FP8_E8M0, torch.float8_e8m0fnu, 32),
    "fp4": (DataType.FP4_E2M1, torch.uint8, DataType.FP8_E4M3, torch.float8_e4m3fn, 16),
}


def quantized(values, kind):
    codes, stored, scale, scale_type, block = FORMATS[kind]
    byte, sf = reference.quantize.quantize_blocks(values, block, codes, scale)
    packed = reference.pack_fp4(byte) if kind == "fp4" else byte
    return packed.view(stored), scales.swizzle(sf).view(scale_type)


def operands(kind, columns, seed):
    """Tensors of a call on the CPU; weights and their scales as lists, one a expert."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(M, K, generator=g), [torch.randn(columns, K, generator=g) for _ in range(L)]
    vectors = {
        "padded_offsets": torch.tensor(ENDS, dtype=torch.int32),
        "alpha_tensor": torch.tensor([0.5, 2.0, -1.5]),
        "prob_tensor": torch.randn(M, 1, 1, generator=g),
    }
    c = torch.randn(M, 2 * N, 1, generator=g).bfloat16()
    if kind == "bf16":
        return (
            {**vectors, "a_tensor": a.bfloat16().unsqueeze(2), "sfa_tensor": None},
            [w.bfloat16() for w in b],
            None,
            c,
        )
    codes, sfa = quantized(a, kind)
    made = [quantized(w, kind) for w in b]
    inputs = {**vectors, "a_tensor": codes.unsqueeze(2), "sfa_tensor": scales.to_atom_view(sfa)}
    return inputs, [m[0] for m in made], [m[1] for m in made], c


def on(device, tensors):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}


def weights_of(device, experts, atoms, discrete):
    """The weight arguments of a call and what keeps their memory alive."""
    experts = [w.to(device) for w in experts]
    atoms = None if atoms is None else [s.to(device) for s in atoms]
    if discrete:
        pointers = lambda ts: torch.tensor([t.data_ptr() for t in ts], device=device)  # noqa: E731
        given = {"b_ptrs": pointers(experts), "sfb_ptrs": None if atoms is None else pointers(atoms)}
        return {**given, "n": experts[0].shape[0], "b_dtype": experts[0].dtype}, (experts, atoms)
    b = torch.stack([w.view(torch.uint8) for w in experts]).view(experts[0].dtype).permute(1, 2, 0)
    if atoms is None:
        return {"b_tensor": b, "sfb_tensor": None}, ()
    stacked = torch.stack([s.view(torch.uint8) for s in atoms]).view(atoms[0].dtype)
    return {"b_tensor": b, "sfb_tensor": scales.to_atom_view(stacked)}, ()


def values(t):
    return t.float() if t.is_floating_point() and t.element_size() > 1 else t.contiguous().view(torch.uint8).float()


def compare(seen, expected, seed):
    assert seen.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (wanted is None) == (seen[name] is None), name
        if wanted is not None:
            mine, theirs = values(seen[name].cpu()), values(wanted)
            if wanted.element_size() == 1:
                # A product at a near tie may round to either neighbour, and then so do the codes of its block.
                assert (mine == theirs).float().mean() > 0.99, f"{name}, seed {seed}"
            else:
                error = (mine - theirs).abs().max() / theirs.abs().max()
                assert error < 2**-6, f"{name}, seed {seed}: {error}"


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "fp4"])
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("act", ["dswiglu", "dgeglu"])
def test_dglu(kind, discrete, act):
    seed = int(torch.seed() % 2**31)
    inputs, experts, atoms, c = operands(kind, N, seed)
    results = []
    for device in ("cpu", "cuda"):
        given, kept = weights_of(device, experts, atoms, discrete)
        options = {"e4m3": dict(sf_vec_size=32, d_dtype=torch.float8_e4m3fn,
                                norm_const_tensor=torch.ones(1, device=device))}.get(kind, {})  # fmt: skip
        stream = torch.cuda.Stream() if device == "cuda" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        out = cudnn.grouped_gemm_dglu_wrapper_sm100(
            **on(device, inputs), c_tensor=c.to(device), beta_tensor=None,
            dprob_tensor=torch.zeros(M, 1, 1, device=device),
            generate_dbias=True, act_func=act, use_dynamic_sched=True, current_stream=stream, **given, **options,
        )  # fmt: skip
        torch.cuda.synchronize()
        results.append(dict(out.items()))
        del kept
    compare(results[1], results[0], seed)


@pytest.mark.parametrize("kind", ["e4m3", "fp4"])
@pytest.mark.parametrize("act", ["swiglu", "geglu"])
def test_discrete_swiglu(kind, act):
    seed = int(torch.seed() % 2**31)
    inputs, experts, atoms, _ = operands(kind, 2 * N, seed)
    results = []
    for device in ("cpu", "cuda"):
        given, kept = weights_of(device, experts, atoms, discrete=True)
        options = dict(sf_vec_size=32, norm_const_tensor=torch.ones(1, device=device)) if kind == "e4m3" else {}
        out = cudnn.discrete_grouped_gemm_swiglu_wrapper_sm100(**on(device, inputs), **given, act_func=act, **options)
        torch.cuda.synchronize()
        results.append(dict(out.items()))
        del kept
    compare(results[1], results[0], seed)
