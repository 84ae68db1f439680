"""The Triton kernels of packed_linear."""
