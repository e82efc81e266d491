"""The command `opfuse`: explain a graph for any arch, list what is supported, tell what this machine has and keeps.

Exit codes: 0 done, 2 the question could not be answered (a usage error, a missing file, a graph that is not well
formed), 3 with `--require-fused` where something that a rule begins at stays unfused.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernels.arch import ARCHES, parse_arch
from . import __version__
from .ir.errors import GraphError, OpfuseError, StateError
from .ir.graph import OpGraph
from .ir.serialize import from_dict

if TYPE_CHECKING:
    from ..fusion_rules.support import SupportRow
    from ..kernels.cache import KernelCache

DONE, NOT_ANSWERED, UNFUSED = 0, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (those of the process by default) and returns its exit code."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except OpfuseError as error:
        print(f"opfuse: {error}", file=sys.stderr)
        return NOT_ANSWERED
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="opfuse", description="Operation graphs, and what of them fuses.")
    parser.add_argument("--version", action="version", version=f"opfuse {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    explain = commands.add_parser(
        "explain", help="how a graph would run on an arch, and why the rest is not fused", description=_explain.__doc__
    )
    explain.add_argument(
        "graph", metavar="FILE.json|MODULE:FUNCTION", help="graph JSON, or a function that returns a Graph"
    )
    explain.add_argument("--arch", default="sm90", help=f"what to plan for; needs no GPU ({', '.join(ARCHES)})")
    explain.add_argument("--format", choices=("text", "json", "mermaid"), default="text")
    explain.add_argument("--disable", action="append", default=[], metavar="ID", help="a rule or kernel not to use")
    explain.add_argument("--require-fused", action="store_true",
                         help=f"exit {UNFUSED} where a node at which a rule begins stays unfused")  # fmt: skip
    explain.set_defaults(command=_explain)

    rules = commands.add_parser("rules", help="the support table", description=_rules.__doc__)
    rules.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    rules.set_defaults(command=_rules)

    env = commands.add_parser("env", help="versions, devices, cache", description=_env.__doc__)
    env.add_argument("--json", action="store_true", help="as JSON")
    env.set_defaults(command=_env)

    cache = commands.add_parser("cache", help="the compiled kernels on disk", description=_cache_info.__doc__)
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    info = actions.add_parser("info", help="what the folder holds", description=_cache_info.__doc__)
    info.add_argument("--json", action="store_true", help="as JSON")
    info.set_defaults(command=_cache_info)
    clear = actions.add_parser("clear", help="remove every compiled kernel", description=_cache_clear.__doc__)
    clear.set_defaults(command=_cache_clear)
    return parser


def _explain(options: argparse.Namespace) -> int:
    """Plans the graph for an arch, which need not be here, and explains the plan."""
    from .explain import explain
    from .planner import left_unfused, make_plan

    plan = make_plan(load(options.graph), parse_arch(options.arch), disable=options.disable)
    told = explain(plan)
    render: dict[str, Callable[[], str]] = {"text": told.__str__, "json": told.to_json, "mermaid": told.to_mermaid}
    print(render[options.format]().rstrip("\n"))
    left = left_unfused(plan)
    if options.require_fused and left:
        names = ", ".join(node.name for node, _ in left)
        print(f"opfuse: left unfused on {plan.arch}: {names}", file=sys.stderr)
        return UNFUSED
    return DONE


def _rules(options: argparse.Namespace) -> int:
    """Every fusion with every kernel that serves it, and what each requires; as Markdown also what runs where."""
    from ..fusion_rules.support import support_table
    from .support_matrix import markdown, support_matrix
    from .support_text import FORMATS

    rows: tuple[SupportRow, ...] = support_table()
    print(FORMATS[options.format](rows).rstrip("\n"))
    if options.format == "markdown":
        print("\n" + markdown(support_matrix()))
    return DONE


def _env(options: argparse.Namespace) -> int:
    """Versions, devices, environment variables and the kernel cache of this machine."""
    from .environment import collect, render

    facts = collect()
    print(json.dumps(facts, indent=1) if options.json else render(facts))
    return DONE


def _cache_info(options: argparse.Namespace) -> int:
    """The folder of compiled kernels, how many of which kernel it holds, and how many would be built again."""
    info = _kernel_cache().info()
    facts = {"folder": str(info.folder), "entries": info.entries, "damaged": info.damaged, "bytes": info.bytes,
             "kernels": dict(info.kernels)}  # fmt: skip
    if options.json:
        print(json.dumps(facts, indent=1))
        return DONE
    print(f"{info.folder}: {info.entries} compiled kernels, {info.bytes / 2**20:.1f} MiB")
    for kernel, count in sorted(info.kernels.items()):
        print(f"  {kernel}: {count}")
    if info.damaged:
        print(f"  damaged, to be built again: {info.damaged}")
    return DONE


def _cache_clear(options: argparse.Namespace) -> int:
    """Removes every compiled kernel from the folder; each is built again when it is next needed."""
    cache = _kernel_cache()
    try:
        removed = cache.clear()
    except OSError as error:
        raise StateError("CACHE_FOLDER", asked="opfuse cache clear", seen=f"{error.filename}: {error.strerror}",
                         required="a folder that may be written", where=str(cache.folder)) from error  # fmt: skip
    print(f"{cache.folder}: {removed} compiled kernels removed")
    return DONE


def _kernel_cache() -> KernelCache:
    from ..kernels.cache import ENVIRONMENT_VARIABLE, KernelCache

    try:
        return KernelCache()
    except ImportError as error:
        raise StateError("CACHE_FOLDER", asked="the folder of compiled kernels", seen=str(error),
                         required="the extra `cuda`, which says where caches lie",
                         hint=f"or {ENVIRONMENT_VARIABLE}=FOLDER") from error  # fmt: skip


def load(source: str) -> OpGraph:
    """The graph in a JSON file, or of the Graph that `module:function` returns.

    Raises GraphError: SOURCE_FILE for a file that cannot be read, JSON for one that is not JSON, SOURCE_MODULE for a
    module that cannot be found, SOURCE_FUNCTION for a function that is missing or returns something else.
    """
    module, _, function = source.rpartition(":")
    if all(part.isidentifier() for part in (*module.split("."), function)) and not Path(source).exists():
        return _call(module, function)
    try:
        data = json.loads(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise GraphError("SOURCE_FILE", asked=f"graph {source!r}", seen=error.strerror,
                         required="a readable JSON file, or module:function") from error  # fmt: skip
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GraphError("JSON", asked=f"graph {source!r}", seen=str(error), required="JSON text") from error
    return from_dict(data)


def _call(module: str, function: str) -> OpGraph:
    from .builder import GraphBuilder

    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules of the folder that the user stands in
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise GraphError("SOURCE_MODULE", asked=f"module {module!r}", seen=str(error), required="an importable module",
                         hint="run from the folder that holds it, or install it") from error  # fmt: skip
    make = getattr(holder, function, None)
    if not callable(make):
        raise GraphError("SOURCE_FUNCTION", asked=f"{module}:{function}", seen=repr(make),
                         required="a function without arguments that returns a Graph")  # fmt: skip
    made = make()
    if not isinstance(made, GraphBuilder):
        raise GraphError("SOURCE_FUNCTION", asked=f"{module}:{function}", seen=f"it returned {type(made).__name__}",
                         required="a function that returns a Graph")  # fmt: skip
    return made.operation_graph()


if __name__ == "__main__":
    sys.exit(main())
