"""neuzip demo: the main job on the checkpoint that comes with neuzip."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuzip.cli import options
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output
from neuzip.cli.show.demo import BITS, show_versions
from neuzip.cli.text import bytes_text, percent_text, seconds_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import VerificationError, WouldOverwrite

if TYPE_CHECKING:
    from neuzip.compress import CompressionReport
    from neuzip.eval.measures.perplexity import Evaluation

PACKAGES = ("torch", "transformers")

EXAMPLES = [
    "neuzip demo",
    "neuzip demo --output /tmp/demo --overwrite",
]

FOLDERS = {
    "lossless": "the same weights",
    "quantized": "5 bits per weight",
    "restored": "the original again",
}


def command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the checkpoints")
    ] = Path("neuzip-demo"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace checkpoints of an earlier demo")
    ] = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Compress, verify, restore and evaluate the built-in checkpoint"""
    began = time.monotonic()
    out = Output(json=json, quiet=quiet)
    lossless, quantized, restored = paths = [output / name for name in FOLDERS]
    _make_room(output, paths, overwrite)
    let_threads_sleep()
    out.loading()
    from neuzip.eval.demo import CHECKPOINT

    bound = _inspect(out, CHECKPOINT)
    reports = _compress(out, CHECKPOINT, lossless, quantized)
    _verify(out, CHECKPOINT, lossless, quantized)
    files = _restore(out, CHECKPOINT, lossless, restored)
    evaluation = _evaluate(out, CHECKPOINT, lossless, quantized)
    seconds = time.monotonic() - began
    show_versions(out, reports, evaluation)
    out.text(f"\nWrote in {seconds_text(seconds)}:")
    for name, what in FOLDERS.items():
        out.text(f"  {output / name}: {what}")
    out.hint("to compress your own checkpoint: neuzip compress SRC DST")
    out.result(
        {
            "paths": paths,
            "weights": reports[0].weights,
            "weight_bytes": reports[0].weight_bytes,
            "bound_ratio": bound,
            "compressed": [
                {"dst": r.dst, "stored_weight_bytes": r.stored_weight_bytes, "ratio": r.ratio,
                 "bits_per_weight": r.bits_per_weight}
                for r in reports
            ],
            "identical_files": files,
            "convention": evaluation.measured[0].convention,
            "blocks": evaluation.measured[0].blocks,
            "scores": evaluation.measured[0].scores,
            "versions": evaluation.versions,
            "seconds": seconds,
        },
        quiet=paths,
    )  # fmt: skip


def _make_room(output: Path, paths: list[Path], overwrite: bool) -> None:
    """Refuse a folder that holds something, or remove from it what an earlier demo left there."""
    if output.exists() and not overwrite and not (output.is_dir() and not any(output.iterdir())):
        raise WouldOverwrite(f"{output}: exists already", "choose another --output, or give --overwrite")
    from neuzip.compress.overwrite_guard import refuse_existing
    from neuzip.compress.workspace import remove

    for path in paths:
        refuse_existing(path, overwrite)
    for path in paths:
        if os.path.lexists(path):
            remove(path)


def _inspect(out: Output, checkpoint: Path) -> float:
    """Count what the weights are made of; returns the bound of a lossless coder as a share of the size."""
    from neuzip.compress.sources.folder import FolderSource
    from neuzip.eval.measures import histograms

    with FolderSource(checkpoint) as source:
        inspection = histograms.inspect(source, histograms.select(source))
    (counts,) = inspection.counts
    out.status(f"The built-in checkpoint: a Llama of {counts.numel:,} trained weights in {counts.fmt.name}")
    out.status("1 inspect: the entropy of the bit fields of its weights")
    e, fmt = counts.entropies, counts.fmt
    fields = {
        "sign bit": (e.sign, 1),
        "exponent bits": (e.exponent, fmt.exponent_bits),
        "mantissa bits": (e.mantissa, fmt.mantissa_bits),
    }
    out.status(
        "  " + ", ".join(f"{entropy:.2f} of {bits} {name}" for name, (entropy, bits) in fields.items())
    )
    return (inspection.bound_bytes or 0) / inspection.nbytes


def _compress(out: Output, checkpoint: Path, lossless: Path, quantized: Path) -> list[CompressionReport]:
    from neuzip.checkpoints import compress_checkpoint

    out.status(f"2 compress: once without loss, once to {BITS} bits per weight")
    reports: list[CompressionReport] = [
        compress_checkpoint(checkpoint, lossless),
        compress_checkpoint(checkpoint, quantized, bits=BITS, calibration="none", overwrite=True),
    ]
    sizes = [f"{bytes_text(r.stored_weight_bytes)} in {seconds_text(r.seconds)}" for r in reports]
    out.status(f"  {bytes_text(reports[0].weight_bytes)} to {sizes[0]}, and to {sizes[1]}")
    return reports


def _verify(out: Output, checkpoint: Path, lossless: Path, quantized: Path) -> None:
    from neuzip.compress import verify

    out.status("3 verify: check all checksums, decode everything, compare it with the original")
    exact, close = verify(lossless, checkpoint), verify(quantized, checkpoint)
    worst = max((t.relative_l2 or 0.0 for t in close.tensors), default=0.0)
    same = len(exact.tensors) - len(exact.different)
    out.status(f"  lossless: {same} of {len(exact.tensors)} tensors identical, bit for bit")
    changed = len(close.different)
    out.status(f"  quantized: {changed} changed, by up to {percent_text(worst, 1)} in the L2 norm")


def _restore(out: Output, checkpoint: Path, lossless: Path, restored: Path) -> int:
    """Decompress, and compare every file with the original's, byte by byte; how many there are."""
    from neuzip.compress import decompress

    out.status("4 decompress: restore the folder from the lossless one, and compare them")
    decompress(lossless, restored)
    names = [sorted(p.name for p in folder.iterdir()) for folder in (checkpoint, restored)]
    if names[0] != names[1] or any(
        (checkpoint / name).read_bytes() != (restored / name).read_bytes() for name in names[0]
    ):
        raise VerificationError(f"{restored}: is not the folder that was compressed, {checkpoint}")
    out.status(f"  all {len(names[0])} files identical, byte by byte")
    return len(names[0])


def _evaluate(out: Output, *checkpoints: Path) -> Evaluation:
    import_large()
    from neuzip.eval.measures.perplexity import evaluate, prepare
    from neuzip.eval.measures.texts import read_text

    task = prepare(checkpoints, read_text("demo"), conventions=["token"], device="cpu")
    c = task.readings[0].convention
    out.status(f"5 evaluate: the perplexity of each, on {c.tokens:,} tokens of text unseen in training")
    with out.progress("evaluate", task.tokens, unit="tokens") as advance:
        return evaluate(task, on_tokens=advance)
