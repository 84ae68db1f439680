"""What llama.cpp wants to know of a model beside its weights: names, shapes, the tokenizer.

Architectures keep their own: llama (and Mistral's, which is the same), qwen2, qwen3. llama.cpp turns
neighbouring elements of a head in llama's rotary embedding where transformers turns element i with i + d/2;
rows of q_proj and k_proj are therefore put in its order. In qwen2 and qwen3 both agree.

Source: llama.cpp, convert_hf_to_gguf.py and src/llama-vocab.cpp; ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuzip.errors import NeuzipError

from .gguf import BlockType, Value

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens."""

SPECIAL = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
"""llama.cpp's and transformers' names of tokens."""

LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {LLAMA_3_SPLIT: "llama-bpe", LLAMA_3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
"""Regular expressions that cut text into words, and what llama.cpp calls them."""

_WITHOUT = "move tokenizer.json away to export the weights alone"


@dataclass(frozen=True)
class GgufModel:
    """A model in llama.cpp's words, from its config.json. Raises NeuzipError for what that cannot run."""

    config: Mapping[str, Any]
    architecture: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GgufModel:
        """Check that llama.cpp computes what the config says."""
        names = config.get("architectures")
        name = str(names[0]) if isinstance(names, list) and names else "none"
        architecture = ARCHITECTURES.get(name)
        if architecture is None:
            raise NeuzipError(
                f"config.json: GGUF export does not know the architecture {name}",
                f"it knows {', '.join(ARCHITECTURES)}; other engines: `to='transformers-bitnet'`",
            )
        if config.get("hidden_act", "silu") != "silu":
            raise NeuzipError(
                f"config.json: hidden_act is {config['hidden_act']!r}, llama.cpp computes "
                f"{architecture} models with silu",
                "export to transformers-bitnet or compressed-tensors",
            )
        if config.get("use_sliding_window"):
            raise NeuzipError("config.json: llama.cpp has no use_sliding_window for this architecture")
        return cls(config, architecture)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self._size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self._size("num_key_value_heads", self.heads)

    @property
    def head_dim(self) -> int:
        """Width of a head, which rotary embeddings cut in two."""
        width = self._size("head_dim", self._size("hidden_size") // self.heads)
        if width % 2:
            raise NeuzipError(f"config.json: head_dim is {width}, which is odd")
        return width

    @property
    def vocabulary(self) -> int:
        """Rows of the embeddings."""
        return self._size("vocab_size")

    @property
    def is_tied(self) -> bool:
        """Whether the embeddings are the head too; llama.cpp then wants no head."""
        return bool(self.config.get("tie_word_embeddings", False))

    def tensor_name(self, name: str) -> str | None:
        """llama.cpp's name of a tensor, or None for one that it does without."""
        if (name == "lm_head.weight" and self.is_tied) or name.endswith("rotary_emb.inv_freq"):
            return None
        module, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        known = NAMES.get(layer[2] if layer else module)
        if known is None or kind not in ("weight", "bias") or (layer is None) != (module in NAMES):
            raise NeuzipError(
                f"tensor {name!r}: has no place in a GGUF file of the architecture {self.architecture}",
                "export to transformers-bitnet or compressed-tensors",
            )
        return f"blk.{layer[1]}.{known}.{kind}" if layer else f"{known}.{kind}"

    def row_order(self, name: str) -> Tensor | None:
        """Which row of a tensor comes where in GGUF, int64 [out]; None for those that stay."""
        rows = self._reordered_rows(name)
        if rows is None:
            return None
        return torch.arange(rows).reshape(-1, 2, self.head_dim // 2).transpose(1, 2).reshape(-1)

    def rows(self, name: str) -> int | None:
        """The rows that a tensor must have, where config.json says it."""
        return self.vocabulary if name == "model.embed_tokens.weight" else self._reordered_rows(name)

    def _reordered_rows(self, name: str) -> int | None:
        if self.architecture != "llama":
            return None
        for module, heads in (("q_proj", self.heads), ("k_proj", self.kv_heads)):
            if name.endswith((f".{module}.weight", f".{module}.bias")):
                return heads * self.head_dim
        return None

    def metadata(self, name: str, kind: BlockType) -> dict[str, Value]:
        """The entries that describe the model."""
        size, head_dim = self._size, self.head_dim
        entries: dict[str, Value] = {
            "block_count": ("u32", size("num_hidden_layers")),
            "context_length": ("u32", size("max_position_embeddings")),
            "embedding_length": ("u32", size("hidden_size")),
            "feed_forward_length": ("u32", size("intermediate_size")),
            "attention.head_count": ("u32", self.heads),
            "attention.head_count_kv": ("u32", self.kv_heads),
            "attention.key_length": ("u32", head_dim),
            "attention.value_length": ("u32", head_dim),
            "attention.layer_norm_rms_epsilon": ("f32", _real(self.config, "rms_norm_eps")),
            "vocab_size": ("u32", self.vocabulary),
            "rope.dimension_count": ("u32", head_dim),
            "rope.freq_base": ("f32", _real(self._rope, "rope_theta", 10000.0)),
        }
        if self._rope_type == "linear":
            entries["rope.scaling.type"] = ("str", "linear")
            entries["rope.scaling.factor"] = ("f32", _real(self._rope, "factor"))
        return {
            "general.architecture": ("str", self.architecture),
            "general.name": ("str", name),
            "general.file_type": ("u32", kind.file_type),
            "general.quantization_version": ("u32", 2),
            **{f"{self.architecture}.{key}": value for key, value in entries.items()},
        }

    def rope_factors(self) -> Tensor | None:
        """What llama.cpp divides rotary frequencies by, fp32 [head_dim / 2]; None but for Llama 3.1's."""
        if self._rope_type in ("default", "linear"):
            return None
        rope = self._rope
        if self._rope_type != "llama3":
            raise NeuzipError(
                f"config.json: GGUF export does not know the rope_type {self._rope_type!r}",
                "it knows default, linear and llama3",
            )
        base, factor = _real(rope, "rope_theta", 10000.0), _real(rope, "factor")
        low, high = _real(rope, "low_freq_factor"), _real(rope, "high_freq_factor")
        context = _real(rope, "original_max_position_embeddings")
        wavelength = 2 * math.pi * base ** (torch.arange(0, self.head_dim, 2).double() / self.head_dim)
        smooth = (context / wavelength - low) / (high - low)
        return (1 / (smooth + (1 - smooth) / factor).clamp(1 / factor, 1)).float()

    def _size(self, key: str, default: int | None = None) -> int:
        """A whole number above 0 of config.json."""
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise NeuzipError(f"config.json: {key} is {value!r}, not a number of something")
        return value

    @property
    def _rope(self) -> Mapping[str, Any]:
        """rope_parameters of transformers 5, or what older configs have."""
        entry = self.config.get("rope_scaling")
        scaling = entry if isinstance(entry, Mapping) else {}
        older = {"rope_theta": self.config.get("rope_theta", 10000.0), **scaling}
        rope = self.config.get("rope_parameters") or older
        if not isinstance(rope, Mapping):
            raise NeuzipError("config.json: rope_parameters are no object")
        return rope

    @property
    def _rope_type(self) -> str:
        return str(self._rope.get("rope_type") or self._rope.get("type") or "default")


def _real(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number of config.json above 0 that fp32 can hold."""
    value = config.get(key, default)
    if type(value) not in (int, float) or not 0 < value < 3e38:
        raise NeuzipError(f"config.json: {key} is {value!r}, not a number above 0")
    return float(value)


def no_tokenizer() -> dict[str, Value]:
    """The entries of a model without one: it takes and gives numbers."""
    return {"tokenizer.ggml.model": ("str", "none")}


def tokenizer_metadata(
    tokenizer: Mapping[str, Any], about: Mapping[str, Any], described: GgufModel, template: str | None
) -> dict[str, Value]:
    """The entries of a tokenizer: byte-level BPE, or sentencepiece's as transformers has it.

    Of tokenizer.json, tokenizer_config.json and the chat template, if there is one. Raises NeuzipError for
    tokenizers of other kinds.
    """
    try:
        model = tokenizer["model"]
        if model.get("type") != "BPE":
            raise NeuzipError(f"tokenizer.json: is {model.get('type')}, GGUF export knows BPE", _WITHOUT)
        vocabulary: dict[int, str] = {number: text for text, number in model["vocab"].items()}
        added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
        vocabulary |= {number: token["content"] for number, token in added.items()}
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        is_pieces = bool(model.get("byte_fallback"))
        entries = _pieces(tokenizer) if is_pieces else _byte_level(tokenizer, merges)
        adds_bos = _adds_bos(tokenizer, about)
        _require_tokens(vocabulary)
        highest, unknown = max(vocabulary), model.get("unk_token")
        scores = _scores(merges)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise NeuzipError(f"tokenizer.json: is broken: {error!r}", _WITHOUT) from error
    if highest >= described.vocabulary:
        raise NeuzipError(
            f"tokenizer.json: has a token {highest}, the model knows {described.vocabulary} of them", _WITHOUT
        )

    def kind_of(i: int) -> int:
        if i not in vocabulary:
            return UNUSED
        if is_pieces and vocabulary[i] == unknown:
            return UNKNOWN
        if i in added:
            return CONTROL if added[i].get("special") else USER_DEFINED
        return BYTE if is_pieces and re.fullmatch("<0x[0-9A-F]{2}>", vocabulary[i]) else NORMAL

    tokens = [vocabulary.get(i, f"[PAD{i}]") for i in range(described.vocabulary)]
    if is_pieces:
        entries["tokenizer.ggml.scores"] = "[f32]", [scores.get(token, 0.0) for token in tokens]
    entries |= {
        "tokenizer.ggml.tokens": ("[str]", tokens),
        "tokenizer.ggml.token_type": ("[i32]", [kind_of(i) for i in range(len(tokens))]),
        "tokenizer.ggml.add_bos_token": ("bool", adds_bos),
        "tokenizer.ggml.add_eos_token": ("bool", False),
    }
    for key, field in SPECIAL.items():
        number = _special(described.config, about, vocabulary, field)
        if number is not None:
            entries[f"tokenizer.ggml.{key}_token_id"] = ("u32", number)
    if template is not None:
        entries["tokenizer.chat_template"] = ("str", template)
    return entries


def _require_tokens(vocabulary: Mapping[Any, Any]) -> None:
    """Raise TypeError unless tokens are texts with numbers from 0 on."""
    for number, text in vocabulary.items():
        if type(number) is not int or number < 0 or not isinstance(text, str):
            raise TypeError(f"the token {text!r} has the number {number!r}")


def _byte_level(tokenizer: Mapping[str, Any], merges: list[list[str]]) -> dict[str, Value]:
    return {
        "tokenizer.ggml.model": ("str", "gpt2"),
        "tokenizer.ggml.pre": ("str", pre_tokenizer(tokenizer)),
        "tokenizer.ggml.merges": ("[str]", [" ".join(pair) for pair in merges]),
    }


def _pieces(tokenizer: Mapping[str, Any]) -> dict[str, Value]:
    """The entries of BPE on characters with a fallback to bytes, spaces being a character of their own."""
    normalizer, outer = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", []) if normalizer.get("type") == "Sequence" else [normalizer]
    kinds = [step.get("type") for step in steps if step]
    if kinds in (["Prepend", "Replace"], ["Replace"]) and not outer:
        prefix = kinds[0] == "Prepend"
    elif not kinds and outer.get("type") == "Metaspace" and not outer.get("split"):
        prefix = outer.get("prepend_scheme") in ("first", "always")
    else:
        raise NeuzipError(
            f"tokenizer.json: llama.cpp has no BPE with the normalizer {kinds or None} and the pre-tokenizer "
            f"{outer.get('type')}",
            _WITHOUT,
        )
    return {
        "tokenizer.ggml.model": ("str", "llama"),
        "tokenizer.ggml.pre": ("str", "default"),
        "tokenizer.ggml.add_space_prefix": ("bool", prefix),
    }


def _scores(merges: list[list[str]]) -> dict[str, float]:
    """sentencepiece's scores of tokens, which tokenizer.json has as the order of merges.

    transformers sorts merges by the score of what they make, so the first that makes a token tells its place.
    """
    scores: dict[str, float] = {}
    for rank, pair in enumerate(merges, 1):
        scores.setdefault("".join(pair), -float(rank))
    return scores


def pre_tokenizer(tokenizer: Mapping[str, Any]) -> str:
    """What llama.cpp calls the way in which a tokenizer cuts text into words. Raises NeuzipError."""
    normalizer = tokenizer.get("normalizer")
    outer = tokenizer.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", []) if outer.get("type") == "Sequence" else [outer]
    kinds = [step.get("type") for step in steps]
    splits = [step.get("pattern", {}).get("Regex", "") for step in steps if step.get("type") == "Split"]
    known = None
    if normalizer is None or normalizer.get("type") == "NFC":
        if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
            known = "gpt-2"
        elif kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
            known = "smollm"
        elif kinds == ["Split", "ByteLevel"]:
            known = PRE_TOKENIZERS.get(splits[0])
    if known is None or steps[-1].get("add_prefix_space"):
        raise NeuzipError(
            "tokenizer.json: llama.cpp has no such way to cut text into words, as far as neuzip knows",
            _WITHOUT,
        )
    return known


def _adds_bos(tokenizer: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    if "add_bos_token" in about:
        return bool(about["add_bos_token"])
    outer = tokenizer.get("post_processor") or {}
    steps = outer.get("processors", []) if outer.get("type") == "Sequence" else [outer]
    return any("SpecialToken" in (step.get("single") or [{}])[0] for step in steps)


def _special(
    config: Mapping[str, Any], about: Mapping[str, Any], texts: Mapping[int, str], field: str
) -> int | None:
    """The number of a special token: of tokenizer_config.json by its text, else of config.json."""
    entry = about.get(field)
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    for number, known in texts.items():
        if text is not None and known == text:
            return number
    value = config.get(f"{field}_id")
    value = value[0] if isinstance(value, list) and value else value
    return value if type(value) is int and value in texts else None  # -1 and [] mean none
