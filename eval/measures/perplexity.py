"""Perplexity of causal language models on a text, by convention, with standard errors, and how two differ.

Logits are never all in memory: see `head`. Which token is predicted from what: see `conventions`. What two
models make of the same tokens: see `divergence`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from neuzip.choices import KvForm
from neuzip.compress.device import AnyDevice, named
from neuzip.compress.ranks import ALONE, Ranks
from neuzip.compress.torchrun import started_by_torchrun
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.measures.convention_names import BOS, NAMES, Name
from neuzip.eval.measures.conventions import Convention, Reading, Tokenised, TooShort
from neuzip.eval.measures.distributed import ROWS, OnTokens, WindowBatch, over_windows, take_a_gpu
from neuzip.eval.measures.divergence import Comparison, Paired, compare, require_finite
from neuzip.eval.measures.estimates import Blocks, Estimate, Values, exponential
from neuzip.eval.measures.head import HeadedModel, statistics
from neuzip.eval.measures.texts import Text
from neuzip.eval.measures.windows import TokenWindow
from neuzip.runtime.activations import Activations
from neuzip.runtime.decode.benchmark import device_name, peak_bytes, reset_peak
from neuzip.runtime.devices import choose_device
from neuzip.runtime.hf.attention import uses
from neuzip.runtime.hf.attention_choice import AttentionChoice, bits_in_use, choose
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.decoder import positions
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.messages import versions
from neuzip.runtime.hf.ternary_layers import activations_in_use
from neuzip.runtime.hf.tokenizer import load_tokenizer
from neuzip.runtime.kv_bits import BitsArgument, Layers, single
from neuzip.runtime.requirements import require_expert_memory
from neuzip.runtime.residency import memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelDifference:
    """A model minus the one it is compared with, token by token, in nats a token.

    `identical` is whether the losses of all tokens agree to the last bit. `nll_per_word` and `nll_per_byte`
    are of the same sum.
    """

    nll: Estimate
    identical: bool
    nll_per_word: Estimate | None = None
    nll_per_byte: Estimate | None = None


@dataclass(frozen=True)
class ModelScore:
    """The score of one model under a convention: `nll` in nats per token, and as perplexities.

    `difference` is to the first model of the evaluation; that one has none.
    """

    nll: Estimate
    token_perplexity: Estimate
    word_perplexity: Estimate | None
    byte_perplexity: Estimate | None
    bits_per_byte: Estimate | None
    difference: ModelDifference | None


@dataclass(frozen=True)
class ConventionScores:
    """A convention, what standard errors are over, and a score for each model."""

    convention: Convention
    blocks: str
    scores: tuple[ModelScore, ...]


@dataclass(frozen=True)
class MeasuredModel:
    """A model as it was measured. `weight_bytes` is what its parameters take in memory.

    `tokens_per_second` are those fed, by all processes, up to the last hidden states. `formed` is why it had
    to form logits, or None. `kv_layers` are the bits of its keys and values in each layer, in the form
    `kv_form`, None if they are as they were, and `kv_bits` those of all if they are the same. `query_bits`
    are those of queries, or None.
    `attention_bits` are those of each layer's attention, None where nothing is quantised, and
    `attention_calls` how often it was done in which way. `activations` is how inputs of ternary layers are
    quantised, None if they are not.
    """

    path: str
    dtype: str
    weight_bytes: int
    tokens_per_second: float
    formed: str | None
    kv_bits: int | None = None
    kv_layers: Layers | None = None
    kv_form: KvForm | None = None
    query_bits: int | None = None
    attention_bits: tuple[int | None, ...] | None = None
    attention_calls: Mapping[str, int] = field(default_factory=dict)
    activations: Activations | None = None


@dataclass(frozen=True)
class PeakMemory:
    """The largest memory of one process with all models. `of` names the kind; `bytes` is None if unknown."""

    bytes: int | None
    of: str


@dataclass(frozen=True)
class Evaluation:
    """The measurements of `evaluate`. With an original, `models` holds the original and then the compared
    model.

    `skipped` maps each convention that was left out to the reason. `paired` holds the values behind
    `comparison`, token by token.
    """

    text: str
    documents: int
    device: str
    residency: str
    models: tuple[MeasuredModel, ...]
    measured: tuple[ConventionScores, ...]
    skipped: Mapping[str, str]
    comparison: Comparison | None
    compared: Name | None
    memory: PeakMemory
    processes: int
    seconds: float
    versions: Mapping[str, str] = field(default_factory=versions)
    paired: Paired | None = field(default=None, repr=False)

    def by(self, name: Name) -> ConventionScores:
        """The measurement of one convention. Raises KeyError if it was not measured."""
        for one in self.measured:
            if one.convention.name == name:
                return one
        raise KeyError(name)


@dataclass(frozen=True)
class EvaluationTask:
    """A text under conventions, for some models: what `prepare` makes and `evaluate` does.

    `compared` is the reading under which models are compared: the first of `readings`, or the reading "bos"
    where the tokenizer puts BOS in front of a text and windows of the first begin without it. `device` is a
    torch device, or "auto" for a device map; `dtype` None is each checkpoint's own. `kv_bits` are those of
    the last checkpoint's keys and values, in the form `kv_form`, `query_bits` those of its queries,
    `activations` its mode where weights are ternary, and `attention` how it attends; all others do as they
    record.
    """

    paths: tuple[Path, ...]
    text: Text
    readings: tuple[Reading, ...]
    compared: Reading
    skipped: Mapping[str, str]
    device: torch.device | str
    dtype: torch.dtype | None
    residency: str
    kv_bits: BitsArgument | None = None
    activations: str | None = None
    attention: AttentionChoice = "recorded"
    expert_memory: int | None = None
    kv_form: KvForm = "rotated"
    query_bits: int | None = None

    @property
    def tokens(self) -> int:
        """Predictions to be made, of all models together."""
        return len(self.paths) * sum(reading.convention.tokens for reading in self.measured)

    @property
    def measured(self) -> tuple[Reading, ...]:
        """The readings, that under which several models are compared first."""
        if len(self.paths) == 1:
            return self.readings
        return (self.compared, *(one for one in self.readings if one is not self.compared))

    @property
    def place(self) -> str:
        """The devices of the models, in words."""
        if isinstance(self.device, str):
            return f"the devices of the map {self.device}"
        return device_name(self.device)


def prepare(
    checkpoints: Sequence[str | os.PathLike[str]],
    text: Text,
    *,
    conventions: Sequence[Name] | None = None,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    device: AnyDevice = "auto",
    device_map: str | None = None,
    dtype: str = "auto",
    residency: str = "dense",
    activations: str | None = None,
    kv_bits: BitsArgument | None = None,
    kv_form: KvForm = "rotated",
    query_bits: int | None = None,
    attention: AttentionChoice = "recorded",
    expert_memory: int | None = None,
) -> EvaluationTask:
    """Tokenise a text and cut it into windows, for one checkpoint or for several that shall be compared.

    `conventions` None are all that the text is long enough for, with "bos" as the first where the tokenizer
    puts BOS in front of a text. `window` is of "bos", "token" and "strided", `stride` of the last of these;
    see there for what they are otherwise. `max_tokens` bounds the predictions of each. `device` auto is CUDA
    if there is any; `device_map` spreads a model over several. `dtype` auto is float32 for dense weights on a
    CPU, else the checkpoint's own. `residency` is how weights are kept in memory. With `kv_bits` the last
    checkpoint, and no other, attends to keys and values in as many bits and that `kv_form`; `activations` are
    its alone too (see runtime/activations.py), and so are `query_bits`, of its queries, and `attention` (see
    `runtime.hf.attention_choice.choose`). `expert_memory` is for all models (see `load_model`). Raises
    NeuzipError, and UsageError for what the model cannot do.
    """
    require_expert_memory(expert_memory, residency)
    paths = tuple(Path(path) for path in checkpoints)
    place = _place(device, device_map)
    own = residency != "dense" or isinstance(place, str) or place.type != "cpu"
    kind = DTYPES[dtype] if dtype != "auto" else None if own else torch.float32
    tokenised = _tokenise(paths, text, max_tokens)
    readings: list[Reading] = []
    skipped: dict[str, str] = {}
    every = NAMES if tokenised.bos is None else (BOS, *NAMES)
    for name in conventions or every:
        try:
            readings.append(tokenised.read(name, window, stride))
        except TooShort as reason:
            if conventions or name == "token":
                raise
            skipped[name] = str(reason)
    compared = readings[0]
    if compared.front != tokenised.bos:
        compared = tokenised.read(BOS, window)
    return EvaluationTask(
        paths, text, tuple(readings), compared, skipped, place, kind, residency, kv_bits, activations,
        attention, expert_memory, kv_form, query_bits,
    )  # fmt: skip


def evaluate(
    task: EvaluationTask,
    *,
    divergence: bool = False,
    ranks: Ranks = ALONE,
    on_tokens: OnTokens = lambda count: None,
) -> Evaluation:
    """Measure the models. `on_tokens` gets the number of new predictions.

    Without `divergence` they are in memory one after the other. With it there are two, at once, and the
    second is compared with the first under `task.compared`. All processes of a run, `ranks`, get
    all figures. The same weights give the same figures to the last bit on the same machine. Raises
    NeuzipError.
    """
    began = time.monotonic()
    memory_of = _kind_of_memory(task)
    reset_peak(memory_of)
    if divergence:
        models, losses, paired = _together(task, ranks, on_tokens)
    else:
        models, losses, paired = *_one_by_one(task, ranks, on_tokens), None
    return Evaluation(
        text=task.text.name,
        documents=sum(1 for document in task.text.documents if document.content.strip()),
        device=task.place,
        residency=task.residency,
        models=tuple(models),
        measured=tuple(
            _measured(reading, of_reading) for reading, of_reading in zip(task.measured, losses, strict=True)
        ),
        skipped=task.skipped,
        comparison=paired.summary() if paired is not None else None,
        compared=task.compared.convention.name if paired is not None else None,
        memory=_peak(memory_of, ranks),
        processes=ranks.world,
        seconds=time.monotonic() - began,
        paired=paired,
    )


def token_losses(
    model: HeadedModel,
    ids: torch.Tensor,
    windows: Sequence[TokenWindow],
    *,
    ranks: Ranks = ALONE,
    on_tokens: OnTokens = lambda count: None,
) -> Values:
    """The negative log-likelihood of each token that windows over `ids` score, in nats, fp32 [tokens].

    Raises NeuzipError for a token that the model does not have, and for losses that are not finite.
    """
    model.require_tokens(ids)

    def measure(batch: WindowBatch) -> dict[str, torch.Tensor]:
        nll = statistics(model.predictions(batch.ids, batch.rows), batch.targets).nll
        require_finite(model, nll)
        return {"nll": nll}

    rows = ROWS[model.device.type]
    return over_windows(measure, ids, windows, rows, ranks=ranks, on_tokens=on_tokens)["nll"]


def _together(
    task: EvaluationTask, ranks: Ranks, on_tokens: OnTokens
) -> tuple[list[MeasuredModel], list[list[Values]], Paired]:
    """Both models at once: what they are, the losses of both for each reading, and how they compare."""
    base, other = (_load(task, number) for number in range(2))
    first, *rest = task.measured
    paired = compare(
        base, other, first.ids, first.windows, first.blocks,
        ranks=ranks, on_tokens=lambda count: on_tokens(2 * count),
    )  # fmt: skip
    losses = [[paired.base_nll, paired.other_nll]]
    for reading in rest:
        losses.append(
            [
                token_losses(model, reading.ids, reading.windows, ranks=ranks, on_tokens=on_tokens)
                for model in (base, other)
            ]
        )
    return [_described(model, task.kv_form, ranks) for model in (base, other)], losses, paired


def _one_by_one(
    task: EvaluationTask, ranks: Ranks, on_tokens: OnTokens
) -> tuple[list[MeasuredModel], list[list[Values]]]:
    models: list[MeasuredModel] = []
    losses: list[list[Values]] = [[] for _ in task.measured]
    for number in range(len(task.paths)):
        model = _load(task, number)
        for reading, losses_of_reading in zip(task.measured, losses, strict=True):
            losses_of_reading.append(
                token_losses(model, reading.ids, reading.windows, ranks=ranks, on_tokens=on_tokens)
            )
        models.append(_described(model, task.kv_form, ranks))
        del model  # before the next one is loaded
    return models, losses


def _load(task: EvaluationTask, number: int) -> HeadedModel:
    is_last = number == len(task.paths) - 1
    bits, query_bits = (task.kv_bits, task.query_bits) if is_last else (None, None)
    model = load(task, number)
    return HeadedModel(model, kv_bits=bits, kv_form=task.kv_form, query_bits=query_bits)


def load(task: EvaluationTask, number: int) -> PreTrainedModel:
    """A checkpoint of a task, with weights, activations and attention as they are evaluated.

    Attention is quantised wherever it can be, be it slower so: it is its effect that is asked for.
    """
    is_last = number == len(task.paths) - 1
    model = load_model(
        task.paths[number], task.dtype, task.device, residency=task.residency,
        expert_memory=task.expert_memory, activations=task.activations if is_last else None, attention=False,
    )  # fmt: skip
    choose(model, task.attention if is_last else "recorded", policy="always")
    return model


def _described(model: HeadedModel, kv_form: KvForm, ranks: Ranks) -> MeasuredModel:
    work = ranks.all_gather((model.fed, model.seconds))
    fed, seconds = sum(fed for fed, _ in work), max(seconds for _, seconds in work)
    cache = model.kv_cache()
    layers = None if cache is None else cache.bits
    return MeasuredModel(
        path=model.name,
        dtype=str(model.dtype).removeprefix("torch."),
        weight_bytes=memory(model.model).total.stored_bytes,
        tokens_per_second=fed / seconds if seconds else math.inf,
        formed=model.formed,
        kv_bits=single(layers),
        kv_layers=layers,
        kv_form=None if layers is None else kv_form,
        query_bits=model.query_bits,
        attention_bits=bits_in_use(model.model),
        attention_calls={} if bits_in_use(model.model) is None else uses(model.model),
        activations=activations_in_use(model.model),
    )


def _measured(reading: Reading, losses: Sequence[Values]) -> ConventionScores:
    scores = [_score(reading, own, losses[0] if i else None) for i, own in enumerate(losses)]
    return ConventionScores(reading.convention, reading.blocks.text, tuple(scores))


def _score(reading: Reading, losses: Values, first: Values | None) -> ModelScore:
    c, blocks = reading.convention, reading.blocks
    nll = blocks.mean(losses)
    per_word = _per_unit(blocks, losses, c.words, reading.words)
    per_byte = _per_unit(blocks, losses, c.bytes, reading.bytes)
    difference = None
    if first is not None:
        change = losses.astype("float64") - first
        difference = ModelDifference(
            blocks.mean(change),
            losses.tobytes() == first.tobytes(),
            _per_unit(blocks, change, c.words, reading.words),
            _per_unit(blocks, change, c.bytes, reading.bytes),
        )
    return ModelScore(
        nll,
        exponential(nll),
        exponential(per_word) if per_word is not None else None,
        exponential(per_byte) if per_byte is not None else None,
        per_byte.times(1 / math.log(2)) if per_byte is not None else None,
        difference,
    )


def _per_unit(blocks: Blocks, losses: Values, total: int | None, units: Values | None) -> Estimate | None:
    """Nats a word or byte, of which there are `total`; no error where those of blocks are not known."""
    if not total:
        return None
    if units is None:
        return Estimate(math.fsum(losses.tolist()) / total, None)
    return blocks.per(losses, units)


def _place(device: AnyDevice, device_map: str | None) -> torch.device | str:
    if device_map is None:
        take_a_gpu()
        return choose_device(device)
    if started_by_torchrun():
        raise UsageError(
            "`device_map` would spread each process of torchrun over all GPUs",
            "start one process, without torchrun, or leave out `device_map`",
        )
    if named(device) != "auto":
        raise UsageError(
            f"`device_map={device_map!r}` excludes `device={named(device)!r}`", "leave one of them out"
        )
    return device_map


def _tokenise(paths: Sequence[Path], text: Text, max_tokens: int | None) -> Tokenised:
    """The text as the tokenizers of all checkpoints cut it. Raises NeuzipError if they do not agree."""
    limits = [positions(load_config(path)) for path in paths]
    limit = min((n for n in limits if n is not None), default=None)
    first: Tokenised | None = None
    for path in paths:
        tokenised = Tokenised(text, load_tokenizer(path), limit, max_tokens)
        if first is not None and (tokenised.ids, tokenised.bos) != (first.ids, first.bos):
            raise NeuzipError(
                f"{paths[0]} and {path} have tokenizers that cut the text differently",
                "their figures cannot be compared token by token; evaluate them one by one",
            )
        first = first or tokenised
    assert first is not None
    return first


def _kind_of_memory(task: EvaluationTask) -> torch.device:
    """The kind of memory that is measured: that of GPUs if any are used."""
    if isinstance(task.device, str):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return task.device


def _peak(device: torch.device, ranks: Ranks) -> PeakMemory:
    """The peak memory of the process that needed most."""
    peaks = [nbytes for nbytes in ranks.all_gather(peak_bytes(device)) if nbytes is not None]
    on_gpu = device.type == "cuda"
    return PeakMemory(
        max(peaks, default=None), "GPU memory that torch allocated" if on_gpu else "resident memory"
    )
