"""One file a command. `VERBS` lists them in the order in which `neuzip --help` shows them.

A file has _ where a verb has -. A command's module imports only typer and `neuzip.cli` at its top, and the
library inside its function, so that the help appears at once.
"""

from __future__ import annotations

VERBS: tuple[str, ...] = (
    "compress", "decompress", "apply", "verify", "inspect", "diff", "eval", "sweep", "generate", "bench",
    "ternarize", "recover", "train", "patch-attention", "layers", "experts", "export", "push", "pull",
    "doctor", "env", "demo",
)  # fmt: skip

RESUMABLE = ("compress", "decompress", "apply", "sweep", "recover", "push", "pull")
"""Those that, once interrupted, go on where they stopped."""
