"""Hostile input gives one error that says what is wrong: no crash, no hang, nothing left behind.

The files of tests/golden/bad each have one fault; `pytest --regenerate-golden -k bad_file` writes them anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.bad import make as bad

from neuzip.compress import Rule, Scheme, compress, decompress, verify
from neuzip.compress.rules_file import read_plan_file
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import FormatError, NeuzipError, WouldOverwrite

BAD = Path(__file__).resolve().parents[1] / "golden" / "bad"
Save = Callable[..., Path]
Speak = Callable[..., Any]


@pytest.fixture(autouse=True)
def _bounded_time() -> Iterator[None]:
    """End a test that hangs."""

    def stop(*_: object) -> None:
        raise TimeoutError("this took a minute")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)


# Single files


@pytest.fixture(scope="session")
def expected(request: pytest.FixtureRequest) -> dict[str, dict[str, str]]:
    if request.config.getoption("--regenerate-golden"):
        bad.write()
    return dict(json.loads(bad.EXPECTED.read_text(encoding="utf-8")))


def test_every_bad_file_has_its_error(expected: dict[str, dict[str, str]]) -> None:
    assert [f"{name}.safetensors" for name in bad.BAD] == list(expected)
    assert sorted(expected) == sorted(path.name for path in BAD.glob("*.safetensors"))


@pytest.mark.parametrize("name", bad.BAD)
def test_a_bad_file_is_refused(
    name: str, expected: dict[str, dict[str, str]], tmp_path: Path, neuzip: Speak
) -> None:
    path = BAD / f"{name}.safetensors"
    refusal = expected[path.name]
    assert bad.refusal(path) == refusal
    with pytest.raises(NeuzipError):
        decompress(path, tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == []
    said = neuzip("verify", path, "--json")
    assert (said.exit_code, said.json["error"]["exit_code"]) == (1, 1)
    assert said.stderr.startswith("error: ")
    assert said.stderr.count("error:") == 1


def test_what_the_bad_files_were_made_of_is_good(tmp_path: Path) -> None:
    for name, data in bad.good():
        path = tmp_path / "good.safetensors"
        path.write_bytes(data)
        assert verify(path).files == 1, name
        decompress(path, tmp_path / "out.safetensors", overwrite=True)


@pytest.mark.parametrize("depth", [900, 990, 1000, 20_000, 1_000_000])
@pytest.mark.parametrize(
    "damage",
    [
        lambda text, junk: text.replace(b'"version":1', b'"version":' + junk),
        lambda text, junk: text.replace(b'"version":1', b'"version":1,"requires":' + junk),
        lambda text, junk: text.replace(b'"raw"', junk),
        lambda text, junk: text.replace(b'"scheme":"raw"', b'"scheme":"lossless","mantissa_bits":' + junk),
        lambda text, junk: junk,
    ],
)
def test_json_nested_too_deeply(damage: Callable[[bytes, bytes], bytes], depth: int, tmp_path: Path) -> None:
    """At any depth: where the parser just copes, the error message must cope too."""
    path = tmp_path / "w.safetensors"
    parts = bad.raw()
    path.write_bytes(bad.put_together(parts, damage(bad.dumps(parts.manifest), b"[" * depth + b"]" * depth)))
    with pytest.raises(FormatError):
        verify(path)
    path.write_bytes(bad.plain('{"w":' + "[" * depth + "]" * depth + "}")())
    with pytest.raises(FormatError):
        verify(path)


def test_an_alias_into_a_file_whose_name_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(bad.of(lambda: bad.raw("v"), bad.set_alias(file="x" * 5000))())
    with pytest.raises(FormatError, match="not here"):
        verify(path)


def test_a_huge_alias_into_another_file(tmp_path: Path) -> None:
    """Its size is only checked against the other file; 2^61 bytes must not be listed piece by piece."""
    parts = bad.raw("v")
    v = parts.original["v"] | {"shape": [1 << 61], "data_offsets": [8, 8 + (1 << 61)]}
    parts.set_original(parts.original | {"v": v})
    parts.record("v")["file"] = "other.safetensors"
    (tmp_path / "a.safetensors").write_bytes(bad.put_together(parts.seal()))
    (tmp_path / "other.safetensors").write_bytes(bad.put_together(bad.raw()))
    with pytest.raises(FormatError, match="no tensor of this kind"):
        verify(tmp_path / "a.safetensors")


def test_streams_may_be_listed_in_any_order(tmp_path: Path) -> None:
    parts = bad.lossless()
    record = parts.record("w")
    record["streams"] = dict(reversed(record["streams"].items()))
    (tmp_path / "w.safetensors").write_bytes(bad.put_together(parts))
    verify(tmp_path / "w.safetensors")


def test_unknown_keys_and_nulls_are_ignored(tmp_path: Path) -> None:
    parts = bad.lossless()
    parts.record("w").update(block_size=None, original=None, more=[1.5])
    parts.manifest |= {"requires": None, "more": {}}
    parts.metadata["more"] = "more"
    (tmp_path / "w.safetensors").write_bytes(bad.put_together(parts))
    verify(tmp_path / "w.safetensors")


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(bad.put_together(bad.lossless()))
    with FolderSource(path) as source:
        os.truncate(path, 8 + int.from_bytes(path.read_bytes()[:8], "little") + 100)
        (tensor,) = source.tensors()
        with pytest.raises(FormatError, match="cut short"):
            source.check_streams(tensor)


def test_checkpoints_whose_tensors_of_unknown_dtype_differ_in_size(tmp_path: Path, save: Save) -> None:
    original = save(tmp_path / "o.safetensors", {"w": ("X1", (8,), np.zeros(4, np.uint8))})
    (tmp_path / "w.safetensors").write_bytes(bad.put_together(bad.of_unknown_dtype()))
    with pytest.raises(NeuzipError, match="same kind"):
        verify(tmp_path / "w.safetensors", original)


# Memory

MEMORY_SCRIPT = """
import json, resource, sys
import neuzip.compress.schemes.ternary_coding  # loads torch, which takes memory
from neuzip.compress import compress, verify
from neuzip.errors import NeuzipError
good, out, *suspects = sys.argv[1:]
verify(good, jobs=1)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (400 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in suspects:
    try:
        if path.startswith("compress:"):
            compress(path[9:], out, jobs=1)
        else:
            verify(path, jobs=1)
        result = "accepted"
    except NeuzipError as error:
        result = error.message
    except BaseException as error:
        result = "!" + repr(error)
    print(json.dumps(result))
"""


def sparse(path: Path, head: bytes, size: int) -> Path:
    """A file of `size` bytes that takes no room on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head)
    os.truncate(path, size)
    return path


def huge_entry(path: Path, entry: str, dtype: str, size: int) -> Path:
    """A container in which one entry has `size` bytes, all zero: a hole at the end of the file."""
    parts = bad.lossless()
    text = bad.dumps(parts.manifest)
    entries: dict[str, Any] = dict(parts.entries)
    entries["neuzip:header"] = ("U8", [len(parts.header)], parts.header)
    entries["neuzip:manifest"] = ("U8", [len(text)], text)
    del entries[entry]
    metadata = parts.metadata | {"neuzip_manifest": bad.checksum(text)}
    file = bad.safetensors(entries, metadata)
    length = int.from_bytes(file[:8], "little")
    document, data = json.loads(file[8 : 8 + length]), file[8 + length :]
    shape = [size // 2 if dtype == "U16" else size]
    document[entry] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
    head = bad.with_length(bad.dumps(document)) + data
    return sparse(path, head, len(head) + size)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_absurd_sizes_take_no_memory(tmp_path: Path, expected: dict[str, dict[str, str]]) -> None:
    """All bad files and some that claim, and sparsely have, gigabytes: in 400 MB beyond what Python takes."""
    good = tmp_path / "good.safetensors"
    good.write_bytes(bad.put_together(bad.lossless()))
    gigabytes = 1 << 34
    large = [
        huge_entry(tmp_path / "manifest.safetensors", "neuzip:manifest", "U8", gigabytes),
        huge_entry(tmp_path / "header.safetensors", "neuzip:header", "U8", gigabytes),
        huge_entry(tmp_path / "table.safetensors", "w:table", "U16", 1 << 29),
        sparse(tmp_path / "zeros.safetensors", b"", gigabytes),
        sparse(tmp_path / "length.safetensors", (100_000_001).to_bytes(8, "little") + b"{", gigabytes),
    ]
    folder = tmp_path / "model"
    for name in ("index/model.safetensors.index.json", "manifest/neuzip/manifest.json", "config/config.json"):
        sparse(folder / name, b"{", gigabytes)
        shutil.copy(good, folder / name.split("/")[0] / "model.safetensors")
    plain = folder / "config" / "model.safetensors"
    plain.write_bytes(bad.safetensors({"w": ("U8", [1], b"x")}))
    suspects = [str(path) for path in [*sorted(BAD.glob("*.safetensors")), *large]]
    suspects += [str(folder / "index"), str(folder / "manifest"), f"compress:{folder / 'config'}"]
    ran = subprocess.run(
        [sys.executable, "-I", "-c", MEMORY_SCRIPT, good, tmp_path / "out", *suspects],
        capture_output=True, text=True, check=True, timeout=600, cwd=tmp_path,
    )  # fmt: skip
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(results) == len(suspects)
    wrong = {s: r for s, r in zip(suspects, results, strict=True) if r == "accepted" or r.startswith("!")}
    assert not wrong


# Folders


@pytest.fixture
def model(tmp_path: Path, save: Save) -> Path:
    """A small plain checkpoint."""
    values = np.random.default_rng(0).standard_normal(3000).astype(np.float32).view(np.uint32) >> 16
    save(tmp_path / "model" / "model.safetensors", {"w": ("BF16", (3000,), values.astype(np.uint16))})
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "README.md").write_text("# Mine\n")
    return tmp_path / "model"


@pytest.fixture
def small(model: Path, tmp_path: Path) -> Path:
    """The same, compressed."""
    compress(model, tmp_path / "small")
    return tmp_path / "small"


def listed(files: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda manifest: manifest | {"files": manifest["files"] | files}


CARRIED = {"kind": "carried", "bytes": 7, "checksum": "0" * 16}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: [], "not an object"),
        (lambda m: m | {"files": []}, "not an object"),
        (lambda m: m | {"version": 2}, r"'version': format version 2"),
        (lambda m: m | {"version": True}, r"'version': format version True"),
        (lambda m: m | {"version": 1.0}, r"'version': format version 1\.0"),
        (lambda m: m | {"version": None}, r"'version': format version None"),
        (lambda m: m | {"requires": ["x"]}, "'requires': requires 'x'"),
        (listed({"README.md": []}), "'kind': None is not a kind"),
        (listed({"README.md": {"kind": "container"}}), r"'README\.md' cannot be a container"),
        (listed({"README.md": {"kind": "symlink"}}), "'symlink' is not a kind"),
        (listed({"README.md": {"kind": "carried"}}), "lacks a valid bytes or checksum"),
        (listed({"README.md": CARRIED | {"bytes": -7}}), "lacks a valid bytes or checksum"),
        (listed({"README.md": CARRIED | {"bytes": 7.0}}), "lacks a valid bytes or checksum"),
        (listed({"README.md": CARRIED | {"bytes": True}}), "lacks a valid bytes or checksum"),
        (listed({"README.md": CARRIED | {"checksum": "?"}}), "lacks a valid bytes or checksum"),
        (listed({"README.md": CARRIED}), r"README\.md: does not have the checksum"),
        (listed({"README.md": CARRIED | {"bytes": 1 << 62}}), r"README\.md: does not have the checksum"),
        (listed({"model.safetensors": CARRIED}), r"model\.safetensors"),
        (listed({"gone.safetensors": {"kind": "container"}}), r"gone\.safetensors: is missing"),
        (listed({"README.MD": CARRIED}), r"README\.MD: is missing"),
        (listed({"README.md": CARRIED | {"kind": "rewritten"}}), r"original/README\.md: is missing"),
        (listed({"": CARRIED}), "'' is not a path inside"),
        (listed({"../model/README.md": CARRIED}), "is not a path inside"),
        (listed({"/etc/passwd": CARRIED}), "is not a path inside"),
        (listed({"./README.md": CARRIED}), "is not a path inside"),
        (listed({"a//b": CARRIED}), "is not a path inside"),
        (listed({"a\\b": CARRIED}), "is not a path inside"),
        (listed({"a\0b": CARRIED}), "is not a path inside"),
        (listed({"neuzip/plan.json": CARRIED}), "is not a path inside"),
        (listed({"\ud800": CARRIED}), "is missing"),
        (listed({"x" * 5000: CARRIED}), "is missing"),
        (listed({"README.md/x": CARRIED}), "is missing"),
    ],
)
def test_a_bad_manifest_of_a_folder(
    change: Callable[[dict[str, Any]], Any], problem: str, small: Path, tmp_path: Path
) -> None:
    manifest = small / "neuzip" / "manifest.json"
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    with pytest.raises(FormatError, match=problem):
        verify(small)
    with pytest.raises(FormatError, match=problem):
        decompress(small, tmp_path / "back")
    assert not list(tmp_path.glob("back*"))


def test_a_plain_file_in_the_place_of_a_container(
    small: Path, model: Path, tmp_path: Path, save: Save
) -> None:
    """Nothing would check it: no checksum of its tensors is anywhere."""
    save(model / "second.safetensors", {"v": ("U8", (3,), np.arange(3, dtype=np.uint8))})
    compress(model, small, overwrite=True)
    save(small / "second.safetensors", {"v": ("U8", (3,), np.arange(1, 4, dtype=np.uint8))})
    for act in (verify, lambda path: decompress(path, tmp_path / "back")):
        with pytest.raises(FormatError, match=r"second\.safetensors: is not the container"):
            act(small)


def test_a_container_that_the_manifest_does_not_list(small: Path) -> None:
    shutil.copy(small / "model.safetensors", small / "more.safetensors")
    with pytest.raises(FormatError, match=r"more\.safetensors: is not in the folder's manifest"):
        verify(small)


def test_a_file_that_would_be_lost_on_the_way(small: Path, tmp_path: Path) -> None:
    """`a.neuzip-partial` is the temporary name of `a`: what one writes the other would rename."""
    (small / "a").write_bytes(b"a")
    (small / "a.neuzip-partial").write_bytes(b"b")
    manifest = small / "neuzip" / "manifest.json"
    document = json.loads(manifest.read_text())
    for name, data in (("a.neuzip-partial", b"b"), ("a", b"a")):
        document["files"][name] = {"kind": "carried", "bytes": 1, "checksum": bad.checksum(data)}
    manifest.write_text(json.dumps(document))
    with pytest.raises(NeuzipError, match="was lost"):
        decompress(small, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("depth", [900, 960, 990, 100_000])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_of_a_checkpoint_nested_deeply(file: str, depth: int, model: Path, tmp_path: Path) -> None:
    (model / file).write_text('{"weight_map": {}, "x": ' + "[" * depth + "]" * depth + "}")
    error = None
    try:
        compress(model, tmp_path / "small")
    except FormatError as refusal:
        error = refusal
    assert error is not None or depth < 1000
    assert error is None or re.search(rf"{file}.*: the JSON is nested too deeply", error.message)


def test_an_index_of_a_million_tensors_is_read_in_time(model: Path) -> None:
    names = {f"{i:x}": "model.safetensors" for i in range(300_000)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for i in range(300):
        shutil.copy(model / "model.safetensors", model / f"a{i}.safetensors")
    with FolderSource(model) as source:
        assert len(source.checkpoint.weights) == 301


# Names, links, and files that are none


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "is a Git LFS pointer"),
        (b"<!DOCTYPE html>\n<html><body>Not found</body></html>", "is a page in HTML"),
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x08archive/data.pkl", "is a zip archive"),
        (b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01", "is a pickle"),
        (b"GGUF\x03\x00\x00\x00\x01\x00\x00\x00", "is a GGUF file"),
    ],
)
def test_what_is_no_safetensors_file_is_called_what_it_is(
    content: bytes, said: str, model: Path, here: Path
) -> None:
    (model / "model.safetensors").write_bytes(content)
    for act in (lambda: compress(model, "small"), lambda: verify(model / "model.safetensors")):
        with pytest.raises(FormatError, match=rf"model\.safetensors: {said}") as told:
            act()
        assert told.value.hint


@pytest.mark.parametrize("folder", [True, False])
def test_gguf_alone_is_called_so(folder: bool, model: Path, here: Path) -> None:
    (model / "model.safetensors").rename(model / "model.gguf")
    with pytest.raises(FormatError, match=r"model\.gguf: is GGUF, which neuzip writes but does not read"):
        compress(model if folder else model / "model.gguf", "small")


# Indices of what is not here


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("index", "shard", "weights"),
    [
        (INDEX, "model-00001-of-00030.safetensors", "model.safetensors"),
        ("a.safetensors.index.fp16.json", "a.fp16-00001-of-00002.safetensors", "a.safetensors"),
        ("a.safetensors.index.json", "a-00001-of-00002.safetensors", "a-00001-of-00003.fp16.safetensors"),
    ],
)
def test_an_index_of_what_was_not_downloaded_is_carried(
    index: str, shard: str, weights: str, model: Path, here: Path
) -> None:
    (model / "model.safetensors").rename(model / weights)
    (model / index).write_text(json.dumps({"weight_map": {"w": shard}}))
    report = compress(model, "small")
    assert f"{index}: names shards that are not here, carried along unread" in report.warnings
    assert compress(model, "small").resumed_files == 1
    verify("small", model)
    decompress("small", "back")
    assert {p.name: p.read_bytes() for p in (here / "back").iterdir()} == {
        p.name: p.read_bytes() for p in model.iterdir()
    }


@pytest.mark.parametrize("there", [[], ["model-00001-of-00002"], ["model-00001-of-00004"], ["adapter_model"]])
def test_an_index_of_an_incomplete_download_is_refused(there: list[str], model: Path, here: Path) -> None:
    for name in there:
        shutil.copy(model / "model.safetensors", model / f"{name}.safetensors")
    (model / "model.safetensors").unlink()
    names = {str(i): f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    (model / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(NeuzipError) as told:
        compress(model, "small")
    assert "neuzip pull" in told.value.hint


def test_folders_without_end(model: Path, tmp_path: Path) -> None:
    below = model
    for _ in range(40):
        below = below / "d"
    below.mkdir(parents=True)
    with pytest.raises(FormatError, match="more than 32 deep"):
        compress(model, tmp_path / "small")


def test_links_that_double_at_every_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No link leads upwards, but there are 2^30 ways through these folders."""
    monkeypatch.setattr("neuzip.formats.checkpoint.MAX_ENTRIES", 3000)
    for i in range(30):
        (model / f"d{i}").mkdir()
    for i in range(29):
        for link in "ab":
            (model / f"d{i}" / link).symlink_to(model / f"d{i + 1}", target_is_directory=True)
    with pytest.raises(FormatError, match="more than 3000 files and folders"):
        compress(model, tmp_path / "small")


@pytest.mark.parametrize("kind", ["pipe", "device", "dangling", "loop"])
def test_what_is_no_regular_file(kind: str, small: Path, tmp_path: Path) -> None:
    path = small / "x.safetensors"
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "dangling": lambda: path.symlink_to(small / "nowhere"),
        "loop": lambda: path.symlink_to(path),
    }
    make[kind]()
    with pytest.raises(FormatError, match=r"x\.safetensors: (is neither a file nor a folder|cannot be read)"):
        verify(small)
    with pytest.raises(NeuzipError, match=r"x\.safetensors"):
        verify(path)


def test_a_pipe_that_takes_the_place_of_a_file(tmp_path: Path) -> None:
    """Between the listing and the opening: to open a pipe must not wait for a writer."""
    from neuzip.formats.safetensors_file import TensorFile

    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(FormatError, match="not a regular file"):
        TensorFile(tmp_path / "pipe.safetensors")
    with pytest.raises(FormatError, match="not a regular file"):
        TensorFile(tmp_path)


def test_a_folder_with_the_name_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    for path in (tmp_path, tmp_path / "x.safetensors"):
        with pytest.raises(NeuzipError, match=r"no \.safetensors files"):
            verify(path)


def test_a_snapshot_of_the_hub_is_made_of_links(model: Path, tmp_path: Path) -> None:
    """Links are followed: huggingface_hub keeps the files of a snapshot elsewhere."""
    snapshot = tmp_path / "hub" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "blobs").mkdir()
    for i, path in enumerate(model.iterdir()):
        shutil.copy(path, tmp_path / "hub" / "blobs" / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    compress(snapshot, tmp_path / "small")
    decompress(tmp_path / "small", tmp_path / "back")
    for path in model.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
        assert not (tmp_path / "back" / path.name).is_symlink()


def test_names_that_only_some_systems_have(model: Path, tmp_path: Path) -> None:
    names = [b"line\nfeed", b"not utf-8 \xff", "ümlaut".encode(), b" ", b"-rf", b"~", b"x" * 200]
    for name in names:
        Path(os.fsdecode(os.fsencode(model) + b"/" + name)).write_bytes(name)
    compress(model, tmp_path / "small")
    verify(tmp_path / "small", model)
    decompress(tmp_path / "small", tmp_path / "back")
    assert {os.fsencode(p.name) for p in (tmp_path / "back").iterdir()} >= set(names)


def test_a_name_that_other_systems_cannot_hold(model: Path, tmp_path: Path) -> None:
    (model / "a\\b").write_text("x")
    with pytest.raises(FormatError, match="other systems"):
        compress(model, tmp_path / "small")


@contextmanager
def nobody() -> Iterator[None]:
    """The rights of a user who owns nothing, also where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["model.safetensors", "README.md", "neuzip/manifest.json", "neuzip", ""])
def test_what_may_not_be_read(name: str, small: Path) -> None:
    verify(small)  # so that nothing has to be imported by nobody
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(small, Path(folder) / "small")
        os.chmod(folder, 0o755)
        os.chmod(Path(folder) / "small" / name, 0)
        try:
            with nobody(), pytest.raises(NeuzipError, match=re.escape(f"small/{name}".rstrip("/"))):
                verify(Path(folder) / "small")
        finally:
            os.chmod(Path(folder) / "small" / name, 0o755)


# Where the result goes


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory beside the checkpoints."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize(
    "dst", ["", ".", "..", "/", "x/..", "x" * 5000, "x" * 250, "a\0b", "\ud800", "file/below", "loop"]
)
def test_a_destination_that_cannot_be(dst: str, small: Path, model: Path, here: Path) -> None:
    (here / "file").write_text("mine")
    (here / "loop").symlink_to("loop")
    for act, src in ((compress, model), (decompress, small)):
        for source in (src, src / "model.safetensors"):
            for overwrite in (False, True):
                with pytest.raises(NeuzipError):
                    act(source, dst, overwrite=overwrite)
    assert sorted(p.name for p in here.iterdir()) == ["file", "loop"]


def test_slashes_at_the_end_mean_nothing(small: Path, here: Path) -> None:
    decompress(f"{small}//", "back//")
    assert (here / "back" / "README.md").read_text() == "# Mine\n"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_not_written_over_a_folder(overwrite: bool, small: Path, model: Path, here: Path) -> None:
    (here / "empty").mkdir()
    (here / "full").mkdir()
    (here / "full" / "mine").write_text("mine")
    for act, src in ((compress, model), (decompress, small)):
        for dst in ("empty", "full"):
            with pytest.raises(NeuzipError, match="is a folder"):
                act(src / "model.safetensors", dst, overwrite=overwrite)
    assert sorted(p.name for p in here.rglob("*")) == ["empty", "full", "mine"]


def test_a_link_is_replaced_but_what_it_leads_to_is_not_touched(small: Path, model: Path, here: Path) -> None:
    (here / "real").mkdir()
    (here / "real" / "mine").write_text("mine")
    (here / "link").symlink_to("real")
    (here / "dangling").symlink_to("nowhere")
    for act, src in ((decompress, small), (compress, model)):
        for link in ("link", "dangling"):
            if (here / link).is_symlink():
                with pytest.raises(WouldOverwrite):
                    act(src, link)
            act(src, link, overwrite=True)
            assert not (here / link).is_symlink()
    assert sorted(p.name for p in here.iterdir()) == ["dangling", "link", "real"]
    assert (here / "real" / "mine").read_text() == "mine"


def test_a_link_left_by_a_killed_overwrite_is_removed_and_not_followed(small: Path, here: Path) -> None:
    (here / "real").mkdir()
    (here / "real" / "mine").write_text("mine")
    (here / "back.neuzip-old").symlink_to("real")
    (here / "back").mkdir()
    decompress(small, "back")
    assert (here / "real" / "mine").exists()
    assert not os.path.lexists(here / "back.neuzip-old")


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_that_was_left_behind_gets_into_the_result(
    overwrite: bool, small: Path, model: Path, here: Path
) -> None:
    """A killed run with another source leaves files where this one works."""
    for act, src in ((decompress, small), (compress, model)):
        (here / "out.neuzip-partial").mkdir()
        (here / "out.neuzip-partial" / "other.py").write_text("other")
        with pytest.raises(NeuzipError, match=r"other\.py: is left from something else"):
            act(src, "out", overwrite=overwrite)
        assert not (here / "out").exists()
        shutil.rmtree(here / "out.neuzip-partial")


@pytest.mark.parametrize("name", ["neuzip", "neuzip/x", "neuzip/x.safetensors"])
def test_a_source_with_something_called_neuzip(name: str, model: Path, here: Path) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    shutil.copy(model / "model.safetensors", model / name)
    with pytest.raises(NeuzipError, match="something called 'neuzip'"):
        compress(model, "out")
    assert not list(here.iterdir())


def test_a_source_that_cannot_be(here: Path) -> None:
    (here / "loop").symlink_to("loop")
    for src in ("", "nowhere", "x" * 5000, "a\0b", "\ud800", "loop", "/dev/null", "/proc/self/mem"):
        with pytest.raises(NeuzipError):
            verify(src)


def test_a_strange_umask(small: Path, here: Path) -> None:
    before = os.umask(0o777)
    try:
        with nobody(), pytest.raises(NeuzipError):
            decompress(small, "nowhere/back")
        if os.geteuid() == 0:
            decompress(small, "back")
    finally:
        os.umask(before)


# Plans


@pytest.mark.parametrize(
    "text",
    [
        "rule = 1",
        "rule = [1]",
        "rule = " + "[" * 5000 + "]" * 5000,
        '[[rule]]\nmatch = "*"\nmantissa_bits = ' + "9" * 5000,
        '[[rule]]\nmatch = "*"\nmantissa_bits = true',
        '[[rule]]\nmatch = "*"\nmantissa_bits = -1',
        '[[rule]]\nmatch = "*"\nscheme = ["raw"]',
        '[[rule]]\nmatch = ["*"]',
        "\0",
        "[rule",
    ],
)
def test_a_bad_plan(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(NeuzipError, match=r"plan\.toml"):
        read_plan_file(path)


def test_a_block_size_of_5000_digits(model: Path, here: Path, neuzip: Speak) -> None:
    said = neuzip("compress", model, "out", "--mantissa-bits", 3, "--block-size", "9" * 5000)
    assert said.exit_code == 2
    assert said.stderr.startswith("error: --block-size")


def test_names_that_streams_would_have(tmp_path: Path, save: Save) -> None:
    """A tensor `w:words` beside `w`, or one called like an entry of the container."""
    values = np.random.default_rng(0).standard_normal(9000).astype(np.float32).view(np.uint32)
    odd = np.arange(300, dtype=np.uint8)
    for name in ("w:words", "neuzip:header", "neuzip:manifest", ":words", "", "\ud800", "a\nb", "x" * 70_000):
        source = save(tmp_path / "a.safetensors", {"w": ("F32", (9000,), values), name: ("U8", (300,), odd)})
        if name in ("w:words", "neuzip:header", "neuzip:manifest"):
            with pytest.raises(FormatError, match=name):
                compress(source, tmp_path / "b.safetensors", overwrite=True)
            assert not list(tmp_path.glob("b.*partial"))
            continue
        compress(source, tmp_path / "b.safetensors", [Rule("*", Scheme())], overwrite=True)
        decompress(tmp_path / "b.safetensors", tmp_path / "c.safetensors", overwrite=True)
        assert (tmp_path / "c.safetensors").read_bytes() == source.read_bytes()
