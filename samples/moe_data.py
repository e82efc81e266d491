"""Real input for the samples: text, its bytes as tokens, a top-k router over them, and the expert MLP in plain torch.

Axis letters: T tokens, k experts chosen by each token, L experts, M rows (T * k and padding), H hidden, I intermediate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch

Tensors = dict[str, torch.Tensor]


def read_text(path: str | None = None) -> bytes:
    """The bytes of a file; without one, the topics of Python's own `help()`, which every installation ships."""
    if path is None:
        return "\n".join(topics[name] for name in sorted(topics)).encode()
    return Path(path).read_bytes()


def positive(text: str) -> int:
    """For argparse: a count."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def existing(text: str) -> str:
    """For argparse: a file with something in it."""
    if not Path(text).is_file() or not Path(text).stat().st_size:
        raise argparse.ArgumentTypeError(f"{text!r} is no file, or an empty one")
    return text


def usable(text: str) -> str:
    """For argparse: a device that this torch can use here."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"torch {torch.__version__} has no device {text!r} here: {error}") from error
    return text


@dataclass(frozen=True)
class Routing:
    """Where a router sends each token.

    Rows are grouped by expert. Each expert's rows are padded to a whole multiple, so some rows belong to no token.
    """

    slot: torch.Tensor  # (T * k,) int64: the row of each choice of each token, all different
    prob: torch.Tensor  # (T * k,) float32: the weight of each choice
    offsets: torch.Tensor  # (L,) int32: end of each expert's rows
    rows: int  # M = offsets[-1]
    top_k: int


def route(logits: torch.Tensor, top_k: int, multiple_of: int) -> Routing:
    """Softmax over the experts, the best `top_k` of them, weights that sum to 1 (as Mixtral and Qwen3)."""
    best, expert = logits.softmax(-1).topk(top_k)  # (T, k), (T, k)
    prob = (best / best.sum(-1, keepdim=True)).flatten()  # (T * k,)
    expert = expert.flatten()  # (T * k,)
    count = expert.bincount(minlength=logits.shape[1])  # (L,)
    padded = (count + multiple_of - 1) // multiple_of * multiple_of  # (L,)
    end = padded.cumsum(0)  # (L,)
    by_expert = expert.argsort(stable=True)  # (T * k,)
    first = (count.cumsum(0) - count)[expert[by_expert]]  # (T * k,) position in by_expert of the expert's first choice
    within = torch.arange(len(expert), device=expert.device) - first  # (T * k,)
    slot = torch.empty_like(expert)  # (T * k,)
    slot[by_expert] = (end - padded)[expert[by_expert]] + within
    return Routing(slot, prob, end.int(), int(end[-1]), top_k)


def dispatch(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """(T, H) -> (M, H): each token's row copied to its experts; zero in padding rows.

    Expand and index_copy, so that no row is written twice: the gradient is a gather and a sum in fixed order.
    """
    copies = x.unsqueeze(1).expand(-1, routing.top_k, -1).reshape(len(routing.slot), -1)  # (T * k, H)
    return x.new_zeros(routing.rows, x.shape[1]).index_copy(0, routing.slot, copies)  # (M, H)


def row_prob(routing: Routing) -> torch.Tensor:
    """(M,): the router's weight of each row; zero in padding rows."""
    return routing.prob.new_zeros(routing.rows).index_copy(0, routing.slot, routing.prob)  # (M,)


def combine(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """(M, H) -> (T, H): the sum of each token's experts, weighted already. A view and a sum: the order is fixed."""
    return y.index_select(0, routing.slot).view(-1, routing.top_k, y.shape[1]).sum(1)  # (T, H)


def dequantize_mxfp8(codes: torch.Tensor, scales: torch.Tensor, axis: int) -> torch.Tensor:
    """Codes (M, N) and their swizzled E8M0 scales, one per 32 elements along `axis`, -> (M, N) float32.

    The scales lie in atoms of 128 rows and 4 blocks, each in the order (row % 32, row % 128 // 32, block % 4).
    """
    rows, blocks = scales.shape
    atoms = scales.reshape(rows // 128, blocks // 4, 32, 4, 4)
    scale = atoms.float().permute(0, 3, 2, 1, 4).reshape(rows, blocks)
    values = codes.float() if axis == 1 else codes.float().T  # blocks along the last axis
    scale = scale[: values.shape[0]].repeat_interleave(32, 1)[:, : values.shape[1]]
    return values * scale if axis == 1 else (values * scale).T


def split_gate_up(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, 2I) in blocks of 32 gate and 32 up columns -> gate (M, I), up (M, I)."""
    blocks = h.view(h.shape[0], -1, 2, 32)  # (M, I / 32, 2, 32)
    return blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return up * gate * gate.sigmoid()


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Clamped, as in gpt-oss. `where` and not `clamp`, whose gradient at the bound differs among torch versions."""
    gate = torch.where(gate <= 7, gate, 7.0)
    up = torch.where(up <= 7, up, 7.0)
    up = torch.where(up >= -7, up, -7.0)
    return (up + 1) * gate * (1.702 * gate).sigmoid()


def situglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()


ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "situglu": situglu,
}


def plain_expert_mlp(
    x: torch.Tensor,  # (M, H)
    w1: torch.Tensor,  # (L, H, 2I)
    b1: torch.Tensor,  # (L, 2I)
    w2: torch.Tensor,  # (L, I, H)
    prob: torch.Tensor,  # (M,)
    offsets: torch.Tensor,  # (L,)
    act: str = "swiglu",
) -> Tensors:
    """The expert MLP as anyone would write it, a loop over the experts: h (M, 2I), act (M, I) and y (M, H)."""
    ends = offsets.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    h = torch.cat([x[rows] @ w1[e] + b1[e] for e, rows in enumerate(groups)])  # (M, 2I)
    gate, up = split_gate_up(h)  # (M, I), (M, I)
    a = (ACTIVATIONS[act](gate, up) * prob.unsqueeze(1)).to(x.dtype)  # (M, I)
    y = torch.cat([a[rows] @ w2[e] for e, rows in enumerate(groups)])  # (M, H)
    return {"h": h, "act": a, "y": y}
