"""The version probe: known-bad pairs by name, newer ones warned of once, absent packages no obstacle to planning."""

from __future__ import annotations

import sys
import warnings

import pytest
from opfuse.kernels.arch import ARCHES
from opfuse.kernels.cudnn import grouped_dglu, versions
from opfuse.kernels.cudnn.versions import Pair, known_bad, parse_version, unknown, warn_if_unknown


@pytest.mark.parametrize(
    ("frontend", "dsl", "name"),
    [
        ("1.32.0", "4.8.1", None),
        ("1.32.0", "4.8.0", None),
        ("1.33.0", "4.9.0", None),
        ("1.31.2", "4.8.1", "frontend-below-1.32"),
        ("1.32.0", "4.5.2", "dsl-4.5-dbias"),
        ("1.32.0", "4.6.0", "dsl-4.6-fp8"),
        ("1.32.0", "4.6.1", "dsl-4.6-fp8"),
        ("1.32.0", "4.7.0", "dsl-below-4.8"),
        ("1.32.0", "4.8.0a0+20260823210556.ac70faa", "dsl-4.8-prerelease"),
        ("1.32.0", "4.8.0.dev1", "dsl-4.8-prerelease"),
        (None, "4.6.0", None),
        ("1.32.0", None, None),
    ],
)
def test_known_bad(frontend: str | None, dsl: str | None, name: str | None) -> None:
    found = known_bad(Pair(frontend, dsl))
    assert (found.name if found else None) == name


def test_every_known_bad_entry_is_reachable_and_sourced() -> None:
    assert len({bad.name for bad in versions.KNOWN_BAD}) == len(versions.KNOWN_BAD)
    for bad in versions.KNOWN_BAD:
        assert bad.why and bad.source
        frontends = [bad.frontend.low, "1.32.0"]
        assert any(known_bad(Pair(f, bad.dsl.low)) is bad for f in frontends if f in bad.frontend), bad.name


def test_versions_sort() -> None:
    texts = ["1.9.0", "1.32.0rc1", "1.32", "1.32.1", "1.33.0.dev2", "1.33.0+cu13", "2.0"]
    assert sorted(texts, key=parse_version) == texts
    with pytest.raises(ValueError, match="not a version: 'main'"):
        parse_version("main")


def test_newer_versions_are_named() -> None:
    assert unknown(Pair("1.32.7", "4.8.9")) == ()
    assert unknown(Pair("1.33.0", "4.8.1")) == ("nvidia-cudnn-frontend 1.33.0 (tested: 1.32.0 to below 1.33.0)",)
    assert len(unknown(Pair("2.0", "5.0"))) == 2


def test_build_warns_of_a_newer_version_once(make_problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: Pair("1.99.0", "4.8.1"))
    monkeypatch.setattr(grouped_dglu, "compiled", lambda configuration, device: object())
    warn_if_unknown.cache_clear()
    with pytest.warns(UserWarning, match=r"opfuse was not tested with nvidia-cudnn-frontend 1\.99\.0"):
        grouped_dglu.build(make_problem(), "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grouped_dglu.build(make_problem(), "cpu")


def test_planning_needs_no_package(make_problem, entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cudnn-frontend a plan for sm100 still names the kernel; building it is an ImportError."""
    monkeypatch.setattr(versions, "installed", lambda: Pair(None, None))
    assert entry.supports(make_problem(), ARCHES["sm100"]) == ()
    monkeypatch.setitem(sys.modules, "cudnn", None)
    grouped_dglu.compiled.cache_clear()
    with pytest.raises(ImportError):
        entry.build(make_problem(), "cpu")
