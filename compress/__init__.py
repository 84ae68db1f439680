"""Checkpoint to compressed checkpoint and back: plans, schemes and the streaming pipeline."""

from __future__ import annotations

from .checkpoint_job import compress
from .plan import Plan, make_plan
from .reports import CompressionReport
from .restore import decompress
from .rules import Rule
from .scheme import Scheme
from .verify import verify

__all__ = ["CompressionReport", "Plan", "Rule", "Scheme", "compress", "decompress", "make_plan", "verify"]
