"""Experts of transformers' models coded by rANS: from a pool, in CUDA graphs, with codes on the host."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from ans_codes import ans_experts
from models import LAYOUTS, assert_tied_at_most, mixture, needs_version_5
from torch import nn
from transformers import MixtralConfig, PreTrainedModel

from neuzip.errors import NeuzipError, UsageError
from neuzip.runtime import buffers
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf.experts import (
    can_compile_experts,
    has_single_experts,
    limit_expert_pool,
)
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.quantization_config import NeuzipConfig
from neuzip.runtime.residency import compress_parameters, expert_modules, memory
from neuzip.runtime.weights import AnsWeight

pytestmark = needs_version_5

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS = 4


def layer(hidden: int = 32, inner: int = 32) -> nn.Module:
    """The experts of a layer of Mixtral, with our implementation."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_local_experts": EXPERTS}
    config = MixtralConfig(**sizes, num_experts_per_tok=2)
    config._experts_implementation = "neuzip"
    module = MixtralExperts(config).to(DEVICE, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data.copy_(values)
    return module


def coded(module: nn.Module) -> nn.Module:
    """A copy whose experts are coded."""
    other = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        weight = nn.Parameter(ans_experts(parameter.detach(), 2), requires_grad=False)
        other._parameters[name] = weight
    return other


def test_a_layer_of_transformers_decodes_into_a_pool() -> None:
    module = layer()
    ours = coded(module)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    ids = torch.tensor([[0, 2], [2, 3], [3, 0]], device=DEVICE)
    shares = torch.rand(3, 2, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, ids, shares), module(x, ids, shares), rtol=0.02, atol=0.02)
        assert not has_single_experts(ours) and not can_compile_experts(ours)
        limit_expert_pool(ours, 1000)
        with pytest.raises(NeuzipError, match="the pool of experts may have 1,000"):
            ours(x, ids, shares)


def test_which_experts_are_computed_one_by_one() -> None:
    """A pool takes two coded parameters, of even sizes; else the host asks which experts are in use."""
    module = layer(33, 35)
    assert has_single_experts(module, "ans") and not has_single_experts(module, "packed")
    assert not has_single_experts(layer(), "ans")
    one = layer()
    one._parameters["down_proj"] = nn.Parameter(ans_experts(one.down_proj.detach(), 4), requires_grad=False)
    assert has_single_experts(one) and not can_compile_experts(one)
    assert can_compile_experts(layer())


def test_bytes_of_experts_are_checked() -> None:
    for options in ({"expert_memory": -1}, {"expert_pool_bytes": 0.5}):
        with pytest.raises(UsageError, match="is no number of bytes"):
            NeuzipConfig("ans", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="experts of `residency='packed'` are not decoded"):
        load_model("nowhere", residency="packed", expert_pool_bytes=5)


# On a GPU.


def ans_mixture(layout: str, **sizes: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A dense model, and one whose weights are coded."""
    model = mixture(layout, **sizes).to(DEVICE)
    other = copy.deepcopy(model)
    compress_parameters(other, "ans")
    other.set_experts_implementation("neuzip")
    assert all(isinstance(m.down_proj, AnsWeight) for m in expert_modules(other))
    return model, other


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_tokens_in_a_graph_are_the_dense_models(layout: str, batch: int) -> None:
    model, other = ans_mixture(layout, hidden=256, inner=256)
    ids = torch.randint(256, (batch, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for limit in (1 << 30, 3 << 18):  # all at once, and in rounds
        limit_expert_pool(other, limit)
        decoder = GreedyDecoder(other, batch, 44)
        assert decoder.graphed
        tokens = decoder.generate(ids, 32)
        assert_tied_at_most(model, ids, tokens, 4 * batch)
        assert torch.equal(tokens, GreedyDecoder(other, batch, 44, graph=False).generate(ids, 32))
    del decoder
    buffers.release()


@pytest.mark.gpu
def test_codes_in_host_memory_give_the_same_tokens() -> None:
    """In a graph, too; the device then has hardly any bytes of experts."""
    _, other = ans_mixture("qwen3", hidden=256, inner=256)
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = GreedyDecoder(other, 2, 30).generate(ids, 16)
    for module in expert_modules(other):
        for name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, AnsWeight) and len(weight.stored) == 3:
                host = weight.offloaded()
                assert host.stored_bytes < 0.1 * weight.stored_bytes < host.host_bytes
                module._parameters[name] = nn.Parameter(host, requires_grad=False)
    decoder = GreedyDecoder(other, 2, 30)
    assert decoder.graphed and torch.equal(decoder.generate(ids, 16), expected)


@pytest.mark.gpu
def test_a_model_is_loaded_with_codes_in_host_memory(tmp_path: Path) -> None:
    """Of those that do not fit into the bytes that the GPU may have."""
    mixture("qwen3", hidden=256, inner=256).save_pretrained(tmp_path)
    ids = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    plain = load_model(tmp_path, device="cuda", residency="ans")
    whole = memory(plain).of("ans")
    half = load_model(
        tmp_path, device="cuda", residency="ans", expert_memory=whole.stored_bytes // 2,
        expert_pool_bytes=1 << 22,
    )  # fmt: skip
    used = memory(half).of("ans")
    assert 0.3 < used.stored_bytes / whole.stored_bytes < 0.8
    assert 0 < used.host_bytes < whole.stored_bytes
    tokens = [GreedyDecoder(model, 1, 30).generate(ids, 16) for model in (plain, half)]
    assert torch.equal(*tokens)
