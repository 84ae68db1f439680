"""Parameters that take one of a few values: the library validates them, the command line shows them.

A module that imports nothing, so that a help page costs nothing. The order is that of the help pages.
"""

from __future__ import annotations

from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda"]
"""Devices by name; "auto" leaves the choice to neuzip."""

DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"]
"""How accelerate spreads a model over all GPUs."""

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
"""Dtypes that a model computes in; "auto" is that of the checkpoint, or float32 on a CPU."""

Activations = Literal["b1.58", "a4.8", "a4.8-fp4", "none"]
"""Modes of quantising the activations of ternary weights."""

KvForm = Literal["rotated", "a4.8"]
"""How keys and values are quantised: rotated and in groups, or as in BitNet a4.8."""

Attention = Literal["recorded", "none", "8bit", "4bit"]
"""Attention precisions to run a model with; "recorded" is that of its config.json."""

AttentionMode = Literal["auto", "8bit", "4bit"]
"""Attention precisions to choose from, layer by layer."""

TernaryQuantizer = Literal["absmean", "absmean-clamped", "least-squares"]
"""How `compress` rounds weights that are not ternary yet."""

TernaryPacking = Literal["trits", "2bit"]
"""How ternary codes are stored: 5 in a byte, or 4."""

WholeGroup = Literal["tensor", "row"]
"""Weights that share a scale, where their number follows from the shape."""

TargetScheme = Literal["quantized", "rounded"]
"""How weights are stored for a target: as codes on a uniform grid, or with fewer mantissa bits."""

Sensitivity = Literal["auto", "measured", "fisher", "weights"]
"""How the loss due to each tensor is estimated."""

ConversionQuantizer = Literal["error-feedback", "least-squares", "absmean"]
"""How `ternarize` rounds weights."""

ScaleTraining = Literal["learned", "absmean"]
"""What the scales of ternary weights are while a model is trained."""

LayerChoice = Literal["greedy", "block", "angular"]
"""How layers to drop are chosen."""

ExportEngine = Literal["transformers-bitnet", "compressed-tensors", "gguf"]
"""Engines and libraries to export a ternary model for."""

GgufType = Literal["tq1_0", "tq2_0", "q2_0"]
"""Types of ternary weights in a GGUF file."""

LinearClass = Literal["bitlinear", "autobitlinear"]
"""Linear classes of transformers for BitNet."""

BitnetMode = Literal["offline", "online"]
"""Whether BitNet weights of transformers are stored packed, or as floats that it quantises."""

ExportActivations = Literal["b1.58", "none"]
"""Activations of an exported model: of 8 bits, or not quantised."""

SWEEP_SCHEMES = "lossless,k7,k6,k5,k4,k3,k2,k1,k0,bits8,bits7,bits6,bits5,bits4.5,bits4,bits3.5,bits3,bits2.5"
"""The schemes that a sweep measures by default."""
