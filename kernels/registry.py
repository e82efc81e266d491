"""The one list of fused kernels. Importing it loads neither torch, the DSL nor cuDNN."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from .arch import Arch, ArchRange
from .condition import Condition, Reason, failures
from .cudnn import block_scaled as cudnn_block_scaled
from .cudnn import forward as cudnn_forward
from .cudnn import knobs as cudnn_knobs
from .cudnn import support as cudnn_support
from .hopper import dglu_support as hopper_dglu_support
from .hopper import gemm_support as hopper_gemm_support
from .hopper import glu_support as hopper_glu_support
from .hopper import quantize_support as hopper_quantize_support
from .hopper import support as hopper_support
from .hopper import wgrad_support as hopper_wgrad_support
from .problem import Problem

if TYPE_CHECKING:
    import torch


class FusedKernel(Protocol):
    """A kernel built for one problem and device.

    It may have three things more. `prepare(buffers, workspace, bindings)`: `run` of these buffers as a function of a
    stream's handle, which holds addresses and no tensor, or None where a run does more. `words(bindings)`: `run` as a
    function of integers, the stream's handle last, and those integers with the places of each role's address, see
    `sm90.arguments.Words`; or None. A true `zeroes_scales`: it writes every byte of its scales, those of no row too, so
    that nobody zeroes them before.
    """

    def workspace_bytes(self, bindings: Mapping[str, int]) -> int:
        """Bytes of scratch that one run needs, for the given symbol values."""

    def run(
        self, buffers: Mapping[str, torch.Tensor], workspace: torch.Tensor | None, bindings: Mapping[str, int]
    ) -> None:
        """Launches on torch's current stream. `buffers` has one per role; outputs are written in place."""


@dataclass(frozen=True)
class KernelEntry:
    """One fused kernel: what it serves, declared; and the module that builds it, imported only then.

    `id` never changes meaning. `module` has `build(problem, device) -> FusedKernel`. `evidence` says how far it is
    known to work: "measured" (run here), or "compiled" (cross-compiled, never run). `variants` names other ways to
    build it for a problem, the same in what they compute, which measuring may find faster: `build` of `module` then
    takes the name as a third argument. `zeroes_rows`: it writes zeros to the rows outside every group of all outputs
    but scales, so that nobody else has to.
    """

    id: str
    rule: str
    doc: str
    arches: ArchRange
    conditions: tuple[Condition, ...]
    module: str
    evidence: str
    requires_packages: tuple[str, ...]
    deterministic: bool
    capturable: bool = True
    launches: Callable[[Problem], int] = lambda problem: 1
    variants: Callable[[Problem], tuple[str, ...]] = lambda problem: ()
    zeroes_rows: bool = False

    def supports(self, problem: Problem, arch: Arch) -> tuple[Reason, ...]:
        """Every reason why this kernel cannot serve `problem` on `arch`; empty where it can."""
        found = failures(self.conditions, problem, arch)
        if arch not in self.arches:
            return (Reason("ARCH", arch.name, f"{self.arches}", "another arch keeps this part unfused"), *found)
        return found

    def build(self, problem: Problem, device: Any, variant: str | None = None) -> FusedKernel:
        """Imports the kernel's module and builds it, as it thinks best or as one of `variants(problem)`.

        Raises ImportError where a package is missing.
        """
        module = importlib.import_module(self.module)
        kernel: FusedKernel = module.build(problem, device, *(() if variant is None else (variant,)))
        return kernel


_HOPPER_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "filelock", "platformdirs")
_CUDNN_PACKAGES = ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "cuda-python")
_hopper_entry = partial(
    KernelEntry,
    arches=hopper_support.ARCHES,
    evidence="measured",
    requires_packages=_HOPPER_PACKAGES,
    deterministic=True,
    zeroes_rows=True,
)
_quantize_entry = partial(
    _hopper_entry, conditions=hopper_quantize_support.QUANTIZE, module=f"{__package__}.hopper.quantize_row_col"
)
_cudnn_entry = partial(KernelEntry, evidence="compiled", requires_packages=_CUDNN_PACKAGES)

KERNELS: tuple[KernelEntry, ...] = (
    _hopper_entry(
        id="sm90.grouped_gemm_dglu",
        rule="grouped_gemm_dglu",
        doc="our grouped GEMM + dGLU for Hopper: dense or discrete weights, every activation, dbias, amax, MXFP8 codes",
        conditions=hopper_dglu_support.DGLU,
        module=f"{__package__}.hopper.grouped_dglu",
        launches=hopper_dglu_support.launches,
        variants=hopper_dglu_support.variants,
    ),
    _hopper_entry(
        id="sm90.grouped_gemm_glu",
        rule="grouped_gemm_glu",
        doc="our grouped GEMM + GLU for Hopper: dense or discrete weights, every activation, layout, bias, MXFP8 codes",
        conditions=hopper_glu_support.GLU,
        module=f"{__package__}.hopper.grouped_glu",
        launches=hopper_glu_support.launches,
        variants=hopper_glu_support.variants,
    ),
    _hopper_entry(
        id="sm90.grouped_gemm_wgrad",
        rule="grouped_gemm_wgrad",
        doc="our grouped weight gradient for Hopper: BF16 or FP16 operands, groups of any size, dw written or added to",
        conditions=hopper_wgrad_support.WGRAD,
        module=f"{__package__}.hopper.grouped_wgrad",
        variants=hopper_wgrad_support.variants,
    ),
    _quantize_entry(
        id="sm90.quantize_row_col",
        rule="quantize_row_col",
        doc="our MXFP8 quantization for Hopper: codes and scales along rows and columns from one read",
    ),
    _quantize_entry(
        id="sm90.quantize",
        rule="quantize",
        doc="our MXFP8 quantization for Hopper: codes and scales along rows or along columns",
    ),
    _hopper_entry(
        id="sm90.grouped_gemm",
        rule="grouped_gemm",
        doc="our grouped GEMM for Hopper: dense or discrete weights, alpha, bias, 16-bit or FLOAT result",
        conditions=hopper_gemm_support.GEMM,
        module=f"{__package__}.hopper.grouped_gemm",
        launches=hopper_gemm_support.launches,
        variants=hopper_gemm_support.variants,
    ),
    _cudnn_entry(
        id="cudnn.grouped_gemm_dglu.bf16",
        rule="grouped_gemm_dglu",
        doc="cudnn-frontend's BF16 grouped GEMM + dGLU: dense or discrete weights, swiglu or geglu, dprob, dbias",
        arches=cudnn_support.ARCHES,
        conditions=cudnn_support.BF16_DGLU,
        module=f"{__package__}.cudnn.grouped_dglu",
        deterministic=False,
        launches=cudnn_support.launches,
        variants=cudnn_knobs.variants(cudnn_knobs.BF16),
    ),
    _cudnn_entry(
        id="cudnn.grouped_gemm_dglu.block_scaled",
        rule="grouped_gemm_dglu",
        doc="cudnn-frontend's block-scaled grouped GEMM + dGLU: MXFP8 to codes, FP4 to floats, dprob, dbias, amax",
        arches=cudnn_block_scaled.ARCHES,
        conditions=cudnn_block_scaled.DGLU,
        module=f"{__package__}.cudnn.block_scaled_dglu",
        deterministic=True,
        launches=cudnn_block_scaled.launches,
        variants=cudnn_knobs.variants(cudnn_knobs.BLOCK_SCALED),
    ),
    _cudnn_entry(
        id="cudnn.grouped_gemm_glu.bf16",
        rule="grouped_gemm_glu",
        doc="cudnn-frontend's BF16 grouped GEMM + GLU: dense or discrete weights, swiglu or fixed geglu, bias, C",
        arches=cudnn_support.ARCHES,
        conditions=cudnn_forward.BF16_GLU,
        module=f"{__package__}.cudnn.grouped_glu",
        deterministic=True,
        launches=cudnn_block_scaled.launches,
        variants=cudnn_knobs.variants(cudnn_knobs.BF16),
    ),
    _cudnn_entry(
        id="cudnn.grouped_gemm_glu.block_scaled",
        rule="grouped_gemm_glu",
        doc="cudnn-frontend's block-scaled grouped GEMM + GLU: every activation, bias, C, amax, MXFP8 codes",
        arches=cudnn_block_scaled.ARCHES,
        conditions=cudnn_forward.BLOCK_SCALED_GLU,
        module=f"{__package__}.cudnn.block_scaled_glu",
        deterministic=True,
        launches=cudnn_block_scaled.launches,
        variants=cudnn_knobs.variants(cudnn_knobs.BLOCK_SCALED),
    ),
    _cudnn_entry(
        id="cudnn.discrete_grouped_gemm_swiglu",
        rule="grouped_gemm_glu",
        doc="cudnn-frontend's discrete grouped GEMM + SwiGLU: block-scaled, weights by address, swiglu or geglu",
        arches=cudnn_block_scaled.DISCRETE_ARCHES,
        conditions=cudnn_forward.DISCRETE_GLU,
        module=f"{__package__}.cudnn.discrete_swiglu",
        deterministic=True,
        launches=cudnn_block_scaled.launches,
        variants=cudnn_knobs.variants(cudnn_knobs.BLOCK_SCALED),
    ),
    _cudnn_entry(
        id="cudnn.grouped_gemm_quant.block_scaled",
        rule="grouped_gemm_quant",
        doc="cudnn-frontend's grouped GEMM + quantize: MXFP8 to MXFP8 codes along rows and columns, bias, prob, amax",
        arches=cudnn_block_scaled.ARCHES,
        conditions=cudnn_forward.QUANT,
        module=f"{__package__}.cudnn.grouped_quant",
        deterministic=True,
        launches=cudnn_block_scaled.launches,
        variants=cudnn_knobs.variants(cudnn_knobs.BLOCK_SCALED),
    ),
    _cudnn_entry(
        id="cudnn.grouped_gemm_wgrad.bf16",
        rule="grouped_gemm_wgrad",
        doc="cudnn-frontend's BF16 grouped weight gradient",
        arches=cudnn_support.ARCHES,
        conditions=cudnn_forward.BF16_WGRAD,
        module=f"{__package__}.cudnn.grouped_wgrad",
        deterministic=True,
        launches=cudnn_forward.wgrad_launches,
        variants=cudnn_knobs.variants(cudnn_knobs.WGRAD),
    ),
    _cudnn_entry(
        id="cudnn.grouped_gemm_wgrad.block_scaled",
        rule="grouped_gemm_wgrad",
        doc="cudnn-frontend's block-scaled grouped weight gradient: MXFP8 operands with scales along the rows",
        arches=cudnn_block_scaled.ARCHES,
        conditions=cudnn_forward.BLOCK_SCALED_WGRAD,
        module=f"{__package__}.cudnn.grouped_wgrad",
        deterministic=True,
        launches=cudnn_forward.wgrad_launches,
        variants=cudnn_knobs.variants(cudnn_knobs.WGRAD),
    ),
)
"""Every fused kernel that exists, in order of preference among equals."""
