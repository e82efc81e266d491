"""Expert blocks of three frameworks, forward and backward: opfuse against eager, grouped_mm and torch.compile.

    python samples/bench_moe.py [--frameworks hf,torchtitan,megatron] [--shapes NAME,NAME] [--json OUT] [--chart PNG]

The blocks and their arms: moe_blocks.py. All arms of a row share dtype (bf16), inputs, weights and routing (every
expert gets the same number of rows). No router runs in any arm. Sorting tokens by expert and adding up their results is
part of every arm of `hf`, whose experts take tokens, and of none of `torchtitan` and `megatron`, whose experts take
sorted rows.

Before anything is timed, the output and every gradient of every arm are compared with those of `eager`; a difference
above BOUND, relative to the norm, is an error. Times are milliseconds, medians of interleaved rounds: each round runs
each arm once, in a new order, forward and then backward into new gradients, after L2 was overwritten several times,
which also lets the host run ahead as it does inside a training step. `peak_gib` is the most that one forward and
backward allocate beside inputs and weights: saved activations, temporaries, and all gradients.

`dglu`: the grouped matmul that gives the gradient of the activation, and the activation's derivative, alone: as
autograd runs them in that framework's grouped_mm path, against opfuse's plan of the same.

`compiled`: what opfuse's backend told of the arm that torch.compile(backend="opfuse") runs: the kernels that it fused,
forward and backward, what it merged, why it left the rest; and `ran`, the operation graphs that one forward and
backward of that arm then ran, as the profiler saw them.

Ratios are the time (or memory) of another arm over opfuse's: above 1, opfuse is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from kernel_benchmark import source_sha256
from moe_blocks import BLOCKS, Arm, Block, Shape
from opfuse.graph_ops.torch.compile import CompileExplanation
from progress import progress_bar

HERE = Path(__file__).parent
BOUND = 2e-2
"""Difference of an output or gradient from eager's, relative to its norm: bf16 rounds at other places in each arm."""

FLUSHES = 8
"""Times that 256 MB are overwritten before a measurement: 0.5 ms of work, more than the host needs to be ahead."""

PARTS = ("forward", "backward")
PHASES = ("forward", "backward", "both")
TIMES = tuple(f"{phase}_ms" for phase in PHASES)
ARMS = ("eager", "grouped_mm", "compile", "opfuse", "opfuse_mlp")
OURS, THEIRS = "opfuse", "grouped_mm"
MEASURED_ROUNDS = 15
SLOW_ROUNDS = 3
WORKERS = 8
"""Processes that compile ahead: each holds one shape on the GPU, 10 GB or so."""

FAILURES = (ArithmeticError, RuntimeError)
"""What ends a row and not the run: arms that disagree, and whatever torch raises, out of memory included."""


# ---- measuring -------------------------------------------------------------------------------------------------------


class Clock:
    """Marks on the device's own time line: CUDA events, or the host's clock where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._flush = torch.empty(2**26 if self.is_cuda else 0, dtype=torch.int32, device=device)

    def prepare(self) -> None:
        """Empties L2 and gives the device something to do while the host goes on."""
        for _ in range(FLUSHES):
            self._flush.zero_()

    def mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, marks: Sequence[Any]) -> list[float]:
        """Between each mark and the next one."""
        pairs = itertools.pairwise(marks)
        if not self.is_cuda:
            return [1e3 * (end - start) for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


Stages = Sequence[Callable[[Any], Any]]
"""Calls that are timed one after another; each is given what the one before returned, the first None."""


def rounds_of(stages: Mapping[str, Stages], rounds: Mapping[str, int], device: torch.device) -> dict[str, list[float]]:
    """Median milliseconds of every stage of every name, and then of all its stages together."""
    clock = Clock(device)
    marks: dict[str, list[list[Any]]] = {name: [] for name in stages}
    for i in range(-1, max(rounds.values())):  # the first round, which is not counted, fills the allocator's pools
        order = [name for name in stages if i < rounds[name]]
        random.Random(i).shuffle(order)  # what ran before an arm sets the clock rate it meets
        for name in order:
            clock.prepare()
            taken, value = [clock.mark()], None
            for stage in stages[name]:
                value = stage(value)
                taken.append(clock.mark())
            del value
            if i >= 0:
                marks[name].append(taken)
    found = {}
    for name, runs in marks.items():
        times = [clock.milliseconds(run) for run in runs]
        found[name] = [statistics.median(t) for t in zip(*(([*t, sum(t)]) for t in times), strict=True)]
    return found


def stages_of(arm: Arm, dy: torch.Tensor) -> Stages:
    leaves = list(arm.leaves.values())
    return (lambda _: arm.forward()), (lambda y: torch.autograd.grad(y, leaves, dy))


def run(arm: Arm, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and the gradients by the names that every arm of a framework has."""
    y = arm.forward()
    found = {"y": y.detach()}
    for name, gradient in zip(arm.leaves, torch.autograd.grad(y, list(arm.leaves.values()), dy), strict=True):
        if name == "w13":  # gate and up weights in one parameter
            found["w1"], found["w3"] = gradient.chunk(2, 1)
        else:
            found[name] = gradient
    return found


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|, Frobenius norms."""
    apart = torch.linalg.vector_norm(a - b, dtype=torch.float32)
    return float(apart / torch.linalg.vector_norm(b, dtype=torch.float32))


def compare(block: Block, where: str) -> dict[str, float]:
    """The largest difference of each arm from eager, and of opfuse's dGLU from the framework's. ArithmeticError above
    BOUND, and for what is not a number."""
    wanted = run(block.arms["eager"], block.dy)
    found = {}
    for name, arm in block.arms.items():
        if name == "eager":
            continue
        got = run(arm, block.dy)
        found[name] = _largest({key: (got[key], wanted[key]) for key in wanted}, f"{where}, arm {name}")
    del wanted
    pairs = zip(block.dglu[OURS](), block.dglu[THEIRS](), strict=True)
    apart = {f"output {i}": pair for i, pair in enumerate(pairs)}
    return {**found, "dglu": _largest(apart, f"{where}, dGLU alone")}


def _largest(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], where: str) -> float:
    apart = {name: difference(got, wanted) for name, (got, wanted) in pairs.items()}
    if wrong := {name: f"{value:.2e}" for name, value in apart.items() if not value <= BOUND}:
        raise ArithmeticError(f"{where}: relative differences {wrong}, bound {BOUND}")
    return max(apart.values())


def peak_gib(arm: Arm, dy: torch.Tensor) -> float | None:
    """GiB that one forward and backward allocate at most, beside what is there before; None without a GPU."""
    if dy.device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(arm, dy)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def told(found: CompileExplanation, arm: Arm, dy: torch.Tensor) -> dict[str, Any]:
    """What torch.compile made of an arm, by what the backend says, and by what one forward and backward run."""
    in_place = [(r.part, r.plan) for r in found.regions if r.replaced and r.plan is not None]
    run(arm, dy)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        run(arm, dy)
    return {
        **{part: [s.kernel for p, plan in in_place if p == part for s in plan.fused_steps] for part in PARTS},
        "merged": [str(merge) for merge in found.merges],
        "left": [f"{r.part}, {', '.join(r.nodes[:2])}: {r.reason}" for r in found.regions if not r.replaced],
        "graphs": len(in_place),
        "ran": sum(event.name == "opfuse::run_graph" for event in profiled.events()),
    }


def _ignoring(call: Callable[[], Any], _: Any) -> Any:
    return call()


def measure(framework: str, shape: Shape, device: torch.device, rounds: int) -> dict[str, Any]:
    """A row of the record."""
    block = BLOCKS[framework](shape, device)
    explained = block.explained() if block.explained is not None else None  # first: it forgets all compiled code
    apart = compare(block, f"{framework}, {shape.name}")
    compiled = told(explained, block.arms[OURS], block.dy) if explained is not None else None
    peaks = {name: peak_gib(arm, block.dy) for name, arm in block.arms.items()}
    counts = {name: min(SLOW_ROUNDS, rounds) if arm.slow else rounds for name, arm in block.arms.items()}
    times = rounds_of({name: stages_of(arm, block.dy) for name, arm in block.arms.items()}, counts, device)
    calls = {name: [functools.partial(_ignoring, call)] for name, call in block.dglu.items()}
    alone = rounds_of(calls, dict.fromkeys(calls, rounds), device)
    return {
        "framework": framework, "shape": shape.name, "L": shape.L, "M": shape.M, "H": shape.H, "I": shape.I,
        "top_k": shape.top_k if framework == "hf" else None,
        "arms": {n: {**dict(zip(TIMES, t, strict=True)), "peak_gib": peaks[n]} for n, t in times.items()},
        "dglu": {f"{name}_ms": t[0] for name, t in alone.items()},
        "dglu_plan": block.dglu_plan,
        "compiled": compiled,
        "difference": apart,
    }  # fmt: skip


# ---- report ----------------------------------------------------------------------------------------------------------


def ratio(row: Mapping[str, Any], arm: str, key: str) -> float | None:
    """Another arm's time or memory over opfuse's."""
    arms = row["arms"]
    if arm not in arms or not arms[arm][key]:
        return None
    return arms[arm][key] / arms[OURS][key]


def line(row: Mapping[str, Any]) -> str:
    times = "  ".join(
        f"{name} {a['forward_ms']:.2f}+{a['backward_ms']:.2f}" + (f" {a['peak_gib']:.1f}G" if a["peak_gib"] else "")
        for name, a in row["arms"].items()
    )
    both, alone = ratio(row, THEIRS, "both_ms"), row["dglu"][f"{THEIRS}_ms"] / row["dglu"][f"{OURS}_ms"]
    found = f"{row['framework']:10s} {row['shape']:17s} {both:.3f} x  dglu {alone:.2f} x  [ms both ways: {times}]"
    if compiled := row.get("compiled"):
        counts = " and ".join(f"{len(compiled[part])} {part}" for part in PARTS)
        found += f"\n  torch.compile(backend='opfuse'): {counts} fused; {compiled['ran']} operation graphs ran"
        found += "".join(f"\n  {said}" for said in (*compiled["merged"], *compiled["left"]))
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By framework, and over all rows: geometric means of the ratios, and the least of those that have a bound."""
    if not rows:
        return {}
    frameworks = dict.fromkeys(row["framework"] for row in rows)
    return {name: _summary([r for r in rows if name in ("all", r["framework"])]) for name in (*frameworks, "all")}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for arm in ARMS:
        for key in (*TIMES, "peak_gib"):
            values = [v for row in rows if (v := ratio(row, arm, key)) is not None]
            if values and arm != OURS:
                found[f"{arm}_{key.removesuffix('_ms')}"] = statistics.geometric_mean(values)
                if (arm, key) == (THEIRS, "both_ms"):
                    found[f"{arm}_both_least"] = min(values)
    alone = [row["dglu"][f"{THEIRS}_ms"] / row["dglu"][f"{OURS}_ms"] for row in rows]
    return {**found, "dglu": statistics.geometric_mean(alone), "dglu_least": min(alone)}


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """The summary as lines: opfuse's ratios, a framework a line."""
    columns = ("grouped_mm_both", "grouped_mm_both_least", "grouped_mm_forward", "grouped_mm_backward",
               "grouped_mm_peak_gib", "compile_both", "compile_peak_gib", "eager_both", "opfuse_mlp_both", "dglu",
               "dglu_least")  # fmt: skip
    width = max(map(len, columns))
    lines = [" " * width + "".join(f"{name:>12s}" for name in found)]
    for column in columns:
        cells = (f"{values[column]:12.3f}" if column in values else f"{'-':>12s}" for values in found.values())
        lines.append(f"{column:{width}s}" + "".join(cells))
    return "\n".join(lines)


CUT = 2.0
"""Times of grouped_mm at which the chart ends."""


def chart(record: Mapping[str, Any], path: str) -> None:
    """Forward and backward together over the framework's grouped_mm path, a panel a framework."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    frameworks = list(dict.fromkeys(row["framework"] for row in record["rows"]))
    figure, panels = plt.subplots(len(frameworks), figsize=(12, 3.2 * len(frameworks)), squeeze=False)
    for framework, (axes,) in zip(frameworks, panels, strict=True):
        rows = [row for row in record["rows"] if row["framework"] == framework]
        arms = [a for a in ARMS if a in rows[0]["arms"]]
        width = 0.8 / len(arms)
        for i, arm in enumerate(arms):
            heights = [row["arms"][arm]["both_ms"] / row["arms"][THEIRS]["both_ms"] for row in rows]
            places = [x + i * width for x in range(len(rows))]
            # The loops over experts reach far above the rest: cut, with their number inside.
            bars = axes.bar(places, [min(h, CUT) for h in heights], width, label=arm)
            axes.bar_label(bars, [f"{h:.1f}" if h > CUT else "" for h in heights], fontsize=6, padding=-8)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_ylim(0, 1.15 * CUT)
        axes.set_xticks([x + 0.4 for x in range(len(rows))], [r["shape"] for r in rows], rotation=15, ha="right")
        axes.set_ylabel(f"time / {THEIRS}")
        axes.set_title(f"{framework}: experts, forward and backward, {record['gpu']}", fontsize=10)
        axes.legend(ncols=len(arms), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ---- compiling ahead -------------------------------------------------------------------------------------------------


def compile_arms(framework: str, shape: Shape, device: str) -> None:
    """Runs what compiles once, so that the caches on disk have it."""
    block = BLOCKS[framework](shape, torch.device(device))
    for name, arm in block.arms.items():
        if not arm.slow and name != THEIRS:
            run(arm, block.dy)
    block.dglu[OURS]()
    del block
    release()


def release() -> None:
    """Gives back what the last block held: reference cycles of compiled code too."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compile_ahead(frameworks: Sequence[str], shapes: Sequence[Shape], device: torch.device, workers: int) -> None:
    """Fills torch.compile's cache and opfuse's in several processes. What fails there is left to fail when measured."""
    os.environ[THREADS] = "2"  # each of these processes would start as many helpers as there are cores
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(compile_arms, f, s, device.type) for s in shapes for f in frameworks]
            for error in (e for job in jobs if (e := job.exception()) is not None):
                if not isinstance(error, FAILURES):
                    raise error
    finally:
        del os.environ[THREADS]
    # What the processes tuned while they shared the GPU is tuned again, alone.
    for tuned in Path(os.environ[CACHE]).rglob("*.best_config"):
        tuned.unlink()


CACHE, THREADS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"


@contextlib.contextmanager
def compiler_cache() -> Iterator[None]:
    """A cache of torch.compile's own for this run, inherited by its processes."""
    before = os.environ.get(CACHE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder
        try:
            yield
        finally:
            del os.environ[CACHE]
            if before is not None:
                os.environ[CACHE] = before


# ---- command line ----------------------------------------------------------------------------------------------------


def version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def read_shapes(path: str, names: str | None) -> list[Shape]:
    given = json.loads(Path(path).read_text())["shapes"]
    return [Shape(**s) for s in given if names is None or s["name"] in names.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", default=",".join(BLOCKS), help="separated by commas; all by default")
    parser.add_argument("--shapes", help="names, separated by commas; all by default")
    parser.add_argument("--shapes-file", default=str(HERE / "shapes.json"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=MEASURED_ROUNDS)
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes that compile ahead; 0 for none")
    parser.add_argument("--json", help="where to write the record, after every row")
    parser.add_argument("--chart", help="where to write a PNG; needs matplotlib")
    parser.add_argument("--redraw", metavar="RECORD", help="print and draw this record, measure nothing")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.redraw:
        record = json.loads(Path(args.redraw).read_text())
        print(*map(line, record["rows"]), table(record["summary"]), sep="\n")
        if args.chart:
            chart(record, args.chart)
        return 0
    with compiler_cache():
        return benchmark(args)


def benchmark(args: argparse.Namespace) -> int:
    """Measures what the command line asks for, prints it and writes it. 1 where a row failed, else 0."""
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    frameworks, shapes = args.frameworks.split(","), read_shapes(args.shapes_file, args.shapes)
    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None, "torch": torch.__version__,
        "transformers": version("transformers"), "dsl": version("nvidia-cutlass-dsl"), "source": source_sha256(),
        "date": datetime.date.today().isoformat(), "rows": [], "failed": [],
    }  # fmt: skip
    begin = time.monotonic()
    if args.workers:
        compile_ahead(frameworks, shapes, device, args.workers)
    compiled = time.monotonic()
    with progress_bar(len(shapes) * len(frameworks), "measuring") as bar:
        for shape in shapes:
            for framework in frameworks:
                torch.manual_seed(0)
                try:
                    record["rows"].append(row := measure(framework, shape, device, args.rounds))
                    bar.say(line(row))
                except FAILURES as error:
                    record["failed"].append(f"{framework}, {shape.name}: {type(error).__name__}: {error}")
                    bar.say("FAILED: " + record["failed"][-1])
                record["summary"] = summary(record["rows"])
                bar.advance(f"{framework} {shape.name}")
                release()
                if args.json:
                    Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    print(table(record["summary"]))
    print(f"{compiled - begin:.0f} s of compiling ahead, {time.monotonic() - compiled:.0f} s of measuring")
    if args.chart:
        chart(record, args.chart)
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
