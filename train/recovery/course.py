"""Recovery of a model whose linear weights are ternary: trained on, with the original as its teacher.

    course = Recovery.begin(SRC, base, windows, settings)
    recover(course, SRC, DST, seconds=1800)

The weights in training are latent (see `straight_through`). They begin as those of the original, moved to
where the codes of the converted model are; so training begins with the quality of the conversion. What is
stored at the end are the codes and scales that were trained, in the checkpoint's dtype.

| what                  | here                                | BitNet b1.58                     |
|-----------------------|-------------------------------------|----------------------------------|
| scale of a matrix     | learned, or absmean                 | absmean                          |
| quantisation at first | in full, or warmed up               | in full                          |
| loss                  | divergence from the original        | cross-entropy                    |
| everything else       | trained in fp32, bf16 products      | bf16                             |

The second stage, a4.8, goes on from the latent weights and moments of the first (`load_state`), as the paper
(arXiv 2411.04965, section 3.2) does for the last 5 % of its tokens. A course is a
function of its seed, up to the order in which a GPU's attention adds.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from neuzip.choices import ScaleTraining, WholeGroup
from neuzip.compress.overwrite_guard import refuse_nesting, require_free
from neuzip.compress.storing import storing
from neuzip.compress.workspace import clear, partial_name, publish, remove, workspace, write_file
from neuzip.compress.workspace import recover as undo_half_publish
from neuzip.errors import FormatError, NeuzipError, UsageError, shell
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.kernels.quantizers import Ternary
from neuzip.runtime.activations import ACTIVATIONS_ENTRY, Activations
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.load import load_model
from neuzip.train.loop import Figures, Schedule, Shape, picture_of_losses, read_log, run
from neuzip.train.plain import write_plain
from neuzip.train.recovery.distill import LossWeights, head_loss, hidden_loss
from neuzip.train.recovery.latent import (
    dense_layer,
    head_weight,
    make_latent,
    require_plain_head,
    ternary_layers,
)
from neuzip.train.recovery.straight_through import Group, LatentLinear
from neuzip.train.recovery.sub_norms import with_sub_norms
from neuzip.train.recovery.ternary import TernaryRecipe, convert
from neuzip.train.state_file import read_state, write_state
from neuzip.train.text import TrainingWindows
from neuzip.train.weight_checksum import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE_FILE = "recovery.safetensors"

SEEN_TOKENS = 65_536
"""Tokens of the training text that a conversion sees, at most, and what a window of them has."""
SEEN_WINDOW = 512

STATE_FOLDER, LOG, PICTURE, SETTINGS = "state", "recovery.jsonl", "recovery.svg", "recovery.json"
"""What stands beside a model in its folder; the state only until the model is there."""

CHECKPOINTS = 10
"""So often is the state written."""

TRIAL_STEPS, TRIAL_SECONDS = 4, 10.0
"""What is tried at least to tell how long a step takes; the first does not count."""

USED = 0.97
"""Share of a budget that is planned for: checkpoints take time, and steps are not all alike."""

DRAWN = 2000
"""Steps that a picture has, at most."""


@dataclass(frozen=True)
class RecoverySettings:
    """How a model is recovered.

    activations   a mode of `bitlinear`: what inputs are quantised to
    group         what shares a scale where SRC is not ternary yet: "tensor", as in b1.58, or "row"
    sub_norms     an RMSNorm more before o_proj and down_proj (SubLN), see `sub_norms`
    scales        "learned" from those of the conversion, or "absmean" of the latent weights
    lr            of latent weights and of all else, at its peak; `scale_lr` times that of learned log-scales
    lr_warm_up    share of the steps in which the rate rises; then it falls as `shape` says to `least` of it
    strength      share of the steps in which quantisation is warmed up from 0 to 1
    loss          what is learned
    noise         share of the input tokens that are random ones, for teacher and student alike
    clip          largest norm of the gradients of all parameters together
    decay         of matrices, latent ones too
    length, batch tokens of a window, and windows of a step; what the `windows` have
    """

    activations: str = "b1.58"
    group: WholeGroup = "tensor"
    scales: ScaleTraining = "learned"
    sub_norms: bool = False
    lr: float = 3e-4
    scale_lr: float = 1.0
    lr_warm_up: float = 0.02
    shape: Shape = "cosine"
    least: float = 0.02
    strength: float = 0.0
    loss: LossWeights = field(default_factory=LossWeights)
    noise: float = 0.0
    clip: float = 1.0
    decay: float = 0.0
    length: int = 512
    batch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        Activations.of(self.activations)
        for name in ("lr_warm_up", "strength", "noise", "least"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "it is a share, from 0 to 1")
        if min(self.loss.divergence, self.loss.cross_entropy, self.loss.hidden) < 0 or not (
            self.loss.divergence or self.loss.cross_entropy or self.loss.hidden
        ):
            raise UsageError("nothing is to be learned", "give at least one loss a weight above 0")
        if not self.loss.temperature > 0:
            raise UsageError(f"a temperature of {self.loss.temperature}", "give one above 0")


class Recovery:
    """A model in recovery; see the module.

    student  the model in training, its layers LatentLinear and all parameters fp32
    base     the original, not changed
    source   the fingerprint of the model that the student was made of
    steps    how many there are to be
    """

    def __init__(
        self,
        student: PreTrainedModel,
        base: PreTrainedModel,
        windows: TrainingWindows,
        settings: RecoverySettings,
        dtype: torch.dtype,
        source: str,
    ) -> None:
        self.student, self.base = student, base.requires_grad_(False)
        self._begun_with = {"original": fingerprint(base), "source": source}
        for model in (student, base):
            nn.Module.train(model, False)  # no dropout: teacher and student see the same
            require_plain_head(model)
        self.windows, self.settings, self.dtype = windows, settings, dtype
        self.device = student.device
        self.steps = 1
        self.latent = {
            name: module for name, module in student.named_modules() if isinstance(module, LatentLinear)
        }
        self.optimizer = self._new_optimizer()

    @classmethod
    def begin(
        cls,
        src: str | os.PathLike[str],
        base: PreTrainedModel,
        windows: TrainingWindows,
        settings: RecoverySettings,
    ) -> Recovery:
        """From a checkpoint that is ternary, or is made so now; on the device of `base`.

        Raises NeuzipError for a model that is not like `base`, or is another one and not ternary.
        """
        student = load_model(src, torch.float32, base.device, attention=False)
        source = fingerprint(student)
        dtype = load_config(src).dtype
        if not isinstance(dtype, torch.dtype):
            dtype = base.dtype
        starts = ternary_layers(student)
        original = str(base.config.name_or_path)
        if not starts and Path(src).resolve() != Path(original).resolve():
            raise NeuzipError(
                f"{src}: has no weights that are ternary with a scale a tensor or a row",
                f"{shell('neuzip', 'ternarize', original, 'DST')} makes some; or recover that itself",
            )
        if settings.sub_norms:
            student = with_sub_norms(student, _seen(windows, base.device))
        if not starts and settings.scales == "learned":
            recipe = TernaryRecipe("error-feedback", "row" if settings.group == "row" else None)
            ternary = convert(student, recipe, _seen(windows, base.device))
            starts = {name.removesuffix(".weight"): one for name, one in ternary.items()}
        group: Group = "row" if settings.group == "row" else None
        make_latent(student, base, starts, settings.activations, settings.scales == "learned", group, dtype)
        return cls(student, base, windows, settings, dtype, source)

    def _new_optimizer(self) -> torch.optim.AdamW:
        matrices: list[Tensor] = []
        scales: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in self.student.named_parameters():
            kind = scales if name.endswith("log_scale") else matrices if parameter.dim() > 1 else others
            kind.append(parameter)
        groups = [
            {"params": matrices, "factor": 1.0, "weight_decay": self.settings.decay},
            {"params": others, "factor": 1.0, "weight_decay": 0.0},
            {"params": scales, "factor": self.settings.scale_lr, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=(0.9, 0.95), eps=1e-8,
            fused=self.device.type == "cuda",
        )  # fmt: skip

    def schedule(self) -> Schedule:
        """The learning rates of all steps."""
        s = self.settings
        return Schedule(s.lr, self.steps, round(s.lr_warm_up * self.steps), s.least, s.shape)

    def step(self, number: int, lr: float) -> Figures:
        """Train on the windows of a step; figures as `loop.run` wants them.

        Raises NeuzipError, with weights and moments as they were, if loss or gradients are no numbers.
        """
        return self._trained(number, lr, self.strength(number))

    def _trained(self, number: int, lr: float, strength: float) -> Figures:
        for layer in self.latent.values():
            layer.strength = strength
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        self.optimizer.zero_grad(set_to_none=True)
        figures = self._losses(number)
        parameters = [p for p in self.student.parameters() if p.grad is not None]
        norm = float(nn.utils.clip_grad_norm_(parameters, self.settings.clip))
        for value, words in ((figures["loss"], "the loss"), (norm, "the norm of the gradients")):
            if not math.isfinite(value):
                raise NeuzipError(
                    f"step {number + 1}: {words} is {value}, and no weight was changed",
                    "begin anew (`overwrite=True`) with a lower learning rate (`lr`)",
                )
        self.optimizer.step()
        return {**figures, "norm": norm, "strength": strength}

    def strength(self, number: int) -> float:
        """How much of the quantisation a step has: lambda, rising linearly to 1."""
        rising = round(self.settings.strength * self.steps)
        return min(1.0, number / rising) if rising else 1.0

    def _losses(self, number: int) -> Figures:
        """Gradients of a step's loss, and what it was."""
        weights = self.settings.loss
        batch = self.windows.batch(number)
        ids, targets = self._noisy(batch[:, :-1], number).to(self.device), batch[:, 1:].to(self.device)
        deep = weights.hidden > 0
        with torch.no_grad():
            teacher = self.base.base_model(ids, use_cache=False, output_hidden_states=deep)
        with self._autocast():
            student = self.student.base_model(ids, use_cache=False, output_hidden_states=deep)
        losses = head_loss(
            student.last_hidden_state.flatten(0, 1).float(), head_weight(self.student),
            teacher.last_hidden_state.flatten(0, 1), head_weight(self.base), targets.flatten(), weights,
        )  # fmt: skip
        total = losses.total
        figures: dict[str, Tensor] = {"kld": losses.divergence, "nll": losses.cross_entropy}
        if deep:
            figures["hidden"] = hidden_loss(student.hidden_states[1:], teacher.hidden_states[1:])
            total = total + weights.hidden * figures["hidden"]
        total.backward()  # type: ignore[no-untyped-call]
        figures = {"loss": total.detach(), **figures}
        values = torch.stack([value.detach() for value in figures.values()]).tolist()
        return {**dict(zip(figures, values, strict=True)), "tokens": ids.numel()}

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.device.type == "cpu":
            return nullcontext()  # bf16 products are slow there
        return torch.autocast(self.device.type, torch.bfloat16)

    def _noisy(self, ids: Tensor, number: int) -> Tensor:
        """With some tokens replaced by others, by a choice that is a function of seed and step.

        What stands in front of windows is not of the text, and stays.
        """
        if not self.settings.noise:
            return ids
        chance = torch.Generator().manual_seed((self.settings.seed << 32) + number)
        others = torch.randint(self.base.config.vocab_size, ids.shape, generator=chance)
        replaced = torch.rand(ids.shape, generator=chance) < self.settings.noise
        if self.windows.front is not None:
            replaced[:, 0] = False
        return torch.where(replaced, others, ids)

    def fit(self, seconds: float) -> int:
        """Set `steps` to what fits into `seconds`, by the time of a few steps that change nothing.

        Those in which quantisation is warmed up compute otherwise than the others, and are timed apart.
        """
        began = time.perf_counter()
        states, warming = self._moments(), self.settings.strength
        usual = 0.0
        for share, strength in ((warming, 0.5), (1 - warming, 1.0)):
            if share:
                usual += share * self._time_of_step(strength, seconds)
        self._set_moments(states)
        self.optimizer.zero_grad(set_to_none=True)
        left = seconds - (time.perf_counter() - began)
        self.steps = max(1, math.floor(USED * left / usual))
        return self.steps

    def _time_of_step(self, strength: float, seconds: float) -> float:
        taken: list[float] = []
        while len(taken) < TRIAL_STEPS or sum(taken[1:]) < min(TRIAL_SECONDS, seconds / 100):
            began = time.perf_counter()
            self._trained(1, 0.0, strength)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    def _moments(self) -> dict[str, Tensor]:
        """The optimizer's states by MOMENT/PARAMETER, on the CPU."""
        return {
            f"{kind}/{name}": value.detach().cpu().clone()
            for name, parameter in self.student.named_parameters()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
        }

    def _set_moments(self, moments: dict[str, Tensor]) -> None:
        self.optimizer.state.clear()
        for name, parameter in self.student.named_parameters():
            for kind in ("step", "exp_avg", "exp_avg_sq"):
                if (value := moments.get(f"{kind}/{name}")) is not None:
                    # AdamW counts on the CPU unless it is fused
                    device = "cpu" if kind == "step" and self.device.type == "cpu" else parameter.device
                    self.optimizer.state[parameter][kind] = value.to(device, copy=True)

    def _course(self) -> dict[str, Any]:
        """What has to be the same for a course to go on."""
        return {
            "begun_with": {**self._begun_with, "text": self.windows.checksum()},
            "settings": json.loads(json.dumps(asdict(self.settings))),
        }

    def save_state(self, folder: Path, taken: int) -> None:
        """Write latent weights and moments after `taken` steps; `load_state` goes on from there."""
        tensors = {f"parameter/{name}": p.detach().cpu() for name, p in self.student.named_parameters()}
        facts = {"taken": taken, "steps": self.steps, **self._course()}
        new = folder / f"{STATE_FILE}.new"
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_state(new, "recovery", tensors | self._moments(), facts)
            os.replace(new, folder / STATE_FILE)

    def load_state(self, folder: Path, *, resume: bool = True) -> int:
        """Take latent weights and moments from what `save_state` wrote; returns the steps that were taken.

        To `resume` is to go on with the same settings and number of steps; otherwise a new course begins with
        these weights and moments, and 0 is returned. Raises FormatError, and UsageError for other settings.
        """
        path = folder / STATE_FILE
        try:
            facts, tensors = read_state(path, "recovery")
        except FileNotFoundError as error:
            raise _no_state(path) from error
        if not {"taken", "steps", "settings"} <= facts.keys():
            raise FormatError(path, "lacks facts", field="recovery")
        if resume:
            changed = [
                name
                for part, now in self._course().items()
                for name in now
                if facts.get(part, {}).get(name) != now[name]
            ]
            if changed:
                raise UsageError(
                    f"{path}: was begun with another {' and another '.join(changed)}",
                    "give the same model, text and options, or `overwrite=True` to begin anew",
                )
        self._set_parameters(path, tensors)
        self._set_moments(tensors)
        if not resume:
            return 0
        self.steps = int(facts["steps"])
        return int(facts["taken"])

    @torch.no_grad()
    def _set_parameters(self, path: Path, tensors: dict[str, Tensor]) -> None:
        own = dict(self.student.named_parameters())
        names = {name.removeprefix("parameter/") for name in tensors if name.startswith("parameter/")}
        if names != own.keys():
            name = sorted(names ^ own.keys())[0]
            raise FormatError(path, "is of another model, or of other scales", field=name)
        for name, parameter in own.items():
            value = tensors[f"parameter/{name}"]
            if value.shape != parameter.shape:
                raise FormatError(path, f"has the shape {tuple(value.shape)}", field=name)
            parameter.copy_(value)

    def ternary(self) -> dict[str, Ternary]:
        """The weights as they are stored, by the names of layers."""
        return {name: layer.ternary() for name, layer in self.latent.items()}

    def write(self, src: str | os.PathLike[str], folder: Path) -> dict[str, Ternary]:
        """Write the model as a plain checkpoint in its dtype into a folder, with all else that `src` has.

        The student has ordinary layers afterwards. Returns the weights that are ternary.
        """
        weights = self.ternary()
        for name, layer in self.latent.items():
            self.student.set_submodule(name, dense_layer(layer, weights[name]))
        nn.Module.to(self.student, dtype=self.dtype)
        write_plain(self.student, folder, src)
        ACTIVATIONS_ENTRY.write(folder, Activations.of(self.settings.activations))
        return weights


@dataclass(frozen=True, eq=False)
class Recovered:
    """What a course was: figures of its steps, the weights that are ternary now, where it began to resume."""

    figures: list[Figures]
    steps: int
    resumed_at: int
    ternary: dict[str, Ternary]

    @property
    def is_complete(self) -> bool:
        """Whether its budget was enough for all steps."""
        return len(self.figures) == self.steps


def recover(
    course: Recovery,
    src: str | os.PathLike[str],
    dst: Path,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    from_state: Path | None = None,
    keep_state: Path | None = None,
    overwrite: bool = False,
    on_start: Callable[[Recovery, int], None] = lambda course, taken: None,
    on_step: Callable[[int, Figures], None] = lambda number, figures: None,
) -> Recovered:
    """Train for so many steps, or as many as fit into `seconds`, and write the result, its log and a picture.

    A run that was stopped leaves its state beside `dst`; called again with the same settings it goes on.
    Seconds count training alone, and what went before is taken off. `from_state` is what an earlier course
    left in `keep_state`: latent weights and moments.

    Raises NeuzipError, before anything is trained if `dst` exists or `keep_state` cannot be a folder.
    """
    require_room(src, dst, overwrite, keep_state, from_state)
    undo_half_publish(dst)
    if from_state is not None and not _goes_on(dst, overwrite):
        course.load_state(from_state, resume=False)  # before there is a workspace, which would stay
    with workspace(dst, find_checkpoint(src).root) as work:
        state, log = work / STATE_FOLDER, work / LOG
        taken = 0
        if (state / STATE_FILE).is_file() and not overwrite:
            taken = course.load_state(state)
            if steps is not None and steps != course.steps:
                raise UsageError(
                    f"{work}: was begun for {course.steps} steps",
                    "give as many, or `overwrite=True` to begin anew",
                )
        else:
            clear(work, overwrite)
            course.steps = steps if steps is not None else course.fit(_required(seconds))
        on_start(course, taken)
        figures = run(
            course.step, steps=course.steps, schedule=course.schedule(), log=log, start=taken,
            every=max(1, course.steps // CHECKPOINTS), checkpoint=lambda n: course.save_state(state, n),
            progress=on_step,
            budget_seconds=None if steps is not None else _required(seconds) - _spent(log, taken),
            device=course.device,
        )  # fmt: skip
        if keep_state is not None:
            course.save_state(keep_state, len(figures))
        with storing(work):
            ternary = course.write(src, work)
            picture_of_losses(thinned(figures, DRAWN), work / PICTURE)
            write_file(work / SETTINGS, (json.dumps(asdict(course.settings), indent=2) + "\n").encode())
            if state.exists():
                remove(state)
        publish(work, dst)
    return Recovered(figures, course.steps, taken, ternary)


def thinned(figures: list[Figures], count: int) -> list[Figures]:
    """Every so many of them, `count` or fewer, the last one among them."""
    every = max(1, -(-len(figures) // count))
    return figures[::-1][::every][::-1]


def require_room(
    src: str | os.PathLike[str],
    dst: Path,
    overwrite: bool,
    keep_state: Path | None = None,
    from_state: Path | None = None,
) -> None:
    """Raise NeuzipError where a result or the state to keep cannot be written, or `from_state` holds none."""
    require_free(src, dst, overwrite)
    if keep_state is not None:
        refuse_nesting(dst, keep_state)
        there = next(path for path in (keep_state, *keep_state.absolute().parents) if path.exists())
        if not there.is_dir():
            raise NeuzipError(
                f"{keep_state}: cannot hold a state, as {there} is a file", "choose the name of a folder"
            )
    if from_state is not None and not _goes_on(dst, overwrite) and not (from_state / STATE_FILE).is_file():
        raise _no_state(from_state / STATE_FILE)


def _goes_on(dst: Path, overwrite: bool) -> bool:
    """Whether a run that was stopped has left its state beside `dst`."""
    return not overwrite and (partial_name(dst) / STATE_FOLDER / STATE_FILE).is_file()


def _no_state(path: Path) -> FormatError:
    return FormatError(
        path.parent,
        f"holds no state of a recovery, {path.name}",
        hint="give the folder that `keep_state` named",
    )


def fingerprint(model: nn.Module) -> str:
    """What tells weights apart by names, shapes and values, in whatever dtype they hold them exactly."""
    digest = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        total = int(checksum(parameter.detach().float()))
        digest.update(f"{name} {tuple(parameter.shape)} {total}".encode())
    return digest.hexdigest()


def _required(seconds: float | None) -> float:
    if seconds is None:
        raise UsageError("how long is it to be trained?", "give a number of steps, or a budget of time")
    return seconds


def _spent(log: Path, taken: int) -> float:
    """Seconds that the first steps took."""
    if not taken or not log.is_file():
        return 0.0
    return sum(figures["seconds"] for figures in read_log(log) if figures["step"] <= taken)


def _seen(windows: TrainingWindows, device: torch.device) -> Tensor:
    """The first windows of a text, for a conversion."""
    return windows.first(min(SEEN_WINDOW, windows.length), SEEN_TOKENS).to(device)
