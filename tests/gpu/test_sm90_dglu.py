"""The Hopper grouped GEMM + dGLU kernel on a GPU, against float64 of the same inputs."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an sm_90 GPU", allow_module_level=True)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import harness  # type: ignore[import-not-found]  # noqa: E402
from opfuse.kernels.sm90 import host, tune  # noqa: E402
from opfuse.kernels.sm90.config import Activation, DgluConfig, Schedule, illegal  # noqa: E402

pytestmark = pytest.mark.gpu

BASE = DgluConfig(has_prob=True, has_dprob=True, schedule=tune.P128)
ROW_COL = replace(BASE, q_row_dtype="e4m3", q_col_dtype="e4m3")
# Plain outputs take any split; swizzled scales need 128-row groups, plain column scales 32-row ones.
ANY = [[256, 512], [0, 1, 300, 0, 77, 640, 129, 0], [0, 0, 1000], [1, 1, 1], [700, 0, 0], [512, 256, 0]]
ALIGNED_32 = [[64, 0, 32, 96], [32, 320, 0]]
ALIGNED_128 = [[256, 0, 512, 128], [128, 384, 0, 0, 128]]
FIT = {"any": ANY, "32": ALIGNED_32, "128": ALIGNED_128}

CASES: dict[str, DgluConfig] = {
    "base": BASE,
    "p192": replace(BASE, schedule=tune.P192),
    "p128_n": replace(BASE, schedule=tune.P128_N),
    "c256": replace(BASE, schedule=tune.C256),
    "c256x128": replace(BASE, schedule=Schedule(256, 128, False, 1, 2, 4, 2)),
    "p64x256": replace(BASE, schedule=Schedule(64, 256, True, 2, 1, 4, 4)),
    "no cluster": replace(BASE, schedule=Schedule(128, 128, True, 1, 1, 5, 4)),
    "plain": DgluConfig(schedule=tune.P128),
    "concatenated": replace(BASE, glu_layout="concatenated"),
    "interleaved1": replace(BASE, glu_layout="interleaved1"),
    "n-major": replace(BASE, b_major="n"),
    "discrete": replace(BASE, discrete_b=True),
    "discrete n-major": replace(BASE, discrete_b=True, b_major="n"),
    "geglu": replace(BASE, act=Activation("geglu")),
    "geglu other": replace(BASE, act=Activation("geglu", alpha=1.0, clamp_max=1.5, clamp_min=-0.5, offset=0.25)),
    "situglu": replace(BASE, act=Activation("situglu")),
    "situglu other": replace(BASE, act=Activation("situglu", beta1=1.25, beta2=2.0)),
    "alpha beta": replace(BASE, has_alpha=True, has_beta=True),
    "alpha once": replace(BASE, has_alpha=True, alpha_exponent=1),
    "recompute": replace(BASE, activation_dtype="bf16"),
    "recompute fp16": replace(BASE, activation_dtype="fp16", has_prob=False),
    "dbias": replace(BASE, dbias_dtype="fp32"),
    "dbias bf16 c256": replace(BASE, dbias_dtype="bf16", schedule=tune.C256),
    "amax": replace(BASE, has_amax=True),
    "amax c256": replace(BASE, has_amax=True, schedule=tune.C256),
    "fp16": replace(BASE, ab_dtype="fp16", c_dtype="fp16", d_dtype="fp16"),
    "mixed": replace(BASE, c_dtype="fp16", d_dtype="bf16", glu_layout="concatenated"),
    "c fp32": replace(BASE, c_dtype="fp32"),
    "c fp32 d fp16": replace(BASE, c_dtype="fp32", d_dtype="fp16", glu_layout="interleaved1"),
    "d fp32": replace(BASE, d_dtype="fp32"),
    "c d fp32": replace(BASE, c_dtype="fp32", d_dtype="fp32", glu_layout="interleaved1", schedule=tune.P96),
    "deterministic": replace(BASE, dbias_dtype="fp32", has_amax=True, deterministic=True),
    "row": replace(BASE, d_dtype="fp32", q_row_dtype="e4m3"),
    "row e5m2 plain": replace(BASE, d_dtype="fp32", q_row_dtype="e5m2", sf_swizzled=False, glu_layout="concatenated"),
    "col": replace(BASE, d_dtype="fp32", q_col_dtype="e4m3", schedule=tune.P96),
    "row col": replace(ROW_COL, d_dtype="fp32", schedule=tune.P96),
    "row col e5m2 plain": replace(
        BASE, d_dtype="fp32", q_row_dtype="e5m2", q_col_dtype="e5m2", sf_swizzled=False, glu_layout="concatenated",
        schedule=tune.P96,
    ),
    "codes alone": replace(ROW_COL, d_dtype=None, schedule=tune.P96),
    "everything": replace(
        ROW_COL, has_alpha=True, has_beta=True, dbias_dtype="fp32", has_amax=True, activation_dtype="bf16",
        schedule=tune.P64,
    ),
}  # fmt: skip


def splits(config: DgluConfig):
    quantized = config.q_row_dtype or config.q_col_dtype
    if quantized and config.sf_swizzled:
        return FIT["128"]
    return FIT["32"] if config.q_col_dtype else FIT["any"]


def random_config(seed: int) -> DgluConfig:
    """A legal configuration; draws again until one is."""
    r = random.Random(seed)
    while True:
        quantized = r.random() < 0.3
        pick = r.choice
        config = DgluConfig(
            ab_dtype=pick(["bf16", "bf16", "fp16"]), b_major=pick("kn"), discrete_b=r.random() < 0.25,
            glu_layout=pick(["interleaved32", "concatenated", "interleaved1"]),
            act=Activation(pick(["swiglu", "geglu", "situglu"]), alpha=pick([1.0, 1.702]), offset=pick([0.0, 1.0])),
            c_dtype=pick(["bf16", "bf16", "fp16", "fp32"]), d_dtype=pick(["bf16", "fp16", "fp32"]),
            has_prob=r.random() < 0.7, has_alpha=r.random() < 0.4, alpha_exponent=pick([1, 2]),
            has_beta=r.random() < 0.4, has_dprob=r.random() < 0.7,
            activation_dtype=pick([None, "bf16", "fp16"]), dbias_dtype=pick([None, None, "bf16", "fp32"]),
            has_amax=r.random() < 0.3, q_row_dtype=pick([None, "e4m3", "e5m2"]) if quantized else None,
            q_col_dtype=pick([None, "e4m3", "e5m2"]) if quantized else None, sf_swizzled=r.random() < 0.7,
            deterministic=r.random() < 0.2, schedule=pick(list(tune.SHIPPED.values())),
        )  # fmt: skip
        if not illegal(config):
            return config


RANDOM = [random_config(seed) for seed in range(int(os.environ.get("OPFUSE_RANDOM_CONFIGS", "200")))]


def _compile(config: DgluConfig) -> bytes:
    return host.export_object(host.compile_dglu(config))


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compiles every configuration of this file in parallel processes; objects travel as they would from a cache."""
    wanted = [c for c in dict.fromkeys([*CASES.values(), *RANDOM]) if c not in host._functions]
    if not wanted:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
        for config, data in zip(wanted, pool.map(_compile, wanted)):
            host.install(config, host.load_object(data))


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    config = CASES[name]
    for seed, sizes in enumerate(splits(config)):
        tail = 128 if config.q_row_dtype or config.q_col_dtype else 70
        for (K, N), rows_past in (((256, 384), 0), ((328, 416), tail)):
            harness.check(config, sizes, K, N, rows_past, seed)


@pytest.mark.parametrize("seed", range(len(RANDOM)))
def test_random_configuration(seed):
    config = RANDOM[seed]
    r = random.Random(seed)
    sizes = r.choice(splits(config))
    harness.check(config, sizes, r.choice([64, 200, 512]), r.choice([32, 256, 416]), r.choice([0, 128]), seed)


@pytest.mark.parametrize("experts", [64, 1024])
def test_many_experts_most_empty(experts):
    sizes = [0] * experts
    for i in range(0, experts, experts // 4):
        sizes[i] = 37 + i % 100
    harness.check(BASE, sizes, 128, 128)


def test_all_experts_empty():
    """C10: no tile at all; everything is zero."""
    config = CASES["deterministic"]
    t = harness.make(config, [0] * 5, 128, 128, tail=64)
    host.launch(config, **t)
    torch.cuda.synchronize()
    assert bool((t["dbias"] == 0).all()) and bool((t["amax"] == 0).all()) and bool((t["dprob"] == 0).all())
    assert bool((t["d"] == 0).all())


def test_offsets_past_the_rows_write_nothing_outside():
    """C11: a last offset beyond M; rows that exist come out right, and the memory behind every output stays."""
    config = CASES["recompute"]
    t = harness.make(config, [300, 212], 256, 384)
    guards = {}
    for name in ("dy", "c", "d", "activation", "dprob", "prob"):
        x = t[name]
        whole = torch.full((x.shape[0] + 64, *x.shape[1:]), harness.POISON, dtype=x.dtype, device="cuda")
        whole[: x.shape[0]] = x
        guards[name], t[name] = whole[x.shape[0] :], whole[: x.shape[0]]
    ref = harness.oracle(config, t)
    t["offsets"][1] = 100_000
    host.launch(config, **t)
    torch.cuda.synchronize()
    assert all(bool((x == harness.POISON).all()) for x in guards.values())
    assert harness.relative(t["d"], ref["d"]) < 3e-3
    assert harness.relative(t["activation"], ref["activation"]) < 3e-3


def test_no_rows():
    """C26: M == 0 is a no-op that leaves sums zero."""
    config = CASES["deterministic"]
    t = harness.make(config, [0, 0], 128, 128)
    host.launch(config, **t)
    assert bool((t["dbias"] == 0).all()) and bool((t["amax"] == 0).all())


@pytest.mark.parametrize("name", ["deterministic", "everything", "c256", "dbias bf16 c256"])
def test_twenty_repeats_are_bitwise_equal(name):
    config = CASES[name]
    t = harness.make(config, splits(config)[0], 512, 416)
    outputs = [k for k in t if k in ("d", "dprob", "activation", "dbias", "amax") or k.startswith(("q_", "sf_"))]
    first = None
    for _ in range(20):
        host.launch(config, **t)
        torch.cuda.synchronize()
        now = {k: t[k].clone() for k in outputs}
        first = first or now
        assert all(torch.equal(first[k].view(torch.uint8), now[k].view(torch.uint8)) for k in outputs)


def test_graph_replay_follows_changed_offsets():
    """C64, C75: captured without a synchronisation; replays read the offsets and weights that are there then."""
    config = CASES["base"]
    t = harness.make(config, [300, 212, 0, 256], 256, 384)
    stream = torch.cuda.Stream()
    host.launch(config, **t)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph, stream=stream):
            host.launch(config, **t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for sizes in ([768, 0, 0, 0], [1, 500, 200, 67], [0, 0, 0, 768]):
        t["offsets"].copy_(torch.tensor(sizes).cumsum(0).to(torch.int32))
        t["b"].mul_(-0.5)
        t["d"].fill_(harness.POISON)
        graph.replay()
        torch.cuda.synchronize()
        ref = harness.oracle(config, t)
        assert harness.relative(t["d"], ref["d"]) < 3e-3
        assert harness.relative(t["dprob"], ref["dprob"]) < 1e-4


def test_eight_threads_on_own_streams():
    """C68, C77: every thread's launch goes to its current stream."""
    config, wrong = CASES["base"], []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            t = harness.make(config, [100 + seed, 0, 156], 256, 256, seed=seed)
            for _ in range(10):
                host.launch(config, **t)
            stream.synchronize()
            error = harness.relative(t["d"], harness.oracle(config, t)["d"])
        if not error < 3e-3:
            wrong.append((seed, error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_views_with_an_offset():
    """C23: tensors that begin inside an allocation."""
    config = CASES["base"]
    t = harness.make(config, [200, 100], 256, 256)
    whole = {k: torch.cat([x[:8], x]) for k, x in t.items() if k in ("dy", "c", "d")}
    t |= {k: x[8:] for k, x in whole.items()}
    host.launch(config, **t)
    torch.cuda.synchronize()
    assert harness.relative(t["d"], harness.oracle(config, t)["d"]) < 3e-3


def test_rows_with_a_pitch():
    """dy, c and d may be columns of wider matrices."""
    config = CASES["base"]
    t = harness.make(config, [200, 100], 256, 256)
    for k in ("dy", "c", "d"):
        wide = torch.zeros(t[k].shape[0], t[k].shape[1] + 64, dtype=t[k].dtype, device="cuda")
        wide[:, : t[k].shape[1]] = t[k]
        t[k] = wide[:, : t[k].shape[1]]
    host.launch(config, **t)
    torch.cuda.synchronize()
    assert harness.relative(t["d"], harness.oracle(config, t)["d"]) < 3e-3


@pytest.mark.parametrize("name", ["base", "n-major"])
def test_square_weights_keep_their_major(name):
    """C22: N == K, where a wrong major would still fit."""
    harness.check(CASES[name], [130, 126], 256, 256)


@pytest.mark.parametrize("name", ["row", "row col"])
def test_special_values_quantize_to_the_bit(name):
    """Zero blocks, NaN and infinity in single elements, and huge and tiny magnitudes."""
    from opfuse.graph_ops.ir.dtypes import DataType
    from opfuse.kernels.reference.quantize import quantize_blocks

    config = CASES[name]
    t = harness.make(config, [256, 128], 64, 64)
    t["dy"][3] = 0
    t["dy"][5, 0], t["dy"][40, 0] = float("nan"), float("inf")
    t["dy"][64:96] *= 1e30
    t["dy"][128:160] *= 1e-30
    host.launch(config, **t)
    torch.cuda.synchronize()
    x = t["d"].cpu()
    for side in ("row", "col"):
        if f"q_{side}" not in t:
            continue
        along = x if side == "row" else x.T.contiguous()
        codes, scales = quantize_blocks(along, 32, DataType.FP8_E4M3, DataType.FP8_E8M0)
        if side == "col":
            codes, scales = codes.T, scales.T
        assert torch.equal(t[f"q_{side}"].cpu(), codes.contiguous())
        assert torch.equal(harness.stored_scales(config, t, side).cpu(), scales.contiguous())


def test_past_two_to_the_31_elements():
    """C60, C63: c and d of 2.4e9 elements, and weights of 3.7e9 of which only the last expert's are used."""
    config = CASES["base"]
    M, K, N = 600_000, 64, 2048
    t = {
        "dy": torch.randn(M, K, device="cuda", dtype=torch.bfloat16),
        "b": torch.randn(1, N, K, device="cuda", dtype=torch.bfloat16).transpose(1, 2),
        "offsets": torch.tensor([M], dtype=torch.int32, device="cuda"),
        "c": torch.randn(M, 2 * N, device="cuda", dtype=torch.bfloat16),
        "d": torch.empty(M, 2 * N, device="cuda", dtype=torch.bfloat16),
        "prob": torch.rand(M, device="cuda"), "dprob": torch.empty(M, device="cuda"),
        "workspace": torch.empty(host.workspace_bytes(config, 1, M, N), dtype=torch.uint8, device="cuda"),
    }  # fmt: skip
    host.launch(config, **t)
    torch.cuda.synchronize()
    tail = {k: t[k][-100:] for k in ("dy", "c", "prob")} | {"b": t["b"], "offsets": torch.tensor([100])}
    assert harness.relative(t["d"][-100:], harness.oracle(config, tail)["d"]) < 3e-3
    del t
    L, K, N = 64, 4096, 14336
    b = torch.empty(L, N, K, device="cuda", dtype=torch.bfloat16)
    b[-1].normal_().mul_(K**-0.5)
    small = harness.make(config, [0] * 63 + [100], 64, N)
    small["dy"] = torch.randn(100, K, device="cuda", dtype=torch.bfloat16)
    small["b"] = b.transpose(1, 2)
    host.launch(config, **small)
    torch.cuda.synchronize()
    assert harness.relative(small["d"], harness.oracle(config, small)["d"]) < 3e-3


def test_exported_object_is_what_ran():
    """Every configuration above was compiled in another process and came here as bytes."""
    assert all(config in host._functions for config in itertools.chain(CASES.values(), RANDOM))
