"""Wire formats: how the numbers of a version are written while they travel.

| name | floating-point leaves | exact |
|---|---|---|
| `float32` | as they are, whatever their dtype: nothing is encoded | yes |
| `bfloat16`, `float16` | rounded to two bytes; leaves of one or two bytes stay as they are | no |
| `int8` | one byte each, and one scale for each block (`rounding.py` defines it) | no |
| `delta` | the changes since a version that the worker is known to hold (`delta.py`) | yes |

Integers, booleans, complex numbers and extra state always travel as they are. So do the buffers of
a module, unless `round_buffers` is set.

    trainer                                             worker
    -------                                             ------
    EncodedSender: the caller writes a whole model
      prepare(): encode it into a block of `inner`
      publish()                              --->       Receiver
                                                          take(), and decode into a private block
      poll(): tell the encoder what was applied   <---    answer()
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple

from sync.channel import Answer, Part, SenderChannel
from sync.effects.delta import DeltaDecoder, DeltaEncoder, DeltaFormat
from sync.effects.formats import Decoder, Encoder, copy_stamp
from sync.effects.rounding import RoundingDecoder, RoundingEncoder, rounded_format
from sync.effects.wrapper import SenderWrapper
from sync.model.binding import Binding
from sync.model.layout import CheckFinite, Layout
from sync.model.snapshot import NEVER, Snapshot

WIRES = ("float32", "bfloat16", "float16", "int8", "delta")


def check_wire(name: str) -> str:
    """The name of a wire format, or a `ValueError` that lists them."""
    if name not in WIRES:
        near = difflib.get_close_matches(str(name), WIRES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"wire={name!r}: expected one of {', '.join(WIRES)}{hint}")
    return name


def make_encoder(
    name: str, model_layout: Layout, num_workers: int, *, round_buffers: bool = False
) -> Encoder | None:
    """The sender's part of a format; None if nothing is encoded."""
    if name == "float32":
        return None
    if name == "delta":
        return DeltaEncoder(DeltaFormat(model_layout), num_workers)
    return RoundingEncoder(rounded_format(name, model_layout, round_buffers=round_buffers))


def make_decoder(name: str, model_layout: Layout, *, round_buffers: bool = False) -> Decoder | None:
    """The receiver's part of a format; None if nothing is encoded."""
    if name == "float32":
        return None
    if name == "delta":
        return DeltaDecoder(DeltaFormat(model_layout))
    return RoundingDecoder(rounded_format(name, model_layout, round_buffers=round_buffers))


class _Prepared(NamedTuple):
    """A part that is not published yet, its encoded block and the model it was made from."""

    part: Part
    encoded: Snapshot
    whole: Snapshot


class EncodedSender(SenderWrapper):
    """Encodes each version into a block of `inner`, whose layout is the encoder's."""

    def __init__(self, inner: SenderChannel, encoder: Encoder, model_layout: Layout):
        super().__init__(inner, model_layout)
        self._encoder = encoder
        self._prepared: list[_Prepared] = []

    def blocks_in_use(self) -> list[Snapshot]:
        return self._encoder.bases()

    def pack(
        self, binding: Binding, block: Snapshot, version: int, *, check: CheckFinite, own: bool
    ) -> None:
        if check is True:
            check = not self._encoder.checks_finite
        super().pack(binding, block, version, check=check, own=own)

    def prepare(self, block: Snapshot, workers: Sequence[int]) -> list[Part]:
        # Anything still prepared for these workers is left over from a refused publish.
        self._prepared = [p for p in self._prepared if set(workers).isdisjoint(p.part.workers)]
        groups = self._encoder.split(workers)
        return [part for group in groups for part in self._encode(block, group)]

    def _encode(self, whole: Snapshot, workers: Sequence[int]) -> list[Part]:
        block = self.inner.free_block([prepared.encoded for prepared in self._prepared])
        block.mark(builds_on=NEVER, is_base=False, filled=0)
        max_error, relative_error = self._encoder.encode(whole, block, workers)
        copy_stamp(whole, block, self._encoder.checksums(whole))
        parts = [
            part._replace(max_error=max_error, relative_error=relative_error)
            for part in self.inner.prepare(block, workers)
        ]
        self._prepared += [_Prepared(part, block, whole) for part in parts]
        return parts

    def publish(self, block: Snapshot, workers: Sequence[int]) -> None:
        prepared = next(p for p in self._prepared if p.part.block is block)
        self._prepared.remove(prepared)
        self._encoder.published(prepared.whole, prepared.encoded, workers)
        self.inner.publish(block, workers)

    def poll(self) -> list[Answer]:
        answers = self.inner.poll()
        for answer in answers:
            self._encoder.heard(answer)
        return answers
