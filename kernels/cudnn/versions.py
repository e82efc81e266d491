"""Which cudnn-frontend and CuTe DSL are installed, and what is known of that pair. Imports neither of them."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import lru_cache

FRONTEND = "nvidia-cudnn-frontend"
DSL = "nvidia-cutlass-dsl"

Version = tuple[int, int, int, int]


def parse_version(text: str) -> Version:
    """(major, minor, patch, 0), with -1 last for a pre-release, which sorts before its release.

    Raises ValueError where `text` does not start with a version number.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(.*)", text)
    if found is None:
        raise ValueError(f"not a version: {text!r}")
    major, minor, patch, rest = found.groups()
    return int(major), int(minor), int(patch or 0), -1 if re.match(r"\.?(a|b|rc|dev)", rest) else 0


@dataclass(frozen=True)
class Pair:
    """Installed versions, None where the package is absent."""

    frontend: str | None
    dsl: str | None

    def __str__(self) -> str:
        return f"cudnn-frontend {self.frontend or 'absent'} with cutlass-dsl {self.dsl or 'absent'}"


@dataclass(frozen=True)
class VersionRange:
    """Versions from `low` (included) to `high` (excluded)."""

    low: str
    high: str

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and parse_version(self.low) <= parse_version(text) < parse_version(self.high)

    def __str__(self) -> str:
        return f"{self.low} to below {self.high}"


_ANY = VersionRange("0.0", "9999.0")


@dataclass(frozen=True)
class KnownBad:
    """A pair that must not be used: by name, with what goes wrong and who reported it."""

    name: str
    frontend: VersionRange
    dsl: VersionRange
    why: str
    source: str


_REPOSITORY = "https://github.com/NVIDIA/cudnn-frontend"

KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad("frontend-below-1.32", VersionRange("0.0", "1.32.0"), _ANY,
             "BF16 dGeGLU multiplies by the clamped value where a 0/1 mask belongs", f"{_REPOSITORY}/pull/1187"),
    KnownBad("dsl-4.5-dbias", _ANY, VersionRange("4.5.0", "4.6.0"),
             "dbias spills to local memory and takes ten times as long", f"{_REPOSITORY}/pull/322"),
    KnownBad("dsl-4.6-fp8", _ANY, VersionRange("4.6.0", "4.6.2"),
             "libNVVM fails on every FP8 dGLU kernel", f"{_REPOSITORY}/issues/397"),
    KnownBad("dsl-4.8-prerelease", _ANY, VersionRange("4.8.0a0", "4.8.0"),
             "GEMM epilogues give wrong numbers with some daily builds", f"{_REPOSITORY}/issues/857"),
    KnownBad("dsl-below-4.8", VersionRange("1.32.0", "9999.0"), VersionRange("0.0", "4.8.0"),
             "cudnn-frontend 1.32 needs cutlass-dsl 4.8.0 or newer", "its package metadata"),
)  # fmt: skip
"""Pairs known to be wrong, most telling first."""

TESTED = {FRONTEND: VersionRange("1.32.0", "1.33.0"), DSL: VersionRange("4.8.0", "4.9.0")}
"""What the adapters were compiled against."""


@lru_cache(maxsize=1)
def installed() -> Pair:
    """The installed pair. Read once a process: reading metadata costs more than planning a graph."""
    from importlib.metadata import PackageNotFoundError, version

    def read(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return Pair(read(FRONTEND), read(DSL))


@lru_cache(maxsize=8)
def known_bad(pair: Pair) -> KnownBad | None:
    """The entry of KNOWN_BAD that `pair` falls under. An absent package is not bad: planning needs neither.

    Each pair is looked up once: every plan asks, and parsing versions was half of the support check.
    """
    if pair.frontend is None or pair.dsl is None:
        return None
    return next((bad for bad in KNOWN_BAD if pair.frontend in bad.frontend and pair.dsl in bad.dsl), None)


def unknown(pair: Pair) -> tuple[str, ...]:
    """Packages of `pair` that are newer than what was tested, as text."""
    given = {FRONTEND: pair.frontend, DSL: pair.dsl}
    return tuple(
        f"{name} {text} (tested: {TESTED[name]})"
        for name, text in given.items()
        if text is not None and parse_version(text) >= parse_version(TESTED[name].high)
    )


@lru_cache(maxsize=8)
def warn_if_unknown(pair: Pair) -> None:
    """Warns once per pair where a package is newer than what was tested."""
    if newer := unknown(pair):
        warnings.warn(f"opfuse was not tested with {', '.join(newer)}; fused results may differ", stacklevel=3)
