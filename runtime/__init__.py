"""From a checkpoint at rest to a live model."""
