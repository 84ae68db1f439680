"""Connects the core to diffusers, from version 0.36 on: loads and saves compressed models and pipelines."""
