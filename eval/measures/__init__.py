"""What is measured of a model or of its weights, with standard errors."""
