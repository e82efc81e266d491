"""What explain says of the expert MLPs in a compiled graph that are opfuse's own ops already: their plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..configuration import MXFP8, UNQUANTIZED, MlpConfig, configuration_of
from ..graphs import Backward, Fc1Backward, Fc2, Forward, Key
from ..registration import NAMESPACE

if TYPE_CHECKING:
    from ...explain import Explanation
    from ...target import ArchLike

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class OwnCall:
    """Equal calls of one op of an expert MLP in one graph: how many, and the plan of the graph that each runs."""

    part: str
    op: str
    count: int
    explanation: Explanation

    @property
    def fused_count(self) -> int:
        """Launches of fused kernels by these calls."""
        return self.count * len(self.explanation.fused_steps)


def own_calls(graph: fx.Graph, part: str, arch: ArchLike | None) -> list[OwnCall]:
    """The calls of expert MLPs in a graph of AOTAutograd, planned for `arch` (default: where their tensors are)."""
    seen = Counter(
        (_name(node), KEYS[_name(node)](_arguments(node))) for node in graph.nodes
        if node.op == "call_function" and _name(node) in KEYS
    )  # fmt: skip
    return [OwnCall(part, op, count, key.declare().explain(arch)) for (op, key), count in seen.items()]


def _name(node: fx.Node) -> str:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
        return ""
    return str(target._schema.name).removeprefix(f"{NAMESPACE}::")


def _arguments(node: fx.Node) -> Arguments:
    """By name, tensors as the fakes that stand for them."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: value.meta["val"] if isinstance(value, fx.Node) else value for name, value in given.items()}


def _config(a: Arguments, rows: str, recipe: str = UNQUANTIZED) -> MlpConfig:
    return configuration_of(
        a[rows], a["offsets"], a.get("w1"), a.get("w2"), a.get("prob"), a.get("act", "swiglu"),
        a.get("activation_parameters", ()), a.get("glu_layout", "concatenated"), recipe, a["multiple_of"],
    )  # fmt: skip


KEYS: Mapping[str, Callable[[Arguments], Key]] = {
    "grouped_mlp": lambda a: Forward(_config(a, "x", a["recipe"]), False, False),
    "grouped_mlp_fc1": lambda a: Forward(_config(a, "x"), True, True, has_fc2=False),
    "grouped_mlp_fc2": lambda a: Fc2(_config(a, "act_rows")),
    "grouped_mlp_fc2_backward": lambda a: Backward(
        _config(a, "dy"), False, False, a["dw2"], a["dprob"], has_act=a["act_rows"] is not None, dh=a["dh"]
    ),
    "grouped_mlp_fc1_backward": lambda a: Fc1Backward(_config(a, "dh"), a["dx"], a["dw1"]),
    "grouped_mlp_mxfp8_forward": lambda a: Forward(_config(a, "x", MXFP8), True, a["save_act"]),
    "grouped_mlp_mxfp8_backward": lambda a: Backward(
        _config(a, "dy", MXFP8), a["dx"], a["dw1"], a["dw2"], a["dprob"], has_act=a["act_codes"] is not None
    ),
}
"""The graph that each op runs, from its arguments."""

__all__ = ["OwnCall", "own_calls"]
