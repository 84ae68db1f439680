"""The words of a model card, which `model_card` fills with facts.

Written line by line, without a template engine: `push` is one of the commands that work on files alone.
What others wrote, such as names and reports, is quoted by the functions at the end.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from neuzip.distribution import ENGINES, install_sentence
from neuzip.errors import shell
from neuzip.formats.card.evaluation import CardEvaluation
from neuzip.formats.records import Loss

ENDING = "<!-- neuzip wrote this page as far as this line -->"

Metadata = dict[str, str | list[str]]

Use = Literal["language model", "quantized language model", "pipeline", "other"]
"""What a checkpoint is loaded as.

Language models are for transformers and serving engines; vLLM serves none whose weights were quantized before
neuzip compressed them. Pipelines are for diffusers, and all others for transformers.
"""


@dataclass(frozen=True)
class Part:
    """Tensors that are stored alike, or all weight files: sizes in bytes."""

    dtype: str
    scheme: str
    tensors: int
    weights: int
    original_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class Rounded:
    """A tensor that lost something, and how much. `kind` is the scheme of its record."""

    name: str
    scheme: str
    kind: str
    loss: Loss


@dataclass(frozen=True)
class Facts:
    """What a card tells. `base` is the name of a delta's base, None for what needs none.

    `source` is the name of the repository, with a revision or without.
    `use` says what loads the checkpoint. `original` is the original's own page.
    """

    metadata: Metadata
    repo_id: str
    source: str
    base: str | None
    base_is_on_hub: bool
    base_models: Sequence[str]
    files: int
    total: Part
    parts: Sequence[Part]
    rounded: Sequence[Rounded]
    evaluation: CardEvaluation | None
    original: str
    use: Use = "other"

    def count(self, kind: str) -> int:
        """How many tensors lost something in a scheme."""
        return sum(one.kind == kind for one in self.rounded)


def card_text(facts: Facts) -> str:
    """The whole page."""
    lines = ["---", *(f"{key}: {_yaml(value)}" for key, value in facts.metadata.items()), "---"]
    lines += ["", f"# {facts.repo_id.split('/')[1]}", "", *_opening(facts)]
    if facts.base_models:
        lines += ["", f"Base model: {', '.join(map(_code, facts.base_models))}"]
    lines += ["", *_sizes(facts)]
    if facts.rounded:
        lines += ["", *_errors(facts.rounded)]
    if facts.evaluation is not None:
        lines += ["", *_measured(facts.evaluation)]
    lines += ["", *(_use(facts) if facts.base is None else _use_of_delta(facts)), ""]
    lines += [
        "To download the files of this repository unchanged, run "
        f"`neuzip pull {shell(facts.source)} DST`.",
        "",
        "## Installing neuzip",
        "",
        "The command comes with the Python package neuzip-toolkit. "
        f"{install_sentence()} (The package that PyPI",
        "calls neuzip is an unrelated one.)",
        ENDING,
    ]  # fmt: skip
    if facts.original:
        lines += ["", "---", "", facts.original]
    return "\n".join(lines) + "\n"


def _opening(facts: Facts) -> list[str]:
    """What this repository is, and whether anything was lost."""
    if facts.base is not None:
        lines = [
            f"This repository is a delta. Together with its base, {_code(facts.base)}, it restores another "
            "checkpoint, file by file and byte by",
            "byte. You need the base to use it.",
        ]
        if not facts.base_is_on_hub:
            lines.append(
                "The name of the base is not a Hub id. Ask the author of the delta where to find the base."
            )
        return lines
    if not facts.rounded:
        return [
            "This checkpoint was compressed losslessly with neuzip. The restored checkpoint is identical to "
            "the original, file by file and",
            "byte by byte.",
        ]
    count, tensors = len(facts.rounded), facts.total.tensors
    ternary = facts.count("ternary")
    if quantized := facts.count("quantized"):
        of_which = "all" if quantized == count else f"{quantized}"
        return [
            f"This checkpoint was compressed with neuzip, with loss. neuzip rounded {count} of its {tensors} "
            "tensors,",
            f"{of_which} of them to whole multiples of a step, stored as entropy-coded integers. The errors "
            "are listed below.",
            *([_ternary_warning(ternary)] if ternary else []),
            "All other tensors and files are restored byte by byte.",
        ]
    if ternary:
        return [
            f"This checkpoint was compressed with neuzip, with loss. neuzip rounded {count} of its {tensors} "
            "tensors,",
            f"{ternary} of them to ternary weights (-1, 0 and 1 times a scale). The errors are listed "
            "below. Ternary weights ruin a model that",
            "was not trained for them. All other tensors and files are restored byte by byte.",
        ]
    return [
        "This checkpoint was compressed with neuzip, with loss. neuzip rounded the mantissas of "
        f"{count} of its {tensors}",
        "tensors. The errors are listed below. All other tensors and files are restored byte by byte.",
    ]  # fmt: skip


def _ternary_warning(count: int) -> str:
    """A line of a card where some tensors are ternary and others are quantized."""
    tensors = "tensor is" if count == 1 else "tensors are"
    return f"{count} {tensors} ternary (-1, 0 or 1 times a scale), which ruins a model not trained for it."


def _sizes(facts: Facts) -> list[str]:
    whole = "weight file" if facts.files == 1 else f"{facts.files} weight files"
    rows = [(whole, facts.total)]
    for part in facts.parts:
        plural = "" if part.tensors == 1 else "s"
        rows.append((f"{_cell(part.dtype)}, {part.scheme}: {part.tensors} tensor{plural}", part))
    return [
        "| | before | after | ratio | bits per weight |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {name} | {_size(part.original_bytes)} | {_size(part.stored_bytes)} | {_ratio(part)} "
            f"| {_bits(part)} |"
            for name, part in rows
        ),
    ]


def _errors(rounded: Sequence[Rounded]) -> list[str]:
    """The largest errors, and those of each tensor.

    Errors of single weights relative to them say nothing where small weights become 0: of quantized tensors
    the norm of the whole tensor's error is told.
    """
    relative = [one for one in rounded if one.kind != "quantized"]
    norms = [one.loss.relative_l2 for one in rounded if one.kind == "quantized"]
    lines = []
    if relative:
        most = max(one.loss.max_relative for one in relative)
        rms = max(one.loss.rms_relative for one in relative)
        lines += [
            f"The relative error of a rounded weight is at most {most:.3g}. The RMS relative error of a "
            "tensor is at",
            f"most {rms:.3g}. Both leave out weights that were zero.",
            "",
        ]
    if known := [norm for norm in norms if norm is not None]:
        lines += [
            f"Quantised tensors differ from the original by {100 * min(known):.1f} % to "
            f"{100 * max(known):.1f} % in the L2 norm.",
            "",
        ]
    has_norms = any(one.loss.relative_l2 is not None for one in rounded)
    return [
        *lines,
        "<details><summary>Every rounded tensor</summary>",
        "",
        "| tensor | scheme | largest relative error | RMS relative error |"
        + (" relative L2 error of the tensor |" if has_norms else ""),
        "|---|---|---:|---:|" + ("---:|" if has_norms else ""),
        *(
            f"| {_code(one.name)} | {one.scheme} | {_relative(one)} |"
            + (_norm(one.loss.relative_l2) if has_norms else "")
            for one in rounded
        ),
        "",
        "</details>",
    ]


def _relative(one: Rounded) -> str:
    """The cells of a tensor's errors relative to single weights, empty for a quantized tensor."""
    if one.kind == "quantized":
        return " | "
    return f"{one.loss.max_relative:.6g} | {one.loss.rms_relative:.6g}"


def _measured(evaluation: CardEvaluation) -> list[str]:
    setting = "; ".join(f"{_cell(name)}: {_cell(value)}" for name, value in evaluation.setting.items())
    used = ", ".join(f"{_cell(name)} {_cell(version)}" for name, version in evaluation.versions.items())
    lines = ["## Evaluation", "", f"{setting}.", f"With {used}."]
    if evaluation.identical:
        lines.append("The compressed model and the original have bit-identical losses.")
    compared = evaluation.base is not None and evaluation.base != ""
    lines += [
        "",
        f"| measure |{' original |' if compared else ''} this | how |",
        f"|---|{'---:|' if compared else ''}---:|---|",
    ]
    for row in evaluation.perplexity:
        before = f" {row.before} |" if compared else ""
        lines.append(f"| {_cell(row.name)} |{before} {row.after} | {_cell(row.how)} |")
    for row in evaluation.divergence:
        before = " |" if compared else ""
        lines.append(f"| {_cell(row.name)} |{before} {row.after} | {_cell(row.how)} |")
    over = f", for KL divergences over {_cell(evaluation.blocks)}" if evaluation.divergence else ""
    return [
        *lines,
        "",
        f"± is one standard error{over}. Each row follows its",
        "own convention, so compare only numbers of the same row. This command measured them:",
        "",
        f"    {shown_command(evaluation.command)}",
    ]


def _use_of_delta(facts: Facts) -> list[str]:
    base = shell(facts.base if facts.base_is_on_hub else "BASE")
    return [
        "## Restoring the checkpoint",
        "",
        "This command writes the original files to the new folder DST:",
        "",
        f"    neuzip apply {shell(facts.source)} DST --base {base}",
        "",
        "The base may be plain or compressed, and a folder or a Hub id. neuzip compares each tensor of the "
        "base with its checksum, and refuses",
        "another base. It checks every tensor and every file that it restores. Other libraries need the "
        "restored files. To check the delta",
        "without writing anything, run:",
        "",
        f"    neuzip verify {shell(facts.source)} --base {base}",
    ]


def _use(facts: Facts) -> list[str]:
    _, at, revision = facts.source.partition("@")
    which = "restored" if facts.rounded else "original"
    parameter = f', revision="{revision}"' if at else ""
    lines = _use_of_pipeline(facts.repo_id, parameter)
    libraries = "diffusers and transformers"
    if facts.use != "pipeline":
        lines = _use_of_model(facts.repo_id, parameter)
        libraries = "transformers"
    if facts.use in ("language model", "quantized language model"):
        names = ["vllm", "sglang"] if facts.use == "language model" else ["sglang"]
        lines += ["", *_serving(facts.repo_id, revision, names)]
        *others, last = "transformers", *(ENGINES[name].title for name in names)
        libraries = f"{', '.join(others)} and {last}"
    return [
        *lines,
        "",
        "## Restoring the files",
        "",
        f"This command writes the {which} files to the new folder DST, and checks every tensor and every "
        "file:",
        "",
        f"    neuzip decompress {shell(facts.source)} DST",
        "",
        f"Libraries other than {libraries} need the restored files. To check the checkpoint without writing "
        "anything, run:",
        "",
        f"    neuzip verify {shell(facts.source)}",
    ]


def _use_of_model(repo_id: str, parameter: str) -> list[str]:
    return [
        "## Loading the model",
        "",
        "    from transformers import AutoModelForCausalLM",
        "",
        f'    model = AutoModelForCausalLM.from_pretrained("{repo_id}"{parameter})',
        "",
        "Other classes of transformers work the same way. They decode the weights while they load the model. "
        "neuzip must be installed, but",
        "you need not import it. Without neuzip, transformers refuses to load the model.",
    ]


def _use_of_pipeline(repo_id: str, parameter: str) -> list[str]:
    versions = ENGINES["diffusers"].versions
    return [
        "## Loading the pipeline",
        "",
        "    from diffusers import DiffusionPipeline",
        "",
        f'    pipeline = DiffusionPipeline.from_pretrained("{repo_id}"{parameter})',
        "",
        f"diffusers ({versions}) decodes the weights while it loads the pipeline. neuzip must be installed, "
        "but",
        "you need not import it. Without neuzip, diffusers refuses to load the pipeline.",
    ]


def _serving(repo_id: str, revision: str, names: Sequence[str]) -> list[str]:
    """The commands of the engines that serve language models, of which `names` are shown."""
    option = ["--revision", revision] if revision else []
    commands = {
        "vllm": shell("vllm", "serve", repo_id, *option),
        "sglang": shell("python", "-m", "sglang.launch_server", "--model-path", repo_id, *option),
    }
    lines = ["## Serving the model", ""]
    for name in names:
        engine = ENGINES[name]
        lines += [f"With {engine.title} ({engine.versions}):", "", f"    {commands[name]}", ""]
    return [
        *lines,
        "Install neuzip in the environment of the engine. The engine then finds neuzip by itself. "
        "`neuzip doctor` checks that.",
    ]


def _yaml(value: object) -> str:
    """JSON, which YAML includes."""
    return json.dumps(value, ensure_ascii=False)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{count} bytes" if unit == "bytes" else f"{size:.2f} {unit}"


def _ratio(part: Part) -> str:
    return f"{100 * part.stored_bytes / part.original_bytes:.2f} %" if part.original_bytes else "-"


def _bits(part: Part) -> str:
    return f"{8 * part.stored_bytes / part.weights:.2f}" if part.weights else "-"


def _norm(relative_l2: float | None) -> str:
    """A cell with a tensor's relative error, empty where it has none."""
    return f" {relative_l2:.6g} |" if relative_l2 is not None else " |"


def _cell(text: str) -> str:
    """Text of a report on one line, where a table, HTML or code would be read into it."""
    return re.sub(r"([|<>`\\\[\]])", r"\\\1", _visible(re.sub(r"\s+", " ", text)))


def shown_command(text: str) -> str:
    """A command of a report as the one command that it is, whatever a shell would make of its words."""
    try:
        return _visible(shell(*shlex.split(text)))
    except ValueError:  # a quote that is not closed
        return _visible(shell(text))


def _code(name: str) -> str:
    """A tensor's name in a cell of a table: more backticks around it than in it."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", name)), default=0))
    space = " " if not name or name.strip("`") != name else ""
    return ticks + space + _visible(re.sub(r"\s", " ", name)).replace("|", "\\|") + space + ticks


def _visible(text: str) -> str:
    """Characters that cannot be seen, and halves of surrogate pairs, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
