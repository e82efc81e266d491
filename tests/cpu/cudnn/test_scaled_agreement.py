"""The conditions of every family against its class's own check_support, on random problems.

The class checks the device last, so on a machine without a GPU "CUDA is not available" means that all else passed.
Operands are meta tensors with the strides of the problem's specs, translated here and not by the adapters.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from opfuse.graph_ops.ir.dims import evaluate, symbol, symbols
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.graph_ops.ir.tensor import TensorSpec
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.problem import Problem

BF16, F16, F32, I32, I64 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT, DataType.INT32, DataType.INT64
E4M3, E5M2, E8M0 = DataType.FP8_E4M3, DataType.FP8_E5M2, DataType.FP8_E8M0
CONFIGURATIONS = int(os.environ.get("OPFUSE_AGREEMENT", "2000"))
CODES = ("q_row", "sf_row", "q_col", "sf_col")
CLASSES: Mapping[str, str] = {
    "grouped_gemm_dglu.block_scaled": "GroupedGemmDgluSm100",
    "grouped_gemm_glu.bf16": "GroupedGemmGluSm100",
    "grouped_gemm_glu.block_scaled": "GroupedGemmGluSm100",
    "discrete_grouped_gemm_swiglu": "DiscreteGroupedGemmSwigluSm100",
    "grouped_gemm_quant.block_scaled": "GroupedGemmQuantSm100",
    "grouped_gemm_wgrad.bf16": "GroupedGemmWgradSm100",
    "grouped_gemm_wgrad.block_scaled": "GroupedGemmWgradSm100",
}
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the class reads the device instead of refusing last"
)


def _always(problem: Problem) -> bool:
    return True


def _extent(problem: Problem, axis: int) -> int:
    return evaluate(
        problem["b"].dim[axis] if "b" in problem else (0, problem["a"].dim[1], problem["dy"].dim[1])[axis], {}
    )


# Where we decline and no class does, on purpose: for which problems, and why.
EXCEPTIONS: Mapping[str, tuple[Callable[[Problem], bool], str]] = {
    "OFFSETS_ALIGNMENT": (_always, "the classes never read offset values; unaligned ones overwrite neighbours"),
    "OFFSETS_TYPE": (lambda p: "sf_a" in p, "the block-scaled classes do not look at the type (wgrad's does)"),
    "ROW_MULTIPLE": (lambda p: "sf_a" in p, "they compile for M % 256 == 0 and do not ask for it"),
    "GLU_LAYOUT": (_always, "a tensor of a class has no layout: columns count as interleaved(32)"),
    "ALPHA_EXPONENT": (_always, "a class has one meaning of alpha and cannot be asked for another"),
    "PRODUCT_ROUNDING": (_always, "a class holds the product in float32 and cannot be asked to round it"),
    "C_ROUNDING": (_always, "the classes activate the unrounded product whatever C's type"),
    "DBIAS_SOURCE": (_always, "the class sums unrounded gradients; a graph may mean rounded ones"),
    "SOURCE_ROUNDING": (_always, "the classes quantize and bound unrounded values; a graph may mean rounded ones"),
    "BETA_GEGLU": (_always, "the class takes beta there and ignores it"),
    "SCALE_STORAGE": (_always, "a class takes a scale buffer for swizzled"),
    "NORM_CONST": (_always, "a class has one norm_const and cannot be given two"),
    "CODE_FORMAT": (
        lambda p: all(p[r].data_type in (E5M2, DataType.FP4_E2M1) for r in ("q_row", "q_col") if r in p),
        "E5M2 codes are scaled by 1/128 and FP4 codes were not verified; check_support lets them through",
    ),
    "VECTOR_LAYOUT": (_always, "the block-scaled classes compile the strides of vectors in"),
    "GEGLU_PARAMETERS": (_always, "the block-scaled classes take any parameter; the BF16 one has none to give"),
    "COLUMN_SUMS": (_always, "the classes have no such output to ask for"),
    "ACCUMULATE": (_always, "the class accumulates with an atomic of the output's type"),
    "ALIGNMENT": (_always, "the classes check pointers, we check promises"),
    "AMAX_FORM": (_always, "a class has one form of amax and cannot be asked for another"),
    "B_LAYOUT": (lambda p: p["b"].discrete, "addresses have no strides: a class takes any for packed matrices"),
    "CODE_ALIGNMENT": (lambda p: 0 in (_extent(p, 1), _extent(p, 2)), "the classes take empty weights"),
    "COLUMN_MULTIPLE": (
        lambda p: _extent(p, 2) == 0 or p["b"].discrete,
        "the classes take N = 0, and the discrete one any N, whose last gate block may have no up block",
    ),
    "CODES_ONLY": (lambda p: "q_row" not in p, "the class also writes D without codes, which is no quantize"),
    "CODE_COLUMNS": (lambda p: _extent(p, 2) == 0, "the class takes N = 0"),
    "DEPTH_MULTIPLE": (lambda p: _extent(p, 1) == 0, "the class takes K = 0"),
    "EXPERTS": (lambda p: "dw" in p, "the weight gradient classes name no limit"),
    "ROW_PITCH": (lambda p: "sf_a" in p, "the block-scaled weight gradient does not look at 16 bytes"),
    "MATRIX_LAYOUT": (lambda p: "sf_a" in p, "the block-scaled weight gradient takes other layouts of A and B too"),
    "OPERAND_FORMAT": (
        lambda p: ("dy" in p and "sf_a" in p) or p["b"].discrete,
        "the weight gradient class takes FP4 packed along the rows, and E4M3 scales of any block; addresses say "
        "nothing of the type of discrete scales",
    ),
    "C_TYPE": (lambda p: p["c"].data_type is E4M3, "the classes take FP8 C without scales, which no graph can say"),
}  # fmt: skip


def _maybe(rng: random.Random, usual: Any, *others: Any) -> Any:
    """`usual` nineteen times of twenty, else one of the others."""
    return usual if rng.random() < 0.95 else rng.choice(others)


def random_problem(rng: random.Random, kernel: str, make: Callable[..., Problem]) -> Problem:
    """A problem with zero to a few faults."""
    rule = "grouped_gemm_glu" if "discrete" in kernel else kernel.split(".")[0]
    dglu, wgrad = rule == "grouped_gemm_dglu", rule == "grouped_gemm_wgrad"
    bf16 = kernel.endswith("bf16")
    usual = ["bf16"] if bf16 else ["mxfp8", "mxfp8_e5m2"] + ([] if wgrad else ["nvfp4", "fp4_e8m0", "mxfp4"])
    format = rng.choice(usual)
    fp4 = "fp4" in format
    n = _maybe(rng, rng.choice([64, 128, 256]), *((32, 96) if not fp4 else (128,)), 0, 48)
    k = _maybe(rng, rng.choice([64, 128]), 32, 72, 0)
    discrete = not wgrad and (_maybe(rng, True, False) if "discrete" in kernel else rng.random() < 0.4)
    roles: list[str] = [
        r for r in ("alpha", "prob", *(("beta", "dprob") if dglu else ())) if not wgrad and rng.random() < 0.5
    ]
    codes = (
        not bf16 and not wgrad and (not fp4 if dglu or rule == "grouped_gemm_quant" else not fp4 and rng.random() < 0.5)
    )
    codes = _maybe(rng, codes, not codes) if not bf16 and not wgrad else False
    if not wgrad:
        roles += [*CODES] if codes else ["d"]
        if codes and rng.random() < 0.5:
            roles += ["norm_const_row", "norm_const_col"]
        if not dglu and rule != "grouped_gemm_quant" and rng.random() < 0.5:
            roles.append("c")
        if not dglu and rng.random() < 0.3:
            roles.append("bias")
        if not bf16 and rng.random() < 0.3:
            roles.append("amax")
        if dglu and rng.random() < 0.3:
            roles.append("dbias")
        if rng.random() < 0.03:
            roles.append("activation" if dglu else "dbias")
    act = rng.choice(["swiglu", "geglu"] + (["situglu"] if not bf16 and "discrete" not in kernel else []))
    attributes: dict[str, Any] = {}
    if "glu" in rule and act == "geglu":
        attributes = {"linear_offset": rng.choice([0.0, 1.0]), "geglu_alpha": _maybe(rng, 1.702, 1.0, 1e39)}
    if not wgrad:
        attributes["alpha_exponent"] = _maybe(rng, 2 if dglu else 1, 1, 2)
    experts = _maybe(rng, rng.choice([1, 2, 8, 1024]), 1025)
    rows = _maybe(rng, rng.choice([256, 768, symbol("M", 256)]), symbol("M", 128))
    floats = [BF16, F16] + ([F32] if bf16 or fp4 else [])
    q_type = _maybe(rng, E4M3, E5M2)
    scale = _maybe(rng, None, E4M3, E8M0)
    changes: dict[str, dict[str, Any]] = {
        "a": {} if fp4 else {"stride": _maybe(rng, (k, 1), (k + 16, 1))},
        "c": {"data_type": _maybe(rng, rng.choice([BF16, F16, F32] if dglu or not fp4 else [BF16, F16]), E4M3, F32),
              "glu_layout": _maybe(rng, GluLayout.interleaved(32), GluLayout.concatenated())},
        "d": {"data_type": _maybe(rng, rng.choice(floats), F32)},
        "dw": {"data_type": _maybe(rng, rng.choice([BF16, F16, F32]), E4M3)},
        "offsets": {"data_type": _maybe(rng, I32, I64), "multiple_of": _maybe(rng, 256, 1)},
        "bias": {"data_type": _maybe(rng, rng.choice([BF16, F16]), F32)},
        "dbias": {"data_type": _maybe(rng, BF16, F32)},
        "q_row": {"data_type": q_type}, "q_col": {"data_type": q_type},
    }  # fmt: skip
    if scale is not None and not bf16:
        changes["sf_a"] = {"data_type": scale}
    b_major = "k" if fp4 or wgrad else rng.choice("kn")
    if kernel in ("grouped_gemm_glu.bf16", "grouped_gemm_glu.block_scaled") and not discrete:
        b_major = _maybe(rng, "k", "n")
    if fp4 and discrete:
        b_major = _maybe(rng, "k", "n")
    return make(rule, format=format, roles=tuple(roles), rows=rows, k=k, n=n, experts=experts, act=act, b_major=b_major,
                discrete=discrete, changes=changes, attributes=attributes,
                deterministic=dglu and rng.random() < 0.1)  # fmt: skip


def _smallest(problem: Problem) -> dict[str, int]:
    """The binding that shows what M is not known to be: the smallest that the symbol allows, above zero."""
    return {s.name: s.multiple_of for t in problem.tensors.values() for s in symbols(t.dim)}


def _dtype(spec: TensorSpec) -> torch.dtype:
    found: torch.dtype = getattr(torch, spec.data_type.info.torch_name)
    return found


class Translation:
    """The constructor's arguments for a problem that may be faulty in any way: its own shapes, strides and types."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.bindings = problem, _smallest(problem)
        self.m = evaluate(problem["a"].dim[0], self.bindings)

    def matrix(self, role: str, order: tuple[int, ...] = (0, 1), extra: int = 1) -> Any:
        if role not in self.problem:
            return None
        spec = self.problem[role]
        dim = [evaluate(spec.dim[i], self.bindings) for i in order]
        stride = [evaluate(spec.stride[i], self.bindings) for i in order]
        if spec.data_type is DataType.FP4_E2M1:
            axis = stride.index(1)
            dim = [d // 2 if i == axis else d for i, d in enumerate(dim)]
            stride = [1 if i == axis else s // 2 for i, s in enumerate(stride)]
        size = dim[0] * (dim[1] if len(dim) > 1 else 1)
        made = torch.empty_strided(dim + [1] * extra, stride + [size] * extra, dtype=_dtype(spec), device="meta")
        # the classes read FP4 by its own name: as bytes, some take K for half of what it is
        return made.view(torch.float4_e2m1fn_x2) if spec.data_type is DataType.FP4_E2M1 else made

    def scales(self, role: str) -> Any:
        if role not in self.problem:
            return None
        spec = self.problem[role]
        *experts, rows, columns = (evaluate(d, self.bindings) for d in spec.dim)
        count = experts[0] if experts else 1
        memory = torch.empty((count, rows // 128, columns // 4, 32, 4, 4), dtype=_dtype(spec), device="meta")
        return memory.permute(3, 4, 1, 5, 2, 0)

    def vector(self, role: str, shape: tuple[int, ...], extra: int = 0) -> Any:
        return self.matrix(role, (0,), extra) if role in self.problem else torch.empty(shape, device="meta")

    def weights(self) -> dict[str, Any]:
        p, b = self.problem, self.problem["b"]
        experts, depth, columns = (evaluate(d, {}) for d in b.dim)
        major = "k" if b.stride[1] == 1 else "n"
        if b.discrete:
            return {"num_experts": experts, "b_shape": (columns, depth), "b_dtype": self.code_type(b), "b_major": major}
        given = {"sample_b": self.matrix("b", (2, 1, 0), 0), "b_major": major}
        return given | ({"sample_sfb": self.scales("sf_b")} if "sf_b" in p else {})

    @staticmethod
    def code_type(spec: TensorSpec) -> torch.dtype:
        return torch.float4_e2m1fn_x2 if spec.data_type is DataType.FP4_E2M1 else _dtype(spec)

    def block(self) -> int:
        layout = self.problem["sf_a"].scale_layout
        assert layout is not None
        return layout.block_size

    def codes(self) -> dict[str, Any]:
        p = self.problem
        norm = torch.empty(1, device="meta") if any(r in p for r in CODES) else None
        return {"sample_sfd_row": self.scales("sf_row"), "sample_sfd_col": self.scales("sf_col"),
                "sample_norm_const": norm}  # fmt: skip

    def arguments(self, kernel: str) -> dict[str, Any]:
        p, m = self.problem, self.m
        if "wgrad" in kernel:
            return self.wgrad()
        experts, _, columns = (evaluate(d, {}) for d in p["b"].dim)
        given: dict[str, Any] = {
            "sample_a": self.matrix("a"),
            "sample_sfa": self.scales("sf_a"),
            "sample_padded_offsets": self.matrix("offsets", (0,), 0),
            "sample_alpha": self.vector("alpha", (experts,)),
            "sample_prob": self.vector("prob", (m, 1, 1), 2),
            **self.weights(),
        }
        d, column = self.matrix("d"), self.matrix("q_col")
        d = self.matrix("q_row") if d is None else d
        column = d if column is None else column
        if "sf_a" in p:
            given |= {"sf_vec_size": self.block(), **self.codes(), "sample_d_col": column}
        elif "quant" not in kernel:
            given |= {"sample_d_col": None}
        if "amax" in p:
            shape = (experts, 2, 1) if "dglu" in kernel else (experts, 1)
            given["sample_amax"] = torch.empty(shape, device="meta")
        if "glu" in kernel:
            given["act_func"] = ("d" if "dglu" in kernel else "") + p.attributes["act"]
        if "dglu" in kernel:
            width = 2 * columns
            slots = -(-columns // 256) if p.deterministic else 1
            dprob = torch.empty((m, slots, 1), device="meta")
            given |= {"sample_c": self.matrix("c"), "sample_d_row": d, "sample_beta": self.vector("beta", (experts,)),
                      "sample_dprob": dprob, "_deterministic": p.deterministic,
                      "sample_activation": self.matrix("activation")}  # fmt: skip
            if "dbias" in p:
                given["sample_dbias"] = torch.empty((experts, width, 1), dtype=_dtype(p["dbias"]), device="meta")
            return given
        given["sample_d"] = d
        if "bias" in p:
            given["sample_bias"] = self.matrix("bias", (1, 0), 0)
        if "quant" not in kernel:
            c = self.matrix("c")
            fallback = torch.empty_strided(
                (m, columns, 1), (columns, 1, m * columns), dtype=torch.bfloat16, device="meta"
            )
            given["sample_c"] = fallback if c is None else c
        return given

    def wgrad(self) -> dict[str, Any]:
        p = self.problem
        device = "cpu" if "sf_a" in p else "meta"
        given = {
            "sample_a": self.matrix("a", (1, 0), 0),
            "sample_b": self.matrix("dy", (0, 1), 0),
            "sample_offsets": torch.zeros(evaluate(p["offsets"].dim[0], {}), dtype=_dtype(p["offsets"]), device=device),
            "sample_wgrad": self.matrix("dw", (0, 1, 2), 0),
            "sample_sfa": None,
            "sample_sfb": None,
        }
        for role, name in (("sf_a", "sample_sfa"), ("sf_dy", "sample_sfb")):
            if role in p:
                given[name] = self.matrix(role, (0, 1), 0)
                given["sf_vec_size"] = self.block()
        return given


def class_verdict(kernel: str, problem: Problem) -> str:
    """ "" where everything but the device passes, else the class's first complaint."""
    import cudnn

    try:
        getattr(cudnn, CLASSES[kernel])(**Translation(problem).arguments(kernel)).check_support()
    except RuntimeError as error:
        return "" if str(error) == "CUDA is not available" else f"RuntimeError: {error}"
    except (ValueError, AttributeError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("check_support passed without a device")


@pytest.mark.parametrize("kernel", CLASSES)
def test_conditions_agree_with_check_support(make_scaled, entries, kernel: str) -> None:
    pytest.importorskip("cudnn", reason="needs the extra `cuda`: cudnn-frontend is not installed")
    seed = random.randrange(2**32)
    rng, count = random.Random(seed), -(-CONFIGURATIONS // len(CLASSES))
    served, differ = 0, []
    for index in range(count):
        problem = random_problem(rng, kernel, make_scaled)
        codes = {r.code for r in entries[kernel].supports(problem, ARCHES["sm100"])}
        on_purpose = {c for c in codes if c in EXCEPTIONS and EXCEPTIONS[c][0](problem)}
        theirs = class_verdict(kernel, problem)
        served += not codes
        if (theirs and not codes) or (codes - on_purpose and not theirs):
            differ.append(f"{index}: ours {sorted(codes)}, theirs {theirs!r}, {problem}")
    assert not differ, f"seed {seed}: {len(differ)} of {count}\n" + "\n".join(differ[:5])
    assert served > count // 10, (
        f"seed {seed}: only {served} of {count} random problems were served, too few to compare"
    )


ZERO: Mapping[str, dict[str, Any]] = {
    "CODE_ALIGNMENT": dict(k=0),
    "CODES_ONLY": dict(roles=("d",)),
    "CODE_COLUMNS": dict(n=0),
    "DEPTH_MULTIPLE": dict(k=0),
    "OPERAND_FORMAT": dict(changes={"sf_b": dict(data_type=E4M3)}),
}
"""What shows an exception that depends on the problem, where the case of its code alone does not."""


@pytest.mark.parametrize("code", EXCEPTIONS)
def test_each_exception_is_real(make_scaled, entries, broken, code: str) -> None:
    """Some kernel declines by that code, and its class lets the same problem through."""
    pytest.importorskip("cudnn", reason="needs the extra `cuda`: cudnn-frontend is not installed")
    shown = []
    for kernel in CLASSES:
        for given in (broken.ALONE[kernel].get(code), ZERO.get(code)):
            if given is None or code not in broken.ALONE[kernel]:
                continue
            problem = make_scaled(broken.RULES[kernel], **broken.merged(kernel, given))
            codes = {r.code for r in entries[kernel].supports(problem, ARCHES["sm100"])}
            if code in codes and EXCEPTIONS[code][0](problem):
                shown.append(class_verdict(kernel, problem))
    assert "" in shown, shown
