"""Fixtures of the PyTorch tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from expert_mlps import Case, random_case, relative  # type: ignore[import-not-found]

SEED = int.from_bytes(os.urandom(3), "little")
"""A fresh seed each run; every assertion's message has it. Set OPFUSE_SEED to repeat a run."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def seed() -> int:
    chosen = int(os.environ.get("OPFUSE_SEED", SEED))
    torch.manual_seed(chosen)
    return chosen


@pytest.fixture
def make_case(seed: int) -> Callable[..., Case]:
    """`random_case` from this run's seed."""
    return random_case


@pytest.fixture
def assert_close(seed: int) -> Callable[..., None]:
    """assert_close(name, got, wanted, bound): relative norm within `bound`, and nearly the same direction."""

    def check(name: str, got: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
        assert got.shape == wanted.shape, f"{name}: {got.shape}, wanted {wanted.shape} (seed {seed})"
        error = relative(got, wanted)
        assert error <= bound, f"{name}: relative error {error:.2e}, bound {bound:.0e} (seed {seed})"
        if wanted.double().norm() > 0:
            cosine = torch.cosine_similarity(got.double().flatten(), wanted.double().flatten(), dim=0)
            assert cosine >= 0.999, f"{name}: cosine {cosine:.5f} (seed {seed})"

    return check
