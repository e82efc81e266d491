"""The unfused ops on a GPU: numbers and bytes as the oracle has them, no host reads, capturable, repeatable."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from opfuse.graph_ops.ir.dtypes import DATA_TYPES, DataType
from opfuse.graph_ops.ir.layouts import GluLayout, ScaleLayout
from opfuse.graph_ops.ir.nodes.quantize import BLOCK_FORMATS
from opfuse.graph_ops.ir.op import InferenceInput
from opfuse.graph_ops.ir.ops import OPS
from opfuse.graph_ops.ir.tensor import TensorSpec, contiguous_stride
from opfuse.kernels import torch_ops
from opfuse.kernels.reference import evaluate, torch_type

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SPLITS = [
    (64, 64, 64, 64),
    (0, 48, 16, 32),
    (32, 0, 0, 48),
    (16, 64, 16, 0),
    (0, 0, 0, 0),
    (7, 41, 1, 30),
    (0, 197, 0, 0),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
K, N, SLACK = 64, 96, 11
FORMATS = [(f.name, codes, f.block_size, f.scale) for f in BLOCK_FORMATS for codes in f.codes]
LAYOUT = GluLayout.interleaved(32)


def data_type_of(tensor: torch.Tensor) -> DataType:
    name = str(tensor.dtype).removeprefix("torch.")
    return next(t for t, info in DATA_TYPES.items() if info.torch_name == name and info.packed == 1)


class Case:
    """One op on the GPU, and what the oracle says about the same inputs on the CPU."""

    def __init__(self, op, inputs, attributes=None, *, layouts=None, types=None, out_types=None, initial=None):
        self.op, self.inputs, self.initial = op, inputs, initial or {}
        self.attributes = OPS[op].complete(attributes or {})
        self.specs = {p: self._spec(p, v, (layouts or {}).get(p), (types or {}).get(p)) for p, v in inputs.items()}
        inferred = OPS[op].infer({p: InferenceInput.of(t) for p, t in self.specs.items()}, self.attributes)
        for port, result in inferred.items():
            given = (out_types or {}).get(port)
            chosen = given or result.data_type or OPS[op].output(port).default_type or DataType.FLOAT
            self.specs[port] = TensorSpec(
                0, port, result.dim, contiguous_stride(result.dim), chosen, is_output=True,
                glu_layout=result.glu_layout, scale_layout=result.scale_layout,
            )  # fmt: skip
        self.ports = list(inferred)

    @staticmethod
    def _spec(port, value, layout, data_type):
        if isinstance(value, list):
            return TensorSpec(0, port, (len(value), *value[0].shape), (0, *value[0].stride()), data_type_of(value[0]),
                              discrete=True)  # fmt: skip
        chosen = data_type or data_type_of(value)
        dim = (*value.shape[:-1], value.shape[-1] * chosen.info.packed)
        return TensorSpec(0, port, dim, tuple(value.stride()), chosen,
                          glu_layout=layout if isinstance(layout, GluLayout) else None,
                          scale_layout=layout if isinstance(layout, ScaleLayout) else None)  # fmt: skip

    def outputs(self):
        """Poisoned outputs."""
        found = {}
        for port in self.ports:
            spec = self.specs[port]
            shape = spec.shape({})
            shape = (*shape[:-1], shape[-1] // spec.data_type.info.packed)
            dtype = torch_type(spec.data_type)
            found[port] = torch.full(shape, 0xFF if dtype.itemsize == 1 else 0, dtype=torch.uint8, device="cuda").view(
                dtype) if dtype.itemsize == 1 else torch.full(shape, math.nan, dtype=dtype, device="cuda")  # fmt: skip
            if port in self.initial:
                found[port].copy_(self.initial[port])
        return found

    def run(self, outputs=None):
        outputs = outputs or self.outputs()
        torch_ops.run(self.op, self.inputs, outputs, self.attributes, self.specs)
        return outputs

    def oracle(self):
        cpu = {
            p: [m.cpu() for m in v] if isinstance(v, list) else v.cpu()
            for p, v in {**self.inputs, **self.initial}.items()
        }
        return evaluate(self.op, cpu, self.attributes, self.specs)


@pytest.fixture
def draw() -> Iterator[torch.Generator]:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    yield torch.Generator("cuda").manual_seed(seed)


def normal(draw, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=draw, device="cuda").to(dtype)


def scalars(draw, count):
    cycle = torch.tensor([(-1.5, 0.5, 2.0, 0.0)[i % 4] for i in range(count)], device="cuda")
    return cycle[torch.randperm(count, generator=draw, device="cuda")]


def offsets_of(split):
    return torch.tensor(split).cumsum(0).to(torch.int32).cuda()


def assert_close(out, want, dtype):
    """Half a unit in the last place of the output's type, and float32 noise."""
    got, want = out.cpu().double(), want.cpu()
    unit = torch.finfo(dtype).eps
    scale = want.abs().max().clamp(min=1)
    assert ((got - want).abs() <= 0.51 * unit * want.abs() + 2e-6 * scale).all(), (got - want).abs().max()


def assert_bytes(out, want):
    assert torch.equal(out.cpu().contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def weights(draw, dtype, k_major):
    return normal(draw, 4, N, K, dtype=dtype).transpose(1, 2) if k_major else normal(draw, 4, K, N, dtype=dtype)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k_major", [False, True], ids=["n_major", "k_major"])
def test_grouped_matmul(draw, split, dtype, k_major):
    a, b, offsets = normal(draw, sum(split) + SLACK, K, dtype=dtype), weights(draw, dtype, k_major), offsets_of(split)
    a[sum(split) :] = math.nan
    extra = {"alpha": scalars(draw, 4), "bias": normal(draw, 4, N, dtype=dtype)}
    for more in ({}, extra):
        for out_type in {data_type_of(a), DataType.FLOAT}:
            case = Case("grouped_matmul", {"a": a, "b": b, "offsets": offsets, **more}, {"alpha_exponent": 2},
                        out_types={"y": out_type})  # fmt: skip
            y = case.run()["y"]
            assert_close(y, case.oracle()["y"], y.dtype)
            assert (y[sum(split) :] == 0).all()


@pytest.mark.parametrize("k_major", [False, True], ids=["n_major", "k_major"])
def test_discrete_weights(draw, k_major):
    a, b, offsets = (
        normal(draw, 90, K, dtype=torch.bfloat16),
        weights(draw, torch.bfloat16, k_major),
        offsets_of(SPLITS[5]),
    )
    dense = Case("grouped_matmul", {"a": a, "b": b, "offsets": offsets}).run()["y"]
    case = Case("grouped_matmul", {"a": a, "b": [m.clone() for m in b], "offsets": offsets})
    assert torch.equal(case.run()["y"], dense)
    kept = case.inputs["b"]
    case.inputs["b"] = torch.tensor([m.data_ptr() for m in kept], dtype=torch.int64, device="cuda")
    assert torch.equal(case.run()["y"], dense)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_wgrad(draw, split, dtype, accumulate):
    a, dy = (normal(draw, sum(split) + SLACK, c, dtype=dtype) for c in (K, N))
    for out_type in {data_type_of(a), DataType.FLOAT}:
        initial = {"dw": normal(draw, 4, K, N, dtype=torch_type(out_type))} if accumulate else None
        inputs = {"a": a, "dy": dy, "offsets": offsets_of(split)}
        case = Case(
            "grouped_matmul_wgrad", inputs, {"accumulate": accumulate}, out_types={"dw": out_type}, initial=initial
        )
        dw = case.run()["dw"]
        assert_close(dw, case.oracle()["dw"], dw.dtype)
        assert all(size or (dw[g] == (initial["dw"][g] if initial else 0)).all() for g, size in enumerate(split))


def test_grouped_mm_serves_the_usual_case(draw):
    a, b = normal(draw, 256, K, dtype=torch.bfloat16), weights(draw, torch.bfloat16, True)
    capability = torch.cuda.get_device_capability()
    if capability[0] not in (9, 10):
        pytest.skip(f"grouped_mm reads offsets on the host on {capability}")
    assert torch_ops.grouped_mm_obstacles([a], b, torch.bfloat16, capability) == ()


@pytest.mark.parametrize("act", ["swiglu", "geglu", "situglu"])
@pytest.mark.parametrize("layout", [LAYOUT, GluLayout.interleaved(1), GluLayout.concatenated()], ids=str)
def test_glu_and_its_derivative(draw, act, layout):
    for dtype in DTYPES:
        x, dy, split = normal(draw, 70, 128, dtype=dtype), normal(draw, 70, 64, dtype=dtype), (20, 0, 40, 3)
        prob, beta = scalars(draw, 70), scalars(draw, 4)
        types = {p: data_type_of(x) for p in ("y", "dx", "activation")}
        more = {"clamp_max": 1.1, "clamp_min": -0.8} if act == "geglu" else {}
        for op, inputs, extra in (
            ("glu", {"x": x, "prob": prob}, {}),
            ("glu_backward", {"dy": dy, "x": x, "prob": prob}, {}),
            ("glu_backward", {"dy": dy, "x": x, "beta": beta, "offsets": offsets_of(split)}, {"recompute": True}),
        ):
            case = Case(op, inputs, {"act": act, **more, **extra}, layouts={"x": layout}, out_types=types)
            want = case.oracle()
            for port, out in case.run().items():
                assert_close(out, want[port], out.dtype)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_group_reductions(draw, split):
    for dtype in DTYPES:
        x = normal(draw, sum(split) + SLACK, 128, dtype=dtype)
        x[sum(split) :] = math.nan
        if split[1] > 5:
            x[split[0] + 3, 2] = math.nan
        inputs = {"x": x, "offsets": offsets_of(split)}
        for op, attributes in (("group_sum", {}), ("group_amax", {}), ("group_amax", {"split_glu": True})):
            case = Case(op, inputs, attributes, layouts={"x": LAYOUT})
            got, want = case.run()["y"].cpu(), case.oracle()["y"]
            assert torch.equal(got.isnan(), want.isnan())
            assert_close(torch.nan_to_num(got), torch.nan_to_num(want), torch.float32)


def special(block):
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    firsts = [0.0, -0.0, 1e-45, 1e-40, -tiny, tiny * 3, huge, -huge, math.inf, -math.inf, math.nan]
    for power in (-127, -126, -30, -9, 0, 1, 9, 30, 126, 127):
        for largest in (1.0, 448.0, 57344.0, 6.0):
            value = torch.tensor(largest * 2.0**power, dtype=torch.float32)
            firsts += [float(torch.nextafter(value, torch.tensor(limit))) for limit in (0.0, math.inf)] + [float(value)]
    rows = torch.zeros(len(firsts) + len(firsts) % 2, block)
    rows[: len(firsts), 3] = torch.tensor(firsts)
    filled = rows.clone()
    filled[:, 4:] = torch.where(rows[:, 3:4].isfinite(), rows[:, 3:4], torch.ones(1)) * torch.linspace(-1, 1, block - 4)
    return torch.cat([rows, filled])


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_quantize_is_byte_for_byte_the_reference(draw, form, axis):
    _, codes, block, scale = form
    exponent = torch.randint(-24, 20, (150, 94), generator=draw, device="cuda")
    wide = torch.ldexp(normal(draw, 150, 94), exponent)
    edge = special(block).cuda()
    for x in (wide, wide.bfloat16(), edge.T.contiguous() if axis == 0 else edge):
        for swizzled, norm in ((True, None), (False, 1.7), (True, -1.5)):
            inputs = {"x": x} if norm is None else {"x": x, "norm_const": torch.tensor([norm], device="cuda")}
            attributes = {"block_size": block, "axis": axis, "data_type": codes.value, "scale_type": scale.value,
                          "swizzled": swizzled}  # fmt: skip
            case = Case("block_scale_quantize", inputs, attributes)
            got, want = case.run(), case.oracle()
            for port in got:
                assert_bytes(got[port], want[port])
            back = Case(
                "block_scale_dequantize", {"x": got["y"], "scale": got["scale"]}, types={"x": codes, "scale": scale},
                layouts={"scale": ScaleLayout(block, axis, swizzled)},
            )  # fmt: skip
            y, said = back.run()["y"].cpu(), back.oracle()["y"].float()
            assert torch.equal(y.isnan(), said.isnan()) and torch.equal(y[~y.isnan()], said[~said.isnan()])


@pytest.mark.parametrize("op", [n for n in OPS if [p.name for p in OPS[n].inputs] in (["a", "b"], ["x"], ["dy", "x"])
                                and n not in ("convert_glu_layout", "split_glu", "glu", "reduction")])  # fmt: skip
def test_pointwise(draw, op):
    for dtype in DTYPES:
        values = [normal(draw, 33, 65, dtype=dtype).abs() + 0.25 for _ in OPS[op].inputs]
        inputs = {p.name: v for p, v in zip(OPS[op].inputs, values, strict=True)}
        case = Case(op, inputs, out_types=None if op.startswith("cmp") else {"y": data_type_of(values[0])})
        y, want = case.run()["y"], case.oracle()["y"]
        assert torch.equal(y.cpu(), want) if op.startswith("cmp") else assert_close(y, want, y.dtype) is None


def capturable_cases(draw):
    split = (40, 0, 60, 20)
    rows = sum(split) + 8
    offsets = offsets_of(split)
    bf16 = {"dtype": torch.bfloat16}
    a, b, dy, x = (
        normal(draw, rows, K, **bf16),
        weights(draw, torch.bfloat16, True),
        normal(draw, rows, N, **bf16),
        None,
    )
    x = normal(draw, rows, 2 * N, **bf16)
    quantize = {"block_size": 32, "data_type": "FP8_E4M3"}
    narrow = {"y": DataType.BFLOAT16, "dw": DataType.BFLOAT16}
    return offsets, {
        "grouped_mm": Case("grouped_matmul", {"a": a, "b": b, "offsets": offsets}, out_types=narrow),
        "tiled": Case("grouped_matmul", {"a": a, "b": b, "offsets": offsets, "alpha": scalars(draw, 4)}),
        "wgrad": Case("grouped_matmul_wgrad", {"a": a, "dy": dy, "offsets": offsets}, out_types=narrow),
        "wgrad_float": Case("grouped_matmul_wgrad", {"a": a, "dy": dy, "offsets": offsets}),
        "glu": Case("glu", {"x": x, "prob": scalars(draw, rows)}, {"act": "swiglu"}, layouts={"x": LAYOUT}),
        "glu_backward": Case("glu_backward", {"dy": dy, "x": x, "beta": scalars(draw, 4), "offsets": offsets},
                             {"act": "geglu"}, layouts={"x": LAYOUT}),
        "group_sum": Case("group_sum", {"x": x, "offsets": offsets}),
        "group_amax": Case("group_amax", {"x": x, "offsets": offsets}),
        "quantize_row": Case("block_scale_quantize", {"x": x}, {**quantize, "axis": 1}),
        "quantize_col": Case("block_scale_quantize", {"x": x}, {**quantize, "axis": 0}),
        "reduction": Case("reduction", {"x": x}, {"mode": "MUL", "axis": (1,)}),
        "swish": Case("swish", {"x": x}),
    }  # fmt: skip


CAPTURED = ["grouped_mm", "tiled", "wgrad", "wgrad_float", "glu", "glu_backward", "group_sum", "group_amax",
            "quantize_row", "quantize_col", "reduction", "swish"]  # fmt: skip


@pytest.mark.parametrize("name", CAPTURED)
def test_no_host_read_capture_and_replay_with_other_offsets(draw, name):
    offsets, cases = capturable_cases(draw)
    case = cases[name]
    outputs = case.run()  # warms libraries and allocator
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(outputs)
    for split in ((40, 0, 60, 20), (0, 0, 0, 0), (1, 119, 0, 8), (128, 0, 0, 0)):
        offsets.copy_(offsets_of(split))
        graph.replay()
        again = case.run()
        want = case.oracle()
        for port, out in outputs.items():
            assert_bytes(out, again[port].cpu())
            if out.dtype.itemsize > 1:
                assert_close(out, want[port], out.dtype)


@pytest.mark.parametrize("name", CAPTURED)
def test_the_same_bits_every_time(draw, name):
    case = capturable_cases(draw)[1][name]
    first = case.run()
    for _ in range(10):
        for port, out in case.run().items():
            assert_bytes(out, first[port].cpu())


def test_tf32_does_not_creep_in(draw):
    a, b, offsets = normal(draw, 512, 512), normal(draw, 4, 512, 256), offsets_of((128, 100, 200, 84))
    case = Case("grouped_matmul", {"a": a, "b": b, "offsets": offsets})
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert (case.run()["y"].cpu() - case.oracle()["y"]).abs().max() < 2e-4
    finally:
        torch.set_float32_matmul_precision(before)
