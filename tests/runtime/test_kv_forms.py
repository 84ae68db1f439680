"""Keys and values in groups of rotated heads: the same bits however they come, and odd heads."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    DynamicCache,
    GlmConfig,
    GPT2Config,
    LlamaConfig,
    SmolLM3Config,
    StableLmConfig,
)

from neuzip.errors import UsageError
from neuzip.kernels import kv_cache
from neuzip.kernels.kv_cache import CenterPath, Heads, reference
from neuzip.kernels.kv_cache.ops import OF_TEXTS, OF_TOKENS
from neuzip.kernels.quantizers import block_width, hadamard, quantize_groups, quantize_heads
from neuzip.kernels.quantizers.kv_groups import COVER, SCALE_NAN, scales
from neuzip.runtime.hf.kv_cache import KVCache
from neuzip.runtime.hf.kv_layers import FORMS, CacheFormat, KVLayer, StaticKVLayer
from neuzip.runtime.hf.rotary import CenterPaths, channel_rates
from neuzip.runtime.kv_bits import LayerBits

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTHS = (64, 80, 96, 112, 128, 192, 256)
BITS = (8, 6, 4, 3, 2)


def states(*shape: int, seed: int = 0) -> Tensor:
    """Numbers with an outlier channel, and one that is far from 0 in all tokens."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., 3] *= 20
    x[..., 5] += 9
    return x


def room(shape: tuple[int, int, int, int], bits: int, **options: Any) -> Heads:
    options = {"group": 32, "whole": 4, "path": CenterPath.of(torch.arange(shape[3]) % 2 == 1), **options}
    return kv_cache.empty(shape, bits, **options)


def same_bits(a: Heads, b: Heads, tokens: slice = slice(None)) -> bool:
    held = [name for name in OF_TOKENS + OF_TEXTS if getattr(a, name) is not None]
    assert held == [name for name in OF_TOKENS + OF_TEXTS if getattr(b, name) is not None]
    a, b = a.tokens_changed(lambda x: x[:, :, tokens]), b.tokens_changed(lambda x: x[:, :, tokens])
    pairs = [(getattr(a, name), getattr(b, name)) for name in held]
    return all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in pairs)


# The rotation


@pytest.mark.parametrize("width", WIDTHS)
def test_the_transform_is_orthonormal_and_its_own_inverse(width: int):
    x = states(50, width)
    turned = hadamard(x)
    block = block_width(width)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    expected = (x.double().unflatten(-1, (-1, block)) @ (matrix / math.sqrt(block))).flatten(-2)
    bound = 2.0**-22 * x.double().norm(dim=-1, keepdim=True) * math.log2(block)
    assert bool(((turned - expected).abs() <= bound).all())
    assert bool(((hadamard(turned) - x).abs() <= 2 * bound).all())


def test_the_transform_takes_what_there_is():
    assert hadamard(torch.zeros(0, 64)).shape == (0, 64)
    assert hadamard(torch.ones(2, 0)).shape == (2, 0)
    assert torch.equal(hadamard(torch.tensor([[3.0]])), torch.tensor([[3.0]]))
    strided = states(64, 6).T
    assert torch.equal(hadamard(strided), hadamard(strided.contiguous()))


# Groups


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [16, 32, 64, 80])
def test_groups_are_half_a_step_off_at_most_within_what_codes_cover(bits: int, group: int):
    x = states(100, 80)
    quantized = quantize_groups(x, bits, group)
    assert quantized.scale.shape == quantized.zero.shape == (100, -(-80 // group))
    assert quantized.scale.dtype == torch.uint8 and quantized.zero.dtype == torch.int8
    step = scales(quantized.scale).repeat_interleave(group, -1)[:, :80]
    off = (quantized.dequantize() - x).abs() / step
    inside = (quantized.codes > 0) & (quantized.codes < (1 << bits) - 1)
    assert off[inside].max() <= 0.5 + 1e-3
    # The ends are cut where COVER says, and where the middle of a group is rounded.
    cut = (1 - COVER[bits]) / COVER[bits] * ((1 << bits) - 1) / 2
    assert off.max() <= 0.5 + cut + max(0.5, 2.0 ** (bits - 8)) + 1e-3


def test_a_scale_byte_is_the_next_above():
    numbers = scales(torch.arange(256, dtype=torch.uint8))
    assert numbers[0] == 0 and numbers[255].isnan()
    assert bool((numbers[9:248] > numbers[8:247]).all())
    assert numbers[8] == 2.0**-19 and numbers[247] == 1920
    assert numbers[8 * 20] == 1 and numbers[8 * 20 + 4] == 1.5
    for x, scale in ((15.0, 1.0), (15.01, 1.125), (0.0, 0.0), (1e-30, 2.0**-19)):
        # Codes of 8 bits cover all of -x / 2 to x / 2; a step is x / 255.
        found = quantize_groups(torch.tensor([[-x / 2, x / 2]]) * 17, 8, 32).scale
        assert scales(found).item() == scale


def test_odd_groups():
    for bits in BITS:
        zeros = quantize_groups(torch.zeros(2, 64), bits, 32)
        assert not zeros.codes.any() and not zeros.scale.any() and not zeros.dequantize().any()
        assert quantize_groups(torch.zeros(0, 64), bits, 32).codes.shape == (0, 64)
        constant = quantize_groups(torch.full((1, 40), -2.5), bits, 32).dequantize()
        step = 2 * 1.25 / ((1 << bits) - 1)  # a group far from 0 has half its middle as half its range
        assert bool(((constant + 2.5).abs() <= step).all())
        denormal = quantize_groups(torch.tensor([[1e-40, -1e-40]]), bits, 32).dequantize()
        assert denormal.abs().max() <= 2.0**-19 * (1 << bits)
        for bad in (torch.nan, torch.inf, -torch.inf, 3e38):
            x = states(2, 64)
            x[0, 1] = bad
            quantized = quantize_groups(x, bits, 32)
            back = quantized.dequantize()
            assert quantized.scale[0, 0] == SCALE_NAN and back[0, :32].isnan().all()
            assert back[0, 32:].isfinite().all() and back[1].isfinite().all()
    with pytest.raises(ValueError, match="1 to 8 bits, not 32 in 9"):
        quantize_groups(torch.ones(2, 64), 9, 32)


def test_an_outlier_channel_does_not_drown_the_others():
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    x[:, 3] = 50.0
    others = torch.arange(64) != 3

    def loss(back: Tensor) -> float:
        return ((back - x)[:, others].square().mean()).item()

    plain = loss(quantize_heads(x, 4).dequantize())
    assert loss(hadamard(quantize_groups(hadamard(x), 4, 32).dequantize())) < plain / 20


# What is stored


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", BITS)
def test_one_by_one_stores_the_bits_of_all_at_once(bits: int, width: int):
    """Padded on the left, in pieces that cut the whole tokens, with a position on the device."""
    x, first = states(2, 2, 23, width).bfloat16(), torch.tensor([6, 0])
    once, pieces = room((2, 2, 30, width), bits), room((2, 2, 30, width), bits)
    kv_cache.store([once], [x], 2, first + 2)
    at = 0
    for part in x.split([7, 1, 1, 3, *[1] * 11], 2):
        with_first = at < 6 + 4
        kv_cache.store([pieces], [part], torch.tensor(2 + at), first + 2, with_first=with_first)
        at += part.shape[2]
    assert same_bits(once, pieces)
    back = kv_cache.load(once, first + 2, torch.float32)
    for text, begin in enumerate((8, 2)):
        assert torch.equal(back[text, :, begin : begin + 4], x[text, :, begin - 2 : begin + 2].float())
    off = (back[:, :, 12:25] - x[:, :, 10:]).norm() / x[:, :, 10:].norm()
    assert 0 < off < 2.0 ** (1 - bits)


@pytest.mark.parametrize("group", [32, None])
def test_blocks_are_read_and_written_as_a_whole(group: int | None, monkeypatch):
    """Blocks that cut the whole tokens, and texts whose first token is not there any more."""
    x, found = states(2, 2, 50, 80), []
    for numbers in (1 << 30, 7 * 2 * 2 * 80):
        monkeypatch.setattr("neuzip.kernels.kv_cache.ops.BLOCK", numbers)
        heads = room((2, 2, 60, 80), 3, group=group)
        kv_cache.store([heads], [x], 4, torch.tensor([9, 40]))
        loaded = [kv_cache.load(heads, torch.tensor([9, 40]), torch.float32)]
        loaded += [kv_cache.load(heads.tokens(11, 57), torch.tensor(first), torch.bfloat16)
                   for first in ([-2, 29], [-11, 44])]  # fmt: skip
        found.append((heads, loaded))
    (one, dense), (other, pieces) = found
    assert same_bits(one, other)
    assert all(torch.equal(a, b) for a, b in zip(dense, pieces, strict=True))
    if group is not None:
        assert torch.equal(dense[0][0, :, 9:13], x[0, :, 5:9].bfloat16().float())
        assert torch.equal(dense[1][0, :, :2], x[0, :, 7:9].bfloat16())


def test_padding_changes_no_bits():
    x = states(1, 2, 20, 64)
    alone, padded = room((1, 2, 30, 64), 4), room((1, 2, 30, 64), 4)
    kv_cache.store([alone], [x], 0, torch.tensor([0]))
    kv_cache.store([padded], [torch.cat([states(1, 2, 7, 64, seed=9), x], 2)], 0, torch.tensor([7]))
    assert same_bits(alone.tokens(0, 20), padded.tokens(7, 27))


def test_the_mean_of_the_whole_tokens_is_taken_from_still_channels():
    x = states(1, 1, 9, 64)
    heads = room((1, 1, 9, 64), 4)
    kv_cache.store([heads], [x], 0, torch.tensor([0]))
    kept = x[0, 0, 1:4].bfloat16().float()
    center = (kept[0] + kept[1] + kept[2]) * (1 / 3)
    center[0::2] = 0
    assert heads.center is not None and torch.equal(heads.center[0, 0], center)
    turned = hadamard(x[0, 0, 4:] - center)
    expected = hadamard(quantize_groups(turned, 4, 32).dequantize()) + center
    assert torch.equal(kv_cache.load(heads, torch.tensor([0]), torch.float32)[0, 0, 4:], expected)


def test_a_center_turns_from_block_to_block():
    """Against complex numbers in fp64; behind the last block of the table it stays."""
    rates = torch.tensor([0.01, 0.002]).double()
    every = torch.ones(6, dtype=torch.bool)
    path = CenterPath.of(every, rates=rates, begin=1, block=64, tokens=200, origin=2.5)
    center = torch.tensor([[5.0, 3.0, -1.0, 0.5, 2.0, 7.0]])
    pairs = torch.complex(center[0, 1:3].double(), center[0, 3:5].double())
    for block in (0, 1, 3, 4):
        turned = pairs * torch.polar(torch.ones(2).double(), rates * (min(block, 3) * 64 + 31.5 - 2.5))
        expected = torch.cat([center[0, :1], turned.real.float(), turned.imag.float(), center[0, 5:]])
        assert torch.allclose(path.at(center, block, block + 1)[0, 0], expected, atol=1e-6)
    assert path.nbytes == 6 + 4 * 2 * 6 * 4
    with pytest.raises(ValueError, match="`block=63`: a block of a center has 64 tokens or more"):
        CenterPath.of(every, block=63)


def test_a_part_that_keys_have_in_common_is_subtracted_far_into_a_text():
    """What a rotary embedding makes of it: half a turn in 2,048 tokens, after which its mean is far off."""
    tokens, pairs = 2048, 32
    rates = torch.full((pairs,), math.pi / tokens, dtype=torch.float64)
    turned = 8 * torch.polar(torch.ones(tokens, pairs).double(), torch.arange(tokens)[:, None] * rates)
    x = torch.randn(1, 1, tokens, 2 * pairs, generator=torch.Generator().manual_seed(0))
    x += torch.cat([turned.real, turned.imag], -1).float()
    still = torch.ones(2 * pairs, dtype=torch.bool)
    lost = {}
    for name, path in (
        ("turns", CenterPath.of(still, rates=rates, block=256, tokens=tokens, origin=2.0)),
        ("stays", CenterPath.of(still)),
    ):
        heads = room((1, 1, tokens, 2 * pairs), 4, path=path)
        kv_cache.store([heads], [x], 0, torch.tensor([0]))
        off = (kv_cache.load(heads, torch.tensor([0]), torch.float32) - x)[0, 0].square().mean(1)
        lost[name] = float(off[-256:].mean() / off[4:256].mean())
    assert lost["turns"] < 1.1 and lost["stays"] > 4


def test_every_byte_is_counted():
    heads = room((2, 3, 50, 128), 4)
    assert heads.nbytes == 2 * 3 * (50 * (64 + 2 * 4) + 4 * 128 * 2 + 128 * 4)
    values = kv_cache.empty((2, 3, 50, 80), 3, group=64, whole=4)
    assert values.nbytes == 2 * 3 * (50 * (4 * (5 + 3) + 2 * 2) + 4 * 80 * 2)


def test_reference_attends_to_the_numbers_that_are_loaded():
    first = torch.tensor([3, 0])
    keys, values = room((2, 2, 30, 64), 4), room((2, 2, 30, 80), 4, group=64, path=None)
    for heads, seed in ((keys, 1), (values, 2)):
        kv_cache.store([heads], [states(2, 2, 30, heads.width, seed=seed)], 0, first)
    query = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(3))
    mask = torch.arange(30) >= first[:, None]
    k, v = (kv_cache.load(heads, first, torch.float32).repeat_interleave(2, 1) for heads in (keys, values))
    logits = (0.1 * query[:, :, None] @ k.mT).masked_fill(~mask[:, None, None], -torch.inf)
    found = reference.attend(query, keys, values, first, scaling=0.1, length=30, mask=mask)
    assert torch.allclose(found, (logits.softmax(-1) @ v)[:, :, 0], atol=1e-5)


# Layers


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_layers_of_all_kinds_keep_the_same_bits(name: Any, bits: int, monkeypatch):
    """A growing layer, one of fixed size and a sliding one; at once, and token by token.

    The last tokens of both texts are in the second block of centers, and the first of them come one by one.
    """
    monkeypatch.setattr("neuzip.runtime.hf.kv_layers.GROWTH", 4)
    config, first = LlamaConfig(hidden_size=128, num_attention_heads=2), torch.tensor([5, 0])
    keys, values = states(2, 2, 72, 64), states(2, 2, 72, 64, seed=1)
    form = replace(FORMS[name], center_block=64)

    def made(kind: type[KVLayer], parts: list[int], *options: Any) -> tuple[Tensor, Tensor]:
        path_of = partial(CenterPaths(form.still_wavelength, form.center_block, form.whole).path, config, 0)
        layer = kind(CacheFormat(form, first), LayerBits(bits, bits), *options, path_of=path_of)
        for k, v in zip(keys.split(parts, 2), values.split(parts, 2), strict=True):
            shown = layer.update(k, v)
        return tuple(x[:, :, :72][:, :, -8:] for x in shown)  # type: ignore[return-value, union-attr]

    ones = [11, 48, *[1] * 13]
    expected = made(KVLayer, [72])
    for found in (
        made(KVLayer, ones), made(StaticKVLayer, [72], 76), made(StaticKVLayer, ones, 76),
        made(KVLayer, [72], 8), made(KVLayer, ones, 8), made(KVLayer, [7, 65], 8),
    ):  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(expected[0], keys[:, :, -8:])


def test_still_channels_follow_the_config():
    llama = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    found = channel_rates(llama, 0, 64).still(1024.0)
    assert torch.equal(found[:32], found[32:])
    assert found[:32].tolist() == [2 * math.pi * 1e4 ** (i / 32) >= 1024 for i in range(32)]
    assert bool(channel_rates(GPT2Config(), 0, 64).still(1024.0).all())
    llama.rope_parameters["partial_rotary_factor"] = 0.5
    assert bool(channel_rates(llama, 0, 64).still(1024.0)[32:].all())


LATENT = DeepseekV3Config(
    vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
    q_lora_rank=16, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    first_k_dense_replace=1, n_routed_experts=4, n_group=1, topk_group=1, max_position_embeddings=64,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 48, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip


SCALED: dict[str, dict[str, Any]] = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL), StableLmConfig(**SMALL, partial_rotary_factor=0.25),
        GPT2Config(n_embd=64, n_head=2, n_layer=1), LATENT,
        CohereConfig(**SMALL), GlmConfig(**SMALL, head_dim=32),
        Cohere2Config(**SMALL, layer_types=["full_attention"]), SmolLM3Config(**SMALL, no_rope_layers=[0]),
        *(LlamaConfig(**SMALL, rope_scaling={"rope_type": kind, "rope_theta": 1e4, **rest})
          for kind, rest in SCALED.items()),
    ],
    ids=["llama", "stablelm", "gpt2", "deepseek_v3", "cohere", "glm", "cohere2", "smollm3", *SCALED],
)  # fmt: skip
def test_channels_turn_as_a_models_positions_turn_them(config: Any):
    """A text of one token again and again: its keys differ from place to place by what positions do."""
    model = AutoModelForCausalLM.from_config(config).eval()
    if config.model_type == "gpt2":
        model.transformer.wpe.weight.data.zero_()  # positions that are added to the embedding
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.full((1, 60), 5), past_key_values=cache)
    keys = cache.layers[0].keys.double()
    channels = channel_rates(config, 0, keys.shape[-1])
    pairs, turning = len(channels.rates), slice(channels.begin, channels.begin + 2 * len(channels.rates))
    parts = keys[:, :, 0, turning].unflatten(-1, (-1, 2, channels.apart)).unbind(-2)
    first = torch.complex(*(part.flatten(-2) for part in parts))[:, :, None] if pairs else torch.zeros(0)
    turned = first * torch.polar(torch.ones(60, pairs).double(), torch.arange(60)[:, None] * channels.rates)
    each = [part.unflatten(-1, (-1, channels.apart)) for part in (turned.real, turned.imag)]
    expected = keys[:, :, :1].expand_as(keys).clone()
    expected[..., turning] = torch.stack(each, -2).flatten(-3)
    assert (keys - expected).abs().max() < 1e-5 * keys.abs().max() * 60


def test_the_last_channels_of_whole_latent_keys_turn():
    """transformers 4.57 caches keys and values, not latents."""
    found = channel_rates(LATENT, 0, 24)
    assert found.still(math.inf).tolist() == [True] * 16 + [False] * 8
    assert (found.begin, len(found.rates)) == (16, 4)


def test_latents_are_quantised_and_no_kernel_reads_them():
    """In place of keys and values, DeepSeek-V3 caches what it makes them from."""
    model, ids = AutoModelForCausalLM.from_config(LATENT).eval(), torch.arange(1, 21)[None]
    cache = KVCache(LATENT, 8)
    with torch.no_grad(), cache.attention(model):
        found = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([15, 5], 1)], 1)
        expected = model(ids).logits
    assert 0 < (found - expected).norm() < 0.02 * expected.norm()
    assert cache.how.endswith("its cache keeps latents, from which it makes keys and values")


def test_forms_that_there_are_not_are_refused():
    with pytest.raises(UsageError, match="`form='kivi'`"):
        KVCache(LlamaConfig(), 4, form="kivi")  # type: ignore[arg-type]
