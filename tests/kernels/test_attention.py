"""Quantised attention as callers see it: what it gives and refuses, how close it is to exact attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from neuzip.kernels import attention
from neuzip.kernels.attention import reference, sage_attention, sage_attention_packed, sageattn, supported
from neuzip.kernels.attention.similarity import similarity

LEAST_COSINE = {8: 0.999, 4: 0.98}
"""Cosine similarity with exact attention, of Gaussian heads of 64 numbers with channels far from 0."""


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[..., ::16] += 3 * torch.randn(shape[-1], generator=generator)[::16]
    return x.to(dtype)


def qkv(queries: int = 40, keys: int = 150, width: int = 64, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    q = heads(2, 4, queries, width, seed=0, **more)
    return q, heads(2, 2, keys, width, seed=1, **more), heads(2, 2, keys, width, seed=2, **more)


# What comes out


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "asked", [{}, {"causal": True}, {"causal": True, "window": 50}, {"softcap": 5.0}, {"scale": 0.2}], ids=str
)
def test_close_to_exact_attention(asked: dict[str, Any], bits: int):
    q, k, v = qkv(150, 200)
    out, lse = sage_attention(q, k, v, bits=bits, return_lse=True, **asked)
    exact, exact_lse = reference.exact_attention(q, k, v, **asked)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert similarity(out, exact).cosine >= LEAST_COSINE[bits]
    assert (lse - exact_lse).abs().mean() <= (0.02 if bits == 8 else 0.2)


@pytest.mark.parametrize("bits", [8, 4])
def test_on_a_cpu_it_is_the_reference(bits: int):
    q, k, v = qkv(dtype=torch.bfloat16)
    out, lse = sage_attention(q, k, v, bits=bits, causal=True, smooth_v=True, return_lse=True)
    wanted = reference.quantized_attention(q, k, v, bits=bits, causal=True, smooth_v=True)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert torch.equal(out, sage_attention(q, k, v, bits=bits, causal=True, smooth_v=True))


def test_queries_are_smoothed_with_4_bits_only():
    q, k, v = qkv()
    for bits in (4, 8):
        given = sage_attention(q, k, v, bits=bits)
        assert torch.equal(given, sage_attention(q, k, v, bits=bits, smooth_q=bits == 4))
        assert not torch.equal(given, sage_attention(q, k, v, bits=bits, smooth_q=bits == 8))


def test_the_name_and_the_arguments_of_the_authors():
    q, k, v = qkv(40, 60)
    wanted = sage_attention(q, k, v, causal=True, scale=0.1, return_lse=True)
    found = sageattn(q, k, v, "HND", True, 0.1, True)
    turned = sageattn(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), "NHD", True, 0.1, True)
    for one, other, third in zip(wanted, found, (turned[0].transpose(1, 2), turned[1]), strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
    assert turned[0].is_contiguous()
    assert torch.equal(sageattn(q, k, v), sage_attention(q, k, v))
    with pytest.raises(TypeError, match="attn_mask"):
        sageattn(q, k, v, attn_mask=None)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="tensor_layout is 'BHND'"):
        sageattn(q, k, v, "BHND")


def test_the_output_lies_as_queries_do():
    q, k, v = qkv()
    assert sage_attention(q, k, v).is_contiguous()
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert sage_attention(turned, k, v).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("asked", [{}, {"bits": 4, "causal": True, "window": 20}], ids=str)
def test_a_pack_is_its_sequences_one_by_one(asked: dict[str, Any]):
    q_lengths, k_lengths = [20, 0, 33, 1], [50, 4, 33, 0]
    q, k, v = heads(54, 4, 64), heads(87, 2, 64, seed=1), heads(87, 2, 64, seed=2)
    starts = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (q_lengths, k_lengths)]
    out, lse = sage_attention_packed(
        q, k, v, starts[0], starts[1], longest_q=33, longest_k=50, return_lse=True, **asked
    )
    for i, (one, keys, values) in enumerate(
        zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    ):
        mine = slice(int(starts[0][i]), int(starts[0][i + 1]))
        wanted = sage_attention(
            *(x.transpose(0, 1)[None] for x in (one, keys, values)), return_lse=True, **asked
        )
        assert torch.equal(out[mine], wanted[0][0].transpose(0, 1))
        assert torch.equal(lse[:, mine], wanted[1][0])
    assert not out[53].any() and torch.isneginf(lse[:, 53]).all()


# What is refused


REFUSED = {
    "bits": ({"bits": 6}, ValueError, "bits is 6"),
    "scale": ({"scale": 0.0}, ValueError, "scale is 0.0"),
    "infinite scale": ({"scale": math.inf}, ValueError, "scale is inf"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
    "softcap without effect": ({"softcap": 1e5}, ValueError, "a larger one does nothing"),
    "huge scale": ({"scale": 1e39}, ValueError, "at most 1e"),
    "bits of float": ({"bits": 8.0}, TypeError, "bits is 8.0"),
    "window of float": ({"window": 2.5, "causal": True}, TypeError, "window is 2.5"),
    "window of bool": ({"window": True, "causal": True}, TypeError, "window is True"),
    "causal in words": ({"causal": "no"}, TypeError, "causal is 'no'"),
    "window": ({"window": 8}, ValueError, "with causal=True only"),
    "no window": ({"window": 0, "causal": True}, ValueError, "window is 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_make_no_sense(name: str):
    asked, kind, sentence = REFUSED[name]
    q, k, v = qkv()
    with pytest.raises(kind, match=sentence) as caught:
        sage_attention(q, k, v, **asked)
    assert supported(q, k, v, **asked) == str(caught.value)


OPERANDS: dict[str, tuple[Any, type[Exception], str]] = {
    "dtype": (lambda q, k, v: (q.double(), k, v), TypeError, "torch.float64"),
    "dtypes": (lambda q, k, v: (q, k.half(), v), TypeError, "have to be the same"),
    "device": (lambda q, k, v: (q.to("meta"), k, v), ValueError, "on meta"),
    "devices": (lambda q, k, v: (q, k, v.to("meta")), ValueError, "values on meta"),
    "dimensions": (lambda q, k, v: (q[0], k, v), ValueError, r"has to be \[batch, heads, tokens, D\]"),
    "values": (lambda q, k, v: (q, k, v[:, :, 1:]), ValueError, "have to agree"),
    "batches": (lambda q, k, v: (q[:1], k, v), ValueError, "do not go with keys"),
    "widths": (lambda q, k, v: (q[..., :32], k, v), ValueError, "do not go with keys"),
    "heads": (lambda q, k, v: (q[:, :3], k, v), ValueError, "3 query heads cannot share 2 key heads"),
    "width": (lambda *x: [y[..., :40].contiguous() for y in x], ValueError, "a head of 40 numbers"),
    "strides": (lambda q, k, v: (q.mT.contiguous().mT, k, v), ValueError, r"use \.contiguous\(\)"),
    "gradients": (lambda q, k, v: (q.requires_grad_(), k, v), ValueError, "has no gradients"),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_do_not_go_together(name: str):
    change, kind, sentence = OPERANDS[name]
    operands = change(*qkv())
    with pytest.raises(kind, match=sentence) as caught:
        sage_attention(*operands)
    assert supported(*operands) == str(caught.value)


def test_gradients_are_refused_where_they_would_be_lost_only():
    q, k, v = qkv()
    with torch.no_grad():
        assert supported(q.requires_grad_(), k, v) is None
        sage_attention(q, k, v)


def test_supported_says_nothing_against_what_works():
    q, k, v = qkv()
    assert supported(q, k, v, bits=4, causal=True, window=5, softcap=2.0, smooth_v=True) is None
    assert supported(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), packed=True) is None
    assert supported(q, k, v, packed=True) is not None


@pytest.mark.parametrize(
    ("starts", "longest", "kind", "sentence"),
    [
        (torch.tensor([0, 5, 10]), 5, TypeError, "q_starts is torch.int64"),
        (
            torch.tensor([0, 5, 9], dtype=torch.int32),
            5,
            ValueError,
            "rise from 0 to the number of tokens, 10",
        ),
        (torch.tensor([0, 12, 10], dtype=torch.int32), 5, ValueError, "rise from 0"),
        (torch.tensor([[0, 10]], dtype=torch.int32), 10, ValueError, r"\[sequences \+ 1\]"),
        (torch.tensor([0, 4, 10], dtype=torch.int32), 5, ValueError, "but a sequence has 6 tokens"),
        (torch.tensor([0, 4, 10], dtype=torch.int32), -1, ValueError, "longest_q is -1"),
        (torch.tensor([0, 10], dtype=torch.int32), 10, ValueError, "q_starts are of 1 sequences"),
    ],
)
def test_starts_that_are_none(starts: Tensor, longest: int, kind: type[Exception], sentence: str):
    q, k, v = heads(10, 4, 64), heads(10, 2, 64), heads(10, 2, 64)
    k_starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    with pytest.raises(kind, match=sentence):
        sage_attention_packed(q, k, v, starts, k_starts, longest_q=longest, longest_k=5)


# torch.compile and CUDA graphs


@pytest.mark.parametrize("turned", [False, True], ids=["HND", "NHD"])
def test_operators_are_what_they_are_declared_to_be(turned: bool):
    q, k, v = qkv(10, 20)
    if turned:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for return_lse in (False, True):
        arguments = (q, k, v, 8, True, 0.125, None, None, False, False, return_lse)
        torch.library.opcheck(torch.ops.neuzip.sage_attention, arguments, test_utils=checks)
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    pack = [x[0].transpose(0, 1).contiguous() for x in (q, k[:, :, :10], v[:, :, :10])]
    arguments = (*pack, starts, starts, 6, 6, 4, True, 0.125, 3, 2.0, True, True, True)
    torch.library.opcheck(torch.ops.neuzip.sage_attention_packed, arguments, test_utils=checks)


def test_a_compiled_model_takes_it_whole():
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = sage_attention(q * 2, k, v, causal=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(2)

    q, k, v = qkv()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v), layer(q, k, v))


# On a GPU


@pytest.fixture
def on_gpu() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv(1000, 1100, 128, dtype=torch.bfloat16)
    return q.cuda(), k.cuda(), v.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_it_agrees_with_the_reference(on_gpu: Any, bits: int, causal: bool):
    out, lse = sage_attention(*on_gpu, bits=bits, causal=causal, return_lse=True)
    wanted, wanted_lse = reference.quantized_attention(*(x.float() for x in on_gpu), bits=bits, causal=causal)
    assert float((out.float() - wanted).norm()) <= 4e-3 * float(wanted.norm())  # bf16 alone costs 2e-3
    assert (lse - wanted_lse).abs().mean() <= 1e-3
    exact, _ = reference.exact_attention(*on_gpu, causal=causal)
    assert similarity(out, exact).cosine >= LEAST_COSINE[bits]


@pytest.mark.gpu
def test_fp32_is_refused_on_a_gpu(on_gpu: Any):
    with pytest.raises(TypeError, match=r"torch\.float32"):
        sage_attention(*(x.float() for x in on_gpu))


@pytest.mark.gpu
@pytest.mark.parametrize("width", attention.SUPPORTED_HEAD_DIMS)
def test_many_tokens(width: int):
    q, k, v = (torch.randn(1, 4, 5000, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for bits, least in ((8, 0.999), (4, 0.975)):  # 15 levels for Gaussian numbers: 0.979 by the reference
        out = sage_attention(q, k, v, bits=bits, causal=True)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert similarity(out, wanted).cosine >= least
        assert torch.equal(out, sage_attention(q, k, v, bits=bits, causal=True))


@pytest.mark.gpu
def test_torch_compile_and_cuda_graphs(on_gpu: Any):
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sage_attention(q + 1, k, v, causal=True)  # type: ignore[return-value]

    q, k, v = on_gpu
    with torch.no_grad():
        wanted = layer(q, k, v)
        assert torch.equal(torch.compile(layer, fullgraph=True)(q, k, v), wanted)
        graph = torch.cuda.CUDAGraph()
        held = torch.zeros_like(q)
        layer(held, k, v)
        with torch.cuda.graph(graph):
            out = layer(held, k, v)
        held.copy_(q)
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_a_pack_on_a_gpu_is_its_sequences_one_by_one(on_gpu: Any):
    lengths = [300, 0, 1, 699]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k, v = (x[0, :, :1000].transpose(0, 1) for x in on_gpu)
    out = sage_attention_packed(
        q, k, v, starts.cuda(), starts.cuda(), longest_q=699, longest_k=699, causal=True
    )
    for i, length in enumerate(lengths):
        mine = slice(int(starts[i]), int(starts[i]) + length)
        alone = sage_attention(*(x[mine].transpose(0, 1)[None] for x in (q, k, v)), causal=True)
        assert torch.equal(out[mine], alone[0].transpose(0, 1))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("most_of_a_gpu")
def test_more_than_2_to_the_31_numbers():
    tokens, width = 16384, 64
    count = 2**31 // (tokens * width) + 2
    q = torch.randn(1, count, tokens, width, device="cuda", dtype=torch.bfloat16)
    out = sage_attention(q, q, q, causal=True)
    for head in (0, count - 1):
        mine = q[:, head : head + 1]
        assert torch.equal(out[:, head : head + 1], sage_attention(mine, mine, mine, causal=True))
