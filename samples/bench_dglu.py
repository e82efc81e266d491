"""Grouped GEMM + dGLU on the GPU of this host: opfuse's fused Hopper kernel against what else computes the same.

    python samples/bench_dglu.py [--shapes NAME,NAME] [--splits uniform,zipf,empty] [--json OUT] [--chart OUT.png]

Arms, unit-scale random data, each in its own native layout; milliseconds, medians of interleaved rounds (every round
runs each arm once, in a new order, after overwriting 256 MB so that L2 is cold): all arms see the same clock and power.

    dense        a bf16 8192^3 matmul by torch, in the same rounds: the rate behind `floor`
    floor        max(FLOPs / that rate, bytes / measured copy rate) of the bf16 dGLU
    gmm          torch._grouped_mm alone
    compiled     grouped_mm, then dSwiGLU + dprob as one torch.compile'd kernel
    compiled_q   the same with MXFP8 row and column quantization (and the bf16 gradient) in the compiled graph
    fused        opfuse: bf16 gradient and dprob          fused_dbias   and the per-expert bias gradient
    fused_q      opfuse: MXFP8 row and column codes and scales, and dprob
    unfused      opfuse's plan without fusion
    quack        QuACK's gemm_dgated where it is installed: bf16 gradient, recomputed activation, dprob

gmm and the fused arms run on every split of a shape in the same rounds: the same tensors, other offsets. The others run
on the first split; those that leave the tensor cores idle for long in rounds of their own, again beside gmm
(`gmm_beside_compiled`), because the GPU cools under them, which would favour whoever comes next.

launch_us and execute_us: host microseconds of `host.launch` and of one `execute` of a built plan, the medians.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from opfuse.graph_ops import DataType, GluLayout, Graph
from opfuse.kernels.hopper import grouped_dglu
from opfuse.kernels.sm90 import host, tune
from opfuse.kernels.sm90.config import DgluConfig, Schedule

HERE = Path(__file__).parent
OF_THE_FIRST_SPLIT = ("compiled", "compiled_q", "unfused", "quack", "gmm_beside_compiled", "launch_us", "execute_us")
AS_GOOD = 1024  # mean rows of an expert from which uneven splits should cost no more than even ones
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


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def end_offsets(split: str, L: int, M: int) -> torch.Tensor:
    return torch.tensor(group_sizes(split, L, M)).cumsum(0).to(torch.int32).cuda()


def make_inputs(L: int, M: int, H: int, I: int) -> dict[str, torch.Tensor]:
    return {
        "dy": randn(M, H),
        "b": (randn(L, I, H) / H**0.5).transpose(1, 2),  # logical (L, K, N), K-major
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


def fused_arm(config: DgluConfig, inputs: dict, L: int, M: int, H: int, I: int) -> tuple[Callable, Schedule]:
    """(a function that launches one configuration with the offsets it is given, schedule)."""
    config = tune.schedule_for(config, n=I, k=H)
    host.install(config, grouped_dglu.compiled(config, grouped_dglu.kernel_cache()))
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
    return lambda offsets: host.launch(config, offsets=offsets, **inputs, **out), config.schedule


def graph_arm(fused: bool, inputs: Mapping[str, torch.Tensor], L: int, M: int, H: int, I: int) -> Call:
    """One `execute` of the graph as a user writes it, planned with fusion or without, into buffers made before."""
    g = Graph(io_data_type=DataType.BFLOAT16, intermediate_data_type=DataType.FLOAT)
    dy = g.tensor("dy", dim=(M, H))
    w = g.tensor("b", dim=(L, H, I), stride=(I * H, 1, H))
    h = g.tensor("c", dim=(M, 2 * I), glu_layout=GluLayout.interleaved(32))
    offsets = g.tensor("offsets", dim=(L,), data_type=DataType.INT32)
    prob = g.tensor("prob", dim=(M,), data_type=DataType.FLOAT)
    dh, dprob = g.glu_backward(g.grouped_matmul(dy, w, offsets), h, prob=prob, act="swiglu")
    dh.set_name("d").set_output(True).set_data_type(DataType.BFLOAT16)
    dprob.set_name("dprob").set_output(True)
    g.build(device="cuda", fused=fused)
    pack = {**inputs, "d": torch.empty(M, 2 * I, device="cuda", dtype=torch.bfloat16),
            "dprob": torch.empty(M, device="cuda")}  # fmt: skip
    nbytes = g.get_workspace_size()
    workspace = torch.empty(nbytes, device="cuda", dtype=torch.uint8) if nbytes else None
    return lambda: g.execute(pack, workspace)


def compiled_arms() -> tuple[Callable, Callable]:
    """torch.compile of what follows the grouped matmul, for the shapes of its first call."""
    torch.compiler.reset()  # a function is compiled for few shapes, then no more
    return torch.compile(dswiglu, dynamic=False), torch.compile(dswiglu_quantized, dynamic=False)


def quack_arms(inputs: Mapping[str, torch.Tensor]) -> dict[str, Call]:
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


def interleaved(calls: Mapping[Any, Call], rounds: int) -> dict[Any, float]:
    """Median milliseconds of every call; each round runs all of them, so that they share the GPU's state."""
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    for call in calls.values():
        call()
        call()
    events: dict[Any, list] = {name: [] for name in calls}
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
    """Median host time of one call while the stream is busy and its queue not full."""
    taken = []
    for turn in range(200):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
        if turn % 50 == 49:
            torch.cuda.synchronize()
    return statistics.median(taken) * 1e6


def floor_ms(L: int, M: int, H: int, I: int, dense_ms: float, copy: float) -> float:
    """Milliseconds of the dGLU's FLOPs at the rate of `dense`, or of its bytes at `copy` bytes a second; L experts
    have rows."""
    flops, read, written = 2 * M * I * H, M * H + L * I * H + 2 * M * I, 2 * M * I
    return max(flops / (2 * 8192**3 / dense_ms), 2e3 * (read + written) / copy)


def measure(shape: dict, splits: Sequence[str], copy: float, rounds: int, peers: bool) -> list[dict]:
    """A row for each split of a shape; `peers`: the first one gets the arms of torch.compile and without fusion."""
    L, M, H, I = size = tuple(shape[k] for k in "LMHI")
    inputs = make_inputs(*size)
    offsets = {split: end_offsets(split, L, M) for split in splits}
    first = {**inputs, "offsets": offsets[splits[0]]}
    x, y = randn(8192, 8192), randn(8192, 8192)

    def gmm(ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(inputs["dy"], inputs["b"], offs=ends, out_dtype=torch.bfloat16)

    arms: dict[str, Callable] = {"gmm": gmm}
    config: dict[str, str | None] = {}
    for name, chosen in CONFIGS.items():
        arms[name], s = fused_arm(chosen, inputs, *size)
        mode = "ping-pong" if s.pingpong else "cooperative"
        config[name] = f"{s.tile_m}x{s.tile_n} {mode} {s.cluster_m}x{s.cluster_n}"
    calls: dict[Any, Call] = {"dense": lambda: x @ y.T}
    for split, ends in offsets.items():
        calls |= {(name, split): (lambda arm=arm, ends=ends: arm(ends)) for name, arm in arms.items()}
    quack = quack_arms(first)
    times = interleaved(calls | quack, rounds)
    own: dict[str, float] = {}
    if peers:
        plain, quantized = compiled_arms()
        own = interleaved(
            {
                "gmm_beside_compiled": lambda: gmm(first["offsets"]),
                "compiled": lambda: plain(gmm(first["offsets"]), inputs["c"], inputs["prob"]),
                "compiled_q": lambda: quantized(gmm(first["offsets"]), inputs["c"], inputs["prob"]),
                "unfused": graph_arm(False, first, *size),
            },
            rounds,
        )
    best = min(quack, key=lambda name: times[name]) if quack else None
    own |= {
        "launch_us": host_microseconds(calls["fused", splits[0]]),
        "execute_us": host_microseconds(graph_arm(True, first, *size)),
    } | ({"quack": times[best]} if best else {})
    rows = []
    for split in splits:
        busy = sum(rows_of > 0 for rows_of in group_sizes(split, L, M))
        row = {"name": shape["name"], "split": split, "L": L, "M": M, "H": H, "I": I, "config": config}
        row |= {"floor": floor_ms(busy, M, H, I, times["dense"], copy), "dense": times["dense"]}
        row |= {arm: times[arm, split] for arm in arms}
        row |= {k: own.get(k) if split == splits[0] else None for k in OF_THE_FIRST_SPLIT}
        rows.append({**row, "config": {**config, "quack": best}} if split == splits[0] else row)
    return rows


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
    host_side = (
        f"  execute {row['execute_us']:.1f} us, launch {row['launch_us']:.1f} us" if row.get("launch_us") else ""
    )
    return (
        f"{row['name']:17s} {row['split']:8s} gmm {gmm:.3f}  "
        + "  ".join(f"{k} {row[k] / gmm:.3f}" for k in arms)
        + host_side
    )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: Sequence[dict]) -> str:
    """Geometric means over the rows of the first split, the worst shape against gmm, and what uneven splits cost."""
    splits = list(dict.fromkeys(r["split"] for r in rows))
    first = [r for r in rows if r["split"] == splits[0]]

    def ratios(over: str, under: str) -> list[float]:
        return [r[over] / r[under] for r in first if r[over] and r[under]]

    pairs = [("fused", "gmm"), ("fused", "floor"), ("fused_dbias", "fused"), ("fused_q", "fused"),
             ("compiled", "fused"), ("compiled_q", "fused_q"), ("quack", "fused"), ("unfused", "fused")]  # fmt: skip
    means = "  ".join(f"{a}/{b} {geometric_mean(r):.3f}" for a, b in pairs if (r := ratios(a, b)))
    lines = [f"geometric means, {splits[0]}: {means}"]
    for over, under, worst in (("fused", "gmm", max), ("quack", "fused", min)):
        if found := ratios(over, under):
            lines.append(f"{'largest' if worst is max else 'smallest'} {over}/{under} {worst(found):.3f}")
    times = {(r["name"], r["split"]): r for r in rows}
    for split in splits[1:]:
        told = []
        for arm in ("gmm", *CONFIGS):
            costs = {r["name"]: times[r["name"], split][arm] / r[arm] for r in first if r["M"] / r["L"] >= AS_GOOD}
            if costs:
                worst = max(costs, key=lambda name: costs[name])
                told.append(f"{arm} {geometric_mean(list(costs.values())):.3f} (most {costs[worst]:.3f}, {worst})")
        lines.append(f"{split} / {splits[0]}, the same FLOPs, from {AS_GOOD} rows an expert: " + "  ".join(told))
    return "\n".join(lines)


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


# ---- compiling before measuring --------------------------------------------------------------------------------------


def _compile(config: DgluConfig) -> None:
    grouped_dglu.compiled(config, grouped_dglu.kernel_cache())


def _torch_compile(shape: dict) -> None:
    M, I = shape["M"], shape["I"]
    given = randn(M, I), randn(M, 2 * I), torch.rand(M, device="cuda")
    for function in compiled_arms():
        function(*given)
    torch.cuda.synchronize()


def prepare(shapes: Sequence[dict], peers: Sequence[dict]) -> None:
    """Fills the kernel cache and torch.compile's, in parallel processes; QuACK's kernels meanwhile in this one."""
    chosen = sorted({tune.schedule_for(c, n=s["I"], k=s["H"]) for s in shapes for c in CONFIGS.values()}, key=repr)
    workers = max(1, min(len(chosen) + len(peers), os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(_compile, c) for c in chosen] + [pool.submit(_torch_compile, s) for s in peers]
        size = 4, 4096, 2048, 768
        for call in quack_arms({**make_inputs(*size), "offsets": end_offsets("uniform", 4, 4096)}).values():
            call()
        for job in jobs:
            job.result()
    # What the processes tuned while they shared the GPU is tuned again, alone.
    for tuned in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.best_config"):
        tuned.unlink()


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
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        run(args)


def run(args: argparse.Namespace) -> None:
    """Measures what the command line asks for."""
    shapes = json.loads((HERE / "shapes.json").read_text())["shapes"]
    if args.shapes:
        shapes = [s for s in shapes if s["name"] in args.shapes.split(",")]
    peers = [s for s in shapes if args.compiled is None or s["name"] in args.compiled.split(",")]
    torch.manual_seed(0)
    begin = time.monotonic()
    prepare(shapes, peers)
    prepared = time.monotonic() - begin
    copy = copy_rate()
    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "dsl": importlib.metadata.version("nvidia-cutlass-dsl"), "source": source_sha256(),
        "date": datetime.date.today().isoformat(), "copy_tb_s": copy / 1e12, "bf16_tflops": 0.0, "rows": [],
    }  # fmt: skip
    for shape in shapes:
        rows = measure(shape, args.splits.split(","), copy, args.rounds, shape in peers)
        record["rows"] += rows
        print(*map(line, rows), sep="\n", flush=True)
        torch.cuda.empty_cache()
        rates = [2e-9 * 8192**3 / r["dense"] for r in record["rows"]]
        record["bf16_tflops"] = sum(rates) / len(rates)
        if args.json:
            Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    print(f"{prepared:.0f} s of compiling, {time.monotonic() - begin - prepared:.0f} s of measuring")
    print(f"{record['bf16_tflops']:.0f} TFLOP/s bf16, {copy / 1e12:.2f} TB/s copy")
    print(summary(record["rows"]))
    if args.chart:
        chart(record, args.chart)


if __name__ == "__main__":
    main()
