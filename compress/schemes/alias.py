"""Tensors with the bytes of another tensor of the checkpoint, which are stored once."""

from __future__ import annotations

from neuzip.compress.pieces import ReadBytes
from neuzip.formats.records import AliasRecord

from .codec import Codec, StoredTensor, register


class AliasCodec(Codec[AliasRecord]):
    """A reference to the tensor that holds the bytes."""

    record = AliasRecord

    def reader(self, stored: StoredTensor[AliasRecord]) -> ReadBytes:
        """read(start, stop) for the bytes of the holder."""
        return stored.holder()


register(AliasCodec())
