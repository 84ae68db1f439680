"""Self-made tensors decoded and multiplied: numba compared with the reference, a GPU with the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch

from neuzip.errors import NeuzipError
from neuzip.kernels import quantizers, rans
from neuzip.kernels.device.first_use import WrongResults
from neuzip.kernels.device.properties import is_hopper
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.packed_linear import first_use as packed_checks
from neuzip.kernels.packed_linear import ops as packed_ops
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.kernels.rans import vector_form
from neuzip.kernels.rans.coded import COLUMN_FACTORS, ON_GRID, Kind
from neuzip.kernels.rans.sample import coded_exponents
from neuzip.kernels.ternary_linear import reference as ternary_reference
from neuzip.kernels.ternary_linear.ops import ternary_linear
from neuzip.kernels.ternary_linear.weight import TernaryWeight
from neuzip.runtime.doctor.finding import Finding
from neuzip.runtime.doctor.packages import first_line

Note = Callable[[str], None]
"""Takes the name of each check before it runs: the first ones compile kernels, which takes seconds."""

ROWS = {"1 row": 1, "16 rows": 16, "200 rows": 200}
"""Rows of x of products: different kernels compute them."""

DECODED = (
    Kind(FORMATS["BF16"], 7, 2, 0),
    Kind(FORMATS["F16"], 10, 1, 0),
    Kind(FORMATS["BF16"], 0, 1, 0, ON_GRID | COLUMN_FACTORS),
    Kind(FORMATS["BF16"], 4, 2, 0, ON_GRID),
)
"""Kinds of coded weights that the decoder is tried with."""

DELTA_BITS = (8, 16)
"""Bits of weights that sparse deltas are tried with: fp8 and bf16."""

SHAPE = (272, 1024)
"""Rows and columns of the weights: whole turns of columns, and rows that are no whole blocks."""

WRONG = (
    "do not use it; update driver, torch and numba; if it stays, report it with the output of `neuzip env`"
)

BROKEN = "update the driver and torch; `neuzip -v doctor` shows more"


def cpu_findings(note: Note) -> Iterator[Finding]:
    """The CPU codec, compiled by numba, compared with the reference word for word."""
    finding = compared("CPU", "rANS codec", "the words and exponents of the reference", codes_right, note)
    if finding.status == "ok":
        form = "in vector registers" if vector_form.encodes(2, np.dtype(np.uint8)) else "scalar"
        finding = replace(finding, text=f"{finding.text}, {form}")
    yield finding


def codes_right() -> bool:
    """Whether the CPU codes samples as the reference does, and decodes them."""
    for group in (1, 2):
        sample = coded_exponents(group)
        coded = rans.encode(sample.exponents, sample.table)
        index = np.array([sample.words.size], np.uint16)
        decoded = rans.decode(sample.words, index, sample.table, sample.exponents.size)
        if not (np.array_equal(coded.words, sample.words) and np.array_equal(decoded, sample.exponents)):
            return False
    return True


def gpu_findings(place: torch.device, note: Note) -> Iterator[Finding]:
    """Each operation on a GPU: decoders bit for bit, products within their error bounds."""
    where = str(place)
    same = "the bits of the CPU"
    for kind in DECODED:
        for blocks in (1, 0):
            name = f"{'quantized' if kind.grid else 'rANS'} decoder, {kind.fmt.name}, "
            name += "low bits, " if kind.grid and kind.kept_bits else ""
            name += f"{'a whole' if blocks else 'a short'} block"
            yield compared(where, name, same, partial(_decodes, kind, blocks, place), note)
    for bits in DELTA_BITS:
        check = partial(_delta_right, bits, place)
        yield compared(where, f"sparse deltas, {bits} bits", same, check, note)
    packed = cache(partial(_packed, place))
    yield compared(where, "packed weights", same, lambda: _unpacks(*packed()), note)
    for name, rows in ROWS.items():
        if rows > packed_ops.FEW_ROWS and not is_hopper(place):
            continue  # torch multiplies them with decoded weights
        check = partial(_multiplies, packed, rows)
        yield compared(where, f"packed product, {name}", "within the error bound of fp32 sums", check, note)
    for name, rows in ROWS.items():
        check = partial(_multiplies_ternary, place, rows)
        yield compared(where, f"ternary product, {name}", same, check, note)


def compared(where: str, name: str, right: str, is_right: Callable[[], bool], note: Note) -> Finding:
    """The finding of a check: `right` is its text. An exception is a problem, whatever it is."""
    name = f"{where} {name}"
    note(name)
    try:
        passed = is_right()
    except WrongResults:
        passed = False
    except NeuzipError as error:
        return Finding("results", name, "problem", error.message, error.hint or None)
    except Exception as error:
        return Finding("results", name, "problem", first_line(error), BROKEN)
    if passed:
        return Finding("results", name, "ok", right)
    return Finding("results", name, "problem", "gives other results than the reference on the CPU", WRONG)


def _decodes(kind: Kind, blocks: int, place: torch.device) -> bool:
    from neuzip.kernels.rans.triton.decode import decodes_sample

    return decodes_sample(kind, blocks, place)


def _delta_right(bits: int, place: torch.device) -> bool:
    """Whether a GPU makes the delta of a sample as the reference does, and applies it right."""
    from neuzip.kernels.sparse_delta import first_use, ops

    is_made = first_use.makes(ops.encode, bits, place)
    return is_made and first_use.applies(ops.check_and_apply, ops.digest, bits, place)


def _weights() -> torch.Tensor:
    """Weights in bf16 like those of a model, [out, in], of which some have far exponents."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.02
    values[::10, ::61] *= 1e-4
    values[3, 7], values[17, 5] = 2.0**20, 0
    return values.bfloat16()


def _packed(place: torch.device) -> tuple[torch.Tensor, PackedTensor]:
    dense = _weights().to(place)
    return dense, packed_ops.pack(dense)


def _unpacks(dense: torch.Tensor, packed: PackedTensor) -> bool:
    """Whether what a GPU packs is decoded to the same bits, by the GPU and by the CPU."""
    decoded = packed_ops.decode(packed).cpu()
    last = SHAPE[0] - 1
    return torch.equal(decoded.view(torch.int16), _weights().view(torch.int16)) and all(
        packed_checks.is_same(dense[start:], packed, start) for start in (0, last)
    )


def _multiplies(weights: Callable[[], tuple[torch.Tensor, PackedTensor]], rows: int) -> bool:
    _, packed = weights()
    x = torch.empty(rows, SHAPE[1], dtype=packed.dtype, device=packed.device)
    return packed_checks.multiplies(x, packed, None, packed_ops.product)


def _multiplies_ternary(place: torch.device, rows: int) -> bool:
    """Whether a product with ternary weights has the bits that the reference has."""
    generator = torch.Generator().manual_seed(rows)
    weight = quantizers.absmean(torch.randn(SHAPE, generator=generator))
    x = torch.randn(rows, SHAPE[1], generator=generator).bfloat16()
    y = ternary_linear(x.to(place), TernaryWeight.of(weight, place)).cpu()
    return torch.equal(y.view(torch.int16), ternary_reference.ternary_linear(x, weight).view(torch.int16))
