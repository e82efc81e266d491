"""The small kernel that zeroes what no expert covers cross-compiles for Hopper."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None, reason="needs the extra `cuda`: nvidia-cutlass-dsl is missing"
    ),
]

PROGRAM = """
from opfuse.kernels.sm90.compiling import export_object
from opfuse.kernels.sm90.uncovered import compile_uncovered
print(*(len(export_object(compile_uncovered(by_expert))) for by_expert in (False, True)))
"""


def test_both_kernels_compile():
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(int(size) > 4096 for size in done.stdout.split())
