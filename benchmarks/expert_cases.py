"""What mixtures of experts are measured for: models, batches, and targets of speeds and memory.

Nothing here needs torch: the pages of results read it as well.
"""

from __future__ import annotations

from dataclasses import dataclass

QWEN, MIXTRAL = "qwen3-30b-a3b", "mixtral-8x7b"

MODEL_NAMES = {QWEN: "Qwen3-30B-A3B", MIXTRAL: "Mixtral 8x7B"}
"""Models as results and options have them, and as a reader knows them."""

LAYERS = {QWEN: 8, MIXTRAL: 4}
"""Layers of each model that are run: so many as show the speed of a layer, and fit beside other forms."""

BATCHES = (1, 8, 32, 128)
"""Texts that are decoded at once."""

PREFILL = 2048
"""Tokens of a prompt."""


@dataclass(frozen=True)
class Aim:
    """What a ratio to bf16 must be, and should be: at least, or (`most`) at most."""

    must: float
    stretch: float | None = None
    most: bool = False

    def met(self, ratio: float) -> bool:
        """Whether a ratio is as it must be."""
        return ratio <= self.must if self.most else ratio >= self.must

    def stretched(self, ratio: float) -> bool:
        """Whether a ratio is as it should be."""
        return self.stretch is not None and (ratio <= self.stretch if self.most else ratio >= self.stretch)


MEMORY = Aim(0.75, most=True)

AIMS: dict[tuple[str, str, str], Aim] = {
    (QWEN, "decode, batch 1", "packed"): Aim(1.1, 1.3),
    (QWEN, "decode, batch 8", "packed"): Aim(1.05, 1.2),
    (QWEN, "decode, batch 32", "packed"): Aim(1.0, 1.1),
    (QWEN, "decode, batch 128", "packed"): Aim(0.95, 1.0),
    (MIXTRAL, "decode, batch 1", "packed"): Aim(1.15, 1.35),
    (MIXTRAL, "decode, batch 32", "packed"): Aim(1.0, 1.1),
    **{(model, "decode, batch 1", "ans"): Aim(0.4, 0.6) for model in MODEL_NAMES},
    **{(model, "prefill", "packed"): Aim(0.9, 1.0) for model in MODEL_NAMES},
    **{(model, "weights in memory", form): MEMORY for model in MODEL_NAMES for form in ("packed", "ans")},
}
"""Targets of ratios to the fastest bf16 of transformers, by model, what is measured, and form."""
