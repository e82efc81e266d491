"""What the launches of both kernels share: tensors checked against the arguments by name, and the bound call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..streams import on_device
from .arguments import Argument, refusal, words_of
from .config import Schedule

if TYPE_CHECKING:
    import torch


@functools.cache
def multiprocessors(device: int) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def clusters(schedule: Schedule, device: torch.device) -> int:
    """Clusters of one launch: as many as the device holds at a time."""
    return multiprocessors(device.index) // schedule.cluster_size


def as_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Codes and scales as bytes, scales in one dimension: their types are the caller's affair. Others as they are."""
    import torch

    if not name.startswith(("q_", "sf_")):
        return tensor
    flat = tensor.view(-1) if name.startswith("sf_") else tensor
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


def zero(outputs: Sequence[torch.Tensor]) -> None:
    """Zeros in all of them: what a launch is where no expert can own a row."""
    for output in outputs:
        output.zero_()


def refuse(kernel: str, wrong: Sequence[str]) -> None:
    """Raises ValueError with everything that is wrong, if anything is."""
    if wrong:
        raise ValueError(f"launch of the sm90 {kernel}: " + "; ".join(wrong))


def present(
    kernel: str,
    arguments: Sequence[Argument],
    tensors: Mapping[str, torch.Tensor | None],
    ranks: Mapping[str, int],
) -> dict[str, torch.Tensor]:
    """The tensors that are not None: all that the arguments ask for, those in `ranks` of that rank.

    Raises ValueError, which names every one that is missing, superfluous, or of another rank.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    names = {argument.name for argument in arguments}
    wrong = [f"{name} is missing" for name in sorted(names - set(given))]
    # A workspace may be there for other configurations.
    wrong += [f"{name} is given, and not configured" for name in sorted(set(given) - names - {"workspace"})]
    refuse(kernel, wrong)
    shapes = {name: (tuple(given[name].shape), rank) for name, rank in ranks.items()}
    refuse(kernel, [f"{n} has shape {seen}; required is rank {r}" for n, (seen, r) in shapes.items() if len(seen) != r])
    return given


def misfits(
    arguments: Sequence[Argument],
    given: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    needed: Mapping[str, int],
    device: torch.device,
) -> list[str]:
    """What is wrong with the tensors for these sizes; `needed` has the bytes that some of them, if there, must have."""
    wrong = [text for argument in arguments if (text := refusal(argument, given[argument.name], sizes, device))]
    for name in needed.keys() & {argument.name for argument in arguments}:
        if given[name].numel() < needed[name]:
            wrong.append(f"{name} has {given[name].numel()} bytes; required are {needed[name]}")
    return wrong


def bound(
    function: Callable,
    arguments: Sequence[Argument],
    given: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    schedule: Schedule,
    device: torch.device,
) -> Callable[[], object]:
    """The launch of these tensors on torch's current stream. It holds their addresses, not them."""
    opened = {a.name: a.opened(given[a.name].shape, given[a.name].stride()) for a in arguments}
    words = words_of(arguments, sizes, clusters(schedule, device), opened).at(given)
    return on_device(functools.partial(function, *words), device)
