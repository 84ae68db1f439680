"""Writes the figures of README.md from benchmarks/results, so that none is copied by hand.

python benchmarks/readme.py            # rewrite the part between the two marks
python benchmarks/readme.py --check    # exit 1 if it differs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- figures: benchmarks/readme.py -->", "<!-- end of figures -->"


def main() -> int:
    """Render, then write or compare."""
    path = ROOT / "README.md"
    before, _, rest = path.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    new = f"\n{figures()}\n"
    if "--check" in sys.argv:
        return int(old != new)
    path.write_text(f"{before}{BEGIN}{new}{END}{after}")
    return 0


def figures() -> str:
    """All figures as Markdown."""
    return "\n\n".join([quality(load("quality-demo")), codec(load("cpu_codec")), memory(load("memory"))])


def load(name: str) -> dict[str, Any]:
    """One result."""
    document: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return document


def machine(document: dict[str, Any]) -> str:
    """What it ran on, in a few words."""
    e = document["environment"]
    packages = ", ".join(
        f"{name} {version}" for name, version in e["packages"].items() if "neuzip" not in name
    )
    return (
        f"{e['cores']} cores of an {e['processor']}, Python {e['python']}, {packages}, commit {e['commit']}"
    )


def quality(document: dict[str, Any]) -> str:
    """Size and perplexity of the demo checkpoint."""
    rows = [
        f"| {r['mantissa_bits']} | {r['block_size'] or '-'} | {r['ratio']:.1%} | {r['bits_per_weight']:.2f} "
        f"| {r['perplexity']:.2f} | {'0, to the last bit' if r['identical'] else signed(r)} |"
        for r in document["results"]
        if r["block_size"] in (None, 512)
    ]
    c = document["convention"]
    return (
        "**Size and quality** of the demo checkpoint (1.3 M weights; perplexity before: "
        f"{document['original_perplexity']:.2f}), held-out text, token-level, {c['windows']} windows of up "
        f"to {c['window']} predictions that do not overlap. Small tensors carry relatively more overhead: a "
        "large bf16 model takes 66 % without loss. "
        "`python benchmarks/quality.py demo eval/demo/checkpoint demo`\n\n"
        "| mantissa bits | block | size | bits/weight | perplexity | change of the loss, nats a token |\n"
        "|---|---|---|---|---|---|\n" + "\n".join(rows) + f"\n\n{machine(document)}"
    )


def signed(row: dict[str, Any]) -> str:
    """A difference with its standard error."""
    return f"{row['nll_difference']:+.4f} ± {row['nll_difference_standard_error']:.4f}"


def codec(document: dict[str, Any]) -> str:
    """Our codec beside its peers, with what was aimed at."""
    results = document["results"]
    lines = []
    for r in results:
        peer = next(x for x in results if x["case"] == r["case"] and x["codec"] == "zipnn")
        ours = r["codec"] == "neuzip"
        lines.append(
            f"| {r['case'] if ours else ''} | {r['codec']} | {r['ratio']:.2%} "
            f"| {r['encode_gb_s']:.2f}{against(r, peer, 'encode_gb_s') if ours else ''} "
            f"| {max(r['encode_range']):.2f} "
            f"| {r['decode_gb_s']:.2f}{against(r, peer, 'decode_gb_s') if ours else ''} "
            f"| {max(r['decode_range']):.2f} |"
        )
    return (
        f"**Lossless codec on the CPU**, {document['threads']} threads, in memory, medians of "
        f"{document['rounds']} rounds in turns; in brackets the speed against ZipNN (aim: 1.0 or more in "
        "every case). `gaussian` is one tensor of 67 M weights, `student-t4` one of 17 M, `wikilm-26m` a "
        "real checkpoint of 57 small ones. Every turn begins with a warm-up; "
        "the fastest rounds stand beside the medians. "
        "`python benchmarks/cpu_codec.py`\n\n"
        "| weights | codec | size | encode GB/s | fastest | decode GB/s | fastest |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(lines) + f"\n\n{machine(document)}"
    )


def against(row: dict[str, Any], peer: dict[str, Any], key: str) -> str:
    """Our speed as a multiple of the peer's; a target missed is said."""
    factor = row[key] / peer[key]
    return f" ({factor:.2f}x{'' if factor >= 1 else ', short of the aim'})"


def memory(document: dict[str, Any]) -> str:
    """Peak memory and time of whole commands."""
    rows = [
        f"| `neuzip {r['command']}` | {r['seconds']:.1f} s | {r['gb_s']:.2f} GB/s | {r['peak_gb']:.2f} GB "
        f"| {r['limit_gb']:.2f} GB |"
        for r in document["results"]
    ]
    return (
        f"**Whole commands** on a made-up sharded checkpoint of {document['checkpoint_gb']:.1f} GB (largest "
        f"tensor {document['largest_tensor_gb']:.2f} GB), reading, verification, writing to disk included. "
        "`python benchmarks/memory.py`\n\n"
        "| command | time | speed | peak memory | limit: 1 GB + 3 x largest tensor |\n|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n{machine(document)}"
    )


if __name__ == "__main__":
    sys.exit(main())
