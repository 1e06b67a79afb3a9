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
    Sender: encode a whole model into a
      block of the channel, and publish it   --->       Receiver
                                                          take(), and decode into a private block
      tell the encoder what was applied      <---         answer()
"""

from __future__ import annotations

import difflib

from sync.effects.delta import DeltaDecoder, DeltaEncoder, DeltaFormat
from sync.effects.pipeline import Decoder, Encoder
from sync.effects.rounding import RoundingDecoder, RoundingEncoder, rounded_format
from sync.model.block import Layout

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
