"""Perplexity: which token is predicted from what, how sure the figure is, and what the command says of it."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from neuzip.compress import Rule, Scheme, compress
from neuzip.compress.ranks import ALONE
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.measures.convention_names import NAMES
from neuzip.eval.measures.conventions import Reading
from neuzip.eval.measures.estimates import Estimate, Values
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.perplexity import (
    ConventionScores,
    Evaluation,
    ModelDifference,
    _described,
    evaluate,
    prepare,
    token_losses,
)
from neuzip.eval.measures.texts import Document, Text, of_content, read_text
from neuzip.eval.measures.windows import TokenWindow, cut, strided
from neuzip.runtime.hf.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

POSITIONS = 32
DOCUMENT = "Ein Bär, zwei Bären.\nThe quick brown fox jumps over the lazy dog. " * 3
TEXT = Text("made up", (Document("made up", DOCUMENT),))
THREE = Text("three", tuple(Document(str(i), DOCUMENT[: 60 + 20 * i]) for i in range(3)))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A tiny Llama of random weights, large enough that no two tokens are equally likely."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    made = LlamaForCausalLM(config)
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return made


@pytest.fixture(scope="module")
def checkpoint(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in a folder, in bf16, with a tokenizer whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("perplexity") / "model"
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="!", model_max_length=8).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def lossless(checkpoint: Path) -> Path:
    compress(checkpoint, checkpoint.parent / "lossless")
    return checkpoint.parent / "lossless"


@pytest.fixture(scope="module")
def rounded(checkpoint: Path) -> Path:
    compress(checkpoint, checkpoint.parent / "rounded", [Rule("*", Scheme("truncated", 1))])
    return checkpoint.parent / "rounded"


# Losses


def reference(model: LlamaForCausalLM, ids: torch.Tensor, windows: list[TokenWindow]) -> list[float]:
    """Token by token, in float64, one window at a time."""
    exact = LlamaForCausalLM(model.config).double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    exact.requires_grad_(False)
    losses = []
    for w in windows:
        chances = exact(ids[None, w.start : w.stop]).logits[0].log_softmax(-1)
        losses += [-float(chances[at - w.start, ids[at + 1]]) for at in range(w.stop - w.scored, w.stop)]
    return losses


@pytest.mark.parametrize(
    "windows",
    [list(cut(130, 16)), list(cut(130, 300)), list(strided(130, 16, 9)), list(strided(130, 2, 1))],
    ids=["cut", "one", "strided", "shortest"],
)
def test_losses_are_those_of_a_plain_float64_computation(windows, model):
    ids = torch.randint(0, 256, (130,), generator=torch.Generator().manual_seed(3))
    found = token_losses(HeadedModel(model), ids, windows)
    expected = reference(model, ids, windows)
    assert found.dtype == np.float32
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert found.mean() > 4  # a model that has learnt nothing


def test_progress_counts_predictions(model):
    told: list[int] = []
    windows = list(strided(40, 16, 6))
    token_losses(HeadedModel(model), torch.zeros(40, dtype=torch.int64), windows, on_tokens=told.append)
    assert sum(told) == 39


def test_losses_that_are_not_finite_are_an_error(model):
    broken = LlamaForCausalLM(model.config)
    broken.model.norm.weight.data.fill_(float("inf"))
    with pytest.raises(NeuzipError, match="the loss of 4 of 4 tokens is nan") as caught:
        token_losses(HeadedModel(broken), torch.arange(5), list(cut(5, 4)))
    assert "`dtype`" in caught.value.hint


# A text


def run(*checkpoints: Path, text: Text = TEXT, **options: Any) -> Evaluation:
    options = {"conventions": ["token"], **options}
    return evaluate(prepare(checkpoints, text, device="cpu", **options))


def token(*checkpoints: Path, **options: Any) -> ConventionScores:
    return run(*checkpoints, **options).by("token")


def test_figures_are_of_the_same_losses(checkpoint: Path):
    measured = token(checkpoint, window=16)
    c, (score,) = measured.convention, measured.scores
    size = len(DOCUMENT.encode())
    assert (c.tokens, c.words, c.bytes) == (size - 1, 39, size - 1)  # a token is a byte
    assert c.windows == math.ceil((size - 1) / 16)
    total = score.nll.value * c.tokens
    assert score.token_perplexity.value == pytest.approx(math.exp(total / c.tokens))
    assert score.word_perplexity is not None and score.byte_perplexity is not None
    assert score.bits_per_byte is not None
    assert score.word_perplexity.value == pytest.approx(math.exp(total / 39))
    assert score.byte_perplexity.value == pytest.approx(math.exp(total / (size - 1)))
    assert score.bits_per_byte.value == pytest.approx(total / (size - 1) / math.log(2))


def ratio(losses: Values, of: Values, units: Values) -> Estimate:
    """The sum of losses per unit, and its standard error over blocks: written out."""
    blocks = range(len(units))
    value = losses.sum() / units.sum()
    residuals = [losses[of == b].sum() - value * units[b] for b in blocks]
    squares = sum(r * r for r in residuals)
    return Estimate(value, math.sqrt(len(units) / (len(units) - 1) * squares) / units.sum())


def test_standard_errors_a_word_are_of_the_words_of_each_block(checkpoint: Path, rounded: Path):
    """Documents differ in how many words and bytes they have a token."""
    contents = ["a bb " * 20, "Bären " * 15, "interminable " * 8, "x y z " * 17, *["The quick fox " * 7] * 6]
    text = Text("ten", tuple(Document(str(i), content) for i, content in enumerate(contents)))
    task = prepare([checkpoint, rounded], text, conventions=["lm-eval"], device="cpu")
    (reading,), found = task.readings, evaluate(task).measured[0]
    assert found.blocks == "10 documents"
    words = np.array([len(content.split()) + 1 for content in contents])  # an empty one behind the last
    size = np.array([len(content.encode()) for content in contents])
    losses = [
        token_losses(HeadedModel(load_model(path, torch.float32)), reading.ids, reading.windows)
        for path in (checkpoint, rounded)
    ]
    after = found.scores[1]
    of = reading.blocks.of
    per_word, per_byte = (ratio(losses[1].astype(float), of, units) for units in (words, size))

    def check(one: Estimate | None, value: float, error: float | None) -> None:
        assert one is not None and error is not None
        assert (one.value, one.standard_error) == (pytest.approx(value), pytest.approx(error))

    scale = math.exp(per_word.value)
    check(after.word_perplexity, scale, scale * (per_word.standard_error or 0))
    scale = math.exp(per_byte.value)
    check(after.byte_perplexity, scale, scale * (per_byte.standard_error or 0))
    scale = 1 / math.log(2)
    check(after.bits_per_byte, scale * per_byte.value, scale * (per_byte.standard_error or 0))
    change = losses[1].astype(float) - losses[0]
    assert after.difference is not None
    for one, units in ((after.difference.nll_per_word, words), (after.difference.nll_per_byte, size)):
        expected = ratio(change, of, units)
        check(one, expected.value, expected.standard_error)
    # What words a token have in common with losses a token counts.
    of_tokens = after.nll.standard_error
    assert of_tokens is not None and per_word.standard_error is not None
    assert per_word.standard_error != pytest.approx(of_tokens * len(of) / words.sum(), rel=0.05)


def test_words_of_parts_of_detokenised_pages_have_no_standard_error(checkpoint: Path):
    page = " = Du Fu = \n \n Du Fu wrote 1 @,@ 500 poems , and a letter . He sold most of them for rice . \n"
    score = run(checkpoint, text=of_content("wiki", page * 2), conventions=["lm-eval"]).measured[0].scores[0]
    assert score.nll.standard_error is not None
    for figure in (score.word_perplexity, score.byte_perplexity, score.bits_per_byte):
        assert figure is not None and figure.standard_error is None


def test_speed_is_all_that_was_fed_by_the_time_of_the_slowest(checkpoint: Path):
    model = HeadedModel(load_model(checkpoint))
    model.fed, model.seconds = 300, 2.0
    assert _described(model, "rotated", ALONE).tokens_per_second == 150
    model.seconds = 0.0
    assert _described(model, "rotated", ALONE).tokens_per_second == math.inf


def own_mean(model: LlamaForCausalLM, reading: Reading) -> float:
    losses = reference(model, reading.ids, list(reading.windows))
    return math.fsum(losses) / len(losses)


def test_all_conventions(checkpoint: Path, model: LlamaForCausalLM):
    """Each from the tokens and windows that test_eval_conventions looks at."""
    task = prepare([checkpoint], THREE, window=16, stride=5, device="cpu")
    found = evaluate(task)
    assert [m.convention.name for m in found.measured] == list(NAMES)
    for reading, measured in zip(task.readings, found.measured, strict=True):
        (score,) = measured.scores
        assert score.nll.value == pytest.approx(own_mean(model, reading), rel=1e-5)
        assert measured.convention is reading.convention
    rolling = found.by("lm-eval")
    (score,), c = rolling.scores, rolling.convention
    pages = [d.content for d in THREE.documents]
    size = sum(len(page.encode()) for page in pages)
    assert (c.tokens, c.bytes, rolling.blocks) == (size, size, "9 windows of 3 documents")
    assert score.byte_perplexity is not None
    assert score.byte_perplexity.value == pytest.approx(math.exp(score.nll.value))
    assert found.by("token").convention.tokens == len(THREE.content.encode()) - 1
    with pytest.raises(KeyError):
        run(checkpoint).by("strided")


def test_standard_errors_are_over_documents(checkpoint: Path, model: LlamaForCausalLM):
    nine = Text("nine", tuple(Document(str(i), DOCUMENT[i : 30 + 2 * i]) for i in range(9)))
    measured = token(checkpoint, text=nine, window=16)
    (reading,) = prepare([checkpoint], nine, window=16, conventions=["token"], device="cpu").readings
    losses = np.array(reference(model, reading.ids, list(reading.windows)))
    mean = losses.mean()
    ends = np.cumsum([len(d.content.encode()) + 2 for d in nine.documents]) - 1
    parts = np.split(losses, ends[:8])
    assert sum(map(len, parts)) == len(losses) and len(parts) == 9
    residuals = [part.sum() - mean * len(part) for part in parts]
    expected = math.sqrt(9 / 8 * sum(r * r for r in residuals)) / len(losses)
    assert measured.blocks == "9 documents"
    assert measured.scores[0].nll.standard_error == pytest.approx(expected, rel=1e-4)


def test_lossless_gives_the_same_figures_to_the_last_bit(checkpoint: Path, lossless: Path):
    before, after = token(checkpoint, lossless, window=16).scores
    assert before.difference is None
    zero = Estimate(0.0, 0.0)
    assert after.difference == ModelDifference(zero, identical=True, nll_per_word=zero, nll_per_byte=zero)
    assert before.nll == after.nll == token(lossless, window=16).scores[0].nll


def test_rounding_shows_and_its_difference_is_surer_than_the_figures(checkpoint, lossless, rounded):
    before, same, after = token(checkpoint, lossless, rounded, window=16).scores
    assert same.difference is not None and after.difference is not None
    assert same.difference.identical and not after.difference.identical
    change = after.difference.nll
    assert change.value == pytest.approx(after.nll.value - before.nll.value)
    assert change.standard_error is not None and after.nll.standard_error is not None
    assert 0 < change.standard_error < after.nll.standard_error


def test_two_models_at_once_have_the_figures_of_each_alone(checkpoint: Path, rounded: Path):
    alone = run(checkpoint, rounded, window=16, conventions=None)
    task = prepare([checkpoint, rounded], TEXT, window=16, device="cpu")
    told: list[int] = []
    both = evaluate(task, divergence=True, on_tokens=told.append)
    assert sum(told) == task.tokens == 2 * sum(m.convention.tokens for m in both.measured)
    for one, another in zip(alone.measured, both.measured, strict=True):
        assert [s.nll for s in one.scores] == [s.nll for s in another.scores]
    assert alone.comparison is None and alone.paired is None
    c, after = both.comparison, both.by("token").scores[1]
    assert c is not None and after.difference is not None and both.compared == "token"
    assert (c.other_nll, c.nll_difference) == (after.nll, after.difference.nll)
    assert c.kld.mean.value > 0 and not c.identical


def test_default_window_is_what_the_model_can(checkpoint: Path):
    assert token(checkpoint).convention.window == POSITIONS
    assert run(checkpoint, conventions=["lm-eval"]).measured[0].convention.window == POSITIONS


def test_default_window_is_what_all_models_can(checkpoint: Path, tmp_path: Path):
    shorter = Path(shutil.copytree(checkpoint, tmp_path / "shorter"))
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 20}))
    for pair in ((checkpoint, shorter), (shorter, checkpoint)):
        readings = prepare(pair, TEXT, conventions=["token", "lm-eval"], device="cpu").readings
        assert [reading.convention.window for reading in readings] == [20, 20]


def test_text_shorter_than_a_window(checkpoint: Path):
    found = run(checkpoint, text=Text("short", (Document("short", "abc"),)), conventions=None)
    measured = found.by("token")
    assert (measured.convention.tokens, measured.convention.windows) == (2, 1)
    assert measured.scores[0].token_perplexity.standard_error is None
    assert found.skipped == {"llama.cpp": "short: has 3 tokens, and a window of llama.cpp 32"}
    with pytest.raises(NeuzipError, match="has 3 tokens, and a window"):
        run(checkpoint, text=Text("short", (Document("short", "abc"),)), conventions=["llama.cpp"])


def test_text_without_a_token_to_predict(checkpoint: Path):
    with pytest.raises(NeuzipError, match="short: is too short: of 1 tokens none"):
        run(checkpoint, text=Text("short", (Document("short", "a"),)), conventions=None)


def test_dtype(checkpoint: Path):
    exact, narrow = run(checkpoint), run(checkpoint, dtype="bfloat16")
    assert (exact.models[0].dtype, narrow.models[0].dtype) == ("float32", "bfloat16")
    assert exact.measured[0].scores[0].nll != narrow.measured[0].scores[0].nll
    assert narrow.models[0].weight_bytes == exact.models[0].weight_bytes / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": POSITIONS + 1}, "`window=33`: the model was made for 32 tokens"),
        ({"window": 4, "stride": 5}, "`stride=5` is larger than the window, 4"),
        ({"stride": 64}, "`stride=64` is larger than the window, 32"),
        ({"device": "cpu", "device_map": "auto"}, "`device_map='auto'` excludes `device='cpu'`"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], message: str, checkpoint: Path):
    with pytest.raises(UsageError, match=message):
        prepare([checkpoint], TEXT, **options)


def test_a_device_map_is_for_one_process(checkpoint: Path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="`device_map` would spread each process"):
        prepare([checkpoint], TEXT, device_map="auto")


def test_cuda_that_is_not_there(checkpoint: Path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no CUDA device"):
        prepare([checkpoint], TEXT, device="cuda")


def edit_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    change(document["model"]["vocab"])
    path.write_text(json.dumps(document))


def swap(vocabulary: dict[str, Any]) -> None:
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def test_models_with_different_tokenizers_are_not_compared(checkpoint: Path, tmp_path: Path):
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    edit_tokenizer(other, swap)
    with pytest.raises(NeuzipError, match="cut the text differently"):
        prepare([checkpoint, other], TEXT)


def test_a_token_that_the_model_does_not_have(checkpoint: Path, tmp_path: Path):
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    edit_tokenizer(other, lambda vocabulary: vocabulary.update(e=300))
    with pytest.raises(NeuzipError, match="makes token 300, the weights have 256"):
        run(other)


def test_a_model_that_forms_its_logits_says_so(checkpoint: Path, rounded: Path, monkeypatch):
    """And so does the one that it is compared with; the figures are the same but for rounding."""
    task = prepare([checkpoint, rounded], TEXT, window=16, conventions=["token"], device="cpu")
    expected = evaluate(task, divergence=True)
    probe, reasons = HeadedModel._probe, ["for a test", None]
    monkeypatch.setattr(HeadedModel, "_probe", lambda self: probe(self) or reasons.pop())
    found = evaluate(task, divergence=True)
    of_base, of_other = (model.formed for model in found.models)
    assert of_other == "for a test"
    assert of_base == f"it is compared with {rounded}, of which for a test"
    for one, another in zip(expected.measured[0].scores, found.measured[0].scores, strict=True):
        assert another.nll.value == pytest.approx(one.nll.value, rel=1e-5)
    assert found.comparison is not None and expected.comparison is not None
    assert found.comparison.kld.mean.value == pytest.approx(expected.comparison.kld.mean.value, rel=1e-2)


@pytest.mark.weekly
def test_trained_checkpoint_in_the_documented_convention(neuzip_data: Path):
    """The whole text gives 105.35; here is its beginning."""
    source = neuzip_data / "wikilm-26m"
    text = read_text(str(neuzip_data / "wikitext-2" / "wiki.test.raw"))
    found = token(source, text=text, max_tokens=4096)
    assert (found.convention.window, found.convention.windows) == (1024, 4)
    assert found.scores[0].token_perplexity.value == pytest.approx(88.680, rel=1e-4)


def test_lm_eval_gives_the_same(neuzip_data: Path):
    """lm-evaluation-harness 0.4.13, in fp32 on a CPU, of the first article."""
    source = neuzip_data / "wikilm-26m"
    whole = read_text(str(neuzip_data / "wikitext-2" / "wiki.test.raw"))
    text = Text("one", whole.documents[:2], whole.joint, whole.wikitext)
    measured = run(source, text=text, conventions=["lm-eval"]).measured[0]
    c, (score,) = measured.convention, measured.scores
    assert (c.tokens, c.words, c.bytes) == (1_575, 1_093, 5_667)
    assert score.word_perplexity is not None and score.bits_per_byte is not None
    assert score.word_perplexity.value == pytest.approx(1326.388, rel=1e-5)
    assert score.bits_per_byte.value == pytest.approx(2.00070636, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["dense", "packed", "ans"])
def test_on_a_gpu(residency):
    """bf16 rounds otherwise than fp32 on the CPU does; dense and ans give the same bits."""
    text = read_text("demo")
    task = prepare([CHECKPOINT], text, device="cuda", residency=residency, max_tokens=5000)
    found = evaluate(task)
    dense = evaluate(prepare([CHECKPOINT], text, device="cuda", max_tokens=5000))
    exact = run(CHECKPOINT, text=text, max_tokens=5000, conventions=None)
    assert found.memory.of == "GPU memory that torch allocated"
    for one, plain, other in zip(found.measured, dense.measured, exact.measured, strict=True):
        assert one.scores[0].nll.value == pytest.approx(other.scores[0].nll.value, rel=2e-3)
        if residency == "ans":
            assert one.scores == plain.scores


# The command


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(DOCUMENT, encoding="utf-8")
    return path


@pytest.mark.slow
def test_command_compares_before_and_after(checkpoint, rounded, text_file, in_all_modes):
    said = in_all_modes("eval", rounded, "--original", checkpoint, "--text", text_file, "--device", "cpu")
    size = len(DOCUMENT.encode())
    human = said["human"].stdout
    assert human.startswith(f"text    {text_file}: 1 document\nbefore  {checkpoint}\nafter   {rounded}\n")
    assert (
        f"\ntoken     windows of 32 predictions, no overlap; {size - 1} tokens; ± over 7 windows\n" in human
    )
    assert "\nstrided   windows of 32 tokens, stride 16; " in human
    assert "\nllama.cpp windows of 32 tokens, their second halves; 90 tokens; " in human
    assert f"\nlm-eval   documents in windows of up to 32, BOS in front; 40 words, {size} bytes; " in human
    assert "\nin      float32 on cpu; python 3." in human
    assert f"\nafter compared with before, {size - 1} tokens (token), ± over 7 windows:\n" in human
    for figure in ("NLL, nats per token", "KL divergence, nats: mean", "top-1 agreement"):
        assert f"\n  {figure}" in human
    assert "of resident memory, both models in it; " in human
    assert max(map(len, human.splitlines()[4:])) <= 100
    assert {one.stderr for one in said.values()} == {""}

    answer = said["json"].json
    expected = run(rounded, conventions=None)
    assert (answer["before"]["path"], answer["after"]["path"]) == (str(checkpoint), str(rounded))
    assert [c["name"] for c in answer["conventions"]] == ["token", "strided", "llama.cpp", "lm-eval"]
    for found, one in zip(answer["conventions"], expected.measured, strict=True):
        assert found["after"]["nll"]["value"] == one.scores[0].nll.value
        assert found["after"]["difference"]["identical"] is False
        assert (found["tokens"], found["window"]) == (one.convention.tokens, 32)
    comparison = answer["comparison"]
    assert comparison["nll_difference"] == answer["conventions"][0]["after"]["difference"]["nll"]
    assert 0 < comparison["kld"]["mean"]["value"] < comparison["kld"]["max"]
    assert 0 < comparison["top_1"]["value"] < 1
    assert answer["memory"]["bytes"] > answer["after"]["weight_bytes"]
    assert set(answer["versions"]) == {"python", "torch", "transformers"}
    assert "paired" not in answer
    (number,) = said["quiet"].stdout.splitlines()
    assert float(number) == comparison["kld"]["mean"]["value"]


def test_command_says_that_lossless_is_identical(checkpoint, lossless, text_file, neuzip):
    arguments = ["eval", lossless, "--original", checkpoint, "--text", text_file, "--device", "cpu"]
    said = neuzip(*arguments)
    assert "\n  identical: every loss has the same bits, and every KL divergence is 0\n" in said.stdout
    assert said.stdout.count("0, to the last bit\n") == 4
    answer = neuzip(*arguments, "--json").json
    assert answer["comparison"]["identical"] is True
    assert answer["comparison"]["kld"] == {
        "mean": {"value": 0.0, "standard_error": 0.0}, "median": 0.0, "p999": 0.0, "max": 0.0
    }  # fmt: skip
    for convention in answer["conventions"]:
        assert convention["before"]["nll"] == convention["after"]["nll"]


def test_command_on_one_checkpoint(checkpoint, text_file, neuzip):
    arguments = ["eval", checkpoint, "--text", text_file, "--device", "cpu", "--window", 16, "--stride", 4]
    said = neuzip(*arguments, "--max-tokens", 100, "--conventions", "strided,token")
    assert f"\nmodel   {checkpoint}\n" in said.stdout
    assert "\nstrided   windows of 16 tokens, stride 4; 100 tokens; ± over 23 windows\n" in said.stdout
    assert "llama.cpp" not in said.stdout and "before" not in said.stdout
    one = neuzip(*arguments, "--max-tokens", 1)
    assert (one.exit_code, one.stderr) == (0, "")
    assert "\nllama.cpp left out: " in one.stdout
    quiet = neuzip(*arguments, "--quiet")
    assert float(quiet.stdout) == token(checkpoint, window=16).scores[0].token_perplexity.value


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--text", "nowhere.txt"], 1, "error: nowhere.txt: cannot be read: No such file or directory\n"),
        (["--text", "demo", "--window", "33"], 2, "error: --window 33: the model was made for 32 tokens\n"),
        (["--text", "demo", "--window", "0"], 2, "error: invalid value for '--window'"),
        (
            ["--text", "demo", "--conventions", "token,gguf"],
            2,
            "error: --conventions token,gguf: there is no ",
        ),
        (
            ["--text", "demo", "--device-map", "auto", "--device", "cpu"],
            2,
            "error: --device-map auto excludes",
        ),
        ([], 2, "error: neither --text nor --tasks is given"),
    ],
)
def test_command_refuses(arguments, code, message, checkpoint, neuzip):
    said = neuzip("eval", checkpoint, *arguments)
    assert (said.exit_code, said.stdout) == (code, "")
    assert said.stderr.startswith(message)


def test_a_device_map(checkpoint, text_file, neuzip):
    pytest.importorskip("accelerate")
    arguments = ["eval", checkpoint, "--text", text_file, "--dtype", "float32", "--conventions", "token"]
    said = neuzip(*arguments, "--device-map", "auto", "--json").json
    plain = neuzip(*arguments, "--json").json
    assert (said["device"], said["after"]["formed"]) == ("the devices of the map auto", None)
    assert said["conventions"][0]["after"]["nll"]["value"] == pytest.approx(
        plain["conventions"][0]["after"]["nll"]["value"], rel=1e-6
    )


@pytest.mark.slow
def test_weights_may_stay_compressed(neuzip, text_file):
    """Packed weights are the same weights: only sums are rounded in another order."""
    options = {"max_tokens": 200, "dtype": "bfloat16"}
    dense, packed = run(CHECKPOINT, **options), run(CHECKPOINT, residency="packed", **options)
    assert packed.models[0].dtype == "bfloat16" and packed.models[0].formed is None
    assert packed.models[0].weight_bytes < dense.models[0].weight_bytes
    nll = packed.measured[0].scores[0].nll.value
    assert nll == pytest.approx(dense.measured[0].scores[0].nll.value, rel=2e-3)
    arguments = ["eval", CHECKPOINT, "--text", text_file, "--max-tokens", 20, "--residency", "packed"]
    arguments += ["--device", "cpu"]
    said = neuzip(*arguments)
    assert "\nin      bfloat16 on cpu, residency packed; python 3." in said.stdout
    assert neuzip(*arguments, "--json").json["residency"] == "packed"
    refused = neuzip(*arguments, "--dtype", "float32")
    assert "error: the residency 'packed' is for bf16 and fp16 weights, not torch.float32\n" in refused.stderr
    refused = neuzip(*arguments[:-4], "--residency", "ans", "--device", "cpu")
    assert (refused.exit_code, refused.stderr.splitlines()[0]) == (
        2, "error: --residency ans: is decoded on a GPU, not with --device cpu"
    )  # fmt: skip


def test_a_row_that_its_error_swallows_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from types import SimpleNamespace as Some

    from neuzip.cli.output import Output
    from neuzip.cli.show.evaluation import _show_perplexities
    from neuzip.eval.measures.perplexity import ModelScore

    def shown(word: Estimate) -> str:
        nll = Estimate(3.0, 0.1)
        score = ModelScore(nll, Estimate(20.0, 2.0), word, Estimate(3.0, 0.1), Estimate(1.6, 0.1), None)
        convention = Some(name="lm-eval", rule="documents", special_tokens="none", tokens=9, words=3, bytes=9)
        measured = Some(convention=convention, blocks="9 windows", scores=(score,))
        model = Some(formed=None, path="m")
        _show_perplexities(Output(), Some(models=(model,), measured=(measured,), skipped={}))
        return capsys.readouterr().out

    said = "lm-eval   tells nothing: its error is more than half of it; use a longer text\n"
    assert said in shown(Estimate(717_693.0, 925_156.0))
    assert said not in shown(Estimate(1_435.0, 514.0))


def test_the_bar_of_eval_says_what_its_tokens_are_of(checkpoint: Path) -> None:
    from neuzip.cli.evaluating import work_text

    text = read_text("demo")
    options = {"max_tokens": 64, "device": "cpu"}
    assert work_text(prepare([checkpoint], text, conventions=["token"], **options)) == "eval"
    both = prepare([checkpoint, checkpoint], text, conventions=["token", "strided"], **options)
    assert work_text(both) == "eval, 2 models x 2 conventions"
