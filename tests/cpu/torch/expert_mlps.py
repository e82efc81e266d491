"""Random expert MLPs, and the same in float64 with nothing but autograd: what the PyTorch tests compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from opfuse.graph_ops import GluLayout


def gate_up(h: torch.Tensor, layout: GluLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, 2I) -> gate, up (M, I), by an index of columns: the layout's definition."""
    half = h.shape[1] // 2
    width = layout.width or half
    gate = torch.tensor([i // width * 2 * width + i % width for i in range(half)], dtype=torch.int64, device=h.device)
    return h[:, gate], h[:, gate + width]


def activation(gate: torch.Tensor, up: torch.Tensor, act: str, p: dict[str, float]) -> torch.Tensor:
    """numerics' formulas; bounds by `where`, so that equality keeps the gradient whatever `clamp` does."""
    if act == "swiglu":
        return up * gate * gate.sigmoid()
    if act == "geglu":
        high, low = p.get("clamp_max", 7.0), p.get("clamp_min", -7.0)
        y1 = torch.where(gate <= high, gate, high)
        y2 = torch.where(up <= high, up, high)
        y2 = torch.where(up >= low, y2, low)
        return (y2 + p.get("linear_offset", 1.0)) * y1 * (p.get("geglu_alpha", 1.702) * y1).sigmoid()
    b1, b2 = p.get("situ_beta1", 4.0), p.get("situ_beta2", 25.0)
    return b1 * (gate / b1).tanh() * gate.sigmoid() * b2 * (up / b2).tanh()


def rounded(h: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """h as `dtype` holds it, with the derivative of h."""
    return h + (h.detach().to(dtype).to(h.dtype) - h.detach())


def plain_mlp(
    x: Any, counts: Any, w1: Any, w2: Any, prob: Any, act: str, layout: GluLayout, p: dict[str, float],
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    """The expert MLP as a loop over experts, h rounded to `dtype`; rows past the counts give zero."""
    parts, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        rows = slice(start, start + count)
        a = activation(*gate_up(rounded(x[rows] @ w1[expert].T, dtype), layout), act, p)
        parts.append((a if prob is None else a * prob[rows, None]) @ w2[expert].T)
        start += count
    return torch.cat([*parts, x.new_zeros(x.shape[0] - start, x.shape[1])])


@dataclass
class Case:
    """One expert MLP with its inputs; leaves that learn require grad."""

    counts: torch.Tensor
    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    prob: torch.Tensor | None
    layout: GluLayout
    act: str
    parameters: dict[str, float] = field(default_factory=dict)

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        named = {"x": self.x, "w1": self.w1, "w2": self.w2, "prob": self.prob}
        return {name: t for name, t in named.items() if t is not None}

    def oracle(self, dy: torch.Tensor) -> dict[str, torch.Tensor]:
        """y and every gradient in float64, by name."""
        wide = {name: t.detach().double().requires_grad_() for name, t in self.leaves.items()}
        y = plain_mlp(wide["x"], self.counts, wide["w1"], wide["w2"], wide.get("prob"), self.act, self.layout,
                      self.parameters, self.x.dtype)  # fmt: skip
        y.backward(dy.double())
        return {
            "y": y.detach(),
            **{name: t.grad if t.grad is not None else torch.zeros_like(t) for name, t in wide.items()},
        }


def random_case(
    counts: list[int],
    *,
    H: int = 32,
    I: int = 64,
    dtype: torch.dtype = torch.float32,
    layout: GluLayout | None = None,
    act: str = "swiglu",
    prob: bool = True,
    tail: int = 0,
    transposed: bool = False,
    device: str = "cpu",
    **parameters: float,
) -> Case:
    """Unit-scale random data; prob has 0, negative and large values too. `transposed`: weights inputs first."""
    rows, experts = sum(counts) + tail, len(counts)
    w1, w2 = torch.randn(experts, 2 * I, H) / H**0.5, torch.randn(experts, H, I) / I**0.5
    if transposed:
        w1, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))
    weight = torch.tensor([-1.5, 0.5, 2.0, 0.0])[torch.randint(4, (rows,))]
    x, w1, w2 = (t.to(device, dtype).requires_grad_() for t in (torch.randn(rows, H), w1, w2))
    return Case(
        torch.tensor(counts, device=device), x, w1, w2, weight.to(device).requires_grad_() if prob else None,
        layout or GluLayout.concatenated(), act, parameters,
    )  # fmt: skip


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference by the norm of what is wanted; infinite for a NaN."""
    difference = (got.double() - wanted.double()).norm()
    size = wanted.double().norm()
    value = float(difference / size) if size > 0 else float(difference)
    return value if value == value else float("inf")
