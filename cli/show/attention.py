"""The attention precision of layers: what was measured, and what was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuzip.cli.output import Output
from neuzip.cli.show.figures import change_text, estimate_text, precise_text, signed_text
from neuzip.cli.text import count_text, seconds_text

if TYPE_CHECKING:
    from neuzip.eval.attention import AttentionCalibration, AttentionLayer, QuantizedAttention


def attention_json(calibration: AttentionCalibration) -> dict[str, object]:
    """What a machine reads of a calibration: its fields, and the bits of each layer."""
    return {**vars(calibration), "bits": calibration.bits}


def show_calibration(out: Output, calibration: AttentionCalibration) -> None:
    """A row for each layer and bits that it was offered, then what all of them do together."""
    from neuzip.eval.measures.convention_names import special_text
    from neuzip.eval.measures.estimates import errors_text
    from neuzip.eval.report.attention_pictures import choice_text

    rows = [row for layer in calibration.layers for row in _rows(layer, calibration)]
    columns = ["layer", "bits", "cosine", "rel. L1", "RMSE", "score", "rank", "KLD", ""]
    out.table(columns, rows, right=set(columns) - {""})
    out.text(
        f"Similarities are means of {count_text(calibration.similarity_windows, 'window')}; "
        "score is cosine x (1 - rel. L1), and"
    )
    out.text("rank orders by score. KLD, in nats per token, is with only this layer quantised.")
    for layer in calibration.layers:
        if layer.refused is not None:
            out.text(f"layer {layer.number} stays at full precision: {layer.refused}")
    c = calibration.comparison
    out.text()
    out.text(f"choice    {choice_text(calibration)}")
    if calibration.limit is not None:
        out.text(
            f"budget    {calibration.limit:g} nats per token; single layers sum up to "
            f"{calibration.sum_of_layers:.3g}"
        )
    if c.identical:
        out.text("together  identical: every loss has the same bits, and every KL divergence is 0")
    else:
        from neuzip.eval.measures.estimates import exponential

        out.text(f"together  KL divergence {precise_text(c.kld.mean)} nats per token")
        before, after = (estimate_text(exponential(nll)) for nll in (c.base_nll, c.other_nll))
        out.text(f"PPL       {before} before, {after} after: {change_text(c.perplexity_ratio)}")
        out.text(f"NLL       {signed_text(c.nll_difference)} nats per token, paired")
    windows = f"windows of {calibration.window:,}{special_text(calibration.special_tokens)}"
    out.text(f"text      {calibration.text}: {c.tokens:,} tokens in {windows}")
    out.text(f"errors    {errors_text(c.blocks, c.kld.mean.standard_error)}")
    out.text(f"in        {calibration.dtype} on {calibration.device}, {seconds_text(calibration.seconds)}")


def _rows(layer: AttentionLayer, calibration: AttentionCalibration) -> list[list[str]]:
    """Those of the forms that were measured in the model; a layer that has none is told below the table."""
    forms = [form for form in layer.forms if form.bits in calibration.offered]
    return [
        [
            "" if number else str(layer.number),
            str(form.bits),
            *_closeness(form),
            str(calibration.rank(layer, form.bits)),
            "not finite" if form.kld is None else _kld(form),
            "chosen" if form.bits == layer.bits else "" if layer.bits or number else "full",
        ]
        for number, form in enumerate(forms)
    ]


def _closeness(form: QuantizedAttention) -> list[str]:
    mean = form.closeness.mean
    return [
        f"{mean.cosine:.5f}", f"{mean.relative_l1:.4f}", f"{mean.rmse:.2e}",
        f"{form.closeness.score:.4f}",
    ]  # fmt: skip


def _kld(form: QuantizedAttention) -> str:
    assert form.kld is not None
    error = form.kld.standard_error
    return f"{form.kld.value:.2e}" + ("" if error is None else f" ± {error:.0e}")
