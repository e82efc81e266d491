"""Expert parallelism on torch.distributed: every rank has its tokens and its share of the experts.

The bytes of a text are the tokens. A router, the same on all ranks, sends each token to its experts, wherever they are:
an all-to-all carries rows and their weights there, opfuse runs the experts, and another all-to-all carries the results
back. Each rank then checks its outputs and gradients, the router's among them, against plain torch on one process, with
three kinds of routing: as the router says, nearly all to one expert, and nothing at all to the last rank's experts.
Exits with 1 if a check fails. Beside opfuse's experts the same weights run by torch's grouped_mm and autograd, all else
the same, step by step in turn: what the experts alone change in a step with its exchanges. `--arms` picks.

    torchrun --standalone --nproc-per-node 2 samples/expert_parallel.py [FILE] [--tokens 512] [--device cuda]
    ... --data-type bfloat16 --hidden 2048 --intermediate 768 --experts 64 --tokens 8192 --repeats 20 --json FILE

How many rows each rank gets is known on the devices only, and torch's all-to-all of uneven parts wants to know it on
the host, NCCL's too: one read of 2 W counts a layer and step. The experts themselves read nothing there.

Axis letters: W ranks, T tokens of a rank, k experts a token, L experts of all ranks, E of one, R rows that a rank
receives, H hidden, I intermediate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe_data import existing, positive, read_text, usable
from opfuse.graph_ops.torch import GroupedMLP
from opfuse.graph_ops.torch.routing import combine, dispatch, route
from torch import nn

TOP_K = 2
ROUTINGS = ("as the router says", "nearly all to one expert", "nothing to the last rank")
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Difference from plain torch in float64, relative to the norm of each output or gradient."""


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks: `sent[i]` of them to rank i. Its derivative sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.splits = sent, received
        return exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, received = ctx.splits
        return exchange(gradient.contiguous(), received, sent), None, None


def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """(sum of sent, ...) -> (sum of received, ...), in the order of ranks."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent)
    return out


class ExpertParallelMLP(nn.Module):
    """A router that every rank has, and this rank's experts."""

    def __init__(self, hidden: int, intermediate: int, experts: int, **made: Any) -> None:
        super().__init__()
        self.experts, self.local = experts, experts // dist.get_world_size()
        self.router = nn.Linear(hidden, experts, bias=False, **made)
        self.mlp = GroupedMLP(self.local, hidden, intermediate, **made)
        self.arm = "opfuse"

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """(T, H) -> (T, H). `bias` (L,) is added to the logits, to force a routing."""
        weight, expert = choose(self.router(x), bias)  # (T, k), (T, k)
        outgoing = route(expert, self.experts)  # rows ordered by expert, so by rank
        rows = dispatch(x, outgoing)  # (T * k, H)
        probs = weight.flatten().new_zeros(rows.shape[0]).index_copy(0, outgoing.slot, weight.flatten())  # (T * k,)

        counts = outgoing.tokens_per_expert.view(-1, self.local)  # (W, E): what goes to each expert of each rank
        arriving = torch.empty_like(counts)  # (W, E): what comes from each rank for each expert of this one
        dist.all_to_all_single(arriving, counts.contiguous())
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()  # the one read on the host

        rows = _AllToAll.apply(rows, sent, received)  # (R, H)
        probs = _AllToAll.apply(probs, sent, received)  # (R,)
        y = self.run_experts(rows, probs, arriving)  # (R, H)
        return combine(_AllToAll.apply(y, received, sent), outgoing)  # (T, H)

    def run_experts(self, rows: torch.Tensor, probs: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """(R, H), (R,) ordered by rank, then expert -> (R, H) in the same order."""
        ids = torch.arange(self.local, device=rows.device).repeat(arriving.shape[0])  # (W * E,)
        expert = ids.repeat_interleave(arriving.flatten(), output_size=rows.shape[0])  # (R,)
        order = route(expert[:, None], self.local)
        grouped = probs.new_zeros(rows.shape[0]).index_copy(0, order.slot, probs)  # (R,)
        return combine(ARMS[self.arm](self.mlp, dispatch(rows, order), order.tokens_per_expert, grouped), order)


def opfuse_experts(mlp: GroupedMLP, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """(R, H), (E,), (R,) -> (R, H)."""
    y: torch.Tensor = mlp(rows, counts, probs)[0]
    return y


def torch_experts(mlp: GroupedMLP, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """The same from the same weights by torch's grouped_mm, or by a loop where it does not serve."""
    if not serves_grouped_mm(mlp) or not rows.shape[0]:
        parts = zip(rows.split(counts.tolist()), mlp.w1, mlp.w2, strict=True)
        y = torch.cat([gated(part @ w1.T) @ w2.T for part, w1, w2 in parts])
        return y * probs[:, None].to(y.dtype)
    grouped_mm = getattr(F, "grouped_mm", torch._grouped_mm)
    offsets = counts.cumsum(0, dtype=torch.int32)
    act = gated(grouped_mm(rows, mlp.w1.transpose(1, 2), offs=offsets))  # (R, I)
    weighted = (act * probs[:, None]).to(act.dtype)
    y = grouped_mm(weighted, mlp.w2.transpose(1, 2), offs=offsets)
    return y


def gated(h: torch.Tensor) -> torch.Tensor:
    """(R, 2I) -> (R, I)."""
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


ARMS = {"opfuse": opfuse_experts, "grouped_mm": torch_experts}
"""Who runs the experts."""


def serves_grouped_mm(mlp: GroupedMLP) -> bool:
    """Whether these weights are what grouped_mm takes on every device and in every torch from 2.9."""
    return mlp.w1.dtype is torch.bfloat16 and not (mlp.hidden_size % 8 or mlp.intermediate_size % 8)


def how(arm: str, mlp: GroupedMLP) -> str:
    """What an arm's numbers are of."""
    return arm if arm == "opfuse" or serves_grouped_mm(mlp) else f"{arm}, here a loop over experts"


def choose(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, L) -> the best k experts of each token and their weights, which sum to 1."""
    best, expert = (logits.float() + bias).softmax(-1).topk(TOP_K)
    return best / best.sum(-1, keepdim=True), expert


def routing_bias(routing: str, experts: int, local: int, device: torch.device) -> torch.Tensor:
    """(L,): what is added to the logits."""
    bias = torch.zeros(experts, device=device)
    if routing == "nearly all to one expert":
        bias[0] = 8.0
    if routing == "nothing to the last rank":
        bias[experts - local :] = -1e9
    return bias


@dataclass
class Step:
    """What one step gives: the outputs of this rank's tokens and the gradients of what it holds."""

    y: torch.Tensor  # (T, H)
    dx: torch.Tensor  # (T, H)
    dw1: torch.Tensor  # (E, 2I, H)
    dw2: torch.Tensor  # (E, H, I)
    drouter: torch.Tensor  # (L, H), summed over the ranks


def run_step(model: ExpertParallelMLP, x: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor) -> Step:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x, bias)
    y.backward(dy)
    dx, dw1, dw2, drouter = x.grad, model.mlp.w1.grad, model.mlp.w2.grad, model.router.weight.grad
    assert dx is not None and drouter is not None
    assert dw1 is not None and dw2 is not None, "a rank without rows still has gradients, or others would wait for it"
    dist.all_reduce(drouter)
    return Step(y.detach(), dx, dw1, dw2, drouter)


def reference(model: ExpertParallelMLP, x: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor) -> Step:
    """The same by plain torch in float64 on one process: all tokens, all experts, this rank's part of the result."""
    rank, tokens, local = dist.get_rank(), x.shape[0], model.local
    all_x, all_dy, w1, w2 = (gather(t.detach()).double() for t in (x, dy, model.mlp.w1, model.mlp.w2))
    router = model.router.weight.detach().double()
    for leaf in (all_x, w1, w2, router):
        leaf.requires_grad_()
    # The choice itself in the model's type, and rank by rank: a product of other sizes may round otherwise.
    parts = all_x.detach().to(x.dtype).chunk(dist.get_world_size())
    expert = torch.cat([choose(model.router(part), bias)[1] for part in parts])  # (W T, k)
    probs = (all_x @ router.T + bias).softmax(-1).gather(1, expert)
    probs = probs / probs.sum(-1, keepdim=True)
    y = torch.zeros_like(all_x)
    for e in range(model.experts):
        token, place = (expert == e).nonzero(as_tuple=True)
        gate, up = (all_x[token] @ w1[e].T).chunk(2, -1)
        y = y.index_add(0, token, (gate * gate.sigmoid() * up * probs[token, place, None]) @ w2[e].T)
    y.backward(all_dy)
    mine, held = slice(rank * tokens, (rank + 1) * tokens), slice(rank * local, (rank + 1) * local)
    assert all_x.grad is not None and w1.grad is not None and w2.grad is not None and router.grad is not None
    return Step(y.detach()[mine], all_x.grad[mine], w1.grad[held], w2.grad[held], router.grad)


def gather(t: torch.Tensor) -> torch.Tensor:
    """The parts of all ranks, side by side along the first axis."""
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def compare(got: Step, wanted: Step, bound: float) -> tuple[float, list[str]]:
    """The largest relative difference, and a line for each that is out of bounds."""
    largest, failures = 0.0, []
    for name in ("y", "dx", "dw1", "dw2", "drouter"):
        a, b = getattr(got, name).double(), getattr(wanted, name)
        size = float(b.norm())
        difference = float((a - b).norm()) / (size or 1.0)
        largest = max(largest, difference)
        if not difference <= bound:
            failures.append(
                f"{name} on rank {dist.get_rank()}: relative difference {difference:.1e}, bound {bound:.0e}"
            )
    return largest, failures


def main() -> int:
    options = arguments()
    with process_group(options.device) as device:
        rank, world = dist.get_rank(), dist.get_world_size()
        if options.experts % world or options.experts // world < TOP_K:
            print(f"{options.experts} experts on {world} ranks: give each rank the same number, at least {TOP_K}",
                  file=sys.stderr)  # fmt: skip
            return 2
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.data_type]
        torch.manual_seed(options.seed)
        embedding = nn.Embedding(256, options.hidden)
        router = torch.randn(options.experts, options.hidden) * options.hidden**-0.5
        torch.manual_seed(options.seed + 1 + rank)
        model = ExpertParallelMLP(options.hidden, options.intermediate, options.experts, device=device, dtype=dtype)
        with torch.no_grad():
            model.router.weight.copy_(router)
        text = torch.tensor(list(read_text(options.file)))
        ids = text[(torch.arange(options.tokens) + rank * options.tokens) % len(text)]  # other text on each rank
        x = embedding(ids).detach().to(device, dtype)  # (T, H)
        dy = torch.randn(options.tokens, options.hidden).to(device, dtype)

        failures: list[str] = []
        measured: list[dict[str, Any]] = []
        for routing in ROUTINGS if world > 1 else ROUTINGS[:2]:  # a rank alone is the last one too
            bias = routing_bias(routing, options.experts, model.local, device)
            wanted = reference(model, x, dy, bias)
            received = received_rows(model, x, bias)  # (E,)
            rows = gather(received.sum()[None]).tolist()
            arms: dict[str, dict[str, Any]] = {}
            for arm in options.arms:
                model.arm = arm
                step = run_step(model, x, dy, bias)
                if arm != "opfuse":  # torch's grouped_mm need not write the gradients of experts without rows
                    step.dw1[received == 0] = step.dw2[received == 0] = 0
                largest, found = compare(step, wanted, BOUNDS[dtype])
                arms[arm] = {"runs": how(arm, model.mlp), "difference": largest}
                failures += [f"{routing}: {arm}: {failure}" for failure in found]
            for arm, seconds in time_steps(model, x, dy, bias, options.arms, options.repeats).items():
                middle = statistics.median(seconds)
                arms[arm] |= {"milliseconds": 1e3 * middle, "milliseconds_each": [1e3 * s for s in seconds],
                              "tokens_per_second": world * options.tokens / middle}  # fmt: skip
            measured.append({"routing": routing, "rows_per_rank": rows, "arms": arms})
            if rank == 0:
                print(f"{routing}: rows per rank {rows}, bound {BOUNDS[dtype]:.0e}", flush=True)
                for result in arms.values():
                    print(f"  {result['runs']}: largest relative difference {result['difference']:.1e}, "
                          f"{result['tokens_per_second']:,.0f} tokens/s", flush=True)  # fmt: skip
        for failure in failures:
            print(f"FAILED: {failure}", file=sys.stderr)
        total = torch.tensor([len(failures)], device=device)
        dist.all_reduce(total)
        if rank == 0:
            if options.json:
                write_record(options, world, device, measured, int(total))
            print(f"{int(total)} checks failed" if int(total) else "all checks passed")
        return 1 if int(total) else 0


def write_record(options: argparse.Namespace, world: int, device: torch.device, measured: list[dict[str, Any]],
                 failed: int) -> None:  # fmt: skip
    """What was run and measured, of rank 0 and for all ranks, as JSON."""
    sizes = {name: getattr(options, name) for name in ("tokens", "experts", "hidden", "intermediate", "data_type")}
    record = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": str(torch.__version__),
        "backend": dist.get_backend(),
        "ranks": world,
        "top_k": TOP_K,
        **sizes,
        "routings": measured,
        "checks_failed": failed,
    }
    Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


def received_rows(model: ExpertParallelMLP, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """(E,): the rows that each of this rank's experts gets."""
    with torch.no_grad():
        counts = route(choose(model.router(x), bias)[1], model.experts).tokens_per_expert
    dist.all_reduce(counts)
    return counts.view(-1, model.local)[dist.get_rank()]


def time_steps(model: ExpertParallelMLP, x: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor, arms: Sequence[str],
               repeats: int) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of each step, forward and backward, by arm, in turn; all ranks together: what the slowest takes."""
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(repeats):
        for arm in arms:
            model.arm = arm
            wait_for_all(x)
            start = time.perf_counter()
            run_step(model, x, dy, bias)
            wait_for_all(x)
            seconds[arm].append(time.perf_counter() - start)
    return seconds


def wait_for_all(x: torch.Tensor) -> None:
    """Until every rank has done what it was asked so far."""
    if x.is_cuda:
        torch.cuda.synchronize()
    dist.barrier()


@contextmanager
def process_group(device: str) -> Iterator[torch.device]:
    """The ranks that torchrun started, or this process alone; NCCL on GPUs, gloo elsewhere."""
    backend = "nccl" if device == "cuda" else "gloo"
    chosen = torch.device(device, int(os.environ.get("LOCAL_RANK", 0))) if device == "cuda" else torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    else:
        torch.set_num_threads(1)  # ranks share the machine
    bound = chosen if chosen.type == "cuda" else None  # a GPU a rank: collectives need not guess it
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            dist.init_process_group(backend, device_id=bound)
        else:
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1,
                                    device_id=bound)  # fmt: skip
        try:
            yield chosen
        finally:
            dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "file", nargs="?", type=existing, help="text to route; by default the help texts that come with Python"
    )
    parser.add_argument("--device", type=usable, choices=("cpu", "cuda"),
                        default="cuda" if torch.cuda.is_available() else "cpu")  # fmt: skip
    parser.add_argument("--tokens", type=positive, default=512, help="tokens of each rank")
    parser.add_argument("--experts", type=positive, default=8, help="experts of all ranks together")
    parser.add_argument("--hidden", type=positive, default=64)
    parser.add_argument("--intermediate", type=positive, default=96)
    parser.add_argument("--data-type", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=positive, default=3, help="steps of each arm to time")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="who runs the experts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH", help="write what was measured")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
