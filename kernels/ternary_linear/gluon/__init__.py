"""The Gluon kernels of ternary_linear, for Hopper."""
