"""The loss of a linear head without its logits, what else is asked of it, and two heads compared, on one GPU.

    python benchmarks/linear_cross_entropy.py [--sections gemma llama] [--trained NAME=FILE ...] [--rounds 5]

Heads as large as that of Gemma 2 2B and as that of Llama 3 8B, for 8,192 tokens; bf16, hidden states
N(0, 0.5), weights N(0, 0.02), targets at random: made up, with a softmax that is nearly even. `--trained`
takes heads of trained models on a text, from files of trained_head.py. All sides take turns; in its turn each
runs for a quarter of a second (triton.testing.do_bench: CUDA events, the second-level cache overwritten
before each call), so that a card that slows down does so by what this side takes of its power. Times are
medians of medians.
Memory is the peak of torch's allocator beside inputs, results and gradients.

Checked first, or the run ends: losses against fp64 logits, no further off than torch's plus 1e-5; divergence
within 1e-6 and 1e-5 of itself, as sums of 2,304 products in fp32 are not better; gradients against fp64, of
our exact form no further off than torch's, of our filtered one by no more than 1 % of their norm, or no
further than those of cut-cross-entropy, if that is here. The errors of all are in the results.

How long a filtered backward pass takes depends on the data: `kept_tiles` is the share of tiles of 128 tokens
and 128 columns in which some |softmax - onehot| reaches 2^-12, in the vocabulary's order and sorted. With
made-up logits hardly any tile but those of the targets is kept, with a trained head nearly all can be.

The peers are torch, torch.compile, cut-cross-entropy and liger-kernel, where they are installed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from record import Environment, Measurement, save_sections, spread
from triton.testing import do_bench

from neuzip import load_file
from neuzip.kernels.linear_cross_entropy import (
    Head,
    divergence,
    linear_cross_entropy,
    token_statistics,
)  # fmt: skip
from neuzip.kernels.linear_cross_entropy.triton.candidates import COLUMNS, candidates
from neuzip.kernels.linear_cross_entropy.triton.vocabulary import mean_logit_order

Tensor = torch.Tensor
Row = dict[str, Any]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

TOKENS = 8192
SAMPLE = 64
"""Tokens, and entries of the vocabulary, whose results are compared with fp64."""

MATMUL = 790e12
"""FLOP/s of a large bf16 product with random numbers on an H200."""

LARGE, SMALL = 64_000_000, 1_000_000
"""Bytes of memory that the forward pass is given."""

DIVERGENCE_AIM = (2.2, 2.0)
"""Must and stretch, times the forward pass."""

BACKWARD_MB = 70.0
"""What both passes may take beside inputs and gradients."""


@dataclass(frozen=True)
class Shape:
    """A vocabulary and a width, and what is asked for: milliseconds, must and stretch."""

    vocabulary: int
    width: int
    forward: tuple[float, float] | None
    both: tuple[float, float] | None
    tokens: int = TOKENS

    @property
    def flop(self) -> int:
        """Of the logits."""
        return 2 * self.tokens * self.vocabulary * self.width


SHAPES = {
    "gemma": Shape(256_000, 2304, (14.2, 13.2), (43.0, 36.0)),
    "llama": Shape(128_256, 4096, (13.24, 11.95), None),  # 650 and 720 TFLOP/s
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One side of one row of the table."""

    row: str
    by: str
    run: Callable[[], object]


def main() -> None:
    """Measure, print the table, save it: each section takes its own place in the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--trained", nargs="+", default=[], metavar="NAME=FILE", help="of trained_head.py")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    packages = ("neuzip-toolkit", "torch", "triton", "cut-cross-entropy", "liger-kernel")
    environment = Environment.here(*packages, gpu=True, needs_commit=True)
    for name in arguments.sections:
        keep(name, environment, made_up(SHAPES[name], arguments.rounds))
    for name, _, file in (given.partition("=") for given in arguments.trained):
        keep(name, environment, trained(file, arguments.rounds))


def keep(name: str, environment: Environment, section: Row) -> None:
    """Save a section."""
    measurement = Measurement(environment, section.pop("results"), section)
    print(f"saved {save_sections('linear_cross_entropy', __doc__.splitlines()[0], {name: measurement})}")


def made_up(shape: Shape, rounds: int) -> Row:
    """All rows of a shape, with numbers at random."""
    torch.manual_seed(0)
    hidden, other = ((torch.randn(TOKENS, shape.width, device="cuda") * 0.5).bfloat16() for _ in range(2))
    weight = (torch.randn(shape.vocabulary, shape.width, device="cuda") * 0.02).bfloat16()
    target = torch.randint(shape.vocabulary, (TOKENS,), device="cuda")
    more = list(divergence_cases(hidden, other, weight, target))
    return section(shape, rounds, hidden, weight, target, more, backward=shape.both is not None)


def trained(file: str, rounds: int) -> Row:
    """Losses and gradients of a trained head on a text."""
    found = load_file(file, device="cuda")
    hidden, weight, target = found["hidden"], found["weight"], found["target"]
    shape = Shape(weight.shape[0], weight.shape[1], None, None, hidden.shape[0])
    return {"trained": True, **section(shape, rounds, hidden, weight, target, [], backward=True)}


def section(
    shape: Shape, rounds: int, hidden: Tensor, weight: Tensor, target: Tensor, more: list[Case], *,
    backward: bool,
) -> Row:  # fmt: skip
    """All rows of a head, with `more` between forward and backward."""
    kept = {
        "vocabulary": kept_tiles(hidden, weight, target),
        "sorted": kept_tiles(hidden, weight, target, True),
    }
    print(
        f"tiles kept by the filter: {kept['vocabulary']:.1%}, with the vocabulary sorted {kept['sorted']:.1%}"
    )
    exact = Exact(hidden, weight, target)
    cases = [*forward_cases(hidden, weight, target, exact), *more]
    if backward:
        cases += backward_cases(hidden, weight, target, exact)
    gradient_errors = exact.gradient_errors
    del exact
    product = Case("product alone", "cuBLAS", chunked_product(hidden, weight))
    results = measure([product, *cases], rounds, shape)
    forward = next(r["ms"] for r in results if (r["row"], r["by"]) == ("forward", "neuzip"))
    aims: dict[tuple[str, str], Row] = {("forward", "neuzip, 1 MB"): {"must_mb": SMALL / 1e6}}
    if shape.forward is not None:
        aims["forward", "neuzip"] = aim(shape.forward, LARGE / 1e6)
        aims["divergence", "neuzip"] = aim(tuple(forward * times for times in DIVERGENCE_AIM))
    if shape.both is not None:
        aims["forward and backward", "neuzip"] = aim(shape.both, BACKWARD_MB)
    for row in results:
        row.update(aims.get((row["row"], row["by"]), {}))
        for key in ("ms", "mb"):
            if row.get(f"must_{key}", row[key]) < row[key]:
                print(f"{row['row']}, {row['by']}: {row[key]:.2f} {key}, MISSED: {row[f'must_{key}']:.2f}")
    return {
        "tokens": shape.tokens, "vocabulary": shape.vocabulary, "width": shape.width, "rounds": rounds,
        "kept_tiles": kept, "gradient_errors": gradient_errors, "results": results,
    }  # fmt: skip


def aim(ms: tuple[float, ...], mb: float | None = None) -> Row:
    """What is asked for: must and stretch."""
    return {"must_ms": ms[0], "stretch_ms": ms[1], **({} if mb is None else {"must_mb": mb})}


def kept_tiles(hidden: Tensor, weight: Tensor, target: Tensor, in_order: bool = False) -> float:
    """The share of tiles that the filter keeps by default, with the vocabulary `in_order` of mean logits."""
    position = target
    if in_order:
        order = mean_logit_order(hidden, weight, None)
        weight, position = weight[order], order.argsort()[target]
    parts = [_sums(hidden @ part.T) for part in weight.split(COLUMNS)]
    lse = torch.stack([sums for sums, _ in parts]).logsumexp(0)
    maxima = torch.stack([largest for _, largest in parts])
    eps = torch.finfo(weight.dtype).eps / 32
    return float(candidates(maxima, COLUMNS, lse, position.int(), weight.shape[0], eps).float().mean())


def _sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and largest logit of each token, fp32 [N]."""
    logits = logits.float()
    return logits.logsumexp(1), logits.amax(1)


def chunked_product(hidden: Tensor, weight: Tensor) -> Callable[[], object]:
    """All logits, some at a time, thrown away: what the arithmetic alone takes."""
    size = 32_768
    out = torch.empty(hidden.shape[0], size, device="cuda", dtype=hidden.dtype)

    def run() -> None:
        for start in range(0, weight.shape[0], size):
            part = weight[start : start + size]
            torch.mm(hidden, part.T, out=out[:, : part.shape[0]])

    return run


# Who computes


def losses() -> Iterator[tuple[str, Loss]]:
    """Mean losses with gradients, by all who are here."""
    yield "torch", plain
    yield "torch.compile", torch.compile(plain)
    if installed("cut-cross-entropy"):
        from cut_cross_entropy import linear_cross_entropy as cce

        yield "cut-cross-entropy", lambda h, w, t: cce(h, w, t)
    if installed("liger-kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        yield "liger-kernel", lambda h, w, t: liger(h, w, t)


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss with all logits in memory."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def installed(package: str) -> bool:
    """Whether a peer is here; if not, that is said."""
    try:
        version(package)
    except PackageNotFoundError:
        print(f"{package} is not installed: left out")
        return False
    return True


def forward_cases(hidden: Tensor, weight: Tensor, target: Tensor, exact: Exact) -> Iterator[Case]:
    """Losses, and all statistics."""
    for by, loss in losses():
        with torch.no_grad():
            exact.check_mean(by, loss(hidden, weight, target))
        yield Case("forward", by, lambda f=loss: f(hidden, weight, target))  # type: ignore[misc]
    for by, workspace in (("neuzip", LARGE), ("neuzip, 1 MB", SMALL)):

        def run(size: int = workspace, how: str = "mean") -> Tensor:
            found: Tensor = linear_cross_entropy(hidden, weight, target, workspace=size, reduction=how)  # type: ignore[assignment]
            return found

        exact.check_losses(by, run(how="none"))
        yield Case("forward", by, run)
    head = Head(hidden, weight)
    exact.check_losses("statistics", token_statistics(head, target).nll)
    yield Case("forward with argmax, entropy, rank", "neuzip", lambda: token_statistics(head, target))


def divergence_cases(hidden: Tensor, other: Tensor, weight: Tensor, target: Tensor) -> Iterator[Case]:
    """Two heads whose hidden states differ a little, and by much."""
    base = Head(hidden, weight)
    near = Head((hidden.float() + 0.01 * other.float()).bfloat16(), weight)
    for second in (near, Head(other, weight), base):
        found = divergence(base, second, target).kld[:SAMPLE].double()
        right = exact_divergence(base, second)
        off = (found - right).abs()
        print(f"divergence {float(found.mean()):.3e}, error {float(off.max()):.1e}")
        if not (off <= 1e-6 + 1e-5 * right).all() or (second is base and found.any()):
            raise SystemExit(f"divergence is off by {float(off.max()):.2e}: not timed")
    yield Case("divergence", "neuzip", lambda: divergence(base, near, target))
    yield Case("divergence, top 10", "neuzip", lambda: divergence(base, near, target, top_k=10))


def exact_divergence(base: Head, other: Head) -> Tensor:
    """In fp64, of the first tokens."""
    p, q = (
        torch.log_softmax(head.hidden[:SAMPLE].double() @ head.weight.double().T, 1)  # type: ignore[union-attr]
        for head in (base, other)
    )
    return (p.exp() * (p - q)).sum(1)


def backward_cases(hidden: Tensor, weight: Tensor, target: Tensor, exact: Exact) -> Iterator[Case]:
    """Losses and their gradients."""
    ours = {
        "neuzip": {}, "neuzip, vocabulary sorted": {"sort_vocabulary": True},
        "neuzip, exact": {"filter_eps": None},
    }  # fmt: skip
    sides = [
        *losses(),
        *(
            (by, lambda h, w, t, o=options: linear_cross_entropy(h, w, t, **o))
            for by, options in ours.items()
        ),
    ]
    for by, loss in sides:
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()

        def run(f: Loss = loss, h: Tensor = h, w: Tensor = w) -> None:
            h.grad = w.grad = None
            f(h, w, target).backward()

        run()
        assert h.grad is not None and w.grad is not None
        exact.check_gradients(by, h.grad, w.grad)
        h.grad = w.grad = None
        yield Case("forward and backward", by, run)


# What is right


class Exact:
    """Losses and gradients in fp64, of some tokens and of some entries of the vocabulary."""

    def __init__(self, hidden: Tensor, weight: Tensor, target: Tensor) -> None:
        some, all_of = torch.arange(SAMPLE, device="cuda"), weight.double()
        logits = hidden[:SAMPLE].double() @ all_of.T
        lse = logits.logsumexp(1)
        self.losses = lse - logits[some, target[:SAMPLE]]
        with torch.no_grad():
            mine = F.cross_entropy(
                F.linear(hidden[:SAMPLE], weight).float(), target[:SAMPLE], reduction="none"
            )
        self.off = float((mine.double() - self.losses).abs().max())
        p = (logits - lse[:, None]).exp()
        p[some, target[:SAMPLE]] -= 1
        tokens = hidden.shape[0]
        self.hidden_gradients = p @ all_of / tokens
        del logits, p, all_of
        # Entries of the vocabulary: all tokens count, so their log-sum-exp is needed, in fp32.
        single = weight.float()
        everywhere = torch.cat([(rows.float() @ single.T).logsumexp(1) for rows in hidden.split(512)])
        self.entries = target[:SAMPLE].unique()
        q = (hidden.double() @ weight[self.entries].double().T - everywhere[:, None].double()).exp()
        q -= (target[:, None] == self.entries[None, :]).double()
        self.weight_gradients = q.T @ hidden.double() / tokens
        picked = (hidden.float() * weight[target].float()).sum(1)
        self.mean = float((everywhere.double() - picked.double()).mean())
        self.gradient_errors: dict[str, tuple[float, float]] = {}

    def check_losses(self, by: str, losses: Tensor) -> None:
        """Exit if losses are further off than torch's."""
        off = float((losses[:SAMPLE].double() - self.losses).abs().max())
        print(f"{by}: losses off by {off:.1e}, torch's by {self.off:.1e}")
        if not off <= self.off + 1e-5:
            raise SystemExit(f"{by}: losses are off by {off:.2e}: not timed")

    def check_mean(self, by: str, loss: Tensor) -> None:
        """Exit if a peer computes something else."""
        if not abs(float(loss) - self.mean) <= 1e-3 * self.mean:
            raise SystemExit(f"{by}: the loss is {float(loss)}, it should be {self.mean}: not timed")

    def check_gradients(self, by: str, hidden: Tensor, weight: Tensor) -> None:
        """Note errors, relative to the norms, and exit if ours are too large. The peers come first."""
        found = [
            float((mine.double() - exact).norm() / exact.norm())
            for mine, exact in (
                (hidden[:SAMPLE], self.hidden_gradients),
                (weight[self.entries], self.weight_gradients),
            )
        ]
        print(f"{by}: gradients off by {found[0]:.2e} and {found[1]:.2e} of their norms")
        self.gradient_errors[by] = found[0], found[1]
        if by.startswith("neuzip"):
            peer = self.gradient_errors.get("cut-cross-entropy", (0.0, 0.0))
            filtered = tuple(max(error, 0.01) for error in peer)
            allowed = self.gradient_errors["torch"] if "exact" in by else filtered
            if not all(mine <= 1.05 * other for mine, other in zip(found, allowed, strict=True)):
                raise SystemExit(f"{by}: gradients are off by {max(found):.2e}: not timed")


# Measuring


def measure(cases: list[Case], rounds: int, shape: Shape) -> list[Row]:
    """Time and memory of all cases, in turns."""
    memory = [extra_memory(case) for case in cases]
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for case, mine in zip(cases, times, strict=True):
            with torch.set_grad_enabled("backward" in case.row):
                mine.append(do_bench(case.run, warmup=50, rep=200, return_mode="median"))
    rows = []
    for case, mine, extra in zip(cases, times, memory, strict=True):
        ms = statistics.median(mine)
        passes = 2 if "divergence" in case.row else 3 if "backward" in case.row else 1
        rows.append({
            "row": case.row, "by": case.by, **spread(mine, "ms"), "range_ms": [min(mine), max(mine)],
            "mb": extra / 1e6, "tflops": passes * shape.flop / ms / 1e9,
            "share": passes * shape.flop / ms * 1e3 / MATMUL,
        })  # fmt: skip
        rate = rows[-1]["tflops"]
        print(f"{case.row:36} {case.by:26} {ms:8.2f} ms {extra / 1e6:10.1f} MB {rate:6.0f} TFLOP/s")
    return rows


def extra_memory(case: Case) -> int:
    """Bytes beside inputs and results, at the peak."""
    with torch.set_grad_enabled("backward" in case.row):
        case.run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        case.run()
        torch.cuda.synchronize()
    # `before` holds gradients of the run before, which are let go of when this one begins.
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
