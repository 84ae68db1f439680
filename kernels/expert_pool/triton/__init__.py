"""The Triton kernels of expert_pool."""
