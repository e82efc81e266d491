"""Logging: the standard logger "opfuse", silent by default, and OPFUSE_LOG for those who want to see it at once.

OPFUSE_LOG is a comma-separated list: a level ("info", "debug", ...) for everything, or components ("plan", "rules",
"execute") at INFO, "+plan" at DEBUG. It writes to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TextIO

from .ir.errors import GraphError, GraphNotSupportedError
from .plan import Plan
from .planner import left_unfused

ROOT = "opfuse"
COMPONENTS = ("plan", "rules", "execute")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORMAT = "%(levelname)s %(name)s: %(message)s"

root = logging.getLogger(ROOT)
root.addHandler(logging.NullHandler())
plan_log = logging.getLogger(f"{ROOT}.plan")
rules_log = logging.getLogger(f"{ROOT}.rules")
execute_log = logging.getLogger(f"{ROOT}.execute")


def configure(text: str, stream: TextIO | None = None) -> logging.Handler | None:
    """Shows what `text` (the syntax of OPFUSE_LOG) asks for on `stream`, stderr by default; None for empty text.

    Raises GraphError("LOG") for a word that is neither a level nor a component.
    """
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if unknown := [w for w in words if w not in LEVELS and w.removeprefix("+") not in COMPONENTS]:
        raise GraphError(
            "LOG",
            asked=f"OPFUSE_LOG={text!r}",
            seen=f"unknown {unknown}",
            required=f"levels {list(LEVELS)} and components {list(COMPONENTS)}, '+' before one for DEBUG",
        )
    if not words:
        return None
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    levels = [LEVELS[word] for word in words if word in LEVELS]
    if levels:
        root.addHandler(handler)
        root.setLevel(min(levels))
    for word in words:
        if word not in LEVELS:
            component = logging.getLogger(f"{ROOT}.{word.removeprefix('+')}")
            component.setLevel(logging.DEBUG if word.startswith("+") else logging.INFO)
            if not levels:  # else the record reaches the handler of the root
                component.addHandler(handler)
    return handler


def _heard(logger: logging.Logger) -> bool:
    """Whether a record of `logger` reaches a handler that does something: reasons cost more than the plan itself."""
    at: logging.Logger | None = logger
    while at is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False


def log_fallbacks(plan: Plan) -> None:
    """One record per node at which a rule was tried and that stays unfused, with the nearest rule's first reason.

    Extra fields: graph, node, rule, code, observed, required, arch, verdict, and `reasons` with every reason of every
    rule. INFO where nothing could fuse (the CPU), else WARNING.
    """
    level = logging.INFO if plan.arch == "cpu" else logging.WARNING
    if not rules_log.isEnabledFor(level) or not _heard(rules_log):
        return
    for node, verdicts in left_unfused(plan):
        nearest = verdicts[0]
        first = nearest.reasons[0] if nearest.reasons else None
        code = first.code if first else nearest.kind.name
        observed = first.observed if first else nearest.kind.value
        required = first.required if first else "a match that is chosen"
        rules_log.log(
            level,
            "%s: node %s stays unfused on %s: rule %s: %s: observed %s, required %s",
            plan.graph.name, node.name, plan.arch, nearest.rule, code, observed, required,
            extra={"graph": plan.graph.name, "node": node.name, "rule": nearest.rule, "code": code,
                   "observed": observed, "required": required, "arch": plan.arch, "verdict": nearest.kind.name,
                   "reasons": tuple((v.rule, r) for v in verdicts for r in v.reasons)},
        )  # fmt: skip


def log_build_fallback(plan: Plan, error: GraphNotSupportedError) -> None:
    """A kernel that a plan chose could not be built, so the next plan is taken."""
    rules_log.warning(
        "%s: plan %s is given up: %s",
        plan.graph.name,
        plan.name,
        error.seen,
        extra={
            "graph": plan.graph.name,
            "node": ", ".join(plan.graph.nodes[i].name for s in plan.fused_steps for i in s.nodes),
            "rule": ", ".join(s.rule or "" for s in plan.fused_steps),
            "code": error.code,
            "observed": error.seen,
            "required": error.required,
            "arch": plan.arch,
        },
    )


def _configure_from_environment() -> None:
    try:
        configure(os.environ.get("OPFUSE_LOG", ""))
    except GraphError as error:
        warnings.warn(str(error), stacklevel=2)


_configure_from_environment()
