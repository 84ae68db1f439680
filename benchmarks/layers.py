"""What each layer of a checkpoint is worth, as `neuzip layers --json` says, with the machine and the commit.

    python benchmarks/layers.py NAME CHECKPOINT TEXT [--max-tokens N] [--device D]

    python benchmarks/layers.py wikilm-26m $NEUZIP_DATA/wikilm-26m $NEUZIP_DATA/wikitext-2/wiki.test.raw

The result is benchmarks/results/layers-NAME.json, with its picture in layers-NAME.svg.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from record import ROOT, Environment, Measurement, save
from sweep import stage

from neuzip.cli.document import plain
from neuzip.eval.layers.analyse import analyse
from neuzip.eval.measures.texts import read_text
from neuzip.eval.report import layer_pictures


def main() -> None:
    """Measure, draw, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text")
    parser.add_argument("--max-tokens", type=int, default=65_536)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    found = analyse(
        arguments.checkpoint, read_text(arguments.text), stage, max_tokens=arguments.max_tokens,
        device=arguments.device,
    )  # fmt: skip
    found = replace(found, text=Path(found.text).name)  # the picture has it in its title
    picture = ROOT / "benchmarks" / "results" / f"layers-{arguments.name}.svg"
    layer_pictures.write(found, arguments.name, picture)
    on_gpu = found.device != "cpu"
    environment = Environment.here("neuzip-toolkit", "torch", "transformers", gpu=on_gpu)
    path = save(
        f"layers-{arguments.name}",
        "divergence without each layer, and what others prune by",
        Measurement(environment, facts={"src": arguments.name, **plain(vars(found))}),
    )
    print(f"saved {path} and {picture}")


if __name__ == "__main__":
    main()
