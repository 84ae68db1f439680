"""Linear layers of ternary weights, with their inputs quantised as BitNet b1.58 and a4.8 do it.

    site       what reads it              b1.58   a4.8         a4.8-fp4   none
    qkv        q_proj, k_proj, v_proj     int8    int4         fp4        none
    out        o_proj                     int8    top_k_int8   fp4        none
    gate, up   gate_proj, up_proj         int8    int4         fp4        none
    down       down_proj                  int8    int8         int8       none
    others                                int8    int8         int8       none

int8 is absmax, int4 absmean, fp4 E2M1, top_k_int8 the half of largest magnitude in int8, each with a scale a
token; "none" multiplies the inputs as they are by scale * codes, what a dense model computes: `load_model`
makes ordinary layers of these. Sites are known by the names of modules, see SITES.

A config.json says how a model is to be run by `"neuzip": {"activations": ...}`, a mode or
`{"mode": "a4.8", "sites": {"out": "int8", "*.layers.0.*": "int8"}}`. `load_model` says what holds without it.

Sources: BitNet b1.58 (arXiv 2402.17764), BitNet a4.8 (arXiv 2411.04965, section 3.1).
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ReLUSquaredActivation
from transformers.pytorch_utils import Conv1D

from neuzip.errors import FormatError, UsageError
from neuzip.formats.config_section import SECTION, own_section, read_config, with_entry, write_entry
from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import QuantizedTokens, Ternary
from neuzip.kernels.ternary_linear import TernaryWeight, relu2_glu, ternary_linear
from neuzip.kernels.ternary_linear.weight import MOST_COLUMNS

from .weights import CompressedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CLAMPED = True
"""Peaks and means below 1e-5 become 1e-5, and nothing is added to others: as in the snippet that BitNet's
authors published and in transformers, so as models are trained. The papers print a sum."""

ACTIVATIONS: dict[str, Callable[[Tensor], QuantizedTokens] | None] = {
    "none": None,
    "int8": partial(quantizers.int8_absmax, clamped=CLAMPED),
    "int4": partial(quantizers.int4_absmean, clamped=CLAMPED),
    "fp4": quantizers.fp4_e2m1,
    "top_k_int8": partial(quantizers.top_k_int8, clamped=CLAMPED),
}
"""What an input may be quantised to, and by what."""

SITES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv", ("*.[qkv]_proj", "*.qkv_proj", "*.query_key_value", "*.Wqkv", "*.attn.c_attn")),
    ("out", ("*.o_proj", "*.out_proj", "*att*.dense", "*.attn.c_proj", "*attn.Wo")),
    ("gate_up", ("*.gate_up_proj",)),
    ("gate", ("*.gate_proj", "*.w1")),
    ("up", ("*.up_proj", "*.w3", "*.fc1", "*.c_fc", "*.dense_h_to_4h")),
    ("down", ("*.down_proj", "*.w2", "*.fc2", "*.mlp.c_proj", "*.dense_4h_to_h")),
)
"""Sites by globs of module names; the first that fits decides."""

FOUR_BITS = ("qkv", "gate_up", "gate", "up")

MODES: dict[str, dict[str, str]] = {
    "b1.58": {},
    "a4.8": {**dict.fromkeys(FOUR_BITS, "int4"), "out": "top_k_int8"},
    "a4.8-fp4": dict.fromkeys((*FOUR_BITS, "out"), "fp4"),
    "none": {},
}
"""Activations by site; those of other sites, and of modules of no site, are int8, of the mode "none" none."""

ENTRY = "activations"
"""Of our section of config.json, which is an attribute of a model's config too."""


def site_of(name: str) -> str | None:
    """The site of a module by its name in the model, None if it is of none.

    >>> site_of("model.layers.0.self_attn.v_proj"), site_of("transformer.h.3.attn.c_proj"), site_of("lm_head")
    ('qkv', 'out', None)
    """
    for site, globs in SITES:
        if any(fnmatchcase(f".{name}", glob) for glob in globs):
            return site
    return None


@dataclass(frozen=True)
class Activations:
    """What the inputs of ternary layers are quantised to: a mode, and exceptions by site or glob of names.

    Raises UsageError for modes, sites and activations that there are not.
    """

    mode: str = "b1.58"
    sites: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"there is no activation mode {self.mode!r}", _offer(MODES))
        for site, activation in self.sites.items():
            if not isinstance(activation, str) or activation not in ACTIVATIONS:
                raise UsageError(
                    f"the site {site!r}: there is no activation {activation!r}", _offer(ACTIVATIONS)
                )
            known = [name for name, _ in SITES]
            if site not in known and not _is_glob(site):
                raise UsageError(
                    f"there is no site {site!r}", f"{_offer(known)}, or a glob such as '*.0.mlp.*'"
                )

    @staticmethod
    def of(asked: str | Mapping[str, Any] | Activations) -> Activations:
        """Of a mode, or what config.json may have: {"mode": ..., "sites": {...}}. Raises UsageError."""
        if isinstance(asked, Activations):
            return asked
        said: Any = {"mode": asked} if isinstance(asked, str) else asked
        if isinstance(said, Mapping) and not set(said) - {"mode", "sites"}:
            mode, sites = said.get("mode", "b1.58"), said.get("sites", {})
            if isinstance(mode, str) and isinstance(sites, Mapping):
                return Activations(mode, dict(sites))
        raise UsageError(
            f"activations {asked!r} are no mode, and no object of mode and sites",
            'an example: {"mode": "a4.8", "sites": {"out": "int8"}}',
        )

    def at(self, name: str) -> str:
        """The activation of a module by its name; a glob goes before a site, the first glob before others."""
        for glob, activation in self.sites.items():
            if _is_glob(glob) and fnmatchcase(name, glob):
                return str(activation)
        site = site_of(name)
        if site is not None and site in self.sites:
            return str(self.sites[site])
        return MODES[self.mode].get(site or "", "none" if self.mode == "none" else "int8")

    @property
    def text(self) -> str:
        """The mode, and which sites have others.

        >>> Activations("a4.8", {"out": "int8"}).text
        'a4.8, with int8 for out'
        """
        others = ", ".join(f"{how} for {site}" for site, how in self.sites.items())
        return self.mode + (f", with {others}" if others else "")

    def to_json(self) -> str | dict[str, Any]:
        """As config.json has it."""
        return {"mode": self.mode, "sites": dict(self.sites)} if self.sites else self.mode


def _is_glob(site: str) -> bool:
    """Whether a key of `sites` is a glob, or a whole name, of modules."""
    return bool(set(site) & set("*.?["))


def _offer(known: Iterable[str]) -> str:
    return f"what there is: {', '.join(map(repr, known))}"


def recorded(folder: str | os.PathLike[str]) -> Activations | None:
    """What the config.json of a folder, plain or compressed, says of activations; None if it says nothing.

    Raises FormatError.
    """
    path = Path(folder) / "config.json"
    return _of_section(own_section(read_config(path), path), path) if path.is_file() else None


def _of_section(section: Mapping[str, Any], path: str | os.PathLike[str]) -> Activations | None:
    asked = section.get(ENTRY)
    if asked is None:
        return None
    try:
        return Activations.of(asked)
    except UsageError as error:
        raise FormatError(path, error.message, field=f"{SECTION}.{ENTRY}", hint=error.hint) from error


def record(folder: str | os.PathLike[str], activations: str | Mapping[str, Any] | Activations) -> None:
    """Write activations to the config.json of a folder; of a compressed one the original's stays as it is.

    Raises UsageError for what are none, FormatError for a config.json that is no object.
    """
    write_entry(Path(folder) / "config.json", ENTRY, Activations.of(activations).to_json())


class BitWeight(CompressedWeight):
    """A stored ternary matrix on its way into a model: a tensor without a dense form until one is asked for.

    What is done with it is done with `dense()`: scale * codes, rounded to its dtype.
    """

    ternary: TernaryWeight
    words: Tensor
    scale: Tensor
    parts = ()

    @staticmethod
    def can_be(shape: Sequence[int]) -> bool:
        """Whether a tensor of a shape can be one: a matrix, of not too many columns."""
        return len(shape) == 2 and shape[1] <= MOST_COLUMNS

    @classmethod
    def of(cls, ternary: TernaryWeight, dtype: torch.dtype) -> BitWeight:
        """Of a weight [out, in], as a tensor of `dtype`."""
        return cls._of(ternary, False, dtype)

    @classmethod
    def _of(cls, ternary: TernaryWeight, flipped: bool, dtype: torch.dtype) -> BitWeight:
        made = cls._wrapper(tuple(ternary.shape), flipped, dtype, ternary.words.device)
        made.ternary, made.words, made.scale = ternary, ternary.words, ternary.scale
        return made

    @property
    def stored_bytes(self) -> int:
        """See CompressedWeight."""
        return self.ternary.nbytes

    @property
    def _held(self) -> Tensor:
        return self.words

    def _again(self, stored: tuple[int, ...], flipped: bool, rows: slice) -> BitWeight:
        return self._of(self.ternary, flipped, self.dtype)

    def _elsewhere(self, move: Callable[[Tensor], Tensor]) -> BitWeight:
        old = self.ternary
        return self._of(
            TernaryWeight(move(old.words), move(old.scale), old.group, old.shape), self.flipped, self.dtype
        )

    def _decode_all(self) -> Tensor:
        return dense(self.ternary, self.dtype)

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._decode_all(), bias)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["words", "scale"], (self.ternary.group, self.ternary.shape, self.flipped, self.dtype)

    @staticmethod
    def __tensor_unflatten__(arrays: dict[str, Any], context: Any, size: object, stride: object) -> BitWeight:
        group, shape, *rest = context
        return BitWeight._of(TernaryWeight(arrays["words"], arrays["scale"], group, shape), *rest)


def dense(weight: TernaryWeight, dtype: torch.dtype) -> Tensor:
    """scale * codes, [out, in]: a product in fp32, rounded to `dtype`."""
    return weight.ternary().dequantize(dtype)


class BitLinear(nn.Module):
    """y = Q(x) W^T + bias with ternary W, in integers; Q is `activation`, which may be set at any time.

    x [..., in_features] of bf16, fp16 or fp32, y [..., out_features] of the same dtype. With the activation
    "none" W is made dense for each product, in the dtype of x. `dtype` is what the weight had when it was
    dense. Words and scale are frozen, and the scale stays fp32 whatever the module is cast to. Gradients of x
    and bias are straight-through: those of x W^T + bias.
    """

    words: Tensor
    scale: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: TernaryWeight,
        bias: nn.Parameter | None = None,
        activation: str = "int8",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group, self.dtype = weight.group, dtype
        self.register_buffer("words", weight.words)
        self.register_buffer("scale", weight.scale)
        self.register_parameter("bias", bias)
        self.activation = activation

    @property
    def activation(self) -> str:
        """One of ACTIVATIONS. Raises UsageError when it is set to another."""
        return self._activation

    @activation.setter
    def activation(self, activation: str) -> None:
        if activation not in ACTIVATIONS:
            raise UsageError(f"there is no activation {activation!r}", _offer(ACTIVATIONS))
        self._activation = activation

    @property
    def ternary(self) -> TernaryWeight:
        """The weight, in the same memory."""
        return TernaryWeight(self.words, self.scale, self.group, (self.out_features, self.in_features))

    @property
    def numel(self) -> int:
        """How many weights."""
        return int(self.out_features * self.in_features)

    @property
    def stored_bytes(self) -> int:
        """Bytes of words and scales, with what fills tiles up."""
        return self.ternary.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """y; see the class."""
        if self.activation == "none":
            return F.linear(x, dense(self.ternary, x.dtype), self.bias)
        if torch.is_grad_enabled() and (
            x.requires_grad or (self.bias is not None and self.bias.requires_grad)
        ):
            return _StraightThrough.apply(x, self.bias, self)  # type: ignore[no-any-return, no-untyped-call]
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return ternary_linear(x, self.ternary, self.bias, activation=self._activation, clamped=CLAMPED)  # type: ignore[arg-type]

    def to_linear(self) -> nn.Linear:
        """The layer with a dense weight of its old dtype: an ordinary one, which trains."""
        with torch.device("meta"):
            made = nn.Linear(self.in_features, self.out_features, bias=False)
        made.weight = nn.Parameter(dense(self.ternary, self.dtype))
        made.register_parameter("bias", self.bias)
        return made.train(self.training)

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        scales = "one scale" if self.group is None else f"group={self.group}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activation={self.activation}, {scales}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BitLinear:
        exact = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scale = exact.to(self.scale.device)
        self._wait()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._wait()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._wait()

    def _wait(self) -> None:
        """Until the weight is there: kernels read it before the kernel ahead of them has ended."""
        if self.words.is_cuda:
            torch.cuda.current_stream(self.words.device).synchronize()


class _StraightThrough(torch.autograd.Function):
    """The product of a BitLinear layer, its gradients as if inputs were not quantised, as papers train."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: BitLinear) -> Tensor:
        ctx.layer = layer
        return layer._product(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_x = gradient @ dense(ctx.layer.ternary, gradient.dtype) if ctx.needs_input_grad[0] else None
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return of_x, of_bias, None


class ReLU2GLU(nn.Module):
    """down(norm(relu(gate x)^2 * up x)), the products with gate and up in one: equation (5) of a4.8.

    Where gate is zero, rows of up need not be read. It has the children of the module it replaces, under
    their names, and computes as that did where gate and up are no BitLinear layers of one activation without
    biases, and where gradients are wanted. The results have the same bits.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        for name, module in mlp.named_children():
            self.add_module(name, module)
        self.norm = next((name for name in SUB_NORMS if name in self._modules), None)
        self.apart = False
        """Whether gate and up are called as modules all the same, for hooks to see what they get."""

    @property
    def is_fused(self) -> bool:
        """Whether gate and up are read together."""
        return self._pair() is not None

    def _pair(self) -> tuple[BitLinear, BitLinear] | None:
        """Gate and up, if they are read together."""
        gate, up = self.gate_proj, self.up_proj
        if self.apart or not isinstance(gate, BitLinear) or not isinstance(up, BitLinear):
            return None
        same = gate.activation == up.activation != "none"
        return (gate, up) if same and gate.bias is None and up.bias is None else None

    def forward(self, x: Tensor) -> Tensor:
        """The MLP's result, [..., hidden] like x."""
        pair = None if torch.is_grad_enabled() and x.requires_grad else self._pair()
        if pair is None:
            y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        else:
            gate, up = pair
            y = relu2_glu(x, gate.ternary, up.ternary, activation=gate._activation, clamped=CLAMPED)  # type: ignore[arg-type]
        if self.norm is not None:
            y = self.get_submodule(self.norm)(y)
        return self.down_proj(y)  # type: ignore[no-any-return]


SUB_NORMS = ("ffn_sub_norm",)
"""Norms between the product of gate and up and the last layer, as BitNet's own models have."""


def is_relu2_glu(module: nn.Module) -> bool:
    """Whether a module is an MLP of gate, up and down with a squared ReLU, and nothing else."""
    children = dict(module.named_children())
    return (
        set(children) - set(SUB_NORMS) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and isinstance(children["act_fn"], ReLUSquaredActivation)
        and not list(module.parameters(recurse=False))
    )


def install(
    model: nn.Module, ternary: Mapping[str, TernaryWeight], activations: Activations | str = "b1.58"
) -> None:
    """Put BitLinear layers in the place of layers of a model, named with their weights, and ReLU2GLUs.

    A layer is an nn.Linear, or a Conv1D whose weight came with one scale. Warns of layers of no site where
    the mode is not the same for all.
    """
    activations = Activations.of(activations)
    made: dict[int, BitLinear] = {}
    for name, weight in ternary.items():
        old = model.get_submodule(name)
        if id(old) not in made:
            made[id(old)] = layer = BitLinear(weight, old.bias, activations.at(name), old.weight.dtype)  # type: ignore[arg-type]
            layer.train(old.training)
            _keep_hook(old, layer)
        model.set_submodule(name, made[id(old)])
    for name, module in list(model.named_modules()):
        if is_relu2_glu(module) and any(isinstance(m, BitLinear) for m in module.children()):
            model.set_submodule(name, ReLU2GLU(module).train(module.training))
    _warn_of_others(ternary, activations)


def _keep_hook(old: nn.Module, new: nn.Module) -> None:
    """Move what accelerate has hung on a module to another: it sends inputs where the module is."""
    if (hook := getattr(old, "_hf_hook", None)) is not None:
        from accelerate.hooks import add_hook_to_module  # type: ignore[import-untyped]

        add_hook_to_module(new, hook)


def _warn_of_others(names: Iterable[str], activations: Activations) -> None:
    globs = [glob for glob in activations.sites if _is_glob(glob)]
    others = [
        name for name in names if site_of(name) is None and not any(fnmatchcase(name, glob) for glob in globs)
    ]
    if others and activations.mode.startswith("a4.8"):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        warnings.warn(
            f"{activations.mode} has no rule for the layer {others[0]}{more}: inputs are int8", stacklevel=3
        )


def install_arrived(model: nn.Module, activations: Activations | str = "b1.58") -> None:
    """Make BitLinear layers of those of a model whose weight is a BitWeight. Other BitWeights become dense:

    those of layers with the activation "none", those that something else than a layer uses too, and those of
    a Conv1D with several scales, whose groups lie across its products.
    """
    activations = Activations.of(activations)
    users: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    weights: dict[int, BitWeight] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if isinstance(parameter, BitWeight):
                users[id(parameter)].append((path, module, name))
                weights[id(parameter)] = parameter
    found: dict[str, TernaryWeight] = {}
    for key, places in users.items():
        as_layer = [_as_layer(module, name, weights[key]) for _, module, name in places]
        if all(as_layer) and all(activations.at(path) != "none" for path, _, _ in places):
            found |= {path: w for (path, _, _), w in zip(places, as_layer, strict=True) if w is not None}
        else:
            parameter = nn.Parameter(weights[key].dense())
            for _, module, name in places:
                module._parameters[name] = parameter
    install(model, found, activations)


def _as_layer(module: nn.Module, name: str, weight: BitWeight) -> TernaryWeight | None:
    """The weight [out, in] of a layer; None if the module is none that can multiply by it."""
    if name != "weight" or weight.flipped:
        return None
    if isinstance(module, nn.Linear):
        return weight.ternary
    if isinstance(module, Conv1D) and weight.ternary.group is None and weight.shape[0] <= MOST_COLUMNS:
        codes = weight.ternary.codes().t().contiguous()
        return TernaryWeight.of(Ternary(codes, weight.scale), codes.device)
    return None


def bit_linears(model: nn.Module) -> dict[str, BitLinear]:
    """The BitLinear layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BitLinear)}


def set_activations(model: PreTrainedModel, asked: str | Mapping[str, Any] | Activations) -> None:
    """Run the BitLinear layers of a live model in another mode, and have its config say so.

    Raises UsageError for what are no activations.
    """
    activations = Activations.of(asked)
    layers = bit_linears(model)
    for name, layer in layers.items():
        layer.activation = activations.at(name)
    _warn_of_others(layers, activations)
    note(model, activations)


def note(model: PreTrainedModel, activations: Activations) -> None:
    """Write activations to a model's config."""
    found = with_entry(_document(model), ENTRY, activations.to_json(), "config.json")
    setattr(model.config, SECTION, found[SECTION])


def noted(model: PreTrainedModel) -> Activations | None:
    """What a model's config says of activations, None if it says nothing. Raises FormatError."""
    return _of_section(own_section(_document(model), "config.json"), "config.json")


def in_use(model: PreTrainedModel) -> Activations | None:
    """How the inputs of a live model's layers are quantised, None if no layer's are. Raises FormatError."""
    return noted(model) if bit_linears(model) else None


def _document(model: PreTrainedModel) -> dict[str, Any]:
    return {SECTION: getattr(model.config, SECTION, None)}


def to_dense(model: nn.Module) -> None:
    """Make ordinary layers of all BitLinear layers of a model, one after the other."""
    made: dict[int, nn.Linear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, BitLinear):
            if id(module) not in made:
                made[id(module)] = module.to_linear()
            model.set_submodule(name, made[id(module)])


# How many activations are zero, and weights thereby without effect.


@dataclass(frozen=True)
class Sparsity:
    """Shares of zeros among the inputs of layers after they are quantised, as Table 2 of a4.8 has them.

    sites    by site; layers of no site are under "other"
    overall  weighted by the layers' parameters
    active, parameters   of these layers: active = (1 - overall) * parameters
    tokens   that were looked at
    """

    sites: dict[str, float]
    overall: float
    active: int
    parameters: int
    tokens: int


@dataclass
class _Count:
    """Zeros among the inputs of a layer, on its device; None before the first."""

    zeros: Tensor | int = 0
    inputs: int = 0

    def add(self, is_zero: Tensor) -> None:
        self.zeros = self.zeros + is_zero.sum()
        self.inputs += is_zero.numel()

    @property
    def share(self) -> float:
        return float(self.zeros) / self.inputs if self.inputs else 0.0


@torch.inference_mode()
def sparsity(model: nn.Module, batches: Iterable[Any]) -> Sparsity:
    """How many inputs of its layers are zero while a model reads batches: token ids [batch, tokens].

    Layers are BitLinear, whose inputs count as quantised, and others of a known site, whose inputs count as
    they are. A weight of up counts as inactive, too, where the activation function of its gate gave zero:
    1 - (1 - inputs) (1 - gate), the paper's formula. A site's share is the mean of its layers, weighted by
    their parameters. Raises ValueError if there is nothing to count.
    """
    counts: dict[str, _Count] = defaultdict(_Count)
    tokens = 0
    with _hooks(model, counts), _gates_apart(model):
        for ids in batches:
            model(ids)
            tokens += ids.numel()
    shares = {name: _inactive(name, counts) for name in counts if not name.endswith(GATED)}
    if not shares:
        raise ValueError("no layer whose inputs could be counted was run")
    sizes = {name: _size(model.get_submodule(name)) for name in shares}
    by_site: dict[str, list[str]] = defaultdict(list)
    for name in shares:
        by_site[site_of(name) or "other"].append(name)

    overall, parameters = mean_share(shares, sizes), sum(sizes.values())
    return Sparsity(
        {site: mean_share({n: shares[n] for n in names}, sizes) for site, names in by_site.items()},
        overall, round((1 - overall) * parameters), parameters, tokens,
    )  # fmt: skip


def mean_share(shares: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """The mean of shares, weighted by the sizes of the same names."""
    return sum(share * sizes[name] for name, share in shares.items()) / sum(sizes[name] for name in shares)


GATED = ".act_fn"


def _inactive(name: str, counts: Mapping[str, _Count]) -> float:
    share, mlp = counts[name].share, name.rpartition(".")[0]
    has_gate = any(other.rpartition(".")[0] == mlp and site_of(other) == "gate" for other in counts)
    if site_of(name) != "up" or not has_gate or mlp + GATED not in counts:
        return share
    return 1 - (1 - share) * (1 - counts[mlp + GATED].share)


def _size(module: nn.Module) -> int:
    return module.numel if isinstance(module, BitLinear) else module.get_parameter("weight").numel()


@contextmanager
def _hooks(model: nn.Module, counts: dict[str, _Count]) -> Iterator[None]:
    """Count zeros of what goes into layers, and of what comes out of a gate's activation function."""

    def into(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            quantize = ACTIVATIONS[module.activation] if isinstance(module, BitLinear) else None
            counts[name].add((inputs[0] if quantize is None else quantize(inputs[0]).codes) == 0)

        return look

    def out_of(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
            counts[name].add(output == 0)

        return look

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, BitLinear) or (
            isinstance(module, nn.Linear | Conv1D) and site_of(name) is not None
        ):
            handles.append(module.register_forward_pre_hook(into(name)))
        elif f".{name}".endswith(GATED):
            handles.append(module.register_forward_hook(out_of(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _gates_apart(model: nn.Module) -> Iterator[None]:
    """Compute gate and up by themselves."""
    together = [module for module in model.modules() if isinstance(module, ReLU2GLU) and not module.apart]
    for module in together:
        module.apart = True
    try:
        yield
    finally:
        for module in together:
            module.apart = False
