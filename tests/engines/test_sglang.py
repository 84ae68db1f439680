"""SGLang reads compressed folders as the folders they were made of, and packs weights as they arrive.

All of it runs on a CPU with SGLang's own code: plugins, config, loader, layers, attention in torch.
"""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sglang = pytest.importorskip("sglang", reason="SGLang is not installed: run `make test-sglang`")

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from sglang_engine import Runner, new_checkpoint  # noqa: E402

from neuzip import compress_checkpoint, decompress_checkpoint  # noqa: E402
from neuzip.runtime.serving import EngineRefusal  # noqa: E402
from neuzip.runtime.weights import GridWeight, PackedWeight  # noqa: E402

pytestmark = pytest.mark.engines

PACKED = '{"neuzip": {"sglang": {"residency": "packed"}}}'
EXACT = '{"neuzip": {"sglang": {"residency": "packed", "exact": true}}}'


@pytest.fixture(scope="module")
def runner(plain: Path) -> Iterator[Runner]:
    started = Runner(plain)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with tied embeddings, and a vocabulary that SGLang pads."""
    return new_checkpoint(tmp_path_factory.mktemp("tied") / "model", vocabulary=1000, tied=True)


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def test_a_compressed_folder_is_loaded_as_the_original(runner: Runner, compressed: Path) -> None:
    model = runner.load(compressed)
    ours, wanted = parameters(model), parameters(runner.model)
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert type(model.model.layers[0].self_attn.qkv_proj.quant_method).__name__ == "UnquantizedLinearMethod"
    assert torch.equal(runner.logits(model), runner.logits(runner.model))


@pytest.mark.parametrize(
    ("source", "quantization", "overrides"),
    [("plain", "neuzip", "{}"), ("compressed", "neuzip", "{}"), ("compressed", None, PACKED)],
)
def test_packed_weights_are_those_of_the_original(
    runner: Runner, request: pytest.FixtureRequest, source: str, quantization: str | None, overrides: str
) -> None:
    model = runner.load(request.getfixturevalue(source), quantization, overrides)
    ours, wanted = parameters(model), parameters(runner.model)
    packed = {name for name, weight in ours.items() if isinstance(weight, PackedWeight)}
    assert packed == {name for name, weight in wanted.items() if weight.dim() == 2}
    for name, weight in wanted.items():
        one = ours[name]
        assert torch.equal(one.dense() if isinstance(one, PackedWeight) else one, weight), name
    logits, own = runner.logits(model), runner.logits(runner.model)
    assert torch.equal(logits.argmax(-1), own.argmax(-1))
    # bf16 logits of sums in another order: one unit in the last place of the largest.
    assert (logits - own).abs().max() <= own.abs().max() / 128


def test_quantized_weights_are_packed_as_their_codes(runner: Runner, plain: Path, tmp_path: Path) -> None:
    """Also those of fused layers, whose parts have steps of their own."""
    small, decoded = tmp_path / "small.nz", tmp_path / "decoded"
    compress_checkpoint(plain, small, bits=4.5, calibration="none")
    decompress_checkpoint(small, decoded)
    original, packed = runner.load(decoded), runner.load(small, overrides=PACKED)
    ours, wanted = parameters(packed), parameters(original)
    codes = {name for name, weight in ours.items() if isinstance(weight, GridWeight)}
    assert codes == {name for name, weight in wanted.items() if weight.dim() == 2}
    assert all(torch.equal(ours[name].dense(), wanted[name]) for name in codes)
    logits, own = runner.logits(packed), runner.logits(original)
    assert (logits - own).abs().max() <= own.abs().max() / 128


def test_exact_weights_have_the_logits_of_the_original(runner: Runner, compressed: Path) -> None:
    model = runner.load(compressed, overrides=EXACT)
    assert isinstance(model.lm_head.weight, PackedWeight)
    assert torch.equal(runner.logits(model), runner.logits(runner.model))


def test_tied_and_padded_embeddings_are_packed_once_without_rows_of_zeros(runner: Runner, tied: Path) -> None:
    dense, packed = runner.load(tied), runner.load(tied, "neuzip")
    weight = packed.lm_head.weight
    assert packed.model.embed_tokens.weight is weight and isinstance(weight, PackedWeight)
    assert weight.shape == dense.lm_head.weight.shape == (1024, 256)
    assert torch.equal(weight.dense()[:1000], dense.lm_head.weight[:1000])
    assert torch.equal(weight.dense()[1000:], weight.dense()[999:1000].expand(24, -1))
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    method = packed.lm_head.quant_method
    ids = torch.tensor([0, 7, 999])
    assert torch.equal(method.embedding(packed.lm_head, ids), dense.lm_head.weight[ids])
    torch.testing.assert_close(
        method.apply(packed.lm_head, x)[:, :1000].float(),
        (x.float() @ dense.lm_head.weight[:1000].float().T),
        rtol=2**-7, atol=2**-7,
    )  # fmt: skip


def test_the_dense_model_never_exists_as_a_whole(runner: Runner, tied: Path) -> None:
    from neuzip.runtime.sglang import arrival, methods

    weights: list[arrival.ArrivingWeight] = []
    alive: list[int] = []

    class Counted(arrival.ArrivingWeight):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            weights.append(self)

        def _pack(self, dense: torch.Tensor) -> None:
            alive.append(sum(weight._dense is not None for weight in weights))
            super()._pack(dense)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "ArrivingWeight", Counted)
        runner.load(tied, "neuzip")
    # SGLang sorts the tensors of a file by name: gate_proj and down_proj are there before up_proj.
    assert len(alive) == 9 and max(alive) <= 2


def test_a_missing_tensor_is_refused_where_weights_are_packed(
    runner: Runner, tied: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "incomplete"
    shutil.copytree(tied, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineRefusal, match=r"lacks 32,768 of the 131,072 weights of a QKVParallelLinear"):
        runner.load(folder, "neuzip")


def test_packed_weights_are_not_replaced_while_served(runner: Runner, tied: Path) -> None:
    model = runner.load(tied, "neuzip")
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(EngineRefusal, match="cannot be replaced while SGLang serves them"):
        model.load_weights([(name, torch.zeros(256, 512, dtype=torch.bfloat16))])


def test_weights_that_were_quantized_before_are_served_as_what_they_were() -> None:
    from types import SimpleNamespace

    from neuzip.runtime.sglang.hooks import served_config

    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    stored = {"quant_method": "neuzip", "version": 1, "lossless": True, "original": fp8}
    config = SimpleNamespace(quantization_config=stored)
    served_config(config)
    assert config.quantization_config == fp8
    served_config(config)  # SGLang caches the config
    assert config.quantization_config == fp8


@pytest.mark.parametrize(
    ("stored", "section", "message"),
    [
        ({"version": 99}, None, "format version 99"),
        ({"version": True}, None, "format version True"),
        ({"version": 1}, {"sglang": {"residency": "ans"}}, "'ans' is no residency in SGLang"),
    ],
)
def test_what_cannot_be_served_is_refused(
    stored: dict[str, object], section: object, message: str, runner: Runner
) -> None:
    from types import SimpleNamespace

    from neuzip.runtime.sglang.hooks import served_config

    config = SimpleNamespace(quantization_config={"quant_method": "neuzip", **stored}, neuzip=section)
    with pytest.raises(EngineRefusal, match=message):
        served_config(config)


def test_another_version_of_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from neuzip.runtime.sglang import quantization

    monkeypatch.setattr(quantization.metadata, "version", lambda name: "0.4.9")
    with pytest.raises(EngineRefusal, match=r"SGLang >=0\.5\.16,<=0\.5\.23, and this is SGLang 0\.4\.9"):
        quantization.SglangConfigOfNeuzip()


def test_a_damaged_file_is_refused(runner: Runner, tied: Path, tmp_path: Path) -> None:
    from neuzip.errors import FormatError

    folder = tmp_path / "damaged.nz"
    compress_checkpoint(tied, folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(FormatError, match="the file is damaged"):
        runner.load(folder)


def test_compressed_and_plain_files_together_are_refused(tied: Path, tmp_path: Path) -> None:
    from neuzip.runtime.sglang.hooks import decoded_weights

    compress_checkpoint(tied, tmp_path / "model.nz")
    files = [str(tied / "model.safetensors"), str(tmp_path / "model.nz" / "model.safetensors")]
    with pytest.raises(EngineRefusal, match="is not compressed, and other weight files beside it are"):
        decoded_weights(lambda files: iter(()), files)


def test_every_name_of_sglang_that_we_use_exists() -> None:
    from neuzip.runtime.sglang import hooks

    targets = [hooks.CONFIG, *hooks.weight_iterators()]
    for file in Path(hooks.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                targets += [f"{node.module}.{alias.name}" for alias in node.names]
    assert len(targets) > 12
    for target in targets:
        pkgutil.resolve_name(target)
    for iterator in hooks.weight_iterators():
        first = next(iter(inspect.signature(pkgutil.resolve_name(iterator)).parameters))
        assert first == "hf_weights_files", iterator
    # Whatever opens .safetensors files for SGLang's loaders has a hook.
    opening = {name for name in vars(weight_utils()) if name.endswith("safetensors_weights_iterator")}
    hooked = {target.rpartition(".")[2] for target in hooks.weight_iterators()}
    assert opening | {"instanttensor_weights_iterator"} >= hooked >= opening


def weight_utils() -> Any:
    from sglang.srt.model_loader import weight_utils

    return weight_utils


def test_the_command_line_offers_the_quantization(runner: Runner) -> None:
    from sglang.srt.layers.quantization import get_quantization_config
    from sglang.srt.server_args import QUANTIZATION_CHOICES

    assert QUANTIZATION_CHOICES.count("neuzip") == 1
    assert get_quantization_config("neuzip").__name__ == "SglangConfigOfNeuzip"


def test_a_start_that_cannot_be_hooked_refuses_a_compressed_folder(
    runner: Runner, compressed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.model_loader import weight_utils

    wrapped = weight_utils.safetensors_weights_iterator
    monkeypatch.setattr(weight_utils, "safetensors_weights_iterator", wrapped.__wrapped__)
    section = json.loads((compressed / "config.json").read_text())["quantization_config"]
    from types import SimpleNamespace

    from neuzip.runtime.sglang.hooks import served_config

    with pytest.raises(EngineRefusal, match=r"did not apply neuzip's hook to .*safetensors_weights_iterator"):
        served_config(SimpleNamespace(quantization_config=section))
