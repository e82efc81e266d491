"""The variant pack: whose buffer is whose, what the symbols are, and every check before anything is launched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.dlpack

from .builder import GraphBuilder, Tensor
from .ir.dims import bind, evaluate, symbols
from .ir.dtypes import DataType
from .ir.errors import VariantPackError, WorkspaceError
from .ir.graph import OpGraph
from .ir.tensor import TensorSpec
from .overlap import Extent, first_overlap
from .recall import Recall

Key = Tensor | str | int | None
KEY_TYPES = (Tensor, str, int)
Buffer = torch.Tensor | Sequence[torch.Tensor]

ROWS_OF_OFFSETS = {
    "grouped_matmul": "a",
    "grouped_matmul_wgrad": "a",
    "glu_backward": "x",
    "group_sum": "x",
    "group_amax": "x",
}
"""The input whose rows an op's `offsets` divide."""

WORKSPACE_ALIGNMENT = {"cpu": 64, "cuda": 256}
"""Alignment of a workspace's first byte: what torch's allocator gives on each device."""


@dataclass(frozen=True)
class Resolved:
    """What follows from the buffers' shapes, strides, types and devices alone: symbol values and spans in bytes."""

    bindings: Mapping[str, int]
    spans: tuple[int, ...]


@dataclass(frozen=True)
class Bound:
    """A checked variant pack: the buffer of each graph input and output by uid, and the symbols' values."""

    buffers: Mapping[int, Buffer]
    bindings: Mapping[str, int]
    extents: tuple[Extent, ...]

    def with_buffers(self, more: Mapping[int, Buffer]) -> Bound:
        """The same with buffers that need no check: fresh ones."""
        return Bound({**self.buffers, **more}, self.bindings, self.extents)


def torch_dtype(data_type: DataType) -> torch.dtype:
    """The torch type that stores `data_type` (FP4: uint8, two codes a byte)."""
    dtype: torch.dtype = getattr(torch, data_type.info.torch_name)
    return dtype


def storage_shape(spec: TensorSpec, bindings: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the torch tensor that stores `spec`: the extent of the packed axis counts stored elements."""
    shape = spec.shape(bindings)
    packed = spec.data_type.info.packed
    return tuple(d // packed if i == spec.packed_axis else d for i, d in enumerate(shape)) if packed > 1 else shape


def storage_stride(spec: TensorSpec, bindings: Mapping[str, int]) -> tuple[int, ...]:
    """Its strides. Raises VariantPackError for packed elements whose declared strides split a byte."""
    stride = tuple(evaluate(s, bindings) for s in spec.stride)
    packed = spec.data_type.info.packed
    if packed == 1:
        return stride
    axis = spec.packed_axis
    if stride[axis] != 1 or any(s % packed for i, s in enumerate(stride) if i != axis):
        raise VariantPackError(
            "STRIDE",
            asked=f"tensor {spec.name}",
            seen=f"declared stride {stride}",
            required=f"stride 1 along axis {axis} and multiples of {packed} elsewhere",
        )
    return tuple(1 if i == axis else s // packed for i, s in enumerate(stride))


def as_tensor(value: Any, spec: TensorSpec) -> torch.Tensor:
    """`value` as a torch tensor over the same memory: a torch tensor, or anything with `__dlpack__`.

    Bytes of another framework (uint8) stand for an 8-bit float type that it cannot name. Raises VariantPackError.
    """
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint8) if value.dtype is torch.float4_e2m1fn_x2 else value
    if not hasattr(value, "__dlpack__"):
        raise VariantPackError("BUFFER_TYPE", asked=f"buffer of {spec.name}", seen=type(value).__name__,
                               required="a torch tensor or an object with __dlpack__")  # fmt: skip
    try:
        taken: torch.Tensor = torch.utils.dlpack.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError) as error:
        raise VariantPackError(
            "DLPACK",
            asked=f"buffer of {spec.name}",
            seen=f"{type(error).__name__}: {error}",
            required=f"a DLPack export that torch can read, of {spec.data_type!r}",
        ) from error
    wanted = torch_dtype(spec.data_type)
    is_code = spec.data_type.info.kind in ("code", "scale")
    return taken.view(wanted) if taken.dtype is torch.uint8 and is_code else taken


class Binder:
    """Checks variant packs for one graph and device. Holds no buffer between calls.

    The only state are two bounded caches: what shapes, strides, types and devices imply, and `recall`, whole calls that
    passed. Neither holds a tensor; entries are immutable and written whole, so threads may share them.
    """

    CACHE_LIMIT = 256

    def __init__(self, graph: OpGraph, device: torch.device, owner: GraphBuilder | None = None) -> None:
        self.graph, self.device = graph, device
        self._owner = owner
        self.inputs = graph.graph_inputs
        self.outputs = graph.graph_outputs
        self._specs = (*self.inputs, *self.outputs)
        self._wanted = {spec.uid: spec for spec in self._specs}
        self._accumulated = {
            node.output_uids[port] for node in graph.nodes for port in node.reads_output if port in node.output_uids
        }
        self._uids: dict[str, list[int]] = {}
        for uid, spec in graph.tensors.items():
            if uid in self._wanted or self._is_unused(uid):
                self._uids.setdefault(spec.name, []).append(uid)
        self._keys: dict[Key, int] = {uid: uid for uid in self._wanted}
        for name, uids in self._uids.items():
            if len(uids) == 1 and uids[0] in self._wanted:
                self._keys[name] = uids[0]
        if owner is not None:
            self._keys.update((t, t.uid) for t in owner.tensors if t.uid in self._wanted)
        self._access = {s.uid: (s.is_output, s.alignment, s.name) for s in self._specs}
        self._dtypes = {spec.uid: torch_dtype(spec.data_type) for spec in self._specs}
        self._offsets = tuple(
            dict.fromkeys(
                (node.input_uids["offsets"], graph.tensors[node.input_uids[rows]].dim[0], node.path)
                for node in graph.nodes
                if (rows := ROWS_OF_OFFSETS.get(node.op)) and node.input_uids.get("offsets") in self._wanted
            )
        )
        named = [spec.name for spec in self.outputs]
        self.output_names: Mapping[str, int] = {
            (spec.name if named.count(spec.name) == 1 else str(spec.uid)): spec.uid for spec in self.outputs
        }
        self._promises = tuple((s.uid, s.multiple_of) for s in self.inputs if s.multiple_of != 1)
        self._seen: dict[tuple[Any, ...], Resolved] = {}
        self.recall = Recall()
        self.checks_values = device.type == "cpu"

    # ------------------------------------------------------------------ keys

    def uid_of(self, key: Key) -> int:
        """The uid that a key of a variant pack means. Raises VariantPackError for an unknown or ambiguous one."""
        if isinstance(key, Tensor):
            if self._owner is not None and key._graph is not self._owner:
                raise VariantPackError("KEY_FOREIGN", asked=f"key {key!r}", seen=f"a tensor of graph {key._graph.name}",
                                       required=f"a tensor of graph {self.graph.name}")  # fmt: skip
            return self._checked_uid(key.uid, key)
        if isinstance(key, str):
            uids = self._uids.get(key, [])
            if len(uids) > 1:
                raise VariantPackError(
                    "KEY_AMBIGUOUS",
                    asked=f"key {key!r}",
                    seen=f"tensors {uids} of that name",
                    required="a name that one tensor has",
                    hint="use the Tensor or its uid",
                )
            if uids:
                return uids[0]
            named = [t.uid for t in self.graph.tensors.values() if t.name == key]
            return self._checked_uid(named[0] if named else None, key)
        if isinstance(key, int) and not isinstance(key, bool):
            return self._checked_uid(key, key)
        raise VariantPackError(
            "KEY_TYPE", asked=f"key {key!r}", seen=type(key).__name__, required="a Tensor, its name or its uid"
        )

    def collect(self, pack: Mapping[Any, Any], *, outputs_required: bool) -> dict[int, Buffer]:
        """Buffers by uid, each a torch tensor (a tuple of them for discrete weights). A None value is an absent buffer.

        Outputs may be left out unless `outputs_required`, except those that are accumulated into.
        """
        found: dict[int, Buffer] = {}
        for key, value in pack.items():
            if key is None and value is None:
                continue
            uid = self._keys.get(key) if key.__class__ in KEY_TYPES else None  # True and 1.0 equal 1, and are no keys
            if uid is None:
                uid = self.uid_of(key)
            if value is None:
                continue
            if uid not in self._wanted:
                raise VariantPackError("KEY_UNUSED", asked=f"buffer of {self.graph.tensors[uid].name}", seen="a buffer",
                                       required="None, or no entry: no node reads this tensor")  # fmt: skip
            if uid in found:
                raise VariantPackError("KEY_TWICE", asked=f"buffer of {self._wanted[uid].name}", seen="two entries",
                                       required="one entry a tensor")  # fmt: skip
            found[uid] = self._buffer(value, self._wanted[uid])
        if len(found) != len(self._wanted):
            needed = [s for s in self._specs if outputs_required or not s.is_output or s.uid in self._accumulated]
            if missing := [s for s in needed if s.uid not in found]:
                self._raise_missing(missing)
        return found

    def _raise_missing(self, missing: Sequence[TensorSpec]) -> None:
        first = missing[0]
        hint = "an output that is accumulated into must hold its old values" if first.uid in self._accumulated else None
        raise VariantPackError(
            "KEY_MISSING",
            asked=f"variant pack of graph {self.graph.name}",
            seen=f"no buffer for {', '.join(f'uid {s.uid} ({s.name!r})' for s in missing)}",
            required="a buffer for every graph input and output",
            hint=hint,
            where=first.location,
        )

    def _buffer(self, value: Any, spec: TensorSpec) -> Buffer:
        if spec.discrete and isinstance(value, (list, tuple)):
            return tuple(self._plain(v, spec) for v in value)
        return self._plain(value, spec)

    def _plain(self, value: Any, spec: TensorSpec) -> torch.Tensor:
        known = type(value) is torch.Tensor and value.dtype is self._dtypes[spec.uid]
        t: torch.Tensor = value if known else as_tensor(value, spec)
        if t.layout is not torch.strided:
            raise _error("LAYOUT", spec, t.layout, torch.strided)
        if t.is_neg():
            raise _error("LAYOUT", spec, "a lazily negated view", "plain values", ".resolve_neg()")
        return t

    def _is_unused(self, uid: int) -> bool:
        tensor = self.graph.tensors[uid]
        return uid not in self.graph.producers and not tensor.is_constant and uid not in self._wanted

    def _checked_uid(self, uid: int | None, key: Key) -> int:
        spec = None if uid is None else self.graph.tensors.get(uid)
        if spec is None or uid is None:
            raise VariantPackError("KEY_UNKNOWN", asked=f"key {key!r}", seen="no such tensor",
                                   required=f"one of {[s.name for s in self._specs]}")  # fmt: skip
        if spec.is_constant:
            raise VariantPackError("KEY_CONSTANT", asked=f"key {key!r}", seen=f"a compile-time scalar, {spec.value}",
                                   required="no buffer: its value is part of the graph")  # fmt: skip
        if spec.is_virtual:
            raise VariantPackError(
                "KEY_VIRTUAL",
                asked=f"key {key!r}",
                seen=f"virtual tensor {spec.name}",
                required="a graph input or output",
                hint="call .set_output(True) on it to have it",
            )
        return uid

    # ------------------------------------------------------------------ checks

    def bind(self, buffers: Mapping[int, Buffer]) -> Bound:
        """Checks every buffer there is. Raises VariantPackError; reads no contents but those of offsets on the CPU."""
        key = tuple([
            (uid, held.shape, held.stride(), held.dtype, held.device) if isinstance(held, torch.Tensor)
            else (uid, tuple([(t.shape, t.stride(), t.dtype, t.device) for t in held]))
            for uid, held in buffers.items()
        ])  # fmt: skip
        resolved = self._seen.get(key)
        if resolved is None:
            resolved = self._resolve(buffers)
            if len(self._seen) >= self.CACHE_LIMIT:
                self._seen.clear()
            self._seen[key] = resolved
        extents = self._check_memory(buffers, resolved)
        self.check_values(buffers, resolved.bindings)
        return Bound(buffers, resolved.bindings, extents)

    def _resolve(self, buffers: Mapping[int, Buffer]) -> Resolved:
        bindings: dict[str, int] = {}
        for check in (self._bind_shape, self._check_shape, self._check_layout):
            for uid, buffer in buffers.items():
                check(self._wanted[uid], buffer, bindings)
        unbound = [
            s.name for s in symbols(d for t in self._specs for d in (*t.dim, *t.stride)) if s.name not in bindings
        ]
        if unbound:
            raise VariantPackError(
                "SYMBOL_UNBOUND",
                asked=f"symbols {unbound}",
                seen="no buffer that gives them a value",
                required="a buffer with the symbol itself, or c*symbol + d, as an extent",
            )
        spans = tuple(
            span_of(t)
            for buffer in buffers.values()
            for t in ((buffer,) if isinstance(buffer, torch.Tensor) else buffer)
        )
        return Resolved(bindings, spans)

    def _bind_shape(self, spec: TensorSpec, buffer: Buffer, bindings: dict[str, int]) -> None:
        packed = spec.data_type.info.packed
        if not spec.discrete:
            assert isinstance(buffer, torch.Tensor)
            if buffer.dim() != spec.rank:
                raise _error("RANK", spec, f"shape {tuple(buffer.shape)}", f"rank {spec.rank}, dim {spec.dim}")
            for axis, (dim, extent) in enumerate(zip(spec.dim, buffer.shape, strict=True)):
                factor = packed if axis == spec.packed_axis else 1
                if dim.__class__ is int and dim == extent * factor:
                    continue
                bind(
                    dim,
                    extent * factor,
                    bindings,
                    f"buffer of {spec.name}, axis {axis}, of shape {tuple(buffer.shape)}",
                )
            return
        if isinstance(buffer, torch.Tensor):
            if buffer.dim() != 1 or buffer.dtype is not torch.int64:
                raise _error(
                    "DISCRETE",
                    spec,
                    f"{buffer.dtype} of shape {tuple(buffer.shape)}",
                    f"{spec.dim[0]} buffers (K, N), or their addresses as int64 ({spec.dim[0]},)",
                )
            bind(spec.dim[0], buffer.shape[0], bindings, f"addresses of {spec.name}")
            return
        bind(spec.dim[0], len(buffer), bindings, f"count of buffers of {spec.name}")
        for number, part in enumerate(buffer):
            if part.dim() != 2:
                raise _error("RANK", spec, f"buffer {number} of shape {tuple(part.shape)}", "rank 2, (K, N)")
            for axis, (dim, extent) in enumerate(zip(spec.dim[1:], part.shape, strict=True), 1):
                factor = packed if axis == spec.packed_axis else 1
                bind(dim, extent * factor, bindings, f"buffer {number} of {spec.name}, of shape {tuple(part.shape)}")

    def _check_shape(self, spec: TensorSpec, buffer: Buffer, bindings: dict[str, int]) -> None:
        try:
            if isinstance(buffer, torch.Tensor) and not spec.discrete and buffer.shape == storage_shape(spec, bindings):
                return
        except KeyError:
            pass  # a symbol without a value is told of afterwards
        self._bind_shape(spec, buffer, bindings)  # again: a symbol may have been bound only by a later buffer

    def _check_layout(self, spec: TensorSpec, buffer: Buffer, bindings: dict[str, int]) -> None:
        addresses = spec.discrete and isinstance(buffer, torch.Tensor)
        dtype = torch.int64 if addresses else self._dtypes[spec.uid]
        for t in (buffer,) if isinstance(buffer, torch.Tensor) else buffer:
            if t.dtype is not dtype:
                raise _error("DATA_TYPE", spec, t.dtype, f"{dtype}, for {spec.data_type!r}")
            if t.device != self.device:
                raise _error("DEVICE", spec, t.device, f"{self.device}, for which the graph was built")
            if addresses:
                wanted: tuple[int, ...] = (1,)
            else:
                declared = spec.stride[1:] if spec.discrete else spec.stride
                for stride, seen in zip(declared, t.stride(), strict=True):
                    if stride.__class__ is not int and any(s.name not in bindings for s in symbols((stride,))):
                        bind(stride, seen, bindings, f"stride {t.stride()} of {spec.name}")
                wanted = storage_stride(spec, bindings)[1:] if spec.discrete else storage_stride(spec, bindings)
            if t.numel() and any(d > 1 and s != w for d, s, w in zip(t.shape, t.stride(), wanted, strict=True)):
                raise _error(
                    "STRIDE",
                    spec,
                    f"stride {t.stride()} of shape {tuple(t.shape)}",
                    f"stride {wanted}",
                    "declare the tensor's stride=, or pass a buffer laid out as declared",
                )

    def _check_memory(self, buffers: Mapping[int, Buffer], resolved: Resolved) -> tuple[Extent, ...]:
        extents: list[Extent] = []
        place = 0
        for uid, buffer in buffers.items():
            written, alignment, name = self._access[uid]
            for t in (buffer,) if isinstance(buffer, torch.Tensor) else buffer:
                span = resolved.spans[place]
                place += 1
                if written and (t.requires_grad or t.is_inference()):
                    self._check_writable(t, self._wanted[uid])
                if not span:
                    continue
                pointer = t.data_ptr()
                if pointer % alignment and (t.dtype is self._dtypes[uid]):  # an array of addresses may lie anywhere
                    raise _error("ALIGNMENT", self._wanted[uid], f"address {pointer:#x}",
                                 f"a multiple of {alignment} bytes",
                                 "declare alignment= on the tensor, or pass a buffer that is aligned")  # fmt: skip
                extents.append((pointer, pointer + span, written, name, t))
        if (clash := first_overlap(extents)) is not None:
            one, other = clash
            output, second = (one, other) if one[2] else (other, one)
            raise VariantPackError("ALIASED", asked=f"buffer of output {output[3]}",
                                   seen=f"bytes shared with {'output' if second[2] else 'input'} {second[3]}",
                                   required="outputs that overlap no other buffer")  # fmt: skip
        return tuple(extents)

    def _check_writable(self, t: torch.Tensor, spec: TensorSpec) -> None:
        if t.requires_grad:
            raise _error(
                "REQUIRES_GRAD", spec, "requires_grad=True", "an output that takes no part in autograd", ".detach() it"
            )
        if not torch.is_inference_mode_enabled():
            raise _error(
                "INFERENCE_TENSOR",
                spec,
                "made under torch.inference_mode",
                "an output that may be written outside of it",
                "call the graph under torch.inference_mode() too",
            )

    def check_values(self, buffers: Mapping[int, Buffer], bindings: Mapping[str, int]) -> None:
        """Values on the CPU, where looking is free: promised multiples; end offsets that grow from 0 to at most M."""
        if not self.checks_values:
            return
        for uid, multiple in self._promises:
            promised = buffers[uid]
            assert isinstance(promised, torch.Tensor)
            if bool((promised % multiple).any()):
                raise _error(
                    "MULTIPLE_OF",
                    self._wanted[uid],
                    promised.tolist(),
                    f"multiples of {multiple}, as the tensor promises",
                    "pad each group, or declare another multiple_of",
                )
        checked: dict[int, list[int]] = {}
        for uid, rows, path in self._offsets:
            offsets, spec = buffers[uid], self._wanted[uid]
            assert isinstance(offsets, torch.Tensor)
            if uid not in checked:
                checked[uid] = values = offsets.tolist()
                if any(b < a for a, b in zip([0, *values], values, strict=False)):
                    raise _error("OFFSETS", spec, values, "non-decreasing end offsets, none below 0")
            values = checked[uid]
            if values and values[-1] > (limit := evaluate(rows, bindings)):
                raise _error("OFFSETS", spec, f"last offset {values[-1]}", f"at most the {limit} rows of {path}")

    def check_workspace(self, workspace: torch.Tensor | None, nbytes: int, extents: Iterable[Extent]) -> None:
        """Raises WorkspaceError unless `workspace` has `nbytes` bytes here, aligned, contiguous and of its own."""
        if workspace is None:
            if nbytes:
                raise WorkspaceError(
                    "WORKSPACE_MISSING",
                    asked="execute without a workspace",
                    seen="None",
                    required=f"{nbytes} bytes on {self.device}",
                    hint="allocate get_workspace_size(bindings) bytes, or call the graph itself",
                )
            return
        if not isinstance(workspace, torch.Tensor):
            raise WorkspaceError(
                "WORKSPACE_TYPE", asked="workspace", seen=type(workspace).__name__, required="a torch tensor"
            )
        if workspace.device != self.device:
            raise WorkspaceError("WORKSPACE_DEVICE", asked="workspace", seen=workspace.device, required=self.device)
        if not workspace.is_contiguous():
            raise WorkspaceError(
                "WORKSPACE_STRIDE", asked="workspace", seen=f"stride {workspace.stride()}", required="contiguous"
            )
        size = workspace.numel() * workspace.element_size()
        if size < nbytes:
            raise WorkspaceError(
                "WORKSPACE_SHORT",
                asked="workspace",
                seen=f"{size} bytes",
                required=f"{nbytes} bytes",
                hint="get_workspace_size(bindings) says how much",
            )
        if not size:
            return
        pointer = workspace.data_ptr()
        if pointer % WORKSPACE_ALIGNMENT[self.device.type]:
            raise WorkspaceError("WORKSPACE_ALIGNMENT", asked="workspace", seen=f"address {pointer:#x}",
                                 required=f"a multiple of {WORKSPACE_ALIGNMENT[self.device.type]} bytes")  # fmt: skip
        for start, end, _, name, _ in extents:
            if start < pointer + size and pointer < end:
                raise WorkspaceError("WORKSPACE_OVERLAP", asked="workspace", seen=f"bytes shared with {name}",
                                     required="memory of its own")  # fmt: skip


def span_of(t: torch.Tensor) -> int:
    """Bytes from the first to the last element of a tensor; 0 for an empty one."""
    if not t.numel():
        return 0
    return (sum((d - 1) * s for d, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def _error(code: str, spec: TensorSpec, seen: object, required: object, hint: str | None = None) -> VariantPackError:
    return VariantPackError(
        code, asked=f"buffer of {spec.name}", seen=seen, required=required, hint=hint, where=spec.location
    )
