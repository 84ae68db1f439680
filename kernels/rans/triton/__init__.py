"""The Triton kernels of rans."""
