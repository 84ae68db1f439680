"""Packed mixtures of experts decoded on a GPU that other processes keep busy: does every step end?

    python benchmarks/shared_gpu.py [--cases as-it-is no-pdl] [--others 12] [--seconds 60]

Other processes multiply matrices without a pause, so that the card changes between processes all the time.
Meanwhile a process decodes texts with small mixtures, in CUDA graphs and without them, again and again, and
the tokens must be the same each time. If it prints nothing for --stalled seconds, it hangs: the script lists
its kernels on the card with cuda-gdb, where that is installed, and ends it. Each case is a process of its
own:

as-it-is         what users run
no-pdl           without programmatic dependent launch
no-pdl-products  the products of experts without it: none can take the place of a kernel that it waits for
no-cuts          blocks of a product of experts are not cut, so that no program waits for another

The exit status is 1 if a case hangs or a token differs. Nothing is saved. `--device cpu` tries the script.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import torch
from expert_models import CONFIGS, made_up, reduced
from transformers import PreTrainedModel

from neuzip.kernels.device import launch
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.residency import compress_parameters

CASES = ("as-it-is", "no-pdl", "no-pdl-products", "no-cuts")

PRODUCTS = ("many_rows", "_sum")
"""Kernels that multiply experts, and add up what they give."""

WIDTH = 256
"""Columns of the models: the narrowest whose blocks are cut."""

BATCH, PROMPT, NEW_TOKENS = 4, 40, 128

BUSY, WORK = "--busy", "--work"
"""First arguments of the processes that this script starts."""


def main() -> None:
    """Start what is asked for, or watch it."""
    if sys.argv[1:2] == [BUSY]:
        multiply(torch.device(sys.argv[2]))
    elif sys.argv[1:2] == [WORK]:
        decode(sys.argv[2], torch.device(sys.argv[3]))
    else:
        watch()


def watch() -> None:
    """Run each case among busy processes, and say whether it hangs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--others", type=int, default=12, help="busy processes")
    parser.add_argument("--seconds", type=float, default=60, help="of a case, after its first round")
    parser.add_argument(
        "--stalled", type=float, default=30, help="seconds without a line, of a hanging process"
    )
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    failures = 0
    with busy_processes(arguments.others, arguments.device):
        for case in arguments.cases:
            outcome = run(case, arguments)
            failures += not outcome.startswith("right")
            print(f"{case:16} {outcome}", flush=True)
    sys.exit(bool(failures))


@contextlib.contextmanager
def busy_processes(count: int, device: str) -> Iterator[None]:
    """Processes that keep a device busy."""
    command = [sys.executable, __file__, BUSY, device]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(case: str, arguments: argparse.Namespace) -> str:
    """What became of a case."""
    process = subprocess.Popen(
        [sys.executable, __file__, WORK, case, arguments.device], stdout=subprocess.PIPE, text=True
    )
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=pass_on, args=(process, lines), daemon=True).start()
    rounds, ends = 0, None
    try:
        while ends is None or time.monotonic() < ends:
            patience = arguments.stalled if rounds else 20 * arguments.stalled  # kernels are compiled first
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                return f"HANGS after {rounds} rounds\n{kernels_of(process.pid)}"
            if not line:
                return f"ended with {process.wait()} after {rounds} rounds"
            rounds += 1
            ends = ends or time.monotonic() + arguments.seconds
        return f"right in {rounds} rounds"
    finally:
        process.kill()
        process.wait()


def pass_on(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Put what a process prints into a queue, and an empty line at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def kernels_of(pid: int) -> str:
    """The kernels of a process that are on the card, and where their programs are, if cuda-gdb can tell."""
    if shutil.which("cuda-gdb") is None:
        return "cuda-gdb is not installed"
    asked = [word for what in ("kernels", "blocks", "warps") for word in ("-ex", f"info cuda {what}")]
    command = ["cuda-gdb", "-batch", "-p", str(pid), *asked]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout[-8000:]
    except subprocess.TimeoutExpired:
        return "cuda-gdb did not answer"


def multiply(device: torch.device) -> None:
    """Multiply matrices until the process is ended."""
    x = torch.randn(2048, 2048, device=device)
    while True:
        x = torch.nn.functional.normalize(x @ x)


def decode(case: str, device: torch.device) -> None:
    """Decode with each model again and again, and print a line for each round. Ends where tokens differ."""
    prepare(case)
    models = {name: model_of(name, device) for name in CONFIGS}
    prompt = torch.randint(256, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
    first: dict[str, torch.Tensor] = {}
    graphs, count = ((True, False), NEW_TOKENS) if device.type == "cuda" else ((False,), 2)
    decoders = {
        (name, graph): GreedyDecoder(model, BATCH, PROMPT + count, graph=graph)
        for name, model in models.items() for graph in graphs
    }  # fmt: skip
    while True:
        for (name, _), decoder in decoders.items():
            for length in (PROMPT, 7):
                tokens = decoder.generate(prompt[:, :length], count).cpu()
                if not torch.equal(first.setdefault(f"{name}, {length}", tokens), tokens):
                    sys.exit(f"{name}: tokens differ from those of the first round")
        print("right", flush=True)


def prepare(case: str) -> None:
    """Leave out what a case is without."""
    if case == "no-pdl":
        launch.has_pdl = lambda device: False
    elif case == "no-pdl-products":
        uses_pdl = launch.uses_pdl
        launch.uses_pdl = lambda kernel, device: kernel.__name__ not in PRODUCTS and uses_pdl(kernel, device)
    elif case == "no-cuts":
        from neuzip.kernels.experts.gluon import grouped

        grouped.launch_for = lambda *arguments, **options: {"parts": 1}


def model_of(name: str, device: torch.device) -> PreTrainedModel:
    """A small mixture of the layout of a published one, packed."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH}
    config = reduced(CONFIGS[name](2))
    model = made_up(type(config)(**{**config.to_dict(), **sizes}), "gaussian", device)
    compress_parameters(model, "packed")
    model.set_experts_implementation("neuzip")
    return model


if __name__ == "__main__":
    main()
