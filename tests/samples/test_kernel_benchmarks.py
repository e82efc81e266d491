"""The benchmarks of the Hopper kernels, as far as a machine without a GPU can tell: every arm computes the same task,
floors count what the graph moves, and reports say what is in the record."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from opfuse.graph_ops import DataType, Graph
from opfuse.graph_ops.planner import make_plan
from opfuse.kernels.arch import ARCHES

NAMES = {
    "bench_dglu": ("DgluBenchmark", "dglu_support"), "bench_glu": ("GluBenchmark", "glu_support"),
    "bench_gemm": ("GemmBenchmark", "gemm_support"), "bench_wgrad": ("WgradBenchmark", "wgrad_support"),
}  # fmt: skip
SAMPLES = Path(__file__).parents[2] / "samples"
SHAPES = json.loads((SAMPLES / "shapes.json").read_text())["shapes"]


@pytest.fixture
def shared(load_sample):
    return load_sample("kernel_benchmark")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def benchmark_of(load_sample, name):
    return getattr(load_sample(name), NAMES[name][0])()


def declared(benchmark: Any, shape: Any, **options: Any) -> Graph:
    graph = Graph(io_data_type=DataType.BFLOAT16, intermediate_data_type=DataType.FLOAT, **options)
    benchmark.declare(graph, shape)
    return graph


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: row["name"])
def test_the_graph_that_is_timed_runs_the_fused_arm(benchmark_of, shared, name, row):
    shape = shared.Shape(**row)
    (step,) = make_plan(declared(benchmark_of, shape, arch="sm90").operation_graph(), ARCHES["sm90"]).steps
    support = importlib.import_module(f"opfuse.kernels.hopper.{NAMES[name][1]}")
    assert step.match is not None
    assert support.scheduled(step.match.problem) == benchmark_of.scheduled(benchmark_of.configs["fused"], shape)


def test_the_floor_counts_every_matrix_once(benchmark_of, shared, name):
    shape = shared.Shape("small", L=6, M=512, H=192, I=96)
    flops, nbytes = benchmark_of.work(shape, shape.L)
    tensors = declared(benchmark_of, shape, arch="sm90").operation_graph().tensors.values()
    matrices = [t for t in tensors if t.data_type is DataType.BFLOAT16 and not t.is_virtual]
    sizes = [torch.Size(t.dim).numel() for t in matrices]
    assert nbytes == 2 * sum(sizes)
    assert flops == 2 * shape.M * shape.H * benchmark_of.product_columns(shape)
    # Weights of experts without rows are not read; their gradients are written.
    spared = 0 if name == "bench_wgrad" else 2 * 4 * shape.H * benchmark_of.product_columns(shape)
    assert benchmark_of.work(shape, 2)[1] == nbytes - spared
    assert shared.floor_ms(flops, 0, dense_ms=2.0, copy=1.0) == pytest.approx(flops / 8192**3)
    assert shared.floor_ms(0, 3 * 10**9, dense_ms=2.0, copy=1.5e12) == pytest.approx(2.0)


def test_what_is_compiled_beside_computes_the_graph(benchmark_of, shared):
    if not benchmark_of.rivals:
        pytest.skip("nothing is compiled beside it")
    shape = shared.Shape("small", L=2, M=512, H=64, I=96)
    g = torch.Generator().manual_seed(seed := torch.seed() % 2**31)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=g).to(torch.bfloat16)

    columns = benchmark_of.product_columns(shape)
    operand, prob = randn(shape.M, shape.H), torch.rand(shape.M, generator=g) + 0.25
    b = (randn(shape.L, columns, shape.H) / shape.H**0.5).transpose(1, 2)
    offsets = torch.tensor(shared.group_sizes("uniform", shape.L, shape.M)).cumsum(0).to(torch.int32)
    given = {benchmark_of.operand: operand, "b": b, "offsets": offsets, "prob": prob}
    given |= {"c": randn(shape.M, 2 * shape.I)} if "c" in benchmark_of.beside else {}
    wanted = declared(benchmark_of, shape).build(device="cpu")(given)
    product = torch.cat([rows @ b[i] for i, rows in enumerate(operand.split(256))])
    rivals = {n: f(product, *(given[k] for k in benchmark_of.beside)) for n, f in benchmark_of.rivals.items()}
    for arm, found in rivals.items():
        found = found if isinstance(found, tuple) else (found,)
        for output, expected in zip(found, (wanted[n] for n in ("d", "dprob") if n in wanted), strict=False):
            error = (output.double() - expected.double()).norm() / expected.double().norm()
            assert error < 8e-3, (arm, seed)  # the product of the dGLU rounds in these arms, and not in the graph


@pytest.mark.parametrize("split", ["uniform", "zipf", "empty"])
def test_groups_share_all_rows(shared, split):
    for row in SHAPES:
        sizes = shared.group_sizes(split, row["L"], row["M"])
        assert sum(sizes) == row["M"] and all(size >= 0 and size % 256 == 0 for size in sizes)
        assert (0 in sizes) is (split == "empty") or split == "zipf"


def test_reports_tell_the_record(benchmark_of):
    arms = ("gmm", *benchmark_of.configs, *benchmark_of.rivals, "floor")
    rows = [
        {"name": shape, "split": split, "L": 4, "M": 8192, "quack": None, "unfused": None}
        | {arm: factor * (1.5 if split == "zipf" else 1.0) * (0.5 if arm == "fused" else 1.0) for arm in arms}
        | {"gmm_beside_compiled": factor * (1.2 if split == "zipf" else 0.8)}  # the clock of their rounds was higher
        for shape, factor in (("one", 1.0), ("two", 4.0))
        for split in ("uniform", "zipf")
    ]
    told = benchmark_of.summary(rows)
    assert "fused/gmm 0.500" in told and "quack" not in told
    assert ("compiled/fused 2.500" in told) is ("compiled" in benchmark_of.rivals)
    assert "largest fused/gmm 0.500" in told and "gmm 1.500 (most 1.500, one)" in told
    assert "fused 0.500" in benchmark_of.line(rows[0]) and "launch" not in benchmark_of.line(rows[0])
    assert "launch 9.0 us" in benchmark_of.line(rows[0] | {"launch_us": 9.0, "execute_us": 12.0})
