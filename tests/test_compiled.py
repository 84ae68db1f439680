"""Loops compile where there is no place to keep the result: read-only installations without a home."""

from __future__ import annotations

from typing import Any

import numba
import pytest

from neuzip.kernels import compiled


def test_no_place_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(**options: Any) -> Any:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(**options)

    monkeypatch.setattr(compiled, "njit", njit)
    double = compiled.compiled(lambda x: 2 * x)
    assert double(21) == 42
