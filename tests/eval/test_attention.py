"""Bits of attention, layer by layer: how they are measured, chosen, recorded, and what holds afterwards."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from neuzip.compress import compress, decompress, verify
from neuzip.errors import NeuzipError, UsageError, WouldOverwrite
from neuzip.eval import attention, observed_attention
from neuzip.eval.attention import AttentionCalibration, AttentionLayer, Closeness, QuantizedAttention
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.measures.texts import read_text
from neuzip.eval.report import attention_pictures
from neuzip.kernels.attention import sage_attention
from neuzip.kernels.attention.reference import exact_attention
from neuzip.kernels.attention.similarity import Similarity, similarity
from neuzip.runtime.hf.attention import patch_attention, unpatch_attention
from neuzip.runtime.hf.attention_config import LAYERS_ENTRY
from neuzip.runtime.hf.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, WINDOW, TOKENS = 3, 192, 768


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights whose second layer attends sharply: few bits change it most."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=256,
        initializer_range=0.08, dtype="bfloat16",
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        made.model.layers[1].self_attn.q_proj.weight *= 6
    folder = tmp_path_factory.mktemp("model") / "tiny"
    saved(made, folder)
    return folder


def saved(model: PreTrainedModel, folder: Path) -> None:
    """In bf16, with the demo's tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, folder)


@contextmanager
def no_stage(label: str, total: int, unit: str) -> Iterator[Any]:
    yield lambda count: None


def calibrated(model: Path, mode: Any, max_kld: float | None = None) -> AttentionCalibration:
    return attention.calibrate(
        model, read_text("demo"), mode, no_stage, max_kld=max_kld, window=WINDOW, max_tokens=TOKENS,
        device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def four_bits(model: Path) -> AttentionCalibration:
    """All forms measured, and a budget that not all layers in 4 bits are within."""
    loose = calibrated(model, "4bit", max_kld=1e3)
    assert loose.bits == (4, 4, 4)
    return calibrated(model, "4bit", max_kld=loose.sum_of_layers / 2)


# What is measured


def reference_logits(model: Path, bits: Sequence[int | None], ids: torch.Tensor) -> torch.Tensor:
    live = load_model(model, torch.float32)
    if any(bits):
        patch_attention(live, bits, policy="always")
    with torch.no_grad():
        return live(input_ids=ids).logits.double()


def windows_of(model: Path) -> torch.Tensor:
    from neuzip.runtime.hf.tokenizer import load_tokenizer

    ids = load_tokenizer(model)(read_text("demo").content, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[:TOKENS]).view(-1, WINDOW)


def divergence_of(model: Path, bits: Sequence[int | None]) -> float:
    ids = windows_of(model)
    base = reference_logits(model, [None] * LAYERS, ids).log_softmax(-1)
    other = reference_logits(model, bits, ids).log_softmax(-1)
    return float((base.exp() * (base - other)).sum(-1).mean())


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_divergence_is_that_of_the_model_with_this_layer_alone(layer: int, model, four_bits):
    for form in four_bits.layers[layer].forms:
        bits = [form.bits if n == layer else None for n in range(LAYERS)]
        assert form.kld.value == pytest.approx(divergence_of(model, bits), rel=1e-3, abs=1e-7)
        assert form.kld.value > 0


def test_similarities_are_of_what_the_layer_is_given(model, four_bits):
    """Queries, keys and values are taken from the attention that the model calls, unpatched."""
    live = load_model(model, torch.float32)
    seen: dict[int, list[tuple[torch.Tensor, ...]]] = {}

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any):
        seen.setdefault(module.layer_idx, []).append((q, k, v))
        return sdpa_attention_forward(module, q, k, v, *rest, **options)

    AttentionInterface.register("test_seen", attend)
    live.config._attn_implementation = "test_seen"
    with torch.no_grad():
        for window in windows_of(model):
            live(input_ids=window[None], use_cache=False)
    for layer in four_bits.layers:
        for form in layer.forms:
            found = []
            for q, k, v in seen[layer.number]:
                exact, _ = exact_attention(q, k, v, causal=True)
                found.append(similarity(sage_attention(q, k, v, bits=form.bits, causal=True), exact))
            assert form.closeness.mean.cosine == pytest.approx(sum(s.cosine for s in found) / 4, abs=1e-5)
            assert form.closeness.mean.rmse == pytest.approx(sum(s.rmse for s in found) / 4, rel=1e-3)
            assert form.closeness.worst.relative_l1 == pytest.approx(
                max(s.relative_l1 for s in found), rel=1e-3
            )
    assert four_bits.similarity_windows == 4


def test_closeness_keeps_the_worst_of_each_figure():
    found = Closeness.of([Similarity(0.9, 0.5, 1.0), Similarity(0.8, 0.1, 3.0)])
    assert found.worst == Similarity(0.8, 0.5, 3.0)
    assert found.mean.rmse == 2.0
    assert found.score == pytest.approx((0.9 * 0.5 + 0.8 * 0.9) / 2)
    assert found.worst_score == pytest.approx(0.45)
    assert Closeness.of([Similarity(1.0, 0.0, 0.0)]).deviation is None


def test_fewer_bits_are_less_close(four_bits):
    for layer in four_bits.layers:
        eight, four = layer.form(8), layer.form(4)
        assert four.closeness.score < eight.closeness.score < 1
        assert four.kld.value > eight.kld.value
    scores = [layer.form(4).closeness.score for layer in four_bits.layers]
    assert min(scores) == scores[1]
    assert four_bits.rank(four_bits.layers[1], 4) == LAYERS


@pytest.mark.slow
def test_a_model_is_measured_as_it_is_whatever_it_records(model, four_bits, tmp_path: Path):
    attention.copy_patched(model, tmp_path / "patched", [4, 4, 4])
    again = calibrated(tmp_path / "patched", "4bit", four_bits.limit)
    assert again.layers == four_bits.layers
    assert again.comparison == four_bits.comparison


def test_a_model_whose_heads_do_not_fit_is_refused_with_the_reason(tmp_path: Path):
    saved(MistralForCausalLM(MistralConfig(**SIZES | {"head_dim": 40})), tmp_path)
    with pytest.raises(NeuzipError, match="no layer can be quantised: a head of 40 numbers"):
        calibrated(tmp_path, "auto")


@pytest.mark.slow
def test_the_demo_checkpoint_can_be_patched():
    found = calibrated(CHECKPOINT, "8bit")
    assert set(found.bits) == {8}
    assert all(one.form(8).closeness.worst.cosine > 0.999 for one in found.layers)


def test_refused_layers_are_told_apart(model):
    """Of a layer that adds something to its logits nothing can be quantised; others are not concerned."""
    live = load_model(model, torch.float32)
    live.model.layers[2].self_attn.forward = _with_sinks(live.model.layers[2].self_attn)
    refused = observed_attention.refusals(live, windows_of(model)[:1, :16])
    assert set(refused) == {2}
    assert "s_aux" in refused[2]


SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256,
    "initializer_range": 0.2, "sliding_window": 40,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (MistralForCausalLM, MistralConfig(**SIZES)),
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, attn_logit_softcapping=5.0, query_pre_attn_scalar=100)),
    ],
    ids=["sliding window", "soft cap"],
)
def test_windows_scales_and_soft_caps_are_those_of_the_layer(kind: Any, config: Any, tmp_path: Path):
    """Exact attention with them is what the layer gives: with others it would be refused as strange."""
    torch.manual_seed(0)
    saved(kind(config), tmp_path)
    found = calibrated(tmp_path, "8bit")
    assert found.bits == (8, 8)
    assert all(one.form(8).closeness.worst.cosine > 0.999 for one in found.layers)


def _with_sinks(module: Any) -> Any:
    forward = module.forward
    return lambda *a, **options: forward(*a, **options, s_aux=torch.zeros(2))


# The choice


def layer(number: int, kld8: float | None, kld4: float | None = None, score: float = 0.9) -> AttentionLayer:
    closeness = Closeness.of([Similarity(score, 0.0, 0.0)])
    forms = [
        QuantizedAttention(bits, closeness, None if kld is None else Estimate(kld, None))
        for bits, kld in ((8, kld8), (4, kld4))
    ]
    return AttentionLayer(number, tuple(forms))


def allocated(layers: Sequence[AttentionLayer], offered: Sequence[int], budget: float) -> list[int | None]:
    return attention.bits_of(layers, offered, attention.within(layers, offered, budget))


def test_as_many_layers_as_the_budget_allows_the_least_harmed_first():
    layers = [layer(0, 3e-4), layer(1, 1e-4), layer(2, 2e-4)]
    assert allocated(layers, (8,), 0) == [None, None, None]
    assert allocated(layers, (8,), 1e-4) == [None, 8, None]
    assert allocated(layers, (8,), 3.5e-4) == [None, 8, 8]
    assert allocated(layers, (8,), 1) == [8, 8, 8]


def test_equal_layers_by_score():
    layers = [layer(0, 1e-4, score=0.7), layer(1, 1e-4, score=0.99), layer(2, 1e-4, score=0.8)]
    assert allocated(layers, (8,), 1.5e-4) == [None, 8, None]
    assert allocated(layers, (8,), 2.5e-4) == [None, 8, 8]


def test_four_bits_where_they_are_offered_and_fit():
    layers = [layer(0, 1e-5, 1e-3), layer(1, 1e-5, 1e-2)]
    assert allocated(layers, (8,), 1) == [8, 8]
    assert allocated(layers, (4, 8), 1) == [4, 4]
    assert allocated(layers, (4, 8), 2e-3) == [4, 8]
    assert allocated(layers, (4, 8), 5e-5) == [8, 8]


def test_what_is_not_finite_or_refused_is_never_chosen():
    layers = [layer(0, None), AttentionLayer(1, refused="so it is"), layer(2, 1e-5)]
    assert allocated(layers, (8,), 1e9) == [None, None, 8]


def test_a_budget_holds_for_all_layers_together(model, four_bits):
    assert set(four_bits.bits) == {4, 8}
    assert four_bits.comparison.kld.mean.value <= four_bits.limit
    assert four_bits.trials[-1] == four_bits.comparison.kld.mean.value
    assert four_bits.comparison.kld.mean.value == pytest.approx(
        divergence_of(model, four_bits.bits), rel=1e-3
    )


@pytest.mark.slow
def test_modes(model):
    eight = calibrated(model, "8bit")
    assert (eight.bits, eight.limit, eight.offered) == ((8, 8, 8), None, (8,))
    assert eight.layers[0].form(4).kld is None  # not asked for, but its similarity is told
    auto = calibrated(model, "auto")
    assert auto.limit == attention.AUTO_MAX_KLD
    assert auto.comparison.kld.mean.value <= auto.limit
    none = calibrated(model, "auto", max_kld=0.0)
    assert none.bits == (None, None, None)
    assert none.comparison.identical


# The command, and what comes after it

ASKED = ("--text", "demo", "--window", WINDOW, "--max-tokens", TOKENS, "--device", "cpu")


@pytest.mark.slow
def test_patch_then_eval(neuzip, in_all_modes, model, tmp_path: Path):
    """A copy with the choice in config.json; eval of it gives the divergence that was promised."""
    dst = tmp_path / "patched"
    said = in_all_modes(
        "patch-attention", model, dst, "--mode", "8bit", *ASKED,
        prepare=lambda: shutil.rmtree(dst, ignore_errors=True),
    )  # fmt: skip
    assert "in 8 bits" in said["human"].stdout
    assert "PPL" in said["human"].stdout
    assert said["quiet"].stdout.strip() == str(dst)
    told = said["json"].json
    assert told["bits"] == [8, 8, 8]
    assert [one["number"] for one in told["layers"]] == [0, 1, 2]
    assert json.loads((dst / "config.json").read_text())["neuzip"] == {"attention": {"layers": [8, 8, 8]}}
    for file in model.iterdir():
        if file.name != "config.json":
            assert (dst / file.name).read_bytes() == file.read_bytes()
    asked = ("--text", "demo", "--conventions", "token", "--window", WINDOW, "--max-tokens", TOKENS)
    after = neuzip("eval", dst, "--original", model, *asked, "--device", "cpu", "--json").json
    kld = told["comparison"]["kld"]["mean"]["value"]
    assert after["comparison"]["kld"]["mean"]["value"] == kld
    assert after["before"]["attention_bits"] is None
    assert after["after"]["attention_bits"] == [8, 8, 8]
    assert list(after["after"]["attention_calls"]) == ["8 bits"]
    plain = neuzip(
        "eval", dst, "--original", model, *asked, "--attention", "none", "--device", "cpu", "--json"
    )
    assert plain.json["comparison"]["identical"]
    other = neuzip("eval", model, "--original", model, *asked, "--attention", "8bit", "--device", "cpu")
    assert "attends after: 3 of 3 layers quantised: 3 in 8 bits\n" in other.stdout
    four = neuzip("eval", dst, "--original", model, *asked, "--attention", "4bit", "--device", "cpu", "-q")
    assert float(four.stdout) > 10 * kld


@pytest.mark.slow
def test_a_container_is_patched_and_stays_one(neuzip, model, tmp_path: Path):
    compress(model, tmp_path / "small")
    said = neuzip("patch-attention", tmp_path / "small", tmp_path / "p", "--mode", "4bit", *ASKED, "--json")
    assert said.exit_code == 0, said.stderr
    assert LAYERS_ENTRY.read(tmp_path / "p") == (4, 4, 4)
    verify(tmp_path / "p", model)
    decompress(tmp_path / "p", tmp_path / "restored")
    assert {p.name: p.read_bytes() for p in (tmp_path / "restored").iterdir()} == {
        p.name: p.read_bytes() for p in model.iterdir()
    }


@pytest.mark.slow
def test_compress_does_it_in_one_go(neuzip, model, root: Path, tmp_path: Path):
    dst, text = tmp_path / "small", tmp_path / "text.txt"
    text.write_text((root / "LICENSE").read_text()[:3000])
    asked = ("compress", model, dst, "--attention", "8bit", "--text", text, "--device", "cpu", "--json")
    tried = neuzip(*asked, "--dry-run")
    assert not dst.exists()
    said = neuzip(*asked)
    assert said.exit_code == 0, said.stderr
    assert said.json["attention"]["bits"] == tried.json["attention"]["bits"] == [8, 8, 8]
    assert said.json["lossless"]
    assert LAYERS_ENTRY.read(dst) == (8, 8, 8)
    verify(dst, model)


@pytest.mark.slow
def test_generate_and_bench_say_what_attention_did(neuzip, model, tmp_path: Path):
    attention.copy_patched(model, tmp_path / "p", [8, None, 8])
    asked = ("generate", tmp_path / "p", "--prompt", "The", "--max-new-tokens", 4, "--device", "cpu")
    said = neuzip(*asked)
    assert said.exit_code == 0, said.stderr
    assert "2 of 3 layers quantised: 2 in 8 bits; but none of their calls was: on a CPU" in said.stderr
    plain = neuzip(*asked, "--attention", "none", "--json").json
    assert plain["attention_bits"] is None
    assert plain["text"] == neuzip(*asked, "--json").json["text"]
    asked = ("--prompt-tokens", 8, "--new-tokens", 3, "--batch", "1", "--rounds", "1", "--device", "cpu")
    said = neuzip("bench", tmp_path / "p", "--residency", "dense", *asked, "--json")
    assert said.exit_code == 0, said.stderr
    assert [row["attention_bits"] for row in said.json["rows"]] == [None, [8, None, 8]]
    assert len(neuzip("bench", model, "--residency", "dense", *asked, "--json").json["rows"]) == 1
    assert "dense, QK 8, unused" in neuzip("bench", tmp_path / "p", "--residency", "dense", *asked).stdout


def test_what_is_refused(neuzip, model, tmp_path: Path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").touch()
    for arguments, code, said in (
        ((model, model), 1, "is the same place as"),
        ((model, there), 1, "exists already"),
        ((model, tmp_path / "x", "--plot", tmp_path / "x.html"), 2, "is no kind of picture"),
        ((model, tmp_path / "x", "--max-kld", "inf"), 2, "is no divergence"),
        ((model, tmp_path / "x", "--window", 9999), 2, "the model was made for 256 tokens"),
    ):
        found = neuzip("patch-attention", *arguments, "--text", "demo", "-q")
        assert (found.exit_code, said in found.stderr) == (code, True), found.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    assert [p.name for p in there.iterdir()] == ["mine"]
    with pytest.raises(WouldOverwrite):
        attention.copy_patched(model, there, [8, 8, 8])
    with pytest.raises(UsageError, match="bits of attention for 1 layers"):
        attention.copy_patched(model, tmp_path / "y", [8])
    assert not (tmp_path / "y").exists()


def test_a_text_of_less_than_a_window_is_warned_of(neuzip, model, tmp_path: Path):
    (tmp_path / "short.txt").write_text("a few words")
    said = neuzip("patch-attention", model, tmp_path / "p", "--text", tmp_path / "short.txt")
    assert said.exit_code == 0
    assert re.search(r"warning: --text .*short.txt: has \d tokens, fewer than a window of 256", said.stderr)


@pytest.mark.slow
def test_a_dry_run_writes_nothing_but_the_picture(neuzip, model, tmp_path: Path):
    said = neuzip(
        "patch-attention", model, tmp_path / "p", *ASKED, "--dry-run", "--json", "--plot",
        tmp_path / "layers.svg",
    )  # fmt: skip
    assert said.exit_code == 0, said.stderr
    assert said.json["dry_run"]
    assert [p.name for p in tmp_path.iterdir()] == ["layers.svg"]
    assert (tmp_path / "layers.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize("count", [39, 78])
@pytest.mark.slow
def test_a_picture_of_many_layers_and_of_refused_ones(count: int, four_bits):
    many = [replace(four_bits.layers[0], number=n, bits=(8, 4, None)[n % 3]) for n in range(count)]
    found = replace(four_bits, layers=(*many, AttentionLayer(count, refused="so it is")))
    figure = attention_pictures.draw(found, "many")
    ticks = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert ticks[:2] == ["0\n8", "\n4"] if count == 39 else ticks[:2] == ["0", "8"]
    third = count // 3
    said = attention_pictures.choice_text(found)
    assert (
        said == f"{third} of {count + 1} layers in 4 bits, {third} in 8 bits, {third + 1} at full precision"
    )
    assert attention_pictures.png(figure).startswith(b"\x89PNG")


@pytest.mark.gpu
def test_on_a_gpu_it_is_measured_with_the_kernel(model):
    found = attention.calibrate(
        model, read_text("demo"), "8bit", no_stage, window=WINDOW, max_tokens=TOKENS, device="cuda"
    )
    on_cpu = calibrated(model, "8bit")
    assert found.bits == (8, 8, 8)
    assert found.dtype == "bfloat16"
    for one, other in zip(found.layers, on_cpu.layers, strict=True):
        assert one.form(8).closeness.mean.cosine == pytest.approx(
            other.form(8).closeness.mean.cosine, abs=2e-3
        )


def test_live_models_are_left_as_they_were(model):
    live = load_model(model, torch.float32)
    before = live.config._attn_implementation
    observed_attention.refusals(live, windows_of(model)[:1, :16])
    assert live.config._attn_implementation == before
    unpatch_attention(live)
    assert live.config._attn_implementation == before
