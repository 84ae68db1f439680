"""The kernels of two versions of neuzip on one GPU, in turns: the same bits, and how the times compare.

    python benchmarks/versions.py --other FOLDER --other-commit COMMIT [--rounds 20] [--only packed]

FOLDER is an installation of the other version, for example of `pip install --no-deps --target FOLDER CLONE`.
Each version runs in a process of its own; both hold the same inputs, made from one seed. In each round both
time all cases, one version after the other, and the order changes from round to round. A time is the median
of replays of a CUDA graph that goes through enough weights to leave the L2. A case whose outputs differ in
any bit ends the run. A ratio is this version's time over the other's, the median over rounds; `noise` is the
distance of the quartiles of one version's times. The result goes to benchmarks/results/versions.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import Environment, Measurement, save

LIMIT = 0.02
"""Share by which a case may be slower than in the other version."""

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
L2 = 60_000_000
"""Bytes of the largest L2 that these cases must not fit."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One kernel on one shape: calls on weights of their own, and what they give."""

    name: str
    calls: list[Call]


def cases(only: str) -> Iterator[Case]:
    """All cases whose names begin with `only`, one at a time: their inputs are freed in between."""
    for make in (packed, ternary, attention, cross_entropy):
        if make.__name__.startswith(only) or only.startswith(make.__name__):
            yield from (case for case in make() if case.name.startswith(only))


def gaussian(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Random bf16 numbers on the GPU."""
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def packed() -> Iterator[Case]:
    """Products with packed bf16 weights."""
    try:
        from neuzip.kernels.packed_linear import ops
    except ImportError:  # up to version 0.1
        from neuzip.kernels.packed_linear import torch_ops as ops
    for out, columns in SHAPES:
        weights = [
            ops.pack(gaussian(out, columns, scale=0.02)) for _ in range(max(2, -(-3 * L2 // (out * columns))))
        ]
        for rows in (1, 4, 16, 64, 512, 2048):
            x = gaussian(rows, columns)
            yield Case(f"packed {out} x {columns}, {rows} rows", [partial(ops.linear, x, w) for w in weights])


def ternary() -> Iterator[Case]:
    """Products with ternary weights, and the gated unit."""
    from neuzip.kernels.quantizers import Ternary
    from neuzip.kernels.ternary_linear import TernaryWeight, relu2_glu, ternary_linear

    for out, columns in SHAPES:
        weights = [
            TernaryWeight.of(
                Ternary(
                    torch.randint(-1, 2, (out, columns), device="cuda", dtype=torch.int8),
                    torch.tensor(0.02, device="cuda"),
                )
            )
            for _ in range(max(4, -(-3 * L2 // (out * columns // 4))))
        ]
        for tokens in (1, 16, 2048):
            x = gaussian(tokens, columns)
            for activation in ("int8", "int4", "fp4"):
                calls = [
                    partial(ternary_linear, x, w, activation=activation)
                    for w in weights[: 8 if tokens > 100 else None]
                ]
                yield Case(f"ternary {out} x {columns}, {tokens} tokens, {activation}", calls)
        x = gaussian(1, columns)
        pairs = zip(weights[::2], weights[1::2], strict=False)
        yield Case(f"ternary {out} x {columns}, gated unit", [partial(relu2_glu, x, g, u) for g, u in pairs])


def attention() -> Iterator[Case]:
    """Quantised attention: forward, causal."""
    from neuzip.kernels.attention import sage_attention

    for width in (64, 128):
        q, k, v = (gaussian(1, 32, 8192, width) for _ in range(3))
        for bits in (8, 4):
            yield Case(
                f"attention {width}, {bits} bits", [partial(sage_attention, q, k, v, causal=True, bits=bits)]
            )


def cross_entropy() -> Iterator[Case]:
    """The loss of a head and its gradients, 4,096 tokens and 32,000 words."""
    from neuzip.kernels.linear_cross_entropy import linear_cross_entropy

    x, weight = gaussian(4096, 2048).requires_grad_(), gaussian(32000, 2048, scale=0.02).requires_grad_()
    target = torch.randint(0, 32000, (4096,), device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        loss = linear_cross_entropy(x, weight, target)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    yield Case("cross_entropy 4096 x 2048 x 32000, forward and backward", [step])


def worker() -> None:
    """Serve one version: for each case a line with a digest of the outputs, then a line for each `time`."""
    only = sys.argv[2]
    stream = torch.cuda.Stream()
    torch.manual_seed(0)
    with torch.cuda.stream(stream):
        for case in cases(only):
            outputs = case.calls[0]()
            digest = hashlib.sha256()
            for part in outputs if isinstance(outputs, tuple) else (outputs,):
                digest.update(part.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
            run = graph_of(case, stream)
            print(json.dumps({"case": case.name, "digest": digest.hexdigest()}), flush=True)
            while sys.stdin.readline().strip() == "time":
                print(json.dumps(microseconds(run) / len(case.calls)), flush=True)
            del run
    print(json.dumps({"case": ""}), flush=True)


def graph_of(case: Case, stream: torch.cuda.Stream) -> Call:
    """All calls of a case in one CUDA graph, or one after the other where a graph cannot hold them."""
    for call in case.calls:
        call()
    torch.cuda.synchronize()
    if case.name.startswith("cross_entropy"):
        return case.calls[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in case.calls:
            call()
    return graph.replay


def microseconds(run: Call, replays: int = 6) -> float:
    """The median time of a run that follows another such run."""
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


class Version:
    """A process that runs the cases of one version."""

    def __init__(self, folder: str | None, only: str) -> None:
        path = [] if folder is None else [str(Path(folder).resolve())]
        here = str(Path(__file__).resolve().parent)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--worker", only],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tempfile.gettempdir(),
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, here])},
        )

    def read(self) -> Any:
        """The next line of the process. Exits if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with exit code {self._process.wait()}")
        return json.loads(line)

    def ask(self, word: str) -> None:
        """Send `time`, or anything else for the next case."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()


def compare(this: Version, other: Version, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each case."""
    while True:
        heads = this.read(), other.read()
        if heads[0] != heads[1]:
            raise SystemExit(f"the versions differ: {heads}")
        if not heads[0]["case"]:
            return
        times: dict[str, list[float]] = {"this": [], "other": []}
        for number in range(rounds):
            turns = [("this", this), ("other", other)]
            for name, version in turns if number % 2 else turns[::-1]:
                version.ask("time")
                times[name].append(version.read())
        for version in (this, other):
            version.ask("next")
        ratios = [ours / theirs for ours, theirs in zip(times["this"], times["other"], strict=True)]
        noise = [quartiles[2] / quartiles[0] - 1 for quartiles in map(statistics.quantiles, times.values())]
        yield {
            "case": heads[0]["case"], "this_us": statistics.median(times["this"]),
            "other_us": statistics.median(times["other"]), "ratio": statistics.median(ratios),
            "noise": max(noise),
        }  # fmt: skip


def main() -> None:
    """Compare all cases, print a line each, and save them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", required=True)
    parser.add_argument("--other-commit", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    environment = Environment.here("neuzip-toolkit", "torch", "triton", gpu=True, needs_commit=True)
    rows = []
    for row in compare(Version(None, options.only), Version(options.other, options.only), options.rounds):
        rows.append(row)
        late = row["ratio"] > 1 + LIMIT
        print(
            f"{row['case']:58} {row['this_us']:10.2f} us, other {row['other_us']:10.2f} us, "
            f"{row['ratio']:.3f}{', MISSED' if late else ''} (noise {row['noise']:.1%})",
            flush=True,
        )
    late = [row["case"] for row in rows if row["ratio"] > 1 + LIMIT]
    print(f"{len(rows)} cases with the same bits, {len(late)} slower by more than {LIMIT:.0%}")
    what = "kernels of two versions on one GPU, the same bits, times in turns"
    save("versions", what, Measurement(environment, rows, {"other": options.other_commit, "limit": LIMIT}))


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["--worker"] else main()
