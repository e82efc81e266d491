"""A launch goes to the current stream of its tensors' device, with that device current: GPUs imitated by numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from opfuse.kernels.streams import current_stream, on_device


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that became current, the last one is it; GPU i has the stream 100 + i."""
    entered = [0]

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        entered.append(wanted.index)
        yield
        entered.append(0)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: entered[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    return entered


@pytest.mark.parametrize("index, entered", [(0, [0]), (1, [0, 1, 0])])
def test_a_launch_is_on_its_own_device(current: list[int], index: int, entered: list[int]) -> None:
    launch = on_device(lambda stream: (stream, current[-1]), torch.device("cuda", index))
    assert launch() == (100 + index, index) and current == entered


def test_without_a_gpu_there_is_one_stream() -> None:
    assert current_stream(torch.device("cpu"))() == 0
    assert on_device(lambda stream: stream, torch.device("cpu"))() == 0
