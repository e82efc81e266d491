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
from .configuration import MXFP8, MXFP8_BLOCK, UNQUANTIZED, MlpConfig, check_call, check_half, configuration_of
from .derivatives import (
    Gradients,
    Optional,
    again_context,
    again_derivative,
    fc1_context,
    fc1_derivative,
    fc2_context,
    fc2_derivative,
    mxfp8_context,
    mxfp8_derivative,
)
from .graphs import Backward, BuiltGraph, Fc1Backward, Fc2, Forward, graph_of, inputs_first
from .known import ALIGNMENT, KNOWN
from .registration import register

_CHOICES = "str act, float[] activation_parameters, str glu_layout, int multiple_of, bool allow_tail"
_INPUTS = "Tensor x, Tensor offsets, Tensor w1, Tensor w2, Tensor? prob"
_GRADIENTS = "bool dx, bool dw1, bool dw2, bool dprob"

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
            choices: Sequence[Any], others: Sequence[Optional] = ()) -> MlpConfig:  # fmt: skip
    act, parameters, layout, multiple_of = choices
    check_call(x, offsets, w1, w2, prob, act, parameters, layout, recipe, multiple_of)
    config = configuration_of(x, offsets, w1, w2, prob, act, parameters, layout, recipe, multiple_of)
    return _aligned(config, (x, offsets, w1, w2, prob, *others))


def _aligned(config: MlpConfig, tensors: Sequence[Optional]) -> MlpConfig:
    aligned = all(t is None or t.data_ptr() % ALIGNMENT == 0 for t in tensors)
    return config if aligned else replace(config, alignment=1)


def _half(rows: dict[str, tuple[Optional, int]], offsets: torch.Tensor, w1: Optional, w2: Optional, prob: Optional,
          choices: Sequence[Any]) -> MlpConfig:  # fmt: skip
    """The configuration of a graph with one of the weights; `rows` as check_half's."""
    weight = w2 if w1 is None else w1
    assert weight is not None
    act, parameters, layout, multiple_of = choices
    intermediate = weight.shape[2] if w1 is None else weight.shape[1] // 2
    check_half(rows, intermediate, offsets, weight, prob, act, parameters, layout, multiple_of)
    tensors = [t for t, _ in rows.values() if t is not None]
    config = configuration_of(tensors[0], offsets, w1, w2, prob, act, parameters, layout, UNQUANTIZED, multiple_of)
    return _aligned(config, (*tensors, offsets, w1, w2, prob))


def _run_forward(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
                 recipe: str, allow_tail: bool, choices: Sequence[Any], saves: bool, saves_act: bool
                 ) -> dict[str, torch.Tensor]:  # fmt: skip
    x, w1, w2, prob = x.contiguous(), _dense(w1), _dense(w2), None if prob is None else prob.contiguous()

    def configure() -> BuiltGraph:
        return graph_of(Forward(_config(x, offsets, w1, w2, prob, recipe, choices), saves, saves_act))

    graph = KNOWN.find(("forward", *choices, recipe, saves, saves_act), (x, prob), (offsets, w1, w2), configure)
    _check_rows(offsets, x.shape[0], allow_tail)
    return graph(
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


def _mlp(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
                 act: str, activation_parameters: Sequence[float], glu_layout: str, multiple_of: int,
                 allow_tail: bool, recipe: str) -> torch.Tensor:  # fmt: skip
    choices = (act, tuple(activation_parameters), glu_layout, multiple_of)
    y: torch.Tensor = _run_forward(x, offsets, w1, w2, prob, recipe, allow_tail, choices, False, False)["y"]
    return y


def _fake_mlp(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional, act: str,
              activation_parameters: Sequence[float], glu_layout: str, multiple_of: int, allow_tail: bool, recipe: str
              ) -> torch.Tensor:  # fmt: skip
    check_call(x, offsets, w1, w2, prob, act, activation_parameters, glu_layout, recipe, multiple_of)
    return x.new_empty(x.shape)


def _fc1_rows(x: torch.Tensor, w1: torch.Tensor) -> dict[str, tuple[Optional, int]]:
    return {"x": (x, w1.shape[2])}


def _fc1(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, prob: Optional, act: str,
         activation_parameters: Sequence[float], glu_layout: str, multiple_of: int, allow_tail: bool
         ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    choices = (act, tuple(activation_parameters), glu_layout, multiple_of)
    x, w1, prob = x.contiguous(), _dense(w1), None if prob is None else prob.contiguous()

    def configure() -> BuiltGraph:
        config = _half(_fc1_rows(x, w1), offsets, w1, None, prob, choices)
        return graph_of(Forward(config, True, True, has_fc2=False))

    graph = KNOWN.find(("fc1", *choices), (x, prob), (offsets, w1), configure)
    _check_rows(offsets, x.shape[0], allow_tail)
    out = graph({"x": x, "w1": w1.transpose(1, 2), "offsets": offsets.contiguous(), "prob": prob})
    return out["h"], out["act"]


def _fake_fc1(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, prob: Optional, act: str,
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
    choices = (act, tuple(activation_parameters), glu_layout, multiple_of)
    act_rows, w2 = act_rows.contiguous(), _dense(w2)

    def configure() -> BuiltGraph:
        check_half(_fc2_rows(w2, act=act_rows, h=h), w2.shape[2], offsets, w2, prob, *choices)
        return graph_of(
            Fc2(_half(_fc2_rows(w2, act=act_rows), offsets, None, w2, None, (*_NO_ACTIVATION, multiple_of)))
        )

    graph = KNOWN.find(("fc2", *choices), (act_rows, h, prob), (offsets, w2), configure)
    _check_rows(offsets, act_rows.shape[0], allow_tail)
    return graph({"act": act_rows, "w2": w2.transpose(1, 2), "offsets": offsets.contiguous()})["y"]


def _fake_fc2(h: torch.Tensor, act_rows: torch.Tensor, offsets: torch.Tensor, w2: torch.Tensor, prob: Optional,
              act: str, activation_parameters: Sequence[float], glu_layout: str, multiple_of: int, allow_tail: bool,
              save_act: bool) -> torch.Tensor:  # fmt: skip
    check_half(_fc2_rows(w2, act=act_rows, h=h), w2.shape[2], offsets, w2, prob, act, activation_parameters,
               glu_layout, multiple_of)  # fmt: skip
    return act_rows.new_empty(act_rows.shape[0], w2.shape[1])


def _fc2_backward(dy: torch.Tensor, offsets: torch.Tensor, w2: torch.Tensor, prob: Optional, h: Optional,
                  act_rows: Optional, act: str, activation_parameters: Sequence[float], glu_layout: str,
                  multiple_of: int, allow_tail: bool, dh: bool, dw2: bool, dprob: bool
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    choices = (act, tuple(activation_parameters), glu_layout, multiple_of)
    dy, w2, prob = dy.contiguous(), _dense(w2), None if prob is None else prob.contiguous()
    found: dict[str, torch.Tensor] = {}

    def configure() -> BuiltGraph:
        config = _half(_fc2_rows(w2, dy=dy, h=h, act=act_rows), offsets, None, w2, prob, choices)
        return graph_of(Backward(config, False, False, dw2, dprob, has_act=act_rows is not None, dh=dh))

    if dh or dw2 or dprob:
        key = ("fc2_backward", *choices, dh, dw2, dprob)
        graph = KNOWN.find(key, (dy, h, act_rows, prob), (offsets, w2), configure)
        _check_rows(offsets, dy.shape[0], allow_tail)
        found = graph({"dy": dy, "h": h, "act": act_rows, "w2": w2, "prob": prob, "offsets": offsets.contiguous()})
    return (
        found.get("dh", _empty(dy)),
        _as_weight(found["dw2"], w2) if dw2 else _empty(dy),
        found.get("dprob", _empty(dy, torch.float32)),
    )


def _fake_fc2_backward(dy: torch.Tensor, offsets: torch.Tensor, w2: torch.Tensor, prob: Optional, h: Optional,
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
    found: dict[str, torch.Tensor] = {}

    def configure() -> BuiltGraph:
        rows: dict[str, tuple[Optional, int]] = {"dh": (dh, w1.shape[1]), "x": (x, w1.shape[2])}
        return graph_of(Fc1Backward(_half(rows, offsets, w1, None, None, (*_NO_ACTIVATION, multiple_of)), dx, dw1))

    if dx or dw1:
        graph = KNOWN.find(("fc1_backward", multiple_of, dx, dw1), (dh, x), (offsets, w1), configure)
        _check_rows(offsets, dh.shape[0], allow_tail)
        found = graph({"dh": dh, "x": x, "w1": w1, "offsets": offsets.contiguous()})
    return found.get("dx", _empty(dh)), _as_weight(found["dw1"], w1) if dw1 else _empty(dh)


def _fake_fc1_backward(dh: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, x: Optional, multiple_of: int,
                       allow_tail: bool, dx: bool, dw1: bool) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return (
        dh.new_empty(dh.shape[0], w1.shape[2]) if dx else _empty(dh),
        _fake_gradient(dh, w1) if dw1 else _empty(dh),
    )


def _mxfp8_forward(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
                   act: str, activation_parameters: Sequence[float], glu_layout: str, multiple_of: int,
                   allow_tail: bool, save_act: bool) -> tuple[torch.Tensor, ...]:  # fmt: skip
    choices = (act, tuple(activation_parameters), glu_layout, multiple_of)
    out = _run_forward(x, offsets, w1, w2, prob, MXFP8, allow_tail, choices, True, save_act)
    names = ("x_codes", "x_scales", *(("act_codes", "act_scales") if save_act else ()))
    saved = [out[name].view(torch.uint8) for name in names]
    return (out["y"], out["h"], *saved, *(() if save_act else (_empty(x, torch.uint8), _empty(x, torch.uint8))))


def _fake_mxfp8_forward(x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
                        act: str, activation_parameters: Sequence[float], glu_layout: str, multiple_of: int,
                        allow_tail: bool, save_act: bool) -> tuple[torch.Tensor, ...]:  # fmt: skip
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
    choices = (act, tuple(activation_parameters), glu_layout, multiple_of)
    dy, w1, w2, prob = dy.contiguous(), _dense(w1), _dense(w2), None if prob is None else prob.contiguous()
    found: dict[str, torch.Tensor] = {}

    def configure() -> BuiltGraph:
        config = _config(dy, offsets, w1, w2, prob, MXFP8, choices, tuple(saved.values()))
        return graph_of(Backward(config, dx, dw1, dw2, dprob, has_act=act_codes is not None))

    if dx or dw1 or dw2 or dprob:
        key = ("mxfp8_backward", *choices, dx, dw1, dw2, dprob)
        scales = (saved["x_scales"], saved["act_scales"])
        graph = KNOWN.find(key, (dy, h, saved["x_codes"], saved["act_codes"], prob), (offsets, w1, w2, *scales),
                           configure)  # fmt: skip
        _check_rows(offsets, dy.shape[0], allow_tail)
        found = graph({**saved, "dy": dy, "w1": w1, "w2": w2, "prob": prob, "offsets": offsets.contiguous()})
    return (
        found.get("dx", _empty(dy)),
        _as_weight(found["dw1"], w1) if dw1 else _empty(dy),
        _as_weight(found["dw2"], w2) if dw2 else _empty(dy),
        found.get("dprob", _empty(dy, torch.float32)),
    )


def _fake_mxfp8_backward(dy: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: Optional,
                         x_codes: Optional, x_scales: Optional, h: Optional, act_codes: Optional,
                         act_scales: Optional, act: str, activation_parameters: Sequence[float], glu_layout: str,
                         multiple_of: int, allow_tail: bool, dx: bool, dw1: bool, dw2: bool, dprob: bool
                         ) -> Gradients:  # fmt: skip
    return (
        dy.new_empty(dy.shape) if dx else _empty(dy),
        _fake_gradient(dy, w1) if dw1 else _empty(dy),
        _fake_gradient(dy, w2) if dw2 else _empty(dy),
        dy.new_empty(dy.shape[0], dtype=torch.float32) if dprob else _empty(dy, torch.float32),
    )


# ---------------------------------------------------------------------- registered

OPS = (
    register("grouped_mlp", f"({_INPUTS}, {_CHOICES}, str recipe) -> Tensor", _mlp, _fake_mlp,
             setup_context=again_context, derivative=again_derivative),
    register("grouped_mlp_fc1", f"(Tensor x, Tensor offsets, Tensor w1, Tensor? prob, {_CHOICES}) -> "
             "(Tensor h, Tensor act)", _fc1, _fake_fc1, setup_context=fc1_context, derivative=fc1_derivative),
    register("grouped_mlp_fc2", "(Tensor h, Tensor act_rows, Tensor offsets, Tensor w2, Tensor? prob, "
             f"{_CHOICES}, bool save_act) -> Tensor", _fc2, _fake_fc2, setup_context=fc2_context,
             derivative=fc2_derivative),
    register("grouped_mlp_fc2_backward", "(Tensor dy, Tensor offsets, Tensor w2, Tensor? prob, Tensor? h, "
             f"Tensor? act_rows, {_CHOICES}, bool dh, bool dw2, bool dprob) -> (Tensor, Tensor, Tensor)",
             _fc2_backward, _fake_fc2_backward),
    register("grouped_mlp_fc1_backward", "(Tensor dh, Tensor offsets, Tensor w1, Tensor? x, int multiple_of, "
             "bool allow_tail, bool dx, bool dw1) -> (Tensor, Tensor)", _fc1_backward, _fake_fc1_backward),
    register("grouped_mlp_mxfp8_forward", f"({_INPUTS}, {_CHOICES}, bool save_act) -> (Tensor y, Tensor h, "
             "Tensor x_codes, Tensor x_scales, Tensor act_codes, Tensor act_scales)", _mxfp8_forward,
             _fake_mxfp8_forward, setup_context=mxfp8_context, derivative=mxfp8_derivative),
    register("grouped_mlp_mxfp8_backward", "(Tensor dy, Tensor offsets, Tensor w1, Tensor w2, Tensor? prob, "
             "Tensor? x_codes, Tensor? x_scales, Tensor? h, Tensor? act_codes, Tensor? act_scales, "
             f"{_CHOICES}, {_GRADIENTS}) -> (Tensor, Tensor, Tensor, Tensor)", _mxfp8_backward, _fake_mxfp8_backward),
)  # fmt: skip
"""Every op of the expert MLP."""
