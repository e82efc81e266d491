"""Expert MLPs for the GPU tests of graph_ops/torch: problems, the kernels that they launch, and checks of results."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from opfuse.graph_ops import GluLayout
from opfuse.graph_ops.planner import make_plan
from opfuse.graph_ops.torch import grouped_mlp
from opfuse.graph_ops.torch.graphs import GRAPHS, Key
from opfuse.graph_ops.torch.mlp import activation_parameters
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.hopper.grouped_dglu import kernel_cache
from opfuse.kernels.registry import KERNELS

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu" / "torch"))

from expert_mlps import Case, random_case, relative  # type: ignore[import-not-found]

DEVICE = "cuda"
SEED = int(os.environ.get("OPFUSE_SEED", int.from_bytes(os.urandom(3), "little")))
BOUNDS = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}
MXFP8_BOUND = 1e-2  # codes at a rounding boundary may fall to the other side: sums in float32 differ in order
LAYOUTS = (GluLayout.concatenated(), GluLayout.interleaved(32), GluLayout.interleaved(1))
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@dataclass(frozen=True)
class Problem:
    """An expert MLP and how it is called."""

    counts: tuple[int, ...] = (70, 0, 129, 41)
    H: int = 128
    I: int = 128
    dtype: torch.dtype = torch.bfloat16
    layout: GluLayout = LAYOUTS[0]
    act: str = "swiglu"
    prob: bool = True
    tail: int = 0
    transposed: bool = False
    save: str = "activation"
    recipe: str | None = None
    multiple_of: int = 1
    parameters: tuple[tuple[str, float], ...] = ()

    def case(self, device: str = DEVICE) -> Case:
        return random_case(list(self.counts), H=self.H, I=self.I, dtype=self.dtype, layout=self.layout, act=self.act,
                           prob=self.prob, tail=self.tail, transposed=self.transposed, device=device,
                           **dict(self.parameters))  # fmt: skip

    def forward(self, case: Case, x: torch.Tensor | None = None, counts: torch.Tensor | None = None) -> torch.Tensor:
        return grouped_mlp(
            case.x if x is None else x, case.counts if counts is None else counts, case.w1, case.w2, case.prob,
            act=self.act, glu_layout=self.layout, save=self.save, recipe=self.recipe, multiple_of=self.multiple_of,
            allow_tail=self.tail > 0, **case.parameters,
        )  # fmt: skip

    def step(self, case: Case, dy: torch.Tensor) -> dict[str, torch.Tensor]:
        """y and every gradient by name."""
        y = self.forward(case)
        return {"y": y.detach(), **dict(zip(case.leaves, torch.autograd.grad(y, list(case.leaves.values()), dy)))}


MXFP8 = Problem((64, 0, 128, 32), recipe="mxfp8", multiple_of=32)
PROBLEMS = {
    **{f"{act}, {layout}": Problem(act=act, layout=layout)
       for act, layout in itertools.product(("swiglu", "geglu", "situglu"), LAYOUTS)},
    "geglu with parameters": Problem(act="geglu", parameters=(("clamp_max", 0.75), ("clamp_min", -0.5),
                                                              ("geglu_alpha", 1.0), ("linear_offset", 0.0))),
    "no probs": Problem(prob=False),
    "no rows": Problem((0, 0, 0)),
    "one row": Problem((0, 1, 0)),
    "one expert takes all": Problem((0, 300, 0)),
    "rows of no expert": Problem((33, 0, 90), tail=50),
    "only rows of no expert": Problem((0, 0), tail=40),
    "weights inputs first": Problem(transposed=True),
    "preactivation saved": Problem(save="preactivation"),
    "inputs saved": Problem(save="inputs"),
    "I = 96": Problem(H=64, I=96),
    "H = 72, I = 40": Problem(H=72, I=40),
    "float16": Problem(dtype=torch.float16),
    "float32": Problem(dtype=torch.float32, counts=(5, 0, 40, 3)),
    "mxfp8": MXFP8,
    "mxfp8, swizzled scales": replace(MXFP8, counts=(128, 0, 256), multiple_of=128),
    "mxfp8, preactivation saved": replace(MXFP8, save="preactivation"),
}  # fmt: skip
USUAL, TAIL = PROBLEMS["swiglu, concatenated"], PROBLEMS["rows of no expert"]
UNDISTURBED = ("swiglu, concatenated", "swiglu, interleaved(32)", "rows of no expert", "weights inputs first",
               "preactivation saved", "inputs saved", "float16", "float32", "mxfp8")  # fmt: skip
"""Problems that must neither wait for the GPU nor break in a CUDA graph."""


_OPS: Any = importlib.import_module("opfuse.graph_ops.torch.ops")


def keys_of(problem: Problem, learns: Sequence[str] = ("x", "w1", "w2", "prob")) -> list[Key]:
    """The graphs that a step of `problem` runs, and its forward without gradients, found by running them on the CPU."""
    seen: list[Key] = []
    held = _OPS.graph_of

    def recording(key: Key) -> Any:
        seen.append(replace(key, config=replace(key.config, device=torch.device("cuda", 0))))
        return held(key)

    GRAPHS.clear()  # a call that is recognised asks for no graph
    _OPS.graph_of = recording
    try:
        case = problem.case("cpu")
        for name, leaf in case.leaves.items():
            leaf.requires_grad_(name in learns)
        problem.forward(case).sum().backward()
        with torch.no_grad():
            problem.forward(case)
    finally:
        _OPS.graph_of = held
    return seen


def kernels_of(keys: Iterable[Key]) -> list[Any]:
    """The configurations of the kernels that these graphs launch on Hopper, each once."""
    entries = {entry.id: entry for entry in KERNELS}
    found: dict[Any, None] = {}
    for key in dict.fromkeys(keys):
        for step in make_plan(key.declare().operation_graph(), ARCHES["sm90"]).fused_steps:
            module: Any = importlib.import_module(entries[step.kernel].module)
            assert step.match is not None
            found[module.scheduled(step.match.problem, step.variant)] = None
    return list(found)


MODULE = Problem((64, 32, 64, 32), multiple_of=32)
"""What tests of GroupedMLP run, at whatever sizes: a small expert MLP's kernel is the same for all of them."""

LARGE = Problem((1024, 3072, 0, 4096), H=512, I=1024)
WIDE = Problem((1024, 1024, 0, 2048), H=2048, I=512)


@pytest.fixture(scope="session", autouse=True)
def mlp_kernels() -> None:
    """Compiles what the tests are known to launch, in parallel; what they launch besides is compiled when it comes."""
    if not IS_HOPPER:
        return
    import parallel_build  # type: ignore[import-not-found]

    keys = [key for problem in (*PROBLEMS.values(), MODULE) for key in keys_of(problem)]
    for save in ("activation", "preactivation", "inputs"):
        keys += [key for large in (LARGE, WIDE) for key in keys_of(replace(large, counts=(8, 0, 8, 8), save=save))]
    for learns in (("x",), ("w1",), ("w2",), ("prob",), ("x", "w2"), ("x", "w1", "w2")):
        keys += keys_of(USUAL, learns)
    keys += [
        key for transposed in (True, False) for key in keys_of(replace(LARGE, counts=(8, 8), transposed=transposed))
    ]
    print(parallel_build.fill(kernel_cache().folder, kernels_of(keys)))


def poison_free_memory() -> None:
    """Fills what the allocator holds free with NaN, so that what nobody writes shows."""
    sizes = [2**n for n in (7, 10, 12, 14, 16, 18, 20, 22) for _ in range(6)]
    held = [torch.full((size,), float("nan"), device=DEVICE) for size in sizes]
    del held


@pytest.fixture(autouse=True)
def fresh_data() -> Iterator[None]:
    """Random data from this run's seed, over poisoned memory; waiting for the GPU is allowed again afterwards."""
    torch.manual_seed(SEED)
    poison_free_memory()
    yield
    torch.cuda.set_sync_debug_mode("default")


def check(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: float, case: Case) -> None:
    """Every output within `bound` of `wanted`, and exact zeros for rows of no expert and experts without rows."""
    total, bad = int(case.counts.sum()), []
    for name, tensor in wanted.items():
        assert got[name].shape == tensor.shape
        error = relative(got[name].detach(), tensor)
        if not error <= bound:
            bad.append(f"{name}: relative error {error:.2e}, bound {bound:.1e}")
        uncovered_part = got[name][case.counts == 0] if name in ("w1", "w2") else got[name][total:]
        if uncovered_part.count_nonzero():
            bad.append(f"{name}: not zero where there is no expert or no row")
    assert not bad, f"{'; '.join(bad)} (seed {SEED})"


def arguments_of(problem: Problem) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors of an op's call, which learn, and its choices."""
    case = problem.case()
    parameters = list(activation_parameters(problem.act, case.parameters))
    offsets = case.counts.cumsum(0, dtype=torch.int32)
    choices = (problem.act, parameters, str(problem.layout), problem.multiple_of, problem.tail > 0)
    return (case.x, offsets, case.w1, case.w2, case.prob), choices


def without_grad(tensors: Sequence[Any]) -> list[Any]:
    return [t if t is None else t.detach() for t in tensors]
