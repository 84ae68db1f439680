"""Ternary layers of live models: where they are put, what their inputs become, and what comes out."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitNetConfig,
    BitNetForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer

from neuzip.compress import Rule, Scheme, compress, decompress, verify
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import Ternary
from neuzip.kernels.ternary_linear import TernaryWeight
from neuzip.runtime.activations import ACTIVATIONS, ACTIVATIONS_ENTRY, Activations, site_of
from neuzip.runtime.bitlinear import BitLinear, ReLU2GLU, bit_linears
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.quantization_config import NeuzipConfig
from neuzip.runtime.hf.sparsity import mean_share, sparsity
from neuzip.runtime.hf.ternary_layers import install, is_relu2_glu, set_activations
from neuzip.runtime.residency import MemoryUse, compress_parameters, memory
from neuzip.runtime.weights import BitWeight
from neuzip.runtime.weights.bit import dense

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = torch.bfloat16
IDS = torch.arange(2 * 12).view(2, 12) * 7 % 96
LAYERS = "*layers.*_proj.weight"
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
         "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip


def llama(**more: Any) -> LlamaForCausalLM:
    return models.llama(**(SIZES | HEADS | more))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=2, n_positions=64))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=16)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=2)),
    "bitnet": lambda: BitNetForCausalLM(BitNetConfig(**SIZES, **HEADS)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES, **HEADS)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, **HEADS)),
    "gpt2": gpt2,
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, num_attention_heads=4)),
    "opt": lambda: OPTForCausalLM(OPTConfig(vocab_size=96, hidden_size=64, ffn_dim=112, num_hidden_layers=2,
                                            num_attention_heads=4, word_embed_proj_dim=64)),
}  # fmt: skip


def made(kind: str = "llama", dtype: torch.dtype = BF16) -> PreTrainedModel:
    torch.manual_seed(1)
    return MODELS[kind]().to(dtype).eval()


def weight(out: int = 24, columns: int = 40, group: int | None = None, seed: int = 0) -> TernaryWeight:
    dense = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed))
    return TernaryWeight.of(quantizers.absmean(dense, group=group))


def some(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linears(model: nn.Module, glob: str = "_proj") -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and glob in n}


def absmean_weights(model: nn.Module) -> dict[str, TernaryWeight]:
    """The layers of a model that a BitNet has ternary, by b1.58 training's own quantiser."""
    return {
        name: TernaryWeight.of(quantizers.absmean(layer.weight.detach(), clamped=True))
        for name, layer in linears(model).items()
    }


# Sites

EXPECTED = {
    "llama": {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "out",
              "gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    "phi": {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "dense": "out", "fc1": "up", "fc2": "down"},
    "phi3": {"qkv_proj": "qkv", "o_proj": "out", "gate_up_proj": "gate_up", "down_proj": "down"},
    "gpt2": {"c_attn": "qkv", "attn.c_proj": "out", "c_fc": "up", "mlp.c_proj": "down"},
    "gpt_neox": {"query_key_value": "qkv", "dense": "out", "dense_h_to_4h": "up", "dense_4h_to_h": "down"},
    "opt": {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "out_proj": "out", "fc1": "up", "fc2": "down"},
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_every_layer_of_a_block_has_its_site(kind: str):
    if kind == "mixtral" and not models.HAS_VERSION_5:
        pytest.skip("transformers 4 has a module for each expert")
    with torch.device("meta"):
        model = MODELS[kind]()
    blocks = next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    layers = {
        name: site_of(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name.startswith(blocks) and "router" not in name
    }
    expected = EXPECTED.get(kind, EXPECTED["llama"])
    if kind == "mixtral":
        expected = {name: site for name, site in expected.items() if site in ("qkv", "out")}
        layers = {name: site for name, site in layers.items() if not name.endswith(".gate")}
    assert len(layers) == 2 * len(expected)
    for name, site in layers.items():
        assert site == next(s for end, s in expected.items() if name.endswith(f".{end}")), name


@pytest.mark.parametrize(
    "name",
    ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "transformer.h.1.ln_1", "proj_q_proj"],
)
def test_no_site(name: str):
    assert site_of(name) is None


PAPER = {  # a4.8, section 3.1: "input to attention and FFN" in 4 bits, intermediate states sparse and in 8
    "b1.58": ["int8", "int8", "int8", "int8", "int8", "int8"],
    "a4.8": ["int4", "top_k_int8", "int4", "int4", "int4", "int8"],
    "a4.8-fp4": ["fp4", "fp4", "fp4", "fp4", "fp4", "int8"],
    "none": ["none", "none", "none", "none", "none", "none"],
}


@pytest.mark.parametrize("mode", PAPER)
def test_activations_of_a_mode(mode: str):
    found = Activations(mode)
    names = ["k_proj", "o_proj", "gate_up_proj", "gate_proj", "up_proj", "down_proj"]
    assert [found.at(f"model.layers.7.{name}") for name in names] == PAPER[mode]
    assert found.at("lm_head") == ("none" if mode == "none" else "int8")


def test_exceptions_by_site_and_by_glob():
    asked = {"mode": "a4.8", "sites": {"out": "int8", "*.layers.0.*": "fp4", "*.0.*.o_proj": "none"}}
    found = Activations.of(asked)
    assert found.at("model.layers.1.self_attn.o_proj") == "int8"
    assert found.at("model.layers.1.self_attn.q_proj") == "int4"
    assert found.at("model.layers.0.self_attn.o_proj") == "fp4", "the first glob decides, before sites"
    assert found.at("model.layers.10.self_attn.q_proj") == "int4"
    assert found.to_json() == asked
    assert Activations.of(found.to_json()) == found
    assert Activations.of("a4.8").to_json() == "a4.8"
    assert Activations.of({"sites": {"down": "int4"}}) == Activations("b1.58", {"down": "int4"})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("a4", "there is no activation mode 'a4'"),
        ({"mode": "a4.8", "sites": {"out": "int7"}}, "the site 'out': there is no activation 'int7'"),
        ({"mode": "a4.8", "sites": {"out": ["int8"]}}, "there is no activation"),
        ({"mode": "a4.8", "sites": {"o_proj": "int8"}}, "there is no site 'o_proj'"),
        ({"mod": "a4.8"}, "are no mode, and no object of mode and sites"),
        ({"mode": 4}, "are no mode"),
        ({"sites": []}, "are no mode"),
        (4, "are no mode"),
    ],
)
def test_activations_that_there_are_not(asked: Any, said: str):
    with pytest.raises(UsageError, match=said) as raised:
        Activations.of(asked)
    assert raised.value.hint


# One layer


def integer_product(x: Tensor, w: TernaryWeight, bias: Tensor | None, activation: str) -> Tensor:
    """The paper's sum, codes in int64 and scales in fp64."""
    quantize = ACTIVATIONS[activation]
    assert quantize is not None
    tokens = quantize(x)
    ternary = Ternary(w.codes(), w.scale, w.group)
    if w.group is None:
        y = (tokens.codes.long() @ ternary.codes.long().T).double() * w.scale.double()
    else:
        y = tokens.codes.double() @ (ternary.codes.double() * ternary.spread().double()).T
    y = y * tokens.scale.double()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != "none"])
@pytest.mark.parametrize("group", [None, 40, 16])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_is_an_integer_product(activation: str, group: int | None, biased: bool):
    w = weight(group=group)
    bias = nn.Parameter(some(24)) if biased else None
    x = some(2, 5, 40)
    y = BitLinear(w, bias, activation)(x)
    expected = integer_product(x, w, bias, activation)
    assert y.shape == (2, 5, 24)
    assert y.dtype == torch.float32
    assert ((y - expected).abs() <= 2**-21 * (1 + expected.abs())).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_result_has_the_dtype_of_the_input(dtype: torch.dtype):
    w, x = weight(), some(3, 40, dtype=dtype)
    y = BitLinear(w)(x)
    assert y.dtype == dtype
    assert torch.equal(y, BitLinear(w)(x.float()).to(dtype))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_without_activations_it_is_the_dense_layer(dtype: torch.dtype):
    w, bias, x = weight(), nn.Parameter(some(24, dtype=dtype)), some(3, 40, dtype=dtype)
    layer = BitLinear(w, bias, "none", dtype)
    expected = F.linear(x, dense(w, dtype), bias)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.to_linear()(x), expected)
    assert layer.to_linear().weight.requires_grad


def test_activations_differ():
    """Each name stands for a quantiser of its own, and switching takes effect."""
    layer, x = BitLinear(weight()), some(3, 40)
    results = []
    for layer.activation in ACTIVATIONS:
        results.append(layer(x))
    for i, one in enumerate(results):
        assert not any(torch.equal(one, other) for other in results[:i])
    with pytest.raises(UsageError, match="there is no activation 'int2'"):
        layer.activation = "int2"
    assert layer.activation == "top_k_int8"


def test_scales_keep_their_bits_when_a_model_is_cast():
    w = weight(group=16)
    layer = BitLinear(w, nn.Parameter(some(24)))
    layer.to(BF16).half()
    assert layer.scale.dtype == torch.float32
    assert torch.equal(layer.scale, w.scale)
    assert layer.words.dtype == torch.int32
    assert layer.bias is not None
    assert layer.bias.dtype == torch.float16
    assert layer.to("meta").scale.is_meta


def test_copies_and_state():
    layer, x = BitLinear(weight(), activation="int4"), some(3, 40)
    copied = copy.deepcopy(layer)
    assert copied.words.data_ptr() != layer.words.data_ptr()
    assert copied.activation == "int4"
    assert torch.equal(copied(x), layer(x))
    other = BitLinear(weight(seed=5), activation="int4")
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert "activation=int4" in repr(layer)
    assert "one scale" in repr(layer)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_go_straight_through(activation: str):
    w, bias, x = weight(), nn.Parameter(some(24)), some(2, 3, 40).requires_grad_()
    upstream = some(2, 3, 24, seed=4)
    BitLinear(w, bias, activation)(x).backward(upstream)
    like, other = x.detach().clone().requires_grad_(), nn.Parameter(some(24))
    F.linear(like, dense(w, torch.float32), other).backward(upstream)
    assert x.grad is not None
    assert torch.allclose(x.grad, like.grad, rtol=1e-5, atol=1e-6)
    assert torch.allclose(bias.grad, other.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != "none"])
@pytest.mark.parametrize("group", [None, 16])
@torch.inference_mode()
def test_layers_compile_in_one_piece(activation: str, group: int | None):
    layer, x = BitLinear(weight(group=group), nn.Parameter(some(24)), activation), some(3, 40)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def test_what_arrives_is_a_tensor():
    """A BitWeight without a layer: dense numbers wherever it goes."""
    w = weight()
    arrived, expected, x = BitWeight.of(w, BF16), dense(w, BF16), some(3, 40, dtype=BF16)
    assert arrived.shape == expected.shape
    assert arrived.dtype == BF16
    assert torch.equal(arrived.dense(), expected)
    assert torch.equal(torch.stack([arrived, arrived]), torch.stack([expected, expected]))
    assert torch.equal(arrived[3:5], expected[3:5])
    assert torch.equal(F.linear(x, arrived), F.linear(x, expected))
    assert torch.equal(x[:, :24] @ arrived, x[:, :24] @ expected)
    assert torch.equal(arrived.t().dense(), expected.t())
    assert torch.equal(arrived.clone().dense(), expected)
    assert torch.equal(arrived.float(), expected.float())
    with pytest.raises(NeuzipError, match="frozen BitWeight"):
        arrived.mul_(2)


# Whole models


def fake_quantised(model: PreTrainedModel) -> PreTrainedModel:
    """As in training: dense numbers everywhere, rounded by the quantisers, products in fp64."""

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        q = quantizers.absmean(layer.weight.detach(), clamped=True).dequantize()
        return (quantizers.int8_absmax(x, clamped=True).dequantize().double() @ q.double().T).to(x.dtype)

    for layer in linears(model).values():
        layer.forward = forward.__get__(layer)  # type: ignore[method-assign]
    return model


@torch.inference_mode()
def test_trained_model_gives_the_logits_of_its_training():
    """Fake quantisation rounds each factor of a product, ours only its result."""
    model = made(dtype=torch.float32)
    expected = fake_quantised(copy.deepcopy(model))(IDS).logits
    install(model, absmean_weights(model), "b1.58")
    found = model(IDS).logits
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    dense = made(dtype=torch.float32)(IDS).logits
    assert (dense - expected).norm() > 0.1 * expected.norm(), "that is no small change of the model"


@torch.inference_mode()
def test_trained_model_gives_the_logits_of_transformers():
    """Its fake quantisation in fp32, whose products round more than ours."""
    bitnet = pytest.importorskip("transformers.integrations.bitnet")
    model = made(dtype=torch.float32)
    theirs = copy.deepcopy(model)
    for name, layer in linears(theirs).items():
        other = bitnet.AutoBitLinear(layer.in_features, layer.out_features, bias=False, online_quant=True)
        other.weight = layer.weight
        theirs.set_submodule(name, other)
    with torch.compiler.set_stance("force_eager"):
        expected = theirs(IDS).logits
    install(model, absmean_weights(model), "b1.58")
    assert (model(IDS).logits - expected).norm() <= 1e-5 * expected.norm()


def test_installed_layers():
    model = made()
    weights = absmean_weights(model)
    install(model, weights, "a4.8")
    layers = bit_linears(model)
    assert layers.keys() == weights.keys()
    assert {n.split(".")[-1]: layer.activation for n, layer in layers.items()} == {
        "q_proj": "int4", "k_proj": "int4", "v_proj": "int4", "o_proj": "top_k_int8",
        "gate_proj": "int4", "up_proj": "int4", "down_proj": "int8",
    }  # fmt: skip
    assert not any(layer.training for layer in layers.values())
    assert not [m for m in model.modules() if isinstance(m, ReLU2GLU)], "its activation is SiLU"
    assert isinstance(model.lm_head, nn.Linear)


def test_hooks_of_accelerate_stay():
    """They bring inputs to where a module is, if it is spread over devices."""
    hooks = pytest.importorskip("accelerate.hooks")
    seen: list[tuple[int, ...]] = []

    class Noted(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(tuple(args[0].shape))
            return args, kwargs

    model = nn.Sequential(nn.Linear(40, 24, bias=False))
    hooks.add_hook_to_module(model[0], Noted())
    install(model, {"0": weight()})
    model(some(3, 40))
    assert seen == [(3, 40)]


def test_layers_of_no_site_are_named():
    model = made()
    head = {"lm_head": TernaryWeight.of(quantizers.absmean(model.lm_head.weight.detach()))}
    with pytest.warns(UserWarning, match=r"a4\.8 has no rule for the layer lm_head: inputs are int8"):
        install(copy.deepcopy(model), head, "a4.8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        install(copy.deepcopy(model), head, "b1.58")
        install(model, head, Activations("a4.8", {"lm_*": "int4"}))
    assert bit_linears(model)["lm_head"].activation == "int4"


def test_switching_a_live_model():
    model = made()
    install(model, absmean_weights(model), "b1.58")
    with torch.inference_mode():
        before = model(IDS).logits
        set_activations(model, {"mode": "a4.8-fp4", "sites": {"*.layers.1.*": "int8"}})
        assert not torch.equal(model(IDS).logits, before)
        assert model.config.neuzip == {"activations": {"mode": "a4.8-fp4", "sites": {"*.layers.1.*": "int8"}}}
        set_activations(model, "b1.58")
        assert torch.equal(model(IDS).logits, before)
    assert model.config.neuzip == {"activations": "b1.58"}


# MLPs with a squared ReLU


@pytest.fixture(params=["llama", "qwen3", "bitnet"])
def relu2(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model whose MLPs have a squared ReLU."""
    torch.manual_seed(2)
    kinds: dict[str, Any] = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
        "bitnet": (BitNetForCausalLM, BitNetConfig),
    }
    model, config = kinds[request.param]
    made: PreTrainedModel = model(config(**SIZES, **HEADS, hidden_act="relu2")).eval()
    return made


@torch.inference_mode()
def test_mlp_computes_what_it_did(relu2: PreTrainedModel):
    """The formula is that of the module it replaces, to the last bit, as long as its layers are the same."""
    mlp, x = relu2.model.layers[0].mlp, some(3, 64)
    assert is_relu2_glu(mlp)
    replaced = ReLU2GLU(mlp)
    assert not replaced.is_fused
    assert torch.equal(replaced(x), mlp(x))
    assert replaced.state_dict().keys() == mlp.state_dict().keys()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("mode", ["b1.58", "a4.8", "a4.8-fp4"])
def test_gate_and_up_in_one(mode: str, dtype: torch.dtype, relu2: PreTrainedModel):
    relu2.to(dtype)
    install(relu2, absmean_weights(relu2), mode)
    mlp, x = relu2.model.layers[0].mlp, some(3, 64, dtype=dtype)
    assert isinstance(mlp, ReLU2GLU)
    assert mlp.is_fused
    found = mlp(x)
    mlp.apart = True
    assert not mlp.is_fused
    assert torch.equal(found, mlp(x))


def test_gradients_of_gate_and_up(relu2: PreTrainedModel):
    install(relu2, absmean_weights(relu2), "a4.8")
    mlp, x = relu2.model.layers[0].mlp, some(3, 64).requires_grad_()
    y = mlp(x)
    with torch.no_grad():
        assert torch.equal(mlp(x), y)
    y.sum().backward()
    found, x.grad = x.grad, None
    mlp.apart = True
    mlp(x).sum().backward()
    assert found is not None
    assert torch.equal(found, x.grad)
    assert found.norm() > 0


def test_when_gate_and_up_are_not_in_one(relu2: PreTrainedModel):
    install(relu2, absmean_weights(relu2), Activations("a4.8", {"up": "int8"}))
    mlp = relu2.model.layers[0].mlp
    assert not mlp.is_fused
    set_activations(relu2, "a4.8")
    assert mlp.is_fused
    set_activations(relu2, "none")
    assert not mlp.is_fused
    set_activations(relu2, "a4.8")
    mlp.gate_proj.bias = nn.Parameter(torch.zeros(112))
    assert not mlp.is_fused


def test_other_mlps_stay():
    for kind in ("llama", "phi", "gpt2", "opt"):
        assert not [m for m in made(kind).modules() if is_relu2_glu(m)]


# Sparsity


class Block(nn.Module):
    """An MLP whose zeros can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(4, 8, bias=False)
        self.up_proj = nn.Linear(4, 8, bias=False)
        self.down_proj = nn.Linear(8, 4, bias=False)
        self.act_fn = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Blocks(nn.Module):
    """One, behind an embedding: what `sparsity` calls with ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.tensor([[1.0, 0, 0, 2], [1.0, 1, 1, 0]]))
        self.mlp = Block()
        with torch.no_grad():
            self.mlp.gate_proj.weight.fill_(1)
            self.mlp.gate_proj.weight[:6] = -1  # 6 of 8 gates are shut for both tokens
            self.mlp.up_proj.weight.fill_(1)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.embed(ids))
        return y


def test_zeros_are_counted():
    """Inputs: (1 0 0 2) twice and (1 1 1 0) once, 5 zeros of 12; gates 3/4 shut, and so down's inputs."""
    found = sparsity(Blocks(), [torch.tensor([[0, 1]]), torch.tensor([[0]])])
    inputs = 5 / 12
    assert found.sites == pytest.approx({"gate": inputs, "up": 1 - (1 - inputs) / 4, "down": 0.75})
    assert found.parameters == 96
    assert found.overall == pytest.approx((inputs + (1 - (1 - inputs) / 4) + 0.75) / 3)
    assert found.active == round((1 - found.overall) * 96)
    assert found.tokens == 3


def test_weights_of_the_mean_are_those_of_the_paper():
    """Table 2: 12.1, 50.0, 71.4, 12.0 and 84.2 % are 44.5 % of the 7B model's layers together."""
    h, f = 4096, 11008
    shares = {"qkv": 0.121, "out": 0.5, "up": 0.714, "gate": 0.12, "down": 0.842}
    sizes = {"qkv": 3 * h * h, "out": h * h, "up": h * f, "gate": h * f, "down": h * f}
    assert mean_share(shares, sizes) == pytest.approx(0.445, abs=5e-4)
    assert shares["up"] == pytest.approx(1 - (1 - 0.12) * (1 - 0.675), abs=5e-4), "its formula for up"


def test_sparsity_of_a_bitnet(relu2: PreTrainedModel):
    """Counted on codes: int4 gives 0 within 0.15 deviations of a Gaussian, and half of o_proj's inputs go."""
    install(relu2, absmean_weights(relu2), "a4.8")
    with torch.inference_mode():
        before = relu2(IDS).logits
    found = sparsity(relu2, [IDS, IDS[:1]])
    assert found.tokens == 36
    assert found.sites.keys() == {"qkv", "out", "gate", "up", "down"}
    assert 0.5 <= found.sites["out"] < 0.6
    assert 0.05 < found.sites["qkv"] < 0.2
    assert found.sites["gate"] < found.sites["up"]
    assert 0.4 < found.sites["down"] < 0.9
    assert found.parameters == sum(layer.numel for layer in bit_linears(relu2).values())
    with torch.inference_mode():
        assert torch.equal(relu2(IDS).logits, before), "hooks and switches are gone"
    assert relu2.model.layers[0].mlp.is_fused
    set_activations(relu2, "b1.58")
    assert sparsity(relu2, [IDS]).sites["out"] < 0.1


def test_up_without_a_gate_counts_its_inputs():
    """An activation function behind the layer itself shuts nothing of it."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj, self.act_fn = nn.Linear(4, 4, bias=False), nn.ReLU()

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.act_fn(self.up_proj(ids.float()))
            return y

    assert sparsity(nn.Sequential(Plain()), [torch.tensor([[1, 0, 0, 2]])]).sites == {"up": 0.5}


def test_nothing_to_count():
    with pytest.raises(ValueError, match="no layer"):
        sparsity(nn.Sequential(nn.ReLU()), [torch.ones(1, 4)])


# Checkpoints


def ternary(group: Any = None, match: str = LAYERS) -> list[Rule]:
    return [Rule(match, Scheme("ternary", group=group), 2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Compressed checkpoints with ternary layers, beside the plain ones: plain/ and small/."""
    found: dict[str, Path] = {}

    def keep(name: str, model: PreTrainedModel, rules: list[Rule]) -> None:
        found[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
        model.save_pretrained(found[name] / "plain")
        compress(found[name] / "plain", found[name] / "small", rules, allow_destructive=True)

    larger = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    torch.manual_seed(3)
    big, tied = llama(**larger).to(BF16), llama(**larger, tie_word_embeddings=True).to(BF16)
    keep("llama", big, ternary())
    keep("rows", big, ternary("row"))
    keep("groups", big, ternary(64))
    keep("small", made(), ternary())
    keep("head", big, ternary(match="lm_head.weight"))
    keep("tied", tied, ternary(match="*"))
    keep("gpt2", made("gpt2"), ternary(match="*.h.*.weight"))
    keep("gpt2 in groups", made("gpt2"), ternary(16, match="*.h.*.weight"))
    exact = copy.deepcopy(big)
    with torch.no_grad():
        for layer in linears(exact).values():
            layer.weight.copy_(quantizers.absmean(layer.weight).dequantize(BF16))
    keep("exact", exact, [])
    keep("relu2", llama(**larger, hidden_act="relu2").to(BF16), ternary())
    return found


def expected_of(folder: Path, activations: str) -> PreTrainedModel:
    """The dense model with layers put in by hand: absmean of what was compressed."""
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype="auto").eval()
    weights = {
        name: TernaryWeight.of(quantizers.absmean(layer.weight.detach()))
        for name, layer in linears(model).items()
    }
    install(model, weights, activations)
    return model


@models.needs_version_5
@torch.inference_mode()
@pytest.mark.parametrize("mode", ["b1.58", "a4.8", "a4.8-fp4"])
def test_packed_model_multiplies_integers(mode: str, folders):
    """The same as with layers put in by hand, to the last bit: all else of so small a model is dense."""
    model = load_model(folders["small"] / "small", residency="packed", activations=mode)
    expected = expected_of(folders["small"], mode)
    assert len(bit_linears(model)) == 14
    for name, layer in bit_linears(model).items():
        other = expected.get_submodule(name)
        assert torch.equal(layer.ternary.codes(), other.ternary.codes()), name
        assert torch.equal(layer.scale, other.scale), "the stored scale, not one rounded to bf16"
        assert layer.activation == other.activation
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert model.config.neuzip == {"activations": mode}
    assert not model.training


@models.needs_version_5
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "rows", "groups"])
def test_scales_of_all_kinds(kind: str, folders):
    model = load_model(folders[kind] / "small", residency="packed")
    dense = load_model(folders[kind] / "small")
    for name, layer in bit_linears(model).items():
        assert layer.activation == "int8"
        assert layer.group == {"llama": None, "rows": layer.in_features, "groups": 64}[kind]
        assert torch.equal(layer.to_linear().weight, dense.get_submodule(name).weight), name
    assert len(bit_linears(model)) == 14
    close = (model(IDS).logits - dense(IDS).logits).norm() / dense(IDS).logits.norm()
    assert 0 < close < 0.1


@models.needs_version_5
def test_memory_of_ternary_layers(folders):
    model = load_model(folders["llama"] / "small", residency="packed")
    held, layers = memory(model), bit_linears(model).values()
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    assert held.ternary == MemoryUse(weights, 2 * weights, weights // 4 + 4 * len(layers))
    assert held.of("packed").weights == 2 * 512 * 256, "embeddings and head"
    plain = load_model(folders["llama"] / "small")
    assert held.total.weights == memory(plain).total.weights
    assert held.total.dense_bytes == memory(plain).total.dense_bytes
    assert memory(plain).ternary == MemoryUse()
    assert compress_parameters(model, "packed") == held, "there is nothing left to compress"


@models.needs_version_5
@torch.inference_mode()
def test_without_activations_weights_are_kept_as_others(folders):
    """The packed form has no room for so many zeros: as without these layers it is no gain, and not taken."""
    model = load_model(folders["llama"] / "small", residency="packed", activations="none")
    assert not bit_linears(model)
    assert memory(model).ternary == MemoryUse()
    assert memory(model).of("packed").weights == 2 * 512 * 256
    expected = load_model(folders["llama"] / "small")
    assert (model(IDS).logits - expected(IDS).logits).norm() <= 0.01 * expected(IDS).logits.norm()


@models.needs_version_5
def test_some_layers_without_activations(folders):
    asked = {"mode": "a4.8", "sites": {"*.layers.0.*": "none"}}
    model = load_model(folders["llama"] / "small", residency="packed", activations=asked)
    assert len(bit_linears(model)) == 7
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    small = load_model(folders["small"] / "small", residency="packed", activations=asked)
    assert type(small.model.layers[0].self_attn.q_proj.weight) is nn.Parameter, "too small to be packed"


@models.needs_version_5
def test_weights_that_were_ternary_are_no_reason_to_quantise_inputs(folders):
    """They stand in any lossless container; the model may have been trained with any inputs."""
    small = folders["exact"] / "small"
    assert not bit_linears(load_model(small, residency="packed"))
    assert len(bit_linears(load_model(small, residency="packed", activations="b1.58"))) == 14


@models.needs_version_5
@torch.inference_mode()
def test_from_pretrained(folders):
    options = {"quantization_config": NeuzipConfig("packed", "a4.8")}
    model = AutoModelForCausalLM.from_pretrained(folders["llama"] / "small", **options)
    expected = load_model(folders["llama"] / "small", residency="packed", activations="a4.8")
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert (
        repr(model.hf_quantizer.quantization_config) == "NeuzipConfig(residency='packed', activations='a4.8')"
    )
    default = AutoModelForCausalLM.from_pretrained(
        folders["llama"] / "small", quantization_config=NeuzipConfig("packed")
    )
    assert {layer.activation for layer in bit_linears(default).values()} == {"int8"}


@models.needs_version_5
def test_mlps_of_a_checkpoint(folders):
    model = load_model(folders["relu2"] / "small", residency="packed", activations="a4.8")
    glus = [m for m in model.modules() if isinstance(m, ReLU2GLU)]
    assert len(glus) == 2
    assert all(m.is_fused for m in glus)


@models.needs_version_5
@torch.inference_mode()
def test_head_of_its_own(folders):
    with pytest.warns(UserWarning, match="no rule for the layer lm_head"):
        model = load_model(folders["head"] / "small", residency="packed", activations="a4.8")
    assert bit_linears(model).keys() == {"lm_head"}


@models.needs_version_5
@torch.inference_mode()
def test_weight_that_is_looked_up_too_is_none_of_a_layer(folders):
    model = load_model(folders["tied"] / "small", residency="packed")
    assert "lm_head" not in bit_linears(model)
    assert len(bit_linears(model)) == 14
    assert model.lm_head.weight is model.model.embed_tokens.weight
    dense = load_model(folders["tied"] / "small")
    assert torch.equal(model.lm_head.weight, dense.lm_head.weight)


@models.needs_version_5
@torch.inference_mode()
def test_conv1d(folders):
    """GPT-2's matrices lie the other way round; with one scale they can be turned."""
    model = load_model(folders["gpt2"] / "small", residency="packed")
    dense = load_model(folders["gpt2"] / "small")
    assert len(bit_linears(model)) == 8
    for name, layer in bit_linears(model).items():
        assert torch.equal(layer.to_linear().weight, dense.get_submodule(name).weight.t()), name
        assert torch.equal(layer.bias, dense.get_submodule(name).bias)
    set_activations(model, "none")
    assert (model(IDS).logits - dense(IDS).logits).norm() <= 0.01 * dense(IDS).logits.norm()
    grouped = load_model(folders["gpt2 in groups"] / "small", residency="packed")
    assert not bit_linears(grouped), "groups lie across the products"
    assert not [p for p in grouped.parameters() if isinstance(p, BitWeight)]
    assert torch.equal(grouped(IDS).logits, load_model(folders["gpt2 in groups"] / "small")(IDS).logits)


@models.needs_version_5
@pytest.mark.parametrize("device", [{"": "cpu"}, "auto"])
def test_a_device_map(device: Any, folders):
    pytest.importorskip("accelerate")
    if torch.cuda.is_available():
        pytest.skip("for the CPU alone")
    model = load_model(folders["llama"] / "small", device=device, residency="packed")
    assert len(bit_linears(model)) == 14
    model(IDS)


def test_dense_models_have_no_activations(folders):
    with pytest.raises(UsageError, match="the inputs of a dense model are not quantised"):
        load_model(folders["llama"] / "small", activations="a4.8")
    with pytest.raises(UsageError, match="the inputs of a dense model are not quantised"):
        NeuzipConfig(activations="a4.8")
    with pytest.raises(UsageError, match="there is no activation mode 'a3'"):
        load_model(folders["llama"] / "small", residency="packed", activations="a3")


@models.needs_version_5
def test_damage_is_found(copied: Path):
    file = copied / "model.safetensors"
    data = bytearray(file.read_bytes())
    with FolderSource(copied) as source:
        tensor = next(t for t in source.tensors() if t.name.endswith("1.mlp.up_proj.weight"))
        at = source.extents(tensor)[0].start
    data[at + 3] = 1  # no byte of five codes
    file.write_bytes(data)
    with pytest.raises(FormatError, match=r"1\.mlp\.up_proj.*checksum"):
        load_model(copied, residency="packed")
    with pytest.raises(FormatError, match=r"1\.mlp\.up_proj.*stands for no five trits"):
        load_model(copied, residency="packed", verify=False)


@models.needs_version_5
def test_ternary_weights_of_another_shape(copied: Path):
    config = copied / "neuzip" / "original" / "config.json"
    text = config.read_text()
    assert '"intermediate_size": 112' in text
    config.write_text(text.replace('"intermediate_size": 112', '"intermediate_size": 128'))
    with pytest.raises(NeuzipError, match=r"another shape than the config says.*down_proj"):
        load_model(copied, residency="packed")


@models.needs_version_5
def test_making_a_model_dense_again(folders, tmp_path):
    model = load_model(folders["relu2"] / "small", residency="packed", activations="a4.8")
    with pytest.raises(NeuzipError, match="a model with ternary layers is not saved") as raised:
        model.save_pretrained(tmp_path / "saved")
    assert "model.dequantize()" in raised.value.hint
    model.dequantize()
    assert not bit_linears(model)
    expected = load_model(folders["relu2"] / "small")
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert all(p.requires_grad for n, p in model.named_parameters() if "q_proj" in n)


# What config.json says


@pytest.fixture
def copied(folders, tmp_path: Path) -> Path:
    """A compressed folder to change."""
    compress(folders["small"] / "plain", tmp_path / "small", ternary(), allow_destructive=True)
    return tmp_path / "small"


@models.needs_version_5
def test_recorded_activations(copied: Path, tmp_path: Path, folders):
    assert ACTIVATIONS_ENTRY.read(copied) is None
    asked = {"mode": "a4.8", "sites": {"down": "int4"}}
    ACTIVATIONS_ENTRY.write(copied, Activations.of(asked))
    assert ACTIVATIONS_ENTRY.read(copied) == Activations.of(asked)
    config = json.loads((copied / "config.json").read_text())
    assert config["neuzip"] == {"activations": asked}
    assert config["quantization_config"]["quant_method"] == "neuzip"

    for model in (
        load_model(copied, residency="packed"),
        AutoModelForCausalLM.from_pretrained(copied, quantization_config=NeuzipConfig("packed")),
    ):
        found = {name.split(".")[-1]: layer.activation for name, layer in bit_linears(model).items()}
        assert found["down_proj"] == "int4"
        assert found["o_proj"] == "top_k_int8"
        assert model.config.neuzip == {"activations": asked}
    other = load_model(copied, residency="packed", activations="b1.58")
    assert {layer.activation for layer in bit_linears(other).values()} == {"int8"}
    assert other.config.neuzip == {"activations": "b1.58"}

    verify(copied)
    decompress(copied, tmp_path / "restored")
    original = (folders["small"] / "plain" / "config.json").read_bytes()
    assert (tmp_path / "restored" / "config.json").read_bytes() == original


@models.needs_version_5
def test_what_the_original_config_said_counts(tmp_path: Path):
    model = made()
    model.config.neuzip = {"activations": "a4.8", "other": 1}
    model.save_pretrained(tmp_path / "plain")
    compress(tmp_path / "plain", tmp_path / "small", ternary(), allow_destructive=True)
    assert (
        ACTIVATIONS_ENTRY.read(tmp_path / "plain")
        == ACTIVATIONS_ENTRY.read(tmp_path / "small")
        == Activations("a4.8")
    )
    loaded = load_model(tmp_path / "small", residency="packed")
    assert loaded.config.neuzip == {"activations": "a4.8", "other": 1}
    assert bit_linears(loaded)["model.layers.0.self_attn.q_proj"].activation == "int4"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("a4.8", "config.json, field 'neuzip': not an object"),
        ({"activations": "a5"}, "config.json, field 'neuzip.activations': there is no activation mode 'a5'"),
        ({"activations": 3}, "config.json, field 'neuzip.activations': activations 3 are no mode"),
    ],
)
def test_config_that_makes_no_sense(section: Any, said: str, copied: Path):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"neuzip": section}))
    with pytest.raises(FormatError, match=said):
        ACTIVATIONS_ENTRY.read(copied)
    if hasattr(HfQuantizer, "get_quantize_ops"):
        with pytest.raises(FormatError, match=said):
            load_model(copied, residency="packed")
    if isinstance(section, dict):  # a dense model has no use for what is wrong in it
        load_model(copied)


def test_nothing_is_recorded_where_there_is_no_config(tmp_path: Path):
    assert ACTIVATIONS_ENTRY.read(tmp_path) is None
    with pytest.raises(FormatError, match=r"config\.json: is not there"):
        ACTIVATIONS_ENTRY.write(tmp_path, Activations("a4.8"))


# On a GPU


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 16, 200])
@pytest.mark.parametrize("group", [None, 256, 64])
def test_layers_are_the_same_on_a_gpu(activation: str, tokens: int, group: int | None):
    if activation == "none" and tokens > 1:
        pytest.skip("a product of torch")
    layer = BitLinear(weight(512, 256, group), nn.Parameter(some(512, dtype=BF16)), activation)
    x = some(tokens, 256, dtype=BF16)
    expected = layer(x)
    found = copy.deepcopy(layer).cuda()(x.cuda()).cpu()
    if activation == "none":
        assert (found - expected).abs().max() <= 2**-6 * expected.abs().max()
    else:
        assert torch.equal(found, expected)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("kept", ["packed", "ans"])
@pytest.mark.parametrize("kind", ["llama", "groups", "relu2"])
def test_models_on_a_gpu(kind: str, kept: str, folders):
    expected = load_model(folders[kind] / "small", residency="packed", activations="a4.8")
    model = load_model(folders[kind] / "small", device="cuda", residency=kept, activations="a4.8")
    assert memory(model).ternary == memory(expected).ternary
    assert all(layer.words.is_cuda and layer.scale.is_cuda for layer in bit_linears(model).values())
    reference = expected(IDS).logits
    assert (model(IDS.cuda()).logits.cpu() - reference).norm() <= 0.1 * reference.norm()


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != "none"])
def test_a_layer_in_a_cuda_graph(activation: str):
    layer = BitLinear(weight(512, 256), activation=activation).cuda()
    x = some(1, 256, dtype=BF16).cuda()
    expected = layer(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert torch.equal(y, expected)
    x.copy_(some(1, 256, dtype=BF16, seed=9))
    graph.replay()
    assert torch.equal(y, layer(x))
