"""load_file and safe_open give of a compressed file what safetensors gives of the original."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from conftest import RunAlone
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import neuzip
from neuzip.compress import Rule, Scheme, compress, decompress
from neuzip.compress.sources import container as container_source
from neuzip.compress.sources import folder as folder_source
from neuzip.compress.sources import source as tensor_source
from neuzip.errors import FormatError, UsageError
from neuzip.formats.container import Container
from neuzip.kernels.rans import BLOCK

METADATA = {"format": "pt", "by": "me"}


def tensors() -> dict[str, torch.Tensor]:
    """One or more of every kind: coded, raw, an alias, empty, a scalar."""
    torch.manual_seed(0)
    weight = (torch.randn(160, 128) * 0.02).bfloat16()
    return {
        "weight": weight,
        "tied": weight.clone(),
        "cube": torch.randn(9, 30, 70).half(),
        "fp8": torch.randn(96, 64).to(torch.float8_e4m3fn),
        "single": torch.randn(5000),
        "was_bf16": torch.randn(5000).bfloat16().float(),
        "double": torch.randn(3000).double(),
        "norm": torch.ones(8, dtype=torch.bfloat16),
        "noise": torch.randint(-(1 << 40), 1 << 40, (6, 7)),
        "flags": torch.rand(33) > 0.5,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "plain.safetensors"
    save_file(tensors(), path, metadata=METADATA)
    return path


@pytest.fixture(scope="module")
def small(plain: Path) -> Path:
    path = plain.with_name("small.safetensors")
    compress(plain, path)
    with Container(path) as container:
        schemes = {name: record.scheme for name, record in container.manifest.tensors.items()}
    assert schemes["weight" if schemes["tied"] == "alias" else "tied"] == schemes["cube"] == "lossless"
    assert set(schemes.values()) == {"lossless", "raw", "alias"}
    return path


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all is the same: dtype, shape and bits."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and bits[0] == bits[1]


@pytest.fixture
def damaged(small: Path, tmp_path: Path) -> Path:
    """A copy with another byte in the words of `cube`."""
    path = tmp_path / "damaged.safetensors"
    data = bytearray(small.read_bytes())
    with Container(small) as container:
        entry = container.file.header.tensors["cube:words"]
        data[container.file.data_start + entry.start + 200] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.slow
def test_every_tensor_comes_back_as_it_was(plain: Path, small: Path):
    expected, found = load_file(plain), neuzip.load_file(small)
    assert list(found) == list(expected)
    assert all(same(found[name], expected[name]) for name in expected)
    assert all(t.is_contiguous() and not t.requires_grad for t in found.values())


def test_tensors_share_no_memory(small: Path):
    found = neuzip.load_file(small)
    found["tied"].zero_()
    assert found["weight"].count_nonzero() > 0


@pytest.mark.slow
def test_rounded_tensors_are_those_that_are_restored(plain: Path, tmp_path: Path):
    compress(plain, tmp_path / "k3.safetensors", [Rule("*", Scheme("truncated", 3, 64))])
    decompress(tmp_path / "k3.safetensors", tmp_path / "restored.safetensors")
    expected, found = (
        load_file(tmp_path / "restored.safetensors"),
        neuzip.load_file(tmp_path / "k3.safetensors"),
    )
    assert all(same(found[name], expected[name]) for name in expected)
    with neuzip.safe_open(tmp_path / "k3.safetensors", "pt") as file:
        assert same(file.get_slice("weight")[3:9, 5:], expected["weight"][3:9, 5:])


def test_a_plain_file_is_left_to_safetensors(plain: Path):
    assert type(neuzip.safe_open(plain, "pt")) is type(safetensors.safe_open(plain, "pt"))
    with neuzip.safe_open(plain, framework="np") as file:
        assert isinstance(file.get_tensor("single"), np.ndarray)
    expected, found = load_file(plain), neuzip.load_file(plain, backend="pread")
    assert all(same(found[name], expected[name]) for name in expected)


def test_safe_open_has_the_methods_of_safetensors(plain: Path, small: Path):
    with safetensors.safe_open(plain, "pt") as expected, neuzip.safe_open(small, "pt") as found:
        public = {name for name in dir(expected) if not name.startswith("_")}
        assert public <= {name for name in dir(found) if not name.startswith("_")}
        assert found.keys() == expected.keys()
        assert found.offset_keys() == expected.offset_keys()
        assert found.metadata() == expected.metadata() == METADATA
        assert all(same(found.get_tensor(name), expected.get_tensor(name)) for name in expected.keys())  # noqa: SIM118
        assert list(found.get_tensors()) == list(expected.get_tensors())
        for name in expected.keys():  # noqa: SIM118
            ours, theirs = found.get_slice(name), expected.get_slice(name)
            assert ours.get_shape() == theirs.get_shape()
            assert ours.get_dtype() == theirs.get_dtype()
            assert {n for n in dir(theirs) if n[0] != "_"} == {n for n in dir(ours) if n[0] != "_"}


def test_no_metadata_is_none(tmp_path: Path):
    save_file({"w": torch.randn(10)}, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with neuzip.safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() is None


def test_the_name_of_a_file_may_end_otherwise(small: Path, tmp_path: Path):
    (tmp_path / "weights.bin").write_bytes(small.read_bytes())
    assert neuzip.load_file(tmp_path / "weights.bin").keys() == neuzip.load_file(str(small)).keys()


# Slices

Indexed = [
    np.s_[:], np.s_[...], np.s_[()], np.s_[0], np.s_[-1], np.s_[3:5], np.s_[-2:], np.s_[:-4], np.s_[5:2],
    np.s_[0:100], np.s_[100:], np.s_[::2], np.s_[1:8:3], np.s_[2, 7], np.s_[-1, -1, -1], np.s_[4, 3:9],
    np.s_[:, 1], np.s_[:, 1:2, ::2], np.s_[2:4, ..., 1:], np.s_[..., 0], np.s_[1, ..., 5:9], np.s_[:, None],
    np.s_[None, 3], np.s_[8, None, 2:3], np.s_[np.int64(4)], np.s_[[0, 3]], np.s_[2, [1, 4]],
    np.s_[1:3, [0, 2]], np.s_[2, :, [0, 1]], np.s_[True], np.s_[torch.tensor([1, 0])],
    np.s_[torch.tensor(2), 1:3],
]  # fmt: skip
Refused = [
    np.s_[9], np.s_[-10], np.s_[0, 30], np.s_[0, 0, 0, 0], np.s_[:, :, :, :1], np.s_[::-1], np.s_[1.0],
    np.s_[:, 1.5],
]  # fmt: skip


@pytest.mark.parametrize("index", Indexed, ids=repr)
def test_slices_are_those_of_the_tensor(index: Any, plain: Path, small: Path):
    whole = load_file(plain)["cube"]
    with neuzip.safe_open(small, "pt") as file:
        part = file.get_slice("cube")[index]
    assert same(part, whole[index])
    assert part.is_contiguous()


@pytest.mark.parametrize("index", Refused, ids=repr)
def test_what_torch_refuses_is_refused_alike(index: Any, plain: Path, small: Path):
    with pytest.raises((IndexError, ValueError, TypeError)) as expected:
        load_file(plain)["cube"][index]
    with neuzip.safe_open(small, "pt") as file, pytest.raises(type(expected.value)) as found:
        file.get_slice("cube")[index]
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("name", sorted(tensors()))
def test_slices_of_every_kind_of_tensor(name: str, plain: Path, small: Path):
    whole = load_file(plain)[name]
    with neuzip.safe_open(small, "pt") as file:
        part = file.get_slice(name)
        assert same(part[...], whole)
        if whole.dim():
            assert same(part[1:3], whole[1:3])
        else:
            with pytest.raises(IndexError, match="0-dim"):
                part[:]


def test_a_slice_of_rows_decodes_only_the_blocks_it_touches(tmp_path: Path, monkeypatch):
    rows = 4 * BLOCK // 100
    save_file({"w": (torch.randn(rows, 100) * 0.02).bfloat16()}, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    read: list[str] = []
    monkeypatch.setattr(
        folder_source.FolderSource,
        "check_streams",
        lambda *_: pytest.fail("the whole tensor was read"),
    )
    inner = Container.read_stream

    def counted(self: Container, name: str, stream: str, start: int = 0, stop: int | None = None) -> Any:
        data = inner(self, name, stream, start, stop)
        if stream == "sign_mantissa":
            read.append(f"{data.size // BLOCK} blocks")
        return data

    monkeypatch.setattr(Container, "read_stream", counted)
    with neuzip.safe_open(tmp_path / "b.safetensors", "pt") as file:
        part = file.get_slice("w")[BLOCK // 100 + 1 : BLOCK // 100 + 5]
    assert read == ["1 blocks"]
    assert same(part, load_file(tmp_path / "a.safetensors")["w"][BLOCK // 100 + 1 : BLOCK // 100 + 5])


def test_slices_over_several_pieces(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tensor_source, "PIECE", BLOCK)
    whole = (torch.randn(70, 1000) * 0.02).bfloat16()
    save_file({"w": whole}, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with neuzip.safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert same(file.get_slice("w")[3:69, 10:20], whole[3:69, 10:20])
        assert same(file.get_slice("w")[40, 100:], whole[40, 100:])


# What goes wrong


@pytest.mark.parametrize(
    "arguments",
    [
        {"framework": "mxnet"},
        {"framework": "pt", "device": "abacus"},
        {"framework": "pt", "backend": "stone"},
    ],
    ids=repr,
)
def test_arguments_that_safetensors_refuses(arguments: dict[str, Any], plain: Path, small: Path):
    with pytest.raises(SafetensorError) as expected:
        safetensors.safe_open(plain, **arguments)
    with pytest.raises(SafetensorError) as found:
        neuzip.safe_open(small, **arguments)
    assert str(found.value) == str(expected.value)


def test_files_that_are_none(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        neuzip.load_file(tmp_path / "nowhere")
    (tmp_path / "text").write_text("not a safetensors file at all")
    with pytest.raises(SafetensorError):
        neuzip.load_file(tmp_path / "text")


def test_names_that_are_not_there_and_files_that_are_closed(small: Path):
    with neuzip.safe_open(small, "pt") as file:
        for get in (file.get_tensor, file.get_slice):
            with pytest.raises(SafetensorError, match="File does not contain tensor nothing"):
                get("nothing")
    for use in (file.keys, file.metadata, lambda: file.get_tensor("weight")):
        with pytest.raises(SafetensorError, match="File is closed"):
            use()
    file.__exit__()


def test_a_gpu_that_is_not_there(small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", 0):
        with pytest.raises(UsageError, match="torch finds no CUDA device"):
            neuzip.load_file(small, device=device)


def test_only_torch_has_compressed_tensors(small: Path):
    with pytest.raises(UsageError, match=r"small.safetensors: is compressed, .* framework 'pt'"):
        neuzip.safe_open(small, framework="np")


def test_a_damaged_tensor_is_named(damaged: Path):
    with pytest.raises(FormatError, match="the file is damaged") as caught:
        neuzip.load_file(damaged)
    assert (caught.value.file, caught.value.tensor, caught.value.field) == (str(damaged), "cube", "words")
    with neuzip.safe_open(damaged, "pt") as file:
        assert file.get_tensor("weight").shape == (160, 128)
        with pytest.raises(FormatError, match="tensor 'cube'"):
            file.get_tensor("cube")


@pytest.mark.parametrize("stream", ["table", "index", "words", "sign_mantissa"])
def test_damage_is_found_in_what_a_slice_reads_whole(stream: str, tmp_path: Path):
    """All of a tensor; of a part of it the streams without which no block is decoded."""
    save_file({"w": (torch.randn(2, BLOCK) * 0.02).bfloat16()}, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    data = bytearray((tmp_path / "b.safetensors").read_bytes())
    with Container(tmp_path / "b.safetensors") as container:
        entry = container.file.header.tensors[f"w:{stream}"]
        data[container.file.data_start + entry.stop - 1] ^= 1
    (tmp_path / "b.safetensors").write_bytes(data)
    with neuzip.safe_open(tmp_path / "b.safetensors", "pt") as file:
        part = file.get_slice("w")
        for index in [np.s_[:], np.s_[...], *([np.s_[0, :9]] if stream in ("table", "index") else [])]:
            with pytest.raises(FormatError, match="the file is damaged") as caught:
                part[index]
            assert (caught.value.tensor, caught.value.field) == ("w", stream)


def test_a_slice_of_a_tensor_of_one_block_is_compared(tmp_path: Path):
    whole = (torch.randn(128, 64) * 0.02).bfloat16()
    save_file({"w": whole}, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    data = bytearray((tmp_path / "b.safetensors").read_bytes())
    with Container(tmp_path / "b.safetensors") as container:
        data[container.file.data_start + container.file.header.tensors["w:sign_mantissa"].start] ^= 1
    (tmp_path / "b.safetensors").write_bytes(data)
    with (
        neuzip.safe_open(tmp_path / "b.safetensors", "pt") as file,
        pytest.raises(FormatError, match=r"sign_mantissa.*the file is damaged"),
    ):
        file.get_slice("w")[1:2]
    with neuzip.safe_open(tmp_path / "b.safetensors", "pt", verify=False) as file:
        assert not same(file.get_slice("w")[0:1], whole[0:1])


def test_without_verification_only_what_cannot_be_decoded_is_found(damaged: Path, small: Path, monkeypatch):
    monkeypatch.setattr(container_source, "digest", lambda *_: pytest.fail("a checksum was computed"))
    assert (
        neuzip.load_file(small, verify=False).keys() == load_file(small.with_name("plain.safetensors")).keys()
    )
    with pytest.raises(FormatError, match="tensor 'cube': the stream 'words'"):
        neuzip.load_file(damaged, verify=False)


def test_files_are_closed(small: Path):
    def ours() -> list[str]:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return [os.readlink(link) for link in links if link.exists() and os.readlink(link) == str(small)]

    gc.collect()  # tracebacks of other tests hold files
    neuzip.load_file(small)
    assert not ours()
    file = neuzip.safe_open(small, "pt")
    file.get_tensor("norm")
    assert ours()
    del file
    assert not ours()


@pytest.mark.slow
def test_loading_needs_no_transformers(small: Path, run_alone: RunAlone):
    code = (
        "import sys, neuzip\n"
        f"neuzip.load_file({str(small)!r})\n"
        "assert not {'transformers', 'triton'} & set(sys.modules)"
    )
    run_alone(code)


# GPU


@pytest.mark.gpu
def test_on_a_gpu(plain: Path, small: Path):
    expected, found = load_file(plain, device="cuda"), neuzip.load_file(small, device="cuda")
    assert list(found) == list(expected)
    for name in expected:
        assert found[name].device == expected[name].device
        assert same(found[name].cpu(), expected[name].cpu()), name
    with neuzip.safe_open(small, "pt", device=0) as file:
        assert same(file.get_tensor("cube").cpu(), expected["cube"].cpu())
        assert same(file.get_slice("cube")[2:4].cpu(), expected["cube"][2:4].cpu())
        assert file.get_slice("cube")[2:4].device == torch.device("cuda:0")


@pytest.mark.gpu
def test_damage_is_found_on_a_gpu(damaged: Path):
    with pytest.raises(FormatError, match="the file is damaged") as caught:
        neuzip.load_file(damaged, device="cuda")
    assert (caught.value.tensor, caught.value.field) == ("cube", "words")


def test_a_slice_outlives_its_file(tmp_path: Path) -> None:
    """As with safetensors: after the file object is gone, and after the `with` block."""
    save_file({"w": (torch.arange(70 * 70).reshape(70, 70) * 0.01).bfloat16()}, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    path = tmp_path / "b.safetensors"
    part = neuzip.safe_open(path, "pt").get_slice("w")
    assert part[1:3].shape == (2, 70)
    with neuzip.safe_open(path, "pt", device=None) as file:
        part = file.get_slice("w")
    assert torch.equal(part[np.int64(1), 0:3], load_file(tmp_path / "a.safetensors")["w"][1, 0:3])
    with pytest.raises(SafetensorError, match="closed"):
        file.get_tensor("w")
