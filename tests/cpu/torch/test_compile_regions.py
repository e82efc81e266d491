"""Regions of FX graphs: imported as they round, and weighed against what torch would do."""

from __future__ import annotations

import pytest
import torch
from opfuse.graph_ops import Graph
from opfuse.graph_ops.torch.compile.importer import Importer
from opfuse.graph_ops.torch.compile.regions import (
    drop_detaches,
    drop_whole_slices,
    find_regions,
    framework_seconds,
    outputs_of,
)
from opfuse.graph_ops.torch.compile.spellings import NotImportable
from opfuse.kernels import rates
from opfuse.kernels.arch import ARCHES
from plain_moe import BF16, SPELLINGS, step  # type: ignore[import-not-found]
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_tensor import unset_fake_temporarily


def test_the_rival_of_a_fusion_is_what_torch_would_do():
    """One pass for Inductor, one an op for eager; the matmul is the same in both."""
    graph = torch.fx.Graph()

    def node(name, target, args, *shape):
        made = graph.placeholder(name) if target is None else graph.call_function(target, args)
        made.meta["val"] = torch.empty(*shape, dtype=BF16, device="meta")
        return made

    rows, depth, half = 4096, 512, 256
    x, weight = node("x", None, (), rows, depth), node("w", None, (), 2, depth, 2 * half)
    offsets, scale = node("o", None, (), 2), node("s", None, (), rows, 2 * half)
    product = node("h", torch.ops.aten._grouped_mm.default, (x, weight, offsets), rows, 2 * half)
    one = node("a", torch.ops.aten.silu.default, (product,), rows, 2 * half)
    two = node("b", torch.ops.aten.mul.Tensor, (one, scale), rows, 2 * half)
    graph.output((two,))
    arch, size = ARCHES["sm90"], rows * 2 * half * 2
    read = (rows * depth + 2 * depth * 2 * half + 2) * 2 + size
    shallow = rates.factor(rates.GROUPED_MM, "sm90", depth)
    matmul = max(shallow * 2.0 * rows * depth * 2 * half / arch.bf16_flops, read / arch.memory_bytes_per_second)
    launch = arch.launch_seconds
    wanted = matmul + 2 * launch + 3 * size / arch.memory_bytes_per_second + launch
    assert framework_seconds((product, one, two), arch, one_pass=True) == pytest.approx(wanted)
    wanted = matmul + 2 * launch + 5 * size / arch.memory_bytes_per_second + 2 * launch
    assert framework_seconds((product, one, two), arch, one_pass=False) == pytest.approx(wanted)


class Regions:
    """A backend that compares every region, imported as it stands, with aten on the same random operands."""

    def __init__(self):
        self.compared: list[str] = []

    def __call__(self, gm, inputs):
        return aot_autograd(fw_compiler=self.look, bw_compiler=self.look)(gm, inputs)

    def look(self, gm, inputs):
        drop_detaches(gm.graph)
        drop_whole_slices(gm.graph)
        with unset_fake_temporarily():  # tensors made here are real ones
            for region in find_regions(gm.graph):
                self.compare(region)
        gm.recompile()
        return make_boxed_func(gm.forward)

    def compare(self, region):
        outputs = outputs_of(region)
        try:
            imported = Importer(region, outputs, fuse_rounding=False).build()
        except NotImportable:  # aten's padded halves, say, where the other half is not in the region
            return
        values = {node: self.operand(node) for node in imported.inputs}
        given = {f"in{i}": values[node] for i, node in enumerate(imported.inputs)}
        got = Graph.from_operation_graph(imported.graph, fused=False, device="cpu")(given)
        for node in region:
            if node not in values:
                everything = [n for n in node.all_input_nodes if n not in values]
                for missing in everything:  # zeros that padded halves are written into, and other operands left out
                    values[missing] = torch.zeros(missing.meta["val"].shape, dtype=missing.meta["val"].dtype)
                values[node] = node.target(*torch.fx.map_arg(node.args, values.__getitem__), **node.kwargs)
        for number, node in enumerate(outputs):
            one, two = got[f"out{number}"], values[node]
            assert one.dtype is two.dtype and one.stride() == two.stride(), node
            exact = 1e-5 if one.dtype is torch.float32 else 0.0  # float32 is what both compute in
            differing = float((~torch.isclose(one, two, rtol=exact, atol=exact)).float().mean())
            assert differing < 0.01, f"{node}: {differing:.1%} of the elements differ"
            self.compared.append(node.name)

    def operand(self, node):
        value = node.meta["val"]
        if value.dtype is torch.int32:
            return torch.tensor([8, 8, 20], dtype=torch.int32)
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return made.copy_(torch.randn(value.shape).to(value.dtype))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_regions_round_wherever_aten_does(spelling, seed):
    """A rounding fewer or more anywhere changes every tenth element or so."""
    model, regions = SPELLINGS[spelling](), Regions()
    step(torch.compile(model, backend=regions, fullgraph=True), 20, [8, 0, 12])
    assert len(regions.compared) >= 3, regions.compared
