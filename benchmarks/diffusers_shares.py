"""Which share of the parameters of some models of diffusers can be packed, and which are convolutions.

    python benchmarks/diffusers_shares.py

The models have their published shapes and are built on the meta device, without weights: no network, no GPU.
Needs diffusers and accelerate. "can be packed" counts what `compressible` finds; convolutions stay dense.
"""

from __future__ import annotations

from collections.abc import Callable

import diffusers
import torch
from accelerate import init_empty_weights
from torch import nn
from torch.nn.modules.conv import _ConvNd

from neuzip.runtime.residency import compressible

XL = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
}
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "FLUX.1 [dev], transformer": lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True),
    "Qwen-Image, transformer": diffusers.QwenImageTransformer2DModel,
    "Wan 2.1 14B, transformer": diffusers.WanTransformer3DModel,
    "Stable Diffusion XL, UNet": lambda: diffusers.UNet2DConditionModel(**XL),
    "Stable Diffusion 1.5, UNet": lambda: diffusers.UNet2DConditionModel(cross_attention_dim=768),
    "Stable Diffusion, VAE": lambda: diffusers.AutoencoderKL(**VAE),
}


def shares(model: nn.Module) -> tuple[int, float, float]:
    """Parameters, the share that can be packed, and the share in convolutions."""
    total = sum(p.numel() for p in model.parameters())
    packed = sum(model.get_parameter(name).numel() for name in compressible(model, torch.bfloat16))
    convolved = sum(m.weight.numel() for m in model.modules() if isinstance(m, _ConvNd))
    return total, packed / total, convolved / total


def main() -> None:
    print(f"diffusers {diffusers.__version__}\n")
    print("| model | parameters | can be packed | convolutions |")
    print("|---|---|---|---|")
    for name, make in MODELS.items():
        with init_empty_weights():
            total, packed, convolved = shares(make())
        print(f"| {name} | {total / 1e9:.2f} G | {packed:.1%} | {convolved:.1%} |")


if __name__ == "__main__":
    main()
