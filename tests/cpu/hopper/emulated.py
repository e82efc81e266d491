"""What the compiled Hopper functions do with their arguments, in float64 on the CPU, and what they demand of them.

They stand where the compiled objects would: `dglu_host.launch` and the adapters run as they are. Like the kernels they
find their tensors by the integers of the launch, write zeros to the rows outside every group and the atoms of their
scales, and scribble over their workspace.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from opfuse.graph_ops import Graph
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.kernels.arch import ARCHES, Arch
from opfuse.kernels.reference.layouts import swizzle_scales
from opfuse.kernels.reference.quantize import quantize_blocks
from opfuse.kernels.registry import KERNELS
from opfuse.kernels.sm90 import dglu_host, gemm_host, glu_host, quantize_config
from opfuse.kernels.sm90.arguments import SIZES, TORCH_NAMES, Argument
from opfuse.kernels.sm90.dglu_arguments import dglu_arguments
from opfuse.kernels.sm90.dglu_config import scratch_tensors
from opfuse.kernels.sm90.epilogue_math import NumpyMath, glu_backward
from opfuse.kernels.sm90.gemm_arguments import gemm_arguments
from opfuse.kernels.sm90.gemm_config import GemmConfig
from opfuse.kernels.sm90.glu_arguments import glu_arguments
from opfuse.kernels.sm90.glu_config import GluConfig, scale_bytes
from opfuse.kernels.sm90.glu_math import glu
from opfuse.kernels.sm90.quantize_arguments import quantize_arguments
from opfuse.kernels.sm90.quantize_config import QuantizeConfig
from opfuse.kernels.sm90.wgrad_arguments import wgrad_arguments
from opfuse.kernels.sm90.wgrad_config import WgradConfig

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CODES = {"e4m3": DataType.FP8_E4M3, "e5m2": DataType.FP8_E5M2}
EXPERTS: dict[int, torch.Tensor] = {}
"""Separate experts by address: nothing here can read memory behind a number."""


def gate_columns(layout: str, n: int) -> torch.Tensor:
    """The columns of gate in C, in order; those of up lie `width` further."""
    width = {"concatenated": n, "interleaved32": 32, "interleaved1": 1}[layout]
    return torch.arange(n).view(-1, width).add(torch.arange(n // width)[:, None] * width).flatten()


def scale_places(rows: int, blocks: int) -> torch.Tensor:
    """Where each scale of a (rows, blocks) matrix lies in the 128x4 atom."""
    r, k = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    return (r // 128 * -(-blocks // 4) + k // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + k % 4


def tensor_at(argument: Argument, sizes: dict[str, int], words: Iterator[int]) -> torch.Tensor:
    """The tensor that the integers of an argument describe, in the memory where it lies."""
    address, dtype = next(words), getattr(torch, TORCH_NAMES[argument.dtype])
    shape = [next(words) if d is None else sizes[d] if isinstance(d, str) else d for d in argument.shape]
    strides = [next(words) if s is None else s for s in argument.stride]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    assert address % argument.alignment == 0 or argument.name == "workspace", (argument.name, address)
    size = (sum((d - 1) * s for d, s in zip(shape, strides)) + 1) * dtype.itemsize
    memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
    return memory.view(dtype).as_strided(shape, strides)


class EmulatedFunction:
    """The function of one configuration of either kernel."""

    arguments_of: Any

    def __init__(self, config: Any) -> None:
        self.config, self.calls = config, 0

    @property
    def clusters(self) -> int:
        """Clusters of a launch, on a GPU of 132 multiprocessors."""
        return 132 // int(self.config.schedule.cluster_size)

    def tensors(self, words: Sequence[int]) -> dict[str, torch.Tensor]:
        """The tensors of a call by name."""
        count = len(SIZES)
        sizes, rest = dict(zip(SIZES, words)), iter(words[count + 1 : -1])
        given = {argument.name: tensor_at(argument, sizes, rest) for argument in self.arguments_of(self.config)}
        assert next(rest, None) is None and sizes["2N"] == 2 * sizes["N"], words
        assert words[count] == self.clusters
        return given

    @staticmethod
    def _groups(offsets: torch.Tensor) -> Iterator[tuple[int, int]]:
        start = 0
        for end in offsets.tolist():
            yield start, end
            start = end

    @staticmethod
    def _demand(name: str, held: Any, shape: tuple[int | None, ...], dtype: str | None, pitch: int = 1) -> None:
        """What the compiled function checks of a tensor: presence, type, shape, contiguous rows, alignment."""
        assert (held is None) is (dtype is None), f"{name} given {held is not None}, configured {dtype}"
        if held is None or dtype is None:
            return
        assert held.dtype is TORCH[dtype] and held.dim() == len(shape), (name, held.dtype, held.shape)
        assert all(w is None or s == w for s, w in zip(held.shape, shape)), (name, held.shape, shape)
        assert held.stride(-1) == 1 or held.numel() <= 1, (name, held.stride())
        if len(shape) == 2:
            assert held.stride(0) % pitch == 0, (name, held.stride())
        assert held.data_ptr() % (16 if pitch > 1 else 4) == 0, name

    def _weights(self, b: Any, experts: int, k: int, n: int) -> list[torch.Tensor]:
        if self.config.discrete_b:
            assert b.dtype is torch.int64 and b.shape == (experts,) and b.is_contiguous()
            return [EXPERTS[address] for address in b.tolist()]
        assert b.shape == (experts, k, n) and b.dtype is TORCH[self.config.ab_dtype] and b.data_ptr() % 16 == 0
        contiguous, other = (1, 2) if self.config.b_major == "k" else (2, 1)
        assert b.stride(contiguous) == 1 and b.stride(other) % 8 == 0 and b.stride(0) % 8 == 0, b.stride()
        return list(b)

    def _demand_codes(self, side: str, codes: Any, scales: Any, shape: tuple[int, int], size: int | None) -> None:
        """Codes and scales of a side, and the bytes of these."""
        wanted = self.config.q_row_dtype if side == "row" else self.config.q_col_dtype
        assert (codes is None) is (scales is None) is (wanted is None)
        if codes is not None:
            assert codes.dtype is scales.dtype is torch.uint8 and codes.shape == shape
            assert codes.stride(1) == 1 and codes.stride(0) % 16 == 0 and codes.data_ptr() % 16 == 0
            assert scales.is_contiguous() and scales.shape == (size,)
            assert scales.data_ptr() % 16 == 0

    def _quantize(self, side: str, dx: torch.Tensor, codes: Any, scales: Any, m: int) -> None:
        """Codes and scales of `dx`, the rows of `m` that an expert owns."""
        if codes is None:
            return
        rows, columns = dx.shape
        kind = CODES[str(self.config.q_row_dtype if side == "row" else self.config.q_col_dtype)]
        along = dx.float() if side == "row" else dx.float().T.contiguous()
        made, factors = quantize_blocks(along, 32, kind, DataType.FP8_E8M0)
        codes[:rows] = made if side == "row" else made.T
        if self.config.sf_swizzled:
            blocks = columns // 32 if side == "row" else -(-m // 32)
            places = scale_places(m if side == "row" else columns, blocks)[: factors.shape[0], : factors.shape[1]]
            scales[places.flatten()] = factors.flatten()
            of_rows, first = (m, columns) if side == "row" else (columns, m), -(-rows // 128)
            atoms = scales.view(-(-of_rows[0] // 128), -1, 512)
            (atoms if side == "row" else atoms.transpose(0, 1))[first:] = 0
        else:
            matrix = scales.view(-1, columns // 32) if side == "row" else scales.view(-1, columns)
            real = factors if side == "row" else factors.T
            matrix[: real.shape[0]] = real

    def _demand_workspace(self, workspace: Any, needed: int, there: bool) -> None:
        if not there:
            assert workspace is None
            return
        assert workspace.dtype is torch.uint8 and workspace.dim() == 1 and workspace.numel() >= needed
        assert workspace.data_ptr() % 64 == 0  # all that memory of a CPU has; 256 on a GPU
        workspace.fill_(0xFF)


class Emulated(EmulatedFunction):
    """The backward kernel's."""

    arguments_of = staticmethod(dglu_arguments)

    def __call__(self, *words: int) -> None:
        given = self.tensors(words)
        names = ("d", "prob", "alpha", "beta", "activation", "dprob", "dbias", "amax", "q_row", "sf_row", "q_col",
                 "sf_col", "workspace")  # fmt: skip
        dy, b, offsets, c = (given[name] for name in ("dy", "b", "offsets", "c"))
        self._run(dy, b, offsets, c, *map(given.get, names))

    def _run(
        self, dy: Any, b: Any, offsets: Any, c: Any, d: Any, prob: Any, alpha: Any, beta: Any, activation: Any,
        dprob: Any, dbias: Any, amax: Any, q_row: Any, sf_row: Any, q_col: Any, sf_col: Any, workspace: Any,
    ) -> None:  # fmt: skip
        f, self.calls = self.config, self.calls + 1
        m, n2 = c.shape
        n, experts = n2 // 2, offsets.shape[0]
        self._demand("dy", dy, (m, None), f.ab_dtype, pitch=8)
        self._demand("c", c, (m, n2), f.c_dtype, pitch=8)
        self._demand("d", d, (m, n2), f.d_dtype, pitch=8)
        self._demand("activation", activation, (m, n), f.activation_dtype, pitch=8)
        self._demand("dbias", dbias, (experts, n2), f.dbias_dtype)
        self._demand("amax", amax, (experts, 2), "fp32" if f.has_amax else None)
        for name, held, rows, wanted in (
            ("prob", prob, m, f.has_prob), ("dprob", dprob, m, f.has_dprob), ("alpha", alpha, experts, f.has_alpha),
            ("beta", beta, experts, f.has_beta),
        ):  # fmt: skip
            self._demand(name, held, (rows,), "fp32" if wanted else None)
        assert offsets.dtype is torch.int32 and offsets.is_contiguous()
        weights = self._weights(b, experts, dy.shape[1], n)
        needed = dglu_host.workspace_bytes(f, experts, m, n)
        self._demand_workspace(workspace, needed, bool(scratch_tensors(f, 1, 1, 1)))
        for side, codes, scales in (("row", q_row, sf_row), ("col", q_col, sf_col)):
            self._demand_codes(side, codes, scales, (m, n2), dglu_host.scale_bytes(f, m, n).get(side))

        total, gate_at = int(offsets[-1]), gate_columns(f.glu_layout, n)
        both = (gate_at, gate_at + {"concatenated": n, "interleaved32": 32, "interleaved1": 1}[f.glu_layout])
        dx = torch.zeros(total, n2, dtype=torch.float64)
        for output in (d, dprob, activation, q_row, q_col):
            if output is not None:
                output[total:] = 0
        for g, (start, end) in enumerate(self._groups(offsets)):
            scale = float(alpha[g]) ** f.alpha_exponent if alpha is not None else 1.0
            r = scale * (dy[start:end].double() @ weights[g].double())
            x = c[start:end].double() * (float(beta[g]) if beta is not None else 1.0)
            p = prob[start:end].double()[:, None].numpy() if prob is not None else None
            made = glu_backward(r.numpy(), x[:, both[0]].numpy(), x[:, both[1]].numpy(), p, f.act, NumpyMath())
            dgate, dup, term, y = (torch.from_numpy(np.asarray(t)) for t in made)
            dx[start:end, both[0]], dx[start:end, both[1]] = dgate, dup
            if d is not None:
                d[start:end] = dx[start:end].to(d.dtype)
            if dprob is not None:
                dprob[start:end] = term.sum(1).float()
            if activation is not None:
                activation[start:end] = (y if p is None else y * torch.from_numpy(p)).to(activation.dtype)
            if dbias is not None:
                dbias[g] = dx[start:end].sum(0).to(dbias.dtype)
            if amax is not None:
                amax[g] = torch.stack([t.abs().max() if t.numel() else torch.zeros(()) for t in (dgate, dup)]).float()
        self._quantize("row", dx, q_row, sf_row, m)
        self._quantize("col", dx, q_col, sf_col, m)
        if workspace is not None:
            workspace.fill_(0xFF)


class EmulatedGlu(EmulatedFunction):
    """The forward kernel's."""

    arguments_of = staticmethod(glu_arguments)

    def __call__(self, *words: int) -> None:
        f, self.calls = self.config, self.calls + 1
        given = self.tensors(words)
        x, b, offsets = (given[name] for name in ("x", "b", "offsets"))
        h, d, prob, alpha, bias = map(given.get, ("h", "d", "prob", "alpha", "bias"))
        codes = {side: (given.get(f"q_{side}"), given.get(f"sf_{side}")) for side in ("row", "col")}
        activation = next(t for t in (d, codes["row"][0], codes["col"][0]) if t is not None)
        (m, n), experts = activation.shape, offsets.shape[0]
        for side, (q, scales) in codes.items():
            self._demand_codes(side, q, scales, (m, n), scale_bytes(f, m, n).get(side))
        self._demand("x", x, (m, None), f.ab_dtype, pitch=8)
        self._demand("h", h, (m, 2 * n), f.h_dtype, pitch=8)
        self._demand("d", d, (m, n), f.d_dtype, pitch=8)
        self._demand("bias", bias, (experts, 2 * n), f.bias_dtype, pitch=8)
        self._demand("prob", prob, (m,), "fp32" if f.has_prob else None)
        self._demand("alpha", alpha, (experts,), "fp32" if f.has_alpha else None)
        assert offsets.dtype is torch.int32 and offsets.is_contiguous()
        if f.separate_up:
            halves = (self._weights(given[name], experts, x.shape[1], n) for name in ("b", "b_up"))
            weights = [torch.cat(both, 1) for both in zip(*halves, strict=True)]
        else:
            weights = self._weights(b, experts, x.shape[1], 2 * n)
        self._demand_workspace(given.get("workspace"), glu_host.workspace_bytes(f, experts), f.discrete_b)
        gate_at = gate_columns(f.glu_layout, n)
        up_at = gate_at + {"concatenated": n, "interleaved32": 32, "interleaved1": 1}[f.glu_layout]
        for output in (h, d, codes["row"][0], codes["col"][0]):
            if output is not None:
                output[int(offsets[-1]) :] = 0
        quantized = torch.zeros(int(offsets[-1]), n)
        for g, (start, end) in enumerate(self._groups(offsets)):
            product = x[start:end].double() @ weights[g].double()
            product = product * (float(alpha[g]) ** f.alpha_exponent if alpha is not None else 1.0)
            product = product + bias[g].double() if bias is not None else product
            read = product.to(TORCH[f.product_dtype]).double() if f.product_dtype else product
            if h is not None:
                h[start:end] = (read if f.product_dtype else product).to(h.dtype)
            y = torch.from_numpy(np.asarray(glu(read[:, gate_at].numpy(), read[:, up_at].numpy(), f.act, NumpyMath())))
            y = y if prob is None else y * prob[start:end].double()[:, None]
            if d is not None:
                d[start:end] = y.to(d.dtype)
            quantized[start:end] = y.to(TORCH[f.source_dtype or "fp32"]).float()
        for side, (q, scales) in codes.items():
            self._quantize(side, quantized, q, scales, m)


class EmulatedQuantize(EmulatedFunction):
    """The quantize kernel's."""

    arguments_of = staticmethod(quantize_arguments)

    @property
    def clusters(self) -> int:
        return 1

    def __call__(self, *words: int) -> None:
        f, self.calls = self.config, self.calls + 1
        given = self.tensors(words)
        x = given["x"]
        self._demand("x", x, (None, None), f.x_dtype, pitch=4 if f.x_dtype == "fp32" else 8)
        sizes = quantize_config.scale_bytes(f, *x.shape)
        for side, dtype, swizzled in (
            ("row", f.q_row_dtype, f.row_swizzled), ("col", f.q_col_dtype, f.col_swizzled)
        ):  # fmt: skip
            codes, scales = given.get(f"q_{side}"), given.get(f"sf_{side}")
            assert (codes is None) is (scales is None) is (dtype is None)
            if codes is None or scales is None:
                continue
            assert codes.shape == x.shape and codes.stride(0) % 8 == 0 and scales.shape == (sizes[side],)
            along = x.float() if side == "row" else x.float().T.contiguous()
            norm = given.get(f"norm_const_{side}", 1.0)
            made, factors = quantize_blocks(along, 32, CODES[str(dtype)], DataType.FP8_E8M0, norm)
            codes.copy_(made if side == "row" else made.T)
            stored = swizzle_scales(factors) if swizzled else factors if side == "row" else factors.T
            scales.copy_(stored.reshape(-1))


class EmulatedGemm(EmulatedFunction):
    """The plain grouped GEMM's."""

    arguments_of = staticmethod(gemm_arguments)

    def __call__(self, *words: int) -> None:
        f, self.calls = self.config, self.calls + 1
        given = self.tensors(words)
        a, b, offsets, y = (given[name] for name in ("a", "b", "offsets", "y"))
        alpha, bias = map(given.get, ("alpha", "bias"))
        (m, n), experts = y.shape, offsets.shape[0]
        self._demand("a", a, (m, None), f.ab_dtype, pitch=8)
        self._demand("y", y, (m, n), f.y_dtype, pitch=8)
        self._demand("bias", bias, (experts, n), f.bias_dtype, pitch=8)
        self._demand("alpha", alpha, (experts,), "fp32" if f.has_alpha else None)
        weights = self._weights(b, experts, a.shape[1], n)
        self._demand_workspace(given.get("workspace"), gemm_host.workspace_bytes(f, experts), f.discrete_b)
        y[int(offsets[-1]) :] = 0
        for g, (start, end) in enumerate(self._groups(offsets)):
            product = a[start:end].double() @ weights[g].double()
            product = product * (float(alpha[g]) ** f.alpha_exponent if alpha is not None else 1.0)
            y[start:end] = (product + bias[g].double() if bias is not None else product).to(y.dtype)


class EmulatedWgrad(EmulatedFunction):
    """The weight gradient's."""

    arguments_of = staticmethod(wgrad_arguments)

    def __call__(self, *words: int) -> None:
        f, self.calls = self.config, self.calls + 1
        given = self.tensors(words)
        a, dy, offsets, dw = (given[name] for name in ("a", "dy", "offsets", "dw"))
        self._demand("a", a, (None, dw.shape[1]), f.ab_dtype, pitch=8)
        self._demand("dy", dy, (a.shape[0], dw.shape[2]), f.ab_dtype, pitch=8)
        self._demand("dw", dw, (offsets.shape[0], None, None), f.dw_dtype)
        assert dw.data_ptr() % 16 == 0 and all(s * dw.element_size() % 16 == 0 for s in dw.stride()[:2])
        for g, (start, end) in enumerate(self._groups(offsets)):
            product = a[start:end].double().T @ dy[start:end].double()
            dw[g] = (dw[g] + product if f.accumulate else product).to(dw.dtype)


FUNCTIONS: dict[type, type[EmulatedFunction]] = {
    GemmConfig: EmulatedGemm, GluConfig: EmulatedGlu, QuantizeConfig: EmulatedQuantize, WgradConfig: EmulatedWgrad
}  # fmt: skip


def emulated(config: Any) -> EmulatedFunction:
    """The function of a configuration of any kernel."""
    return FUNCTIONS.get(type(config), Emulated)(config)


class EmulatedGraph(Graph):
    """A graph that is planned for sm90 with the real kernel table and runs on the CPU."""

    def __init__(self, **options: Any) -> None:
        kernels = tuple(k for k in KERNELS if k.id.startswith("sm90."))
        super().__init__(**{"kernels": kernels, **options})

    def _resolve(self, arch: Any, device: Any) -> tuple[Arch, torch.device]:
        return ARCHES["sm90"], torch.device("cpu")


def keep(experts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Makes separate experts known by their addresses."""
    EXPERTS.update({t.data_ptr(): t for t in experts})
    return experts
