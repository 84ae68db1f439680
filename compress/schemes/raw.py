"""Tensors as they are: integers, small tensors, and what does not shrink."""

from __future__ import annotations

from neuzip.compress.pieces import ReadBytes, digest
from neuzip.compress.scheme import Scheme
from neuzip.formats.records import RawRecord
from neuzip.formats.safetensors_file import TensorInfo
from neuzip.kernels.float_fields import FORMATS

from .codec import Codec, EncodedTensor, StoredTensor, TensorInput, register

CODED_MINIMUM = 4096
"""Bytes from which on coding can pay."""


class RawCodec(Codec[RawRecord]):
    """The bytes of a tensor, which the container holds under the tensor's own name."""

    record = RawRecord
    kind = "raw"

    def predict(self, tensor: TensorInput, scheme: Scheme) -> int:
        """All bytes of the tensor."""
        return tensor.info.nbytes

    def encode(self, tensor: TensorInput, scheme: Scheme | None = None) -> EncodedTensor:
        """The record alone: whoever writes the container copies the bytes."""
        return EncodedTensor(RawRecord(digest(tensor.read_bytes, tensor.info.nbytes)), {})

    def reader(self, stored: StoredTensor[RawRecord]) -> ReadBytes:
        """read(start, stop) for the bytes of the tensor."""
        return stored.read_raw


CODEC = RawCodec()
register(CODEC)

RAW = Scheme("raw")


def without_coding(info: TensorInfo) -> str:
    """Why a tensor is stored raw whatever a rule says: it has no floats, or too few. "" if it is not."""
    if info.dtype not in FORMATS:
        return f"{info.dtype} has no exponent to code"
    return "too small to shrink" if info.nbytes < CODED_MINIMUM else ""
