"""`torch.ops.opfuse.*`: the expert MLP on dispatched rows, as functional custom ops with fakes and derivatives.

grouped_mlp                  y alone. Its derivative computes the forward again: it saves its inputs and nothing else.
grouped_mlp_forward          y, and what the backward reads: h (M, 2I) and act (M, I) (empty where it is not saved).
grouped_mlp_backward         dx, dw1, dw2, dprob; empty where not asked for.
grouped_mlp_mxfp8_forward    as grouped_mlp_forward; of x and act it saves the bytes of E4M3 codes and E8M0 scales.
grouped_mlp_mxfp8_backward   as grouped_mlp_backward.

Weights are (L, 2I, H) and (L, H, I), of any strides; their gradients lie in memory as they do. `offsets` (L,) are end
offsets. Nothing reads a device tensor on the host; offsets in host memory are checked against the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..ir.dims import evaluate, symbol
from ..ir.errors import VariantPackError
from ..ir.layouts import SCALE_ATOM_ROWS, ScaleLayout
from ..outputs import Outputs
from .configuration import MXFP8, MXFP8_BLOCK, MlpConfig, check_call, configuration_of
from .graphs import Backward, Forward, graph_of, inputs_first

NAMESPACE = "opfuse"
_CHOICES = "str act, float[] activation_parameters, str glu_layout, int multiple_of, bool allow_tail"
_INPUTS = "Tensor x, Tensor offsets, Tensor w1, Tensor w2, Tensor? prob"
_GRADIENTS = "bool dx, bool dw1, bool dw2, bool dprob"

Optional = torch.Tensor | None
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

ALIGNMENT = 16
"""Bytes to which fused kernels want data pointers aligned. A call with a tensor that is not has graphs of its own."""


def _empty(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_empty(0, dtype=dtype)


# ---------------------------------------------------------------------- running the graphs


def _dense(weight: torch.Tensor) -> torch.Tensor:
    """`weight`, copied where its rows and columns are both strided or overlap."""
    usable = 1 in weight.stride()[1:] and 0 not in weight.stride()
    return weight if usable else weight.contiguous()


def _check_rows(offsets: torch.Tensor, rows: int, allow_tail: bool) -> None:
    """Raises VariantPackError where offsets in host memory do not end at the last row."""
    if offsets.device.type != "cpu" or not len(offsets):
        return
    total = int(offsets[-1])
    if total != rows and not (allow_tail and 0 <= total < rows):
        raise VariantPackError(
            "TOKENS_PER_EXPERT",
            asked="tokens_per_expert of an expert MLP",
            seen=f"a sum of {total}",
            required=f"{'at most ' if allow_tail else ''}{rows}, the rows of x",
            hint="allow_tail=True for rows that belong to no expert, whose outputs and gradients are zero",
        )


def _config(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional, recipe: str,
            allow_tail: bool, choices: Sequence[Any], others: Sequence[Optional] = ()) -> MlpConfig:  # fmt: skip
    act, parameters, layout, multiple_of = choices
    check_call(x, offsets, w1, w2, prob, act, parameters, layout, recipe, multiple_of)
    _check_rows(offsets, x.shape[0], allow_tail)
    config = configuration_of(x, offsets, w1, w2, prob, act, parameters, layout, recipe, multiple_of)
    aligned = all(t is None or t.data_ptr() % ALIGNMENT == 0 for t in (x, offsets, w1, w2, prob, *others))
    return config if aligned else replace(config, alignment=1)


def _run_forward(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
                 recipe: str, allow_tail: bool, choices: Sequence[Any], saves: bool, saves_act: bool
                 ) -> Outputs:  # fmt: skip
    x, w1, w2, prob = x.contiguous(), _dense(w1), _dense(w2), None if prob is None else prob.contiguous()
    config = _config(x, offsets, w1, w2, prob, recipe, allow_tail, choices)
    return graph_of(Forward(config, saves, saves_act))(
        {"x": x, "w1": w1.transpose(1, 2), "w2": w2.transpose(1, 2), "offsets": offsets.contiguous(), "prob": prob}
    )


def _run_backward(dy: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
                  saved: dict[str, Optional], recipe: str, allow_tail: bool, choices: Sequence[Any],
                  dx: bool, dw1: bool, dw2: bool, dprob: bool) -> Gradients:  # fmt: skip
    dy, dense1, dense2 = dy.contiguous(), _dense(w1), _dense(w2)
    prob = None if prob is None else prob.contiguous()
    config = _config(dy, offsets, dense1, dense2, prob, recipe, allow_tail, choices, tuple(saved.values()))
    has_act = any(saved.get(name) is not None for name in ("act", "act_codes"))
    found: dict[str, torch.Tensor] = {}
    if dx or dw1 or dw2 or dprob:
        given = {**saved, "dy": dy, "w1": dense1, "w2": dense2, "prob": prob, "offsets": offsets.contiguous()}
        found = dict(graph_of(Backward(config, dx, dw1, dw2, dprob, has_act))(given))
    for name, weight in (("dw1", dense1), ("dw2", dense2)):
        if name in found and inputs_first(weight.stride()):
            found[name] = found[name].transpose(1, 2)
    return (
        found.get("dx", _empty(dy)),
        found.get("dw1", _empty(dy)),
        found.get("dw2", _empty(dy)),
        found.get("dprob", _empty(dy, torch.float32)),
    )


def _fake_backward(dy: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, dx: bool, dw1: bool, dw2: bool, dprob: bool
                   ) -> Gradients:  # fmt: skip
    def gradient(weight: torch.Tensor) -> torch.Tensor:
        experts, outputs, inputs = weight.shape
        if inputs_first(weight.stride()):
            return dy.new_empty(experts, inputs, outputs).transpose(1, 2)
        return dy.new_empty(experts, outputs, inputs)

    return (
        dy.new_empty(dy.shape) if dx else _empty(dy),
        gradient(w1) if dw1 else _empty(dy),
        gradient(w2) if dw2 else _empty(dy),
        dy.new_empty(dy.shape[0], dtype=torch.float32) if dprob else _empty(dy, torch.float32),
    )


# ---------------------------------------------------------------------- the ops


def _grouped_mlp(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
                 act: str, activation_parameters: Sequence[float], glu_layout: str, multiple_of: int,
                 allow_tail: bool, recipe: str) -> torch.Tensor:  # fmt: skip
    choices = (act, activation_parameters, glu_layout, multiple_of)
    y: torch.Tensor = _run_forward(x, offsets, w1, w2, prob, recipe, allow_tail, choices, False, False)["y"]
    return y


grouped_mlp = torch.library.custom_op(
    f"{NAMESPACE}::grouped_mlp", _grouped_mlp, mutates_args=(), schema=f"({_INPUTS}, {_CHOICES}, str recipe) -> Tensor"
)


@grouped_mlp.register_fake
def _(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional, act: str,
      activation_parameters: Sequence[float], glu_layout: str, multiple_of: int, allow_tail: bool, recipe: str
      ) -> torch.Tensor:  # fmt: skip
    check_call(x, offsets, w1, w2, prob, act, activation_parameters, glu_layout, recipe, multiple_of)
    return x.new_empty(x.shape)


def _forward(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional, act: str,
             activation_parameters: Sequence[float], glu_layout: str, multiple_of: int, allow_tail: bool,
             save_act: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    choices = (act, activation_parameters, glu_layout, multiple_of)
    out = _run_forward(x, offsets, w1, w2, prob, "", allow_tail, choices, True, save_act)
    return out["y"], out["h"], out["act"] if save_act else _empty(x)


grouped_mlp_forward = torch.library.custom_op(
    f"{NAMESPACE}::grouped_mlp_forward", _forward, mutates_args=(),
    schema=f"({_INPUTS}, {_CHOICES}, bool save_act) -> (Tensor y, Tensor h, Tensor act)",
)  # fmt: skip


@grouped_mlp_forward.register_fake
def _(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional, act: str,
      activation_parameters: Sequence[float], glu_layout: str, multiple_of: int, allow_tail: bool, save_act: bool
      ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    check_call(x, offsets, w1, w2, prob, act, activation_parameters, glu_layout, "", multiple_of)
    rows, half = x.shape[0], w2.shape[2]
    return x.new_empty(x.shape), x.new_empty(rows, 2 * half), x.new_empty(rows, half) if save_act else _empty(x)


def _backward(dy: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
              x: Optional, h: Optional, act_saved: Optional, act: str, activation_parameters: Sequence[float],
              glu_layout: str, multiple_of: int, allow_tail: bool, dx: bool, dw1: bool, dw2: bool, dprob: bool
              ) -> Gradients:  # fmt: skip
    saved = {"x": None if x is None else x.contiguous(), "h": h, "act": act_saved}
    choices = (act, activation_parameters, glu_layout, multiple_of)
    return _run_backward(dy, offsets, w1, w2, prob, saved, "", allow_tail, choices, dx, dw1, dw2, dprob)


grouped_mlp_backward = torch.library.custom_op(
    f"{NAMESPACE}::grouped_mlp_backward", _backward, mutates_args=(),
    schema="(Tensor dy, Tensor offsets, Tensor w1, Tensor w2, Tensor? prob, Tensor? x, Tensor? h, Tensor? act_saved, "
    f"{_CHOICES}, {_GRADIENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


@grouped_mlp_backward.register_fake
def _(dy: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
      x: Optional, h: Optional, act_saved: Optional, act: str, activation_parameters: Sequence[float],
      glu_layout: str, multiple_of: int, allow_tail: bool, dx: bool, dw1: bool, dw2: bool, dprob: bool
      ) -> Gradients:  # fmt: skip
    return _fake_backward(dy, w1, w2, dx, dw1, dw2, dprob)


def _mxfp8_forward(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
                   act: str, activation_parameters: Sequence[float], glu_layout: str, multiple_of: int,
                   allow_tail: bool, save_act: bool) -> tuple[torch.Tensor, ...]:  # fmt: skip
    choices = (act, activation_parameters, glu_layout, multiple_of)
    out = _run_forward(x, offsets, w1, w2, prob, MXFP8, allow_tail, choices, True, save_act)
    names = ("x_codes", "x_scales", *(("act_codes", "act_scales") if save_act else ()))
    saved = [out[name].view(torch.uint8) for name in names]
    return (out["y"], out["h"], *saved, *(() if save_act else (_empty(x, torch.uint8), _empty(x, torch.uint8))))


grouped_mlp_mxfp8_forward = torch.library.custom_op(
    f"{NAMESPACE}::grouped_mlp_mxfp8_forward", _mxfp8_forward, mutates_args=(),
    schema=f"({_INPUTS}, {_CHOICES}, bool save_act) -> (Tensor y, Tensor h, Tensor x_codes, Tensor x_scales, "
    "Tensor act_codes, Tensor act_scales)",
)  # fmt: skip


@grouped_mlp_mxfp8_forward.register_fake
def _(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional, act: str,
      activation_parameters: Sequence[float], glu_layout: str, multiple_of: int, allow_tail: bool, save_act: bool
      ) -> tuple[torch.Tensor, ...]:  # fmt: skip
    check_call(x, offsets, w1, w2, prob, act, activation_parameters, glu_layout, MXFP8, multiple_of)
    rows, half = x.shape[0], w2.shape[2]
    layout = ScaleLayout(MXFP8_BLOCK, 0, multiple_of % SCALE_ATOM_ROWS == 0)
    stored = layout.storage((symbol("M"), symbol("N")))  # over symbols, as sizes may be symbolic in torch

    def saved(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = [evaluate(d, {"M": rows, "N": columns}) for d in stored]
        return x.new_empty(rows, columns, dtype=torch.uint8), x.new_empty(scales, dtype=torch.uint8)

    act_saved = saved(half) if save_act else (_empty(x, torch.uint8), _empty(x, torch.uint8))
    return (x.new_empty(x.shape), x.new_empty(rows, 2 * half), *saved(x.shape[1]), *act_saved)


def _mxfp8_backward(dy: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
                    x_codes: Optional, x_scales: Optional, h: Optional, act_codes: Optional, act_scales: Optional,
                    act: str, activation_parameters: Sequence[float], glu_layout: str, multiple_of: int,
                    allow_tail: bool, dx: bool, dw1: bool, dw2: bool, dprob: bool) -> Gradients:  # fmt: skip
    saved = {"h": h}
    for name, kind, stored in (("x_codes", torch.float8_e4m3fn, x_codes), ("x_scales", torch.float8_e8m0fnu, x_scales),
                               ("act_codes", torch.float8_e4m3fn, act_codes),
                               ("act_scales", torch.float8_e8m0fnu, act_scales)):  # fmt: skip
        saved[name] = None if stored is None else stored.view(kind)
    choices = (act, activation_parameters, glu_layout, multiple_of)
    return _run_backward(dy, offsets, w1, w2, prob, saved, MXFP8, allow_tail, choices, dx, dw1, dw2, dprob)


grouped_mlp_mxfp8_backward = torch.library.custom_op(
    f"{NAMESPACE}::grouped_mlp_mxfp8_backward", _mxfp8_backward, mutates_args=(),
    schema="(Tensor dy, Tensor offsets, Tensor w1, Tensor w2, Tensor? prob, Tensor? x_codes, Tensor? x_scales, "
    f"Tensor? h, Tensor? act_codes, Tensor? act_scales, {_CHOICES}, {_GRADIENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


@grouped_mlp_mxfp8_backward.register_fake
def _(dy: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
      x_codes: Optional, x_scales: Optional, h: Optional, act_codes: Optional, act_scales: Optional,
      act: str, activation_parameters: Sequence[float], glu_layout: str, multiple_of: int,
      allow_tail: bool, dx: bool, dw1: bool, dw2: bool, dprob: bool) -> Gradients:  # fmt: skip
    return _fake_backward(dy, w1, w2, dx, dw1, dw2, dprob)


# ---------------------------------------------------------------------- derivatives

_X, _W1, _W2, _PROB = 0, 2, 3, 4
"""Places of the differentiable inputs."""

_WITHOUT_GRADIENT = (None,) * 6
"""Gradients of the choices and the last flag."""


def _asked(ctx: Any) -> tuple[bool, bool, bool, bool]:
    needs = ctx.needs_input_grad
    return needs[_X], needs[_W1], needs[_W2], needs[_PROB]


def _to_inputs(ctx: Any, gradients: Gradients) -> tuple[Optional, ...]:
    dx, dw1, dw2, dprob = (g if asked else None for g, asked in zip(gradients, _asked(ctx), strict=True))
    return (dx, None, dw1, dw2, dprob, *_WITHOUT_GRADIENT)


def _keep(ctx: Any, inputs: tuple[Any, ...], h: torch.Tensor, x_saved: Sequence[torch.Tensor],
          act_saved: Sequence[torch.Tensor]) -> None:  # fmt: skip
    """Saves what the backward graph reads for the gradients that are asked for."""
    dx, dw1, dw2, dprob = _asked(ctx)
    _, offsets, w1, w2, prob, *ctx.choices = inputs
    save_act = ctx.choices.pop()
    needs_h = dx or dw1 or dprob or (dw2 and not save_act)
    ctx.save_for_backward(
        offsets, w1, w2, prob, h if needs_h else None,
        *(t if dw1 else None for t in x_saved), *(t if dw2 and save_act else None for t in act_saved),
    )  # fmt: skip


def _forward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, h, act = output
    ctx.mark_non_differentiable(h, act)
    _keep(ctx, inputs, h, (inputs[0],), (act,))


def _forward_derivative(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Optional, ...]:
    offsets, w1, w2, prob, h, x, act = ctx.saved_tensors
    return _to_inputs(ctx, torch.ops.opfuse.grouped_mlp_backward(
        dy, offsets, w1, w2, prob, x, h, act, *ctx.choices, *_asked(ctx)))  # fmt: skip


grouped_mlp_forward.register_autograd(_forward_derivative, setup_context=_forward_context)


def _mxfp8_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, h, x_codes, x_scales, act_codes, act_scales = output
    ctx.mark_non_differentiable(*output[1:])
    _keep(ctx, inputs, h, (x_codes, x_scales), (act_codes, act_scales))


def _mxfp8_derivative(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Optional, ...]:
    offsets, w1, w2, prob, h, x_codes, x_scales, act_codes, act_scales = ctx.saved_tensors
    return _to_inputs(ctx, torch.ops.opfuse.grouped_mlp_mxfp8_backward(
        dy, offsets, w1, w2, prob, x_codes, x_scales, h, act_codes, act_scales, *ctx.choices, *_asked(ctx)
    ))  # fmt: skip


grouped_mlp_mxfp8_forward.register_autograd(_mxfp8_derivative, setup_context=_mxfp8_context)


def _again_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, offsets, w1, w2, prob, *ctx.choices, ctx.recipe = inputs
    ctx.save_for_backward(x, offsets, w1, w2, prob)


def _again_derivative(ctx: Any, dy: torch.Tensor) -> tuple[Optional, ...]:
    x, offsets, w1, w2, prob = ctx.saved_tensors
    asked = _asked(ctx)
    if ctx.recipe == MXFP8:
        _, h, *codes = torch.ops.opfuse.grouped_mlp_mxfp8_forward(x, offsets, w1, w2, prob, *ctx.choices, True)
        gradients = torch.ops.opfuse.grouped_mlp_mxfp8_backward(
            dy, offsets, w1, w2, prob, *codes[:2], h, *codes[2:], *ctx.choices, *asked
        )
    else:
        _, h, act = torch.ops.opfuse.grouped_mlp_forward(x, offsets, w1, w2, prob, *ctx.choices, True)
        gradients = torch.ops.opfuse.grouped_mlp_backward(dy, offsets, w1, w2, prob, x, h, act, *ctx.choices, *asked)
    return _to_inputs(ctx, gradients)


grouped_mlp.register_autograd(_again_derivative, setup_context=_again_context)

OPS = (grouped_mlp, grouped_mlp_forward, grouped_mlp_backward, grouped_mlp_mxfp8_forward, grouped_mlp_mxfp8_backward)
"""Every op of the expert MLP."""
