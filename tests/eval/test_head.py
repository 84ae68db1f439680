"""Hidden states and heads of models of several kinds: the same losses as from the models' own logits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import needs_version_5
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    PhiConfig,
    PreTrainedModel,
)

from neuzip.errors import NeuzipError
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.measures.head import FormedLogits, HeadedModel, divergence, statistics
from neuzip.kernels.linear_cross_entropy import Head
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.runtime.hf.load import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig  # 4.57 has another name


pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT: dict[str, Any] = {
    "vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

CONFIGS: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "llama": (LlamaConfig(**SIZES), {}),
    "llama, tied": (LlamaConfig(**SIZES, tie_word_embeddings=True), {}),
    "gpt2": (GPT2Config(**GPT), {}),
    "gemma2": (Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.7), {"softcap": 0.7}),
    "cohere": (CohereConfig(**SIZES, logit_scale=0.0625), {"scale": 0.0625}),
    "cohere2": (Cohere2Config(**SIZES, logit_scale=0.3), {"scale": 0.3}),
    "granite": (GraniteConfig(**SIZES, logits_scaling=13.0), {"scale": 1 / 13}),
    "phi": (PhiConfig(**SIZES), {"bias": True}),
    "gpt-j": (GPTJConfig(**GPT, rotary_dim=4), {"bias": True}),
    "mamba": (MambaConfig(vocab_size=120, hidden_size=32, num_hidden_layers=2, state_size=4), {}),
}


def made(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of random weights, its logits far enough from zero for what is done to them to show."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 120, (2, 17), generator=torch.Generator().manual_seed(6))


def own_losses(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


@pytest.mark.parametrize("kind", CONFIGS)
def test_losses_are_those_of_the_models_own_logits(kind, ids):
    config, expected = CONFIGS[kind]
    model = made(config)
    headed = HeadedModel(model)
    assert headed.formed is None
    head = headed.heads(ids[:, :-1])
    cap = expected.get("softcap")
    assert head.softcap == (None if cap is None else pytest.approx(cap, rel=1e-6))
    assert head.scale == pytest.approx(expected.get("scale", 1.0), rel=1e-6)
    assert (head.bias is not None) == expected.get("bias", False)
    found = statistics(head, ids[:, 1:].flatten())
    own = own_losses(model, ids)
    assert own.std() > 0.02
    torch.testing.assert_close(found.nll, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite"])
def test_bf16(kind, ids):
    model = made(CONFIGS[kind][0]).bfloat16()
    headed = HeadedModel(model)
    assert headed.formed is None
    found = statistics(headed.heads(ids[:, :-1]), ids[:, 1:].flatten())
    torch.testing.assert_close(found.nll, own_losses(model, ids), rtol=0.02, atol=0.05)


def test_the_model_is_as_it_was_afterwards(ids):
    model = made(CONFIGS["llama"][0])
    before = model(input_ids=ids).logits
    HeadedModel(model).heads(ids)
    assert "forward" not in vars(model.get_output_embeddings())
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_forward_that_was_put_there_stays(ids):
    """As accelerate does for device maps."""
    model = made(CONFIGS["llama"][0])
    embedding = model.get_output_embeddings()
    usual = embedding.forward
    calls: list[int] = []

    def hooked(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return usual(x)

    embedding.forward = hooked
    headed = HeadedModel(model)
    assert headed.formed is None
    headed.heads(ids)
    assert embedding.forward is hooked
    assert len(calls) == 1  # the probe's own logits


def test_some_rows_only(ids):
    headed = HeadedModel(made(CONFIGS["llama"][0]))
    whole = headed.heads(ids)
    rows = torch.tensor([3, 4, 20])
    part = headed.predictions(ids, rows)
    assert isinstance(part, Head)
    assert torch.equal(part.hidden, whole.hidden[rows])
    assert headed.fed == 2 * ids.numel()
    assert headed.seconds > 0


# Models whose logits have to be formed


class Twisted(torch.nn.Module):
    """A model around another one whose logits are changed as a function says."""

    def __init__(self, model: PreTrainedModel, twist: Any) -> None:
        super().__init__()
        self.inner, self.twist = model, twist
        self.config, self.dtype = model.config, model.dtype

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, **inputs: Any) -> Any:
        output = self.inner(**inputs)
        output.logits = self.twist(output.logits)
        return output


def forbid(logits: torch.Tensor) -> torch.Tensor:
    """What a model does that never says some of its tokens."""
    logits[..., 7] = torch.finfo(logits.dtype).min
    return logits


def never(logits: torch.Tensor) -> torch.Tensor:
    """The same without a number."""
    logits[..., 7] = -torch.inf
    return logits


@pytest.mark.parametrize(
    ("twist", "reason"),
    [
        (forbid, "it does not work without them: index 7 is out of bounds"),
        (lambda z: z + torch.arange(120.0), "it does more with them than to scale"),
        (lambda z: z + 1.0, "it does something else with them"),
        (torch.sinh, "it does something else with them"),
        (lambda z: z.clamp(-1, 1), "it does something else with them"),
        (lambda z: never(z) if z.shape[-1] > 1 else z, "they are not those of its output embedding"),
        (lambda z: z.flip(-1), "they are not those of its output embedding"),
        (lambda z: z[..., :100], r"its logits are \(8, 100\)"),
    ],
)
def test_what_a_head_cannot_do_is_formed_and_said(twist, reason, ids):
    model: Any = Twisted(made(CONFIGS["llama"][0]), twist)
    headed = HeadedModel(model)
    assert headed.formed is not None and re.match(reason, headed.formed)
    with pytest.raises(NeuzipError, match="its logits have to be formed"):
        headed.heads(ids)
    predictions = headed.predictions(ids[:, :-1])
    assert isinstance(predictions, FormedLogits)
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits
    targets = ids[:, 1:].flatten() % logits.shape[-1]
    found = statistics(predictions, targets)
    z = logits.flatten(0, 1)
    expected = functional.cross_entropy(z, targets, reduction="none")
    torch.testing.assert_close(found.nll, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.argmax, z.argmax(1))
    assert torch.equal(found.rank, (z > z.gather(1, targets[:, None])).sum(1))


def test_a_model_without_an_output_embedding(ids, monkeypatch):
    model = made(CONFIGS["llama"][0])
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    assert HeadedModel(model).formed == "LlamaForCausalLM has no output embedding"


def test_formed_logits_are_worked_on_in_parts_and_compared_as_heads_are(ids, monkeypatch):
    one, another = made(CONFIGS["llama"][0]), made(CONFIGS["llama"][0])
    with torch.no_grad():
        for parameter in another.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    heads = [HeadedModel(m) for m in (one, another)]
    targets = ids[:, 1:].flatten()
    expected = divergence(*(m.heads(ids[:, :-1]) for m in heads), targets, top_k=10)
    for m in heads:
        m.form_logits("for a test")
    monkeypatch.setattr("neuzip.eval.measures.head.FORMED_BYTES", 4 * 120 * 5)
    found = divergence(*(m.predictions(ids[:, :-1]) for m in heads), targets, top_k=10)
    torch.testing.assert_close(found.kld, expected.kld, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found.other.nll, expected.other.nll)
    assert found.overlap is not None and expected.overlap is not None
    assert torch.equal(found.overlap, expected.overlap)
    same = divergence(*[heads[0].predictions(ids[:, :-1])] * 2, targets, top_k=10)
    assert not same.kld.any() and same.overlap is not None and bool((same.overlap == 10).all())


def test_formed_logits_of_minus_infinity_count_nothing():
    z, y = torch.randn(2, 9, 40, generator=torch.Generator().manual_seed(8)).mul_(4)
    target = torch.arange(9)
    rest = [FormedLogits(one.clone()) for one in (z, y)]
    masked = [FormedLogits(torch.cat([one, torch.full((9, 2), -torch.inf)], 1)) for one in (z, y)]
    found, expected = divergence(*masked, target), divergence(*rest, target)
    torch.testing.assert_close(found.kld, expected.kld)
    torch.testing.assert_close(found.base.entropy, expected.base.entropy)
    p = torch.distributions.Categorical(logits=z.double())
    q = torch.distributions.Categorical(logits=y.double())
    torch.testing.assert_close(found.base.entropy.double(), p.entropy(), rtol=1e-5, atol=1e-6)
    exact = torch.distributions.kl_divergence(p, q)
    torch.testing.assert_close(found.kld.double(), exact, rtol=1e-5, atol=1e-6)


def test_tiny_divergences_of_formed_logits():
    """Of the order of 1e-10 nats: in fp32 the definition gives noise, and often less than zero."""
    z = torch.randn(50, 300, generator=torch.Generator().manual_seed(8)).mul_(3)
    y = z + 2e-5 * torch.randn(z.shape, generator=torch.Generator().manual_seed(9))
    found = divergence(FormedLogits(z), FormedLogits(y), torch.zeros(50, dtype=torch.int64)).kld
    log_p, log_q = (x.double().log_softmax(1) for x in (z, y))
    expected = (log_p.exp() * (log_p - log_q)).sum(1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-15)
    assert bool((found >= 0).all())


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_formed_logits_that_are_broken_show(broken):
    z = torch.randn(3, 20, generator=torch.Generator().manual_seed(8))
    bad = z.clone()
    bad[1, 4] = broken
    target = torch.zeros(3, dtype=torch.int64)
    for pair in ((z, bad), (bad, z)):
        found = divergence(*map(FormedLogits, pair), target)
        assert found.kld.isfinite().tolist() == [True, False, True]
    assert statistics(FormedLogits(bad), target).entropy.isnan().tolist() == [False, True, False]


def test_one_formed_and_one_not_is_a_mistake(ids):
    one, another = (HeadedModel(made(CONFIGS["llama"][0])) for _ in range(2))
    one.form_logits("for a test")
    with pytest.raises(TypeError, match="of one model are formed"):
        divergence(one.predictions(ids), another.predictions(ids), ids.flatten())


# Weights that stay compressed


@needs_version_5
def test_packed_weights_go_on_as_they_are():
    headed = HeadedModel(load_model(CHECKPOINT, residency="packed"))
    dense = HeadedModel(load_model(CHECKPOINT))
    ids = torch.randint(0, 1000, (1, 21), generator=torch.Generator().manual_seed(7))
    assert headed.formed is None and dense.formed is None
    packed = headed.heads(ids[:, :-1])
    assert isinstance(packed.weight, PackedTensor)
    found, expected = (statistics(m.heads(ids[:, :-1]), ids[0, 1:]).nll for m in (headed, dense))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["dense", "packed", "ans"])
def test_residencies_on_a_gpu(residency):
    model = load_model(CHECKPOINT, device="cuda", residency=residency)
    headed = HeadedModel(model)
    assert headed.formed is None
    ids = torch.randint(0, 1000, (2, 65), generator=torch.Generator().manual_seed(7))
    found = statistics(headed.heads(ids[:, :-1]), ids[:, 1:].flatten())
    torch.testing.assert_close(found.nll, own_losses(model, ids.cuda()), rtol=0.02, atol=0.05)


def test_a_device_map():
    """accelerate puts its own forwards into the modules."""
    pytest.importorskip("accelerate")
    ids = torch.randint(0, 1000, (1, 21), generator=torch.Generator().manual_seed(7))
    model = load_model(CHECKPOINT, torch.float32, {"": "cpu"})
    headed = HeadedModel(model)
    assert headed.formed is None
    found = statistics(headed.heads(ids[:, :-1]), ids[0, 1:])
    torch.testing.assert_close(found.nll, own_losses(model, ids), rtol=1e-5, atol=1e-5)


def test_a_token_that_the_model_does_not_have():
    headed = HeadedModel(made(CONFIGS["llama"][0]))
    headed.require_tokens(torch.tensor([119]))
    with pytest.raises(NeuzipError, match="makes token 120, the weights have 120"):
        headed.require_tokens(torch.tensor([3, 120]))
