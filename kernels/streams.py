"""Handles of torch's current stream, for launches that take one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def current_stream(device: torch.device) -> Callable[[], int]:
    """A function that returns the handle of torch's current stream on a device; 0, the default stream, on the CPU.

    0.1 us a call: what `torch.cuda.current_stream()` makes first is an object, and takes 1.
    """
    if device.type != "cuda":
        return int
    import torch

    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)  # type: ignore[attr-defined]


def is_current(device: torch.device) -> Callable[[], bool]:
    """A function that says whether a device is torch's current one; the CPU always is.

    For a device that has been used: `torch.cuda.current_device()` first makes sure that CUDA runs, and takes 2 us.
    """
    if device.type != "cuda":
        return _true
    import torch

    current: Callable[[], int] = torch._C._cuda_getDevice
    index = device.index
    return lambda: current() == index


def _true() -> bool:
    return True


def on_device(launch: Callable[[int], object], device: torch.device) -> Callable[[], object]:
    """`launch`, which takes a stream's handle, on torch's current stream of a device, which is current meanwhile."""
    import torch

    stream = current_stream(device)
    if device.type != "cuda":
        return lambda: launch(stream())

    def there() -> object:
        if torch.cuda.current_device() == device.index:
            return launch(stream())
        with torch.cuda.device(device):
            return launch(stream())

    return there
