"""cuDNN's MoE graphs, read and run with the very buffers that they declare, against float64."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from opfuse.graph_ops import DataType, Graph, VariantPackError, scales
from opfuse.kernels import reference


def swiglu(gate, up):
    return gate * torch.sigmoid(gate) * up


def test_forward_expert_mlp_with_weights_as_the_package_passes_them(kit):
    """FC1 (gate and up apart) -> SwiGLU -> FC2; weight buffers [E, N, K] for logical [E, K, N]."""
    g = kit.graph(name="mlp")
    x, fto = kit.rows(g, "x", kit.K), kit.offsets(g)
    wg, wu, wd = (
        kit.weights(g, "wg", kit.K, kit.I),
        kit.weights(g, "wu", kit.K, kit.I),
        kit.weights(g, "wd", kit.I, kit.K),
    )
    gate = g.moe_grouped_matmul(x, wg, fto, mode=kit.NONE, name="gate").set_data_type(kit.D.BFLOAT16)
    up = g.moe_grouped_matmul(x, wu, fto, mode=kit.NONE, name="up").set_data_type(kit.D.BFLOAT16)
    gate_tap = g.identity(input=gate, name="gate_tap").set_output(True).set_data_type(kit.D.BFLOAT16)
    h = g.mul(a=g.swish(input=gate_tap), b=up, name="h").set_output(True).set_data_type(kit.D.BFLOAT16)
    y = g.moe_grouped_matmul(h, wd, fto, mode=kit.NONE, name="y").set_output(True)

    ours = Graph.from_cudnn(g, device="cpu")
    buffers = {
        x.uid: kit.randn(1, kit.M, kit.K).bfloat16(),
        fto.uid: kit.boundaries,
        **{w.uid: kit.randn(kit.L, w.dim[2], w.dim[1]).bfloat16() for w in (wg, wu, wd)},
        **{t.uid: torch.full((1, kit.M, c), torch.nan, dtype=torch.bfloat16)
           for t, c in ((gate_tap, kit.I), (h, kit.I), (y, kit.K))},
    }  # fmt: skip
    ours.build()
    workspace = torch.empty(ours.get_workspace_size(), dtype=torch.uint8)
    ours.execute(buffers, workspace)
    rows = buffers[x.uid][0]
    expected_gate = kit.grouped(rows, buffers[wg.uid].transpose(1, 2)).bfloat16()
    expected_up = kit.grouped(rows, buffers[wu.uid].transpose(1, 2)).bfloat16()
    kit.close(buffers[gate_tap.uid], expected_gate, 2**-7, f"seed {kit.seed}")
    kit.close(buffers[h.uid], swiglu(expected_gate.double(), expected_up.double()), 2**-6, f"seed {kit.seed}")
    kit.close(
        buffers[y.uid], kit.grouped(buffers[h.uid][0], buffers[wd.uid].transpose(1, 2)), 2**-8, f"seed {kit.seed}"
    )
    assert {t.uid: t.name for t in ours.tensors}.items() >= {t.uid: t.name for t in (x, wg, wu, wd, fto, h, y)}.items()


def dglu_graph(kit):
    """alpha by expert, prob, dSwiGLU on separate halves, dprob, dbias, amax, codes by row and by column."""
    D, mode = kit.D, kit.cudnn.reduction_mode
    g = kit.graph(name="dglu")
    dy, w2, fto = kit.rows(g, "dy", kit.K), kit.weights(g, "w2", kit.K, kit.I), kit.offsets(g, 128)
    gate, up = kit.rows(g, "gate", kit.I), kit.rows(g, "up", kit.I)
    alpha = g.tensor(name="alpha", dim=[kit.L, 1, 1], data_type=D.FLOAT)
    prob = g.tensor(name="prob", dim=[1, kit.M, 1], data_type=D.FLOAT)
    r = g.mul(a=g.moe_grouped_matmul(dy, w2, fto, mode=kit.NONE, name="r"), b=alpha, name="scaled")
    silu = g.swish(input=gate, name="silu")
    dprob = g.reduction(input=g.mul(a=r, b=g.mul(a=silu, b=up)), mode=mode.ADD, name="dprob")
    dprob.set_dim([1, kit.M, 1]).set_output(True).set_data_type(D.FLOAT)
    rp = g.mul(a=r, b=prob, name="rp")
    dup = g.mul(a=rp, b=silu, name="dup")
    dgate = g.mul(a=g.swish_backward(loss=rp, input=gate, name="dsilu"), b=up, name="dgate")
    dbias = g.reduction(input=dgate, mode=mode.ADD, group_offset=fto, name="dbias")
    dbias.set_dim([kit.L, 1, kit.I]).set_output(True).set_data_type(D.FLOAT)
    amax = g.reduction(input=dup, mode=mode.AMAX, group_offset=fto, name="amax")
    amax.set_dim([kit.L, 1, 1]).set_output(True).set_data_type(D.FLOAT)
    outputs = {"dprob": dprob, "dbias": dbias, "amax": amax}
    for name, t, axis in (("dgate_row", dgate, 2), ("dup_col", dup, 1)):
        codes, scale = g.block_scale_quantize(input=t, block_size=32, axis=axis, group_offset=fto, name=name)
        outputs[name] = codes.set_output(True).set_data_type(D.FP8_E4M3)
        outputs[f"{name}_scale"] = scale.set_output(True).set_data_type(D.FP8_E8M0)
        scale.set_reordering_type(kit.cudnn.tensor_reordering.F8_128x4)
    outputs["dgate_row_scale"].set_dim([1, 128 * (kit.L + (kit.M - kit.L) // 128), 4])
    outputs["dup_col_scale"].set_dim([1, 128, kit.M // 32])
    inputs = {"dy": dy, "w2": w2, "first_token_offset": fto, "gate": gate, "up": up, "alpha": alpha, "prob": prob}
    return g, inputs, outputs


def test_dglu_with_reductions_and_scales_by_expert(kit):
    g, inputs, outputs = dglu_graph(kit)
    fto = torch.tensor([0, 128, 128, 384, 512], dtype=torch.int32).view(-1, 1, 1)
    given = {
        "dy": kit.randn(1, kit.M, kit.K).bfloat16(),
        "w2": kit.randn(kit.L, kit.I, kit.K).bfloat16().transpose(1, 2),
        "first_token_offset": fto,
        "gate": kit.randn(1, kit.M, kit.I).bfloat16(),
        "up": kit.randn(1, kit.M, kit.I).bfloat16(),
        "alpha": torch.tensor([0.5, 2.0, -1.5, 0.5]).view(-1, 1, 1),
        "prob": kit.randn(1, kit.M, 1),
    }
    ours = Graph.from_cudnn(g, device="cpu")
    out = ours({inputs[n].uid: v for n, v in given.items()})
    shapes = {n: tuple(t.dim) or (1, kit.M, kit.I) for n, t in outputs.items()}
    assert {n: tuple(out[t.uid].shape) for n, t in outputs.items()} == shapes

    r = kit.grouped(given["dy"][0], given["w2"]) * given["alpha"].double().view(-1)[kit.owner()][:, None]
    gate, up, prob = (given[n][0].double() for n in ("gate", "up", "prob"))
    s = torch.sigmoid(gate)
    dgate, dup = r * prob * up * s * (1 + gate * (1 - s)), r * prob * gate * s
    kit.close(out[outputs["dprob"].uid], (r * gate * s * up).sum(1), 1e-5, f"seed {kit.seed}")
    kit.close(out[outputs["dbias"].uid], kit.by_expert(dgate), 1e-5, f"seed {kit.seed}")
    amax = torch.stack(
        [p.abs().max() if p.numel() else torch.zeros(()).double() for p in dup.split([128, 0, 256, 128])]
    )
    kit.close(out[outputs["amax"].uid], amax, 1e-5, f"seed {kit.seed}")

    row_scales = out[outputs["dgate_row_scale"].uid].flatten()[: kit.M * 4].view(kit.M, 4)
    matrix = scales.unswizzle(row_scales, kit.M, 3).view(torch.uint8)
    each = reference.decode_scale(matrix, DataType.FP8_E8M0).repeat_interleave(32, 1)
    values = reference.decode(out[outputs["dgate_row"].uid][0].view(torch.uint8), DataType.FP8_E4M3) * each
    assert ((values - dgate).abs() <= 16 * each + 1e-6).all(), f"seed {kit.seed}"
    memory = out[outputs["dup_col_scale"].uid].reshape(128, kit.M // 32)
    memory = scales.unpack_columns_by_expert(memory, fto.flatten()[1:], 32)
    matrix = scales.unswizzle(memory, kit.I, kit.M // 32).view(torch.uint8)
    each = reference.decode_scale(matrix, DataType.FP8_E8M0).repeat_interleave(32, 1).T
    values = reference.decode(out[outputs["dup_col"].uid][0].view(torch.uint8), DataType.FP8_E4M3) * each
    assert ((values - dup).abs() <= 16 * each + 1e-6).all(), f"seed {kit.seed}"


def test_c41_does_the_graph_fuse_swiglu_and_why_not(kit):
    """The question of cudnn-frontend's users: halves apart cannot become one node, and the report and notes say so."""
    g, _, _ = dglu_graph(kit)
    ours = Graph.from_cudnn(g, device="cpu")
    report = str(ours.explain(arch="sm90"))
    assert "sm90.grouped_gemm (rule grouped_gemm): r [grouped_matmul]" in report and "OP: observed" in report
    assert any(note.code == "GLU_HALVES" and "show the split" in note.hint for note in ours.notes)


def test_execute_writes_cudnns_own_buffers(kit):
    g, inputs, outputs = dglu_graph(kit)
    ours = Graph.from_cudnn(g, device="cpu")
    given = {
        inputs["dy"]: kit.randn(1, kit.M, kit.K).bfloat16(),
        "w2": kit.randn(kit.L, kit.I, kit.K).bfloat16(),
        inputs["first_token_offset"].uid: kit.boundaries,
        "gate": kit.randn(kit.M, kit.I).bfloat16(),
        "up": kit.randn(1, kit.M, kit.I).bfloat16(),
        "alpha": torch.ones(kit.L),
        "prob": kit.randn(1, kit.M, 1),
    }
    made = ours(given)
    held = {t: torch.full_like(made[t.uid].view(torch.uint8) if made[t.uid].element_size() == 1 else made[t.uid],
                               255).view(
        made[t.uid].dtype) for t in outputs.values()}  # fmt: skip
    size = ours.get_workspace_size()
    ours.execute({**given, **held}, torch.empty(size, dtype=torch.uint8))
    for name, t in outputs.items():
        seen, wanted = held[t].reshape(-1).view(torch.uint8), made[t.uid].reshape(-1).view(torch.uint8)
        written = (
            len(wanted) if name != "dgate_row_scale" else kit.M * 4
        )  # the rest is room that no partition here needs
        assert torch.equal(seen[:written], wanted[:written]), name


def test_wgrad_with_the_weights_layout(kit):
    g = kit.graph(name="wgrad")
    dy, x, fto = kit.rows(g, "dy", kit.I), kit.rows(g, "x", kit.K), kit.offsets(g)
    dw = g.moe_grouped_matmul_bwd(dy, x, fto, name="wgrad")
    dw.set_dim([kit.L, kit.K, kit.I]).set_stride([kit.K * kit.I, 1, kit.K]).set_output(True).set_data_type(kit.D.FLOAT)
    ours = Graph.from_cudnn(g, device="cpu")
    rows, grads = kit.randn(1, kit.M, kit.K).bfloat16(), kit.randn(1, kit.M, kit.I).bfloat16()
    out = ours({x.uid: rows, dy.uid: grads, fto.uid: kit.boundaries})[dw.uid]
    assert out.shape == (kit.L, kit.K, kit.I) and out.stride() == (kit.K * kit.I, 1, kit.K)
    expected = torch.stack([rows[0, s:e].double().T @ grads[0, s:e].double()
                            for s, e in zip((0, 128, 128, 384), (128, 128, 384, 512), strict=True)])  # fmt: skip
    kit.close(out, expected, 1e-5, f"seed {kit.seed}")
    assert (out[1] == 0).all()


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_block_scaled_operands(kit, form):
    """dequantize -> grouped matmul with scales in 128x4 atoms, for rows and for weights; FP4 packs along K in both."""
    D = kit.D
    codes, scale, block = (D.FP8_E4M3, D.FP8_E8M0, 32) if form == "mxfp8" else (D.FP4_E2M1, D.FP8_E4M3, 16)
    ours_codes, ours_scale = DataType(codes.name), DataType(scale.name)
    g = kit.graph(name="block_scaled")
    x, w, fto = kit.rows(g, "x", kit.K, codes), kit.weights(g, "w", kit.K, kit.I, codes), kit.offsets(g)
    blocks = kit.K // block
    swizzled = dict(data_type=scale, reordering_type=kit.cudnn.tensor_reordering.F8_128x4)
    sfx = g.tensor(name="sfx", dim=[1, kit.M, (blocks + 3) // 4 * 4], **swizzled)
    sfw = g.tensor(name="sfw", dim=[kit.L, (blocks + 3) // 4 * 4, 128], **swizzled)
    a = g.block_scale_dequantize(input=x, descale=sfx, block_size=[1, block], name="a")
    b = g.block_scale_dequantize(input=w, descale=sfw, block_size=[block, 1], name="b")
    y = g.moe_grouped_matmul(a, b, fto, mode=kit.NONE, name="y").set_output(True).set_data_type(D.FLOAT)

    def quantized(values):
        byte, sf = reference.quantize.quantize_blocks(values, block, ours_codes, ours_scale)
        exact = reference.decode(byte, ours_codes) * reference.decode_scale(sf, ours_scale).repeat_interleave(block, 1)
        stored = reference.pack_fp4(byte) if form == "nvfp4" else byte.view(torch.float8_e4m3fn)
        return stored, scales.swizzle(sf).view(reference.torch_type(ours_scale)), exact

    rows, row_scales, exact_rows = quantized(kit.randn(kit.M, kit.K))
    parts = [quantized(kit.randn(kit.I, kit.K)) for _ in range(kit.L)]
    weight = torch.stack([p[0].view(torch.uint8) for p in parts]).view(rows.dtype).transpose(1, 2)
    weight_scales = torch.stack([p[1].view(torch.uint8) for p in parts]).view(row_scales.dtype)
    out = Graph.from_cudnn(g, device="cpu")(
        {x.uid: rows[None], sfx.uid: row_scales, w.uid: weight, sfw.uid: weight_scales, fto.uid: kit.boundaries}
    )[y.uid]
    expected = kit.grouped(exact_rows, torch.stack([p[2].T for p in parts]))
    kit.close(out, expected, 1e-5, f"seed {kit.seed}")


def glu_graph(kit, layout):
    """Forward and backward of a GLU whose halves are slices of one tensor, so that the split is in the graph."""
    g = kit.graph(name="slices")
    x, fto, w1 = kit.rows(g, "x", kit.K), kit.offsets(g), kit.weights(g, "w1", kit.K, 2 * kit.I)
    whole = [slice(0, 1), slice(0, kit.M)]
    step = {"concatenated": (slice(0, kit.I), slice(kit.I, 2 * kit.I)), "interleaved(1)": (
        slice(0, 2 * kit.I, 2), slice(1, 2 * kit.I, 2))}[layout]  # fmt: skip
    prob = g.tensor(name="prob", dim=[1, kit.M, 1], data_type=kit.D.FLOAT)
    h = g.moe_grouped_matmul(x, w1, fto, mode=kit.NONE, name="h").set_output(True)
    gate, up = (g.slice(input=h, slices=[*whole, s]) for s in step)
    y = g.mul(a=g.mul(a=g.swish(input=gate), b=up), b=prob, name="y").set_output(True)
    return g, (x, w1, fto, prob), (h, y)


@pytest.mark.parametrize("layout", ["concatenated", "interleaved(1)"])
def test_halves_that_are_slices_are_raised_to_a_glu(kit, layout):
    g, (x, w1, fto, prob), (h, y) = glu_graph(kit, layout)
    ours = Graph.from_cudnn(g, device="cpu")
    given = {x.uid: kit.randn(1, kit.M, kit.K).bfloat16(), w1.uid: kit.randn(kit.L, 2 * kit.I, kit.K).bfloat16(),
             fto.uid: kit.boundaries, prob.uid: kit.randn(1, kit.M, 1)}  # fmt: skip
    out = ours(given)
    seen = out[h.uid][0].double()
    gate, up = (seen[:, : kit.I], seen[:, kit.I :]) if layout == "concatenated" else (seen[:, ::2], seen[:, 1::2])
    kit.close(out[y.uid], swiglu(gate, up) * given[prob.uid][0].double(), 2**-8, f"seed {kit.seed}")
    assert not ours.notes
    from opfuse.fusion_rules import raise_graph

    raised, made = raise_graph(ours.operation_graph())
    assert [m.rule for m in made] == ["raise_glu"] and [n.op for n in raised.nodes] == ["grouped_matmul", "glu"]
    assert str(raised.tensor(h.uid).glu_layout) == layout


def test_the_backward_of_sliced_halves_is_one_kernel_on_hopper(kit):
    """Two gradients, their concatenation and the sum over columns that is dprob: one glu_backward, and one kernel."""
    g = kit.graph(name="dglu_slices")
    width = 128
    dy, w2, fto = kit.rows(g, "dy", kit.K), kit.weights(g, "w2", kit.K, width), kit.offsets(g)
    h = kit.rows(g, "h", 2 * width)
    prob = g.tensor(name="prob", dim=[1, kit.M, 1], data_type=kit.D.FLOAT)
    whole = [slice(0, 1), slice(0, kit.M)]
    gate, up = (g.slice(input=h, slices=[*whole, s]) for s in (slice(0, width), slice(width, 2 * width)))
    r = g.moe_grouped_matmul(dy, w2, fto, mode=kit.NONE, name="r")
    silu = g.swish(input=gate)
    dprob = g.reduction(input=g.mul(a=r, b=g.mul(a=silu, b=up)), mode=kit.cudnn.reduction_mode.ADD, name="dprob")
    dprob.set_dim([1, kit.M, 1]).set_output(True).set_data_type(kit.D.FLOAT)
    rp = g.mul(a=r, b=prob)
    dgate = g.mul(a=g.swish_backward(loss=rp, input=gate), b=up)
    dh = g.concatenate(inputs=[dgate, g.mul(a=rp, b=silu)], axis=2).set_output(True)
    ours = Graph.from_cudnn(g, device="cpu")
    given = {
        dy.uid: kit.randn(1, kit.M, kit.K).bfloat16(),
        w2.uid: kit.randn(kit.L, width, kit.K).bfloat16(),
        fto.uid: kit.boundaries,
        h.uid: kit.randn(1, kit.M, 2 * width).bfloat16(),
        prob.uid: kit.randn(1, kit.M, 1),
    }
    product = kit.grouped(given[dy.uid][0], given[w2.uid].transpose(1, 2))
    rows = product * given[prob.uid][0].double()
    x = given[h.uid][0].double()
    gate_v, up_v = x[:, :width], x[:, width:]
    s = torch.sigmoid(gate_v)
    expected = torch.cat([rows * up_v * s * (1 + gate_v * (1 - s)), rows * gate_v * s], 1)
    out = ours(given)
    assert out[dprob.uid].shape == (1, kit.M, 1)
    kit.close(out[dh.uid], expected, 2**-8, f"seed {kit.seed}")
    kit.close(out[dprob.uid], (product * gate_v * s * up_v).sum(1), 1e-5, f"seed {kit.seed}")
    from opfuse.fusion_rules import raise_graph

    raised, _ = raise_graph(ours.operation_graph())
    assert [n.op for n in raised.nodes] == ["grouped_matmul", "glu_backward"]
    report = str(ours.explain(arch="sm90"))
    assert "FUSED sm90.grouped_gemm_dglu" in report and "0 left unfused" in report, report


def test_separate_halves_are_noted_with_what_would_show_the_split(kit):
    g, _, _ = dglu_graph(kit)
    notes = Graph.from_cudnn(g, device="cpu").notes
    assert {n.code for n in notes} == {"GLU_HALVES"} and {n.where for n in notes} == {"node silu", "node dsilu"}
    assert "gate gate is its own buffer" in str(notes[0]) and "slice(x" in str(notes[0])


def test_scalars_constants_and_comparisons(kit):
    """Compile-time scalars stay in the graph; run-time ones have the graph's value unless the pack gives another."""
    g = kit.graph(name="scalars", io_data_type=kit.D.FLOAT)
    S = kit.cudnn.scalar_type
    x = kit.rows(g, "x", 8, kit.D.FLOAT)
    limit, slope = (
        g.tensor_scalar(0.5, S.COMPILE_TIME_CONST, name="limit"),
        g.tensor_scalar(2.0, S.RUNTIME_PARAM, name="slope"),
    )
    by_value = g.tensor(name="bias", dim=[1, 1, 1], data_type=kit.D.FLOAT, is_pass_by_value=True)
    above = g.cmp_gt(input=x, comparison=limit, name="above")
    picked = g.binary_select(input0=x, input1=limit, mask=above, name="picked")
    counted = g.mul(a=g.cmp_le(input=x, comparison=limit, name="below"), b=slope, name="counted")
    y = g.add(a=g.add(a=picked, b=counted), b=by_value, name="y").set_output(True)
    ours = Graph.from_cudnn(g, device="cpu")
    value = kit.randn(1, kit.M, 8)
    base = torch.where(value > 0.5, value, torch.tensor(0.5))
    seen = ours({x.uid: value, by_value.uid: 0.25})[y.uid]
    kit.close(seen, base + 2.0 * (value <= 0.5) + 0.25, 1e-6, f"seed {kit.seed}")
    seen = ours({x.uid: value, by_value.uid: torch.tensor([[[0.25]]]), slope.uid: -1.0})[y.uid]
    kit.close(seen, base - 1.0 * (value <= 0.5) + 0.25, 1e-6, f"seed {kit.seed}")
    constants = {t.name: t.value for t in ours.operation_graph().tensors.values() if t.is_constant}
    assert constants["limit"] == 0.5 and "slope" not in constants


POINTWISE = {
    "abs": (lambda g, a, b: g.abs(input=a), lambda a, b: a.abs()),
    "reciprocal": (lambda g, a, b: g.reciprocal(input=a), lambda a, b: 1 / a),
    "relu_clipped": (lambda g, a, b: g.relu(input=a, lower_clip=-0.5, upper_clip=1.0), lambda a, b: a.clamp(-0.5, 1.0)),
    "relu_backward": (lambda g, a, b: g.relu_backward(loss=a, input=b), lambda a, b: a * (b > 0)),
    "sigmoid_backward": (lambda g, a, b: g.sigmoid_backward(loss=a, input=b),
                         lambda a, b: a * torch.sigmoid(b) * (1 - torch.sigmoid(b))),
    "tanh_backward": (lambda g, a, b: g.tanh_backward(loss=a, input=b), lambda a, b: a * (1 - torch.tanh(b) ** 2)),
    "add_square": (lambda g, a, b: g.add_square(a=a, b=b), lambda a, b: a + b * b),
    "swish": (lambda g, a, b: g.swish(input=a, swish_beta=0.5), lambda a, b: a * torch.sigmoid(0.5 * a)),
    "gelu_approx_tanh": (lambda g, a, b: g.gelu_approx_tanh(input=a),
                         lambda a, b: torch.nn.functional.gelu(a, approximate="tanh")),
    "bias": (lambda g, a, b: g.bias(input=a, bias=b), lambda a, b: a + b),
    "max": (lambda g, a, b: g.max(input0=a, input1=b), torch.maximum),
}  # fmt: skip


@pytest.mark.parametrize("mode", POINTWISE)
def test_pointwise_modes(kit, mode):
    g = kit.graph(io_data_type=kit.D.FLOAT)
    a, b = kit.rows(g, "a", 8, kit.D.FLOAT), kit.rows(g, "b", 8, kit.D.FLOAT)
    declare, compute = POINTWISE[mode]
    y = declare(g, a, b).set_output(True)
    left, right = kit.randn(1, kit.M, 8), kit.randn(1, kit.M, 8)
    given = {a.uid: left, b.uid: right}
    ours = Graph.from_cudnn(g, device="cpu")
    read = {t.uid for t in ours.operation_graph().graph_inputs}
    seen = ours({k: v for k, v in given.items() if k in read})[y.uid]
    kit.close(seen, compute(left.double(), right.double()), 1e-6, f"seed {kit.seed}")


def test_bias_by_expert_joins_the_grouped_matmul(kit):
    g = kit.graph()
    x, w, fto = kit.rows(g, "x", kit.K), kit.weights(g, "w", kit.K, kit.I), kit.offsets(g)
    alpha = g.tensor(name="alpha", dim=[kit.L, 1, 1], data_type=kit.D.FLOAT)
    bias = g.tensor(name="bias", dim=[kit.L, 1, kit.I], data_type=kit.D.BFLOAT16)
    r = g.moe_grouped_matmul(x, w, fto, mode=kit.NONE, name="same")
    y = g.add(a=bias, b=g.mul(a=alpha, b=r, name="same"), name="same").set_output(True)
    ours = Graph.from_cudnn(g, device="cpu")
    assert [n.op for n in ours.operation_graph().nodes] == ["grouped_matmul"]
    given = {x.uid: kit.randn(1, kit.M, kit.K).bfloat16(), w.uid: kit.randn(kit.L, kit.I, kit.K).bfloat16(),
             fto.uid: kit.boundaries, alpha.uid: kit.randn(kit.L, 1, 1),
             bias.uid: kit.randn(kit.L, 1, kit.I).bfloat16()}  # fmt: skip
    owner = kit.owner()
    expected = (
        kit.grouped(given[x.uid][0], given[w.uid].transpose(1, 2)) * given[alpha.uid].double().flatten()[owner][:, None]
    )
    kit.close(ours(given)[y.uid], expected + given[bias.uid][owner, 0].double(), 2**-8, f"seed {kit.seed}")


@pytest.mark.parametrize("key, buffer, says", [
    ("x", lambda b: b[:, :100], r"buffer of x; seen shape \(1, 100, 64\); required shape \(1, 512, 64\)"),
    ("first_token_offset", lambda b: b[1:], r"shape \(4, 1, 1\); required 5 boundaries"),
    ("first_token_offset", lambda b: b + 128, "first boundary 128; required boundaries that begin at 0"),
])  # fmt: skip
def test_a_buffer_of_another_shape_is_named(kit, key, buffer, says):
    g = kit.graph()
    x, w, fto = kit.rows(g, "x", kit.K), kit.weights(g, "w", kit.K, kit.I), kit.offsets(g)
    g.moe_grouped_matmul(x, w, fto, mode=kit.NONE).set_output(True)
    given = {"x": kit.randn(1, kit.M, kit.K).bfloat16(), "w": kit.randn(kit.L, kit.I, kit.K).bfloat16(),
             "first_token_offset": kit.boundaries}  # fmt: skip
    with pytest.raises(VariantPackError, match=f"CUDNN_BUFFER.*{says}"):
        Graph.from_cudnn(g, device="cpu")({**given, key: buffer(given[key])})


def test_reading_a_graph_imports_no_cudnn():
    """Any objects with cuDNN's attributes will do."""
    code = """
import sys
from types import SimpleNamespace as S
from opfuse.graph_ops import Graph
def tensor(uid, name, **k):
    return S(**{**dict(uid=uid, name=name, dim=[1, 4, 8], stride=[32, 8, 1], data_type=S(name="FLOAT"),
                       is_virtual=False,
        is_pass_by_value=False, pass_by_value=None, scalar_type=None, ragged_offset=None, reordering_type=None,
        alignment_value=1, stride_assigned=False), **k})
x, y = tensor(1, "x"), tensor(2, "y")
node = S(name="n", node_type=S(name="POINTWISE"), inputs={"IN_0": x}, outputs={"OUT_0": y}, params={"mode": "neg"},
    compute_data_type=S(name="FLOAT"))
g = Graph.from_cudnn(S(nodes=[node], context=S(io_data_type=S(name="FLOAT"), intermediate_data_type=None)),
                     device="cpu")
import torch
print(float(g({1: torch.ones(1, 4, 8)})["y"].sum()),
      [m for m in sys.modules if m.split(".")[0] in ("cudnn", "cutlass")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "-32.0 []", done.stdout + done.stderr


REDUCTIONS = {
    "ADD": lambda x, d: x.sum(d, keepdim=True),
    "MIN": lambda x, d: x.amin(d, keepdim=True),
    "MAX": lambda x, d: x.amax(d, keepdim=True),
    "AMAX": lambda x, d: x.abs().amax(d, keepdim=True),
    "AVG": lambda x, d: x.mean(d, keepdim=True),
    "NORM1": lambda x, d: x.abs().sum(d, keepdim=True),
    "NORM2": lambda x, d: (x * x).sum(d, keepdim=True).sqrt(),
}


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("axes", [(2,), (1,), (1, 2)])
def test_reductions_by_the_dim_of_their_output(kit, mode, axes):
    g = kit.graph(io_data_type=kit.D.FLOAT)
    x = kit.rows(g, "x", 8, kit.D.FLOAT)
    y = g.reduction(input=x, mode=getattr(kit.cudnn.reduction_mode, mode))
    y.set_dim([1 if i in axes else d for i, d in enumerate(x.dim)]).set_output(True)
    value = kit.randn(1, kit.M, 8) + 1  # a sum near zero would have no relative error to speak of
    seen = Graph.from_cudnn(g, device="cpu")({x.uid: value})[y.uid]
    assert list(seen.shape) == list(y.dim)
    kit.close(seen, REDUCTIONS[mode](value.double(), axes), 1e-5, f"seed {kit.seed}")


def test_names_that_repeat_are_told_apart_by_uid(kit):
    g = kit.graph(io_data_type=kit.D.FLOAT)
    x = kit.rows(g, "x", 8, kit.D.FLOAT)
    one, two = g.neg(input=x).set_name("y").set_output(True), g.exp(input=x).set_name("y").set_output(True)
    value = kit.randn(1, kit.M, 8)
    out = Graph.from_cudnn(g, device="cpu")({x: value})
    assert torch.equal(out[one.uid], -value) and torch.allclose(out[two.uid], value.exp())
