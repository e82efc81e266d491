"""What is compiled into the kernels of a router's choices (token_rows.py, route_choices.py), and how far they go.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

WORD_BYTES = 16
"""Rows are multiples of it, and lie at multiples of it."""
MOST_CHOICES = 32
"""Choices of one token whose rows are added up: each has an address in registers."""
MOST_ROWS = 2**31 - 1

CHUNK = 1024
"""Choices that one block of route_choices.py counts and places."""
MOST_PLACED = 2**18
"""Choices of all tokens: each block reads the counts of all, 67 MB for 256 chunks and 256 counters."""
BINS = (64, 256, 1024)
"""Counters of a warp that can be compiled in: for experts, for no expert, and for lanes without a choice."""


@dataclass(frozen=True)
class TokenRowsConfig:
    """`dtype`: of the rows that are added up, bf16, fp16 or fp32; None: the copy, of any type. `loads`: 16-byte loads
    of a thread's batch."""

    top_k: int
    dtype: str | None
    threads: int = 128
    loads: int = 8

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RouteConfig:
    """The width of an id, 32 or 64 bits, and one of BINS."""

    id_bits: int
    bins: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bins_for(experts: int) -> int | None:
    """The fewest of BINS that serve so many experts; None where none do."""
    return next((bins for bins in BINS if experts + 2 <= bins), None)
