"""Adapter onto cudnn-frontend's discrete grouped GEMM + SwiGLU: the operands of block_scaled_glu, another class."""

from __future__ import annotations

from typing import Any

from ..problem import Problem
from .block_scaled_glu import DISCRETE
from .launch import Launcher, launcher


def build(problem: Problem, device: Any, variant: str | None = None) -> Launcher:
    """Compiles the kernel for `problem`. Raises ImportError without cudnn-frontend."""
    return launcher(DISCRETE, problem, device, variant)
