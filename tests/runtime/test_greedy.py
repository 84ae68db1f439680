"""The fast greedy loop: the tokens of transformers, recorded as a graph or compiled, and what it refuses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from models import MODELS, assert_tied_at_most, needs_version_5, opt, single_experts
from recorded_steps import replayed_tokens
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import (
    AutoModelForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version

from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT
from neuzip.kernels.quantizers import Ternary
from neuzip.kernels.ternary_linear import TernaryWeight
from neuzip.runtime.decode import agreement as agreement_module
from neuzip.runtime.decode.agreement import Agreement, agreement
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf.experts import has_single_experts
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.ternary_layers import install

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, TOKENS, NEW = 3, 10, 24


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, device: torch.device) -> PreTrainedModel:
    """A tiny model of random weights in fp32, in which no two tokens are equally likely."""
    if request.param == "experts" and transformers_version < "5":
        pytest.skip("transformers 4 has no cache of fixed size for experts")
    torch.manual_seed(3)
    return MODELS[request.param]().to(device).eval()


def is_capturable(model: PreTrainedModel) -> bool:
    """Of fp32 experts torch 2.11 computes the products one by one, and the host asks for their sizes."""
    return not isinstance(model, MixtralForCausalLM)


@pytest.fixture
def ids(device: torch.device) -> torch.Tensor:
    return torch.randint(256, (BATCH, TOKENS), generator=torch.Generator().manual_seed(4)).to(device)


def test_decoder_gives_the_tokens_of_transformers(model: PreTrainedModel, ids: torch.Tensor):
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    decoder = GreedyDecoder(model, BATCH, TOKENS + NEW, graph=is_capturable(model))
    found = decoder.generate(ids, NEW)
    assert found.tolist() == whole[:, TOKENS:].tolist()
    assert len(set(found.flatten().tolist())) > 8  # it says something
    assert decoder.graphed is (ids.device.type == "cuda" and is_capturable(model))


def test_decoder_begins_anew_with_each_prompt(model: PreTrainedModel, ids: torch.Tensor):
    decoder, another = (
        GreedyDecoder(model, BATCH, TOKENS + NEW, graph=is_capturable(model)) for _ in range(2)
    )
    first = decoder.generate(ids, NEW)
    other = decoder.generate(ids[:, :4].flip(0), NEW)
    assert torch.equal(decoder.generate(ids, NEW), first)
    assert torch.equal(another.generate(ids[:, :4].flip(0), NEW), other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real graph is captured")
def test_one_step_recorded_and_replayed_is_every_step(model: PreTrainedModel, ids: torch.Tensor):
    """As a CUDA graph has it: the same operations on the same memory, and no value read by the host."""
    decoder = GreedyDecoder(model, BATCH, TOKENS + NEW)
    expected = decoder.generate(ids, NEW)
    assert torch.equal(replayed_tokens(decoder, ids, NEW), expected)


def test_decoder_refuses_what_it_was_not_made_for(ids: torch.Tensor, device: torch.device):
    decoder = GreedyDecoder(MODELS["llama"]().to(device), BATCH, TOKENS + 1)
    with pytest.raises(ValueError, match="no step from 0 of 11 tokens"):
        decoder.step()
    with pytest.raises(ValueError, match="2 prompts of 10 tokens in a decoder of 3 x 11"):
        decoder.prefill(ids[:2])
    with pytest.raises(ValueError, match="3 prompts of 20 tokens"):
        decoder.prefill(ids.repeat(1, 2))
    decoder.prefill(ids)
    decoder.step()
    with pytest.raises(ValueError, match="no step from 11 of 11 tokens"):
        decoder.step()


@pytest.mark.gpu
def test_graph_and_launches_give_the_same_tokens(model: PreTrainedModel, ids: torch.Tensor):
    model.bfloat16()
    graphed, launched = (GreedyDecoder(model, BATCH, TOKENS + NEW, graph=graph) for graph in (True, False))
    assert (graphed.graphed, launched.graphed) == (True, False)
    assert torch.equal(graphed.generate(ids, NEW), launched.generate(ids, NEW))


def test_steps_before_a_capture_leave_the_text_alone(model: PreTrainedModel, ids: torch.Tensor):
    decoder, other = (GreedyDecoder(model, BATCH, TOKENS + NEW, graph=False) for _ in range(2))
    expected = other.generate(ids, NEW)
    found = [decoder.prefill(ids).clone()]
    for number in range(NEW - 1):
        if number in (0, 3, NEW - 2):  # in the end there is room for one step
            with decoder._running():
                decoder._step_with(nullcontext())
        found.append(decoder.step().clone())
    assert torch.equal(torch.stack(found, dim=1), expected)


@pytest.mark.gpu
def test_the_first_token_comes_before_the_capture(model: PreTrainedModel, ids: torch.Tensor):
    model = model.bfloat16()
    launched = GreedyDecoder(model, BATCH, TOKENS + NEW, graph=False)
    decoder = GreedyDecoder(model, BATCH, TOKENS + NEW, later=True)
    found = [decoder.prefill(ids).clone()]
    assert (decoder.waits, decoder.graphed) == (True, False)
    found.append(decoder.step().clone())
    decoder.capture()
    assert (decoder.waits, decoder.graphed) == (False, True)
    found += [decoder.step().clone() for _ in range(NEW - 2)]
    assert torch.equal(torch.stack(found, dim=1), launched.generate(ids, NEW))
    assert torch.equal(decoder.generate(ids, NEW), launched.generate(ids, NEW))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real graph is refused")
@pytest.mark.skipif(transformers_version < "5", reason="experts are computed in one way only")
def test_experts_computed_one_by_one_cannot_be_captured(ids: torch.Tensor, device: torch.device):
    """The host asks which of them a token needs."""
    model = single_experts().to(device)
    assert has_single_experts(model)
    assert not any(has_single_experts(MODELS[kind]()) for kind in MODELS)
    decoder = GreedyDecoder(model, BATCH, TOKENS + NEW, graph=False)

    def step() -> None:
        with torch.no_grad():
            decoder._advance()

    with pytest.raises(RuntimeError, match="value out of a tracing tensor"):
        make_fx(step)()


@pytest.mark.gpu
def test_a_model_of_single_experts_is_refused_a_graph(ids: torch.Tensor, device: torch.device):
    model = single_experts().to(device)
    with pytest.raises(NeuzipError, match=r"its steps cannot be captured in a CUDA graph: its experts"):
        GreedyDecoder(model, BATCH, TOKENS + NEW)
    assert GreedyDecoder(model, BATCH, TOKENS + NEW, graph=False).generate(ids, 2).shape == (BATCH, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [opt, MODELS["experts"]], ids=["opt", "experts in fp32"])
def test_a_model_that_cannot_be_captured_is_named(
    make: Callable[[], PreTrainedModel], device: torch.device, ids: torch.Tensor
):
    model = make().to(device).eval()
    with pytest.raises(
        NeuzipError, match=f"^{type(model).__name__}: its steps cannot be captured in a CUDA graph"
    ):
        GreedyDecoder(model, BATCH, TOKENS + NEW)
    assert GreedyDecoder(model, BATCH, TOKENS + NEW, graph=False).generate(ids, 2).shape == (BATCH, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["dense", "packed", "ans"])
def test_residencies_in_a_graph(residency: str, small: Path, device: torch.device):
    """The built-in model's tokens, for prompts of other lengths in turn; with packed but for ties."""
    original = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="auto").to(device)
    model = load_model(small, device=device, residency=residency)
    prompts = torch.randint(1024, (2, 40), generator=torch.Generator().manual_seed(5)).to(device)
    expected, found = (GreedyDecoder(m, 2, 40 + NEW) for m in (original, model))
    assert found.graphed
    for part in (prompts, prompts[:, :7], prompts):
        tokens = found.generate(part, NEW)
        if residency == "packed":
            assert_tied_at_most(original, part, tokens, 4)
        else:
            assert torch.equal(tokens, expected.generate(part, NEW))


def test_a_step_goes_on_with_the_token_that_is_taken(model: PreTrainedModel, ids: torch.Tensor):
    decoder = GreedyDecoder(model, BATCH, TOKENS + NEW, graph=is_capturable(model))
    first = decoder.prefill(ids).clone()
    assert torch.equal(decoder.logits.argmax(dim=-1), first)
    other = decoder.logits.topk(2).indices[:, 1]
    decoder.take(other)
    found = [decoder.step().clone() for _ in range(4)]
    assert torch.equal(decoder.logits.argmax(dim=-1), found[-1])
    expected = decoder.generate(torch.cat([ids, other[:, None]], dim=1), 4)
    assert torch.equal(torch.stack(found, dim=1), expected)


# Compiled steps


@pytest.mark.slow
@needs_version_5
def test_compiled_steps(small: Path, device: torch.device):
    """The original's tokens but for ties; and what was compiled goes with the decoder."""
    original = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="auto").to(device)
    decoder = GreedyDecoder(load_model(small, device=device, residency="packed"), 2, 40, compiled=True)
    assert decoder.compiled and decoder.graphed is (device.type == "cuda")
    prompts = torch.randint(1024, (2, 16), generator=torch.Generator().manual_seed(5)).to(device)
    for part in (prompts, prompts[:, :7], prompts):
        assert_tied_at_most(original, part, decoder.generate(part, NEW), 4)
    left = weakref.ref(decoder.model), weakref.ref(decoder._cache.layers[0].keys)
    del decoder
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def ternary(device: torch.device) -> PreTrainedModel:
    """A model of ternary weights made up, whose inputs are as b1.58 quantises them."""
    torch.manual_seed(3)
    model = MODELS["llama"]().to(device, torch.bfloat16).eval()
    codes = {
        name: torch.randint(-1, 2, layer.weight.shape, dtype=torch.int8, device=device)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.endswith("_proj")
    }
    scale = torch.tensor(0.2, device=device)
    install(model, {name: TernaryWeight.of(Ternary(code, scale)) for name, code in codes.items()}, "b1.58")
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["dense", "packed", "ans", "ternary"])
def test_compiled_steps_in_a_graph(form: str, small: Path, device: torch.device):
    """All but ties are what the model chooses uncompiled; quantised inputs may round otherwise."""
    model = ternary(device) if form == "ternary" else load_model(small, device=device, residency=form)
    words = model.config.vocab_size
    prompts = torch.randint(words, (2, 16), generator=torch.Generator().manual_seed(5)).to(device)
    decoder = GreedyDecoder(model, 2, 40, compiled=True)
    assert decoder.compiled and decoder.graphed
    again = GreedyDecoder(model, 2, 40, graph=False, compiled=True)
    for part in (prompts, prompts[:, :7], prompts):
        tokens = decoder.generate(part, NEW)
        assert torch.equal(again.generate(part, NEW), tokens)
        if form == "ternary":
            judged = agreement(model, part, tokens)
            assert judged.chosen + judged.tied >= 0.9 * judged.tokens, judged
        else:
            assert_tied_at_most(model, part, tokens, 6)


@pytest.mark.skipif(transformers_version < "5", reason="experts are computed in one way only")
@pytest.mark.slow
def test_a_step_that_torch_cannot_compile(device: torch.device):
    with pytest.raises(
        NeuzipError, match=r"^MixtralForCausalLM: torch\.compile does not compile its steps: "
    ) as refusal:
        GreedyDecoder(single_experts().to(device), 1, 8, graph=False, compiled=True)
    assert refusal.value.hint == "decode without it (leave out `compile`)"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton brings its compiler")
def test_without_a_compiler_for_cpp(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inductor.cpp, "cxx", (None, "no-such-compiler"))
    with (
        fresh_cache(),
        pytest.raises(NeuzipError, match=r"torch\.compile does not compile its steps: .*C\+\+"),
    ):
        GreedyDecoder(MODELS["llama"]().eval(), 1, 8, compiled=True)


def test_steps_are_not_compiled_with_a_cache_in_few_bits():
    with pytest.raises(UsageError, match="`compile`: steps are not compiled with keys and values in few"):
        GreedyDecoder(MODELS["llama"](), 1, 8, compiled=True, kv_bits=4)


def test_agreement_with_a_text_of_another_form(monkeypatch):
    torch.manual_seed(3)
    model = MODELS["llama"]().eval()
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(5))
    tokens = GreedyDecoder(model, 2, 20).generate(ids, 8)
    assert agreement(model, ids, tokens) == Agreement(16, 16, 0)
    logits = model(torch.cat([ids, tokens], dim=1)).logits
    tokens[:, -1] = logits[:, -2].topk(2).indices[:, 1]  # the second choice
    assert agreement(model, ids, tokens) == Agreement(16, 14, 0)
    monkeypatch.setattr(agreement_module, "TIE", 1 << 30)
    assert agreement(model, ids, tokens) == Agreement(16, 14, 2)
