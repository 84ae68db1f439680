"""What each layer of a decoder is worth: how little it changes, and what the model loses without it.

    angular distance  d(x^l, x^(l+n)) = arccos(cos(x^l, x^(l+n))) / pi between what layers l and l + n are
                      given, for all l and n: at the last token of each window (Gromov et al. 2024, "The
                      Unreasonable Ineffectiveness of the Deeper Layers"; Mix-LN, arXiv 2412.13795), and at
                      all tokens
    block influence   1 - E cos(x^l, x^(l+1)), over all tokens (Men et al. 2024, "ShortGPT")
    gradient norm     of the mean loss of a window, over all parameters of the layer
    left out          divergence and loss of the model with this layer passing on what it is given

The last one is the measure. The others predict it, and Spearman's rank correlation says how well.
States are compared in fp64: where two are nearly parallel, arccos halves the digits of their cosine.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from neuzip.choices import LayerChoice
from neuzip.errors import UsageError
from neuzip.eval.layers.distances import Distances, compare_states
from neuzip.eval.layers.gradient_norms import gradient_norms
from neuzip.eval.layers.layer_report import LayerReport, rank_correlations
from neuzip.eval.layers.left_out import LayerRemoval, ModelWithout, choose, measure_without
from neuzip.eval.measures.comparison import BaselineComparison, Stage
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.measures.texts import Text
from neuzip.runtime.decode.benchmark import device_name
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.decoder import decoder_layers
from neuzip.runtime.hf.messages import versions

MAX_TOKENS = 16384
"""Tokens predicted by default."""

GRADIENT_WINDOWS = 8
"""Windows over which gradients are computed by default, if there are as many."""


@dataclass(frozen=True)
class LayerAnalysis:
    """Measurements of the layers of a model.

    `rank_correlations` are those of each metric with the divergence of the model without the layer, None
    where a metric is the same for all; "depth" says that later layers are worth less. `parameters` are all of
    the model's; it computed in `dtype`, its config says `stored_dtype`. `special_tokens` says what stands in
    front of windows, as in `Convention`.
    """

    text: str
    window: int
    windows: int
    tokens: int
    gradient_windows: int
    layers: tuple[LayerReport, ...]
    last_token: Distances
    all_tokens: Distances
    rank_correlations: dict[str, float | None]
    removal: LayerRemoval | None
    parameters: int
    blocks: str
    device: str
    dtype: str
    stored_dtype: str
    seconds: float
    versions: dict[str, str] = field(default_factory=versions)
    special_tokens: str = "none"


def analyse(
    path: str | os.PathLike[str],
    text: Text,
    stage: Stage,
    *,
    window: int | None = None,
    max_tokens: int | None = None,
    gradient_windows: int = GRADIENT_WINDOWS,
    drop: int | None = None,
    choice: LayerChoice = "greedy",
    device: str = "auto",
    dtype: str = "auto",
) -> LayerAnalysis:
    """Measure the layers of a checkpoint folder on a text; and choose `drop` of them that it misses least.

    Raises NeuzipError for what is no decoder and for a text that is too short, and UsageError for windows
    that cannot be and for a `drop` that leaves no layer.
    """
    began = time.monotonic()
    baseline = BaselineComparison(
        path, text, window=window, max_tokens=max_tokens or MAX_TOKENS, device=device, dtype=dtype
    )
    model, reading = baseline.model, baseline.reading
    stack = decoder_layers(model)
    require_some_left(len(stack), drop)
    with stage("states", reading.convention.tokens, "tokens") as advance:
        geometry = compare_states(model, reading, advance)
    windows = reading.windows[:gradient_windows]
    norms: list[Estimate] | None = None
    if windows:
        with stage("gradients", len(windows), "windows") as advance:
            norms = gradient_norms(model, reading.ids, windows, advance)
    model_without = ModelWithout(model)
    reports = []
    with stage("layers left out", len(stack) * baseline.tokens, "tokens") as advance:
        for number, layer in enumerate(stack):
            reports.append(
                LayerReport(
                    number=number,
                    parameters=sum(p.numel() for p in layer.parameters()),
                    block_influence=reading.blocks.mean(geometry.influence[:, number]),
                    angular_distance=geometry.last_token.between(number),
                    angular_distance_all_tokens=geometry.all_tokens.between(number),
                    gradient_norm=None if norms is None else norms[number],
                    without=measure_without(baseline, model_without, [number], advance),
                )
            )
    removal = None
    if drop is not None:
        removal = choose(baseline, model_without, reports, geometry.last_token, drop, choice, stage)
    convention = reading.convention
    return LayerAnalysis(
        text=text.name,
        window=convention.window,
        windows=convention.windows,
        tokens=convention.tokens,
        gradient_windows=len(windows),
        layers=tuple(reports),
        last_token=geometry.last_token,
        all_tokens=geometry.all_tokens,
        rank_correlations=rank_correlations(reports),
        removal=removal,
        parameters=sum(p.numel() for p in model.parameters()),
        blocks=reading.blocks.text,
        device=device_name(baseline.device),
        dtype=str(model.dtype).removeprefix("torch."),
        stored_dtype=str(load_config(path).dtype or model.dtype).removeprefix("torch."),
        seconds=time.monotonic() - began,
        special_tokens=convention.special_tokens,
    )


def require_some_left(layers: int, drop: int | None) -> None:
    """Raise UsageError for a number of layers that cannot be dropped."""
    if drop is not None and not 0 < drop < layers:
        raise UsageError(
            f"`drop={drop}`: the model has {layers} layer{'' if layers == 1 else 's'}, one has to stay",
            f"drop {f'1 to {layers - 1}' if layers > 2 else '1'} of them" if layers > 1 else "leave it out",
        )
