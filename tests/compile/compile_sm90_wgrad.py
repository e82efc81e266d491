"""Compiles configurations of the Hopper weight gradient, given as JSON on stdin; a process of its own, for its
environment.

Prints one JSON line: for each configuration {"bytes": size of the exported object, and counts of instructions where a
disassembler is there}.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opfuse.kernels.sm90 import compiling, wgrad_host
from opfuse.kernels.sm90.config import Schedule
from opfuse.kernels.sm90.wgrad_config import WgradConfig
from test_sm90_compile import disassembler, machine_code  # type: ignore[import-not-found]

COUNTED = ("HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "STL", "LDL")


def parsed(fields: Mapping[str, Any]) -> WgradConfig:
    """The configuration whose `as_dict` these are."""
    return WgradConfig(**{**fields, "schedule": Schedule(**fields["schedule"])})


def compiled(config: WgradConfig) -> dict[str, int]:
    out = {"bytes": len(compiling.export_object(wgrad_host.FUNCTIONS.compile(config)))}
    folder = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    if disassembler():
        code = machine_code(folder)
        out |= {op: len(re.findall(rf"\b{op}\b", code)) for op in COUNTED}
    for cubin in folder.glob("*.cubin"):
        cubin.unlink()
    return out


if __name__ == "__main__":
    print(json.dumps([compiled(parsed(fields)) for fields in json.load(sys.stdin)]))
