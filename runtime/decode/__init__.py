"""Text from a live model: the loop of decoding steps, sampling, and how fast it is."""
