"""From a planned tensor to its record and streams: all candidates of one tensor, and which of them is stored.

    delta       the difference from the base's tensor, where that takes less than the tensor alone
    as planned  what the scheme of a rule makes of it: rounded, ternary, or a form of another codec
    exact       the smallest form that keeps every bit, where no rule rounds, or the tensor does not fit
    raw         the bytes themselves, where nothing takes less

Nothing is written here, and nothing of one tensor is remembered for the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from neuzip.formats.records import QuantizedRecord

from .delta_base import DeltaBase
from .device import CPU, Device
from .pieces import PIECE, Map, NotWorthwhile
from .plan import PlannedTensor
from .prepared import PreparedCodes
from .schemes import CODECS, Codec, EncodedTensor, codec_for
from .schemes.codec import Declined, TensorInput
from .schemes.delta import Difference, difference
from .schemes.lossless import CODEC as LOSSLESS_CODEC
from .schemes.raw import CODEC as RAW_CODEC
from .sources.source import SourceTensor, TensorSource

if TYPE_CHECKING:
    from .gpu import Gpu

SMALL = PIECE
"""Weights up to which a tensor is one job and read at once; larger ones are split among the workers."""


class TensorEncoder:
    """Codes tensors of `source`, as differences from a `base` if there is one. For several threads.

    `online` is the quantization_config of a checkpoint that transformers makes ternary in every forward
    pass, if it is one. `prepared` has codes for tensors that rules quantize, if there are any. The bytes are
    the same on any `device`.
    """

    def __init__(
        self,
        source: TensorSource,
        device: Device = CPU,
        base: DeltaBase | None = None,
        online: Mapping[str, Any] | None = None,
        prepared: PreparedCodes | None = None,
    ) -> None:
        self._source = source
        self._device = device
        self._base = base
        self._online = online
        self._prepared = prepared

    def encode(self, planned: PlannedTensor, parallel: Map = map) -> EncodedTensor:
        """Record and streams of a tensor that is no alias: the smallest of its candidates.

        `parallel` computes the pieces of a large one. Raises NeuzipError where the source cannot be read.
        """
        of_base = self._difference(planned, parallel)
        if of_base is not None and of_base.nbytes <= of_base.least:
            return of_base
        alone = self._alone(planned, parallel)
        if of_base is not None and not (alone.streams and alone.nbytes < of_base.nbytes):
            return of_base
        return alone

    def _difference(self, planned: PlannedTensor, parallel: Map) -> Difference | None:
        """A tensor as its difference from the base's; None where there is none, or it saves nothing."""
        tensor, base = planned.tensor, self._base
        counterpart = base.counterpart(tensor) if base is not None and not planned.is_adapter else None
        if base is None or counterpart is None:
            return None
        return difference(
            TensorInput(tensor.info, self._source.reader(tensor), parallel),
            TensorInput(counterpart.info, base.source.reader(counterpart), parallel),
            None if base.source.checkpoint.is_file else counterpart.file,
            code=not planned.is_raw,
        )

    def _alone(self, planned: PlannedTensor, parallel: Map) -> EncodedTensor:
        """The smallest candidate that needs no base."""
        tensor, note = self._input(planned, parallel)
        codec = codec_for(planned.scheme)
        try:
            return codec.encode(tensor, planned.scheme).with_note(note)
        except Declined as reason:
            # What a rule rounds and cannot be rounded has one exact form, as in all earlier versions.
            codecs = CODECS.values() if codec.rounds is False else [LOSSLESS_CODEC]
            forms, notes = exact_forms(tensor, codecs)
            smallest = min(forms, key=lambda form: form.nbytes, default=None) or RAW_CODEC.encode(tensor)
            for text in (*notes, *(form.note for form in forms if form is not smallest)):
                smallest = smallest.with_note(text)
            return smallest.with_note(str(reason)).with_note(note)
        except NotWorthwhile:
            return RAW_CODEC.encode(tensor).with_note(note)

    def _input(self, planned: PlannedTensor, parallel: Map) -> tuple[TensorInput, str]:
        """A tensor to be coded, and a note if it is too large for the GPU that would code it."""
        info, reader = planned.tensor.info, self._source.reader(planned.tensor)
        if planned.is_raw:
            return TensorInput(info, reader, parallel), ""
        if info.numel <= SMALL:
            data = reader(0, info.nbytes)
            reader = lambda start, stop: data[start:stop]  # noqa: E731
        gpu, note = self._gpu_for(planned.tensor)
        prepared = None
        if self._prepared is not None and codec_for(planned.scheme).record is QuantizedRecord:
            prepared = self._prepared.codes_of(info.name)
        return TensorInput(info, reader, parallel, gpu, self._online, prepared), note

    def _gpu_for(self, tensor: SourceTensor) -> tuple[Gpu | None, str]:
        gpu = self._device.gpu_for(tensor.info.numel)
        if gpu is None or gpu.has_room_for(tensor.info.nbytes):
            return gpu, ""
        return None, f"too large for the memory of {self._device.name}: coded on the CPU"


def exact_forms(tensor: TensorInput, codecs: Iterable[Codec[Any]]) -> tuple[list[EncodedTensor], list[str]]:
    """The forms of some codecs that keep every bit of a tensor in fewer bytes, and notes of the others."""
    forms, notes = [], []
    for codec in codecs:
        try:
            form = codec.encode_exact(tensor)
        except NotWorthwhile:
            continue
        except Declined as reason:
            notes.append(str(reason))
            continue
        if form is not None:
            forms.append(form)
    return forms, notes
