"""The GLU's backward for one element: device functions beside the plain formulas they implement.

A device function takes float32 scalars and returns (dgate, dup, dprob term, activation); `reference` states the same
in numpy float64. r is the matmul's result after alpha, gate and up are after beta. NaN and infinity go where they go in
`kernels/reference`: minimum and maximum of a NaN are NaN.
"""

from __future__ import annotations

from .config import Activation


def _swiglu(r, gate, up, prob, act: Activation, m):
    s = m.sigmoid(gate)
    silu = gate * s
    slope = m.fma(silu, 1.0 - s, s)
    q = r * silu
    rp = r if prob is None else r * prob
    dup = q if prob is None else q * prob
    return rp * up * slope, dup, q * up, silu * up


def _geglu(r, gate, up, prob, act: Activation, m):
    y1 = m.minimum(gate, act.clamp_max)
    y2 = m.minimum(m.maximum(up, act.clamp_min), act.clamp_max) + act.offset
    s = m.sigmoid(y1 * act.alpha)
    a = y1 * s
    slope = m.fma(a * act.alpha, 1.0 - s, s)
    q = r * a
    rp = r if prob is None else r * prob
    dup = q if prob is None else q * prob
    # Factors, not choices: a NaN from elsewhere must show in the gradient whatever the clamp does.
    gate_kept = m.indicator(gate <= act.clamp_max)
    up_kept = m.indicator(m.both(up >= act.clamp_min, up <= act.clamp_max))
    return rp * y2 * (slope * gate_kept), dup * up_kept, q * y2, a * y2


def _situglu(r, gate, up, prob, act: Activation, m):
    tg = m.tanh(gate * (1.0 / act.beta1))
    tu = m.tanh(up * (1.0 / act.beta2))
    s = m.sigmoid(gate)
    big_g = tg * s * act.beta1
    big_u = tu * act.beta2
    slope = m.fma(big_g, 1.0 - s, m.fma(-(tg * tg), s, s))
    rp = r if prob is None else r * prob
    q = r * big_g
    dup = (q if prob is None else q * prob) * m.fma(-tu, tu, m.one)
    return rp * big_u * slope, dup, q * big_u, big_g * big_u


FORMULAS = {"swiglu": _swiglu, "geglu": _geglu, "situglu": _situglu}


class DeviceMath:
    """The operations that the formulas need, on DSL scalars."""

    def __init__(self) -> None:
        import cutlass

        from . import primitives as p

        self.sigmoid, self.tanh = p.sigmoid, p.tanh
        self.fma = lambda a, b, c: p.fma(a, b, c)
        self.minimum = lambda a, b: p.min_nan(a, cutlass.Float32(b))
        self.maximum = lambda a, b: p.max_nan(a, cutlass.Float32(b))
        self.zero_unless = lambda keep, value: p.select(keep, value, cutlass.Float32(0.0))
        self.indicator = lambda holds: p.select(holds, cutlass.Float32(1.0), cutlass.Float32(0.0))
        self.both = lambda a, b: a & b
        self.one = cutlass.Float32(1.0)


class NumpyMath:
    """The same in numpy float64."""

    def __init__(self) -> None:
        import numpy as np

        self.sigmoid = lambda x: 1.0 / (1.0 + np.exp(-x))
        self.tanh, self.minimum, self.maximum = np.tanh, np.minimum, np.maximum
        self.fma = lambda a, b, c: a * b + c
        self.zero_unless = lambda keep, value: np.where(keep, value, 0.0)
        self.indicator = lambda holds: np.where(holds, 1.0, 0.0)
        self.both = lambda a, b: a & b
        self.one = 1.0


def glu_backward(r, gate, up, prob, act: Activation, m):
    """(dgate, dup, dprob term, activation before prob) of one element, or of arrays with `NumpyMath`."""
    return FORMULAS[act.name](r, gate, up, prob, act, m)
