"""Windows of texts, learning rates, the log, stops, and pictures of losses."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path

import pytest
import torch

from neuzip.errors import NeuzipError, UsageError
from neuzip.train.loop import OVER, Schedule, peak_memory, picture_of_losses, read_log, run, smoothed
from neuzip.train.text import TrainingWindows, read_documents, tokenise


class Letters:
    """A tokenizer with a token a character, and 0 for the end."""

    eos_token_id: int | None = 0

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


class Endless(Letters):
    eos_token_id = None


def windows(n: int = 101, length: int = 10, batch: int = 3, seed: int = 5) -> TrainingWindows:
    return TrainingWindows.of(torch.arange(n), length=length, batch=batch, seed=seed)


def test_a_window_goes_on_to_the_token_that_its_last_one_predicts() -> None:
    batch = windows().batch(0)
    assert batch.shape == (3, 11) and batch.dtype == torch.int64
    assert all(torch.equal(row, torch.arange(int(row[0]), int(row[0]) + 11)) for row in batch)


def test_an_epoch_has_every_window_once() -> None:
    text = windows(n=101, length=10, batch=5)
    assert (text.tokens, text.windows) == (101, 10)
    for epoch in (0, 3):
        rows = torch.cat([text.batch(2 * epoch), text.batch(2 * epoch + 1)])
        assert sorted(rows[:, 0].tolist()) == list(range(0, 100, 10))
    assert text.epoch(7) == 3.5


def test_a_batch_depends_on_step_and_seed_alone() -> None:
    one, other = windows(), windows()
    asked = [one.batch(step) for step in range(12)]
    for step in (11, 0, 7, 2):  # in another order, over several epochs
        assert torch.equal(other.batch(step), asked[step])
    assert not torch.equal(windows(seed=6).batch(0), asked[0])
    assert not torch.equal(asked[0], windows(batch=3, n=101).batch(10))


def test_tokens_that_fill_no_window_are_left_out() -> None:
    assert windows(n=20, length=10).windows == 1  # the second would predict a token that is not there
    assert windows(n=21, length=10).windows == 2


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(UsageError, match="the text has 10 tokens"):
        windows(n=10, length=10)


def test_documents_are_parted_by_the_end_token_or_by_lines() -> None:
    assert tokenise(Letters(), ["ab", "c"]).tolist() == [97, 98, 0, 99]  # type: ignore[arg-type]
    assert tokenise(Endless(), ["ab", "c"]).tolist() == [97, 98, 10, 10, 99]  # type: ignore[arg-type]


def test_text_and_json_lines_are_read(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in ("one", "zwei\n"))
    (tmp_path / "a.txt").write_bytes("\ufeffplain".encode())
    (tmp_path / "b.jsonl").write_text(lines)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    found = [list(read_documents(tmp_path / name)) for name in ("a.txt", "b.jsonl", "c.jsonl.gz")]
    assert found == [["plain"], ["one", "zwei\n"], ["one", "zwei\n"]]
    text = TrainingWindows.of(Letters(), [tmp_path / "a.txt", tmp_path / "b.jsonl"], length=4, batch=1)  # type: ignore[arg-type]
    assert text.tokens == len("plain") + 1 + len("one") + 1 + len("zwei\n")


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a.txt", b"\xff\xfe", "is not UTF-8, at byte 0"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}', 'line 2 has no field "text"'),
        ("a.jsonl", b"{", "line 1 is not JSON"),
        ("a.jsonl.gz", b"plain", "is not a gzip file"),
        ("none.txt", None, "cannot be read"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, name: str, data: bytes | None, problem: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(NeuzipError, match=problem) as caught:
        list(read_documents(tmp_path / name))
    assert name in caught.value.message


def test_rates_rise_and_fall() -> None:
    rates = [Schedule(2.0, 10, warm_up=4)(step) for step in range(10)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[9] == pytest.approx(0.2)
    assert Schedule(2.0, 10, least=0, shape="linear")(3) == pytest.approx(2.0 * 6 / 9)
    assert [Schedule(2.0, 3, shape="constant")(step) for step in range(3)] == [2.0] * 3
    assert Schedule(1.0, 1)(0) == 1.0


def test_schedules_without_sense_are_refused() -> None:
    with pytest.raises(UsageError, match=r"lr -1\.0"):
        Schedule(-1.0, 10)
    with pytest.raises(UsageError, match="no schedule 'cosin'"):
        Schedule(1.0, 10, shape="cosin")  # type: ignore[arg-type]


def losing(step: int, lr: float) -> dict[str, float]:
    return {"loss": 3.0 - 0.1 * step, "tokens": 8}


def rate(step: int) -> float:
    return 1e-3


def test_every_step_is_a_line_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    found = run(losing, steps=3, schedule=rate, log=log)
    assert read_log(log) == found
    assert [one["step"] for one in found] == [1, 2, 3]
    assert {"loss", "lr", "tokens_per_second", "memory_bytes"} <= found[0].keys()


def test_checkpoints_come_after_every_so_many_steps() -> None:
    saved: list[int] = []
    run(losing, steps=7, schedule=rate, every=3, checkpoint=saved.append)
    assert saved == [3, 6]
    run(losing, steps=6, schedule=rate, every=3, checkpoint=(saved := []).append)
    assert saved == [3]  # the last step is the caller's


def test_a_resumed_run_goes_on_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    whole = run(losing, steps=5, schedule=rate, log=log)
    log.write_text(log.read_text() + '{"step": 6, "lo')  # killed while it wrote
    assert [one["loss"] for one in read_log(log)] == [one["loss"] for one in whole]
    again = run(losing, steps=5, schedule=rate, log=log, start=3)
    assert [one["step"] for one in again] == [1, 2, 3, 4, 5]
    assert again[:3] == whole[:3] and read_log(log) == again


def test_the_budget_ends_a_run_with_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    now = [0.0]

    def slow(step: int, lr: float) -> dict[str, float]:
        now[0] += 0.05
        return losing(step, lr)

    monkeypatch.setattr("neuzip.train.loop.time.monotonic", lambda: now[0])
    found = run(slow, steps=1000, schedule=rate, checkpoint=saved.append, budget_seconds=0.12)
    assert len(found) == 3, "no step begins after the budget"
    assert saved == [3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_step_and_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    saved: list[int] = []

    class Ended(Exception):
        pass

    def usual(*_: object) -> None:
        raise Ended

    def interrupted(step: int, lr: float) -> dict[str, float]:
        if step == 2:
            signal.raise_signal(number)
        return losing(step, lr)

    before = signal.signal(number, usual)
    try:
        with pytest.raises(Ended):
            run(interrupted, steps=9, schedule=rate, log=tmp_path / "log", checkpoint=saved.append)
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, before)
    assert saved == [3] and len(read_log(tmp_path / "log")) == 3


def test_signals_that_are_ignored_stop_nothing() -> None:
    def interrupted(step: int, lr: float) -> dict[str, float]:
        signal.raise_signal(signal.SIGINT)
        return losing(step, lr)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert len(run(interrupted, steps=3, schedule=rate)) == 3
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_in_the_last_step_leaves_a_checkpoint() -> None:
    saved: list[int] = []

    def interrupted(step: int, lr: float) -> dict[str, float]:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return losing(step, lr)

    with pytest.raises(KeyboardInterrupt):
        run(interrupted, steps=3, schedule=rate, checkpoint=saved.append)
    assert saved == [3]


def test_a_loss_that_is_no_number_ends_a_run_without_a_checkpoint() -> None:
    saved: list[int] = []

    def diverging(step: int, lr: float) -> dict[str, float]:
        return {"loss": 1.0 if step < 2 else float("nan")}

    with pytest.raises(NeuzipError, match="step 3: the loss is nan"):
        run(diverging, steps=9, schedule=rate, every=1, checkpoint=saved.append)
    assert saved == [1, 2]


def test_a_norm_that_is_no_number_ends_a_run_without_a_checkpoint() -> None:
    saved: list[int] = []

    def diverging(step: int, lr: float) -> dict[str, float]:
        return {"loss": 1.0, "norm": 1.0 if step < 2 else float("inf")}

    with pytest.raises(NeuzipError, match="step 3: the norm of the gradients is inf"):
        run(diverging, steps=9, schedule=rate, every=1, checkpoint=saved.append)
    assert saved == [1, 2]


def test_all_processes_stop_when_one_of_them_is_told_to() -> None:
    """Here the other one is told to after two steps."""
    asked, saved, told = [], [], []

    def agree(reason: int) -> int:
        asked.append(reason)
        return signal.SIGINT if len(asked) == 3 else reason

    with pytest.raises(KeyboardInterrupt):
        run(losing, steps=9, schedule=rate, checkpoint=saved.append, agree=agree, stopped=told.append)
    assert (asked, saved, told) == ([0, 0, 0], [2], [2])
    asked.clear()
    run(
        losing,
        steps=2,
        schedule=rate,
        checkpoint=saved.append,
        agree=lambda reason: asked.append(reason) or 0,
    )
    assert asked == [0, 0, 0] and saved == [
        2
    ]  # once more after the last step: it may be the one that is stopped


def test_a_budget_that_is_over_for_one_process_stops_all_in_peace() -> None:
    saved: list[int] = []
    answers = iter([0, OVER])
    found = run(losing, steps=9, schedule=rate, checkpoint=saved.append, agree=lambda _: next(answers))
    assert len(found) == 1 and saved == [1]


def test_the_memory_of_a_run_on_the_cpu_is_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else of torch has been in use."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 7)
    for device in (None, torch.device("cpu")):
        (figures,) = run(losing, steps=1, schedule=rate, device=device)
        assert figures["memory_bytes"] > 10_000_000
    assert peak_memory(torch.device("cuda", 0)) == 7


def test_means_of_the_last_values() -> None:
    assert smoothed([1.0, 2.0, 6.0, 4.0], 2) == [1.0, 1.5, 4.0, 5.0]


def test_a_picture_is_the_same_each_time(tmp_path: Path) -> None:
    figures = [{"step": float(i), "loss": 3 - 0.01 * i} for i in range(60)]
    for name in ("a.svg", "b.svg", "c.png"):
        picture_of_losses(figures, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match=r"neither \.svg nor \.png"):
        picture_of_losses(figures, tmp_path / "d.gif")
