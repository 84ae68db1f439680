"""Parts of benchmarks of papers that no page shows: filters, dropped tokens, rounding, variants."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neuzip.kernels.float_fields import FORMATS, round_mantissa
from neuzip.kernels.linear_cross_entropy.triton.candidates import candidates

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def script(root: Path) -> Callable[[str], Any]:
    """A function that imports a benchmark by its name."""

    def load(name: str) -> Any:
        sys.path.insert(0, str(root / "benchmarks"))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.pop(0)

    return load


# Training with filtered gradients


def head(tokens: int, vocabulary: int, width: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator)
    weight[: vocabulary // 2] *= 0.1  # half of the vocabulary is never likely
    return hidden, weight, torch.randint(vocabulary // 2, vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize("eps", [2.0**-12, 2.0**-8, 2.0**-4])
def test_the_filter_keeps_the_tiles_that_the_kernels_keep(script: Callable[[str], Any], eps: float) -> None:
    hidden, weight, target = head(200, 700)
    logits = F.linear(hidden, weight)
    maxima = torch.stack([part.amax(1) for part in logits.split(128, 1)])
    wanted = candidates(maxima, 128, logits.logsumexp(1), target.int(), 700, eps)
    kept = script("filtered_training").kept_tiles(hidden, weight, target, eps)
    assert torch.equal(kept, wanted.bool().T)
    assert kept.any() and (eps < 2**-10 or not kept.all())


def test_filtered_gradients(script: Callable[[str], Any]) -> None:
    """The gradients of logits, as those of a head whose weights are the unit matrix."""
    module = script("filtered_training")
    hidden, weight, target = head(200, 700)
    logits, unit = F.linear(hidden, weight).requires_grad_(), torch.eye(700)
    (exact,) = torch.autograd.grad(F.cross_entropy(logits, target), logits)
    for eps in (1e-30, 2.0**-4):
        loss = module.filtered_loss(logits, unit, target, eps)
        (found,) = torch.autograd.grad(3 * loss, logits)
        kept = module.kept_tiles(logits.detach(), unit, target, eps)
        whole = kept.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :700]
        assert not found[~whole].any()
        torch.testing.assert_close(found[whole], 3 * exact[whole])
        assert kept.all() == (eps < 1e-20)


# Ignored tokens


def test_ignored_tokens_of_the_benchmark(script: Callable[[str], Any]) -> None:
    module = script("ignored_tokens")
    target = module.with_ignored(torch.arange(100), 0.3)
    assert int((target == module.IGNORED).sum()) == 30
    assert not (target[:70] == module.IGNORED).all(), "at random"
    hidden, weight, _ = head(100, 300)
    dropped = module.dropping(lambda h, w, t: F.cross_entropy(F.linear(h, w), t))(hidden, weight, target)
    torch.testing.assert_close(dropped, F.cross_entropy(F.linear(hidden, weight), target))


# Throughput by size


@pytest.mark.parametrize("kept", [0, 1, 3, 6])
def test_rounding_of_the_benchmark_is_that_of_the_codec(script: Callable[[str], Any], kept: int) -> None:
    bits = torch.randn(4097, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits[:4] = torch.tensor([0.0, -0.0, 1e-40, -1e-40])
    bits = bits.view(torch.int16)
    wanted = round_mantissa(bits.numpy().view("uint16"), FORMATS["BF16"], kept)
    found = script("matrix_throughput").rounded(bits, kept)
    assert (found.numpy().view("uint16") == wanted).all()


def test_int8_of_the_benchmark(script: Callable[[str], Any]) -> None:
    bits = torch.randn(4 * 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits[:1024] = 0
    module = script("matrix_throughput")
    assert module.int8(bits.view(torch.int16)).check()
    codes, scale = module.quantized(bits.view(4, 1024))
    assert codes.dtype == torch.int8 and not codes[0].any() and int(codes[1:].abs().max()) == 127
    assert not module.restored(codes, scale)[0].any()


# Variants of Mix-LN


def test_variants_are_compared_with_pre_ln_of_the_same_scaling(script: Callable[[str], Any]) -> None:
    module = script("mix_ln_variants")

    def runs(*losses: float) -> list[dict[str, Any]]:
        return [{"seed": seed, "held_out": {"text": loss}} for seed, loss in enumerate(losses)]

    found = {"pre": runs(2.0, 2.0), "pre-both": runs(1.0, 1.5), "mix-both": runs(0.9, 1.4), "mix": runs(2.1)}
    both = module.row("mix-both", found, "text")
    assert both["against_pre"]["percent"] == pytest.approx(100 * torch.tensor(-0.1).expm1().item(), rel=1e-5)
    assert module.row("mix", found, "text")["against_pre"]["percent"] > 0
    assert module.row("pre-both", found, "text")["against_pre"] is None
    assert module.row("mix", {"mix": runs(2.1)}, "text")["against_pre"] is None
    baselines = {module.VARIANTS[name].baseline for name in module.VARIANTS}
    assert baselines <= set(module.VARIANTS.values())


@pytest.mark.slow
def test_layers_of_a_trained_variant(script: Callable[[str], Any], root: Path) -> None:
    """Distances and drops of a random model; a layer that writes nothing changes nothing."""
    from mix_ln import TINY
    from mix_ln_recipes import new_model

    module = script("mix_ln_variants")
    model = new_model(TINY.config("pre", 1024), 0, torch.device("cpu"))
    layer = model.model.layers[2]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layer.get_submodule(name).weight.data.zero_()
    found = module.examiner(root / "eval" / "demo" / "checkpoint", module.read_text("demo"))(model)
    assert json.loads(json.dumps(found)) and len(found["drops"]) == TINY.layers
    assert found["drops"][2] == pytest.approx(0, abs=1e-6) and found["blocks"][0][2] == pytest.approx(
        0, abs=1e-6
    )
    assert found["blocks"][0][1] > 1e-3
