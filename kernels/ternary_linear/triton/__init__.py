"""The Triton kernels of ternary_linear."""
