"""What all kernels share: the launch lock, properties of a GPU, fragments for matrix instructions, sums."""
