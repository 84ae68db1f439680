"""Launches of ternary products: the tables give what was measured, and every launch fits on a GPU."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from neuzip.kernels.ternary_linear.triton import launches

CPU = torch.device("cpu")
RECORD = json.loads((Path(__file__).parent / "ternary_launches.json").read_text())
"""Launches as functions chose them that were fitted to an H100, for 1 to 4,096 tiles on 132 multiprocessors.

A list "launches" holds pairs: from so many tiles on, these values of the "fields".
"""

LEAST_K_BLOCKS = {"one_token": 1, "few_tokens": 1, "relu2_glu": 3}
"""Narrower gated units were never measured: the record is of a formula that the table simplifies there."""


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "multiprocessors", lambda device: RECORD["processors"])


def tiles_around(pairs: list[list[Any]]) -> Iterator[tuple[int, list[Any]]]:
    """Each recorded launch for the first tiles, the last and some between."""
    ends = [first for first, _ in pairs[1:]] + [RECORD["most_tiles"] + 1]
    for (first, values), end in zip(pairs, ends, strict=True):
        yield from ((tiles, values) for tiles in {first, (first + end) // 2, end - 1})


def chosen(kernel: str, launch: Any) -> list[int | None]:
    fields = asdict(launch)
    return [None if fields[name] is None else int(fields[name]) for name in RECORD["fields"][kernel]]


@pytest.mark.parametrize("kernel", LEAST_K_BLOCKS)
def test_tables_hold_the_launches_that_were_measured(kernel: str):
    choose = getattr(launches, f"{kernel}_launch")
    stages = RECORD["fields"][kernel].index("stages")
    for record in RECORD[kernel]:
        shape = {name: value for name, value in record.items() if name != "launches"}
        if shape["k_blocks"] < LEAST_K_BLOCKS[kernel]:
            continue
        for tiles, values in tiles_around(record["launches"]):
            launch = choose(tiles, device=CPU, **shape)
            steps = -(-shape["k_blocks"] // launch.warps) * (launch.tiles if kernel == "one_token" else 1)
            expected = [*values]
            ours = chosen(kernel, launch)
            for found in (expected, ours):  # no more stages than steps
                found[stages] = min(found[stages], steps)
            assert ours == expected, (shape, tiles)


def test_launches_of_many_tokens():
    for record in RECORD["many_tokens"]:
        launch = launches.many_tokens_launch(record["tokens"], CPU)
        assert chosen("many_tokens", launch) == record["launch"]


@pytest.mark.parametrize("processors", [16, 132, 200])
def test_launches_of_one_token_fit(processors: int, monkeypatch: pytest.MonkeyPatch):
    """Words and sums in shared memory, registers, and activations that a thread has to keep."""
    monkeypatch.setattr(launches, "multiprocessors", lambda device: processors)
    for tiles, k_blocks in itertools.product((1, 40, 264, 265, 896, 5000), (*range(1, 140, 3), 500)):
        for activation, bits in itertools.product(("int8", "int4"), (True, False)):
            launch = launches.one_token_launch(tiles, k_blocks, CPU, activation == "int4")
            launch = replace(launch, bits=bits)
            steps = -(-k_blocks // launch.warps)
            codes = launches.code_bytes(launch, k_blocks, activation)
            stages, prologue = launches.stages_and_prologue(launch, k_blocks, codes)
            assert launches.shared_bytes(launch, stages, codes) <= launches.STATIC_BYTES
            assert stages > 0 and 0 <= prologue <= launch.tiles * steps - stages
            assert launch.warps <= 2 * k_blocks and launch.warps * 32 * (launch.registers or 0) <= 65536
            assert not launch.fused or k_blocks > 128 or steps <= launches.FUSED_STEPS
