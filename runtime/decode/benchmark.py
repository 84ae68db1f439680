"""How fast a checkpoint runs, and in how much memory, for each residency beside the dense one.

Models are loaded one after the other. A batch is a number of made-up prompts of one length: the time to read
them is the prefill, the median time of the steps after it the decode. All residencies go through the same
`GreedyDecoder`; their tokens are compared with those of the dense model.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from neuzip.choices import KvForm
from neuzip.errors import NeuzipError, UsageError
from neuzip.runtime import buffers
from neuzip.runtime.activations import Activations
from neuzip.runtime.decode.greedy import SINGLE_EXPERTS, GreedyDecoder, NotGraphable, not_compiled_together
from neuzip.runtime.hf.attention import uses
from neuzip.runtime.hf.attention_choice import AttentionChoice, choose
from neuzip.runtime.hf.attention_config import LAYERS_ENTRY
from neuzip.runtime.hf.config import load_config
from neuzip.runtime.hf.decoder import positions
from neuzip.runtime.hf.experts import has_single_experts
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.messages import versions
from neuzip.runtime.hf.ternary_layers import activations_in_use
from neuzip.runtime.kv_bits import BitsArgument, Layers, single
from neuzip.runtime.requirements import require_expert_memory
from neuzip.runtime.residencies import RESIDENCIES
from neuzip.runtime.residency import memory, require_expert_places, require_places

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = "dense"
"""The residency that the others are measured against: what transformers would do."""

PROMPT_TOKENS = 512

OnRun = Callable[[int], None]


@dataclass(frozen=True)
class DecodeRun:
    """Prompts read and continued: seconds of the prefill and of each step, tokens [batch, new] on the CPU."""

    prefill_seconds: float
    step_seconds: tuple[float, ...]
    tokens: torch.Tensor


@dataclass(frozen=True)
class Speed:
    """Medians of one residency, cache and batch; tokens a second are those of all texts of a batch together.

    `weight_bytes` is what the parameters take of the device, and `host_bytes` what experts take of pinned
    host memory beside that. `peak_bytes` is the most that loading and the run took, of the GPUs' memory, or
    of the process on a CPU, None where the system does not tell. Ratios are to the dense model.
    `differing_tokens` of `tokens` are not its tokens; texts part after `same_tokens` at the earliest. Keys
    and values of each layer are kept in `kv_layers`, None as they are, which is `kv_bits` if all have the
    same, and take `cache_bytes`; `attention` says how they are read. Layers attend in `attention_bits`, None
    as they would; of the calls `attention_calls` says how many were done in which way. `activations` is how
    inputs of ternary layers are quantised, None if not. Steps, not prompts, were `compiled` by torch.compile,
    those of the dense model as well. `decode_spread` is how far apart the medians of single runs are, as a
    share.
    """

    residency: str
    batch: int
    graphed: bool
    load_seconds: float
    weight_bytes: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    peak_bytes: int | None
    tokens: int
    differing_tokens: int = 0
    same_tokens: int | None = None
    prefill_ratio: float = 1.0
    decode_ratio: float = 1.0
    peak_ratio: float | None = 1.0
    kv_bits: int | None = None
    kv_layers: Layers | None = None
    cache_bytes: int = 0
    attention: str | None = None
    attention_bits: tuple[int | None, ...] | None = None
    attention_calls: Mapping[str, int] = field(default_factory=dict)
    activations: Activations | None = None
    compiled: bool = False
    decode_spread: float = 0.0
    host_bytes: int = 0


@dataclass(frozen=True)
class BenchmarkPlan:
    """What `measure` does, on a GPU or the CPU. `kv_bits` come beside keys and values as they are.

    So does `attention` other than "none", as in `attention_choice.choose`, beside that of the model.
    """

    path: Path
    residencies: tuple[str, ...]
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    rounds: int
    device: torch.device
    graph: bool
    kv_bits: BitsArgument | None = None
    attention: AttentionChoice = "none"
    compiled: bool = False
    expert_memory: int | None = None
    """Bytes of experts on a GPU, see `load_model`; for the residencies that heed it."""
    kv_form: KvForm = "rotated"

    @property
    def attentions(self) -> tuple[AttentionChoice, ...]:
        """How layers attend, one after the other; "none" is as the model does."""
        return ("none",) if self.attention == "none" else ("none", self.attention)

    @property
    def caches(self) -> tuple[BitsArgument | None, ...]:
        """In how many bits keys and values are kept, one after the other; None is as they are."""
        return (None,) if self.kv_bits is None else (None, self.kv_bits)

    @property
    def runs(self) -> int:
        """How often `measure` calls `on_run`."""
        return (
            len(self.residencies) * len(self.attentions) * len(self.caches) * len(self.batches) * self.rounds
        )


@dataclass(frozen=True)
class Speeds:
    """The rows, dense first, and what they ran on."""

    rows: tuple[Speed, ...]
    dtype: str
    device: str
    versions: dict[str, str]


def make_plan(
    path: str | os.PathLike[str],
    residencies: Sequence[str],
    *,
    batches: Sequence[int] = (1, 8, 32),
    prompt_tokens: int | None = None,
    new_tokens: int = 128,
    rounds: int = 3,
    device: torch.device,
    graph: bool = True,
    kv_bits: BitsArgument | None = None,
    kv_form: KvForm = "rotated",
    attention: AttentionChoice = "recorded",
    compiled: bool = False,
    expert_memory: int | None = None,
) -> BenchmarkPlan:
    """What is to be measured of a checkpoint folder, the dense model always and first.

    `prompt_tokens` None are 512, or as many as the model has positions for. With `kv_bits` each residency,
    the dense one too, is also measured with keys and values in as many, in the form `kv_form`, and with
    attention in few bits if that is asked for, or "recorded" and the folder has a record. All steps are
    `compiled`, or none. Raises UsageError for more tokens, for residencies that cannot be on the device, for
    `kv_bits` if `compiled`, and for `expert_memory` that no residency heeds there.
    """
    if compiled and kv_bits is not None:
        raise not_compiled_together()
    if attention == "recorded" and LAYERS_ENTRY.read(path) is None:
        attention = "none"
    for residency in residencies:
        require_places(residency, [device])
    require_expert_memory(expert_memory, *residencies)
    require_expert_places(expert_memory, [device])
    limit = positions(load_config(path))
    if new_tokens < 2:
        raise UsageError("`new_tokens`: at least 2 are needed, as the first one is the prefill's")
    if limit is not None and (prompt_tokens or 1) + new_tokens > limit:
        excess = f"`new_tokens={new_tokens}`" + (
            f" behind `prompt_tokens={prompt_tokens}`" if prompt_tokens else ""
        )
        raise UsageError(f"{excess}: the model was made for {limit} tokens", "choose fewer")
    if prompt_tokens is None:
        prompt_tokens = PROMPT_TOKENS if limit is None else min(PROMPT_TOKENS, limit - new_tokens)
    return BenchmarkPlan(
        Path(path),
        tuple(dict.fromkeys((BASE, *residencies))),
        tuple(dict.fromkeys(batches)),
        prompt_tokens,
        new_tokens,
        rounds,
        device,
        graph,
        kv_bits,
        attention,
        compiled,
        expert_memory,
        kv_form,
    )


def measure(plan: BenchmarkPlan, *, on_run: OnRun = lambda count: None) -> Speeds:
    """Load each residency and run all batches. `on_run` is told of runs done. Raises NeuzipError."""
    base: dict[int, tuple[Speed, torch.Tensor]] = {}
    rows: list[Speed] = []
    for residency in plan.residencies:
        free_memory()
        reset_peak(plan.device)
        began = time.perf_counter()
        experts = plan.expert_memory if RESIDENCIES[residency].offloads_experts else None
        model = load_model(
            plan.path, device=plan.device, residency=residency, expert_memory=experts, attention=False
        )
        synchronize(plan.device)
        load_seconds, load_peak = time.perf_counter() - began, peak_bytes(plan.device)
        _require_graphs(plan, model)
        dtype = str(model.dtype).removeprefix("torch.")
        for attention, kv_bits, batch in itertools.product(plan.attentions, plan.caches, plan.batches):
            bits = choose(model, attention)
            row, tokens = _measure_batch(plan, model, residency, batch, kv_bits, on_run)
            if bits is not None:
                row = replace(row, attention_bits=bits, attention_calls=uses(model))
            peaks = [load_peak, row.peak_bytes]
            row = replace(
                row, load_seconds=load_seconds, peak_bytes=max((p for p in peaks if p), default=None)
            )
            base.setdefault(batch, (row, tokens))
            rows.append(_compared(row, tokens, *base[batch]))
        del model
    free_memory()
    return Speeds(tuple(rows), dtype, device_name(plan.device), versions())


def _require_graphs(plan: BenchmarkPlan, model: PreTrainedModel) -> None:
    """Raise NeuzipError, before anything is measured, if steps are wanted as graphs that cannot be such."""
    if not plan.graph or plan.device.type != "cuda":
        return
    if any(has_single_experts(model, residency) for residency in plan.residencies):
        raise NotGraphable(model, SINGLE_EXPERTS)


def run(
    decoder: GreedyDecoder, ids: torch.Tensor, new_tokens: int, continuation: torch.Tensor | None = None
) -> DecodeRun:
    """Read prompts, int64 [batch, tokens], and add `new_tokens` to each, the first of them by the prefill.

    With a `continuation`, int64 [batch, new_tokens], texts go on with its tokens in place of those that were
    chosen: so all models read the same texts. The tokens of the result are those that were chosen.
    """
    device = decoder.device
    ids = ids.to(device)
    columns = None if continuation is None else continuation.to(device).T.contiguous()
    synchronize(device)
    began = time.perf_counter()
    tokens = [decoder.prefill(ids).clone()]
    synchronize(device)
    prefill_seconds = time.perf_counter() - began
    clock = _EventClock(device) if device.type == "cuda" else _HostClock()
    for number in range(new_tokens - 1):
        if columns is not None:
            decoder.take(columns[number])
        token = decoder.step()
        clock.tick()
        tokens.append(token.clone())
    return DecodeRun(prefill_seconds, clock.seconds(), torch.stack(tokens, dim=1).cpu())


class _HostClock:
    """Seconds between ticks, by the host's clock."""

    def __init__(self) -> None:
        self._ticks = [time.perf_counter()]

    def tick(self) -> None:
        self._ticks.append(time.perf_counter())

    def seconds(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self._ticks, self._ticks[1:], strict=False))


class _EventClock:
    """Seconds between ticks of a GPU, which the host does not wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self.tick()

    def tick(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def seconds(self) -> tuple[float, ...]:
        torch.cuda.synchronize(self._device)
        pairs = zip(self._events, self._events[1:], strict=False)
        return tuple(a.elapsed_time(b) / 1e3 for a, b in pairs)


def prompts(vocabulary: int, batch: int, tokens: int) -> torch.Tensor:
    """Made-up prompts, int64 [batch, tokens]: the same each time, and no two alike."""
    return torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(batch))


def _measure_batch(
    plan: BenchmarkPlan,
    model: PreTrainedModel,
    residency: str,
    batch: int,
    kv_bits: BitsArgument | None,
    on_run: OnRun,
) -> tuple[Speed, torch.Tensor]:
    free_memory()
    reset_peak(plan.device)
    ids = prompts(model.config.get_text_config().vocab_size, batch, plan.prompt_tokens)
    try:
        decoder = GreedyDecoder(
            model, batch, plan.prompt_tokens + plan.new_tokens,
            graph=plan.graph, kv_bits=kv_bits, kv_form=plan.kv_form, compiled=plan.compiled,
        )  # fmt: skip
        run(decoder, ids, 2)  # kernels for this length of the prompt are compiled and chosen
        runs = []
        for _ in range(plan.rounds):
            runs.append(run(decoder, ids, plan.new_tokens))
            on_run(1)
    except torch.cuda.OutOfMemoryError as error:
        raise NeuzipError(
            f"{plan.path}, {residency}: the memory of the GPU does not suffice for `batch={batch}`",
            "choose a smaller one, fewer `prompt_tokens`, or `residency='packed'`",
        ) from error
    weights = memory(model).total
    steps = [seconds for one in runs for seconds in one.step_seconds]
    medians = [statistics.median(one.step_seconds) for one in runs]
    return (
        Speed(
            residency,
            batch,
            decoder.graphed,
            load_seconds=0.0,
            weight_bytes=weights.stored_bytes,
            prefill_tokens_per_second=ids.numel() / statistics.median(one.prefill_seconds for one in runs),
            decode_tokens_per_second=batch / statistics.median(steps),
            peak_bytes=peak_bytes(plan.device),
            tokens=runs[-1].tokens.numel(),
            kv_bits=single(decoder.kv_layers),
            kv_layers=decoder.kv_layers,
            cache_bytes=decoder.cache_bytes,
            attention=decoder.attention,
            activations=activations_in_use(model),
            compiled=decoder.compiled,
            decode_spread=(max(medians) - min(medians)) / statistics.median(steps),
            host_bytes=weights.host_bytes,
        ),
        runs[-1].tokens,
    )


def _compared(row: Speed, tokens: torch.Tensor, base: Speed, expected: torch.Tensor) -> Speed:
    differing = tokens != expected
    places = differing.any(dim=0).nonzero()
    both = row.peak_bytes is not None and base.peak_bytes is not None
    return replace(
        row,
        differing_tokens=int(differing.sum()),
        same_tokens=int(places[0]) if len(places) else None,
        prefill_ratio=row.prefill_tokens_per_second / base.prefill_tokens_per_second,
        decode_ratio=row.decode_tokens_per_second / base.decode_tokens_per_second,
        peak_ratio=(row.peak_bytes or 0) / (base.peak_bytes or 1) if both else None,
    )


# Memory


def free_memory() -> None:
    """Let go of models that nobody names any more, of buffers, and of memory that torch keeps for later."""
    gc.collect()
    buffers.release()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Begin to measure `peak_bytes` anew: of all GPUs, or of this process, where the system lets it."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)
    elif (switch := Path("/proc/self/clear_refs")).exists():
        try:
            switch.write_text("5")
        except OSError:  # a container may forbid it: the peak is then that of the process's life
            return


def peak_bytes(device: torch.device) -> int | None:
    """The most that torch's tensors took of the GPUs, or this process of the memory; None if not told."""
    if device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count()))
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return None if kilobytes is None else 1024 * int(kilobytes)


def device_name(device: torch.device) -> str:
    """The name of a GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
