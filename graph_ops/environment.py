"""What this machine has: versions, devices, environment variables, the kernel cache. Each probe fails on its own."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..kernels.arch import arch_of_capability
from .ir.errors import GraphNotSupportedError

PACKAGES = (
    "opfuse", "torch", "networkx", "numpy", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend", "apache-tvm-ffi",
    "cuda-python", "cuda-bindings", "filelock", "platformdirs",
)  # fmt: skip
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUTE_DSL_ARCH", "CUTE_DSL_CACHE_DIR", "CUDNN_FRONTEND_LOG_FILE",
    "CUDNN_FRONTEND_LOG_INFO", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS",
)  # fmt: skip
PREFIX = "OPFUSE_"

Facts = dict[str, Any]


def unavailable(why: object) -> str:
    """How a probe says that it found nothing."""
    return f"unavailable: {why}"


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return unavailable("not installed")


def _python() -> Facts:
    return {"version": platform.python_version(), "executable": sys.executable}


def _system() -> Facts:
    return {"platform": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()}


def _packages() -> Facts:
    return {name: _package(name) for name in PACKAGES}


def _torch() -> Facts | str:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch's is missing
        return unavailable(error)
    facts: Facts = {"version": torch.__version__, "built for CUDA": torch.version.cuda or "no"}
    try:
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        facts["cuDNN"] = cudnn or unavailable("not in this build")
    except (RuntimeError, OSError) as error:
        facts["cuDNN"] = unavailable(error)
    return facts


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return unavailable(error.strerror)
    return text.splitlines()[0].removeprefix("NVRM version:").strip() if text else unavailable("an empty file")


def _devices() -> list[Facts] | str:
    try:
        import torch
    except (ImportError, OSError) as error:
        return unavailable(error)
    if not torch.cuda.is_available():
        return unavailable("torch finds no CUDA device")
    try:
        return [_device(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:  # what torch raises where a driver or context fails
        return unavailable(error)


def _device(index: int) -> Facts:
    import torch

    facts = torch.cuda.get_device_properties(index)
    try:
        arch = arch_of_capability((facts.major, facts.minor)).name
    except GraphNotSupportedError as error:
        arch = unavailable(error)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "arch": arch,
        "memory GiB": round(facts.total_memory / 2**30, 1),
        "multiprocessors": facts.multi_processor_count,
    }


def _cache() -> Facts | str:
    try:
        from ..kernels.cache import KernelCache, default_folder

        folder = default_folder()
    except ImportError as error:
        return unavailable(error)
    if not folder.is_dir():
        return {"folder": str(folder), "entries": 0, "damaged": 0, "MiB": 0.0}
    try:
        info = KernelCache(folder).info()
    except (OSError, ImportError) as error:
        return unavailable(error)
    return {
        "folder": str(folder),
        "entries": info.entries,
        "damaged": info.damaged,
        "MiB": round(info.bytes / 2**20, 1),
    }


def _variables() -> Facts:
    chosen = [*VARIABLES, *sorted(name for name in os.environ if name.startswith(PREFIX))]
    return {name: os.environ[name] for name in chosen if name in os.environ}


PROBES: dict[str, Callable[[], Any]] = {
    "python": _python,
    "system": _system,
    "packages": _packages,
    "torch": _torch,
    "driver": _driver,
    "devices": _devices,
    "kernel cache": _cache,
    "environment": _variables,
}
"""Every probe by the heading it stands under."""


def collect() -> Facts:
    """Every probe's answer: text, a mapping or a list of mappings; `unavailable: why` where it found nothing."""
    return {heading: probe() for heading, probe in PROBES.items()}


def render(facts: Facts) -> str:
    """`collect()` as aligned text."""
    lines: list[str] = []
    for heading, answer in facts.items():
        if isinstance(answer, dict):
            lines.append(heading)
            lines += _pairs(answer) or ["  nothing set"]
        elif isinstance(answer, list):
            for index, entry in enumerate(answer):
                lines += [f"{heading} {index}", *_pairs(entry)]
        else:
            lines.append(f"{heading}: {answer}")
    return "\n".join(lines)


def _pairs(facts: Facts) -> list[str]:
    width = max(map(len, facts), default=0)
    return [f"  {name:<{width}}  {value}" for name, value in facts.items()]
