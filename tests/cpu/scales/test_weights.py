"""Block-scaled weights of L experts: dequantized matrix by matrix, dense or discrete, FP4 packed along either axis."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import DataType, Graph, GraphError, ScaleLayout, VerificationError
from opfuse.kernels import reference

FORMATS = {
    "mxfp8": (DataType.FP8_E4M3, DataType.FP8_E8M0, 32),
    "mxfp8_e5m2": (DataType.FP8_E5M2, DataType.FP8_E8M0, 32),
    "nvfp4": (DataType.FP4_E2M1, DataType.FP8_E4M3, 16),
    "mxfp4": (DataType.FP4_E2M1, DataType.FP8_E8M0, 32),
}


def quantized(rows: torch.Tensor, codes: DataType, scale: DataType, block: int):
    """(N, K) -> codes (N, K or K/2), swizzled scales, and the values that they stand for (N, K) in float64."""
    byte, scales = reference.quantize.quantize_blocks(rows, block, codes, scale)
    each = scales.repeat_interleave(block, dim=1)[:, : rows.shape[1]]
    values = reference.decode(byte, codes) * reference.decode_scale(each, scale)
    stored = reference.pack_fp4(byte) if codes is DataType.FP4_E2M1 else byte.view(reference.torch_type(codes))
    return stored, reference.swizzle_scales(scales).view(reference.torch_type(scale)), values


def weights_graph(codes: DataType, scale: DataType, block: int, dim: tuple[int, int, int], discrete: bool):
    experts, k, n = dim
    layout = ScaleLayout(block, axis=0)
    g = Graph(device="cpu", name="weights")
    x = g.tensor("x", dim=dim, stride=(k * n, 1, k), data_type=codes, discrete=discrete, alignment=1)
    sf = g.tensor("sf", dim=(experts, *layout.storage((k, n))), data_type=scale, scale_layout=layout, discrete=discrete)
    g.block_scale_dequantize(x, sf, name="deq").set_output(True).set_name("y").set_data_type(DataType.FLOAT)
    return g


@pytest.mark.parametrize("form", ["dense", "tensors", "addresses"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k, n", [(64, 32), (96, 130), (160, 7)])
def test_k_major_weights_dequantize_matrix_by_matrix(name, form, k, n, seed):
    codes, scale, block = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    made = [quantized(torch.randn(n, k, generator=generator) * 3, codes, scale, block) for _ in range(3)]
    stored, scales = torch.stack([m[0] for m in made]), torch.stack([m[1].view(torch.uint8) for m in made])
    scales = scales.view(made[0][1].dtype)
    expected = torch.stack([m[2].T for m in made])
    pack = {
        "dense": {"x": stored.transpose(1, 2), "sf": scales},
        "tensors": {"x": [s.T for s in stored], "sf": list(scales)},
        "addresses": {
            "x": torch.tensor([s.data_ptr() for s in stored]),
            "sf": torch.tensor([s.data_ptr() for s in scales]),
        },
    }[form]
    y = weights_graph(codes, scale, block, (3, k, n), form != "dense")(pack)["y"]
    assert torch.equal(y.double(), expected), f"seed {seed}"


def test_the_oracle_reads_packed_weights_alike(seed):
    codes, scale, block = FORMATS["nvfp4"]
    generator = torch.Generator().manual_seed(seed)
    made = [quantized(torch.randn(24, 64, generator=generator), codes, scale, block) for _ in range(2)]
    g = weights_graph(codes, scale, block, (2, 64, 24), discrete=True)
    graph = g.operation_graph()
    x, sf, y = (g.find_tensor(name).uid for name in ("x", "sf", "y"))
    produced = reference.evaluate_graph(graph, {x: [m[0].T for m in made], sf: [m[1] for m in made]})[y]
    assert torch.equal(produced.double(), torch.stack([m[2].T for m in made])), f"seed {seed}"


def test_n_major_fp8_weights(seed):
    codes, scale, block = FORMATS["mxfp8"]
    generator = torch.Generator().manual_seed(seed)
    made = [quantized(torch.randn(40, 64, generator=generator), codes, scale, block) for _ in range(2)]
    layout = ScaleLayout(block, axis=0)
    g = Graph(device="cpu")
    x = g.tensor("x", dim=(2, 64, 40), data_type=codes)
    sf = g.tensor("sf", dim=(2, *layout.storage((64, 40))), data_type=scale, scale_layout=layout)
    g.block_scale_dequantize(x, sf).set_output(True).set_name("y").set_data_type(DataType.FLOAT)
    stored = torch.stack([m[0].view(torch.uint8).T.contiguous() for m in made]).view(torch.float8_e4m3fn)
    scales = torch.stack([m[1].view(torch.uint8) for m in made]).view(torch.float8_e8m0fnu)
    assert torch.equal(g({"x": stored, "sf": scales})["y"].double(), torch.stack([m[2].T for m in made])), (
        f"seed {seed}"
    )


def test_codes_and_scales_are_discrete_together():
    layout = ScaleLayout(32, axis=0)
    g = Graph(device="cpu")
    x = g.tensor("x", dim=(2, 64, 32), stride=(2048, 1, 64), data_type=DataType.FP8_E4M3, discrete=True)
    sf = g.tensor("sf", dim=(2, *layout.storage((64, 32))), data_type=DataType.FP8_E8M0, scale_layout=layout)
    with pytest.raises(GraphError, match="DISCRETE"):
        g.block_scale_dequantize(x, sf)


@pytest.mark.parametrize(
    "dim, stride", [((2, 33, 32), (1056, 1, 33)), ((2, 32, 33), (1056, 33, 1)), ((2, 32, 32), (1024, 32, 2))]
)
def test_packed_weights_need_whole_bytes(dim, stride):
    layout = ScaleLayout(16, axis=0)
    g = Graph(device="cpu")
    x = g.tensor("x", dim=dim, stride=stride, data_type=DataType.FP4_E2M1)
    sf = g.tensor("sf", dim=(2, *layout.storage(dim[1:])), data_type=DataType.FP8_E4M3, scale_layout=layout)
    g.block_scale_dequantize(x, sf).set_output(True)
    with pytest.raises(VerificationError, match="PACKING"):
        g.validate()
