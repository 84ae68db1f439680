"""The coder's loops on arrays beside pages that nobody may touch: an access out of bounds is a SIGSEGV.

    python -P tests/fuzz/guarded.py scalar|vector

tries sizes around the edges of runs and blocks, and words that no encoder wrote. numba's bounds checks do not
see the loads and stores of the vector form, which are LLVM's.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from neuzip.kernels import rans
from neuzip.kernels.device.compiled import read_only
from neuzip.kernels.rans import cpu, vector_form
from neuzip.kernels.rans.numbers import BLOCK, LANES, LOWER

SIDES = ("begin", "end")
SIZES = (1, 255, 256, 257, 511, 512, 513, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 257)
_libc = ctypes.CDLL(None, use_errno=True)


def fenced(array: np.ndarray, side: str) -> np.ndarray:
    """A copy of an array; at this side of it, and near the other, lies memory that cannot be touched."""
    pages = -(-max(array.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + 2 * mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (first, first + mmap.PAGESIZE + pages):
        if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), 0):  # PROT_NONE
            raise OSError(ctypes.get_errno(), "mprotect")
    at = mmap.PAGESIZE + (pages - array.nbytes if side == "end" else 0)
    copied = np.frombuffer(memory, array.dtype, array.size, at)
    copied[:] = array
    return copied


def forms() -> list[vector_form.Form]:
    """The scalar form, and the vector form where this processor has what it is for."""
    return [vector_form.SCALAR, vector_form.VECTOR] if vector_form.SUPPORTED else [vector_form.SCALAR]


def encode(exponents: np.ndarray, table: rans.Table, form: vector_form.Form, side: str) -> rans.RansEncoded:
    """`rans.encode` in one form, all arrays fenced; a second time into memory for just the words."""
    numel = exponents.size
    short = np.full(-numel % 256, table.filler, exponents.dtype)
    padded = fenced(np.concatenate([exponents, short]), side)
    index = fenced(np.zeros(-(-numel // BLOCK), np.uint16), side)
    facts, symbols = fenced(table.encoder, side), fenced(table.symbols, side)
    used = rans.max_words(numel, table.group)
    for _ in range(2):
        words = fenced(np.zeros(used, np.uint16), side)
        used = cpu.encode(table.keys(padded), padded, numel, table.group, symbols, facts, words, index, form)
    return rans.RansEncoded(words.copy(), index.copy())


def decode(
    coded: rans.RansEncoded,
    table: rans.Table,
    numel: int,
    form: vector_form.Form,
    side: str,
    wide: bool = False,
) -> np.ndarray | None:  # fmt: skip
    """`rans.decode` in one form, all arrays fenced; None for words that no encoder wrote."""
    starts, counts = rans._extents(coded.words, coded.index, numel)
    padded = fenced(np.zeros(-(-numel // 256) * 256, np.uint16 if wide else np.uint8), side)
    words = read_only(fenced(coded.words, side))
    bad = cpu.decode(
        words, fenced(starts, side), fenced(counts, side), numel, 11 if wide else 8, table.group,
        fenced(table.decoder, side), fenced(table.exponents, side), table.keys(padded), padded,
        (padded[:0], padded[:0]), form,
    )  # fmt: skip
    return None if bad >= 0 else padded[:numel].copy()


def decode_floats(
    coded: rans.RansEncoded, table: rans.Table, numel: int, form: vector_form.Form, side: str
) -> np.ndarray | None:
    """`rans.decode_floats` to BF16 with fields of zero, in one form, all arrays fenced."""
    starts, counts = rans._extents(coded.words, coded.index, numel)
    block, floats = fenced(np.zeros(BLOCK, np.uint8), side), fenced(np.zeros(numel, np.uint16), side)
    words, fields = (read_only(fenced(array, side)) for array in (coded.words, np.zeros(numel, np.uint8)))
    bad = cpu.decode_floats(
        words, fenced(starts, side), fenced(counts, side), numel, (8, 7), table.group,
        fenced(table.decoder, side), fenced(table.exponents, side), table.keys(block), block,
        fields, 7, floats, form,
    )  # fmt: skip
    return None if bad >= 0 else floats.copy()


def steps(table: rans.Table, form: vector_form.Form, side: str, rng: np.random.Generator) -> None:
    """Single steps with no more room than they may use, which the loops above have inside."""
    encode, decode = (
        (cpu.scalar_encode, cpu.scalar_decode) if form is None else (cpu.vector_encode, cpu.vector_decode)
    )
    usable = np.flatnonzero(table.frequencies).astype(np.uint8)
    for _ in range(50):
        states = rng.integers(LOWER, LOWER << 16, LANES, dtype=np.uint32)
        coded = fenced(rng.choice(usable, LANES), side)
        # The scalar form writes every word before it knows whether it keeps it: one below the last.
        full = int((states >= table.frequencies[coded].astype(np.uint32) << np.uint32(20)).sum())
        room = full + (form is None)
        scratch, state = fenced(np.zeros(room, np.uint16), side), fenced(states, side)
        left = encode(state, fenced(table.encoder, side), coded, np.uint64(0), scratch, np.uint64(room))
        assert int(left) == room - full
        words = read_only(
            fenced(np.concatenate([scratch[int(left) :], np.zeros(LANES - full, np.uint16)]), side)
        )
        decoded = fenced(np.zeros(LANES, np.uint16), side)
        taken = decode(state, fenced(table.decoder, side), words, np.uint64(0), decoded, np.uint64(0))
        assert int(taken) == full
        assert np.array_equal(state, states)
        assert np.array_equal(decoded, table.exponents[coded])


def _tables() -> Iterator[tuple[np.ndarray, rans.Table]]:
    """Exponents of a bell with escapes: in pairs, single, and of 11 bits."""
    values = np.random.default_rng(0).standard_normal(2 * BLOCK + 257).astype(np.float32)
    narrow = (values.view(np.uint32) >> 23 & 0xFF).astype(np.uint8)
    counts = np.bincount(narrow, minlength=256).astype(np.int64)
    even = narrow[: narrow.size // 2 * 2].astype(np.int64)
    pairs = np.bincount(even[::2] | even[1::2] << 8, minlength=1 << 16)
    narrow[::700] = 3
    yield narrow, rans.build_table(counts, pairs)
    yield narrow, rans.build_table(counts, None)
    wide = narrow.astype(np.uint16) + np.uint16(700)
    yield wide, rans.build_table(np.bincount(wide, minlength=2048).astype(np.int64), None)


def main(form: vector_form.Form) -> None:
    rng = np.random.default_rng(1)
    refused = 0
    for exponents, table in _tables():
        wide = exponents.dtype == np.uint16
        for size, side in itertools.product(SIZES, SIDES):
            numbers = exponents[-size:]
            coded = encode(numbers, table, form, side)
            decoded = decode(coded, table, size, form, side, wide)
            assert decoded is not None
            assert np.array_equal(decoded, numbers)
            for _ in range(10):
                words, index = coded.words.copy(), coded.index.copy()
                place = rng.integers(0, words.size, rng.choice([1, 3, words.size]))
                words[place] = rng.integers(0, 1 << 16, place.size, dtype=np.uint16)
                cut = int(rng.choice([0, 0, 1, index[-1] - 65, index[-1]]))  # the last block is too short
                index[-1] -= cut
                hostile = rans.RansEncoded(words[: words.size - cut], index)
                refused += decode(hostile, table, size, form, side, wide) is None
                if not wide:
                    decode_floats(hostile, table, size, form, side)
        for side in SIDES:
            steps(table, form, side, rng)
    assert refused > 100, "these words do not reach the checks"
    print(refused)


def out_of_bounds(side: str) -> Any:
    """What a fence is for."""
    array = fenced(np.zeros(7, np.uint16), side)
    ctypes.memset(array.ctypes.data + (array.nbytes if side == "end" else -1), 0, 1)


if __name__ == "__main__":
    if sys.argv[1] == "beyond":
        out_of_bounds(sys.argv[2])
    else:
        main({"scalar": vector_form.SCALAR, "vector": vector_form.VECTOR}[sys.argv[1]])
