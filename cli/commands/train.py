"""neuzip train: train all weights of a model, held compressed, as a TOML file says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuzip.cli import options
from neuzip.cli.output import Output, bytes_text, seconds_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import NeuzipError, UsageError, WouldOverwrite

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from neuzip.train.compressed import Trainer
    from neuzip.train.configuration import Configuration
    from neuzip.train.loop import Figures
    from neuzip.train.text import Windows

EXAMPLES = [
    "neuzip train run.toml",
    "neuzip train run.toml --resume",
    "",
    "A run.toml:",
    'model = "my-model"',
    'texts = ["my.txt"]',
    'out = "trained"',
    "steps = 1000",
    "lr = 1e-5",
    "",
    "More keys: length, batch, micro_batch, optimizer, weight_decay,",
    "schedule, warm_up, least, clip, clipping, compressed, compress,",
    "checkpoint_every, budget_minutes, seed, device, scratch, tokenizer, dtype",
]

CHECKPOINT, MODEL, LOG, PICTURE, RUN = "checkpoint", "model", "log.jsonl", "loss.svg", "run.json"
LAST = 20
"""Steps whose mean loss is the result: single ones differ by their windows."""


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file", show_default=False)],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint")] = False,
    overwrite: options.OverwriteOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Train all weights of a model while they are held compressed"""
    out = Output(json=json, quiet=quiet)
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other", "leave one of them out")
    let_threads_sleep()
    import time

    from neuzip.train import configuration
    from neuzip.train.loop import picture_of_losses, run

    asked = configuration.read(config)
    began = time.monotonic()
    _refuse(asked, resume, overwrite)
    trainer, windows, like = _begin(out, asked)
    if not resume:
        _make_room(asked)
    start = 0
    if resume:
        trainer.load(asked.out / CHECKPOINT)
        start = trainer.steps
        out.status(f"going on after step {start}")
    out.status(
        f"{windows.tokens:,} tokens, {asked.length} a window; weights take {bytes_text(trainer.stored_bytes)}"
        f" of {bytes_text(trainer.dense_bytes)} on {trainer.device}"
    )

    def step(number: int, lr: float) -> Figures:
        batch = windows.batch(number)
        loss = trainer.step(batch, lr)
        figures: Figures = {"loss": loss, "tokens": batch[:, 1:].numel()}
        return figures if trainer.norm is None else {**figures, "norm": trainer.norm}

    def save(number: int) -> None:
        trainer.save(asked.out / CHECKPOINT, like=like)

    with out.progress("train", asked.steps - start, unit="steps") as advance:

        def progress(number: int, figures: Figures) -> None:
            advance(1)
            if (number + 1) % max(1, asked.steps // 10) == 0:
                speed = figures["tokens_per_second"]
                out.status(f"step {number + 1}: loss {figures['loss']:.4f}, {speed:,.0f} tokens/s")

        minutes = asked.budget_minutes
        try:
            figures = run(
                step, steps=asked.steps, schedule=asked.rates(), log=asked.out / LOG, start=start,
                every=asked.checkpoint_every or None, checkpoint=save, progress=progress,
                budget_seconds=None if minutes is None else 60 * minutes,
            )  # fmt: skip
        except KeyboardInterrupt:
            out.hint(f"stopped after step {trainer.steps}; --resume goes on")
            raise
    if trainer.steps > start:
        save(trainer.steps)
    _write_model(out, asked, trainer, like)
    picture_of_losses(figures, asked.out / PICTURE)
    _report(out, asked, trainer, figures, time.monotonic() - began)


def _refuse(asked: Configuration, resume: bool, overwrite: bool) -> None:
    """Raise for a folder that holds something, something needed, or another run than this one."""
    from neuzip.compress.workspace import recover, refuse_nesting
    from neuzip.formats.tensor_file import parse_json

    for source in (asked.model, asked.tokenizer, asked.scratch, *asked.texts):
        if source is not None and Path(source).exists():
            refuse_nesting(Path(source), asked.out)
    if resume:
        run, checkpoint = asked.out / RUN, asked.out / CHECKPOINT
        recover(checkpoint)
        if not run.is_file() or not checkpoint.is_dir():
            raise NeuzipError(f"{asked.out}: has no checkpoint to go on from", "leave --resume out")
        asked.require_same(parse_json(run.read_bytes(), run))
    elif asked.out.exists() and not (asked.out.is_dir() and not any(asked.out.iterdir())):
        if not overwrite:
            raise WouldOverwrite(
                f"{asked.out}: exists already", "go on there with --resume, or give --overwrite"
            )
        if not (asked.out / RUN).is_file():
            raise WouldOverwrite(
                f"{asked.out}: is not from neuzip train, and is not removed", "choose another out"
            )


def _make_room(asked: Configuration) -> None:
    """Remove what is overwritten, and say which run it is."""
    import json as json_module
    import shutil

    from neuzip.compress.workspace import write_file, writing

    with writing(asked.out):
        if asked.out.exists():
            shutil.rmtree(asked.out)
    write_file(asked.out / RUN, json_module.dumps(asked.to_json(), indent=2).encode())


def _begin(out: Output, asked: Configuration) -> tuple[Trainer, Windows, Path]:
    """The model in training, its text, and the folder whose tokenizer it has."""
    from neuzip.formats.hub import resolve_source
    from neuzip.runtime.generate import choose_device, positions
    from neuzip.runtime.load import load_tokenizer
    from neuzip.train.compressed import train_compressed
    from neuzip.train.text import Windows, tokenise

    device = choose_device(asked.device)
    source = asked.model if asked.model is not None else asked.tokenizer
    assert source is not None
    path = resolve_source(source, note=out.status, progress=out.watched)
    tokenizer = load_tokenizer(path)
    ids = tokenise(tokenizer, _documents(asked.texts))
    windows = Windows.of(ids, length=asked.length, batch=asked.batch, seed=asked.seed)
    model = _model(asked, path, tokenizer)
    most = positions(model.config)
    if most is not None and asked.length > most:
        raise UsageError(f"length is {asked.length}, the model has {most} positions", f"give up to {most}")
    trainer = train_compressed(
        model, asked.method(), compressed=asked.compressed, clip=asked.clip or None,
        clipping=asked.clipping,  # type: ignore[arg-type]  # it was checked
        micro_batch=asked.micro_batch, seed=asked.seed, device=device,
    )  # fmt: skip
    return trainer, windows, path


def _model(asked: Configuration, path: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The checkpoint of a folder, or random weights."""
    import torch

    from neuzip.runtime.load import load_model
    from neuzip.train.scratch import random_model

    if asked.scratch is None:
        return load_model(path, attention=False)
    return random_model(Path(asked.scratch), len(tokenizer), getattr(torch, asked.dtype), asked.seed)


def _documents(sources: list[str]) -> list[str]:
    from neuzip.eval.texts import read_text
    from neuzip.train.text import JSON_LINES, read_documents

    found: list[str] = []
    for source in sources:
        if source.endswith(JSON_LINES):
            found += read_documents(Path(source))
        else:
            found += [document.content for document in read_text(source).documents]
    return found


def _write_model(out: Output, asked: Configuration, trainer: Trainer, like: Path) -> None:
    """The trained model without the state of training, as a checkpoint or a container."""
    import shutil

    from neuzip.compress import compress

    target = asked.out / MODEL
    if not asked.compress:
        trainer.save(target, like=like, resumable=False)
        return
    plain = asked.out / f"{MODEL}-plain"
    trainer.save(plain, like=like, resumable=False)
    compress(plain, target, overwrite=True)
    shutil.rmtree(plain)


def _report(
    out: Output, asked: Configuration, trainer: Trainer, figures: list[Figures], seconds: float
) -> None:
    import statistics

    last = [one["loss"] for one in figures[-LAST:]]
    loss = statistics.fmean(last)
    speed = statistics.median(one["tokens_per_second"] for one in figures)
    peak = max(int(one["memory_bytes"]) for one in figures)
    steps = len(figures)
    out.text(f"loss     {loss:.4f} nats a token, mean of the last {len(last)} of {steps:,} steps")
    out.text(f"speed    {speed:,.0f} tokens/s")
    out.text(f"memory   {bytes_text(peak)} at most; weights {bytes_text(trainer.stored_bytes)} between steps")
    out.text(f"time     {seconds_text(seconds)}")
    out.text(f"model    {asked.out / MODEL}")
    out.text(f"picture  {asked.out / PICTURE}")
    if steps < asked.steps:
        out.hint(f"the budget ended it after {steps} of {asked.steps} steps; --resume goes on")
    out.result(
        {
            "model": asked.out / MODEL, "checkpoint": asked.out / CHECKPOINT, "log": asked.out / LOG,
            "picture": asked.out / PICTURE, "steps": steps, "loss": loss, "loss_of_steps": len(last),
            "tokens_per_second": speed, "peak_memory_bytes": peak, "weight_bytes": trainer.stored_bytes,
            "dense_weight_bytes": trainer.dense_bytes, "device": str(trainer.device), "seconds": seconds,
        },
        quiet=[asked.out / MODEL],
    )  # fmt: skip
