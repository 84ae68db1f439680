"""Full-parameter training with all matrices held losslessly compressed, layer by layer (NeuZip, section 3).

    trainer = neuzip.train_compressed(model, "adamw8bit")
    for batch in loader:
        loss = trainer.step(batch, lr)
    trainer.save(folder)                  trainer.load(folder) goes on as if nothing had been in between

What a step does, and what is dense meanwhile:

    forward   every layer is decoded to a shared buffer, run without a graph, and forgotten; of its micro-
              batches only what goes into it is kept (activation checkpointing)
    head      chunk by chunk of the vocabulary, logits in tiles (kernels.linear_cross_entropy)
    backward  a layer is decoded again and run with a graph; its gradients are used and freed, and its
              matrices coded, before the layer below (LOMO: Lv et al. 2023, arXiv 2306.09782)
    tables    embedding and head lie in chunks of rows; a gradient of the embedding has only the batch's rows

Norms, biases and other vectors stay as they are. With `compressed=False` the same is done to plain arrays,
which is LOMO, and gives the same bits wherever torch itself does from run to run: on a CPU, and on a GPU
under `deterministic_algorithms`. Nothing here depends on how arrays are held.

Accumulation: a batch is cut into micro-batches, and all of them go through a layer before the next one does.
So a gradient of the whole batch is exact in fp32 without keeping those of other layers; what it costs is a
layer's input for each token of the batch, 2 * hidden_size bytes in bf16. With one micro-batch and one process
gradients are in the dtype of the weights.

Clipping by the global norm: "two-pass" goes backward twice and is exact; "running" takes the norm of the step
before, is approximate, lets the first step pass unclipped, and costs next to nothing.

A tied embedding is one table: the head's gradient of it, dense, waits for the embedding's. Under
torch.distributed each process gives its own batch; a unit's gradients are summed in fp32 before its update,
and all processes keep equal weights. Losses beside the head's, such as those of routers, are not added.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from neuzip.compress.device import AnyDevice
from neuzip.errors import BUG_OR_MEMORY, NeuzipError, UsageError
from neuzip.kernels.linear_cross_entropy import linear_cross_entropy
from neuzip.kernels.quantizers.states import RngKey
from neuzip.runtime.devices import place_of
from neuzip.runtime.requirements import require_model
from neuzip.train import saved
from neuzip.train.compressed_array import StoredArray, TritonCompressedArray, store_array
from neuzip.train.layer_prefetch import LayerBuffers
from neuzip.train.optimizers import Optimizer, ParameterUpdate, optimizer_of
from neuzip.train.states import STATE_STORAGES, StatePieces, StateStorage, StateStore, nbytes
from neuzip.train.units import (
    DecoderLayer,
    LayerArguments,
    ModelShell,
    ParameterSlot,
    TokenTable,
    rows_inside,
    rows_of_chunk,
    slots_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Clipping = Literal["two-pass", "running"]
IGNORED = -100
SMALLEST_CHUNK = 64 << 20
"""Bytes of a chunk of a table, unless a layer is larger: then as many as that."""


@dataclass(eq=False)
class MicroBatch:
    """A micro-batch on its way: B rows of T tokens, U of them different.

    own      int64 [B, T], where each token's row is among `rows` [U, D], the embeddings of `tokens` [U]
    targets  int64 [B * T], -100 where nothing is predicted
    states   what goes into each layer, and what comes out of the last
    """

    own: Tensor
    mask: Tensor | None
    targets: Tensor
    tokens: Tensor
    rows: nn.Parameter
    calls: list[LayerArguments] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    chances: list[list[Tensor]] = field(default_factory=list)
    gradient: Tensor | None = None


def train_compressed(
    model: PreTrainedModel,
    optimizer: str | Optimizer = "sgd",
    *,
    compressed: bool = True,
    max_grad_norm: float | None = None,
    clipping: Clipping = "two-pass",
    micro_batch_size: int | None = None,
    optimizer_state: StateStorage = "plain",
    seed: int = 0,
    device: AnyDevice = None,
    ahead: bool | None = None,
    triton: bool | None = None,
    filter_gradients: bool = True,
) -> Trainer:
    """Prepare a causal language model for training with weights that are compressed in memory.

    optimizer         "adamw8bit", "adamw", "sgd" or "sgd-stochastic", or an optimizer object of
                      `neuzip.train.optimizers`
    compressed        False trains plain weights in the same way, as LOMO does
    max_grad_norm     largest global norm of the gradients; None does not clip
    clipping          "two-pass" clips by the exact norm, "running" by the norm of the previous step
    micro_batch_size  rows of a batch that pass through a layer at once; None means all rows
    optimizer_state   "plain", or "lossless" to keep the state losslessly compressed
    seed              seed of dropout and stochastic rounding
    device            device of the training, as in `load_model`; None is the device of the model
    ahead             decode the next layer and encode the previous one while the current one runs. This
                      takes a second buffer. None does so on a GPU
    triton            encode with the Triton kernels on a CPU too, for tests. On a GPU neuzip always does
    filter_gradients  on a GPU, skip the tiles of logits that `linear_cross_entropy` filters by default when
                      computing the gradients of the head. A CPU never filters

    On a CPU, `compressed` does not change the bits of the result. On a GPU, the same holds if torch uses
    deterministic algorithms. Otherwise the backward passes of torch differ from run to run.

    To train, call `step` of the result. The model is in training mode afterwards. Until `release`, the
    trainer owns the matrices of the model, and the model cannot run by itself. Raises NeuzipError for a model
    that is not a plain sequence of decoder layers, and UsageError for wrong options.
    """
    require_model(model)
    return Trainer(
        model, optimizer_of(optimizer) if isinstance(optimizer, str) else optimizer, compressed=compressed,
        max_grad_norm=max_grad_norm, clipping=clipping, micro_batch_size=micro_batch_size,
        optimizer_state=optimizer_state, seed=seed, device=device,
        ahead=ahead, triton=triton, filter_gradients=filter_gradients,
    )  # fmt: skip


class Trainer:
    """A model in training: see `train_compressed`.

    steps      number of steps taken
    norm       global gradient norm of the last step, if gradients are clipped
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        *,
        compressed: bool,
        max_grad_norm: float | None,
        clipping: Clipping,
        micro_batch_size: int | None,
        optimizer_state: StateStorage,
        seed: int,
        device: AnyDevice,
        ahead: bool | None,
        triton: bool | None,
        filter_gradients: bool,
    ) -> None:
        if clipping not in ("two-pass", "running"):
            raise UsageError(
                f"`clipping={clipping!r}`: there is no such clipping", "choose two-pass or running"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UsageError(
                f"`max_grad_norm={max_grad_norm}`: gradients cannot be clipped to that",
                "give a number above 0",
            )
        if micro_batch_size is not None and micro_batch_size < 1:
            raise UsageError(
                f"`micro_batch_size={micro_batch_size}`: is no number of rows", "give 1 and more"
            )
        if optimizer_state not in STATE_STORAGES:
            raise UsageError(
                f"`optimizer_state={optimizer_state!r}`: is no way to keep it",
                f"choose from {', '.join(STATE_STORAGES)}",
            )
        self.model, self.optimizer, self.compressed, self.seed = model, optimizer, compressed, seed
        self.clip, self.clipping, self.micro_batch = max_grad_norm, clipping, micro_batch_size
        self._filter_eps = "auto" if filter_gradients else None
        self.steps = 0
        self.norm: float | None = None
        shell = self.shell = ModelShell(model)
        self.device = model.device if device is None else place_of(device)
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        slots = slots_of(model)
        if optimizer.stochastic and any(slot.dtype != torch.bfloat16 for slot in slots.values()):
            raise UsageError(
                f"this optimizer rounds weights by chance, which is for bfloat16, not {model.dtype}",
                "choose sgd or adamw, or train in bfloat16",
            )

        self.keeper = StateStore(optimizer, self.device, coded=optimizer_state == "lossless", triton=triton)
        ahead = compressed and (self.device.type == "cuda" if ahead is None else ahead)
        self._desk = LayerBuffers(self.device, ahead)

        def code(flat: Tensor) -> StoredArray:
            with self._desk.aside():
                return store_array(flat, compressed, triton=triton)

        self.layers = [DecoderLayer(m, _own(m, slots), code, self.device) for m in shell.layers]
        largest = max(SMALLEST_CHUNK, *(layer.room for layer in self.layers))

        def table(module: nn.Module) -> TokenTable:
            slot = _slot_at(slots, module)
            rows = rows_of_chunk(slot.shape, slot.dtype.itemsize, largest)
            return TokenTable(slot, rows, code, self.device)

        self.embedding = table(shell.embedding)
        tied = (shell.head, "weight") in self.embedding.slot.places
        self.head = self.embedding if tied else table(shell.head)
        inner = {slot.name for layer in self.layers for slot in (*layer.coded, *layer.plain)}
        inner |= {self.embedding.slot.name, self.head.slot.name}
        self.rest = [slot for name, slot in slots.items() if name not in inner]
        _move(model, self.device)
        room = max([layer.room for layer in self.layers] + [table.room for table in self._tables()])
        self._desk.make_room(room if compressed else 0)
        sizes = [held.numel for table in self._tables() for _, held in table.chunks]
        sizes += [slot.numel for layer in self.layers for slot in layer.trained]
        self.keeper.make_room(max(sizes + [slot.numel for slot in self.rest]))
        self._world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        model.train()
        self._dropouts = any(  # of some models dropout is a number, and no module
            isinstance(value, float) and value > 0 and ("drop" in name or isinstance(m, nn.Dropout))
            for m in model.modules()
            for name, value in vars(m).items()
        )
        if self._world > 1:
            self._require_equal_weights()

    @property
    def tied(self) -> bool:
        """Whether the embedding and the output head share their weights."""
        return self.head is self.embedding

    @property
    def stored_bytes(self) -> int:
        """Memory of all matrices between steps, as stored."""
        return sum(layer.nbytes for layer in self.layers) + sum(table.nbytes for table in self._tables())

    @property
    def state_bytes(self) -> int:
        """Memory of the optimizer states between steps; 0 before the first step."""
        return sum(map(nbytes, self._states()))

    @property
    def dense_bytes(self) -> int:
        """Memory that all matrices would take uncompressed."""
        slots = [slot for layer in self.layers for slot in layer.coded] + [t.slot for t in self._tables()]
        return sum(slot.numel * slot.dtype.itemsize for slot in slots)

    def _states(self) -> list[StatePieces]:
        own = [slot.states for slot in self._slots()]
        return own + [states for table in self._tables() for states in table.states]

    def _tables(self) -> list[TokenTable]:
        return [self.embedding] if self.tied else [self.embedding, self.head]

    @contextmanager
    def _opened(
        self, layer: DecoderLayer, *, changes: bool = False, then: DecoderLayer | None = None
    ) -> Iterator[None]:
        """With a layer's weights in place; `then` will be the next."""
        with self._desk.opened(layer, changes=changes, then=then) as flats, layer.placed(flats):
            yield

    # A step.

    def step(self, batch: Tensor | Mapping[str, Tensor], lr: float) -> float:
        """Run forward pass, backward pass and update. Returns the mean loss in nats per predicted token.

        batch  int64 [B, T + 1]: windows in which each token predicts the next. Or a mapping with "input_ids"
               [B, T], optionally "labels" [B, T] and optionally "attention_mask". Labels follow transformers:
               a label belongs to the token at its own position, and -100 excludes it. B may differ between
               processes
        """
        micros, count = self._forward(batch)
        self.steps += 1
        scale = None
        if self.clip is not None and self.clipping == "two-pass":
            _, squares = self._backward(micros, count, lr, None, update=False)
            self.norm = math.sqrt(float(squares))
            if not math.isfinite(self.norm):
                self.steps -= 1
                raise NeuzipError(
                    f"the norm of the gradients is {self.norm}: no weight was changed",
                    "go on from the last checkpoint with a lower learning rate",
                )
            scale = self._scale(self.norm)
        elif self.clip is not None and self.norm is not None:
            scale = self._scale(self.norm)
        loss, squares = self._backward(micros, count, lr, scale, update=True)
        if self.clip is not None and self.clipping == "running":
            self.norm = math.sqrt(float(squares))
            if not math.isfinite(self.norm):
                raise NeuzipError(
                    f"the norm of the gradients is {self.norm}, and weights were changed with them",
                    "go on from the last checkpoint with a lower learning rate, or with two-pass clipping",
                )
        self._raise_if_corrupt()
        return float(loss)

    @torch.no_grad()
    def loss(self, batch: Tensor | Mapping[str, Tensor]) -> float:
        """The mean loss of a batch, without training."""
        self.model.eval()  # type: ignore[no-untyped-call]
        try:
            micros, count = self._forward(batch)
            nll, _ = self._head(micros, count, None, update=False, gradients=False)
        finally:
            self.model.train()
        return float(self._summed(nll))

    def _scale(self, norm: float) -> Tensor | None:
        """What gradients are multiplied with, if they are too large."""
        assert self.clip is not None
        return None if norm <= self.clip else torch.tensor(self.clip / norm, device=self.device)

    @torch.no_grad()
    def _forward(self, batch: Tensor | Mapping[str, Tensor]) -> tuple[list[MicroBatch], Tensor]:
        """Micro-batches with what goes into all layers, and the number of all tokens predicted."""
        micros = list(self._micros(batch))
        for micro in micros:
            before = self._chances()
            with self.shell.rows(micro.rows):
                x, micro.calls = self.shell.begin(micro.own, micro.mask)
            micro.states.append(x)
            micro.chances.append(before)
        for number, layer in enumerate(self.layers):
            then = self.layers[number + 1] if number + 1 < len(self.layers) else None
            with self._opened(layer, then=then):
                for micro in micros:
                    micro.chances.append(self._chances())
                    micro.states.append(layer(micro.states[-1], micro.calls[number]))
        counts = [(micro.targets != IGNORED).sum() for micro in micros]
        return micros, self._summed(torch.stack(counts).sum())

    def _micros(self, batch: Tensor | Mapping[str, Tensor]) -> Iterator[MicroBatch]:
        ids, labels, mask = _taken_apart(batch)
        if int(ids.min()) < 0 or int(ids.max()) >= self.embedding.slot.shape[0]:
            raise NeuzipError(
                f"a batch has tokens from {int(ids.min())} to {int(ids.max())}, the model has "
                f"{self.embedding.slot.shape[0]}",
                "use the tokenizer that belongs to it",
            )
        size = self.micro_batch or ids.shape[0]
        for start in range(0, ids.shape[0], size):
            own = slice(start, start + size)
            part = ids[own].to(self.device)
            tokens, places = torch.unique(part, return_inverse=True)
            rows = nn.Parameter(self.embedding.look_up(tokens, self._desk.buffer()))
            own_mask = None if mask is None else mask[own].to(self.device)
            yield MicroBatch(places, own_mask, labels[own].to(self.device).reshape(-1), tokens, rows)

    def _backward(
        self, micros: Sequence[MicroBatch], count: Tensor, lr: float, scale: Tensor | None, *, update: bool
    ) -> tuple[Tensor, Tensor]:
        """Loss, and the sum of the squares of all gradients. Without `update` that is all, and it can be done
        again."""
        self._lr, self._factor, self._squares = (
            lr,
            scale,
            torch.zeros((), dtype=torch.float64, device=self.device),
        )
        self._measured = self.clip is not None and (not update or self.clipping == "running")
        shell: list[Tensor | None] = [None] * len(self._rest())
        nll, kept = self._head(micros, count, shell, update=update)
        for number in reversed(range(len(self.layers))):
            self._layer(number, micros, update)
        self._embedding(micros, shell, kept, update)
        return self._summed(nll), self._squares

    def _rest(self) -> list[ParameterSlot]:
        return [slot for slot in self.rest if slot.trainable]

    def _head(
        self, micros: Sequence[MicroBatch], count: Tensor, shell: list[Tensor | None] | None, *, update: bool,
        gradients: bool = True,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The loss; gradients of what comes out of the layers go to `micro.gradient`.

        A tied head's gradients are returned, chunk by chunk. Otherwise they are used here.
        """
        ends = [self._end(micro, gradients) for micro in micros]
        hidden = [end.detach().reshape(-1, end.shape[-1]).requires_grad_(gradients) for end in ends]
        chunks = len(self.head.chunks)
        lse: list[Tensor | None] = [None] * len(micros)
        if chunks > 1 or not gradients:
            lse = [self._log_sum_exp(micro, x) for micro, x in zip(micros, hidden, strict=True)]
        nll = torch.zeros((), device=self.device)
        for_hidden: list[Tensor | None] = [None] * len(micros)
        kept = []
        for number, (rows, _) in enumerate(self.head.chunks):
            weight = self.head.open(number, self._desk.buffer())
            total: Tensor | None = None
            for i, micro in enumerate(micros):
                found = self._chunk_loss(micro, hidden[i], weight, rows, lse[i], count, shell, gradients)
                nll = nll + found[0]
                if gradients:
                    for_hidden[i] = _plus(for_hidden[i], found[1], chunks > 1)
                    if self.head.slot.trainable:
                        total = _plus(total, found[2], self._exact(micros))
            if not gradients or not self.head.slot.trainable:
                continue
            assert total is not None
            if self.tied:
                kept.append(total)
            else:
                (total,) = self._reduced([total])
                self._use(self.head.slot, rows, weight, total, self.head.states[number], update)
                if update:
                    self.head.close(number, weight)
        if gradients:
            for micro, end, gradient in zip(micros, ends, for_hidden, strict=True):
                assert gradient is not None
                self._through_end(micro, end, gradient.to(end.dtype).view_as(end), shell)
        return nll, kept

    def _end(self, micro: MicroBatch, gradients: bool) -> Tensor:
        """What the head is given; with a graph from what comes out of the layers."""
        x = micro.states[-1].detach().requires_grad_(gradients)
        with torch.set_grad_enabled(gradients), self.shell.rows(micro.rows):
            end = self.shell.end(micro.own, micro.mask, x)
        micro.gradient = x
        return end

    def _through_end(
        self, micro: MicroBatch, end: Tensor, gradient: Tensor, shell: list[Tensor | None] | None
    ) -> None:
        x = micro.gradient
        assert x is not None and shell is not None
        slots = self._rest()
        micro.gradient, *found = _gradients(end, [x, *(slot.parameter for slot in slots)], gradient)
        _add_to(shell, found)

    def _log_sum_exp(self, micro: MicroBatch, hidden: Tensor) -> Tensor:
        """Of all chunks, [N]."""
        lse: Tensor | None = None
        with torch.no_grad():
            for number, (rows, _) in enumerate(self.head.chunks):
                weight = self.head.open(number, self._desk.buffer())
                _, own, _ = self._nll(micro, hidden, weight, rows)
                lse = own if lse is None else torch.logaddexp(lse, own)
        assert lse is not None
        return lse

    def _nll(
        self, micro: MicroBatch, hidden: Tensor, weight: Tensor, rows: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Negative log-likelihoods among some rows, 0 for other targets; log-sum-exps; which are here."""
        here = (micro.targets >= rows.start) & (micro.targets < rows.stop)
        bias = self.shell.head.bias
        found = linear_cross_entropy(
            hidden, weight, torch.where(here, micro.targets - rows.start, IGNORED),
            linear_bias=None if bias is None else bias[rows], softcap=self.shell.softcap,
            reduction="none", return_lse=True, ignore_index=IGNORED, filter_eps=self._filter_eps,
        )  # fmt: skip
        assert isinstance(found, tuple)
        return *found, here

    def _chunk_loss(
        self, micro: MicroBatch, hidden: Tensor, weight: Tensor, rows: slice, lse: Tensor | None,
        count: Tensor, shell: list[Tensor | None] | None, gradients: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """A chunk's share of the loss, and of the gradients of hidden states and weights.

        With P the share of the chunk in the softmax of a token, its gradient there is P softmax - onehot, for
        the softmax within the chunk: that of its log-sum-exp, P times, minus that of the target's logit.
        """
        weight = weight.detach().requires_grad_(gradients and self.head.slot.trainable)
        with torch.set_grad_enabled(gradients):
            nll, own, here = self._nll(micro, hidden, weight, rows)
        counted = micro.targets != IGNORED
        whole = own if lse is None else lse
        loss = torch.where(here, nll + (whole - own), 0.0).detach().sum() / count
        if not gradients:
            return loss, hidden, weight
        on_nll = here.to(own.dtype) / count
        on_lse = torch.where(counted, (own - whole).detach().exp() - here.to(own.dtype), 0.0) / count
        bias = self.shell.head.bias
        inputs = [hidden, *([weight] if weight.requires_grad else [])]
        biased = bias is not None and bias.requires_grad
        found = torch.autograd.grad((nll, own), [*inputs, *([bias] if biased else [])], (on_nll, on_lse))
        if biased:
            assert shell is not None
            at = next(i for i, slot in enumerate(self._rest()) if (self.shell.head, "bias") in slot.places)
            shell[at] = _plus(shell[at], found[-1], True)
        return loss, found[0], found[1] if weight.requires_grad else found[0]

    def _layer(self, number: int, micros: Sequence[MicroBatch], update: bool) -> None:
        """Through a layer, backward, and its update."""
        layer, then = self.layers[number], self.layers[number - 1] if number else None
        with self._opened(layer, changes=update, then=then):
            slots = layer.trained
            if not self._exact(micros):
                self._through_at_once(number, micros[0], slots, update)
                return
            totals: list[Tensor | None] = [None] * len(slots)
            for micro in micros:
                x, out = self._layer_again(number, micro, update)
                parameters = [slot.parameter for slot in slots]
                assert micro.gradient is not None
                micro.gradient, *found = _gradients(out, [x, *parameters], micro.gradient)
                del out, x
                for i, parameter in enumerate(parameters):
                    own = found[i]
                    own = torch.zeros_like(parameter) if own is None else own
                    totals[i] = _plus(totals[i], own, True)
                    found[i] = None
            gradients = self._reduced([total for total in totals if total is not None])
            del totals
            for slot in reversed(slots):
                self._use(slot, None, slot.parameter.data, gradients.pop(), slot.states, update)

    def _layer_again(self, number: int, micro: MicroBatch, update: bool) -> tuple[Tensor, Tensor]:
        """A layer's input and output, with its graph. With `update` the states above are forgotten."""
        x = micro.states[number].detach().requires_grad_()
        with torch.enable_grad(), self._again(micro.chances[number + 1]):
            out = self.layers[number](x, micro.calls[number])
        if update:
            micro.states[number + 1 :] = []
        return x, out

    def _through_at_once(
        self, number: int, micro: MicroBatch, slots: Sequence[ParameterSlot], update: bool
    ) -> None:
        """Use each gradient as soon as it is there, while backward goes on, so that few are there at a time.

        A weight is changed only after its own products. The others do not notice: `data` is a view that
        autograd does not follow.
        """
        left = set(slots)

        def use(slot: ParameterSlot) -> None:
            parameter = slot.parameter
            assert parameter.grad is not None
            gradient, parameter.grad = parameter.grad, None
            left.discard(slot)
            self._use(slot, None, parameter.data, gradient, slot.states, update)

        for slot in slots:
            slot.parameter.grad = None
        hooks = [_after_gradient(slot.parameter, partial(use, slot)) for slot in slots]
        try:
            x, out = self._layer_again(number, micro, update)
            torch.autograd.backward(out, micro.gradient)
        finally:
            for hook in hooks:
                hook.remove()
        micro.gradient = x.grad
        for slot in slots:
            if slot in left:  # nothing depends on it; decay does its part all the same
                zeros = torch.zeros_like(slot.parameter)
                self._use(slot, None, slot.parameter.data, zeros, slot.states, update)

    def _embedding(
        self, micros: Sequence[MicroBatch], shell: list[Tensor | None], head: list[Tensor], update: bool
    ) -> None:
        """Gradients of embeddings and of all that is left, and their updates."""
        rest, gradients = self._rest(), []
        for micro in micros:
            assert micro.gradient is not None
            with torch.enable_grad(), self._again(micro.chances[0]), self.shell.rows(micro.rows):
                x = self.shell.embed(micro.own, micro.mask)
            rows, *found = _gradients(x, [micro.rows, *(slot.parameter for slot in rest)], micro.gradient)
            _add_to(shell, found)
            assert rows is not None
            if (padding := self.shell.embedding.padding_idx) is not None:
                rows[micro.tokens == padding] = 0
            gradients.append(rows)
        dtype = torch.float32 if self._exact(micros) else None
        whole = [
            torch.zeros_like(slot.parameter, dtype=dtype) if one is None else one.to(dtype or slot.dtype)
            for slot, one in zip(rest, shell, strict=True)
        ]
        for slot, gradient in zip(rest, self._reduced(whole), strict=True):
            self._use(slot, None, slot.parameter.detach(), gradient, slot.states, update)
        if self.embedding.slot.trainable:
            for number, (own, _) in enumerate(self.embedding.chunks):
                total = self._table_gradient(micros, gradients, own, head[number] if head else None)
                (total,) = self._reduced([total])
                weight = self.embedding.open(number, self._desk.buffer())
                self._use(self.embedding.slot, own, weight, total, self.embedding.states[number], update)
                if update:
                    self.embedding.close(number, weight)

    def _table_gradient(
        self, micros: Sequence[MicroBatch], gradients: Sequence[Tensor], rows: slice, head: Tensor | None
    ) -> Tensor:
        """Of some rows, in the weights' dtype or fp32: the head's, if it is tied, and those of tokens."""
        dtype = torch.float32 if self._exact(micros) else self.embedding.slot.dtype
        shape = rows.stop - rows.start, self.embedding.columns
        total = torch.zeros(shape, dtype=dtype, device=self.device) if head is None else head
        for micro, gradient in zip(micros, gradients, strict=True):
            at, own = rows_inside(micro.tokens, rows)
            total[own] += gradient[at].to(dtype)  # a token is there once: no row is added to twice
        return total

    # What gradients come to.

    def _exact(self, micros: Sequence[MicroBatch]) -> bool:
        """Whether gradients are summed, and so in fp32."""
        return len(micros) > 1 or self._world > 1

    def _reduced(self, gradients: list[Tensor]) -> list[Tensor]:
        """The sums over all processes, in fp32. The list that is given is emptied."""
        if self._world == 1 or not gradients:
            return gradients
        shapes = [gradient.shape for gradient in gradients]
        flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
        gradients.clear()
        dist.all_reduce(flat)
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _summed(self, value: Tensor) -> Tensor:
        if self._world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def _use(
        self,
        slot: ParameterSlot,
        rows: slice | None,
        weight: Tensor,
        gradient: Tensor,
        states: StatePieces,
        update: bool,
    ) -> None:
        """Add a gradient to the norm, or update its weights with it."""
        if self._measured:
            self._squares += torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        if not update:
            return
        first = 0 if rows is None else rows.start * weight[0].numel()
        chance = RngKey(self.seed, self.steps, slot.number, first)
        with torch.no_grad():
            self.keeper.update(
                states,
                ParameterUpdate(
                    weight.view(-1), gradient.reshape(-1), self._lr, chance, self._factor, slot.decays
                ),
            )

    # Dropout.

    def _chances(self) -> list[Tensor]:
        """The states of the random generators, where a layer may ask for them."""
        if not (self._dropouts and self.model.training):
            return []
        own = [torch.get_rng_state()]
        return own + ([torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else [])

    @contextmanager
    def _again(self, chances: list[Tensor]) -> Iterator[None]:
        """With the random numbers that there were."""
        if not chances:
            yield
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.set_rng_state(chances[0])
            if len(chances) > 1:
                torch.cuda.set_rng_state(chances[1], self.device)
            yield

    def _raise_if_corrupt(self) -> None:
        """Wait for what is under way; raise if a decoder has met words that no encoder writes."""
        self._desk.settle()
        arrays = [held for unit in self.layers for _, held in unit.arrays]
        arrays += [held for table in self._tables() for _, held in table.chunks]
        arrays += [held for states in self._states() for piece in states for held in piece.values()]
        errors = [held.errors for held in arrays if isinstance(held, TritonCompressedArray)]
        met = [error for error in errors if error is not None]
        if met and bool(torch.cat(met).any()):
            raise NeuzipError("a weight in memory cannot be decoded", BUG_OR_MEMORY)

    def _require_equal_weights(self) -> None:
        """Raise unless all processes begin with the same weights."""
        sums = [checksum(weight) for _, weight in self._all_weights()]
        own = torch.stack(sums)
        least, most = own.clone(), own.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise NeuzipError(
                "the processes begin with different weights", "load the same checkpoint, or seed them alike"
            )

    # The model as a whole.

    @contextmanager
    def dense(self, device: torch.device | str) -> Iterator[PreTrainedModel]:
        """Context in which the model has dense copies of all weights on `device`, in evaluation mode."""
        placed = [(slot, slot.parameter) for slot in self._slots()]
        for slot, weight in self._all_weights():
            slot.put(nn.Parameter(weight.to(device, copy=True), slot.trainable))
        buffers = [
            (m, name, b) for m in self.model.modules() for name, b in m._buffers.items() if b is not None
        ]
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(device)
        self.model.eval()  # type: ignore[no-untyped-call]
        try:
            yield self.model
        finally:
            self.model.train()
            for slot, parameter in placed:
                slot.put(parameter)
            for module, name, buffer in buffers:
                module._buffers[name] = buffer

    def release(self) -> PreTrainedModel:
        """Return the model with ordinary dense weights. The trainer cannot be used afterwards."""
        for slot, weight in self._all_weights():
            slot.put(nn.Parameter(weight.clone(), slot.trainable))
        for layer in self.layers:
            layer.forget()
        self._desk.settle()
        self.model.eval()  # type: ignore[no-untyped-call]
        return self.model

    def save(
        self, folder: str | os.PathLike[str], *, like: Path | None = None, resumable: bool = True
    ) -> None:
        """Write a Hugging Face checkpoint with the training state. It replaces an older one in `folder`.

        like       checkpoint folder from which `save` copies all other files, such as the tokenizer
        resumable  False leaves out the training state

        Under torch.distributed, all processes must call `save`, and the first one writes.
        """
        saved.save(self, Path(folder), like, resumable)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Resume from a checkpoint of `save`. Raises NeuzipError if its model or optimizer differs."""
        saved.load(self, Path(folder))

    def _slots(self) -> Iterator[ParameterSlot]:
        for layer in self.layers:
            yield from (*layer.coded, *layer.plain)
        yield from (table.slot for table in self._tables())
        yield from self.rest

    def _all_weights(self) -> Iterator[tuple[ParameterSlot, Tensor]]:
        """All parameters, dense, in turn; each is valid until the next one."""
        for layer in self.layers:
            with self._opened(layer):
                found = [(slot, slot.parameter.detach()) for slot in (*layer.coded, *layer.plain)]
            yield from found
        for table in self._tables():
            chunks = [table.open(number, self._desk.buffer()).clone() for number in range(len(table.chunks))]
            yield table.slot, torch.cat(chunks).view(table.slot.shape)
        for slot in self.rest:
            yield slot, slot.parameter.detach()

    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take other values for all parameters, by name."""
        for layer in self.layers:
            with self._opened(layer, changes=True):
                for slot in (*layer.coded, *layer.plain):
                    slot.parameter.data.copy_(weights[slot.name])
        self._desk.settle()
        for table in self._tables():
            rows = weights[table.slot.name].reshape(-1, table.columns)
            for number, (own, _) in enumerate(table.chunks):
                chunk = table.open(number, self._desk.buffer())
                chunk.copy_(rows[own])
                table.close(number, chunk)
        for slot in self.rest:
            slot.parameter.data.copy_(weights[slot.name])


def checksum(weight: Tensor) -> Tensor:
    """An int64 scalar that tells weights apart by their bits, and by where they lie."""
    patterns = weight.reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32}[weight.itemsize])
    found = torch.zeros((), dtype=torch.int64, device=weight.device)
    for part in torch.split(patterns, 1 << 22):
        found = 31 * found + (part * (torch.arange(part.numel(), device=part.device) % 8191 + 1)).sum()
    return found


def _own(module: nn.Module, slots: Mapping[str, ParameterSlot]) -> list[ParameterSlot]:
    """The parameters of a layer. Raises NeuzipError if it shares one with what is outside it."""
    inside_it = set(module.modules())
    found = [slot for slot in slots.values() if any(place[0] in inside_it for place in slot.places)]
    for slot in found:
        if not all(place[0] in inside_it for place in slot.places):
            raise NeuzipError(f"{slot.name} is shared between layers", "such models are not trained so")
    return found


def _slot_at(slots: Mapping[str, ParameterSlot], module: nn.Module) -> ParameterSlot:
    return next(slot for slot in slots.values() if (module, "weight") in slot.places)


def _move(model: nn.Module, device: torch.device) -> None:
    """Bring buffers, and parameters that have memory, to a device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = nn.Parameter(
                    parameter.detach().to(device), parameter.requires_grad
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _plus(total: Tensor | None, gradient: Tensor, exact: bool) -> Tensor:
    """The sum of gradients, in fp32 if it is to be `exact`, in place where there is one."""
    if total is None:
        return gradient.float() if exact else gradient
    return total.add_(gradient)


def _gradients(out: Tensor, inputs: Sequence[Tensor], given: Tensor) -> list[Tensor | None]:
    """The gradients of some inputs; None of those that `out` does not depend on."""
    return list(torch.autograd.grad(out, inputs, given, allow_unused=True))


def _after_gradient(parameter: nn.Parameter, use: Callable[[], None]) -> Any:
    """A hook that calls `use` once a parameter has its gradient."""
    return parameter.register_post_accumulate_grad_hook(lambda _: use())  # type: ignore[no-untyped-call]


def _add_to(totals: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients in fp32."""
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            totals[i] = _plus(totals[i], gradient, True)


def _taken_apart(batch: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids and targets [B, T], and a mask. Raises UsageError for what is no batch."""
    if isinstance(batch, Tensor):
        if batch.dim() != 2 or batch.shape[1] < 2 or not batch.shape[0]:
            raise UsageError(
                f"a batch of the shape {tuple(batch.shape)}", "give windows [B, T + 1] of tokens"
            )
        return batch[:, :-1], batch[:, 1:], None
    if "input_ids" not in batch:
        raise UsageError("a batch without input_ids", 'give windows [B, T + 1], or {"input_ids": ..., ...}')
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    labels = batch.get("labels", ids)
    if mask is not None:
        labels = labels.masked_fill(mask == 0, IGNORED)
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return ids, targets, mask
