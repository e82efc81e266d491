"""Compiled kernels on disk, safe against crashes and concurrent processes.

An entry is two files named by the sha256 of its key: the object and, written after it, a JSON note with the key's
fields and the object's own sha256. A note that is missing or does not fit means that the entry is damaged; it is built
again. Files appear by rename, one lock file a key keeps two processes from building the same entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

Loaded = TypeVar("Loaded")

ENVIRONMENT_VARIABLE = "OPFUSE_CACHE_DIR"
BUILDING = ".building-"
COMPILERS = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings")  # of the kernels under sm90
LOCK_TIMEOUT_SECONDS = 600.0  # a compile takes seconds; a lock held this long belongs to a process that hangs


class CacheWarning(UserWarning):
    """The cache could not do its work and did without: a damaged entry, or a folder that cannot be written."""


@dataclass(frozen=True)
class CacheKey:
    """What makes two compiled kernels the same.

    `sources` is `source_digest` of the kernel's own files, `versions` those of the compilers, `configuration` every
    choice that was compiled in, as JSON values. Raises TypeError for anything else: a key that cannot describe the
    kernel must not find one.
    """

    kernel: str
    arch: str
    sources: str
    versions: Mapping[str, str]
    configuration: Mapping[str, Any]

    def fields(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "sources": self.sources,
            "versions": dict(self.versions),
            "configuration": dict(self.configuration),
        }

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.fields(), sort_keys=True).encode()).hexdigest()


def source_digest(files: Iterable[Path]) -> str:
    """sha256 over the names and contents of `files`, in name order."""
    state = hashlib.sha256()
    for file in sorted(files):
        state.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        state.update(file.read_bytes())
    return state.hexdigest()


def compiler_versions() -> dict[str, str]:
    """The versions of COMPILERS, for a key. Raises ImportError where one is not installed."""
    return {name: metadata.version(name) for name in COMPILERS}


def default_folder() -> Path:
    """$OPFUSE_CACHE_DIR, or `opfuse` in the user's cache folder. Needs platformdirs unless the variable is set."""
    if chosen := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("opfuse"))


@dataclass(frozen=True)
class CacheInfo:
    """What lies in a cache folder. `damaged` counts entries that would be built again."""

    folder: Path
    entries: int
    damaged: int
    bytes: int
    kernels: Mapping[str, int]


class KernelCache:
    """The compiled kernels of one folder, and those that this process has loaded.

    Owns the process-wide table of loaded kernels; safe to use from several threads. `compiles` counts what this
    object built.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder
        self.compiles = 0
        self._loaded: dict[str, Any] = {}
        self._guard = threading.Lock()
        self._building: dict[str, threading.Lock] = {}

    def get(self, key: CacheKey, compile_to: Callable[[Path], None], load: Callable[[Path], Loaded]) -> Loaded:
        """The kernel of `key`: loaded before, else from disk, else compiled by `compile_to(path)` and kept.

        Whatever `compile_to` and `load` raise propagates, and nothing is kept then.
        """
        digest = key.digest
        with self._guard:
            if digest in self._loaded:
                known: Loaded = self._loaded[digest]
                return known
            building = self._building.setdefault(digest, threading.Lock())
        with building:
            if digest not in self._loaded:
                self._loaded[digest] = self._from_disk(key, digest, compile_to, load)
        built: Loaded = self._loaded[digest]
        return built

    def _from_disk(
        self, key: CacheKey, digest: str, compile_to: Callable[[Path], None], load: Callable[[Path], Loaded]
    ) -> Loaded:
        found = self.folder / f"{digest}.o"
        if self._is_whole(digest):
            return load(found)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            warnings.warn(
                f"kernel cache {self.folder} cannot be written ({error}); compiling without it",
                CacheWarning,
                stacklevel=4,
            )
            with tempfile.TemporaryDirectory() as scratch:
                self._compile(compile_to, Path(scratch) / f"{digest}.o")
                return load(Path(scratch) / f"{digest}.o")
        from filelock import FileLock

        with FileLock(self.folder / f"{digest}.lock", timeout=LOCK_TIMEOUT_SECONDS):
            if not self._is_whole(digest):
                if found.exists():
                    warnings.warn(
                        f"kernel cache entry {digest[:12]} is damaged; compiling again", CacheWarning, stacklevel=4
                    )
                self._store(key, digest, compile_to)
        return load(found)

    def _compile(self, compile_to: Callable[[Path], None], path: Path) -> None:
        self.compiles += 1
        compile_to(path)

    def _store(self, key: CacheKey, digest: str, compile_to: Callable[[Path], None]) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=BUILDING) as scratch:
            built = Path(scratch) / f"{digest}.o"
            self._compile(compile_to, built)
            note = Path(scratch) / f"{digest}.json"
            note.write_text(json.dumps({**key.fields(), "object_sha256": _sha256(built)}, indent=1, sort_keys=True))
            os.replace(built, self.folder / built.name)
            os.replace(note, self.folder / note.name)

    def _is_whole(self, digest: str) -> bool:
        try:
            note = json.loads((self.folder / f"{digest}.json").read_text())
            return bool(note["object_sha256"] == _sha256(self.folder / f"{digest}.o"))
        except (OSError, ValueError, KeyError, TypeError):
            return False  # absent, half-written or garbage: all mean "build it"

    def info(self) -> CacheInfo:
        """What the folder holds; an absent folder holds nothing."""
        objects = sorted(self.folder.glob("*.o")) if self.folder.is_dir() else []
        whole = [o for o in objects if self._is_whole(o.stem)]
        kernels: dict[str, int] = {}
        for path in whole:
            name = json.loads(path.with_suffix(".json").read_text())["kernel"]
            kernels[name] = kernels.get(name, 0) + 1
        return CacheInfo(
            self.folder, len(whole), len(objects) - len(whole), sum(o.stat().st_size for o in objects), kernels
        )

    def clear(self) -> int:
        """Removes every entry from disk, and what builds that died left; kernels that are loaded stay usable.

        Returns how many objects went. Raises OSError where the folder cannot be written.
        """
        removed = 0
        for path in sorted(self.folder.glob("*")) if self.folder.is_dir() else []:
            if path.suffix in (".o", ".json", ".lock"):
                removed += path.suffix == ".o"
                path.unlink(missing_ok=True)
            elif path.name.startswith(BUILDING) and time.time() - path.stat().st_mtime > LOCK_TIMEOUT_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        return removed


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
