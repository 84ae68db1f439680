"""What `neuzip compress` says of a plan or a result: a dry run and a run have the same keys under --json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neuzip.compress.plan import PlannedTensor


PLAN_SPARE = ["dtype", "shape", "tensors"]
"""Columns of the table of a plan that a narrow window does without, the least useful first."""


def result_of(
    *,
    dry_run: bool,
    src: object,
    dst: object,
    original_bytes: int,
    stored_bytes: int | None,
    weight_bytes: int,
    stored_weight_bytes: int | None,
    weights: int,
    lossless: bool | None,
    tensors: Sequence[object],
    private_files: Sequence[str],
    more: Mapping[str, object],
    seconds: float | None = None,
    device: str | None = None,
    resumed_files: int = 0,
    warnings: Sequence[str] = (),
) -> dict[str, object]:
    """What `--json` says of a compression, the same keys of a dry run, whose sizes are predicted.

    `more` replaces some of the keys that are null for most runs.
    """
    stored = stored_weight_bytes
    further = dict.fromkeys(("target", "attention", "base", "base_name", "stream", "pushed"))
    if unknown := more.keys() - {*further, "dst"}:
        raise ValueError(f"no keys of compress: {', '.join(sorted(unknown))}")
    return {
        "dry_run": dry_run,
        "src": src,
        "dst": dst,
        "original_bytes": original_bytes,
        "stored_bytes": stored_bytes,
        "weight_bytes": weight_bytes,
        "stored_weight_bytes": stored,
        "weights": weights,
        "ratio": None if stored is None or not weight_bytes else stored / weight_bytes,
        "bits_per_weight": None if stored is None or not weights else 8 * stored / weights,
        "lossless": lossless,
        "seconds": seconds,
        "device": device,
        "resumed_files": resumed_files,
        "warnings": warnings,
        "private_files": private_files,
        "tensors": tensors,
        **further,
        **more,
    }


def planned(tensors: Sequence[PlannedTensor]) -> list[dict[str, object]]:
    """What `--json` says of tensors before they are compressed."""
    return [
        {
            "file": t.tensor.file,
            "name": t.tensor.name,
            "dtype": t.tensor.info.dtype,
            "shape": t.tensor.info.shape,
            "scheme": "alias" if t.alias_of is not None else str(t.scheme),
            "original_bytes": t.tensor.info.nbytes,
            "stored_bytes": t.predicted,
            "loss": None,
            "note": t.note,
        }
        for t in tensors
    ]


def alike(tensors: Sequence[PlannedTensor]) -> dict[tuple[str, ...], list[PlannedTensor]]:
    """Tensors by name without its numbers, shape, dtype and scheme, in the order of their first."""
    groups: dict[tuple[str, ...], list[PlannedTensor]] = {}
    for t in tensors:
        info = t.tensor.info
        scheme = str(t.scheme) if t.alias_of is None else f"same as {pattern(t.alias_of.name)}"
        shape = "x".join(map(str, info.shape)) or "scalar"
        groups.setdefault((pattern(info.name), shape, info.dtype, scheme), []).append(t)
    return {
        (group[0].tensor.info.name if len(group) == 1 else key[0], *key[1:]): group
        for key, group in groups.items()
    }


def pattern(name: str) -> str:
    """A name with its numbers left out.

    >>> pattern("model.layers.12.mlp.experts.3.w1.weight")
    'model.layers.*.mlp.experts.*.w1.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
