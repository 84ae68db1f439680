"""Tables of the lossless codec, on a CPU and on a GPU, and of whole commands."""

from __future__ import annotations

import re
from typing import Any

from pages.layout import gpu_machine, machine, section, slower, table


def codec(document: dict[str, Any]) -> str:
    """Our codec beside its peers, with what was aimed at."""
    results = document["results"]
    lines = []
    for r in results:
        peer = next(x for x in results if x["case"] == r["case"] and x["codec"] == "zipnn")
        ours = r["codec"] == "neuzip"
        lines.append(
            (
                r["case"] if ours else "", {"zipnn": "ZipNN"}.get(r["codec"], r["codec"]),
                f"{r['ratio']:.2%}",
                f"{r['encode_gb_s']:.2f}{against(r, peer, 'encode_gb_s') if ours else ''}",
                f"{max(r['encode_range']):.2f}",
                f"{r['decode_gb_s']:.2f}{against(r, peer, 'decode_gb_s') if ours else ''}",
                f"{max(r['decode_range']):.2f}",
            )
        )  # fmt: skip
    heads = ("weights", "codec", "size", "encode, GB/s", "fastest round", "decode, GB/s", "fastest round")
    return section(
        "Lossless codec on the CPU",
        f"All codecs ran in memory with {document['threads']} threads. Speeds are medians of "
        f"{document['rounds']} rounds; the codecs take turns, each with a warm-up. The factor in brackets is "
        "the speed relative to ZipNN; the target is at least 1.0 in every row. `gaussian` is one tensor of "
        "67 M random weights, N(0, 0.02). `student-t4` is one of 17 M random weights with heavier tails. "
        "`wikilm-26m` is a trained checkpoint of 57 small tensors.",
        [table(heads, lines)],
        "`python benchmarks/cpu_codec.py`",
        [machine(document)],
    )


def against(row: dict[str, Any], peer: dict[str, Any], key: str) -> str:
    """Our speed as a multiple of the peer's; a target missed is said."""
    factor = row[key] / peer[key]
    return f" ({factor:.2f}x{'' if factor >= 1 else ', **missed**'}{slower(factor)})"


def gpu_codec(document: dict[str, Any]) -> str:
    """Our codec on a GPU, its targets, its peers, and how near the limit it is."""
    peers = codec_peers(document)
    groups: dict[str, list[str]] = {"peers": [], "formats": [], "loading": []}
    for r in document["results"]:
        kind = "formats" if FORMAT_ROW.fullmatch(r["row"]) else "peers"
        groups["loading" if r["row"].startswith("load_file") else kind].append(gpu_codec_line(r, peers))
    heads = "| what | tool | GB/s | target | stretch goal | of the limit | size |\n" + "|---" * 7 + "|\n"
    captions = {
        "peers": "**bf16, compared with other codecs:**",
        "formats": "**Other formats.** The target is the speed of lossless bf16, the first row:",
        "loading": "**Loading a checkpoint of 16 GB** from the page cache to the GPU:",
    }
    shown = [
        part
        for kind, lines in groups.items() if lines
        for part in (captions[kind], heads + "\n".join(lines))
    ]  # fmt: skip
    return section(
        "Lossless codec on a GPU",
        "Random weights, N(0, 0.02). Speeds are medians, in GB of uncompressed weights per second. "
        '"One call" is one function call on an idle GPU, launch overhead included. Loading is timed by the '
        "clock. All other rows are kernels in a CUDA graph on data that is not in the L2 cache. The "
        f"limit for bf16 decoders is {document['device_copy_gb_s'] * 2 / 3:,.0f} GB/s: two thirds of the "
        f"speed of a device copy ({document['device_copy_gb_s']:,.0f} GB/s). The limit of the other kernels "
        "is the time that a device copy of the same bytes takes. The limit of loading "
        f"follows from the PCIe link ({document['link_gb_s']:.1f} GB/s) and the compressed size. Bits are "
        "stored bits per exponent, overhead included.",
        shown,
        "`python benchmarks/gpu_codec.py`",
        [gpu_machine(document["environment"])],
    )


FORMAT_ROW = re.compile(r"(bf16|fp16|fp32|fp8 \w+) decode, (lossless|lossless, was bf16|k = \d.*)")
"""Rows of the codec's results that compare formats, not codecs."""


def gpu_codec_line(r: dict[str, Any], peers: dict[str, list[dict[str, Any]]]) -> str:
    """One row of the codec's tables."""
    what = of_codec_row(r["row"])
    if "status" in r:
        return f"| {what} | {r['by']} | {r['status']} | | | | |"
    digits = 0 if r["gb_s"] >= 100 else 1
    must, stretch = (f"{r[key]:,.{digits}f}" if key in r else "" for key in ("must_gb_s", "stretch_gb_s"))
    missed = ", **missed**" if r["gb_s"] < r.get("must_gb_s", 0) else ""
    if r["by"].startswith("neuzip") and r["row"] in peers:
        missed += slower(r["gb_s"] / max(p["gb_s"] for p in peers[r["row"]]))
    if r["gb_s"] >= r.get("stretch_gb_s", float("inf")):
        stretch += ", reached"
    bits = f"{r['bits_per_exponent']:.3f} bits" if "bits_per_exponent" in r else ""
    if r.get("bits_per_exponent", 0) > r.get("must_bits", 8):
        bits += f" of {r['must_bits']}, **missed**"
    size = ", ".join(filter(None, [f"{r['ratio']:.2%}" if "ratio" in r else "", bits]))
    share = f"{r['share']:.0%}" if "share" in r else ""
    return f"| {what} | {r['by']} | {r['gb_s']:,.{digits}f}{missed} | {must} | {stretch} | {share} | {size} |"


def of_codec_row(row: str) -> str:
    """What was done, as a reader calls it."""
    for old, new in (
        (", a call", ", one call"), (r"k = 1\b", "1 mantissa bit"), (r"k = (\d)", r"\1 mantissa bits"),
        ("8B-shaped model of 291 tensors", "291 tensors of Llama-3-8B's shapes"),
        ("was bf16", "all values fit bf16"),
        ("load_file of a checkpoint of 16 GB in the page cache", "`load_file`"),
    ):  # fmt: skip
        row = re.sub(old, new, row)
    return row


def codec_peers(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """By row what others do the same work in; exponents alone are not the same work."""
    found: dict[str, list[dict[str, Any]]] = {}
    for r in document["results"]:
        if "gb_s" in r and not r["by"].startswith("neuzip") and "exponents alone" not in r["by"]:
            found.setdefault(r["row"], []).append(r)
    return found


def memory(document: dict[str, Any]) -> str:
    """Peak memory and time of whole commands."""
    rows = [
        (
            f"`neuzip {r['command']}`", f"{r['seconds']:.1f} s", f"{r['gb_s']:.2f} GB/s",
            f"{r['peak_gb']:.2f} GB", f"{r['limit_gb']:.2f} GB",
        )
        for r in document["results"]
    ]  # fmt: skip
    return section(
        "Time and peak memory of commands",
        f"The checkpoint is sharded, with {document['checkpoint_gb']:.1f} GB of random weights; its largest "
        f"tensor has {document['largest_tensor_gb']:.2f} GB. Times include reading, verification and writing "
        "to disk. The target is a peak of at most 1 GB plus three times the largest tensor.",
        [table(("command", "time", "speed", "peak memory", "target"), rows)],
        "`python benchmarks/memory.py`",
        [machine(document)],
    )
