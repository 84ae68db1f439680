"""Sums over the warps of a program, in Triton, in one exchange through shared memory.

Triton's own reductions exchange a number at a time, with conflicts of banks and up to four barriers: of a
product of 16 tokens with ternary weights, they were half of the time. Here a warp writes all that it has,
waits once, and reads what it is to add up.

Arrays have one dimension and an element for each thread. An exchange has shared memory of its own and does
not wait for its readers, so it must not be in a loop that is not written out, unless each round has some of
its own: `of_program_in`.
"""

from __future__ import annotations

import triton
import triton.language as tl

OVER = tl.constexpr((1 << 27) - 1)
"""What a warp has of a sum that is too large: 32 of them are not."""


@triton.jit
def sum_rows(values, W: tl.constexpr, COMPILED: tl.constexpr):
    """Sums of each of some values [32 W] over the 4 threads of a row in all W warps; every thread has them.

    Threads 4 r to 4 r + 3 of a warp are those of row r. The order of additions is always the same.
    """
    sums = ()
    if W == 1 or not COMPILED:
        for i in tl.static_range(len(values)):
            of_warps = tl.sum(tl.reshape(values[i], [W, 32]), 0, keep_dims=True)
            of_warps = tl.reshape(tl.broadcast_to(of_warps, [W, 32]), [32 * W])
            sums += (_of_quads(of_warps, W),)
    else:
        COUNT: tl.constexpr = len(values)
        of_quads = ()
        for i in tl.static_range(COUNT):
            of_quads += (_of_quads(values[i], W),)
        t = tl.arange(0, 32 * W)
        warp, r, q = t // 32, t % 32 // 4, t % 4
        # value, warp, row; a thread reads those of every fourth warp
        to = (warp * 8 + r) * 4
        at = (tl.minimum(q, W - 1) * 8 + r) * 4
        parts = _exchanged(of_quads, to, at, COUNT, 32 * W, (W + 3) // 4, 128, 32 * W * COUNT)
        for i in tl.static_range(COUNT):
            sums += (_of_quads(tl.where(q < W, parts[i], tl.zeros_like(parts[i])), W),)
    return sums


@triton.constexpr_function
def each_of(count, warps):
    """How many sums a thread has of `share_sums`, of so many values over so many warps."""
    return -(-count // warps)


@triton.jit
def first_of(COUNT: tl.constexpr, W: tl.constexpr):
    """Number of the first sum that each thread has of `share_sums`: [32 W]."""
    EACH: tl.constexpr = each_of(COUNT, W)
    return tl.minimum(tl.arange(0, 32 * W) // 32 * EACH, COUNT - EACH)


@triton.jit
def share_sums(values, first, W: tl.constexpr, COMPILED: tl.constexpr):
    """Sums of each of some values [32 W] over W warps, int32, shared out among these.

    A thread has the sums from `first` on; with fewer values than warps, some warps have the same.
    """
    COUNT: tl.constexpr = len(values)
    EACH: tl.constexpr = each_of(COUNT, W)
    if W == 1:
        sums = values
    elif COMPILED:
        t = tl.arange(0, 32 * W)
        warp, lane = t // 32, t % 32
        # warp, value, lane
        to = (warp * COUNT * 32 + lane) * 4
        at = (first * 32 + lane) * 4
        OF_WARP: tl.constexpr = 128 * COUNT
        sums = _exchanged(values, to, at, EACH, 128, W, OF_WARP, OF_WARP * W)
    else:
        sums = ()
        for i in tl.static_range(EACH):
            mine = tl.zeros_like(values[0])
            for v in tl.static_range(COUNT):
                of_all = tl.sum(tl.reshape(values[v], [W, 32]), 0, keep_dims=True)
                of_all = tl.reshape(tl.broadcast_to(of_all, [W, 32]), [32 * W])
                mine = tl.where(first + i == v, of_all, mine)
            sums += (mine,)
    return sums


@triton.jit
def _of_quads(value, W: tl.constexpr):
    """Sums over the 4 threads of a row in a warp, for each of them."""
    summed = tl.sum(tl.reshape(value, [W, 8, 4]), 2, keep_dims=True)
    return tl.reshape(tl.broadcast_to(summed, [W, 8, 4]), [32 * W])


@triton.jit
def _exchanged(
    values, to, at, OUTPUTS: tl.constexpr, STRIDE: tl.constexpr, TERMS: tl.constexpr,
    TERM_STRIDE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write values from `to` on, a stride apart; when all have, add terms up from `at` on. In bytes."""
    COUNT: tl.constexpr = len(values)
    FLOAT: tl.constexpr = values[0].dtype == tl.float32
    return tl.inline_asm_elementwise(
        _exchange(COUNT, OUTPUTS, STRIDE, TERMS, TERM_STRIDE, SIZE, FLOAT),
        _constraints(COUNT, OUTPUTS, FLOAT), values + (to, at),  # noqa: RUF005
        dtype=_types(OUTPUTS, FLOAT), is_pure=False, pack=1,
    )  # fmt: skip


@triton.constexpr_function
def _exchange(count, outputs, stride, terms, term_stride, size, is_float):
    kind, values, to = "f32" if is_float else "s32", outputs, outputs + count
    lines = [
        f"{{ .shared .align 4 .b8 exchanged[{size}]; .reg .b32 base, to, at; .reg .{kind} term;",
        f"mov.u32 base, exchanged; add.u32 to, base, ${to}; add.u32 at, base, ${to + 1};",
        *(f"st.shared.{kind} [to + {stride * v}], ${values + v};" for v in range(count)),
        "bar.sync 0;",
        *(f"ld.shared.{kind} ${k}, [at + {stride * k}];" for k in range(outputs)),
    ]
    for i in range(1, terms):
        for k in range(outputs):
            lines.append(f"ld.shared.{kind} term, [at + {stride * k + term_stride * i}];")
            lines.append(f"add.{kind} ${k}, ${k}, term;")
    return " ".join([*lines, "}"])


@triton.constexpr_function
def _constraints(count, outputs, is_float):
    letter = "f" if is_float else "r"
    return ",".join([f"={letter}"] * outputs + [letter] * count + ["r", "r"])


@triton.constexpr_function
def _types(outputs, is_float):
    return ((tl.float32 if is_float else tl.int32),) * outputs


@triton.jit
def of_program(values, LARGEST: tl.constexpr, W: tl.constexpr, COMPILED: tl.constexpr):
    """Over all threads, of each of some values [32 W]: of the first LARGEST the largest, of others the sum.

    There are at most 4, unsigned int32 in the type int32. Results are scalars.
    """
    return of_program_in(reserve(len(values), 1, W, COMPILED), 0, values, LARGEST, W, COMPILED)


@triton.jit
def reserve(COUNT: tl.constexpr, ROUNDS: tl.constexpr, W: tl.constexpr, COMPILED: tl.constexpr):
    """Shared memory for the exchange of so many values, ROUNDS times: `of_program_in`."""
    where = 0
    if COMPILED:
        where = tl.inline_asm_elementwise(
            _declaration(COUNT, ROUNDS, W), "=r,r", [COUNT], dtype=tl.int32, is_pure=False, pack=1
        )
    return where


@triton.jit
def of_program_in(
    where, number, values, LARGEST: tl.constexpr, W: tl.constexpr, COMPILED: tl.constexpr, over=None
):
    """What `of_program` gives, by way of the memory that `reserve` gave, where each round has its own.

    over, int32 [32 W]: not 0 where the last value is larger than it says. Its warp's sum is then `OVER`.
    """
    COUNT: tl.constexpr = len(values)
    results = ()
    if COMPILED:
        where += number * (_stride(COUNT) * W)
        arguments = values + (where,)  # noqa: RUF005
        if over is not None:
            arguments += (over,)
        tl.inline_asm_elementwise(
            _of_warps(COUNT, LARGEST, over is not None), _of_warps_constraints(len(arguments)), arguments,
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        results = tl.inline_asm_elementwise(
            _over_warps(COUNT, LARGEST, W), _over_warps_constraints(COUNT), [where],
            dtype=_types(COUNT, False), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        for i in tl.static_range(len(values)):
            wide = values[i].to(tl.uint32, bitcast=True).to(tl.int64)
            if i < LARGEST:
                one = tl.max(wide, 0)
            else:
                of_warps = tl.sum(tl.reshape(wide, [W, 32]), 1)
                if over is not None and i == COUNT - 1:
                    of_warps = tl.where(tl.max(tl.reshape(over, [W, 32]), 1) != 0, OVER, of_warps)
                one = tl.sum(of_warps, 0)
            results += (one.to(tl.int32),)
    return results


@triton.constexpr_function
def _stride(count):
    """Bytes of a warp: as many as can be read at once."""
    return 4 if count == 1 else 16 if count > 2 else 8


@triton.constexpr_function
def _declaration(count, rounds, warps):
    nbytes = _stride(count) * warps * rounds
    return f"{{ .shared .align 16 .b8 of_warps[{nbytes}]; mov.u32 $0, of_warps; }}"


@triton.constexpr_function
def _of_warps_constraints(count):
    return ",".join(["=r"] + ["r"] * count)


@triton.constexpr_function
def _of_warps(count, largest, over):
    lines = [f"{{ .reg .b32 own, of_warp<{count}>; mov.u32 own, %tid.x; shr.u32 own, own, 5;"]
    lines += [f"mad.lo.u32 own, own, {_stride(count)}, ${count + 1};"]
    for i in range(count):
        lines += [f"redux.sync.{'max' if i < largest else 'add'}.u32 of_warp{i}, ${i + 1}, 0xffffffff;"]
    if over:
        lines += [
            f".reg .pred over; setp.ne.u32 over, ${count + 2}, 0; vote.sync.any.pred over, over, 0xffffffff;"
        ]
        lines += [f"selp.b32 of_warp{count - 1}, {OVER.value}, of_warp{count - 1}, over;"]
    for i in range(count):
        lines += [f"st.shared.b32 [own + {4 * i}], of_warp{i};"]
    return " ".join([*lines, "mov.b32 $0, 0; }"])


@triton.constexpr_function
def _over_warps_constraints(count):
    return ",".join(["=&r"] * count + ["r"])


@triton.constexpr_function
def _over_warps(count, largest, warps):
    lines = ["{ .reg .b32 at; .reg .pred has; mov.u32 at, %laneid; bar.sync 0;"]
    lines += [f"setp.lt.u32 has, at, {warps}; mad.lo.u32 at, at, {_stride(count)}, ${count};"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(count)]
    lines += [f"@has ld.shared.b32 ${i}, [at + {4 * i}];" for i in range(count)]
    for i in range(count):
        lines += [f"redux.sync.{'max' if i < largest else 'add'}.u32 ${i}, ${i}, 0xffffffff;"]
    return " ".join([*lines, "}"])
