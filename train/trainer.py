"""Full-parameter training with losslessly compressed matrices, layer by layer (NeuZip, section 3).

    trainer = neuzip.train_compressed(model, "adamw8bit")
    for batch in loader:
        loss = trainer.step(batch, lr)
    trainer.save(folder)                  trainer.load(folder) resumes as if training had not stopped

The parts of a step, and what is dense in each:

    forward   each layer is decoded into a shared buffer and run without a graph. Of its micro-batches only
              the layer's input stays (activation checkpointing)
    head      chunk by chunk of the vocabulary, logits in tiles (kernels.linear_cross_entropy)
    backward  a layer is decoded again and run with a graph. Its gradients are used and freed, and its
              matrices encoded, before the layer below (LOMO: Lv et al. 2023, arXiv 2306.09782)
    tables    embedding and head are stored in chunks of rows. A gradient of the embedding has only the rows
              of the batch's tokens

Norms, biases and other vectors stay dense. With `compressed=False` all arrays do: that is LOMO. It gives the
same bits wherever torch itself does from run to run: on a CPU, and on a GPU under `deterministic_algorithms`.

Accumulation: a batch is cut into micro-batches, and all of them pass through a layer before the next layer.
So gradients of the whole batch are summed in fp32 for one layer at a time. The cost is the input of each
layer for each token of the batch, 2 * hidden_size bytes in bf16. With one micro-batch and one process,
gradients have the dtype of the weights.

Clipping by the global norm: "two-pass" runs the backward pass twice and is exact. "running" takes the norm of
the previous step: it is approximate, does not clip the first step, and costs next to nothing.

A tied embedding is one table: the dense gradient of the head is added to that of the embedding. Under
torch.distributed each process has its own batch, gradients are summed in fp32 before an update, and all
processes keep equal weights. Losses other than the head's, such as those of routers, are not added.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from neuzip.compress.device import AnyDevice
from neuzip.errors import BUG_OR_MEMORY, NeuzipError, UsageError
from neuzip.runtime.devices import place_of
from neuzip.runtime.requirements import require_model
from neuzip.train import saved
from neuzip.train.compressed_array import TritonCompressedArray
from neuzip.train.gradients import (
    BackwardPass,
    add_to,
    gradients_of,
    plus,
    summed,
    summed_gradients,
    world_size,
)
from neuzip.train.head_loss import HeadLoss
from neuzip.train.micro_batch import IGNORED, MicroBatch, micro_batches
from neuzip.train.model_shell import ModelShell
from neuzip.train.model_weights import ModelWeights
from neuzip.train.optimizers import Optimizer, optimizer_of
from neuzip.train.rng_states import RngStates
from neuzip.train.states import STATE_STORAGES, StateStorage, StateStore, nbytes
from neuzip.train.units import ParameterSlot, rows_inside, slots_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Clipping = Literal["two-pass", "running"]


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
    filter_gradients: bool = False,
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
                      computing the gradients of the head. A CPU never filters. True is for trained models:
                      from random weights it raises the loss

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
    """A model in training, which `train_compressed` returns.

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
        _require_options(max_grad_norm, clipping, micro_batch_size, optimizer_state)
        self.model, self.optimizer, self.compressed, self.seed = model, optimizer, compressed, seed
        self.clip, self.clipping, self.micro_batch_size = max_grad_norm, clipping, micro_batch_size
        self.steps = 0
        self.norm: float | None = None
        self.shell = ModelShell(model)
        self.device = model.device if device is None else place_of(device)
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        slots = slots_of(model)
        if optimizer.stochastic and any(slot.dtype != torch.bfloat16 for slot in slots.values()):
            raise UsageError(
                f"this optimizer rounds weights by chance, which is for bfloat16, not {model.dtype}",
                "choose sgd or adamw, or train in bfloat16",
            )
        self.store = StateStore(
            optimizer, self.device, compressed=optimizer_state == "lossless", triton=triton
        )
        prefetch = compressed and (self.device.type == "cuda" if ahead is None else ahead)
        self.weights = ModelWeights(
            self.shell, slots, self.device, compressed=compressed, prefetch=prefetch, triton=triton
        )
        self.store.reserve(self.weights.largest_update)
        self._head = HeadLoss(self.shell, self.weights, filter_gradients=filter_gradients)
        model.train()
        self.rng = RngStates(model, self.device)
        if world_size() > 1:
            self.weights.require_equal_in_processes()

    @property
    def tied(self) -> bool:
        """Whether the embedding and the output head share their weights."""
        return self.weights.tied

    @property
    def stored_bytes(self) -> int:
        """Memory of all matrices between steps, as stored."""
        return self.weights.stored_bytes

    @property
    def state_bytes(self) -> int:
        """Memory of the optimizer states between steps; 0 before the first step."""
        return sum(nbytes(pieces) for _, chunks, _ in self.weights.states() for pieces in chunks)

    @property
    def dense_bytes(self) -> int:
        """Memory that all matrices would take uncompressed."""
        return self.weights.dense_bytes

    # A step

    def step(self, batch: Tensor | Mapping[str, Tensor], lr: float, *, decay: bool = True) -> float:
        """Run forward pass, backward pass and update. Returns the mean loss in nats per predicted token.

        batch  int64 [B, T + 1]: windows in which each token predicts the next. Or a mapping with "input_ids"
               [B, T], optionally "labels" [B, T] and optionally "attention_mask". Labels follow transformers:
               a label belongs to the token at its own position, and -100 excludes it. B may differ between
               processes
        decay  False leaves out the optimizer's weight decay in this step
        """
        micros, count = self._forward(batch)
        self.steps += 1
        scale = None
        if self.clip is not None and self.clipping == "two-pass":
            _, squares = self._backward(micros, count, lr, None, update=False, decay=decay)
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
        loss, squares = self._backward(micros, count, lr, scale, update=True, decay=decay)
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
            nll = self._head.loss(micros, count)
        finally:
            self.model.train()
        return float(summed(nll))

    def _scale(self, norm: float) -> Tensor | None:
        """The factor that clips gradients of this norm, None if it is small enough."""
        assert self.clip is not None
        return None if norm <= self.clip else torch.tensor(self.clip / norm, device=self.device)

    @torch.no_grad()
    def _forward(self, batch: Tensor | Mapping[str, Tensor]) -> tuple[list[MicroBatch], Tensor]:
        """Micro-batches with the inputs of all layers, and how many tokens all processes predict."""
        micros = list(micro_batches(batch, self.micro_batch_size, self.weights))
        for micro in micros:
            before = self.rng.current()
            with self.shell.rows(micro.rows):
                x, micro.arguments = self.shell.begin(micro.row_numbers, micro.mask)
            micro.states.append(x)
            micro.rng_states.append(before)
        layers = self.weights.layers
        for number, layer in enumerate(layers):
            next_layer = layers[number + 1] if number + 1 < len(layers) else None
            with self.weights.opened(layer, next_layer=next_layer):
                for micro in micros:
                    micro.rng_states.append(self.rng.current())
                    micro.states.append(layer(micro.states[-1], micro.arguments[number]))
        counts = [(micro.targets != IGNORED).sum() for micro in micros]
        return micros, summed(torch.stack(counts).sum())

    def _backward(
        self, micros: Sequence[MicroBatch], count: Tensor, lr: float, scale: Tensor | None, *, update: bool,
        decay: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run a backward pass. Returns the loss, and the sum of the squares of all gradients.

        Without `update` no weight is changed, and the pass can be repeated.
        """
        backward = BackwardPass(
            self.store, count, self.seed, self.steps, lr, scale,
            exact=len(micros) > 1 or world_size() > 1, update=update,
            measure=self.clip is not None and (not update or self.clipping == "running"),
            others=[None] * len(self.weights.trained_others), decay=decay,
        )  # fmt: skip
        nll, tied_gradients = self._head.backward(micros, backward)
        layers = self.weights.layers
        for number in reversed(range(len(layers))):
            next_layer = layers[number - 1] if number else None
            with self.weights.opened(layers[number], changes=update, next_layer=next_layer):
                if backward.exact:
                    self._backward_of_layer(number, micros, backward)
                else:
                    self._backward_of_layer_at_once(number, micros[0], backward)
        self._backward_of_embedding(micros, tied_gradients, backward)
        return summed(nll), backward.squares

    def _backward_of_layer(self, number: int, micros: Sequence[MicroBatch], backward: BackwardPass) -> None:
        """Sum a layer's gradients over micro-batches and processes, in fp32, and use them."""
        slots = self.weights.layers[number].trained
        totals: list[Tensor | None] = [None] * len(slots)
        for micro in micros:
            x, out = self._run_again(number, micro, backward.update)
            parameters = [slot.parameter for slot in slots]
            assert micro.gradient is not None
            micro.gradient, *gradients = gradients_of(out, [x, *parameters], micro.gradient)
            del out, x
            for i, parameter in enumerate(parameters):
                gradient, gradients[i] = gradients[i], None
                totals[i] = plus(
                    totals[i], torch.zeros_like(parameter) if gradient is None else gradient, True
                )
        sums = summed_gradients([total for total in totals if total is not None])
        del totals
        for slot in reversed(slots):
            backward.use(slot, None, slot.parameter.data, sums.pop(), slot.states)

    def _run_again(self, number: int, micro: MicroBatch, forget: bool) -> tuple[Tensor, Tensor]:
        """A layer's input and output, with a graph. `forget` drops the states above the layer."""
        x = micro.states[number].detach().requires_grad_()
        with torch.enable_grad(), self.rng.replayed(micro.rng_states[number + 1]):
            out = self.weights.layers[number](x, micro.arguments[number])
        if forget:
            micro.states[number + 1 :] = []
        return x, out

    def _backward_of_layer_at_once(self, number: int, micro: MicroBatch, backward: BackwardPass) -> None:
        """Use each gradient of a layer as soon as autograd has it, so that few exist at a time.

        A weight is changed only after its own products. Autograd does not notice, as `data` is a view that it
        does not follow.
        """
        slots = self.weights.layers[number].trained
        left = set(slots)

        def use(slot: ParameterSlot) -> None:
            parameter = slot.parameter
            assert parameter.grad is not None
            gradient, parameter.grad = parameter.grad, None
            left.discard(slot)
            backward.use(slot, None, parameter.data, gradient, slot.states)

        for slot in slots:
            slot.parameter.grad = None
        hooks = [_after_gradient(slot.parameter, partial(use, slot)) for slot in slots]
        try:
            x, out = self._run_again(number, micro, backward.update)
            torch.autograd.backward(out, micro.gradient)
        finally:
            for hook in hooks:
                hook.remove()
        micro.gradient = x.grad
        for slot in slots:
            if slot in left:  # nothing depends on it, but weight decay changes it all the same
                zeros = torch.zeros_like(slot.parameter)
                backward.use(slot, None, slot.parameter.data, zeros, slot.states)

    def _backward_of_embedding(
        self, micros: Sequence[MicroBatch], tied_gradients: list[Tensor], backward: BackwardPass
    ) -> None:
        """Use the gradients of embeddings and of the parameters outside layers and tables."""
        slots, of_rows = self.weights.trained_others, []
        for micro in micros:
            assert micro.gradient is not None
            with (
                torch.enable_grad(),
                self.rng.replayed(micro.rng_states[0]),
                self.shell.rows(micro.rows),
            ):
                x = self.shell.embed(micro.row_numbers, micro.mask)
            inputs = [micro.rows, *(slot.parameter for slot in slots)]
            rows, *of_others = gradients_of(x, inputs, micro.gradient)
            add_to(backward.others, of_others)
            assert rows is not None
            if (padding := self.shell.embedding.padding_idx) is not None:
                rows[micro.tokens == padding] = 0
            of_rows.append(rows)
        dtype = torch.float32 if backward.exact else None
        whole = [
            torch.zeros_like(slot.parameter, dtype=dtype) if one is None else one.to(dtype or slot.dtype)
            for slot, one in zip(slots, backward.others, strict=True)
        ]
        for slot, gradient in zip(slots, summed_gradients(whole), strict=True):
            backward.use(slot, None, slot.parameter.detach(), gradient, slot.states)
        embedding = self.weights.embedding
        if not embedding.slot.trainable:
            return
        for number, (chunk, _) in enumerate(embedding.chunks):
            tied = tied_gradients[number] if tied_gradients else None
            (total,) = summed_gradients(
                [self._gradient_of_rows(micros, of_rows, chunk, tied, backward.exact)]
            )
            weight = embedding.open(number, self.weights.buffers.buffer())
            backward.use(embedding.slot, chunk, weight, total, embedding.states[number])
            if backward.update:
                embedding.close(number, weight)

    def _gradient_of_rows(
        self, micros: Sequence[MicroBatch], of_rows: Sequence[Tensor], chunk: slice, tied: Tensor | None,
        exact: bool,
    ) -> Tensor:  # fmt: skip
        """Gradient of a chunk of the embedding: that of a tied head, and those of the batch's tokens.

        It is [rows, D], in fp32 if `exact`, else in the weights' dtype.
        """
        embedding = self.weights.embedding
        dtype = torch.float32 if exact else embedding.slot.dtype
        shape = chunk.stop - chunk.start, embedding.columns
        total = torch.zeros(shape, dtype=dtype, device=self.device) if tied is None else tied
        for micro, gradient in zip(micros, of_rows, strict=True):
            at, row = rows_inside(micro.tokens, chunk)
            total[row] += gradient[at].to(dtype)  # a token is there once: no row is added to twice
        return total

    def _raise_if_corrupt(self) -> None:
        """Wait for all jobs. Raise NeuzipError if a decoder has met words that no encoder writes."""
        self.weights.buffers.wait()
        arrays = list(self.weights.arrays())
        for _, chunks, _ in self.weights.states():
            arrays += [array for pieces in chunks for piece in pieces for array in piece.values()]
        flags = [array.errors for array in arrays if isinstance(array, TritonCompressedArray)]
        errors = [flag for flag in flags if flag is not None]
        if errors and bool(torch.cat(errors).any()):
            raise NeuzipError("a weight in memory cannot be decoded", BUG_OR_MEMORY)

    # The model as a whole

    @contextmanager
    def dense(self, device: torch.device | str) -> Iterator[PreTrainedModel]:
        """Context in which the model has dense copies of all weights on `device`, in evaluation mode."""
        with self.weights.dense(device):
            yield self.model

    def release(self) -> PreTrainedModel:
        """Return the model with ordinary dense weights. The trainer cannot be used afterwards."""
        self.weights.release()
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


def _require_options(
    max_grad_norm: float | None, clipping: str, micro_batch_size: int | None, optimizer_state: str
) -> None:
    """Raise UsageError for an option of `train_compressed` that cannot be."""
    if clipping not in ("two-pass", "running"):
        raise UsageError(f"`clipping={clipping!r}`: there is no such clipping", "choose two-pass or running")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UsageError(
            f"`max_grad_norm={max_grad_norm}`: gradients cannot be clipped to that", "give a number above 0"
        )
    if micro_batch_size is not None and micro_batch_size < 1:
        raise UsageError(f"`micro_batch_size={micro_batch_size}`: is no number of rows", "give 1 and more")
    if optimizer_state not in STATE_STORAGES:
        raise UsageError(
            f"`optimizer_state={optimizer_state!r}`: is no way to keep it",
            f"choose from {', '.join(STATE_STORAGES)}",
        )


def _after_gradient(parameter: nn.Parameter, use: Callable[[], None]) -> Any:
    """A hook that calls `use` once a parameter has its gradient."""
    return parameter.register_post_accumulate_grad_hook(lambda _: use())  # type: ignore[no-untyped-call]
