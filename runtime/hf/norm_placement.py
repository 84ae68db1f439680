"""Where the norms of a Llama stand, as a value of its config: Pre-LN, Post-LN, Mix-LN and their neighbours.

A layer adds two sublayers F, attention and the MLP, to the residual stream x. N is an RMS norm with a gain of
its own in each place, l = 1 ... L the layer, `ratio` the config's `post_norm_ratio`:

    pre                x + F(N(x))            Llama itself, bit for bit (Xiong et al. 2020, arXiv 2002.04745)
    post               N(x + F(x))            (Vaswani et al. 2017, arXiv 1706.03762)
    mix                post for l <= floor(ratio L), pre for the others (Li et al. 2024, arXiv 2412.13795)
    layernorm-scaling  x + F(N(x) / sqrt(l))  (Sun et al. 2025, arXiv 2502.05795)
    sandwich           x + N(F(N(x)))         (Ding et al. 2021, arXiv 2105.13290)
    peri               sandwich, and the stream begins with N(embedding) (Kim et al. 2025, arXiv 2502.02732)
    deepnorm           N(a x + F(x)), a = (2 L)^(1/4); the first weights of F have Xavier's normal
                       distribution, all but those of queries and keys times b = (8 L)^(-1/4)
                       (Wang et al. 2022, arXiv 2203.00555, for decoders)

All of them, Post-LN too, keep the norm before the head, as the code of the Mix-LN paper does. Its DeepNorm
has the a of 32 layers at any depth, and b = 1; this one is its paper's. Norms are named as there.

Two settings that the Mix-LN paper tries with any placement (Table 8) are values of the config too. With
`embedding_scale` s the stream begins with s times the embedding. With `initialization` "scaled" the first
weights of the layers that write to the stream, o_proj and down_proj, are divided by sqrt(2 L) (Radford et al.
2019, GPT-2; Takase et al. 2023, arXiv 2312.16903, tries both). Table 8 prints no equations.

Attention, MLP and norms are transformers', the layers around them ours. It all saves, loads, generates and
compresses as a Llama does; all that a checkpoint takes to be read is `import neuzip`.

    >>> config = NormPlacementConfig("mix", 0.25, num_hidden_layers=12)
    >>> [config.placement_of(layer) for layer in (0, 2, 3, 11)]
    ['post', 'post', 'pre', 'pre']
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from neuzip.errors import UsageError
from neuzip.runtime.hf.model_types import NORM_PLACEMENT

Placement = Literal["pre", "post", "mix", "layernorm-scaling", "sandwich", "peri", "deepnorm"]
PLACEMENTS: tuple[Placement, ...] = (
    "pre",
    "post",
    "mix",
    "layernorm-scaling",
    "sandwich",
    "peri",
    "deepnorm",
)


def deepnorm_scales(layers: int) -> tuple[float, float]:
    """DeepNorm's alpha, by which the stream is multiplied, and beta, the gain of the first weights."""
    return (2 * layers) ** 0.25, (8 * layers) ** -0.25


Initialization = Literal["plain", "scaled"]
INITIALIZATIONS: tuple[Initialization, ...] = ("plain", "scaled")

WRITERS = ("self_attn.o_proj", "mlp.down_proj")
"""The layers that write to the residual stream."""

Norms = tuple[str | None, str | None]
"""The norm before a sublayer and the one after it."""

PRE: tuple[Norms, Norms] = ("input_layernorm", None), ("post_attention_layernorm", None)
POST: tuple[Norms, Norms] = (None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")
BOTH: tuple[Norms, Norms] = (
    ("input_layernorm", "post_attention_layernorm"),
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)

NORMS: dict[Placement, tuple[Norms, Norms]] = {
    "pre": PRE,
    "layernorm-scaling": PRE,
    "post": POST,
    "deepnorm": POST,
    "sandwich": BOTH,
    "peri": BOTH,
}
"""Those of attention, and those of the MLP."""

PLAIN_GAIN = ("self_attn.q_proj", "self_attn.k_proj")
"""What DeepNorm's beta leaves alone: a softmax does not grow with them."""


class NormPlacementConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    """The config of a Llama, and where its norms stand.

    norm_placement   one of PLACEMENTS
    post_norm_ratio  of "mix": the part of the layers that are Post-LN, 0 to 1; the paper's alpha
    embedding_scale  what the embedding is multiplied by, above 0
    initialization   one of INITIALIZATIONS: the first weights of o_proj and down_proj; "deepnorm" has its own
    kept_layers      of a model that lost layers: which ones these are, the first being 0
    trained_layers   and how many there were; l and L above are those of that model

    Raises UsageError for others.
    """

    model_type = NORM_PLACEMENT

    def __init__(
        self,
        norm_placement: Placement = "pre",
        post_norm_ratio: float = 0.25,
        kept_layers: list[int] | None = None,
        trained_layers: int | None = None,
        embedding_scale: float = 1.0,
        initialization: Initialization = "plain",
        **llama: Any,
    ) -> None:
        self.norm_placement: Placement = norm_placement
        self.post_norm_ratio = post_norm_ratio
        self.kept_layers = kept_layers
        self.trained_layers = trained_layers
        self.embedding_scale = embedding_scale
        self.initialization: Initialization = initialization
        super().__init__(**llama)
        self._require_sense()

    def _require_sense(self) -> None:
        if self.norm_placement not in PLACEMENTS:
            raise UsageError(
                f"there is no norm_placement {self.norm_placement!r}", f"choose from {', '.join(PLACEMENTS)}"
            )
        if not 0 <= self.post_norm_ratio <= 1:
            raise UsageError(
                f"post_norm_ratio {self.post_norm_ratio} is not between 0 and 1",
                "give the part of the layers that are Post-LN",
            )
        if not 0 < self.embedding_scale < math.inf:
            raise UsageError(
                f"embedding_scale is {self.embedding_scale}",
                "give a number above 0; 1 leaves the embedding alone",
            )
        if self.initialization not in INITIALIZATIONS:
            raise UsageError(
                f"there is no initialization {self.initialization!r}",
                f"choose from {', '.join(INITIALIZATIONS)}",
            )
        if self.initialization == "scaled" and self.norm_placement == "deepnorm":
            raise UsageError(
                "initialization 'scaled' does not go with 'deepnorm', which has first weights of its own",
                "leave initialization out",
            )
        self._require_layers()

    def _require_layers(self) -> None:
        layers, count = self._kept(), self.num_hidden_layers
        named = (self.kept_layers is None) == (self.trained_layers is None)
        if not named or len(layers) != count or layers != sorted(set(layers) & set(range(self.depth))):
            raise UsageError(
                f"kept_layers {layers} are not {count} of {self.depth} layers in order",
                "give both kept_layers and trained_layers, or neither",
            )

    def _kept(self) -> list[int]:
        return list(range(self.num_hidden_layers)) if self.kept_layers is None else self.kept_layers

    @property
    def depth(self) -> int:
        """The layers of the model that was trained: L above."""
        return self.num_hidden_layers if self.trained_layers is None else self.trained_layers

    def number_of(self, layer: int) -> int:
        """The number of a layer in the model that was trained, the first being 1: l above."""
        return self._kept()[layer] + 1

    def placement_of(self, layer: int) -> Placement:
        """Where the norms of a layer stand, the first being 0: never "mix"."""
        if self.norm_placement != "mix":
            return self.norm_placement
        # Rounded first: 0.29 of 100 layers is 28.999999999999996.
        last_post = math.floor(round(self.post_norm_ratio * self.depth, 9))
        return "post" if self.number_of(layer) <= last_post else "pre"


class NormPlacementLayer(LlamaDecoderLayer):  # type: ignore[no-untyped-call]
    """One layer; see `norm_placement`."""

    def __init__(self, config: NormPlacementConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        placement = config.placement_of(layer_idx)
        self.norms = NORMS[placement]
        self.input_scale = self.stream_scale = 1.0
        for name in ("input_layernorm", "post_attention_layernorm"):
            delattr(self, name)
        for name in (name for pair in self.norms for name in pair if name is not None):
            self.add_module(name, LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        if placement == "layernorm-scaling":
            self.input_scale = 1 / math.sqrt(config.number_of(layer_idx))
        if placement == "deepnorm":
            self.stream_scale, beta = deepnorm_scales(config.depth)
            _note_xavier(self, beta)
        if config.initialization == "scaled":
            for name in WRITERS:
                self.get_submodule(name).first_std = config.initializer_range / math.sqrt(2 * config.depth)  # type: ignore[assignment]

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """The stream after the layer, of the one before: [batch, tokens, hidden]."""
        of_attention, of_mlp = self.norms
        read = self._before(of_attention, hidden_states)
        wrote, _ = self.self_attn(read, *arguments, **options)
        hidden_states = self._after(of_attention, hidden_states, wrote)
        wrote = self.mlp(self._before(of_mlp, hidden_states))
        return self._after(of_mlp, hidden_states, wrote)

    def _before(self, norms: Norms, stream: Tensor) -> Tensor:
        if norms[0] is None:
            return stream
        read: Tensor = getattr(self, norms[0])(stream)
        return read if self.input_scale == 1 else read * self.input_scale

    def _after(self, norms: Norms, stream: Tensor, wrote: Tensor) -> Tensor:
        before, after = norms
        if after is None:
            return stream + wrote
        norm: Callable[[Tensor], Tensor] = getattr(self, after)
        if before is not None:
            return stream + norm(wrote)
        scaled = stream if self.stream_scale == 1 else stream * self.stream_scale
        return norm(scaled + wrote)


def _note_xavier(layer: nn.Module, beta: float) -> None:
    """Write beside each weight of a layer what its standard deviation is to be at first."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            gain = 1.0 if name in PLAIN_GAIN else beta
            module.first_std = gain * math.sqrt(2 / (module.in_features + module.out_features))  # type: ignore[assignment]


class NormPlacementPreTrainedModel(LlamaPreTrainedModel):  # type: ignore[no-untyped-call]
    """What the model and the one with a head share."""

    config_class = NormPlacementConfig
    _no_split_modules = ["NormPlacementLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": NormPlacementLayer, "attentions": LlamaAttention}  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        first_std = getattr(module, "first_std", None)
        if first_std is None:
            super()._init_weights(module)  # type: ignore[no-untyped-call]
            return
        # Drawn once, so that all other weights of a seed are those of another initialization.
        nn.init.normal_(module.weight, std=first_std)  # type: ignore[arg-type]
        if module.bias is not None:
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]


class NormPlacementModel(NormPlacementPreTrainedModel, LlamaModel):  # type: ignore[no-untyped-call]
    """The model without a head."""

    def __init__(self, config: NormPlacementConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)  # LlamaModel's would make Llama's layers first
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.embedding_scale = config.embedding_scale
        self.embed_layernorm = None
        if config.norm_placement == "peri":
            self.embed_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            NormPlacementLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **options: Any
    ) -> Any:
        """The forward pass of LlamaModel; embeddings of a caller are treated as those that are looked up."""
        changed = self.embed_layernorm is not None or self.embedding_scale != 1
        if changed and (input_ids is None) != (inputs_embeds is None):
            embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            embeddings = embeddings * self.embedding_scale
            input_ids = None
            inputs_embeds = embeddings if self.embed_layernorm is None else self.embed_layernorm(embeddings)
        return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **options)


class NormPlacementForCausalLM(NormPlacementPreTrainedModel, LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """The model with a head that predicts tokens."""

    def __init__(self, config: NormPlacementConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)  # LlamaForCausalLM's would make a LlamaModel first
        self.model = NormPlacementModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]


def register() -> None:
    """Make the config and the models known to transformers' Auto classes. Any number of times."""
    AutoConfig.register(NORM_PLACEMENT, NormPlacementConfig, exist_ok=True)
    AutoModel.register(NormPlacementConfig, NormPlacementModel, exist_ok=True)
    AutoModelForCausalLM.register(NormPlacementConfig, NormPlacementForCausalLM, exist_ok=True)


register()
