"""Workers of the test suite share the cores of a machine with a GPU; without a GPU each has one thread."""

from __future__ import annotations

import pytest
from worker_threads import worker_threads


@pytest.mark.parametrize(
    ("workers", "cores", "has_gpu", "threads"),
    [
        (None, 32, True, None),
        (16, 32, True, 2),
        (28, 32, True, 1),
        (64, 32, True, 1),
        (16, 32, False, 1),
        (None, 32, False, 1),
    ],
)
def test_threads_are_shared_out(workers: int | None, cores: int, has_gpu: bool, threads: int | None) -> None:
    environment = {} if workers is None else {"PYTEST_XDIST_WORKER_COUNT": str(workers)}
    assert worker_threads(environment, cores, has_gpu=has_gpu) == threads
