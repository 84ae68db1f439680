"""neuzip train: train all weights of a model, stored compressed, as a TOML file says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuzip.cli import options
from neuzip.cli.models import resolved_model
from neuzip.cli.output import Output, error
from neuzip.cli.ranks import joined_ranks
from neuzip.cli.residency import require_device
from neuzip.cli.source import resolved
from neuzip.cli.text import bytes_text, seconds_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import DiskFull, FormatError, NeuzipError, UsageError, WouldOverwrite

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from neuzip.compress.ranks import Ranks
    from neuzip.train.configuration import TrainingConfiguration
    from neuzip.train.distributed import Team
    from neuzip.train.loop import Figures
    from neuzip.train.text import TrainingWindows
    from neuzip.train.trainer import Trainer

PACKAGES = ("torch", "transformers", "matplotlib")

EXAMPLES = [
    "neuzip train run.toml",
    "neuzip train run.toml --resume",
    "torchrun --nproc-per-node 2 --no-python neuzip train run.toml",
    "",
    "A run.toml:",
    'model = "my-model"',
    'text = ["my.txt"]',
    'output = "trained"',
    "steps = 1000",
    "lr = 1e-5",
    "",
    "More keys: window, batch_size, micro_batch_size, optimizer,",
    "optimizer_state, weight_decay, schedule, warmup_steps, min_lr_ratio,",
    "max_grad_norm, clipping, compressed, compress, checkpoint_every,",
    "budget_minutes, seed, device, filter_gradients, deterministic, scratch,",
    "tokenizer, dtype",
]

CHECKPOINT, MODEL, LOG, PICTURE, RUN = "checkpoint", "model", "log.jsonl", "loss.svg", "run.json"
LAST = 20
"""Steps whose mean loss is the result: single ones differ by their windows."""


def command(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="TOML file; its keys are below", show_default=False)
    ],
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in the output folder and start again")
    ] = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Train all weights of a model while they are compressed in memory"""
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other", "leave one of them out")
    let_threads_sleep()
    Output(json=json, quiet=quiet).loading()
    import time

    from neuzip.train import configuration

    began = time.monotonic()
    with joined_ranks() as ranks:
        out = Output(json=json, quiet=quiet, silent=not ranks.is_first)
        asked = configuration.read(config, out.warning)
        require_device(asked.device)
        ranks.on_first(lambda: _refuse(asked, resume, overwrite))
        like, documents = ranks.first_before_others(lambda: (_source(out, asked), _documents(asked.text)))
        from neuzip.eval.measures.distributed import take_a_gpu
        from neuzip.runtime.devices import choose_device
        from neuzip.train.deterministic import deterministic_algorithms
        from neuzip.train.distributed import team
        from neuzip.train.loop import picture_of_losses

        take_a_gpu()
        device = choose_device(asked.device)
        with deterministic_algorithms(asked.deterministic), team(ranks, device, asked.batch_size) as own:
            trainer, windows = _begin(asked, like, documents, ranks, device)
            own.require_same("texts or tokenizers", windows.checksum())
            if resume:
                asked.require_same_text(_begun(asked), windows)
                if (asked.output / CHECKPOINT).is_dir():
                    trainer.load(asked.output / CHECKPOINT)
                _say_where(out, asked, trainer)
            else:
                ranks.on_first(lambda: _make_room(asked, windows))
            with _going_on():
                figures = _train(out, asked, trainer, windows, own, like, log=ranks.is_first)
                _write_model(out, asked, trainer, like, ranks)
        if ranks.is_first:
            with _going_on():
                picture_of_losses(figures, asked.output / PICTURE)
            _report(out, asked, trainer, windows, figures, time.monotonic() - began, ranks.world)


@contextmanager
def _going_on() -> Iterator[None]:
    """Say on a full disk how to go on, once run.json is there: the same command would refuse that."""
    try:
        yield
    except DiskFull as full:
        raise NeuzipError(
            full.message, "free some space, then resume from the last checkpoint with --resume"
        ) from full


def _say_where(out: Output, asked: TrainingConfiguration, trainer: Trainer) -> None:
    """Say what is left of a run that goes on."""
    if not trainer.steps:
        out.status("the run stopped before its first checkpoint, so it starts with step 1")
        return
    if trainer.steps < asked.steps:
        out.status(f"resuming after step {trainer.steps}")
        return
    out.status(f"finished already: {trainer.steps:,} of {asked.steps:,} steps are done")
    out.hint("to continue training, raise steps in the TOML file")


def _train(
    out: Output, asked: TrainingConfiguration, trainer: Trainer, windows: TrainingWindows,
    own: Team, like: Path, *, log: bool,
) -> list[Figures]:  # fmt: skip
    """Take the steps that are left, with a checkpoint at the end. Ctrl-C is told here, and exits with 130."""
    from neuzip.eval.measures.convention_names import special_text
    from neuzip.train.loop import run

    start = trainer.steps
    front = special_text(windows.special_tokens)
    out.status(
        f"{windows.tokens:,} tokens, {windows.length} per window{front}; weights use"
        f" {bytes_text(trainer.stored_bytes)} of {bytes_text(trainer.dense_bytes)} on {trainer.device}"
    )

    def step(number: int, lr: float) -> Figures:
        batch = windows.batch(number)
        loss = trainer.step(own.share(batch), lr)
        figures: Figures = {"loss": loss, "tokens": batch[:, 1:].numel()}
        return figures if trainer.norm is None else {**figures, "norm": trainer.norm}

    told = False

    def stopped(taken: int) -> None:  # before the signal has its effect: SIGTERM leaves no time afterwards
        nonlocal told
        told = True
        if log:
            error(
                "interrupted", f"stopped after step {taken}; resume with --resume",
                kind="Interrupted", exit_code=130,
            )  # fmt: skip

    def save(number: int) -> None:
        trainer.save(asked.output / CHECKPOINT, like=like)

    with out.progress("train", asked.steps - start, unit="steps") as advance:

        def progress(number: int, figures: Figures) -> None:
            advance(1)
            taken = number + 1
            if taken % max(1, asked.steps // 10) == 0:
                speed = figures["tokens_per_second"]
                out.status(f"step {taken}: loss {figures['loss']:.4f}, {speed:,.0f} tokens/s")

        minutes = asked.budget_minutes
        try:
            figures = run(
                step, steps=asked.steps, schedule=asked.rates(), log=asked.output / LOG if log else None,
                start=start, every=asked.checkpoint_every or None, checkpoint=save, progress=progress,
                budget_seconds=None if minutes is None else 60 * minutes, device=trainer.device,
                agree=own.largest, stopped=stopped,
            )  # fmt: skip
        except KeyboardInterrupt:
            if not told:
                raise
            raise SystemExit(130) from None
    if trainer.steps > start:
        with out.progress("save", None):
            save(trainer.steps)
    return figures


def _refuse(asked: TrainingConfiguration, resume: bool, overwrite: bool) -> None:
    """Raise for a folder that holds something, something needed, or another run than this one."""
    from neuzip.compress.overwrite_guard import refuse_nesting, require_name

    require_name(asked.output)
    for source in (asked.model, asked.tokenizer, asked.scratch, *asked.text):
        if source is not None and Path(source).exists():
            refuse_nesting(Path(source), asked.output)
    if resume:
        _refuse_to_go_on(asked.output)
        asked.require_same(_begun(asked))
    elif not _is_free(asked.output):
        if not overwrite:
            is_run = (asked.output / RUN).is_file()
            raise WouldOverwrite(
                f"{asked.output}: exists already",
                "--resume resumes the run there; --overwrite deletes it and starts again"
                if is_run
                else "choose another output",
            )
        _refuse_strangers(asked.output)


def _is_free(out: Path) -> bool:
    """Whether a run can begin in a folder: it is not there, or holds at most the first file of one, begun."""
    from neuzip.compress.workspace import partial_name

    if not out.is_dir():
        return not os.path.lexists(out)
    return {path.name for path in out.iterdir()} <= {partial_name(out / RUN).name}


def _refuse_to_go_on(out: Path) -> None:
    """Raise NeuzipError unless a run can go on in a folder, from a checkpoint or from its first step.

    A run that was killed before its first checkpoint begins anew, and loses nothing. A model without a
    checkpoint stays as it is.
    """
    from neuzip.compress.workspace import recover

    if not (out / RUN).is_file():
        raise NeuzipError(
            f"{out}: has no run to resume",
            "leave out --resume" if _is_free(out) else "choose another output",
        )
    recover(out / CHECKPOINT)
    if (out / MODEL).exists() and not (out / CHECKPOINT).is_dir():
        raise NeuzipError(
            f"{out}: has a trained model but no checkpoint to resume from",
            "to train this model further, give it as `model` with another output; --overwrite starts again",
        )


def _refuse_strangers(folder: Path) -> None:
    """Raise WouldOverwrite for a folder that is not of a run, or that holds more than a run leaves there."""
    if not (folder / RUN).is_file():
        raise WouldOverwrite(
            f"{folder}: is not from neuzip train, so it is not removed", "choose another output"
        )
    left = {CHECKPOINT, MODEL, f"{MODEL}-plain", LOG, PICTURE, RUN}
    names = {path.name.partition(".neuzip-")[0]: path.name for path in folder.iterdir()}
    if others := sorted(names[name] for name in names.keys() - left):
        raise WouldOverwrite(
            f"{folder}: holds {others[0]!r}, which is not from neuzip train",
            "move it away, or choose another output",
        )


def _begun(asked: TrainingConfiguration) -> dict[str, Any]:
    """What the run in a folder was begun with."""
    from neuzip.formats.safetensors_file import parse_json

    path = asked.output / RUN
    found = parse_json(path.read_bytes(), path)
    if not isinstance(found, dict):
        raise FormatError(path, "is not from neuzip train")
    return found


def _make_room(asked: TrainingConfiguration, windows: TrainingWindows) -> None:
    """Remove what is overwritten, and say which run it is."""
    import json as json_module
    import shutil

    from neuzip.compress.workspace import write_file, writing

    with writing(asked.output):
        if asked.output.exists():
            shutil.rmtree(asked.output)
        write_file(asked.output / RUN, json_module.dumps(asked.to_json(windows), indent=2).encode())


def _source(out: Output, asked: TrainingConfiguration) -> Path:
    """The folder of the model, or of the tokenizer of one that begins anew."""
    source = asked.model if asked.model is not None else asked.tokenizer
    assert source is not None
    return resolved_model(out, source) if asked.scratch is None else resolved(out, source)


def _begin(
    asked: TrainingConfiguration, path: Path, documents: list[str], ranks: Ranks, device: torch.device
) -> tuple[Trainer, TrainingWindows]:
    """The model in training, and its text."""
    import torch

    from neuzip.runtime.hf.bos import bos_in_front
    from neuzip.runtime.hf.decoder import positions
    from neuzip.runtime.hf.tokenizer import load_tokenizer
    from neuzip.train.text import TrainingWindows, tokenise
    from neuzip.train.trainer import train_compressed

    tokenizer = load_tokenizer(path)
    ids = tokenise(tokenizer, documents)
    model = _model(asked, path, tokenizer)
    length = asked.window_for(positions(model.config))
    windows = TrainingWindows.of(
        ids, length=length, batch=asked.batch_size, seed=asked.seed, front=bos_in_front(tokenizer)
    )
    torch.manual_seed((asked.seed + (ranks.rank << 32)) % (1 << 63))  # dropout
    trainer = train_compressed(
        model, asked.method(), compressed=asked.compressed, max_grad_norm=asked.max_grad_norm or None,
        clipping=asked.clipping,  # type: ignore[arg-type]  # it was checked
        micro_batch_size=asked.micro_batch_size,
        optimizer_state=asked.optimizer_state,  # type: ignore[arg-type]  # so was this
        seed=asked.seed, device=device, filter_gradients=asked.filter_gradients,
    )  # fmt: skip
    return trainer, windows


def _model(asked: TrainingConfiguration, path: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The checkpoint of a folder, or random weights."""
    import torch

    from neuzip.runtime.hf.load import load_model
    from neuzip.train.scratch import random_model

    if asked.scratch is None:
        return load_model(path, attention=False)
    return random_model(Path(asked.scratch), len(tokenizer), getattr(torch, asked.dtype), asked.seed)


def _documents(sources: list[str]) -> list[str]:
    from neuzip.eval.measures.texts import read_text
    from neuzip.train.text import JSON_LINES, read_documents

    found: list[str] = []
    for source in sources:
        if source.endswith(JSON_LINES):
            found += read_documents(Path(source))
        else:
            found += [document.content for document in read_text(source).documents]
    return found


def _write_model(
    out: Output, asked: TrainingConfiguration, trainer: Trainer, like: Path, ranks: Ranks
) -> None:
    """The trained model without the state of training, as a checkpoint or a container."""
    import shutil

    from neuzip.compress import compress

    target = asked.output / MODEL
    if not asked.compress:
        trainer.save(target, like=like, resumable=False)
        return
    plain = asked.output / f"{MODEL}-plain"
    trainer.save(plain, like=like, resumable=False)
    if ranks.is_first:
        compress(plain, target, overwrite=True)
        shutil.rmtree(plain)


def _report(
    out: Output,
    asked: TrainingConfiguration,
    trainer: Trainer,
    windows: TrainingWindows,
    figures: list[Figures],
    seconds: float,
    world: int,
) -> None:
    import statistics

    if not figures:
        raise NeuzipError(
            f"{asked.output / LOG}: has no steps", "it was removed or emptied; start again with --overwrite"
        )
    last = [one["loss"] for one in figures[-LAST:]]
    loss = statistics.fmean(last)
    speed = statistics.median(one["tokens_per_second"] for one in figures)
    peak = max(int(one["memory_bytes"]) for one in figures)
    steps = len(figures)
    out.text(f"loss     {loss:.4f} nats per token, mean of the last {len(last)} of {steps:,} steps")
    out.text(f"speed    {speed:,.0f} tokens/s")
    kept = f"weights {bytes_text(trainer.stored_bytes)}, states {bytes_text(trainer.state_bytes)}"
    out.text(f"memory   peak {bytes_text(peak)}; between steps {kept}")
    out.text(f"time     {seconds_text(seconds)}")
    out.text(f"model    {asked.output / MODEL}")
    out.text(f"plot     {asked.output / PICTURE}")
    if steps < asked.steps:
        out.hint(f"the time limit ended the run after {steps} of {asked.steps} steps; resume with --resume")
    out.result(
        {
            "model": asked.output / MODEL, "checkpoint": asked.output / CHECKPOINT, "log": asked.output / LOG,
            "picture": asked.output / PICTURE, "steps": steps, "loss": loss, "loss_of_steps": len(last),
            "tokens_per_second": speed, "peak_bytes": peak, "weight_bytes": trainer.stored_bytes,
            "dense_weight_bytes": trainer.dense_bytes, "state_bytes": trainer.state_bytes,
            "special_tokens": windows.special_tokens, "device": str(trainer.device), "processes": world,
            "seconds": seconds,
        },
        quiet=[asked.output / MODEL],
    )  # fmt: skip
