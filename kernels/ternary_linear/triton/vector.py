"""Products of a few tokens with ternary weights, in Triton, by matrix instructions on bits and on bytes.

A warp takes tiles of 16 rows and 256 columns, of which its thread (r, q) has four words of rows r and r + 8:
they are what it has to give to an instruction. What is multiplied are c + 1, 0 to 2 for codes c, so the sum
of the token's codes is taken off in the end.

One token (`_one_token`) is multiplied bit by bit, with words as they come (`triton_planes`), or with masked
words where a card has no such instructions and where tokens are long (`triton_bytes`). Either way a thread
quantises a part of its own, so that work is shared out as well.

More tokens (`_few_tokens`) come quantised, in the order of the instructions. Their words are masked and
shifted, and the sums are those of blocks of 8 tokens. Codes of 16 tokens are more bytes than the weights of a
tile, so warps with other tiles go through the same columns beside each other: what one loads the others find
in the cache.

Several warps share the columns of a tile and add their sums in the end. Kernels ask for weights before they
wait for the kernel ahead of them (programmatic dependent launch), so that memory is busy meanwhile: to shared
memory for one token (`triton_ring`), to registers for more and for the gated unit. The next kernel's words
are asked for then, too, and what is asked for behind them comes late. So while a token is on its way, the
first words are taken to registers, and others asked for in their place before that token is quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.device.floats import rounded, widened
from neuzip.kernels.device.launch import LAUNCHING
from neuzip.kernels.device.properties import counts_bits, early_launches, multiprocessors
from neuzip.kernels.device.reduce import each_of, first_of, share_sums, sum_rows
from neuzip.kernels.quantizers.activations import EPSILON
from neuzip.kernels.quantizers.magnitudes import first_unit
from neuzip.kernels.ternary_linear.triton import bytes as triton_bytes
from neuzip.kernels.ternary_linear.triton import one_token_bmma as triton_planes
from neuzip.kernels.ternary_linear.triton import smem_ring as triton_ring
from neuzip.kernels.ternary_linear.triton.mma import mma
from neuzip.kernels.ternary_linear.triton.one_token_int8 import (
    INT4,
    KINDS,
    four,
    load_words,
    quantised,
    words_of_run,
)
from neuzip.kernels.ternary_linear.triton.quantize import in_words, quantize
from neuzip.kernels.ternary_linear.weight import STEP, TernaryWeight

_STEP = tl.constexpr(STEP)
_LOWEST = tl.constexpr(-(1 << 31))


FUSED_TURNS, QUANTISED_TURNS = 8, 16
"""Steps of a thread up to which a product quantises its token itself, as it has to keep all activations; and
those it should have at most where a kernel ahead does."""

PLACES = 2
"""For words of some tokens, otherwise: with more, fewer programs run side by side."""

SETS = 2
"""Of sums of some tokens: with 4 no code of a byte is shifted, with 2 or 1 two or three are."""

STATIC_BYTES = 48 << 10
"""Shared memory that a program can have without asking the driver for more."""

CODE_BYTES = 14 << 10
"""Of it, at most, for the codes of one token: words are to have the rest."""


@dataclass(frozen=True)
class Launch:
    """How a product of few tokens is launched."""

    warps: int  # that share the columns of a tile
    tiles: int  # of a warp: in turn for one token, at once for more
    early: bool = True  # weights are loaded before the kernel ahead has ended
    next_at_once: bool = True  # the next kernel starts when there is room, not when all words are asked for
    places: int = PLACES  # for the words of so many turns; of one token turns that are under way, at most
    # For one token:
    fused: bool = True  # whether programs quantise it themselves, where they have few enough turns
    start: bool = False  # or else whether it starts before the kernel that quantises has its input
    bits: bool = True  # multiplied bit by bit, where the card can, turns are few and there is room for codes
    skips: bool = True  # of the gated unit: rows of `up` whose gate is closed are not read
    head: int = 0  # turns whose words are taken, and others asked for, before there are codes: at most
    registers: int | None = None  # of a thread, at most
    # For more tokens:
    beside: int = 1  # such groups of warps with tiles of their own in a program
    codes_ahead: bool = False  # whether codes are loaded a turn ahead
    sets: int = SETS  # of sums
    halves: bool = True  # whether codes of 4 bits come two in a byte


def one_token_launch(tiles: int, steps: int, multiprocessors: int, narrow: bool = False) -> Launch:
    """By columns, and tiles that a multiprocessor has: from what was fastest for 15 shapes on an H100.

    Several tiles of a program make do with one quantisation of the token; of long ones they are fewer. With
    most steps of all and many columns, it is quantised once, by a kernel ahead. What counts besides is that
    all programs of two kernels fit beside each other, or just those of one: the last few of the next kernel
    would begin late. So registers are limited. Codes of 4 bits (`narrow`) are made from what takes more.
    """
    each = triton.cdiv(tiles, multiprocessors)
    if steps <= 16:
        if each > (6 if steps % 4 == 0 else 3):
            of_two = 2 * triton.cdiv(tiles, 3)  # programs; of 80 registers a multiprocessor has room for 3
            registers = 64 if 3 * multiprocessors < of_two <= 4 * multiprocessors else 80
            return Launch(_warps(steps, 8), 3, places=4, head=2, registers=registers)
        return Launch(_warps(steps, 4), min(2, each), places=6, head=2, registers=96)
    if steps <= 32:
        warps = _warps(steps, 4 if each > 4 else 8)
        return Launch(warps, min(2, each), places=32 // warps, head=4, registers=128)
    if tiles * steps > 256 * multiprocessors:
        return Launch(_warps(steps, 4, QUANTISED_TURNS), 2, places=10, fused=False, start=True)
    warps = _warps(steps, 8)
    if each > 2 or warps > 8:
        return Launch(warps, min(2, each), places=5, head=2, registers=128, next_at_once=False)
    turns = triton.cdiv(steps, warps)
    registers = (104 if narrow else 64) if turns <= 5 else 128 if narrow or turns > 7 else 96
    return Launch(warps, 1, places=triton.cdiv(turns, 2), head=5, registers=registers)


def ahead_and_head(launch: Launch, steps: int, codes: int) -> tuple[int, int]:
    """Of a program for one token: turns asked for at once, and those taken before there are codes.

    `codes`: bytes of shared memory that codes take.
    """
    turns = launch.tiles * triton.cdiv(steps, launch.warps)
    room = STATIC_BYTES - shared_bytes(launch, 0, codes)
    ahead = min(launch.places, turns, max(1, room // (triton_ring.TURN_BYTES * launch.warps)))
    return ahead, min(launch.head, turns - ahead)


def shared_bytes(launch: Launch, ahead: int, codes: int) -> int:
    """Of a program for one token: the ring, codes, and sums that are exchanged once."""
    return codes + launch.warps * (triton_ring.TURN_BYTES * ahead + 64 * launch.tiles + 32)


def code_bytes(launch: Launch, steps: int, activation: str) -> int:
    """Of shared memory for the codes of one token: 0 if they stay in registers."""
    turns = triton.cdiv(steps, launch.warps)
    nbytes = triton_planes.nbytes(launch.warps, turns, activation == "int4")
    return nbytes if launch.bits and turns <= FUSED_TURNS and nbytes <= CODE_BYTES else 0


def relu2_glu_launch(tiles: int, steps: int, multiprocessors: int, alike: bool = True) -> Launch:
    """Two tiles of a program where warps are many; of small weights rows are not left out.

    `alike`: both weights have a scale a row, or neither has.
    """
    if alike and steps <= 16 and tiles * steps <= 60 * multiprocessors:
        return Launch(_warps(steps, 4), 2, places=6, head=2, registers=96, skips=False)
    warps = _warps(steps, 4)
    turns = triton.cdiv(steps, warps)
    places = min(turns, 8 if warps <= 8 else 4)
    return Launch(warps, 2 if tiles * warps > 12 * multiprocessors else 1, places=places)


def _fitted(launch: Launch, x: torch.Tensor) -> Launch:
    """Registers are limited for what launches were measured with: bits, and activations of 16 bits."""
    return launch if counts_bits(x.device) and x.element_size() == 2 else replace(launch, registers=None)


def _warps(steps: int, least: int, turns: int = FUSED_TURNS) -> int:
    """That many, or as many as leave a thread so many steps; no more than there are steps."""
    warps = min(16, max(least, triton.next_power_of_2(triton.cdiv(steps, turns))))
    return int(min(warps, triton.next_power_of_2(steps)))


def few_tokens_launch(
    tiles: int, steps: int, blocks: int, multiprocessors: int, narrow: bool = False
) -> Launch:
    """4 warps share a tile, 8 where tiles are few; then all words are asked for before there are codes.

    Two tiles at once make do with half of the loads of codes, unless warps have next to nothing to do then.
    So do codes in halves of bytes (`narrow`: there are such); with few tiles, to take these apart takes
    longer. With very many, words of the next kernel would be in the way. One set of sums makes room for more
    programs, which is faster for 16 tokens and many tiles, unless codes come in halves.
    """
    few = tiles < 3 * multiprocessors
    warps = min(8 if few else 4, _power_below(steps))
    turns = triton.cdiv(steps, warps)
    together = 2 if blocks > 2 or (blocks == 2 and turns > 2) else 1
    places = turns if turns <= FUSED_TURNS and (few or together == 1) and blocks <= 2 else PLACES
    at_once = tiles < 10 * multiprocessors
    sets = 1 if blocks == 2 and not few and not narrow else SETS
    return Launch(
        warps, together, places=places, start=not few, halves=not few, next_at_once=at_once, sets=sets
    )


def _power_below(number: int) -> int:
    """The largest power of two that is not above a number, and 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)


def _check_shared(launch: Launch, nbytes: int) -> None:
    """Raise ValueError for more shared memory than a program can have."""
    if nbytes > STATIC_BYTES:
        raise ValueError(f"{launch} takes {nbytes} bytes of shared memory; {STATIC_BYTES} are possible")


def one_token(
    x: torch.Tensor,
    weights: Sequence[TernaryWeight],
    biases: Sequence[torch.Tensor | None],
    activation: str,
    clamped: bool,
    kept: int = 0,
    launch: Launch | None = None,
) -> list[torch.Tensor]:
    """The products of x [1, in] with some weights, one launch for all of them: [1, out] each.

    Each of the weights has a scale, or each has one a row; all have a bias, or none has. The rest is as for
    `ternary_linear`; all arrays are contiguous. Raises ValueError for words that begin at no multiple of 16
    bytes, and for a launch that takes too much shared memory.
    """
    tiles, steps = sum(weight.words.shape[0] for weight in weights), weights[0].words.shape[1]
    usual = one_token_launch(tiles, steps, multiprocessors(x.device), activation == "int4")
    launch = launch or _fitted(usual, x)
    of_token = _Token.of(x, weights, activation, clamped, kept, launch)
    ys = [of_token.empty(weight) for weight in weights]
    programs = sum(triton.cdiv(weight.words.shape[0], launch.tiles) for weight in weights)
    with torch.cuda.device_of(x), LAUNCHING:
        _one_token[(programs,)](
            tuple(ys), of_token.in_words, tuple(weight.words for weight in weights),
            tuple(weight.scale for weight in weights), tuple(biases), *of_token.codes(),
            tuple(weight.shape[0] for weight in weights), tuple(weight.words.shape[0] for weight in weights),
            **of_token.options,
        )  # fmt: skip
    return [y.to(x.dtype) for y in ys]


def relu2_glu(
    x: torch.Tensor,
    gate: TernaryWeight,
    up: TernaryWeight,
    activation: str,
    clamped: bool,
    kept: int = 0,
    launch: Launch | None = None,
) -> torch.Tensor:
    """squared_relu(gate product) * up product for x [1, in]: [1, out], in one launch.

    Rows of `up` for which the squared ReLU is 0 are not read where that saves time: for small weights it does
    not. Weights have a scale, or one a row. Raises ValueError as `one_token` does.
    """
    if launch and not launch.skips and launch.tiles % 2:
        raise ValueError(f"{launch} has as many tiles of the gate as of up: an even number")
    tiles, steps = gate.words.shape[:2]
    alike = gate.scale.dim() == up.scale.dim()
    launch = launch or _fitted(relu2_glu_launch(tiles, steps, multiprocessors(x.device), alike), x)
    of_token = _Token.of(x, (gate, up), activation, clamped, kept, launch, gated=True)
    y = of_token.empty(gate)
    arguments = (
        y, of_token.in_words, gate.words, gate.scale, up.words, up.scale, *of_token.codes(), gate.shape[0],
        tiles,
    )  # fmt: skip
    options = of_token.options
    with torch.cuda.device_of(x), LAUNCHING:
        if launch.skips:
            del options["HEAD"], options["NEXT_AT_ONCE"]
            programs = triton.cdiv(tiles, launch.tiles)
            _one_token_relu2_glu[(programs,)](*arguments, UP_ROWS=up.scale.dim() > 0, **options)
        else:
            _one_token_whole_glu[(triton.cdiv(2 * tiles, launch.tiles),)](*arguments, **options)
    return y.to(x.dtype)


@dataclass(frozen=True)
class _Token:
    """One token that is multiplied with some weights: how the kernels take it."""

    x: torch.Tensor
    in_words: torch.Tensor
    activation: str
    clamped: bool
    kept: int
    launch: Launch
    options: dict[str, Any]

    @staticmethod
    def of(
        x: torch.Tensor,
        weights: Sequence[TernaryWeight],
        activation: str,
        clamped: bool,
        kept: int,
        launch: Launch,
        gated: bool = False,
    ) -> _Token:
        """Raises what `one_token` raises."""
        columns, steps = x.shape[1], weights[0].words.shape[1]
        if not counts_bits(x.device):
            launch = replace(launch, bits=False)
        of_codes = code_bytes(launch, steps, activation)
        ahead, head = ahead_and_head(launch, steps, of_codes)
        if gated and launch.skips:  # sums of the gate and of `up` are exchanged each by themselves
            ahead = min(launch.places, triton.cdiv(steps, launch.warps))
            _check_shared(launch, shared_bytes(replace(launch, tiles=2 * launch.tiles), 0, of_codes))
        else:
            _check_shared(launch, shared_bytes(launch, ahead, of_codes))
        if any(weight.words.data_ptr() % 16 for weight in weights):
            raise ValueError("words of ternary weights begin at multiples of 16 bytes; clone() them")
        compiled = isinstance(_one_token, triton.JITFunction)
        early = compiled and launch.early and early_launches(x.device)
        turns, held = triton.cdiv(steps, launch.warps), in_words(x)
        options = {
            "width": held.shape[1], "inverse": 1 / columns, "unit": first_unit(columns), "steps": steps,
            "epsilon": EPSILON, "KIND": KINDS[activation], "CLAMPED": clamped,
            "ROWS": weights[0].scale.dim() > 0, "W": launch.warps,
            "TURNS": turns, "AHEAD": ahead, "TILES": launch.tiles, "HEAD": head, "BITS": of_codes > 0,
            "NEXT_AT_ONCE": launch.next_at_once,
            "EVEN": columns == turns * launch.warps * STEP, "EARLY": early, "ASM": compiled,
            "num_warps": launch.warps, "launch_pdl": early, "enable_fp_fusion": False,
            **({"maxnreg": launch.registers} if launch.registers and compiled else {}),
        }  # fmt: skip
        return _Token(x, held, activation, clamped, kept, launch, options)

    def empty(self, weight: TernaryWeight) -> torch.Tensor:
        """Memory for a product."""
        dtype = self.x.dtype if self.options["ASM"] else torch.float32
        return torch.empty(1, weight.shape[0], dtype=dtype, device=self.x.device)

    def codes(self) -> tuple[torch.Tensor | None, ...]:
        """Codes, scale and sum of codes, of a token that programs do not quantise themselves."""
        if self.launch.fused and self.activation != "top_k_int8" and self.options["TURNS"] <= FUSED_TURNS:
            return None, None, None
        codes, scale, total = quantize(
            self.x, self.activation, self.kept, self.clamped, start_next=self.launch.start
        )
        return codes.view(torch.int32), scale, total


def few_tokens(
    x: torch.Tensor,
    weight: TernaryWeight,
    bias: torch.Tensor | None,
    activation: str,
    clamped: bool,
    kept: int = 0,
    launch: Launch | None = None,
) -> torch.Tensor:
    """The same for x [tokens, in]: [tokens, out]. Weights are read once for 32 tokens.

    Raises ValueError for a launch that takes too much shared memory.
    """
    tokens, out = x.shape[0], weight.shape[0]
    tiles, steps = weight.words.shape[:2]
    compiled = isinstance(_few_tokens, triton.JITFunction)
    y = torch.empty(tokens, out, dtype=x.dtype if compiled else torch.float32, device=x.device)
    blocks = triton.cdiv(tokens, 8)
    together = 4 if blocks > 2 else blocks
    blocks = triton.cdiv(blocks, together) * together
    narrow = activation == "int4"
    launch = launch or few_tokens_launch(tiles, steps, blocks, multiprocessors(x.device), narrow)
    early = compiled and launch.early and early_launches(x.device)
    turns = triton.cdiv(steps, launch.warps)
    places = min(launch.places, turns)
    halves = narrow and launch.halves
    _check_shared(launch, 512 * together * launch.tiles * launch.beside * launch.warps)
    with torch.cuda.device_of(x), LAUNCHING:
        codes, scale, total = quantize(
            x, activation, kept, clamped, blocks=blocks, halves=halves, start_next=launch.start
        )
        _few_tokens[(triton.cdiv(tiles, launch.tiles * launch.beside), blocks // together)](
            y, codes.view(torch.int32), scale, total, weight.words, weight.scale, bias,
            tokens, out, steps, tiles, BLOCKS=blocks, ROWS=weight.scale.dim() > 0,
            W=launch.warps, BESIDE=launch.beside, NB=together, TN=launch.tiles, SETS=launch.sets,
            PLACES=places, ROUNDS=triton.cdiv(turns, places), CODES_AHEAD=launch.codes_ahead,
            HALVES=halves, EVEN=steps % (launch.warps * places) == 0, EARLY=early,
            NEXT_AT_ONCE=launch.next_at_once, ASM=compiled, num_warps=launch.warps * launch.beside,
            launch_pdl=early, enable_fp_fusion=False,
        )  # fmt: skip
    return y.to(x.dtype)


@triton.jit
def _load_words(words, tile, step, steps, own, there, there8, EVEN: tl.constexpr):
    """The 4 words that a thread has of row r, and those of row r + 8, of a tile and step: [T, 4] each."""
    at = words + (tile.to(tl.int64) * steps + step)[:, None] * _STEP
    at += own[:, None] + tl.arange(0, 4)[None, :]
    if EVEN:
        upper = tl.load(at, eviction_policy="evict_first")
        lower = tl.load(at + 128, eviction_policy="evict_first")
    else:
        inside = step < steps
        upper = tl.load(at, mask=(inside & there)[:, None], other=0, eviction_policy="evict_first")
        lower = tl.load(at + 128, mask=(inside & there8)[:, None], other=0, eviction_policy="evict_first")
    return upper, lower


@triton.jit
def _tiles_of(words, tile, tiles, warp, steps, own, TILES: tl.constexpr):
    """Where a thread's words of TILES tiles from `tile` on begin."""
    of_tiles = ()
    for i in tl.static_range(TILES):
        mine = tl.minimum(tile + i, tiles - 1).to(tl.int64)
        of_tiles += (words + (mine * steps + warp) * _STEP + own,)
    return of_tiles


@triton.jit
def _words_of_turn(
    of_tiles, warp, steps, TURN: tl.constexpr, TURNS: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr
):
    """Where they are, for a thread, in one of the turns of tiles, TURNS each; and whether there are any.

    By bits, tiles take their turns beside each other, as codes are made to columns for all of them; by bytes
    one after the other, as each has many sums.
    """
    TILE: tl.constexpr = TURN % len(of_tiles) if BITS else TURN // TURNS
    STEPS: tl.constexpr = (TURN // len(of_tiles) if BITS else TURN % TURNS) * W
    return of_tiles[TILE] + STEPS * _STEP, warp + STEPS < steps


@triton.jit
def _load_turns(
    words, tile, first, steps, own, there, there8,
    FROM: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a thread has in COUNT turns of a tile, beginning with turn FROM."""
    loaded = ()
    for turn in tl.static_range(FROM, FROM + COUNT):
        loaded += (_load_words(words, first * 0 + tile, first + turn * W, steps, own, there, there8, EVEN),)
    return loaded


@triton.jit
def _load_scales(scales, bias, n, N, ROWS: tl.constexpr):
    """The scale and the bias of rows n, fp32; loaded ahead of what they are added to."""
    scale = tl.load(scales + n, mask=n < N, other=0.0) if ROWS else tl.load(scales)
    added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32) if bias is not None else 0.0
    return scale, added


@triton.jit
def _scaled(sums, token_scale, of_rows, bias):
    """Sums as fp32, times the scales, plus the bias."""
    scale, added = of_rows
    result = sums.to(tl.float32) * (token_scale * scale)
    if bias is not None:
        result += added
    return result


@triton.jit
def _threads(W: tl.constexpr):
    """Of each thread: which warp it is in, its r and its q, where its words are in a tile."""
    t = tl.arange(0, 32 * W)
    lane = t % 32
    r, q = lane // 4, lane % 4
    return t // 32, r, q, r * 16 + q * 4


@triton.jit(do_not_specialize=["unit"])
def _one_token(
    ys, x, words, scales, biases, codes, token_scale, total, outs, tiles,
    width, inverse, unit, steps, epsilon,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr,
    W: tl.constexpr, TURNS: tl.constexpr, AHEAD: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    HEAD: tl.constexpr, EARLY: tl.constexpr, NEXT_AT_ONCE: tl.constexpr, BITS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one y: W warps share the columns, a step each in turn."""
    program = tl.program_id(0)
    begin, before = program, 0
    y, word, scale, bias, N, count = ys[0], words[0], scales[0], biases[0], outs[0], tiles[0]
    for i in tl.static_range(1, len(ys)):
        before += tl.cdiv(tiles[i - 1], TILES)
        if program >= before:
            begin = program - before
            y, word, scale, N, count = ys[i], words[i], scales[i], outs[i], tiles[i]
            if bias is not None:
                bias = biases[i]
    begin *= TILES

    first, r, q, own = _threads(W)
    of_tiles = _tiles_of(word, begin, count, first, steps, own, TILES)
    sums, of_rows, own_scale, n = _products(
        of_tiles, (scale,), bias, begin, N, x, codes, token_scale, total, first, r, q, width, inverse, unit,
        steps, epsilon, KIND, CLAMPED, ROWS, W, TURNS, AHEAD, EVEN, HEAD, EARLY, NEXT_AT_ONCE, BITS, ASM,
    )  # fmt: skip
    for i in tl.static_range(TILES):
        value = _scaled(tl.where(q == 0, sums[2 * i], sums[2 * i + 1]), own_scale, of_rows[i], bias)
        tl.store(y + n, value.to(y.dtype.element_ty), mask=n < N)
        n += 16


@triton.jit(do_not_specialize=["unit"])
def _one_token_whole_glu(
    y, x, gates, gate_scales, ups, up_scales, codes, token_scale, total, N, tiles,
    width, inverse, unit, steps, epsilon,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TURNS: tl.constexpr,
    AHEAD: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr, HEAD: tl.constexpr, EARLY: tl.constexpr,
    NEXT_AT_ONCE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """TILES / 2 tiles of the gate and of `up`, whatever is open."""
    EACH: tl.constexpr = TILES // 2
    begin = tl.program_id(0) * EACH
    first, r, q, own = _threads(W)
    of_tiles = _tiles_of(gates, begin, tiles, first, steps, own, EACH)
    of_tiles += _tiles_of(ups, begin, tiles, first, steps, own, EACH)
    sums, of_rows, own_scale, n = _products(
        of_tiles, (gate_scales, up_scales), None, begin, N, x, codes, token_scale, total, first, r, q, width,
        inverse, unit, steps, epsilon, KIND, CLAMPED, ROWS, W, TURNS, AHEAD, EVEN, HEAD, EARLY, NEXT_AT_ONCE,
        BITS, ASM,
    )  # fmt: skip
    for i in tl.static_range(EACH):
        gate = tl.where(q == 0, sums[2 * i], sums[2 * i + 1])
        squared = _squared_relu(gate, own_scale, of_rows[i], x.dtype.element_ty, ASM)
        linear = tl.where(q == 0, sums[2 * (EACH + i)], sums[2 * (EACH + i) + 1])
        value = _gated(squared, linear, own_scale, of_rows[EACH + i], x.dtype.element_ty, ASM)
        tl.store(y + n, value.to(y.dtype.element_ty), mask=n < N)
        n += 16


@triton.jit
def _products(
    words_of_tiles, scales, bias, begin, N, x, codes, token_scale, total, first, r, q,
    width, inverse, unit, steps, epsilon,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TURNS: tl.constexpr,
    AHEAD: tl.constexpr, EVEN: tl.constexpr, HEAD: tl.constexpr, EARLY: tl.constexpr,
    NEXT_AT_ONCE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Of each tile the sums of rows r and r + 8, and what scales and is added there; the token's scale.

    Tiles are of one or two weights, as many of each from tile `begin` on, with a pointer to scales each. What
    is added belongs to row r for q = 0, to r + 8 for q = 1. In the end: which row that is in the first tile,
    for threads that store results, N for others.
    """
    NARROW: tl.constexpr = KIND == INT4
    TILES: tl.constexpr = len(words_of_tiles)
    ring = triton_ring.make(first, r, q, AHEAD, W, ASM)
    to, codes_at = _room(first, r, q, W, TURNS, BITS, NARROW, ASM)
    for turn in tl.static_range(AHEAD):
        at, inside = _words_of_turn(words_of_tiles, first, steps, turn, TURNS, W, BITS)
        triton_ring.begin_copy(ring, at, inside, turn, AHEAD, EVEN, ASM)
    if EARLY:
        cuda.gdc_wait()
        if NEXT_AT_ONCE:
            cuda.gdc_launch_dependents()
    ALL: tl.constexpr = TILES * TURNS
    START_NEXT: tl.constexpr = EARLY and not NEXT_AT_ONCE
    QUANTISED: tl.constexpr = codes is not None
    token = _load_token(x, codes, token_scale, total, first, r, q, width, steps, W, TURNS, EVEN, 1, 4, BITS)
    if HEAD > 0 or QUANTISED:
        triton_ring.meet(first, ASM)  # loads so far are not moved to where words are waited for
    head = ()
    for turn in tl.static_range(HEAD):
        head += (
            _take_turn(
                ring, words_of_tiles, first, q, steps, turn, TURNS, AHEAD, W, EVEN, BITS, START_NEXT, ASM
            ),
        )  # fmt: skip
    n = tl.where((first == 0) & (q < 2), begin * 16 + r + 8 * q, N)
    EACH: tl.constexpr = TILES // len(scales)
    of_rows = ()
    for i in tl.static_range(TILES):
        of_rows += (_load_scales(scales[i // EACH], bias, n + 16 * (i % EACH), N, ROWS),)
    pairs, own_scale, taken_off = _codes(
        token, inverse, unit, epsilon, x.dtype.element_ty, QUANTISED, KIND, CLAMPED, W, ASM
    )
    kept = triton_planes.put(to, pairs, r, NARROW, ASM) if BITS else pairs
    sums = ()
    if BITS:
        of_tiles = ()
        for _ in tl.static_range(TILES):
            of_tiles += (triton_planes.nothing(W),)
        for turn in tl.static_range(TURNS):
            columns = triton_planes.take(codes_at, kept, r, turn, W, NARROW, ASM)
            added = ()
            for i in tl.static_range(TILES):
                if turn * TILES + i < HEAD:
                    taken = head[turn * TILES + i]
                else:
                    taken = _take_turn(
                        ring, words_of_tiles, first, q, steps, turn * TILES + i, TURNS, AHEAD, W, EVEN, BITS,
                        START_NEXT, ASM,
                    )  # fmt: skip
                added += (triton_planes.count(taken[0], taken[1], columns, of_tiles[i], W, NARROW, ASM),)
            of_tiles = added
        for i in tl.static_range(TILES):
            sums += triton_planes.of_rows(of_tiles[i], q, NARROW)
    else:
        for turn in tl.static_range(ALL):
            if turn < HEAD:
                taken = head[turn]
            else:
                taken = _take_turn(
                    ring, words_of_tiles, first, q, steps, turn, TURNS, AHEAD, W, EVEN, BITS, START_NEXT, ASM
                )
            if turn % TURNS == 0:
                of_tile = triton_bytes.nothing(W)
            of_tile = triton_bytes.multiply(taken[0], taken[1], kept[turn % TURNS], of_tile, W, ASM)
            if turn % TURNS == TURNS - 1:
                sums += triton_bytes.of_rows(of_tile, q)
    sums = _over_warps(sums, taken_off, QUANTISED, W, ASM)
    # No sum is that small. Otherwise scales would be multiplied first, and all would wait for those of rows.
    return sums, of_rows, tl.where(sums[0] == _LOWEST, 0.0, own_scale), n


@triton.jit(do_not_specialize=["unit"])
def _one_token_relu2_glu(
    y, x, gates, gate_scales, ups, up_scales, codes, token_scale, total, N, tiles,
    width, inverse, unit, steps, epsilon, KIND: tl.constexpr, CLAMPED: tl.constexpr,
    ROWS: tl.constexpr, UP_ROWS: tl.constexpr, W: tl.constexpr, TURNS: tl.constexpr, AHEAD: tl.constexpr,
    TILES: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """TILES tiles of the gate, and what is open of those of `up`."""
    tile = tl.program_id(0) * TILES
    first, r, q, own = _threads(W)
    there = first >= 0
    NARROW: tl.constexpr = KIND == INT4
    to, codes_at = _room(first, r, q, W, TURNS, BITS, NARROW, ASM)
    loaded = _load_turns(gates, tile, first, steps, own, there, there, 0, AHEAD, W, EVEN)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    n = tile * 16 + r
    of_gates = ()
    of_ups = ()
    for i in tl.static_range(2 * TILES):  # of each tile rows r and r + 8
        of_gates += (_load_scales(gate_scales, None, n + 8 * i, N, ROWS),)
        of_ups += (_load_scales(up_scales, None, n + 8 * i, N, UP_ROWS),)
    QUANTISED: tl.constexpr = codes is not None
    token = _load_token(x, codes, token_scale, total, first, r, q, width, steps, W, TURNS, EVEN, 4, 1, BITS)
    if QUANTISED:
        triton_ring.meet(first, ASM)  # loads so far are not moved to where words are waited for
    pairs, own_scale, taken_off = _codes(
        token, inverse, unit, epsilon, x.dtype.element_ty, QUANTISED, KIND, CLAMPED, W, ASM
    )
    kept = triton_planes.put(to, pairs, r, NARROW, ASM) if BITS else pairs
    for i in tl.static_range(TILES):
        sums = _sums_of_rows(
            loaded, codes_at, kept, gates, tile, first, r, q, steps, own, there, there, W, TURNS, AHEAD, EVEN,
            BITS, NARROW, ASM,
        )  # fmt: skip
        upper, lower = _over_warps(sums, taken_off, QUANTISED, W, ASM)
        upper = _squared_relu(upper, own_scale, of_gates[2 * i], x.dtype.element_ty, ASM)
        lower = _squared_relu(lower, own_scale, of_gates[2 * i + 1], x.dtype.element_ty, ASM)
        open, open8 = (upper != 0) & (n < N), (lower != 0) & (n + 8 < N)
        of_up = _load_turns(ups, tile, first, steps, own, open, open8, 0, AHEAD, W, False)
        following = tl.minimum(tile + 1, tiles - 1)
        if i + 1 < TILES:  # the next tile is under way meanwhile
            loaded = _load_turns(gates, following, first, steps, own, there, there, 0, AHEAD, W, EVEN)
        sums = _sums_of_rows(
            of_up, codes_at, kept, ups, tile, first, r, q, steps, own, open, open8, W, TURNS, AHEAD, False,
            BITS, NARROW, ASM,
        )  # fmt: skip
        tile = following
        upper_up, lower_up = _over_warps(sums, taken_off, QUANTISED, W, ASM)
        upper = _gated(upper, upper_up, own_scale, of_ups[2 * i], x.dtype.element_ty, ASM)
        lower = _gated(lower, lower_up, own_scale, of_ups[2 * i + 1], x.dtype.element_ty, ASM)
        value, where = tl.where(q == 0, upper, lower), n + 8 * q
        mine = (first == 0) & (q < 2) & (where < N)
        tl.store(y + where, value.to(y.dtype.element_ty), mask=mine)
        n += 16


@triton.jit
def _squared_relu(sums, token_scale, of_rows, dtype: tl.constexpr, ASM: tl.constexpr):
    """The squared ReLU of a gate, rounded as a product and a square would be, fp32."""
    gate = widened(rounded(_scaled(sums, token_scale, of_rows, None), dtype, ASM))
    gate = tl.where(gate <= 0, 0.0, gate)  # NaN stays
    return widened(rounded(gate * gate, dtype, ASM))


@triton.jit
def _gated(squared, sums, token_scale, of_rows, dtype: tl.constexpr, ASM: tl.constexpr):
    """What comes through it, 0 where it is closed whatever that would be."""
    linear = widened(rounded(_scaled(sums, token_scale, of_rows, None), dtype, ASM))
    return tl.where(squared == 0, 0.0, squared * linear)


@triton.jit
def _load_token(
    x, codes, token_scale, total, first, r, q, width, steps,
    W: tl.constexpr, TURNS: tl.constexpr, EVEN: tl.constexpr, WORD: tl.constexpr, NEXT: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """A thread's part of a token: two runs of activations a turn, or what `_codes` gives if there are codes.

    Of the i-th words of threads q, which are words WORD q + NEXT i of a row, thread (r, q) has codes 4 j to
    4 j + 3: for `triton_planes` those of i = r // 2 and j = r % 2, j + 2; for `triton_bytes`, where it serves
    instruction r = 4 p + j, those of i = 2 p and 2 p + 1.
    """
    if BITS:
        word, j, BETWEEN = r // 2, r % 2, tl.constexpr(2)
    else:
        word, j, BETWEEN = r // 4 * 2, r % 4, tl.constexpr(4 * NEXT)
    k = first * _STEP + (q * WORD + word * NEXT) * 16 + j * 4
    loaded = ()
    if codes is None:
        WORDS: tl.constexpr = words_of_run(x.dtype.element_ty)
        words = width * WORDS // 4
        at = k // 4 * WORDS
        OF_TURN: tl.constexpr = W * _STEP // 4 * WORDS
        for turn in tl.static_range(TURNS):
            run = load_words(x, at, words, turn * OF_TURN, WORDS, EVEN)
            loaded += (run, load_words(x, at, words, turn * OF_TURN + BETWEEN * WORDS, WORDS, EVEN))
    else:
        own_scale = tl.load(token_scale)
        taken_off = tl.load(total)
        pairs = ()
        of_thread = codes + k // 4
        for turn in tl.static_range(TURNS):
            at = of_thread + turn * (W * _STEP // 4)
            if EVEN:
                pairs += ((tl.load(at), tl.load(at + BETWEEN)),)
            else:
                inside = first + turn * W < steps
                pairs += (
                    (tl.load(at, mask=inside, other=0), tl.load(at + BETWEEN, mask=inside, other=0)),
                )  # fmt: skip
        loaded = (pairs, own_scale, taken_off)
    return loaded


@triton.jit
def _codes(
    loaded, inverse, unit, epsilon, DTYPE: tl.constexpr, QUANTISED: tl.constexpr,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The codes that a thread multiplies with, two words a turn; the token's scale; what is taken off."""
    if QUANTISED:
        pairs, own_scale, taken_off = loaded
    else:
        pairs, own_scale, taken_off, _ = quantised(
            loaded, inverse, unit, epsilon, DTYPE, KIND, CLAMPED, W, ASM, True, False
        )
        # Over r: the sum over q and the warps is taken with that of the products.
        taken_off = tl.sum(tl.reshape(taken_off, [W, 8, 4]), 1, keep_dims=True)
        taken_off = tl.reshape(tl.broadcast_to(taken_off, [W, 8, 4]), [32 * W])
    return pairs, own_scale, taken_off


@triton.jit
def _take_turn(
    ring, of_tiles, warp, q, steps, TURN: tl.constexpr, TURNS: tl.constexpr, AHEAD: tl.constexpr,
    W: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, START_NEXT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The words of a turn, of rows r and r + 8, whose place is filled with those of AHEAD turns later.

    START_NEXT: the next kernel may start when the last are asked for; earlier, its words would be ahead.
    """
    ALL: tl.constexpr = len(of_tiles) * TURNS
    at, inside = _words_of_turn(of_tiles, warp, steps, TURN, TURNS, W, BITS)
    taken = triton_ring.take(ring, at, inside, q, TURN, ALL, AHEAD, ASM)
    if TURN + AHEAD < ALL:
        at, inside = _words_of_turn(of_tiles, warp, steps, TURN + AHEAD, TURNS, W, BITS)
        triton_ring.begin_copy(ring, at, inside, TURN + AHEAD, AHEAD, EVEN, ASM)
    LAST_ASKED: tl.constexpr = ALL - AHEAD - 1 if ALL > AHEAD else 0
    if START_NEXT and TURN == LAST_ASKED:
        cuda.gdc_launch_dependents()
    return taken


@triton.jit
def _sums_of_rows(
    loaded, codes_at, kept, words, tile, first, r, q, steps, own, there, there8,
    W: tl.constexpr, TURNS: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, BITS: tl.constexpr,
    NARROW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """What a thread has of the sums of a tile's rows r and r + 8, int32; AHEAD turns are `loaded`."""
    sums = _nothing(W, BITS)
    for turn in tl.static_range(TURNS):
        if turn + AHEAD < TURNS:
            loaded += _load_turns(words, tile, first, steps, own, there, there8, turn + AHEAD, 1, W, WHOLE)
        mine = triton_planes.take(codes_at, kept, r, turn, W, NARROW, ASM) if BITS else kept[turn]
        upper, lower = loaded[turn]
        sums = _multiply(four(upper), four(lower), mine, sums, W, BITS, NARROW, ASM)
    return _of_rows(sums, q, BITS, NARROW)


@triton.jit
def _room(
    warp, r, q, W: tl.constexpr, TURNS: tl.constexpr, BITS: tl.constexpr, NARROW: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Where a thread writes codes, and where it reads them."""
    if BITS:
        to, at = triton_planes.room(warp, r, q, W, TURNS, NARROW, ASM)
    else:
        to, at = warp, warp
    return to, at


@triton.jit
def _nothing(W: tl.constexpr, BITS: tl.constexpr):
    """The sums of a tile before the first."""
    return triton_planes.nothing(W) if BITS else triton_bytes.nothing(W)


@triton.jit
def _multiply(
    v, u, codes, sums, W: tl.constexpr, BITS: tl.constexpr, NARROW: tl.constexpr, ASM: tl.constexpr
):
    """Add the products of words of rows r and of r + 8, four each, with the token's codes of a turn."""
    if BITS:
        added = triton_planes.count(v, u, codes, sums, W, NARROW, ASM)
    else:
        added = triton_bytes.multiply(v, u, codes, sums, W, ASM)
    return added


@triton.jit
def _of_rows(sums, q, BITS: tl.constexpr, NARROW: tl.constexpr):
    """What a thread has of the products of rows r and r + 8."""
    return triton_planes.of_rows(sums, q, NARROW) if BITS else triton_bytes.of_rows(sums, q)


@triton.jit
def _over_warps(parts, taken_off, SUMMED: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """Sums of rows, which every thread has, of what threads have of them.

    SUMMED: what is taken off is the sum of all codes, and not what a thread has of it.
    """
    if SUMMED:
        sums = sum_rows(parts, W, ASM)
        results = ()
        for i in tl.static_range(len(parts)):
            results += (sums[i] - taken_off,)
    else:
        own = ()
        for i in tl.static_range(len(parts)):
            own += (parts[i] - taken_off,)
        results = sum_rows(own, W, ASM)
    return results


@triton.jit
def _load_fragments(
    codes, step, steps, r, q, block,
    BLOCKS: tl.constexpr, NB: tl.constexpr, HALVES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Of every block of 8 tokens 4 times 4 words of codes: what each instruction takes lies side by side.

    Codes of 4 bits come two in a byte, and are 16 times as large as they should be afterwards.
    """
    LOADS: tl.constexpr = 2 if HALVES else 4
    loaded = ()
    for nb in tl.static_range(NB):
        words = ()
        for i in tl.static_range(LOADS):
            at = step * (LOADS * 128 * BLOCKS) + block * 128 + r * 16 + q * 4
            where = codes + at[:, None] + tl.arange(0, 4)[None, :] + (i * BLOCKS + nb) * 128
            if EVEN:
                some = four(tl.load(where))
            else:
                some = four(tl.load(where, mask=(step < steps)[:, None], other=0))
            if HALVES:
                words += (_widened(some[0], some[1]), _widened(some[2], some[3]))
            else:
                words += (some,)
        loaded += (words,)
    return loaded


@triton.jit
def _widened(first, second):
    """The lower halves of the bytes of two words, and the upper ones, each as the upper half of a byte."""
    return (
        (first << 4) & -0x0F0F0F10, (second << 4) & -0x0F0F0F10, first & -0x0F0F0F10, second & -0x0F0F0F10
    )  # fmt: skip


@triton.jit
def _multiply_words(
    v, u, codes, sums, FIRST: tl.constexpr, SETS: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr
):
    """Add the products of 4 words of rows r and of r + 8 with those of 8 tokens to their sums.

    These are in sets, from FIRST on; set s is 4**s times too large, as codes are not shifted all the way.
    """
    added = ()
    for s in tl.static_range(SETS):
        mask = 0x03030303 << (2 * s) if s < 3 else -0x3F3F3F40
        of_set = sums[FIRST + s]
        for p in tl.static_range(2):
            for j in tl.static_range(s, 4, SETS):
                a, b = codes[2 * p + j // 2][2 * (j % 2)], codes[2 * p + j // 2][2 * (j % 2) + 1]
                of_set = mma(
                    (v[2 * p] >> (2 * (j - s))) & mask, (u[2 * p] >> (2 * (j - s))) & mask,
                    (v[2 * p + 1] >> (2 * (j - s))) & mask, (u[2 * p + 1] >> (2 * (j - s))) & mask,
                    a, b, of_set, False, W, ASM,
                )  # fmt: skip
        added += (of_set,)
    return added


@triton.jit
def _few_tokens(
    y, codes, token_scale, total, words, scales, bias, M, N, steps, tiles,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, BESIDE: tl.constexpr, NB: tl.constexpr,
    TN: tl.constexpr, SETS: tl.constexpr, PLACES: tl.constexpr, ROUNDS: tl.constexpr,
    CODES_AHEAD: tl.constexpr, HALVES: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
    NEXT_AT_ONCE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """16 TN BESIDE columns of y for 8 NB tokens: W warps share the columns of x, a step each in turn.

    Words are loaded to some PLACES. Each is loaded anew when it has been used, where it is: handed from one
    to the next, words would have to be there a turn after they were asked for.
    """
    ALL: tl.constexpr = W * BESIDE
    t = tl.arange(0, 32 * ALL)
    lane, warp = t % 32, t // 32
    first = warp // BESIDE
    r, q = lane // 4, lane % 4
    own = r * 16 + q * 4
    begin = tl.program_id(0) * (BESIDE * TN)
    tile = begin + warp % BESIDE * TN
    block = tl.program_id(1) * NB
    everyone = t >= 0
    zero = tl.zeros([32 * ALL], tl.int32)
    sums = ()
    for _ in tl.static_range(TN * NB * SETS):
        sums += ((zero, zero, zero, zero),)
    turns = ()
    for turn in tl.static_range(PLACES):
        turns += (_load_tiles(words, tile, tiles, first + turn * W, steps, own, everyone, TN, EVEN),)
    if EARLY:
        cuda.gdc_wait()
        if NEXT_AT_ONCE:
            cuda.gdc_launch_dependents()
    # What this thread has in the end: values of a token follow each other, of each tile rows r and r + 8.
    OF_TOKEN: tl.constexpr = 2 * TN
    EACH: tl.constexpr = each_of(4 * NB * TN, W)
    value = first_of(4 * NB * TN, W, BESIDE)
    of_rows = ()
    for i in tl.static_range(EACH if EACH < OF_TOKEN else OF_TOKEN):
        n = (tile + (value + i) % OF_TOKEN // 2) * 16 + (value + i) % 2 * 8 + r
        of_rows += (_load_scales(scales, bias, n, N, ROWS),)
    of_tokens = ()
    for i in tl.static_range(0, EACH, OF_TOKEN):
        token = (value + i) // OF_TOKEN
        m = block * 8 + token // 2 * 8 + token % 2 + 2 * q
        own_scale = tl.load(token_scale + m, mask=m < M, other=0.0)
        of_tokens += ((own_scale, tl.load(total + m, mask=m < M, other=0)),)
    if CODES_AHEAD:
        next_fragments = _load_fragments(codes, first, steps, r, q, block, BLOCKS, NB, HALVES, EVEN)
    for turn in range(0, ROUNDS * PLACES, PLACES):
        later = ()
        for i in tl.static_range(PLACES):
            step = (turn + i) * W + first
            if CODES_AHEAD:
                fragments = next_fragments
                following = step + W
                if EVEN:  # the last turn loads what it has once more
                    following = tl.minimum(following, steps - W + first)
                next_fragments = _load_fragments(
                    codes, following, steps, r, q, block, BLOCKS, NB, HALVES, EVEN
                )
            else:
                fragments = _load_fragments(codes, step, steps, r, q, block, BLOCKS, NB, HALVES, EVEN)
            sums = _multiply_tiles(turns[i], fragments, sums, TN, NB, SETS, ALL, ASM)
            if ROUNDS > 1:
                step += PLACES * W
                later += (_load_tiles(words, tile, tiles, step, steps, own, everyone, TN, False),)
        if ROUNDS > 1:
            turns = later
    if EARLY and not NEXT_AT_ONCE:
        cuda.gdc_launch_dependents()

    values = ()
    for nb in tl.static_range(NB):
        for column in tl.static_range(2):
            for i in tl.static_range(TN):
                upper, lower = zero, zero
                for s in tl.static_range(SETS):
                    of_set = sums[(i * NB + nb) * SETS + s]
                    upper += of_set[column] >> (2 * s)
                    lower += of_set[2 + column] >> (2 * s)
                values += (upper, lower)
    added = share_sums(values, value, W, BESIDE, ASM)
    for i in tl.static_range(EACH):
        own_scale, taken_off = of_tokens[i // OF_TOKEN]
        mine = added[i] >> 4 if HALVES else added[i]
        result = _scaled(mine - taken_off, own_scale, of_rows[i % len(of_rows)], bias)
        token = (value + i) // OF_TOKEN
        m = block * 8 + token // 2 * 8 + token % 2 + 2 * q
        n = (tile + (value + i) % OF_TOKEN // 2) * 16 + (value + i) % 2 * 8 + r
        tl.store(y + m.to(tl.int64) * N + n, result.to(y.dtype.element_ty), mask=(n < N) & (m < M))


@triton.jit
def _load_tiles(words, tile, tiles, step, steps, own, everyone, TN: tl.constexpr, EVEN: tl.constexpr):
    """What a thread has of TN tiles from `tile` on, in one step."""
    loaded = ()
    for i in tl.static_range(TN):
        mine = tl.minimum(tile + i, tiles - 1)
        loaded += (_load_words(words, mine, step, steps, own, everyone, everyone, EVEN),)
    return loaded


@triton.jit
def _multiply_tiles(
    tiles, fragments, sums,
    TN: tl.constexpr, NB: tl.constexpr, SETS: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add the products of the words of TN tiles with those of 8 NB tokens to their sums."""
    added = ()
    for i in tl.static_range(TN):
        v = four(tiles[i][0])
        u = four(tiles[i][1])
        for nb in tl.static_range(NB):
            added += _multiply_words(v, u, fragments[nb], sums, (i * NB + nb) * SETS, SETS, W, ASM)
    return added
