"""The custom ops against torch's own checks: schema, fakes with true strides, autograd, dynamic shapes."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import GluLayout
from opfuse.graph_ops.ir.serialize import to_json
from opfuse.graph_ops.torch import ops  # noqa: F401  registers the ops
from opfuse.graph_ops.torch.compile import region_op  # noqa: F401
from opfuse.graph_ops.torch.configuration import configuration_of
from opfuse.graph_ops.torch.graphs import Forward
from opfuse.graph_ops.torch.mlp import activation_parameters

CASES = {
    "even": dict(counts=[4, 4, 4]),
    "empty experts, bf16": dict(counts=[0, 7, 0, 5], dtype=torch.bfloat16),
    "weights inputs first": dict(counts=[3, 6], transposed=True),
    "interleaved, geglu": dict(counts=[5, 2], act="geglu", layout=GluLayout.interleaved(32)),
    "situglu without probs": dict(counts=[2, 3], act="situglu", prob=False, layout=GluLayout.interleaved(1)),
    "no rows": dict(counts=[0, 0]),
    "rows of no expert": dict(counts=[3, 2], tail=4),
}
MXFP8_CASES = {
    "even": dict(counts=[32, 64]),
    "empty experts, bf16": dict(counts=[0, 64, 0, 32], dtype=torch.bfloat16),
    "weights inputs first": dict(counts=[32, 32], transposed=True),
    "interleaved, geglu": dict(counts=[64, 32], act="geglu", layout=GluLayout.interleaved(32)),
    "situglu without probs": dict(counts=[32, 32], act="situglu", prob=False),
    "swizzled scales": dict(counts=[128, 128], rows=128, dtype=torch.bfloat16),
}


def inputs_of(case):
    offsets = case.counts.cumsum(0, dtype=torch.int32)
    return (case.x, offsets, case.w1, case.w2, case.prob)


def choices_of(case, multiple_of=1):
    parameters = list(activation_parameters(case.act, case.parameters))
    return (case.act, parameters, str(case.layout), multiple_of, case.x.shape[0] > int(case.counts.sum()))


@pytest.mark.parametrize("name", CASES)
def test_c107_the_whole_op_passes_opcheck(name, make_case):
    case = make_case(**CASES[name])
    torch.library.opcheck(torch.ops.opfuse.grouped_mlp.default, (*inputs_of(case), *choices_of(case), ""))


@pytest.mark.parametrize("name", CASES)
def test_c107_forward_ops_pass_opcheck(name, make_case):
    case = make_case(**CASES[name])
    x, offsets, w1, w2, prob = inputs_of(case)
    choices = choices_of(case)
    torch.library.opcheck(torch.ops.opfuse.grouped_mlp_fc1.default, (x, offsets, w1, prob, *choices))
    fixed = None if prob is None else prob.detach()
    h, act = (t.detach() for t in torch.ops.opfuse.grouped_mlp_fc1(x, offsets, w1, fixed, *choices))
    torch.library.opcheck(torch.ops.opfuse.grouped_mlp_fc2.default,
                          (h.requires_grad_(), act, offsets, w2, prob, *choices, name != "even"))  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_c107_backward_ops_pass_opcheck(name, make_case):
    case = make_case(**CASES[name])
    x, offsets, w1, w2, prob = (t if t is None else t.detach() for t in inputs_of(case))
    choices, checks = choices_of(case), ("test_schema", "test_faketensor")
    h, act = torch.ops.opfuse.grouped_mlp_fc1(x, offsets, w1, prob, *choices)
    ours, dy = torch.ops.opfuse, torch.randn_like(x)
    for wanted in ((True, True, prob is not None), (True, False, False), (False, True, False)):
        torch.library.opcheck(ours.grouped_mlp_fc2_backward.default,
                              (dy, offsets, w2, prob, h, act, *choices, *wanted), test_utils=checks)  # fmt: skip
    torch.library.opcheck(ours.grouped_mlp_fc2_backward.default,
                          (dy, offsets, w2, prob, h, None, *choices, True, True, prob is not None))  # fmt: skip
    dh = torch.randn_like(h)
    torch.library.opcheck(ours.grouped_mlp_fc1_backward.default, (dh, offsets, w1, x, *choices[3:], True, True))
    for wanted in ((True, False), (False, True)):
        torch.library.opcheck(ours.grouped_mlp_fc1_backward.default, (dh, offsets, w1, x, *choices[3:], *wanted),
                              test_utils=checks)  # fmt: skip


@pytest.mark.parametrize("name", MXFP8_CASES)
def test_c107_mxfp8_ops_pass_opcheck(name, make_case):
    options = dict(MXFP8_CASES[name])
    multiple_of = options.pop("rows", 32)
    case = make_case(**options)
    choices = choices_of(case, multiple_of)
    torch.library.opcheck(torch.ops.opfuse.grouped_mlp_mxfp8_forward.default,
                          (*inputs_of(case), *choices, name != "even"))  # fmt: skip
    x, offsets, w1, w2, prob = (t if t is None else t.detach() for t in inputs_of(case))
    _, h, *codes = torch.ops.opfuse.grouped_mlp_mxfp8_forward(x, offsets, w1, w2, prob, *choices, True)
    torch.library.opcheck(torch.ops.opfuse.grouped_mlp_mxfp8_backward.default,
                          (torch.randn_like(x), offsets, w1, w2, prob, *codes[:2], h, *codes[2:], *choices,
                           True, True, True, prob is not None))  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_c107_a_graph_as_an_op_passes_opcheck(name, make_case):
    case = make_case(**CASES[name])
    x, offsets, w1, w2, prob = (t if t is None else t.detach() for t in inputs_of(case))
    act, parameters, layout, multiple_of, _ = choices_of(case)
    config = configuration_of(x, offsets, w1, w2, prob, act, parameters, layout, "", multiple_of)
    graph = Forward(config, True, True).declare()
    given = {"x": x, "w1": w1.transpose(1, 2), "w2": w2.transpose(1, 2), "offsets": offsets, "prob": prob}
    names = [t.name for t in graph.operation_graph().graph_inputs]
    for number, name in enumerate(names):
        graph.find_tensor(name).set_name(f"in{number}")
    for number, name in enumerate(("y", "h", "act")):
        graph.find_tensor(name).set_name(f"out{number}")
    definition = to_json(graph.operation_graph(), indent=None)
    torch.library.opcheck(torch.ops.opfuse.run_graph.default, ([given[n] for n in names], definition, []))


def test_a_graph_as_an_op_takes_tensors_laid_out_otherwise(make_case, seed):
    case = make_case([3, 4])
    x, offsets, w1, w2, prob = (t.detach() for t in inputs_of(case))
    config = configuration_of(x, offsets, w1, w2, prob, "swiglu", [], "concatenated", "", 1)
    graph = Forward(config, False, False).declare()
    names = [t.name for t in graph.operation_graph().graph_inputs]
    for number, name in enumerate(names):
        graph.find_tensor(name).set_name(f"in{number}")
    graph.find_tensor("y").set_name("out0")
    definition = to_json(graph.operation_graph(), indent=None)
    given = {"x": x, "w1": w1.transpose(1, 2), "w2": w2.transpose(1, 2), "offsets": offsets, "prob": prob}
    (wanted,) = torch.ops.opfuse.run_graph([given[n] for n in names], definition, [])
    memory = torch.zeros(x.numel() + 1)
    moved = memory[1:].view(x.shape).copy_(x)  # 4 bytes off the promised alignment
    (got,) = torch.ops.opfuse.run_graph([{**given, "x": moved}[n] for n in names], definition, [])
    assert torch.equal(got, wanted), f"seed {seed}"
    turned = x.t().contiguous().t()
    (got,) = torch.ops.opfuse.run_graph([{**given, "x": turned}[n] for n in names], definition, [])
    assert torch.equal(got, wanted), f"seed {seed}"
