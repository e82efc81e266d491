"""The support surface: what rules and kernels require, checked against a problem and listed as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..kernels.arch import Arch
from ..kernels.condition import Condition, Reason, failures
from ..kernels.problem import Problem
from ..kernels.registry import KERNELS, KernelEntry
from .rule import Rule
from .rules import RULES

NO_KERNEL = "NO_KERNEL"
NONDETERMINISTIC = "NONDETERMINISTIC"

CODES = {
    NO_KERNEL: "the table has no kernel for the rule",
    NONDETERMINISTIC: "the graph asks for bitwise repeatable results and the kernel does not give them",
}
"""Reasons that this module adds to those of the conditions."""

FIXED = frozenset(("ARCH", NONDETERMINISTIC))
"""Reasons that depend on the kernel and the request alone: asking for less of a fusion does not help."""


def rule_failures(rule: Rule, problem: Problem, arch: Arch) -> tuple[Reason, ...]:
    """Every condition of the rule itself that `problem` fails."""
    return failures(rule.conditions, problem, arch)


def kernel_failures(kernel: KernelEntry, problem: Problem, arch: Arch) -> tuple[Reason, ...]:
    """Every reason why `kernel` cannot serve `problem` on `arch`: its arch range, its conditions and determinism."""
    found = kernel.supports(problem, arch)
    if problem.deterministic and not kernel.deterministic and not any(r.code == NONDETERMINISTIC for r in found):
        found = (
            *found,
            Reason(
                NONDETERMINISTIC,
                f"{kernel.id} adds in an order that varies",
                "deterministic=False on the graph",
                "another kernel, or leave this part unfused",
            ),
        )
    return found


def first_failing(conditions: Sequence[Condition], problem: Problem, arch: Arch) -> Condition | None:
    """The first of `conditions` that `problem` fails."""
    for condition in conditions:
        if condition.applies(problem, arch) and not condition.holds(problem, arch):
            return condition
    return None


def holds(conditions: Sequence[Condition], problem: Problem, arch: Arch) -> bool:
    """Whether `problem` fails none of `conditions`."""
    return first_failing(conditions, problem, arch) is None


def no_kernel(rule: Rule) -> Reason:
    return Reason(
        NO_KERNEL,
        f"no kernel serves {rule.id}",
        "an entry of kernels.registry for the rule",
        "this part runs unfused on every architecture",
    )


@dataclass(frozen=True)
class SupportRow:
    """One line of the support table: a kernel of a rule, or a rule that no kernel serves yet (`kernel` None).

    `structure` and `requires` list, in words, what the pattern, the rule and the kernel require; `codes` the reason
    that each entry of `requires` gives when it fails.
    """

    rule: str
    algebra: str
    kernel: str | None
    doc: str
    arches: str
    evidence: str
    packages: tuple[str, ...]
    deterministic: bool | None
    structure: tuple[str, ...]
    codes: tuple[str, ...]
    requires: tuple[str, ...]


def support_table(kernels: Iterable[KernelEntry] = KERNELS, rules: Iterable[Rule] = RULES) -> tuple[SupportRow, ...]:
    """Every rule with every kernel that serves it, in rule order and then in kernel order."""
    listed = tuple(kernels)
    rows = []
    for rule in rules:
        serving = [k for k in listed if k.rule == rule.id]
        if not serving:
            rows.append(_row(rule, None, rule.conditions))
        rows.extend(_row(rule, kernel, (*rule.conditions, *kernel.conditions)) for kernel in serving)
    return tuple(rows)


def _row(rule: Rule, kernel: KernelEntry | None, conditions: tuple[Condition, ...]) -> SupportRow:
    return SupportRow(
        rule=rule.id,
        algebra=rule.doc,
        kernel=kernel.id if kernel else None,
        doc=kernel.doc if kernel else "",
        arches=str(kernel.arches) if kernel else "none",
        evidence=kernel.evidence if kernel else "none",
        packages=kernel.requires_packages if kernel else (),
        deterministic=kernel.deterministic if kernel else None,
        structure=rule.structure,
        codes=tuple(c.code for c in conditions),
        requires=tuple(c.requires for c in conditions),
    )
