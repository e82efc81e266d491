"""What is compiled: one host function that launches the kernel and, where there are partials, one that adds them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from . import views
from .config import padded_bytes
from .dglu_arguments import dglu_arguments
from .dglu_config import DgluConfig, finishes, scratch_tensors
from .grouped_gemm_dglu import GroupedGemmDglu
from .reductions import Finish

OPTIONAL = ("d", "prob", "alpha", "beta", "activation", "q_row", "sf_row", "q_col", "sf_col")


class Program:
    """The host function of one configuration; its arguments are the integers that `arguments` describes."""

    def __init__(self, config: DgluConfig) -> None:
        self.config, self.arguments = config, dglu_arguments(config)
        self.kernel, self.finish = GroupedGemmDglu(config), Finish(config)

    def _scratch(self, workspace, experts, rows, columns) -> dict:
        """The workspace's tensors, row-major; a descriptor is 16 words of 64 bits, anything else float32."""
        out, offset = {}, cutlass.Int64(0)
        sizes = (cutlass.Int64(size) for size in (experts, rows, columns))
        for name, part_rows, part_columns in scratch_tensors(self.config, *sizes):
            dtype, per_row = cutlass.Float32, part_columns
            if name == "descriptors":
                dtype, per_row = cutlass.Int64, part_columns // 2
            base = cute.recast_ptr((workspace.iterator + offset).align(128), dtype=dtype)
            out[name] = cute.make_tensor(base, cute.make_layout((part_rows, per_row), stride=(per_row, 1)))
            offset += padded_bytes(part_rows, part_columns)
        return out

    def _or_itself(self, parts, dprob):
        """The partials of dprob (N tiles, M); dprob in their place where there is one tile, and nothing to add."""
        tiles, rows = parts.shape
        base = cutlass.select_(tiles == 1, dprob.iterator.toint(), parts.iterator.toint())
        pointer = cute.make_ptr(cutlass.Float32, base, cute.AddressSpace.gmem, assumed_align=4)
        return cute.make_tensor(pointer, cute.make_layout((tiles, rows), stride=(rows, 1)))

    @cute.jit
    def __call__(self, *words):
        sizes, given, clusters, stream = views.read(self.arguments, words)
        parts = self._scratch(given.get("workspace"), sizes["L"], sizes["M"], sizes["N"])
        dprob_parts, dbias_parts, amax_parts = (parts.get(name) for name in ("dprob", "dbias", "amax"))
        if cutlass.const_expr(dprob_parts is not None):
            dprob_parts = self._or_itself(dprob_parts, given["dprob"])
        d, prob, alpha, beta, activation, q_row, sf_row, q_col, sf_col = (given.get(name) for name in OPTIONAL)
        self.kernel(
            given["dy"], given["b"], parts.get("descriptors"), given["offsets"], given["c"], d, prob, alpha, beta,
            activation, dprob_parts, dbias_parts, amax_parts, q_row, sf_row, q_col, sf_col, clusters, stream,
        )  # fmt: skip
        if cutlass.const_expr(finishes(self.config)):
            adds = (given["offsets"], dprob_parts, given.get("dprob"), dbias_parts, given.get("dbias"), amax_parts,
                    given.get("amax"), sizes["M"], sizes["2N"], stream)  # fmt: skip
            if cutlass.const_expr(dbias_parts is None and amax_parts is None):
                if cute.size(dprob_parts, mode=[0]) > 1:
                    self.finish(*adds)
            else:
                self.finish(*adds)


def compile_entry(config: DgluConfig):
    """Traces and compiles a legal configuration; returns the TVM-FFI function."""
    return cute.compile(Program(config), *views.traced(dglu_arguments(config)), options="--enable-tvm-ffi")
