"""The support surface of our Hopper weight gradient: every code with its text, what it lets through, every arch; and
the configuration that a problem becomes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opfuse.graph_ops.ir.dims import symbol
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.kernels.arch import ARCHES, arch_of_capability
from opfuse.kernels.hopper import wgrad_support
from opfuse.kernels.sm90 import wgrad_tune
from opfuse.kernels.sm90.wgrad_config import WgradConfig, illegal

BF16, F16, F32, I64 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT, DataType.INT64
SM90 = ARCHES["sm90"]
Options = dict[str, Any]
M = symbol("M")

# What breaks each condition alone, and the text that a user then reads.
GOLDEN: dict[str, tuple[Options, str]] = {
    "OPERAND_TYPE": (
        dict(changes={"dy": dict(data_type=F16)}),
        "OPERAND_TYPE: a is BFLOAT16, dy is HALF, requires BFLOAT16 or HALF a and dy; "
        "identity(x) with a 16-bit data type converts, with its rounding",
    ),
    "COLUMN_MULTIPLE": (
        dict(k=100, n=44, changes={"a": dict(stride=(104, 1)), "dy": dict(stride=(48, 1)),
                                   "dw": dict(stride=(4800, 48, 1))}),
        "COLUMN_MULTIPLE: K = 100, N = 44, requires K and N positive and known to be multiples of 8 (16 bytes a row); "
        "pad the columns of a and dy with zeros",
    ),
    "EXPERTS": (
        dict(experts=1025),
        "EXPERTS: L = 1025, requires 1 to 1024 experts, as an integer; split the experts over several graphs",
    ),
    "MATRIX_LAYOUT": (
        dict(changes={"a": dict(stride=(1, M)), "dw": dict(stride=(3072, 1, 64))}),
        "MATRIX_LAYOUT: a stride (1, M), dw stride (3072, 1, 64), requires row-major a, dy and dw, rows and experts at "
        "multiples of 8 elements; pass contiguous copies; exchange a and dy where dw lies transposed",
    ),
    "VECTOR_LAYOUT": (
        dict(changes={"offsets": dict(data_type=I64)}),
        "VECTOR_LAYOUT: offsets INT64 stride (1,), requires INT32 offsets without gaps; pass a contiguous copy",
    ),
    "ALIGNMENT": (
        dict(changes={"dw": dict(alignment=8)}),
        "ALIGNMENT: promised bytes: dw 8, requires data pointers aligned to 16 bytes; "
        "torch's own allocations are aligned; set_alignment_value(16) promises it",
    ),
    "DW_TYPE": (
        dict(changes={"dw": dict(data_type=DataType.FP8_E4M3)}),
        "DW_TYPE: dw is FP8_E4M3, requires BFLOAT16, HALF or FLOAT dw; set its data_type",
    ),
    "LEGAL": (
        dict(accumulate=True, changes={"dw": dict(data_type=BF16)}),
        "LEGAL: accumulate adds in float32 alone; dw_dtype is 'bf16', requires a configuration that the kernel's "
        "legality function accepts; sm90.wgrad_config.illegal states every limit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", GOLDEN)
def test_each_condition_fails_alone_with_its_text(make_wgrad_problem, wgrad_entry, code: str) -> None:
    broken, text = GOLDEN[code]
    assert [str(r) for r in wgrad_entry.supports(make_wgrad_problem(**broken), SM90)] == [text]


def test_every_code_has_a_golden_text() -> None:
    codes = [c.code for c in wgrad_support.WGRAD]
    assert len(set(codes)) == len(codes) and set(codes) == set(GOLDEN)
    assert [c.code for c in wgrad_support.WGRAD if not (c.hint and c.requires)] == []


# Each condition's other side: the nearest problem that it lets through.
SERVED: dict[str, Options] = {
    "plain": dict(),
    "fp16": dict(operands=F16),
    "fp16 to bf16": dict(operands=F16, changes={"dw": dict(data_type=BF16)}),
    "FLOAT": dict(changes={"dw": dict(data_type=F32)}),
    "accumulate": dict(accumulate=True),
    "accumulate of fp16": dict(accumulate=True, operands=F16),
    "rows known": dict(rows=7),
    "no rows": dict(rows=0),
    "columns of 8": dict(k=8, n=8),
    "symbols for K and N": dict(k=symbol("K", 8), n=symbol("N", 16)),
    "one expert": dict(experts=1),
    "most experts": dict(experts=1024),
    "a pitch": dict(changes={"a": dict(stride=(72, 1)), "dy": dict(stride=(56, 1)), "dw": dict(stride=(5120, 80, 1))}),
}


@pytest.mark.parametrize("name", SERVED)
def test_served(make_wgrad_problem, wgrad_entry, name: str) -> None:
    assert [str(r) for r in wgrad_entry.supports(make_wgrad_problem(**SERVED[name]), SM90)] == []


# Further ways to break a condition than the golden one.
DECLINED: list[tuple[str, Options]] = [
    ("OPERAND_TYPE", dict(operands=F32)),
    ("COLUMN_MULTIPLE", dict(k=symbol("K", 4))),
    ("COLUMN_MULTIPLE", dict(n=0)),
    ("EXPERTS", dict(experts=symbol("L"))),
    ("MATRIX_LAYOUT", dict(changes={"dy": dict(stride=(0, 1))})),
    ("MATRIX_LAYOUT", dict(changes={"dy": dict(stride=(symbol("P", 4), 1))})),
    ("MATRIX_LAYOUT", dict(changes={"dw": dict(stride=(64 * 48 + 4, 48, 1))})),
    ("MATRIX_LAYOUT", dict(changes={"dw": dict(stride=(64 * 52, 52, 1))})),
    ("VECTOR_LAYOUT", dict(changes={"offsets": dict(stride=(2,))})),
    ("ALIGNMENT", dict(changes={"a": dict(alignment=2)})),
]


@pytest.mark.parametrize(("code", "options"), DECLINED)
def test_declined(make_wgrad_problem, wgrad_entry, code: str, options: Options) -> None:
    assert code in {r.code for r in wgrad_entry.supports(make_wgrad_problem(**options), SM90)}


def test_every_arch_but_sm90_is_declined(make_wgrad_problem, wgrad_entry) -> None:
    for arch in (*ARCHES.values(), arch_of_capability((8, 0)), arch_of_capability((9, 0))):
        codes = [r.code for r in wgrad_entry.supports(make_wgrad_problem(), arch)]
        assert codes == ([] if arch.capability == (9, 0) else ["ARCH"]), arch.name


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(), WgradConfig()),
        (dict(operands=F16), WgradConfig(ab_dtype="fp16", dw_dtype="fp16")),
        (dict(accumulate=True), WgradConfig(dw_dtype="fp32", accumulate=True)),
    ],
)
def test_a_problem_becomes_this_configuration(make_wgrad_problem, options: Options, expected: WgradConfig) -> None:
    assert wgrad_support.configuration(make_wgrad_problem(**options)) == expected


@pytest.mark.parametrize("k, n", [(8, 8), (768, 2048), (2880, 2880), (symbol("K", 8), symbol("N", 8))])
def test_variants_are_the_other_legal_schedules(make_wgrad_problem, wgrad_entry, k: Any, n: Any) -> None:
    problem = make_wgrad_problem(k=k, n=n)
    names = wgrad_entry.variants(problem)
    schedules = [wgrad_support.scheduled(problem, name).schedule for name in (None, *names)]
    assert len(set(schedules)) == len(schedules) == len(wgrad_tune.SHIPPED)
    assert not any(illegal(wgrad_support.scheduled(problem, name)) for name in (None, *names))
    assert wgrad_entry.launches(problem) == 1


def test_asking_loads_neither_torch_nor_the_dsl() -> None:
    code = (
        "import sys; from opfuse.kernels.hopper import wgrad_support; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'cutlass')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
