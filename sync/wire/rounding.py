"""Wire formats that round: two bytes a number, or one byte and a scale for each row.

A row of an int8 leaf is what one output of its layer is computed from: a matrix's row, or all the
numbers of one filter. Vectors, and matrices with rows of fewer than four numbers, have one scale.
On a trained policy a scale for each row leaves 0.7 of the error of one for each leaf, for four
bytes a row (`docs/slow-links.md` has the numbers).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from sync.binding import Binding
from sync.layout import Layout, Leaf
from sync.snapshot import OneThread, Snapshot
from sync.wire.coder import Decoder, Deviation, Encoder, deviation, private_snapshot

LEAST_ROW = 4
INT8_MAX = 127
# Small leaves lie close together: padding would have to travel too.
TIGHT = 16


class Rounding(ABC):
    """One format: the layout of its blocks, and the way there and back."""

    name: str
    carries_non_finite = True

    def __init__(self, model: Layout):
        self.model = model
        tensors: dict[str, Tensor] = {}
        for leaf in model.leaves:
            tensors |= self._parts(leaf)
        layout = Layout.of(tensors, alignment=TIGHT)
        self.layout = replace(layout, extra_capacity=model.extra_capacity)
        self._index = {leaf.name: i for i, leaf in enumerate(self.layout.leaves)}

    @abstractmethod
    def _parts(self, leaf: Leaf) -> dict[str, Tensor]:
        """What travels for a leaf, as tensors without memory."""

    @abstractmethod
    def encode(self, whole: Snapshot, block: Snapshot) -> None: ...

    @abstractmethod
    def decode(self, block: Snapshot, whole: Snapshot) -> None: ...


class Halved(Rounding):
    """Two bytes a number."""

    def __init__(self, model: Layout, dtype: torch.dtype):
        self.dtype = dtype
        self.name = str(dtype).removeprefix("torch.")
        super().__init__(model)
        self._places = [self._index[leaf.name] for leaf in model.leaves]

    def _parts(self, leaf: Leaf) -> dict[str, Tensor]:
        large = leaf.dtype.is_floating_point and leaf.dtype.itemsize > 2
        return {leaf.name: _shaped(leaf.shape, self.dtype if large else leaf.dtype)}

    def encode(self, whole: Snapshot, block: Snapshot) -> None:
        if self._places:
            torch._foreach_copy_([block.views[i] for i in self._places], whole.views)

    def decode(self, block: Snapshot, whole: Snapshot) -> None:
        if self._places:
            torch._foreach_copy_(whole.views, [block.views[i] for i in self._places])


class Scaled(Rounding):
    """One byte a number, and a scale for each row: its largest number is 127 of them."""

    name = "int8"
    carries_non_finite = False

    def __init__(self, model: Layout):
        super().__init__(model)
        self._scaled: list[tuple[int, int, int, int]] = []
        self._as_is: list[tuple[int, int]] = []
        for i, leaf in enumerate(model.leaves):
            if _is_scaled(leaf):
                scale = self._index[_scale_of(leaf)]
                self._scaled.append((i, self._index[leaf.name], scale, _num_rows(leaf)))
            else:
                self._as_is.append((i, self._index[leaf.name]))

    def _parts(self, leaf: Leaf) -> dict[str, Tensor]:
        if not _is_scaled(leaf):
            return {leaf.name: _shaped(leaf.shape, leaf.dtype)}
        wide = torch.float64 if leaf.dtype == torch.float64 else torch.float32
        return {
            leaf.name: _shaped(leaf.shape, torch.int8),
            _scale_of(leaf): _shaped((_num_rows(leaf), 1), wide),
        }

    def encode(self, whole: Snapshot, block: Snapshot) -> None:
        for i, place in self._as_is:
            block.views[place].copy_(whole.views[i])
        for i, place, scale_place, rows in self._scaled:
            scale, steps = block.views[scale_place], block.views[place].view(rows, -1)
            numbers = whole.views[i].view(rows, -1).to(scale.dtype)
            torch.amax(numbers.abs(), dim=1, keepdim=True, out=scale)
            scale.div_(INT8_MAX)
            # A row of zeros has no scale, and that of the tiniest numbers is no number either.
            scale.masked_fill_(scale == 0, 1.0)
            steps.copy_((numbers / scale).round_().clamp_(-INT8_MAX, INT8_MAX))

    def decode(self, block: Snapshot, whole: Snapshot) -> None:
        for i, place in self._as_is:
            whole.views[i].copy_(block.views[place])
        for i, place, scale_place, rows in self._scaled:
            steps, scale = block.views[place].view(rows, -1), block.views[scale_place]
            torch.mul(steps, scale, out=whole.views[i].view(rows, -1))


def rounding(name: str, model: Layout) -> Rounding:
    """The format of that name."""
    return Scaled(model) if name == "int8" else Halved(model, getattr(torch, name))


class RoundingEncoder(Encoder):
    """Packs the model, rounds it, and looks at what a receiver will make of it."""

    def __init__(self, rounding: Rounding):
        self.layout = rounding.layout
        self._rounding = rounding
        self._whole = private_snapshot(rounding.model)
        self._arrives = private_snapshot(rounding.model)
        self._sent_floats = rounding.model.floats(self._whole.buffer)
        self._arriving_floats = rounding.model.floats(self._arrives.buffer)

    def pack(
        self,
        binding: Binding,
        block: Snapshot,
        version: int,
        workers: Collection[int],
        *,
        check_finite: bool,
    ) -> Deviation:
        check_finite = check_finite or not self._rounding.carries_non_finite
        try:
            binding.pack(self._whole, version, check_finite=check_finite)
        except ValueError as error:
            if self._rounding.carries_non_finite:
                raise
            text = str(error).replace("(check_finite=False sends anyway)", "(int8 has no such)")
            raise ValueError(text) from None
        with OneThread(self.layout.nbytes):
            self._rounding.encode(self._whole, block)
            self._rounding.decode(block, self._arrives)
            found = deviation(self._sent_floats, self._arriving_floats)
        if not math.isfinite(found.max_abs):
            self._refuse_overflow()
        block.stamp(version, self._whole.extra)
        return found

    def _refuse_overflow(self) -> None:
        pairs = zip(self._whole.views, self._arrives.views, strict=True)
        for leaf, (sent, arrives) in zip(self._rounding.model.leaves, pairs, strict=True):
            lost = int((torch.isfinite(sent) & ~torch.isfinite(arrives)).sum())
            if lost:
                largest = float(sent[torch.isfinite(sent)].abs().amax())
                raise ValueError(
                    f"send refused: {leaf.name!r} holds {lost} value(s) too large for "
                    f"wire={self._rounding.name} (up to {largest:.4g}), and workers stay on the "
                    f"last good version; take {_roomier(self._rounding.name)}"
                )


class RoundingDecoder(Decoder):
    """Widens what came into a block of its own."""

    def __init__(self, rounding: Rounding):
        self._rounding = rounding
        self._whole = private_snapshot(rounding.model)

    def unpack(self, block: Snapshot) -> Snapshot:
        with OneThread(self._whole.layout.nbytes):
            self._rounding.decode(block, self._whole)
        self._whole.stamp(block.version, block.extra)
        return self._whole


def _roomier(name: str) -> str:
    return "wire=bfloat16" if name == "float16" else "wire=float32"


def _is_scaled(leaf: Leaf) -> bool:
    return leaf.dtype.is_floating_point and leaf.dtype.itemsize > 1 and 0 not in leaf.shape


def _scale_of(leaf: Leaf) -> str:
    return f"{leaf.name} (scale)"


def _num_rows(leaf: Leaf) -> int:
    rows = leaf.shape[0] if len(leaf.shape) > 1 else 1
    return rows if math.prod(leaf.shape) >= LEAST_ROW * rows else 1


def _shaped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
