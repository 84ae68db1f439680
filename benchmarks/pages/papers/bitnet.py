"""Tables and figures of BitNet a4.8 (arXiv 2411.04965)."""

from __future__ import annotations

from pages.attention import cache_rows
from pages.layout import Document, is_measured, linked, load, table
from pages.papers import bitnet_training as trained
from pages.papers.bitnet_training import TO_RUN
from pages.papers.items import Claim, PaperItem, PaperSection

PAPER_PERPLEXITIES = {
    "700M": (11.44, 12.32, 12.40, 12.40), "1.3B": (10.82, 11.27, 11.38, 11.35),
    "3B": (9.61, 9.97, 9.99, 9.97), "7B": (9.20, 9.24, 9.42, 9.37),
}  # fmt: skip
"""Table 1 of the paper: LLaMA, b1.58, a4.8 with FP4, a4.8."""


def bitnet() -> PaperSection:
    """All tables and figures of the paper."""
    return PaperSection(
        "BitNet a4.8", "2411.04965",
        (FIGURE_1, table_1(), trained.figure_2(FIGURE_2), trained.figure_3(FIGURE_3),
         trained.table_2(TABLE_2), trained.table_3(table_3()), trained.table_4(TABLE_4), *ablations(),
         TABLE_5, TABLE_6, TABLE_7),
    )  # fmt: skip


def ablations() -> list[PaperItem]:
    """Figures 4 to 6: losses of models whose activations differ in all steps."""
    mix = "a4.8"
    return [
        trained.compared(
            FIGURE_4, "hybrid", {"hybrid": mix, "int4": "INT4 everywhere", "fp4": "FP4 everywhere"},
            [("INT4 everywhere is worse than a4.8's mix, with every seed", "int4", "hybrid"),
             ("FP4 everywhere is worse than a4.8's mix, with every seed", "fp4", "hybrid")],
        ),
        trained.compared(
            FIGURE_5, "hybrid",
            {"hybrid": "INT8, squared ReLU", "swish": "INT8, Swish", "down-fp4": "FP4, squared ReLU",
             "down-int4": "INT4, squared ReLU"},
            [("FP4 is worse than INT8, with every seed", "down-fp4", "hybrid"),
             ("INT4 is worse than INT8, with every seed", "down-int4", "hybrid"),
             ("Swish is worse than squared ReLU, with every seed", "swish", "hybrid")],
        ),
        trained.compared(
            FIGURE_6, "hybrid",
            {"hybrid": "INT4, absmean", "inputs-e2m1": "FP4, E2M1", "inputs-e1m2": "FP4, E1M2",
             "inputs-absmax": "INT4, absmax"},
            [("E1M2 is worse than E2M1, with every seed", "inputs-e1m2", "inputs-e2m1"),
             ("absmax is worse than E2M1, with every seed", "inputs-absmax", "inputs-e2m1"),
             ("E1M2 is worse than absmean, with every seed", "inputs-e1m2", "hybrid"),
             ("absmax is worse than absmean, with every seed", "inputs-absmax", "hybrid")],
        ),
    ]  # fmt: skip


FIGURE_1 = PaperItem(
    "Figure 1", "Which activations are quantised and which are sparsified",
    "A drawing: 4-bit inputs of attention and feed-forward layers, 8-bit sparse inputs of the output and "
    "down "
    "projections.",
    note="`runtime/bitlinear.py` has this table as `MODES`; tests compare each quantiser with the equations.",
    drawn=True,
)  # fmt: skip


def table_1() -> PaperItem:
    """Perplexity of ternary models with 8 and with 4 bits of activations."""
    sections = load("recovery")["sections"]
    ours = (sections["b158"]["after"]["perplexity"], sections["a48"]["after"]["perplexity"])
    rows: list[list[object]] = [
        [f"paper, {size}", f"{dense:.2f}", f"{b158:.2f}", f"{fp4:.2f}", f"{a48:.2f}", f"{a48 / b158:.3f}"]
        for size, (dense, b158, fp4, a48) in PAPER_PERPLEXITIES.items()
    ]
    rows.append(["ours, wikilm-26m", f"{sections['b158']['after']['original']:.2f}", f"{ours[0]:.2f}", "",
                 f"{ours[1]:.2f}", f"{ours[1] / ours[0]:.3f}"])  # fmt: skip
    results, missing, on = ["recovery"], "the accuracy of tasks", "wikilm-26m"
    if is_measured("recovery-smollm2-135m"):
        after = load("recovery-smollm2-135m")["sections"]["b158"]["after"]
        rows.append(
            ["ours, SmolLM2-135M", f"{after['original']:.2f}", f"{after['perplexity']:.2f}", "", "", ""]
        )
        results.append("recovery-smollm2-135m")
        on = f"{on} and SmolLM2-135M"
    own = trained.perplexities()
    ratios: list[float] = []
    if own is None:
        missing = f"a4.8 with FP4, {missing}, and models that were trained from scratch"
    else:
        results.append(trained.RESULT)
        missing = f"{missing}, and {trained.SMALLER}"
        size, means, ratios = own
        on = f"{on}; {size}"
        cells = ["" if mean is None else f"{mean:.2f}" for mean in means]
        rows.append([f"ours, from scratch: {size}", *cells, ", ".join(f"{ratio:.3f}" for ratio in ratios)])
        ratios = ratios if len(ratios) >= trained.LEAST_SEEDS else []
    most = max(a48 / b158 for _, b158, _, a48 in PAPER_PERPLEXITIES.values())
    heads = ("model", "16-bit baseline", "b1.58", "a4.8, FP4", "a4.8", "a4.8 / b1.58")
    return PaperItem(
        "Table 1", "Perplexity and accuracy of LLaMA, b1.58 and a4.8",
        "Perplexities are in the table. The mean accuracy of five tasks at 7B is 54.93, 55.09, 54.61 and "
        "54.74.",
        table(heads, rows),
        results,
        [Claim(f"{which}: a4.8's perplexity is at most {100 * (most - 1):.1f} % above b1.58's, as in the "
               "paper", round(max(found), 3) <= round(most, 3))
         for which, found in {"wikilm-26m": [ours[1] / ours[0]], "from scratch": ratios}.items() if found],
        missing,
        "The paper trains 100 billion tokens from scratch. `neuzip recover` starts from a trained model and "
        "uses it "
        "as teacher, with SiLU and learned scales. The second stage read the text "
        f"{sections['a48']['epochs']:.0f} more times: {linked('settings', 'Recovery of a ternary model')}.",
        on=on,
    )  # fmt: skip


FIGURE_2 = PaperItem(
    "Figure 2", "Distribution of the inputs of each projection",
    "b1.58 at 7B: inputs of attention and of the feed-forward layer are near Gaussian; those of the output "
    "and "
    "down projections have many small values and large outliers.",
    note=TO_RUN,
)  # fmt: skip

FIGURE_3 = PaperItem(
    "Figure 3", "Inputs of the output projection with INT8, with INT4, and sparse with INT8",
    "Three distributions of a 7B model, as pictures.",
    note=TO_RUN,
)  # fmt: skip

TABLE_2 = PaperItem(
    "Table 2", "Sparsity of each projection's inputs",
    "a4.8 at 7B: 12.1 % (QKV), 50.0 % (output), 71.4 % (up), 12.0 % (gate), 84.2 % (down), 44.5 % overall; "
    "b1.58 7.3 % overall.",
    note="`neuzip eval --sparsity --residency packed` measures these numbers. Weights of the up projection "
    "count as inactive where the gate is zero, too. Our b1.58 has squared ReLU, so its gates have many "
    f"zeros; the paper's has few. {TO_RUN}",
)  # fmt: skip


def table_3() -> PaperItem:
    """Quantised Q, K and V."""
    return PaperItem(
        "Table 3", "Q, K and V in 4 and 3 bits",
        "Mean accuracy of a4.8 at 7B: 54.74; 4-bit KV 55.00; 4-bit QKV 54.55; 4-bit Q with 3-bit KV 54.43. "
        "At "
        "3B: 51.61, 51.77, 51.85, 51.78.",
        note=f"{TO_RUN} Dense models were measured with a quantised KV cache, and lose more: "
        f"{cache_costs()} ({linked('all bits', 'Quality with a quantised KV cache')}). Neither the model nor "
        "the measure is the paper's. `neuzip eval --query-bits` quantises queries as well.",
    )  # fmt: skip


def cache_costs() -> str:
    """What the paper's 4-bit and 3-bit KV caches add to the perplexity of dense models, in words."""
    return "; ".join(
        f"{title} {rise(document, 4):+.1f} % of perplexity with 4 bits, {rise(document, 3):+.1f} % with 3 "
        "bits"
        for name, title in (("wikilm-26m", "wikilm-26m"), ("smollm2-135m", "SmolLM2-135M"))
        if (3, "a4.8") in cache_rows(document := load(f"kv_cache-{name}"))
    )


def rise(document: Document, bits: int) -> float:
    """By how many percent a cache of so many bits in the paper's form raises the perplexity."""
    rows = cache_rows(document)
    percent: float = 100 * (rows[bits, "a4.8"]["perplexity"] / rows[16, None]["perplexity"] - 1)
    return percent


TABLE_4 = PaperItem(
    "Table 4", "Output projection with all inputs in INT8, and with the largest 50 %",
    "3B: perplexity 9.95 and 9.97, mean accuracy 52.11 and 51.61.",
    note=TO_RUN,
)  # fmt: skip

FIGURE_4 = PaperItem(
    "Figure 4", "Training with a4.8's mix, with INT4 everywhere, and with FP4 everywhere",
    "a4.8's mix is clearly better than FP4 everywhere, and INT4 everywhere diverges.",
    note=f"{TO_RUN} For inputs of the down projection INT4 has twice the mean, as in the paper.",
)  # fmt: skip

FIGURE_5 = PaperItem(
    "Figure 5", "Training losses by quantiser and activation function of the down projection",
    "1.3B: FP4 and INT4 are clearly worse than INT8; squared ReLU is slightly better than Swish.",
    note=f"{TO_RUN} All other inputs are as in a4.8, and INT4 has twice the mean.",
)  # fmt: skip

FIGURE_6 = PaperItem(
    "Figure 6", "Training losses by 4-bit quantiser: FP4 E1M2 and E2M1, INT4 absmax and absmean",
    "E2M1 and INT4 with absmean are better than E1M2 and INT4 with absmax.",
    note="`neuzip.kernels.quantizers` has all four. By equations (8) and (9), E1M2 has equal steps: the grid "
    "of INT4 "
    f"with absmax. {TO_RUN}",
)  # fmt: skip

TABLE_5 = PaperItem(
    "Table 5", "A model of 2B parameters after 2T tokens",
    "Mean accuracy of eight tasks: 60.22 (b1.58) and 60.05 (a4.8).",
    obstacle="the checkpoint of the paper, or 2 trillion tokens of training",
)  # fmt: skip

TABLE_6 = PaperItem(
    "Table 6", "Shapes of the models",
    "700M to 7B; 3B has width 3,200, feed-forward width 8,640, 32 heads and 26 layers.",
    note="[bitnet.py](benchmarks/bitnet.py) measures speed and memory with the 3B shapes: "
    f"{linked('table', 'Generation with BitNet a4.8s 3B shapes')}. The paper reports no speed.",
    drawn=True,
)  # fmt: skip

TABLE_7 = PaperItem(
    "Table 7", "Hyperparameters of training",
    "a4.8 at 7B: learning rate 1e-3, then 6e-4; weight decay 0.1, then 0; 375 steps of warm-up; Adam with "
    "0.9 "
    "and 0.95.",
    note="`preset` of `neuzip train` has the values of all four sizes: [keys](docs/reference/config.md).",
    drawn=True,
)  # fmt: skip
