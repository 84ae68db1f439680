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
attention_mask. Padding is taken out of batches: each text has means and scales of its own.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.formats.config_section import SECTION, own_section, read_config, with_entry, write_entry
from neuzip.runtime.hf import masks as attention_mask
from neuzip.runtime.hf.masks import DeferredMask
from neuzip.runtime.requirements import require_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Policy = Literal["auto", "always"]
Layers = tuple[int | None, ...]
Output = tuple[Tensor, Tensor | None]

CARRIED = "_neuzip_attention"
"""The attribute of modules whose copies are to attend as they do."""

ENTRY = "attention"
"""Of our section of config.json, which is an attribute of a model's config too."""

FIELD = f"{SECTION}.{ENTRY}.layers"

BY_LAYER = "neuzip_sage"
NAMES: dict[str, int | None] = {"neuzip_sage8": 8, "neuzip_sage4": 4, BY_LAYER: None}
"""Names that transformers knows, and their bits; None: those of the layer."""

BITS = (4, 8)

LEAST_TOKENS = 2048
"""Fewer queries do not repay quantising all keys; fewer keys were never faster (benchmarks/attention.py)."""
LEAST_PRODUCTS = 10**11
"""Of numbers, of queries with keys, over all heads. What has fewer SDPA does before our kernels are launched:
on an H200, with 32 heads of 128 and a causal mask, one text of 7,000 tokens, or eight of 2,500."""

NOT_RECORDED = "nothing is recorded for the layer"
FULL_PRECISION = "the layer keeps full precision"
BY_THE_CACHE = "the cache's own attention to what it keeps packed"

HARMLESS = frozenset({
    "cache_position", "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_ids",
    "return_dict", "sliding_window", "use_cache",
})  # fmt: skip
"""What layers hand on that attention has no use for. A sliding window is in the mask, as for SDPA."""

# What a model does


@dataclass(eq=False)
class State:
    """How the layers of a model, those of one config, attend.

    layers  bits of each; None: what the config says
    before  the implementation and the config's section before it was patched
    """

    layers: Layers | None = None
    policy: Policy = "auto"
    warn: bool = True
    before: tuple[str, Any] | None = None
    calls: Counter[str] = field(default_factory=Counter)
    said: set[str] = field(default_factory=set)


_states: dict[int, tuple[weakref.ref[Any], State]] = {}  # configs have no hash


def _state(owner: object) -> State:
    """That of a config."""
    key = id(owner)
    if key not in _states or _states[key][0]() is not owner:
        _states[key] = weakref.ref(owner, lambda gone: _forget(key, gone)), State()
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
    """The same for the config of a copy, which this makes known."""
    state = _state(config)
    state.layers, state.policy, state.warn, state.before = layers, policy, warn, before
    return _Carried(config)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention as transformers makes it, from queries [B, Hq, Nq, D] to [B, Nq, Hq, D]."""

    module: torch.nn.Module
    query: Tensor
    key: Any
    value: Any
    mask: Tensor | None
    dropout: float
    scaling: float | None
    is_causal: bool | None
    options: dict[str, Any]

    @property
    def causal(self) -> bool:
        """Whether it is, if no mask says what is seen."""
        return getattr(self.module, "is_causal", True) if self.is_causal is None else self.is_causal

    def by(self, function: Callable[..., Output]) -> Output:
        """The result by another attention of transformers."""
        mask = self.mask.dense() if isinstance(self.mask, DeferredMask) else self.mask
        return function(
            self.module, self.query, self.key, self.value, mask,
            dropout=self.dropout, scaling=self.scaling, is_causal=self.is_causal, **self.options,
        )  # fmt: skip


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
    call = Call(module, query, key, value, attention_mask, dropout, scaling, is_causal, options)
    if torch.compiler.is_compiling():
        return call.by(_own(call))
    config = getattr(module, "config", module)
    state = _state(config)
    if not isinstance(key, Tensor):
        state.calls[BY_THE_CACHE] += 1
        return call.by(_of_packed)
    bits, reason = (NAMES[name], None) if name != BY_LAYER else _of_layer(module, state)
    if reason is None and state.policy == "auto":
        reason = _slower(call)
    if reason is None:
        found = _quantized(call, bits or 8)
        if not isinstance(found, str):
            state.calls[f"{bits} bits"] += 1
            return found, None
        reason = found
    own = _own(call)
    _note(state, config, f"{'sdpa' if own is sdpa_attention_forward else 'eager'}: {reason}")
    return call.by(own)


def _note(state: State, config: object, how: str) -> None:
    """Count a call that was not quantised, and warn of the first of its kind."""
    state.calls[how] += 1
    if state.warn and how not in state.said and not how.endswith(FULL_PRECISION):
        state.said.add(how)
        model = getattr(config, "model_type", type(config).__name__)
        warnings.warn(f"{model}: some attention is not quantised, but done by {how}", stacklevel=4)


def _of_layer(module: torch.nn.Module, state: State) -> tuple[int | None, str | None]:
    """Bits of a layer, and why it has none."""
    layers = noted(getattr(module, "config", None)) if state.layers is None else state.layers
    number = getattr(module, "layer_idx", None)
    if layers is None or number is None or number >= len(layers):
        return None, NOT_RECORDED
    return layers[number], FULL_PRECISION if layers[number] is None else None


def _slower(call: Call) -> str | None:
    """Why SDPA is faster, in words that do not change with every token."""
    texts, heads, queries, width = call.query.shape
    keys = call.key.shape[2]
    if not call.query.is_cuda:
        return "on a CPU quantised attention is only simulated"
    if isinstance(call.mask, DeferredMask):  # a static cache has room for more
        keys = call.mask.seen.keys
    elif call.mask is None and call.causal:
        keys = min(keys, queries)
    if queries < LEAST_TOKENS or keys < LEAST_TOKENS:
        return f"with fewer than {LEAST_TOKENS:,} queries or keys it is faster"
    unseen = queries * min(queries, keys) // 2 if call.causal or call.mask is not None else 0
    few = texts * heads * width * (queries * keys - unseen) < LEAST_PRODUCTS
    return f"with fewer than {LEAST_PRODUCTS:.0e} products it is faster" if few else None


def _quantized(call: Call, bits: int) -> Tensor | str:
    """The result by the kernel, [B, Nq, Hq, D], or what the call wants that it does not do, in words."""
    from neuzip.kernels.attention import sage_attention, sage_attention_packed, supported

    reason = _asks_for_more(call)
    if reason is not None:
        return reason
    query, key, value = call.query, call.key, call.value
    if key.shape[-1] != value.shape[-1]:
        return "its values are not as wide as its keys"
    seen = attention_mask.seen(call.mask, query, key, call.causal)
    if seen is None:
        return "its mask is none that the kernel knows"
    options: dict[str, Any] = {
        "bits": bits, "causal": seen.causal, "window": seen.window, "scale": call.scaling,
        "softcap": call.options.get("softcap"),
    }  # fmt: skip
    reason = supported(query, key, value, **options)
    if reason is not None:
        return reason
    key, value = key[:, :, : seen.keys], value[:, :, : seen.keys]
    if seen.tokens is None:
        found: Any = sage_attention(query, key, value, **options)
        return found.transpose(1, 2).contiguous()  # type: ignore[no-any-return]
    queries, keys = seen.tokens
    found = sage_attention_packed(
        queries.take(query), keys.take(key), keys.take(value), queries.starts, keys.starts,
        longest_q=queries.longest, longest_k=keys.longest, **options,
    )  # fmt: skip
    return queries.put(found, query.shape[2])


def _asks_for_more(call: Call) -> str | None:
    """What a call wants that the kernel has no argument for, in words."""
    unknown = sorted(
        name
        for name, given in call.options.items()
        if given is not None and given is not False and name not in HARMLESS and name != "softcap"
    )
    if unknown:
        return f"it comes with {unknown[0]}"
    if call.dropout:
        return "it drops out weights"
    return None if call.query.numel() and call.key.numel() else "there are no tokens"


def _own(call: Call) -> Callable[..., Output]:
    """The attention that a model has by itself: SDPA, or its eager one where SDPA lacks what the call wants.

    Raises NeuzipError for a model that has neither.
    """
    kind = type(call.module)
    wants_eager = any(call.options.get(name) is not None for name in ("softcap", "s_aux"))
    if not wants_eager and _takes_sdpa(kind.__module__):
        return sdpa_attention_forward
    eager = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
    if eager is None:
        raise NeuzipError(
            f"{kind.__name__}: torch's SDPA cannot do its attention, and it has no eager one to fall back to",
            'call set_attn_implementation("eager")',
        )
    return functools.partial(_eager, eager)


_takes: dict[str, bool] = {}  # torch.compile dislikes functools.cache


def _takes_sdpa(file: str) -> bool:
    """Whether the models in the file of an attention layer say that they can use SDPA."""
    if file not in _takes:
        around = [m for m in vars(sys.modules[file]).values() if isinstance(m, type)]
        models = [m for m in around if issubclass(m, PreTrainedModel) and m.__module__ == file]
        _takes[file] = all(m._supports_sdpa for m in models)
    return _takes[file]


def _eager(
    eager: Callable[..., Output],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool | None = None,
    **options: Any,
) -> Output:
    """A model's eager attention, with numbers for a mask, as eager masks of transformers have them."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None and causal and query.shape[2] > 1:
        every = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = every.tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, mask, **options)


def _of_packed(*arguments: Any, **options: Any) -> Output:
    """Attention to keys and values that a KVCache hands out packed."""
    from neuzip.runtime.hf.kv_cache import ATTENTION

    found: Output = ALL_ATTENTION_FUNCTIONS[ATTENTION](*arguments, **options)
    return found


# What a person asks for


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
    chosen = noted(config) if layers is None else _layers(layers, text.num_hidden_layers)
    if chosen is None:
        raise UsageError(
            f"{type(model).__name__}: its config records no bits of attention", "give 8, 4, or a list"
        )
    if len(chosen) != text.num_hidden_layers:
        raise FormatError("config.json", _miscounted(chosen, text.num_hidden_layers), field=FIELD)
    state = _state(text)
    before = state.before or (text._attn_implementation, getattr(config, SECTION, None))
    _set_implementation(model, BY_LAYER)
    note(config, chosen)
    state.layers, state.policy, state.warn, state.before = chosen, policy, warn, before
    state.calls.clear()
    state.said.clear()
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
    asked: Any = {keys[0]: name} if keys else {"": name} if config.sub_configs else name
    if name in NAMES:
        _require_replaceable(type(model))
    model.set_attn_implementation(asked)
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


# The record in config.json


def recorded(folder: str | os.PathLike[str]) -> Layers | None:
    """Bits of each layer by the config.json of a folder, plain or compressed; None if it says nothing.

    Raises FormatError.
    """
    path = Path(folder) / "config.json"
    return _in_document(read_config(path), path) if path.is_file() else None


def record(folder: str | os.PathLike[str], layers: int | Sequence[int | None]) -> None:
    """Write bits of each layer to the config.json of a folder; of a compressed one the original's stays.

    Raises UsageError for bits that there are not and for a wrong number of layers, FormatError for a
    config.json that is not there or that cannot be read.
    """
    path = Path(folder) / "config.json"
    count = _layer_count(read_config(path))
    if count is None and isinstance(layers, int):
        raise FormatError(path, "does not say how many layers there are", field="num_hidden_layers")
    write_entry(path, ENTRY, {"layers": list(_layers(layers, count))})


def note(config: PreTrainedConfig, layers: Layers) -> None:
    """Write bits of each layer to a model's config, which `save_pretrained` saves."""
    document = {SECTION: getattr(config, SECTION, None)}
    found = with_entry(document, ENTRY, {"layers": list(layers)}, "config.json")
    setattr(config, SECTION, found[SECTION])


def noted(config: object) -> Layers | None:
    """What a model's config says, None if it says nothing. Raises FormatError."""
    section = getattr(config, SECTION, None)
    return None if section is None else _in_document({SECTION: section}, "config.json")


def use_recorded(model: PreTrainedModel, layers: Layers) -> None:
    """Patch a model that has just been loaded as its config.json records, and say so."""
    patch_attention(model, layers)
    if any(layers):
        counts = " and ".join(f"{layers.count(bits)} in {bits} bits" for bits in BITS if bits in layers)
        warnings.warn(
            f"of {len(layers)} layers the attention of {counts} is quantised, as config.json records",
            stacklevel=3,
        )


def _in_document(document: Mapping[str, Any], path: str | Path) -> Layers | None:
    """What a config.json says. Raises FormatError."""
    attention = own_section(document, path).get(ENTRY)
    if attention is None:
        return None
    if not isinstance(attention, Mapping) or not isinstance(attention.get("layers"), list | tuple):
        raise FormatError(path, 'not an object with a list of "layers"', field=f"{SECTION}.{ENTRY}")
    try:
        return _layers(attention["layers"], _layer_count(document))
    except UsageError as error:
        raise FormatError(path, error.message, field=FIELD, hint=error.hint) from error


def _layers(layers: int | Sequence[int | None], count: int | None) -> Layers:
    """Bits of each of `count` layers. Raises UsageError."""
    if not isinstance(layers, int | Sequence):
        raise UsageError(f"attention of {layers!r} bits: there is none", "give 8, 4, or a number a layer")
    chosen = (layers,) * (count or 0) if isinstance(layers, int) else tuple(layers)
    for bits in {layers} if isinstance(layers, int) else chosen:
        if bits is not None and (type(bits) is not int or bits not in BITS):
            raise UsageError(
                f"attention of {bits!r} bits: there is none", "give 8, 4, or None for full precision"
            )
    if count is not None and len(chosen) != count:
        raise UsageError(_miscounted(chosen, count), "give one number, or one for each layer")
    return chosen


def _miscounted(layers: Sequence[object], count: int) -> str:
    return f"bits of attention for {len(layers)} layers, but the model has {count}"


def _layer_count(document: Mapping[str, Any]) -> int | None:
    """How many layers a config.json says the model has, by the names that models have for it."""
    for part in (document, document.get("text_config")):
        if isinstance(part, Mapping):
            for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
                if type(part.get(name)) is int:
                    return int(part[name])
    return None


for _name in NAMES:
    AttentionInterface.register(_name, functools.partial(_attend, _name))
    AttentionMaskInterface.register(_name, attention_mask.mask)
PreTrainedModel.get_correct_attn_implementation = _checked(  # type: ignore[method-assign]
    PreTrainedModel.get_correct_attn_implementation
)
