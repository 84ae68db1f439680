"""Launch parameters of the Triton kernels: a class for each kernel, filled from a table of measured launches.

The tables are `kernels/tuning/sm*/ternary_linear.toml`, whose head explains the variables of their
conditions. What follows from a shape without a measurement is computed here: there are never more warps than
K blocks, and the words, codes and sums of a program for one token fit into shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from neuzip.kernels.device.properties import multiprocessors
from neuzip.kernels.ternary_linear.triton import one_token_bmma, smem_ring
from neuzip.kernels.tuning import launch_for

FUSED_STEPS = 8
"""Most steps of a thread with which a product quantises its token itself: it keeps 8 activations a step."""

STATIC_BYTES = 48 << 10
"""Bytes of shared memory that a program may declare in PTX. More has to be requested from the driver."""

CODE_BYTES = 14 << 10
"""Most bytes of shared memory for the codes of a token, so that enough is left for words in flight."""


@dataclass(frozen=True)
class OneTokenLaunch:
    """Launch parameters of a product, or of a gated unit, for one token."""

    warps: int  # that share the columns of a tile
    tiles: int  # of 16 rows, for each program; a gated unit counts those of both weights if it reads all rows
    stages: int = 2  # steps of a program whose words are in flight, at most
    prologue: int = 0  # steps whose words move to registers before the token is quantised, at most
    registers: int | None = None  # of a thread, at most
    trigger_next_early: bool = True  # the next kernel may start at once, not when all words were requested
    fused: bool = True  # programs quantise the token themselves, unless that takes too many steps
    quantizer_pdl: bool = False  # if not fused: start before the quantiser's own input is complete
    bits: bool = True  # multiply bit by bit, on a GPU that can, if the codes fit into shared memory
    skips_closed_rows: bool = True  # a gated unit does not read rows of `up` whose gate is closed


@dataclass(frozen=True)
class FewTokensLaunch:
    """Launch parameters of a product for 2 to 64 tokens."""

    warps: int  # that share the columns of a tile
    tiles: int  # of 16 rows that a warp multiplies at once
    stages: int = 2  # steps of a warp whose words are in flight
    accumulator_sets: int = 2  # of int32 sums: with 2 of them, half of the words need no shift
    int4x2: bool = True  # codes of INT4 come two in a byte
    quantizer_pdl: bool = False  # start before the quantiser's own input is complete
    trigger_next_early: bool = True  # the next kernel may start at once, not when all words were loaded


@dataclass(frozen=True)
class ManyTokensLaunch:
    """Launch parameters of a product of int8 matrices for more than 64 tokens."""

    rows: int  # tokens of a program's tile
    columns: int  # of y, in a program's tile
    step: int  # columns of x in an iteration
    warps: int
    stages: int
    band: int = 8  # tiles below each other that are multiplied together, for the L2 cache
    programs: int = 1  # for each multiprocessor


def one_token_launch(tiles: int, k_blocks: int, device: torch.device, int4: bool) -> OneTokenLaunch:
    """The measured launch of a product for one token. int4: the activations are INT4."""
    entry = launch_for("ternary_linear.one_token", device, **_shape(tiles, k_blocks, device), int4=int4)
    return OneTokenLaunch(**{**entry, "warps": _warps(entry["warps"], k_blocks)})


def relu2_glu_launch(tiles: int, k_blocks: int, device: torch.device, same_scales: bool) -> OneTokenLaunch:
    """The measured launch of a gated unit. same_scales: both weights have one scale, or both one a row."""
    shape = _shape(tiles, k_blocks, device)
    entry = launch_for("ternary_linear.relu2_glu", device, **shape, same_scales=same_scales)
    return OneTokenLaunch(**{**entry, "warps": _warps(entry["warps"], k_blocks)})


def few_tokens_launch(
    tiles: int, k_blocks: int, token_blocks: int, device: torch.device, int4: bool
) -> FewTokensLaunch:
    """The measured launch of a product for `token_blocks` blocks of 8 tokens. int4: of INT4 activations."""
    shape = _shape(tiles, k_blocks, device)
    entry = launch_for("ternary_linear.few_tokens", device, **shape, token_blocks=token_blocks, int4=int4)
    warps = min(entry["warps"], 1 << (k_blocks.bit_length() - 1))
    return FewTokensLaunch(**{**entry, "warps": warps})


def many_tokens_launch(tokens: int, device: torch.device) -> ManyTokensLaunch:
    """The measured launch of a product for many tokens."""
    return ManyTokensLaunch(**launch_for("ternary_linear.many_tokens", device, tokens=tokens))


def _shape(tiles: int, k_blocks: int, device: torch.device) -> dict[str, int | float]:
    """Weights as the conditions of the tables describe them."""
    processors = multiprocessors(device)
    return {
        "k_blocks": k_blocks,
        "k_blocks_mod_4": k_blocks % 4,
        "tiles_per_sm": tiles / processors,
        "kib_per_sm": tiles * k_blocks / processors,
    }


def _warps(most: int, k_blocks: int) -> int:
    """No more warps than there are K blocks, rounded up to a power of two."""
    return int(min(most, triton.next_power_of_2(k_blocks)))


def stages_and_prologue(launch: OneTokenLaunch, k_blocks: int, code_nbytes: int) -> tuple[int, int]:
    """Steps of a program for one token whose words are in flight, and steps of its prologue.

    Both are what the launch wants, limited by the steps that there are and by shared memory, of which codes
    take `code_nbytes`.
    """
    steps = launch.tiles * triton.cdiv(k_blocks, launch.warps)
    free = STATIC_BYTES - shared_bytes(launch, 0, code_nbytes)
    stages = min(launch.stages, steps, max(1, free // (smem_ring.STAGE_BYTES * launch.warps)))
    return stages, min(launch.prologue, steps - stages)


def shared_bytes(launch: OneTokenLaunch, stages: int, code_nbytes: int) -> int:
    """Bytes of shared memory of a program for one token: ring of words, codes, sums of its warps."""
    return code_nbytes + launch.warps * (smem_ring.STAGE_BYTES * stages + 64 * launch.tiles + 32)


def code_bytes(launch: OneTokenLaunch, k_blocks: int, activation: str) -> int:
    """Bytes of shared memory for the codes of a token: 0 if they stay in registers, for products by bytes."""
    steps = triton.cdiv(k_blocks, launch.warps)
    nbytes = one_token_bmma.nbytes(launch.warps, steps, activation == "int4")
    return nbytes if launch.bits and steps <= FUSED_STEPS and nbytes <= CODE_BYTES else 0


def check_shared(launch: OneTokenLaunch | FewTokensLaunch, nbytes: int) -> None:
    """Raise ValueError for more bytes of shared memory than a program can have."""
    if nbytes > STATIC_BYTES:
        raise ValueError(f"{launch} takes {nbytes} bytes of shared memory; {STATIC_BYTES} are possible")
