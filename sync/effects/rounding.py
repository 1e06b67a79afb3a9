"""Wire formats: how the numbers of a version are written while they travel.

| name | floating-point leaves | exact |
|---|---|---|
| `float32` | as they are, whatever their dtype: nothing is encoded | yes |
| `bfloat16`, `float16` | rounded to two bytes; leaves of one or two bytes stay as they are | no |
| `int8` | one byte each, and one scale for each block | no |

Integers, booleans, complex numbers and extra state always travel as they are.

    trainer                                             worker
    -------                                             ------
    Pipeline: encode a whole model into a
      block of the channel, and publish it   --->       Receiver: take(), and decode into a
                                                          private block

A block of an int8 leaf is a row: the weights of one output of its layer, that is, a row of a matrix
or one filter of a convolution. Vectors, and matrices with rows of fewer than four numbers, are cut
into blocks of 64 numbers instead. A number is off by at most 1/254 of the largest of its block.

Buffers travel as they are, unless `round_buffers` is set. They hold constants and statistics, such
as bounds of actions, whose numbers may differ by orders of magnitude and of which each one matters.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from itertools import compress

import torch
from torch import Tensor, nn

from sync.model.block import Layout, Leaf, Snapshot, checksum, private_snapshot
from sync.model.copying import count_non_finite, widened

WIRES = ("float32", "bfloat16", "float16", "int8")
MIN_ROW = 4
BLOCK = 64
INT8_MAX = 127
# Small leaves lie close together, because padding travels too.
ALIGNMENT = 16


class RoundedFormat:
    """Rounds a model for the sender, and converts blocks back to its dtypes for a receiver.

    As it is, for `bfloat16` and `float16`: two bytes per number.

    layout: of encoded blocks.
    rounded: for each leaf of the model, whether it is rounded.
    checks_finite: whether `encode` refuses NaN and infinity in parameters, because the format
        cannot represent them.
    """

    min_itemsize = 3  # of the leaves that are rounded
    checks_finite = False

    def __init__(self, model: Layout, dtype: torch.dtype, *, round_buffers: bool):
        self.model, self.dtype = model, dtype
        self._decoded = private_snapshot(model)
        self.rounded = [
            leaf.dtype.is_floating_point
            and leaf.dtype.itemsize >= self.min_itemsize
            and leaf.nbytes > 0
            and (round_buffers or not leaf.is_buffer)
            for leaf in model.leaves
        ]
        self.name = str(dtype).removeprefix("torch.")
        tensors: dict[str, Tensor] = {}
        for leaf, rounded in zip(model.leaves, self.rounded, strict=True):
            if rounded:
                tensors |= self._encoded_tensors(leaf)
            else:
                tensors[leaf.name] = _meta(leaf.shape, leaf.dtype)
        layout = Layout.of(tensors, alignment=ALIGNMENT)
        self.layout = layout.with_tail_of(model)
        self._index = {leaf.name: i for i, leaf in enumerate(self.layout.leaves)}

    @staticmethod
    def of(wire: str, model: Layout, *, round_buffers: bool = False) -> RoundedFormat | None:
        """The format of that name; None if nothing is encoded."""
        if wire == "float32":
            return None
        kind = Int8 if wire == "int8" else RoundedFormat
        return kind(model, getattr(torch, wire), round_buffers=round_buffers)

    def _encoded_tensors(self, leaf: Leaf) -> dict[str, Tensor]:
        """What travels for a leaf that is rounded, as meta tensors."""
        return {leaf.name: _meta(leaf.shape, self.dtype)}

    def write(self, whole: Snapshot, block: Snapshot) -> None:
        """Write the leaves of `block` from the model in `whole`."""
        for leaf, view in zip(self.model.leaves, whole.views, strict=True):
            block.views[self._index[leaf.name]].copy_(view)

    def read(self, block: Snapshot, whole: Snapshot) -> None:
        """Write the leaves of `whole` from `block`."""
        for leaf, view in zip(self.model.leaves, whole.views, strict=True):
            view.copy_(block.views[self._index[leaf.name]])

    def encode(self, whole: Snapshot, block: Snapshot) -> tuple[float, float]:
        """Write the model in `whole` into `block`, with its stamp.

        Returns the largest absolute error, and the relative error of the worst tensor. What cannot
        be represented is a `ValueError`.
        """
        block.begin()
        self.write(whole, block)
        self.read(block, self._decoded)
        originals = compress(whole.views, self.rounded)
        copies = compress(self._decoded.views, self.rounded)
        max_error, relative_error = measure_error(originals, copies)
        if not math.isfinite(max_error):
            self._refuse_overflow(whole)
        checksums = whole.checksums
        decoded = [*map(checksum, self._decoded.views), checksums[-1]] if checksums else []
        block.stamp_as(whole, decoded)
        return max_error, relative_error

    def _refuse_overflow(self, whole: Snapshot) -> None:
        pairs = zip(whole.views, self._decoded.views, strict=True)
        for leaf, (sent, decoded) in zip(self.model.leaves, pairs, strict=True):
            lost = int((torch.isfinite(sent) & ~torch.isfinite(decoded)).sum())
            if lost:
                largest = float(sent[torch.isfinite(sent)].abs().amax())
                raise ValueError(
                    f"send refused: {leaf.name!r} holds {lost} value(s) too large for "
                    f"wire={self.name} (up to {largest:.4g}), and workers keep the "
                    f"last good version; use {_wider_format(self.name)}"
                )

    def decode(self, block: Snapshot) -> Snapshot:
        """The whole model, with the stamp of the block. It stays valid until the next call."""
        self.read(block, self._decoded)
        self._decoded.stamp_as(block, block.checksums)
        return self._decoded


class Int8(RoundedFormat):
    """One byte per number. The largest number of a block is 127 times its scale."""

    min_itemsize = 2
    checks_finite = True

    def _encoded_tensors(self, leaf: Leaf) -> dict[str, Tensor]:
        scale_dtype = torch.float64 if leaf.dtype == torch.float64 else torch.float32
        return {
            leaf.name: _meta(leaf.shape, torch.int8),
            _scale_name(leaf): _meta((_num_blocks(leaf), 1), scale_dtype),
        }

    def write(self, whole: Snapshot, block: Snapshot) -> None:
        for leaf, rounded, view in zip(self.model.leaves, self.rounded, whole.views, strict=True):
            target = block.views[self._index[leaf.name]]
            if not rounded:
                if not leaf.is_buffer:
                    _require_finite(leaf, view, view)
                target.copy_(view)
                continue
            scale = block.views[self._index[_scale_name(leaf)]]
            numbers = _in_blocks(leaf, view).to(scale.dtype)
            torch.amax(numbers.abs(), dim=1, keepdim=True, out=scale)
            _require_finite(leaf, scale, view)
            scale.div_(INT8_MAX)
            # A block of zeros has no scale, and that of the smallest numbers underflows to zero.
            scale.masked_fill_(scale == 0, 1.0)
            steps = (numbers / scale).round_().clamp_(-INT8_MAX, INT8_MAX)
            target.view(-1).copy_(steps.view(-1)[: view.numel()])

    def read(self, block: Snapshot, whole: Snapshot) -> None:
        for leaf, rounded, view in zip(self.model.leaves, self.rounded, whole.views, strict=True):
            encoded = block.views[self._index[leaf.name]]
            if rounded:
                scale = block.views[self._index[_scale_name(leaf)]]
                numbers = _in_blocks(leaf, encoded) * scale
                view.view(-1).copy_(numbers.view(-1)[: view.numel()])
            else:
                view.copy_(encoded)


def _require_finite(leaf: Leaf, summary: Tensor, numbers: Tensor) -> None:
    """Refuse a leaf with NaN or infinity; `summary` is not finite if one of its numbers is not."""
    if (leaf.dtype.is_floating_point or leaf.dtype.is_complex) and count_non_finite(summary):
        raise ValueError(
            f"send refused: {leaf.name!r} holds {count_non_finite(numbers)} NaN or infinite "
            "value(s), which int8 cannot represent, and workers keep the last good version"
        )


def check_wire(name: str) -> str:
    """The name of a wire format, or a `ValueError` that lists them."""
    if name not in WIRES:
        near = difflib.get_close_matches(str(name), WIRES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if name == "delta":
            hint = "; 'delta' is gone: use 'float32', which is exact, or 'bfloat16', half the bytes"
        raise ValueError(f"wire={name!r}: expected one of {', '.join(WIRES)}{hint}")
    return name


def measure_error(sent: Iterable[Tensor], decoded: Iterable[Tensor]) -> tuple[float, float]:
    """The largest absolute error, and the relative error of the worst tensor.

    The latter is the root mean square of its errors, relative to that of its numbers. NaN and
    infinity are left out. A finite number that arrives as an infinite one makes the largest error
    infinite.
    """
    largest = relative = 0.0
    for original, copy in zip(sent, decoded, strict=True):
        expected = widened(original)
        difference = widened(copy) - expected
        if not math.isfinite(worst := float(difference.abs().amax())):
            finite = torch.isfinite(expected)
            expected = torch.where(finite, expected, 0)
            difference = torch.where(finite, difference, 0)
            worst = float(difference.abs().amax())
        largest = max(largest, worst)
        size = _sum_of_squares(expected)
        if 0.0 < size < math.inf:
            relative = max(relative, math.sqrt(_sum_of_squares(difference) / size))
    return largest, relative


def _sum_of_squares(numbers: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(numbers))
    if not math.isfinite(norm):  # squares of large numbers overflow float32
        norm = float(torch.linalg.vector_norm(numbers, dtype=torch.float64))
    return norm * norm


def _wider_format(name: str) -> str:
    return "wire=bfloat16" if name == "float16" else "wire=float32"


def _scale_name(leaf: Leaf) -> str:
    return f"{leaf.name} (scale)"


def _block_length(leaf: Leaf) -> int:
    row = math.prod(leaf.shape[1:])
    return row if len(leaf.shape) > 1 and row >= MIN_ROW else BLOCK


def _num_blocks(leaf: Leaf) -> int:
    return -(-math.prod(leaf.shape) // _block_length(leaf))


def _in_blocks(leaf: Leaf, numbers: Tensor) -> Tensor:
    """The numbers of a leaf, one block a row; the last one may be filled up with zeros."""
    length = _block_length(leaf)
    missing = -numbers.numel() % length
    flat = numbers.view(-1)
    return (nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, length)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
