"""Cases seen elsewhere that reach grouped_mlp: unaligned MXFP8 groups, and weights exported to inference."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import GluLayout, OpfuseError
from opfuse.graph_ops.torch import GroupedMLP, grouped_mlp
from opfuse.graph_ops.torch.routing import combine, dispatch, route, row_probs

H, I, BLOCK = 64, 64, 32
SPLIT = [44, 20, 0, 32]  # 44 rows: the second block of a column's scales would span two experts


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.randn(4, 2 * I, H) / H**0.5).bfloat16(), (torch.randn(4, H, I) / I**0.5).bfloat16()


def compiled(function):
    return torch.compile(function, backend="aot_eager", dynamic=True)


@pytest.mark.parametrize(("multiple_of", "code"), [(1, "GROUP_ALIGN"), (4, "GROUP_ALIGN"), (BLOCK, "MULTIPLE_OF")])
@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_c16_unaligned_mxfp8_groups_are_refused_by_name(multiple_of, code, wrap, seed):
    w1, w2 = weights()

    def mlp(x, counts):
        return grouped_mlp(x, counts, w1, w2, recipe="mxfp8", multiple_of=multiple_of)

    x = torch.randn(sum(SPLIT), H).bfloat16()
    with pytest.raises((OpfuseError, torch._dynamo.exc.TorchRuntimeError)) as raised:
        wrap(mlp)(x, torch.tensor(SPLIT))
    assert code in str(raised.value), f"{raised.value}, seed {seed}"


def test_c16_routing_pads_44_rows_to_whole_blocks_under_torch_compile(seed, assert_close):
    """Each expert's gradients are those that it has alone: no block of scales spans two. 44 tokens choose the first."""
    w1, w2 = (w.requires_grad_() for w in weights())
    expert = torch.repeat_interleave(torch.arange(4), torch.tensor(SPLIT))[torch.randperm(sum(SPLIT))][:, None]
    weight = torch.tensor([-1.5, 0.5, 2.0])[torch.randint(3, expert.shape)]
    tokens, upstream = torch.randn(2, sum(SPLIT), H).bfloat16()
    assert route(expert, 4, multiple_of=BLOCK).tokens_per_expert.tolist() == [64, 32, 0, 32]

    def layer(x, expert, weight, recipe):
        routing = route(expert, 4, multiple_of=BLOCK)
        y = grouped_mlp(dispatch(x, routing), routing.tokens_per_expert, w1, w2, row_probs(weight, routing),
                        recipe=recipe, multiple_of=BLOCK, allow_tail=True)  # fmt: skip
        return combine(y, routing)

    def results(function, recipe, chosen=slice(None)):
        x = tokens[chosen].clone().requires_grad_()
        y = function(x, expert[chosen], weight[chosen], recipe)
        found = torch.autograd.grad(y, (x, w1, w2), upstream[chosen])
        return dict(zip(("y", "dx", "dw1", "dw2"), (y.detach(), *found)))

    fast = results(compiled(layer), "mxfp8")
    for name, wanted in results(layer, None).items():
        error = (fast[name].double() - wanted.double()).norm() / wanted.double().norm()
        assert error < 0.12, f"{name}: {error:.3f} of what it is unquantized, seed {seed}"
    for index in (0, 1, 3):
        chosen = (expert == index).squeeze(1)
        alone = results(layer, "mxfp8", chosen)
        for name in ("y", "dx"):
            assert_close(name, fast[name][chosen], alone[name], 1e-4)
        for name in ("dw1", "dw2"):
            assert_close(f"{name} of expert {index}", fast[name][index], alone[name][index], 1e-4)


@pytest.mark.parametrize(
    "kernel", [GluLayout.concatenated(), GluLayout.interleaved(32), GluLayout.interleaved(1)], ids=str
)
def test_c39_exported_weights_are_gate_then_up_whatever_the_kernels_layout(kernel, seed, tmp_path):
    """An engine that knows only [gate; up] computes the same from the file, and what it gives back loads unchanged."""
    trained = GroupedMLP(2, 16, I, glu_layout=kernel)
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(w.is_contiguous() for w in state.values())
    x, counts, outputs = torch.randn(6, 16), [2, 4], []
    for expert, rows in enumerate(x.split(counts)):
        gate, up = (rows.double() @ w.double().T for w in state["w1"][expert].chunk(2))
        outputs.append((gate * gate.sigmoid() * up) @ state["w2"][expert].double().T)
    torch.testing.assert_close(trained(x, torch.tensor(counts))[0].double(), torch.cat(outputs), rtol=1e-5, atol=1e-6)
    again = GroupedMLP(2, 16, I, glu_layout=kernel)
    again.load_state_dict(dict(state))
    assert torch.equal(again.w1, trained.w1) and torch.equal(again.w2, trained.w2), f"seed {seed}"
