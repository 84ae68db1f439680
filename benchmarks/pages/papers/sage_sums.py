"""Tables and figures of SageAttention2 on values by channel, and on sums in 22 bits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pages.layout import Document, is_measured, load, table
from pages.papers.items import Claim, PaperItem

VALUES, SUMS = "attention_values-smollm2-135m", "attention_sums-smollm2-135m"

INSTRUCTION = "fp8_instruction"
"""The result of a GPU's instruction."""

TENSORS = {"q": "Q", "k": "K", "v": "V"}

EMULATED = (
    "`kernels/attention/accumulator.py` computes what the paper says of the instruction: 13 bits of mantissa "
    "are left after each 32 products. Nothing here ran on the instruction itself."
)


def figure_4() -> PaperItem:
    """Offsets of channels."""
    document = load(VALUES)
    rows = document["results"]
    lines = [
        [title, f"{100 * average(rows, f'{name}_offset'):.0f} %", f"{average(rows, f'{name}_largest'):.1f}",
         f"{max(r[f'{name}_largest'] for r in rows):.1f}",
         f"{100 * average(rows, f'{name}_offset_channels'):.0f} %"]
        for name, title in TENSORS.items()
    ]  # fmt: skip
    heads = ("tensor", "squares due to the means of channels, mean of layers",
             "largest mean of a channel in its standard deviations, mean of layers", "worst layer",
             "channels with a mean above their standard deviation")  # fmt: skip
    shown, least = document["pictured"], {name: min(r[f"{name}_largest"] for r in rows) for name in "qkv"}
    return PaperItem(
        "Figure 4", "Typical values of Q, K, V and S by token and channel",
        "Q and K have channels with a large offset that all tokens share.",
        f"![Q, K, V and S of a head](benchmarks/results/{VALUES}.svg)\n\n{table(heads, lines)}",
        (VALUES,),
        [Claim(f"{TENSORS[name]}: every layer has a channel whose mean is larger than its standard deviation",
               least[name] > 1) for name in "qk"],
        "the paper's models",
        f"The model read {document['tokens']} tokens of WikiText-2. Values are those after rotary embedding. "
        f"The picture has the first 96 tokens of layer {shown['layer']}, head {shown['head']} of keys: the "
        "one with the largest mean of a key's channel. "
        f"The largest logit of S is {max(r['s_largest'] for r in rows):.0f}, and the standard deviation of a "
        f"row is {average(rows, 's_spread'):.1f}.",
        on="SmolLM2-135M",
    )  # fmt: skip


def average(rows: Sequence[Document], key: str) -> float:
    """The mean of a figure over the layers."""
    return statistics.fmean(r[key] for r in rows)


def figure_6() -> PaperItem:
    """One sum in 22 bits."""
    document = load(SUMS)
    found = document["example"]
    lines = []
    for name, title in (("plain", "plain"), ("smoothed", "smoothed")):
        errors = found[name]["errors"]
        lines.append([
            title, f"{found[name]['exact']:.6f}", f"{found[name]['in_22_bits']:.6f}", f"{errors[-1]:.1e}",
            f"{max(map(abs, errors)):.1e}",
        ])  # fmt: skip
    largest = {name: max(map(abs, found[name]["errors"])) for name in ("plain", "smoothed")}
    return PaperItem(
        "Figure 6", "Error of a product of P and V that is summed in 22 bits",
        "Smoothing V removes the error that the short accumulator causes. The page that we read has a "
        "picture.",
        table(("V", "exact sum", "sum in 22 bits", "error", "largest error of the running sum"), lines),
        (SUMS,),
        [Claim("the running sum has a smaller largest error with V smoothed",
               largest["smoothed"] < largest["plain"])],
        "the paper's tensors, the picture, and the instruction itself",
        f"One row of P and one column of V of SmolLM2-135M, {found['keys']} keys: layer {found['layer']}, "
        f"head {found['head']}, channel {found['channel']}, whose mean {found['mean']:.2f} is "
        f"{found['mean_in_deviations']:.1f} of its standard deviations, the most of all channels. Smoothing "
        f"adds the mean to the sum in the end. {EMULATED}",
        on="SmolLM2-135M",
    )  # fmt: skip


def table_6() -> PaperItem:
    """Attention with sums in 22 bits."""
    document = load(SUMS)
    rows = document["results"]
    of = {(r["accumulator"], r["smooth_v"]): r for r in rows}
    lines = [
        [r["accumulator"], "smoothed" if r["smooth_v"] else "plain", f"{100 * r['cosine']:.4f} %",
         f"{r['relative_l1']:.5f}", f"{r['rmse']:.5f}", f"{r['error']:.1e}"]
        for r in rows
    ]  # fmt: skip
    heads = ("accumulator", "V", "cosine", "relative L1", "RMSE", "relative L1 to sums in fp32")
    names = ("22 bits", "two levels")
    share = of["22 bits", False]["error"] / of["fp32", False]["relative_l1"]
    return PaperItem(
        "Table 6", "Attention with a 22-bit accumulator, with and without smoothing of V",
        "The page that we read has no numbers. A newer version has, for tensors of CogVideoX, a cosine of "
        "98.25 % and a relative L1 of 0.198 without smoothing, and 99.75 % and 0.041 with it. It reports no "
        "gain for Llama 3.1.",
        table(heads, lines),
        (SUMS,),
        [Claim("22 bits: smoothing V brings attention closer",
               of["22 bits", True]["cosine"] > of["22 bits", False]["cosine"]),
         *(Claim(f"{name}: smoothing V lowers what the accumulator costs",
                 of[name, True]["error"] < of[name, False]["error"]) for name in names),
         Claim("two levels cost less than 22 bits throughout",
               of["two levels", False]["error"] < of["22 bits", False]["error"])],
        "the paper's model, and the instruction itself",
        f"Means over the {document['layers']} layers of SmolLM2-135M, {document['tokens']} tokens of "
        "WikiText-2, causal; Q and K are not quantised, P and V are E4M3. With two levels, as in neuzip's "
        "kernels, the products of 128 keys are summed in 22 bits and these sums in fp32. On this model the "
        f"accumulator costs {100 * share:.1f} % of what rounding P and V to E4M3 costs. {EMULATED}",
        on="SmolLM2-135M",
    )  # fmt: skip


def table_7() -> PaperItem:
    """The instruction of a GPU."""
    name, shows = "Table 7", "Error of the FP8 matmul instruction by precision of the accumulated value"
    paper = (
        "The accumulator has fewer bits than fp32. The page that we read has no numbers. A newer version "
        "says that 13 bits of mantissa come back, and that the others are 0."
    )
    if not is_measured(INSTRUCTION):
        return PaperItem(
            name, shows, paper,
            note="`python benchmarks/fp8_instruction.py` measures Hopper's instruction, and compares it with "
            "both models of `kernels/attention/accumulator.py`. It needs an H100 or H200, and has not run "
            "yet. The paper's instruction is that of Ada GPUs.",
        )  # fmt: skip
    rows = load(INSTRUCTION)["results"]
    copied = [r for r in rows if r["row"] == "copied"]
    lines = [
        [r["mantissa_bits"], f"{r['mean_error']:.1e}", f"{r['largest_error']:.1e}",
         f"{100 * r['as_cut_to_13_bits']:.1f} %"]
        for r in copied
    ]  # fmt: skip
    sums = [
        [f"{r['depth']:,}", r["start"], "fp32 after each 32" if r["promote"] else "22 bits",
         f"{r['error']:.1e}", f"{100 * r['as_whole']:.1f} %", f"{100 * r['as_aligned']:.1f} %"]
        for r in rows if r["row"] == "summed"
    ]  # fmt: skip
    return PaperItem(
        name, shows, paper,
        table(("mantissa bits of the accumulated value", "mean relative error", "largest",
               "equal to the value cut to 13 bits"), lines)
        + "\n\n"
        + table(("products", "start of the sum", "sums", "relative error", "equal to the model `whole`",
                 "equal to the model `aligned`"), sums),
        (INSTRUCTION,),
        [Claim("values of 13 bits and fewer come back unchanged",
               all(r["largest_error"] == 0 for r in copied if r["mantissa_bits"] <= 13)),
         Claim("values of more bits do not",
               all(r["mean_error"] > 0 for r in copied if r["mantissa_bits"] > 13))],
        "the instruction of Ada GPUs",
        "The instruction is Hopper's. The second table has sums of random products.",
        on="random numbers",
    )  # fmt: skip


def tables_9_10() -> PaperItem:
    """Speed against FlashAttention2."""
    results = [r for r in load("attention")["sections"]["kernels"]["results"] if r["tokens"] == 32768]
    tops = {(r["width"], r["causal"], r["side"]): r["tops"] for r in results}
    cases = list(dict.fromkeys((r["width"], r["causal"]) for r in results))
    sides = ("sageattention", "SDPA, cuDNN", "ours, 8 bits")
    lines = [
        [f"{width}{', causal' if causal else ''}",
         *(f"{tops[width, causal, side] / tops[width, causal, 'SDPA, flash']:.2f}" for side in sides)]
        for width, causal in sorted(cases)
    ]  # fmt: skip
    return PaperItem(
        "Tables 9 and 10", "Not on the page that we read; in a newer version, Table 9 has speeds by GPU",
        "A newer version: SageAttention2 is 2.93 (RTX 4090), 2.60 (L40), 2.46 (L20), 2.61 (H100) and 3.12 "
        "(H20) times as fast as FlashAttention2; on the H100, SageAttention 1 is 1.53 times as fast.",
        table(("head size", "SageAttention 1", "cuDNN", "neuzip, 8 bits"), lines),
        ("attention",),
        (),
        "Table 10, the text of both tables on the page that we read, and GPUs other than Hopper",
        "Speed with 32,768 tokens as a multiple of FlashAttention2's in torch, on an H200. We do not know "
        "the shapes of the paper's table, so the numbers test no conclusion.",
        on="random numbers", sections=("kernels",),
    )  # fmt: skip
