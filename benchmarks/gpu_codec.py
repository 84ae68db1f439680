"""The lossless codec on one GPU beside DFloat11's decode kernel and nvCOMP's ANS; the load of a checkpoint.

    python benchmarks/gpu_codec.py [--sections decode encode model formats load] [--folder /tmp]
    python benchmarks/gpu_codec.py --rounds 20 --loads 3        everything in about 3 minutes

Times are medians of CUDA events. Cases that are compared take turns. The launches of a case lie in one CUDA
graph, each with data of its own, so much of it that nothing is found in the L2. Where a line says "a call",
it is a user's call on an idle card, Python and launches included. Loads are timed by the clock. What does
not give back the original bytes, whether its outputs held 0x00 or 0xFF before, is not timed: it ends the
run. Speeds are of the plain form: of the output when decoding, of the input when encoding.

The limit for decoders of bf16 is two thirds of the speed of a device copy, measured in the same run: a byte
of sign and mantissa read and two written for each weight, exponents left out. That of all else is the bytes
read and written at that speed; for a load it is the compressed bytes at the speed of a copy from pinned
memory.

Only a run of everything is saved, as benchmarks/results/gpu_codec.json. Where there is no git, NEUZIP_COMMIT
names the commit. Peers that are not installed are said to be so: pip install -r benchmarks/requirements.txt
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import io
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from record import Environment, Measurement, save, spread

import neuzip
from neuzip.compress import compress
from neuzip.compress.pieces import padded
from neuzip.compress.schemes import coded_blocks, lossless
from neuzip.compress.schemes.truncated import Rounding
from neuzip.compress.workers import Workers
from neuzip.kernels import rans
from neuzip.kernels.float_fields import FORMATS, FloatFormat, census, plane_bytes, plane_widths, split
from neuzip.kernels.rans.coded import CodedTensor, raise_if_corrupt
from neuzip.kernels.rans.triton import encode as triton_encode
from neuzip.kernels.rans.triton.decode import decode, prepare

Tensor = torch.Tensor
Row = dict[str, Any]
Call = Callable[[], object]

LARGE, SMALL = 4 * 14336 * 4096, 1 << 24  # weights
L2 = 60_000_000
BF16 = FORMATS["BF16"]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Decoder:
    """Ready to be launched: `launch` fills `outs`, which must then hold what `originals` hold.

    `nbytes` is the size of the coded form, `exponent_bytes` that of its exponents where they stand alone.
    """

    launch: Call
    outs: Sequence[Tensor]
    originals: Sequence[Tensor]
    nbytes: int
    exponent_bytes: int = 0
    plain_bytes: int = 0  # if not those of the originals
    inputs: Sequence[CodedTensor] = ()  # kept from being freed: a plan of launches does not

    @property
    def plain(self) -> int:
        """Bytes of the plain form."""
        return self.plain_bytes or sum(t.nbytes for t in self.originals)


@dataclass(frozen=True)
class Case:
    """A line of the table: `calls` to be timed, on data of their own, each for `nbytes` of plain form.

    `how`: "graph", all in one CUDA graph; "a call", each on an idle card; "clock", for the host's clock.
    `decoders` are what the calls launch, if those decode.
    """

    row: str
    by: str
    calls: Sequence[Call]
    nbytes: int
    how: str = "graph"
    facts: Row = field(default_factory=dict)
    decoders: Sequence[Decoder] = ()


def main() -> None:
    """Measure all sections, print the table, save it."""
    sections = {
        "decode": decode_rows, "encode": encode_rows, "model": model_rows, "formats": format_rows,
        "load": load_rows,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--loads", type=int, default=7, help="of the checkpoint, by each loader")
    parser.add_argument("--layers", type=int, default=32, help="of the 8B-shaped model")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="has 27 GB free")
    arguments = parser.parse_args()
    whole = set(arguments.sections) == set(sections) and arguments.layers == 32
    packages = ("neuzip-toolkit", "torch", "triton", "safetensors", *PEERS.values(), "cupy-cuda13x")
    environment = Environment.here(*packages, gpu=True, needs_commit=whole)
    torch.manual_seed(0)
    rows: list[Row] = []
    with torch.cuda.stream(stream()):
        for name in arguments.sections:
            of_section = sections[name](arguments)
            torch.cuda.empty_cache()
            show(of_section)
            rows += of_section
        speeds = {"device_copy_gb_s": copy_speed(), "link_gb_s": link_speed()}
    print(f"\ndevice copy {copy_speed():.0f} GB/s read and written, link {link_speed():.1f} GB/s")
    if not whole:
        print("not saved: this was not a run of everything")
        return
    path = save(
        "gpu_codec",
        "the lossless codec on one GPU; GB/s of the plain form, medians",
        Measurement(environment, rows, {"rounds": arguments.rounds, "loads": arguments.loads, **speeds}),
    )
    print(f"saved {path}")


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print(f"\n{'':84}{'GB/s':>8}{'must':>8}{'stretch':>8}{'of limit':>9}{'size':>8}")
    for r in rows:
        line = f"{r['row'] + ' | ' + r['by']:84}"
        if "status" in r:
            print(line + r["status"])
            continue
        line += "".join(
            f"{r[key]:8.1f}" if key in r else " " * 8 for key in ("gb_s", "must_gb_s", "stretch_gb_s")
        )
        line += f"{r['share']:9.0%}" if "share" in r else " " * 9
        line += f"{r['ratio']:8.2%}" if "ratio" in r else " " * 8
        if "must_gb_s" in r:
            line += "  met" if r["gb_s"] >= r["must_gb_s"] else "  MISSED"
        print(line + (f"  {r['bits_per_exponent']:.3f} bits/exponent" if "bits_per_exponent" in r else ""))


# The sections


def decode_rows(arguments: argparse.Namespace) -> list[Row]:
    """Lossless bf16 at two sizes, and the peers on the same weights."""
    rows: list[Row] = []
    for numel, label, must, stretch in ((LARGE, "235 M", 1500, 2000), (SMALL, "16 Mi", 1300, 1500)):
        name = f"bf16 decode, lossless, {label} weights"
        weights = [gaussian(numel) for _ in range(sets(3 * numel))]
        tensors = [encode(bits) for bits in weights]
        ours = [prepared([tensor], [bits]) for tensor, bits in zip(tensors, weights, strict=True)]
        calls = [called([tensor], c) for tensor, c in zip(tensors, ours, strict=True)]
        aims = {"must_gb_s": must, "stretch_gb_s": stretch, "must_bits": 2.62}
        cases = [
            decoding(name, "neuzip", ours, {**bf16_limit(), **aims}),
            decoding(f"{name}, a call", "neuzip", calls, bf16_limit(), "a call"),
        ]
        absent: list[Row] = []
        for by, make, limit in (
            ("DFloat11", dfloat11, bf16_limit()),
            ("nvCOMP ANS", nvcomp_weights, bf16_limit()),
            ("nvCOMP ANS, exponents alone, not merged", nvcomp_exponents, {}),
        ):
            try:
                peers = [make(bits) for bits in weights]
            except ModuleNotFoundError as error:
                absent.append({"row": name, "by": by, "status": f"not installed: {error.name}"})
                continue
            cases.append(decoding(name, with_version(by), peers, limit))
        rows += measure(cases, arguments.rounds) + absent
    return rows


def encode_rows(arguments: argparse.Namespace) -> list[Row]:
    """Encode: what a user calls, the histogram and the table included."""
    name = "bf16 encode, 235 M weights"
    weights = [gaussian(LARGE) for _ in range(sets(3 * LARGE))]
    require_equal_lists(weights[0])
    tensors = [encode(bits) for bits in weights]
    require_bytes_of_cpu(tensors[0], weights[0])
    for tensor, bits in zip(tensors, weights, strict=True):
        ours = prepared([tensor], [bits])
        check(name, [ours], ours.launch)
    nbytes = size(tensors[0])[0]
    cases = [
        Case(
            name, "neuzip", [partial(encode, bits) for bits in weights], 2 * LARGE, "a call",
            {
                "must_gb_s": 900, "ratio": nbytes / (2 * LARGE),
                **moving(2 * LARGE, read=2 * 2 * LARGE, written=nbytes),
            },
        )
    ]  # fmt: skip
    absent: list[Row] = []
    for by, dtype in (("nvCOMP ANS", NVCOMP_HALF), ("nvCOMP ANS, exponents alone", NVCOMP_BYTE)):
        try:
            codecs = [NvcompAns(bits if dtype == NVCOMP_HALF else exponents(bits), dtype) for bits in weights]
        except ModuleNotFoundError as error:
            absent.append({"row": name, "by": by, "status": f"not installed: {error.name}"})
            continue
        for codec in codecs:
            check(f"{name}, {by}", [codec.decoder()], codec.decompress)
        coded = codecs[0].decoder()
        facts = {"ratio": coded.nbytes / coded.plain}
        cases.append(Case(name, with_version(by), [c.compress for c in codecs], 2 * LARGE, facts=facts))
    return measure(cases, arguments.rounds) + absent


def model_rows(arguments: argparse.Namespace) -> list[Row]:
    """All tensors of a model at once, encoded and decoded. For nvCOMP they are one array."""
    numels = list(llama_8b(arguments.layers).values())
    flat = torch.cat([gaussian(numel) for numel in numels])
    weights = list(flat.split(numels))
    tensors = encode_list(weights)
    nbytes = sum(size(tensor)[0] for tensor in tensors)
    encoding = Case(
        f"bf16 encode, 8B-shaped model of {len(weights)} tensors", "neuzip", [partial(encode_list, weights)],
        flat.nbytes, "a call",
        {
            "must_gb_s": 700, "ratio": nbytes / flat.nbytes,
            **moving(flat.nbytes, read=2 * flat.nbytes, written=nbytes),
        },
    )  # fmt: skip
    rows = measure([encoding], min(arguments.rounds, 20))  # while there is memory for its results
    torch.cuda.empty_cache()
    ours = prepared(tensors, weights)
    name = f"bf16 decode, lossless, 8B-shaped model of {len(weights)} tensors"
    aims = {"must_gb_s": 1800}
    cases = [
        decoding(f"{name}, a call", "neuzip", [called(tensors, ours)], {**bf16_limit(), **aims}, "a call"),
        decoding(name, "neuzip", [ours], bf16_limit()),
    ]
    absent: list[Row] = []
    try:
        cases.append(decoding(name, with_version("nvCOMP ANS"), [nvcomp_weights(flat)], bf16_limit()))
    except ModuleNotFoundError as error:
        absent.append({"row": name, "by": "nvCOMP ANS", "status": f"not installed: {error.name}"})
    return rows + measure(cases, min(arguments.rounds, 20)) + absent


def format_rows(arguments: argparse.Namespace) -> list[Row]:
    """Other formats and fewer mantissa bits: a share of the speed of lossless bf16, a byte of output."""
    cases: list[Case] = []
    for name, fmt, make in formats():
        originals, tensors = [], []
        for _ in range(sets(3 * LARGE)):
            stored, normaliser, block, original = make()
            tensors.append(replace(encode(stored, fmt), normaliser=normaliser, block_size=block))
            originals.append(original)
        ours = [prepared([tensor], [bits]) for tensor, bits in zip(tensors, originals, strict=True)]
        plain = originals[0].nbytes
        limit = bf16_limit() if not cases else moving(plain, read=ours[0].nbytes, written=plain)
        cases.append(decoding(name, "neuzip", ours, limit))
    first, *others = measure(cases, arguments.rounds)
    return [first, *({**row, "must_gb_s": share_of_bf16(row["row"]) * first["gb_s"]} for row in others)]


def share_of_bf16(name: str) -> float:
    """The share of bf16's speed that a format has to reach: fp8 has twice as many exponents a byte."""
    return 0.6 if name.startswith("fp8") else 0.85


Made = tuple[Tensor, Tensor | None, int | None, Tensor]
"""What is coded, its normaliser and block size, and what must come out."""


def formats() -> Iterator[tuple[str, FloatFormat, Callable[[], Made]]]:
    """Tensors of as many bytes each. fp8 is scaled as checkpoints are: the largest weight is the format's."""
    nbytes = 2 * LARGE

    def plain(dtype: torch.dtype, through: torch.dtype) -> Made:
        values = torch.randn(nbytes // dtype.itemsize, device="cuda") * 0.02
        if dtype.itemsize == 1:
            values *= torch.finfo(dtype).max / values.abs().max()
        bits = values.to(through).to(dtype).view(INTEGERS[dtype.itemsize])
        return bits, None, None, bits

    def rounded(kept: int) -> Made:
        dropped, bits = 7 - kept, gaussian(LARGE).to(torch.int32) & 0xFFFF
        bits += (1 << (dropped - 1)) - 1 + (bits >> dropped & 1)
        even = (bits >> dropped << dropped).to(torch.int16)
        return even, None, None, even

    def normalised(kept: int, block: int) -> Made:
        part, times = gaussian(SMALL // 4).cpu().numpy().view(np.uint16), 4 * LARGE // SMALL
        rounding = Rounding(BF16, kept, block)
        stored, normaliser = rounding.apply(part)
        restored = rounding.restore(stored, normaliser)
        arrays = (stored.view(np.int16), normaliser, restored.view(np.int16))
        coded, factors, out = (torch.from_numpy(a).cuda().repeat(times) for a in arrays)
        return coded, factors, block, out

    yield "bf16 decode, lossless", BF16, partial(plain, torch.bfloat16, torch.bfloat16)
    yield "fp16 decode, lossless", FORMATS["F16"], partial(plain, torch.float16, torch.float16)
    for name, dtype in (("fp8 e4m3", torch.float8_e4m3fn), ("fp8 e5m2", torch.float8_e5m2)):
        yield f"{name} decode, lossless", FORMATS[f"F8_{name[4:].upper()}"], partial(plain, dtype, dtype)
    yield "fp32 decode, lossless", FORMATS["F32"], partial(plain, torch.float32, torch.float32)
    yield "fp32 decode, lossless, was bf16", FORMATS["F32"], partial(plain, torch.float32, torch.bfloat16)
    for kept in range(6, -1, -1):
        yield f"bf16 decode, k = {kept}", BF16, partial(rounded, kept)
    yield "bf16 decode, k = 3, blocks of 512", BF16, partial(normalised, 3, 512)


def load_rows(arguments: argparse.Namespace) -> list[Row]:
    """A checkpoint in the page cache to the GPU, whose memory has to be allocated, too."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        plain, small = Path(folder) / "plain.safetensors", Path(folder) / "small.safetensors"
        model = write_model(plain, llama_8b(arguments.layers))
        compress(plain, small, verify=False)
        total, read = plain.stat().st_size, small.stat().st_size
        loads: dict[str, Callable[[], Mapping[str, Tensor]]] = {
            "neuzip": partial(neuzip.load_file, small, device="cuda"),
            "neuzip, verify=False": partial(neuzip.load_file, small, device="cuda", verify=False),
            "safetensors": partial(safetensors.torch.load_file, plain, device="cuda"),
            'safetensors, backend="pread"': partial(
                safetensors.torch.load_file, plain, device="cuda", backend="pread"
            ),
        }
        for by, load in loads.items():
            for poison in (0x00, 0xFF):
                spoilt = torch.full((2 * total,), poison, dtype=torch.uint8, device="cuda")
                torch.cuda.synchronize()
                del spoilt  # torch's allocator hands this memory out next
                loaded = load()
                if loaded.keys() != model.keys() or not all(same(loaded[n], model[n]) for n in model):
                    raise SystemExit(f"{by} does not load the original bytes: not timed")
                del loaded
        model.clear()
        times: dict[str, list[float]] = {by: [] for by in loads}
        for _ in range(arguments.loads):
            for by, load in loads.items():
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
                began = time.perf_counter()
                loaded = load()
                torch.cuda.synchronize()
                times[by].append(1e3 * (time.perf_counter() - began))
                del loaded
    name = f"load_file of a checkpoint of {total / 1e9:.0f} GB in the page cache"
    limits: dict[bool, Row] = {
        True: {"limit_gb_s": link_speed() * total / read, "ratio": read / total},
        False: {"limit_gb_s": link_speed()},
    }
    rows = [as_row(Case(name, by, [], total, "clock", limits["neuzip" in by]), times[by]) for by in loads]
    default = next(row for row in rows if row["by"] == "safetensors")
    rows[0] |= {"must_gb_s": 50.0, "stretch_gb_s": rows[0]["limit_gb_s"]}
    rows[0]["times_safetensors"] = rows[0]["gb_s"] / default["gb_s"]
    return rows


def llama_8b(layers: int, *, narrow: bool = False) -> dict[str, int]:
    """The weights of each tensor of Llama 3.1 8B; `narrow` ones try a script out on a CPU."""
    hidden, inner, keys, words = 4096, 14336, 1024, 128256
    sizes = {"model.embed_tokens": words * hidden}
    for i in range(layers):
        sizes |= {
            f"model.layers.{i}.{part}": numel
            for part, numel in {
                "self_attn.q_proj": hidden * hidden, "self_attn.k_proj": keys * hidden,
                "self_attn.v_proj": keys * hidden, "self_attn.o_proj": hidden * hidden,
                "mlp.gate_proj": inner * hidden, "mlp.up_proj": inner * hidden,
                "mlp.down_proj": hidden * inner,
                "input_layernorm": hidden, "post_attention_layernorm": hidden,
            }.items()
        }  # fmt: skip
    return {
        f"{n}.weight": max(numel >> 16, 1 << 11) if narrow else numel
        for n, numel in {**sizes, "model.norm": hidden, "lm_head": words * hidden}.items()
    }


def write_model(
    path: Path, sizes: Mapping[str, int], device: torch.device | str = "cuda"
) -> dict[str, Tensor]:
    """Write a checkpoint of Gaussian bf16 weights, by size of each tensor, and give the bit patterns."""
    header, at = {}, 0
    for name, numel in sizes.items():
        header[name] = {"dtype": "BF16", "shape": [numel], "data_offsets": [at, at + 2 * numel]}
        at += 2 * numel
    text, model = json.dumps(header).encode(), {}
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, numel in sizes.items():
            model[name] = gaussian(numel, device)
            model[name].cpu().numpy().tofile(file)
    return model


# Our coder


def gaussian(numel: int, device: torch.device | str = "cuda") -> Tensor:
    """The bit patterns of N(0, 0.02) in bf16."""
    return (torch.randn(numel, device=device) * 0.02).to(torch.bfloat16).view(torch.int16)


def encode(bits: Tensor, fmt: FloatFormat = BF16) -> CodedTensor:
    """Code on the GPU."""
    coded = triton_encode.encode(bits, fmt)
    return CodedTensor(
        fmt, coded.kept_bits, bits.numel(), coded.table, coded.index, coded.words, coded.planes
    )


def encode_list(tensors: Sequence[Tensor], fmt: FloatFormat = BF16) -> list[CodedTensor]:
    """Code several tensors on the GPU in one call."""
    return [
        CodedTensor(fmt, coded.kept_bits, bits.numel(), coded.table, coded.index, coded.words, coded.planes)
        for bits, coded in zip(tensors, triton_encode.encode_all(tensors, fmt), strict=True)
    ]


def require_equal_lists(bits: Tensor) -> None:
    """Exit unless pieces of a tensor, coded in one call, are what the CPU makes of each of them.

    They are small and large, coded in pairs and singly, with few mantissa bits, and one exponent alone.
    """
    noise = torch.randint(-(1 << 15), 1 << 15, (70_001,), dtype=torch.int16, device="cuda")
    pieces = [bits[:1], bits[:4096], bits[: 5 * (1 << 14) + 77], noise, bits[:300_000] & -16, bits[:999] * 0]
    for piece, coded in zip(pieces, triton_encode.encode_all(pieces, BF16), strict=True):
        array = piece.cpu().numpy().view(BF16.dtype)
        counted = census(array, BF16)
        table = rans.build_table(counted.exponents, counted.pairs)
        symbols, planes = split(array, BF16, counted.kept_bits(BF16))
        expected = rans.encode(symbols, table)
        pairs: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = [
            (table.palette, coded.table.palette), (table.frequencies, coded.table.frequencies),
            (expected.index, coded.index.cpu().numpy()), (expected.words, coded.words.cpu().numpy()),
            *((plane, coded.planes[width].cpu().numpy()) for width, plane in planes.items()),
        ]  # fmt: skip
        if any(theirs.tobytes() != mine.tobytes() for theirs, mine in pairs):
            raise SystemExit("a list of tensors is not coded as the CPU codes each of them: not timed")


def require_bytes_of_cpu(tensor: CodedTensor, bits: Tensor) -> None:
    """Exit unless the CPU's encoder writes the same index, words and planes."""
    array = bits.cpu().numpy().view(tensor.fmt.dtype)
    with Workers() as workers:
        _, streams = lossless.encode(
            lambda start, stop: array[start:stop], array.size, tensor.fmt, workers.map
        )
    planes = torch.cat([tensor.planes[width] for width in plane_widths(1 + tensor.kept_bits)])
    coded = {"index": tensor.index, "words": tensor.words[: word_count(tensor)], "sign_mantissa": planes}
    for name, mine in coded.items():
        theirs = np.concatenate([part.view(np.uint8).reshape(-1) for part in streams[name].parts])
        if padded(mine.nbytes) != theirs.size or mine.view(torch.uint8).cpu().numpy().tobytes() != (
            theirs[: mine.nbytes].tobytes()
        ):
            raise SystemExit(f"the {name} of the GPU's encoder are not those of the CPU's: not timed")


def word_count(tensor: CodedTensor) -> int:
    """Words of all blocks."""
    return int((tensor.index.to(torch.int64) & 0xFFFF).sum())


def size(tensor: CodedTensor) -> tuple[int, int]:
    """Bytes of a tensor's streams in a container, and of its exponents': table, index and words."""
    table = coded_blocks.TABLE_HEAD + tensor.table.palette.size + tensor.table.frequencies.size
    parts = sum(padded(2 * n) for n in (table, tensor.index.numel(), word_count(tensor)))
    planes = sum(padded(plane_bytes(width, tensor.numel)) for width in plane_widths(1 + tensor.kept_bits))
    normaliser = 0 if tensor.normaliser is None else padded(tensor.normaliser.numel())
    return parts + planes + normaliser, parts


def prepared(tensors: Sequence[CodedTensor], originals: Sequence[Tensor]) -> Decoder:
    """Our decoder, all but the launches done."""
    outs = [torch.empty_like(bits) for bits in originals]
    nbytes, exponent_bytes = (sum(column) for column in zip(*map(size, tensors), strict=True))
    return Decoder(prepare(tensors, outs).launch, outs, originals, nbytes, exponent_bytes, inputs=tensors)


def called(tensors: Sequence[CodedTensor], decoder: Decoder) -> Decoder:
    """The same as a user calls it."""
    names = [""] * len(tensors)
    return replace(decoder, launch=lambda: raise_if_corrupt(decode(tensors, decoder.outs), names))


# The peers

PEERS = {"DFloat11": "dfloat11", "nvCOMP ANS": "nvidia-libnvcomp-cu13"}
NVCOMP_BYTE, NVCOMP_HALF = 1, 10  # of nvcompType_t


def with_version(by: str) -> str:
    """The name of a peer with the version that is installed."""
    name, comma, rest = by.partition(",")
    return f"{name} {version(PEERS[name])}{comma}{rest}"


def exponents(bits: Tensor) -> Tensor:
    """The exponents of bf16, a byte each."""
    return (bits >> 7 & 0xFF).to(torch.uint8)


def dfloat11(bits: Tensor) -> Decoder:
    """DFloat11's kernel from its wheel, and streams as it wants them, coded here: its encoder takes minutes.

    The exponents' Huffman codes lie behind each other, leading bit first. A thread of the kernel takes 8
    bytes of them. It is told where the first code in these begins (5 bits a thread), and a block of 512
    threads which weight it begins with.
    """
    import cupy

    folder = package_folder("dfloat11")
    with contextlib.redirect_stdout(io.StringIO()):
        spec = importlib.util.spec_from_file_location("dfloat11_utils", folder / "dfloat11_utils.py")
        assert spec is not None and spec.loader is not None
        tools = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tools)
        symbols = exponents(bits).int()
        counts = torch.bincount(symbols, minlength=256).tolist()
        _, _, book = tools.get_32bit_codec({e: n for e, n in enumerate(counts) if n})
        tables = tools.get_luts(book).cuda().contiguous()
    kernel = cupy.RawModule(path=str(folder / "decode.ptx")).get_function("decode")
    code_lengths, code_values = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for symbol, (length, value) in book.items():
        if isinstance(symbol, int):
            code_lengths[symbol], code_values[symbol] = length, value
    lengths, values = (torch.from_numpy(a).cuda()[symbols] for a in (code_lengths, code_values))
    ends = lengths.cumsum(0)
    starts = ends - lengths
    nbytes = -(-int(ends[-1]) // 8)
    stream_bits = torch.zeros(8 * nbytes, dtype=torch.uint8, device="cuda")
    for i in range(int(code_lengths.max())):
        has = lengths > i
        stream_bits[starts[has] + i] = (values[has] >> (lengths[has] - 1 - i) & 1).to(torch.uint8)
    codes = packed(stream_bits)

    threads, thread_bits = 512, 64
    blocks = -(-8 * nbytes // (threads * thread_bits))
    thread, first = leaders(starts // thread_bits)
    gaps = torch.zeros(threads * blocks, dtype=torch.int64, device="cuda")
    gaps[thread] = starts[first] % thread_bits
    gap_bits = packed((gaps[:, None] >> torch.arange(4, -1, -1, device="cuda") & 1).to(torch.uint8).view(-1))
    _, first = leaders(starts // (threads * thread_bits))
    positions = torch.cat([first, torch.tensor([bits.numel()], device="cuda")])
    shared = 4 * threads + 4 + 2 * int(positions.diff().max())
    sign_mantissa = (bits >> 8 & 0x80 | bits & 0x7F).to(torch.uint8)
    inputs = [tables, codes, sign_mantissa, positions.to(torch.int32), gap_bits]
    out = torch.empty_like(bits)

    def launch() -> None:
        with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            pointers = [t.data_ptr() for t in (*inputs, out)]
            arguments = (*pointers, tables.shape[0], nbytes, bits.numel())
            kernel((blocks,), (threads,), arguments, shared_mem=shared)

    total = sum(t.nbytes for t in inputs)
    return Decoder(launch, [out], [bits], total, total - sign_mantissa.nbytes)


def packed(ones: Tensor) -> Tensor:
    """Bytes of 8 bits each, the first one leading."""
    return (ones.view(-1, 8) << torch.arange(7, -1, -1, dtype=torch.uint8, device="cuda")).sum(
        1, dtype=torch.uint8
    )


def leaders(group: Tensor) -> tuple[Tensor, Tensor]:
    """The groups, which rise, and the position at which each begins."""
    begins = torch.ones_like(group, dtype=torch.bool)
    begins[1:] = group[1:] != group[:-1]
    return group[begins], torch.nonzero(begins).flatten()


def package_folder(package: str) -> Path:
    """Where a package lies, which need not be importable. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(name=package)
    return Path(spec.origin).parent


def nvcomp_weights(bits: Tensor) -> Decoder:
    """nvCOMP's form for half precision, which is for all 16-bit floats."""
    return NvcompAns(bits, NVCOMP_HALF).decoder()


def nvcomp_exponents(bits: Tensor) -> Decoder:
    """nvCOMP's ANS on exponents: what it gives still has to be merged with sign and mantissa."""
    return NvcompAns(exponents(bits), NVCOMP_BYTE).decoder()


class _NvcompOptions(ctypes.Structure):
    """nvCOMP 6's, for compression and, laid out alike, for decompression. 0 is the default of all else."""

    _fields_ = (("kind", ctypes.c_int), ("type", ctypes.c_int), ("others", ctypes.c_ubyte * 56))


class NvcompAns:
    """nvCOMP's batched ANS on chunks of one tensor, through its C functions: those of Python have more to do.

    `compress` writes the coded chunks, `decompress` the tensor `out`.
    """

    def __init__(self, data: Tensor, dtype: int, chunk: int | None = None) -> None:
        # Not `from nvidia import`: other wheels lie in that namespace too, and the error would be another.
        self._library = importlib.import_module("nvidia.libnvcomp").load_library()
        self._data, self.out = data, torch.empty_like(data)
        self._options = _NvcompOptions(0, dtype)
        # Of 32 KiB to 1 MiB the fastest on an H200, or nearly so with smaller output.
        self._chunk = chunk or (1 << 18 if data.nbytes > 1 << 26 else 1 << 16)
        starts = torch.arange(0, data.nbytes, self._chunk, device="cuda")
        self._count = starts.numel()
        self._plain_sizes = torch.clamp(data.nbytes - starts, max=self._chunk)
        self._plain, self._restored = starts + data.data_ptr(), starts + self.out.data_ptr()
        room = self._asked("CompressGetMaxOutputChunkSize", self._chunk, self._options)
        room = -(-room // 16) * 16
        self._coded = torch.empty(self._count * room, dtype=torch.uint8, device="cuda")
        self._coded_chunks = torch.arange(self._count, device="cuda") * room + self._coded.data_ptr()
        self._coded_sizes, self._written = torch.zeros_like(starts), torch.zeros_like(starts)
        self._statuses = torch.full((self._count,), -1, dtype=torch.int32, device="cuda")
        self._work = {}
        for what in ("Compress", "Decompress"):
            size = self._asked(
                f"{what}GetTempSize",
                self._count,
                self._chunk,
                self._options,
                after=(data.nbytes, stream_number()),
            )
            self._work[what] = torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")
        self.compress()
        self._require_success()

    def compress(self) -> None:
        """Launch the encoder."""
        work = self._work["Compress"]
        self._call(
            "CompressAsync", self._plain, self._plain_sizes, self._chunk, self._count, work, work.numel(),
            self._coded_chunks, self._coded_sizes, self._options, self._statuses, stream_number(),
        )  # fmt: skip

    def decompress(self) -> None:
        """Launch the decoder."""
        work = self._work["Decompress"]
        self._call(
            "DecompressAsync", self._coded_chunks, self._coded_sizes, self._plain_sizes, self._written,
            self._count, work, work.numel(), self._restored, self._options, self._statuses, stream_number(),
        )  # fmt: skip

    def decoder(self) -> Decoder:
        """As the others. Sizes are those of the chunks."""
        coded, data = int(self._coded_sizes.sum()), self._data
        if data.dtype == torch.int16:
            return Decoder(self.decompress, [self.out], [data], coded)
        return Decoder(self.decompress, [self.out], [data], coded + data.numel(), coded, 2 * data.numel())

    def _asked(self, function: str, *before: object, after: tuple[object, ...] = ()) -> int:
        answer = ctypes.c_size_t()
        self._call(function, *before, ctypes.byref(answer), *after)
        return answer.value

    def _call(self, function: str, *arguments: object) -> None:
        """Numbers, pointers to tensors, and what else ctypes knows."""
        numbers = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        plain = [ctypes.c_size_t(a) if isinstance(a, int) else a for a in numbers]
        if status := getattr(self._library, f"nvcompBatchedANS{function}")(*plain):
            raise SystemExit(f"nvcompBatchedANS{function} says {status}")

    def _require_success(self) -> None:
        torch.cuda.synchronize()
        if bool(self._statuses.any()):
            raise SystemExit("nvCOMP could not encode")


def stream_number() -> int:
    """The current stream, for other libraries."""
    return int(torch.cuda.current_stream().cuda_stream)


# Measuring


@functools.cache
def stream() -> torch.cuda.Stream:
    """The stream that all runs on: on the default one no graph can be captured."""
    return torch.cuda.Stream()


def sets(nbytes: int) -> int:
    """So many inputs and outputs of `nbytes` that nothing of the first is in the L2 after the last."""
    return max(2, math.ceil(8 * L2 / nbytes))


def decoding(row: str, by: str, decoders: Sequence[Decoder], facts: Row, how: str = "graph") -> Case:
    """A case of decoders."""
    first = decoders[0]
    facts = {"ratio": first.nbytes / first.plain, **facts}
    if first.exponent_bytes:
        facts["bits_per_exponent"] = 8 * first.exponent_bytes / sum(t.numel() for t in first.originals)
    return Case(row, by, [d.launch for d in decoders], first.plain, how, facts, decoders)


def check(name: str, decoders: Sequence[Decoder], run: Call) -> None:
    """Exit unless `run` writes every byte of all outputs, and the right ones."""
    for poison in (0x00, 0xFF):
        for decoder in decoders:
            for out in decoder.outs:
                out.view(torch.uint8).fill_(poison)
        torch.cuda.synchronize()
        run()
        torch.cuda.synchronize()
        pairs = [pair for d in decoders for pair in zip(d.outs, d.originals, strict=True)]
        if not all(same(out, original) for out, original in pairs):
            raise SystemExit(f"{name} does not give back the original bytes: not timed")


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of as many dimensions hold the same bytes."""
    halves = (x.reshape(-1).view(torch.uint8).split(1 << 28) for x in (a, b))
    return a.shape == b.shape and all(torch.equal(x, y) for x, y in zip(*halves, strict=True))


def measure(cases: Sequence[Case], rounds: int) -> list[Row]:
    """Time cases in turns, each of which has shown just before that it is right: a row for each."""
    runs = [captured(case.calls) if case.how == "graph" else partial(all_of, case.calls) for case in cases]
    for case, run in zip(cases, runs, strict=True):
        check(f"{case.row}, {case.by}", case.decoders, run)
    times: list[list[float]] = [[] for _ in cases]
    for turn in range(rounds):
        for case, run, mine in zip(cases, runs, times, strict=True):
            if case.how == "graph":
                mine.append(milliseconds(run, warm=True) / len(case.calls))
            else:
                mine.append(milliseconds(case.calls[turn % len(case.calls)]))
    return [as_row(case, mine) for case, mine in zip(cases, times, strict=True)]


def captured(calls: Sequence[Call]) -> Call:
    """All calls in one CUDA graph."""
    all_of(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream()):
        all_of(calls)
    replay: Call = graph.replay
    return replay


def all_of(calls: Sequence[Call]) -> None:
    """One after the other."""
    for call in calls:
        call()


def milliseconds(call: Call, warm: bool = False) -> float:
    """Of a call on an idle card, or (`warm`) behind another such call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if warm:
        call()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def as_row(case: Case, times: Sequence[float]) -> Row:
    """What is saved of a case that took `times` milliseconds."""
    speeds = [case.nbytes / ms / 1e6 for ms in times]
    row: Row = {
        "row": case.row,
        "by": case.by,
        "how": case.how,
        "bytes": case.nbytes,
        **spread(times, "ms"),
        **spread(speeds, "gb_s"),
        "range_gb_s": [min(speeds), max(speeds)],
        **case.facts,
    }
    if "limit_gb_s" in row:
        row["share"] = row["gb_s"] / row["limit_gb_s"]
    return row


@functools.cache
def bf16_limit() -> Row:
    """The limit for decoders of bf16: of three bytes moved two are weights."""
    return {"limit_gb_s": copy_speed() * 2 / 3}


@functools.cache
def copy_speed() -> float:
    """GB/s of a device copy, bytes read and bytes written."""
    source = torch.randint(-(2**62), 2**62, (1 << 28,), device="cuda")
    return 2 * copying(source, torch.empty_like(source))


@functools.cache
def link_speed() -> float:
    """GB/s of a copy from pinned memory."""
    source = torch.ones(1 << 30, dtype=torch.uint8).pin_memory()
    return copying(source, torch.empty_like(source, device="cuda"))


def copying(source: Tensor, target: Tensor) -> float:
    """GB/s of `source`."""
    copy = partial(target.copy_, source, non_blocking=True)
    return source.nbytes / 1e6 / statistics.median(milliseconds(copy, warm=True) for _ in range(20))


def moving(plain: int, *, read: int, written: int) -> Row:
    """The limit for `plain` bytes when so much is read and written at the speed of a copy."""
    return {"limit_gb_s": copy_speed() * plain / (read + written)}


if __name__ == "__main__":
    main()
