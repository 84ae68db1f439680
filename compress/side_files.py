"""The files beside the containers of a result: copies, rewritten configs and indices, and the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import xxhash

from neuzip.errors import FormatError, WouldOverwrite
from neuzip.formats.checkpoint import (
    MANIFEST_PATH,
    ORIGINAL_FOLDER,
    OWN_FOLDER,
    WEIGHTS_KEY,
    Checkpoint,
    StoredFile,
    config_files,
    file_checksum,
    index_files,
    read_lenient,
    read_stored_files,
    rewritten_config,
    rewritten_index,
    stored_files_to_json,
    to_json,
)
from neuzip.formats.config_section import SECTION, own_section
from neuzip.formats.hub.push_plan import HUB_FILES
from neuzip.formats.records import Record

from .run_identity import RUN_ID_PATH
from .workspace import copy_file, reading, refuse_strangers, write_file


@dataclass(frozen=True)
class SideFile:
    """A file beside containers: the file that it copies, or its content; and the file whose mode it gets."""

    content: Path | bytes
    like: Path | None

    def put(self, target: Path) -> None:
        """Copy it to its place, or write it there."""
        if isinstance(self.content, Path):
            copy_file(self.content, target)
        else:
            write_file(target, self.content, self.like)

    def is_at(self, path: Path) -> bool:
        """Whether there is a file at `path` with this content."""
        if not path.is_file():
            return False
        if isinstance(self.content, Path):
            return file_checksum(path) == file_checksum(self.content)
        return file_checksum(path) == xxhash.xxh3_64_hexdigest(self.content)


@dataclass(frozen=True)
class SideFiles:
    """What lies beside the containers of a result of `checkpoint`, given the records of all its tensors.

    `records` are by file and name. `activations` is the mode that config.json says for ternary weights, if
    one was wanted, and `base_name` what the base of a delta is called.
    """

    checkpoint: Checkpoint
    records: Mapping[str, dict[str, Record]]
    activations: str | None = None
    base_name: str | None = None

    def write(self, work: Path, also: AbstractSet[str] = frozenset()) -> None:
        """Carry the files that are not weights, rewrite those that name weights, and list them all.

        Raises NeuzipError if `work` then holds anything else but `also`.
        """
        expected = self.expected()
        for place, file in expected.items():
            file.put(work / place)
        # Checksums are those of the copies: the files of the source may have changed since.
        write_file(work / MANIFEST_PATH, self._manifest(self._stored_files(copied_to=work)))
        own = {MANIFEST_PATH, RUN_ID_PATH}
        refuse_strangers(work, {*self.checkpoint.weights, *expected, *own, *also})

    def expected(self, moved: AbstractSet[str] = frozenset()) -> dict[str, SideFile]:
        """The files by their places in a result, but for the manifest.

        Files that are `moved` stand below neuzip/original.
        """
        checkpoint = self.checkpoint
        is_lossless = all(r.lossless for of_file in self.records.values() for r in of_file.values())
        expected = {
            place: SideFile(checkpoint.root / file, checkpoint.root / file)
            for file, (_, place) in self._places(moved).items()
        }
        for file in index_files(checkpoint):
            content = rewritten_index(checkpoint, file, dict(self.records))
            expected[file] = SideFile(content, checkpoint.root / file)
        for file in config_files(checkpoint):
            content = rewritten_config(checkpoint, file, is_lossless, self.activations)
            expected[file] = SideFile(content, checkpoint.root / file)
        return expected

    def amiss(self, dst: Path) -> dict[str, SideFile]:
        """What a result lacks beside its containers, or has otherwise than it should, by its place."""
        moved = self._moved(dst)
        expected = self.expected(moved)
        expected[MANIFEST_PATH] = SideFile(self._manifest(self._stored_files(moved)), None)
        for file in config_files(self.checkpoint):
            content, like = expected[file].content, expected[file].like
            assert isinstance(content, bytes)
            expected[file] = SideFile(_with_further_entries(content, dst / file, self.activations), like)
        return {place: file for place, file in expected.items() if not file.is_at(dst / place)}

    def are_of_source(self, dst: Path) -> bool:
        """Whether a result was made from these files beside weights, as far as its manifest can tell.

        Without a manifest they all have to be there as they should: one that is not may be of another source.
        """
        checkpoint = self.checkpoint
        try:
            stored = read_stored_files(dst, delta=self._is_delta)
        except FormatError:
            return all(
                place == MANIFEST_PATH or not isinstance(file.content, Path)
                for place, file in self.amiss(dst).items()
            )
        return set(stored) == {*checkpoint.weights, *checkpoint.others} and all(
            stored[f].checksum == file_checksum(checkpoint.root / f) for f in checkpoint.others
        )

    def refuse_edited(self, dst: Path) -> None:
        """Raise WouldOverwrite for a file of a result that people may have edited.

        That is one that is there, but not as in the source. What neuzip alone writes, and a config.json that
        is none, nobody has edited.
        """
        configs = config_files(self.checkpoint)
        for place, file in self.expected(self._moved(dst)).items():
            path = dst / place
            if isinstance(file.content, Path):
                is_own = place.startswith(f"{OWN_FOLDER}/") or not path.is_file()
                is_edited = not is_own and not file.is_at(path)
            else:
                is_edited = place in configs and _has_other_values(file.content, path)
            if is_edited:
                raise WouldOverwrite(
                    f"{path}: is not that of `source`: it is damaged, or was edited",
                    "move it away and repeat the command, which makes it again; or give `overwrite=True` to"
                    " make all of `destination` again",
                )

    @property
    def _is_delta(self) -> bool:
        return self.base_name is not None

    def _places(self, moved: AbstractSet[str]) -> dict[str, tuple[str, str]]:
        """How each file that is not weights is stored, and where its bytes stand in a result."""
        checkpoint = self.checkpoint
        rewritten = {*index_files(checkpoint), *config_files(checkpoint), *moved}
        return {
            f: ("rewritten", f"{ORIGINAL_FOLDER}/{f}") if f in rewritten else ("carried", f)
            for f in checkpoint.others
        }

    def _stored_files(
        self, moved: AbstractSet[str] = frozenset(), copied_to: Path | None = None
    ) -> dict[str, StoredFile]:
        """The files for the manifest of a result, with the checksums of the source or of its copies."""
        checkpoint = self.checkpoint
        stored = {file: StoredFile("container") for file in checkpoint.weights}
        for file, (kind, place) in self._places(moved).items():
            path = checkpoint.root / file if copied_to is None else copied_to / place
            with reading(path):
                stored[file] = StoredFile(kind, path.stat().st_size, file_checksum(path))
        return stored

    def _manifest(self, stored: dict[str, StoredFile]) -> bytes:
        features = {r.feature for of_file in self.records.values() for r in of_file.values()}
        return stored_files_to_json(stored, self.base_name, features)

    def _moved(self, dst: Path) -> set[str]:
        """The files that stand below neuzip/original in a result that was on the Hub: that is no damage."""
        try:
            stored = read_stored_files(dst, delta=self._is_delta)
        except FormatError:
            return set()
        return {name for name in HUB_FILES if name in stored and stored[name].is_rewritten}


def _with_further_entries(content: bytes, path: Path, activations: str | None) -> bytes:
    """A config.json as it should be, with what the one at `path` has beside that: how the model is to run.

    `activations` are those of the run's options, if it has any.
    """
    try:
        present = read_lenient(path)
        section = dict(own_section(present, path))
    except FormatError:  # missing, or damaged
        return content
    document = json.loads(content)
    own = {**own_section(document, path), **section}
    if activations is not None:
        own["activations"] = activations
    further = {key: value for key, value in present.items() if key not in document}
    return to_json(document | further | ({SECTION: own} if own else {}), path)


def _has_other_values(content: bytes, path: Path) -> bool:
    """Whether there is a config.json that says something else of the model than `content` does."""
    try:
        present = read_lenient(path)
    except FormatError:
        return False
    ours = (SECTION, WEIGHTS_KEY, "quantization_config")
    return any(
        key in present and key not in ours and to_json(present[key], path) != to_json(value, path)
        for key, value in json.loads(content).items()
    )
