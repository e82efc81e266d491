"""What the support surface of our Hopper GLU kernel predicts is what compiling for sm_90a does, without a GPU."""

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
from opfuse.kernels.hopper import glu_support
from opfuse.kernels.problem import Problem
from opfuse.kernels.registry import KERNELS

PROGRAM = Path(__file__).parent / "compile_sm90_glu.py"
ENTRY = next(k for k in KERNELS if k.id == "sm90.grouped_gemm_glu")
BF16, F16, F32, E4M3, E5M2 = (DataType.BFLOAT16, DataType.HALF, DataType.FLOAT, DataType.FP8_E4M3,
                              DataType.FP8_E5M2)  # fmt: skip
PARAMETERS: Mapping[str, Mapping[str, Sequence[float]]] = {
    "swiglu": {},
    "geglu": {"geglu_alpha": (1.0, 1.702), "clamp_min": (-7.0, -0.5), "clamp_max": (7.0, 1.5),
              "linear_offset": (0.0, 1.0)},
    "situglu": {"situ_beta1": (4.0, 1.25), "situ_beta2": (25.0, 2.0)},
}  # fmt: skip
CONFIGURATION_CODES = {
    "OPERAND_TYPE", "UP_WEIGHTS", "GLU_LAYOUT", "PRODUCT_ROUNDING", "C_TYPE", "D_TYPE", "BIAS_TYPE", "SOURCE_ROUNDING",
    "BLOCK_FORMAT", "LEGAL",
}  # fmt: skip
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

    def mostly(built: Sequence[Any], *others: Any) -> Any:
        return r.choice(others) if r.random() < 0.06 else r.choice(built)

    m, k, n, experts = symbol("M", 128), r.choice((64, 200, 2048)), r.choice((32, 256, 768, 1024, 2048)), 8
    layout = mostly(
        (GluLayout.interleaved(32), GluLayout.concatenated(), GluLayout.interleaved(1)), GluLayout.interleaved(16)
    )
    act, ab = r.choice(list(PARAMETERS)), mostly((BF16, BF16, F16), F32)
    apart = r.random() < 0.3  # gate and up, with weights of their own
    columns = n if apart else 2 * n
    stride = r.choice(((columns * k, 1, k), (columns * k, columns, 1)))
    b = dict(dim=(experts, k, columns), data_type=ab, stride=stride, discrete=r.random() < (0.05 if apart else 0.25))
    roles: dict[str, dict[str, Any]] = {
        "a": dict(dim=(m, k), data_type=ab),
        "b": b | dict(glu_layout=None if apart else layout),
        "offsets": dict(dim=(experts,), data_type=DataType.INT32, multiple_of=128),
    }
    if apart:
        roles["b_up"] = dict(b)
        layout = mostly((GluLayout.concatenated(),), GluLayout.interleaved(32))
    if r.random() < 0.5:
        roles["alpha"] = dict(dim=(experts,), data_type=F32)
    if r.random() < 0.4:
        roles["bias"] = dict(dim=(experts, 2 * n), data_type=mostly((BF16, F16, F32), E4M3), glu_layout=layout)
    if r.random() < 0.5:
        roles["prob"] = dict(dim=(m,), data_type=F32)
    c = r.choice((None, mostly((BF16, F16), F32)))
    if c is not None:
        roles["c"] = dict(dim=(m, 2 * n), data_type=c, glu_layout=layout)
    roles["d"] = dict(dim=(m, n), data_type=mostly((BF16, F16), F32))
    # Where the product rounds: inside, a copy of a FLOAT one, or c itself.
    if c is None:
        rounding = {"c": mostly((BF16, F16, F32), DataType.DOUBLE)}
    else:
        rounding = r.choice(({"c_wide": F32}, {}, {"c_wide": BF16}))
    attributes: dict[str, Any] = {"act": act, "alpha_exponent": r.choice((1, 2))}
    if r.random() < 0.35 and n % 64 == 0:
        rounding |= add_codes(r, roles, attributes, (m, n), mostly)
    if apart:
        attributes["join.layout"] = str(layout)
    attributes |= {name: r.choice(values) for name, values in PARAMETERS[act].items()}
    specs = {
        role: TensorSpec(uid, role, fields["dim"], fields.pop("stride", contiguous_stride(fields["dim"])),
                         **{name: value for name, value in fields.items() if name != "dim"})
        for uid, (role, fields) in enumerate(roles.items())
    }  # fmt: skip
    return Problem("grouped_gemm_glu", specs, attributes, rounding)


def add_codes(
    r: random.Random, roles: dict[str, dict[str, Any]], attributes: dict[str, Any], dim: tuple[Any, int], mostly: Any
) -> dict[str, DataType]:
    """Codes along rows, columns or both, beside the activation, a copy of a FLOAT one, or none; gives its rounding."""
    swizzled = r.random() < 0.7
    for side, axis in r.choice(([("row", 1)], [("col", 0)], [("row", 1), ("col", 0)])):
        layout, codes = ScaleLayout(32, axis, swizzled), mostly((E4M3, E5M2), DataType.FP4_E2M1)
        roles[f"q_{side}"] = dict(dim=dim, data_type=codes, scale_layout=layout)
        roles[f"sf_{side}"] = dict(dim=layout.storage(dim), data_type=DataType.FP8_E8M0, scale_layout=layout)
        values = {"block_size": 32, "scale_type": "FP8_E8M0", "swizzled": swizzled, "data_type": codes.value}
        attributes.update({f"q_{side}.{name}": value for name, value in values.items()})
    if r.random() < 0.5:
        del roles["d"]
        return {"d": mostly((F32, BF16, F16), DataType.DOUBLE)}
    return r.choice(({}, {"d_wide": F32}))


def predicted(problem: Problem) -> bool:
    """Whether the support surface serves the problem; what it says against it must concern the configuration."""
    reasons = ENTRY.supports(problem, ARCHES["sm90"])
    assert {r.code for r in reasons} <= CONFIGURATION_CODES, reasons
    return not reasons


def compile_all(problems: Sequence[Problem], folder: Path, processes: int = 2) -> list[dict[str, Any]]:
    """What the compiler did with each problem's configuration."""
    given = [glu_support.scheduled(problem).as_dict() for problem in problems]
    running = []
    for i in range(processes):
        kept = folder / f"cubins {i}"
        kept.mkdir()
        environment = os.environ | {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(kept)}
        process = subprocess.Popen([sys.executable, str(PROGRAM)], env=environment, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(json.dumps(given[i::processes]))
        process.stdin.close()
        running.append(process)
    outputs = [process.stdout.read() for process in running if process.stdout is not None]
    assert [process.wait(timeout=60) for process in running] == [0] * processes
    found: list[Any] = [None] * len(given)
    for i, output in enumerate(outputs):
        found[i::processes] = json.loads(output.splitlines()[-1])
    return found


def disagreements(seeds: Sequence[int], folder: Path) -> list[str]:
    """Each seed for which the surface and the compiler disagree, or whose kernel spills, with what they said."""
    problems = [random_problem(seed) for seed in seeds]
    wrong = []
    for seed, problem, result in zip(seeds, problems, compile_all(problems, folder)):
        if predicted(problem) != ("bytes" in result):
            wrong.append(f"seed {seed}: {result} but {ENTRY.supports(problem, ARCHES['sm90'])}")
        elif result.get("STL") or result.get("LDL"):
            wrong.append(f"seed {seed}: the table's schedule spills, {result}")
    return wrong


def test_three_that_are_served_compile_and_twenty_that_are_not_are_refused(tmp_path: Path) -> None:
    """A fresh sample each time; the kernels of the table's schedules do not spill."""
    start = random.randrange(2**31)
    served: list[int] = []
    declined: list[int] = []
    for seed in range(start, start + 2000):
        wanted, room = (served, 3) if predicted(random_problem(seed)) else (declined, 20)
        if len(wanted) < room:
            wanted.append(seed)
    assert (len(served), len(declined)) == (3, 20)
    assert disagreements([*served, *declined], tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif("OPFUSE_SLOW" not in os.environ, reason="takes minutes; OPFUSE_SLOW=1 runs it")
def test_sixty_random_configurations(tmp_path: Path) -> None:
    """Predicted support equals actual compilation. Minutes, not seconds."""
    start = random.randrange(2**31)
    seeds = range(start, start + 60)
    assert 20 < sum(predicted(random_problem(seed)) for seed in seeds) < 58, f"a poor mixture from seed {start}"
    assert disagreements(seeds, tmp_path) == []
