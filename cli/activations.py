"""Whether the inputs of layers are quantised as was asked for, or as config.json says."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from neuzip.cli.output import Output


def warn_of_plain_inputs(
    out: Output, path: Path, residencies: Collection[str], requested: str | None = None
) -> None:
    """Say so if activations, those `requested` or else those of config.json, have no effect on a checkpoint.

    Raises NeuzipError for what is no checkpoint, FormatError for a config.json that records what is none.
    """
    from neuzip.compress.sources.folder import FolderSource
    from neuzip.compress.ternary_weights import is_ternary
    from neuzip.runtime.activations import ACTIVATIONS_ENTRY, Activations

    activations = ACTIVATIONS_ENTRY.read(path) if requested is None else Activations(requested)
    if activations is None or activations.mode == "none":
        return
    with FolderSource(path) as source:
        has_ternary = any(is_ternary(source.resolve(tensor)) for tensor in source.tensors())
    origin = f"{path / 'config.json'} records {activations.mode}"
    if requested is not None:
        origin = f"--activations {requested}"
    if not has_ternary:
        out.warning(
            f"{origin}, but no weights are stored as ternary, so activations are not quantised",
            "store them with `neuzip compress --ternary`, and run with --residency packed",
        )
    elif set(residencies) == {"dense"}:
        out.warning(
            f"{origin}, but --residency dense does not quantise activations", "use --residency packed"
        )
