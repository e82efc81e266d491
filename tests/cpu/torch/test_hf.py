"""Hugging Face transformers: real models with random weights learn real text, with the losses of eager experts."""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import pytest
import torch
from opfuse.graph_ops import GraphNotSupportedError, OpfuseError

transformers = pytest.importorskip("transformers")

from opfuse.graph_ops.torch import hf  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation  # noqa: E402

T, H, I, L, K = 19, 16, 24, 4, 2


@pytest.fixture(autouse=True)
def registered():
    """The implementations of these tests, and the registry as it was afterwards."""
    before = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    hf.register()
    hf.register("opfuse_padded", multiple_of=8)
    yield
    ALL_EXPERTS_FUNCTIONS._global_mapping.clear()
    ALL_EXPERTS_FUNCTIONS._global_mapping.update(before)


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=64, moe_intermediate_size=32, intermediate_size=64, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, output_router_logits=True, router_aux_loss_coef=0.01,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM, config


def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM, config


TEXT = "\n".join(topics[name] for name in sorted(topics)).encode()
"""The help texts that come with Python."""


def train(make, implementation: str, seed: int, steps: int = 20) -> list[float]:
    torch.manual_seed(seed)
    model_type, config = make()
    config._experts_implementation = implementation
    model = model_type(config)
    assert model.config._experts_implementation == implementation
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - 33, (4,), generator=generator).tolist()
        ids = torch.stack([text[start : start + 33] for start in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [qwen3_moe, mixtral])
def test_real_models_train_with_the_losses_of_eager(make, seed):
    eager = train(make, "eager", seed)
    assert eager[-1] < eager[0] - 0.5, f"the model learns nothing (seed {seed})"
    for implementation in ("opfuse", "opfuse_padded"):
        losses = train(make, implementation, seed)
        assert losses == pytest.approx(eager, abs=2e-4), f"{implementation}, seed {seed}"


def test_c87_c88_losses_repeat_bitwise(seed):
    assert len({tuple(train(mixtral, "opfuse", seed, steps=3)) for _ in range(8)}) == 1


class Experts(torch.nn.Module):
    """Experts as transformers' models declare them; the decorator says how the weights lie."""

    def __init__(self, config, transposed=False):
        super().__init__()
        self.num_experts, self.act_fn = L, torch.nn.SiLU()
        shapes = ((L, H, 2 * I), (L, I, H)) if transposed else ((L, 2 * I, H), (L, H, I))
        self.gate_up_proj, self.down_proj = (torch.nn.Parameter(torch.randn(*s) / s[2] ** 0.5) for s in shapes)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """As eager: a loop over tokens, in the layout that the class has; ids past the experts are skipped."""
        w1, w2 = self.gate_up_proj, self.down_proj
        if self.is_transposed:
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        total = []
        for x, experts, weights in zip(hidden_states, top_k_index.tolist(), top_k_weights):
            y = torch.zeros_like(x)
            for expert, weight in zip(experts, weights):
                if expert < L:
                    h = w1[expert] @ x
                    gate, up = (h[:I], h[I:]) if self.is_concatenated else (h[::2], h[1::2])
                    y = y + weight * (w2[expert] @ (self.act_fn(gate) * up))
            total.append(y)
        return torch.stack(total)


class Config:
    hidden_act = "silu"

    def __init__(self, implementation):
        self._experts_implementation = implementation


@pytest.mark.parametrize("concatenated", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("implementation", ["opfuse", "opfuse_padded"])
def test_every_weight_layout_and_ids_of_other_ranks(concatenated, transposed, implementation, seed, assert_close):
    kind = type("SomeExperts", (Experts,), {"forward": Experts.forward})
    kind = use_experts_implementation(kind, is_concatenated=concatenated, is_transposed=transposed)
    eager = kind(Config("eager"), transposed=transposed)
    fused = kind(Config(implementation), transposed=transposed)
    fused.load_state_dict(eager.state_dict())
    hidden = torch.randn(T, H)
    index, weights = torch.randint(0, L + 2, (T, K)), torch.rand(T, K)
    found = []
    for experts in (eager, fused):
        x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        y = experts(x, index, w)
        (y * torch.linspace(-1, 2, H)).sum().backward()
        found.append((y.detach(), x.grad, w.grad, experts.gate_up_proj.grad, experts.down_proj.grad))
    for name, one, two in zip(("y", "x", "weights", "gate_up", "down"), found[1], found[0]):
        assert_close(name, one, two, 1e-5)
    assert fused.gate_up_proj.grad.stride() == fused.gate_up_proj.stride()


@pytest.mark.parametrize(
    ("options", "word"),
    [(dict(has_bias=True), "biases"), (dict(has_gate=False), "no gate"), (dict(has_post_expert_norm=True), "norm")],
)
def test_experts_of_another_form_are_refused_by_name(options, word):
    kind = use_experts_implementation(type("OtherExperts", (Experts,), {"forward": Experts.forward}), **options)
    with pytest.raises(GraphNotSupportedError, match=word) as raised:
        kind(Config("opfuse"))(torch.randn(T, H), torch.zeros(T, K, dtype=torch.int64), torch.rand(T, K))
    assert raised.value.code == "EXPERTS_FORM"


def test_another_activation_or_gate_is_refused_by_name():
    kind = use_experts_implementation(type("GeluExperts", (Experts,), {"forward": Experts.forward}))
    experts = kind(Config("opfuse"))
    arguments = torch.randn(T, H), torch.zeros(T, K, dtype=torch.int64), torch.rand(T, K)
    experts.act_fn = torch.nn.GELU()
    with pytest.raises(GraphNotSupportedError, match="GELU"):
        experts(*arguments)
    own = type("OwnGate", (Experts,), {"forward": Experts.forward, "_apply_gate": lambda self, h: h[..., :I]})
    with pytest.raises(GraphNotSupportedError, match=r"OwnGate\._apply_gate"):
        use_experts_implementation(own)(Config("opfuse"))(*arguments)


def test_gpt_oss_is_refused_by_name():
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, experts_implementation="opfuse",
    )  # fmt: skip
    with pytest.raises(GraphNotSupportedError, match="biases, a gate of its own"):
        transformers.GptOssForCausalLM(config)(input_ids=torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("options", "code"),
    [(dict(recipe="fp8"), "RECIPE"), (dict(recipe="mxfp8"), "GROUP_ALIGN"), (dict(multiple_of=0), "MULTIPLE_OF")],
)
def test_options_that_no_model_could_use_are_refused_when_registering(options, code):
    with pytest.raises(OpfuseError) as raised:
        hf.register("opfuse_other", **options)
    assert raised.value.code == code and "opfuse_other" not in ALL_EXPERTS_FUNCTIONS


def test_a_transformers_without_the_registry_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(GraphNotSupportedError, match="an experts registry") as raised:
        hf.register()
    assert raised.value.code == "TRANSFORMERS"


@pytest.mark.parametrize("make", [qwen3_moe, mixtral])
def test_generation_and_past_keys_agree_with_eager(make, seed):
    """A prompt, then steps of one token through the cache, which route to few experts."""
    models = []
    for implementation in ("eager", "opfuse"):
        model_type, config = make()
        config.output_router_logits = False  # with a mask of padding its auxiliary loss fails in transformers
        config._experts_implementation = implementation
        models.append(model_type(config).eval())
    eager, fused = models
    assert eager.config._experts_implementation == "eager"
    fused.load_state_dict(eager.state_dict())
    ids = torch.randint(1, 256, (2, 12))
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(fused.generate(ids, **options), eager.generate(ids, **options)), f"seed {seed}"
    with torch.inference_mode():
        got, wanted = fused(input_ids=ids).logits, eager(input_ids=ids).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(reentrant, seed):
    model_type, config = mixtral()
    config._experts_implementation, config.use_cache = "opfuse", False
    model = model_type(config)
    ids, found = torch.randint(256, (2, 16)), []
    for checkpointed in (False, True):
        if checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable(**{f"{enable.__name__.removesuffix('_enable')}_kwargs": {"use_reentrant": reentrant}})
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_autocast_leaves_the_experts_the_type_of_their_weights(seed, assert_close):
    """As transformers' grouped_mm: float32 weights are float32 products, whatever the rows came as."""
    model_type, config = mixtral()
    config._experts_implementation = "opfuse"
    experts = model_type(config).model.layers[0].mlp.experts
    rows, index, weights = torch.randn(T, 32).bfloat16(), torch.randint(0, 4, (T, K)), torch.rand(T, K)
    with torch.autocast("cpu", torch.bfloat16):
        got = experts(rows, index, weights)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, experts(rows.float(), index, weights).bfloat16()), f"seed {seed}"


def test_a_half_precision_model_trains_in_half_precision(seed):
    model_type, config = mixtral()
    config._experts_implementation = "opfuse"
    model = model_type(config).to(torch.bfloat16)
    ids = torch.randint(256, (2, 16))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.dtype is torch.bfloat16 for p in model.parameters())


def test_a_sequence_compiles_without_a_break(seed):
    model_type, config = mixtral()
    config._experts_implementation = "opfuse"
    model = model_type(config)
    ids = torch.randint(256, (2, 16))
    fast = torch.compile(model.model.layers[0].mlp, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 16, 32)
    torch.testing.assert_close(fast(x), model.model.layers[0].mlp(x))
    assert model(input_ids=ids, labels=ids).loss.isfinite()
