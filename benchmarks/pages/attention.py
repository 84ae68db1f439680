"""Tables of quantised KV caches and of quantised attention."""

from __future__ import annotations

from typing import Any

from pages.layout import Document, judged, render, slower

Row = dict[str, Any]


def kv_cache(documents: dict[str, Document]) -> str:
    """What keys and values in few bits do to models, a table each."""
    return render(
        "attention.kv_cache",
        {name: (d, cache_rows(d)) for name, d in documents.items()},
        list(documents.values()),
    )


def kv_positions(documents: dict[str, Document]) -> str:
    """How the loss from a quantised KV cache changes along a text, a table for each model."""
    tables = {name: (d, *_positions(d)) for name, d in documents.items()}
    return render("attention.kv_positions", tables, list(documents.values()))


def _positions(document: Document) -> tuple[list[str], list[tuple[str, ...]]]:
    """The head of a table of positions, and its lines: the model's own losses, divergences as multiples."""
    rows = cache_rows(document)
    parts = range(len(next(iter(rows.values()))["kld_by_part"]))
    head = ["KV cache", "form", "KLD, mean", *(f"part {i + 1}" for i in parts)]
    lines = []
    for (bits, form), r in rows.items():
        first = r["kld_by_part"][0]
        if form is not None:
            multiples = (f"{part / first:.2f}" for part in r["kld_by_part"])
            lines.append((f"`--kv-bits {bits}`", form, f"{r['kld']:#.2g}", *multiples))
        elif "nll_by_part" in r:
            lines.append(("not quantised: loss, nats", "", "", *(f"{part:.2f}" for part in r["nll_by_part"])))
    return head, lines


def kv_forms(documents: dict[str, Document]) -> str:
    """Forms of a quantised KV cache that were tried, a table for each model."""
    tables = {name: (d, cache_rows(d)) for name, d in documents.items()}
    return render("attention.kv_forms", tables, list(documents.values()))


def cache_rows(document: Document) -> dict[tuple[int | str, str | None], Row]:
    """Rows of a quantised KV cache by bits and form; older rows have a span in place of the form."""
    older = {"absmax": "a4.8", "minmax": "a4.8 with an offset", None: None}
    rows = {}
    for r in document["results"]:
        form = r["form"] if "form" in r else older[r["span"]]
        stored_bits = r["stored_bits" if "form" in r else "bits_per_number"]
        rows[r["bits"], form] = {"must": None, "stretch": None, **r, "stored_bits": stored_bits}
    return rows


def default_form(rows: dict[tuple[int | str, str | None], Row]) -> str:
    """The form that --kv-bits takes by itself, if it was measured."""
    return "rotated" if any(form == "rotated" for _, form in rows) else "a4.8"


def cache_option(bits: int | str, form: str) -> str:
    """The options of a row, as a user writes them."""
    return f"--kv-bits {bits}" if form == "rotated" else f"--kv-bits {bits} --kv-form {form}"


def kv_attention(document: Document) -> str:
    """Attention over keys and values in few bits, beside torch's over bf16."""
    return render("attention.kv_attention", document)


def attention(document: Document) -> str:
    """Quantised attention: the kernel beside its peers, and what a whole prompt gains."""
    sections = document["sections"]
    kernels = sections["kernels"]["results"]
    sides = list(dict.fromkeys(r["side"] for r in kernels))
    prefill = sections.get("prefill", {"results": []})["results"]
    peer = sections["kernels"]["environment"]["packages"].get("sageattention")
    cases = attention_cases(kernels, sides)
    return render("attention.attention", document, peer, list(map(side_name, sides)), cases, prefill)


def side_name(side: str) -> str:
    """A side of the comparison, as a reader calls it."""
    return render("attention.side_name", side)


def attention_cases(results: list[Row], sides: list[str]) -> list[tuple[str, ...]]:
    """A line for each case, a column for each side."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for r in results:
        cases.setdefault((r["width"], r["texts"], r["tokens"], r["causal"]), {})[r["side"]] = r
    lines = []
    for (width, texts, tokens, causal), by_side in cases.items():
        ours = by_side["ours, 8 bits"]
        lines.append(
            (
                f"{texts} x 32 heads, {tokens:,} tokens, head size {width}{', causal' if causal else ''}",
                f"{ours['must']} / {ours['stretch']}" if ours["must"] else "",
                *(attention_side(by_side[side], by_side) if side in by_side else "" for side in sides),
            )
        )  # fmt: skip
    return lines


def attention_side(row: Row, by_side: dict[str, Row]) -> str:
    """Operations a second, and whether a target was missed or reached, or another side is faster."""
    text = f"{row['tops']:,.0f}"
    if "tops_without" in row:
        text += f" ({row['tops_without']:,.0f})"
    if row.get("must"):
        text += judged(row["tops"], row["must"])
        text += ", stretch reached" if row["tops"] >= row["stretch"] else ""
    others = [r["tops"] for side, r in by_side.items() if not side.startswith("ours")]
    return text + (slower(row["tops"] / max(others)) if row["side"].startswith("ours") and others else "")


def attention_accuracy(document: Document, synthetic: Document) -> str:
    """What quantised attention does to a model, and how close it is: what SageAttention2's tables tell."""
    tables: dict[str, dict[str, Row]] = {}
    for r in document["closeness"]:
        if r["by"] == "reference":
            tables.setdefault(r["table"], {})[r["form"]] = r
    whole = "the whole recipe"
    recipe = [(r, tables[whole].get(r["form"], r)) for r in document["perplexity"] if r["table"] == whole]
    smoothed = {r["form"]: r for r in document["perplexity"] if r["table"] == "Table 1, smoothing"}
    what = ("none", "K", "Q", "Q+K")
    return render(
        "attention.accuracy",
        document,
        recipe,
        [(bits, [smoothed[f"{bits}, smoothed: {name}"] for name in what]) for bits in ("INT4", "INT8")],
        list(tables["Tables 2 and 3, granularity"].values()),
        list(tables["Tables 4 and 5, P and V"].values()),
        synthetic,
    )
