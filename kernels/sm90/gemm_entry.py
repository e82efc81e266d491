"""What is compiled of the plain grouped GEMM: one host function that launches it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from . import views
from .gemm_arguments import gemm_arguments
from .gemm_config import GemmConfig
from .grouped_gemm import GroupedGemm


class GemmProgram:
    """The host function of one configuration; its arguments are the integers that `gemm_arguments` describes."""

    def __init__(self, config: GemmConfig) -> None:
        self.config, self.arguments = config, gemm_arguments(config)
        self.kernel = GroupedGemm(config)

    @cute.jit
    def __call__(self, *words):
        sizes, given, clusters, stream = views.read(self.arguments, words)
        descriptors = None
        if cutlass.const_expr(self.config.discrete_b):
            # 16 words of 64 bits a descriptor.
            base = cute.recast_ptr(given["workspace"].iterator.align(128), dtype=cutlass.Int64)
            descriptors = cute.make_tensor(base, cute.make_layout((sizes["L"], 16), stride=(16, 1)))
        self.kernel(
            given["a"], given["b"], descriptors, given["offsets"], given["y"], given.get("alpha"), given.get("bias"),
            clusters, stream,
        )  # fmt: skip


def compile_entry(config: GemmConfig):
    """Traces and compiles a legal configuration; returns the TVM-FFI function."""
    return cute.compile(GemmProgram(config), *views.traced(gemm_arguments(config)), options="--enable-tvm-ffi")
