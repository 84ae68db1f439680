"""`python -m neuzip` is `neuzip`."""

from __future__ import annotations

import sys

from neuzip.cli import run

if __name__ == "__main__":
    sys.exit(run())
