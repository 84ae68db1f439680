"""Entries of neuzip's section of config.json: in a folder, and on the config of a live model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from neuzip.formats.config_section import SECTION, own_section, read_config, with_entry, write_entry

T = TypeVar("T")


@dataclass(frozen=True)
class ConfigEntry(Generic[T]):
    """One entry of the section, by its name.

    parse    a value of the entry, the config.json it is in, and the path of that; raises FormatError
    to_json  what `parse` returns, as JSON has it
    """

    name: str
    parse: Callable[[Any, Mapping[str, Any], str | os.PathLike[str]], T]
    to_json: Callable[[T], Any]

    def read(self, folder: str | os.PathLike[str]) -> T | None:
        """The entry of the config.json of a folder, plain or compressed; None if there is none.

        Raises FormatError.
        """
        path = Path(folder) / "config.json"
        return self._in(read_config(path), path) if path.is_file() else None

    def write(self, folder: str | os.PathLike[str], value: T) -> None:
        """Write the entry to the config.json of a folder; of a compressed one the original's stays as it is.

        Raises FormatError for a config.json that is not there or is no object.
        """
        write_entry(Path(folder) / "config.json", self.name, self.to_json(value))

    def get(self, config: object) -> T | None:
        """The entry of a live model's config, None if there is none. Raises FormatError."""
        return self._in({SECTION: getattr(config, SECTION, None)}, "config.json")

    def set(self, config: object, value: T) -> None:
        """Write the entry to a live model's config, which `save_pretrained` saves."""
        document = {SECTION: getattr(config, SECTION, None)}
        section = with_entry(document, self.name, self.to_json(value), "config.json")[SECTION]
        setattr(config, SECTION, section)

    def _in(self, document: Mapping[str, Any], path: str | os.PathLike[str]) -> T | None:
        value = own_section(document, path).get(self.name)
        return None if value is None else self.parse(value, document, path)
