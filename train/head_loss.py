"""Loss and gradients of the output head, chunk by chunk of the vocabulary.

The head may be too large to be dense as a whole. With several chunks a first pass computes the log-sum-exp of
all logits of a token, and a second one loss and gradients: with P the share of a chunk in the softmax of a
token, the gradient of its logits is P softmax - onehot, where softmax is that within the chunk. It is the
gradient of the chunk's log-sum-exp, times P, minus that of the target's logit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from neuzip.kernels.linear_cross_entropy import linear_cross_entropy
from neuzip.train.gradients import BackwardPass, add_to, gradients_of, plus, summed_gradients
from neuzip.train.micro_batch import IGNORED, MicroBatch
from neuzip.train.model_shell import ModelShell
from neuzip.train.model_weights import ModelWeights


class HeadLoss:
    """Loss of micro-batches from the output of the last layer on.

    filter_gradients  on a GPU, skip the tiles of logits that `linear_cross_entropy` filters by default
    """

    def __init__(self, shell: ModelShell, weights: ModelWeights, *, filter_gradients: bool) -> None:
        self._shell, self._weights = shell, weights
        self._filter_eps = "auto" if filter_gradients else None

    @torch.no_grad()
    def loss(self, micros: Sequence[MicroBatch], count: Tensor) -> Tensor:
        """The mean loss in nats per token, of `count` tokens."""
        head, buffers = self._weights.head, self._weights.buffers
        ends = [self._hidden(micro, micro.states[-1]) for micro in micros]
        hidden = [end.reshape(-1, end.shape[-1]) for end in ends]
        lse = [self._log_sum_exp(micro, x) for micro, x in zip(micros, hidden, strict=True)]
        nll = torch.zeros((), device=self._weights.device)
        for number, (rows, _) in enumerate(head.chunks):
            weight = head.open(number, buffers.buffer())
            for micro, x, whole in zip(micros, hidden, lse, strict=True):
                chunk_nll, chunk_lse, here = self._nll(micro, x, weight.detach(), rows)
                nll = nll + torch.where(here, chunk_nll + (whole - chunk_lse), 0.0).sum() / count
        return nll

    def backward(self, micros: Sequence[MicroBatch], backward: BackwardPass) -> tuple[Tensor, list[Tensor]]:
        """The mean loss. Leaves the gradients of the last layer's output in `micro.gradient`.

        Updates the head, unless it is tied: then its gradients, a chunk each, are returned for the embedding.
        """
        head, buffers = self._weights.head, self._weights.buffers
        outputs = [micro.states[-1].detach().requires_grad_() for micro in micros]
        with torch.enable_grad():
            ends = [self._hidden(micro, x) for micro, x in zip(micros, outputs, strict=True)]
        hidden = [end.detach().reshape(-1, end.shape[-1]).requires_grad_() for end in ends]
        several = len(head.chunks) > 1
        lse: list[Tensor | None] = [None] * len(micros)
        if several:
            lse = [self._log_sum_exp(micro, x) for micro, x in zip(micros, hidden, strict=True)]
        nll = torch.zeros((), device=self._weights.device)
        of_hidden: list[Tensor | None] = [None] * len(micros)
        tied_gradients = []
        for number, (rows, _) in enumerate(head.chunks):
            weight = head.open(number, buffers.buffer())
            total: Tensor | None = None
            for i, micro in enumerate(micros):
                loss, gradient, of_weight = self._chunk(micro, hidden[i], weight, rows, lse[i], backward)
                nll = nll + loss
                of_hidden[i] = plus(of_hidden[i], gradient, several)
                if of_weight is not None:
                    total = plus(total, of_weight, backward.exact)
            if total is None:  # the head is frozen
                continue
            if self._weights.tied:
                tied_gradients.append(total)
            else:
                (total,) = summed_gradients([total])
                backward.use(head.slot, rows, weight, total, head.states[number])
                if backward.update:
                    head.close(number, weight)
        others = [slot.parameter for slot in self._weights.trained_others]
        for micro, x, end, of_end in zip(micros, outputs, ends, of_hidden, strict=True):
            assert of_end is not None
            micro.gradient, *of_others = gradients_of(end, [x, *others], of_end.to(end.dtype).view_as(end))
            add_to(backward.others, of_others)
        return nll, tied_gradients

    def _hidden(self, micro: MicroBatch, x: Tensor) -> Tensor:
        """The input of the head from the output `x` of the last layer, [B, T, D]."""
        with self._shell.rows(micro.rows):
            return self._shell.end(micro.row_numbers, micro.mask, x)

    def _log_sum_exp(self, micro: MicroBatch, hidden: Tensor) -> Tensor:
        """Log-sum-exp of the logits of all chunks, [N]."""
        lse: Tensor | None = None
        with torch.no_grad():
            for number, (rows, _) in enumerate(self._weights.head.chunks):
                weight = self._weights.head.open(number, self._weights.buffers.buffer())
                _, chunk_lse, _ = self._nll(micro, hidden, weight, rows)
                lse = chunk_lse if lse is None else torch.logaddexp(lse, chunk_lse)
        assert lse is not None
        return lse

    def _nll(
        self, micro: MicroBatch, hidden: Tensor, weight: Tensor, rows: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Within a chunk, [N] each: negative log-likelihoods, log-sum-exps, whether the target is in it.

        The negative log-likelihood is 0 where the target is not in the chunk.
        """
        here = (micro.targets >= rows.start) & (micro.targets < rows.stop)
        bias = self._shell.head.bias
        losses = linear_cross_entropy(
            hidden, weight, torch.where(here, micro.targets - rows.start, IGNORED),
            linear_bias=None if bias is None else bias[rows], softcap=self._shell.softcap,
            reduction="none", return_lse=True, ignore_index=IGNORED, filter_eps=self._filter_eps,
        )  # fmt: skip
        assert isinstance(losses, tuple)
        return *losses, here

    def _chunk(
        self,
        micro: MicroBatch,
        hidden: Tensor,
        weight: Tensor,
        rows: slice,
        lse: Tensor | None,
        backward: BackwardPass,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """A chunk's share of the loss, and of the gradients of hidden states and of weights if trained.

        lse  log-sum-exps of all chunks, [N]; None if this chunk is the only one
        """
        trained = self._weights.head.slot.trainable
        weight = weight.detach().requires_grad_(trained)
        with torch.enable_grad():
            nll, chunk_lse, here = self._nll(micro, hidden, weight, rows)
        whole = chunk_lse if lse is None else lse
        loss = torch.where(here, nll + (whole - chunk_lse), 0.0).detach().sum() / backward.count
        on_nll = here.to(chunk_lse.dtype) / backward.count
        share = (chunk_lse - whole).detach().exp()
        predicted = micro.targets != IGNORED
        on_lse = torch.where(predicted, share - here.to(chunk_lse.dtype), 0.0) / backward.count
        bias = self._shell.head.bias
        biased = bias is not None and bias.requires_grad
        inputs = [hidden, *([weight] if trained else []), *([bias] if biased else [])]
        gradients = torch.autograd.grad((nll, chunk_lse), inputs, (on_nll, on_lse))
        if biased:
            slots = self._weights.trained_others
            at = next(i for i, slot in enumerate(slots) if (self._shell.head, "bias") in slot.places)
            backward.others[at] = plus(backward.others[at], gradients[-1], True)
        return loss, gradients[0], gradients[1] if trained else None
