"""Globs on names: those of fnmatch, and alternatives; names of experts."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuzip.compress.expert_names import expert_name
from neuzip.compress.globs import matches


@given(st.text("ab.[]!-*?^\\", max_size=7), st.text("ab.[]!-*?^\\\n", max_size=6))
def test_without_braces_a_glob_is_that_of_fnmatch(glob: str, name: str):
    assert matches(name, glob) == fnmatchcase(name, glob)


@pytest.mark.parametrize(
    ("glob", "names", "others"),
    [
        ("e.{1,17}.w", ["e.1.w", "e.17.w"], ["e.7.w", "e.117.w", "e.1,17.w", "xe.1.w", "e.1.w2"]),
        ("{a*,?b}.w", ["a.w", "axx.w", "cb.w"], ["b.w", "ab"]),
        ("{,x}y", ["y", "xy"], ["xxy"]),
        ("{a}", ["{a}"], ["a"]),
        ("[{]a,b}", ["{a,b}"], ["a", "b"]),
        ("{a,b", ["{a,b"], ["a"]),
        ("{a,b{c,d}}x", ["ax", "bcx", "bdx"], ["bx", "{a,bcx", "{a,bc}x"]),
        ("{{1,2}.*,{up,down}}.w", ["1.q.w", "2.k.w", "up.w", "down.w"], ["1.w", "3.q.w", "{1.q,up}.w"]),
        ("{a{b,c}}", ["{ab}", "{ac}"], ["ab", "{a{b,c}}"]),
        ("{[ab,],c}", ["a", ",", "c"], ["[ab", "]"]),
    ],
)
def test_braces_hold_alternatives(glob: str, names: list[str], others: list[str]):
    assert all(matches(name, glob) for name in names)
    assert not any(matches(name, glob) for name in others)


@pytest.mark.parametrize(
    "name",
    ["model.layers.3.mlp.shared_experts.0.w", "experts.3.w", "model.layers.3.mlp.experts.gate_up_proj",
     "model.layers.3.mlp.experts.3"],
)  # fmt: skip
def test_what_is_not_of_one_expert(name: str):
    assert expert_name(name) is None
