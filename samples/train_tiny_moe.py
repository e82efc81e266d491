"""Trains a small byte-level mixture-of-experts language model whose expert MLP runs forward and backward in opfuse.

Before it trains the same model in plain torch, from the same seed on the same batches: the gradients of the first
step and the loss of every step must agree. Exits with 1 if they do not, or if the loss does not fall. Each trains with
the device to itself, so that speed and peak memory are its own.

    python samples/train_tiny_moe.py [FILE] [--steps 300] [--backend opfuse] [--json FILE] [--plot losses.png]
    python samples/train_tiny_moe.py --device cuda --data-type bfloat16 --hidden 1024 --intermediate 512 --experts 16

With bfloat16 the experts' rows and weights are rounded to it, and all else stays float32: plain torch then rounds
inside the activation where opfuse does not, so the bounds are wider. `--draw FILE` draws what `--json` wrote.

Axis letters: B sequences, S bytes of each, T = B * S tokens, V byte values, H hidden, I intermediate, L experts,
M rows of the experts (two per token, and padding).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from moe_data import combine, dispatch, existing, plain_expert_mlp, positive, read_text, route, row_prob, usable
from opfuse.graph_ops import DataType
from progress import progress_bar
from torch import nn
from usual_graphs import Sizes, expert_mlp_backward, expert_mlp_forward

V, TOP_K, HEADS, PADDED_ROWS = 256, 2, 4, 16
LEARNING_RATE = 3e-3
TORCH_TYPE = {DataType.FLOAT: torch.float32, DataType.BFLOAT16: torch.bfloat16}

# Of each parameter in the first step: difference relative to the gradient's norm.
GRADIENT_BOUND = {DataType.FLOAT: 1e-5, DataType.BFLOAT16: 3e-2}
# Nats, of the mean over so many steps in a row: sums in another order and roundings at other places drift apart while
# training goes on, and in bfloat16 a single step's batch shows that more than the curve does.
LOSS_BOUND = {DataType.FLOAT: 1e-3, DataType.BFLOAT16: 5e-2}
LOSS_STEPS = {DataType.FLOAT: 1, DataType.BFLOAT16: 10}
LEAST_FALL = 0.5  # nats, from the first tenth of the steps to the last


@dataclass(frozen=True)
class Shape:
    """The model's sizes, and the data of a step: `sequences` of at most `length` bytes."""

    hidden: int = 64
    intermediate: int = 64
    experts: int = 4
    sequences: int = 8
    length: int = 64
    data_type: DataType = DataType.FLOAT

    @property
    def sizes(self) -> Sizes:
        """Of the expert MLP's graphs."""
        return Sizes(H=self.hidden, I=self.intermediate, L=self.experts, rows=PADDED_ROWS, data_type=self.data_type)


SMALL = Shape()

ExpertMLP = Callable[..., torch.Tensor]
"""x (M, H), w1 (L, H, 2I), b1 (L, 2I), w2 (L, I, H), prob (M,), offsets (L,) -> y (M, H)."""


class OpfuseExpertMLP:
    """The expert MLP as two graphs, each built once: their M is bound anew by every call."""

    def __init__(self, device: torch.device, shape: Shape = SMALL) -> None:
        self.forward, self.backward = expert_mlp_forward(shape.sizes), expert_mlp_backward(shape.sizes)
        self.forward.build(device=device)
        self.backward.build(device=device)

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _ExpertMLPFunction.apply(self, *arguments)
        return y


class _ExpertMLPFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        graphs: OpfuseExpertMLP,
        x: torch.Tensor,  # (M, H)
        w1: torch.Tensor,  # (L, H, 2I)
        b1: torch.Tensor,  # (L, 2I)
        w2: torch.Tensor,  # (L, I, H)
        prob: torch.Tensor,  # (M,)
        offsets: torch.Tensor,  # (L,)
    ) -> torch.Tensor:
        out = graphs.forward({"x": x, "w1": w1, "b1": b1, "w2": w2, "prob": prob, "offsets": offsets})
        ctx.graphs = graphs
        ctx.save_for_backward(x, w1, w2, prob, offsets, out["h"], out["act"])
        return out["y"]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w1, w2, prob, offsets, h, act = ctx.saved_tensors
        w1_t, w2_t = w1.transpose(1, 2), w2.transpose(1, 2)  # (L, 2I, H), (L, H, I): views
        d = ctx.graphs.backward({"dy": dy.contiguous(), "x": x, "h": h, "act": act, "w1_t": w1_t, "w2_t": w2_t,
                                 "prob": prob, "offsets": offsets})  # fmt: skip
        return None, d["dx"], d["dw1"], d["db1"], d["dw2"], d["dprob"], None


def torch_expert_mlp(*arguments: torch.Tensor) -> torch.Tensor:
    return plain_expert_mlp(*arguments)["y"]


class TinyMoE(nn.Module):
    """One transformer block over bytes: causal attention, then a mixture of experts with a top-2 router."""

    def __init__(self, expert_mlp: ExpertMLP, shape: Shape = SMALL) -> None:
        super().__init__()
        H, I, L = shape.hidden, shape.intermediate, shape.experts
        self.expert_mlp, self.expert_type = expert_mlp, TORCH_TYPE[shape.data_type]
        self.embedding = nn.Embedding(V, H)
        self.position = nn.Embedding(shape.length, H)
        self.attention_norm, self.moe_norm, self.head_norm = nn.LayerNorm(H), nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.project = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.router = nn.Linear(H, L, bias=False)
        self.w1 = nn.Parameter(torch.randn(L, H, 2 * I) * H**-0.5)
        self.b1 = nn.Parameter(torch.zeros(L, 2 * I))
        self.w2 = nn.Parameter(torch.randn(L, I, H) * I**-0.5)
        self.head = nn.Linear(H, V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, S) bytes -> (B, S, V) logits of the byte after each."""
        x = self.embedding(ids) + self.position.weight[: ids.shape[1]]  # (B, S, H)
        x = x + self.attend(self.attention_norm(x))
        x = x + self.mix_experts(self.moe_norm(x).flatten(0, 1)).view_as(x)
        return self.head(self.head_norm(x))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, S, H / heads) each
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(out.transpose(1, 2).flatten(2))  # (B, S, H)

    def mix_experts(self, x: torch.Tensor) -> torch.Tensor:
        """(T, H) -> (T, H)."""
        routing = route(self.router(x), TOP_K, PADDED_ROWS)
        rows, prob = dispatch(x, routing), row_prob(routing)  # (M, H), (M,)
        rows, w1, b1, w2 = (t.to(self.expert_type) for t in (rows, self.w1, self.b1, self.w2))
        y = self.expert_mlp(rows, w1, b1, w2, prob, routing.offsets)  # (M, H)
        return combine(y.to(x.dtype), routing)


class Run:
    """A model in training, its losses, and what its steps took."""

    def __init__(self, expert_mlp: ExpertMLP, device: torch.device, seed: int, shape: Shape = SMALL,
                 learning_rate: float | None = None) -> None:  # fmt: skip
        torch.manual_seed(seed)
        self.model = TinyMoE(expert_mlp, shape).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate or LEARNING_RATE)
        self.losses: list[float] = []
        self.first_gradients: dict[str, torch.Tensor] = {}
        self.tokens, self.seconds, self.peak_bytes = 0, 0.0, 0

    def step(self, ids: torch.Tensor) -> None:
        """One step of training on (B, S + 1) bytes. The first, which builds kernels, is not timed."""
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats(ids.device)
        start = time.perf_counter()
        logits = self.model(ids[:, :-1])  # (B, S, V)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        if not self.losses:
            self.first_gradients = {name: copy_of_gradient(p) for name, p in self.model.named_parameters()}
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the device
        if len(self.losses) > 1:
            self.tokens += ids[:, 1:].numel()
            self.seconds += time.perf_counter() - start
        if ids.is_cuda:
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(ids.device))

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    def report(self, name: str) -> str:
        """Tokens per second, and on a GPU the most memory that was allocated during a step."""
        memory = f", peak memory {self.peak_bytes / 2**20:,.1f} MiB" if self.peak_bytes else ""
        rate = self.tokens_per_second
        speed = "one step, not timed" if rate is None else f"{rate:,.0f} tokens/s"
        return f"{name}: {speed}{memory}"

    def record(self) -> dict[str, Any]:
        """Speed, memory and losses as plain values."""
        return {"tokens_per_second": self.tokens_per_second, "peak_bytes": self.peak_bytes, "losses": self.losses}

    def release(self) -> None:
        """Forgets the model and the optimizer, and keeps what was measured."""
        del self.model, self.optimizer
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Batches:
    """Random stretches of a text, of another length in each batch."""

    def __init__(self, text: bytes, device: torch.device, seed: int, shape: Shape = SMALL) -> None:
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.device, self.shape = device, shape
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> torch.Tensor:
        """(B, S' + 1) bytes, S' from S / 2 to S."""
        longest, sequences = self.shape.length, self.shape.sequences
        length = int(torch.randint(longest // 2, longest + 1, (), generator=self.generator)) + 1
        starts = torch.randint(len(self.ids) - length + 1, (sequences,), generator=self.generator)  # (B,)
        return torch.stack([self.ids[start : start + length] for start in starts.tolist()]).to(self.device)


def main() -> int:
    options = arguments()
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        print("--plot needs matplotlib, which is not installed: pip install matplotlib", file=sys.stderr)
        return 2
    if options.draw:
        plot(options.plot or str(Path(options.draw).with_suffix(".png")), read_losses(options.draw))
        return 0
    device, text = torch.device(options.device), read_text(options.file)
    shape = Shape(options.hidden, options.intermediate, options.experts, options.sequences, options.length,
                  {"float32": DataType.FLOAT, "bfloat16": DataType.BFLOAT16}[options.data_type])  # fmt: skip
    if len(text) <= shape.length:
        print(f"the text has {len(text)} bytes; at least {shape.length + 1} are needed", file=sys.stderr)
        return 2
    if device.type == "cpu":
        torch.set_num_threads(1)  # matrices this small only wait for more
    runs: dict[str, Run] = {}
    for name in ("torch", "opfuse") if options.backend == "both" else (options.backend,):
        mlp = OpfuseExpertMLP(device, shape) if name == "opfuse" else torch_expert_mlp
        runs[name] = Run(mlp, device, options.seed, shape, options.learning_rate)
        train(name, runs[name], Batches(text, device, options.seed, shape), options.steps)
    failures = compare(runs, shape.data_type)
    if options.plot:
        plot(options.plot, {name: run.losses for name, run in runs.items()})
    if options.json:
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        record = {"gpu": gpu, "torch": str(torch.__version__), "date": datetime.date.today().isoformat(),
                  "steps": options.steps, "shape": {**asdict(shape), "data_type": options.data_type},
                  "failures": failures, "backends": {name: run.record() for name, run in runs.items()}}  # fmt: skip
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print(f"{len(failures)} checks failed" if failures else "all checks passed")
    return 1 if failures else 0


def read_losses(path: str) -> dict[str, list[float]]:
    """The loss of every step by backend, of what --json wrote."""
    backends: dict[str, dict[str, list[float]]] = json.loads(Path(path).read_text())["backends"]
    return {name: told["losses"] for name, told in backends.items()}


def train(name: str, run: Run, batches: Batches, steps: int) -> None:
    """Trains for so many steps, and prints losses. Gives the model's memory back."""
    print(f"{'step':>6} {name + ' loss':>12}")
    start = time.perf_counter()
    with progress_bar(steps, f"training {name}") as bar:
        for step in range(1, steps + 1):
            run.step(batches.next())
            loss = f" {run.losses[-1]:12.6f}"
            bar.advance(f"loss{loss}")
            if step in (1, steps) or step % max(1, steps // 10) == 0:
                bar.say(f"{step:6}{loss}")
    print(f"{steps} steps in {time.perf_counter() - start:.1f} s")
    print(run.report(name))
    run.release()


def compare(runs: dict[str, Run], data_type: DataType) -> list[str]:
    """What is out of bounds."""
    failures: list[str] = []
    if len(runs) == 2:
        plain, fused = runs.values()
        failures += compare_gradients(plain.first_gradients, fused.first_gradients, GRADIENT_BOUND[data_type])
        failures += compare_losses(plain.losses, fused.losses, data_type)
    for name, run in runs.items():
        failures += check_fall(name, run.losses)
    return failures


def plot(path: str, losses: dict[str, list[float]]) -> None:
    """Draws the loss curves over one another, and the difference of two below."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    both = len(losses) == 2
    figure, axes = pyplot.subplots(1 + both, sharex=True, squeeze=False, height_ratios=[3, 1][: 1 + both])
    for (name, curve), style in zip(losses.items(), ("-", "--"), strict=False):
        axes[0, 0].plot(range(1, len(curve) + 1), curve, style, label=name)
    axes[0, 0].set_ylabel("loss, nats a byte")
    axes[0, 0].legend()
    if both:
        one, other = losses.values()
        axes[1, 0].plot(range(1, len(one) + 1), [abs(a - b) for a, b in zip(one, other, strict=True)])
        axes[1, 0].set_ylabel("difference")
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def compare_gradients(plain: dict[str, torch.Tensor], fused: dict[str, torch.Tensor], bound: float) -> list[str]:
    """The first step's gradients of every parameter: those before the experts too, which see dx and dprob."""
    failures, largest = [], 0.0
    for name, expected in plain.items():
        difference = ((fused[name] - expected).norm() / expected.norm()).item()
        largest = max(largest, difference)
        if not difference <= bound:
            failures.append(f"gradient of {name}: relative difference {difference:.1e}, bound {bound:.0e}")
    print(f"gradients of the first step: largest relative difference {largest:.1e} (bound {bound:.0e})")
    return failures


def copy_of_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """On the host, where it takes no memory of the other backend."""
    assert parameter.grad is not None
    return parameter.grad.to("cpu", copy=True)


def windows(losses: list[float], steps: int) -> list[float]:
    """Means over each `steps` losses in a row, from the first on; over all of them where there are fewer."""
    steps = min(steps, len(losses))
    return [sum(losses[i : i + steps]) / steps for i in range(len(losses) - steps + 1)]


def compare_losses(plain: list[float], fused: list[float], data_type: DataType) -> list[str]:
    bound, steps = LOSS_BOUND[data_type], LOSS_STEPS[data_type]
    in_a_step = max(abs(a - b) for a, b in zip(plain, fused, strict=True))
    pairs = zip(windows(plain, steps), windows(fused, steps), strict=True)
    differences = [abs(a - b) for a, b in pairs]
    print(f"losses: largest difference in a step {in_a_step:.1e}, of the mean of {steps} {max(differences):.1e} "
          f"(bound {bound:.0e})")  # fmt: skip
    return [f"loss of steps {first} to {first + steps - 1}: differs by {difference:.1e}, bound {bound:.0e}"
            for first, difference in enumerate(differences, 1) if not difference <= bound]  # fmt: skip


def check_fall(name: str, losses: list[float]) -> list[str]:
    tenth = len(losses) // 10
    if tenth < 2:
        print(f"{name}: fewer than 20 steps, so its loss need not fall")
        return []
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    print(f"{name}: mean loss of the first tenth of the steps {first:.3f}, of the last {last:.3f}")
    if first - last >= LEAST_FALL:
        return []
    return [f"{name}: the loss fell from {first:.3f} to {last:.3f}, by less than {LEAST_FALL}"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "file", nargs="?", type=existing, help="text to learn; by default the help texts that come with Python"
    )
    parser.add_argument("--backend", choices=("torch", "opfuse", "both"), default="both")
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--device", type=usable, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=positive, default=SMALL.hidden)
    parser.add_argument("--intermediate", type=positive, default=SMALL.intermediate, help="of each expert")
    parser.add_argument("--experts", type=positive, default=SMALL.experts)
    parser.add_argument("--sequences", type=positive, default=SMALL.sequences, help="in a step")
    parser.add_argument("--length", type=positive, default=SMALL.length, help="bytes of a sequence, at most")
    parser.add_argument("--data-type", choices=("float32", "bfloat16"), default="float32", help="of the experts")
    parser.add_argument("--learning-rate", type=float, help=f"by default {LEARNING_RATE}")
    parser.add_argument("--json", metavar="PATH", help="write losses, tokens per second and peak memory")
    parser.add_argument("--plot", metavar="PATH", help="draw the loss curves as a PNG; needs matplotlib")
    parser.add_argument("--draw", metavar="PATH", help="draw the losses that --json wrote, and train nothing")
    options = parser.parse_args()
    if options.hidden % HEADS or options.experts < TOP_K:
        parser.error(f"--hidden {options.hidden} --experts {options.experts}: give {HEADS} heads the same width, and a "
                     f"token {TOP_K} experts to choose")  # fmt: skip
    return options


if __name__ == "__main__":
    sys.exit(main())
