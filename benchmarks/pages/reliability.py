"""The table of pushes and pulls under faults."""

from __future__ import annotations

from typing import Any

from pages.layout import machine, section


def faults(document: dict[str, Any]) -> str:
    """What became of pushes and pulls under faults."""
    lines = []
    for r in document["results"]:
        broken = "0" if not r["broken"] else f"**{r['broken']}**"
        twice = f"{r['twice_mean']:.0%}, {r['twice_most']:.0%}" if r.get("twice_mean") is not None else ""
        cells = (r["command"], r["fault"], r["runs"], r["untouched"] or "", r["went_on"] or "",
                 r["error"] or "", r["killed"] or "", twice, broken)  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return section(
        "Push and pull under faults",
        f"A fault hits `push` or `pull` at a random moment. The checkpoint is {document['checkpoint']}. The "
        "server runs on loopback and implements the Hub's API. The command recovers by itself, ends with an "
        "error, or is killed. After an error or a kill, the benchmark repeats the command without the fault.",
        [
            "*Re-sent* is the data that was transferred a second time, because the fault interrupted the "
            "first transfer. Its mean and maximum are shares of the weights. Data that a killed push had "
            "already handed to the operating system still arrives. A run counts as *broken* in any of these "
            "cases:",
            "* A partial checkpoint is left on the Hub or on the disk.\n"
            "* The repeated command fails, or uploads a finished weight file again.\n"
            "* The bytes differ after pull and decompress.\n"
            "* The access token appears in any output or file.",
            "| command | fault | runs | finished before it | recovered | error | killed | re-sent | broken |"
            "\n|---|---|---:|---:|---:|---:|---:|---:|---:|\n" + "\n".join(lines),
        ],
        "`python benchmarks/faults.py`",
        [machine(document)],
    )
