"""Which weights of a live model are compressed in memory, and that the model stays what it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from neuzip.errors import UsageError
from neuzip.runtime import residency
from neuzip.runtime.residency import (
    MemoryUse,
    WeightUse,
    compress,
    compress_parameters,
    compressible,
    decompress_parameters,
    is_compressed,
    memory,
    require_places,
)
from neuzip.runtime.weights import AnsWeight, PackedWeight

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = torch.bfloat16
IDS = torch.arange(2 * 12).view(2, 12) * 7 % 512
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}  # fmt: skip


def llama(tied: bool = False) -> PreTrainedModel:
    return models.llama(**SIZES, tie_word_embeddings=tied)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=256, n_layer=2, n_head=4, n_positions=64))


def gpt_neox() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))


def opt() -> PreTrainedModel:
    sizes = {"vocab_size": 512, "hidden_size": 256, "ffn_dim": 320, "num_hidden_layers": 2}
    return OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, max_position_embeddings=64))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def qwen_moe() -> PreTrainedModel:
    sizes = SIZES | {"intermediate_size": 256}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **experts, shared_expert_intermediate_size=256))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama, tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "opt": opt,
    "mixtral": mixtral,
    "qwen_moe": qwen_moe,
}


def made(kind: str, device: torch.device | str = "cpu") -> PreTrainedModel:
    """A small bf16 model with the same random weights every time, its experts computed one by one."""
    torch.manual_seed(1)
    model = MODELS[kind]().to(device, BF16).eval()
    if kind in ("mixtral", "qwen_moe") and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, dense, by all their names."""
    return {
        name: p.dense() if isinstance(p, PackedWeight | AnsWeight) else p.detach()
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    mine, theirs = weights_of(model), weights_of(expected)
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        assert weight.dtype == theirs[name].dtype, name
        assert torch.equal(weight.view(torch.int16), theirs[name].view(torch.int16)), name
    assert len(list(model.parameters())) == len(list(expected.parameters())), "tied otherwise"


@torch.inference_mode()
def assert_same_results(model: PreTrainedModel, expected: PreTrainedModel, exact: bool) -> None:
    """The same logits to the last bit, or else as near to those in fp64."""
    ids = IDS.to(model.device)
    mine, theirs = model(ids).logits, expected(ids).logits
    if exact:
        assert torch.equal(mine, theirs)
        return
    reference = copy.deepcopy(expected).double()(ids).logits

    def error(logits: torch.Tensor) -> float:
        return ((logits - reference).norm() / reference.norm()).item()

    assert error(mine) <= 1.25 * error(theirs), f"{error(mine)} after {error(theirs)}"


# Which


class Pieces(nn.Module):
    """Parameters of all kinds, most of them large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256, dtype=BF16)
        self.small = nn.Linear(128, 128, dtype=BF16)
        self.single = nn.Linear(256, 256, dtype=torch.float32)
        self.fp16 = nn.Linear(256, 256, bias=False, dtype=torch.float16)
        self.conv1d = Conv1D(512, 256).to(BF16)
        self.embedding = nn.Embedding(512, 256, dtype=BF16)
        self.renormed = nn.Embedding(512, 256, max_norm=1.0, dtype=BF16)
        self.convolution = nn.Conv1d(64, 64, 64, dtype=BF16)
        self.experts = nn.Parameter(torch.zeros(4, 128, 128, dtype=BF16))
        self.positions = nn.Parameter(torch.zeros(1, 512, 256, dtype=BF16))
        self.pictures = nn.Parameter(torch.zeros(8, 16, 32, 32, dtype=BF16))
        self.bare = nn.Parameter(torch.zeros(512, 256, dtype=BF16))
        self.norm = nn.LayerNorm(1 << 16, dtype=BF16)


def test_parameters_are_found_by_their_use():
    assert compressible(Pieces()) == {
        "linear.weight": WeightUse(),
        "fp16.weight": WeightUse(),
        "conv1d.weight": WeightUse(transposed=True),
        "embedding.weight": WeightUse(looked_up=True),
        "experts": WeightUse(),
    }


def test_of_tied_weights_all_names_decide():
    pieces = Pieces()
    pieces.linear.weight = pieces.fp16.weight = nn.Parameter(torch.zeros(512, 256, dtype=BF16))
    assert compressible(pieces)["fp16.weight"] == WeightUse()
    pieces.embedding.weight = pieces.linear.weight
    found = compressible(pieces)
    assert (
        found["fp16.weight"]
        == found["embedding.weight"]
        == found["linear.weight"]
        == WeightUse(looked_up=True)
    )
    pieces.bare = pieces.linear.weight
    assert "linear.weight" not in compressible(pieces)


@models.needs_version_5
def test_ties_that_transformers_has_yet_to_make():
    with torch.device("meta"):
        model = llama(tied=True).to(BF16)
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    assert compressible(model)["lm_head.weight"] == WeightUse(looked_up=True)


def test_what_would_not_become_smaller_stays_dense():
    pieces = Pieces()
    random = torch.randint(-(1 << 15), 1 << 15, (256, 256), dtype=torch.int16).view(BF16)
    pieces.linear.weight = nn.Parameter(random)
    compress_parameters(pieces, "packed")
    assert not is_compressed(pieces.linear.weight)
    assert pieces.linear.weight.requires_grad
    assert is_compressed(pieces.fp16.weight)


def test_fp32_is_left_as_it_is():
    weight = torch.ones(256, 256)
    assert torch.equal(compress(weight, WeightUse(), "packed"), weight)


# That the model stays what it was


@pytest.mark.parametrize("kind", MODELS)
def test_a_packed_model_is_the_same_and_smaller(kind: str):
    if kind == "qwen_moe" and not models.HAS_VERSION_5:
        pytest.skip("transformers 4 has a matrix for each expert, too small to compress")
    model, expected = made(kind), made(kind)
    before = memory(model).total
    report = compress_parameters(model, "packed")
    assert report == memory(model)
    assert report.of("ans") == MemoryUse()
    assert report.total.weights == before.weights
    assert report.total.dense_bytes == before.stored_bytes
    assert report.of("packed").weights > 0.8 * before.weights
    assert report.of("packed").stored_bytes < 0.74 * report.of("packed").dense_bytes
    assert_same_weights(model, expected)
    assert_same_results(model, expected, exact=False)


def test_what_is_compressed_already_stays():
    model = made("llama")
    compress_parameters(model, "packed")
    before = [id(p) for p in model.parameters()]
    compress_parameters(model, "packed")
    assert [id(p) for p in model.parameters()] == before


def test_dense_again_it_trains():
    model, expected = made("llama, tied"), made("llama, tied")
    compress_parameters(model, "packed")
    decompress_parameters(model)
    assert memory(model) == memory(expected)
    assert all(p.requires_grad for p in model.parameters())
    assert_same_weights(model, expected)
    assert_same_results(model, expected, exact=True)


def test_ans_codes_products_and_packs_look_ups(device: torch.device, monkeypatch):
    """The interpreter, for which the CPU is a GPU, takes its time, so the weight is a small one."""
    monkeypatch.setattr(residency, "WORTH", 2.0)
    dense = nn.Linear(64, 128, dtype=BF16, device=device).weight
    product = compress(dense, WeightUse(), "ans")
    assert isinstance(product, AnsWeight) and not product.requires_grad
    look_up = compress(dense, WeightUse(looked_up=True), "ans")
    assert isinstance(look_up, PackedWeight) and look_up.exact
    for weight in (product, look_up):
        assert torch.equal(weight.dense().view(torch.int16), dense.detach().view(torch.int16))


# Where


@pytest.mark.parametrize(
    ("residency", "places", "message"),
    [
        ("ans", ["cpu"], "'ans' needs CUDA devices for all weights, not cpu"),
        ("ans", [0, "disk"], "'ans' needs CUDA devices for all weights, not cuda or disk"),
        ("packed", [0, "cpu"], "'packed' cannot spread weights over cpu and cuda"),
        ("packed", ["disk"], "'packed' cannot spread weights over disk"),
    ],
)
def test_places_that_will_not_do(residency: str, places: list[Any], message: str):
    with pytest.raises(UsageError, match=message):
        require_places(residency, places)


@pytest.mark.parametrize(
    ("residency", "places"),
    [
        ("dense", ["cpu", "disk"]),
        ("packed", ["cpu"]),
        ("packed", [0, "cuda:1"]),
        ("ans", [torch.device("cuda")]),
    ],
)
def test_places_that_will_do(residency: str, places: list[Any]):
    require_places(residency, places)


def test_a_live_model_has_to_be_where_its_residency_can():
    with pytest.raises(UsageError, match="needs CUDA devices"):
        compress_parameters(Pieces(), "ans")
    with pytest.raises(UsageError, match="`residency='small'`: there is no such"):
        compress_parameters(Pieces(), "small")


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["packed", "ans"])
@pytest.mark.parametrize("kind", MODELS)
def test_compressed_on_a_gpu(kind: str, residency: str):
    model, expected = made(kind, "cuda"), made(kind, "cuda")
    report = compress_parameters(model, residency)
    assert (report.of("ans").weights > 0) == (residency == "ans")
    assert report.total.stored_bytes < 0.8 * report.total.dense_bytes
    assert_same_weights(model, expected)
    assert_same_results(model, expected, exact=residency == "ans")


@pytest.mark.parametrize("place", ["cuda", 0, torch.device("cuda", 0)])
def test_a_card_that_cannot_run_the_kernels_is_refused(place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    residency.require_places("dense", [place])
    with pytest.raises(UsageError, match=r"Tesla T4 has the compute capability 7\.5, and 8\.0 is needed"):
        residency.require_places("packed", [place])
