"""GLU layouts of weights: conversions, tags, and state_dicts that stay in the checkpoint's layout."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import GluLayout, OpfuseError
from opfuse.graph_ops.torch import GroupedMLP, convert_glu_layout, grouped_mlp

CONCATENATED, BY_32, BY_1 = GluLayout.concatenated(), GluLayout.interleaved(32), GluLayout.interleaved(1)


def module(weights: GluLayout, checkpoint: GluLayout = CONCATENATED) -> GroupedMLP:
    return GroupedMLP(2, 16, 64, glu_layout=weights, checkpoint_layout=checkpoint)


def outputs(experts: GroupedMLP) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return experts(torch.randn(6, 16, generator=generator), torch.tensor([2, 4]))[0].detach()


@pytest.mark.parametrize("source", [CONCATENATED, BY_32, BY_1], ids=str)
@pytest.mark.parametrize("to", [CONCATENATED, BY_32, BY_1], ids=str)
def test_conversion_moves_gate_and_up_where_the_layout_says(source, to):
    def columns(layout):  # (2I,): gate i is i, up i is 1000 + i
        width = layout.width or 64
        order = []
        for start in range(0, 64, width):
            order += [*range(start, start + width), *range(1000 + start, 1000 + start + width)]
        return torch.tensor(order, dtype=torch.float32)

    weight = columns(source)[None, :, None].expand(2, 128, 3)
    converted = convert_glu_layout(weight, source, to)
    assert torch.equal(converted, columns(to)[None, :, None].expand(2, 128, 3))
    assert converted.is_contiguous()
    assert torch.equal(convert_glu_layout(weight.transpose(1, 2), source, to, dim=2), converted.transpose(1, 2))


def test_conversion_is_differentiable():
    weight = torch.randn(2, 128, 3, requires_grad=True)
    upstream = torch.randn(2, 128, 3)
    convert_glu_layout(weight, CONCATENATED, BY_32).backward(upstream)
    assert torch.equal(weight.grad, convert_glu_layout(upstream, BY_32, CONCATENATED))


def test_c29_interleaving_twice_is_refused_and_the_way_back_is_exact():
    weight = torch.randn(2, 128, 16)
    once = convert_glu_layout(weight, CONCATENATED, BY_32)
    with pytest.raises(OpfuseError) as raised:
        convert_glu_layout(once, CONCATENATED, BY_32)
    assert raised.value.code == "GLU_LAYOUT"
    assert not torch.equal(once, weight)
    assert torch.equal(convert_glu_layout(once, BY_32, CONCATENATED), weight)


def test_a_weight_converted_to_another_layout_is_refused_by_the_mlp():
    once = convert_glu_layout(torch.randn(2, 128, 16), CONCATENATED, BY_32)
    x, counts, w2 = torch.randn(6, 16), torch.tensor([2, 4]), torch.randn(2, 16, 64)
    grouped_mlp(x, counts, once, w2, glu_layout=BY_32)
    with pytest.raises(OpfuseError) as raised:
        grouped_mlp(x, counts, once, w2, glu_layout=CONCATENATED)
    assert raised.value.code == "GLU_LAYOUT"
    assert "convert_glu_layout" in str(raised.value)


@pytest.mark.parametrize(("shape", "dim"), [((2, 96, 16), 1), ((2, 0, 16), 1), ((2, 64, 16), 3), ((2, 64, 16), -4)])
def test_columns_that_the_layout_does_not_divide_are_refused(shape, dim):
    with pytest.raises(OpfuseError) as raised:
        convert_glu_layout(torch.randn(shape), CONCATENATED, BY_32, dim=dim)
    assert raised.value.code == "GLU_COLUMNS"


@pytest.mark.parametrize("weights", [CONCATENATED, BY_32, BY_1], ids=str)
def test_c28_a_contiguous_checkpoint_computes_the_same_in_every_layout(weights):
    plain = module(CONCATENATED)
    experts = module(weights)
    experts.load_state_dict(plain.state_dict())
    torch.testing.assert_close(outputs(experts), outputs(plain))
    if weights != CONCATENATED:
        assert not torch.equal(experts.w1, plain.w1)


@pytest.mark.parametrize("checkpoint", [CONCATENATED, BY_32], ids=str)
def test_c28_the_state_dict_has_the_checkpoints_layout_whatever_the_kernel_wants(checkpoint):
    experts = module(BY_1, checkpoint)
    state = experts.state_dict()
    assert list(state) == ["w1", "w2"]
    assert torch.equal(state["w1"], convert_glu_layout(experts.w1.detach(), BY_1, checkpoint))
    again = module(BY_32, checkpoint)
    again.load_state_dict(state)
    torch.testing.assert_close(outputs(again), outputs(experts))
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, state[name])


def test_a_checkpoint_that_says_another_layout_is_converted_from_it():
    saved = module(BY_32, BY_32)
    state = saved.state_dict()
    experts = module(CONCATENATED, CONCATENATED)
    experts.load_state_dict(state)  # its metadata says interleaved(32)
    torch.testing.assert_close(outputs(experts), outputs(saved))


@pytest.mark.parametrize("layout", [CONCATENATED, BY_32, BY_1], ids=str)
def test_c28_a_converted_weight_in_a_plain_dict_is_loaded_as_what_it_is(layout):
    """Of a dict without metadata the tag speaks, also where the module's two layouts are one and nothing need move."""
    saved = module(CONCATENATED)
    state = {"w1": convert_glu_layout(saved.w1.detach(), CONCATENATED, BY_32), "w2": saved.w2.detach()}
    experts = module(layout, layout)
    experts.load_state_dict(state)
    torch.testing.assert_close(outputs(experts), outputs(saved))


def test_a_weight_of_another_layout_than_its_state_dict_says_is_refused():
    state = module(CONCATENATED).state_dict()
    state["w1"] = convert_glu_layout(state["w1"], CONCATENATED, BY_32)
    with pytest.raises(OpfuseError) as raised:
        module(CONCATENATED).load_state_dict(state)
    assert raised.value.code == "GLU_LAYOUT"


def test_loading_leaves_the_callers_state_dict_alone():
    state = module(CONCATENATED).state_dict()
    before = state["w1"].clone()
    module(BY_32).load_state_dict(state)
    assert torch.equal(state["w1"], before)


def test_a_checkpoint_of_another_shape_is_named_by_torch():
    state = GroupedMLP(2, 16, 32).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for w1"):
        module(BY_32).load_state_dict(state)


def test_the_layout_survives_a_move():
    experts = module(BY_32)
    before = outputs(experts)
    torch.testing.assert_close(outputs(experts.to("cpu", torch.float64).float()), before)


def test_c22_equal_extents_do_not_hide_the_major():
    """2I == H: a transposed w1 has a fitting shape, so only its strides may differ, never its meaning."""
    w = torch.randn(2, 32, 32)
    w2, x, counts = torch.randn(2, 32, 16), torch.randn(5, 32), torch.tensor([2, 3])
    wanted = grouped_mlp(x, counts, w, w2)
    stored = w.transpose(1, 2).contiguous()
    got = grouped_mlp(x, counts, stored.transpose(1, 2), w2)
    assert (got - wanted).norm() < 1e-5 * wanted.norm()
    assert (grouped_mlp(x, counts, stored, w2) - wanted).norm() > 0.1 * wanted.norm()
