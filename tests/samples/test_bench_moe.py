"""The benchmark of the frameworks' expert blocks: every arm computes the same, and its record is what it says."""

from __future__ import annotations

import json
import statistics
import sys

import pytest
import torch

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
    monkeypatch.setattr(blocks, "FUSION", {"fuse_rounding": True, "rest": "eager"})
    yield loaded
    torch.compiler.reset()


@pytest.fixture
def blocks(bench):
    return sys.modules["moe_blocks"]


def test_record(bench, tmp_path, monkeypatch, capsys):
    """Every arm of every framework runs, agrees with the others, and is written with its times."""
    shapes, record = tmp_path / "shapes.json", tmp_path / "record.json"
    shapes.write_text(json.dumps(SHAPES))
    monkeypatch.setattr(sys, "argv", ["bench_moe.py", "--device", "cpu", "--shapes-file", str(shapes), "--rounds", "2",
                                      "--workers", "0", "--json", str(record)])  # fmt: skip
    assert bench.main() == 0, capsys.readouterr().out
    found = json.loads(record.read_text())
    assert found["failed"] == []
    assert found["source"] == bench.source_sha256()
    assert {row["framework"] for row in found["rows"]} == set(ARMS)
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
    ratios = [row["arms"]["grouped_mm"]["both_ms"] / row["arms"]["opfuse"]["both_ms"] for row in found["rows"]]
    assert found["summary"]["all"]["grouped_mm_both"] == pytest.approx(statistics.geometric_mean(ratios))
    assert found["summary"]["all"]["grouped_mm_both_least"] == pytest.approx(min(ratios))
    assert set(found["summary"]) == {*ARMS, "all"}
    assert "grouped_mm_both" in capsys.readouterr().out


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
