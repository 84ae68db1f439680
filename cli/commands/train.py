"""neuzip train: train all weights of a model, stored compressed, as a TOML file says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuzip.cli import options
from neuzip.cli.large_imports import import_large
from neuzip.cli.output import Output, error
from neuzip.cli.ranks import joined_ranks
from neuzip.cli.run_folder import CHECKPOINT, LOG, MODEL, PICTURE, begun_settings, make_folder, refuse_folder
from neuzip.cli.show.training import show_training
from neuzip.cli.source import resolved, resolved_model
from neuzip.cli.text import bytes_text
from neuzip.cli.threads import let_threads_sleep
from neuzip.errors import DiskFull, NeuzipError, UsageError
from neuzip.runtime.requirements import require_device

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from neuzip.compress.ranks import Ranks
    from neuzip.eval.measures.texts import Text
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
    "A run.toml for a ternary model from random weights:",
    'preset = "bitnet-a4.8-700m"',
    "scale = 0.25",
    'tokenizer = "my-model"',
    'text = ["my.txt"]',
    'eval_text = "other.txt"',
    'output = "ternary"',
    "steps = 1000",
    "",
    "More keys: window, batch_size, micro_batch_size, optimizer,",
    "optimizer_state, weight_decay, schedule, warmup_steps, min_lr_ratio,",
    "cooldown_lr, cooldown_start, max_grad_norm, clipping, compressed,",
    "compress, checkpoint_every, budget_minutes, seed, device,",
    "filter_gradients, deterministic, scratch, ternary, int8_fraction, dtype",
    "",
    "By default filter_gradients is true with model, and false from random",
    "weights (scratch, preset).",
]


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
        settings = configuration.read(config, out.warning)
        require_device(settings.device)
        ranks.on_first(lambda: refuse_folder(settings, resume, overwrite))
        like, documents, held_out = ranks.first_before_others(
            lambda: (_source(out, settings), _documents(settings.text), _held_out(settings))
        )
        import_large()
        from neuzip.eval.measures.distributed import take_a_gpu
        from neuzip.runtime.devices import choose_device
        from neuzip.train.deterministic import deterministic_algorithms
        from neuzip.train.distributed import team
        from neuzip.train.loop import picture_of_losses

        take_a_gpu()
        device = choose_device(settings.device)
        with (
            deterministic_algorithms(settings.deterministic),
            team(ranks, device, settings.batch_size) as own,
        ):
            trainer, windows = _begin(settings, like, documents, ranks, device)
            own.require_same("texts or tokenizers", windows.checksum())
            if resume:
                settings.require_same_text(begun_settings(settings), windows)
                if (settings.output / CHECKPOINT).is_dir():
                    trainer.load(settings.output / CHECKPOINT)
                _say_where(out, settings, trainer)
            else:
                ranks.on_first(lambda: make_folder(settings, windows))
            with _going_on():
                figures = _train(out, settings, trainer, windows, own, like, log=ranks.is_first)
                loss = None if held_out is None else _held_out_loss(out, trainer, like, held_out)
                _write_model(out, settings, trainer, like, ranks)
        if ranks.is_first:
            with _going_on():
                picture_of_losses(figures, settings.output / PICTURE)
            seconds = time.monotonic() - began
            show_training(out, settings, trainer, windows, figures, loss, seconds, ranks.world)


@contextmanager
def _going_on() -> Iterator[None]:
    """Say on a full disk how to go on, once run.json is there: the same command would refuse that."""
    try:
        yield
    except DiskFull as full:
        raise NeuzipError(
            full.message, "free some space, then resume from the last checkpoint with --resume"
        ) from full


def _say_where(out: Output, settings: TrainingConfiguration, trainer: Trainer) -> None:
    """Say what is left of a run that goes on."""
    if not trainer.steps:
        out.status("the run stopped before its first checkpoint, so it starts with step 1")
        return
    if trainer.steps < settings.steps:
        out.status(f"resuming after step {trainer.steps}")
        return
    out.status(f"finished already: {trainer.steps:,} of {settings.steps:,} steps are done")
    out.hint("to continue training, raise steps in the TOML file")


def _train(
    out: Output, settings: TrainingConfiguration, trainer: Trainer, windows: TrainingWindows,
    own: Team, like: Path, *, log: bool,
) -> list[Figures]:  # fmt: skip
    """Take the steps that are left, with a checkpoint at the end. Ctrl-C is told here, and exits with 130."""
    from neuzip.eval.measures.convention_names import special_text
    from neuzip.train.loop import run
    from neuzip.train.ternary_training import set_activations

    start = trainer.steps
    front = special_text(windows.special_tokens)
    out.status(
        f"{windows.tokens:,} tokens, {windows.length} per window{front}; weights use"
        f" {bytes_text(trainer.stored_bytes)} of {bytes_text(trainer.dense_bytes)} on {trainer.device}"
    )

    rates, stages = settings.rates(), settings.stages()
    if stages is not None:  # a run that has no steps left is evaluated as its last step was taken
        set_activations(trainer.model, stages.activations_at(max(0, start - 1)))

    def step(number: int, lr: float) -> Figures:
        batch = windows.batch(number)
        if stages is not None and number in (start, stages.first_hybrid_step):
            set_activations(trainer.model, stages.activations_at(number))
        loss = trainer.step(own.share(batch), lr, decay=rates.decays(number))
        figures: Figures = {"loss": loss, "tokens": batch[:, 1:].numel()}
        return figures if trainer.norm is None else {**figures, "norm": trainer.norm}

    is_told = False

    def stopped(taken: int) -> None:  # before the signal has its effect: SIGTERM leaves no time afterwards
        nonlocal is_told
        is_told = True
        if log:
            error(
                "interrupted", f"stopped after step {taken}; resume with --resume",
                kind="Interrupted", exit_code=130,
            )  # fmt: skip

    def save(number: int) -> None:
        trainer.save(settings.output / CHECKPOINT, like=like)

    with out.progress("train", settings.steps - start, unit="steps") as advance:

        def progress(number: int, figures: Figures) -> None:
            advance(1)
            taken = number + 1
            if taken % max(1, settings.steps // 10) == 0:
                speed = figures["tokens_per_second"]
                out.status(f"step {taken}: loss {figures['loss']:.4f}, {speed:,.0f} tokens/s")

        minutes = settings.budget_minutes
        try:
            figures = run(
                step, steps=settings.steps, schedule=rates,
                log=settings.output / LOG if log else None, start=start,
                every=settings.checkpoint_every or None, checkpoint=save, progress=progress,
                budget_seconds=None if minutes is None else 60 * minutes, device=trainer.device,
                agree=own.largest, stopped=stopped,
            )  # fmt: skip
        except KeyboardInterrupt:
            if not is_told:
                raise
            raise SystemExit(130) from None
    if trainer.steps > start:
        with out.progress("save", None):
            save(trainer.steps)
    return figures


def _source(out: Output, settings: TrainingConfiguration) -> Path:
    """The folder of the model, or of the tokenizer of one that begins anew."""
    source = settings.model if settings.model is not None else settings.tokenizer
    assert source is not None
    return resolved(out, source) if settings.model is None else resolved_model(out, source)


def _begin(
    settings: TrainingConfiguration, path: Path, documents: list[str], ranks: Ranks, device: torch.device
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
    model = _model(settings, path, tokenizer)
    length = settings.window_for(positions(model.config))
    windows = TrainingWindows.of(
        ids, length=length, batch=settings.batch_size, seed=settings.seed, front=bos_in_front(tokenizer)
    )
    torch.manual_seed((settings.seed + (ranks.rank << 32)) % (1 << 63))  # dropout
    trainer = train_compressed(
        model, settings.method(), compressed=settings.compressed,
        max_grad_norm=settings.max_grad_norm or None,
        clipping=settings.clipping,  # type: ignore[arg-type]  # it was checked
        micro_batch_size=settings.micro_batch_size,
        optimizer_state=settings.optimizer_state,  # type: ignore[arg-type]  # so was this
        seed=settings.seed, device=device, filter_gradients=settings.filters_gradients(),
    )  # fmt: skip
    return trainer, windows


def _model(
    settings: TrainingConfiguration, path: Path, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """The checkpoint of a folder, or random weights, latent ones for a ternary model."""
    import torch

    from neuzip.runtime.hf.load import load_model
    from neuzip.train.scratch import random_model
    from neuzip.train.ternary_training import make_ternary

    if settings.model is not None:
        return load_model(path, attention=False)
    if (recipe := settings.recipe()) is not None:
        assert settings.window is not None
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config: Any = recipe.config(len(tokenizer), settings.window, **ends)
    else:
        assert settings.scratch is not None
        config = Path(settings.scratch)
    model = random_model(config, len(tokenizer), getattr(torch, settings.dtype), settings.seed)
    if settings.ternary is not None:
        make_ternary(model)
    return model


def _held_out(settings: TrainingConfiguration) -> Text | None:
    """The text that the trained model is to predict. Raises NeuzipError for what is no text."""
    from neuzip.eval.measures.texts import read_text

    return None if settings.eval_text is None else read_text(settings.eval_text)


def _held_out_loss(out: Output, trainer: Trainer, tokenizer_path: Path, text: Text) -> float:
    """The mean loss of the model as it is now, in nats per token, as `neuzip eval` has it first."""
    from neuzip.eval.measures.conventions import Tokenised
    from neuzip.eval.measures.head import HeadedModel
    from neuzip.eval.measures.perplexity import token_losses
    from neuzip.runtime.hf.decoder import positions
    from neuzip.runtime.hf.tokenizer import load_tokenizer

    limit = positions(trainer.model.config)
    reading = Tokenised(text, load_tokenizer(tokenizer_path), limit).read_for_comparison()
    with (
        trainer.dense(trainer.device) as model,
        out.progress("evaluate", reading.convention.tokens, unit="tokens") as advance,
    ):
        losses = token_losses(HeadedModel(model), reading.ids, reading.windows, on_tokens=advance)
    return float(losses.mean(dtype="float64"))


def _documents(sources: list[str]) -> list[str]:
    from neuzip.eval.measures.texts import read_text
    from neuzip.train.text import JSON_LINES, read_documents

    documents: list[str] = []
    for source in sources:
        if source.endswith(JSON_LINES):
            documents += read_documents(Path(source))
        else:
            documents += [document.content for document in read_text(source).documents]
    return documents


def _write_model(
    out: Output, settings: TrainingConfiguration, trainer: Trainer, like: Path, ranks: Ranks
) -> None:
    """The trained model without the state of training, as a checkpoint or a container."""
    import shutil

    from neuzip.compress import compress
    from neuzip.compress.request import CompressRequest

    target = settings.output / MODEL
    if not settings.compress:
        trainer.save(target, like=like, resumable=False)
        return
    plain = settings.output / f"{MODEL}-plain"
    trainer.save(plain, like=like, resumable=False)
    if ranks.is_first:
        rules = CompressRequest(ternary=settings.ternary is not None).to_rules()
        compress(plain, target, rules, overwrite=True)
        shutil.rmtree(plain)
