"""Ternary weights for models that were not trained with them, and the training that makes up for the loss."""
