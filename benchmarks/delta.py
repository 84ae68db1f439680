"""Deltas of checkpoints a few training steps apart, beside the container alone, XOR with zstd, and ZipNN.

    NEUZIP_DATA=... python benchmarks/delta.py [--pairs FOLDER] [--rounds 3]

wikilm-26m (bf16) is trained on for 1, 10 and 100 steps of 4 x 128 tokens of WikiText-2's validation part, and
saved in bf16 again: with a master copy in fp32, as fine-tuning and reinforcement learning do, or in bf16
throughout. With --pairs the trained checkpoints stay there, and are not trained again.

neuzip's times are of whole commands, files read and written; a peer gets the weights in memory. Whatever does
not restore to the same bytes is not counted. Peers: pip install -r benchmarks/requirements.txt
"""

from __future__ import annotations

import argparse
import copy
import filecmp
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from record import Environment, Measurement, save, spread
from zipnn import ZipNN

from neuzip.compress import compress, decompress
from neuzip.compress.delta_job import compress_delta
from neuzip.compress.sources.folder import FolderSource

Bytes = npt.NDArray[np.uint8]

BATCH, TOKENS = 4, 128


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is trained, and after which steps it is saved."""

    name: str
    optimizer: str
    learning_rate: float
    master: bool
    steps: tuple[int, ...]


RECIPES = (
    Recipe("adamw-master-1e-6", "AdamW", 1e-6, True, (1, 10, 100)),
    Recipe("adamw-master-1e-5", "AdamW", 1e-5, True, (1, 10, 100)),
    Recipe("adamw-bf16-1e-5", "AdamW", 1e-5, False, (1, 10)),
    Recipe("sgd-bf16-1e-2", "SGD", 1e-2, False, (1, 10)),
)


def main() -> None:
    """Train what is missing, measure all pairs, save the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    data = Path(os.environ["NEUZIP_DATA"])
    base = data / "wikilm-26m"
    with tempfile.TemporaryDirectory() as scratch:
        pairs = arguments.pairs or Path(scratch) / "pairs"
        for recipe in RECIPES:
            train(recipe, base, data / "wikitext-2" / "wiki.valid.raw", pairs)
        results = []
        for recipe in RECIPES:
            for steps in recipe.steps:
                new = pairs / f"{recipe.name}-{steps}"
                row = measure(new, base, Path(scratch), arguments.rounds, arguments.threads)
                results.append({"recipe": recipe.name, **vars(recipe), "steps": steps, **row})
                print(f"{new.name}: {row['delta_bytes']:,} of {row['weight_bytes']:,} bytes", flush=True)
    path = save(
        "delta",
        "deltas of wikilm-26m, bf16, against the checkpoint before the steps; bytes, seconds",
        Measurement(
            Environment.here("neuzip-toolkit", "numpy", "torch", "transformers", "zipnn", "zstandard"),
            results,
            {"batch": BATCH, "tokens": TOKENS, "rounds": arguments.rounds, "threads": arguments.threads},
        ),
    )
    print(f"saved {path}")


def train(recipe: Recipe, base: Path, text: Path, pairs: Path) -> None:
    """Save a checkpoint for each of the recipe's steps, unless they are there."""
    if all((pairs / f"{recipe.name}-{steps}").is_dir() for steps in recipe.steps):
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(base)(text.read_text()[:400_000]).input_ids)
    kind = torch.float32 if recipe.master else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(base, dtype=kind).train()
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
        if recipe.optimizer == "AdamW"
        else torch.optim.SGD(model.parameters(), lr=recipe.learning_rate)
    )
    for step in range(1, max(recipe.steps) + 1):
        starts = torch.randint(0, len(tokens) - TOKENS - 1, (BATCH,)).tolist()
        batch = torch.stack([tokens[at : at + TOKENS] for at in starts])
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in recipe.steps:
            copy.deepcopy(model).to(torch.bfloat16).save_pretrained(pairs / f"{recipe.name}-{step}")


def measure(new: Path, base: Path, scratch: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Bytes of one pair by every way, and the time of ours, of ZipNN and of zstd -3 on the XOR."""
    packed, restored, alone = (scratch / name for name in ("delta", "restored", "alone"))
    encode, apply = [], []
    for _ in range(rounds + 1):  # the first warms up
        for folder in (packed, restored):
            shutil.rmtree(folder, ignore_errors=True)
        began = time.perf_counter()
        report = compress_delta(new, base, packed, base.name, verify=False, jobs=threads)
        encode.append(time.perf_counter() - began)
        began = time.perf_counter()
        decompress(packed, restored, base=base, jobs=threads)
        apply.append(time.perf_counter() - began)
    same_files(new, restored)
    shutil.rmtree(alone, ignore_errors=True)
    container = compress(new, alone, verify=False, jobs=threads)
    after, before = weights(new, base)
    xor = after ^ before
    schemes = [t.scheme for t in report.tensors]
    zipnn = ZipNN(
        method="AUTO", input_format="byte", bytearray_dtype="bfloat16", threads=threads,
        delta_compressed_type="byte",
    )  # fmt: skip
    return {
        "weight_bytes": report.weight_bytes,
        "changed_share": float(np.mean(after.view("<u2") != before.view("<u2"))),
        "unchanged_tensors": schemes.count("as in the base"),
        "tensors": len(schemes),
        "delta_bytes": report.stored_weight_bytes,
        "container_bytes": container.stored_weight_bytes,
        **spread(encode[1:], "encode_seconds"),
        **spread(apply[1:], "apply_seconds"),
        "peers": {
            "xor, zstd -3": with_zstd(xor, 3, threads),
            "xor, zstd -19": with_zstd(xor, 19, threads),
            "zipnn, delta": timed(
                lambda: zipnn.compress(after.tobytes(), delta_second_data=before.tobytes()),
                lambda coded: zipnn.decompress(coded, delta_second_data=before.tobytes()),
                after,
            ),
        },
    }


def same_files(a: Path, b: Path) -> None:
    """Raise SystemExit unless two folders hold the same."""
    names = sorted(p.relative_to(a) for p in a.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(b) for p in b.rglob("*") if p.is_file())
    _, differ, missing = filecmp.cmpfiles(a, b, map(str, names), shallow=False)
    if differ or missing:
        raise SystemExit(f"{b} is not {a}: {differ + missing}")


def weights(new: Path, base: Path) -> tuple[Bytes, Bytes]:
    """The bytes of all tensors of the one, and of those of the same names of the other."""
    with FolderSource(new) as a, FolderSource(base) as b:
        there = {t.name: t for t in b.tensors()}
        tensors = list(a.tensors())
        return (
            np.concatenate([a.read(t) for t in tensors]),
            np.concatenate([b.read(there[t.name]) for t in tensors]),
        )


def with_zstd(data: Bytes, level: int, threads: int) -> dict[str, float]:
    """Size and times of zstd."""
    encoder = zstandard.ZstdCompressor(level=level, threads=threads)
    return timed(lambda: encoder.compress(data.tobytes()), zstandard.ZstdDecompressor().decompress, data)


def timed(encode: Callable[[], bytes], decode: Callable[[Any], Any], data: Bytes) -> dict[str, float]:
    """Size and times of a codec, once. Raises SystemExit if it does not give `data` back."""
    began = time.perf_counter()
    coded = encode()
    encoded = time.perf_counter()
    back = decode(coded)
    ended = time.perf_counter()
    if bytes(back) != data.tobytes():
        raise SystemExit("a peer does not restore what it was given")
    return {"bytes": len(coded), "encode_seconds": encoded - began, "decode_seconds": ended - encoded}


if __name__ == "__main__":
    main()
