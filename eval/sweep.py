"""Many schemes on one checkpoint: size, quality, memory and speed, as Table 3 of NeuZip (arXiv 2410.20650).

Each scheme is compressed for real, loaded, and compared with the original on a text. Its figures are one JSON
file, written at once: a sweep that was interrupted goes on with what is missing.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neuzip.compress import compress
from neuzip.compress.device import CPU, Device
from neuzip.compress.sources.folder import FolderSource, weight_bytes
from neuzip.compress.workers import Workers
from neuzip.compress.workspace import remove, write_file, writing
from neuzip.errors import FormatError, NeuzipError, WouldOverwrite
from neuzip.eval.figure_files import EXPONENT, FAINT, INK, MUTED, OTHERS, png, svg
from neuzip.eval.measures import fingerprint
from neuzip.eval.measures.comparison import BaselineComparison, NotFinite, Stage, read_tokens
from neuzip.eval.measures.divergence import Comparison, KLDivergence
from neuzip.eval.measures.estimates import Estimate, exponential
from neuzip.eval.measures.histograms import visible
from neuzip.eval.measures.texts import Text
from neuzip.eval.plans.allocation import Option, pareto_front
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.formats.safetensors_file import parse_json
from neuzip.kernels.float_fields import FORMATS
from neuzip.runtime.decode.benchmark import device_name, synchronize
from neuzip.runtime.devices import choose_device
from neuzip.runtime.hf.messages import versions
from neuzip.runtime.read import read_tensors

from .sweep_setup import SweepScheme, work_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCHEMA = 1
PICTURES = ("sweep.svg", "sweep.png")

IN_WORDS = {"rule": "rule for windows", "tokens": "number of tokens"}
"""Words for conditions of a row whose names are not clear."""


# What is measured


@dataclass(frozen=True)
class SweepSetting:
    """The checkpoint and text of a sweep, and how it is measured."""

    src: Path
    text: Text
    window: int | None = None
    max_tokens: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    residency: str = "dense"
    coder: Device = CPU
    jobs: int | None = None


@dataclass(frozen=True)
class SweepRow:
    """The results of one scheme: the content of its JSON file.

    `bytes`, `original_bytes` and `ratio` are of the weight files. `perplexity` is token-level, `comparison`
    the paired one with the original. `memory_bytes` is what the parameters take in memory; `peak_bytes`,
    `load_seconds` and `tokens_per_second` are those of `baseline.Run`, without a peak on a CPU, where one
    process has one for all schemes. `decode_bytes_per_second` counts the
    bytes of decoded weights, one tensor after the other, the faster of two times. `depends_on` is what the
    figures would change with.
    """

    scheme: str
    bytes: int
    original_bytes: int
    ratio: float
    weights: int
    bits_per_weight: float
    largest_relative_error: float
    perplexity: Estimate
    comparison: Comparison
    dtype: str
    memory_bytes: int
    peak_bytes: int | None
    load_seconds: float
    decode_bytes_per_second: float
    tokens_per_second: float
    depends_on: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The row as plain values: those of the comparison stand beside the sizes."""
        values = asdict(self)
        return {"schema": SCHEMA, **values.pop("comparison"), **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SweepRow:
        """The inverse of `to_json`. Raises KeyError or TypeError for values that are no row."""
        compared = {f.name: values[f.name] for f in fields(Comparison)}
        for name in ("base_nll", "other_nll", "nll_difference", "perplexity_ratio", "top_1", "top_k"):
            compared[name] = Estimate(**compared[name])
        compared["kld"] = KLDivergence(**{**compared["kld"], "mean": Estimate(**compared["kld"]["mean"])})
        own = {f.name: values[f.name] for f in fields(cls) if f.name != "comparison"}
        own["perplexity"] = Estimate(**own["perplexity"])
        return cls(**own, comparison=Comparison(**compared))


@dataclass(frozen=True)
class Failure:
    """A scheme that leaves a model whose predictions are not finite: the content of its `.failed` file."""

    scheme: str
    reason: str
    depends_on: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The failure as plain values."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Failure:
        """The inverse of `to_json`. Raises KeyError or TypeError for values that are none."""
        return cls(**{f.name: values[f.name] for f in fields(cls)})


@dataclass(frozen=True)
class Sweep:
    """The rows in the order of the request, and the schemes that `failed`.

    `resumed` schemes were there already. `front` names those to which none is smaller and at least as close
    to the original.
    """

    text: str
    rule: str
    device: str
    rows: tuple[SweepRow, ...]
    resumed: int
    failed: tuple[Failure, ...] = ()

    @property
    def front(self) -> tuple[str, ...]:
        points = [Option(row.bytes, row.comparison.kld.mean.value) for row in self.rows]
        return tuple(self.rows[i].scheme for i in pareto_front(points))


def sweep(
    setting: SweepSetting,
    schemes: Sequence[SweepScheme],
    out: Path | None,
    stage: Stage,
    *,
    overwrite: bool = False,
) -> Sweep:
    """Measure all schemes, or those that are not in the folder `out` yet, and draw them there.

    A scheme that breaks the model is noted, and the sweep goes on. Raises NeuzipError, also if every scheme
    does, and WouldOverwrite if `out` holds results of something else.
    """
    with _temporary_folder() if out is None else work_folder(out) as work:
        schemes = _distinct(setting.src, schemes)
        device = choose_device(setting.device)
        depends_on = _depends_on(setting, device_name(device))
        known = {} if out is None else _known(out, [s.label for s in schemes], depends_on, overwrite)
        by_label = dict(known)
        missing = [scheme for scheme in schemes if scheme.label not in by_label]
        baseline = _baseline(setting) if missing else None
        for scheme in missing:
            assert baseline is not None
            result: SweepRow | Failure
            try:
                result = _measured(setting, scheme, baseline, work, stage, depends_on)
            except NotFinite as failure:
                result = Failure(scheme.label, failure.message, depends_on)
                remove(work / scheme.label)
            by_label[scheme.label] = result
            if out is not None:
                _keep(out, result)
        results = [by_label[scheme.label] for scheme in schemes]
        outcome = Sweep(
            setting.text.name,
            depends_on["rule"],
            depends_on["device"],
            tuple(result for result in results if isinstance(result, SweepRow)),
            len(known),
            tuple(result for result in results if isinstance(result, Failure)),
        )
        if not outcome.rows:
            raise NeuzipError(
                f"every scheme breaks the model: {outcome.failed[0].scheme}: {outcome.failed[0].reason}",
                "try more mantissa bits, or `dtype='float32'`",
            )
        if out is not None:
            _keep_pictures(out, outcome, setting.src.resolve().name)
    return outcome


def _distinct(src: Path, schemes: Sequence[SweepScheme]) -> list[SweepScheme]:
    """Each scheme once: one that keeps all mantissa bits is lossless, and has no use for blocks."""
    with FolderSource(src) as source:
        formats = [FORMATS[t.info.dtype] for t in source.tensors() if t.info.dtype in FORMATS]
    most = max((fmt.mantissa_bits for fmt in formats), default=0)
    return list(
        dict.fromkeys(
            SweepScheme(s.mantissa_bits) if s.mantissa_bits is not None and s.mantissa_bits >= most else s
            for s in schemes
        )
    )


def _depends_on(setting: SweepSetting, device: str) -> dict[str, Any]:
    checkpoint = find_checkpoint(setting.src)
    reading = read_tokens(setting.src, setting.text, setting.window, setting.max_tokens)
    return {
        "checkpoint": fingerprint.of_checkpoint(checkpoint),
        "text": fingerprint.of_text(setting.text.content),
        "rule": reading.convention.rule,
        "tokens": reading.convention.tokens,
        "dtype": setting.dtype,
        "residency": setting.residency,
        "device": device,
        "versions": {"neuzip": version("neuzip-toolkit"), **versions()},
    }


# The folder of results


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="neuzip-sweep-") as folder:
        yield Path(folder)


def _known(
    out: Path, labels: Sequence[str], depends_on: Mapping[str, Any], overwrite: bool
) -> dict[str, SweepRow | Failure]:
    """The results in a folder for these schemes.

    Raises WouldOverwrite if it holds results of something else, or pictures and no results. With
    `overwrite` there is nothing known, and such results are removed: they would stand beside ours.
    """
    known: dict[str, SweepRow | Failure] = {}
    for path in sorted(p for p in out.iterdir() if p.suffix in (".json", ".failed")):
        try:
            result = _read(path)
        except FormatError:
            if path.stem in labels and not overwrite:
                raise
            continue  # a file that has nothing to do with sweeps, and stays as it is
        others = [IN_WORDS.get(n, n) for n in fingerprint.differing(result.depends_on, depends_on)]
        if others and overwrite:
            with writing(path):
                remove(path)
        elif others:
            raise WouldOverwrite(
                f"{path}: was measured with another {' and another '.join(others)}",
                "choose another `output`, or give `overwrite=True`",
            )
        known[result.scheme] = result
    if not known and not overwrite:
        for name in PICTURES:
            if os.path.lexists(out / name):
                raise WouldOverwrite(
                    f"{out / name}: exists already, and no results of a sweep beside it",
                    "choose another `output`, or give `overwrite=True`",
                )
    return {} if overwrite else {label: known[label] for label in labels if label in known}


def _read(path: Path) -> SweepRow | Failure:
    """The result of a scheme in one file. Raises FormatError if it is none."""
    try:
        values = parse_json(path.read_bytes(), path)
        result = (Failure if path.suffix == ".failed" else SweepRow).from_json(values)
        if result.scheme == path.stem and isinstance(result.depends_on, dict):
            return result
    except (FormatError, KeyError, TypeError, AttributeError, OSError) as error:
        raise FormatError(path, "is no result of neuzip sweep", hint="choose another `output`") from error
    raise FormatError(path, f"is no result of neuzip sweep for {path.stem}", hint="choose another `output`")


def _keep(out: Path, result: SweepRow | Failure) -> None:
    """Write what came of a scheme, in place of what was there."""
    names = [f"{result.scheme}.json", f"{result.scheme}.failed"]
    name, stale = names if isinstance(result, SweepRow) else reversed(names)
    with writing(out / name):
        text = json.dumps(result.to_json(), indent=2, allow_nan=False)
        write_file(out / name, f"{text}\n".encode())
        (out / stale).unlink(missing_ok=True)


def _keep_pictures(out: Path, results: Sweep, title: str) -> None:
    figure = draw(results, title)
    for name, data in zip(PICTURES, (svg(figure), png(figure)), strict=True):
        with writing(out / name):
            write_file(out / name, data)


# One scheme


def _baseline(setting: SweepSetting) -> BaselineComparison:
    return BaselineComparison(
        setting.src, setting.text, window=setting.window, max_tokens=setting.max_tokens,
        device=setting.device, dtype=setting.dtype, residency=setting.residency,
    )  # fmt: skip


def _measured(
    setting: SweepSetting,
    scheme: SweepScheme,
    baseline: BaselineComparison,
    work: Path,
    stage: Stage,
    depends_on: dict[str, Any],
) -> SweepRow:
    dst = work / scheme.label
    with stage(f"{scheme.label}: compress", weight_bytes(setting.src), "bytes") as advance:
        report = compress(
            setting.src, dst, scheme.rules, jobs=setting.jobs, device=setting.coder, on_bytes=advance
        )
    with stage(f"{scheme.label}: evaluate", baseline.tokens, "tokens") as advance:
        run = baseline.run(dst, advance)
    speed = _decode_speed(dst, baseline.device, setting.jobs)
    remove(dst)
    losses = [t.loss.max_relative for t in report.tensors if t.loss is not None]
    return SweepRow(
        scheme=scheme.label,
        bytes=report.stored_weight_bytes,
        original_bytes=report.weight_bytes,
        ratio=report.ratio,
        weights=report.weights,
        bits_per_weight=report.bits_per_weight,
        largest_relative_error=max(losses, default=0.0),
        perplexity=exponential(run.comparison.other_nll),
        comparison=run.comparison,
        dtype=run.dtype,
        memory_bytes=run.weight_bytes,
        peak_bytes=None if baseline.device.type == "cpu" else run.peak_bytes,
        load_seconds=run.load_seconds,
        decode_bytes_per_second=speed,
        tokens_per_second=run.tokens_per_second,
        depends_on=depends_on,
    )


def _decode_speed(path: Path, device: torch.device, jobs: int | None) -> float:
    """Bytes of weights that are decoded a second, read and decoded one tensor after the other."""
    times = []
    with FolderSource(path) as source, Workers(jobs) as workers:
        tensors = list(source.tensors())
        for _ in range(2):
            synchronize(device)
            began = time.perf_counter()
            for tensor in tensors:
                read_tensors(source, [tensor], device, workers, verify=False)
            synchronize(device)
            times.append(time.perf_counter() - began)
    return sum(t.info.nbytes for t in tensors) / min(times)


# The picture

SERIES = (EXPONENT, OTHERS, "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Colours of block sizes, the first without blocks; people with any colour vision tell them apart."""


def draw(results: Sweep, title: str) -> Figure:
    """Size against divergence and against perplexity, with the schemes that no other beats joined."""
    from matplotlib import style

    with style.context("default"):  # not as a matplotlibrc on this machine may have it
        return _draw(results, title)


def _draw(results: Sweep, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), facecolor="white")
    tokens = results.rows[0].comparison.tokens
    figure.text(0.04, 0.94, visible(title), color=INK, size=15, weight="bold", va="center", parse_math=False)
    subtitle = f"{visible(results.text)}: {tokens:,} tokens, {results.rule}"
    figure.text(0.04, 0.885, subtitle, color=MUTED, size=10, va="center", parse_math=False)
    panels = (
        (0.075, "KL divergence from the original, nats per token", _divergences),
        (0.565, "Perplexity, token-level", _perplexities),
    )
    for left, name, panel in panels:
        axes = figure.add_axes((left, 0.13, 0.40, 0.64))
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(length=0, colors=MUTED, labelsize=9)
        axes.grid(color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_title(name, loc="left", size=10.5, color=INK, pad=10)
        axes.set_xlabel("stored bits per weight", size=9, color=MUTED)
        panel(axes, results)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper right", bbox_to_anchor=(0.98, 0.975), ncols=len(labels), frameon=False,
        fontsize=9, labelcolor=INK, handletextpad=0.2, columnspacing=1.2,
    )  # fmt: skip
    return figure


def _divergences(axes: Axes, results: Sweep) -> None:
    """On a logarithmic scale; a divergence of 0, of what is lossless, stands at its foot."""
    values = {row.scheme: row.comparison.kld.mean.value for row in results.rows}
    positive = [v for v in values.values() if v > 0]
    foot = 10.0 ** math.floor(math.log10(min(positive, default=1e-6)) - 0.5)
    axes.set_yscale("log")
    axes.minorticks_off()
    _points(axes, results, {name: max(v, foot) for name, v in values.items()})
    if len(positive) < len(values):
        ticks = [t for t in axes.get_yticks() if foot * 2 < t <= 2 * max(positive, default=1.0)]
        axes.set_yticks([foot, *ticks], ["0", *(f"{t:g}" for t in ticks)])
    axes.set_ylim(foot / 2, 3 * max(positive, default=1.0))


def _perplexities(axes: Axes, results: Sweep) -> None:
    original = exponential(results.rows[0].comparison.base_nll).value
    _points(axes, results, {row.scheme: row.perplexity.value for row in results.rows})
    axes.axhline(original, color=INK, linewidth=0.9, dashes=(4, 3), zorder=1)
    axes.annotate(
        f"original: {original:.2f}", (0, original), (4, 4), ("axes fraction", "data"), "offset points",
        size=8.5, color=INK,
    )  # fmt: skip
    highest = max(row.perplexity.value for row in results.rows)
    if highest > 3 * original:
        axes.set_yscale("log")


def _points(axes: Axes, results: Sweep, heights: dict[str, float]) -> None:
    """The schemes by size, a colour for each block size, and a line along those that no other beats."""
    bits = {row.scheme: row.bits_per_weight for row in results.rows}
    names = list(bits)
    front = [names[i] for i in pareto_front([Option(bits[name], heights[name]) for name in names])]
    axes.plot(
        [bits[name] for name in front], [heights[name] for name in front],
        color=MUTED, linewidth=1.1, zorder=2,
    )  # fmt: skip
    blocks = sorted({_block_of(name) for name in bits})
    for number, block in enumerate(blocks):
        points = [(bits[name], heights[name]) for name in bits if _block_of(name) == block]
        axes.scatter(
            [x for x, _ in points], [y for _, y in points],
            s=34, color=SERIES[number % len(SERIES)], linewidths=0, zorder=3,
            label=f"blocks of {block}" if block else "without blocks",
        )  # fmt: skip
    named: dict[str, str] = {}
    for name in sorted(bits, key=lambda name: (bits[name], not name.startswith("l"))):
        named.setdefault(name.partition("b")[0] if name.startswith("k") else name, name)
    taken: set[tuple[float, float]] = set()
    for label, name in named.items():  # one name for all blocks: their colours tell them apart
        if (bits[name], heights[name]) in taken:
            continue
        taken.add((bits[name], heights[name]))
        axes.annotate(
            label, (bits[name], heights[name]), (0, 7), textcoords="offset points", ha="center",
            size=8.5, color=INK, zorder=4, parse_math=False,
        )  # fmt: skip
    axes.margins(x=0.07)


def _block_of(label: str) -> int:
    return int(label.partition("b")[2] or 0) if label.startswith("k") else 0
