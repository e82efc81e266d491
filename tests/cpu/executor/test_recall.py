"""Buffers that passed every check are not checked again: what must be seen all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opfuse.graph_ops import DataType, Graph
from opfuse.graph_ops.ir.errors import VariantPackError, WorkspaceError


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each pack that is checked in full."""
    from opfuse.graph_ops.buffers import Binder

    seen: list[int] = []
    bind = Binder.bind

    def counted(self: Binder, buffers: Any) -> Any:
        seen.append(1)
        return bind(self, buffers)

    monkeypatch.setattr(Binder, "bind", counted)
    return seen


def _product() -> tuple[Graph, dict[str, torch.Tensor]]:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    m = graph.symbol("M")
    a, b = graph.tensor("a", (m, 8)), graph.tensor("b", (2, 8, 4))
    offsets = graph.tensor("offs", (2,), data_type=DataType.INT32)
    graph.grouped_matmul(a, b, offsets).set_data_type(DataType.FLOAT).set_output(True).set_name("y")
    pack = {"a": torch.randn(6, 8), "b": torch.randn(2, 8, 4), "offs": torch.tensor([2, 6], dtype=torch.int32),
            "y": torch.full((6, 4), torch.nan)}  # fmt: skip
    return graph, pack


def _wanted(pack: dict[str, torch.Tensor]) -> torch.Tensor:
    end = int(pack["offs"][0])
    a, b = pack["a"].double(), pack["b"].double()
    return torch.cat([a[:end] @ b[0], a[end:] @ b[1]]).float()


def test_the_same_buffers_are_checked_once_and_new_contents_count(checks: list[int]) -> None:
    graph, pack = _product()
    for _ in range(3):
        graph.execute(pack)
        torch.testing.assert_close(pack["y"], _wanted(pack))
        pack["b"].normal_()
        pack["offs"][0] += 1
    assert len(checks) == 1
    pack["b"] = torch.randn(2, 8, 4)
    graph.execute(pack)
    torch.testing.assert_close(pack["y"], _wanted(pack))
    assert len(checks) == 2


def test_a_call_is_remembered_apart_from_execute(checks: list[int]) -> None:
    graph, pack = _product()
    given = {name: t for name, t in pack.items() if name != "y"}
    first, second = graph(given)["y"], graph(given)["y"]
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr() and len(checks) == 1
    with pytest.raises(VariantPackError, match="KEY_MISSING"):
        graph.execute(given)
    assert graph({**given, "y": pack["y"]})["y"] is pack["y"]


def test_parameters_are_remembered_and_subclasses_are_not(checks: list[int]) -> None:
    class Odd(torch.Tensor):
        pass

    graph, pack = _product()
    pack["b"] = torch.nn.Parameter(pack["b"])
    graph.execute(pack)
    graph.execute(pack)
    assert len(checks) == 1
    pack["b"] = pack["b"].detach().as_subclass(Odd)
    graph.execute(pack)
    graph.execute(pack)
    assert len(checks) == 3


def _transposed(pack: dict[str, torch.Tensor]) -> None:
    pack["b"] = pack["b"].as_strided((2, 8, 4), (32, 1, 8))


def _of_another_type(pack: dict[str, torch.Tensor]) -> None:
    pack["a"] = pack["a"].view(torch.int32)


def _negated(pack: dict[str, torch.Tensor]) -> None:
    pack["a"] = torch._neg_view(pack["a"])


def _short(pack: dict[str, torch.Tensor]) -> None:
    pack["y"] = pack["y"][:5]


def _aliased(pack: dict[str, torch.Tensor]) -> None:
    pack["y"] = pack["a"].view(-1)[:24].view(6, 4)


def _differentiable(pack: dict[str, torch.Tensor]) -> None:
    pack["y"].requires_grad_(True)


def _offsets_that_fall(pack: dict[str, torch.Tensor]) -> None:
    pack["offs"].copy_(torch.tensor([6, 2]))


def _offsets_past_the_rows(pack: dict[str, torch.Tensor]) -> None:
    pack["offs"][1] = 7


@pytest.mark.parametrize(("change", "code"), [
    (_transposed, "STRIDE"), (_of_another_type, "DATA_TYPE"), (_negated, "LAYOUT"), (_short, "SHAPE"),
    (_aliased, "ALIASED"), (_differentiable, "REQUIRES_GRAD"), (_offsets_that_fall, "OFFSETS"),
    (_offsets_past_the_rows, "OFFSETS"),
])  # fmt: skip
def test_what_changes_at_the_same_address_is_seen(change: Any, code: str) -> None:
    graph, pack = _product()
    graph.execute(pack)
    graph.execute(pack)
    change(pack)
    with pytest.raises(VariantPackError) as caught:
        graph.execute(pack)
    assert caught.value.code == code or (code == "SHAPE" and "M" in str(caught.value))


def test_a_workspace_is_part_of_what_is_remembered() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT, fused=False)
    x = graph.tensor("x", (graph.symbol("M"), 64))
    graph.swish(graph.relu(x)).set_output(True).set_name("y")
    graph.build()
    pack = {"x": torch.randn(8, 64), "y": torch.empty(8, 64)}
    workspace = torch.empty(graph.get_workspace_size({"M": 8}), dtype=torch.uint8)
    graph.execute(pack, workspace)
    graph.execute(pack, workspace)
    with pytest.raises(WorkspaceError, match="WORKSPACE_MISSING"):
        graph.execute(pack)
    with pytest.raises(WorkspaceError, match="WORKSPACE_SHORT"):
        graph.execute(pack, workspace[:-1])


def test_keys_that_only_equal_a_uid_are_refused_again() -> None:
    graph, pack = _product()
    uids = {t.name: t.uid for t in graph.operation_graph().tensors.values()}
    by_uid = {uids[name]: t for name, t in pack.items()}
    graph.execute(by_uid)
    graph.execute(by_uid)
    with pytest.raises(VariantPackError, match="KEY_TYPE"):
        graph.execute({float(uid): t for uid, t in by_uid.items()})


def test_inference_outputs_are_refused_outside_inference_mode() -> None:
    graph, pack = _product()
    with torch.inference_mode():
        pack["y"] = torch.empty(6, 4)
        graph.execute(pack)
        graph.execute(pack)
    with pytest.raises(VariantPackError, match="INFERENCE_TENSOR"):
        graph.execute(pack)


def test_another_plan_is_taken_for_the_same_buffers(tools: Any) -> None:
    graph = tools.EmulatedGraph()
    tools.declare_dglu(graph)
    op_graph = graph.operation_graph()
    graph.build()
    pack = {**tools.random_pack(op_graph, 256, seed=0), **tools.poisoned_outputs(op_graph, 256)}
    sizes = []
    for index in range(graph.get_execution_plan_count()):
        graph.select_plan(index)
        sizes.append(graph.get_workspace_size({"M": 256}))
        graph.execute(pack, torch.empty(sizes[-1], dtype=torch.uint8))
    assert len(set(sizes)) > 1
    with pytest.raises(WorkspaceError):
        graph.execute(pack, torch.empty(min(sizes), dtype=torch.uint8))


def test_what_is_remembered_is_bounded_and_holds_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    from opfuse.graph_ops import recall

    monkeypatch.setattr(recall, "LIMIT", 4)
    graph, pack = _product()
    gone = []
    for rows in range(1, 12):
        pack |= {"a": torch.randn(rows, 8), "y": torch.empty(rows, 4), "offs": torch.tensor([0, rows]).int()}
        graph.execute(pack)
        gone.append(weakref.ref(pack["a"]))
        assert graph._binder is not None and len(graph._binder.recall._calls) <= 4
    del pack
    gc.collect()
    assert not any(ref() is not None for ref in gone)


def _resized(t: torch.Tensor) -> torch.Tensor:
    return t.resize_(4, 3)


def _replaced(t: torch.Tensor) -> torch.Tensor:
    t.data = torch.zeros(4, 6, dtype=torch.float16)
    return t


def _subclassed(t: torch.Tensor) -> torch.Tensor:
    class Odd(torch.Tensor):
        pass

    return t.as_subclass(Odd)


def _of_inference(t: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 6)


UNLIKE: dict[str, Any] = {
    "resized": _resized, "other data": _replaced, "subclass": _subclassed, "inference": _of_inference,
    "as_strided_": lambda t: t.as_strided_((4, 6), (1, 4)), "transposed": lambda t: t.t(), "rank": lambda t: t[None],
    "type": lambda t: t.view(torch.int32), "negated": torch._neg_view, "differentiable": lambda t: t.requires_grad_(),
    "parameter": torch.nn.Parameter, "device": lambda t: t.to("meta"), "sparse": lambda t: t.to_sparse(),
}  # fmt: skip
LIKE: dict[str, Any] = {
    "itself": lambda t: t, "another": lambda t: torch.ones(4, 6), "inside": lambda t: torch.zeros(5, 6)[1:],
    "replaced": lambda t: t.set_(torch.ones(4, 6)),
}  # fmt: skip


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("change", [*UNLIKE, *LIKE])
def test_alike_is_all_but_address_and_values(monkeypatch: pytest.MonkeyPatch, guarded: bool, change: str) -> None:
    from opfuse.graph_ops import alike

    if not guarded:
        monkeypatch.setattr(alike, "TENSOR_GUARDS", None)
    elif alike.TENSOR_GUARDS is None:
        pytest.skip(f"torch {torch.__version__}: {alike.GUARDED} are known")
    t, other = torch.zeros(4, 6), torch.zeros(3)
    check = alike.alike_to((t, other))
    assert check(t, other)
    changed = UNLIKE[change](t) if change in UNLIKE else LIKE[change](t)
    assert check(changed, other) is (change in LIKE)


def test_one_tensor_in_two_places_is_remembered(checks: list[int]) -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    x, z = graph.tensor("x", (4,)), graph.tensor("z", (4,))
    graph.add(x, z).set_data_type(DataType.FLOAT).set_output(True).set_name("y")
    both = torch.randn(4)
    pack = {"x": both, "z": both, "y": torch.empty(4)}
    for _ in range(3):
        graph.execute(pack)
    assert len(checks) == 1 and torch.equal(pack["y"], both + both)
    apart = pack | {"z": torch.randn(4)}
    for _ in range(2):
        graph.execute(apart)
        graph.execute(pack)
    assert len(checks) == 2 and torch.equal(pack["y"], both + both)


def test_row_counts_that_share_their_memory_are_told_apart(checks: list[int]) -> None:
    graph, _ = _product()
    whole = {"a": torch.randn(6, 8), "y": torch.empty(6, 4), "b": torch.randn(2, 8, 4)}
    for _ in range(2):
        for rows in (6, 1, 4):
            pack = whole | {n: whole[n][:rows] for n in ("a", "y")} | {"offs": torch.tensor([0, rows]).int()}
            whole["y"].fill_(torch.nan)
            graph.execute(pack)
            torch.testing.assert_close(pack["y"], _wanted(pack))
            assert bool(whole["y"][rows:].isnan().all())
    assert len(checks) <= 6


def test_separate_experts_are_remembered_one_by_one(checks: list[int]) -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    a, b = graph.tensor("a", (graph.symbol("M"), 8)), graph.tensor("b", (2, 8, 4), discrete=True)
    offsets = graph.tensor("offs", (2,), data_type=DataType.INT32)
    graph.grouped_matmul(a, b, offsets).set_data_type(DataType.FLOAT).set_output(True).set_name("y")
    pack: dict[str, Any] = {
        "a": torch.randn(6, 8), "b": [torch.randn(8, 4) for _ in range(2)],
        "offs": torch.tensor([2, 6], dtype=torch.int32), "y": torch.empty(6, 4),
    }  # fmt: skip

    def run() -> None:
        graph.execute(pack)
        torch.testing.assert_close(pack["y"], _wanted({**pack, "b": torch.stack(list(pack["b"]))}))

    for _ in range(3):
        run()
    assert len(checks) == 1
    pack["b"] = tuple(pack["b"])  # the same experts
    run()
    assert len(checks) == 1
    pack["b"] = [pack["b"][0], torch.randn(8, 4)]
    run()
    run()
    assert len(checks) == 2
    for wrong in ([pack["b"][0]], [pack["b"][0], pack["b"][1].double()], [pack["b"][0], pack["b"][1][:4]], pack["a"]):
        with pytest.raises(VariantPackError):
            graph.execute({**pack, "b": wrong})
    pack["b"][1].resize_(4, 4)
    with pytest.raises(VariantPackError):
        run()
