"""Random cuDNN graphs of pointwise nodes and reductions, read and run, against the same in float64."""

from __future__ import annotations

import random

import pytest
import torch
from opfuse.graph_ops import Graph

UNARY = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "swish": torch.nn.functional.silu,
    "identity": lambda x: x,
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "add_square": lambda a, b: a + b * b,
}
BACKWARD = {
    "sigmoid_backward": lambda dy, x: dy * torch.sigmoid(x) * (1 - torch.sigmoid(x)),
    "tanh_backward": lambda dy, x: dy * (1 - torch.tanh(x) ** 2),
    "swish_backward": lambda dy, x: dy * torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x))),
}
COMPARE = {"cmp_gt": torch.gt, "cmp_le": torch.le}
ROWS, COLUMNS = 6, 8
SHAPES = [(1, ROWS, COLUMNS), (1, ROWS, 1), (1, 1, COLUMNS)]


def declare(kit, seed):
    """A random graph, the buffers of its inputs, and what its outputs must be, by uid."""
    pick = random.Random(seed)
    values = torch.Generator().manual_seed(seed)
    g = kit.graph(name=f"random_{seed}", io_data_type=kit.D.FLOAT)
    known = []  # (tensor, float64 value)
    given, expected = {}, {}
    for i in range(3):
        shape = pick.choice(SHAPES)
        value = torch.randn(shape, generator=values)
        t = g.tensor(name=f"in{i}", dim=list(shape), data_type=kit.D.FLOAT, uid=pick.choice([None, 100 + i, 7 - i]))
        given[t], known = value, [*known, (t, value.double())]
    constant = pick.uniform(-1, 1)
    scalar = g.tensor_scalar(constant, kit.cudnn.scalar_type.COMPILE_TIME_CONST)
    known.append((scalar, torch.tensor(constant, dtype=torch.float32).double().view(1, 1, 1)))
    used = set()
    for _ in range(9):
        kind = pick.choice(["unary", "binary", "binary", "backward", "compare", "select", "reduction"])
        (a, x), (b, y) = pick.choice(known), pick.choice(known)
        if kind == "unary":
            op = pick.choice(list(UNARY))
            made = (getattr(g, op)(input=a), UNARY[op](x))
        elif kind == "binary":
            op = pick.choice(list(BINARY))
            named = dict(input0=a, input1=b) if op in ("max", "min") else dict(a=a, b=b)
            made = (getattr(g, op)(**named), BINARY[op](x, y))
        elif kind == "backward":
            op = pick.choice(list(BACKWARD))
            made = (getattr(g, op)(loss=a, input=b), BACKWARD[op](x, y))
        elif kind == "compare":
            op = pick.choice(list(COMPARE))
            made = (getattr(g, op)(input=a, comparison=b), COMPARE[op](x, y).double())
        elif kind == "select":
            mask = g.cmp_gt(input=a, comparison=b)
            made = (g.binary_select(input0=a, input1=b, mask=mask), torch.where(x > y, x, y))
        else:
            if tuple(x.shape) != SHAPES[0]:
                continue
            axis = pick.choice([1, 2])
            out = g.reduction(input=a, mode=kit.cudnn.reduction_mode.AVG)
            made = (out.set_dim([1 if i == axis else d for i, d in enumerate(x.shape)]), x.mean(axis, keepdim=True))
        used |= {t for t in (a, b) if kind not in ("unary", "reduction") or t is a}
        known.append(made)
        if pick.random() < 0.4:
            made[0].set_output(True)
            expected[made[0]] = made[1]
    last, value = known[-1]
    if last is not scalar and last not in given:
        last.set_output(True)
        expected[last] = value
    return g, {t: v for t, v in given.items() if t in used}, expected


@pytest.mark.parametrize("number", range(60))
def test_a_random_graph_means_what_it_says(kit, number):
    seed = kit.seed + number
    g, given, expected = declare(kit, seed)
    if not expected:
        pytest.skip(f"seed {seed}: nothing but inputs was picked")
    out = Graph.from_cudnn(g, device="cpu")({t.uid: v for t, v in given.items()})
    for t, value in expected.items():
        seen = out[t.uid].double()
        assert seen.numel() == value.numel(), f"{t.name}, seed {seed}"
        error = (seen.flatten() - value.flatten()).abs().max() / value.abs().max().clamp(min=1)
        assert error < 1e-5, f"{t.name}, seed {seed}: {error}"
