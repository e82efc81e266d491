"""Runs the Hopper kernels on a few small problems under compute-sanitizer, and adds the outcome to a record.

    python tests/gpu/sanitize.py [--record tests/gpu/record.json] [--tools memcheck,racecheck]

The problems are checked against float64 as well. Kernels come from the kernel cache, compiled before the sanitizer
starts. Exits with 1 where a tool finds something or refuses the device.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gemm_harness  # type: ignore[import-not-found]
import glu_harness  # type: ignore[import-not-found]
import harness  # type: ignore[import-not-found]
import torch
import wgrad_harness  # type: ignore[import-not-found]
from gemm_cases import CASES as GEMM  # type: ignore[import-not-found]
from glu_cases import CASES as FORWARD  # type: ignore[import-not-found]
from opfuse.graph_ops.torch.routing import combine, dispatch, route
from opfuse.kernels.sm90 import dglu_tune
from opfuse.kernels.sm90.gemm_config import GemmConfig
from opfuse.kernels.sm90.glu_config import GluConfig, quantizes
from opfuse.kernels.sm90.quantize_config import QuantizeConfig
from opfuse.kernels.sm90.wgrad_config import WgradConfig
from parallel_build import adapter, fill  # type: ignore[import-not-found]
from quantize_cases import CASES as QUANTIZE  # type: ignore[import-not-found]
from quantize_cases import check as check_quantize  # type: ignore[import-not-found]
from sm90_cases import BASE, CASES, ROW_COL  # type: ignore[import-not-found]
from wgrad_cases import CASES as WGRAD  # type: ignore[import-not-found]

# Few tiles, so that a tool which follows every access of shared memory ends within seconds; groups that end inside
# tiles, empty ones, and rows that no expert owns.
PROBLEMS = {
    "bf16": (CASES["base"], [0, 1, 300, 77], 70),
    "row and column codes, dprob": (replace(ROW_COL, d_dtype=None, schedule=dglu_tune.P128), [128, 0, 256], 128),
    "dbias and amax": (CASES["deterministic"], [130, 0, 65], 0),
    "separate experts": (CASES["discrete"], [64, 0, 130], 0),
    "cooperative": (replace(BASE, schedule=dglu_tune.C256), [200, 0, 130], 0),
    "plain": (GEMM["base"], [0, 1, 300, 77], 70),
    "plain, float32 of separate experts": (replace(GEMM["discrete"], y_dtype="fp32"), [130, 0, 65], 0),
    "forward": (FORWARD["base"], [0, 1, 300, 77], 70),
    "forward, gate and up apart": (FORWARD["concatenated"], [130, 0, 65], 0),
    "forward, codes": (FORWARD["codes and d, of d"], [128, 0, 256], 128),
    "quantize": (QUANTIZE["base"], [131], 0),
    "quantize FLOAT, plain": (QUANTIZE["fp32, the other plain"], [131], 8),
    "weight gradient": (WGRAD["base"], [0, 1, 300, 77], 70),
    "weight gradient, accumulated, cooperative": (WGRAD["accumulate c256_m"], [130, 0, 65], 0),
}
K, N = 128, 160
ROUTED_EXPERTS = 16


def _forward(config: GluConfig, sizes: list[int], k: int, n: int, tail: int) -> dict[str, float]:
    """Codes are of 64 columns at a time."""
    errors: dict[str, float] = glu_harness.check(config, sizes, k, 192 if quantizes(config) else n, tail)
    return errors


def _quantize(config: QuantizeConfig, sizes: list[int], k: int, n: int, tail: int) -> dict[str, float]:
    check_quantize(config, sum(sizes), n, 0, tail)
    return {}


def check_routing() -> None:
    """Tokens to rows and back, padded and not, against the same on the CPU."""
    expert, x = torch.randint(ROUTED_EXPERTS + 3, (70, 2)), torch.randn(70, 64)
    for multiple_of in (1, 16):
        told = []
        for device in ("cpu", "cuda"):
            routing = route(expert.to(device), ROUTED_EXPERTS, multiple_of=multiple_of)
            rows = dispatch(x.to(device), routing)
            told.append([routing.slot, routing.tokens_per_expert, rows, combine(rows, routing)])
        for here, there in zip(*told, strict=True):
            assert torch.equal(here, there.cpu()), f"rows padded to {multiple_of}"


CHECKS = {GemmConfig: gemm_harness.check, GluConfig: _forward, WgradConfig: wgrad_harness.check,
          QuantizeConfig: _quantize}  # fmt: skip
DONE = "every problem is right"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.+)")


def run_problems() -> None:
    """Every problem once, in this process; raises AssertionError on a wrong number."""
    for name, (config, sizes, tail) in PROBLEMS.items():
        check = CHECKS.get(type(config), harness.check)
        print(name, {k: f"{v:.1e}" for k, v in check(config, sizes, K, N, tail).items()}, flush=True)
    check_routing()
    print(DONE, flush=True)


def run_under(tool: str) -> tuple[str, bool]:
    """(the tool's summary, whether it is clean) of one process that runs the problems.

    Torch's own kernels are watched too; only what is said of ours counts, by the name that the DSL gives them.
    """
    command = ["compute-sanitizer", "--tool", tool, "--show-backtrace", "no", sys.executable, __file__, "--inside"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    found = SUMMARY.search(done.stdout)
    if found is None or DONE not in done.stdout:
        print(done.stdout[-6000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
        return f"did not finish, exit {done.returncode}", False
    ours = [line for line in done.stdout.splitlines() if line.startswith("====") and "opfuse" in line]
    if not found[1].startswith("0 "):
        print("\n".join(ours[:40]) or done.stdout[-4000:], file=sys.stderr)
        return f"{found[1]}; {f'{len(ours)} lines name' if ours else 'none in'} our kernels", not ours
    return found[1], True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="JSON record whose part `sanitizer` is written")
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--inside", action="store_true", help="run the problems in this process, without a tool")
    args = parser.parse_args()
    if args.inside:
        run_problems()
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    configs = [config for config, _, _ in PROBLEMS.values()]
    print(fill(adapter(configs[0]).kernel_cache().folder, configs))
    check_routing()  # its kernels are in the cache, then
    outcome: dict[str, object] = {"problems": [*PROBLEMS, "routing"]}
    failed = False
    for tool in args.tools.split(","):
        begin = time.monotonic()
        outcome[tool], clean = run_under(tool)
        failed |= not clean
        print(f"{tool}: {outcome[tool]}, {time.monotonic() - begin:.0f} s", flush=True)
    if args.record:
        from conftest import source_sha256  # type: ignore[import-not-found]

        record = json.loads(args.record.read_text()) if args.record.exists() else {}
        if record.get("source", source_sha256()) != source_sha256():
            parser.error(f"{args.record} is of other sources: run the tests first")
        args.record.write_text(json.dumps({**record, "source": source_sha256(), "sanitizer": outcome}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
