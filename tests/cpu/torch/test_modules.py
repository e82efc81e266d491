"""GroupedMLP where PyTorch users put it: copies, files, checkpointing, accumulation, meta device, shards, export."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
from opfuse.graph_ops import GluLayout
from opfuse.graph_ops.torch import GroupedMLP
from opfuse.graph_ops.torch.graphs import GRAPHS
from torch.utils.checkpoint import checkpoint

CONCATENATED, BY_32, BY_1 = GluLayout.concatenated(), GluLayout.interleaved(32), GluLayout.interleaved(1)
L, H, I, COUNTS = 3, 32, 64, [32, 0, 64]


def made(**options) -> GroupedMLP:
    return GroupedMLP(L, H, I, **{"multiple_of": 32, "glu_layout": BY_32, **options})


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = sum(COUNTS)
    return torch.randn(rows, H, requires_grad=True), torch.tensor(COUNTS), torch.rand(rows, requires_grad=True)


def gradients(experts, x, counts, probs, call=lambda experts, *given: experts(*given)[0]):
    """y, and the gradients of the inputs and the weights, from a dy that depends on the rows' places only."""
    leaves = (x, probs, *experts.parameters())
    for leaf in leaves:
        leaf.grad = None
    y = call(experts, x, counts, probs)
    y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape))
    return [y.detach(), *(leaf.grad.clone() for leaf in leaves)]


def through_file(experts):
    file = io.BytesIO()
    torch.save(experts, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": through_file}


@pytest.mark.parametrize("make_copy", COPIES)
def test_a_copy_computes_and_saves_the_same(make_copy, seed):
    experts = made()
    other, given = COPIES[make_copy](experts), inputs()
    for one, two in zip(gradients(other, *given), gradients(experts, *given)):
        assert torch.equal(one, two), f"seed {seed}"
    for name, weight in other.state_dict().items():
        assert torch.equal(weight, experts.state_dict()[name])
    assert other.w1 is not experts.w1


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("save", ["activation", "preactivation", "inputs"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(recipe, save, reentrant, seed):
    experts, given = made(recipe=recipe, save=save), inputs()

    def again(experts, *given):
        return checkpoint(lambda *args: experts(*args)[0], *given, use_reentrant=reentrant)

    for one, two in zip(gradients(experts, *given, call=again), gradients(experts, *given)):
        assert torch.equal(one, two), f"seed {seed}"


def test_gradients_of_two_steps_add_up(seed):
    experts, (x, counts, probs) = made(), inputs()
    wanted = gradients(experts, x, counts, probs)
    for _ in range(2):
        experts(x, counts, probs)[0].backward(torch.linspace(-1, 2, x.numel()).view(x.shape))
    for leaf, once in zip((x, probs, *experts.parameters()), wanted[1:]):
        torch.testing.assert_close(leaf.grad, 3 * once, msg=f"seed {seed}")


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("layout", [CONCATENATED, BY_32, BY_1], ids=str)
def test_a_module_made_on_meta_loads_a_checkpoint(assign, layout, seed):
    saved, given = made(glu_layout=CONCATENATED), inputs()
    experts = made(glu_layout=layout, device="meta")
    assert experts(given[0].to("meta"), given[1].to("meta"))[0].shape == given[0].shape
    if not assign:
        experts.to_empty(device="cpu")
    experts.load_state_dict(saved.state_dict(), assign=assign)
    torch.testing.assert_close(experts(*given)[0], saved(*given)[0])
    for name, weight in experts.state_dict().items():
        assert torch.equal(weight, saved.state_dict()[name]), f"{name}, seed {seed}"
    assert all(p.requires_grad for p in experts.parameters())


def test_what_inference_made_and_weights_changed_before_the_backward_are_torchs_own_errors(seed):
    experts, (x, counts, probs) = made(), inputs()
    with torch.inference_mode():
        y, _ = experts(x, counts, probs)
    torch.testing.assert_close(y.clone(), experts(x, counts, probs)[0].detach())
    learned, _ = experts(x, counts, probs)
    with torch.no_grad():
        experts.w2.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        learned.sum().backward()


def test_an_exported_module_serves_other_row_counts(seed):
    experts, (x, counts, probs) = made(multiple_of=1), inputs()
    rows = torch.export.Dim("rows", min=2)
    given = (x.detach(), counts, probs.detach())
    exported = torch.export.export(experts, given, dynamic_shapes=({0: rows}, None, {0: rows})).module()
    for sizes in (COUNTS, [1, 2, 4]):
        given = torch.randn(sum(sizes), H), torch.tensor(sizes), torch.rand(sum(sizes))
        torch.testing.assert_close(exported(*given)[0], experts(*given)[0].detach(), msg=f"seed {seed}")


def test_c109_what_stays_unfused_is_logged_once_for_each_graph(seed, caplog):
    GRAPHS.clear()
    experts, given = made(), inputs()
    with caplog.at_level(logging.INFO, logger="opfuse"):
        for _ in range(2):
            gradients(experts, *given)
    told = [r.getMessage() for r in caplog.records if r.name == "opfuse.rules"]
    assert len(told) == len(set(told)) and {text.split(":")[0] for text in told} == {
        "grouped_mlp_forward", "grouped_mlp_fc2", "grouped_mlp_backward", "grouped_mlp_fc1_backward"
    }  # fmt: skip
    assert any("grouped_gemm_dglu: ARCH: observed cpu, required sm90" in text for text in told)


@pytest.fixture
def one_rank(tmp_path):
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("axis", [0, 1])
def test_sharded_experts_train_and_keep_the_checkpoints_layout(axis, one_rank, tmp_path, seed):
    """FSDP2 and torch.distributed.checkpoint: what is saved from one layout is read into another. Axis 1 is what
    torchtitan shards where there are fewer experts than ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    def shard(module):
        return fully_shard(module, mesh=one_rank, shard_placement_fn=lambda parameter: Shard(axis))

    plain, given = made(), inputs()
    wanted, saved = gradients(plain, *given), plain.state_dict()
    sharded = shard(copy.deepcopy(plain))
    for one, two in zip(gradients(sharded, *given), wanted):
        assert torch.equal(getattr(one, "full_tensor", lambda one=one: one)(), two), f"seed {seed}"
    state = get_model_state_dict(sharded)
    for name, weight in state.items():
        assert torch.equal(weight.full_tensor(), saved[name]), name
        assert weight.placements == (Shard(axis),), "shards of another kind are not what a checkpoint takes them for"
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint")
    other = shard(made(glu_layout=BY_1))
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    set_model_state_dict(other, state)
    torch.testing.assert_close(other(*given)[0], wanted[0])
    for name, weight in get_model_state_dict(other).items():
        assert torch.equal(weight.full_tensor(), saved[name]), name
