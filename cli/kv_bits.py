"""What --kv-bits, --kv-text and --kv-plan ask for: bits of the KV cache, or a choice of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neuzip.choices import KvForm
from neuzip.cli.output import Output
from neuzip.errors import UsageError
from neuzip.runtime.kv_bits import KVBits, as_bits, auto_limit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from neuzip.eval.kv_calibration import KVCalibration
    from neuzip.eval.measures.texts import Text

NEEDS = dict.fromkeys(("--kv-text", "--kv-plan", "--kv-form"), ("--kv-bits",))
"""Options of a KV cache that have no effect without another."""


@dataclass(frozen=True)
class KvRequest:
    """Bits of a KV cache, None for the model's own; or a `limit` of KL divergence, and a calibration text."""

    bits: KVBits | None = None
    limit: float | None = None
    text: Text | None = None
    plan: Path | None = None
    overwrite: bool = False

    @property
    def quantises(self) -> bool:
        """Whether the cache is to be quantised."""
        return self.bits is not None or self.limit is not None


def requested(
    kv_bits: str | None, kv_text: str | None, kv_plan: Path | None, kv_form: KvForm, overwrite: bool = False
) -> KvRequest:
    """What the options ask for; a calibration text is read. Raises UsageError and NeuzipError."""
    limit = None if kv_bits is None else auto_limit(kv_bits)
    if limit is None:
        for option, value in (("--kv-text", kv_text), ("--kv-plan", kv_plan)):
            if value is not None:
                raise UsageError(
                    f"{option} {value} has no effect without --kv-bits auto:KLD",
                    f"give --kv-bits auto:0.01, or leave out {option}",
                )
        return KvRequest(None if kv_bits is None else as_bits(kv_bits).in_form(kv_form))
    if kv_text is None:
        raise UsageError(
            f"--kv-bits {kv_bits}: needs a calibration text", "add --kv-text FILE, or --kv-text demo"
        )
    from neuzip.compress.overwrite_guard import refuse_existing
    from neuzip.eval.measures.texts import read_text

    if kv_plan is not None:
        refuse_existing(kv_plan, overwrite, file=True)
    return KvRequest(None, limit, read_text(kv_text), kv_plan, overwrite)


def chosen_bits(
    out: Output, request: KvRequest, path: Path, model: PreTrainedModel, form: KvForm
) -> tuple[KVBits | None, KVCalibration | None]:
    """The bits of a request, and the calibration that chose them, which is shown; its plan file is written.

    The model was loaded from `path`, and `form` is that of its cache. Raises NeuzipError.
    """
    if request.limit is None:
        return request.bits, None
    assert request.text is not None
    from neuzip.cli.show.kv_cache import show_calibration
    from neuzip.eval.kv_calibration import calibrate

    calibration = calibrate(path, model, request.text, request.limit, out.stage, kv_form=form)
    show_calibration(out, calibration)
    if request.plan is not None:
        calibration.save(request.plan, overwrite=request.overwrite)
        out.status(f"wrote {request.plan}")
    return calibration.bits, calibration
