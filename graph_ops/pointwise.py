"""The pointwise and reduction verbs of the builder, in cuDNN's spelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .builder import Operand, Tensor


class PointwiseVerbs:
    """Operands broadcast as in numpy; a number is a compile-time scalar. Formulas: `formula` of each op."""

    def _one(self, op: str, name: str | None, inputs: Mapping[str, Any], **attributes: Any) -> Tensor:
        """Adds a node and returns its only output; GraphBuilder does."""
        raise NotImplementedError

    def add(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("add", name, dict(a=a, b=b))

    def sub(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("sub", name, dict(a=a, b=b))

    def mul(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("mul", name, dict(a=a, b=b))

    def div(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("div", name, dict(a=a, b=b))

    def min(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("min", name, dict(a=a, b=b))

    def max(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("max", name, dict(a=a, b=b))

    def neg(self, x: Tensor, *, name: str | None = None) -> Tensor:
        return self._one("neg", name, dict(x=x))

    def exp(self, x: Tensor, *, name: str | None = None) -> Tensor:
        return self._one("exp", name, dict(x=x))

    def tanh(self, x: Tensor, *, name: str | None = None) -> Tensor:
        return self._one("tanh", name, dict(x=x))

    def identity(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """x, rounded to the output's data type."""
        return self._one("identity", name, dict(x=x))

    def sigmoid(self, x: Tensor, *, name: str | None = None) -> Tensor:
        return self._one("sigmoid", name, dict(x=x))

    def swish(self, x: Tensor, *, swish_beta: float = 1.0, name: str | None = None) -> Tensor:
        """x * sigmoid(swish_beta * x)."""
        return self._one("swish", name, dict(x=x), swish_beta=float(swish_beta))

    def swish_backward(
        self, loss: Tensor, input: Tensor, *, swish_beta: float = 1.0, name: str | None = None
    ) -> Tensor:
        """Gradient of swish at `input` times `loss` (cuDNN's argument names)."""
        return self._one("swish_backward", name, dict(dy=loss, x=input), swish_beta=float(swish_beta))

    def gelu(self, x: Tensor, *, approximate: str = "none", name: str | None = None) -> Tensor:
        return self._one("gelu", name, dict(x=x), approximate=approximate)

    def relu(self, x: Tensor, *, name: str | None = None) -> Tensor:
        return self._one("relu", name, dict(x=x))

    def srelu(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Square of relu."""
        return self._one("srelu", name, dict(x=x))

    def cmp_eq(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("cmp_eq", name, dict(a=a, b=b))

    def cmp_neq(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("cmp_neq", name, dict(a=a, b=b))

    def cmp_gt(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("cmp_gt", name, dict(a=a, b=b))

    def cmp_ge(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("cmp_ge", name, dict(a=a, b=b))

    def cmp_lt(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("cmp_lt", name, dict(a=a, b=b))

    def cmp_le(self, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        return self._one("cmp_le", name, dict(a=a, b=b))

    def select(self, mask: Tensor, a: Operand, b: Operand, *, name: str | None = None) -> Tensor:
        """a where mask, else b (cuDNN: binary_select)."""
        return self._one("select", name, dict(mask=mask, a=a, b=b))

    def reduction(self, x: Tensor, mode: str, axis: int | Sequence[int], *, keep_dim: bool = False,
                  name: str | None = None) -> Tensor:  # fmt: skip
        """Reduces `axis` by `mode`: ADD, MUL, MIN, MAX, AMAX, AVG, NORM1 or NORM2."""
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        axes = tuple(a + len(x.dim) if a < 0 else a for a in axes)
        return self._one("reduction", name, dict(x=x), mode=mode, axis=axes, keep_dim=keep_dim)
