"""Discrete grouped GEMM + SwiGLU/GeGLU under NVIDIA's names: cudnn-frontend 1.32's call, on a Graph, on every device.

`discrete_grouped_gemm_swiglu_wrapper(...)` and `DiscreteGroupedGemmSwiglu(...)` take the arguments of
`cudnn.discrete_grouped_gemm_swiglu_wrapper_sm100` and `cudnn.DiscreteGroupedGemmSwigluSm100` and compute

    C = alpha[g] * A B[g]^T (+ bias[g]);  D = prob * up * swish(gate), gate and up the 32-wide column blocks of C

- The activation reads C unrounded (float32), as NVIDIA's kernel does; `c_tensor` holds C rounded to its type, without a
  scale where that is FP8 or FP4.
- FP8 operands in the wrapper, and the three scale arguments in the class, ask for scales: a D of codes is quantized,
  a wider D is the value divided by its block's scale, `D * norm_const / SFD` with SFD = norm_const * max|D|.
- A D without scales has no column form: the wrapper gives None, the class copies D into a `d_col_tensor`.
- `amax_tensor` of the class is raised to the maxima (start it at zero or -inf); an empty expert adds nothing.
- `prob_tensor` None is a factor of one. Rows outside every group are zero.

Raises UnsupportedCall, with every reason, for a call outside the documented contract.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.condition import Reason
from ...kernels.reference.codes import encode, pack_fp4
from ...kernels.torch_ops.quantize import decode_e8m0, encode_e8m0
from ..graph import Graph
from ..ir.dims import ceil_div
from ..ir.dtypes import DataType
from ..ir.errors import StateError
from ..scales import from_atom_view, pack_columns_by_expert, swizzle, to_atom_view
from .common import FP4_STORAGE, FP8_TYPES, GraphCache, TupleDict, column_view, data_type, matrix, on_stream, rows
from .dglu_graph import LAYOUT, dequantized_operands, rounded_copy
from .dglu_surface import activation_parameters
from .discrete_swiglu_surface import DISCRETE_SWIGLU
from .surface import FP8, HALF_TYPES, ROW_MULTIPLE, Call, check, idle_options, read_call, refuse, require_tensors

NAME = "discrete_grouped_gemm_swiglu"

log = logging.getLogger("opfuse.api")


@dataclass(frozen=True)
class SwigluConfig:
    """Everything that decides the graph of a call; M is left to its buffers."""

    device: str
    depth: int
    columns: int
    experts: int
    a_type: DataType
    b_major: str
    scale: DataType
    block: int
    c_type: DataType
    d_type: DataType
    scaled: bool
    optional: frozenset[str]  # of alpha, bias, prob, amax
    bias_type: DataType | None
    act: str
    parameters: tuple[tuple[str, float], ...]

    @property
    def quantized(self) -> bool:
        """D comes as codes."""
        return self.d_type.info.kind == "code"

    @property
    def normalized(self) -> bool:
        """D comes divided by its scales, in a type that is no code."""
        return self.scaled and not self.quantized


CACHE: GraphCache[SwigluConfig] = GraphCache(limit=64)
"""Graphs of the wrapper, by configuration."""


def build(config: SwigluConfig) -> Graph:
    """The graph of a configuration, declared; inputs and outputs are named as below."""
    f = DataType.FLOAT
    depth, columns, experts = config.depth, config.columns, config.experts
    g = Graph(name=NAME, device=config.device)
    m = g.symbol("M", multiple_of=ROW_MULTIPLE)
    step = (1, depth) if config.b_major == "k" else (columns, 1)
    a = g.tensor("a", dim=(m, depth), data_type=config.a_type)
    b = g.tensor("b", dim=(experts, depth, columns), stride=(depth * columns, *step), data_type=config.a_type,
                 discrete=True, glu_layout=LAYOUT)  # fmt: skip
    offsets = g.tensor("offsets", dim=(experts,), data_type=DataType.INT32, multiple_of=ROW_MULTIPLE)
    alpha = g.tensor("alpha", dim=(experts,), data_type=f) if "alpha" in config.optional else None
    prob = g.tensor("prob", dim=(m,), data_type=f) if "prob" in config.optional else None
    bias = None
    if config.bias_type is not None:
        bias = g.tensor("bias", dim=(experts, columns), data_type=config.bias_type)
    a, b = dequantized_operands(g, a, b, config.block, config.scale)
    product = g.grouped_matmul(a, b, offsets, alpha=alpha, bias=bias)
    wide = config.c_type in (DataType.BFLOAT16, DataType.HALF)
    c = g.identity(product).set_data_type(config.c_type) if wide else product.set_data_type(f)
    c.set_name("c").set_output(True)
    parameters: dict[str, Any] = dict(config.parameters)
    d = g.glu(product, act=config.act, prob=prob, **parameters)
    if config.quantized:
        norm_const = g.tensor("norm_const", dim=(1,), data_type=f)
        for side, axis in (("row", 1), ("col", 0)):
            codes, scale = g.block_scale_quantize(d, block_size=config.block, axis=axis, data_type=config.d_type,
                                                  scale_type=config.scale, norm_const=norm_const)  # fmt: skip
            codes.set_name(f"d_{side}").set_output(True)
            scale.set_name(f"sfd_{side}").set_output(True)
    else:
        stored = f if config.normalized else config.d_type
        rounded_copy(g, d, stored, "amax" in config.optional).set_name("d_row").set_output(True)
    if "amax" in config.optional:
        g.group_amax(d, offsets).set_name("amax").set_output(True)
    return g


def configure(call: Call, *, amax: bool, scaled: bool) -> SwigluConfig:
    """The configuration of a call that passed `check`."""
    options = call.options
    assert call.b_major is not None
    return SwigluConfig(
        device=str(call["a"].device),
        depth=call.depth,
        columns=call.columns,
        experts=call.experts,
        a_type=data_type(call["a"].dtype),
        b_major=call.b_major,
        scale=data_type(call["sfa"].dtype),
        block=call.block_size,
        c_type=data_type(options["c_dtype"]),
        d_type=data_type(call.d_dtype),
        scaled=scaled,
        optional=frozenset({n for n in ("alpha", "prob") if n in call} | ({"amax"} if amax else set())),
        bias_type=data_type(call["bias"].dtype) if "bias" in call else None,
        act=options["act_func"],
        parameters=tuple(activation_parameters(options).items()),
    )


def pack(call: Call, config: SwigluConfig) -> dict[str, Any]:
    """The variant pack of a call's inputs: views of the caller's tensors."""
    blocks = ceil_div(call.depth, config.block)
    assert isinstance(blocks, int)
    return {
        "a": matrix(call["a"]),
        "b": call["b_ptrs"],
        "sfa": from_atom_view(call["sfa"], call.rows, blocks),
        "sfb": call["sfb_ptrs"],
        "offsets": call["padded_offsets"],
        **({"alpha": call["alpha"]} if "alpha" in config.optional else {}),
        **({"prob": rows(call["prob"])} if "prob" in config.optional else {}),
        **({"bias": call["bias"].t()} if "bias" in call else {}),
        **({"norm_const": call["norm_const"]} if config.quantized else {}),
    }


def stored_as(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 values in `dtype` without a scale: codes round to nearest even and saturate, FP4 two a byte."""
    if dtype in FP4_STORAGE:
        return pack_fp4(encode(values, DataType.FP4_E2M1)).view(dtype)
    return encode(values, data_type(dtype)).view(dtype) if dtype in FP8_TYPES else values.to(dtype)


def divided_by_scales(
    d: torch.Tensor, axis: int, config: SwigluConfig, norm_const: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 D (M, N) -> `D * norm_const / SFD` and SFD as stored, SFD = norm_const * max|D| over blocks along `axis`.

    SFD rounds as it does for codes: up to a power of two for E8M0, to nearest even and saturating for E4M3.
    """
    along = d if axis == 1 else d.t()
    count, width = along.shape
    padded = torch.nn.functional.pad(along, (0, -width % config.block)).view(count, -1, config.block)
    amax = padded.abs().amax(2) * norm_const.abs()
    if config.scale is DataType.FP8_E8M0:
        scale = encode_e8m0(amax).view(torch.float8_e8m0fnu)
        divisor = decode_e8m0(scale.view(torch.uint8))
    else:
        scale = encode(amax, config.scale).view(torch.float8_e4m3fn)
        divisor = scale.to(torch.float32)
    quotient = padded * norm_const / divisor[:, :, None]
    scaled = torch.where(padded == 0, padded, quotient).view(count, -1)[:, :width]
    return scaled if axis == 1 else scaled.t(), swizzle(scale)


def _results(call: Call, config: SwigluConfig, out: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """c, d_row, d_col, sfd_row, sfd_col (those that there are), in their types, from the graph's outputs."""
    c = out["c"]
    found = {"c": c if c.dtype is call.options["c_dtype"] else stored_as(c, call.options["c_dtype"])}
    if config.normalized:
        for side, axis in (("row", 1), ("col", 0)):
            values, scale = divided_by_scales(out["d_row"], axis, config, call["norm_const"])
            found[f"d_{side}"], found[f"sfd_{side}"] = values.to(call.d_dtype), scale
    else:
        found.update({n: out[n] for n in ("d_row", "d_col", "sfd_row", "sfd_col") if n in out})
        if config.quantized:
            found.update({n: found[n].view(call.d_dtype) for n in ("d_row", "d_col")})
    if config.scaled and call.options["discrete_col_sfd"]:
        found["sfd_col"] = pack_columns_by_expert(found["sfd_col"], call["padded_offsets"], config.block)
    return found


def discrete_grouped_gemm_swiglu_wrapper(
    a_tensor: torch.Tensor,
    b_ptrs: torch.Tensor,
    sfa_tensor: torch.Tensor,
    sfb_ptrs: torch.Tensor,
    padded_offsets: torch.Tensor,
    alpha_tensor: torch.Tensor,
    n: int,
    b_dtype: torch.dtype,
    bias_tensor: torch.Tensor | None = None,
    norm_const_tensor: torch.Tensor | None = None,
    prob_tensor: torch.Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    c_dtype: torch.dtype | None = None,
    d_dtype: torch.dtype | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "swiglu",
    b_major: str = "k",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    use_dynamic_sched: bool = False,
    current_stream: Any = None,
) -> TupleDict:
    """GLU of a grouped product with weights by address, in one call; names, order and defaults are cudnn-frontend's.

    Returns a TupleDict of c_tensor (M, N, 1), d_tensor (M, N/2, 1), d_col_tensor, amax_tensor (L, 1) FP32,
    sfd_row_tensor, sfd_col_tensor; what a configuration does not have is None. Raises UnsupportedCall.
    """
    given = dict(locals())
    operands = {k: given.pop(f"{k}_tensor") for k in ("a", "sfa", "alpha", "bias", "norm_const", "prob")}
    operands.update({k: given.pop(k) for k in ("padded_offsets", "b_ptrs", "sfb_ptrs")})
    require_tensors(NAME, operands, "a", "padded_offsets", "b_ptrs")
    columns, weight_type = given.pop("n"), given.pop("b_dtype")
    given["c_dtype"] = c_dtype or torch.bfloat16
    d_dtype = given.pop("d_dtype") or torch.bfloat16
    depth = a_tensor.shape[1] * (2 if a_tensor.dtype in FP4_STORAGE else 1)
    call = read_call(NAME, operands, given, d_dtype=d_dtype, experts=b_ptrs.shape[0], b_shape=(columns, depth),
                     b_dtype=weight_type)  # fmt: skip
    check(DISCRETE_SWIGLU, call)
    amax, scaled = d_dtype in HALF_TYPES, call.family == FP8
    config = configure(call, amax=amax, scaled=scaled)
    for reason in idle_options(call, WRAPPER_DEFAULTS):
        log.info("%s: %s", NAME, reason, extra={"code": reason.code})
    with on_stream(current_stream, a_tensor.device), torch.no_grad():
        out = CACHE.get(config, build)(pack(call, config))
        found = _results(call, config, out)
    canonical = call.canonical
    return TupleDict(
        c_tensor=column_view(found["c"], canonical),
        d_tensor=column_view(found["d_row"], canonical),
        d_col_tensor=column_view(found["d_col"].contiguous(), canonical) if scaled else None,
        amax_tensor=out["amax"].unsqueeze(1) if amax else None,
        sfd_row_tensor=to_atom_view(found["sfd_row"]) if scaled else None,
        sfd_col_tensor=to_atom_view(found["sfd_col"]) if scaled else None,
    )


WRAPPER_DEFAULTS = {n: p.default for n, p in inspect.signature(discrete_grouped_gemm_swiglu_wrapper).parameters.items()}


class DiscreteGroupedGemmSwiglu:
    """The class form of the call: samples fix the configuration, `execute` runs it into the caller's buffers.

    Arguments, their order and defaults are those of `cudnn.DiscreteGroupedGemmSwigluSm100`. `b_shape` (N, K) counts
    elements. Samples need no data; M may differ at execute. `hints` has a reason for each schedule option that changes
    nothing here.
    """

    def __init__(
        self,
        sample_a: torch.Tensor,
        num_experts: int,
        b_shape: tuple[int, ...],
        b_dtype: torch.dtype,
        sample_c: torch.Tensor,
        sample_d: torch.Tensor,
        sample_sfa: torch.Tensor,
        sample_padded_offsets: torch.Tensor,
        sample_alpha: torch.Tensor,
        sample_d_col: torch.Tensor,
        sample_bias: torch.Tensor | None = None,
        sample_sfd_row: torch.Tensor | None = None,
        sample_sfd_col: torch.Tensor | None = None,
        sample_amax: torch.Tensor | None = None,
        sample_norm_const: torch.Tensor | None = None,
        sample_prob: torch.Tensor | None = None,
        acc_dtype: torch.dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        act_func: str = "swiglu",
        b_major: str = "k",
        use_dynamic_sched: bool = False,
    ) -> None:
        given = dict(locals())
        del given["self"]
        self._samples = {k.removeprefix("sample_"): given.pop(k) for k in list(given) if k.startswith("sample_")}
        self._weights = {k: given.pop(k) for k in ("num_experts", "b_shape", "b_dtype")}
        self._options = {**given, "is_class": True, "linear_offset": None, "geglu_alpha": 1.702, "glu_clamp_max": 7.0,
                         "glu_clamp_min": -7.0, "current_stream": None}  # fmt: skip
        self._graphs: GraphCache[SwigluConfig] = GraphCache(limit=8)
        self._config: SwigluConfig | None = None
        self._compiled = False
        self.hints: tuple[Reason, ...] = ()

    def check_support(self) -> bool:
        """True where the samples are within the documented contract. Raises UnsupportedCall with every reason."""
        call = self._call({**self._samples, "b_ptrs": None, "sfb_ptrs": None}, is_sample=True)
        check(DISCRETE_SWIGLU, call)
        self._config = self._configure(call)
        self.hints = idle_options(call, WRAPPER_DEFAULTS)
        return True

    def compile(self) -> None:
        """Builds the graph and its plan for the samples' device, with the activation's default parameters."""
        if self._config is None:
            self.check_support()
        assert self._config is not None
        self._graphs.get(self._config, build)
        self._compiled = True

    def execute(
        self,
        a_tensor: torch.Tensor,
        b_ptrs: torch.Tensor,
        c_tensor: torch.Tensor,
        d_tensor: torch.Tensor,
        sfa_tensor: torch.Tensor,
        sfb_ptrs: torch.Tensor,
        padded_offsets: torch.Tensor,
        alpha_tensor: torch.Tensor,
        bias_tensor: torch.Tensor | None = None,
        d_col_tensor: torch.Tensor | None = None,
        sfd_row_tensor: torch.Tensor | None = None,
        sfd_col_tensor: torch.Tensor | None = None,
        amax_tensor: torch.Tensor | None = None,
        norm_const_tensor: torch.Tensor | None = None,
        prob_tensor: torch.Tensor | None = None,
        linear_offset: float | None = None,
        geglu_alpha: float = 1.702,
        glu_clamp_max: float = 7.0,
        glu_clamp_min: float = -7.0,
        current_stream: Any = None,
    ) -> None:
        """Runs the configuration. The activation's parameters may change from call to call; each set has its graph.

        Raises UnsupportedCall where tensors are not as their samples, StateError before `compile`.
        """
        given = dict(locals())
        if not self._compiled:
            raise StateError(
                "NOT_COMPILED", asked=f"{NAME}.execute", seen="no compiled graph", required="compile() first"
            )
        del given["self"]
        options = ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min", "current_stream")
        chosen = {k: given.pop(k) for k in options}
        call = self._call({k.removesuffix("_tensor"): v for k, v in given.items()}, is_sample=False, **chosen)
        check(DISCRETE_SWIGLU, call)
        now = self._configure(call)
        changed = [
            f
            for f in SwigluConfig.__dataclass_fields__
            if f != "parameters" and getattr(now, f) != getattr(self._config, f)
        ]
        if changed:
            raise refuse(NAME, "NOT_AS_SAMPLED", ", ".join(f"{f} = {getattr(now, f)}" for f in changed),
                         ", ".join(f"{f} = {getattr(self._config, f)}" for f in changed),
                         "what is there, and of which type, "
                         "is fixed by the samples")  # fmt: skip
        with on_stream(current_stream, a_tensor.device), torch.no_grad():
            self._run(call, now)

    def _run(self, call: Call, config: SwigluConfig) -> None:
        direct = {}
        if config.c_type in (DataType.BFLOAT16, DataType.HALF, DataType.FLOAT):
            direct["c"] = matrix(call["c"])
        if not config.normalized:
            direct["d_row"] = matrix(call["d"])
        if config.quantized:
            direct["d_col"] = matrix(call["d_col"])
            direct["sfd_row"] = _stored(call, "sfd_row", call.rows, call.columns // 2)
            if not call.options["discrete_col_sfd"]:
                direct["sfd_col"] = _stored(call, "sfd_col", call.columns // 2, call.rows)
        out = self._graphs.get(config, build)({**pack(call, config), **direct})
        found = _results(call, config, out)
        targets = {"c": "c", "d_row": "d", "d_col": "d_col", "sfd_row": "sfd_row", "sfd_col": "sfd_col"}
        for name, value in found.items():
            if name in direct:
                continue
            if name.startswith("sfd"):
                shape = (call.rows, call.columns // 2) if name == "sfd_row" else (call.columns // 2, call.rows)
                _stored(call, name, *shape).copy_(value)
            elif targets[name] in call:
                held = matrix(call[targets[name]])
                held.copy_(value.view(held.dtype))
        if "d_col" in call and "d_col" not in found:
            matrix(call["d_col"]).copy_(matrix(call["d"]))
        if "amax" in call:
            held = call["amax"].squeeze(1)
            torch.maximum(held, out["amax"], out=held)

    def _call(self, operands: Mapping[str, torch.Tensor | None], **options: Any) -> Call:
        require_tensors(NAME, operands, "a", "padded_offsets", "c", "d")
        if not options["is_sample"] and operands["b_ptrs"] is None:
            raise refuse(NAME, "WEIGHT_MODE", "no b_ptrs", "the experts' addresses")
        c, d = operands["c"], operands["d"]
        assert c is not None and d is not None
        merged = {**self._options, **options, "c_dtype": c.dtype}
        return read_call(NAME, operands, merged, d_dtype=d.dtype, experts=self._weights["num_experts"],
                         b_shape=self._weights["b_shape"], b_dtype=self._weights["b_dtype"])  # fmt: skip

    def _configure(self, call: Call) -> SwigluConfig:
        return configure(call, amax="amax" in call, scaled="norm_const" in call)


def _stored(call: Call, name: str, matrix_rows: int, matrix_columns: int) -> torch.Tensor:
    blocks = ceil_div(matrix_columns, call.block_size)
    assert isinstance(blocks, int)
    return from_atom_view(call[name], matrix_rows, blocks)


__all__ = ["CACHE", "DiscreteGroupedGemmSwiglu", "SwigluConfig", "build", "discrete_grouped_gemm_swiglu_wrapper"]
