"""Every error of a variant pack and a workspace: its code, and that no output byte was touched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opfuse.graph_ops import DataType, Graph, VariantPackError, WorkspaceError
from opfuse.graph_ops.overlap import first_overlap

ROWS = 96
Change = Callable[[dict[Any, Any], dict[str, Any]], None]


@pytest.fixture
def built(tools: Any) -> tuple[Graph, dict[str, Any], dict[Any, Any]]:
    """A built dGLU graph, its tensors by name, and a whole variant pack by name."""
    graph = Graph(device="cpu")
    tensors = tools.declare_dglu(graph)
    graph.build()
    op_graph = graph.operation_graph()
    pack = {**tools.random_pack(op_graph, ROWS, seed=1), **tools.poisoned_outputs(op_graph, ROWS)}
    names = {t.uid: name for name, t in tensors.items()}
    return graph, tensors, {names[uid]: value for uid, value in pack.items()}


def _workspace(graph: Graph) -> torch.Tensor:
    return torch.empty(graph.get_workspace_size({"M": ROWS}), dtype=torch.uint8)


def _set(name: str, value: Callable[[torch.Tensor], Any]) -> Change:
    def change(pack: dict[Any, Any], tensors: dict[str, Any]) -> None:
        pack[name] = value(pack[name])

    return change


def _misaligned(t: torch.Tensor) -> torch.Tensor:
    raw = torch.empty(t.numel() * t.element_size() + 16, dtype=torch.uint8)
    shift = (-raw.data_ptr() % 16) + t.element_size()
    made = raw[shift : shift + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
    return made.copy_(t) if t.dtype.is_floating_point else made


def _foreign(pack: dict[Any, Any], tensors: dict[str, Any]) -> None:
    pack[Graph().tensor("dy", (1,))] = pack.pop("dy")


def _twice(pack: dict[Any, Any], tensors: dict[str, Any]) -> None:
    pack[tensors["dy"]] = pack["dy"]


def _overlapping_outputs(pack: dict[Any, Any], tensors: dict[str, Any]) -> None:
    memory = torch.full((2 * ROWS,), float("nan"))
    pack["dprob"] = memory[:ROWS]
    pack["prob"] = memory[ROWS - 4 : 2 * ROWS - 4]


def _same_output(pack: dict[Any, Any], tensors: dict[str, Any]) -> None:
    shared = torch.full((max(pack["q_row"].numel(), pack["q_col"].numel()),), 0xFF, dtype=torch.uint8)
    for name in ("q_row", "q_col"):
        pack[name] = shared[: pack[name].numel()].view(torch.float8_e4m3fn).view(pack[name].shape)


CASES: dict[str, tuple[str, Change]] = {
    "missing input": ("KEY_MISSING", lambda pack, tensors: pack.pop("h")),
    "missing output": ("KEY_MISSING", lambda pack, tensors: pack.pop("dbias")),
    "None for an input": ("KEY_MISSING", _set("h", lambda t: None)),
    "unknown name": ("KEY_UNKNOWN", lambda pack, tensors: pack.update(nobody=pack["dy"])),
    "unknown uid": ("KEY_UNKNOWN", lambda pack, tensors: pack.update({999: pack["dy"]})),
    "virtual tensor": ("KEY_VIRTUAL", lambda pack, tensors: pack.update({tensors["dh"]: pack["h"]})),
    "tensor of another graph": ("KEY_FOREIGN", _foreign),
    "one tensor under two keys": ("KEY_TWICE", _twice),
    "key of no kind": ("KEY_TYPE", lambda pack, tensors: pack.update({1.5: pack["dy"]})),
    "a bool as uid": ("KEY_TYPE", lambda pack, tensors: pack.update({True: pack["dy"]})),
    "None as key of a buffer": ("KEY_TYPE", lambda pack, tensors: pack.update({None: pack["dy"]})),
    "no buffer at all": ("BUFFER_TYPE", _set("dy", lambda t: [1.0, 2.0])),
    "rank": ("RANK", _set("dy", lambda t: t[None])),
    "columns": ("SHAPE", _set("dy", lambda t: t[:, :-1].contiguous())),
    "rows that disagree": ("SHAPE", _set("h", lambda t: t[:-1])),
    "output rows that disagree": ("SHAPE", _set("dprob", lambda t: t[:-1])),
    "data type": ("DATA_TYPE", _set("dy", lambda t: t.float())),
    "data type of an output": ("DATA_TYPE", _set("dprob", lambda t: t.double())),
    "integer type": ("DATA_TYPE", _set("offs", lambda t: t.long())),
    "strides": ("STRIDE", _set("dy", lambda t: t.t().contiguous().t())),
    "declared strides not met": ("STRIDE", _set("w2", lambda t: t.contiguous())),
    "device": ("DEVICE", _set("dy", lambda t: t.to("meta"))),
    "sparse": ("LAYOUT", _set("dprob", lambda t: torch.zeros_like(t).to_sparse())),
    "alignment": ("ALIGNMENT", _set("dy", _misaligned)),
    "alignment of an output": ("ALIGNMENT", _set("dprob", _misaligned)),
    "output that requires grad": ("REQUIRES_GRAD", _set("dprob", lambda t: t.requires_grad_())),
    "output over an input": ("ALIASED", _overlapping_outputs),
    "output over an output": ("ALIASED", _same_output),
    "decreasing offsets": ("OFFSETS", _set("offs", lambda t: torch.tensor([40, 30, 96], dtype=torch.int32))),
    "negative offsets": ("OFFSETS", _set("offs", lambda t: torch.tensor([-1, 30, 96], dtype=torch.int32))),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_variant_pack_is_named_and_nothing_is_written(built: Any, tools: Any, case: str) -> None:
    graph, tensors, pack = built
    code, change = CASES[case]
    untouched = [pack[n] for n in ("q_row", "sf_row", "q_col", "sf_col", "dprob", "dbias")]
    change(pack, tensors)
    with pytest.raises(VariantPackError) as caught:
        graph.execute(pack, _workspace(graph))
    error = caught.value
    assert error.code == code, str(error)
    assert error.asked and error.required, "an error says what was asked and what is required"
    assert all(tools.is_poison(t.detach()) for t in untouched), "an output was written"


def test_c11_last_offset_past_the_rows(built: Any, tools: Any) -> None:
    graph, _, pack = built
    pack["offs"] = torch.tensor([32, 64, ROWS + 1], dtype=torch.int32)
    with pytest.raises(VariantPackError, match=f"OFFSETS.*last offset {ROWS + 1}.*at most the {ROWS} rows") as caught:
        graph.execute(pack, _workspace(graph))
    assert caught.value.code == "OFFSETS"
    assert tools.is_poison(pack["dbias"])


def test_unsound_workspace(built: Any, tools: Any) -> None:
    graph, _, pack = built
    size = graph.get_workspace_size({"M": ROWS})
    assert size > 0
    memory = torch.empty(size + 128, dtype=torch.uint8)
    bad = {
        "WORKSPACE_MISSING": None,
        "WORKSPACE_SHORT": memory[: size - 1],
        "WORKSPACE_ALIGNMENT": memory[1 : size + 1],
        "WORKSPACE_STRIDE": torch.empty(2 * size, dtype=torch.uint8)[::2],
        "WORKSPACE_DEVICE": torch.empty(size, dtype=torch.uint8, device="meta"),
        "WORKSPACE_TYPE": bytearray(size),
    }
    for code, workspace in bad.items():
        with pytest.raises(WorkspaceError) as caught:
            graph.execute(pack, workspace)  # type: ignore[arg-type]
        assert caught.value.code == code
    output = torch.empty(size + 4096, dtype=torch.uint8)
    pack["dprob"] = output[:4096].view(torch.float32)[:ROWS]
    with pytest.raises(WorkspaceError) as caught:
        graph.execute(pack, output[: size + 64])
    assert caught.value.code == "WORKSPACE_OVERLAP"
    assert all(tools.is_poison(pack[n]) for n in ("q_row", "sf_row", "dbias"))


def test_any_key_and_any_contiguous_workspace_serve(built: Any) -> None:
    graph, tensors, pack = built
    size = graph.get_workspace_size({"M": ROWS})
    graph.execute(pack, torch.empty(size // 4 + 1, dtype=torch.float32))
    first = {n: pack[n].clone() for n in ("q_row", "dprob", "dbias")}
    kinds = (lambda n: tensors[n], lambda n: tensors[n].uid, lambda n: n)
    mixed = {kinds[i % 3](name): value for i, (name, value) in enumerate(pack.items())}
    graph.execute({**mixed, None: None}, torch.empty(size, dtype=torch.uint8))
    assert all(torch.equal(first[n].view(torch.uint8), pack[n].view(torch.uint8)) for n in first)


def test_ambiguous_and_unused_names() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    x, y = graph.tensor("x", (4, 8)), graph.tensor("x", (4, 8))
    unused = graph.tensor("unused", (4, 8))
    two = graph.tensor_scalar(2.0, name="two")
    out = graph.mul(graph.add(x, y), two).set_output(True).set_name("out")
    one = torch.ones(4, 8)
    for pack, code in (
        ({"x": one, y: one, out: one}, "KEY_AMBIGUOUS"),
        ({x: one, y: one, unused: one}, "KEY_UNUSED"),
        ({x: one, y: one, "two": one}, "KEY_CONSTANT"),
    ):
        with pytest.raises(VariantPackError) as caught:
            graph(pack)
        assert caught.value.code == code
    result = graph({x: one, y: 2 * one, unused: None, "unused": None})
    assert torch.equal(result["out"], 6 * one) and torch.equal(result[out], result[out.uid])


def test_discrete_weights(tools: Any) -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    rows = graph.symbol("M")
    graph.tensor("a", (rows, 8), uid=1)
    a, b = graph.find_tensor("a"), graph.tensor("b", (3, 8, 16), discrete=True)
    offsets = graph.tensor("offs", (3,), data_type=DataType.INT32)
    graph.grouped_matmul(a, b, offsets).set_output(True).set_name("y")
    given = {"a": torch.randn(12, 8), "offs": torch.tensor([4, 4, 12], dtype=torch.int32)}
    weights = [torch.randn(8, 16) for _ in range(3)]
    got = graph({**given, "b": weights})["y"]
    want = torch.cat([given["a"][:4] @ weights[0], given["a"][4:] @ weights[2]])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for wrong, code in (
        (weights[:2], "SHAPE"),
        ([*weights[:2], weights[2][:, :8]], "SHAPE"),
        ([*weights[:2], weights[2].double()], "DATA_TYPE"),
        ([*weights[:2], weights[2].t().contiguous().t()], "STRIDE"),
        ([*weights[:2], weights[2][0]], "RANK"),
        (torch.stack(weights), "DISCRETE"),
        (torch.zeros(4, dtype=torch.int64), "SHAPE"),
    ):
        with pytest.raises(VariantPackError) as caught:
            graph({**given, "b": wrong})
        assert caught.value.code == code, f"{wrong}"
    output = torch.empty(12, 16)
    with pytest.raises(VariantPackError) as caught:
        graph({**given, "b": [*weights[:2], output[:8]], "y": output})
    assert caught.value.code == "ALIASED"


def test_fp4_codes_are_packed_bytes() -> None:
    graph = Graph(device="cpu")
    rows = graph.symbol("M")
    x = graph.tensor("x", (rows, 64))
    q, sf = graph.block_scale_quantize(
        x, block_size=16, axis=1, data_type=DataType.FP4_E2M1, scale_type=DataType.FP8_E4M3
    )
    q.set_output(True).set_name("q")
    sf.set_output(True).set_name("sf")
    value = torch.randn(130, 64).bfloat16()
    out = graph({"x": value})
    assert out["q"].shape == (130, 32) and out["q"].dtype is torch.uint8 and out["sf"].dtype is torch.float8_e4m3fn
    named = torch.zeros(130, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    scales = torch.zeros_like(out["sf"])
    graph.execute({"x": value, "q": named, "sf": scales}, _workspace_of(graph, 130))
    assert torch.equal(named.view(torch.uint8), out["q"])
    with pytest.raises(VariantPackError) as caught:
        graph({"x": value, "q": torch.zeros(130, 64, dtype=torch.uint8)})
    assert caught.value.code == "SHAPE"


def _workspace_of(graph: Graph, rows: int) -> torch.Tensor | None:
    size = graph.get_workspace_size({"M": rows})
    return torch.empty(size, dtype=torch.uint8) if size else None


def test_promises_of_symbols_and_offsets() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    rows = graph.symbol("M", multiple_of=8, max=64)
    x = graph.tensor("x", (rows, 4))
    offsets = graph.tensor("offs", (2,), data_type=DataType.INT64, multiple_of=8)
    graph.group_sum(x, offsets).set_output(True).set_name("y")
    good = torch.tensor([8, 16])
    for pack, code in (
        ({"x": torch.ones(12, 4), "offs": good}, "SYMBOL_MULTIPLE"),
        ({"x": torch.ones(72, 4), "offs": good}, "SYMBOL_MAXIMUM"),
        ({"x": torch.ones(16, 4), "offs": torch.tensor([4, 16])}, "MULTIPLE_OF"),
    ):
        with pytest.raises(VariantPackError) as caught:
            graph(pack)
        assert caught.value.code == code
    assert torch.equal(graph({"x": torch.ones(16, 4), "offs": good})["y"], torch.full((2, 4), 8.0))


def test_c113_buffers_of_other_frameworks() -> None:
    numpy = pytest.importorskip("numpy")

    class Exporter:
        """Nothing but the protocol, as another framework's array would be."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __dlpack__(self, **options: Any) -> Any:
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    x, y = graph.tensor("x", (3, 4)), graph.tensor("y", (3, 4))
    out = graph.add(x, y).set_output(True).set_name("out")
    left, right = numpy.arange(12, dtype=numpy.float32).reshape(3, 4), torch.ones(3, 4)
    written = numpy.full((3, 4), numpy.nan, dtype=numpy.float32)
    graph.execute({x: left, y: Exporter(right), out: written})
    assert (written == left + 1).all(), "the caller's own memory is written"
    with pytest.raises(VariantPackError) as caught:
        graph({x: left.astype(numpy.float64), y: right})
    assert caught.value.code == "DATA_TYPE"

    class Broken(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(VariantPackError, match="not today") as caught:
        graph({x: Broken(right), y: right})
    assert caught.value.code == "DLPACK"


def test_bytes_of_another_framework_stand_for_8_bit_floats() -> None:
    numpy = pytest.importorskip("numpy")
    graph = Graph(device="cpu")
    codes = graph.tensor("codes", (2, 32), data_type=DataType.FP8_E4M3)
    from opfuse.graph_ops import ScaleLayout

    scale = graph.tensor("scale", (2, 1), data_type=DataType.FP8_E8M0, scale_layout=ScaleLayout(32, 1, swizzled=False))
    graph.block_scale_dequantize(codes, scale).set_data_type(DataType.FLOAT).set_output(True).set_name("x")
    raw = torch.randn(2, 32).to(torch.float8_e4m3fn)
    ones = numpy.full((2, 1), 127, dtype=numpy.uint8)
    assert torch.equal(graph({"codes": raw.view(torch.uint8).numpy(), "scale": ones})["x"], raw.float())
    with pytest.raises(VariantPackError) as caught:
        graph({"codes": raw.view(torch.uint8), "scale": ones})
    assert caught.value.code == "DATA_TYPE", "torch can name the type, so its bytes are not taken for it"


def test_accumulated_output_must_be_given() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    rows = graph.symbol("M")
    a, dy = graph.tensor("a", (rows, 4)), graph.tensor("dy", (rows, 6))
    offsets = graph.tensor("offs", (2,), data_type=DataType.INT32)
    graph.grouped_matmul_wgrad(a, dy, offsets, accumulate=True).set_output(True).set_name("dw")
    pack = {"a": torch.randn(5, 4), "dy": torch.randn(5, 6), "offs": torch.tensor([5, 5], dtype=torch.int32)}
    with pytest.raises(VariantPackError) as caught:
        graph(pack)
    assert caught.value.code == "KEY_MISSING" and "old values" in str(caught.value)
    dw = torch.ones(2, 4, 6)
    out = graph({**pack, "dw": dw})
    assert out["dw"] is dw and torch.equal(dw[1], torch.ones(4, 6))
    torch.testing.assert_close(dw[0], 1 + pack["a"].t() @ pack["dy"], rtol=1e-5, atol=1e-5)


def test_inference_tensors_are_written_under_inference_mode_only(tools: Any) -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    graph.relu(graph.tensor("x", (4,))).set_output(True).set_name("y")
    x = torch.tensor([1.0, -1.0, 2.0, -2.0])
    with torch.inference_mode():
        mine = tools.poison(torch.empty(4))
        assert graph({"x": x})["y"].tolist() == [1, 0, 2, 0]
    with pytest.raises(VariantPackError) as caught:
        graph.execute({"x": x, "y": mine})
    assert caught.value.code == "INFERENCE_TENSOR" and tools.is_poison(mine)
    with torch.inference_mode():
        graph.execute({"x": x, "y": mine})
    assert mine.tolist() == [1, 0, 2, 0]


def test_symbol_that_no_buffer_binds() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    rows, columns = graph.symbol("M"), graph.symbol("N")
    x = graph.tensor("x", (rows * columns, 4))
    graph.relu(x).set_output(True).set_name("y")
    with pytest.raises(VariantPackError) as caught:
        graph({"x": torch.ones(6, 4)})
    assert caught.value.code == "SYMBOL_UNBOUND"


def test_column_windows_of_one_matrix_do_not_alias() -> None:
    graph = Graph(device="cpu", io_data_type=DataType.FLOAT)
    x = graph.tensor("x", (6, 8))
    graph.relu(x).set_output(True).set_name("left").set_stride((16, 1))
    graph.neg(x).set_output(True).set_name("right").set_stride((16, 1))
    both, value = torch.full((6, 16), float("nan")), torch.randn(6, 8)
    graph.execute({"x": value, "left": both[:, :8], "right": both[:, 8:]})
    assert torch.equal(both, torch.cat([value.relu(), -value], 1))
    with pytest.raises(VariantPackError) as caught:
        graph.execute({"x": value, "left": both[:, :8], "right": both[:, 4:12]})
    assert caught.value.code == "ALIASED"


def test_overlap_against_a_brute_force_of_elements() -> None:
    generator = torch.Generator().manual_seed(7)

    def bytes_of(t: torch.Tensor) -> set[int]:
        index = torch.arange(t.untyped_storage().nbytes() // 4).as_strided(t.shape, t.stride(), t.storage_offset())
        return set(index.flatten().tolist())

    memory, found = torch.zeros(400), 0
    for trial in range(500):
        views, extents = [], []
        for number in range(3):
            rows, columns, pitch = (
                int(torch.randint(lo, hi, (1,), generator=generator)) for lo, hi in ((1, 5), (1, 7), (7, 20))
            )
            start = int(torch.randint(0, 400 - (rows - 1) * pitch - columns, (1,), generator=generator))
            view = memory.as_strided((rows, columns), (pitch, 1), start)
            views.append(view)
            first = view.data_ptr()
            extents.append((first, first + 4 * ((rows - 1) * pitch + columns), number == 0, str(number), view))
        shared = any(bytes_of(views[0]) & bytes_of(v) for v in views[1:])
        clash = first_overlap(extents)
        assert clash is not None or not shared, f"trial {trial}: a shared element was missed"
        if clash is not None and not shared:  # only ranges that interleave with another pitch may be refused needlessly
            assert clash[0][4].stride(0) != clash[1][4].stride(0) or clash[0][4].shape[1] > 1, f"trial {trial}"
        found += shared
    assert 50 < found < 450, "the trials are neither all shared nor all apart"


def test_errors_name_the_line_that_declared_the_tensor(built: Any) -> None:
    graph, _, pack = built
    pack["dy"] = pack["dy"].float()
    with pytest.raises(VariantPackError) as caught:
        graph.execute(pack, _workspace(graph))
    assert re.search(r"conftest\.py:\d+", str(caught.value)), str(caught.value)
