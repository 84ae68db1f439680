"""Settings of a recovery."""

from __future__ import annotations

from dataclasses import dataclass, field

from neuzip.choices import ScaleTraining, WholeGroup
from neuzip.errors import UsageError
from neuzip.runtime.activations import Activations
from neuzip.train.loop import Shape
from neuzip.train.recovery.distill import LossWeights


@dataclass(frozen=True)
class RecoverySettings:
    """The settings of a recovery.

    activations   a mode of `bitlinear`: what inputs are quantised to
    group         what shares a scale where SRC is not ternary yet: "tensor", as in b1.58, or "row"
    sub_norms     an RMSNorm more before o_proj and down_proj (SubLN), see `sub_norms`
    scales        "learned" from those of the conversion, or "absmean" of the latent weights
    lr            of latent weights and of all else, at its peak; `scale_lr` times that of learned log-scales
    lr_warm_up    share of the steps in which the rate rises; then it falls as `shape` says to `least` of it
    strength      share of the steps in which quantisation is warmed up from 0 to 1
    loss          what is learned
    noise         share of the input tokens that are random ones, for teacher and student alike
    clip          largest norm of the gradients of all parameters together
    decay         of matrices, latent ones too
    length, batch tokens of a window, and windows of a step; what the `windows` have
    """

    activations: str = "b1.58"
    group: WholeGroup = "tensor"
    scales: ScaleTraining = "learned"
    sub_norms: bool = False
    lr: float = 3e-4
    scale_lr: float = 1.0
    lr_warm_up: float = 0.02
    shape: Shape = "cosine"
    least: float = 0.02
    strength: float = 0.0
    loss: LossWeights = field(default_factory=LossWeights)
    noise: float = 0.0
    clip: float = 1.0
    decay: float = 0.0
    length: int = 512
    batch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        Activations.of(self.activations)
        for name in ("lr_warm_up", "strength", "noise", "least"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "it is a share, from 0 to 1")
        if min(self.loss.divergence, self.loss.cross_entropy, self.loss.hidden) < 0 or not (
            self.loss.divergence or self.loss.cross_entropy or self.loss.hidden
        ):
            raise UsageError("nothing is to be learned", "give at least one loss a weight above 0")
        if not self.loss.temperature > 0:
            raise UsageError(f"a temperature of {self.loss.temperature}", "give one above 0")
