"""The kernels of a router's choices cross-compile for Hopper: no register spills, many loads before a store, as many
threads a multiprocessor as keep its memory busy."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from opfuse.kernels.sm90.routing_config import BINS, MOST_CHOICES, RouteConfig, TokenRowsConfig

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None, reason="needs the extra `cuda`: nvidia-cutlass-dsl is missing"
    ),
]

SHIPPED: dict[str, TokenRowsConfig | RouteConfig] = {
    **{f"sum of {k} {dtype}": TokenRowsConfig(k, dtype)
       for k in (1, 2, 4, 8) for dtype in ("bf16", "fp32")},
    "sum of 3 fp16": TokenRowsConfig(3, "fp16"),
    "sum of most": TokenRowsConfig(MOST_CHOICES, "bf16"),
    **{f"copy to {k}": TokenRowsConfig(k, None) for k in (1, 2, 8, MOST_CHOICES)},
    **{f"route {bits} bits {bins}": RouteConfig(bits, bins) for bits, bins in ((32, BINS[0]), (64, BINS[-1]))},
}  # fmt: skip


def main() -> None:
    from opfuse.kernels.sm90 import compiling
    from opfuse.kernels.sm90.route_choices import compile_route
    from opfuse.kernels.sm90.token_rows import compile_token_rows
    from test_sm90_compile import disassembler, machine_code  # type: ignore[import-not-found]

    folder = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    for name, config in SHIPPED.items():
        function = compile_route(config) if isinstance(config, RouteConfig) else compile_token_rows(config)
        found: dict[str, int | str] = {"name": name, "object": len(compiling.export_object(function))}
        if disassembler():
            code = machine_code(folder)
            memory = re.findall(r"\b(LDG\.E\.NA\.128|STG\.E\.128|STL|LDL)\b", code)
            found |= {op: memory.count(op) for op in ("LDG.E.NA.128", "STG.E.128", "STL", "LDL")}
            found["first loads"] = memory[: (memory + ["STG.E.128"]).index("STG.E.128")].count("LDG.E.NA.128")
            found["registers"] = 1 + max(int(r) for r in re.findall(r"\bR(\d+)\b", code))
        for cubin in folder.glob("*.cubin"):
            cubin.unlink()
        print(json.dumps(found), flush=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = str(tmp_path_factory.mktemp("cubins"))
    env = os.environ | {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": folder}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return {r["name"]: r for r in map(json.loads, filter(lambda t: t.startswith("{"), done.stdout.splitlines()))}


@pytest.mark.parametrize("name", SHIPPED)
def test_machine_code(results, name):
    found, config = results[name], SHIPPED[name]
    assert found["object"] > 4096
    if "registers" not in found:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    assert found["STL"] == found["LDL"] == 0, "registers spill"
    if isinstance(config, RouteConfig):
        assert found["registers"] <= 64
    else:
        # Loads under way on a multiprocessor of 65536 registers: 64 KB is twice what 4.8 TB/s take in 1 us.
        threads = 65536 // (-(-found["registers"] // 8) * 8 * config.threads) * config.threads
        assert threads * 16 * min(found["first loads"], 8) >= 2**16
        assert found["STG.E.128"] >= 1


if __name__ == "__main__":
    main()
