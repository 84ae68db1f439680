"""What tests of training share."""

from __future__ import annotations

import pytest

from neuzip.train import compressed_array as holding


@pytest.fixture
def recodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of any size are coded again by the table that they have."""
    monkeypatch.setattr(holding, "CODING_SHARE", 0)
