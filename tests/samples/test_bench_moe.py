"""The benchmark of the frameworks' expert blocks: every arm computes the same, and its record is what it says."""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import sys

import pytest
import torch
from opfuse.graph_ops.target import as_arch
from torch._subclasses.fake_tensor import FakeTensorMode

SHAPES = {"shapes": [{"name": "tiny", "L": 4, "M": 128, "H": 32, "I": 64}]}
ARMS = {
    "hf": {"eager", "grouped_mm", "compile", "opfuse"},
    "torchtitan": {"eager", "grouped_mm", "compile", "opfuse", "opfuse_mlp"},
    "megatron": {"eager", "grouped_mm", "compile", "opfuse"},
}


@pytest.fixture
def bench(load_sample, monkeypatch):
    """The benchmark, its compiled arms without Inductor, whose C++ compiler would take a minute."""
    loaded = load_sample("bench_moe")
    blocks = sys.modules["moe_blocks"]
    monkeypatch.setattr(blocks, "COMPILER", {"backend": "aot_eager"})
    monkeypatch.setattr(blocks, "FUSION", {"rest": "eager"})
    yield loaded
    torch.compiler.reset()


@pytest.fixture
def blocks(bench):
    return sys.modules["moe_blocks"]


def test_record(bench, tmp_path, monkeypatch, capsys):
    """Every arm of every framework that is here runs, agrees with the others, and is written with its times."""
    here = [f for f in ARMS if f != "hf" or importlib.util.find_spec("transformers")]  # for Python 3.10 there is none
    shapes, record = tmp_path / "shapes.json", tmp_path / "record.json"
    shapes.write_text(json.dumps(SHAPES))
    monkeypatch.setattr(sys, "argv", ["bench_moe.py", "--device", "cpu", "--shapes-file", str(shapes), "--rounds", "2",
                                      "--workers", "0", "--json", str(record),
                                      "--frameworks", ",".join(here)])  # fmt: skip
    assert bench.main() == 0, capsys.readouterr().out
    found = json.loads(record.read_text())
    assert found["failed"] == []
    assert found["source"] == bench.source_sha256()
    assert {row["framework"] for row in found["rows"]} == set(here)
    for row in found["rows"]:
        assert {key: row[key] for key in ("L", "M", "H", "I")} == {"L": 4, "M": 128, "H": 32, "I": 64}
        assert set(row["arms"]) == ARMS[row["framework"]]
        for arm in row["arms"].values():
            assert min(arm["forward_ms"], arm["backward_ms"]) > 0
            assert arm["both_ms"] >= max(arm["forward_ms"], arm["backward_ms"])
            assert arm["peak_gib"] is None  # known on GPUs only
        assert set(row["dglu"]) == {"grouped_mm_ms", "opfuse_ms"}
        assert row["dglu_plan"] == "unfused"  # on a CPU
        assert 0 < max(row["difference"].values()) < bench.BOUND
        if row["framework"] == "torchtitan":
            assert (row["compiled"]["graphs"], row["compiled"]["ran"]) == (0, 0)
            assert any("nothing of it fuses on cpu" in reason for reason in row["compiled"]["left"])
        else:
            assert row["compiled"] is None, "opfuse is no compiler's backend there"
    ratios = [row["arms"]["grouped_mm"]["both_ms"] / row["arms"]["opfuse"]["both_ms"] for row in found["rows"]]
    assert found["summary"]["all"]["grouped_mm_both"] == pytest.approx(statistics.geometric_mean(ratios))
    assert found["summary"]["all"]["grouped_mm_both_least"] == pytest.approx(min(ratios))
    assert set(found["summary"]) == {*here, "all"}
    assert "grouped_mm_both" in capsys.readouterr().out


@pytest.fixture
def as_sm90(monkeypatch):
    """Decisions of torch.compile's backend are taken as on an sm90 GPU; what it puts in still runs on the CPU."""
    rewrite = importlib.import_module("opfuse.graph_ops.torch.compile.rewrite")
    monkeypatch.setattr(rewrite, "arch_of_device", lambda device: as_arch("sm90"))


KERNELS = {"forward": ["sm90.grouped_gemm_glu"], "backward": ["sm90.grouped_gemm_dglu"]}
LONE = {"forward": {"sm90.grouped_gemm"}, "backward": {"sm90.grouped_gemm", "sm90.grouped_gemm_wgrad"}}
"""What the products beside no GLU run by."""


def test_the_compiled_block_fuses_and_its_record_says_so(bench, blocks, as_sm90):
    """Rows as many, to the weights, as in qwen3-30b-ep8. What is told is what runs."""
    block = blocks.BLOCKS["torchtitan"](blocks.Shape("", 4, 4096, 64, 32), torch.device("cpu"))
    arm = block.arms["opfuse"]
    found = bench.told(block.explained(), arm, block.dy)
    assert {part: found[part][:1] for part in KERNELS} == KERNELS
    assert all(set(found[part][1:]) <= LONE[part] for part in LONE)
    assert found["graphs"] == found["ran"] >= 2 and len(found["merged"]) == 1
    got, wanted = bench.run(arm, block.dy), bench.run(block.arms["eager"], block.dy)
    assert max(bench.difference(got[name], wanted[name]) for name in wanted) < bench.BOUND


@pytest.mark.parametrize("name", ["qwen3-30b-ep8", "sonicmoe-fine", "deepseek-v3-ep32", "mixtral-8x7b"])
def test_the_compiled_block_fuses_at_the_shapes_that_are_measured(bench, blocks, as_sm90, name):
    """The graphs of those sizes, with no numbers in them."""
    (shape,) = bench.read_shapes(str(bench.HERE / "shapes.json"), name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = blocks.BLOCKS["torchtitan"](shape, torch.device("cpu")).explained()
    kernels = {part: [s.kernel for r in found.regions if r.part == part and r.replaced for s in r.plan.fused_steps]
               for part in KERNELS}  # fmt: skip
    assert {part: names[:1] for part, names in kernels.items()} == KERNELS, str(found)
    assert {part: set(names[1:]) for part, names in kernels.items()} == LONE, str(found)
    assert [m.copies for m in found.merges] == ["nothing"]


def test_an_arm_that_differs_is_an_error(bench, blocks, tmp_path, monkeypatch, capsys):
    """Its row is left out, the message names arm and gradient, and the exit status tells."""
    loop = blocks.megatron_loop
    monkeypatch.setattr(blocks, "megatron_grouped", lambda **given: loop(**{**given, "prob": 1.1 * given["prob"]}))
    shapes, record = tmp_path / "shapes.json", tmp_path / "record.json"
    shapes.write_text(json.dumps(SHAPES))
    monkeypatch.setattr(sys, "argv", ["bench_moe.py", "--device", "cpu", "--shapes-file", str(shapes), "--rounds", "1",
                                      "--workers", "0", "--frameworks", "megatron", "--json", str(record)])  # fmt: skip
    assert bench.main() == 1
    found = json.loads(record.read_text())
    assert found["rows"] == [] and found["summary"] == {}
    (failure,) = found["failed"]
    assert "megatron, tiny, arm grouped_mm" in failure and "'y'" in failure and "'w2'" in failure


@pytest.mark.parametrize("top_k_of", [(8, 2), (12, 3), (16, 4), (64, 8), (128, 8)])
def test_every_expert_is_chosen_as_often(blocks, top_k_of):
    experts, top_k = top_k_of
    shape = blocks.Shape("", experts, 32 * experts, 8, 8)
    assert shape.top_k == top_k
    chosen = blocks.balanced_choice(shape, torch.device("cpu"))
    assert chosen.shape == (32 * experts // top_k, top_k)
    assert torch.equal(chosen.flatten().bincount(), torch.full((experts,), 32))
    assert all(len(set(one)) == top_k for one in chosen.tolist())
    assert not torch.equal(chosen, blocks.balanced_choice(shape, torch.device("cpu")))


def test_stages_are_timed_apart_and_together(bench):
    """A stage gets what the one before returned; the last number is their sum."""
    seen = []
    stages = {"a": ((lambda _: 3), (lambda x: seen.append(x)))}
    ((first, second, both),) = bench.rounds_of(stages, {"a": 1}, torch.device("cpu")).values()
    assert seen == [3, 3]  # one round that is not counted
    assert first > 0 and second > 0 and both == pytest.approx(first + second)
