"""What the CUDA driver is asked: captures, and streams on part of a GPU."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import triton
import triton.language as tl

from neuzip.runtime import driver


def test_nothing_is_captured_on_a_cpu() -> None:
    assert driver.capture_of(torch.device("cpu")) == 0


@triton.jit
def _where(out, PAUSE: tl.constexpr):
    """The multiprocessor of each program, which stays a while."""
    where = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )
    for _ in range(PAUSE):
        tl.debug_barrier()
    tl.store(out + tl.program_id(0), where)


def places(stream: torch.cuda.Stream, graph: bool) -> set[int]:
    """Which multiprocessors the programs of a large kernel run on."""
    out = torch.full((20_000,), -1, dtype=torch.int32, device="cuda")
    with torch.cuda.stream(stream):
        _where[(20_000,)](out, PAUSE=100)
    if graph:
        torch.cuda.synchronize()
        out.fill_(-1)
        recorded, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(recorded, stream=main):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                _where[(20_000,)](out, PAUSE=100)
            main.wait_stream(stream)
        recorded.replay()
    torch.cuda.synchronize()
    return set(out.tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_kernels_of_confined_streams_stay_there(graph: bool) -> None:
    device = torch.device("cuda", 0)
    (whole,) = driver.confined_streams(device, 1.0, 1)
    everywhere = places(whole, graph)
    assert len(everywhere) == torch.cuda.get_device_properties(device).multi_processor_count
    first, second = (places(stream, graph) for stream in driver.confined_streams(device, 0.8, 2))
    assert first == second  # so that the others stay free
    wanted = int(0.8 * len(everywhere)) // driver.EIGHT * driver.EIGHT
    assert first < everywhere and len(first) == wanted


class OldDriver:
    """CUDA 12.4: contexts, but no streams in them."""

    cuGreenCtxCreate = None  # noqa: N815


class FullDriver:
    """Contexts, and no stream more."""

    refused: ClassVar[list[int]] = []

    def cuDeviceGetDevResource(self, number: object, resource: Any, kind: int) -> int:  # noqa: N802
        resource._obj.multiprocessors = 132
        return 0

    def cuGreenCtxStreamCreate(self, *_: object) -> int:  # noqa: N802
        self.refused.append(2)
        return 2

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


@pytest.mark.parametrize("kind", [object, OldDriver, FullDriver])
def test_a_driver_without_such_streams_gives_those_of_the_whole_gpu(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(driver, "_driver", kind)
    driver._context.cache_clear()
    FullDriver.refused.clear()
    device = torch.device("cuda", 0)
    streams = driver.confined_streams(device, 0.5, 2)
    driver._context.cache_clear()
    assert streams == [device] * 2
    assert bool(FullDriver.refused) == (kind is FullDriver)
