"""Items that a list on the device chooses are decoded into slots of memory, and nothing else is written."""

from __future__ import annotations

import pytest
import torch
from ans_codes import resident

from neuzip.kernels.rans.chosen import CodedItems, can_choose, coded_items
from neuzip.kernels.rans.numbers import BLOCK

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = 0xA5


def weights(numel: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.05
    return values.to(DEVICE, dtype)


def check(items: CodedItems, matrices: list[list[torch.Tensor]], chosen: list[int], first: int = 0) -> None:
    """Decode into poisoned slots. matrices: dense, by matrix and item."""
    slots = len(chosen) - first + 1  # one more than items
    out = torch.full((slots * items.slot_bytes + 64,), POISON, dtype=torch.uint8, device=DEVICE)
    out = out[-out.data_ptr() % 16 :]
    items.decode(torch.tensor(chosen, dtype=torch.int32, device=DEVICE), first, out)
    for slot, item in enumerate([*chosen[first:], -1]):
        own = out[slot * items.slot_bytes : (slot + 1) * items.slot_bytes]
        if not 0 <= item < len(matrices[0]):
            assert (own == POISON).all()
            continue
        for region, dense in zip(items.regions, matrices, strict=True):
            decoded = own[region.start : region.start + region.nbytes]
            assert torch.equal(decoded, dense[item].view(torch.uint8))
    assert (out[slots * items.slot_bytes :] == POISON).all()


def test_items_that_are_listed_are_decoded() -> None:
    """Of two matrices: one in two parts and of two tensors, the other of another kind."""
    first = [weights(80, seed) for seed in range(4)]
    second = [weights(48, 10 + seed, torch.float16) for seed in range(4)]
    tensors = [resident(torch.cat(first[i : i + 2]), 0, 24, 80, 104, 160) for i in (0, 2)]
    chunks = [[(tensors[i // 2], i % 2 * 2 + part) for part in (0, 1)] for i in range(4)]
    one = resident(torch.cat(second), *range(0, 193, 48))
    items = coded_items([chunks, [[(one, i)] for i in range(4)]])
    assert len({launch.kind for launch in items.launches}) == 2
    check(items, [first, second], [3, -1, 0, 1, 7])
    check(items, [first, second], [3, 2, 1], first=1)


@pytest.mark.slow
def test_items_that_do_not_begin_with_a_block() -> None:
    """Margins take what is decoded beside them."""
    size = (BLOCK + 800) // 2
    both = weights(2 * size, 1)
    items = coded_items([[[(resident(both, 0, size, 2 * size), i)] for i in range(2)]])
    assert [(one.ragged, one.rows.tolist()[1][0][1]) for one in items.launches] == [
        (False, 2 * size), (True, 2 * size)
    ]  # fmt: skip
    check(items, [[both[:size], both[size:]]], [1, -1, 0])


def test_parts_that_are_not_aligned_are_refused() -> None:
    tensor = resident(weights(60, 0), 0, 20, 40, 60)
    assert not can_choose([[[(tensor, 0)]]])
    with pytest.raises(ValueError, match="multiples of 16"):
        coded_items([[[(tensor, 0)]]])
    whole = coded_items([[[(resident(weights(64, 0), 0, 64), 0)]]])
    memory = torch.empty(2 * whole.slot_bytes, dtype=torch.uint8, device=DEVICE)
    memory = memory[1 - memory.data_ptr() % 2 :]
    with pytest.raises(ValueError, match="not aligned"):
        whole.decode(torch.zeros(1, dtype=torch.int32, device=DEVICE), 0, memory)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [4 * BLOCK, 3 * BLOCK + 1000, 40 * BLOCK + 8])
def test_real_items_in_a_graph_with_other_lists(size: int) -> None:
    dense = [weights(size, seed) for seed in range(6)]
    down = [weights(size // 2 // 8 * 8, 10 + seed) for seed in range(6)]
    chunks = []
    for matrix in (dense, down):
        bounds = [sum(m.numel() for m in matrix[:i]) for i in range(4)]
        tensors = [resident(torch.cat(matrix[i : i + 3]), *bounds) for i in (0, 3)]
        chunks.append([[(tensors[i // 3], i % 3)] for i in range(6)])
    items = coded_items(chunks)
    chosen = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(4 * items.slot_bytes, dtype=torch.uint8, device=DEVICE)
    items.decode(chosen, 0, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        items.decode(chosen, 0, out)
    for listed in ([0, 1, 2, 3], [5, -1, -1, -1], [4, 4, 5, 0], [-1, -1, -1, -1]):
        chosen.copy_(torch.tensor(listed))
        out.fill_(POISON)
        graph.replay()
        for slot, item in enumerate(listed):
            own = out[slot * items.slot_bytes : (slot + 1) * items.slot_bytes]
            for region, matrix in zip(items.regions, (dense, down), strict=True):
                decoded = own[region.start : region.start + region.nbytes]
                assert item >= 0 or (decoded == POISON).all()
                assert item < 0 or torch.equal(decoded, matrix[item].view(torch.uint8))


@pytest.mark.parametrize("moved", [False, True])
def test_streams_in_host_memory_are_decoded(moved: bool) -> None:
    """By themselves and by a list, beside others on the device; tables may be moved."""
    dense = [weights(80, seed) for seed in range(4)]
    tensors = [resident(torch.cat(dense[i : i + 2]), 0, 80, 160) for i in (0, 2)]
    host = tensors[1].offloaded()
    assert host.offloaded() is host and host.host is not None
    assert host.nbytes + host.host_bytes == tensors[1].nbytes and host.host_bytes > 160
    tensors[1].memory.fill_(0)
    if moved:
        host, before = host.on(host.memory.clone()), host
        before.memory.fill_(0)
    bits, errors = host.decode(1)
    assert torch.equal(bits.view(torch.uint8), dense[3].view(torch.uint8)) and errors.tolist() == [0]
    items = coded_items([[[((tensors[0], host)[i // 2], i % 2)] for i in range(4)]])
    assert {id(m) for m in (*tensors[0].memories, *host.memories)} < {id(m) for m in items.sources}
    check(items, [dense], [3, 0, -1, 2])
