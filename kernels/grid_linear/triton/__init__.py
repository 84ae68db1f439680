"""The Triton kernels of grid_linear."""
