"""grouped_mlp and GroupedMLP: numbers against float64 autograd, edges, memory, and mistakes that are named."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import GluLayout, OpfuseError
from opfuse.graph_ops.torch import GroupedMLP, grouped_mlp
from opfuse.graph_ops.torch.graphs import GRAPHS

LAYOUTS = (GluLayout.concatenated(), GluLayout.interleaved(32), GluLayout.interleaved(1))
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SPLITS = {
    "regular": [5, 9, 4],
    "all empty": [0, 0, 0],
    "empty in front": [0, 7, 5],
    "empty in the middle": [6, 0, 5],
    "empty at the end": [6, 5, 0],
    "uneven": [1, 17, 3],
    "one takes all": [0, 19, 0],
    "one row": [0, 0, 1],
}


def run(case, *, save="activation", recipe=None, multiple_of=1, allow_tail=False):
    """y and every gradient by name, from random dy; then dy."""
    y = grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob, act=case.act, glu_layout=case.layout, save=save,
                    recipe=recipe, multiple_of=multiple_of, allow_tail=allow_tail, **case.parameters)  # fmt: skip
    dy = torch.randn_like(y)
    y.backward(dy)
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in case.leaves.items()}}, dy


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("act", ["swiglu", "geglu", "situglu"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_c30_every_gradient_in_every_layout(layout, act, dtype, make_case, assert_close):
    case = make_case([5, 0, 12, 7], layout=layout, act=act, dtype=dtype)
    got, dy = run(case)
    for name, wanted in case.oracle(dy).items():
        assert_close(name, got[name], wanted, BOUNDS[dtype])


def test_c30_the_layouts_are_three_functions(make_case, assert_close):
    case = make_case([6, 6])
    outputs = []
    for layout in LAYOUTS:
        case.layout = layout
        outputs.append(grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob, glu_layout=layout))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (outputs[one] - outputs[other]).norm() > 0.1 * outputs[one].norm()


@pytest.mark.parametrize("split", SPLITS)
def test_splits(split, make_case, assert_close):
    case = make_case(SPLITS[split])
    got, dy = run(case)
    for name, wanted in case.oracle(dy).items():
        assert_close(name, got[name], wanted, BOUNDS[torch.float32])


@pytest.mark.parametrize("save", ["activation", "preactivation", "inputs"])
@pytest.mark.parametrize("prob", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_what_is_saved_changes_no_number(save, prob, transposed, make_case, assert_close):
    case = make_case([5, 9], prob=prob, transposed=transposed)
    got, dy = run(case, save=save)
    for name, wanted in case.oracle(dy).items():
        assert_close(name, got[name], wanted, BOUNDS[torch.float32])
    assert case.w1.grad.stride() == case.w1.stride()
    assert case.w2.grad.stride() == case.w2.stride()


@pytest.mark.parametrize("parameters", [dict(geglu_alpha=1.0, linear_offset=0.0), dict(clamp_min=-0.5, clamp_max=0.75)])
def test_activation_parameters_count(parameters, make_case, assert_close):
    case = make_case([5, 9], act="geglu", **parameters)
    got, dy = run(case)
    for name, wanted in case.oracle(dy).items():
        assert_close(name, got[name], wanted, BOUNDS[torch.float32])


def test_c36_c37_gradients_at_the_clamp_bounds(assert_close):
    """Gates and ups at, just below and just above +-7, through weights that are the identity."""
    grid = torch.tensor([6.9, 7.0, 7.1, -6.9, -7.0, -7.1])
    gates, ups = (t.flatten() for t in torch.meshgrid(grid, grid, indexing="ij"))
    pairs = torch.stack([gates, ups], 1).requires_grad_()  # (36, 2): H = 2, I = 1
    w1, w2 = torch.eye(2)[None], torch.tensor([[[1.0], [0.0]]])
    y = grouped_mlp(pairs, torch.tensor([36]), w1, w2, act="geglu")
    y.backward(torch.tensor([1.0, 0.0]).expand(36, 2))
    gate, up = gates.double(), ups.double()
    y1, y2, s = gate.clamp(max=7), up.clamp(-7, 7), (1.702 * gate.clamp(max=7)).sigmoid()
    dgate = (y2 + 1) * s * (1 + 1.702 * y1 * (1 - s)) * (gate <= 7.0)
    dup = y1 * s * ((up >= -7.0) & (up <= 7.0))
    assert_close("y", y[:, 0].detach(), (y2 + 1) * y1 * s, 1e-6)
    assert_close("dgate", pairs.grad[:, 0], dgate, 1e-6)
    assert_close("dup", pairs.grad[:, 1], dup, 1e-6)
    assert (pairs.grad[:, 0][gates == 7.0] != 0).any(), "a gate of exactly 7 has a gradient"


def test_c11_rows_of_no_expert_are_zero_whatever_they_hold(make_case, assert_close):
    case = make_case([4, 3], tail=5)
    with torch.no_grad():
        case.x[7:] = float("nan")
        case.prob[7:] = float("nan")
    y = grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob, allow_tail=True)
    assert torch.equal(y[7:], torch.zeros(5, 32))
    dy = torch.randn_like(y)
    dy[7:] = float("nan")
    y.backward(dy)
    for name, leaf in case.leaves.items():
        assert leaf.grad.isfinite().all(), name
    assert torch.equal(case.x.grad[7:], torch.zeros(5, 32))
    assert torch.equal(case.prob.grad[7:], torch.zeros(5))
    with torch.no_grad():
        for leaf in (case.x, case.prob):
            leaf[7:] = 0.0
        dy[7:] = 0.0
    wanted = case.oracle(dy)
    for name in ("w1", "w2"):
        assert_close(name, case.leaves[name].grad, wanted[name], BOUNDS[torch.float32])


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_c13_no_tokens_keep_the_autograd_graph(recipe):
    experts = GroupedMLP(4, 32, 64, dtype=torch.bfloat16, recipe=recipe, multiple_of=32)
    x = torch.randn(0, 32, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(0, requires_grad=True)
    y, bias = experts(x, torch.zeros(4, dtype=torch.int64), probs)
    assert y.shape == (0, 32) and y.grad_fn is not None and bias is None
    y.sum().backward()
    for name, weight in experts.named_parameters():
        assert weight.grad is not None and torch.equal(weight.grad, torch.zeros_like(weight)), name
    assert x.grad.shape == (0, 32) and probs.grad.shape == (0,)


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_c116_losses_whose_gradient_is_expanded(reduce, make_case, assert_close):
    case = make_case([5, 4])
    y = grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob)
    reduce(y).backward()
    wanted = case.oracle(torch.ones_like(y) / (1 if reduce is torch.sum else y.numel()))
    for name, leaf in case.leaves.items():
        assert_close(name, leaf.grad, wanted[name], BOUNDS[torch.float32])


def test_c87_c88_repeats_are_bitwise_equal(make_case):
    case = make_case([5, 0, 12, 7], dtype=torch.bfloat16)
    dy = torch.randn_like(case.x)
    seen = set()
    for _ in range(20):
        y = grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob)
        gradients = torch.autograd.grad(y, list(case.leaves.values()), dy)
        seen.add(b"".join(t.detach().float().numpy().tobytes() for t in (y, *gradients)))
    assert len(seen) == 1


@pytest.mark.parametrize("learns", [("x",), ("w1",), ("w2",), ("prob",), ("x", "w2"), ("w1", "prob")])
def test_only_what_learns_gets_a_gradient(learns, make_case, assert_close):
    case = make_case([5, 4])
    for name, leaf in case.leaves.items():
        leaf.requires_grad_(name in learns)
    got, dy = run(case)
    wanted = case.oracle(dy)
    for name, leaf in case.leaves.items():
        if name in learns:
            assert_close(name, got[name], wanted[name], BOUNDS[torch.float32])
        else:
            assert leaf.grad is None


M, H, I, L = 64, 32, 96, 2


@pytest.mark.parametrize(
    ("save", "recipe", "learns", "elements"),
    [
        ("activation", None, "all", {"x": M * H, "h": M * 2 * I, "act": M * I}),
        ("preactivation", None, "all", {"x": M * H, "h": M * 2 * I}),
        ("inputs", None, "all", {"x": M * H}),
        ("activation", None, "w2", {"act": M * I}),
        ("activation", None, "x", {"h": M * 2 * I}),
        ("activation", "mxfp8", "all", {"codes": M * H + M * I, "scales": M // 32 * (H + I), "h": M * 2 * I}),
    ],
)
def test_saves_what_the_backward_reads_and_no_more(save, recipe, learns, elements, make_case):
    case = make_case([32, 32], H=H, I=I, dtype=torch.bfloat16)
    for name, leaf in case.leaves.items():
        leaf.requires_grad_(learns in ("all", name))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob, save=save, recipe=recipe, multiple_of=32)
    rows = [t for t in saved if t.dim() == 2]
    assert sorted(t.numel() for t in rows if t.numel()) == sorted(
        n for name, total in elements.items()
        for n in ([M * H, M * I] if name == "codes" else [H * M // 32, I * M // 32] if name == "scales" else [total])
    )  # fmt: skip
    held = {t.untyped_storage().data_ptr() for t in saved if t.dim() == 3}
    assert held <= {case.w1.untyped_storage().data_ptr(), case.w2.untyped_storage().data_ptr()}, (
        "weights are not copied"
    )


def test_inference_saves_nothing(make_case):
    case = make_case([4, 4])
    with torch.no_grad():
        y = grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob)
    assert y.grad_fn is None
    torch.testing.assert_close(y, grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob).detach())


def test_one_build_serves_every_token_count(make_case):
    GRAPHS.clear()
    for rows in (3, 0, 1, 64, 17):
        run(make_case([rows, 2, 0]))
    assert len(GRAPHS) == 4


def test_the_graph_cache_is_bounded(make_case, monkeypatch):
    GRAPHS.clear()
    monkeypatch.setattr(GRAPHS, "limit", 3)
    for experts in range(1, 6):
        run(make_case([2] * experts))
    assert len(GRAPHS) == 3


def test_activations_that_differ_only_in_a_bound_share_no_graph(make_case, assert_close):
    """C35: parameters are part of what a graph is."""
    for bound in (0.25, 0.5, 7.0):
        case = make_case([5, 4], act="geglu", clamp_max=bound, clamp_min=-bound)
        got, dy = run(case)
        assert_close("y", got["y"], case.oracle(dy)["y"], BOUNDS[torch.float32])


def quantized(x: torch.Tensor, axis: int) -> torch.Tensor:
    """x through MXFP8 in float64: E4M3 codes, scales the power of two at or above amax/448, blocks of 32 along axis."""
    blocks = x.detach().float().movedim(axis, 0).unflatten(0, (-1, 32))
    amax = blocks.abs().amax(1, keepdim=True)
    scale = torch.where(amax > 0, torch.exp2(torch.ceil(torch.log2(amax / 448.0))), 1.0)
    codes = (blocks / scale).to(torch.float8_e4m3fn).float()
    return (codes * scale).flatten(0, 1).movedim(0, axis).double()


def test_mxfp8_is_the_mlp_of_quantized_activations_and_gradients(make_case, assert_close):
    case = make_case([32, 0, 64], dtype=torch.bfloat16, H=64, I=64)
    got, dy = run(case, recipe="mxfp8", multiple_of=32)
    owner = torch.repeat_interleave(torch.arange(3), case.counts)
    w1, w2 = (w.detach().double()[owner] for w in (case.w1, case.w2))  # (M, 2I, H), (M, H, I)
    x, prob = case.x.detach().double(), case.prob.detach().double()
    h = torch.einsum("moh,mh->mo", w1, quantized(x, 1)).bfloat16().double()
    gate, up = h.chunk(2, 1)
    s = gate.sigmoid()
    act = prob[:, None] * up * gate * s
    assert_close("y", got["y"], torch.einsum("mhi,mi->mh", w2, quantized(act, 1)), 1e-2)
    r = torch.einsum("mhi,mh->mi", w2, quantized(dy.double(), 1))
    dh = torch.cat([r * up * s * (1 + gate * (1 - s)), r * gate * s], 1) * prob[:, None]
    assert_close("prob", got["prob"], (r * up * gate * s).sum(1), 1e-2)
    assert_close("x", got["x"], torch.einsum("mo,moh->mh", quantized(dh, 1), w1), 1e-2)
    for expert, rows in ((0, slice(0, 32)), (2, slice(32, 96))):
        dw1 = quantized(dh, 0)[rows].T @ quantized(x, 0)[rows]
        dw2 = quantized(dy.double(), 0)[rows].T @ quantized(act, 0)[rows]
        assert_close("w1", got["w1"][expert], dw1, 1e-2)
        assert_close("w2", got["w2"][expert], dw2, 1e-2)
    assert not got["w1"][1].any() and not got["w2"][1].any()


@pytest.mark.parametrize("multiple_of", [32, 128])
def test_mxfp8_swizzled_scales_change_no_number(multiple_of, make_case):
    case = make_case([128, 256], dtype=torch.bfloat16)
    outputs = []
    for multiple in (32, multiple_of):
        for leaf in case.leaves.values():
            leaf.grad = None
        torch.manual_seed(0)
        outputs.append(run(case, recipe="mxfp8", multiple_of=multiple)[0])
    for name in outputs[0]:
        assert torch.equal(outputs[0][name], outputs[1][name]), name


MISTAKES = {
    "EXPERTS": lambda c: dict(tokens_per_expert=torch.tensor([4, 3, 2])),
    "TOKENS_PER_EXPERT": lambda c: dict(tokens_per_expert=torch.tensor([4, 2])),
    "WEIGHT_LAYOUT": lambda c: dict(w1=c.w1.transpose(1, 2)),
    "SHAPE": lambda c: dict(x=torch.randn(7, 16)),
    "DEVICE": lambda c: dict(x=c.x.detach().to("meta")),
    "RANK": lambda c: dict(x=torch.randn(7, 1, 32)),
    "GROUP_ALIGN": lambda c: dict(recipe="mxfp8", multiple_of=16),
    "RECIPE": lambda c: dict(recipe="fp8"),
    "ACT": lambda c: dict(act="relu"),
    "ARGUMENT_UNUSED": lambda c: dict(clamp_max=3.0),
    "MULTIPLE_OF": lambda c: dict(multiple_of=0),
    "SAVE": lambda c: dict(save="everything"),
    "GLU_LAYOUT": lambda c: dict(glu_layout="interleaved(48)"),
    "ATTRIBUTE_VALUE": lambda c: dict(act="geglu", clamp_max=float("nan")),
}


@pytest.mark.parametrize("code", MISTAKES)
def test_a_mistake_is_named(code, make_case):
    case = make_case([4, 3])
    given = dict(x=case.x, tokens_per_expert=case.counts, w1=case.w1, w2=case.w2, probs=case.prob)
    given |= MISTAKES[code](case)
    with pytest.raises(OpfuseError) as raised:
        grouped_mlp(**given)
    assert raised.value.code == code
    assert raised.value.asked and (raised.value.required is not None)


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("w2", lambda t: t.bfloat16(), "DATA_TYPE"),
        ("x", lambda t: t.double(), "DATA_TYPE"),
        ("tokens_per_expert", lambda t: t.float().requires_grad_(), "DATA_TYPE"),
        ("tokens_per_expert", lambda t: t.float(), "DATA_TYPE"),
        ("tokens_per_expert", lambda t: torch.tensor([9, -2]), "OFFSETS"),
        ("tokens_per_expert", lambda t: t[None], "RANK"),
        ("probs", lambda t: t[:, None], "SHAPE"),
        ("probs", lambda t: t[1:], "SHAPE"),
        ("probs", lambda t: t + 1j, "DATA_TYPE"),
        ("tokens_per_expert", lambda t: t > 0, "DATA_TYPE"),
        ("tokens_per_expert", lambda t: t.tolist(), "ARGUMENT_TYPE"),
        ("x", lambda t: t.tolist(), "ARGUMENT_TYPE"),
        ("w1", lambda t: t.detach().to_sparse(), "ARGUMENT_TYPE"),
        ("w1", lambda t: t[:, :0], "SHAPE"),
    ],
)
def test_a_wrong_operand_is_named(name, change, code, make_case):
    case = make_case([4, 3])
    given = dict(x=case.x, tokens_per_expert=case.counts, w1=case.w1, w2=case.w2, probs=case.prob)
    with pytest.raises(OpfuseError) as raised:
        grouped_mlp(**{**given, name: change(given[name])})
    assert raised.value.code == code, str(raised.value)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (dict(multiple_of=2.0), "ARGUMENT_TYPE"),
        (dict(allow_tail="no"), "ARGUMENT_TYPE"),
        (dict(act="geglu", clamp_max="7"), "ARGUMENT_TYPE"),
        (dict(glu_layout=None), "GLU_LAYOUT"),
        (dict(glu_layout=32), "GLU_LAYOUT"),
    ],
)
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_an_option_of_another_type_is_named(options, code, recipe, make_case):
    case = make_case([4, 3])
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(OpfuseError) as raised:
            grouped_mlp(case.x, case.counts, case.w1, case.w2, recipe=recipe, **options)
        assert raised.value.code == code, str(raised.value)


def test_a_promise_that_counts_break_is_named(make_case):
    case = make_case([4, 3, 1])
    with pytest.raises(OpfuseError) as raised:
        grouped_mlp(case.x, case.counts, case.w1, case.w2, multiple_of=4)
    assert raised.value.code == "MULTIPLE_OF"
    assert raised.value.where is None, "a graph is declared once for calls from anywhere; the traceback has the line"


def test_a_second_derivative_is_refused(make_case):
    case = make_case([4, 3])
    y = grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob)
    (dx,) = torch.autograd.grad(y.sum(), case.x, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


def dual_tangent(function, x):
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "forward_ad": dual_tangent,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_custom_op_has_no_rule_for_is_refused(transform, compiled, make_case):
    """Its tangent would be left out without a word: a forward-mode derivative of zero."""
    case = make_case([4, 3])
    w1, w2 = case.w1.detach(), case.w2.detach()

    def run(x):
        return TRANSFORMS[transform](lambda t: grouped_mlp(t, case.counts, w1, w2), x)

    if compiled:
        run = torch.compile(run, backend="eager")
    with pytest.raises(OpfuseError) as raised:
        run(case.x.detach())
    assert raised.value.code == "TRANSFORM"


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_autocast_changes_no_number(recipe, make_case):
    """Nor any type: under autocast a matmul of float32 would round its operands."""
    case = make_case([32, 0, 32])
    dy, found = torch.randn_like(case.x), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob, recipe=recipe, multiple_of=32)
            found.append((y.detach(), *torch.autograd.grad(y, list(case.leaves.values()), dy)))
    for one, other in zip(*found):
        assert torch.equal(one, other)


def test_strided_and_misaligned_operands_give_the_same(make_case, assert_close):
    case = make_case([5, 4])
    wanted = grouped_mlp(case.x, case.counts, case.w1, case.w2, case.prob).detach()
    wide = torch.zeros(9, 64)
    wide[:, ::2] = case.x.detach()
    padded = torch.zeros(2, 128, 40)
    padded[:, :, 3:35] = case.w1.detach()
    memory = torch.zeros(case.w2.numel() + 1)
    w2 = memory[1:].view(case.w2.shape).copy_(case.w2.detach())
    expanded = torch.zeros(2, 128, 64)
    expanded[:, :, ::2] = case.w1.detach()
    for x, w1 in ((wide[:, ::2], padded[:, :, 3:35]), (case.x.detach(), expanded[:, :, ::2])):
        got = grouped_mlp(x, case.counts, w1, w2, case.prob.detach())
        assert_close("y", got, wanted, 1e-6)


def test_the_module_calls_as_megatron_does(make_case, assert_close):
    case = make_case([5, 0, 4])
    experts = GroupedMLP(3, 32, 64)
    with torch.no_grad():
        experts.w1.copy_(case.w1)
        experts.w2.copy_(case.w2)
    output, bias = experts(case.x, case.counts, case.prob)
    assert bias is None
    dy = torch.randn_like(output)
    output.backward(dy)
    wanted = case.oracle(dy)
    for name, got in (("y", output.detach()), ("w1", experts.w1.grad), ("w2", experts.w2.grad), ("x", case.x.grad),
                      ("prob", case.prob.grad)):  # fmt: skip
        assert_close(name, got, wanted[name], BOUNDS[torch.float32])


def test_the_module_explains_its_graphs_for_an_arch_that_is_not_here():
    experts = GroupedMLP(4, 64, 64, dtype=torch.bfloat16, glu_layout=GluLayout.interleaved(32), multiple_of=256)
    found = experts.explain("sm100")
    assert "cudnn.grouped_gemm_dglu.bf16" in [s.kernel for s in found["backward"].fused_steps]
    for arch in ("sm90", "cpu"):
        verdicts = [v for left in experts.explain(arch)["backward"].left_alone for v in left.verdicts]
        fused = experts.explain(arch)["backward"].fused_steps
        assert fused or any(v.rule == "grouped_gemm_dglu" and v.reasons for v in verdicts)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (dict(clamp_max=3.0), "ARGUMENT_UNUSED"),
        (dict(act="geglu", geglu_alpha=-1.0), "ATTRIBUTE_VALUE"),
        (dict(recipe="fp8"), "RECIPE"),
        (dict(recipe="mxfp8"), "GROUP_ALIGN"),
        (dict(multiple_of=0), "MULTIPLE_OF"),
        (dict(save="nothing"), "SAVE"),
        (dict(glu_layout="interleaved(48)"), "GLU_LAYOUT"),
        (dict(checkpoint_layout="interleaved(48)"), "GLU_LAYOUT"),
        (dict(num_experts=-1), "SIZE"),
        (dict(hidden_size=0), "SIZE"),
        (dict(intermediate_size=2.5), "SIZE"),
    ],
)
def test_the_module_refuses_when_it_is_made_what_the_function_refuses(options, code):
    with pytest.raises(OpfuseError) as raised:
        GroupedMLP(**{"num_experts": 2, "hidden_size": 32, "intermediate_size": 64, **options})
    assert raised.value.code == code


def test_the_module_explains_no_type_that_it_does_not_run():
    with pytest.raises(OpfuseError) as raised:
        GroupedMLP(2, 32, 64, dtype=torch.float64).explain("sm90")
    assert raised.value.code == "DATA_TYPE"
