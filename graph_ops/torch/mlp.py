"""The expert MLP as a function and as a module, on rows that are already grouped by expert.

Axis letters: M rows, H hidden, I intermediate, L experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..ir.errors import VariantPackError
from ..ir.layouts import GluLayout
from ..ir.nodes.glu import ACTIVATION_PARAMETERS
from ..ir.op import OpSpec
from ..ir.ops import OPS
from . import ops  # noqa: F401  registers torch.ops.opfuse
from .configuration import (
    INDEX_TYPES,
    MXFP8,
    UNQUANTIZED,
    check_arguments,
    check_call,
    check_layout,
    check_options,
    check_sizes,
    check_transforms,
    configuration_of,
)
from .graphs import Backward, Fc1Backward, Fc2, Forward, Key
from .layouts import as_layout, check_tag, convert_glu_layout, tag, tagged

if TYPE_CHECKING:
    from ..explain import Explanation
    from ..target import ArchLike

_GLU: OpSpec = OPS["glu"]
_DEFAULTS = {attribute.name: attribute.default for attribute in _GLU.attributes}

_LAYOUT_KEY = "glu_layout"
"""Where a state_dict's metadata says which layout its weights have."""


def activation_parameters(act: str, given: Mapping[str, float]) -> tuple[float, ...]:
    """The parameters of `act` in order, defaults filled in. VariantPackError for one that `act` does not read."""
    names = ACTIVATION_PARAMETERS.get(act)
    if names is None:
        raise VariantPackError("ACT", asked=f"act {act!r}", required=f"one of {list(ACTIVATION_PARAMETERS)}")
    if unused := sorted(set(given) - set(names)):
        raise VariantPackError(
            "ARGUMENT_UNUSED", asked=f"act {act} with {unused}", required=f"parameters of {act}: {list(names)}"
        )
    return tuple(given[name] if name in given else _DEFAULTS[name] for name in names)


def grouped_mlp(
    x: torch.Tensor,  # (M, H)
    tokens_per_expert: torch.Tensor,  # (L,)
    w1: torch.Tensor,  # (L, 2I, H)
    w2: torch.Tensor,  # (L, H, I)
    probs: torch.Tensor | None = None,  # (M,)
    *,
    act: str = "swiglu",
    glu_layout: GluLayout | str = "concatenated",
    recipe: str | None = None,
    multiple_of: int = 1,
    allow_tail: bool = False,
    save: str = "activation",
    **parameters: float,
) -> torch.Tensor:
    """(M, H) -> (M, H): `probs * glu(x w1^T) w2^T`, each row through its expert; differentiable by x, w1, w2, probs.

    Rows are grouped by expert: the first `tokens_per_expert[0]` are the first expert's (int32 or int64, on x's device).
    Weights are outputs first, of any strides; `glu_layout` is the order of w1's 2I rows, never guessed. `act` and
    `parameters` as Graph.glu. `recipe`: None, or "mxfp8" for activations and gradients in E4M3 codes. `multiple_of`: a
    promise that every expert's rows are one, which some fused kernels need (256 on Blackwell). `allow_tail`: rows past
    the sum belong to no expert; their outputs and gradients are zero.

    `save`: what is held for the backward beside x and the weights: "activation": h (M, 2I) and the activation (M, I);
    "preactivation": h, from which the backward computes the activation again; "inputs": neither. At its peak the
    backward holds the gradients of x, w1, w2 and h; h and the activation are gone by then (not under a recipe).

    On a GPU nothing is read on the host, so token counts are not checked there, and forward and backward can be part of
    a CUDA graph: after one call outside it, which builds the kernels, one capture serves every `tokens_per_expert` of
    as many rows. Declared types hold under autocast too. Raises VariantPackError; StateError in capture before a build;
    GraphNotSupportedError within forward-mode differentiation or a transform of torch.func, which custom ops lack.
    """
    check_transforms()
    given = {"x": x, "tokens_per_expert": tokens_per_expert, "w1": w1, "w2": w2}
    check_arguments(given if probs is None else {**given, "probs": probs}, {"allow_tail": allow_tail}, parameters,
                    multiple_of)  # fmt: skip
    layout = as_layout(glu_layout)
    check_tag(w1, layout, "w1 of grouped_mlp")
    check_options(recipe, multiple_of, save)
    if tokens_per_expert.dtype not in INDEX_TYPES:
        grad = " that requires grad" if tokens_per_expert.requires_grad else ""
        raise VariantPackError("DATA_TYPE", asked="tokens_per_expert", seen=f"{tokens_per_expert.dtype}{grad}",
                               required="int32 or int64: counts have no gradient")  # fmt: skip
    if probs is not None and probs.is_complex():
        raise VariantPackError("DATA_TYPE", asked="probs", seen=probs.dtype, required="real numbers")
    if tokens_per_expert.dim() != 1:
        raise VariantPackError("RANK", asked="tokens_per_expert", seen=f"shape {tuple(tokens_per_expert.shape)}",
                               required="(L,)")  # fmt: skip
    offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)  # (L,)
    prob = None if probs is None else probs.float()
    choices = (act, activation_parameters(act, parameters), str(layout), multiple_of, allow_tail)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w1, w2, prob))
    if not learns or save == "inputs":
        y: torch.Tensor = torch.ops.opfuse.grouped_mlp(x, offsets, w1, w2, prob, *choices, recipe or UNQUANTIZED)
    elif recipe == MXFP8:
        y = torch.ops.opfuse.grouped_mlp_mxfp8_forward(x, offsets, w1, w2, prob, *choices,
                                                       save == "activation" and w2.requires_grad)[0]  # fmt: skip
    else:
        check_call(x, offsets, w1, w2, prob, *choices[:3], UNQUANTIZED, multiple_of)
        fixed = None if prob is None else prob.detach()  # its gradient comes from fc2
        h, act_rows = torch.ops.opfuse.grouped_mlp_fc1(x, offsets, w1, fixed, *choices)
        y = torch.ops.opfuse.grouped_mlp_fc2(h, act_rows, offsets, w2, prob, *choices, save == "activation")
    return y


class GroupedMLP(nn.Module):
    """The experts of a layer, with Megatron's call `(permuted_hidden, tokens_per_expert, permuted_probs) -> (y, bias)`.

    `glu_layout` is the order in which the kernels read w1's rows, `checkpoint_layout` that of state_dict, which never
    changes: saving and loading convert. A state_dict that says it has another layout is converted from that one; one
    that says nothing (safetensors) is taken to have `checkpoint_layout`. An optimizer's state is not converted: it has
    w1's own order, so resume with the same `glu_layout`, or convert its moments too.
    Other options as grouped_mlp's. The bias is always None: these experts have none. (torch.cuda.make_graphed_callables
    takes functions of tensors to tensors: give it a module that returns `experts(*args)[0]`.)
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        act: str = "swiglu",
        glu_layout: GluLayout | str | None = None,
        checkpoint_layout: GluLayout | str = "concatenated",
        recipe: str | None = None,
        multiple_of: int = 1,
        allow_tail: bool = False,
        save: str = "activation",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parameters: float,
    ) -> None:
        super().__init__()
        check_sizes(num_experts, hidden_size, intermediate_size)
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.checkpoint_layout = as_layout(checkpoint_layout)
        self.glu_layout = self.checkpoint_layout if glu_layout is None else as_layout(glu_layout)
        self.act, self.parameters_of_act = act, dict(parameters)
        activation_parameters(act, parameters)
        _GLU.complete({"act": act, **parameters})  # raises for a value that no graph takes
        check_options(recipe, multiple_of, save)
        for layout in (self.checkpoint_layout, self.glu_layout):
            check_layout(str(layout), intermediate_size)
        self.recipe, self.multiple_of, self.allow_tail, self.save = recipe, multiple_of, allow_tail, save
        made = {"device": device, "dtype": dtype}
        self.w1 = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size, **made))  # type: ignore[arg-type]
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size, **made))  # type: ignore[arg-type]
        tag(self.w1, self.glu_layout)
        self.reset_parameters()
        self.register_state_dict_post_hook(_to_checkpoint)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_from_checkpoint)  # type: ignore[no-untyped-call]

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan_in), as torch.nn.Linear."""
        for weight in (self.w1, self.w2):
            bound = 1 / math.sqrt(weight.shape[2]) if weight.shape[2] else 0.0
            nn.init.uniform_(weight, -bound, bound)

    def forward(
        self,
        permuted_hidden_states: torch.Tensor,  # (M, H)
        tokens_per_expert: torch.Tensor,  # (L,)
        permuted_probs: torch.Tensor | None = None,  # (M,)
    ) -> tuple[torch.Tensor, None]:
        """(M, H) -> (M, H), and no bias."""
        y = grouped_mlp(
            permuted_hidden_states, tokens_per_expert, self.w1, self.w2, permuted_probs, act=self.act,
            glu_layout=self.glu_layout, recipe=self.recipe, multiple_of=self.multiple_of, allow_tail=self.allow_tail,
            save=self.save, **self.parameters_of_act,
        )  # fmt: skip
        return y, None

    def explain(self, arch: ArchLike | None = None, *, probs: bool = True) -> dict[str, Explanation]:
        """What fuses in each graph of a step on `arch` (default: where the weights are), and why the rest not.

        "forward" and "backward"; without a recipe these end at the activation and at the gradient of h, and "fc2" and
        "fc1_backward" go on from there.
        """
        offsets = torch.empty(self.num_experts, dtype=torch.int32, device=self.w1.device)
        x = self.w1.new_empty(0, self.hidden_size)
        given = (
            x, offsets, self.w1, self.w2, x.new_empty(0, dtype=torch.float32) if probs else None, self.act,
            activation_parameters(self.act, self.parameters_of_act), str(self.glu_layout),
            self.recipe or UNQUANTIZED, self.multiple_of,
        )  # fmt: skip
        check_call(*given)
        config = configuration_of(*given)
        saves_act = self.save == "activation"
        whole = self.recipe == MXFP8
        graphs: dict[str, Key] = {
            "forward": Forward(config, True, saves_act or not whole, has_fc2=whole),
            "backward": Backward(config, whole, whole, True, probs, saves_act, dh=not whole),
        }
        if not whole:
            graphs |= {"fc2": Fc2(config), "fc1_backward": Fc1Backward(config, True, True)}
        return {name: key.declare().explain(arch) for name, key in graphs.items()}

    def extra_repr(self) -> str:
        return (
            f"{self.num_experts} experts, {self.hidden_size} -> {self.intermediate_size} -> {self.hidden_size}, "
            f"act={self.act}, glu_layout={self.glu_layout}, checkpoint_layout={self.checkpoint_layout}, "
            f"recipe={self.recipe}"
        )


def _to_checkpoint(module: GroupedMLP, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    metadata[_LAYOUT_KEY] = str(module.checkpoint_layout)
    if module.glu_layout != module.checkpoint_layout:
        state[prefix + "w1"] = convert_glu_layout(state[prefix + "w1"], module.glu_layout, module.checkpoint_layout)


def _from_checkpoint(module: GroupedMLP, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    weight = state.get(prefix + "w1")
    if weight is None or weight.shape != module.w1.shape:
        return  # load_state_dict itself names what is missing or has another shape
    held = as_layout(metadata.get(_LAYOUT_KEY) or tagged(weight) or module.checkpoint_layout)
    check_tag(weight, held, f"{prefix}w1 of a state_dict that says it is {held}")
    if held == module.glu_layout:
        return
    state[prefix + "w1"] = convert_glu_layout(weight, held, module.glu_layout)


__all__ = ["GroupedMLP", "activation_parameters", "grouped_mlp"]
