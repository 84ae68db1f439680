"""The lossless codec on the CPU beside ZipNN and zstd: the same bytes, the same threads, one run.

    python benchmarks/cpu_codec.py [--threads 2] [--rounds 7] [--weights 67108864]

Everything happens in memory, which malloc keeps when it is freed: otherwise the system's handing out of fresh
pages is what gets measured, of all codecs alike. A codec whose output is not the input is not timed. Codecs
take turns round by round, each with a warm-up, and the median of the rounds counts.
Peers: pip install -r benchmarks/requirements.txt
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from record import Environment, Measurement, save, spread
from zipnn import ZipNN

from neuzip.compress.encode_tensor import SMALL
from neuzip.compress.schemes import lossless
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.workers import Workers
from neuzip.kernels.float_fields import FORMATS

Bits = npt.NDArray[np.uint16]
Coded = tuple[int, int, dict[str, npt.NDArray[np.uint8]]]
FORMAT = FORMATS["BF16"]


@dataclass
class Codec:
    """`encode` gives whatever `decode` restores the tensors from; `size` is what that takes on disk.

    `prepare` gives the tensors the form that `encode` takes; it is not timed.
    """

    name: str
    prepare: Callable[[list[Bits]], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], list[Bits]]
    size: Callable[[Any], int]


def main() -> None:
    """Measure all cases, print the table, save the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--weights", type=int, default=1 << 26)
    arguments = parser.parse_args()
    keep_memory()
    results = []
    with Workers(arguments.threads) as workers:
        codecs = [neuzip_codec(workers), zipnn_codec(arguments.threads), zstd_codec(arguments.threads)]
        for case, tensors in cases(arguments.weights):
            results += measure(case, tensors, codecs, arguments.rounds)
    path = save(
        "cpu_codec",
        "lossless bf16 on a CPU, in memory; GB/s of bf16, medians",
        Measurement(
            Environment.here("neuzip-toolkit", "numba", "numpy", "zipnn", "zstandard"),
            results,
            {"threads": arguments.threads, "rounds": arguments.rounds},
        ),
    )
    print(f"saved {path}")


def keep_memory() -> None:
    """Tell glibc's malloc to give nothing back to the system (mallopt(3))."""
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(mmap_max, 0) and libc.mallopt(trim_threshold, 2**31 - 1)):
        raise SystemExit("mallopt refused: this benchmark is for glibc")


def cases(weights: int) -> Iterator[tuple[str, list[Bits]]]:
    """Made-up weights, and the real checkpoint if there is one."""
    rng = np.random.default_rng(0)
    yield "gaussian", [bf16(rng.standard_normal(weights, np.float32) * np.float32(0.02))]
    heavy = rng.standard_t(4, weights // 4).astype(np.float32) * np.float32(0.02)
    yield "student-t4", [bf16(heavy)]
    if data := os.environ.get("NEUZIP_DATA"):
        with FolderSource(Path(data) / "wikilm-26m") as source:
            yield "wikilm-26m", [source.read(t).view(np.uint16) for t in source.tensors()]


def bf16(values: npt.NDArray[np.float32]) -> Bits:
    """Round to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def neuzip_codec(workers: Workers) -> Codec:
    """Streams as they stand in a container, without names and checksums.

    As in `neuzip compress`, small tensors are coded side by side and large ones split among the threads.
    """

    def encode_one(bits: Bits, parallel: lossless.Map = map) -> Coded:
        try:
            kept, streams = lossless.encode(lambda a, b: bits[a:b], bits.size, FORMAT, parallel)
        except lossless.NotWorthwhile:
            return -1, bits.size, {"raw": bits.view(np.uint8)}
        return kept, bits.size, {name: joined(s.parts) for name, s in streams.items()}

    def encode(tensors: list[Bits]) -> list[Coded]:
        coded: list[Coded] = []
        for large, group in itertools.groupby(tensors, key=lambda t: t.size > SMALL):
            alike = list(group)
            coded += [encode_one(t, workers.map) for t in alike] if large else workers.map(encode_one, alike)
        return coded

    def decoder(coded: Coded) -> lossless.LosslessDecoder:
        kept, numel, streams = coded
        return lossless.LosslessDecoder(
            lambda name, a, b: streams[name][a:b], lambda name: streams[name].size, numel, FORMAT, kept
        )

    def pieces(coded: list[Coded], outputs: list[Bits]) -> Iterator[Callable[[], object]]:
        for one, out in zip(coded, outputs, strict=True):
            if one[0] < 0:
                out[:] = one[2]["raw"].view(np.uint16)
                continue
            read = decoder(one).read
            for start, stop in lossless.pieces(out.size):
                yield functools.partial(read, start, stop, out[start:stop])

    def decode(coded: list[Coded]) -> list[Bits]:
        outputs = [np.empty(numel, np.uint16) for _, numel, _ in coded]
        for _ in workers.map(lambda job: job(), pieces(coded, outputs)):
            pass
        return outputs

    def size(coded: list[Coded]) -> int:
        return sum(s.nbytes for _, _, streams in coded for s in streams.values())

    return Codec("neuzip", list, encode, decode, size)


def joined(parts: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[np.uint8]:
    """The parts of a stream in one array, as in a file."""
    filled = [p.view(np.uint8) for p in parts if p.size]
    return filled[0] if len(filled) == 1 else np.concatenate(filled)


def zipnn_codec(threads: int) -> Codec:
    """ZipNN on the bytes of each tensor."""
    zipnn = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=threads)
    return Codec(
        "zipnn",
        lambda tensors: [bytearray(t.tobytes()) for t in tensors],  # it overwrites its input
        lambda arrays: [zipnn.compress(array) for array in arrays],
        lambda coded: [np.frombuffer(zipnn.decompress(c), np.uint16) for c in coded],
        lambda coded: sum(len(c) for c in coded),
    )


def zstd_codec(threads: int) -> Codec:
    """zstd at level 3. Its decoder has one thread."""
    compressor = zstandard.ZstdCompressor(level=3, threads=threads)
    decompressor = zstandard.ZstdDecompressor()
    return Codec(
        "zstd -3",
        list,
        lambda tensors: [compressor.compress(t.data) for t in tensors],
        lambda coded: [np.frombuffer(decompressor.decompress(c), np.uint16) for c in coded],
        lambda coded: sum(len(c) for c in coded),
    )


def measure(case: str, tensors: list[Bits], codecs: list[Codec], rounds: int) -> list[dict[str, object]]:
    """Check every codec, then time them in turns."""
    total = sum(t.nbytes for t in tensors)
    sizes, encode_times, decode_times = {}, {c.name: [] for c in codecs}, {c.name: [] for c in codecs}
    for codec in codecs:
        coded = codec.encode(codec.prepare(tensors))
        restored = codec.decode(coded)
        if any(a.tobytes() != b.tobytes() for a, b in zip(tensors, restored, strict=True)):
            raise SystemExit(f"{codec.name} does not restore {case}: not timed")
        sizes[codec.name] = codec.size(coded)
    for _ in range(rounds):
        for codec in codecs:
            # Twice a turn, and the second counts: the first gets memory from the system, the second has it.
            for counts in (False, True):
                prepared = codec.prepare(tensors)
                began = time.perf_counter()
                coded = codec.encode(prepared)
                between = time.perf_counter()
                codec.decode(coded)
                ended = time.perf_counter()
                if counts:
                    encode_times[codec.name].append(between - began)
                    decode_times[codec.name].append(ended - between)
    print(f"\n{case}: {total / 1e6:.1f} MB\n{'':10}{'size':>9}{'encode GB/s':>13}{'decode GB/s':>13}")
    rows: list[dict[str, object]] = []
    for codec in codecs:
        fast = [total / t / 1e9 for t in encode_times[codec.name]]
        back = [total / t / 1e9 for t in decode_times[codec.name]]
        row = {
            "case": case,
            "codec": codec.name,
            "bytes": total,
            "ratio": sizes[codec.name] / total,
            **spread(fast, "encode_gb_s"),
            "encode_range": [min(fast), max(fast)],
            **spread(back, "decode_gb_s"),
            "decode_range": [min(back), max(back)],
        }
        rows.append(row)
        print(f"{codec.name:10}{row['ratio']:>9.2%}{row['encode_gb_s']:>13.2f}{row['decode_gb_s']:>13.2f}")
    return rows


if __name__ == "__main__":
    main()
