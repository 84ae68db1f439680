"""The importance of layers: a row for each, which to drop, and what was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.figures import estimate_text, precise_text
from neuzip.cli.text import bytes_text, count_text, percent_text, seconds_text

if TYPE_CHECKING:
    from neuzip.eval.layers.analyse import LayerAnalysis
    from neuzip.eval.layers.layer_report import LayerReport
    from neuzip.eval.layers.left_out import LayerRemoval
    from neuzip.eval.layers.removal import Pruned
    from neuzip.eval.measures.estimates import Estimate

METRICS = {
    "angular_distance": "angular distance",
    "angular_distance_all_tokens": "angular distance, all tokens",
    "block_influence": "block influence",
    "gradient_norm": "gradient norm",
    "depth": "depth (later layers first)",
}


def quiet_lines(analysis: LayerAnalysis, output: Path | None) -> list[object]:
    """The folder that was written; or the layers to drop; or the divergence without each layer."""
    if output is not None:
        return [output]
    if analysis.removal is not None:
        return list(analysis.removal.layers)
    return [layer.kld for layer in analysis.layers]


def show_layers(out: Output, analysis: LayerAnalysis) -> None:
    """A row for each layer, what the columns mean, and how well metrics predict what is measured."""
    from neuzip.eval.measures.convention_names import special_text
    from neuzip.eval.measures.estimates import errors_text, exponential

    columns = ["layer", "PPL without", "KLD", "NLL difference", "influence", "angular", "gradient"]
    rows = [_row(layer) for layer in analysis.layers]
    left_out = out.table(columns, rows, right=columns, spare=["angular", "gradient", "influence"])
    out.text("PPL, KLD and NLL (nats per token) are those of the model without this one layer.")
    out.text("influence  1 - cosine similarity of the layer's input and output")
    out.text("angular    their angle, as a fraction of 180 degrees, at the last token of each window")
    out.text("gradient   norm of the gradient of the layer's parameters")
    out.text()
    predictions = [
        [METRICS[name], "-" if rho is None else f"{rho:+.2f}"]
        for name in METRICS
        if name in analysis.rank_correlations
        for rho in [analysis.rank_correlations[name]]
    ]
    out.table(["metric", "Spearman with KLD"], predictions, right=["Spearman with KLD"])
    whole = next((layer.without for layer in analysis.layers if layer.without is not None), None)
    if whole is not None:
        out.text(f"PPL     {estimate_text(exponential(whole.base_nll))} with all layers")
    windows = f"windows of {analysis.window:,}{special_text(analysis.special_tokens)}"
    out.text(f"text    {analysis.text}: {analysis.tokens:,} tokens in {windows}")
    error = None if whole is None else whole.base_nll.standard_error
    out.text(f"errors  {errors_text(analysis.blocks, error)}; over windows for angular and gradient;")
    out.text("        NLL differences and KLD are paired")
    if analysis.gradient_windows:
        out.text(
            f"        gradient on {analysis.gradient_windows} of {count_text(analysis.windows, 'window')}"
        )
    out.text(f"in      {analysis.dtype} on {analysis.device}, {seconds_text(analysis.seconds)}")
    out.wider(left_out)


def show_removal(out: Output, analysis: LayerAnalysis, removal: LayerRemoval, recipe: str) -> None:
    """Which layers to drop, and what the model then is."""
    from neuzip.eval.measures.estimates import exponential

    c = removal.comparison
    numbers = ", ".join(map(str, removal.layers))
    before, after = (estimate_text(exponential(nll)) for nll in (c.base_nll, c.other_nll))
    share = percent_text(removal.parameters, analysis.parameters)
    out.text()
    out.text(f"drop    {numbers}: {removal.parameters:,} parameters, {share} of all")
    if removal.choice == "greedy" and len(removal.order) > 1:
        steps = ", ".join(f"{n} ({kld:.3g})" for n, kld in zip(removal.order, removal.klds, strict=True))
        out.text(f"order   {steps}; in brackets the KLD so far")
    out.text(
        f"KLD     {precise_text(c.kld.mean)} nats per token without them, on the text used to choose them"
    )
    out.text(f"PPL     {before} before, {after} after")
    out.text()
    out.text("as a mergekit configuration:")
    for line in recipe.splitlines():
        out.text(line)


def show_pruned(out: Output, pruned: Pruned) -> None:
    """What was written."""
    for warning in pruned.warnings:
        out.warning(warning)
    out.text()
    sizes = f"weights {bytes_text(pruned.source_bytes)} -> {bytes_text(pruned.bytes)}"
    out.text(f"{pruned.dst}: {count_text(len(pruned.remaining), 'layer')}; {sizes}")


def _row(layer: LayerReport) -> list[str]:
    measured = ["not finite", "-", "-"]
    if layer.without is not None:
        from neuzip.eval.measures.estimates import Estimate, exponential

        c = layer.without
        ppl = Estimate(exponential(c.other_nll).value, None)  # of the difference the error says more
        measured = [estimate_text(ppl), _short(c.kld.mean), _short(c.nll_difference, "+")]
    return [
        str(layer.number), *measured, _short(layer.block_influence), _short(layer.angular_distance),
        "-" if layer.gradient_norm is None else _short(layer.gradient_norm),
    ]  # fmt: skip


def _short(estimate: Estimate, sign: str = "") -> str:
    error = estimate.standard_error
    return f"{estimate.value:{sign}.3g}" + ("" if error is None else f" ± {error:.1g}")
