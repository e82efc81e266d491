"""The support surface of our Hopper GLU kernel: every code with its text, what it lets through, every arch; and the
configuration that a problem becomes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from opfuse.graph_ops.ir.dims import symbol
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.kernels.arch import ARCHES, arch_of_capability
from opfuse.kernels.hopper import glu_support
from opfuse.kernels.sm90 import glu_tune
from opfuse.kernels.sm90.config import Activation
from opfuse.kernels.sm90.glu_config import GluConfig, illegal

BF16, F16, F32, I32, I64 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT, DataType.INT32, DataType.INT64
SM90 = ARCHES["sm90"]
Options = dict[str, Any]
M = symbol("M", 128)
INSIDE: Options = dict(without=("c",))  # the product is not written
CODED: Options = dict(roles=("q_row", "q_col"), without=("c", "d"), rounding={"c": BF16, "d": F32})
"""The activation leaves as codes alone."""

# What breaks each condition alone, and the text that a user then reads.
GOLDEN: dict[str, tuple[Options, str]] = {
    "OPERAND_TYPE": (
        dict(operands=F32),
        "OPERAND_TYPE: a is FLOAT, b is FLOAT, requires BFLOAT16 or HALF a and b; "
        "identity(x) with a 16-bit data type converts, with its rounding",
    ),
    "COLUMN_MULTIPLE": (
        dict(n=48),
        "COLUMN_MULTIPLE: N = 96, requires N known to be a multiple of 64: 32 gate and 32 up columns (of 32 with their "
        "weights apart); "
        "pad the intermediate size to a multiple of 32",
    ),
    "DEPTH_MULTIPLE": (
        dict(k=100, changes={"a": dict(stride=(104, 1)), "b": dict(stride=(104 * 128, 1, 104))}),
        "DEPTH_MULTIPLE: K = 100, requires K positive and known to be a multiple of 8 (16 bytes a row); "
        "pad K with zeros in a and b",
    ),
    "EXPERTS": (
        dict(experts=1025),
        "EXPERTS: L = 1025, requires 1 to 1024 experts, as an integer; split the experts over several graphs",
    ),
    "MATRIX_LAYOUT": (
        dict(changes={"c": dict(stride=(132, 1)), "d": dict(stride=(1, M))}),
        "MATRIX_LAYOUT: c stride (132, 1), d stride (1, M), requires row-major a, c, d and bias, rows at multiples of "
        "8 elements; pass a contiguous copy",
    ),
    "B_LAYOUT": (
        dict(changes={"b": dict(stride=(1, 256, 2))}),
        "B_LAYOUT: b (2, 64, 128) with stride (1, 256, 2), requires K-major or N-major weights, the other strides "
        "multiples of 8; discrete ones packed; pass a contiguous copy",
    ),
    "UP_WEIGHTS": (
        dict(apart=True, changes={"b_up": dict(stride=(64 * 64, 64, 1))}),
        "UP_WEIGHTS: b BFLOAT16 with stride (4096, 1, 64), b_up BFLOAT16 with stride (4096, 64, 1), requires weights "
        "of up of the gate's type and layout, both dense; pass a contiguous copy",
    ),
    "UP_ROUNDING": (
        dict(apart=True, rounding={"c": BF16, "gate": BF16, "up": F16}),
        "UP_ROUNDING: gate rounds to BFLOAT16, up rounds to HALF, requires gate and up that round where their product "
        "does, or nowhere else; leave gate and up virtual FLOAT",
    ),
    "VECTOR_LAYOUT": (
        dict(roles=("prob",), changes={"prob": dict(stride=(2,)), "offsets": dict(data_type=I64)}),
        "VECTOR_LAYOUT: offsets INT64 stride (1,), prob FLOAT stride (2,), requires INT32 offsets and FLOAT alpha and "
        "prob, without gaps; pass a contiguous copy",
    ),
    "ALIGNMENT": (
        dict(changes={"a": dict(alignment=8)}),
        "ALIGNMENT: promised bytes: a 8, requires data pointers aligned to 16 bytes; "
        "torch's own allocations are aligned; set_alignment_value(16) promises it",
    ),
    "GLU_LAYOUT": (
        dict(layout=GluLayout.interleaved(16)),
        "GLU_LAYOUT: b is interleaved(16), requires gate and up interleaved by 32, by 1, or concatenated; "
        "convert_glu_layout(w1, GluLayout.interleaved(32))",
    ),
    "PRODUCT_ROUNDING": (
        dict(INSIDE, rounding={"c": DataType.FP8_E4M3}),
        "PRODUCT_ROUNDING: it rounds to FP8_E4M3, requires a product that the activation reads in FLOAT, or rounded to "
        "BFLOAT16 or HALF; set_data_type on the product",
    ),
    "C_TYPE": (
        dict(changes={"c": dict(data_type=F32)}),
        "C_TYPE: c is FLOAT, requires BFLOAT16 or HALF c; write identity of the product with a 16-bit data type",
    ),
    "D_TYPE": (
        dict(changes={"d": dict(data_type=F32)}),
        "D_TYPE: d is FLOAT, requires the activation as a BFLOAT16 or HALF tensor, or in codes alone; "
        "set_data_type on the activation",
    ),
    "BIAS_TYPE": (
        dict(roles=("bias",), changes={"bias": dict(data_type=DataType.FP8_E4M3)}),
        "BIAS_TYPE: bias is FP8_E4M3, requires BFLOAT16, HALF or FLOAT bias; set its data_type",
    ),
    "PLAIN_OUTPUTS": (
        dict(roles=("dbias", "amax")),
        "PLAIN_OUTPUTS: dbias, amax, requires no column sums or amax of the activation; "
        "they stay nodes of their own, of the activation as a tensor of 16 bits",
    ),
    "SOURCE_ROUNDING": (
        dict(CODED, rounding={"c": BF16, "d": DataType.FP8_E4M3}),
        "SOURCE_ROUNDING: it rounds to FP8_E4M3, requires codes of the activation in FLOAT, or rounded to BFLOAT16 or "
        "HALF; set_data_type on the activation",
    ),
    "CODE_COLUMNS": (
        dict(CODED, n=96),
        "CODE_COLUMNS: 96, requires columns of the activation known to be a multiple of 64 where they are quantized; "
        "pad the intermediate size to a multiple of 64",
    ),
    "NORM_CONST": (
        dict(CODED, roles=("q_row", "q_col", "norm_const_row")),
        "NORM_CONST: norm_const on row, requires no norm_const; fold it into alpha or prob",
    ),
    "BLOCK_FORMAT": (
        dict(CODED, attributes={"q_row.scale_type": "FP8_E4M3"}),
        "BLOCK_FORMAT: q_row: FP8_E4M3, blocks of 32, FP8_E4M3 scales, requires MXFP8: E4M3 or E5M2 codes, E8M0 scales "
        "of 32; another format is quantized unfused",
    ),
    "CODE_LAYOUT": (
        dict(CODED, changes={"q_col": dict(stride=(72, 1))}),
        "CODE_LAYOUT: q_col stride (72, 1), requires row-major codes, rows at multiples of 16, and scales without "
        "gaps; pass a contiguous copy",
    ),
    "SCALE_LAYOUTS_EQUAL": (
        dict(CODED, attributes={"q_col.swizzled": False}),
        "SCALE_LAYOUTS_EQUAL: rows swizzled(block 32, axis 1), columns swizzled(block 32, axis 0), requires row and "
        "column scales both swizzled or both plain; give both the same `swizzled`",
    ),
    "GROUP_MULTIPLE": (
        dict(CODED, changes={"offsets": dict(multiple_of=32)}),
        "GROUP_MULTIPLE: offsets promise multiples of 32, scales need 128, requires end offsets promised to be "
        "multiples of what the scales' layout needs (32 for plain column scales, 128 for swizzled ones); pad each "
        "expert's rows and declare g.tensor(..., multiple_of=128)",
    ),
    "ACT_PARAMETERS": (
        dict(act="geglu", attributes=dict(clamp_max=float("inf"))),
        "ACT_PARAMETERS: {'clamp_max': inf}, requires activation parameters that are finite in float32; "
        "a finite bound beyond the data, 3e38 say, clamps nothing",
    ),
    "LEGAL": (
        dict(changes={"c": dict(data_type=F16)}, rounding={"c_wide": BF16}),
        "LEGAL: the product rounds to bf16, and h, which is its value, is fp16, requires a configuration that the "
        "kernel's legality function accepts; sm90.glu_config.illegal states every limit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", GOLDEN)
def test_each_condition_fails_alone_with_its_text(make_glu_problem, glu_entry, code: str) -> None:
    broken, text = GOLDEN[code]
    assert [str(r) for r in glu_entry.supports(make_glu_problem(**broken), SM90)] == [text]


def test_every_code_has_a_golden_text() -> None:
    codes = [c.code for c in glu_support.GLU]
    assert len(set(codes)) == len(codes), "a code means one thing"
    assert set(codes) == set(GOLDEN)
    assert [c.code for c in glu_support.GLU if not (c.hint and c.requires)] == []


def test_all_failures_are_collected(make_glu_problem, glu_entry) -> None:
    """Independent faults give a reason each, in declaration order, behind ARCH."""
    problem = make_glu_problem(n=48, changes={"offsets": dict(data_type=I64), "d": dict(data_type=F32)})
    assert [r.code for r in glu_entry.supports(problem, ARCHES["sm100"])] == [
        "ARCH", "COLUMN_MULTIPLE", "VECTOR_LAYOUT", "D_TYPE",
    ]  # fmt: skip


# Each condition's other side: the nearest problem that it lets through.
SERVED: dict[str, Options] = {
    "plain": dict(),
    "c not written, rounded": dict(INSIDE, rounding={"c": BF16}),
    "c not written, FLOAT": dict(INSIDE, rounding={"c": F32}),
    "c a copy of a FLOAT product": dict(rounding={"c_wide": F32}),
    "c HALF": dict(changes={"c": dict(data_type=F16)}),
    "d HALF": dict(changes={"d": dict(data_type=F16)}),
    "fp16": dict(operands=F16),
    "n-major": dict(b_major="n"),
    "2N equal to K, either major (C22)": dict(n=32, k=64, b_major="n"),
    "discrete": dict(changes={"b": dict(discrete=True)}),
    "discrete n-major": dict(b_major="n", changes={"b": dict(discrete=True)}),
    "rows that divide by nothing": dict(rows=symbol("R", 1)),
    "rows known": dict(rows=640),
    "no rows": dict(rows=0),
    "32 columns": dict(n=32),
    "depth of 8": dict(k=8),
    "symbols for K and N": dict(k=symbol("K", 64), n=symbol("N", 32)),
    "one expert": dict(experts=1),
    "most experts": dict(experts=1024),
    "a pitch": dict(changes={"a": dict(stride=(72, 1)), "c": dict(stride=(136, 1)), "d": dict(stride=(192, 1))}),
    "concatenated": dict(layout=GluLayout.concatenated()),
    "apart": dict(apart=True),
    "apart, n-major, a pitch": dict(apart=True, b_major="n", changes={"b_up": dict(stride=(64 * 72, 72, 1))}),
    "apart, rounded as the product": dict(apart=True, rounding={"gate": BF16, "up": F32}),
    "apart, not written": dict(INSIDE, apart=True, rounding={"c": BF16, "gate": BF16, "up": BF16}),
    "apart, 32 columns": dict(apart=True, n=32),
    "interleaved by one": dict(layout=GluLayout.interleaved(1)),
    "geglu": dict(act="geglu"),
    "geglu with wide clamps": dict(act="geglu", attributes=dict(clamp_min=-3e38, clamp_max=3e38)),
    "situglu": dict(act="situglu"),
    "factors": dict(roles=("alpha", "prob")),
    "alpha squared": dict(roles=("alpha",), attributes=dict(alpha_exponent=2)),
    "prob of rank two": dict(roles=("prob",), changes={"prob": dict(dim=(M, 1), stride=(1, 1))}),
    "codes alone": CODED,
    "codes along rows beside d, of d": dict(roles=("q_row",)),
    "codes along columns beside c and d, of a FLOAT activation": dict(roles=("q_col",), rounding={"d_wide": F32}),
    "codes of a rounded activation that is not written": dict(CODED, rounding={"c": BF16, "d": F16}),
    "E5M2, plain scales, groups of 32": dict(
        CODED, swizzled=False, changes={"offsets": dict(multiple_of=32), "q_col": dict(data_type=DataType.FP8_E5M2)}),
    "codes, concatenated": dict(CODED, layout=GluLayout.concatenated()),
    "codes, apart": dict(CODED, apart=True, rounding={"c": F32}),
    "bias": dict(roles=("bias",)),
    "bias in HALF": dict(roles=("bias",), changes={"bias": dict(data_type=F16)}),
    "bias in FLOAT with a pitch": dict(roles=("bias",), changes={"bias": dict(data_type=F32, stride=(192, 1))}),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_served(make_glu_problem, glu_entry, name: str) -> None:
    assert [str(r) for r in glu_entry.supports(make_glu_problem(**SERVED[name]), SM90)] == []


# Further ways to break a condition than the golden one.
DECLINED: list[tuple[str, Options]] = [
    ("OPERAND_TYPE", dict(changes={"b": dict(data_type=F16)})),
    ("D_TYPE", dict(without=("d",))),
    ("D_TYPE", dict(roles=("q_row",), changes={"d": dict(data_type=F32)})),
    ("LEGAL", dict(CODED, layout=GluLayout.interleaved(1))),
    ("GROUP_MULTIPLE", dict(CODED, swizzled=False, changes={"offsets": dict(multiple_of=16)})),
    ("COLUMN_MULTIPLE", dict(n=symbol("N", 16))),
    ("EXPERTS", dict(experts=symbol("L", 1))),
    ("MATRIX_LAYOUT", dict(roles=("bias",), changes={"bias": dict(stride=(132, 1))})),
    ("MATRIX_LAYOUT", dict(changes={"a": dict(stride=(symbol("P", 4), 1))})),
    ("MATRIX_LAYOUT", dict(changes={"a": dict(stride=(0, 1))})),
    ("B_LAYOUT", dict(changes={"b": dict(stride=(0, 1, 64))})),
    ("B_LAYOUT", dict(changes={"b": dict(stride=(64 * 128 + 4, 1, 64))})),
    ("B_LAYOUT", dict(changes={"b": dict(stride=(128 * 68, 1, 68))})),
    ("B_LAYOUT", dict(changes={"b": dict(stride=(128 * 72, 1, 72), discrete=True)})),
    ("COLUMN_MULTIPLE", dict(apart=True, n=48)),
    ("UP_WEIGHTS", dict(apart=True, changes={"b_up": dict(data_type=F16)})),
    ("UP_WEIGHTS", dict(apart=True, changes={"b": dict(discrete=True), "b_up": dict(discrete=True)})),
    ("UP_WEIGHTS", dict(apart=True, changes={"b_up": dict(stride=(0, 1, 64))})),
    ("UP_ROUNDING", dict(INSIDE, apart=True, rounding={"c": F32, "gate": BF16})),
    ("VECTOR_LAYOUT", dict(roles=("prob",), changes={"prob": dict(data_type=BF16)})),
    ("VECTOR_LAYOUT", dict(roles=("alpha",), changes={"alpha": dict(stride=(2,))})),
    ("ALIGNMENT", dict(changes={"d": dict(alignment=4)})),
    ("GLU_LAYOUT", dict(INSIDE, rounding={"c": BF16}, changes={"b": dict(glu_layout=None)})),
    ("PRODUCT_ROUNDING", dict(rounding={"c_wide": DataType.DOUBLE})),
    ("C_TYPE", dict(changes={"c": dict(data_type=DataType.FP8_E4M3)}, rounding={"c_wide": F32})),
    ("D_TYPE", dict(without=("d",))),
    ("PLAIN_OUTPUTS", dict(roles=("dbias",))),
    ("PLAIN_OUTPUTS", dict(roles=("amax",))),
    ("ACT_PARAMETERS", dict(act="geglu", attributes=dict(geglu_alpha=float("nan")))),
    ("LEGAL", dict(act="situglu", attributes=dict(situ_beta1=0.0))),
]


@pytest.mark.parametrize(("code", "options"), DECLINED, ids=[f"{i} {c}" for i, (c, _) in enumerate(DECLINED)])
def test_declined(make_glu_problem, glu_entry, code: str, options: Options) -> None:
    assert [r.code for r in glu_entry.supports(make_glu_problem(**options), SM90)] == [code]


@pytest.mark.parametrize(("code", "options"), [("COLUMN_MULTIPLE", dict(n=0)), ("DEPTH_MULTIPLE", dict(k=0))])
def test_empty_products_are_declined(make_glu_problem, glu_entry, code: str, options: Options) -> None:
    assert code in [r.code for r in glu_entry.supports(make_glu_problem(**options), SM90)]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0)])
def test_c79_only_sm90(make_glu_problem, glu_entry, capability: tuple[int, int]) -> None:
    reasons = glu_entry.supports(make_glu_problem(), arch_of_capability(capability))
    assert [r.code for r in reasons] == ([] if capability == (9, 0) else ["ARCH"])


def test_planning_imports_neither_torch_nor_the_dsl() -> None:
    code = (
        "import sys, opfuse.kernels.hopper.glu_support; "
        "print(sorted({'torch', 'cutlass', 'cuda', 'filelock'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------ configurations

# field -> [(problem, what the field then holds)]; every other field but those of `along` stays as it was.
FIELDS: dict[str, list[tuple[Options, Any]]] = {
    "ab_dtype": [(dict(operands=F16), "fp16")],
    "b_major": [(dict(b_major="n"), "n"), (dict(b_major="n", n=32, k=64), "n")],
    "separate_up": [(dict(apart=True), True)],
    "discrete_b": [(dict(changes={"b": dict(discrete=True)}), True)],
    "glu_layout": [
        (dict(layout=GluLayout.concatenated()), "concatenated"),
        (dict(layout=GluLayout.interleaved(1)), "interleaved1"),
    ],
    "act": [
        (dict(act="geglu"), Activation("geglu")),
        (dict(act="geglu", attributes=dict(geglu_alpha=1.0)), Activation("geglu", alpha=1.0)),
        (dict(act="geglu", attributes=dict(clamp_min=-9.0)), Activation("geglu", clamp_min=-9.0)),
        (dict(act="situglu", attributes=dict(situ_beta2=3.0)), Activation("situglu", beta2=3.0)),
    ],
    "product_dtype": [(dict(rounding={"c_wide": F32}), None)],
    "h_dtype": [(dict(INSIDE, rounding={"c": BF16}), None)],
    "d_dtype": [(dict(changes={"d": dict(data_type=F16)}), "fp16"), (dict(CODED, rounding={"c": BF16}), None)],
    "q_row_dtype": [(dict(roles=("q_row",)), "e4m3")],
    "q_col_dtype": [(dict(roles=("q_col",), changes={"q_col": dict(data_type=DataType.FP8_E5M2)}), "e5m2")],
    "sf_swizzled": [(dict(roles=("q_row",), swizzled=False), False)],
    "source_dtype": [
        (dict(roles=("q_row",)), "bf16"),
        (dict(roles=("q_row",), changes={"d": dict(data_type=F16)}), "fp16"),
    ],
    "has_prob": [(dict(roles=("prob",)), True)],
    "has_alpha": [(dict(roles=("alpha",)), True)],
    "alpha_exponent": [(dict(roles=("alpha",), attributes=dict(alpha_exponent=2)), 2)],
    "bias_dtype": [
        (dict(roles=("bias",)), "bf16"),
        (dict(roles=("bias",), changes={"bias": dict(data_type=F32)}), "fp32"),
    ],
}  # fmt: skip
ALONG = {
    "alpha_exponent": {"has_alpha"}, "separate_up": {"glu_layout"}, "q_row_dtype": {"source_dtype"},
    "d_dtype": {"h_dtype", "q_row_dtype", "q_col_dtype"}, "q_col_dtype": {"source_dtype"},
    "sf_swizzled": {"source_dtype", "q_row_dtype"}, "source_dtype": {"q_row_dtype", "d_dtype"},
}  # fmt: skip
CASES = [(field, options, value) for field, cases in FIELDS.items() for options, value in cases]


def test_every_field_has_a_problem_that_sets_it() -> None:
    assert {*FIELDS, "schedule"} == {f.name for f in dataclasses.fields(GluConfig)}


@pytest.mark.parametrize(("field", "options", "value"), CASES, ids=[f"{i} {c[0]}" for i, c in enumerate(CASES)])
def test_problem_sets_the_field(make_glu_problem, field: str, options: Options, value: Any) -> None:
    first = glu_support.configuration(make_glu_problem())
    config = glu_support.configuration(make_glu_problem(**options))
    assert getattr(config, field) == value != getattr(first, field)
    changed = {f.name for f in dataclasses.fields(GluConfig) if getattr(config, f.name) != getattr(first, f.name)}
    assert changed - ALONG.get(field, set()) == {field}
    assert json.loads(json.dumps(config.as_dict())) == config.as_dict()


@pytest.mark.parametrize(
    "options",
    [
        dict(rows=512), dict(rows=0), dict(experts=7), dict(attributes=dict(alpha_exponent=2)),
        dict(changes={"a": dict(stride=(72, 1)), "c": dict(stride=(136, 1)), "d": dict(stride=(136, 1))}),
        dict(attributes=dict(geglu_alpha=9.0, situ_beta1=2.0)), dict(rounding={"c": BF16}),
    ],
)  # fmt: skip
def test_one_configuration_serves(make_glu_problem, options: Options) -> None:
    assert glu_support.scheduled(make_glu_problem(**options)) == glu_support.scheduled(make_glu_problem())


@pytest.mark.parametrize(("k", "n"), [(64, 64), (2048, 768), (7168, 2048), (2880, 2880), (256, 4096)])
@pytest.mark.parametrize("roles", [(), ("bias",)])
def test_schedules_are_the_tables_and_its_candidates(make_glu_problem, glu_entry, k: int, n: int, roles: Any) -> None:
    problem = make_glu_problem(k=k, n=n, roles=roles)
    config, names = glu_support.scheduled(problem), glu_entry.variants(problem)
    assert config == glu_tune.schedule_for(glu_support.configuration(problem), n=n, k=k)
    varied = [config, *(glu_support.scheduled(problem, name) for name in names)]
    assert len(names) >= 2 and len({c.schedule for c in varied}) == len(varied)
    assert {c.schedule for c in varied} == set(glu_tune.candidates(config, n=n, k=k))
    for one in varied:
        assert illegal(one, n=n, k=k) == [] and dataclasses.replace(one, schedule=config.schedule) == config


@pytest.mark.parametrize(("discrete", "expected"), [(False, 1), (True, 2 + 1)])
def test_launches(make_glu_problem, glu_entry, discrete: bool, expected: int) -> None:
    """The kernel; descriptors and addresses of separate experts."""
    assert glu_entry.launches(make_glu_problem(changes={"b": dict(discrete=discrete)})) == expected
