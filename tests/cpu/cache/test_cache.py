"""The kernel cache under crashes, races and folders that cannot be written, with a compiler that writes text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opfuse.kernels.cache import CacheKey, CacheWarning, KernelCache, default_folder, source_digest

KEY = CacheKey("dglu", "sm90a", "0" * 64, {"dsl": "4.8.1"}, {"tile": [128, 256], "act": "swiglu"})


class Compiler:
    """Writes an object and counts how often it was asked to."""

    def __init__(self, text: str = "object") -> None:
        self.calls, self.text = 0, text

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_text(self.text)


def load(path: Path) -> str:
    return path.read_text()


def test_compiles_once_and_keeps(tmp_path: Path) -> None:
    compiler, cache = Compiler(), KernelCache(tmp_path)
    assert [cache.get(KEY, compiler, load) for _ in range(3)] == ["object"] * 3
    assert compiler.calls == cache.compiles == 1
    assert KernelCache(tmp_path).get(KEY, compiler, load) == "object"
    assert compiler.calls == 1


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "glu"},
        {"arch": "sm100a"},
        {"sources": "1" * 64},
        {"versions": {"dsl": "4.8.2"}},
        {"configuration": {"tile": [128, 128], "act": "swiglu"}},
        {"configuration": {"tile": [128, 256], "act": "geglu"}},
    ],
)
def test_every_field_of_the_key_counts(tmp_path: Path, change: dict[str, Any]) -> None:
    cache = KernelCache(tmp_path)
    cache.get(KEY, Compiler("old"), load)
    assert cache.get(replace(KEY, **change), Compiler("new"), load) == "new"


def test_a_key_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        KernelCache(tmp_path).get(replace(KEY, configuration={"tile": object()}), Compiler(), load)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "garbage", "no note", "note of garbage", "note of another version"])
def test_a_damaged_entry_is_rebuilt_with_one_warning(tmp_path: Path, damage: str) -> None:
    KernelCache(tmp_path).get(KEY, Compiler("a long object"), load)
    entry, note = tmp_path / f"{KEY.digest}.o", tmp_path / f"{KEY.digest}.json"
    if damage == "truncated":
        entry.write_text("a long")
    elif damage == "garbage":
        entry.write_bytes(b"\xff\x00")
    elif damage == "no note":
        note.unlink()
    elif damage == "note of garbage":
        note.write_text("{not json")
    else:
        note.write_text(json.dumps({"format": 0}))
    cache, compiler = KernelCache(tmp_path), Compiler("rebuilt")
    with pytest.warns(CacheWarning, match="damaged") as caught:
        assert cache.get(KEY, compiler, load) == "rebuilt"
        assert cache.get(KEY, compiler, load) == "rebuilt"
    assert (compiler.calls, len(caught)) == (1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KernelCache(tmp_path).get(KEY, compiler, load) == "rebuilt"
    assert compiler.calls == 1


def test_a_failing_compile_leaves_nothing_and_propagates(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("ptxas")

    cache = KernelCache(tmp_path)
    with pytest.raises(RuntimeError, match="ptxas"):
        cache.get(KEY, fail, load)
    assert [p for p in tmp_path.iterdir() if p.suffix != ".lock"] == []
    assert cache.get(KEY, Compiler("good"), load) == "good"


def test_threads_share_one_compile(tmp_path: Path) -> None:
    cache, compiler, seen = KernelCache(tmp_path), Compiler(), []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        seen.append(cache.get(KEY, compiler, load))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (seen, compiler.calls) == (["object"] * 8, 1)


PROCESS = """
import sys, time
from pathlib import Path
from opfuse.kernels.cache import CacheKey, KernelCache
folder = Path(sys.argv[1])
def compile_to(path):
    time.sleep(0.3)
    path.write_text("object")
key = CacheKey("dglu", "sm90a", "0" * 64, {}, {})
cache = KernelCache(folder)
assert cache.get(key, compile_to, lambda p: p.read_text()) == "object"
print(cache.compiles)
"""


def test_c72_eight_processes_share_one_compile(tmp_path: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    compiles = [int(p.communicate(timeout=120)[0]) for p in running]
    assert all(p.returncode == 0 for p in running)
    assert sorted(compiles) == [0] * 7 + [1]


def test_c74_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    runs = [
        subprocess.run([sys.executable, "-c", PROCESS, str(tmp_path)], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [int(r.stdout) for r in runs] == [1, 0]


READ_ONLY = """
import os, sys, warnings
from pathlib import Path
import filelock
from opfuse.kernels.cache import CacheKey, KernelCache
os.setuid(65534)  # after the imports: the interpreter's own folder may be closed to other users
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cache = KernelCache(Path(sys.argv[1]))
    for name in ("there", "missing"):
        key = CacheKey(name, "sm90a", "0" * 64, {}, {})
        assert cache.get(key, lambda p: p.write_text("object") and None, lambda p: p.read_text()) == "object"
print(cache.compiles, [w.category.__name__ for w in caught])
"""


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="needs root, to become a user who cannot write")
def test_a_read_only_folder_serves_what_it_has_and_compiles_the_rest() -> None:
    with tempfile.TemporaryDirectory() as base:  # not tmp_path: its parents are closed to other users
        os.chmod(base, 0o755)
        folder = Path(base) / "cache"
        KernelCache(folder).get(CacheKey("there", "sm90a", "0" * 64, {}, {}), Compiler(), load)
        os.chmod(folder, 0o555)
        shown = subprocess.run([sys.executable, "-c", READ_ONLY, str(folder)], capture_output=True, text=True)
    assert shown.stdout.strip() == "1 ['CacheWarning']", shown.stderr


def test_a_folder_that_cannot_exist_warns_and_compiles(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache, compiler = KernelCache(tmp_path / "file" / "cache"), Compiler()
    with pytest.warns(CacheWarning, match="cannot be written"):
        assert cache.get(KEY, compiler, load) == "object"
    assert cache.get(KEY, compiler, load) == "object"
    assert compiler.calls == 1


def test_info_and_clear(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "absent")
    assert (cache.info().entries, cache.clear()) == (0, 0)
    cache.get(KEY, Compiler(), load)
    cache.get(replace(KEY, kernel="glu"), Compiler(), load)
    (cache.folder / f"{KEY.digest}.o").write_text("damaged")
    info = cache.info()
    assert (info.entries, info.damaged, dict(info.kernels)) == (1, 1, {"glu": 1})
    assert cache.clear() == 2
    assert (cache.info().entries, list(cache.folder.iterdir())) == (0, [])


def test_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPFUSE_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path == KernelCache().folder
    monkeypatch.delenv("OPFUSE_CACHE_DIR")
    assert default_folder().name == "opfuse"


def test_source_digest_sees_names_and_contents(tmp_path: Path) -> None:
    a, b = tmp_path / "a.py", tmp_path / "b.py"
    a.write_text("1"), b.write_text("2")
    first = source_digest([a, b])
    assert source_digest([b, a]) == first
    a.write_text("2"), b.write_text("1")
    assert source_digest([a, b]) != first
