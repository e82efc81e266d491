"""GPU architectures that a plan can be made for, with the rates that cost estimates use. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ..graph_ops.ir.errors import GraphNotSupportedError


@dataclass(frozen=True)
class Arch:
    """One target. `capability` is CUDA's (major, minor), None for the CPU.

    Rates are what a plan's estimates assume: dense bf16 FLOP/s, memory bytes/s (reads and writes counted), and the
    time of one launch. sm90's were measured on an H200 (2026-11-30: 716 to 804 TFLOP/s, copy 4.24 TB/s); the others
    are data-sheet rates of B200, B300 and Rubin scaled by the same ratio and say nothing measured.
    """

    name: str
    capability: tuple[int, int] | None
    bf16_flops: float
    memory_bytes_per_second: float
    launch_seconds: float

    @property
    def is_cuda(self) -> bool:
        return self.capability is not None

    def __str__(self) -> str:
        return self.name


ARCHES: dict[str, Arch] = {
    a.name: a
    for a in (
        Arch("cpu", None, 5e10, 2e10, 5e-6),
        Arch("sm80", (8, 0), 2.5e14, 1.8e12, 4e-6),
        Arch("sm89", (8, 9), 1.4e14, 0.9e12, 4e-6),
        Arch("sm90", (9, 0), 7.9e14, 4.24e12, 4e-6),
        Arch("sm100", (10, 0), 1.8e15, 7.0e12, 4e-6),
        Arch("sm103", (10, 3), 1.9e15, 7.0e12, 4e-6),
        Arch("sm107", (10, 7), 3.0e15, 1.1e13, 4e-6),
        Arch("sm110", (11, 0), 2.5e14, 2.4e11, 4e-6),
        Arch("sm120", (12, 0), 2.0e14, 1.5e12, 4e-6),
        Arch("sm121", (12, 1), 1.0e14, 2.5e11, 4e-6),
    )
}
"""Every architecture by name, oldest first."""


def parse_arch(text: str) -> Arch:
    """The architecture named `sm90`, `sm_90`, `sm90a`, `9.0` or `cpu`. Raises GraphNotSupportedError for another."""
    name = text.lower().replace("sm_", "sm").rstrip("af") if text.lower().startswith("sm") else text.lower()
    if name.replace(".", "", 1).isdigit() and "." in name:
        name = "sm" + name.replace(".", "")
    if name not in ARCHES:
        raise GraphNotSupportedError("ARCH_UNKNOWN", asked=f"arch {text!r}", required=f"one of {list(ARCHES)}")
    return ARCHES[name]


def arch_of_capability(capability: tuple[int, int]) -> Arch:
    """The architecture of a CUDA compute capability; one that is not listed is GraphNotSupportedError."""
    for arch in ARCHES.values():
        if arch.capability == capability:
            return arch
    asked = f"compute capability {capability}"
    raise GraphNotSupportedError("ARCH_UNKNOWN", asked=asked, required=f"one of {list(ARCHES)}")


@dataclass(frozen=True)
class ArchRange:
    """Compute capabilities from `low` (included) to `high` (excluded): never an open end, never equality by luck."""

    low: tuple[int, int]
    high: tuple[int, int]

    def __contains__(self, arch: Arch) -> bool:
        return arch.capability is not None and self.low <= arch.capability < self.high

    def __str__(self) -> str:
        return ", ".join(a.name for a in ARCHES.values() if a in self)
