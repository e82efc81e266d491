"""What is compiled of the forward kernel: one host function that launches it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from . import views
from .glu_arguments import glu_arguments
from .glu_config import GluConfig
from .grouped_gemm_glu import GroupedGemmGlu

OPTIONAL = ("d", "prob", "alpha", "bias")
CODES = ("q_row", "sf_row", "q_col", "sf_col")


class GluProgram:
    """The host function of one configuration; its arguments are the integers that `glu_arguments` describes."""

    def __init__(self, config: GluConfig) -> None:
        self.config, self.arguments = config, glu_arguments(config)
        self.kernel = GroupedGemmGlu(config)

    @cute.jit
    def __call__(self, *words):
        sizes, given, clusters, stream = views.read(self.arguments, words)
        descriptors = None
        if cutlass.const_expr(self.config.discrete_b):
            # 16 words of 64 bits a descriptor.
            base = cute.recast_ptr(given["workspace"].iterator.align(128), dtype=cutlass.Int64)
            descriptors = cute.make_tensor(base, cute.make_layout((sizes["L"], 16), stride=(16, 1)))
        d, prob, alpha, bias = (given.get(name) for name in OPTIONAL)
        self.kernel(
            given["x"], given["b"], given.get("b_up"), descriptors, given["offsets"], given.get("h"), d, prob,
            alpha, bias, *(given.get(name) for name in CODES), clusters, stream,
        )  # fmt: skip


def compile_entry(config: GluConfig):
    """Traces and compiles a legal configuration; returns the TVM-FFI function."""
    return cute.compile(GluProgram(config), *views.traced(glu_arguments(config)), options="--enable-tvm-ffi")
