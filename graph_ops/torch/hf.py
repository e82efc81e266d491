"""Hugging Face transformers: an experts implementation named "opfuse".

    opfuse.graph_ops.torch.hf.register()
    config._experts_implementation = "opfuse"          # before the model is made; or experts_implementation="opfuse"

It takes the experts of every model that transformers routes through its experts registry and whose gate is
silu(gate) * up without biases (Qwen3-MoE, Mixtral, DeepSeek, OLMoE, ...), in either weight layout. The router's weights
multiply the activation instead of the output: the same function, rounded elsewhere.

As under transformers' own grouped_mm, the experts compute in the type of their weights, under autocast too: float32
weights stay float32, and the fused kernels want bfloat16 or float16 (`dtype=torch.bfloat16`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..ir.errors import GraphNotSupportedError
from ..ir.layouts import GluLayout
from .configuration import check_options
from .mlp import grouped_mlp
from .routing import combine, dispatch, route, row_probs

NAME = "opfuse"

SILU = ("silu", "swish")


def register(name: str = NAME, *, recipe: str | None = None, multiple_of: int = 1) -> None:
    """Puts the implementation into transformers' registry under `name`, in place of one of that name.

    `recipe` and `multiple_of` as grouped_mlp's; each expert's rows are padded to that multiple. Raises VariantPackError
    for one that no call could serve, GraphNotSupportedError without a transformers with that registry (5.24 is tested).
    """
    check_options(recipe, multiple_of)
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise GraphNotSupportedError("TRANSFORMERS", asked=f"experts implementation {name!r}", seen=error,
                                     required="a transformers with an experts registry; 5.24 is tested",
                                     hint="pip install -U transformers") from error  # fmt: skip

    ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(experts_forward, recipe=recipe, multiple_of=multiple_of))


def experts_forward(
    self: Any,
    hidden_states: torch.Tensor,  # (T, H)
    top_k_index: torch.Tensor,  # (T, k)
    top_k_weights: torch.Tensor,  # (T, k)
    *,
    recipe: str | None = None,
    multiple_of: int = 1,
) -> torch.Tensor:
    """(T, H) -> (T, H), as the experts module of a transformers model. Ids of num_experts or more (of other ranks) are
    left out. Raises GraphNotSupportedError for experts of another form.
    """
    check_experts(self)
    w1, w2 = self.gate_up_proj, self.down_proj
    if self.is_transposed:
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    layout = GluLayout.concatenated() if self.is_concatenated else GluLayout.interleaved(1)
    routing = route(top_k_index, self.num_experts, multiple_of=multiple_of)
    rows = dispatch(hidden_states.to(w1.dtype), routing)  # (M, H)
    y = grouped_mlp(rows, routing.tokens_per_expert, w1, w2, row_probs(top_k_weights, routing), glu_layout=layout,
                    recipe=recipe, multiple_of=multiple_of, allow_tail=True)  # fmt: skip
    return combine(y, routing).to(hidden_states.dtype)


def check_experts(module: Any) -> None:
    """Raises GraphNotSupportedError, naming what is different, for experts that are not silu(gate)*up without bias."""
    from transformers.integrations.moe import _default_apply_gate

    found = []
    if not getattr(module, "has_gate", True):
        found.append("no gate")
    if getattr(module, "has_bias", False):
        found.append("biases")
    if getattr(module, "has_post_expert_norm", False):
        found.append("a norm after each expert")
    if type(module)._apply_gate is not _default_apply_gate:
        found.append(f"a gate of its own, {type(module).__name__}._apply_gate")
    act = getattr(module, "act_fn", None)
    if not isinstance(act, nn.SiLU) and getattr(act, "__name__", type(act).__name__).lower() not in (
        *SILU, "siluactivation",
    ):  # fmt: skip
        found.append(f"activation {act}")
    if found:
        raise GraphNotSupportedError(
            "EXPERTS_FORM",
            asked=f"experts implementation {NAME!r} for {type(module).__name__}",
            seen=", ".join(found),
            required="gated experts, silu(gate) * up, without biases",
            hint="experts_implementation='grouped_mm' or 'eager' for this model",
        )


__all__ = ["check_experts", "experts_forward", "register"]
