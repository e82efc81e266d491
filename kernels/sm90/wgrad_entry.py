"""What is compiled of the grouped weight gradient: one host function that launches it."""

from __future__ import annotations

import cutlass.cute as cute

from . import views
from .grouped_gemm_wgrad import GroupedGemmWgrad
from .wgrad_arguments import wgrad_arguments
from .wgrad_config import WgradConfig


class WgradProgram:
    """The host function of one configuration; its arguments are the integers that `wgrad_arguments` describes."""

    def __init__(self, config: WgradConfig) -> None:
        self.arguments = wgrad_arguments(config)
        self.kernel = GroupedGemmWgrad(config)

    @cute.jit
    def __call__(self, *words):
        _, given, clusters, stream = views.read(self.arguments, words)
        self.kernel(given["a"], given["dy"], given["offsets"], given["dw"], clusters, stream)


def compile_entry(config: WgradConfig):
    """Traces and compiles a legal configuration; returns the TVM-FFI function."""
    return cute.compile(WgradProgram(config), *views.traced(wgrad_arguments(config)), options="--enable-tvm-ffi")
