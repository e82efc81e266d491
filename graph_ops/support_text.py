"""The support table as text, as Markdown (the README's table) and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..fusion_rules.support import SupportRow

EVIDENCE: Mapping[str, str] = {
    "measured": "run and measured",
    "compiled": "compiles, never run",
    "none": "no kernel yet: runs unfused",
}
"""How far a kernel is known to work, in words."""


def text(rows: Sequence[SupportRow]) -> str:
    """Every row with its structure and requirements, for reading in a terminal."""
    return "\n\n".join("\n".join(_paragraph(row)) for row in rows)


def _paragraph(row: SupportRow) -> Iterator[str]:
    yield f"{row.rule}: {row.algebra}"
    if row.kernel is None:
        yield f"  {EVIDENCE['none']}"
    else:
        yield f"  kernel {row.kernel}: {row.doc}"
        yield f"  on {row.arches}; {EVIDENCE[row.evidence]}; {'' if row.deterministic else 'not '}bitwise repeatable"
        if row.packages:
            yield f"  needs {', '.join(row.packages)}"
    yield from (f"  pattern: {line}" for line in row.structure)
    yield from (f"  {code}: {required}" for code, required in zip(row.codes, row.requires, strict=True))


def markdown(rows: Sequence[SupportRow]) -> str:
    """One line a row; `opfuse rules` has the requirements themselves."""
    lines = ["| rule | fuses | kernel | arches | evidence | conditions |", "|---|---|---|---|---|---|"]
    for row in rows:
        kernel = "none" if row.kernel is None else f"`{row.kernel}`"
        cells = (f"`{row.rule}`", row.algebra, kernel, row.arches, EVIDENCE[row.evidence], str(len(row.codes)))
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def as_json(rows: Sequence[SupportRow]) -> str:
    """The rows as a JSON list."""
    return json.dumps([asdict(row) for row in rows], indent=1)


FORMATS: Mapping[str, Callable[[Sequence[SupportRow]], str]] = {"text": text, "markdown": markdown, "json": as_json}
"""The formats of `opfuse rules`."""
