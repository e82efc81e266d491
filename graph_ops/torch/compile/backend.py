"""`torch.compile(backend="opfuse")`, and the same rewriting as a pass of Inductor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from .rewrite import Options, Region, Rewriter

SOURCES = Path(__file__).parents[3]
PACKAGES = ("graph_ops", "fusion_rules", "kernels")


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles what Dynamo captured: GLUs beside grouped matmuls, forward and backward, as operation graphs; the rest
    by Inductor or eager. `options`: see Options; `mode` is Inductor's. Raises GraphNotSupportedError.

    Rounding is as torch.compile's own backend treats it: what is fused rounds what it stores, not what it keeps in
    registers, unless `torch._inductor.config.emulate_precision_casts` (or `fuse_rounding=False`) asks for eager's
    roundings; bf16 GLUs are then left alone. The importer says which roundings may go, `explain` which did.
    """
    return compile_with(Rewriter(Options.of(options)), gm, example_inputs, mode)


def compile_with(
    rewriter: Rewriter,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None = None,
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """As `backend`, by a rewriter whose reports the caller wants. `decompositions`: ops that are written out before,
    where the rest is eager; Inductor has its own."""
    if rewriter.options.rest == "eager":
        from ...ir.errors import GraphNotSupportedError

        if mode is not None:
            raise GraphNotSupportedError("OPTION", asked=f"mode {mode!r}", seen="rest='eager'", required="no mode",
                                         hint="modes are Inductor's")  # fmt: skip

        def run(part: str, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if part == "inference":
                rewriter.prepare(graph_module.graph)
            rewriter(graph_module.graph, "backward" if part == "backward" else "forward")
            graph_module.recompile()
            return _boxed(graph_module)

        def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            rewriter.prepare(joint.graph)
            joint.recompile()
            return min_cut_rematerialization_partition(joint, *args, **kwargs)

        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=functools.partial(run, "forward"),
            bw_compiler=functools.partial(run, "backward"),
            inference_compiler=functools.partial(run, "inference"),
            partition_fn=partition,
            decompositions=decompositions,
        )(gm, example_inputs)
        return compiled

    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = dict(list_mode_options(mode)) if mode is not None else {}
    patches.update(rewriter.options.inductor)
    for name, own in (("joint_custom_pre_pass", OpfuseJointPass(rewriter=rewriter)),
                      ("post_grad_custom_pre_pass", OpfusePass(rewriter=rewriter))):  # fmt: skip
        others = patches.get(name, getattr(config, name))
        patches[name] = own if others is None else _Passes(others, own)
    found: Any = compile_fx(gm, list(example_inputs), config_patches=patches)
    return found  # type: ignore[no-any-return]


def _boxed(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """The module as AOTAutograd calls it: one list of arguments, emptied as they are taken over."""

    def call(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()
        return graph_module(*given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


class OpfusePass(CustomGraphPass):
    """A pass for Inductor's post-grad graphs: `torch._inductor.config.post_grad_custom_pre_pass = OpfusePass(...)`.

    Takes the options of the backend but `rest`. `regions` has what was found in the graphs of this process; a compiled
    graph that Inductor loads from its cache is not looked at again.
    """

    def __init__(self, *, rewriter: Rewriter | None = None, **options: Any) -> None:
        self._rewriter = rewriter if rewriter is not None else Rewriter(Options.of(options))

    @property
    def regions(self) -> list[Region]:
        """Reports of every region so far."""
        return self._rewriter.regions

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites the graph in place."""
        backward = any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes)
        self._rewriter(graph, "backward" if backward else "forward")

    def uuid(self) -> Any:
        """Changes with the options, with what the device is, and with any source that decides what fuses."""
        options = self._rewriter.options
        return (source_hash(), repr(options), options.fuses_rounding, _here())


class OpfuseJointPass(OpfusePass):
    """What precedes OpfusePass on joint graphs, with the same options: `config.joint_custom_pre_pass`. Without it, gate
    and up from two weights are not merged."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites the graph in place."""
        self._rewriter.prepare(graph)


class _Passes(CustomGraphPass):
    """The user's own pass, then ours."""

    def __init__(self, first: Any, second: OpfusePass) -> None:
        self.passes = (*(first if isinstance(first, (list, tuple)) else (first,)), second)

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        found = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.passes]
        return None if None in found else tuple(found)


@functools.lru_cache(maxsize=1)
def source_hash() -> bytes:
    """A hash of this library's sources."""
    files = sorted(str(p) for package in PACKAGES for p in (SOURCES / package).rglob("*.py"))
    found: bytes = get_hash_for_files(tuple(files))
    return found


def _here() -> str:
    return ", ".join(
        str(torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())
    ) or "cpu"  # fmt: skip


__all__ = ["OpfuseJointPass", "OpfusePass", "backend", "compile_with"]
