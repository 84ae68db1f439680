"""Windows in batches, and shared out over processes: the same figures, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch

from neuzip.compress.ranks import Ranks
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.measures.distributed import WindowBatch, batches, over_windows
from neuzip.eval.measures.windows import TokenWindow, cut, strided

IDS = torch.arange(100, 200)


def test_windows_of_one_length_lie_side_by_side():
    found = list(batches(IDS, list(cut(100, 16)), rows=40))
    assert [tuple(b.ids.shape) for b in found] == [(2, 16)] * 3 + [(1, 3)]
    assert found[1].ids[0].tolist() == list(range(132, 148))
    assert found[1].targets.tolist() == list(range(133, 165))
    assert all(b.rows == slice(None) for b in found)


def test_a_window_of_more_than_all_rows_is_fed_alone():
    assert [tuple(b.ids.shape) for b in batches(IDS, list(cut(100, 33)), rows=10)] == [(1, 33)] * 3


def test_rows_are_those_that_count():
    """Whatever a model says of the token at each place, the rows name the place before each target."""
    for windows in (
        list(strided(100, 16, 5)),
        [TokenWindow(0, 8, 3), TokenWindow(8, 16, 8), TokenWindow(16, 20, 1)],
    ):
        for batch in batches(IDS, windows, rows=48):
            assert (batch.ids.flatten()[batch.rows] + 1).tolist() == batch.targets.tolist()


class Gathering(Ranks):
    """One of several ranks, whose results come to lie in `shares`; so do those of the others."""

    def __init__(self, rank: int, world: int, shares: dict[int, Any]) -> None:
        super().__init__(rank, world)
        self.shares = shares

    def all_gather(self, value: Any) -> list[Any]:
        self.shares[self.rank] = value
        if len(self.shares) < self.world:
            raise InterruptedError
        return [self.shares[rank] for rank in range(self.world)]


def plus_one(batch: WindowBatch) -> dict[str, torch.Tensor]:
    return {"next": batch.ids.flatten()[batch.rows] + 1, "half": batch.targets / 2}


@pytest.mark.parametrize("world", [1, 2, 3, 20])
def test_results_come_in_the_order_of_windows_whoever_measured(world):
    windows = list(strided(100, 16, 5))
    shares: dict[int, Any] = {}
    counted: list[int] = []

    def work(rank: int) -> dict[str, Any]:
        ranks = Gathering(rank, world, shares)
        return over_windows(plus_one, IDS, windows, 32, ranks=ranks, on_tokens=counted.append)

    for rank in range(world - 1):
        with pytest.raises(InterruptedError):
            work(rank)
    found = work(world - 1)
    assert found["next"].tolist() == list(range(101, 200))
    assert np.array_equal(found["half"], np.arange(101, 200) / 2)
    assert sum(counted) == 99


@pytest.mark.slow
def test_two_processes_give_the_figures_of_one(tmp_path: Path, forks: forked.Server):
    """And only the first of them speaks."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again.\n" * 40)
    command = [
        "neuzip",
        "eval",
        CHECKPOINT,
        "--original",
        CHECKPOINT,
        "--text",
        text,
        "--window",
        "32",
        "--json",
    ]
    command += ["--max-tokens", "400", "--device", "cpu"]
    one_process = forks.start(*command, cwd=tmp_path)
    two_processes = forks.start(*command, cwd=tmp_path, ranks=2)
    said = []
    for process in (one_process, two_processes):
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        said.append(stdout)
    one, two = (json.loads(answer) for answer in said)
    assert (one.pop("processes"), two.pop("processes")) == (1, 2)
    assert [answer["report"]["setting"].pop("processes") for answer in (one, two)] == ["1", "2"]
    for answer in (one, two):
        for model in (answer["before"], answer["after"]):
            del model["tokens_per_second"]
        del answer["seconds"], answer["memory"], answer["report"]["cost"]
    assert len(one["conventions"]) == 4
    assert one == two
