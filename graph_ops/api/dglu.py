"""Grouped GEMM + dGLU under NVIDIA's names: the call of cudnn-frontend 1.32, built on a Graph, on every device.

`grouped_gemm_dglu_wrapper(...)` and `GroupedGemmDglu(sample_...)` take the arguments of
`cudnn.grouped_gemm_dglu_wrapper_sm100` and `cudnn.GroupedGemmDgluSm100` and compute

    R = alpha[g]**2 * A B[g]^T;  X = beta[g] * C, gate and up in blocks of 32;  D, dprob = dGLU(R, X, prob)

where the documents and the code differ, as the documents' equations and this project's numerics say:

- dprob and, in the class, dbias and amax are accumulated into what the caller's buffer holds, as NVIDIA's kernels do:
  a zeroed buffer (amax: zero or -inf) gets exactly the result.
- dbias and amax are of D before it rounds or is quantized, as the code has it; dbias rounds once, to BF16.
- `epilogue_op` ("relu", "srelu") is applied to D before it is stored, quantized or summed; NVIDIA's kernels ignore it.
- D_col exists where D is quantized. Otherwise the wrapper gives None, and the class copies D into a `d_col_tensor`.
- block-scaled dGeGLU does not read beta, as documented: other values than ones are refused where they lie on the CPU,
  and logged as without effect elsewhere.
- amax of an empty expert is 0; rows outside every group are zero.
- `dprob_tensor` and `prob_tensor` may be None for both families of operands.

Raises UnsupportedCall, with every reason, for a call outside the documented contract.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch

from ...kernels.condition import Reason
from ..graph import Graph
from ..ir.dims import ceil_div
from ..ir.errors import StateError
from ..scales import from_atom_view, pack_columns_by_expert, to_atom_view
from .common import FP4_STORAGE, GraphCache, TupleDict, column_view, matrix, on_stream, rows
from .dglu_graph import NAME, DgluConfig, build, configure, pack
from .dglu_surface import DGLU
from .surface import Call, check, idle_options, read_call, refuse, require_tensors

log = logging.getLogger("opfuse.api")


CACHE: GraphCache[DgluConfig] = GraphCache(limit=64)
"""Graphs of the wrapper, by configuration."""


def _column_scales(call: Call, stored: torch.Tensor) -> torch.Tensor:
    if not call.options["discrete_col_sfd"]:
        return stored
    return pack_columns_by_expert(stored, call["padded_offsets"], call.block_size)


def _stored(call: Call, name: str, matrix_rows: int, matrix_columns: int) -> torch.Tensor:
    """The memory (R, C) of output scales, for codes (rows, columns) with blocks along the columns."""
    blocks = ceil_div(matrix_columns, call.block_size)
    assert isinstance(blocks, int)
    return from_atom_view(call[name], matrix_rows, blocks)


def grouped_gemm_dglu_wrapper(
    a_tensor: torch.Tensor,
    c_tensor: torch.Tensor,
    sfa_tensor: torch.Tensor | None,
    padded_offsets: torch.Tensor,
    alpha_tensor: torch.Tensor,
    beta_tensor: torch.Tensor | None,
    prob_tensor: torch.Tensor | None,
    dprob_tensor: torch.Tensor | None,
    b_tensor: torch.Tensor | None = None,
    sfb_tensor: torch.Tensor | None = None,
    generate_dbias: bool = False,
    b_ptrs: torch.Tensor | None = None,
    sfb_ptrs: torch.Tensor | None = None,
    n: int | None = None,
    b_dtype: torch.dtype | None = None,
    b_major: str = "k",
    norm_const_tensor: torch.Tensor | None = None,
    acc_dtype: torch.dtype | None = None,
    d_dtype: torch.dtype | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: Literal["e5m3"] | None = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    epilogue_op: str | None = None,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    round_dgrad_to_input_dtype: bool = False,
    activation_tensor: torch.Tensor | None = None,
    deterministic: bool = False,
) -> TupleDict:
    """dGLU of a grouped product, in one call; names, order and defaults are cudnn-frontend's (see the module).

    Returns a TupleDict of d_row_tensor (M, 2N, 1), d_col_tensor, dprob_tensor (the one given), dbias_tensor (L, 2N, 1)
    BF16, amax_tensor (L, 2, 1) FP32, sfd_row_tensor, sfd_col_tensor, and activation_tensor where one was given; what a
    configuration does not have is None. Raises UnsupportedCall.
    """
    given = dict(locals())
    tensors = ("a", "c", "sfa", "alpha", "beta", "prob", "dprob", "b", "sfb", "norm_const", "activation")
    operands = {n: given.pop(f"{n}_tensor") for n in tensors}
    operands.update({n: given.pop(n) for n in ("padded_offsets", "b_ptrs", "sfb_ptrs")})
    columns, weight_type = given.pop("n"), given.pop("b_dtype")
    d_dtype = given.pop("d_dtype") or torch.bfloat16
    call = _read(operands, given, d_dtype, columns, weight_type)
    check(DGLU, call)
    wanted = {n for n in ("dprob", "activation") if n in call} | ({"dbias"} if generate_dbias else set())
    wanted |= {"amax"} if call.block_scaled and d_dtype in (torch.bfloat16, torch.float16) else set()
    config = configure(call, frozenset(wanted))
    for reason in idle_arguments(call):
        log.info("%s: %s", NAME, reason, extra={"code": reason.code})
    graph = CACHE.get(config, build)
    with on_stream(current_stream, a_tensor.device), torch.no_grad():
        activation = {"activation": matrix(activation_tensor)} if activation_tensor is not None else {}
        out = graph({**pack(call, config), **activation})
        if dprob_tensor is not None:
            rows(dprob_tensor).add_(out["dprob"])
    quantized, canonical = config.quantized, call.canonical
    return TupleDict(
        d_row_tensor=column_view(out["d_row"], canonical),
        d_col_tensor=column_view(out["d_col"], canonical) if quantized else None,
        dprob_tensor=dprob_tensor,
        dbias_tensor=out["dbias"].unsqueeze(2) if generate_dbias else None,
        amax_tensor=out["amax"].unsqueeze(2) if "amax" in wanted else None,
        sfd_row_tensor=to_atom_view(out["sfd_row"]) if quantized else None,
        sfd_col_tensor=to_atom_view(_column_scales(call, out["sfd_col"])) if quantized else None,
        **({"activation_tensor": activation_tensor} if activation_tensor is not None else {}),
    )


WRAPPER_DEFAULTS = {n: p.default for n, p in inspect.signature(grouped_gemm_dglu_wrapper).parameters.items()}


def idle_arguments(call: Call) -> tuple[Reason, ...]:
    """A reason for every argument of a valid call that changes nothing here."""
    found = idle_options(call, WRAPPER_DEFAULTS)
    if call.block_scaled and "beta" in call and call.options["act_func"] == "dgeglu":
        hint = "multiply C by beta beforehand"
        found += (Reason("BETA_UNUSED", "beta with block-scaled dGeGLU", "None, or ones", hint),)
    return found


def _read(operands: Mapping[str, torch.Tensor | None], options: Mapping[str, Any], d_dtype: torch.dtype,
          columns: int | None, weight_type: torch.dtype | None) -> Call:  # fmt: skip
    require_tensors(NAME, operands, "a", "c", "padded_offsets")
    dense, pointers = operands["b"] is not None, operands["b_ptrs"]
    if dense == (pointers is not None):
        raise refuse(NAME, "WEIGHT_MODE", "both or neither of b_tensor and b_ptrs", "one of them")
    if dense:
        if columns is not None or weight_type is not None or operands["sfb_ptrs"] is not None:
            raise refuse(NAME, "WEIGHT_MODE", "n, b_dtype or sfb_ptrs beside b_tensor", "b_tensor and sfb_tensor alone")
        return read_call(NAME, operands, options, d_dtype=d_dtype)
    assert pointers is not None
    if columns is None or weight_type is None or operands["sfb"] is not None:
        raise refuse(NAME, "WEIGHT_MODE", f"n = {columns}, b_dtype = {weight_type}, sfb_tensor "
                     f"{'given' if operands['sfb'] is not None else 'None'} beside b_ptrs",
                     "n and b_dtype with b_ptrs, and sfb_ptrs for their scales")  # fmt: skip
    a = operands["a"]
    assert a is not None
    depth = a.shape[1] * (2 if a.dtype in FP4_STORAGE else 1)
    return read_call(NAME, operands, options, d_dtype=d_dtype, experts=pointers.shape[0], b_shape=(columns, depth),
                     b_dtype=weight_type)  # fmt: skip


class GroupedGemmDglu:
    """The class form of the call: samples fix the configuration, `execute` runs it into the caller's buffers.

    Arguments, their order and defaults are those of `cudnn.GroupedGemmDgluSm100`. Samples need no data; M may differ
    at execute. Weights are dense (`sample_b`, `sample_sfb`) or discrete (`num_experts`, `b_shape` (N, K) counting
    elements, `b_dtype`). `hints` has a reason for each schedule option that changes nothing here.
    """

    def __init__(
        self,
        sample_a: torch.Tensor,
        sample_c: torch.Tensor,
        sample_d_row: torch.Tensor,
        sample_d_col: torch.Tensor | None,
        sample_sfa: torch.Tensor | None,
        sample_padded_offsets: torch.Tensor,
        sample_alpha: torch.Tensor,
        sample_beta: torch.Tensor | None,
        sample_prob: torch.Tensor | None,
        sample_dprob: torch.Tensor | None,
        sample_b: torch.Tensor | None = None,
        sample_sfb: torch.Tensor | None = None,
        sample_dbias: torch.Tensor | None = None,
        num_experts: int | None = None,
        b_shape: tuple[int, ...] | None = None,
        b_dtype: torch.dtype | None = None,
        sample_sfd_row: torch.Tensor | None = None,
        sample_sfd_col: torch.Tensor | None = None,
        sample_amax: torch.Tensor | None = None,
        sample_norm_const: torch.Tensor | None = None,
        acc_dtype: torch.dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        sf_fp8_dtype_override: Literal["e5m3"] | None = None,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        act_func: str = "dswiglu",
        b_major: str = "k",
        epilogue_op: str | None = None,
        use_dynamic_sched: bool = False,
        use_single_group_runtime_offsets: bool = False,
        linear_offset: float | None = None,
        geglu_alpha: float = 1.702,
        glu_clamp_max: float = 7.0,
        glu_clamp_min: float = -7.0,
        situ_beta1: float = 4.0,
        situ_beta2: float = 25.0,
        round_dgrad_to_input_dtype: bool = False,
        sample_activation: torch.Tensor | None = None,
        _deterministic: bool = False,
    ) -> None:
        given = dict(locals())
        del given["self"]
        self._samples = {k.removeprefix("sample_"): given.pop(k) for k in list(given) if k.startswith("sample_")}
        self._weights = {k: given.pop(k) for k in ("num_experts", "b_shape", "b_dtype")}
        self._options = {
            **given,
            "deterministic": given.pop("_deterministic"),
            "is_class": True,
            "current_stream": None,
        }
        self._options.pop("_deterministic", None)
        self._config: DgluConfig | None = None
        self._graph: Graph | None = None
        self._rows = 0
        self.hints: tuple[Reason, ...] = ()

    def check_support(self) -> bool:
        """True where the samples are within the documented contract. Raises UnsupportedCall with every reason."""
        call = self._call({**self._samples, "b_ptrs": None, "sfb_ptrs": None}, is_sample=True)
        check(DGLU, call)
        self._config, self._rows = self._configure(call), call.rows
        self.hints = idle_arguments(call)
        return True

    def compile(self) -> None:
        """Builds the graph and its plan for the samples' device."""
        if self._config is None:
            self.check_support()
        assert self._config is not None
        if self._graph is None:
            self._graph = build(self._config).build()

    def scratch_workspace_bytes(self) -> int:
        """Bytes that `execute(workspace=)` takes for the samples' M; without a workspace, execute allocates them."""
        return self._built().get_workspace_size({"M": self._rows})

    def execute(
        self,
        a_tensor: torch.Tensor,
        c_tensor: torch.Tensor,
        d_row_tensor: torch.Tensor,
        d_col_tensor: torch.Tensor | None,
        sfa_tensor: torch.Tensor | None,
        padded_offsets: torch.Tensor,
        alpha_tensor: torch.Tensor,
        beta_tensor: torch.Tensor | None,
        prob_tensor: torch.Tensor | None,
        dprob_tensor: torch.Tensor | None,
        b_tensor: torch.Tensor | None = None,
        sfb_tensor: torch.Tensor | None = None,
        dbias_tensor: torch.Tensor | None = None,
        b_ptrs: torch.Tensor | None = None,
        sfb_ptrs: torch.Tensor | None = None,
        sfd_row_tensor: torch.Tensor | None = None,
        sfd_col_tensor: torch.Tensor | None = None,
        amax_tensor: torch.Tensor | None = None,
        norm_const_tensor: torch.Tensor | None = None,
        current_stream: Any = None,
        activation_tensor: torch.Tensor | None = None,
        *,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Runs the compiled configuration. Raises UnsupportedCall where tensors are not as their samples."""
        given = dict(locals())
        graph, config = self._built(), self._config
        del given["self"], given["current_stream"], given["workspace"]
        operands = {k.removesuffix("_tensor"): v for k, v in given.items()}
        call = self._call(operands, is_sample=False, current_stream=current_stream)
        check(DGLU, call)
        now = self._configure(call)
        if now != config:
            fields = [f for f in DgluConfig.__dataclass_fields__ if getattr(now, f) != getattr(config, f)]
            raise refuse(NAME, "NOT_AS_SAMPLED", ", ".join(f"{f} = {getattr(now, f)}" for f in fields),
                         ", ".join(f"{f} = {getattr(config, f)}" for f in fields),
                         "what is there, and of which type, is "
                         "fixed by the samples: an output without a sample is not computed")  # fmt: skip
        with on_stream(current_stream, a_tensor.device), torch.no_grad():
            self._run(call, graph, now, workspace)

    def _run(self, call: Call, graph: Graph, config: DgluConfig, workspace: torch.Tensor | None) -> None:
        out = self._buffers(call, config)
        if workspace is None and (size := graph.get_workspace_size({"M": call.rows})):
            workspace = torch.empty(size, dtype=torch.uint8, device=call["a"].device)
        graph.execute({**pack(call, config), **out}, workspace)
        if "dprob" in call:
            rows(call["dprob"]).add_(out["dprob"])
        if "dbias" in call:
            call["dbias"].squeeze(2).add_(out["dbias"])
        if "amax" in call:
            held = call["amax"].squeeze(2)
            torch.maximum(held, out["amax"], out=held)
        if config.quantized and call.options["discrete_col_sfd"]:
            _stored(call, "sfd_col", 2 * call.columns, call.rows).copy_(_column_scales(call, out["sfd_col"]))
        elif "d_col" in call and not config.quantized:
            call["d_col"].copy_(call["d_row"])

    def _buffers(self, call: Call, config: DgluConfig) -> dict[str, torch.Tensor]:
        """The graph's outputs: the caller's buffers where they are written whole, new ones where they are added to."""
        new = {"dprob": (call.rows,), "dbias": (call.experts, 2 * call.columns), "amax": (call.experts, 2)}
        out = {
            n: torch.zeros(shape, dtype=call[n].dtype, device=call[n].device) for n, shape in new.items() if n in call
        }
        out.update({n: matrix(call[n]) for n in ("d_row", "activation") if n in call})
        if config.quantized:
            out["d_col"] = matrix(call["d_col"])
            out["sfd_row"] = _stored(call, "sfd_row", call.rows, 2 * call.columns)
            columns = _stored(call, "sfd_col", 2 * call.columns, call.rows)
            out["sfd_col"] = torch.empty_like(columns) if call.options["discrete_col_sfd"] else columns
        return out

    def _built(self) -> Graph:
        if self._graph is None:
            raise StateError(
                "NOT_COMPILED", asked=f"{NAME}.execute", seen="no compiled graph", required="compile() first"
            )
        return self._graph

    def _call(self, operands: Mapping[str, torch.Tensor | None], **options: Any) -> Call:
        described = self._weights
        dense = self._samples["b"] is not None
        if dense == any(v is not None for v in described.values()):
            raise refuse(
                NAME, "WEIGHT_MODE", "both or neither of sample_b and (num_experts, b_shape, b_dtype)", "one of them"
            )
        if not dense and any(v is None for v in described.values()):
            raise refuse(NAME, "WEIGHT_MODE", f"{described}", "num_experts, b_shape and b_dtype together")
        require_tensors(NAME, operands, "a", "c", "padded_offsets", "d_row")
        merged = {**self._options, **options}
        d_row = operands["d_row"]
        assert d_row is not None
        if dense:
            if operands["b"] is None:
                raise refuse(NAME, "WEIGHT_MODE", "no b_tensor", "b_tensor, as the samples had it")
            return read_call(NAME, operands, merged, d_dtype=d_row.dtype)
        if operands["b"] is not None or (not merged["is_sample"] and operands["b_ptrs"] is None):
            raise refuse(NAME, "WEIGHT_MODE", "b_tensor, or no b_ptrs", "b_ptrs alone, as the samples had it")
        return read_call(NAME, operands, merged, d_dtype=d_row.dtype, experts=described["num_experts"],
                         b_shape=described["b_shape"], b_dtype=described["b_dtype"])  # fmt: skip

    def _configure(self, call: Call) -> DgluConfig:
        return configure(call, frozenset(n for n in ("dprob", "dbias", "amax", "activation") if n in call))


__all__ = ["CACHE", "DgluConfig", "GroupedGemmDglu", "build", "grouped_gemm_dglu_wrapper"]
