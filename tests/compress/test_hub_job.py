"""From the Hub to a compressed checkpoint by shards: the same bytes, two shards at a time, killed or not."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from loopback_hub import TOKEN, Hub, Refusal, hub_environment

from neuzip.compress import Rule, Scheme, compress, decompress, hub_job, verify
from neuzip.compress.draft_job import compress_and_push
from neuzip.compress.equal_tensors import EqualTensors
from neuzip.compress.hub_job import SOURCE_FOLDER, StreamReport, compress_stream, plan_stream
from neuzip.compress.hub_state import STATE_PATH
from neuzip.compress.husk import put_husk
from neuzip.errors import NeuzipError, UsageError, VerificationError, WouldOverwrite
from neuzip.formats.checkpoint import MANIFEST_PATH
from neuzip.formats.container import Container
from neuzip.formats.hub import stream as hub_stream
from neuzip.formats.hub.download import resolve_source
from neuzip.formats.hub.draft import Draft, parse_target
from neuzip.formats.hub.push import push
from neuzip.formats.hub.push_plan import plan_push

pytest_plugins = ["loopback_hub"]

Save = Callable[..., Path]
Files = dict[str, bytes]

LOSSLESS = [Rule("*", Scheme("lossless"))]
K3 = [Rule("*", Scheme("truncated", 3, 512))]
SHARDS, TENSORS = 6, 23
WEIGHTS = 30_000


def bf16(seed: int, size: int = WEIGHTS) -> Any:
    values = (np.random.default_rng(seed).standard_normal(size) * 0.05).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, save: Save) -> Path:
    """Six shards with an index. Tied: across shards, within one, across folders (which is not stored so)."""
    root = tmp_path_factory.mktemp("stream") / "model"
    weight_map = {}
    for i in range(SHARDS):
        tensors = {
            f"layers.{i}.weight": ("BF16", (100, 300), bf16(i)),
            f"layers.{i}.norm": ("BF16", (2500,), np.full(2500, 0x3F80, np.uint16)),  # the same in all
            f"layers.{i}.ids": ("I64", (9,), np.arange(9)),
        }
        if i in (2, 5):
            tensors[f"tied.{i}"] = ("BF16", (100, 300), bf16(1))
        if i == 3:
            tensors["twin"] = ("BF16", (100, 300), bf16(3))
            tensors["flat"] = ("BF16", (30_000,), bf16(1))  # of another shape: no alias
        name = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        save(root / name, tensors, {"format": "pt"}, padding=i)
        weight_map |= dict.fromkeys(tensors, name)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text('{"model_type":   "llama"}\n')
    (root / "tokenizer.json").write_bytes(os.urandom(5000))
    (root / "README.md").write_text("---\nlicense: mit\n---\n# The original\n")
    save(root / "vae" / "model.safetensors", {"w": ("BF16", (100, 300), bf16(1))})
    return root


def contents(root: Path) -> Files:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture
def files(original: Path) -> Files:
    return contents(original)


@pytest.fixture(autouse=True)
def little_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request for a header gets less than the shortest shard, and less than the longest header."""
    monkeypatch.setattr(hub_stream, "HEADER_GUESS", 256)


def stream(dst: Path, src: str = "some/model", rules: list[Rule] = LOSSLESS, **options: Any) -> StreamReport:
    return compress_stream(plan_stream(src, dst, rules), dst, rules, jobs=2, **options)


def draft_of(text: str = "me/nz") -> Draft:
    return Draft(parse_target(text), lambda _: None)


def work_of(dst: Path) -> Path:
    return dst.with_name(f"{dst.name}.neuzip-partial")


def shard(number: int) -> str:
    return f"model-{number:05}-of-{SHARDS:05}.safetensors"


def sent_of(hub: Hub, path: str) -> int:
    """Bytes of a file of some/model that were sent, whatever the revision."""
    return sum(n for p, n in hub.sent.items() if p.startswith("/some/model/") and p.endswith(f"/{path}"))


def downloads_of(hub: Hub) -> list[str]:
    """A list that gets the names of the weight files that are downloaded from now on, whole."""
    names: list[str] = []

    def before(handler: Any) -> None:
        if (
            handler.command == "GET"
            and handler.path.endswith(".safetensors")
            and "Range" not in handler.headers
        ):
            names.append(handler.path.rpartition("/")[2])

    hub.before = before
    return names


def fail_at(hub: Hub, pattern: str, status: int = 403) -> None:
    """Refuse what is asked for with `pattern` in its path, but for parts of files."""

    def before(handler: Any) -> None:
        if pattern in f"{handler.command} {handler.path}" and "Range" not in handler.headers:
            raise Refusal(status, message="not now")

    hub.before = before


# The same result


@pytest.mark.parametrize("rules", [LOSSLESS, K3], ids=["lossless", "truncated"])
@pytest.mark.slow
def test_the_result_is_that_of_the_downloaded_folder(
    here: Hub, files: Files, tmp_path: Path, rules: list[Rule]
):
    here.add("some/model", files | {"onnx/model.onnx": b"x" * 2000})
    streamed = stream(tmp_path / "streamed", rules=rules)
    here.requests.clear()
    whole = compress(resolve_source("some/model"), tmp_path / "whole", rules)
    assert contents(tmp_path / "streamed") == contents(tmp_path / "whole")
    assert {p.name for p in tmp_path.iterdir()} == {"streamed", "whole", "cache"}
    ours, theirs = streamed.compression, whole
    assert ours.tensors == theirs.tensors
    assert (ours.original_bytes, ours.stored_bytes, ours.weight_bytes) == (
        theirs.original_bytes, theirs.stored_bytes, theirs.weight_bytes
    )  # fmt: skip
    assert [t.scheme for t in ours.tensors if t.name.startswith(("tied", "twin"))] == [
        "same as layers.1.weight", "same as layers.3.weight", "same as layers.1.weight"
    ]  # fmt: skip
    if rules is LOSSLESS:
        decompress(tmp_path / "streamed", tmp_path / "restored")
        assert contents(tmp_path / "restored") == files


@pytest.mark.slow
def test_what_only_looks_equal_is_compared_byte_by_byte(
    here: Hub, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """If all digests were the same, the bytes would still decide, also of files that are gone by then."""
    here.add("some/model", files)
    remember = EqualTensors.remember

    def remember_one_digest(self: Any, *arguments: Any) -> None:
        remember(self, *arguments)
        self._firsts = {(kind, "same"): t for (kind, _), t in reversed(list(self._firsts.items()))}

    monkeypatch.setattr(EqualTensors, "remember", remember_one_digest)
    monkeypatch.setattr(EqualTensors, "_digest", lambda *_: "same")
    report = stream(tmp_path / "streamed").compression
    decompress(tmp_path / "streamed", tmp_path / "restored")
    assert contents(tmp_path / "restored") == files
    schemes = {t.name: t.scheme for t in report.tensors}
    assert schemes["layers.5.norm"] == "same as layers.0.norm"
    assert schemes["layers.1.weight"].startswith("lossless")


@pytest.mark.slow
def test_weights_that_are_not_ternary_are_refused_when_they_come(here: Hub, files: Files, tmp_path: Path):
    here.add("some/model", files)
    rules = [Rule("layers.*.weight", Scheme("ternary", quantizer="absmean")), *LOSSLESS]
    with pytest.raises(NeuzipError, match=r"some/model: 1 of 1 tensors that are to be ternary have other"):
        stream(tmp_path / "streamed", rules=rules)
    assert not (tmp_path / "streamed").exists()
    stream(tmp_path / "streamed", rules=rules, allow_destructive=True)
    compress(resolve_source("some/model"), tmp_path / "whole", rules, allow_destructive=True)
    assert contents(tmp_path / "streamed") == contents(tmp_path / "whole")


# The disk


class Watch:
    """The most bytes of source and containers that were on the disk when anything was sent, or coded.

    Of containers the blocks that they take are counted: a husk has few. A file of several tens of kB may take
    BLOCK more than its length. Files come and go in other threads meanwhile: of downloads those count that
    are still there when all were looked at.
    """

    BLOCK = 8192

    def __init__(self, hub: Hub, dst: Path) -> None:
        self.work, self.files, self.source, self.containers, self.husks = work_of(dst), 0, 0, 0, 0
        hub.before = self.look
        hub.on_bytes = self.look

    def look(self, *_: object) -> None:
        inside = self.work / SOURCE_FOLDER
        found: dict[Path, int] = {}
        containers = 0
        for path in self.work.rglob("*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                if inside not in path.parents and ".safetensors" in path.name:
                    containers += status.st_blocks * 512
                    self.husks += status.st_blocks * 512 < status.st_size // 2
                elif path.suffix in (".safetensors", ".incomplete") and status.st_size > 10_000:
                    found[path] = status.st_size
        downloads = [size for path, size in found.items() if path.exists()]
        self.files, self.source = max(self.files, len(downloads)), max(self.source, sum(downloads))
        self.containers = max(self.containers, containers)


@pytest.mark.slow
def test_two_shards_at_most_are_on_the_disk(here: Hub, files: Files, tmp_path: Path):
    here.add("some/model", files)
    watch = Watch(here, tmp_path / "nz")
    report = stream(tmp_path / "nz", on_bytes=watch.look)
    sizes = [len(data) for name, data in sorted(files.items()) if name.endswith(".safetensors")]
    two = max(a + b for a, b in pairwise(sizes))
    assert watch.files == 2
    assert min(sizes) < watch.source <= two
    assert plan_stream("some/model", tmp_path / "x").most_of_source == two
    assert watch.containers <= report.compression.stored_weight_bytes + len(sizes) * Watch.BLOCK


@pytest.mark.slow
def test_one_container_at_most_is_on_the_disk_when_they_are_pushed(here: Hub, files: Files, tmp_path: Path):
    here.add("some/model", files)
    watch = Watch(here, tmp_path / "nz")
    stream(tmp_path / "nz", draft=draft_of(), on_bytes=watch.look)
    sizes = [len(data) for name, data in sorted(files.items()) if name.endswith(".safetensors")]
    assert watch.files == 2
    assert watch.source <= max(a + b for a, b in pairwise(sizes))
    largest = max(
        len(d) for name, d in here.repositories["me/nz"].tree().items() if name.endswith("safetensors")
    )
    assert watch.husks > 0
    assert largest <= watch.containers + Watch.BLOCK
    assert watch.containers <= largest + len(sizes) * Watch.BLOCK
    assert not work_of(tmp_path / "nz").exists()
    assert not (tmp_path / "nz").exists()


def test_a_husk_has_all_but_the_streams(original: Path, tmp_path: Path):
    compress(original, tmp_path / "nz")
    path = tmp_path / "nz" / shard(4)
    before = path.read_bytes()
    with Container(path) as container:
        records, sizes = container.manifest, [container.stored_bytes(n) for n in container.original.tensors]
    put_husk(path)
    assert path.stat().st_size == len(before)
    assert path.stat().st_blocks * 512 < len(before) / 2
    with Container(path) as container:
        assert container.manifest == records
        assert [container.stored_bytes(n) for n in container.original.tensors] == sizes


# To the Hub


@pytest.mark.slow
def test_what_is_pushed_is_what_push_would_push(here: Hub, files: Files, tmp_path: Path):
    """And no reader of the branch sees any of it before all of it."""
    here.add("some/model", files)
    seen: list[set[str]] = []
    here.before = lambda _: (
        seen.append(set(here.repositories["me/nz"].tree())) if "me/nz" in here.repositories else None
    )
    pushed = stream(tmp_path / "nz", draft=draft_of()).pushed
    assert pushed is not None
    assert pushed.commit == here.repositories["me/nz"].branches["main"]
    assert set(here.repositories["me/nz"].branches) == {"main"}
    compress(resolve_source("some/model"), tmp_path / "whole")
    push(plan_push(tmp_path / "whole", "me/other"))
    ours, theirs = (here.repositories[name].tree() for name in ("me/nz", "me/other"))
    theirs["README.md"] = theirs["README.md"].replace(b"me/other", b"me/nz").replace(b"# other", b"# nz")
    assert {len(tree) for tree in seen} == {1, len(ours)}
    assert ours == theirs
    assert len(verify(resolve_source("me/nz")).tensors) == TENSORS
    decompress(resolve_source("me/nz"), tmp_path / "restored")
    assert contents(tmp_path / "restored") == files


@pytest.mark.slow
def test_a_branch_is_pushed_to(here: Hub, files: Files, tmp_path: Path):
    here.add("some/model", files)
    here.add("me/nz", {"model.safetensors": b"old", ".gitattributes": b""})
    pushed = stream(tmp_path / "nz", draft=draft_of("me/nz@v2")).pushed
    assert pushed is not None
    assert pushed.deleted == ("model.safetensors",)
    repository = here.repositories["me/nz"]
    assert set(repository.branches) == {"main", "v2"}
    assert repository.tree()["model.safetensors"] == b"old"
    assert verify(resolve_source("me/nz@v2")).files == len(files)


@pytest.mark.slow
def test_a_checkpoint_on_the_hub_is_replaced_only_when_asked_for(here: Hub, files: Files, tmp_path: Path):
    here.add("some/model", files)
    older = {"old.safetensors": b"1", "picture.png": b"2", ".gitattributes": b""}
    here.add("me/nz", older)
    with pytest.raises(WouldOverwrite, match=r"me/nz: holds a checkpoint already, with old.safetensors"):
        stream(tmp_path / "nz", draft=draft_of())
    assert sent_of(here, shard(2)) < len(files[shard(2)])
    assert here.repositories["me/nz"].tree() == older
    pushed = stream(tmp_path / "nz", draft=draft_of(), overwrite=True).pushed
    assert pushed is not None
    assert pushed.deleted == ("old.safetensors",)
    assert "picture.png" in here.repositories["me/nz"].tree()
    verify(resolve_source("me/nz"))


@pytest.mark.slow
def test_a_folder_is_pushed_while_it_is_compressed(here: Hub, original: Path, files: Files, tmp_path: Path):
    fail_at(here, "PUT /lfs/")
    with pytest.raises(NeuzipError, match="the Hub forbids this: not now"):
        compress_and_push(original, tmp_path / "nz", draft=draft_of())
    here.heal()
    refuse_after(here, "PUT /lfs/", 3)
    with pytest.raises(NeuzipError, match="the Hub forbids this: enough"):
        compress_and_push(original, tmp_path / "nz", draft=draft_of())
    received = {f"/lfs/{oid}": len(data) for oid, data in here.objects.items()}
    assert len(received) == 3
    here.heal()
    report, pushed = compress_and_push(original, tmp_path / "nz", draft=draft_of())
    assert report.resumed_files == 5  # the first and the last of them were compressed and not sent
    assert pushed.commit == here.repositories["me/nz"].branches["main"]
    assert verify(tmp_path / "nz", original).different == []
    assert all(here.received[path] == count for path, count in received.items()), "sent twice"
    decompress(resolve_source("me/nz"), tmp_path / "restored")
    assert contents(tmp_path / "restored") == files


def refuse_after(hub: Hub, start: str, left: int) -> None:
    """Refuse requests of a kind after some of them."""
    done: list[str] = []

    def before(handler: Any) -> None:
        if f"{handler.command} {handler.path}".startswith(start):
            done.append(handler.path)
            if len(done) > left:
                raise Refusal(403, message="enough")

    hub.before = before


# Interrupted


@pytest.mark.slow
def test_a_repeated_command_goes_on_where_it_stopped(here: Hub, files: Files, tmp_path: Path):
    here.add("some/model", files)
    fail_at(here, shard(4))
    with pytest.raises(NeuzipError, match=rf"some/model: {shard(4)}: the Hub forbids this: not now"):
        stream(tmp_path / "nz")
    assert not (tmp_path / "nz").exists()
    work = work_of(tmp_path / "nz")
    assert {p.name for p in work.glob("*.safetensors")} == {shard(1), shard(2), shard(3)}
    assert list((work / SOURCE_FOLDER).rglob("*.safetensors")) == []
    names = downloads_of(here)
    report = stream(tmp_path / "nz").compression
    assert report.resumed_files == 3
    assert names == [shard(4), shard(5), shard(6), "model.safetensors"]
    compress(resolve_source("some/model"), tmp_path / "whole")
    assert contents(tmp_path / "nz") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_repeated_push_sends_nothing_again(here: Hub, files: Files, tmp_path: Path):
    here.add("some/model", files)
    fail_at(here, shard(4))
    with pytest.raises(NeuzipError, match="not now"):
        stream(tmp_path / "nz", draft=draft_of())
    assert set(here.repositories["me/nz"].tree("neuzip-draft-main")) == {
        ".gitattributes", shard(1), shard(2), shard(3)
    }  # fmt: skip
    assert set(here.repositories["me/nz"].tree()) == {".gitattributes"}
    names = downloads_of(here)
    report = stream(tmp_path / "nz", draft=draft_of())
    assert report.compression.resumed_files == 3
    assert names == [shard(4), shard(5), shard(6), "model.safetensors"]
    assert all(here.received[f"/lfs/{oid}"] == len(data) for oid, data in here.objects.items())
    assert verify(resolve_source("me/nz")).files == len(files)


@pytest.mark.slow
def test_a_container_that_the_draft_has_lost_is_made_again(here: Hub, files: Files, tmp_path: Path):
    here.add("some/model", files)
    fail_at(here, shard(4))
    with pytest.raises(NeuzipError, match="not now"):
        stream(tmp_path / "nz", draft=draft_of())
    here.heal()
    del here.repositories["me/nz"].branches["neuzip-draft-main"]
    notes: list[str] = []
    assert stream(tmp_path / "nz", draft=draft_of(), note=notes.append).compression.resumed_files == 0
    assert f"{shard(1)}: is damaged or no longer in the draft, and is made again" in notes
    verify(resolve_source("me/nz"))


@pytest.mark.slow
def test_a_damaged_container_is_made_again(here: Hub, files: Files, tmp_path: Path):
    here.add("some/model", files)
    fail_at(here, shard(4))
    with pytest.raises(NeuzipError, match="not now"):
        stream(tmp_path / "nz")
    here.heal()
    path = work_of(tmp_path / "nz") / shard(2)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert stream(tmp_path / "nz").compression.resumed_files == 2
    decompress(tmp_path / "nz", tmp_path / "restored")
    assert contents(tmp_path / "restored") == files


@pytest.mark.parametrize("push_to", [None, "me/nz"])
@pytest.mark.slow
def test_a_run_killed_in_its_last_moment_is_finished(
    here: Hub, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, push_to: str | None
):
    here.add("some/model", files)
    draft = draft_of(push_to) if push_to is not None else None
    with monkeypatch.context() as patch:
        patch.setattr(hub_job, "compression_report", killed)
        patch.setattr(hub_job, "_finish", killed)
        with pytest.raises(KeyboardInterrupt):
            stream(tmp_path / "nz", draft=draft)
    names = downloads_of(here)
    report = stream(tmp_path / "nz", draft=draft)
    assert names == []
    assert report.compression.stored_weight_bytes > 0
    if push_to is None:
        assert not (tmp_path / "nz" / STATE_PATH).exists()
        assert verify(tmp_path / "nz").files == len(files)
    else:
        assert len(here.repositories["me/nz"].commits) == 1 + len(files) - 4 + 1  # weights, and all at once
        assert verify(resolve_source("me/nz")).files == len(files)
    assert not work_of(tmp_path / "nz").exists()


@pytest.mark.slow
def test_a_damaged_result_of_a_killed_run_is_not_believed(
    here: Hub, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here.add("some/model", files)
    with monkeypatch.context() as patch:
        patch.setattr(hub_job, "_finish", killed)
        with pytest.raises(KeyboardInterrupt):
            stream(tmp_path / "nz", rules=K3)
    for name in (shard(2), "tokenizer.json", "config.json", "neuzip/original/config.json", MANIFEST_PATH):
        path = tmp_path / "nz" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] + b"?" + whole[len(whole) // 2 + 1 :])
        with pytest.raises(WouldOverwrite, match="nz: exists already"):
            stream(tmp_path / "nz", rules=K3)
        path.write_bytes(whole)
    assert stream(tmp_path / "nz", rules=K3).compression.resumed_files == SHARDS + 1


@pytest.mark.slow
def test_what_is_finished_is_known_again(here: Hub, files: Files, tmp_path: Path):
    """By the digests of what it restores to, which costs no download; what was rounded has no such proof."""
    repository = here.add("some/model", files)
    stream(tmp_path / "nz")
    before = contents(tmp_path / "nz")
    names = downloads_of(here)
    assert stream(tmp_path / "nz").compression.resumed_files == SHARDS + 1
    assert names == []
    assert contents(tmp_path / "nz") == before
    other = bytearray(files[shard(2)])
    other[-1] ^= 1
    for changed in (
        {shard(2): bytes(other)},
        {"config.json": files["config.json"].replace(b"llama", b"Llama")},
    ):
        repository.commit("main", files | changed)
        with pytest.raises(WouldOverwrite, match="nz: exists already"):
            stream(tmp_path / "nz")
    stream(tmp_path / "k3", rules=K3)
    with pytest.raises(WouldOverwrite, match="k3: exists already"):
        stream(tmp_path / "k3", rules=K3)


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_another_commit_is_another_source(here: Hub, files: Files, tmp_path: Path):
    repository = here.add("some/model", files)
    fail_at(here, shard(4))
    with pytest.raises(NeuzipError, match="not now"):
        stream(tmp_path / "nz")
    here.heal()
    before = repository.branches["main"]
    repository.commit("main", files | {"config.json": b"{}"})
    with pytest.raises(
        NeuzipError, match=rf"was begun with commit {before} of some/model, which has"
    ) as error:
        stream(tmp_path / "nz")
    assert f"some/model@{before} as `source`" in error.value.hint
    with pytest.raises(NeuzipError, match=r"was begun with other options or from another source"):
        stream(tmp_path / "nz", f"some/model@{before}", rules=K3)
    assert stream(tmp_path / "nz", f"some/model@{before}").compression.resumed_files == 3
    assert (tmp_path / "nz" / "neuzip" / "original" / "config.json").read_bytes() == files["config.json"]
    with pytest.raises(WouldOverwrite, match="nz: exists already"):
        stream(tmp_path / "nz")
    stream(tmp_path / "nz", rules=K3, overwrite=True)
    assert (tmp_path / "nz" / "neuzip" / "original" / "config.json").read_bytes() == b"{}"


@pytest.mark.slow
def test_overwrite_begins_anew(here: Hub, files: Files, tmp_path: Path):
    here.add("some/model", files)
    fail_at(here, shard(4))
    with pytest.raises(NeuzipError, match="not now"):
        stream(tmp_path / "nz", rules=K3)
    here.heal()
    assert stream(tmp_path / "nz", overwrite=True).compression.resumed_files == 0
    decompress(tmp_path / "nz", tmp_path / "restored")
    assert contents(tmp_path / "restored") == files


@pytest.mark.parametrize("push_to", [None, "me/nz"])
@pytest.mark.slow
def test_sigkill_at_any_moment(
    hub: Hub, files: Files, tmp_path: Path, push_to: str | None, file_forks: forked.Server
):
    """A process of its own, killed while bytes are on their way, down or up; the last run ends well."""
    hub.add("some/model", files)
    dst = tmp_path / "nz"
    command = [
        "neuzip", "compress", "some/model", dst, "--stream", "--jobs", "2",
        *([] if push_to is None else ["--push-to", push_to]),
    ]  # fmt: skip
    headers = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    kills = [headers + 160_000] * (1 if push_to is None else 2)  # in the third shard, and in a later one
    for allowed in (*kills, None):
        hub.heal()
        process = file_forks.start(
            *command, cwd=tmp_path, environment=hub_environment(hub.url, tmp_path / "hf")
        )
        hub.on_bytes = Killer(process.pid, allowed)
        out, err = process.communicate(timeout=600)
        assert TOKEN not in out + err
        if allowed is not None:
            assert process.returncode == -signal.SIGKILL, out + err
            assert not dst.exists()
            assert len(list((work_of(dst) / SOURCE_FOLDER).rglob("*.safetensors"))) <= 2
            if push_to is not None:
                assert set(hub.repositories["me/nz"].tree()) == {".gitattributes"}
    assert process.returncode == 0, out + err
    assert "finished already" in err
    assert not work_of(dst).exists()
    if push_to is not None:
        assert not dst.exists()
        dst.mkdir()
        for name, data in hub.repositories["me/nz"].tree().items():
            (dst / name).parent.mkdir(parents=True, exist_ok=True)
            (dst / name).write_bytes(data)
    decompress(dst, tmp_path / "restored")
    assert contents(tmp_path / "restored") == files


class Killer:
    """End a process when so many bytes of files have gone over the wire."""

    def __init__(self, pid: int, allowed: int | None) -> None:
        self.pid, self.left = pid, allowed

    def __call__(self, _: object, count: int) -> None:
        if self.left is not None:
            self.left -= count
            if self.left < 0:
                self.left = None
                os.kill(self.pid, signal.SIGKILL)


# Faults


@pytest.mark.slow
def test_wrong_bytes_are_noticed_before_anything_is_made_of_them(here: Hub, files: Files, tmp_path: Path):
    here.add("some/model", files)

    def before(handler: Any) -> None:
        if handler.path.endswith(shard(2)) and "Range" not in handler.headers:
            handler.spoil = lambda data: data[:-1] + bytes([data[-1] ^ 1])

    here.before = before
    with pytest.raises(
        VerificationError, match=rf"{shard(2)}: what came has not the digest that the Hub names"
    ):
        stream(tmp_path / "nz")
    assert not (work_of(tmp_path / "nz") / shard(2)).exists()
    here.heal()
    assert stream(tmp_path / "nz").compression.resumed_files == 1


@pytest.mark.slow
def test_a_full_disk(here: Hub, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    here.add("some/model", files)
    download = huggingface_hub.hf_hub_download

    def full(repo_id: str, name: str, **options: Any) -> str:
        if name == shard(3):
            raise OSError(errno.ENOSPC, "No space left on device")
        return download(repo_id, name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "hf_hub_download", full)
        with pytest.raises(NeuzipError, match=rf"{shard(3)}: no space left on the disk") as error:
            stream(tmp_path / "nz")
    assert error.value.hint.endswith("it goes on where it stopped")
    assert stream(tmp_path / "nz").compression.resumed_files == 2


@pytest.mark.slow
def test_what_is_sent_and_does_not_arrive_is_kept_here(here: Hub, files: Files, tmp_path: Path):
    """A repository's own .gitignore makes the Hub drop files without a word."""
    here.add("some/model", files)
    here.add("me/nz", {".gitignore": b"*.safetensors", ".gitattributes": b""})
    with pytest.raises(VerificationError, match=rf"me/nz: {shard(1)}: is not there as it was sent"):
        stream(tmp_path / "nz", draft=draft_of())
    assert (work_of(tmp_path / "nz") / shard(1)).stat().st_blocks * 512 > 30_000
    assert set(here.repositories["me/nz"].tree()) == {".gitignore", ".gitattributes"}


# What cannot be streamed


def test_only_hub_ids_are_streamed(original: Path, tmp_path: Path):
    for src in (str(original), "./a", "model", str(original / shard(1))):
        with pytest.raises(UsageError, match="`stream` takes a Hub id"):
            plan_stream(src, tmp_path / "nz")


def test_a_compressed_repository_is_not_compressed_again(here: Hub, original: Path, tmp_path: Path):
    compress(original, tmp_path / "nz")
    here.add("me/nz", contents(tmp_path / "nz"))
    with pytest.raises(NeuzipError, match="me/nz: is compressed already"):
        plan_stream("me/nz", tmp_path / "again")
    here.add("me/part", {"model.safetensors": (tmp_path / "nz" / shard(1)).read_bytes()})
    with pytest.raises(NeuzipError, match="me/part: is compressed already"):
        plan_stream("me/part", tmp_path / "again")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x00" * 7, "7 bytes are too few"),
        (b"\xff" * 2000, "its header would have"),
        ((5000).to_bytes(8, "little") + b"{}" * 20, "its header would have 5000 bytes"),
        ((2).to_bytes(8, "little") + b"{}" * 20, "has data that no tensor covers"),
    ],
)
def test_a_file_that_is_no_safetensors_is_named(here: Hub, tmp_path: Path, data: bytes, problem: str):
    here.add("some/model", {"model.safetensors": data})
    with pytest.raises(NeuzipError, match=rf"some/model: model.safetensors.*{problem}"):
        plan_stream("some/model", tmp_path / "nz")


def test_an_index_that_names_a_shard_that_is_missing(here: Hub, files: Files, tmp_path: Path):
    del files[shard(2)]
    here.add("some/model", files)
    with pytest.raises(NeuzipError, match=rf"index.json.*the shard '{shard(2)}' is missing"):
        stream(tmp_path / "nz")
    assert sent_of(here, shard(1)) < 3000


# The command


@pytest.fixture
def few(here: Hub, files: Files) -> Files:
    """A repository with one shard, and what its folder holds."""
    few = {"model.safetensors": files[shard(4)], "config.json": files["config.json"]}
    here.add("some/model", few)
    return few


@pytest.mark.slow
def test_the_command_in_all_modes(here: Hub, few: Files, tmp_path: Path, in_all_modes: Any):
    said = in_all_modes("compress", "some/model", tmp_path / "nz", "--stream", "--overwrite")
    assert "lossless: all 5 tensors, bit for bit" in said["human"].stdout
    assert "model.safetensors: " in said["human"].stderr
    assert said["json"].stderr == said["quiet"].stderr == ""
    answer = said["json"].json
    assert answer["stream"]["commit"] == here.repositories["some/model"].branches["main"]
    assert (answer["src"], answer["dst"]) == ("some/model", str(tmp_path / "nz"))
    assert said["quiet"].stdout == f"{tmp_path / 'nz'}\n"


@pytest.mark.slow
def test_the_command_pushes_in_all_modes(here: Hub, few: Files, tmp_path: Path, in_all_modes: Any):
    arguments = ["compress", "some/model", tmp_path / "nz", "--stream", "--push-to", "me/nz", "--private"]
    said = in_all_modes(*arguments, "--overwrite")
    assert f"{here.url}/me/nz in " in said["human"].stdout
    assert said["json"].json["dst"] is None
    assert said["json"].json["pushed"]["url"] == said["quiet"].stdout.strip() == f"{here.url}/me/nz"
    assert here.repositories["me/nz"].private


@pytest.mark.slow
def test_the_command_pushes_a_folder(here: Hub, original: Path, tmp_path: Path, neuzip: Any):
    said = neuzip("compress", original, tmp_path / "nz", "--push-to", "me/nz@v1")
    assert said.exit_code == 0
    assert f"pushed: {here.url}/me/nz/tree/v1\n" in said.stdout
    assert verify(tmp_path / "nz", original).different == []
    assert set(here.repositories["me/nz"].branches) == {"main", "v1"}
    said = neuzip("compress", original / shard(1), tmp_path / "x.safetensors", "--push-to", "me/x")
    assert (said.exit_code, "is a file, and repositories hold folders" in said.stderr) == (1, True)


def test_a_dry_run_downloads_headers_and_writes_nothing(
    here: Hub, few: Files, tmp_path: Path, in_all_modes: Any
):
    arguments = ["compress", "some/model", tmp_path / "nz", "--stream", "--push-to", "me/nz", "--dry-run"]
    said = in_all_modes(*arguments)
    assert list(tmp_path.iterdir()) == []
    assert set(here.repositories) == {"some/model"}
    assert sum(here.sent.values()) < 3 * 3000
    assert "on disk at a time: two weight files, at most " in said["human"].stdout
    answer = said["json"].json
    assert answer["dry_run"] is True
    assert len(answer["tensors"]) == 5
    assert answer["stream"]["most_of_source"] == int(said["quiet"].stdout) == len(few["model.safetensors"])


@pytest.mark.parametrize(
    "options",
    [[], ["--base", "me/base"], ["--stream"], ["--push-to", "me/nz"]],
    ids=lambda o: "".join(o[:1]),
)
def test_what_exists_is_refused_before_anything_is_downloaded(
    options: list[str], here: Hub, few: Files, tmp_path: Path, neuzip: Any
):
    (tmp_path / "nz").mkdir()
    (tmp_path / "nz" / "model.safetensors").write_bytes(b"mine")
    said = neuzip("compress", "some/model", tmp_path / "nz", *options)
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith(f"error: {tmp_path / 'nz'}: exists already\n")
    assert here.requests == []


def test_what_exists_is_refused_before_a_repository_is_made(
    here: Hub, original: Path, tmp_path: Path, neuzip: Any
):
    (tmp_path / "nz").mkdir()
    (tmp_path / "nz" / "model.safetensors").write_bytes(b"mine")
    said = neuzip("compress", original, tmp_path / "nz", "--push-to", "me/nz")
    assert (said.exit_code, "nz: exists already" in said.stderr) == (1, True)
    assert neuzip("compress", original, original / "nz", "--push-to", "me/nz").exit_code == 1
    assert here.repositories == {}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--stream", "--no-verify"], "--stream and --no-verify exclude each other"),
        (["--stream", "--max-kld", "0.1"], "--stream and --max-kld exclude each other"),
        (["--push-to", "me/nz", "--no-verify"], "--push-to and --no-verify exclude each other"),
        (["--push-to", "nz"], "--push-to: 'nz' has not the form owner/name or owner/name@branch"),
    ],
)
def test_options_that_exclude_each_other(neuzip: Any, tmp_path: Path, options: list[str], problem: str):
    said = neuzip("compress", "some/model", tmp_path / "nz", *options)
    assert (said.exit_code, said.stdout) == (2, "")
    assert problem in said.stderr
