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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from neuzip.compress.storing import storing
from neuzip.errors import FormatError, NeuzipError, UsageError, shell
from neuzip.kernels.quantizers import Ternary
from neuzip.runtime.activations import ACTIVATIONS_ENTRY, Activations
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.load import load_model
from neuzip.train.loop import Figures, Schedule
from neuzip.train.plain import write_plain
from neuzip.train.recovery.distill import head_loss, hidden_loss
from neuzip.train.recovery.latent import (
    dense_layer,
    head_weight,
    make_latent,
    require_plain_head,
    ternary_layers,
)
from neuzip.train.recovery.settings import RecoverySettings
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
"""Most tokens of the training text that a conversion reads."""

SEEN_WINDOW = 512

TRIAL_STEPS, TRIAL_SECONDS = 4, 10.0
"""Least number and seconds of trial steps that measure the time of a step; the first does not count."""

USED = 0.97
"""Share of a budget that is planned for: checkpoints take time, and steps are not all alike."""


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
        """A recovery of a checkpoint that is ternary, or is converted now, on the device of `base`.

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
        """The share of quantisation in a step, lambda, which rises linearly to 1."""
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
        """Tokens of which some are replaced by random ones, as a function of seed and step.

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
        """The facts that must be equal for a course to resume."""
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
            raise no_state(path) from error
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


def no_state(path: Path) -> FormatError:
    return FormatError(
        path.parent,
        f"holds no state of a recovery, {path.name}",
        hint="give the folder that `keep_state` named",
    )


def fingerprint(model: nn.Module) -> str:
    """A fingerprint of names, shapes and values of weights, equal in any dtype that holds them exactly."""
    digest = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        total = int(checksum(parameter.detach().float()))
        digest.update(f"{name} {tuple(parameter.shape)} {total}".encode())
    return digest.hexdigest()


def _seen(windows: TrainingWindows, device: torch.device) -> Tensor:
    """The first windows of a text, for a conversion."""
    return windows.first(min(SEEN_WINDOW, windows.length), SEEN_TOKENS).to(device)
