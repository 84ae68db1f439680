"""The README tells the truth: its figures are those of the results, its commands exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from neuzip.cli.commands import VERBS


def test_figures_are_those_of_the_results(root: Path) -> None:
    check = subprocess.run([sys.executable, root / "benchmarks" / "readme.py", "--check"], check=False)
    assert check.returncode == 0, "run python benchmarks/readme.py"


@pytest.fixture
def readme(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/readme.py, with results of its own: the others copied, those of a GPU made up."""
    spec = importlib.util.spec_from_file_location("readme", root / "benchmarks" / "readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("sweep-demo", "cpu_codec", "memory"):
        shutil.copy(root / "benchmarks" / "results" / f"{name}.json", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_figures_of_a_gpu_appear_with_their_file(readme: ModuleType, tmp_path: Path) -> None:
    without = readme.figures()
    assert "on a GPU" not in without
    measured = {"by": "neuzip", "must_gb_s": 7, "stretch_gb_s": 9, "share": 0.25, "ratio": 0.5}
    (tmp_path / "gpu_codec.json").write_text(
        json.dumps(
            {
                "device_copy_gb_s": 11,
                "link_gb_s": 1,
                "environment": {
                    "python": "3", "packages": {"torch": "2", "neuzip-toolkit": "0"}, "commit": "abc",
                    "gpu": {"name": "a card", "driver": "1.2"},
                },
                "results": [
                    {"row": "missed", **measured, "gb_s": 6, "bits_per_exponent": 3.0, "must_bits": 2.62},
                    {"row": "met", **measured, "gb_s": 8, "bits_per_exponent": 2.6, "must_bits": 2.62},
                    {"row": "better", **measured, "gb_s": 1234},
                    {"row": "peer", "by": "other", "gb_s": 5},
                    {"row": "absent", "by": "another", "status": "not installed: x"},
                ],
            }
        )
    )  # fmt: skip
    figures = readme.figures()
    assert all(paragraph in figures for paragraph in without.split("\n\n"))
    lines = {line.split(" | ")[0][2:]: line for line in figures.splitlines() if line.startswith("| ")}
    assert lines["missed"] == (
        "| missed | neuzip | 6.0, **missed** | 7.0 | 9.0 | 25% | 50.00%, 3.000 bits of 2.62, **missed** |"
    )
    assert lines["met"] == "| met | neuzip | 8.0 | 7.0 | 9.0 | 25% | 50.00%, 2.600 bits |"
    assert lines["better"] == "| better | neuzip | 1,234 | 7 | 9, reached | 25% | 50.00% |"
    assert lines["peer"] == "| peer | other | 5.0 |  |  |  |  |"
    assert lines["absent"] == "| absent | another | not installed: x | | | | |"
    assert "a card, driver 1.2, Python 3, torch 2, commit abc" in figures


CARD = {
    "python": "3", "packages": {"torch": "2", "neuzip-toolkit": "0"}, "commit": "abc",
    "gpu": {"name": "a card", "driver": "1.2"},
}  # fmt: skip


def test_conversion_has_a_column_for_each_model_and_a_line_of_rotation(
    readme: ModuleType, tmp_path: Path
) -> None:
    machine = {"cores": 2, "processor": "chip", "python": "3", "packages": {}, "commit": "abc"}
    one: dict[str, object] = {"perplexity": 1234.5, "kld": 0.25, "bits": 1.6}
    for name, factor in (("demo", 1), ("wikilm-26m", 2)):
        rows = [{**one, "step": "rounded", "rotated": False}]
        rows.append({**one, "step": "rotated, rounded", "rotated": True, "perplexity": 2000 * factor})
        if name == "demo":
            rows.append({**one, "step": "finer", "rotated": False, "bits": 2.104})
        document = {
            "text": "demo", "tokens": 1000 * factor, "calibration": "train", "calibration_tokens": 512,
            "original": {"perplexity": 10.0}, "environment": machine, "results": rows,
        }  # fmt: skip
        (tmp_path / f"ternary-conversion-{name}.json").write_text(json.dumps(document))
    figures = readme.figures()
    assert "| not at all | 10.00 | 0 | 16 | 10.00 | 0 | 16 |" in figures
    assert "| rounded | 1,234.50 | 0.250 | 1.60 | 1,234.50 | 0.250 | 1.60 |" in figures
    assert "| finer | 1,234.50 | 0.250 | 2.10 |  |  |  |" in figures
    assert "on demo and wikilm-26m: rounded: 2,000.00 (1,234.50), 4,000.00 (1,234.50)." in figures
    assert "| rotated" not in figures and "2,000 tokens of the held-out text" in figures


def test_figures_of_ternary_products_appear_with_their_file(readme: ModuleType, tmp_path: Path) -> None:
    shape = {"out": 64, "in": 32, "tokens": 1, "must": 4.0, "stretch": 5.0, "cublas_us": 40.0}
    products = [
        {**shape, "activation": "int8", "us": 8.0, "speedup": 5.0, "times_int8": 1.0},
        {**shape, "activation": "int4", "us": 12.0, "speedup": 3.33, "times_int8": 1.5},
        {**shape, "activation": "fp4", "us": 8.02, "speedup": 4.99, "times_int8": 1.0025},
    ]
    products += [
        {**shape, "tokens": 16, "activation": "int8", "us": 20.0, "speedup": 2.0, "times_int8": 1.0},
    ]
    sparse = [{"what": "half", "out": 64, "in": 32, "tokens": 16, "us": 4.0, "beside_us": 6.0}]
    sections = {
        "products": {"environment": CARD, "results": products},
        "sparse": {"environment": CARD, "results": sparse},
    }
    (tmp_path / "ternary_linear.json").write_text(json.dumps({"sections": sections}))
    figures = readme.figures()
    assert (
        "| 64 x 32 | 1 | 4.0 / 5.0 | 40.0 us | 5.00, stretch reached (8.0 us) "
        "| 3.33, **slower** (12.0 us) | 4.99 (8.0 us) |"
    ) in figures
    assert "| 64 x 32 | 16 | 4.0 / 5.0 | 40.0 us | 2.00, **missed** (20.0 us) |  |  |" in figures
    assert "| half | 64 x 32 | 16 | 4.0 us | 6.0 us | 1.50 |" in figures
    assert figures.count("a card, driver 1.2") == 1


def test_figures_of_a_bitnet_model_appear_with_their_file(readme: ModuleType, tmp_path: Path) -> None:
    speed = {"what": "decode", "unit": "tokens/s"}
    size = {"what": "weights", "unit": "GB"}
    missed = {"must": 2.5, "stretch": 4.0, "most": False, "met": False}
    met = {"must": 0.16, "stretch": None, "most": True, "met": True}
    rows = [
        {**speed, "by": "bf16", "value": 100.0, "ratio": 1.0},
        {**speed, "by": "b1.58", "value": 230.0, "ratio": 2.3},
        {**speed, "by": "a4.8", "value": 240.0, "ratio": 2.4, **missed},
        {**size, "by": "bf16", "value": 8.0, "ratio": 1.0},
        {**size, "by": "a4.8", "value": 1.2, "ratio": 0.15, **met},
    ]
    (tmp_path / "bitnet.json").write_text(json.dumps({"rows": rows, "environment": CARD}))
    figures = readme.figures()
    assert "| what | bf16 | b1.58 | a4.8 |" in figures
    assert (
        "| decode | 100 tokens/s | 230 tokens/s (2.30) "
        "| 240 tokens/s (2.400, **missed**, at least 2.5, stretch 4.0) |"
    ) in figures
    assert "| weights | 8 GB |  | 1.2 GB (0.150, at most 0.16) |" in figures
    assert "a card, driver 1.2" in figures


def test_figures_of_attention_appear_with_their_file(readme: ModuleType, tmp_path: Path) -> None:
    row = {
        "texts": 2, "tokens": 4096, "bits": 3, "bytes": 2, "bytes_bf16": 8, "sdpa_us": 9, "attend_us": 6,
        "speedup": 1.5, "store_us": 1, "sdpa_gb_s_read": 400, "gb_s_read": 1234,
    }  # fmt: skip
    document = {
        "queries": 32, "heads": 8, "width": 128, "environment": CARD, "device_copy_gb_s": 4321,
        "results": [row, {**row, "bits": 8, "speedup": 0.75, "attend_us": 12}],
    }  # fmt: skip
    (tmp_path / "kv_attention.json").write_text(json.dumps(document))
    figures = readme.figures()
    line = "| 2 x 4,096 | 3 | 25.0% | 9.0 us, 400 GB/s | 6.0 us, 1,234 GB/s | 1.50 | 1.0 us |"
    assert line in figures and "a device copy moves 4,321." in figures
    assert "12.0 us, 1,234 GB/s | 0.75, **slower** |" in figures


def test_figures_of_quantised_attention_appear_with_their_file(readme: ModuleType, tmp_path: Path) -> None:
    case = {"texts": 4, "tokens": 8192, "width": 128, "causal": True}
    kernels = [
        {**case, "side": "ours, 8 bits", "tops": 661.0, "tops_without": 750.4, "must": 680, "stretch": 850},
        {**case, "side": "SDPA, cuDNN", "tops": 558.0},
        {**case, "causal": False, "side": "ours, 8 bits", "tops": 900, "tops_without": 950, "must": 680,
         "stretch": 850},
    ]  # fmt: skip
    prefill = [
        {"side": "SDPA, cuDNN", "tokens": 32768, "s": 1.0, "speedup": 1.0},
        {"side": "ours, 8 bits", "tokens": 32768, "s": 0.8, "speedup": 1.25, "must": 1.05, "stretch": 1.2},
    ]
    card = {**CARD, "packages": {**CARD["packages"], "sageattention": "1.0.6"}}  # type: ignore[dict-item]
    sections = {
        "kernels": {"environment": card, "results": kernels},
        "prefill": {"environment": card, "results": prefill},
    }
    (tmp_path / "attention.json").write_text(json.dumps({"sections": sections}))
    figures = readme.figures()
    assert (
        "| 4 x 32 heads, 8,192 tokens, D 128, causal | 680 / 850 | 661 (750), **missed** | 558 |" in figures
    )
    assert "| 4 x 32 heads, 8,192 tokens, D 128 | 680 / 850 | 900 (950), stretch reached |  |" in figures
    assert "ours, 8 bits 0.80 s (1.25 times, must 1.05, stretch 1.2)" in figures
    assert figures.count("a card, driver 1.2") == 1 and "sageattention 1.0.6" in figures


def test_every_command_is_in_the_table_and_no_other(root: Path) -> None:
    table = re.findall(r"^\| `neuzip ([\w-]+)", (root / "README.md").read_text(), re.MULTILINE)
    assert set(table) == set(VERBS)


def test_links_lead_somewhere(root: Path) -> None:
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "eval/demo/README.md"):
        text = (root / document).read_text()
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (root / document).parent.joinpath(target).exists(), f"{document}: {target}"


def test_the_python_names_exist(root: Path) -> None:
    import neuzip

    for name in re.findall(r"`neuzip\.(\w+)", (root / "README.md").read_text()):
        assert hasattr(neuzip, name), name
