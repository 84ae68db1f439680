"""What a compressed mixture of experts has to pass before it is timed: weights, logits, one layer of experts.

A check that fails ends the run. Errors are relative, in the 2-norm, to fp64 (norms in fp32, as the models'
code has them). All forms take the routes of one run with bf16 weights: see expert_routes.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from expert_routes import Route, recorded, replayed
from packed_linear import SCATTER, distance
from torch import nn
from transformers import PreTrainedModel
from weight_laws import generator_on

from neuzip.runtime.decode.agreement import Agreement, agreement_of_logits
from neuzip.runtime.decode.benchmark import prompts
from neuzip.runtime.hf.decoder import input_device
from neuzip.runtime.residency import is_compressed

Tensor = torch.Tensor

MOST_RUNS = 16
"""Forward passes of a number of texts, of one text for example: errors of a few tokens scatter."""

SAMPLE = 32
"""Tokens whose results of a layer of experts are checked."""

PROMPT = 256
"""Tokens of the prompt that is checked."""


@dataclass(frozen=True)
class LogitsCheck:
    """Logits of so many tokens at once: the errors of a form and of bf16, and the form's likeliest tokens."""

    tokens: int
    error: float
    bf16_error: float
    agreement: Agreement


def require_same_weights(name: str, form: PreTrainedModel, bf16: PreTrainedModel) -> None:
    """Exit unless every compressed weight decodes to that of the original, bit for bit."""
    compressed = {name: p for name, p in form.named_parameters() if is_compressed(p)}
    if not any(parameter.dim() == 3 for parameter in compressed.values()):
        raise SystemExit(f"{name}: its experts are not compressed: not timed")
    for place, parameter in compressed.items():
        expected = bf16.get_parameter(place)
        if not torch.equal(parameter.dense().view(torch.int16), expected.detach().view(torch.int16)):
            raise SystemExit(f"{name}, {place}: weights do not decode to the original ones: not timed")


@dataclass(frozen=True)
class ExpertsCheck:
    """Errors of a layer of experts of a form and of bf16, for so many `tokens` at a time."""

    tokens: int
    error: float
    bf16_error: float


def require_experts(name: str, form: Any, bf16: Any, exact: Any, tokens: int) -> ExpertsCheck:
    """The errors of the experts of a block of a form, `tokens` at a time, on routes of the block of bf16.

    `exact` are the experts in fp64. Exits if the error is more than SCATTER times that of bf16.
    """
    x = made_up_states(bf16.experts, max(tokens, SAMPLE))
    _, weights, index = bf16.gate(x)
    first = slice(0, SAMPLE)
    expected = exact(x[first].double(), index[first], weights[first].double())
    parts = list(zip(*(each.split(tokens) for each in (x, index, weights)), strict=True))
    error, base = (
        distance(torch.cat([block.experts(*part) for part in parts])[first], expected)
        for block in (form, bf16)
    )
    if not error <= SCATTER * base:
        raise SystemExit(
            f"{name}, experts, {tokens} tokens: the error is {error:.2e}, that of bf16 {base:.2e}: not timed"
        )
    return ExpertsCheck(tokens, error, base)


def made_up_states(module: Any, tokens: int) -> Tensor:
    """Made-up inputs of a layer, N(0, 1) [tokens, hidden], in the dtype and on the device of a module."""
    parameter: Tensor = next(module.parameters())
    size = tokens, module.config.hidden_size
    generator = generator_on(parameter.device)
    return torch.randn(size, device=parameter.device, generator=generator).to(parameter.dtype)


@torch.no_grad()
def require_logits(
    forms: dict[str, PreTrainedModel], bf16: PreTrainedModel, batches: Sequence[int], prompt: int = PROMPT
) -> dict[str, list[LogitsCheck]]:
    """The errors of the logits of each form; exits if one is more than SCATTER times that of bf16.

    Checked are a token of each of `batches` texts, and a prompt: what a step and a prefill multiply.
    """
    checks: dict[str, list[LogitsCheck]] = {name: [] for name in forms}
    words = bf16.config.vocab_size
    texts_of_one = prompts(words, max(MOST_RUNS, *batches), 1)
    for ids, sizes in ((texts_of_one, batches), (prompts(words, 1, prompt), (1,))):
        texts = ids.to(input_device(bf16))
        routes = routes_of(bf16, texts)
        exact = exact_logits(bf16, texts, routes)
        for size in sizes:
            expected = logits_of(bf16, texts, routes, size)
            count = len(expected)
            base = distance(expected, exact[:count])
            for name, form in forms.items():
                logits = logits_of(form, texts, routes, size)
                error = distance(logits, exact[:count])
                check = LogitsCheck(
                    size * texts.shape[1], error, base,
                    agreement_of_logits(expected[None], logits.argmax(dim=-1)[None]),
                )  # fmt: skip
                checks[name].append(check)
                if not error <= SCATTER * base:
                    raise SystemExit(
                        f"{name}, {check.tokens} tokens: the error of logits is {error:.2e}, "
                        f"that of bf16 {base:.2e}: not timed"
                    )
    return checks


def routes_of(model: PreTrainedModel, ids: Tensor) -> list[Route]:
    """The routes that a model takes for texts, int64 [batch, tokens], of each layer."""
    with recorded(model) as calls:
        model(ids, use_cache=False, logits_to_keep=1)
    return [route for (route,) in calls]


def logits_of(model: PreTrainedModel, ids: Tensor, routes: Sequence[Route], batch: int) -> Tensor:
    """Logits [tokens, words] of texts, `batch` at a time, on routes: of MOST_RUNS such batches at most."""
    parts = []
    for begin in range(0, min(len(ids), batch * MOST_RUNS), batch):
        tokens = slice(begin * ids.shape[1], (begin + batch) * ids.shape[1])
        with replayed(model, [Route(route.index[tokens], route.weights[tokens]) for route in routes]):
            parts.append(model(ids[begin : begin + batch], use_cache=False).logits.flatten(0, 1))
    return torch.cat(parts)


def exact_logits(model: PreTrainedModel, ids: Tensor, routes: Sequence[Route]) -> Tensor:
    """Logits [tokens, words] of texts in fp64, layer by layer, on routes, from dense weights."""
    inner: Any = model.model
    hidden = inner.embed_tokens(ids).double()
    rotation = inner.rotary_emb(hidden, position_ids=torch.arange(ids.shape[1], device=ids.device)[None])
    with replayed(model, routes):
        for layer in inner.layers:
            hidden = in_fp64(layer)(hidden, position_embeddings=rotation)
    hidden = inner.norm(hidden).flatten(0, 1)
    head: Any = model.lm_head
    return torch.cat([hidden @ part.double().T for part in head.weight.split(1 << 14)], dim=1)


def in_fp64(module: nn.Module) -> Any:
    """A copy of a module in fp64, whose experts are computed one by one by the model's own code."""
    exact = copy.deepcopy(module).double()
    for part in exact.modules():
        if hasattr(part, "gate_up_proj"):
            part.config._experts_implementation = "eager"
    return exact
