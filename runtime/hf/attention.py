"""Quantised attention (SageAttention2) in live models, by a name that transformers knows.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="neuzip_sage8")
    model.set_attn_implementation("neuzip_sage4")
    patch_attention(model, [8, 8, None, 4])

| name         | bits of queries and keys                                              |
|--------------|-----------------------------------------------------------------------|
| neuzip_sage8 | 8                                                                     |
| neuzip_sage4 | 4                                                                     |
| neuzip_sage  | of each layer what `patch_attention` or config.json says; full        |
|              | precision where they say nothing                                      |

What the kernel does not do, it is not given: such a call takes the attention that the model has by itself,
torch's SDPA or its eager one, with the same mask, and gives the same bits as if nothing had been patched.
Under the policy "auto" that goes for what SDPA does faster, too: few queries, as in decoding, few keys, and
all on a CPU, where the arithmetic is only simulated. "always" quantises wherever it can, to see what that
does to a model. Each reason is a warning, once a model; `uses` counts all calls. What torch.compile traces is
not quantised, and nothing is said or counted there. Masks are not made before something asks for them, see
masks. Padding is taken out of batches: each text has means and scales of its own.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from neuzip.errors import FormatError, UsageError
from neuzip.formats.config_section import SECTION
from neuzip.runtime.hf import masks
from neuzip.runtime.hf.attention_call import (
    AttentionCall,
    Output,
    own_attention,
    packed_attention,
    quantized,
    slower,
)
from neuzip.runtime.hf.attention_config import BITS, FIELD, LAYERS_ENTRY, Layers, checked_layers, miscounted
from neuzip.runtime.hf.attention_names import BY_LAYER, NAMES
from neuzip.runtime.requirements import require_model

Policy = Literal["auto", "always"]

CARRIED = "_neuzip_attention"
"""The attribute of modules whose copies are to attend as they do."""

NOT_RECORDED = "nothing is recorded for the layer"
FULL_PRECISION = "the layer keeps full precision"
BY_THE_CACHE = "the cache's own attention to what it keeps packed"


@dataclass(eq=False)
class AttentionState:
    """How the layers of a model, those of one config, attend.

    layers  bits of each; None: what the config says
    before  the implementation and the config's section before it was patched
    """

    layers: Layers | None = None
    policy: Policy = "auto"
    warn: bool = True
    before: tuple[str, Any] | None = None
    calls: Counter[str] = field(default_factory=Counter)
    warned: set[str] = field(default_factory=set)


_states: dict[int, tuple[weakref.ref[Any], AttentionState]] = {}  # configs have no hash


def _state(owner: object) -> AttentionState:
    """The state of a config, made with the first question for it."""
    key = id(owner)
    if key not in _states or _states[key][0]() is not owner:
        _states[key] = weakref.ref(owner, lambda gone: _forget(key, gone)), AttentionState()
    return _states[key][1]


def _forget(key: int, gone: weakref.ref[Any]) -> None:
    if key in _states and _states[key][0] is gone:
        del _states[key]


@dataclass(frozen=True, eq=False)
class _Carried:
    """An attribute of the modules of a config, by which their copies and pickles keep its state.

    Only what was asked for: counts begin anew, and warnings too.
    """

    config: Any

    def __reduce__(self) -> tuple[Callable[..., _Carried], tuple[Any, ...]]:
        state = _state(self.config)
        return _carried_to, (self.config, state.layers, state.policy, state.warn, state.before)


def _carried_to(
    config: Any, layers: Layers | None, policy: Policy, warn: bool, before: tuple[str, Any] | None
) -> _Carried:
    """The state of a config, given to the config of a copy, which this makes known."""
    state = _state(config)
    state.layers, state.policy, state.warn, state.before = layers, policy, warn, before
    return _Carried(config)


def _attend(
    name: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> Output:
    """What transformers calls in the place of its own functions. It gives no weights."""
    call = AttentionCall(module, query, key, value, attention_mask, dropout, scaling, is_causal, options)
    if torch.compiler.is_compiling():
        return call.by(own_attention(call))
    config = getattr(module, "config", module)
    state = _state(config)
    if not isinstance(key, Tensor):
        state.calls[BY_THE_CACHE] += 1
        return call.by(packed_attention)
    bits, reason = (NAMES[name], None) if name != BY_LAYER else _of_layer(module, state)
    if reason is None and state.policy == "auto":
        reason = slower(call)
    if reason is None:
        output = quantized(call, bits or 8)
        if not isinstance(output, str):
            state.calls[f"{bits} bits"] += 1
            return output, None
        reason = output
    own = own_attention(call)
    _count(state, config, f"{'sdpa' if own is sdpa_attention_forward else 'eager'}: {reason}")
    return call.by(own)


def _count(state: AttentionState, config: object, how: str) -> None:
    """Count a call that was not quantised, and warn of the first of its kind."""
    state.calls[how] += 1
    if state.warn and how not in state.warned and not how.endswith(FULL_PRECISION):
        state.warned.add(how)
        model = getattr(config, "model_type", type(config).__name__)
        warnings.warn(f"{model}: some attention is not quantised, but done by {how}", stacklevel=4)


def _of_layer(module: torch.nn.Module, state: AttentionState) -> tuple[int | None, str | None]:
    """Bits of a layer, and why it has none."""
    layers = LAYERS_ENTRY.get(getattr(module, "config", None)) if state.layers is None else state.layers
    number = getattr(module, "layer_idx", None)
    if layers is None or number is None or number >= len(layers):
        return None, NOT_RECORDED
    return layers[number], FULL_PRECISION if layers[number] is None else None


def patch_attention(
    model: PreTrainedModel,
    layers: int | Sequence[int | None] | None = None,
    *,
    policy: Policy = "auto",
    warn: bool = True,
) -> None:
    """Quantise the attention of a loaded causal language model, and record the bits in its config.

    layers  8 or 4 bits for all layers; or a list with one entry per layer, None for full precision; or None
            for what the config records
    policy  "auto" uses SDPA for calls that SDPA computes faster, "always" quantises wherever the kernel can
    warn    warn once of each reason why a call is not quantised

    Deep copies and pickles of the model are patched too. The call resets the counts that
    `neuzip.runtime.hf.attention.uses` returns. Raises UsageError for other bits, a list of another length, a
    config that records nothing, and a model whose attention cannot be replaced.
    """
    if policy not in ("auto", "always"):
        raise UsageError(f"`policy={policy!r}`: there is no such policy", "give 'auto' or 'always'")
    require_model(model)
    config = model.config
    if config.is_encoder_decoder:
        raise UsageError(
            f"{type(model).__name__}: has layers of an encoder and of a decoder",
            "call set_attn_implementation('neuzip_sage8') for all of them",
        )
    text = config.get_text_config(decoder=True)
    chosen = LAYERS_ENTRY.get(config) if layers is None else checked_layers(layers, text.num_hidden_layers)
    if chosen is None:
        raise UsageError(
            f"{type(model).__name__}: its config records no bits of attention", "give 8, 4, or a list"
        )
    if len(chosen) != text.num_hidden_layers:
        raise FormatError("config.json", miscounted(chosen, text.num_hidden_layers), field=FIELD)
    state = _state(text)
    before = state.before or (text._attn_implementation, getattr(config, SECTION, None))
    _set_implementation(model, BY_LAYER)
    LAYERS_ENTRY.set(config, chosen)
    state.layers, state.policy, state.warn, state.before = chosen, policy, warn, before
    state.calls.clear()
    state.warned.clear()
    carried = _Carried(text)
    for module in model.modules():
        if getattr(module, "config", None) is text:
            setattr(module, CARRIED, carried)


def unpatch_attention(model: PreTrainedModel) -> None:
    """Undo `patch_attention`: restore the attention of a model and what its config recorded before.

    A model that was loaded with an attention of neuzip gets the default attention of transformers.
    """
    text = model.config.get_text_config(decoder=True)
    state = _state(text)
    if state.before is not None:
        name, section = state.before
        if section is None:
            delattr(model.config, SECTION)
        else:
            setattr(model.config, SECTION, section)
    elif text._attn_implementation in NAMES:
        name = model.get_correct_attn_implementation(None)
    else:
        return
    _set_implementation(model, name)
    _states.pop(id(text), None)
    for module in model.modules():
        vars(module).pop(CARRIED, None)


def uses(model: PreTrainedModel) -> dict[str, int]:
    """How often attention was done in which way since a model was patched: "8 bits", "sdpa: <reason>" ..."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    total: Counter[str] = Counter()
    for config in configs.values():
        total += _state(config).calls
    return dict(total)


def _set_implementation(model: PreTrainedModel, name: str) -> None:
    """Have the text model, and no other part, attend by a name. Raises UsageError."""
    config = model.config
    text = config.get_text_config(decoder=True)
    keys = [key for key in config.sub_configs if getattr(config, key, None) is text]
    by_part: Any = {keys[0]: name} if keys else {"": name} if config.sub_configs else name
    if name in NAMES:
        _require_replaceable(type(model))
    model.set_attn_implementation(by_part)
    if text._attn_implementation != name:
        raise UsageError(
            f"{type(model).__name__}: transformers cannot set its attention",
            "leave it as it is: no bits of attention",
        )


def _require_replaceable(kind: type[PreTrainedModel]) -> None:
    """Raise UsageError for models that would ask for our masks and then attend in their own way."""
    asks = kind._supports_sdpa or kind._supports_attention_backend
    if not asks or not kind._can_set_attn_implementation():
        raise UsageError(
            f"{kind.__name__}: its attention cannot be replaced, as it does not ask transformers for it",
            "load it without quantised attention",
        )


def _checked(correct: Callable[..., str]) -> Callable[..., str]:
    """What every model asks about an implementation, for ours with a look at the model."""

    @functools.wraps(correct)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *arguments: Any, **options: Any
    ) -> str:
        if requested_attention in NAMES:
            _require_replaceable(type(self))
        return correct(self, requested_attention, *arguments, **options)

    return get_correct_attn_implementation


def use_recorded(model: PreTrainedModel, layers: Layers) -> None:
    """Patch a model that has just been loaded as its config.json records, and say so."""
    patch_attention(model, layers)
    if any(layers):
        counts = " and ".join(f"{layers.count(bits)} in {bits} bits" for bits in BITS if bits in layers)
        warnings.warn(
            f"of {len(layers)} layers the attention of {counts} is quantised, as config.json records",
            stacklevel=3,
        )


for _name in NAMES:
    AttentionInterface.register(_name, functools.partial(_attend, _name))
    AttentionMaskInterface.register(_name, masks.mask)
PreTrainedModel.get_correct_attn_implementation = _checked(  # type: ignore[method-assign]
    PreTrainedModel.get_correct_attn_implementation
)
