"""Products of many tokens with ternary weights on Hopper: the bits of the reference.

Gluon has no interpreter. So without such a GPU the kernel's functions run in gluon_on_a_cpu, and the kernel
is compiled, and its machine code looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import compile_only
import pytest
import torch
from bits import same_numbers as same_bits
from gluon_on_a_cpu import Hang, OnACpu, changed
from hypothesis import given
from hypothesis import strategies as st
from tensors import gaussian
from torch import Tensor

from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import Ternary
from neuzip.kernels.ternary_linear import TernaryWeight, reference, ternary_linear
from neuzip.kernels.ternary_linear.gluon import matrix as gluon_matrix
from neuzip.kernels.ternary_linear.triton.quantize import quantize
from neuzip.kernels.tuning import launch_for

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
ACTIVATIONS = ["int8", "int4", "fp4", "top_k_int8"]
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
sizes = pytest.mark.parametrize("size", [gluon_matrix.OUT, gluon_matrix.OUT // 2])
scales = pytest.mark.parametrize("by_row", [False, True], ids=["a tensor", "rows"])


def weights_of(out: int, columns: int, by_row: bool = False) -> Ternary:
    return quantizers.absmean(gaussian(out, columns) * 0.02, group=columns if by_row else None)


def bias_of(out: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return gaussian(out, seed=2).to(dtype)


def x_of(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    """Tokens of sizes that differ, with an activation that is far above the others."""
    x = gaussian(rows, columns, seed=seed) * torch.logspace(-2, 2, rows)[:, None]
    x[:, columns // 3] *= 30
    return x.to(dtype)


def check(
    x: Tensor,
    weights: Ternary,
    bias: Tensor | None = None,
    activation: str = "int8",
    clamped: bool = False,
    device: str = "cpu",
    module: ModuleType = gluon_matrix,
) -> None:
    y = module.many_tokens(
        x.to(device), TernaryWeight.of(weights, device), None if bias is None else bias.to(device),
        activation, clamped, quantizers.top_k_count(x.shape[1]),
    )  # fmt: skip
    wanted = reference.ternary_linear(x, weights, bias, activation=activation, clamped=clamped)
    assert same_bits(y, wanted)


def set_band(band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {**launch_for("ternary_linear.many_tokens_hopper", torch.device("cpu")), "band": band}
    monkeypatch.setattr(gluon_matrix, "launch_for", lambda name, device: launch)


def take_blocks_of(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_matrix, "rows_of_block", lambda out, tokens, processors: size)


# On a Hopper GPU


@hopper
@pytest.mark.gpu
@sizes
@scales
@dtypes
@pytest.mark.parametrize(
    ("rows", "out", "columns"),
    [
        (65, 8, 1), (128, 256, 128), (129, 264, 300), (300, 520, 600), (65, 264, 4096), (129, 8, 4096),
        (300, 128, 256),
    ],
)  # fmt: skip
def test_product(
    rows: int, out: int, columns: int, dtype: torch.dtype, by_row: bool, size: int, monkeypatch, poison
):
    """With all activations, and with biases of any dtype."""
    take_blocks_of(size, monkeypatch)
    x, weights = x_of(rows, columns, dtype), weights_of(out, columns, by_row)
    biases = None, bias_of(out, dtype), bias_of(out, torch.float32), bias_of(out, torch.float16)
    for activation, bias in zip(ACTIVATIONS, biases, strict=True):
        check(x, weights, bias, activation, clamped=bias is None, device="cuda")


@hopper
@pytest.mark.gpu
@sizes
@pytest.mark.parametrize(("programs", "band"), [(1, 16), (2, 1), (5, 2)])
def test_programs_that_multiply_several_blocks(programs: int, band: int, size: int, monkeypatch, poison):
    take_blocks_of(size, monkeypatch)
    set_band(band, monkeypatch)
    monkeypatch.setattr(gluon_matrix, "multiprocessors", lambda device: programs)
    check(x_of(300, 600), weights_of(520, 600, by_row=True), bias_of(520), device="cuda")


@hopper
@pytest.mark.gpu
@activations
def test_tokens_that_are_not_finite(activation: str):
    x, weights = x_of(130, 600), weights_of(264, 600)
    x[3, 5], x[70, 0], x[129, 599] = torch.nan, torch.inf, -torch.inf
    check(x, weights, bias_of(264), activation, device="cuda")


@hopper
@pytest.mark.gpu
@dtypes
def test_the_operator_takes_it(dtype: torch.dtype, monkeypatch):
    """For contiguous activations and others, of several axes, with a share of them."""
    seen = []
    many_tokens = gluon_matrix.many_tokens

    def watched(x: Tensor, *arguments: object) -> Tensor:
        seen.append(tuple(x.shape))
        return many_tokens(x, *arguments)

    monkeypatch.setattr(gluon_matrix, "many_tokens", watched)
    weights, bias = weights_of(136, 300), bias_of(272, dtype).cuda()[::2]
    weight, memory = TernaryWeight.of(weights, "cuda"), x_of(140, 600, dtype).cuda()
    for x in (memory[:, :300], memory[:, ::2], memory[:, 1::2].view(2, 70, 300), memory[::2, 300:]):
        for options in ({}, {"activation": "top_k_int8", "share": 0.3}, {"clamped": True}):
            y = ternary_linear(x, weight, bias, **options)
            assert same_bits(y, reference.ternary_linear(x.cpu(), weights, bias.cpu(), **options))
    assert seen == [(140, 300)] * 9 + [(70, 300)] * 3


@hopper
@pytest.mark.gpu
def test_cuda_graph():
    """Products of which the second takes what the first gave, replayed with other activations."""
    weights, next_weights, bias = weights_of(520, 600), weights_of(264, 520, by_row=True), bias_of(520)
    weight, next_weight = TernaryWeight.of(weights, "cuda"), TernaryWeight.of(next_weights, "cuda")
    x, bias_there = x_of(300, 600).cuda(), bias.cuda()

    def products() -> tuple[Tensor, Tensor]:
        y = ternary_linear(x, weight, bias_there)
        return y, ternary_linear(y, next_weight, activation="int4")

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = products()
    for seed in (5, 6):
        other = x_of(300, 600, seed=seed)
        x.copy_(other)
        for y in ys:
            y.fill_(torch.nan)
        graph.replay()
        wanted = reference.ternary_linear(other, weights, bias)
        assert same_bits(ys[0], wanted)
        assert same_bits(ys[1], reference.ternary_linear(wanted, next_weights, activation="int4"))


@hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("most_of_a_gpu")
def test_more_elements_than_32_bits_count():
    """Eight tokens, again and again."""
    rows, out = 32_776, 65_544
    if torch.cuda.mem_get_info()[0] < 8 * rows * out:
        pytest.skip("needs 17 GB of a GPU's memory")
    torch.full((rows * out,), torch.nan, dtype=torch.bfloat16, device="cuda")  # what y is made of
    weights, x = weights_of(out, 128), x_of(8, 128)
    y = ternary_linear(x.cuda().repeat(rows // 8, 1), TernaryWeight.of(weights, "cuda"))
    assert y.numel() > 1 << 31
    assert same_bits(y[:8], reference.ternary_linear(x, weights))
    assert bool((y.view(-1, 8, out) == y[:8]).all())


def not_for_it(device: str) -> Iterator[tuple[Tensor, Ternary, TernaryWeight]]:
    """fp32; scales of groups; rows of y, then words, that begin elsewhere than at multiples of 16 bytes."""
    x, weights = x_of(70, 300), weights_of(16, 300)
    weight = TernaryWeight.of(weights, device)
    yield x.float(), weights, weight
    others = quantizers.absmean(gaussian(16, 300), group=100), *(weights_of(out, 300) for out in (1, 12, 20))
    yield from ((x, other, TernaryWeight.of(other, device)) for other in others)
    beside = weight.words.new_empty(weight.words.numel() + 1)[1:].view(weight.words.shape)
    yield x, weights, replace(weight, words=beside.copy_(weight.words))


@hopper
@pytest.mark.gpu
def test_the_operator_does_the_others_elsewhere():
    for x, weights, weight in not_for_it("cuda"):
        assert not gluon_matrix.possible(x.cuda(), weight)
        assert torch.equal(ternary_linear(x.cuda(), weight).cpu(), reference.ternary_linear(x, weights))


# On a CPU


def test_what_is_possible():
    weights = weights_of(16, 300), weights_of(264, 1, by_row=True)
    cases = [(x_of(70, one.codes.shape[1]), TernaryWeight.of(one)) for one in weights]
    for dtype in (torch.bfloat16, torch.float16):
        assert all(gluon_matrix.possible(x.to(dtype), weight) for x, weight in cases)
    assert not any(gluon_matrix.possible(x, weight) for x, _, weight in not_for_it("cpu"))


@pytest.mark.parametrize(
    ("out", "tokens", "size"),
    [
        (4096, 2048, 256), (4096, 4096, 256), (4096, 128, 128), (4096, 65, 128), (14336, 2048, 256),
        (14336, 128, 128), (128, 100_000, 128), (8, 65, 128),
    ],
)  # fmt: skip
def test_rows_of_a_block(out: int, tokens: int, size: int):
    assert gluon_matrix.rows_of_block(out, tokens, 132) == size


@given(st.integers(1, 1 << 16), st.integers(1, 1 << 16), st.integers(1, 200))
def test_no_multiprocessor_has_more_work_than_it_must(out: int, tokens: int, processors: int):
    most = {}
    for size in (256, 128):
        blocks = len(range(0, out, size)) * len(range(0, tokens, 128))
        most[size] = len(range(0, blocks, processors)) * size
    assert most[gluon_matrix.rows_of_block(out, tokens, processors)] == min(most.values())


@pytest.mark.parametrize("rows", [64, 128])
def test_what_a_thread_has(rows: int):
    """Thread (r, q) has words 2 q and 2 q + 1 of rows r and r + 8, quarter by quarter.

    So the four codes that are packed follow each other, which gluon_on_a_cpu takes for granted.
    """
    layout = gluon_matrix._layout(rows, 5)
    bases = torch.tensor([*layout.reg_bases, *layout.lane_bases, *layout.warp_bases])
    numbers = torch.arange(128 * rows)
    places = (numbers[:, None] >> torch.arange(len(bases)) & 1) @ bases  # no two have a bit in common
    assert len(places.unique(dim=0)) == 128 * rows
    (tile, row, word, quarter, code), thread = places.T, numbers // rows
    assert torch.equal(code + 4 * quarter, numbers % 16)
    assert torch.equal(word // 2, thread % 4)
    assert torch.equal(row % 8, thread // 4 % 8)
    assert torch.equal(tile % 4, thread // 32)


SEVERAL = 11
"""Tokens that differ: Triton's interpreter takes its time for each."""


def again(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """So many tokens, and then these again and again."""
    return x_of(SEVERAL, columns, dtype)[torch.arange(rows) % SEVERAL]


def quantize_again(x: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, ...]:
    """What `quantize` gives for `again`: on a GPU if there is one, as Triton has no interpreter then."""
    some = torch.arange(len(x)) % SEVERAL
    assert torch.equal(x.view(torch.int16), x[some].view(torch.int16))
    there = x[:SEVERAL].to("cuda" if torch.cuda.is_available() else "cpu")
    return tuple(found.cpu()[some] for found in quantize(there, *arguments, **keywords))


def on_a_cpu(module: ModuleType, monkeypatch: pytest.MonkeyPatch, programs: int = 1) -> None:
    monkeypatch.setattr(module, "_many_tokens", OnACpu(module._many_tokens))
    monkeypatch.setattr(module, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(module, "quantize", quantize_again)


@sizes
@pytest.mark.parametrize(
    ("rows", "out", "columns", "programs", "band", "by_row", "bias", "dtype", "poison"),
    [
        (1, 8, 1, 1, 16, False, None, torch.bfloat16, 0xFF),
        (65, 264, 300, 1, 16, True, torch.bfloat16, torch.bfloat16, 0x00),
        (129, 136, 600, 2, 1, False, torch.float32, torch.float16, 0xFF),
        (300, 520, 256, 3, 2, True, None, torch.float16, 0x00),
        (385, 72, 900, 1, 3, False, torch.float16, torch.bfloat16, 0xFF),
        (20, 1032, 128, 2, 16, True, torch.float32, torch.bfloat16, 0x00),
    ],
    indirect=["poison"],
)
def test_product_on_a_cpu(
    rows: int, out: int, columns: int, programs: int, band: int, by_row: bool, bias: torch.dtype | None,
    dtype: torch.dtype, size: int, monkeypatch, poison,
):  # fmt: skip
    on_a_cpu(gluon_matrix, monkeypatch, programs)
    take_blocks_of(size, monkeypatch)
    set_band(band, monkeypatch)
    weights = weights_of(out, columns, by_row)
    check(again(rows, columns, dtype), weights, None if bias is None else bias_of(out, bias))


@pytest.mark.parametrize("clamped", [False, True], ids=["", "clamped"])
@activations
def test_activations_on_a_cpu(activation: str, clamped: bool, monkeypatch, poison):
    on_a_cpu(gluon_matrix, monkeypatch)
    x = x_of(7, 257)
    x[2, 5], x[3, 256], x[4] = torch.nan, -torch.inf, 0
    check(x, weights_of(72, 257, by_row=True), bias_of(72), activation, clamped)


FIRST_FREE, SECOND_FREE = (f"mbarrier.arrive(free.index({name}), count=1)" for name in ("first", "second"))
SECOND_TAKEN, NEXT_TAKEN = (f"words = _take(GROUP, shared, number{what}" for what in (" + 1", ", step"))
CODES_THERE, WORDS_THERE = (f"mbarrier.wait({name}_ready.index(stage), phase" for name in ("codes", "words"))
ENDED = "warpgroup_mma_init(warpgroup_mma_wait(0, deps=[sums]))"
NOT_FOR_CODES = {f"{CODES_THERE}, pred=more)": "pass"}
CODES_LATER = "; ".join(
    f"mbarrier.wait(shared[3].index((number - {i}) % STAGES), (number - {i}) // STAGES & 1)" for i in (2, 1)
)
WRONG = AssertionError
CHANGES = {
    "none": ({}, None),
    "the first stage is never free": ({FIRST_FREE: "pass"}, Hang),
    "the second stage is never free": ({SECOND_FREE: "pass"}, Hang),
    "free in the other phase": ({"& 1) ^ 1)": "& 1))"}, Hang),
    "there in the other phase": ({"// STAGES) & 1\n": "// STAGES) & 1 ^ 1\n"}, Hang),
    "more bytes of words": ({"words.block_type.nbytes": "words.block_type.nbytes + 4"}, Hang),
    "more bytes of codes": ({"codes.block_type.nbytes": "codes.block_type.nbytes + 4"}, Hang),
    "free for one group": ({"barriers(STAGES, 2)": "barriers(STAGES, 1)"}, Hang),
    "one step too many": ({"for step in range(steps)": "for step in range(steps + 1)"}, WRONG),
    "free as soon as asked for": ({FIRST_FREE: "pass", SECOND_TAKEN: f"{FIRST_FREE}; {SECOND_TAKEN}"}, WRONG),
    "products not waited for": ({ENDED: "sums"}, WRONG),
    "codes not waited for": (NOT_FOR_CODES, WRONG),
    "codes waited for too late": (
        {**NOT_FOR_CODES, f"sums = {ENDED}": f"{CODES_LATER}; sums = {ENDED}"}, WRONG
    ),
    "words not waited for": ({f"{WORDS_THERE}, pred=more)": "pass"}, WRONG),
    "words taken once": ({NEXT_TAKEN: NEXT_TAKEN.removeprefix("words = ")}, WRONG),
    "words of other columns": ({"step % 2 * 8": "8 - step % 2 * 8"}, WRONG),
    "words of the other group": ({"slice(R // 16 * GROUP": "slice(R // 16 * (1 - GROUP)"}, WRONG),
    "codes of other tokens": ({"[m * 128, step * 128]": "[0, step * 128]"}, WRONG),
    "codes of other columns": ({"(0, 1, 4, 3, 2, 5)": "(0, 1, 4, 2, 3, 5)"}, WRONG),
    "a band too high": ({"gl.minimum(rounds - band * BAND, BAND)": "BAND"}, WRONG),
    "wrong mask": ({"0x03030303": "0x01010101"}, WRONG),
    "wrong shift": ({"2 * gl.arange(0, 4": "gl.arange(0, 4"}, WRONG),
    "the sum of codes is not subtracted": ({"(sums - code_sum)": "sums"}, WRONG),
    "scale of another row": ({"gl.load(scales + row": "gl.load(scales + (row ^ 1)"}, WRONG),
    "scale of another token": ({"gl.load(token_scale + token": "gl.load(token_scale + (token ^ 1)"}, WRONG),
    "bias of another row": ({"gl.load(bias + row": "gl.load(bias + (row ^ 1)"}, WRONG),
    "bias left out": ({"result += added": "added"}, WRONG),
    "a row too many": ({"mask=row < N": "mask=row <= N"}, WRONG),
    "a token too many": ({"mask=token < M": "mask=token <= M"}, WRONG),
    "y written twice": ({"to_global(y, [m, n]": "to_global(y, [0, n]"}, WRONG),
    "y not waited for": ({"tma.store_wait(0)\n        outs": "outs"}, WRONG),
    "the last of y not waited for": ({"    tma.store_wait(0)\n\n": "\n"}, WRONG),
    "an unknown name": ({"gl.expand_dims": "gl.expand"}, AttributeError),
}  # fmt: skip


@pytest.mark.weekly
@pytest.mark.parametrize(("changes", "error"), CHANGES.values(), ids=CHANGES)
def test_a_wrong_kernel_is_found_on_a_cpu(
    changes: dict[str, str],
    error: type[Exception] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    module = changed(gluon_matrix, changes, tmp_path)
    on_a_cpu(module, monkeypatch)
    with pytest.raises(error) if error else nullcontext():
        check(again(130, 300), weights_of(264, 300, by_row=True), bias_of(264), module=module)


COMPILED = r"""
import torch
import compile_only

def see(function, code, kwargs):
    if function.__name__ != "_many_tokens":
        return
    assert not compile_only.unused_memory(code)
    print(code.metadata.shared, *compile_only.instructions(code, "IGMMA|WARPGROUP[.]DEPBAR|STL|LDL"))

compile_only.watch(see)

from neuzip.kernels.ternary_linear import TernaryWeight
from neuzip.kernels.ternary_linear.gluon import matrix as gluon_matrix

gluon_matrix.multiprocessors = lambda device: 132
words = torch.zeros(17, 2, 16, 16, dtype=torch.int32)
for size, dtype, by_row, bias in (
    (256, torch.float16, True, torch.float32), (128, torch.bfloat16, False, None)
):
    gluon_matrix.rows_of_block = lambda out, tokens, processors: size
    scale = torch.ones((264, 1) if by_row else ())
    weight = TernaryWeight(words, scale, 300 if by_row else None, (264, 300))
    bias = None if bias is None else torch.zeros(264, dtype=bias)
    gluon_matrix.many_tokens(torch.zeros(300, 300, dtype=dtype), weight, bias, "int8", False)
"""


@pytest.mark.slow
def test_products_of_two_steps_are_in_flight_together(tmp_path: Path, kernel_cache: Path):
    """Each warp group issues those of two steps, four or eight instructions each, and waits once for all.

    Where the compiler cannot do that it says nothing, but waits after every instruction.
    """
    kernels = [line.split() for line in compile_only.said_by(COMPILED, tmp_path, kernel_cache).splitlines()]
    assert len(kernels) == 2
    for number, (shared, *instructions) in enumerate(kernels):
        assert int(shared) <= 227 << 10
        assert instructions.count("IGMMA") == 2 * 2 * (8 if number == 0 else 4)
        assert instructions.count("WARPGROUP.DEPBAR") <= 4
        assert not {"STL", "LDL"} & set(instructions), "registers in local memory"
