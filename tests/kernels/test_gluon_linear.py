"""Products of many rows with packed weights: on a Hopper GPU, what they are; elsewhere, what is made of them.

Gluon has no interpreter. So without such a GPU the kernel's functions run in gluon_on_a_cpu, and the kernel
is compiled, and its machine code looked at.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import compile_only
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gluon_on_a_cpu import Hang, OnACpu, changed, functions_of

from neuzip.kernels.packed_linear import ExponentWindow
from neuzip.kernels.packed_linear import ops as torch_ops
from neuzip.kernels.packed_linear.gluon import linear as gluon_linear
from neuzip.kernels.packed_linear.gluon import multiply, unpack
from neuzip.kernels.packed_linear.tensor import PackedTensor, format_of
from neuzip.runtime.weights import PackedWeight

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def weights_of(
    out: int, columns: int, dtype: torch.dtype = torch.bfloat16, drop: int = 0, device: str = "cuda"
) -> torch.Tensor:
    weights = torch.randn(out, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    return (weights.to(dtype).view(torch.int16) >> drop << drop).view(dtype).to(device)


def x_of(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


def packed_of(weights: torch.Tensor) -> PackedTensor:
    packed = torch_ops.pack(weights)
    assert packed.turn_index.numel()
    return packed


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def check(
    x: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    packed, wide = packed_of(weights), None if bias is None else bias.double()
    exact = F.linear(x.double(), weights.double(), wide)
    plain = error(F.linear(x, weights, bias), exact)
    for poison in (float("nan"), 6e4):
        torch.full((len(x) + 300, len(weights)), poison, dtype=x.dtype, device=x.device)  # what y is made of
        y = gluon_linear.linear(x, packed, bias)
        assert y.shape == exact.shape and y.dtype == x.dtype
        assert error(y, exact) <= 1.05 * plain


@hopper
@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(
    ("rows", "out", "columns"),
    [
        (1, 8, 128), (2, 128, 1024), (17, 264, 640), (33, 2560, 2560), (65, 128, 128), (65, 1024, 4096),
        (256, 128, 256), (256, 4096, 2048), (257, 136, 384), (300, 1000, 512), (512, 5120, 1280),
        (2048, 4096, 1024), (2100, 2560, 2560),
    ],
)  # fmt: skip
def test_product(dtype: torch.dtype, rows: int, out: int, columns: int):
    check(x_of(rows, columns, dtype), weights_of(out, columns, dtype))


@hopper
@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("drop", range(1, 8))
def test_fewer_bits(dtype: torch.dtype, drop: int):
    check(x_of(130, 512, dtype), weights_of(192, 512, dtype, drop))


@hopper
@pytest.mark.gpu
@dtypes
def test_bias(dtype: torch.dtype):
    check(x_of(300, 512, dtype), weights_of(200, 512, dtype), x_of(1, 200, dtype)[0] * 10)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("deviation", [1e-20, 0.011, 0.03, 5.0])
def test_whatever_the_shift(deviation: float):
    check(x_of(256, 1024), weights_of(256, 1024) * (deviation / 0.02))


@hopper
@pytest.mark.gpu
def test_every_column_meets_its_own_weight():
    """Times the identity, nothing rounds: y is the weights, bit for bit."""
    weights = weights_of(264, 1024)
    weights[:, 77] *= 2.0**-20  # escapes
    weights[5, 128:144] = 0  # several of each of four threads
    x = torch.eye(1024, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(gluon_linear.linear(x, packed_of(weights)), weights.T)


@hopper
@pytest.mark.gpu
def test_infinities_and_nans():
    weights = weights_of(128, 1024)
    weights[3, 7], weights[100, 900], weights[64, 1] = torch.inf, -torch.inf, torch.nan
    x = x_of(256, 1024)
    y, dense = gluon_linear.linear(x, packed_of(weights)), F.linear(x, weights)
    assert torch.equal(y.isnan(), dense.isnan()) and torch.equal(y.isinf(), dense.isinf())
    x[9, 5] = torch.inf  # spoils a row of y, as it does of dense weights
    y, dense = gluon_linear.linear(x, packed_of(weights)), F.linear(x, weights)
    assert torch.equal(y.isnan(), dense.isnan())


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 2048])
def test_the_operator_takes_it_where_it_pays(rows: int):
    weights, x = weights_of(14336, 4096), x_of(rows, 4096)
    packed = packed_of(weights)
    assert gluon_linear.pays(rows, packed)
    assert not gluon_linear.pays(2, packed)
    there = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = torch_ops.linear(x, packed)
    assert torch.cuda.max_memory_allocated() - there < 1.1 * y.nbytes + (16 << 20)  # no dense weights
    assert torch.equal(y, gluon_linear.linear(x, packed))


@hopper
@pytest.mark.gpu
def test_sums_are_added_in_the_same_order_each_time():
    """On several streams at once, and in a graph beside them: counters of one are not those of another."""
    weights, x = weights_of(2560, 2560), x_of(64, 2560)
    packed = packed_of(weights)
    assert gluon_linear.plan(64, 2560, 20, x.device).cut
    expected = gluon_linear.linear(x, packed)
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(4)]
    with torch.cuda.graph(graph):
        captured = [gluon_linear.linear(x, packed) for _ in range(20)]
    torch.cuda.synchronize()
    results = []
    for turn in range(100):
        with torch.cuda.stream(streams[turn % 4]):
            results.append(gluon_linear.linear(x, packed))
        if turn % 10 == 0:
            graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in (*results, *captured))


@hopper
@pytest.mark.gpu
def test_products_of_cut_blocks_in_a_graph_of_torch_compile():
    """torch.compile refuses a graph whose pool holds memory that stays: counters made by a launch would."""
    packed = packed_of(weights_of(2560, 2560))
    batches = [rows for rows in range(65, 513, 32) if gluon_linear.pays(rows, packed)]
    x = x_of(next(r for r in batches if gluon_linear.plan(r, 2560, 20, packed.device).cut), 2560)
    expected = gluon_linear.linear(x, packed)
    arguments = packed.arguments
    compiled = torch.compile(
        lambda x: torch.ops.neuzip.packed_linear(x, None, *arguments), mode="reduce-overhead", fullgraph=True
    )
    with torch.no_grad():
        for _ in range(3):  # a warm-up, a capture and a replay
            assert torch.equal(compiled(x), expected)
    torch._dynamo.reset()


@hopper
@pytest.mark.gpu
def test_x_that_begins_anywhere():
    memory = x_of(1, 256 * 512 + 1).flatten()
    check(memory[1:].view(256, 512), weights_of(128, 512))


@hopper
@pytest.mark.gpu
def test_cuda_graph():
    weights, x = weights_of(512, 1024), x_of(700, 1024)
    packed = packed_of(weights)
    expected = gluon_linear.linear(x, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gluon_linear.linear(x, packed)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, expected)


@pytest.fixture(autouse=True)
def forget_plans():
    """Tests give cards other numbers of multiprocessors."""
    cached = gluon_linear.plan
    cached.cache_clear()
    yield
    cached.cache_clear()


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, programs: int = 1, module: ModuleType = multiply) -> OnACpu:
    kernel = OnACpu(module.many_rows)
    monkeypatch.setattr(gluon_linear, "many_rows", kernel)
    monkeypatch.setattr(gluon_linear, "multiprocessors", lambda device: programs)
    return kernel


def test_sums_are_fp32_whatever_the_default_dtype_is():
    """Loaders of models change the default dtype while a first product may run: it would be kept."""
    gluon_linear.nothing.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        parts, _ = gluon_linear.nothing(torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
        gluon_linear.nothing.cache_clear()
    assert parts.dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 64, 130, 512, 2048])
@pytest.mark.parametrize(("out", "turns"), [(8, 1), (2560, 20), (5120, 40), (14336, 32), (18944, 28)])
@pytest.mark.parametrize("processors", [1, 7, 114, 132])
def test_every_turn_of_every_block_is_one_programs(
    rows: int, out: int, turns: int, processors: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gluon_linear, "multiprocessors", lambda device: processors)
    _, programs, blocks, cut, cutters = gluon_linear.plan(rows, out, turns, torch.device("cpu"))
    assert programs <= processors
    number_of, owners = {}, []
    work = [0] * programs
    for program in range(programs):
        gl = SimpleNamespace(
            program_id=lambda axis, number=program: number, num_programs=lambda axis: programs, minimum=min,
            maximum=max,
        )  # fmt: skip
        own = functions_of(vars(multiply), {"gl": gl}, {})
        sharing = None, None, blocks, cut, cutters, turns
        share = own["_share"](sharing)
        segments = [own["_segment"](number, share, sharing) for number in range(share[4])]
        assert sum(begin > 0 for _, begin, _ in segments) <= 1, "a program has memory for one part"
        for block, begin, stop in segments:
            assert 0 <= begin < stop <= turns
            work[program] += stop - begin
            for turn in range(begin, stop):
                assert (block, turn) not in number_of
                number_of[block, turn] = program
            if begin > 0:
                rank = own["_cutter"]((block - blocks + cut) * turns, sharing)
                owners.append((block, program, programs - 1 - rank))
    for block, program, owner in owners:  # sums go to who has the first turn, and was started later
        assert number_of[block, 0] == owner > program
    assert len(number_of) == blocks * turns
    assert max(work) - min(work) <= turns


def check_patterns(packed: PackedTensor, weights: torch.Tensor) -> None:
    """The weights that products are asked for with, bit for bit, but for the shift."""
    identity = torch.eye(weights.shape[1], dtype=weights.dtype)
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernel = on_a_cpu(monkeypatch)
        y = gluon_linear.linear(identity, packed)
        tile = gluon_linear.plan(len(identity), len(weights), len(identity) // 128, identity.device).tile
    exact = F.linear(identity.double(), weights.double())  # infinities make NaNs of the others in their rows
    assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.nan_to_num(), exact.to(y).nan_to_num())
    assert (multiplied(kernel, *weights.shape, tile) == settled(packed, weights)).all()


def multiplied(kernel: OnACpu, out: int, columns: int, tile: int) -> np.ndarray:
    """The patterns of weights that the two groups multiplied, [out, columns]."""
    parts = torch.stack([torch.stack(kernel.multiplied[group]) for group in "01"]).view(torch.int16)
    rounds = -(-columns // tile)  # of the identity: all have the same weights
    parts = parts.view(2, -1, rounds, columns // 64, 64, 64)
    assert (parts == parts[:, :, :1]).all()
    return parts[:, :, 0].permute(1, 0, 3, 2, 4).reshape(-1, columns)[:out].numpy().view(np.uint16)


def settled(packed: PackedTensor, weights: torch.Tensor) -> np.ndarray:
    """The patterns of weights 2**shift times smaller."""
    bits, fmt = weights.view(torch.int16).numpy().view(np.uint16), format_of(weights.dtype)
    window = ExponentWindow(packed.base, packed.shift, fmt)
    escapes = window.kinds[bits >> fmt.mantissa_bits & (1 << fmt.exponent_bits) - 1] == 0
    return np.where(escapes, window.settled(bits), bits - np.uint16(window.shifted))


@pytest.mark.parametrize(
    ("dtype", "rows", "out", "columns", "programs"),
    [
        (torch.float16, 1, 8, 128, 1),
        (torch.bfloat16, 257, 136, 256, 1),
        (torch.float16, 20, 264, 128, 2),
        (torch.bfloat16, 300, 136, 128, 3),
        (torch.float16, 60, 72, 896, 1),
    ],
)
def test_product_on_a_cpu(
    dtype: torch.dtype, rows: int, out: int, columns: int, programs: int, monkeypatch: pytest.MonkeyPatch
):
    on_a_cpu(monkeypatch, programs)
    x, weights = x_of(rows, columns, dtype, "cpu"), weights_of(out, columns, dtype, 0, "cpu")
    check(x, weights, x_of(1, out, dtype, "cpu")[0] * 10 if out % 16 else None)


@dtypes
@pytest.mark.parametrize("drop", range(1, 8))
def test_fewer_bits_on_a_cpu(dtype: torch.dtype, drop: int):
    weights = weights_of(72, 256, dtype, drop, "cpu")
    packed = packed_of(weights)
    assert packed.low_bits == 8 - drop
    check_patterns(packed, weights)


@pytest.mark.parametrize("deviation", [1e-20, 0.011, 0.03, 5.0])
def test_whatever_the_shift_on_a_cpu(deviation: float, monkeypatch: pytest.MonkeyPatch):
    on_a_cpu(monkeypatch)
    check(x_of(20, 512, device="cpu"), weights_of(64, 512, device="cpu") * (deviation / 0.02))


@dtypes
@pytest.mark.slow
def test_escapes_on_a_cpu(dtype: torch.dtype):
    weights = weights_of(144, 512, dtype, device="cpu")
    weights[0, :16] = 0  # four of each of four threads
    weights[8, 0:128:32] = -0.0  # of the first of them
    weights[17, 128:144] = 0
    weights[40, 300], weights[41, 301], weights[140, 511] = torch.inf, -torch.inf, torch.nan
    check_patterns(packed_of(weights), weights)


@dtypes
def test_escapes_in_any_places_on_a_cpu(dtype: torch.dtype):
    weights, some = weights_of(128, 512, dtype, device="cpu"), np.random.default_rng(0)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 60000.0, -60000.0]
    for row, column in zip(some.integers(0, 128, 90), some.integers(0, 512, 90), strict=True):
        weights[row, column] = special[some.integers(len(special))]
    check_patterns(packed_of(weights), weights)


@dtypes
@pytest.mark.parametrize(("rows", "number"), [(40, 0), (40, 2), (48, 1)])
def test_an_experts_own_rows_on_a_cpu(dtype: torch.dtype, rows: int, number: int):
    """Those of 40 rows share a tile with a neighbour."""
    weights = weights_of(4 * rows, 256, dtype, device="cpu").view(4, rows, 256)
    weights[:, 3, :9] = 0
    weights[:, -1, 250:] = -0.0
    check_patterns(PackedWeight.of(weights).expert(number)._own(), weights[number])


FREE_X, FREE_WORDS = (
    f"mbarrier.arrive({name}, count=1)" for name in ("x_free.index(second)", "words_free.index(stage)")
)
SECOND_HALF = "second = x_number % STAGES"
WRONG = AssertionError
CHANGES = {
    "none": ({}, None),
    "x is never free": ({FREE_X: "pass"}, Hang),
    "words are never free": ({FREE_WORDS: "pass"}, Hang),
    "free in the other phase": ({"& 1) ^ 1)": "& 1))"}, Hang),
    "waits for more bytes": ({"P * _WORD_BYTES": "P * _WORD_BYTES + 4"}, Hang),
    "free for one group": ({"barriers(STAGES, 2)": "barriers(STAGES, 1)"}, Hang),
    "words free too early": ({FREE_WORDS: "pass", SECOND_HALF: f"{FREE_WORDS}; {SECOND_HALF}"}, WRONG),
    "x free too early": ({"warpgroup_mma_init(warpgroup_mma_wait(0, deps=[sums]))": "sums"}, WRONG),
    "x not waited for": ({"mbarrier.wait(x_there.index(second)": "pass; (x_there.index(second)"}, WRONG),
    "y not waited for": ({"tma.store_wait(0)\n    outs": "outs"}, WRONG),
    "y written twice": ({"place[2] + i * 128": "place[2]"}, WRONG),
    "no such tile": ({"minimum(tile, tiles - 1)": "minimum(tile, tiles)"}, WRONG),
    "wrong shift": ({"fars[row], base4": "fars[row] >> 1, base4"}, WRONG),
    "no other escapes": ({"bits, e, 0x8000": "bits, e, 0x4000"}, WRONG),
    "an unknown name": ({"gl.minimum(turn": "gl.median(turn"}, AttributeError),
    "others' sums are not added": ({"range(rank + 1, last + 1, AT": "range(last + 1, last + 1, AT"}, WRONG),
    "others' sums are not waited for": ({"    await_(": "    (lambda *a: 0)("}, WRONG),
    "too few are waited for": ({"last - rank)": "last - rank - 1)"}, Hang),
    "sums are another's": ({"_places(sharing[0] + (2 * rank": "_places(sharing[0] + (2 * rank + 2"}, WRONG),
}  # fmt: skip


def changed_kernel(changes: dict[str, str], folder: Path) -> ModuleType:
    """The kernel's module with another text, which may be that of what it unpacks with."""
    modules = []
    for number, module in enumerate((unpack, multiply)):
        assert module.__file__
        text = Path(module.__file__).read_text(encoding="utf-8")
        (folder / str(number)).mkdir()
        own = {old: new for old, new in changes.items() if old in text}
        modules.append(changed(module, own, folder / str(number)))
    changed_unpack, kernel = modules
    assert all(any(old in Path(m.__file__ or "").read_text() for m in (unpack, multiply)) for old in changes)
    vars(kernel).update(half_bytes=changed_unpack.half_bytes)
    return kernel


@pytest.mark.weekly
@pytest.mark.parametrize(("changes", "error"), CHANGES.values(), ids=CHANGES)
def test_a_wrong_kernel_is_found_on_a_cpu(
    changes: dict[str, str],
    error: type[Exception] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    on_a_cpu(monkeypatch, module=changed_kernel(changes, tmp_path))
    plan = gluon_linear.TilePlan(tile=256, programs=3, blocks=4, cut=1, cutters=3)
    monkeypatch.setattr(gluon_linear, "plan", lambda *shape: plan)
    weights = weights_of(136, 640, device="cpu")
    weights[0, :16] = 4.0
    x, bias = x_of(300, 640, device="cpu"), x_of(1, 136, device="cpu")[0]
    with pytest.raises(error) if error else nullcontext():
        check(x, weights, bias)


COMPILED = r"""
import torch
import compile_only

def see(function, code, kwargs):
    assert not compile_only.unused_memory(code)
    print(code.metadata.shared, *compile_only.instructions(code, "HGMMA|WARPGROUP[.]DEPBAR|STL|LDL"))

compile_only.watch(see)

from neuzip.kernels.packed_linear.gluon import linear as gluon_linear
from neuzip.kernels.packed_linear.gluon import multiply, unpack
from neuzip.kernels.packed_linear import ops as torch_ops

gluon_linear.multiprocessors = lambda device: 132
for dtype, drop, columns, biased in (
    (torch.bfloat16, 0, 512, False), (torch.float16, 3, 128, True)
):
    weights = (torch.randn(136, columns, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    weights = (weights.view(torch.int16) >> drop << drop).view(dtype)
    bias = torch.zeros(136, dtype=dtype) if biased else None
    gluon_linear.linear(torch.zeros(300, columns, dtype=dtype), torch_ops.pack(weights), bias)
"""


@pytest.mark.slow
def test_products_are_under_way_while_weights_are_unpacked(tmp_path, kernel_cache):
    """Each warp group asks for the products of a turn, eight instructions, and waits once for all of them.

    The compiler says nothing where it cannot have that, but waits after every instruction.
    """
    kernels = [line.split() for line in compile_only.said_by(COMPILED, tmp_path, kernel_cache).splitlines()]
    assert len(kernels) == 2
    for shared, *instructions in kernels:
        assert int(shared) <= 227 << 10
        assert instructions.count("HGMMA") == 16
        assert instructions.count("WARPGROUP.DEPBAR") <= 4
        assert not {"STL", "LDL"} & set(instructions), "registers in local memory"
