"""The Triton kernels of kv_cache."""
