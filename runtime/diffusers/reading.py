"""How diffusers reads compressed folders: the config, the files and the index appear as before compression.

A compressed folder loads like the original in all ways of diffusers, with any other quantizer, since
diffusers does not learn that its files are compressed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import safetensors

from neuzip.errors import FormatError, NeuzipError

METHOD = "neuzip"
"""The `quant_method` of a compressed folder's config.json."""

SECTION = "quantization_config"
"""Where config.json says that neuzip compressed the weights."""

_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<variant>\.[^.]+)?\.safetensors\Z")


def without_section(load_config: Callable[..., Any]) -> Callable[..., Any]:
    """`load_config` of a class of diffusers, whose result is the config as it was before compression."""

    @wraps(load_config)
    def load_original_config(cls: type, *arguments: Any, **options: Any) -> Any:
        loaded = load_config(cls, *arguments, **options)
        if isinstance(loaded, tuple):  # also what is left of the options, and a commit
            return original_config(loaded[0]), *loaded[1:]
        return original_config(loaded)

    return load_original_config


def original_config(config: Any) -> Any:
    """A config as it was before compression. Raises FormatError for a later format of neuzip."""
    section = config.get(SECTION) if isinstance(config, dict) else None
    if not isinstance(section, dict) or section.get("quant_method") != METHOD:
        return config
    from neuzip.formats.checkpoint import WEIGHTS_KEY
    from neuzip.formats.manifest import VERSION

    version = section.get("version")
    if version != VERSION or type(version) is not int:
        raise FormatError(
            "config.json", f"format version {version!r}; this neuzip reads version {VERSION}",
            field=SECTION, hint="update neuzip to read it",
        )  # fmt: skip
    original = {name: value for name, value in config.items() if name not in (SECTION, WEIGHTS_KEY)}
    if "original" in section:
        original[SECTION] = section["original"]
    if WEIGHTS_KEY in section:
        original[WEIGHTS_KEY] = section[WEIGHTS_KEY]
    return original


def decoding(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """`load_state_dict` of diffusers, for compressed files too. Raises FormatError for a damaged one.

    Matrices that are stored quantized have the steps of their rows as the attribute STEPS.
    """
    signature = inspect.signature(load_state_dict)

    @wraps(load_state_dict)
    def load_decoded(*arguments: Any, **options: Any) -> Any:
        call = signature.bind(*arguments, **options).arguments
        file = call["checkpoint_file"]
        if not is_compressed_file(file):
            return load_state_dict(*arguments, **options)
        from neuzip.runtime.load_file import load_file
        from neuzip.runtime.weight_files import attach_steps

        tensors = load_file(file, call.get("map_location", "cpu"))
        attach_steps(tensors, file)
        return tensors

    return load_decoded


def is_compressed_file(file: object) -> bool:
    """Whether it is the path of a file that neuzip compressed, whose header can be read."""
    from neuzip.formats.container import is_container_metadata

    if not isinstance(file, str | Path) or Path(file).suffix != ".safetensors":
        return False
    try:
        with safetensors.safe_open(file, "pt") as opened:
            return is_container_metadata(opened.metadata() or {})
    except (OSError, safetensors.SafetensorError):  # diffusers says what is wrong with its file
        return False


def with_tensor_names(find_shards: Callable[..., Any]) -> Callable[..., Any]:
    """What finds the shards of a folder: the index of a compressed one names streams, the files tensors."""

    @wraps(find_shards)
    def find_shards_and_tensors(*arguments: Any, **options: Any) -> Any:
        files, metadata = find_shards(*arguments, **options)
        if not any(map(is_compressed_file, files)):
            return files, metadata
        from neuzip.runtime.load_file import safe_open

        files = with_shards_of_no_stream(files)
        weight_map: dict[str, str] = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                weight_map |= dict.fromkeys(opened.keys(), Path(file).name)
        names = {"all_checkpoint_keys": list(weight_map), "weight_map": weight_map}
        return files, metadata | names

    return find_shards_and_tensors


def with_shards_of_no_stream(files: Iterable[str]) -> list[str]:
    """Shards, and those beside them that no stream is in: their tensors are all equal to others' before."""
    complete: dict[str, None] = {}
    for file in files:
        match = _SHARD.fullmatch(Path(file).name)
        if match is None:
            complete[str(file)] = None
            continue
        stem, variant, count = match["stem"], match["variant"] or "", match["count"]
        for number in range(1, int(count) + 1):
            shard = Path(file).with_name(f"{stem}-{number:05d}-of-{count}{variant}.safetensors")
            if str(shard) == str(file) or shard.exists():
                complete[str(shard)] = None
    return sorted(complete)


def refusing_slices(check_files: Callable[..., Any]) -> Callable[..., Any]:
    """The check of files before a tensor-parallel load. Raises NeuzipError for compressed ones.

    diffusers reads slices of them with a function of safetensors that it imports where it uses it.
    """

    @wraps(check_files)
    def check_plain_files(files: Any, *arguments: Any, **options: Any) -> Any:
        for file in files:
            if is_compressed_file(file):
                raise NeuzipError(
                    f"{file}: is compressed, and diffusers reads slices of plain files only "
                    "for tensor parallelism",
                    "restore the folder with `neuzip decompress`, or load it without `parallel_config`",
                )
        return check_files(files, *arguments, **options)

    return check_plain_files


def refusing(load_config: Callable[..., Any], reason: str, hint: str) -> Callable[..., Any]:
    """`load_config` that raises NeuzipError for the config of a compressed folder."""

    @wraps(load_config)
    def load_plain_config(cls: type, *arguments: Any, **options: Any) -> Any:
        loaded = load_config(cls, *arguments, **options)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        if original_config(config) is not config:
            raise NeuzipError(f"the weights were compressed by neuzip, and {reason}", hint)
        return loaded

    return load_plain_config
