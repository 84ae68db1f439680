"""Bits of a KV cache, layer by layer: the fewest whose divergence on a calibration text is within a limit.

single   The keys of one layer are quantised, or its values, and all else stays as it is: the KL divergence
         of the model from itself, on the first windows of the text. It is measured in 4 and in 2 bits;
         others follow from the distance between two codes.
choice   The fewest stored bytes whose single divergences add up to a budget. The divergence of the choice
         as a whole is measured on the whole text, and the budget corrected until that is close to the limit.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from neuzip.choices import KvForm
from neuzip.compress.overwrite_guard import refuse_existing
from neuzip.compress.workspace import write_file, writing
from neuzip.errors import NeuzipError
from neuzip.eval.measures.comparison import BaselineComparison, NotFinite, Stage
from neuzip.eval.measures.divergence import Comparison
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.texts import Text
from neuzip.eval.plans.allocation import Allocation, Option, allocate
from neuzip.eval.plans.search import SearchAttempt, search_budget, upper
from neuzip.runtime.decode.benchmark import device_name
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.decoder import input_device, positions
from neuzip.runtime.hf.kv_cache import KVCache
from neuzip.runtime.hf.kv_layers import CacheFormat, KVLayer, PackedStates
from neuzip.runtime.hf.messages import versions
from neuzip.runtime.kv_bits import WIDTHS, KVBits, LayerBits, as_bits, plan_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PartName = Literal["keys", "values"]
PARTS: tuple[PartName, ...] = ("keys", "values")

MEASURED = (4, 2)
"""Bits for which single divergences are measured. Others follow, as one pass for each part and each of WIDTHS
would take long, and divergences of more bits are below the noise of a short text.
"""

WINDOW = 1024
"""Tokens of a window, if the model has so many positions."""

MAX_TOKENS = {"cpu": 8192, "cuda": 32768}
"""Tokens of the text on which choices are measured at most, by the type of the device."""

SINGLE_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens on which single divergences are measured, but at least a window, by the type of the device."""

TRIED = 8
"""Tokens fed to find out what the cache of each layer takes."""


@dataclass(frozen=True)
class CachePart:
    """The keys or the values of a layer.

    numbers  numbers that a token adds to the cache, on average over a window of the text: a layer with a
             sliding window keeps fewer
    nbytes   what these take in each of WIDTHS bits, scales included; the path of centers, which all layers
             share, is not
    klds     KL divergence in nats per token with this part alone in each of WIDTHS bits; None where the model
             then predicts NaN or infinity
    """

    layer: int
    name: PartName
    numbers: float
    nbytes: tuple[float, ...]
    klds: tuple[float | None, ...] = ()

    @property
    def widths(self) -> list[int]:
        """The bits that the part may get."""
        return [bits for bits, kld in zip(WIDTHS, self.klds, strict=True) if kld is not None]

    def options(self) -> list[Option]:
        """An option for each of `widths`, for `allocate` with a budget of divergence."""
        return [
            Option(kld, size) for kld, size in zip(self.klds, self.nbytes, strict=True) if kld is not None
        ]


@dataclass(frozen=True)
class KVCalibration:
    """Bits that were chosen for each layer, and the divergence of the model with this KV cache.

    `limit` and all divergences are in nats per token. `trials` has the divergence of each choice that was
    measured, the last one taken. `comparison` is of the model with and without the quantised cache, on the
    calibration text. `stored_bits` are those of a number on average, scales included; the few tokens of a
    text that are kept whole are not counted.
    """

    bits: KVBits
    limit: float
    stored_bits: float
    trials: tuple[float, ...]
    comparison: Comparison
    parts: tuple[CachePart, ...] = field(repr=False)
    text: str
    window: int
    tokens: int
    form: str
    device: str
    dtype: str
    seconds: float
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def kld(self) -> Estimate:
        """The mean KL divergence on the calibration text."""
        return self.comparison.kld.mean

    def facts(self) -> dict[str, object]:
        """What a plan file says of the calibration."""
        return {
            "max_kld": self.limit, "kld": asdict(self.kld), "stored_bits": self.stored_bits,
            "text": self.text, "tokens": self.tokens, "window": self.window, "dtype": self.dtype,
            "device": self.device, "form": self.form, "versions": self.versions,
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a plan file, which `kv_bits` takes. Raises WouldOverwrite, and NeuzipError."""
        target = Path(path)
        refuse_existing(target, overwrite, file=True)
        with writing(target):
            write_file(target, plan_bytes(self.bits.layers, self.facts()))


def calibrate(
    path: str | os.PathLike[str],
    model: PreTrainedModel,
    text: Text,
    limit: float,
    stage: Stage,
    *,
    window: int | None = None,
    max_tokens: int | None = None,
    single_tokens: int | None = None,
    kv_form: KvForm = "rotated",
) -> KVCalibration:
    """Choose the bits of the KV cache of a model that was loaded from `path`, for a KL divergence of `limit`.

    A choice is within the limit if its divergence with its standard error added is. `window` None are 1,024
    tokens, or the model's positions; `max_tokens` None is 8,192 on a CPU and 32,768 on a GPU, and
    `single_tokens` None, for single divergences, 2,048 and 8,192. Raises NeuzipError for a limit that 8 bits
    do not reach, and for a model whose cache cannot be quantised.
    """
    began = time.monotonic()
    if window is None:
        window = min(WINDOW, positions(load_config(path)) or WINDOW)
    most = max_tokens or MAX_TOKENS[input_device(model).type]
    baseline = BaselineComparison(path, text, window=window, max_tokens=most, model=model)
    measured = _PartlyQuantised(model, kv_form)
    parts = find_parts(measured, baseline)
    require_reach(baseline, measured, limit, stage)
    parts = single_divergences(
        baseline, measured, parts, stage, single_tokens or SINGLE_TOKENS[baseline.device.type]
    )
    last, trials = _search(baseline, measured, parts, limit, stage)
    assert last.product is not None  # at worst it has 8 bits everywhere
    numbers = math.fsum(part.numbers for part in parts)
    convention = baseline.reading.convention
    return KVCalibration(
        bits=replace(bits_of(parts, last.choice, measured.layers), form=kv_form),
        limit=limit,
        stored_bits=8 * last.choice.cost / numbers,
        trials=trials,
        comparison=last.product,
        parts=tuple(parts),
        text=text.name,
        window=convention.window,
        tokens=convention.tokens,
        form=kv_form,
        device=device_name(baseline.device),
        dtype=str(model.dtype).removeprefix("torch."),
        seconds=time.monotonic() - began,
    )


class _OnePart(KVLayer):  # type: ignore[no-untyped-call]
    """A layer of a cache that hands out its keys alone quantised, or its values, for one call of a model."""

    def __init__(self, layer: KVLayer, part: PartName) -> None:
        super().__init__(layer.form, layer.bits, layer.window, layer.path_of)
        self.part = part

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | PackedStates, Tensor | PackedStates]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return (keys, value_states) if self.part == "keys" else (key_states, values)


class _PartlyQuantised(HeadedModel):
    """A model whose KV cache is in `kv_bits`: that of all layers, or only a part of one, `only`."""

    def __init__(self, model: PreTrainedModel, kv_form: KvForm) -> None:
        self.only: tuple[int, PartName] | None = None
        super().__init__(model, kv_bits=WIDTHS[0], kv_form=kv_form)
        self.layers = len(KVCache(model.config, WIDTHS[0]).layers)

    def kv_cache(self) -> KVCache | None:
        cache = super().kv_cache()
        if cache is None or self.only is None:
            return cache
        number, part = self.only
        quantised = cache.layers[number]
        assert isinstance(quantised, KVLayer)
        cache.layers = DynamicCache(config=self.model.config.get_text_config(decoder=True)).layers
        cache.layers[number] = _OnePart(quantised, part)
        return cache

    def single(self, layer: int, part: PartName, bits: int) -> None:
        """Quantise only a part of one layer from now on."""
        self.only, self.kv_bits = (layer, part), bits

    def together(self, bits: KVBits) -> None:
        """Quantise all layers from now on."""
        self.only, self.kv_bits = None, bits


def find_parts(model: _PartlyQuantised, baseline: BaselineComparison) -> list[CachePart]:
    """Keys and values of all layers that have any, with what they take. Raises NeuzipError if none has."""
    cache = KVCache(model.model.config, WIDTHS[0], form=model.kv_form)
    with torch.inference_mode():
        ids = baseline.reading.ids[None, :TRIED].to(model.device)
        model.model(input_ids=ids, past_key_values=cache, use_cache=True)
    cache.require_use(model.name)
    window = baseline.reading.convention.window
    parts = []
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, KVLayer) or layer.key_heads is None or layer.value_heads is None:
            continue
        share = min(layer.window or window, window) / window
        for name, heads in zip(PARTS, (layer.key_heads, layer.value_heads), strict=True):
            states = torch.empty((1, heads.words.shape[1], 1, heads.width), device="meta")
            sizes = tuple(share * token_bytes(layer.form, states, bits, heads.group) for bits in WIDTHS)
            parts.append(CachePart(number, name, share * states.numel(), sizes))
    return parts


def token_bytes(form: CacheFormat, states: Tensor, bits: int, group: int | None) -> int:
    """What a token like `states` [1, H, 1, D] adds to a cache, scales included."""
    one, two = (form.allocate(states, tokens, bits, group, None).nbytes for tokens in (1, 2))
    return two - one


def require_reach(baseline: BaselineComparison, model: _PartlyQuantised, limit: float, stage: Stage) -> None:
    """Raise NeuzipError if the most bits for all keys and values are not within the limit."""
    most = WIDTHS[0]
    comparison = _together(baseline, model, as_bits(most), f"{most} bits", stage)
    if comparison is None:
        raise NeuzipError(
            f"with a KV cache of {most} bits the model predicts NaN or infinity", "leave out `kv_bits`"
        )
    value = upper(comparison.kld.mean)
    if value > limit:
        raise NeuzipError(
            f"a KL divergence of {limit:g} nats per token is out of reach: with {most} bits for all keys and"
            f" values it is {value:.2g} on the text, standard error included",
            f"allow {_rounded_up(value)} or more",
        )


def single_divergences(
    baseline: BaselineComparison,
    model: _PartlyQuantised,
    parts: Sequence[CachePart],
    stage: Stage,
    tokens: int,
) -> list[CachePart]:
    """Parts with the divergence that each alone brings, on so many `tokens`, but at least a window."""
    reading = baseline.reading
    windows = reading.windows[: max(1, min(tokens, baseline.tokens) // reading.convention.window)]
    measured_parts = []
    total = len(parts) * len(MEASURED) * sum(window.scored for window in windows)
    with stage("KV cache, single layers", total, "tokens") as advance:
        for part in parts:
            measured: dict[int, float] = {}
            for bits in MEASURED:
                model.single(part.layer, part.name, bits)
                try:
                    comparison = baseline.compare(model, advance, windows)
                except NotFinite:
                    continue
                measured[bits] = max(0.0, comparison.kld.mean.value)
            measured_parts.append(replace(part, klds=tuple(_kld_of(measured, bits) for bits in WIDTHS)))
    return measured_parts


def _kld_of(measured: dict[int, float], bits: int) -> float | None:
    """The divergence with a part in `bits`, from those that were measured with MEASURED bits.

    With more bits it falls with the square of the step, and between two measured ones by a power of the step.
    """
    if bits in MEASURED:
        return measured.get(bits)
    many, few = MEASURED
    near = measured.get(many)
    if near is None:
        return 0.0 if bits == WIDTHS[0] else None
    power = 2.0
    if bits < many and measured.get(few, 0.0) > near > 0:
        power = math.log(measured[few] / near) / math.log(steps(many) / steps(few))
    return near * math.pow(steps(many) / steps(bits), power)


def steps(bits: int) -> int:
    """Steps between the least and the largest code."""
    return (1 << bits) - 1


def _together(
    baseline: BaselineComparison, model: _PartlyQuantised, bits: KVBits, label: str, stage: Stage
) -> Comparison | None:
    """The model with all layers quantised beside itself; None if it then predicts NaN or infinity."""
    model.together(bits)
    with stage(f"KV cache, {label}", baseline.tokens, "tokens") as advance:
        try:
            return baseline.compare(model, advance)
        except NotFinite:
            return None


def _search(
    baseline: BaselineComparison,
    model: _PartlyQuantised,
    parts: Sequence[CachePart],
    limit: float,
    stage: Stage,
) -> tuple[SearchAttempt[Allocation, Comparison | None], tuple[float, ...]]:
    """The choice of the fewest bytes within the limit, and the divergences of all that were measured."""
    number = 0

    def trial(allocation: Allocation) -> tuple[Estimate, Comparison | None]:
        nonlocal number
        number += 1
        comparison = _together(
            baseline, model, bits_of(parts, allocation, model.layers), f"choice {number}", stage
        )
        return (Estimate(math.inf, None), None) if comparison is None else (comparison.kld.mean, comparison)

    attempts = search_budget(lambda budget: within(parts, budget), trial, limit)
    return attempts[-1], tuple(attempt.estimate.value for attempt in attempts)


def within(parts: Sequence[CachePart], budget: float) -> Allocation:
    """The fewest bytes of parts whose divergences add up to at most `budget`, but at most 8 bits each."""
    options = [part.options() for part in parts]
    least = math.fsum(min(option.weight for option in one) for one in options)
    return allocate(options, max(budget, least))


def bits_of(parts: Sequence[CachePart], allocation: Allocation, count: int) -> KVBits:
    """The bits of each of `count` layers as allocated."""
    chosen = {
        (part.layer, part.name): part.widths[number]
        for part, number in zip(parts, allocation.chosen, strict=True)
    }
    return KVBits(
        tuple(
            LayerBits(chosen[layer, "keys"], chosen[layer, "values"]) if (layer, "keys") in chosen else None
            for layer in range(count)
        )
    )


def _rounded_up(value: float) -> str:
    """A number of two digits that is not less than `value`."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit) * unit:.2g}"
