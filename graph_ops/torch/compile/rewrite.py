"""Puts operation graphs in place of regions of an FX graph, and reports every region that was looked at."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.config
from torch import fx

from ....fusion_rules import raise_graph
from ....fusion_rules.verdict import Raising
from ....kernels.arch import Arch
from ....kernels.registry import KERNELS
from ...ir.errors import GraphNotSupportedError, OpfuseError
from ...ir.graph import OpGraph
from ...ir.serialize import to_json
from ...log import log_fallbacks
from ...plan import Plan
from ...planner import make_plan, require_fused
from ...target import arch_of_device, as_arch
from . import region_op  # noqa: F401  registers torch.ops.opfuse.run_graph
from .importer import Imported, Importer
from .lone import RULES as LONE_RULES
from .lone import lone_products, measured_by_inductor, with_reader
from .merge import Merge, merge_gate_up
from .regions import (
    clone_views,
    device_of,
    drop_detaches,
    drop_whole_slices,
    find_regions,
    framework_seconds,
    is_product,
    joins_of,
    outputs_of,
    recompute_inner_values,
    share_conversions,
    sort_topologically,
)
from .spellings import GROUPED_MM

if TYPE_CHECKING:
    from ...explain import Explanation

CHOICES = {
    "replace": ("fused", "raised"),
    "rest": ("inductor", "eager"),
    "save": ("activation", "preactivation"),
    "fuse_rounding": (None, True, False),
    "strict": (False, True),
}
"""What an option may be, its default first."""
FORWARD_RULE, BACKWARD_RULE = "grouped_gemm_glu", "grouped_gemm_dglu"


@dataclass(frozen=True)
class Options:
    """What `torch.compile(backend="opfuse", options={...})` takes, beside the names of Inductor's own configuration.

    `fuse_rounding`: whether values inside a region stay float32 where eager rounds them (see importer); None: as
    Inductor treats its own fused kernels, which keep eager's roundings only with `emulate_precision_casts`. `replace`:
    "fused" puts in the regions for which a kernel of the device fuses something and by estimate wins, "raised" every
    region in which a GLU is found. In either case a grouped matmul beside no GLU goes to a kernel that is estimated to
    win, unless Inductor is to measure its own (max_autotune). `rest`: who compiles all else, "inductor" or "eager".
    `save`: what the backward finds of a GLU's result, "activation" itself or "preactivation", from which it is computed
    again beside the gradient. `disable`: ids of rules and kernels not to use. `strict`: an error where a region is
    found and something of it that could fuse does not. `arch`: what reports are planned for; what runs is planned for
    the device. `inductor`: settings of Inductor, by name.
    """

    fuse_rounding: bool | None = None
    replace: str = "fused"
    rest: str = "inductor"
    save: str = "activation"
    disable: tuple[str, ...] = ()
    strict: bool = False
    arch: str | None = None
    inductor: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Options:
        """Options from a mapping. Raises GraphNotSupportedError for an unknown name or value."""
        own = {f for f in Options.__dataclass_fields__ if f != "inductor"}
        given = dict(given or {})
        others = {name.replace("-", "_"): given.pop(name) for name in sorted(set(given) - own)}
        known = torch._inductor.config.get_config_copy() if others else {}
        if unknown := sorted(set(others) - set(known)):
            required = f"options of {sorted(own)}, or of torch._inductor.config"
            raise GraphNotSupportedError("OPTION", asked=f"options {unknown}", required=required)
        for name, allowed in CHOICES.items():
            value = given.get(name, allowed[0])
            if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in allowed):
                raise GraphNotSupportedError("OPTION", asked=f"option {name}={value!r}",
                                             required=f"one of {list(allowed)}")  # fmt: skip
        if isinstance(given.get("disable"), str):
            raise GraphNotSupportedError("OPTION", asked=f"option disable={given['disable']!r}", seen="one text",
                                         required="a sequence of ids of rules and kernels")  # fmt: skip
        given["disable"] = tuple(given.get("disable", ()))
        options = replace(Options(), **given, inductor=tuple(others.items()))
        if options.arch is not None:
            as_arch(options.arch)  # raises for one that no arch has
        if options.rest == "eager" and others:
            raise GraphNotSupportedError("OPTION", asked=f"options {sorted(others)}", seen="rest='eager'",
                                         required="rest='inductor'", hint="they are Inductor's")  # fmt: skip
        return options

    @property
    def fuses_rounding(self) -> bool:
        """`fuse_rounding`, or what Inductor's settings say."""
        if self.fuse_rounding is not None:
            return self.fuse_rounding
        return not dict(self.inductor).get("emulate_precision_casts", torch._inductor.config.emulate_precision_casts)


@dataclass(frozen=True)
class Region:
    """One region of an FX graph: what it was read as, and what became of it.

    `graph` is the operation graph (None where it could not be imported, and `reason` says why), `plan` its plan for the
    arch asked about, `raisings` the GLUs found in it. `replaced`: an operation graph runs in its place. `unrounded`:
    nodes that eager rounds and `graph` keeps in float32, with the dtype and the place in the user's code.
    """

    part: str
    nodes: tuple[str, ...]
    graph: OpGraph | None = None
    plan: Plan | None = None
    raisings: tuple[Raising, ...] = ()
    replaced: bool = False
    reason: str = ""
    unrounded: tuple[str, ...] = ()

    @property
    def explanation(self) -> Explanation | None:
        """Why the plan is as it is."""
        from ...explain import explain

        return None if self.plan is None else explain(self.plan)


@dataclass
class Rewriter:
    """Rewrites FX graphs in place. `regions` has the reports of every graph that it was given, in order, and `merges`
    the gates and ups of two weights that were brought together. `one_pass`: whether to count elementwise ops that are
    left alone as one kernel, as Inductor makes of them; None: as `options.rest` says."""

    options: Options
    one_pass: bool | None = None
    regions: list[Region] = field(default_factory=list)
    merges: list[Merge] = field(default_factory=list)

    def prepare(self, graph: fx.Graph) -> None:
        """Before forward and backward are cut apart, where a kernel could use it: brings gate and up of two weights
        together, if roundings may fuse, and keeps what lies inside a GLU from being saved."""
        arch = self._arch_of(graph)
        forced = self.options.replace == "raised"
        if arch is None or not (forced or any(map(partial(self._has_kernels, arch), (FORWARD_RULE, BACKWARD_RULE)))):
            return
        drop_detaches(graph)
        drop_whole_slices(graph)
        share_conversions(graph)
        recompute_inner_values(graph, activations=self.options.save == "preactivation")
        if not self.options.fuses_rounding:
            return
        fuses_forward = self._has_kernels(arch, FORWARD_RULE)
        for region in list(find_regions(graph)):
            reading = self._reading(region, "joint").best
            if reading is None:
                continue
            plan = make_plan(reading[0].graph, arch, disable=self.options.disable)
            if forced or any(s.rule in (FORWARD_RULE, BACKWARD_RULE) for s in plan.fused_steps):
                merge = merge_gate_up(graph, region, fuses_forward=fuses_forward,
                                      fuses_apart=partial(self._fuses_forward, arch))  # fmt: skip
                self.merges += [merge] if merge is not None else []

    def _fuses_forward(self, arch: Arch, graph: OpGraph) -> bool:
        """Whether one kernel runs all of a GLU's forward."""
        plan = make_plan(graph, arch, disable=self.options.disable)
        return len(plan.steps) == 1 and [s.rule for s in plan.fused_steps] == [FORWARD_RULE]

    def _has_kernels(self, arch: Arch, rule: str) -> bool:
        """Whether any kernel for that fusion is declared for `arch`."""
        return any(
            k.rule == rule and arch in k.arches and not {k.id, k.rule} & set(self.options.disable) for k in KERNELS
        )

    def _arch_of(self, graph: fx.Graph) -> Arch | None:
        for node in graph.nodes:
            if is_product(node):
                return self._arch((node,))
        return None

    def __call__(self, graph: fx.Graph, part: str) -> None:
        """Rewrites one graph; `part` is what reports call it ("forward", "backward")."""
        changed = False
        drop_whole_slices(graph)
        regions = list(find_regions(graph))
        taken = {node for region in regions for node in region}
        for region in regions:
            report, imported, region = self._with_reader(graph, region, taken, part) or (
                *self._read(region, part),
                region,
            )
            if imported is not None:
                against = self._why_not_replaced(report, region)
                if not against:
                    _put_in_place(graph, region, imported, self.options.disable)
                    changed = True
                report = replace(report, replaced=not against, reason=against)
            self.regions.append(report)
        changed = self._replace_lone(graph, part) or changed
        if changed:
            sort_topologically(graph)
            graph.lint()

    def _lone_arch(self, nodes: tuple[fx.Node, ...]) -> Arch | None:
        """The arch of the device, where it has kernels for grouped matmuls beside no GLU, and they are ours to take."""
        here = arch_of_device(device_of(nodes))
        left = self.options.rest == "inductor" and measured_by_inductor()
        return here if not left and any(map(partial(self._has_kernels, here), LONE_RULES)) else None

    def _with_reader(
        self, graph: fx.Graph, region: tuple[fx.Node, ...], taken: set[fx.Node], part: str
    ) -> tuple[Region, Imported, tuple[fx.Node, ...]] | None:
        """The region of a GLU's forward together with the grouped matmul that reads it, where kernels run all of it."""
        here = self._lone_arch(region)
        whole = with_reader(graph, region, taken) if here is not None else None
        if here is None or whole is None:
            return None
        report, imported = self._read(whole, part)
        if (
            imported is None
            or any(r.rule != "raise_glu" for r in report.raisings)
            or self._why_not_replaced(report, whole)
        ):
            return None
        if make_plan(imported.graph, here, disable=self.options.disable).unfused_steps:
            return None
        return report, imported, whole

    def _replace_lone(self, graph: fx.Graph, part: str) -> bool:
        """Puts kernels in place of grouped matmuls beside no GLU, where the device has some that win; whether any.
        Those are reported, the others are not."""
        first = next((n for n in graph.nodes if n.target is GROUPED_MM), None)
        here = None if first is None else self._lone_arch((first,))
        if here is None:
            return False
        before = len(self.regions)
        planned = lone_products(graph, part, partial(make_plan, arch=here, disable=self.options.disable))
        for nodes, imported, plan in planned:
            _put_in_place(graph, nodes, imported, self.options.disable)
            self.regions.append(Region(part, tuple(n.name for n in nodes), imported.graph, plan, replaced=True))
        return len(self.regions) > before

    def _read(self, region: tuple[fx.Node, ...], part: str) -> tuple[Region, Imported | None]:
        names = tuple(n.name for n in region)
        reading = self._reading(region, part)
        if reading.best is not None:
            found, raisings = reading.best
            plan = self._plan(found.graph, self._arch(region))
            return Region(part, names, found.graph, plan, raisings, unrounded=found.unrounded), found
        if reading.nearest is not None:
            plan = self._plan(reading.nearest.graph, self._arch(region))
            return Region(part, names, reading.nearest.graph, plan, reason=self._why_not_raised(region, part)), None
        declined = reading.declined
        return Region(
            part, names, reason=str(declined) if declined is not None else "no GLU is beside the matmul"
        ), None

    def _why_not_raised(self, region: tuple[fx.Node, ...], part: str) -> str:
        if not self.options.fuses_rounding:
            loose = Rewriter(replace(self.options, fuse_rounding=True))._reading(region, part).best
            if loose is not None:
                return f"eager's roundings inside its GLU are kept (fuse_rounding): {', '.join(loose[0].unrounded)}"
        return "its GLU does not raise to one node"

    def _reading(self, region: tuple[fx.Node, ...], part: str) -> _Reading:
        outputs = outputs_of(region)
        declined: OpfuseError | None = None
        nearest: Imported | None = None
        best: tuple[Imported, tuple[Raising, ...]] | None = None
        for join in (None, *joins_of(region, outputs)):
            importer = Importer(region, outputs, fuse_rounding=self.options.fuses_rounding, join=join,
                                name=f"{part}.{region[0].name}")  # fmt: skip
            try:
                found = importer.build()
            except OpfuseError as error:  # another reading may do; if none does, the first says why
                declined = declined or error
                continue
            raisings = raise_graph(found.graph, self.options.disable)[1]
            if raisings and (best is None or _worth(raisings) > _worth(best[1])):
                best = found, raisings
            if best is not None and (join is None or _worth(best[1])):
                break
            if any(node.op == "split_glu" for node in found.graph.nodes):
                nearest = nearest or found
        return _Reading(best, nearest, declined)

    def _arch(self, region: tuple[fx.Node, ...]) -> Arch:
        return as_arch(self.options.arch) if self.options.arch else arch_of_device(device_of(region))

    def _plan(self, graph: OpGraph, arch: Arch) -> Plan:
        plan = make_plan(graph, arch, disable=self.options.disable)
        log_fallbacks(plan)
        if self.options.strict:
            require_fused(plan)
        return plan

    def _why_not_replaced(self, report: Region, region: tuple[fx.Node, ...]) -> str:
        """Why not to put the operation graph in, "" where it is to be: with `replace="fused"` where it fuses on the
        device and that is estimated to win."""
        if self.options.replace == "raised":
            return ""
        assert report.graph is not None and report.plan is not None
        here = arch_of_device(device_of(region))
        plan = report.plan if report.plan.arch == here.name else (
            make_plan(report.graph, here, disable=self.options.disable))  # fmt: skip
        if not plan.fusions:
            return f"nothing of it fuses on {here.name}"
        one_pass = self.options.rest == "inductor" if self.one_pass is None else self.one_pass
        rival = framework_seconds(region, here, one_pass=one_pass)
        if plan.estimate.seconds > rival:
            return f"estimated at {1e6 * plan.estimate.seconds:.1f} us, as torch runs it at {1e6 * rival:.1f} us"
        return ""


@dataclass(frozen=True)
class _Reading:
    """A region as an operation graph: the best import in which a GLU is found, else the first that has halves of a
    tensor, and why others were declined."""

    best: tuple[Imported, tuple[Raising, ...]] | None
    nearest: Imported | None
    declined: OpfuseError | None


def _worth(raisings: tuple[Raising, ...]) -> int:
    """How many derivatives of a GLU a reading found: those have the kernels, and a forward can be read into them."""
    return sum(r.rule == "raise_glu_backward" for r in raisings)


def _put_in_place(graph: fx.Graph, region: tuple[fx.Node, ...], imported: Imported, disable: tuple[str, ...]) -> None:
    """`opfuse::run_graph` instead of the region's nodes. The order of nodes may then want sorting."""
    clone_views(graph, region)
    members = set(region)
    places = {node: place for place, node in enumerate(graph.nodes)}
    last = max(imported.inputs, key=places.__getitem__)
    definition = to_json(_anonymous(imported.graph), indent=None)
    after = last if last.op != "placeholder" else [n for n in graph.nodes if n.op == "placeholder"][-1]
    # Products alone keep the place of the first, which says when its operands may go.
    alone = all(node.target is GROUPED_MM for node in region)
    with graph.inserting_before(region[0]) if alone else graph.inserting_after(after):
        call = graph.call_function(
            torch.ops.opfuse.run_graph.default, (list(imported.inputs), definition, list(disable))
        )
    call.meta["val"] = [node.meta["val"] for node in imported.outputs]
    for number, node in enumerate(imported.outputs):
        with graph.inserting_after(call):
            out = graph.call_function(operator.getitem, (call, number))
        out.meta = dict(node.meta)
        for reader in [u for u in node.users if u not in members]:
            reader.replace_input_with(node, out)
    for node in reversed(region):
        if not node.users:
            graph.erase_node(node)


def _anonymous(graph: OpGraph) -> OpGraph:
    """Without the names and places of one layer, so that equal layers are one graph, planned and built once."""
    own = {t.uid for t in (*graph.graph_inputs, *graph.graph_outputs)}  # "in<i>" and "out<i>", which the op reads
    tensors = {u: replace(t, location=None, name=t.name if u in own else f"t{u}") for u, t in graph.tensors.items()}
    nodes = tuple(replace(n, location=None, name=f"{n.op}_{n.index}") for n in graph.nodes)
    return replace(graph, name="region", tensors=tensors, nodes=nodes)


__all__ = ["Options", "Region", "Rewriter"]
