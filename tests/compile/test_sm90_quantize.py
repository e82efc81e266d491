"""The Hopper quantize kernel cross-compiled: no register spills, and registers for as many CTAs as it counts on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from opfuse.kernels.sm90.quantize_config import QuantizeConfig

BASE = QuantizeConfig()
SHIPPED: dict[str, QuantizeConfig] = {
    "bf16": BASE,
    "fp16, plain": replace(BASE, x_dtype="fp16", row_swizzled=False, col_swizzled=False),
    "fp32, norm_const": replace(BASE, x_dtype="fp32", has_norm_row=True, has_norm_col=True),
    "rows": replace(BASE, q_col_dtype=None),
    "fp32 columns, e5m2": replace(BASE, x_dtype="fp32", q_row_dtype=None, q_col_dtype="e5m2"),
}
COUNTED = ("LDG", "STG", "STL", "LDL")

pytestmark = pytest.mark.compile


def main() -> None:
    """Counts of instructions of each configuration as a JSON line; a process of its own, for its environment."""
    from opfuse.kernels.sm90 import compiling, quantize_host
    from test_sm90_compile import disassembler, machine_code  # type: ignore[import-not-found]

    folder, out = Path(os.environ["CUTE_DSL_DUMP_DIR"]), {}
    for name, config in SHIPPED.items():
        counts = {"bytes": len(compiling.export_object(quantize_host.FUNCTIONS.compile(config)))}
        if disassembler():
            code = machine_code(folder)
            counts |= {op: len(re.findall(rf"\b{op}\b", code)) for op in COUNTED}
        for cubin in folder.glob("*.cubin"):
            cubin.unlink()
        out[name] = counts
    print(json.dumps(out))


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, int]]:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": folder}
        done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", SHIPPED)
def test_compiles_without_spills(results: dict[str, dict[str, int]], name: str) -> None:
    """x is loaded once: 8 rows of 16 bytes a lane, or of 32."""
    counts, config = results[name], SHIPPED[name]
    assert counts["bytes"] > 5_000
    if "LDG" not in counts:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    assert counts["STL"] == counts["LDL"] == 0, "registers spill"
    loads = (16 if config.x_dtype == "fp32" else 8) + config.has_norm_row + config.has_norm_col
    assert counts["LDG"] == loads and counts["STG"] >= 8 * (bool(config.q_row_dtype) + bool(config.q_col_dtype))


def test_an_illegal_configuration_is_not_compiled() -> None:
    from opfuse.kernels.sm90 import compiling, quantize_host

    with pytest.raises(compiling.UnsupportedConfig, match=r"x_dtype is 'e4m3'.*neither rows nor columns"):
        quantize_host.FUNCTIONS.compile(QuantizeConfig("e4m3", None, None))


if __name__ == "__main__":
    main()
