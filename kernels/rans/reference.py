"""The coder as it is defined: one block, one symbol at a time, in plain Python integers.

`encode_symbols` and `decode_block` mirror each other line by line.
"""

from __future__ import annotations

from .model import Table
from .numbers import HEADER_WORDS, LANES, LOWER, RAW_STEPS, RUN, SCALE_BITS

MASK = 0xFFFF


def encode_block(exponents: list[int], table: Table) -> list[int]:
    """The words of one block of at most BLOCK exponents."""
    padded = exponents + [table.filler] * (-len(exponents) % (LANES * RUN))
    symbols, escapes = _symbols(padded, len(exponents), table)
    return encode_symbols(symbols, escapes, table)


def encode_symbols(symbols: list[list[int]], escapes: list[tuple[int, int]], table: Table) -> list[int]:
    """The words of one block whose symbols, by step and lane, and escapes are known."""
    frequency = [int(f) for f in table.frequencies]
    start = [sum(frequency[:s]) for s in range(len(frequency))]
    steps = len(symbols)

    state = [LOWER | symbols[-1][lane] << 8 | symbols[-2][lane] for lane in range(LANES)]
    words: list[int] = []
    for step in reversed(range(steps - RAW_STEPS)):
        for lane in reversed(range(LANES)):
            s = symbols[step][lane]
            if state[lane] >= frequency[s] << (32 - SCALE_BITS):
                words.append(state[lane] & MASK)
                state[lane] >>= 16
            state[lane] = (state[lane] // frequency[s] << SCALE_BITS) + state[lane] % frequency[s] + start[s]
    words.reverse()
    return [len(escapes), *(x & MASK for x in state), *(x >> 16 for x in state), *words] + [
        word for escape in escapes for word in escape
    ]


def decode_block(words: list[int], table: Table, numel: int) -> list[int]:
    """The `numel` exponents of one block."""
    frequency = [int(f) for f in table.frequencies]
    slots = [(s, offset) for s, f in enumerate(frequency) for offset in range(f)]
    steps = -(-numel // (LANES * RUN)) * RUN // table.group

    state = [words[1 + lane] | words[1 + LANES + lane] << 16 for lane in range(LANES)]
    position = HEADER_WORDS
    symbols: list[list[int]] = []
    for _ in range(steps - RAW_STEPS):
        symbols.append([])
        for lane in range(LANES):
            s, offset = slots[state[lane] & ((1 << SCALE_BITS) - 1)]
            symbols[-1].append(s)
            state[lane] = frequency[s] * (state[lane] >> SCALE_BITS) + offset
            if state[lane] < LOWER:
                state[lane] = state[lane] << 16 | words[position]
                position += 1
    symbols.append([x & 0xFF for x in state])
    symbols.append([x >> 8 & 0xFF for x in state])
    assert all(x >> 16 == 1 for x in state)

    exponents = exponents_of(symbols, table)
    for i in range(words[0]):
        exponents[words[position + 2 * i]] = words[position + 2 * i + 1]
    assert len(words) == position + 2 * words[0]
    return exponents[:numel]


def place(step: int, lane: int, group: int) -> int:
    """Position in its block of the first exponent of the symbol that `lane` codes in `step`."""
    steps_per_run = RUN // group
    run, within = divmod(step, steps_per_run)
    return run * LANES * RUN + lane * RUN + within * group


def _symbols(padded: list[int], numel: int, table: Table) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Symbols by step and lane, and the escapes in rising order of position."""
    steps = len(padded) // LANES // table.group
    symbols = [[0] * LANES for _ in range(steps)]
    escapes = []
    for step in range(steps):
        for lane in range(LANES):
            at = place(step, lane, table.group)
            members = padded[at : at + table.group]
            coded = int(table.symbols[sum(e << 8 * i for i, e in enumerate(members))])
            symbols[step][lane] = coded & 0xFF
            escapes += [(at + i, e) for i, e in enumerate(members) if coded >> (8 + i) & 1 and at + i < numel]
    return symbols, sorted(escapes)


def exponents_of(symbols: list[list[int]], table: Table) -> list[int]:
    """The exponents in their order, of symbols by step and lane."""
    exponents = [0] * (len(symbols) * LANES * table.group)
    for step, row in enumerate(symbols):
        for lane, s in enumerate(row):
            at = place(step, lane, table.group)
            known = int(table.exponents[s])
            for i in range(table.group):
                exponents[at + i] = known >> 8 * i & (0xFF if table.group == 2 else MASK)
    return exponents
