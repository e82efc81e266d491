"""Support conditions as data: what a kernel requires, how to read what is there, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .arch import Arch
from .problem import Problem


@dataclass(frozen=True)
class Reason:
    """Why something was left alone: one failed condition, with what was seen and what is required."""

    code: str
    observed: Any
    required: str
    hint: str = ""
    where: str = ""

    def __str__(self) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        where = f" ({self.where})" if self.where else ""
        return f"{self.code}: {self.observed}, requires {self.required}{hint}{where}"


@dataclass(frozen=True)
class Condition:
    """One requirement of a kernel or rule.

    `observed` reads what the problem has (shown in reasons); `holds` judges the same problem. `applies` tells for
    which problems the condition is asked at all. `row` names the row of the contract that it implements.
    """

    code: str
    requires: str
    observed: Callable[[Problem, Arch], Any]
    holds: Callable[[Problem, Arch], bool]
    hint: str = ""
    applies: Callable[[Problem, Arch], bool] = lambda problem, arch: True
    row: str = ""

    def failure(self, problem: Problem, arch: Arch) -> Reason | None:
        """The reason why `problem` fails this condition, None where it holds or does not apply."""
        if not self.applies(problem, arch) or self.holds(problem, arch):
            return None
        return Reason(self.code, self.observed(problem, arch), self.requires, self.hint)


def failures(conditions: Sequence[Condition], problem: Problem, arch: Arch) -> tuple[Reason, ...]:
    """Every failed condition, in declaration order: never only the first."""
    failed = [c for c in conditions if c.applies(problem, arch) and not c.holds(problem, arch)]
    return tuple([Reason(c.code, c.observed(problem, arch), c.requires, c.hint) for c in failed])
