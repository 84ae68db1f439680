"""The Triton kernels of step."""
