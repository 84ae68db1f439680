"""Tables of the lossless codec, on a CPU and on a GPU, and of whole commands."""

from __future__ import annotations

import re
from typing import Any

from pages.layout import Document, renamed, render, row, slower


def codec(document: Document) -> str:
    """Our codec beside its peers, with what was aimed at."""
    results = document["results"]
    zipnn = {r["case"]: r for r in results if r["codec"] == "zipnn"}
    return render("codecs.codec", document, [(r, zipnn[r["case"]]) for r in results])


def gpu_codec(document: Document) -> str:
    """Our codec on a GPU, its targets, its peers, and how near the limit it is."""
    peers = codec_peers(document)
    groups: dict[str, list[str]] = {"peers": [], "formats": [], "loading": []}
    for r in document["results"]:
        kind = "formats" if FORMAT_ROW.fullmatch(r["row"]) else "peers"
        groups["loading" if r["row"].startswith("load_file") else kind].append(gpu_codec_line(r, peers))
    return render("codecs.gpu_codec", document, **groups)


FORMAT_ROW = re.compile(r"(bf16|fp16|fp32|fp8 \w+) decode, (lossless|lossless, was bf16|k = \d.*)")
"""Rows of the codec's results that compare formats, not codecs."""

CODEC_ROWS = {
    ", a call": ", one call", r"k = 1\b": "1 mantissa bit", r"k = (\d)": r"\1 mantissa bits",
    "8B-shaped model of 291 tensors": "291 tensors of Llama-3-8B's shapes",
    "was bf16": "all values fit bf16",
    "load_file of a checkpoint of 16 GB in the page cache": "`load_file`",
}  # fmt: skip
"""What was done, as a reader calls it."""


def gpu_codec_line(r: dict[str, Any], peers: dict[str, list[dict[str, Any]]]) -> str:
    """One row of the codec's tables."""
    what = renamed(r["row"], CODEC_ROWS)
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
    return row(what, r["by"], f"{r['gb_s']:,.{digits}f}{missed}", must, stretch, share, size)


def codec_peers(document: Document) -> dict[str, list[dict[str, Any]]]:
    """By row what others do the same work in; exponents alone are not the same work."""
    peers: dict[str, list[dict[str, Any]]] = {}
    for r in document["results"]:
        if "gb_s" in r and not r["by"].startswith("neuzip") and "exponents alone" not in r["by"]:
            peers.setdefault(r["row"], []).append(r)
    return peers


def memory(document: Document) -> str:
    """Peak memory and time of whole commands."""
    return render("codecs.memory", document)
