"""Mixtures of experts with packed weights in models of transformers: results, gradients, graphs, configs."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import (
    LAYOUTS,
    assert_as_near,
    assert_tied_at_most,
    llama,
    mixture,
    needs_version_5,
    packed_mixture,
)
from recorded_steps import replayed_tokens
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from neuzip.kernels.experts import ops
from neuzip.kernels.experts.gate import Gate, gated
from neuzip.runtime.decode.greedy import GreedyDecoder, NotGraphable
from neuzip.runtime.hf import experts
from neuzip.runtime.hf.experts import has_single_experts
from neuzip.runtime.hf.quantization_config import NeuzipConfig
from neuzip.runtime.residency import compress_parameters, expert_modules, is_compressed
from neuzip.runtime.weights import AnsWeight, PackedWeight

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_version_5]

BF16 = torch.bfloat16
IDS = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1))
NEW = 6

Pair = tuple[PreTrainedModel, PreTrainedModel]


@pytest.fixture(scope="module", params=LAYOUTS)
def pair(request: pytest.FixtureRequest) -> Pair:
    """A dense model, and the same with packed weights."""
    return mixture(request.param), packed_mixture(request.param)


def implementation(model: nn.Module) -> str | None:
    name: str | None = next(expert_modules(model)).config._experts_implementation
    return name


# Results


@torch.no_grad()
def assert_same_logits(dense: PreTrainedModel, packed: PreTrainedModel, ids: torch.Tensor) -> None:
    reference = copy.deepcopy(dense).double()
    reference.set_experts_implementation("eager")
    assert_as_near(packed(ids).logits, dense(ids).logits, reference(ids).logits)


def test_logits_are_those_of_the_dense_model_but_for_roundings(pair: Pair):
    dense, packed = pair
    modules = list(expert_modules(packed))
    assert all(type(module.down_proj.data) is PackedWeight for module in modules)
    assert_same_logits(dense, packed, IDS)


def test_greedy_tokens_are_those_of_the_dense_model(pair: Pair):
    dense, packed = pair
    decoder = GreedyDecoder(packed, 2, IDS.shape[1] + NEW, graph=False)
    assert_tied_at_most(dense, IDS, decoder.generate(IDS, NEW), 1)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a real graph is captured")
def test_one_step_recorded_and_replayed_is_every_step():
    """No value is read by the host, so that a CUDA graph can hold a step."""
    packed = packed_mixture("gpt-oss", layers=1)
    decoder = GreedyDecoder(packed, 2, IDS.shape[1] + NEW)
    expected = decoder.generate(IDS, NEW)
    assert torch.equal(replayed_tokens(decoder, IDS, NEW), expected)


# One module


class Experts(nn.Module):
    """What transformers calls a module of experts, with its two parameters and no code of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.act_fn = config.act_fn
        rows, biases = config.rows, getattr(config, "biases", False)
        flip = (lambda weight: weight.mT.contiguous()) if config.transposed else (lambda weight: weight)
        first = "gate_up_proj" if rows == 2 * INNER else "up_proj"
        self.register_parameter(first, nn.Parameter(flip(random(EXPERTS, rows, HIDDEN))))
        self.down_proj = nn.Parameter(flip(random(EXPERTS, HIDDEN, INNER)))
        if biases:
            self.register_parameter(f"{first}_bias", nn.Parameter(random(EXPERTS, rows)))
            self.down_proj_bias = nn.Parameter(random(EXPERTS, HIDDEN))
        self.post_expert_norm = nn.RMSNorm(HIDDEN, dtype=BF16)

    def forward(self, hidden_states: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the implementation is called")


EXPERTS, HIDDEN, INNER, TOKENS, SLOTS = 4, 48, 32, 9, 2


def random(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) / shape[-1] ** 0.5).to(BF16)


class Interleaved(Experts):
    """The activation of gpt-oss."""

    alpha, limit = 1.702, 1.0

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class InFp32(Experts):
    """An activation that rounds elsewhere than a Gate."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (self.act_fn(gate.float()) * up.float()).to(gate.dtype)


class Config:
    """What a module of experts reads of a config."""

    def __init__(self, act_fn: Any = F.silu, rows: int = 2 * INNER, **options: Any) -> None:
        self.act_fn, self.rows = act_fn, rows
        self.transposed, self.biases = options.get("is_transposed", False), options.get("has_bias", False)
        self._experts_implementation = "grouped_mm"


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


KINDS: dict[str, tuple[type[Experts], dict[str, Any], dict[str, Any], Gate | None]] = {
    "plain": (Experts, {}, {}, Gate()),
    "transposed": (Experts, {}, {"is_transposed": True}, Gate()),
    "biases": (Experts, {}, {"has_bias": True}, Gate()),
    "interleaved": (
        Interleaved, {}, {"is_concatenated": False, "is_transposed": True, "has_bias": True},
        Gate(True, 1.0, 1.702),
    ),
    "gelu": (Experts, {"act_fn": F.gelu}, {}, None),
    "in fp32": (InFp32, {}, {}, None),
    "without a gate": (Experts, {"act_fn": relu_squared, "rows": INNER}, {"has_gate": False}, None),
    "a norm behind": (Experts, {}, {"has_post_expert_norm": True}, Gate()),
}  # fmt: skip
"""Classes of modules, options of their configs and of transformers' decorator, and the Gate they have."""


def modules_of(kind: str) -> tuple[Any, Any]:
    """A dense module, and the same with packed parameters."""
    from transformers.integrations.moe import use_experts_implementation

    cls, options, layout, _ = KINDS[kind]
    known = inspect.signature(use_experts_implementation).parameters
    layout = {name: value for name, value in layout.items() if name in known or name != "is_concatenated"}
    if missing := layout.keys() - known.keys():
        pytest.skip(f"this version of transformers knows nothing of {missing}")
    torch.manual_seed(7)
    decorated = use_experts_implementation(type("Decorated", (cls,), {"forward": cls.forward}), **layout)
    dense = decorated(Config(**options, **layout))
    packed = copy.deepcopy(dense)
    packed.config._experts_implementation = "neuzip"
    for name, parameter in list(packed.named_parameters()):
        if parameter.dim() == 3:
            weight = PackedWeight.of(parameter, transposed=layout.get("is_transposed", False))
            setattr(packed, name, nn.Parameter(weight, requires_grad=False))
    return dense, packed


def routed(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, and the ids and weights of their experts."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(BF16)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    weights, index = scores.topk(SLOTS, dim=-1)
    return x, index, weights.to(BF16)


def in_fp64(dense: Any) -> Any:
    reference = copy.deepcopy(dense).double()
    reference.config._experts_implementation = "batched_mm"  # the other takes no fp64
    return reference


@torch.no_grad()
def assert_module_as_near(dense: Any, packed: Any, *arguments: torch.Tensor) -> None:
    x, index, weights = arguments
    assert_as_near(
        packed(*arguments), dense(*arguments), in_fp64(dense)(x.double(), index.long(), weights.double())
    )


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_modules(kind: str, monkeypatch: pytest.MonkeyPatch):
    dense, packed = modules_of(kind)
    assert_module_as_near(dense, packed, *routed())
    gate = KINDS[kind][3]
    if getattr(packed, "has_gate", True):
        assert experts._gate_of(packed, BF16) == gate
    launched: list[Any] = []
    monkeypatch.setattr(ops, "packed_experts", lambda *arguments: launched.append(arguments) or arguments[0])
    packed(*routed())
    assert [call[6] if isinstance(call[6], Gate) else None for call in launched] == [gate]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_compiler_traces_packed_experts_as_one_graph(chosen: bool):
    """With the Gate that was chosen on loading. Without one it traces the module's own activation."""
    _, packed = modules_of("interleaved")
    if chosen:
        experts.choose_gates(packed)
    with torch.no_grad():
        compiled = torch.compile(packed, backend="eager", fullgraph=True)(*routed())
        assert hasattr(packed, experts.GATE) == chosen
        assert torch.equal(compiled, packed(*routed()))


class Limited(nn.Module):
    """An activation with a limit of any name, of which 0 is none."""

    def __init__(self, **limit: float) -> None:
        super().__init__()
        vars(self).update(limit)
        self.most = next(iter(limit.values())) or None

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated(gate_up, Gate(limit=self.most))


@pytest.mark.parametrize(
    ("limit", "gate"),
    [
        ({"swiglu_limit": 0.0}, Gate()), ({"limit": 7.0}, Gate(limit=7.0)), ({"ceiling": 50.0}, None),
        ({"limit": 0}, Gate()),
    ],
)  # fmt: skip
def test_limits_of_modules(limit: dict[str, float], gate: Gate | None):
    assert experts._gate_of(Limited(**limit), BF16) == gate


@pytest.mark.parametrize(
    "index",
    [torch.zeros(TOKENS, SLOTS, dtype=torch.int64), torch.full((TOKENS, SLOTS), 3, dtype=torch.int32)],
    ids=["the first", "the last, int32"],
)
def test_all_tokens_to_one_expert(index: torch.Tensor):
    dense, packed = modules_of("plain")
    x, _, weights = routed()
    assert_module_as_near(dense, packed, x, index, weights)


def test_ids_of_experts_elsewhere_add_nothing():
    """Expert-parallel models name experts of other processes by numbers beyond their own."""
    dense, packed = modules_of("interleaved")
    x, index, weights = routed()
    index[::2, 1], index[3] = EXPERTS, EXPERTS + 5
    result = packed(x, index, weights)
    assert not result[3].any()
    weights[index >= EXPERTS] = 0
    index[index >= EXPERTS] = 0
    torch.testing.assert_close(result, packed(x, index, weights), rtol=0, atol=0)
    assert_module_as_near(dense, packed, x, index, weights)


def test_weights_of_all_experts():
    """As early versions of transformers 5 give them for some models."""
    _, packed = modules_of("plain")
    x, index, weights = routed()
    spread = torch.zeros(TOKENS, EXPERTS, dtype=BF16).scatter(1, index, weights)
    assert torch.equal(packed(x, index.int(), spread), packed(x, index, weights))


def test_inputs_of_another_dtype_are_cast():
    """Autocast leaves the results of norms in fp32."""
    _, packed = modules_of("plain")
    x, index, weights = routed()
    result = packed(x.float(), index, weights)
    assert result.dtype == torch.float32
    assert torch.equal(result, packed(x, index, weights).float())


def test_a_packed_parameter_beside_a_dense_one(monkeypatch: pytest.MonkeyPatch):
    """transformers' own code runs, on what is decoded."""
    dense, packed = modules_of("plain")
    packed.down_proj = nn.Parameter(packed.down_proj.dense())
    monkeypatch.setattr(ops, "packed_experts", None)
    assert torch.equal(packed(*routed()), dense(*routed()))


def test_an_implementation_of_the_users_choice_runs(monkeypatch: pytest.MonkeyPatch):
    dense, packed = mixture("gpt-oss", layers=1), packed_mixture("gpt-oss", layers=1)
    monkeypatch.setattr(ops, "packed_experts", None)
    packed.set_experts_implementation("eager")
    assert has_single_experts(packed)
    assert_same_logits(dense, packed, IDS[:1])
    packed.set_experts_implementation("grouped_mm")
    assert not has_single_experts(packed)
    assert_same_logits(dense, packed, IDS[:1])


# Training


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_frozen_experts(kind: str):
    dense, packed = modules_of(kind)
    gradients = []
    for module, dtype in ((packed, BF16), (dense, BF16), (in_fp64(dense), torch.float64)):
        x, index, weights = routed()
        x, weights = (tensor.to(dtype).requires_grad_() for tensor in (x, weights))
        sum_of = module(x, index, weights).float().square().sum()
        sum_of.backward()
        biases = [p.grad for name, p in module.named_parameters() if name.endswith("_bias")]
        gradients.append([x.grad, weights.grad, *biases])
    for mine, theirs, reference in zip(*gradients, strict=True):
        scale = reference.norm()
        error, other = ((one - reference).norm() / scale for one in (mine, theirs))
        assert error <= 1.5 * other + 1e-4, (error, other)


def test_adapters_on_the_attention_of_a_mixture():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    gradients = []
    for model in (packed_mixture("qwen3"), mixture("qwen3")):
        torch.manual_seed(3)
        adapted = peft.get_peft_model(model, settings)
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        frozen = [p for p in adapted.parameters() if is_compressed(p)]
        assert not any(p.requires_grad for p in frozen)
        gradients.append({name: p.grad for name, p in adapted.named_parameters() if p.grad is not None})
    mine, theirs = gradients
    assert mine.keys() == theirs.keys() and len(mine) == 8
    for name, gradient in mine.items():
        expected = theirs[name].float()
        assert (gradient.float() - expected).norm() <= 0.03 * expected.norm(), name


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_in_a_graph(layout: str):
    """128 tokens of four texts, after prompts of two lengths: those of the dense model, or tied with them."""
    sizes = {"hidden": 256, "inner": 256}
    dense, packed = mixture(layout, **sizes).cuda(), packed_mixture(layout, "cuda", **sizes)
    ids = torch.randint(256, (4, 40), generator=torch.Generator().manual_seed(6)).cuda()
    assert_same_logits(dense, packed, ids)
    graphed, launched = (GreedyDecoder(packed, 4, 40 + 128, graph=graph) for graph in (True, False))
    assert (graphed.graphed, launched.graphed) == (True, False)
    for part in (ids, ids[:, :7]):
        tokens = graphed.generate(part, 128)
        assert torch.equal(tokens, launched.generate(part, 128))
        assert_tied_at_most(dense, part, tokens, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 64, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_the_host_waits_for_nothing(kind: str, tokens: int):
    dense, packed = (module.cuda() for module in modules_of(kind))
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2)).to("cuda", BF16)
    weights, index = torch.rand(tokens, EXPERTS, device="cuda").topk(SLOTS, dim=-1)
    assert_module_as_near(dense, packed, x, index, weights.to(BF16))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            packed(x, index, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_coded_experts_may_be_computed_one_by_one(layout: str):
    """With the bits of the dense model."""
    dense, coded = mixture(layout).cuda(), mixture(layout).cuda()
    compress_parameters(coded, "ans")
    for model in (coded, dense):
        model.set_experts_implementation("eager")
    assert {type(module.down_proj.data) for module in expert_modules(coded)} == {AnsWeight}
    with torch.no_grad():
        assert torch.equal(coded(IDS.cuda()).logits, dense(IDS.cuda()).logits)
    assert has_single_experts(coded)
    with pytest.raises(NotGraphable, match="its experts are computed one by one"):
        GreedyDecoder(coded, 2, 16)


# What configs say


def saved(folder: Path, layout: str) -> Path:
    mixture(layout, layers=1).save_pretrained(folder)
    return folder


def packed_from(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=NeuzipConfig("packed"), **options)


def test_packed_experts_are_computed_by_neuzip(tmp_path: Path):
    """And a config that is saved does not say so."""
    folder = saved(tmp_path / "plain", "gpt-oss")
    model = packed_from(folder)
    assert implementation(model) == "neuzip"
    assert model.hf_quantizer.is_compileable
    assert not has_single_experts(model)
    assert all(module.gate_up_proj.flipped for module in expert_modules(model))
    dense = AutoModelForCausalLM.from_pretrained(folder)
    assert_same_logits(dense, model, IDS[:1])
    model.save_pretrained(tmp_path / "again")
    assert "experts_implementation" not in (tmp_path / "again" / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert implementation(again) == "grouped_mm"
    names = dict(dense.named_parameters())
    assert all(torch.equal(p, names[name]) for name, p in again.named_parameters())


@pytest.mark.parametrize("choice", ["eager", "grouped_mm", {"": "grouped_mm"}], ids=str)
def test_a_choice_of_the_user_stays(choice: Any, tmp_path: Path):
    model = packed_from(saved(tmp_path, "qwen3"), experts_implementation=choice)
    assert implementation(model) == (choice if isinstance(choice, str) else choice[""])
    assert model.hf_quantizer.is_compileable == (choice != "eager")


def test_models_without_compressed_experts_keep_transformers_choice(tmp_path: Path):
    """None is a mixture, or its experts are too small to be packed."""
    for number, model in enumerate([llama(1, vocab_size=512, hidden_size=128, intermediate_size=32,
                                          num_hidden_layers=1, num_attention_heads=2),
                                    mixture("mixtral", hidden=32, inner=32, layers=1)]):  # fmt: skip
        model.to(BF16).save_pretrained(tmp_path / str(number))
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / str(number)).config
        config = packed_from(tmp_path / str(number)).config
        assert config._experts_implementation == expected._experts_implementation != "neuzip"


def test_a_dense_model_again_can_go_to_a_process_without_neuzip(tmp_path: Path):
    model = packed_from(saved(tmp_path, "qwen3"))
    with torch.no_grad():
        model(IDS)
    model = model.dequantize()
    assert implementation(model) == "grouped_mm"
    assert b"neuzip" not in pickle.dumps(model)


# One by one


class ListOfExperts(nn.Module):
    """A mixture as transformers 4 has it, and models with code of their own."""

    def __init__(self, config: Any, expert: type[nn.Module]) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, 4, bias=False)
        self.experts = nn.ModuleList(expert(config) for _ in range(4))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        weights, chosen = self.gate(x).float().softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if len(token):
                y.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(x.dtype))
        return y.view_as(hidden_states)


def test_a_list_of_expert_modules_goes_on_running():
    """Each is a module of linear layers, which are packed; the model's own code chooses among them."""
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2}
    dense = llama(1, **sizes, num_hidden_layers=1, max_position_embeddings=64)
    layer = dense.model.layers[0]
    layer.mlp = ListOfExperts(dense.config, type(layer.mlp))
    dense = dense.to(BF16).eval()
    packed = copy.deepcopy(dense)
    assert compress_parameters(packed, "packed").of("packed").weights > 12 * 256 * 256
    assert not list(expert_modules(packed))
    with torch.no_grad():
        assert_as_near(packed(IDS).logits, dense(IDS).logits, copy.deepcopy(dense).double()(IDS).logits)
    tokens = GreedyDecoder(packed, 2, IDS.shape[1] + NEW, graph=False).generate(IDS, NEW)
    assert_tied_at_most(dense, IDS, tokens, 1)
