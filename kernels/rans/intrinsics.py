"""What numba has no words for, said in LLVM's: one step of the coder for 16 lanes at once, and a prefetch.

It is LLVM's portable form and would run anywhere, but only where 16-bit words can be packed and unpacked in
registers (AVX-512 VBMI2) is it faster than `cpu.scalar_decode` and `cpu.scalar_encode`, its equals.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from .numbers import RECIPROCAL_BITS, SCALE, SCALE_BITS

WIDTH = 16
SUPPORTED = bool(binding.get_host_cpu_features().get("avx512vbmi2"))

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _vector(kind: ir.IntType) -> ir.VectorType:
    return ir.VectorType(kind, WIDTH)


def _all(kind: ir.IntType, value: int) -> ir.Constant:
    return ir.Constant(_vector(kind), [value] * WIDTH)


class _Arguments:
    """The arguments of an intrinsic, arrays as pointers to their elements."""

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> None:
        self._context, self._builder, self._kinds, self._values = context, builder, signature.args, values

    def number(self, i: int) -> ir.Value:
        return self._values[i]

    def elements(self, i: int, at: ir.Value, kind: ir.IntType) -> ir.Value:
        """A pointer to 16 elements of array `i`, from position `at` on."""
        return self._builder.bitcast(self.element(i, at, kind), _vector(kind).as_pointer())

    def element(self, i: int, at: ir.Value, kind: ir.IntType) -> ir.Value:
        """A pointer to element `at` of array `i`."""
        array = self._context.make_array(self._kinds[i])(self._context, self._builder, self._values[i])
        return self._builder.gep(self._builder.bitcast(array.data, kind.as_pointer()), [at])

    def look_up(self, i: int, at: ir.Value) -> ir.Value:
        """16 numbers of 64 bits of array `i`. Loads one by one: a gather was slower where it was measured."""
        numbers = ir.Constant(_vector(_I64), ir.Undefined)
        for lane in range(WIDTH):
            where = self._builder.extract_element(at, ir.Constant(_I32, lane))
            entry = self._builder.load(self.element(i, where, _I64))
            numbers = self._builder.insert_element(numbers, entry, ir.Constant(_I32, lane))
        return numbers

    def llvm(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """Call one of LLVM's intrinsics."""
        module = self._builder.module
        kind = ir.FunctionType(result, [a.type for a in arguments])
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self._builder.call(function, arguments)


@intrinsic  # type: ignore[untyped-decorator]
def decode_16(
    typing: Any, state: Any, table: Any, words: Any, p: Any, exponents: Any, lane: Any, row: Any
) -> Any:
    """Lanes `lane` to `lane + 15` of `cpu.scalar_decode`; the position of the next word."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        arguments = _Arguments(context, b, signature, values)
        p, lane, row = (arguments.number(i) for i in (3, 5, 6))
        states = arguments.elements(0, lane, _I32)
        x = b.load(states, align=4)
        entries = arguments.look_up(1, b.zext(b.and_(x, _all(_I32, SCALE - 1)), _vector(_I64)))
        low = b.trunc(entries, _vector(_I32))
        frequency, offset = b.and_(low, _all(_I32, 0xFFFF)), b.lshr(low, _all(_I32, 16))
        x = b.add(b.mul(frequency, b.lshr(x, _all(_I32, SCALE_BITS))), offset)
        small = b.icmp_unsigned("<", x, _all(_I32, 1 << 16))
        taken = arguments.llvm(
            "llvm.masked.expandload.v16i16",
            _vector(_I16),
            arguments.element(2, p, _I16),
            small,
            _all(_I16, 0),
        )
        refilled = b.or_(b.shl(x, _all(_I32, 16)), b.zext(taken, _vector(_I32)))
        b.store(b.select(small, refilled, x), states, align=4)
        decoded = b.trunc(b.lshr(entries, _all(_I64, 32)), _vector(_I16))
        b.store(decoded, arguments.elements(4, b.add(row, lane), _I16), align=2)
        return b.add(p, _count(b, small))

    return types.uint64(state, table, words, p, exponents, lane, row), generate


@intrinsic  # type: ignore[untyped-decorator]
def encode_16(
    typing: Any, state: Any, facts: Any, coded: Any, row: Any, scratch: Any, p: Any, lane: Any
) -> Any:
    """Lanes `lane` to `lane + 15` of `cpu.scalar_encode`; the position of the last word."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        arguments = _Arguments(context, b, signature, values)
        row, p, lane = (arguments.number(i) for i in (3, 5, 6))
        states = arguments.elements(0, lane, _I32)
        x = b.load(states, align=4)
        symbols = b.load(arguments.elements(2, b.add(row, lane), _I8), align=1)
        at = b.shl(b.zext(symbols, _vector(_I64)), _all(_I64, 1))
        reciprocal = arguments.look_up(1, at)
        low = b.trunc(arguments.look_up(1, b.or_(at, _all(_I64, 1))), _vector(_I32))
        frequency, start = b.and_(low, _all(_I32, 0xFFFF)), b.lshr(low, _all(_I32, 16))
        full = b.icmp_unsigned(">=", x, b.shl(frequency, _all(_I32, 32 - SCALE_BITS)))
        p = b.sub(p, _count(b, full))
        arguments.llvm(
            "llvm.masked.compressstore.v16i16", ir.VoidType(),
            b.trunc(x, _vector(_I16)), arguments.element(4, p, _I16), full,
        )  # fmt: skip
        x = b.select(full, b.lshr(x, _all(_I32, 16)), x)
        product = b.mul(b.zext(x, _vector(_I64)), reciprocal)
        quotient = b.trunc(b.lshr(product, _all(_I64, RECIPROCAL_BITS)), _vector(_I32))
        x = b.add(b.add(x, b.mul(quotient, b.sub(_all(_I32, SCALE), frequency))), start)
        b.store(x, states, align=4)
        return p

    return types.uint64(state, facts, coded, row, scratch, p, lane), generate


@intrinsic
def prefetch(typing, array, at):  # type: ignore[no-untyped-def]
    """Ask for the cache line of `array[at]`. A wish: nothing happens where there is nothing."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        arguments = _Arguments(context, b, signature, values)
        line = arguments.element(0, arguments.number(1), ir.IntType(signature.args[0].dtype.bitwidth))
        read, keep, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
        arguments.llvm("llvm.prefetch.p0", ir.VoidType(), line, read, keep, data)
        return context.get_dummy_value()

    return types.void(array, at), generate


def _count(b: ir.IRBuilder, flags: ir.Value) -> ir.Value:
    return b.zext(b.ctpop(b.bitcast(flags, ir.IntType(WIDTH))), _I64)
