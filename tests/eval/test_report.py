"""The page of an evaluation: what it counts, what it says in its three forms, and how a browser shows it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from neuzip.compress import compress
from neuzip.compress.rules import rules_of_options
from neuzip.errors import FormatError, NeuzipError, UsageError, WouldOverwrite
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.measures.divergence import Comparison, KLDivergence
from neuzip.eval.measures.estimates import Estimate
from neuzip.eval.report import evaluation as reports
from neuzip.eval.report import page as pages
from neuzip.eval.report import sweep_results
from neuzip.eval.report import text as texts
from neuzip.eval.report.distribution import BINS, HIGHEST, LOWEST
from neuzip.eval.report.distribution import distribution as distribution_of
from neuzip.eval.report.evaluation import EvaluationReport
from neuzip.eval.report.pictures import layer_grid, pictures
from neuzip.eval.report.rows import SPEED, ReportRow
from neuzip.eval.report.sweep_results import SweepPoint
from neuzip.eval.report.tensors import TensorRow, read_tensors

Speak = Callable[..., Any]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with one mantissa bit."""
    dst = tmp_path_factory.mktemp("report") / "k1.nz"
    compress(CHECKPOINT, dst, rules_of_options(1, "none"))
    return dst


@pytest.fixture(scope="module")
def page(rounded: Path) -> EvaluationReport:
    """A report with every section, its figures made up but for those of the tensors."""
    inspection, tensors, _ = read_tensors(rounded, CHECKPOINT)
    divergences = np.random.default_rng(0).lognormal(math.log(0.02), 1.5, 4000)
    schemes = [
        ("lossless", "lossless", 11.0, 0.0), ("k3", "rounded", 7.0, 4e-4), ("k3b32", "rounded", 7.4, 5e-4),
        ("k0", "rounded", 4.0, 0.05), ("q4_0", "yardstick", 4.5, 0.06),
    ]  # fmt: skip
    return EvaluationReport(
        title="k1.nz",
        base="demo",
        command="neuzip eval k1.nz --original demo --text 'a b.txt' --report out.html",
        versions={"neuzip": "1.2.3", "torch": "4.5.6"},
        setting={"text": "a b.txt, 7 documents"},
        perplexity=(
            ReportRow(
                "token-level perplexity", Estimate(29.6861, 1.672), Estimate(28.6883, 1.542), "windows of 256"
            ),
            ReportRow(
                "NLL a token", Estimate(3.3907, 0.0563), Estimate(3.3565, 0.0537), "windows of 256", "nats"
            ),
        ),
        nll_difference=Estimate(0.034215, 0.003749),
        blocks="7 documents",
        divergence=(
            ReportRow("mean KLD", Estimate(0.028409, 0.00028), unit="nats", note="KL(original || this)"),
            ReportRow("same top token", Estimate(86.083, 0.114), unit="%"),
        ),
        distribution=distribution_of([*divergences, 0.0]),
        cost=(ReportRow("weights in memory", Estimate(1.2e9, None), Estimate(2.4e9, None), unit="bytes"),),
        tasks=(ReportRow("arc_easy: acc", Estimate(0.25, 0.09), Estimate(0.26, 0.09), "0-shot"),),
        tensors=tensors,
        inspection=inspection,
        stored_bytes=822_000,
        original_bytes=2_630_000,
        sweep=tuple(
            SweepPoint(name, kind, bits, int(bits * 1e5), Estimate(kld, kld / 50), Estimate(28.0, 0.3))
            for name, kind, bits, kld in schemes
        ),
    )


def test_divergences_are_counted_once_each_where_they_lie() -> None:
    found = distribution_of([0.0, 0.0, 3e-14, -1e-9, 1.5e-3, 1.2, 120.0, math.nan, math.inf])
    assert (found.tokens, found.zero, found.below, found.above, found.not_finite) == (9, 2, 2, 1, 2)
    assert sum(found.counts) == 2
    at = [i for i, count in enumerate(found.counts) if count]
    lower = [10 ** (LOWEST + i / BINS) for i in at]
    assert lower == pytest.approx([1e-3, 1.0])
    assert found.largest == 120.0
    assert found.quantiles["median"] == 3e-14


@pytest.mark.parametrize("seed", range(3))
def test_counts_add_up_and_quantiles_are_those_of_the_tokens(seed: int) -> None:
    values = np.random.default_rng(seed).lognormal(-6, 6, 5000).astype(np.float32)
    found = distribution_of(values)
    assert found.zero + found.below + sum(found.counts) + found.above + found.not_finite == 5000
    for name, share in (("median", 0.5), ("99.9 %", 0.999)):
        assert found.quantiles[name] == pytest.approx(np.quantile(values.astype(np.float64), share))
    by_hand = np.histogram(values, 10.0 ** np.arange(LOWEST, HIGHEST + 1))[0]
    assert [sum(found.counts[i : i + BINS]) for i in range(0, len(found.counts), BINS)] == [*by_hand]


def test_no_divergences_and_none_that_are_finite() -> None:
    assert distribution_of([]).tokens == 0
    assert math.isnan(distribution_of([math.nan]).largest)


def test_front_is_what_no_other_beats() -> None:
    rng = np.random.default_rng(1)
    points = [
        SweepPoint(str(i), "rounded", float(bits), 0, Estimate(float(kld), None), Estimate(1.0, None))
        for i, (bits, kld) in enumerate(zip(rng.integers(3, 9, 40), rng.integers(0, 9, 40), strict=True))
    ]
    front = sweep_results.pareto(points)

    def beaten(p: SweepPoint) -> bool:
        return any(
            q.bits_per_weight <= p.bits_per_weight
            and q.kld.value <= p.kld.value
            and (q.bits_per_weight, q.kld.value) != (p.bits_per_weight, p.kld.value)
            for q in points
        )

    expected = {(p.bits_per_weight, p.kld.value) for p in points if not beaten(p)}
    assert {(p.bits_per_weight, p.kld.value) for p in front} == expected
    assert len(front) == len(expected)


def test_tensors_have_a_kind_and_a_layer_whatever_the_model_calls_them() -> None:
    def row(label: str, error: float | None) -> TensorRow:
        return TensorRow(label, "BF16", (2, 2), "k=1", 8, 4, relative_l2=error)

    grid = layer_grid(
        [
            row("model.layers.0.self_attn.q_proj.weight", 0.1),
            row("model.layers.11.self_attn.q_proj.weight", 0.2),
            row("transformer.h.3.attn.c_attn.weight", 0.3),
            row("model.layers.1.mlp.experts.0.w1.weight", 0.1),
            row("model.layers.1.mlp.experts.7.w1.weight", 0.4),
            row("model.layers.0.input_layernorm.weight", 0.0),
            row("lm_head.weight", 0.5),
            row("model.norm.bias", None),
        ]
    )
    assert grid == {
        "self_attn.q_proj": {0: 0.1, 11: 0.2},
        "attn.c_attn": {3: 0.3},
        "mlp.experts.w1": {1: 0.4},
        "lm_head": {None: 0.5},
    }


def test_errors_of_tensors_are_those_of_their_weights(rounded: Path) -> None:
    from neuzip.runtime.read import load_state_dict

    inspection, rows, _ = read_tensors(rounded, CHECKPOINT)
    before, after = dict(load_state_dict(CHECKPOINT)), dict(load_state_dict(rounded))
    assert {t.label for t in rows} == before.keys()
    for t in rows:
        x, y = before[t.label].double(), after[t.label].double()
        assert t.relative_l2 == pytest.approx(float((y - x).norm() / x.norm()), rel=1e-9)
        assert t.identical is bool((x == y).all())
    assert any(t.identical is False for t in rows)
    _, alone, _ = read_tensors(rounded, None)
    assert all(t.relative_l2 is None for t in alone)
    assert [t.rms_relative for t in alone] == [t.rms_relative for t in rows]
    assert inspection.compressed


def test_a_lossless_container_is_exact_with_and_without_the_original(tmp_path: Path) -> None:
    compress(CHECKPOINT, tmp_path / "x")
    for base in (CHECKPOINT, None):
        _, rows, _ = read_tensors(tmp_path / "x", base)
        assert EvaluationReport("x", "", {}, tensors=rows).exact
    plain = read_tensors(CHECKPOINT, None)[1]
    assert not EvaluationReport("x", "", {}, tensors=plain).exact


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (0.5, 0.1, "Perplexity changes by +65 ± 16 %. That is 5.0 standard errors of the paired difference."),
        (-0.5, 0.1, "Perplexity changes by -39.3 ± 6.1 %. That is 5.0 standard errors of"),
        (0.0039, 0.0015, "Perplexity changes by +0.39 ± 0.15 %. That is 2.6 standard errors"),
        (0.1, 0.1, "Perplexity changes by +11 ± 11 %. That is 1.0 standard errors: this text does not tell"),
        (0.1, None, "Perplexity changes by +10.517 %. The text is too short for a standard error."),
    ],
)
def test_verdict_tells_the_effect_first(change: float, error: float | None, words: str) -> None:
    assert words in pages.verdict(EvaluationReport("x", "", {}, nll_difference=Estimate(change, error)))


@pytest.mark.parametrize("error", [0.0, math.nan])
def test_verdict_divides_by_no_error_that_is_none(error: float) -> None:
    verdict = pages.verdict(EvaluationReport("x", "", {}, nll_difference=Estimate(0.5, error)))
    assert verdict == "Perplexity changes by +64.872 %."


def test_tensors_that_only_the_original_has_are_named(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    original = tmp_path / "original"
    shutil.copytree(CHECKPOINT, original)
    (original / "model.safetensors").chmod(0o644)
    tensors = load_file(CHECKPOINT / "model.safetensors")
    save_file({**tensors, "extra_<b>": torch.ones(4)}, original / "model.safetensors")
    inspection, rows, missing = read_tensors(CHECKPOINT, original)
    assert missing == ("extra_<b>",)
    assert all(row.identical for row in rows)
    report = EvaluationReport("x", "", {}, base="o", tensors=rows, missing=missing, inspection=inspection)
    assert not report.exact
    assert pages.verdict(report).startswith("1 tensor of the original is missing.")
    for kind in pages.KINDS:
        text = pages.render(report, kind).decode()
        assert "byte by byte" not in text
        assert "extra_<b>" in unescape(text)
    assert read_tensors(original, CHECKPOINT)[2] == ()


def test_equal_tensors_are_not_all_there_is_to_a_model() -> None:
    tensor = TensorRow("a", "BF16", (1,), "k=1", 2, 1, identical=True, relative_l2=0.0)
    report = EvaluationReport("x", "", {}, tensors=(tensor,), base="o", nll_difference=Estimate(0.5, 0.1))
    assert "but the measured numbers differ" in pages.verdict(report)
    assert "That is 5.0" in pages.verdict(report)
    alone = dataclasses.replace(report, nll_difference=None)
    same = dataclasses.replace(report, identical=True)
    for kind in (".md", ".html"):
        assert b"byte by byte" not in pages.render(report, kind)
        for other in (alone, same):
            assert b"byte for byte" in pages.render(other, kind)


def test_nothing_is_claimed_where_nothing_was_measured() -> None:
    assert pages.verdict(EvaluationReport("x", "", {})) == ""
    text = pages.render(EvaluationReport("x", "neuzip eval x", {}), ".md").decode()
    assert "KLD" not in text and "byte by byte" not in text
    for kind in pages.KINDS:
        assert b"neuzip eval x" in pages.render(EvaluationReport("x", "neuzip eval x", {}), kind)


class _Words(HTMLParser):
    """The text of a page without its pictures, styles and scripts, and what its elements refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self._skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in ("svg", "style", "script")
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            local = (value or "").startswith("#")
            if name in ("src", "href", "xlink:href", "srcset", "action", "data") and not local:
                self.outside.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in ("svg", "style", "script")

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(html: bytes) -> _Words:
    """A page's words."""
    found = _Words()
    found.feed(html.decode())
    return found


@pytest.mark.slow
def test_all_forms_have_the_same_figures(page: EvaluationReport) -> None:
    html = read(pages.render(page, ".html")).text
    markdown = pages.render(page, ".md").decode()
    figures = [
        texts.row_text(row, figure)
        for row in (*page.perplexity, *page.divergence, *page.cost, *page.tasks)
        for figure in (row.before, row.after)
        if figure is not None
    ]
    figures += [texts.figure_text(p.kld) for p in page.sweep]
    figures += [texts.number_text(t.relative_l2) for t in page.tensors]
    figures += ["28.7 ± 1.5", "+3.478 %", "0.0342 ± 0.0037", "1.20 GB", "86.08 ± 0.11 %", "4,001"]
    figures += [page.command, "1.2.3", "a b.txt, 7 documents", pages.verdict(page)]
    for shown in figures:
        assert shown in html
        assert shown in markdown
    data = json.loads(pages.render(page, ".json"))
    assert data["schema"] == 1
    for name in ("perplexity", "divergence", "cost", "tasks", "sweep", "distribution", "tensors"):
        value = getattr(page, name)
        plain = (
            [dataclasses.asdict(v) for v in value] if isinstance(value, tuple) else dataclasses.asdict(value)
        )
        assert data[name] == json.loads(json.dumps(plain))
    assert data["bits_per_weight"] == pytest.approx(8 * 822_000 / data["histograms"][0]["weights"])


def test_infinite_figures_are_null_in_json_and_said_elsewhere() -> None:
    row = ReportRow("token-level perplexity", Estimate(math.inf, math.nan))
    report = EvaluationReport(
        "x", "", {}, perplexity=(row,), distribution=distribution_of([math.nan, 1.0]),
        divergence=(ReportRow("mean KLD", Estimate(math.nan, None), unit="nats"),),
    )  # fmt: skip
    data = json.loads(pages.render(report, ".json"))
    assert data["perplexity"][0]["after"] == {"value": None, "standard_error": None}
    for kind in (".html", ".md"):
        text = pages.render(report, kind).decode()
        assert "inf" in text and "not finite for 1" in text and "nan nats" in text


@pytest.mark.parametrize("kind", pages.KINDS)
def test_the_same_report_gives_the_same_bytes(page: EvaluationReport, kind: str) -> None:
    assert pages.render(page, kind) == pages.render(page, kind)


def test_markdown_tables_keep_their_columns_whatever_names_hold(page: EvaluationReport) -> None:
    nasty = TensorRow("a|b`c``\n| x", "BF16", (1,), "k=1|2", 2, 1, relative_l2=0.1)
    report = dataclasses.replace(page, tensors=(nasty,), title="t`|\n# x", base="<b>")
    columns: int | None = None
    for line in pages.render(report, ".md").decode().splitlines():
        if not line.startswith("|"):
            columns = None
            continue
        count = len(re.findall(r"(?<!\\)\|", line))
        assert columns in (None, count), line
        columns = count
    assert not re.search("^# x", pages.render(report, ".md").decode(), re.MULTILINE)


def test_markdown_shows_names_as_they_are(page: EvaluationReport) -> None:
    hostile = "<img src=x> *a* [b](c) `d`"
    report = dataclasses.replace(
        page, setting={"text": hostile}, versions={hostile: hostile}, blocks=hostile, when=hostile,
        perplexity=(ReportRow(hostile, Estimate(1.0, None), None, hostile),),
        sweep=(dataclasses.replace(page.sweep[1], scheme=hostile),),
    )  # fmt: skip
    text = pages.render(report, ".md").decode()
    escaped = r"\<img src=x\> \*a\* \[b\](c) \`d\`"
    assert hostile not in text
    assert text.count(escaped) == 9
    assert "arc_easy: acc" in text


def test_page_escapes_names_and_refers_to_nothing_outside(page: EvaluationReport) -> None:
    hostile = "<script>alert(1)</script>"
    tensor = TensorRow(f"model.layers.0.{hostile}", "BF16", (1,), hostile, 2, 1, relative_l2=0.1)
    report = dataclasses.replace(
        page, title=hostile, base=hostile, command=hostile, versions={hostile: hostile}, tensors=(tensor,),
        perplexity=(ReportRow(hostile, Estimate(1.0, None), None, hostile, hostile),),
        sweep=(dataclasses.replace(page.sweep[1], scheme=hostile),),
    )  # fmt: skip
    html = pages.render(report, ".html")
    assert b"<script>alert" not in html
    found = read(html)
    assert found.outside == []
    assert len(found.ids) == len(set(found.ids))
    text = html.decode()
    assert "default-src 'none'" in text
    assert "@import" not in text
    referred = set(re.findall(r"url\(([^)]*)\)", text)) | set(re.findall(r'href="(#[^"]*)"', text))
    assert {reference.removeprefix("#") for reference in referred} <= set(found.ids)
    assert unescape(found.text).count(hostile) >= 5


def test_pictures_are_drawn_for_what_was_measured(page: EvaluationReport) -> None:
    drawn = pictures(page)
    assert all(drawn[name].startswith("<svg") for name in ("distribution", "pareto", "layers", "histograms"))
    assert "lossless" in drawn["pareto"] and "self_attn.q_proj" in drawn["layers"]
    assert "#" + "d55e00" not in "".join(drawn.values())  # colours are the page's
    assert not any(pictures(EvaluationReport("x", "", {})).values())


@pytest.mark.slow
def test_pictures_of_exact_models_and_of_single_points(page: EvaluationReport) -> None:
    """A sweep of which all divergences are 0, one point, and divergences that are all 0 do not fail."""
    zero = dataclasses.replace(page.sweep[0], kld=Estimate(0.0, 0.0))
    report = dataclasses.replace(page, sweep=(zero,), distribution=distribution_of([0.0, 0.0]))
    drawn = pictures(dataclasses.replace(report, divergence=()))
    assert drawn["distribution"] == "" and drawn["pareto"]
    one = dataclasses.replace(page, sweep=page.sweep[1:2], distribution=distribution_of([99.0]))
    assert pictures(one)["distribution"] and pictures(one)["pareto"]


@pytest.mark.slow
def test_a_real_evaluation_of_a_lossless_container_says_so(tmp_path: Path, one_thread: None) -> None:
    from neuzip.eval.measures.perplexity import evaluate, prepare
    from neuzip.eval.measures.texts import read_text

    compress(CHECKPOINT, tmp_path / "x")
    task = prepare([CHECKPOINT, tmp_path / "x"], read_text("demo"), max_tokens=300, device="cpu")
    evaluation = evaluate(task, divergence=True)
    report = reports.build_report(
        evaluation, tmp_path / "x", CHECKPOINT,
        title="x", base_title="demo", command="neuzip eval x", versions={"lm-eval": "9.9"},
    )  # fmt: skip
    assert {"neuzip", "torch", "transformers", "lm-eval"} <= report.versions.keys()
    assert report.identical and report.exact
    assert report.distribution is not None and report.distribution.zero == 300
    assert report.stored_bytes == (tmp_path / "x" / "model.safetensors").stat().st_size
    text = pages.render(report, ".md").decode()
    assert (
        "Every tensor is identical to the original, byte for byte, and so is every measured number." in text
    )
    assert "token-level perplexity" in text and "word-level perplexity, lm-eval" in text
    assert len(report.perplexity) == 7
    data = json.loads(pages.render(report, ".json"))
    token = evaluation.by("token").scores[1].token_perplexity
    assert data["perplexity"][0]["after"]["value"] == token.value


def test_one_model_alone(tmp_path: Path, one_thread: None) -> None:
    from neuzip.eval.measures.perplexity import evaluate, prepare
    from neuzip.eval.measures.texts import read_text

    task = prepare([CHECKPOINT], read_text("demo"), max_tokens=100, conventions=["token"], device="cpu")
    report = reports.build_report(
        evaluate(task), CHECKPOINT, None, title="x", base_title=None, command="neuzip eval x"
    )
    assert report.divergence == () and report.nll_difference is None and not report.exact
    assert all(row.before is None for row in report.perplexity)
    for kind in pages.KINDS:
        pages.render(report, kind)


def test_target_is_checked_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`report='.*\.pdf'`: \.pdf is no kind of report"):
        pages.check_target(tmp_path / "x.pdf", False)
    with pytest.raises(NeuzipError, match="cannot be written"):
        pages.check_target(tmp_path / "no" / "x.html", False)
    (tmp_path / "x.md").write_text("mine")
    with pytest.raises(WouldOverwrite):
        pages.check_target(tmp_path / "x.md", False)
    pages.check_target(tmp_path / "x.md", True)
    (tmp_path / "x.json").mkdir()
    with pytest.raises(NeuzipError, match="is a folder"):
        pages.check_target(tmp_path / "x.json", True)
    assert (tmp_path / "x.md").read_text() == "mine"


@pytest.mark.slow
def test_sweeps_are_read_as_they_are_written(tmp_path: Path, one_thread: None) -> None:
    from contextlib import contextmanager

    from neuzip.eval.measures.texts import read_text
    from neuzip.eval.sweep.run import sweep
    from neuzip.eval.sweep.setting import SweepSetting
    from neuzip.eval.sweep.setup import parse_schemes

    @contextmanager
    def stage(*_: Any) -> Any:
        yield lambda count: None

    setting = SweepSetting(CHECKPOINT, read_text("demo"), max_tokens=100, device="cpu")
    done = sweep(setting, parse_schemes("k1,lossless", ""), tmp_path, stage)
    points = sweep_results.read_sweep(tmp_path).points
    assert [p.scheme for p in points] == ["lossless", "k1"]
    by_name = {row.scheme: row for row in done.rows}
    for p in points:
        row = by_name[p.scheme]
        assert (p.bits_per_weight, p.nbytes) == (row.bits_per_weight, row.bytes)
        assert (p.kld, p.perplexity) == (row.comparison.kld.mean, row.perplexity)


def test_other_folders_are_no_sweeps(tmp_path: Path) -> None:
    with pytest.raises(NeuzipError, match="holds no results of neuzip sweep"):
        sweep_results.read_sweep(tmp_path)
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(FormatError, match="is no result of neuzip sweep"):
        sweep_results.read_sweep(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(FormatError):
        sweep_results.read_sweep(tmp_path)


def sweep_row(folder: Path, scheme: str, **depends_on: object) -> None:
    """A file as `neuzip sweep --output` writes it."""
    from neuzip.eval.sweep.rows import SweepRow

    one = Estimate(1.0, 0.1)
    kld = KLDivergence(mean=Estimate(0.1, 0.01), median=0.1, p999=0.2, max=0.3)
    made: dict[str, Any] = {f.name: one for f in dataclasses.fields(Comparison)}
    made |= {"tokens": 512, "blocks": "2 windows", "kld": kld, "k": 10, "identical": False}
    row: dict[str, Any] = {f.name: 1.0 for f in dataclasses.fields(SweepRow)}
    row |= {"scheme": scheme, "perplexity": one, "comparison": Comparison(**made), "dtype": "float32"}
    row["depends_on"] = {"checkpoint": "c", "text": "t", "rule": "r", "tokens": 512, **depends_on}
    folder.mkdir(exist_ok=True)
    (folder / f"{scheme}.json").write_text(json.dumps(SweepRow(**row).to_json()))


@pytest.mark.parametrize(
    ("name", "words"),
    [("checkpoint", "another checkpoint"), ("text", "another text"), ("rule", "another windows")],
)
def test_rows_of_several_sweeps_are_no_sweep(tmp_path: Path, name: str, words: str) -> None:
    sweep_row(tmp_path, "k3")
    sweep_row(tmp_path, "k4", device="another", versions={"torch": "0"})
    assert sweep_results.read_sweep(tmp_path).differing({"text": "t", "tokens": 512}) == ()
    sweep_row(tmp_path, "k5", **{name: "other"})
    with pytest.raises(NeuzipError, match=rf"k5\.json: was measured with {words} than k3\.json"):
        sweep_results.read_sweep(tmp_path)


@pytest.mark.slow
def test_a_sweep_of_something_else_is_told(page: EvaluationReport, tmp_path: Path) -> None:
    sweep_row(tmp_path, "k3")
    found = sweep_results.read_sweep(tmp_path)
    differs = found.differing({"checkpoint": "c", "text": "x", "rule": "r", "tokens": 9})
    assert differs == ("text", "number of tokens")
    report = dataclasses.replace(page, sweep=found.points, sweep_differs=differs)
    said = "The sweep was measured with another text and another number of tokens"
    for kind in (".md", ".html"):
        text = pages.render(report, kind).decode()
        assert said in text and "The ring is" not in text
        assert said not in pages.render(page, kind).decode()
    with_ring = pictures(dataclasses.replace(report, sweep_differs=()))["pareto"]
    assert with_ring != pictures(report)["pareto"]


@pytest.mark.slow
def test_a_report_knows_whether_the_sweep_is_of_its_text(tmp_path: Path, neuzip: Speak) -> None:
    from neuzip.eval.measures import fingerprint
    from neuzip.eval.measures.texts import read_text
    from neuzip.formats.checkpoint import find_checkpoint

    own = {
        "checkpoint": fingerprint.of_checkpoint(find_checkpoint(CHECKPOINT)),
        "text": fingerprint.of_text(read_text("demo").content),
        "rule": "windows of 64 predictions, no overlap",
        "tokens": 100,
    }
    sweep_row(tmp_path / "same", "k3", **own)
    sweep_row(tmp_path / "other", "k3", **{**own, "text": "another", "tokens": 99})
    for name, differs in (("same", []), ("other", ["text", "number of tokens"])):
        page = tmp_path / f"{name}.json"
        said = neuzip(
            "eval", CHECKPOINT, "--original", CHECKPOINT, "--text", "demo", "--window", 64,
            "--max-tokens", 100, "--conventions", "token", "--device", "cpu",
            "--report", page, "--sweep", tmp_path / name,
        )  # fmt: skip
        assert said.exit_code == 0, said.stderr
        assert json.loads(page.read_text())["sweep_differs"] == differs


def test_a_wrong_sweep_is_told_before_the_work(
    tmp_path: Path, neuzip: Speak, monkeypatch: pytest.MonkeyPatch
) -> None:
    from neuzip.eval.measures import perplexity

    monkeypatch.setattr(perplexity, "prepare", lambda *_, **__: pytest.fail("the work has begun"))
    options = ["--text", "demo", "--report", tmp_path / "x.html"]
    said = neuzip("eval", CHECKPOINT, *options, "--sweep", tmp_path)
    assert said.exit_code == 1
    assert "holds no results of neuzip sweep" in said.stderr


@pytest.mark.parametrize("fails", [(reports, "build_report"), (pages, "write")])
def test_a_page_that_fails_loses_no_result(
    fails: tuple[Any, str], tmp_path: Path, neuzip: Speak, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NeuzipError("x.html: no space left on device")

    monkeypatch.setattr(*fails, fail)
    said = neuzip(
        "eval", CHECKPOINT, "--text", "demo", "--max-tokens", 64, "--conventions", "token", "--json",
        "--device", "cpu", "--report", tmp_path / "x.html",
    )  # fmt: skip
    assert said.exit_code == 1
    assert "no space left" in said.stderr
    assert said.json["conventions"][0]["after"]["token_perplexity"]["value"] > 1
    assert said.json["page"] is None
    assert said.json["report"] is None or fails[1] == "write"


def browse(page: Path, *options: str) -> str:
    """What a headless Chromium prints of a page; it resolves no host."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
         f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_shows_it_in_light_and_dark(
    page: EvaluationReport, tmp_path: Path, theme: str, width: int
) -> None:
    target = tmp_path / "page.html"
    pages.write(page, target)
    browse(
        target, f"--screenshot={tmp_path / 'shot.png'}", f"--window-size={width},2400",
        f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}",
    )  # fmt: skip
    shot = np.asarray(Image.open(tmp_path / "shot.png").convert("RGB")).astype(int)
    assert shot.shape == (2400, width, 3)
    paper = shot[0, 0]
    assert (paper.mean() < 60) == (theme == "dark")
    ink = np.abs(shot - paper).sum(2) > 60
    assert ink.mean() > 0.01
    assert (ink.reshape(24, 100, width).any((1, 2))).mean() > 0.9  # something in nearly every strip
    hues = {tuple(c) for c in (shot[ink] // 32).tolist()}
    assert len(hues) > 10


PROBE = """<script>
const said = {
  width: document.documentElement.scrollWidth,
  loaded: performance.getEntriesByType("resource").map(entry => entry.name),
  first: () => document.querySelector(".sortable tbody tr td").textContent,
};
const heads = [...document.querySelectorAll(".sortable th button")];
const button = name => heads.find(head => head.textContent === name);
button("error").click();
said.largest = said.first();
button("tensor").click();
said.alphabet = said.first();
const field = document.querySelector("input");
field.value = "Q_PROJ";
field.dispatchEvent(new Event("input"));
said.shown = [...document.querySelectorAll(".sortable tbody tr")].filter(row => !row.hidden).length;
document.body.textContent = "SAID" + JSON.stringify(said) + "SAID";
</script></body>"""


@needs_chromium
@pytest.mark.slow
def test_page_fits_a_telephone_loads_nothing_and_its_table_sorts(
    page: EvaluationReport, tmp_path: Path
) -> None:
    target = tmp_path / "page.html"
    target.write_text(pages.render(page, ".html").decode().replace("</body>", PROBE))
    said = json.loads(unescape(browse(target, "--dump-dom", "--window-size=500,900").split("SAID")[1]))
    assert said["width"] <= 500
    assert said["loaded"] == []
    worst = max(page.tensors, key=lambda t: t.error or 0.0)
    assert said["largest"] == worst.label
    assert said["alphabet"] == sorted(t.label for t in page.tensors)[0]
    assert said["shown"] == sum("q_proj" in t.label for t in page.tensors)


@pytest.mark.parametrize("errors", [(0.0262, 0.0276), (0.001, 0.5), (0.3,)])
def test_the_heat_map_has_the_shades_that_its_legend_says(errors: tuple[float, ...]) -> None:
    from neuzip.eval.report import pictures as drawn

    rows = [
        TensorRow(f"layers.{at}.q.weight", "BF16", (1,), "k=3", 2, 1, relative_l2=error)
        for at, error in enumerate(errors)
    ]
    svg = drawn.pictures(EvaluationReport("x", "", {}, tensors=tuple(rows)))["layers"]
    low, high = drawn.shade_scale(errors)
    legend = f"shades from {texts.number_text(low)} (faint) to {texts.number_text(high)} (strong)"
    assert legend in svg
    assert f"measured {texts.number_text(min(errors))} to {texts.number_text(max(errors))}" in svg
    assert (drawn.shade(low, low, high), drawn.shade(high, low, high)) == pytest.approx((0.15, 1.0))
    shades = [float(x) for x in re.findall(r"(?<!stroke-)opacity: (0\.\d+)", svg)]
    expected = [drawn.shade(error, low, high) for error in errors if error < high]
    assert shades == pytest.approx(expected, abs=1e-5), "what is drawn"
    if errors[0] > high / 10:
        assert low == pytest.approx(high / 10), "close errors look alike, and the legend says so"


def test_a_speed_measured_once_is_told_roughly_and_without_a_change() -> None:
    row = ReportRow("speed", Estimate(1632.5, None), Estimate(1017.0, None), unit=SPEED)
    assert texts.change_text(row) == ""
    assert texts.row_text(row, row.after) == "about 1,600 tokens/s"
    page = EvaluationReport("x", "", {}, base="o", cost=(row,))
    for kind in (".html", ".md"):
        text = pages.render(page, kind).decode()
        assert "60.5" not in text and "1,632" not in text and "about 1,000 tokens/s" in text


def test_a_row_whose_error_swallows_it_says_so() -> None:
    from neuzip.eval.measures.estimates import without_meaning

    assert without_meaning(Estimate(717_693.0, 925_156.0)) and without_meaning(Estimate(1.0, math.nan))
    assert not without_meaning(Estimate(27.8, 1.65)) and not without_meaning(Estimate(27.8, None))


def test_the_page_has_no_more_digits_than_the_terminal() -> None:
    from neuzip.cli.show.figures import precise_text

    for value, error in ((0.0018257, 0.0000578), (0.0090914, 0.00045452), (0.20184, 0.0013)):
        estimate = Estimate(value, error)
        assert texts.figure_text(estimate) == precise_text(estimate)


@pytest.mark.slow
def test_tables_and_figures_scroll_on_a_narrow_screen_and_show_it(page: EvaluationReport) -> None:
    from neuzip.eval.report import histogram_pictures as pictures

    assert page.inspection is not None
    for html in (pages.render(page, ".html").decode(), pictures.page(page.inspection, "x").decode()):
        assert (
            html.count("<table") == len(re.findall(r'<div class="scroll" tabindex="0">\s*<table', html)) > 0
        )
        assert "<svg" not in re.sub(r"<figure.*?</figure>", "", html, flags=re.S)
        rule = html[html.index(".scroll, figure {") :]
        rule = rule[: rule.index("\n}")]
        assert "overflow-x: auto" in rule and rule.count("var(--shade)") == 2 and " local" in rule
