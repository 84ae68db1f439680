"""neuzip.delta: weights follow a training bit for bit, and nothing is written that is not the next state."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
import xxhash

from neuzip import delta
from neuzip.errors import FormatError, NeuzipError, UsageError, WouldOverwrite
from neuzip.formats.sparse_delta import HEADER_BYTES, SparseDeltaHeader
from neuzip.kernels.dtypes import DTYPES, torch_dtypes

Weights = dict[str, torch.Tensor]


def random_patterns(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Tensors of all patterns: NaNs with payloads, infinities, denormals and both zeros are among them."""
    rng = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, numel).astype(bool))
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(rng.integers(0, 256, numel * size, dtype=np.uint8)).view(dtype)


def state(step: int) -> Weights:
    """Weights of a few tensors after a step: a few of them change in each."""
    torch.manual_seed(7)
    weights = {
        "b": torch.randn(3, 2000),
        "a": torch.randn(70),
        "empty": torch.empty(0),
        "one": torch.ones(()),
    }
    for at in range(step):
        weights["b"].view(-1)[at::211] *= 1.01
        weights["a"][at] = -0.0
    return {name: t.to(torch.bfloat16) for name, t in weights.items()}


def bits(weights: Weights) -> dict[str, bytes]:
    return {
        name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in weights.items()
    }


def chain(steps: int) -> list[torch.Tensor]:
    """The deltas of some steps."""
    publisher = delta.Publisher(state(0))
    return [publisher.make(state(step + 1)) for step in range(steps)]


@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_of_every_dtype_is_restored(name: str) -> None:
    dtype = torch_dtypes()[name]
    old, new = ({"w": random_patterns(4500, dtype, seed)} for seed in (1, 2))
    same = {"w": old["w"].clone()}
    delta.apply(same, delta.make(old, new))
    assert bits(same) == bits(new)
    assert delta.apply(same, delta.make(same, same, number=5)).state.number == 5
    assert bits(same) == bits(new)


def test_zeros_of_both_signs_and_payloads_are_changes() -> None:
    old = torch.tensor([0x0000, 0x8000, 0x7FC0, 0x7F80, 0x0001], dtype=torch.uint16).view(torch.bfloat16)
    new = torch.tensor([0x8000, 0x0000, 0xFFC1, 0x7F81, 0x0000], dtype=torch.uint16).view(torch.bfloat16)
    weights = {"w": old.clone()}
    applied = delta.apply(weights, delta.make({"w": old}, {"w": new}))
    assert bits(weights) == bits({"w": new})
    assert applied.changed()["w"].tolist() == [0, 1, 2, 3, 4]


def test_a_follower_follows_and_says_what_changed() -> None:
    weights = state(0)
    publisher, follower = delta.Publisher(state(0), number=40), delta.Follower(weights)
    assert follower.state.number is None and follower.state.digest == publisher.state.digest
    for step in (1, 2, 3):
        new, before = state(step), bits(weights)
        applied = follower.apply(publisher.make(dict(reversed(new.items()))))
        assert bits(weights) == bits(new) and bits(weights) != before
        assert applied.state == follower.state == publisher.state and follower.state.number == 40 + step
        assert set(applied.changed()) == {"a", "b"}
    follower.check()


def test_a_publisher_takes_views_and_keeps_a_copy() -> None:
    weights, wide = {"w": torch.zeros(3, 5)}, torch.arange(30.0).reshape(5, 6)
    publisher, follower = delta.Publisher(weights), delta.Follower(weights)
    follower.apply(publisher.make({"w": wide.t()[::2]}))
    assert torch.equal(weights["w"], wide.t()[::2])
    message = publisher.make({"w": wide.t()[::2]})  # nothing changed since
    assert message.numel() == HEADER_BYTES + 4
    assert follower.apply(bytes(message.numpy())).state.number == 2


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((0, 2), "1 deltas between are missing"),
        ((0, 0), "already in state 1"),
        ((0, 1, 0), "already in state 2"),
    ],
    ids=["lost", "repeated", "out of order"],
)
def test_a_message_out_of_turn_is_noticed(order: tuple[int, ...], words: str) -> None:
    deltas, weights = chain(3), state(0)
    follower = delta.Follower(weights)
    for number in order[:-1]:
        follower.apply(deltas[number])
    before = bits(weights)
    with pytest.raises(delta.BrokenChain, match=words):
        follower.apply(deltas[order[-1]])
    assert bits(weights) == before
    for message in deltas[follower.state.number or 0 :]:
        follower.apply(message)
    assert bits(weights) == bits(state(3))


def test_every_damaged_bit_is_noticed() -> None:
    """In the header, the descriptors and the words: at least one bit of each byte, and all lengths."""
    message, weights = chain(1)[0], state(0)
    follower, before = delta.Follower(weights), bits(weights)
    for at in range(message.numel()):
        damaged = message.clone()
        damaged[at] ^= 1 << at % 8
        with pytest.raises((FormatError, delta.BrokenChain)):
            follower.apply(damaged)
    for length in (0, 1, 63, 64, 68, message.numel() - 1):
        with pytest.raises(FormatError, match="bytes"):
            follower.apply(message[:length])
    with pytest.raises(FormatError, match="bytes"):
        follower.apply(torch.cat([message, message[:4]]))
    assert bits(weights) == before and follower.state.number is None
    follower.apply(message)
    assert bits(weights) == bits(state(1))


def rewritten(message: torch.Tensor, **changes: int) -> torch.Tensor:
    """A message whose header says something else, with the right hash."""
    fields = vars(SparseDeltaHeader.decode(message[:HEADER_BYTES].numpy().tobytes(), "")) | changes
    head = SparseDeltaHeader(**fields).encode()
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), message[HEADER_BYTES:]])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"number": 0}, FormatError),
        ({"number": 1 << 63}, FormatError),
        ({"number": 3}, delta.BrokenChain),
        ({"blocks": 1 << 31}, FormatError),
        ({"blocks": (1 << 31) - 1}, FormatError),
        ({"words": (1 << 64) - 1}, FormatError),
        ({"words": 8576 * 6}, FormatError),
        ({"start": 5}, delta.BrokenChain),
        ({"end": 5}, delta.BrokenChain),
        ({"layout": 5}, delta.BrokenChain),
    ],
)
def test_a_header_that_lies_is_refused(changes: dict[str, int], error: type[NeuzipError]) -> None:
    weights = state(0)
    follower, message = delta.Follower(weights, number=0), chain(1)[0]
    with pytest.raises(error):
        follower.apply(rewritten(message, **changes))
    assert bits(weights) == bits(state(0))
    follower.apply(rewritten(message))


def test_blocks_and_words_can_not_be_traded() -> None:
    """The length of the message is right, and the number of blocks is not that of the weights."""
    weights, message = state(0), chain(1)[0]
    header = SparseDeltaHeader.decode(message[:HEADER_BYTES].numpy().tobytes(), "")
    with pytest.raises(delta.BrokenChain, match="names, dtypes or shapes"):
        delta.apply(weights, rewritten(message, blocks=header.blocks + 1, words=header.words - 1))
    assert bits(weights) == bits(state(0))


def test_other_versions_and_other_bytes_are_refused() -> None:
    fields = struct.pack("<8s6Q", b"nzdelta\x02", 1, 0, 0, 0, 0, 0)
    later = fields + xxhash.xxh3_64_digest(fields)[::-1]
    for message in (later, b"\0" * 64, b"nzdelta\x01" + b"\0" * 56):
        with pytest.raises(FormatError):
            delta.apply({}, message)
    with pytest.raises(FormatError, match="uint8"):
        delta.apply({}, torch.zeros(64))
    assert delta.apply({}, delta.make({}, {})).changed() == {}


def test_weights_that_something_else_changed_are_noticed() -> None:
    deltas, weights = chain(2), state(0)
    follower = delta.Follower(weights)
    follower.apply(deltas[0])
    right = weights["b"].clone()
    weights["b"].view(-1)[1] += 1  # a weight that the next delta changes
    before = bits(weights)
    with pytest.raises(delta.BrokenChain, match="something else has changed the weights"):
        follower.apply(deltas[1])
    assert bits(weights) == before
    weights["b"].copy_(right)
    weights["b"].view(-1)[2] += 1  # one that it does not change: seen by those who read all weights
    follower.apply(deltas[1])
    with pytest.raises(NeuzipError, match="something else"):
        follower.check()
    with pytest.raises(delta.BrokenChain, match="starts from the digest"):
        delta.apply(weights, deltas[1])


def test_weights_that_have_no_delta_are_refused() -> None:
    tied = torch.zeros(8)
    with pytest.raises(UsageError, match="shares memory with 'a'"):
        delta.Follower({"a": tied, "b": tied[4:]})
    with pytest.raises(UsageError, match="is not contiguous"):
        delta.Follower({"a": torch.zeros(4, 4).t()})
    with pytest.raises(UsageError, match="dtype complex128"):
        delta.Publisher({"a": torch.zeros(4, dtype=torch.complex128)})
    with pytest.raises(UsageError, match="is on meta"):
        delta.Publisher({"a": tied, "b": torch.zeros(4, device="meta")})
    for other in ({"a": tied[:4]}, {"b": tied}, {"a": tied.to(torch.int32)}, {}):
        with pytest.raises(UsageError, match="in `old` it is"):
            delta.make({"a": tied}, other)
        with pytest.raises((UsageError, delta.BrokenChain)):
            delta.apply(other, delta.make({"a": tied}, {"a": tied}))


def test_a_folder_carries_a_chain(tmp_path: Path) -> None:
    folder = delta.DeltaFolder(tmp_path / "deltas")
    weights, late, later = state(0), state(2), state(4)
    follower = delta.Follower(weights)
    assert folder.follow(follower) == 0
    deltas = chain(4)
    for message in deltas[:3]:
        path = folder.write(message)
    assert path.name == "00000003.delta" and folder.numbers() == [1, 2, 3]
    assert folder.follow(follower, last=2) == 2 and bits(weights) == bits(state(2))
    assert folder.follow(delta.Follower(late)) == 1 and bits(late) == bits(state(3))  # found by its digest
    with pytest.raises(delta.BrokenChain, match="has no deltas from state 3"):
        folder.follow(follower, last=4)
    assert bits(weights) == bits(state(3))
    folder.write(deltas[3])
    assert folder.follow(follower) == 1 and bits(weights) == bits(later)
    assert folder.follow(delta.Follower(later), last=4) == 0
    with pytest.raises(delta.BrokenChain, match="no delta starts from the weights"):
        folder.follow(delta.Follower({"w": torch.zeros(3)}))


def test_a_folder_with_a_gap_or_a_wrong_file_is_noticed(tmp_path: Path) -> None:
    folder = delta.DeltaFolder(tmp_path)
    for message in chain(4):
        folder.write(message)
    with pytest.raises(WouldOverwrite, match=r"00000004\.delta: exists"):
        folder.write(chain(4)[3])
    weights = state(0)
    follower = delta.Follower(weights)
    (tmp_path / "00000002.delta").rename(tmp_path / "elsewhere")
    with pytest.raises(delta.BrokenChain, match=r"00000003\.delta: gives state 3.*1 deltas between"):
        folder.follow(follower)
    assert bits(weights) == bits(state(1))
    (tmp_path / "00000002.delta").write_bytes((tmp_path / "00000003.delta").read_bytes())
    with pytest.raises(FormatError, match="wrong name"):
        folder.follow(follower)
    header = folder.header(3)
    huge = SparseDeltaHeader(2, header.start, header.end, 5, 1 << 30, 1 << 31)  # of other weights
    with open(tmp_path / "00000002.delta", "wb") as file:
        file.write(huge.encode())
        file.truncate(huge.nbytes)  # 12 GB that take no room on the disk
    with pytest.raises(delta.BrokenChain, match="names, dtypes or shapes"):
        folder.follow(follower)
    (tmp_path / "00000002.delta").write_bytes((tmp_path / "elsewhere").read_bytes()[:-1])
    with pytest.raises(FormatError, match="its header says"):
        folder.follow(follower)
    assert bits(weights) == bits(state(1))
    (tmp_path / "elsewhere").rename(tmp_path / "00000002.delta")
    assert folder.follow(follower) == 3 and bits(weights) == bits(state(4))


@pytest.mark.slow
def test_weights_of_another_process_follow_a_training(
    forks: forked.Server, tmp_path: Path, root: Path
) -> None:
    """15 steps of the built-in model, one matrix also in fp8, by gloo; then a lost and a repeated delta."""
    script = root / "tests" / "support" / "weight_sync.py"
    process = forks.start(script, root / "eval/demo/checkpoint", cwd=tmp_path, ranks=2)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr[-3000:]
    lines = [line for line in stdout.splitlines() if line.startswith("engine: ")]
    assert lines == [
        "engine: 15 deltas, equal True",
        "engine: lost, unchanged True: 1 deltas between are missing",
        "engine: repeated, unchanged True: it was repeated or comes too late",
        "engine: state 17, equal True",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("make_on", ["cpu", "cuda"])
def test_gpu_and_cpu_make_and_apply_the_same_bytes(make_on: str) -> None:
    on: Callable[[Weights, str], Weights] = lambda ws, device: {n: w.to(device) for n, w in ws.items()}  # noqa: E731
    other = "cuda" if make_on == "cpu" else "cpu"
    old, new = on(state(0), make_on), on(state(3), make_on)
    message = delta.make(old, new)
    assert torch.equal(message.cpu(), delta.make(on(old, other), on(new, other)).cpu())
    weights = on(state(0), other)
    follower = delta.Follower(weights)
    damaged = message.clone()
    damaged[-2] ^= 1
    with pytest.raises((FormatError, delta.BrokenChain)):
        follower.apply(damaged)
    assert bits(on(weights, "cpu")) == bits(state(0))
    assert {n: c.tolist() for n, c in follower.apply(message).changed().items()} == {
        n: c.tolist() for n, c in delta.apply(old, message).changed().items()
    }
    assert bits(on(weights, "cpu")) == bits(on(old, "cpu")) == bits(state(3))
