"""Change the kept inputs of all targets at random for some seconds: python tests/fuzz/mutate.py [SECONDS]

It needs no fuzzer and follows no coverage: `make mutate` runs it in CI, and atheris (run.py) finds more.
Checksums are made right again after a change, so that inputs reach the decoders. An input that finds a bug,
kills the process or takes 20 seconds of processor time is written to the folder where it was started.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

PROCESSES = 2
WHOLE = 24
"""Seeds of containers that are without a fault, the first ones; most that are kept have one already."""

LIMIT = 20
"""Seconds of processor time for one input, in which hundreds are enough."""


def change(data: bytes, most: int, rng: random.Random) -> bytes:
    """Change, remove, insert or repeat a few bytes."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 16))
        new = bytes(rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))) for _ in range(length))
        kind = rng.random()
        if kind < 0.3 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind < 0.7:
            changed[at : at + length] = new[: len(changed) - at]
        elif kind < 0.8:
            del changed[at : at + length]
        else:
            changed[at:at] = new if kind < 0.9 else changed[at : at + length]
    return bytes(changed[:most])


def inputs(target: Any, kept: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """Inputs of a target, each changed once to three times from a kept one, without end."""
    whole = list(itertools.islice(target.seeds(), WHOLE))
    while True:
        data = rng.choice(rng.choice((whole, kept)))
        for _ in range(rng.choice((1, 1, 2, 3))):
            data = target.mutate(data, target.most, rng, lambda d, m: change(d, m, rng))
        yield data[: target.most]


def child(folder: Path, seed: int, end: float) -> None:
    """Run targets in turns until `end`, each input written to `folder` first; then how many there were."""
    import numpy as np
    import targets

    np.seterr(all="ignore")
    rng = random.Random(seed)
    mutants = {
        name: inputs(target, list(targets.all_inputs(name).values()), rng)
        for name, target in targets.TARGETS.items()
    }
    count = dict.fromkeys(mutants, 0)
    for name in itertools.cycle(mutants):
        until = min(end, time.monotonic() + targets.TARGETS[name].share / 10)
        while time.monotonic() < until:
            data = next(mutants[name])
            (folder / name).write_bytes(data)
            signal.setitimer(signal.ITIMER_PROF, LIMIT)
            targets.TARGETS[name].run(data)
            signal.setitimer(signal.ITIMER_PROF, 0)
            (folder / name).unlink()
            count[name] += 1
        if time.monotonic() >= end:
            break
    print(" ".join(f"{name} {n}" for name, n in count.items()))


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    end, seed = time.monotonic() + seconds, random.SystemRandom().randrange(1 << 30)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        running = []
        for number in range(seed, seed + PROCESSES):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            command = [sys.executable, __file__, "--child"]
            running.append(
                (folder, subprocess.Popen(
                    [*command, folder, str(number), str(end)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    env=os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}, text=True,
                ))
            )  # fmt: skip
        for folder, process in running:
            said, error = process.communicate()
            print(f"mutate: seed {folder.name}: {said.strip() or f'exit code {process.returncode}'}")
            if process.returncode:
                failed = True
                print(error, file=sys.stderr)
                for path in filter(Path.is_file, folder.iterdir()):
                    kept = Path(f"bug-{path.name}-{folder.name}")
                    kept.write_bytes(path.read_bytes())
                    again = f"python tests/fuzz/targets.py {path.name} {kept}"
                    print(f"error: {path.name} has a bug; again: {again}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
