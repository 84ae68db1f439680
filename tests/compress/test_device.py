"""What a GPU writes, restores and finds is what the CPU does, to the last byte.

Without a CUDA device the same code runs on the CPU, the kernels in Triton's interpreter, on smaller tensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from neuzip.compress import Rule, Scheme, compress, decompress, encode_ahead, encode_tensor, verify
from neuzip.compress import device as devices
from neuzip.compress.device import CPU, MOST_THREADS, WORTH_STARTING, Device, choose
from neuzip.compress.gpu import Gpu
from neuzip.compress.pieces import PIECE
from neuzip.compress.schemes import lossless
from neuzip.compress.schemes.truncated import ErrorSums
from neuzip.compress.sources.folder import FolderSource
from neuzip.compress.workers import Gathering
from neuzip.distribution import MissingPackage
from neuzip.errors import FormatError, NeuzipError
from neuzip.eval.measures.histograms import inspect
from neuzip.kernels.device import release as triton_release
from neuzip.kernels.float_fields import FORMATS, FloatFormat
from neuzip.kernels.rans import BLOCK
from neuzip.kernels.rans.triton import decode as triton_decode
from neuzip.kernels.rans.triton import encode as triton_encode
from neuzip.runtime.devices import choose_device

Save = Callable[..., Path]
Array = np.ndarray[Any, Any]

ON_CARD = torch.cuda.is_available()
SIZE = 3 * BLOCK + 1001 if ON_CARD else 5001
SCHEMES = {
    "lossless": Scheme(),
    "k=0": Scheme("truncated", 0),
    "k=3": Scheme("truncated", 3),
    "k=3 block=64": Scheme("truncated", 3, 64),
}


@pytest.fixture(scope="module")
def device() -> Device:
    """The card; or the CPU in its place, with the kernels interpreted."""
    place = torch.device("cuda", 0) if ON_CARD else torch.device("cpu")
    return Device(str(place) if ON_CARD else "interpreter", Gpu(place))


def weights(fmt: FloatFormat, numel: int, seed: int = 0, finite: bool = True) -> Array:
    """Patterns like those of a trained tensor, and if not `finite` any pattern here and there."""
    rng = np.random.default_rng(seed)
    bias = (1 << (fmt.exponent_bits - 1)) - 1
    exponents = np.clip(bias - 3 - rng.geometric(0.6, numel), 0, (1 << fmt.exponent_bits) - 2)
    bits = rng.integers(0, 1 << fmt.mantissa_bits, numel).astype(np.uint64)
    bits |= exponents.astype(np.uint64) << np.uint64(fmt.mantissa_bits)
    bits |= rng.integers(0, 2, numel).astype(np.uint64) << np.uint64(fmt.bits - 1)
    if not finite:
        at = rng.integers(0, numel, 40)
        bits[at] = rng.integers(0, (1 << fmt.bits) - 1, 40, dtype=np.uint64)
        bits[at[0]] = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    return bits.astype(fmt.dtype)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, save: Save) -> Path:
    """Two shards with all formats, a tied tensor, fp32 that was bf16, noise, integers, and small ones."""
    root = tmp_path_factory.mktemp("model")
    shape = (3, SIZE // 3)
    numel = 3 * (SIZE // 3)
    tied = weights(FORMATS["BF16"], numel)
    save(
        root / "a.safetensors",
        {f"{name}.matrix": (name, shape, weights(fmt, numel, 1)) for name, fmt in FORMATS.items()},
    )
    save(
        root / "b.safetensors",
        {
            "embed": ("BF16", shape, tied),
            "head": ("BF16", shape, tied),
            "upcast": ("F32", shape, weights(FORMATS["BF16"], numel, 2).astype(np.uint32) << 16),
            "nan": ("F16", shape, weights(FORMATS["F16"], numel, 3, finite=False)),
            "constant": ("F32", shape, np.full(numel, 0x3F800000, np.uint32)),
            "noise": ("BF16", shape, np.random.default_rng(4).integers(0, 1 << 16, numel).astype(np.uint16)),
            "ids": ("I64", (900,), np.arange(900)),
            "norm": ("BF16", (64,), weights(FORMATS["BF16"], 64)),
            "empty": ("F16", (0, 4), np.zeros(0, np.uint16)),
        },
    )
    (root / "config.json").write_text("{}")
    return root


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


# The choice


def test_few_weights_never_ask_for_a_gpu(monkeypatch):
    monkeypatch.setattr(devices, "driver_devices", lambda: pytest.fail("asked"))
    assert choose("cpu", 1 << 40) is CPU
    assert choose("auto", WORTH_STARTING - 1) is CPU


def test_auto_without_a_driver_is_the_cpu_and_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "driver_devices", lambda: 0)
    assert choose("auto", WORTH_STARTING) is CPU
    with pytest.raises(NeuzipError, match="`device='cuda'`: NVIDIA's driver finds no device"):
        choose("cuda", 0)


def test_without_torch_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(devices, "driver_devices", lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert choose("auto", WORTH_STARTING) is CPU
    with pytest.raises(MissingPackage, match="`device='cuda'` needs torch"):
        choose("cuda", 0)


@pytest.mark.parametrize(
    ("installed", "problem"),
    [
        (None, "Triton is not installed"),
        ("3.4.0", r"Triton 3\.4\.0 is installed, and 3\.6 or newer is needed"),
    ],
)
def test_without_a_triton_that_compiles_the_kernels_there_is_no_gpu(installed, problem, monkeypatch):
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(triton_release, "version", version)
    monkeypatch.setattr(devices, "driver_devices", lambda: 1)
    assert choose("auto", WORTH_STARTING) is CPU
    with pytest.raises(NeuzipError, match=f"`device='cuda'`: {problem}"):
        choose("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(NeuzipError, match=f"the kernels for a GPU cannot be compiled: {problem}"):
        choose_device("auto")
    monkeypatch.delitem(sys.modules, "neuzip.kernels.device.launch")
    with pytest.raises(NeuzipError, match=problem):
        import neuzip.kernels.device.launch  # noqa: F401  # which every module with kernels does first


def test_a_gpu_that_torch_cannot_use_is_none(monkeypatch):
    monkeypatch.setattr(devices, "driver_devices", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert choose("auto", WORTH_STARTING) is CPU
    with pytest.raises(NeuzipError, match=r"torch .* finds no CUDA device"):
        choose("cuda", 0)


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with two cards, as torch sees them, and how capable they are."""
    cards = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(devices, "driver_devices", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: cards.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "A card")
    monkeypatch.setattr("neuzip.compress.gpu.Gpu", lambda place: SimpleNamespace(device=place, piece=1))
    return cards


@pytest.mark.parametrize(("rank", "name"), [(None, "cuda:0"), ("1", "cuda:1"), ("2", "cuda:0")])
def test_every_rank_of_a_machine_has_a_card_of_its_own(rank, name, two_cards, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    chosen = choose("cuda", 0)
    assert chosen.name == name
    assert chosen.gpu is not None and str(chosen.gpu.device) == name


def test_auto_leaves_small_tensors_on_the_cpu_and_cuda_does_not(two_cards):
    assert choose("auto", WORTH_STARTING).gpu_for(PIECE - 1) is None
    assert choose("auto", WORTH_STARTING).gpu_for(PIECE) is not None
    assert choose("cuda", 0).gpu_for(1) is not None


def test_an_old_card_is_none(two_cards):
    two_cards.capability = (7, 5)
    assert choose("auto", WORTH_STARTING) is CPU
    with pytest.raises(NeuzipError, match=r"A card has the compute capability 7\.5, and 8\.0 is needed"):
        choose("cuda", 0)


def test_threads(device):
    assert CPU.jobs(99) == 99
    assert (device.jobs(2), device.jobs(99)) == (2, MOST_THREADS)


@pytest.mark.skipif(ON_CARD, reason="a CUDA device")
def test_the_choice_loads_no_torch():
    code = (
        "import sys; from neuzip.compress.device import CPU, choose; "
        "print(choose('auto', 1 << 40) is CPU, 'torch' in sys.modules, 'triton' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout == "True False False\n"


@pytest.mark.skipif(ON_CARD, reason="a CUDA device")
@pytest.mark.parametrize("verb", ["compress", "decompress", "verify", "inspect"])
def test_a_command_refuses_a_gpu_that_is_not_there(verb, model, tmp_path, neuzip):
    target = [tmp_path / "out"] if verb in ("compress", "decompress") else []
    said = neuzip(verb, model, *target, "--device", "cuda")
    assert said.exit_code == 2
    assert said.stderr.startswith("error: --device cuda: ")
    assert "hint: give --device cpu, or let --device auto choose" in said.stderr
    assert not (tmp_path / "out").exists()


def test_commands_say_where_they_worked(model, tmp_path, neuzip):
    assert neuzip("compress", model, tmp_path / "nz", "--json").json["device"] == "cpu"
    assert neuzip("verify", tmp_path / "nz", "--json").json["device"] == "cpu"
    assert neuzip("inspect", tmp_path / "nz", "--json").json["device"] == "cpu"
    assert neuzip("decompress", tmp_path / "nz", tmp_path / "back", "--json").json["device"] == "cpu"


# The same bytes and verdicts


FEW = ["BF16.matrix", "F16.matrix", "upcast"]
OTHERS = ["F32.matrix", "F64.matrix", "F8_*.matrix", "embed", "head", "nan", "constant", "noise"]

# Interpreted, a tensor takes half a second. There every tensor meets the lossless scheme, and each truncated
# scheme some of the ways a tensor can go: cut, kept whole for it has few bits or infinities, constant, raw.
PLANS = [
    pytest.param("lossless", FEW, id="lossless-few"),
    pytest.param("k=3 block=64", FEW, id="k=3 block=64-few"),
    *(
        pytest.param(name, globs, id=f"{name}-others", marks=pytest.mark.slow)
        for name, globs in {
            "lossless": OTHERS,
            "k=0": ["F64.matrix", "F8_E4M3.matrix", "F8_E5M2FNUZ.matrix", "nan", "constant"],
            "k=3": ["F16.matrix", "F32.matrix", "F8_E5M2.matrix", "upcast", "noise"],
            "k=3 block=64": ["F32.matrix", "F64.matrix", "nan"],
        }.items()
    ),
]
if ON_CARD:
    PLANS = [pytest.param(name, ["*"], id=name) for name in SCHEMES]


@pytest.mark.parametrize(("name", "globs"), PLANS)
@pytest.mark.slow
def test_the_same_checkpoint_and_the_same_verdicts(name, globs, device, model, tmp_path):
    rules = [Rule(glob, SCHEMES[name], min_dimensions=2) for glob in globs]
    rules.append(Rule("*", Scheme() if globs == ["*"] else Scheme("raw")))
    reports = [
        compress(model, tmp_path / where.name, rules, device=where, verify=where is CPU)
        for where in (CPU, device)
    ]
    coded = tmp_path / "cpu"
    assert files(tmp_path / device.name) == files(coded)
    assert reports[1].tensors == reports[0].tensors
    assert [r.device for r in reports] == ["cpu", device.name]
    kinds = {r.scheme for r in reports[0].tensors}
    assert kinds >= {"raw", name}

    found = [verify(coded, model, device=where) for where in (CPU, device)]
    assert found[1].tensors == found[0].tensors
    assert decompress(coded, tmp_path / "there", device=device).device == device.name
    decompress(coded, tmp_path / "here")
    assert files(tmp_path / "there") == files(tmp_path / "here")
    if name == "lossless":
        assert files(tmp_path / "there") == files(model)


@pytest.mark.parametrize("compressed", [False, True])
def test_the_same_histograms(compressed, device, model, tmp_path):
    path = model
    if compressed:
        path = tmp_path / "nz"
        compress(model, path)
    found = []
    for where in (CPU, device):
        with FolderSource(path, where) as source:
            tensors = [t for t in source.tensors() if ON_CARD or not t.name.startswith("F64")]
            found.append(json.dumps(inspect(source, tensors).to_json()))
    assert found[1] == found[0]


@pytest.mark.parametrize("scheme", [Scheme(), Scheme("truncated", 2, 32)], ids=str)
def test_any_range(scheme, device, tmp_path, save):
    numel = 2 * BLOCK + 300
    save(tmp_path / "x.safetensors", {"w": ("BF16", (numel,), weights(FORMATS["BF16"], numel))})
    compress(tmp_path / "x.safetensors", tmp_path / "nz.safetensors", [Rule("*", scheme)])
    with FolderSource(tmp_path / "nz.safetensors", device) as source:
        (tensor,) = source.tensors()
        read = source.reader(tensor)
        with FolderSource(tmp_path / "nz.safetensors") as other:
            whole = other.read(tensor)
        ranges = [(0, 0), (5, 9), (BLOCK - 1, BLOCK + 1), (BLOCK, numel), (numel - 3, numel)]
        for start, stop in ranges if ON_CARD else ranges[:2] + ranges[3:4]:
            assert np.array_equal(read(2 * start, 2 * stop), whole[2 * start : 2 * stop])


@pytest.mark.parametrize("damage", [b"\xff" * 40, b"\0" * 40], ids=["ones", "zeros"])
def test_corrupt_words_are_refused_in_the_same_words(damage, device, model, tmp_path):
    path = tmp_path / "nz.safetensors"
    compress(model / "a.safetensors", path)
    with FolderSource(path) as source:
        (tensor,) = (t for t in source.tensors() if t.name == "BF16.matrix")
        (words,) = (e for e in source.extents(tensor) if e.stream == "words")
    data = bytearray(path.read_bytes())
    data[words.start : words.start + len(damage)] = damage
    path.write_bytes(data)

    def refusals(where: Device) -> list[str]:
        said = []
        with FolderSource(path, where) as source, pytest.raises(FormatError) as refused:
            source.read(tensor)
        said.append(str(refused.value))
        with pytest.raises(FormatError) as refused:
            verify(path, device=where)
        return [*said, str(refused.value)]

    assert refusals(device) == refusals(CPU)


def at_once(gathering: Gathering[Any, Any], calls: Sequence[Callable[[], Any]]) -> list[Future[Any]]:
    """Calls by as many threads, none of which starts a list before all of them wait for it."""
    gathering._is_starting = True
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        until = time.monotonic() + 60
        while len(gathering._waiting) < len(calls) and time.monotonic() < until:
            time.sleep(0.001)
        gathering._let_next_start()
        return futures


def test_tensors_of_several_threads_are_one_list(device, tmp_path, save, monkeypatch):
    fmt, names = FORMATS["BF16"], ["a", "b", "c", "d"]
    bits = {name: weights(fmt, 5000 + i, i) for i, name in enumerate(names)}
    plain, coded = tmp_path / "plain.safetensors", tmp_path / "nz.safetensors"
    save(plain, {name: ("BF16", array.shape, array) for name, array in bits.items()})
    compress(plain, coded)
    lists: list[int] = []
    for module, function in (triton_encode, "encode_all"), (triton_decode, "prepare"):
        call = getattr(module, function)
        monkeypatch.setattr(
            module,
            function,
            lambda tensors, *rest, call=call: lists.append(len(tensors)) or call(tensors, *rest),
        )
    gpu = device.gpu

    def encoded(array: Array, gpu: Gpu | None) -> dict[str, bytes]:
        kept, streams = lossless.encode(lambda a, b: array[a:b], array.size, fmt, gpu=gpu)
        return {str(kept): b""} | {
            name: b"".join(p.tobytes() for p in s.parts) for name, s in streams.items()
        }

    found = at_once(gpu._coded, [lambda array=array: encoded(array, gpu) for array in bits.values()])
    assert [future.result() for future in found] == [encoded(array, None) for array in bits.values()]
    assert lists == [4]
    with FolderSource(coded) as source:
        (words,) = (e for e in source.extents(source.find(coded.name, "c")) if e.stream == "words")
    data = bytearray(coded.read_bytes())
    data[words.start : words.start + 40] = b"\xff" * 40
    coded.write_bytes(data)
    with FolderSource(coded, device) as source:
        calls = [lambda tensor=tensor: source.read(tensor).tobytes() for tensor in source.tensors()]
        read = dict(zip(names, at_once(gpu._decoded, calls), strict=True))
    with pytest.raises(FormatError, match="tensor 'c'"):
        read.pop("c").result()
    assert {name: future.result() for name, future in read.items()} == {
        name: bits[name].tobytes() for name in "abd"
    }
    assert 4 in lists[1:]


def test_a_tensor_that_is_too_large_is_coded_on_the_cpu_and_says_so(device, model, tmp_path, monkeypatch):
    assert device.gpu is not None
    monkeypatch.setattr(Gpu, "has_room_for", lambda self, nbytes: False)
    for module in (encode_tensor, encode_ahead):
        monkeypatch.setattr(module, "SMALL", 1000)
    report = compress(model, tmp_path / "nz", device=device, verify=False)
    compress(model, tmp_path / "cpu")
    assert files(tmp_path / "nz") == files(tmp_path / "cpu")
    notes = {t.name: t.note for t in report.tensors}
    assert notes["embed"] == f"too large for the memory of {device.name}: coded on the CPU"
    assert notes["norm"] == "too small to shrink"


def test_errors_are_summed_as_on_the_cpu_whatever_a_piece_is(tmp_path, save):
    numel = PIECE + 5000
    save(tmp_path / "x.safetensors", {"w": ("F8_E5M2", (numel,), weights(FORMATS["F8_E5M2"], numel))})
    compress(tmp_path / "x.safetensors", tmp_path / "nz.safetensors", [Rule("*", Scheme("truncated", 0))])
    large: Any = SimpleNamespace(piece=8 * PIECE)
    one_piece = Device("large pieces", large, smallest=1 << 62)
    found = [
        verify(tmp_path / "nz.safetensors", tmp_path / "x.safetensors", device=where).tensors
        for where in (CPU, one_piece)
    ]
    assert found[1] == found[0]
    assert found[0][0].relative_l2 != ErrorSums().relative_l2


# On a card


@pytest.mark.gpu
def test_commands_on_a_card(model, tmp_path, neuzip):
    assert neuzip("compress", model, tmp_path / "cpu", "--device", "cpu").exit_code == 0
    said = neuzip("compress", model, tmp_path / "cuda", "--device", "cuda", "--json").json
    assert said["device"] == "cuda:0"
    assert files(tmp_path / "cuda") == files(tmp_path / "cpu")
    for verb, *target in (["verify"], ["inspect"], ["decompress", tmp_path / "back"]):
        assert (
            neuzip(verb, tmp_path / "cuda", *target, "--device", "cuda", "--json").json["device"] == "cuda:0"
        )
    assert files(tmp_path / "back") == files(model)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [Scheme(), Scheme("truncated", 3), Scheme("truncated", 2, 512)], ids=str)
def test_tensors_of_many_pieces(scheme, device, tmp_path, save):
    numel = 11 * PIECE + 12345
    plain = save(
        tmp_path / "plain.safetensors",
        {name: (name, (numel,), weights(FORMATS[name], numel)) for name in ("BF16", "F32", "F8_E4M3")},
    )
    coded, coded_there = tmp_path / "coded.safetensors", tmp_path / "coded-there.safetensors"
    back, back_there = tmp_path / "back.safetensors", tmp_path / "back-there.safetensors"
    compress(plain, coded, [Rule("*", scheme)])
    compress(plain, coded_there, [Rule("*", scheme)], device=device)
    assert coded_there.read_bytes() == coded.read_bytes()
    decompress(coded, back)
    decompress(coded, back_there, device=device)
    assert back_there.read_bytes() == back.read_bytes()
    found = [verify(coded, plain, device=where) for where in (CPU, device)]
    assert found[1].tensors == found[0].tensors


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [[], ["--mantissa-bits", "3", "--block-size", "512"]], ids=["lossless", "k=3"]
)
def test_wikilm(options, neuzip_data, tmp_path, neuzip):
    model = neuzip_data / "wikilm-26m"
    for where in ("cpu", "cuda"):
        assert neuzip("compress", model, tmp_path / where, "--device", where, *options).exit_code == 0
        said = neuzip("decompress", tmp_path / where, tmp_path / f"{where}-back", "--device", where)
        assert said.exit_code == 0
    assert files(tmp_path / "cuda") == files(tmp_path / "cpu")
    assert files(tmp_path / "cuda-back") == files(tmp_path / "cpu-back")
    verdicts = [
        neuzip("verify", tmp_path / "cpu", "--original", model, "--device", d, "--json")
        for d in ("cpu", "cuda")
    ]
    assert verdicts[0].json["tensors"] == verdicts[1].json["tensors"]


@pytest.mark.gpu
def test_two_cards_under_torchrun(model, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    data = os.environ.get("NEUZIP_DATA")
    source = Path(data) / "wikilm-26m" if data else model
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    command = [sys.executable, "-P", "-m", "neuzip.cli", "compress", source, tmp_path / "nz"]
    said = subprocess.run(
        [*torchrun, *map(str, command), "--device", "cuda", "--json"],
        check=True, capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(said.stdout)["device"] == "cuda:0"
    compress(source, tmp_path / "cpu")
    assert files(tmp_path / "nz") == files(tmp_path / "cpu")
    place = torch.device("cuda", 1)
    decompress(tmp_path / "nz", tmp_path / "back", device=Device("cuda:1", Gpu(place)))
    assert files(tmp_path / "back") == files(source)
