"""Whether the inputs of layers are quantised as was asked for, or as config.json says."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from neuzip.cli.output import Output
from neuzip.runtime.requirements import require_quantisable as require_quantisable


def warn_of_plain_inputs(
    out: Output, path: Path, residencies: Collection[str], asked: str | None = None
) -> None:
    """Say so if activations, those asked for or else those of config.json, have no effect on a checkpoint.

    Raises NeuzipError for what is no checkpoint, FormatError for a config.json that records what is none.
    """
    from neuzip.compress.source import TensorSource
    from neuzip.compress.ternary import is_ternary
    from neuzip.runtime.activations import ACTIVATIONS_ENTRY, Activations

    says = ACTIVATIONS_ENTRY.read(path) if asked is None else Activations(asked)
    if says is None or says.mode == "none":
        return
    with TensorSource(path) as source:
        is_stored_so = any(is_ternary(source.resolve(tensor)) for tensor in source.tensors())
    told = f"{path / 'config.json'} records {says.mode}" if asked is None else f"--activations {asked}"
    if not is_stored_so:
        out.warning(
            f"{told}, but no weights are stored as ternary, so activations are not quantised",
            "store them with `neuzip compress --ternary`, and run with --residency packed",
        )
    elif set(residencies) == {"dense"}:
        out.warning(f"{told}, but --residency dense does not quantise activations", "use --residency packed")
