"""Whether the limit of `neuzip compress --max-kld` also holds on texts that the search has not seen.

    python benchmarks/max_kld.py NAME CHECKPOINT TEXT OTHER ... [--max-kld 0.0125] [--tokens 16384]

The search measures on the first part of TEXT and calibrates on another part. The compressed checkpoint is
then measured on the first tokens of each OTHER text. The section of that name in
benchmarks/results/max_kld.json has a row for the search's own measurement, and one for each other text.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from record import Environment, Measurement, save_sections

from neuzip.compress.request import CompressRequest
from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.divergence import Comparison
from neuzip.eval.measures.texts import read_text
from neuzip.eval.plans.deliver import compress_to_target
from neuzip.eval.plans.target_request import prepare_search
from neuzip.eval.plans.target_values import one_goal


def main() -> None:
    """Compress, measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("others", nargs="+", metavar="OTHER")
    parser.add_argument("--max-kld", default="0.0125")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of each OTHER text")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    limit = float(options.max_kld)
    with tempfile.TemporaryDirectory() as folder:
        dst = Path(folder) / "small"
        search = prepare_search(
            one_goal(options.max_kld, None, None, None), options.checkpoint, dst,
            CompressRequest(target="max_kld").to_rules(), scheme="quantized", calibration="auto",
            block_size=None, text=options.text, sensitivity="auto", device=options.device, jobs=None,
            overwrite=False,
        )  # fmt: skip
        result = compress_to_target(search.request, search.text, search.baseline, stage)
        assert search.baseline is not None and result.comparison is not None and result.search is not None
        rows = [row(f"{Path(options.text).name}, as the search measures it", result.comparison, limit)]
        model = search.baseline.model
        for other in options.others:
            baseline = BaselineComparison(
                options.checkpoint, read_text(other), max_tokens=options.tokens, model=model
            )
            rows.append(row(Path(other).name, baseline.run(dst).comparison, limit))
    report = result.report
    bits = 8 * report.stored_weight_bytes / report.weights
    print(f"{bits:.3f} bits a weight, {len(result.search.trials)} trials")
    on_gpu = search.baseline.device.type == "cuda"
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=on_gpu)
    facts = {
        "text": Path(options.text).name, "max_kld": limit, "bits": round(bits, 4),
        "trials": len(result.search.trials),
    }  # fmt: skip
    what = "KL divergence of what `neuzip compress --max-kld` delivers, on its own text and on others"
    print(save_sections("max_kld", what, {options.name: Measurement(environment, rows, facts)}))


def row(text: str, comparison: Comparison, limit: float) -> dict[str, Any]:
    """The divergence on a text, beside the limit; printed."""
    kld = comparison.kld.mean
    verdict = "within the limit" if kld.value <= limit else "ABOVE THE LIMIT"
    print(f"{text}: {kld.value:.5f} +- {kld.standard_error or 0:.5f} of {limit:g}: {verdict}", flush=True)
    return {
        "text": text, "tokens": comparison.tokens, "kld": kld.value, "standard_error": kld.standard_error,
        "of_limit": round(kld.value / limit, 4),
    }  # fmt: skip


@contextmanager
def stage(label: str, total: int, unit: str) -> Iterator[Any]:
    """Say what was done, and how long it took."""
    began = time.process_time()
    yield lambda count: None
    print(f"    {label}: {total:,} {unit} in {time.process_time() - began:.1f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
