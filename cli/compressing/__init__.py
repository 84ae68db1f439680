"""The ways in which `neuzip compress` works: to files, to a delta, from and to the Hub, and to a target."""
