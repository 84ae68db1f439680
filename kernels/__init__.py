"""Maths on arrays: every operation has a reference to read and a fast form that agrees with it."""
