"""The packed form of a tensor: its layout, its window, its words, its far words and its escapes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neuzip.kernels.float_fields import FORMATS, FloatFormat, plane_widths

BF16, F16 = FORMATS["BF16"], FORMATS["F16"]

SLOTS = 32  # weights of a row that share words: the signs of 32 fill one
TURN = 128  # columns of four words, which share them out as a matrix instruction's threads want them
TILE_ROWS = 16  # rows whose words lie together
MAX_COLUMNS = 1 << 16  # an escape says where it is in 16 bits
MAX_ESCAPES = (1 << 31) - (1 << 16)  # they are counted in an int32, and kernels count a little further
FEW_ESCAPES = (1 << 16) - 1  # so many are counted in 16 bits
ESCAPE_COST = 16  # far weights that are better than one escape


Bits = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Planes:
    """Planes of one kind: they hold `width` bits of a field, from its bit `shift` on, of 32 weights a word.

    `first` is the first of them. There are as many as a weight has bits there.
    """

    field: str
    shift: int
    width: int
    first: int

    def place(self, g: int) -> tuple[int, int]:
        """Where the bits of the slots 4 g to 4 g + 3 are: in which plane, and from which bit on."""
        word, bit = divmod(g * self.width, 8)
        return self.first + word, bit


@dataclass(frozen=True)
class PackedLayout:
    """What the words hold, for bf16 or fp16 weights, if `low_bits` of the low byte are, 1 to 8."""

    fmt: FloatFormat
    low_bits: int

    def __post_init__(self) -> None:
        if self.fmt not in (BF16, F16) or not 1 <= self.low_bits <= 8:
            raise ValueError(f"no packed form has {self.low_bits} low bits of {self.fmt.name}")

    @property
    def middle_bits(self) -> int:
        """Mantissa bits in the high byte."""
        return 0 if self.fmt == BF16 else 2

    @property
    def code_bits(self) -> int:
        """Bits that say how far below the base an exponent lies; for bf16, its upper 7 bits."""
        return 2 if self.fmt == BF16 else 3

    @property
    def farthest(self) -> int:
        """The largest distance that a code can say: the code of a slot that holds no weight."""
        return (1 << self.code_bits) - 1

    @property
    def far(self) -> Planes:
        """The plane of which only some words are held: whose exponent differs from its code's."""
        return Planes("far", 0, 1, 0)

    @property
    def far_bit(self) -> int:
        """In what: the bit of 8 of an exponent, of the 7 upper bits of which bf16 has a code."""
        return 4 if self.fmt == BF16 else 8

    @property
    def groups(self) -> tuple[Planes, ...]:
        """The planes of a tile in their order."""
        groups: list[Planes] = []

        def add(field: str, shift: int, width: int) -> None:
            groups.append(Planes(field, shift, width, sum(g.width for g in groups)))

        left = 8
        for width in plane_widths(self.low_bits):
            left -= width
            add("low", left, width)
        if self.middle_bits:
            add("middle", 0, self.middle_bits)
        add("code", 0, 2)
        if self.code_bits > 2:
            add("code", 2, 1)
        add("sign", 0, 1)
        return tuple(groups)

    @property
    def planes(self) -> int:
        """How many there are, which is bits of a weight: 11 for bf16 and 14 for fp16 with nothing dropped.

        >>> PackedLayout(BF16, 8).planes, PackedLayout(BF16, 4).planes, PackedLayout(F16, 8).planes
        (11, 7, 14)
        """
        return self.low_bits + self.middle_bits + self.code_bits + 1


def low_bits(mantissas: int) -> int:
    """How many upper bits of the low byte are needed by weights whose mantissas unite to `mantissas`.

    At least 1: for bf16 that is an exponent bit.

    >>> [low_bits(0b1111), low_bits(0b1110000), low_bits(0b1100000000), low_bits(0)]
    [8, 4, 1, 1]
    """
    zeros = (mantissas & -mantissas).bit_length() - 1 if mantissas else 7
    return 8 - min(zeros, 7)


@dataclass(frozen=True)
class ExponentWindow:
    """The 8 exponents that codes can say: less `shift`, of bf16 from 2 base - 6 on, of fp16 from base - 7 on.

    What is packed is the pattern less the shift's exponents: the number, 2**shift times smaller. With a far
    word's bit codes say 8 exponents more, those that differ in the bit of 8. So 16 exponents that are
    neighbours can be had if the shift is right, and of these any 8, but for one, need no such bit.
    """

    base: int
    shift: int = 0
    fmt: FloatFormat = BF16

    def __post_init__(self) -> None:
        if (self.base, self.shift) not in _bases_and_shifts(self.fmt):
            raise ValueError(f"no window of {self.fmt.name} has base {self.base} and shift {self.shift}")

    @property
    def shifted(self) -> int:
        """What is taken from a pattern before it is packed, modulo 2**16."""
        return self.shift << self.fmt.mantissa_bits

    @property
    def exponents(self) -> range:
        """The exponents inside."""
        lowest = self.shift + _lowest(self.base, self.fmt)
        return range(lowest, lowest + 8)

    @property
    def far_exponents(self) -> tuple[int, ...]:
        """Those that a far word's bit adds.

        >>> ExponentWindow(0x3F).far_exponents, ExponentWindow(0x3E, 1).far_exponents[::7]
        ((112, 113, 114, 115, 116, 117, 118, 119), (113, 128))
        >>> ExponentWindow(10, 0, F16).far_exponents
        (0, 1, 2, 11, 12, 13, 14, 15)
        """
        others = ((e - self.shift ^ 8) + self.shift for e in self.exponents)
        return tuple(sorted(e for e in others if e in _packable(self.shift, self.fmt)))

    @property
    def kinds(self) -> npt.NDArray[np.uint8]:
        """For every exponent 0 if its weights are escapes, 1 if it is inside, 2 if it is far.

        >>> ExponentWindow(10, 0, F16).kinds.tolist()[:17]
        [2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0]
        """
        kinds = np.zeros(1 << self.fmt.exponent_bits, np.uint8)
        kinds[self.exponents], kinds[list(self.far_exponents)] = 1, 2
        return kinds

    @property
    def settling(self) -> Bits:
        """For every exponent what is taken from the patterns of escapes: see `settled`.

        >>> ExponentWindow(0x3F, 1).settling.tolist()[:3], ExponentWindow(0x3F, 1).settling.tolist()[-2:]
        ([0, 0, 128], [128, 0])
        """
        taken = np.zeros(1 << self.fmt.exponent_bits, np.uint16)
        taken[self.shift + 1 : -1] = self.shifted
        return taken

    def settled(self, patterns: Bits) -> Bits:
        """Patterns less the shift's exponents where normal numbers are left; the others as they are.

        >>> patterns = np.array([0x3F80, 0x00FF, 0, 0xFF80], np.uint16)
        >>> [hex(p) for p in ExponentWindow(0x3F, 1).settled(patterns)]
        ['0x3f00', '0xff', '0x0', '0xff80']
        """
        exponents = patterns >> self.fmt.mantissa_bits & (1 << self.fmt.exponent_bits) - 1
        return np.asarray(patterns - self.settling[exponents])

    @property
    def coded(self) -> int:
        """The bits of a pattern that codes stand for.

        >>> hex(ExponentWindow(0x3F).coded), hex(ExponentWindow(15, 0, F16).coded)
        ('0x7f00', '0x7c00')
        """
        return 0x7F00 & -(1 << 8 + PackedLayout(self.fmt, 8).middle_bits)

    @property
    def farthest(self) -> int:
        """These bits where the code is the largest, as it is of escapes.

        >>> hex(ExponentWindow(0x3F, 1).farthest), hex(ExponentWindow(15, 0, F16).farthest)
        ('0x3c00', '0x2000')
        """
        return (self.exponents.start - self.shift) << self.fmt.mantissa_bits

    def slots_of_escapes(self, patterns: Bits) -> Bits:
        """What stands in the slots of escapes: their settled patterns, with the exponent of the largest code.

        >>> patterns = np.array([0x3F80, 0x80FF, 0], np.uint16)
        >>> [hex(p) for p in ExponentWindow(0x3F, 1).slots_of_escapes(patterns)]
        ['0x3c00', '0xbcff', '0x3c00']
        """
        return np.asarray(self.settled(patterns) & np.uint16(0xFFFF - self.coded) | np.uint16(self.farthest))


SHIFTS = {BF16: 16, F16: 1}
"""How many there are. That of fp16 is always 0: it has too few exponents to spare."""


def _lowest(base: int, fmt: FloatFormat) -> int:
    """The lowest exponent that a code can say, less the shift."""
    return 2 * (base - 3) if fmt == BF16 else base - 7


def _packable(shift: int, fmt: FloatFormat) -> range:
    """Exponents of numbers that are 2**shift times smaller where their patterns are less by the shift's.

    With a shift neither denormals are that, before or after, nor infinities. Those of fp16 are never packed,
    so that a kernel may widen slots by a multiplication.
    """
    infinite = (1 << fmt.exponent_bits) - 1
    return range(shift + 1 if shift else 0, infinite if shift or fmt == F16 else infinite + 1)


@functools.cache
def _bases_and_shifts(fmt: FloatFormat) -> tuple[tuple[int, int], ...]:
    """The windows that there are: no code leads below zero, and all 8 exponents can be packed."""
    return tuple(
        (base, shift)
        for shift in range(SHIFTS[fmt])
        for base in range(128)
        if _lowest(base, fmt) >= 0
        and shift + _lowest(base, fmt) in _packable(shift, fmt)
        and shift + _lowest(base, fmt) + 7 in _packable(shift, fmt)
    )


@dataclass(frozen=True)
class Packed:
    """A tensor [out, in] in fixed width; the module's docstring says what words and escapes hold.

    words     uint32 [tiles, planes, lane_words, 8, 2]
    far_index uint32 [tiles, pairs, 2]: for two neighbouring words which of their rows have a far word, and
              the number of the first
    far_words uint32 [far words]
    row_start uint16 [out + 1], int32 where there are 65,536 escapes or more: those of row r are row_start[r]
              to row_start[r + 1]
    escapes   uint32 [escapes], in each row ascending by their lower 16 bits
    """

    shape: tuple[int, int]
    low_bits: int
    window: ExponentWindow
    words: npt.NDArray[np.uint32]
    far_index: npt.NDArray[np.uint32]
    far_words: npt.NDArray[np.uint32]
    row_start: npt.NDArray[np.uint16] | npt.NDArray[np.int32]
    escapes: npt.NDArray[np.uint32]

    def __post_init__(self) -> None:
        out, columns = self.shape
        assert self.words.shape == words_shape(out, columns, self.layout)
        assert self.far_index.shape == index_shape(out, columns)
        assert self.row_start.shape == (out + 1,)
        assert self.row_start.dtype == (np.uint16 if self.escapes.size <= FEW_ESCAPES else np.int32)
        assert self.escapes.shape == (self.row_start[-1],)

    @property
    def layout(self) -> PackedLayout:
        """What the words hold."""
        return PackedLayout(self.window.fmt, self.low_bits)

    @property
    def lane_words(self) -> int:
        """Words of a plane of one row."""
        return lane_words(self.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes in memory, index, escapes and row starts included."""
        arrays = self.words, self.far_index, self.far_words, self.row_start, self.escapes
        return sum(array.nbytes for array in arrays)

    @property
    def bits_per_weight(self) -> float:
        """Bits in memory for each weight; 0 for a tensor without weights."""
        numel = self.shape[0] * self.shape[1]
        return 8 * self.nbytes / numel if numel else 0.0


def lane_words(columns: int) -> int:
    """Words of a plane that hold a row of `columns` weights.

    >>> [lane_words(columns) for columns in (0, 1, 32, 33, 4096)]
    [0, 1, 1, 2, 128]
    """
    return -(-columns // SLOTS)


def slot_columns(columns: int) -> npt.NDArray[np.int64]:
    """The column of every slot of a row of words, 32 a word; beyond `columns` there is no weight.

    >>> slot_columns(128)[:8].tolist(), slot_columns(128)[32:36].tolist(), slot_columns(160)[128:132].tolist()
    ([0, 1, 8, 9, 16, 17, 24, 25], [2, 3, 10, 11], [128, 129, 130, 131])
    """
    order = np.arange(SLOTS * lane_words(columns))
    whole = order[: order.size // TURN * TURN].reshape(-1, 8, 2, 4, 2)  # group, half, word, of a pair
    return np.concatenate([whole.transpose(0, 3, 1, 2, 4).reshape(-1), order[whole.size :]])


def words_shape(out: int, columns: int, layout: PackedLayout) -> tuple[int, int, int, int, int]:
    """The shape of the words: tiles, planes, words of a plane of one row, and the rows of a tile, 8 x 2.

    >>> words_shape(17, 4096, PackedLayout(BF16, 8))
    (2, 11, 128, 8, 2)
    """
    return -(-out // TILE_ROWS), layout.planes, lane_words(columns), TILE_ROWS // 2, 2


def index_shape(out: int, columns: int) -> tuple[int, int, int]:
    """The shape of the index of far words: tiles, pairs of words of a plane of one row, and 2.

    >>> index_shape(17, 96)
    (2, 2, 2)
    """
    return -(-out // TILE_ROWS), -(-lane_words(columns) // 2), 2


def best_window(exponents: npt.NDArray[np.int64], fmt: FloatFormat = BF16) -> ExponentWindow:
    """The window for `exponents[e]` weights of exponent e: few of them far, much fewer escapes.

    Of equals, the lowest shift comes first, then the lowest base.
    """
    inside, far = _exponents_of_windows(fmt)
    counts = np.append(exponents, 0)  # for far exponents that there are not
    near, further = counts[inside].sum(1), counts[far].sum(1)
    return windows(fmt)[int(np.argmin(further + ESCAPE_COST * (counts.sum() - near - further)))]


@functools.cache
def windows(fmt: FloatFormat) -> tuple[ExponentWindow, ...]:
    """All that there are, by shift, then by base.

    >>> len(windows(BF16)), len(windows(F16))
    (1914, 24)
    """
    return tuple(ExponentWindow(base, shift, fmt) for base, shift in _bases_and_shifts(fmt))


@functools.cache
def _exponents_of_windows(fmt: FloatFormat) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Exponents of all windows, and their far ones, filled up with one too many: [windows, 8]."""
    none = 1 << fmt.exponent_bits
    far = [(*w.far_exponents, *(8 - len(w.far_exponents)) * (none,)) for w in windows(fmt)]
    return np.array([w.exponents for w in windows(fmt)]), np.array(far)


def check_columns(columns: int) -> None:
    """Raise ValueError for a row that is too long to be packed."""
    if columns > MAX_COLUMNS:
        raise ValueError(f"a packed row has at most {MAX_COLUMNS} weights, not {columns}")


def check_escapes(escapes: int) -> None:
    """Raise ValueError for more escapes than can be counted."""
    if escapes > MAX_ESCAPES:
        raise ValueError(f"a packed tensor has at most {MAX_ESCAPES} escapes, not {escapes}")
