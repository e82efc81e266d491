"""What the numerics tests share: data that hides no mistake, poisoned outputs, and the comparison with the oracle."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opfuse.graph_ops.ir.dtypes import DATA_TYPES, DataType
from opfuse.graph_ops.ir.layouts import GluLayout, ScaleLayout
from opfuse.graph_ops.ir.op import InferenceInput
from opfuse.graph_ops.ir.ops import OPS
from opfuse.graph_ops.ir.tensor import TensorSpec, contiguous_stride
from opfuse.kernels import torch_ops
from opfuse.kernels.reference import evaluate, torch_type

SCALARS = (-1.5, 0.5, 2.0, 0.0)

SPLITS: dict[str, tuple[int, ...]] = {
    "regular": (32, 32, 32, 32),
    "zero_tokens_front": (0, 48, 16, 32),
    "zero_tokens_middle": (32, 0, 0, 48),
    "zero_tokens_end": (16, 64, 16, 0),
    "zero_tokens_all": (0, 0, 0, 0),
    "random_uneven": (7, 41, 1, 30),
    "imbalanced_avg_misaligned": (90, 3, 5, 1),
    "one_takes_all": (0, 97, 0, 0),
}
"""Rows per expert: TransformerEngine's seven patterns, and one expert that takes all."""


def require_varied(values: torch.Tensor) -> torch.Tensor:
    """`values`, unless they are all the same: a constant hides a factor that is missing, squared or swapped."""
    if values.numel() < 2 or bool((values == values.flatten()[0]).all()):
        raise ValueError(f"test data must vary, got {values}")
    return values


class Draw:
    """Seeded data of unit scale. The seed is fresh in every run and part of every assertion's message."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = torch.randn(*shape, generator=self.generator)
        return (require_varied(values) if values.numel() > 1 else values).to(dtype)

    def scalars(self, count: int) -> torch.Tensor:
        """float32 (count,) from SCALARS: every one of them in turn, in random order."""
        cycle = torch.tensor([SCALARS[i % len(SCALARS)] for i in range(count)])
        return require_varied(cycle[torch.randperm(count, generator=self.generator)])

    def wide(self, *shape: int) -> torch.Tensor:
        """Values whose magnitudes span the formats' ranges and beyond."""
        exponent = torch.randint(-24, 20, shape, generator=self.generator)
        return require_varied(torch.ldexp(torch.randn(*shape, generator=self.generator), exponent))


def offsets_of(split: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(split).cumsum(0).to(dtype)


def data_type_of(tensor: torch.Tensor) -> DataType:
    name = str(tensor.dtype).removeprefix("torch.")
    return next(t for t, info in DATA_TYPES.items() if info.torch_name == name and info.packed == 1)


@dataclass
class Case:
    """One op with its inputs and the specs that a graph would give it."""

    op: str
    inputs: dict[str, Any]
    attributes: dict[str, Any]
    specs: dict[str, TensorSpec]
    seed: int | None = None
    initial: dict[str, torch.Tensor] = field(default_factory=dict)

    def oracle(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        return evaluate(self.op, {**self.inputs, **self.initial}, self.attributes, self.specs, dtype=dtype)

    def run(self, *, strided: bool = False) -> dict[str, torch.Tensor]:
        """The outputs that torch_ops writes into poisoned memory; with gaps between rows if `strided`."""
        outputs, guards = {}, []
        for port in self.output_ports:
            outputs[port], guard = poisoned(self.specs[port], strided)
            guards.append(guard)
            if port in self.initial:
                outputs[port].copy_(self.initial[port])
        torch_ops.run(self.op, self.inputs, outputs, self.attributes, self.specs)
        assert all(guard() for guard in guards), f"{self.op}: wrote outside its output, seed {self.seed}"
        return outputs

    @property
    def output_ports(self) -> list[str]:
        return [p for p in self.specs if p not in self.inputs]


def stored_shape(spec: TensorSpec) -> tuple[int, ...]:
    shape = spec.shape({})
    packed = spec.data_type.info.packed
    return (*shape[:-1], shape[-1] // packed) if shape else ()


def poisoned(spec: TensorSpec, strided: bool = False) -> tuple[torch.Tensor, Callable[[], bool]]:
    """An output full of NaN (bytes: 0xFF), and a check that the memory around it stays as it was."""
    shape, dtype = stored_shape(spec), torch_type(spec.data_type)
    gap = 3 if strided and shape else 0
    memory = torch.empty((*shape[:-1], shape[-1] + gap) if shape else (), dtype=dtype)
    raw = memory.view(torch.uint8) if dtype.itemsize == 1 else memory
    raw.fill_(1 if dtype is torch.bool else 0xFF if dtype.itemsize == 1 else math.nan)
    before = raw.clone()
    out = memory[..., : shape[-1]] if gap else memory

    def untouched() -> bool:
        return not gap or (torch.equal(raw[..., shape[-1] :].isnan(), before[..., shape[-1] :].isnan()) and (
            dtype.itemsize > 1 or torch.equal(raw[..., shape[-1] :], before[..., shape[-1] :])
        ))  # fmt: skip

    return out, untouched


def make_case(
    op: str,
    inputs: Mapping[str, Any],
    attributes: Mapping[str, Any] | None = None,
    *,
    layouts: Mapping[str, GluLayout | ScaleLayout] | None = None,
    output_types: Mapping[str, DataType] | None = None,
    input_types: Mapping[str, DataType] | None = None,
    seed: int | None = None,
    initial: Mapping[str, torch.Tensor] | None = None,
) -> Case:
    """The case, with specs as inference gives them. A discrete b is a list of matrices, a number a constant."""
    layouts, output_types, input_types = layouts or {}, output_types or {}, input_types or {}
    complete = OPS[op].complete(attributes or {})
    specs: dict[str, TensorSpec] = {}
    for uid, (port, value) in enumerate(inputs.items()):
        specs[port] = _input_spec(uid, port, value, layouts.get(port), input_types.get(port))
    inferred = OPS[op].infer({p: InferenceInput.of(t) for p, t in specs.items()}, complete)
    for port, result in inferred.items():
        chosen = output_types.get(port) or result.data_type or OPS[op].output(port).default_type or DataType.FLOAT
        specs[port] = TensorSpec(
            100 + len(specs), port, result.dim, contiguous_stride(result.dim), chosen, is_output=True,
            glu_layout=result.glu_layout, scale_layout=result.scale_layout,
        )  # fmt: skip
    return Case(op, dict(inputs), complete, specs, seed, dict(initial or {}))


def _input_spec(uid: int, port: str, value: Any, layout: Any, data_type: DataType | None) -> TensorSpec:
    if isinstance(value, float):
        return TensorSpec(uid, port, (), (), data_type or DataType.FLOAT, value=value)
    glu = layout if isinstance(layout, GluLayout) else None
    scale = layout if isinstance(layout, ScaleLayout) else None
    if isinstance(value, list):
        dim = (len(value), *value[0].shape)
        return TensorSpec(uid, port, dim, (0, *value[0].stride()), data_type_of(value[0]), discrete=True)
    chosen = data_type or data_type_of(value)
    dim = (*value.shape[:-1], value.shape[-1] * chosen.info.packed)
    return TensorSpec(uid, port, dim, tuple(value.stride()), chosen, glu_layout=glu, scale_layout=scale)


def assert_close(out: torch.Tensor, reference: torch.Tensor, plain: torch.Tensor, what: str) -> None:
    """Error at most twice that of `plain`, a plain torch implementation in the same dtype, + 1e-5; cosine > 0.999."""
    got, want, other = out.double(), reference.double(), plain.double()
    assert got.shape == want.shape == other.shape, what
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN where the oracle has none, or none where it has"
    finite = want.isfinite()
    if not bool(finite.any()):
        return
    got, want, other = got[finite], want[finite], other[finite]
    error, allowed = (got - want).abs().max().item(), 2 * (other - want).abs().max().item() + 1e-5
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"
    if want.abs().max() == 0:
        assert got.abs().max() == 0, f"{what}: exact zeros expected"
        return
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0).item()
    assert cosine > 0.999, f"{what}: cosine {cosine}"


def assert_same_bytes(out: torch.Tensor, want: torch.Tensor, what: str) -> None:
    got, expected = out.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    assert got.shape == expected.shape, f"{what}: {got.shape} != {expected.shape}"
    differ = (got != expected).nonzero()
    assert not len(differ), f"{what}: {len(differ)} bytes differ, first at {differ[0].tolist()}"


@pytest.fixture
def draw() -> Draw:
    """Fresh data; the seed is printed with a failure."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return Draw(seed)


@pytest.fixture
def num() -> SimpleNamespace:
    """The helpers of this folder."""
    return SimpleNamespace(
        Case=Case, Draw=Draw, SPLITS=SPLITS, SCALARS=SCALARS, make_case=make_case, assert_close=assert_close,
        assert_same_bytes=assert_same_bytes, offsets_of=offsets_of, require_varied=require_varied, poisoned=poisoned,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`split`, `dtype` and `layout` parametrise a test by their names."""
    if "split" in metafunc.fixturenames:
        metafunc.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
    if "layout" in metafunc.fixturenames:
        layouts = [GluLayout.interleaved(32), GluLayout.interleaved(1), GluLayout.concatenated()]
        metafunc.parametrize("layout", layouts, ids=map(str, layouts))
