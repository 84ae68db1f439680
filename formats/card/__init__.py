"""The model card of a compressed checkpoint."""
