"""Many tensors through the encoder: in order, several at a time, never more of them than fit in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from neuzip.errors import NeuzipError

from .encode_tensor import SMALL, TensorEncoder
from .plan import PlannedTensor
from .schemes import EncodedTensor
from .workers import Workers

LARGE_ON_GPU = 2
"""Large tensors on the way to a GPU, on it, or on their way back, however large they are."""

LARGE_TOGETHER = 1 << 26
"""Below so many bytes of large tensors on their way, more than LARGE_ON_GPU may be, to be coded together."""

LEADERS = 16
"""Threads for large tensors beside a GPU: one waits for each."""

PlannedAndEncoded = tuple[PlannedTensor, EncodedTensor]


def encode_in_order(
    encoder: TensorEncoder, planned: Iterable[PlannedTensor], workers: Workers, *, on_gpu: bool
) -> Iterator[PlannedAndEncoded]:
    """Code tensors: small ones side by side, a large one split among the workers.

    With `on_gpu` a large tensor goes to the GPU while the one before it is coded and comes back, and there
    are more of them at a time as long as all have LARGE_TOGETHER bytes at most.
    """
    pending: deque[tuple[PlannedTensor, bool, Future[EncodedTensor]]] = deque()

    def next_encoded() -> PlannedAndEncoded:
        tensor, _, future = pending.popleft()
        with explaining_compiler(tensor.tensor.name):
            return tensor, future.result()

    most = LEADERS if on_gpu else 1

    def is_full() -> bool:
        large = [tensor.tensor.info.nbytes for tensor, is_large, _ in pending if is_large]
        if len(large) == most or len(pending) > workers.waiting:
            return True
        return len(large) >= LARGE_ON_GPU and sum(large) >= LARGE_TOGETHER

    with ThreadPoolExecutor(most, thread_name_prefix="neuzip-large") as leaders:
        try:
            for tensor in planned:
                is_large = tensor.tensor.info.numel > SMALL
                if is_large:
                    pending.append((tensor, True, leaders.submit(encoder.encode, tensor, workers.map)))
                else:
                    pending.append((tensor, False, workers.submit(encoder.encode, tensor)))
                while is_full():
                    yield next_encoded()
            while pending:
                yield next_encoded()
        finally:
            for _, _, future in pending:
                future.cancel()


@contextmanager
def explaining_compiler(name: str) -> Iterator[None]:
    """Turn an OSError of coding `name` into a NeuzipError that names the cache of compiled kernels.

    Files of checkpoints raise errors of their own, so only that cache is left.
    """
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f": {error.filename}"
        raise NeuzipError(
            f"{name}: cannot be coded{where}: {error.strerror or error}",
            "where the folder of compiled kernels is full, TRITON_CACHE_DIR and NUMBA_CACHE_DIR name another",
        ) from error
