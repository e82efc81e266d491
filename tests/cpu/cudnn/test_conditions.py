"""The support surface of the BF16 dGLU kernel: every code with its text, every row of the contract, every arch."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from opfuse.graph_ops.ir.dims import symbol
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout
from opfuse.kernels.arch import ARCHES, arch_of_capability
from opfuse.kernels.cudnn import support, versions

BF16, F16, F32, I32, I64 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT, DataType.INT32, DataType.INT64
SM100 = ARCHES["sm100"]
Options = dict[str, Any]
M = symbol("M", 256)
RECOMPUTE: Options = dict(act="geglu", roles=("activation",))
DBIAS: Options = dict(roles=("dbias",), changes={"d": dict(data_type=F32)})

# What breaks each condition alone, and the text that a user then reads.
GOLDEN: dict[str, tuple[Options, str]] = {
    "OPERAND_TYPE": (
        dict(changes={"a": dict(data_type=F16), "b": dict(data_type=F16)}),
        "OPERAND_TYPE: a is HALF, b is HALF, requires BFLOAT16 a and b; "
        "identity(x) with data_type BFLOAT16 converts, with its rounding",
    ),
    "STATIC_SHAPE": (
        dict(k=symbol("K", 8)),
        "STATIC_SHAPE: K = K, N = 32, L = 2, requires integers for K, N and L; only M may be a symbol; "
        "the kernel is compiled for K, N and L: declare them as integers",
    ),
    "ROW_MULTIPLE": (
        dict(rows=symbol("M", 128)),
        "ROW_MULTIPLE: M = M, known multiple of 128, requires M known to be a multiple of 256; "
        "declare g.symbol('M', multiple_of=256) and pad the rows",
    ),
    "DEPTH_MULTIPLE": (
        dict(k=100),
        "DEPTH_MULTIPLE: K = 100, requires K positive and a multiple of 8 (16 bytes a row); "
        "pad K with zeros in a and b",
    ),
    "COLUMN_MULTIPLE": (
        dict(n=48),
        "COLUMN_MULTIPLE: N = 48, requires N positive and a multiple of 32; "
        "pad the intermediate size to a multiple of 32",
    ),
    "EXPERTS": (
        dict(experts=1025),
        "EXPERTS: L = 1025, requires 1 to 1024 experts; split the experts over several graphs",
    ),
    "A_LAYOUT": (
        dict(changes={"a": dict(stride=(72, 1))}),
        "A_LAYOUT: a (M, 64) with stride (72, 1), requires row-major a without gaps; pass a contiguous copy",
    ),
    "B_LAYOUT": (
        dict(changes={"b": dict(stride=(32, 64, 1))}),
        "B_LAYOUT: b (2, 64, 32) with stride (32, 64, 1), requires weights (L, K, N) without gaps, K-major stride "
        "(K*N, 1, K) or N-major stride (K*N, N, 1); discrete ones (1, K) or (N, 1) each; pass a contiguous copy",
    ),
    "GLU_LAYOUT": (
        dict(changes={"c": dict(glu_layout=GluLayout.concatenated())}),
        "GLU_LAYOUT: c is concatenated, requires gate and up interleaved by 32 columns; "
        "convert_glu_layout(x, GluLayout.interleaved(32)) reorders the columns; permuting w1's columns once is cheaper",
    ),
    "C_TYPE": (
        dict(changes={"c": dict(data_type=DataType.DOUBLE)}),
        "C_TYPE: c is DOUBLE, requires BFLOAT16, HALF or FLOAT c; "
        "set the tensor's data_type, or let this part run unfused",
    ),
    "C_LAYOUT": (
        dict(changes={"c": dict(stride=(1, M))}),
        "C_LAYOUT: c (M, 64) with stride (1, M), requires row-major c without gaps; pass a contiguous copy",
    ),
    "OFFSETS_TYPE": (
        dict(changes={"offsets": dict(data_type=I64)}),
        "OFFSETS_TYPE: offsets is INT64, requires INT32 end offsets; offsets.to(torch.int32) before the graph",
    ),
    "OFFSETS_ALIGNMENT": (
        dict(changes={"offsets": dict(multiple_of=128)}),
        "OFFSETS_ALIGNMENT: offsets promise multiples of 128, requires a promise that every end offset is a multiple "
        "of 256; pad each expert's rows to 256 and declare g.tensor(..., multiple_of=256); unaligned offsets would "
        "overwrite the next expert's rows",
    ),
    "VECTOR_LAYOUT": (
        dict(roles=("prob",), changes={"prob": dict(stride=(2,))}),
        "VECTOR_LAYOUT: prob stride (2,), requires offsets, alpha, beta, prob and dprob without gaps; "
        "pass a contiguous copy",
    ),
    "ALIGNMENT": (
        dict(changes={"a": dict(alignment=8)}),
        "ALIGNMENT: promised bytes: a 8, requires data pointers aligned to 16 bytes; "
        "torch's own allocations are aligned; set_alignment_value(16) promises it",
    ),
    "ALPHA_EXPONENT": (
        dict(roles=("alpha",), attributes=dict(alpha_exponent=1)),
        "ALPHA_EXPONENT: alpha_exponent = 1, requires alpha_exponent = 2: the kernel multiplies by alpha squared; "
        "pass the square root of a non-negative alpha with alpha_exponent=2",
    ),
    "PRODUCT_ROUNDING": (
        dict(product=F16),
        "PRODUCT_ROUNDING: the product rounds to HALF, requires a product that stays FLOAT or rounds to BFLOAT16; "
        "leave the product virtual FLOAT",
    ),
    "ACT": (
        dict(act="situglu"),
        "ACT: act = 'situglu', requires act swiglu or geglu; situglu is in the block-scaled kernel only",
    ),
    "GEGLU_PARAMETERS": (
        dict(act="geglu", attributes=dict(clamp_max=float("inf"))),
        "GEGLU_PARAMETERS: {'geglu_alpha': 1.702, 'clamp_min': -7.0, 'clamp_max': inf}, requires a positive "
        "geglu_alpha and clamp bounds, all finite in float32; a finite bound beyond the data, 3e38 say, clamps nothing",
    ),
    "D_REQUIRED": (
        dict(without=("d",)),
        "D_REQUIRED: no d, requires the gradient as an output; the kernel always writes it: set_output(True) on dx",
    ),
    "D_TYPE": (
        dict(changes={"d": dict(data_type=DataType.FP8_E4M3)}),
        "D_TYPE: d is FP8_E4M3, requires BFLOAT16, HALF or FLOAT d; "
        "set the tensor's data_type, or let this part run unfused",
    ),
    "D_LAYOUT": (
        dict(changes={"d": dict(stride=(128, 1))}),
        "D_LAYOUT: d (M, 64) with stride (128, 1), requires row-major d without gaps; pass a contiguous copy",
    ),
    "DPROB_TYPE": (
        dict(changes={"dprob": dict(data_type=BF16)}),
        "DPROB_TYPE: dprob is BFLOAT16, requires FLOAT dprob; the default of dprob",
    ),
    "DBIAS_TYPE": (
        dict(roles=("dbias",), changes={"d": dict(data_type=F32), "dbias": dict(data_type=F32)}),
        "DBIAS_TYPE: dbias is FLOAT, requires BFLOAT16 dbias; "
        "a FLOAT dbias is a group_sum of its own, and more accurate",
    ),
    "DBIAS_LAYOUT": (
        dict(roles=("dbias",), changes={"d": dict(data_type=F32), "dbias": dict(stride=(1, 2))}),
        "DBIAS_LAYOUT: dbias (2, 64) with stride (1, 2), requires row-major dbias without gaps; pass a contiguous copy",
    ),
    "DBIAS_SOURCE": (
        dict(roles=("dbias",)),
        "DBIAS_SOURCE: it sums a gradient rounded to BFLOAT16, requires dbias of the unrounded gradient; "
        "leave dx virtual FLOAT, sum it, and write identity(dx) with d's data type",
    ),
    "ACTIVATION_OUTPUT": (
        dict(roles=("activation",)),
        "ACTIVATION_OUTPUT: act = 'swiglu', c is BFLOAT16, d is BFLOAT16, activation is BFLOAT16, requires act geglu "
        "and BFLOAT16 c, d and activation for the recomputed activation; glu(x) recomputes it unfused",
    ),
    "ACTIVATION_LAYOUT": (
        dict(RECOMPUTE, changes={"activation": dict(stride=(64, 1))}),
        "ACTIVATION_LAYOUT: activation (M, 32) with stride (64, 1), requires row-major activation without gaps; "
        "pass a contiguous copy",
    ),
    "ACTIVATION_ALIGNMENT": (
        dict(RECOMPUTE, changes={"activation": dict(alignment=16)}),
        "ACTIVATION_ALIGNMENT: promised bytes: 16, requires the activation's pointer aligned to 32 bytes; "
        "set_alignment_value(32) on the activation",
    ),
    "ACTIVATION_SIZE": (
        dict(RECOMPUTE, rows=2**26),
        "ACTIVATION_SIZE: up to 2147483648 elements, requires fewer than 2**31 elements of activation: its store "
        "indexes in 32 bits; split the rows over several calls",
    ),
    "AMAX": (
        dict(roles=("amax",)),
        "AMAX: group_amax of the gradient, requires no amax; amax is in the block-scaled kernel only",
    ),
    "QUANTIZED_OUTPUT": (
        dict(roles=("q_row", "sf_row")),
        "QUANTIZED_OUTPUT: asked for q_row, sf_row, requires no block-scaled outputs; quantized outputs are in the "
        "block-scaled kernel only; here they stay nodes of their own",
    ),
    "DETERMINISTIC_DPROB": (
        dict(deterministic=True),
        "DETERMINISTIC_DPROB: dprob of a deterministic graph, requires no dprob in a deterministic graph; "
        "dprob adds up in float32 atomics, one per 256 columns",
    ),
    "DETERMINISTIC_DBIAS": (
        dict(DBIAS, without=("dprob",), deterministic=True),
        "DETERMINISTIC_DBIAS: dbias of a deterministic graph, requires no dbias in a deterministic graph; "
        "dbias adds up in bfloat16 atomics, one per 128 rows",
    ),
}


@pytest.mark.parametrize("code", GOLDEN)
def test_each_condition_fails_alone_with_its_text(make_problem, entry, code: str) -> None:
    broken, text = GOLDEN[code]
    assert [str(r) for r in entry.supports(make_problem(**broken), SM100)] == [text]


def test_cudnn_version_text(make_problem, entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: versions.Pair("1.32.0", "4.6.1"))
    assert [str(r) for r in entry.supports(make_problem(), SM100)] == [
        "CUDNN_VERSION: cudnn-frontend 1.32.0 with cutlass-dsl 4.6.1: dsl-4.6-fp8, requires cudnn-frontend and "
        "cutlass-dsl that are not known to be wrong together; install the versions that opfuse's extra `cuda` names"
    ]


def test_every_code_has_a_golden_text() -> None:
    codes = [c.code for c in support.BF16_DGLU]
    assert len(set(codes)) == len(codes), "a code means one thing"
    assert set(codes) == {*GOLDEN, "CUDNN_VERSION"}


def test_every_condition_names_its_row_and_hint() -> None:
    assert [c.code for c in support.BF16_DGLU if not (c.row and c.hint and c.requires)] == []


def test_all_failures_are_collected(make_problem, entry) -> None:
    """Three independent faults give three reasons, in declaration order, behind ARCH."""
    problem = make_problem(n=48, act="situglu", changes={"offsets": dict(data_type=I64)})
    assert [r.code for r in entry.supports(problem, ARCHES["sm90"])] == [
        "ARCH",
        "COLUMN_MULTIPLE",
        "OFFSETS_TYPE",
        "ACT",
    ]


# Each row of the BF16 contract on NVIDIA's page: what it accepts, and what it refuses with which code.
ROWS: dict[str, tuple[list[Options], dict[str, Options]]] = {
    "A: (M, K, 1) stride (K, 1, M*K) BF16": (
        [dict(), dict(rows=256), dict(rows=0), dict(k=8)],
        {
            "OPERAND_TYPE": dict(changes={"a": dict(data_type=F16)}),
            "A_LAYOUT": dict(changes={"a": dict(stride=(1, M))}),
        },
    ),
    "dense B: (N, K, L) K-major stride (K, 1, N*K) BF16": (
        [dict(b_major="k"), dict(b_major="n"), dict(experts=1)],
        {
            "OPERAND_TYPE": dict(changes={"b": dict(data_type=F32)}),
            "B_LAYOUT": dict(changes={"b": dict(stride=(1, 64, 128))}),
        },
    ),
    "discrete b_ptrs: expert (N, K) matrices, b_major k or n": (
        [
            dict(changes={"b": dict(discrete=True)}),
            dict(b_major="n", changes={"b": dict(discrete=True)}),
            dict(changes={"b": dict(discrete=True, stride=(7, 1, 64))}),
        ],
        {"B_LAYOUT": dict(changes={"b": dict(discrete=True, stride=(64 * 32, 1, 72))})},
    ),
    "C: (M, 2N, 1) stride (2N, 1, 2M*N) BF16/FP16/FP32": (
        [dict(changes={"c": dict(data_type=t)}) for t in (BF16, F16, F32)],
        {"C_TYPE": GOLDEN["C_TYPE"][0], "C_LAYOUT": dict(changes={"c": dict(stride=(65, 1))})},
    ),
    "padded_offsets: (L,) int32 cumulative 256-aligned ends": (
        [dict(changes={"offsets": dict(multiple_of=512)})],
        {
            "OFFSETS_TYPE": GOLDEN["OFFSETS_TYPE"][0],
            "OFFSETS_ALIGNMENT": dict(changes={"offsets": dict(multiple_of=1)}),
        },
    ),
    "alpha, beta: (L,) FP32; prob: (M, 1, 1) FP32": (
        [dict(roles=r) for r in [("alpha",), ("beta",), ("prob",), ("alpha", "beta", "prob"), ()]],
        {"VECTOR_LAYOUT": dict(roles=("alpha",), changes={"alpha": dict(stride=(2,))})},
    ),
    "caller-zeroed dprob: (M, 1, 1) stride (1, 1, 1) FP32": (
        [dict(), dict(without=("dprob",))],
        {"DPROB_TYPE": GOLDEN["DPROB_TYPE"][0], "VECTOR_LAYOUT": dict(changes={"dprob": dict(stride=(3,))})},
    ),
    "D_row: (M, 2N, 1) stride (2N, 1, 2M*N) BF16/FP16/FP32": (
        [dict(changes={"d": dict(data_type=t)}) for t in (BF16, F16, F32)],
        {"D_TYPE": GOLDEN["D_TYPE"][0], "D_LAYOUT": GOLDEN["D_LAYOUT"][0], "D_REQUIRED": GOLDEN["D_REQUIRED"][0]},
    ),
    "caller-zeroed optional dbias: (L, 2N, 1) stride (2N, 1, 1) BF16": (
        [DBIAS, dict(DBIAS, act="geglu")],
        {"DBIAS_TYPE": GOLDEN["DBIAS_TYPE"][0], "DBIAS_LAYOUT": GOLDEN["DBIAS_LAYOUT"][0]},
    ),
    "R = alpha**2 A B^T": (
        [dict(roles=("alpha",)), dict(attributes=dict(alpha_exponent=1))],
        {"ALPHA_EXPONENT": GOLDEN["ALPHA_EXPONENT"][0]},
    ),
    "X = beta C, for dswiglu and dgeglu": ([dict(roles=("beta",), act=a) for a in ("swiglu", "geglu")], {}),
    "alternating 32-wide gate/input blocks": (
        [dict()],
        {"GLU_LAYOUT": dict(changes={"c": dict(glu_layout=GluLayout.interleaved(1))})},
    ),
    "act_func dswiglu or dgeglu; dsituglu is not on the BF16 backend": (
        [dict(act="swiglu"), dict(act="geglu")],
        {"ACT": dict(act="situglu")},
    ),
    "geglu_alpha, glu_clamp_max, glu_clamp_min": (
        [
            dict(act="geglu", attributes=dict(geglu_alpha=1.0, clamp_min=-10.0, clamp_max=10.0, linear_offset=0.0)),
            dict(act="geglu", attributes=dict(clamp_min=-3e38, clamp_max=3e38)),
        ],
        {"GEGLU_PARAMETERS": dict(act="geglu", attributes=dict(clamp_min=float("-inf")))},
    ),
    "norm_const_tensor, amax, sfd_row, sfd_col, d_col: None on BF16": (
        [dict()],
        {"AMAX": dict(roles=("amax",)), "QUANTIZED_OUTPUT": dict(roles=("norm_const_row", "q_row", "sf_row"))},
    ),
    "N multiple of 32; M multiple of 256; 1 to 1024 experts": (
        [dict(n=96), dict(experts=1024), dict(rows=symbol("M", 512))],
        {"COLUMN_MULTIPLE": dict(n=16), "ROW_MULTIPLE": dict(rows=384), "EXPERTS": dict(experts=2000)},
    ),
    "activation output (1.32): dgeglu with BF16 C/D": (
        [RECOMPUTE],
        {"ACTIVATION_OUTPUT": dict(RECOMPUTE, changes={"c": dict(data_type=F16)})},
    ),
    "round_dgrad_to_input_dtype (1.32)": (
        [dict(product=BF16), dict(product=F32)],
        {"PRODUCT_ROUNDING": dict(product=F16)},
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_row_of_the_contract(make_problem, entry, row: str) -> None:
    accepted, refused = ROWS[row]
    for arch in ("sm100", "sm103"):
        for given in accepted:
            assert entry.supports(make_problem(**given), ARCHES[arch]) == ()
        for code, given in refused.items():
            assert [r.code for r in entry.supports(make_problem(**given), ARCHES[arch])] == [code]


@pytest.mark.parametrize(
    ("capability", "served"),
    [((8, 0), False), ((8, 9), False), ((9, 0), False), ((10, 0), True), ((10, 3), True), ((10, 7), False),
     ((11, 0), False), ((12, 0), False), ((12, 1), False)],
)  # fmt: skip
def test_c79_arch_gate_is_half_open(make_problem, entry, capability: tuple[int, int], served: bool) -> None:
    reasons = entry.supports(make_problem(), arch_of_capability(capability))
    assert [r.code for r in reasons] == ([] if served else ["ARCH"])


def test_cpu_is_refused_by_arch(make_problem, entry) -> None:
    (reason,) = entry.supports(make_problem(), ARCHES["cpu"])
    assert str(reason) == "ARCH: cpu, requires sm100, sm103; another arch keeps this part unfused"


def test_workspace_tensors_need_no_promise(make_problem, entry) -> None:
    """A virtual tensor lives in the workspace, whose pieces are aligned to more than the kernel asks."""
    virtual = dict(alignment=1, is_virtual=True, is_output=False)
    assert entry.supports(make_problem(**RECOMPUTE, changes={"activation": virtual, "d": virtual}), SM100) == ()


def test_dbias_bound_holds_for_bf16_sums_in_any_order() -> None:
    """The stated bound against bf16 running sums of 128-row tiles, tiles in random order."""
    seed = random.randrange(2**32)
    generator = torch.Generator().manual_seed(seed)
    for rows in (128, 1024, 128 * 300):
        x = torch.randn(rows, 16, generator=generator, dtype=torch.float64)
        tiles = x.view(-1, 128, 16).sum(1)
        total = torch.zeros(16, dtype=torch.bfloat16)
        for tile in torch.randperm(len(tiles), generator=generator).tolist():
            total += tiles[tile].to(torch.bfloat16)
        bound = support.dbias_error_factor(rows) * tiles.abs().sum(0)
        assert ((total.double() - x.sum(0)).abs() <= bound).all(), f"seed {seed}, rows {rows}"


def test_planning_imports_nothing_heavy() -> None:
    code = (
        "import sys, opfuse.kernels.registry; print(sorted({'torch', 'cudnn', 'cutlass', 'cuda'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
