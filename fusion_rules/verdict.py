"""What the fusion pass says of each rule at each place: four verdicts that stay apart."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
class Told:
    """Verdicts that are known already, as `FusionReport.tell` gives them."""

    verdicts: tuple[Verdict, ...] = ()

    def __call__(self) -> tuple[Verdict, ...]:
        return self.verdicts


@dataclass(frozen=True, eq=False)
class FusionReport:
    """Everything that the pass decided for one arch.

    `graph` is the raised graph, to which node indices in `matches` and `verdicts` refer. A plan needs the matches
    alone, so `tell` works out the verdicts when they are first asked for: by a reader, a comparison or a copy.
    """

    graph: OpGraph
    arch: str
    raisings: tuple[Raising, ...]
    matches: tuple[FusedMatch, ...]
    tell: Callable[[], tuple[Verdict, ...]] = field(default=Told(), repr=False)

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What is said of every rule where it could begin: those of one anchor stand together, in rule order."""
        return self.tell()

    @property
    def _decided(self) -> tuple[Any, ...]:
        return self.graph, self.arch, self.raisings, self.matches

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FusionReport):
            return NotImplemented
        return self is other or (self._decided == other._decided and self.verdicts == other.verdicts)

    def __reduce__(self) -> tuple[Any, ...]:
        return FusionReport, (*self._decided, Told(self.verdicts))
