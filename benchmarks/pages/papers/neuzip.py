"""Tables and figures of NeuZip (arXiv 2410.20650)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pages.layout import MODELS_READ, Document, is_measured, linked, load, table
from pages.papers.items import Claim, PaperItem, PaperSection, at, falling

TRAINED = {"gpt-neo-2.7b": "GPT-Neo 2.7B", "llama-3-8b": "Llama-3 8B", "llama-2-13b": "Llama-2 13B"}

PAPER_TRAINING = {
    "gpt-neo-2.7b": {"vanilla": (8.81, 11.22, 0.96), "lomo": (8.81, 6.97, 0.94), "ours": (8.81, 5.54, 0.70)},
    "llama-3-8b": {"vanilla": (8.61, 30.97, 0.77), "lomo": (8.61, 19.47, 0.78), "ours": (8.61, 15.25, 0.45)},
    "llama-2-13b": {"vanilla": None, "lomo": (9.10, 26.26, 0.49), "ours": (9.10, 18.58, 0.28)},
}
"""Table 1 of the paper: validation loss, GiB, iterations per second; None where it ran out of memory."""

SHAPES = "random weights in the shapes of GPT-Neo 2.7B, Llama-3 8B and Llama-2 13B"

DEMO = "the demo checkpoint, 1.3 M weights"

TRAINING_METHODS = {"vanilla": "vanilla", "lomo": "LOMO", "ours": "NeuZip"}

PAPER_INFERENCE = {
    "vanilla": (9.89, 15.08), "INT8": (10.07, 8.63), "FP4": (11.51, 5.77), "NF4": (10.75, 5.77),
    "FP4, double": (11.50, 5.44), "NF4, double": (10.75, 5.44), "NeuZip, 0 bits": (13.64, 5.24),
    "NeuZip, 1 bit": (10.77, 6.05), "NeuZip, 3 bits": (9.93, 7.70), "NeuZip, lossless": (9.89, 10.95),
}  # fmt: skip
"""Table 3a of the paper, Llama-3 8B: word perplexity and GiB."""

SCHEMES = {
    "INT8": "int8", "NF4, double": "nf4", "NeuZip, 0 bits": "k0", "NeuZip, 1 bit": "k1",
    "NeuZip, 3 bits": "k3", "NeuZip, lossless": "lossless",
}  # fmt: skip
"""Rows of Table 3a by their names in a sweep."""

PAPER_BLOCKS = {
    32: (6.341, 35.7, None, None), 64: (6.694, 34.6, 4.611, 42.7), 128: (6.853, 34.2, 4.662, 42.2),
    256: (7.639, 33.8, 4.640, 41.8), 512: (7.104, 33.5, 4.649, 41.4),
}  # fmt: skip
"""Table 4 of the paper by block: perplexity and GiB with 0 bits, and with 1 bit."""


def neuzip() -> PaperSection:
    """All tables and figures of the paper."""
    return PaperSection(
        "NeuZip", "2410.20650",
        (figure_1(), table_1(), figure_2(), TABLE_2, figure_3(), table_3a(), TABLE_3B, table_4(), figure_4(),
         figure_5()),
    )  # fmt: skip


def figure_1() -> PaperItem:
    """Histograms of the fields of trained weights."""
    return PaperItem(
        "Figure 1", "Histograms of sign, exponent and mantissa, trained weights",
        "Llama-3 8B: few exponents have nearly all weights; signs and mantissas look random.",
        *fields("trained"),
        "Llama-3 8B",
        "The table has entropies in place of histograms; `neuzip inspect MODEL --plot FILE` draws them.",
        on="the demo checkpoint, wikilm-26m and SmolLM2-135M",
    )  # fmt: skip


def fields(kind: str) -> tuple[str, tuple[str, ...], list[Claim]]:
    """The table of entropies of trained or of random weights, its result, and what the paper says of them."""
    rows = [r for r in load("exponents")["results"] if r["kind"] == kind]
    lines = [
        [MODELS_READ.get(r["model"], r["model"]), f"{r['weights']:,}",
         *(f"{r[field]:.3f}" for field in ("sign_bits", "exponent_bits", "mantissa_bits")),
         exponents_of_most(r)]
        for r in rows
    ]  # fmt: skip
    heads = ("matrices of", "weights", "sign, of 1 bit", "exponent, of 8 bits", "mantissa, of 7 bits",
             "exponents of 99 % of the weights")  # fmt: skip
    claims = [
        Claim("exponents have an entropy below 3 of 8 bits", all(r["exponent_bits"] < 3 for r in rows)),
        Claim("signs and mantissas have 99 % of the largest entropy",
              all(r["sign_bits"] > 0.99 and r["mantissa_bits"] > 0.99 * 7 for r in rows)),
    ]  # fmt: skip
    return table(heads, lines), ("exponents",), claims


def exponents_of_most(row: Document) -> int:
    """How many of the most frequent exponents have 99 % of the weights."""
    total, count = 0.0, 0
    for share in sorted(row["shares"].values(), reverse=True):
        if total >= 0.99:
            break
        total, count = total + share, count + 1
    return count


def table_1() -> PaperItem:
    """Memory and speed of pre-training."""
    sections = load("train_memory")["sections"]
    rows, claims = [], []
    for model, title in TRAINED.items():
        methods = {name: training_row(sections[model], name) for name in TRAINING_METHODS}
        for name, r in methods.items():
            paper = PAPER_TRAINING[model][name]
            rows.append([
                title, TRAINING_METHODS[name], f"{paper[1]:.2f}" if paper else "out of memory",
                f"{r['peak_gib']:.2f}", f"{paper[2]:.2f}" if paper else "", f"{1 / r['seconds']:.2f}",
                relative(PAPER_TRAINING[model], name),
                f"{r['tokens_per_second'] / methods['lomo']['tokens_per_second']:.2f}",
            ])  # fmt: skip
        saved = methods["ours"]["peak_gib"] < methods["lomo"]["peak_gib"] < methods["vanilla"]["peak_gib"]
        claims.append(
            Claim(f"{title}: NeuZip needs less memory than LOMO, and LOMO less than vanilla", saved)
        )
        repeatable = training_row(sections[model], "ours, deterministic")
        same = repeatable["steps_as_the_peer"] == len(repeatable["losses"])
        claims.append(Claim(f"{title}: LOMO and NeuZip have the same losses, bit for bit", same))
    heads = ("model", "method", "paper, GiB", "ours, GiB", "paper, it/s", "ours, it/s",
             "paper, speed / LOMO", "ours, speed / LOMO")  # fmt: skip
    filtered = (
        "It and NeuZip filtered the gradients of the head, which skips nearly all of them with random "
        "weights; vanilla computes them in full. "
        if any(sections[model].get("filtered_head", True) for model in TRAINED) else ""
    )  # fmt: skip
    losses, same_losses, trained_on = training_losses()
    return PaperItem(
        "Table 1", "Pre-training: validation loss, peak memory, speed",
        "The three methods have the same validation loss (8.81, 8.61 and 9.10); memory and speed are in the "
        "table.",
        f"{table(heads, rows)}\n\n{losses}".rstrip(),
        ("train_memory", *(["training_losses"] if losses else [])),
        [*claims, *same_losses],
        "the validation losses" + (" of models of these sizes" if losses else ""),
        "The tokens of the runs that measure memory and speed are random as well, so those have no "
        + ("validation loss. " if losses else "validation loss; `python benchmarks/training_losses.py` "
           "measures it on text, with small models, needs a GPU, and has not run yet. ")
        + "The GPU is an H100 (paper: A6000), and our steps have 1,024 tokens, so iterations per second do "
        "not compare with the paper's. "
        f"LOMO is neuzip's own trainer with uncompressed weights. {filtered}"
        "Vanilla uses activation checkpointing; Figure 2 has vanilla without. "
        "Losses were compared with deterministic algorithms, over 8 "
        "steps: "
        f"{linked('all rows', 'Training with compressed weights')}.",
        on=SHAPES + trained_on, sections=tuple(TRAINED),
    )  # fmt: skip


def training_losses() -> tuple[str, list[Claim], str]:
    """Validation losses of the three methods on one text: table, conclusions, and what was trained.

    All are empty if nothing was measured.
    """
    if not is_measured("training_losses"):
        return "", [], ""
    document = load("training_losses")
    runs = {(r["method"], r["seed"]): r for r in document["results"]}
    seeds = sorted({seed for _, seed in runs})
    rows = [
        [title, *(f"{runs[method, seed]['validation_loss']:.4f}" for seed in seeds),
         f"{runs[method, seeds[0]]['peak_gib']:.2f}"]
        for method, title in TRAINING_METHODS.items()
    ]  # fmt: skip
    claims = [
        Claim("small models, on text: LOMO and NeuZip have the same losses, bit for bit, with every seed",
              all(runs["lomo", seed]["losses"] == runs["ours", seed]["losses"] for seed in seeds)),
        Claim("small models, on text: all methods have the same validation loss to two decimals, as in the "
              "paper, with every seed",
              all(len({round(runs[method, seed]["validation_loss"], 2) for method in TRAINING_METHODS}) == 1
                  for seed in seeds)),
    ]  # fmt: skip
    words = (
        f"Validation losses in nats per token after {document['steps']:,} steps of SGD with "
        f"{document['tokens_a_step']:,} tokens of {document['text']}, learning rate {document['lr']:g}, on "
        f"{document['validation_tokens']:,} tokens of {document['validation_text']}:"
    )
    heads = ("method", *(f"seed {seed}" for seed in seeds), "ours, GiB")
    return f"{words}\n\n{table(heads, rows)}", claims, ", and of wikilm-26m, 26 M weights, for the losses"


def training_row(section: Document, method: str) -> Document:
    """A method with 1,024 tokens per step."""
    return at(section, method=method, tokens=1024)


def relative(methods: dict[str, tuple[float, float, float] | None], name: str) -> str:
    """The paper's speed as a multiple of LOMO's; empty where the paper has none."""
    own, lomo = methods[name], methods["lomo"]
    return f"{own[2] / lomo[2]:.2f}" if own and lomo else ""


def figure_2() -> PaperItem:
    """Memory of the methods that the paper draws."""
    sections = load("train_memory")["sections"]
    kept = sections.get("activations")
    methods = ("vanilla, all activations", *TRAINING_METHODS)
    peaks: dict[str, dict[str, float]] = {
        model: {name: training_row(sections[model], name)["peak_gib"] for name in TRAINING_METHODS}
        for model in TRAINED
    }
    if kept:
        for model, peak in peaks.items():
            peak[methods[0]] = at(kept, model=model, method=methods[0], tokens=1024)["peak_gib"]
    lines = [
        [title, *(shown_gib(peaks[model], name) for name in methods)] for model, title in TRAINED.items()
    ]
    heads = ("model", "vanilla, no checkpointing", "checkpointing", "checkpointing and LOMO", "NeuZip")
    return PaperItem(
        "Figure 2", "What each training method keeps in memory, for one linear layer",
        "A drawing of vanilla, activation checkpointing, checkpointing with LOMO, and NeuZip: each keeps "
        "less than the one before.",
        table(heads, lines),
        ("train_memory",),
        [Claim(f"{title}: each method that was measured needs less memory than the one before",
               falling([peak for name in methods if (peak := peaks[model].get(name)) is not None]))
         for model, title in TRAINED.items()],
        "one layer by itself" + ("" if kept else ", and vanilla without checkpointing"),
        "Peak memory in GiB of steps of 1,024 tokens, of whole models and not of one layer."
        + ("" if kept else " `python benchmarks/train_memory.py activations` measures vanilla without "
           "checkpointing. It needs a GPU, and has not run yet."),
        on=SHAPES, sections=(*TRAINED, *(["activations"] if kept else [])),
    )  # fmt: skip


def shown_gib(peaks: dict[str, float], name: str) -> str:
    """The peak of a method: empty if it was not measured, and a word if it did not fit."""
    if name not in peaks:
        return ""
    return "does not fit" if peaks[name] is None else f"{peaks[name]:.2f}"


TABLE_2 = PaperItem(
    "Table 2", "Fine-tuning T5 1B, 3B and 11B for SQL, against QLoRA",
    "BLEU of T5 1B: 79.9 with vanilla, LOMO and NeuZip, 70.1 to 70.6 with QLoRA. NeuZip takes 2.39 GiB, "
    "LOMO 2.75, QLoRA 3.61 to 5.84.",
    note="`neuzip train` refuses encoder-decoder models: `compress`, `decompress` and `verify` are what they "
    "support. A run in small needs two stacks in the trainer.",
    obstacle="weights of T5 1B to 11B and the SQL data",
)  # fmt: skip

TABLE_3B = PaperItem(
    "Table 3b", "Lossy NeuZip, T5 models: perplexity, memory, speed",
    "T5 1B: 2.614 at 1.37 GiB (vanilla), 2.615 at 1.28 (INT8), 2.632 at 1.08 (NF4), 2.731 at 0.40 (0 bits), "
    "2.641 at 0.48 (1 bit), 2.614 at 0.66 (3 bits).",
    note="`neuzip eval` refuses encoder-decoder models: it has no convention for their perplexity.",
    obstacle="weights of T5 1B to 11B",
)  # fmt: skip


def trade_off() -> tuple[Document, list[Claim]]:
    """The sweep of the demo checkpoint, and what the paper concludes of such a trade-off."""
    document = load("sweep-demo")
    schemes = {r["scheme"]: r for r in document["results"]}
    k3, int8, k1, nf4, k0 = (schemes[name] for name in ("k3", "int8", "k1", "nf4", "k0"))
    kept = [divergence(schemes[name]) for name in ("k0", "k1", "k3", "lossless")]
    return document, [
        Claim("fewer mantissa bits, higher loss", kept == sorted(kept, reverse=True)),
        Claim("3 mantissa bits are smaller than INT8 and have a lower loss",
              size(k3) < size(int8) and divergence(k3) < divergence(int8)),
        Claim("NF4 is smaller than 1 mantissa bit, at a loss that is as low",
              size(nf4) < size(k1) and divergence(nf4) <= divergence(k1)),
        Claim("0 mantissa bits are smaller than NF4", size(k0) < size(nf4)),
    ]  # fmt: skip


def divergence(row: Document) -> float:
    """The mean KL divergence of a row of a sweep, in nats per token."""
    value: float = row["kld"]["mean"]["value"]
    return value


def size(row: Document) -> float:
    """The bits per weight of a row of a sweep."""
    value: float = row["bits_per_weight"]
    return value


def table_3a() -> PaperItem:
    """Lossy compression against quantisation."""
    document, claims = trade_off()
    rows: list[Sequence[object]] = []
    for name, (perplexity, gib) in PAPER_INFERENCE.items():
        r = at(document, scheme=SCHEMES[name]) if name in SCHEMES else None
        bits = gib * 16 / PAPER_INFERENCE["vanilla"][1]
        rows.append([
            name, f"{perplexity:.2f}", f"{gib:.2f} ({bits:.1f})",
            f"{r['perplexity']['value']:.2f}" if r else "16 bits: the baseline" if name == "vanilla" else "",
            f"{divergence(r):.5f}" if r else "", f"{size(r):.2f}" if r else "",
        ])  # fmt: skip
    heads = ("scheme", "paper: Llama-3 8B, perplexity", "paper, GiB (as bits per weight)",
             "ours: demo checkpoint, perplexity", "ours, KLD, nats per token",
             "ours, bits per weight")  # fmt: skip
    return PaperItem(
        "Table 3a", "Lossy NeuZip and quantisation, decoder models: perplexity, memory, speed",
        "The table has the paper's rows for Llama-3 8B; Llama-2 13B and Yi-1.5 34B are similar.",
        table(heads, rows),
        ("sweep-demo",),
        claims,
        "speed, measured memory, FP4 of bitsandbytes, NF4 without double quantisation, and models of 8B to "
        "34B",
        "Our sizes are those of files. In the paper, 3 mantissa bits are better than INT8 at a smaller size. "
        "Here INT8 with a scale per row has the lower loss. In both, NF4 is smaller than 1 mantissa bit and "
        "at least about as good. Other 4-bit formats are in "
        f"{linked('a table of their own', 'Quantised weights compared with other formats')}.",
        on=DEMO,
    )  # fmt: skip


def figure_3() -> PaperItem:
    """The trade-off as a picture."""
    _, claims = trade_off()
    return PaperItem(
        "Figure 3", "Size against perplexity of all methods",
        "NeuZip's points lie on the Pareto front or near it.",
        "![Size against KL divergence of the demo checkpoint](benchmarks/results/sweep-demo.svg)",
        ("sweep-demo",),
        claims,
        "models of 8B to 34B, and FP4 of bitsandbytes",
        "The axes are bits per weight and KL divergence. Around 4 and 8 bits, published formats lie below "
        "rounded mantissas, so rounded mantissas are not on the front there.",
        on=DEMO,
    )  # fmt: skip


def table_4() -> PaperItem:
    """The block size of the normalisation."""
    document = load("sweep-demo")
    schemes = {r["scheme"]: r for r in document["results"]}
    rows: list[Sequence[object]] = []
    for block, (zero, zero_gib, one, one_gib) in PAPER_BLOCKS.items():
        k0, k1 = schemes[f"k0b{block}"], schemes[f"k1b{block}"]
        rows.append([
            block, f"{zero:.3f}", f"{zero_gib:.1f}", f"{one:.3f}" if one else "out of memory",
            f"{one_gib:.1f}" if one_gib else "", f"{divergence(k0):.4f}", f"{size(k0):.3f}",
            f"{divergence(k1):.4f}", f"{size(k1):.3f}",
        ])  # fmt: skip
    blocks = sorted(PAPER_BLOCKS)
    claims = [
        Claim(f"{bits}: larger blocks take less memory",
              all(size(schemes[f"{k}b{a}"]) > size(schemes[f"{k}b{b}"])
                  for a, b in itertools.pairwise(blocks)))
        for k, bits in (("k0", "0 bits"), ("k1", "1 bit"))
    ] + [Claim("0 bits: blocks of 32 have the lowest loss", min(
        blocks, key=lambda block: divergence(schemes[f"k0b{block}"])) == 32)]  # fmt: skip
    heads = ("block", "paper, 0 bits: perplexity", "GiB", "paper, 1 bit: perplexity", "GiB",
             "ours, 0 bits: KLD", "bits per weight", "ours, 1 bit: KLD", "bits per weight")  # fmt: skip
    return PaperItem(
        "Table 4", "Block size of the normalisation, with 0 and 1 mantissa bits",
        "The paper's perplexities and memory are in the table. The page that we read does not name the "
        "model.",
        table(heads, rows),
        ("sweep-demo",),
        claims,
        "measured memory, and a model of the paper's size",
        "Our sizes are those of files.",
        on=DEMO,
    )  # fmt: skip


THROUGHPUT = "matrix_throughput"


def figure_4() -> PaperItem:
    """The throughput of compression, by size where that was measured."""
    name, shows = "Figure 4", "Throughput of compression and decompression by matrix size"
    paper = (
        "Eight curves in GiB/s: CPU offload and reload, quantisation and dequantisation, lossy and lossless "
        "NeuZip, in both directions. The page that we read has no numbers."
    )
    if not is_measured(THROUGHPUT):
        return at_two_sizes(name, shows, paper)
    rows = load(THROUGHPUT)["results"]
    sizes = list(dict.fromkeys(r["weights"] for r in rows))
    speeds = {(r["by"], r["direction"], r["weights"]): r["gb_s"] for r in rows}
    methods = list(dict.fromkeys((r["by"], r["direction"]) for r in rows))
    lines = [
        [f"{by}, {direction}", *(f"{speeds[by, direction, size]:,.1f}" for size in sizes)]
        for by, direction in methods
    ]
    peers = {"NF4"} - {by for by, _ in methods}
    return PaperItem(
        name, shows, paper,
        table(("GB/s of bf16", *(f"2^{size.bit_length() - 1} weights" for size in sizes)), lines),
        (THROUGHPUT,),
        (),
        "the paper's GPU" + (", and NF4 of bitsandbytes" if peers else ""),
        "Each figure is a call on an idle GPU. INT8 has a scale for each row of 1,024 weights. "
        f"{linked('DFloat11 and nvCOMP', 'Lossless codec on a GPU')} were measured as well, with replayed "
        "graphs.",
        on="random weights",
    )  # fmt: skip


def at_two_sizes(name: str, shows: str, paper: str) -> PaperItem:
    """The throughput of neuzip's codec alone."""
    document = load("gpu_codec")
    of = {(r["row"], r["by"]): r for r in document["results"]}
    rows: list[Sequence[object]] = [
        [what, f"{of[row, 'neuzip']['gb_s']:,.0f}"]
        for what, row in (
            ("compress, lossless, 235 M weights", "bf16 encode, 235 M weights"),
            ("decompress, lossless, 235 M weights", "bf16 decode, lossless, 235 M weights"),
            ("decompress, lossless, 16 Mi weights", "bf16 decode, lossless, 16 Mi weights"),
            ("decompress, 3 mantissa bits", "bf16 decode, k = 3"),
            ("decompress, 1 mantissa bit", "bf16 decode, k = 1"),
        )
    ]  # fmt: skip
    rows.append(["copy between CPU and GPU, the offload baseline", f"{document['link_gb_s']:,.0f}"])
    return PaperItem(
        name, shows, paper,
        table(("operation", "GB/s of bf16"), rows),
        ("gpu_codec",),
        (),
        "quantisation and dequantisation, lossy compression, and sizes other than 16 Mi and 235 M weights",
        f"{linked('DFloat11 and nvCOMP', 'Lossless codec on a GPU')} were measured as well. Compression is "
        "one "
        "call, decompression a replayed graph. `python benchmarks/matrix_throughput.py` measures all methods "
        "at five sizes. It needs a GPU, and has not run yet.",
        on="random weights",
    )  # fmt: skip


def figure_5() -> PaperItem:
    """Histograms of the fields of random weights."""
    return PaperItem(
        "Figure 5", "Histograms of sign, exponent and mantissa, random weights",
        "Llama-3 8B at its random initialisation has low-entropy exponents too.",
        *fields("random"),
        "all layers but one, and the embedding",
        "All layers have the same distribution of first weights, so one layer stands for all.",
        on="a layer of random weights in the shape of Llama-3 8B",
    )  # fmt: skip
