"""Push and pull through everything that networks, Hubs, disks and kills do: nothing is lost or half there.

`benchmarks/faults.py` runs the same many times at random moments.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import forked
import numpy as np
import pytest
from loopback_hub import TOKEN, Handler, Hub, Refusal, hub_environment

from neuzip.compress import decompress
from neuzip.formats.hub.push import push
from neuzip.formats.hub.push_plan import plan_push

pytest_plugins = ["loopback_hub"]

SHARDS = [f"model-{i}.safetensors" for i in (1, 2, 3)]
SHARD = r"/me/model/resolve/[^/]+/model-2\.safetensors"
NEUZIP = Path(sys.executable).parent / "neuzip"

Fault = Callable[[Handler], None]


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, save: Callable[..., Path]) -> Path:
    """Three shards that are sent in several pieces."""
    root = tmp_path_factory.mktemp("faults") / "model"
    for i, name in enumerate(SHARDS):
        values = (np.random.default_rng(i).standard_normal(60_000) * 0.05).astype(np.float32)
        save(root / name, {f"w{i}": ("BF16", (200, 300), (values.view(np.uint32) >> 16).astype(np.uint16))})
    (root / "config.json").write_text("{}")
    return root


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were to be slept through; nobody sleeps."""
    asked: list[float] = []
    monkeypatch.setattr(time, "sleep", asked.append)
    return asked


@pytest.fixture
def at(here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The Hub, and an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return here


@pytest.fixture
def pushed(at: Hub, compressed: Path) -> Hub:
    push(plan_push(compressed, "me/model"))
    at.requests.clear()
    at.received.clear()
    return at


def require_pulled(original: Path, root: Path) -> None:
    """What was pulled restores to the original, and nothing else lies about."""
    decompress(root / "copy", root / "restored")
    assert contents(root / "restored") == contents(original)
    assert {p.name for p in root.iterdir()} <= {"copy", "restored", "hf"}


def require_pushed(hub: Hub, compressed: Path) -> None:
    tree = hub.repositories["me/model"].tree()
    assert {name: tree[name] for name in SHARDS} == {
        name: (compressed / name).read_bytes() for name in SHARDS
    }
    assert "neuzip/manifest.json" in tree


def store(hub: Hub, compressed: Path) -> dict[str, bytes]:
    """Have a compressed folder on the Hub without a push; its files."""
    files = {
        file.path: file.content if isinstance(file.content, bytes) else file.content.read_bytes()
        for file in plan_push(compressed, "me/model").files
    }
    hub.add("me/model", files).large.update(SHARDS)
    return files


def require_no_token(*texts: str, root: Path | None = None) -> None:
    for text in texts:
        assert TOKEN not in text
    for path in [] if root is None else root.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


# What a fault is made of


def on(pattern: str, act: Fault, times: int = 10**9) -> Fault:
    """Let something happen to the first requests that match METHOD /path."""
    left, lock = [times], threading.Lock()

    def hook(handler: Handler) -> None:
        if re.fullmatch(pattern, f"{handler.command} {handler.path}"):
            with lock:
                left[0] -= 1
            if left[0] >= 0:
                act(handler)

    return hook


def refuse(status: int, retry_after: int | None = None) -> Fault:
    def act(handler: Handler) -> None:
        raise Refusal(status, message="Back soon", retry_after=retry_after)

    return act


def cut(handler: Handler) -> None:
    handler.cut_after = 30_000


def cut_at_once(handler: Handler) -> None:
    handler.cut_after = 0


def reset(handler: Handler) -> None:
    handler.cut_after, handler.reset = 30_000, True


def shorten(handler: Handler) -> None:
    """A whole answer with fewer bytes than the file has."""
    handler.spoil = lambda data: data[:40_000]


def garble(handler: Handler) -> None:
    handler.spoil = lambda data: data[:50_000] + bytes([data[50_000] ^ 8]) + data[50_001:]


def break_json(handler: Handler) -> None:
    """A proxy's page in place of the Hub's answer."""
    handler.answer(b"<html>Bad gateway</html>")
    raise ConnectionError


PASSING_PULL = {
    "cut in the middle of a shard": ("before", f"GET {SHARD}", cut, None),
    "reset in the middle of a shard": ("before", f"GET {SHARD}", reset, None),
    "truncated": ("before", f"GET {SHARD}", shorten, None),
    "429 to the listing": ("before", "GET /api/models/me/model", refuse(429, 7), 7),
    "503 to the listing": ("before", "GET /api/models/me/model", refuse(503, 7), 7),
    "429 to a shard": ("before", f"GET {SHARD}", refuse(429, 7), 8),
    "503 to a shard": ("before", f"GET {SHARD}", refuse(503, 7), 7),
    "503 to what a shard is": ("before", f"HEAD {SHARD}", refuse(503, 7), None),
    "503 without a time": ("before", f"GET {SHARD}", refuse(503), 0),
}


@pytest.mark.parametrize(("hook", "pattern", "act", "wait"), PASSING_PULL.values(), ids=PASSING_PULL.keys())
def test_a_pull_gets_over_what_passes(
    hook: str, pattern: str, act: Fault, wait: float | None, pushed: Hub, original: Path, tmp_path: Path,
    neuzip, waits,
):  # fmt: skip
    setattr(pushed, hook, on(pattern, act, 1))
    said = neuzip("pull", "me/model", "copy")
    assert said.exit_code == 0, said.stderr
    assert wait is None or wait in waits, "the Hub named the time to wait"
    require_no_token(said.stderr, said.stdout)
    require_pulled(original, tmp_path)


PASSING_PUSH = {
    "cut in the middle of a shard": ("arriving", "PUT /lfs/.*", cut, None),
    "reset in the middle of a shard": ("arriving", "PUT /lfs/.*", reset, None),
    "503 to a shard": ("before", "PUT /lfs/.*", refuse(503, 7), 8),
    "429 to a shard": ("before", "PUT /lfs/.*", refuse(429, 7), 8),
    "429 to the question what is there": ("before", "POST .*/batch", refuse(429, 7), 8),
    "503 to a new repository": ("before", "POST /api/repos/create", refuse(503, 7), 7),
    "503 to the listing": ("before", "GET /api/models/me/model", refuse(503, 7), 7),
    "503 to the card": ("before", "POST /api/validate-yaml", refuse(503, 7), 7),
    "a proxy's page": ("before", "POST /api/validate-yaml", break_json, 0),
    "503 to the commit": ("before", "POST .*/commit/main", refuse(503, 7), 7),
}


@pytest.mark.parametrize(("hook", "pattern", "act", "wait"), PASSING_PUSH.values(), ids=PASSING_PUSH.keys())
def test_a_push_gets_over_what_passes(
    hook: str, pattern: str, act: Fault, wait: float | None, at: Hub, compressed: Path, neuzip, waits
):
    setattr(at, hook, on(pattern, act, 1))
    said = neuzip("push", compressed, "me/model")
    assert said.exit_code == 0, said.stderr
    assert wait is None or wait in waits, "the Hub named the time to wait"
    require_no_token(said.stderr, said.stdout)
    require_pushed(at, compressed)
    assert len(at.repositories["me/model"].commits) == 2, "the repository's first, and ours"


def test_a_commit_whose_answer_is_lost_is_found(at: Hub, compressed: Path, neuzip, waits):
    """The Hub has made it; the second try is refused, because the repository has changed."""

    def lose_the_answer(handler: Handler) -> None:
        Handler.commit(handler, "me/model", "main")

    def act(handler: Handler) -> None:
        handler.answer = lambda *arguments: handler.hang_up()  # type: ignore[method-assign, misc]
        lose_the_answer(handler)

    at.before = on("POST .*/commit/main", act, 1)
    said = neuzip("push", compressed, "me/model", "--json")
    assert said.exit_code == 0, said.stderr
    assert said.json["commit"] == at.repositories["me/model"].branches["main"]
    assert len(at.repositories["me/model"].commits) == 2


def test_a_long_wait_is_left_to_the_user(pushed: Hub, neuzip, waits):
    pushed.before = on("GET /api/models/me/model", refuse(429, 3600))
    said = neuzip("pull", "me/model", "copy")
    assert said.exit_code == 1
    assert said.stderr == (
        "error: me/model: the Hub is overloaded or out of order (429): Back soon\n"
        "hint: the Hub asks to try again in 3600 s\n"
    )
    assert waits == []


# What lasts


def expire(handler: Handler) -> None:
    handler.server.token = "hf_another"
    raise Refusal(401, message=f"Invalid credentials in Authorization header: {handler.token}")


LASTING_PULL = {
    "cut at once": (cut_at_once, "the Hub at http://127.0.0.1:"),
    "reset again and again": (reset, "the Hub at http://127.0.0.1:"),
    "truncated": (shorten, "a file did not arrive whole"),
    "other bytes": (garble, "1 of 9 files did not arrive as they are on the Hub: model-2.safetensors"),
    "out of order": (refuse(503), "the Hub is overloaded or out of order (503): Back soon"),
    "too many requests": (refuse(429, 1), "the Hub is overloaded or out of order (429): Back soon"),
    "an expired token": (expire, "the Hub does not accept the access token: Invalid credentials in"),
}


@pytest.mark.parametrize(("act", "message"), LASTING_PULL.values(), ids=LASTING_PULL.keys())
@pytest.mark.slow
def test_a_pull_that_fails_leaves_nothing_under_the_name_and_goes_on(
    act: Fault, message: str, pushed: Hub, original: Path, tmp_path: Path, neuzip, waits, monkeypatch
):
    monkeypatch.setenv("NEUZIP_DEBUG", "1")
    pushed.before = on(f"GET {SHARD}", act)
    said = neuzip("pull", "me/model", "copy")
    assert (said.exit_code, said.stdout) == (1, "")
    assert f"error: me/model: {message}" in said.stderr, said.stderr[-900:]
    assert not (tmp_path / "copy").exists()
    whole = pushed.repositories["me/model"].tree()
    arrived = contents(tmp_path / "copy.neuzip-partial")
    for name, data in arrived.items():
        assert name.startswith(".cache/") or data == whole[name], f"{name} is half there under its name"
    require_no_token(said.stderr, root=tmp_path)

    pushed.heal()
    pushed.token = TOKEN
    pushed.requests.clear()
    assert neuzip("pull", "me/model", "copy").exit_code == 0
    got = [r for r in pushed.requests if r.startswith("GET") and r.endswith(tuple(SHARDS))]
    missing = [name for name in SHARDS if name not in arrived]  # which ones depends on who was first
    assert sorted(Path(r).name for r in got) == missing, "what had arrived is not fetched again"
    require_pulled(original, tmp_path)


LASTING_PUSH = {
    "cut again and again": ("arriving", "PUT /lfs/.*", cut, "cannot be reached"),
    "out of order": ("before", "PUT /lfs/.*", refuse(503), "out of order (503): Back soon"),
    "an expired token": ("before", "POST .*/commit/main", expire, "does not accept the access token"),
    "an expired token, early": ("before", "POST .*/batch", expire, "does not accept the access token"),
}


@pytest.mark.parametrize(
    ("hook", "pattern", "act", "message"), LASTING_PUSH.values(), ids=LASTING_PUSH.keys()
)
@pytest.mark.slow
def test_a_push_that_fails_shows_nothing_and_goes_on(
    hook: str, pattern: str, act: Fault, message: str, at: Hub, compressed: Path, tmp_path: Path, neuzip,
    waits, monkeypatch,
):  # fmt: skip
    monkeypatch.setenv("NEUZIP_DEBUG", "1")
    setattr(at, hook, on(pattern, act))
    said = neuzip("push", compressed, "me/model")
    assert (said.exit_code, said.stdout) == (1, "")
    assert message in said.stderr
    assert set(at.repositories["me/model"].tree()) == {".gitattributes"}
    require_no_token(said.stderr, root=tmp_path)
    stored = set(at.objects)

    at.heal()
    at.token = TOKEN
    at.received.clear()
    assert neuzip("push", compressed, "me/model").exit_code == 0
    assert not stored & {path.rpartition("/")[2] for path in at.received}, "what had arrived is sent again"
    require_pushed(at, compressed)


# Kills


Start = Callable[..., forked.Forked]


@pytest.fixture
def start(file_forks: forked.Server, hub: Hub, tmp_path: Path) -> Start:
    """Start a command in a process of its own: `start("push", folder, "me/model")`."""
    environment = hub_environment(hub.url, tmp_path / "hf")
    return functools.partial(file_forks.start, "neuzip", cwd=tmp_path, environment=environment)


def finish(process: forked.Forked) -> tuple[int, str]:
    """Exit code and all that was said, which holds no token."""
    stdout, stderr = process.communicate(timeout=600)
    require_no_token(stdout, stderr)
    assert process.returncode is not None
    return process.returncode, stdout + stderr


def killed(start: Start, hub: Hub, sign: signal.Signals, after: int, *arguments: object) -> int:
    """Run a command and kill it when so many bytes of files have passed; the exit code."""
    passed, lock = [0], threading.Lock()
    process = start(*arguments)

    def on_bytes(handler: Handler, count: int) -> None:
        with lock:
            passed[0] += count
        if passed[0] >= after:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, sign)
            process.wait(20)

    hub.on_bytes = on_bytes
    code, _ = finish(process)
    hub.heal()
    return code


@pytest.mark.slow
@pytest.mark.parametrize(("sign", "after"), [(signal.SIGKILL, 150_000), (signal.SIGTERM, 200_000)])
def test_a_killed_push_shows_nothing_and_sends_nothing_twice(
    sign: signal.Signals, after: int, start: Start, hub: Hub, compressed: Path, tmp_path: Path
):
    before = contents(compressed)
    assert killed(start, hub, sign, after, "push", compressed, "me/model") == -sign
    tree = hub.repositories["me/model"].tree()
    assert set(tree) == {".gitattributes"}, "readers see what was there before"
    arrived = dict(hub.objects)
    code, said = finish(start("push", compressed, "me/model"))
    assert code == 0, said
    require_pushed(hub, compressed)
    for oid, data in arrived.items():
        assert hub.received[f"/lfs/{oid}"] == len(data), "a file that had arrived is sent again"
    assert contents(compressed) == before


@pytest.mark.slow
def test_a_killed_push_leaves_an_older_checkpoint_whole(
    start: Start, hub: Hub, compressed: Path, tmp_path: Path
):
    older = hub.add("me/model", {**dict.fromkeys(SHARDS, b"older"), ".gitattributes": b""}).tree()
    killed(start, hub, signal.SIGKILL, 100_000, "push", compressed, "me/model", "--overwrite")
    assert hub.repositories["me/model"].tree() == older
    code, said = finish(start("push", compressed, "me/model", "--overwrite"))
    assert code == 0, said
    require_pushed(hub, compressed)


@pytest.mark.slow
@pytest.mark.parametrize(("sign", "after"), [(signal.SIGKILL, 150_000), (signal.SIGTERM, 60_000)])
def test_a_killed_pull_has_no_name_and_goes_on(
    sign: signal.Signals, after: int, start: Start, hub: Hub, original: Path, compressed: Path, tmp_path: Path
):
    whole = store(hub, compressed)
    assert killed(start, hub, sign, after, "pull", "me/model", "copy") == -sign
    assert not (tmp_path / "copy").exists()
    partial = contents(tmp_path / "copy.neuzip-partial")
    for name, data in partial.items():
        assert name.startswith(".cache/") or data == whole[name], f"{name} is half there under its name"
    hub.sent.clear()
    code, said = finish(start("pull", "me/model", "copy"))
    assert code == 0, said
    sent = {path.rpartition("/")[2] for path in hub.sent}
    assert not sent & set(partial) & set(SHARDS), "a shard that had arrived is fetched again"
    require_pulled(original, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["push", "small", "me/model"],
        ["pull", "me/model"],
        ["decompress", "me/model", "out"],
        ["apply", "me/model", "out", "--base", "me/plain"],
        ["compress", "me/plain", "out", "--stream"],
    ],
    ids=lambda command: command[0],
)
def test_ctrl_c_does_not_wait_for_what_is_on_its_way(
    command: list[str], start: Start, hub: Hub, original: Path, compressed: Path, tmp_path: Path
):
    """huggingface_hub's threads would finish their files first, which may take hours."""
    moving, go_on = threading.Event(), threading.Event()

    def on_bytes(handler: Handler, count: int) -> None:
        moving.set()
        go_on.wait(60)

    if command[0] != "push":
        store(hub, compressed)
        hub.add("me/plain", contents(original))
    hub.on_bytes = on_bytes
    process = start(*[compressed if word == "small" else word for word in command])
    try:
        assert moving.wait(60)
        os.kill(process.pid, signal.SIGINT)
        code, said = finish(process)
        assert not go_on.is_set()
    finally:
        go_on.set()
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    if command[0] == "push":  # what it uploads
        said = said.partition("\n")[2]
    assert (code, said) == (
        130,
        "error: interrupted\nhint: finished work is kept; repeat the command to resume\n",
    )


# Disks


@pytest.mark.slow
def test_a_full_disk_loses_nothing(hub: Hub, original: Path, compressed: Path, tmp_path: Path):
    """A file system in memory that is a little too small, and then large enough."""
    mount, out = tmp_path / "disk", tmp_path / "out"
    mount.mkdir()
    may = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(mount)]
    if shutil.which("unshare") is None or subprocess.run(may, check=False, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    size = sum(map(len, store(hub, compressed).values()))
    script = (
        f"mount -t tmpfs -o size={(size // 4096 + 2) * 4096} none {mount} || exit 9\n"
        f"'{NEUZIP}' pull me/model {mount}/copy && exit 8\n"
        f"ls -A {mount}; mount -o remount,size=10m {mount} || exit 7\n"
        f"'{NEUZIP}' pull me/model {mount}/copy || exit 6\n"
        f"cp -r {mount}/copy {out}\n"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], check=False, capture_output=True, text=True, timeout=600,
        cwd=tmp_path, env=hub_environment(hub.url, tmp_path / "hf"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    require_no_token(done.stdout, done.stderr)
    assert f"error: {mount}/copy.neuzip-partial: no space left on the disk\n" in done.stderr
    assert "hint: free some space and repeat the command: files that arrived whole are kept" in done.stderr
    assert done.stdout.startswith("copy.neuzip-partial\n"), "nothing has the final name"
    decompress(out, tmp_path / "restored")
    assert contents(tmp_path / "restored") == contents(original)


@pytest.mark.slow
def test_a_limit_on_files_is_said(start: Start, hub: Hub, original: Path, compressed: Path, tmp_path: Path):
    store(hub, compressed)
    limit = ("prlimit", "--fsize=60000")
    if shutil.which(limit[0]) is None:
        pytest.skip("there is no prlimit")
    done = subprocess.run(
        [*limit, NEUZIP, "pull", "me/model", "copy"], check=False, capture_output=True, text=True,
        timeout=600, cwd=tmp_path, env=hub_environment(hub.url, tmp_path / "hf"),
    )  # fmt: skip
    require_no_token(done.stdout, done.stderr)
    assert done.returncode == 1
    assert "copy.neuzip-partial: cannot be written: File too large\n" in done.stderr
    assert not (tmp_path / "copy").exists()
    assert finish(start("pull", "me/model", "copy"))[0] == 0
    require_pulled(original, tmp_path)
