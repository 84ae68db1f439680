"""Loss and gradients of a head, with ignored tokens dropped first: Table A1 of Cut Cross-Entropy.

    python benchmarks/ignored_tokens.py [--ignored 0.5] [--rounds 5]         # needs a GPU

The result is benchmarks/results/ignored_tokens.json. Shapes, random values, checks, turns and memory are
those of linear_cross_entropy.py with Gemma 2 2B's head; a share of the 8,192 targets, drawn at random, is
ignored. The paper takes tokens of Alpaca, whose prompts and padding are ignored; all methods gain there.

Rows come in pairs: `dropped` false gives a method all tokens with targets of -100. `dropped` true copies the
tokens that count first, in the timed part. neuzip's option `drop_ignored` is that copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from linear_cross_entropy import SHAPES, TOKENS, Case, Exact, Loss, losses, measure
from record import Environment, Measurement, save
from torch import Tensor

from neuzip.kernels.linear_cross_entropy import linear_cross_entropy

IGNORED = -100
BOTH = "forward and backward"

OURS = {
    "neuzip": {}, "neuzip, vocabulary sorted": {"sort_vocabulary": True},
    "neuzip, exact": {"filter_eps": None},
}  # fmt: skip
"""Options of our rows."""


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ignored", type=float, default=0.5, help="share of the tokens")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    packages = ("neuzip-toolkit", "torch", "triton", "cut-cross-entropy", "liger-kernel")
    environment = Environment.here(*packages, gpu=True, needs_commit=True)
    shape = SHAPES["gemma"]
    torch.manual_seed(0)
    hidden = (torch.randn(TOKENS, shape.width, device="cuda") * 0.5).bfloat16()
    weight = (torch.randn(shape.vocabulary, shape.width, device="cuda") * 0.02).bfloat16()
    target = with_ignored(torch.randint(shape.vocabulary, (TOKENS,), device="cuda"), arguments.ignored)
    rows = measure(list(cases(hidden, weight, target)), arguments.rounds, shape)
    for row in rows:
        # Rates are those of all tokens: what is dropped is not multiplied.
        del row["tflops"], row["share"]
        row["by"], _, dropped = row["by"].partition(" | ")
        row["dropped"] = bool(dropped)
    counted = int((target != IGNORED).sum())
    facts = {
        "tokens": TOKENS, "counted": counted, "vocabulary": shape.vocabulary, "width": shape.width,
        "rounds": arguments.rounds,
    }  # fmt: skip
    print(f"saved {save('ignored_tokens', __doc__.splitlines()[0], Measurement(environment, rows, facts))}")


def with_ignored(target: Tensor, share: float) -> Tensor:
    """Targets of which a share, rounded down, is ignored; those are drawn with a fixed seed."""
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0)).to(target.device)
    return target.index_fill(0, order[: int(share * len(target))], IGNORED)


def dropping(loss: Loss) -> Loss:
    """A loss that copies the tokens that count, and is given no others."""

    def run(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        places = (target != IGNORED).nonzero()[:, 0]
        return loss(hidden.index_select(0, places), weight, target.index_select(0, places))

    return run


def methods() -> Iterator[tuple[str, Loss]]:
    """All losses, with all tokens and without those that are ignored; the latter end in " | dropped"."""
    for by, loss in losses():
        yield by, loss
        yield f"{by} | dropped", dropping(loss)
    for by, options in OURS.items():
        for drop in (False, True):

            def ours(h: Tensor, w: Tensor, t: Tensor, drop: bool = drop, options: dict = options) -> Tensor:
                return linear_cross_entropy(h, w, t, drop_ignored=drop, **options)  # type: ignore[return-value]

            yield f"{by} | dropped" if drop else by, ours


def cases(hidden: Tensor, weight: Tensor, target: Tensor) -> Iterator[Case]:
    """Losses and gradients of all methods, checked on the tokens that count."""
    places = (target != IGNORED).nonzero()[:, 0]
    exact = Exact(hidden[places], weight, target[places])
    for by, loss in methods():
        with torch.no_grad():
            exact.check_mean(by, loss(hidden, weight, target))
        yield Case("forward", by, lambda f=loss: f(hidden, weight, target))  # type: ignore[misc]
    for by, loss in methods():
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()

        def run(f: Loss = loss, h: Tensor = h, w: Tensor = w) -> None:
            h.grad = w.grad = None
            f(h, w, target).backward()

        run()
        assert h.grad is not None and w.grad is not None
        if h.grad[target == IGNORED].any():
            raise SystemExit(f"{by}: a token that is ignored has a gradient: not timed")
        exact.check_gradients(by.removesuffix(" | dropped"), h.grad[places], w.grad)
        h.grad = w.grad = None
        yield Case(BOTH, by, run)


if __name__ == "__main__":
    main()
