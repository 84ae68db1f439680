"""Where a model can run, and in which residency, as far as that shows before anything is loaded."""

from __future__ import annotations

from neuzip.runtime.requirements import require_device as require_device
