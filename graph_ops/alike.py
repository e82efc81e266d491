"""Whether tensors are, one by one, as others were: class, type, device, shape, strides and what autograd sees of them.

Neither addresses nor values. Reading these attributes one after another takes 0.5 us a tensor; torch has a check of its
own, for the guards of compiled code, that takes 0.07.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

import torch

GUARDED = ((2, 9), (2, 13))
"""Releases of torch, first and last, whose own check, which is not a public one, answers as `_described` does."""


def _guards() -> type | None:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not GUARDED[0] <= version <= GUARDED[1]:
        return None
    module = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(module, "TensorGuards", None)


TENSOR_GUARDS = _guards()


def alike_to(
    tensors: Sequence[torch.Tensor],
    *,
    open_sizes: Collection[tuple[int, int]] = (),
    open_strides: Collection[tuple[int, int]] = (),
) -> Callable[..., bool]:
    """A function of as many tensors that says whether each is like the one in its place; it holds none of them.

    Modes count that change what an operation on a tensor does: under another inference mode or autocast, the answer may
    be False for the same tensors. Sizes and strides count but for the open ones, (tensor, axis), where the answer may
    be True for others; it need not be.
    """
    distinct = len({id(t) for t in tensors}) == len(tensors)  # torch's check takes no tensor twice
    if TENSOR_GUARDS is not None and distinct:
        shapes: list[list[int | None]] = [[*t.shape] for t in tensors]
        strides: list[list[int | None]] = [[*t.stride()] for t in tensors]
        for fixed, free in ((shapes, open_sizes), (strides, open_strides)):
            for place, axis in free:
                fixed[place][axis] = None
        check: Callable[..., bool] = TENSOR_GUARDS(
            *tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides
        ).check
        return check
    was = _described(tensors)
    return lambda *others: _described(others) == was


def _described(tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
    return (
        torch.is_inference_mode_enabled(),
        *[
            (type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.requires_grad, t.is_inference())
            for t in tensors
        ],
    )
