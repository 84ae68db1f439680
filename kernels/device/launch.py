"""What modules with kernels import first: an error if Triton is too old for them, and the lock for launches.

The code for the CPU does not import it, and needs no Triton.
"""

from __future__ import annotations

import threading

from neuzip.kernels.device.release import require_triton

require_triton()

LAUNCHING = threading.Lock()
"""Triton compiles a kernel when it is first launched: not for two threads at once."""
