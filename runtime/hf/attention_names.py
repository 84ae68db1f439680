"""Names under which transformers knows our attention."""

from __future__ import annotations

BY_LAYER = "neuzip_sage"
"""Quantised attention, each layer in the bits of its own."""

NAMES: dict[str, int | None] = {"neuzip_sage8": 8, "neuzip_sage4": 4, BY_LAYER: None}
"""Quantised attention by name: bits of queries and keys; None: those of the layer."""

PACKED_CACHE = "neuzip_kv"
"""Attention that reads packed keys and values."""

QUERY_BITS: dict[str, int] = {f"neuzip_queries{bits}": bits for bits in range(1, 9)}
"""Attention with quantised queries by name: bits of queries."""
