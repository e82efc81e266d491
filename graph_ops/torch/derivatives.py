"""What autograd does with the custom ops: what each saves, and its derivative, which is one of the other ops.

A derivative has none of its own: to differentiate twice is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..ir.errors import StateError
from .configuration import MXFP8

Optional = torch.Tensor | None
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Derivative = Callable[..., tuple[Optional, ...]]


class _Once(torch.autograd.Function):
    """Gradients, as a function of all that they depend on, which has no derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise StateError(
            "SECOND_DERIVATIVE",
            asked="a derivative of an expert MLP's gradients",
            seen="create_graph=True",
            required="first derivatives",
            hint="write the experts in plain PyTorch where second ones are needed",
        )


def _once(derivative: Derivative) -> Derivative:
    """`derivative`, whose results raise where they are differentiated. (torch's `once_differentiable` leaves them apart
    from what they depend on, so that their derivatives are silently None under `allow_unused`.)"""

    @functools.wraps(derivative)
    def call(ctx: Any, *gradients: Optional) -> tuple[Optional, ...]:
        if not torch.is_grad_enabled():
            return derivative(ctx, *gradients)
        with torch.no_grad():
            made = derivative(ctx, *gradients)
        found = [t for t in made if t is not None]
        kept = iter(_Once.apply(len(found), *found, *(t for t in (*ctx.saved_tensors, *gradients) if t is not None)))  # type: ignore[no-untyped-call]
        return tuple(None if t is None else next(kept) for t in made)

    return call


# Gradients of outputs that have none are None, not zeros as large as h and act (set_materialize_grads).


def fc1_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Saves what the gradients asked for need of grouped_mlp_fc1."""
    x, offsets, w1, _, *_, ctx.multiple_of, ctx.allow_tail = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(offsets, w1, x if ctx.needs_input_grad[2] else None)


@_once
def fc1_derivative(ctx: Any, dh: Optional, _: Any) -> tuple[Optional, ...]:
    """grouped_mlp_fc1_backward; prob has its gradient from grouped_mlp_fc2."""
    if dh is None:
        return (None,) * 9
    offsets, w1, x = ctx.saved_tensors
    asked = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
    dx, dw1 = torch.ops.opfuse.grouped_mlp_fc1_backward(dh, offsets, w1, x, ctx.multiple_of, ctx.allow_tail, *asked)
    return (dx if asked[0] else None, None, dw1 if asked[1] else None, *(None,) * 6)


def fc2_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """As fc1_context, of grouped_mlp_fc2."""
    h, act_rows, offsets, w2, prob, *ctx.choices, save_act = inputs
    ctx.set_materialize_grads(False)
    dh, _, _, dw2, dprob, *_ = ctx.needs_input_grad
    needs_h = dh or dprob or (dw2 and not save_act)
    ctx.save_for_backward(offsets, w2, prob, h if needs_h else None, act_rows if dw2 and save_act else None)


@_once
def fc2_derivative(ctx: Any, dy: Optional) -> tuple[Optional, ...]:
    """grouped_mlp_fc2_backward."""
    if dy is None:
        return (None,) * 11
    offsets, w2, prob, h, act_rows = ctx.saved_tensors
    wants_dh, _, _, wants_dw2, wants_dprob, *_ = ctx.needs_input_grad
    asked = (wants_dh, wants_dw2, wants_dprob)
    dh, dw2, dprob = (
        gradient if wanted else None
        for gradient, wanted in zip(
            torch.ops.opfuse.grouped_mlp_fc2_backward(dy, offsets, w2, prob, h, act_rows, *ctx.choices, *asked),
            asked, strict=True,
        )
    )  # fmt: skip
    return (dh, None, None, dw2, dprob, *(None,) * 6)


_X, _W1, _W2, _PROB = 0, 2, 3, 4
"""Places of the differentiable inputs of an op of the whole MLP."""


def _asked(ctx: Any) -> tuple[bool, bool, bool, bool]:
    needs = ctx.needs_input_grad
    return needs[_X], needs[_W1], needs[_W2], needs[_PROB]


def _to_inputs(ctx: Any, gradients: Gradients) -> tuple[Optional, ...]:
    dx, dw1, dw2, dprob = (g if asked else None for g, asked in zip(gradients, _asked(ctx), strict=True))
    return (dx, None, dw1, dw2, dprob, *(None,) * 6)


def mxfp8_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """As fc1_context, of grouped_mlp_mxfp8_forward."""
    _, h, *saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    dx, dw1, dw2, dprob = _asked(ctx)
    _, offsets, w1, w2, prob, *ctx.choices, save_act = inputs
    needs_h = dx or dw1 or dprob or (dw2 and not save_act)
    ctx.save_for_backward(
        offsets, w1, w2, prob, h if needs_h else None,
        *(t if dw1 else None for t in saved[:2]), *(t if dw2 and save_act else None for t in saved[2:]),
    )  # fmt: skip


@_once
def mxfp8_derivative(ctx: Any, dy: Optional, *_: Any) -> tuple[Optional, ...]:
    """grouped_mlp_mxfp8_backward."""
    if dy is None:
        return (None,) * 11
    offsets, w1, w2, prob, h, x_codes, x_scales, act_codes, act_scales = ctx.saved_tensors
    return _to_inputs(ctx, torch.ops.opfuse.grouped_mlp_mxfp8_backward(
        dy, offsets, w1, w2, prob, x_codes, x_scales, h, act_codes, act_scales, *ctx.choices, *_asked(ctx)
    ))  # fmt: skip


def again_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Saves the inputs of grouped_mlp and nothing else."""
    x, offsets, w1, w2, prob, *ctx.choices, ctx.recipe = inputs
    ctx.save_for_backward(x, offsets, w1, w2, prob)


@_once
def again_derivative(ctx: Any, dy: torch.Tensor) -> tuple[Optional, ...]:
    """The forward again, and its backward."""
    x, offsets, w1, w2, prob = ctx.saved_tensors
    dx, dw1, dw2, dprob = asked = _asked(ctx)
    if ctx.recipe == MXFP8:
        _, h, *codes = torch.ops.opfuse.grouped_mlp_mxfp8_forward(x, offsets, w1, w2, prob, *ctx.choices, dw2)
        return _to_inputs(ctx, torch.ops.opfuse.grouped_mlp_mxfp8_backward(
            dy, offsets, w1, w2, prob, *codes[:2], h, *(codes[2:] if dw2 else (None, None)), *ctx.choices, *asked
        ))  # fmt: skip
    h, act_rows = torch.ops.opfuse.grouped_mlp_fc1(x, offsets, w1, prob, *ctx.choices)
    dh, *rest = torch.ops.opfuse.grouped_mlp_fc2_backward(
        dy, offsets, w2, prob, h, act_rows if dw2 else None, *ctx.choices, dx or dw1, dw2, dprob
    )
    del h, act_rows
    first = torch.ops.opfuse.grouped_mlp_fc1_backward(dh, offsets, w1, x, *ctx.choices[3:], dx, dw1) if dx or dw1 else (
        None, None)  # fmt: skip
    return _to_inputs(ctx, (*first, *rest))
