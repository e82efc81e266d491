"""The order of cuDNN's verbs: how far a graph has come, and which verb is next."""

from __future__ import annotations

import enum

from .ir.errors import StateError


class Stage(enum.IntEnum):
    """How far a graph has come; each verb takes it one further."""

    DECLARED = 0
    VALIDATED = 1
    FROZEN = 2
    PLANNED = 3
    CHECKED = 4
    BUILT = 5


VERB_TO = {
    Stage.VALIDATED: "validate",
    Stage.FROZEN: "build_operation_graph",
    Stage.PLANNED: "create_execution_plans",
    Stage.CHECKED: "check_support",
    Stage.BUILT: "build_plans",
}


def require_stage(now: Stage, wanted: Stage, asked: str, graph: str, *, exactly: bool) -> None:
    """Raises StateError("VERB_ORDER") unless a graph is at `wanted`, or past it where that is allowed."""
    if now < wanted:
        missing = VERB_TO[Stage(now + 1)]
        raise StateError(
            "VERB_ORDER",
            asked=f"{asked}()",
            seen=f"graph {graph} is {now.name.lower()}",
            required=f"{missing}() first",
            hint=f"call {missing}(), or build() for every verb",
        )
    if exactly and now > wanted:
        following = f"{VERB_TO[Stage(now + 1)]}()" if now < Stage.BUILT else "execute()"
        raise StateError(
            "VERB_ORDER",
            asked=f"{asked}()",
            seen=f"graph {graph} is {now.name.lower()} already",
            required="each verb once",
            hint=f"{following} is next",
        )
