"""Weights of a training that follow one another in other processes: sparse deltas in a chain.

`messages` makes a delta of two states and applies it, `chain` keeps the two ends of a chain, `folder` and
`broadcast` carry deltas from one process to another. formats/SPEC.md, section 16, has the format.
"""
