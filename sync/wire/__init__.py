"""Wire formats: how a snapshot's numbers are written while they travel.

| name | floating-point leaves | exact |
|---|---|---|
| `float32` | as they are, whatever their type: nothing is encoded | yes |
| `bfloat16`, `float16` | rounded to two bytes; leaves of two bytes or one stay as they are | no |
| `int8` | one byte each, and one scale for each row (`rounding.py` says what a row is) | no |
| `delta` | what changed since a version that the worker is known to hold (`delta.py`) | yes |

Whole numbers, truth values, complex numbers and extra state always travel as they are.

A scheme with a wire format lays its slots out as the format says. The sender packs a model into a
block of its own and encodes that into a slot; a receiver decodes a slot into a block of its own and
loads that. Everything between them moves blocks, and knows nothing of it.
"""

from __future__ import annotations

import difflib

from sync.layout import Layout
from sync.wire.coder import Decoder, Deviation, Encoder
from sync.wire.delta import Delta, DeltaDecoder, DeltaEncoder
from sync.wire.rounding import RoundingDecoder, RoundingEncoder, rounding

WIRES = ("float32", "bfloat16", "float16", "int8", "delta")

__all__ = ["WIRES", "Decoder", "Deviation", "Encoder", "check_wire", "make_decoder", "make_encoder"]


def check_wire(name: str) -> str:
    """The name of a wire format, or a `ValueError` that says which there are."""
    if name not in WIRES:
        near = difflib.get_close_matches(str(name), WIRES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"wire={name!r}: expected one of {', '.join(WIRES)}{hint}")
    return name


def make_encoder(name: str, model: Layout, num_workers: int) -> Encoder | None:
    """The sender's end of a format for blocks laid out as `model`; None if nothing is encoded."""
    if name == "float32":
        return None
    if name == "delta":
        return DeltaEncoder(Delta(model), num_workers)
    return RoundingEncoder(rounding(name, model))


def make_decoder(name: str, model: Layout) -> Decoder | None:
    """The receiver's end."""
    if name == "float32":
        return None
    if name == "delta":
        return DeltaDecoder(Delta(model))
    return RoundingDecoder(rounding(name, model))
