"""Keys and values in few bits: what is stored, attention that reads it, and the cache of a whole model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    DynamicCache,
    FalconH1Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version

from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.measures.divergence import compare
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.perplexity import evaluate, prepare
from neuzip.eval.measures.texts import read_text
from neuzip.kernels import kv_cache
from neuzip.kernels.kv_cache import Heads, reference
from neuzip.kernels.kv_cache import ops as torch_ops
from neuzip.kernels.kv_cache.triton import attend as triton_attend
from neuzip.kernels.kv_cache.triton import attend_mma as triton_fragments
from neuzip.kernels.kv_cache.triton import load as triton_load
from neuzip.kernels.kv_cache.triton import shares
from neuzip.kernels.kv_cache.triton import store as triton_store
from neuzip.kernels.quantizers import hadamard, quantize_groups, quantize_heads
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf import kv_attention, kv_layers
from neuzip.runtime.hf import kv_cache as runtime_module
from neuzip.runtime.hf.kv_attention import not_readable
from neuzip.runtime.hf.kv_cache import KVCache
from neuzip.runtime.hf.kv_layers import BY_A_KERNEL
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.rotary import ChannelRates, channel_rates
from neuzip.runtime.kv_bits import LayerBits

pytestmark = pytest.mark.usefixtures("one_thread")

BITS = (8, 4, 3)
FORMS = ("rotated", "a4.8")
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
WINDOW = 8
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "sliding window": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=WINDOW)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SIZES)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model of random weights in fp32."""
    torch.manual_seed(3)
    return MODELS[request.param]().eval()


@pytest.fixture
def llama() -> PreTrainedModel:
    torch.manual_seed(3)
    return MODELS["llama"]().eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 256, (2, 20), generator=torch.Generator().manual_seed(4))


def states(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a: Heads, b: Heads) -> bool:
    """Whether all that is stored is the same, NaN for NaN."""
    for field in ("words", "scale", "zero", "first_bits", "first", "center"):
        one, other = getattr(a, field), getattr(b, field)
        if (one is None) != (other is None):
            return False
        if one is not None and not torch.equal(one.nan_to_num(7), other.cpu().nan_to_num(7)):
            return False
    return True


# What is stored


@pytest.mark.parametrize("bits", BITS)
def test_numbers_come_back_as_the_quantiser_makes_them(bits: int):
    x, first = states(2, 3, 9, 20), torch.tensor([4, 0])
    heads = kv_cache.empty((2, 3, 12, 20), bits)
    kv_cache.store([heads], [x], 2, first + 2)
    found = kv_cache.load(heads, first + 2, torch.float32)[:, :, 2:11]
    each = torch.full((2, 1, 9), bits)
    if bits == 3:
        each[0, 0, 4] = each[1, 0, 0] = 4
    expected = quantize_heads(x, each, scale_dtype=torch.bfloat16).dequantize()
    assert torch.equal(found, expected)
    if bits != 3:
        assert heads.first_bits is None


def test_only_three_bits_give_the_first_token_another():
    x, none = states(1, 1, 4, 32), torch.tensor([-1])
    for bits in range(1, 9):
        heads = kv_cache.empty((1, 1, 4, 32), bits)
        kv_cache.store([heads], [x], 0, torch.tensor([1]))
        changed = (kv_cache.load(heads, none, torch.float32) != quantize_heads(
            x, bits, scale_dtype=torch.bfloat16).dequantize()).any(-1)  # fmt: skip
        assert changed.flatten().tolist() == [False, bits == 3, False, False]


def test_memory_is_what_the_layout_says():
    heads = kv_cache.empty((2, 3, 50, 128), 3)
    assert heads.nbytes == 2 * 3 * (50 * (48 + 2) + 16)


@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("bits", [8, 5, 3])
def test_kernel_stores_the_bits_of_torch(
    bits: int, scale_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
):
    """Tokens with nothing but zeros, with NaN, with infinity; what is not written stays as it was."""
    x, first = states(2, 3, 37, 20, dtype=dtype), torch.tensor([7, 3])
    x[0, 0, 3], x[1, 1, 4, 2], x[1, 1, 5, 2], x[0, 2, 6, 1] = 0, torch.nan, torch.inf, -torch.inf
    one = states(2, 3, 1, 20, seed=1, dtype=dtype)
    made = []
    for store, place in ((by_torch, torch.device("cpu")), (triton_store.store, device)):
        heads = kv_cache.empty((2, 3, 50, 20), bits, scale_dtype=scale_dtype, device=place)
        heads.words.fill_(-1)
        store([heads], [x.to(place)], 5, first.to(place))
        store([heads], [one.to(place)], torch.tensor(42, device=place), first.to(place))
        assert bool((heads.words[:, :, :5] == -1).all()) and bool((heads.words[:, :, 43:] == -1).all())
        made.append(heads)
    assert same_bits(*made)


def by_torch(heads: Sequence[Heads], numbers: Sequence[Tensor], at: Any, first: Tensor) -> None:
    for room, x in zip(heads, numbers, strict=True):
        torch_ops.store(room, x, at, first)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("width", [20, 36], ids=["alike", "apart"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_keys_and_values_are_stored_together(tokens: int, width: int, bits: int, device: torch.device):
    """In one launch if they are alike, wherever their numbers lie; `at` may be the places of all tokens."""
    first = torch.tensor([7, 3])
    keys, values = states(2, 3, tokens, 20), states(2, tokens, 3, width, seed=1).transpose(1, 2)
    at = torch.arange(3, 3 + tokens)
    made = []
    for store, place in ((by_torch, torch.device("cpu")), (triton_store.store, device)):
        rooms = [kv_cache.empty((2, 3, 20, w), bits, device=place) for w in (20, width)]
        store(rooms, [x.to(place) for x in (keys, values)], at.to(place), first.to(place))
        made.append(rooms)
    for room, other in zip(*made, strict=True):
        assert same_bits(room, other)
        assert bool(room.words[:, :, 3 : 3 + tokens].any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [8, 5, 3])
@pytest.mark.usefixtures("poison")
def test_kernel_loads_the_bits_of_torch(bits: int, dtype: torch.dtype, device: torch.device):
    """Of some of the room, whose first token is in it for one text only."""
    first = torch.tensor([7, 3])
    heads = filled((2, 3, 200, 20), bits, first, 2)
    part = heads.tokens(5, 140)
    expected = torch_ops.load(part, first - 5, dtype)
    found = triton_load.load(moved(heads, device).tokens(5, 140), (first - 5).to(device), dtype)
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_store_refuses_what_does_not_fit():
    heads = kv_cache.empty((1, 1, 4, 32), 4)
    first = torch.zeros(1, dtype=torch.int64)
    for wrong in (states(1, 1, 5, 32), states(1, 1, 2, 31), states(2, 1, 2, 32)):
        with pytest.raises(ValueError, match="does not fit into the room"):
            triton_store.store([heads], [wrong], 0, first)
    with pytest.raises(ValueError, match="side by side"):
        triton_store.store([heads], [states(1, 1, 32, 2).mT], 0, first)


# Attention


def filled(shape: tuple[int, int, int, int], bits: int, first: Tensor, seed: int) -> Heads:
    """Heads of numbers that do not average out, very small where `seed` is odd."""
    heads = kv_cache.empty(shape, bits)
    torch_ops.store(heads, (states(*shape, seed=seed) + 0.3) * (1e-3 if seed % 2 else 1), 0, first)
    return heads


def moved(heads: Heads, device: torch.device) -> Heads:
    return heads.texts(lambda tensor: tensor.to(device))


def test_reference_is_softmax_attention():
    first = torch.tensor([1, 0])
    keys, values = (filled((2, 2, 30, 32), 4, first, seed) for seed in (2, 4))
    query, mask = states(2, 6, 32), torch.rand(2, 30) < 0.7
    k, v = (kv_cache.load(h, first, torch.float32)[:, :, :25].repeat_interleave(3, 1) for h in (keys, values))
    expected = F.scaled_dot_product_attention(
        query[:, :, None], k, v, attn_mask=mask[:, None, None, :25], scale=0.2
    )[:, :, 0]
    found = kv_cache.attend(query, keys, values, first, scaling=0.2, length=25, mask=mask)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_kernel_attends_within_its_rounding(bits: int, dtype: torch.dtype, device: torch.device, monkeypatch):
    """Against fp64 on the same dequantised numbers; twice, with the same bits."""
    monkeypatch.setattr(triton_attend, "_shares", lambda *_: 3)
    first = torch.tensor([70, 0])
    keys = filled((2, 2, 200, 20), bits, first, 2)
    values = filled((2, 2, 200, 48), bits, first, 3)
    query = states(2, 6, 20, dtype=dtype)
    mask = torch.arange(200) >= first[:, None]
    mask[:, 90:100] = False
    expected = reference.attend(
        query.double(), keys, values, first, scaling=0.3, length=170, mask=mask, dtype=torch.float64
    )
    given = [query, *(moved(heads, device) for heads in (keys, values)), first]
    query, keys, values, first = (x.to(device) if isinstance(x, Tensor) else x for x in given)  # type: ignore[assignment]
    added = torch.where(mask, 0.0, -torch.inf).to(device)
    length = torch.tensor(170, device=device)
    found = [
        triton_attend.attend(query, keys, values, first, scaling=0.3, length=n, mask=m)
        for n, m in ((length, mask.to(device)), (170, added))
    ]
    assert torch.equal(*found)
    error = (found[0].cpu().double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "dtype", "texts", "heads", "group", "k_width", "v_width"),
    [
        (8, torch.bfloat16, 1, 2, 3, 128, 40), (8, torch.float16, 2, 1, 3, 20, 48),
        (4, torch.float16, 2, 2, 3, 64, 128), (4, torch.bfloat16, 1, 1, 2, 100, 100),
        (3, torch.bfloat16, 2, 1, 3, 100, 128), (3, torch.bfloat16, 2, 1, 11, 128, 20),
        (3, torch.float16, 1, 2, 16, 33, 128), (5, torch.bfloat16, 1, 1, 1, 48, 17),
    ],
)  # fmt: skip
def test_fragments_attend_within_their_rounding(
    bits: int, dtype: torch.dtype, texts: int, heads: int, group: int, k_width: int, v_width: int,
    device: torch.device, monkeypatch,
):  # fmt: skip
    """The kernel for narrow heads and queries of 16 bits, against fp64 on the same dequantised numbers."""
    monkeypatch.setattr(triton_fragments, "_shares", lambda *_: 2)
    first = torch.tensor([17, 0])[:texts]
    keys = filled((texts, heads, 70, k_width), bits, first, 2)
    values = filled((texts, heads, 70, v_width), bits, first, 3)
    query = states(texts, heads * group, k_width, dtype=dtype)
    mask = torch.arange(70) >= first[:, None]
    mask[:, 30:36] = False
    expected = reference.attend(
        query.double(), keys, values, first, scaling=0.3, length=59, mask=mask, dtype=torch.float64
    )
    given: Any = [
        moved(x, device) if isinstance(x, Heads) else x.to(device) for x in (query, keys, values, first)
    ]
    assert triton_fragments.fits(*given[:3])
    length = torch.tensor(59, device=device)
    found = [triton_fragments.attend(*given, scaling=0.3, length=length, mask=mask.to(device))]
    if texts == heads == 2:
        added = torch.where(mask, 0.0, -torch.inf).to(device)
        found.append(triton_fragments.attend(*given, scaling=0.3, length=59, mask=added))
    for one in found:
        assert torch.equal(one, found[0])
        error = (one.cpu().double() - expected).norm() / expected.norm()
        assert error < {torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]


@pytest.mark.parametrize("where", [-1, 0, 15, 16, 30])
def test_fragments_find_the_first_token_wherever_it_is(where: int, device: torch.device):
    """At the edges of a step, alone in the last, or no longer there; and shares that have nothing."""
    first = torch.tensor([where])
    keys, values = (filled((1, 1, 90, 64), 3, first, seed) for seed in (2, 4))
    query = states(1, 2, 64, dtype=torch.float16)
    expected = reference.attend(
        query.double(), keys, values, first, scaling=0.02, length=31, dtype=torch.float64
    )
    found = triton_fragments.attend(
        query.to(device), moved(keys, device), moved(values, device), first.to(device),
        scaling=0.02, length=torch.tensor(31, device=device),
    )  # fmt: skip
    assert (found.cpu().double() - expected).norm() < 5e-4 * expected.norm()


def test_fragments_are_for_queries_of_16_bits_and_groups_of_whole_instructions():
    plain, query = kv_cache.empty((1, 2, 8, 130), 4), states(1, 2, 130, dtype=torch.bfloat16)
    assert triton_fragments.fits(query, plain, plain)
    assert not triton_fragments.fits(query.float(), plain, plain)
    groups = {group: kv_cache.empty((1, 2, 8, 130), 4, group=group) for group in (16, 32, 64)}
    assert triton_fragments.fits(query, groups[32], groups[64])
    assert not triton_fragments.fits(query, groups[16], plain)
    assert not triton_fragments.fits(query, plain, groups[32])
    in_fp16 = kv_cache.empty((1, 2, 8, 130), 4, scale_dtype=torch.float16)
    assert not triton_fragments.fits(query, plain, in_fp16)
    gone = kv_cache.empty((1, 2, 0, 130), 4)
    assert not triton_fragments.fits(query, gone, gone)


def test_the_bits_of_a_code_under_those_of_128_are_a_bf16():
    """What the kernel multiplies with on a GPU; the interpreter has no such products."""
    codes = torch.arange(1 << 6, dtype=torch.int16)
    assert torch.equal((codes | 0x4300).view(torch.bfloat16).float(), 128.0 + codes)


@pytest.mark.parametrize("first", [-1, 0, 63, 64, 99])
def test_the_first_token_counts_wherever_it_is(first: int, device: torch.device):
    """In the middle of a step, at its edges, alone, or no longer there."""
    where = torch.tensor([first])
    keys, values = (filled((1, 1, 100, 64), 3, where, seed) for seed in (2, 4))
    query = states(1, 4, 64)
    expected = reference.attend(query, keys, values, where, scaling=0.02, length=100)
    found = triton_attend.attend(
        query.to(device), moved(keys, device), moved(values, device), where.to(device),
        scaling=0.02, length=100,
    )  # fmt: skip
    assert torch.allclose(found.cpu(), expected, atol=2e-6)
    if first >= 0:
        without = reference.attend(query, keys, values, torch.tensor([-1]), scaling=0.02, length=100)
        assert not torch.allclose(without, expected, atol=1e-4)


@pytest.mark.parametrize("length", [1, 64, 65])
def test_shares_without_tokens_add_nothing(length: int, device: torch.device, monkeypatch):
    monkeypatch.setattr(triton_attend, "_shares", lambda *_: 5)
    first = torch.tensor([0])
    keys, values = (filled((1, 2, 300, 64), 4, first, seed) for seed in (2, 4))
    query = states(1, 2, 64)
    expected = reference.attend(query, keys, values, first, scaling=0.2, length=length)
    found = triton_attend.attend(
        query.to(device), moved(keys, device), moved(values, device), first.to(device),
        scaling=0.2, length=torch.tensor(length, device=device),
    )  # fmt: skip
    assert torch.allclose(found.cpu(), expected, atol=2e-6)


def test_attend_refuses_what_the_kernel_is_not_made_for():
    first = torch.zeros(1, dtype=torch.int64)
    keys = filled((1, 2, 8, 32), 4, first, 0)
    for wrong in (states(1, 3, 32), states(1, 2, 16)):
        with pytest.raises(ValueError, match="for 2 heads of 32 numbers"):
            triton_attend.attend(wrong, keys, keys, first, scaling=1, length=8)
    with pytest.raises(ValueError, match="17 queries a head of 32 numbers; 16 of 256 are possible"):
        triton_attend.attend(states(1, 34, 32), keys, keys, first, scaling=1, length=8)


@pytest.mark.parametrize("part", [triton_attend, triton_fragments])
def test_attend_refuses_shapes_that_do_not_agree(part: Any):
    first = torch.zeros(2, dtype=torch.int64)
    keys = filled((2, 2, 8, 32), 4, first, 0)
    query = states(2, 2, 32, dtype=torch.float16)
    for wrong in ({"query": query[:1]}, {"first": first[:1]}):
        given: dict[str, Any] = {"query": query, "first": first, **wrong}
        with pytest.raises(ValueError, match="for 2 texts and"):
            part.attend(keys=keys, values=keys, scaling=1, length=8, **given)
    for mask in (torch.ones(2, 7), torch.ones(3, 8)):
        with pytest.raises(ValueError, match="for 2 texts of 8 tokens"):
            part.attend(query, keys, keys, first, scaling=1, length=8, mask=mask)
    for heads, more in ((keys, {"mask": torch.ones(8, 2).T}), (keys.tokens(0, 8), {})):
        if not more:
            heads = replace(heads, scale=heads.scale.transpose(1, 2).contiguous().transpose(1, 2))
        with pytest.raises(ValueError, match="side by side"):
            part.attend(query, heads, heads, first, scaling=1, length=8, **more)


@pytest.mark.parametrize("part", [triton_attend, triton_fragments])
def test_a_mask_of_the_lowest_number_is_not_one_of_infinity(part: Any, device: torch.device):
    """A text of which nothing counts, as transformers masks it, has the mean of all; no NaN."""
    first = torch.tensor([-1, -1])
    heads = filled((2, 1, 40, 32), 4, first, 2)
    query, mask = states(2, 1, 32, dtype=torch.bfloat16), torch.zeros(2, 40, dtype=torch.bfloat16)
    mask[0], mask[1, :7] = torch.finfo(mask.dtype).min, torch.finfo(mask.dtype).min
    expected = reference.attend(
        query.double(), heads, heads, first, scaling=0.1, length=33, mask=mask.double(), dtype=torch.float64
    )
    placed: Any = [x.to(device) for x in (query, first, mask)]
    rooms = moved(heads, device)
    found = part.attend(placed[0], rooms, rooms, placed[1], scaling=0.1, length=33, mask=placed[2])
    assert (found.cpu().double() - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_fragments_add_up_long_shares(bits: int, dtype: torch.dtype, device: torch.device, monkeypatch):
    """A program for all tokens, alike in weight: what matrix instructions cut off must not add up."""
    monkeypatch.setattr(triton_fragments, "_shares", lambda *_: 1)
    first = torch.tensor([0])
    keys, values = (kv_cache.empty((1, 1, 1 << 14, 128), bits) for _ in range(2))
    for room, seed in ((keys, 2), (values, 3)):
        torch_ops.store(room, states(1, 1, 1 << 14, 128, seed=seed), 0, first)
    query = states(1, 4, 128, dtype=dtype)
    expected = reference.attend(
        query.double(), keys, values, first, scaling=0.02, length=1 << 14, dtype=torch.float64
    )
    found = triton_fragments.attend(
        query.to(device), moved(keys, device), moved(values, device), first.to(device),
        scaling=0.02, length=1 << 14,
    )  # fmt: skip
    error = (found.cpu().double() - expected).norm() / expected.norm()
    assert error < {torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]


def test_shares_keep_a_card_busy_and_are_not_more_than_there_are_steps(monkeypatch):
    monkeypatch.setattr(shares, "multiprocessors", lambda _: 132)
    cpu, count = torch.device("cpu"), shares.share_count.__wrapped__
    assert count("kv_cache.attend", 32_768, 8, 64, cpu) == 64
    assert count("kv_cache.attend", 32_768, 8 * 16, 64, cpu) == 5
    assert count("kv_cache.attend", 100, 8, 64, cpu) == 2
    assert count("kv_cache.attend", 32_768, 10_000, 64, cpu) == 1


# The cache of a model


class Rounded(DynamicCache):
    """Dense keys and values of the same worth: an independent form to compare with."""

    def __init__(self, config: Any, bits: int, first: Tensor, form: str) -> None:
        super().__init__(config=config)
        self.bits, self.first, self.form = bits, first.tolist(), form
        self.states = [(torch.zeros(0), torch.zeros(0))] * config.num_hidden_layers
        self.rates = [
            channel_rates(config, layer, config.hidden_size // config.num_attention_heads)
            for layer in range(config.num_hidden_layers)
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **more: Any
    ) -> Any:
        """Round all tokens so far again, from the original numbers, and add the new ones."""
        tokens = key_states.shape[2]
        new = key_states, value_states
        both = self.states[layer_idx] = tuple(  # type: ignore[assignment]
            torch.cat([old, x], 2) if old.numel() else x
            for old, x in zip(self.states[layer_idx], new, strict=True)
        )
        keys = self.rounded(both[0], self.rates[layer_idx])
        values = self.rounded(both[1], None)
        return super().update(keys[:, :, -tokens:], values[:, :, -tokens:], layer_idx, *rest, **more)

    def rounded(self, x: Tensor, rates: ChannelRates | None) -> Tensor:
        """What x [B, H, N, width] becomes, text by text."""
        repeats = len(x) // len(self.first)
        starts = [first for first in self.first for _ in range(repeats)]
        of_text = plain_rounded if self.form == "a4.8" else rotated_rounded
        return torch.stack([of_text(*text, self.bits, rates) for text in zip(x, starts, strict=True)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.states = [(k[beam_idx], v[beam_idx]) for k, v in self.states]


def plain_rounded(x: Tensor, first: int, bits: int, rates: ChannelRates | None) -> Tensor:
    each = torch.where((torch.arange(x.shape[1]) == first) & (bits == 3), 4, bits)
    return quantize_heads(x, each, scale_dtype=torch.bfloat16).dequantize()


def rotated_rounded(x: Tensor, first: int, bits: int, rates: ChannelRates | None) -> Tensor:
    """x [H, N, width]: six tokens from `first` on as they are, and keys less the mean of five of them.

    That mean is turned from about token 3 to the middle of the first 128 tokens.
    """
    center = torch.zeros_like(x)
    if rates is not None and x.shape[1] > first + 6:
        a, b, c, d, e = x[:, first + 1 : first + 6].unbind(1)
        mean = (a + b + c + d + e) * (1 / 5) * rates.still(512)
        angle = rates.rates * (127 / 2 - 3)
        cos, sin = angle.cos().float(), angle.sin().float()
        one, other = mean[:, : 2 * len(angle)].chunk(2, -1)
        turned = torch.cat([one * cos - other * sin, other * cos + one * sin, mean[:, 2 * len(angle) :]], -1)
        center[:, first + 6 :] = turned[:, None]
    coded = (
        hadamard(quantize_groups(hadamard(x - center), bits, 64 if rates is None else 32).dequantize())
        + center
    )
    coded[:, first : first + 6] = x[:, first : first + 6]
    return coded


def logits(model: PreTrainedModel, ids: Tensor, cache: Any, parts: list[int], **options: Any) -> Tensor:
    """Of `ids`, fed in parts of these lengths."""
    with torch.no_grad():
        return torch.cat(
            [model(part, past_key_values=cache, **options).logits for part in ids.split(parts, 1)], 1
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [*BITS, 6, 2])
def test_tokens_attend_to_rounded_keys_and_values(model: PreTrainedModel, ids: Tensor, bits: int, form: Any):
    rounded = Rounded(model.config, bits, torch.zeros(1, dtype=torch.int64), form)
    expected = logits(model, ids, rounded, [20])
    assert torch.equal(logits(model, ids, KVCache(model.config, bits, form=form), [20]), expected)
    plain = logits(model, ids, None, [20])
    assert not torch.allclose(plain, expected, atol=1e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_token_by_token_is_as_all_at_once(
    model: PreTrainedModel, ids: Tensor, bits: int, static: bool, monkeypatch
):
    """Through several rooms, and past the window. (In the form "rotated" roundings of sums move codes.)"""
    monkeypatch.setattr(kv_layers, "GROWTH", 4)
    expected = logits(model, ids, KVCache(model.config, bits, form="a4.8"), [20])
    cache = KVCache(model.config, bits, max_length=24 if static else None, form="a4.8")
    for _ in range(2):
        found = logits(model, ids, cache, [5, 1, 1, 6, *[1] * 7])
        assert torch.allclose(found, expected, atol=2e-4)
        assert int(cache.get_seq_length()) == 20
        cache.reset()
        assert int(cache.get_seq_length()) == 0


def test_a_window_is_all_that_is_kept(ids: Tensor, monkeypatch):
    monkeypatch.setattr(kv_layers, "GROWTH", 4)
    model = MODELS["sliding window"]().eval()
    cache = KVCache(model.config, 3)
    logits(model, ids, cache, [1] * 20)
    layer = cache.layers[0]
    assert layer.key_heads.capacity <= WINDOW + 4
    assert layer.end - layer.start == WINDOW - 1
    with pytest.raises(RuntimeError, match="call activate_past_recording first"):
        cache.crop(-1)


@pytest.mark.parametrize("kind", ["llama", "sliding window"])
def test_cropping_takes_tokens_back(kind: str, ids: Tensor):
    torch.manual_seed(3)
    model = MODELS[kind]().eval()
    cache = KVCache(model.config, 3)
    for layer in cache.layers:
        layer.activate_past_recording()
    logits(model, ids.flip(0), cache, [20])
    cache.crop(-20)
    logits(model, ids[:, :16], cache, [13, 3])
    cache.crop(-4)
    assert cache.get_seq_length() == 12
    expected = logits(model, ids, KVCache(model.config, 3), [20])[:, 12:]
    assert torch.allclose(logits(model, ids[:, 12:], cache, [8]), expected, atol=1e-4)
    with pytest.raises(RuntimeError, match="a static cache cannot be cropped"):
        KVCache(model.config, 3, max_length=9).crop(-1)


@pytest.mark.parametrize("form", FORMS)
def test_the_first_token_is_the_first_that_is_no_padding(llama: PreTrainedModel, ids: Tensor, form: Any):
    padded = torch.cat([torch.zeros(2, 6, dtype=torch.int64), ids], 1)
    padded[1, :6] = torch.arange(1, 7)  # this text is longer
    mask = (padded != 0).long()
    where = (mask.cumsum(-1) - 1).clamp(min=0)

    def of(cache: KVCache) -> Tensor:
        return logits(llama, padded, cache, [26], attention_mask=mask, position_ids=where)

    found = of(KVCache(llama.config, 3, attention_mask=mask, form=form))
    alone = logits(llama, ids[:1], KVCache(llama.config, 3, form=form), [20])
    assert torch.allclose(found[:1, 6:], alone, atol=2e-4)
    assert torch.allclose(
        found[1:], logits(llama, padded[1:], KVCache(llama.config, 3, form=form), [26]), atol=2e-4
    )
    assert not torch.allclose(of(KVCache(llama.config, 3, form=form))[:1, 6:], alone, atol=1e-2)
    with pytest.raises(UsageError, match="is of 2 texts, and the model is given 3"):
        KVCache(llama.config, 3, attention_mask=mask, form=form).form.first_tokens(3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 1}], ids=["beams", "greedy"])
def test_transformers_generates_with_it(
    model: PreTrainedModel, ids: Tensor, settings: dict[str, int], form: Any
):
    padded = ids.clone()
    padded[0, :4] = 0
    mask = (padded != 0).long()
    first = mask.argmax(-1)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, **settings}
    expected = model.generate(padded, past_key_values=Rounded(model.config, 3, first, form), **options)
    cache = KVCache(model.config, 3, attention_mask=mask, form=form)
    found = model.generate(padded, past_key_values=cache, **options)
    assert torch.equal(found, expected)


def test_texts_are_chosen_and_repeated(llama: PreTrainedModel, ids: Tensor):
    cache = KVCache(llama.config, 3)
    logits(llama, ids[:, :10], cache, [10])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    expected = logits(llama, ids.flip(0), KVCache(llama.config, 3), [20])[:, 10:]
    assert torch.allclose(logits(llama, ids.flip(0)[:, 10:], cache, [10]), expected, atol=1e-4)
    assert cache.layers[0].batch_size == 2


def test_memory_is_counted_with_its_room(llama: PreTrainedModel, ids: Tensor):
    cache = KVCache(llama.config, 4)
    assert cache.nbytes == 0
    logits(llama, ids, cache, [20])
    texts, layers, heads, whole = 2, 2, 2, 6 * 16 * 4
    path = 16 + 2 * 2 * 16 * 4  # of all layers: the channels of a center, and angles for 256 tokens
    fixed = layers * (texts * heads * (2 * whole + 16 * 4)) + path
    assert cache.nbytes == fixed + 2 * layers * texts * heads * kv_layers.GROWTH * (8 + 2)
    static = KVCache(llama.config, 4, max_length=30, form="a4.8")
    logits(llama, ids, static, [20])
    assert static.nbytes == 2 * 2 * 2 * 2 * 30 * (8 + 2)


def test_a_cache_is_gone_with_its_last_name(llama: PreTrainedModel, ids: Tensor):
    """Evaluation makes one a batch: none may wait for the garbage collector."""
    cache = KVCache(llama.config, 3)
    logits(llama, ids, cache, [19, 1])
    words = weakref.ref(cache.layers[0].key_heads.words)
    gc.disable()
    try:
        del cache
        assert words() is None
    finally:
        gc.enable()


def test_models_without_such_a_cache_are_refused(ids: Tensor):
    if transformers_version >= "5":  # 4.57 does not tell what such layers keep
        with pytest.raises(NeuzipError, match="falcon_h1: layer 0 keeps a LinearAttentionAndF") as refusal:
            KVCache(FalconH1Config(num_hidden_layers=1), 3)
        assert refusal.value.hint is not None and "`kv_bits`" in refusal.value.hint
    mamba = MambaForCausalLM(MambaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(NeuzipError):
        HeadedModel(mamba.eval(), kv_bits=3)
    with pytest.raises(UsageError, match="`bits=9`"):
        KVCache(LlamaConfig(), 9)


# Attention that reads the packed form


@contextmanager
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """As on a GPU, on CPU tensors: how often the kernel ran."""
    calls: list[int] = []

    def attend(*given: Any, **named: Any) -> Tensor:
        calls.append(1)
        return triton_attend.attend(*given, **named)

    def store(
        heads: Sequence[Heads], x: Sequence[Tensor], at: Any, first: Tensor, *, with_first: bool
    ) -> None:
        triton_store.store(heads, x, at, first)

    with monkeypatch.context() as patch:
        patch.setattr(runtime_module, "not_readable", lambda model: None)
        patch.setattr(kv_cache, "attend", attend)
        patch.setattr(kv_cache, "store", store)
        yield calls


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_attends_by_the_kernel(
    form: Any, model: PreTrainedModel, ids: Tensor, static: bool, monkeypatch
):
    expected = logits(model, ids, KVCache(model.config, 3, form=form), [20])
    cache = KVCache(model.config, 3, max_length=24 if static else None, form=form)
    before = model.config._attn_implementation
    with interpreted(monkeypatch) as calls, cache.attention(model):
        found = logits(model, ids, cache, [18, 1, 1])
    assert torch.allclose(found, expected, atol=2e-4)
    assert len(calls) == 2 * 2
    assert cache.how == BY_A_KERNEL
    assert model.config._attn_implementation == before


@pytest.mark.slow
def test_padded_texts_attend_by_the_kernel(llama: PreTrainedModel, ids: Tensor, monkeypatch):
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    made = [KVCache(llama.config, 3, attention_mask=mask, form="a4.8") for _ in range(2)]
    expected = llama.generate(ids, past_key_values=made[0], **options)
    with interpreted(monkeypatch) as calls, made[1].attention(llama):
        found = llama.generate(ids, past_key_values=made[1], **options)
    assert torch.equal(found, expected)
    assert calls


def test_what_the_kernel_does_not_do_is_said(llama: PreTrainedModel, ids: Tensor, monkeypatch):
    assert not_readable(llama) == "the kernel is for GPUs"
    cache = KVCache(llama.config, 3, form="a4.8")
    with cache.attention(llama):
        assert not cache.form.reads_packed
    assert cache.how == "dequantised, then the model's own attention: the kernel is for GPUs"
    with interpreted(monkeypatch) as calls, cache.attention(llama):
        pass
    kept = KVCache(llama.config, 3, form="a4.8")
    llama.train()  # attention_dropout is 0, the call below asks for some
    packed = kept.layers[0]
    with interpreted(monkeypatch) as calls, kept.attention(llama):
        packed.update(states(1, 2, 5, 16), states(1, 2, 5, 16))
        keys, values = packed.update(states(1, 2, 1, 16), states(1, 2, 1, 16))
        kv_attention._attend(llama.model.layers[0].self_attn, states(1, 4, 1, 16), keys, values, None, 0.5)
    assert not calls
    assert kept.how.endswith("it drops out weights")


def test_fast_loop_gives_the_tokens_of_transformers(model: PreTrainedModel, ids: Tensor):
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, past_key_values=KVCache(model.config, 4), **settings)
    decoder = GreedyDecoder(model, 2, 30, kv_bits=4)
    assert torch.equal(decoder.generate(ids, 10), expected[:, 20:])
    plain = GreedyDecoder(model, 2, 30)
    plain.generate(ids, 2)
    codes = plain.cache_bytes * (8 + 2) // 64
    assert codes < decoder.cache_bytes < codes + plain.cache_bytes * 7 // 30 + 64
    assert (decoder.attention is not None, plain.attention) == (True, None)


# Figures and commands


@pytest.mark.slow
def test_quality_falls_with_the_bits():
    model = load_model(CHECKPOINT, torch.float32)
    task = prepare([CHECKPOINT], read_text("demo"), conventions=["token"], max_tokens=1000, device="cpu")
    reading = task.readings[0]

    def divergence(bits: int | None, form: Any = "rotated") -> float:
        other = HeadedModel(model, kv_bits=bits, kv_form=form)
        found = compare(HeadedModel(model), other, reading.ids, reading.windows, reading.blocks)
        return found.summary().kld.mean.value

    assert divergence(None) == 0
    eight, four, three = (divergence(bits) for bits in BITS)
    assert 0 < 50 * eight < four < three / 2 < 0.05
    assert three < divergence(3, "a4.8")


def test_only_the_compressed_side_has_few_bits():
    task = prepare(
        [CHECKPOINT, CHECKPOINT], read_text("demo"), conventions=["token"], max_tokens=600, device="cpu",
        kv_bits=3,
    )  # fmt: skip
    found = evaluate(task, divergence=True)
    assert [model.kv_bits for model in found.models] == [None, 3]
    assert found.comparison is not None and 0.005 < found.comparison.kld.mean.value < 0.1
    plain = evaluate(
        prepare([CHECKPOINT], read_text("demo"), conventions=["token"], max_tokens=600, device="cpu")
    )
    nll = [score.nll.value for score in found.measured[0].scores]
    assert nll[0] == pytest.approx(plain.measured[0].scores[0].nll.value, abs=1e-5)
    assert nll[1] != pytest.approx(nll[0], abs=1e-5)


TEXT = ("--text", "demo", "--max-tokens", 300, "--conventions", "token", "--device", "cpu")


def test_eval_says_what_it_compared(neuzip):
    said = neuzip("eval", CHECKPOINT, "--original", CHECKPOINT, "--kv-bits", 3, *TEXT)
    assert (
        "cache   after with a KV cache in 3 bits; the first 6 tokens of a window are not quantised\n"
        in said.stdout
    )
    assert "KL divergence, nats: mean" in said.stdout
    answer = neuzip("eval", CHECKPOINT, "--kv-bits", 8, *TEXT, "--json").json
    assert (answer["after"]["kv_bits"], answer["before"]) == (8, None)
    assert answer["after"]["kv_form"] == "rotated"
    plain = neuzip("eval", CHECKPOINT, "--kv-bits", 3, "--kv-form", "a4.8", *TEXT)
    assert "in 3 bits, in the form a4.8; the first token of a window keeps 4\n" in plain.stdout


def test_generate_says_what_its_cache_took(neuzip):
    said = neuzip(
        "generate", CHECKPOINT, "--prompt", "The", "--max-new-tokens", 4, "--kv-bits", 4, "--device", "cpu"
    )
    assert "KV cache in 4 bits, " in said.stderr
    assert "attention: dequantised, then the model's own attention: the kernel is for GPUs" in said.stderr
    answer = neuzip(
        "generate", CHECKPOINT, "--prompt", "The", "--max-new-tokens", 4, "--kv-bits", 4, "--device", "cpu",
        "--json",
    ).json  # fmt: skip
    # First tokens in bf16, the center of keys; its channels and angles for 256 tokens, of all layers
    fixed = 6 * (2 * (2 * 6 * 32 * 2 + 32 * 4)) + 32 + 2 * 2 * 32 * 4
    assert (answer["kv_bits"], answer["kv_bytes"]) == (4, fixed + 6 * 2 * 2 * kv_layers.GROWTH * (16 + 2))


@pytest.mark.slow
def test_bench_measures_both_caches(neuzip):
    short = ("--batch", 1, "--prompt-tokens", 8, "--new-tokens", 3, "--rounds", 1, "--device", "cpu")
    said = neuzip("bench", CHECKPOINT, "--residency", "dense", "--kv-bits", 3, "--kv-form", "a4.8", *short)
    # 11 tokens, 6 layers, 2 heads of keys and of values: 64 bytes in bf16; 12 + 2 in 3 bits, 4 for the first
    assert "KV cache     unquantised 16.9 kB, 3 bits 3.79 kB (0.22), at batch 1\n" in said.stdout
    assert "KV reading   dequantised, then the model's own attention: the kernel is for GPUs\n" in said.stdout
    assert [line.split("  ")[0] for line in said.stdout.splitlines() if line.startswith("dense")] == [
        "dense", "dense, KV 3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("eval", CHECKPOINT, "--text", "demo", "--tasks", "x", "--kv-bits", "3"),
            "--kv-bits 3 does not apply to --tasks",
        ),
        (("generate", CHECKPOINT, "--prompt", "x", "--kv-bits", "9"), "have 1 to 8 bits, not 9"),
    ],
    ids=["tasks", "nine"],
)
def test_wrong_use(arguments: tuple[Any, ...], message: str, neuzip):
    said = neuzip(*arguments)
    assert (said.exit_code, said.stdout) == (2, "")
    assert message in said.stderr


@pytest.mark.weekly
def test_a_trained_model_loses_what_the_docstring_says(neuzip_data: Path):
    """quantizers.kv cites benchmarks/results/kv_cache-wikilm-26m.json; here on fewer tokens."""
    path = neuzip_data / "wikilm-26m"
    text = read_text(str(neuzip_data / "wikitext-2" / "wiki.test.raw"))
    task = prepare(
        [path, path], text, conventions=["token"], max_tokens=500, device="cpu", kv_bits=3,
        kv_form="a4.8",
    )  # fmt: skip
    comparison = evaluate(task, divergence=True).comparison
    assert comparison is not None and 0.03 < comparison.kld.mean.value < 0.055


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "bits"), [(64, 3), (64, 8), (80, 4), (128, 3), (128, 4), (256, 8)])
def test_a_gpu_stores_and_attends_as_the_reference(width: int, bits: int, device: torch.device):
    first = torch.tensor([5, 0, 700])
    x = [states(3, 4, 1000, width, seed=seed, dtype=torch.bfloat16) for seed in (2, 4)]
    rooms = [kv_cache.empty((3, 4, 1024, width), bits) for _ in x]
    cards = [kv_cache.empty((3, 4, 1024, width), bits, device=device) for _ in x]
    for heads, card, numbers in zip(rooms, cards, x, strict=True):
        kv_cache.store([heads], [numbers], 0, first)
        kv_cache.store([card], [numbers.to(device)], 0, first.to(device))
        assert same_bits(heads, card)
        dense = kv_cache.load(card, first.to(device), torch.bfloat16)
        assert torch.equal(dense.cpu(), kv_cache.load(heads, first, torch.bfloat16))
    for dtype, most in ((torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.float32, 2e-6)):
        query = states(3, 16, width, dtype=dtype)
        expected = reference.attend(
            query.double(), *rooms, first, scaling=width**-0.5, length=1000, dtype=torch.float64
        )
        given = (query.to(device), *cards, first.to(device))
        options = {"scaling": width**-0.5, "length": torch.tensor(1000, device=device)}
        found = [kv_cache.attend(*given, **options) for _ in range(2)]
        assert torch.equal(*found)
        assert (found[0].cpu().double() - expected).norm() / expected.norm() < most


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("form", FORMS)
def test_graphs_and_launches_give_the_same_tokens(
    bits: int, model: PreTrainedModel, ids: Tensor, form: Any, device
):
    model = model.to(device, torch.bfloat16)
    options: dict[str, Any] = {"kv_bits": bits, "kv_form": form}
    decoders = [GreedyDecoder(model, 2, 60, graph=graph, **options) for graph in (True, False)]
    found = [decoder.generate(ids.to(device), 30) for decoder in decoders]
    assert torch.equal(*found)
    assert [decoder.graphed for decoder in decoders] == [True, False]
    assert {decoder.attention for decoder in decoders} == {BY_A_KERNEL}
    assert torch.equal(decoders[0].generate(ids.to(device), 30), found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_a_gpus_logits_are_near_those_of_dense_attention(
    form: Any, model: PreTrainedModel, ids: Tensor, device
):
    """Token by token through the kernel, against the prompt at once, in fp32."""
    model, ids = model.to(device), ids.to(device)
    expected = logits(model, ids, KVCache(model.config, 3, form=form), [20])
    cache = KVCache(model.config, 3, form=form)
    with cache.attention(model):
        found = logits(model, ids, cache, [5, *[1] * 15])
    assert cache.how == BY_A_KERNEL
    assert torch.allclose(found, expected, atol=2e-3)


def test_what_does_not_fit_is_dropped(device: torch.device):
    """A full cache whose position is on the device: the next head's tokens stay what they are."""
    heads = kv_cache.empty((1, 2, 4, 32), 4, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    triton_store.store([heads], [torch.randn(1, 2, 4, 32, device=device)], 0, first)
    before = heads.words.clone(), heads.scale.clone()
    one = torch.randn(1, 2, 1, 32, device=device)
    triton_store.store([heads], [one], torch.tensor(4, device=device), first)
    assert torch.equal(heads.words, before[0])
    assert torch.equal(heads.scale, before[1])
    query = torch.randn(1, 4, 32, device=device)
    lengths = [torch.tensor(length, device=device) for length in (4, 40)]
    full, beyond = (
        triton_attend.attend(query, heads, heads, first, scaling=0.2, length=length) for length in lengths
    )
    assert torch.equal(full, beyond)


def test_what_a_window_let_go_of_cannot_come_back():
    layer = kv_layers.KVLayer(kv_layers.CacheFormat(kv_layers.FORMS["rotated"], None), LayerBits(8, 8), 3)
    layer.update(torch.randn(1, 1, 7, 32), torch.randn(1, 1, 7, 32))
    layer.activate_past_recording()
    with pytest.raises(RuntimeError, match="the last 3 of 7 tokens cannot be taken off"):
        layer.crop(-3)
    assert layer.get_seq_length() == 7
