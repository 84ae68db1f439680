"""The names of yardsticks and what they mean: known before torch is imported."""

from __future__ import annotations

from neuzip.errors import UsageError

NAMES = {
    "int8": "8-bit integers, one fp16 scale per row",
    "fp8": "fp8 e4m3, one fp32 scale per tensor",
    "int4g32": "4-bit integers, an fp16 scale and a 4-bit zero point per 32 weights",
    "int4g128": "4-bit integers, an fp16 scale and a 4-bit zero point per 128 weights",
    "nf4": "NF4 of QLoRA, blocks of 64, scales in 8 bits (double quantisation)",
    "mxfp4": "MXFP4: e2m1, a power of two per 32 weights",
    "nvfp4": "NVFP4: e2m1, an e4m3 scale per 16 weights",
    "q4_0": "Q4_0 of GGML",
    "q5_0": "Q5_0 of GGML",
    "q6_k": "Q6_K of GGML",
    "q8_0": "Q8_0 of GGML",
}
"""Each yardstick by its name, in words."""


def parse_yardsticks(text: str) -> list[str]:
    """The yardsticks that --yardsticks asks for, each once. Raises UsageError.

    >>> parse_yardsticks("q8_0, nf4"), parse_yardsticks("none"), len(parse_yardsticks("all"))
    (['q8_0', 'nf4'], [], 11)
    """
    if text.strip() == "all":
        return list(NAMES)
    if text.strip() == "none":
        return []
    names = [part.strip().lower() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in NAMES:
            raise UsageError(
                f"`yardsticks`: there is no yardstick {name!r}",
                f"write all, none, or any of {', '.join(NAMES)}",
            )
    if not names:
        raise UsageError(
            "`yardsticks`: names none", "write all, none, or names such as `yardsticks='q4_0,nf4'`"
        )
    return list(dict.fromkeys(names))
