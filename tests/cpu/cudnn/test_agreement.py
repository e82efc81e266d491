"""Our conditions against the class's own check_support, on random problems.

The class checks the device last, so on a machine without a GPU "CUDA is not available" means that all else passed.
Operands are meta tensors with exactly the strides of the problem's specs, translated here and not by the adapter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from opfuse.graph_ops.ir.dims import evaluate, symbol, symbols
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.problem import Problem

BF16, F16, F32, I32, I64 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT, DataType.INT32, DataType.INT64
CONFIGURATIONS = 400


def _always(problem: Problem) -> bool:
    return True


# Where we decline and the class does not, on purpose: for which problems, and why.
EXCEPTIONS: Mapping[str, tuple[Callable[[Problem], bool], str]] = {
    "OFFSETS_ALIGNMENT": (_always, "the class never reads offset values; unaligned ones overwrite neighbours"),
    "GLU_LAYOUT": (_always, "a tensor of the class has no layout: it takes any C for interleaved(32)"),
    "ALPHA_EXPONENT": (_always, "the class has one meaning of alpha and cannot be asked for another"),
    "PRODUCT_ROUNDING": (_always, "the class rounds to FLOAT or BFLOAT16 and cannot be asked for HALF"),
    "DBIAS_SOURCE": (
        _always,
        "the class sums unrounded gradients whatever D's type; a graph may mean the rounded ones",
    ),
    "DETERMINISTIC_DPROB": (_always, "the BF16 backend has no deterministic mode to ask for"),
    "DETERMINISTIC_DBIAS": (_always, "the BF16 backend has no deterministic mode to ask for"),
    "ALIGNMENT": (_always, "the class checks pointers, we check promises; a meta tensor's pointer is 0"),
    "ACTIVATION_ALIGNMENT": (_always, "as ALIGNMENT"),
    "ACTIVATION_SIZE": (_always, "the class does not count elements"),
    "STATIC_SHAPE": (_always, "a tensor of the class has integers for extents"),
    "B_LAYOUT": (lambda p: p["b"].discrete, "addresses have no strides: the class takes any for packed matrices"),
    "GEGLU_PARAMETERS": (
        lambda p: (
            all(abs(p.attributes[x]) < float("inf") for x in ("geglu_alpha", "clamp_min", "clamp_max"))
            and p.attributes["geglu_alpha"] > 0
        ),
        "finite as float64, infinite as the float32 that the kernel compiles in",
    ),
    "DEPTH_MULTIPLE": (lambda p: p["a"].dim[1] == 0, "the class takes K = 0, and would divide no work among its tiles"),
}


def _maybe(rng: random.Random, usual: Any, *others: Any) -> Any:
    """`usual` nineteen times of twenty, else one of the others."""
    return usual if rng.random() < 0.95 else rng.choice(others)


def random_problem(rng: random.Random, make: Callable[..., Problem]) -> Problem:
    """A problem with zero to a few faults."""
    act = _maybe(rng, rng.choice(["swiglu", "geglu"]), "situglu")
    roles = [r for r in ("alpha", "beta", "prob") if rng.random() < 0.5]
    roles += [r for r in ("activation",) if rng.random() < (0.3 if act == "geglu" else 0.05)]
    roles += [r for r in ("dbias",) if rng.random() < 0.3]
    roles += rng.choice([[], [], [], [], [], [], [], ["amax"], ["q_row", "sf_row"]])
    attributes: dict[str, Any] = {"alpha_exponent": _maybe(rng, 2, 1)}
    if act == "geglu":
        attributes["geglu_alpha"] = _maybe(rng, rng.choice([1.0, 1.702]), 0.0, -1.0, 1e300)
        attributes["clamp_max"] = _maybe(rng, rng.choice([7.0, 10.0]), float("inf"), 1e39)
        attributes["clamp_min"] = _maybe(rng, rng.choice([-7.0, -10.0]), float("-inf"))
    k, n = _maybe(rng, rng.choice([64, 128, 8]), 4, 100, 0), _maybe(rng, rng.choice([32, 64, 96, 256]), 48, 16, 0)
    experts = _maybe(rng, rng.choice([1, 2, 8, 1024]), 1025, 2000)
    rows = rng.choice([256, 768, symbol("M", 256), symbol("M", 512)])
    rows = _maybe(rng, rows, 0, 128, 300, symbol("M", 128), symbol("M"))
    changes: dict[str, dict[str, Any]] = {
        "a": {"data_type": _maybe(rng, BF16, F16, F32), "stride": _maybe(rng, (k, 1), (k + 8, 1), (1, rows))},
        "b": {"data_type": _maybe(rng, BF16, F16), "discrete": rng.random() < 0.4},
        "c": {"data_type": _maybe(rng, rng.choice([BF16, F16, F32]), DataType.FP8_E4M3),
              "glu_layout": _maybe(rng, GluLayout.interleaved(32), GluLayout.concatenated()),
              "stride": _maybe(rng, (2 * n, 1), (2 * n + 8, 1))},
        "d": {"data_type": _maybe(rng, rng.choice([BF16, F16, F32]), DataType.FP8_E5M2),
              "stride": _maybe(rng, (2 * n, 1), (4 * n, 1))},
        "offsets": {"data_type": _maybe(rng, I32, I64), "multiple_of": _maybe(rng, 256, 1),
                    "stride": _maybe(rng, (1,), (2,))},
        "alpha": {"stride": _maybe(rng, (1,), (4,))},
        "prob": {"stride": _maybe(rng, (1,), (2,))},
        "dprob": {"data_type": _maybe(rng, F32, BF16)},
        "dbias": {"data_type": _maybe(rng, BF16, F32), "stride": _maybe(rng, (2 * n, 1), (1, experts))},
        "activation": {"data_type": _maybe(rng, BF16, F32), "alignment": _maybe(rng, 32, 16)},
    }  # fmt: skip
    if rng.random() < 0.1:
        changes["b"]["stride"] = rng.choice([(k * n, 1, k + 8), (k * n, n + 8, 1), (n, n * experts, 1)])
    return make(
        rows=rows, k=k, n=n, experts=experts, act=act, b_major=rng.choice("kn"), roles=tuple(roles),
        without=("dprob",) if rng.random() < 0.2 else (), changes=changes, attributes=attributes,
        product=_maybe(rng, rng.choice([F32, BF16]), F16), deterministic=rng.random() < 0.1,
    )  # fmt: skip


def _smallest(problem: Problem) -> dict[str, int]:
    """The binding that shows what M is not known to be: the smallest that the symbol allows, above zero."""
    return {s.name: s.multiple_of for t in problem.tensors.values() for s in symbols(t.dim)}


def class_arguments(problem: Problem) -> dict[str, Any]:
    """The constructor's arguments for a problem that may be faulty in any way: its own shapes, strides and types."""
    bindings = _smallest(problem)

    def meta(role: str, order: tuple[int, ...], extra: int = 0) -> Any:
        if role not in problem:
            return None
        spec = problem[role]
        dim = [evaluate(spec.dim[i], bindings) for i in order]
        stride = [evaluate(spec.stride[i], bindings) for i in order]
        size = dim[0] * dim[1] if len(dim) > 1 else 1
        dtype = getattr(torch, spec.data_type.info.torch_name)
        return torch.empty_strided(dim + [1] * extra, stride + [size] * extra, dtype=dtype, device="meta")

    def described(tensor: torch.Tensor) -> Any:
        """A descriptor: for a tensor the class compares addresses with the other operands', and all here are 0."""
        from cudnn.api_base import TensorDesc

        order = sorted(range(tensor.ndim), key=tensor.stride().__getitem__)
        return TensorDesc(tensor.dtype, tuple(tensor.shape), tensor.stride(), tuple(order), tensor.device)

    m, experts = evaluate(problem["a"].dim[0], bindings), evaluate(problem["b"].dim[0], bindings)
    ones = {r: torch.empty(s, device="meta") for r, s in
            (("alpha", (experts,)), ("beta", (experts,)), ("prob", (m, 1, 1)), ("dprob", (m, 1, 1)))}  # fmt: skip
    b, given = problem["b"], problem.attributes
    k_major = b.stride[1] == 1
    arguments = {
        "sample_a": meta("a", (0, 1), 1),
        "sample_c": meta("c", (0, 1), 1),
        "sample_d_row": meta("d", (0, 1), 1),
        "sample_d_col": None,
        "sample_sfa": None,
        "sample_padded_offsets": meta("offsets", (0,)),
        "sample_alpha": meta("alpha", (0,)) if "alpha" in problem else ones["alpha"],
        "sample_beta": meta("beta", (0,)) if "beta" in problem else ones["beta"],
        "sample_prob": meta("prob", (0,), 2) if "prob" in problem else ones["prob"],
        "sample_dprob": meta("dprob", (0,), 2) if "dprob" in problem else ones["dprob"],
        "sample_dbias": meta("dbias", (0, 1), 1),
        "sample_activation": None if (activation := meta("activation", (0, 1), 1)) is None else described(activation),
        "sample_amax": meta("amax", (0, 1)),
        "sample_sfd_row": meta("sf_row", (0, 1)),
        "act_func": "d" + given["act"],
        "b_major": "k" if k_major else "n",
        "round_dgrad_to_input_dtype": problem.rounding["r"] is BF16,
    }
    if given["act"] == "geglu":
        arguments |= {"geglu_alpha": given["geglu_alpha"], "glu_clamp_min": given["clamp_min"],
                      "glu_clamp_max": given["clamp_max"]}  # fmt: skip
    if b.discrete:
        dtype = getattr(torch, b.data_type.info.torch_name)
        return arguments | {"num_experts": experts, "b_shape": (b.dim[2], b.dim[1]), "b_dtype": dtype}
    return arguments | {"sample_b": meta("b", (2, 1, 0) if k_major else (0, 1, 2))}


def class_verdict(problem: Problem) -> str:
    """ "" where everything but the device passes, else the class's first complaint."""
    from cudnn import GroupedGemmDgluSm100

    try:
        GroupedGemmDgluSm100(**class_arguments(problem)).check_support()
    except RuntimeError as error:
        return "" if str(error) == "CUDA is not available" else f"RuntimeError: {error}"
    except (ValueError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("check_support passed without a device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the class reads the device instead of refusing last")
def test_conditions_agree_with_check_support(make_problem, entry) -> None:
    pytest.importorskip("cudnn", reason="needs the extra `cuda`: cudnn-frontend is not installed")
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    served, differ = 0, []
    for index in range(CONFIGURATIONS):
        problem = random_problem(rng, make_problem)
        codes = {r.code for r in entry.supports(problem, ARCHES["sm100"])}
        on_purpose = {c for c in codes if c in EXCEPTIONS and EXCEPTIONS[c][0](problem)}
        theirs = class_verdict(problem)
        served += not codes
        if bool(theirs) != bool(codes - on_purpose):
            differ.append(f"{index}: ours {sorted(codes)}, theirs {theirs!r}, {problem}")
    assert not differ, f"seed {seed}: {len(differ)} of {CONFIGURATIONS}\n" + "\n".join(differ[:5])
    assert served > CONFIGURATIONS // 10, f"seed {seed}: only {served} random problems were served, too few to compare"


EXCEPTIONAL: Mapping[str, dict[str, Any]] = {
    "OFFSETS_ALIGNMENT": dict(changes={"offsets": dict(multiple_of=1)}),
    "GLU_LAYOUT": dict(changes={"c": dict(glu_layout=GluLayout.concatenated())}),
    "ALPHA_EXPONENT": dict(roles=("alpha",), attributes=dict(alpha_exponent=1)),
    "PRODUCT_ROUNDING": dict(product=F16),
    "DBIAS_SOURCE": dict(roles=("dbias",)),
    "DETERMINISTIC_DPROB": dict(deterministic=True),
    "DETERMINISTIC_DBIAS": dict(
        roles=("dbias",), without=("dprob",), deterministic=True, changes={"d": dict(data_type=F32)}
    ),
    "ALIGNMENT": dict(changes={"a": dict(alignment=8)}),
    "ACTIVATION_ALIGNMENT": dict(act="geglu", roles=("activation",), changes={"activation": dict(alignment=16)}),
    "ACTIVATION_SIZE": dict(act="geglu", roles=("activation",), rows=2**26),
    "STATIC_SHAPE": dict(k=symbol("K", 8)),
    "B_LAYOUT": dict(changes={"b": dict(discrete=True, stride=(2048, 1, 72))}),
    "GEGLU_PARAMETERS": dict(act="geglu", attributes=dict(geglu_alpha=1e300)),
    "DEPTH_MULTIPLE": dict(k=0),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the class reads the device instead of refusing last")
@pytest.mark.parametrize("code", EXCEPTIONS)
def test_each_exception_is_real(make_problem, entry, code: str) -> None:
    """We decline by that code alone, and the class lets the same problem through."""
    pytest.importorskip("cudnn", reason="needs the extra `cuda`: cudnn-frontend is not installed")
    problem = make_problem(**EXCEPTIONAL[code])
    assert [r.code for r in entry.supports(problem, ARCHES["sm100"])] == [code]
    assert EXCEPTIONS[code][0](problem)
    if code == "STATIC_SHAPE":  # the class sees a value of K, never the symbol
        problem = make_problem(k=8)
    assert class_verdict(problem) == ""
