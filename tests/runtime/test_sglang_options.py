"""What a user of SGLang may choose, and a plugin that leaves a start without SGLang's names alone.

tests/engines/test_sglang.py tries the rest with SGLang itself.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys

import pytest

from neuzip.distribution import ENGINES
from neuzip.runtime.serving import EngineRefusal, ServingOptions, require_supported
from neuzip.runtime.sglang.options import sglang_options
from neuzip.runtime.sglang.plugin import register


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23", "0.5.20rc1+cpu"])
def test_versions_between_the_bounds_are_supported(version: str) -> None:
    require_supported("sglang", version)


@pytest.mark.parametrize("version", ["0.5.15", "0.5.24", "1.0", "dev"])
def test_other_versions_are_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(EngineRefusal) as refusal:
        require_supported("sglang", version)
    assert version in str(refusal.value) and f'"sglang{ENGINES["sglang"].versions}"' in str(refusal.value)


def test_weights_are_dense_unless_the_section_says_packed() -> None:
    assert sglang_options(None) == sglang_options({"activations": "none"}) == ServingOptions("dense", False)
    assert sglang_options({"sglang": {"residency": "packed"}}) == ServingOptions("packed", False)
    section = {"sglang": {"residency": "packed", "exact": True}}
    assert sglang_options(section) == ServingOptions("packed", True)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"residency": "ans"}, "'ans' is no residency in SGLang; give dense or packed"),
        ({"residence": "packed"}, "no key 'residence'; there are residency and exact"),
        ({"exact": True}, "`exact` has no effect with the residency 'dense'"),
        ({"residency": "packed", "exact": 1}, "neither true nor false"),
        ("packed", "is not an object"),
    ],
)
def test_other_options_are_refused(entry: object, message: str) -> None:
    with pytest.raises(EngineRefusal) as refusal:
        sglang_options({"sglang": entry})
    assert message in str(refusal.value)
    assert "exact" in entry or "config.json, neuzip.sglang" in str(refusal.value)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_a_plugin_that_cannot_register_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        register()
    assert "neuzip could not register with SGLang, which so serves no compressed folder" in caplog.text


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import neuzip.runtime.sglang.plugin, neuzip.runtime.sglang.hooks, sys; "
        "print([m for m in ('torch', 'numba', 'triton', 'transformers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
