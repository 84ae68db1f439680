"""Products of a few tokens with ternary weights, in Triton, by matrix instructions on 8-bit integers.

A warp takes tiles of 16 rows and 256 columns. Its thread (r, q) loads words 4 q to 4 q + 3 of rows r and
r + 8: masked, they are what it has to give to m16n8k32, with no thread asking another. What is multiplied are
c + 1, 0 to 2 for codes c, so the sum of the token's codes is taken off in the end.

One token (`_one_token`) is one column of the 8 that an instruction multiplies with. The 8 instructions of a
tile, (p, j), take the codes 4 j to 4 j + 3 of words 2 p and 2 p + 1 of each thread, and what is asked for
stands in column 4 p + j of their own sums: so thread (r, q) needs the activations of one of the 8 only, no
two threads have the same, and the quantiser's work is shared out as well. As an instruction has sums
of its own, no bits have to be shifted: they are 4**j times too large, which a shift of the sums repairs.

More tokens (`_few_tokens`) come quantised, in the order of the instructions. Their words are shifted, and the
sums are those of blocks of 8 tokens. Codes of 16 tokens are more bytes than the weights of a tile, so warps
with other tiles go through the same columns beside each other: what one loads the others find in the cache.

Several warps share the columns of a tile and add their sums in the end. Kernels load weights before they wait
for the kernel ahead of them (programmatic dependent launch), so that memory is busy meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from neuzip.kernels.gpu import early_launches, multiprocessors
from neuzip.kernels.quantizers.activations import EPSILON
from neuzip.kernels.rans.triton_decode import LAUNCHING
from neuzip.kernels.triton_floats import rounded, widened

from .triton_quantize import (
    INT4,
    KINDS,
    fixed_point,
    fixed_unit,
    magnitude_bits,
    numbers,
    quantize,
    rounded_codes,
)
from .weight import STEP, TernaryWeight

_STEP = tl.constexpr(STEP)


FUSED_TURNS = 8
"""Steps of a thread up to which a product quantises its token itself: it has to keep all activations."""

PLACES = 4
"""For words of up to 16 tokens and over FUSED_TURNS turns: with more, fewer programs run side by side."""


@dataclass(frozen=True)
class Launch:
    """How a product of few tokens is launched."""

    warps: int  # that share the columns of a tile
    tiles: int  # of a warp: one after the other for one token, at once for more
    early: bool = True  # weights are loaded before the kernel ahead has ended
    # For more tokens:
    beside: int = 1  # such groups of warps with tiles of their own in a program
    places: int = 2  # for the words of so many turns
    codes_ahead: bool = False  # whether codes are loaded a turn ahead


def one_token_launch(tiles: int, steps: int, multiprocessors: int) -> Launch:
    """At least 4 warps, and as many as leave a thread 8 steps, 4 of long rows; 2 tiles where warps are many.

    As was fastest on an H200 (benchmarks/results/log.md), like the next.
    """
    turns = FUSED_TURNS if steps <= 6 * FUSED_TURNS else FUSED_TURNS // 2
    warps = min(16, max(4, triton.next_power_of_2(triton.cdiv(steps, turns))))
    warps = min(warps, triton.next_power_of_2(steps))
    return Launch(warps, 2 if tiles * warps > 12 * multiprocessors else 1)


def few_tokens_launch(tiles: int, steps: int, blocks: int, multiprocessors: int) -> Launch:
    """Some warps for each multiprocessor, but few that share a tile: their sums are added in the end.

    The more tokens, the more turns a warp should have, and the more tiles should share what is loaded of x.
    """
    wanted = triton.next_power_of_2(triton.cdiv(8 * multiprocessors, tiles))
    least = 2 if blocks == 1 or tiles < 3 * multiprocessors else 1
    shares = min(8, wanted, _power_below(2 * steps // (7 * blocks)))
    warps = max(1, min(max(shares, least), _power_below(steps)))
    turns = triton.cdiv(steps, warps)
    places = turns if turns <= FUSED_TURNS else PLACES
    if blocks == 1:
        return Launch(warps, 1, places=places)
    most = _power_below(4 * tiles // (3 * multiprocessors))  # nearly all multiprocessors have a program
    beside = max(1, min(8 // warps, most))
    if blocks == 2:
        return Launch(warps, 1, beside=beside, places=places, codes_ahead=True)
    if tiles > 8 * multiprocessors:
        return Launch(warps, 2, beside=max(1, min(8 // warps, most // 2)))
    return Launch(warps, 1, beside=beside, codes_ahead=True)


def _power_below(number: int) -> int:
    """The largest power of two that is not above a number, and 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)


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
    `ternary_linear`; all arrays are contiguous.
    """
    of_token = _Token.of(x, weights, activation, clamped, kept, launch)
    ys = [of_token.empty(weight) for weight in weights]
    programs = sum(triton.cdiv(weight.words.shape[0], of_token.launch.tiles) for weight in weights)
    with torch.cuda.device_of(x), LAUNCHING:
        _one_token[(programs,)](
            tuple(ys), x, tuple(weight.words for weight in weights),
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

    Rows of `up` for which the squared ReLU is 0 are not read. Weights have a scale, or one a row.
    """
    of_token = _Token.of(x, (gate, up), activation, clamped, kept, launch)
    y = of_token.empty(gate)
    tiles = gate.words.shape[0]
    with torch.cuda.device_of(x), LAUNCHING:
        _one_token_relu2_glu[(triton.cdiv(tiles, of_token.launch.tiles),)](
            y, x, gate.words, gate.scale, up.words, up.scale, *of_token.codes(), gate.shape[0], tiles,
            UP_ROWS=up.scale.dim() > 0, **of_token.options,
        )  # fmt: skip
    return y.to(x.dtype)


@dataclass(frozen=True)
class _Token:
    """One token that is multiplied with some weights: how the kernels take it."""

    x: torch.Tensor
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
        launch: Launch | None,
    ) -> _Token:
        columns, steps = x.shape[1], weights[0].words.shape[1]
        tiles = sum(weight.words.shape[0] for weight in weights)
        compiled = isinstance(_one_token, triton.JITFunction)
        launch = launch or one_token_launch(tiles, steps, multiprocessors(x.device))
        early = compiled and launch.early and early_launches(x.device)
        turns = triton.cdiv(steps, launch.warps)
        options = {
            "K": columns, "steps": steps, "epsilon": EPSILON, "KIND": KINDS[activation], "CLAMPED": clamped,
            "CEIL_LOG2": (columns - 1).bit_length(), "ROWS": weights[0].scale.dim() > 0, "W": launch.warps,
            "TURNS": turns, "AHEAD": min(turns, 8 if launch.warps <= 8 else 4), "TILES": launch.tiles,
            "EVEN": columns == turns * launch.warps * STEP, "EARLY": early, "ASM": compiled,
            "num_warps": launch.warps, "launch_pdl": early, "enable_fp_fusion": False,
        }  # fmt: skip
        return _Token(x, activation, clamped, kept, launch, options)

    def empty(self, weight: TernaryWeight) -> torch.Tensor:
        """Memory for a product."""
        dtype = self.x.dtype if self.options["ASM"] else torch.float32
        return torch.empty(1, weight.shape[0], dtype=dtype, device=self.x.device)

    def codes(self) -> tuple[torch.Tensor | None, ...]:
        """Codes, scale and sum of codes, of a token that programs do not quantise themselves."""
        if self.activation != "top_k_int8" and self.options["TURNS"] <= FUSED_TURNS:
            return None, None, None
        codes, scale, total = quantize(self.x, self.activation, self.kept, self.clamped)
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
    """The same for x [tokens, in]: [tokens, out]. Weights are read once for 32 tokens."""
    tokens, out = x.shape[0], weight.shape[0]
    tiles, steps = weight.words.shape[:2]
    compiled = isinstance(_few_tokens, triton.JITFunction)
    y = torch.empty(tokens, out, dtype=x.dtype if compiled else torch.float32, device=x.device)
    blocks = triton.cdiv(tokens, 8)
    together = 4 if blocks > 2 else blocks
    blocks = triton.cdiv(blocks, together) * together
    launch = launch or few_tokens_launch(tiles, steps, blocks, multiprocessors(x.device))
    early = compiled and launch.early and early_launches(x.device)
    turns = triton.cdiv(steps, launch.warps)
    places = min(launch.places, turns)
    with torch.cuda.device_of(x), LAUNCHING:
        codes, scale, total = quantize(x, activation, kept, clamped, blocks=blocks)
        _few_tokens[(triton.cdiv(tiles, launch.tiles * launch.beside), blocks // together)](
            y, codes.view(torch.int32), scale, total, weight.words, weight.scale, bias,
            tokens, out, steps, tiles, blocks, ROWS=weight.scale.dim() > 0,
            W=launch.warps, BESIDE=launch.beside, NB=together, TN=launch.tiles,
            PLACES=places, ROUNDS=triton.cdiv(turns, places), CODES_AHEAD=launch.codes_ahead,
            EVEN=steps % (launch.warps * places) == 0, EARLY=early, ASM=compiled,
            num_warps=launch.warps * launch.beside, launch_pdl=early, enable_fp_fusion=False,
        )  # fmt: skip
    return y.to(x.dtype)


@triton.jit
def _four(tile):
    """The columns of [T, 4]."""
    T: tl.constexpr = tile.shape[0]
    even, odd = tl.split(tl.reshape(tile, [T, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _lowest_bytes(tile, ASM: tl.constexpr):
    """The lowest bytes of 4 int32 in one: [T] of [T, 4]."""
    b0, b1, b2, b3 = _four(tile)
    if ASM:
        word = tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040;"
            " prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r", [b0, b1, b2, b3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = (b0 & 0xFF) | (b1 & 0xFF) << 8 | (b2 & 0xFF) << 16 | (b3 & 0xFF) << 24
    return word


@triton.jit
def _signed_byte(word, B: tl.constexpr):
    return (word << (24 - 8 * B)) >> 24


@triton.jit
def _multiply_bytes(a, b, W: tl.constexpr):
    """For the interpreter: what 8 rows and 8 columns, 16 products each, add to two sums of every thread."""
    sums = tl.zeros([W, 8, 8, 4], tl.int32)
    for i in tl.static_range(4):
        mine = tl.reshape((a >> (8 * i)) & 0xFF, [W, 8, 1, 4])
        sums += mine * tl.reshape(_signed_byte(b, i), [W, 1, 8, 4])
    left, right = tl.split(tl.reshape(tl.sum(sums, 3), [W, 8, 4, 2]))
    return tl.reshape(left, [32 * W]), tl.reshape(right, [32 * W])


@triton.jit
def _mma(a0, a1, a2, a3, b0, b1, sums, W: tl.constexpr, ASM: tl.constexpr):
    """m16n8k32 of unsigned weights and signed activations, four a word; returns the thread's 4 sums."""
    if ASM:
        result = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        l0, r0 = _multiply_bytes(a0, b0, W)
        l1, r1 = _multiply_bytes(a1, b0, W)
        l2, r2 = _multiply_bytes(a2, b1, W)
        l3, r3 = _multiply_bytes(a3, b1, W)
        result = (sums[0] + l0 + l2, sums[1] + r0 + r2, sums[2] + l1 + l3, sums[3] + r1 + r3)
    return result


@triton.jit
def _sum_of_bytes(word, so_far, ASM: tl.constexpr):
    """The sum of 4 signed bytes, added to another."""
    if ASM:
        result = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [word, word * 0 + 0x01010101, so_far],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        result = so_far
        for i in tl.static_range(4):
            result += _signed_byte(word, i)
    return result


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
def _load_tile(
    words, tile, tiles, first, steps, own, there, there8,
    W: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What a thread has of a tile in its first AHEAD turns."""
    loaded = ()
    tile = first * 0 + tl.minimum(tile, tiles - 1)
    for turn in tl.static_range(AHEAD):
        loaded += (_load_words(words, tile, first + turn * W, steps, own, there, there8, EVEN),)
    return loaded


@triton.jit
def _load_x(x, k, columns, EVEN: tl.constexpr):
    """The 4 activations from column k on, fp32 [T, 4]; 0 beyond the last."""
    at = k[:, None] + tl.arange(0, 4)[None, :]
    if EVEN:
        loaded = tl.load(x + at)
    else:
        loaded = tl.load(x + at, mask=at < columns, other=0.0)
    return widened(loaded)


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


@triton.jit
def _one_token(
    ys, x, words, scales, biases, codes, token_scale, total, outs, tiles, K, steps, epsilon,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, CEIL_LOG2: tl.constexpr, ROWS: tl.constexpr,
    W: tl.constexpr, TURNS: tl.constexpr, AHEAD: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one y, one after the other: W warps share the columns, a step each in turn."""
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
    there = first >= 0
    loaded = _load_tile(word, begin, count, first, steps, own, there, there, W, AHEAD, EVEN)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    of_rows = ()
    for i in tl.static_range(TILES):
        of_rows += (_load_scales(scale, bias, (begin + i) * 16 + tl.arange(0, 16), N, ROWS),)
    pairs, own_scale, taken_off = _codes(
        x, codes, token_scale, total, first, r, q, K, steps, epsilon, KIND, CLAMPED, CEIL_LOG2, W, TURNS,
        EVEN, ASM,
    )  # fmt: skip
    for i in tl.static_range(TILES):
        tile = begin + i
        at_hand = loaded
        if i + 1 < TILES:  # the next tile is under way meanwhile
            loaded = _load_tile(word, tile + 1, count, first, steps, own, there, there, W, AHEAD, EVEN)
        sums = _sums_of_rows(
            at_hand, pairs, taken_off, word, tile, count, first, q, steps, own, there, there,
            codes is not None, W, TURNS, AHEAD, EVEN, ASM,
        )  # fmt: skip
        n = tile * 16 + tl.arange(0, 16)
        value = _scaled(sums, own_scale, of_rows[i], bias)
        tl.store(y + n, value.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _one_token_relu2_glu(
    y, x, gates, gate_scales, ups, up_scales, codes, token_scale, total, N, tiles, K, steps, epsilon,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, CEIL_LOG2: tl.constexpr, ROWS: tl.constexpr,
    UP_ROWS: tl.constexpr, W: tl.constexpr, TURNS: tl.constexpr, AHEAD: tl.constexpr, TILES: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """TILES tiles of the gate, and what is open of those of `up`."""
    begin = tl.program_id(0) * TILES
    first, r, q, own = _threads(W)
    there = first >= 0
    loaded = _load_tile(gates, begin, tiles, first, steps, own, there, there, W, AHEAD, EVEN)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    of_rows = ()
    for i in tl.static_range(TILES):
        n = (begin + i) * 16 + tl.arange(0, 16)
        of_gate = _load_scales(gate_scales, None, n, N, ROWS)
        of_rows += ((of_gate, _load_scales(up_scales, None, n, N, UP_ROWS)),)
    pairs, own_scale, taken_off = _codes(
        x, codes, token_scale, total, first, r, q, K, steps, epsilon, KIND, CLAMPED, CEIL_LOG2, W, TURNS,
        EVEN, ASM,
    )  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    for i in tl.static_range(TILES):
        tile = begin + i
        at_hand = loaded
        sums = _sums_of_rows(
            at_hand, pairs, taken_off, gates, tile, tiles, first, q, steps, own, there, there,
            codes is not None, W, TURNS, AHEAD, EVEN, ASM,
        )  # fmt: skip
        n = tile * 16 + tl.arange(0, 16)
        gate = widened(rounded(_scaled(sums, own_scale, of_rows[i][0], None), dtype, ASM))
        gate = tl.where(gate <= 0, 0.0, gate)  # NaN stays
        squared = widened(rounded(gate * gate, dtype, ASM))
        upper, lower = _of_threads(((squared != 0) & (n < N)).to(tl.int32), W)
        at_hand = _load_tile(ups, tile, tiles, first, steps, own, upper != 0, lower != 0, W, AHEAD, False)
        if i + 1 < TILES:  # the next tile is under way meanwhile
            loaded = _load_tile(gates, tile + 1, tiles, first, steps, own, there, there, W, AHEAD, EVEN)
        sums = _sums_of_rows(
            at_hand, pairs, taken_off, ups, tile, tiles, first, q, steps, own, upper != 0, lower != 0,
            codes is not None, W, TURNS, AHEAD, False, ASM,
        )  # fmt: skip
        linear = widened(rounded(_scaled(sums, own_scale, of_rows[i][1], None), dtype, ASM))
        value = tl.where(squared == 0, 0.0, squared * linear)
        tl.store(y + n, value.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _of_threads(rows, W: tl.constexpr):
    """Of 16 rows, those r and those r + 8 of the threads: [32 W] each."""
    upper, lower = tl.split(tl.trans(tl.reshape(rows, [2, 8])))
    upper = tl.broadcast_to(tl.reshape(upper, [1, 8, 1]), [W, 8, 4])
    lower = tl.broadcast_to(tl.reshape(lower, [1, 8, 1]), [W, 8, 4])
    return tl.reshape(upper, [32 * W]), tl.reshape(lower, [32 * W])


@triton.jit
def _codes(
    x, codes, token_scale, total, first, r, q, K, steps, epsilon,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, CEIL_LOG2: tl.constexpr, W: tl.constexpr,
    TURNS: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The codes of the token that a thread multiplies with, two words a turn; the scale; what is taken off.

    Thread (r, q) has those of instruction r = 4 p + j only: codes 4 j to 4 j + 3 of words 2 p and 2 p + 1.
    """
    k = first * _STEP + q * 64 + r // 4 * 32 + r % 4 * 4
    pairs = ()
    if codes is None:
        xs = ()
        for turn in tl.static_range(TURNS):
            xs += (
                (_load_x(x, k + turn * W * _STEP, K, EVEN), _load_x(x, k + turn * W * _STEP + 16, K, EVEN)),
            )
        size = tl.zeros([32 * W, 4], tl.int32)
        for turn in tl.static_range(TURNS):
            size = tl.maximum(size, tl.maximum(magnitude_bits(xs[turn][0]), magnitude_bits(xs[turn][1])))
        peak = tl.max(tl.max(size, 1), 0)
        amount, inverse = tl.zeros([], tl.int64), tl.zeros([], tl.float64)
        if KIND == INT4:
            unit, inverse = fixed_unit(peak, CEIL_LOG2)
            FAST: tl.constexpr = ASM and CEIL_LOG2 >= 10
            mine = tl.zeros([32 * W, 4], tl.int64)
            for turn in tl.static_range(TURNS):
                first_sizes, excess = fixed_point(xs[turn][0], peak, unit, inverse, FAST)
                second_sizes, excess = fixed_point(xs[turn][1], peak, unit, inverse, FAST)
                mine += first_sizes + second_sizes
            amount = tl.sum(tl.sum(mine - 2 * TURNS * excess, 1), 0)
        factor, own_scale = numbers(peak, amount, inverse, K, epsilon, KIND, CLAMPED)
        NARROW: tl.constexpr = ASM and x.dtype.element_ty != tl.float32
        of_codes = tl.zeros([32 * W], tl.int32)
        for turn in tl.static_range(TURNS):
            b0 = _lowest_bytes(rounded_codes(xs[turn][0], factor, KIND, NARROW), ASM)
            b1 = _lowest_bytes(rounded_codes(xs[turn][1], factor, KIND, NARROW), ASM)
            of_codes = _sum_of_bytes(b1, _sum_of_bytes(b0, of_codes, ASM), ASM)
            pairs += ((b0, b1),)
        # Over r: the sum over q and the warps is taken with that of the products.
        taken_off = tl.sum(tl.reshape(of_codes, [W, 8, 4]), 1, keep_dims=True)
    else:
        own_scale = tl.load(token_scale)
        for turn in tl.static_range(TURNS):
            at = k // 4 + turn * (W * _STEP // 4)
            inside = first + turn * W < steps
            pairs += (
                (tl.load(codes + at, mask=inside, other=0), tl.load(codes + at + 4, mask=inside, other=0)),
            )
        taken_off = tl.load(total)
    return pairs, own_scale, taken_off


@triton.jit
def _sums_of_rows(
    at_hand, pairs, taken_off, words, tile, tiles, first, q, steps, own, there, there8,
    SUMMED: tl.constexpr, W: tl.constexpr, TURNS: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The sums of a tile's rows, int32 [16]. SUMMED: what is taken off is the sum of all codes."""
    zero = tl.zeros([32 * W], tl.int32)
    sums = ()
    for _ in tl.static_range(8):
        sums += ((zero, zero, zero, zero),)
    for turn in tl.static_range(TURNS):
        if turn + AHEAD < TURNS:
            later = first + (turn + AHEAD) * W
            mine = first * 0 + tl.minimum(tile, tiles - 1)
            at_hand += (_load_words(words, mine, later, steps, own, there, there8, WHOLE),)
        v0, v1, v2, v3 = _four(at_hand[turn][0])
        u0, u1, u2, u3 = _four(at_hand[turn][1])
        b0, b1 = pairs[turn]
        added = ()
        for g in tl.static_range(8):
            mask = 0x03030303 << (2 * (g % 4)) if g % 4 < 3 else -0x3F3F3F40
            if g < 4:
                added += (_mma(v0 & mask, u0 & mask, v1 & mask, u1 & mask, b0, b1, sums[g], W, ASM),)
            else:
                added += (_mma(v2 & mask, u2 & mask, v3 & mask, u3 & mask, b0, b1, sums[g], W, ASM),)
        sums = added
    # Thread q has columns 2 q and 2 q + 1 of all sums; of sums g, column g counts.
    top, bottom = zero, zero
    for c in tl.static_range(4):
        top = tl.where(q == c, _unscaled(sums[2 * c][0], sums[2 * c + 1][1], c), top)
        bottom = tl.where(q == c, _unscaled(sums[2 * c][2], sums[2 * c + 1][3], c), bottom)
    if SUMMED:
        result = _rows_of(top, bottom, 0, W) - taken_off
    else:
        result = _rows_of(top, bottom, taken_off, W)
    return result


@triton.jit
def _unscaled(even, odd, C: tl.constexpr):
    """What the instructions 2 C and 2 C + 1 give together."""
    return (even >> (4 * (C % 2))) + (odd >> (4 * (C % 2) + 2))


@triton.jit
def _rows_of(top, bottom, taken_off, W: tl.constexpr):
    """The sums of all threads of the rows r and r + 8, in all warps: [16]."""
    both = tl.join(tl.reshape(top, [W, 8, 4]) - taken_off, tl.reshape(bottom, [W, 8, 4]) - taken_off)
    return tl.reshape(tl.trans(tl.sum(tl.sum(both, 2), 0)), [16])


@triton.jit
def _load_fragments(codes, step, steps, r, q, block, blocks, NB: tl.constexpr, EVEN: tl.constexpr):
    """Of every block of 8 tokens 4 times 4 words of codes: what each instruction takes lies side by side."""
    loaded = ()
    for nb in tl.static_range(NB):
        words = ()
        for i in tl.static_range(4):
            at = ((step * 4 + i) * (8 * blocks) + 8 * (block + nb) + r) * 16 + q * 4
            where = codes + at[:, None] + tl.arange(0, 4)[None, :]
            if EVEN:
                words += (_four(tl.load(where)),)
            else:
                words += (_four(tl.load(where, mask=(step < steps)[:, None], other=0)),)
        loaded += (words,)
    return loaded


@triton.jit
def _multiply_words(v, u, codes, sums, W: tl.constexpr, ASM: tl.constexpr):
    """Add the products of 4 words of rows r and of r + 8 with those of 8 tokens to their sums."""
    for p in tl.static_range(2):
        for j in tl.static_range(4):
            sums = _mma(
                (v[2 * p] >> (2 * j)) & 0x03030303, (u[2 * p] >> (2 * j)) & 0x03030303,
                (v[2 * p + 1] >> (2 * j)) & 0x03030303, (u[2 * p + 1] >> (2 * j)) & 0x03030303,
                codes[2 * p + j // 2][2 * (j % 2)], codes[2 * p + j // 2][2 * (j % 2) + 1], sums, W, ASM,
            )  # fmt: skip
    return sums


@triton.jit
def _few_tokens(
    y, codes, token_scale, total, words, scales, bias, M, N, steps, tiles, blocks,
    ROWS: tl.constexpr, W: tl.constexpr, BESIDE: tl.constexpr, NB: tl.constexpr, TN: tl.constexpr,
    PLACES: tl.constexpr, ROUNDS: tl.constexpr, CODES_AHEAD: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr, ASM: tl.constexpr,
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
    for _ in tl.static_range(TN * NB):
        sums += ((zero, zero, zero, zero),)
    turns = ()
    for turn in tl.static_range(PLACES):
        turns += (_load_tiles(words, tile, tiles, first + turn * W, steps, own, everyone, TN, EVEN),)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    n = (begin * 16 + tl.arange(0, 16 * TN * BESIDE))[:, None]
    m = block * 8 + tl.arange(0, 8 * NB)[None, :]
    of_rows = _load_scales(scales, bias, n, N, ROWS)
    taken_off = tl.load(total + m, mask=m < M, other=0)
    own_scale = tl.load(token_scale + m, mask=m < M, other=0.0)
    if CODES_AHEAD:
        next_fragments = _load_fragments(codes, first, steps, r, q, block, blocks, NB, EVEN)
    for turn in range(0, ROUNDS * PLACES, PLACES):
        later = ()
        for i in tl.static_range(PLACES):
            step = (turn + i) * W + first
            if CODES_AHEAD:
                fragments = next_fragments
                following = step + W
                if EVEN:  # the last turn loads what it has once more
                    following = tl.minimum(following, steps - W + first)
                next_fragments = _load_fragments(codes, following, steps, r, q, block, blocks, NB, EVEN)
            else:
                fragments = _load_fragments(codes, step, steps, r, q, block, blocks, NB, EVEN)
            sums = _multiply_tiles(turns[i], fragments, sums, TN, NB, ALL, ASM)
            if ROUNDS > 1:
                step += PLACES * W
                later += (_load_tiles(words, tile, tiles, step, steps, own, everyone, TN, False),)
        if ROUNDS > 1:
            turns = later

    value = _scaled(_tiles(sums, TN, NB, W, BESIDE) - taken_off, own_scale, of_rows, bias)
    tl.store(y + m.to(tl.int64) * N + n, value.to(y.dtype.element_ty), mask=(n < N) & (m < M))


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
    tiles, fragments, sums, TN: tl.constexpr, NB: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr
):
    """Add the products of the words of TN tiles with those of 8 NB tokens to their sums."""
    added = ()
    for i in tl.static_range(TN):
        v = _four(tiles[i][0])
        u = _four(tiles[i][1])
        for nb in tl.static_range(NB):
            added += (_multiply_words(v, u, fragments[nb], sums[i * NB + nb], W, ASM),)
    return added


@triton.jit
def _tiles(sums, TN: tl.constexpr, NB: tl.constexpr, W: tl.constexpr, BESIDE: tl.constexpr):
    """The sums of all warps, TN NB tiles of 16 rows and 8 tokens each: [16 TN BESIDE, 8 NB]."""
    COUNT: tl.constexpr = TN * NB
    parts = ()
    for i in tl.static_range(COUNT):
        parts += (tl.join(tl.join(sums[i][0], sums[i][2]), tl.join(sums[i][1], sums[i][3])),)
    added = tl.sum(tl.reshape(_joined(parts, COUNT), [W, BESIDE * 128 * COUNT]), 0)
    # warps beside, r, q, row r or r + 8, column 2 q or 2 q + 1, tile, block
    return tl.reshape(
        tl.permute(tl.reshape(added, [BESIDE, 8, 4, 2, 2, TN, NB]), (0, 5, 3, 1, 6, 2, 4)),
        [16 * TN * BESIDE, 8 * NB],
    )


@triton.jit
def _joined(parts, COUNT: tl.constexpr):
    """1, 2, 4, 8 or 16 arrays as one, with axes of 2 after the others that are the bits of their numbers."""
    for level in tl.static_range(4):
        if COUNT >> level > 1:  # the first half beside the second: the last axis is the lowest bit
            pairs = ()
            for i in tl.static_range(COUNT >> (level + 1)):
                pairs += (tl.join(parts[i], parts[i + (COUNT >> (level + 1))]),)
            parts = pairs
    return parts[0]
