"""Rule: one fusion as data. Files in `rules/` hold one each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..kernels.condition import Condition
from ..kernels.problem import ROLES, Role
from .pattern import Pattern


@dataclass(frozen=True, eq=False)
class Rule:
    """One fusion.

    `id` never changes meaning. `doc` is the algebra in one line. `patterns` are the forms in which it may be written,
    all with the same anchor op, the largest first. `conditions` are what the algebra itself requires of any kernel;
    what a kernel requires stands in its registry entry. `structure` says in words what pattern and legality already
    require, so that a support table can list everything.
    """

    id: str
    doc: str
    patterns: tuple[Pattern, ...]
    conditions: tuple[Condition, ...] = ()
    structure: tuple[str, ...] = ()

    @property
    def anchor_op(self) -> str:
        return self.patterns[0].anchor.op

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        return {role.name: role for role in ROLES[self.id]}
