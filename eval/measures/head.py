"""The head of a causal language model apart from the rest, so that its logits are never all in memory.

The model runs as it is, but its output embedding keeps what it is given, the hidden states, and hands back
one column of zeros in place of the logits. Kernels take it from there. What a model does to its logits after
that embedding is measured, once: the column is filled with numbers, and it is seen what comes out of them. A
scale and a soft cap are understood. Where it is anything else the model forms its logits itself, and `formed`
says why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuzip.choices import KvForm
from neuzip.errors import NeuzipError, is_out_of_memory
from neuzip.kernels import linear_cross_entropy as kernels
from neuzip.kernels.linear_cross_entropy import Divergence, Head, TokenStatistics, sums
from neuzip.kernels.linear_cross_entropy.head import DTYPES
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.runtime.hf.decoder import input_device
from neuzip.runtime.hf.kv_cache import KVCache
from neuzip.runtime.hf.kv_layers import HeadForm
from neuzip.runtime.hf.query_bits import quantized_queries
from neuzip.runtime.kv_bits import BitsArgument
from neuzip.runtime.weights import CompressedWeight, PackedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL, LARGE = 2.0**-12, 2.0**20
"""Logits so small that a soft cap has no effect, and so large that only the cap shows."""

TRIALS = (0.0, SMALL, LARGE, -LARGE, 1.0, -3.0, 10.0, 40.0)
"""Logits that are sent through a model's own operations on them."""

CLOSE = 1e-5
"""Relative error up to which a scale and a soft cap describe these operations."""

SLACK = 1e-4
"""Relative error that products in another order may have, of the largest logit."""

FORMED_BYTES = 64 << 20
"""Bytes of fp32 logits that are processed at a time if a model forms them."""


@dataclass(frozen=True, eq=False)
class FormedLogits:
    """Logits as a model gives them, [N, V]."""

    logits: Tensor


Predictions = Head | FormedLogits
"""The predictions of a model for N tokens, as hidden states with a head, or as logits."""


class HeadedModel:
    """A loaded causal language model whose logits are not formed.

    `formed` is why they are after all, in words, or None. `seconds` and `fed` add up the time that the model
    took up to its hidden states, and the tokens that it was fed. With `kv_bits`, as `KVCache` takes them,
    every token attends to quantised keys and values, its own included, as decoding would keep them; the first
    of each window is the text's first. With `query_bits` queries are quantised too. Raises NeuzipError if the
    model keeps something else, or attends otherwise than by sdpa.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kv_bits: BitsArgument | None = None,
        kv_form: KvForm | HeadForm = "rotated",
        query_bits: int | None = None,
    ) -> None:
        self.model = model
        self.kv_bits, self.kv_form, self.query_bits = kv_bits, kv_form, query_bits
        self.device = input_device(model)
        self.seconds, self.fed = 0.0, 0
        self.scale: float = 1.0
        self.softcap: float | None = None
        self._gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
        self.formed: str | None = self._probe()

    @property
    def name(self) -> str:
        """The path that it was loaded from."""
        return str(self.model.config.name_or_path)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its computation."""
        return self.model.dtype

    @property
    def vocabulary(self) -> int:
        """The number of tokens that have a logit."""
        weight = getattr(_output_embedding(self.model), "weight", None)
        return int(weight.shape[0]) if isinstance(weight, Tensor) else int(self.model.config.vocab_size)

    def require_tokens(self, ids: Tensor) -> None:
        """Raise NeuzipError for a token that the model does not have."""
        largest = int(ids.max()) if ids.numel() else 0
        known = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        if known is not None and largest >= known:
            raise NeuzipError(
                f"{self.name}: the tokenizer makes token {largest}, the weights have {known}",
                "the two do not belong together",
            )

    def form_logits(self, reason: str) -> None:
        """Make the model form its logits from now on, because a model that it is compared with does."""
        self.formed = self.formed or reason

    def heads(self, ids: Tensor) -> Head:
        """The head after each of `ids` [B, T]: hidden states [B * T, D]. Raises NeuzipError if `formed`."""
        if self.formed is not None:
            raise NeuzipError(f"{self.name}: its logits have to be formed: {self.formed}")
        head = self.predictions(ids)
        assert isinstance(head, Head)
        return head

    @torch.inference_mode()
    def predictions(self, ids: Tensor, rows: Tensor | slice = slice(None)) -> Predictions:
        """The predictions after each of `ids` [B, T], or after N of these B * T tokens."""
        began = self._now()
        if self.formed is None:
            with self._intercepted(torch.zeros(())) as seen:
                self._run(ids)
            predictions: Predictions = self._head(self._hidden(seen, ids)[rows])
        else:
            predictions = FormedLogits(self._run(ids).flatten(0, 1)[rows])
        self.seconds += self._now() - began
        self.fed += ids.numel()
        return predictions

    def _now(self) -> float:
        """The time at which the GPUs have finished their work."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
        return time.perf_counter()

    def _run(self, ids: Tensor) -> Tensor:
        cache = self.kv_cache()
        options: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            options["past_key_values"] = cache
        with nullcontext() if self.query_bits is None else quantized_queries(self.model, self.query_bits):
            logits: Tensor = self.model(input_ids=ids.to(self.device), **options).logits
        if cache is not None:
            cache.require_use(self.name)
        return logits

    def kv_cache(self) -> KVCache | None:
        """An empty cache for one call of the model, None if keys and values stay as they are."""
        if self.kv_bits is None:
            return None
        return KVCache(self.model.config, self.kv_bits, form=self.kv_form)

    def _hidden(self, seen: list[Tensor], ids: Tensor) -> Tensor:
        """The inputs of the output embedding, [B * T, D], on the device of the head."""
        if len(seen) != 1 or seen[0].shape[:-1] != ids.shape:
            raise ValueError(
                f"the output embedding is given {[tuple(x.shape) for x in seen]} for {ids.shape}"
            )
        weight = self._embedding().weight
        assert isinstance(weight, Tensor)
        return seen[0].flatten(0, 1).to(device=weight.device, dtype=weight.dtype)

    def _head(self, hidden: Tensor) -> Head:
        embedding = self._embedding()
        bias = getattr(embedding, "bias", None)
        return Head(hidden, _stored(embedding.weight), bias, self.softcap, self.scale)

    def _embedding(self) -> nn.Module:
        embedding = _output_embedding(self.model)
        assert isinstance(embedding, nn.Module)
        return embedding

    @contextmanager
    def _intercepted(self, column: Tensor) -> Iterator[list[Tensor]]:
        """Context that records the input of the output embedding, which returns one column, [B, T, 1]."""
        embedding = self._embedding()
        seen: list[Tensor] = []

        def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
            seen.append(x)
            return column.to(x.device).expand(*x.shape[:-1], 1)

        # accelerate has put a forward of its own into the instance where a device map is used.
        own = vars(embedding).get("forward")
        embedding.forward = forward
        try:
            yield seen
        finally:
            if own is None:
                del embedding.forward
            else:
                embedding.forward = own

    @torch.inference_mode()
    def _probe(self) -> str | None:
        """Find scale and soft cap; why there are none that reproduce the model's own logits, or None."""
        embedding = _output_embedding(self.model)
        weight = getattr(embedding, "weight", None)
        if not isinstance(embedding, nn.Module) or not isinstance(weight, Tensor):
            return f"{type(self.model).__name__} has no output embedding"
        if weight.device.type == "meta":
            return "the weights of its output embedding are offloaded"
        if weight.dtype not in DTYPES:
            return f"its output embedding is {weight.dtype}"
        known: Any = self.model.get_input_embeddings().weight
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(known.shape[0], (1, len(TRIALS)), generator=generator)
        own = self._run(ids)[0]
        if own.shape != (len(TRIALS), weight.shape[0]):
            return f"its logits are {tuple(own.shape)}, its output embedding {tuple(weight.shape)}"
        try:
            with self._intercepted(torch.tensor(TRIALS)[:, None]) as seen:
                answers = self._run(ids)
            hidden = self._hidden(seen, ids)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            return f"it does not work without them: {str(error).strip().partition(chr(10))[0]}"
        if answers.shape != (1, len(TRIALS), 1) or answers.dtype != torch.float32:
            return "it does more with them than to scale and to cap them"
        transform = _scale_and_softcap(answers.flatten().tolist())
        if transform is None:
            return "it does something else with them than to scale and to cap them"
        self.scale, self.softcap = transform
        return None if _reproduces(self._head(hidden), own) else "they are not those of its output embedding"


def statistics(predictions: Predictions, target: Tensor) -> TokenStatistics:
    """The statistics of each token, with targets int64 [N]; where logits are formed in plain torch, fp32."""
    if isinstance(predictions, Head):
        return kernels.token_statistics(predictions, target.to(predictions.hidden.device))
    logits = predictions.logits
    return _joined([_of_logits(z.float(), t) for z, t in _in_parts(logits, target.to(logits.device))])


def divergence(base: Predictions, other: Predictions, target: Tensor, top_k: int | None = None) -> Divergence:
    """The difference of two models on each token, on the base's device. Both form logits or none."""
    if isinstance(base, Head) and isinstance(other, Head):
        place = base.hidden.device
        return kernels.divergence(base, _moved(other, place), target.to(place), top_k=top_k)
    if isinstance(base, Head) or isinstance(other, Head):
        raise TypeError("the logits of one model are formed, those of the other are not")
    z, y = base.logits, other.logits
    pairs = zip(_in_parts(z, target.to(z.device)), torch.split(y, _rows(z)), strict=True)
    parts = [_of_two_logits(a.float(), b.to(a.device).float(), t, top_k) for (a, t), b in pairs]
    overlaps = [part.overlap for part in parts if part.overlap is not None]
    return Divergence(
        _joined([part.base for part in parts]),
        _joined([part.other for part in parts]),
        torch.cat([part.kld for part in parts]),
        torch.cat(overlaps) if top_k is not None else None,
    )


def _output_embedding(model: Any) -> object:
    return model.get_output_embeddings()


def _stored(weight: Any) -> Tensor | PackedTensor:
    """A weight as kernels take it: packed if products read it so, else dense, for as long as it is needed."""
    read_packed = isinstance(weight, PackedWeight) and not (weight.exact or weight.flipped)
    if read_packed and weight.packed.shape == weight.shape:
        packed: PackedTensor = weight.packed
        return packed
    if isinstance(weight, CompressedWeight):
        return weight.dense()
    assert isinstance(weight, Tensor)
    return weight.detach()


def _moved(head: Head, place: torch.device) -> Head:
    """A head on another device; one on the same is as it was."""
    if head.hidden.device == place:
        return head
    weight = head.weight
    if isinstance(weight, PackedTensor):
        arrays = {name: getattr(weight, name).to(place) for name in ("words", "row_start", "escapes")}
        weight = replace(weight, **arrays)
    else:
        weight = weight.to(place)
    bias = None if head.bias is None else head.bias.to(place)
    return replace(head, hidden=head.hidden.to(place), weight=weight, bias=bias)


def _scale_and_softcap(answers: list[float]) -> tuple[float, float | None] | None:
    """The scale and soft cap that map TRIALS to `answers`; None if no scale and cap do."""
    known = dict(zip(TRIALS, answers, strict=True))
    scale, limit = known[SMALL] / SMALL, abs(known[LARGE])
    if not math.isfinite(scale) or scale == 0:
        return None
    softcap = limit if limit < 0.5 * abs(scale) * LARGE else None
    if softcap == 0:
        return None
    for x, answer in known.items():
        expected = scale * x if softcap is None else softcap * math.tanh(scale * x / softcap)
        if not abs(answer - expected) <= CLOSE * abs(expected):
            return None
    return scale, softcap


def _reproduces(head: Head, own: Tensor) -> bool:
    """Whether a head gives the model's log-sum-exp, and its largest and first logit, but for rounding."""
    largest = own.float().abs().max().item()
    if not math.isfinite(largest):
        return False  # some tokens are never given, or the weights are broken
    slack = max(2 * torch.finfo(own.dtype).eps, SLACK) * max(largest, 1.0)
    for target in (own.argmax(dim=1), torch.zeros(own.shape[0], dtype=torch.int64, device=own.device)):
        recomputed = kernels.token_statistics(head, target.to(head.hidden.device))
        logits = own.float().gather(1, target[:, None])[:, 0]
        for ours, theirs in ((recomputed.lse, own.float().logsumexp(1)), (recomputed.target_logit, logits)):
            if not bool(((ours - theirs.to(ours.device)).abs() <= slack).all()):
                return False
    return True


# Logits that a model forms itself: plain torch, some rows at a time.


def _rows(logits: Tensor) -> int:
    return max(1, FORMED_BYTES // (4 * logits.shape[1]))


def _in_parts(logits: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = _rows(logits)
    return zip(torch.split(logits, rows), torch.split(target, rows), strict=True)


def _of_logits(z: Tensor, target: Tensor) -> TokenStatistics:
    lse = z.logsumexp(1)
    target_logit = z.gather(1, target[:, None])[:, 0]
    e, y = _exponentials(z)
    entropy = sums.entropy(e.sum(1), torch.where(e == 0, 0.0, e * y).sum(1))
    return TokenStatistics(
        lse=lse,
        target_logit=target_logit,
        argmax=z.argmax(1),
        entropy=entropy.float(),
        rank=(z > target_logit[:, None]).sum(1),
    )


def _of_two_logits(z: Tensor, y: Tensor, target: Tensor, top_k: int | None) -> Divergence:
    base, other = _of_logits(z, target), _of_logits(y, target)
    overlap = None
    if top_k is not None:
        both = z.topk(top_k).indices[:, :, None] == y.topk(top_k).indices[:, None, :]
        overlap = both.sum((1, 2))
    return Divergence(base, other, _kullback_leibler(z, y), overlap)


def _exponentials(z: Tensor) -> tuple[Tensor, Tensor]:
    """exp(y) and y in fp64, logits less the largest of their row."""
    y = z.double() - z.amax(1, keepdim=True)
    return y.exp(), y


def _kullback_leibler(z: Tensor, z_other: Tensor) -> Tensor:
    """fp32 [N]; infinite where the base can give a token that the other cannot."""
    (e, y), (f, y_other) = _exponentials(z), _exponentials(z_other)
    u = torch.where(e == 0, 0.0, y - y_other)
    shift = e * u
    # Where u is small the difference of exponentials would lose most of what it is of.
    excess = torch.where((u.abs() < 1) & (e != 0), e * (torch.expm1(-u) + u), f - e + shift)
    return sums.kullback_leibler(e.sum(1), f.sum(1), shift.sum(1), excess.sum(1)).float()


def _joined(parts: list[TokenStatistics]) -> TokenStatistics:
    names = ("lse", "target_logit", "argmax", "entropy", "rank")
    return TokenStatistics(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})
