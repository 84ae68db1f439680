"""What is installed, what works and what does not: the findings of `neuzip doctor`."""
