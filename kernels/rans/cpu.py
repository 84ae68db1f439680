"""The loops of the coder, compiled by numba. One thread each; they release the GIL."""

from __future__ import annotations

import numpy as np
from numba import njit

from .numbers import BLOCK, HEADER_WORDS, LANES, LOWER, RARE_BITS, RAW_STEPS, RECIPROCAL_BITS, RUN, SCALE

_U = np.uint64
_8, _16, _20 = _U(8), _U(16), _U(20)
_SCALE, _LOWER, _RECIPROCAL = _U(SCALE), _U(LOWER), _U(RECIPROCAL_BITS)
_12 = _U(12)
_SLOT, _BYTE, _WORD = _U(SCALE - 1), _U(0xFF), _U(0xFFFF)


@njit(nogil=True, cache=True)
def quantise(counts):  # type: ignore[no-untyped-def]
    """Frequencies that add up to SCALE, in proportion to `counts`, at least 1 for all but the rare."""
    everything = counts.sum()
    kept = np.where(counts << RARE_BITS >= everything, counts, 0)
    total = kept.sum()
    share = kept * SCALE  # of frequency, times total
    frequencies = np.where(kept > 0, np.maximum(share // total, 1), 0)
    missing = SCALE - frequencies.sum()
    for _ in range(missing):  # to the symbol that is furthest below its share
        frequencies[np.argmax(share - frequencies * total)] += 1
    for _ in range(-missing):  # from the symbol that is furthest above it, and can spare one
        most = -1
        for s in range(frequencies.size):
            if frequencies[s] > 1 and (
                most < 0 or frequencies[s] * total - share[s] > frequencies[most] * total - share[most]
            ):
                most = s
        frequencies[most] -= 1
    only = np.argmax(frequencies)
    if frequencies[only] == SCALE:
        # A second symbol, which may have no meaning: it never occurs.
        frequencies[only] -= 1
        frequencies[1 if only == 0 else 0] += 1
    return frequencies


@njit(nogil=True, cache=True)
def fill_symbols(group, palette, frequencies, lut):  # type: ignore[no-untyped-def]
    """Fill `Table.symbols`."""
    best = np.argmax(frequencies)
    if group == 1:
        lut[:] = best | 0x100
        for s in range(min(frequencies.size, palette.size)):
            if frequencies[s]:
                lut[palette[s]] = s
        return
    # Three layers: nothing in common with the table, one exponent in common, in the table. Within a layer the
    # most frequent symbol is written last.
    lut[:] = best | 0x300
    by_frequency = np.argsort(frequencies, kind="mergesort")
    for layer in range(3):
        for s in by_frequency:
            first, second = s & 15, s >> 4
            if frequencies[s] == 0 or max(first, second) >= palette.size:
                continue
            if layer == 0:
                for other in range(256):
                    lut[palette[second] << 8 | other] = s | 0x100
            elif layer == 1:
                for other in range(256):
                    at = other << 8 | palette[first]
                    if lut[at] & 0x300 != 0x100:
                        lut[at] = s | 0x200
            else:
                lut[palette[second] << 8 | palette[first]] = s


@njit(nogil=True, cache=True)
def encode(keys, exponents, numel, group, symbols, frequencies, starts, reciprocals, words, index):  # type: ignore[no-untyped-def]
    """Code all blocks; the number of words written. `keys` are the exponents seen in groups."""
    per_run = RUN // group
    # Words grow downwards from the end of `scratch`: the encoder runs backwards.
    scratch = np.empty(BLOCK, np.uint16)
    escapes = np.empty(2 * BLOCK, np.uint16)
    coded = np.empty(BLOCK, np.uint8)  # [step, lane]
    state = np.empty(LANES, np.uint64)
    used = 0
    for b in range(index.size):
        first = b * BLOCK
        runs = min(exponents.size - first, BLOCK) // (LANES * RUN)
        steps = runs * per_run
        n_escapes = 0
        for i in range(runs):
            at = (first + i * LANES * RUN) // group
            flags = np.uint16(0)
            if group == 2:  # twice the same loop, with a count that the compiler knows
                for lane in range(LANES):
                    for q in range(RUN // 2):
                        s = symbols[keys[at + lane * (RUN // 2) + q]]
                        flags |= s
                        coded[(i * (RUN // 2) + q) * LANES + lane] = s & np.uint16(0xFF)
            else:
                for lane in range(LANES):
                    for q in range(RUN):
                        s = symbols[keys[at + lane * RUN + q]]
                        flags |= s
                        coded[(i * RUN + q) * LANES + lane] = s & np.uint16(0xFF)
            if flags > np.uint16(0xFF):
                for k in range(at, at + LANES * per_run):
                    for j in range(group):
                        where = k * group + j
                        if (symbols[keys[k]] >> np.uint16(8 + j)) & np.uint16(1) and where < numel:
                            escapes[2 * n_escapes] = where - first
                            escapes[2 * n_escapes + 1] = exponents[where]
                            n_escapes += 1

        p = BLOCK
        for lane in range(LANES):
            tail = (steps - RAW_STEPS) * LANES + lane
            state[lane] = _LOWER | (_U(coded[tail + LANES]) << _8) | _U(coded[tail])
        for step in range(steps - RAW_STEPS - 1, -1, -1):
            for lane in range(LANES - 1, -1, -1):
                s = coded[step * LANES + lane]
                x = state[lane]
                f = frequencies[s]
                full = x >= (f << _20)
                scratch[p - 1] = x
                p -= np.int64(full)
                x = (x >> _16) if full else x
                # x // f * SCALE + x % f + start, with one product for the division.
                state[lane] = x + ((x * reciprocals[s]) >> _RECIPROCAL) * (_SCALE - f) + starts[s]

        words[used] = n_escapes
        for lane in range(LANES):
            words[used + 1 + lane] = state[lane] & _WORD
            words[used + 1 + LANES + lane] = state[lane] >> _16
        n_words = BLOCK - p
        count = HEADER_WORDS + n_words + 2 * n_escapes
        words[used + HEADER_WORDS : used + HEADER_WORDS + n_words] = scratch[p:]
        words[used + HEADER_WORDS + n_words : used + count] = escapes[: 2 * n_escapes]
        index[b] = count
        used += count
    return used


@njit(nogil=True, cache=True)
def decode(words, starts, counts, numel, exponent_bits, group, table, exponents_of, keys, exponents):  # type: ignore[no-untyped-def]
    """Decode all blocks into `keys`, a view of `exponents`; the first corrupt block, or -1."""
    per_run = RUN // group
    state = np.empty(LANES, np.uint32)
    for b in range(starts.size):
        start = starts[b]
        if counts[b] < HEADER_WORDS:
            return b
        n_escapes = np.int64(words[start])
        # One past the last word that a lane may take.
        limit = start + counts[b] - 2 * n_escapes
        p = start + HEADER_WORDS
        if limit < p:
            return b
        for lane in range(LANES):
            state[lane] = np.uint32(words[start + 1 + lane]) | (
                np.uint32(words[start + 1 + LANES + lane]) << np.uint32(16)
            )
        first = b * BLOCK
        runs = min(exponents.size - first, BLOCK) // (LANES * RUN)
        for i in range(runs):
            at = (first + i * LANES * RUN) // group
            coded_steps = per_run - RAW_STEPS if i == runs - 1 else per_run
            for q in range(coded_steps):
                if p + LANES <= limit:
                    for lane in range(LANES):
                        x = state[lane]
                        entry = table[x & np.uint32(SCALE - 1)]
                        x = ((entry >> np.uint32(8)) & np.uint32(0xFFF)) * (x >> np.uint32(12)) + (
                            entry >> np.uint32(20)
                        )
                        small = x < np.uint32(LOWER)
                        word = np.uint32(words[p])
                        state[lane] = ((x << np.uint32(16)) | word) if small else x
                        p += np.int64(small)
                        keys[at + lane * per_run + q] = exponents_of[entry & np.uint32(0xFF)]
                else:
                    # The same with a look before every word: the end of the block is near.
                    for lane in range(LANES):
                        x = state[lane]
                        entry = table[x & np.uint32(SCALE - 1)]
                        x = ((entry >> np.uint32(8)) & np.uint32(0xFFF)) * (x >> np.uint32(12)) + (
                            entry >> np.uint32(20)
                        )
                        if x < np.uint32(LOWER):
                            if p >= limit:
                                return b
                            x = (x << np.uint32(16)) | np.uint32(words[p])
                            p += 1
                        state[lane] = x
                        keys[at + lane * per_run + q] = exponents_of[entry & np.uint32(0xFF)]
            if i == runs - 1:
                for lane in range(LANES):
                    x = state[lane]
                    if x >> np.uint32(16) != np.uint32(1):
                        return b
                    last = at + lane * per_run + per_run - RAW_STEPS
                    keys[last] = exponents_of[x & np.uint32(0xFF)]
                    keys[last + 1] = exponents_of[(x >> np.uint32(8)) & np.uint32(0xFF)]
        if p != limit:
            return b
        before = first - 1
        for i in range(n_escapes):
            where = first + np.int64(words[limit + 2 * i])
            exponent = np.int64(words[limit + 2 * i + 1])
            if where <= before or where >= min(numel, first + BLOCK) or exponent >> exponent_bits:
                return b
            exponents[where] = exponent
            before = where
    return -1
