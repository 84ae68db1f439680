"""Sparse deltas of lists of tensors in torch: numba's loops on a CPU, Triton's kernels on a GPU.

Tensors are contiguous and on one device. A digest is an int64 without dimensions on that device, modulo 2^64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from neuzip.kernels.device.first_use import check_first_use
from neuzip.kernels.sparse_delta import first_use
from neuzip.kernels.sparse_delta.blocks import BlockMap, CodedDelta, patterns, word_starts
from neuzip.kernels.sparse_delta.numbers import BLOCK, COUNT_BITS

Tensors = Sequence[torch.Tensor]

INTERPRET = False
"""Whether tensors on a CPU go to Triton's interpreter: for tests."""


@dataclass(frozen=True)
class CheckedDelta:
    """What `check` finds out of a coded difference, on the device.

    change   what the digest of the weights gains when the difference is applied
    broken   not 0 where some block breaks a rule, and the difference must not be applied
    starts   the first word of each block, see `word_starts`
    """

    change: torch.Tensor
    broken: torch.Tensor
    starts: torch.Tensor


def digest(tensors: Tensors, blocks: BlockMap) -> torch.Tensor:
    """The digest of the weights of tensors: reads all of them. Raises WrongResults at its first use."""
    _check_applying(blocks, _device(tensors))
    if (triton := _triton(tensors)) is not None:
        return triton.digest(tensors, blocks)  # type: ignore[no-any-return]
    cpu = _cpu()
    jobs = [
        (_numpy(t)[at : at + _PIECE], int(first) * BLOCK + at)
        for t, first in zip(tensors, blocks.firsts, strict=False)
        for at in range(0, t.numel(), _PIECE)
    ]
    return _modulo(sum(_each(cpu.digest, jobs)))


def encode(old: Tensors, new: Tensors, blocks: BlockMap) -> CodedDelta:
    """Code the difference of tensors: the host waits for a GPU once, to learn how many words there are.

    Raises WrongResults for a GPU whose first results are wrong.
    """
    device = _device(old)
    for bits in _widths(blocks, device):
        is_right = partial(first_use.makes, encode, bits, device)
        check_first_use(f"{first_use.MAKING} of {bits} bits", device, is_right)
    descriptors = torch.empty(blocks.count, dtype=torch.int32, device=device)
    if (triton := _triton(old)) is not None:
        triton.measure(old, new, blocks, descriptors)
        starts = word_starts(descriptors)
        words = torch.zeros(int(starts[-1]), dtype=torch.int32, device=device)
        triton.encode(old, new, blocks, descriptors, starts, words)
        return CodedDelta(descriptors, words)
    cpu, rows = _cpu(), descriptors.numpy().view(np.uint32)
    pairs = [(_numpy(a), _numpy(b)) for a, b in zip(old, new, strict=True)]
    _each(cpu.measure, [(*pair, rows[own]) for pair, own in zip(pairs, _slices(blocks), strict=True)])
    starts = word_starts(descriptors)
    words = torch.zeros(int(starts[-1]), dtype=torch.int32)
    whole, begin = words.numpy().view(np.uint32), starts.numpy()
    _each(
        cpu.encode,
        [(*pair, rows[own], begin[own], whole) for pair, own in zip(pairs, _slices(blocks), strict=True)],
    )
    return CodedDelta(descriptors, words)


def check(weights: Tensors, blocks: BlockMap, coded: CodedDelta) -> CheckedDelta:
    """Decode a difference and look at every rule of the format, without writing a weight.

    Raises WrongResults for a GPU whose first results are wrong.
    """
    _check_applying(blocks, _device(weights))
    starts = word_starts(coded.descriptors)
    if (triton := _triton(weights)) is not None:
        change, broken = triton.check(weights, blocks, coded, starts)
        return CheckedDelta(change, broken | (starts[-1] != coded.words.numel()), starts)
    if int(starts[-1]) != coded.words.numel():
        return CheckedDelta(_modulo(0), torch.ones((), dtype=torch.bool), starts)
    cpu, jobs = _cpu(), []
    for t, first, own in zip(weights, blocks.firsts, _slices(blocks), strict=False):
        jobs.append((_numpy(t), int(first), *_own(coded, starts, own)))
    results = _each(cpu.check, jobs)
    broken = torch.tensor(any(block >= 0 for _, block in results))
    return CheckedDelta(_modulo(sum(int(change) for change, _ in results)), broken, starts)


def apply(weights: Tensors, blocks: BlockMap, coded: CodedDelta, checked: CheckedDelta) -> None:
    """Add a difference to weights in place. `check` must have passed for the same weights and words."""
    if (triton := _triton(weights)) is not None:
        triton.apply(weights, blocks, coded, checked.starts)
        return
    own = [_own(coded, checked.starts, blocks_of) for blocks_of in _slices(blocks)]
    _each(_cpu().apply, [(_numpy(t), *parts) for t, parts in zip(weights, own, strict=True)])


def changed(blocks: BlockMap, coded: CodedDelta, checked: CheckedDelta) -> list[torch.Tensor]:
    """Which weights a difference changes: for each tensor their numbers, int64, rising."""
    counts = (coded.descriptors & ((1 << COUNT_BITS) - 1)).to(torch.int64)
    totals = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    ends = totals[torch.from_numpy(blocks.firsts).to(totals.device)].tolist()
    numbers = torch.empty(ends[-1], dtype=torch.int64, device=counts.device)
    parts = [numbers[a:b] for a, b in pairwise(ends)]
    if (triton := _triton([coded.words])) is not None:
        triton.changed(blocks, coded, checked.starts, totals, numbers)
        return parts
    jobs = []
    for numel, size, own, part in zip(blocks.numels, blocks.itemsizes, _slices(blocks), parts, strict=True):
        jobs.append((numel, 8 * size, *_own(coded, checked.starts, own), part.numpy()))
    _each(_cpu().changed, jobs)
    return parts


def check_and_apply(weights: Tensors, blocks: BlockMap, coded: CodedDelta) -> torch.Tensor:
    """Check a difference that is right, and apply it: what the digest of the weights gains."""
    checked = check(weights, blocks, coded)
    apply(weights, blocks, coded, checked)
    return checked.change


def _check_applying(blocks: BlockMap, device: torch.device) -> None:
    """Have a GPU digest, check and apply a sample, at the first use for weights of as many bits."""
    for bits in _widths(blocks, device):
        is_right = partial(first_use.applies, check_and_apply, digest, bits, device)
        check_first_use(f"{first_use.APPLYING} of {bits} bits", device, is_right)


def _widths(blocks: BlockMap, device: torch.device) -> list[int]:
    """The bits of the weights that kernels take."""
    if device.type == "cpu" and not INTERPRET:
        return []
    return sorted({8 * s for s, n in zip(blocks.itemsizes, blocks.numels, strict=True) if n})


_PIECE = 1 << 22
"""Weights that a thread digests at a time: whole blocks."""


def _device(tensors: Tensors) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def _triton(tensors: Tensors) -> ModuleType | None:
    """The kernels, if they are what takes such tensors."""
    if _device(tensors).type == "cpu" and not INTERPRET:
        return None
    from neuzip.kernels.sparse_delta.triton import launches

    return launches


def _cpu() -> ModuleType:
    from neuzip.kernels.sparse_delta import cpu

    return cpu


def _numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return patterns(tensor).numpy().view(f"u{tensor.element_size()}")


def _slices(blocks: BlockMap) -> list[slice]:
    """The blocks of each tensor."""
    return [slice(int(a), int(b)) for a, b in zip(blocks.firsts[:-1], blocks.firsts[1:], strict=True)]


def _own(coded: CodedDelta, starts: torch.Tensor, own: slice) -> tuple[npt.NDArray[Any], ...]:
    """Descriptors and starts of the blocks of a tensor, and all words."""
    descriptors, words = (x.numpy().view(np.uint32) for x in (coded.descriptors, coded.words))
    return descriptors[own], starts.numpy()[own.start : own.stop + 1], words


def _each(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a loop for every job, on as many threads as torch uses."""
    if len(jobs) < 2 or torch.get_num_threads() < 2:
        return [function(*job) for job in jobs]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(lambda job: function(*job), jobs))


def _modulo(total: int) -> torch.Tensor:
    """A sum modulo 2^64, as the signed number of these bits."""
    unsigned = int(total) % (1 << 64)
    return torch.tensor(unsigned - (1 << 64) if unsigned >> 63 else unsigned)
