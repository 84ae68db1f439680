"""Push and pull under faults at random moments: what happened, and what became of it.

    python benchmarks/faults.py [--runs 10] [--kills 40] [--seed 0]

The Hub is that of the tests, on loopback; the commands are the real ones, each in a process of its own. After
a fault nothing may be half there under its final name, on the Hub or on the disk; the command is repeated
without faults, and what is pulled and decompressed then must be the original byte by byte. No output and no
file may hold the access token. Anything else ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from record import ROOT, Environment, Measurement, save

sys.path.append(str(ROOT / "tests" / "support"))

from loopback_hub import TOKEN, Handler, Refusal, hub_environment, running_hub

from neuzip.compress import compress, decompress

NEUZIP = Path(sys.executable).parent / "neuzip"
SHARDS = 5
SECONDS_A_PIECE = 0.01  # so that transfers take about as long as the rest of a command

Inject = Callable[["Bench", random.Random], None]


class Broken(Exception):
    """A promise that was not kept."""


def main() -> int:
    """Run every fault so often, tell what happened, save the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10, help="runs of each fault that is no kill")
    parser.add_argument("--kills", type=int, default=40, help="runs of each kill")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        bench.prepare()
        rows = [bench.there_and_back()]
        for command, name, inject in FAULTS:
            runs = arguments.kills if name.startswith("SIG") else arguments.runs
            rows.append(bench.row(command, name, inject, runs, arguments.seed))
            print(json.dumps(rows[-1]), flush=True)
    facts = {
        "seed": arguments.seed,
        "checkpoint": f"the demo checkpoint in {SHARDS} shards, {bench.original_bytes:,} bytes",
        "seconds": round(time.monotonic() - began),
    }
    what = "faults of networks, Hubs, disks and kills during neuzip push and pull, on loopback"
    measurement = Measurement(Environment.here("neuzip-toolkit", "huggingface-hub"), rows, facts)
    print(f"saved {save('faults', what, measurement)}")
    return int(any(row["broken"] for row in rows))


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it said."""

    code: int
    said: str


@dataclass
class Bench:
    """A checkpoint, a Hub, and what a run under a fault is made of."""

    root: Path
    durations: dict[str, float] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    original_bytes: int = 0

    def prepare(self) -> None:
        """Write the checkpoint in shards, compress it, and see how long the commands take undisturbed."""
        shard_demo(self.root / "model")
        compress(self.root / "model", self.root / "small")
        self.original = contents(self.root / "model")
        self.original_bytes = sum(map(len, self.original.values()))
        for command in ("push", "pull"):
            with self.fresh(command) as work:
                started = time.monotonic()
                self.require(self.run(command, work).code == 0, "an undisturbed run fails")
                self.durations[command] = time.monotonic() - started
                self.requests[command] = len(self.hub.requests)
                if command == "push":
                    self.tree = dict(self.hub.repositories["me/model"].tree())
                    self.large = set(self.hub.repositories["me/model"].large)

    def there_and_back(self) -> dict[str, object]:
        """Push, pull, decompress with the real commands, and `diff -r` with the original."""
        with self.fresh("push") as work:
            for arguments in (
                ["push", self.root / "small", "me/model"],
                ["pull", "me/model", "copy"],
                ["decompress", "copy", "restored"],
            ):
                done = self.start(arguments, work)
                self.require(finish(done).code == 0, f"{arguments[0]} fails")
            differs = subprocess.run(["diff", "-r", self.root / "model", work / "restored"], check=False)
        return {
            "command": "push, pull, decompress", "fault": "none, then `diff -r`", "runs": 1, "went_on": 1,
            "error": 0, "killed": 0, "untouched": 0, "repeated": 0, "broken": int(differs.returncode != 0),
        }  # fmt: skip

    def row(self, command: str, name: str, inject: Inject, runs: int, seed: int) -> dict[str, object]:
        """What became of so many runs of one fault."""
        counts: Counter[str] = Counter()
        problems: list[str] = []
        self.twice: list[float] = []
        for number in range(runs):
            rng = random.Random(f"{seed} {command} {name} {number}")
            try:
                counts[self.one(command, inject, rng)] += 1
            except Broken as broken:
                problems.append(f"run {number}: {broken}")
        return {
            "command": command, "fault": name, "runs": runs, "went_on": counts["went on"],
            "error": counts["error"], "killed": counts["killed"], "untouched": counts["untouched"],
            "repeated": counts["error"] + counts["killed"], "broken": len(problems), "problems": problems,
            "twice_mean": fmean(self.twice) if self.twice else None,
            "twice_most": max(self.twice, default=None),
        }  # fmt: skip

    def one(self, command: str, inject: Inject, rng: random.Random) -> str:
        """One run under a fault, the check of what it left, the run that repeats it, the check of all."""
        with self.fresh(command) as work:
            self.faulted, self.pending = False, []
            inject(self, rng)
            outcome = self.run(command, work)
            self.prefix = []
            for act in self.pending:
                act()
            self.hub.heal()
            self.slow_down()
            self.hub.token = TOKEN
            kind = self.kind(outcome)
            self.require_nothing_half(command, work, done=outcome.code == 0)
            if kind in ("error", "killed"):
                before = {oid: self.hub.received[f"/lfs/{oid}"] for oid in self.hub.objects}
                again = self.run(command, work)
                self.require(again.code == 0, f"the repeated command fails: {again.said[-300:]}")
                self.require_nothing_half(command, work, done=True)
                for oid, nbytes in before.items():
                    self.require(self.hub.received[f"/lfs/{oid}"] == nbytes, "sent again what had arrived")
                self.twice.append(self.moved_twice(command))
            if command == "push":
                self.require(finish(self.start(["pull", "me/model", "copy"], work)).code == 0, "no pull")
            decompress(work / "copy", work / "restored")
            self.require(contents(work / "restored") == self.original, "the restored files differ")
            self.require_no_token_in(work)
            return kind

    def moved_twice(self, command: str) -> float:
        """What was sent more than once, as a share of all weight files."""
        large = sum(len(self.tree[name]) for name in self.large)
        if command == "push":
            return (sum(self.hub.received.values()) - large) / large
        sent = sum(n for path, n in self.hub.sent.items() if path.endswith(tuple(self.large)))
        return (sent - large) / large

    def kind(self, outcome: Outcome) -> str:
        if outcome.code < 0:
            return "killed"
        if outcome.code == 0:
            return "went on" if self.faulted else "untouched"
        self.require(outcome.code == 1, f"exit code {outcome.code}: {outcome.said[-300:]}")
        return "error"

    @contextmanager
    def fresh(self, command: str) -> Iterator[Path]:
        """A new Hub, for a pull with the checkpoint; an empty folder to work in.

        A Hub may still be busy with what a killed command has sent.
        """
        with running_hub() as self.hub, tempfile.TemporaryDirectory(dir=self.root) as folder:
            self.slow_down()
            self.prefix: list[str] = []
            if command == "pull":
                self.hub.add("me/model", self.tree).large.update(self.large)
            yield Path(folder)

    def slow_down(self) -> None:
        self.hub.on_bytes = lambda handler, count: time.sleep(SECONDS_A_PIECE)

    def start(self, arguments: list[object], work: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.prefix, str(NEUZIP), *map(str, arguments)], cwd=work, text=True,
            env=hub_environment(self.hub.url, work / "hf") | {"OMP_NUM_THREADS": "1", "NEUZIP_DEBUG": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, command: str, work: Path) -> Outcome:
        """The command; kills and whatever else is pending happen to it."""
        source = [self.root / "small", "me/model"] if command == "push" else ["me/model", "copy"]
        process = self.start([command, *source], work)
        self.process = process
        return finish(process)

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            raise Broken(problem)

    def require_nothing_half(self, command: str, work: Path, *, done: bool) -> None:
        """Readers see nothing or all, be it on the Hub or on the disk."""
        if command == "push":
            repository = self.hub.repositories.get("me/model")
            tree = repository.tree() if repository is not None else {}
            self.require(set(tree) in (set(), {".gitattributes"}, set(self.tree)), "half a checkpoint")
            self.require(not done or tree == self.tree, "another checkpoint than was pushed")
            return
        if (work / "copy").exists():
            self.require(contents(work / "copy") == self.tree, "half a checkpoint has its name")
        self.require(not done or (work / "copy").exists(), "nothing is there")
        for name, data in contents(work / "copy.neuzip-partial").items():
            whole = name.startswith(".cache/") or name.endswith(".neuzip-partial")
            self.require(whole or data == self.tree.get(name), f"{name} is half there under its name")

    def require_no_token_in(self, work: Path) -> None:
        for name, data in contents(work).items():
            self.require(TOKEN.encode() not in data, f"{name} holds the token")


def finish(process: subprocess.Popen[str]) -> Outcome:
    """The end of a command, and what it said, which may hold no token."""
    stdout, stderr = process.communicate(timeout=300)
    if TOKEN in stdout + stderr:
        raise Broken(f"the output holds the token: {stdout + stderr}")
    return Outcome(process.returncode, stdout + stderr)


def contents(root: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def shard_demo(target: Path) -> None:
    """The demo checkpoint in several weight files, about equally large."""
    from safetensors.torch import load_file, save_file

    demo = ROOT / "eval" / "demo" / "checkpoint"
    shutil.copytree(demo, target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    shards: list[dict[str, object]] = [{} for _ in range(SHARDS)]
    sizes = [0] * SHARDS
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        smallest = sizes.index(min(sizes))
        shards[smallest][name] = tensor
        sizes[smallest] += tensor.nbytes
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{SHARDS:05}.safetensors"
        save_file(shard, target / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


# Faults


def kill(sign: signal.Signals) -> Inject:
    """At a moment of the command's usual duration, or more often after so many bytes of files."""

    def inject(bench: Bench, rng: random.Random) -> None:
        command = "pull" if bench.hub.repositories else "push"
        if rng.random() < 0.3:
            at_a_moment(bench, sign, rng.uniform(0, 1.1 * bench.durations[command]))
        else:
            after_bytes(bench, sign, rng.randrange(sum(map(len, bench.tree.values()))))

    return inject


def at_a_moment(bench: Bench, sign: signal.Signals, wait: float) -> None:
    """Kill the command after `wait` seconds."""
    over = threading.Event()

    def strike() -> None:
        if not over.wait(wait) and bench.process.poll() is None:
            bench.process.send_signal(sign)

    thread = threading.Thread(target=strike)
    thread.start()
    bench.pending += [over.set, thread.join]


def after_bytes(bench: Bench, sign: signal.Signals, nbytes: int) -> None:
    """Kill the command when so many bytes of files have passed."""
    left, lock, slowed = [nbytes], threading.Lock(), bench.hub.on_bytes
    over = threading.Event()

    def on_bytes(handler: Handler, count: int) -> None:
        slowed(handler, count)
        with lock:
            left[0] -= count
            if left[0] < 0 and not over.is_set() and bench.process.poll() is None:
                bench.process.send_signal(sign)

    def end() -> None:
        with lock:  # what is still on its way must not kill the next command
            over.set()

    bench.hub.on_bytes = on_bytes
    bench.pending.append(end)


def once(
    bench: Bench, act: Callable[[Handler], None], fits: Callable[[Handler], bool]
) -> Callable[[Handler], None]:
    """A hook that lets something happen to the first request that fits."""
    lock = threading.Lock()

    def hook(handler: Handler) -> None:
        with lock:
            if bench.faulted or not fits(handler):
                return
            bench.faulted = True
        act(handler)

    return hook


def nth(number: int, fits: Callable[[Handler], bool]) -> Callable[[Handler], bool]:
    """Whether a request is that of the number, counted from 1, among those that fit."""
    left = [number]

    def check(handler: Handler) -> bool:
        left[0] -= fits(handler)
        return left[0] == 0

    return check


def is_shard(handler: Handler, number: int) -> bool:
    """Whether a request downloads the weight file of that number."""
    return handler.command == "GET" and handler.path.endswith(f"model-{number:05}-of-{SHARDS:05}.safetensors")


def cut(bench: Bench, rng: random.Random) -> None:
    """End or reset the connection somewhere in a weight file, in the direction of the command."""
    number, at, reset = rng.randint(1, SHARDS), rng.randrange(200_000), rng.random() < 0.5

    def act(handler: Handler) -> None:
        handler.cut_after, handler.reset = at, reset

    if bench.hub.repositories:
        bench.hub.before = once(bench, act, lambda handler: is_shard(handler, number))
    else:
        bench.hub.arriving = once(bench, act, nth(number, lambda handler: handler.command == "PUT"))


def spoil(change: Callable[[bytes, random.Random], bytes]) -> Inject:
    """Send other bytes of a weight file, once."""

    def inject(bench: Bench, rng: random.Random) -> None:
        number = rng.randint(1, SHARDS)

        def act(handler: Handler) -> None:
            handler.spoil = lambda data: change(data, rng)

        bench.hub.before = once(bench, act, lambda handler: is_shard(handler, number))

    return inject


def truncated(data: bytes, rng: random.Random) -> bytes:
    """Fewer bytes, and a Content-Length that agrees with them."""
    return data[: rng.randrange(len(data))]


def garbled(data: bytes, rng: random.Random) -> bytes:
    """As many bytes, one bit another."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def refuse(status: int) -> Inject:
    """Refuse one request, whichever, with a Retry-After of a second."""

    def act(handler: Handler) -> None:
        raise Refusal(status, message="Back soon", retry_after=1)

    return at_some_request(act)


def expire(handler: Handler) -> None:
    """Let the token expire; the Hub quotes it in what it says, to see that nobody repeats it."""
    handler.server.token = "hf_another"
    raise Refusal(401, message=f"Invalid credentials: {handler.token}")


def at_some_request(act: Callable[[Handler], None]) -> Inject:
    def inject(bench: Bench, rng: random.Random) -> None:
        command = "pull" if bench.hub.repositories else "push"
        number = rng.randint(1, bench.requests[command])
        bench.hub.before = once(bench, act, nth(number, lambda handler: True))

    return inject


def fill(bench: Bench, rng: random.Random) -> None:
    """Work on a file system in memory that may be too small, and then go on where there is more space."""
    bench.faulted = True
    size = round(sum(map(len, bench.tree.values())) * rng.uniform(0.9, 1.04))
    script = (
        f"mkdir disk && mount -t tmpfs -o size={size // 4096 * 4096} none disk || exit 9; "
        '(cd disk && "$@"); code=$?; cp -a disk/. . && umount disk && rmdir disk || exit 9; exit $code'
    )
    bench.prefix = ["unshare", "-rm", "sh", "-c", script, "sh"]


FAULTS: list[tuple[str, str, Inject]] = [
    ("push", "SIGKILL", kill(signal.SIGKILL)),
    ("push", "SIGTERM", kill(signal.SIGTERM)),
    ("push", "connection cut or reset in a weight file", cut),
    ("push", "429 with Retry-After, any request", refuse(429)),
    ("push", "503 with Retry-After, any request", refuse(503)),
    ("push", "token expired, at any request", at_some_request(expire)),
    ("pull", "SIGKILL", kill(signal.SIGKILL)),
    ("pull", "SIGTERM", kill(signal.SIGTERM)),
    ("pull", "connection cut or reset in a weight file", cut),
    ("pull", "download with too few bytes", spoil(truncated)),
    ("pull", "download with a wrong bit", spoil(garbled)),
    ("pull", "429 with Retry-After, any request", refuse(429)),
    ("pull", "503 with Retry-After, any request", refuse(503)),
    ("pull", "token expired, at any request", at_some_request(expire)),
    ("pull", "disk full", fill),
]

if __name__ == "__main__":
    sys.exit(main())
