"""Tasks of EleutherAI's lm-evaluation-harness, with models as neuzip loads them.

`NeuzipLM` is its backend `neuzip`: the harness's own Hugging Face backend with a checkpoint loaded by neuzip,
plain or compressed, and log-likelihoods without logits: the head is multiplied with the hidden states of
the tokens that are asked for, and their log-probabilities are fp32 whatever the weights are. Figures may so
differ from those of the backend `hf` in the last digits.

Releases of the harness after 0.4.13 find the backend by themselves. For others there is

    python -P -m neuzip.eval.harness run --model neuzip --model_args pretrained=my-model.nz --tasks arc_easy

which is the harness's own command line, with all that follows `neuzip.eval.harness` as it wants it.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.measures.estimates import mean as mean_of_blocks
from neuzip.eval.measures.head import HeadedModel, statistics
from neuzip.eval.report.rows import ReportRow
from neuzip.eval.report.text import figure_text
from neuzip.formats.hub.download import resolve_source
from neuzip.runtime.devices import choose_device
from neuzip.runtime.hf.attention_choice import choose
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.messages import quiet_transformers
from neuzip.runtime.hf.tokenizer import load_tokenizer

try:
    from lm_eval import evaluator
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils_hf import get_dtype
    from lm_eval.tasks import TaskManager
except ModuleNotFoundError as error:
    raise NeuzipError(
        f"tasks need lm-evaluation-harness: the package {error.name} is not installed",
        "pip install 'lm-eval[hf]>=0.4.13'",
    ) from error

BATCH_TOKENS = 16384
"""Tokens fed at once if the batch size is `auto`: without logits, memory is proportional to them."""

BATCH_LINES = 8
"""Prompts continued at once if the batch size is `auto`."""

REFUSED = (
    "autogptq", "delta", "gguf_file", "gptqmodel", "mixed_precision_dtype", "peft", "softmax_dtype",
    "subfolder", "tp_plan", "trust_remote_code",
)  # fmt: skip
"""Options of the backend `hf` that neuzip does not support."""

Request = tuple[tuple[str, str] | None, list[int], list[int]]
OnRequests = Callable[[int], None]


@register_model("neuzip")
class NeuzipLM(HFLM):  # type: ignore[misc]  # the harness is not typed
    """A checkpoint that neuzip loads, plain or compressed, as a backend of lm-evaluation-harness.

    `pretrained` is a folder or a Hub id; `residency` is how weights are kept in memory: dense, packed or ans;
    `expert_memory` is what experts may take of a GPU in bytes, None for no limit. `device` None is a
    GPU if there is any; `device_map`, or `parallelize` for "auto", spreads the model over several;
    `batch_size` auto feeds about 16,384 tokens at once. The other options are those of the backend `hf`.
    `on_requests` is told of requests answered; with it there are no bars of the harness. Raises NeuzipError,
    and UsageError for options that do not apply.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        residency: str = "dense",
        expert_memory: int | None = None,
        device: str | None = None,
        device_map: str | None = None,
        revision: str | None = None,
        on_requests: OnRequests | None = None,
        **options: Any,
    ) -> None:
        wrong = sorted(name for name in REFUSED if options.get(name))
        if wrong:
            raise UsageError(
                f"the lm-eval model neuzip: {', '.join(wrong)} cannot be given",
                "leave it out, or use the model hf",
            )
        if options.setdefault("backend", "causal") not in ("causal", "default"):
            raise UsageError(
                f"the lm-eval model neuzip: backend={options['backend']}: only causal models are supported"
            )
        self._folder = resolve_source(f"{pretrained}@{revision}" if revision else pretrained)
        self._residency, self._on_requests = residency, on_requests
        self._expert_memory = expert_memory
        self._device_map = device_map or ("auto" if options.get("parallelize") else None)
        options["parallelize"] = self._device_map is not None
        self._by_tokens = str(options.get("batch_size", 1)).startswith("auto")
        if self._by_tokens:  # the harness would try out how many rows of logits there is room for
            options["batch_size"] = BATCH_LINES
        place = str(choose_device("auto")) if device in (None, "auto") else device
        super().__init__(pretrained=os.fspath(self._folder), device=place, **options)

    def _get_config(self, pretrained: str, **options: Any) -> None:
        self._config = load_config(self._folder)

    def _create_tokenizer(self, pretrained: str, tokenizer: Any, **options: Any) -> None:
        if tokenizer is None and options.get("add_bos_token") is None and options.get("use_fast_tokenizer"):
            self.tokenizer = load_tokenizer(self._folder)
        else:
            super()._create_tokenizer(os.fspath(self._folder), tokenizer, **options)

    def _create_model(self, pretrained: str, dtype: Any = "auto", **options: Any) -> None:
        kind = get_dtype(dtype)
        self._model = load_model(
            self._folder,
            None if kind == "auto" else kind,
            self._device_map or self.device,
            residency=self._residency,
            expert_memory=self._expert_memory,
            attention=False,
        )
        choose(self._model, "recorded", policy="always")  # it is its effect that is asked for
        self._headed = HeadedModel(self._model)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, in nats, and whether each is the greedy one."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm or self._has_no_bars)
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in nats."""
        scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm or self._has_no_bars)
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that continue the prompts of requests."""
        texts: list[str] = super().generate_until(requests, disable_tqdm or self._has_no_bars)
        if self._on_requests is not None:
            self._on_requests(len(requests))
        return texts

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> Any:
        """Generate like the backend `hf`. A generation config may also name strings that end a text."""
        if self._model.generation_config.stop_strings:
            options.setdefault("tokenizer", self.tokenizer)
        return super()._model_generate(context, max_length, stop, **options)

    @property
    def _has_no_bars(self) -> bool:
        return self._on_requests is not None

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each request's continuation, in nats, and whether it is the greedy one.

        Requests that feed the same tokens share a pass. Raises NeuzipError for figures that are not finite.
        """
        sharing: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise NeuzipError(
                    f"a task asks for {len(continuation)} tokens after {len(context)}; the model has room "
                    f"for {self.max_length}"
                )
            fed = tuple((context + continuation)[-(self.max_length + 1) : -1])
            sharing.setdefault(fed, []).append(number)
        answers: list[tuple[float, bool]] = [(math.nan, False)] * len(requests)
        sequences = sorted(sharing, key=lambda fed: (-len(fed), fed))
        for batch in self._batches(sequences, override_bs):
            places = [(line, number) for line, fed in enumerate(batch) for number in sharing[fed]]
            scores = self._score(batch, [(line, requests[number][2]) for line, number in places])
            for (_, number), answer in zip(places, scores, strict=True):
                answers[number] = answer
                key = requests[number][0]
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, answer)
            if self._on_requests is not None:
                self._on_requests(len(places))
        return answers

    def _batches(
        self, sequences: Sequence[tuple[int, ...]], override: int | None
    ) -> Iterator[Sequence[tuple[int, ...]]]:
        """Sequences, the longest first, in batches."""
        start = 0
        while start < len(sequences):
            size: int = override or self.batch_size
            if self._by_tokens:
                size = max(1, BATCH_TOKENS // len(sequences[start]))
            yield sequences[start : start + size]
            start += size

    @torch.inference_mode()
    def _score(
        self, batch: Sequence[tuple[int, ...]], continuations: Sequence[tuple[int, list[int]]]
    ) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, each of the last tokens after a line of the batch."""
        width = len(batch[0])
        ids = torch.zeros(len(batch), width, dtype=torch.int64)  # to the right of a line nothing is looked at
        for line, fed in enumerate(batch):
            ids[line, : len(fed)] = torch.tensor(fed)
        rows = [
            torch.arange(len(batch[line]) - len(tokens), len(batch[line])) + line * width
            for line, tokens in continuations
        ]
        targets = torch.tensor([token for _, tokens in continuations for token in tokens])
        token_statistics = statistics(
            self._headed.predictions(ids, torch.cat(rows).to(self._headed.device)), targets
        )
        gains = (token_statistics.target_logit - token_statistics.lse).double().cpu()
        greedy = token_statistics.argmax.cpu() == targets
        lengths = [len(tokens) for _, tokens in continuations]
        answers = []
        for part, right in zip(torch.split(gains, lengths), torch.split(greedy, lengths), strict=True):
            total = float(part.sum())
            if not math.isfinite(total):
                raise NeuzipError(
                    f"{self._folder}: the log-likelihood of a request is {total}",
                    "the weights may be broken, or the dtype may be too narrow for them: try float32",
                )
            answers.append((total, bool(right.all())))
        return answers


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task, `before` for the original if it was evaluated.

    `difference` is after - before, paired over documents, for metrics that are means over them; `changed` is
    how many documents have another value. `shots` and `documents` are examples in the prompt and prompts.
    """

    task: str
    metric: str
    filter: str
    version: str
    shots: int | None
    documents: int | None
    higher_is_better: bool | None
    after: Estimate
    before: Estimate | None = None
    difference: Estimate | None = None
    changed: int | None = None


@dataclass(frozen=True)
class TaskEvaluation:
    """Scores in the order of the harness, and the version of it."""

    scores: tuple[TaskScore, ...]
    harness: str


def evaluate_tasks(
    checkpoints: Sequence[str | os.PathLike[str]],
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int | str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    dtype: str = "auto",
    residency: str = "dense",
    expert_memory: int | None = None,
    on_requests: OnRequests = lambda count: None,
) -> TaskEvaluation:
    """Run tasks with one checkpoint, or with the original and what was made of it, in this order.

    `tasks` are names or patterns that the harness knows, or YAML files of tasks; `limit` bounds the documents
    of each. `dtype` auto is float32 for dense weights on a CPU, else the checkpoint's own.
    `residency` and `expert_memory` are those of `load_model`. Raises UsageError for tasks that there are not
    and NeuzipError for those whose data cannot be had.
    """
    place = choose_device(device) if device in ("auto", "cpu", "cuda") else torch.device(device)
    if dtype == "auto" and residency == "dense" and place.type == "cpu" and device_map is None:
        dtype = "float32"
    manager = _manager(tasks)
    results = []
    with redirect_stdout(sys.stderr), quiet_transformers(), _without_git():  # stdout is for the result
        _load(manager, tasks)  # before any weights are
        for path in checkpoints:
            model = NeuzipLM(
                os.fspath(path), residency=residency, device=str(place), device_map=device_map, dtype=dtype,
                batch_size=batch_size, expert_memory=expert_memory, on_requests=on_requests,
            )  # fmt: skip
            result = evaluator.simple_evaluate(
                model, tasks=_load(manager, tasks), task_manager=manager, limit=limit
            )
            results.append(result)
            del model  # before the next one is loaded
    before = results[0] if len(results) > 1 else None
    return TaskEvaluation(tuple(_scores(results[-1], before)), str(results[-1].get("lm_eval_version", "")))


@contextmanager
def _without_git() -> Iterator[None]:
    """Context in which the harness does not run git, which complains if the current folder has no commit."""
    get_commit = evaluator.get_git_commit_hash
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = get_commit


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _manager(tasks: Sequence[str]) -> Any:
    """The harness's manager of tasks. Raises UsageError for an unknown task."""
    manager = TaskManager(include_defaults=not all(map(_is_file, tasks)))
    for task in tasks:
        if _is_file(task) and not Path(task).is_file():
            raise UsageError(f"`tasks={task!r}`: there is no such file")
        if not _is_file(task) and not manager.match_tasks([task]):
            close = difflib.get_close_matches(task, manager.all_tasks, 3)
            raise UsageError(
                f"`tasks={task!r}`: lm-evaluation-harness has no such task",
                f"did you mean {' or '.join(close)}?" if close else "`lm-eval ls tasks` lists them",
            )
    return manager


def _load(manager: Any, tasks: Sequence[str]) -> list[Any]:
    """The tasks and groups of tasks with their data. Raises NeuzipError where these cannot be had."""
    loaded = []
    for task in tasks:
        for name in [str(Path(task).absolute())] if _is_file(task) else manager.match_tasks([task]):
            try:
                loaded_tasks = manager.load([name])
            except Exception as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise NeuzipError(
                    f"`tasks={task!r}`: cannot be loaded: {lines[0].rstrip('.')}",
                    "the data of most tasks come from the Hugging Face Hub, once; then HF_HUB_OFFLINE=1 does",
                ) from error
            inner = {child for children in loaded_tasks.get("group_map", {}).values() for child in children}
            groups = [group for key, group in loaded_tasks.get("groups", {}).items() if key not in inner]
            loaded += groups or list(loaded_tasks["tasks"].values())
    return loaded


def _scores(after: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[TaskScore]:
    """The figures of results of the harness, each with its counterpart."""
    for task, values in after["results"].items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or isinstance(value, str):
                continue
            of = task, metric, filtered
            score = TaskScore(
                *of,
                version=str(after.get("versions", {}).get(task, "")),
                shots=after.get("n-shot", {}).get(task),
                documents=after.get("n-samples", {}).get(task, {}).get("effective"),
                higher_is_better=after.get("higher_is_better", {}).get(task, {}).get(metric),
                after=_figure(after, *of),
            )
            if before is not None:
                score = replace(score, before=_figure(before, *of))
                mine, theirs = _per_document(after, *of), _per_document(before, *of)
                if mine and theirs and mine.keys() == theirs.keys():
                    changed = sum(mine[document] != theirs[document] for document in mine)
                    score = replace(score, difference=_paired(mine, theirs), changed=changed)
            yield score


def _figure(results: Mapping[str, Any], task: str, metric: str, filtered: str) -> Estimate:
    values = results["results"][task]
    error = values.get(f"{metric}_stderr,{filtered}")
    known = isinstance(error, int | float) and math.isfinite(error)
    return Estimate(float(values[f"{metric},{filtered}"]), float(error) if known else None)


def _per_document(
    results: Mapping[str, Any], task: str, metric: str, filtered: str
) -> dict[int, float] | None:
    """A metric of each document, if the task's is their mean."""
    samples = [s for s in results.get("samples", {}).get(task, ()) if s["filter"] == filtered]
    by_document = {s["doc_id"]: s.get(metric) for s in samples}
    if len(by_document) != len(samples) or not by_document:
        return None
    if not all(isinstance(x, bool | int | float) for x in by_document.values()):
        return None
    numbers = {document: float(x) for document, x in by_document.items()}
    mean = math.fsum(numbers.values()) / len(numbers)
    value = float(results["results"][task][f"{metric},{filtered}"])
    return numbers if math.isclose(mean, value, rel_tol=1e-9, abs_tol=1e-12) else None


def _paired(after: Mapping[int, float], before: Mapping[int, float]) -> Estimate:
    """The mean of the differences and its standard error over documents."""
    changes = [after[document] - before[document] for document in after]
    return mean_of_blocks(changes, [1] * len(changes))


def report_rows(evaluation: TaskEvaluation) -> tuple[ReportRow, ...]:
    """The scores as rows of a report."""
    return tuple(ReportRow(name_text(s), s.after, s.before, note_text(s)) for s in evaluation.scores)


def name_text(score: TaskScore) -> str:
    """Task and metric, with the filter that was used if it was any."""
    arrow = {True: " ↑", False: " ↓", None: ""}[score.higher_is_better]
    filtered = "" if score.filter == "none" else f", {score.filter}"
    return f"{score.task}: {score.metric}{filtered}{arrow}"


def note_text(score: TaskScore) -> str:
    """The notes to print beside a score, and its distance from the original's."""
    parts = []
    if score.difference is not None:
        change = f"change {figure_text(score.difference)}, paired"
        parts.append("the same for every document" if score.changed == 0 else change)
    if score.changed:
        parts.append(f"{score.changed:,} of {score.documents:,} documents differ")
    elif score.documents is not None:
        parts.append(f"{score.documents:,} documents")
    if score.shots is not None:
        parts.append(f"{score.shots}-shot")
    if score.version:
        parts.append(f"version {score.version}")
    return "; ".join(parts)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
