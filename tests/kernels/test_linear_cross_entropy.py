"""Statistics and divergences of linear heads, in torch and in Triton, judged by the reference in fp64.

With a CUDA device Triton's kernels run there. Without one its interpreter runs them, on CPU tensors.

`ROUNDING` of the largest logit is some 80 roundings of fp32: a logit is a sum of D products, which everybody
adds up in an order of their own. What plain torch loses with logits in fp32 is allowed on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from tensors import gaussian
from torch import Tensor
from torch.library import opcheck

from neuzip.kernels import linear_cross_entropy as lce
from neuzip.kernels.device.launch import LAUNCHING
from neuzip.kernels.linear_cross_entropy import Divergence, Head, TokenStatistics, cpu, reference, sums
from neuzip.kernels.linear_cross_entropy import ops as torch_ops
from neuzip.kernels.linear_cross_entropy.triton import divergence as triton_divergence
from neuzip.kernels.linear_cross_entropy.triton import forward as triton_forward
from neuzip.kernels.linear_cross_entropy.triton import tiles
from neuzip.kernels.linear_cross_entropy.triton.tiles import tiles_at_once
from neuzip.kernels.packed_linear import ops as packed_linear

IGNORED = -100
ROUNDING = 1e-5
WORKSPACE = 64 << 20
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

pytestmark = pytest.mark.filterwarnings(  # what numpy says of inf - inf, for the interpreter
    "ignore:.*encountered:RuntimeWarning"
)


@pytest.fixture(autouse=True)
def _two_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter programs share work, as they do on a GPU."""
    count = tiles.multiprocessors
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 2 if device.type == "cpu" else count(device))


def targets(tokens: int, vocabulary: int, seed: int = 3) -> Tensor:
    """One in five is ignored."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    return torch.where(torch.rand(tokens, generator=generator) < 0.2, IGNORED, target)


def made(
    tokens: int, vocabulary: int, d: int, dtype: torch.dtype = torch.float32, seed: int = 0, **more: object
) -> Head:
    """A head whose logits have a standard deviation of about 3; `bias` True has one too."""
    hidden, weight = (
        gaussian(tokens, d, seed=seed).to(dtype),
        (gaussian(vocabulary, d, seed=seed + 1) * 3 * d**-0.5).to(dtype),
    )
    if more.pop("bias", False):
        more["bias"] = gaussian(vocabulary, seed=seed + 2).to(dtype)
    return Head(hidden, weight, **more)  # type: ignore[arg-type]


def moved(head: Head, device: torch.device) -> Head:
    def to(one):  # type: ignore[no-untyped-def]
        return one.to(device) if isinstance(one, Tensor) else one

    return replace(head, hidden=to(head.hidden), weight=to(head.weight), bias=to(head.bias))


def on_host(result):  # type: ignore[no-untyped-def]
    """The same dataclass with arrays on the CPU."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    return type(result)(
        **{
            name: one.cpu() if isinstance(one, Tensor) else one and on_host(one)
            for name, one in values.items()
        }
    )


Statistics = Callable[..., TokenStatistics]
Diverge = Callable[..., Divergence]


@pytest.fixture(params=["torch", "triton"])
def statistics(request: pytest.FixtureRequest, device: torch.device) -> Statistics:
    """token_statistics by either implementation; results on the CPU."""

    def by_torch(head: Head, target: Tensor, workspace: int = WORKSPACE) -> TokenStatistics:
        return cpu.token_statistics(head, target, IGNORED)

    def by_triton(head: Head, target: Tensor, workspace: int = WORKSPACE) -> TokenStatistics:
        return on_host(
            triton_forward.token_statistics(moved(head, device), target.to(device), IGNORED, workspace)
        )

    return by_torch if request.param == "torch" else by_triton


@pytest.fixture(params=["torch", "triton"])
def diverge(request: pytest.FixtureRequest, device: torch.device) -> Diverge:
    """divergence by either implementation; results on the CPU."""

    def by_torch(base: Head, other: Head, target: Tensor, top_k=None, workspace=WORKSPACE) -> Divergence:  # type: ignore[no-untyped-def]
        return cpu.divergence(base, other, target, IGNORED, top_k)

    def by_triton(base: Head, other: Head, target: Tensor, top_k=None, workspace=WORKSPACE) -> Divergence:  # type: ignore[no-untyped-def]
        return on_host(
            triton_divergence.divergence(
                moved(base, device), moved(other, device), target.to(device), IGNORED, top_k, workspace
            )
        )

    return by_torch if request.param == "torch" else by_triton


def plain_logits(head: Head) -> Tensor:
    """All logits as torch computes them in fp32."""
    z = head.hidden.float() @ head.weight.float().T
    z = (z if head.bias is None else z + head.bias.float()) * head.scale
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def plain(head: Head, target: Tensor) -> TokenStatistics:
    """What torch says with all logits in fp32."""
    z = plain_logits(head)
    log_p = z.log_softmax(1)
    logit = z.gather(1, target.clamp(min=0)[:, None])[:, 0]
    return TokenStatistics(z.logsumexp(1), logit, z.argmax(1), -(log_p.exp() * log_p).sum(1), target)


def assert_statistics(found: TokenStatistics, head: Head, target: Tensor) -> None:
    """Numbers within the rounding of the reference's, and places that rounding can explain."""
    z, wanted, torchs = reference.logits(head), reference.token_statistics(head, target), plain(head, target)
    if not head.tokens:
        assert all(getattr(found, field.name).shape == (0,) for field in fields(found))
        return
    tolerance = ROUNDING * max(1.0, z.abs().max().item())
    counted = target != IGNORED
    for name, mask in (("lse", counted | True), ("entropy", counted | True), ("target_logit", counted)):
        mine, exact, theirs = (getattr(one, name)[mask].double() for one in (found, wanted, torchs))
        assert getattr(found, name).dtype == torch.float32
        assert ((mine - exact).abs() <= (theirs - exact).abs() + tolerance).all(), name
    assert found.target_logit[~counted].isnan().all()
    assert found.nll[~counted].isnan().all()
    top = z.gather(1, found.argmax[:, None])[:, 0]
    assert (top >= z.amax(1) - tolerance).all()
    logit = wanted.target_logit[:, None]
    fewest, most = ((z > logit + off).sum(1) for off in (tolerance, -tolerance))
    assert ((found.rank >= fewest) & (found.rank <= most))[counted].all()
    assert (found.rank[~counted] == -1).all()
    assert found.argmax.dtype == found.rank.dtype == torch.int64


def assert_same(one, other) -> None:  # type: ignore[no-untyped-def]
    """Bit for bit."""
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, Tensor):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field.name
        elif a is not None:
            assert_same(a, b)


SHAPES = [
    (256, 512, 128),
    (252, 507, 128),
    (252, 507, 123),
    (1, 1, 1),
    (3, 1000, 64),
    (70, 300, 8),
    (0, 9, 8),
]
FORMS: list[dict[str, object]] = [
    {}, {"softcap": 20.0}, {"bias": True}, {"softcap": 5.0, "bias": True, "scale": 0.3}, {"scale": -2.0}
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=["plain", "softcap", "bias", "all", "scale"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_for_all_forms(shape: tuple[int, int, int], dtype: torch.dtype, form, monkeypatch):
    monkeypatch.setattr(cpu, "ROWS", 100)
    monkeypatch.setattr(cpu, "COLUMNS", 200)
    head, target = made(*shape, dtype, **form), targets(*shape[:2])
    assert_statistics(cpu.token_statistics(head, target, IGNORED), head, target)


@pytest.mark.parametrize(
    ("shape", "dtype", "form"),
    [
        ((256, 512, 128), torch.bfloat16, {}),
        ((252, 507, 128), torch.float16, {"softcap": 20.0}),
        ((252, 507, 123), torch.bfloat16, {"softcap": 5.0, "bias": True, "scale": 0.3}),
        ((252, 507, 123), torch.float32, {"bias": True}),
        ((90, 300, 72), torch.bfloat16, {"scale": -2.0}),
        ((3, 1000, 64), torch.float32, {"softcap": 20.0}),
        ((1, 1, 1), torch.float16, {}),
        ((70, 300, 8), torch.bfloat16, {"bias": True}),
        ((0, 9, 8), torch.bfloat16, {}),
    ],
    ids=str,
)
def test_triton(shape: tuple[int, int, int], dtype: torch.dtype, form, device: torch.device, poison):
    head, target = made(*shape, dtype, **form), targets(*shape[:2])
    found = triton_forward.token_statistics(moved(head, device), target.to(device), IGNORED, WORKSPACE)
    assert_statistics(on_host(found), head, target)


@pytest.mark.parametrize("workspace", [1 << 20, 1])
def test_little_workspace(workspace: int, device: torch.device, poison):
    """Chunks of the vocabulary that end within a tile or with one."""
    for vocabulary in (512, 777):
        head, target = made(70, vocabulary, 32, torch.bfloat16), targets(70, vocabulary)
        found = triton_forward.token_statistics(moved(head, device), target.to(device), IGNORED, workspace)
        assert_statistics(on_host(found), head, target)


def test_chunks_fill_the_workspace():
    head = made(1, 1000, 8)
    assert tiles_at_once(2000, 500, head, 128, WORKSPACE) == 500
    assert tiles_at_once(2000, 999, head, 128, WORKSPACE) == 667  # thirds, not two and a rest
    assert tiles_at_once(3, 0, head, 128, 1) == 1
    packed = replace(
        made(1, 1000, 32, torch.bfloat16), weight=packed_linear.pack(torch.ones(1000, 32).bfloat16())
    )
    assert tiles_at_once(8, 8, packed, 128, 3 * 128 * 64) == 3


@pytest.mark.parametrize("tile_maxima", [True, False])
def test_the_loss_alone(tile_maxima: bool, device: torch.device, poison):
    head, target = made(130, 700, 40, torch.bfloat16, softcap=9.0), targets(130, 700)
    there = moved(head, device)
    lse, logit, maxima = triton_forward.forward(
        there, target.to(device), ignore_index=IGNORED, workspace=1, tile_maxima=tile_maxima
    )
    all_of_it = on_host(triton_forward.token_statistics(there, target.to(device), IGNORED, WORKSPACE))
    assert_statistics(replace(all_of_it, lse=lse.cpu(), target_logit=logit.cpu()), head, target)
    if not tile_maxima:
        assert maxima is None
        return
    assert maxima is not None
    assert maxima.dtype == torch.bfloat16
    tiles = reference.logits(head).split(triton_forward.tile_columns(there), dim=1)
    exact, found = torch.stack([tile.amax(1) for tile in tiles]), maxima.double().cpu()
    assert found.shape == exact.shape
    slack = 1e-6 * exact.abs().max()
    assert ((found >= exact - slack) & (found <= exact + exact.abs() * 2.0**-7 + slack)).all()


def test_maxima_are_rounded_up(device: torch.device):
    """Both signs: a bf16 below the maximum would let a tile be left out that matters."""
    column = torch.tensor([1 + 2.0**-8, -1 - 2.0**-8, 1.0, -1.0, 2.0**-20, 0.0])
    head = Head(column[:, None].to(device), torch.ones(1, 1, device=device))
    _, _, maxima = triton_forward.forward(
        head,
        torch.zeros(6, dtype=torch.int64, device=device),
        ignore_index=IGNORED,
        workspace=1,
        tile_maxima=True,
    )
    assert maxima is not None
    assert maxima[0].float().tolist() == [1 + 2.0**-7, -1.0, 1.0, -1.0, 2.0**-20, 0.0]


def test_ties_go_to_the_first(statistics: Statistics, monkeypatch):
    """Small integers, whose products are exact: equal logits in one tile, in two, and in two chunks."""
    monkeypatch.setattr(cpu, "COLUMNS", 100)
    weight = torch.zeros(400, 8)
    weight[[5, 6, 150, 390], 0] = 2
    weight[[130, 131, 399], 1] = 3
    hidden = torch.zeros(4, 8)
    hidden[0, 0] = hidden[1, 1] = hidden[2, 0] = hidden[2, 1] = 1
    target = torch.tensor([150, 5, 390, 7])
    for dtype in (torch.bfloat16, torch.float32):
        found = statistics(Head(hidden.to(dtype), weight.to(dtype)), target, 1)
        assert found.argmax.tolist() == [5, 130, 130, 0]
        assert found.rank.tolist() == [0, 3, 3, 0]


def test_targets_that_are_the_top_have_rank_0(statistics: Statistics):
    head = made(200, 600, 64, torch.bfloat16)
    top = statistics(head, targets(200, 600)).argmax
    found = statistics(head, top)
    assert (found.rank == 0).all()
    assert (found.nll > -1e-5).all()


def test_certain_tokens(statistics: Statistics):
    """Logits of 10,000 and minus 10,000: probabilities of 1 and 0, without an overflow."""
    head = Head(torch.tensor([[1.0], [-1.0], [1.0]]), torch.tensor([[1e4], [-1e4], [0.0]]))
    found = statistics(head, torch.tensor([0, 1, 1]))
    assert found.lse.tolist() == [1e4, 1e4, 1e4]
    assert found.nll.tolist() == [0.0, 0.0, 2e4]
    assert found.entropy.tolist() == [0.0, 0.0, 0.0]
    assert found.rank.tolist() == [0, 0, 2]
    assert found.argmax.tolist() == [0, 1, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_undefined_logits_show(value: float, statistics: Statistics):
    """In their row, and only there."""
    head, target = made(40, 300, 32), torch.arange(40)
    clean = statistics(head, target)
    head.hidden[7, 3] = value
    found = statistics(head, target)
    assert found.lse[7].isnan()
    assert found.entropy[7].isnan()
    assert found.nll[7].isnan()
    assert found.argmax[7] == found.rank[7] == -1
    others = torch.arange(40) != 7
    for field in fields(found):
        assert torch.equal(getattr(found, field.name)[others], getattr(clean, field.name)[others])


def test_impossible_tokens(statistics: Statistics, monkeypatch):
    """A bias of minus infinity takes tokens out, whole tiles of them; if it takes all, nothing is defined."""
    monkeypatch.setattr(cpu, "COLUMNS", 64)
    head, target = made(20, 600, 16, bias=True), torch.arange(20)
    assert head.bias is not None
    head.bias[100:420] = -torch.inf
    head.bias[15:] = -torch.inf
    wanted, found = reference.token_statistics(head, target), statistics(head, target, 1)
    for name in ("lse", "entropy", "target_logit"):
        assert torch.allclose(getattr(found, name).double(), getattr(wanted, name), atol=1e-5), name
    assert torch.equal(found.argmax, wanted.argmax)
    assert torch.equal(found.rank, wanted.rank)
    assert (found.nll[15:] == torch.inf).all()
    head.bias.fill_(-torch.inf)
    found = statistics(head, target, 1)
    assert found.lse.isnan().all()
    assert found.entropy.isnan().all()
    assert (found.argmax == -1).all()


def test_other_rows_change_nothing(statistics: Statistics):
    """Not even how many there are, as long as the tiles are the same."""
    head, target = made(300, 400, 48, torch.bfloat16), targets(300, 400)
    assert_same(statistics(head, target), statistics(head, target))


def test_any_strides(statistics: Statistics):
    wide, tall = gaussian(60, 200, seed=0).bfloat16(), gaussian(96, 500, seed=1).bfloat16()
    bias = gaussian(500, 2, seed=2)
    cases = [
        (wide[:, ::2][:, :96], tall.T, None),  # every other column; columns apart
        (wide[::2, 8:104], tall.T.contiguous(), bias[:, 1]),  # aligned, rows apart
        (wide[:, 3:99], torch.cat([tall.T, tall.T], 1)[:, :96], bias[:, 0]),  # 6 bytes into a row
        (wide[:1, :96].expand(60, 96), tall.T, None),
    ]
    for hidden, weight, one in cases:
        head = Head(hidden, weight, one)
        assert_statistics(statistics(head, targets(head.tokens, 500)), head, targets(head.tokens, 500))


@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64])
def test_on_any_device(target_dtype: torch.dtype, device: torch.device):
    """The public functions, with an ignored index of one's own that is a token."""
    head, target = made(50, 200, 16, torch.bfloat16), targets(50, 200).clamp(min=7).to(target_dtype)
    found = on_host(lce.token_statistics(moved(head, device), target.to(device), ignore_index=7))
    assert_statistics(found, head, torch.where(target == 7, IGNORED, target).long())
    both = lce.divergence(
        moved(head, device), moved(head, device), target.to(device), ignore_index=7, top_k=3
    )
    assert (both.kld == 0).all()
    assert both.overlap is not None
    assert (both.overlap == 3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.slow
def test_packed_weights(dtype: torch.dtype, device: torch.device, monkeypatch):
    """The same bits as with the weights that were packed, in whatever chunks they are decoded."""
    reads = {name: getattr(packed_linear, name) for name in ("decode", "rows")}

    def unlocked(name: str, *arguments: Any, **keywords: Any) -> Tensor:
        assert not LAUNCHING.locked(), "on a GPU they would wait for it for ever"
        return reads[name](*arguments, **keywords)  # type: ignore[no-any-return]

    for name in reads:
        monkeypatch.setattr(packed_linear, name, partial(unlocked, name))
    head, target = moved(made(40, 300, 64, dtype), device), targets(40, 300).to(device)
    packed = replace(head, weight=packed_linear.pack(head.weight))
    assert_same(lce.token_statistics(packed, target), lce.token_statistics(head, target))
    whole, parts = (
        triton_forward.token_statistics(packed, target, IGNORED, workspace)
        for workspace in (WORKSPACE, 1 << 14)
    )
    assert_same(whole, triton_forward.token_statistics(head, target, IGNORED, WORKSPACE))
    assert_statistics(on_host(parts), moved(head, torch.device("cpu")), target.cpu())
    both = triton_divergence.divergence(packed, head, target, IGNORED, 5, 1 << 16)
    assert (both.kld == 0).all()
    assert both.overlap is not None
    assert (both.overlap == 5).all()


# Divergences


def near(head: Head, size: float, seed: int = 9) -> Head:
    """The same head with hidden states that are off by so much of their size."""
    noise = gaussian(*head.hidden.shape, seed=seed) * size
    return replace(head, hidden=(head.hidden.float() + noise).to(head.hidden.dtype))


@pytest.mark.parametrize("size", [1.0, 0.1, 0.01, 1e-3, 1e-4])
def test_divergence(size: float, diverge: Diverge, monkeypatch):
    """Within 1e-6 (of itself, if it is large), and where it is smaller than that, to 1 % and better."""
    monkeypatch.setattr(cpu, "COLUMNS", 150)
    base = made(60, 420, 32, bias=True, softcap=15.0)
    other, target = near(base, size), targets(60, 420)
    wanted = reference.divergence(base, other, target, top_k=7)
    found = diverge(base, other, target, 7, 1 << 16)
    off = (found.kld.double() - wanted.kld).abs()
    assert (off <= 1e-6 * (1 + wanted.kld)).all()
    assert (off <= 1e-2 * wanted.kld + 1e-12).all()
    assert (found.kld >= 0).all()
    assert found.kld.dtype == torch.float32
    assert found.overlap is not None
    assert torch.equal(found.overlap, wanted.overlap)
    assert_statistics(found.base, base, target)
    assert_statistics(found.other, other, target)


@pytest.mark.parametrize("form", FORMS, ids=["plain", "softcap", "bias", "all", "scale"])
def test_equal_heads_do_not_differ(form, diverge: Diverge):
    """Exactly 0, not nearly, with weights elsewhere in memory that have the same bits."""
    base, target = made(50, 300, 64, torch.bfloat16, **form), targets(50, 300)
    memory = torch.empty(300 * 64 + 9, dtype=torch.bfloat16)
    weight = memory[9:].view(300, 64).copy_(base.weight)
    found = diverge(base, replace(base, weight=weight), target, 10)
    assert (found.kld == 0).all()
    assert not found.kld.signbit().any()
    assert (found.overlap == 10).all()
    assert_same(found.base, found.other)


def test_heads_of_other_sizes(diverge: Diverge):
    """Another D, another dtype, another form; one read by descriptors, one by pointers."""
    target = targets(40, 300)
    pairs = [
        (made(40, 300, 64, torch.bfloat16), made(40, 300, 130, torch.bfloat16, seed=5, softcap=8.0)),
        (made(40, 300, 96, torch.float16, bias=True), made(40, 300, 31, torch.float16, seed=5, scale=0.7)),
        (made(40, 300, 32, torch.bfloat16), made(40, 300, 16, torch.float32, seed=5)),
    ]
    for base, other in pairs:
        wanted, found = reference.divergence(base, other, target, top_k=20), diverge(base, other, target, 20)
        assert torch.allclose(found.kld.double(), wanted.kld, atol=3e-6)
        assert torch.equal(found.overlap, wanted.overlap)  # type: ignore[arg-type]
        assert_statistics(found.base, base, target)
        assert_statistics(found.other, other, target)


def test_shifted_logits_do_not_differ(diverge: Diverge):
    """A number that is added to all logits changes no probability, though every u is as large as it."""
    base = made(30, 300, 16, bias=True)
    assert base.bias is not None
    found = diverge(base, replace(base, bias=base.bias + 64.0), targets(30, 300))
    assert (found.kld < 1e-9).all()


def test_support_of_both(diverge: Diverge):
    """A token that the base can give and the other cannot is infinitely bad; the reverse is not."""
    head, target = made(20, 400, 16, bias=True), targets(20, 400)
    assert head.bias is not None
    masked = replace(head, bias=head.bias.clone())
    assert masked.bias is not None
    masked.bias[128:300] = -torch.inf
    assert (diverge(head, masked, target, None, 1).kld == torch.inf).all()
    wanted = reference.divergence(masked, head, target)
    assert torch.allclose(diverge(masked, head, target, None, 1).kld.double(), wanted.kld, atol=1e-6)
    assert (diverge(masked, masked, target, None, 1).kld == 0).all()


def test_certain_tokens_diverge(diverge: Diverge):
    base = Head(torch.tensor([[1.0], [1.0], [0.0]]), torch.tensor([[1e4], [-1e4], [0.0]]))
    other = replace(base, hidden=torch.tensor([[-1.0], [1.0], [1.0]]))
    wanted = reference.divergence(base, other, torch.zeros(3, dtype=torch.int64)).kld
    found = diverge(base, other, torch.zeros(3, dtype=torch.int64)).kld
    assert wanted[0] == 2e4
    assert torch.allclose(found.double(), wanted, rtol=1e-6)


@pytest.mark.parametrize("side", ["base", "other"])
def test_undefined_divergences_show(side: str, diverge: Diverge):
    base, target = made(20, 300, 16), targets(20, 300)
    broken = replace(base, hidden=base.hidden.clone())
    broken.hidden[4, 2] = torch.nan
    found = diverge(*((broken, base) if side == "base" else (base, broken)), target)
    assert found.kld.isnan().tolist() == [row == 4 for row in range(20)]


@pytest.mark.parametrize("top_k", [1, 2, 5, 40])
def test_overlap_with_ties(top_k: int, diverge: Diverge, monkeypatch):
    """Few values, so that many logits are equal: of those the first ones count."""
    monkeypatch.setattr(cpu, "COLUMNS", 64)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-1, 2, (450, 4), generator=generator).float()
    base, other = (
        Head(torch.randint(-1, 2, (30, 4), generator=generator).float(), weight.roll(roll, 0))
        for roll in (0, 130)
    )
    target = targets(30, 450)
    wanted = reference.divergence(base, other, target, top_k=top_k).overlap
    for workspace in (WORKSPACE, 1 << 15):
        assert torch.equal(diverge(base, other, target, top_k, workspace).overlap, wanted)  # type: ignore[arg-type]


def test_top_k_of_more_than_all_tiles(diverge: Diverge):
    base, target = made(5, 150, 8, torch.bfloat16), targets(5, 150)
    found = diverge(base, near(base, 0.5), target, 150)
    assert (found.overlap == 150).all()


def test_divergence_of_nothing(diverge: Diverge):
    found = diverge(made(0, 50, 8), made(0, 50, 8), targets(0, 50), 4)
    assert found.kld.shape == (0,)
    assert found.overlap is not None
    assert found.overlap.shape == (0,)


@pytest.mark.slow
def test_divergence_on_poisoned_memory(device: torch.device, poison):
    base, target = made(70, 300, 40, torch.bfloat16, bias=True), targets(70, 300)
    other = near(base, 0.05)
    found = on_host(
        triton_divergence.divergence(
            moved(base, device), moved(other, device), target.to(device), IGNORED, 3, 1
        )
    )
    wanted = reference.divergence(base, other, target, top_k=3)
    assert torch.allclose(found.kld.double(), wanted.kld, atol=1e-6)
    assert torch.equal(found.overlap, wanted.overlap)
    assert_statistics(found.base, base, target)
    assert_statistics(found.other, other, target)


def test_form_without_cancellation():
    """From sums with rounding errors of fp32, tiny divergences keep their digits; the plain form has none."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(1000, generator=generator, dtype=torch.float64) * 3
    for size in (1e-3, 1e-4, 1e-5):
        u = size * torch.randn(1000, generator=generator, dtype=torch.float64)
        e = (z - z.max()).exp()
        exact = ((e / e.sum()) * (e / e.sum()).log()).sum() - ((e / e.sum()) * (z - u).log_softmax(0)).sum()
        parts = e.sum(), (e * (-u).exp()).sum(), (e * u).sum(), (e * (torch.expm1(-u) + u)).sum()
        rounded = [part.float().double() for part in parts]
        assert abs(sums.kullback_leibler(*rounded) - exact) <= 1e-5 * exact + 1e-15
    cancelled = rounded[2] / rounded[0] + (rounded[1] / rounded[0]).log()
    assert abs(cancelled - exact) > 1e-2 * exact, "then the other form is not needed"


def test_keys_are_in_the_order_of_logits():
    logits = torch.tensor([-torch.inf, -1e30, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.0, torch.inf])
    keys = sums.ranking(logits, torch.arange(10))
    assert keys.argsort(descending=True).tolist() == [9, 7, 8, 6, 4, 5, 3, 2, 1, 0]
    assert sums.column_of(keys).tolist() == list(range(10))
    assert torch.equal(sums.logit_of(keys), logits)
    assert sums.logit_of(torch.tensor([torch.iinfo(torch.int64).min])).isnan()


# Operators and errors


def test_autocast_changes_nothing(device: torch.device):
    """Rounded to bf16, logits would be equal that are not: ranks and entropies would be others."""
    base = moved(made(40, 700, 32), device)
    other = moved(made(40, 700, 32, seed=9), device)
    target = targets(40, 700).to(device)
    found = lce.token_statistics(base, target), lce.divergence(base, other, target, top_k=5)
    with torch.autocast(device.type, torch.bfloat16):
        under = lce.token_statistics(base, target), lce.divergence(base, other, target, top_k=5)
    assert_same(under[0], found[0])
    assert_same(under[1], found[1])


@pytest.mark.slow
def test_operators(device: torch.device):
    """Schemas, shapes and dtypes of the fake kernels, under torch.compile too."""
    head, target = moved(made(6, 40, 16, torch.bfloat16, bias=True, softcap=9.0), device), torch.arange(6)
    packed = replace(head, weight=packed_linear.pack(head.weight))
    for one in (head, packed):
        arguments = torch_ops._arguments(one)
        opcheck(torch_ops._token_statistics, (*arguments, target.to(device), IGNORED, WORKSPACE))
        for top_k in (0, 3):
            opcheck(
                torch_ops._divergence,
                (*arguments, *torch_ops._arguments(head), target.to(device), IGNORED, top_k, WORKSPACE),
            )


def test_compiled(device: torch.device):
    head, target = moved(made(6, 40, 16, torch.bfloat16), device), torch.arange(6, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(hidden: Tensor) -> Tensor:
        return lce.token_statistics(Head(hidden, head.weight), target).nll.mean()

    assert torch.equal(loss(head.hidden), lce.token_statistics(head, target).nll.mean())


def test_errors(device: torch.device):
    head, target = moved(made(4, 30, 8), device), torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(TypeError, match=r"not torch\.float32 and torch\.bfloat16"):
        Head(head.hidden, head.weight.bfloat16())  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        Head(head.hidden.double(), head.weight.double())  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"bias is torch\.float16"):
        replace(head, bias=torch.zeros(30, dtype=torch.float16, device=device))
    with pytest.raises(ValueError, match=r"not \(4, 8\) and \(30, 7\)"):
        Head(head.hidden, head.weight[:, :7])  # type: ignore[index]
    with pytest.raises(ValueError, match=r"bias has shape \(29,\)"):
        replace(head, bias=torch.zeros(29, device=device))
    with pytest.raises(ValueError, match="on meta"):
        Head(head.hidden, torch.empty(30, 8, device="meta"))
    with pytest.raises(ValueError, match="at least one row"):
        Head(head.hidden, head.weight[:0])  # type: ignore[index]
    with pytest.raises(ValueError, match="softcap is 0"):
        replace(head, softcap=0.0)
    with pytest.raises(TypeError, match="targets are int64"):
        lce.token_statistics(head, target.float())
    with pytest.raises(ValueError, match=r"targets are \(3,\)"):
        lce.token_statistics(head, target[:3])
    with pytest.raises(ValueError, match="vocabulary of 30, the other 4 and 31"):
        lce.divergence(head, moved(made(4, 31, 8), device), target)
    with pytest.raises(ValueError, match="top_k is 31, of a vocabulary of 30"):
        lce.divergence(head, head, target, top_k=31)
    empty = torch.empty(4, 8, device="meta")
    with pytest.raises(ValueError, match="not on meta"):
        torch_ops._on_gpu(Head(empty, empty))


@pytest.mark.parametrize("outside", [-1, 30, 1 << 40])
def test_targets_outside_the_vocabulary(outside: int, device: torch.device):
    head, target = made(4, 30, 8), torch.tensor([0, outside, 2, 3])
    with pytest.raises(IndexError, match=f"{outside}.* in a vocabulary of 30"):
        lce.token_statistics(head, target)
    found = on_host(
        triton_forward.token_statistics(moved(head, device), target.to(device), IGNORED, WORKSPACE)
    )
    assert found.rank[1] == -1
    assert_statistics(found, head, torch.tensor([0, IGNORED, 2, 3]))


# On a GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=["plain", "softcap", "bias", "all", "scale"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 5000, 1024), (700, 4000, 2304)], ids=str)
def test_triton_for_all_forms(shape, dtype: torch.dtype, form, device: torch.device):
    head, target = made(*shape, dtype, **form), targets(*shape[:2])
    found = triton_forward.token_statistics(moved(head, device), target.to(device), IGNORED, WORKSPACE)
    assert_statistics(on_host(found), head, target)
    other = near(head, 0.01)
    both = on_host(
        triton_divergence.divergence(
            moved(head, device), moved(other, device), target.to(device), IGNORED, min(5, shape[1]), WORKSPACE
        )
    )
    assert_statistics(both.base, head, target)
    wanted = reference.divergence(head, other, target).kld
    p, q = (plain_logits(moved(one, device)).log_softmax(1).cpu() for one in (head, other))
    torchs = ((p.exp() * (p - q)).sum(1) - wanted).abs().amax(0) if head.tokens else torch.zeros(())
    off = (both.kld - wanted).abs() - 1e-5 * wanted
    assert (off <= torchs + 1e-6).all(), (off.max().item(), torchs.item())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
def test_target_logits_have_the_bits_of_tiles(dtype: torch.dtype, device: torch.device):
    """Same instructions, same order: a token of probability 1 has a loss of 0, not one of rounding."""
    head = moved(made(500, 3000, 1000, dtype), device)
    top = triton_forward.token_statistics(
        head, torch.zeros(500, dtype=torch.int64, device=device), IGNORED, WORKSPACE
    )
    sure = replace(head, hidden=head.hidden * 64)
    found = triton_forward.token_statistics(sure, top.argmax, IGNORED, WORKSPACE)
    assert (found.rank == 0).all()
    assert (found.nll >= 0).all()
    assert (found.nll == 0).any()


@pytest.mark.gpu
@pytest.mark.usefixtures("most_of_a_gpu")
def test_more_than_2_to_the_31_logits(device: torch.device):
    tokens, vocabulary, d = 16384, 150_000, 16
    head = moved(made(tokens, vocabulary, d, torch.bfloat16), device)
    target = targets(tokens, vocabulary).to(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = triton_forward.token_statistics(head, target, IGNORED, WORKSPACE)
    assert torch.cuda.max_memory_allocated() - before < WORKSPACE + 16 * 8 * tokens
    both = triton_divergence.divergence(head, head, target, IGNORED, 10, WORKSPACE)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * WORKSPACE + 80 * 8 * tokens
    assert (both.kld == 0).all()
    rows = torch.tensor([0, 1, 8191, 8192, 16383])
    few = Head(head.hidden[rows], head.weight)
    few_found = TokenStatistics(*(getattr(found, field.name)[rows].cpu() for field in fields(found)))
    assert_statistics(few_found, moved(few, torch.device("cpu")), target[rows].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1], ids=["descriptors", "pointers"])
@pytest.mark.usefixtures("most_of_a_gpu")
def test_weights_beyond_2_to_the_31(offset: int, device: torch.device):
    """Rows 2**17 elements apart: 4.6 GB of memory, of which little is read."""
    memory = torch.empty(17_500, 1 << 17, dtype=torch.bfloat16, device=device)
    weight = memory[:, offset : offset + 64]
    small = made(40, 17_500, 64, torch.bfloat16)
    weight.copy_(small.weight)
    target = targets(40, 17_500)
    head = Head(small.hidden.to(device), weight)
    found = triton_forward.token_statistics(head, target.to(device), IGNORED, WORKSPACE)
    assert_statistics(on_host(found), small, target)
    both = triton_divergence.divergence(head, head, target.to(device), IGNORED, 4, WORKSPACE)
    assert (both.kld == 0).all()
    assert (both.overlap == 4).all()  # type: ignore[union-attr]


@pytest.mark.gpu
def test_cuda_graph(device: torch.device):
    """Nothing waits for the host, so that a graph can be captured and run again on other hidden states."""
    base, target = moved(made(64, 1000, 64, torch.bfloat16), device), targets(64, 1000).to(device)
    other = moved(near(moved(base, torch.device("cpu")), 0.1), device)
    lce.divergence(base, other, target, top_k=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = lce.divergence(base, other, target, top_k=4)
    base.hidden.copy_(gaussian(64, 64, seed=77))
    graph.replay()
    assert_same(found, lce.divergence(base, other, target, top_k=4))


@pytest.mark.gpu
@pytest.mark.parametrize("workspace", [64 << 20, 1 << 20])
def test_memory_stays_within_the_workspace(workspace: int, device: torch.device):
    head = moved(made(2048, 64_000, 128, torch.bfloat16), device)
    target = targets(2048, 64_000).to(device)
    lce.token_statistics(head, target, workspace=workspace)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lce.token_statistics(head, target, workspace=workspace)
    assert torch.cuda.max_memory_allocated() - before <= workspace + 8 * 8 * 2048 + (1 << 16)
