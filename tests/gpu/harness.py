"""Problems with awkward groups, a float64 oracle, and checks, for the tests of the Hopper kernel."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from opfuse.kernels.sm90 import dglu_host
from opfuse.kernels.sm90.dglu_config import DgluConfig
from opfuse.kernels.sm90.epilogue_math import NumpyMath, glu_backward
from parallel_build import load  # type: ignore[import-not-found]

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POISON = 777.0  # no output of unit-scale data rounds to it


@functools.cache
def installed(config: DgluConfig) -> None:
    """`dglu_host.launch` uses what the kernel cache has."""
    dglu_host.FUNCTIONS.install(config, load(config))


def launch(config: DgluConfig, tensors: dict) -> None:
    """Runs the kernel on what `make` made."""
    installed(config)
    dglu_host.launch(config, **{name: x for name, x in tensors.items() if name != "_keep"})


def split_columns(x, layout: str):
    """(M, 2N) -> gate (M, N), up (M, N)."""
    m, n2 = x.shape
    n = n2 // 2
    if layout == "concatenated":
        return x[:, :n], x[:, n:]
    w = 32 if layout == "interleaved32" else 1
    v = x.reshape(m, n // w, 2, w)
    return v[:, :, 0].reshape(m, n), v[:, :, 1].reshape(m, n)


def join_columns(gate, up, layout: str):
    m, n = gate.shape
    if layout == "concatenated":
        return np.concatenate([gate, up], 1)
    w = 32 if layout == "interleaved32" else 1
    return np.stack([gate.reshape(m, n // w, w), up.reshape(m, n // w, w)], 2).reshape(m, 2 * n)


def pick(generator, values, size):
    index = torch.randint(len(values), (size,), generator=generator)
    return torch.tensor(values)[index].cuda()


def make(config: DgluConfig, sizes, K: int, N: int, tail: int = 0, seed: int = 0) -> dict:
    """Inputs and poisoned outputs: `sizes` rows per expert and `tail` rows past the last offset, NaN in the inputs."""
    g = torch.Generator().manual_seed(seed)
    gc = torch.Generator(device="cuda").manual_seed(seed)
    L, M = len(sizes), sum(sizes) + tail
    ab, c_type = TORCH[config.ab_dtype], TORCH[config.c_dtype]

    def randn(*shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(*shape, device="cuda", generator=gc) * scale).to(dtype)

    def poisoned(*shape, dtype):
        return torch.full(shape, POISON, device="cuda", dtype=dtype)

    b = randn(L, N, K, dtype=ab, scale=K**-0.5) if config.b_major == "k" else randn(L, K, N, dtype=ab, scale=K**-0.5)
    if config.discrete_b:
        parts = [x.clone() for x in b]
        addresses = torch.tensor([x.data_ptr() for x in parts], dtype=torch.int64).cuda()
        keep = {"parts": parts, "dense": b.transpose(1, 2) if config.b_major == "k" else b}
    out = {
        "dy": randn(M, K, dtype=ab),
        "b": b.transpose(1, 2) if config.b_major == "k" else b,
        "offsets": torch.tensor(sizes).cumsum(0).to(torch.int32).cuda(),
        "c": randn(M, 2 * N, dtype=c_type, scale=2.0),
    }
    if config.discrete_b:
        out["b"], out["_keep"] = addresses, keep
    for side, dtype in (("row", config.q_row_dtype), ("col", config.q_col_dtype)):
        if dtype:
            count = dglu_host.scale_bytes(config, M, N)[side]
            out[f"q_{side}"] = torch.full((M, 2 * N), 0xA5, dtype=torch.uint8, device="cuda")
            # Padding scales are the caller's to zero; 0xA5 behind the end guards the buffer.
            out[f"sf_{side}"] = torch.full((count + 256,), 0xA5, dtype=torch.uint8, device="cuda")
            out[f"sf_{side}"][:count] = 0
    if config.d_dtype:
        out["d"] = poisoned(M, 2 * N, dtype=TORCH[config.d_dtype])
    if config.has_prob:
        out["prob"] = pick(g, [-1.5, 0.5, 2.0, 0.0, 0.75], M)
    for name in ("dy", "c", "prob"):
        if name in out and tail:
            out[name][-tail:] = float("nan")
    if config.has_alpha:
        out["alpha"] = pick(g, [-1.5, 0.5, 2.0], L)
    if config.has_beta:
        out["beta"] = pick(g, [-1.5, 0.5, 2.0], L)
    if config.has_dprob:
        out["dprob"] = poisoned(M, dtype=torch.float32)
    if config.activation_dtype:
        out["activation"] = poisoned(M, N, dtype=TORCH[config.activation_dtype])
    if config.dbias_dtype:
        out["dbias"] = poisoned(L, 2 * N, dtype=TORCH[config.dbias_dtype])
    if config.has_amax:
        out["amax"] = poisoned(L, 2, dtype=torch.float32)
    size = max(16, dglu_host.workspace_bytes(config, L, M, N))
    out["workspace"] = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    return out


def oracle(config: DgluConfig, t: dict) -> dict:
    """Every output in float64, unrounded, for the rows that belong to an expert."""
    ends = t["offsets"].tolist()
    starts = [0, *ends[:-1]]
    total, N = ends[-1], t["c"].shape[1] // 2
    r = torch.zeros(total, N, dtype=torch.float64, device="cuda")
    scale = np.ones((total, 1))
    beta = np.ones((total, 1))
    for g, (s, e) in enumerate(zip(starts, ends)):
        if e > s:
            weights = t["_keep"]["dense"][g] if config.discrete_b else t["b"][g]
            r[s:e] = t["dy"][s:e].double() @ weights.double()
            if config.has_alpha:
                scale[s:e] = float(t["alpha"][g]) ** config.alpha_exponent
            if config.has_beta:
                beta[s:e] = float(t["beta"][g])
    product = r.cpu().numpy() * scale
    gate, up = split_columns(t["c"][:total].double().cpu().numpy() * beta, config.glu_layout)
    prob = t["prob"][:total].double().cpu().numpy()[:, None] if config.has_prob else None
    dgate, dup, term, y = glu_backward(product, gate, up, prob, config.act, NumpyMath())
    out = {"d": join_columns(dgate, dup, config.glu_layout), "dprob": term.sum(1)}
    out["activation"] = y if prob is None else y * prob
    out["dbias"] = np.stack([out["d"][s:e].sum(0) for s, e in zip(starts, ends)])
    out["amax"] = np.array([[abs(x[s:e]).max(initial=0.0) for x in (dgate, dup)] for s, e in zip(starts, ends)])
    return out


def relative(out: torch.Tensor, ref: np.ndarray) -> float:
    """||out - ref|| / ||ref||; infinite on NaN."""
    got = out.double().cpu().numpy()
    error = np.linalg.norm(got - ref) / max(float(np.linalg.norm(ref)), 1e-30)
    return float(error) if np.isfinite(error) else float("inf")


def cosine(out: torch.Tensor, ref: np.ndarray) -> float:
    got, want = out.double().cpu().numpy().ravel(), ref.ravel()
    return float(got @ want / max(np.linalg.norm(got) * np.linalg.norm(want), 1e-300))


# bf16 rounds to 2**-9 of a value at worst, about 0.0017 in the norm of a rounded tensor; sums in float32 are far below.
LIMITS = {"bf16": 3e-3, "fp16": 5e-4, "fp32": 2e-5}


def stored_scales(config: DgluConfig, t: dict, side: str):
    """Scale bytes of codes (M, columns) as a matrix: (M, columns / 32) of rows, (M / 32, columns) of columns, from
    either storage order."""
    M, columns = t[f"q_{side}"].shape
    rows, blocks = (M, columns // 32) if side == "row" else (columns, -(-M // 32))
    flat = t[f"sf_{side}"]
    if config.sf_swizzled:
        r, k = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
        at = (r // 128 * -(-blocks // 4) + k // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + k % 4
        matrix = flat[at.flatten().cuda()].view(rows, blocks)
        return matrix if side == "row" else matrix.T
    return flat[: rows * blocks].view(*((rows, blocks) if side == "row" else (blocks, rows)))


def check_quantized(config, t, side, dtype, total, ref, errors, bad, exact=None) -> None:
    """Bit for bit against the reference quantizer of `exact`, the kernel's output that it quantized, where it is there;
    else the SQNR."""
    from opfuse.graph_ops.ir.dtypes import DataType
    from opfuse.kernels.reference.codes import decode, decode_e8m0
    from opfuse.kernels.reference.quantize import quantize_blocks

    kind = {"e4m3": DataType.FP8_E4M3, "e5m2": DataType.FP8_E5M2}[dtype]
    codes, scales = t[f"q_{side}"][:total], stored_scales(config, t, side)
    scales = scales[:total] if side == "row" else scales[: total // 32]
    if exact is not None:
        x = exact.cpu().float()
        want, want_scales = quantize_blocks(x if side == "row" else x.T.contiguous(), 32, kind, DataType.FP8_E8M0)
        want, want_scales = (want, want_scales) if side == "row" else (want.T, want_scales.T)
        for name, got, wanted in (("codes", codes, want), ("scales", scales, want_scales)):
            wrong = int((got.cpu() != wanted).sum())
            errors[f"{side} {name} wrong"] = wrong
            if wrong:
                bad.append(f"{wrong} of {wanted.numel()} {side} {name} differ")
    each = scales.repeat_interleave(32, dim=1 if side == "row" else 0)
    value = (decode(codes.cpu(), kind) * decode_e8m0(each.cpu())).numpy()
    noise = np.linalg.norm(value - ref)
    sqnr = float(20 * np.log10(np.linalg.norm(ref) / max(float(noise), 1e-30))) if np.isfinite(noise) else 0.0
    errors[f"{side} SQNR"] = sqnr
    # E4M3 keeps 3 mantissa bits, E5M2 2: 6 dB less.
    if sqnr < (27 if dtype == "e4m3" else 21):
        bad.append(f"{side} SQNR {sqnr:.1f} dB")
    if not bool((t[f"q_{side}"][total:] == 0).all()):
        bad.append(f"q_{side} is not zero past the last offset")
    if not bool((t[f"sf_{side}"][-256:] == 0xA5).all()):
        bad.append(f"sf_{side} wrote past its end")


def check(config: DgluConfig, sizes, K: int, N: int, tail: int = 0, seed: int = 0) -> dict[str, float]:
    """Runs one problem and returns the relative error of every output; raises AssertionError on a wrong one."""
    t = make(config, sizes, K, N, tail, seed)
    launch(config, t)
    torch.cuda.synchronize()
    ref, total, errors, bad = oracle(config, t), sum(sizes), {}, []
    kinds = {"d": config.d_dtype, "dprob": "fp32", "activation": config.activation_dtype,
             "dbias": config.dbias_dtype, "amax": "fp32"}  # fmt: skip
    for name, kind in kinds.items():
        if name not in t or kind is None:
            continue
        rows = slice(None) if name in ("dbias", "amax") else slice(0, total)
        errors[name] = relative(t[name][rows], ref[name])
        # dprob cancels (prob carries no sign of its own), so its norm shrinks against its terms'.
        limit = LIMITS[kind] * (5 if name in ("dprob", "dbias") and kind == "fp32" else 1)
        if not errors[name] <= limit:
            bad.append(f"{name} {errors[name]:.2e} > {limit:.0e}")
        if ref[name].any() and not cosine(t[name][rows], ref[name]) > 0.999:
            bad.append(f"{name} cosine {cosine(t[name][rows], ref[name]):.6f}")
        if name in ("d", "activation", "dprob") and not bool((t[name][total:] == 0).all()):
            bad.append(f"{name} is not zero past the last offset")
    for side, dtype in (("row", config.q_row_dtype), ("col", config.q_col_dtype)):
        if dtype:
            exact = t["d"][:total] if config.d_dtype == "fp32" else None
            check_quantized(config, t, side, dtype, total, ref["d"], errors, bad, exact)
    assert not bad, f"{'; '.join(bad)} ({dataclasses.asdict(config)}, sizes {sizes}, K {K}, N {N})"
    return errors
