"""Registers the custom ops, straight with torch's dispatcher.

`torch.library.custom_op` puts Python of its own before the function of an op, under every dispatch key: 13 us a call
where one registered here takes 4, and 39 where autograd records it, where this takes 24. (One op of 9 arguments and
two outputs, on the CPU that the tests run on.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "opfuse"

_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
"""Holds the registrations of this process: they last as long as it does."""

Function = Callable[..., Any]


def register(
    name: str,
    schema: str,
    run: Function,
    fake: Function,
    *,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    derivative: Function | None = None,
) -> Any:
    """Defines `opfuse::name`, a function of its arguments that changes none of them; returns its OpOverload.

    `schema`: its arguments and results. `fake`: `run` for tensors without memory. `setup_context(ctx, inputs, output)`
    and `derivative(ctx, *gradients)`: as torch.autograd.Function's two, for an op that has a derivative.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if setup_context is not None and derivative is not None:
        _LIBRARY.impl(name, _recorded(name, op, setup_context, derivative), "Autograd")
    return op


def _recorded(name: str, op: Any, setup_context: Function, derivative: Function) -> Function:
    """What the op is under autograd's dispatch key."""
    below = torch._C._AutoDispatchBelowAutograd

    def forward(ctx: Any, *inputs: Any) -> Any:
        with below():
            output = op(*inputs)
        setup_context(ctx, inputs, output)
        return output

    recorded: Any = type(
        f"Recorded_{name}",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(derivative)},
    )

    def call(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs):
            return recorded.apply(*inputs)
        with below():
            return op(*inputs)

    return call


__all__ = ["NAMESPACE", "register"]
