"""Draws docs/pictures from the demo checkpoint, its container, and benchmarks/results.

python benchmarks/pictures.py            # write them
python benchmarks/pictures.py --check    # exit 1 if one differs

They are written as text, element by element: the same bytes on every machine, and few of them.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neuzip import compress_checkpoint
from neuzip.compress.sources.folder import FolderSource
from neuzip.eval.demo import CHECKPOINT
from neuzip.eval.figure_files import EXPONENT, FAINT, INK, MUTED, OTHERS
from neuzip.eval.measures.histograms import Counts, entropy, inspect, select

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"

WIDTH = 720
PALE_EXPONENT, PALE_OTHERS = "#f9dcc4", "#d5e2ee"
TENSOR = "model.layers.0.mlp.gate_proj.weight"


def main() -> int:
    """Draw, then write or compare."""
    drawn = {
        "weight": weight(), "exponents": exponents(), "grid": grid(), "block": block(), "forms": forms(),
    }  # fmt: skip
    differ = [name for name, svg in drawn.items() if not is_kept(name, svg)]
    if "--check" in sys.argv:
        print(*differ, sep="\n", end="")
        return int(bool(differ))
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in differ:
        (PICTURES / f"{name}.svg").write_text(drawn[name], encoding="utf-8")
    return 0


def is_kept(name: str, svg: str) -> bool:
    """Whether the picture of that name is this one."""
    path = PICTURES / f"{name}.svg"
    return path.is_file() and path.read_text(encoding="utf-8") == svg


# Elements


def picture(height: int, title: str, parts: Sequence[str]) -> str:
    """A whole file on white, so that it can be read on any page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    """A rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{round(width, 2):g}" height="{round(height, 2):g}" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )


def text(
    x: float, y: float, words: str, *, size: int = 14, color: str = INK, at: str = "start", bold: bool = False
) -> str:
    """One line; `at` is start, middle or end."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{at}"{weight}>'
        f"{escape(words)}</text>"
    )


def line(x: float, y: float, to_x: float, to_y: float, color: str = MUTED, dashes: str = "") -> str:
    """A thin line."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{color}" fill="none"{dashed}/>'


# What is drawn


def demo_counts() -> Counts:
    """The bit patterns of all weights of the demo checkpoint."""
    with FolderSource(CHECKPOINT) as source:
        (counts,) = inspect(source, select(source), jobs=1).counts
    return counts


def weight() -> str:
    """A bf16 weight, what its fields tell, and where they go."""
    bits = demo_counts().entropies
    pattern = f"{first_weight():016b}"
    value = np.array([int(pattern, 2) << 16], np.uint32).view(np.float32)[0]
    fields = (
        ("sign", 0, 1, bits.sign, OTHERS, PALE_OTHERS),
        ("exponent", 1, 9, bits.exponent, EXPONENT, PALE_EXPONENT),
        ("mantissa", 9, 16, bits.mantissa, OTHERS, PALE_OTHERS),
    )
    parts = [text(40, 30, f"One weight of the demo checkpoint, {value:.7g} in bfloat16:", bold=True)]
    for name, first, after, needed, color, pale in fields:
        for place in range(first, after):
            parts.append(box(40 + 40 * place, 46, 36, 40, pale, color))
            parts.append(text(58 + 40 * place, 73, pattern[place], size=19, at="middle"))
        left, right = 40 + 40 * first, 36 + 40 * after
        parts.append(line(left, 96, right, 96, color))
        parts.append(text((left + right) / 2, 116, name, at="middle", color=color, bold=True))
        held = f"{needed:.2f} of 1" if name == "sign" else f"entropy: {needed:.2f} of {after - first} bits"
        parts.append(text((left + right) / 2, 135, held, at="middle", size=13))
    total = bits.sign + bits.exponent + bits.mantissa
    scale = 640 / 16
    rest = scale * 8
    coded = scale * bits.exponent
    parts += [
        text(40, 180, "What neuzip stores:", bold=True),
        box(40, 194, rest, 36, PALE_OTHERS, OTHERS),
        text(40 + rest / 2, 217, "sign and mantissa, unchanged: 8 bits", at="middle", size=13),
        box(40 + rest, 194, coded, 36, PALE_EXPONENT, EXPONENT),
        text(40 + rest + coded / 2, 217, "exponent", at="middle", size=13),
        line(680, 190, 680, 234, MUTED, "3 3"),
        text(680, 250, "16 bits", at="end", size=13, color=MUTED),
        text(40 + rest + coded / 2, 250, f"{bits.exponent:.2f} bits", at="middle", size=13, color=EXPONENT),
        text(
            40, 284, f"The entropies of {demo_counts().numel:,} weights add up to {total:.2f} of 16 bits, or "
            f"{total / 16:.1%}.".replace("%", " %", 1), size=13,
        ),
    ]  # fmt: skip
    return picture(300, "A bfloat16 weight and what its fields hold", parts)


def first_weight() -> int:
    """The bits of the first weight of TENSOR."""
    entries, data = container(CHECKPOINT / "model.safetensors")
    first = entries[TENSOR]["data_offsets"][0]
    return int.from_bytes(data[first : first + 2], "little")


def exponents() -> str:
    """The histogram of exponents of the demo checkpoint."""
    histogram = demo_counts().exponents
    shares = histogram / histogram.sum()
    shown = range(109, 130)
    left, bottom, step, tall = 80, 310, 29, 240
    most = 0.3
    parts = [
        text(40, 28, "Exponents of the demo checkpoint", bold=True),
        text(40, 48, f"8 bits allow 256 exponents. Only {np.count_nonzero(histogram)} occur, with an "
                     f"entropy of {entropy(histogram):.2f} bits.", size=13),
    ]  # fmt: skip
    for percent in (0, 10, 20, 30):
        y = bottom - tall * percent / 100 / most
        parts += [line(left, y, left + step * len(shown), y, FAINT)]
        parts += [text(left - 8, y + 4, f"{percent} %", at="end", size=13, color=MUTED)]
    for place, exponent in enumerate(shown):
        high = tall * float(shares[exponent]) / most
        parts.append(box(left + step * place + 2, round(bottom - high, 2), step - 4, high, EXPONENT))
        if (exponent - 127) % 4 == 0:
            middle = left + step * place + step / 2
            parts.append(text(middle, bottom + 18, power_of_two(exponent - 127), size=16, at="middle"))
    even = bottom - tall / 256 / most
    parts += [
        line(left, even, left + step * len(shown), even, INK, "4 3"),
        line(left + step * 18.5, even - 60, left + step * 18.5, even),
        text(left + step * len(shown), even - 66, "uniform over 256: 0.4 %", at="end", size=13),
        text(left + step * len(shown) / 2, bottom + 40, "magnitude of a weight, as a power of two",
             at="middle", size=13, color=MUTED),
    ]  # fmt: skip
    outside = 1 - float(shares[list(shown)].sum())
    parts.append(
        text(
            40, 376, f"{outside:.3%}".replace("%", " %") + " of the weights are outside this range.", size=13
        )
    )
    return picture(392, "How often each exponent occurs in the demo checkpoint", parts)


def grid() -> str:
    """How often each code of a tensor occurs on a uniform grid, and the bits that entropy coding gives it."""
    values = tensor_values()
    deviation = float(np.sqrt(np.mean(values * values)))
    step = deviation / 2
    codes = np.rint(values / step).astype(int)
    shown = range(-7, 8)
    left, bottom, width, tall, most = 68, 280, 41, 190, 0.2
    shares = {code: float(np.mean(codes == code)) for code in shown}
    counts = np.bincount(codes - codes.min())
    parts = [
        text(40, 28, f"Codes of {TENSOR}", bold=True),
        text(40, 48, f"The step is half of the standard deviation of the weights: {step:.4f}. "
                     "A weight is stored as the nearest code.", size=13),
    ]  # fmt: skip
    for percent in (0, 5, 10, 15, 20):
        y = bottom - tall * percent / 100 / most
        parts += [line(left, y, left + width * len(shown), y, FAINT)]
        parts += [text(left - 8, y + 4, f"{percent} %", at="end", size=13, color=MUTED)]
    for place, code in enumerate(shown):
        high, middle = tall * shares[code] / most, left + width * (place + 0.5)
        parts.append(box(left + width * place + 3, round(bottom - high, 2), width - 6, high, EXPONENT))
        bits = f"{-math.log2(shares[code]):.1f}" if shares[code] else ""
        parts.append(text(middle, round(bottom - high - 6, 2), bits, size=13, at="middle"))
        parts.append(text(middle, bottom + 18, f"{code}".replace("-", "−"), size=14, at="middle", bold=True))
        value = f"{code * step:.3f}".replace("-", "−")
        parts.append(text(middle, bottom + 36, value, size=11, at="middle", color=MUTED))
    fixed = math.ceil(math.log2(codes.max() - codes.min() + 1))
    parts += [
        text(left - 8, bottom + 18, "code", at="end", size=13, color=MUTED),
        text(left - 8, bottom + 36, "weight", at="end", size=13, color=MUTED),
        text(40, 346, "Above each bar: the bits that an entropy coder needs for the code. The mean over all "
                      f"weights is {entropy(counts):.2f} bits.", size=13),
        text(40, 366, f"Codes of fixed width would need {fixed} bits, because codes from {codes.min()} to "
                      f"{codes.max()} occur.".replace("-", "−"), size=13),
    ]  # fmt: skip
    return picture(382, "How often each code of a quantised tensor occurs", parts)


def tensor_values() -> npt.NDArray[np.float64]:
    """The weights of TENSOR."""
    entries, data = container(CHECKPOINT / "model.safetensors")
    start, stop = entries[TENSOR]["data_offsets"]
    bits = np.frombuffer(data[start:stop], "<u2").astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64)


def power_of_two(power: int) -> str:
    """As it is written by hand."""
    return "2" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def container(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return header, raw[8 + length :]


def coded_tensor() -> tuple[dict[str, Any], dict[str, Any]]:
    """TENSOR in the demo's container: its header entries, and its table, index and words as arrays."""
    with tempfile.TemporaryDirectory() as folder:
        compress_checkpoint(CHECKPOINT, Path(folder) / "demo.nz", jobs=1)
        header, data = container(Path(folder) / "demo.nz" / "model.safetensors")
    entries = {
        name.removeprefix(f"{TENSOR}:"): e for name, e in header.items() if name.startswith(f"{TENSOR}:")
    }
    arrays = {
        name: np.frombuffer(data[slice(*entries[name]["data_offsets"])], "<u2")
        for name in ("table", "index", "words")
    }
    return entries, arrays


LANES = """\
A lane is one rANS coder with a 32-bit state. Each step decodes one symbol, here a pair of
exponents, so a run takes 4 steps. A lane whose state falls below 65,536 takes the next refill
word, in lane order. On a GPU, 32 neighbouring threads thus read neighbouring words."""


def block() -> str:
    """A tensor, its blocks, the lanes of one, and the words of that block: with the numbers of a real one."""
    _, arrays = coded_tensor()
    index = arrays["index"]
    shape = container(CHECKPOINT / "model.safetensors")[0][TENSOR]["shape"]
    weights = math.prod(shape)
    blocks = math.ceil(weights / 16384)
    words, escapes = int(index[0]), int(arrays["words"][0])
    refill = words - 65 - 2 * escapes
    parts = [
        text(40, 28, f"{TENSOR}: {shape[0]} x {shape[1]} = {weights:,} weights", bold=True),
        text(40, 50, "Blocks of 16,384 weights, each decoded independently:", size=13),
    ]
    for number in range(blocks):
        x = 40 + 213.5 * number
        parts.append(box(x, 60, 209, 34, PALE_EXPONENT if number == 0 else "#f3f5f7", MUTED))
        parts.append(text(x + 104, 82, f"block {number}: {int(index[number]):,} words", at="middle", size=13))
    parts += [
        line(40, 94, 40, 120), line(249, 94, 680, 120),
        text(40, 142, "A block has 64 runs of 256 weights. Each of the 32 lanes decodes 8 weights per run:",
             size=13),
    ]  # fmt: skip
    for run in range(3):
        y = 152 + 30 * run
        for lane in range(32):
            parts.append(box(106 + 18 * lane, y, 16, 24, PALE_EXPONENT if lane % 2 else "#fdf1e7", EXPONENT))
        parts.append(text(98, y + 17, ("run 0", "run 1", "…")[run], at="end", size=13, color=MUTED))
    parts += [
        text(114, 258, "lane 0", at="middle", size=13, color=MUTED),
        text(672, 258, "lane 31", at="middle", size=13, color=MUTED),
        *(text(40, 290 + 18 * number, said, size=13) for number, said in enumerate(LANES.splitlines())),
        text(
            40, 362, f"The words of block 0, 16 bits each, {16 * words / 16384:.3f} bits per weight:", size=13
        ),
    ]  # fmt: skip
    pieces = (
        (40, 60, "1", "outlier count", MUTED, "#f3f5f7"),
        (104, 150, "2 x 32", "lane states", EXPONENT, PALE_EXPONENT),
        (258, 306, f"{refill:,}", "refill words", EXPONENT, "#fdf1e7"),
        (568, 112, f"2 x {escapes}", "outliers", OTHERS, PALE_OTHERS),
    )
    for x, width, count, what, stroke, fill in pieces:
        parts.append(box(x, 374, width, 38, fill, stroke))
        parts.append(text(x + width / 2, 398, count, at="middle", size=15))
        parts.append(text(x + width / 2, 430, what, at="middle", size=13))
    return picture(446, "How a tensor's exponents are laid out in blocks, runs and lanes", parts)


def forms() -> str:
    """Bits per weight, part by part, in each in-memory format."""
    codec = json.loads((RESULTS / "gpu_codec.json").read_text())["results"]
    products = json.loads((RESULTS / "packed_linear.json").read_text())["sections"]
    ternary = json.loads((RESULTS / "ternary_linear.json").read_text())["sections"]["products"]["results"]
    lossless = next(r for r in codec if r["row"].startswith("bf16 decode, lossless") and r["by"] == "neuzip")
    rounded = next(r for r in codec if r["row"] == "bf16 decode, k = 3")
    packed = products["bits"]["results"][0]["bits"]
    packed_3 = next(r for r in products["products"]["results"] if (r["rows"], r["kept"]) == (1, 3))["bits"]
    raw, code, extra = ((PALE_OTHERS, OTHERS), (PALE_EXPONENT, EXPONENT), ("#e4e7ea", MUTED))
    rows = (
        ("bf16", 16.0, [(8, "sign, mantissa", raw), (8, "exponent", code)]),
        ("ans", 8 + lossless["bits_per_exponent"],
         [(8, "sign, mantissa", raw), (lossless["bits_per_exponent"], "exponent", code)]),
        ("packed", packed,
         [(8, "mantissa, exponent's last bit", raw), (1, "±", raw), (2, "exp.", code),
          (packed - 11, "", extra)]),
        ("ans, 3 mantissa bits", 4 + rounded["bits_per_exponent"],
         [(4, "sign, mantissa", raw), (rounded["bits_per_exponent"], "exponent", code)]),
        ("packed, 3 mantissa bits", packed_3,
         [(4, "low 4 bits", raw), (1, "±", raw), (2, "exp.", code), (packed_3 - 7, "", extra)]),
        ("ternary", ternary[0]["bits"], [(ternary[0]["bits"], "-1, 0, 1", code)]),
    )  # fmt: skip
    parts = [text(40, 28, "Bits per weight in memory", bold=True)]
    for number, (name, total, pieces) in enumerate(rows):
        y, x = 44 + 46 * number, 190.0
        parts.append(text(180, y + 22, name, at="end", size=13))
        for size, words, (fill, stroke) in pieces:
            parts.append(box(round(x, 2), y, size * 28, 34, fill, stroke))
            if words:
                parts.append(text(round(x + size * 28 / 2, 2), y + 22, words, at="middle", size=13))
            x += size * 28
        parts.append(text(round(x + 8, 2), y + 22, f"{total:.2f}", size=13, bold=True))
    parts.append(text(
        40, 340, "Grey: extra bits for outliers, whose exponents are outside the range of the 2-bit code.",
        size=13,
    ))  # fmt: skip
    return picture(356, "Bits per weight in each in-memory format", parts)


if __name__ == "__main__":
    sys.exit(main())
