"""Plain PyTorch code of expert MLPs, spelled in every way that torch.compile's backend is to recognise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from opfuse.graph_ops.torch.compile.backend import compile_with
from opfuse.graph_ops.torch.compile.rewrite import Options, Rewriter

L, H, I = 3, 32, 64
BF16 = torch.bfloat16


def mm(x, weight, offsets):
    """(M, K) x (L, N, K) -> (M, N): torch's own grouped matmul, by its public name where there is one."""
    return getattr(F, "grouped_mm", torch._grouped_mm)(x, weight.transpose(-2, -1), offs=offsets)


class Experts(torch.nn.Module):
    """Weights as torch's modules store them, outputs first."""

    def __init__(self, experts=L, hidden=H, intermediate=I):
        super().__init__()
        self.hidden = hidden
        self.w1 = torch.nn.Parameter((torch.randn(experts, intermediate, hidden) / hidden**0.5).to(BF16))
        self.w3 = torch.nn.Parameter((torch.randn(experts, intermediate, hidden) / hidden**0.5).to(BF16))
        self.w2 = torch.nn.Parameter((torch.randn(experts, hidden, intermediate) / intermediate**0.5).to(BF16))

    def offsets(self, counts):
        return torch.cumsum(counts, dim=0, dtype=torch.int32)

    def act(self, gate, up):
        return F.silu(gate) * up


class Separate(Experts):
    """Gate and up from two weights."""

    def forward(self, x, counts):
        offsets = self.offsets(counts)
        gate, up = mm(x, self.w1, offsets), mm(x, self.w3, offsets)
        return mm(self.act(gate, up), self.w2, offsets)


class Torchtitan(Experts):
    """As torchtitan's GroupedExperts spells it."""

    def forward(self, x, num_tokens_per_expert):
        offsets = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(x.bfloat16(), self.w1.bfloat16().transpose(-2, -1), offs=offsets))
        h = h * torch._grouped_mm(x.bfloat16(), self.w3.bfloat16().transpose(-2, -1), offs=offsets)
        return torch._grouped_mm(h, self.w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)


class Fused(Experts):
    """One weight for gate and up; `cut` says how the product is taken apart."""

    def __init__(self, *sizes, cut=lambda h: h.chunk(2, dim=-1)):
        super().__init__(*sizes)
        self.w13 = torch.nn.Parameter(torch.cat([self.w1.data, self.w3.data], 1))
        del self.w1, self.w3
        self.cut = cut

    def forward(self, x, counts):
        offsets = self.offsets(counts)
        gate, up = self.cut(mm(x, self.w13, offsets))
        return mm(self.act(gate, up), self.w2, offsets)


class Sigmoid(Fused):
    def act(self, gate, up):
        return up * (gate * torch.sigmoid(gate))


class SeparateSigmoid(Separate):
    def act(self, gate, up):
        return gate * torch.sigmoid(gate) * up


class GptOss(Fused):
    """Clamped, as gpt-oss: the clamp's derivative is a selection, and its bounds are hit."""

    def __init__(self):
        super().__init__(cut=lambda h: (h[..., ::2], h[..., 1::2]))

    def act(self, gate, up):
        gate, up = gate.clamp(max=0.75), up.clamp(min=-0.75, max=0.75)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


class SeparateFloat32(Separate):
    def act(self, gate, up):
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)


class Float32Activation(Fused):
    """Nothing rounds inside the activation, as its author wrote it."""

    def forward(self, x, counts):
        offsets = self.offsets(counts)
        gate, up = mm(x, self.w13, offsets).float().chunk(2, dim=-1)
        return mm((F.silu(gate) * up).to(BF16), self.w2, offsets)


SPELLINGS = {
    "separate": Separate,
    "torchtitan": Torchtitan,
    "concatenated, chunk": Fused,
    "concatenated, slices": lambda: Fused(cut=lambda h: (h[:, :I], h[:, I:])),
    "concatenated, split": lambda: Fused(cut=lambda h: h.split([I, I], dim=1)),
    "interleaved": lambda: Fused(cut=lambda h: (h[..., ::2], h[..., 1::2])),
    "gate times its sigmoid": Sigmoid,
    "separate, gate times its sigmoid": SeparateSigmoid,
    "gpt-oss": GptOss,
    "float32 activation": Float32Activation,
    "separate, float32 activation": SeparateFloat32,
}


def compiled(model, **options):
    """The model compiled with the rest in eager, the rewriter whose reports tell what happened, and a counter."""
    rewriter = Rewriter(Options.of({"rest": "eager", **options}))
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return compile_with(rewriter, gm, inputs)

    return torch.compile(model, backend=backend, fullgraph=True), rewriter, graphs


def rows_of(model, rows):
    """x and dy, the same for every model of a width and device."""
    generator = torch.Generator().manual_seed(rows)
    parameter = next(model.parameters())
    return [torch.randn(rows, getattr(model, "hidden", H), generator=generator).to(parameter) for _ in range(2)]


def step(model, rows, counts):
    """y and the gradients of x and every parameter."""
    x, dy = rows_of(model, rows)
    x.requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    y = model(x, torch.tensor(counts, device=x.device))
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def oracle(model, rows, counts):
    """The same in float64, with nothing rounded."""
    x, dy = (t.double() for t in rows_of(model, rows))
    x.requires_grad_()
    wide = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    parts, start = [], 0
    for expert, count in enumerate(counts):
        mine = x[start : start + count]
        if "w13" in wide:
            h = mine @ wide["w13"][expert].T
            gate, up = model.cut(h)
        else:
            gate, up = mine @ wide["w1"][expert].T, mine @ wide["w3"][expert].T
        parts.append(model.act(gate, up) @ wide["w2"][expert].T)
        start += count
    torch.cat(parts).backward(dy)
    return [torch.cat(parts).detach(), x.grad, *(t.grad for t in wide.values())]


def raisings(rewriter):
    return {part: [r.rule for region in rewriter.regions if region.part == part for r in region.raisings]
            for part in ("forward", "backward")}  # fmt: skip
