"""The small language model: learns, agrees with plain torch step by step, and fails when a gradient is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

BOUND = 1e-3


def test_both_backends_learn_and_agree(run_sample, tmp_path):
    path = tmp_path / "record.json"
    done = run_sample("train_tiny_moe.py", "--steps", "60", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout
    assert done.stderr == "", "the progress bar is for terminals"
    record = json.loads(path.read_text())
    losses = {name: told["losses"] for name, told in record["backends"].items()}
    assert list(losses) == ["torch", "opfuse"] and not record["failures"]
    assert len(losses["torch"]) == len(losses["opfuse"]) == 60
    assert max(abs(a - b) for a, b in zip(losses["torch"], losses["opfuse"], strict=True)) <= BOUND
    for curve in losses.values():
        assert sum(curve[:6]) / 6 - sum(curve[-6:]) / 6 > 1.0


@pytest.mark.parametrize("rich", [True, False])
def test_a_progress_bar_shows_on_a_terminal(rich, samples_folder, environment, tmp_path):
    pty = pytest.importorskip("pty")
    if rich:
        pytest.importorskip("rich")
    hide = "" if rich else "sys.modules['rich'] = None; "
    code = f"import sys, runpy; {hide}sys.argv[1:] = ['--steps', '3', '--backend', 'torch', '--device', 'cpu']; "
    code += f"sys.path.insert(0, {str(samples_folder)!r}); runpy.run_module('train_tiny_moe', run_name='__main__')"
    terminal, stderr = pty.openpty()
    with open(tmp_path / "stdout", "w") as stdout:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=stdout, stderr=stderr,
                                   env={**environment, "TERM": "xterm", "COLUMNS": "120"})  # fmt: skip
    os.close(stderr)
    drawn = read_to_end(terminal)
    assert process.wait(60) == 0, drawn
    assert "training" in drawn
    assert "3/3" in drawn
    lines = (tmp_path / "stdout").read_text().splitlines()
    assert lines[-1] == "all checks passed"
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]


def read_to_end(terminal: int) -> str:
    """Everything that is drawn until the last writer leaves, which Linux reports as an error."""
    drawn = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(terminal, 4096):
            drawn += chunk
    os.close(terminal)
    return drawn.decode()


@pytest.fixture
def train(load_sample, monkeypatch):
    """The sample, and run(steps, *arguments) -> its exit status."""
    sample = load_sample("train_tiny_moe")

    def run(steps: int, *arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["train_tiny_moe.py", "--device", "cpu", "--steps", str(steps), *arguments])
        return sample.main()

    return sample, run


@pytest.mark.parametrize("backend", ["torch", "opfuse"])
def test_one_backend_alone(backend, train, tmp_path):
    path = tmp_path / "record.json"
    assert train[1](2, "--backend", backend, "--json", str(path)) == 0
    assert list(json.loads(path.read_text())["backends"]) == [backend]


def test_reports_its_speed(train, capsys):
    assert train[1](3) == 0
    printed = capsys.readouterr().out
    for backend in ("torch", "opfuse"):
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{backend}: ") and "tokens/s" in line]
        assert float(line.split()[1].replace(",", "")) > 100


def test_a_plot_without_matplotlib_is_refused_before_training(train, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(train[0].importlib.util, "find_spec", lambda name: None)
    assert train[1](1, "--plot", str(tmp_path / "losses.png")) == 2
    printed = capsys.readouterr()
    assert "matplotlib" in printed.err and not printed.out


def test_draws_both_curves(train, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "losses.png"
    assert train[1](3, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_draws_curves_that_were_written_on_another_machine(train, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"backends": {"torch": {"losses": [3.0, 2.0]}, "opfuse": {"losses": [3.0, 2.1]}}}))
    assert train[1](1, "--draw", str(path)) == 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_bfloat16_experts_of_another_size_agree(train, tmp_path):
    path = tmp_path / "record.json"
    sizes = ["--hidden", "32", "--intermediate", "96", "--experts", "3", "--sequences", "4", "--length", "48"]
    assert train[1](4, "--data-type", "bfloat16", "--json", str(path), *sizes) == 0
    report = json.loads(path.read_text())
    assert report["shape"]["experts"] == 3 and report["shape"]["data_type"] == "bfloat16" and not report["failures"]
    assert all(run["tokens_per_second"] > 10 for run in report["backends"].values())


def test_fails_on_a_wrong_derivative(train, monkeypatch, capsys):
    sample, run = train
    backward = sample.expert_mlp_backward
    monkeypatch.setattr(sample, "expert_mlp_backward", lambda s: backward(dataclasses.replace(s, act="situglu")))
    assert run(1) == 1
    assert "FAILED: gradient of w1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "parameter"),
    [("dx", "qkv.weight"), ("dw1", "w1"), ("db1", "b1"), ("dw2", "w2"), ("dprob", "router.weight")],
)
def test_fails_on_a_gradient_that_is_a_tenth_of_a_percent_off(name, parameter, train, monkeypatch, capsys):
    sample, run = train

    class Spoiled(sample.OpfuseExpertMLP):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            right = self.backward
            self.backward = lambda pack: {**(out := right(pack)), name: out[name] * 1.001}

    monkeypatch.setattr(sample, "OpfuseExpertMLP", Spoiled)
    assert run(1) == 1
    assert f"FAILED: gradient of {parameter}" in capsys.readouterr().err


def test_fails_when_the_loss_does_not_fall(train, monkeypatch, capsys):
    sample, run = train
    monkeypatch.setattr(sample, "LEARNING_RATE", 0.0)
    assert run(20) == 1
    assert "the loss fell from" in capsys.readouterr().err


def test_bfloat16_losses_are_compared_by_means_of_ten_steps(load_sample):
    sample = load_sample("train_tiny_moe")
    plain = [5.0 - 0.01 * i for i in range(30)]
    scattered = [loss + (0.3 if i == 12 else 0.0) for i, loss in enumerate(plain)]
    shifted = [loss + (0.1 if i >= 15 else 0.0) for i, loss in enumerate(plain)]
    bf16, float32 = sample.DataType.BFLOAT16, sample.DataType.FLOAT
    assert sample.compare_losses(plain, scattered, bf16) == []
    assert len(sample.compare_losses(plain, scattered, float32)) == 1
    assert sample.compare_losses(plain, shifted, bf16)[0].startswith("loss of steps 12 to 21: differs by 6.0e-02")
    assert len(sample.compare_losses([5.0, 4.0], [5.2, 4.2], bf16)) == 1
    assert len(sample.compare_losses([5.0, float("nan")], [5.0, 4.0], bf16)) == 1


def test_c87_c88_losses_repeat_bitwise(load_sample):
    """The combine is a view and a sum, the dispatch an expand and a copy: no scatter meets one index twice."""
    sample = load_sample("train_tiny_moe")
    expert_mlp = sample.OpfuseExpertMLP(torch.device("cpu"))
    curves = set()
    for _ in range(20):
        run = sample.Run(expert_mlp, torch.device("cpu"), seed=5)
        batches = sample.Batches(load_sample("moe_data").read_text(), torch.device("cpu"), seed=5)
        for _ in range(3):
            run.step(batches.next())
        curves.add(tuple(run.losses))
    assert len(curves) == 1


def test_one_build_serves_every_token_count(load_sample):
    sample = load_sample("train_tiny_moe")
    batches = sample.Batches(load_sample("moe_data").read_text(), torch.device("cpu"), seed=0)
    assert len({batches.next().shape[1] for _ in range(10)}) > 3
