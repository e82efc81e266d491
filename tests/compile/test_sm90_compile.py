"""Cross-compiles the Hopper kernel as the table ships it and reads the machine code: wgmma there, no register spills.

Run as a script it compiles the configurations named on its command line and prints one JSON line each; the tests start
it so, in processes of their own, because the DSL reads its environment once.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from opfuse.kernels.sm90 import dglu_tune
from opfuse.kernels.sm90.config import SMEM_LIMIT, Activation, Schedule
from opfuse.kernels.sm90.dglu_config import DgluConfig, illegal, smem_bytes

pytestmark = pytest.mark.compile

BASE = DgluConfig(has_prob=True, has_dprob=True)
CODES = replace(BASE, d_dtype=None, q_row_dtype="e4m3", q_col_dtype="e4m3")
# Options, and the (N, K) whose schedule the table picks.
SHIPPED: dict[str, tuple[DgluConfig, int, int]] = {
    "wide": (BASE, 1536, 4096),
    "narrow": (BASE, 1024, 2048),
    "smallest": (BASE, 256, 1536),
    "plain": (DgluConfig(), 2048, 7168),
    "dbias": (replace(BASE, dbias_dtype="bf16"), 768, 2048),
    "dbias amax": (replace(BASE, dbias_dtype="fp32", has_amax=True, has_alpha=True, has_beta=True), 2048, 7168),
    "recompute": (replace(BASE, activation_dtype="bf16"), 1536, 4096),
    "geglu": (replace(BASE, act=Activation("geglu")), 2880, 2880),
    "situglu": (replace(BASE, act=Activation("situglu")), 1536, 4096),
    "concatenated": (replace(BASE, glu_layout="concatenated"), 768, 2048),
    "interleaved1": (replace(BASE, glu_layout="interleaved1"), 768, 2048),
    "n-major": (replace(BASE, b_major="n"), 1536, 4096),
    "discrete": (replace(BASE, discrete_b=True), 1536, 4096),
    "fp16": (replace(BASE, ab_dtype="fp16", c_dtype="fp16", d_dtype="fp16"), 1536, 4096),
    "fp32": (replace(BASE, c_dtype="fp32", d_dtype="fp32"), 1536, 4096),
    "row codes": (replace(BASE, d_dtype=None, q_row_dtype="e4m3"), 2048, 7168),
    "codes": (CODES, 2048, 7168),
    "codes small": (CODES, 768, 2048),
    "codes and d": (replace(CODES, d_dtype="bf16"), 2048, 7168),
    "codes and dbias": (replace(CODES, dbias_dtype="bf16"), 768, 2048),
    "codes and activation": (replace(CODES, activation_dtype="bf16", has_alpha=True, has_beta=True), 2048, 7168),
    "codes and amax": (replace(CODES, has_amax=True, act=Activation("situglu")), 2880, 2880),
    "codes and fp32 d": (replace(CODES, d_dtype="fp32", act=Activation("situglu")), 2048, 7168),
    "column codes": (
        replace(CODES, q_row_dtype=None, q_col_dtype="e5m2", sf_swizzled=False, glu_layout="concatenated",
                act=Activation("geglu"), has_alpha=True, has_beta=True), 768, 2048,
    ),
    "row codes and d": (replace(CODES, q_col_dtype=None, d_dtype="bf16", has_amax=True, has_beta=True), 2048, 2048),
}  # fmt: skip


# Random legal configurations, any schedule: what `illegal` accepts compiles. 100 of them take some ten minutes.
SEEDS = range(int(os.environ.get("OPFUSE_RANDOM_COMPILES", "2")))


def random_configuration(seed: int) -> DgluConfig:
    r = random.Random(seed)
    while True:
        pick, quantized = r.choice, r.random() < 0.4
        config = DgluConfig(
            ab_dtype=pick(["bf16", "fp16"]), b_major=pick(["k", "n"]), discrete_b=pick([False, True]),
            glu_layout=pick(["interleaved32", "concatenated", "interleaved1"]),
            act=Activation(pick(["swiglu", "geglu", "situglu"])), c_dtype=pick(["bf16", "fp16", "fp32"]),
            d_dtype=pick([None, "bf16", "fp16", "fp32"]), has_prob=pick([False, True]), has_alpha=pick([False, True]),
            alpha_exponent=pick([1, 2]), has_beta=pick([False, True]), has_dprob=pick([False, True]),
            activation_dtype=pick([None, "bf16", "fp16"]), dbias_dtype=pick([None, "bf16", "fp32"]),
            has_amax=pick([False, True]), q_row_dtype=pick([None, "e4m3", "e5m2"]) if quantized else None,
            q_col_dtype=pick([None, "e4m3", "e5m2"]) if quantized else None, sf_swizzled=pick([False, True]),
            schedule=Schedule(
                tile_m=pick([64, 128, 256]), tile_n=pick([64, 96, 128, 160, 192, 224, 256]),
                pingpong=pick([False, True]), cluster_m=pick([1, 2]), cluster_n=pick([1, 2]),
                ab_stages=pick([2, 3, 4, 5, 6]), ring_chunks=pick([2, 4]), band=pick([4, 8, 16]),
            ),
        )  # fmt: skip
        if not illegal(config):
            return config


def configuration(name: str) -> DgluConfig:
    if name.startswith("random "):
        return random_configuration(int(name.split()[1]))
    config, n, k = SHIPPED[name]
    return dglu_tune.schedule_for(config, n=n, k=k)


def disassembler() -> str | None:
    """nvdisasm of the path, of the package nvidia-cuda-nvdisasm, or of triton's."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    for root in map(Path, sys.path):
        for place in ("nvidia/cu13/bin", "nvidia/cuda_nvdisasm/bin", "triton/backends/nvidia/bin"):
            if (root / place / "nvdisasm").exists():
                return str(root / place / "nvdisasm")
    return None


def machine_code(folder: Path) -> str:
    tool, out = disassembler(), ""
    assert tool is not None
    for cubin in folder.glob("*.cubin"):
        out += subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    return out


def main(names: list[str]) -> None:
    from opfuse.kernels.sm90 import compiling, dglu_host

    folder = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    for name in names:
        size = len(compiling.export_object(dglu_host.FUNCTIONS.compile(configuration(name))))
        counts = {"object": size}
        if disassembler():
            code = machine_code(folder)
            counts |= {op: len(re.findall(rf"\b{op}\b", code)) for op in ("HGMMA", "UTMALDG", "STL", "LDL")}
        for cubin in folder.glob("*.cubin"):
            cubin.unlink()
        print(json.dumps({"name": name, **counts}), flush=True)


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    """Both halves of the configurations in two processes at once."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    names = [*SHIPPED, *(f"random {seed}" for seed in SEEDS)]
    out: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for half in (names[::2], names[1::2]):
            dump = Path(folder, half[0])
            dump.mkdir()
            env = os.environ | {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(dump)}
            command = [sys.executable, __file__, *half]
            running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        for process in running:
            text = process.communicate(timeout=300)[0]
            assert process.returncode == 0
            out |= {r["name"]: r for r in map(json.loads, filter(lambda t: t.startswith("{"), text.splitlines()))}
    return out


@pytest.mark.parametrize("name", [*SHIPPED, *(f"random {seed}" for seed in SEEDS)])
def test_compiles_without_a_gpu(results, name):
    assert results[name]["object"] > 10_000


@pytest.mark.parametrize("name", SHIPPED)
def test_machine_code(results, name):
    if not disassembler():
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    counts = results[name]
    assert counts["HGMMA"] >= 8 and counts["UTMALDG"] >= 2
    assert counts["STL"] == counts["LDL"] == 0, "registers spill"


@pytest.mark.parametrize("name", SHIPPED)
def test_fits_shared_memory(name):
    """C85: the model counts alignment; tracing the kernel asserts that it covers the structure."""
    assert smem_bytes(configuration(name)) <= SMEM_LIMIT
    assert not illegal(configuration(name))


if __name__ == "__main__":
    main(sys.argv[1:])
