"""`opfuse cache`: what the folder of compiled kernels holds, and an empty one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from opfuse.graph_ops import cli
from opfuse.kernels.cache import BUILDING, CacheKey, KernelCache


def write_object(path: Path) -> None:
    path.write_bytes(b"o" * 2**20)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of three whole entries, two of one kernel, and a damaged one, where the command looks for it."""
    monkeypatch.setenv("OPFUSE_CACHE_DIR", str(tmp_path / "kernels"))
    cache = KernelCache(tmp_path / "kernels")
    for kernel, tile in (("sm90.dglu", 96), ("sm90.dglu", 128), ("sm90.glu", 128), ("sm90.glu", 192)):
        key = CacheKey(kernel, "sm90a", "0" * 64, {}, {"tile": tile})
        cache.get(key, write_object, lambda path: None)
    (cache.folder / f"{key.digest}.o").write_bytes(b"half")
    return cache.folder


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_info_as_text(capsys: Any, folder: Path) -> None:
    code, out, err = run(capsys, "cache", "info")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{folder}: 3 compiled kernels, 3.0 MiB",
        "  sm90.dglu: 2",
        "  sm90.glu: 1",
        "  damaged, to be built again: 1",
    ]


def test_info_as_json(capsys: Any, folder: Path) -> None:
    code, out, _ = run(capsys, "cache", "info", "--json")
    assert code == 0 and json.loads(out) == {
        "folder": str(folder), "entries": 3, "damaged": 1, "bytes": 3 * 2**20 + 4,
        "kernels": {"sm90.dglu": 2, "sm90.glu": 1},
    }  # fmt: skip


def test_clear_removes_all_and_says_how_many(capsys: Any, folder: Path) -> None:
    (folder / "notes.txt").write_text("not ours")
    assert run(capsys, "cache", "clear") == (0, f"{folder}: 4 compiled kernels removed\n", "")
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]
    assert run(capsys, "cache", "info")[1] == f"{folder}: 0 compiled kernels, 0.0 MiB\n"


def test_clear_takes_what_dead_builds_left_and_no_build_at_work(capsys: Any, folder: Path) -> None:
    dead, alive = folder / f"{BUILDING}dead", folder / f"{BUILDING}alive"
    for path in (dead, alive):
        path.mkdir()
        (path / "half.o").write_text("half")
    os.utime(dead, (time.time() - 3600, time.time() - 3600))
    run(capsys, "cache", "clear")
    assert alive.exists() and not dead.exists()


def test_no_folder_holds_nothing(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPFUSE_CACHE_DIR", str(tmp_path / "none"))
    assert run(capsys, "cache", "info")[:2] == (0, f"{tmp_path / 'none'}: 0 compiled kernels, 0.0 MiB\n")
    assert run(capsys, "cache", "clear")[0] == 0 and not (tmp_path / "none").exists()


def test_without_the_extra_it_says_how_to_name_a_folder(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delenv("OPFUSE_CACHE_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    code, out, err = run(capsys, "cache", "info")
    assert (code, out) == (2, "") and "CACHE_FOLDER" in err and "OPFUSE_CACHE_DIR" in err


def test_a_folder_that_cannot_be_written_is_a_named_error(
    capsys: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refused)
    code, _, err = run(capsys, "cache", "clear")
    assert code == 2 and "CACHE_FOLDER" in err and "Permission denied" in err and str(folder) in err


@pytest.mark.parametrize("arguments", [["cache"], ["cache", "shrink"]])
def test_an_action_is_asked_for(capsys: Any, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and "ACTION" in capsys.readouterr().err
