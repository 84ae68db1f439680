"""Size and perplexity of a checkpoint at every number of mantissa bits, with and without a block normaliser.

    python benchmarks/quality.py NAME CHECKPOINT TEXT [--blocks 512 64] [--max-tokens N]

    python benchmarks/quality.py demo eval/demo/checkpoint demo
    python benchmarks/quality.py wikilm-26m $NEUZIP_DATA/wikilm-26m $NEUZIP_DATA/wikitext-2/wiki.test.raw

The result is benchmarks/results/quality-NAME.json. Perplexities are token-level, in fp32, over windows that
do not overlap.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from environment import describe, save

from neuzip.compress import compress
from neuzip.compress.scheme import rules_of_options
from neuzip.eval.perplexity import evaluate, prepare, read_text


def main() -> None:
    """Compress, evaluate all in one run, print the table, save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--blocks", type=int, nargs="*", default=[512, 64])
    parser.add_argument("--mantissa-bits", type=int, nargs="*", default=[6, 5, 4, 3, 2, 1, 0])
    parser.add_argument("--max-tokens", type=int)
    arguments = parser.parse_args()
    settings: list[tuple[int | None, str]] = [(None, "none")]
    settings += [(k, "none") for k in arguments.mantissa_bits]
    settings += [(k, str(block)) for block in arguments.blocks for k in arguments.mantissa_bits]
    with tempfile.TemporaryDirectory() as folder:
        reports = []
        for k, block in settings:
            rules = rules_of_options(k, block)
            reports.append(compress(arguments.checkpoint, Path(folder) / f"{k}-{block}", rules))
        paths = [arguments.checkpoint, *(report.dst for report in reports)]
        task = prepare(paths, read_text(arguments.text), max_tokens=arguments.max_tokens, dtype="float32")
        evaluation = evaluate(task)
    original, *scores = evaluation.scores
    rows: list[dict[str, object]] = []
    print(f"original: perplexity {original.token_perplexity.value:.3f}")
    for (k, block), report, score in zip(settings, reports, scores, strict=True):
        assert score.difference is not None
        losses = [t.loss for t in report.tensors if t.loss is not None]
        row = {
            "mantissa_bits": "lossless" if k is None else k,
            "block_size": None if block == "none" else int(block),
            "ratio": report.ratio,
            "bits_per_weight": report.bits_per_weight,
            "perplexity": score.token_perplexity.value,
            "perplexity_standard_error": score.token_perplexity.standard_error,
            "nll_difference": score.difference.nll.value,
            "nll_difference_standard_error": score.difference.nll.standard_error,
            "identical": score.difference.identical,
            "max_relative_error": max((loss.max_relative for loss in losses), default=0.0),
        }
        rows.append(row)
        label = f"{row['mantissa_bits']} block {block}"
        print(f"{label:20}{report.ratio:8.2%}{report.bits_per_weight:8.2f}{row['perplexity']:10.3f}")
    path = save(
        f"quality-{arguments.name}",
        {
            "what": "token-level perplexity by mantissa bits and block size",
            "convention": vars(evaluation.convention),
            "original_perplexity": original.token_perplexity.value,
            "environment": describe("neuzip-toolkit", "torch", "transformers"),
            "results": rows,
        },
    )
    print(f"saved {path}")


if __name__ == "__main__":
    main()
