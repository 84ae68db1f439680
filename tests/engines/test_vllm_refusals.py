"""What vLLM is refused, and that a start without neuzip is as without it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from vllm_engine import NEW, TEXTS, in_other_process, residency
from vllm_models import compressed, keys_as_values, untied, with_config, with_tensors

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("caches")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untied(tmp_path_factory.mktemp("models") / "untied")


@pytest.fixture(scope="module")
def packable(plain: Path) -> Path:
    return compressed(plain, plain.with_name("untied.nz"))


def lacking(folder: Path, target: Path, tensor: str) -> Path:
    """A copy of a checkpoint without one of its tensors."""

    def without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors[tensor]
        return tensors

    return with_tensors(folder, target, without)


def test_refusals_say_what_is_wrong(plain: Path, packable: Path, tmp_path: Path, say):
    """All in one process: after each refusal another start is possible."""
    without = lacking(plain, tmp_path / "lacking", "model.layers.1.mlp.up_proj.weight")
    newer = with_config(
        packable, tmp_path / "newer.nz", lambda config: config["quantization_config"].update(version=99)
    )
    without_norm = lacking(plain, tmp_path / "no-norm", "model.layers.0.input_layernorm.weight")
    packed = residency("packed")
    cases = [
        (compressed(without, tmp_path / "lacking.nz"), {}, ["layers.1.mlp", "up_proj", "lacks"]),
        (tmp_path / "lacking.nz", packed, ["layers.1.mlp", "up_proj", "lacks"]),
        (without, {"quantization": "neuzip"}, ["layers.1.mlp", "up_proj", "lacks"]),
        (without_norm, {"quantization": "neuzip"}, ["layers.0.input_layernorm.weight", "lacks"]),
        (packable, residency("ans"), ["residency", "ans", "dense or packed"]),
        (packable, residency("dense", exact=True), ["exact", "residency 'packed'"]),
        (packable, {"additional_config": {"neuzip": {"residence": "packed"}}}, ["residence", "residency"]),
        (newer, {}, ["version 99", "update neuzip"]),
        (packable, {"load_format": "sharded_state"}, ["sharded_state", "neuzip decompress"]),
    ]
    gemma = keys_as_values(tmp_path / "gemma")
    say(f"vLLM starts {len(cases) + 2} times, of which {len(cases)} are refused")
    starts = [{"folder": folder, "options": options} for folder, options, _ in cases]
    accepted = {"folder": gemma, "options": {"quantization": "neuzip"}}, {"folder": packable}
    results, _ = in_other_process(*starts, *accepted)
    for (folder, options, words), result in zip(cases, results, strict=False):
        message = result.get("error", "no error")
        assert all(word in message for word in words), f"{folder.name}, {options}: {message}"
    for result in results[-2:]:
        assert [len(tokens) for tokens in result.get("tokens", [])] == [NEW] * len(TEXTS), result


def test_dense_weights_can_be_reloaded_and_packed_ones_stay(plain: Path, packable: Path, tmp_path: Path, say):
    other = compressed(untied(tmp_path / "other", seed=5), tmp_path / "other.nz")
    without = lacking(plain, tmp_path / "without", "model.layers.1.input_layernorm.weight")
    say("vLLM starts 4 times, and loads other weights into 3 of the engines")
    (dense, incomplete, packed, wanted), _ = in_other_process(
        {"folder": packable, "reload": other},
        {"folder": packable, "reload": compressed(without, tmp_path / "without.nz")},
        {"folder": plain, "options": {"quantization": "neuzip"}, "reload": other},
        {"folder": other},
    )
    assert "refused" not in dense, dense["refused"]
    assert dense["reloaded"] == wanted["tokens"] != dense["tokens"]
    assert "lacks model.layers.1.input_layernorm.weight" in incomplete["refused"]
    assert incomplete["reloaded"] == incomplete["tokens"] == dense["tokens"]
    assert "packed weights cannot be reloaded" in packed["refused"]
    assert packed["reloaded"] == packed["tokens"]


def test_a_start_without_neuzip_is_as_without_it(plain: Path, say):
    say("vLLM starts with a plain folder")
    (result,), log = in_other_process({"folder": plain}, VLLM_LOGGING_LEVEL="INFO")
    assert [len(tokens) for tokens in result["tokens"]] == [NEW] * len(TEXTS), result
    # vLLM lists the plugins that it has found.
    messages = [line for line in log.splitlines() if "neuzip" in line and "RESULTS" not in line]
    assert "INFO" in log and not [line for line in messages if "plugins/__init__.py" not in line], messages
    ours = {name for name in result["modules"] if name.startswith("neuzip")}
    assert "neuzip.runtime.vllm.plugin" in ours
    kernels = {name for name in ours if name.startswith("neuzip.kernels")}
    assert not {name for name in kernels if ".triton" in name or ".gluon" in name or name.endswith(".ops")}, (
        kernels
    )
    assert not {"numba", "llvmlite"} & {*result["modules"]}
