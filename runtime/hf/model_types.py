"""Types of models that transformers does not have."""

NORM_PLACEMENT = "neuzip_norm_placement"
"""The `model_type` of `norm_placement`."""
