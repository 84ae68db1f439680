"""Triton's compiler takes the kernels as they are launched, for a card that need not be there.

The interpreter is more patient than the compiler: an argument that is 1 is a constant for the latter, and
has no methods of a tensor. So the launches of small calls are compiled for compute capability 9.0, with a
driver that has a name only. Nothing runs, and all memory is zeros.
"""

from __future__ import annotations

import json
from pathlib import Path

import compile_only
import pytest

SHARED_MEMORY = 227 << 10
"""Bytes that a program may have on a card of that kind."""

SETTING = r"""
import ast, json, re, torch, triton
import compile_only
from triton.runtime.jit import JITCallable

shared = {}

def see(function, code, kwargs):
    name = function.__name__
    shared[name] = max(shared.get(name, 0), code.metadata.shared)
    check_constants(function)
    before, wait, _ = code.asm["ptx"].partition("griddepcontrol.wait")
    reads = "ld.global" in before or "cp.async" in before
    assert not (wait and reads), f"{name} reads before the kernel ahead has ended"
    assert bool(wait) == bool(kwargs.get("USE_PDL", kwargs.get("EARLY")))
    if "fragments" in name:
        for instruction in ("mma.sync", "movmatrix.sync", "shfl.sync"):
            check_lanes(code.asm["ttgir"], instruction)
    if name == "code_kernel":  # lanes are threads, and runs of usual formats are read 16 bytes at a time
        check_lanes(code.asm["ttgir"], "vote.sync")
        assert kwargs["BITS"] != 16 or "ld.global.v2.b64" in code.asm["ptx"]
    if name.startswith(("decode_", "multiply_chosen")):
        check_lanes(code.asm["ttgir"], "vote.sync")
        own = sum(map(int, re.findall(r"[.]shared[^;]* memory.(\d+)", code.asm["ptx"])))
        assert (own > 0) == kwargs.get("STREAM", True) and own + code.metadata.shared <= 48 << 10

def called(function, found):
    # A kernel and all functions in Triton that it calls.
    if function not in found:
        found.add(function)
        scope = function.get_capture_scope()
        names = {node.id for node in ast.walk(function.parse()) if isinstance(node, ast.Name)}
        for one in (scope.get(name) for name in names):
            if isinstance(one, JITCallable):
                called(one, found)
    return found

def check_constants(function):
    # Triton's cache key lists constants of one name in the order of their modules in memory: with different
    # values, a kernel would be compiled again in a later process.
    values = {}
    for one in called(function, set()):
        for (name, _), (value, _) in one.used_global_vals.items():
            values.setdefault(name, set()).add(str(value))
    several = {name: found for name, found in values.items() if len(found) > 1}
    assert not several, f"{function.__name__} reads constants of one name from several modules: {several}"

def check_lanes(ttgir, instruction):
    # Matrix instructions and votes by hand count on element t of an array being in thread t.
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    used = [line for line in ttgir.splitlines() if instruction in line]
    assert used
    for name in set(re.findall(r"tensor<[^>]*, (#\w+)>", " ".join(used))):
        in_order = "sizePerThread = [1], threadsPerWarp = [32]", "lane = [[1], [2], [4], [8], [16]]"
        assert any(words in layouts[name] for words in in_order), layouts[name]

compile_only.watch(see)
torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
torch.Tensor.new_empty = torch.Tensor.new_zeros
"""

HEADS = """
from neuzip.kernels.linear_cross_entropy import Head, gradients
from neuzip.kernels.linear_cross_entropy.triton import divergence as triton_divergence
from neuzip.kernels.linear_cross_entropy.triton import forward as triton_forward

gradients._on_gpu = lambda hidden: True
for tokens, vocabulary, d, dtype, more, options in (
    (1, 1, 1, torch.float32, {}, {"filter_eps": None}),
    (300, 100, 64, torch.bfloat16, {"bias": torch.zeros(100), "softcap": 5.0, "scale": 0.5},
     {"sort_vocabulary": True}),
):
    head = Head(torch.zeros(tokens, d, dtype=dtype), torch.zeros(vocabulary, d, dtype=dtype), **more)
    target = torch.zeros(tokens, dtype=torch.int64)
    triton_forward.token_statistics(head, target, -100, 1 << 20)
    triton_divergence.divergence(head, head, target, -100, min(3, vocabulary), 1 << 20)
    hidden, weight = head.hidden.requires_grad_(), head.weight.requires_grad_()
    bias = None if head.bias is None else head.bias.requires_grad_()
    gradients.linear_cross_entropy(
        hidden, weight, target, linear_bias=bias, softcap=head.softcap, **options
    ).sum().backward()
print(json.dumps(shared))
"""

ATTENTION = """
from neuzip.kernels.attention.triton import forward as triton_forward
from neuzip.kernels.attention.options import Options

for packed, queries, keys, heads, width, lse, dtype, more in (
    (False, 1, 1, 1, 64, True, torch.bfloat16, {}),
    (True, 70, 300, 2, 80, True, torch.float16, {"causal": True, "softcap": 2.0, "smooth_v": True}),
    (True, 16, 16, 1, 256, False, torch.bfloat16,
     {"bits": 4, "smooth_q": True, "causal": True, "window": 1}),
):
    q = torch.zeros(1, heads, queries, width, dtype=dtype)
    k = torch.zeros(1, 1, keys, width, dtype=dtype)
    if not packed:
        triton_forward.attention(q, k, k, Options(**more), lse)
        continue
    q, k = (x[0].transpose(0, 1) for x in (q, k))
    starts = torch.zeros(4, dtype=torch.int32)
    triton_forward.attention_packed(q, k, k, starts, starts, queries, keys, Options(**more), lse)
print(json.dumps(shared))
"""

KV = """
from neuzip.kernels import kv_cache
from neuzip.kernels.kv_cache import CenterPath
from neuzip.kernels.device import launch
from neuzip.kernels.kv_cache.triton import attend as triton_attend
from neuzip.kernels.kv_cache.triton import attend_mma as triton_fragments
from neuzip.kernels.kv_cache.triton import load as triton_load
from neuzip.kernels.kv_cache.triton import store as triton_store

first, length = torch.zeros(2, dtype=torch.int64), torch.ones((), dtype=torch.int64)
mask = torch.ones(2, 30, dtype=torch.bool)
for early, bits, group, width, values, dtype in (
    (True, 3, None, 60, 60, torch.bfloat16), (False, 4, 32, 128, 64, torch.float16),
    (True, 8, None, 64, 64, torch.float32),
):
    launch.has_pdl = lambda device: early
    grouped = {} if group is None else {"whole": 4, "dtype": dtype}
    rates, still = torch.ones(width // 2, dtype=torch.float64), torch.ones(width, dtype=torch.bool)
    path = None if group is None else CenterPath.of(still, rates=rates)
    rooms = [
        kv_cache.empty((2, 2, 30, w), bits, group=size, path=path if w == width else None, **grouped)
        for w, size in ((width, group), (values, group and 2 * group))
    ]
    for tokens, start in ((1, length), (20, 3)):
        states = [torch.zeros(2, 2, tokens, w, dtype=dtype) for w in (width, values)]
        triton_store.store(rooms, states, start, first)
    triton_load.load(rooms[0], first, dtype)
    query, more = torch.zeros(2, 8, width, dtype=dtype), mask if early else None
    if early and bits == 3:
        triton_attend.attend(query, *rooms, first, scaling=1.0, length=length, mask=more)
    if triton_fragments.fits(query, *rooms):
        triton_fragments.attend(query, *rooms, first, scaling=1.0, length=length, mask=more)
print(json.dumps(shared))
"""

STEP = """
from neuzip.kernels.device import launch
from neuzip.kernels.step import NORMS
from neuzip.kernels.step.triton import step as triton_step

for early in (False, True):
    launch.has_pdl = lambda device: early
    shapes = (1, 128, torch.bfloat16), (1, 3200, torch.float16), (8, 4096, torch.float32)
    for (rows, columns, dtype), norm in zip(shapes[:: -1 if early else 1], NORMS, strict=True):
        triton_step.rms_norm(torch.zeros(rows, columns, dtype=dtype), torch.zeros(columns), 1e-5, norm)
    for batch, heads, tokens, width, dtype in ((1, 1, 1, 64, torch.bfloat16), (2, 8, 3, 80, torch.float32)):
        q = torch.zeros(batch, heads, tokens, width, dtype=dtype)
        cos = torch.zeros(1, tokens, width, dtype=dtype)
        triton_step.rotated(q, q[:, :1], cos, cos)
        room = torch.zeros(batch, heads, 7, width, dtype=dtype)
        triton_step.store((room, room), (q, q), torch.zeros(tokens, dtype=torch.int64))
print(json.dumps(shared))
"""

DECODERS = """
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.rans.coded import ChosenLaunch, CodedPart, Kind
from neuzip.kernels.rans.triton.decode import decode_chosen, decode_parts

row, out = torch.zeros(32, dtype=torch.int64), torch.zeros(16, dtype=torch.uint8)
for kind, calls in (
    (Kind(FORMATS["BF16"], 7, 2, 0), ((1, 1), (8, 1000))),
    (Kind(FORMATS["F32"], 23, 1, 64), ((8, 1000),)),
    (Kind(FORMATS["BF16"], 4, 2, 0, 1), ((1, 1000),)),  # on a grid, with low bits
    (Kind(FORMATS["BF16"], 8, 1, 0, 3), ((1, 1000),)),  # and column factors
    (Kind(FORMATS["F32"], 0, 2, 0, 7), ((1, 0),)),  # and rows that cross runs
):
    for parts, blocks in calls:
        decode_parts([CodedPart(kind, row, blocks, True)] * parts, [out] * parts)
from neuzip.kernels.rans.coded_sample import coded_weights
from neuzip.kernels.rans.triton.decode import decode
for name, *numbers in (("BF16", 7, 2, 0), ("F32", 23, 1, 0), ("BF16", 0, 1, 0, 3)):
    kind = Kind(FORMATS[name], *numbers)
    for count in (1, 2):
        coded = [coded_weights(kind, 3, torch.device("cpu"))[0]] * count
        decode(coded, [torch.zeros(one.numel, dtype=torch.int16 if kind.fmt.bits == 16 else torch.int32)
                       for one in coded])
rows, places, programs = (torch.zeros(shape, dtype=torch.int64) for shape in ((1, 1, 2), 1, (1, 2)))
chosen = ChosenLaunch(Kind(FORMATS["BF16"], 7, 2, 0), False, 8, out, rows, places, programs.int())
decode_chosen([chosen], torch.zeros(1, dtype=torch.int32), 0, out, 16)
print(json.dumps(shared))
"""

ENCODERS = """
import numpy as np
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.rans.triton import batch, census, encode_blocks, encode_planes, encoder_table

# Each size of weights, each number of exponents a symbol with the sizes that read it in their own way.
for name, warps, tensors, group, addends in (
    ("BF16", 4, 1, 2, False), ("BF16", 4, 2, 1, True), ("F8_E4M3", 1, 2, 2, True), ("F32", 4, 1, 2, False),
    ("F64", 2, 2, 1, False),
):
    fmt = FORMATS[name]
    bits = [torch.zeros(n, dtype=batch.INTEGERS[fmt.bits]) for n in (1, warps * 16384 + 16)[:tensors]]
    sizes = batch.sizes_of(
        tuple(one.numel() for one in bits), warps, fmt.mantissa_bits, census.shares(fmt, 256, 528)
    )
    own = batch.Batch(bits, fmt, warps, sizes)
    counted = census.count(own, 256)
    tables = encoder_table.make_tables(own, counted.counters, counted.elsewhere)
    encode_blocks.fill_tails(own, tables.tables)
    index = torch.zeros(sizes.shares.blocks, dtype=torch.int16)
    blocks = encode_blocks.BlockCoder(own, tables, index, range(tensors), group, addends, 0)
    blocks.code(0)
    blocks.gather(0, torch.zeros(1, dtype=torch.int16))
    chosen = np.ones(tensors, bool)
    encode_planes.write_planes(own, own.planes, own.columns, chosen, fmt.mantissa_bits)
print(json.dumps(shared))
"""

POOL = """
from neuzip.kernels.expert_pool.ops import experts_in_use, pool_linear
from neuzip.kernels.expert_pool.triton.vectors import gate_sums, sum_slots
from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.float_fields import FORMATS
from neuzip.kernels.rans.coded import ChosenLaunch, Kind
from neuzip.kernels.rans.products import CodedMatrices, Corrections
from neuzip.kernels.experts.routing import Routing

arrays = [torch.zeros(shape, dtype=torch.int32) for shape in (4, (4, 4), 1)]
for tile, width, dtype in ((16, 768, torch.bfloat16), (128, 96, torch.float16)):
    used = experts_in_use(Routing(tile, *arrays), 9)
    pool, rows = torch.zeros(2, 64, width, dtype=dtype), torch.zeros(4 * tile, width, dtype=dtype)
    pool_linear(rows, pool, used, bias=None if tile == 16 else torch.zeros(9, 64))

row, ids = torch.zeros(1, 1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
launch = ChosenLaunch(Kind(FORMATS["BF16"], 7, 2, 0), False, 8, row.view(torch.uint8), row, ids, row.int())
matrices = CodedMatrices(2, 256, launch, Corrections(ids.int(), ids.int(), ids.int()), ())
x = torch.zeros(1, 256, dtype=torch.bfloat16)
sums = matrices.multiply(ids, x, 1)
gate_sums(matrices, sums, ids, x, 1, Gate(True, 7.0, 1.7), x)
sum_slots(matrices, sums, ids, x, torch.zeros(1, 1), None)
print(json.dumps(shared))
"""

EXPERTS = """
from neuzip.kernels.device import launch
from neuzip.kernels.experts.gate import Gate
from neuzip.kernels.experts.triton import dense, launches
from neuzip.kernels.packed_linear.ops import pack

launch.has_pdl = lambda device: True
dense.triton_pack.decode = lambda *arguments: None
for ids in (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(5000, 1, dtype=torch.int32)):
    routing, rows = launches.route(ids, torch.zeros(len(ids), 96, dtype=torch.float16), 2, 64)
packed, bias = pack(torch.zeros(2 * 24, 96, dtype=torch.float16)), torch.zeros(2, 24, dtype=torch.float16)
for multiply in (launches.grouped_linear, launches.grouped_dense):
    multiply(rows, packed, 2, routing, bias)
launches.gradients(rows[:, :24].contiguous(), packed, 2, routing)
launches.apply_gate(rows, routing, Gate(interleaved=True, limit=7.0, alpha=1.702))
launches.weighted_sum(rows, routing.position, torch.zeros(5000, 1))
print(json.dumps(shared))
"""

FEEDBACK = """
from neuzip.kernels.quantizers.triton.feedback import VALUES, round_block

for dtype, columns, rows in zip(VALUES, (128, 128, 1, 17, 128, 64), (1, 9, 1, 300, 16, 5), strict=True):
    w, codes = torch.zeros(columns, rows), torch.zeros(columns, rows, dtype=torch.int16)
    steps = torch.zeros(1, 1).expand(columns, rows) if rows > 9 else w
    round_block(w, steps, torch.zeros(columns, columns), codes, torch.zeros_like(w), dtype)
print(json.dumps(shared))
"""


SPARSE_DELTAS = """
from neuzip.kernels.sparse_delta import BlockMap, CodedDelta
from neuzip.kernels.sparse_delta.triton import launches

for dtype in (torch.uint8, torch.bfloat16, torch.float64):
    weights = [torch.zeros(5000, dtype=dtype), torch.zeros(1, dtype=dtype)]
    blocks = BlockMap.of(weights)
    row, words = torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    coded = CodedDelta(words, words)
    launches.measure(weights, weights, blocks, words)
    launches.apply(weights, blocks, coded, row)
    if dtype is torch.uint8:  # what differs by width is in these two
        continue
    launches.encode(weights, weights, blocks, words, row, words)
    launches.check(weights, blocks, coded, row)
    launches.changed(blocks, coded, row, row, row)
    launches.digest(weights, blocks)
print(json.dumps(shared))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launches", "kernels"),
    [
        (HEADS, 9),
        (ATTENTION, 4),
        (KV, 5),
        (STEP, 3),
        (DECODERS, 6),
        (ENCODERS, 8),
        (EXPERTS, 6),
        (POOL, 5),
        (FEEDBACK, 1),
        (SPARSE_DELTAS, 6),
    ],
    ids=[
        "linear heads",
        "attention",
        "keys and values",
        "steps",
        "decoders",
        "encoders",
        "experts",
        "experts in a pool",
        "error feedback",
        "sparse deltas",
    ],
)
def test_launches_of_any_size(launches: str, kernels: int, tmp_path: Path, kernel_cache: Path):
    shared = json.loads(compile_only.said_by(SETTING + launches, tmp_path, kernel_cache))
    assert len(shared) >= kernels, shared
    assert max(shared.values()) <= SHARED_MEMORY, shared
