"""Measurements as pages, pictures and text."""
