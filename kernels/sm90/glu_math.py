"""The GLU for one element: device functions beside the plain formulas they implement, as epilogue_math.py does it.

gate and up are the product's columns after alpha, bias and rounding; `m` is `DeviceMath` or `NumpyMath`.
"""

from __future__ import annotations

from .config import Activation


def _swiglu(gate, up, act: Activation, m):
    return gate * m.sigmoid(gate) * up


def _geglu(gate, up, act: Activation, m):
    y1 = m.minimum(gate, act.clamp_max)
    y2 = m.minimum(m.maximum(up, act.clamp_min), act.clamp_max) + act.offset
    return y1 * m.sigmoid(y1 * act.alpha) * y2


def _situglu(gate, up, act: Activation, m):
    tg = m.tanh(gate * (1.0 / act.beta1))
    tu = m.tanh(up * (1.0 / act.beta2))
    return tg * m.sigmoid(gate) * act.beta1 * (tu * act.beta2)


FORMULAS = {"swiglu": _swiglu, "geglu": _geglu, "situglu": _situglu}


def glu(gate, up, act: Activation, m):
    """The activation, before prob, of one element, or of arrays with `NumpyMath`."""
    return FORMULAS[act.name](gate, up, act, m)
