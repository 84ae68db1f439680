"""Push to and pull from a Hub that runs here: nothing is lost, and every refusal says what to do."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import traceback
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import huggingface_hub
import numpy as np
import pytest
from loopback_hub import LARGE, READ_TOKEN, TOKEN, Answer, Handler, Hub, Refusal, be_the_hub, hub_environment

from neuzip.compress import Rule, Scheme, compress, decompress, verify
from neuzip.distribution import ENGINES
from neuzip.errors import FormatError, NeuzipError, UsageError, VerificationError, WouldOverwrite
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.report.evaluation import EvaluationReport
from neuzip.eval.report.rows import ReportRow
from neuzip.eval.report.tensors import TensorRow
from neuzip.formats.card.model_card import split_card
from neuzip.formats.card.text import ENDING
from neuzip.formats.container import Container
from neuzip.formats.hub.download import resolve_source
from neuzip.formats.hub.private_files import PRIVATE_KINDS, PUBLIC, private_kind
from neuzip.formats.hub.push import push
from neuzip.formats.hub.push_plan import plan_push

pytest_plugins = ["loopback_hub"]


# Checkpoints

README = """\
---
license: apache-2.0
language: [no, en]
library_name: transformers
tags: [llama, neuzip]
base_model: someone/base
model-index: [{name: x, results: []}]
---
# The original

It has a [picture](picture.png).
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, save: Callable[..., Path]) -> Path:
    """A checkpoint with the files that mean something to the Hub, and one that only LFS takes."""
    root = tmp_path_factory.mktemp("hub") / "model"
    values = (np.random.default_rng(0).standard_normal(30_000) * 0.05).astype(np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    save(root / "model-1.safetensors", {"a": ("BF16", (150, 200), bf16), "i": ("I64", (9,), np.arange(9))})
    save(root / "model-2.safetensors", {"b": ("F32", (30_000,), values)}, {"format": "pt"}, padding=3)
    weight_map = {"a": "model-1.safetensors", "i": "model-1.safetensors", "b": "model-2.safetensors"}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text('{"model_type":   "llama", "_name_or_path": "me/trained"}\n')
    (root / "tokenizer.json").write_bytes(os.urandom(LARGE))
    (root / "README.md").write_bytes(README.replace("\n", "\r\n").encode())
    (root / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    (root / ".gitignore").write_text("*.json\nmodel-2*\n")
    save(root / "vae" / "diffusion.safetensors", {"w": ("F16", (500,), values[:500].astype(np.float16))})
    (root / "vae" / "pytorch_model.bin").write_bytes(b"carried, since the original has it")
    return root


@pytest.fixture
def bare(tmp_path: Path, save: Callable[..., Path]) -> Path:
    """The smallest compressed folder: one file, no card."""
    save(tmp_path / "one" / "model.safetensors", {"w": ("F32", (3,), np.ones(3, np.float32))})
    compress(tmp_path / "one", tmp_path / "one.nz")
    return tmp_path / "one.nz"


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


# There and back


def test_an_empty_name_is_not_the_current_folder(
    neuzip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a variable of the shell that is not set: `neuzip compress "$MODEL" out`."""
    monkeypatch.chdir(tmp_path)
    for command in (("compress", "", "out"), ("verify", "", "--jobs", "1"), ("diff", tmp_path, "")):
        said = neuzip(*command)
        assert said.exit_code == 2 and said.stderr.startswith("error: the name of a checkpoint is empty\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_is_pushed_restores_to_the_original(hub: Hub, original: Path, compressed: Path, tmp_path: Path):
    """The whole way through the command line, with a Hub of its own in HF_ENDPOINT."""
    environment = hub_environment(hub.url, tmp_path / "hf")

    def neuzip(*arguments: object) -> str:
        done = subprocess.run(
            [Path(sys.executable).parent / "neuzip", *map(str, arguments)],
            check=False, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=environment,
        )  # fmt: skip
        said = done.stderr if arguments[0] != "push" else re.sub(r"\Auploading to .*\n", "", done.stderr)
        assert (done.returncode, said) == (0, ""), done.stdout + done.stderr
        assert TOKEN not in done.stdout
        return done.stdout

    before = contents(compressed)
    assert neuzip("push", compressed, "me/model", "--private").endswith(f": {hub.url}/me/model\n")
    assert contents(compressed) == before
    assert hub.repositories["me/model"].private
    assert "intact: 4 tensors" in neuzip("verify", "me/model", "--original", original)
    neuzip("decompress", "me/model", "restored")
    assert contents(tmp_path / "restored") == contents(original)


@pytest.mark.slow
def test_a_pulled_checkpoint_is_pushed_again_and_restored(
    here: Hub, original: Path, compressed: Path, tmp_path: Path
):
    push(plan_push(compressed, "me/one"))
    pulled = resolve_source("me/one")
    push(plan_push(pulled, "me/two"))
    one, two = here.repositories["me/one"].tree(), here.repositories["me/two"].tree()
    assert two.pop("README.md").decode() == one.pop("README.md").decode().replace("me/one", "me/two").replace(
        "# one", "# two"
    )
    assert one == two
    decompress(resolve_source("me/two"), tmp_path / "restored")
    assert contents(tmp_path / "restored") == contents(original)


def test_the_files_of_the_hub_make_room(here: Hub, original: Path, compressed: Path):
    """The Hub edits .gitattributes and obeys .gitignore: neither may reach a file that has a checksum."""
    push(plan_push(compressed, "me/model"))
    tree = here.repositories["me/model"].tree()
    assert b"tokenizer.json" in tree[".gitattributes"]
    assert ".gitignore" not in tree
    for name in ("README.md", ".gitattributes", ".gitignore"):
        assert tree[f"neuzip/original/{name}"] == (original / name).read_bytes()
    assert set(contents(compressed)) - {".gitignore"} <= set(tree)


def test_a_folder_without_a_card_gets_one(here: Hub, bare: Path, tmp_path: Path):
    push(plan_push(bare, "me/bare"))
    pulled = resolve_source("me/bare")
    assert {p.name for p in pulled.iterdir()} == {
        ".gitattributes",
        "README.md",
        "model.safetensors",
        "neuzip",
    }
    assert verify(pulled).files == 1
    decompress(pulled, tmp_path / "restored")
    assert contents(tmp_path / "restored") == contents(tmp_path / "one")


def test_a_plain_checkpoint_is_compressed_from_the_hub(here: Hub, tmp_path: Path, original: Path):
    files = contents(original)
    extra = {"onnx/model.onnx": b"x" * 2000, "pytorch_model-1.bin": b"y" * 1000}
    here.add("some.one/Model_1", files | extra)
    notes: list[str] = []
    path = resolve_source("some.one/Model_1", note=notes.append)
    assert notes == [
        "some.one/Model_1: left out 3,034 bytes of weights in other formats: "
        "vae/pytorch_model.bin, onnx/model.onnx, pytorch_model-1.bin"
    ]
    del files["vae/pytorch_model.bin"]
    assert contents(path) == files
    compress(path, tmp_path / "small")
    decompress(tmp_path / "small", tmp_path / "restored")
    assert contents(tmp_path / "restored") == files


@pytest.mark.slow
def test_a_revision_is_pushed_and_pulled(here: Hub, compressed: Path):
    pushed = push(plan_push(compressed, "me/model", revision="v1/final"), message="First")
    assert pushed.url == f"{here.url}/me/model/tree/v1%2Ffinal"
    repository = here.repositories["me/model"]
    assert set(repository.tree()) == {".gitattributes"}
    assert b"neuzip decompress me/model@v1/final DST" in repository.tree("v1/final")["README.md"]
    for wanted in ("v1/final", pushed.commit):
        assert len(verify(resolve_source(f"me/model@{wanted}")).tensors) == 4
    with pytest.raises(NeuzipError, match=r"me/model: the repository has no \.safetensors files"):
        resolve_source("me/model")


@pytest.mark.slow
def test_a_new_branch_takes_a_checkpoint_beside_that_of_main(here: Hub, bare: Path, compressed: Path):
    push(plan_push(compressed, "me/model"))
    main = here.repositories["me/model"].branches["main"]
    pushed = push(plan_push(bare, "me/model", revision="tiny"))
    assert "vae/diffusion.safetensors" in pushed.deleted
    assert len(verify(resolve_source("me/model@tiny")).tensors) == 1
    assert here.repositories["me/model"].branches["main"] == main
    with pytest.raises(WouldOverwrite, match=r"me/model: holds a checkpoint already"):
        push(plan_push(compressed, "me/model", revision="tiny"))


@pytest.mark.slow
def test_a_push_that_is_repeated_has_nothing_to_do(here: Hub, compressed: Path, neuzip):
    """As after a kill in its last moment."""
    first = neuzip("push", compressed, "me/model", "--json").json
    here.requests.clear()
    again = neuzip("push", compressed, "me/model")
    assert again.stderr.endswith("\nall files are on the Hub already\n")
    assert not [r for r in here.requests if r.startswith("PUT") or "/commit/" in r]
    second = neuzip("push", compressed, "me/model", "--json").json
    assert (first["was_there"], second["was_there"]) == (False, True)
    assert second["commit"] == first["commit"]
    repository = here.repositories["me/model"]
    repository.commit("main", repository.tree() | {"README.md": repository.tree()["README.md"] + b"."})
    assert "holds a checkpoint already" in neuzip("push", compressed, "me/model").stderr


@pytest.mark.slow
def test_a_new_branch_is_made_when_the_weights_are_there(here: Hub, bare: Path, compressed: Path, neuzip):
    """Until its commit a branch shows the checkpoint of main: that must not be for hours."""
    push(plan_push(bare, "me/model"))
    here.requests.clear()
    here.before = failing_once("POST .*/commit/v2")
    assert "Not now" in neuzip("push", compressed, "me/model", "--revision", "v2").stderr
    made = here.requests.index("POST /api/models/me/model/branch/v2")
    assert max(i for i, r in enumerate(here.requests) if r.startswith("PUT")) < made
    here.requests.clear()
    assert neuzip("push", compressed, "me/model", "--revision", "v2").exit_code == 0
    assert not [r for r in here.requests if r.startswith("PUT")], "the weights had arrived"
    assert len(verify(resolve_source("me/model@v2")).tensors) == 4


def failing_once(command: str) -> Callable[[Handler], None]:
    left = [Refusal(403, message="Not now")]

    def before(handler: Handler) -> None:
        if left and re.match(command, f"{handler.command} {handler.path}"):
            raise left.pop()

    return before


@pytest.mark.slow
def test_a_copy_in_the_cache_stands_in_for_a_lost_connection(
    here: Hub, compressed: Path, monkeypatch: pytest.MonkeyPatch
):
    push(plan_push(compressed, "me/model"))
    first = resolve_source("me/model")
    be_the_hub("http://127.0.0.1:9", monkeypatch)
    notes: list[str] = []
    assert resolve_source("me/model", note=notes.append) == first
    assert notes == ["me/model: the Hub cannot be reached; taken from the cache"]


def test_a_full_cache_is_named(here: Hub, compressed: Path, monkeypatch: pytest.MonkeyPatch):
    push(plan_push(compressed, "me/model"))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(NeuzipError, match="the cache of the Hub cannot be written: No space left") as told:
        resolve_source("me/model")
    assert told.value.message.startswith(huggingface_hub.constants.HF_HUB_CACHE)
    assert "HF_HUB_CACHE" in told.value.hint


@pytest.mark.slow
def test_wrong_bytes_do_not_stay_in_the_cache(here: Hub, compressed: Path, tmp_path: Path, neuzip):
    """They would come out of it for ever: huggingface_hub compares sizes only."""

    def before(handler: Handler) -> None:
        if handler.path.endswith("/model-1.safetensors"):
            handler.spoil = lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]

    push(plan_push(compressed, "me/model"))
    here.before = before
    said = neuzip("decompress", "me/model", tmp_path / "restored")
    assert said.exit_code == 1
    assert "files did not arrive as they are on the Hub: model-1.safetensors\nhint: repeat" in said.stderr
    here.heal()
    here.requests.clear()
    assert neuzip("decompress", "me/model", tmp_path / "restored").exit_code == 0
    assert sum(r.startswith("GET") and "/resolve/" in r for r in here.requests) == 1


# What is a Hub id


@pytest.mark.parametrize(
    "src",
    [
        "gpt2",
        "./a/b",
        "a/b/c",
        "/a/b",
        "a/",
        "a/model.safetensors",
        "../a",
        "a b/c",
        "a/b@",
        "a/b@v\n",
        "~/a",
    ],
)
def test_what_has_not_the_form_of_an_id_is_a_path(src: str, hub: Hub):
    assert resolve_source(src) == Path(src)
    assert not hub.requests


def test_what_exists_is_a_path(here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here.add("me/model", {"model.safetensors": b""})
    (tmp_path / "me").mkdir()
    (tmp_path / "me" / "model").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    assert resolve_source("me/model") == Path("me/model")
    assert not here.requests


# Refusals


def unreachable(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    be_the_hub("http://user:secret@127.0.0.1:9", monkeypatch)


def offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def token(value: str | None) -> Callable[[Hub, pytest.MonkeyPatch], None]:
    def set_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_TOKEN")
        if value is not None:
            monkeypatch.setenv("HF_TOKEN", value)

    return set_token


def failing(command: str, *refusal: Any) -> Callable[[Hub, pytest.MonkeyPatch], None]:
    def install(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        def before(handler: Handler) -> None:
            if re.match(command, f"{handler.command} {handler.path}"):
                raise Refusal(*refusal)

        hub.before = before

    return install


def nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


REFUSED_SOURCES = {
    "no such repository": (
        "me/typo", nothing,
        "me/typo: there is no such folder here, and the Hub has no such repository, or it is private",
        "check the spelling; log in with `hf auth login`, or set HF_TOKEN",
    ),
    "private, without a token": (
        "me/private", token(None),
        "me/private: there is no such folder here, and the Hub has no such repository, or it is private",
        "check the spelling; log in with `hf auth login`, or set HF_TOKEN",
    ),
    "gated": (
        "me/gated", nothing,
        "me/gated: the repository is gated, and this account has no access",
        "ask for it at URL/me/gated; log in with `hf auth login`, or set HF_TOKEN",
    ),
    "no such revision": (
        "me/plain@v2", nothing,
        "me/plain@v2: the repository has no such revision",
        "its branches and tags: URL/me/plain/tree/main",
    ),
    "a wrong token": (
        "me/plain", token("hf_wrong"),
        "me/plain: the Hub does not accept the access token: Invalid credentials in Authorization header",
        "log in with `hf auth login`, or set HF_TOKEN",
    ),
    "a token that is none": (
        "me/plain", token("hf_wr\x01ong"),
        "the access token for the Hub has characters that no token has",
        "log in with `hf auth login`, or set HF_TOKEN",
    ),
    "unreachable": (
        "me/plain", unreachable,
        "me/plain: there is no such folder here, and the Hub at http://127.0.0.1:9 cannot be reached (",
        "check the connection, and HF_ENDPOINT if it is set",
    ),
    "offline": (
        "me/plain", offline,
        "me/plain: there is no such folder here, and HF_HUB_OFFLINE forbids to ask the Hub",
        "unset it, or give a folder",
    ),
    "out of order": (
        "me/plain", failing("GET", 503, "", "Back soon"),
        "me/plain: the Hub is overloaded or out of order (503): Back soon",
        "try again later",
    ),
    "no download": (
        "me/plain", failing("HEAD", 404, "EntryNotFound", "gone"),
        "me/plain: the Hub refuses this (404): gone",
        "",
    ),
    "an id that the Hub does not accept": (
        "me/a--b", nothing,
        "me/a--b: is no id that the Hub accepts",
        "an id has the form owner/name",
    ),
    "pickles only": (
        "me/pickles", nothing,
        "me/pickles: the repository has no .safetensors files, only pickles, which can run code",
        "load the model with transformers where you trust it: save_pretrained writes safetensors",
    ),
    "no weights": (
        "me/empty", nothing, "me/empty: the repository has no .safetensors files", "is this the right one?",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("src", "prepare", "message", "hint"), REFUSED_SOURCES.values(), ids=REFUSED_SOURCES.keys()
)
def test_a_source_that_cannot_be_had(
    src: str, prepare: Any, message: str, hint: str, here: Hub, neuzip: Any, monkeypatch: pytest.MonkeyPatch
):
    here.add("me/plain", {"model.safetensors": b""})
    here.add("me/private", {"model.safetensors": b""}, private=True)
    here.add("me/gated", {"model.safetensors": b""}, gated=True)
    here.add("me/pickles", {"pytorch_model.bin": b""})
    here.add("me/empty", {".gitattributes": b""})
    prepare(here, monkeypatch)
    said = neuzip("verify", src)
    assert (said.exit_code, said.stdout) == (1, "")
    assert f"error: {message}" in said.stderr
    assert (f"hint: {hint.replace('URL', here.url)}\n" if hint else "") in said.stderr
    for secret in (TOKEN, "hf_wr", "secret"):
        assert secret not in said.stderr


ODD_ANSWERS: dict[str, Any] = {
    "no id": {"sha": "0" * 40}, "a list": [1, 2], "a text": "hello", "null": None,
    "siblings of numbers": {"id": "org/m", "sha": "0" * 40, "siblings": [5]},
    "a size of text": {"id": "org/m", "sha": "0" * 40, "siblings": [{"rfilename": "a", "size": "x"}]},
    "a commit of numbers": {"id": "org/m", "sha": 7, "siblings": []},
    "no digest": {"id": "org/m", "sha": "0" * 40, "siblings": [{"rfilename": "a", "lfs": {"size": 1}}]},
}  # fmt: skip


@pytest.mark.parametrize("command", ["pull", "push", "inspect", "compress"])
def test_another_server_is_no_bug(command: str, here: Hub, bare: Path, tmp_path: Path, neuzip):
    """200 with JSON that the Hub would not send: a captive portal, or a wrong HF_ENDPOINT."""
    arguments: dict[str, list[Any]] = {
        "pull": ["org/m", tmp_path / "x"], "push": [bare, "org/m"], "inspect": ["org/m"],
        "compress": ["org/m", tmp_path / "x", "--stream"],
    }  # fmt: skip
    for name, answer in ODD_ANSWERS.items() if command == "pull" else [("no id", {})]:

        def before(_: Handler, answer: Any = answer) -> None:
            raise Answer(answer)

        here.before = before
        said = neuzip(command, *arguments[command])
        assert (said.exit_code, said.stdout) == (1, ""), name
        assert f"the Hub at {here.url} does not answer as the Hub does\nhint: try again later" in said.stderr

    def conflict(_: Handler) -> None:
        raise Refusal(409, message="there is one")

    here.before = conflict
    assert neuzip(command, *arguments[command]).exit_code == 1


@pytest.mark.parametrize("status", [200, 400, 401, 403, 409])
def test_no_password_is_shown(status: int, here: Hub, bare: Path, tmp_path: Path, monkeypatch, neuzip):
    """Neither that of the endpoint nor a proxy's, in any form that a server may quote, in no traceback."""
    name, password = "ann", "p@ss/w rd"
    forms = [f"{name}:{password}", password, quote(password, ""), quote(f"{name}:{password}", "")]
    forms += [encode(forms[0].encode()).decode() for encode in (b64encode, urlsafe_b64encode)]
    quoted = " ".join([*forms, b64encode(b"bob:proxy?secret").decode(), "proxy?secret", TOKEN])

    def before(handler: Handler) -> None:
        if status == 200:
            raise Answer({"error": quoted})
        raise Refusal(status, message=quoted)

    here.before = before
    address = f"http://{name}:{quote(password, '')}@127.0.0.1:{here.server_port}"
    be_the_hub(address, monkeypatch)
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("https_proxy", "bob:proxy%3Fsecret@127.0.0.1:9")
    for command in (["pull", "org/m", tmp_path / "x"], ["push", bare, "me/x"]):
        for debug in ("", "1"):
            monkeypatch.setenv("NEUZIP_DEBUG", debug)
            said = neuzip(*command)
            assert said.exit_code == 1
            for secret in (*forms, *quoted.split(" ")[-3:], "%40ss"):
                assert secret.rstrip("=") not in said.stderr
    with pytest.raises(NeuzipError) as error:
        resolve_source("org/m")
    shown = "".join(traceback.format_exception(error.value))
    assert [secret for secret in forms if secret in shown] == []


def test_a_repository_cannot_write_outside_its_folder(here: Hub, tmp_path: Path):
    here.add("me/evil", {"model.safetensors": b"", "../../evil": b"x"})
    with pytest.raises(FormatError, match=r"me/evil: '../../evil' is not a path inside the folder"):
        resolve_source("me/evil")
    assert not (tmp_path / "cache").exists()


REFUSED_PUSHES = {
    "no token": (
        token(None), "there is no access token for the Hub", "log in with `hf auth login`, or set HF_TOKEN"
    ),
    "a token that is none": (
        token("hf_\x01\x02"), "the access token for the Hub has characters that no token has",
        "log in with `hf auth login`, or set HF_TOKEN",
    ),
    "a wrong token": (
        token("hf_wrong"), "me/bare: the Hub does not accept the access token: No write access with ***",
        "log in with `hf auth login`, or set HF_TOKEN",
    ),
    "a token that may only read": (
        token(READ_TOKEN), "me/bare: the Hub forbids this: No write access with ***",
        "the access token needs the right to do it; `hf auth whoami` tells whose it is",
    ),
    "unreachable": (
        unreachable, "me/bare: the Hub at http://127.0.0.1:9 cannot be reached (",
        "check the connection, and HF_ENDPOINT if it is set",
    ),
    "changed meanwhile": (
        failing("POST .*/commit/", 412, "", "A commit has happened since"),
        "me/bare: the repository has changed meanwhile: A commit has happened since", "repeat the command",
    ),
    "an upload that fails": (
        failing("PUT /lfs/", 403, "", "Request has expired"),
        "me/bare: the Hub forbids this: Request has expired",
        "the access token needs the right to do it; `hf auth whoami` tells whose it is",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("prepare", "message", "hint"), REFUSED_PUSHES.values(), ids=REFUSED_PUSHES.keys())
def test_a_push_that_the_hub_refuses(
    prepare: Any, message: str, hint: str, here: Hub, bare: Path, neuzip: Any, monkeypatch: pytest.MonkeyPatch
):
    (bare / "notes.bin").write_bytes(os.urandom(LARGE))
    prepare(here, monkeypatch)
    said = neuzip("push", bare, "me/bare")
    assert (said.exit_code, said.stdout) == (1, "")
    assert f"error: {message}" in said.stderr
    assert said.stderr.endswith(f"\nhint: {hint}\n")
    for secret in (TOKEN, READ_TOKEN, "hf_wrong", "secret"):
        assert secret not in said.stderr
    assert all(set(r.tree()) == {".gitattributes"} for r in here.repositories.values())


def test_a_card_that_the_hub_refuses(here: Hub, bare: Path):
    (bare / "README.md").write_text("---\nlicense: none-such\n---\n")
    with pytest.raises(NeuzipError, match=r'me/bare: Invalid metadata in README.md. - "license" must be'):
        push(plan_push(bare, "me/bare"))


def test_nothing_is_pushed_that_does_not_verify(here: Hub, bare: Path, neuzip):
    plan = json.loads((bare / "neuzip" / "manifest.json").read_bytes())
    (bare / "config.json").write_text("{}")
    plan["files"]["config.json"] = {"kind": "carried", "bytes": 2, "checksum": "0" * 16}
    (bare / "neuzip" / "manifest.json").write_text(json.dumps(plan))
    said = neuzip("push", bare, "me/bare")
    assert (said.exit_code, said.stdout) == (1, "")
    assert "config.json: does not have the checksum" in said.stderr
    assert not here.requests


def test_no_tensor_is_pushed_that_does_not_decode(here: Hub, bare: Path, neuzip):
    data = bytearray((bare / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header + 1] ^= 1
    (bare / "model.safetensors").write_bytes(data)
    for arguments in ([], ["--dry-run"]):
        said = neuzip("push", bare, "me/bare", *arguments)
        assert (said.exit_code, said.stdout) == (1, "")
        assert "model.safetensors" in said.stderr
    assert not here.requests


def test_only_a_compressed_folder_is_pushed(original: Path, compressed: Path):
    with pytest.raises(NeuzipError, match="is not a folder that neuzip compressed"):
        plan_push(original, "me/model")
    with pytest.raises(NeuzipError, match="is not a folder that neuzip compressed"):
        plan_push(compressed / "model-1.safetensors", "me/model")


@pytest.mark.parametrize("repo_id", ["model", "a/b/c", "me/model@v1", "-a/b", ""])
def test_a_repository_has_an_owner_and_a_name(repo_id: str, compressed: Path):
    with pytest.raises(UsageError, match="has not the form owner/name"):
        plan_push(compressed, repo_id)


def test_a_public_repository_is_not_taken_for_a_private_one(here: Hub, bare: Path):
    here.add("me/bare", {})
    with pytest.raises(NeuzipError, match="me/bare: is there already, and is public"):
        push(plan_push(bare, "me/bare"), private=True)
    assert here.repositories["me/bare"].tree() == {}


@pytest.mark.slow
def test_a_checkpoint_is_replaced_only_when_asked_for(here: Hub, bare: Path, neuzip):
    older = {
        "model-1.safetensors": b"1", "model.safetensors": b"2", "model.safetensors.index.json": b"{}",
        "neuzip/original/config.json": b"{}", "picture.png": b"3", ".gitattributes": b"",
    }  # fmt: skip
    here.add("me/bare", older)
    with pytest.raises(
        WouldOverwrite, match=r"me/bare: holds a checkpoint already, with model-1.safetensors"
    ):
        push(plan_push(bare, "me/bare"))
    assert here.repositories["me/bare"].tree() == older
    said = neuzip("push", bare, "me/bare", "--overwrite", "--json").json
    assert said["deleted"] == [
        "model-1.safetensors", "model.safetensors.index.json", "neuzip/original/config.json"
    ]  # fmt: skip
    assert set(here.repositories["me/bare"].tree()) == {
        ".gitattributes", "README.md", "model.safetensors", "neuzip/manifest.json", "neuzip/plan.json",
        "picture.png",
    }  # fmt: skip
    verify(resolve_source("me/bare"))


def test_what_did_not_arrive_is_noticed(here: Hub, bare: Path):
    """A repository's own .gitignore makes the Hub drop files without a word."""
    here.add("me/bare", {".gitignore": b"*.safetensors", ".gitattributes": b""})
    with pytest.raises(VerificationError, match=r"1 of 4 files are not there as they were sent: model.safe"):
        push(plan_push(bare, "me/bare"))


def test_the_hub_takes_no_caches(bare: Path):
    (bare / ".cache" / "mine").mkdir(parents=True)
    (bare / ".cache" / "mine" / "x").write_text("")
    with pytest.raises(NeuzipError, match=r"the Hub takes no files from folders named \.cache"):
        plan_push(bare, "me/bare")


# The command


def test_a_dry_run_shows_everything_and_touches_nothing(
    here: Hub, compressed: Path, in_all_modes, monkeypatch
):
    monkeypatch.delenv("HF_TOKEN")
    before = contents(compressed)
    said = in_all_modes("push", compressed, "me/model", "--dry-run")
    assert contents(compressed) == before
    assert not here.requests
    plan = plan_push(compressed, "me/model")
    answer = said["json"].json
    assert answer["card"] == plan.card
    assert answer["files"] == [{"path": f.path, "bytes": f.nbytes} for f in plan.files]
    assert answer["commit"] is None
    assert said["quiet"].stdout == f"{here.url}/me/model\n"
    assert plan.card.splitlines()[-1] in said["human"].stdout
    assert f"would go to {here.url}/me/model" in said["human"].stdout


@pytest.mark.parametrize(
    "path",
    [
        ".env", "deploy/.env.prod", "prod.env", "server.pem", "a/KEY.PEM", "tls.key", "id_rsa",
        "keys/id_ed25519", ".netrc", ".aws/config", ".ssh/known_hosts", "aws/credentials",
        "service-account-7.json", ".git-credentials", ".npmrc", ".pypirc", "token", ".bash_history",
        ".huggingface/stored_tokens",
        "wandb/run-1/files/output", "runs/events.out.tfevents.17.host", "train.log", "nohup.out",
        ".ipynb_checkpoints/x-checkpoint.ipynb", "wandb/settings.py",
    ],
)  # fmt: skip
def test_what_looks_private(path: str):
    assert private_kind(path) is not None


@pytest.mark.parametrize(
    "path",
    [
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
        "added_tokens.json", "tokens.txt", "vocab.txt", "merges.txt", "config.json", "generation_config.json",
        "model.safetensors.index.json", "README.md", "LICENSE", ".gitattributes", ".gitignore",
        "modeling_llama.py", "token.py", "env.py", "chat_template.jinja", "trainer_state.json", "key.json",
        "id2label.json", "id_to_token.json", ".env.example", "id_rsa.pub", "text_encoder/config.json",
        "neuzip/manifest.json", "neuzip/original/config.json", "neuzip/plan.json", "environment.yml",
        "preprocessor_config.json", "keys/model.json", "credentials_of_authors.md", "history.json",
    ],
)  # fmt: skip
def test_what_does_not_look_private(path: str):
    assert private_kind(path) is None


def test_the_page_on_the_hub_has_the_table_of_private_files(root: Path):
    page = (root / "docs" / "how-to" / "hub.md").read_text(encoding="utf-8")
    for kind in PRIVATE_KINDS:
        row = next(line for line in page.splitlines() if line.startswith(f"| {kind.name} |"))
        names = re.findall(r"`([^`]+)`", row)
        assert names == [*kind.files, *(f"{folder}/" for folder in kind.folders)]
    assert all(f"`{glob}`" in page for glob in PUBLIC)


@pytest.mark.slow
def test_private_files_are_pushed_only_when_allowed(
    here: Hub, original: Path, tmp_path: Path, save: Callable[..., Path], neuzip
):
    one = save(tmp_path / "one" / "model.safetensors", {"w": ("F32", (3,), np.ones(3, np.float32))}).parent
    (one / "deploy").mkdir()
    (one / "deploy" / ".env").write_text("HF_TOKEN=x")
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("private")
    (one / "notes.txt").symlink_to(tmp_path / ".ssh" / "config")
    nz = tmp_path / "one.nz"
    assert neuzip("compress", one, nz, "--dry-run", "--json").json["private_files"] == [
        "deploy/.env", "notes.txt",
    ]  # fmt: skip
    said = neuzip("compress", one, nz, "--json")
    assert said.json["private_files"] == ["deploy/.env", "notes.txt"]
    assert "warning: looks private, and is carried along: passwords and tokens: deploy/.env\n" in said.stderr
    assert "warning: looks private, and is carried along: keys: notes.txt\n" in said.stderr
    assert (nz / "deploy" / ".env").read_text() == "HF_TOKEN=x"

    shown = neuzip("push", nz, "me/one", "--dry-run")
    assert (shown.exit_code, "so push would refuse: passwords" in shown.stderr) == (0, True)
    for refused in (
        neuzip("push", nz, "me/one"),
        neuzip("compress", one, tmp_path / "two.nz", "--push-to", "me/one"),
    ):
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "private and would be uploaded: " in refused.stderr
        assert "deploy/.env" in refused.stderr
        assert "or give --allow-private-files if they may be seen" in refused.stderr
    with pytest.raises(NeuzipError, match="looks private"):
        push(plan_push(nz, "me/one"))
    assert (here.repositories, here.requests, (tmp_path / "two.nz").exists()) == ({}, [], False)

    sent = neuzip("push", nz, "me/one", "--allow-private-files")
    assert sent.exit_code == 0
    assert "uploading to me/one: README.md, deploy/.env, model" in sent.stderr
    assert here.repositories["me/one"].tree()["deploy/.env"] == b"HF_TOKEN=x"
    sent = neuzip("compress", one, tmp_path / "two.nz", "--push-to", "me/two", "--allow-private-files")
    assert sent.exit_code == 0
    assert "these files go to me/two: model.safetensors, deploy/.env, notes.txt\n" in sent.stderr
    assert neuzip("compress", one, tmp_path / "x", "--allow-private-files").exit_code == 2
    here.add("some/model", {"model.safetensors": (one / "model.safetensors").read_bytes(), "token": b"x"})
    said = neuzip("compress", "some/model", tmp_path / "s", "--stream", "--push-to", "me/s")
    assert (said.exit_code, "looks private and would be uploaded: " in said.stderr) == (1, True)
    assert "me/s" not in here.repositories


def test_json_has_the_same_keys_when_it_is_done(here: Hub, bare: Path, neuzip):
    planned = neuzip("push", bare, "me/bare", "--dry-run", "--json").json
    said = neuzip("push", bare, "me/bare", "--json")
    done = said.json
    assert list(planned) == list(done)
    assert done["commit"] == here.repositories["me/bare"].branches["main"]
    assert said.stderr == ""


# The card


def test_the_card_carries_on_the_original_and_its_licence(compressed: Path):
    card = plan_push(compressed, "me/model").card
    metadata, text = split_card(card)
    assert metadata == {
        "license": "apache-2.0",
        "language": ["no", "en"],
        "base_model": "someone/base",
        "library_name": "neuzip",
        "tags": ["neuzip", "lossless", "transformers", "llama"],
    }
    ours, theirs = text.split(ENDING)
    assert theirs.replace("\r\n", "\n").endswith(
        "---\n\n# The original\n\nIt has a [picture](picture.png).\n"
    )
    assert "identical to the original" in ours
    assert "neuzip decompress me/model DST\n" in ours
    assert "neuzip verify me/model\n" in ours


def test_the_figures_of_the_card_are_those_of_the_files(original: Path, compressed: Path):
    card = plan_push(compressed, "me/model").card
    before = sum(p.stat().st_size for p in original.rglob("*.safetensors"))
    after = sum(p.stat().st_size for p in compressed.rglob("*.safetensors"))
    total = (
        f"| 3 weight files | {before / 1000:.2f} kB | {after / 1000:.2f} kB | {100 * after / before:.2f} % "
        f"| {8 * after / 60_509:.2f} |"
    )
    assert total in card.splitlines()
    assert re.search(r"\| BF16, lossless: 1 tensor \| 60\.00 kB \| 4\d\.\d\d kB \|", card)
    assert "| I64, stored unchanged: 1 tensor | 72 bytes | 72 bytes | 100.00 % | 64.00 |" in card


@pytest.mark.parametrize(
    ("file", "document", "shown", "absent"),
    [
        (
            "config.json", {"architectures": ["LlamaForCausalLM"]},
            ["    vllm serve me/model", "    python -m sglang.launch_server --model-path me/model",
             f"With vLLM ({ENGINES['vllm'].versions}):", f"With SGLang ({ENGINES['sglang'].versions}):"],
            "diffusers",
        ),
        (
            "config.json",
            {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "fp8"}},
            ["    python -m sglang.launch_server --model-path me/model"],
            "vLLM",
        ),
        ("config.json", {"architectures": ["BertModel"]}, ["## Loading the model"], "vllm"),
        ("config.json", {"architectures": [3, "x"]}, ["## Loading the model"], "vllm"),
        ("config.json", {"architectures": "x"}, ["## Loading the model"], "vllm"),
        (
            "model_index.json", {"_class_name": "StableDiffusionPipeline"},
            ['    pipeline = DiffusionPipeline.from_pretrained("me/model")'],
            "vllm",
        ),
    ],
)  # fmt: skip
def test_the_card_shows_how_to_serve_the_model(
    file: str, document: Any, shown: list[str], absent: str, save: Callable[..., Path], tmp_path: Path
):
    root = tmp_path / "model"
    save(root / "model.safetensors", {"i": ("I64", (9,), np.arange(9))})
    (root / file).write_text(json.dumps(document))
    compress(root, tmp_path / "nz", jobs=1)
    card = plan_push(tmp_path / "nz", "me/model").card
    assert set(shown) <= set(card.splitlines())
    assert absent not in card


def test_the_card_of_a_lossy_checkpoint_names_the_loss(original: Path, tmp_path: Path):
    compress(
        original, tmp_path / "lossy", [Rule("a", Scheme("truncated", 3, 512)), Rule("*", Scheme("lossless"))]
    )
    plan = plan_push(tmp_path / "lossy", "me/model")
    loss = json.loads(next(f.content for f in plan.files if f.path == "neuzip/manifest.json"))  # type: ignore[arg-type]
    assert loss["files"]["README.md"]["kind"] == "rewritten"
    assert split_card(plan.card)[0]["tags"][:2] == ["neuzip", "lossy"]
    assert "with loss. neuzip rounded the mantissas of 1 of its 4\ntensors." in plan.card
    row = re.search(r"\| `a` \| 3 mantissa bits in blocks of 512 \| (0\.\d+) \| (0\.\d+) \|", plan.card)
    assert row is not None
    assert 0 < float(row[2]) < float(row[1]) < 0.2
    assert f"at most {float(row[1]):.3g}." in plan.card


def evaluated(folder: Path) -> EvaluationReport:
    """A report as `neuzip eval` makes it, with figures of the tests."""
    rows = []
    for path in sorted(folder.rglob("*.safetensors")):
        with Container(path) as container:
            for i in container.original.in_file_order:
                stored = container.stored_bytes(i.name)
                rows.append(TensorRow(i.name, i.dtype, i.shape, "lossless", i.nbytes, stored))
    how = "windows of 256 predictions, no overlap; 4,000 tokens; ± over 18 windows"
    return EvaluationReport(
        title=folder.name,
        command="neuzip eval small --original model --text demo --report eval.json",
        versions={"neuzip": "0.1", "torch": "2.13.0"},
        base="model",
        setting={"text": "demo (Python 3.11.7), 5 documents", "computed": "in float32 on cpu"},
        perplexity=(
            ReportRow("token-level perplexity", Estimate(27.797, 1.646), Estimate(27.7635, 1.6308), how),
            ReportRow("word|level `x`\n<b>", Estimate(1709.9, 523.3), Estimate(1704.19, 524.4), how),
        ),
        divergence=(
            ReportRow("mean KLD", Estimate(0.0090914, 0.00045452), None, "KL(original || this)", "nats"),
            ReportRow("median KLD", Estimate(0.006548, None), None, "of single tokens", "nats"),
        ),
        blocks="18 windows of 3 documents",
        tensors=tuple(rows),
        stored_bytes=sum(p.stat().st_size for p in folder.rglob("*.safetensors")),
    )


def test_the_card_tells_the_last_evaluation_with_its_conventions(
    here: Hub, compressed: Path, tmp_path: Path, neuzip
):
    report = tmp_path / "eval.json"
    report.write_text(json.dumps(evaluated(compressed).to_json()))
    card = neuzip("push", compressed, "me/model", "--evaluation", report, "--json").json["card"]
    assert here.repositories["me/model"].tree()["README.md"].decode() == card
    how = "windows of 256 predictions, no overlap; 4,000 tokens; ± over 18 windows"
    for line in (
        "text: demo (Python 3.11.7), 5 documents; computed: in float32 on cpu.",
        "With neuzip 0.1, torch 2.13.0.",
        f"| token-level perplexity | 27.76 ± 1.63 | 27.80 ± 1.65 | {how} |",
        f"| word\\|level \\`x\\` \\<b\\> | 1,704 ± 524 | 1,710 ± 523 | {how} |",
        "| mean KLD | | 0.009091 ± 0.000455 nats | KL(original \\|\\| this) |",
        "    neuzip eval small --original model --text demo --report eval.json",
    ):
        assert line in card.splitlines()
    assert "± is one standard error, for KL divergences over 18 windows of 3 documents." in card
    assert "median" not in card
    assert "## Evaluation" not in plan_push(compressed, "me/model").card


def test_an_evaluation_of_another_checkpoint_is_refused(compressed: Path, bare: Path, tmp_path: Path, neuzip):
    report = tmp_path / "eval.json"
    report.write_text(json.dumps(evaluated(bare).to_json()))
    said = neuzip("push", compressed, "me/model", "--evaluation", report, "--dry-run")
    assert (said.exit_code, said.stdout) == (1, "")
    assert (
        f"error: {report}: is of another checkpoint than {compressed}: its tensors are not st" in said.stderr
    )
    same_size = dict(evaluated(compressed).to_json())
    same_size["tensors"] = [dict(t, stored_bytes=t["stored_bytes"] + 1) for t in same_size["tensors"]]
    report.write_text(json.dumps(same_size))
    assert (
        "is of another" in neuzip("push", compressed, "me/model", "--evaluation", report, "--dry-run").stderr
    )


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"schema": 1, "perplexity": 3}', '{"schema": 2, "perplexity": []}', "\x00", None],
)
def test_what_is_no_report_is_refused(text: str | None, compressed: Path, tmp_path: Path, neuzip):
    report = tmp_path / "eval.json"
    if text is not None:
        report.write_text(text)
    said = neuzip("push", compressed, "me/model", "--evaluation", report, "--dry-run")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith(f"error: {report}: ")


def test_the_base_model_may_come_from_the_config(tmp_path: Path, save):
    save(tmp_path / "one" / "model.safetensors", {"w": ("F32", (3,), np.ones(3, np.float32))})
    for name, known in {"me/trained": True, "../local": False, "a b/c": False}.items():
        (tmp_path / "one" / "config.json").write_text(json.dumps({"_name_or_path": name}))
        compress(tmp_path / "one", tmp_path / "nz", overwrite=True)
        card = plan_push(tmp_path / "nz", "me/model").card
        assert split_card(card)[0].get("base_model") == (name if known else None)
        assert (f"Base model: `{name}`\n" in card) == known


@pytest.mark.parametrize(
    ("card", "metadata", "text"),
    [
        ("", {}, ""),
        ("# no metadata\n---\na: b\n---\n", {}, "# no metadata\n---\na: b\n---\n"),
        ("---\n---\ntext", {}, "text"),
        ("---\nlicense: mit\n---", {"license": "mit"}, ""),
        ("---\nbroken: [\n---\ntext", {}, "text"),
        ("---\n- a list\n---\ntext", {}, "text"),
        ("---\na: {b: c}\ntags: [x, {y: z}]\nempty:\n---\ntext", {}, "text"),
        ("---\na: &x [" + "[" * 9000 + "\n---\ntext", {}, "text"),
        ("---\r\nlicense: mit\r\n---\r\ntext", {"license": "mit"}, "text"),
    ],
)
def test_metadata_of_any_kind(card: str, metadata: dict[str, object], text: str):
    assert split_card(card) == (metadata, text)


def test_tensors_of_any_name_are_listed_with_their_loss(tmp_path: Path, save):
    values = np.linspace(0.01, 1, 4000, dtype=np.float32)
    tensors = {name: ("F32", (4000,), values * (i + 1)) for i, name in enumerate(["a|b", "c`d", "e\nf"])}
    save(tmp_path / "one" / "1.safetensors", tensors)
    save(tmp_path / "one" / "2.safetensors", {"tied": tensors["a|b"]})
    compress(tmp_path / "one", tmp_path / "nz", [Rule("*", Scheme("truncated", 3))])
    card = plan_push(tmp_path / "nz", "me/model").card
    assert "rounded the mantissas of 4 of its 4\n" in card
    for name in ("`a\\|b`", "``c`d``", "`e f`"):
        assert f"| {name} | 3 mantissa bits | 0.0" in card
    assert "| `tied` | shared with another tensor | 0.0" in card
