"""What is decoded on a GPU is what the CPU decodes, however it is cut.

Without a CUDA device the same code runs on the CPU, the decoder in Triton's interpreter.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from neuzip.compress import Rule, Scheme, compress
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.sources.source import SourceTensor
from neuzip.compress.workers import Workers
from neuzip.errors import FormatError
from neuzip.formats import safetensors_file
from neuzip.formats.container import Container
from neuzip.formats.safetensors_file import TensorFile
from neuzip.runtime import read_gpu as gpu
from neuzip.runtime import readers
from neuzip.runtime.load_file import load_file
from neuzip.runtime.read import read_tensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCHEMES: dict[str, list[Rule]] = {"lossless": [], "truncated": [Rule("*", Scheme("truncated", 3, 64))]}
TERNARY = [
    Rule("other", Scheme("ternary", group=16, packing="2bit")),
    Rule("half", Scheme("ternary", group="row", scale_dtype="F16")),
    Rule("weight", Scheme("ternary", group=16)),
]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weight = (torch.randn(30, 70) * 0.02).bfloat16()
    return {
        "weight": weight,
        "tied": weight.clone(),
        "other": (torch.randn(60, 100) * 0.02).bfloat16(),
        "half": torch.randn(70, 80).half(),
        "ids": torch.arange(1000),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "flags": torch.rand(99) > 0.5,
    }


@pytest.fixture(scope="module", params=SCHEMES)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "small.safetensors"
    save_file(tensors(), path.with_name("plain.safetensors"))
    compress(path.with_name("plain.safetensors"), path, SCHEMES[request.param])
    return path


@pytest.fixture(scope="module")
def ternary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ternary tensors among others."""
    path = tmp_path_factory.mktemp("gpu") / "ternary.safetensors"
    save_file(tensors(), path.with_name("plain.safetensors"))
    compress(path.with_name("plain.safetensors"), path, TERNARY, allow_destructive=True)
    with Container(path) as container:
        records = container.manifest.tensors
    assert {name for name, record in records.items() if record.scheme == "ternary"} == {
        "weight", "other", "half",
    }  # fmt: skip
    return path


def stored(source: FolderSource) -> list[SourceTensor]:
    return [t for t in source.tensors() if t.record is None or t.record.scheme != "alias"]


def data(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_loads(path: Path) -> None:
    expected = load_file(path)
    with FolderSource(path) as source:
        wanted = stored(source)
        found = gpu.read_on(DEVICE, source, wanted)
    for tensor, value in zip(wanted, found, strict=True):
        assert value.device.type == DEVICE.type
        assert (value.dtype, value.shape) == (expected[tensor.name].dtype, expected[tensor.name].shape)
        assert data(value) == data(expected[tensor.name]), tensor.name


@pytest.mark.parametrize("part", [1 << 28, 3000], ids=["one part", "many parts"])
@pytest.mark.parametrize(("chunk", "piece"), [(1 << 24, 1 << 20), (5000, 700), (112, 112)])
def test_bytes_are_the_same_however_they_are_cut(
    chunk: int, piece: int, part: int, small: Path, monkeypatch
):  # fmt: skip
    monkeypatch.setattr(readers, "CHUNK", chunk)
    monkeypatch.setattr(readers, "PIECE", piece)
    monkeypatch.setattr(gpu, "PART", part)
    assert_loads(small)


@pytest.mark.parametrize("part", [1 << 28, 3000], ids=["one part", "many parts"])
@pytest.mark.parametrize("chunk", [1 << 24, 112])
def test_ternary_tensors_are_the_same_however_they_are_cut(chunk: int, part: int, ternary: Path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK", chunk)
    monkeypatch.setattr(gpu, "PART", part)
    assert_loads(ternary)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantized tensors of several dtypes and shapes: pairs, escapes, and all sorts of factors."""
    path = tmp_path_factory.mktemp("gpu") / "quantized.safetensors"
    torch.manual_seed(0)
    weights = {
        "plain": (torch.randn(40, 72) * 0.02).bfloat16(),
        "rows": torch.randn(30, 70) * torch.linspace(0.2, 3, 30)[:, None],
        "columns": (torch.randn(3, 20, 40) * torch.linspace(0.3, 2, 40)).half(),
        "both": (torch.randn(50, 64) * 0.1).bfloat16(),
        "line": (torch.randn(3001) * 0.1).bfloat16(),
        "eight bits": (torch.randn(80, 100) * 0.1).to(torch.float8_e4m3fn),
    }
    weights["plain"][3, 5] = 9
    save_file(weights, path.with_name("plain.safetensors"))
    rules = [
        Rule("plain", Scheme("quantized", step=0.01)),
        Rule("rows", Scheme("quantized", step=0.3, row_factors=True)),
        Rule("columns", Scheme("quantized", step=0.2, column_factors=True)),
        Rule("both", Scheme("quantized", step=0.02, row_factors=True, column_factors=True)),
        Rule("*", Scheme("quantized", step=0.1)),
    ]
    compress(path.with_name("plain.safetensors"), path, rules)
    with Container(path) as container:
        assert {record.scheme for record in container.manifest.tensors.values()} == {"quantized"}
    return path


def test_quantized_tensors_have_the_bits_of_the_cpu(quantized: Path):
    assert_loads(quantized)


@pytest.mark.parametrize("stream", ["words", "grid"])
def test_damaged_quantized_tensors_are_named(stream: str, quantized: Path):
    broken = damage(quantized, "both", stream, 9)
    with FolderSource(broken) as source, pytest.raises(FormatError, match="the file is damaged") as caught:
        gpu.read_on(DEVICE, source, stored(source))
    assert (caught.value.tensor, caught.value.field) == ("both", stream)


def test_corrupt_words_of_quantized_tensors_are_found_without_verification(quantized: Path):
    broken = damage(quantized, "both", "words", 2)
    with FolderSource(broken) as source, pytest.raises(FormatError, match="the words are corrupt") as caught:
        gpu.read_on(DEVICE, source, stored(source), verify=False)
    assert caught.value.tensor == "both"


def test_plain_files_too(small: Path):
    assert_loads(small.with_name("plain.safetensors"))


def test_a_folder_of_several_files(tmp_path: Path):
    everything = tensors()
    names = list(everything)
    for number in range(3):
        shard = tmp_path / "model" / f"{number}.safetensors"
        shard.parent.mkdir(exist_ok=True)
        save_file({name: everything[name] for name in names[number::3]}, shard)
    compress(tmp_path / "model", tmp_path / "small")
    with FolderSource(tmp_path / "small") as source:
        wanted = stored(source)
        assert len({t.file for t in wanted}) == 3
        assert len(wanted) == len(names) - 1  # one is the other's alias, across files
        for tensor, value in zip(wanted, gpu.read_on(DEVICE, source, wanted), strict=True):
            assert data(value) == data(everything[tensor.name]), tensor.name


def test_nothing_to_load(tmp_path: Path):
    save_file({"e": torch.zeros(0, 3)}, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert_loads(tmp_path / "b.safetensors")
    with FolderSource(tmp_path / "b.safetensors") as source:
        assert gpu.read_on(DEVICE, source, []) == []


def many_parts(folder: Path) -> Path:
    """A container of 12 coded tensors and, as the largest one, a tensor that is stored as it is."""
    torch.manual_seed(1)
    weights = {f"{n}": (torch.randn(40 + n, 70) * 0.02).bfloat16() for n in range(12)}
    save_file({"ids": torch.arange(4000), **weights}, folder / "plain.safetensors")
    compress(folder / "plain.safetensors", folder / "small.safetensors")
    return folder / "small.safetensors"


def test_a_few_buffers_and_chunks_are_filled_again_and_again(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(gpu, "PART", 1)
    monkeypatch.setattr(readers, "CHUNK", 512)
    monkeypatch.setattr(readers, "default_jobs", lambda: 3)
    path = many_parts(tmp_path)
    chunks, buffers = [], []
    new_chunk, new_buffer = readers._Chunk, gpu._Buffer
    monkeypatch.setattr(readers, "_Chunk", lambda *a: chunks.append(new_chunk(*a)) or chunks[-1])
    monkeypatch.setattr(gpu, "_Buffer", lambda *a: buffers.append(new_buffer(*a)) or buffers[-1])
    assert_loads(path)
    assert len(buffers) == gpu.IN_FLIGHT + 1 < 13
    assert len(chunks) <= readers.CHUNKS * 3
    assert {chunk.memory.numel() for chunk in chunks} == {512}


def test_every_stored_byte_is_read_once(tmp_path: Path, monkeypatch):
    path = many_parts(tmp_path)
    read = TensorFile.read_at
    with FolderSource(path) as source:
        wanted = stored(source)
        extents = [extent for tensor in wanted for extent in source.extents(tensor)]
        lengths: list[int] = []
        monkeypatch.setattr(
            TensorFile, "read_at", lambda self, at, out: lengths.append(out.size) or read(self, at, out)
        )
        gpu.read_on(DEVICE, source, wanted)
    assert sum(lengths) == sum(extent.nbytes for extent in extents)


def test_the_header_of_a_container_is_parsed_once(small: Path, monkeypatch):
    parsed: list[int] = []
    parse = safetensors_file.parse_header
    monkeypatch.setattr(
        safetensors_file, "parse_header", lambda raw, *rest: parsed.append(len(raw)) or parse(raw, *rest)
    )
    with FolderSource(small) as source:
        assert source.is_compressed
    assert len(parsed) == 1  # the original's header, which the container holds, is parsed elsewhere


# Damage


def damage(path: Path, tensor: str, stream: str | None, at: int) -> Path:
    """A copy with one bit of a tensor's stream changed."""
    with FolderSource(path) as source:
        (found,) = (t for t in source.tensors() if t.name == tensor)
        (extent,) = (e for e in source.extents(found) if e.stream == stream)
    changed = bytearray(path.read_bytes())
    changed[extent.start + at] ^= 1
    copy = path.with_name(f"damaged-{tensor}-{stream}-{at}.safetensors")
    copy.write_bytes(changed)
    return copy


@pytest.mark.parametrize(
    ("tensor", "stream"),
    [("other", "table"), ("other", "index"), ("other", "words"), ("other", "sign_mantissa"), ("ids", None)],
)
@pytest.mark.parametrize("chunk", [1 << 24, 112], ids=["whole", "cut"])
def test_a_wrong_checksum_names_file_and_tensor(chunk, tensor, stream, small: Path, monkeypatch):
    monkeypatch.setattr(readers, "CHUNK", chunk)
    broken = damage(small, tensor, stream, 0)
    with FolderSource(broken) as source, pytest.raises(FormatError, match="the file is damaged") as caught:
        gpu.read_on(DEVICE, source, stored(source))
    assert (caught.value.file, caught.value.tensor, caught.value.field) == (str(broken), tensor, stream)
    assert not [t for t in threading.enumerate() if t.name.startswith("neuzip-read")]


def test_without_verification_the_decoder_finds_corrupt_words(small: Path):
    broken = damage(
        small, "other", "words", 2
    )  # the state of a lane, which would not come back to where it began
    with FolderSource(broken) as source, pytest.raises(FormatError, match="the words are corrupt") as caught:
        gpu.read_on(DEVICE, source, stored(source), verify=False)
    assert (caught.value.file, caught.value.tensor) == (str(broken), "other")


@pytest.mark.parametrize(
    ("tensor", "problem"), [("weight", "stands for no five trits"), ("other", "hold a code of 3")]
)
def test_without_verification_codes_that_there_are_not_are_found(tensor: str, problem: str, ternary: Path):
    """A byte of 1 stands for no trits; a bit more makes a code of 1 one of 3."""
    with FolderSource(ternary) as source:
        (found,) = (t for t in source.tensors() if t.name == tensor)
        start = next(e.start for e in source.extents(found) if e.stream == "codes")
    changed = bytearray(ternary.read_bytes())
    changed[start + 20] = 1 if tensor == "weight" else 0xFF
    broken = ternary.with_name(f"broken-{tensor}.safetensors")
    broken.write_bytes(changed)
    with FolderSource(broken) as source, pytest.raises(FormatError, match=problem) as caught:
        gpu.read_on(DEVICE, source, stored(source), verify=False)
    assert (caught.value.file, caught.value.tensor) == (str(broken), tensor)
    with FolderSource(broken) as source, pytest.raises(FormatError, match="the file is damaged") as caught:
        gpu.read_on(DEVICE, source, stored(source))
    assert caught.value.field == "codes"


def test_without_verification_nothing_else_is_found(small: Path):
    broken = damage(small, "ids", None, 0)
    with FolderSource(broken) as source:
        wanted = stored(source)
        found = gpu.read_on(DEVICE, source, wanted, verify=False)
    changed = {t.name for t, v in zip(wanted, found, strict=True) if t.name == "ids" and int(v[0]) == 1}
    assert changed == {"ids"}


def test_a_file_that_is_cut_short_while_it_is_read(small: Path, tmp_path: Path):
    copy = tmp_path / "short.safetensors"
    copy.write_bytes(small.read_bytes())
    with FolderSource(copy) as source:
        os.truncate(copy, 2000)
        with pytest.raises(FormatError, match="cut short"):
            gpu.read_on(DEVICE, source, stored(source))


def test_headers_that_contradict_the_streams_are_refused_before_memory_is_taken(small: Path, monkeypatch):
    """With other lengths than follow from the shape, and right checksums."""
    with Container(small) as container:
        length = container.file.header.tensors["other:index"].nbytes
    with FolderSource(small) as source:
        wanted = stored(source)
        (other,) = (t for t in wanted if t.name == "other")
        object.__setattr__(other, "info", type(other.info)("other", "F16", (1 << 40,), 0, 2 << 40))
        assert length < 1 << 20
        with pytest.raises(FormatError, match=r"tensor 'other': the stream .* instead of"):
            gpu.read_on(DEVICE, source, wanted)


# On a real one


@pytest.mark.gpu
def test_aliases_are_tensors_of_their_own(small: Path):
    with FolderSource(small) as source, Workers() as workers:
        wanted = list(source.tensors())
        found = read_tensors(source, wanted, torch.device("cuda"), workers)
    by_name = {t.name: value for t, value in zip(wanted, found, strict=True)}
    assert torch.equal(by_name["tied"], by_name["weight"])
    assert by_name["tied"].data_ptr() != by_name["weight"].data_ptr()


@pytest.mark.gpu
def test_memory_for_what_is_compressed_is_bounded_and_given_back(tmp_path: Path, monkeypatch):
    layers = {f"{n}.weight": (torch.randn(1024, 1024) * 0.02).bfloat16() for n in range(24)}
    save_file(layers, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    monkeypatch.setattr(gpu, "PART", 3 << 20)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = load_file(tmp_path / "b.safetensors", device="cuda")
    total = sum(t.nbytes + (1 << 20) for t in found.values())  # torch leaves up to 1 MiB of a block unused
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # memory that another stream used counts until somebody looks whether it is done
    assert torch.cuda.memory_allocated() - before <= total
    assert torch.cuda.max_memory_allocated() - before <= total + (gpu.IN_FLIGHT + 2) * gpu.PART
    assert all(torch.equal(found[name].cpu(), layers[name]) for name in layers)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [1 << 12, 1 << 22])
def test_buffers_are_filled_again_only_after_they_were_decoded(chunk: int, tmp_path: Path, monkeypatch):
    """In the caller's stream, which is not the default one, with kernels before that still run."""
    layers = {f"{n}.weight": (torch.randn(256, 1024 + n) * 0.02).bfloat16() for n in range(60)}
    layers["ids"] = torch.arange(1 << 18)
    save_file(layers, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    monkeypatch.setattr(gpu, "PART", 1 << 20)
    monkeypatch.setattr(readers, "CHUNK", chunk)
    with torch.cuda.stream(torch.cuda.Stream()):
        for poison in (0x00, 0xFF) * 4:
            busy = torch.full((1 << 28,), poison, dtype=torch.uint8, device="cuda")
            busy.add_(1).sub_(1)
            del busy  # torch's allocator hands this memory out next
            found = load_file(tmp_path / "b.safetensors", device="cuda")
            assert all(data(found[name]) == data(layers[name]) for name in layers)


@pytest.mark.gpu
def test_many_loads_after_each_other_while_the_gpu_is_busy(small: Path):
    """Memory that is free again, but still in use by kernels, must not be written."""
    expected = load_file(small)
    for _ in range(20):
        busy = torch.randn(2048, 2048, device="cuda")
        for _ in range(20):
            busy = busy @ busy * 1e-3
        copy = busy.clone()
        del busy
        found = load_file(small, device="cuda")
        assert all(data(found[name]) == data(expected[name]) for name in expected)
        del copy
