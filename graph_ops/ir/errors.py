"""Errors as an interface: what was asked, seen, required, what to do, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SourceLocation:
    """The user's line that created a tensor or node."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class OpfuseError(Exception):
    """Base of every error that the library raises on purpose. `code` is stable and greppable."""

    def __init__(
        self,
        code: str,
        *,
        asked: object = None,
        seen: object = None,
        required: object = None,
        hint: str | None = None,
        where: object = None,
    ) -> None:
        self.code, self.asked, self.seen, self.required, self.hint, self.where = (
            code,
            asked,
            seen,
            required,
            hint,
            where,
        )
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = (("", self.asked), ("seen ", self.seen), ("required ", self.required), ("hint: ", self.hint))
        text = "; ".join(f"{label}{value}" for label, value in parts if value is not None)
        return f"{self.code}: {text}" + (f" ({self.where})" if self.where is not None else "")


class GraphError(OpfuseError, ValueError):
    """The graph itself is malformed."""


class VerificationError(GraphError):
    """The verifier found violations; `violations` has every one of them."""

    def __init__(self, violations: tuple[GraphError, ...]) -> None:
        self.violations = violations
        first = violations[0]
        super().__init__(first.code, asked=first.asked, seen=first.seen, required=first.required, hint=first.hint,
                         where=first.where)  # fmt: skip

    def __str__(self) -> str:
        violations = getattr(self, "violations", ())
        return "\n".join(OpfuseError.__str__(v) for v in violations)


class StateError(OpfuseError, RuntimeError):
    """A verb was called in the wrong order, or on a frozen graph."""


class GraphNotSupportedError(OpfuseError):
    """No plan serves the request (cuDNN: `cudnnGraphNotSupportedError`); carries every reason in its text."""


class VariantPackError(OpfuseError, ValueError):
    """A buffer is missing, unknown, or not what its tensor declares. Raised before anything is launched."""


class WorkspaceError(OpfuseError, ValueError):
    """The workspace is missing, too short, misaligned or overlaps a buffer."""
