"""The inputs of the golden containers, from integer arithmetic alone; run it to write tests/golden anew.

    python tests/golden/make.py

Every release has to read the containers in v1, v1b and v1c. A writer that writes other bytes gets a folder of
its own, and those before stay as they are; all restore to the same. v1b has the `format` "neuzip", v1 "pt".
"""

from __future__ import annotations

import csv
import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuzip.compress import Rule, Scheme, compress, decompress
from neuzip.compress.delta_job import compress_delta

HERE = Path(__file__).resolve().parent
V1 = HERE / "v1"
WRITTEN = HERE / "v1b"
"""What neuzip writes today."""

LATER_WRITTEN = HERE / "v1c"
"""What neuzip writes today in schemes that v1b does not have."""

BASES = V1 / "bases"
EXPECTED = "expected.json"
SIZES = HERE / "sizes.csv"

FIELDS = {  # exponent bits, mantissa bits
    "BF16": (8, 7),
    "F16": (5, 10),
    "F32": (8, 23),
    "F64": (11, 52),
    "F8_E4M3": (4, 3),
    "F8_E4M3FNUZ": (4, 3),
    "F8_E5M2": (5, 2),
    "F8_E5M2FNUZ": (5, 2),
}
LOSSLESS = Rule("*", Scheme())


class Tensor(NamedTuple):
    """A tensor as a safetensors file has it."""

    dtype: str
    shape: list[int]
    data: bytes


class Input(NamedTuple):
    """A safetensors file, and the rules by which it is compressed, perhaps against other tensors."""

    tensors: dict[str, Tensor]
    rules: tuple[Rule, ...] = (LOSSLESS,)
    metadata: dict[str, str] | None = None
    padding: int = 0
    base: dict[str, Tensor] | None = None

    def to_bytes(self) -> bytes:
        header: dict[str, object] = {} if self.metadata is None else {"__metadata__": self.metadata}
        end = 0
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
            end += len(data)
        text = json.dumps(header, separators=(",", ":")).encode() + b" " * self.padding
        return len(text).to_bytes(8, "little") + text + b"".join(t.data for t in self.tensors.values())


def numbers(seed: str, n: int, bits: int = 64) -> np.ndarray:
    """`n` random integers that never change."""
    return np.frombuffer(hashlib.shake_256(seed.encode()).digest(n * bits // 8), f"<u{bits // 8}")


def bell(seed: str, n: int, top: int) -> np.ndarray:
    """Exponents as trained weights have them: each one below `top` is half as frequent as the next."""
    halvings = np.unpackbits(numbers(seed, n, 16).view(np.uint8).reshape(n, 2), axis=1).argmax(axis=1)
    return np.asarray(np.maximum(top - halvings, 1), np.uint64)


def weights(dtype: str, seed: str, exponents: np.ndarray, kept: int | None = None) -> Tensor:
    """Random signs, and random mantissas of `kept` bits (all of them by default)."""
    E, M = FIELDS[dtype]
    kept = M if kept is None else kept
    random = numbers(seed, len(exponents))
    mantissas = (random & np.uint64((1 << kept) - 1)) << np.uint64(M - kept)
    patterns = (random >> np.uint64(63)) << np.uint64(E + M) | exponents << np.uint64(M) | mantissas
    return Tensor(dtype, [len(exponents)], patterns.astype(f"<u{(1 + E + M) // 8}").tobytes())


def normal(dtype: str, n: int, kept: int | None = None, seed: str = "") -> Tensor:
    E = FIELDS[dtype][0]
    seed = f"{dtype} {seed}"
    return weights(dtype, "weights of " + seed, bell("exponents of " + seed, n, (1 << E - 1) - 1), kept)


def uniform(seed: str, n: int, low: int, high: int) -> np.ndarray:
    return np.asarray(np.uint64(low) + numbers(seed, n) % np.uint64(high - low))


def lossless_escapes() -> Input:
    rare = bell("rare", 16384 + 100, 120)
    rare[::1024] = 200 + np.arange(len(rare[::1024]))
    rare[-1] = 255
    return Input(
        {
            "pairs": weights("BF16", "pairs", rare, kept=0),
            "more than 256 exponents": weights("F64", "F64", uniform("F64", 3000, 700, 1300), kept=2),
        }
    )


def alias_raw_metadata() -> Input:
    bf16, fp32 = normal("BF16", 4800, seed="alias"), normal("F32", 1600, seed="alias")
    return Input(
        {
            "scalar": Tensor("I64", [], bytes(range(8))),
            "weight": bf16._replace(shape=[60, 80]),
            "truncated": fp32,
            "odd": Tensor("U8", [3], b"\x00\xff\x7f"),
            "none": Tensor("F32", [0, 4], b""),
            "tied weight": bf16._replace(shape=[60, 80]),
            "tied truncated": fp32,
            "small ü": normal("F16", 6),
            "as it is": normal("F16", 300, seed="raw"),
        },
        (Rule("*truncated", Scheme("truncated", 5)), Rule("as it is", Scheme("raw")), LOSSLESS),
        {"format": "pt", "note": "naïve"},
        padding=5,
    )


def signs(dtype: str, seed: str, rows: int, columns: int, *scales: int) -> Tensor:
    """Weights that are 0 or have one of these patterns for a magnitude, which rows take in turn."""
    E, M = FIELDS[dtype]
    random = numbers(seed, rows * columns).reshape(rows, columns)
    magnitudes = np.resize(np.array(scales, np.uint64), rows)[:, None]
    patterns = (random >> np.uint64(63)) << np.uint64(E + M) | magnitudes
    patterns = np.where(random % np.uint64(3) == 0, np.uint64(0), patterns)
    return Tensor(dtype, [rows, columns], patterns.astype(f"<u{(1 + E + M) // 8}").tobytes())


def ternary() -> Input:
    """Three dtypes, all sorts of scales, both packings, and aliases."""
    names = {"tensor": "BF16", "row": "F16", "group": "F32", "2bit": "BF16", "2bit group": "F32"}
    tensors = {
        name: normal(dtype, 5022, seed=f"ternary {name}")._replace(shape=[54, 93])
        for name, dtype in names.items()
    }
    return Input(
        {**tensors, "tied": tensors["tensor"], "norm": normal("F32", 2000, seed="norm")},
        (
            Rule("row", Scheme("ternary", group="row", quantizer="least-squares", scale_dtype="F16")),
            Rule("group", Scheme("ternary", group=32)),
            Rule("2bit", Scheme("ternary", packing="2bit", quantizer="least-squares")),
            Rule("2bit group", Scheme("ternary", packing="2bit", group=31, scale_dtype="F16")),
            Rule("norm", Scheme("truncated", 3)),
            Rule("*", Scheme("ternary")),
        ),
    )


def ternary_exact() -> Input:
    """What is ternary already, without being asked for; and a tensor that is so but for the sign of zeros."""
    zero = np.frombuffer(signs("BF16", "zero", 60, 80, 0x3C20).data, "<u2").copy()
    zero[7] = 0x8000
    return Input(
        {
            "one scale": signs("BF16", "one", 61, 83, 0x3C25),
            "a scale a row": signs("F16", "rows", 40, 160, 0x2155, 0x2AAA, 0x1111),
            "as asked": signs("F32", "asked", 40, 96, 0x3C254321),
            "zero": Tensor("BF16", [60, 80], zero.tobytes()),
        },
        (Rule("as asked", Scheme("ternary", packing="2bit", scale_dtype="F16")), LOSSLESS),
    )


def changed(before: Tensor, seed: str, share: int, most: int, step: int = 1) -> Tensor:
    """Every `share`-th pattern of a tensor, more or less, up to `most` steps larger or smaller."""
    kind = f"<u{(1 + sum(FIELDS[before.dtype])) // 8}"
    patterns = np.frombuffer(before.data, kind)
    random = numbers(seed, patterns.size)
    moved = (random >> np.uint64(32)) % np.uint64(2 * most + 1) * np.uint64(step)
    moved = (moved - np.uint64(most * step)).astype(kind)
    patterns = np.where(random % np.uint64(share) == 0, patterns + moved, patterns)
    return before._replace(data=patterns.tobytes())


def part(tensor: Tensor, other: Tensor, start: int, stop: int) -> Tensor:
    """A tensor with some of its bytes from another."""
    return tensor._replace(data=tensor.data[:start] + other.data[start:stop] + tensor.data[stop:])


def delta() -> Input:
    """All sorts of blocks and digits, raw bits, a shift, and tensors that need no base or are it."""
    base = {
        "lists": normal("BF16", 3 * 16384 + 700, seed="lists")._replace(shape=[4, 12463]),
        "coded": normal("BF16", 16384 + 40, seed="coded"),
        "fp16": normal("F16", 5000, seed="delta"),
        "raw bits": normal("F32", 3000, seed="delta"),
        "two digits": normal("F32", 3000, seed="digits"),
        "shift": normal("F32", 5000, kept=7, seed="shift"),
        "fp64": normal("F64", 1500, seed="delta"),
        "fp8": normal("F8_E4M3", 9000, seed="delta"),
        "unchanged": normal("BF16", 3000, seed="unchanged"),
        "integers": Tensor("I64", [4], numbers("integers", 4).tobytes()),
        "another shape": normal("BF16", 400, seed="shape"),
        "another tensor": normal("BF16", 4000, seed="another"),
    }
    coded = changed(base["coded"], "coded", 3, 4)
    few = changed(base["lists"], "few", 3000, 20)
    many = changed(base["lists"], "many", 9, 2)
    zeros = np.frombuffer(coded.data, "<u2").copy()
    zeros[:8] = [0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 1, 0x8001]
    outliers = np.frombuffer(changed(base["two digits"], "digits", 20, 3).data, "<u4").copy()
    outliers[::400] ^= np.uint32(1 << 31)
    tensors = base | {
        "lists": part(part(few, base["lists"], 2 * 16384, 4 * 16384), many, 4 * 16384, 6 * 16384),
        "coded": coded._replace(data=zeros.tobytes()),
        "fp16": changed(base["fp16"], "fp16", 4, 1),
        "raw bits": changed(base["raw bits"], "raw bits", 1, 9000),
        "two digits": base["two digits"]._replace(data=outliers.tobytes()),
        "shift": changed(base["shift"], "shift", 2, 3, 1 << 16),
        "fp64": changed(base["fp64"], "fp64", 1, 1 << 20),
        "fp8": changed(base["fp8"], "fp8", 5, 1),
        "another shape": normal("BF16", 500, seed="shape"),
        "another tensor": normal("BF16", 4000, seed="no base"),
    }
    tensors["tied"] = tensors["coded"]
    return Input(tensors, base=base)


GOLDEN: dict[str, Callable[[], Input]] = {
    "smallest": lambda: Input({}),
    "lossless_pairs": lambda: Input({"w": normal("BF16", 16384 + 257)._replace(shape=[43, 387])}),
    "lossless_group_1": lambda: Input({"w": weights("BF16", "wide", uniform("wide", 7000, 60, 100))}),
    "lossless_escapes": lossless_escapes,
    "lossless_dtypes": lambda: Input(
        {
            "fp16": normal("F16", 9000),
            "fp32": normal("F32", 2000),
            "fp32 that was bf16": normal("F32", 2000, kept=7, seed="bf16"),
            "fp32 that was fp16": normal("F32", 2000, kept=10, seed="fp16"),
            "constant": weights("BF16", "constant", np.full(3000, 127, np.uint64), kept=0),
        }
    ),
    "lossless_fp64": lambda: Input({"fp64": normal("F64", 2000), "k=31": normal("F64", 1000, 31, "k")}),
    "lossless_fp8": lambda: Input({name: normal(name, 8000) for name in FIELDS if name.startswith("F8")}),
    "truncated": lambda: Input(
        {name: normal(name, 5000, seed="truncated") for name in FIELDS},
        (Rule("F8_*", Scheme("truncated", 1)), Rule("*", Scheme("truncated", 3))),
    ),
    "truncated_normaliser": lambda: Input(
        {name: normal(name, 3001, seed="normaliser") for name in ("BF16", "F16", "F32", "F64")},
        (
            Rule("BF16", Scheme("truncated", 3, 64)),
            Rule("F16", Scheme("truncated", 0, 8)),
            Rule("F32", Scheme("truncated", 6, 512)),
            Rule("F64", Scheme("truncated", 13, 16384)),
        ),
    ),
    "alias_raw_metadata": alias_raw_metadata,
    "ternary": ternary,
    "ternary_exact": ternary_exact,
    "delta": delta,
    "pool": lambda: Input(
        {"w": normal("BF16", 3000, seed="pool")}
        | {f"s.{i}": normal("BF16", i % 3, seed=f"{i}") for i in range(1030)},
        metadata={"format": "pt"},
    ),
}


def quantized() -> Input:
    """Steps alone and with factors, codes of few and of many bits, what loses nothing, and an alias."""
    tensors = {name: normal(name, 5022, seed="quantized")._replace(shape=[54, 93]) for name in FIELDS}
    whole = uniform("on the grid", 4000, 0, 12).astype(np.float32) - np.float32(6)
    far = uniform("escapes", 4000, 0, 40).astype(np.float32) / np.float32(20)
    far[1234] = 40
    exact = Tensor("F32", [40, 100], (whole / 4).astype("<f4").tobytes())
    return Input(
        tensors
        | {
            "rows": normal("BF16", 3 * 6001, seed="rows")._replace(shape=[3, 6001]),
            "columns": normal("F16", 6000, seed="columns")._replace(shape=[20, 3, 100]),
            "both": normal("BF16", 5022, seed="both")._replace(shape=[54, 93]),
            "low bits": normal("F32", 4000, seed="escapes"),
            "escapes": Tensor("F32", [4000], far.astype("<f4").tobytes()),
            "on the grid": exact,
            "tied": tensors["BF16"],
        },
        (
            Rule("F8_E5M2", Scheme("quantized", step=0.5)),
            Rule("F8_*", Scheme("quantized", step=0.25)),
            Rule("rows", Scheme("quantized", step=0.1, row_factors=True)),
            Rule("columns", Scheme("quantized", step=0.02, column_factors=True)),
            Rule("both", Scheme("quantized", step=0.07, row_factors=True, column_factors=True)),
            Rule("low bits", Scheme("quantized", step=0.006)),
            Rule("on the grid", Scheme("quantized", step=0.25)),
            Rule("*", Scheme("quantized", step=0.05)),
        ),
    )


LATER: dict[str, Callable[[], Input]] = {"quantized": quantized}
"""Recipes of the files in v1c."""

# Too large to keep, but their sizes are watched.
WATCHED: dict[str, Callable[[], Input]] = {
    "large_bf16": lambda: Input({"w": normal("BF16", 300_000, seed="large")}),
    "large_fp16": lambda: Input({"w": normal("F16", 300_000, seed="large")}),
    "large_fp32": lambda: Input({"w": normal("F32", 200_000, seed="large")}),
    "large_fp32_that_was_bf16": lambda: Input({"w": normal("F32", 200_000, kept=7, seed="large bf16")}),
    "large_fp8": lambda: Input({"w": normal("F8_E4M3", 300_000, seed="large")}),
    "large_truncated": lambda: Input(
        {"w": normal("BF16", 300_000, seed="large")}, (Rule("*", Scheme("truncated", 3)),)
    ),
    "large_normaliser": lambda: Input(
        {"w": normal("BF16", 300_000, seed="large")}, (Rule("*", Scheme("truncated", 3, 512)),)
    ),
    "large_ternary": lambda: Input(
        {"w": normal("BF16", 300_000, seed="large")._replace(shape=[300, 1000])},
        (Rule("*", Scheme("ternary", group=128)),),
    ),
    "many_small": lambda: Input({f"layer.{i}.w": normal("BF16", 1200, seed=str(i)) for i in range(60)}),
}


class Made(NamedTuple):
    """An input and what neuzip made of it."""

    original: bytes
    container: bytes
    restored: bytes


def make(recipe: Callable[[], Input], folder: Path) -> Made:
    """Compress an input and restore it, in an empty folder."""
    source, packed, restored = (folder / f"{step}.safetensors" for step in ("source", "packed", "restored"))
    given = recipe()
    source.write_bytes(given.to_bytes())
    base = None
    if given.base is None:
        compress(source, packed, given.rules, overwrite=True, verify=False, allow_destructive=True)
    else:
        base = folder / "base.safetensors"
        base.write_bytes(Input(given.base).to_bytes())
        compress_delta(source, base, packed, "base", given.rules, overwrite=True, verify=False)
    decompress(packed, restored, overwrite=True, base=base)
    return Made(source.read_bytes(), packed.read_bytes(), restored.read_bytes())


def write() -> None:
    """Write the containers, the checksums of what they restore to, and the sizes."""
    sizes = write_folder(WRITTEN, GOLDEN, WATCHED) + write_folder(LATER_WRITTEN, LATER, {})
    with open(SIZES, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([["name", "original_bytes", "compressed_bytes"], *sizes])


def write_folder(
    folder: Path, kept: dict[str, Callable[[], Input]], watched: dict[str, Callable[[], Input]]
) -> list[list[object]]:
    """Write the containers that are `kept`, and what they restore to; the sizes of these and the others."""
    folder.mkdir(exist_ok=True)
    expected, sizes = {}, list[list[object]]()
    with tempfile.TemporaryDirectory() as work:
        for name, recipe in (kept | watched).items():
            made = make(recipe, Path(work))
            sizes.append([name, len(made.original), len(made.container)])
            if name in kept:
                (folder / f"{name}.safetensors").write_bytes(made.container)
                if (base := recipe().base) is not None:
                    BASES.mkdir(exist_ok=True)
                    (BASES / f"{name}.safetensors").write_bytes(Input(base).to_bytes())
                expected[name] = hashlib.sha256(made.restored).hexdigest()
    (folder / EXPECTED).write_text(json.dumps(expected, indent=2) + "\n", encoding="utf-8")
    return sizes


if __name__ == "__main__":
    write()
