"""Whether two versions of neuzip write the same bytes, and restore what the other wrote.

    python benchmarks/same_bytes.py --other "COMMAND" --other-commit C
        [--device cuda] [--jobs 8] [--checkpoint FOLDER]

COMMAND starts the other version, for example "../other/.venv/bin/neuzip". Each checkpoint is compressed by
both versions in several ways; folders must be equal file by file, and each version must restore the other's
result. Checkpoints: the built-in demo, one with every dtype that safetensors knows (made here: sizes from
empty to two blocks, infinities, NaN payloads, denormals, both zeros), and the folders that are given. The
result goes to benchmarks/results/same_bytes_DEVICE.json. Exit code 1 and a line on stderr for the first
difference.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from record import ROOT, Environment, Measurement, save

from neuzip.formats.safetensors_file import DTYPE_BITS

THIS = f"{shlex.quote(sys.executable)} -P -m neuzip"
WAYS: dict[str, list[str]] = {
    "lossless": [],
    "3 mantissa bits": ["--mantissa-bits", "3"],
    "1 mantissa bit, blocks of 512": ["--mantissa-bits", "1", "--block-size", "512"],
    "ternary": ["--ternary", "--allow-destructive", "--ternary-group", "row"],
    "ternary, 2 bits, groups of 64": [
        "--ternary", "--allow-destructive", "--ternary-group", "64", "--ternary-packing", "2bit",
        "--ternary-quantizer", "least-squares", "--activations", "a4.8",
    ],
}  # fmt: skip
DELTA = "delta to a checkpoint with every 100th byte changed"


class Difference(Exception):
    """Two folders differ, or a command failed."""


@dataclass(frozen=True)
class Versions:
    """The commands that start the two versions, and the options that both get."""

    commands: dict[str, list[str]]
    device: str

    def run(self, version: str, *arguments: str | Path) -> None:
        """Run a command of one version. Raises Difference if it fails."""
        command = [*self.commands[version], *map(str, arguments)]
        if arguments[0] in ("compress", "decompress", "apply"):
            command += ["--device", self.device]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir())
        if done.returncode:
            raise Difference(f"{shlex.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")

    def compare(self, way: str, checkpoint: Path, options: list[str], work: Path) -> int:
        """Compress with both, compare, restore each with the other. Returns the bytes of one result."""
        results = {version: work / version for version in self.commands}
        for version, result in results.items():
            self.run(version, "compress", checkpoint, result, *options)
        first, second = results.values()
        require_equal(first, second, f"{way}: containers of {checkpoint.name}")
        restoring = ["apply"] if "--base" in options else ["decompress"]
        base = ["--base", options[options.index("--base") + 1]] if "--base" in options else []
        for version, result in zip(self.commands, (second, first), strict=True):
            restored = work / f"restored by {version}"
            self.run(version, *restoring, result, *base, restored)
            if way in ("lossless", DELTA):
                require_equal(checkpoint, restored, f"{way}: {checkpoint.name} restored by {version}")
        require_equal(
            *(work / f"restored by {v}" for v in self.commands), f"{way}: {checkpoint.name} restored"
        )
        return sum(p.stat().st_size for p in first.rglob("*") if p.is_file())


def require_equal(first: Path, second: Path, what: str) -> None:
    """Raise Difference unless two folders have the same files with the same bytes."""
    names = [sorted(str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()) for f in (first, second)]
    if names[0] != names[1]:
        raise Difference(f"{what}: other files: {sorted(set(names[0]) ^ set(names[1]))}")
    for name in names[0]:
        if (first / name).read_bytes() != (second / name).read_bytes():
            raise Difference(f"{what}: {name} differs")


def every_dtype(folder: Path) -> Path:
    """Write a checkpoint whose tensors have every dtype and awkward sizes and values."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    header: dict[str, object] = {}
    data = bytearray()
    for dtype, bits in sorted(DTYPE_BITS.items(), key=lambda item: (-item[1], item[0])):
        for name, shape in (("large", (257, 1024)), ("row", (1, 4100)), ("one", (8,)), ("empty", (0, 3))):
            part = values(dtype, bits, int(np.prod(shape)), rng)
            header[f"model.layers.0.{name}.{dtype}_proj.weight"] = {
                "dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(part)],
            }  # fmt: skip
            data += part
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text('{"model_type": "llama"}\n')
    return folder


def values(dtype: str, bits: int, numel: int, rng: np.random.Generator) -> bytes:
    """Elements of a dtype: weights as models have them where numpy has such floats, or any bits."""
    weights = rng.normal(0, 0.02, numel)
    special = rng.random(numel) < 0.001
    if dtype in ("F64", "F32", "F16"):
        patterns = weights.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).view(f"<u{bits // 8}")
    elif dtype == "BF16":
        patterns = (weights.astype("<f4").view("<u4") >> 16).astype("<u2")
    elif dtype in ("F8_E5M2", "F8_E5M2FNUZ"):
        patterns = (weights.astype("<f2").view("<u2") >> 8).astype("u1")
    else:
        return rng.bytes(numel * bits // 8)
    noise = np.frombuffer(rng.bytes(patterns.nbytes), patterns.dtype)  # NaN payloads, infinities, denormals
    return np.where(special, noise, patterns).astype(patterns.dtype).tobytes()


def changed(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint in which every 100th byte of the weights is another."""
    shutil.copytree(checkpoint, folder)
    for path in folder.glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        content[start::100] = bytes(byte ^ 1 for byte in content[start::100])
        path.chmod(0o644)
        path.write_bytes(content)
    return folder


def main() -> None:
    """Compare all checkpoints in all ways, and write the result down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", required=True, help="the command that starts the other version")
    parser.add_argument("--other-commit", required=True, help="the commit of the other version")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="ways that are compared at a time")
    parser.add_argument("--checkpoint", type=Path, action="append", default=[])
    options = parser.parse_args()
    versions = Versions({"this": shlex.split(THIS), "other": shlex.split(options.other)}, options.device)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        demo = work / "demo"
        shutil.copytree(ROOT / "eval" / "demo" / "checkpoint", demo)
        checkpoints = [demo, every_dtype(work / "every-dtype"), *(c.resolve() for c in options.checkpoint)]
        cases = []
        for checkpoint in checkpoints:
            base = changed(checkpoint, work / f"base of {checkpoint.name}")
            for number, (way, extra) in enumerate((WAYS | {DELTA: ["--base", str(base)]}).items()):
                cases.append((way, checkpoint, extra, work / f"{checkpoint.name}-{number}"))
        with ThreadPoolExecutor(options.jobs) as threads:
            stored_bytes = threads.map(lambda case: versions.compare(*case), cases)
            for (way, checkpoint, _, folder), stored in zip(cases, stored_bytes, strict=True):
                print(f"{checkpoint.name}: {way}: equal, {stored:,} bytes", file=sys.stderr)
                rows.append({"checkpoint": checkpoint.name, "way": way, "bytes": stored})
                shutil.rmtree(folder)
    environment = Environment.here("numpy", "torch", gpu=options.device != "cpu")
    measurement = Measurement(environment, rows, {"other": options.other_commit})
    save(f"same_bytes_{options.device}", "two versions write the same bytes", measurement)


if __name__ == "__main__":
    try:
        main()
    except Difference as difference:
        sys.exit(str(difference))
