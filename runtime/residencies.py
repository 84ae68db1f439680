"""The table of residencies: forms of weights in memory while a model runs.

Options, checks, estimates, messages and the pages of the documentation take names and facts from here. This
module imports no torch, so that help pages and checks before loading are fast. How a form compresses weights,
and computes with them, is in its class in `runtime/weights`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from neuzip.runtime.weights import CompressedWeight

Residency = Literal["dense", "packed", "ans"]
"""Names of the residencies, in the order of the help pages. `RESIDENCIES` has an entry for each."""


@dataclass(frozen=True)
class ResidencyEntry:
    """Facts about one residency. `gpu` and `cpu` say what it needs to run there; `cpu` is "" if it cannot."""

    summary: str
    """A few words for the help of `--residency`."""

    bytes_per_weight: float
    """Bytes of a bf16 weight of trained models, about: accelerate plans memory with it."""

    gpu: str
    cpu: str
    weight: str = ""
    """Module and class, "module:Class"; "" for ordinary tensors."""

    offloads_experts: bool = False
    """Whether experts that do not fit on a GPU can be read from host memory."""

    @property
    def is_slow_on_cpu(self) -> bool:
        """Whether a CPU runs it, by the reference code of its kernels."""
        return bool(self.weight and self.cpu)

    @property
    def weight_class(self) -> type[CompressedWeight]:
        """The class of the weights, for an entry that names one. The first use imports torch."""
        module, _, name = self.weight.partition(":")
        weights: type[CompressedWeight] = getattr(import_module(module), name)
        return weights


RESIDENCIES: dict[str, ResidencyEntry] = {
    "dense": ResidencyEntry("uncompressed", 2.0, gpu="yes", cpu="yes"),
    "packed": ResidencyEntry(
        "packed (fixed width)",
        11.4 / 8,
        gpu="compute capability 8.0 and later; prompts are fastest on Hopper",
        cpu="yes, through a slow reference",
        weight="neuzip.runtime.weights.packed:PackedWeight",
        offloads_experts=True,
    ),
    "ans": ResidencyEntry(
        "rANS-coded (GPU only)",
        10.9 / 8,
        gpu="compute capability 8.0 and later",
        cpu="",
        weight="neuzip.runtime.weights.ans:AnsWeight",
        offloads_experts=True,
    ),
}
"""Each residency by its name."""


def in_words(words: Iterable[str]) -> str:
    """Several alternatives for a sentence: "dense, packed or ans"."""
    *first, last = words
    return f"{', '.join(first)} or {last}"


def compressed_names() -> list[str]:
    """The residencies whose weights are compressed."""
    return [name for name, entry in RESIDENCIES.items() if entry.weight]


def offloading_names() -> list[str]:
    """The residencies whose experts can be read from host memory."""
    return [name for name, entry in RESIDENCIES.items() if entry.offloads_experts]


def compressed_on_cpu() -> str:
    """The first residency whose compressed weights a CPU can compute with."""
    return next(name for name in compressed_names() if RESIDENCIES[name].cpu)
