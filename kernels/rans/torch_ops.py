"""The GPU decoder as an operator of torch, `neuzip::decode`: a node for torch.compile and CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from neuzip.kernels.float_fields import FORMATS

from .triton_decode import ALIGNMENT, PATTERNS, CodedTensor, Launch, make_launches, raise_if_corrupt

_ARRAYS = ("descriptors", "starts", "counts", "tables", "exponents", "programs")


# Written out, as torch 2.6 does not understand `list[...]`.
_SCHEMA = (
    "(Tensor streams, Tensor[] arrays, SymInt numel, str fmt, SymInt kept, SymInt group, SymInt block_size, "
    "SymInt[] shapes) -> (Tensor, Tensor)"
)


@torch.library.custom_op("neuzip::decode", mutates_args=(), schema=_SCHEMA)
def decode(
    streams: torch.Tensor,
    arrays: list[torch.Tensor],
    numel: int,
    fmt: str,
    kept: int,
    group: int,
    block_size: int,
    shapes: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one tensor: its bit patterns as integers, and int32 `[1]`, not 0 if its words are corrupt.

    The arguments are those of a `ResidentTensor`, which is the way to call it.
    """
    out = torch.empty(numel, dtype=PATTERNS[FORMATS[fmt].bits], device=streams.device)
    errors = torch.zeros(1, dtype=torch.int32, device=streams.device)
    for i in range(len(shapes) // 2):
        launch = Launch(
            (FORMATS[fmt], kept, group, block_size), bool(shapes[2 * i]), shapes[2 * i + 1],
            *arrays[len(_ARRAYS) * i : len(_ARRAYS) * (i + 1)],
        )  # fmt: skip
        launch.start(streams, out.view(torch.uint8), errors)
    return out, errors


@decode.register_fake
def _(streams, arrays, numel, fmt, kept, group, block_size, shapes):  # type: ignore[no-untyped-def]
    out = torch.empty(numel, dtype=PATTERNS[FORMATS[fmt].bits], device=streams.device)
    return out, torch.empty(1, dtype=torch.int32, device=streams.device)


@dataclass(frozen=True)
class ResidentTensor:
    """A coded tensor that stays on its device, to be decoded again and again: all streams in one buffer."""

    numel: int
    streams: torch.Tensor
    arrays: list[torch.Tensor]
    fmt: str
    kept: int
    group: int
    block_size: int
    shapes: list[int]
    """For each launch: whether it is for the ragged block, and warps a program."""

    @classmethod
    def of(cls, coded: CodedTensor, warps: int | None = None) -> ResidentTensor:
        """Copy the streams of a tensor of at least one weight together. Raises CorruptStream."""
        parts = [coded.index.view(torch.uint8), coded.words.view(torch.uint8), *coded.planes.values()]
        if coded.normaliser is not None:
            parts.append(coded.normaliser)
        ends = torch.tensor([-(-part.numel() // ALIGNMENT) * ALIGNMENT for part in parts]).cumsum(0).tolist()
        streams = torch.zeros(ends[-1], dtype=torch.uint8, device=coded.words.device)
        views = []
        for part, start in zip(parts, [0, *ends], strict=False):
            view = streams[start : start + part.numel()]
            view.copy_(part)
            views.append(view)
        index, words, *planes = views
        moved = replace(
            coded,
            index=index.view(torch.int16),
            words=words.view(torch.int16),
            planes=dict(zip(coded.planes, planes, strict=False)),
            normaliser=None if coded.normaliser is None else planes[-1],
        )
        errors = torch.zeros(1, dtype=torch.int32, device=streams.device)
        launches = make_launches([moved], streams, [0], [0], errors, warps)
        raise_if_corrupt(errors, ["the tensor"])
        fmt, kept, group, block_size = coded.kind
        arrays = [getattr(launch, name) for launch in launches for name in _ARRAYS]
        shapes = [number for launch in launches for number in (int(launch.ragged), launch.warps)]
        return cls(coded.numel, streams, arrays, fmt.name, kept, group, block_size, shapes)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, tables included."""
        return sum(t.numel() * t.element_size() for t in (self.streams, *self.arrays))

    def decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bit patterns, and whether the words are corrupt: see the operator."""
        result: tuple[torch.Tensor, torch.Tensor] = decode(
            self.streams,
            self.arrays,
            self.numel,
            self.fmt,
            self.kept,
            self.group,
            self.block_size,
            self.shapes,
        )
        return result
