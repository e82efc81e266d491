"""torch.compile(backend="opfuse"): plain MoE code is found, raised and replaced, or left exactly as it was."""

from __future__ import annotations

import logging

import plain_moe  # type: ignore[import-not-found]
import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from opfuse.fusion_rules import VerdictKind
from opfuse.graph_ops import OpfuseError
from opfuse.graph_ops.torch import OpfusePass, explain, grouped_mlp
from opfuse.graph_ops.torch.compile.backend import compile_with
from opfuse.graph_ops.torch.compile.rewrite import BACKWARD_RULE, FORWARD_RULE, Options, Rewriter
from opfuse.graph_ops.torch.graphs import GRAPHS
from plain_moe import BF16, SPELLINGS, Fused, H, I, Separate, Torchtitan, compiled, mm, oracle, raisings, step  # type: ignore[import-not-found]
from torch._inductor.decomposition import select_decomp_table

torch_functional = F.__file__


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_plain_code_raises_forward_and_backward_and_is_as_accurate_as_eager(spelling, seed):
    model = SPELLINGS[spelling]()
    fast, rewriter, _ = compiled(model, replace="raised", arch="sm90")
    got, eager, wanted = (f(m, 20, [8, 0, 12]) for f, m in ((step, fast), (step, model), (oracle, model)))
    assert raisings(rewriter) == {"forward": ["raise_glu"], "backward": ["raise_glu_backward"]}
    assert {r.part for r in rewriter.regions if r.replaced} == {"forward", "backward"}
    for name, one, two, exact in zip(("y", "x", "first", "second", "third"), got, eager, wanted):
        ours, theirs = (float((t.double() - exact).norm() / exact.norm()) for t in (one, two))
        assert ours <= 1.2 * theirs + 1e-4, f"{name}: {ours:.2e}, eager {theirs:.2e} (seed {seed})"
        assert one.stride() == two.stride(), name


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_forward_and_derivative_match_the_rules_of_fused_kernels(spelling, seed):
    """One kernel each, which finds gate and up side by side, or takes the weights of both."""
    fast, rewriter, _ = compiled(SPELLINGS[spelling](), replace="raised", arch="sm90")
    step(fast, 352, [300, 0, 52])
    apart = {"join_glu"} if hasattr(SPELLINGS[spelling](), "w3") else set()
    for part, rule, ops in (("forward", "grouped_gemm_glu", {"grouped_matmul", "glu", *apart}),
                            ("backward", "grouped_gemm_dglu", {"grouped_matmul", "glu_backward"})):  # fmt: skip
        (region,) = [r for r in rewriter.regions if r.part == part and r.raisings]
        kinds = {v.kind for v in region.plan.report.verdicts if v.rule == rule}
        assert VerdictKind.CHOSEN in kinds and len(region.plan.steps) == 1, region.explanation
        assert {n.op for n in region.plan.graph.nodes} == ops, region.explanation


def silu_backward_as(sigmoid):
    """The derivative of silu as Inductor writes it out, its own sigmoid spelled by that function."""

    def silu_backward(dy, x):
        wide, s = x.float(), sigmoid(x.float())
        return (dy.float() * s * (1 + wide * (1 - s))).to(x.dtype)

    return silu_backward


SIGMOIDS = {"sigmoid": torch.sigmoid, "1 / (1 + exp(-x))": lambda x: 1 / (1 + torch.exp(-x)),
            "1 / (exp(-x) + 1)": lambda x: 1 / (torch.exp(-x) + 1)}  # fmt: skip


@pytest.mark.parametrize("sigmoid", SIGMOIDS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_written_out_as_inductor_does_it_raises_as_well(spelling, sigmoid, seed, assert_close):
    """Until torch 2.11 that sigmoid was a reciprocal, and nothing fused there."""
    rewriter = Rewriter(Options.of({"rest": "eager", "replace": "raised", "arch": "sm90"}))
    model = SPELLINGS[spelling]()
    table = {**select_decomp_table(), torch.ops.aten.silu_backward.default: silu_backward_as(SIGMOIDS[sigmoid])}
    fast = torch.compile(model, backend=lambda g, i: compile_with(rewriter, g, i, decompositions=table), fullgraph=True)
    for one, two in zip(step(fast, 352, [300, 0, 52]), step(model, 352, [300, 0, 52])):
        assert_close("gradient", one, two, 2e-2)
    assert raisings(rewriter) == {"forward": ["raise_glu"], "backward": ["raise_glu_backward"]}
    assert [s.rule for r in rewriter.regions if r.raisings for s in r.plan.fused_steps] == [FORWARD_RULE, BACKWARD_RULE]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_without_leave_no_rounding_moves(spelling, seed, assert_close):
    """A GLU with a rounding inside is left alone; one without is raised, and only float32 operations change order."""
    model = SPELLINGS[spelling]()
    exact, rewriter, _ = compiled(model, replace="raised", arch="sm90", fuse_rounding=False)
    found = step(exact, 20, [8, 0, 12]), step(model, 20, [8, 0, 12])
    if "float32" in spelling:
        assert raisings(rewriter) == {"forward": ["raise_glu"], "backward": ["raise_glu_backward"]}
        for got, eager in zip(*found):
            assert_close("gradient", got, eager, 1.5e-3)  # a rounding fewer or more would be 3e-3
        return
    for got, eager in zip(*found):
        assert torch.equal(got, eager), f"seed {seed}"
    found = raisings(rewriter)
    assert found == {"forward": [], "backward": []}
    kept = [r.reason for r in rewriter.regions if r.plan is not None]
    assert kept and all(r.startswith("eager's roundings inside its GLU are kept (fuse_rounding): ") for r in kept), kept
    reasons = {reason.code for region in rewriter.regions if region.plan is not None
               for verdict in region.plan.report.verdicts for reason in verdict.reasons}  # fmt: skip
    assert "RAISE_ROUNDING" in reasons


def test_by_default_only_what_a_kernel_of_this_device_fuses_is_replaced(seed):
    model = Fused()
    fast, rewriter, _ = compiled(model)
    for got, eager in zip(step(fast, 20, [8, 0, 12]), step(model, 20, [8, 0, 12])):
        assert torch.equal(got, eager)
    assert raisings(rewriter)["backward"] == ["raise_glu_backward"]
    assert not any(r.replaced for r in rewriter.regions), "the CPU has no fused kernels"
    assert {r.reason for r in rewriter.regions if r.raisings} == {"nothing of it fuses on cpu"}


def test_c104_no_graph_breaks(seed):
    found = explain(Torchtitan(), arch="sm90")(
        torch.randn(20, H, dtype=BF16, requires_grad=True), torch.tensor([8, 0, 12])
    )
    assert found.graph_break_count == 0 and found.graph_count == 1 and found.op_count > 0
    assert "Graph Break Count: 0" in str(found)


@pytest.mark.parametrize("replace", ["raised", "fused"])
def test_c106_two_compilations_serve_ten_token_counts_and_no_tokens_work(replace, seed, assert_close):
    model = Fused()
    fast, _, graphs = compiled(model, replace=replace)
    for rows in (20, 5, 7, 64, 33, 2, 9, 11, 100, 40):
        counts = [rows - 2, 0, 2]
        for got, wanted in zip(step(fast, rows, counts), oracle(model, rows, counts)):
            assert_close("gradient", got, wanted, 2e-2)
    assert len(graphs) <= 2
    got = step(fast, 0, [0, 0, 0])
    assert got[0].shape == got[1].shape == (0, H)
    for gradient in got[2:]:
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_c106_a_dynamic_mark_compiles_once(seed):
    fast, _, graphs = compiled(Fused(), replace="raised")
    for rows in (20, 5, 64):
        x = torch.randn(rows, H, dtype=BF16)
        torch._dynamo.mark_dynamic(x, 0)
        fast(x, torch.tensor([rows - 2, 0, 2]))
    assert len(graphs) == 1


@pytest.mark.parametrize("rows_of", [lambda x: x.repeat_interleave(2, 0), lambda x: torch.cat([x, x[:3]])])
def test_rows_that_are_an_expression_of_the_tokens(rows_of, seed, assert_close):
    """2T rows, or T + 3: what a router's copies and paddings make of a dynamic T."""
    model = Fused()

    def layer(x, counts):
        return model(rows_of(x), counts)

    fast, rewriter, graphs = compiled(layer, replace="raised")
    for tokens in (10, 16, 7):
        x = torch.randn(tokens, H, dtype=BF16, requires_grad=True)
        rows = rows_of(x).shape[0]
        counts = torch.tensor([rows - 4, 4, 0])
        got, wanted = (torch.autograd.grad(f(x, counts).float().square().sum(), (x, *model.parameters()))
                       for f in (fast, layer))  # fmt: skip
        for one, two in zip(got, wanted):
            assert_close("gradient", one, two, 2e-2)
    assert len(graphs) <= 2 and any(r.replaced for r in rewriter.regions)


class TwoBlocks(torch.nn.Module):
    """Two blocks back to back, the second reads what the first writes, and both read x."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Fused(), Separate()

    def forward(self, x, counts):
        return self.two(x + self.one(x, counts), counts) + x


def test_c98_adjacent_blocks_are_both_replaced(seed, assert_close):
    model = TwoBlocks()
    fast, rewriter, _ = compiled(model, replace="raised")
    got, eager = step(fast, 20, [8, 0, 12]), step(model, 20, [8, 0, 12])
    assert sum(r.replaced for r in rewriter.regions if r.part == "forward") == 2
    assert sum(r.replaced for r in rewriter.regions if r.part == "backward") == 2
    for one, two in zip(got, eager):
        assert_close("gradient", one, two, 2e-2)


def test_equal_layers_share_one_built_graph(seed):
    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Fused() for _ in range(3))

        def forward(self, x, counts):
            for layer in self.layers:
                x = x + layer(x, counts)
            return x

    GRAPHS.clear()
    fast, rewriter, _ = compiled(Deep(), replace="raised")
    step(fast, 20, [8, 0, 12])
    assert sum(r.replaced for r in rewriter.regions) == 6
    assert len(GRAPHS) == 2, "one forward, one backward"


class SwappedHalves(Fused):
    def forward(self, x, counts):
        offsets = self.offsets(counts)
        up, gate = mm(x, self.w13, offsets).chunk(2, dim=-1)
        return mm(F.silu(gate) * up, self.w2, offsets)


class Gelu(Fused):
    def forward(self, x, counts):
        offsets = self.offsets(counts)
        gate, up = mm(x, self.w13, offsets).chunk(2, dim=-1)
        return mm(F.gelu(gate) * up, self.w2, offsets)


class GateIsRead(Fused):
    def forward(self, x, counts):
        offsets = self.offsets(counts)
        gate, up = mm(x, self.w13, offsets).chunk(2, dim=-1)
        s = F.silu(gate)
        return mm(s * up, self.w2, offsets) + s.sum(1, keepdim=True)


class NotConvex(Fused):
    def forward(self, x, counts):
        offsets = self.offsets(counts)
        gate, up = mm(x, self.w13, offsets).chunk(2, dim=-1)
        s = F.silu(gate)
        return mm(s * up * s.sort(dim=1).values, self.w2, offsets)


class UnevenSplit(Fused):
    def forward(self, x, counts):
        offsets = self.offsets(counts)
        gate, up = mm(x, self.w13, offsets).split([I - 16, I + 16], dim=-1)
        return mm(F.pad(F.silu(gate), (0, 16)) * up[:, :I], self.w2, offsets)


@pytest.mark.parametrize("model_type", [SwappedHalves, Gelu, GateIsRead, NotConvex, UnevenSplit])
def test_near_misses_compute_what_eager_does(model_type, seed, assert_close):
    model = model_type()
    fast, rewriter, _ = compiled(model, replace="raised")
    got, eager = step(fast, 20, [8, 0, 12]), step(model, 20, [8, 0, 12])
    for one, two in zip(got, eager):
        assert_close("gradient", one, two, 2e-2)
    if model_type is not GateIsRead:
        assert raisings(rewriter) == {"forward": [], "backward": []}
        assert all(r.reason for r in rewriter.regions)


def test_c116_expanded_gradients(seed, assert_close):
    model = Fused()
    fast, _, _ = compiled(model, replace="raised")
    grads = []
    for one in (fast, model):
        model.zero_grad()
        one(torch.ones(20, H, dtype=BF16), torch.tensor([8, 0, 12])).float().mean().backward()
        grads.append(model.w13.grad.clone())
    assert_close("w13", grads[0], grads[1], 2e-2)


def test_c109_a_fallback_is_a_record_and_strict_an_error(seed, caplog):
    fast, _, _ = compiled(Fused(), arch="sm80")
    with caplog.at_level(logging.INFO, logger="opfuse"):
        fast(torch.randn(20, H, dtype=BF16), torch.tensor([8, 0, 12]))
    records = [r for r in caplog.records if r.name == "opfuse.rules"]
    assert records and all(r.code and r.observed and r.required and r.arch == "sm80" for r in records)
    strict, _, _ = compiled(Fused(), arch="sm80", strict=True)
    with pytest.raises(Exception, match="UNFUSED: strict=True"):
        strict(torch.randn(20, H, dtype=BF16), torch.tensor([8, 0, 12]))


def test_the_backend_is_found_by_name_with_its_options(seed):
    model = Fused()
    fast = torch.compile(
        model, backend="opfuse", options={"rest": "eager", "replace": "raised", "fuse_rounding": False}, fullgraph=True
    )
    for got, eager in zip(step(fast, 20, [8, 0, 12]), step(model, 20, [8, 0, 12])):
        assert torch.equal(got, eager)


@pytest.mark.parametrize(
    "options",
    [
        {"fuse": True},
        {"replace": "all"},
        {"rest": "nobody"},
        {"save": "nothing"},
        {"rest": "eager", "max_autotune": True},
    ],
)
def test_unknown_options_are_refused(options):
    with pytest.raises(OpfuseError) as raised:
        Options.of(options)
    assert raised.value.code == "OPTION"


def test_the_custom_op_is_traced_without_a_break(seed):
    def mlp(x, counts, w1, w2, probs):
        return grouped_mlp(x * 2, counts, w1, w2, probs).relu()

    w1, w2 = (torch.randn(2, 2 * I, H) / 6).requires_grad_(), (torch.randn(2, H, I) / 8).requires_grad_()
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return compile_with(Rewriter(Options.of({"rest": "eager"})), gm, inputs)

    fast = torch.compile(mlp, backend=backend, fullgraph=True)
    for rows in (9, 4, 17, 6):
        x, probs, counts = torch.randn(rows, H, requires_grad=True), torch.rand(rows), torch.tensor([rows - 3, 3])
        wanted = torch.autograd.grad(mlp(x, counts, w1, w2, probs).sum(), (x, w1, w2))
        got = torch.autograd.grad(fast(x, counts, w1, w2, probs).sum(), (x, w1, w2))
        for one, two in zip(got, wanted):
            torch.testing.assert_close(one, two)
    assert len(graphs) <= 2


def test_explain_reports_what_fused_and_why_the_rest_did_not(seed):
    model = Fused()
    x = torch.randn(20, H, dtype=BF16, requires_grad=True)
    found = explain(model, arch="sm90")(x, torch.tensor([8, 0, 12]))
    assert [r.part for r in found.regions if r.raisings] == ["forward", "backward"]
    text = str(found)
    assert "raised glu_backward" in text and "Plan of backward" in text and "plain_moe.py" in text
    (backward,) = [r for r in found.regions if r.part == "backward"]
    assert {name.split()[0] for name in backward.unrounded} >= {"_grouped_mm_3", "mul_1", "mul_2"}
    assert all(f" (BFLOAT16) at {torch_functional}" in n or f" (BFLOAT16) at {plain_moe.__file__}" in n
               for n in backward.unrounded)  # fmt: skip
    assert "stays float32 where eager rounds: " in text and "fuse_rounding" in text
    assert x.grad is None and all(p.grad is None for p in model.parameters()), "gradients are computed and dropped"
    plain = explain(model, arch="sm90", fuse_rounding=False)(x, torch.tensor([8, 0, 12]))
    assert plain.fused_count == 0 and not any(r.unrounded for r in plain.regions)
    plain = str(plain)
    assert "RAISE_ROUNDING" in plain and "rounds to BFLOAT16" in plain


def test_the_pass_for_inductor_changes_its_id_with_whatever_decides():
    ids = [OpfusePass(**o).uuid() for o in ({}, {"fuse_rounding": False}, {"disable": ("raise_glu",)})]
    with inductor_config.patch(emulate_precision_casts=True):
        ids.append(OpfusePass().uuid())
    assert len({repr(i) for i in ids}) == 4
    assert OpfusePass().uuid() == OpfusePass().uuid()


def test_disable_reaches_the_raising(seed):
    fast, rewriter, _ = compiled(Fused(), replace="raised", disable=["raise_glu"])
    step(fast, 20, [8, 0, 12])
    assert raisings(rewriter) == {"forward": [], "backward": ["raise_glu_backward"]}


@pytest.mark.parametrize("how", ["config", "options"])
def test_roundings_follow_inductors_own_setting(how, seed):
    """torch.compile drops roundings between fused pointwise ops unless emulate_precision_casts; so do we."""
    assert Options.of({}).fuses_rounding and not Options.of({"fuse_rounding": False}).fuses_rounding
    with inductor_config.patch(emulate_precision_casts=how == "config"):
        given = {} if how == "config" else {"emulate_precision_casts": True}
        assert not Options.of(given).fuses_rounding
        assert Options.of({**given, "fuse_rounding": True}).fuses_rounding, "which was asked for by name"
        if how == "config":
            model = Fused()
            exact, rewriter, _ = compiled(model, replace="raised", arch="sm90")
            for got, eager in zip(step(exact, 20, [8, 0, 12]), step(model, 20, [8, 0, 12])):
                assert torch.equal(got, eager)
            assert not any(r.raisings for r in rewriter.regions)
