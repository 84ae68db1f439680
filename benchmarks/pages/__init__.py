"""The pages that show results: rendered from benchmarks/results by benchmarks/figures.py."""
