"""What `import torch` calls where neuzip is installed, so that transformers loads compressed folders.

torch loads the entry points "torch.backends" when it has been imported, and cannot be imported if one of them
fails. So this is a module of its own, which needs nothing and lets nothing through. It imports neuzip, which
costs about a millisecond, as that waits for transformers: see neuzip/__init__.py. The environment variable
NEUZIP_AUTOLOAD=0 switches it off, TORCH_DEVICE_BACKEND_AUTOLOAD=0 all entry points of this kind.
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Import neuzip, unless that is switched off."""
    if os.environ.get("NEUZIP_AUTOLOAD") == "0":
        return
    try:
        import neuzip

        if neuzip.__file__ is None:  # a folder called neuzip comes before an editable installation
            raise ImportError(f"the folder {next(iter(neuzip.__path__))} hides it")
    except Exception as failure:
        import logging

        logging.getLogger("neuzip").warning(
            "neuzip cannot be imported, so transformers loads no compressed folder: %s", failure
        )
