"""The options of `neuzip compress` as data, and those that exclude each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.choices import AttentionMode, DeviceName
from neuzip.cli.exclusions import Exclusion

if TYPE_CHECKING:
    from neuzip.compress.request import CompressRequest
    from neuzip.eval.plans.target_values import RequestedTarget

TARGETS = ("--bits", "--max-kld", "--max-ppl-increase", "--target-size")

TORCHRUN = "torchrun"
"""What stands among options for a run in several processes."""

_DOWNLOAD_FIRST = "leave out --stream; the whole checkpoint is then downloaded first"
_PUSH_LATER = "compress first, then: neuzip push DST REPO_ID"
_NOT_FOR_DELTAS = {
    **{option: f"leave out {option}: a delta is always exact" for option in (
        "--mantissa-bits", "--bits-for", "--plan", "--ternary", *TARGETS, "--attention",
    )},
    "--stream": "leave out --stream: a delta needs both checkpoints on disk",
    "--dry-run": "leave out --dry-run: the size of a delta is known only when it is made",
    "--push-to": _PUSH_LATER,
    TORCHRUN: "run it without torchrun",
}  # fmt: skip

_NOT_SHARD_BY_SHARD = (*TARGETS, "--attention", "--no-verify", TORCHRUN)

EXCLUSIONS = (
    *(Exclusion("--stream", option, _DOWNLOAD_FIRST) for option in _NOT_SHARD_BY_SHARD),
    *(Exclusion("--push-to", option, _PUSH_LATER) for option in _NOT_SHARD_BY_SHARD),
    *(Exclusion("--base", option, hint) for option, hint in _NOT_FOR_DELTAS.items()),
)
"""What is looked at in this order, after the conflicts that the library knows."""


@dataclass(frozen=True)
class CompressOptions:
    """What `neuzip compress` was started with: the library's request, and what the command line adds to it.

    goal         the target, if there is one
    text         text to measure on, as it was given; the request has it only beside a target
    drop_layers  a number of layers, "auto" or "none"
    push_to      a repository of the Hub, perhaps with a branch
    """

    src: str
    dst: Path
    request: CompressRequest
    goal: RequestedTarget | None
    text: str | None
    drop_layers: str
    attention: AttentionMode | None
    base: str | None
    stream: bool
    push_to: str | None
    private: bool
    allow_private_files: bool
    dry_run: bool
    verify: bool
    device: DeviceName
    jobs: int | None
    overwrite: bool

    def names(self, *, several_processes: bool) -> set[str]:
        """The options that were given, of those that EXCLUSIONS names."""
        request, goal = self.request, self.goal
        is_given = {
            "--mantissa-bits": request.mantissa_bits is not None,
            "--bits-for": bool(request.bits_for),
            "--plan": request.plan is not None,
            "--ternary": request.ternary,
            "--attention": self.attention is not None,
            "--no-verify": not self.verify,
            "--stream": self.stream,
            "--push-to": self.push_to is not None,
            "--base": self.base is not None,
            "--dry-run": self.dry_run,
            TORCHRUN: several_processes,
        }
        names = {name for name, is_there in is_given.items() if is_there}
        return names if goal is None else names | {f"--{goal.kind}"}
