"""NVIDIA's own calls, on every device: change one import, and they run on Hopper, on Blackwell and on the CPU.

    from opfuse.graph_ops.api import grouped_gemm_dglu_wrapper_sm100     # was: from cudnn import ...

The names without `_sm100` are the same objects.
"""

from __future__ import annotations

from .common import TupleDict, UnsupportedCall
from .dglu import GroupedGemmDglu, grouped_gemm_dglu_wrapper
from .discrete_swiglu import DiscreteGroupedGemmSwiglu, discrete_grouped_gemm_swiglu_wrapper

GroupedGemmDgluSm100 = GroupedGemmDglu
grouped_gemm_dglu_wrapper_sm100 = grouped_gemm_dglu_wrapper
DiscreteGroupedGemmSwigluSm100 = DiscreteGroupedGemmSwiglu
discrete_grouped_gemm_swiglu_wrapper_sm100 = discrete_grouped_gemm_swiglu_wrapper

__all__ = [
    "DiscreteGroupedGemmSwiglu", "DiscreteGroupedGemmSwigluSm100", "GroupedGemmDglu", "GroupedGemmDgluSm100",
    "TupleDict", "UnsupportedCall", "discrete_grouped_gemm_swiglu_wrapper",
    "discrete_grouped_gemm_swiglu_wrapper_sm100",
    "grouped_gemm_dglu_wrapper", "grouped_gemm_dglu_wrapper_sm100",
]  # fmt: skip
