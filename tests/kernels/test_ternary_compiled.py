"""Triton's compiler takes the kernels of ternary products, for a card that need not be there.

Element i of a row of threads is in thread i, which the instructions rely on.
"""

from __future__ import annotations

from pathlib import Path

import compile_only
import pytest

COMPILED = """
import re, torch
import compile_only
from neuzip.kernels.device import launch as device_launch
from neuzip.kernels.ternary_linear import TernaryWeight
from neuzip.kernels.ternary_linear.triton import few_tokens, launches, matrix, one_token, quantize
from neuzip.kernels.ternary_linear.triton.launches import FewTokensLaunch, OneTokenLaunch as Launch

def see(function, code, kwargs):
    text, ptx, config = code.asm["ttgir"], code.asm["ptx"], kwargs.get("config")
    named = dict(re.findall(r"^(#\\w+) = (#ttg.*)$", text, re.M))
    lines = [line for line in text.splitlines() if "mma.sync" in line]
    layouts = {named[name] for line in lines for name in re.findall(r"tensor<[0-9]+xi32, (#\\w+)>", line)}
    assert code.metadata.shared <= 227 << 10
    fused = ptx.count("fma.rn.f32")
    before = ptx.partition("griddepcontrol.wait")[0]
    early = re.findall(r"ld\\.global\\S*", before)
    if "griddepcontrol.wait" in ptx:  # words alone are read before the predecessor has ended
        assert all("evict_first" in load for load in early)
        assert early or "cp.async" in before or "quantize" in function.__name__
    if function.__name__ in ("one_token_kernel", "whole_glu_kernel"):
        stages, prologue, steps = config.STAGES, config.PROLOGUE, config.TILES * config.STEPS
        assert not early and before.count("cp.async.cg") == 2 * stages
        assert ptx.count("griddepcontrol.launch_dependents") == 1
        sets = 0 if not config.BITS else 1 if config.KIND == 1 else 2
        replay(ptx, stages, prologue, steps, config.STEPS, sets)
        assert len(lines) == steps * (2 * sets or 8)
        assert ("m16n8k256" in ptx) == config.BITS == ("m16n8k32" not in ptx)
        seen.add(("bits", config.BITS))
        seen.update({("ring used again", stages < steps), ("prologue", prologue > 0)})
    seen.add(("int4x2", getattr(config, "INT4X2", kwargs.get("INT4X2"))))
    kind = getattr(config, "KIND", kwargs.get("KIND"))
    clipped = ptx.count("fma.rn.sat.f32")  # by INT4, a code each, and another one rounds
    reciprocals = ptx.count("rcp.approx.ftz.f32")
    assert reciprocals == ptx.count(".ftz") <= 1
    divisions = 0 if not reciprocals else 4 if kind == 1 else 6  # corrections of the quotients
    assert fused == clipped + divisions or kind == 2
    assert not clipped or kind == 1
    seen.add(("clipped", kind == 1 and clipped > 0))
    print(function.__name__, len(lines), *layouts, sep=" | ")

EVENTS = re.compile(
    r"cp\\.async\\.cg\\S* \\[%r\\d+ \\+ (?P<copy>\\d+)\\]|(?P<commit>cp\\.async\\.commit_group)"
    r"|cp\\.async\\.wait_group (?P<wait>\\d+)|(?P<exchange>redux\\.sync)|(?P<sync>bar\\.warp\\.sync)"
    r"|ldmatrix\\S* \\{[^}]*\\}, \\[%r\\d+ \\+ (?P<load>\\d+)\\]"
    r"|st\\.shared\\.b32 \\[%r\\d+ \\+ (?P<put>\\d+)\\]"
    r"|ld\\.shared\\.v4\\.b32 \\{[^}]*\\}, \\[%r\\d+ \\+ (?P<get>\\d+)\\]"
)

def replay(ptx, stages, prologue, steps, steps_of_codes, sets):
    # What a thread copies to the ring and loads from it, in order: two pieces of 16 bytes a step; what it
    # writes of codes, and reads. Others of its warp read what it has copied and written behind a barrier.
    copies, begun, arrived, loads, before_codes = 0, 0, 0, 0, None
    put, got, synced, read = [], [], False, 0
    for event in EVENTS.finditer(ptx):
        what, at = event.lastgroup, event.group(event.lastgroup)
        if what == "copy":
            step = copies // 2
            assert int(at) == step % stages * 1024 + copies % 2 * 512
            assert step < stages or read >= 2 * (step - stages + 1)  # all have loaded what was there
            copies += 1
        elif what == "commit":
            begun += 1
            assert copies == 2 * begun
        elif what == "wait":
            arrived, synced = begun - int(at), False
        elif what == "sync":
            synced, read = True, loads
        elif what == "load":
            step = loads // 2
            assert synced and int(at) == step % stages * 1024
            assert step < arrived <= step + 1  # it has arrived, and no later one is waited for
            loads += 1
        elif what == "put":
            assert not got
            put.append(int(at))
            synced = False
        elif what == "get":
            assert got or synced
            got.append(int(at))
        elif before_codes is None:
            before_codes = loads
    assert copies == loads == 2 * steps
    if sets == 0:  # codes stay in registers
        assert not put and not got
    else:  # 32 bytes of each step's lower halves; for some threads the upper ones, at another register
        assert put == [128 * i for i in range(sets * steps_of_codes)]
        assert got == [128 * sets * (i // 2) + 16 * (i % 2) for i in range(2 * steps_of_codes)]
    assert before_codes in (None, 2 * prologue)  # None: another kernel makes the codes

seen = set()
compile_only.watch(see)
launches.multiprocessors = matrix.multiprocessors = lambda device: 132
device_launch.has_pdl = lambda device: True
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

def x(tokens, columns, dtype):
    return torch.zeros(tokens, columns, dtype=dtype)

def weight(out, columns, group=None):
    words = torch.zeros(-(-out // 16), -(-columns // 256), 16, 16, dtype=torch.int32)
    scale = torch.ones(()) if group is None else torch.ones(out, -(-columns // group))
    return TernaryWeight(words, scale, group, (out, columns))

def product(out, columns, dtype, activation, launch=None):
    weights, biases = [weight(out, columns)], [torch.zeros(out)]
    one_token.one_token(x(1, columns, dtype), weights, biases, activation, False, 1, launch)

def gated(out, columns, dtype, activation, launch=None):
    both = weight(out, columns), weight(out, columns)
    one_token.relu2_glu(x(1, columns, dtype), *both, activation, False, 1, launch)

def few(out, columns, dtype, activation, launch=None):
    few_tokens.few_tokens(x(9, columns, dtype), weight(out, columns), None, activation, False, 1, launch)

# Each activation and dtype once, whole rows and padded ones, bits and bytes, rings used again or not.
product(4096, 4096, BF16, "int8")
product(17, 70, F16, "int4")
product(1, 1, F32, "fp4")
product(33, 600, BF16, "top_k_int8")
product(14336, 4096, BF16, "int4")
product(4096, 14336, BF16, "fp4")
product(28672, 8192, BF16, "int8", Launch(4, 2, stages=10, fused=False, quantizer_pdl=True))
product(90, 1024, F32, "fp4", Launch(4, 3, stages=2, prologue=40, trigger_next_early=False))
product(90, 1024, F32, "int8", Launch(2, 3, stages=5, prologue=1, bits=False))
three = [weight(n, 600, 600) for n in (33, 3, 40)]
one_token.one_token(x(1, 600, F16), three, [None] * 3, "int4", True, 1)
gated(33, 600, F16, "int4", Launch(4, 2, stages=1))
gated(33, 600, F32, "fp4", Launch(4, 1, bits=False))
gated(8640, 3200, BF16, "int4")
few(33, 600, BF16, "int8")
few(4096, 4096, F16, "fp4")
few(16 * 400, 256, F32, "int4")
few(33, 1024, BF16, "int4", FewTokensLaunch(2, 2, stages=1, accumulator_sets=1, trigger_next_early=False))
for columns, group, activation, dtype in ((600, None, "fp4", F16), (1024, 128, "int8", F32)):
    weights, bias = weight(33, columns, group), torch.zeros(33)
    matrix.many_tokens(x(9, columns, dtype), weights, bias, activation, False, 1)
for activation, dtype in (("int4", BF16), ("top_k_int8", F32)):
    quantize.quantize(x(65, 600, dtype), activation, 1, False, interleaved=True)
names = "ring used again", "prologue", "int4x2", "bits"
assert seen >= {(name, value) for name in names for value in (True, False)}, seen
assert ("clipped", True) in seen
"""


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path, kernel_cache: Path):
    lines = [
        line.split(" | ") for line in compile_only.said_by(COMPILED, tmp_path, kernel_cache).splitlines()
    ]
    assert {name for name, *_ in lines} == {
        "_quantize_kernel", "one_token_kernel", "skipping_glu_kernel", "whole_glu_kernel",
        "few_tokens_kernel", "_unpack", "_multiply_kernel", "_grouped_kernel",
    }  # fmt: skip
    by_hand = [line for line in lines if "_token" in line[0] or "_glu" in line[0]]
    assert len(by_hand) == 17
    for name, count, *layouts in by_hand:
        assert int(count) >= 8 or name in ("one_token_kernel", "whole_glu_kernel")  # whose number `see` knows
        assert len(layouts) == 1
        assert "sizePerThread = [1], threadsPerWarp = [32]" in layouts[0]
