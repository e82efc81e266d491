"""What is compiled of the quantize kernel: one host function that launches it."""

from __future__ import annotations

import cutlass.cute as cute

from . import views
from .quantize_arguments import quantize_arguments
from .quantize_config import QuantizeConfig
from .quantize_row_col import QuantizeRowCol


class QuantizeProgram:
    """The host function of one configuration; its arguments are the integers that `quantize_arguments` describes."""

    def __init__(self, config: QuantizeConfig) -> None:
        self.arguments, self.kernel = quantize_arguments(config), QuantizeRowCol(config)

    @cute.jit
    def __call__(self, *words):
        _, given, _, stream = views.read(self.arguments, words)
        row, col = ([given.get(f"{kind}_{side}") for kind in ("q", "sf", "norm_const")] for side in ("row", "col"))
        self.kernel(given["x"], *row, *col, stream)


def compile_entry(config: QuantizeConfig):
    """Traces and compiles a legal configuration; returns the TVM-FFI function."""
    return cute.compile(QuantizeProgram(config), *views.traced(quantize_arguments(config)), options="--enable-tvm-ffi")
