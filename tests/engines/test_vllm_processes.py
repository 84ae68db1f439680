"""vLLM with worker processes and with compiled graphs takes the tokens of the original folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_engine import assert_chosen_or_tied, greedy, in_other_process, residency, started
from vllm_models import compressed, untied, windows

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("caches")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one shape whose weights have other windows, as they were and compressed."""
    root = tmp_path_factory.mktemp("models")
    made = {"first": untied(root / "first"), "second": untied(root / "second", seed=2, spread=0.05)}
    return made | {f"{name}.nz": compressed(folder, root / f"{name}.nz") for name, folder in made.items()}


@pytest.fixture(scope="module")
def original(folders: dict[str, Path]) -> Iterator[Any]:
    with started(folders["first"]) as engine:
        yield engine


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_two_ranks_take_the_tokens_of_the_original(
    form: str, folders: dict[str, Path], original: Any, say: Any
):
    """Each rank is a process, and so is the engine: vLLM's config, with ours in it, is pickled for them."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    say(f"vLLM starts with two worker processes: {form}")
    job = {"folder": folders["first.nz"], "options": {"tensor_parallel_size": 2, **residency(form)}}
    (result,), _ = in_other_process(
        job, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, cores)),
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
    )  # fmt: skip
    assert "error" not in result, result
    say(f"two ranks, {form}: {assert_chosen_or_tied(original, result['tokens'])} tokens tied")


def test_a_filled_compile_cache_serves_another_checkpoint_under_the_same_path(
    folders: dict[str, Path], original: Any, tmp_path: Path, say: Any
):
    """No constant of a weight is in what vLLM compiled and keeps: the second model has other windows."""
    first, second = windows(folders["first"]), windows(folders["second"])
    assert first.keys() == second.keys() and all(first[name] != second[name] for name in first)
    cache = tmp_path / "cache"
    environment = {"VLLM_CACHE_ROOT": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    job = {"folder": tmp_path / "model.nz", "options": {"enforce_eager": False, **residency("packed")}}
    tokens, keys = {}, {}
    for name in ("first", "second"):
        shutil.rmtree(job["folder"], ignore_errors=True)
        shutil.copytree(folders[f"{name}.nz"], job["folder"])
        say(f"vLLM compiles or takes from the cache: the {name} checkpoint")
        (result,), log = in_other_process(job, VLLM_LOGGING_LEVEL="INFO", **environment)
        assert "error" not in result, result
        assert re.search(r"neuzip: \d+ weights are packed, in [\d.,]+ MB instead of [\d.,]+ MB", log)
        tokens[name] = result["tokens"]
        keys[name] = {path.name for path in cache.glob("torch_compile_cache/*") if path.is_dir()}
    assert keys["first"] and keys["first"] == keys["second"], "the cache was not used, so this shows nothing"
    assert_chosen_or_tied(original, tokens["first"])
    with started(folders["second"]) as other:
        assert greedy(other) != greedy(original)
        assert_chosen_or_tied(other, tokens["second"])
