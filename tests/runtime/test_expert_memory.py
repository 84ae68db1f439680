"""Packed experts in pinned host memory: which of them, what they take, and results of the same bits."""

from __future__ import annotations

import copy
import ctypes
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import llama, mixture, needs_version_5, packed_mixture
from tensors import gaussian
from torch import Tensor, nn

from neuzip.cli.options import size
from neuzip.errors import NeuzipError, UsageError
from neuzip.kernels.device import host_memory
from neuzip.kernels.experts import ops, steps
from neuzip.kernels.experts.routing import route
from neuzip.kernels.packed_linear import tensor as packed_tensor
from neuzip.kernels.packed_linear.ops import pack
from neuzip.kernels.packed_linear.tensor import PackedTensor
from neuzip.runtime.decode.benchmark import make_plan
from neuzip.runtime.decode.greedy import GreedyDecoder
from neuzip.runtime.expert_memory import ExpertMemory
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.hf.quantization_config import NeuzipConfig
from neuzip.runtime.requirements import require_expert_memory
from neuzip.runtime.residency import (
    compress_parameters,
    decompress_parameters,
    expert_modules,
    memory,
    require_experts,
)
from neuzip.runtime.weights import PackedWeight

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, CPU, CUDA = torch.bfloat16, torch.device("cpu"), torch.device("cuda")


def apart(packed: PackedTensor) -> PackedTensor:
    """Weights with words in one memory and all else in another, as there is no GPU: the meta device."""
    others = ("far_index", "far_words", "row_start", "escapes", "turn_index", "turn_escapes")
    return replace(packed, **{name: getattr(packed, name).to("meta") for name in others})


# Which parameters, and what they take


@pytest.mark.parametrize(("text", "nbytes"), [(None, None), ("8GiB", 8 << 30), ("1.5 kB", 1500), ("0B", 0)])
def test_sizes_on_the_command_line(text, nbytes):
    assert size(text) == nbytes


@pytest.mark.parametrize("text", ["8", "", "half", "50%", "-1GiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="is no size"):
        size(text)


def test_parameters_stay_as_long_as_they_fit():
    """One that does not would go to host memory, which a weight on a CPU has no use for."""
    weight = PackedWeight.of(gaussian(2, 32, 64, dtype=BF16))
    limit = ExpertMemory(2 * weight.stored_bytes)
    assert limit.placed(weight, "a") is weight
    assert limit.placed(weight, "b") is weight
    with pytest.raises(ValueError, match="for weights on a GPU, not on cpu"):
        limit.placed(weight, "c")


def test_memory_of_the_device_and_of_the_host():
    packed = pack(gaussian(64, 128, dtype=BF16))
    words = packed.words.nbytes
    split = apart(packed)
    assert split.device.type == "meta"
    assert (packed.host_bytes, split.host_bytes, split.nbytes) == (0, words, packed.nbytes)
    model = nn.Module()
    weight = PackedWeight._of(split, (2, 32, 128), False, 0, False)
    model.register_parameter("experts", nn.Parameter(weight, requires_grad=False))
    use = memory(model).of("packed")
    assert (use.stored_bytes, use.host_bytes) == (packed.nbytes - words, words)
    assert "bits a weight, in host memory)" in repr(weight)
    assert memory(model).total == use
    assert weight.expert(1).host_bytes == words


@pytest.mark.parametrize(("tokens", "copied"), [(1, False), (12, True)])
def test_words_are_copied_where_experts_have_several_tiles(tokens, copied):
    """Decided by shapes, so that the host never waits."""
    packed = apart(pack(gaussian(64, 128, dtype=BF16)))
    routing, _ = route(torch.zeros(tokens, 2, dtype=torch.int64), gaussian(tokens, 128), 2, 16)
    ready = steps._fetched(packed, 2, routing)
    assert (ready is packed) != copied
    assert ready.host_bytes == (0 if copied else packed.host_bytes)


# What is refused


def test_limits_that_make_no_sense_are_refused(tmp_path: Path):
    require_expert_memory(None, "dense")
    require_expert_memory(0, "packed", "ans")
    for value in (-1, 1.5, True, "8GiB"):
        with pytest.raises(UsageError, match="is no number of bytes"):
            require_expert_memory(value, "packed")
    with pytest.raises(UsageError, match="has no effect with `residency='dense'`"):
        require_expert_memory(1, "dense", device="cuda:1")
    with pytest.raises(UsageError, match="with `device='cpu'` there is none") as refused:
        load_model(tmp_path, expert_memory=1)
    assert refused.value.hint.startswith("leave out `expert_memory`")
    with pytest.raises(UsageError, match="has no effect"):
        NeuzipConfig("dense", expert_memory=1)


@needs_version_5
def test_models_on_a_cpu_and_models_without_experts_are_refused(tmp_path: Path):
    model = llama(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UsageError, match="and the model is on cpu"):
        compress_parameters(model, "packed", expert_memory=0)
    with pytest.raises(UsageError, match="LlamaForCausalLM has no parameters of several experts"):
        require_experts(model, ["lm_head.weight"], 0)
    require_experts(model, ["lm_head.weight"], None)
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="and the model is on cpu"):
        make_plan(tmp_path, ["packed"], new_tokens=2, prompt_tokens=2, device=CPU, expert_memory=0)
    with pytest.raises(UsageError, match="and the model is on cpu"):
        type(model).from_pretrained(
            tmp_path, dtype=BF16, quantization_config=NeuzipConfig("packed", expert_memory=0)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--expert-memory", "8"), "error: --expert-memory 8: is no size"),
        (("--expert-memory", "1kB"), "error: --expert-memory 1000 has no effect with --residency dense"),
        (("--expert-memory", "0"), "error: --expert-memory 0 has no effect with --residency dense"),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "eval", "bench"])
def test_commands_refuse_before_they_read_anything(verb, options, message, neuzip, monkeypatch):
    monkeypatch.setattr("neuzip.compress.device.driver_devices", lambda: 1)
    residency = ("--residency", "dense")
    text = {"generate": ("Hello",), "eval": ("--text", "demo"), "bench": ()}[verb]
    said = neuzip(verb, "no-such-model", *text, *residency, *options)
    assert (said.exit_code, said.stderr.splitlines()[0]) == (2, message)


@pytest.mark.parametrize("residency", ["dense", "packed"])
def test_a_command_on_a_cpu_refuses_the_limit_whatever_the_residency(residency: str, neuzip):
    """The hint names no residency, as none would help."""
    options = ("--device", "cpu", "--residency", residency, "--expert-memory", "8GiB")
    said = neuzip("generate", "no-such-model", "Hello", *options)
    assert said.exit_code == 2
    assert "error: --expert-memory 8589934592: limits what experts take of a GPU" in said.stderr
    assert "hint: leave out --expert-memory" in said.stderr


# On a GPU: results are those with all weights there, bit for bit


@pytest.mark.gpu
def test_pinned_memory():
    memory = host_memory.host_memory(60, CUDA).view(torch.int32)
    assert memory.is_pinned()
    assert memory.fill_(7).cuda(non_blocking=True).sum() == 105
    assert host_memory.host_memory(0, CUDA).shape == (0,)


@pytest.mark.gpu
def test_host_memory_that_runs_out_names_parameter_and_option(monkeypatch: pytest.MonkeyPatch):
    """The driver refuses what no machine has."""
    monkeypatch.setattr(packed_tensor, "pinned_copy", lambda *_: host_memory.host_memory(1 << 50, CUDA))
    with pytest.raises(NeuzipError, match=r"a\.b: .* pinned host memory: CUDA_ERROR") as error:
        ExpertMemory(7).placed(PackedWeight.of(gaussian(2, 32, 32).to(CUDA, BF16)), "a.b")
    assert "give a larger `expert_memory`" in error.value.hint


SHAPES = {"hopper": (16, 256, 384), "ragged": (5, 40, 70)}


def layer(shape: str, dtype: torch.dtype = BF16) -> tuple[int, int, list[PackedTensor]]:
    """Experts, columns of x, and packed gate_up and down."""
    experts, inner, columns = SHAPES[shape]
    weights = (
        gaussian(experts * 2 * inner, columns, deviation=0.05),
        gaussian(experts * columns, inner, seed=1, deviation=0.05),
    )
    return experts, columns, [pack(weight.to(dtype).cuda()) for weight in weights]


def inputs(tokens: int, columns: int, experts: int, k: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    x, scores = gaussian(tokens, columns, seed=2), gaussian(tokens, experts, seed=3)
    shares, ids = scores.softmax(-1).topk(k)
    return x.to(CUDA, dtype), ids.cuda(), shares.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 7, 40, 300, 2500])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer(shape: str, tokens: int, dtype: torch.dtype):
    """One tile an expert and many, all experts and one, eager and in a graph; the host waits for nothing."""
    experts, columns, near = layer(shape, dtype)
    far = [packed.in_host_memory() for packed in near]
    assert all(p.words.is_pinned() and p.host_bytes > 0.8 * p.nbytes for p in far)
    x, ids, shares = inputs(tokens, columns, experts, 2, dtype)
    torch.cuda.synchronize()

    def multiply(weights: list[PackedTensor]) -> Tensor:
        return ops.packed_experts(x, ids, shares, *weights, experts)

    with torch.no_grad():
        assert torch.equal(multiply(far), multiply(near))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            multiply(far)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = multiply(far)
        for other in (ids.clone(), (ids + 1) % experts, torch.full_like(ids, experts - 1)):
            ids.copy_(other)
            graph.replay()
            assert torch.equal(y, multiply(near))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_and_operators(shape: str):
    experts, columns, near = layer(shape)
    results = []
    for weights in (near, [packed.in_host_memory() for packed in near]):
        x, ids, shares = inputs(30, columns, experts, 2)
        x.requires_grad_()
        shares.requires_grad_()
        y = ops.packed_experts(x, ids, shares, *weights, experts)
        y.float().square().sum().backward()
        results.append((y, x.grad, shares.grad))
    for one, other in zip(*results, strict=True):
        assert one is not None and torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize(("out", "columns"), [(256, 384), (40, 70)])
def test_all_that_is_done_with_a_weight(out: int, columns: int, flipped: bool):
    dense = gaussian(4, out, columns, deviation=0.05).to(CUDA, BF16)
    dense = dense.mT.contiguous() if flipped else dense
    near = PackedWeight.of(dense, transposed=flipped)
    far = near.offloaded()
    assert far.device == near.device and far.shape == near.shape and far.stride() == near.stride()
    assert far.stored_bytes + far.host_bytes == near.stored_bytes
    ids = torch.tensor([3, 0, 3], device=CUDA)
    same: list[tuple[Tensor, Tensor]] = [
        (far.dense(), dense), (far[2].dense(), dense[2]), (far[ids], dense[ids]), (far + 1, dense + 1),
        (far.clone().dense(), dense), (copy.deepcopy(far).dense(), dense),
        (far.to("cpu").dense(), dense.cpu()),
        (far.detach().mT.dense(), dense.mT), (far.unbind()[1].dense(), dense[1]),
        (PackedWeight.of(dense, transposed=flipped, exact=True).offloaded().dense(), dense),
    ]  # fmt: skip
    for rows in (1, 2, 8, 64, 300):
        x = gaussian(rows, columns, seed=rows).to(CUDA, BF16)
        for one, other in zip(far.unbind(), near.unbind(), strict=True):
            one, other = (w.mT if flipped else w for w in (one, other))
            same.append((F.linear(x, one), F.linear(x, other)))
    for mine, theirs in same:
        assert torch.equal(mine, theirs)
    assert copy.deepcopy(far).packed.words.is_pinned() and far.clone().packed.words.is_pinned()
    assert far.to("cpu").host_bytes == 0


@pytest.mark.gpu
def test_exact_weights_multiply_as_dense_ones():
    dense, x = gaussian(4, 256, 384).to(CUDA, BF16), gaussian(9, 384).to(CUDA, BF16)
    far = PackedWeight.of(dense, exact=True).offloaded()
    for one, other in zip(far.unbind(), dense, strict=True):
        assert torch.equal(F.linear(x, one), F.linear(x, other))


@pytest.mark.gpu
def test_a_compiled_layer():
    experts, columns, near = layer("hopper")
    far = [packed.in_host_memory() for packed in near]
    x, ids, shares = inputs(6, columns, experts, 2)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def multiply(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return ops.packed_experts(x, ids, shares, *far, experts)

    with torch.no_grad():
        assert torch.equal(multiply(x, ids, shares), ops.packed_experts(x, ids, shares, *near, experts))


@pytest.mark.gpu
def test_memory_of_the_host_is_freed_with_the_last_weight_that_shares_it():
    far = PackedWeight.of(gaussian(4, 256, 384).to(CUDA, BF16)).offloaded()
    expert, address, flags = far[3], ctypes.c_void_p(far.data_ptr()), ctypes.c_uint()

    def is_pinned() -> bool:
        return host_memory._driver().cuMemHostGetFlags(ctypes.byref(flags), address) == 0

    del far
    gc.collect()
    assert is_pinned()
    del expert
    gc.collect()
    assert not is_pinned()


# Models


def offloaded(layout: str, expert_memory: int, **sizes: int) -> Any:
    model = mixture(layout, **sizes).cuda()
    compress_parameters(model, "packed", expert_memory=expert_memory)
    model.set_experts_implementation("neuzip")
    return model


@needs_version_5
@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["qwen3", "gpt-oss"])
def test_tokens_of_a_model(layout: str):
    """Steps in a graph and prompts of many tiles; none, some and all experts on the GPU."""
    sizes = {"hidden": 256, "inner": 256}
    near = packed_mixture(layout, "cuda", **sizes)
    parameters = [p for module in expert_modules(near) for p in module.parameters(False) if p.dim() == 3]
    every = sum(parameter.stored_bytes for parameter in parameters)
    ids = torch.randint(256, (4, 100), generator=torch.Generator().manual_seed(6)).cuda()
    decoder = GreedyDecoder(near, 4, 140)
    expected, logits = decoder.generate(ids, 40), decoder.logits
    with torch.no_grad():
        prompt = near(ids).logits
    for limit in (0, every // 2, every):
        far = offloaded(layout, limit, **sizes)
        use, usual = memory(far).total, memory(near).total
        assert use.stored_bytes + use.host_bytes == usual.stored_bytes
        assert use.host_bytes == 0 if limit == every else use.host_bytes > 0.9 * (every - limit) - 1
        decoder = GreedyDecoder(far, 4, 140)
        assert decoder.graphed
        assert torch.equal(decoder.generate(ids, 40), expected)
        assert torch.equal(decoder.logits, logits)
        with torch.no_grad():
            assert torch.equal(far(ids).logits, prompt)


@needs_version_5
@pytest.mark.gpu
def test_loading_saving_and_decompressing(tmp_path: Path):
    mixture("qwen3").save_pretrained(tmp_path / "plain")
    near = load_model(tmp_path / "plain", device="cuda", residency="packed")
    far = load_model(tmp_path / "plain", device="cuda", residency="packed", expert_memory=0)
    config = NeuzipConfig("packed", expert_memory=0)
    mapped = type(near).from_pretrained(tmp_path / "plain", device_map="cuda", quantization_config=config)
    assert memory(mapped).total == memory(far).total
    assert memory(far).total.host_bytes > 0
    far.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved", device="cuda", residency="packed", expert_memory=0)
    ids = torch.arange(24, device=CUDA)[None]
    with torch.no_grad():
        expected = near(ids).logits
        for model in (far, mapped, again):
            assert torch.equal(model(ids).logits, expected)
    assert far.state_dict().keys() == near.state_dict().keys()
    decompress_parameters(far)
    decompress_parameters(near)
    for name, parameter in far.named_parameters():
        assert parameter.is_cuda and torch.equal(parameter, near.get_parameter(name)), name
    with pytest.raises(UsageError, match="has no parameters of several experts"):
        compress_parameters(llama(vocab_size=4096, hidden_size=32).cuda(), "packed", expert_memory=0)
