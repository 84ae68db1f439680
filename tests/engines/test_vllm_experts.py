"""vLLM on mixtures of experts: packed, dense, and what a layer needs to be packed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm_engine import (
    NEW,
    TEXTS,
    assert_chosen_or_tied,
    greedy,
    in_other_process,
    logits,
    residency,
    start,
    started,
)
from vllm_models import compressed, mixtral, qwen3_moe, with_tensors

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("caches")]

MODELS = {"mixtral": mixtral, "qwen3": qwen3_moe}
EXPERTS = {"mixtral": (4, 512, 256), "qwen3": (8, 128, 256)}
"""Experts, inner and hidden size of the models."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both models, as they were and compressed."""
    root = tmp_path_factory.mktemp("experts")
    plain = {name: make(root / name) for name, make in MODELS.items()}
    return plain | {f"{name}.nz": compressed(folder, root / f"{name}.nz") for name, folder in plain.items()}


@pytest.fixture(scope="module")
def originals(folders: dict[str, Path], say: Any) -> Iterator[dict[str, Any]]:
    """vLLM on both models as they were: these judge the tokens of all others."""
    say("vLLM starts on the original mixtures of experts")
    engines = {name: start(folders[name]) for name in MODELS}
    yield engines
    engines.clear()


# Comes first: an engine that ends in this process ends the process groups of the originals, too.
@pytest.mark.parametrize(
    "options", [{}, {"enable_expert_parallel": True}], ids=["parts of each expert", "some experts each"]
)
def test_two_ranks_take_the_tokens_of_the_original(
    options: Any, folders: dict[str, Path], originals: dict[str, Any], say: Any
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    say(f"vLLM starts with two worker processes: {options}")
    options = {"tensor_parallel_size": 2, **options, **residency("packed")}
    job = {"folder": folders["mixtral.nz"], "options": options}
    (result,), log = in_other_process(
        job, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, cores)),
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
    )  # fmt: skip
    assert "error" not in result, (result, log[-3000:])
    assert "experts stay dense" not in log
    say(f"two ranks: {assert_chosen_or_tied(originals['mixtral'], result['tokens'])} tokens tied")


def experts_of(engine: Any) -> dict[str, list[Any]]:
    """Of each layer whose experts are packed: experts, shapes of both weights, and bits a weight."""

    def of(model: Any) -> dict[str, list[Any]]:
        found = {}
        for name, layer in model.named_modules():
            held = getattr(layer, "neuzip_experts", None)
            if held is not None:
                both = held.gate_up, held.down
                bits = sum(p.nbytes for p in both) * 8 / sum(p.shape[0] * p.shape[1] for p in both)
                found[name] = [held.experts, *(tuple(p.shape) for p in both), bits]
                assert sum(p.nbytes for p in layer.parameters()) <= sum(p.nbytes for p in both)
        return found

    (found,) = engine.apply_model(of)
    return found


@pytest.mark.parametrize(
    ("model", "folder", "options"),
    [
        ("mixtral", "mixtral.nz", residency("packed")),
        ("qwen3", "qwen3", {"quantization": "neuzip"}),
    ],
)
def test_packed_experts_take_the_tokens_of_the_original(
    model: str, folder: str, options: Any, folders: dict[str, Path], originals: dict[str, Any], say: Any
) -> None:
    say(f"vLLM starts: {folder}, {options}")
    with started(folders[folder], **options) as engine:
        tokens, packed = greedy(engine), experts_of(engine)
    ties = assert_chosen_or_tied(originals[model], tokens)
    experts, inner, hidden = EXPERTS[model]
    assert len(packed) == 2
    for count, gate_up, down, bits in packed.values():
        assert (count, gate_up, down) == (
            experts, (experts * 2 * inner, hidden), (experts * hidden, inner),
        )  # fmt: skip
        assert 11 < bits < 12
    say(f"{folder}: {ties} of {len(TEXTS) * NEW} tokens tied, bits {[p[-1] for p in packed.values()]}")


@pytest.mark.parametrize(("model", "options"), [("qwen3", {}), ("mixtral", residency("packed", exact=True))])
def test_dense_and_exact_experts_have_the_logits_of_the_original(
    model: str, options: Any, folders: dict[str, Path], originals: dict[str, Any]
) -> None:
    with started(folders[f"{model}.nz"], **options) as engine:
        assert logits(engine, tokens=NEW) == logits(originals[model], tokens=NEW)
        assert experts_of(engine) == {}


def test_experts_lack_no_tensor_and_say_once_why_they_stay_dense(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    one = lacking(folders["mixtral"], tmp_path / "one", ".experts.2.w1.weight")
    all_of_a_kind = lacking(folders["mixtral"], tmp_path / "kind", ".w2.weight")
    name = "model.layers.1.block_sparse_moe.experts"
    results, log = in_other_process(
        {"folder": folders["mixtral.nz"], "options": residency("packed", exact=True)},
        {"folder": one, "options": {"quantization": "neuzip"}},
        {"folder": compressed(one, tmp_path / "one.nz")},
        {"folder": all_of_a_kind, "options": {"quantization": "neuzip"}},
        {"folder": compressed(all_of_a_kind, tmp_path / "kind.nz")},
    )
    assert "tokens" in results[0], results
    assert log.count("experts stay dense in vLLM: with `exact`, products of experts are vLLM's own") == 1
    for result, words in zip(
        results[1:], [f"{name}.2.w1.weight"] * 2 + [f"{name}.routed_experts.w2_weight"] * 2, strict=True
    ):
        assert words in result.get("error", "no error"), results


def lacking(folder: Path, target: Path, ending: str) -> Path:
    """A copy of a model whose second layer lacks the tensors of its experts with an ending."""

    def without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [name for name in tensors if ".layers.1." in name and name.endswith(ending)]
        assert names
        return {name: tensor for name, tensor in tensors.items() if name not in names}

    return with_tensors(folder, target, without)


# Layers without an engine


def layer_of(**changes: Any) -> Any:
    """What the choice of a method reads of a layer: by default of one that is packed."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    layer = object.__new__(changes.pop("cls", RoutedExperts))
    torch.nn.Module.__init__(layer)
    parallel = {"enable_eplb": False, "dp_size": 1, "pcp_size": 1, "is_sequence_parallel": False}
    moe = {
        "hidden_dim": 256, "intermediate_size_per_partition": 256, "has_bias": False, "moe_backend": "auto",
        "is_lora_enabled": False,
    }  # fmt: skip
    own = {
        "local_num_experts": 4, "activation": MoEActivation.SILU, "swiglu_limit": None,
        "params_dtype": torch.bfloat16, "apply_router_weight_on_input": False,
    }  # fmt: skip
    for values in (parallel, moe, own):
        values.update({key: changes.pop(key) for key in list(changes) if key in values})
    assert not changes
    for key, value in own.items():
        setattr(layer, key, value)
    layer.moe_config = SimpleNamespace(**moe, moe_parallel_config=SimpleNamespace(**parallel))
    return layer


def test_each_reason_to_stay_dense_is_named() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from neuzip.runtime.serving import ServingOptions
    from neuzip.runtime.vllm.experts import reason_to_stay_dense

    class OwnLoader(RoutedExperts):
        def weight_loader(self, *_: Any) -> None: ...

    packed = ServingOptions("packed")
    reasons = {
        "activation 'swigluoai'": {"activation": MoEActivation.SWIGLUOAI},
        "dtype is torch.float32": {"params_dtype": torch.float32},
        "biases": {"has_bias": True},
        "router's weights": {"apply_router_weight_on_input": True},
        "OwnLoader": {"cls": OwnLoader},
        "too small": {"intermediate_size_per_partition": 32},
        "LoRA": {"is_lora_enabled": True},
        "EPLB": {"enable_eplb": True},
        "data parallelism": {"dp_size": 2},
        "--moe-backend triton": {"moe_backend": "triton"},
    }
    for words, changes in reasons.items():
        assert words in (reason_to_stay_dense(layer_of(**changes), packed) or "no reason")
    assert reason_to_stay_dense(layer_of(), packed) is None
    assert "`exact`" in (reason_to_stay_dense(layer_of(), ServingOptions("packed", exact=True)) or "")


@pytest.mark.parametrize(
    ("name", "limit"), [("SILU", None), ("SILU", 0.5), ("GELU", None), ("GELU_TANH", None)]
)
def test_activations_are_those_of_vllm(name: str, limit: float | None) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.utils import _swiglu_limit_torch

    from neuzip.kernels.experts.gate import Gate, gated
    from neuzip.runtime.vllm.experts import activation_of

    activation = MoEActivation[name]
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    own = activation_of(layer_of(activation=activation, swiglu_limit=limit))
    result = gated(rows, own) if isinstance(own, Gate) else own(rows)  # type: ignore[misc]
    expected = torch.empty(8, 32)
    if limit is None:
        getattr(torch.ops._C, activation.custom_op_name)(expected, rows)
    else:
        _swiglu_limit_torch(expected, rows, limit)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_experts_of_other_ranks_add_nothing() -> None:
    """Two ranks with two experts each add up to what one rank with all four computes."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    from neuzip.kernels.experts.gate import Gate
    from neuzip.runtime.vllm.experts import WEIGHTS, PackedExpertsMethod

    generator = torch.Generator().manual_seed(1)
    first, second = (
        torch.randn(4, *shape, generator=generator).mul(0.1).bfloat16() for shape in ((256, 64), (64, 128))
    )
    x = torch.randn(5, 64, generator=generator).bfloat16()
    ids = torch.tensor([[0, 3], [1, 2], [2, -1], [3, 1], [0, 1]], dtype=torch.int32)
    shares = torch.rand(5, 2, generator=generator)

    def result(own: slice) -> torch.Tensor:
        method = PackedExpertsMethod(SimpleNamespace(), Gate())
        layer: Any = torch.nn.Module()
        numbers = torch.full((4,), -1, dtype=torch.int32)
        numbers[own] = torch.arange(len(numbers[own]), dtype=torch.int32)
        layer.expert_map = numbers if len(numbers[own]) < 4 else None
        layer.quant_method = method
        loader = {"weight_loader": default_weight_loader}
        method.create_weights(layer, len(numbers[own]), 64, 128, torch.bfloat16, **loader)
        assert method.incomplete(layer) == [*WEIGHTS]
        layer.w13_weight.weight_loader(layer.w13_weight, first[own])
        assert method.incomplete(layer) == ["w2_weight"]
        layer.w2_weight.weight_loader(layer.w2_weight, second[own])
        assert method.incomplete(layer) == []
        return method.apply(layer, x, shares, ids)

    parts = result(slice(0, 2)).float() + result(slice(2, 4)).float()
    whole = result(slice(0, 4)).float()
    assert whole.abs().max() > 0.1
    torch.testing.assert_close(parts, whole, rtol=2.0**-7, atol=2.0**-7 * float(whole.abs().max()))
