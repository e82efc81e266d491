"""torch.compile(backend="opfuse"): plain MoE code is found, raised and replaced, or left exactly as it was."""

from __future__ import annotations

import logging

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from opfuse.fusion_rules import VerdictKind
from opfuse.graph_ops import Graph, OpfuseError
from opfuse.graph_ops.torch import OpfusePass, explain, grouped_mlp
from opfuse.graph_ops.torch.compile.backend import compile_with
from opfuse.graph_ops.torch.compile.importer import Importer
from opfuse.graph_ops.torch.compile.regions import (
    drop_detaches,
    drop_whole_slices,
    find_regions,
    framework_seconds,
    outputs_of,
)
from opfuse.graph_ops.torch.compile.rewrite import Options, Rewriter
from opfuse.graph_ops.torch.compile.spellings import NotImportable
from opfuse.graph_ops.torch.graphs import GRAPHS
from opfuse.kernels.arch import ARCHES
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_tensor import unset_fake_temporarily

torch_functional = F.__file__
L, H, I = 3, 32, 64
BF16 = torch.bfloat16


def mm(x, weight, offsets):
    """(M, K) x (L, N, K) -> (M, N): torch's own grouped matmul, by its public name where there is one."""
    return getattr(F, "grouped_mm", torch._grouped_mm)(x, weight.transpose(-2, -1), offs=offsets)


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = torch.nn.Parameter((torch.randn(L, I, H) / H**0.5).to(BF16))
        self.w3 = torch.nn.Parameter((torch.randn(L, I, H) / H**0.5).to(BF16))
        self.w2 = torch.nn.Parameter((torch.randn(L, H, I) / I**0.5).to(BF16))

    def offsets(self, counts):
        return torch.cumsum(counts, dim=0, dtype=torch.int32)

    def act(self, gate, up):
        return F.silu(gate) * up


class Separate(Experts):
    """Gate and up from two weights."""

    def forward(self, x, counts):
        offsets = self.offsets(counts)
        gate, up = mm(x, self.w1, offsets), mm(x, self.w3, offsets)
        return mm(self.act(gate, up), self.w2, offsets)


class Torchtitan(Experts):
    """As torchtitan's GroupedExperts spells it."""

    def forward(self, x, num_tokens_per_expert):
        offsets = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(x.bfloat16(), self.w1.bfloat16().transpose(-2, -1), offs=offsets))
        h = h * torch._grouped_mm(x.bfloat16(), self.w3.bfloat16().transpose(-2, -1), offs=offsets)
        return torch._grouped_mm(h, self.w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)


class Fused(Experts):
    """One weight for gate and up; `cut` says how the product is taken apart."""

    def __init__(self, cut=lambda h: h.chunk(2, dim=-1)):
        super().__init__()
        self.w13 = torch.nn.Parameter(torch.cat([self.w1.data, self.w3.data], 1))
        del self.w1, self.w3
        self.cut = cut

    def forward(self, x, counts):
        offsets = self.offsets(counts)
        gate, up = self.cut(mm(x, self.w13, offsets))
        return mm(self.act(gate, up), self.w2, offsets)


class Sigmoid(Fused):
    def act(self, gate, up):
        return up * (gate * torch.sigmoid(gate))


class SeparateSigmoid(Separate):
    def act(self, gate, up):
        return gate * torch.sigmoid(gate) * up


class GptOss(Fused):
    """Clamped, as gpt-oss: the clamp's derivative is a selection, and its bounds are hit."""

    def __init__(self):
        super().__init__(lambda h: (h[..., ::2], h[..., 1::2]))

    def act(self, gate, up):
        gate, up = gate.clamp(max=0.75), up.clamp(min=-0.75, max=0.75)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


class SeparateFloat32(Separate):
    def act(self, gate, up):
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)


class Float32Activation(Fused):
    """Nothing rounds inside the activation, as its author wrote it."""

    def forward(self, x, counts):
        offsets = self.offsets(counts)
        gate, up = mm(x, self.w13, offsets).float().chunk(2, dim=-1)
        return mm((F.silu(gate) * up).to(BF16), self.w2, offsets)


SPELLINGS = {
    "separate": Separate,
    "torchtitan": Torchtitan,
    "concatenated, chunk": Fused,
    "concatenated, slices": lambda: Fused(lambda h: (h[:, :I], h[:, I:])),
    "concatenated, split": lambda: Fused(lambda h: h.split([I, I], dim=1)),
    "interleaved": lambda: Fused(lambda h: (h[..., ::2], h[..., 1::2])),
    "gate times its sigmoid": Sigmoid,
    "separate, gate times its sigmoid": SeparateSigmoid,
    "gpt-oss": GptOss,
    "float32 activation": Float32Activation,
    "separate, float32 activation": SeparateFloat32,
}


def compiled(model, **options):
    """The model compiled with the rest in eager, the rewriter whose reports tell what happened, and a counter."""
    rewriter = Rewriter(Options.of({"rest": "eager", **options}))
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return compile_with(rewriter, gm, inputs)

    return torch.compile(model, backend=backend, fullgraph=True), rewriter, graphs


def step(model, rows, counts, dy_seed=1):
    """y and the gradients of x and every parameter."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, H, generator=generator).to(BF16).requires_grad_()
    dy = torch.randn(rows, H, generator=generator).to(BF16)
    for parameter in model.parameters():
        parameter.grad = None
    y = model(x, torch.tensor(counts))
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def oracle(model, rows, counts):
    """The same in float64, with nothing rounded."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, H, generator=generator).to(BF16).double().requires_grad_()
    dy = torch.randn(rows, H, generator=generator).to(BF16).double()
    wide = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    parts, start = [], 0
    for expert, count in enumerate(counts):
        rows_of = x[start : start + count]
        if "w13" in wide:
            h = rows_of @ wide["w13"][expert].T
            gate, up = model.cut(h)
        else:
            gate, up = rows_of @ wide["w1"][expert].T, rows_of @ wide["w3"][expert].T
        parts.append(model.act(gate, up) @ wide["w2"][expert].T)
        start += count
    torch.cat(parts).backward(dy)
    return [torch.cat(parts).detach(), x.grad, *(t.grad for t in wide.values())]


def raisings(rewriter):
    return {part: [r.rule for region in rewriter.regions if region.part == part for r in region.raisings]
            for part in ("forward", "backward")}  # fmt: skip


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
def test_the_derivative_matches_the_dglu_rule(spelling, seed):
    fast, rewriter, _ = compiled(SPELLINGS[spelling](), replace="raised", arch="sm90")
    step(fast, 20, [8, 0, 12])
    (backward,) = [r for r in rewriter.regions if r.part == "backward" and r.raisings]
    kinds = {v.kind for v in backward.plan.report.verdicts if v.rule == "grouped_gemm_dglu"}
    assert kinds & {VerdictKind.CHOSEN, VerdictKind.UNSUPPORTED, VerdictKind.NOT_CHOSEN}, backward.explanation
    assert {"glu_backward", "grouped_matmul"} <= {n.op for n in backward.plan.graph.nodes}
    assert not {"swish", "mul", "sigmoid", "swish_backward"} & {n.op for n in backward.plan.graph.nodes}


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
    assert "raised glu_backward" in text and "Plan of backward" in text and "test_compile.py" in text
    (backward,) = [r for r in found.regions if r.part == "backward"]
    assert {name.split()[0] for name in backward.unrounded} >= {"_grouped_mm_3", "silu", "mul_1", "mul_2"}
    assert all(f" (BFLOAT16) at {torch_functional}" in n or f" (BFLOAT16) at {__file__}" in n
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
    """L H = 96 rows are as large as the weights, L I = 192 rows of dx; kernels find h and dh each in one tensor."""
    model = Separate()
    fast, rewriter, _ = compiled(model, replace="raised", arch="sm90")
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


def test_the_rival_of_a_fusion_is_what_torch_would_do():
    """One pass for Inductor, one an op for eager; the matmul is the same in both."""
    graph = torch.fx.Graph()

    def node(name, target, args, *shape):
        made = graph.placeholder(name) if target is None else graph.call_function(target, args)
        made.meta["val"] = torch.empty(*shape, dtype=BF16, device="meta")
        return made

    rows, depth, half = 4096, 512, 256
    x, weight = node("x", None, (), rows, depth), node("w", None, (), 2, depth, 2 * half)
    offsets, scale = node("o", None, (), 2), node("s", None, (), rows, 2 * half)
    product = node("h", torch.ops.aten._grouped_mm.default, (x, weight, offsets), rows, 2 * half)
    one = node("a", torch.ops.aten.silu.default, (product,), rows, 2 * half)
    two = node("b", torch.ops.aten.mul.Tensor, (one, scale), rows, 2 * half)
    graph.output((two,))
    arch, size = ARCHES["sm90"], rows * 2 * half * 2
    read = (rows * depth + 2 * depth * 2 * half + 2) * 2 + size
    matmul = max(2.0 * rows * depth * 2 * half / arch.bf16_flops, read / arch.memory_bytes_per_second)
    launch = arch.launch_seconds
    wanted = matmul + 2 * launch + 3 * size / arch.memory_bytes_per_second + launch
    assert framework_seconds((product, one, two), arch, one_pass=True) == pytest.approx(wanted)
    wanted = matmul + 2 * launch + 5 * size / arch.memory_bytes_per_second + 2 * launch
    assert framework_seconds((product, one, two), arch, one_pass=False) == pytest.approx(wanted)


class Regions:
    """A backend that compares every region, imported as it stands, with aten on the same random operands."""

    def __init__(self):
        self.compared: list[str] = []

    def __call__(self, gm, inputs):
        return aot_autograd(fw_compiler=self.look, bw_compiler=self.look)(gm, inputs)

    def look(self, gm, inputs):
        drop_detaches(gm.graph)
        drop_whole_slices(gm.graph)
        with unset_fake_temporarily():  # tensors made here are real ones
            for region in find_regions(gm.graph):
                self.compare(region)
        gm.recompile()
        return make_boxed_func(gm.forward)

    def compare(self, region):
        outputs = outputs_of(region)
        try:
            imported = Importer(region, outputs, fuse_rounding=False).build()
        except NotImportable:  # aten's padded halves, say, where the other half is not in the region
            return
        values = {node: self.operand(node) for node in imported.inputs}
        given = {f"in{i}": values[node] for i, node in enumerate(imported.inputs)}
        got = Graph.from_operation_graph(imported.graph, fused=False, device="cpu")(given)
        for node in region:
            if node not in values:
                everything = [n for n in node.all_input_nodes if n not in values]
                for missing in everything:  # zeros that padded halves are written into, and other operands left out
                    values[missing] = torch.zeros(missing.meta["val"].shape, dtype=missing.meta["val"].dtype)
                values[node] = node.target(*torch.fx.map_arg(node.args, values.__getitem__), **node.kwargs)
        for number, node in enumerate(outputs):
            one, two = got[f"out{number}"], values[node]
            assert one.dtype is two.dtype and one.stride() == two.stride(), node
            exact = 1e-5 if one.dtype is torch.float32 else 0.0  # float32 is what both compute in
            differing = float((~torch.isclose(one, two, rtol=exact, atol=exact)).float().mean())
            assert differing < 0.01, f"{node}: {differing:.1%} of the elements differ"
            self.compared.append(node.name)

    def operand(self, node):
        value = node.meta["val"]
        if value.dtype is torch.int32:
            return torch.tensor([8, 8, 20], dtype=torch.int32)
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return made.copy_(torch.randn(value.shape).to(value.dtype))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_regions_round_wherever_aten_does(spelling, seed):
    """A rounding fewer or more anywhere changes every tenth element or so."""
    model, regions = SPELLINGS[spelling](), Regions()
    step(torch.compile(model, backend=regions, fullgraph=True), 20, [8, 0, 12])
    assert len(regions.compared) >= 3, regions.compared
