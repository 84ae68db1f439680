"""Measurements: perplexity, histograms, and the demo checkpoint they are shown on."""
