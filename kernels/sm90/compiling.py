"""Compiled functions of the kernels here: made for sm_90a, kept by configuration, and as bytes for a cache on disk."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ENTRY = "opfuse_sm90_dglu"  # symbol of an exported object, whichever kernel's: those in caches on disk have it


class UnsupportedConfig(ValueError):
    """A configuration that its kernel's `illegal` declines, with every reason, or the compiler, with what it said."""


class Functions:
    """The functions of one kernel's configurations in this process: compiled at most once, or installed.

    `entry`: the module of this package whose `compile_entry` compiles one; `illegal`: every reason why it cannot be.
    """

    def __init__(self, entry: str, illegal: Callable[[Any], Sequence[str]]) -> None:
        self._entry, self._illegal = entry, illegal
        self._lock = threading.Lock()
        self._functions: dict[Any, Callable] = {}

    def compile(self, config: Any) -> Callable:
        """Compiles a configuration for sm_90a, which needs no GPU, and keeps nothing.

        Raises UnsupportedConfig with every reason where the configuration is not legal, or where the compiler fails.
        """
        if reasons := self._illegal(config):
            raise UnsupportedConfig("; ".join(reasons))
        os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
        from cutlass.base_dsl.common import DSLBaseError

        module = importlib.import_module(f".{self._entry}", __package__)
        try:
            function: Callable = module.compile_entry(config)
        except DSLBaseError as error:
            plain = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
            raise UnsupportedConfig(f"the compiler fails: {plain}") from error
        return function

    def install(self, config: Any, function: Callable) -> None:
        """Makes `of` return a function that was compiled or loaded elsewhere."""
        with self._lock:
            self._functions[config] = function

    def of(self, config: Any) -> Callable:
        """The function of a configuration. Raises as `compile`."""
        function = self._functions.get(config)
        if function is None:
            with self._lock:
                function = self._functions.get(config)
                if function is None:
                    function = self._functions[config] = self.compile(config)
        return function


def export_object(function: Any) -> bytes:
    """A compiled function as the bytes of a relocatable object."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.o")
        function.export_to_c(str(path), function_name=ENTRY)
        return path.read_bytes()


def load_object(data: bytes) -> Callable:
    """The function of an exported object; needs the DSL's runtime library, not its compiler."""
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.o")
        path.write_bytes(data)
        return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), ENTRY)
