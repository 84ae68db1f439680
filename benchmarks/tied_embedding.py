"""What a tied embedding costs when it is rounded as all other matrices are, and what more bits for it buy.

    python benchmarks/tied_embedding.py NAME CHECKPOINT TEXT [--max-tokens N] [--mantissa-bits K ...]

    python benchmarks/tied_embedding.py smollm2-135m smollm2 $NEUZIP_DATA/wikitext-2/wiki.test.raw
    python benchmarks/tied_embedding.py wikilm-26m $NEUZIP_DATA/wikilm-26m \\
        $NEUZIP_DATA/wikitext-2/wiki.test.raw
    python benchmarks/tied_embedding.py demo eval/demo/checkpoint demo

For each number of mantissa bits K the checkpoint is compressed with K bits everywhere and with more for the
embedding; where the output head is a tensor of its own, with more for the head, and for both. Sizes are of
the weight files, and divergences from the original over the same tokens. The section NAME of
benchmarks/results/tied_embedding.json holds them.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path

from record import Environment, Measurement, save_sections

from neuzip.compress import Rule, compress
from neuzip.compress.rules import LOSSLESS, rules_of_options
from neuzip.compress.scheme import Scheme
from neuzip.compress.sources.folder import FolderSource
from neuzip.eval.measures.comparison import BaselineComparison
from neuzip.eval.measures.texts import read_text

WHAT = "divergence and size by the mantissa bits of the embedding, where it is the output head too or is not"
HEAD = "lm_head.weight"
EMBEDDING = "*embed_tokens.weight"


def main() -> None:
    """Compress, compare, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--max-tokens", type=int, default=1536)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--mantissa-bits", type=int, nargs="*", default=[4, 3, 2, 1])
    arguments = parser.parse_args()
    text = read_text(arguments.text)
    text = replace(text, name=Path(text.name).name)  # not where it lies on this machine
    baseline = BaselineComparison(
        arguments.checkpoint, text, window=arguments.window, max_tokens=arguments.max_tokens, device="cpu"
    )
    with FolderSource(arguments.checkpoint) as source:
        numels = {t.name: math.prod(t.info.shape) for t in source.tensors()}
    tied = HEAD not in numels
    parts = {"embedding": [EMBEDDING]}
    if not tied:
        parts |= {"head": [HEAD], "both": [EMBEDDING, HEAD]}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for k in arguments.mantissa_bits:
            asked: list[tuple[str, list[str], int | None]] = [("nothing", [], None)]
            asked += [(part, globs, more) for part, globs in parts.items() for more in (1, 2, None)]
            for part, globs, more in asked:
                if more is not None and k + more >= 7:
                    continue
                finer = LOSSLESS if more is None else Scheme("truncated", k + more)
                rules = [*(Rule(glob, finer) for glob in globs), *rules_of_options(k, "none")]
                report = compress(arguments.checkpoint, Path(folder) / "compressed", rules, overwrite=True)
                found = baseline.run(report.dst).comparison
                rows.append(
                    {
                        "mantissa_bits": k,
                        "more_for": part,
                        "more_bits": None if part == "nothing" else "lossless" if more is None else more,
                        "bits_per_weight": report.bits_per_weight,
                        "ratio": report.ratio,
                        "kld": found.kld.mean.value,
                        "kld_standard_error": found.kld.mean.standard_error,
                        "perplexity_ratio": found.perplexity_ratio.value,
                        "top_1": found.top_1.value,
                    }
                )
                figures = f"{report.bits_per_weight:8.3f}{report.ratio:8.2%}{found.kld.mean.value:10.5f}"
                print(f"{k} {part:10}{rows[-1]['more_bits'] or '':9}{figures}", flush=True)
    share = sum(n for name, n in numels.items() if name.endswith("embed_tokens.weight")) / sum(
        numels.values()
    )
    facts = {
        "tied": tied, "embedding_share": share, "text": text.name, "tokens": baseline.tokens,
        "window": arguments.window,
    }  # fmt: skip
    measurement = Measurement(Environment.here("neuzip-toolkit", "torch", "transformers"), rows, facts)
    print(f"saved {save_sections('tied_embedding', WHAT, {arguments.name: measurement})}")


if __name__ == "__main__":
    main()
