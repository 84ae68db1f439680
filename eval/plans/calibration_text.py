"""The text that calibrates quantised weights: other tokens than those on which plans are compared."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from neuzip.choices import TargetScheme
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import split_topics
from neuzip.eval.measures import fingerprint
from neuzip.eval.measures.conventions import Reading, Tokenised
from neuzip.eval.measures.texts import Document, Text, read_text
from neuzip.eval.quantize.calibration_windows import CalibrationWindows
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.decoder import positions
from neuzip.runtime.hf.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from neuzip.eval.measures.comparison import BaselineComparison

COMPARED = 16384
"""Tokens of text on which plans are compared, if there are as many."""

COMPARED_ON_CPU = 8192
"""Tokens on which quantised plans are compared on a CPU, where a comparison is most of a trial's time."""

CALIBRATING = {"cpu": 6144, "cuda": 98304}
"""Tokens of text that calibrate at most, by the type of the device."""

WINDOW = {"cpu": 256, "cuda": 1024}
"""Tokens of a window of calibration at most, by the type of the device.

Gradients of many short windows vary less than those of few long ones, but short ones leave a GPU idle.
"""

LEAST = 512
"""Tokens without which a text neither calibrates nor compares."""

DEMO = "demo"
"""The name of the built-in text."""


@dataclass(frozen=True, eq=False)
class CalibrationText:
    """Tokens of a text, int64 [n], and `front`, the BOS before each window, None if there is none.

    `note` says what the reader should know of the text, or is empty.
    """

    name: str
    ids: torch.Tensor
    front: int | None
    note: str = ""

    def windows(self, baseline: BaselineComparison) -> CalibrationWindows:
        """The text in windows, no longer than those of a comparison."""
        width = min(WINDOW[baseline.device.type], baseline.reading.convention.window)
        return CalibrationWindows.of(self.ids, width, self.front)

    @property
    def fingerprint(self) -> str:
        """A short key of the tokens."""
        return fingerprint.of_values({"ids": self.ids.tolist(), "front": self.front})


@dataclass(frozen=True)
class TextParts:
    """How a text is divided.

    compared     the most tokens on which plans are compared
    calibration  the text that calibrates; None without calibration
    reading      the compared tokens in windows, if the text was tokenised to divide it
    """

    compared: int
    calibration: CalibrationText | None
    reading: Reading | None = None


def split_text(
    path: Path,
    text: Text,
    source: str,
    calibration: str,
    device: torch.device,
    compared: int | None = None,
) -> TextParts:
    """Divide text between the comparison of plans and the calibration of a checkpoint at `path`.

    text         the text on which plans are compared, which `source` names
    device       where the model runs
    compared     tokens for the comparison, if the text has twice as many; by default those of `most_compared`
    calibration  "auto" for what the comparison leaves of it, "none", or another text

    Raises UsageError if both are one text, and NeuzipError for a text that is too short.
    """
    compared = most_compared("quantized", device) if compared is None else compared
    most = CALIBRATING[device.type]
    if calibration == "none":
        return TextParts(compared, None)
    if calibration == "auto" and source == DEMO:
        return TextParts(compared, _whole(path, _other_topics(), most))
    if calibration == "auto":
        return _rest(path, text, compared, most)
    other = read_text(calibration)
    if other.content == text.content:
        raise UsageError(
            f"`calibration={calibration!r}`: is the text on which the result is measured, {text.name}",
            "give another text, or auto, which divides `text` in two",
        )
    return TextParts(compared, _whole(path, other, most))


def most_compared(scheme: TargetScheme, device: torch.device) -> int:
    """Tokens on which plans of a scheme are compared at most, on a device."""
    return COMPARED_ON_CPU if scheme == "quantized" and device.type == "cpu" else COMPARED


def _other_topics() -> Text:
    """The part of the built-in text that `read_text("demo")` leaves out."""
    documents = (Document(f"topics {i}", topic) for i, topic in enumerate(split_topics()[0]))
    return Text(f"the other topics of demo (Python {platform.python_version()})", tuple(documents))


def _whole(path: Path, text: Text, most: int) -> CalibrationText:
    """The first `most` tokens of a text."""
    tokenised = Tokenised(text, load_tokenizer(path))
    ids = torch.tensor(tokenised.ids[: most + 1])
    if len(ids) < LEAST:
        raise NeuzipError(
            f"{text.name}: has {len(ids)} tokens, too few to calibrate",
            f"give `calibration` a text of at least {LEAST} tokens, or none",
        )
    return CalibrationText(text.name, ids, tokenised.bos)


def _rest(path: Path, text: Text, wanted: int, most: int) -> TextParts:
    """What the comparison leaves of a text: the second half, if the text is shorter than two comparisons."""
    tokenised = Tokenised(text, load_tokenizer(path), positions(load_config(path)))
    total = len(tokenised.ids)
    compared = min(wanted, total // 2)
    if compared < LEAST:
        raise NeuzipError(
            f"{text.name}: has {total} tokens, too few to calibrate on one half and measure on the other",
            f"give `calibration` another text, or none; or give `text` at least {2 * LEAST} tokens",
        )
    ids = torch.tensor(tokenised.ids[compared + 1 :][: most + 1])
    note = ""
    if compared < wanted:
        note = (
            f"{text.name} has only {total:,} tokens: the first half measures, the second half calibrates;"
            " `calibration` takes another text"
        )
    calibration = CalibrationText(f"the rest of {text.name}", ids, tokenised.bos, note)
    return TextParts(compared, calibration, tokenised.first(compared).read_for_comparison())
