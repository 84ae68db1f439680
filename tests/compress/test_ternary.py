"""The scheme `ternary`: what is written, what comes back, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from bits import same_bits
from conftest import RunAlone
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuzip.compress import Rule, Scheme, compress, decompress, verify
from neuzip.compress.rules import LOSSLESS
from neuzip.compress.rules_file import read_plan_file
from neuzip.compress.schemes import ternary_coding
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.ternary_weights import read_ternary
from neuzip.errors import FormatError, NeuzipError, UsageError
from neuzip.formats.card.model_card import model_card
from neuzip.formats.checkpoint import find_checkpoint
from neuzip.formats.container import Container
from neuzip.formats.records import Record
from neuzip.kernels import quantizers
from neuzip.runtime import load_file as runtime_load

Speak = Callable[..., Any]

QUANTIZERS = {
    "absmean": quantizers.absmean,
    "absmean-clamped": partial(quantizers.absmean, clamped=True),
    "least-squares": quantizers.least_squares,
}
TERNARY = Rule("*", Scheme("ternary"), min_dimensions=2)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def ternary_values(*shape: int, dtype: torch.dtype = torch.bfloat16, group: int | None = None) -> Tensor:
    """Weights that are -s, +0 and s already."""
    values = quantizers.absmean(randn(*shape), group=group).dequantize(dtype)
    return values.masked_fill(values == 0, 0)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def packed(
    folder: Path, tensors: dict[str, Tensor], rules: list[Rule] | None = None, allow: bool = True
) -> Path:
    """A container of these tensors; the source lies beside it as source.safetensors."""
    save_file(tensors, folder / "source.safetensors")
    out = folder / "packed.safetensors"
    compress(folder / "source.safetensors", out, rules or [TERNARY], overwrite=True, allow_destructive=allow)
    return out


def restored(path: Path) -> dict[str, Tensor]:
    back = path.with_name("back.safetensors")
    decompress(path, back, overwrite=True)
    return load_file(back)


def records(path: Path) -> dict[str, Record]:
    with Container(path) as container:
        return dict(container.manifest.tensors)


# Codes and scales


SHAPES = st.one_of(
    st.tuples(st.integers(1, 60)),
    st.tuples(st.integers(1, 9), st.integers(1, 70)),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 20)),
)


@given(
    shape=SHAPES,
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    group=st.one_of(st.none(), st.just("row"), st.integers(1, 80)),
    packing=st.sampled_from(["trits", "2bit"]),
    quantizer=st.sampled_from(list(QUANTIZERS)),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 99),
)
def test_streams_hold_what_the_quantizer_makes(
    shape: tuple[int, ...], dtype: torch.dtype, group: int | str | None, packing: str, quantizer: str,
    cut: tuple[float, float], seed: int,
) -> None:  # fmt: skip
    weight = randn(*shape, dtype=dtype, seed=seed)
    scheme = Scheme("ternary", quantizer=quantizer, group=group, packing=packing)
    with mock.patch("neuzip.compress.pieces.OVERHEAD", -(10**9)):
        coded = ternary_coding.encode(weight, scheme)
    decoder = coded.decoder(dtype)
    if coded.quantizer == "exact":
        assert torch.equal(decoder.ternary().dequantize(dtype), weight)
    else:
        size = shape[-1] if group == "row" else group
        size = min(size, shape[-1]) if isinstance(size, int) else None
        expected = QUANTIZERS[quantizer](weight, group=size)
        assert torch.equal(decoder.ternary().codes, expected.codes)
        assert torch.equal(decoder.ternary().scale, expected.scale)
        assert same_bits(decoder.weights(0, weight.numel()), decoder.ternary().dequantize(dtype).reshape(-1))
    lengths = coded.layout.stream_bytes
    assert {name: stream.nbytes for name, stream in coded.streams.items()} == {
        name: -(-nbytes // 16) * 16 for name, nbytes in lengths.items()
    }
    start, stop = sorted(round(share * weight.numel()) for share in cut)
    part = decoder.read(start, stop)
    assert part.tobytes() == decoder.read(0, weight.numel())[start:stop].tobytes()


def test_packings_take_8_fifths_and_2_bits() -> None:
    weight = randn(256, 1600)
    for packing, bits in (("trits", 1.6), ("2bit", 2)):
        coded = ternary_coding.encode(weight, Scheme("ternary", packing=packing))
        assert coded.streams["codes"].nbytes == weight.numel() * bits / 8
        assert coded.streams["scale"].nbytes == 16


def test_words_are_those_that_kernels_multiply() -> None:
    """A row of "2bit" is what pack_ternary makes of it: to be sent to a GPU as it is."""
    weight = randn(20, 75)
    coded = ternary_coding.encode(weight, Scheme("ternary", packing="2bit"))
    words = np.concatenate(coded.streams["codes"].parts)[: 20 * 5 * 4].view("<i4").reshape(20, 5)
    expected = quantizers.pack_ternary(quantizers.absmean(weight).codes)
    assert torch.equal(torch.from_numpy(words), expected)


def test_scales_in_fp16_are_rounded_before_anything_else(tmp_path: Path) -> None:
    weight = randn(64, 128)
    path = packed(tmp_path, {"w": weight}, [Rule("*", Scheme("ternary", group=32, scale_dtype="F16"))])
    expected = quantizers.absmean(weight, group=32)
    with FolderSource(path) as source:
        found = read_ternary(source, "w")
    assert torch.equal(found.scale, expected.scale.half().float())
    assert torch.equal(found.codes, expected.codes)
    assert same_bits(restored(path)["w"], found.dequantize(torch.bfloat16))


@pytest.mark.parametrize("factor", [1e-12, 1e9])
def test_scales_that_fp16_cannot_hold_stay_lossless(factor: float, tmp_path: Path) -> None:
    weight = randn(64, 128, dtype=torch.float32) * factor
    save_file({"w": weight}, tmp_path / "s.safetensors")
    rules = [Rule("*", Scheme("ternary", scale_dtype="F16"))]
    report = compress(tmp_path / "s.safetensors", tmp_path / "p.safetensors", rules, allow_destructive=True)
    assert report.tensors[0].scheme == "lossless"
    assert report.tensors[0].note == "has scales that fp16 cannot hold: kept lossless"
    assert same_bits(restored(tmp_path / "p.safetensors")["w"], weight)


# What comes back


@pytest.mark.parametrize("packing", ["trits", "2bit"])
@pytest.mark.parametrize("group", [None, "row", 48])
def test_weights_come_back_as_scale_times_code(group: Any, packing: str, tmp_path: Path) -> None:
    tensors = {"a": randn(70, 101), "b": randn(9, 40, 30, dtype=torch.float16), "c": randn(60, 60).float()}
    scheme = Scheme("ternary", group=group, packing=packing)
    path = packed(tmp_path, tensors, [Rule("*", scheme)])
    back = restored(path)
    for name, weight in tensors.items():
        size = None if group is None else min(group, weight.shape[-1]) if group != "row" else weight.shape[-1]
        made = quantizers.absmean(weight, group=size)
        assert same_bits(back[name], made.dequantize(weight.dtype)), name
        record = records(path)[name]
        assert (record.scheme, record.quantizer, record.lossless) == ("ternary", "absmean", False)
        assert record.group == size
        assert record.loss is not None
        error = (back[name].double() - weight.double()).norm() / weight.double().norm()
        assert record.loss.relative_l2 == pytest.approx(float(error), rel=1e-5)
        assert record.loss.max_relative >= 1  # what became 0 is off by all of it
    verdicts = verify(path, tmp_path / "source.safetensors").tensors
    assert all(v.identical is False and not v.lossless for v in verdicts)


def test_least_squares_loses_less_than_absmean(tmp_path: Path) -> None:
    losses = []
    for quantizer in ("absmean", "least-squares"):
        path = packed(tmp_path, {"w": randn(64, 256)}, [Rule("*", Scheme("ternary", quantizer=quantizer))])
        losses.append(records(path)["w"].loss)
    assert losses[1].relative_l2 < 0.95 * losses[0].relative_l2  # type: ignore[union-attr]


def test_zeros_are_positive_and_zero_tensors_stay_zero(tmp_path: Path) -> None:
    weight = randn(64, 128)
    weight[weight.abs() < 0.001] = -0.0
    back = restored(packed(tmp_path, {"w": weight, "zero": torch.zeros(64, 128)}))
    assert not bool(back["w"][back["w"] == 0].signbit().any())
    assert same_bits(back["zero"], torch.zeros(64, 128))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_tensors_with_infinities_or_nans_stay_lossless(value: float, tmp_path: Path) -> None:
    weight = randn(64, 128)
    weight[3, 5] = value
    save_file({"w": weight}, tmp_path / "s.safetensors")
    target = tmp_path / "p.safetensors"
    report = compress(tmp_path / "s.safetensors", target, [TERNARY], allow_destructive=True)
    assert report.tensors[0].note == "holds infinities or NaNs: kept lossless"
    assert same_bits(restored(target)["w"], weight)


def test_tensors_of_few_weights(tmp_path: Path) -> None:
    """Empty, of one weight, of no dimensions, and of rows of one weight, though coding them does not pay."""
    tensors = {
        "empty": torch.zeros(0, 4), "no columns": torch.zeros(4, 0), "scalar": torch.tensor(2.5),
        "one": torch.tensor([[-0.5]]), "column": randn(40, 1), "flat": randn(33),
    }  # fmt: skip
    with (
        mock.patch("neuzip.compress.pieces.OVERHEAD", -(10**9)),
        mock.patch("neuzip.compress.schemes.raw.CODED_MINIMUM", 0),
    ):
        for group in (None, "row", 7):
            path = packed(tmp_path, tensors, [Rule("*", Scheme("ternary", group=group))])
            back = restored(path)
            for name in ("empty", "no columns", "scalar", "one"):
                assert same_bits(back[name], tensors[name]), (name, group)
            schemes = {name: record.scheme for name, record in records(path).items()}
            assert [schemes[n] for n in ("one", "column", "flat")] == ["ternary"] * 3
            assert schemes["empty"] == schemes["no columns"] == "raw"
            assert schemes["scalar"] == "lossless"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_other_floats_stay_lossless(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = randn(80, 128, dtype=torch.float32).to(dtype)
    save_file({"w": weight}, tmp_path / "s.safetensors")
    target = tmp_path / "p.safetensors"
    report = compress(tmp_path / "s.safetensors", target, [TERNARY], allow_destructive=True)
    assert "has no ternary form" in report.tensors[0].note
    assert same_bits(restored(target)["w"], weight)


# What is ternary already


@pytest.mark.parametrize(
    "rules", [[LOSSLESS], [Scheme("ternary", packing="2bit", quantizer="least-squares")]]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", [None, 101])
def test_ternary_weights_are_recognised_and_exact(
    group: int | None, dtype: torch.dtype, rules: list[Scheme], tmp_path: Path
) -> None:
    weight = ternary_values(70, 101, dtype=dtype, group=group)
    path = packed(tmp_path, {"w": weight}, [Rule("*", scheme) for scheme in rules], allow=False)
    record = records(path)["w"]
    assert (record.scheme, record.quantizer, record.group) == ("ternary", "exact", group)
    assert record.lossless
    assert record.loss is None
    assert record.packing == rules[0].packing
    assert restored(path)["w"].dtype == dtype
    assert path.with_name("back.safetensors").read_bytes() == (tmp_path / "source.safetensors").read_bytes()
    assert [v.identical for v in verify(path, tmp_path / "source.safetensors").tensors] == [True]


def test_groups_are_recognised_where_they_are_asked_for(tmp_path: Path) -> None:
    weight = ternary_values(64, 128, group=32)
    path = packed(tmp_path, {"w": weight}, [Rule("*", Scheme("ternary", group=32))], allow=False)
    assert records(path)["w"].group == 32
    assert records(path)["w"].lossless
    with pytest.raises(NeuzipError, match="1 of 1 tensors"):
        packed(tmp_path, {"w": weight}, [TERNARY], allow=False)


def test_fp16_scales_never_cost_exactness(tmp_path: Path) -> None:
    weight = ternary_values(64, 128, dtype=torch.float32) * 1.0001
    path = packed(tmp_path, {"w": weight}, [Rule("*", Scheme("ternary", scale_dtype="F16"))], allow=False)
    assert records(path)["w"].scale_dtype == "F32"
    assert records(path)["w"].lossless


def test_restored_weights_are_exact_the_second_time(tmp_path: Path) -> None:
    """The absmean of alpha T is alpha times the density of T: to quantise again would shrink the scale."""
    first = packed(tmp_path, {"w": randn(64, 128)})
    back = restored(first)["w"]
    (tmp_path / "second").mkdir()
    second = packed(tmp_path / "second", {"w": back}, [TERNARY], allow=False)
    with FolderSource(first) as a, FolderSource(second) as b:
        once, twice = read_ternary(a, "w"), read_ternary(b, "w")
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(once.scale.bfloat16().float(), twice.scale)
    assert same_bits(restored(second)["w"], back)


def test_negative_zeros_are_no_loss_of_value_but_of_bits(tmp_path: Path) -> None:
    """Checkpoints often have them: they come from rounding small negative weights."""
    weight = ternary_values(64, 128)
    weight[weight == 0] = -0.0
    plain = packed(tmp_path, {"w": weight}, [Rule("*", LOSSLESS)])
    assert records(plain)["w"].scheme == "lossless"
    assert same_bits(restored(plain)["w"], weight)
    asked = packed(tmp_path, {"w": weight}, [TERNARY], allow=False)
    record = records(asked)["w"]
    assert (record.quantizer, record.lossless) == ("exact", False)
    assert record.loss is not None
    assert vars(record.loss) == {"max_relative": 0.0, "rms_relative": 0.0, "relative_l2": 0.0}
    assert torch.equal(restored(asked)["w"], weight)


def test_what_floats_code_in_less_stays_so(tmp_path: Path) -> None:
    """A power of two and few zeros: a bit for the sign, and next to nothing for the exponent."""
    weight = torch.where(randn(100, 200) > 0, 0.25, -0.25)
    assert records(packed(tmp_path, {"w": weight}, [Rule("*", LOSSLESS)]))["w"].scheme == "lossless"


def test_a_weight_too_many_is_found(tmp_path: Path) -> None:
    """Somewhere that the first look does not reach."""
    weight = ternary_values(64, 128)
    weight[11, 77] = 0.5
    assert records(packed(tmp_path, {"w": weight}, [Rule("*", LOSSLESS)]))["w"].scheme == "lossless"
    with pytest.raises(NeuzipError, match="1 of 1 tensors"):
        packed(tmp_path, {"w": weight}, [TERNARY], allow=False)


# What is refused


def test_other_weights_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_file({"a": ternary_values(64, 128), "b": randn(64, 128)}, tmp_path / "s.safetensors")
    with pytest.raises(NeuzipError) as refused:
        compress(tmp_path / "s.safetensors", tmp_path / "p.safetensors", [TERNARY])
    assert "1 of 2 tensors" in refused.value.message
    assert "'b' first" in refused.value.message
    assert "13.9 to 3.8e6" in refused.value.message
    assert "`allow_destructive=True`" in refused.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def test_masters_of_an_online_bitnet_model_were_trained_for_it(neuzip: Speak, tmp_path: Path) -> None:
    """Transformers takes their clamped absmean in every forward pass: that is no destruction."""
    weight = randn(64, 128, dtype=torch.float32)
    source = tmp_path / "model"
    source.mkdir()
    save_file({Q_PROJ: weight}, source / "model.safetensors")
    how = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    (source / "config.json").write_text(json.dumps({"quantization_config": how}))
    said = neuzip("compress", source, tmp_path / "small", "--ternary")
    assert said.exit_code == 1
    assert "config.json says bitnet, online" in said.stderr
    assert "--ternary-quantizer absmean-clamped" in said.stderr
    said = neuzip(
        "compress", source, tmp_path / "small", "--ternary", "--ternary-quantizer", "absmean-clamped"
    )
    assert said.exit_code == 0
    record = records(tmp_path / "small" / "model.safetensors")[Q_PROJ]
    assert (record.quantizer, record.lossless) == ("absmean-clamped", False)
    with FolderSource(tmp_path / "small") as stored:
        found = read_ternary(stored, Q_PROJ)
    scale = 1 / weight.abs().mean().clamp(min=1e-5)
    assert torch.equal(found.codes.float(), (weight * scale).round().clamp(-1, 1))
    # Who reads the floats takes their absmean once more, and shall find the one that it was.
    torch.testing.assert_close(found.dequantize().abs().mean(), weight.abs().mean(), rtol=1e-5, atol=0)
    kept = how | {"modules_to_not_convert": ["lm_head", Q_PROJ.split(".")[-2]]}
    (source / "config.json").write_text(json.dumps({"quantization_config": kept}))
    options = ["--ternary", "--ternary-quantizer", "absmean-clamped", "--overwrite"]
    assert "3.8e6" in neuzip("compress", source, tmp_path / "small", *options).stderr
    (source / "config.json").write_text(
        json.dumps({"quantization_config": how | {"quantization_mode": "offline"}})
    )
    options = ["--ternary", "--ternary-quantizer", "absmean-clamped", "--overwrite"]
    assert "3.8e6" in neuzip("compress", source, tmp_path / "small", *options).stderr


def test_tensors_of_zeros_are_mentioned(tmp_path: Path) -> None:
    """Published checkpoints had such ones by mistake (microsoft/BitNet, issue 608)."""
    save_file({"w": torch.zeros(64, 128)}, tmp_path / "s.safetensors")
    report = compress(tmp_path / "s.safetensors", tmp_path / "p.safetensors", [TERNARY])
    assert (report.tensors[0].scheme, report.tensors[0].note) == (
        "ternary exact, lossless", "all its weights are 0",
    )  # fmt: skip


def test_zeros_are_mentioned_where_one_has_a_sign(tmp_path: Path) -> None:
    zeros = torch.zeros(128, 256, dtype=torch.bfloat16)
    zeros[3, 5] = -0.0
    save_file({"w": zeros}, tmp_path / "in.safetensors")
    (report,) = compress(tmp_path / "in.safetensors", tmp_path / "out.safetensors").tensors
    assert (report.scheme, report.note) == ("lossless, 0 of 7 mantissa bits", "all its weights are 0")


def test_a_dry_run_sees_what_is_ternary(neuzip: Speak, tmp_path: Path) -> None:
    save_file(
        {"w": ternary_values(300, 500), "b": ternary_values(100, 300, group=300)}, tmp_path / "s.safetensors"
    )
    options = ["compress", tmp_path / "s.safetensors", tmp_path / "p.safetensors", "--json"]
    predicted, made = neuzip(*options, "--dry-run").json, neuzip(*options).json
    assert predicted["stored_bytes"] == pytest.approx(made["stored_bytes"], rel=0.05)
    assert made["lossless"] is True


def test_packed_bitnet_weights_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    tensors = {
        Q_PROJ: torch.arange(64 * 128, dtype=torch.uint8).reshape(64, 128),
        f"{Q_PROJ}_scale": torch.ones(1),
    }
    with pytest.raises(NeuzipError, match="holds ternary weights packed for transformers' bitnet"):
        packed(tmp_path, tensors)
    assert records(packed(tmp_path, tensors, [Rule("*", LOSSLESS)]))[Q_PROJ].scheme == "raw"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quantizer": "median"}, "'median' is no quantizer"),
        ({"packing": "3bit"}, "'3bit' is no packing"),
        ({"scale_dtype": "BF16"}, "'BF16' is no scale_dtype"),
        ({"group": 0}, "the group 0 is no number"),
        ({"group": True}, "the group True is no number"),
        ({"group": "column"}, "the group 'column' is no number"),
        ({"mantissa_bits": 3}, "with mantissa bits 3"),
        ({"kind": "lossless", "group": 128}, "'lossless' has no group"),
    ],
)
def test_schemes_that_cannot_be(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Scheme(**{"kind": "ternary", **options})


# Containers of several schemes


def test_one_folder_mixes_all_schemes(tmp_path: Path, save: Callable[..., Path]) -> None:
    weight, embedding = randn(64, 128), randn(300, 64)
    source = tmp_path / "model"
    source.mkdir()
    save_file({Q_PROJ: weight, "norm.weight": randn(3000)}, source / "model-1.safetensors")
    save_file(
        {"embed.weight": embedding, "tied": weight.clone(), "ids": torch.arange(9)},
        source / "model-2.safetensors",
    )
    (source / "config.json").write_text('{"model_type": "llama"}')
    rules = [
        Rule("embed*", Scheme("truncated", 3)),
        Rule("tied", Scheme("ternary")),
        Rule("*_proj*", Scheme("ternary")),
        Rule("*", LOSSLESS),
    ]
    report = compress(source, tmp_path / "small", rules, allow_destructive=True)
    assert {t.name: t.scheme for t in report.tensors} == {
        Q_PROJ: "ternary absmean", "norm.weight": "lossless", "embed.weight": "k=3",
        "tied": f"same as {Q_PROJ}", "ids": "raw",
    }  # fmt: skip
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization_config"]["lossless"] is False
    verdicts = {v.name: v for v in verify(tmp_path / "small", source).tensors}
    assert {name for name, v in verdicts.items() if v.identical} == {"norm.weight", "ids"}
    assert verdicts["tied"].scheme == "ternary"
    again = compress(source, tmp_path / "small", rules, allow_destructive=True)
    assert again.resumed_files == 2
    decompress(tmp_path / "small", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model-2.safetensors")
    assert same_bits(back["tied"], quantizers.absmean(weight).dequantize(torch.bfloat16))
    with FolderSource(tmp_path / "small") as stored:
        assert torch.equal(read_ternary(stored, "tied").codes, quantizers.absmean(weight).codes)
        for name, problem in (("embed.weight", "is not stored ternary"), ("x", "has no tensor 'x'")):
            with pytest.raises(NeuzipError, match=problem):
                read_ternary(stored, name)
    loaded = runtime_load.load_file(tmp_path / "small" / "model-1.safetensors")
    assert same_bits(loaded[Q_PROJ], back["tied"])


def test_a_real_model(neuzip_data: Path, tmp_path: Path) -> None:
    """Its 42 projections take 1.6 bits a weight; made ternary once, the checkpoint is so without loss."""
    rules = [Rule("*_proj.weight", Scheme("ternary"))]
    report = compress(neuzip_data / "wikilm-26m", tmp_path / "small", rules, allow_destructive=True)
    made = [t for t in report.tensors if t.scheme == "ternary absmean"]
    assert len(made) == 42
    assert sum(t.stored_bytes for t in made) == pytest.approx(
        0.1 * sum(t.original_bytes for t in made), rel=1e-3
    )
    decompress(tmp_path / "small", tmp_path / "back")
    again = compress(tmp_path / "back", tmp_path / "again")
    assert [t.scheme for t in again.tensors].count("ternary exact, lossless") == 42
    assert again.stored_weight_bytes == pytest.approx(report.stored_weight_bytes, rel=1e-3)
    assert all(v.identical for v in verify(tmp_path / "again", tmp_path / "back").tensors)


def test_damaged_codes_are_not_read(tmp_path: Path) -> None:
    path = packed(tmp_path, {"w": randn(64, 128)})
    with FolderSource(path) as source:
        extents = source.extents(next(source.tensors()))
    data = bytearray(path.read_bytes())
    data[next(e.start for e in extents if e.stream == "codes") + 100] ^= 1
    path.write_bytes(data)
    with FolderSource(path) as source, pytest.raises(FormatError, match="the file is damaged"):
        read_ternary(source, "w")
    with pytest.raises(FormatError, match="the file is damaged"):
        verify(path)


def test_the_same_bytes_again(tmp_path: Path) -> None:
    tensors = {"a": randn(300, 500), "b": ternary_values(64, 128), "c": randn(64, 128)}
    once = packed(tmp_path, tensors).read_bytes()
    target = tmp_path / "again.safetensors"
    compress(tmp_path / "source.safetensors", target, [TERNARY], jobs=1, allow_destructive=True)
    assert target.read_bytes() == once


@pytest.mark.slow
def test_who_has_nothing_ternary_does_not_wait_for_torch(tmp_path: Path, run_without_torch: RunAlone) -> None:
    source, target = tmp_path / "s.safetensors", tmp_path / "p.safetensors"
    save_file({"w": randn(64, 128), "zero": torch.zeros(3000)}, source)
    script = (
        "import sys; from neuzip.compress import compress, verify; "
        "source, target = sys.argv[1:]; compress(source, target); verify(target); "
        "sys.exit('torch' in sys.modules)"
    )
    run_without_torch(script, source, target)


# Plans and options


def test_plan_files_name_ternary_schemes(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        '[[rule]]\nmatch = "*fc1*"\nscheme = "ternary"\nquantizer = "least-squares"\ngroup = 128\n'
        'packing = "2bit"\nscale_dtype = "F16"\n[[rule]]\nmatch = "*"\nscheme = "ternary"\ngroup = "row"\n'
    )
    first, second = read_plan_file(path)
    assert first.scheme == Scheme("ternary", None, None, "least-squares", 128, "2bit", "F16")
    assert first.to_json() == {
        "match": "*fc1*", "scheme": "ternary", "quantizer": "least-squares", "group": 128, "packing": "2bit",
        "scale_dtype": "F16",
    }  # fmt: skip
    assert second.scheme == Scheme("ternary", group="row")
    path.write_text('[[rule]]\nmatch = "*"\nscheme = "ternary"\ngroup = [1]\n')
    with pytest.raises(NeuzipError, match=r"rule 1: the group \[1\]"):
        read_plan_file(path)
    path.write_text('[[rule]]\nmatch = "*"\npacking = "2bit"\n')
    with pytest.raises(NeuzipError, match="rule 1: the scheme 'lossless' has no packing"):
        read_plan_file(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with projections, an embedding and a norm."""
    root = tmp_path / "model"
    root.mkdir()
    layer = "model.layers.0."
    tensors = {
        f"{layer}self_attn.q_proj.weight": randn(64, 128),
        f"{layer}mlp.down_proj.weight": randn(128, 96, seed=1),
        f"{layer}mlp.gate.weight": randn(40, 128, seed=2),
        f"{layer}self_attn.q_proj.bias": randn(3000, seed=3),
        "model.embed_tokens.weight": randn(300, 128, seed=4),
        "lm_head.weight": randn(300, 128, seed=5),
    }
    save_file(tensors, root / "model.safetensors")
    (root / "config.json").write_text('{"model_type": "llama"}')
    return root


def test_the_option_is_for_the_projections_of_layers(neuzip: Speak, model: Path, tmp_path: Path) -> None:
    refused = neuzip("compress", model, tmp_path / "small", "--ternary")
    assert refused.exit_code == 1
    assert "2 of 2 tensors that are to be ternary" in refused.stderr
    assert "3.8e6" in refused.stderr
    assert "--allow-destructive" in refused.stderr
    assert not (tmp_path / "small").exists()
    assert neuzip("compress", model, tmp_path / "small", "--ternary", "--dry-run").exit_code == 1
    options = ["--ternary", "--allow-destructive", "--ternary-group", "row", "--mantissa-bits", 2]
    predicted = neuzip("compress", model, tmp_path / "small", *options, "--dry-run", "--json").json
    said = neuzip("compress", model, tmp_path / "small", *options, "--json").json
    assert predicted["stored_bytes"] == pytest.approx(said["stored_bytes"], rel=0.02)
    schemes = {t["name"].removeprefix("model.layers.0."): t["scheme"] for t in said["tensors"]}
    assert schemes == {
        "self_attn.q_proj.weight": "ternary absmean group=128",
        "mlp.down_proj.weight": "ternary absmean group=96",
        "mlp.gate.weight": "k=2",
        "self_attn.q_proj.bias": "lossless",
        "model.embed_tokens.weight": "k=2",
        "lm_head.weight": "k=2",
    }
    said = neuzip("verify", tmp_path / "small", "--original", model)
    assert "1 tensor identical, 5 rounded as recorded" in said.stdout
    assert "ternary" in neuzip("inspect", tmp_path / "small").stdout


def test_a_ternary_model_needs_no_permission(neuzip: Speak, model: Path, tmp_path: Path) -> None:
    neuzip("compress", model, tmp_path / "small", "--ternary", "--allow-destructive", "-q")
    neuzip("decompress", tmp_path / "small", tmp_path / "bitnet", "-q")
    said = neuzip("compress", tmp_path / "bitnet", tmp_path / "again", "--ternary")
    assert said.exit_code == 0
    assert "lossless: all 6 tensors, bit for bit" in said.stdout
    said = neuzip("compress", model, tmp_path / "human", "--ternary", "--allow-destructive")
    assert "tensors rounded to ternary: they differ from the original by 5" in said.stdout


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--ternary", "--include", "*q_proj*"], "--ternary excludes --include"),
        (["--ternary", "--plan", "plan.toml"], "--plan excludes"),
        (["--ternary", "--max-kld", "0.1"], "--max-kld excludes --ternary"),
        (["--ternary", "--ternary-group", "none"], "--ternary-group none is neither a number"),
        (["--ternary", "--ternary-group", "0"], "the group 0 is no number"),
    ],
)
def test_options_that_contradict_each_other(
    options: list[str], problem: str, neuzip: Speak, model: Path, tmp_path: Path
) -> None:
    said = neuzip("compress", model, tmp_path / "small", *options)
    assert said.exit_code == 2
    assert problem in said.stderr
    assert not (tmp_path / "small").exists()


def test_models_with_other_names_need_a_plan(neuzip: Speak, tmp_path: Path) -> None:
    save_file({"h.0.attn.c_attn.weight": randn(64, 128)}, tmp_path / "model.safetensors")
    said = neuzip("compress", tmp_path / "model.safetensors", tmp_path / "p.safetensors", "--ternary")
    assert said.exit_code == 1
    assert "no tensor is called anything like '*layers.*_proj.weight'" in said.stderr
    assert 'scheme = "ternary"' in said.stderr
    plan = tmp_path / "plan.toml"
    plan.write_text('[[rule]]\nmatch = "*attn*"\nscheme = "ternary"\n')
    options = [tmp_path / "model.safetensors", tmp_path / "p.safetensors", "--plan", plan]
    assert "to be ternary" in neuzip("compress", *options).stderr
    assert neuzip("compress", *options, "--allow-destructive").exit_code == 0
    assert records(tmp_path / "p.safetensors")["h.0.attn.c_attn.weight"].scheme == "ternary"


def test_the_model_card_says_what_was_done(model: Path, tmp_path: Path) -> None:
    rules = [Rule("*_proj.weight", Scheme("ternary", group=32)), Rule("lm_head*", Scheme("truncated", 3))]
    compress(model, tmp_path / "small", rules, allow_destructive=True)
    card = model_card(find_checkpoint(tmp_path / "small"), "", "me/small", "me/small")
    assert "rounded 3 of its 6 tensors,\n2 of them to ternary weights (-1, 0 and 1 times a scale)." in card
    loss = records(tmp_path / "small" / "model.safetensors")[Q_PROJ].loss
    assert loss is not None
    scheme = "ternary, rounded by absmean, one scale per 32 weights of a row"
    row = f"| `{Q_PROJ}` | {scheme} | 1 | {loss.rms_relative:.6g} |"
    assert f"{row} {loss.relative_l2:.6g} |" in card
    assert re.search(r"\| `lm_head.weight` \| 3 mantissa bits \| 0\.\d+ \| 0\.\d+ \| \|", card)
