"""`explain(fn)(*args)`: what torch.compile(backend="opfuse") makes of a function, like torch._dynamo.explain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table

from .backend import compile_with
from .merge import Merge
from .rewrite import Options, Region, Rewriter

_ROUNDING = {
    True: "a fused kernel rounds what it stores, as Inductor's do (options={'fuse_rounding': False} keeps eager's)",
    False: "as eager rounds every value, so that a GLU with a rounding inside is left alone (fuse_rounding=False, or "
    "Inductor's emulate_precision_casts)",
}


@dataclass(frozen=True)
class CompileExplanation:
    """Dynamo's counts, every region that was found in the graphs of AOTAutograd, forward and backward, and every gate
    and up of two weights that was brought together."""

    graph_count: int
    graph_break_count: int
    break_reasons: tuple[Any, ...]
    op_count: int
    options: Options
    regions: tuple[Region, ...]
    merges: tuple[Merge, ...] = ()

    @property
    def fused_count(self) -> int:
        """Launches of fused kernels in the plans of all regions."""
        return sum(len(r.plan.fusions) for r in self.regions if r.plan is not None)

    def __str__(self) -> str:
        lines = [
            f"Graph Count: {self.graph_count}",
            f"Graph Break Count: {self.graph_break_count}",
            f"Op Count: {self.op_count}",
            *(f"Break Reason {number}: {reason.reason}" for number, reason in enumerate(self.break_reasons, 1)),
            f"Regions: {len(self.regions)} grouped matmuls looked at, {self.fused_count} fused kernels",
            f"Rounding: {_ROUNDING[self.options.fuses_rounding]}",
            *(f"Merged: {merge}" for merge in self.merges),
        ]
        for region in self.regions:
            lines += ["", f"{region.part}: {', '.join(region.nodes)}"]
            lines += [f"  raised {', '.join(r.into for r in region.raisings)}"] if region.raisings else []
            lines += ["  runs as an operation graph"] if region.replaced else ["  left to the rest of the compiler"]
            lines += [f"  {region.reason}"] if region.reason else []
            lines += [f"  stays float32 where eager rounds: {', '.join(region.unrounded)}"] if region.unrounded else []
            if region.explanation is not None:
                lines += [f"  {line}" for line in str(region.explanation).splitlines()]
        return "\n".join(lines)


def explain(fn: Callable[..., Any], **options: Any) -> Callable[..., CompileExplanation]:
    """`explain(model, arch="sm90")(*args)`: compiles and runs `fn`, forward and backward, and says what fused and why
    the rest did not. `options` are the backend's, but `rest` and Inductor's own: the graphs are those that Inductor
    would have, its decompositions applied, and run in eager. Gradients of leaves are computed and dropped.
    """
    chosen = Options.of({**options, "rest": "eager"})

    def inner(*args: Any, **kwargs: Any) -> CompileExplanation:
        seen = torch._dynamo.explain(fn)(*args, **kwargs)
        torch._dynamo.reset()
        rewriter = Rewriter(chosen, one_pass=True)

        def collect(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            return compile_with(rewriter, gm, inputs, decompositions=select_decomp_table())

        out = torch.compile(fn, backend=collect)(*args, **kwargs)
        _run_backward(fn, out, args, kwargs)
        torch._dynamo.reset()
        return CompileExplanation(
            graph_count=seen.graph_count,
            graph_break_count=seen.graph_break_count,
            break_reasons=tuple(seen.break_reasons),
            op_count=seen.op_count,
            options=chosen,
            regions=tuple(rewriter.regions),
            merges=tuple(rewriter.merges),
        )

    return inner


def _run_backward(fn: Any, out: Any, args: Any, kwargs: Any) -> None:
    """Makes AOTAutograd compile the backward, which it may put off until it runs."""
    given = torch.utils._pytree.tree_leaves((args, kwargs))
    leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves += [p for p in fn.parameters() if p.requires_grad] if isinstance(fn, nn.Module) else []
    losses = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    if leaves and losses:
        torch.autograd.grad([t.sum() for t in losses], leaves, allow_unused=True)
