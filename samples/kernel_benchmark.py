"""What the benchmarks of our Hopper kernels share (bench_{dglu,glu,gemm,wgrad}.py): measuring, record, summary, chart.

Milliseconds are medians of interleaved rounds: every round runs each arm once, in a new order, after overwriting 256 MB
so that L2 is cold; all arms see the same clock and power.

All have these arms beside their own: dense, a bf16 8192^3 matmul by torch in the same rounds, the rate behind `floor`;
floor, max(FLOPs / that rate, bytes / measured copy rate); gmm, torch._grouped_mm alone.

gmm and the fused arms run on every split of a shape in the same rounds: the same tensors, other offsets. The others run
on the first split; those that leave the tensor cores idle for long in rounds of their own, again beside gmm
(`gmm_beside_compiled`), because the GPU cools under them, which would favour whoever comes next.

launch_us and execute_us: host microseconds of one launch, which checks its tensors, and of one `execute` of a built
plan, the medians.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from opfuse.graph_ops import Graph

HERE = Path(__file__).parent
AS_GOOD = 1024  # mean rows of an expert from which uneven splits should cost no more than even ones
Call = Callable[..., Any]
Tensors = dict[str, torch.Tensor]


class Shape(NamedTuple):
    """A shape of shapes.json: L experts, M rows, H hidden, I intermediate."""

    name: str
    L: int
    M: int
    H: int
    I: int


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


def quack_configs(tiles: Sequence[tuple[int, int, bool, int]]) -> dict[str, Any]:
    """QuACK's configurations of these (rows, columns, ping-pong, CTAs of a cluster of two along M); none without it."""
    try:
        from quack.gemm_config import GemmConfig  # type: ignore[import-not-found]
    except ImportError:
        return {}
    return {
        f"quack {m}x{n}{'' if pingpong else ' cooperative'} {cluster}x{3 - cluster}": GemmConfig(
            tile_m=m, tile_n=n, pingpong=pingpong, cluster_m=cluster, cluster_n=3 - cluster
        )
        for m, n, pingpong, cluster in tiles
    }


def quack_gemms(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, offsets: torch.Tensor, of: str) -> dict[str, Call]:
    """QuACK's grouped matmul of rows (`of` "m") or over rows ("k") by configuration; none where it is not installed."""
    configs = quack_configs([(128, 128, True, 2), (128, 192, True, 2), (128, 256, False, 2)])
    if not configs:
        return {}
    from quack.gemm_interface import gemm_tuned  # type: ignore[import-not-found]

    lengths = {f"cu_seqlens_{of}": torch.cat([torch.zeros_like(offsets[:1]), offsets])}

    def arm(config: Any) -> Call:
        return lambda: gemm_tuned.fn(a, b, out, config=config, dynamic_scheduler=True, **lengths)

    return {name: arm(config) for name, config in configs.items()}


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


class KernelBenchmark(ABC):
    """A fused kernel, what else computes the same, and how they are measured."""

    title: str
    operand: str
    """The input that the grouped matmul multiplies with the weights, b."""
    configs: Mapping[str, Any]
    """Configurations of the fused kernel by arm, "fused" among them, without a schedule."""
    rivals: Mapping[str, Call]
    """What follows the grouped matmul, to be compiled by torch, by arm: of the product and the inputs in `beside`."""
    beside: tuple[str, ...]
    ratios: tuple[tuple[str, str], ...]
    """(over, under) of the summary's geometric means."""

    def problems(self, shapes: Sequence[Shape]) -> list[Shape]:
        """What is measured of these shapes: themselves, where one shape is one problem."""
        return list(shapes)

    @abstractmethod
    def inputs(self, shape: Shape) -> Tensors:
        """Unit-scale random inputs, but for offsets."""

    def product(self, inputs: Tensors, offsets: torch.Tensor) -> torch.Tensor:
        """The grouped matmul alone, by torch."""
        return torch._grouped_mm(inputs[self.operand], inputs["b"], offs=offsets, out_dtype=torch.bfloat16)

    @abstractmethod
    def product_columns(self, shape: Shape) -> int:
        """Columns of the grouped matmul."""

    @abstractmethod
    def work(self, shape: Shape, experts: int) -> tuple[int, int]:
        """(FLOPs, bytes read and written) of the bf16 task; `experts` have rows."""

    @abstractmethod
    def scheduled(self, config: Any, shape: Shape) -> Any:
        """The configuration with the schedule that the kernel's table picks."""

    @abstractmethod
    def compiled(self, config: Any) -> Any:
        """The function of a scheduled configuration, from the kernel cache or compiled into it."""

    @abstractmethod
    def launcher(self, config: Any, inputs: Tensors, shape: Shape) -> Call:
        """A function that launches a scheduled configuration with the offsets it is given."""

    @abstractmethod
    def declare(self, graph: Graph, shape: Shape) -> None:
        """The task as a user's graph, on tensors named as `inputs`."""

    @abstractmethod
    def outputs(self, shape: Shape) -> Tensors:
        """Buffers of the graph's outputs by name."""

    @abstractmethod
    def quack(self, inputs: Tensors) -> dict[str, Call]:
        """QuACK's calls by configuration, of inputs with offsets; none where it is not installed."""

    def graph_arm(self, fused: bool, inputs: Tensors, shape: Shape) -> Call:
        """One `execute` of the graph as a user writes it, planned with fusion or without, into buffers made before."""
        from opfuse.graph_ops import DataType

        g = Graph(io_data_type=DataType.BFLOAT16, intermediate_data_type=DataType.FLOAT)
        self.declare(g, shape)
        g.build(device="cuda", fused=fused)
        pack = {**inputs, **self.outputs(shape)}
        nbytes = g.get_workspace_size()
        workspace = torch.empty(nbytes, device="cuda", dtype=torch.uint8) if nbytes else None
        return lambda: g.execute(pack, workspace)

    def compiled_rivals(self) -> dict[str, Call]:
        """torch.compile of what follows the grouped matmul, for the shapes of its first call."""
        torch.compiler.reset()  # a function is compiled for few shapes, then no more
        return {name: torch.compile(function, dynamic=False) for name, function in self.rivals.items()}

    def warm_rivals(self, shape: Shape) -> None:
        """Compiles the rivals for one shape, into torch's cache on disk."""
        product, inputs = randn(shape.M, self.product_columns(shape)), self.inputs(shape._replace(L=1))
        for function in self.compiled_rivals().values():
            function(product, *(inputs[name] for name in self.beside))
        torch.cuda.synchronize()

    def measure(self, shape: Shape, splits: Sequence[str], copy: float, rounds: int, peers: bool) -> list[dict]:
        """A row for each split of a shape; `peers`: the first one gets the arms of torch.compile and without fusion."""
        inputs = self.inputs(shape)
        offsets = {split: end_offsets(split, shape.L, shape.M) for split in splits}
        first = {**inputs, "offsets": offsets[splits[0]]}
        x, y = randn(8192, 8192), randn(8192, 8192)

        def gmm(ends: torch.Tensor = first["offsets"]) -> torch.Tensor:
            return self.product(inputs, ends)

        arms: dict[str, Call] = {"gmm": gmm}
        chosen = {name: self.scheduled(config, shape) for name, config in self.configs.items()}
        for name, config in chosen.items():
            arms[name] = self.launcher(config, inputs, shape)
        calls: dict[Any, Call] = {"dense": lambda: x @ y.T}
        for split, ends in offsets.items():
            calls |= {(name, split): (lambda arm=arm, ends=ends: arm(ends)) for name, arm in arms.items()}
        quack = self.quack(first)
        times = interleaved(calls | quack, rounds)
        own: dict[str, float] = {}
        if peers:
            given = [inputs[name] for name in self.beside]
            rivals = {
                name: (lambda function=function: function(gmm(), *given))
                for name, function in self.compiled_rivals().items()
            }
            unfused = self.graph_arm(False, first, shape)
            own = interleaved({"gmm_beside_compiled": gmm, **rivals, "unfused": unfused}, rounds)
        best = min(quack, key=lambda name: times[name]) if quack else None
        own |= {
            "launch_us": host_microseconds(calls["fused", splits[0]]),
            "execute_us": host_microseconds(self.graph_arm(True, first, shape)),
        } | ({"quack": times[best]} if best else {})
        of_the_first = (*self.rivals, "unfused", "quack", "gmm_beside_compiled", "launch_us", "execute_us")
        schedules: dict[str, str | None] = {name: _told(config.schedule) for name, config in chosen.items()}
        rows = []
        for split in splits:
            is_first = split == splits[0]
            busy = sum(rows_of > 0 for rows_of in group_sizes(split, shape.L, shape.M))
            row = {**shape._asdict(), "split": split, "config": {**schedules, "quack": best} if is_first else schedules}
            row |= {"floor": floor_ms(*self.work(shape, busy), times["dense"], copy), "dense": times["dense"]}
            row |= {arm: times[arm, split] for arm in arms}
            rows.append(row | {k: own.get(k) if is_first else None for k in of_the_first})
        return rows

    def prepare(self, shapes: Sequence[Shape], peers: Sequence[Shape]) -> None:
        """Fills the kernel cache and torch.compile's, in parallel processes; QuACK's kernels meanwhile in this one."""
        chosen = sorted({self.scheduled(c, s) for s in shapes for c in self.configs.values()}, key=repr)
        workers = max(1, min(len(chosen) + len(peers), os.cpu_count() or 1))
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(_compile, self, c) for c in chosen] + [pool.submit(self.warm_rivals, s) for s in peers]
            small = Shape("small", 4, 4096, 2048, 768)
            for call in self.quack({**self.inputs(small), "offsets": end_offsets("uniform", 4, 4096)}).values():
                call()
            for job in jobs:
                job.result()
        # What the processes tuned while they shared the GPU is tuned again, alone.
        for tuned in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.best_config"):
            tuned.unlink()

    # ---- report ------------------------------------------------------------------------------------------------------

    @property
    def told(self) -> tuple[str, ...]:
        """The arms that reports show as parts of gmm."""
        return ("floor", *self.rivals, *self.configs, "unfused", "quack")

    def part(self, row: dict, arm: str) -> float:
        """An arm's time as a part of gmm's in the same rounds, whose clock both had."""
        alone = arm in (*self.rivals, "unfused")
        return row[arm] / row["gmm_beside_compiled" if alone else "gmm"]

    def line(self, row: dict) -> str:
        parts = "  ".join(f"{k} {self.part(row, k):.3f}" for k in self.told if row[k])
        host = f"  execute {row['execute_us']:.1f} us, launch {row['launch_us']:.1f} us" if row.get("launch_us") else ""
        return f"{row['name']:17s} {row['split']:8s} gmm {row['gmm']:.3f}  {parts}{host}"

    def summary(self, rows: Sequence[dict]) -> str:
        """Geometric means over the first split's rows, the worst shape against gmm, and what uneven splits cost.

        Times enter as parts of gmm in their own rounds: beside the compiled arms the clock was 19 % higher on an H200.
        """
        splits = list(dict.fromkeys(r["split"] for r in rows))
        first = [r for r in rows if r["split"] == splits[0]]

        def ratios(over: str, under: str) -> list[float]:
            return [self.part(r, over) / self.part(r, under) for r in first if r[over] and r[under]]

        means = "  ".join(f"{a}/{b} {geometric_mean(r):.3f}" for a, b in self.ratios if (r := ratios(a, b)))
        lines = [f"geometric means, {splits[0]}: {means}"]
        for over, under, worst in (("fused", "gmm", max), ("quack", "fused", min)):
            if found := ratios(over, under):
                lines.append(f"{'largest' if worst is max else 'smallest'} {over}/{under} {worst(found):.3f}")
        times = {(r["name"], r["split"]): r for r in rows}
        for split in splits[1:]:
            told = []
            for arm in ("gmm", *self.configs):
                costs = {r["name"]: times[r["name"], split][arm] / r[arm] for r in first if r["M"] / r["L"] >= AS_GOOD}
                if costs:
                    worst_of = max(costs, key=lambda name: costs[name])
                    mean = geometric_mean(list(costs.values()))
                    told.append(f"{arm} {mean:.3f} (most {costs[worst_of]:.3f}, {worst_of})")
            lines.append(f"{split} / {splits[0]}, the same FLOPs, from {AS_GOOD} rows an expert: " + "  ".join(told))
        return "\n".join(lines)

    def chart(self, record: dict, path: str) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        rows = [r for r in record["rows"] if r["split"] == "uniform"]
        wanted = ("floor", *self.configs, "quack", *self.rivals)
        arms = [k for k in wanted if any(r[k] for r in rows)]
        figure, axes = plt.subplots(figsize=(12, 4.5))
        width = 0.8 / len(arms)
        for i, arm in enumerate(arms):
            heights = [self.part(r, arm) if r[arm] else 0 for r in rows]
            axes.bar([x + i * width for x in range(len(rows))], heights, width, label=arm)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks([x + 0.4 for x in range(len(rows))], [r["name"] for r in rows], rotation=20, ha="right")
        axes.set_ylabel("time / grouped GEMM alone (torch)")
        axes.set_title(f"{self.title}, {record['gpu']}")
        axes.legend(ncols=len(arms), fontsize=8)
        figure.tight_layout()
        figure.savefig(path, dpi=120)


def _compile(benchmark: KernelBenchmark, config: Any) -> None:
    benchmark.compiled(config)  # what comes back stays in this process


def _told(schedule: Any) -> str:
    mode = "ping-pong" if schedule.pingpong else "cooperative"
    return f"{schedule.tile_m}x{schedule.tile_n} {mode} {schedule.cluster_m}x{schedule.cluster_n}"


def floor_ms(flops: int, nbytes: int, dense_ms: float, copy: float) -> float:
    """Milliseconds of FLOPs at the rate of `dense`, or of bytes at `copy` bytes a second, whichever is longer."""
    return max(flops / (2 * 8192**3 / dense_ms), 1e3 * nbytes / copy)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# ---- command line ----------------------------------------------------------------------------------------------------


def source_sha256() -> str:
    """sha256 of the kernels' sources, one after another in byte order of their paths."""
    digest = hashlib.sha256()
    for path in sorted((HERE.parent / "kernels" / "sm90").glob("*.py"), key=lambda p: p.name.encode()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main(benchmark: KernelBenchmark, description: str) -> None:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
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
        print("\n".join(map(benchmark.line, record["rows"])), benchmark.summary(record["rows"]), sep="\n")
        benchmark.chart(record, args.chart or args.redraw.replace(".json", ".png"))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        _run(benchmark, args)


def _run(benchmark: KernelBenchmark, args: argparse.Namespace) -> None:
    """Measures what the command line asks for."""
    shapes = [Shape(**s) for s in json.loads((HERE / "shapes.json").read_text())["shapes"]]
    if args.shapes:
        shapes = [s for s in shapes if s.name in args.shapes.split(",")]
    peers = benchmark.problems([s for s in shapes if args.compiled is None or s.name in args.compiled.split(",")])
    shapes = benchmark.problems(shapes)
    torch.manual_seed(0)
    begin = time.monotonic()
    benchmark.prepare(shapes, peers)
    prepared = time.monotonic() - begin
    copy = copy_rate()
    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "dsl": importlib.metadata.version("nvidia-cutlass-dsl"), "source": source_sha256(),
        "date": datetime.date.today().isoformat(), "copy_tb_s": copy / 1e12, "bf16_tflops": 0.0, "rows": [],
    }  # fmt: skip
    for shape in shapes:
        rows = benchmark.measure(shape, args.splits.split(","), copy, args.rounds, shape in peers)
        record["rows"] += rows
        print(*map(benchmark.line, rows), sep="\n", flush=True)
        torch.cuda.empty_cache()
        rates = [2e-9 * 8192**3 / r["dense"] for r in record["rows"]]
        record["bf16_tflops"] = sum(rates) / len(rates)
        if args.json:
            Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    print(f"{prepared:.0f} s of compiling, {time.monotonic() - begin - prepared:.0f} s of measuring")
    print(f"{record['bf16_tflops']:.0f} TFLOP/s bf16, {copy / 1e12:.2f} TB/s copy")
    print(benchmark.summary(record["rows"]))
    if args.chart:
        benchmark.chart(record, args.chart)
