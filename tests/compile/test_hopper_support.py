"""What the support surface of our Hopper dGLU kernel predicts is what compiling for sm_90a does, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from opfuse.graph_ops.ir.dims import symbol
from opfuse.graph_ops.ir.dtypes import DataType
from opfuse.graph_ops.ir.layouts import GluLayout, ScaleLayout
from opfuse.graph_ops.ir.tensor import TensorSpec, contiguous_stride
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.hopper import dglu_support
from opfuse.kernels.problem import Problem
from opfuse.kernels.registry import KERNELS

PROGRAM = Path(__file__).parent / "compile_sm90_dglu.py"
ENTRY = next(k for k in KERNELS if k.id == "sm90.grouped_gemm_dglu")
BF16, F16, F32, I32 = DataType.BFLOAT16, DataType.HALF, DataType.FLOAT, DataType.INT32
E4M3, E5M2, E8M0 = DataType.FP8_E4M3, DataType.FP8_E5M2, DataType.FP8_E8M0
PARAMETERS: Mapping[str, Mapping[str, Sequence[float]]] = {
    "swiglu": {},
    "geglu": {"geglu_alpha": (1.0, 1.702), "clamp_min": (-7.0, -0.5), "clamp_max": (7.0, 1.5),
              "linear_offset": (0.0, 1.0)},
    "situglu": {"situ_beta1": (4.0, 1.25), "situ_beta2": (25.0, 2.0)},
}  # fmt: skip
CONFIGURATION_CODES = {"OPERAND_TYPE", "GLU_LAYOUT", "LEGAL"}
"""Reasons that are about the configuration, so that the compiler knows of them too."""

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None, reason="needs the extra `cuda`: nvidia-cutlass-dsl is missing"
    ),
]


def random_problem(seed: int) -> Problem:
    """A problem whose tensors are laid out as the kernel wants them, with options of which some are not built."""
    r = random.Random(seed)
    rare = 0.04  # of each kind of option that no kernel has
    m, k, n = symbol("M", 128), r.choice((64, 200, 2048)), r.choice((32, 256, 416, 1024, 2048))
    experts = r.choice((1, 8))
    layouts = [GluLayout.interleaved(32), GluLayout.concatenated(), GluLayout.interleaved(1)]
    layout = GluLayout.interleaved(16) if r.random() < rare else r.choice(layouts)
    act = r.choice(list(PARAMETERS))
    ab = F32 if r.random() < rare else r.choice((BF16, BF16, F16))
    c = DataType.FP8_E4M3 if r.random() < rare else r.choice((BF16, BF16, F16, F32))
    d = r.choice((None, BF16, BF16, F16, F32))
    stride = r.choice(((k * n, 1, k), (k * n, n, 1)))
    roles: dict[str, dict[str, Any]] = {
        "a": dict(dim=(m, k), data_type=ab),
        "b": dict(dim=(experts, k, n), data_type=ab, stride=stride, discrete=r.random() < 0.25),
        "offsets": dict(dim=(experts,), data_type=I32, multiple_of=128),
        "c": dict(dim=(m, 2 * n), data_type=c, glu_layout=layout),
    }
    for role, dim in (("alpha", (experts,)), ("beta", (experts,)), ("prob", (m,))):
        if r.random() < 0.5:
            roles[role] = dict(dim=dim, data_type=F32)
    if d is not None:
        roles["d"] = dict(dim=(m, 2 * n), data_type=d, glu_layout=layout)
    if r.random() < 0.6:
        roles["dprob"] = dict(dim=(m,), data_type=F32)
    if r.random() < 0.3:
        roles["activation"] = dict(dim=(m, n), data_type=F32 if r.random() < 3 * rare else r.choice((BF16, F16)))
    if r.random() < 0.35:
        roles["dbias"] = dict(dim=(experts, 2 * n), data_type=F16 if r.random() < 3 * rare else r.choice((BF16, F32)))
    if r.random() < 0.25:
        roles["amax"] = dict(dim=(experts, 2), data_type=F32)
    attributes: dict[str, Any] = {"act": act, "alpha_exponent": r.choice((1, 2)), "recompute": "activation" in roles,
                                  "amax.split_glu": True}  # fmt: skip
    attributes |= {name: r.choice(values) for name, values in PARAMETERS[act].items()}
    sides, swizzled = r.choice((("row",), ("col",), ("row", "col"), (), (), ())), r.random() < 0.7
    for side in sides:
        scales = ScaleLayout(32, 1 if side == "row" else 0, swizzled)
        roles[f"q_{side}"] = dict(dim=(m, 2 * n), data_type=r.choice((E4M3, E5M2)))
        roles[f"sf_{side}"] = dict(dim=scales.storage((m, 2 * n)), data_type=E8M0, scale_layout=scales)
        attributes |= {f"q_{side}.block_size": 32, f"q_{side}.scale_type": "FP8_E8M0", f"q_{side}.swizzled": swizzled}
    specs = {
        role: TensorSpec(uid, role, fields["dim"], fields.pop("stride", contiguous_stride(fields["dim"])),
                         **{name: value for name, value in fields.items() if name != "dim"})
        for uid, (role, fields) in enumerate(roles.items())
    }  # fmt: skip
    # The second form of the rule: sums and codes of a FLOAT gradient, of which d is a copy.
    return Problem("grouped_gemm_dglu", specs, attributes, {"r": F32, "d_wide": F32}, r.random() < 0.2)


def predicted(problem: Problem) -> bool:
    """Whether the support surface serves the problem; what it says against it must concern the configuration."""
    reasons = ENTRY.supports(problem, ARCHES["sm90"])
    assert {r.code for r in reasons} <= CONFIGURATION_CODES, reasons
    return not reasons


def compile_all(problems: Sequence[Problem], processes: int = 2) -> list[dict[str, Any]]:
    """What the compiler did with each problem's configuration."""
    given = [dglu_support.scheduled(problem).as_dict() for problem in problems]
    parts = [given[i::processes] for i in range(processes)]
    running = [
        subprocess.Popen([sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in parts
    ]
    for process, part in zip(running, parts):
        assert process.stdin is not None
        process.stdin.write(json.dumps(part))
        process.stdin.close()
    outputs = [process.stdout.read() for process in running if process.stdout is not None]
    assert [process.wait(timeout=60) for process in running] == [0] * processes
    found: list[Any] = [None] * len(given)
    for i, output in enumerate(outputs):
        found[i::processes] = json.loads(output.splitlines()[-1])
    return found


def disagreements(seeds: Sequence[int]) -> list[str]:
    """Each seed for which the surface and the compiler disagree, with what they said."""
    problems = [random_problem(seed) for seed in seeds]
    wrong = []
    for seed, problem, result in zip(seeds, problems, compile_all(problems)):
        if predicted(problem) != ("bytes" in result):
            wrong.append(f"seed {seed}: {result} but {ENTRY.supports(problem, ARCHES['sm90'])}")
    return wrong


def test_six_that_are_served_compile_and_twenty_that_are_not_are_refused() -> None:
    """A fresh sample each time; the reasons in words are those of the compiler's own refusal."""
    start = random.randrange(2**31)
    served: list[int] = []
    declined: list[int] = []
    for seed in range(start, start + 2000):
        wanted, room = (served, 6) if predicted(random_problem(seed)) else (declined, 20)
        if len(wanted) < room:
            wanted.append(seed)
    assert (len(served), len(declined)) == (6, 20)
    assert disagreements([*served, *declined]) == []


@pytest.mark.slow
@pytest.mark.skipif("OPFUSE_SLOW" not in os.environ, reason="takes minutes; OPFUSE_SLOW=1 runs it")
def test_a_hundred_random_configurations() -> None:
    """Predicted support equals actual compilation. Minutes, not seconds."""
    start = random.randrange(2**31)
    seeds = range(start, start + 100)
    assert 30 < sum(predicted(random_problem(seed)) for seed in seeds) < 95, f"a poor mixture from seed {start}"
    assert disagreements(seeds) == []
