"""Graph: declare, plan and run, with cuDNN's verbs in cuDNN's order."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from logging import DEBUG
from typing import TYPE_CHECKING, Any

from ..fusion_rules import why_not
from ..fusion_rules.verdict import Verdict
from ..kernels.arch import ARCHES, Arch
from ..kernels.cost import nominal_bindings
from ..kernels.registry import KERNELS, KernelEntry
from . import content
from .builder import GraphBuilder, Tensor
from .ir.dtypes import DataType
from .ir.errors import GraphNotSupportedError, StateError
from .ir.graph import OpGraph
from .ir.serialize import from_dict, to_dict
from .ir.verify import verify
from .log import execute_log, log_fallbacks, plan_log
from .outputs import Outputs
from .plan import Plan
from .plan_set import HEURISTICS, ITS_OWN, PlanSet
from .planner import make_plan, require_fused
from .rebuild import rebuild
from .stages import Stage, require_stage
from .target import ArchLike, DeviceLike, Target, as_arch, device_of_arch, resolve
from .workspace import workspace_bindings

if TYPE_CHECKING:
    import torch

    from .buffers import Binder
    from .cudnn_graph import CudnnGraph
    from .explain import Explanation
    from .tuning import TuningRecord

POLICIES = ("HEURISTICS_CHOICE", "ALL")
"""Policies of build_plans. HEURISTICS_CHOICE: the first plan that builds. ALL: all, measured; the fastest wins."""


def _names(given: Sequence[Any]) -> list[str]:
    """Names of modes or policies, which cuDNN has as enums."""
    return [str(getattr(one, "name", one)).upper() for one in given]


class Graph(GraphBuilder):
    """An operation graph that can be planned and run.

    Data types and `deterministic` as in GraphBuilder. `device`: where to run ("cpu", "cuda:1"; by default the GPU at
    hand, else the CPU). `arch`: what to plan for ("sm90", ...), by default that of the device. `fused=False` runs each
    node by itself: the oracle. `strict=True` makes a node that could fuse and does not an error. `disable`: ids of
    rules and kernels not to use. `kernels`: those to choose from. `build` takes most of these too, and then they count.
    """

    def __init__(
        self,
        *,
        name: str = "graph",
        io_data_type: DataType = DataType.BFLOAT16,
        intermediate_data_type: DataType = DataType.FLOAT,
        compute_data_type: DataType = DataType.FLOAT,
        deterministic: bool = False,
        device: DeviceLike | None = None,
        arch: ArchLike | None = None,
        fused: bool = True,
        strict: bool = False,
        disable: Collection[str] = (),
        kernels: Sequence[KernelEntry] = KERNELS,
    ) -> None:
        super().__init__(
            name=name, io_data_type=io_data_type, intermediate_data_type=intermediate_data_type,
            compute_data_type=compute_data_type, deterministic=deterministic,
        )  # fmt: skip
        self._device, self._arch = device, arch
        self._fused, self._strict, self._disable = fused, strict, tuple(disable)
        self._kernels = tuple(kernels)
        self._stage = Stage.DECLARED
        self._lock = threading.RLock()
        self._op_graph: OpGraph | None = None
        self._plan_set: PlanSet | None = None
        self._binder: Binder | None = None

    # ------------------------------------------------------------------ cuDNN's verbs, in order

    def validate(self) -> None:
        """Infers shapes and data types and checks every rule of a well-formed graph. Raises VerificationError."""
        self._require(Stage.DECLARED, "validate")
        snapshot = self.operation_graph()
        verify(snapshot)
        self._op_graph, self._stage = snapshot, Stage.VALIDATED

    def build_operation_graph(self) -> None:
        """Freezes the graph. A change since `validate` is validated again."""
        self._require(Stage.VALIDATED, "build_operation_graph")
        snapshot = self.operation_graph()
        if snapshot != self._op_graph:
            verify(snapshot)
        self._op_graph, self._stage, self._frozen = snapshot, Stage.FROZEN, True

    def create_execution_plans(
        self,
        heuristics: Sequence[Any] = HEURISTICS,
        *,
        device: DeviceLike | None = None,
        arch: ArchLike | None = None,
        fused: bool | None = None,
        strict: bool | None = None,
        disable: Collection[str] | None = None,
    ) -> None:
        """Makes the plans that `heuristics` ask for (HEURISTICS, or cuDNN's heur_mode), best first; once a graph.

        The other options replace those given to the constructor. Logs one record for each node that could not fuse.
        Raises GraphNotSupportedError for an unknown mode or arch, or where the device is of another arch.
        """
        if self._stage >= Stage.PLANNED:
            raise StateError(
                "PLANNED_ONCE",
                asked="create_execution_plans()",
                seen="a graph that has its plans",
                required="one planning a graph",
                hint="select_plan() switches plans; declare a new graph to plan again",
            )
        self._require(Stage.FROZEN, "create_execution_plans")
        modes = _names([heuristics] if isinstance(heuristics, str) else heuristics)
        if not modes or set(modes) - set(HEURISTICS):
            raise GraphNotSupportedError("HEURISTICS", asked="create_execution_plans", seen=f"heuristics {modes}",
                                         required=f"modes of {list(HEURISTICS)}, at least one")  # fmt: skip
        found_arch, found_device = self._resolve(arch or self._arch, device or self._device)
        target = Target(
            arch=found_arch,
            device=found_device,
            fused=self._fused if fused is None else fused,
            strict=self._strict if strict is None else strict,
            disable=self._disable if disable is None else tuple(disable),
        )
        self._plan_set = PlanSet(self._snapshot(), target, modes, self._kernels)
        self._stage = Stage.PLANNED
        plan_log.info("%s: plans for %s: %s", self.name, found_arch, [p.name for p in self.plans])
        log_fallbacks(self.plans[0])

    def check_support(self) -> None:
        """Raises GraphNotSupportedError, with every reason, where no plan is left or `strict` is not met.

        Imports no kernel and touches no GPU.
        """
        self._require(Stage.PLANNED, "check_support")
        plans = self._planned("check_support")
        if not plans.open:
            raise GraphNotSupportedError("NO_PLAN", asked=f"graph {self.name}", seen="every plan is deselected",
                                         required=f"one of {[p.name for p in plans.plans]}",
                                         hint="deselect fewer engines: the unfused plan always exists")  # fmt: skip
        if plans.target.strict:
            require_fused(plans.preferred)
        self._stage = Stage.CHECKED

    def build_plans(
        self,
        policy: Any = "HEURISTICS_CHOICE",
        *,
        bindings: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    ) -> None:
        """Builds plans for the device, by a policy of POLICIES (or cuDNN's build_plan_policy).

        HEURISTICS_CHOICE builds the first plan that builds. ALL builds every plan and measures them on synthetic data
        at each of `bindings` (symbol values; nominal ones by default); execute then takes the winner for its sizes. A
        kernel whose package is missing, or that says it does not serve here, gives up its plan with a log record, or,
        under `strict` or for a selected plan, with GraphNotSupportedError; the same where no such device is here.
        """
        self._require(Stage.CHECKED, "build_plans")
        name = _names([policy])[0]
        if name not in POLICIES:
            raise GraphNotSupportedError("POLICY", asked=f"policy {policy!r}", required=f"one of {list(POLICIES)}")
        if name != "ALL" and bindings is not None:
            raise StateError(
                "BINDINGS_UNUSED", asked="build_plans(bindings=...)", seen=f"policy {name}", required="policy ALL"
            )
        from .buffers import Binder

        with self._lock:
            plans, graph = self._planned("build_plans"), self._snapshot()
            binder = Binder(graph, plans.target.device or device_of_arch(plans.target.arch), owner=self)
            if name == "ALL":
                given = [bindings] if isinstance(bindings, Mapping) else bindings
                plans.build_all(binder, given if given is not None else [nominal_bindings(graph)])
            else:
                plans.build_first(binder.device)
            self._binder, self._stage = binder, Stage.BUILT

    def build(
        self,
        heuristics: Sequence[Any] = HEURISTICS,
        policy: Any = "HEURISTICS_CHOICE",
        *,
        device: DeviceLike | None = None,
        arch: ArchLike | None = None,
        fused: bool | None = None,
        strict: bool | None = None,
        disable: Collection[str] | None = None,
        bindings: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    ) -> Graph:
        """Every verb from where the graph stands to `build_plans`; options as theirs. Returns the graph."""
        with self._lock:
            if self._stage < Stage.VALIDATED:
                self.validate()
            if self._stage < Stage.FROZEN:
                self.build_operation_graph()
            self.create_execution_plans(
                heuristics, device=device, arch=arch, fused=fused, strict=strict, disable=disable
            )
            self.check_support()
            self.build_plans(policy, bindings=bindings)
        return self

    def get_workspace_size(self, bindings: Mapping[str, int] | None = None) -> int:
        """Bytes of workspace that `execute` needs when the symbols have the values of `bindings`.

        A symbol without a value counts as large as its maximum, and the size then serves every smaller value too.
        Raises WorkspaceError("WORKSPACE_SYMBOLS") where it has none.
        """
        plans, binder = self._ensure_built()
        names = {s.name for s in binder.graph.symbols}
        values = workspace_bindings(binder.graph, bindings)
        return plans.workspace_bytes(values, at_most=not names <= set(bindings or {}))

    def execute(
        self, variant_pack: Mapping[Any, Any], workspace: torch.Tensor | None = None, handle: Any = None
    ) -> None:
        """Runs the graph into the caller's buffers.

        `variant_pack`: a buffer for every input and output, by Tensor, name or uid; torch tensors or anything with
        `__dlpack__`; for discrete weights a list of L tensors or an int64 tensor of addresses. `workspace`: at least
        `get_workspace_size` bytes on the device. `handle`: a torch.cuda.Stream of it; torch's current one by default.
        Gradients are not tracked. Builds what is not built yet. Raises VariantPackError, WorkspaceError or StateError
        before anything is launched.
        """
        plans, binder = self._ensure_built()
        taken = plans.repeated(binder, variant_pack, workspace)
        if taken is None:
            taken = plans.accept(binder, variant_pack, workspace, outputs_required=True)
        call = taken.call
        executable = plans.executable(call.choice)
        if call.launch is not None and executable.is_current():
            call.launch(executable.stream() if handle is None else self._checked(handle, binder).cuda_stream)
        else:
            with self._stream(handle, binder):
                executable.launch(taken.buffers, call.bindings, workspace)
        if execute_log.isEnabledFor(DEBUG):
            execute_log.debug("%s: ran plan %s with %s", self.name, executable.plan.name, call.bindings)

    def __call__(self, variant_pack: Mapping[Any, Any]) -> Outputs:
        """Runs the graph on the inputs given and returns its outputs, allocating those that are not given.

        Rows at or past `offsets[-1]` and padding of allocated outputs are zero. An output that is accumulated into must
        be given. Allocates its own workspace. Gradients are not tracked. Errors as `execute`.
        """
        import torch

        plans, binder = self._ensure_built()
        taken = plans.repeated(binder, variant_pack, ITS_OWN)
        if taken is None:
            taken = plans.accept(binder, variant_pack, None, outputs_required=False)
        executable, bindings, buffers = plans.executable(taken.call.choice), taken.call.bindings, taken.buffers
        made = {
            spec.uid: executable.allocate_output(spec, bindings)
            for spec in binder.outputs if spec.uid not in buffers and spec.uid not in executable.made
        }  # fmt: skip
        nbytes = executable.workspace_bytes(bindings)
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=binder.device) if nbytes else None
        done = executable.launch({**buffers, **made}, bindings, workspace)
        if execute_log.isEnabledFor(DEBUG):
            execute_log.debug("%s: ran plan %s with %s", self.name, executable.plan.name, bindings)
        return Outputs({spec.uid: done[spec.uid] for spec in binder.outputs}, binder.output_names)

    # ------------------------------------------------------------------ plans: listing and selection

    def get_execution_plan_count(self) -> int:
        """How many plans there are."""
        return len(self._planned("get_execution_plan_count").plans)

    def get_plan_name_at_index(self, index: int) -> str:
        """`unfused`, or the kernels that the plan fuses."""
        return self._planned("get_plan_name_at_index").at(index, "get_plan_name_at_index").name

    def select_plan(self, index: int) -> Graph:
        """Pins a plan: no other is taken, even where it does not build. At any time once planned. Returns the graph."""
        with self._lock:
            self._planned("select_plan").pin(index)
        return self

    def deselect_engines(self, names: Sequence[str]) -> Graph:
        """Bars every plan whose name contains one of `names`; before build_plans. Returns the graph.

        Raises StateError for a name that no plan contains. `check_support` is to be called after it.
        """
        plans = self._planned("deselect_engines")
        if self._stage is Stage.BUILT:
            raise StateError("VERB_ORDER", asked="deselect_engines()", seen=f"graph {self.name} is built already",
                             required="before build_plans()", hint="select_plan() switches plans")  # fmt: skip
        plans.deselect(names)
        self._stage = Stage.PLANNED
        return self

    def get_workspace_size_plan_at_index(self, index: int, bindings: Mapping[str, int] | None = None) -> int:
        """As get_workspace_size, for one plan, which is built if it is not."""
        self._planned("get_workspace_size_plan_at_index").at(index, "get_workspace_size_plan_at_index")
        plans, binder = self._ensure_built()
        with self._lock:
            return plans.executable(index).workspace_bytes(workspace_bindings(binder.graph, bindings))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans, best first."""
        return self._planned("plans").plans

    @property
    def plan(self) -> Plan:
        """The plan that is selected, won at the last sizes that were measured, was built, or stands first."""
        return self._planned("plan").preferred

    @property
    def tuning(self) -> TuningRecord | None:
        """What build_plans("ALL") measured; None under another policy."""
        return self._planned("tuning").record

    # ------------------------------------------------------------------ explanation

    def explain(self, arch: ArchLike | None = None) -> Explanation:
        """What runs, what fused and why the rest did not, as an object with `str`, `.to_json()`, `.to_mermaid()`.

        For `arch`, which need not be here; by default for the plan made, or for the machine at hand. Changes nothing.
        """
        from .explain import explain

        return explain(self._plan_for(arch))

    def why_not(
        self, rule: str, node: Tensor | str | int | None = None, arch: ArchLike | None = None
    ) -> tuple[Verdict, ...]:
        """Every verdict of one rule, with all reasons: everywhere, or at `node`.

        `node`: a node's name, its index in the plan's graph, or a Tensor that it writes. Raises GraphError for an
        unknown rule or node.
        """
        graph = self._snapshot()
        if isinstance(node, Tensor):
            producer = graph.producers.get(node.uid)
            node = node.name if producer is None else producer.node.name
        target = self._plan_set.target if self._plan_set is not None else None
        if arch is None and target is not None:
            arch = target.arch
        chosen = as_arch(arch) if arch is not None else self._resolve(self._arch, self._device)[0]
        disable = self._disable if target is None else target.disable
        return why_not(graph, rule, chosen, node, disable=disable, kernels=self._kernels)

    # ------------------------------------------------------------------ identity and storage

    def key(self) -> str:
        """A hash of the graph's content: equal for graphs that differ in labels, uids and source lines only."""
        return content.content_key(self._snapshot())

    def serialize(self) -> bytes:
        """The graph, what it was planned for, and the plan chosen (with the winners that were measured)."""
        plans = self._planned("serialize")
        winners = plans.record.winners if plans.record is not None else {}
        return content.pack({
            "graph": to_dict(self._snapshot()),
            "arch": plans.target.arch.name,
            "fused": plans.target.fused,
            "strict": plans.target.strict,
            "disable": list(plans.target.disable),
            "selected": plans.preferred.name,
            "winners": [[device, list(bucket), name] for (device, bucket), name in winners.items()],
        })  # fmt: skip

    @classmethod
    def deserialize(
        cls, data: bytes, *, device: DeviceLike | None = None, kernels: Sequence[KernelEntry] = KERNELS
    ) -> Graph:
        """The graph that `serialize` wrote, planned for the same arch; its plan is selected, or its winners known.

        Raises GraphError for other bytes, GraphNotSupportedError("PLAN_GONE") where its plan no longer exists.
        """
        payload = content.unpack(data)
        graph = cls.from_operation_graph(from_dict(payload["graph"]), kernels=kernels)
        graph.validate()
        graph.build_operation_graph()
        arch = payload["arch"] if payload["arch"] in ARCHES else None
        graph.create_execution_plans(
            device=device, arch=arch, fused=payload["fused"], strict=payload["strict"], disable=payload["disable"]
        )
        plans = graph._planned("deserialize")
        names = [p.name for p in plans.plans]
        winners = {(d, tuple((n, v) for n, v in bucket)): name for d, bucket, name in payload["winners"]}
        if gone := {payload["selected"], *winners.values()} - set(names):
            raise GraphNotSupportedError(
                "PLAN_GONE",
                asked=f"plans {sorted(gone)}",
                seen=names,
                required="the plans that were serialized",
                hint="the kernels have changed: build the graph again",
            )
        if winners:
            from .tuning import TuningRecord

            plans.record = TuningRecord(winners)
        else:
            plans.pin(names.index(payload["selected"]))
        return graph

    @classmethod
    def from_cudnn(cls, pygraph: Any, **options: Any) -> CudnnGraph:
        """The graph of a `cudnn.pygraph`, which takes that graph's own buffers by uid; `options` as the constructor's.

        Imports neither cudnn nor libcudnn. Raises UnsupportedCudnnGraph with every node and attribute it cannot read.
        """
        from .from_cudnn import import_graph

        return import_graph(pygraph, **options)

    @classmethod
    def from_operation_graph(cls, graph: OpGraph, **options: Any) -> Graph:
        """A graph under construction with the content of `graph`; `options` as the constructor's, without its name."""
        made = cls(
            name=graph.name,
            io_data_type=graph.io_data_type,
            deterministic=graph.deterministic,
            intermediate_data_type=graph.intermediate_data_type,
            **options,
        )
        rebuild(made, graph)
        return made

    # ------------------------------------------------------------------ the machinery

    def _require(self, stage: Stage, asked: str, *, exactly: bool = True) -> None:
        require_stage(self._stage, stage, asked, self.name, exactly=exactly)

    def _ensure_built(self) -> tuple[PlanSet, Binder]:
        if self._stage is not Stage.BUILT:
            with self._lock:
                if self._stage < Stage.PLANNED:
                    self.build()
                if self._stage is Stage.PLANNED:
                    self.check_support()
                if self._stage is Stage.CHECKED:
                    self.build_plans()
        assert self._plan_set is not None and self._binder is not None
        return self._plan_set, self._binder

    def _planned(self, asked: str) -> PlanSet:
        self._require(Stage.PLANNED, asked, exactly=False)
        assert self._plan_set is not None
        return self._plan_set

    def _snapshot(self) -> OpGraph:
        """The frozen graph, or the graph as it stands."""
        return self._op_graph if self._frozen and self._op_graph is not None else self.operation_graph()

    def _resolve(self, arch: ArchLike | None, device: DeviceLike | None) -> tuple[Arch, torch.device | None]:
        return resolve(arch, device)

    def _plan_for(self, arch: ArchLike | None) -> Plan:
        if arch is None and self._plan_set is not None:
            return self._plan_set.preferred
        target = self._plan_set.target if self._plan_set is not None else None
        return make_plan(
            self._snapshot(),
            as_arch(arch) if arch is not None else self._resolve(self._arch, self._device)[0],
            fused=self._fused if target is None else target.fused,
            disable=self._disable if target is None else target.disable,
            kernels=self._kernels,
        )

    def _stream(self, handle: Any, binder: Binder) -> AbstractContextManager[Any]:
        if handle is None:
            return nullcontext()
        import torch

        return torch.cuda.stream(self._checked(handle, binder))

    def _checked(self, handle: Any, binder: Binder) -> torch.cuda.Stream:
        """The handle, a stream of the graph's GPU. Raises StateError("HANDLE") for anything else."""
        import torch

        if isinstance(handle, torch.cuda.Stream) and handle.device == binder.device:
            return handle
        raise StateError("HANDLE", asked=f"execute(handle={handle!r})", seen=type(handle).__name__,
                         required=f"None, or a torch.cuda.Stream of {binder.device} where that is a GPU")  # fmt: skip


__all__ = ["POLICIES", "Graph", "Outputs"]
