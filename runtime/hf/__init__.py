"""Live models of transformers: loading, weights, attention, caches."""
