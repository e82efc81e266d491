"""Compiles configurations of the Hopper GLU kernel, given as JSON on stdin; a process of its own, for its environment.

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

from opfuse.kernels.sm90 import compiling, glu_host
from opfuse.kernels.sm90.config import Activation, Schedule
from opfuse.kernels.sm90.glu_config import GluConfig
from test_sm90_compile import disassembler, machine_code  # type: ignore[import-not-found]

COUNTED = ("HGMMA", "UTMALDG", "UTMASTG", "STL", "LDL")


def parsed(fields: Mapping[str, Any]) -> GluConfig:
    """The configuration whose `as_dict` these are."""
    parts = {"act": Activation(**fields["act"]), "schedule": Schedule(**fields["schedule"])}
    return GluConfig(**{**fields, **parts})


def compiled(config: GluConfig) -> dict[str, Any]:
    try:
        out: dict[str, Any] = {"bytes": len(compiling.export_object(glu_host.FUNCTIONS.compile(config)))}
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
