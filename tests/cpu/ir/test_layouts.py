"""GLU and scale layouts are values: they print, parse and size themselves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opfuse.graph_ops import GluLayout, GraphError, ScaleLayout
from opfuse.graph_ops.ir.dims import evaluate, symbol
from opfuse.graph_ops.ir.dtypes import DATA_TYPES, DataType
from opfuse.graph_ops.ir.tensor import TensorSpec, contiguous_stride


@pytest.mark.parametrize("layout", [GluLayout.concatenated(), *map(GluLayout.interleaved, (1, 8, 32))], ids=str)
def test_a_glu_layout_reads_back(layout):
    assert GluLayout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "text", ["", "interleaved", "interleaved()", "interleaved(-1)", "interleaved(0)", "interleaved(3", "32"]
)
def test_other_text_is_no_glu_layout(text):
    with pytest.raises(GraphError) as caught:
        GluLayout.parse(text)
    assert caught.value.code == "GLU_LAYOUT"


def test_the_three_layouts_differ():
    layouts = [GluLayout.concatenated(), GluLayout.interleaved(1), GluLayout.interleaved(32)]
    assert all(a != b and str(a) != str(b) for a, b in itertools.combinations(layouts, 2))


@pytest.mark.parametrize("wrong", [dict(axis=2), dict(axis=-1), dict(block_size=0)])
def test_a_scale_layout_must_make_sense(wrong):
    with pytest.raises(GraphError) as caught:
        ScaleLayout(**{"block_size": 32, "axis": 1, **wrong})
    assert caught.value.code == "SCALE_LAYOUT"


def ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


@given(st.integers(1, 600), st.integers(1, 600), st.sampled_from([16, 32]), st.sampled_from([0, 1]))
def test_swizzled_scales_fill_whole_atoms(rows, columns, block, axis):
    layout = ScaleLayout(block, axis)
    stored_rows, stored_columns = layout.storage((rows, columns))
    outer, inner = (rows, columns) if axis == 1 else (columns, rows)
    assert (stored_rows, stored_columns) == (ceil(outer, 128) * 128, ceil(ceil(inner, block), 4) * 4)


@given(st.integers(1, 600), st.integers(1, 600), st.sampled_from([16, 32]), st.sampled_from([0, 1]))
def test_plain_scales_keep_the_orientation_of_the_codes(rows, columns, block, axis):
    stored = ScaleLayout(block, axis, swizzled=False).storage((rows, columns))
    assert stored == ((rows, -(-columns // block)) if axis == 1 else (-(-rows // block), columns))


@given(st.integers(0, 300))
def test_symbolic_storage_is_the_storage_of_every_token_count(tokens):
    m = symbol("M")
    for layout in (ScaleLayout(32, axis, swizzled) for axis in (0, 1) for swizzled in (False, True)):
        symbolic = tuple(evaluate(d, {"M": tokens}) for d in layout.storage((m, 192)))
        assert symbolic == layout.storage((tokens, 192))


def test_strides_are_row_major_and_may_hold_symbols():
    m = symbol("M")
    assert contiguous_stride((2, 3, 4)) == (12, 4, 1)
    assert contiguous_stride((3, m, 5)) == (5 * m, 5, 1)
    assert contiguous_stride(()) == ()


def test_bytes_count_packed_elements():
    spec = TensorSpec(1, "q", (3, 6), (6, 1), DataType.FP4_E2M1)
    assert spec.nbytes({}) == 9 and spec.elements({}) == 18
    m = symbol("M")
    wide = TensorSpec(2, "x", (m, 6), (6, 1), DataType.BFLOAT16)
    assert wide.nbytes({"M": 5}) == 60 and wide.shape({"M": 5}) == (5, 6)


def test_every_data_type_states_its_storage():
    import torch

    for data_type, info in DATA_TYPES.items():
        stored = getattr(torch, info.torch_name)
        assert info.bits * info.packed == 8 * torch.empty((), dtype=stored).element_size(), data_type
        if stored.is_floating_point and info.largest is not None:
            assert torch.finfo(stored).max == info.largest, data_type
