"""Choosing between plans by measuring them on the device, and remembering who won for which sizes."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

import torch

from .buffers import ROWS_OF_OFFSETS, Binder, Bound, Buffer
from .executor import Executable, allocate
from .ir.dims import evaluate
from .ir.dtypes import DataType
from .ir.graph import OpGraph
from .ir.tensor import TensorSpec

Bucket = tuple[tuple[str, int], ...]

WARM_UP_RUNS = 2
MINIMUM_RUNS = 5
MINIMUM_SECONDS = 0.02
E8M0_ONE = 127


def bucket_of(bindings: Mapping[str, int]) -> Bucket:
    """Sizes that share a winner: each symbol's value rounded up to a power of two."""
    return tuple((name, 1 << max(value - 1, 0).bit_length()) for name, value in sorted(bindings.items()))


def device_name(device: torch.device) -> str:
    """What a measurement holds for: the GPU's model, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@dataclass(frozen=True)
class Measurement:
    """Median seconds of one plan at some symbol values."""

    plan: str
    bucket: Bucket
    seconds: float


@dataclass
class TuningRecord:
    """The winners of one graph by device model and bucket, with every measurement behind them."""

    winners: dict[tuple[str, Bucket], str] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)

    def winner(self, device: torch.device, bindings: Mapping[str, int]) -> str | None:
        """The plan that won for these sizes, else for the nearest bucket that was measured on such a device."""
        name, bucket = device_name(device), bucket_of(bindings)
        if (exact := self.winners.get((name, bucket))) is not None:
            return exact
        measured = [b for held, b in self.winners if held == name]
        if not measured:
            return None
        return self.winners[name, min(measured, key=lambda b: (_distance(b, bucket), b))]


def _distance(one: Bucket, other: Bucket) -> int:
    values = dict(other)
    return sum(abs(v.bit_length() - values[name].bit_length()) for name, v in one if name in values)


def synthetic_buffers(
    graph: OpGraph, bindings: Mapping[str, int], device: torch.device, seed: int = 0
) -> dict[int, Buffer]:
    """Buffers for every graph input and output: unit-scale values, offsets that share the rows evenly."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    rows = {
        node.input_uids["offsets"]: evaluate(graph.tensors[node.input_uids[port]].dim[0], bindings)
        for node in graph.nodes
        if (port := ROWS_OF_OFFSETS.get(node.op)) and "offsets" in node.input_uids
    }
    made: dict[int, Buffer] = {}
    for spec in (*graph.graph_inputs, *graph.graph_outputs):
        if spec.uid in rows:
            made[spec.uid] = _even_offsets(spec, rows[spec.uid], bindings, device)
        elif spec.discrete:
            experts = evaluate(spec.dim[0], bindings)
            part = TensorSpec(
                spec.uid, spec.name, spec.dim[1:], spec.stride[1:], spec.data_type, alignment=spec.alignment
            )
            made[spec.uid] = tuple(_filled(part, bindings, device, generator) for _ in range(experts))
        else:
            made[spec.uid] = _filled(spec, bindings, device, generator)
    return made


def _even_offsets(spec: TensorSpec, rows: int, bindings: Mapping[str, int], device: torch.device) -> torch.Tensor:
    """End offsets in whole tiles of 256 rows where there are enough, so that kernels for aligned groups run too."""
    experts = evaluate(spec.dim[0], bindings)
    step = math.lcm(spec.multiple_of, 256 if rows >= 256 * experts else 1)
    ends = [rows * (g + 1) // experts // step * step for g in range(experts)]
    if ends:
        ends[-1] = rows // spec.multiple_of * spec.multiple_of
    offsets = allocate(spec, bindings, device, zeroed=True)
    offsets.copy_(torch.tensor(ends, dtype=offsets.dtype))
    return offsets


def _filled(
    spec: TensorSpec, bindings: Mapping[str, int], device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    made = allocate(spec, bindings, device, zeroed=True)
    kind = spec.data_type.info.kind
    if spec.is_output:
        return made
    if spec.data_type is DataType.FP8_E8M0:
        made.view(torch.uint8).fill_(E8M0_ONE)
    elif kind in ("int", "bool") or spec.data_type is DataType.FP4_E2M1:
        limit = 256 if spec.data_type is DataType.FP4_E2M1 else 2 if kind == "bool" else 8
        made.copy_(torch.randint(limit, made.shape, generator=generator))
    else:
        made.copy_(torch.randn(made.shape, generator=generator).to(made.dtype))
    return made


def measure(executable: Executable, bound: Bound, workspace: torch.Tensor | None) -> float:
    """Median seconds of one run, over at least MINIMUM_RUNS runs and MINIMUM_SECONDS, after a warm-up."""
    run = _timer(executable, bound, workspace)
    for _ in range(WARM_UP_RUNS):
        run()
    times: list[float] = []
    while len(times) < MINIMUM_RUNS or sum(times) < MINIMUM_SECONDS:
        times.append(run())
    return statistics.median(times)


def _timer(executable: Executable, bound: Bound, workspace: torch.Tensor | None) -> Callable[[], float]:
    def on_cpu() -> float:
        start = time.perf_counter()
        executable.run(bound, workspace)
        return time.perf_counter() - start

    def on_cuda() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(executable.device):
            start.record()
            executable.run(bound, workspace)
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    return on_cuda if executable.device.type == "cuda" else on_cpu


def tune(
    executables: Sequence[Executable],
    binder: Binder,
    sizes: Sequence[Mapping[str, int]],
    record: TuningRecord,
    *,
    stream: TextIO | None = None,
) -> None:
    """Measures every plan at every size on synthetic data and writes the winners into `record`.

    A progress line shows on `stream` (stderr by default) when it is a terminal.
    """
    name = device_name(binder.device)
    with Progress(len(executables) * len(sizes), stream if stream is not None else sys.stderr) as progress:
        for bindings in sizes:
            bucket = bucket_of(bindings)
            bound = binder.bind(synthetic_buffers(binder.graph, bindings, binder.device))
            taken: list[Measurement] = []
            for executable in executables:
                progress.step(f"measuring {executable.plan.name}")
                nbytes = executable.workspace_bytes(bound.bindings)
                workspace = torch.empty(nbytes, dtype=torch.uint8, device=binder.device) if nbytes else None
                taken.append(Measurement(executable.plan.name, bucket, measure(executable, bound, workspace)))
            record.measurements += taken
            record.winners[name, bucket] = min(taken, key=lambda m: m.seconds).plan


class Progress:
    """A progress line on a terminal; silent anywhere else."""

    WIDTH = 24

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total, self._stream = total, stream
        self._done = 0
        self._shown = stream.isatty()

    def __enter__(self) -> Progress:
        return self

    def step(self, label: str) -> None:
        """Starts the next item."""
        if self._shown:
            filled = self.WIDTH * self._done // self._total
            bar = "#" * filled + "-" * (self.WIDTH - filled)
            self._stream.write(f"\r\x1b[K[{bar}] {self._done + 1}/{self._total} {label}")
            self._stream.flush()
        self._done += 1

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
