"""Bytes: safetensors files, neuzip containers, Hugging Face checkpoints. SPEC.md is the authority."""
