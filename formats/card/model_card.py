"""The page that describes a compressed checkpoint on the Hub, written from its manifests.

A card is new metadata, a summary of what compression did, and below it the original's own page if it has one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from neuzip.formats.card.evaluation import CardEvaluation
from neuzip.formats.card.text import Facts, Metadata, Part, Rounded, Use, card_text
from neuzip.formats.checkpoint import ORIGINAL_FOLDER, Checkpoint, base_name
from neuzip.formats.container import Container
from neuzip.formats.records import Loss

CARD = "README.md"

KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets", "base_model")
"""What of the original's metadata holds for the compressed checkpoint. Evaluation results need not."""

_METADATA = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_BASE_ID = re.compile(rf"({_REPO_ID.pattern})(?:@[\w./-]+)?", re.ASCII)


def model_card(
    checkpoint: Checkpoint,
    original: str,
    repo_id: str,
    source: str,
    evaluation: CardEvaluation | None = None,
) -> str:
    """The card of a compressed folder, restored from `source`. `original` is the original's, or empty."""
    metadata, text = split_card(original)
    base = base_name(checkpoint)
    base_model = metadata.get("base_model") or _repository(base or "") or _base_model(checkpoint)
    stored: dict[tuple[str, str], _Stored] = {}
    original_bytes = stored_bytes = 0
    for file in checkpoint.weights:
        with Container(checkpoint.root / file, delta=base is not None) as container:
            stored |= {(file, tensor.name): tensor for tensor in _tensors(file, container)}
            original_bytes += len(container.original.raw) + container.original.data_bytes
            stored_bytes += container.path.stat().st_size
    rounded = []
    for tensor in stored.values():
        holder = stored.get(tensor.holder) if tensor.holder is not None else tensor
        if holder is not None and holder.loss is not None:
            rounded.append(Rounded(tensor.name, tensor.scheme, holder.kind, holder.loss))
    weights = sum(tensor.weights for tensor in stored.values())
    return card_text(
        Facts(
            metadata=_new_metadata(metadata, base_model, lossless=not rounded, delta=base is not None),
            repo_id=repo_id,
            source=source,
            base=base,
            base_is_on_hub=is_on_hub(base),
            base_models=_listed(base_model),
            files=len(checkpoint.weights),
            total=Part("", "", len(stored), weights, original_bytes, stored_bytes),
            parts=_parts(stored.values()),
            rounded=rounded,
            evaluation=evaluation,
            original=text.strip("\r\n"),
            use=_use(checkpoint),
        )
    )


def split_card(card: str) -> tuple[Metadata, str]:
    """A card's metadata, as far as it is strings and lists of strings, and its text.

    Metadata that is not YAML counts as none.

    >>> split_card("---\\nlicense: mit\\nlanguage: [no, en]\\n---\\n# Model\\n")
    ({'license': 'mit', 'language': ['no', 'en']}, '# Model\\n')
    """
    import yaml  # type: ignore[import-untyped]

    match = _METADATA.match(card)
    if match is None:
        return {}, card
    try:
        # The loader that leaves every scalar a string: to the other one the language `no` is a boolean.
        loaded = yaml.load(match[1], Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):
        return {}, card[match.end() :]
    metadata: Metadata = {}
    for key, value in loaded.items() if isinstance(loaded, dict) else ():
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not strings:
            continue
        # Longer than the card are only the references of YAML, which make much of little.
        if all(isinstance(s, str) and s for s in strings) and sum(map(len, strings)) <= len(card):
            metadata[key] = value
    return metadata, card[match.end() :]


def is_on_hub(base: str | None) -> bool:
    """Whether the name of a delta's base has the form of a Hub id, with a revision or without."""
    return base is not None and _repository(base) is not None


def _repository(base: str) -> str | None:
    """The repository that the name of a base is of, if it has the form of a Hub id."""
    match = _BASE_ID.fullmatch(base)
    return None if match is None else match[1]


def _new_metadata(
    original: Metadata, base_model: str | list[str] | None, lossless: bool, delta: bool
) -> Metadata:
    metadata: Metadata = {key: original[key] for key in KEPT if key in original}
    if base_model:
        metadata["base_model"] = base_model
    metadata["library_name"] = "neuzip"
    # A delta is nothing that the library of the original loads.
    tags = ["neuzip", "lossless" if lossless else "lossy"]
    tags += ["delta"] if delta else _listed(original.get("library_name"))
    metadata["tags"] = list(dict.fromkeys([*tags, *_listed(original.get("tags"))]))
    return metadata


def _use(checkpoint: Checkpoint) -> Use:
    """What loads a checkpoint, from its config files."""
    if "model_index.json" in checkpoint.others:
        return "pipeline"
    if "config.json" not in checkpoint.others:
        return "other"
    try:
        config = json.loads((checkpoint.root / "config.json").read_bytes())
        classes = config["architectures"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "other"
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    generates = any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names)
    # Serving engines take no text model with an encoder, such as T5 and BART.
    if not generates or config.get("is_encoder_decoder") is True:
        return "other"
    section = config.get("quantization_config")
    is_quantized = isinstance(section, dict) and section.get("original") is not None
    return "quantized language model" if is_quantized else "language model"


def _base_model(checkpoint: Checkpoint) -> str | None:
    """The Hub id in `_name_or_path` of the original's config.json, if there is one."""
    for file in (f"{ORIGINAL_FOLDER}/config.json", "config.json"):
        if file in checkpoint.others:
            try:
                name = json.loads((checkpoint.root / file).read_bytes())["_name_or_path"]
            except (ValueError, KeyError, TypeError, RecursionError):
                return None
            return name if isinstance(name, str) and _REPO_ID.fullmatch(name) else None
    return None


@dataclass(frozen=True)
class _Stored:
    """A tensor; `holder` is the file and name of the one with its bytes, if that is another.

    `scheme` is for people, `kind` the scheme of its record.
    """

    name: str
    dtype: str
    scheme: str
    kind: str
    weights: int
    original_bytes: int
    stored_bytes: int
    loss: Loss | None
    holder: tuple[str, str] | None


def _tensors(file: str, container: Container) -> Iterator[_Stored]:
    for info in container.original.in_file_order:
        record = container.manifest.tensors[info.name]
        holder = None
        if record.holder is not None:
            other, name = record.holder
            folder = file[: file.rfind("/") + 1]
            holder = (file if other is None else folder + other, name)
        yield _Stored(
            info.name, info.dtype, record.card_text, record.scheme, info.numel, info.nbytes,
            container.stored_bytes(info.name), record.loss, holder,
        )  # fmt: skip


def _parts(stored: Iterable[_Stored]) -> list[Part]:
    groups: dict[tuple[str, str], list[_Stored]] = {}
    for tensor in stored:
        groups.setdefault((tensor.dtype, tensor.scheme), []).append(tensor)
    return [
        Part(
            *kind, len(group), sum(t.weights for t in group), sum(t.original_bytes for t in group),
            sum(t.stored_bytes for t in group),
        )
        for kind, group in sorted(groups.items())
    ]  # fmt: skip


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []
