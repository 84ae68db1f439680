"""Quantized tensors: rounding to nearest, codes from elsewhere, and what is kept lossless instead."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Speak
from independent_decoder import code_table
from safetensors.torch import load_file, save_file

import neuzip
from neuzip.compress import Rule, Scheme, compress, decompress, verify
from neuzip.compress.delta_base import DeltaBase
from neuzip.compress.device import Device
from neuzip.compress.gpu import Gpu
from neuzip.compress.ranks import Ranks
from neuzip.compress.rules_file import PlanFile, plan_bytes, read_plan_file
from neuzip.compress.schemes import codec_for
from neuzip.compress.schemes.code_tables import (
    JOINT_PAIRS,
    PAIRS,
    SINGLE,
    STREAM_BYTES,
    CodeTable,
    code_bits,
    share_bytes,
    share_values,
)
from neuzip.compress.schemes.codec import TensorInput
from neuzip.compress.schemes.quantized_coding import PIECE, QuantizedCodes, count, shifted
from neuzip.compress.sources.folder import FolderSource
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.formats.card.model_card import model_card
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.formats.container import Container
from neuzip.formats.hub.push_plan import plan_push
from neuzip.formats.manifest import check_requirements
from neuzip.formats.records import Loss
from neuzip.formats.safetensors_file import TensorInfo
from neuzip.kernels.grid import Grid, Spread, factor_bytes
from neuzip.runtime.read_gpu import read_on

STEP = Scheme("quantized", step=0.05)
RULES = (Rule("*", STEP, min_dimensions=2),)


def weights(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def records(path: Path) -> dict[str, Any]:
    with Container(path) as container:
        return {name: record.to_json() for name, record in container.manifest.tensors.items()}


@dataclass(frozen=True)
class Prepared:
    """Codes by name."""

    codes: dict[str, tuple[np.ndarray, Grid]]
    identity: str = "calibration 1"
    asked: list[str] = field(default_factory=list)

    def codes_of(self, name: str, /) -> tuple[np.ndarray, Grid] | None:
        self.asked.append(name)
        return self.codes.get(name)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with what is quantized and what is not."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {
        "q.weight": weights(48, 96),
        "half.weight": weights(3, 20, 100, seed=1).half(),
        "infinite.weight": torch.full((64, 64), float("inf")),
        "norm.weight": weights(4096, dtype=torch.float32),
        "small.weight": weights(4, 4),
    }
    tensors["tied.weight"] = tensors["q.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def run(neuzip: Speak, *arguments: object) -> dict[str, Any]:
    """The JSON of a command that has to succeed."""
    said = neuzip(*arguments, "--json")
    assert said.exit_code == 0, said.stderr
    return said.json


def test_it_goes_through_all_commands_and_loaders(checkpoint: Path, tmp_path: Path, neuzip: Speak) -> None:
    plan, small, back = (tmp_path / name for name in ("plan.toml", "small", "back"))
    plan.write_bytes(plan_bytes(PlanFile((Rule("*", replace(STEP, row_factors=True), 2),)), []))
    assert 'scheme = "quantized"\nstep = 0.05\nrow_factors = true' in plan.read_text()
    planned = run(neuzip, "compress", checkpoint, small, "--plan", plan, "--dry-run")
    report = run(neuzip, "compress", checkpoint, small, "--plan", plan)
    assert {t["name"]: t["scheme"] for t in planned["tensors"]}["q.weight"] == "step=0.05 row factors"
    made = {t["name"]: t for t in report["tensors"]}
    assert {name: t["scheme"] for name, t in made.items()} == {
        "q.weight": "quantized 8-bit codes, row factors",
        "half.weight": "quantized 8-bit codes, row factors",
        "tied.weight": "same as q.weight",
        "infinite.weight": "lossless, 0 of 23 mantissa bits",
        "norm.weight": "lossless",
        "small.weight": "raw",
    }
    assert "infinities" in made["infinite.weight"]["note"]
    assert made["q.weight"]["loss"]["relative_l2"] == pytest.approx(0.05 / 12**0.5, rel=0.05)
    run(neuzip, "verify", small)
    verified = run(neuzip, "verify", small, "--original", checkpoint)
    assert {t["name"]: t["scheme"] for t in verified["tensors"]}["q.weight"] == "quantized"
    assert "quantized 8-bit codes, row factors" in str(run(neuzip, "inspect", small))
    run(neuzip, "decompress", small, back)

    weight = load_file(checkpoint / "model.safetensors")["q.weight"]
    spread = Spread(weight.numel(), 96)
    spread.add(weight.double().flatten().numpy())
    grid = Grid(0.05, spread.row_factors)
    expected = grid.values(grid.codes(weight), torch.bfloat16)
    restored = load_file(back / "model.safetensors")
    assert torch.equal(restored["q.weight"], expected)
    assert torch.equal(restored["tied.weight"], expected)
    assert json.loads((small / "neuzip/manifest.json").read_text())["requires"] == ["quantized"]
    assert json.loads((small / "config.json").read_text())["quantization_config"]["lossless"] is False
    loaded = _library().load_file(small / "model.safetensors")
    assert all(torch.equal(loaded[name], restored[name]) for name in restored)
    with _library().safe_open(small / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_slice("half.weight")[1:2], restored["half.weight"][1:2])
    with FolderSource(small) as source:
        tensors = [t for t in source.tensors() if t.name in ("q.weight", "half.weight")]
        on_gpu = read_on(torch.device("cpu"), source, tensors)
    assert all(torch.equal(w, restored[t.name]) for w, t in zip(on_gpu, tensors, strict=True))


def test_pages_for_people_compare_norms_and_not_single_weights(
    checkpoint: Path, tmp_path: Path, neuzip: Speak
) -> None:
    """A small weight that becomes 0 is off by all of it: the largest relative error says nothing."""
    compress(checkpoint, tmp_path / "small", [Rule("*", STEP, 2)])
    card = model_card(find_checkpoint(tmp_path / "small"), "", "me/small", "me/small")
    assert "neuzip rounded 3 of its 6 tensors,\nall of them to whole multiples of a step" in card
    assert "ternary" not in card and "relative error of a rounded weight" not in card
    loss = records(tmp_path / "small" / "model.safetensors")["q.weight"]["loss"]
    percent = f"{100 * loss['relative_l2']:.1f} %"
    assert f"Quantised tensors differ from the original by {percent} to {percent} in the L2 norm." in card
    scheme, l2 = "quantized, entropy-coded integers of up to 8 bits", loss["relative_l2"]
    assert f"| `q.weight` | {scheme} |  |  | {l2:.6g} |" in card
    table = neuzip("inspect", tmp_path / "small").stdout
    assert "L2 error" in table and "max error" not in table


def test_a_card_warns_of_ternary_tensors_among_quantized_ones(checkpoint: Path, tmp_path: Path) -> None:
    rules = [Rule("half.weight", Scheme("ternary")), Rule("*", STEP, 2)]
    compress(checkpoint, tmp_path / "small", rules, allow_destructive=True)
    card = model_card(find_checkpoint(tmp_path / "small"), "", "me/small", "me/small")
    assert "rounded 3 of its 6 tensors,\n2 of them to whole multiples of a step" in card
    assert "1 tensor is ternary" in card and "which ruins a model not trained for it." in card


def _library() -> Any:
    return neuzip


def test_a_model_is_loaded_and_described(tmp_path: Path) -> None:
    from models import GROUPED, llama

    from neuzip.formats.card.model_card import model_card
    from neuzip.formats.checkpoint import find_checkpoint

    model = llama(0, **{**GROUPED, "hidden_size": 64})
    model.save_pretrained(tmp_path / "model")
    compress(tmp_path / "model", tmp_path / "small", [Rule("*", Scheme("quantized", step=0.005), 2)])
    loaded = neuzip.load_model(tmp_path / "small", residency="dense", device="cpu")
    name = "model.layers.0.self_attn.q_proj.weight"
    grid, weight = Grid(0.005), model.get_parameter(name).detach()
    assert torch.equal(loaded.get_parameter(name), grid.values(grid.codes(weight), weight.dtype))
    card = model_card(find_checkpoint(tmp_path / "small"), "", "me/small", "small")
    assert "quantized, entropy-coded integers of up to" in card


def test_what_is_on_the_grid_loses_nothing(tmp_path: Path) -> None:
    whole = torch.randint(-6, 7, (100, 100), generator=torch.Generator().manual_seed(0)) / 8
    save_file({"w": whole.bfloat16()}, tmp_path / "w.safetensors")
    report = compress(
        tmp_path / "w.safetensors", tmp_path / "s.safetensors", [Rule("*", Scheme("quantized", step=0.125))]
    )
    assert [t.scheme for t in report.tensors] == ["quantized 4-bit codes, lossless"]
    assert report.tensors[0].loss is None
    decompress(tmp_path / "s.safetensors", tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == (tmp_path / "w.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("weight", "step", "note"),
    [
        (weights(64, 64), 1e-6, "weights need codes beyond -32768 to 32767 with the step 1e-06"),
        (weights(64, 64) * 5e37, 5e37, "codes of 4 bits with steps up to 5e+37 go beyond the largest BF16"),
        (weights(64, 64), 2e-4, "takes no less as codes"),
        (torch.full((64, 64), float("nan")), 0.1, "holds infinities or NaNs"),
        (torch.full((64, 64), 1e300, dtype=torch.float64), 0.1, "weights need codes beyond"),
    ],
)
def test_what_has_no_codes_is_kept_lossless(
    weight: torch.Tensor, step: float, note: str, tmp_path: Path
) -> None:
    save_file({"w": weight}, tmp_path / "w.safetensors")
    rules = [Rule("*", Scheme("quantized", step=step))]
    (tensor,) = compress(tmp_path / "w.safetensors", tmp_path / "s.safetensors", rules).tensors
    assert tensor.scheme.startswith("lossless")
    assert note in tensor.note
    assert tensor.note.endswith("kept lossless")


@pytest.mark.parametrize("shape", [(), (5000,), (1, 5000), (5000, 1), (2, 50, 50), (0, 7)])
def test_shapes(shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuzip.compress.pieces.OVERHEAD", -(10**9))
    monkeypatch.setattr("neuzip.compress.schemes.raw.CODED_MINIMUM", 0)
    weight = weights(*shape, dtype=torch.float32)
    save_file({"w": weight}, tmp_path / "w.safetensors")
    rules = [Rule("*", Scheme("quantized", step=0.25, row_factors=True, column_factors=True))]
    report = compress(tmp_path / "w.safetensors", tmp_path / "s.safetensors", rules)
    decompress(tmp_path / "s.safetensors", tmp_path / "back.safetensors")
    restored = load_file(tmp_path / "back.safetensors")["w"]
    if len(shape) > 1 and weight.numel():
        assert report.tensors[0].scheme.startswith("quantized")
    assert restored.shape == weight.shape
    assert bool(((restored - weight).abs() <= 0.25 * 248).all())


def test_the_bytes_do_not_depend_on_pieces_or_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": weights(3, 16384 + 4096)}, tmp_path / "w.safetensors")
    rules = [Rule("*", replace(STEP, row_factors=True, column_factors=True))]
    made = []
    for size, jobs in ((PIECE, 1), (16384, 2)):
        for module in ("pieces", "schemes.quantized_coding"):
            monkeypatch.setattr(f"neuzip.compress.{module}.PIECE", size)
        monkeypatch.setattr("neuzip.compress.encode_tensor.SMALL", size)
        compress(tmp_path / "w.safetensors", tmp_path / "s.safetensors", rules, jobs=jobs, overwrite=True)
        made.append((tmp_path / "s.safetensors").read_bytes())
    assert made[0] == made[1]
    verify(tmp_path / "s.safetensors")


def test_sizes_are_predicted() -> None:
    weight = weights(256, 200).view(torch.int16).numpy().view(np.uint8).reshape(-1)
    info = TensorInfo("w", "BF16", (256, 200), 0, weight.size)
    tensor = TensorInput(info, lambda start, stop: weight[start:stop])
    codec = codec_for(STEP)
    assert codec.predict(tensor, STEP) == pytest.approx(codec.encode(tensor, STEP).nbytes, rel=0.01)
    fine = replace(STEP, step=1e-9)
    assert codec.predict(tensor, fine) == codec_for(Scheme()).predict_exact(tensor)


@pytest.mark.parametrize("numel", [4096, 1 << 18])
@pytest.mark.parametrize(
    ("deviation", "form"), [(0.6, PAIRS), (2.0, PAIRS), (2.8, SINGLE), (20.0, None), (100.0, None)]
)
def test_codes_take_little_more_than_their_entropy(deviation: float, form: int | None, numel: int) -> None:
    """Of every spread, in small tensors too: tables take a byte a code, and no code is an escape for long."""
    codes = (weights(numel, dtype=torch.float32) * deviation).round().to(torch.int16).numpy()
    bits = code_bits(int(codes.min()), int(codes.max()))
    counted = count(shifted(codes, bits), bits)
    quantized = QuantizedCodes(codes, Grid(0.1), "", "", Loss(0, 0))
    coding = quantized.coding(map)
    assert form is None or coding.stored.form == form
    assert bool(coding.low_bits) == (deviation == 100)
    nbytes = sum(stream.nbytes for stream in quantized.streams(coding, map).values())
    grid = 16
    assert coding.nbytes == pytest.approx(
        nbytes - grid + bool(coding.low_bits) * STREAM_BYTES, rel=0.01, abs=40
    )
    shares = counted.exponents[counted.exponents > 0] / codes.size
    entropy = -(shares * np.log2(shares)).sum()
    assert 8 * nbytes / numel < entropy + 0.045 + 8 * 250 / numel


def test_pairs_that_are_not_independent_have_shares_of_their_own() -> None:
    """Codes that come twice: half of what independent ones take, and a table that says so."""
    codes = np.repeat((weights(1 << 16, dtype=torch.float32) * 1.5).round().to(torch.int16).numpy(), 2)
    quantized = QuantizedCodes(codes, Grid(0.1), "", "", Loss(0, 0))
    coding = quantized.coding(map)
    assert coding.stored.form == JOINT_PAIRS
    assert 8 * quantized.streams(coding, map)["words"].nbytes / codes.size < 1.5


def test_tables_follow_from_bytes_by_whole_numbers() -> None:
    """The steps of the specification, in Python's numbers: what another reader computes."""
    rng = np.random.default_rng(0)
    for form, count_ in ((SINGLE, 256), (SINGLE, 2), (PAIRS, 16), (PAIRS, 3), (JOINT_PAIRS, 5)):
        size = count_ * count_ if form == JOINT_PAIRS else count_
        for most in (256, 17, 2):
            shares = rng.integers(0, most, size).astype(np.uint8)
            shares[rng.integers(size)] = most - 1
            table = CodeTable(form, 3, shares).table
            words = [table.group, table.palette.size, table.frequencies.size]
            words += [*table.palette.tolist(), *table.frequencies.tolist()]
            stored = CodeTable(form, 3, shares).stored.tobytes()
            assert code_table(stored, 9 if form == SINGLE else 8)[: len(words)].tolist()[:2] == words[:2]
            other = code_table(stored, 9 if form == SINGLE else 8)
            f = np.trim_zeros(other[3 + int(other[1]) :], "b")
            assert f.tolist() == table.frequencies.tolist()


def test_shares_are_kept_to_a_thirtysecond() -> None:
    counts = np.array([1, 2, 3, 50, 999, 10**5, 10**9, 0])
    values = share_values(share_bytes(counts))
    assert values[-1] == 0 and values.argmax() == 6
    frequent = counts[4:7] * (31 << 15) // counts.max() >= 32
    ratio = values[4:7] / (counts[4:7] * ((31 << 15) / counts.max()))
    assert bool((abs(ratio - 1)[frequent] < 1 / 32).all())


def test_codes_have_the_least_bits_that_hold_them() -> None:
    for low, high, bits in ((0, 0, 2), (-2, 1, 2), (-3, 0, 3), (0, 2, 3), (-128, 127, 8), (-129, 0, 9)):
        assert code_bits(low, high) == bits
        codes = np.array([low, high], np.int16)
        assert shifted(codes, bits).tolist() == [low + 2 ** (bits - 1), high + 2 ** (bits - 1)]
    assert shifted(np.array([-32768, 32767], np.int16), 16).tolist() == [0, 65535]


# Codes from elsewhere


def prepared_for(weight: torch.Tensor) -> tuple[np.ndarray, Grid]:
    """Codes rounded down, which no rule makes."""
    grid = Grid(0.1, factor_bytes(torch.linspace(0.5, 2, len(weight))))
    codes = (weight.float() / grid.steps(weight.shape)).floor().to(torch.int16)
    return codes.numpy(), grid


def test_prepared_codes_are_stored_and_compared_with_the_source(checkpoint: Path, tmp_path: Path) -> None:
    weight = load_file(checkpoint / "model.safetensors")["q.weight"]
    codes, grid = prepared_for(weight)
    prepared = Prepared({"q.weight": (codes, grid)})
    report = compress(checkpoint, tmp_path / "small", RULES, prepared=prepared)
    restored = neuzip.load_file(tmp_path / "small/model.safetensors")
    expected = grid.values(torch.from_numpy(codes), torch.bfloat16)
    assert torch.equal(restored["q.weight"], expected)
    loss = {t.name: t.loss for t in report.tensors}["q.weight"]
    error = (expected.double() - weight.double()).norm() / weight.double().norm()
    assert loss is not None and loss.relative_l2 == pytest.approx(float(error), rel=1e-5)
    assert set(prepared.asked) == {"q.weight", "half.weight", "infinite.weight"}
    plain = compress(checkpoint, tmp_path / "plain", RULES)
    assert {t.name: t for t in plain.tensors}["half.weight"] == {t.name: t for t in report.tensors}[
        "half.weight"
    ]


def test_prepared_codes_of_another_identity_are_not_resumed(checkpoint: Path, tmp_path: Path) -> None:
    weight = load_file(checkpoint / "model.safetensors")["q.weight"]
    prepared = Prepared({"q.weight": prepared_for(weight)})
    compress(checkpoint, tmp_path / "small", RULES, prepared=prepared)
    assert compress(checkpoint, tmp_path / "small", RULES, prepared=prepared).resumed_files == 1
    for other in (None, replace(prepared, identity="calibration 2")):
        with pytest.raises(NeuzipError, match="small"):
            compress(checkpoint, tmp_path / "small", RULES, prepared=other)


@pytest.mark.parametrize(
    ("codes", "grid", "problem"),
    [
        (np.zeros((4, 5), np.int16), Grid(0.1), "q.weight: the prepared codes are int16 of shape"),
        (np.zeros((48, 96), np.int32), Grid(0.1), "q.weight: the prepared codes are int32 of shape"),
        (np.zeros((48, 96), np.int16), Grid(0.1, torch.zeros(7, dtype=torch.uint8)), "48 row factors"),
    ],
)
def test_prepared_codes_that_do_not_fit_are_refused(
    codes: np.ndarray, grid: Grid, problem: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(NeuzipError, match=problem):
        compress(checkpoint, tmp_path / "small", RULES, prepared=Prepared({"q.weight": (codes, grid)}))


def test_prepared_codes_need_one_process_and_no_base(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="memory of one process, and there are 2"):
        compress(checkpoint, tmp_path / "s", RULES, prepared=Prepared({}), ranks=Ranks(0, 2))
    with FolderSource(checkpoint) as source, pytest.raises(UsageError, match="`base` excludes prepared"):
        compress(checkpoint, tmp_path / "s", prepared=Prepared({}), base=DeltaBase(source, "base"))


# Rules and features


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("", "the scheme 'quantized' needs a step"),
        ("step = 0", "`step=0`: is no positive number that fp32 has"),
        ("step = -0.5", "`step=-0.5`: is no positive number"),
        ("step = nan", "`step=nan`: is no positive number"),
        ("step = inf", "`step=inf`: is no positive number"),
        ("step = 1e-40", "`step=1e-40`: is no positive number"),
        ("step = true", "`step=True`: is no positive number"),
        ('step = "x"', "`step='x'`: is no positive number"),
        ("step = 0.1\nrow_factors = 1", "`row_factors=1` is not true or false"),
        ("step = 0.1\nmantissa_bits = 3", "the scheme 'quantized' with mantissa bits 3"),
        ("step = 0.1\ngroup = 3", "the scheme 'quantized' has no group"),
    ],
)
def test_rules_are_checked(rule: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(f'[[rule]]\nmatch = "*"\nscheme = "quantized"\n{rule}\n')
    with pytest.raises(NeuzipError) as raised:
        read_plan_file(tmp_path / "plan.toml")
    assert problem in raised.value.message


def test_a_step_is_for_quantized_rules_only() -> None:
    with pytest.raises(UsageError, match="the scheme 'lossless' has no step"):
        Scheme(step=0.1)


def test_an_older_reader_refuses_it_by_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress(checkpoint, tmp_path / "small", RULES)
    monkeypatch.setattr("neuzip.formats.manifest.KNOWN_REQUIREMENTS", frozenset({"delta", "pool"}))
    for path in (tmp_path / "small", tmp_path / "small" / "model.safetensors"):
        with pytest.raises(FormatError, match="requires 'quantized', which this neuzip does not know"):
            verify(path)
    assert check_requirements({"requires": ["pool"]}, "file") == ["pool"]


def test_lossless_files_require_nothing_new(checkpoint: Path, tmp_path: Path) -> None:
    compress(checkpoint, tmp_path / "small")
    assert "requires" not in json.loads((tmp_path / "small/neuzip/manifest.json").read_text())
    assert all(r["scheme"] != "quantized" for r in records(tmp_path / "small/model.safetensors").values())


def test_a_pushed_folder_requires_the_feature_too(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "README.md").write_text("# Mine\n")
    compress(checkpoint, tmp_path / "small", RULES)
    contents = {file.path: file.content for file in plan_push(tmp_path / "small", "me/small").files}
    manifest = contents["neuzip/manifest.json"]
    assert isinstance(manifest, bytes)
    assert json.loads(manifest)["requires"] == ["quantized"]
    assert json.loads(manifest)["files"]["README.md"]["kind"] == "rewritten"


def test_a_gpu_restores_the_same(tmp_path: Path) -> None:
    """The card, or the CPU with the kernels interpreted. Corrupt words are named as by the CPU."""
    card = Device("card", Gpu(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    wide = weights(40, 72, dtype=torch.float32) * torch.linspace(0.3, 3, 40)[:, None]
    save_file({"a": weights(60, 40), "b": wide, "c": weights(3001, seed=1)}, tmp_path / "plain.safetensors")
    rules = [
        Rule("a", STEP),
        Rule("b", Scheme("quantized", step=0.1, row_factors=True, column_factors=True)),
        Rule("c", Scheme("quantized", step=0.5)),
    ]
    small = tmp_path / "small.safetensors"
    compress(tmp_path / "plain.safetensors", small, rules)
    assert {record["scheme"] for record in records(small).values()} == {"quantized"}
    decompress(small, tmp_path / "here.safetensors")
    report = decompress(small, tmp_path / "there.safetensors", device=card)
    assert report.device == "card"
    assert (tmp_path / "there.safetensors").read_bytes() == (tmp_path / "here.safetensors").read_bytes()

    with FolderSource(small) as source:
        tensor = next(t for t in source.tensors() if t.name == "b")
        at = next(e.start for e in source.extents(tensor) if e.stream == "words") + 2
    data = bytearray(small.read_bytes())
    data[at] ^= 1
    small.write_bytes(data)
    with FolderSource(small, device=card) as source:
        tensor = next(t for t in source.tensors() if t.name == "b")
        with pytest.raises(FormatError, match="from block 0 on: block 0 is corrupt"):
            source.read(tensor)
