"""The support surface of our Hopper dGLU kernel: every code with its text, what it lets through, every arch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opfuse.graph_ops.ir.dims import symbol
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.kernels.arch import ARCHES, arch_of_capability
from opfuse.kernels.hopper import dglu_support

BF16, F16, F32, I32, I64 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT, DataType.INT32, DataType.INT64
SM90 = ARCHES["sm90"]
Options = dict[str, Any]
M = symbol("M", 128)
BOTH: Options = dict(roles=("q_row", "q_col"))

# What breaks each condition alone, and the text that a user then reads.
GOLDEN: dict[str, tuple[Options, str]] = {
    "OPERAND_TYPE": (
        dict(changes={"a": dict(data_type=F32), "b": dict(data_type=F32)}),
        "OPERAND_TYPE: a is FLOAT, b is FLOAT, requires BFLOAT16 or HALF a and b; "
        "identity(x) with a 16-bit data type converts, with its rounding",
    ),
    "COLUMN_MULTIPLE": (
        dict(n=48),
        "COLUMN_MULTIPLE: N = 48, requires N known to be a multiple of 32; "
        "pad the intermediate size to a multiple of 32",
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
        dict(changes={"c": dict(stride=(132, 1)), "d": dict(stride=(1, M))}),
        "MATRIX_LAYOUT: c stride (132, 1), d stride (1, M), requires row-major a, c, d and activation, "
        "rows at multiples of 8 elements; pass a contiguous copy",
    ),
    "B_LAYOUT": (
        dict(changes={"b": dict(stride=(1, 128, 2))}),
        "B_LAYOUT: b (2, 64, 64) with stride (1, 128, 2), requires K-major or N-major weights, the other strides "
        "multiples of 8; discrete ones packed; pass a contiguous copy",
    ),
    "VECTOR_LAYOUT": (
        dict(roles=("prob",), changes={"prob": dict(stride=(2,)), "offsets": dict(data_type=I64)}),
        "VECTOR_LAYOUT: offsets INT64 stride (1,), prob FLOAT stride (2,), requires INT32 offsets and FLOAT alpha, "
        "beta, prob and dprob, without gaps; pass a contiguous copy",
    ),
    "ALIGNMENT": (
        dict(changes={"a": dict(alignment=8)}),
        "ALIGNMENT: promised bytes: a 8, requires data pointers aligned to 16 bytes; "
        "torch's own allocations are aligned; set_alignment_value(16) promises it",
    ),
    "GLU_LAYOUT": (
        dict(layout=GluLayout.interleaved(16)),
        "GLU_LAYOUT: c is interleaved(16), requires gate and up interleaved by 32, by 1, or concatenated; "
        "convert_glu_layout(x, GluLayout.interleaved(32)) reorders columns",
    ),
    "PRODUCT_ROUNDING": (
        dict(rounding={"r": BF16}),
        "PRODUCT_ROUNDING: the product rounds to BFLOAT16, requires a product that stays FLOAT; "
        "leave the product virtual FLOAT",
    ),
    "SOURCE_ROUNDING": (
        dict(roles=("dbias", "amax"), rounding={"r": F32}),
        "SOURCE_ROUNDING: dbias, amax of a gradient rounded to BFLOAT16, requires dbias, amax and codes of the "
        "unrounded gradient; leave dx virtual FLOAT, and write identity(dx) with d's data type",
    ),
    "ACT_PARAMETERS": (
        dict(act="geglu", attributes=dict(clamp_max=float("inf"))),
        "ACT_PARAMETERS: {'clamp_max': inf}, requires activation parameters that are finite in float32; "
        "a finite bound beyond the data, 3e38 say, clamps nothing",
    ),
    "DBIAS_LAYOUT": (
        dict(roles=("dbias",), changes={"dbias": dict(stride=(1, 2))}),
        "DBIAS_LAYOUT: dbias stride (1, 2), requires row-major dbias; pass a contiguous copy",
    ),
    "AMAX_FORM": (
        dict(roles=("amax",), attributes={"amax.split_glu": False}, changes={"amax": dict(dim=(2,), stride=(1,))}),
        "AMAX_FORM: amax (2) FLOAT, requires FLOAT amax (L, 2), gate and up apart, without gaps; "
        "group_amax(dx, offsets, split_glu=True)",
    ),
    "NORM_CONST": (
        dict(roles=("q_row", "norm_const_row")),
        "NORM_CONST: norm_const on row, requires no norm_const; fold it into alpha or prob",
    ),
    "BLOCK_FORMAT": (
        dict(roles=("q_row",), attributes={"q_row.block_size": 16, "q_row.scale_type": "FP8_E4M3"},
             changes={"q_row": dict(data_type=DataType.FP4_E2M1)}),
        "BLOCK_FORMAT: q_row: FP4_E2M1, blocks of 16, FP8_E4M3 scales, requires MXFP8: E4M3 or E5M2 codes, E8M0 "
        "scales of 32; another format is quantized unfused",
    ),
    "CODE_LAYOUT": (
        dict(roles=("q_row",), changes={"q_row": dict(stride=(136, 1))}),
        "CODE_LAYOUT: q_row stride (136, 1), requires row-major codes, rows at multiples of 16, and scales without "
        "gaps; pass a contiguous copy",
    ),
    "SCALE_LAYOUTS_EQUAL": (
        dict(BOTH, attributes={"q_col.swizzled": False}),
        "SCALE_LAYOUTS_EQUAL: rows swizzled(block 32, axis 1), columns swizzled(block 32, axis 0), requires row and "
        "column scales both swizzled or both plain; give both the same `swizzled`",
    ),
    "GROUP_MULTIPLE": (
        dict(BOTH, changes={"offsets": dict(multiple_of=32)}),
        "GROUP_MULTIPLE: offsets promise multiples of 32, scales need 128, requires end offsets promised to be "
        "multiples of what the scales' layout needs (32 for plain column scales, 128 for swizzled ones); "
        "pad each expert's rows and declare g.tensor(..., multiple_of=128)",
    ),
    "LEGAL": (
        dict(roles=("dbias",), changes={"dbias": dict(data_type=F16)}),
        "LEGAL: dbias_dtype is 'fp16'; built are 'bf16', 'fp32', None, requires a configuration that the kernel's "
        "legality function accepts; sm90.dglu_config.illegal states every limit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", GOLDEN)
def test_each_condition_fails_alone_with_its_text(make_problem, entry, code: str) -> None:
    broken, text = GOLDEN[code]
    assert [str(r) for r in entry.supports(make_problem(**broken), SM90)] == [text]


def test_every_code_has_a_golden_text() -> None:
    codes = [c.code for c in dglu_support.DGLU]
    assert len(set(codes)) == len(codes), "a code means one thing"
    assert set(codes) == set(GOLDEN)
    assert [c.code for c in dglu_support.DGLU if not (c.hint and c.requires)] == []


def test_all_failures_are_collected(make_problem, entry) -> None:
    """Independent faults give a reason each, in declaration order, behind ARCH."""
    problem = make_problem(n=48, rounding={"r": BF16}, changes={"offsets": dict(data_type=I64)})
    assert [r.code for r in entry.supports(problem, ARCHES["sm100"])] == [
        "ARCH", "COLUMN_MULTIPLE", "VECTOR_LAYOUT", "PRODUCT_ROUNDING",
    ]  # fmt: skip


def test_every_reason_of_legality_is_told(make_problem, entry) -> None:
    """What a condition of its own says is not said again; the rest is complete."""
    problem = make_problem(
        roles=("q_row",), without=("d",), layout=GluLayout.interleaved(1),
        changes={"a": dict(data_type=F32), "b": dict(data_type=F32), "c": dict(data_type=DataType.DOUBLE)},
    )  # fmt: skip
    operand, legal = entry.supports(problem, SM90)
    assert operand.code == "OPERAND_TYPE" and legal.code == "LEGAL"
    assert "c_dtype is 'DOUBLE'" in str(legal) and "interleaved1" in str(legal) and "ab_dtype" not in str(legal)
    (reason,) = entry.supports(make_problem(without=("d",)), SM90)
    assert "no gradient output" in str(reason)


SERVED: dict[str, Options] = {
    "plain": dict(),
    "no dprob": dict(without=("dprob",)),
    "fp16": dict(operands=F16),
    "n-major": dict(b_major="n"),
    "N equal to K, either major (C22)": dict(n=64, k=64, b_major="n"),
    "discrete": dict(changes={"b": dict(discrete=True)}),
    "discrete n-major": dict(b_major="n", changes={"b": dict(discrete=True)}),
    "rows that divide by nothing": dict(rows=symbol("R", 1), changes={"offsets": dict(multiple_of=1)}),
    "rows known": dict(rows=640),
    "no rows": dict(rows=0),
    "symbols for K and N": dict(k=symbol("K", 64), n=symbol("N", 32)),
    "one expert": dict(experts=1),
    "most experts": dict(experts=1024),
    "a pitch": dict(changes={"a": dict(stride=(72, 1)), "c": dict(stride=(136, 1)), "d": dict(stride=(192, 1))}),
    "concatenated": dict(layout=GluLayout.concatenated()),
    "interleaved by one": dict(layout=GluLayout.interleaved(1)),
    "geglu": dict(act="geglu"),
    "geglu with wide clamps": dict(act="geglu", attributes=dict(clamp_min=-3e38, clamp_max=3e38)),
    "situglu": dict(act="situglu"),
    "factors": dict(roles=("alpha", "beta", "prob")),
    "alpha once": dict(roles=("alpha",), attributes=dict(alpha_exponent=1)),
    "prob of rank two": dict(roles=("prob",), changes={"prob": dict(dim=(M, 1), stride=(1, 1))}),
    "recompute": dict(roles=("activation",)),
    "recompute in fp16": dict(roles=("activation",), changes={"activation": dict(data_type=F16)}),
    "dbias": dict(roles=("dbias",)),
    "dbias in FLOAT": dict(roles=("dbias",), changes={"dbias": dict(data_type=F32)}),
    "dbias of a FLOAT d, first form": dict(roles=("dbias",), changes={"d": dict(data_type=F32)}, rounding={"r": F32}),
    "amax": dict(roles=("amax",)),
    "c and d FLOAT": dict(changes={"c": dict(data_type=F32), "d": dict(data_type=F32)}),
    "c and d HALF": dict(changes={"c": dict(data_type=F16), "d": dict(data_type=F16)}),
    "rows in codes": dict(roles=("q_row",)),
    "columns in codes": dict(roles=("q_col",)),
    "both in codes": BOTH,
    "codes alone": dict(BOTH, without=("d", "dprob")),
    "E5M2": dict(BOTH, changes={q: dict(data_type=DataType.FP8_E5M2) for q in ("q_row", "q_col")}),
    "plain row scales of any groups": dict(roles=("q_row",), swizzled=False, changes={"offsets": dict(multiple_of=1)}),
    "plain column scales of 32": dict(roles=("q_col",), swizzled=False, changes={"offsets": dict(multiple_of=32)}),
    "everything": dict(BOTH | dict(roles=("q_row", "q_col", "alpha", "beta", "prob", "activation", "dbias", "amax"))),
    "deterministic": dict(roles=("dbias", "amax"), deterministic=True),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_served(make_problem, entry, name: str) -> None:
    assert [str(r) for r in entry.supports(make_problem(**SERVED[name]), SM90)] == []


# Further ways to break a condition than the golden one.
DECLINED: list[tuple[str, Options]] = [
    ("OPERAND_TYPE", dict(changes={"b": dict(data_type=F16)})),
    ("COLUMN_MULTIPLE", dict(n=symbol("N", 16))),
    ("EXPERTS", dict(experts=symbol("L", 1))),
    ("MATRIX_LAYOUT", dict(roles=("activation",), changes={"activation": dict(stride=(68, 1))})),
    ("MATRIX_LAYOUT", dict(changes={"a": dict(stride=(symbol("P", 4), 1))})),
    ("MATRIX_LAYOUT", dict(changes={"a": dict(stride=(0, 1))})),
    ("B_LAYOUT", dict(changes={"b": dict(stride=(0, 1, 64))})),
    ("B_LAYOUT", dict(changes={"b": dict(stride=(64 * 64 + 4, 1, 64))})),
    ("B_LAYOUT", dict(changes={"b": dict(stride=(64 * 68, 1, 68))})),
    ("B_LAYOUT", dict(changes={"b": dict(stride=(64 * 72, 1, 72), discrete=True)})),
    ("VECTOR_LAYOUT", dict(changes={"dprob": dict(data_type=BF16)})),
    ("VECTOR_LAYOUT", dict(roles=("alpha",), changes={"alpha": dict(stride=(2,))})),
    ("ALIGNMENT", dict(roles=("q_row",), changes={"sf_row": dict(alignment=4)})),
    ("SOURCE_ROUNDING", dict(roles=("q_row",), rounding={"r": F32})),
    ("SOURCE_ROUNDING", dict(roles=("q_row",), without=("d",), rounding={"r": F32, "d": BF16})),
    ("SOURCE_ROUNDING", dict(roles=("dbias",), rounding={"r": F32, "d_wide": F16})),
    ("AMAX_FORM", dict(roles=("amax",), changes={"amax": dict(data_type=BF16)})),
    ("NORM_CONST", dict(roles=("q_col", "norm_const_col"))),
    ("BLOCK_FORMAT", dict(roles=("q_col",), attributes={"q_col.scale_type": "FP8_E4M3"})),
    ("CODE_LAYOUT", dict(roles=("q_col",), changes={"sf_col": dict(stride=(4096, 1))})),
    ("GROUP_MULTIPLE", dict(roles=("q_row",), changes={"offsets": dict(multiple_of=64)})),
    ("GROUP_MULTIPLE", dict(roles=("q_col",), swizzled=False, changes={"offsets": dict(multiple_of=16)})),
    ("LEGAL", dict(roles=("activation",), changes={"activation": dict(data_type=F32)})),
    ("LEGAL", dict(roles=("q_row",), layout=GluLayout.interleaved(1))),
    ("LEGAL", dict(changes={"c": dict(data_type=DataType.FP8_E4M3)})),
]


@pytest.mark.parametrize(("code", "options"), DECLINED, ids=[f"{i} {c}" for i, (c, _) in enumerate(DECLINED)])
def test_declined(make_problem, entry, code: str, options: Options) -> None:
    assert [r.code for r in entry.supports(make_problem(**options), SM90)] == [code]


@pytest.mark.parametrize(("code", "options"), [("COLUMN_MULTIPLE", dict(n=0)), ("DEPTH_MULTIPLE", dict(k=0))])
def test_empty_products_are_declined(make_problem, entry, code: str, options: Options) -> None:
    assert code in [r.code for r in entry.supports(make_problem(**options), SM90)]


@pytest.mark.parametrize(
    "capability",
    [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1)],
)
def test_c79_only_sm90(make_problem, entry, capability: tuple[int, int]) -> None:
    """wgmma exists on 9.0 and nowhere else: neither before nor after."""
    reasons = entry.supports(make_problem(), arch_of_capability(capability))
    assert [r.code for r in reasons] == ([] if capability == (9, 0) else ["ARCH"])


def test_other_arches_are_told_which(make_problem, entry) -> None:
    (reason,) = entry.supports(make_problem(), ARCHES["cpu"])
    assert str(reason) == "ARCH: cpu, requires sm90; another arch keeps this part unfused"


def test_workspace_tensors_need_no_promise(make_problem, entry) -> None:
    """A virtual tensor lives in the workspace, whose pieces are aligned to more than the kernel asks."""
    virtual = dict(alignment=1, is_virtual=True, is_output=False)
    assert entry.supports(make_problem(changes={"d": virtual}), SM90) == ()


def test_planning_imports_neither_torch_nor_the_dsl() -> None:
    code = (
        "import sys, opfuse.kernels.hopper.dglu_support; "
        "print(sorted({'torch', 'cutlass', 'cuda', 'filelock'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
