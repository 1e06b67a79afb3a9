"""Lossy wire formats: two bytes per number, or one byte per number and a scale for each row.

A row of an int8 leaf holds the weights of one output of its layer: a row of a matrix, or one filter
of a convolution. Vectors, and matrices with rows of fewer than four numbers, have a single scale.
On a trained policy, a scale for each row gives 0.7 of the error of one scale for each leaf, and
costs four bytes a row (`docs/slow-links.md` has the numbers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sync.effects.formats import Decoder, Encoder
from sync.model.checksums import checksum
from sync.model.copying import count_non_finite, widened
from sync.model.layout import Layout, Leaf
from sync.model.snapshot import Snapshot, private_snapshot

MIN_ROW = 4
INT8_MAX = 127
# Small leaves lie close together, because padding travels too.
ALIGNMENT = 16


class RoundedFormat:
    """The layout of encoded blocks, and the conversion in both directions.

    As it is, for `bfloat16` and `float16`: two bytes per number.
    """

    def __init__(self, model: Layout, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self.name = str(dtype).removeprefix("torch.")
        tensors: dict[str, Tensor] = {}
        for leaf in model.leaves:
            tensors |= self._encoded_tensors(leaf)
        layout = Layout.of(tensors, alignment=ALIGNMENT)
        self.layout = replace(layout, extra_capacity=model.extra_capacity)
        self._index = {leaf.name: i for i, leaf in enumerate(self.layout.leaves)}

    def _encoded_tensors(self, leaf: Leaf) -> dict[str, Tensor]:
        """What travels for a leaf, as meta tensors."""
        is_large = leaf.dtype.is_floating_point and leaf.dtype.itemsize > 2
        return {leaf.name: _meta(leaf.shape, self.dtype if is_large else leaf.dtype)}

    def encode(self, whole: Snapshot, block: Snapshot) -> None:
        """Write the leaves of `block` from the model in `whole`."""
        for leaf, view in zip(self.model.leaves, whole.views, strict=True):
            block.views[self._index[leaf.name]].copy_(view)

    def decode(self, block: Snapshot, whole: Snapshot) -> None:
        """Write the leaves of `whole` from `block`."""
        for leaf, view in zip(self.model.leaves, whole.views, strict=True):
            view.copy_(block.views[self._index[leaf.name]])


class Int8(RoundedFormat):
    """One byte per number. The largest number of a row is 127 times the scale of the row."""

    def _encoded_tensors(self, leaf: Leaf) -> dict[str, Tensor]:
        if not _is_scaled(leaf):
            return {leaf.name: _meta(leaf.shape, leaf.dtype)}
        scale_dtype = torch.float64 if leaf.dtype == torch.float64 else torch.float32
        return {
            leaf.name: _meta(leaf.shape, torch.int8),
            _scale_name(leaf): _meta((_num_rows(leaf), 1), scale_dtype),
        }

    def encode(self, whole: Snapshot, block: Snapshot) -> None:
        for leaf, view in zip(self.model.leaves, whole.views, strict=True):
            target = block.views[self._index[leaf.name]]
            if not _is_scaled(leaf):
                _require_finite(leaf, view, view)
                target.copy_(view)
                continue
            scale = block.views[self._index[_scale_name(leaf)]]
            numbers = view.view(len(scale), -1).to(scale.dtype)
            torch.amax(numbers.abs(), dim=1, keepdim=True, out=scale)
            _require_finite(leaf, scale, view)
            scale.div_(INT8_MAX)
            # A row of zeros has no scale, and the scale of the smallest numbers underflows to zero.
            scale.masked_fill_(scale == 0, 1.0)
            steps = (numbers / scale).round_().clamp_(-INT8_MAX, INT8_MAX)
            target.view(len(scale), -1).copy_(steps)

    def decode(self, block: Snapshot, whole: Snapshot) -> None:
        for leaf, view in zip(self.model.leaves, whole.views, strict=True):
            encoded = block.views[self._index[leaf.name]]
            if _is_scaled(leaf):
                scale = block.views[self._index[_scale_name(leaf)]]
                rows = len(scale)
                torch.mul(encoded.view(rows, -1), scale, out=view.view(rows, -1))
            else:
                view.copy_(encoded)


def _require_finite(leaf: Leaf, summary: Tensor, numbers: Tensor) -> None:
    """Refuse a leaf with NaN or infinity; `summary` is not finite if one of its numbers is not."""
    if (leaf.dtype.is_floating_point or leaf.dtype.is_complex) and count_non_finite(summary):
        raise ValueError(
            f"send refused: {leaf.name!r} holds {count_non_finite(numbers)} NaN or infinite "
            "value(s), which int8 cannot represent, and workers keep the last good version"
        )


def rounded_format(name: str, model: Layout) -> RoundedFormat:
    """The lossy format of that name."""
    return (Int8 if name == "int8" else RoundedFormat)(model, getattr(torch, name))


class RoundingEncoder(Encoder):
    """Rounds a model, and decodes the result again to measure the error."""

    def __init__(self, rounded: RoundedFormat):
        self.layout, self.checks_finite = rounded.layout, rounded.name == "int8"
        self._format = rounded
        self._decoded = private_snapshot(rounded.model)
        self._decoded_floats = rounded.model.floats(self._decoded.buffer)

    def encode(
        self, whole: Snapshot, block: Snapshot, workers: Sequence[int]
    ) -> tuple[float, float]:
        self._format.encode(whole, block)
        self._format.decode(block, self._decoded)
        floats = self._format.model.floats(whole.buffer)
        max_error, relative_error = measure_error(floats, self._decoded_floats)
        if not math.isfinite(max_error):
            self._refuse_overflow(whole)
        return max_error, relative_error

    def checksums(self, whole: Snapshot) -> list[int]:
        known = whole.checksums
        return [*map(checksum, self._decoded.views), known[-1]] if known else []

    def _refuse_overflow(self, whole: Snapshot) -> None:
        pairs = zip(whole.views, self._decoded.views, strict=True)
        for leaf, (sent, decoded) in zip(self._format.model.leaves, pairs, strict=True):
            lost = int((torch.isfinite(sent) & ~torch.isfinite(decoded)).sum())
            if lost:
                largest = float(sent[torch.isfinite(sent)].abs().amax())
                raise ValueError(
                    f"send refused: {leaf.name!r} holds {lost} value(s) too large for "
                    f"wire={self._format.name} (up to {largest:.4g}), and workers keep the "
                    f"last good version; use {_wider_format(self._format.name)}"
                )


class RoundingDecoder(Decoder):
    """Converts a block back to the dtypes of the model."""

    def __init__(self, rounded: RoundedFormat):
        self.layout = rounded.layout
        self._format = rounded
        self._whole = private_snapshot(rounded.model)

    def decode(self, block: Snapshot) -> Snapshot:
        self._format.decode(block, self._whole)
        return self._whole


def measure_error(sent: list[Tensor], decoded: list[Tensor]) -> tuple[float, float]:
    """The largest absolute and the relative root mean square error; NaN and infinity are left out.

    A finite number that arrives as an infinite one makes the largest error infinite.
    """
    largest = squares = size = 0.0
    for original, copy in zip(sent, decoded, strict=True):
        if original.is_complex():
            continue
        expected = widened(original)
        difference = widened(copy) - expected
        if not math.isfinite(worst := float(difference.abs().amax())):
            finite = torch.isfinite(expected)
            expected = torch.where(finite, expected, 0)
            difference = torch.where(finite, difference, 0)
            worst = float(difference.abs().amax())
        largest = max(largest, worst)
        squares += _sum_of_squares(difference)
        size += _sum_of_squares(expected)
    return largest, math.sqrt(squares / size) if 0.0 < size < math.inf else 0.0


def _sum_of_squares(numbers: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(numbers))
    if not math.isfinite(norm):  # squares of large numbers overflow float32
        norm = float(torch.linalg.vector_norm(numbers, dtype=torch.float64))
    return norm * norm


def _wider_format(name: str) -> str:
    return "wire=bfloat16" if name == "float16" else "wire=float32"


def _is_scaled(leaf: Leaf) -> bool:
    return leaf.dtype.is_floating_point and leaf.dtype.itemsize > 1 and 0 not in leaf.shape


def _scale_name(leaf: Leaf) -> str:
    return f"{leaf.name} (scale)"


def _num_rows(leaf: Leaf) -> int:
    rows = leaf.shape[0] if len(leaf.shape) > 1 else 1
    return rows if math.prod(leaf.shape) >= MIN_ROW * rows else 1


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
