"""Grouped matmuls against the oracle: splits, dtypes, majors, dense and discrete weights, and known bugs of others."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.errors import VariantPackError
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.torch_ops import grouped_mm_obstacles, matmul, not_capturable, serves_grouped_mm
from opfuse.kernels.torch_ops.precision import exact_float32
from opfuse.kernels.torch_ops.rows import counts, make_tiles, outside, owner

K, N, SLACK = 24, 40, 11
TYPES = {torch.bfloat16: DataType.BFLOAT16, torch.float16: DataType.HALF, torch.float32: DataType.FLOAT}


def weights(draw, dtype, *, k_major, experts=4, k=K, n=N):
    """(L, K, N), stored along K or along N."""
    if k_major:
        return draw.normal(experts, n, k, dtype=dtype).transpose(1, 2)
    return draw.normal(experts, k, n, dtype=dtype)


def operands(num, draw, split, dtype, *, k_major=False, slack=SLACK):
    rows = sum(split) + slack
    return {
        "a": draw.normal(rows, K, dtype=dtype),
        "b": weights(draw, dtype, k_major=k_major, experts=len(split)),
        "offsets": num.offsets_of(split),
    }


def plain_matmul(inputs, exponent=1):
    """Plain torch in the operands' dtype."""
    a, b = inputs["a"], inputs["b"]
    y = a.new_zeros(a.shape[0], b[0].shape[1])
    start = 0
    for expert, end in enumerate(inputs["offsets"].tolist()):
        part = a[start:end] @ b[expert]
        if "alpha" in inputs:
            part = part * (inputs["alpha"][expert] ** exponent).to(a.dtype)
        if "bias" in inputs:
            part = part + inputs["bias"][expert]
        y[start:end] = part
        start = end
    return y


@pytest.mark.parametrize("k_major", [False, True], ids=["n_major", "k_major"])
def test_grouped_matmul(num, draw, split, dtype, k_major):
    inputs = operands(num, draw, split, dtype, k_major=k_major)
    case = num.make_case("grouped_matmul", inputs, output_types={"y": TYPES[dtype]}, seed=draw.seed)
    y = case.run()["y"]
    num.assert_close(y, case.oracle()["y"], plain_matmul(inputs), f"{split}, seed {draw.seed}")
    assert (y[sum(split) :] == 0).all()


@pytest.mark.parametrize("exponent", [1, 2])
def test_alpha_and_bias_round_once(num, draw, dtype, exponent):
    split = num.SPLITS["random_uneven"]
    inputs = operands(num, draw, split, dtype)
    inputs |= {"alpha": draw.scalars(len(split)), "bias": draw.normal(len(split), N, dtype=dtype)}
    case = num.make_case("grouped_matmul", inputs, {"alpha_exponent": exponent}, output_types={"y": TYPES[dtype]})
    y, want = case.run(strided=True)["y"], case.oracle()["y"]
    num.assert_close(y, want, plain_matmul(inputs, exponent), f"seed {draw.seed}")
    # One rounding: at most half a unit in the last place from the exact result, and float32 errors times alpha**2.
    unit = torch.finfo(dtype).eps
    assert ((y.double() - want).abs() <= 0.5001 * unit * want.abs() + 1e-4).all(), f"rounded twice, seed {draw.seed}"


def test_alpha_exponent_matters(num, draw):
    split = num.SPLITS["regular"]
    inputs = {**operands(num, draw, split, torch.float32), "alpha": draw.scalars(4)}
    once, twice = (num.make_case("grouped_matmul", inputs, {"alpha_exponent": e}).run()["y"] for e in (1, 2))
    assert (once - twice).abs().max() > 1


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_float_result_is_the_unrounded_accumulator(num, draw, narrow):
    inputs = operands(num, draw, num.SPLITS["random_uneven"], narrow)
    case = num.make_case("grouped_matmul", inputs, output_types={"y": DataType.FLOAT})
    y, want = case.run()["y"], case.oracle()["y"]
    assert (y.double() - want).abs().max() < 1e-5, f"seed {draw.seed}"
    assert (y - y.to(narrow).float()).abs().max() > 1e-4, (
        "a result that is representable in the operands' type was rounded"
    )


@pytest.mark.parametrize("k_major", [False, True], ids=["n_major", "k_major"])
def test_discrete_weights_by_list_and_by_address(num, draw, split, k_major):
    inputs = operands(num, draw, split, torch.bfloat16, k_major=k_major)
    separate = [m.clone(memory_format=torch.preserve_format) for m in inputs["b"]]
    dense = num.make_case("grouped_matmul", inputs).run()["y"]
    case = num.make_case("grouped_matmul", {**inputs, "b": separate})
    assert torch.equal(case.run()["y"], dense)
    num.assert_close(dense, case.oracle()["y"], plain_matmul(inputs), f"seed {draw.seed}")
    addresses = torch.tensor([m.data_ptr() for m in separate], dtype=torch.int64)
    case.inputs["b"] = addresses
    assert torch.equal(case.run()["y"], dense), f"seed {draw.seed}"


@pytest.mark.parametrize("height", [16, 32, 128])
def test_tiles_hold_every_row_once(num, draw, split, height):
    offsets, rows = num.offsets_of(split), sum(split) + SLACK
    tiles = make_tiles(offsets, rows, height)
    held = tiles.rows[~tiles.empty]
    assert sorted(held.tolist()) == list(range(sum(split)))
    expert = tiles.expert[:, None].expand_as(tiles.rows)[~tiles.empty]
    assert torch.equal(expert, owner(offsets, rows)[held])
    assert torch.equal(counts(offsets), torch.tensor(split, dtype=offsets.dtype))
    assert outside(offsets, rows).sum() == SLACK


@pytest.mark.parametrize("k_major", [False, True], ids=["n_major", "k_major"])
def test_tiled_matmul_is_the_grouped_one(num, draw, split, dtype, k_major):
    """What CUDA runs where grouped_mm does not serve; the same code, here on the CPU."""
    inputs = operands(num, draw, split, dtype, k_major=k_major)
    inputs |= {"alpha": draw.scalars(len(split)), "bias": draw.normal(len(split), N, dtype=dtype)}
    want = num.make_case("grouped_matmul", inputs, {"alpha_exponent": 2}).oracle()["y"]
    got = matmul.grouped_matmul_float32(inputs["a"], inputs["b"], inputs["offsets"], inputs, 2)
    assert (got - want).abs().max() < 1e-4 and torch.equal(got[sum(split) :], torch.zeros(SLACK, N)), (
        f"seed {draw.seed}"
    )


def test_tiled_wgrad_is_the_grouped_one(num, draw, split, dtype):
    a, dy = (draw.normal(sum(split) + SLACK, c, dtype=dtype) for c in (K, N))
    offsets = num.offsets_of(split)
    want = num.make_case("grouped_matmul_wgrad", {"a": a, "dy": dy, "offsets": offsets}).oracle()["dw"]
    got = matmul.tiled_wgrad(a, dy, make_tiles(offsets, a.shape[0], 16))
    assert (got - want).abs().max() < 1e-4, f"seed {draw.seed}"
    assert all((got[g] == 0).all() for g, size in enumerate(split) if size == 0)


def test_not_a_number_stays_with_its_expert(num, draw):
    split = num.SPLITS["random_uneven"]
    a, dy = (draw.normal(sum(split), c) for c in (K, N))
    a[sum(split[:1]) + 2, 3] = torch.nan  # a row of expert 1
    offsets = num.offsets_of(split)
    got = matmul.tiled_wgrad(a, dy, make_tiles(offsets, a.shape[0], 16))
    run = num.make_case("grouped_matmul_wgrad", {"a": a, "dy": dy, "offsets": offsets}).run()["dw"]
    for dw in (got, run):
        assert dw.isnan().flatten(1).any(dim=1).tolist() == [False, True, False, False], f"seed {draw.seed}"


def plain_wgrad(a, dy, split):
    ends = torch.tensor(split).cumsum(0).tolist()
    return torch.stack([a[e - s : e].T @ dy[e - s : e] for s, e in zip(split, ends, strict=True)])


@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_matmul_wgrad(num, draw, split, dtype, accumulate):
    a, dy = (draw.normal(sum(split) + SLACK, c, dtype=dtype) for c in (K, N))
    old = draw.normal(len(split), K, N, dtype=dtype)
    case = num.make_case(
        "grouped_matmul_wgrad", {"a": a, "dy": dy, "offsets": num.offsets_of(split)}, {"accumulate": accumulate},
        output_types={"dw": TYPES[dtype]}, initial={"dw": old} if accumulate else None,
    )  # fmt: skip
    dw = case.run(strided=True)["dw"]
    plain = plain_wgrad(a, dy, split) + (old if accumulate else 0)
    num.assert_close(dw, case.oracle()["dw"], plain, f"{split}, seed {draw.seed}")
    for expert, size in enumerate(split):
        if size == 0:
            assert torch.equal(dw[expert], old[expert] if accumulate else torch.zeros_like(old[expert]))


def test_c01_rows_past_the_last_offset_are_exact_zeros(num, draw):
    inputs = operands(num, draw, num.SPLITS["random_uneven"], torch.bfloat16, slack=256)
    owned = inputs["offsets"][-1]
    inputs["a"][owned:] = torch.nan  # what an allocator may leave there
    y = num.make_case("grouped_matmul", inputs).run()["y"]
    assert torch.equal(y[owned:], torch.zeros(256, N)) and y.isfinite().all()
    tiled = matmul.grouped_matmul_float32(inputs["a"], inputs["b"], inputs["offsets"], inputs, 1)
    assert torch.equal(tiled[owned:], torch.zeros(256, N)) and tiled.isfinite().all()


def test_c05_empty_experts_give_exact_zeros_not_poison(num, draw, split):
    inputs = operands(num, draw, split, torch.bfloat16)
    assert num.make_case("grouped_matmul", inputs).run()["y"].isfinite().all()
    dy = draw.normal(sum(split) + SLACK, N, dtype=torch.bfloat16)
    case = num.make_case("grouped_matmul_wgrad", {"a": inputs["a"], "dy": dy, "offsets": inputs["offsets"]})
    dw = case.run()["dw"]
    assert dw.isfinite().all()
    assert all((dw[g] == 0).all() for g, size in enumerate(split) if size == 0)


@pytest.mark.parametrize("rows", [0, 8])
def test_c07_no_work_still_writes_every_output(num, draw, rows):
    offsets = torch.zeros(4, dtype=torch.int32)
    a, dy = draw.normal(rows, K), draw.normal(rows, N)
    y = num.make_case("grouped_matmul", {"a": a, "b": draw.normal(4, K, N), "offsets": offsets}).run()["y"]
    assert torch.equal(y, torch.zeros(rows, N))
    dw = num.make_case("grouped_matmul_wgrad", {"a": a, "dy": dy, "offsets": offsets}).run()["dw"]
    assert torch.equal(dw, torch.zeros(4, K, N))
    total = num.make_case("group_sum", {"x": dy, "offsets": offsets}).run()["y"]
    assert torch.equal(total, torch.zeros(4, N))
    amax = num.make_case("group_amax", {"x": dy, "offsets": offsets}).run()["y"]
    assert torch.equal(amax, torch.zeros(4))


def test_c18_strides_that_grouped_mm_cannot_take(num, draw):
    a = draw.normal(8, 1025, dtype=torch.bfloat16)
    b = draw.normal(4, 512, 1025, dtype=torch.bfloat16).transpose(1, 2)
    reasons = grouped_mm_obstacles([a], b, torch.bfloat16, (9, 0))
    assert any("stride 1025 of 2 bytes" in r for r in reasons) and not serves_grouped_mm([a], b, torch.bfloat16, (9, 0))
    inputs = {"a": a, "b": b, "offsets": torch.tensor([2, 5, 5, 8], dtype=torch.int32)}
    case = num.make_case("grouped_matmul", inputs, output_types={"y": DataType.BFLOAT16})
    num.assert_close(case.run()["y"], case.oracle()["y"], plain_matmul(inputs), f"seed {draw.seed}")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a, b: ([a], b, torch.float32, (9, 0)), "-> torch.float32"),
        (lambda a, b: ([a.half()], b.half(), torch.float16, (9, 0)), "bfloat16 throughout"),
        (lambda a, b: ([a], b, torch.bfloat16, (8, 0)), "device (8, 0)"),
        (lambda a, b: ([a], b, torch.bfloat16, None), "device cpu"),
        (lambda a, b: ([a[:0]], b, torch.bfloat16, (9, 0)), "an empty operand"),
        (lambda a, b: ([a.t().contiguous().t()], b, torch.bfloat16, (9, 0)), "row by row"),
        (lambda a, b: ([a[:1].expand(64, -1)], b, torch.bfloat16, (9, 0)), "no overlap"),
        (lambda a, b: ([a[:, :1].expand(-1, 32)], b, torch.bfloat16, (9, 0)), "one unit stride"),
        (lambda a, b: ([a], b.expand(4, -1, -1)[:, :, ::2], torch.bfloat16, (9, 0)), "either major"),
        (lambda a, b: ([a.flatten()[1:-31].view(-1, 32)], b, torch.bfloat16, (9, 0)), "address"),
        (lambda a, b: ([a], b.expand(1024, -1, -1), torch.bfloat16, (9, 0)), "1024 experts"),
    ],
)
def test_each_obstacle_to_grouped_mm_is_named(draw, change, reason):
    a, b = draw.normal(64, 32, dtype=torch.bfloat16), draw.normal(1, 32, 48, dtype=torch.bfloat16)
    for capability in ((9, 0), (10, 0), (10, 3)):
        assert serves_grouped_mm([a], b, torch.bfloat16, capability)
        assert serves_grouped_mm([a], b.transpose(1, 2).contiguous().transpose(1, 2), torch.bfloat16, capability)
        assert serves_grouped_mm([a, a], None, torch.bfloat16, capability)
    found = grouped_mm_obstacles(*change(a, b))
    assert any(reason in text for text in found), found


@pytest.mark.parametrize("k_major", [False, True], ids=["n_major", "k_major"])
def test_c22_a_square_weight_is_read_by_its_strides(num, draw, k_major):
    split, size = num.SPLITS["random_uneven"], 32
    b = weights(draw, torch.float32, k_major=k_major, k=size, n=size)
    inputs = {"a": draw.normal(sum(split), size), "b": b, "offsets": num.offsets_of(split)}
    case = num.make_case("grouped_matmul", inputs)
    y = case.run()["y"]
    num.assert_close(y, case.oracle()["y"], plain_matmul(inputs), f"seed {draw.seed}")
    swapped = plain_matmul({**inputs, "b": b.transpose(1, 2)})
    assert (y - swapped).abs().max() > 1, "the transposed weight would have given the same"


@pytest.mark.parametrize("loss", ["sum", "mean"])
def test_c116_expanded_gradients_are_taken(num, draw, loss):
    """The gradient of a sum or mean has stride 0, which torch's grouped_mm refuses."""
    split = num.SPLITS["random_uneven"]
    rows = sum(split)
    value = 1.0 if loss == "sum" else 1.0 / (rows * N)
    dy = torch.tensor(value).expand(rows, N)
    a, b, offsets = draw.normal(rows, K), weights(draw, torch.float32, k_major=True, n=K, k=N), num.offsets_of(split)
    dgrad = num.make_case("grouped_matmul", {"a": dy, "b": b, "offsets": offsets})
    num.assert_close(dgrad.run()["y"], dgrad.oracle()["y"], plain_matmul(dgrad.inputs), f"seed {draw.seed}")
    wgrad = num.make_case("grouped_matmul_wgrad", {"a": a, "dy": dy, "offsets": offsets})
    num.assert_close(wgrad.run()["dw"], wgrad.oracle()["dw"], plain_wgrad(a, dy, split), f"seed {draw.seed}")
    expanded = torch.tensor(value, dtype=torch.bfloat16).expand(rows, N)
    assert not serves_grouped_mm([a.bfloat16(), expanded], None, torch.bfloat16, (9, 0))


@pytest.mark.parametrize(("ends", "rows"), [((3, 2), 4), ((2, 5), 4), ((-1, 4), 4)])
def test_offsets_that_make_no_sense_are_named(num, draw, ends, rows):
    inputs = {"a": draw.normal(rows, K), "b": draw.normal(2, K, N), "offsets": torch.tensor(ends, dtype=torch.int32)}
    with pytest.raises(VariantPackError, match="OFFSETS"):
        num.make_case("grouped_matmul", inputs).run()


def test_reduced_float32_precision_does_not_creep_in(num, draw):
    split = num.SPLITS["regular"]
    inputs = operands(num, draw, split, torch.float32)
    case = num.make_case("grouped_matmul", inputs)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        loose = {p: getattr(torch.backends, p).matmul.fp32_precision for p in ("cuda", "mkldnn")}
        with exact_float32():
            assert {getattr(torch.backends, p).matmul.fp32_precision for p in loose} == {"ieee"}
        assert {p: getattr(torch.backends, p).matmul.fp32_precision for p in loose} == loose, "settings come back"
        assert (case.run()["y"] - case.oracle()["y"]).abs().max() < 1e-5, f"seed {draw.seed}"
    finally:
        torch.set_float32_matmul_precision(before)


def test_64_bit_offsets(num, draw):
    split = num.SPLITS["random_uneven"]
    inputs = operands(num, draw, split, torch.float32)
    narrow = num.make_case("grouped_matmul", inputs).run()["y"]
    wide = num.make_case("grouped_matmul", {**inputs, "offsets": inputs["offsets"].long()}).run()["y"]
    assert torch.equal(narrow, wide)
    tiled = matmul.grouped_matmul_float32(inputs["a"], inputs["b"], inputs["offsets"].long(), inputs, 1)
    assert (tiled - wide).abs().max() < 1e-5


def test_only_addresses_keep_a_matmul_out_of_capture(num, draw):
    inputs = operands(num, draw, num.SPLITS["regular"], torch.bfloat16)
    dense = num.make_case("grouped_matmul", inputs)
    discrete = num.make_case("grouped_matmul", {**inputs, "b": list(inputs["b"])})
    for case, arch, expected in ((dense, "sm90", False), (discrete, "sm90", True), (discrete, "cpu", False)):
        reason = not_capturable(case.op, case.attributes, case.specs, ARCHES[arch])
        assert ("read on the host" in reason) == expected == bool(reason)
