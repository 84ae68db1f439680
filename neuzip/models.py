"""The public functions that run models: generate text, and measure what compression costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, get_args

from neuzip.arguments import (
    Source,
    as_list,
    local,
    require_counts,
    require_divergence,
    require_one_of,
    require_paths,
    require_texts,
)
from neuzip.choices import Activations, Attention, DeviceMap, DtypeName, KvForm
from neuzip.compress.device import AnyDevice, named
from neuzip.compress.progress import unseen
from neuzip.errors import UsageError
from neuzip.eval.kv_calibration import KVCalibration, calibrate
from neuzip.eval.measures.convention_names import BOS, NAMES
from neuzip.eval.measures.perplexity import Evaluation, prepare
from neuzip.eval.measures.perplexity import evaluate as evaluate_task
from neuzip.eval.measures.texts import read_text
from neuzip.runtime.decode.generate import Generation
from neuzip.runtime.decode.generate import generate as generate_from
from neuzip.runtime.decode.prompt import prepare as prepare_prompt
from neuzip.runtime.decode.sampling import Sampling
from neuzip.runtime.devices import choose_device
from neuzip.runtime.hf.attention_choice import choose
from neuzip.runtime.hf.load import load_model
from neuzip.runtime.kv_bits import BitsArgument, as_bits
from neuzip.runtime.requirements import (
    require_expert_memory,
    require_quantisable,
    require_seed,
    require_stop,
)
from neuzip.runtime.residencies import RESIDENCIES, Residency

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from neuzip.eval.measures.convention_names import Name


def generate(
    model: PreTrainedModel | Source,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    chat: bool = False,
    system: str | None = None,
    stop: str | Sequence[str] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    kv_bits: BitsArgument | None = None,
    kv_form: KvForm = "rotated",
    residency: Residency = "dense",
    expert_memory: int | None = None,
    activations: Activations | None = None,
    attention: Attention = "recorded",
    device: AnyDevice = "auto",
    graph: bool = True,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Generate text from a prompt, with a loaded model or with a checkpoint, plain or compressed.

    `model` is what `load_model` returned, or a folder, or a Hub id. For a checkpoint, neuzip loads the model
    with `residency`, `expert_memory`, `activations` and `attention` on `device`. For a loaded model, these
    arguments raise UsageError. neuzip reads the tokenizer from the folder or repository of the model.

    `chat` puts the prompt into the tokenizer's chat template; a `system` prompt comes first there and implies
    `chat`. The text ends after `max_new_tokens` tokens, where the model ends it, or before the first of the
    strings `stop`. `temperature` 0 is greedy. With a higher temperature, neuzip samples from the `top_k` most
    likely tokens (0: all), from the nucleus of probability `top_p`, and from tokens at least `min_p` times as
    likely as the most likely one. The same `seed` gives the same tokens. `kv_bits` quantises the KV cache, in
    the form `kv_form`: see `KVCache`. `graph` replays steps as a CUDA graph on a GPU. `on_text` is called
    with each piece of text as it comes.

    The result has the `text`, its `tokens`, the times in seconds, and `tokens_per_second`. Raises UsageError
    for parameters that are wrong, and NeuzipError for a checkpoint without a model that generates text.
    """
    sampling, ends = Sampling(temperature, top_k, top_p, min_p), as_list("stop", stop)
    require_texts(prompt=prompt, system=system or "")
    require_counts(max_new_tokens=max_new_tokens)
    require_one_of(get_args(KvForm), kv_form=kv_form)
    bits = None if kv_bits is None else as_bits(kv_bits).in_form(kv_form)
    require_seed(seed)
    require_stop(ends)
    if isinstance(model, str | os.PathLike):
        _require_ways(residency, activations, attention)
        require_expert_memory(expert_memory, residency, device=named(device))
        place, mode = choose_device(device), require_quantisable(activations, residency)
        path = local("model", model)
        task = prepare_prompt(path, prompt, max_new_tokens=max_new_tokens, chat=chat, system=system)
        live = load_model(
            path, device=place, residency=residency, expert_memory=expert_memory, activations=mode,
            attention=False,
        )  # fmt: skip
        choose(live, attention)
    else:
        origin = _origin(model)
        _refuse_of_loaded(
            residency=residency != "dense", expert_memory=expert_memory is not None,
            activations=activations is not None, attention=attention != "recorded",
            device=device not in ("auto", None),
        )  # fmt: skip
        live = model
        path = local("model", origin)
        task = prepare_prompt(path, prompt, max_new_tokens=max_new_tokens, chat=chat, system=system)
    return generate_from(
        live, task, sampling=sampling, seed=seed, stop=ends, kv_bits=bits, kv_form=kv_form,
        on_text=on_text or (lambda text: None), loop="auto" if graph else "transformers",
    )  # fmt: skip


def evaluate(
    source: Source,
    *,
    text: str | os.PathLike[str],
    original: Source | None = None,
    conventions: Name | Sequence[Name] | None = None,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    device: AnyDevice = "auto",
    device_map: DeviceMap | None = None,
    dtype: DtypeName = "auto",
    residency: Residency = "dense",
    expert_memory: int | None = None,
    activations: Activations | None = None,
    kv_bits: BitsArgument | None = None,
    kv_form: KvForm = "rotated",
    attention: Attention = "recorded",
) -> Evaluation:
    """Measure the perplexity of a model on a text, and its KL divergence from the original.

    `source` is a folder or a Hub id, plain or compressed. `text` is a UTF-8 file, a folder of them, a dataset
    of the Hub, or "demo". With the `original`, both models are evaluated and compared token by token.

    `conventions` are the perplexity conventions; None measures all for which the text is long enough.
    `window` is the number of tokens predicted per window, and `stride` the distance between strided windows.
    `max_tokens` limits the evaluation to the first tokens of the text. `device_map` spreads each model over
    all GPUs. `dtype` "auto" is float32 for dense weights on a CPU, else the checkpoint's own. `residency`,
    `activations`, `kv_bits` and `kv_form` (see `KVCache`) and `attention` apply to the model of `source`, not
    to the original. `expert_memory` limits the bytes of experts on a GPU, as in `load_model`.

    The result has one entry of `measured` per convention, and `comparison` with the KL divergence in nats per
    token, each with its standard error. Raises UsageError for parameters that are wrong, and NeuzipError for
    a checkpoint without a causal language model.
    """
    named(device)
    require_counts(window=window, stride=stride, max_tokens=max_tokens)
    require_one_of(get_args(KvForm), kv_form=kv_form)
    bits = None if kv_bits is None else as_bits(kv_bits).in_form(kv_form)
    require_one_of(get_args(DtypeName), dtype=dtype)
    require_one_of((*get_args(DeviceMap), None), device_map=device_map)
    _require_ways(residency, activations, attention)
    require_paths(text=text)
    names = None if conventions is None else as_list("conventions", conventions)
    for name in names or ():
        require_one_of((BOS, *NAMES), conventions=name)
    mode = require_quantisable(activations, residency)
    document = read_text(os.fspath(text))  # first: models may be downloaded
    paths = [] if original is None else [local("original", original)]
    paths.append(local("source", source))
    task = prepare(
        paths, document, conventions=names, window=window, stride=stride,
        max_tokens=max_tokens, device=device, device_map=device_map, dtype=dtype, residency=residency,
        expert_memory=expert_memory, activations=mode, kv_bits=bits, kv_form=kv_form, attention=attention,
    )  # fmt: skip
    return evaluate_task(task, divergence=original is not None)


def choose_kv_bits(
    model: PreTrainedModel | Source,
    *,
    text: str | os.PathLike[str],
    max_kld: float,
    window: int | None = None,
    max_tokens: int | None = None,
    kv_form: KvForm = "rotated",
    device: AnyDevice = "auto",
) -> KVCalibration:
    """Choose the bits of the KV cache layer by layer: the fewest for a KL divergence of at most `max_kld`.

    `model` is what `load_model` returned, or a folder, or a Hub id, plain or compressed, which is loaded
    dense on `device`. Keys and values of each layer get 8, 6, 5, 4, 3 or 2 bits. The divergence, in nats per
    token, is that of the model with the quantised cache from the same model with its own, on `text`, as in
    `evaluate`, and with its standard error added it is at most `max_kld`. `window` None is 1,024 tokens, or
    the model's maximum. `max_tokens` None uses the first 8,192 tokens of the text on a CPU, and 32,768 on a
    GPU.

    `bits` of the result is what `KVCache`, `generate` and `evaluate` take as `kv_bits`, and `save` writes a
    plan file, which they take as well. Raises UsageError for parameters that are wrong, and NeuzipError for a
    `max_kld` that 8 bits do not reach.
    """
    named(device)
    require_counts(window=window, max_tokens=max_tokens)
    require_paths(text=text)
    require_divergence(max_kld=max_kld)
    require_one_of(get_args(KvForm), kv_form=kv_form)
    document = read_text(os.fspath(text))
    if isinstance(model, str | os.PathLike):
        path = local("model", model)
        live = load_model(path, device=choose_device(device), attention=False)
    else:
        _refuse_of_loaded(device=device not in ("auto", None))
        path, live = local("model", _origin(model)), model
    return calibrate(
        path, live, document, max_kld, unseen, window=window, max_tokens=max_tokens, kv_form=kv_form
    )


def _require_ways(residency: object, activations: object, attention: object) -> None:
    """Raise UsageError for a way to run a model that there is not."""
    require_one_of(tuple(RESIDENCIES), residency=residency)
    require_one_of((*get_args(Activations), None), activations=activations)
    require_one_of(get_args(Attention), attention=attention)


def _origin(model: PreTrainedModel) -> str:
    """Where a loaded model came from: its folder or its Hub id. Raises UsageError."""
    config = getattr(model, "config", None)
    if config is None:
        raise UsageError(
            f"`model`: is neither a model of transformers nor a checkpoint, but a {type(model).__name__}",
            "give what neuzip.load_model returned, a folder, or owner/name",
        )
    origin = config.name_or_path
    if not origin:
        raise UsageError(
            "`model` does not say which checkpoint it came from, so its tokenizer cannot be found",
            "load it with neuzip.load_model, or give the checkpoint itself",
        )
    return str(origin)


def _refuse_of_loaded(**parameters: bool) -> None:
    """Raise UsageError for parameters that say how to load a model which is loaded already."""
    for name, was_given in parameters.items():
        if was_given:
            raise UsageError(
                f"`{name}` says how to load a checkpoint, and `model` is loaded already",
                f"leave it out, or load the model with it: load_model(..., {name}=...)",
            )
