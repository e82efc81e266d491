"""What an operation is: ports, attributes and inference, declared once per op and read by everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .dims import Dim
from .dtypes import CODE_TYPES, FLOATING_TYPES, DataType
from .errors import GraphError
from .layouts import GluLayout, ScaleLayout
from .tensor import TensorSpec

INDEX_TYPES = (DataType.INT32, DataType.INT64)


@dataclass(frozen=True)
class Port:
    """One input or output of an op: the dtypes that it accepts and, for an output, the dtype it has by default.

    `default_type` None means the graph's own default (intermediate for virtual tensors, io otherwise).
    """

    name: str
    doc: str
    data_types: tuple[DataType, ...] = FLOATING_TYPES
    optional: bool = False
    default_type: DataType | None = None


@dataclass(frozen=True)
class Attribute:
    """One attribute: its default (None together with `required` means it must be given) and what it may be."""

    name: str
    default: Any
    doc: str
    allowed: Callable[[Any], bool]
    requirement: str
    required: bool = False


@dataclass(frozen=True)
class Inferred:
    """What inference says about one output; `data_type` where the attributes decide it."""

    dim: tuple[Dim, ...]
    glu_layout: GluLayout | None = None
    scale_layout: ScaleLayout | None = None
    data_type: DataType | None = None


@dataclass(frozen=True)
class InferenceInput:
    """What `infer` may look at: a tensor's shape and layouts, not its data type."""

    name: str
    dim: tuple[Dim, ...]
    glu_layout: GluLayout | None = None
    scale_layout: ScaleLayout | None = None
    data_type: DataType | None = None
    discrete: bool = False

    @staticmethod
    def of(tensor: TensorSpec) -> InferenceInput:
        return InferenceInput(
            tensor.name, tensor.dim, tensor.glu_layout, tensor.scale_layout, tensor.data_type, tensor.discrete
        )


Infer = Callable[[Mapping[str, InferenceInput], Mapping[str, Any]], dict[str, Inferred]]


@dataclass(frozen=True)
class OpSpec:
    """One operation.

    `infer` maps inputs and attributes to the outputs that exist, in port order; it raises GraphError where shapes or
    layouts do not fit. `commutative`: the first two inputs may be swapped. `reads_output`: output ports whose old
    contents are read (in-place accumulation), as a function of the attributes. `formula` is the definition in words,
    from numerics.
    """

    name: str
    doc: str
    formula: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    infer: Infer
    attributes: tuple[Attribute, ...] = ()
    commutative: bool = False
    reads_output: Callable[[Mapping[str, Any]], tuple[str, ...]] = field(default=lambda attributes: ())

    def input(self, name: str) -> Port:
        return next(p for p in self.inputs if p.name == name)

    def output(self, name: str) -> Port:
        return next(p for p in self.outputs if p.name == name)

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` with defaults filled in. Raises GraphError for an unknown, missing or disallowed attribute."""
        known = {a.name: a for a in self.attributes}
        if unknown := sorted(set(given) - set(known)):
            raise GraphError(
                "ATTRIBUTE_UNKNOWN", asked=f"{self.name}({', '.join(unknown)})", required=f"one of {sorted(known)}"
            )
        values = {}
        for attribute in self.attributes:
            if attribute.required and given.get(attribute.name) is None:
                raise GraphError(
                    "ATTRIBUTE_MISSING", asked=f"{self.name}.{attribute.name}", required=attribute.requirement
                )
            value = given.get(attribute.name, attribute.default)
            if not attribute.allowed(value):
                raise GraphError("ATTRIBUTE_VALUE", asked=f"{self.name}.{attribute.name}", seen=repr(value),
                                 required=attribute.requirement)  # fmt: skip
            values[attribute.name] = value
        return values


def require(condition: bool, code: str, asked: str, seen: object, required: str, hint: str | None = None) -> None:
    """Raises GraphError(code) unless `condition` holds."""
    if not condition:
        raise GraphError(code, asked=asked, seen=seen, required=required, hint=hint)


def require_rank(tensor: InferenceInput, rank: int, asked: str) -> None:
    require(len(tensor.dim) == rank, "RANK", f"{asked} = {tensor.name}", f"dim {tensor.dim}", f"rank {rank}")


def require_equal(got: Dim, wanted: Dim, asked: str, what: str) -> None:
    require(got == wanted, "SHAPE", asked, got, f"{what} = {wanted}")


def one_of(*values: Any) -> tuple[Callable[[Any], bool], str]:
    """The `allowed` and `requirement` of an attribute with a closed set of values."""
    return (lambda v: v in values), "one of " + ", ".join(map(repr, values))


BOOLEAN: tuple[Callable[[Any], bool], str] = ((lambda v: isinstance(v, bool)), "True or False")

__all__ = [
    "BOOLEAN", "CODE_TYPES", "FLOATING_TYPES", "INDEX_TYPES", "Attribute", "Infer", "InferenceInput",
    "Inferred", "OpSpec", "Port", "one_of", "require", "require_equal", "require_rank",
]  # fmt: skip
