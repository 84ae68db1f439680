"""Compress, verify and restore random checkpoints again and again, with kills; look for what is left over.

    nice -n 19 python benchmarks/soak.py /tmp/soak --cycles 500

A cycle makes a checkpoint of its own from its number and the seed: dtypes, shapes, values, tied tensors, one
file or a folder, and options. Most cycles run in this process, whose memory and open files are watched. In a
share of them every step is a `neuzip` command in a process of its own, which is killed some times at a random
moment, with SIGKILL or SIGTERM, and then repeated. What must hold after each cycle:

    the container is the same as without kills, and as the same cycle makes it in this process
    what it restores to is the original, or for a lossy one what the independent decoder makes of it
    after a kill the destination is complete or is not there
    nothing else is left in the folder, nor in the folder for temporary files

The results are lines of FOLDER/cycles.jsonl; the same command goes on where it was stopped and writes
benchmarks/results/soak.json at the end, after a few cycles were repeated for their memory alone: random ones
take more whenever one is larger than all before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import gc
import hashlib
import importlib.util
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from record import ROOT, Environment, Measurement, save

from neuzip.compress import Rule, Scheme, compress, decompress, verify
from neuzip.formats.safetensors_file import TensorFile

SHARE_KILLED = 0.2
REPEATED, REPETITIONS = 10, 30
"""Cycles that are run again and again at the end: what they take must not grow at all."""
MOST_KILLS = 3
"""Of one command; after that it may finish."""

WARM_UP = 200
"""In-process cycles before memory is looked at: the first ones compile and fill caches."""

SERVER = """
import json, os, sys
import torch
import neuzip.cli.commands.compress, neuzip.cli.commands.decompress, neuzip.cli.commands.verify
import neuzip.compress.schemes.ternary_coding, neuzip.compress.restore, neuzip.formats.hub.push
from neuzip.cli import run
for line in sys.stdin:
    asked = json.loads(line)
    pid = os.fork()
    if pid == 0:
        said = os.open(asked["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(run(asked["command"]))
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""
"""A process that has imported everything, and forks one for each command: kills hit work, not imports."""

FLOATS = {
    "BF16": (8, 7), "F16": (5, 10), "F32": (8, 23), "F64": (11, 52), "F8_E4M3": (4, 3), "F8_E5M2": (5, 2),
    "F8_E4M3FNUZ": (4, 3), "F8_E5M2FNUZ": (5, 2),
}  # fmt: skip
OTHERS = {"U8": 1, "I64": 8, "BOOL": 1, "I32": 4}

Tensors = dict[str, tuple[str, list[int], bytes]]


class Mismatch(Exception):
    """What must hold does not."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Mismatch(what)


def load(path: Path) -> ModuleType:
    """A module of the tests, which are in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# A random checkpoint


def random_tensor(rng: np.random.Generator) -> tuple[str, list[int], bytes]:
    """Dtype, shape and data: weights as models have them, or strange ones."""
    if rng.random() < 0.15:
        dtype = str(rng.choice(list(OTHERS)))
        shape = [int(n) for n in rng.integers(0, 40, int(rng.integers(0, 4)))]
        count = int(np.prod(shape, dtype=np.int64))
        data = rng.bytes(count * OTHERS[dtype])
        return dtype, shape, bytes(b & 1 for b in data) if dtype == "BOOL" else data
    dtype = str(rng.choice(list(FLOATS)))
    n = int(np.exp(rng.uniform(0, np.log(60_000)))) * int(rng.random() > 0.03)
    columns = int(rng.choice([1, 7, 16, 31, 64, 100, 128, 257]))
    shape = [n] if rng.random() < 0.2 else [-(-n // columns), columns] if n else [0, columns]
    numel = int(np.prod(shape))
    return dtype, shape, random_weights(rng, dtype, numel)


def random_weights(rng: np.random.Generator, dtype: str, n: int) -> bytes:
    exponent_bits, mantissa_bits = FLOATS[dtype]
    kept = int(rng.choice([mantissa_bits, mantissa_bits, 0, min(3, mantissa_bits), min(7, mantissa_bits)]))
    kind = rng.choice(["normal", "normal", "normal", "any", "constant", "ternary", "wide"])
    top = (1 << exponent_bits - 1) - 1
    random = rng.integers(0, 1 << 63, n, dtype=np.uint64)
    if kind == "any":
        exponents = random >> np.uint64(40) & np.uint64((1 << exponent_bits) - 1)
    elif kind == "wide":
        exponents = np.clip(top - rng.integers(-20, 20, n), 0, 2 * top).astype(np.uint64)
    else:
        exponents = np.clip(top - rng.geometric(0.5, n), 1, 2 * top).astype(np.uint64)
    mantissas = (random & np.uint64((1 << kept) - 1)) << np.uint64(mantissa_bits - kept)
    signs = random >> np.uint64(62) & np.uint64(1)
    patterns = signs << np.uint64(exponent_bits + mantissa_bits) | exponents << np.uint64(mantissa_bits)
    patterns |= mantissas
    if kind == "constant":
        patterns[:] = patterns[:1]
    elif kind == "ternary":
        magnitude = patterns[:1] & np.uint64((1 << exponent_bits + mantissa_bits) - 1)
        ternary = signs << np.uint64(exponent_bits + mantissa_bits) | magnitude
        patterns = np.where(random % np.uint64(3) == 0, np.uint64(0), ternary) if n else patterns
    return bytes(patterns.astype(f"<u{(1 + exponent_bits + mantissa_bits) // 8}").tobytes())


def to_bytes(tensors: Tensors, metadata: dict[str, str] | None, padding: int) -> bytes:
    """A safetensors file with the tensors in this order."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode() + b" " * padding
    return len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors.values())


def random_shard(rng: np.random.Generator, earlier: list[tuple[str, list[int], bytes]]) -> bytes:
    tensors: Tensors = {}
    for i in range(int(rng.integers(0, 7))):
        name = str(rng.choice(["model.layers.{}.q_proj.weight", "w{}", "norm.{}", "ü {}", "a/b:{}"])).format(
            i
        )
        tied = bool(earlier) and rng.random() < 0.2
        tensors[name] = earlier[int(rng.integers(len(earlier)))] if tied else random_tensor(rng)
        earlier.append(tensors[name])
    metadata = {"format": "pt"} if rng.random() < 0.5 else None
    return to_bytes(tensors, metadata, int(rng.integers(0, 9)))


def make_source(rng: np.random.Generator, folder: Path) -> Path:
    """One file, or a folder with shards and other files."""
    earlier: list[tuple[str, list[int], bytes]] = []
    if rng.random() < 0.5:
        (folder / "src.safetensors").write_bytes(random_shard(rng, earlier))
        return folder / "src.safetensors"
    root = folder / "src"
    for i in range(int(rng.integers(1, 4))):
        place = root / str(rng.choice(["", "", "unet"])) / f"model-{i}.safetensors"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(random_shard(rng, earlier))
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "n": int(rng.integers(9))}))
    if rng.random() < 0.5:
        (root / "tokenizer").mkdir()
        (root / "tokenizer" / "vocab.txt").write_bytes(rng.bytes(int(rng.integers(0, 3000))))
    return root


def random_rules(rng: np.random.Generator, names: set[str]) -> list[Rule]:
    """Schemes for everything, or for a part of the tensors of these names."""
    kind = rng.random()
    if kind < 0.45:
        scheme = Scheme()
    elif kind < 0.75:
        block = [None, None, 8, 64, 512, 16384][int(rng.integers(6))]
        scheme = Scheme("truncated", int(rng.integers(0, 7)), block)
    elif kind < 0.88:
        scheme = Scheme(
            "quantized",
            step=float(2.0 ** rng.uniform(-8, 2)),
            row_factors=bool(rng.random() < 0.5),
            column_factors=bool(rng.random() < 0.5),
        )
    else:
        scheme = Scheme(
            "ternary",
            quantizer=str(rng.choice(["absmean", "absmean-clamped", "least-squares"])),
            group=[None, "row", 1, 16, 100][int(rng.integers(5))],
            packing=str(rng.choice(["trits", "2bit"])),
            scale_dtype=str(rng.choice(["F32", "F32", "F16"])),
        )
    rules = [Rule("*", scheme, min_dimensions=int(rng.integers(0, 3)))]
    glob = str(rng.choice(["*w*", "norm.*", "ü *"]))
    if rng.random() < 0.4 and fnmatch.filter(names, glob):
        rules.insert(0, Rule(glob, Scheme("raw")))
    return rules


def tensor_names(src: Path) -> set[str]:
    """The names of all tensors of a checkpoint."""
    names: set[str] = set()
    for path in [src] if src.is_file() else src.rglob("*.safetensors"):
        with TensorFile(path) as file:
            names |= set(file.header.tensors)
    return names


def write_plan(rules: list[Rule], path: Path) -> None:
    """The rules as a plan file, for the command line."""
    lines = []
    for rule in rules:
        lines.append("[[rule]]")
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in rule.to_json().items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def contents(path: Path) -> dict[str, str]:
    """SHA-256 of a file, or of every file of a folder."""
    if path.is_file():
        return {"": hashlib.sha256(path.read_bytes()).hexdigest()}
    return {
        p.relative_to(path).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(path.rglob("*"))
        if p.is_file()
    }


# One cycle


@dataclasses.dataclass
class Cycle:
    """What happened in a cycle. `killed` counts kills by command and signal; sizes in bytes.

    `finished_first` counts commands that ended before their kill, `complete` those whose file had its name.
    """

    number: int
    mode: str
    kind: str
    scheme: str
    original: int = 0
    stored: int = 0
    killed: dict[str, int] = dataclasses.field(default_factory=dict)
    finished_first: int = 0
    complete: int = 0
    mismatch: str | None = None
    seconds: float = 0.0
    rss: int = 0
    descriptors: int = 0
    process: int = 0


class Soak:
    """The cycles of one run, in `folder`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.decoder = load(ROOT / "tests" / "support" / "independent_decoder.py")
        self.temporary = folder / "tmp"
        self.killed_before, self.complete = False, 0
        self.server = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"TMPDIR": str(self.temporary)},
        )  # fmt: skip
        self.expected_seconds = {"compress": 0.2, "verify": 0.1, "decompress": 0.1}

    def repeat(self) -> list[float]:
        """Memory in MiB after each repetition of the same cycles, all in this process."""
        mib = []
        for _ in range(REPETITIONS):
            for number in range(REPEATED):
                cycle = self.cycle(number, kill=False)
                require(cycle.mismatch is None, f"cycle {number} again: {cycle.mismatch}")
            mib.append(round(cycle.rss / 2**20, 1))
        return mib

    def cycle(self, number: int, kill: bool = True) -> Cycle:
        """Run one cycle in an empty folder, and say what did not hold."""
        rng = np.random.default_rng([self.seed, number])
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(self.temporary, ignore_errors=True)
        work.mkdir(parents=True)
        self.temporary.mkdir()
        began, self.complete = time.monotonic(), 0
        killing = bool(rng.random() < SHARE_KILLED) and kill
        src = make_source(rng, work)
        rules, jobs = random_rules(rng, tensor_names(src)), int(rng.integers(1, 4))
        done = Cycle(
            number, "killed" if killing else "in-process", "file" if src.is_file() else "folder",
            rules[-1].scheme.kind, process=os.getpid(),
        )  # fmt: skip
        try:
            run = self._with_kills if killing else self._in_process
            run(work, src, rules, jobs, done, random.Random(int(rng.integers(1 << 30))))
        except Exception as error:
            done.mismatch = f"{type(error).__name__}: {error}"
        done.complete = self.complete
        gc.collect()
        done.seconds = round(time.monotonic() - began, 3)
        done.rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        done.descriptors = len(os.listdir("/proc/self/fd"))
        return done

    def _in_process(
        self, work: Path, src: Path, rules: list[Rule], jobs: int, done: Cycle, _: random.Random
    ) -> None:
        packed, back = (src.with_name(src.name.replace("src", step)) for step in ("packed", "back"))
        report = compress(src, packed, rules, jobs=jobs, allow_destructive=True)
        verify(packed, src, jobs=jobs)
        decompress(packed, back, jobs=jobs)
        done.original, done.stored = report.original_bytes, report.stored_bytes
        self._check(src, packed, back)
        require({p.name for p in work.iterdir()} == {src.name, packed.name, back.name}, self._left(work))

    def _with_kills(
        self, work: Path, src: Path, rules: list[Rule], jobs: int, done: Cycle, rng: random.Random
    ) -> None:
        plain, packed, back = (src.with_name(src.name.replace("src", s)) for s in ("plain", "packed", "back"))
        write_plan(rules, work / "plan.toml")
        report = compress(src, plain, rules, jobs=jobs, allow_destructive=True)
        done.original, done.stored = report.original_bytes, report.stored_bytes

        def whole(path: Path) -> None:
            if os.path.lexists(path):
                require(contents(path) == contents(plain), "a container that a killed run left is another")

        plan = ["--plan", work / "plan.toml", "--jobs", jobs]
        if any(rule.scheme.kind == "ternary" for rule in rules):
            plan.append("--allow-destructive")
        self._until_done(["compress", src, packed, *plan], lambda: whole(packed), done, rng)
        require(contents(packed) == contents(plain), "the container is not what it is without kills")
        self._until_done(["verify", packed, "--original", src], lambda: None, done, rng)

        def restored(path: Path) -> None:
            if os.path.lexists(path):
                self._check(src, packed, path)

        self._until_done(["decompress", packed, back, "--jobs", jobs], lambda: restored(back), done, rng)
        self._check(src, packed, back)
        names = {src.name, plain.name, packed.name, back.name, "plan.toml"}
        require({p.name for p in work.iterdir()} == names, self._left(work))
        require(not any(self.temporary.iterdir()), "something is left in the folder for temporary files")

    def _until_done(
        self, command: list[object], look: Callable[[], None], done: Cycle, rng: random.Random
    ) -> None:
        """Run a command, killing it a few times at random moments, until it succeeds."""
        verb, self.killed_before = str(command[0]), False
        for _ in range(rng.randint(1, MOST_KILLS)):
            delay = rng.uniform(0, 1.2 * self.expected_seconds[verb])
            sent = self._run(command, delay, rng.choice([signal.SIGKILL, signal.SIGTERM]))
            look()
            if sent is None:
                done.finished_first += 1
                return
            done.killed[f"{verb} {sent.name}"] = done.killed.get(f"{verb} {sent.name}", 0) + 1
        self._run(command, None, None)
        look()

    def _run(
        self, command: list[object], delay: float | None, kill: signal.Signals | None
    ) -> signal.Signals | None:
        """Run a command; if it still runs after `delay` seconds, kill it. The signal, if it ended by that.

        A file that was complete when its run was killed is refused as being there: `look` has seen it.
        """
        verb, sent, said = str(command[0]), None, self.folder / "said.txt"
        request = {"command": [str(word) for word in command], "said": str(said)}
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        pid, began = int(self.server.stdout.readline()), time.monotonic()
        if kill is not None and not select.select([self.server.stdout], [], [], delay)[0]:
            os.kill(pid, kill)
            sent = kill
        code = os.waitstatus_to_exitcode(int(self.server.stdout.readline()))
        if code == 0:
            mean = self.expected_seconds[verb]
            self.expected_seconds[verb] = 0.7 * mean + 0.3 * (time.monotonic() - began)
            return None
        text = said.read_text(errors="replace")
        if (
            sent is None
            and self.killed_before
            and "exists already" in text
            and Path(str(command[2])).is_file()
        ):
            self.complete += 1
            return None
        require(sent is not None, f"{verb} fails: {text[-500:]}")
        self.killed_before = True
        return sent

    def _check(self, src: Path, packed: Path, back: Path) -> None:
        """What was restored is what it should be, by the decoder that shares no code."""
        if packed.is_file():
            restored = {"": self.decoder.restore_file(packed)}
        else:
            restored = self.decoder.restore_folder(packed)
        found = contents(back)
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in restored.items()}
        require(found == sums, "the independent decoder restores something else")
        records = [
            json.loads(self.decoder.Container(path, {}).entry("neuzip:manifest"))["tensors"]
            for path in ([packed] if packed.is_file() else packed.rglob("*.safetensors"))
        ]
        if not any("original" in record for part in records for record in part.values()):
            require(found == contents(src), "a lossless checkpoint does not come back as it was")

    def _left(self, work: Path) -> str:
        return f"left over: {sorted(p.name for p in work.iterdir())}"


def slope(cycles: list[Cycle]) -> dict[str, float] | None:
    """How the memory of the process with most in-process cycles grew after its warm-up, by least squares."""
    by_process: dict[int, list[Cycle]] = {}
    for cycle in cycles:
        by_process.setdefault(cycle.process, []).append(cycle)
    longest = max(by_process.values(), key=len, default=[])[WARM_UP:]
    if len(longest) < 20:
        return None
    mib = np.array([cycle.rss for cycle in longest]) / 2**20
    gradient = float(np.polyfit(np.arange(len(mib)), mib, 1)[0])
    return {
        "cycles": len(mib), "mib_per_100_cycles": round(100 * gradient, 3), "first_mib": round(mib[0], 1),
        "last_mib": round(mib[-1], 1), "most_mib": round(mib.max(), 1),
        "descriptors_least": min(c.descriptors for c in longest),
        "descriptors_most": max(c.descriptors for c in longest),
    }  # fmt: skip


def summary(cycles: list[Cycle]) -> dict[str, Any]:
    killed: Counter[str] = Counter()
    for cycle in cycles:
        killed.update(cycle.killed)
    return {
        "cycles": len(cycles),
        "modes": dict(Counter(c.mode for c in cycles)),
        "kinds": dict(Counter(c.kind for c in cycles)),
        "schemes": dict(Counter(c.scheme for c in cycles)),
        "original_bytes": sum(c.original for c in cycles),
        "stored_bytes": sum(c.stored for c in cycles),
        "seconds": round(sum(c.seconds for c in cycles), 1),
        "kills": dict(sorted(killed.items())),
        "commands_that_finished_before_the_kill": sum(c.finished_first for c in cycles),
        "commands_killed_when_their_file_was_complete": sum(c.complete for c in cycles),
        "mismatches": [f"cycle {c.number}: {c.mismatch}" for c in cycles if c.mismatch is not None],
        "memory": slope(cycles),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    path = asked.folder / "cycles.jsonl"
    cycles = [Cycle(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []
    soak, known = Soak(asked.folder, asked.seed), {cycle.number for cycle in cycles}
    for number in range(asked.cycles):
        if number in known:
            continue
        cycles.append(soak.cycle(number))
        with open(path, "a", encoding="utf-8") as log:
            log.write(json.dumps(dataclasses.asdict(cycles[-1])) + "\n")
        if cycles[-1].mismatch is not None or number % 25 == 24:
            print(json.dumps(dataclasses.asdict(cycles[-1])), flush=True)
    figures = summary(cycles) | {"mib_after_repetitions_of_the_same_cycles": soak.repeat()}
    print(json.dumps(figures, indent=1))
    command = f"nice -n 19 python benchmarks/soak.py FOLDER --cycles {asked.cycles} --seed {asked.seed}"
    what = "compress, verify and restore random checkpoints, some of them killed at random moments"
    environment = Environment.here("numba", "numpy", "torch", "xxhash")
    print(save("soak", what, Measurement(environment, facts={"command": command, **figures})))
    sys.exit(bool(figures["mismatches"]))


if __name__ == "__main__":
    main()
