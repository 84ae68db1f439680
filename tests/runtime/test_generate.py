"""Text from a model: what is said and when, what is refused, and that the fast loop gives the same tokens."""

from __future__ import annotations

import gc
import io
import json
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers import __version__ as transformers_version

from neuzip.compress import compress
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT
from neuzip.kernels.quantizers import Ternary
from neuzip.kernels.ternary_linear import TernaryWeight
from neuzip.runtime.decode import agreement as agreement_module
from neuzip.runtime.decode import generate as generate_module
from neuzip.runtime.decode.agreement import Agreement, agreement
from neuzip.runtime.decode.generate import Generation, generate, not_static
from neuzip.runtime.decode.greedy import SINGLE_EXPERTS, GreedyDecoder, has_single_experts
from neuzip.runtime.decode.prompt import Prompt, prepare
from neuzip.runtime.decode.sampling import Sampling, draw
from neuzip.runtime.devices import choose_device
from neuzip.runtime.hf.decoder import input_device
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.ternary_layers import install

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GROUPED: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def opt() -> PreTrainedModel:
    return OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "sliding window": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=8)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SIZES, initializer_range=0.3)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**GROUPED, num_local_experts=4)),
}
BATCH, TOKENS, NEW = 3, 10, 24


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, device: torch.device) -> PreTrainedModel:
    """A tiny model of random weights in fp32, in which no two tokens are equally likely."""
    torch.manual_seed(3)
    return MODELS[request.param]().to(device).eval()


@pytest.fixture
def recordable(model: PreTrainedModel) -> PreTrainedModel:
    """Those whose step does the same each time."""
    if transformers_version < "5" and isinstance(model, MixtralForCausalLM):
        pytest.skip("transformers 4.57 asks which experts are wanted before it computes them")
    return model


def is_capturable(model: PreTrainedModel) -> bool:
    """Of fp32 experts torch 2.11 computes the products one by one, and the host asks for their sizes."""
    return not isinstance(model, MixtralForCausalLM)


@pytest.fixture
def ids(device: torch.device) -> torch.Tensor:
    return torch.randint(256, (BATCH, TOKENS), generator=torch.Generator().manual_seed(4)).to(device)


# The fast loop


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
def test_one_step_recorded_and_replayed_is_every_step(recordable: PreTrainedModel, ids: torch.Tensor):
    """As a CUDA graph has it: the same operations on the same memory, and no value read by the host."""
    decoder = GreedyDecoder(recordable, BATCH, TOKENS + NEW)
    expected = decoder.generate(ids, NEW)

    def step() -> torch.Tensor:
        with torch.no_grad():
            decoder._advance()
        return decoder._token

    decoder._reset()
    recorded = make_fx(step)()
    found = [decoder.prefill(ids).clone()]
    found += [recorded()[:, 0].clone() for _ in range(NEW - 1)]
    assert torch.equal(torch.stack(found, dim=1), expected)


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
def test_graph_and_launches_give_the_same_tokens(recordable: PreTrainedModel, ids: torch.Tensor):
    model = recordable.bfloat16()
    graphed, launched = (GreedyDecoder(model, BATCH, TOKENS + NEW, graph=graph) for graph in (True, False))
    assert (graphed.graphed, launched.graphed) == (True, False)
    assert torch.equal(graphed.generate(ids, NEW), launched.generate(ids, NEW))


def single_experts() -> PreTrainedModel:
    model = MODELS["experts"]().eval()
    model.set_experts_implementation("eager")
    return model


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
@pytest.mark.parametrize("residency", ["dense", "packed"])
def test_compiled_steps(residency: str, small: Path, device: torch.device):
    """The original's tokens but for ties; and what was compiled goes with the decoder."""
    original = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="auto").to(device)
    decoder = GreedyDecoder(load_model(small, device=device, residency=residency), 2, 40, compiled=True)
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
def test_a_step_that_torch_cannot_compile(device: torch.device):
    with pytest.raises(
        NeuzipError, match=r"^MixtralForCausalLM: torch\.compile does not compile its steps: "
    ) as refusal:
        GreedyDecoder(single_experts().to(device), 1, 8, graph=False, compiled=True)
    assert refusal.value.hint == "decode without it (leave out `compile`)"


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


def assert_tied_at_most(original: PreTrainedModel, ids: torch.Tensor, tokens: torch.Tensor, ties: int):
    """All tokens are the original's own choice, or tied with it, as sums in another order may decide."""
    judged = agreement(original, ids, tokens)
    assert judged.chosen + judged.tied == judged.tokens, judged
    assert judged.tied <= ties, judged


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


# Text as it comes


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in checkpoint, compressed."""
    folder = tmp_path_factory.mktemp("generate") / "small"
    compress(CHECKPOINT, folder)
    return folder


@pytest.fixture(scope="module")
def demo_model(small: Path) -> PreTrainedModel:
    return load_model(small)


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of words whose decoder puts spaces between, none before the first: as SentencePiece's."""
    vocabulary = {word: i for i, word in enumerate(["<s>", "▁a", "▁b", "▁c", "<0xC3>", "<0xA9>", "\n"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def speaker(tokens: list[int]) -> Any:
    """What `generate` needs of a model, and that says these tokens."""

    def say(ids: torch.Tensor, streamer: Any, **_: Any) -> torch.Tensor:
        streamer.put(ids)
        for token in tokens:
            streamer.put(torch.tensor([token]))
        streamer.end()
        return torch.cat([ids, torch.tensor([tokens])], dim=1)

    return SimpleNamespace(
        generate=say,
        generation_config=SimpleNamespace(eos_token_id=None, pad_token_id=None),
        get_input_embeddings=lambda: SimpleNamespace(weight=torch.zeros(1)),
    )


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        pytest.param([2, 3], [" b", " c"], id="the first space stays"),
        pytest.param([4, 5, 2], ["é", " b"], id="no half characters"),
        pytest.param([4, 5, 4, 5], ["é", "é"], id="characters of two tokens, twice"),
        pytest.param([2, 4], [" b", "\ufffd"], id="half a character at the end"),
        pytest.param([0, 2, 0], [" b"], id="special tokens are silent"),
        pytest.param([6, 2], ["\n", " b"], id="lines"),
        pytest.param([], [], id="nothing"),
    ],
)
def test_text_comes_in_whole_characters(tokens: list[int], pieces: list[str]):
    said: list[str] = []
    prompt = Prompt("a", torch.tensor([[0, 1]]), words(), 9)
    made = generate(speaker(tokens), prompt, on_text=said.append)
    assert said == pieces
    assert (made.text, made.tokens) == ("".join(pieces), tuple(tokens))


def test_text_is_what_the_tokenizer_makes_of_all_tokens(demo_model: PreTrainedModel):
    prompt = prepare(CHECKPOINT, 'def über(ß):\n    """', max_new_tokens=40)
    said: list[str] = []
    made = generate(demo_model, prompt, on_text=said.append)
    everything = prompt.tokenizer.decode([*prompt.ids[0].tolist(), *made.tokens])
    assert everything == prompt.tokenizer.decode(prompt.ids[0]) + made.text
    assert "".join(said) == made.text
    assert len(said) > 20
    assert 0 < made.first_token_seconds < made.seconds
    speed = made.tokens_per_second
    assert speed is not None and speed > len(made.tokens) / made.seconds


def test_the_first_token_alone_has_no_speed():
    assert Generation("x", (1,), 0.2, 0.1).tokens_per_second is None


def test_greedy_whatever_the_checkpoint_asks_for(demo_model: PreTrainedModel, monkeypatch):
    prompt = prepare(CHECKPOINT, "import ", max_new_tokens=20)
    expected = generate(demo_model, prompt).tokens
    for name, value in {
        "do_sample": True,
        "temperature": 5.0,
        "top_k": 3,
        "min_p": 0.9,
        "num_beams": 4,
    }.items():
        monkeypatch.setattr(demo_model.generation_config, name, value)
    assert generate(demo_model, prompt).tokens == expected


def test_seed_draws_the_same_and_leaves_others_alone(demo_model: PreTrainedModel):
    prompt = prepare(CHECKPOINT, "import ", max_new_tokens=20)
    torch.manual_seed(1)
    undisturbed = torch.rand(3)
    torch.manual_seed(1)
    first, again, other = (generate(demo_model, prompt, sampling=Sampling(1.5), seed=s) for s in (7, 7, 8))
    assert first.tokens == again.tokens
    assert first.tokens != other.tokens
    assert torch.equal(torch.rand(3), undisturbed)
    likeliest = generate(demo_model, prompt).tokens
    assert generate(demo_model, prompt, sampling=Sampling(1.5, top_p=1e-6), seed=7).tokens == likeliest


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.7}, [0, 1]),
        ({"min_p": 0.25}, [0, 1]),
        ({"min_p": 0.2}, [0, 1, 2]),
        ({"top_k": 3, "min_p": 0.25}, [0, 1]),
        ({}, [0, 1, 2, 3]),
    ],
)
def test_filters_of_sampling_keep_the_likely_tokens(filters: dict[str, Any], kept: list[int]):
    logits = torch.tensor([[0.5, 0.3, 0.12, 0.08]]).log()
    warpers = Sampling(1.0, **filters).warpers()
    assert warpers is not None
    torch.manual_seed(0)
    drawn = {int(draw(logits, warpers)) for _ in range(200)}
    assert drawn == set(kept)


def test_the_text_ends_before_a_stop_string(demo_model: PreTrainedModel):
    prompt = prepare(CHECKPOINT, "import ", max_new_tokens=40)
    whole = generate(demo_model, prompt)
    assert whole.finish_reason == "length"
    first, later = whole.text[10:13], whole.text[20:24]  # each across pieces of a character or two
    told: list[str] = []
    made = generate(demo_model, prompt, stop=[later, first, "never said"], on_text=told.append)
    assert made.text == "".join(told) == whole.text[: whole.text.index(first)]
    assert made.finish_reason == "stop" and len(made.tokens) < len(whole.tokens)
    unsaid = generate(demo_model, prompt, stop=[whole.text[-3:] + "no"])  # held back, and told in the end
    assert (unsaid.text, unsaid.finish_reason) == (whole.text, "length")


@pytest.mark.parametrize("loop", ["transformers", "static"])
def test_a_special_token_is_a_stop_string_too(
    loop: Literal["transformers", "static"], demo_model: PreTrainedModel
):
    """Decoding leaves special tokens out of a text: as text such a string would never come."""
    prompt = prepare(CHECKPOINT, "import ", max_new_tokens=12)
    whole = generate(demo_model, prompt, loop=loop)
    at = next(n for n, token in enumerate(whole.tokens) if n > 3 and token not in whole.tokens[:n])
    prompt.tokenizer.add_special_tokens(
        {"additional_special_tokens": [prompt.tokenizer.convert_ids_to_tokens(whole.tokens[at])]}
    )
    mark = prompt.tokenizer.convert_ids_to_tokens(whole.tokens[at])
    told: list[str] = []
    begun = whole.text[:2] + "no"  # what is held back meanwhile is told in the end
    made = generate(demo_model, prompt, stop=[begun, mark], on_text=told.append, loop=loop)
    assert (made.tokens, made.finish_reason) == (whole.tokens[: at + 1], "stop")
    said = prompt.tokenizer.decode(whole.tokens[:at], clean_up_tokenization_spaces=False)
    assert made.text == "".join(told) == said


# The same text from the fast loop


@pytest.fixture(scope="module")
def exact_model(small: Path) -> PreTrainedModel:
    """In fp32, in which no two tokens are tied, so that loops that sum otherwise say the same."""
    return load_model(small).float()


DRAWN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"sampling": Sampling(1.5), "seed": 7},
    "drawn as they are": {"sampling": Sampling(1.0), "seed": 7},
    "drawn by nucleus": {"sampling": Sampling(0.8, top_p=0.9), "seed": 8},
    "drawn from the top 5": {"sampling": Sampling(1.3, top_k=5), "seed": 8},
    "drawn by min-p": {"sampling": Sampling(1.3, top_k=50, top_p=0.95, min_p=0.1), "seed": 8},
    "greedy, 4 bits": {"kv_bits": 4},
    "greedy, until a stop string": {"stop": ["zzz", "\n"]},
    "drawn, 4 bits": {"sampling": Sampling(1.2), "seed": 9, "kv_bits": 4},
}


@pytest.mark.parametrize("options", DRAWN.values(), ids=DRAWN)
def test_loops_say_the_same(options: dict[str, Any], exact_model: PreTrainedModel):
    prompt = prepare(CHECKPOINT, 'def über(ß):\n    """', max_new_tokens=30)
    told: dict[str, list[str]] = {"transformers": [], "static": []}
    expected, found = (
        generate(exact_model, prompt, loop=loop, on_text=told[loop].append, **options) for loop in told
    )
    assert found.tokens == expected.tokens
    assert (found.text, told["static"]) == (expected.text, told["transformers"])
    assert 0 < found.first_token_seconds < found.seconds
    assert (found.cache_bytes is None, expected.cache_bytes is None) == ("kv_bits" not in options,) * 2


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_loops_end_alike(several: bool, exact_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    prompt = prepare(CHECKPOINT, "import ", max_new_tokens=30)
    end = generate(exact_model, prompt).tokens[12]
    monkeypatch.setattr(exact_model.generation_config, "eos_token_id", [1023, end] if several else end)
    expected, found = (generate(exact_model, prompt, loop=loop) for loop in ("transformers", "static"))
    assert found.tokens == expected.tokens
    assert found.tokens[-1] == end and len(found.tokens) <= 13
    assert found.text == expected.text


def test_one_token_is_the_prompts(exact_model: PreTrainedModel):
    prompt = prepare(CHECKPOINT, "import ", max_new_tokens=1)
    expected, found = (generate(exact_model, prompt, loop=loop) for loop in ("transformers", "static"))
    assert found.tokens == expected.tokens and len(found.tokens) == 1


def test_on_a_cpu_transformers_loop_runs(demo_model: PreTrainedModel):
    prompt = prepare(CHECKPOINT, "import ", max_new_tokens=2)
    if input_device(demo_model).type == "cpu":
        made = generate(demo_model, prompt)
        assert (made.graphed, made.not_graphed) == (False, "it is not on a GPU")
    made = generate(demo_model, prompt, loop="transformers")
    assert (made.graphed, made.not_graphed) == (False, "transformers' loop was asked for")


def test_a_loop_that_there_is_not(demo_model: PreTrainedModel):
    other: Any = "fast"
    with pytest.raises(UsageError, match="loop='fast': there is no such loop") as refusal:
        generate(demo_model, prepare(CHECKPOINT, "x", max_new_tokens=2), loop=other)
    assert refusal.value.hint == "what there is: auto, static, transformers"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.2),
        ("suppress_tokens", [5]),
        ("forced_bos_token_id", 0),
        ("forced_eos_token_id", 1),
        ("min_new_tokens", 1),
        ("stop_strings", ["x"]),
        ("use_cache", False),
        ("something_of_tomorrow", "yes"),
    ],
)
def test_what_a_checkpoint_asks_for_is_left_to_transformers(
    name: str, value: object, demo_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    assert not_static(demo_model) is None
    monkeypatch.setattr(demo_model.generation_config, name, value, raising=False)
    assert not_static(demo_model) == f"the generation config asks for {name}"
    with pytest.raises(NeuzipError, match=f"the static loop: the generation config asks for {name}"):
        generate(demo_model, prepare(CHECKPOINT, "x", max_new_tokens=2), loop="static")


def test_what_changes_nothing_is_no_reason(demo_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    neutral = {
        "do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "num_beams": 4,
        "use_cache": True, "repetition_penalty": 1.0, "typical_p": 1.0, "no_repeat_ngram_size": 0,
        "min_length": 0,
        "suppress_tokens": [], "eos_token_id": [1, 2], "pad_token_id": 3, "max_length": 4096,
        "renormalize_logits": False,
    }  # fmt: skip
    for name, value in neutral.items():
        monkeypatch.setattr(demo_model.generation_config, name, value)
    assert not_static(demo_model) is None


def test_a_model_that_prepares_its_steps_is_left_to_transformers():
    model = Phi3ForCausalLM(Phi3Config(**GROUPED))
    assert not_static(model) == "Phi3ForCausalLM has a prepare_inputs_for_generation of its own"


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["dense", "packed", "ans"])
@pytest.mark.parametrize("options", DRAWN.values(), ids=DRAWN)
def test_text_from_a_graph(options: dict[str, Any], residency: str, small: Path, device: torch.device):
    """What the same loop gives launch by launch; and the same again from the same seed."""
    model = load_model(small, device=device, residency=residency)
    prompt = prepare(CHECKPOINT, "import ", max_new_tokens=40)
    made, again = (generate(model, prompt, **options) for _ in range(2))
    assert made.graphed and made.not_graphed is None
    assert made.tokens == again.tokens
    everything = prompt.tokenizer.decode(
        [*prompt.ids[0].tolist(), *made.tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert made.text and made.text in everything  # a stop string may follow
    if "sampling" not in options:
        decoder = GreedyDecoder(model, 1, prompt.ids.numel() + 40, kv_bits=options.get("kv_bits"))
        assert decoder.generate(prompt.ids, 40)[0].tolist()[: len(made.tokens)] == list(made.tokens)
    left = generate(model, prompt, loop="transformers", **options)
    assert not left.graphed


@pytest.mark.gpu
def test_what_cannot_be_captured_goes_on_in_transformers_loop(device: torch.device):
    prompt = Prompt("a", torch.tensor([[0, 1, 2]]), words(), 8)
    made = generate(opt().to(device).eval(), prompt)
    assert not made.graphed and made.not_graphed
    assert len(made.tokens) == 8
    made = generate(single_experts().to(device), prompt)
    assert (made.graphed, made.not_graphed) == (False, SINGLE_EXPERTS)


@pytest.mark.gpu
def test_a_model_that_cannot_be_captured_leaves_no_trace(device: torch.device):
    """Its tokens are drawn, and torch's streams, generators and allocator are as they were."""
    model, prompt = opt().to(device).eval(), Prompt("a", torch.tensor([[0, 1, 2]]), words(), 8)
    stream = torch.cuda.current_stream(device)
    made = generate(model, prompt, sampling=Sampling(1.0), seed=1)
    assert (len(made.tokens), made.graphed) == (8, False)
    assert torch.cuda.current_stream(device) == stream
    torch.randn(1, device=device)
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_command_says_which_loop_ran(small: Path, neuzip):
    asked = ("generate", small, "--prompt", "import ", "--max-new-tokens", 4)
    said = neuzip(*asked)
    assert said.stderr.splitlines()[1] == "steps as a CUDA graph"
    said = neuzip(*asked, "--no-graph")
    assert said.stderr.splitlines()[1] == "steps without a CUDA graph: transformers' loop was asked for"
    assert neuzip(*asked, "--json").json["graphed"] is True
    assert neuzip(*asked, "--no-graph", "--json").json["graphed"] is False


def test_a_window_that_no_mask_shows_is_left_to_transformers():
    """GPT-Neo takes it from the length of the cache: with one of fixed size the first token is another."""
    config = GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, window_size=6, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]], bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = GPTNeoForCausalLM(config).eval()
    prompt = Prompt("a", torch.arange(3, 12)[None], words(), 8)
    assert not_static(model) == "GPTNeoForCausalLM wants a cache that grows"
    assert len(generate(model, prompt).tokens) == 8
    with pytest.raises(NeuzipError, match="wants a cache that grows"):
        generate(model, prompt, loop="static")
    with pytest.raises(NeuzipError, match="wants a cache that grows: with one of fixed size"):
        GreedyDecoder(model, 1, 20)


# What is refused


def test_prompt_of_as_many_tokens_as_there_is_room_for():
    tokens = prepare(CHECKPOINT, "x = 1\n" * 40, max_new_tokens=1).ids.numel()
    assert prepare(CHECKPOINT, "x = 1\n" * 40, max_new_tokens=256 - tokens).max_new_tokens == 256 - tokens
    with pytest.raises(
        UsageError, match=f"`max_new_tokens={257 - tokens}`: behind {tokens} of prompt"
    ) as short:
        prepare(CHECKPOINT, "x = 1\n" * 40, max_new_tokens=257 - tokens)
    assert f"give `max_new_tokens={256 - tokens}` or fewer" in short.value.hint
    with pytest.raises(UsageError, match=r"`prompt`: has \d+ tokens, and the model was made for 256"):
        prepare(CHECKPOINT, "x = 1\n" * 200, max_new_tokens=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "`prompt`: is empty"), ("x\udcff", "`prompt`: is not Unicode at position 1")],
    ids=["empty", "surrogate"],
)
def test_prompt_that_is_no_text(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        prepare(CHECKPOINT, text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in checkpoint to spoil."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))


def test_folder_without_a_tokenizer(folder: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(NeuzipError, match="there is no tokenizer") as refusal:
        prepare(folder, "x")
    assert "save_pretrained" in (refusal.value.hint or "")


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["bench"]], ids=["generate", "bench"])
def test_source_that_is_no_folder(command: list[str], folder: Path, neuzip):
    verb, *options = command
    missing, file = folder / "missing", folder / "model.safetensors"
    said = neuzip(verb, missing, *options, "--device", "cpu")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr == neuzip("inspect", missing).stderr
    said = neuzip(verb, file, *options, "--device", "cpu")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith(f"error: {file}: has no config.json: a file of weights alone is no model")
    assert "hint: give a folder" in said.stderr


def test_device_that_is_not_there_for_a_model(small: Path, monkeypatch):
    for name in ("nonsense", "cuda:x", ""):
        with pytest.raises(UsageError, match="torch knows no such device"):
            load_model(small, device=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="device='cuda'`: torch finds no CUDA device"):
        load_model(small, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="device='cuda:1'`: torch finds 1 CUDA device"):
        load_model(small, device="cuda:1")


def test_tokenizer_of_another_model(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 5}))
    with pytest.raises(NeuzipError, match=r"the tokenizer makes token \d+, the model knows 5"):
        prepare(folder, "import")


@pytest.mark.parametrize(
    ("text", "problem"), [('{"model_type": ', "the JSON is broken"), ("[]", "not an object")]
)
def test_a_broken_config_is_not_the_tokenizers_fault(text: str, problem: str, folder: Path, neuzip):
    (folder / "config.json").write_text(text)
    said = neuzip("generate", folder, "--prompt", "x")
    assert said.exit_code == 1
    assert said.stderr.startswith(f"error: {folder / 'config.json'}: ") and problem in said.stderr


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_length": "x"}, "field 'max_length': \"x\" is no number"),
        ({"temperature": True}, "field 'temperature': true is no number"),
        ({"eos_token_id": "y"}, "field 'eos_token_id': \"y\" is no token"),
        ({"eos_token_id": []}, "field 'eos_token_id': [] is no token"),
        ({"eos_token_id": [1, "y"]}, "is no token"),
        ({"repetition_penalty": -1}, "transformers cannot do what it asks for, repetition_penalty = -1: "),
        ({"bad_words_ids": "x"}, "transformers cannot do what it asks for, bad_words_ids = 'x': "),
        ({"cache_implementation": "zzz"}, "transformers does not take it: "),
    ],
)
def test_a_generation_config_of_nonsense_is_named(values: dict[str, Any], field: str, folder: Path, neuzip):
    (folder / "generation_config.json").write_text(json.dumps(values))
    said = neuzip("generate", folder, "--prompt", "the cat", "--max-new-tokens", 2)
    assert said.exit_code == 1, said.stderr
    assert said.stderr.startswith(f"error: {folder / 'generation_config.json'}")
    assert field in said.stderr


@pytest.mark.parametrize("stop", [["</s>", "class"], "class"])
def test_strings_of_the_generation_config_end_a_text(stop: object, folder: Path, neuzip):
    whole = neuzip("generate", folder, "--prompt", "the cat", "--max-new-tokens", 8, "--quiet").stdout
    (folder / "generation_config.json").write_text(json.dumps({"stop_strings": stop}))
    said = neuzip("generate", folder, "--prompt", "the cat", "--max-new-tokens", 8, "--quiet")
    assert said.exit_code == 0, said.stderr
    assert whole.partition("class")[1:] != ("", "")
    assert said.stdout.strip() == "".join(whole.partition("class")[:2]).strip()


def test_a_tokenizer_that_panics_is_named(folder: Path, neuzip):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(a+)+$|(?:a|aa)+$"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    path.write_text(json.dumps(tokenizer))
    for command in (
        ["generate", folder, "--prompt", "a" * 40 + "!"],
        ["eval", folder, "--text", folder / "a"],
    ):
        (folder / "a").write_text("a" * 40 + "!")
        said = neuzip(*command)
        assert said.exit_code == 1, said.stderr
        assert f"error: {path}: the tokenizer fails: " in said.stderr


def test_chat_puts_the_prompt_into_the_template(folder: Path):
    with pytest.raises(NeuzipError, match="its tokenizer has no chat template"):
        prepare(folder, "x", chat=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    tokenizer.save_pretrained(folder)
    ids = prepare(folder, "x", chat=True).ids
    assert tokenizer.decode(ids[0]) == "<user>x<answer>"
    ids = prepare(folder, "x", system="be brief").ids
    assert tokenizer.decode(ids[0]) == "<system>be brief<user>x<answer>"
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(NeuzipError, match=r"its chat template fails: .*no system role") as failure:
        prepare(folder, "x", system="be brief")
    assert failure.value.hint == "leave out `system`: not every template takes one"


def test_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="`device='cuda'`: torch finds no CUDA device"):
        choose_device("cuda")


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "{0}", "--prompt", "x"), ("bench", "{0}"), ("eval", "{0}", "--text", "demo"),
        ("layers", "{0}", "--text", "demo"), ("sweep", "{0}", "--text", "demo"),
        ("ternarize", "{0}", "{0}.t"), ("recover", "{0}", "--text", "demo", "-o", "{0}.r", "--steps", "1"),
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_a_gpu_that_is_not_there_is_wrong_use_of_every_command(command, folder: Path, neuzip, monkeypatch):
    """Said before the model is read: here nothing else could fail either."""
    monkeypatch.setattr("neuzip.compress.device.driver_devices", lambda: 0)
    said = neuzip(*(part.format(folder) for part in command), "--device", "cuda")
    assert said.exit_code == 2
    assert said.stderr.startswith("error: --device cuda: NVIDIA's driver finds no device\nhint: ")


# The command


def test_command_in_all_modes(small: Path, in_all_modes):
    said = in_all_modes("generate", small, "--prompt", "def main(", "--max-new-tokens", 12, "--device", "cpu")
    answer = said["json"].json
    text = answer["text"]
    assert said["human"].stdout == f"{text}\n"
    assert said["quiet"].stdout.splitlines() == text.splitlines()
    assert (said["json"].stderr, said["quiet"].stderr) == ("", "")
    summary = said["human"].stderr
    assert summary.startswith("loaded in ") and summary.endswith("; residency dense\n")
    assert " tokens/s; peak memory " in summary
    assert len(answer["tokens"]) == 12
    assert answer["prompt"] == "def main("
    assert answer["seconds"] > answer["first_token_seconds"] > 0
    assert answer["peak_bytes"] > 1e7
    assert (answer["residency"], answer["device"]) == ("dense", "cpu")
    assert (answer["graphed"], answer["not_graphed"]) == (False, "it is not on a GPU")


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes | None) -> None:
    """Give stdin some bytes; None is a terminal, on which nobody types."""
    source = io.BytesIO(data or b"")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=source, isatty=lambda: data is None))


def test_a_prompt_is_an_argument_an_option_or_stdin(small: Path, neuzip, monkeypatch):
    few = ("--max-new-tokens", 1, "--device", "cpu", "--json")
    stdin(monkeypatch, b"from stdin\n")
    for words, prompt in (
        (("from an argument",), "from an argument"),
        (("-p", "from an option"), "from an option"),
        ((), "from stdin"),
    ):
        assert neuzip("generate", small, *words, *few).json["prompt"] == prompt
    both = neuzip("generate", small, "a", "--prompt", "b")
    assert both.exit_code == 2
    assert both.stderr.startswith("error: --prompt and PROMPT: both give a prompt\n")
    stdin(monkeypatch, None)
    none = neuzip("generate", small)
    assert none.exit_code == 2 and none.stderr.startswith("error: PROMPT: is missing\nhint: ")


def test_slow_code_for_packed_weights_is_told(small: Path, neuzip):
    arguments = ("generate", small, "import", "--max-new-tokens", 1, "--device", "cpu")
    hint = "hint: on a CPU packed weights run by slow reference code; --residency dense is faster\n"
    assert hint in neuzip(*arguments, "--residency", "packed").stderr
    assert hint not in neuzip(*arguments).stderr


def test_a_stop_string_may_be_a_line_end(small: Path, neuzip):
    command = ("generate", small, "def main(", "--max-new-tokens", 40, "--device", "cpu", "--json")
    whole, made = neuzip(*command).json, neuzip(*command, "--stop", r"\n").json
    assert "\n" in whole["text"] and made["text"] == whole["text"].partition("\n")[0]
    assert (whole["finish_reason"], made["finish_reason"]) == ("length", "stop")


def test_prompt_from_stdin_less_its_last_line_end(small: Path, neuzip, monkeypatch):
    stdin(monkeypatch, "def über(\n\n".encode())
    said = neuzip("generate", small, "--prompt", "-", "--max-new-tokens", 3, "--device", "cpu", "--json")
    assert said.json["prompt"] == "def über(\n"
    stdin(monkeypatch, b"ab\xff")
    said = neuzip("generate", small, "--prompt", "-")
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.startswith("error: PROMPT from stdin: not UTF-8: byte 0xff at position 2\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "--prompt: is empty"),
        (["--prompt", "x", "--max-new-tokens", "300"], "--max-new-tokens 300: behind 1 of prompt"),
        (["--prompt", "x", "--seed", "1"], "--seed: has no effect at temperature 0"),
        (
            ["--prompt", "x", "--temperature", "1", "--top-p", "0"],
            "--top-p 0.0: is not above 0 and at most 1",
        ),
        (["--prompt", "x", "--top-k", "5"], "--top-k: has no effect at temperature 0"),
        (["--prompt", "x", "--min-p", "0.1"], "--min-p: has no effect at temperature 0"),
        (["--prompt", "x", "--temperature", "1", "--min-p", "1"], "--min-p 1.0: is not from 0 to below 1"),
        (["--prompt", "x", "--temperature", "1e-40"], "--temperature 1e-40: is too small to divide by"),
        (
            ["--prompt", "x", "--temperature", "1", "--seed", str(1 << 64)],
            "--seed 18446744073709551616: is no",
        ),
        (["--prompt", "x", "--stop", ""], "--stop: is empty"),
        (["--prompt", "x", "--residency", "ans", "--device", "cpu"], ""),
    ],
    ids=[
        "empty prompt",
        "too long",
        "seed",
        "top-p",
        "top-k",
        "min-p",
        "most",
        "cold",
        "long seed",
        "stop",
        "ans on a CPU",
    ],
)
def test_wrong_use(options: list[str], message: str, small: Path, neuzip):
    said = neuzip("generate", small, *options)
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.startswith(f"error: {message}")
    assert "hint: " in said.stderr


def test_wrong_use_is_said_before_the_weights_are_read(small: Path, neuzip, monkeypatch):
    from neuzip.runtime.hf import load

    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    assert neuzip("generate", small, "--prompt", "x", "--max-new-tokens", 300).exit_code == 2


@pytest.mark.parametrize(
    "options", [["--top-k", 5], ["--temperature", 1, "--top-p", 0], ["--stop", ""]], ids=["k", "p", "stop"]
)
def test_wrong_use_is_said_before_a_download(options: list[object], neuzip, monkeypatch):
    from neuzip.formats.hub import download

    monkeypatch.setattr(download, "_download", lambda *_: pytest.fail("the model was downloaded"))
    assert neuzip("generate", "org/model", "x", *options).exit_code == 2


def test_text_cannot_steer_the_terminal_but_json_has_it(small: Path, neuzip, monkeypatch):
    def say(*_: Any, on_text: Callable[[str], None], **__: Any) -> Generation:
        on_text("a\x1b[2J")
        on_text("b\n")
        return Generation("a\x1b[2Jb\n", (1, 2), 0.2, 0.1)

    monkeypatch.setattr(generate_module, "generate", say)
    said = neuzip("generate", small, "--prompt", "x", "--device", "cpu")
    assert said.stdout == "a\\x1b[2Jb\n\n"
    assert "; 2 tokens in 0.20 s; the first after 0.10 s, then 10.0 tokens/s; peak " in said.stderr
    assert neuzip("generate", small, "--prompt", "x", "--json").json["text"] == "a\x1b[2Jb\n"


def test_interrupt_ends_the_line_and_the_command(small: Path, neuzip, monkeypatch):
    def say(*_: Any, on_text: Callable[[str], None], **__: Any) -> Generation:
        on_text("half a")
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "generate", say)
    said = neuzip("generate", small, "--prompt", "x", "--device", "cpu")
    assert (said.exit_code, said.stdout) == (130, "half a\n")
    assert said.stderr == "error: interrupted\n"


# A real model


@pytest.mark.parametrize("residency", ["dense", "packed", pytest.param("ans", marks=pytest.mark.gpu)])
def test_wikilm_says_the_same_in_every_residency(
    residency: str, neuzip_data: Path, neuzip, tmp_path: Path, device: torch.device
):
    """All of its tokens; on a GPU packed sums in another order, which may decide ties otherwise."""
    plain, small = neuzip_data / "wikilm-26m", tmp_path / "small"
    compress(plain, small)
    tokens = 256 if device.type == "cuda" else 12
    text = "The history of the"
    ids = AutoTokenizer.from_pretrained(plain)(text, return_tensors="pt")["input_ids"].to(device)
    original = AutoModelForCausalLM.from_pretrained(plain, dtype="auto").to(device)
    whole = original.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    said = neuzip(
        "generate", small, "--prompt", text, "--max-new-tokens", tokens, "--residency", residency, "--json"
    )
    if residency == "packed" and device.type == "cuda":
        assert_tied_at_most(original, ids, torch.tensor([said.json["tokens"]]), 8)
    else:
        assert said.json["tokens"] == whole[0, ids.shape[1] :].tolist()
