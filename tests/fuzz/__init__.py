"""Targets that are fuzzed, and what drives them; a package, as benchmarks has a module of this name."""
