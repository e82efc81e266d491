"""The support surface of our plain grouped GEMM: every code with its text, what it lets through, every arch; and the
configuration that a problem becomes."""

from __future__ import annotations

from typing import Any

import pytest
from opfuse.graph_ops.ir.dims import symbol
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.hopper import gemm_support
from opfuse.kernels.sm90 import gemm_tune
from opfuse.kernels.sm90.gemm_config import GemmConfig, illegal

BF16, F16, F32, E4M3 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT, DataType.FP8_E4M3
SM90 = ARCHES["sm90"]
Options = dict[str, Any]
M = symbol("M")

# What breaks each condition alone, and the text that a user then reads.
GOLDEN: dict[str, tuple[Options, str]] = {
    "OPERAND_TYPE": (
        dict(changes={"a": dict(data_type=F32), "b": dict(data_type=F32)}),
        "OPERAND_TYPE: a is FLOAT, b is FLOAT, requires BFLOAT16 or HALF a and b; "
        "identity(x) with a 16-bit data type converts, with its rounding",
    ),
    "COLUMN_MULTIPLE": (
        dict(n=60, changes={"b": dict(stride=(64 * 64, 1, 64)), "y": dict(stride=(64, 1))}),
        "COLUMN_MULTIPLE: N = 60, requires N positive and known to be a multiple of 8; pad N with zeros in b",
    ),
    "DEPTH_MULTIPLE": (
        dict(k=100, changes={"a": dict(stride=(104, 1)), "b": dict(stride=(104 * 64, 1, 104))}),
        "DEPTH_MULTIPLE: K = 100, requires K positive and known to be a multiple of 8 (16 bytes a row); "
        "pad K with zeros in a and b",
    ),
    "EXPERTS": (
        dict(experts=1025),
        "EXPERTS: L = 1025, requires 1 to 1024 experts, as an integer; split the experts over several graphs",
    ),
    "MATRIX_LAYOUT": (
        dict(roles=("bias",), changes={"y": dict(stride=(1, M)), "bias": dict(stride=(68, 1))}),
        "MATRIX_LAYOUT: y stride (1, M), bias stride (68, 1), requires row-major a, y and bias, rows at multiples of "
        "8 elements; pass a contiguous copy",
    ),
    "B_LAYOUT": (
        dict(changes={"b": dict(stride=(1, 128, 2))}),
        "B_LAYOUT: b (2, 64, 64) with stride (1, 128, 2), requires K-major or N-major weights, the other strides "
        "multiples of 8; discrete ones packed; pass a contiguous copy",
    ),
    "VECTOR_LAYOUT": (
        dict(roles=("alpha",), changes={"alpha": dict(stride=(2,)), "offsets": dict(data_type=DataType.INT64)}),
        "VECTOR_LAYOUT: offsets INT64 stride (1,), alpha FLOAT stride (2,), requires INT32 offsets and FLOAT alpha, "
        "without gaps; pass a contiguous copy",
    ),
    "ALIGNMENT": (
        dict(changes={"y": dict(alignment=8)}),
        "ALIGNMENT: promised bytes: y 8, requires data pointers aligned to 16 bytes; "
        "torch's own allocations are aligned; set_alignment_value(16) promises it",
    ),
    "Y_TYPE": (
        dict(changes={"y": dict(data_type=E4M3)}),
        "Y_TYPE: y is FP8_E4M3, requires BFLOAT16, HALF or FLOAT y; set_data_type on the product",
    ),
    "BIAS_TYPE": (
        dict(roles=("bias",), changes={"bias": dict(data_type=E4M3)}),
        "BIAS_TYPE: bias is FP8_E4M3, requires BFLOAT16, HALF or FLOAT bias; set its data_type",
    ),
    "LEGAL": (
        dict(roles=("alpha",), attributes=dict(alpha_exponent=3)),
        "LEGAL: alpha_exponent is 3; built are 1, 2, requires a configuration that the kernel's legality function "
        "accepts; sm90.gemm_config.illegal states every limit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", GOLDEN)
def test_each_condition_fails_alone_with_its_text(make_gemm_problem, gemm_entry, code: str) -> None:
    broken, text = GOLDEN[code]
    assert [str(r) for r in gemm_entry.supports(make_gemm_problem(**broken), SM90)] == [text]


def test_every_code_has_a_golden_text() -> None:
    codes = [c.code for c in gemm_support.GEMM]
    assert len(set(codes)) == len(codes), "a code means one thing"
    assert set(codes) == set(GOLDEN)
    assert [c.code for c in gemm_support.GEMM if not (c.hint and c.requires)] == []


def test_all_failures_are_collected(make_gemm_problem, gemm_entry) -> None:
    """Independent faults give a reason each, in declaration order, behind ARCH."""
    problem = make_gemm_problem(experts=0, changes={"offsets": dict(stride=(2,)), "y": dict(data_type=E4M3)})
    assert [r.code for r in gemm_entry.supports(problem, ARCHES["sm100"])] == [
        "ARCH", "EXPERTS", "VECTOR_LAYOUT", "Y_TYPE",
    ]  # fmt: skip


# Each condition's other side: the nearest problem that it lets through.
SERVED: dict[str, Options] = {
    "plain": dict(),
    "N of 8": dict(n=8),
    "K of 8": dict(k=8),
    "1024 experts": dict(experts=1024),
    "n-major": dict(b_major="n"),
    "discrete": dict(changes={"b": dict(discrete=True)}),
    "HALF": dict(operands=F16),
    "FLOAT result": dict(changes={"y": dict(data_type=F32)}),
    "HALF of BFLOAT16": dict(changes={"y": dict(data_type=F16)}),
    "wider rows": dict(changes={"a": dict(stride=(72, 1)), "y": dict(stride=(128, 1))}),
    "FLOAT bias, alpha squared": dict(
        roles=("alpha", "bias"), attributes=dict(alpha_exponent=2), changes={"bias": dict(data_type=F32)}
    ),
    "a virtual result of any alignment": dict(changes={"y": dict(alignment=2, is_output=False, is_virtual=True)}),
}


@pytest.mark.parametrize("name", SERVED)
def test_serves(make_gemm_problem, gemm_entry, name: str) -> None:
    problem = make_gemm_problem(**SERVED[name])
    assert gemm_entry.supports(problem, SM90) == ()
    assert illegal(gemm_support.scheduled(problem)) == []
    assert gemm_support.launches(problem) == (3 if name == "discrete" else 1)


@pytest.mark.parametrize("arch", [a for a in ARCHES if a != "sm90"])
def test_every_arch_but_sm90_is_declined(make_gemm_problem, gemm_entry, arch: str) -> None:
    assert [r.code for r in gemm_entry.supports(make_gemm_problem(), ARCHES[arch])] == ["ARCH"]


def test_a_problem_becomes_its_configuration(make_gemm_problem) -> None:
    problem = make_gemm_problem(
        roles=("alpha", "bias"), b_major="n", operands=F16, attributes=dict(alpha_exponent=2),
        changes={"y": dict(data_type=F32), "bias": dict(data_type=BF16), "b": dict(discrete=True)},
    )  # fmt: skip
    assert gemm_support.configuration(problem) == GemmConfig(
        ab_dtype="fp16", b_major="n", discrete_b=True, y_dtype="fp32", has_alpha=True, alpha_exponent=2,
        bias_dtype="bf16",
    )  # fmt: skip
    assert gemm_support.configuration(make_gemm_problem(attributes=dict(alpha_exponent=2))) == GemmConfig()


def test_variants_are_the_other_shipped_schedules(make_gemm_problem) -> None:
    problem = make_gemm_problem(k=768, n=2048)
    first = gemm_support.scheduled(problem).schedule
    others = [gemm_support.scheduled(problem, name).schedule for name in gemm_support.variants(problem)]
    assert first not in others and {first, *others} == set(gemm_tune.SHIPPED.values())
