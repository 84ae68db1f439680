"""The Gluon kernels of packed_linear, for Hopper."""
