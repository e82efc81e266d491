"""Our Hopper quantize kernel without a GPU: its support surface, every code with its text; the adapter and the launch
over an emulated function; and plans that it takes part in."""

from __future__ import annotations

import dataclasses
import json
from types import ModuleType
from typing import Any

import pytest
import torch
from opfuse.graph_ops import DataType
from opfuse.graph_ops.ir.dims import symbol
from opfuse.kernels.arch import ARCHES, arch_of_capability
from opfuse.kernels.hopper import quantize_row_col, quantize_support
from opfuse.kernels.reference.quantize import quantize_blocks
from opfuse.kernels.registry import KERNELS
from opfuse.kernels.sm90 import quantize_host
from opfuse.kernels.sm90.quantize_config import QuantizeConfig, illegal, scale_bytes

BF16, F16, F32, E5M2 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT, DataType.FP8_E5M2
SM90 = ARCHES["sm90"]
ENTRIES = {k.rule: k for k in KERNELS if k.id in ("sm90.quantize_row_col", "sm90.quantize")}
ROW, COL = ("q_row",), ("q_col",)
Options = dict[str, Any]

GOLDEN: dict[str, tuple[Options, str]] = {
    "X_TYPE": (
        dict(x=DataType.DOUBLE),
        "X_TYPE: x is DOUBLE, requires BFLOAT16, HALF or FLOAT x; identity(x) with one of these types converts, with "
        "its rounding",
    ),
    "COLUMN_MULTIPLE": (
        dict(n=36, changes={"x": dict(stride=(40, 1)), **{r: dict(stride=(40, 1)) for r in ("q_row", "q_col")}}),
        "COLUMN_MULTIPLE: N = 36, requires N positive and known to be a multiple of 8; pad the columns with zeros",
    ),
    "MATRIX_LAYOUT": (
        dict(changes={"x": dict(stride=(68, 1))}),
        "MATRIX_LAYOUT: x stride (68, 1), requires row-major x, rows at multiples of 16 bytes; pass a contiguous copy",
    ),
    "ALIGNMENT": (
        dict(changes={"q_row": dict(alignment=8)}),
        "ALIGNMENT: promised bytes: q_row 8, requires data pointers aligned to 16 bytes; torch's own allocations are "
        "aligned; set_alignment_value(16) promises it",
    ),
    "BLOCK_FORMAT": (
        dict(roles=COL, attributes={"q_col.block_size": 16}),
        "BLOCK_FORMAT: q_col: FP8_E4M3, blocks of 16, FP8_E8M0 scales, requires MXFP8: E4M3 or E5M2 codes, E8M0 scales "
        "of 32; another format is quantized unfused",
    ),
    "CODE_LAYOUT": (
        dict(changes={"q_col": dict(stride=(1, 64))}),
        "CODE_LAYOUT: q_col stride (1, 64), requires row-major codes, rows at multiples of 8, and scales without gaps; "
        "pass a contiguous copy",
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", GOLDEN)
def test_each_condition_fails_alone_with_its_text(make_quantize_problem: Any, code: str) -> None:
    broken, text = GOLDEN[code]
    problem = make_quantize_problem(**broken)
    assert [str(r) for r in ENTRIES[problem.rule].supports(problem, SM90)] == [text]


def test_every_code_has_a_golden_text() -> None:
    assert [c.code for c in quantize_support.QUANTIZE] == list(GOLDEN)
    assert all(entry.conditions is quantize_support.QUANTIZE for entry in ENTRIES.values()) and len(ENTRIES) == 2


SERVED: dict[str, tuple[Options, QuantizeConfig]] = {
    "both": (dict(), QuantizeConfig()),
    "rows": (dict(roles=ROW), QuantizeConfig(q_col_dtype=None)),
    "columns": (dict(roles=COL, swizzled=False), QuantizeConfig(q_row_dtype=None, col_swizzled=False)),
    "fp16": (dict(x=F16), QuantizeConfig("fp16")),
    "FLOAT with a pitch of 16 bytes": (dict(x=F32, changes={"x": dict(stride=(68, 1))}), QuantizeConfig("fp32")),
    "E5M2 columns": (dict(changes={"q_col": dict(data_type=E5M2)}), QuantizeConfig(q_col_dtype="e5m2")),
    "one side plain": (dict(attributes={"q_row.swizzled": False}), QuantizeConfig(row_swizzled=False)),
    "norm_const": (dict(roles=(*ROW, *COL, "norm_const_row")), QuantizeConfig(has_norm_row=True)),
    "the other": (dict(roles=(*COL, "norm_const_col")), QuantizeConfig(q_row_dtype=None, has_norm_col=True)),
    "8 columns": (dict(n=8), QuantizeConfig()),
    "a symbol": (dict(n=symbol("N", 8), rows=77), QuantizeConfig()),
}


@pytest.mark.parametrize("name", SERVED)
def test_served_by_its_configuration(make_quantize_problem: Any, name: str) -> None:
    options, config = SERVED[name]
    problem = make_quantize_problem(**options)
    assert [str(r) for r in ENTRIES[problem.rule].supports(problem, SM90)] == []
    assert quantize_support.configuration(problem) == config and illegal(config, n=8) == []
    assert json.loads(json.dumps(config.as_dict())) == config.as_dict()


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 7)])
def test_c79_only_sm90(make_quantize_problem: Any, capability: tuple[int, int]) -> None:
    problem = make_quantize_problem(roles=ROW)
    reasons = ENTRIES["quantize"].supports(problem, arch_of_capability(capability))
    assert [r.code for r in reasons] == ([] if capability == (9, 0) else ["ARCH"])


@pytest.mark.parametrize(
    "change, said",
    [
        ({"x_dtype": "e4m3"}, "x_dtype is 'e4m3'"),
        ({"q_row_dtype": "e8m0"}, "q_row_dtype is 'e8m0'"),
        ({"q_row_dtype": None, "q_col_dtype": None}, "neither rows nor columns"),
        ({"q_col_dtype": None, "has_norm_col": True}, "norm_const_col without codes of its side"),
    ],
)
def test_illegal_says_what_is_wrong(change: Options, said: str) -> None:
    (reason,) = illegal(dataclasses.replace(QuantizeConfig(), **change))
    assert said in reason
    assert "N is 12" in illegal(QuantizeConfig(), n=12)[0] and "N is 0" in illegal(QuantizeConfig(), n=0)[0]


# ------------------------------------------------------------------ the adapter, and plans


@pytest.mark.parametrize("rows", [0, 1, 77, 300])
@pytest.mark.parametrize("roles", [ROW, (*ROW, *COL, "norm_const_row", "norm_const_col")])
def test_the_adapter_runs_and_prepares(emulated: list[Any], make_quantize_problem: Any, roles: Any, rows: int) -> None:
    problem = make_quantize_problem(n=72, roles=roles)
    kernel, bindings = quantize_row_col.build(problem, "cpu"), {"M": rows}
    assert kernel.zeroes_scales and kernel.workspace_bytes(bindings) == 0
    buffers = {r: torch.full(t.shape(bindings), 0xA5, dtype=torch.uint8) for r, t in problem.tensors.items()}
    buffers["x"] = torch.randn(rows, 72).to(torch.bfloat16)
    buffers |= {r: torch.tensor([-1.5]) for r in roles if r.startswith("norm")}
    kernel.run(buffers, None, bindings)
    again = {r: t.clone() for r, t in buffers.items()}
    prepared = kernel.prepare(again, None, bindings)
    assert (prepared is None) == (rows == 0) and len(emulated) == 1
    if prepared is not None:
        for role in buffers.keys() & {"q_row", "sf_row", "q_col", "sf_col"}:
            again[role].zero_()
        prepared(0)
        norm = -1.5 if "norm_const_row" in roles else 1.0
        codes, _ = quantize_blocks(buffers["x"].float(), 32, DataType.FP8_E4M3, DataType.FP8_E8M0, norm)
        assert torch.equal(buffers["q_row"], codes)
        assert all(torch.equal(again[r], t) for r, t in buffers.items())


@pytest.mark.parametrize("axes", [(1, 0), (1,), (0,)])
@pytest.mark.parametrize("swizzled", [True, False])
def test_plans_that_it_takes_part_in(emulation: ModuleType, emulated: list[Any], axes: Any, swizzled: bool) -> None:
    """Planned on sm90 equals unfused, byte for byte: odd sizes, norm_const of one side."""

    def run(fused: bool) -> list[torch.Tensor]:
        g = emulation.EmulatedGraph(io_data_type=BF16, fused=fused)
        x, factor = g.tensor("x", (g.symbol("M"), 200)), g.tensor("factor", (1,), data_type=F32)
        made = [t.set_output(True) for axis in axes for t in g.block_scale_quantize(
            x, block_size=32, axis=axis, data_type=DataType.FP8_E4M3, swizzled=swizzled,
            norm_const=factor if axis == axes[-1] else None)]  # fmt: skip
        g.build()
        assert [s.kernel for s in g.plan.fused_steps] == (
            ["sm90.quantize_row_col" if len(axes) == 2 else "sm90.quantize"] if fused else [])  # fmt: skip
        found = g({"x": data, "factor": torch.tensor([0.3])})
        return [found[t].view(torch.uint8) for t in made]

    data = torch.randn(133, 200).to(torch.bfloat16)
    for fused, apart in zip(run(True), run(False), strict=True):
        assert torch.equal(fused, apart)
    assert len(emulated) == 1 and emulated[0].calls == 1


# ------------------------------------------------------------------ the launch alone

CONFIG = QuantizeConfig(has_norm_col=True)


def tensors_of(rows: int = 100, n: int = 72) -> dict[str, torch.Tensor]:
    sizes = scale_bytes(CONFIG, rows, n)
    codes = {f"q_{side}": torch.empty(rows, n, dtype=torch.uint8) for side in sizes}
    scales = {f"sf_{side}": torch.empty(size, dtype=torch.uint8) for side, size in sizes.items()}
    return {"x": torch.ones(rows, n, dtype=torch.bfloat16), "norm_const_col": torch.ones(1), **codes, **scales}


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t | {"x": t["x"].float()}, r"x is torch.float32.*required is bfloat16 \(100, 72\)"),
        (lambda t: t | {"q_row": t["q_row"][:99]}, r"q_row is torch.uint8 \(99, 72\)"),
        (lambda t: t | {"sf_row": t["sf_row"][:511]}, "sf_row has 511 bytes; required are 512"),
        (lambda t: t | {"norm_const_col": torch.ones(2)}, r"required is float32 \(1,\)"),
        (lambda t: t | {"norm_const_row": torch.ones(1)}, "norm_const_row is given, and not configured"),
        (lambda t: {n: x for n, x in t.items() if n != "q_col"}, "q_col is missing"),
        (lambda t: t | {"x": t["x"].view(-1)}, r"x has shape \(7200,\); required is rank 2"),
        (lambda t: tensors_of(n=68), "N is 68"),
    ],
)  # fmt: skip
def test_launch_refuses_what_the_function_cannot_take(
    emulation: ModuleType, emulated: list[Any], change: Any, said: str
) -> None:
    quantize_host.FUNCTIONS.install(CONFIG, function := emulation.EmulatedQuantize(CONFIG))
    quantize_host.launch(CONFIG, **tensors_of())
    quantize_host.launch(CONFIG, **tensors_of(rows=0))
    assert function.calls == 1
    with pytest.raises(ValueError, match=said):
        quantize_host.launch(CONFIG, **change(tensors_of()))
    assert function.calls == 1
