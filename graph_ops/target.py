"""What a graph is planned for, and the device that it then runs on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, Union

from ..kernels.arch import ARCHES, Arch, arch_of_capability, parse_arch
from .ir.errors import GraphNotSupportedError

if TYPE_CHECKING:
    import torch

DeviceLike: TypeAlias = Union[str, "torch.device"]
ArchLike: TypeAlias = str | Arch


@dataclass(frozen=True)
class Target:
    """The arch, the device (None: planned for an arch that need not be here) and the choices that a plan depends on."""

    arch: Arch
    device: torch.device | None
    fused: bool
    strict: bool
    disable: tuple[str, ...]


def as_arch(arch: ArchLike) -> Arch:
    """An Arch, or the one named by a text. Raises GraphNotSupportedError for an unknown name."""
    return arch if isinstance(arch, Arch) else parse_arch(arch)


def resolve(arch: ArchLike | None, device: DeviceLike | None) -> tuple[Arch, torch.device | None]:
    """The arch to plan for and the device to run on, from what the user gave.

    Neither: the GPU at hand, else the CPU. Only `arch`: planned for it, the device found when plans are built. Raises
    GraphNotSupportedError("DEVICE_ARCH") where the device is of another arch.
    """
    if device is None:
        if arch is None:
            return _at_hand()
        wanted = as_arch(arch)
        if wanted.is_cuda:
            return wanted, None
        device = "cpu"
    import torch

    here = torch.device(device)
    if here.type == "cuda" and here.index is None:
        here = torch.device("cuda", torch.cuda.current_device())
    found = arch_of_device(here)
    if arch is not None and as_arch(arch).capability != found.capability:
        raise GraphNotSupportedError(
            "DEVICE_ARCH",
            asked=f"arch {as_arch(arch)} on device {here}",
            seen=found.name,
            required="a device of that arch",
            hint="leave device away to plan only",
        )
    return found, here


def device_of_arch(arch: Arch) -> torch.device:
    """The device at hand, if it is of `arch`. Raises GraphNotSupportedError("DEVICE_ARCH")."""
    here, device = _at_hand()
    if device is None or here.capability != arch.capability:
        raise GraphNotSupportedError(
            "DEVICE_ARCH",
            asked=f"building plans for {arch}",
            seen=f"{here} at hand",
            required=f"a device of arch {arch}",
            hint="explain() and check_support() need no device; build for the one at hand to run",
        )
    return device


def arch_of_device(device: torch.device) -> Arch:
    """The arch of a torch device. Raises GraphNotSupportedError for one that is neither a CPU nor a CUDA GPU.

    A GPU that the table does not list is planned with the rates of the newest listed one that is older, under its own
    name, so that nothing is fused by mistake and everything runs.
    """
    import torch

    if device.type == "cpu":
        return ARCHES["cpu"]
    if device.type != "cuda":
        raise GraphNotSupportedError("DEVICE_TYPE", asked=f"device {device}", required="cpu or cuda")
    capability = torch.cuda.get_device_capability(device)
    if any(a.capability == capability for a in ARCHES.values()):
        return arch_of_capability(capability)
    older = [a for a in ARCHES.values() if a.capability is not None and a.capability <= capability]
    nearest = older[-1] if older else ARCHES["sm80"]
    return dataclasses.replace(nearest, name="sm{}{}".format(*capability), capability=capability)


def _at_hand() -> tuple[Arch, torch.device]:
    import torch

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return arch_of_device(device), device
