"""CudnnGraph: a Graph read from a `cudnn.pygraph`, which takes and gives buffers in the shapes that cuDNN declares.

Inside, tensors have the shapes of this project's nodes: rows (M, K) instead of [1, M, K], end offsets (L,) instead of
boundaries [L+1, 1, 1]. A `BufferView` per tensor turns the caller's buffer into that, over the same memory, except that
offsets are copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.dlpack

from ..kernels.condition import Reason
from .buffers import storage_shape, torch_dtype
from .graph import Graph
from .ir.dtypes import DataType
from .ir.errors import VariantPackError
from .outputs import Outputs
from .scales import pack_columns_by_expert

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BufferView:
    """How the buffer of one tensor becomes the graph's.

    `dim`, `stride`: as cuDNN declares them, counting elements; `kept`: the axes that the graph's tensor keeps. `kind`:
    "matrix"; "scales" (bytes of whole 128x4 atoms, of which the graph's tensor is the beginning); "offsets" (L + 1
    boundaries from 0, of which the graph takes the ends); "scalar" (a host value). `default`: the value
    of a scalar that may be left out.
    """

    name: str
    kind: str
    dim: Shape
    stride: Shape
    kept: tuple[int, ...]
    data_type: DataType
    default: float | None = None

    @property
    def packed(self) -> int:
        return self.data_type.info.packed

    @property
    def stored_dim(self) -> Shape:
        """`dim` in stored elements: packed along the contiguous axis."""
        along = self.stride.index(1) if self.packed > 1 and 1 in self.stride else -1
        return tuple(d // self.packed if i == along else d for i, d in enumerate(self.dim))

    @property
    def stored_stride(self) -> Shape:
        return tuple(s if s == 1 else s // self.packed for s in self.stride)

    def graph_buffer(self, value: Any, shape: Shape, device: torch.device) -> torch.Tensor:
        """The graph's view, of shape `shape`, of what the caller gave. Raises VariantPackError for another shape."""
        if self.kind == "scalar":
            dtype = value.dtype if isinstance(value, torch.Tensor) else torch_dtype(self.data_type)
            return torch.as_tensor(value, dtype=dtype).reshape(shape).to(device)
        buffer = value if isinstance(value, torch.Tensor) else torch.utils.dlpack.from_dlpack(value)
        if self.kind == "offsets":
            return self._ends(buffer, shape)
        if self.kind == "scales":
            return self._scales(buffer, shape)
        seen = tuple(buffer.shape)
        if seen == self.stored_dim:
            return buffer.as_strided(shape, tuple(buffer.stride(a) for a in self.kept))
        if seen == shape:
            return buffer
        if buffer.numel() == math.prod(self.stored_dim) and buffer.is_contiguous():
            # As cuDNN does: a buffer that covers the declaration densely is described anew by it.
            return buffer.as_strided(shape, tuple(self.stored_stride[a] for a in self.kept))
        raise self._error(f"shape {seen}", f"shape {self.stored_dim}, or as many elements without gaps")

    def allocate(self, device: torch.device) -> torch.Tensor:
        """A zeroed buffer as cuDNN declares it."""
        dtype = torch_dtype(self.data_type)
        extents = zip(self.stored_dim, self.stored_stride, strict=True)
        reach = 0 if 0 in self.dim else 1 + sum((d - 1) * s for d, s in extents)
        memory = torch.zeros(reach * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)
        return memory.as_strided(self.stored_dim, self.stored_stride)

    def _ends(self, buffer: torch.Tensor, shape: Shape) -> torch.Tensor:
        boundaries = shape[0] + 1
        if buffer.numel() != boundaries or not buffer.is_contiguous():
            raise self._error(f"shape {tuple(buffer.shape)}", f"{boundaries} boundaries without gaps")
        flat = buffer.reshape(-1)
        if flat.device.type == "cpu" and int(flat[0]) != 0:
            raise self._error(f"first boundary {int(flat[0])}", "boundaries that begin at 0")
        return flat[1:].clone()  # kernels want the ends aligned to 16 bytes, which the second boundary is not

    def _scales(self, buffer: torch.Tensor, shape: Shape) -> torch.Tensor:
        size = math.prod(shape)
        if buffer.numel() < size or not buffer.is_contiguous():
            raise self._error(
                f"shape {tuple(buffer.shape)}", f"at least {size} scales in whole 128x4 atoms, contiguous"
            )
        return buffer.reshape(-1)[:size].view(shape)

    def _error(self, seen: str, required: str) -> VariantPackError:
        return VariantPackError("CUDNN_BUFFER", asked=f"buffer of {self.name}", seen=seen, required=required,
                                hint=f"cuDNN declares {self.dim}")  # fmt: skip


@dataclass(frozen=True)
class PackByExpert:
    """Column scales that cuDNN stores expert by expert, while the graph's node gives those of the whole matrix."""

    scale: int
    offsets: int
    block_size: int


class CudnnGraph(Graph):
    """A Graph that `Graph.from_cudnn` made: tensors have cuDNN's uids and names, buffers its shapes.

    Keys of a variant pack are uids, names, cuDNN's tensors or this graph's. `notes` says what of the cuDNN graph cannot
    fuse as it is written, beyond what `explain` says of each node. What `serialize` writes is the graph alone: read
    back, it is a Graph, with buffers in its own shapes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.views: Mapping[int, BufferView] = {}
        self.packings: tuple[PackByExpert, ...] = ()
        self.notes: tuple[Reason, ...] = ()

    def execute(
        self, variant_pack: Mapping[Any, Any], workspace: torch.Tensor | None = None, handle: Any = None
    ) -> None:
        """As Graph.execute, with buffers of the shapes that cuDNN declares, or that cover them without gaps.

        A run-time scalar may be left out where the cuDNN graph gave it a value. Raises VariantPackError.
        """
        with torch.cuda.stream(handle) if isinstance(handle, torch.cuda.Stream) else nullcontext():
            pack = self._graph_pack(variant_pack)
            targets = {p: pack[p.scale] for p in self.packings if p.scale in pack}
            for packing, target in targets.items():
                pack[packing.scale] = torch.empty_like(target)
            super().execute(pack, workspace, handle)
            for packing, target in targets.items():
                whole = pack[packing.scale]
                target.copy_(pack_columns_by_expert(whole, pack[packing.offsets], packing.block_size))

    def __call__(self, variant_pack: Mapping[Any, Any]) -> Outputs:
        """As Graph.__call__; outputs are in cuDNN's shapes and strides, zero where nothing is written."""
        _, binder = self._ensure_built()
        pack = {self._key(key): value for key, value in variant_pack.items() if value is not None}
        for spec in binder.outputs:
            held = pack.pop(spec.name, None) if binder.output_names.get(spec.name) == spec.uid else None
            if spec.uid not in pack:
                pack[spec.uid] = self.views[spec.uid].allocate(binder.device) if held is None else held
        size = self.get_workspace_size()
        workspace = torch.empty(size, dtype=torch.uint8, device=binder.device) if size else None
        self.execute(pack, workspace)
        return Outputs({spec.uid: pack[spec.uid] for spec in binder.outputs}, binder.output_names)

    @staticmethod
    def _key(key: Any) -> Any:
        """A uid for a tensor of cuDNN or of this graph; other keys as they are."""
        return key if isinstance(key, (int, str, type(None))) else getattr(key, "uid", key)

    def _graph_pack(self, variant_pack: Mapping[Any, Any]) -> dict[Any, Any]:
        """The variant pack in the graph's shapes. Keys that mean no tensor here are left to Graph to refuse."""
        _, binder = self._ensure_built()
        shapes = {spec.uid: storage_shape(spec, {}) for spec in (*binder.inputs, *binder.outputs)}
        pack: dict[Any, Any] = {}
        for key, value in variant_pack.items():
            uid = self._key(key)
            if isinstance(uid, str):
                found = [u for u, view in self.views.items() if view.name == uid and u in shapes]
                uid = found[0] if len(found) == 1 else uid
            known = value is not None and uid in shapes
            pack[uid] = self.views[uid].graph_buffer(value, shapes[uid], binder.device) if known else value
        for uid, view in self.views.items():
            if view.default is not None and uid in shapes and pack.get(uid) is None:
                pack[uid] = view.graph_buffer(view.default, shapes[uid], binder.device)
        return pack


__all__ = ["BufferView", "CudnnGraph", "PackByExpert"]
