"""The schemes, one file each, and the table of their codecs.

`register` adds a scheme from outside of the package, before rules name it or a container with it is opened.
"""

# Each registers itself; messages name the schemes in this order.
from . import raw, lossless, truncated, ternary, quantized, alias, delta  # isort: skip  # noqa: F401
from .codec import CODECS, Codec, EncodedTensor, codec_for, codec_of, describe, register

__all__ = ["CODECS", "Codec", "EncodedTensor", "codec_for", "codec_of", "describe", "register"]
