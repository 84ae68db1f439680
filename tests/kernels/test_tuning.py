"""Launch tables: what they say is what was measured, and every file of them can be read.

launches.json holds the choices of the functions that the tables replaced, by kernel: arguments and launch.
After a new measurement its lines change with the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from neuzip.kernels import tuning
from neuzip.kernels.attention.triton.forward import forward_launch
from neuzip.kernels.attention.triton.quantize import codes_launch
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.kv_cache.triton import attend, attend_mma, shares
from neuzip.kernels.linear_cross_entropy.triton.backward import gradient_launch
from neuzip.kernels.linear_cross_entropy.triton.divergence import pairs_launch
from neuzip.kernels.linear_cross_entropy.triton.tiles import statistics_launch
from neuzip.kernels.packed_linear.triton import linear as triton_linear
from neuzip.kernels.rans.coded import Kind
from neuzip.kernels.rans.triton.decode import warps_of
from neuzip.kernels.tuning import launch_for

CPU = torch.device("cpu")
RECORDED: dict[str, list[list[Any]]] = json.loads(
    Path(__file__).with_name("launches.json").read_text(encoding="utf-8")
)


def dtype(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]


def with_processors(module: Any, count: int, function: Callable[[], Any]) -> Any:
    """What a function gives on a card of so many multiprocessors."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "multiprocessors", lambda device: count)
        return function()


def one_row(tiles: int, planes: int, lanes: int, processors: int) -> list[int]:
    choose = triton_linear.one_row_launch.__wrapped__
    return [*with_processors(triton_linear, processors, lambda: choose(tiles, planes, lanes, CPU))]


def share_counts(tokens: int, programs: int, processors: int) -> list[int]:
    count = shares.share_count.__wrapped__
    shape = {"width": 128, "group": 4, "rotated": True, "key_bits": 8, "value_bits": 8}
    return with_processors(  # type: ignore[no-any-return]
        shares, processors,
        lambda: [
            count("kv_cache.attend", tokens, programs, attend.STEP, CPU),
            count("kv_cache.attend_mma", tokens, programs, attend_mma.STEP, CPU, **shape),
        ],
    )  # fmt: skip


def gradients(kernel: str) -> Callable[..., dict[str, Any]]:
    return lambda name, described: asdict(gradient_launch(kernel, dtype(name), described, CPU))


def decoder_warps(name: str, kept: int, group: int, block: int, blocks: int, aligned: bool) -> int:
    return warps_of(Kind(FORMATS[name], kept, group, block), blocks, CPU, aligned)


CHOICES: dict[str, Callable[..., Any]] = {
    "packed_linear.one_row": one_row,
    "packed_linear.some_rows": lambda rows: launch_for("packed_linear.some_rows", CPU, rows=rows)["programs"],
    "linear_cross_entropy.statistics": lambda name, tokens, described, extras: asdict(
        statistics_launch(dtype(name), tokens, described, extras, CPU)
    ),
    "linear_cross_entropy.pairs": lambda name, described: asdict(pairs_launch(dtype(name), described, CPU)),
    "linear_cross_entropy.logit_gradients": gradients("logit_gradients"),
    "linear_cross_entropy.weight_gradients": gradients("weight_gradients"),
    "linear_cross_entropy.hidden_gradients": gradients("hidden_gradients"),
    "attention.forward": lambda width, plain: forward_launch(width, plain, CPU),
    "attention.codes": lambda columns: codes_launch(columns, CPU),
    "rans.decode": decoder_warps,
    "kv_cache.shares": share_counts,
}  # fmt: skip


@pytest.mark.parametrize("kernel", RECORDED)
def test_launches_are_those_that_were_measured(kernel: str) -> None:
    choose = CHOICES[kernel]
    wrong = [(shape, launch, got) for shape, launch in RECORDED[kernel] if (got := choose(*shape)) != launch]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("path", sorted(tuning.FOLDER.glob("sm*/*.toml")), ids=lambda path: path.stem)
def test_every_table_can_be_read(path: Path) -> None:
    kernels = tuning.read(path)
    assert kernels
    assert all(entry["use"] for entries in kernels.values() for entry in entries)


def table(folder: Path, architecture: int, text: str) -> None:
    (folder / f"sm{architecture}").mkdir(exist_ok=True)
    measured = 'measured = { card = "a card", commit = "0", date = 2026-01-01 }\n'
    (folder / f"sm{architecture}" / "op.toml").write_text(measured + text, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    for function in (tuning.source_for, tuning.launch_for):
        function.cache_clear()
        monkeypatch.setattr(tuning, function.__name__, function.__wrapped__)
    return tmp_path


def test_a_card_without_a_table_gets_that_of_the_nearest_architecture(folder: Path) -> None:
    for architecture in (80, 90):
        table(folder, architecture, "[[k]]\nuse = { a = 1 }\n")
    nearest = {card: tuning.source_for("op", card).architecture for card in (75, 80, 86, 89, 90, 100, 120)}
    assert nearest == {75: 80, 80: 80, 86: 80, 89: 80, 90: 90, 100: 90, 120: 90}
    assert tuning.source_for("op", 90).is_own and not tuning.source_for("op", 100).is_own
    with pytest.raises(KeyError, match="no architecture has a table of other"):
        tuning.source_for("other", 90)


def test_the_first_entry_whose_conditions_hold_counts(folder: Path) -> None:
    table(
        folder, 90,
        '[[k]]\nwhen = { n = { min = 2, below = 4 }, dtype = ["a", "b"] }\nuse = { a = 1 }\n'
        "[[k]]\nwhen = { n = { above = 4, max = 6 }, flag = true }\nuse = { a = 2 }\n"
        "[[k]]\nuse = { a = 3 }\n",
    )  # fmt: skip

    def chosen(n: float, dtype: str = "a", flag: bool = True) -> int:
        return tuning.launch_for("op.k", CPU, n=n, dtype=dtype, flag=flag)["a"]  # type: ignore[no-any-return]

    assert [chosen(n) for n in (1, 2, 3.5, 4, 4.5, 6, 7)] == [3, 1, 1, 3, 2, 2, 3]
    assert chosen(2, dtype="c") == 3 and chosen(5, flag=False) == 3
    with pytest.raises(TypeError):
        tuning.launch_for("op.k", CPU, n=1, dtype="a", flag=True)["a"] = 2  # type: ignore[index]


def test_entries_of_a_card_come_first(folder: Path) -> None:
    table(
        folder,
        90,
        '[[k]]\nuse = { a = 1 }\n[[k]]\ncards = ["H200"]\nuse = { a = 2 }\n[[k]]\nuse = { a = 3 }\n',
    )
    entries = tuning.read(folder / "sm90" / "op.toml")["k"]
    for card, first in (("NVIDIA H200", 2), ("NVIDIA H100 80GB HBM3", 1), ("", 1)):
        assert next(entry["use"]["a"] for entry in entries if tuning.holds(entry, {}, card)) == first


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[k]]\nwhen = { n = 1 }\nuse = { a = 1 }\n", "the last entry of k has conditions"),
        ("[[k]]\nuse = { a = 1 }\nif = 1\n", "unknown keys"),
        ("[[k]]\nwhen = { n = 1 }\n", "without `use`"),
        ("[[k]]\nwhen = { n = { least = 1 } }\nuse = { a = 1 }\n[[k]]\nuse = { a = 1 }\n", "other bounds"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(folder: Path, text: str, problem: str) -> None:
    table(folder, 90, text)
    with pytest.raises(ValueError, match=problem):
        tuning.read(folder / "sm90" / "op.toml")


def test_an_entry_says_where_and_when_it_was_measured(folder: Path) -> None:
    table(folder, 90, "")
    (folder / "sm90" / "op.toml").write_text("[[k]]\nuse = { a = 1 }\n", encoding="utf-8")
    with pytest.raises(ValueError, match="`measured` lacks"):
        tuning.read(folder / "sm90" / "op.toml")


@pytest.fixture
def card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], torch.device]:
    """A GPU of a compute capability that no machine here needs to have; its number makes the device."""
    monkeypatch.setattr(tuning, "_warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA GPU {device.index}")
    monkeypatch.setattr(tuning, "architecture_of", lambda device: device.index or 90)
    return lambda architecture: torch.device("cuda", architecture)


def test_an_unknown_card_is_mentioned_once(folder: Path, card: Callable[[int], torch.device]) -> None:
    table(folder, 90, "[[k]]\nuse = { a = 1 }\n[[other]]\nuse = { a = 2 }\n")
    with pytest.warns(tuning.UntunedGpuWarning) as mentioned:
        launches = [tuning.launch_for(kernel, card(100))["a"] for kernel in ("op.k", "op.other", "op.k")]
    assert launches == [1, 2, 1]
    assert [str(one.message) for one in mentioned] == [
        "op has no launch parameters for NVIDIA GPU 100 (compute capability 10.0) and uses those for 9.0; "
        "results are as accurate, but it may be slower; benchmarks/tune.py in neuzip's repository tunes a GPU"
    ]
    with pytest.warns(tuning.UntunedGpuWarning, match="NVIDIA GPU 89 .compute capability 8.9."):
        tuning.launch_for("op.k", card(89))  # another card is mentioned, too


@pytest.mark.filterwarnings("error")
def test_a_card_with_a_table_is_not_mentioned(folder: Path, card: Callable[[int], torch.device]) -> None:
    table(folder, 90, "[[k]]\nuse = { a = 1 }\n")
    assert tuning.launch_for("op.k", card(90))["a"] == 1
    assert tuning.launch_for("op.k", CPU)["a"] == 1


def test_launches_are_replaced_for_a_while() -> None:
    before = launch_for("packed_linear.some_rows", CPU, rows=16)
    few = [{"when": {"rows": {"max": 16}}, "use": {"programs": 77}}, {"use": {"programs": 78}}]
    with tuning.replaced({"packed_linear.some_rows": few}):
        assert launch_for("packed_linear.some_rows", CPU, rows=16) == {"programs": 77}
        with tuning.replaced({"packed_linear.some_rows": [{"use": {"programs": 5}}]}):
            assert launch_for("packed_linear.some_rows", CPU, rows=16) == {"programs": 5}
        assert launch_for("packed_linear.some_rows", CPU, rows=32) == {"programs": 78}
    assert launch_for("packed_linear.some_rows", CPU, rows=16) == before
