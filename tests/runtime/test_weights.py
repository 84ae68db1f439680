"""Compressed weights as tensors: the same values as dense ones in every use, and frozen."""

from __future__ import annotations

import copy
import gc
import io
import operator
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from bits import same_bits
from torch import nn
from transformers.pytorch_utils import Conv1D

from neuzip.errors import NeuzipError
from neuzip.kernels.float_fields import FloatFormat
from neuzip.kernels.packed_linear import ops as packed_ops
from neuzip.kernels.packed_linear.triton import linear as triton_linear
from neuzip.kernels.rans.coded import TOGETHER
from neuzip.kernels.rans.triton import encode as triton_encode
from neuzip.kernels.rans.triton import warp
from neuzip.runtime import buffers
from neuzip.runtime.weights import AnsWeight, CompressedWeight, PackedWeight, ans, base

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

OF: dict[str, Callable[..., CompressedWeight]] = {
    "packed": PackedWeight.of,
    "exact": lambda dense, transposed=False: PackedWeight.of(dense, transposed, exact=True),
    "ans": lambda dense, transposed=False: AnsWeight.of(dense),
}
EVERY = pytest.mark.parametrize("kind", OF)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    return values.to(dtype).to(DEVICE)


def check(kind: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, unless a kernel of ours multiplied: then within rounding."""
    assert type(got) is torch.Tensor
    if kind == "packed" and DEVICE.type == "cuda":
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)
    else:
        assert same_bits(got, expected)


def frozen(weight: CompressedWeight) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


@EVERY
@pytest.mark.parametrize("shape", [(1, 1), (24, 40), (3, 50), (2, 8, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_gives_the_bits_back(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    patterns = random(*shape, dtype=dtype).view(torch.int16)
    special = torch.tensor([0, -0x8000, 0x7F81, -0x7F, 1, 0x7F80, -1], dtype=torch.int16, device=DEVICE)
    patterns.view(-1)[: special.numel()] = special[: patterns.numel()]
    dense = patterns.view(dtype)
    weight = OF[kind](dense)
    assert (weight.shape, weight.dtype, weight.device, weight.stride()) == (
        dense.shape, dense.dtype, dense.device, dense.stride()
    )  # fmt: skip
    assert same_bits(weight.dense(), dense)
    assert same_bits(weight.mT.dense(), dense.mT)
    if kind != "ans":
        flipped = OF[kind](dense, True)
        assert flipped.shape == dense.shape
        assert same_bits(flipped.dense(), dense)


def test_fp32_is_coded() -> None:
    dense = random(9, 50, dtype=torch.float32)
    assert same_bits(AnsWeight.of(dense).dense(), dense)


def test_an_encoder_that_is_wrong_for_one_expert_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are decoded TOGETHER in a launch, and all of them are compared."""
    dense, encode, lists = random(TOGETHER + 1, 8, 33), triton_encode.encode, []
    decode = ans.decode_together
    monkeypatch.setattr(
        ans, "decode_together", lambda chunks, outs: lists.append(len(chunks)) or decode(chunks, outs)
    )
    AnsWeight.of(dense)
    assert lists == [TOGETHER, 1]

    def changed(bits: torch.Tensor, fmt: FloatFormat) -> triton_encode.GpuEncoded:
        other = bits.clone()
        other[-1] ^= 1
        return encode(other, fmt)

    monkeypatch.setattr(triton_encode, "encode", changed)
    with pytest.raises(AssertionError, match="is not what it was"):
        AnsWeight.of(dense)


@EVERY
def test_mantissa_bits_that_are_not_used_take_no_memory(kind: str) -> None:
    dense = random(8, 512)
    rounded = (dense.view(torch.int16) & -16).view(torch.bfloat16)
    weight, full = OF[kind](rounded), OF[kind](dense)
    assert full.stored_bytes - weight.stored_bytes >= 4 * dense.numel() // 8 - 64
    assert same_bits(weight.dense(), rounded)


@EVERY
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_every_way_to_multiply(kind: str, mode: Callable[[], torch.no_grad]) -> None:
    dense, bias = random(24, 40), random(24, seed=1)
    weight = frozen(OF[kind](dense))
    with mode():
        for shape in ((40,), (5, 40), (2, 3, 40), (0, 40)):
            x = random(*shape, seed=2)
            check(kind, F.linear(x, weight), F.linear(x, dense))
            check(kind, F.linear(x, weight, bias), F.linear(x, dense, bias))
            check(kind, x @ weight.t(), x @ dense.t())
            check(kind, torch.matmul(x, weight.mT), torch.matmul(x, dense.mT))
        x, y = random(5, 40, seed=3), random(5, 24, seed=4)
        check(kind, torch.addmm(bias, x, weight.t()), torch.addmm(bias, x, dense.t()))
        check(kind, torch.addmm(bias, x, weight.t(), beta=2), torch.addmm(bias, x, dense.t(), beta=2))
        check(kind, x.mm(weight.T), x.mm(dense.T))
        check("", y @ weight, y @ dense)
        check("", weight @ x.t(), dense @ x.t())


@EVERY
def test_conv1d_of_transformers(kind: str) -> None:
    layer = Conv1D(24, 40).to(DEVICE, torch.bfloat16)
    layer.bias.data.copy_(random(24))
    x = random(2, 5, 40, seed=1)
    expected = layer(x).detach()
    layer.weight = frozen(OF[kind](layer.weight, True))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            check(kind, layer(x), expected)
    check(kind, layer(x).detach(), expected)


@pytest.mark.parametrize("kind", ["packed", "exact"])
def test_a_packed_embedding_decodes_only_the_rows_looked_up(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = random(50, 40)
    layer = nn.Embedding(50, 40, padding_idx=3, _weight=dense.clone())
    layer.weight = frozen(OF[kind](dense))
    monkeypatch.setattr(packed_ops, "decode", None)
    ids = torch.tensor([[1, 3], [49, 0]], device=DEVICE)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert same_bits(layer(ids), dense[ids])
            assert same_bits(layer(ids.int()), dense[ids])
            assert same_bits(layer.weight[ids], dense[ids])
            assert same_bits(layer.weight[ids - 50], dense[ids - 50])


def test_an_embedding_may_be_coded() -> None:
    dense, ids = random(50, 40), torch.tensor([3, 7, 3], device=DEVICE)
    assert same_bits(F.embedding(ids, AnsWeight.of(dense)), dense[ids])


@pytest.mark.parametrize(
    ("kind", "transposed"),
    [("packed", False), ("packed", True), ("exact", False), ("exact", True), ("ans", False)],
)
def test_experts(kind: str, transposed: bool) -> None:
    dense = random(4, 16, 40)
    weight = frozen(OF[kind](dense, transposed))
    x = random(5, 16 if transposed else 40, seed=1)
    assert len(weight) == 4
    for number in (0, 3, -1, torch.tensor(1, device=DEVICE)):
        expert = weight[number]
        assert type(expert) is type(weight)
        assert same_bits(expert.dense(), dense[number])
        if transposed:
            check(kind, x @ expert, x @ dense[number])
        else:
            check(kind, F.linear(x, expert), F.linear(x, dense[number]))
    for parts in (list(weight), weight.unbind(), weight.unbind(-3)):
        assert [same_bits(parts[i].dense(), dense[i]) for i in (0, -1)] == [True, True]
        assert len(parts) == 4
    ids = torch.tensor([2, 0, 2, -1], device=DEVICE)
    assert same_bits(weight[ids].contiguous(), dense[ids])
    assert same_bits(weight.transpose(1, 2)[1].dense(), dense.transpose(1, 2)[1])
    assert same_bits(weight.permute(0, 2, 1)[1].dense(), dense.mT[1])
    assert same_bits(weight[1:3].contiguous(), dense[1:3])
    for index in (4, -5):
        with pytest.raises(IndexError):
            weight[index]


@pytest.mark.parametrize(("out", "number"), [(16, 1), (16, 2), (32, 2), (40, 2), (24, 2), (24, 0)])
def test_the_kernel_takes_an_expert_out_of_all(out: int, number: int) -> None:
    """Where its rows begin with a tile, with its neighbours' weights in the last one."""
    dense, x = random(3, out, 40), random(4, 40, seed=1)
    dense[:, ::3, ::7] *= 2.0**20  # escapes
    x[2:, ::7] = 0  # or they outweigh the others
    y = triton_linear.linear(x, PackedWeight.of(dense)[number]._own()).double()
    wide, matrix = x.double(), dense[number].double()
    assert ((y - wide @ matrix.t()).abs() <= wide.abs() @ matrix.t().abs() * 2**-8).all()


def test_products_with_an_expert_share_their_launches() -> None:
    weight = PackedWeight.of(random(3, 32, 128))
    assert weight[1]._own() is weight[1]._own()
    assert weight[1]._own() is not weight[2]._own()
    assert same_bits(packed_ops.decode(weight[2]._own()), weight[2].dense())


@pytest.mark.parametrize("kind", ["packed", "exact"])
def test_an_expert_has_no_rows_of_its_neighbours(kind: str) -> None:
    dense = random(3, 8, 64)
    weight = OF[kind](dense)
    for number in range(3):
        expert = frozen(weight[number])
        for ids in ([0, 7, 3], [[1], [7]]):
            index = torch.tensor(ids, device=DEVICE)
            assert same_bits(F.embedding(index, expert), dense[number][index])
            assert same_bits(expert[index - 8], dense[number][index])
        for row in (8, -1, 17, -9):
            assert_no_row(partial(F.embedding, torch.tensor([row], device=DEVICE), expert))
        for row in (8, -9):
            assert_no_row(partial(operator.getitem, expert, torch.tensor([row], device=DEVICE)))


def assert_no_row(look_up: Callable[[], torch.Tensor]) -> None:
    if DEVICE.type == "cuda":
        assert look_up().isnan().all()
    else:
        with pytest.raises(IndexError):
            look_up()


def test_gradients_reach_a_packed_embedding_that_asks_for_them() -> None:
    dense, ids = random(50, 40), torch.tensor([3, 7, 3], device=DEVICE)
    weight = frozen(PackedWeight.of(dense)).requires_grad_()
    rows = F.embedding(ids, weight)
    assert rows.requires_grad and same_bits(rows.detach(), dense[ids])


@EVERY
def test_gradients_flow_through(kind: str) -> None:
    dense, bias = random(24, 40), random(24, seed=1).requires_grad_()
    weight, x = frozen(OF[kind](dense)), random(3, 5, 40, seed=2).requires_grad_()
    for operation in (
        lambda w: F.linear(x, w, bias),
        lambda w: x @ w.t() + bias,
        lambda w: torch.addmm(bias, x[0], w.t()),
    ):
        gradients = []
        for w in (weight, dense):
            operation(w).float().square().sum().backward()
            gradients.append((x.grad, bias.grad))
            x.grad = bias.grad = None
        for got, expected in zip(*gradients, strict=True):
            assert got is not None and expected is not None
            check(kind, got, expected)


@EVERY
def test_autocast_casts_as_for_a_dense_weight(kind: str) -> None:
    dense, x = random(24, 40), random(5, 40, seed=1).float().requires_grad_()
    weight = frozen(OF[kind](dense))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(DEVICE.type, dtype):
            check(kind, F.linear(x, weight).detach(), F.linear(x, dense).detach())


@EVERY
def test_modules_take_them_along(kind: str) -> None:
    """deepcopy, state_dict, assigning, moving: compressed all the while, and ties stay."""
    dense, x = random(24, 40), random(5, 40, seed=1)
    model = nn.ModuleDict({"head": nn.Linear(40, 24, bias=False), "tied": nn.Linear(40, 24, bias=False)})
    model["head"].weight = model["tied"].weight = weight = frozen(OF[kind](dense))
    assert [*model.parameters()] == [weight]
    expected = F.linear(x, dense)
    for other in (
        copy.deepcopy(model),
        copy.deepcopy(model).to(DEVICE),
        copy.deepcopy(model).to(torch.bfloat16),
    ):
        assert other["head"].weight is other["tied"].weight
        assert isinstance(other["head"].weight, nn.Parameter)
        assert not other["head"].weight.requires_grad
        check(kind, other["tied"](x), expected)
    state = model.state_dict()
    assert type(state["head.weight"]) is type(weight)
    fresh = nn.ModuleDict({"head": nn.Linear(40, 24, bias=False), "tied": nn.Linear(40, 24, bias=False)})
    fresh.requires_grad_(False).load_state_dict(state, assign=True)
    check(kind, fresh["head"](x), expected)
    for made in (
        weight.clone(),
        weight.detach(),
        weight.data,
        type(weight)(weight),
        weight.to(DEVICE, copy=True),
    ):
        assert type(made) is type(weight)
        assert same_bits(made.dense(), dense)
    assert isinstance(type(weight)(weight), nn.Parameter)


@EVERY
def test_another_dtype_is_dense(kind: str) -> None:
    dense = random(24, 40)
    weight = OF[kind](dense)
    made = weight.float()
    assert type(made) is torch.Tensor
    assert same_bits(made, dense.float())


@EVERY
def test_no_module_changes_its_dtype_in_place(kind: str) -> None:
    """So that none becomes dense unseen; moving it is another matter."""
    dense = random(24, 40)
    layer = nn.Linear(40, 24, bias=False)
    layer.weight = weight = frozen(OF[kind](dense))
    for cast in (layer.float, layer.half, lambda: layer.to(DEVICE, torch.float32)):
        with pytest.raises(NeuzipError, match=r"cannot become torch.float\d\d") as refusal:
            cast()
        assert "model.dequantize()" in (refusal.value.hint or "")
        assert layer.weight is weight and same_bits(weight.dense(), dense)
    layer.to(DEVICE, torch.bfloat16)
    assert type(layer.weight) is type(OF[kind](dense)) and same_bits(layer.weight.dense(), dense)


@EVERY
def test_each_weight_has_an_address(kind: str) -> None:
    """That of its memory, which tied ones share."""
    weight, other = frozen(OF[kind](random(24, 40))), OF[kind](random(24, 40))
    addresses = {tensor.data_ptr() for tensor in (weight, weight.detach(), weight.t(), weight.data)}
    assert len({*addresses, 0, other.data_ptr(), weight.clone().data_ptr()}) == 4


@EVERY
def test_assigning_data_replaces_the_weight_everywhere(kind: str) -> None:
    weight, other = frozen(OF[kind](random(24, 40))), random(24, 40, seed=1)
    tied = [weight]
    weight.data = other
    assert type(tied[0]) is nn.Parameter
    assert same_bits(weight.detach(), other)


@EVERY
def test_a_mark_on_the_meta_device_is_an_ordinary_parameter(kind: str) -> None:
    """accelerate puts one in the place of a weight that is in host memory, by the class of the parameter."""
    weight = OF[kind](random(8, 64))
    mark = type(weight)(weight.to("meta"), requires_grad=False)
    assert type(mark) is nn.Parameter and mark.is_meta and mark.shape == weight.shape
    with pytest.raises(TypeError, match="takes one"):
        type(weight)(weight.dense())


@EVERY
def test_writing_and_pickling_are_refused(kind: str) -> None:
    dense = random(4, 8)
    weight = frozen(OF[kind](dense))

    def assign() -> None:
        weight[0] = 1

    for write in (
        weight.zero_,
        lambda: weight.copy_(dense),
        lambda: nn.init.normal_(weight),
        lambda: weight.data.mul_(2),
        lambda: torch.add(dense, 1, out=weight),
        lambda: torch._foreach_add_([weight], 1),
        assign,
    ):
        with pytest.raises(NeuzipError, match="frozen"):
            write()
    with pytest.raises(NeuzipError, match="pickled"):
        torch.save(weight, io.BytesIO())
    assert same_bits(weight.dense(), dense)


@EVERY
def test_other_operations_see_a_dense_tensor(kind: str) -> None:
    dense = random(24, 40)
    weight = frozen(OF[kind](dense))
    assert same_bits(weight + 1, dense + 1)
    assert same_bits(weight[2:5, ::2].contiguous(), dense[2:5, ::2].contiguous())
    assert same_bits(torch.cat([weight, dense]), torch.cat([dense, dense]))
    assert torch.equal(weight, dense)
    target = torch.empty_like(dense)
    target.copy_(weight)
    assert same_bits(target, dense)
    batch = random(3, 40, 5)
    assert same_bits(torch.bmm(weight.expand(3, 24, 40), batch), torch.bmm(dense.expand(3, 24, 40), batch))
    assert type(weight).__name__ in repr(weight) and "bits a weight" in repr(weight)


@EVERY
def test_tensors_like_it_are_made_without_decoding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = OF[kind](random(24, 40))
    monkeypatch.setattr(type(weight), "_decode_all", None)
    for made in (torch.zeros_like(weight), weight.new_zeros(24, 40), torch.full_like(weight, 0)):
        assert (made.shape, made.dtype, made.device) == (weight.shape, weight.dtype, weight.device)
        assert not made.any()
    assert torch.empty_like(weight, device="meta").is_meta


@EVERY
@pytest.mark.parametrize("mode", ["no_grad", "grad"])
def test_compiled(kind: str, mode: str) -> None:
    """One graph, with gradients too, and the eager results."""
    torch._dynamo.reset()
    layer, table = nn.Linear(40, 24).to(DEVICE, torch.bfloat16), random(50, 40, seed=5)
    experts = random(3, 24, 24, seed=6)
    x = random(5, 40, seed=1).requires_grad_(mode == "grad")
    ids = torch.tensor([1, 2, 2, 40, 0], device=DEVICE)

    def run(weight: torch.Tensor, rows: torch.Tensor, all_experts: torch.Tensor) -> torch.Tensor:
        y = F.linear(x + F.embedding(ids, rows), weight, layer.bias)
        return F.linear(y, all_experts[1]) + y @ all_experts[2].t()

    dense = layer.weight.detach()
    arguments = [frozen(OF[kind](tensor)) for tensor in (dense, table, experts)]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(mode == "grad"):
        expected, got = run(dense, table, experts), compiled(*arguments)
    check(kind, got.detach(), expected.detach())
    if mode == "grad":
        (want,) = torch.autograd.grad(expected.float().sum(), x)
        (grad,) = torch.autograd.grad(got.float().sum(), x)
        check(kind, grad, want)


@pytest.mark.parametrize("kind", ["exact", "ans"])
def test_large_weights_are_decoded_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "LARGEST", 40 * 2 * 10)
    dense, bias, x = random(24, 40), random(24, seed=1), random(5, 40, seed=2)
    weight = OF[kind](dense)
    assert [(part.start, part.stop) for part in weight.parts] == [(0, 10), (10, 20), (20, 24)]
    torch.testing.assert_close(F.linear(x, weight, bias), F.linear(x, dense, bias))
    torch.testing.assert_close(x @ weight.t(), x @ dense.t())
    assert same_bits(weight.dense(), dense)
    assert same_bits(x[:, :24] @ weight, x[:, :24] @ dense)
    experts = random(3, 12, 40)
    weight = OF[kind](experts)
    assert [(part.start, part.stop) for part in weight[1].parts] == [(0, 10), (10, 12)]
    for number in range(3):
        assert same_bits(weight[number].dense(), experts[number])
        torch.testing.assert_close(F.linear(x, weight[number]), F.linear(x, experts[number]))


def test_small_experts_are_coded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """But decoded one by one."""
    monkeypatch.setattr(base, "LARGEST", 2 * 8 * 40 * 2)
    dense = random(5, 8, 40)
    weight = AnsWeight.of(dense)
    assert len(weight.residents) == 3
    assert [part.unit.dense().shape for part in weight.parts] == [(8, 40)] * 5
    assert all(same_bits(weight[i].dense(), dense[i]) for i in range(5))
    assert len(weight[3].residents) == 1


def test_codes_on_a_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = AnsWeight.of(random(4, 8)).cpu()
    monkeypatch.setattr(warp.INTERPRETED, "value", False)
    with pytest.raises(NeuzipError, match="cannot be decoded"):
        weight + 1


def test_what_cannot_be_compressed_is_refused() -> None:
    for of in OF.values():
        for shape in ((4,), (0, 4), (1, 2, 3, 4)):
            with pytest.raises(ValueError, match="matrix"):
                of(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE))
        with pytest.raises(TypeError):
            of(torch.zeros(4, 4, dtype=torch.int32, device=DEVICE))
    with pytest.raises(TypeError, match=r"PackedWeight\.of"):
        PackedWeight(torch.zeros(4, 4))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def fresh_buffers() -> None:
    buffers.release()


# Decoded to the ring of a device.


@pytest.mark.slow
def test_a_model_that_is_gone_is_not_kept() -> None:
    dense, x = random(24, 40), random(5, 40)
    first, second = (AnsWeight.of(dense) for _ in range(2))
    for _ in range(3):
        F.linear(x, first), F.linear(x, second)
    memory = weakref.ref(first.memory0)  # type: ignore[attr-defined]
    del first
    gc.collect()
    assert memory() is None
    assert same_bits(F.linear(x, second), F.linear(x, dense))


@pytest.mark.slow
def test_weights_of_a_model_are_decoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """AnsWeights and exact PackedWeights, experts among them, in a real order of use."""
    decoded: list[list[torch.Tensor]] = []
    matrices = [random(24, 40, seed=seed) for seed in range(3)]
    experts = random(2, 24, 40, seed=4)
    live = [AnsWeight.of(matrices[0]), PackedWeight.of(matrices[1], exact=True), AnsWeight.of(matrices[2])]
    all_experts = AnsWeight.of(experts)
    x = random(5, 40, seed=5)
    original = buffers._Ring._decode

    def spy(self: buffers._Ring, units: list[buffers.DecodeUnit], stream: object) -> None:
        decoded.append([unit.sources[0] for unit in units])
        original(self, units, stream)

    monkeypatch.setattr(buffers._Ring, "_decode", spy)
    monkeypatch.setattr(buffers, "CAPACITY", 2)  # not enough for all of them
    for _ in range(3):
        got = [F.linear(x, w) for w in (live[0], all_experts[1], live[1], live[2])]
        for y, w in zip(got, (matrices[0], experts[1], matrices[1], matrices[2]), strict=True):
            assert same_bits(y, F.linear(x, w))
    order = [live[0].memory0, all_experts.memory0, live[1].far_index, live[2].memory0]  # type: ignore[attr-defined]
    assert [id(t) for group in decoded for t in group][:12] == [id(t) for t in order * 3]
    assert [len(group) for group in decoded[:6]] == [1, 1, 1, 1, 3, 3]  # of an expert its block is decoded
    turned = [AnsWeight.of(matrix) for matrix in matrices * 3]  # as a Conv1D has them: x @ w
    short, bias = random(5, 24, seed=7), random(40, seed=8)
    for _ in range(2):
        decoded.clear()
        for w, matrix in zip(turned, matrices * 3, strict=True):
            assert same_bits(torch.addmm(bias, short, w), torch.addmm(bias, short, matrix))
    assert max(len(group) for group in decoded) == 4
    decoded.clear()
    many = random(base.AHEAD_ROWS + 1, 40, seed=6)
    for _ in range(2):
        for w, matrix in zip(live, matrices, strict=True):
            assert same_bits(F.linear(many, w), F.linear(many, matrix))
    assert decoded and all(len(group) == 1 for group in decoded)


# On a GPU.


@pytest.mark.gpu
def test_what_was_in_the_buffers_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin full of NaNs, in eager calls and in a graph."""
    original = buffers._Ring._empty
    monkeypatch.setattr(buffers._Ring, "_empty", lambda self, size: original(self, size).fill_(0xFF))
    matrices = [random(rows, 1024, seed=rows) for rows in (1000, 256, 1024, 3001, 17)]
    live = [OF["ans" if i % 3 else "exact"](m) for i, m in enumerate(matrices)]
    x = random(4, 1024, seed=1)
    expected = [F.linear(x, m) for m in matrices]
    with torch.no_grad():
        for _ in range(3):
            for w, y in zip(live, expected, strict=True):
                assert same_bits(F.linear(x, w), y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [F.linear(x, w) for w in live]
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(same_bits(out, y) for out, y in zip(outs, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 2048])
@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096)])
def test_products_of_real_shapes_are_the_dense_ones_bit_for_bit(shape: tuple[int, int], rows: int) -> None:
    """The last is larger than LARGEST: its products are those of parts."""
    dense = (torch.randn(shape, device=DEVICE) * 0.02).bfloat16()
    x = torch.randn(rows, shape[1], device=DEVICE).bfloat16()
    weight = AnsWeight.of(dense)
    with torch.no_grad():
        assert same_bits(F.linear(x, weight), F.linear(x, dense))


@pytest.mark.gpu
def test_memory_is_that_of_the_codes_and_a_room() -> None:
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    live = [AnsWeight.of((torch.randn(8192, 8192, device=DEVICE) * 0.02).bfloat16()) for _ in range(6)]
    x = random(1, 8192)
    stored = sum(w.stored_bytes for w in live)
    assert stored < 0.67 * 6 * 8192 * 8192 * 2
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        for _ in range(3):
            for w in live:
                F.linear(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for w in live:
                x_out = F.linear(x, w)
        graph.replay()
    torch.cuda.synchronize()
    cublas = 96 << 20  # what it takes for each stream
    room = int(buffers.CAPACITY * 8192 * 8192 * 2)
    assert torch.cuda.max_memory_allocated() - before < stored + room + cublas
    assert x_out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OF)
def test_compiled_by_inductor(kind: str) -> None:
    torch._dynamo.reset()
    dense, x = random(512, 256), random(5, 256, seed=1)
    layer = nn.Linear(256, 512, bias=False)
    layer.weight = frozen(OF[kind](dense))
    for mode in ("default", "reduce-overhead"):
        compiled = torch.compile(layer, fullgraph=True, mode=mode)
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(compiled(x), F.linear(x, dense), rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OF)
def test_to_the_cpu_and_back(kind: str) -> None:
    dense = random(24, 40)
    layer = nn.Linear(40, 24, bias=False)
    layer.weight = frozen(OF[kind](dense))
    layer.cpu()
    assert layer.weight.device.type == "cpu"
    assert type(layer.weight) is type(OF[kind](dense))
    layer.cuda()
    assert same_bits(layer.weight.dense(), dense)
    x = random(5, 40, seed=1)
    check(kind, layer(x), F.linear(x, dense))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OF)
def test_on_a_device_that_is_not_the_current_one(kind: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    dense, x = random(2000, 400), random(5, 400, seed=1)
    layer = nn.Linear(400, 2000, bias=False)
    layer.weight = frozen(OF[kind](dense))
    layer.to("cuda:1")
    with torch.no_grad():
        for _ in range(4):
            check(kind, layer(x.to("cuda:1")).to("cuda:0"), F.linear(x, dense))
