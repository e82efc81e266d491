"""Expert parallelism: two processes agree with one, whatever the routing, and a wrong gradient is noticed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch


def test_two_ranks_agree_with_one_process(samples_folder, environment, tmp_path):
    path = tmp_path / "record.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(samples_folder / "expert_parallel.py"), "--device", "cpu", "--tokens", "96", "--experts", "4",
               "--hidden", "32", "--intermediate", "48", "--repeats", "1", "--json", str(path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "all checks passed"
    rows = [line.split("rows per rank [")[1].split("]")[0].split(", ") for line in lines if "rows per rank" in line]
    assert all(int(a) + int(b) == 2 * 96 * 2 for a, b in rows)
    assert rows[2][1] == "0", "the last rank's experts get nothing"
    assert int(rows[0][0]) and int(rows[0][1])
    record = json.loads(path.read_text())
    assert (record["ranks"], record["backend"], record["checks_failed"]) == (2, "gloo", 0)
    assert [r["rows_per_rank"] for r in record["routings"]] == [[int(n) for n in pair] for pair in rows]
    for arm, runs in (("opfuse", "opfuse"), ("grouped_mm", "grouped_mm, here a loop over experts")):
        measured = [r["arms"][arm] for r in record["routings"]]
        assert [m["runs"] for m in measured] == [runs] * 3
        assert all(m["difference"] < 2e-5 and m["milliseconds"] > 0 for m in measured)


@pytest.fixture
def run(load_sample, monkeypatch):
    """The sample, and run(*arguments) -> its exit status, in this process as the only rank."""
    sample = load_sample("expert_parallel")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["expert_parallel.py", "--device", "cpu", "--tokens", "40", "--hidden", "16",
                                         "--intermediate", "32", "--repeats", "1", *arguments])  # fmt: skip
        return sample.main()

    return sample, call


@pytest.mark.parametrize("data_type", ["float32", "bfloat16"])
def test_one_rank_needs_no_launcher(data_type, run, capsys):
    assert run[1]("--data-type", data_type) == 0
    assert "all checks passed" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [1.001, float("nan")])
@pytest.mark.parametrize("arm", ["opfuse", "grouped_mm"])
def test_fails_on_a_result_that_is_a_tenth_of_a_percent_off(arm, factor, run, monkeypatch, capsys):
    sample, call = run
    experts = sample.ARMS[arm]
    monkeypatch.setitem(sample.ARMS, arm, lambda *given: experts(*given) * factor)
    assert call() == 1
    failures = capsys.readouterr().err
    assert f"FAILED: as the router says: {arm}: y on rank 0" in failures
    assert {line.split(": ")[2] for line in failures.splitlines()} == {arm}, "the other arm is right"


def test_arms_take_turns_step_by_step(run, monkeypatch):
    sample, call = run
    order, step = [], sample.run_step
    monkeypatch.setattr(sample, "run_step", lambda model, *given: order.append(model.arm) or step(model, *given))
    assert call("--repeats", "2", "--data-type", "bfloat16") == 0
    assert order == ["opfuse", "grouped_mm"] * 6, "checked, then timed twice, in each of two routings"


def test_one_arm_alone(run, capsys):
    assert run[1]("--arms", "opfuse") == 0
    assert "grouped_mm" not in capsys.readouterr().out


def test_experts_that_ranks_cannot_share_are_refused(run, capsys):
    assert run[1]("--experts", "1") == 2
    assert "at least 2" in capsys.readouterr().err


def test_the_exchange_is_its_own_derivative_backwards(run, monkeypatch):
    sample, _ = run
    with sample.process_group("cpu"):
        rows = torch.randn(5, 3, requires_grad=True)
        out = sample._AllToAll.apply(rows, [5], [5])
        upstream = torch.randn(5, 3)
        out.backward(upstream)
    assert torch.equal(out, rows) and torch.equal(rows.grad, upstream)
