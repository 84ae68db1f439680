"""Several processes on one checkpoint: the same bytes as one, and no harm when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import forked
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuzip.compress import Rule, Scheme, compress
from neuzip.compress import torchrun as torchrun_module
from neuzip.compress.ranks import CHUNK, Channel, Ranks
from neuzip.compress.shares import SLACK, share_out, split
from neuzip.compress.torchrun import SILENCE, AnotherRankFailed
from neuzip.errors import NeuzipError

Save = Callable[..., Path]
T = TypeVar("T")
BIN = Path(sys.executable).parent
K3 = [Rule("*", Scheme("truncated", 3))]


def weights(size: int, seed: int) -> np.ndarray:  # type: ignore[type-arg]
    """Trained-looking bf16."""
    values = np.random.default_rng(seed).standard_normal(size, np.float32) * 0.05
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def make(root: Path, save: Save, shards: int, size: int) -> Path:
    """A checkpoint: in every shard matrices, a norm, integers, and the first matrix of all once more."""
    index = {}
    for shard in range(shards):
        tensors: dict[str, tuple[str, tuple[int, ...], Any]] = {
            f"{shard}.{i}": ("BF16", (size,), weights(size, 10 * shard + i)) for i in range(3)
        }
        tensors[f"{shard}.norm"] = ("BF16", (64,), weights(64, shard))
        tensors[f"{shard}.ids"] = ("I64", (900,), np.arange(900))
        tensors[f"{shard}.tied"] = ("BF16", (size,), weights(size, 0))
        tensors[f"{shard}.inf"] = (
            "BF16",
            (size,),
            np.append(weights(size - 1, 77 + shard), np.uint16(0x7F80)),
        )
        save(root / f"s{shard}.safetensors", tensors)
        index |= dict.fromkeys(tensors, f"s{shard}.safetensors")
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (root / "config.json").write_text("{}")
    return root


def folder_bytes(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def partial(target: Path) -> Path:
    return target.with_name(target.name + ".neuzip-partial")


# How the work is shared out

sizes = st.dictionaries(st.text("abc", max_size=4), st.integers(0, 1000), max_size=30)


@given(sizes, st.integers(1, 9))
def test_every_file_has_one_rank_or_all(files: dict[str, int], world: int) -> None:
    alone, together = share_out(files, world)
    assert sorted([*together, *(f for part in alone for f in part)]) == sorted(files)
    assert world > 1 or not together
    for part in alone:
        assert world == 1 or sum(files[f] for f in part) <= SLACK * sum(files.values()) / world


def test_fewer_files_than_ranks_are_for_all() -> None:
    assert share_out({"a": 10, "b": 10}, 8) == ([[]] * 8, ["a", "b"])
    assert share_out({"a": 10, "b": 10, "c": 10, "d": 10}, 2) == ([["a", "c"], ["b", "d"]], [])
    assert share_out({"a": 10, "b": 10, "c": 10}, 2) == ([["a"], ["b"]], ["c"])


@given(sizes, st.lists(st.integers(0, 1000), min_size=1, max_size=9))
def test_a_split_has_every_tensor_once(tensors: dict[str, int], loads: list[int]) -> None:
    parts = split(tensors, loads)
    assert sorted(t for part in parts for t in part) == sorted(tensors)
    totals = [load + sum(tensors[t] for t in part) for load, part in zip(loads, parts, strict=True)]
    assert max(totals) <= max(max(loads), min(totals) + max(tensors.values(), default=0))


# What ranks say to each other: here they are threads, with a dictionary as their store


class Shelf:
    """What torch.distributed's store does, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.counters: dict[str, int] = {}
        self.closed = False
        self._lock = threading.Lock()

    def add(self, key: str, n: int) -> int:
        with self._lock:
            if self.closed:
                raise RuntimeError("Connection reset by peer\nand a long trace")
            self.counters[key] = self.counters.get(key, 0) + n
            return self.counters[key]

    def set(self, key: str, value: bytes) -> None:
        assert len(value) <= CHUNK
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]


def on_ranks(world: int, work: Callable[[Ranks], T]) -> list[T]:
    """Do `work` on all ranks at once; their results, or the error of one of them."""
    shelf = Shelf()

    def guarded(rank: int) -> T:
        try:
            return work(Ranks(rank, world, world, Channel(shelf)))  # type: ignore[arg-type]
        except BaseException:
            shelf.closed = True
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(guarded, range(world)))


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "1")


def test_what_ranks_say_arrives() -> None:
    big = os.urandom(3 * CHUNK)

    def work(ranks: Ranks) -> object:
        ranks.barrier()
        first = ranks.on_first(lambda: ("from", ranks.rank, big))
        return first, ranks.all_gather({ranks.rank}), ranks.first_before_others(lambda: ranks.rank)

    assert on_ranks(3, work) == [((("from", 0, big)), [{0}, {1}, {2}], rank) for rank in range(3)]


def test_rank_0_counts_the_weights_of_all() -> None:
    told: list[int] = []
    shelf = Shelf()
    both = [Ranks(rank, 2, 1, Channel(shelf)) for rank in range(2)]  # type: ignore[arg-type]
    watches = [torchrun_module._Watch(ranks, ranks._channel) for ranks in both]  # type: ignore[arg-type]
    here, there = both[0].counting(told.append), both[1].counting(told.append)
    for step in (100, 20):
        here(step)
        there(3 * step)
        for watch in reversed(watches):
            assert watch._beat() is None
    assert sum(told) == 4 * 120


def test_a_silent_rank_is_named() -> None:
    shelf = Shelf()
    ranks = Ranks(0, 3, 1, Channel(shelf))  # type: ignore[arg-type]
    watch = torchrun_module._Watch(ranks, ranks._channel)  # type: ignore[arg-type]
    shelf.add("alive/2", 1)
    for _ in range(SILENCE + 1):
        shelf.add("alive/1", 1)
        assert watch._beat() is None
    shelf.add("alive/1", 1)
    found = watch._beat()
    assert found is not None and found.message == "rank 2 has given no sign of life for 60 s"


def test_a_failure_elsewhere_ends_in_silence() -> None:
    shelf = Shelf()
    ranks = Ranks(1, 2, 1, Channel(shelf))  # type: ignore[arg-type]
    shelf.add("failed", 1)
    assert isinstance(torchrun_module._Watch(ranks, ranks._channel)._beat(), AnotherRankFailed)  # type: ignore[arg-type]


def test_a_store_that_has_gone_is_one_error() -> None:
    shelf = Shelf()
    shelf.closed = True
    channel = Channel(shelf)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(NeuzipError, match=r"^torchrun's rendezvous at here:1 has gone: [^\n]+$"):
            channel.wait("x", 1)


def test_being_stopped_is_no_error_of_what_was_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(0, 2, 2, Channel(Shelf()))  # type: ignore[arg-type]
    monkeypatch.setattr(torchrun_module, "started_by_torchrun", lambda: True)
    monkeypatch.setattr(torchrun_module, "_join", lambda: (ranks, ranks._channel))

    @torchrun_module.joined()
    def read_a_file() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception as error:
            raise NeuzipError("model.safetensors: it is broken") from error

    with pytest.raises(NeuzipError, match=r"^stopped by SIGTERM, most likely because another rank has died$"):
        read_a_file()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_one_process_needs_no_torch() -> None:
    program = (
        "import sys; from neuzip.compress.torchrun import joined\n"
        "with joined() as ranks: assert ranks.all_gather(1) == [1]\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    subprocess.run([sys.executable, "-I", "-c", program], check=True, env=environment)


@pytest.mark.parametrize("rules", [None, K3], ids=["lossless", "k=3"])
@pytest.mark.parametrize(("shards", "world"), [(1, 3), (2, 2), (3, 2), (4, 2), (2, 5)])
def test_any_number_of_ranks_gives_the_same_bytes(
    shards: int, world: int, rules: list[Rule] | None, tmp_path: Path, save: Save
) -> None:
    root = make(tmp_path / "model", save, shards, 9000)
    options = {"rules": rules} if rules else {}
    alone = compress(root, tmp_path / "one", **options)  # type: ignore[arg-type]
    reports = on_ranks(world, lambda ranks: compress(root, tmp_path / "all", ranks=ranks, **options))  # type: ignore[arg-type]
    assert folder_bytes(tmp_path / "all") == folder_bytes(tmp_path / "one")
    assert not partial(tmp_path / "all").exists()
    assert all(report.tensors == alone.tensors for report in reports)
    again = on_ranks(world, lambda ranks: compress(root, tmp_path / "all", ranks=ranks, **options))  # type: ignore[arg-type]
    assert {report.resumed_files for report in again} == {shards}


def test_ranks_share_a_single_file(tmp_path: Path, save: Save) -> None:
    file = make(tmp_path / "model", save, 1, 9000) / "s0.safetensors"
    compress(file, tmp_path / "one.safetensors")
    on_ranks(3, lambda ranks: compress(file, tmp_path / "out" / "all.safetensors", ranks=ranks))
    assert (tmp_path / "out" / "all.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    again = on_ranks(3, lambda ranks: compress(file, tmp_path / "out" / "all.safetensors", ranks=ranks))
    assert {report.resumed_files for report in again} == {1}
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["all.safetensors"]


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_killed_run_left_is_cleared_away(world: int, tmp_path: Path, save: Save) -> None:
    root = make(tmp_path / "model", save, 2, 9000)
    compress(root, tmp_path / "one")
    left = partial(tmp_path / "all")
    for stray in ("neuzip/scratch-dead/rank-1", "neuzip/scratch-dead/0", "s0.safetensors.neuzip-partial"):
        (left / stray).parent.mkdir(parents=True, exist_ok=True)
        (left / stray).write_bytes(b"half")
    on_ranks(world, lambda ranks: compress(root, tmp_path / "all", ranks=ranks))
    assert folder_bytes(tmp_path / "all") == folder_bytes(tmp_path / "one")


def test_other_folders_on_other_machines_are_noticed(tmp_path: Path, save: Save) -> None:
    """The same paths, but on disks that are not shared."""
    roots = [make(tmp_path / f"{rank}" / "model", save, 1, 9000 + rank) for rank in range(2)]
    with pytest.raises(NeuzipError, match=r"rank 1 has not the same files|rendezvous .* has gone"):
        on_ranks(2, lambda ranks: compress(roots[ranks.rank], tmp_path / "all", ranks=ranks))
    with pytest.raises(NeuzipError, match=r"rank 1 does not find there|rendezvous .* has gone"):
        on_ranks(2, lambda ranks: compress(roots[0], tmp_path / f"{ranks.rank}" / "all", ranks=ranks))
    assert not list(tmp_path.glob("*/all")) and not (tmp_path / "all").exists()


# The command line


@pytest.mark.parametrize("verb", ["decompress", "verify", "inspect", "generate"])
def test_other_commands_refuse_to_run_several_times(
    verb: str, neuzip: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    said = neuzip(verb, "a", "b")
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.startswith(
        f"error: neuzip {verb} cannot run under torchrun: only compress, eval and train can\nhint: "
    )


def torchrun(world: int, *command: object, **options: Any) -> subprocess.Popen[str]:
    """Start ranks, with `neuzip` on the path."""
    return subprocess.Popen(
        [BIN / "torchrun", "--nproc-per-node", str(world), *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}, **options,
    )  # fmt: skip


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A script that is `neuzip`, but takes a rest after each tensor: all ranks are at work for a second."""
    path = tmp_path / "slow.py"
    path.write_text(
        "import sys, time\n"
        "from neuzip.cli import run\n"
        "from neuzip.compress.container_job import ContainerJob\n"
        "encode = ContainerJob.encode\n"
        "def slowly(self, planned):\n"
        "    for tensor in encode(self, planned):\n"
        "        time.sleep(0.1)\n"
        "        yield tensor\n"
        "ContainerJob.encode = slowly\n"
        "sys.exit(run())\n"
    )
    return path


def errors(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error:")]


@pytest.mark.slow
def test_torchrun(tmp_path: Path, save: Save, neuzip: Callable[..., Any], forks: forked.Server) -> None:
    """By torchrun's own processes, and by its agent with ranks that are forked and share files."""
    root = make(tmp_path / "model", save, 3, 200_000)
    rounded = ["--mantissa-bits", "3"]
    assert neuzip("compress", root, tmp_path / "one").exit_code == 0
    assert neuzip("compress", root, tmp_path / "one3", *rounded).exit_code == 0
    runs = [
        torchrun(2, "--no-python", "neuzip", "compress", root, tmp_path / "all", "--json", cwd=tmp_path),
        forks.start("neuzip", "compress", root, tmp_path / "all3", "--json", *rounded, cwd=tmp_path, ranks=4),
    ]
    for run, name in zip(runs, ("one", "one3"), strict=True):
        stdout, stderr = run.communicate(timeout=300)
        assert run.returncode == 0, stderr
        target = tmp_path / name.replace("one", "all")
        assert json.loads(stdout)["dst"] == str(target), "one rank speaks"
        assert folder_bytes(target) == folder_bytes(tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "world", "shards"),
    [
        pytest.param(0, 2, 8, id="rank 0"),
        pytest.param(2, 3, 2, id="shared files"),
    ],
)
def test_a_killed_rank(
    victim: int, world: int, shards: int, slow: Path, tmp_path: Path, save: Save, forks: forked.Server
) -> None:
    root = make(tmp_path / "model", save, shards, 800_000 // shards)
    compress(root, tmp_path / "one")
    expected, target = folder_bytes(tmp_path / "one"), tmp_path / "all"
    run = forks.start(slow, "compress", root, target, "--quiet", cwd=tmp_path, ranks=world)
    left = partial(target)
    pattern = "neuzip/scratch-*/rank-*" if shards < world else "*.safetensors"
    while not list(left.glob(pattern)) and run.poll() is None:
        time.sleep(0.005)
    os.kill(run.rank(victim), signal.SIGKILL)
    stdout, stderr = run.communicate(timeout=300)
    assert run.returncode != 0
    assert stdout == ""
    assert errors(stderr) == ["error: stopped by SIGTERM, most likely because another rank has died"]
    assert not target.exists()
    finished = list(left.glob("*.safetensors"))
    assert all(p.read_bytes() == expected[p.name] for p in finished)
    assert compress(root, target).resumed_files == len(finished)
    assert folder_bytes(target) == expected


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_of_them_with_one_message(
    tmp_path: Path, save: Save, forks: forked.Server
) -> None:
    root = make(tmp_path / "model", save, 4, 9000)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "from neuzip.cli import run\n"
        "from neuzip.compress.container_job import ContainerJob\n"
        "from neuzip.errors import NeuzipError\n"
        "def make(self, *arguments):\n"
        "    if os.environ['RANK'] != '1': time.sleep(600)\n"
        "    raise NeuzipError('it is broken')\n"
        "ContainerJob.make = make\n"
        "sys.exit(run())\n"
    )
    run = forks.start(script, "compress", root, tmp_path / "all", cwd=tmp_path, ranks=2)
    stdout, stderr = run.communicate(timeout=300)
    assert run.returncode != 0
    assert stdout == ""
    assert errors(stderr) == ["error: it is broken"]
    assert not (tmp_path / "all").exists()


@pytest.mark.slow
def test_wrong_options_are_said_once(tmp_path: Path, save: Save, forks: forked.Server) -> None:
    root = make(tmp_path / "model", save, 1, 9000)
    run = forks.start("neuzip", "compress", root, root / "inside", cwd=tmp_path, ranks=2)
    _, stderr = run.communicate(timeout=300)
    assert run.returncode != 0
    assert len(errors(stderr)) == 1 and "choose a DST outside" in stderr


@pytest.mark.slow
def test_ranks_without_torchrun_and_a_store_that_dies_with_rank_0(
    slow: Path, tmp_path: Path, save: Save, forks: forked.Server
) -> None:
    """Another launcher has rank 0 hold the store, and stops nobody."""
    root = make(tmp_path / "model", save, 8, 100_000)
    compress(root, tmp_path / "one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        forks.start(
            slow, "compress", root, tmp_path / "all", cwd=tmp_path,
            environment=environment | {"RANK": str(rank), "LOCAL_RANK": "0"},
        )
        for rank in range(2)
    ]  # fmt: skip
    while not list(partial(tmp_path / "all").glob("*.safetensors")) and ranks[0].poll() is None:
        time.sleep(0.005)
    os.kill(ranks[0].pid, signal.SIGKILL)
    _, stderr = ranks[1].communicate(timeout=300)
    ranks[0].wait(timeout=300)
    assert ranks[1].returncode == 1
    assert len(errors(stderr)) == 1 and "rendezvous" in stderr and "Traceback" not in stderr
    assert not (tmp_path / "all").exists()
    compress(root, tmp_path / "all")
    assert folder_bytes(tmp_path / "all") == folder_bytes(tmp_path / "one")


@pytest.mark.slow
def test_a_real_checkpoint(neuzip_data: Path, tmp_path: Path, forks: forked.Server) -> None:
    source = neuzip_data / "wikilm-26m"
    compress(source, tmp_path / "one")
    run = forks.start("neuzip", "compress", source, tmp_path / "all", "-q", cwd=tmp_path, ranks=2)
    stdout, stderr = run.communicate(timeout=300)
    assert (run.returncode, stdout) == (0, f"{tmp_path / 'all'}\n"), stderr
    assert folder_bytes(tmp_path / "all") == folder_bytes(tmp_path / "one")
