"""lm-evaluation-harness on checkpoints that neuzip loads, through the harness itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from neuzip.compress import compress
from neuzip.compress.rules import rules_of_options
from neuzip.errors import NeuzipError, UsageError
from neuzip.eval.demo import CHECKPOINT, split_topics

HARNESS = "neuzip.eval.harness"

TEXT = "\n\n".join(split_topics()[1])
"""The held-out documents of the demo checkpoint as one text."""


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, HARNESS, raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(NeuzipError, match="lm_eval is not installed") as caught:
        import_module(HARNESS)
    assert "pip install 'lm-eval[hf]" in caught.value.hint


@pytest.fixture(scope="module")
def harness(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module under test; data sets are prepared in a folder of these tests."""
    pytest.importorskip("lm_eval", reason="pip install 'lm-eval[hf]>=0.4.13'")
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    yield import_module(HARNESS)
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint without mantissas."""
    dst = tmp_path_factory.mktemp("rounded") / "k0.nz"
    compress(CHECKPOINT, dst, rules_of_options(0, "none"))
    return dst


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """YAML files of tasks, by what they ask for: one of several choices, whole documents, generated text."""
    folder = tmp_path_factory.mktemp("tasks")
    text = TEXT
    words = text.split()
    choices = [
        {"q": text[at : at + 120], "choices": words[at % 500 : at % 500 + 4], "gold": at % 4}
        for at in range(0, 40 * 211, 211)
    ]
    pages = [{"page": text[at : at + size]} for at, size in ((0, 40), (500, 900), (3000, 2500))]
    for name, rows in (("choices", choices), ("pages", pages)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own: dict[str, dict[str, Any]] = {
        "choice": {
            "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "choices",
            "doc_to_target": "gold", "metric_list": _metrics(acc="mean", acc_norm="mean"),
        },
        "rolling": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{page}}",
            "metric_list": _metrics(word_perplexity="weighted_perplexity", bits_per_byte="bits_per_byte"),
        },
        "generation": {
            "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{choices[gold]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
            "metric_list": _metrics(exact_match="mean"),
        },
    }  # fmt: skip
    for name, task in own.items():
        data = folder / ("pages.jsonl" if name == "rolling" else "choices.jsonl")
        task |= {
            "task": f"tiny_{name}", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(data)}}, "metadata": {"version": 1.0},
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML
    return {name: str(folder / f"{name}.yaml") for name in own}


def _metrics(**aggregations: str) -> list[dict[str, Any]]:
    return [
        {"metric": metric, "aggregation": aggregation, "higher_is_better": aggregation == "mean"}
        for metric, aggregation in aggregations.items()
    ]


Make = Callable[..., Any]


@pytest.fixture(scope="module")
def make(harness: Any) -> Make:
    """Models of the demo checkpoint, as the backend `neuzip` or as `hf`, fp32 on the CPU."""

    def made(called: str = "neuzip", **options: Any) -> Any:
        from lm_eval.api.registry import get_model

        options = {"pretrained": str(CHECKPOINT), "device": "cpu", "dtype": "float32", **options}
        return get_model(called)(**options)

    return made


def requests(texts: list[tuple[str, str]]) -> list[Any]:
    """Requests for the log-likelihood of the second text after the first."""
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(texts)
    ]


def pairs() -> list[tuple[str, str]]:
    """Contexts that are short, shared, empty and longer than the model's 256 positions."""
    text = TEXT
    found = [(text[at : at + 60 + at % 90], text[at + 400 : at + 404 + at % 30]) for at in range(0, 2000, 97)]
    shared = [(text[:100], word) for word in (" return", " None", " def f(x):", "\n    self.x = 1")]
    return [*found, *shared, *shared[:1], ("", text[:50]), (text[:4000], text[4000:4100])]


def test_log_likelihoods_are_those_of_the_backend_hf(make: Make) -> None:
    ours = make(batch_size=5).loglikelihood(requests(pairs()), disable_tqdm=True)
    theirs = make("hf", batch_size=5).loglikelihood(requests(pairs()), disable_tqdm=True)
    assert len(ours) == len(pairs())
    for (value, greedy), (expected, expected_greedy) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(expected, abs=2e-3, rel=1e-5)
        assert greedy == expected_greedy
    assert len({round(value, 3) for value, _ in ours}) > len(ours) // 2


def test_greedy_continuations_are_known_as_such(make: Make) -> None:
    """The continuation that the model itself would write is greedy, another one is not."""
    lm = make()
    context = lm.tok_encode(TEXT[:300])
    ids = torch.tensor([context])
    for _ in range(5):
        ids = torch.cat([ids, lm.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    written = ids[0, len(context) :].tolist()
    other = [*written[:-1], (written[-1] + 1) % 1000]
    asked = [(None, context, written), (None, context, other), (None, context, written[:2])]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(asked)] == [True, False, True]


@pytest.mark.parametrize("batch_size", [1, 7, "auto"])
def test_answers_do_not_depend_on_the_batch(make: Make, batch_size: int | str) -> None:
    one = make(batch_size=3).loglikelihood(requests(pairs()), disable_tqdm=True)
    other = make(batch_size=batch_size).loglikelihood(requests(pairs()), disable_tqdm=True)
    assert [value for value, _ in other] == pytest.approx([value for value, _ in one], rel=1e-5)


def test_progress_is_told_of_every_request_once(make: Make) -> None:
    told: list[int] = []
    make(batch_size=4, on_requests=told.append).loglikelihood(requests(pairs()), disable_tqdm=True)
    assert sum(told) == len(pairs()) and len(told) > 1


@pytest.mark.parametrize("name", ["choice", "rolling", "generation"])
def test_tasks_give_what_the_backend_hf_gives(
    harness: Any, make: Make, tasks: dict[str, str], name: str
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = harness.evaluate_tasks([CHECKPOINT], [tasks[name]], device="cpu")
    manager = TaskManager(include_defaults=False)
    theirs = simple_evaluate(make("hf"), tasks=[tasks[name]], task_manager=manager, bootstrap_iters=0)
    expected = theirs["results"][f"tiny_{name}"]
    assert found.harness and found.scores
    for score in found.scores:
        assert score.after.value == pytest.approx(expected[f"{score.metric},none"], rel=1e-5)
        assert (score.before, score.difference, score.changed) == (None, None, None)
    keys = [key.partition(",")[0] for key in expected if key.endswith(",none")]
    assert {s.metric for s in found.scores} == {key for key in keys if not key.endswith("_stderr")}


def test_before_and_after_are_paired_by_document(harness: Any, rounded: Path, tasks: dict[str, str]) -> None:
    found = harness.evaluate_tasks([CHECKPOINT, rounded], [tasks["choice"], tasks["rolling"]], device="cpu")
    by_name = {(s.task, s.metric): s for s in found.scores}
    acc = by_name["tiny_choice", "acc"]
    assert acc.changed and acc.documents == 40
    assert acc.difference.value == pytest.approx(acc.after.value - acc.before.value)
    # A document's change is -1, 0 or 1, so its variance follows from how many changed.
    variance = (acc.changed - 40 * acc.difference.value**2) / 39
    assert acc.difference.standard_error == pytest.approx(math.sqrt(variance / 40))
    perplexity = by_name["tiny_rolling", "word_perplexity"]  # no mean over documents
    assert perplexity.difference is None and perplexity.before.value != perplexity.after.value
    row = harness.report_rows(found)[0]
    assert row.name == "tiny_choice: acc ↑" and "of 40 documents differ" in row.note


def test_a_lossless_checkpoint_answers_every_document_alike(
    harness: Any, tasks: dict[str, str], tmp_path: Path
) -> None:
    compress(CHECKPOINT, tmp_path / "x")
    found = harness.evaluate_tasks([CHECKPOINT, tmp_path / "x"], list(tasks.values()), device="cpu", limit=8)
    for score in found.scores:
        assert score.after.value == score.before.value
        assert score.changed in (0, None)
        assert score.documents == (3 if score.task == "tiny_rolling" else 8)
    assert "the same for every document" in harness.note_text(found.scores[0])


def test_the_harness_finds_it_by_name_and_takes_its_arguments(harness: Any, tasks: dict[str, str]) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    assert get_model("neuzip") is harness.NeuzipLM
    found = [
        simple_evaluate(
            "neuzip", f"pretrained={CHECKPOINT},dtype=bfloat16,residency={residency}", device="cpu",
            tasks=[tasks["choice"]], task_manager=TaskManager(include_defaults=False), limit=6,
        )
        for residency in ("dense", "packed")
    ]  # fmt: skip
    acc = [results["results"]["tiny_choice"]["acc,none"] for results in found]
    assert acc[0] == acc[1]
    assert found[1]["config"]["model_dtype"] == torch.bfloat16


def test_a_device_map_gives_the_same(make: Make) -> None:
    pytest.importorskip("accelerate")
    asked = requests(pairs()[:6])
    spread = make(device_map="auto").loglikelihood(asked, disable_tqdm=True)
    assert spread == make().loglikelihood(asked, disable_tqdm=True)


def test_entry_point_names_the_class(harness: Any) -> None:
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group="lm_eval.models") if point.name == "neuzip"]
    if not found:
        pytest.skip("installed before there was the entry point: pip install again")
    assert found[0].load() is harness.NeuzipLM


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft": "x", "trust_remote_code": True}, "peft, trust_remote_code cannot be given"),
        ({"backend": "seq2seq"}, "only causal models"),
    ],
)
def test_options_that_do_not_apply_are_refused(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)


def test_figures_that_are_not_finite_end_the_run(make: Make) -> None:
    lm = make()
    lm.model.get_output_embeddings().weight.data[7] = math.nan
    with pytest.raises(NeuzipError, match="log-likelihood of a request is nan"):
        lm.loglikelihood(requests(pairs()[:2]), disable_tqdm=True)


def test_continuations_longer_than_the_model_are_refused(make: Make) -> None:
    with pytest.raises(NeuzipError, match="asks for 300 tokens after 1; the model has room for 256"):
        make()._loglikelihood_tokens([(None, [1], [2] * 300)])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("no.yaml", "--tasks no.yaml: there is no such file"),
        pytest.param("arc_eazy", "--tasks arc_eazy: .* has no such task", marks=pytest.mark.slow),
    ],
)
def test_tasks_that_there_are_not(harness: Any, wanted: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        harness.evaluate_tasks([CHECKPOINT], [wanted], device="cpu")
    if wanted == "arc_eazy":
        assert "arc_easy" in caught.value.hint


def test_tasks_whose_data_are_missing(harness: Any, tasks: dict[str, str], tmp_path: Path) -> None:
    task = json.loads(Path(tasks["choice"]).read_text())
    task["dataset_kwargs"]["data_files"]["test"] = str(tmp_path / "gone.jsonl")
    (tmp_path / "broken.yaml").write_text(json.dumps(task))
    with pytest.raises(NeuzipError, match=r"`tasks='.*broken\.yaml'`: cannot be loaded"):
        harness.evaluate_tasks([CHECKPOINT], [str(tmp_path / "broken.yaml")], device="cpu")


@pytest.mark.slow
def test_the_command_line_of_the_harness_knows_the_backend(
    harness: Any, tasks: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", HARNESS, "run", "--model", "neuzip", "--model_args",
         f"pretrained={CHECKPOINT}", "--device", "cpu", "--tasks", tasks["choice"], "--limit", "4"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|tiny_choice|" in done.stdout
