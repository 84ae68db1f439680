"""How inputs of ternary layers are quantised: the modes of BitNet b1.58 and a4.8, and exceptions.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor

from neuzip.errors import FormatError, UsageError
from neuzip.formats.config_section import SECTION
from neuzip.kernels import quantizers
from neuzip.kernels.quantizers import QuantizedTokens
from neuzip.runtime.config_entries import ConfigEntry

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
            raise UsageError(f"there is no activation mode {self.mode!r}", offer(MODES))
        for site, activation in self.sites.items():
            if not isinstance(activation, str) or activation not in ACTIVATIONS:
                raise UsageError(
                    f"the site {site!r}: there is no activation {activation!r}", offer(ACTIVATIONS)
                )
            known = [name for name, _ in SITES]
            if site not in known and not is_glob(site):
                raise UsageError(
                    f"there is no site {site!r}", f"{offer(known)}, or a glob such as '*.0.mlp.*'"
                )

    @staticmethod
    def of(value: str | Mapping[str, Any] | Activations) -> Activations:
        """Activations by a mode, or by what config.json may have: {"mode": ..., "sites": {...}}.

        Raises UsageError.
        """
        if isinstance(value, Activations):
            return value
        entry: Any = {"mode": value} if isinstance(value, str) else value
        if isinstance(entry, Mapping) and not set(entry) - {"mode", "sites"}:
            mode, sites = entry.get("mode", "b1.58"), entry.get("sites", {})
            if isinstance(mode, str) and isinstance(sites, Mapping):
                return Activations(mode, dict(sites))
        raise UsageError(
            f"activations {value!r} are no mode, and no object of mode and sites",
            'an example: {"mode": "a4.8", "sites": {"out": "int8"}}',
        )

    def at(self, name: str) -> str:
        """The activation of a module by its name; a glob goes before a site, the first glob before others."""
        for glob, activation in self.sites.items():
            if is_glob(glob) and fnmatchcase(name, glob):
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
        """The entry of config.json: a mode, or an object of mode and sites."""
        return {"mode": self.mode, "sites": dict(self.sites)} if self.sites else self.mode


def is_glob(site: str) -> bool:
    """Whether a key of `sites` is a glob, or a whole name, of modules."""
    return bool(set(site) & set("*.?["))


def offer(known: Iterable[str]) -> str:
    """The hint of an error that lists names."""
    return f"what there is: {', '.join(map(repr, known))}"


def _parsed(value: Any, document: Mapping[str, Any], path: str | os.PathLike[str]) -> Activations:
    try:
        return Activations.of(value)
    except UsageError as error:
        raise FormatError(
            path, error.message, field=f"{SECTION}.{ACTIVATIONS_ENTRY.name}", hint=error.hint
        ) from error


ACTIVATIONS_ENTRY: ConfigEntry[Activations] = ConfigEntry("activations", _parsed, Activations.to_json)
"""The activations that a config.json records."""
