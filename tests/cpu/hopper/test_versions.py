"""C83: what compiled a kernel is part of its cache key, and of what `opfuse env` tells."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from opfuse.graph_ops import environment
from opfuse.kernels.cache import COMPILERS, KernelCache
from opfuse.kernels.hopper import dglu_support, grouped_dglu, launched
from opfuse.kernels.sm90 import compiling, dglu_host


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Configurations that were compiled, to bytes that name the DSL's version."""
    made: list[Any] = []

    def compile_dglu(config: Any) -> Any:
        made.append(config)
        return metadata.version("nvidia-cutlass-dsl")

    monkeypatch.setattr(dglu_host.FUNCTIONS, "compile", compile_dglu)
    monkeypatch.setattr(compiling, "export_object", str.encode)
    monkeypatch.setattr(compiling, "load_object", bytes.decode)
    launched.origin.cache_clear()
    yield made
    launched.origin.cache_clear()


@pytest.mark.parametrize("package", COMPILERS)
def test_c83_another_compiler_compiles_again(
    make_problem: Any, compiles: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """A daily build of the DSL never gets what the release before it compiled, and the release gets its own back."""
    installed = dict.fromkeys(COMPILERS, "4.8.1")
    monkeypatch.setattr(metadata, "version", installed.__getitem__)
    config = dglu_support.scheduled(make_problem())

    def built(version: str) -> int:
        installed[package] = version
        launched.origin.cache_clear()  # as in a new process
        found = grouped_dglu.compiled(config, KernelCache(tmp_path))
        assert found == installed["nvidia-cutlass-dsl"]
        return len(compiles)

    counts = [built(v) for v in ("4.8.1", "4.8.1", "4.9.0.dev20260823", "4.8.1", "4.9.0.dev20260824")]
    assert counts == [1, 1, 2, 2, 3]


def test_c83_env_tells_every_version_of_the_key() -> None:
    assert set(COMPILERS) <= set(environment.PACKAGES)
    told = environment.collect()["packages"]
    for name in (*COMPILERS, "nvidia-cudnn-frontend"):
        try:
            assert told[name] == metadata.version(name)
        except metadata.PackageNotFoundError:
            assert told[name] == "unavailable: not installed"
