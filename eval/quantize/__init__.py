"""Calibrated quantisation: steps, error feedback and integer codes of a model's matrices."""
