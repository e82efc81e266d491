"""What the fusion pass says of each rule at each place: four verdicts that stay apart."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from ..graph_ops.ir.graph import OpGraph
from ..kernels.condition import Reason
from ..kernels.problem import Problem


class VerdictKind(enum.Enum):
    """How a rule fared at one place of the graph."""

    NO_MATCH = "no structural match"
    UNSUPPORTED = "matched but unsupported"
    NOT_CHOSEN = "supported but not chosen"
    CHOSEN = "chosen"


@dataclass(frozen=True)
class Verdict:
    """One rule at one place.

    `anchor` is the index of the node at which the rule was tried, `nodes` those that matched (for NO_MATCH: those that
    fitted before the first that did not, the nearest miss). `kernel` is the id of the kernel judged, None where no
    kernel was reached. `reasons` has everything that failed.
    """

    kind: VerdictKind
    rule: str
    anchor: int
    nodes: tuple[int, ...]
    reasons: tuple[Reason, ...] = ()
    kernel: str | None = None


@dataclass(frozen=True)
class FusedMatch:
    """A chosen fusion: `nodes` of the raised graph become one launch of `kernel`. `roles` maps roles to tensor uids."""

    rule: str
    kernel: str
    nodes: tuple[int, ...]
    roles: Mapping[str, int]
    problem: Problem


@dataclass(frozen=True)
class Raising:
    """A composition of pointwise nodes that became one node: indices in the graph as declared, and its new name."""

    rule: str
    nodes: tuple[int, ...]
    into: str


@dataclass(frozen=True)
class FusionReport:
    """Everything that the pass decided for one arch.

    `graph` is the raised graph, to which node indices in `matches` and `verdicts` refer. The verdicts of one anchor
    stand together, in rule order.
    """

    graph: OpGraph
    arch: str
    raisings: tuple[Raising, ...]
    matches: tuple[FusedMatch, ...]
    verdicts: tuple[Verdict, ...]
