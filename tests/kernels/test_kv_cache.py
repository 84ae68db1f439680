"""Kernels of keys and values in rotated groups: the bits that torch stores and loads, and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuzip.kernels import kv_cache
from neuzip.kernels.kv_cache import CenterPath, Heads, reference
from neuzip.kernels.kv_cache import ops as torch_ops
from neuzip.kernels.kv_cache.triton import attend as triton_attend
from neuzip.kernels.kv_cache.triton import attend_mma as triton_fragments
from neuzip.kernels.kv_cache.triton import load as triton_load
from neuzip.kernels.kv_cache.triton import store as triton_store

pytestmark = pytest.mark.usefixtures("one_thread")

ERRORS = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""Relative errors in the 2-norm that the rounding of queries, values and weights to a dtype explains."""

FEW = (torch.bfloat16, 8), (torch.float32, 2)
MANY = (*FEW, (torch.bfloat16, 24), (torch.float16, 14))
"""Dtypes and numbers of queries. Each takes a GPU's compiler 5 to 60 seconds."""


def states(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that do not average out, with a channel far larger than the others."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3
    x[..., 5] += 6
    return x.to(dtype)


def room(
    shape: tuple[int, int, int, int], bits: int, *, group: int = 32, whole: int = 4, center: bool = True,
    dtype: torch.dtype = torch.bfloat16, device: torch.device | None = None,
) -> Heads:  # fmt: skip
    path = turning_path(shape[3], shape[2]) if center else None
    return kv_cache.empty(shape, bits, group=group, whole=whole, path=path, dtype=dtype, device=device)


def turning_path(width: int, tokens: int) -> CenterPath:
    """Two of three channels have a center; half of those turn, by up to half a turn in 64 tokens.

    Neighbours turn together in heads of 80 and 192 numbers.
    """
    rates = torch.linspace(0.01, 0.05, width // 4, dtype=torch.float64)
    return CenterPath.of(
        torch.arange(width) % 3 > 0, rates=rates, begin=2, apart=1 if width in (80, 192) else None, block=64,
        tokens=tokens, origin=2.0,
    )  # fmt: skip


def by_torch(heads: list[Heads], numbers: list[Tensor], at: Any, first: Tensor) -> None:
    for one, x in zip(heads, numbers, strict=True):
        torch_ops.store(one, x, at, first)


def moved(heads: Heads, device: torch.device) -> Heads:
    path = None if heads.path is None else heads.path.to(device)
    return replace(heads.texts(lambda tensor: tensor.to(device)), path=path)


def different(a: Heads, b: Heads) -> list[str]:
    """Which arrays are not the same, NaN for NaN."""
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in torch_ops.OF_TOKENS + torch_ops.OF_TEXTS}
    return [
        name
        for name, (one, other) in pairs.items()
        if one is not None and not torch.equal(one.nan_to_num(7), other.cpu().nan_to_num(7))
    ]


@pytest.mark.parametrize(
    ("bits", "group", "width", "dtype"),
    [
        (8, 32, 80, torch.float16), (6, 32, 192, torch.float32), (4, 32, 128, torch.bfloat16),
        (3, 64, 112, torch.bfloat16), (2, 16, 96, torch.float32), (4, 32, 20, torch.bfloat16),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:invalid value")
def test_kernels_store_and_load_the_bits_of_torch(
    bits: int, group: int, width: int, dtype: torch.dtype, device: torch.device
):
    """The first tokens in several calls, a block of centers that ends; zeros, NaN, infinities, tiny numbers.

    The rest of the memory stays as it was.
    """
    first = torch.tensor([7, 3])
    calls: list[tuple[Any, list[Tensor]]] = [
        (2, [states(2, 3, 7, width, seed=seed, dtype=dtype) for seed in (0, 1)]),
        (9, [states(2, 3, 62, width, seed=seed, dtype=dtype) for seed in (2, 3)]),
        (torch.tensor(71), [states(2, 3, 1, width, seed=seed, dtype=dtype) for seed in (4, 5)]),
    ]
    x = calls[1][1][0]
    x[0, 0, 5], x[1, 1, 6, 2], x[1, 1, 7, 2], x[0, 2, 8, 1] = 0, torch.nan, torch.inf, -torch.inf
    x[0, 0, 6], x[1, 2, 9] = 1e-6, -0.0
    made = []
    for store, place in ((by_torch, torch.device("cpu")), (triton_store.store, device)):
        rooms = [
            room((2, 3, 76, width), b, group=g, center=center, dtype=dtype, device=place)
            for b, g, center in (
                (bits, group, True),
                (3 if bits == 8 else bits + 1, 64, False),
            )  # in one launch
        ]
        for heads in rooms:
            heads.words.fill_(-1)
        for at, numbers in calls:
            at = at.to(place) if isinstance(at, Tensor) else at
            store(rooms, [x.to(place) for x in numbers], at, first.to(place))
        made.append(rooms)
    for expected, found in zip(*made, strict=True):
        assert different(expected, found) == []
        assert bool((found.words[:, :, 72:] == -1).all())
        for dtype_read in (torch.float32, torch.bfloat16):
            dense = torch_ops.load(expected.tokens(2, 72), first - 2, dtype_read).nan_to_num(77)
            read = triton_load.load(found.tokens(2, 72), (first - 2).to(device), dtype_read).nan_to_num(77)
            assert torch.equal(read.cpu().view(torch.uint8), dense.view(torch.uint8))


def test_a_group_that_is_no_power_of_two_is_refused():
    heads = room((1, 1, 4, 96), 4, group=48)
    with pytest.raises(ValueError, match="groups of a power of two of numbers, not of 48"):
        triton_store.store([heads], [states(1, 1, 1, 96)], 0, torch.zeros(1, dtype=torch.int64))


def distance(
    attend: Callable[..., Tensor], query: Tensor, heads: list[Heads], first: Tensor, device: torch.device,
    **options: Any,
) -> float:  # fmt: skip
    """Relative to fp64 on the same dequantised numbers."""
    expected = reference.attend(query.double(), *heads, first, dtype=torch.float64, **options)
    placed = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    found = attend(query.to(device), *(moved(h, device) for h in heads), first.to(device), **placed)
    assert found.dtype == query.dtype
    return float((found.cpu().double() - expected).norm() / expected.norm())


def empty_pair(
    texts: int, heads: int, tokens: int, widths: tuple[int, int], bits: tuple[int, int], dtype: torch.dtype,
    group: int = 32, device: torch.device | None = None,
) -> list[Heads]:  # fmt: skip
    """Room for keys in groups of `group` with a center, and for values in groups of 64 or fewer."""
    groups = group, 64 if group >= 32 else group
    rooms = []
    for n in range(2):
        shape, center = (texts, heads, tokens, widths[n]), n == 0
        rooms.append(room(shape, bits[n], group=groups[n], center=center, dtype=dtype, device=device))
    return rooms


def pair_of_states(
    texts: int, heads: int, tokens: int, widths: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """Keys, and values, which are small."""
    pair = [states(texts, heads, tokens, width, seed=n + 2, dtype=dtype) for n, width in enumerate(widths)]
    return [pair[0], pair[1] * 0.01]


def filled(
    texts: int, heads: int, tokens: int, widths: tuple[int, int], bits: tuple[int, int], first: Tensor,
    dtype: torch.dtype, group: int = 32,
) -> list[Heads]:  # fmt: skip
    """Keys and values, stored by torch."""
    rooms = empty_pair(texts, heads, tokens, widths, bits, dtype, group)
    by_torch(rooms, pair_of_states(texts, heads, tokens, widths, dtype), 0, first)
    return rooms


@pytest.mark.parametrize(
    ("bits", "group", "dtype", "texts", "heads", "queries", "widths"),
    [
        ((4, 4), 32, torch.bfloat16, 1, 2, 4, (128, 128)), ((8, 3), 32, torch.bfloat16, 2, 1, 3, (128, 64)),
        ((2, 8), 32, torch.bfloat16, 1, 1, 11, (112, 80)), ((8, 6), 32, torch.float16, 2, 1, 3, (80, 96)),
        ((4, 4), 32, torch.bfloat16, 1, 1, 2, (256, 192)), ((3, 2), 64, torch.float16, 1, 1, 16, (192, 256)),
        ((6, 4), 8, torch.float16, 1, 1, 1, (64, 64)), ((3, 3), 16, torch.bfloat16, 2, 1, 1, (96, 112)),
        ((4, 2), 32, torch.float32, 1, 1, 3, (80, 128)),
    ],
)  # fmt: skip
def test_attention_is_within_its_rounding(
    bits: tuple[int, int], group: int, dtype: torch.dtype, texts: int, heads: int, queries: int,
    widths: tuple[int, int], device: torch.device, monkeypatch,
):  # fmt: skip
    """Of tokens from the middle of a step on, some of them masked, by the kernel that `attend` chooses.

    A block of centers ends within a step, or where a step ends.
    """
    monkeypatch.setattr(triton_fragments, "_shares", lambda *_: 2)
    monkeypatch.setattr(triton_attend, "_shares", lambda *_: 2)
    first = torch.tensor([17, 0])[:texts]
    rooms = filled(texts, heads, 90, widths, bits, first, dtype, group)
    query = states(texts, heads * queries, widths[0], dtype=dtype)
    mask = torch.arange(90) >= first[:, None]
    mask[:, 30:36] = False
    by_fragments = dtype != torch.float32 and group % 32 == 0
    assert triton_fragments.fits(query, *rooms) == by_fragments
    attend = (triton_fragments if by_fragments else triton_attend).attend
    given = {"scaling": widths[0] ** -0.5, "length": torch.tensor(85), "mask": mask}
    assert distance(attend, query, rooms, first, device, **given) < ERRORS[dtype]


@pytest.mark.parametrize("part", [triton_attend, triton_fragments])
@pytest.mark.parametrize(
    ("first", "length", "hidden"),
    [(-2, 40, 0), (-9, 40, 0), (-45, 40, 0), (0, 3, 0), (0, 4, 0), (30, 33, 30), (5, 40, 7)],
)
def test_tokens_kept_whole_count_where_they_are(
    first: int, length: int, hidden: int, part: Any, device: torch.device
):
    """Some or all of them gone with a window, nothing but them, some of them masked."""
    where = torch.tensor([first])
    rooms = filled(1, 1, 48, (64, 64), (3, 3), torch.tensor([max(first, 0)]), torch.float16)
    query = states(1, 2, 64, dtype=torch.float16)
    added = torch.where(torch.arange(48) >= hidden, 0.0, -torch.inf)[None]
    given = {"scaling": 0.05, "length": length, "mask": added}
    assert distance(part.attend, query, rooms, where, device, **given) < ERRORS[torch.float16]


def test_logits_that_rise_and_fall_give_no_other_result(device: torch.device, monkeypatch):
    """The unit of a share's sums is raised again and again, or once."""
    monkeypatch.setattr(triton_fragments, "_shares", lambda *_: 1)
    first = torch.tensor([-9, -9])
    rooms = [room((2, 1, 96, 64), 8, group=group, whole=4, center=False) for group in (32, 64)]
    keys = torch.linspace(0, 30, 96)[:, None] * torch.ones(64) / 8
    torch_ops.store(rooms[0], torch.stack([keys, keys.flip(0)])[:, None].bfloat16(), 0, first)
    torch_ops.store(rooms[1], states(2, 1, 96, 64, dtype=torch.bfloat16), 0, first)
    query = torch.ones(2, 1, 64, dtype=torch.bfloat16)
    given = {"scaling": 0.5, "length": 96}
    assert distance(triton_fragments.attend, query, rooms, first, device, **given) < ERRORS[torch.bfloat16]


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_memory_may_have_fewer_tokens_than_a_step(tokens: int, device: torch.device):
    first = torch.tensor([0])
    rooms = filled(1, 1, tokens, (64, 64), (4, 4), first, torch.bfloat16)
    query = states(1, 2, 64, dtype=torch.bfloat16)
    given = {"scaling": 0.05, "length": torch.tensor(tokens)}
    assert distance(triton_fragments.attend, query, rooms, first, device, **given) < ERRORS[torch.bfloat16]


@pytest.mark.parametrize("group", [32, None], ids=["rotated", "plain"])
@pytest.mark.parametrize("bits", [8, 4])
def test_values_that_cancel_leave_no_error(bits: int, group: int | None, device: torch.device, monkeypatch):
    """What remains of them is small, so that an error that all values have in common would be large."""
    monkeypatch.setattr(triton_fragments, "_shares", lambda *_: 2)
    first = torch.tensor([-9])
    half, rest = torch.randn(2, 1, 1, 48, 128, generator=torch.Generator().manual_seed(1))
    values = torch.cat([half, 0.2 * rest - half], 2).bfloat16()
    rooms = []
    for size in (group, group and 64):
        shape = 1, 1, 96, 128
        heads = kv_cache.empty(shape, bits) if size is None else room(shape, bits, group=size, center=False)
        torch_ops.store(heads, values, 0, first)
        rooms.append(heads)
    query = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    exact = reference.attend(query.double(), *rooms, first, scaling=1.0, length=96, dtype=torch.float64)
    assert exact.norm() < 0.02 * values.double().norm() / 96**0.5
    given = {"scaling": 1.0, "length": 96}
    assert distance(triton_fragments.attend, query, rooms, first, device, **given) < ERRORS[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("texts", [1, 16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [32, None], ids=["rotated", "plain"])
def test_long_texts_are_attended_as_exactly_as_by_torch_in_bf16(
    group: int | None, bits: int, texts: int, device: torch.device
):
    """Random values average out to 1/100 of their size: errors that do not average out would show.

    torch multiplies the same numbers, dequantised to bf16.
    """
    tokens, width = 1 << 15, 128
    shape = texts, 8, tokens, width
    rounds = torch.Generator(device).manual_seed(0)
    given = [torch.randn(shape, generator=rounds, device=device).bfloat16() for _ in range(2)]
    given[0][..., width // 2 + 3] += 6
    query = torch.randn(texts, 32, width, generator=rounds, device=device).bfloat16()
    first = torch.zeros(texts, dtype=torch.int64, device=device)
    rooms = [
        kv_cache.empty(shape, bits, device=device)
        if group is None
        else room(shape, bits, group=size, center=size == 32, device=device)
        for size in (32, 64)
    ]
    kv_cache.store(rooms, given, 0, first)
    options: dict[str, Any] = {"scaling": width**-0.5, "length": torch.tensor(tokens, device=device)}
    result = kv_cache.attend(query, *rooms, first, **options)
    for text in {0, texts - 1}:
        alone = [heads.texts(lambda tensor, text=text: tensor[text : text + 1]) for heads in rooms]
        its = query[text : text + 1]
        exact = reference.attend(its.double(), *alone, first[:1], dtype=torch.float64, **options)
        dense = [kv_cache.load(heads, first[:1], torch.bfloat16) for heads in alone]
        by_torch = F.scaled_dot_product_attention(its.view(1, 8, 4, width), *dense).view(1, 32, width)
        ours, theirs = (
            float((x.double() - exact).norm() / exact.norm()) for x in (result[text : text + 1], by_torch)
        )
        assert ours < theirs and ours < ERRORS[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "bits", "queries"),
    [
        (64, (3, 3), MANY), (64, (6, 3), FEW), (80, (2, 2), FEW), (96, (6, 3), FEW), (112, (4, 4), FEW),
        (128, (4, 4), MANY), (128, (8, 8), FEW), (192, (4, 4), FEW), (256, (8, 8), FEW),
    ],
)  # fmt: skip
def test_a_gpu_stores_loads_and_attends_as_the_reference(
    width: int, bits: tuple[int, int], queries: Sequence[tuple[torch.dtype, int]], device: torch.device
):
    first = torch.tensor([5, 0, 700])
    rooms = filled(3, 2, 1000, (width, width), bits, first, torch.bfloat16)
    cards = empty_pair(3, 2, 1000, (width, width), bits, torch.bfloat16, device=device)
    x = pair_of_states(3, 2, 1000, (width, width), torch.bfloat16)
    kv_cache.store(cards, [one.to(device) for one in x], 0, first.to(device))
    for heads, card in zip(rooms, cards, strict=True):
        assert different(heads, card) == []
        dense = kv_cache.load(card, first.to(device), torch.bfloat16)
        assert torch.equal(dense.cpu(), kv_cache.load(heads, first, torch.bfloat16))
    for dtype, count in queries:
        query = states(3, count, width, dtype=dtype)
        mask = torch.arange(1000) >= first[:, None]  # tokens before the first are padding
        given = {"scaling": width**-0.5, "length": torch.tensor(990), "mask": mask}
        assert distance(kv_cache.attend, query, rooms, first, device, **given) < ERRORS[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_long_shares_lose_nothing(bits: int, dtype: torch.dtype, device: torch.device, monkeypatch):
    """A program for all tokens, alike in weight: what matrix instructions cut off must not add up."""
    monkeypatch.setattr(triton_fragments, "_shares", lambda *_: 1)
    first = torch.tensor([0])
    rooms = filled(1, 1, 1 << 14, (128, 128), (bits, bits), first, dtype)
    query = states(1, 4, 128, dtype=dtype)
    given = {"scaling": 0.02, "length": 1 << 14}
    assert distance(triton_fragments.attend, query, rooms, first, device, **given) < 1.5 * ERRORS[dtype]
    given = {"scaling": 0.02, "length": torch.tensor(1 << 14, device=device)}
    placed = [moved(one, device) for one in rooms]
    results = [kv_cache.attend(query.to(device), *placed, first.to(device), **given) for _ in range(2)]
    assert torch.equal(*results)
