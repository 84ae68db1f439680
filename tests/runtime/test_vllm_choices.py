"""What users of vLLM choose, and which versions there are: without vLLM."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from neuzip.distribution import ENGINES
from neuzip.runtime.serving import EngineRefusal, ServingOptions, require_supported
from neuzip.runtime.vllm.options import serving_options


def test_a_compressed_folder_is_dense_and_a_plain_one_packed() -> None:
    assert serving_options(None, None, is_compressed=True) == ServingOptions("dense")
    assert serving_options(None, None, is_compressed=False) == ServingOptions("packed")


def test_the_command_line_comes_before_config_json() -> None:
    entry = {"residency": "packed", "exact": True}
    assert serving_options(None, entry, is_compressed=True) == ServingOptions("packed", exact=True)
    assert serving_options({"exact": False}, entry, is_compressed=True) == ServingOptions("packed")
    assert serving_options({"residency": "dense"}, entry, is_compressed=True) == ServingOptions("dense")


@pytest.mark.parametrize(
    ("additional", "entry", "words"),
    [
        ({"residence": "packed"}, None, ["additional_config, neuzip", "'residence'", "residency and exact"]),
        (None, {"exactly": True}, ["config.json, neuzip.vllm", "'exactly'"]),
        ({"residency": "ans"}, None, ["'residency'", "'ans'", "dense or packed"]),
        ({"residency": ["packed"]}, None, ["'residency'", "['packed']"]),
        ({"residency": "packed", "exact": 1}, None, ["'exact'", "1 is neither"]),
        ({"exact": True, "residency": "dense"}, None, ["`exact`", "'dense'"]),
        ("packed", None, ["'packed' is not an object"]),
    ],
)
def test_a_wrong_key_or_value_is_named(additional: Any, entry: Any, words: list[str]) -> None:
    with pytest.raises(EngineRefusal) as refusal:
        serving_options(additional, entry, is_compressed=False)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.1rc2.dev3+g1234+cpu", "0.29"])
def test_versions_between_the_bounds_are_supported(version: str) -> None:
    require_supported("vllm", version)


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0.0", "0.1.dev1+gabc", "dev", ""])
def test_other_versions_are_refused_with_what_to_install(version: str) -> None:
    versions = ENGINES["vllm"].versions
    with pytest.raises(EngineRefusal) as refusal:
        require_supported("vllm", version)
    line = f'pip install "vllm{versions}"'
    assert version in str(refusal.value) and line in str(refusal.value)


def test_registering_without_vllm_raises_nothing_and_imports_nothing_heavy() -> None:
    program = (
        "import logging, sys; from neuzip.runtime.vllm.plugin import register; register();"
        "print(*{'torch', 'numba', 'triton', 'numpy', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
