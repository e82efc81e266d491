"""The expert MLP as three frameworks write it, and as opfuse runs it there: what bench_moe.py measures.

    hf          Qwen3MoeSparseMoeBlock of transformers, its router replaced by a given choice: (T, H) -> (T, H), so that
                sorting tokens by expert and adding up their results belong to every arm
    torchtitan  GroupedExperts: weights w1, w2, w3 apart, on rows that are already sorted by expert: (M, H) -> (M, H)
    megatron    GroupedMLP: (rows sorted by expert, tokens_per_expert, probs) -> (rows, no bias), the gate and up
                weights in one, probs multiplied into the activation in float32

Arms: `eager` loops over the experts, as each framework does for reference; `grouped_mm` is its path by torch's grouped
matmul; `compile` is torch.compile of that; `opfuse` is what a user of that framework gets by one line.

Axis letters: L experts, M rows (token and choice), H hidden, I intermediate, T tokens, k choices of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.graph_ops.torch import GroupedMLP, backend, explain, hf
from opfuse.graph_ops.torch.compile import CompileExplanation
from opfuse.graph_ops.torch.layouts import tag
from torch import nn

Tensors = dict[str, torch.Tensor]
DTYPE = torch.bfloat16

COMPILER: dict[str, Any] = {"backend": "inductor"}
"""What torch.compile is given."""

FUSION: dict[str, Any] = {}
"""The options of opfuse's backend: none, so that it rounds as Inductor does."""


@dataclass(frozen=True)
class Shape:
    """A shape of shapes.json: L experts, M rows, H hidden, I intermediate."""

    name: str
    L: int
    M: int
    H: int
    I: int

    @property
    def top_k(self) -> int:
        """Choices of each token: 8 at most, and a quarter of the experts, as a rank sees them that holds few."""
        return max(1, min(8, self.L // 4))


@dataclass(frozen=True)
class Arm:
    """One way to run a block: `forward()` -> y, differentiable by `leaves`. `slow`: measured in fewer rounds."""

    forward: Callable[[], torch.Tensor]
    leaves: Tensors
    slow: bool = False


@dataclass(frozen=True)
class Block:
    """A framework's block at one shape: arms over the same numbers, and the part that is grouped GEMM + dGLU alone.

    `dglu_plan`: what opfuse runs for that part, its kernels or "unfused". `explained`: what its backend makes of the
    arm `opfuse`, where torch.compile runs that.
    """

    arms: dict[str, Arm]
    dy: torch.Tensor
    dglu: dict[str, Callable[[], Sequence[torch.Tensor]]]
    dglu_plan: str
    explained: Callable[[], CompileExplanation] | None = None


def normal(*size: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*size, device=device, dtype=DTYPE).mul_(scale).requires_grad_()


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(a, b, offs=offsets)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, **COMPILER)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, backend=backend, options=FUSION)


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def balanced_choice(shape: Shape, device: torch.device) -> torch.Tensor:
    """(T, k): k different experts for each token, at random, every expert as often as the others.

    Every L/k tokens draw from a shuffled deck of all experts.
    """
    decks = shape.M // shape.L
    return torch.rand(decks, shape.L, device=device).argsort(1).view(-1, shape.top_k)


class GivenChoice(nn.Module):
    """Stands where a router stands, with its answer: what it costs to choose is no part of the experts."""

    def __init__(self, expert: torch.Tensor, weight: torch.Tensor) -> None:
        super().__init__()
        self.expert, self.weight = expert, weight  # (T, k), (T, k)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.weight, self.weight, self.expert


def qwen3_block(implementation: str, shape: Shape, leaves: Tensors, expert: torch.Tensor) -> nn.Module:
    """transformers' own block over these weights, its experts run by the implementation of that name."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(hidden_size=shape.H, moe_intermediate_size=shape.I, num_experts=shape.L,
                            num_experts_per_tok=shape.top_k)  # fmt: skip
    config._experts_implementation = implementation
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    block.experts.gate_up_proj, block.experts.down_proj = leaves["w1"], leaves["w2"]
    block.gate = GivenChoice(expert, leaves["prob"])
    return block


def hf_block(shape: Shape, device: torch.device) -> Block:
    """Tokens in their own order in, and out; routing weights in the model's type, as its router gives them."""
    hf.register()
    L, M, H, I = shape.L, shape.M, shape.H, shape.I
    expert = balanced_choice(shape, device)
    leaves = {
        "x": normal(1, M // shape.top_k, H, device=device),
        "w1": nn.Parameter(normal(L, 2 * I, H, device=device, scale=H**-0.5)),
        "w2": nn.Parameter(normal(L, H, I, device=device, scale=I**-0.5)),
        "prob": (torch.rand(M // shape.top_k, shape.top_k, device=device) + 0.25).to(DTYPE).requires_grad_(),
    }

    def arm(implementation: str, wrap: Callable[..., Any] = lambda f: f, slow: bool = False) -> Arm:
        block = wrap(qwen3_block(implementation, shape, leaves, expert))
        return Arm(lambda: block(leaves["x"]), leaves, slow)

    # batched_mm is left out: it gathers a copy of both weights for every row, terabytes here.
    arms = {
        "eager": arm("eager", slow=True),
        "grouped_mm": arm("grouped_mm"),
        "compile": arm("grouped_mm", compiled),
        "opfuse": arm("opfuse"),
    }
    dglu = DGluPart.of(shape, device, leaves["w2"])
    prob = (torch.rand(M, device=device) + 0.25).to(DTYPE)

    def forward(h: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, -1)
        return dglu.fc2(F.silu(gate) * up) * prob.unsqueeze(-1)

    return Block(arms, torch.randn_like(leaves["x"]), *dglu.arms(forward, prob))


# ---- torchtitan ------------------------------------------------------------------------------------------------------


def titan_loop(x: torch.Tensor, tokens_per_expert: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor
               ) -> torch.Tensor:  # fmt: skip
    parts = x.split(tokens_per_expert.tolist())
    return torch.cat([(F.silu(r @ w1[e].T) * (r @ w3[e].T)) @ w2[e].T for e, r in enumerate(parts)])


def titan_grouped(x: torch.Tensor, tokens_per_expert: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
                  w3: torch.Tensor) -> torch.Tensor:  # fmt: skip
    offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)
    gate = F.silu(grouped_mm(x, w1.transpose(-2, -1), offsets))
    return grouped_mm(gate * grouped_mm(x, w3.transpose(-2, -1), offsets), w2.transpose(-2, -1), offsets)


def titan_block(shape: Shape, device: torch.device) -> Block:
    """Rows sorted before, and added up after, in no arm. `opfuse` is torch.compile(backend=opfuse) of the unchanged
    code; `opfuse_mlp` is GroupedMLP in its place, gate and up weights joined once, when the model is made."""
    L, M, H, I = shape.L, shape.M, shape.H, shape.I
    leaves = {
        "x": normal(M, H, device=device),
        "w1": normal(L, I, H, device=device, scale=H**-0.5),
        "w2": normal(L, H, I, device=device, scale=I**-0.5),
        "w3": normal(L, I, H, device=device, scale=H**-0.5),
    }
    tokens = torch.full((L,), M // L, device=device)

    def arm(function: Callable[..., Any], slow: bool = False) -> Arm:
        return Arm(lambda: function(tokens_per_expert=tokens, **leaves), leaves, slow)

    mlp = grouped_mlp(shape, torch.cat([leaves["w1"], leaves["w3"]], 1), leaves["w2"])
    arms = {
        "eager": arm(titan_loop, slow=True),
        "grouped_mm": arm(titan_grouped),
        "compile": arm(compiled(titan_grouped)),
        "opfuse": arm(fused(titan_grouped)),
        "opfuse_mlp": Arm(lambda: mlp(leaves["x"], tokens)[0], {"x": leaves["x"], "w13": mlp.w1, "w2": mlp.w2}),
    }
    dglu = DGluPart.of(shape, device, leaves["w2"])

    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return dglu.fc2(F.silu(gate) * up)

    def explained() -> CompileExplanation:
        return explain(titan_grouped, **FUSION)(tokens_per_expert=tokens, **leaves)

    return Block(arms, torch.randn_like(leaves["x"]), *dglu.arms(forward, None, split=True), explained)


# ---- Megatron --------------------------------------------------------------------------------------------------------


def weighted_swiglu(h: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    return (F.silu(gate) * up * probs.unsqueeze(-1)).to(h.dtype)


def megatron_loop(x: torch.Tensor, tokens_per_expert: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
                  prob: torch.Tensor) -> torch.Tensor:  # fmt: skip
    counts = tokens_per_expert.tolist()
    parts = zip(x.split(counts), prob.split(counts), w1.unbind(), w2.unbind(), strict=True)
    return torch.cat([weighted_swiglu(r @ a.T, p) @ b.T for r, p, a, b in parts])


def megatron_grouped(x: torch.Tensor, tokens_per_expert: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
                     prob: torch.Tensor) -> torch.Tensor:  # fmt: skip
    offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)
    h = grouped_mm(x, w1.transpose(-2, -1), offsets)
    return grouped_mm(weighted_swiglu(h, prob), w2.transpose(-2, -1), offsets)


def grouped_mlp(shape: Shape, w1: torch.Tensor, w2: torch.Tensor) -> GroupedMLP:
    """opfuse's module over these weights, or over a copy of those that are not leaves."""
    mlp = GroupedMLP(shape.L, shape.H, shape.I, device="meta", dtype=DTYPE)
    mlp.w1, mlp.w2 = nn.Parameter(w1.detach()), nn.Parameter(w2.detach())
    tag(mlp.w1, mlp.glu_layout)
    return mlp


def megatron_block(shape: Shape, device: torch.device) -> Block:
    """Rows permuted before, and unpermuted after, in no arm. `grouped_mm` runs the activation as its formula stands;
    Megatron's own fusion of it is code for torch's compiler, as in `compile`. `opfuse` is its GroupedMLP."""
    L, M, H, I = shape.L, shape.M, shape.H, shape.I
    leaves = {
        "x": normal(M, H, device=device),
        "w1": normal(L, 2 * I, H, device=device, scale=H**-0.5),
        "w2": normal(L, H, I, device=device, scale=I**-0.5),
        "prob": (torch.rand(M, device=device) + 0.25).requires_grad_(),
    }
    tokens = torch.full((L,), M // L, device=device)

    def arm(function: Callable[..., Any], slow: bool = False) -> Arm:
        return Arm(lambda: function(tokens_per_expert=tokens, **leaves), leaves, slow)

    mlp = grouped_mlp(shape, leaves["w1"], leaves["w2"])
    held = {"x": leaves["x"], "w1": mlp.w1, "w2": mlp.w2, "prob": leaves["prob"]}
    arms = {
        "eager": arm(megatron_loop, slow=True),
        "grouped_mm": arm(megatron_grouped),
        "compile": arm(compiled(megatron_grouped)),
        "opfuse": Arm(lambda: mlp(leaves["x"], tokens, leaves["prob"])[0], held),
    }
    dglu = DGluPart.of(shape, device, leaves["w2"])
    prob = torch.rand(M, device=device) + 0.25

    def forward(h: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
        return dglu.fc2(weighted_swiglu(h, prob))

    return Block(arms, torch.randn_like(leaves["x"]), *dglu.arms(forward, prob))


# ---- grouped GEMM + dGLU alone ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DGluPart:
    """From dy (M, H) to the gradients of the pre-activation (M, 2I) and of the probs (M,), with everything else saved
    before: in a framework what autograd runs, a grouped matmul and the derivatives of its own elementwise ops."""

    shape: Shape
    h: torch.Tensor  # (M, 2I)
    w2: torch.Tensor  # (L, H, I)
    dy: torch.Tensor  # (M, H)
    offsets: torch.Tensor  # (L,) int32

    @classmethod
    def of(cls, shape: Shape, device: torch.device, w2: torch.Tensor) -> DGluPart:
        tokens = torch.full((shape.L,), shape.M // shape.L, device=device)
        h = torch.randn(shape.M, 2 * shape.I, device=device, dtype=DTYPE)
        dy = torch.randn(shape.M, shape.H, device=device, dtype=DTYPE)
        return cls(shape, h, w2.detach(), dy, tokens.cumsum(0, dtype=torch.int32))

    def fc2(self, act: torch.Tensor) -> torch.Tensor:
        """(M, I) -> (M, H), by weights that need no gradient here."""
        return grouped_mm(act, self.w2.transpose(-2, -1), self.offsets)

    def arms(self, forward: Callable[..., torch.Tensor], prob: torch.Tensor | None, *, split: bool = False
             ) -> tuple[dict[str, Callable[[], Sequence[torch.Tensor]]], str]:  # fmt: skip
        """Both ways to run it, and opfuse's plan. `forward`: the framework's own from h, or from gate and up where
        `split`, and prob on, to y."""
        halves = [t.contiguous() for t in self.h.chunk(2, -1)] if split else [self.h]
        leaves = [t.detach().clone().requires_grad_() for t in (*halves, *(() if prob is None else (prob,)))]
        y = forward(*leaves)
        given = {"dy": self.dy, "w2": self.w2, "h": self.h, "offsets": self.offsets}
        if prob is not None:
            given["prob"] = prob.float()
        graph = self.graph(prob is not None)

        def planned() -> Sequence[torch.Tensor]:
            out = graph(given)
            gradients = out["dh"].chunk(2, -1) if split else (out["dh"],)
            return gradients if prob is None else (*gradients, out["dprob"])

        calls = {
            "grouped_mm": lambda: torch.autograd.grad(y, leaves, self.dy, retain_graph=True),
            "opfuse": planned,
        }
        return calls, graph.plan.name

    def graph(self, has_prob: bool) -> Graph:
        """The same as a graph of opfuse, built."""
        s = self.shape
        g = Graph(name="dglu", io_data_type=DataType.BFLOAT16, intermediate_data_type=DataType.FLOAT)
        rows = g.symbol("M")
        dy = g.tensor("dy", dim=(rows, s.H))
        w2 = g.tensor("w2", dim=(s.L, s.H, s.I), stride=(s.H * s.I, s.I, 1))
        h = g.tensor("h", dim=(rows, 2 * s.I), glu_layout=GluLayout.concatenated())
        offsets = g.tensor("offsets", dim=(s.L,), data_type=DataType.INT32)
        prob = g.tensor("prob", dim=(rows,), data_type=DataType.FLOAT) if has_prob else None
        dh, dprob = g.glu_backward(g.grouped_matmul(dy, w2, offsets), h, prob=prob, act="swiglu")
        dh.set_name("dh").set_data_type(DataType.BFLOAT16).set_output(True)
        if has_prob:
            dprob.set_name("dprob").set_output(True)
        g.build(device=self.h.device)
        return g


BLOCKS: dict[str, Callable[[Shape, torch.device], Block]] = {
    "hf": hf_block,
    "torchtitan": titan_block,
    "megatron": megatron_block,
}
