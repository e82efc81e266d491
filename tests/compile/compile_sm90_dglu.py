"""Compiles configurations of the Hopper dGLU kernel, given as JSON on stdin; a process of its own, for its environment.

Prints one JSON line: for each configuration {"bytes": size of the exported object} or {"refused": text}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from opfuse.kernels.sm90 import compiling, dglu_host
from opfuse.kernels.sm90.config import Activation, Schedule
from opfuse.kernels.sm90.dglu_config import DgluConfig


def parsed(fields: Mapping[str, Any]) -> DgluConfig:
    """The configuration whose `as_dict` these are."""
    parts = {"act": Activation(**fields["act"]), "schedule": Schedule(**fields["schedule"])}
    return DgluConfig(**{**fields, **parts})


def compiled(config: DgluConfig) -> dict[str, Any]:
    try:
        return {"bytes": len(compiling.export_object(dglu_host.FUNCTIONS.compile(config)))}
    except compiling.UnsupportedConfig as error:
        return {"refused": str(error)}


if __name__ == "__main__":
    print(json.dumps([compiled(parsed(fields)) for fields in json.load(sys.stdin)]))
