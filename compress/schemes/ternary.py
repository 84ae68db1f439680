"""Weights of -1, 0 and 1 times a scale: which tensors become ternary, and what they take.

The codes and scales themselves are those of ternary_coding, which loads torch: nothing here does before a
tensor is coded or decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from neuzip.compress.bitnet import bitnet_converts, online_config
from neuzip.compress.pieces import NotWorthwhile, Read, pieces
from neuzip.compress.scheme import Scheme, require_own_keys
from neuzip.compress.sources.source import SourceTensor, TensorSource
from neuzip.errors import NeuzipError, UsageError
from neuzip.formats.records import PACKINGS, SCALE_DTYPES, TernaryRecord
from neuzip.formats.safetensors_file import TensorInfo
from neuzip.kernels.dtypes import names_for
from neuzip.kernels.float_fields import Bits

from .codec import Codec, Declined, EncodedTensor, StoredTensor, TensorInput, checksums, register
from .lossless import LOSSLESS
from .raw import RAW, without_coding
from .ternary_layout import NoTernaryForm, TernaryLayout

if TYPE_CHECKING:
    import torch

    from neuzip.compress.workers import Workers

    from .ternary_coding import EncodedTernary, TernaryDecoder

TERNARY_DTYPES = names_for("ternary")
"""Dtypes of tensors that have a ternary form."""

QUANTIZERS = ("absmean", "absmean-clamped", "least-squares")
"""What rules may name; records name "exact" beside these."""

ONLINE = ("absmean-clamped", None)
"""Quantiser and group for which checkpoints of transformers' bitnet, online, were trained."""

LINEAR_WEIGHTS = "*layers.*_proj.weight"
"""What `--ternary` is for: the linear layers of attention and MLP, as most models call them."""

SAMPLED_WEIGHTS = 4096
"""Weights of a row that a first look for ternary values takes in."""


class TernaryCodec(Codec[TernaryRecord]):
    """Packed codes, and one scale for a tensor or for each group of a row."""

    record = TernaryRecord
    kind = "ternary"
    keys = ("quantizer", "group", "packing", "scale_dtype")
    rounds = None

    def check(self, scheme: Scheme) -> None:
        """Raise UsageError for quantisers, packings, dtypes of scales or groups that do not exist."""
        for name, choices in (
            ("quantizer", QUANTIZERS), ("packing", PACKINGS), ("scale_dtype", SCALE_DTYPES),
        ):  # fmt: skip
            if getattr(scheme, name) not in choices:
                raise UsageError(
                    f"{getattr(scheme, name)!r} is no {name} of ternary weights",
                    f"give {' or '.join(choices)}",
                )
        if scheme.group not in (None, "row") and (type(scheme.group) is not int or scheme.group < 1):
            raise UsageError(
                f"the group {scheme.group!r} is no number of weights",
                "give a number such as 128, or row; without one the tensor has one scale",
            )
        require_own_keys(scheme)

    def words(self, scheme: Scheme) -> str:
        """The scheme in a few words."""
        group = "" if scheme.group is None else f" group={scheme.group}"
        return f"ternary {scheme.quantizer}{group}"

    def hint_without_match(self, glob: str) -> str | None:
        """What to do where no tensor is called like the linear layers that `ternary` is for."""
        if glob != LINEAR_WEIGHTS:
            return None
        return 'name the linear layers in a `plan`, in rules with scheme = "ternary"'

    def applies(self, info: TensorInfo, scheme: Scheme) -> tuple[Scheme, str]:
        """The scheme, or LOSSLESS for dtypes that have no ternary form."""
        note = without_coding(info)
        if note:
            return RAW, note
        if info.dtype not in TERNARY_DTYPES or not info.shape:
            return LOSSLESS, f"{info.dtype} has no ternary form"
        return scheme, ""

    def require_possible(self, source: TensorSource, tensors: Sequence[SourceTensor]) -> None:
        """Raise NeuzipError for a tensor that is to be ternary and holds packed codes already."""
        names = {t.name for t in source.tensors()}
        for tensor in tensors:
            if tensor.info.dtype == "U8" and f"{tensor.name}_scale" in names:
                raise NeuzipError(
                    f"{source.checkpoint.path}: {tensor.name!r} holds ternary weights packed for "
                    f"transformers' bitnet (U8, beside {tensor.name}_scale) already, 2 bits each",
                    "leave out `ternary`: then they stay as they are, and everything else is compressed",
                )

    def refuse_destruction(
        self, source: TensorSource, tensors: Sequence[tuple[SourceTensor, Scheme]], workers: Workers
    ) -> None:
        """Raise NeuzipError if a tensor that is to be ternary has other values than -s, 0 and s."""
        online = online_config(source)
        doubtful = [
            (tensor, scheme)
            for tensor, scheme in tensors
            if not (
                online is not None
                and (scheme.quantizer, scheme.group) == ONLINE
                and bitnet_converts(tensor.name, online)
            )
        ]
        promising = list(workers.map(lambda pair: _may_be_ternary(source, *pair), doubtful))
        # One at a time: now whole tensors are read.
        names = [
            tensor.name
            for (tensor, scheme), may_be in zip(doubtful, promising, strict=True)
            if not (may_be and _is_ternary(source, tensor, scheme))
        ]
        if not names:
            return
        if online is not None and all(bitnet_converts(name, online) for name in names):
            raise NeuzipError(
                f"{source.checkpoint.path}: config.json says bitnet, online: it was trained for one scale a "
                "tensor, the clamped absmean",
                "give `ternary_quantizer='absmean-clamped'`, and no group",
            )
        raise NeuzipError(
            f"{source.checkpoint.path}: {len(names)} of {len(doubtful)} tensors that are to be ternary have "
            f"other values than -s, 0 and s, {names[0]!r} first; rounding them destroys a model that was not "
            "trained for it: in a third-party audit perplexity on WikiText went from 13.9 to 3.8e6",
            "leave them lossless, or give `allow_destructive=True` to do it all the same",
        )

    def predict(self, tensor: TensorInput, scheme: Scheme) -> int:
        """The stored bytes of codes and scales."""
        return TernaryLayout.of_scheme(tensor.info.shape, scheme).nbytes

    def predict_exact(self, tensor: TensorInput) -> int | None:
        """The stored bytes of a matrix whose values seem to be ternary, with one scale; None for another."""
        return TernaryLayout(tensor.info.shape).nbytes if has_exact_form(tensor) else None

    def encode(self, tensor: TensorInput, scheme: Scheme) -> EncodedTensor:
        """Record and streams. Raises Declined for weights that are better, or have to be, kept."""
        from . import ternary_coding as coding  # loads torch

        bits = tensor.read(0, tensor.numel)
        online = tensor.online is not None and bitnet_converts(tensor.info.name, tensor.online)
        try:
            weight = coding.as_tensor(bits, tensor.fmt, tensor.info.shape)
            return _encoded(coding.encode(weight, scheme, for_absmean=online), tensor, bits)
        except NoTernaryForm as reason:
            raise Declined(f"{reason}: kept lossless") from reason
        except NotWorthwhile as error:
            raise Declined("takes no less as codes and scales: kept lossless") from error

    def encode_exact(self, tensor: TensorInput) -> EncodedTensor | None:
        """Record and streams of a matrix whose values are ternary, bit by bit; None for another."""
        if not has_exact_form(tensor):
            return None
        from . import ternary_coding as coding  # loads torch

        bits = tensor.read(0, tensor.numel)
        try:
            weight = coding.as_tensor(bits, tensor.fmt, tensor.info.shape)
            encoded = _encoded(coding.encode_exact(weight), tensor, bits)
        except NoTernaryForm:
            return None
        if not encoded.record.lossless:  # zeros have signs
            raise Declined(encoded.note)
        return encoded

    def bound(self, record: TernaryRecord) -> Literal["fields", "codes"] | None:
        """What entropy bounds the stored bytes: that of the codes."""
        return "codes"

    def decoder(self, stored: StoredTensor[TernaryRecord]) -> TernaryDecoder:
        """What decodes ranges of a tensor, on the CPU whatever the device: there is little to do."""
        import torch

        def read(stream: str, start: int, stop: int) -> torch.Tensor:
            return torch.from_numpy(stored.read_stream(stream, start, stop))

        from .ternary_coding import decoder_of

        return decoder_of(stored.info, stored.record, read, stored.length)

    def decode_on(
        self,
        info: TensorInfo,
        record: TernaryRecord,
        streams: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> torch.Tensor:
        """The tensor's bytes (uint8) on `device`, where the streams are. Waits for it, to check the codes."""
        import torch

        from .ternary_coding import decoder_of

        decoder = decoder_of(
            info,
            record,
            lambda name, start, stop: streams[name][start:stop],
            lambda name: streams[name].numel(),
        )
        out = torch.empty(info.nbytes, dtype=torch.uint8, device=device)
        size = info.nbytes // info.numel
        for start, stop in pieces(info.numel):
            out[start * size : stop * size] = decoder.weights(start, stop).view(torch.uint8)
        return out


def _encoded(coded: EncodedTernary, tensor: TensorInput, bits: Bits) -> EncodedTensor:
    """The record of codes and scales of a tensor whose original has these bits."""
    from . import ternary_coding as coding

    original = xxhash.xxh3_64_hexdigest(bits.data)
    restored, loss = coding.restored(coded, bits, tensor.fmt)
    lossy, layout = restored != original, coded.layout
    record = TernaryRecord(
        restored, quantizer=coded.quantizer, packing=layout.packing, scale_dtype=layout.scale_dtype,
        group=layout.group, streams=checksums(coded.streams), original=original if lossy else None,
        loss=loss if lossy else None,
    )  # fmt: skip
    return EncodedTensor(record, coded.streams, "all its weights are 0" if coded.is_zero else "")


def _may_be_ternary(source: TensorSource, tensor: SourceTensor, scheme: Scheme) -> bool:
    group = scheme.group if isinstance(scheme.group, int) else None
    return may_be_ternary(TensorInput(tensor.info, source.reader(tensor)).read, tensor.info.shape, group)


def _is_ternary(source: TensorSource, tensor: SourceTensor, scheme: Scheme) -> bool:
    """Whether all values of a tensor are -s, 0 and s already, s being the tensor's, a row's or a group's."""
    from . import ternary_coding as coding  # loads torch

    floats = TensorInput(tensor.info, source.reader(tensor))
    weight = coding.as_tensor(floats.read(0, floats.numel), floats.fmt, tensor.info.shape)
    group = TernaryLayout.of_scheme(tensor.info.shape, scheme).group
    return coding.find_exact(weight, group) is not None


def has_exact_form(tensor: TensorInput) -> bool:
    """Whether a tensor is a matrix that may be ternary already: a glance at three rows, not at all of it."""
    info = tensor.info
    return info.dtype in TERNARY_DTYPES and len(info.shape) > 1 and may_be_ternary(tensor.read, info.shape)


def may_be_ternary(read: Read, shape: Sequence[int], group: int | None = None) -> bool:
    """Whether weights of one group in three rows of a tensor are all -s, 0 and s: then it may be ternary.

    `read` gives bit patterns, of a dtype of TERNARY_DTYPES. Without a `group` a row has one scale.
    """
    columns = shape[-1] if shape else 0
    numel = math.prod(shape)
    if numel == 0:
        return False
    rows = numel // columns
    for row in {0, rows // 2, rows - 1}:
        bits = read(row * columns, row * columns + min(columns, group or columns, SAMPLED_WEIGHTS))
        magnitudes = bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
        if np.unique(magnitudes[magnitudes > 0]).size > 1:
            return False
    return True


register(TernaryCodec())
