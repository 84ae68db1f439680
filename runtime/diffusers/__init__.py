"""Connects the core to diffusers, from version 0.39 on: loads and saves compressed models and pipelines."""
