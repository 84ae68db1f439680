"""Two models on the same tokens: figures against their definitions, standard errors against chance."""

from __future__ import annotations

import copy
import math
import statistics
from typing import Any

import models
import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM, PreTrainedModel

from neuzip.errors import NeuzipError
from neuzip.eval.measures.divergence import Paired, compare
from neuzip.eval.measures.estimates import Blocks, Estimate, exponential, mean
from neuzip.eval.measures.head import HeadedModel
from neuzip.eval.measures.windows import TokenWindow, cut, strided

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 150


def llama(width: int = 32, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    return models.llama(
        2,
        vocab_size=vocabulary, hidden_size=width, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    ).eval()  # fmt: skip


def gemma2() -> PreTrainedModel:
    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, final_logit_softcapping=5.0,
    )  # fmt: skip
    return Gemma2ForCausalLM(config).eval()


def changed(model: PreTrainedModel, by: float) -> PreTrainedModel:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=by)
    return other


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (130,), generator=torch.Generator().manual_seed(5))


def log_chances(model: PreTrainedModel, ids: torch.Tensor, windows: list[TokenWindow]) -> torch.Tensor:
    """Of all tokens at each scored place, in fp64, one window at a time."""
    exact = copy.deepcopy(model).double()
    rows = []
    with torch.no_grad():
        for w in windows:
            z = exact(input_ids=ids[None, w.start : w.stop]).logits[0, -w.scored :]
            rows.append(z.log_softmax(-1))
    return torch.cat(rows)


def targets(ids: torch.Tensor, windows: list[TokenWindow]) -> torch.Tensor:
    return torch.cat([ids[w.stop - w.scored + 1 : w.stop + 1] for w in windows])


PAIRS = {
    "close": lambda: (llama(), changed(llama(), 0.001)),
    "far": lambda: (llama(), changed(llama(), 0.1)),
    "softcap": lambda: (gemma2(), changed(gemma2(), 0.01)),
    "widths": lambda: (llama(), llama(width=48)),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("windows", [list(cut(130, 16)), list(strided(130, 16, 5))], ids=["cut", "strided"])
def test_figures_are_those_of_their_definitions(pair, windows, ids):
    models = PAIRS[pair]()
    paired = compare(*(HeadedModel(m) for m in models), ids, windows, top_k=7)
    p, q = (log_chances(m, ids, windows) for m in models)
    wanted = targets(ids, windows)[:, None]
    losses = [-x.gather(1, wanted)[:, 0].numpy() for x in (p, q)]
    np.testing.assert_allclose(paired.base_nll, losses[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(paired.other_nll, losses[1], rtol=1e-4, atol=1e-4)
    kld = (p.exp() * (p - q)).sum(1).numpy()
    np.testing.assert_allclose(paired.kld, kld, rtol=2e-3, atol=1e-7)
    agrees = (p.argmax(1) == q.argmax(1)).numpy()
    assert np.array_equal(paired.agrees, agrees)
    tops = [x.topk(7).indices.tolist() for x in (p, q)]
    shared = [len(set(a) & set(b)) for a, b in zip(*tops, strict=True)]
    assert np.array_equal(paired.shared, shared)

    c = paired.summary()
    difference = (losses[1] - losses[0]).mean()
    assert (c.tokens, c.k) == (len(wanted), 7)
    assert c.nll_difference.value == pytest.approx(difference, abs=1e-5)
    assert c.nll_difference.value == pytest.approx(c.other_nll.value - c.base_nll.value, abs=1e-9)
    assert c.perplexity_ratio.value == pytest.approx(math.exp(difference), rel=1e-5)
    assert c.kld.mean.value == pytest.approx(kld.mean(), rel=1e-3)
    assert c.kld.median == pytest.approx(np.median(kld), rel=2e-3)
    assert c.kld.p999 == pytest.approx(np.quantile(kld, 0.999), rel=2e-3)
    assert c.kld.max == pytest.approx(kld.max(), rel=2e-3)
    assert c.top_1.value == pytest.approx(agrees.mean())
    assert c.top_k.value == pytest.approx(np.mean(shared) / 7)
    assert not c.identical


def test_standard_errors_are_over_blocks(ids):
    windows = list(cut(130, 16))
    of = np.minimum(np.arange(129) // 32, 3)
    paired = compare(
        *(HeadedModel(m) for m in PAIRS["far"]()), ids, windows, Blocks("document", of.astype(np.int64), 4)
    )
    c = paired.summary()
    assert c.blocks == "4 documents"
    for estimate, values in (
        (c.nll_difference, paired.other_nll.astype(float) - paired.base_nll),
        (c.kld.mean, paired.kld.astype(float)),
        (c.top_1, paired.agrees.astype(float)),
        (c.top_k, paired.shared / 10),
    ):
        residuals = [(values[of == b] - values.mean()).sum() for b in range(4)]
        expected = math.sqrt(4 / 3 * sum(r * r for r in residuals)) / 129
        assert estimate.standard_error == pytest.approx(expected, rel=1e-5)
    assert c.perplexity_ratio.standard_error == pytest.approx(
        c.perplexity_ratio.value * (c.nll_difference.standard_error or 0)
    )
    assert compare(HeadedModel(llama()), HeadedModel(llama()), ids, windows).summary().blocks == "9 windows"


def test_the_same_weights_are_the_same_to_the_last_bit(ids):
    paired = compare(HeadedModel(llama()), HeadedModel(llama()), ids, list(cut(130, 16)))
    c = paired.summary()
    assert c.identical
    assert not paired.kld.any() and paired.base_nll.tobytes() == paired.other_nll.tobytes()
    assert (c.kld.mean, c.kld.max) == (Estimate(0.0, 0.0), 0.0)
    assert (c.top_1.value, c.top_k.value, c.nll_difference.value) == (1.0, 1.0, 0.0)


def test_equal_losses_alone_are_not_identical():
    losses = np.ones(4, np.float32)
    kld = np.array([0, 0, 1e-9, 0], np.float32)
    blocks = Blocks("window", np.zeros(4, np.int64), 1)
    assert not Paired(losses, losses, kld, losses > 0, losses, 10, blocks).summary().identical


def test_models_that_cannot_be_compared(ids):
    one, another = HeadedModel(llama()), HeadedModel(llama(vocabulary=VOCABULARY + 1))
    with pytest.raises(NeuzipError, match=r"knows 150 tokens, .* 151"):
        compare(one, another, ids, list(cut(130, 16)))


def test_losses_that_are_not_finite_name_the_model(ids):
    broken = llama()
    broken.get_output_embeddings().weight.data[3] = math.nan
    broken.config.name_or_path = "broken"
    with pytest.raises(NeuzipError, match=r"broken: the loss of .* tokens is nan"):
        compare(HeadedModel(llama()), HeadedModel(broken), ids, list(cut(130, 16)))


class Forbidding(LlamaForCausalLM):
    """A model that never says one of its tokens, and therefore has to form its logits."""

    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        output.logits[..., 7] = -math.inf
        return output


def forbidding() -> Forbidding:
    usual = llama()
    model = Forbidding(usual.config).eval()
    model.load_state_dict(usual.state_dict())
    return model


def test_tokens_that_are_never_given(ids):
    """They add nothing to a divergence, except where the base gives them: then it is infinite."""
    ids, windows = torch.where(ids == 7, 8, ids), list(cut(130, 16))
    same = compare(HeadedModel(forbidding()), HeadedModel(forbidding()), ids, windows)
    assert same.summary().identical
    other = HeadedModel(changed(forbidding(), 0.1))
    assert other.formed is not None
    far = compare(HeadedModel(forbidding()), other, ids, windows).kld
    assert np.isfinite(far).all() and (far > 0).all()
    assert (compare(HeadedModel(forbidding()), HeadedModel(llama()), ids, windows).kld > 0).all()
    with pytest.raises(NeuzipError, match=r"the divergence of .* tokens is inf"):
        compare(HeadedModel(llama()), HeadedModel(forbidding()), ids, windows)


def test_tokens_that_a_model_does_not_have(ids):
    small = llama()
    small.config.name_or_path = "small"
    small.resize_token_embeddings(VOCABULARY - 3)
    small.get_output_embeddings().weight = torch.nn.Parameter(torch.zeros(VOCABULARY, 32))
    last = torch.where(ids == 0, VOCABULARY - 1, ids)
    for pair in ((small, llama()), (llama(), small)):
        with pytest.raises(NeuzipError, match="small: the tokenizer makes token 149, the weights have 147"):
            compare(*map(HeadedModel, pair), last, list(cut(130, 16)))


def test_fewer_tokens_than_the_top_has(ids):
    one = HeadedModel(llama(vocabulary=6))
    c = compare(one, one, ids % 6, list(cut(130, 16))).summary()
    assert (c.k, c.top_k.value) == (6, 1.0)


# Standard errors


def test_standard_error_of_equal_blocks_is_that_of_their_means():
    sums = [3.0, 5.0, 4.0, 8.0]
    found = mean(sums, [2] * 4)
    assert found.value == 2.5
    assert found.standard_error == pytest.approx(statistics.stdev(s / 2 for s in sums) / 2)


def test_a_short_block_weighs_what_it_has():
    sums, counts = [40.0, 20.0, 25.0, 16.0, 1.0], [20, 10, 10, 10, 1]
    found = mean(sums, counts)
    assert found.value == pytest.approx(102 / 51)
    residuals = [s - n * 102 / 51 for s, n in zip(sums, counts, strict=True)]
    assert found.standard_error == pytest.approx(math.sqrt(5 / 4 * sum(r * r for r in residuals)) / 51)


def test_blocks_add_tokens_up():
    blocks = Blocks("document", np.array([0, 0, 1, 1, 1, 2]), 3)
    values = np.array([1, 2, 3, 4, 5, 6], np.float32)
    assert blocks.mean(values) == mean([3.0, 12.0, 6.0], [2, 3, 1])
    assert blocks.text == "3 documents"


def test_standard_error_covers_what_chance_does():
    generator = torch.Generator().manual_seed(4)
    counts = [20] * 30 + [7]
    draws = []
    for _ in range(400):
        shared = torch.randn(len(counts), generator=generator)  # what the tokens of a block have in common
        draws.append(mean([t * (3 + float(x)) for t, x in zip(counts, shared, strict=True)], counts))
    spread = statistics.stdev(d.value for d in draws)
    assert statistics.mean(d.standard_error or 0 for d in draws) == pytest.approx(spread, rel=0.1)


def test_units_of_blocks_are_what_a_sum_is_divided_by():
    blocks = Blocks("document", np.array([0, 0, 1, 1, 2, 2, 3, 3]), 4)
    values, units = np.array([1, 2, 3, 4, 5, 6, 7, 8.0]), np.array([1, 2, 2, 3])
    assert blocks.per(values, units) == mean([3.0, 7.0, 11.0, 15.0], [1, 2, 2, 3])
    assert blocks.count_of(values).tolist() == [3, 7, 11, 15]


def test_few_blocks_have_no_standard_error():
    """Or many, if a few have nearly all tokens: residuals of those alone are near zero whatever they are."""
    assert mean([4.0], [2]) == Estimate(2.0, None)
    assert mean([4.0, 6.0], [2, 2]) == Estimate(2.5, None)
    assert mean([4.0, 6.0, 2.0], [2, 2, 2]).standard_error is not None
    assert mean([4000.0, 6.0, 2.0, 7.0], [2000, 2, 2, 2]) == Estimate(4015 / 2006, None)
    assert exponential(Estimate(0.0, None)) == Estimate(1.0, None)
    assert Estimate(2.0, None).times(3) == Estimate(6.0, None)


def test_exponentials_by_the_delta_method():
    found = exponential(Estimate(4.5, 1e-6))
    assert found.value == math.exp(4.5)
    assert found.standard_error == pytest.approx(math.exp(4.5 + 1e-6) - math.exp(4.5), rel=1e-4)
    assert exponential(Estimate(3e4, 0.1)) == Estimate(math.inf, math.inf)
