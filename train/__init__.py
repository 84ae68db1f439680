"""Models that change: weights that become ternary, training."""
