"""Norms, rotary embeddings and gated units in one kernel: torch's bits, or nothing is fused."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bits import patterns
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Olmo2Config,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from neuzip.kernels import step
from neuzip.kernels.quantizers import Ternary
from neuzip.kernels.step import reference
from neuzip.kernels.step.triton import step as triton_step
from neuzip.kernels.ternary_linear import TernaryWeight, ternary_linears
from neuzip.runtime.bitlinear import BitLinear
from neuzip.runtime.decode import greedy
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.hf import fused_step
from neuzip.runtime.hf.fused_step import FusedStep
from neuzip.runtime.hf.ternary_layers import install

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [
    (1, 128),
    (1, 132),
    (3, 3200),
    (1, 4096),
    (40, 128),
    (2, 2048),
    (1, 8192),
    (1, 14336),
    (8, 4096),
    (16, 4096),
]

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(num_key_value_heads=2),
    "qwen3": Qwen3Config(num_key_value_heads=2, head_dim=128),
    "gemma3": Gemma3TextConfig(num_key_value_heads=1, head_dim=128),
    "olmo2": Olmo2Config(num_key_value_heads=2),
    "gpt2": GPT2Config(n_embd=256, n_head=2, n_layer=2, n_positions=64),
}
for config in CONFIGS.values():
    config.hidden_size, config.num_hidden_layers, config.num_attention_heads = 256, 2, 2
    config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id = 300, 0, None, 0
    if not isinstance(config, GPT2Config):
        config.intermediate_size, config.max_position_embeddings = 320, 64
ROTATED = ("llama", "qwen3", "gemma3")  # OLMo has cos in fp32
EVERY_MODEL = pytest.mark.parametrize("name", CONFIGS)


def model_of(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(DEVICE).eval()


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def special(x: Tensor) -> Tensor:
    """With numbers that are rounded in every way: tiny, huge, zeros of both signs."""
    values = torch.tensor([0.0, -0.0, 1e-40, -3e-39, 60_000.0, 1e-7, -1.0, 1.0078125])
    flat = x.view(-1)
    flat[: values.numel()] = values.to(x)[: flat.numel()]
    return x


# The kernels.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", step.NORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_norm_has_the_bits_of_the_reference(
    shape: tuple[int, int], norm: step.Norm, dtype: torch.dtype
) -> None:
    """Of the order of additions that torch has on a GPU: there the reference is torch itself."""
    assert step.can_norm(*shape)
    x, weight = special(random(*shape, dtype=dtype)), random(shape[1], dtype=dtype, seed=1)
    mean = reference.mean_of_squares(x.float()) if DEVICE.type == "cpu" else None
    expected = reference.rms_norm(x, weight, 1e-5, norm, mean)
    found = triton_step.rms_norm(x, weight, 1e-5, norm)
    assert found.dtype == expected.dtype and found.shape == x.shape
    assert torch.equal(patterns(found), patterns(expected))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_order_of_additions_is_one_of_the_right_sum(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    exact = x.double().pow(2).mean(-1, keepdim=True)
    torch.testing.assert_close(reference.mean_of_squares(x).double(), exact, rtol=3e-7, atol=0)


def test_weights_may_have_another_dtype() -> None:
    x, weight = random(2, 256, dtype=torch.bfloat16), random(256, dtype=torch.float32)
    for norm, dtype in (("llama", torch.float32), ("gemma", torch.bfloat16), ("olmo", torch.bfloat16)):
        found = triton_step.rms_norm(x, weight, 1e-6, norm)  # type: ignore[arg-type]
        mean = reference.mean_of_squares(x.float().cpu()).to(DEVICE)
        expected = reference.rms_norm(x, weight, 1e-6, norm, mean)  # type: ignore[arg-type]
        assert found.dtype == expected.dtype == dtype
        assert torch.equal(patterns(found), patterns(expected))


def test_norms_of_other_lengths_are_left_alone() -> None:
    assert not any(step.can_norm(1, n) for n in (0, 64, 127, 130, (1 << 14) + 4))
    assert not step.can_norm(0, 256)
    assert step.can_norm(1, 1 << 14) and not step.can_norm(16, 1 << 14)  # shared out among warps as well


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 64, 80, 128, 512])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "tokens"), [(1, 4, 2, 1), (3, 2, 2, 5), (2, 1, 1, 1)])
def test_a_rotation_has_the_bits_of_torch(
    batch: int, heads: int, kv_heads: int, tokens: int, width: int, dtype: torch.dtype
) -> None:
    """Of queries and keys as projections leave them, and of one row of cos for all texts."""
    q = special(random(batch, tokens, heads, width, dtype=dtype)).transpose(1, 2)
    k = random(batch, tokens, kv_heads * width + 6, dtype=dtype, seed=1)[..., 6:]  # a part of a wider row
    k = k.view(batch, tokens, kv_heads, width).transpose(1, 2)
    for texts in {1, batch}:
        cos, sin = (random(texts, tokens, width, dtype=dtype, seed=s) for s in (2, 3))
        assert step.can_rotate(q, k, cos, sin)
        found = triton_step.rotated(q, k, cos, sin)
        for given in (apply_rotary_pos_emb(q, k, cos, sin), reference.rotated(q, k, cos, sin)):
            for y, z in zip(found, given, strict=True):
                assert y.shape == z.shape and torch.equal(patterns(y), patterns(z))


def test_other_rotations_are_left_alone() -> None:
    q, cos = torch.zeros(1, 2, 1, 64), torch.zeros(1, 1, 64)
    assert step.can_rotate(q, q, cos, cos)
    for other in (
        (q, q, cos[..., :32], cos[..., :32]),  # a part of each head
        (q, q[:, :1, :, :32], cos, cos),
        (q, q, cos.half(), cos.half()),
        (q, q, cos.expand(2, 1, 64), cos.expand(2, 1, 64)),
        (q[..., ::2], q[..., ::2], cos[..., :32], cos[..., :32]),
        (q[0], q[0], cos, cos),
        (q[:, :, :0], q[:, :, :0], cos[:, :0], cos[:, :0]),
        (q.long(), q.long(), cos.long(), cos.long()),
    ):
        assert not step.can_rotate(*other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "heads", "tokens", "widths"), [(1, 1, 1, (64, 64)), (2, 3, 5, (24, 80))])
def test_keys_and_values_are_stored_where_they_belong(
    batch: int, heads: int, tokens: int, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    """Every bit of them, and no bit elsewhere; what is beyond the room is dropped."""
    states = [special(random(batch, tokens, heads, w, dtype=dtype, seed=w)).transpose(1, 2) for w in widths]
    states[1][0, 0, 0, 0] = float("nan")
    rooms = [random(batch, heads, 9, w, dtype=dtype, seed=1) for w in widths]
    places = torch.tensor([3, 8, 0, 1, 5], device=DEVICE)[:tokens]
    expected = [room.index_copy(2, places, state) for room, state in zip(rooms, states, strict=True)]
    triton_step.store(tuple(rooms), tuple(states), places)  # type: ignore[arg-type]
    for room, right in zip(rooms, expected, strict=True):
        assert torch.equal(patterns(room), patterns(right))
    for beyond in (9, -1):
        triton_step.store(tuple(rooms), tuple(states), torch.full_like(places, beyond))  # type: ignore[arg-type]
    for room, right in zip(rooms, expected, strict=True):
        assert torch.equal(patterns(room), patterns(right))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gated_unit_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    """Of every gate there is. The interpreter takes NumPy's exponentials: there those are the right ones."""
    gate = torch.arange(-(1 << 15), 1 << 15, device=DEVICE).to(torch.int16).view(dtype)
    for up in (torch.ones_like(gate), special(random(*gate.shape, dtype=dtype))):
        assert step.can_gate(gate, up)
        found = triton_step.gated(gate, up)
        opened = F.silu(gate)
        if DEVICE.type == "cpu":
            with np.errstate(all="ignore"):
                wide = gate.float().numpy()
                opened = torch.from_numpy(wide / (1 + np.exp(-wide))).to(dtype)
            torch.testing.assert_close(opened, F.silu(gate), equal_nan=True)
        expected = opened * up
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(patterns(found)[~found.isnan()], patterns(expected)[~found.isnan()])
    torch.testing.assert_close(found, reference.gated(gate, up), equal_nan=True)


@pytest.mark.parametrize("count", [1, 511, 513])
def test_a_gated_unit_of_any_size(count: int) -> None:
    gate, up = (random(1, count, dtype=torch.bfloat16, seed=s) for s in (0, 1))
    torch.testing.assert_close(triton_step.gated(gate, up), reference.gated(gate, up))


def test_other_gated_units_are_left_alone() -> None:
    x = torch.zeros(2, 4, dtype=torch.bfloat16)
    assert step.can_gate(x, x)
    for other in (x[:1], x.half(), x.mT.contiguous().mT):
        assert not step.can_gate(x, other) and not step.can_gate(other, x)
    assert not step.can_gate(x.float(), x.float()) and not step.can_gate(x[:0], x[:0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 2047), (2, 2049), (1, 9000)])
def test_the_largest_is_where_torch_says(rows: int, columns: int, dtype: torch.dtype) -> None:
    x = random(rows, columns + 3, dtype=dtype)[:, :columns]  # a part of wider rows
    inf, nan = float("inf"), float("nan")
    for values in ((), (60_000.0,), (-inf,), (inf, inf), (nan, inf), (nan, nan)):
        for value in values:
            x[:, torch.randint(columns, (1,))] = value
        assert step.can_find(x) and torch.equal(triton_step.largest(x), x.argmax(-1))
    for value in (0.0, -0.0, 1e-40, -1.0, -inf, nan):  # all are alike: the first
        x.fill_(value)
        assert triton_step.largest(x).tolist() == [0] * rows
        if columns > 2047:
            x[:, columns - 1] = x[:, 5] = 0.5
            assert triton_step.largest(x).tolist() == [0 if value != value else 5] * rows
    x.fill_(-0.0)[:, columns - 1] = 0.0  # equal
    assert triton_step.largest(x).tolist() == [0] * rows


@hypothesis.given(row=st.lists(st.integers(-(1 << 15), (1 << 15) - 1), min_size=7, max_size=7))
@hypothesis.settings(max_examples=50, deadline=None)
def test_property_the_largest(row: list[int]) -> None:
    """Of any bits."""
    x = torch.tensor([row], dtype=torch.int16, device=DEVICE).view(torch.float16)
    assert torch.equal(triton_step.largest(x), x.argmax(-1))


def test_other_rows_are_left_to_torch() -> None:
    x = torch.zeros(2, 4)
    assert step.can_find(x) and not step.can_find(x.double()) and not step.can_find(x.mT)
    assert not step.can_find(x[0]) and not step.can_find(x[:0]) and not step.can_find(x.int())


# What is chosen.


class Silu(nn.Module):
    """As the interpreter computes it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) if x.is_cuda else triton_step.gated(x, torch.ones_like(x))


def gated_unit(activation: nn.Module, use: Callable[[Tensor, Tensor], Tensor]) -> FusedStep:
    """What a step with a unit fuses. The bits are those of before."""
    gate, up = (random(1, 1, 320, dtype=torch.bfloat16, seed=s) for s in (0, 1))
    fused = FusedStep([activation])
    with torch.no_grad():
        expected = use(activation(gate), up)
        with fused.recording():
            assert torch.equal(use(activation(gate), up), expected)
        fused.choose()
        with fused.in_place():
            found = use(activation(gate), up)
    assert type(found) is Tensor and torch.equal(patterns(found), patterns(expected))
    assert "forward" not in vars(activation)
    return fused


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "act * up": lambda y, up: y * up,
    "up * act": lambda y, up: up * y,
    "mul": torch.mul,
}


@pytest.mark.parametrize("use", USES)
def test_silu_and_a_product_are_one_kernel(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gated, calls = triton_step.gated, []
    fused = gated_unit(Silu(), USES[use])
    assert str(fused) == "1 gated units"
    monkeypatch.setattr(triton_step, "gated", lambda *given: calls.append(0) or gated(*given))
    with torch.no_grad(), fused.in_place():
        y = fused._gates[0].module(random(1, 1, 320, dtype=torch.bfloat16))
        found = USES[use](y, random(1, 1, 320, dtype=torch.bfloat16))
    assert type(found) is Tensor
    assert len(calls) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda y, up: y + up,
        lambda y, up: y * 2.0,
        lambda y, up: y * y,
        lambda y, up: y * up[..., :1],
        lambda y, up: y * up.float(),
        lambda y, up: torch.cat([y, up * y]),
        lambda y, up: F.linear(y, up[0].expand(3, 320)),
    ],
)
def test_what_silu_makes_may_be_used_otherwise(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    fused = gated_unit(Silu(), use)
    assert fused.gates == 1


def test_activations_of_one_class_may_be_of_two_kinds() -> None:
    class Activation(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x)

    silu = Silu().forward
    modules = [Activation(function) for function in (silu, F.gelu, silu)]
    fused, x = FusedStep(modules), random(1, 1, 320, dtype=torch.bfloat16)
    with torch.no_grad(), fused.recording():
        expected = [module(x) * x for module in modules]
    fused.choose()
    assert [bool(site.chosen) for site in fused._gates] == [True, False, True]
    with torch.no_grad(), fused.in_place():
        assert all(torch.equal(module(x) * x, y) for module, y in zip(modules, expected, strict=True))


def test_modules_may_be_called_by_keyword() -> None:
    modules, x = (LlamaRMSNorm(256).to(DEVICE), Silu()), random(1, 256, dtype=torch.float32)
    fused = FusedStep(modules)
    with torch.no_grad():
        expected = modules[0](hidden_states=x), modules[1](x=x)
        for calls in (fused.recording(), fused.in_place()):
            with calls:
                found = modules[0](hidden_states=x), modules[1](x=x)
            assert all(torch.equal(y, z) for y, z in zip(found, expected, strict=True))


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), nn.Identity(), nn.Dropout().eval()])
def test_other_activations_stay_as_they_are(activation: nn.Module) -> None:
    fused = gated_unit(activation, lambda y, up: y * up)
    assert str(fused) == "nothing"


@pytest.mark.parametrize(
    ("module", "norm"),
    [
        (LlamaRMSNorm(256, eps=1e-5), "llama"),
        (Gemma3RMSNorm(256, eps=1e-6), "gemma"),
        (Olmo2RMSNorm(256, eps=1e-6), "olmo"),
        (nn.LayerNorm(256, bias=False), None),
        (nn.RMSNorm(256, eps=1e-6), None),  # torch's own is one kernel, with roundings of its own
    ],
)
def test_the_kind_of_a_norm_is_found_by_its_bits(
    module: nn.Module, norm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":  # a CPU adds up in another order
        monkeypatch.setattr(Tensor, "mean", in_the_order_of_a_gpu)
    module = module.to(DEVICE, torch.bfloat16)
    fused, x = FusedStep([module]), random(3, 1, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = module(x)
        with fused.recording():
            assert torch.equal(module(x), expected)
        fused.choose()
        assert fused.norms == (norm is not None)
        with fused.in_place():
            assert torch.equal(patterns(module(x)), patterns(expected))
    assert [list(site.chosen.values()) for site in fused._norms] == [[norm] if norm else []]


def in_the_order_of_a_gpu(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    """In place of Tensor.mean, of squares: their roots are not exact, so they are added up as they are."""
    assert dim == -1 and keepdim and x.dtype == torch.float32
    rows = x.reshape(-1, x.shape[-1])
    return sum_of(rows).view(*x.shape[:-1], 1)


def sum_of(squares: Tensor) -> Tensor:
    """`mean_of_squares` of what is squared already."""

    class Squared:
        shape = squares.shape

        def __mul__(self, _: object) -> Tensor:
            return squares

    return reference.mean_of_squares(Squared())  # type: ignore[arg-type]


def neighbours_first(squares: Tensor) -> Tensor:
    """As torch added up before 2.10: the last 32 sums are folded from neighbours on."""
    rows, columns = squares.shape
    count = reference.threads(rows, columns)
    sums = torch.zeros(rows, -(-columns // (4 * count)) * 4 * count)
    sums[:, :columns] = squares
    apart = torch.zeros(rows, count, 4)
    for turn in sums.view(rows, -1, count, 4).unbind(1):
        apart = apart + turn
    sums = apart[..., 0] + apart[..., 1] + apart[..., 2] + apart[..., 3]
    while sums.shape[1] > 32:
        sums = sum(sums.chunk(2, dim=1))
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums * (1 / torch.tensor(float(columns)))


def by_half_the_threads(squares: Tensor) -> Tensor:
    original = reference.threads
    reference.threads = lambda rows, columns: original(rows, columns) // 2
    try:
        return sum_of(squares)
    finally:
        reference.threads = original


def exactly(squares: Tensor) -> Tensor:
    return (squares.double().sum(-1, keepdim=True) / squares.shape[1]).float()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="stands in for a torch that adds up otherwise")
@pytest.mark.parametrize("columns", [128, 256, 1536, 2560, 4096])
@pytest.mark.parametrize("mean", [neighbours_first, by_half_the_threads, exactly])
def test_a_norm_of_other_bits_stays_as_it_is(
    mean: Any, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is that differs: here the order of additions, which a row in 50 shows."""

    def other(x: Tensor, dim: int, keepdim: bool) -> Tensor:
        return mean(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], 1)

    monkeypatch.setattr(Tensor, "mean", other)
    module, x = LlamaRMSNorm(columns).to(torch.bfloat16), random(1, 1, columns, dtype=torch.bfloat16)
    fused = FusedStep([module])
    with torch.no_grad(), fused.recording():
        module(x)
    fused.choose()
    assert fused.norms == 0


def test_norms_of_one_class_may_be_of_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Norm(LlamaRMSNorm):
        def __init__(self, more: bool) -> None:
            super().__init__(256)
            self.more = more

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = super().forward(x)
            return found + 1 if self.more else found

    if DEVICE.type == "cpu":
        monkeypatch.setattr(Tensor, "mean", in_the_order_of_a_gpu)
    modules = [Norm(more).to(DEVICE, torch.bfloat16) for more in (False, True, False)]
    fused, x = FusedStep(modules), random(1, 1, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        with fused.recording():
            expected = [module(x) for module in modules]
        fused.choose()
        assert [bool(site.chosen) for site in fused._norms] == [True, False, True]
        with fused.in_place():
            assert all(torch.equal(module(x), y) for module, y in zip(modules, expected, strict=True))


def test_a_rotation_of_other_bits_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = model_of("llama")
    place = sys.modules[type(module).__module__]

    def other(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return reference.rotated(q, k, sin, cos)

    monkeypatch.setattr(place, fused_step.ROTARY, other)
    fused = FusedStep(module.modules())
    with torch.no_grad(), fused.recording():
        module(torch.zeros(1, 3, dtype=torch.int64, device=DEVICE))
    fused.choose()
    assert not fused.rotary


@EVERY_MODEL
@pytest.mark.slow
def test_a_step_has_the_same_bits(name: str) -> None:
    """And modules and functions are what they were, afterwards and after an error."""
    model, ids = model_of(name), torch.randint(0, 300, (2, 1), device=DEVICE)
    place = sys.modules[type(model).__module__]
    before = vars(place).get(fused_step.ROTARY)
    fused = FusedStep(model.modules())
    with torch.no_grad():
        expected = model(ids).logits
        with fused.recording():
            assert torch.equal(model(ids).logits, expected)
        fused.choose()
        assert fused.rotary == (name in ROTATED)
        if DEVICE.type == "cuda":
            asked = sum("RMSNorm" in type(module).__name__ for module in model.modules())
            assert fused.norms == asked
        with fused.in_place():
            assert torch.equal(patterns(model(ids).logits), patterns(expected))
        with pytest.raises(ZeroDivisionError), fused.in_place():
            raise ZeroDivisionError
    assert vars(place).get(fused_step.ROTARY) is before
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
@EVERY_MODEL
def test_a_decoder_checks_a_whole_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step gives is what it gave before, with masks of numbers; else it stays as it was."""
    masks: list[torch.dtype] = []
    attend = F.scaled_dot_product_attention

    def spy(*given: Any, attn_mask: Tensor, **options: Any) -> Tensor:
        masks.append(attn_mask.dtype)
        return attend(*given, attn_mask=attn_mask, **options)

    model = model_of(name)
    decoder = GreedyDecoder(model, 2, 16, graph=False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    fused = decoder._fused_step()
    assert fused.rotary == (name in ROTATED)
    steps = greedy.WARM_UPS
    assert masks == [torch.bool] * (4 * steps - 2) + [torch.bfloat16] * 2  # of two layers, in the last step

    @contextmanager
    def otherwise(_: FusedStep) -> Iterator[None]:
        model.get_input_embeddings().weight.data.neg_()
        yield
        model.get_input_embeddings().weight.data.neg_()

    monkeypatch.setattr(FusedStep, "in_place", otherwise)
    fused = decoder._fused_step()
    assert str(fused) == "nothing" and not fused._masks


def test_a_model_that_cannot_do_with_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    decoder = GreedyDecoder(model, 1, 16, graph=False)
    place = sys.modules[type(model).__module__]
    make = place.create_causal_mask

    def turned_twice(**options: Any) -> Any:
        mask = make(**options)
        return None if mask is None else ~~mask

    monkeypatch.setattr(place, "create_causal_mask", turned_twice)
    with pytest.warns(RuntimeWarning, match="steps are not fused: "):
        fused = decoder._fused_step()
    assert str(fused) == "nothing" and not fused._masks
    assert decoder.generate(torch.zeros(1, 3, dtype=torch.int64, device=DEVICE), 4).shape == (1, 4)


def test_gradients_flow_through_the_models_own_code() -> None:
    model, ids = model_of("llama", torch.float32), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    fused = FusedStep(model.modules())
    with torch.no_grad(), fused.recording():
        model(ids)
    fused.choose()
    with fused.in_place():
        model(ids).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_how_a_model_attends_is_left_alone() -> None:
    """Falcon asks for the name of its attention, and parts of a model may have others."""
    torch.manual_seed(1)
    config = FalconConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=300, alibi=False
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE).eval()
    decoder = GreedyDecoder(model, 2, 40, graph=False)
    ids = torch.randint(0, 300, (2, 25), device=DEVICE)
    found = []
    for fused in (FusedStep(()), decoder._fused_step()):
        decoder.prefill(ids)
        with fused.in_place():
            decoder.step()
        found.append(decoder.logits.clone())
    assert torch.equal(patterns(found[0]), patterns(found[1]))
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask


def test_masks_of_other_threads_are_left_alone() -> None:
    made: list[Tensor] = []

    def make() -> None:
        with torch.no_grad():
            options = {"batch_size": 1, "kv_length": 8, "kv_offset": 0}
            if "cache_position" in inspect.signature(sdpa_mask).parameters:  # transformers 4.57
                options |= {"cache_position": torch.tensor([3])}
            else:
                options |= {"q_length": 1, "q_offset": 3}
            mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
                **options, dtype=torch.bfloat16, allow_is_causal_skip=False
            )
            made.append(mask)

    with FusedStep([nn.Identity()]).in_place():
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        make()
    make()
    assert [mask.dtype for mask in made] == [torch.bool, torch.bfloat16, torch.bool]
    numbers = torch.where(made[0], 0.0, float("-inf"))
    assert torch.equal(made[1].float(), numbers)


def test_nothing_is_fused_of_no_modules() -> None:
    fused = FusedStep(())
    with fused.recording(), fused.in_place():
        fused.choose()
    assert fused.norms == 0 and not fused.rotary


@pytest.fixture
def counted() -> Iterator[dict[str, int]]:
    """How often the kernels are launched."""
    calls = {"rms_norm": 0, "rotated": 0}
    original = {name: getattr(triton_step, name) for name in calls}

    def counting(name: str) -> Any:
        def call(*given: Any) -> Any:
            calls[name] += 1
            return original[name](*given)

        return call

    for name in calls:
        setattr(triton_step, name, counting(name))
    yield calls
    for name, function in original.items():
        setattr(triton_step, name, function)


@pytest.mark.gpu
@EVERY_MODEL
@pytest.mark.parametrize("batch", [1, 8])
def test_a_graph_has_them_and_gives_the_same_tokens(name: str, batch: int, counted: dict[str, int]) -> None:
    model = model_of(name)
    ids = torch.randint(0, 300, (batch, 5), device=DEVICE)
    expected = GreedyDecoder(model, batch, 40, graph=False).generate(ids, 30)
    assert counted == {"rms_norm": 0, "rotated": 0}
    decoder = GreedyDecoder(model, batch, 40)
    assert decoder.graphed
    assert (counted["rms_norm"] > 0) == (name != "gpt2")
    assert (counted["rotated"] > 0) == (name in ROTATED)
    assert torch.equal(decoder.generate(ids, 30), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 32, 64])
@pytest.mark.parametrize("columns", [128, 2048, 2560, 3200, 3584, 4096, 5120, 8192])
def test_rows_are_added_up_as_torch_does(rows: int, columns: int) -> None:
    if not step.can_norm(rows, columns):
        pytest.skip("left alone")
    weight = torch.ones(columns, device=DEVICE)
    for seed in range(10):
        x = random(rows, columns, dtype=torch.float32, seed=seed)
        found = triton_step.rms_norm(x, weight, 1e-6, "llama")
        assert torch.equal(patterns(found), patterns(reference.rms_norm(x, weight, 1e-6, "llama")))


# Ternary layers of one input.


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many weights each call is that takes several at once."""
    counts: list[int] = []

    def spy(x: Tensor, weights: list[TernaryWeight], **options: Any) -> list[Tensor]:
        counts.append(len(weights))
        return ternary_linears(x, weights, **options)

    monkeypatch.setattr(fused_step, "ternary_linears", spy)
    return counts


def ternary_model(hidden_act: str, mode: str) -> PreTrainedModel:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=300, num_key_value_heads=1,
        intermediate_size=320, hidden_act=hidden_act,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE).eval()
    ternary = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            codes = torch.randint(-1, 2, module.weight.shape, device=DEVICE, dtype=torch.int8)  # type: ignore[operator]
            ternary[name] = TernaryWeight.of(Ternary(codes, torch.tensor(0.05, device=DEVICE)))
    install(model, ternary, mode)
    return model


def chosen(model: PreTrainedModel, ids: Tensor) -> tuple[FusedStep, Tensor]:
    """What is fused of a model after it read ids, and the logits by its own code."""
    fused = FusedStep(model.modules())
    with torch.no_grad():
        logits: Tensor = model(ids).logits
        with fused.recording():
            model(ids)
    fused.choose()
    return fused, logits


@pytest.mark.parametrize(
    ("hidden_act", "mode", "sizes"),
    [("relu2", "a4.8", [3, 3]), ("silu", "a4.8", [3, 2] * 2), ("silu", "b1.58", [3, 2] * 2)],
)
def test_ternary_layers_of_one_input_go_together(
    hidden_act: str, mode: str, sizes: list[int], together: list[int]
) -> None:
    """Queries, keys and values; gate and up where they are layers of their own."""
    model, ids = ternary_model(hidden_act, mode), torch.tensor([[7]], device=DEVICE)
    fused, expected = chosen(model, ids)
    with torch.no_grad():
        assert fused.products == sum(sizes) - len(sizes)
        assert together == []
        for _ in range(2):
            with fused.in_place():
                assert torch.equal(patterns(model(ids).logits), patterns(expected))
        assert together == sizes * 2
        with fused.in_place():  # another number of tokens: each by itself
            model(ids.expand(1, 3))
        assert together == sizes * 2
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(shared._products or shared._input is not None for shared in fused._shared)


def test_a_product_is_not_that_of_an_input_before(together: list[int]) -> None:
    """What is called otherwise than it was is computed by itself."""
    layers = [m for m in ternary_model("relu2", "a4.8").modules() if isinstance(m, BitLinear)][:3]
    x, other = random(1, 256, dtype=torch.bfloat16), random(1, 256, dtype=torch.bfloat16, seed=1)
    fused = FusedStep(layers)
    with torch.no_grad():
        expected = [[layer(given) for layer in layers] for given in (x, other)]
        with fused.recording():
            for layer in layers:
                layer(x)
        fused.choose()
        with fused.in_place():
            found = [layers[0](x), layers[2](other), layers[1](x), layers[2](x)]
            wanted = [expected[0][0], expected[1][2], expected[0][1], expected[0][2]]
            assert all(torch.equal(patterns(y), patterns(z)) for y, z in zip(found, wanted, strict=True))
            found = [layers[0](x), layers[1](x), layers[1](x), layers[0](other), layers[1](other)]
            wanted = [*expected[0][:2], expected[0][1], *expected[1][:2]]
            assert all(torch.equal(patterns(y), patterns(z)) for y, z in zip(found, wanted, strict=True))
    assert together == [3, 3, 3]


def test_ternary_layers_with_a_bias_or_another_activation_stay_alone(together: list[int]) -> None:
    layers = [m for m in ternary_model("relu2", "a4.8").modules() if isinstance(m, BitLinear)][:3]
    layers[1].bias = nn.Parameter(torch.ones(layers[1].out_features, device=DEVICE), requires_grad=False)
    layers[2].activation = "int8"
    fused, x = FusedStep(layers), random(1, 256, dtype=torch.bfloat16)
    with torch.no_grad(), fused.recording():
        for layer in layers:
            layer(x)
    fused.choose()
    assert fused.products == 0 and str(fused) == "nothing"


def test_blocks_may_share_ternary_layers(together: list[int]) -> None:
    model, ids = ternary_model("silu", "a4.8"), torch.tensor([[7]], device=DEVICE)
    first, second = model.model.layers  # type: ignore[union-attr]
    second.mlp = first.mlp
    fused, expected = chosen(model, ids)
    with torch.no_grad(), fused.in_place():
        assert torch.equal(patterns(model(ids).logits), patterns(expected))
    assert fused.products == 5 and together == [3, 2, 3, 2]
    assert not any("forward" in vars(module) for module in model.modules())
