"""An original on a text, against which any number of its compressed forms are compared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from neuzip.compress.device import AnyDevice
from neuzip.errors import NeuzipError
from neuzip.eval.measures.conventions import Reading, Tokenised
from neuzip.eval.measures.divergence import Comparison, Paired, compare
from neuzip.eval.measures.head import HeadedModel, Predictions
from neuzip.eval.measures.perplexity import DTYPES
from neuzip.eval.measures.texts import Text
from neuzip.eval.measures.windows import TokenWindow
from neuzip.kernels.linear_cross_entropy import Head
from neuzip.runtime.decode.benchmark import free_memory, peak_bytes, reset_peak, synchronize
from neuzip.runtime.devices import choose_device
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.decoder import input_device, positions
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.tokenizer import load_tokenizer
from neuzip.runtime.residency import memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REMEMBERED = 4 << 30
"""Bytes of the original's hidden states that are cached, so that it does not run for each comparison."""

OnTokens = Callable[[int], None]

Stage = Callable[[str, int, str], AbstractContextManager[OnTokens]]
"""stage(label, total, unit) shows the progress of some work. Its context is a function that adds to it."""


class NotFinite(NeuzipError):
    """A compressed model predicts NaN or infinity where the original does not."""


@dataclass(frozen=True)
class ComparisonRun:
    """A model beside the original, and what it took, on one device.

    `load_seconds` is from the files to the live model. `tokens_per_second` is of the model up to its head, in
    windows of the text. `weight_bytes` is what its parameters take in memory; `peak_bytes` the most that
    loading and running it took beyond what the original takes, of the GPUs, or of the process on a CPU.
    """

    comparison: Comparison
    dtype: str
    load_seconds: float
    tokens_per_second: float
    weight_bytes: int
    peak_bytes: int | None


class BaselineComparison:
    """The original, loaded, and the text, cut into windows without overlap.

    Each window begins with BOS where the tokenizer puts BOS in front of a text. At most `max_tokens` are
    predicted. Attention is not quantised, whatever a checkpoint records. `dtype` "auto" is float32 for dense
    weights on a CPU, else the checkpoint's own. A `model` that was loaded from `path` already is taken as it
    is, and a `reading` in place of that of the text by `read_tokens`. Raises NeuzipError for what is no
    model, and UsageError for what it cannot do.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        text: Text,
        *,
        window: int | None = None,
        max_tokens: int | None = None,
        device: AnyDevice = "auto",
        dtype: str = "auto",
        residency: str = "dense",
        model: PreTrainedModel | None = None,
        reading: Reading | None = None,
    ) -> None:
        self.device = choose_device(device) if model is None else input_device(model)
        own = self.device.type != "cpu" or residency != "dense"
        self.dtype = DTYPES[dtype] if dtype != "auto" else None if own else torch.float32
        self.residency = residency
        self.reading = read_tokens(path, text, window, max_tokens) if reading is None else reading
        self.model = load_model(path, self.dtype, self.device, attention=False) if model is None else model
        self.base = RememberingModel(self.model)

    @property
    def ids(self) -> torch.Tensor:
        """The tokens of the text, int64 [n], without BOS in front of windows."""
        return self.reading.text

    @property
    def front(self) -> int | None:
        """The BOS with which every window begins, None where the tokenizer puts none in front of a text."""
        return self.reading.front

    @property
    def tokens(self) -> int:
        """Number of predicted tokens."""
        return self.reading.convention.tokens

    def run(
        self,
        path: str | os.PathLike[str],
        on_tokens: OnTokens = lambda count: None,
        *,
        residency: str | None = None,
    ) -> ComparisonRun:
        """Load a checkpoint and compare it with the original. Raises NeuzipError, and NotFinite.

        `residency` None is that of the original.
        """
        free_memory()
        reset_peak(self.device)
        before = _bytes_in_use(self.device)
        began = time.perf_counter()
        model = load_model(
            Path(path), self.dtype, self.device, residency=residency or self.residency, attention=False
        )
        synchronize(self.device)
        load_seconds = time.perf_counter() - began
        other = HeadedModel(model)
        other.seconds, other.fed = 0.0, 0  # without the probe
        comparison = self.compare(other, on_tokens)
        peak = peak_bytes(self.device)
        return ComparisonRun(
            comparison,
            str(model.dtype).removeprefix("torch."),
            load_seconds,
            other.fed / other.seconds,
            memory(model).total.stored_bytes,
            None if peak is None or before is None else max(0, peak - before),
        )

    def compare(
        self,
        other: HeadedModel,
        on_tokens: OnTokens = lambda count: None,
        windows: Sequence[TokenWindow] | None = None,
    ) -> Comparison:
        """Compare a live model with the original, on `windows` or on all. Raises NeuzipError, NotFinite."""
        return self._compared(other, on_tokens, windows).summary()

    def _compared(
        self, other: HeadedModel, on_tokens: OnTokens, windows: Sequence[TokenWindow] | None
    ) -> Paired:
        """Compare with the original, which forms its logits for this one only, if it has to."""
        reading, formed = self.reading, self.base.formed
        parts = (reading.windows, reading.blocks) if windows is None else (windows, None)
        try:
            return compare(self.base, other, reading.ids, *parts, on_tokens=on_tokens)
        except NeuzipError as failure:
            if other.vocabulary != self.base.vocabulary:
                raise
            self.base.formed = formed
            compare(self.base, self.base, reading.ids, *parts)  # is it the original?
            raise NotFinite(failure.message, failure.hint) from failure
        finally:
            self.base.formed = formed


def read_tokens(
    path: str | os.PathLike[str], text: Text, window: int | None = None, max_tokens: int | None = None
) -> Reading:
    """A text as a checkpoint's model reads it, in the windows of `BaselineComparison`."""
    limit = positions(load_config(path))
    return Tokenised(text, load_tokenizer(path), limit, max_tokens).read_for_comparison(window)


class RememberingModel(HeadedModel):
    """A model that keeps its hidden states, and gives them again for the same tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._room = REMEMBERED
        self._known: dict[tuple[bytes, bytes], Head] = {}

    def predictions(self, ids: torch.Tensor, rows: torch.Tensor | slice = slice(None)) -> Predictions:
        key = ids.numpy().tobytes(), b"" if isinstance(rows, slice) else rows.numpy().tobytes()
        known = self._known.get(key)
        if known is not None and self.formed is None:
            return known
        predictions = super().predictions(ids, rows)
        if isinstance(predictions, Head):
            self._room -= predictions.hidden.nbytes
            if self._room >= 0:
                self._known[key] = predictions
        return predictions


def _bytes_in_use(device: torch.device) -> int | None:
    """Bytes of torch's tensors on the GPUs, or of this process on a CPU; None if unknown."""
    if device.type == "cuda":
        return sum(torch.cuda.memory_allocated(number) for number in range(torch.cuda.device_count()))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
