"""One problem in NVIDIA's layouts, and what it must give, from the documents' equations in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from opfuse.graph_ops import DataType, scales
from opfuse.kernels import reference

L, M, K, N = 3, 512, 64, 64
ENDS = (256, 256, 512)  # the second expert has no row
CODES = {
    "e4m3": DataType.FP8_E4M3,
    "e5m2": DataType.FP8_E5M2,
    "fp4": DataType.FP4_E2M1,
    "uint8": DataType.FP4_E2M1,
}
STORED = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp4": torch.float4_e2m1fn_x2,
    "uint8": torch.uint8,
}
SCALES = {"e8m0": (DataType.FP8_E8M0, torch.float8_e8m0fnu), "e4m3": (DataType.FP8_E4M3, torch.float8_e4m3fn)}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def encoded(values, kind, block, scale):
    """(R, K) -> what the kernels take: codes (R, K or K/2), the scale matrix (R, K/block) as bytes, exact values."""
    byte, sf = reference.quantize.quantize_blocks(values, block, CODES[kind], SCALES[scale][0])
    exact = reference.decode(byte, CODES[kind]) * reference.decode_scale(sf, SCALES[scale][0]).repeat_interleave(
        block, 1
    )
    stored = reference.pack_fp4(byte) if CODES[kind] is DataType.FP4_E2M1 else byte
    return stored.view(STORED[kind]), sf, exact


def views(sf, scale):
    """Scale matrices (R, C), or (L, R, C), as bytes -> NVIDIA's six-dimensional view."""
    memory = scales.swizzle(sf) if sf.dim() == 2 else torch.stack([scales.swizzle(s) for s in sf])
    return scales.to_atom_view(memory.view(SCALES[scale][1]))


def column(t):
    """(M, X) -> (M, X, 1)."""
    return t.unsqueeze(-1)


@dataclass
class Problem:
    """Operands in NVIDIA's layouts, the exact values behind them, and the seed."""

    seed: int
    a_values: torch.Tensor  # (M, K) float64
    b_values: torch.Tensor  # (L, N, K)
    tensors: dict = field(default_factory=dict)
    keep: list = field(default_factory=list)  # memory behind addresses

    @property
    def product(self):
        """A B[g]^T in float64, rows outside every group zero."""
        r = torch.zeros(M, self.b_values.shape[1], dtype=torch.float64)
        start = 0
        for g, end in enumerate(ENDS):
            r[start:end] = self.a_values[start:end] @ self.b_values[g].T
            start = end
        return r

    def per_row(self, vector):
        """(L,) -> (M, 1) float64: each row's expert's entry."""
        owner = torch.bucketize(torch.arange(M), torch.tensor(ENDS), right=True).clamp(max=L - 1)
        return vector.double()[owner][:, None]


def split(x):
    """(M, 2I), gate and up in blocks of 32 -> (M, I) each."""
    blocks = x.view(x.shape[0], -1, 2, 32)
    return blocks[:, :, 0].reshape(x.shape[0], -1), blocks[:, :, 1].reshape(x.shape[0], -1)


def join(gate, up):
    m = gate.shape[0]
    return torch.stack([gate.reshape(m, -1, 32), up.reshape(m, -1, 32)], 2).view(m, -1)


def dglu(r, x, prob, act="dswiglu", alpha=1.702, top=7.0, low=-7.0, offset=1.0, b1=4.0, b2=25.0):
    """The documents' backward equations: D (M, 2I), dprob (M,)."""
    gate, up = split(x)
    if act == "dswiglu":
        s = torch.sigmoid(gate)
        return join(r * prob * up * s * (1 + gate * (1 - s)), r * prob * gate * s), (r * gate * s * up).sum(1)
    if act == "dgeglu":
        y1, y2 = gate.clamp(max=top), up.clamp(low, top)
        s = torch.sigmoid(alpha * y1)
        dgate = r * prob * (y2 + offset) * s * (1 + alpha * y1 * (1 - s)) * (gate <= top)
        dup = r * prob * y1 * s * ((low <= up) & (up <= top))
        return join(dgate, dup), (r * y1 * s * (y2 + offset)).sum(1)
    tg, s, tu = torch.tanh(gate / b1), torch.sigmoid(gate), torch.tanh(up / b2)
    dgate = r * prob * b2 * tu * ((1 - tg**2) * s + b1 * tg * s * (1 - s))
    return join(dgate, r * prob * b1 * tg * s * (1 - tu**2)), (r * b1 * tg * s * b2 * tu).sum(1)


def glu(x, prob, act="swiglu", alpha=1.702, top=7.0, low=-7.0, offset=1.0):
    """The documents' forward equations: (M, 2I) -> (M, I)."""
    gate, up = split(x)
    if act == "swiglu":
        return prob * up * gate * torch.sigmoid(gate)
    y1, y2 = gate.clamp(max=top), up.clamp(low, top)
    return prob * (y2 + offset) * y1 * torch.sigmoid(alpha * y1)


def by_expert(x):
    """(M, X) -> (L, X): sums of each expert's rows."""
    bounds = [0, *ENDS]
    return torch.stack([x[bounds[g] : bounds[g + 1]].sum(0) for g in range(L)])


def amax_by_expert(x):
    """(M, X) -> (L,), zero for an expert without rows."""
    bounds = [0, *ENDS]
    parts = [x[bounds[g] : bounds[g + 1]].abs() for g in range(L)]
    return torch.stack([p.max() if p.numel() else torch.zeros((), dtype=x.dtype) for p in parts])


def close(seen, expected, error, where=""):
    """Largest error relative to the largest value, and cosine above 0.999 (unless all is zero)."""
    seen, expected = seen.double().flatten(), expected.double().flatten()
    assert seen.shape == expected.shape, where
    top = expected.abs().max().clamp(min=1e-30)
    worst = float((seen - expected).abs().max() / top)
    assert worst <= error and not math.isnan(worst), f"{where}: {worst} > {error}"
    if top > 1e-30:
        cosine = torch.nn.functional.cosine_similarity(seen, expected, dim=0)
        assert cosine > 0.999, f"{where}: cosine {cosine}"


def make(seed=None, kind="bf16", scale="e8m0", block=32, columns=None, discrete=False, wide_values=False):
    """A problem with fresh data. `columns`: of B, N of the dGLU or the 2I of a forward."""
    seed = int(torch.seed() % 2**31) if seed is None else seed
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    columns = columns or N
    a, b = randn(M, K), randn(L, columns, K)
    if kind == "bf16":
        stored_a, stored_b = a.bfloat16(), b.bfloat16()
        made = Problem(seed, stored_a.double(), stored_b.double())
        made.tensors |= {"a_tensor": column(stored_a), "sfa_tensor": None}
    else:
        stored_a, sfa, exact_a = encoded(a, kind, block, scale)
        parts = [encoded(w, kind, block, scale) for w in b]
        stored_b = torch.stack([p[0].view(torch.uint8) for p in parts]).view(STORED[kind])
        made = Problem(seed, exact_a, torch.stack([p[2] for p in parts]))
        made.tensors |= {"a_tensor": column(stored_a), "sfa_tensor": views(sfa, scale)}
        made.tensors["sfb"] = views(torch.stack([p[1] for p in parts]), scale)
    bytes_b = stored_b.view(torch.uint8) if stored_b.dtype is torch.float4_e2m1fn_x2 else stored_b
    made.tensors["b"] = (
        bytes_b.permute(1, 2, 0).view(stored_b.dtype)
        if stored_b.dtype is torch.float4_e2m1fn_x2
        else stored_b.permute(1, 2, 0)
    )
    if discrete:
        experts = [w.clone() for w in bytes_b]
        made.keep += experts
        made.tensors["b_ptrs"] = torch.tensor([w.data_ptr() for w in experts])
        if kind != "bf16":
            atoms = [scales.swizzle(p[1]) for p in parts]
            made.keep += atoms
            made.tensors["sfb_ptrs"] = torch.tensor([s.data_ptr() for s in atoms])
    choice = torch.tensor([-1.5, 0.5, 2.0, 0.0])
    pick = lambda n: choice[torch.randint(0, 4, (n,), generator=generator)]  # noqa: E731
    made.tensors |= {
        "padded_offsets": torch.tensor(ENDS, dtype=torch.int32),
        "alpha_tensor": torch.tensor([0.5, 2.0, -1.5]),
        "beta_tensor": torch.tensor([2.0, 0.5, -1.5]),
        "prob_tensor": pick(M).view(M, 1, 1),
        "dprob_tensor": torch.zeros(M, 1, 1),
    }
    spread = 6.0 if wide_values else 1.0
    made.tensors["c"] = randn(M, 2 * N) * spread
    return made


@pytest.fixture
def api():
    """The helpers of this file, by name."""
    import types

    return types.SimpleNamespace(**{n: v for n, v in globals().items() if not n.startswith("__")})
