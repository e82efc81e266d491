"""`torch.ops.opfuse.*`: the expert MLP on dispatched rows, as functional custom ops with fakes and derivatives.

grouped_mlp                  y alone. Its derivative computes the forward again: it saves its inputs and nothing else.
grouped_mlp_fc1              x -> h (M, 2I) and act (M, I), of which h has a gradient.
grouped_mlp_fc2              act -> y. Its derivative gives the gradients of h, w2 and prob; that of act goes nowhere.
grouped_mlp_fc2_backward     dh, dw2, dprob; empty where not asked for.
grouped_mlp_fc1_backward     dh -> dx, dw1; empty where not asked for.
grouped_mlp_mxfp8_forward    y, h, and of x and act the bytes of E4M3 codes and E8M0 scales (empty where not saved).
grouped_mlp_mxfp8_backward   dx, dw1, dw2, dprob; empty where not asked for.

Two ops each way, so that autograd has let h, act and w2 go when dx and dw1 are made.

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
from .configuration import MXFP8, MXFP8_BLOCK, UNQUANTIZED, MlpConfig, check_call, check_half, configuration_of
from .graphs import Backward, Fc1Backward, Fc2, Forward, graph_of, inputs_first

NAMESPACE = "opfuse"
_CHOICES = "str act, float[] activation_parameters, str glu_layout, int multiple_of, bool allow_tail"
_INPUTS = "Tensor x, Tensor offsets, Tensor w1, Tensor w2, Tensor? prob"
_GRADIENTS = "bool dx, bool dw1, bool dw2, bool dprob"

Optional = torch.Tensor | None
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

ALIGNMENT = 16
"""Bytes to which fused kernels want data pointers aligned. A call with a tensor that is not has graphs of its own."""

_NO_ACTIVATION = ("swiglu", (), "concatenated")
"""Stands for the activation's choices where a graph has none."""


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
    return _aligned(config, (x, offsets, w1, w2, prob, *others))


def _aligned(config: MlpConfig, tensors: Sequence[Optional]) -> MlpConfig:
    aligned = all(t is None or t.data_ptr() % ALIGNMENT == 0 for t in tensors)
    return config if aligned else replace(config, alignment=1)


def _half(rows: dict[str, tuple[Optional, int]], offsets: torch.Tensor, w1: Optional, w2: Optional, prob: Optional,
          allow_tail: bool, choices: Sequence[Any]) -> MlpConfig:  # fmt: skip
    """The configuration of a graph with one of the weights; `rows` as check_half's."""
    weight = w2 if w1 is None else w1
    assert weight is not None
    act, parameters, layout, multiple_of = choices
    intermediate = weight.shape[2] if w1 is None else weight.shape[1] // 2
    check_half(rows, intermediate, offsets, weight, prob, act, parameters, layout, multiple_of)
    tensors = [t for t, _ in rows.values() if t is not None]
    _check_rows(offsets, tensors[0].shape[0], allow_tail)
    config = configuration_of(tensors[0], offsets, w1, w2, prob, act, parameters, layout, UNQUANTIZED, multiple_of)
    return _aligned(config, (*tensors, offsets, w1, w2, prob))


def _run_forward(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
                 recipe: str, allow_tail: bool, choices: Sequence[Any], saves: bool, saves_act: bool
                 ) -> Outputs:  # fmt: skip
    x, w1, w2, prob = x.contiguous(), _dense(w1), _dense(w2), None if prob is None else prob.contiguous()
    config = _config(x, offsets, w1, w2, prob, recipe, allow_tail, choices)
    return graph_of(Forward(config, saves, saves_act))(
        {"x": x, "w1": w1.transpose(1, 2), "w2": w2.transpose(1, 2), "offsets": offsets.contiguous(), "prob": prob}
    )


def _as_weight(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a graph wrote, with the axes of the weight."""
    return gradient.transpose(1, 2) if inputs_first(weight.stride()) else gradient


def _fake_gradient(like: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    experts, outputs, inputs = weight.shape
    if inputs_first(weight.stride()):
        return like.new_empty(experts, inputs, outputs).transpose(1, 2)
    return like.new_empty(experts, outputs, inputs)


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


def _fc1_rows(x: torch.Tensor, w1: torch.Tensor) -> dict[str, tuple[Optional, int]]:
    return {"x": (x, w1.shape[2])}


def _fc1(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, prob: Optional, act: str,
         activation_parameters: Sequence[float], glu_layout: str, multiple_of: int, allow_tail: bool
         ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    choices = (act, activation_parameters, glu_layout, multiple_of)
    x, w1, prob = x.contiguous(), _dense(w1), None if prob is None else prob.contiguous()
    config = _half(_fc1_rows(x, w1), offsets, w1, None, prob, allow_tail, choices)
    given = {"x": x, "w1": w1.transpose(1, 2), "offsets": offsets.contiguous(), "prob": prob}
    out = graph_of(Forward(config, True, True, has_fc2=False))(given)
    return out["h"], out["act"]


grouped_mlp_fc1 = torch.library.custom_op(
    f"{NAMESPACE}::grouped_mlp_fc1", _fc1, mutates_args=(),
    schema=f"(Tensor x, Tensor offsets, Tensor w1, Tensor? prob, {_CHOICES}) -> (Tensor h, Tensor act)",
)  # fmt: skip


@grouped_mlp_fc1.register_fake
def _(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, prob: Optional, act: str,
      activation_parameters: Sequence[float], glu_layout: str, multiple_of: int, allow_tail: bool
      ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    half = w1.shape[1] // 2
    check_half(_fc1_rows(x, w1), half, offsets, w1, prob, act, activation_parameters, glu_layout, multiple_of)
    return x.new_empty(x.shape[0], 2 * half), x.new_empty(x.shape[0], half)


def _fc2_rows(w2: torch.Tensor, **rows: Optional) -> dict[str, tuple[Optional, int]]:
    _, hidden, half = w2.shape
    columns = {"dy": hidden, "h": 2 * half, "act": half}
    return {name: (t, columns[name]) for name, t in rows.items()}


def _fc2(h: torch.Tensor, act_rows: torch.Tensor, offsets: torch.Tensor, w2: torch.Tensor, prob: Optional, act: str,
         activation_parameters: Sequence[float], glu_layout: str, multiple_of: int, allow_tail: bool, save_act: bool
         ) -> torch.Tensor:  # fmt: skip
    """h, prob and `save_act` are what the derivative reads, and the choices but for the rows."""
    act_rows, w2 = act_rows.contiguous(), _dense(w2)
    check_half(_fc2_rows(w2, act=act_rows, h=h), w2.shape[2], offsets, w2, prob, act, activation_parameters,
               glu_layout, multiple_of)  # fmt: skip
    choices = (*_NO_ACTIVATION, multiple_of)
    config = _half(_fc2_rows(w2, act=act_rows), offsets, None, w2, None, allow_tail, choices)
    y: torch.Tensor = graph_of(Fc2(config))(
        {"act": act_rows, "w2": w2.transpose(1, 2), "offsets": offsets.contiguous()}
    )["y"]
    return y


grouped_mlp_fc2 = torch.library.custom_op(
    f"{NAMESPACE}::grouped_mlp_fc2", _fc2, mutates_args=(),
    schema=f"(Tensor h, Tensor act_rows, Tensor offsets, Tensor w2, Tensor? prob, {_CHOICES}, bool save_act) -> Tensor",
)  # fmt: skip


@grouped_mlp_fc2.register_fake
def _(h: torch.Tensor, act_rows: torch.Tensor, offsets: torch.Tensor, w2: torch.Tensor, prob: Optional, act: str,
      activation_parameters: Sequence[float], glu_layout: str, multiple_of: int, allow_tail: bool, save_act: bool
      ) -> torch.Tensor:  # fmt: skip
    check_half(_fc2_rows(w2, act=act_rows, h=h), w2.shape[2], offsets, w2, prob, act, activation_parameters,
               glu_layout, multiple_of)  # fmt: skip
    return act_rows.new_empty(act_rows.shape[0], w2.shape[1])


def _fc2_backward(dy: torch.Tensor, offsets: torch.Tensor, w2: torch.Tensor, prob: Optional, h: Optional,
                  act_rows: Optional, act: str, activation_parameters: Sequence[float], glu_layout: str,
                  multiple_of: int, allow_tail: bool, dh: bool, dw2: bool, dprob: bool
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    choices = (act, activation_parameters, glu_layout, multiple_of)
    dy, w2, prob = dy.contiguous(), _dense(w2), None if prob is None else prob.contiguous()
    config = _half(_fc2_rows(w2, dy=dy, h=h, act=act_rows), offsets, None, w2, prob, allow_tail, choices)
    found: dict[str, torch.Tensor] = {}
    if dh or dw2 or dprob:
        given = {"dy": dy, "h": h, "act": act_rows, "w2": w2, "prob": prob, "offsets": offsets.contiguous()}
        key = Backward(config, False, False, dw2, dprob, has_act=act_rows is not None, dh=dh)
        found = dict(graph_of(key)(given))
    return (
        found.get("dh", _empty(dy)),
        _as_weight(found["dw2"], w2) if dw2 else _empty(dy),
        found.get("dprob", _empty(dy, torch.float32)),
    )


grouped_mlp_fc2_backward = torch.library.custom_op(
    f"{NAMESPACE}::grouped_mlp_fc2_backward", _fc2_backward, mutates_args=(),
    schema="(Tensor dy, Tensor offsets, Tensor w2, Tensor? prob, Tensor? h, Tensor? act_rows, "
    f"{_CHOICES}, bool dh, bool dw2, bool dprob) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip


@grouped_mlp_fc2_backward.register_fake
def _(dy: torch.Tensor, offsets: torch.Tensor, w2: torch.Tensor, prob: Optional, h: Optional,
      act_rows: Optional, act: str, activation_parameters: Sequence[float], glu_layout: str,
      multiple_of: int, allow_tail: bool, dh: bool, dw2: bool, dprob: bool
      ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    rows = dy.shape[0]
    return (
        dy.new_empty(rows, 2 * w2.shape[2]) if dh else _empty(dy),
        _fake_gradient(dy, w2) if dw2 else _empty(dy),
        dy.new_empty(rows, dtype=torch.float32) if dprob else _empty(dy, torch.float32),
    )


def _fc1_backward(dh: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, x: Optional, multiple_of: int,
                  allow_tail: bool, dx: bool, dw1: bool) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dh, w1, x = dh.contiguous(), _dense(w1), None if x is None else x.contiguous()
    rows: dict[str, tuple[Optional, int]] = {"dh": (dh, w1.shape[1]), "x": (x, w1.shape[2])}
    config = _half(rows, offsets, w1, None, None, allow_tail, (*_NO_ACTIVATION, multiple_of))
    found: dict[str, torch.Tensor] = {}
    if dx or dw1:
        given = {"dh": dh, "x": x, "w1": w1, "offsets": offsets.contiguous()}
        found = dict(graph_of(Fc1Backward(config, dx, dw1))(given))
    return found.get("dx", _empty(dh)), _as_weight(found["dw1"], w1) if dw1 else _empty(dh)


grouped_mlp_fc1_backward = torch.library.custom_op(
    f"{NAMESPACE}::grouped_mlp_fc1_backward", _fc1_backward, mutates_args=(),
    schema="(Tensor dh, Tensor offsets, Tensor w1, Tensor? x, int multiple_of, bool allow_tail, bool dx, bool dw1) -> "
    "(Tensor, Tensor)",
)  # fmt: skip


@grouped_mlp_fc1_backward.register_fake
def _(dh: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, x: Optional, multiple_of: int, allow_tail: bool,
      dx: bool, dw1: bool) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return (
        dh.new_empty(dh.shape[0], w1.shape[2]) if dx else _empty(dh),
        _fake_gradient(dh, w1) if dw1 else _empty(dh),
    )


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
    saved: dict[str, Optional] = {"h": h}
    for name, kind, stored in (("x_codes", torch.float8_e4m3fn, x_codes), ("x_scales", torch.float8_e8m0fnu, x_scales),
                               ("act_codes", torch.float8_e4m3fn, act_codes),
                               ("act_scales", torch.float8_e8m0fnu, act_scales)):  # fmt: skip
        saved[name] = None if stored is None else stored.view(kind)
    choices = (act, activation_parameters, glu_layout, multiple_of)
    dy, w1, w2, prob = dy.contiguous(), _dense(w1), _dense(w2), None if prob is None else prob.contiguous()
    config = _config(dy, offsets, w1, w2, prob, MXFP8, allow_tail, choices, tuple(saved.values()))
    found: dict[str, torch.Tensor] = {}
    if dx or dw1 or dw2 or dprob:
        given = {**saved, "dy": dy, "w1": w1, "w2": w2, "prob": prob, "offsets": offsets.contiguous()}
        found = dict(graph_of(Backward(config, dx, dw1, dw2, dprob, has_act=act_codes is not None))(given))
    return (
        found.get("dx", _empty(dy)),
        _as_weight(found["dw1"], w1) if dw1 else _empty(dy),
        _as_weight(found["dw2"], w2) if dw2 else _empty(dy),
        found.get("dprob", _empty(dy, torch.float32)),
    )


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
    return (
        dy.new_empty(dy.shape) if dx else _empty(dy),
        _fake_gradient(dy, w1) if dw1 else _empty(dy),
        _fake_gradient(dy, w2) if dw2 else _empty(dy),
        dy.new_empty(dy.shape[0], dtype=torch.float32) if dprob else _empty(dy, torch.float32),
    )


# ---------------------------------------------------------------------- derivatives

# Gradients of outputs that have none are None, not zeros as large as h and act (set_materialize_grads).


def _fc1_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, offsets, w1, _, *_, ctx.multiple_of, ctx.allow_tail = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(offsets, w1, x if ctx.needs_input_grad[2] else None)


def _fc1_derivative(ctx: Any, dh: Optional, _: Any) -> tuple[Optional, ...]:
    """prob has its gradient from grouped_mlp_fc2."""
    if dh is None:
        return (None,) * 9
    offsets, w1, x = ctx.saved_tensors
    asked = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
    dx, dw1 = torch.ops.opfuse.grouped_mlp_fc1_backward(dh, offsets, w1, x, ctx.multiple_of, ctx.allow_tail, *asked)
    return (dx if asked[0] else None, None, dw1 if asked[1] else None, *(None,) * 6)


grouped_mlp_fc1.register_autograd(_fc1_derivative, setup_context=_fc1_context)


def _fc2_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    h, act_rows, offsets, w2, prob, *ctx.choices, save_act = inputs
    ctx.set_materialize_grads(False)
    dh, _, _, dw2, dprob, *_ = ctx.needs_input_grad
    needs_h = dh or dprob or (dw2 and not save_act)
    ctx.save_for_backward(offsets, w2, prob, h if needs_h else None, act_rows if dw2 and save_act else None)


def _fc2_derivative(ctx: Any, dy: Optional) -> tuple[Optional, ...]:
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


grouped_mlp_fc2.register_autograd(_fc2_derivative, setup_context=_fc2_context)

_X, _W1, _W2, _PROB = 0, 2, 3, 4
"""Places of the differentiable inputs of an op of the whole MLP."""


def _asked(ctx: Any) -> tuple[bool, bool, bool, bool]:
    needs = ctx.needs_input_grad
    return needs[_X], needs[_W1], needs[_W2], needs[_PROB]


def _to_inputs(ctx: Any, gradients: Gradients) -> tuple[Optional, ...]:
    dx, dw1, dw2, dprob = (g if asked else None for g, asked in zip(gradients, _asked(ctx), strict=True))
    return (dx, None, dw1, dw2, dprob, *(None,) * 6)


def _mxfp8_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Saves what the backward graph reads for the gradients that are asked for."""
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


def _mxfp8_derivative(ctx: Any, dy: Optional, *_: Any) -> tuple[Optional, ...]:
    if dy is None:
        return (None,) * 11
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


grouped_mlp.register_autograd(_again_derivative, setup_context=_again_context)

OPS = (grouped_mlp, grouped_mlp_fc1, grouped_mlp_fc2, grouped_mlp_fc2_backward, grouped_mlp_fc1_backward,
       grouped_mlp_mxfp8_forward, grouped_mlp_mxfp8_backward)  # fmt: skip
"""Every op of the expert MLP."""
