"""What an expert MLP is, apart from its data: the key of its graphs, made from the tensors of a call and checked there.

Axis letters: M rows (already grouped by expert), H hidden, I intermediate, L experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from ..ir.dtypes import DataType
from ..ir.errors import GraphNotSupportedError, VariantPackError
from ..ir.layouts import GluLayout
from ..ir.nodes.glu import ACTIVATION_PARAMETERS

UNQUANTIZED, MXFP8 = "", "mxfp8"
RECIPES = (UNQUANTIZED, MXFP8)
"""How activations and gradients reach the matmuls: as they are, or as MXFP8 codes (E4M3, blocks of 32, E8M0 scales)."""

MXFP8_BLOCK = 32

SAVES = ("activation", "preactivation", "inputs")
"""What the forward holds for the backward: h and the activation, h, or neither."""

OPERAND_TYPES = {
    torch.bfloat16: DataType.BFLOAT16,
    torch.float16: DataType.HALF,
    torch.float32: DataType.FLOAT,
}
INDEX_TYPES = {torch.int32: DataType.INT32, torch.int64: DataType.INT64}


@dataclass(frozen=True)
class MlpConfig:
    """Everything that the graphs of one expert MLP depend on, but the number of rows.

    `w1_stride`, `w2_stride`: of the weights (L, 2I, H) and (L, H, I), () of one that the graph does not have.
    `activation_parameters`: in the order of ACTIVATION_PARAMETERS. `multiple_of`: promise about every expert's number
    of rows.
    """

    device: torch.device
    data_type: DataType
    offsets_type: DataType
    experts: int
    hidden: int
    intermediate: int
    w1_stride: tuple[int, ...]
    w2_stride: tuple[int, ...]
    has_prob: bool
    act: str
    activation_parameters: tuple[float, ...]
    glu_layout: GluLayout
    recipe: str
    multiple_of: int
    alignment: int = 16

    @property
    def activation(self) -> dict[str, Any]:
        """The activation's parameters by name."""
        return dict(zip(ACTIVATION_PARAMETERS[self.act], self.activation_parameters, strict=True))

    @property
    def is_quantized(self) -> bool:
        return self.recipe == MXFP8


def _transforms_in_force() -> str:
    """Which derivatives and transforms the caller is within that custom ops refuse unclearly, or leave out: the tangent
    of a custom op's result is just not there. Dynamo guards what this reads."""
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation (torch.autograd.forward_ad, torch.func.jvp, jacfwd)"
    return "a transform of torch.func (grad, vjp, jacrev, vmap)" if torch._C._are_functorch_transforms_active() else ""


def check_arguments(
    tensors: Mapping[str, object], flags: Mapping[str, object], numbers: Mapping[str, object], multiple_of: object
) -> None:
    """Raises VariantPackError for an argument of a Python type that no op takes, before torch's dispatcher would."""
    wanted = [
        *(
            (name, t, "a dense torch.Tensor", isinstance(t, torch.Tensor) and t.layout is torch.strided)
            for name, t in tensors.items()
        ),
        *((name, v, "True or False", isinstance(v, bool)) for name, v in flags.items()),
        *((name, v, "a number", isinstance(v, (int, float))) for name, v in numbers.items()),
        ("multiple_of", multiple_of, "an int", type(multiple_of) is int),
    ]
    for name, value, required, fits in wanted:
        if not fits:
            raise VariantPackError("ARGUMENT_TYPE", asked=f"{name} of an expert MLP",
                                   seen=getattr(value, "layout", type(value).__name__), required=required)  # fmt: skip


def check_transforms() -> None:
    """Raises GraphNotSupportedError("TRANSFORM") within forward-mode differentiation and torch.func's transforms."""
    if seen := _transforms_in_force():
        raise GraphNotSupportedError(
            "TRANSFORM",
            asked="an expert MLP",
            seen=f"a call within {seen}",
            required="reverse-mode autograd: backward(), torch.autograd.grad, torch.autograd.functional.vjp",
            hint="instead of vmap, append the rows of all calls: rows are independent",
        )


def configuration_of(
    rows: torch.Tensor,  # (M, ...), any of them: its type and device count
    offsets: torch.Tensor,  # (L,)
    w1: torch.Tensor | None,  # (L, 2I, H)
    w2: torch.Tensor | None,  # (L, H, I)
    prob: torch.Tensor | None,  # (M,)
    act: str,
    activation_parameters: Sequence[float],
    glu_layout: str,
    recipe: str,
    multiple_of: int,
) -> MlpConfig:
    """The configuration of a call that `check_call` or, with one of the weights, `check_half` has passed."""
    hidden, intermediate = (0, 0) if w1 is None else (w1.shape[2], w1.shape[1] // 2)
    if w2 is not None:
        _, hidden, intermediate = w2.shape
    return MlpConfig(
        device=rows.device,
        data_type=OPERAND_TYPES[rows.dtype],
        offsets_type=INDEX_TYPES[offsets.dtype],
        experts=offsets.shape[0],
        hidden=hidden,
        intermediate=intermediate,
        w1_stride=() if w1 is None else w1.stride(),
        w2_stride=() if w2 is None else w2.stride(),
        has_prob=prob is not None,
        act=act,
        activation_parameters=tuple(float(p) for p in activation_parameters),
        glu_layout=GluLayout.parse(glu_layout),
        recipe=recipe,
        multiple_of=multiple_of,
    )


def check_call(
    x: torch.Tensor,
    offsets: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    prob: torch.Tensor | None,
    act: str,
    activation_parameters: Sequence[float],
    glu_layout: str,
    recipe: str,
    multiple_of: int,
) -> None:
    """Raises VariantPackError for whatever does not fit together; reads no value, so it serves fake tensors too."""
    _check_activation(act, activation_parameters)
    check_recipe(recipe, multiple_of)
    _check_shapes(x, offsets, w1, w2, prob)
    _check_types(x, offsets, w1, w2, prob, recipe)
    check_layout(glu_layout, w2.shape[2])


def check_layout(glu_layout: str, intermediate: int) -> None:
    """Raises VariantPackError where whole blocks of `glu_layout` do not fill an intermediate size."""
    layout = GluLayout.parse(glu_layout)
    if intermediate % (layout.width or 1):
        raise VariantPackError("GLU_LAYOUT", asked=f"glu_layout {layout}", seen=f"I = {intermediate}",
                               required=f"an intermediate size that is a multiple of {layout.width}")  # fmt: skip


def check_half(
    rows: Mapping[str, tuple[torch.Tensor | None, int]],  # each (M, columns)
    intermediate: int,
    offsets: torch.Tensor,  # (L,)
    weight: torch.Tensor,  # (L, outputs, inputs)
    prob: torch.Tensor | None,  # (M,)
    act: str,
    activation_parameters: Sequence[float],
    glu_layout: str,
    multiple_of: int,
) -> None:
    """As `check_call` for one of the two matmuls: `rows` are its tensors by name, with the columns they must have."""
    _check_activation(act, activation_parameters)
    check_recipe(UNQUANTIZED, multiple_of)
    present = {name: (t, columns) for name, (t, columns) in rows.items() if t is not None}
    count = next(iter(present.values()))[0].shape[0]
    if offsets.dim() != 1 or offsets.shape[0] != weight.shape[0] or offsets.dtype not in INDEX_TYPES:
        raise VariantPackError("EXPERTS", asked="offsets of an expert MLP",
                               seen=f"{offsets.dtype} of shape {tuple(offsets.shape)}",
                               required=f"({weight.shape[0]},) of one of {list(INDEX_TYPES)}")  # fmt: skip
    wanted: list[tuple[str, torch.Tensor, tuple[int, ...], torch.dtype]] = [
        (name, t, (count, columns), weight.dtype) for name, (t, columns) in present.items()
    ]
    if prob is not None:
        wanted.append(("probs", prob, (count,), torch.float32))
    for name, tensor, shape, dtype in wanted:
        if tuple(tensor.shape) != shape:
            raise VariantPackError("SHAPE", asked=f"{name} of an expert MLP", seen=f"shape {tuple(tensor.shape)}",
                                   required=f"{shape} beside weights {tuple(weight.shape)}")  # fmt: skip
        if tensor.dtype is not dtype or weight.dtype not in OPERAND_TYPES:
            raise VariantPackError("DATA_TYPE", asked=f"{name} of an expert MLP", seen=tensor.dtype,
                                   required=f"{dtype}, of {list(OPERAND_TYPES)} for rows")  # fmt: skip
        if tensor.device != weight.device or offsets.device != weight.device:
            raise VariantPackError("DEVICE", asked=f"{name} of an expert MLP", seen=f"{tensor.device}, offsets on "
                                   f"{offsets.device}", required=f"{weight.device}, as the weights")  # fmt: skip
    check_layout(glu_layout, intermediate)


def _check_activation(act: str, parameters: Sequence[float]) -> None:
    if act not in ACTIVATION_PARAMETERS:
        raise VariantPackError("ACT", asked=f"act {act!r}", required=f"one of {list(ACTIVATION_PARAMETERS)}")
    if len(parameters) != len(names := ACTIVATION_PARAMETERS[act]):
        raise VariantPackError("ACT_PARAMETERS", asked=f"act {act}", seen=f"{len(parameters)} parameters",
                               required=f"{len(names)}: {list(names)}")  # fmt: skip


def check_options(recipe: str | None, multiple_of: int, save: str = "activation") -> None:
    """Raises VariantPackError for options that no tensors could fit."""
    if save not in SAVES:
        raise VariantPackError("SAVE", asked=f"save={save!r}", required=f"one of {list(SAVES)}")
    if recipe is not None and recipe != MXFP8:
        raise VariantPackError("RECIPE", asked=f"recipe {recipe!r}", required=f"None or {MXFP8!r}")
    check_recipe(recipe or UNQUANTIZED, multiple_of)


def check_sizes(experts: int, hidden: int, intermediate: int) -> None:
    """Raises VariantPackError for sizes that no weights have."""
    for name, size, least in (("num_experts", experts, 0), ("hidden_size", hidden, 1),
                              ("intermediate_size", intermediate, 1)):  # fmt: skip
        if not isinstance(size, int) or size < least:
            raise VariantPackError("SIZE", asked=f"{name}={size!r}", required=f"an int, at least {least}")


def check_recipe(recipe: str, multiple_of: int) -> None:
    """Raises VariantPackError for an unknown recipe, or a promise about rows that is none or too small for it."""
    if recipe not in RECIPES:
        raise VariantPackError("RECIPE", asked=f"recipe {recipe!r}", required=f"one of {list(RECIPES)}")
    if multiple_of < 1:
        raise VariantPackError("MULTIPLE_OF", asked=f"multiple_of={multiple_of}", required="at least 1")
    if recipe == MXFP8 and multiple_of % MXFP8_BLOCK:
        raise VariantPackError(
            "GROUP_ALIGN",
            asked="recipe mxfp8",
            seen=f"multiple_of={multiple_of} rows an expert",
            required=f"a multiple of {MXFP8_BLOCK}: blocks along the rows of a column must not span two experts",
            hint=f"pad each expert's rows to {MXFP8_BLOCK} and pass multiple_of={MXFP8_BLOCK}",
        )


def _check_shapes(
    x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: torch.Tensor | None
) -> None:
    for name, tensor, rank in (("x", x, 2), ("tokens_per_expert", offsets, 1), ("w1", w1, 3), ("w2", w2, 3)):
        if tensor.dim() != rank:
            raise VariantPackError(
                "RANK", asked=f"{name} of an expert MLP", seen=f"shape {tuple(tensor.shape)}", required=f"rank {rank}"
            )
    experts, columns, hidden = w1.shape
    if w2.shape[0] != experts or offsets.shape[0] != experts:
        raise VariantPackError(
            "EXPERTS",
            asked="an expert MLP",
            seen=f"w1 with {experts} experts, w2 with {w2.shape[0]}, tokens_per_expert with {offsets.shape[0]}",
            required="the same number of experts in all three",
        )
    if not columns or not hidden:
        raise VariantPackError("SHAPE", asked="w1 of an expert MLP", seen=f"shape {tuple(w1.shape)}",
                               required="(L, 2I, H) with I and H at least 1")  # fmt: skip
    if w2.shape[1] != hidden or columns != 2 * w2.shape[2]:
        raise VariantPackError(
            "WEIGHT_LAYOUT",
            asked="weights of an expert MLP",
            seen=f"w1 {tuple(w1.shape)}, w2 {tuple(w2.shape)}",
            required="w1 (L, 2I, H) and w2 (L, H, I): outputs first, as in torch.nn.Linear",
            hint="pass weight.transpose(1, 2) for weights that are stored inputs first; no copy is made",
        )
    if x.shape[1] != hidden:
        raise VariantPackError("SHAPE", asked="x of an expert MLP", seen=f"shape {tuple(x.shape)}",
                               required=f"(M, H) with H = {hidden}, the last axis of w1")  # fmt: skip
    if prob is not None and (prob.dim() != 1 or prob.shape[0] != x.shape[0]):
        raise VariantPackError("SHAPE", asked="probs of an expert MLP", seen=f"shape {tuple(prob.shape)}",
                               required=f"({x.shape[0]},), one for each row of x")  # fmt: skip


def _check_types(
    x: torch.Tensor, offsets: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: torch.Tensor | None, recipe: str
) -> None:
    given = {"x": x, "tokens_per_expert": offsets, "w1": w1, "w2": w2, **({} if prob is None else {"probs": prob})}
    if len({t.device for t in given.values()}) > 1:
        seen = ", ".join(f"{name} on {t.device}" for name, t in given.items())
        raise VariantPackError("DEVICE", asked="an expert MLP", seen=seen, required="one device for all tensors")
    if x.dtype not in OPERAND_TYPES or (recipe == MXFP8 and x.dtype is torch.float16):
        grad = " with requires_grad" if x.requires_grad else ""
        wanted = [t for t in OPERAND_TYPES if recipe != MXFP8 or t is not torch.float16]
        raise VariantPackError("DATA_TYPE", asked="x of an expert MLP", seen=f"{x.dtype}{grad}",
                               required=f"one of {wanted}")  # fmt: skip
    if w1.dtype is not x.dtype or w2.dtype is not x.dtype:
        raise VariantPackError(
            "DATA_TYPE",
            asked="an expert MLP",
            seen=f"x {x.dtype}, w1 {w1.dtype}, w2 {w2.dtype}",
            required="one type for x and the weights",
            hint="under autocast, cast the weights too: weight.to(x.dtype) keeps their gradients",
        )
    if offsets.dtype not in INDEX_TYPES:
        raise VariantPackError("DATA_TYPE", asked="tokens_per_expert", seen=offsets.dtype,
                               required=f"one of {list(INDEX_TYPES)}")  # fmt: skip
    if prob is not None and prob.dtype is not torch.float32:
        raise VariantPackError("DATA_TYPE", asked="probs of an expert MLP", seen=prob.dtype, required=torch.float32,
                               hint="probs.float(): their gradient is a sum in float32")  # fmt: skip
