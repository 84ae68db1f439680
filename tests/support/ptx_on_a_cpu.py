"""A few instructions of PTX on a CPU, for all threads at once: those of the inline assembly of kernels.

Registers are int64 tensors, with a number for each thread, or one number for all: of 32 bits without a sign,
of addresses, or of truth values. Every thread has its own place in the code. Those farthest behind go on.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

INSTRUCTION = re.compile(r"(?:(\w+):)?\s*(?:@(!?)(\w+) )?\s*([\w.]*)(.*)", re.DOTALL)


def signed(a: Any) -> Any:
    return (a ^ 1 << 31) - (1 << 31)


def permuted_bytes(a: Any, b: Any, selected: int) -> Any:
    assert selected & 0x8888 == 0, "signs of bytes are not here"
    both = b << 32 | a
    return sum((both >> 8 * (selected >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def by_table(a: Any, b: Any, c: Any, table: int) -> Any:
    """Bit 4 a + 2 b + c of the table, for every bit of a, b and c."""
    rows = [(i & 4, i & 2, i & 1) for i in range(8) if table >> i & 1]
    ones = [(a if x else ~a) & (b if y else ~b) & (c if z else ~c) & 0xFFFFFFFF for x, y, z in rows]
    return functools.reduce(operator.or_, ones, 0)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "lop3.b32": by_table,
    "shf.l.wrap.b32": lambda low, high, by: (high << (by & 31) | low >> 32 - (by & 31)) & 0xFFFFFFFF,
    "sub.u32": lambda a, b: (a - b) & 0xFFFFFFFF,
    "bfe.u32": lambda a, start, length: a >> start & (1 << length) - 1,
    "popc.b32": lambda a: sum(a >> i & 1 for i in range(32)),
    "prmt.b32": permuted_bytes,
    "setp.eq.u32": lambda a, b: a == b,
    "add.s64": lambda a, b: a + b,
    "mad.wide.s32": lambda a, b, c: signed(a) * signed(b) + c,
}


@functools.cache
def parsed(text: str) -> tuple[list[tuple[Any, ...]], dict[str, int]]:
    """Instructions, and where labels stand among them."""
    code, labels = [], {}
    for statement in text.replace("${:uid}", "").strip("{} \n").split(";"):
        found = INSTRUCTION.fullmatch(statement.strip())
        assert found, statement
        label, inverted, predicate, operation, operands = found.groups()
        if label:
            labels[label] = len(code)
        if operation not in ("", ".reg"):
            code.append((inverted == "!", predicate, operation, re.findall(r"[\w$]+", operands)))
    return code, labels


def run(text: str, registers: dict[str, Any], threads: int, load: Callable[..., torch.Tensor]) -> None:
    """Change the registers. `load` is called with addresses, and with a mask of the threads that ask."""
    code, labels = parsed(text)
    at = torch.zeros(threads, dtype=torch.int64)
    while (now := int(at.min())) < len(code):
        inverted, predicate, operation, (target, *operands) = code[now]
        here = at == now
        at = at + here
        if predicate:
            here = here & (registers[predicate] != inverted)
        if operation == "bra":
            at = torch.where(here, labels[target], at)
            continue
        sources = [registers[name] if name in registers else int(name, 0) for name in operands]
        result = load(*sources, here) if operation == "ld.global.b32" else OPERATIONS[operation](*sources)
        registers[target] = torch.where(here, result, registers.get(target, result))
