"""Perplexity of a causal language model on a text, with its convention and its standard error.

The text's tokens, without special tokens, go through the model in windows. A window feeds `window` tokens and
predicts the token after each. Windows that do not overlap (`stride` = `window`) share one token: the last one
predicted is the first one fed to the next. Every token but the text's first is predicted once.

With a smaller stride each window begins `stride` tokens after the one before it, and only predictions that
are new count: all of the first window, the last `stride` of the others. The last window may be shorter.

Standard errors take windows, not tokens, for independent: tokens of one window have their context in common.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from neuzip.errors import NeuzipError, UsageError
from neuzip.runtime.generate import choose_device, positions
from neuzip.runtime.load import load_config, load_model, load_tokenizer, quiet_transformers, versions

from .demo import held_out_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOW = 1024
"""Predictions of a window if nothing else is asked for, or as many as the model was made for."""

ROWS = 1024
"""Rows of logits in memory at a time, or those of one window."""

LOSS_ROWS = 128
"""Rows whose losses are computed at a time: each needs a few more of its size, in float32."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

OnTokens = Callable[[int], None]


@dataclass(frozen=True)
class Text:
    """What is predicted, and what it is called in a report."""

    name: str
    content: str


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `stop` (excluded) are fed; the last `scored` of the predictions count."""

    start: int
    stop: int
    scored: int


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error, which one window alone does not give."""

    value: float
    standard_error: float | None


@dataclass(frozen=True)
class Convention:
    """What a perplexity must be told with. `tokens` are those predicted.

    `words` (between white space) and `bytes` (of UTF-8) are those of the text up to the last token predicted;
    None where the tokenizer does not tell where that is.
    """

    text: str
    window: int
    stride: int
    windows: int
    tokens: int
    words: int | None
    bytes: int | None
    device: str
    residency: str = "dense"
    special_tokens: bool = False


@dataclass(frozen=True)
class Difference:
    """A model minus the one it is compared with, window by window, in nats a token.

    `identical` is whether the losses of all windows agree to the last bit.
    """

    nll: Estimate
    identical: bool


@dataclass(frozen=True)
class Score:
    """What one model does: `nll` in nats a token, and the same as perplexities a token, a word and a byte.

    `difference` is to the first model of the evaluation; that one has none.
    """

    path: str
    dtype: str
    nll: Estimate
    token_perplexity: Estimate
    word_perplexity: Estimate | None
    byte_perplexity: Estimate | None
    bits_per_byte: Estimate | None
    difference: Difference | None


@dataclass(frozen=True)
class Evaluation:
    """The scores of some models under one convention, in the order in which they were given."""

    convention: Convention
    scores: tuple[Score, ...]
    versions: Mapping[str, str] = field(default_factory=versions)


@dataclass(frozen=True)
class Task:
    """A text cut into windows for some models: what `prepare` makes and `evaluate` does.

    `ids` are the tokens, int64; `dtype` None is each checkpoint's own.
    """

    paths: tuple[Path, ...]
    convention: Convention
    ids: torch.Tensor
    windows: tuple[Window, ...]
    dtype: torch.dtype | None

    @property
    def tokens(self) -> int:
        """Predictions to be made, of all models together."""
        return self.convention.tokens * len(self.paths)


def read_text(source: str) -> Text:
    """The held-out text of the demo for `demo`, else the content of a UTF-8 file. Raises NeuzipError."""
    if source == "demo":
        return Text(f"demo (Python {platform.python_version()})", held_out_text())
    try:
        content = Path(source).read_bytes().decode("utf-8")
    except OSError as error:
        raise NeuzipError(f"{source}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise NeuzipError(
            f"{source}: is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}",
            "convert it first, for example with iconv",
        ) from error
    return Text(source, content)


def prepare(
    checkpoints: Sequence[str | os.PathLike[str]],
    text: Text,
    *,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    residency: str = "dense",
) -> Task:
    """Tokenise a text and cut it into windows, for one checkpoint or for several that shall be compared.

    By default windows do not overlap; they have 1,024 predictions, or as many as the model has positions.
    `max_tokens` bounds the predictions. `device` auto is CUDA if there is any; `dtype` auto is float32 for
    dense weights on a CPU, else the checkpoint's own. `residency` is how weights are kept in memory. Raises
    NeuzipError, and UsageError for what the model cannot do.
    """
    paths = tuple(Path(path) for path in checkpoints)
    window, stride = _window_and_stride(paths, window, stride)
    place = choose_device(device).type
    own = place != "cpu" or residency != "dense"
    kind = DTYPES[dtype] if dtype != "auto" else None if own else torch.float32
    ids, words, size = _tokenise(paths, text, max_tokens)
    windows = tuple(cut(len(ids), window, stride))
    if not windows:
        raise NeuzipError(f"{text.name}: is too short: of {len(ids)} tokens none can be predicted")
    convention = Convention(
        text=text.name,
        window=window,
        stride=stride,
        windows=len(windows),
        tokens=len(ids) - 1,
        words=words,
        bytes=size,
        device=place,
        residency=residency,
    )
    return Task(paths, convention, torch.tensor(ids), windows, kind)


def evaluate(task: Task, *, on_tokens: OnTokens = lambda count: None) -> Evaluation:
    """Measure the models, one after the other. `on_tokens` is told of predictions made.

    The same weights give the same figures to the last bit on the same machine. Raises NeuzipError.
    """
    scores: list[Score] = []
    first: list[float] | None = None
    device, residency = task.convention.device, task.convention.residency
    for path in task.paths:
        model = load_model(path, task.dtype, device, residency=residency)
        sums = list(window_losses(model, task.ids, task.windows, on_tokens))
        scores.append(_score(path, str(model.dtype).removeprefix("torch."), task, sums, first))
        first = first or sums
        del model  # before the next one is loaded
    return Evaluation(task.convention, tuple(scores))


def cut(tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Windows that predict each of `tokens` tokens but the first once.

    >>> [(w.start, w.stop, w.scored) for w in cut(tokens=10, window=4, stride=4)]
    [(0, 4, 4), (4, 8, 4), (8, 9, 1)]
    >>> [(w.start, w.stop, w.scored) for w in cut(tokens=8, window=4, stride=2)]
    [(0, 4, 4), (2, 6, 2), (4, 7, 1)]
    """
    start = done = 0
    while done < tokens - 1:
        stop = min(start + window, tokens - 1)
        yield Window(start, stop, stop - done)
        start, done = start + stride, stop


@torch.inference_mode()
def window_losses(
    model: PreTrainedModel,
    ids: torch.Tensor,
    windows: Sequence[Window],
    on_tokens: OnTokens = lambda count: None,
) -> Iterator[float]:
    """For each window the negative log-likelihood of its scored tokens, in nats, summed.

    Logits are taken to float32 and sums to float64. Raises NeuzipError for a token that the model does not
    have, and for losses that are not finite.
    """
    largest = int(ids.max())
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if known is not None and largest >= known:
        raise NeuzipError(
            f"{model.config.name_or_path}: the tokenizer makes token {largest}, the weights have {known}",
            "the two do not belong together",
        )
    for batch in _batches(windows):
        fed = torch.stack([ids[w.start : w.stop] for w in batch]).to(model.device)
        logits = model(input_ids=fed, use_cache=False).logits  # (window, position, vocabulary)
        for w, scores in zip(batch, logits, strict=True):
            targets = ids[w.stop - w.scored + 1 : w.stop + 1].to(model.device)
            total = 0.0
            for part, wanted in zip(
                torch.split(scores[-w.scored :], LOSS_ROWS), torch.split(targets, LOSS_ROWS), strict=True
            ):
                losses = functional.cross_entropy(part.float(), wanted, reduction="none")
                total += float(losses.double().sum())
            if not math.isfinite(total):
                raise NeuzipError(
                    f"{model.config.name_or_path}: the loss of tokens {w.start} to {w.stop} is {total}",
                    "the weights may be broken, or --dtype may be too narrow for them: try float32",
                )
            on_tokens(w.scored)
            yield total


def _batches(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Windows of equal length side by side, in order, as many as ROWS allow."""
    batch: list[Window] = []
    for w in windows:
        length = w.stop - w.start
        if batch and (length != batch[0].stop - batch[0].start or (len(batch) + 1) * length > ROWS):
            yield batch
            batch = []
        batch.append(w)
    if batch:
        yield batch


def mean(sums: Sequence[float], counts: Sequence[int]) -> Estimate:
    """The mean over all tokens of windows with these sums, and its standard error over windows.

    Windows may have different numbers of tokens: it is the standard error of a ratio of two sums.

    >>> mean([4.0, 8.0], [2, 2])
    Estimate(value=3.0, standard_error=1.0)
    """
    tokens, n = sum(counts), len(sums)
    value = math.fsum(sums) / tokens
    if n < 2:
        return Estimate(value, None)
    squares = math.fsum((s - value * t) ** 2 for s, t in zip(sums, counts, strict=True))
    return Estimate(value, math.sqrt(n / (n - 1) * squares) / tokens)


def perplexity(nll: Estimate, per: float = 1.0) -> Estimate:
    """exp of `nll` times `per`, the tokens a unit; its standard error by the delta method."""
    try:
        value = math.exp(nll.value * per)
    except OverflowError:  # a bad model, or a text of very few and very long words
        value = math.inf
    return Estimate(value, None if nll.standard_error is None else value * per * nll.standard_error)


def _score(path: Path, dtype: str, task: Task, sums: Sequence[float], first: Sequence[float] | None) -> Score:
    convention, counts = task.convention, [w.scored for w in task.windows]
    nll = mean(sums, counts)
    per_word = convention.tokens / convention.words if convention.words else None
    per_byte = convention.tokens / convention.bytes if convention.bytes else None
    difference = None
    if first is not None:
        changes = [mine - other for mine, other in zip(sums, first, strict=True)]
        difference = Difference(mean(changes, counts), list(sums) == list(first))
    return Score(
        os.fspath(path),
        dtype,
        nll,
        perplexity(nll),
        perplexity(nll, per_word) if per_word is not None else None,
        perplexity(nll, per_byte) if per_byte is not None else None,
        _scaled(nll, per_byte / math.log(2)) if per_byte is not None else None,
        difference,
    )


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    error = estimate.standard_error
    return Estimate(estimate.value * factor, None if error is None else error * factor)


def _window_and_stride(paths: Sequence[Path], window: int | None, stride: int | None) -> tuple[int, int]:
    limits = [positions(load_config(path)) for path in paths]
    limit = min((n for n in limits if n is not None), default=None)
    if window is None:
        window = WINDOW if limit is None else min(WINDOW, limit)
    elif limit is not None and window > limit:
        raise UsageError(f"--window {window}: the model was made for {limit} tokens", "choose a smaller one")
    stride = window if stride is None else stride
    if stride > window:
        raise UsageError(
            f"--stride {stride} is larger than the window, {window}: tokens would be left out",
            "choose a smaller stride or a larger window",
        )
    return window, stride


def _tokenise(
    paths: Sequence[Path], text: Text, max_tokens: int | None
) -> tuple[list[int], int | None, int | None]:
    """Tokens, words and bytes of the text, up to the last token that is predicted."""
    found: list[int] | None = None
    for path in paths:
        tokenizer = load_tokenizer(path)
        with quiet_transformers():  # that the text is longer than the model's context
            encoded = tokenizer(
                text.content, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast
            )
        ids: list[int] = encoded["input_ids"]
        if found is not None and ids != found:
            raise NeuzipError(
                f"{paths[0]} and {path} have tokenizers that cut the text differently",
                "their figures cannot be compared token by token; evaluate them one by one",
            )
        found = ids
    assert found is not None
    scope: str | None = text.content
    if max_tokens is not None and max_tokens + 1 < len(found):
        found = found[: max_tokens + 1]
        scope = text.content[: encoded["offset_mapping"][max_tokens][1]] if tokenizer.is_fast else None
    if scope is None:
        return found, None, None
    return found, len(scope.split()), len(scope.encode("utf-8"))
