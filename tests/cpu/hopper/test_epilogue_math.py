"""The kernel's formulas for one element, in numpy, against the definition: ordinary values, bounds, NaN, infinity."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from opfuse.kernels.reference import glu
from opfuse.kernels.sm90.config import Activation
from opfuse.kernels.sm90.epilogue_math import NumpyMath, glu_backward

NAN, INF = float("nan"), float("inf")
ACTS = {
    "swiglu": (Activation("swiglu"), {}),
    "geglu": (
        Activation("geglu", alpha=1.25, clamp_max=1.5, clamp_min=-0.5, offset=0.25),
        {"geglu_alpha": 1.25, "clamp_max": 1.5, "clamp_min": -0.5, "linear_offset": 0.25},
    ),
    "situglu": (Activation("situglu", beta1=1.25, beta2=2.0), {"situ_beta1": 1.25, "situ_beta2": 2.0}),
}
VALUES = (-3.0, -0.5, 0.0, 0.75, 1.5, 4.0, NAN, INF, -INF)


@pytest.mark.parametrize("with_prob", [True, False])
@pytest.mark.parametrize("act", ACTS)
def test_every_value_goes_where_the_definition_sends_it(act: str, with_prob: bool) -> None:
    configured, attributes = ACTS[act]
    grid = [np.array(v) for v in zip(*itertools.product((-2.0, 0.5, NAN, INF), VALUES, VALUES), strict=True)]
    r, gate, up = grid
    prob = -1.5 if with_prob else None
    with np.errstate(all="ignore"):
        dgate, dup, term, y = glu_backward(r, gate, up, prob, configured, NumpyMath())
    factors = glu.ACTIVATION[act](torch.tensor(gate), torch.tensor(up), attributes)
    dy, p = torch.tensor(r), 1.0 if prob is None else prob
    wanted = {
        "dgate": (dgate, dy * p * factors.up * factors.gate_slope),
        "dup": (dup, dy * p * factors.gate * factors.up_slope),
        "dprob": (term, dy * factors.gate * factors.up),
        "activation": (y, factors.gate * factors.up),
    }
    for name, (got, want) in wanted.items():
        torch.testing.assert_close({name: torch.tensor(got)}, {name: want}, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert all(bool(want.isnan().any()) for _, want in wanted.values())
