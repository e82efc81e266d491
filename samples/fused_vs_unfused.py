"""The expert MLP of real tokens, forward and backward: as planned, forced unfused, and in plain torch.

The bytes of a text are the tokens. A top-k router over their embeddings sends each to its experts, and the experts'
MLP runs through opfuse graphs. Works on any machine; exits with 1 if a check fails.

    python samples/fused_vs_unfused.py [FILE] [--act geglu] [--tokens 4096] [--device cuda]

Axis letters: T tokens, k experts a token, M rows (T * k, padded by expert), H hidden, I intermediate, L experts.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from moe_data import (
    ACTIVATIONS,
    Routing,
    Tensors,
    combine,
    dequantize_mxfp8,
    dispatch,
    existing,
    plain_expert_mlp,
    positive,
    read_text,
    route,
    row_prob,
    usable,
)
from opfuse.graph_ops import DataType, Graph
from usual_graphs import Sizes, dglu_mxfp8, expert_mlp_backward, expert_mlp_forward

DEFAULTS = {
    "cpu": {"tokens": 1024, "experts": 4, "hidden": 256, "intermediate": 256},
    "cuda": {"tokens": 16384, "experts": 16, "hidden": 2048, "intermediate": 768},
}
GRAPHS = {"forward": expert_mlp_forward, "backward": expert_mlp_backward, "backward to MXFP8": dglu_mxfp8}

DATA_TYPES = {"bfloat16": DataType.BFLOAT16, "float16": DataType.HALF, "float32": DataType.FLOAT}

MOST_ERROR = 2.0  # times the error of plain torch in the same data type, both against float64
LEAST_MXFP8_SQNR = 25.0  # dB: codes of 3 mantissa bits give about 31


@dataclass(frozen=True)
class Layer:
    """One expert MLP, the rows that a router sent it, and the gradient that comes back."""

    routing: Routing
    x: torch.Tensor  # (M, H)
    w1: torch.Tensor  # (L, H, 2I)
    b1: torch.Tensor  # (L, 2I)
    w2: torch.Tensor  # (L, I, H)
    prob: torch.Tensor  # (M,) float32
    dy: torch.Tensor  # (M, H)


def main() -> int:
    options = arguments()
    device, text = torch.device(options.device), read_text(options.file)
    tokens = min(options.tokens, len(text) - 2)
    if tokens < 1:
        print(f"the text has {len(text)} bytes; at least 3 are needed", file=sys.stderr)
        return 2
    data_type = DATA_TYPES[options.data_type]
    s = Sizes(H=options.hidden, I=options.intermediate, L=options.experts, act=options.act, data_type=data_type)
    graphs = {mode: {name: make(s) for name, make in GRAPHS.items()} for mode in ("planned", "unfused")}
    for mode, made in graphs.items():
        for graph in made.values():
            graph.build(device=device, fused=mode == "planned")
    layer = make_layer(text, tokens, options.top_k, s, device, options.seed)

    print(f"{tokens} bytes of text, top-{options.top_k} of {s.L} experts: {layer.routing.rows} rows with padding\n"
          f"H = {s.H}, I = {s.I}, {s.act}, {s.data_type!r}, on {device}")  # fmt: skip
    for name, graph in graphs["planned"].items():
        for arch in dict.fromkeys(("sm90", "sm100", *([graph.plan.arch] if device.type == "cuda" else []))):
            print(f"\n=== {name} on {arch}\n{graph.explain(arch=arch)}")
    print(f"\n=== planned on this machine, {graph.plan.arch}")
    for name, graph in graphs["planned"].items():
        print(f"{name}: " + ", ".join(step.kernel for step in graph.plan.steps))

    results = {mode: run_layer(made, layer) for mode, made in graphs.items()}
    true, plain = plain_torch(layer, s, torch.float64), plain_torch(layer, s, layer.x.dtype)
    failures = compare(results, true, plain) + compare_mxfp8(results, true)
    report_cost(graphs, layer, options.repeats)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print(f"\n{len(failures)} checks failed" if failures else "\nall checks passed")
    return 1 if failures else 0


def make_layer(text: bytes, tokens: int, top_k: int, s: Sizes, device: torch.device, seed: int) -> Layer:
    """Embeds each byte with the one before it, routes it, and permutes the rows by expert; weights from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, s.data_type.info.torch_name)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    ids = torch.frombuffer(bytearray(text[: tokens + 2]), dtype=torch.uint8).long().to(device)  # (T + 2,)
    embedding = normal(256, s.H, scale=1.0)
    context = normal(256, s.H, scale=0.5)
    router = normal(s.H, s.L, scale=s.H**-0.5)
    token = embedding[ids[1:-1]] + context[ids[:-2]]  # (T, H)
    routing = route((token @ router).float(), top_k, s.rows)
    x, prob = dispatch(token, routing), row_prob(routing)  # (M, H), (M,)
    w1 = normal(s.L, s.H, 2 * s.I, scale=s.H**-0.5)
    b1 = normal(s.L, 2 * s.I, scale=0.5)
    w2 = normal(s.L, s.I, s.H, scale=s.I**-0.5)
    # The gradient of half the squared distance between the layer's output and the embedding of the next byte.
    out = combine(plain_expert_mlp(x, w1, b1, w2, prob, routing.offsets, s.act)["y"], routing)  # (T, H)
    dy = dispatch(out - embedding[ids[2:]], routing)  # (M, H)
    return Layer(routing, x, w1, b1, w2, prob, dy)


def plain_torch(layer: Layer, s: Sizes, dtype: torch.dtype) -> Tensors:
    """Forward and gradients by plain torch autograd in `dtype`."""
    leaves = {name: getattr(layer, name).to(dtype).requires_grad_() for name in ("x", "w1", "b1", "w2")}
    prob = layer.prob.to(torch.promote_types(dtype, torch.float32)).requires_grad_()  # (M,)
    saved = plain_expert_mlp(**leaves, prob=prob, offsets=layer.routing.offsets, act=s.act)
    saved["h"].retain_grad()
    saved["y"].backward(layer.dy.to(dtype))
    gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    return {**saved, **gradients, "dprob": prob.grad, "dh": saved["h"].grad}


def run_layer(graphs: dict[str, Graph], layer: Layer) -> Tensors:
    """Forward and gradients by opfuse: three executes, the outputs by name."""
    routing = {"offsets": layer.routing.offsets, "prob": layer.prob}
    w1_t, w2_t = layer.w1.transpose(1, 2), layer.w2.transpose(1, 2)  # (L, 2I, H), (L, H, I): views
    saved = graphs["forward"]({**routing, "x": layer.x, "w1": layer.w1, "b1": layer.b1, "w2": layer.w2})
    dglu = {**routing, "dy": layer.dy, "h": saved["h"], "w2_t": w2_t}
    gradients = graphs["backward"]({**dglu, "x": layer.x, "act": saved["act"], "w1_t": w1_t})
    codes = graphs["backward to MXFP8"](dglu)
    return {**codes, **saved, **gradients}


def compare(results: dict[str, Tensors], true: Tensors, plain: Tensors) -> list[str]:
    """Prints each output's errors against `true` beside those of plain torch; returns what is out of bounds."""
    failures = []
    print("\n=== errors against plain torch autograd in float64, relative: the largest, and in norm")
    print(f"{'':6}" + "".join(f"{mode:>24}" for mode in ("plain torch", *results)))
    for name in ("h", "act", "y", "dx", "dw1", "db1", "dw2", "dprob"):
        errors = {mode: errors_of(result[name], true[name]) for mode, result in {"plain": plain, **results}.items()}
        print(f"{name:6}" + "".join(f"{largest:14.2e}{relative:10.2e}" for largest, relative in errors.values()))
        for mode in results:
            for kind, error, allowed in zip(("largest", "norm of"), errors[mode], errors["plain"], strict=True):
                if not error <= MOST_ERROR * allowed + 1e-5:
                    failures.append(f"{name}, {mode}: {kind} error {error:.2e}, plain torch's {allowed:.2e}")
    return failures


def compare_mxfp8(results: dict[str, Tensors], true: Tensors) -> list[str]:
    """Prints the signal to quantization noise of dh's codes; returns what is out of bounds."""
    failures = []
    print("\n=== signal to quantization noise of dh in MXFP8, and codes that differ from the unfused plan's")
    for mode, result in results.items():
        for kind, axis in (("row", 1), ("col", 0)):
            codes = result[f"q_{kind}"]  # (M, 2I)
            sqnr = sqnr_db(dequantize_mxfp8(codes, result[f"sf_{kind}"], axis), true["dh"])
            other = codes.view(torch.uint8) != results["unfused"][f"q_{kind}"].view(torch.uint8)
            print(f"{mode:8} q_{kind} {sqnr:6.2f} dB   {other.float().mean().item():.4%}")
            if not sqnr >= LEAST_MXFP8_SQNR:
                failures.append(f"q_{kind}, {mode}: {sqnr:.2f} dB, at least {LEAST_MXFP8_SQNR} asked")
    return failures


def report_cost(graphs: dict[str, dict[str, Graph]], layer: Layer, repeats: int) -> None:
    """Prints the median time of forward and backwards, and the memory, of each mode."""
    cuda = layer.x.is_cuda
    print("\n=== time and memory of the three executes")
    for mode, made in graphs.items():
        times = []
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for _ in range(repeats):
            start = now(cuda)
            run_layer(made, layer)
            times.append(now(cuda) - start)
        line = f"{mode:8} {statistics.median(times) * 1e3:9.2f} ms, median of {repeats}"
        workspace = max(graph.get_workspace_size({"M": layer.routing.rows}) for graph in made.values())
        line += f"; workspace {workspace / 2**20:.2f} MiB"
        if cuda:
            line += f"; peak {(torch.cuda.max_memory_allocated() - before) / 2**20:.2f} MiB with outputs"
        print(line)
    if not cuda:
        print(f"peak memory of this process: {process_peak()}")


def now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def process_peak() -> str:
    try:
        import resource
    except ImportError:
        return "not known on this system"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:.0f} MiB"


def errors_of(value: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """The largest error, relative to the largest value; and the error's norm, relative to the norm."""
    difference = value.double() - true
    return (difference.abs().max() / true.abs().max()).item(), (difference.norm() / true.norm()).item()


def sqnr_db(value: torch.Tensor, true: torch.Tensor) -> float:
    return 20 * math.log10((true.double().norm() / (value.double() - true.double()).norm()).item())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=existing,
                        help="text to read; by default the help texts that come with Python")  # fmt: skip
    parser.add_argument("--device", type=usable, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--act", choices=ACTIVATIONS, default="swiglu")
    parser.add_argument("--data-type", choices=DATA_TYPES, default="bfloat16")
    for name in ("tokens", "experts", "hidden", "intermediate"):
        parser.add_argument(
            f"--{name}", type=positive, help=", ".join(f"{d[name]} on {k}" for k, d in DEFAULTS.items())
        )
    parser.add_argument("--top-k", type=positive, default=2)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, value in DEFAULTS["cuda" if options.device.startswith("cuda") else "cpu"].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    sys.exit(main())
