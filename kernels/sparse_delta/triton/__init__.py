"""The Triton kernels of sparse deltas."""
