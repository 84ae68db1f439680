"""The loops of the coder, compiled by numba. One thread each; they release the GIL."""

from __future__ import annotations

import numpy as np

from neuzip.kernels.device.compiled import compiled
from neuzip.kernels.float_fields.cpu import merge

from .intrinsics import decode_16, encode_16, prefetch
from .numbers import BLOCK, HEADER_WORDS, LANES, LOWER, RARE_BITS, RAW_STEPS, RECIPROCAL_BITS, RUN, SCALE

# Positions in the inner loops are unsigned: numba looks at every signed index whether it counts from the end.
_U = np.uint64
_1, _2, _4, _16, _20, _32 = _U(1), _U(2), _U(4), _U(16), _U(20), _U(32)
_LANES, _RECIPROCAL = _U(LANES), _U(RECIPROCAL_BITS)


@compiled
def quantise(counts):  # type: ignore[no-untyped-def]
    """Frequencies that add up to SCALE, in proportion to `counts`, at least 1 for all but the rare.

    In loops: numba takes six times as long to compile numpy's functions.
    """
    everything, total, missing = 0, 0, SCALE
    for s in range(counts.size):
        everything += counts[s]
    share = np.zeros(counts.size, np.int64)  # of frequency, times total
    for s in range(counts.size):
        if counts[s] << RARE_BITS >= everything:
            share[s] = counts[s] * SCALE
            total += counts[s]
    frequencies = np.zeros(counts.size, np.int64)
    for s in range(counts.size):
        if share[s] > 0:
            frequencies[s] = max(share[s] // total, 1)
            missing -= frequencies[s]
    for _ in range(missing):  # to the symbol that is furthest below its share
        most = 0
        for s in range(counts.size):
            if share[s] - frequencies[s] * total > share[most] - frequencies[most] * total:
                most = s
        frequencies[most] += 1
    for _ in range(-missing):  # from the symbol that is furthest above it, and can spare one
        most = -1
        for s in range(counts.size):
            if frequencies[s] > 1 and (
                most < 0 or frequencies[s] * total - share[s] > frequencies[most] * total - share[most]
            ):
                most = s
        frequencies[most] -= 1
    for s in range(counts.size):
        if frequencies[s] == SCALE:
            # A second symbol, which may have no meaning: it never occurs.
            frequencies[s] -= 1
            frequencies[1 if s == 0 else 0] += 1
            break
    return frequencies


@compiled
def fill_encoder(frequencies, facts):  # type: ignore[no-untyped-def]
    """Fill `Table.encoder`."""
    start = 0
    for s in range(frequencies.size):
        f = frequencies[s]
        if f:
            facts[2 * s] = ((1 << RECIPROCAL_BITS) + f - 1) // f
        facts[2 * s + 1] = f | start << 16
        start += f


@compiled
def fill_symbols(group, palette, frequencies, lut):  # type: ignore[no-untyped-def]
    """Fill `Table.symbols`."""
    best = np.argmax(frequencies)
    if group == 1:
        lut[:] = best | 0x100
        for s in range(min(frequencies.size, palette.size)):
            if frequencies[s]:
                lut[palette[s]] = s
        return
    # The most frequent symbol that has an exponent first, and that has it second.
    by_first = np.full(256, -1)
    by_second = np.full(256, -1)
    for s in range(frequencies.size):
        first, second = s & 15, s >> 4
        if frequencies[s] and max(first, second) < palette.size:
            if by_first[first] < 0 or frequencies[s] > frequencies[by_first[first]]:
                by_first[first] = s
            if by_second[second] < 0 or frequencies[s] > frequencies[by_second[second]]:
                by_second[second] = s
    # Each layer over the one before: nothing in common with the table, one exponent, the whole pair.
    lut[:] = best | 0x300
    for i in range(palette.size):
        if by_first[i] >= 0:
            for other in range(256):
                lut[other << 8 | palette[i]] = by_first[i] | 0x200
    for i in range(palette.size):
        if by_second[i] >= 0:
            for other in range(256):
                lut[palette[i] << 8 | other] = by_second[i] | 0x100
    for s in range(frequencies.size):
        first, second = s & 15, s >> 4
        if frequencies[s] and max(first, second) < palette.size:
            lut[palette[second] << 8 | palette[first]] = s


@compiled
def scalar_encode(state, facts, coded, row, scratch, p):  # type: ignore[no-untyped-def]
    """Code the symbols `coded[row + lane]`, the last lane first; the position of the word written last."""
    for back in range(LANES):
        lane = _U(LANES - 1 - back)
        s = _U(coded[row + lane]) << _1
        reciprocal, frequency, start = facts[s], np.uint16(facts[s | _1]), facts[s | _1] >> _16
        x = _U(state[lane])
        # Arithmetic in place of a branch, which nobody could predict.
        full = _U(x >= _U(frequency) << _20)
        scratch[p - _1] = x
        p -= full
        x >>= full << _4
        # x // f * SCALE + x % f + start, with one product for the division.
        state[lane] = x + ((x * reciprocal) >> _RECIPROCAL) * (_U(SCALE) - _U(frequency)) + start
    return p


@compiled
def vector_encode(state, facts, coded, row, scratch, p):  # type: ignore[no-untyped-def]
    """Code a symbol of all lanes in vector registers: the position of the last word."""
    p = encode_16(state, facts, coded, row, scratch, p, _16)
    return encode_16(state, facts, coded, row, scratch, p, _U(0))


@compiled
def encode(keys, exponents, numel, group, symbols, facts, words, index, vector):  # type: ignore[no-untyped-def]
    """Code all blocks; the number of words written. `keys` are the exponents seen in groups.

    `vector` is True or None. Numba compiles a branch that asks for None only where it is taken.
    """
    per_run = RUN // group
    # Words grow downwards from the end of `scratch`: the encoder runs backwards.
    scratch = np.empty(BLOCK, np.uint16)
    escapes = np.empty(2 * BLOCK, np.uint16)
    coded = np.empty(BLOCK, np.uint8)  # [step, lane]
    state = np.empty(LANES, np.uint32)
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

        for lane in range(LANES):
            tail = (steps - RAW_STEPS) * LANES + lane
            state[lane] = LOWER | (coded[tail + LANES] << 8) | coded[tail]
        p = _U(BLOCK)
        for back in range(steps - RAW_STEPS):
            row = _U(steps - RAW_STEPS - 1 - back) * _LANES
            if vector is None:
                p = scalar_encode(state, facts, coded, row, scratch, p)
            else:
                p = vector_encode(state, facts, coded, row, scratch, p)
        n_words = BLOCK - np.int64(p)

        words[used] = n_escapes
        for lane in range(LANES):
            words[used + 1 + lane] = state[lane] & np.uint32(0xFFFF)
            words[used + 1 + LANES + lane] = state[lane] >> np.uint32(16)
        count = HEADER_WORDS + n_words + 2 * n_escapes
        # Loops are copied faster than slices here: the compiler sees that they are contiguous.
        body, coded_words = _U(used + HEADER_WORDS), _U(BLOCK - n_words)
        for i in range(n_words):
            words[body + _U(i)] = scratch[coded_words + _U(i)]
        for i in range(2 * n_escapes):
            words[body + _U(n_words + i)] = escapes[i]
        index[b] = count
        used += count
    return used


@compiled
def scalar_decode(state, table, words, p, exponents, row):  # type: ignore[no-untyped-def]
    """Decode one symbol of each lane to `exponents[row + lane]`; the position of the next word.

    There must be LANES more words from `p` on.
    """
    for lane in range(LANES):
        x = state[lane]
        entry = table[x & np.uint32(SCALE - 1)]
        x = np.uint32(np.uint16(entry)) * (x >> np.uint32(12)) + np.uint32(np.uint16(entry >> _16))
        small = x < np.uint32(LOWER)
        # Arithmetic in place of a branch, here too.
        state[lane] = ((x << np.uint32(16)) | np.uint32(words[p])) if small else x
        p += _U(small)
        exponents[row + _U(lane)] = np.uint16(entry >> _32)
    return p


@compiled
def vector_decode(state, table, words, p, exponents, row):  # type: ignore[no-untyped-def]
    """Decode a symbol of all lanes in vector registers: the position of the next word."""
    p = decode_16(state, table, words, p, exponents, _U(0), row)
    return decode_16(state, table, words, p, exponents, _16, row)


@compiled
def _careful_decode(state, table, words, p, limit, exponents, row):  # type: ignore[no-untyped-def]
    """`scalar_decode` with a look before every word: none is taken from `limit` on."""
    for lane in range(LANES):
        x = state[lane]
        entry = table[x & np.uint32(SCALE - 1)]
        x = np.uint32(np.uint16(entry)) * (x >> np.uint32(12)) + np.uint32(np.uint16(entry >> _16))
        if x < np.uint32(LOWER) and p < limit:
            x = (x << np.uint32(16)) | np.uint32(words[p])
            p += _1
        state[lane] = x
        exponents[row + _U(lane)] = np.uint16(entry >> _32)
    return p


@compiled
def _transpose(decoded, group, keys, at):  # type: ignore[no-untyped-def]
    """Put the exponents of a run, [step, lane], into the order of the weights, [lane, step]."""
    if group == 2:  # twice the same loop, with a count that the compiler knows
        for lane in range(LANES):
            for q in range(RUN // 2):
                keys[at + _U(lane * (RUN // 2) + q)] = decoded[_U(q * LANES + lane)]
    else:
        for lane in range(LANES):
            for q in range(RUN):
                keys[at + _U(lane * RUN + q)] = decoded[_U(q * LANES + lane)]


@compiled
def _prefetch(array, run):  # type: ignore[no-untyped-def]
    """Ask for the elements that belong to a run, so that they are in the cache when they are needed."""
    first = run * LANES * RUN
    if first + LANES * RUN <= array.size:
        for line in range(0, LANES * RUN, 64 // array.itemsize):
            prefetch(array, _U(first + line))


@compiled
def decode(  # type: ignore[no-untyped-def]
    words, starts, counts, numel, exponent_bits, group, table, exponents_of, keys, exponents, soon, vector
):
    """Decode all blocks into `keys`, a view of `exponents`; the first corrupt block, or -1.

    `soon` are two arrays, an element a weight, that the caller will use next. `vector` is that of `encode`.
    """
    per_run = RUN // group
    state = np.empty(LANES, np.uint32)
    decoded = np.empty(RUN * LANES, np.uint16)  # of one run: [step, lane]
    for b in range(starts.size):
        start = starts[b]
        if counts[b] < HEADER_WORDS:
            return b
        n_escapes = np.int64(words[start])
        if counts[b] < HEADER_WORDS + 2 * n_escapes:
            return b
        p = _U(start + HEADER_WORDS)
        # One past the last word that a lane may take.
        limit = _U(start + counts[b] - 2 * n_escapes)
        for lane in range(LANES):
            state[lane] = np.uint32(words[start + 1 + lane]) | (
                np.uint32(words[start + 1 + LANES + lane]) << np.uint32(16)
            )
        first = b * BLOCK
        runs = min(exponents.size - first, BLOCK) // (LANES * RUN)
        for i in range(runs):
            steps = per_run - RAW_STEPS if i == runs - 1 else per_run
            for q in range(steps):
                row = _U(q * LANES)
                if p + _LANES > limit:  # the end of the block is near
                    p = _careful_decode(state, table, words, p, limit, decoded, row)
                elif vector is None:
                    p = scalar_decode(state, table, words, p, decoded, row)
                else:
                    p = vector_decode(state, table, words, p, decoded, row)
            if i == runs - 1:
                for lane in range(LANES):
                    x = state[lane]
                    if x >> np.uint32(16) != np.uint32(1):
                        return b
                    decoded[steps * LANES + lane] = exponents_of[x & np.uint32(0xFF)]
                    decoded[(steps + 1) * LANES + lane] = exponents_of[(x >> np.uint32(8)) & np.uint32(0xFF)]
            _transpose(decoded, group, keys, _U(first // group + i * LANES * per_run))
            _prefetch(soon[0], i)
            _prefetch(soon[1], i)
        if p != limit:
            return b
        before = first - 1
        for i in range(n_escapes):
            where = first + np.int64(words[limit + _2 * _U(i)])
            exponent = np.int64(words[limit + _2 * _U(i) + _1])
            if where <= before or where >= min(numel, first + BLOCK) or exponent >> exponent_bits:
                return b
            exponents[where] = exponent
            before = where
    return -1


@compiled
def decode_floats(  # type: ignore[no-untyped-def]
    words,
    starts,
    counts,
    numel,
    fmt,
    group,
    table,
    exponents_of,
    keys,
    exponents,
    fields,
    kept_bits,
    bits,
    vector,
):
    """Decode and merge, one block after the other: its exponents never leave the first-level cache."""
    exponent_bits, mantissa_bits = fmt
    for b in range(starts.size):
        first = b * BLOCK
        n = min(BLOCK, numel - first)
        padded = -(-n // (LANES * RUN)) * LANES * RUN
        bad = decode(
            words, starts[b : b + 1], counts[b : b + 1], n, exponent_bits, group, table, exponents_of,
            keys[: padded // group], exponents[:padded], (fields[first + BLOCK :], bits[first + BLOCK :]),
            vector,
        )  # fmt: skip
        if bad >= 0:
            return b
        part = slice(first, first + n)
        merge(exponents[:n], fields[part], exponent_bits, mantissa_bits, kept_bits, bits[part])
    return -1
