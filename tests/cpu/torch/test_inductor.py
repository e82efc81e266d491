"""The same rewriting inside Inductor, on its decomposed graphs.

The models here leave it nothing to generate C++ for, so that these tests need no compiler and take seconds.
"""

from __future__ import annotations

import shutil

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from opfuse.graph_ops.torch import OpfusePass
from opfuse.graph_ops.torch.compile import region_op
from opfuse.graph_ops.torch.compile.backend import compile_with
from opfuse.graph_ops.torch.compile.rewrite import Options, Rewriter
from opfuse.graph_ops.torch.graphs import GRAPHS
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

L, H, I = 3, 32, 64
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def own_cache():
    """A cache of compiled code of this test alone."""
    with fresh_inductor_cache():
        yield


def experts(x, w13, w2, offsets):
    grouped_mm = getattr(F, "grouped_mm", torch._grouped_mm)
    gate, up = grouped_mm(x, w13.transpose(-2, -1), offs=offsets).chunk(2, dim=-1)
    return grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=offsets)


def separate(x, w13, w2, offsets):
    """Gate and up from two weights, here the halves of one."""
    grouped_mm = getattr(F, "grouped_mm", torch._grouped_mm)
    w1, w3 = w13.chunk(2, dim=1)
    gate = grouped_mm(x, w1.transpose(-2, -1), offs=offsets)
    up = grouped_mm(x, w3.transpose(-2, -1), offs=offsets)
    return grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=offsets)


def data(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, H, generator=generator).to(BF16).requires_grad_()
    w13 = (torch.randn(L, 2 * I, H, generator=generator) / H**0.5).to(BF16).requires_grad_()
    w2 = (torch.randn(L, H, I, generator=generator) / I**0.5).to(BF16).requires_grad_()
    dy = torch.randn(rows, H, generator=generator).to(BF16)
    return x, w13, w2, torch.tensor([rows - 2, rows - 2, rows], dtype=torch.int32), dy


def step(fn, rows):
    *leaves, offsets, dy = data(rows)
    torch._dynamo.mark_dynamic(leaves[0], 0)
    y = fn(*leaves, offsets)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def test_decomposed_graphs_are_replaced_forward_and_backward_at_every_token_count(seed, assert_close):
    own = OpfusePass(replace="raised", arch="sm90")
    with inductor_config.patch(post_grad_custom_pre_pass=own):
        fast = torch.compile(experts, backend="inductor", fullgraph=True)
        for rows in (20, 6, 33):
            for got, wanted in zip(step(fast, rows), step(experts, rows)):
                assert_close("gradient", got, wanted, 2e-2)
    found = [(r.part, r.replaced, [x.rule for x in r.raisings]) for r in own.regions if r.raisings]
    assert found == [("forward", True, ["raise_glu"]), ("backward", True, ["raise_glu_backward"])]


def test_a_graph_from_inductors_cache_runs_without_the_pass_that_made_it(seed):
    options = {"replace": "raised"}
    with inductor_config.patch(fx_graph_cache=True):
        first = step(torch.compile(experts, backend="opfuse", fullgraph=True, options=options), 20)
        torch._dynamo.reset()
        GRAPHS.clear()
        region_op._parse.cache_clear()
        counters.clear()
        again = step(torch.compile(experts, backend="opfuse", fullgraph=True, options=options), 20)
        assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0
        for one, two in zip(first, again):
            assert torch.equal(one, two), f"seed {seed}"
        torch._dynamo.reset()
        counters.clear()
        other = {**options, "disable": ["quantize_row_col"]}
        step(torch.compile(experts, backend="opfuse", fullgraph=True, options=other), 20)
        hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert hits == 0, "other options are another key"


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor copies the two weights by code that needs g++")
@pytest.mark.parametrize("arch, copies, forward", [("sm80", "weights", 1), ("sm90", "nothing", 0)])
def test_gate_and_up_of_two_weights_are_copied_once_and_nothing_else_is(
    arch, copies, forward, seed, assert_close, monkeypatch
):
    """Not at all in a forward whose kernel takes both. Operands reach the op, and halves of dh reach aten, as they lie:
    no copy at the borders of a region."""
    given = region_op._as_declared

    def same(tensor, spec, bindings):
        found = given(tensor, spec, bindings)
        assert found is tensor, f"{spec.name} was copied"
        return found

    monkeypatch.setattr(region_op, "_as_declared", same)
    rewriter = Rewriter(Options.of({"replace": "raised", "arch": arch}))
    fast = torch.compile(separate, backend=lambda gm, inputs: compile_with(rewriter, gm, inputs), fullgraph=True)
    got, codes = run_and_get_code(lambda: step(fast, 352))
    for one, two in zip(got, step(separate, 352)):
        assert_close("gradient", one, two, 2e-2)
    assert [(m.copies, m.one_dgrad) for m in rewriter.merges] == [(copies, True)]
    assert all(r.replaced for r in rewriter.regions)
    written = [code[code.index("def call(") :].count("cpp_fused") for code in codes]
    assert written == [forward, 2], (
        "both weights, side by side; in the backward also their gradients, halves of one parameter"
    )


def test_passes_and_settings_of_the_users_own_reach_inductor(seed):
    """From the configuration and from `options`, where everything that is not ours is Inductor's."""
    seen = []

    class Own(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __init__(self, name):
            self.name = name

        def __call__(self, graph):
            ours = any(n.target is torch.ops.opfuse.run_graph.default for n in graph.nodes)
            seen.append((self.name, ours, inductor_config.max_fusion_size))

        def uuid(self):
            return self.name

    options = {"replace": "raised", "post_grad_custom_post_pass": Own("options"),
               "max-fusion-size": 63}  # fmt: skip
    with inductor_config.patch(post_grad_custom_pre_pass=Own("configuration")):
        step(torch.compile(experts, backend="opfuse", fullgraph=True, options=options), 20)
    assert seen == [("configuration", False, 63), ("options", True, 63)] * 2, "forward, then backward"
