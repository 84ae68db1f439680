"""The blocks of a tensor coded on a GPU, span by span: words go to scratch, and from there to their place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neuzip.kernels.device.launch import launch
from neuzip.kernels.float_fields import FloatFormat
from neuzip.kernels.rans.numbers import BLOCK, HEADER_WORDS, LANES, LOWER, RAW_STEPS, RUN, RUNS
from neuzip.kernels.rans.triton.encode_kernel import code_kernel
from neuzip.kernels.rans.triton.encoder_table import ROW, EncoderTable

SCRATCH = 64 << 20
"""Bytes of scratch that any tensor may have. A larger one may have 4/5 of its own size."""

NOTES = LANES * RUNS
"""The most notes of a block: one a lane and run."""


def whole_programs(numel: int, warps: int) -> int:
    """`numel` rounded down to whole programs, of as many blocks as warps."""
    return numel // (warps * BLOCK) * warps * BLOCK


def code_words(blocks: BlockCoder, spare: int) -> torch.Tensor:
    """All words, in memory for one in `spare` more. Waits for the device once a span."""
    parts, first = [], 0
    for at in blocks.spans:
        last = int(blocks.ends[blocks.code(at)])
        parts.append(torch.empty(last - first, dtype=torch.int16, device=blocks.index.device))
        blocks.gather(at, parts[-1], first)
        first = last
    if len(parts) == 1 and not spare:
        return parts[0]
    capacity = torch.empty(
        first + (first // spare if spare else 0), dtype=torch.int16, device=parts[0].device
    )
    return torch.cat(parts, out=capacity[:first])


class BlockCoder:
    """The blocks of a tensor on their way: coded to scratch, a span of them at a time, and gathered from it.

    Its last blocks, too few for a program, are coded from `rest`. `ends[b]`, int64 on the device, says where
    block b begins among all words, for every block up to the end of the last span coded.
    """

    def __init__(
        self, bits: torch.Tensor, rest: torch.Tensor | None, fmt: FloatFormat, coding: EncoderTable,
        index: torch.Tensor, warps: int, scratch: int | None
    ) -> None:  # fmt: skip
        device, self._numel = bits.device, bits.numel()
        self.index, self._bits, self._fmt, self._coding = index, bits, fmt, coding
        self._warps, self._blocks = warps, index.numel()
        main = whole_programs(self._numel, warps)
        self._main, whole = main // BLOCK, bits if rest is None else bits[:main]
        self._sources = [part.view(torch.int64) for part in (whole, rest) if part is not None]
        self._region = HEADER_WORDS + BLOCK // coding.table.group - RAW_STEPS * LANES
        if scratch is None:
            scratch = max(SCRATCH, self._numel * fmt.bits // 8 * 4 // 5)
        # `rest` is no longer than a program, and begins where one would: it is never cut.
        together = max(scratch // (2 * self._region + 4 * NOTES) // warps, 1) * warps
        spans = triton.cdiv(self._blocks, together)
        self._span: int = min(triton.cdiv(triton.cdiv(self._blocks, spans), warps) * warps, self._blocks)
        self.spans = range(0, self._blocks, self._span)
        self._regions = torch.empty(self._span * self._region, dtype=torch.int16, device=device)
        self._notes = torch.empty(self._span * NOTES, dtype=torch.int32, device=device)
        self._counts = torch.empty(2, self._span, dtype=torch.int32, device=device)
        self.ends = torch.zeros(self._blocks + 1, dtype=torch.int64, device=device)

    def code(self, at: int) -> int:
        """Code the span that begins with block `at`; the block with which the next one begins."""
        end = min(at + self._span, self._blocks)
        for first, last, ragged in ((at, min(end, self._main), False), (max(at, self._main), end, True)):
            if first < last:
                self._launch(first, last, at, ragged)
        # The first of these is where the span begins; the others are still lengths.
        self.ends[at : end + 1].cumsum_(0)
        return end

    def _launch(self, first: int, last: int, first_region: int, ragged: bool) -> None:
        fmt, coding, warps = self._fmt, self._coding, 1 if ragged else self._warps
        launch(
            code_kernel, ((last - first) // warps,),
            self._sources[ragged], coding.facts, coding.symbols, self._regions, self._notes, self._counts,
            self.ends, self.index, first_block=first, first_source=self._main if ragged else 0,
            first_region=first_region, numel=self._numel, span=self._span,
            BITS=fmt.bits, EXPONENT=fmt.exponent_bits, MANTISSA=fmt.mantissa_bits,
            GROUP=coding.table.group, RAGGED=ragged, ADDENDS=coding.addends, WARPS=warps,
            REGION=self._region, NOTES=NOTES, LANES=LANES, RUN=RUN, RUNS=RUNS, LOWER=LOWER,
            HEADER=HEADER_WORDS, ROW=ROW, num_warps=warps, device=self.index.device,
        )  # fmt: skip

    def gather(self, at: int, words: torch.Tensor, first_word: int = 0) -> None:
        """Bring the span coded last to `words`, which begin with word `first_word` of all. What has no room
        there is left out."""
        fmt = self._fmt
        launch(
            _gather_kernel, (min(self._span, self._blocks - at),),
            self._bits, self._regions, self._notes, self._counts, self.ends, words,
            first_block=at, first_word=first_word, capacity=words.numel(), span=self._span,
            EXPONENT=fmt.exponent_bits, MANTISSA=fmt.mantissa_bits, BLOCK=BLOCK, REGION=self._region,
            NOTES=NOTES, RUN=RUN, TILE=1024, num_warps=2, device=self.index.device,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_block", "first_word", "capacity", "span"])
def _gather_kernel(
    bits_ptr, regions_ptr, notes_ptr, counts_ptr, ends_ptr, words_ptr,
    first_block, first_word, capacity, span,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr, REGION: tl.constexpr,
    NOTES: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Put a block's words in their place, and its escapes behind them, as far as there is room."""
    pid = tl.program_id(0).to(tl.int64)
    coded = tl.load(counts_ptr + pid)
    n_notes = tl.load(counts_ptr + span + pid)
    start = tl.load(ends_ptr + first_block + pid) - first_word
    # A block has less than 2^16 words.
    left = tl.maximum(tl.minimum(capacity - start, 1 << 16), 0).to(tl.int32)
    words_ptr += start
    region_ptr = regions_ptr + (pid + 1) * REGION - coded
    for at in range(0, coded, TILE):
        offs = at + tl.arange(0, TILE)
        mask = offs < tl.minimum(coded, left)
        tl.store(words_ptr + offs, tl.load(region_ptr + offs, mask=mask), mask=mask)

    words_ptr += coded
    notes_ptr += (pid + 1) * NOTES - n_notes
    bits_ptr += (first_block + pid) * BLOCK
    offs_in_run = tl.arange(0, RUN)[None, :]
    done = 0
    for at in range(0, n_notes, 32):
        offs_n = at + tl.arange(0, 32)
        note = tl.load(notes_ptr + offs_n, mask=offs_n < n_notes, other=0)
        chosen = tl.reshape((note[:, None] >> offs_in_run) & 1, [32 * RUN])
        position = tl.reshape((note[:, None] >> 8) * RUN + offs_in_run, [32 * RUN])
        rank = done + tl.cumsum(chosen, 0) - chosen
        exponent = tl.load(bits_ptr + position, mask=chosen != 0, other=0) >> MANTISSA & ((1 << EXPONENT) - 1)
        has_room = (chosen != 0) & (coded + 2 * rank + 1 < left)
        tl.store(words_ptr + 2 * rank, position.to(tl.int16), mask=has_room)
        tl.store(words_ptr + 2 * rank + 1, exponent.to(tl.int16), mask=has_room)
        done += tl.sum(chosen)
