"""The launches of a mixture of experts on any NVIDIA GPU, in one place for `steps`."""

from __future__ import annotations

from neuzip.kernels.experts.triton.dense import gradients
from neuzip.kernels.experts.triton.dense import grouped_linear as grouped_dense
from neuzip.kernels.experts.triton.grouped import grouped_linear
from neuzip.kernels.experts.triton.route import route
from neuzip.kernels.experts.triton.rows import apply_gate, weighted_sum

__all__ = ["apply_gate", "gradients", "grouped_dense", "grouped_linear", "route", "weighted_sum"]
