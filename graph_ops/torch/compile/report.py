"""`explain(fn)(*args)`: what torch.compile(backend="opfuse") makes of a function, like torch._dynamo.explain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._inductor.decomposition import select_decomp_table

from ...ir.errors import GraphNotSupportedError
from .backend import compile_with
from .merge import Merge
from .own_calls import OwnCall, own_calls
from .rewrite import Options, Region, Rewriter

_ROUNDING = {
    True: "a fused kernel rounds what it stores, as Inductor's do (options={'fuse_rounding': False} keeps eager's)",
    False: "as eager rounds every value, so that a GLU with a rounding inside is left alone (fuse_rounding=False, or "
    "Inductor's emulate_precision_casts)",
}


@dataclass(frozen=True)
class CompileExplanation:
    """Dynamo's counts, every region that was found in the graphs of AOTAutograd, forward and backward, every gate and
    up of two weights that was brought together, and the expert MLPs that were called as opfuse's own ops."""

    graph_count: int
    graph_break_count: int
    break_reasons: tuple[Any, ...]
    op_count: int
    options: Options
    regions: tuple[Region, ...]
    merges: tuple[Merge, ...] = ()
    own_calls: tuple[OwnCall, ...] = ()

    @property
    def fused_count(self) -> int:
        """Launches of fused kernels in the plans of all regions and of opfuse's own ops."""
        return self._fused_in_regions + sum(call.fused_count for call in self.own_calls)

    @property
    def _fused_in_regions(self) -> int:
        return sum(len(r.plan.fusions) for r in self.regions if r.plan is not None)

    def __str__(self) -> str:
        lines = [
            f"Graph Count: {self.graph_count}",
            f"Graph Break Count: {self.graph_break_count}",
            f"Op Count: {self.op_count}",
            *(f"Break Reason {number}: {reason.reason}" for number, reason in enumerate(self.break_reasons, 1)),
            f"Regions: {len(self.regions)} grouped matmuls looked at, {self._fused_in_regions} fused kernels",
            f"Rounding: {_ROUNDING[self.options.fuses_rounding]}",
            *(f"Merged: {merge}" for merge in self.merges),
        ]
        if self.own_calls:
            calls, fused = (sum(c.count for c in self.own_calls), sum(c.fused_count for c in self.own_calls))
            lines.append(f"Expert MLPs of opfuse: {calls} calls of its ops, {fused} fused kernels")
        for region in self.regions:
            lines += ["", f"{region.part}: {', '.join(region.nodes)}"]
            lines += [f"  raised {', '.join(r.into for r in region.raisings)}"] if region.raisings else []
            lines += ["  runs as an operation graph"] if region.replaced else ["  left to the rest of the compiler"]
            lines += [f"  {region.reason}"] if region.reason else []
            lines += [f"  stays float32 where eager rounds: {', '.join(region.unrounded)}"] if region.unrounded else []
            if region.explanation is not None:
                lines += [f"  {line}" for line in str(region.explanation).splitlines()]
        for call in self.own_calls:
            lines += ["", f"{call.part}: {call.count} x opfuse::{call.op}"]
            lines += [f"  {line}" for line in str(call.explanation).splitlines()]
        return "\n".join(lines)


@dataclass
class _Reporter(Rewriter):
    """A rewriter that takes note of opfuse's own ops too."""

    own_calls: list[OwnCall] = field(default_factory=list)

    def __call__(self, graph: fx.Graph, part: str) -> None:
        self.own_calls += own_calls(graph, part, self.options.arch)
        super().__call__(graph, part)


def explain(fn: Callable[..., Any], **options: Any) -> Callable[..., CompileExplanation]:
    """`explain(model, arch="sm90")(*args)`: compiles and runs `fn`, forward and backward, and says what fused and why
    the rest did not. `options` are the backend's, but `rest` and Inductor's own: the graphs are those that Inductor
    would have, its decompositions applied, and run in eager. Gradients of leaves are computed and dropped. Calls of
    opfuse's own expert MLPs (GroupedMLP, Hugging Face's) are told too: what fuses in each.
    """
    if options.get("rest", "eager") != "eager":
        raise GraphNotSupportedError("OPTION", asked=f"option rest={options['rest']!r} of explain", required="none",
                                     hint="explain runs in eager what it explains")  # fmt: skip
    chosen = Options.of({**options, "rest": "eager"})

    def inner(*args: Any, **kwargs: Any) -> CompileExplanation:
        seen = torch._dynamo.explain(fn)(*args, **kwargs)
        torch._dynamo.reset()
        rewriter = _Reporter(chosen, one_pass=True)

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
            own_calls=tuple(rewriter.own_calls),
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
