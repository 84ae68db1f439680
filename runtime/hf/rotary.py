"""How positions turn the channels of keys, and the path of the center of keys that follows from it."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from neuzip.kernels.kv_cache import CenterPath
from neuzip.kernels.kv_cache.centers import in_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


NEIGHBOURS = (
    "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium", "llama4_text",
)  # fmt: skip
"""Types of models whose rotary embedding turns neighbouring channels together."""

ONLY_WINDOWS = ("cohere2", "exaone4")
"""Types of models that have a rotary embedding only in layers with a sliding window."""


@dataclass(frozen=True, eq=False)
class ChannelRates:
    """How positions turn the channels of a key of `width` numbers.

    rates  fp64 [pairs]: radians a token by which a pair turns
    begin  the first channel that turns
    apart  how far the two channels of a pair lie apart: as many as there are pairs, or 1 for neighbours
    """

    width: int
    rates: Tensor
    begin: int
    apart: int

    def still(self, wavelength: float) -> Tensor:
        """bool [width]: the channels that turn once in `wavelength` tokens or more, or not at all."""
        still = torch.ones(self.width, dtype=torch.bool)
        slow = self.rates * wavelength <= 2 * math.pi
        still[self.begin : self.begin + 2 * len(slow)] = in_pairs(slow, slow, self.apart)
        return still


def channel_rates(config: PreTrainedConfig, layer: int, width: int) -> ChannelRates:
    """The rates of the keys, `width` numbers each, that a layer of a model caches.

    Channels i and i + r / 2 turn by base**(-2 i / r) radians a token, where r of the `width` channels turn
    (in models of NEIGHBOURS the channels 2 i and 2 i + 1), or by what a scaled rotary embedding makes of that
    (transformers computes it from the config). A layer without a rotary embedding has no channels that turn,
    and neither have the latents that are cached in place of keys in multi-head latent attention (arXiv
    2405.04434), whose width is `kv_lora_rank`. If another model pairs its channels otherwise, the center of
    its keys is turned wrongly, which costs accuracy and is never wrong.
    """
    rope = _rope_parameters(config, layer)
    base = rope.get("rope_theta") or getattr(config, "rope_theta", None)
    if base is None or width == getattr(config, "kv_lora_rank", None) or not _is_rotary(config, layer):
        return ChannelRates(width, torch.zeros(0, dtype=torch.float64), 0, 1)
    part = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    last = getattr(config, "qk_rope_head_dim", None)  # latent attention: the last channels turn
    pairs = (min(last, width) if last else int(width * part)) // 2
    rates = _scaled_rates(config, layer, rope, pairs)
    if rates is None:
        rates = float(base) ** (-torch.arange(pairs, dtype=torch.float64) / max(pairs, 1))
    apart = 1 if config.model_type in NEIGHBOURS else max(pairs, 1)
    return ChannelRates(width, rates, width - 2 * pairs if last else 0, apart)


def _is_rotary(config: PreTrainedConfig, layer: int) -> bool:
    """Whether a layer of a model with a rotary embedding has it: some models leave it out of some layers."""
    rotary = getattr(config, "no_rope_layers", None)  # 1 for a layer that has it
    if rotary:
        return bool(rotary[layer])
    kinds = getattr(config, "layer_types", None)
    return not (config.model_type in ONLY_WINDOWS and kinds and kinds[layer] == "full_attention")


def _scaled_rates(config: PreTrainedConfig, layer: int, rope: dict[str, Any], pairs: int) -> Tensor | None:
    """The rates fp64 [pairs] of a scaled rotary embedding; None for a plain one, or for another number."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default" or kind not in ROPE_INIT_FUNCTIONS:
        return None
    compute = ROPE_INIT_FUNCTIONS[kind]
    own = _layer_kind(config, layer)
    takes = own is not None and "layer_type" in inspect.signature(compute).parameters
    rates, _ = compute(config, torch.device("cpu"), **({"layer_type": own} if takes else {}))
    return rates.double() if rates.shape == (pairs,) else None


def _rope_parameters(config: PreTrainedConfig, layer: int) -> dict[str, Any]:
    """What the config says of the rotary embedding of a layer, which may be that of a kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = _layer_kind(config, layer)
    return dict(rope if kind is None else rope[kind])


def _layer_kind(config: PreTrainedConfig, layer: int) -> str | None:
    """The kind of a layer, if kinds have rotary embeddings of their own."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None) or []
    return kinds[layer] if kinds and isinstance(rope.get(kinds[layer]), dict) else None


@dataclass(eq=False)
class CenterPaths:
    """The paths of the centers of a cache: layers whose keys turn alike share one.

    wavelength  tokens in which a channel turns once, from which on it has a center
    block       tokens of a block; None: centers do not turn
    whole       tokens at the begin of each text whose mean, the first left out, is the center
    """

    wavelength: float
    block: int | None
    whole: int
    known: dict[tuple[object, ...], CenterPath] = field(default_factory=dict)

    def path(
        self, config: PreTrainedConfig, layer: int, width: int, tokens: int, device: torch.device
    ) -> CenterPath:
        """The path for keys of `width` numbers of a layer, for texts of `tokens` or more, on a device."""
        channels = channel_rates(config, layer, width)
        key = tuple(channels.rates.tolist()), channels.begin, channels.apart, width, device
        path = self.known.get(key)
        if path is None or (self.block is not None and len(path.table) * self.block < tokens):
            still = channels.still(self.wavelength)
            if self.block is None:
                path = CenterPath.of(still, device=device)
            else:
                blocks = 1 << (max(1, -(-tokens // self.block)) - 1).bit_length()  # not one more each time
                path = CenterPath.of(
                    still, rates=channels.rates, begin=channels.begin, apart=channels.apart, block=self.block,
                    tokens=blocks * self.block, origin=self.whole / 2, device=device,
                )  # fmt: skip
            self.known[key] = path
        return path
