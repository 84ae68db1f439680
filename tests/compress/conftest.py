"""The folder that tests of whole checkpoints share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from folders import Save, weights


@pytest.fixture
def checkpoint(tmp_path: Path, save: Save) -> Path:
    """A folder with two shards, an index, a tied tensor in the other shard, integers, and a subfolder."""
    root = tmp_path / "model"
    tied = weights("BF16", 128 * 96, 1)
    save(
        root / "model-00001-of-00002.safetensors",
        {
            "embed.weight": ("BF16", (128, 96), tied),
            "norm.weight": ("BF16", (96,), weights("BF16", 96)),
            "ids": ("I64", (300,), np.arange(300)),
            "empty": ("F32", (0, 4), np.zeros(0, np.uint32)),
        },
        {"format": "pt"},
        padding=3,
    )
    save(
        root / "model-00002-of-00002.safetensors",
        {
            "half.weight": ("F16", (100, 333), weights("F16", 33300)),
            "head.weight": ("BF16", (128, 96), tied),
            "scalar": ("F32", (), np.array([0x7FC00001], np.uint32)),
            "flags": ("BOOL", (7,), np.array([1, 0, 1, 1, 0, 0, 1], np.uint8)),
        },
    )
    weight_map = {
        name: f"model-0000{i}-of-00002.safetensors"
        for i, names in enumerate(
            (
                ["embed.weight", "norm.weight", "ids", "empty"],
                ["half.weight", "head.weight", "scalar", "flags"],
            ),
            1,
        )
        for name in names
    }
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text('{"model_type":   "llama"}\n')
    (root / "tokenizer.json").write_bytes(b"\x00not json\xff")
    save(root / "vae" / "diffusion.safetensors", {"w": ("F32", (9000,), weights("F32", 9000))})
    (root / "vae" / "config.json").write_text('{"quantization_config": {"quant_method": "other"}}')
    (root / "README.md").write_text("# A model\n")
    return root
