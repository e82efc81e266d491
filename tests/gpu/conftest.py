"""Puts the harness on the path, and writes the record of a run where OPFUSE_GPU_RECORD names a file."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
COUNTS: dict[str, int] = {}


def source_sha256() -> str:
    """sha256 of the kernel's sources, one after another in byte order of their paths."""
    digest = hashlib.sha256()
    for path in sorted((HERE.parents[1] / "kernels" / "sm90").glob("*.py"), key=lambda p: p.name.encode()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pytest_runtest_logreport(report) -> None:
    if report.when == "call" or report.outcome != "passed":
        COUNTS[report.outcome] = COUNTS.get(report.outcome, 0) + 1


def pytest_sessionfinish(session, exitstatus) -> None:
    target = os.environ.get("OPFUSE_GPU_RECORD")
    if not target:
        return
    import torch

    versions = {"torch": str(torch.__version__)}
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        versions[name] = importlib.metadata.version(name)
    record = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
        "source": source_sha256(),
        "exit": int(exitstatus),
        "counts": COUNTS,
    }
    Path(target).write_text(json.dumps(record, indent=1) + "\n")
