"""Many schemes and yardsticks on one checkpoint: `neuzip sweep`."""
