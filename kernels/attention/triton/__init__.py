"""The Triton kernels of attention."""
