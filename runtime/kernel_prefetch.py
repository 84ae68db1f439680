"""Which kernels a model needs on a GPU, from the headers of its checkpoint: compiled while weights are read.

    prefetch_kernels(source, tensors, device, residency)

Shapes and dtypes of tensors and the sizes in config.json say it, before there is a model. What is compiled in
vain, or not at all, costs time only: see `kernels.device.compile_ahead`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neuzip.compress.schemes.codec import FloatCoding, GridCoding
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.errors import NeuzipError
from neuzip.formats.config_section import read_config
from neuzip.formats.records import QuantizedRecord
from neuzip.kernels.dtypes import torch_dtypes_for
from neuzip.kernels.grid_linear.form import WIDTHS
from neuzip.kernels.packed_linear.form import MAX_COLUMNS
from neuzip.kernels.rans.coded import Kind, grid_bits
from neuzip.kernels.rans.numbers import BLOCK
from neuzip.runtime.dtypes import TORCH_DTYPES
from neuzip.runtime.weights.packed import can_be_packed

if TYPE_CHECKING:
    from neuzip.kernels.device.compile_ahead import KernelPrefetch

LOOKED_UP = ("embed", "wte", "wpe")
"""Parts of names of matrices whose rows are looked up; without a tensor of HEADS they are heads, too."""

HEADS = ("lm_head", "embed_out", "output.weight")

EXPERTS = ".experts."
"""A part of the names of tensors of experts, one by one or all together."""


ROWS = (1, 16)
"""Rows of x of a step of one text, and of a prompt of up to 16 tokens."""

_BEGUN: set[tuple[Path, torch.device, str]] = set()
"""For which folders, devices and residencies kernels have been compiled ahead in this process."""


@dataclass(frozen=True)
class MatrixShape:
    """What a product with a weight, or a look-up of its rows, is compiled for."""

    out: int
    columns: int
    dtype: torch.dtype
    low_bits: int
    bias: bool
    multiplied: bool
    looked_up: bool


@dataclass(frozen=True)
class GridShape:
    """What a product with packed codes, or a look-up of rows, is compiled for."""

    out: int
    columns: int
    dtype: torch.dtype
    width: int
    has_columns: bool
    bias: bool
    multiplied: bool
    looked_up: bool


@dataclass(frozen=True)
class StepShape:
    """Sizes of a decoding step, of a config.json."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    width: int
    words: int
    dtype: torch.dtype
    has_rms_norms: bool
    has_silu: bool


@dataclass(frozen=True)
class MixtureShape:
    """Sizes of the mixtures of experts of a model, of its config.json; k experts have a token."""

    experts: int
    k: int
    hidden: int
    inner: int
    dtype: torch.dtype
    low_bits: int
    bias: bool


@dataclass(frozen=True)
class ModelShapes:
    """What decides which kernels a model needs. `decoders`: full blocks of each kind, and any ragged one."""

    decoders: dict[Kind, tuple[int, bool]]
    matrices: frozenset[MatrixShape]
    step: StepShape | None
    mixture: MixtureShape | None = None
    grids: frozenset[GridShape] = frozenset()


def prefetch_kernels(
    source: FolderSource,
    tensors: Sequence[SourceTensor],
    device: torch.device,
    residency: str,
    *,
    rows: Sequence[int] | None = None,
    note: Callable[[str], None] = lambda remark: None,
) -> KernelPrefetch | None:
    """Compile the kernels of a model in other threads, and return at once; None where `device` is no GPU.

    `rows` of x are what products are compiled for: without them those of a step and of a short prompt, unless
    somebody has called this for the same checkpoint before. `note` is given a line if there is something to
    compile.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    key = source.checkpoint.root.resolve(), device, residency
    if rows is None and key in _BEGUN:
        return None
    _BEGUN.add(key)
    from neuzip.kernels.device.compile_ahead import compile_ahead

    launches = launches_on_meta(model_shapes(source, tensors), residency, rows or ROWS)
    return compile_ahead(launches, device, note)


def model_shapes(source: FolderSource, tensors: Sequence[SourceTensor]) -> ModelShapes:
    """The shapes of the tensors of a checkpoint. What is damaged is passed over: who reads it reports it."""
    decoders: dict[Kind, tuple[int, bool]] = {}
    matrices: set[MatrixShape] = set()
    grids: set[GridShape] = set()
    experts: set[tuple[torch.dtype, int]] = set()
    names = {tensor.name for tensor in tensors}
    has_head = any(part in name for name in names for part in HEADS)
    for tensor in tensors:
        try:
            target = source.resolve(tensor)
            coding = source.coding(target)
        except NeuzipError:
            continue
        dtype, numel = TORCH_DTYPES.get(tensor.info.dtype), tensor.info.numel
        unused = 0
        if coding is not None:
            kind = kind_of(coding)
            full, ragged = decoders.get(kind, (0, False))
            decoders[kind] = full + numel // BLOCK, ragged or numel % BLOCK != 0
            unused = coding.fmt.mantissa_bits - coding.mantissa_bits if isinstance(coding, FloatCoding) else 0
        if EXPERTS in tensor.name and dtype in torch_dtypes_for("packed"):
            experts.add((dtype, max(1, 8 - unused)))
        is_matrix = len(tensor.info.shape) == 2 and can_be_packed(*tensor.info.shape)
        if not is_matrix or dtype not in torch_dtypes_for("packed"):
            continue
        looked_up = any(part in tensor.name for part in LOOKED_UP)
        out, columns = tensor.info.shape
        bias = tensor.name.removesuffix("weight") + "bias" in names
        use = bias, not looked_up or not has_head, looked_up
        if isinstance(target.record, QuantizedRecord):
            width, has_columns = _expected_width(source, target), bool(target.record.column_factors)
            grids.add(GridShape(out, columns, dtype, width, has_columns, *use))
        else:
            matrices.add(MatrixShape(out, columns, dtype, max(1, 8 - unused), *use))
    config = _config(source)
    bias = any(EXPERTS in name and name.endswith("bias") for name in names)
    return ModelShapes(
        decoders,
        frozenset(matrices),
        _step_shape(config, [*matrices, *grids]),
        _mixture_shape(config, experts, bias),
        frozenset(grids),
    )


def kind_of(coding: FloatCoding | GridCoding) -> Kind:
    """What the decoder's launches for a tensor are compiled for."""
    if isinstance(coding, GridCoding):
        grid = grid_bits(coding.row_weights, has_columns=bool(coding.columns))
        return Kind(coding.fmt, coding.low_bits, coding.table.group, 0, grid)
    return Kind(coding.fmt, coding.mantissa_bits, coding.table.group, coding.block_size or 0)


def _expected_width(source: FolderSource, tensor: SourceTensor) -> int:
    """The width that the codes of a tensor will probably have in memory, by what they take in the file.

    A width of w bits is best for normally distributed codes of up to about w - 0.2 bits of entropy.
    """
    nbytes = sum(extent.nbytes for extent in source.extents(tensor) if extent.stream in ("words", "low"))
    entropy = 8 * nbytes / max(1, tensor.info.numel)
    return min(max(math.ceil(entropy + 0.2), WIDTHS[0]), WIDTHS[-1])


def _config(source: FolderSource) -> Any:
    """The part of config.json that is about text; {} where it cannot be read."""
    try:
        document: Any = read_config(source.checkpoint.root / "config.json")
    except NeuzipError:
        return {}
    return document.get("text_config", document) if isinstance(document, dict) else {}


def _mixture_shape(config: Any, forms: Iterable[tuple[torch.dtype, int]], bias: bool) -> MixtureShape | None:
    """The sizes of mixtures of experts, whose tensors have these dtypes and low bits; None without any."""
    experts = max(_size(config, name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    k, hidden = _size(config, "num_experts_per_tok"), _size(config, "hidden_size")
    inner = _size(config, "moe_intermediate_size") or _size(config, "intermediate_size")
    if not forms or 0 in (experts, k, hidden, inner) or max(hidden, inner) > MAX_COLUMNS:
        return None
    dtype, low_bits = max(forms, key=lambda form: form[1])
    return MixtureShape(experts, k, hidden, inner, dtype, low_bits, bias)


def _step_shape(config: Any, matrices: Iterable[MatrixShape | GridShape]) -> StepShape | None:
    """The sizes of a step; None where config.json does not say them all."""
    dtypes = {matrix.dtype for matrix in matrices}
    names = "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"
    sizes = [_size(config, name) for name in names]
    if len(dtypes) != 1 or 0 in sizes:
        return None
    hidden, inner, heads, words = sizes
    kv_heads = _size(config, "num_key_value_heads") or heads
    width = _size(config, "head_dim") or max(1, hidden // heads)
    norms = any("rms_norm" in name for name in config)
    silu = config.get("hidden_act") in ("silu", "swish")
    return StepShape(hidden, inner, heads, kv_heads, width, words, dtypes.pop(), norms, silu)


def _size(config: Any, name: str) -> int:
    """A size of a config.json; 0 where there is none, or something else."""
    size = config.get(name) if isinstance(config, dict) else None
    return size if type(size) is int and size > 0 else 0


def launches_on_meta(shapes: ModelShapes, residency: str, rows: Sequence[int]) -> list[Callable[[], object]]:
    """What loading a model and decoding launch, on the meta device, in the order of its needs."""
    from neuzip.kernels.rans.triton.decode import compile_decoder

    launches: list[Callable[[], object]] = [
        partial(compile_decoder, kind, blocks, ragged) for kind, (blocks, ragged) in shapes.decoders.items()
    ]
    if residency != "dense":
        launches += _packed_launches(shapes.matrices, residency, rows)
    if residency == "packed":
        launches += _grid_launches(shapes.grids, rows)
    if residency == "packed" and shapes.mixture is not None:
        launches += [partial(_launch_mixture, shapes.mixture, count) for count in rows]
    if residency == "ans":
        launches.append(partial(_launch_parts, shapes.decoders))
    if shapes.step is not None:
        launches.append(partial(_launch_step, shapes.step))
    return launches


def _packed_launches(
    matrices: Iterable[MatrixShape], residency: str, rows: Sequence[int]
) -> Iterator[Callable[[], object]]:
    """Packing, look-ups and products; of `ans` only what is looked up is packed, and it is decoded first."""
    from neuzip.kernels.packed_linear.ops import compile_products
    from neuzip.kernels.packed_linear.tensor import PackedTensor
    from neuzip.kernels.packed_linear.triton import pack

    matrices = [m for m in matrices if residency == "packed" or m.looked_up]
    for m in matrices:
        yield partial(pack.compile_packing, m.out, m.columns, m.dtype, m.low_bits)
    for m in sorted(matrices, key=lambda m: not m.looked_up):
        packed = PackedTensor.without_values(m.out, m.columns, m.dtype, m.low_bits)
        if m.looked_up:
            yield partial(pack.compile_rows, packed)
        for count in rows if residency == "packed" and m.multiplied else ():
            if count == 1 or not m.looked_up:  # of a prompt, only the last token goes through the head
                yield partial(compile_products, packed, count, m.bias)


def _grid_launches(grids: Iterable[GridShape], rows: Sequence[int]) -> Iterator[Callable[[], object]]:
    """Look-ups and products of matrices that are stored quantized, the looked-up ones first."""
    from neuzip.kernels.grid_linear.ops import compile_products, compile_rows
    from neuzip.kernels.grid_linear.tensor import GridTensor

    for grid in sorted(grids, key=lambda grid: not grid.looked_up):
        packed = GridTensor.without_values(grid.out, grid.columns, grid.dtype, grid.width, grid.has_columns)
        if grid.looked_up:
            yield partial(compile_rows, packed)
        for count in rows if grid.multiplied else ():
            if count == 1 or not grid.looked_up:  # of a prompt, only the last token goes through the head
                yield partial(compile_products, packed, count, grid.bias)


def _launch_mixture(shape: MixtureShape, tokens: int) -> None:
    """A layer of packed experts."""
    from neuzip.kernels.experts.ops import compile_layer
    from neuzip.kernels.packed_linear.tensor import PackedTensor

    gate_up, down = (
        PackedTensor.without_values(shape.experts * out, columns, shape.dtype, shape.low_bits)
        for out, columns in ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
    )
    compile_layer(gate_up, down, shape.experts, tokens, shape.k, shape.bias)


def _launch_parts(decoders: dict[Kind, tuple[int, bool]]) -> None:
    """What decodes weights that stay coded."""
    from neuzip.kernels.rans.coded import CodedPart
    from neuzip.kernels.rans.triton.decode import decode_parts

    row, out = (torch.empty(16, dtype=dtype, device="meta") for dtype in (torch.int64, torch.uint8))
    for kind, (blocks, ragged) in decoders.items():
        decode_parts([CodedPart(kind, row, blocks, ragged)], [out])


def _launch_step(shape: StepShape) -> None:
    """What a step launches between its products, and what it is compared with beforehand."""
    from neuzip.kernels.step import can_gate, can_norm, can_rotate
    from neuzip.kernels.step.triton import step

    def states(heads: int) -> torch.Tensor:
        return torch.empty(1, heads, 1, shape.width, dtype=shape.dtype, device="meta")

    q, k, cos = states(shape.heads), states(shape.kv_heads), states(1)[0]
    step.store((k, k), (k, k), torch.empty(1, dtype=torch.int64, device="meta"))
    step.largest(torch.empty(1, shape.words, dtype=shape.dtype, device="meta"))
    if shape.has_rms_norms and can_norm(1, shape.hidden):
        for dtype in (shape.dtype, torch.float32):
            x = torch.empty(1, 1, shape.hidden, dtype=dtype, device="meta")
            step.rms_norm(x, x[0, 0], 1e-5, "llama")
    if can_rotate(q, k, cos, cos):
        step.rotated(q, k, cos, cos)
    gate = torch.empty(1, 1, shape.inner, dtype=shape.dtype, device="meta")
    if shape.has_silu and can_gate(gate, gate):
        step.gated(gate, gate)
