"""Grouped GEMM + dGLU on the GPU of this host: opfuse's fused Hopper kernel against what else computes the same.

    python samples/bench_dglu.py [--shapes NAME,NAME] [--splits uniform,zipf,empty] [--json OUT] [--chart OUT.png]

Arms, unit-scale random data, each in its own native layout; milliseconds, medians of interleaved rounds (every round
runs each arm once, after overwriting 256 MB so that L2 is cold), so that all arms see the same clock and power:

    dense        a bf16 8192^3 matmul by torch, in the same rounds: the rate behind `floor`
    floor        max(FLOPs / that rate, bytes / measured copy rate) of the bf16 dGLU
    gmm          torch._grouped_mm alone
    compiled     grouped_mm, then dSwiGLU + dprob as one torch.compile'd kernel
    compiled_q   the same with MXFP8 row and column quantization (and the bf16 gradient) in the compiled graph
    fused        opfuse: bf16 gradient and dprob          fused_dbias   and the per-expert bias gradient
    fused_q      opfuse: MXFP8 row and column codes and scales, and dprob
    unfused      opfuse's plan without fusion
    quack        QuACK's gemm_dgated where it is installed: bf16 gradient, recomputed activation, dprob
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from opfuse.kernels.sm90 import host, tune
from opfuse.kernels.sm90.config import DgluConfig, Schedule

HERE = Path(__file__).parent
Call = Callable[..., Any]
FUSED = DgluConfig(has_prob=True, has_dprob=True)
CONFIGS = {
    "fused": FUSED,
    "fused_dbias": replace(FUSED, dbias_dtype="bf16"),
    "fused_q": replace(FUSED, d_dtype=None, q_row_dtype="e4m3", q_col_dtype="e4m3"),
}


# ---- data ------------------------------------------------------------------------------------------------------------


def group_sizes(split: str, L: int, M: int, align: int = 256) -> list[int]:
    """Rows per expert, each a multiple of `align`, summing to M; `empty` leaves every third expert without rows."""
    blocks = M // align
    weights = {
        "uniform": [1.0] * L,
        "zipf": [1.0 / (i + 1) for i in range(L)],
        "empty": [float(i % 3 != 1) for i in range(L)],
    }[split]
    exact = [w * blocks / sum(weights) for w in weights]
    counts = [int(x) for x in exact]
    for i in sorted(range(L), key=lambda i: counts[i] - exact[i])[: blocks - sum(counts)]:
        counts[i] += 1
    return [c * align for c in counts]


def make_inputs(L: int, M: int, H: int, I: int, split: str) -> dict[str, torch.Tensor]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    return {
        "dy": randn(M, H),
        "b": (randn(L, I, H) / H**0.5).transpose(1, 2),  # logical (L, K, N), K-major
        "offsets": torch.tensor(group_sizes(split, L, M)).cumsum(0).to(torch.int32).cuda(),
        "c": randn(M, 2 * I),
        "prob": torch.rand(M, device="cuda") + 0.25,
    }


# ---- arms ------------------------------------------------------------------------------------------------------------


def dswiglu(r: torch.Tensor, c: torch.Tensor, prob: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """r (M, I), c (M, 2I) in 32-wide gate and up blocks -> gradient (M, 2I), dprob (M,)."""
    m, i2 = c.shape
    blocks = c.view(m, i2 // 64, 2, 32)
    gate, up, r = blocks[:, :, 0].float(), blocks[:, :, 1].float(), r.view(m, i2 // 64, 32).float()
    s = torch.sigmoid(gate)
    silu = gate * s
    rp = r * prob.view(m, 1, 1)
    grads = torch.stack((rp * up * s * (1 + gate * (1 - s)), rp * silu), 2)
    return grads.view(m, i2).to(c.dtype), (r * silu * up).sum((1, 2))


def mxfp8(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and E8M0 scales of 32-blocks along a dimension, exponent rounded up."""
    m, n = x.shape
    blocks = x.float().view(m, n // 32, 32) if dim == 1 else x.float().view(m // 32, 32, n)
    amax = blocks.abs().amax(2 if dim == 1 else 1, keepdim=True)
    exponent = torch.ceil(torch.log2(amax.clamp_min(1e-30) / 448.0))
    codes = (blocks * torch.exp2(-exponent)).to(torch.float8_e4m3fn).view(m, n)
    return codes, (exponent + 127).to(torch.uint8)


def dswiglu_quantized(r: torch.Tensor, c: torch.Tensor, prob: torch.Tensor) -> tuple:
    d, dprob = dswiglu(r, c, prob)
    return d, dprob, mxfp8(d, 1), mxfp8(d, 0)


def fused_arm(config: DgluConfig, inputs: dict, L: int, M: int, H: int, I: int) -> tuple[Call, Schedule]:
    """(call, schedule) of one configuration of the fused kernel."""
    config = tune.schedule_for(config, n=I, k=H)
    out = {"dprob": torch.empty(M, device="cuda")}
    if config.d_dtype:
        out["d"] = torch.empty(M, 2 * I, device="cuda", dtype=torch.bfloat16)
    if config.dbias_dtype:
        out["dbias"] = torch.empty(L, 2 * I, device="cuda", dtype=torch.bfloat16)
    for side, size in host.scale_bytes(config, M, I).items():
        if getattr(config, f"q_{side}_dtype"):
            out[f"q_{side}"] = torch.empty(M, 2 * I, device="cuda", dtype=torch.uint8)
            out[f"sf_{side}"] = torch.zeros(size, device="cuda", dtype=torch.uint8)
    out["workspace"] = torch.empty(host.workspace_bytes(config, L, M, I), device="cuda", dtype=torch.uint8)
    return lambda: host.launch(config, **inputs, **out), config.schedule


def unfused_arm(inputs: dict, L: int, M: int, H: int, I: int) -> Call:
    """The same graph as a user writes it, planned without fusion."""
    from opfuse.graph_ops import DataType, GluLayout, Graph

    g = Graph(io_data_type=DataType.BFLOAT16, intermediate_data_type=DataType.FLOAT)
    dy = g.tensor("dy", dim=(M, H))
    w = g.tensor("b", dim=(L, H, I), stride=(I * H, 1, H))
    h = g.tensor("c", dim=(M, 2 * I), glu_layout=GluLayout.interleaved(32))
    offsets = g.tensor("offsets", dim=(L,), data_type=DataType.INT32)
    prob = g.tensor("prob", dim=(M,), data_type=DataType.FLOAT)
    dh, dprob = g.glu_backward(g.grouped_matmul(dy, w, offsets), h, prob=prob, act="swiglu")
    dh.set_output(True).set_data_type(DataType.BFLOAT16)
    dprob.set_output(True)
    g.build(device="cuda", fused=False)
    return lambda: g(inputs)


def quack_arms(inputs: dict) -> dict[str, Call]:
    """QuACK's fastest configurations on these shapes, of those that do not spill: {name: call}."""
    try:
        from quack.epilogue.library import dgated_mod  # type: ignore[import-not-found]
        from quack.gemm_config import GemmConfig  # type: ignore[import-not-found]
    except ImportError:
        return {}
    mod = dgated_mod("swiglu", has_scale=True, has_reduce=True)
    cu = torch.cat([torch.zeros(1, dtype=torch.int32, device="cuda"), inputs["offsets"]])

    def arm(cluster_m: int) -> Call:
        config = GemmConfig(tile_m=128, tile_n=128, pingpong=True, cluster_m=cluster_m, cluster_n=3 - cluster_m)
        return lambda: mod(
            inputs["dy"], inputs["b"], inputs["c"], config=config, tuned=False, dynamic_scheduler=True,
            cu_seqlens_m=cu, mColVecBroadcast=inputs["prob"],
        )  # fmt: skip

    return {f"quack 128x128 {m}x{3 - m}": arm(m) for m in (1, 2)}


# ---- measuring -------------------------------------------------------------------------------------------------------


def interleaved(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median milliseconds of every call; each round runs all of them, so that they share the GPU's state."""
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    for call in calls.values():
        call()
        call()
    events: dict[str, list] = {name: [] for name in calls}
    order = list(calls.items())
    for i in range(rounds):
        # In an order of its own: after an arm that draws little power the next one runs at a higher clock.
        random.Random(i).shuffle(order)
        for name, call in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    times = {name: sorted(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}
    return {name: t[len(t) // 2] for name, t in times.items()}


def copy_rate() -> float:
    """Bytes a second, read and written, of a 2 GB device copy."""
    x = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    return 2e3 * 2**31 / interleaved({"copy": lambda: y.copy_(x)}, 9)["copy"]


def host_microseconds(call: Call) -> float:
    """Host time of one launch while the stream is busy."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(100):
        call()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent * 1e4


def measure(shape: dict, split: str, copy: float, rounds: int, compiled: list[Call] | None) -> dict:
    L, M, H, I = (shape[k] for k in "LMHI")
    inputs = make_inputs(L, M, H, I, split)
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    calls: dict[str, Call] = {
        "dense": lambda: x @ y.T,
        "gmm": lambda: torch._grouped_mm(inputs["dy"], inputs["b"], offs=inputs["offsets"], out_dtype=torch.bfloat16),
    }
    row = {"name": shape["name"], "split": split, "L": L, "M": M, "H": H, "I": I, "config": {}}
    for name, config in CONFIGS.items():
        calls[name], schedule = fused_arm(config, inputs, L, M, H, I)
        mode = "ping-pong" if schedule.pingpong else "cooperative"
        row["config"][name] = f"{schedule.tile_m}x{schedule.tile_n} {mode} {schedule.cluster_m}x{schedule.cluster_n}"
    if compiled is not None:
        row["host_us"] = host_microseconds(calls["fused"])
    if compiled is not None:
        plain, quantized = compiled
        calls["compiled"] = lambda: plain(calls["gmm"](), inputs["c"], inputs["prob"])
        calls["compiled_q"] = lambda: quantized(calls["gmm"](), inputs["c"], inputs["prob"])
        # Where this part of the library is not installed, the arm is absent.
        with contextlib.suppress(ImportError):
            calls["unfused"] = unfused_arm(inputs, L, M, H, I)
    quack = quack_arms(inputs)
    idle: dict[str, Call] = {k: calls.pop(k) for k in ("compiled", "compiled_q", "unfused") if k in calls}
    times = interleaved(calls | quack, rounds)
    # Their elementwise kernels let the GPU cool, which would favour whoever comes next.
    times |= interleaved(idle, rounds) if idle else {}
    rate = 2 * 8192**3 / times["dense"]
    times["floor"] = max(2 * M * I * H / rate, 2e3 * (M * H + L * I * H + 4 * M * I) / copy)
    row |= {k: times.get(k) for k in ("floor", "dense", "gmm", "compiled", "compiled_q", *CONFIGS, "unfused")}
    best = min(quack, key=lambda name: times[name]) if quack else None
    row["quack"] = times[best] if best else None
    row["config"]["quack"] = best
    return row


# ---- report ----------------------------------------------------------------------------------------------------------


def source_sha256() -> str:
    """sha256 of the kernel's sources, one after another in byte order of their paths."""
    digest = hashlib.sha256()
    for path in sorted((HERE.parent / "kernels" / "sm90").glob("*.py"), key=lambda p: p.name.encode()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def line(row: dict) -> str:
    gmm = row["gmm"]
    arms = (k for k in ("floor", "compiled", "compiled_q", *CONFIGS, "unfused", "quack") if row[k])
    return f"{row['name']:17s} {row['split']:8s} gmm {gmm:.3f}  " + "  ".join(f"{k} {row[k] / gmm:.3f}" for k in arms)


def summary(rows: list[dict]) -> str:
    """Geometric means over the uniform rows."""
    rows = [r for r in rows if r["split"] == "uniform"]

    def mean(over: str, under: str) -> str:
        ratios = [r[over] / r[under] for r in rows if r[over] and r[under]]
        return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}" if ratios else "-"

    pairs = [("fused", "gmm"), ("fused", "floor"), ("fused_dbias", "fused"), ("fused_q", "fused"),
             ("compiled", "fused"), ("compiled_q", "fused_q"), ("quack", "fused"), ("unfused", "fused")]  # fmt: skip
    return "geometric means: " + "  ".join(f"{a}/{b} {mean(a, b)}" for a, b in pairs)


def chart(record: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in record["rows"] if r["split"] == "uniform"]
    wanted = ("floor", "fused", "fused_dbias", "fused_q", "quack", "compiled", "compiled_q")
    arms = [k for k in wanted if any(r[k] for r in rows)]
    figure, axes = plt.subplots(figsize=(12, 4.5))
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        axes.bar([x + i * width for x in range(len(rows))], [(r[arm] or 0) / r["gmm"] for r in rows], width, label=arm)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([x + 0.4 for x in range(len(rows))], [r["name"] for r in rows], rotation=20, ha="right")
    axes.set_ylabel("time / grouped GEMM alone (torch)")
    axes.set_title(f"Grouped GEMM + dSwiGLU, {record['gpu']}")
    axes.legend(ncols=len(arms), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _compile(config: DgluConfig) -> bytes:
    return host.export_object(host.compile_dglu(config))


def build(shapes: list[dict]) -> None:
    """Compiles every configuration that the table picks for these shapes, in parallel processes."""
    chosen = {tune.schedule_for(c, n=s["I"], k=s["H"]) for s in shapes for c in CONFIGS.values()}
    wanted = sorted((c for c in chosen if c not in host._functions), key=repr)
    if not wanted:
        return
    workers = max(1, min(len(wanted), (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for config, data in zip(wanted, pool.map(_compile, wanted), strict=True):
            host.install(config, host.load_object(data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", help="names from shapes.json, separated by commas")
    parser.add_argument("--splits", default="uniform,zipf,empty")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", help="where to write the record")
    parser.add_argument("--chart", help="where to write a PNG")
    parser.add_argument("--compiled", help="shapes that get the torch.compile and unfused arms; all by default")
    parser.add_argument("--redraw", help="draw the chart of this record and measure nothing")
    args = parser.parse_args()
    if args.redraw:
        record = json.loads(Path(args.redraw).read_text())
        print("\n".join(map(line, record["rows"])), summary(record["rows"]), sep="\n")
        chart(record, args.chart or args.redraw.replace(".json", ".png"))
        return
    shapes = json.loads((HERE / "shapes.json").read_text())["shapes"]
    if args.shapes:
        shapes = [s for s in shapes if s["name"] in args.shapes.split(",")]
    torch.manual_seed(0)
    build(shapes)
    copy = copy_rate()
    record = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "dsl": importlib.metadata.version("nvidia-cutlass-dsl"), "source": source_sha256(),
        "date": datetime.date.today().isoformat(), "copy_tb_s": copy / 1e12, "rows": [],
    }  # fmt: skip
    for split in args.splits.split(","):
        for shape in shapes:
            compiled = None
            if split == "uniform" and (args.compiled is None or shape["name"] in args.compiled.split(",")):
                compiled = [torch.compile(f, dynamic=False) for f in (dswiglu, dswiglu_quantized)]
            row = measure(shape, split, copy, args.rounds, compiled)
            record["rows"].append(row)
            print(line(row), flush=True)
            torch.cuda.empty_cache()
            rates = [2e-9 * 8192**3 / r["dense"] for r in record["rows"]]
            record["bf16_tflops"] = sum(rates) / len(rates)
            if args.json:
                Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['bf16_tflops']:.0f} TFLOP/s bf16, {copy / 1e12:.2f} TB/s copy")
    print(summary(record["rows"]))
    if args.chart:
        chart(record, args.chart)


if __name__ == "__main__":
    main()
