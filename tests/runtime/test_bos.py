"""Models whose tokenizer puts BOS in front of a text are measured behind it, by everything that measures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import BOS, byte_tokenizer
from models import mixture
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, MixtralModel

from neuzip.compress import Rule, Scheme, compress
from neuzip.errors import UsageError
from neuzip.eval.measures.conventions import Tokenised
from neuzip.eval.measures.head import TRIALS
from neuzip.eval.measures.perplexity import evaluate, prepare
from neuzip.eval.measures.texts import Document, Text
from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.formats.card.evaluation import read_evaluation
from neuzip.runtime.hf.bos import bos_in_front, rows_behind
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.tokenizer import load_tokenizer
from neuzip.train.text import TrainingWindows

pytestmark = pytest.mark.usefixtures("one_thread")

Speak = Callable[..., Any]

VOCABULARY = 256
POSITIONS = 32
CONTENT = "Ein Bär, zwei Bären.\nThe quick brown fox jumps over the lazy dog. " * 2
TEXT = Text("made up", (Document("made up", CONTENT),))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of random weights, with such a tokenizer."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=POSITIONS,
        initializer_range=0.3, bos_token_id=BOS, eos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("bos") / "model"
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    byte_tokenizer(adds_bos=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rounded(checkpoint: Path) -> Path:
    compress(checkpoint, checkpoint.parent / "rounded", [Rule("*", Scheme("truncated", 1))])
    return checkpoint.parent / "rounded"


@pytest.fixture(scope="module")
def experts(checkpoint: Path) -> Path:
    """A tiny mixture of experts, with such a tokenizer."""
    folder = checkpoint.parent / "experts"
    mixture("mixtral", hidden=64, inner=32, layers=1).save_pretrained(folder)
    byte_tokenizer(adds_bos=True).save_pretrained(folder)
    return folder


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(CONTENT, encoding="utf-8")
    return path


@pytest.fixture
def other_file(tmp_path: Path) -> Path:
    """A text to calibrate on."""
    path = tmp_path / "other.txt"
    path.write_text("Pack my box with five dozen liquor jugs. " * 13, encoding="utf-8")
    return path


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What any Llama or Mixtral is fed, but for the trial of the head, which is of no text."""
    trial = torch.randint(VOCABULARY, (1, len(TRIALS)), generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []

    def observe(body: type[LlamaModel | MixtralModel]) -> None:
        forward = body.forward

        def observed(self: Any, input_ids: torch.Tensor | None = None, **options: Any) -> Any:
            assert input_ids is not None
            if not torch.equal(input_ids, trial):
                seen.append(input_ids)
            return forward(self, input_ids=input_ids, **options)

        monkeypatch.setattr(body, "forward", observed)

    observe(LlamaModel)
    observe(MixtralModel)
    return seen


# What is fed


COMMANDS = {
    "eval": "eval {rounded} --original {model} --text {text} --conventions bos",
    "eval, llama.cpp": "eval {rounded} --original {model} --text {text} --conventions llama.cpp",
    "eval --sparsity": "eval {model} --text {text} --conventions bos --sparsity",
    "fisher": "compress {model} {out} --target-size 60% --text {text} --scheme rounded --sensitivity fisher",
    "measured": "compress {model} {out} --bits 9.6 --text {text} --scheme rounded --sensitivity measured",
    "quantized": "compress {model} {out} --max-kld 1 --text {text} --calibration {other}",
    "drop-layers": "compress {model} {out} --max-kld 3 --text {text} --scheme rounded --drop-layers 1",
    "sweep": "sweep {model} --text {text} --schemes k2 --yardsticks q4_0",
    "layers": "layers {model} --text {text} --drop 1",
    "experts": "experts {experts} --text {text}",
    "experts of a target":
        "compress {experts} {out} --bits 9.6 --text {text} --scheme rounded --sensitivity fisher",
    "patch-attention": "patch-attention {model} {out} --text {text} --mode 8bit --max-tokens 31",
    "ternarize": "ternarize {model} {out} --text {text} --max-tokens 512 --allow-destructive",
    "recover": "recover {model} --text {text} --eval-text {text} --steps 1 --batch 2 --noise 1 -o {out}",
    "train": "train {toml}",
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_window_that_a_command_reads_begins_with_bos(
    command: str, checkpoint: Path, rounded: Path, experts: Path, text_file: Path, other_file: Path,
    tmp_path: Path, neuzip: Speak, fed: Any,
):  # fmt: skip
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'model = "{checkpoint}"\ntext = ["{text_file}"]\noutput = "{tmp_path / "out"}"\n'
        "steps = 1\nlr = 1e-4\nbatch_size = 2\nwindow = 16\n"
    )
    longer = tmp_path / "longer.txt"
    longer.write_text(CONTENT[::-1] * 5, encoding="utf-8")
    named = {
        "model": checkpoint,
        "longer": longer,
        "rounded": rounded,
        "experts": experts,
        "text": text_file,
        "other": other_file,
        "out": tmp_path / "out",
        "toml": toml,
    }
    said = neuzip(*command.format(**named).split(), "--json")
    assert said.exit_code == 0, said.stderr
    assert fed
    for ids in fed:
        assert (ids[:, 0] == BOS).all(), ids
        assert not (ids[:, 1:] == BOS).any()


def test_training_windows_are_bos_and_the_text_with_nothing_left_out():
    plain = TrainingWindows.of(torch.arange(2, 12), length=3, batch=3)
    behind_bos = TrainingWindows.of(torch.arange(2, 12), length=3, batch=3, front=BOS)
    assert (plain.windows, behind_bos.windows) == (3, 3)
    assert sorted(plain.batch(0).tolist()) == [[2, 3, 4, 5], [5, 6, 7, 8], [8, 9, 10, 11]]
    assert sorted(behind_bos.batch(0).tolist()) == [[BOS, 2, 3, 4], [BOS, 5, 6, 7], [BOS, 8, 9, 10]]
    assert plain.checksum() != behind_bos.checksum()  # a run that was begun without does not go on with it
    assert (plain.special_tokens, behind_bos.special_tokens) == ("none", "BOS in front of each")


def test_calibration_windows_predict_the_first_token_behind_bos():
    found = CalibrationWindows.of(torch.arange(2, 9), 3, BOS)
    assert found.fed.tolist() == [[BOS, 2, 3], [BOS, 5, 6]]
    assert found.targets.tolist() == [[2, 3, 4], [5, 6, 7]]
    assert rows_behind(BOS, torch.arange(2, 9), 4).tolist() == [[BOS, 2, 3, 4], [BOS, 5, 6, 7]]
    assert rows_behind(None, torch.arange(2, 9), 4).tolist() == [[2, 3, 4, 5]]


# What it gives


def losses(model: Path, ids: list[int], window: int) -> torch.Tensor:
    """Log-likelihoods of all tokens after each of `ids` behind BOS, window by window, fp64 [n, V]."""
    exact = load_model(model).double()
    rows = []
    for start in range(0, len(ids), window):
        fed = torch.tensor([[BOS, *ids[start : start + window - 1]]])
        with torch.inference_mode():
            rows.append(exact(input_ids=fed[:, : len(ids) - start]).logits[0].log_softmax(-1))
    return torch.cat(rows)


def test_the_divergence_is_that_behind_bos(checkpoint: Path, rounded: Path):
    task = prepare([checkpoint, rounded], TEXT, conventions=["token"], window=16)
    found = evaluate(task, divergence=True)
    ids = load_tokenizer(checkpoint)(CONTENT, add_special_tokens=False)["input_ids"]
    base, other = losses(checkpoint, ids, 16), losses(rounded, ids, 16)
    right = float((base.exp() * (base - other)).sum(1).mean())
    assert found.compared == "bos"
    assert found.comparison is not None
    assert found.comparison.tokens == len(ids)
    assert found.comparison.kld.mean.value == pytest.approx(right, rel=1e-4)
    nll = -float(base[range(len(ids)), ids].mean())
    assert found.by("bos").scores[0].nll.value == pytest.approx(nll, rel=1e-5)
    # The convention that is defined without BOS is what it was, and says so.
    token = found.by("token")
    assert (token.convention.tokens, token.convention.window) == (len(ids) - 1, 16)
    assert token.convention.special_tokens == "without the BOS that the tokenizer adds"
    assert token.scores[0].nll.value != pytest.approx(nll, rel=1e-3)


def test_bits_a_byte_are_of_all_bytes(checkpoint: Path):
    found = evaluate(prepare([checkpoint], TEXT, max_tokens=20)).by("bos")
    assert (found.convention.tokens, found.convention.bytes) == (20, 20)
    bits = found.scores[0].bits_per_byte
    assert bits is not None
    assert bits.value == pytest.approx(found.scores[0].nll.value / math.log(2))


@pytest.mark.slow
def test_a_target_holds_behind_bos(
    checkpoint: Path, text_file: Path, other_file: Path, tmp_path: Path, neuzip: Speak
):
    command: tuple[Any, ...] = ("compress", checkpoint, tmp_path / "out", "--max-kld", "0.05")
    command += ("--text", text_file, "--calibration", other_file)
    assert f"{text_file}, in windows of 32 predictions, no overlap, BOS in front of each; another" in (
        neuzip(*command).stdout
    )
    said = neuzip(*command, "--json")
    ids = load_tokenizer(checkpoint)(CONTENT, add_special_tokens=False)["input_ids"]
    base, other = (losses(model, ids, POSITIONS) for model in (checkpoint, tmp_path / "out"))
    right = float((base.exp() * (base - other)).sum(1).mean())
    target = said.json["target"]
    assert target["special_tokens"] == "BOS in front of each"
    assert target["delivered"]["kld"]["mean"]["value"] == pytest.approx(right, rel=1e-3)
    assert 0 < right <= 0.05


def test_output_reports_and_cards_say_what_is_in_front(
    checkpoint: Path, rounded: Path, text_file: Path, tmp_path: Path, neuzip: Speak
):
    page = tmp_path / "page.json"
    said = neuzip("eval", rounded, "--original", checkpoint, "--text", text_file, "--report", page)
    assert said.exit_code == 0, said.stderr
    assert "tokens (bos)" in said.stdout
    assert "bos       windows of 32 predictions, no overlap, BOS in front of each" in said.stdout
    assert (
        "token     windows of 32 predictions, no overlap, without the BOS that the tokenizer adds"
        in said.stdout
    )
    notes = {row["name"]: row["note"] for row in json.loads(page.read_text())["divergence"]}
    assert "BOS in front of each" in notes["mean KLD"]
    of_card = {figure.name: figure.how for figure in read_evaluation(page).divergence}
    assert "BOS in front of each" in of_card["mean KLD"]


def test_a_tokenizer_that_adds_none_is_read_as_it_was(checkpoint: Path):
    tokenizer = byte_tokenizer(adds_bos=False)
    assert bos_in_front(tokenizer) is None
    tokenised = Tokenised(TEXT, tokenizer, POSITIONS)
    reading = tokenised.read_for_comparison()
    assert (reading.convention.name, reading.convention.special_tokens) == ("token", "none")
    assert reading.text is reading.ids
    with pytest.raises(UsageError, match="puts no BOS in front"):
        tokenised.read("bos")
