"""Adapter onto cudnn-frontend's BF16 grouped GEMM + dGLU for sm100 and sm103.

`arguments` is the one table of what the class expects: which role becomes which argument, in which shape and stride.
It describes the operands to the compiler and makes the views of each run. Importing this module imports no cuDNN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ...graph_ops.ir.dims import evaluate
from ...graph_ops.ir.dtypes import DataType
from ...graph_ops.ir.errors import VariantPackError
from ..addresses import AddressArrays
from ..problem import Problem
from . import knobs, support, versions
from .operands import Argument, torch_type

REGION_ALIGNMENT = 128

Buffer = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True)
class DgluConfiguration:
    """What one compiled kernel is specialised for. Everything else, M above all, is free at each run."""

    k: int
    n: int
    experts: int
    discrete: bool
    b_major: str
    c_type: DataType
    d_type: DataType
    act: str
    geglu_alpha: float
    clamp_min: float
    clamp_max: float
    linear_offset: float
    dbias: bool
    activation: bool
    round_product: bool
    knobs: knobs.Knobs | None

    @staticmethod
    def of(problem: Problem, variant: str | None = None) -> DgluConfiguration:
        """The configuration that serves a problem that passed every condition of support.BF16_DGLU."""
        _, k, n, experts = (evaluate(e, {}) if isinstance(e, int) else -1 for e in support.extents(problem))
        given = problem.attributes
        geglu = given["act"] == "geglu"
        return DgluConfiguration(
            k=k,
            n=n,
            experts=experts,
            discrete=problem["b"].discrete,
            b_major=support.b_major(problem) or "k",
            c_type=problem["c"].data_type,
            d_type=problem["d"].data_type,
            act="dgeglu" if geglu else "dswiglu",
            geglu_alpha=given["geglu_alpha"] if geglu else 1.702,
            clamp_min=given["clamp_min"] if geglu else -7.0,
            clamp_max=given["clamp_max"] if geglu else 7.0,
            linear_offset=given["linear_offset"] if geglu else 0.0,
            dbias="dbias" in problem,
            activation="activation" in problem,
            round_product=support.product_type(problem) is DataType.BFLOAT16,
            knobs=knobs.chosen(knobs.BF16, variant),
        )


@lru_cache(maxsize=1024)
def arguments(configuration: DgluConfiguration, rows: int) -> tuple[Argument, ...]:
    """The operands for `rows` rows, as NVIDIA's page of the kernel has them (N-major weights: as its code does)."""
    m, k, n, experts = rows, configuration.k, configuration.n, configuration.experts
    bf16, f32, i32 = DataType.BFLOAT16, DataType.FLOAT, DataType.INT32
    matrix: list[Argument] = [
        Argument("a", "sample_a", "a_tensor", (m, k, 1), (k, 1, m * k), bf16),
        Argument("c", "sample_c", "c_tensor", (m, 2 * n, 1), (2 * n, 1, 2 * m * n), configuration.c_type),
        Argument("d", "sample_d_row", "d_row_tensor", (m, 2 * n, 1), (2 * n, 1, 2 * m * n), configuration.d_type),
        Argument("offsets", "sample_padded_offsets", "padded_offsets", (experts,), (1,), i32),
        Argument("alpha", "sample_alpha", "alpha_tensor", (experts,), (1,), f32),
        Argument("beta", "sample_beta", "beta_tensor", (experts,), (1,), f32),
        Argument("prob", "sample_prob", "prob_tensor", (m, 1, 1), (1, 1, 1), f32),
        Argument("dprob", "sample_dprob", "dprob_tensor", (m, 1, 1), (1, 1, 1), f32),
    ]
    if not configuration.discrete and configuration.b_major == "k":
        matrix.append(Argument("b", "sample_b", "b_tensor", (n, k, experts), (k, 1, n * k), bf16))
    elif not configuration.discrete:
        matrix.append(Argument("b", "sample_b", "b_tensor", (experts, k, n), (k * n, n, 1), bf16))
    if configuration.dbias:
        shape, stride = (experts, 2 * n, 1), (2 * n, 1, 1)
        matrix.append(Argument("dbias", "sample_dbias", "dbias_tensor", shape, stride, bf16))
    if configuration.activation:
        shape, stride = (m, n, 1), (n, 1, m * n)
        matrix.append(Argument("activation", "sample_activation", "activation_tensor", shape, stride, bf16))
    return tuple(matrix)


def options(configuration: DgluConfiguration) -> dict[str, Any]:
    """Everything that the constructor takes besides operands."""
    given: dict[str, Any] = {
        "sample_d_col": None,
        "sample_sfa": None,
        "act_func": configuration.act,
        "b_major": configuration.b_major,
        "linear_offset": configuration.linear_offset,
        "geglu_alpha": configuration.geglu_alpha,
        "glu_clamp_max": configuration.clamp_max,
        "glu_clamp_min": configuration.clamp_min,
        "round_dgrad_to_input_dtype": configuration.round_product,
    }
    if configuration.discrete:
        given |= {
            "num_experts": configuration.experts,
            "b_shape": (configuration.n, configuration.k),
            "b_dtype": torch.bfloat16,
        }
    return given | (configuration.knobs.keywords if configuration.knobs is not None else {})


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` current: the class asks torch for the current one. A cross-compilation has none."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@lru_cache(maxsize=256)
def compiled(configuration: DgluConfiguration, device: torch.device) -> Any:
    """The compiled class object; one a configuration and device in this process.

    Only sample_a is real memory (256 rows): the class takes descriptors for the other operands. Raises ImportError
    where cudnn-frontend is missing, and whatever the class raises where it refuses what the conditions let through.
    """
    from cudnn import GroupedGemmDgluSm100
    from cudnn.api_base import TensorDesc

    samples: dict[str, Any] = {}
    for argument in arguments(configuration, support.ROW_MULTIPLE):
        dtype = torch_type(argument.data_type)
        if argument.role == "a":
            real = torch.empty(argument.shape, dtype=dtype, device=device)
            samples[argument.sample] = real.as_strided(argument.shape, argument.stride)
        else:
            order = tuple(sorted(range(len(argument.shape)), key=argument.stride.__getitem__))
            samples[argument.sample] = TensorDesc(dtype, argument.shape, argument.stride, order, device)
    with _on(device):
        kernel = GroupedGemmDgluSm100(**samples, **options(configuration))
        kernel.check_support()
        kernel.compile()
    return kernel


class GroupedDglu:
    """A FusedKernel: one configuration on one device."""

    def __init__(self, problem: Problem, device: torch.device, variant: str | None = None) -> None:
        self.configuration = DgluConfiguration.of(problem, variant)
        self._problem, self._device = problem, device
        self._kernel = compiled(self.configuration, device)
        self._addresses = AddressArrays(device, support.ALIGNMENT)

    def regions(self, rows: int) -> dict[str, tuple[int, int]]:
        """(offset, bytes) of each piece of the workspace: the class's own scratch, and what the graph does not give."""
        experts = self.configuration.experts
        ones = max(rows if "prob" not in self._problem else 0,
                   0 if "alpha" in self._problem and "beta" in self._problem else experts)  # fmt: skip
        wanted = {
            "scratch": self._kernel.scratch_workspace_bytes(),
            "ones": 4 * ones,
            "dprob": 0 if "dprob" in self._problem else 4 * rows,
            "pointers": 8 * experts if self.configuration.discrete else 0,
        }
        placed, end = {}, 0
        for name, nbytes in wanted.items():
            placed[name] = (end, nbytes)
            end += -(-nbytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
        return placed

    def workspace_bytes(self, bindings: Mapping[str, int]) -> int:
        """Bytes of workspace, aligned to 128."""
        offset, nbytes = list(self.regions(self._rows(bindings)).values())[-1]
        return -(-(offset + nbytes) // REGION_ALIGNMENT) * REGION_ALIGNMENT

    def run(self, buffers: Mapping[str, Buffer], workspace: torch.Tensor | None, bindings: Mapping[str, int]) -> None:
        """Launches on torch's current stream and reads nothing back; the class checks each new signature of shapes.

        `b` is a tensor, and for discrete weights a sequence of (K, N) tensors or an int64 tensor of addresses on the
        device. Rows at or past the last end offset are zero in dprob and not written in d and activation. Raises
        VariantPackError without a workspace, for a misaligned expert, and where the recomputed activation outgrows
        32-bit indices; ValueError where the class refuses a buffer.
        """
        rows, configuration = self._rows(bindings), self.configuration
        for role in support.ACCUMULATED:
            if role in self._problem:
                _tensor(buffers[role]).zero_()
        if rows == 0:
            return
        if configuration.activation and rows * configuration.n >= 2**31:
            raise VariantPackError("ACTIVATION_SIZE", asked="recomputed activation", seen=f"{rows} x {configuration.n}",
                                   required="fewer than 2**31 elements", hint="split the rows")  # fmt: skip
        if workspace is None:
            raise VariantPackError(
                "WORKSPACE", asked="workspace", seen=None, required=f"{self.workspace_bytes(bindings)} bytes"
            )
        pieces = {name: workspace[at : at + nbytes] for name, (at, nbytes) in self.regions(rows).items()}
        given = {role: _tensor(buffers[role]) for role in self._problem.tensors if role != "b"}
        ones = pieces["ones"].view(torch.float32)
        if ones.numel():
            ones.fill_(1.0)
        for role in ("alpha", "beta", "prob"):
            given.setdefault(role, ones)
        given.setdefault("dprob", pieces["dprob"].view(torch.float32))
        if not configuration.discrete:
            given["b"] = _tensor(buffers["b"])
        operands = {
            argument.execute: given[argument.role].as_strided(argument.shape, argument.stride)
            for argument in arguments(configuration, rows)
        }
        if configuration.discrete:
            operands["b_ptrs"] = self._addresses.on_device(buffers["b"], pieces["pointers"].view(torch.int64))
        with _on(self._device):
            self._kernel.execute(**operands, d_col_tensor=None, sfa_tensor=None, workspace=pieces["scratch"],
                                 current_stream=_stream(self._device))  # fmt: skip

    def _rows(self, bindings: Mapping[str, int]) -> int:
        return evaluate(self._problem["a"].dim[0], bindings)


def _tensor(buffer: Buffer) -> torch.Tensor:
    assert isinstance(buffer, torch.Tensor)
    return buffer


def _stream(device: torch.device) -> Any:
    """The caller's current stream as the CUDA binding's type."""
    from cuda.bindings import driver

    return driver.CUstream(torch.cuda.current_stream(device).cuda_stream)


def build(problem: Problem, device: Any, variant: str | None = None) -> GroupedDglu:
    """Compiles the kernel for `problem` (M stays free), as the class thinks best or as a variant of knobs.BF16.

    Raises ImportError without cudnn-frontend.
    """
    versions.warn_if_unknown(versions.installed())
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return GroupedDglu(problem, where, variant)
