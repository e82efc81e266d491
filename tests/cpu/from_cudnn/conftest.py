"""cuDNN graphs as users declare them, in cuDNN's own classes; nothing of libcudnn is needed."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

L, M, K, I = 4, 512, 64, 96
BOUNDARIES = (0, 128, 128, 384, 512)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cudnn():
    return pytest.importorskip("cudnn")


def close(seen, expected, error, where=""):
    """Largest error relative to the largest value, and cosine above 0.999."""
    seen, expected = seen.double().flatten(), expected.double().flatten()
    assert seen.shape == expected.shape, f"{where}: {seen.shape} {expected.shape}"
    top = expected.abs().max().clamp(min=1e-30)
    worst = float((seen - expected).abs().max() / top)
    assert worst <= error, f"{where}: {worst} > {error}"
    if top > 1e-30:
        assert torch.nn.functional.cosine_similarity(seen, expected, dim=0) > 0.999, where


def grouped(a, w, boundaries=BOUNDARIES):
    """(M, K) x (L, K, N) in float64."""
    out = torch.zeros(a.shape[0], w.shape[2], dtype=torch.float64)
    for g, (s, e) in enumerate(pairwise(boundaries)):
        out[s:e] = a[s:e].double() @ w[g].double()
    return out


def owner(boundaries=BOUNDARIES):
    return torch.bucketize(torch.arange(M), torch.tensor(boundaries[1:]), right=True)


def by_expert(x, boundaries=BOUNDARIES):
    return torch.stack([x[s:e].sum(0) for s, e in pairwise(boundaries)])


@pytest.fixture
def kit(cudnn):
    """Sizes, helpers, and `graph()`: a pygraph with BF16 io and FP32 arithmetic."""
    D = cudnn.data_type

    def graph(**options):
        return cudnn.pygraph(**{**dict(io_data_type=D.BFLOAT16, intermediate_data_type=D.FLOAT,
                                       compute_data_type=D.FLOAT),
                                **options})  # fmt: skip

    def rows(g, name, columns, data_type=None, rows=M):
        return g.tensor(name=name, dim=[1, rows, columns], data_type=data_type or D.BFLOAT16)

    def weights(g, name, k, n, data_type=None):
        return g.tensor(name=name, dim=[L, k, n], stride=[k * n, 1, k], data_type=data_type or D.BFLOAT16)

    def offsets(g, multiple=1, experts=L):
        t = g.tensor(name="first_token_offset", dim=[experts + 1, 1, 1], data_type=D.INT32)
        return t.set_alignment_value(multiple)

    boundaries = torch.tensor(BOUNDARIES, dtype=torch.int32).view(-1, 1, 1)
    seed = int(torch.seed() % 2**31)
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        L=L, M=M, K=K, I=I, D=D, NONE=cudnn.moe_grouped_matmul_mode.NONE, cudnn=cudnn, graph=graph, rows=rows,
        weights=weights, offsets=offsets, boundaries=boundaries, close=close, grouped=grouped, by_expert=by_expert,
        owner=owner, seed=seed, randn=lambda *shape: torch.randn(*shape, generator=generator),
    )  # fmt: skip
