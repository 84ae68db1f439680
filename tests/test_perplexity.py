"""Perplexity: which token is predicted from what, how sure the figure is, and what the command says of it."""

from __future__ import annotations

import copy
import json
import math
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from neuzip.compress import Rule, Scheme, compress
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.perplexity import (
    Difference,
    Estimate,
    Evaluation,
    Text,
    Window,
    cut,
    evaluate,
    mean,
    perplexity,
    prepare,
    read_text,
    window_losses,
)

pytestmark = pytest.mark.usefixtures("one_thread")

POSITIONS = 32
TEXT = Text("made up", "Ein Bär, zwei Bären.\nThe quick brown fox jumps over the lazy dog. " * 3)


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


# Windows


@pytest.mark.parametrize(
    ("tokens", "window", "stride", "expected"),
    [
        (0, 4, 4, []),
        (1, 4, 4, []),
        (2, 4, 4, [(0, 1, 1)]),
        (5, 4, 4, [(0, 4, 4)]),
        (6, 4, 4, [(0, 4, 4), (4, 5, 1)]),
        (9, 4, 4, [(0, 4, 4), (4, 8, 4)]),
        (9, 4, 2, [(0, 4, 4), (2, 6, 2), (4, 8, 2)]),
        (10, 4, 3, [(0, 4, 4), (3, 7, 3), (6, 9, 2)]),
        (4, 2, 1, [(0, 2, 2), (1, 3, 1)]),
        (4, 1, 1, [(0, 1, 1), (1, 2, 1), (2, 3, 1)]),
    ],
)
def test_windows(tokens, window, stride, expected):
    assert list(cut(tokens, window, stride)) == [Window(*w) for w in expected]


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 16, 17, 18, 100])
def test_every_token_but_the_first_is_predicted_once(tokens, stride):
    predicted = [t for w in cut(tokens, 8, stride) for t in range(w.stop - w.scored + 1, w.stop + 1)]
    assert predicted == list(range(1, tokens))
    assert all(w.stop - w.start <= 8 for w in cut(tokens, 8, stride))


# Losses


def reference(model: LlamaForCausalLM, ids: torch.Tensor, windows: list[Window]) -> list[float]:
    """Token by token, in float64, one window at a time."""
    exact = LlamaForCausalLM(model.config).double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    exact.requires_grad_(False)
    sums = []
    for w in windows:
        chances = exact(ids[None, w.start : w.stop]).logits[0].log_softmax(-1)
        places = range(w.stop - w.scored, w.stop)
        sums.append(-sum(float(chances[at - w.start, ids[at + 1]]) for at in places))
    return sums


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 9), (300, 300), (2, 1)])
def test_losses_are_those_of_a_plain_float64_computation(window, stride, model):
    ids = torch.randint(0, 256, (130,), generator=torch.Generator().manual_seed(3))
    windows = list(cut(ids.numel(), window, stride))
    found = list(window_losses(model, ids, windows))
    expected = reference(model, ids, windows)
    assert found == pytest.approx(expected, rel=2e-6)
    assert math.fsum(found) / 129 > 4  # a model that has learnt nothing


def test_progress_counts_predictions(model):
    told: list[int] = []
    windows = list(cut(40, 16, 6))
    list(window_losses(model, torch.zeros(40, dtype=torch.int64), windows, told.append))
    assert sum(told) == 39


def test_losses_that_are_not_finite_are_an_error(model):
    broken = LlamaForCausalLM(model.config)
    broken.model.norm.weight.data.fill_(float("inf"))
    with pytest.raises(NeuzipError, match="the loss of tokens 0 to 4 is nan") as caught:
        list(window_losses(broken, torch.arange(5), list(cut(5, 4, 4))))
    assert "--dtype" in caught.value.hint


# Standard errors


def test_standard_error_of_equal_windows_is_that_of_their_means():
    sums = [3.0, 5.0, 4.0, 8.0]
    found = mean(sums, [2] * 4)
    assert found.value == 2.5
    assert found.standard_error == pytest.approx(statistics.stdev(s / 2 for s in sums) / 2)


def test_a_short_window_weighs_what_it_has():
    found = mean([40.0, 20.0, 1.0], [20, 10, 1])
    assert found.value == pytest.approx(61 / 31)
    residuals = [40 - 20 * 61 / 31, 20 - 10 * 61 / 31, 1 - 61 / 31]
    assert found.standard_error == pytest.approx(math.sqrt(3 / 2 * sum(r * r for r in residuals)) / 31)


def test_standard_error_covers_what_chance_does():
    generator = torch.Generator().manual_seed(4)
    counts = [20] * 30 + [7]
    draws = []
    for _ in range(400):
        shared = torch.randn(len(counts), generator=generator)  # what the tokens of a window have in common
        draws.append(mean([t * (3 + float(x)) for t, x in zip(counts, shared, strict=True)], counts))
    spread = statistics.stdev(d.value for d in draws)
    assert statistics.mean(d.standard_error or 0 for d in draws) == pytest.approx(spread, rel=0.1)


def test_one_window_has_no_standard_error():
    assert mean([4.0], [2]) == Estimate(2.0, None)
    assert perplexity(Estimate(0.0, None)) == Estimate(1.0, None)


def test_perplexity_by_the_delta_method():
    found = perplexity(Estimate(3.0, 1e-6), per=1.5)
    assert found.value == math.exp(4.5)
    assert found.standard_error == pytest.approx(math.exp(1.5 * (3.0 + 1e-6)) - math.exp(4.5), rel=1e-4)
    assert perplexity(Estimate(3.0, 0.1), per=1e4) == Estimate(math.inf, math.inf)


# A text


def run(*checkpoints: Path, text: Text = TEXT, **options: Any) -> Evaluation:
    return evaluate(prepare(checkpoints, text, device="cpu", **options))


def test_figures_are_of_the_same_losses(checkpoint: Path):
    found = run(checkpoint, window=16)
    c, (score,) = found.convention, found.scores
    size = len(TEXT.content.encode())
    assert (c.tokens, c.words, c.bytes) == (size - 1, 39, size)  # a token is a byte
    assert c.windows == math.ceil((size - 1) / 16)
    total = score.nll.value * c.tokens
    assert score.token_perplexity.value == pytest.approx(math.exp(total / c.tokens))
    assert score.word_perplexity is not None and score.byte_perplexity is not None
    assert score.bits_per_byte is not None
    assert score.word_perplexity.value == pytest.approx(math.exp(total / 39))
    assert score.byte_perplexity.value == pytest.approx(math.exp(total / size))
    assert score.bits_per_byte.value == pytest.approx(total / size / math.log(2))
    relative = [e.standard_error / e.value for e in (score.nll, score.bits_per_byte) if e.standard_error]
    assert relative[0] == pytest.approx(relative[1])


def test_lossless_gives_the_same_figures_to_the_last_bit(checkpoint: Path, lossless: Path):
    before, after = run(checkpoint, lossless, window=16).scores
    assert before.difference is None
    assert after.difference == Difference(Estimate(0.0, 0.0), identical=True)
    assert before.nll == after.nll == run(lossless, window=16).scores[0].nll


def test_rounding_shows_and_its_difference_is_surer_than_the_figures(checkpoint, lossless, rounded):
    before, same, after = run(checkpoint, lossless, rounded, window=16).scores
    assert same.difference is not None and after.difference is not None
    assert same.difference.identical and not after.difference.identical
    change = after.difference.nll
    assert change.value == pytest.approx(after.nll.value - before.nll.value)
    assert change.standard_error is not None and after.nll.standard_error is not None
    assert 0 < change.standard_error < after.nll.standard_error


def test_default_window_is_what_the_model_can(checkpoint: Path):
    assert (run(checkpoint).convention.window, run(checkpoint).convention.stride) == (POSITIONS, POSITIONS)


@pytest.mark.parametrize(
    ("count", "words", "size"),
    [
        (1, 1, 2),  # Ei
        (15, 4, 16),  # Ein Bär, zwei B
        (16, 4, 18),  # Ein Bär, zwei Bä: half a character counts as all of it
        (17, 4, 18),
        (10_000, 39, len(TEXT.content.encode())),
    ],
)
def test_max_tokens_bounds_predictions_words_and_bytes(count, words, size, checkpoint: Path):
    c = run(checkpoint, window=16, max_tokens=count).convention
    assert c.tokens == min(count, len(TEXT.content.encode()) - 1)
    assert (c.words, c.bytes) == (words, size)
    assert c.windows == math.ceil(c.tokens / 16)


def test_text_shorter_than_a_window(checkpoint: Path):
    found = run(checkpoint, text=Text("short", "abc"))
    assert (found.convention.tokens, found.convention.windows) == (2, 1)
    assert found.scores[0].token_perplexity.standard_error is None


@pytest.mark.parametrize("content", ["", "a"])
def test_text_without_a_token_to_predict(content: str, checkpoint: Path):
    with pytest.raises(NeuzipError, match=f"short: is too short: of {len(content)} tokens none"):
        run(checkpoint, text=Text("short", content))


def test_dtype(checkpoint: Path):
    (exact,), (narrow,) = run(checkpoint).scores, run(checkpoint, dtype="bfloat16").scores
    assert (exact.dtype, narrow.dtype) == ("float32", "bfloat16")
    assert exact.nll != narrow.nll


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": POSITIONS + 1}, "--window 33: the model was made for 32 tokens"),
        ({"window": 4, "stride": 5}, "--stride 5 is larger than the window, 4"),
        ({"stride": 64}, "--stride 64 is larger than the window, 32"),
    ],
)
def test_windows_that_cannot_be(options: dict[str, int], message: str, checkpoint: Path):
    with pytest.raises(UsageError, match=message):
        prepare([checkpoint], TEXT, **options)


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


def test_texts_are_utf8_files_or_the_demo(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes("zwei Bären\r\n".encode())
    assert read_text(str(path)) == Text(str(path), "zwei Bären\r\n")
    assert read_text("demo").name.startswith("demo (Python 3.")
    assert len(read_text("demo").content) > 10_000
    path.write_bytes("Bären".encode("latin-1"))
    with pytest.raises(NeuzipError, match=r"a.txt: is not UTF-8: byte 0xe4 at position 1"):
        read_text(str(path))
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NeuzipError, match="cannot be read"):
            read_text(str(place))


# The command


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT.content, encoding="utf-8")
    return path


def test_command_compares_before_and_after(checkpoint, rounded, text_file, in_all_modes):
    said = in_all_modes("eval", rounded, "--base", checkpoint, "--text", text_file, "--device", "cpu")
    size = len(TEXT.content.encode())
    human = said["human"].stdout
    assert f"{size - 1} tokens predicted, 39 words, {size} bytes\n" in human
    assert "7 of up to 32 predictions, stride 32: no overlap; no special tokens\n" in human
    assert "model    float32 on cpu; python 3." in human
    for figure in ("token-level perplexity", "word-level perplexity", "byte-level perplexity", "bits a byte"):
        assert figure in human
    assert "± standard error over the 7 windows\nafter - before: " in human
    assert " nats a token, perplexity " in human
    assert {one.stderr for one in said.values()} == {""}

    answer = said["json"].json
    (expected,) = run(rounded).scores
    assert answer["convention"]["special_tokens"] is False
    assert (answer["convention"]["window"], answer["convention"]["stride"]) == (32, 32)
    assert (answer["before"]["path"], answer["after"]["path"]) == (str(checkpoint), str(rounded))
    assert answer["after"]["token_perplexity"]["value"] == expected.token_perplexity.value
    assert answer["after"]["difference"]["identical"] is False
    assert set(answer["versions"]) == {"python", "torch", "transformers"}
    before, after = said["quiet"].stdout.splitlines()
    assert float(before) == answer["before"]["token_perplexity"]["value"]
    assert float(after) == answer["after"]["token_perplexity"]["value"]


def test_command_says_that_lossless_is_identical(checkpoint, lossless, text_file, neuzip):
    said = neuzip("eval", lossless, "--base", checkpoint, "--text", text_file, "--device", "cpu")
    assert said.stdout.endswith("\nafter - before: the same to the last bit in every window\n")


def test_command_on_one_checkpoint(checkpoint, text_file, neuzip):
    arguments = ["eval", checkpoint, "--text", text_file, "--device", "cpu", "--window", 16, "--stride", 4]
    said = neuzip(*arguments, "--max-tokens", 100)
    assert "22 of up to 16 predictions, stride 4: each overlaps the last by 12; no special" in said.stdout
    assert f"  {checkpoint}\n" in said.stdout
    assert "before" not in said.stdout
    one = neuzip(*arguments, "--max-tokens", 1)
    assert (one.exit_code, one.stderr) == (0, "")
    assert "±" not in one.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--text", "nowhere.txt"], 1, "error: nowhere.txt: cannot be read: No such file or directory\n"),
        (["--text", "demo", "--window", "33"], 2, "error: --window 33: the model was made for 32 tokens\n"),
        (["--text", "demo", "--window", "0"], 2, "error: invalid value for '--window'"),
        ([], 2, "error: missing option '--text'"),
    ],
)
def test_command_refuses(arguments, code, message, checkpoint, neuzip):
    said = neuzip("eval", checkpoint, *arguments)
    assert (said.exit_code, said.stdout) == (code, "")
    assert said.stderr.startswith(message)


def test_trained_checkpoint_in_the_documented_convention(neuzip_data: Path, tmp_path: Path):
    """The whole text gives 105.35; here is its beginning."""
    source = neuzip_data / "wikilm-26m"
    text = read_text(str(neuzip_data / "wikitext-2" / "wiki.test.raw"))
    found = run(source, text=text, max_tokens=4096)
    assert (found.convention.window, found.convention.windows) == (1024, 4)
    assert found.scores[0].token_perplexity.value == pytest.approx(88.680, rel=1e-4)


def test_weights_may_stay_compressed(neuzip, text_file):
    """Packed weights are the same weights: only sums are rounded in another order."""
    options = {"max_tokens": 200, "dtype": "bfloat16"}
    dense, packed = run(CHECKPOINT, **options), run(CHECKPOINT, residency="packed", **options)
    assert packed.scores[0].dtype == "bfloat16"
    assert packed.scores[0].nll.value == pytest.approx(dense.scores[0].nll.value, rel=2e-3)
    arguments = ["eval", CHECKPOINT, "--text", text_file, "--max-tokens", 20, "--residency", "packed"]
    arguments += ["--device", "cpu"]
    said = neuzip(*arguments)
    assert "\nmodel    bfloat16 on cpu, residency packed; python 3." in said.stdout
    assert neuzip(*arguments, "--json").json["convention"]["residency"] == "packed"
    refused = neuzip(*arguments, "--dtype", "float32")
    assert "error: the residency 'packed' is for bf16 and fp16 weights, not torch.float32\n" in refused.stderr
    refused = neuzip(*arguments[:-4], "--residency", "ans", "--device", "cpu")
    assert (refused.exit_code, refused.stderr.splitlines()[0]) == (
        2, "error: the residency 'ans' needs CUDA devices for all weights, not cpu"
    )  # fmt: skip
