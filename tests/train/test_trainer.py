"""Training with weights that are held compressed: the same bits as training without, and as torch's own."""

from __future__ import annotations

import gc
import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import training
import transformers
from torch import Tensor, nn
from training import FOR_A_GPU, SIZES, VOCABULARY, batches, bits, llama, plain, trained

import neuzip
from neuzip.errors import NeuzipError, UsageError
from neuzip.kernels.linear_cross_entropy import linear_cross_entropy
from neuzip.kernels.quantizers.states import BLOCK, RngKey
from neuzip.train import compressed_array as holding
from neuzip.train import model_weights
from neuzip.train import states as kept
from neuzip.train.compressed_array import NumbaCompressedArray, TritonCompressedArray
from neuzip.train.deterministic import deterministic_algorithms
from neuzip.train.layer_prefetch import LayerBuffers
from neuzip.train.optimizers import SGD, AdamW, ParameterUpdate, optimizer_of
from neuzip.train.trainer import Trainer, train_compressed
from neuzip.train.weight_checksum import checksum

pytestmark = pytest.mark.usefixtures("one_thread")


# The same bits.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "tied", "steps"),
    [("sgd", False, 25), ("adamw8bit", True, 25), ("sgd", True, 5), ("adamw8bit", False, 5)],
    ids=["sgd-untied", "adamw8bit-tied", "sgd-tied", "adamw8bit-untied"],
)
def test_many_steps_give_the_bits_of_uncompressed_and_of_plain_training(
    optimizer: str, tied: bool, steps: int
) -> None:
    lr = 0.05 if optimizer == "sgd" else 1e-3
    ours = trained(llama(tied), steps, lr, optimizer=optimizer)
    assert trained(llama(tied), steps, lr, optimizer=optimizer, compressed=False) == ours
    assert plain(llama(tied), optimizer_of(optimizer), steps, lr) == ours
    assert ours[1] != bits(llama(tied))


@pytest.mark.parametrize("optimizer", ["sgd-stochastic", "adamw"])
def test_other_optimizers_give_the_bits_of_plain_training(optimizer: str) -> None:
    ours = trained(llama(), 5, 0.01, optimizer=optimizer)
    assert trained(llama(), 5, 0.01, optimizer=optimizer, compressed=False) == ours
    assert plain(llama(), optimizer_of(optimizer), 5, 0.01) == ours


@pytest.mark.slow
def test_steps_with_states_held_compressed_give_the_bits_of_plain_adamw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = trained(llama(True), 20, 1e-3, optimizer="adamw", optimizer_state="lossless")
    assert plain(llama(True), AdamW(), 20, 1e-3) == ours
    monkeypatch.setattr(kept, "PIECE", 3 * BLOCK)  # several pieces a matrix, the last one a part
    options: dict[str, Any] = {"optimizer": "adamw", "max_grad_norm": 0.3, "micro_batch_size": 1}
    assert trained(llama(), 3, 1e-3, optimizer_state="lossless", **options) == trained(
        llama(), 3, 1e-3, **options
    )


def test_states_held_compressed_are_smaller() -> None:
    sizes = {}
    for way in ("plain", "lossless"):
        trainer = train_compressed(
            llama(hidden_size=128, intermediate_size=256), "adamw", optimizer_state=way
        )  # type: ignore[arg-type]
        assert trainer.state_bytes == 0
        for batch in batches(3):
            trainer.step(batch, 1e-3)
        sizes[way] = trainer.state_bytes
    assert sizes["plain"] == 8 * sum(p.numel() for p in trainer.release().parameters())
    assert 0.7 * sizes["plain"] < sizes["lossless"] < 0.88 * sizes["plain"]


@pytest.mark.parametrize("triton", [False, True], ids=["by numba", "by triton"])
def test_states_in_coded_pieces_are_those_of_the_optimizer(
    triton: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they are cut, whatever chance they take, and once they have been on disk."""
    monkeypatch.setattr(kept, "PIECE", 1000 if triton else 2 * BLOCK)
    torch.manual_seed(0)
    where, optimizer = device if triton else torch.device("cpu"), AdamW(stochastic=True)
    one, gradient = (torch.randn(1000).bfloat16().to(where) for _ in range(2))
    other, dense = one.clone(), optimizer.new_states(1000, where)
    keeper = kept.StateStore(optimizer, where, compressed=True, triton=triton)
    keeper.reserve(1000)
    pieces: kept.StatePieces = []
    for step in (1, 2):
        keeper.update(pieces, ParameterUpdate(one, gradient * step, 0.01, RngKey(0, step, 0)))
        optimizer.update(ParameterUpdate(other, gradient * step, 0.01, RngKey(0, step, 0)), dense)
        whole = keeper.whole([pieces])
        assert torch.equal(one, other)
        assert all(torch.equal(whole[name], dense[name].cpu()) for name in ("first", "second"))
        keeper.restore([pieces], [1000], whole)
    assert isinstance(pieces[0]["first"], TritonCompressedArray if triton else NumbaCompressedArray)


@pytest.mark.usefixtures("recodes")
@pytest.mark.slow
def test_weights_coded_by_triton_are_the_same(device: torch.device) -> None:
    def small() -> Any:
        return llama(True, num_hidden_layers=1, hidden_size=16, intermediate_size=16).to(device)

    assert trained(small(), 1, optimizer="sgd", triton=True) == trained(small(), 1, compressed=False)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0, holding.CODING_SHARE], ids=["recoded", "from scratch"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw8bit"])
def test_a_gpu_gives_the_same_bits_compressed_or_not(
    optimizer: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "CODING_SHARE", share)
    lr = 1e-2 if optimizer == "sgd" else 1e-3
    ways = ({"ahead": True}, {"ahead": False}, {"compressed": False})
    with deterministic_algorithms():
        runs = [trained(llama(**FOR_A_GPU).cuda(), 50, lr, 4, optimizer=optimizer, **way) for way in ways]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.gpu
@pytest.mark.usefixtures("recodes")
def test_a_gpu_gives_the_same_bits_with_states_held_compressed() -> None:
    ways: tuple[dict[str, Any], ...] = ({"optimizer_state": "lossless"}, {"optimizer_state": "plain"})
    with deterministic_algorithms():
        runs = [trained(llama(**FOR_A_GPU).cuda(), 50, 1e-3, 4, optimizer="adamw", **way) for way in ways]
    assert runs[0] == runs[1]


@pytest.mark.gpu
def test_a_gpu_resumes_with_the_bits_of_a_run_that_was_not_stopped(tmp_path: Path) -> None:
    given = [batch.cuda() for batch in batches(6)]
    with deterministic_algorithms():
        whole = train_compressed(llama(**FOR_A_GPU).cuda(), "adamw8bit")
        losses = [whole.step(batch, 1e-3) for batch in given]
        first = train_compressed(llama(**FOR_A_GPU).cuda(), "adamw8bit")
        begun = [first.step(batch, 1e-3) for batch in given[:3]]
        first.save(tmp_path / "at3")
        again = train_compressed(llama(**FOR_A_GPU).cuda(), "adamw8bit")
        again.load(tmp_path / "at3")
        assert begun + [again.step(batch, 1e-3) for batch in given[3:]] == losses
    assert bits(again.release()) == bits(whole.release())


def test_deterministic_algorithms_are_on_within_and_as_before_outside() -> None:
    is_on = torch.are_deterministic_algorithms_enabled
    with deterministic_algorithms(False):
        assert not is_on()
    with deterministic_algorithms():
        assert is_on() and not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
        with deterministic_algorithms():
            pass
        assert is_on()
    assert not is_on()
    nothing_deterministic = torch.zeros(3)
    with pytest.raises(NeuzipError, match=r"deterministic: .*put_"), deterministic_algorithms():
        nothing_deterministic.put_(torch.tensor([0]), torch.ones(1))
    assert not is_on()
    with pytest.raises(RuntimeError, match="something else"), deterministic_algorithms():
        raise RuntimeError("something else")


@pytest.mark.parametrize(
    ("options", "eps"),
    [({}, None), ({"filter_gradients": True}, "auto"), ({"filter_gradients": False}, None)],
)
def test_the_filter_of_the_head_is_the_callers_choice(
    options: dict[str, bool], eps: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def noting(*arguments: Any, **options: Any) -> Any:
        given.append(options["filter_eps"])
        return linear_cross_entropy(*arguments, **options)

    monkeypatch.setattr("neuzip.train.head_loss.linear_cross_entropy", noting)
    train_compressed(llama(), **options).step(batches(1)[0], 1e-3)  # type: ignore[arg-type]
    assert given and set(given) == {eps}


@pytest.mark.slow
def test_decoding_ahead_and_coding_behind_changes_no_bit() -> None:
    for options in (
        {"optimizer": "adamw8bit", "max_grad_norm": 0.4},
        {"optimizer": "sgd", "micro_batch_size": 1},
    ):
        assert trained(llama(), 6, 0.01, ahead=True, **options) == trained(llama(), 6, 0.01, **options)


def test_a_layer_lies_in_the_same_buffer_forward_and_backward() -> None:
    class Unit:
        def __init__(self) -> None:
            self.places: list[int] = []

        def decode(self, buffer: Tensor) -> list[Tensor]:
            self.places.append(buffer.data_ptr())
            return [buffer]

        def encode(self, flats: list[Tensor]) -> None:
            pass

    for number in (4, 5):
        units = [Unit() for _ in range(number)]
        buffers = LayerBuffers(torch.device("cpu"), prefetch=True)
        buffers.reserve(64)
        for _ in range(2):
            for way in (units, units[::-1]):
                for unit, next_unit in zip(way, [*way[1:], None], strict=True):
                    with buffers.opened(unit, changes=way is not units, next_unit=next_unit):
                        pass
                buffers.wait()
        assert all(len(set(unit.places)) == 1 and len(unit.places) == 4 for unit in units)
        assert len({unit.places[0] for unit in units}) == 2


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("micro", [None, 1], ids=["at once", "in micro-batches"])
def test_parameters_are_made_once_and_left_without_gradients(ahead: bool, micro: int | None) -> None:
    """One for each place where a weight lies open, and nothing of a graph stays with them."""
    trainer = train_compressed(llama(), ahead=ahead, micro_batch_size=micro)
    layer = trainer.weights.layers[0]
    seen: list[nn.Parameter] = []
    nodes = 0

    def note(*_: Any) -> None:
        nonlocal nodes
        if layer.coded[0].parameter.is_meta:  # the shell's passes, without layers
            return
        for slot in layer.coded:
            seen.append(slot.parameter)
            if torch.is_grad_enabled():
                node = torch.autograd.graph.get_gradient_edge(slot.parameter).node
                assert not node.metadata, "a node of the step before is still there"
                node.metadata["met"] = True
                nodes += 1

    hollow = [slot.parameter for slot in layer.coded]
    hook = layer.module.register_forward_hook(note)
    for batch in batches(3):
        trainer.step(batch, 0.01)
        assert all(slot.parameter is one for slot, one in zip(layer.coded, hollow, strict=True))
    hook.remove()
    assert nodes == 3 * len(hollow) * (2 if micro else 1)
    assert len({id(one) for one in seen}) == len(hollow)
    assert all(one.grad is None and not one._backward_hooks for one in seen)
    assert all(not torch.autograd.graph.get_gradient_edge(one).node.metadata for one in seen)
    alive = [weakref.ref(one) for one in seen]
    seen.clear()
    trainer.release()
    gc.collect()
    assert not any(one() is not None for one in alive)


def test_a_layer_that_failed_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters are used again, by the next step."""
    trainer = train_compressed(llama(), optimizer="sgd")
    batch, again = batches(2)
    forward = type(trainer.weights.layers[1].module).forward

    def failing(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            raise MemoryError
        return forward(self, *arguments, **keywords)

    monkeypatch.setattr(type(trainer.weights.layers[1].module), "forward", failing)
    with pytest.raises(MemoryError):
        trainer.step(batch, 0.0)
    monkeypatch.undo()
    assert math.isfinite(trainer.step(again, 0.01))


@pytest.mark.parametrize("options", [{}, {"ahead": True}, {"triton": True}], ids=["numba", "ahead", "triton"])
def test_a_loss_in_inference_mode_leaves_nothing_that_cannot_be_trained(
    options: dict[str, Any], device: torch.device
) -> None:
    """Parameters, and what decodes, are made when they are first needed, and kept."""

    def small() -> Any:
        return llama(True, num_hidden_layers=1, hidden_size=16, intermediate_size=16).to(device)

    trainer = train_compressed(small(), optimizer="sgd", **options)
    (batch,) = batches(1)
    with torch.inference_mode():
        loss = trainer.loss(batch)
    assert trainer.step(batch, 0.05) == loss
    assert bits(trainer.release()) == trained(small(), 1, compressed=False)[1]


def test_checksums_tell_weights_apart() -> None:
    weight = torch.randn(9000).bfloat16()
    swapped = weight.clone()
    swapped[[3, 8500]] = weight[[8500, 3]]
    zero, negative = torch.zeros(3), -torch.zeros(3)
    assert checksum(weight) == checksum(weight.clone()) != checksum(swapped)
    assert checksum(zero) != checksum(negative)


def test_what_fails_beside_the_work_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = train_compressed(llama(), ahead=True)

    def fail(self: NumbaCompressedArray, flat: Tensor) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(NumbaCompressedArray, "close", fail)
    with pytest.raises(MemoryError, match="no room"):
        trainer.step(batches(1)[0], 0.1)


def test_buffers_and_threads_go_with_their_trainer() -> None:
    trainer = train_compressed(llama(), ahead=True)
    trainer.step(batches(1)[0], 0.01)
    buffers = weakref.ref(trainer.weights.buffers)
    del trainer
    gc.collect()
    assert buffers() is None


def test_a_failed_decode_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = train_compressed(llama(), ahead=True)
    (batch,) = batches(1)
    once = [MemoryError()]
    decode = NumbaCompressedArray.open

    def failing(self: NumbaCompressedArray, buffer: Tensor) -> Tensor:
        if once:
            raise once.pop()
        return decode(self, buffer)

    monkeypatch.setattr(NumbaCompressedArray, "open", failing)
    with pytest.raises(MemoryError):
        trainer.loss(batch)
    assert math.isfinite(trainer.loss(batch))


def test_a_norm_that_is_no_number_changes_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(dtype=torch.float32)
    before = bits(model)
    backward = Trainer._backward

    def overflowing(*arguments: Any, **options: Any) -> Any:
        loss, squares = backward(*arguments, **options)
        return loss, squares * math.inf

    monkeypatch.setattr(Trainer, "_backward", overflowing)
    trainer = train_compressed(model, compressed=False, max_grad_norm=1.0)
    with pytest.raises(NeuzipError, match="no weight was changed"):
        trainer.step(batches(1)[0], 0.1)
    assert trainer.steps == 0 and bits(trainer.release()) == before


def test_errors_of_decoding_outlive_the_plan(device: torch.device) -> None:
    flat = torch.randn(4096, dtype=torch.bfloat16, device=device)
    held = TritonCompressedArray(flat.numel(), flat.dtype)
    held.close(flat)
    buffer = torch.empty(2 * flat.numel(), dtype=torch.uint8, device=device)
    held.open(buffer)
    assert held._plan is not None
    held._plan.errors.fill_(1)
    held.close(flat)
    held.open(buffer)
    assert held.errors is not None and bool(held.errors.any())


@pytest.mark.slow
def test_clipping_in_two_passes_is_exact() -> None:
    ours = trained(llama(), 6, optimizer="sgd", max_grad_norm=0.4)
    assert plain(llama(), SGD(), 6, clip=0.4) == ours
    assert ours != trained(llama(), 6, optimizer="sgd")
    assert trained(llama(), 6, optimizer="sgd", max_grad_norm=1e6) == trained(llama(), 6, optimizer="sgd")


def test_the_norm_is_that_of_all_gradients() -> None:
    for tied in (False, True):
        for clipping in ("two-pass", "running"):
            trainer = train_compressed(llama(tied), max_grad_norm=100.0, clipping=clipping)  # type: ignore[arg-type]
            (batch,) = batches(1)
            model = llama(tied)
            model(input_ids=batch, labels=batch).loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            trainer.step(batch, 0.1)
            assert trainer.norm == pytest.approx(float(norm), rel=0.01)


def test_running_clipping_takes_the_norm_of_the_step_before() -> None:
    first, second = batches(2)
    trainer = train_compressed(llama(), max_grad_norm=0.5, clipping="running")
    trainer.step(first, 0.05)
    norm = trainer.norm
    assert norm is not None and norm > 0.5
    trainer.step(second, 0.05)
    other = train_compressed(llama())
    other.step(first, 0.05)
    other.clip, other.norm = norm, 0.0
    other.step(second, 0.05 * 0.5 / norm)
    a, b = ({n: p.detach() for n, p in t.release().named_parameters()} for t in (trainer, other))
    assert all(torch.allclose(a[name].float(), b[name].float(), rtol=0.02, atol=1e-5) for name in a)


@pytest.mark.slow
def test_micro_batches_add_up_to_the_batch() -> None:
    ours = trained(llama(), 5, rows=4, optimizer="sgd", micro_batch_size=1)
    assert plain(llama(), SGD(), 5, rows=4, micro=1)[1] == ours[1]
    assert trained(llama(), 5, rows=4, optimizer="sgd", micro_batch_size=1, compressed=False) == ours
    whole = trained(llama(), 5, rows=4, optimizer="sgd")
    assert ours[0] == pytest.approx(whole[0], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_tables_in_chunks_give_what_whole_ones_give(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"optimizer": "adamw8bit"}, {"optimizer": "sgd", "max_grad_norm": 0.4}):
        whole = trained(llama(tied, torch.bfloat16, vocab_size=1024), 4, 1e-2, **options)
        monkeypatch.setattr(model_weights, "rows_of_chunk", lambda *_: 256)
        trainer = train_compressed(llama(tied, vocab_size=1024))
        assert len(trainer.weights.head.chunks) == len(trainer.weights.embedding.chunks) == 4
        parts = trained(llama(tied, torch.bfloat16, vocab_size=1024), 4, 1e-2, **options)
        monkeypatch.undo()
        # Sums over the vocabulary are made in another order, so bf16 may round the other way.
        assert parts[0] == pytest.approx(whole[0], rel=1e-3)


def test_chunks_of_a_head_give_its_exact_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_weights, "rows_of_chunk", lambda *_: 256)
    ours = trained(llama(dtype=torch.float32, vocab_size=1000), 1, 1.0, optimizer="sgd")
    monkeypatch.undo()
    whole = plain(llama(dtype=torch.float32, vocab_size=1000), SGD(), 1, 1.0)
    assert ours[0] == pytest.approx(whole[0], rel=1e-6)
    before = bits(llama(dtype=torch.float32, vocab_size=1000))
    for name in whole[1]:
        a, b, start = (
            torch.frombuffer(bytearray(m[name]), dtype=torch.float32) for m in (ours[1], whole[1], before)
        )
        assert (a - b).norm() <= 1e-4 * (b - start).norm(), name


# Other models, other batches.


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def gpt_neox() -> Any:
    config = transformers.GPTNeoXConfig(**SIZES)
    return transformers.GPTNeoXForCausalLM(config)


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8))


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=8))


def gemma2() -> Any:
    config = transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=5.0, sliding_window=8)
    return transformers.Gemma2ForCausalLM(config)


def gpt_neo() -> Any:
    config = transformers.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]], window_size=8, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPTNeoForCausalLM(config)


def opt(dropout: float = 0.0) -> Any:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=16, dropout=dropout, pad_token_id=1,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


@pytest.mark.parametrize("make", [gpt2, gpt_neox, gpt_neo, qwen3, mistral, gemma2, opt])
def test_decoders_get_the_gradients_that_autograd_gives(make: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    model = make().float()
    (batch,) = batches(1)
    labels = batch.clone()
    labels[0, :5] = -100
    mask = torch.ones_like(batch)
    mask[1, :3] = 0  # on the left
    labels = labels.masked_fill(mask == 0, -100)
    given = {"input_ids": batch, "labels": labels, "attention_mask": mask}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.train()
    loss = model(**given, use_cache=False).loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    trainer = train_compressed(model)
    assert trainer.loss(given) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert trainer.step(given, 1.0) == pytest.approx(float(loss.detach()), rel=1e-5)
    after = dict(trainer.release().named_parameters())
    for name, gradient in expected.items():
        error = (before[name] - after[name].detach() - gradient).norm()
        assert error <= 1e-4 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("kind", ["a module", "a number"])
def test_dropout_is_the_same_forward_and_backward(kind: str) -> None:
    model = llama(dtype=torch.float32, attention_dropout=0.5) if kind == "a module" else opt(dropout=0.3)
    (batch,) = batches(1)
    given = {"input_ids": batch, "labels": batch}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(7)
    model.train()
    loss = model(**given, use_cache=False).loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    trainer = train_compressed(model)
    torch.manual_seed(7)
    assert trainer.step(given, 1.0) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, p in trainer.release().named_parameters():
        error = (before[name] - p.detach() - expected[name]).norm()
        assert error <= 1e-4 * expected[name].norm() + 1e-6, name


def test_frozen_parameters_stay_and_others_are_trained() -> None:
    model = llama()
    for name, p in model.named_parameters():
        p.requires_grad_("layers.1" in name or "norm" in name)
    before = bits(model)
    trainer = train_compressed(model, "adamw8bit")
    for batch in batches(2):
        trainer.step(batch, 1e-2)
    after = bits(trainer.release())
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad and p.dim() > 1} | {
        name for name in changed if "norm" in name
    }
    assert any("layers.1.mlp" in name for name in changed) and not any("layers.0.mlp" in n for n in changed)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro", [None, 2, 1])
def test_a_frozen_head_is_no_gradient_to_add(micro: int | None, tied: bool) -> None:
    (batch,) = batches(1, rows=3)
    model = llama(tied, torch.float32)
    model.lm_head.weight.requires_grad_(False)
    logits = model(batch[:, :-1]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    expected = {name: p - p.grad if p.grad is not None else p for name, p in model.named_parameters()}
    expected = {name: p.detach().clone() for name, p in expected.items()}
    trainer = train_compressed(model, compressed=False, micro_batch_size=micro)
    trainer.step(batch, 1.0)
    for name, p in trainer.release().named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], atol=2e-6, rtol=1e-4)


def test_what_is_no_such_decoder_is_refused() -> None:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8
    )
    with pytest.raises((NeuzipError, ValueError)):
        train_compressed(transformers.T5ForConditionalGeneration(config))
    model = llama()
    forward = model.forward
    model.forward = lambda *a, **k: _doubled(forward(*a, **k))
    with pytest.raises(NeuzipError, match="do not follow each other in the usual way"):
        train_compressed(model)


def _doubled(out: Any) -> Any:
    out.logits = 2 * out.logits + 1
    return out


def test_options_and_batches_without_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="there is no optimizer 'adam'"):
        train_compressed(llama(), "adam")
    with pytest.raises(UsageError, match="`clipping='three'`"):
        train_compressed(llama(), clipping="three")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`max_grad_norm=0"):
        train_compressed(llama(), max_grad_norm=0.0)
    with pytest.raises(UsageError, match="`optimizer_state='zipped'`"):
        train_compressed(llama(), "adamw", optimizer_state="zipped")  # type: ignore[arg-type]
    for optimizer in ("sgd", "adamw8bit"):
        with pytest.raises(UsageError, match="no states that could be held losslessly compressed"):
            train_compressed(llama(), optimizer, optimizer_state="lossless")
    with pytest.raises(UsageError, match="rounds weights by chance"):
        train_compressed(llama(dtype=torch.float32), "adamw8bit")
    trainer = train_compressed(llama())
    with pytest.raises(UsageError, match=r"a batch of the shape \(7,\)"):
        trainer.step(torch.zeros(7, dtype=torch.int64), 0.1)
    with pytest.raises(NeuzipError, match="tokens from 0 to 300, the model has 300"):
        trainer.step(torch.tensor([[0, 300, 1]]), 0.1)
    assert trainer.steps == 0


def test_what_is_held_is_smaller() -> None:
    trainer = train_compressed(llama(hidden_size=128, intermediate_size=256))
    assert 0.6 * trainer.dense_bytes < trainer.stored_bytes < 0.7 * trainer.dense_bytes
    assert train_compressed(llama(), compressed=False).stored_bytes == train_compressed(llama()).dense_bytes


@pytest.mark.slow
def test_the_hook_in_has_three_lines(tmp_path: Path) -> None:
    trainer = neuzip.train_compressed(llama(), "adamw8bit")
    losses = [trainer.step(batches(1)[0], 3e-3) for _ in range(15)]
    trainer.save(tmp_path / "out")
    assert losses[-1] < losses[0] - 0.5


# Several processes.

_RANK = """
import os, sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from training import batches, bits, llama
from neuzip.train.trainer import train_compressed
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method={file!r}, rank=rank, world_size=2)
found = []
for optimizer, tied in (("sgd", False), ("adamw8bit", True)):
    trainer = train_compressed(llama(tied), optimizer, max_grad_norm=0.5)
    losses = [trainer.step(batch[2 * rank : 2 * rank + 2], 0.01) for batch in batches(3, rows=4)]
    found.append((losses, bits(trainer.release())))
torch.save(found, {out!r} + str(rank))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_are_one_with_two_micro_batches(tmp_path: Path, forks: forked.Server) -> None:
    out, script = str(tmp_path / "found"), tmp_path / "rank.py"
    support = os.path.dirname(training.__file__)
    script.write_text(_RANK.format(tests=support, file=f"file://{tmp_path / 'meet'}", out=out))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        forks.start(script, cwd=tmp_path, environment=environment | {"RANK": str(rank)}) for rank in range(2)
    ]
    assert [rank.communicate(timeout=300)[1] for rank in ranks] == ["", ""]
    assert [rank.returncode for rank in ranks] == [0, 0]
    one, other = (torch.load(out + str(rank), weights_only=True) for rank in range(2))
    assert one == other
    for (losses, weights), (optimizer, tied) in zip(one, (("sgd", False), ("adamw8bit", True)), strict=True):
        alone = trained(llama(tied), 3, 0.01, 4, optimizer=optimizer, max_grad_norm=0.5, micro_batch_size=2)
        assert losses == pytest.approx(alone[0], rel=1e-6)  # a loss is summed in another order
        assert weights == alone[1]


def test_a_trainer_has_a_type() -> None:
    assert isinstance(train_compressed(llama(num_hidden_layers=1)), Trainer)
