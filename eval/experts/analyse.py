"""Measures how often each expert of a checkpoint is chosen on a text."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from neuzip.errors import NeuzipError
from neuzip.eval.experts.counting import count_use
from neuzip.eval.experts.expert_use import ExpertUse
from neuzip.eval.measures.comparison import BaselineComparison, Stage
from neuzip.eval.measures.distributed import ROWS, batches
from neuzip.eval.measures.texts import Text
from neuzip.runtime.decode.benchmark import device_name
from neuzip.runtime.hf.messages import versions


@dataclass(frozen=True)
class ExpertAnalysis:
    """The use of experts, and how it was measured. `special_tokens` is as in `Convention`."""

    use: ExpertUse
    window: int
    windows: int
    special_tokens: str
    device: str
    dtype: str
    seconds: float
    versions: dict[str, str] = field(default_factory=versions)


def analyse_experts(
    path: str | os.PathLike[str],
    text: Text,
    stage: Stage,
    *,
    window: int | None = None,
    max_tokens: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    residency: str = "dense",
) -> ExpertAnalysis:
    """Count how often each expert of a checkpoint folder is chosen. Raises NeuzipError if there is none."""
    began = time.monotonic()
    baseline = BaselineComparison(
        path, text, window=window, max_tokens=max_tokens, device=device, dtype=dtype, residency=residency
    )
    model, reading = baseline.model, baseline.reading
    fed = [batch.ids for batch in batches(reading.ids, reading.windows, ROWS[baseline.device.type])]
    tokens = sum(ids.numel() for ids in fed)
    with stage("experts", tokens, "tokens") as advance:
        layers = count_use(model, fed, advance)
    if not layers:
        raise NeuzipError(
            f"{path}: {type(model).__name__} has no experts", "give a mixture of experts, such as Mixtral"
        )
    convention = reading.convention
    return ExpertAnalysis(
        use=ExpertUse(text.name, tokens, layers),
        window=convention.window,
        windows=convention.windows,
        special_tokens=convention.special_tokens,
        device=device_name(baseline.device),
        dtype=str(model.dtype).removeprefix("torch."),
        seconds=time.monotonic() - began,
    )
