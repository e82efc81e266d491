"""Runs samples: as a user would, in a process of their own, or imported, to look inside or to break something."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "samples"

RunSample = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for more threads; and a sample that sets their number leaves no trace."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def samples_folder() -> Path:
    return SAMPLES


@pytest.fixture
def run_sample() -> RunSample:
    """run_sample("name.py", *arguments) -> the finished process, its output as text."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SAMPLES / name), "--device", "cpu", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=sample_environment(), cwd=ROOT)

    return run


@pytest.fixture
def load_sample(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """load_sample("name") -> the module, imported as the script's own imports are."""
    monkeypatch.syspath_prepend(str(SAMPLES))
    return importlib.import_module


@pytest.fixture
def environment() -> dict[str, str]:
    return sample_environment()


def sample_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
