"""The Triton kernels of quantizers."""
