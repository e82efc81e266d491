"""Compiles configurations of the Hopper grouped GEMM, given as JSON on stdin: a process apart, for its environment.

Prints one JSON line: for each configuration {"bytes": size of the exported object, and counts of instructions where a
disassembler is there} or {"refused": text}.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opfuse.kernels.sm90 import compiling, gemm_host
from opfuse.kernels.sm90.config import Schedule
from opfuse.kernels.sm90.gemm_config import GemmConfig
from test_sm90_compile import disassembler, machine_code  # type: ignore[import-not-found]

COUNTED = ("HGMMA", "UTMALDG", "UTMASTG", "STL", "LDL")


def parsed(fields: Mapping[str, Any]) -> GemmConfig:
    """The configuration whose `as_dict` these are."""
    return GemmConfig(**{**fields, "schedule": Schedule(**fields["schedule"])})


def compiled(config: GemmConfig) -> dict[str, Any]:
    try:
        out: dict[str, Any] = {"bytes": len(compiling.export_object(gemm_host.FUNCTIONS.compile(config)))}
    except compiling.UnsupportedConfig as error:
        return {"refused": str(error)}
    folder = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    if disassembler():
        code = machine_code(folder)
        out |= {op: len(re.findall(rf"\b{op}\b", code)) for op in COUNTED}
    for cubin in folder.glob("*.cubin"):
        cubin.unlink()
    return out


if __name__ == "__main__":
    print(json.dumps([compiled(parsed(fields)) for fields in json.load(sys.stdin)]))
