"""The decoder on a GPU, in Triton: exponents decoded and merged with sign and mantissa in one pass.

A warp decodes a block, a thread a lane. In each step every thread looks up its symbol in a table of 4,096
entries, and those whose state has become small take the next words of the block: their ranks come from a
ballot. Eight weights later the thread has 16 bytes of bf16 to store.

A step waits for two loads, one after the other, so both must be found in the first-level cache, and nothing
else may wait: the words of the next run are touched a run ahead, the planes are loaded two runs ahead.
Full blocks of bf16 of which nothing was dropped go another way: see stream.py.

Tensors of one kind (format, mantissa bits, group, block size) share a launch, however many they are. Their
last blocks, if shorter than the others, have a launch of their own, in which every store is masked. Parts
that lie in memory with all that is known of them share one as well, and need nothing but their addresses.

Nothing is read or written outside the tensors given: words are masked by the end of their block and of their
tensor, planes by the number of weights. A block whose words do not add up is reported, not believed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton.language as tl

from neuzip.kernels.device.first_use import check_first_use
from neuzip.kernels.device.launch import is_compiled, launch
from neuzip.kernels.rans.coded import (
    ALIGNMENT,
    COLUMN_FACTORS,
    CROSSING_ROWS,
    PATTERNS,
    TOGETHER,
    ChosenLaunch,
    CodedPart,
    CodedTensor,
    Kind,
)
from neuzip.kernels.rans.coded_sample import coded_weights
from neuzip.kernels.rans.numbers import BLOCK, LANES, RUNS
from neuzip.kernels.rans.triton import stream as triton_stream
from neuzip.kernels.rans.triton import stream_codes as triton_stream_codes
from neuzip.kernels.rans.triton.decode_arrays import (
    DecodeArrays,
    compile_arrays,
    compile_programs,
    extents_of,
    make_arrays,
    make_programs,
    update_extents,
)
from neuzip.kernels.rans.triton.decode_kernel import decode_blocks, decode_chosen_kernel, decode_parts_kernel
from neuzip.kernels.rans.triton.lists import MOST
from neuzip.kernels.tuning import launch_for

_ELEMENTS = {8: tl.uint8, 16: tl.uint16, 32: tl.uint32, 64: tl.uint64}

OPERATION, OPERATION_ON_GRID = "decoding rANS codes", "decoding quantized weights"
"""What is checked at its first use on a device: for floats, and for weights on a grid."""

FIRST = 8
"""Tensors that are launched before the host looks at others; then twice as many each time, at most MOST.
While the GPU decodes some, the host prepares the next."""


def decode(tensors: Sequence[CodedTensor], outs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Decode all `tensors` into `outs`. Those of a kind share launches.

    `outs[i]` is contiguous, with elements of as many bits as the format has, as many as there are weights.
    Returns int32 `[len(tensors)]` on the device: not 0 for a tensor whose words are corrupt, of which any
    weight may be wrong then. Whoever waits for the device should call `coded.raise_if_corrupt`. Raises
    ValueError for an output that does not fit its tensor; others may have been written by then.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int32)
    errors = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].words.device)
    for part, inp, out in _launches(tensors, outs, errors, None):
        part.start(inp, out, errors)
    return errors


def streams(kind: Kind) -> bool:
    """Whether full blocks are decoded as stream.py does: bf16, nothing dropped, coded in pairs."""
    fmt, mantissa_bits, group, block_size, grid = kind
    return (fmt.bits, fmt.mantissa_bits, mantissa_bits, group, block_size, grid) == (16, 7, 7, 2, 0, 0)


def streams_codes(kind: Kind) -> bool:
    """Whether full blocks are decoded as stream_codes.py does: on a grid, but for rows that end anywhere."""
    return bool(kind.grid) and not kind.grid & CROSSING_ROWS


@dataclass(frozen=True)
class DecodeLaunch:
    """All blocks of tensors of one kind: either the full ones, or the ragged last ones.

    The arrays are on the device and hold no addresses, only positions after those that `start` is given.
    `programs` is [grid, 3]: row of the descriptor, first block, its number among those of all tensors.
    """

    kind: Kind
    ragged: bool
    warps: int
    arrays: DecodeArrays
    programs: torch.Tensor

    def start(self, inp: torch.Tensor, out: torch.Tensor, errors: torch.Tensor) -> None:
        """Decode what lies around `inp` to where `out` begins. Marks corrupt tensors in `errors`."""
        own = self.arrays
        launch(
            decode_blocks, (self.programs.shape[0],),
            inp, out, own.starts, own.counts, own.descriptors, self.programs, own.tables, own.exponents,
            errors, **_options(self.kind, self.ragged, self.warps), device=inp.device,
        )  # fmt: skip


def compile_decoder(kind: Kind, blocks: int, ragged: bool) -> None:
    """Compile what `decode` launches for tensors of a kind on the current GPU.

    They have so many full blocks together; `ragged` says whether some end with a shorter one.
    """
    with torch.device("meta"):
        memory, errors = torch.empty(ALIGNMENT, dtype=torch.uint8), torch.empty(1, dtype=torch.int32)
    arrays = compile_arrays(kind, _has_places(kind))
    full = [(False, warps_of(kind, blocks, memory.device))] if blocks else []
    for is_ragged, warps in [*full, *([(True, 1)] if ragged else [])]:
        programs = compile_programs(arrays, warps, is_ragged)
        DecodeLaunch(kind, is_ragged, warps, arrays, programs).start(memory, memory, errors)


def _has_places(kind: Kind) -> bool:
    """Whether slots of the table hold two places in a palette."""
    return streams(kind) or (bool(kind.grid) and kind.group == 2)


@functools.cache
def _options(kind: Kind, ragged: bool, warps: int) -> dict[str, Any]:
    """What the kernels are compiled for. Programs with the warps of stream.py decode as that does."""
    fmt, mantissa_bits, group, block_size, grid = kind
    stream = _is_streamed(kind) and not ragged and warps == triton_stream.WARPS
    compiled = is_compiled(decode_blocks)
    return {
        "L": LANES * warps, "RAGGED": ragged, "GROUP": group, "BITS": fmt.bits, "E": fmt.exponent_bits,
        "M": fmt.mantissa_bits, "KEPT": mantissa_bits, "NORM": block_size, "ELEMENT": _ELEMENTS[fmt.bits],
        "SPLIT": streams(kind), "STREAM": stream, "GRID": grid, "COMPILED": compiled,
        "num_warps": warps, **({"maxnreg": _registers(kind)} if stream and compiled else {}),
    }  # fmt: skip


def _is_streamed(kind: Kind) -> bool:
    """Whether words of full blocks come by way of shared memory."""
    return streams(kind) or streams_codes(kind)


def _registers(kind: Kind) -> int:
    """Registers of a thread, at most, where words come by way of shared memory."""
    if not kind.grid:
        return triton_stream.REGISTERS
    columns = kind.grid & COLUMN_FACTORS
    return triton_stream_codes.COLUMN_REGISTERS if columns else triton_stream_codes.REGISTERS


@functools.lru_cache(maxsize=4096)
def warps_of(kind: Kind, blocks: int, device: torch.device, aligned: bool = True) -> int:
    """Warps of a program for so many full blocks; `aligned`: words begin at multiples of 16 bytes.

    Few blocks get one warp a program, with more registers; many get four, which fills the card. What is
    streamed has other programs: see stream.py.
    """
    if _is_streamed(kind) and aligned:
        return triton_stream.WARPS
    return int(launch_for("rans.decode", device, blocks=blocks)["num_warps"])


def decode_parts(parts: Sequence[CodedPart], outs: Sequence[torch.Tensor], warps: int | None = None) -> None:
    """Decode parts to where outputs, uint8, begin: up to TOGETHER of a kind in a launch, and in one more.

    The latter is for ragged blocks. Corrupt tensors are marked where they lie. `warps` a program are chosen
    by their size if not given. Raises ValueError for outputs that begin at no multiple of 16 bytes.
    """
    if any(out.data_ptr() % ALIGNMENT for out in outs):
        raise ValueError(f"out is not aligned to {ALIGNMENT} bytes")
    kinds: dict[tuple[Kind, bool], list[tuple[torch.Tensor, torch.Tensor, int]]] = {}
    for part, out in zip(parts, outs, strict=True):
        for ragged, blocks in (False, part.full), (True, int(part.ragged)):
            if blocks:
                kinds.setdefault((part.kind, ragged), []).append((part.row, out, blocks))
    for (kind, ragged), blocks_of_kind in kinds.items():
        for start in range(0, len(blocks_of_kind), TOGETHER):
            _start(kind, ragged, blocks_of_kind[start : start + TOGETHER], warps)


def _start(
    kind: Kind, ragged: bool, parts: Sequence[tuple[torch.Tensor, torch.Tensor, int]], warps: int | None
) -> None:
    if ragged:
        warps = 1
    elif warps is None:
        warps = warps_of(kind, sum(blocks for _, _, blocks in parts), parts[0][0].device)
    *firsts, programs = accumulate(-(-blocks // warps) for _, _, blocks in parts)
    none = TOGETHER - len(parts)
    rows, outs = [row for row, _, _ in parts], [out for _, out, _ in parts]
    launch(
        decode_parts_kernel, (programs,),
        *rows, *rows[:1] * none, *outs, *outs[:1] * none, *firsts, *[programs] * none,
        **_options(kind, ragged, warps), device=rows[0].device,
    )  # fmt: skip


def decode_chosen(
    launches: Sequence[ChosenLaunch], chosen: torch.Tensor, first: int, out: torch.Tensor, slot_bytes: int
) -> None:
    """Decode the items that `chosen`, int32, lists from `first` on: one to each slot of `out`, uint8.

    Slots of `slot_bytes` lie back to back. Those of numbers that name no item keep what they hold. Nothing
    waits for the device. Corrupt tensors are marked where they lie. Raises ValueError for outputs and slots
    that begin at no multiple of 16 bytes.
    """
    if out.data_ptr() % ALIGNMENT or slot_bytes % ALIGNMENT:
        raise ValueError(f"slots are not aligned to {ALIGNMENT} bytes")
    slots = min(out.numel() // slot_bytes, chosen.numel() - first)
    for one in launches:
        programs = one.programs.shape[0]
        items, parts, _ = one.rows.shape
        launch(
            decode_chosen_kernel, (slots * programs,),
            one.base, one.rows, one.places, one.programs, chosen, out, first, chosen.numel(),
            items, parts, programs, slot_bytes, **_options(one.kind, one.ragged, one.warps),
            pdl=True, device=out.device,
        )  # fmt: skip


@dataclass(frozen=True)
class DecodePlan:
    """All launches and what they need, on the device: `launch` can be captured in a CUDA graph."""

    launches: list[Started]
    errors: torch.Tensor
    tensors: Sequence[CodedTensor]
    outs: Sequence[torch.Tensor]
    """Kept, as the launches know only where they are."""

    def launch(self) -> None:
        """Decode once more. Marks in `errors` are never taken back."""
        for part, inp, out in self.launches:
            part.start(inp, out, self.errors)

    def into(self, out: torch.Tensor) -> DecodePlan:
        """The plan of one tensor, with another output."""
        (tensor,) = self.tensors
        _check_output(0, tensor, out)
        raw = out.flatten().view(torch.uint8)
        return replace(self, launches=[(part, inp, raw) for part, inp, _ in self.launches], outs=[out])

    def recoded(self, tensor: CodedTensor) -> DecodePlan:
        """The plan of one tensor after that was coded anew, by the same table and in the same memory.

        Its words may be another number. An index that does not add up to it is marked in `errors`. The plan
        from before shares all arrays, and is of no use afterwards.
        """
        (before,) = self.tensors
        if _memory_of(tensor) != _memory_of(before) or tensor.table is not before.table:
            raise ValueError("a tensor coded anew has another table, or lies elsewhere")
        if self.launches:
            first, inp, _ = self.launches[0]  # the ragged launch has the same arrays
            update_extents(first.arrays, tensor, inp, self.errors)
        return replace(self, tensors=[tensor])


def _memory_of(tensor: CodedTensor) -> tuple[Any, ...]:
    """What a plan knows of a tensor beside its words."""
    arrays = [tensor.index, tensor.words, *tensor.planes.values()]
    if tensor.grid is not None:
        factors = (tensor.grid.grid.rows, tensor.grid.grid.columns)
        arrays += [array for array in factors if array is not None]
    return tensor.kind, tensor.numel, [array.data_ptr() for array in arrays]


def _check_output(number: int, tensor: CodedTensor, out: torch.Tensor) -> None:
    """Raise ValueError where `tensor` cannot be decoded to `out`."""
    if not out.is_contiguous() or out.element_size() * 8 != tensor.fmt.bits or out.numel() != tensor.numel:
        raise ValueError(f"tensor {number} does not fit its output")
    if out.data_ptr() % ALIGNMENT or out.device != tensor.words.device:
        raise ValueError(f"output {number} is not aligned to {ALIGNMENT} bytes, or on another device")


def prepare(
    tensors: Sequence[CodedTensor],
    outs: Sequence[torch.Tensor],
    warps: int | None = None,
    errors: torch.Tensor | None = None,
) -> DecodePlan:
    """Lay out the launches for `tensors`. `warps` a program are chosen by their size if not given.

    `errors`, int32 [len(tensors)], is new if not given. The first call in a process checks the device, and
    raises WrongResults.
    """
    if not tensors:
        return DecodePlan([], torch.zeros(0, dtype=torch.int32), [], [])
    device = tensors[0].words.device
    if errors is None:
        errors = torch.zeros(len(tensors), dtype=torch.int32, device=device)
    if errors.shape != (len(tensors),) or errors.dtype != torch.int32 or errors.device != device:
        raise ValueError(f"errors are int32, one a tensor, where the tensors are: not {tuple(errors.shape)}")
    launches = [*_launches(tensors, outs, errors, warps)]
    return DecodePlan(launches, errors, list(tensors), list(outs))


Started = tuple[DecodeLaunch, torch.Tensor, torch.Tensor]
"""A launch, and what its inputs and outputs are counted from."""


def _launches(
    tensors: Sequence[CodedTensor],
    outs: Sequence[torch.Tensor],
    errors: torch.Tensor,
    warps: int | None,
) -> Iterator[Started]:
    """The launches for tensors, one by one: a caller may start each while the host prepares the next."""
    first, count = 0, FIRST
    while first < len(tensors):
        last = min(first + count, len(tensors))
        for together in _kinds(tensors, outs, warps, range(first, last)).values():
            base = tensors[together[0]]
            inp = next(iter(base.planes.values()), base.words.view(torch.uint8))
            out = outs[together[0]].flatten().view(torch.uint8)
            offsets = [outs[i].data_ptr() - out.data_ptr() for i in together]
            parts = [tensors[i] for i in together]
            for part in make_launches(parts, inp, offsets, together, errors, warps):
                yield part, inp, out
        first, count = last, min(2 * count, MOST)


def _kinds(
    tensors: Sequence[CodedTensor], outs: Sequence[torch.Tensor], warps: int | None, numbers: Sequence[int]
) -> dict[Kind, list[int]]:
    """The numbers of the tensors of each kind, among these, that have weights.

    Raises ValueError, and WrongResults.
    """
    device = tensors[0].words.device
    kinds: dict[Kind, list[int]] = {}
    for number in numbers:
        tensor = tensors[number]
        _check_output(number, tensor, outs[number])
        if tensor.words.device != device:
            raise ValueError(f"tensor {number} is on another device than the first")
        if tensor.numel:
            kinds.setdefault(tensor.kind, []).append(number)
    for kind, own in kinds.items():
        if not kind.block_size:  # weights that share a scale have no sample
            full = sum(tensors[i].numel // BLOCK for i in own)
            check = functools.partial(decodes_sample, kind, full, device, warps)
            check_first_use(OPERATION_ON_GRID if kind.grid else OPERATION, device, check)
    return kinds


def decodes_sample(kind: Kind, full: int, device: torch.device, warps: int | None = None) -> bool:
    """Whether a sample of a kind is decoded to its patterns, by the kernel for so many full blocks.

    Without full blocks it is the kernel for ragged ones. The host waits for the device.
    """
    tensor, bits = coded_weights(kind, RUNS if full else RUNS // 16, device)
    out = torch.empty(bits.size, dtype=PATTERNS[kind.fmt.bits], device=device)
    plan = prepare([tensor], [out], (warps or warps_of(kind, full, device)) if full else None)
    plan.launch()
    right = np.array_equal(out.cpu().numpy().view(bits.dtype), bits)
    return right and not plan.errors.any().item()


def make_launches(
    tensors: Sequence[CodedTensor],
    inp: torch.Tensor,
    out_offsets: Sequence[int],
    numbers: Sequence[int],
    errors: torch.Tensor,
    warps: int | None = None,
) -> list[DecodeLaunch]:
    """The launches for at most `lists.MOST` tensors of one kind: the full blocks, and the ragged ones.

    Output `i` begins `out_offsets[i]` bytes after the one that the launch will be given, and `numbers[i]` is
    where it is marked in `errors`. Tensors whose index does not add up to their words are marked at once.
    """
    kind = tensors[0].kind
    words_at, _, _, blocks, full = extents_of(tensors).T
    aligned = not (words_at % ALIGNMENT).any()
    warps = warps or warps_of(kind, int(full.sum()), inp.device, aligned)
    if warps == triton_stream.WARPS and _is_streamed(kind) and not aligned:
        raise ValueError(f"{warps} warps a program take words that begin at multiples of {ALIGNMENT} bytes")
    shares = np.stack([-(-full // warps), blocks - full])
    arrays = make_arrays(kind, tensors, inp, out_offsets, numbers, errors, _has_places(kind), shares)
    return [
        DecodeLaunch(kind, ragged, width, arrays, make_programs(arrays, width, ragged, programs))
        for ragged, width, programs in zip((False, True), (warps, 1), shares.sum(1).tolist(), strict=True)
        if programs
    ]
