"""Sweeps: what is asked for, what a row holds, that an interrupted one goes on, the picture, the command."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from neuzip.cli.show.sweep import COLUMNS
from neuzip.compress import compress
from neuzip.errors import FormatError, NeuzipError, UsageError, WouldOverwrite
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.measures import comparison as baseline
from neuzip.eval.measures import fingerprint
from neuzip.eval.measures.texts import Document, Text, read_text
from neuzip.eval.sweep import measure, run
from neuzip.eval.sweep.folder import PICTURES
from neuzip.eval.sweep.picture import draw
from neuzip.eval.sweep.rows import Sweep, SweepRow
from neuzip.eval.sweep.run import sweep
from neuzip.eval.sweep.setting import SweepSetting, with_calibration
from neuzip.eval.sweep.setup import WORK, SweepScheme, parse_schemes, require_quantized, work_folder
from neuzip.eval.yardsticks.checkpoint import write_restored
from neuzip.eval.yardsticks.table import YARDSTICKS
from neuzip.runtime.hf.load import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

Speak = Callable[..., Any]
TOKENS = 512
SCHEMES, YARDSTICK = "lossless,k3,k0b64", "q4_0"
LABELS = ["lossless", "k3", "k0b64", "q4_0"]


@contextmanager
def stage(label: str, total: int, unit: str) -> Iterator[object]:
    yield lambda count: None


def setting(**changes: Any) -> SweepSetting:
    return SweepSetting(CHECKPOINT, read_text("demo"), **{"max_tokens": TOKENS, "device": "cpu", **changes})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sweep, Path]:
    """A small sweep of the built-in checkpoint, and its folder."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    return sweep(setting(), parse_schemes(SCHEMES, "", YARDSTICK), out, stage), out


# What is asked for


@pytest.mark.parametrize(
    ("schemes", "blocks", "labels"),
    [
        ("lossless", None, ["lossless"]),
        ("k7,k0", "", ["k7", "k0"]),
        ("k1", "64,512", ["k1", "k1b64", "k1b512"]),
        ("k1b64, k1 ,k1b64", "64", ["k1b64", "k1"]),
    ],
)
def test_schemes(schemes, blocks, labels):
    assert [scheme.label for scheme in parse_schemes(schemes, blocks)] == labels


@pytest.mark.parametrize(
    ("schemes", "blocks"),
    [
        ("", ""),
        ("k", ""),
        ("raw", ""),
        ("k-1", ""),
        ("k3b100", ""),
        ("k3", "100"),
        ("k3", "x"),
        ("k333", ""),
        ("q4_0", ""),
    ],
)
def test_what_is_no_scheme_is_refused(schemes, blocks):
    with pytest.raises(UsageError, match=r"`schemes`|`blocks`"):
        parse_schemes(schemes, blocks)


# Rows


@pytest.mark.slow
def test_sizes_are_those_of_the_compressed_checkpoint(made, tmp_path: Path):
    for row in made[0].rows[:3]:
        (scheme,) = parse_schemes(row.scheme, "")
        report = compress(CHECKPOINT, tmp_path / row.scheme, scheme.rules)
        assert (row.bytes, row.original_bytes) == (report.stored_weight_bytes, report.weight_bytes)
        assert (row.ratio, row.bits_per_weight) == (report.ratio, report.bits_per_weight)


def test_divergence_is_that_of_the_compressed_checkpoint(made, tmp_path: Path):
    """Of the checkpoint of a yardstick too, which is a plain one."""
    _, _, rounded, yardstick = made[0].rows
    (scheme,) = parse_schemes(rounded.scheme, "")
    compress(CHECKPOINT, tmp_path / "rounded", scheme.rules)
    written = write_restored(
        CHECKPOINT, tmp_path / "yardstick", YARDSTICKS[YARDSTICK], torch.device("cpu"), widen=True
    )
    assert yardstick.bytes == written.bytes and yardstick.weights == written.weights == rounded.weights
    assert yardstick.original_bytes == rounded.original_bytes
    ids = run.read_tokens(CHECKPOINT, read_text("demo"), None, TOKENS).ids
    losses, divergences = [], []
    for path in (CHECKPOINT, tmp_path / "rounded", tmp_path / "yardstick"):
        model = load_model(path, torch.float32)
        with torch.no_grad():
            log_p = model(input_ids=ids[:-1].view(2, 256)).logits.double().log_softmax(-1).flatten(0, 1)
        losses.append(-log_p.gather(1, ids[1:, None]).mean().item())
        divergences.append(log_p)
    p = divergences[0]
    for row, q, loss in zip((rounded, yardstick), divergences[1:], losses[1:], strict=True):
        kld, difference = row.comparison.kld.mean.value, row.comparison.nll_difference.value
        assert kld == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
        assert difference == pytest.approx(loss - losses[0], rel=1e-4)


def test_lossless_is_the_same_to_the_last_bit(made):
    row = made[0].rows[0]
    assert row.comparison.identical
    assert row.comparison.kld.max == 0 and row.comparison.top_1.value == 1
    assert row.largest_relative_error == 0


def test_fewer_bits_are_smaller_and_further_away(made):
    assert [row.scheme for row in made[0].rows] == LABELS
    assert [row.kind for row in made[0].rows] == ["lossless", "rounded", "rounded", "yardstick"]
    assert made[0].front == ("k0b64", "q4_0", "k3", "lossless")


def test_what_was_measured_is_positive(made):
    for row in made[0].rows[:3]:
        assert row.memory_bytes == 4 * row.weights  # float32, and the tied head once
        assert min(row.load_seconds, row.decode_bytes_per_second, row.tokens_per_second) > 0
        assert row.peak_bytes is None, "on a CPU that is the process's, of all schemes"
    yardstick = made[0].rows[3]
    assert yardstick.memory_bytes is yardstick.load_seconds is yardstick.tokens_per_second is None


def test_files_hold_the_rows(made):
    found, out = made
    assert {p.name for p in out.iterdir()} == {
        *(f"{label}.json" for label in LABELS), "sweep.svg", "sweep.png",
    }  # fmt: skip
    for row in found.rows:
        values = json.loads((out / f"{row.scheme}.json").read_text())
        assert values["schema"] == 1
        assert values["kld"]["mean"]["value"] == row.comparison.kld.mean.value
        assert SweepRow.from_json(values) == row
        del values["kind"]
        assert SweepRow.from_json(values) == row, "rows of earlier versions do not tell their kind"


def test_what_keeps_all_mantissa_bits_has_no_blocks(tmp_path: Path):
    asked = parse_schemes("k7,k6", "64")
    assert run._distinct(CHECKPOINT, asked) == [SweepScheme(7), SweepScheme(6), SweepScheme(6, 64)]


# Going on


def test_a_second_run_measures_nothing_again(made, monkeypatch: pytest.MonkeyPatch):
    found, out = made
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    monkeypatch.setattr(measure, "BaselineComparison", None)  # no model is loaded either
    monkeypatch.setattr(measure, "compress", None)
    again = sweep(setting(), parse_schemes(SCHEMES, "", YARDSTICK), out, stage)
    assert again.rows == found.rows
    assert again.resumed == 4
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_what_is_missing(tmp_path: Path):
    begun: list[str] = []

    @contextmanager
    def stop_at_k3(label: str, total: int, unit: str) -> Iterator[object]:
        begun.append(label)
        if label == "k3: evaluate":
            raise KeyboardInterrupt
        yield lambda count: None

    asked = parse_schemes("lossless,k3", "")
    with pytest.raises(KeyboardInterrupt):
        sweep(setting(max_tokens=64), asked, tmp_path, stop_at_k3)
    assert begun == ["lossless: compress", "lossless: evaluate", "k3: compress", "k3: evaluate"]
    assert [p.name for p in tmp_path.iterdir()] == ["lossless.json"]
    begun.clear()

    @contextmanager
    def note(label: str, total: int, unit: str) -> Iterator[object]:
        begun.append(label)
        yield lambda count: None

    found = sweep(setting(max_tokens=64), asked, tmp_path, note)
    assert begun == ["k3: compress", "k3: evaluate"]
    assert found.resumed == 1 and len(found.rows) == 2


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path, forks: forked.Server):
    command = [
        "neuzip", "sweep", CHECKPOINT, "--text", "demo", "--max-tokens", "512",
        "--schemes", "lossless,k5,k3,k0", "--blocks", "", "--yardsticks", "none",
        "--output", tmp_path / "out", "--json",
    ]  # fmt: skip
    started = forks.start(*command, cwd=tmp_path)
    try:
        end = time.monotonic() + 600
        while not (tmp_path / "out" / "k5.json").exists() and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        os.kill(started.pid, signal.SIGKILL)
        started.wait(timeout=60)
    first = (tmp_path / "out" / "lossless.json").read_bytes()
    again = forks.start(*command, cwd=tmp_path)
    stdout, stderr = again.communicate(timeout=600)
    assert again.returncode == 0, stderr
    result = json.loads(stdout)
    assert 2 <= result["resumed"] < 4
    assert [row["scheme"] for row in result["rows"]] == ["lossless", "k5", "k3", "k0"]
    assert (tmp_path / "out" / "lossless.json").read_bytes() == first
    assert not list((tmp_path / "out").glob(".neuzip*"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_tokens": 300}, "tokens"),
        ({"window": 128}, "rule"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
)
def test_results_of_something_else_are_not_taken_for_ours(made, changes, named):
    with pytest.raises(WouldOverwrite, match=f"k0b64.json: was measured with another .*{named}"):
        sweep(setting(**changes), parse_schemes("k3", ""), made[1], stage)


def test_strange_files_are_not_taken_for_results(made, tmp_path: Path):
    (tmp_path / "k3.json").write_text('{"scheme": "k3"}')
    with pytest.raises(FormatError, match="is no result of neuzip sweep"):
        sweep(setting(), parse_schemes("k3", ""), tmp_path, stage)


def test_a_row_that_is_not_asked_for_is_compared_too(made):
    with pytest.raises(WouldOverwrite, match=r"k0b64\.json: was measured with another number of tokens"):
        sweep(setting(max_tokens=300), parse_schemes("k5", ""), made[1], stage)


@pytest.mark.slow
def test_overwrite_leaves_no_row_of_something_else(tmp_path: Path):
    sweep(setting(max_tokens=64), parse_schemes("k3,k0", ""), tmp_path, stage)
    (tmp_path / "mine.json").write_text("{}")
    found = sweep(setting(max_tokens=65), parse_schemes("k3", ""), tmp_path, stage, overwrite=True)
    assert found.resumed == 0
    assert names_in(tmp_path) == {"k3.json", "mine.json", "sweep.svg", "sweep.png"}


@pytest.mark.parametrize("what", ["text", "checkpoint"])
def test_a_sweep_depends_on_its_text_and_checkpoint(what: str, tmp_path: Path):
    ours, theirs = setting(), setting()
    if what == "text":
        content = ours.text.content.replace("the", "teh")
        theirs = replace(ours, text=Text("demo", (Document("", content),)))
        ours = replace(ours, text=Text("demo", (Document("", ours.text.content),)))
    else:
        shutil.copytree(CHECKPOINT, tmp_path / "copy")
        (tmp_path / "copy" / "README.md").write_text("of another state of training")
        theirs = replace(ours, src=tmp_path / "copy")
    values = [run._conditions(one, "cpu")["rounded"] for one in (ours, theirs)]
    assert fingerprint.differing(*values) == [what]


# Quantised weights


@pytest.mark.slow
def test_quantized_rows_have_the_bits_that_are_wanted_and_calibrate_once(tmp_path: Path):
    """One calibration serves all rows; with another one they are measured again, and no other row is."""
    begun: list[str] = []

    @contextmanager
    def note(label: str, total: int, unit: str) -> Iterator[object]:
        begun.append(label)
        yield lambda count: None

    whole = with_calibration(setting(), "demo", "auto")
    assert whole.calibration is not None and whole.max_tokens == TOKENS
    calibrated = replace(whole, calibration=replace(whole.calibration, ids=whole.calibration.ids[:1025]))
    asked = parse_schemes("k1,bits5,bits0.1", "")
    found = sweep(calibrated, asked, tmp_path, note)
    assert sum("gradients" in label for label in begun) == 1
    by_label = {row.scheme: row for row in found.rows}
    quantized, rounded = by_label["bits5"], by_label["k1"]
    assert quantized.kind == "quantized" and quantized.bits_per_weight == pytest.approx(5, rel=0.02)
    assert quantized.bits_per_weight <= rounded.bits_per_weight
    assert quantized.comparison.kld.mean.value < rounded.comparison.kld.mean.value
    (failure,) = found.failed
    assert failure.scheme == "bits0.1" and "at least" in failure.reason
    nearest = with_calibration(setting(), "demo", "none")
    assert nearest.calibration is None
    with pytest.raises(WouldOverwrite, match=r"bits0\.1\.failed: was measured with another calibration"):
        sweep(nearest, asked, tmp_path, stage)


def test_what_is_measured_does_not_calibrate(tmp_path: Path):
    text = tmp_path / "a.txt"
    text.write_text(" ".join(f"the word {i}" for i in range(1200)))
    given = replace(setting(), text=read_text(str(text)), max_tokens=600)
    divided = with_calibration(given, str(text), "auto")
    assert divided.max_tokens == 600 and divided.calibration is not None
    ids = run.read_tokens(CHECKPOINT, given.text, None, 10**6).text
    assert torch.equal(divided.calibration.ids, ids[601:][: len(divided.calibration.ids)])
    assert with_calibration(given, str(text), "demo").max_tokens == 600


@pytest.mark.parametrize("scheme", ["bits", "bits0", "bits17", "bits4.", "bits-1"])
def test_what_is_no_number_of_bits_is_refused(scheme: str):
    with pytest.raises(UsageError, match="there is no scheme"):
        parse_schemes(scheme, "")


def test_a_calibration_without_effect_is_refused():
    assert require_quantized(parse_schemes("k3,bits4", ""), "none")
    assert not require_quantized(parse_schemes("k3", ""), "auto")
    with pytest.raises(UsageError, match=r"`calibration='none'` has no effect"):
        require_quantized(parse_schemes("k3", "", "all"), "none")


# What lies in the folder


def names_in(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


@pytest.mark.slow
def test_files_of_others_stay(tmp_path: Path):
    for name in ("compressed-1", "compressed-model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    sweep(setting(max_tokens=64), parse_schemes("k0", ""), tmp_path, stage)
    assert all((tmp_path / name / "precious").exists() for name in ("compressed-1", "compressed-model"))


def test_what_a_killed_run_left_is_removed(tmp_path: Path):
    (tmp_path / WORK / "k3").mkdir(parents=True)
    with work_folder(tmp_path) as work:
        assert list(work.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_taken_for_the_work_folder(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / WORK).symlink_to(tmp_path / "mine")
    with pytest.raises(NeuzipError, match="cannot be written"), work_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "mine" / "precious").exists()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_someone_else_is_not_overwritten(made, tmp_path: Path, name: str):
    (tmp_path / name).write_text("mine")
    with pytest.raises(WouldOverwrite, match=f"{name}: exists already"):
        sweep(setting(), parse_schemes(SCHEMES, "", YARDSTICK), tmp_path, stage)
    assert names_in(tmp_path) == {name}
    shutil.copy(made[1] / "k3.json", tmp_path)  # a result: so the picture is that of a sweep
    sweep(setting(), parse_schemes("k3", ""), tmp_path, stage)
    assert (tmp_path / name).read_bytes() != b"mine"


def test_two_sweeps_do_not_share_a_folder(neuzip: Speak, tmp_path: Path):
    with work_folder(tmp_path) as work:
        (work / "k3").mkdir()
        said = neuzip("sweep", CHECKPOINT, "--text", "demo", "--schemes", "k0", "--output", tmp_path)
        assert said.exit_code == 1
        assert f"--output {tmp_path}: another sweep is writing there" in said.stderr
        assert (work / "k3").exists()


@pytest.mark.parametrize(("place", "code"), [("file", 2), ("file/below", 1), ("/proc/sweep", 1)])
def test_a_folder_that_cannot_be_is_told_first(neuzip: Speak, tmp_path: Path, place: str, code: int):
    (tmp_path / "file").write_text("mine")
    said = neuzip("sweep", tmp_path / "missing", "--text", "demo", "--output", tmp_path / place)
    assert said.exit_code == code
    assert "missing" not in said.stderr and place in said.stderr
    assert (tmp_path / "file").read_text() == "mine"


# Schemes that break the model


def broken_at(monkeypatch: pytest.MonkeyPatch, *labels: str) -> None:
    """Have some compressed models, and the original where "" is named, answer with NaN."""

    def load(path: Path, *arguments: Any, **options: Any) -> Any:
        model = load_model(path, *arguments, **options)
        if (path.name if path != CHECKPOINT else "") in labels:
            with torch.no_grad():
                model.get_parameter("model.norm.weight").fill_(math.nan)
        return model

    monkeypatch.setattr(baseline, "load_model", load)


@pytest.mark.slow
def test_a_scheme_that_breaks_the_model_is_noted(
    made, neuzip: Speak, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    broken_at(monkeypatch, "k1")
    asked = parse_schemes("k1,k3", "")
    found = sweep(setting(), asked, tmp_path, stage)
    assert [row.scheme for row in found.rows] == ["k3"]
    assert found.rows[0].comparison == made[0].rows[1].comparison  # nothing is left of the one before
    (failure,) = found.failed
    assert failure.scheme == "k1" and re.search("tokens is nan", failure.reason)
    assert names_in(tmp_path) == {"k1.failed", "k3.json", "sweep.svg", "sweep.png"}
    again = sweep(setting(), asked, tmp_path, stage)
    assert again.failed == found.failed and again.resumed == 2
    arguments = ("sweep", CHECKPOINT, "--text", "demo", "--max-tokens", TOKENS, "--schemes", "k1,k3",
                 "--blocks", "", "--yardsticks", "none", "--device", "cpu", "--output", tmp_path)  # fmt: skip
    said = neuzip(*arguments, "--json")
    assert said.exit_code == 0 and "warning: k1 has no results: " in said.stderr
    assert said.json["failed"] == [{"scheme": "k1", "reason": failure.reason}]
    broken_at(monkeypatch)
    mended = sweep(setting(), parse_schemes("k1", ""), tmp_path, stage, overwrite=True)
    assert not mended.failed and names_in(tmp_path) >= {"k1.json"} and not (tmp_path / "k1.failed").exists()


@pytest.mark.slow
def test_a_sweep_of_which_nothing_is_left_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken_at(monkeypatch, "k0")
    with pytest.raises(NeuzipError, match=r"no scheme has results: k0: .*is nan"):
        sweep(setting(max_tokens=64), parse_schemes("k0", ""), tmp_path, stage)
    assert names_in(tmp_path) == {"k0.failed"}


@pytest.mark.slow
def test_an_original_that_is_broken_is_no_fault_of_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken_at(monkeypatch, "", "k0")
    with pytest.raises(NeuzipError, match="checkpoint: the loss of"):
        sweep(setting(max_tokens=64), parse_schemes("k0", ""), tmp_path, stage)
    assert names_in(tmp_path) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["dense", "packed", "ans"])
def test_on_a_gpu_lossless_is_the_same_to_the_last_bit(residency):
    asked = parse_schemes("lossless,k1,bits5", "", "q4_0")
    found = sweep(setting(device="cuda", residency=residency), asked, None, stage)
    lossless, rounded, quantized, yardstick = found.rows
    assert max(quantized.comparison.kld.mean.value, yardstick.comparison.kld.mean.value) < 0.1
    assert lossless.comparison.identical or residency == "packed"  # whose sums are in another order
    assert lossless.comparison.kld.mean.value < 1e-3 < rounded.comparison.kld.mean.value
    assert lossless.decode_bytes_per_second > 0 and found.device != "cpu"


# The picture


def test_picture_names_every_number_of_bits(made):
    figure = draw(made[0], "demo")
    for axes in figure.axes:
        assert {"lossless", "k3", "k0", "q4_0"} <= {text.get_text() for text in axes.texts}
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {"rounded", "blocks of 64", "yardsticks"}


def test_pictures_are_files_of_their_kind(made):
    out = made[1]
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (out / "sweep.svg").read_bytes()[:1000]


def test_the_label_of_a_scheme_can_be_asked_for():
    for scheme in (SweepScheme(), SweepScheme(0), SweepScheme(6, 8), SweepScheme(bits=4.25)):
        assert parse_schemes(scheme.label, "") == [scheme]


# The command


@pytest.mark.slow
def test_command_shows_all_of_it(neuzip: Speak, made):
    arguments = ("sweep", CHECKPOINT, "--text", "demo", "--max-tokens", TOKENS, "--schemes", SCHEMES,
                 "--blocks", "", "--yardsticks", YARDSTICK, "--device", "cpu",
                 "--output", made[1])  # fmt: skip
    said = neuzip(*arguments)
    assert said.exit_code == 0, said.stderr
    header, _, original, lossless, *_ = said.stdout.splitlines()
    assert re.split(r"  +", header.strip()) == [name for name in COLUMNS if name not in ("", "peak")]
    assert "peak" not in said.stdout, "on a CPU that is the process's, of all schemes"
    assert original.split()[0] == "original" and "100.00 %" in original
    assert "0, all bits" in lossless and lossless.rstrip().endswith("*")
    assert "4 of 4 schemes were measured already" in said.stderr
    data = neuzip(*arguments, "--json").json
    assert [row["scheme"] for row in data["rows"]] == LABELS
    assert data["front"] == list(made[0].front)
    assert data["savings"][0]["yardstick"] == YARDSTICK and data["savings"][0]["quantized_bits"] is None
    lines = neuzip(*arguments, "--quiet").stdout.splitlines()
    assert [line.split()[0] for line in lines] == LABELS


@pytest.mark.slow
def test_without_a_folder_nothing_is_kept(neuzip: Speak, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    said = neuzip(
        "sweep",
        CHECKPOINT,
        "--text",
        "demo",
        "--max-tokens",
        64,
        "--schemes",
        "k0",
        "--blocks",
        "",
        "--yardsticks",
        "none",
    )
    assert said.exit_code == 0, said.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", ["missing", "compressed"])
def test_what_cannot_be_swept_is_told(neuzip: Speak, tmp_path: Path, source: str):
    compress(CHECKPOINT, tmp_path / "compressed")
    said = neuzip(
        "sweep", tmp_path / source, "--text", "demo", "--schemes", "k0", "--output", tmp_path / "out"
    )
    assert said.exit_code == 1
    assert said.stderr.startswith("error: ") and "hint: " in said.stderr
    assert not list(tmp_path.glob("out/*"))
