"""The core of the runtime: what an engine such as vLLM builds on, without transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import RunAlone

from neuzip.distribution import ENGINES

CORE = Path(__file__).resolve().parents[2] / "runtime"
ABOVE = {"hf", "decode", *ENGINES}
"""Packages that build on the core and import an engine: transformers, or one that need not be installed."""

MODULES = sorted(
    ".".join(("neuzip.runtime", *path.relative_to(CORE).with_suffix("").parts)).removesuffix(".__init__")
    for path in CORE.rglob("*.py")
    if path.relative_to(CORE).parts[0] not in ABOVE
)

FORBIDDEN = sorted({"transformers", *ENGINES, *(f"neuzip.runtime.{name}" for name in ABOVE)})

IMPORT_ALL = f"""
import sys
from importlib import import_module

for name in sys.argv[1:]:
    import_module(name)
    above = {{*{FORBIDDEN}}} & {{*sys.modules}}
    assert not above, f"{{name}} imports {{above}}"
"""

USE = """
import sys
from pathlib import Path

import torch

from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.workers import Workers
from neuzip.runtime.activations import Activations
from neuzip.runtime.bitlinear import BitLinear
from neuzip.runtime.read import read_tensors
from neuzip.runtime.weights import PackedWeight

with FolderSource(Path(sys.argv[1])) as source, Workers() as workers:
    by_name = {tensor.name: tensor for tensor in source.tensors()}
    dense, = read_tensors(source, [by_name["w"]], torch.device("cpu"), workers)
x = torch.ones(2, dense.shape[1], dtype=dense.dtype)
packed = PackedWeight.of(dense)
assert torch.equal(packed.dense(), dense)
torch.testing.assert_close(torch.nn.functional.linear(x, packed), x @ dense.t())
assert hasattr(torch.ops.neuzip, "packed_linear")
assert Activations("a4.8").at("model.layers.0.self_attn.o_proj") == "top_k_int8" and BitLinear is not None
assert "transformers" not in sys.modules
"""


def test_there_is_a_core() -> None:
    assert {"neuzip.runtime.read", "neuzip.runtime.weights", "neuzip.runtime.weights.packed"} <= {*MODULES}


@pytest.mark.slow
def test_the_core_imports_no_transformers(run_alone: RunAlone) -> None:
    run_alone(IMPORT_ALL, *MODULES)


@pytest.mark.slow
def test_an_engine_reads_multiplies_and_quantises_by_the_core(tmp_path: Path, run_alone: RunAlone) -> None:
    import torch
    from safetensors.torch import save_file

    from neuzip.compress import compress

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 96, generator=generator).to(torch.bfloat16)
    save_file({"w": weight}, tmp_path / "plain.safetensors")
    compress(tmp_path / "plain.safetensors", tmp_path / "small.safetensors")
    run_alone(USE, tmp_path / "small.safetensors")
