"""How the tensors of a delta are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.schemes import legend
from neuzip.cli.text import bytes_text, count_text, percent_text

if TYPE_CHECKING:
    from neuzip.compress import CompressionReport


def show_stored(out: Output, report: CompressionReport, base: str) -> None:
    """Say how many tensors are those of the base, how many are differences, and how many stand alone."""
    count = Counter(_kind(t.scheme) for t in report.tensors)
    out.text(
        f"base {base}: {count_text(count['base'], 'tensor')} unchanged, {count['delta']} as differences, "
        f"{count['alone']} in full"
    )


def _kind(scheme: str) -> str:
    return {"as in the base": "base", "delta": "delta"}.get(scheme, "alone")


def show_delta(out: Output, path: str | Path, globs: Sequence[str]) -> None:
    """Show how the tensors of a delta are stored; what they are made of shows only with the base."""
    from neuzip.compress.schemes import describe
    from neuzip.compress.sources.folder import FolderSource
    from neuzip.eval.measures.histograms import select, visible
    from neuzip.formats.checkpoint import base_name

    rows, tensors = [], []
    with FolderSource(path, allow_delta=True) as source:
        name = base_name(source.checkpoint)
        chosen = select(source, list(globs))
        for t in chosen:
            if t.record is None:
                continue
            stored, scheme = source.stored_bytes(t), describe(t.record, t.info.dtype)
            rows.append(
                [visible(t.name), visible(t.info.dtype), "x".join(map(str, t.info.shape)) or "scalar", scheme,
                 bytes_text(t.info.nbytes), bytes_text(stored), percent_text(stored, t.info.nbytes)]
            )  # fmt: skip
            tensors.append(
                {
                    "file": t.file, "name": t.name, "dtype": t.info.dtype, "shape": t.info.shape,
                    "original_bytes": t.info.nbytes, "stored_bytes": stored, "scheme": t.record.scheme,
                    "loss": None, "entropies": None, "used_mantissa_bits": None, "bound_bytes": None,
                    "codes": None, "base": t.record.base_checksum,
                }
            )  # fmt: skip
        headers = [source.header(file) for file in source.checkpoint.weights]
        whole = sum(len(header.raw) + header.data_bytes for header in headers)
        on_disk = sum(file.stat().st_size for file in source.checkpoint.weight_paths())
        every = len(chosen) == sum(len(header.tensors) for header in headers)
    nbytes, stored = (sum(t[key] for t in tensors) for key in ("original_bytes", "stored_bytes"))  # type: ignore[misc]
    out.table(
        ["tensor", "dtype", "shape", "scheme", "bytes", "stored", "ratio"], rows,
        right=["bytes", "stored", "ratio"],
        total=[count_text(len(rows), "tensor"), "", "", "", bytes_text(nbytes), bytes_text(stored),
               percent_text(stored, nbytes)],
    )  # fmt: skip
    out.text()
    for line in legend(row[3] for row in rows):
        out.text(line)
    out.text(f"A delta; its base is {visible(name) if name is not None else 'another file'}.")
    out.hint("to see entropies and histograms, restore the checkpoint: neuzip apply DELTA DST --base BASE")
    weights = sum(t.info.numel for t in chosen)
    out.result(
        {
            "src": path, "delta": True, "base_name": name, "device": "cpu", "compressed": True,
            "weight_bytes": whole if every else None, "stored_weight_bytes": on_disk if every else None,
            "weights": weights, "ratio": on_disk / whole if every and whole else None,
            "bits_per_weight": 8 * on_disk / weights if every and weights else None, "tensors": tensors,
            "totals": {"tensors": len(tensors), "original_bytes": nbytes, "stored_bytes": stored,
                       "bound_bytes": None},
            "rates": [], "histograms": [], "records": {}, "plot": None,
        },
        quiet=[stored],
    )  # fmt: skip
