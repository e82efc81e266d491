"""The samples' router, permutation and scale decoding, on their own."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def moe_data(load_sample):
    return load_sample("moe_data")


def test_the_default_text_is_long_and_real(moe_data):
    text = moe_data.read_text()
    assert len(text) > 100_000
    assert b"statement" in text


def test_a_file_is_read_as_bytes(moe_data, tmp_path):
    (tmp_path / "text").write_bytes(b"\xff\x00abc")
    assert moe_data.read_text(str(tmp_path / "text")) == b"\xff\x00abc"


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "multiple_of"), [(1, 4, 2, 256), (57, 8, 3, 16), (200, 5, 1, 1)]
)
def test_rows_are_grouped_by_expert_and_padded(moe_data, tokens, experts, top_k, multiple_of):
    seed = torch.seed() % 2**31
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))  # (T, L)
    routing = moe_data.route(logits, top_k, multiple_of)
    ends = routing.offsets.tolist()
    assert routing.offsets.dtype is torch.int32
    assert all(end % multiple_of == 0 for end in ends), f"seed {seed}"
    assert ends == sorted(ends)
    assert routing.rows == ends[-1]
    assert len(set(routing.slot.tolist())) == tokens * top_k, f"two choices share a row, seed {seed}"

    expert = torch.bucketize(routing.slot, routing.offsets.long(), right=True).view(tokens, top_k)  # (T, k)
    assert torch.equal(expert, logits.topk(top_k).indices), f"seed {seed}"
    torch.testing.assert_close(routing.prob.view(tokens, top_k), logits.topk(top_k).values.softmax(-1))


def test_combine_undoes_dispatch_forward_and_backward(moe_data):
    routing = moe_data.route(torch.randn(50, 6), 2, 32)
    x = torch.randn(50, 8, requires_grad=True)  # (T, H)
    rows = moe_data.dispatch(x, routing)  # (M, H)
    assert int(rows.any(1).sum()) == 100  # the rest is padding
    out = moe_data.combine(rows, routing)  # (T, H)
    assert torch.equal(out, 2 * x)
    out.backward(torch.ones_like(out))
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    prob = moe_data.row_prob(routing)  # (M,)
    torch.testing.assert_close(moe_data.combine(prob.unsqueeze(1), routing), torch.ones(50, 1))


@pytest.mark.parametrize("axis", [0, 1])
def test_scales_are_decoded_as_the_definition_says(moe_data, axis):
    """Codes and scales of the unfused kernel, decoded by the sample and by the float64 definition."""
    from opfuse.graph_ops import DataType, Graph

    g = Graph(io_data_type=DataType.FLOAT)
    x = g.tensor("x", dim=(256, 320))
    q, sf = g.block_scale_quantize(x, block_size=32, axis=axis, data_type=DataType.FP8_E4M3)
    q.set_name("q").set_output(True)
    sf.set_name("sf").set_output(True)
    g.block_scale_dequantize(q, sf).set_name("back").set_output(True).set_data_type(DataType.FLOAT)
    values = torch.randn(256, 320) * torch.logspace(-3, 3, 320)  # (M, N): scales differ along both axes
    values *= torch.logspace(-2, 2, 256).unsqueeze(1)
    out = g.build(device="cpu")({"x": values})
    decoded = moe_data.dequantize_mxfp8(out["q"], out["sf"], axis)  # (M, N)
    assert torch.equal(decoded, out["back"])
    relative = (decoded - values).norm() / values.norm()
    assert 0 < relative < 0.04


MISTAKES = {
    "no such file": (["no_such.txt"], "no_such.txt"),
    "a count of nothing": (["--tokens", "0"], "no whole number above 0"),
    "a count that is none": (["--experts", "few"], "no whole number above 0"),
    "a device that is not here": (["--device", "xpu:77"], "xpu:77"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ["fused_vs_unfused", "expert_parallel", "train_tiny_moe"])
def test_a_wrong_argument_is_named_without_a_traceback(name, mistake, load_sample, monkeypatch, capsys):
    given, word = MISTAKES[mistake]
    if name == "train_tiny_moe":
        given = [option.replace("--tokens", "--steps") for option in given]
    sample = load_sample(name)
    monkeypatch.setattr("sys.argv", [name, *given])
    with pytest.raises(SystemExit) as raised:
        sample.main()
    assert raised.value.code == 2 and word in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--hidden", "30"], ["--experts", "1"]])
def test_sizes_that_the_model_cannot_have_are_named(given, load_sample, monkeypatch, capsys):
    sample = load_sample("train_tiny_moe")
    monkeypatch.setattr("sys.argv", ["train_tiny_moe", *given])
    with pytest.raises(SystemExit):
        sample.main()
    assert " ".join(given) in capsys.readouterr().err
