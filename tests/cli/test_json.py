"""`--json`: one schema for all commands, described in neuzip.cli.schema."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import json_schema
import pytest

from neuzip.cli.commands import VERBS
from neuzip.cli.schema import COMMANDS, ENVELOPE, OBJECTS
from neuzip.cli.schema.table import Key, keys_of
from neuzip.compress import compress, machine, reports
from neuzip.compress.export import ExportedTensor
from neuzip.compress.tensor_checks import TensorVerdict
from neuzip.eval import attention
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.layers import distances, layer_report, left_out, removal
from neuzip.eval.layers import drops as layer_drops
from neuzip.eval.measures import difference, divergence, estimates, histograms, perplexity
from neuzip.eval.measures.conventions import Convention
from neuzip.eval.plans import plan_trials
from neuzip.eval.report import distribution, rows, sweep_results, tensors
from neuzip.eval.report import evaluation as report
from neuzip.formats.hub import push as hub
from neuzip.formats.records import Loss
from neuzip.kernels.attention.similarity import Similarity
from neuzip.runtime.activations import Activations
from neuzip.runtime.decode import benchmark as speed
from neuzip.runtime.hf.sparsity import Sparsity
from neuzip.train.recovery import ternary

MADE_OF = {
    "AttentionForm": attention.QuantizedAttention, "AttentionLayer": attention.AttentionLayer,
    "Activations": Activations,
    "Closeness": attention.Closeness, "Comparison": divergence.Comparison, "Convention": Convention,
    "CompressedTensor": reports.TensorReport, "Distances": distances.Distances,
    "Distribution": distribution.Distribution, "Divergence": divergence.KLDivergence,
    "Drop": layer_drops.Drop,
    "Drops": layer_drops.Drops, "Entropies": histograms.Entropies, "Estimate": estimates.Estimate,
    "EvaluatedModel": perplexity.MeasuredModel, "ExportedTensor": ExportedTensor, "Gpu": machine.InstalledGpu,
    "LayerImportance": layer_report.LayerReport,
    "Loss": Loss, "LossDifference": perplexity.ModelDifference, "PeakMemory": perplexity.PeakMemory,
    "Pushed": hub.Pushed, "Recipe": ternary.TernaryRecipe,
    "Removal": left_out.LayerRemoval, "ReportRow": rows.ReportRow, "ReportTensor": tensors.TensorRow,
    "Score": perplexity.ModelScore, "Side": difference.TensorSide, "Similarity": Similarity,
    "Sparsity": Sparsity, "SpeedRow": speed.Speed, "SweepPoint": sweep_results.SweepPoint,
    "Trial": plan_trials.Trial,
}  # fmt: skip
"""Objects that are printed field by field. Those of tasks need the harness: see test_harness.py."""

WITH_MORE = {
    "Calibration": (attention.AttentionCalibration, {"bits"}, set()),
    "InspectedTensor": (histograms.TensorFigures, {"original_bytes", "base"}, {"label", "nbytes"}),
    "RestoredTensor": (TensorVerdict, {"original_bytes"}, {"nbytes"}),
    "Report": (
        report.EvaluationReport, {"schema", "bits_per_weight", "histograms"}, {"inspection"},
    ),
    "Pruned": (removal.Pruned, {"kept"}, {"remaining"}),
    "TensorDifference": (difference.TensorDifference, set(), {"label"}),
}  # fmt: skip
"""Objects with keys beside those of their fields, and without some of these."""


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", MADE_OF)
def test_an_object_has_the_keys_that_are_printed(name: str) -> None:
    assert OBJECTS[name].keys() == fields(MADE_OF[name])


@pytest.mark.parametrize("name", WITH_MORE)
def test_an_object_with_more_has_the_keys_that_are_printed(name: str) -> None:
    kind, more, less = WITH_MORE[name]
    assert OBJECTS[name].keys() == (fields(kind) | more) - less


def test_every_command_is_described_and_every_type_is_known() -> None:
    assert COMMANDS.keys() == set(VERBS)
    used = {"Error"}
    for keys in (*COMMANDS.values(), *OBJECTS.values(), ENVELOPE):
        for key in keys.values():
            words = set(re.findall(r"\w+", key.type)) - {"list", "map", "of", "or", "null"}
            assert words <= OBJECTS.keys() | json_schema.PLAIN.keys(), key
            used |= words
            assert key.meaning[0] != " " and not key.meaning.endswith(".")
    assert OBJECTS.keys() <= used, "objects that nothing holds"


def test_a_table_of_keys_is_read_strictly() -> None:
    assert keys_of("a : list of (integer or null) [s] - x\n | y") == {
        "a": Key("list of (integer or null)", "s", "x y")
    }
    for wrong in ("a : integer", "a - b", "a : integer - x\na : integer - y"):
        with pytest.raises(ValueError, match="no line of a table"):
            keys_of(wrong)


def test_the_checker_finds_what_is_missing_unknown_or_of_another_type() -> None:
    right = {"schema": 2, "neuzip": "0", "command": "diff", "a": "x", "b": "y", "identical": True,
             "compared_bytes": 3, "totals": {"tensors": 0}, "tensors": []}  # fmt: skip
    assert json_schema.problems(right) == []
    for change, said in (
        ({"compared_bytes": None}, "is null"), ({"compared_bytes": True}, "is no integer"),
        ({"more": 1}, "is not described"), ({"tensors": [{}]}, "is missing"), ({"tensors": 3}, "is no list"),
        ({"totals": {"x": "y"}}, "is no integer"), ({"command": "bake"}, "no such command"),
    ):  # fmt: skip
        assert said in "\n".join(json_schema.problems(right | change))
    assert "missing" in "".join(json_schema.problems({k: v for k, v in right.items() if k != "b"}))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in checkpoint, compressed without loss."""
    path = tmp_path_factory.mktemp("json") / "demo.nz"
    compress(CHECKPOINT, path)
    return path


def test_commands_print_what_is_described(packed: Path, tmp_path: Path, neuzip) -> None:
    base, delta = tmp_path / "base", tmp_path / "delta"
    shutil.copytree(CHECKPOINT, base)
    runs = {
        "compress": (CHECKPOINT, delta, "--base", base),
        "apply": (delta, tmp_path / "restored", "--base", base),
        "decompress": (packed, tmp_path / "plain"),
        "verify": (packed, "--original", CHECKPOINT),
        "inspect": (packed, "--tensor", "*norm*"),
        "diff": (packed, CHECKPOINT),
        "push": (packed, "me/model", "--dry-run"),
    }
    for command, arguments in runs.items():
        document = json.loads(neuzip(command, *arguments, "--json").stdout)
        assert "error" not in document and json_schema.problems(document) == [], command
        assert document["command"] == command and list(document)[:3] == ["schema", "neuzip", "command"]
    document = json.loads(neuzip("inspect", delta, "--json").stdout)
    assert json_schema.problems(document) == [] and document["delta"] is True


@pytest.mark.parametrize("options", [(), ("--mantissa-bits", 3)])
def test_a_dry_run_has_the_keys_of_a_run_and_its_ratio(options: tuple[object, ...], tmp_path, neuzip) -> None:
    planned = neuzip("compress", CHECKPOINT, tmp_path / "a", *options, "--dry-run", "--json").json
    done = neuzip("compress", CHECKPOINT, tmp_path / "a", *options, "--json").json
    assert list(planned) == list(done)
    assert [list(t) for t in planned["tensors"]] == [list(t) for t in done["tensors"]]
    assert (planned["dry_run"], done["dry_run"]) == (True, False)
    for key in ("src", "dst", "original_bytes", "weight_bytes", "weights", "lossless"):
        assert planned[key] == done[key], key
    assert done["ratio"] == done["stored_weight_bytes"] / done["weight_bytes"]
    assert done["bits_per_weight"] == 8 * done["stored_weight_bytes"] / done["weights"]
    for key in ("ratio", "bits_per_weight", "stored_bytes", "stored_weight_bytes"):
        assert planned[key] == pytest.approx(done[key], rel=0.01), key


def test_inspect_and_compress_tell_one_ratio(packed: Path, tmp_path: Path, neuzip) -> None:
    compressed = neuzip("compress", CHECKPOINT, tmp_path / "a", "--json").json
    before, after = (neuzip("inspect", path, "--json").json for path in (CHECKPOINT, packed))
    for key in ("weight_bytes", "weights"):
        assert before[key] == after[key] == compressed[key], key
    for key in ("stored_weight_bytes", "ratio", "bits_per_weight"):
        assert after[key] == compressed[key]
        assert before[key] == pytest.approx(compressed[key], rel=0.005)
    share = f"{100 * compressed['ratio']:.2f} %"
    (line,) = [x for x in neuzip("inspect", packed).stdout.splitlines() if x.startswith("weight files: ")]
    assert line.split("  ")[-1].strip() == share
    part = neuzip("inspect", packed, "--tensor", "*norm*", "--json").json
    assert part["ratio"] is part["weight_bytes"] is None and part["totals"]["tensors"] == 13


@pytest.mark.parametrize(
    ("arguments", "kind", "code", "command"),
    [
        (("verify", "no-such-thing"), None, 1, "verify"),
        (("compress", "a", "b", "--mantissa-bit", 3), "UsageError", 2, "compress"),
        (("compres", "a", "b"), "UsageError", 2, "compres"),
        (("compress", "a", "b", "--quiet"), "UsageError", 2, "compress"),
    ],
)
def test_an_error_under_json_is_json_too(arguments, kind, code, command, neuzip) -> None:
    said = neuzip(*arguments, "--json")
    document = json.loads(said.stdout)
    assert json_schema.problems(document) == []
    error = document["error"]
    assert (said.exit_code, error["exit_code"], document["command"]) == (code, code, command)
    assert kind in (None, error["kind"])
    told = f"error: {error['message']}\n" + (f"hint: {error['hint']}\n" if error["hint"] else "")
    assert said.stderr == told
    assert neuzip(*arguments).stdout == ""


def test_an_answer_is_not_followed_by_a_second_object(neuzip, monkeypatch: pytest.MonkeyPatch) -> None:
    from neuzip.cli.commands import diff
    from neuzip.errors import NeuzipError

    def fail(status: int) -> None:
        raise NeuzipError("it broke afterwards")

    monkeypatch.setattr(diff.typer, "Exit", fail)
    said = neuzip("diff", CHECKPOINT, CHECKPOINT, "--json")
    assert json.loads(said.stdout)["identical"] is True


@pytest.mark.slow
def test_an_error_that_finds_no_room_on_stdout_is_told_on_stderr() -> None:
    program = "from neuzip.cli import run; raise SystemExit(run(['verify', 'no-such-thing', '--json']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no-such-thing: ") and "Traceback" not in done.stderr


@pytest.mark.slow
def test_push_takes_what_eval_prints(packed: Path, tmp_path: Path, neuzip) -> None:
    options = ("--original", CHECKPOINT, "--text", "demo", "--conventions", "token", "--max-tokens", 600)
    page = tmp_path / "page.json"
    printed = neuzip("eval", packed, *options, "--json")
    assert printed.exit_code == 0
    document = printed.json
    (tmp_path / "printed.json").write_text(printed.stdout)
    neuzip("eval", packed, *options, "--report", page)
    written = json.loads(page.read_text())
    assert document["report"].keys() == written.keys()
    for key in ("perplexity", "divergence", "blocks", "setting", "stored_bytes", "identical"):
        assert document["report"][key] == written[key], key
    cards = [
        neuzip("push", packed, "me/model", "--dry-run", "--evaluation", file, "--json").json["card"]
        for file in (tmp_path / "printed.json", page)
    ]
    tables = [[line for line in card.splitlines() if line.startswith("| ")] for card in cards]
    assert tables[0] == tables[1] and any("mean KLD" in line for line in tables[0])
