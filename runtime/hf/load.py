"""A checkpoint, plain or compressed, as a live model, its weights dense or compressed in memory.

transformers builds the module, renames, merges and ties tensors, and computes what is not stored, as in every
`from_pretrained`. It is handed tensors that are decoded when it asks for their values, a few at a time: the
weights exist once, in the model. Those that are to stay compressed are so before it asks for the next.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers import __version__ as transformers_version
from transformers.utils import logging

from neuzip.compress.device import AnyDevice
from neuzip.compress.source import SourceTensor, TensorSource
from neuzip.compress.ternary import is_ternary
from neuzip.compress.workers import Workers
from neuzip.errors import FormatError, NeuzipError, UsageError, is_out_of_memory
from neuzip.formats.checkpoint import ORIGINAL_FOLDER, Checkpoint, find_checkpoint
from neuzip.formats.config_section import read_config
from neuzip.formats.hub.download import resolve_source
from neuzip.formats.hub.notes import log
from neuzip.formats.safetensors_file import parse_json
from neuzip.runtime.hf.attention import note as note_attention
from neuzip.runtime.hf.attention import recorded as recorded_attention
from neuzip.runtime.hf.attention import use_recorded
from neuzip.runtime.read import DEVICE_MAPS, place_of, read_tensor, read_tensors, read_ternary, torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from neuzip.runtime.hf.quantizer import NeuzipConfig

PREDICT_TEXT: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
"""The kinds of models that predict text, in transformers' terms; of the second the text alone is fed here."""

ADAPTER = "adapter_config.json"
"""What makes transformers add an adapter of peft to a model, if it lies beside it."""

CREDIBLE_LAYERS = 256
"""Layers that a config.json may claim, whatever tensors there are: what is missing is found out quickly."""

CREDIBLE_LAYERS_A_TENSOR = 4
"""Layers a tensor that a config.json may claim: some models share the weights of all their layers."""

_COUNTS_LAYERS = re.compile(r"(?:^|_)(?:layers?|blocks|depth)\Z")
"""Names of fields that count layers: num_hidden_layers, n_layer, depth and the like."""

GENERATION_CONFIG = "generation_config.json"
MOVE_AWAY = "correct the file, or move it away: a model can do without"

INDEX = "model.safetensors.index.json"
SHOWN_NAMES = 5
OTHER_VERSION = "another version of transformers may; code that comes with a checkpoint is never run"

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""A tokenizer of transformers has at least one of these."""

GROUP = 256 << 20
"""Bytes of tensors, decoded, that a GPU decodes at once while it compresses a model in memory."""


def load_model(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: AnyDevice | dict[str, Any] = "cpu",
    *,
    residency: str = "dense",
    activations: str | Mapping[str, Any] | None = None,
    attention: bool = True,
    verify: bool = True,
) -> PreTrainedModel:
    """Load the causal language model of a checkpoint, plain or compressed, in evaluation mode.

    `path` is a folder, or a Hub id `owner/name` or `owner/name@revision`, which is downloaded. `dtype` None
    keeps the dtype of the checkpoint, like `dtype="auto"` in transformers.

    `device` is "cpu", "cuda", "cuda:1", the number of a GPU, or a torch.device; None is "cpu". A GPU decodes
    the weights itself, so the host never holds all of them (with transformers 4.57, they pass through the
    host once). "auto", or another device map of transformers, spreads the weights over several devices, which
    needs accelerate.

    `residency` is the in-memory weight format: "dense" as in transformers, or compressed as "packed" or
    "ans". Compressed weights are never dense in memory as a whole. `activations` is how the inputs of ternary
    layers are quantised: "b1.58", "a4.8", "a4.8-fp4", "none", or {"mode": ..., "sites": {...}}. None follows
    config.json. If config.json says nothing, None means "b1.58" for weights that compression made ternary,
    and "none" for weights that were ternary before. With residency "dense", neuzip does not quantise
    activations. Ternary layers take 2 bits per weight. With the mode "none", neuzip treats a ternary layer
    like any other layer, and usually keeps it dense.

    If config.json records quantised attention, `attention` applies it and warns; False leaves attention
    unquantised. `verify` compares tensors with their checksums. neuzip never runs code from the folder.

    Raises FormatError for damaged files; UsageError for a device that does not exist, a residency that the
    device does not support, and unknown activations; NeuzipError for a checkpoint without a causal language
    model, and for tensors that are missing, left over or of the wrong shape.
    """
    if not isinstance(attention, bool):
        raise UsageError(
            f"`attention={attention!r}`: is neither True nor False", "False leaves attention unquantised"
        )
    folder = resolve_source(path, parameter="path", note=log)
    is_map = isinstance(device, dict) or device in DEVICE_MAPS
    if is_map and find_spec("accelerate") is None:
        raise NeuzipError(
            f"the device map {device!r} needs the package accelerate", "install it, or name one device"
        )
    place = None if is_map else place_of(device)
    options: dict[str, Any] = {"device_map": device} if is_map else {}
    if residency != "dense" or activations is not None:
        from neuzip.runtime.hf.quantizer import NeuzipConfig
        from neuzip.runtime.hf.residency import require_places

        asked = NeuzipConfig(residency, activations)
        if place is not None:
            require_places(residency, [place])
            asked.is_placed = True
        options["quantization_config"] = asked
    with TensorSource(folder) as source, quiet_transformers():
        config = load_config(source.checkpoint)
        layers = recorded_attention(source.checkpoint.root)
        if layers is not None:
            note_attention(config, layers)
        tensors = _model_tensors(source)
        if residency != "dense":
            prepare_ternary(asked, config, source, tensors)
        try:
            with stored_tensors(
                source, tensors, place, verify=verify, in_groups=residency != "dense"
            ) as stored:
                if residency != "dense":
                    prefer_single_experts(config)
                skeleton = skeleton_of(config)
                kind: Any = type(skeleton)  # whose answer has two parts here, which its types do not say
                model, found = kind.from_pretrained(
                    None,
                    config=skeleton.config,
                    state_dict=stored,
                    dtype="auto" if dtype is None else dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are reported below, by name
                    **options,
                )
                if (folder / GENERATION_CONFIG).is_file():
                    model.generation_config = _generation_config(folder)
        except NeuzipError:
            raise
        except Exception as error:
            hint = OTHER_VERSION
            if not any(type(config) in auto._model_mapping for auto in PREDICT_TEXT):
                hint = "models that do not predict text can be compressed and restored, but not run here"
            raise _refusal(folder, "make a model of it", error, hint) from error
        _require_a_perfect_fit(folder, model, found)
    model.config.name_or_path = os.fspath(path)
    if attention and layers is not None:
        use_recorded(model, layers)
    placed: PreTrainedModel = model if place is None else model.to(place)
    return placed


def prefer_single_experts(config: PreTrainedConfig) -> None:
    """Have a model's experts computed one by one, unless it was told how: so only those asked are decoded."""
    if getattr(config, "_experts_implementation", "unknown") is None:
        config._experts_implementation = "eager"


def skeleton_of(config: PreTrainedConfig) -> PreTrainedModel:
    """A model without values that predicts text, of a config; a vision-language model with all its parts."""
    known = [auto for auto in PREDICT_TEXT if type(config) in auto._model_mapping]
    auto = known[0] if known else PREDICT_TEXT[0]  # which says what it does not know
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, trust_remote_code=False)
    return model


def load_config(path: str | os.PathLike[str] | Checkpoint) -> PreTrainedConfig:
    """The configuration of a checkpoint folder, of a compressed one the original's.

    Raises NeuzipError, also where an adapter lies beside the model: nothing here would compute with it.
    """
    checkpoint = path if isinstance(path, Checkpoint) else find_checkpoint(path)
    folder = checkpoint.root
    if checkpoint.is_file:
        raise NeuzipError(
            f"{checkpoint.path}: has no config.json: a file of weights alone is no model",
            "give a folder with config.json and model.safetensors",
        )
    if ADAPTER in checkpoint.others:
        raise _refusal_of_an_adapter(checkpoint)
    if f"{ORIGINAL_FOLDER}/config.json" in checkpoint.others:
        folder = folder / ORIGINAL_FOLDER
    elif "config.json" not in checkpoint.others:
        raise NeuzipError(
            f"{checkpoint.path}: has no config.json, so it is not known which model the weights belong to",
            "give a folder with config.json and model.safetensors",
        )
    document = read_config(folder / "config.json")
    _require_tensors_for(document, folder / "config.json", checkpoint)
    with quiet_transformers():
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:
            raise _refusal(checkpoint.path, "read its config.json", error) from error
    return config


def _refusal_of_an_adapter(checkpoint: Checkpoint) -> NeuzipError:
    """Why a folder with a LoRA adapter is no model here, where from_pretrained would add the adapter."""
    path = checkpoint.root / ADAPTER
    base = read_config(path).get("base_model_name_or_path")
    named = f", of the base model {base!r}" if isinstance(base, str) else ""
    if "config.json" in checkpoint.others:
        return NeuzipError(
            f"{path}: a LoRA adapter lies beside the model{named}: from_pretrained of transformers adds it,"
            " neuzip would measure and run the model without it",
            "merge it into the weights (merge_and_unload of peft, then save_pretrained), or move"
            f" {ADAPTER} away to have the model without it",
        )
    return NeuzipError(
        f"{path}: the folder holds a LoRA adapter alone{named}: its weights are no model",
        "merge it into its base model (merge_and_unload of peft, then save_pretrained), and give that",
    )


def _require_tensors_for(document: dict[str, Any], path: Path, checkpoint: Checkpoint) -> None:
    """Raise FormatError for a config.json with far more layers than tensors: it takes hours to build them."""
    for name, layers in _layers_claimed(document):
        if layers <= CREDIBLE_LAYERS:
            continue
        with TensorSource(checkpoint) as source:
            tensors = sum(1 for _ in source.tensors())
        if layers > CREDIBLE_LAYERS_A_TENSOR * tensors:
            raise FormatError(
                path, f"says {layers:,} layers, but the weights are {tensors:,} tensors", field=name,
                hint="compare config.json with `neuzip inspect`",
            )  # fmt: skip


def _layers_claimed(document: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The fields that count layers, of the parts of a model too, and what they say."""
    for name, value in document.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", layers) for inner, layers in _layers_claimed(value))
        elif type(value) is int and _COUNTS_LAYERS.search(name):
            yield name, value


def _generation_config(folder: Path) -> GenerationConfig:
    """The generation_config.json of a folder. Raises FormatError where transformers does not take it."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise FormatError(
            folder / GENERATION_CONFIG, f"transformers does not take it: {reason_of(error)}", hint=MOVE_AWAY
        ) from error


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder, plain or compressed. Raises NeuzipError."""
    folder = Path(path)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):  # version 5.0 would make one up
        raise NeuzipError(
            f"{path}: there is no tokenizer ({', '.join(TOKENIZER_FILES[:3])}, ...)",
            "copy the tokenizer's files there, or call save_pretrained of the tokenizer",
        )
    if (folder / "config.json").is_file():
        read_config(folder / "config.json")  # which transformers would blame on the tokenizer
    with quiet_transformers():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False
            )
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            raise _refusal(folder, "load its tokenizer", error) from error
    longest: object = tokenizer.model_max_length
    if not isinstance(longest, int | float):  # which transformers finds out at the first text
        raise FormatError(folder, f"{longest!r} is no number of tokens", field="model_max_length")
    return tokenizer


@contextmanager
def naming_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Raise FormatError that names the file where a tokenizer fails at what it is given.

    tokenizers, a library in Rust, raises plain Exception for errors of its own, and a BaseException where it
    panics.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):
            raise
        folder = Path(tokenizer.name_or_path)
        path = folder / TOKENIZER_FILES[0]
        raise FormatError(
            path if path.is_file() else folder,
            f"the tokenizer fails: {reason_of(error)}",
            hint="give another text, or the tokenizer that the model was trained with",
        ) from error


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up, which is no Exception and has no class to import."""
    return type(error).__name__ == "PanicException"


def versions() -> dict[str, str]:
    """What a figure of a model must be told with."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers_version,
    }


def load_state_dict(path: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint by name, one at a time, with their own dtypes, on the CPU.

    A folder's subfolders are part of it. Raises NeuzipError for a name that is in two files, and FormatError
    for damaged files and for dtypes that torch does not have.
    """
    with TensorSource(path) as source, Workers() as workers:
        files: dict[str, str] = {}
        for tensor in source.tensors():
            if tensor.name in files:
                raise NeuzipError(
                    f"{path}: the tensor {tensor.name!r} is in {files[tensor.name]} and in {tensor.file}",
                    "give one of these files, or the subfolder",
                )
            files[tensor.name] = tensor.file
        for tensor in source.tensors():
            yield tensor.name, read_tensor(source, tensor, workers)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the warnings and bars of transformers off the terminal."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def stored_tensors(
    source: TensorSource,
    tensors: list[SourceTensor],
    place: torch.device | None,
    *,
    verify: bool = True,
    in_groups: bool = False,
) -> Iterator[dict[str, Any]]:
    """Tensors by name, for `state_dict` of `from_pretrained`: on a GPU decoded at once, else when asked for.

    A `place` of None is wherever transformers asks for them. `in_groups` is for models that are compressed in
    memory: tensors are decoded when asked for on GPUs too, with some of those that will be asked for next,
    and ternary matrices are a BitWeight. What is found damaged meanwhile is raised as FormatError in the end,
    whatever transformers makes of it.
    """
    failures: list[NeuzipError] = []
    with Workers() as workers:
        ternary: dict[str, SourceTensor] = {}
        if in_groups:
            from neuzip.runtime.bitlinear import BitWeight

            matrices = [t for t in tensors if BitWeight.can_be(t.info.shape)]
            ternary = {t.name: t for t in matrices if is_ternary(source.resolve(t))}
            tensors = [t for t in tensors if t.name not in ternary]
        if in_groups and (place is None or place.type == "cuda"):
            groups = _Groups(source, tensors, place, workers, failures, verify)
            stored: dict[str, Any] = {t.name: _Asked(source, t, partial(groups.take, t)) for t in tensors}
        elif place is not None and place.type == "cuda":
            read = read_tensors(source, tensors, place, workers, verify=verify)
            held = {t.name: [data] for t, data in zip(tensors, read, strict=True)}
            del read
            stored = {t.name: _Asked(source, t, partial(_hand_over, held[t.name])) for t in tensors}
        else:
            stored = {t.name: _Encoded(source, t, workers, failures, verify) for t in tensors}
        stored |= {
            name: _Ternary(source, tensor, place, failures, verify) for name, tensor in ternary.items()
        }
        try:
            yield stored
        except Exception as error:
            if failures:
                raise failures[0] from error
            raise
        if failures:
            raise failures[0]


class _Encoded:
    """A tensor of which transformers knows the kind, and that is decoded when it asks for the values.

    Version 5 does so with `tensor[...]`, as it does with the slices of safetensors, 4.57 with
    `tensor.to(device)`. What goes wrong then is noted in `failures`, as transformers would wrap it up.
    """

    def __init__(
        self,
        source: TensorSource,
        tensor: SourceTensor,
        workers: Workers,
        failures: list[NeuzipError],
        verify: bool,
    ) -> None:
        self._source, self._tensor, self._workers, self._failures = source, tensor, workers, failures
        self._verify = verify
        self.dtype = torch_dtype(source, tensor)
        self.shape = torch.Size(tensor.info.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(self, *target: Any, **options: Any) -> torch.Tensor:
        return self._read().to(*target, **options)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read()[index]

    def _read(self) -> torch.Tensor:
        try:
            return read_tensor(self._source, self._tensor, self._workers, verify=self._verify)
        except NeuzipError as failure:
            self._failures.append(failure)
            raise


class _Groups:
    """Tensors on the GPUs that ask for them, decoded a few at a time: those that will be wanted next, too.

    On `place`, if that is not None, whatever device is asked for: without accelerate transformers knows none.
    """

    def __init__(
        self,
        source: TensorSource,
        tensors: list[SourceTensor],
        place: torch.device | None,
        workers: Workers,
        failures: list[NeuzipError],
        verify: bool,
    ) -> None:
        from transformers.core_model_loading import dot_natural_key

        self._source, self._workers, self._failures = source, workers, failures
        self._place, self._verify = place, verify
        in_order = sorted(tensors, key=lambda t: dot_natural_key(t.name))
        self._waiting = {t.name: t for t in in_order}
        self._ready: dict[str, torch.Tensor] = {}

    def take(self, tensor: SourceTensor, device: torch.device) -> torch.Tensor:
        """A tensor on `device`, which is then the caller's alone. Raises FormatError."""
        device = device if self._place is None else self._place
        if tensor.name not in self._ready:
            group = [tensor, *self._next(tensor)] if device.type == "cuda" else [tensor]
            try:
                read = read_tensors(self._source, group, device, self._workers, verify=self._verify)
            except NeuzipError as failure:
                self._failures.append(failure)
                raise
            for t in group:
                self._waiting.pop(t.name, None)
            self._ready |= {t.name: data for t, data in zip(group, read, strict=True)}
        return self._ready.pop(tensor.name).to(device)

    def _next(self, tensor: SourceTensor) -> Iterator[SourceTensor]:
        """Tensors that wait behind one, as many as fit into a group with it."""
        room = GROUP - tensor.info.nbytes
        names = iter(self._waiting)
        if tensor.name in self._waiting:
            for name in names:
                if name == tensor.name:
                    break
        for name in names:
            room -= self._waiting[name].info.nbytes
            if room < 0:
                return
            yield self._waiting[name]


def _hand_over(held: list[torch.Tensor], _: torch.device) -> torch.Tensor:
    return held.pop()


class _Asked:
    """A tensor that transformers gets where it shall stay, when it asks for the values.

    Version 5 does so once, with `tensor[...].to(device=..., dtype=...)`, and takes what it is given. `take`
    gives it up, so that another dtype takes the place of the first.
    """

    def __init__(
        self, source: TensorSource, tensor: SourceTensor, take: Callable[[torch.device], torch.Tensor]
    ) -> None:
        self.dtype, self.shape = torch_dtype(source, tensor), torch.Size(tensor.info.shape)
        self._take = take

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(
        self, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None, **_: object
    ) -> torch.Tensor:
        return self._take(torch.device("cpu" if device is None else device)).to(dtype=dtype)

    def __getitem__(self, index: Any) -> Any:
        assert index is ...
        return self


class _Ternary:
    """A ternary matrix that transformers gets as a BitWeight, as `_Asked` gives others."""

    def __init__(
        self,
        source: TensorSource,
        tensor: SourceTensor,
        place: torch.device | None,
        failures: list[NeuzipError],
        verify: bool,
    ) -> None:
        self._source, self._tensor, self._place, self._failures = source, tensor, place, failures
        self._verify = verify
        self.dtype, self.shape = torch_dtype(source, tensor), torch.Size(tensor.info.shape)

    def is_floating_point(self) -> bool:
        return True

    def to(
        self, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None, **_: object
    ) -> torch.Tensor:
        from neuzip.kernels.ternary_linear import TernaryWeight
        from neuzip.runtime.bitlinear import BitWeight

        place = self._place or torch.device("cpu" if device is None else device)
        try:
            ternary = read_ternary(self._source, self._tensor, place, verify=self._verify)
        except NeuzipError as failure:
            self._failures.append(failure)
            raise
        return BitWeight.of(TernaryWeight.of(ternary), self.dtype if dtype is None else dtype)

    def __getitem__(self, index: Any) -> Any:
        assert index is ...
        return self


def prepare_ternary(
    asked: NeuzipConfig, config: PreTrainedConfig | None, source: TensorSource, tensors: list[SourceTensor]
) -> None:
    """Tell a quantizer's config what the checkpoint and its files say of activations. Raises FormatError.

    `config` gets what the config.json beside the weights says: the one it was made of may be the original's.
    """
    found = [t.record for t in map(source.resolve, tensors) if is_ternary(t)]
    made = any(record is not None and record.quantizer != "exact" for record in found)
    asked.fallback = "b1.58" if made else "none"
    if config is not None and found:
        from neuzip.formats.config_section import SECTION
        from neuzip.runtime.bitlinear import recorded

        says = recorded(source.checkpoint.root)
        if says is not None:
            setattr(config, SECTION, (getattr(config, SECTION, None) or {}) | {"activations": says.to_json()})


def _model_tensors(source: TensorSource) -> list[SourceTensor]:
    """The tensors that `from_pretrained` would take; some repositories hold the weights in a second form."""
    return [tensor for file in _model_files(source.checkpoint) for tensor in source.tensors(file)]


def _model_files(checkpoint: Checkpoint) -> list[str]:
    if "model.safetensors" in checkpoint.weights:
        return ["model.safetensors"]
    for index in (f"{ORIGINAL_FOLDER}/{INDEX}", INDEX):
        if index in checkpoint.others:
            return indexed_shards(checkpoint, index)
    raise NeuzipError(f"{checkpoint.path}: has neither model.safetensors nor {INDEX}")


def indexed_shards(checkpoint: Checkpoint, index: str) -> list[str]:
    """The weight files that an index of tensors at the root names. Raises FormatError if one is missing."""
    path = checkpoint.root / index
    document = parse_json(path.read_bytes(), path)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise FormatError(path, "not an object of strings", field="weight_map")
    files = sorted(set(weight_map.values()))
    for file in files:
        if file not in checkpoint.weights:
            raise FormatError(path, f"the shard {file!r} is missing", field="weight_map")
    return files


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, without a full stop, or its name."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _refusal(folder: Path, what: str, error: BaseException, hint: str = OTHER_VERSION) -> NeuzipError:
    """What transformers would not do, with the first line of its reason. Raises `error` if memory ran out."""
    if is_out_of_memory(error):
        raise error
    return NeuzipError(
        f"{folder}: transformers {transformers_version} cannot {what}: {reason_of(error)}",
        hint,
    )


def _require_a_perfect_fit(folder: Path, model: PreTrainedModel, found: dict[str, Any]) -> None:
    """Raise NeuzipError unless every tensor of the checkpoint found its place, and every place its tensor."""
    kind = type(model).__name__
    # Version 5 has (name, shape, expected shape) here, 4.57 names.
    mismatched = {m if isinstance(m, str) else m[0] for m in found["mismatched_keys"]}
    problems = [
        f"{what}: {_some(names)}"
        for what, names in (
            (f"tensors that {kind} needs are missing", set(found["missing_keys"]) - mismatched),
            (f"{kind} has no place for", set(found["unexpected_keys"])),
            ("tensors have another shape than the config says", mismatched),
            ("transformers reports", set(found["error_msgs"])),
        )
        if names
    ]
    if problems:
        raise NeuzipError(
            f"{folder}: the weights do not fit the config: " + "; ".join(problems),
            "compare config.json with `neuzip inspect`",
        )


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN_NAMES])
    return shown if len(names) <= SHOWN_NAMES else f"{shown} and {len(names) - SHOWN_NAMES} more"
