"""Float32 arithmetic as float32: no TF32, no bfloat16 splitting, no half accumulators, whatever torch is set to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_BACKENDS: Any = torch.backends  # whose `mkldnn.matmul` the annotations of torch 2.13 leave out

_SETTINGS: tuple[tuple[Any, str, tuple[Any, ...], Any], ...] = (
    (_BACKENDS.cuda.matmul, "fp32_precision", ("none", "ieee"), "ieee"),
    (_BACKENDS.mkldnn.matmul, "fp32_precision", ("none", "ieee"), "ieee"),
    (_BACKENDS.cuda.matmul, "allow_fp16_accumulation", (False,), False),
)
"""Where torch keeps it, under which name, what is exact already, and what to set otherwise."""

_LOCK = threading.Lock()
"""Held while a process-wide setting is changed, so that threads do not restore one another's changes."""


@contextmanager
def exact_float32() -> Iterator[None]:
    """Matmuls inside multiply and add in float32 proper. Settings are touched only where they say otherwise."""
    if all(getattr(place, name) in exact for place, name, exact, _ in _SETTINGS):
        yield
        return
    with _LOCK:
        before = [(place, name, getattr(place, name)) for place, name, _, _ in _SETTINGS]
        try:
            for place, name, exact, safe in _SETTINGS:
                if getattr(place, name) not in exact:
                    setattr(place, name, safe)
            yield
        finally:
            for place, name, value in before:
                if getattr(place, name) != value:
                    setattr(place, name, value)
