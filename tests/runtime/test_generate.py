"""Text from a model: what is said and when, what is refused, and that the fast loop gives the same tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from models import GROUPED, MODELS, assert_tied_at_most, opt, single_experts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from neuzip.compress import compress
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT
from neuzip.runtime.decode import generate as generate_module
from neuzip.runtime.decode.generate import ONE_TOKEN, Generation, _decode, generate, not_static
from neuzip.runtime.decode.greedy import SINGLE_EXPERTS, GreedyDecoder, NotGraphable
from neuzip.runtime.decode.prompt import Prompt, prepare
from neuzip.runtime.decode.sampling import Sampling, draw
from neuzip.runtime.decode.text_stream import TextStream
from neuzip.runtime.hf.decoder import input_device
from neuzip.runtime.hf.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, TOKENS, NEW = 3, 10, 24


# Text as it comes


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
    assert speed == (len(made.tokens) - 1) / (made.seconds - made.first_token_seconds)


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
    exact = copy.deepcopy(demo_model).float()  # in bf16 two tokens may be equally likely
    likeliest = generate(exact, prompt).tokens
    assert generate(exact, prompt, sampling=Sampling(1.5, top_p=1e-6), seed=7).tokens == likeliest


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


def test_a_capture_that_fails_costs_no_token(monkeypatch: pytest.MonkeyPatch, device: torch.device):
    """The first token has come by then."""
    torch.manual_seed(3)
    model, ids = MODELS["llama"]().to(device).eval(), torch.tensor([[0, 1, 2]])
    expected = GreedyDecoder(model, 1, 11, graph=False).generate(ids, 8)[0].tolist()
    decoder, said = GreedyDecoder(model, 1, 11, graph=False), []
    decoder._waits = True

    def fail() -> None:
        assert len(said) == 1
        raise NotGraphable(model, "made up")

    monkeypatch.setattr(decoder, "_capture", fail)
    prompt = Prompt("a", ids, words(), 8)
    stream = TextStream(prompt.tokenizer, ids, lambda text: None)
    monkeypatch.setattr(stream, "put", lambda tokens: None if tokens is ids else said.append(tokens))
    tokens, reason, seconds = _decode(decoder, decoder.prefill(ids), prompt, Sampling(), stream)
    assert (tokens, reason, len(said)) == (expected, "made up", 8)
    assert seconds > 0 and not decoder.graphed


def test_a_text_of_one_token_says_why_there_is_no_graph(monkeypatch: pytest.MonkeyPatch):
    model, ids = MODELS["llama"]().eval(), torch.tensor([[0, 1, 2]])
    decoder = GreedyDecoder(model, 1, 4, graph=False)
    decoder._waits = True
    monkeypatch.setattr(generate_module, "_decoder", lambda *_: (decoder, None))
    made = generate(model, Prompt("a", ids, words(), 1))
    assert (len(made.tokens), made.graphed, made.not_graphed) == (1, False, ONE_TOKEN)
    assert made.capture_seconds == 0


@pytest.mark.gpu
def test_what_cannot_be_captured_goes_on_without_a_graph(device: torch.device):
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
    assert "steps as a CUDA graph" in said.stderr.splitlines()
    said = neuzip(*asked, "--no-graph")
    assert "steps without a CUDA graph: transformers' loop was asked for" in said.stderr.splitlines()
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


# A real model


@pytest.mark.parametrize("residency", ["dense", "packed", pytest.param("ans", marks=pytest.mark.gpu)])
def test_wikilm_says_the_same_in_every_residency(
    residency: str, neuzip_data: Path, neuzip, tmp_path: Path, device: torch.device
):
    """All of its tokens; on a GPU packed sums in another order, which may decide ties otherwise."""
    plain, small = neuzip_data / "wikilm-26m", tmp_path / "small"
    compress(plain, small)
    tokens = 256 if device.type == "cuda" else 6
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
