"""The 128x4 scale atom byte by byte, its views, packing per expert, and what quantize gives back to a matmul."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from opfuse.graph_ops import DataType, Graph, GraphError, ScaleLayout, scales
from opfuse.kernels import reference

SHAPES = [(128, 4), (130, 5), (256, 8), (1, 1), (31, 3), (33, 4), (127, 13), (129, 1), (300, 9)]


def random_bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_the_swizzle_is_the_four_line_loop(rows, columns, atom_loop, seed):
    matrix = random_bytes(seed, rows, columns)
    memory = scales.swizzle(matrix)
    assert torch.equal(memory.flatten(), atom_loop(matrix)), f"seed {seed}"
    assert memory.shape == scales.scale_shape(rows, columns * 32, 32)
    assert torch.equal(scales.unswizzle(memory, rows, columns), matrix), f"seed {seed}"
    assert torch.equal(reference.swizzle_scales(matrix), memory), f"seed {seed}"


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn])
def test_scale_types_go_through_unchanged(dtype, seed):
    matrix = random_bytes(seed, 40, 6).view(dtype)
    memory = scales.swizzle(matrix)
    assert memory.dtype is dtype
    assert torch.equal(scales.unswizzle(memory, 40, 6).view(torch.uint8), matrix.view(torch.uint8)), f"seed {seed}"


@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("experts", [None, 3])
def test_the_six_dimensional_view_indexes_as_the_documents_say(rows, columns, experts, seed):
    """view[m%32, m//32%4, m//128, k%4, k//4, l] is scale (m, k) of expert l, and no byte moves."""
    matrices = random_bytes(seed, experts or 1, rows, columns)
    memory = torch.stack([scales.swizzle(m) for m in matrices])
    view = scales.to_atom_view(memory if experts else memory[0])
    assert view.data_ptr() == memory.data_ptr()
    for m, k in [(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 2), (min(40, rows - 1), 0)]:
        for expert in range(experts or 1):
            seen = view[m % 32, m // 32 % 4, m // 128, k % 4, k // 4, expert]
            assert seen == matrices[expert, m, k], f"({m}, {k}) seed {seed}"
    for given in (view, view.permute(5, 2, 4, 0, 1, 3), memory.flatten()):
        back = scales.from_atom_view(given, rows, columns, experts)
        assert back.data_ptr() == memory.data_ptr() and torch.equal(back, memory if experts else memory[0])


@pytest.mark.parametrize("given", [torch.zeros(32, 4, 1, 4, 1, 1), torch.zeros(128, 8)[:, :4], torch.zeros(100)])
def test_a_buffer_that_is_not_whole_atoms_is_refused_by_name(given):
    with pytest.raises(GraphError, match=r"SCALE_VIEW.*\(200, 4\).*32, 4, 2, 4, 1, 1"):
        scales.from_atom_view(given.to(torch.uint8), 200, 4)


@pytest.mark.parametrize("counts", [(256, 512, 256), (0, 256, 0), (1024,), (256, 0, 512, 256), (0, 0)])
@pytest.mark.parametrize("spare", [0, 256])
def test_columns_packed_by_expert_are_each_experts_own_swizzle(counts, spare, seed):
    """discrete_col_sfd: the atoms of expert g are those of its own (N, M_g/32) scales, one expert after another."""
    columns, rows = 200, sum(counts) + spare
    matrix = random_bytes(seed, columns, rows // 32)
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    memory = scales.swizzle(matrix)
    packed = scales.pack_columns_by_expert(memory, ends, 32)
    bounds = [0, *ends.tolist(), rows]
    own = [scales.swizzle(matrix[:, s // 32 : e // 32]).flatten() for s, e in pairwise(bounds)]
    assert torch.equal(packed.flatten(), torch.cat(own)), f"seed {seed}"
    assert torch.equal(scales.unpack_columns_by_expert(packed, ends, 32), memory), f"seed {seed}"


def test_fp4_packs_two_a_byte_even_column_low():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert scales.pack_fp4(codes).tolist() == [[0x21, 0x0F]]
    every = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert torch.equal(scales.pack_fp4(scales.unpack_fp4(every)), every)


FORMATS = [
    (DataType.FP8_E4M3, DataType.FP8_E8M0, 32),
    (DataType.FP8_E5M2, DataType.FP8_E8M0, 32),
    (DataType.FP4_E2M1, DataType.FP8_E4M3, 16),
    (DataType.FP4_E2M1, DataType.FP8_E8M0, 32),
]


@pytest.mark.parametrize("codes, scale, block", FORMATS)
@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("m, k", [(1, 2), (7, 34), (130, 96), (257, 130)])
def test_what_quantize_gives_a_matmul_takes(codes, scale, block, swizzled, m, k, seed):
    """quantize -> dequantize -> grouped_matmul in one graph, for odd rows and columns that end inside a block."""
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(m, k, generator=generator), torch.randn(2, k, 5, generator=generator)
    offs = torch.tensor([m // 3, m], dtype=torch.int32)
    g = Graph(device="cpu", io_data_type=DataType.FLOAT)
    rows = g.symbol("M")
    xt, wt = g.tensor("x", dim=(rows, k)), g.tensor("w", dim=(2, k, 5))
    ot = g.tensor("offs", dim=(2,), data_type=DataType.INT32)
    q, sf = g.block_scale_quantize(xt, block_size=block, axis=1, data_type=codes, scale_type=scale, swizzled=swizzled)
    value = g.block_scale_dequantize(q, sf)
    for name, tensor in (("q", q), ("sf", sf), ("value", value), ("y", g.grouped_matmul(value, wt, ot))):
        tensor.set_output(True).set_name(name).set_data_type(
            DataType.FLOAT if name in ("value", "y") else tensor.data_type
        )
    out = g({"x": x, "w": w, "offs": offs})
    layout = ScaleLayout(block, 1, swizzled)
    assert out["sf"].shape == layout.storage((m, k)) and out["q"].shape == (
        m,
        k // (2 if codes is DataType.FP4_E2M1 else 1),
    )
    step = {DataType.FP8_E4M3: 2**-3, DataType.FP8_E5M2: 2**-2, DataType.FP4_E2M1: 2**-1}[codes]
    blocks = (
        torch.nn.functional.pad(x, (0, -k % block)).view(m, -1, block).abs().amax(2).repeat_interleave(block, 1)[:, :k]
    )
    assert ((out["value"] - x).abs() <= step * blocks + 1e-30).all(), f"seed {seed}"
    value = out["value"].double()
    expected = torch.cat([value[: m // 3] @ w[0].double(), value[m // 3 :] @ w[1].double()])
    error = (out["y"] - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error < 1e-5, f"seed {seed}: {error}"


@pytest.mark.parametrize("codes, scale, block", FORMATS)
def test_all_zero_blocks_have_finite_scales_and_come_back_as_zeros(codes, scale, block):
    """The padding of the atom is zero bytes too."""
    x = torch.zeros(130, 64)
    x[129, 40] = 1e-30
    g = Graph(device="cpu", io_data_type=DataType.FLOAT)
    xt = g.tensor("x", dim=(130, 64))
    q, sf = g.block_scale_quantize(xt, block_size=block, axis=1, data_type=codes, scale_type=scale)
    y = g.block_scale_dequantize(q, sf)
    for name, t in (("q", q), ("sf", sf), ("y", y)):
        t.set_output(True).set_name(name)
    y.set_data_type(DataType.FLOAT)
    out = g({"x": x})
    decoded = reference.decode_scale(out["sf"].view(torch.uint8), scale)
    assert decoded.isfinite().all()
    assert (out["y"][:129] == 0).all() and out["y"].isfinite().all()
    assert (out["q"][:129].view(torch.uint8) == 0).all()
    padding = scales.unswizzle(out["sf"], 256, out["sf"].shape[1]).view(torch.uint8)[130:]
    assert (padding == 0).all()
