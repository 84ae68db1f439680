"""The commands compress, decompress and verify as a person or a script meets them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from neuzip.cli.compressing.run import TIED_MEASURED, TIED_WORTH
from neuzip.compress.tied import tied_embedding

Save = Callable[..., Path]
Speak = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path, save: Save) -> Path:
    """A folder with one small model."""
    rng = np.random.default_rng(0)
    bits = (rng.standard_normal(60_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    root = tmp_path / "model"
    save(
        root / "model.safetensors",
        {"a.weight": ("BF16", (200, 300), bits), "norm.weight": ("BF16", (3000,), bits[:3000])},
    )
    (root / "config.json").write_text('{"model_type": "llama"}')
    return root


def test_the_three_modes(in_all_modes: Callable[..., dict[str, Any]], model: Path, tmp_path: Path) -> None:
    said = in_all_modes("compress", model, tmp_path / "small", "--overwrite")
    assert "lossless: all 2 tensors" in said["human"].stdout
    result = said["json"].json
    assert result["lossless"] is True
    assert result["dst"] == str(tmp_path / "small")
    assert result["stored_weight_bytes"] == (tmp_path / "small" / "model.safetensors").stat().st_size
    assert [t["name"] for t in result["tensors"]] == ["a.weight", "norm.weight"]
    assert said["quiet"].stdout == f"{tmp_path / 'small'}\n"
    said = in_all_modes("verify", tmp_path / "small", "--original", model)
    assert said["json"].json["identical"] is True
    assert said["quiet"].stdout == ""
    said = in_all_modes("decompress", tmp_path / "small", tmp_path / "back")
    assert said["json"].json["lossless"] is True
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()


def test_a_dry_run_predicts_and_touches_nothing(neuzip: Speak, model: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    said = neuzip("compress", model, tmp_path / "small", "--dry-run", "--json")
    assert sorted(tmp_path.rglob("*")) == before
    predicted = said.json["stored_bytes"]
    real = neuzip("compress", model, tmp_path / "small", "--json").json
    assert predicted == pytest.approx(real["stored_bytes"], rel=0.01)
    assert set(said.json["tensors"][0]) <= set(real["tensors"][0])
    assert "predicted" in neuzip("compress", model, tmp_path / "other", "--dry-run").stdout


def test_a_pipeline_shows_what_each_component_became(neuzip: Speak, save: Save, tmp_path: Path) -> None:
    bits = (np.arange(9000) % 7 + 0x3F80).astype(np.uint16)
    for name, tensors in (("unet", {"w": bits, "b": bits[:9]}), ("vae", {"w": bits[:9]})):
        stored = {key: ("BF16", (value.size,), value) for key, value in tensors.items()}
        save(tmp_path / "pipeline" / name / "model.safetensors", stored)
    for options in (["--dry-run"], []):
        said = neuzip("compress", tmp_path / "pipeline", tmp_path / "small", "--json", *options).json
        unet, vae = said["components"]
        assert unet["name"] == "unet" and unet["schemes"] == {"lossless": 1, "raw": 1}
        assert unet["original_bytes"] == 18018 and unet["stored_bytes"] < 10000
        assert vae == {"name": "vae", "schemes": {"raw": 1}, "original_bytes": 18, "stored_bytes": 18}
    shown = neuzip("compress", tmp_path / "pipeline", tmp_path / "other").stdout
    assert re.search(r"unet +(lossless|raw) \(1\), (raw|lossless) \(1\) +18.0 kB", shown)
    assert re.search(r"vae +raw \(1\) +18 B +18 B +100.00 %", shown)


def test_one_folder_has_no_components(neuzip: Speak, model: Path, tmp_path: Path) -> None:
    assert neuzip("compress", model, tmp_path / "small", "--json").json["components"] == []
    assert "component" not in neuzip("compress", model, tmp_path / "other").stdout


@pytest.mark.parametrize(
    ("command", "row"),
    [
        (("compress", "{a}", "{c}", "--dry-run", "-k", "3"), "a.very.long.n  k=3     524 kB     6.66 %"),
        (("diff", "{a}", "{b}"), "a.very.long.name.of.a.w  values        0"),
    ],
    ids=["dry run", "diff"],
)
def test_a_narrow_window_shows_whole_figures(
    command: tuple[str, ...], row: str, neuzip: Speak, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fill in (("a", 0.0), ("b", 1.0)):
        weights = np.full((512, 512), fill, np.float16)
        save_file({"a.very.long.name.of.a.weight": weights}, tmp_path / f"{name}.safetensors")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    said = neuzip(*(word.format_map({n: tmp_path / f"{n}.safetensors" for n in "abc"}) for word in command))
    assert said.stdout.splitlines()[2].rstrip() == row
    assert "a wider window shows" in said.stderr


def test_rounding_spares_what_is_no_matrix(neuzip: Speak, model: Path, tmp_path: Path) -> None:
    result = neuzip("compress", model, tmp_path / "small", "--mantissa-bits", 2, "--json").json
    schemes = {t["name"]: (t["scheme"], t["loss"]) for t in result["tensors"]}
    assert schemes["a.weight"][0] == "k=2"
    assert 0 < schemes["a.weight"][1]["max_relative"] <= 0.125
    assert schemes["norm.weight"] == ("lossless", None)
    said = neuzip("verify", tmp_path / "small", "--original", model)
    assert said.exit_code == 0
    assert "1 tensor identical, 1 rounded as recorded" in said.stdout


def test_rounded_weights_are_those_of_one_original(neuzip: Speak, model: Path, tmp_path: Path) -> None:
    """Near it is not enough: the last bit of one weight is another."""
    assert neuzip("compress", model, tmp_path / "small", "--mantissa-bits", 2).exit_code == 0
    other = tmp_path / "other" / "model.safetensors"
    other.parent.mkdir()
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-2 * 3000 - 2] ^= 1  # of the last weight before the norm
    other.write_bytes(data)
    said = neuzip("verify", tmp_path / "small", "--original", other.parent)
    assert said.exit_code == 1 and said.stdout == ""
    assert "tensor 'a.weight' was rounded from other weights than those of" in said.stderr


def test_a_plan_file(neuzip: Speak, model: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[[rule]]\nmatch = "norm*"\nscheme = "raw"\n'
        '[[rule]]\nmatch = "*"\nmantissa_bits = 1\nblock_size = 64\n'
    )
    result = neuzip("compress", model, tmp_path / "small", "--plan", plan, "--json").json
    assert [t["scheme"] for t in result["tensors"]] == ["k=1 block=64", "raw"]
    recorded = json.loads((tmp_path / "small" / "neuzip" / "plan.json").read_text())
    assert recorded["rules"][1] == {
        "match": "*", "scheme": "truncated", "mantissa_bits": 1, "block_size": 64,
    }  # fmt: skip


def test_include_and_exclude(neuzip: Speak, model: Path, tmp_path: Path) -> None:
    for option, raw in (("--exclude", "a.weight"), ("--include", "norm.weight")):
        result = neuzip("compress", model, tmp_path / option, option, "a.*", "--json").json
        assert [t["name"] for t in result["tensors"] if t["scheme"] == "raw"] == [raw]


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        (["--bits-for", "a.*=4"], "k=4"),
        (["--bits-for", "a.*=4", "--block-size", 64], "k=4 block=64"),
        (["--mantissa-bits", 2, "--bits-for", "a.*=4", "--bits-for", "*=1"], "k=4"),
        (["--mantissa-bits", 2, "--bits-for", "norm*=4"], "k=2"),
    ],
    ids=str,
)
def test_some_matrices_have_bits_of_their_own(
    neuzip: Speak, model: Path, tmp_path: Path, options: list[object], scheme: str
) -> None:
    """The first that matches decides; vectors stay lossless."""
    result = neuzip("compress", model, tmp_path / "small", *options, "--json").json
    assert {t["name"]: t["scheme"] for t in result["tensors"]} == {
        "a.weight": scheme, "norm.weight": "lossless",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "hinted"),
    [
        (["--mantissa-bits", 3], True),
        (["--mantissa-bits", 3, "--dry-run"], True),
        (["--mantissa-bits", 3, "--bits-for", "*embed*=4"], False),
        (["--mantissa-bits", 5], False),  # not measured
        ([], False),
    ],
    ids=str,
)
def test_a_tied_embedding_is_hinted_at(
    neuzip: Speak, root: Path, tmp_path: Path, options: list[object], hinted: bool
) -> None:
    said = neuzip("compress", root / "eval/demo/checkpoint", tmp_path / "small", *options)
    assert said.exit_code == 0
    assert (
        f"--bits-for model.embed_tokens.weight=4 keeps one more bit of it. That made {TIED_WORTH}"
        in (said.stderr)
    ) == hinted


def test_the_hint_has_the_figures_that_were_measured(root: Path) -> None:
    measured = json.loads((root / "benchmarks/results/tied_embedding.json").read_text())
    found = {
        (row["mantissa_bits"], row["more_bits"] if row["more_for"] == "embedding" else 0): row
        for row in measured["sections"]["smollm2-135m"]["results"]
        if row["more_for"] in ("nothing", "embedding")
    }
    pairs = [(found[bits, 0], found[bits, 1]) for bits in TIED_MEASURED]
    larger = [100 * (more["bits_per_weight"] / plain["bits_per_weight"] - 1) for plain, more in pairs]
    smaller = [100 * (1 - more["kld"] / plain["kld"]) for plain, more in pairs]
    assert f"{min(larger):.0f} to {max(larger):.0f} % larger" in TIED_WORTH
    assert f"{min(smaller):.0f} to {max(smaller):.0f} % smaller" in TIED_WORTH


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "w"),
        ({"tie_word_embeddings": True}, "w"),
        ({"tie_word_embeddings": False}, None),
        ({"architectures": ["BertModel"]}, None),
        ({"vocab_size": 99}, None),
        ({"vocab_size": None, "text_config": {"vocab_size": 40}}, "w"),
        ({"text_config": {"vocab_size": 40, "tie_word_embeddings": False}}, None),
        ({"vocab_size": 32}, None),  # two of them: none is tied
    ],
    ids=str,
)
def test_tied_embeddings_are_told_by_their_rows(
    tmp_path: Path, save: Save, changes: dict[str, object], expected: str | None
) -> None:
    floats = {rows: np.zeros(rows * 8, np.uint16) for rows in (40, 32)}
    save(
        tmp_path / "m/model.safetensors",
        {"w": ("BF16", (40, 8), floats[40]), **dict.fromkeys("ab", ("BF16", (32, 8), floats[32]))},
    )
    config = {"architectures": ["XForCausalLM"], "vocab_size": 40} | changes
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    assert tied_embedding(tmp_path / "m") == expected


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--mantissa-bits", "60"], 2, "60 mantissa bits"),
        (["--mantissa-bits", "3", "--block-size", "100"], 2, "power of two"),
        (["--mantissa-bits", "3", "--block-size", "many"], 2, "--block-size"),
        (["--plan", "none.toml"], 1, "none.toml"),
        (["--plan", "none.toml", "--include", "*"], 2, "--plan excludes"),
        (["--plan", "none.toml", "--bits-for", "*=4"], 2, "--plan excludes"),
        (["--max-kld", "0.1", "--bits-for", "*=4"], 2, "--max-kld excludes"),
        (["--bits-for", "a.weight"], 2, "--bits-for a.weight: is no GLOB=K"),
        (["--bits-for", "a.weight=x"], 2, "--bits-for a.weight=x: is no GLOB=K"),
        (["--bits-for", "nobody=4"], 1, "no tensor is called anything like 'nobody'"),
        (["--json", "--quiet"], 2, "--json and --quiet"),
        (["--jobs", "0"], 2, "--jobs"),
    ],
)
def test_wrong_options_are_named(
    neuzip: Speak, model: Path, tmp_path: Path, options: list[str], code: int, words: str
) -> None:
    said = neuzip("compress", model, tmp_path / "small", *options)
    assert said.exit_code == code
    assert said.json["error"] if "--json" in options else said.stdout == ""
    assert words in said.stderr
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    "text",
    [
        "rule = 3",
        "[[rule]]\nscheme = 'raw'",
        "[[rule]]\nmatch = '*'\nmantissa_bits = 'x'",
        "[[rule]]\nmatch = '*'\nscheme = 'zip'",
        "[[rule",
        "[[rule]]\nmatch = '*'\nscheme = 'raw'\nmantissa_bits = 1",
    ],
)
def test_a_broken_plan_is_named(neuzip: Speak, model: Path, tmp_path: Path, text: str) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(text)
    said = neuzip("compress", model, tmp_path / "small", "--plan", plan)
    assert said.exit_code == 1
    assert str(plan) in said.stderr


@pytest.mark.parametrize(
    ("text", "said_of_it"),
    [
        (
            "[[rule]]\nmatch = '*'\nmantisa_bits = 3",
            "rule 1: there is no key 'mantisa_bits'\nhint: did you mean mantissa_bits?",
        ),
        ("[[rule]]\nmatch = '*'\nq = 3", "rule 1: there is no key 'q'\nhint: there are match, scheme, "),
        ("[[rules]]\nmatch = '*'", "there is no key 'rules'\nhint: did you mean rule?"),
    ],
)
def test_an_unknown_key_of_a_plan_is_wrong_use(
    neuzip: Speak, model: Path, tmp_path: Path, text: str, said_of_it: str
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(text)
    said = neuzip("compress", model, tmp_path / "small", "--plan", plan)
    assert said.exit_code == 2
    assert said.stderr.startswith(f"error: {plan}: {said_of_it}")


def test_a_dry_run_says_below_the_table_why_tensors_stay_raw(
    neuzip: Speak, tmp_path: Path, save: Any
) -> None:
    words = np.zeros(4096, np.uint16)
    tensors = {"m": ("BF16", (64, 64), words), "a": ("BF16", (5,), words[:5]), "b": ("BF16", (6,), words[:6])}
    source = save(tmp_path / "a.safetensors", tensors)
    said = neuzip("compress", source, tmp_path / "b.safetensors", "--dry-run")
    assert "\nraw: 2 tensors, too small to shrink\n" in said.stdout
    assert [line.split()[4] for line in said.stdout.splitlines()[2:5]] == ["lossless", "raw", "raw"]
    notes = [
        t["note"] for t in neuzip("compress", source, tmp_path / "b", "--dry-run", "--json").json["tensors"]
    ]
    assert notes == ["", "too small to shrink", "too small to shrink"]


def test_a_damaged_container_is_named_with_tensor_and_stream(
    neuzip: Speak, model: Path, tmp_path: Path
) -> None:
    neuzip("compress", model, tmp_path / "small")
    file = tmp_path / "small" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    said = neuzip("verify", tmp_path / "small")
    assert said.exit_code == 1
    assert said.stdout == ""
    for word in ("model.safetensors", "a.weight", "sign_mantissa", "damaged"):
        assert word in said.stderr
    assert neuzip("decompress", tmp_path / "small", tmp_path / "back").exit_code == 1
    assert not (tmp_path / "back").exists()


def test_a_single_file(neuzip: Speak, model: Path, tmp_path: Path) -> None:
    original = model / "model.safetensors"
    assert neuzip("compress", original, tmp_path / "small.safetensors").exit_code == 0
    assert neuzip("verify", tmp_path / "small.safetensors", "--original", original).exit_code == 0
    assert neuzip("decompress", tmp_path / "small.safetensors", tmp_path / "back.safetensors").exit_code == 0
    assert (tmp_path / "back.safetensors").read_bytes() == original.read_bytes()


def test_a_dry_run_shows_tensors_of_one_kind_in_one_row(neuzip: Speak, tmp_path: Path, save: Any) -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0x3C00, 0x4000, 4096).astype(np.uint16)
    names = [f"model.layers.{n}.mlp.experts.{m}.w.weight" for n in range(12) for m in range(8)]
    tensors = {name: ("BF16", (64, 64), np.roll(data, at)) for at, name in enumerate(names)}
    tensors |= {"embed.weight": ("BF16", (64, 64), data[::-1].copy()), "layers.0.b": ("BF16", (4,), data[:4])}
    source = save(tmp_path / "a.safetensors", tensors)
    said = neuzip("compress", source, tmp_path / "b.safetensors", "--dry-run")
    rows = [line.split() for line in said.stdout.splitlines() if ".weight" in line.split(" ")[0]]
    assert [row[:5] for row in rows] == [
        ["model.layers.*.mlp.experts.*.w.weight", "96", "64x64", "BF16", "lossless"],
        ["embed.weight", "1", "64x64", "BF16", "lossless"],
    ]
    assert "layers.0.b " in said.stdout, "one alone keeps its name"
    assert "* is any number" in said.stdout
    listed = neuzip("compress", source, tmp_path / "b.safetensors", "--dry-run", "--json").json["tensors"]
    assert [t["name"] for t in listed] == list(tensors)


def test_a_run_without_verification_claims_none(neuzip: Speak, model: Path, tmp_path: Path) -> None:
    checked = neuzip("compress", model, tmp_path / "a").stdout
    unchecked = neuzip("compress", model, tmp_path / "b", "--no-verify").stdout
    assert re.search(r"^lossless: all \d+ tensors, bit for bit$", checked, re.M)
    assert re.search(r"^lossless: all \d+ tensors, by their schemes; nothing was decoded", unchecked, re.M)
    assert "bit for bit" not in unchecked


def test_growth_and_unknown_dtypes_are_warned_of(neuzip: Speak, tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"Q4_K","shape":[32],"data_offsets":[0,18]},"v":{"dtype":"Q4_K","shape":[32],'
    header += b'"data_offsets":[18,36]}}'
    data = len(header).to_bytes(8, "little") + header + bytes(range(36))
    (tmp_path / "a.safetensors").write_bytes(data)
    said = neuzip("compress", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert said.exit_code == 0
    assert "warning: neuzip does not know dtype Q4_K: 2 tensors stored unchanged\n" in said.stderr
    grown = (tmp_path / "b.safetensors").stat().st_size - len(data)
    assert grown > 0 and f"warning: the result is {grown:,} bytes larger than SRC: " in said.stderr


@pytest.mark.parametrize("name", ["m.gguf", "m.onnx", "m.h5", "m.npz", "m.msgpack", "folder/m.gguf", "m.dat"])
def test_weights_in_another_format_are_named_with_a_hint(name: str, neuzip: Speak, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"GGUF" + bytes(60))
    given = path.parent if "/" in name else path
    said = neuzip("compress", given, tmp_path / "out")
    assert said.exit_code == 1 and said.stdout == ""
    assert said.stderr.startswith(f"error: {path}: is ") and "\nhint: " in said.stderr
    assert ".safetensors" in said.stderr or "safetensors" in said.stderr.partition("hint: ")[2]
