"""The graph of a grouped dGLU call: what of the call decides it, how it is declared, and which buffer is whose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..graph import Graph
from ..ir.dims import ceil_div
from ..ir.dtypes import DataType
from ..ir.layouts import GluLayout, ScaleLayout
from ..scales import from_atom_view
from .common import FP8_TYPES, data_type, matrix, rows
from .dglu_surface import activation_parameters
from .surface import ROW_MULTIPLE, Call, weights

NAME = "grouped_gemm_dglu"
LAYOUT = GluLayout.interleaved(32)


@dataclass(frozen=True)
class DgluConfig:
    """Everything that decides the graph of a call; M is left to its buffers."""

    device: str
    depth: int
    columns: int
    experts: int
    a_type: DataType
    b_major: str
    discrete: bool
    scale: DataType | None
    block: int
    c_type: DataType
    d_type: DataType
    quantized: bool
    optional: frozenset[str]  # operands that are there: alpha, beta, prob, dprob, dbias, amax, activation
    act: str
    parameters: tuple[tuple[str, float], ...]
    epilogue: str
    rounds_product: bool
    deterministic: bool


def build(config: DgluConfig) -> Graph:
    """The graph of a configuration, declared; inputs and outputs are named as below."""
    f = DataType.FLOAT
    depth, columns, experts = config.depth, config.columns, config.experts
    g = Graph(name=NAME, device=config.device, deterministic=config.deterministic)
    m = g.symbol("M", multiple_of=ROW_MULTIPLE)
    step = (1, depth) if config.b_major == "k" else (columns, 1)
    a = g.tensor("a", dim=(m, depth), data_type=config.a_type)
    b = g.tensor("b", dim=(experts, depth, columns), stride=(depth * columns, *step), data_type=config.a_type,
                 discrete=config.discrete)  # fmt: skip
    offsets = g.tensor("offsets", dim=(experts,), data_type=DataType.INT32, multiple_of=ROW_MULTIPLE)
    c = g.tensor("c", dim=(m, 2 * columns), data_type=config.c_type, glu_layout=LAYOUT)
    alpha, beta = (
        g.tensor(n, dim=(experts,), data_type=f) if n in config.optional else None for n in ("alpha", "beta")
    )
    prob = g.tensor("prob", dim=(m,), data_type=f) if "prob" in config.optional else None
    if config.scale is not None:
        a, b = dequantized_operands(g, a, b, config.block, config.scale)
    r = g.grouped_matmul(a, b, offsets, alpha=alpha, alpha_exponent=2 if alpha is not None else 1)
    if config.rounds_product:
        r.set_data_type(DataType.BFLOAT16)
    parameters: dict[str, Any] = dict(config.parameters)
    dx, dprob, *activation = g.glu_backward(
        r, c, act=config.act.removeprefix("d"), prob=prob, beta=beta, offsets=None if beta is None else offsets,
        recompute="activation" in config.optional, **parameters,
    )  # fmt: skip
    if "dprob" in config.optional:
        dprob.set_name("dprob").set_output(True)
    for t in activation:
        t.set_name("activation").set_output(True).set_data_type(DataType.BFLOAT16)
    d = {"relu": g.relu, "srelu": g.srelu}[config.epilogue](dx) if config.epilogue else dx
    if config.quantized:
        norm_const = g.tensor("norm_const", dim=(1,), data_type=f)
        assert config.scale is not None
        for side, axis in (("row", 1), ("col", 0)):
            codes, scale = g.block_scale_quantize(d, block_size=config.block, axis=axis, data_type=config.d_type,
                                                  scale_type=config.scale, norm_const=norm_const)  # fmt: skip
            codes.set_name(f"d_{side}").set_output(True)
            scale.set_name(f"sfd_{side}").set_output(True)
    else:
        rounded_copy(g, d, config.d_type, bool(config.optional & {"dbias", "amax"})).set_name("d_row").set_output(True)
    if "dbias" in config.optional:
        g.group_sum(d, offsets).set_name("dbias").set_output(True).set_data_type(DataType.BFLOAT16)
    if "amax" in config.optional:
        g.group_amax(d, offsets, split_glu=True).set_name("amax").set_output(True)
    return g


def rounded_copy(g: Graph, d: Any, data_type: DataType, unrounded: bool) -> Any:
    """`d` in `data_type`: itself, or where something reads it `unrounded`, as NVIDIA's kernels do, a copy."""
    return (g.identity(d) if unrounded and data_type is not DataType.FLOAT else d).set_data_type(data_type)


def dequantized_operands(g: Graph, a: Any, b: Any, block: int, scale: DataType) -> tuple[Any, Any]:
    """Codes of A (M, K) and B (L, K, N) -> their values, virtual BFLOAT16, in which code times scale is exact."""
    by_row, by_column = ScaleLayout(block, axis=1), ScaleLayout(block, axis=0)
    sfa = g.tensor("sfa", dim=by_row.storage(a.dim), data_type=scale, scale_layout=by_row)
    experts, depth, columns = b.dim
    sfb = g.tensor("sfb", dim=(experts, *by_column.storage((depth, columns))), data_type=scale, scale_layout=by_column,
                   discrete=b.spec().discrete)  # fmt: skip
    values = g.block_scale_dequantize(b, sfb).set_data_type(DataType.BFLOAT16).set_stride(b.stride)
    return g.block_scale_dequantize(a, sfa).set_data_type(DataType.BFLOAT16), values


def configure(call: Call, outputs: frozenset[str]) -> DgluConfig:
    """The configuration of a call that passed `check`. `outputs`: those wanted of dprob, dbias, amax, activation."""
    options, act = call.options, call.options["act_func"]
    reads_beta = "beta" in call and not (call.block_scaled and act == "dgeglu")
    inputs = {n for n in ("alpha", "prob") if n in call} | ({"beta"} if reads_beta else set())
    assert call.b_major is not None
    return DgluConfig(
        device=str(call["a"].device),
        depth=call.depth,
        columns=call.columns,
        experts=call.experts,
        a_type=data_type(call["a"].dtype),
        b_major=call.b_major,
        discrete=call.discrete,
        scale=data_type(call["sfa"].dtype) if call.block_scaled else None,
        block=call.block_size,
        c_type=DataType.BFLOAT16 if call["c"].dtype in FP8_TYPES else data_type(call["c"].dtype),
        d_type=data_type(call.d_dtype),
        quantized=call.quantized,
        optional=outputs | inputs,
        act=act,
        parameters=tuple(activation_parameters(options).items()),
        epilogue=options["epilogue_op"] if options["epilogue_op"] in ("relu", "srelu") else "",
        rounds_product=options["round_dgrad_to_input_dtype"],
        deterministic=options["deterministic"],
    )


def pack(call: Call, config: DgluConfig) -> dict[str, Any]:
    """The variant pack of a call's inputs: views of the caller's tensors, C converted where it is FP8 (exactly)."""
    depth_blocks = ceil_div(call.depth, config.block)
    assert isinstance(depth_blocks, int)
    offsets = call["padded_offsets"]
    if call.options["use_single_group_runtime_offsets"]:
        offsets = torch.full_like(offsets, call.rows)
    c = matrix(call["c"])
    given = {
        "a": matrix(call["a"]),
        "b": call["b_ptrs"] if call.discrete else weights(call["b"], call.options["b_major"]),
        "offsets": offsets,
        "c": c.to(torch.bfloat16) if c.dtype in FP8_TYPES else c,
        **{n: call[n] for n in ("alpha", "beta") if n in config.optional},
        **({"prob": rows(call["prob"])} if "prob" in config.optional else {}),
    }
    if config.scale is not None:
        given["sfa"] = from_atom_view(call["sfa"], call.rows, depth_blocks)
        given["sfb"] = call["sfb_ptrs"] if call.discrete else from_atom_view(
            call["sfb"], call.columns, depth_blocks, call.experts)  # fmt: skip
    return {**given, "norm_const": call["norm_const"]} if config.quantized else given


__all__ = ["LAYOUT", "NAME", "DgluConfig", "build", "configure", "dequantized_operands", "pack", "rounded_copy"]
