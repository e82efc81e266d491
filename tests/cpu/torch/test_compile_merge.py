"""Gate and up of two weights, and what the backward is given: what torch.compile's backend copies and keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain_moe import BF16, Experts, Fused, H, I, L, Separate, SeparateSigmoid, Torchtitan, compiled, mm, raisings, step  # type: ignore[import-not-found]
from torch.utils.checkpoint import checkpoint


def products(rewriter, part):
    return [n.op for r in rewriter.regions if r.part == part and r.raisings for n in r.graph.nodes
            if n.op in ("grouped_matmul", "join_glu", "split_glu")]  # fmt: skip


class Columns(Experts):
    """Weights that are stored inputs first, which are not merged: gate and up stay two products."""

    def forward(self, x, counts):
        offsets = self.offsets(counts)
        w1, w3 = (w.transpose(1, 2).contiguous() for w in (self.w1, self.w3))
        grouped_mm = getattr(F, "grouped_mm", torch._grouped_mm)
        gate, up = grouped_mm(x, w1, offs=offsets), grouped_mm(x, w3, offs=offsets)
        return mm(F.silu(gate) * up, self.w2, offsets)


class OtherRows(Experts):
    """Gate and up of different rows cannot be one product."""

    def forward(self, x, counts):
        offsets = self.offsets(counts)
        gate, up = mm(x, self.w1, offsets), mm(x + 1, self.w3, offsets)
        return mm(F.silu(gate) * up, self.w2, offsets)


@pytest.mark.parametrize("counts, ways", [
    ([8, 0, 12], ("activations", False)), ([40, 10, 30], ("activations", False)), ([92, 0, 8], ("weights", False)),
    ([300, 0, 52], ("weights", True)),
])  # fmt: skip
def test_gate_and_up_of_two_weights_come_together_where_that_copies_less(counts, ways, seed, assert_close):
    """Where no kernel takes both weights. L H = 96 rows are as large as the weights, L I = 192 rows of dx; kernels find
    h and dh each in one tensor."""
    model = Separate()
    fast, rewriter, _ = compiled(model, replace="raised", arch="sm90", disable=["grouped_gemm_glu"])
    got, eager = step(fast, sum(counts), counts), step(model, sum(counts), counts)
    for one, two in zip(got, eager):
        assert_close("gradient", one, two, 2e-2)
    (merge,) = rewriter.merges
    assert (merge.copies, merge.one_dgrad) == ways
    forward = {"weights": ["grouped_matmul", "split_glu"],
               "activations": ["grouped_matmul", "grouped_matmul", "join_glu", "split_glu"]}[ways[0]]  # fmt: skip
    assert products(rewriter, "forward") == forward
    assert products(rewriter, "backward") == ["grouped_matmul", "split_glu", "join_glu"]
    (backward,) = [r for r in rewriter.regions if r.part == "backward" and r.raisings]
    assert [s.kernel for s in backward.plan.steps] == ["sm90.grouped_gemm_dglu"], "and nothing is copied for it"


@pytest.mark.parametrize("model_type", [Separate, Torchtitan, SeparateSigmoid])
@pytest.mark.parametrize("counts, one_dgrad", [([8, 0, 12], False), ([92, 0, 8], False), ([300, 0, 52], True)])
def test_a_kernel_that_takes_both_weights_leaves_nothing_to_copy(model_type, counts, one_dgrad, seed, assert_close):
    """It writes h side by side for the backward. The weights are copied for dx alone, where that moves less."""
    model = model_type()
    fast, rewriter, _ = compiled(model, replace="raised", arch="sm90")
    for one, two in zip(step(fast, sum(counts), counts), step(model, sum(counts), counts)):
        assert_close("gradient", one, two, 2e-2)
    (merge,) = rewriter.merges
    assert (merge.copies, merge.one_dgrad) == ("nothing", one_dgrad)
    steps = {r.part: r.plan.steps for r in rewriter.regions if r.raisings}
    assert [s.kernel for s in steps["forward"]] == ["sm90.grouped_gemm_glu"]
    assert {"a", "b", "b_up", "offsets", "c", "d"} == set(steps["forward"][0].buffers)
    assert [s.kernel for s in steps["backward"]] == ["sm90.grouped_gemm_dglu"]


def test_without_gradients_both_weights_are_taken_and_h_is_not_written(seed, assert_close):
    model, counts, x = Separate(), torch.tensor([8, 0, 12]), torch.randn(20, H, dtype=BF16)
    fast, rewriter, _ = compiled(model, replace="raised", arch="sm90")
    with torch.no_grad():
        assert_close("y", fast(x, counts), model(x, counts), 2e-2)
    (region,) = [r for r in rewriter.regions if r.raisings]
    assert [s.kernel for s in region.plan.steps] == ["sm90.grouped_gemm_glu"] and not rewriter.merges
    assert {"a", "b", "b_up", "offsets", "d"} == set(region.plan.steps[0].buffers)


def saved_shapes(model, rows, counts, **options):
    """Shapes of what the forward keeps for the backward, inputs of the model aside."""
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    fast, _, _ = compiled(model, replace="raised", arch="sm90", **options)
    x = torch.randn(rows, H, dtype=BF16, requires_grad=True)
    given = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fast(x, torch.tensor(counts))
    y.sum().backward()
    return sorted(tuple(t.shape) for t in seen if t.untyped_storage().data_ptr() not in given)


@pytest.mark.parametrize("model_type", [Separate, Torchtitan, Fused])
@pytest.mark.parametrize("rows", [20, 100, 352])
def test_the_backward_is_given_h_and_the_activation_and_no_copy_of_a_weight(model_type, rows, seed):
    h, act, offsets = (rows, 2 * I), (rows, I), (L,)
    counts = [rows - 8, 0, 8]
    assert saved_shapes(model_type(), rows, counts) == sorted([h, act, offsets])
    assert saved_shapes(model_type(), rows, counts, save="preactivation") == sorted([h, offsets])


def test_weights_that_are_cast_anyway_are_cast_side_by_side(seed, assert_close):
    """float32 parameters, bf16 products: no row count is small enough for h to be copied instead."""
    model = Torchtitan().float()
    fast, rewriter, _ = compiled(model, replace="raised", arch="sm90")
    for one, two in zip(step(fast, 20, [8, 0, 12]), step(model, 20, [8, 0, 12])):
        assert one.dtype is two.dtype is torch.float32
        assert_close("gradient", one, two, 2e-2)
    assert [(m.copies, m.one_dgrad) for m in rewriter.merges] == [("weights", False)], "dx is a sum in float32"
    (backward,) = [r for r in rewriter.regions if r.part == "backward" and r.raisings]
    assert [s.kernel for s in backward.plan.steps] == ["sm90.grouped_gemm_dglu"]
    h, act, offsets, w13 = (20, 2 * I), (20, I), (L,), (L, 2 * I, H)
    saved = saved_shapes(model, 20, [8, 0, 12])
    assert sorted([h, act, offsets, w13]) == [s for s in saved if s not in ((20, H), (L, H, I))], "x and w2 as well"


def test_an_activation_that_is_not_saved_is_written_by_the_fused_backward(seed, assert_close):
    model = Separate()
    fast, rewriter, _ = compiled(model, replace="raised", arch="sm90", save="preactivation")
    for one, two in zip(step(fast, 20, [8, 0, 12]), step(model, 20, [8, 0, 12])):
        assert_close("gradient", one, two, 2e-2)
    (backward,) = [r for r in rewriter.regions if r.part == "backward" and r.raisings]
    (fused,) = backward.plan.steps
    assert fused.kernel == "sm90.grouped_gemm_dglu" and "activation" in fused.buffers


def test_without_gradients_nothing_is_merged_for_a_backward(seed):
    fast, rewriter, _ = compiled(Separate(), arch="sm90", disable=["grouped_gemm_glu"])
    with torch.no_grad():
        fast(torch.randn(352, H, dtype=BF16), torch.tensor([300, 0, 52]))
    assert not rewriter.merges


@pytest.mark.parametrize("model_type", [Columns, OtherRows])
def test_what_cannot_be_merged_is_read_as_halves_side_by_side(model_type, seed, assert_close):
    model = model_type()
    fast, rewriter, _ = compiled(model, replace="raised")
    got, eager = step(fast, 20, [8, 0, 12]), step(model, 20, [8, 0, 12])
    for one, two in zip(got, eager):
        assert_close("gradient", one, two, 2e-2)
    assert products(rewriter, "forward") == ["grouped_matmul", "grouped_matmul", "join_glu", "split_glu"]
    assert raisings(rewriter)["backward"] == ["raise_glu_backward"]


def test_nothing_is_merged_where_no_kernel_could_use_it(seed):
    """On the CPU, and on sm80, nothing fuses: the code stays as it was written, bit for bit."""
    model = Separate()
    for arch in (None, "sm80"):
        fast, _, _ = compiled(model, arch=arch)
        for got, eager in zip(step(fast, 20, [8, 0, 12]), step(model, 20, [8, 0, 12])):
            assert torch.equal(got, eager)


@pytest.mark.parametrize("model_type", [Separate, Fused])
@pytest.mark.parametrize("rows", [20, 352])
def test_a_users_checkpoint_keeps_nothing_and_fuses(model_type, rows, seed, assert_close):
    """Everything in it is computed again in the backward, h side by side as well."""
    inner = model_type()

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x, counts):
            return checkpoint(self.inner, x, counts, use_reentrant=False)

    counts = [rows - 8, 0, 8]
    model = Checkpointed()
    assert saved_shapes(model, rows, counts) == [(L,)], "the counts"
    fast, rewriter, _ = compiled(model, replace="raised", arch="sm90")
    for one, two in zip(step(fast, rows, counts), step(inner, rows, counts)):
        assert_close("gradient", one, two, 2e-2)
    kernels = [s.kernel for r in rewriter.regions if r.part == "backward" and r.plan for s in r.plan.fused_steps]
    assert [k for k in kernels if k != "sm90.grouped_gemm"] == ["sm90.grouped_gemm_dglu"]
