"""The main job: runs as a user would run it, and fails when a gradient is wrong."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

SMALL = ("--tokens", "160", "--experts", "3", "--hidden", "64", "--intermediate", "96", "--repeats", "1")


@pytest.mark.parametrize("act", ["swiglu", "geglu", "situglu"])
def test_every_activation_agrees_with_plain_torch(act, run_sample):
    done = run_sample("fused_vs_unfused.py", *SMALL, "--act", act)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("all checks passed")
    for name in ("forward", "backward", "backward to MXFP8"):
        for arch in ("sm90", "sm100"):
            assert f"=== {name} on {arch}" in done.stdout
        assert re.search(rf"^{name}: torch\.\w+(, torch\.\w+)+$", done.stdout, re.MULTILINE), "the plan of this machine"
    for name in ("h", "act", "y", "dx", "dw1", "db1", "dw2", "dprob"):
        assert re.search(rf"^{name} +(\d\.\d\de[+-]\d\d *){{6}}$", done.stdout, re.MULTILINE), name
    assert len(re.findall(r"^\w+ +q_(?:row|col) +[\d.]+ dB", done.stdout, re.MULTILINE)) == 4
    assert re.search(r"^planned +[\d.]+ ms", done.stdout, re.MULTILINE)
    assert re.search(r"peak memory of this process: \d+ MiB", done.stdout)
    on_sm100 = done.stdout.split("=== backward on sm100")[1].split("===")[0]
    assert ("FUSED cudnn.grouped_gemm_dglu.bf16" in on_sm100) == (act != "situglu")
    assert ("ACT: observed act = 'situglu'" in on_sm100) == (act == "situglu")


def test_float32_agrees_with_plain_torch(run_sample):
    done = run_sample("fused_vs_unfused.py", *SMALL, "--data-type", "float32")
    assert done.returncode == 0, done.stdout + done.stderr
    errors = re.findall(r"^(?:h|act|y|d\w+) .*", done.stdout, re.MULTILINE)
    assert len(errors) == 8
    assert all(float(error) < 1e-5 for line in errors for error in line.split()[1:])


def test_reads_the_file_it_is_given(run_sample, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 3)
    done = run_sample("fused_vs_unfused.py", str(tmp_path / "text.txt"), *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("127 bytes of text")


def test_says_that_a_text_is_too_short(load_sample, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("no")
    monkeypatch.setattr("sys.argv", ["fused_vs_unfused.py", str(tmp_path / "text.txt"), "--device", "cpu"])
    assert load_sample("fused_vs_unfused").main() == 2
    assert "at least 3" in capsys.readouterr().err


def test_fails_on_another_derivative(load_sample, monkeypatch, capsys):
    sample = load_sample("fused_vs_unfused")
    backward = sample.GRAPHS["backward"]
    monkeypatch.setitem(sample.GRAPHS, "backward", lambda s: backward(dataclasses.replace(s, act="situglu")))
    monkeypatch.setattr("sys.argv", ["fused_vs_unfused.py", "--device", "cpu", *SMALL])
    assert sample.main() == 1
    printed = capsys.readouterr()
    assert set(re.findall(r"FAILED: (\w+), planned", printed.err)) == {"dx", "dw1", "db1", "dprob"}
    assert "all checks passed" not in printed.out


@pytest.mark.parametrize(
    "name", ["h", "act", "y", "dx", "dw1", "db1", "dw2", "dprob", "q_row", "sf_row", "q_col", "sf_col"]
)
def test_fails_on_one_output_that_is_slightly_off(name, load_sample, monkeypatch, capsys):
    """A hundredth of a percent in float32; a scale or its code in the wrong place in MXFP8."""
    sample = load_sample("fused_vs_unfused")
    run_layer = sample.run_layer

    def spoiled(graphs, layer):
        out = run_layer(graphs, layer)
        if name.startswith(("q_", "sf_")):
            return {**out, name: out[name].view(torch.uint8).roll(1, 0).view(out[name].dtype)}
        return {**out, name: out[name] * 1.0001}

    monkeypatch.setattr(sample, "run_layer", spoiled)
    monkeypatch.setattr("sys.argv", ["fused_vs_unfused.py", "--device", "cpu", "--data-type", "float32", *SMALL])
    assert sample.main() == 1
    failed = set(re.findall(r"FAILED: (\w+), planned", capsys.readouterr().err))
    assert failed == {name.replace("sf_", "q_")}
