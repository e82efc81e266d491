"""What a call returns: output tensors by name, by Tensor or by uid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from .builder import Tensor

if TYPE_CHECKING:
    import torch


class Outputs(Mapping[str, "torch.Tensor"]):
    """The outputs of a call: a mapping by name that also takes the Tensor or its uid (needed where names repeat)."""

    def __init__(self, tensors: Mapping[int, torch.Tensor], names: Mapping[str, int]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, key: str | int | Tensor) -> torch.Tensor:
        if isinstance(key, Tensor):
            return self._tensors[key.uid]
        return self._tensors[self._names[key] if isinstance(key, str) else key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        held = ", ".join(f"{n}: {tuple(self[n].shape)} {self[n].dtype}" for n in self)
        return f"<Outputs {held}>"
