"""A model's weights in one flat block of memory, with their version inside.

    | header: version, publish time, bytes of extra state | leaves, by dtype | extra state |

A `Layout` says where each tensor lies, and a `Snapshot` is one version in a block of that layout.

A reader takes weights and version from the same block, so a version cannot be stamped on the wrong
weights. Wire formats (`effects/rounding.py`) write encoded leaves instead of the model's. With
`verify`, the checksums that workers must find follow the extra state, and a word of the header
contains their number.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sync.model.copying import copy_leaves

ALIGNMENT = 64
HEADER_BYTES = 64
CHECKSUM_BYTES = 4

# Which values must be finite: those of parameters, those of parameters and buffers, or none.
CheckFinite = bool | Literal["all"]

NEVER = -1
_VERSION, _PUBLISHED_NS, _EXTRA_BYTES, _CHECKSUMS = range(4)


@dataclass(frozen=True)
class Leaf:
    """One tensor of the model: its dotted name, its type and its place in the block.

    is_buffer: whether it is a buffer of a module. This flag changes nothing in a block, so it is
        left out of comparisons.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    is_buffer: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True)
class Layout:
    """The order of the leaves in a block: a header, then one segment per dtype, then extra state.

    extra_capacity: bytes for extra state.
    checksum_room: bytes for the checksums of `Snapshot.seal`, behind it; 0 if there are none.

    Grouping by dtype keeps all floats of a model in one contiguous segment. The padding between
    leaves is never written and stays zero.
    """

    leaves: tuple[Leaf, ...]
    extra_offset: int
    extra_capacity: int
    checksum_room: int = 0

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        extra: bytes = b"",
        *,
        buffers: Collection[str] = (),
        alignment: int = ALIGNMENT,
    ) -> Layout:
        """The layout of these tensors. `buffers` names those that are buffers of a module."""
        for name, tensor in tensors.items():
            if kind := _instead_of_dense(tensor):
                raise ValueError(f"{name!r} is {kind}; only dense tensors can be sent")
        leaves: list[Leaf] = []
        offset = HEADER_BYTES
        for dtype in sorted({t.dtype for t in tensors.values()}, key=str):
            for name, tensor in tensors.items():
                if tensor.dtype == dtype:
                    shape, nbytes = tuple(tensor.shape), tensor.numel() * tensor.element_size()
                    leaves.append(Leaf(name, dtype, shape, offset, nbytes, name in buffers))
                    offset = aligned(offset + nbytes, alignment)
            offset = aligned(offset)
        # The size of pickled extra state varies, so there is room for it to grow.
        capacity = aligned(max(4096, 4 * len(extra))) if extra else 0
        return cls(tuple(leaves), offset, capacity)

    def with_checksums(self) -> Layout:
        """The same with room for a checksum of each leaf, and one of the rest."""
        return replace(self, checksum_room=aligned(CHECKSUM_BYTES * (len(self.leaves) + 1)))

    def with_tail_of(self, other: Layout) -> Layout:
        """The same with the room that another layout has behind its leaves."""
        return replace(self, extra_capacity=other.extra_capacity, checksum_room=other.checksum_room)

    @cached_property
    def nbytes(self) -> int:
        return self.extra_offset + self.extra_capacity + self.checksum_room

    def checked(self, check_finite: CheckFinite) -> list[bool]:
        """For each leaf, whether its values must be finite."""
        return [
            bool(check_finite)
            and (check_finite == "all" or not leaf.is_buffer)
            and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
            for leaf in self.leaves
        ]

    def check_extra(self, extra: bytes) -> None:
        """Raise if a block has no room for this extra state."""
        if len(extra) > self.extra_capacity:
            raise ValueError(
                f"extra state takes {len(extra)} bytes, but the block was laid out for at most "
                f"{self.extra_capacity}; nothing was sent"
            )

    def check(self, tensors: Mapping[str, Tensor], *, whose: str) -> None:
        """Raise, naming the key, unless `tensors` are exactly the leaves of this layout."""
        check_same(
            {leaf.name: (leaf.shape, leaf.dtype) for leaf in self.leaves},
            {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()},
            whose=whose,
        )


def _instead_of_dense(tensor: Tensor) -> str:
    """What the tensor is if it is not a dense one; empty if it is."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return str(tensor.dtype)
    return "" if tensor.layout == torch.strided else str(tensor.layout)


Signature = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def check_same(expected: Signature, found: Signature, *, whose: str) -> None:
    """`KeyError` for a missing or surplus key, `ValueError` for another shape or dtype."""
    if missing := [name for name in expected if name not in found]:
        raise KeyError(f"{whose} lacks {_names(missing)}")
    if surplus := [name for name in found if name not in expected]:
        raise KeyError(f"{whose} has {_names(surplus)}, which is not expected")
    for name, (shape, dtype) in expected.items():
        if found[name][0] != shape:
            raise ValueError(
                f"{whose}: {name!r} has shape {list(found[name][0])}, expected {list(shape)}"
            )
        if found[name][1] != dtype:
            raise ValueError(f"{whose}: {name!r} is {found[name][1]}, expected {dtype}")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def aligned(offset: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of `alignment`, or the offset itself if it is one."""
    return -(-offset // alignment) * alignment


class Snapshot:
    """A block laid out as `layout`, in `buffer` (uint8, in CPU memory, at least as long).

    views: one tensor for each leaf of the layout, in its order: a view of the buffer.
    number: the number of the block in its pool, if it belongs to one.
    """

    def __init__(self, layout: Layout, buffer: Tensor):
        self.layout = layout
        self.number = 0
        with torch.inference_mode(False):  # otherwise the views could not be written outside of it
            self.buffer = buffer[: layout.nbytes]
            self.views = [
                self.buffer[leaf.offset : leaf.offset + leaf.nbytes]
                .view(leaf.dtype)
                .view(leaf.shape)
                for leaf in layout.leaves
            ]
        self._header = self.buffer[:HEADER_BYTES].numpy().data.cast("B").cast("q")

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def version(self) -> int:
        return self._header[_VERSION]

    @property
    def published_ns(self) -> int:
        return self._header[_PUBLISHED_NS]

    @property
    def extra(self) -> bytes:
        start, nbytes = self.layout.extra_offset, self._header[_EXTRA_BYTES]
        return bytes(self.buffer[start : start + nbytes].numpy()) if nbytes else b""

    @property
    def checksums(self) -> list[int]:
        """The checksums that `seal` wrote; empty if it was not called."""
        start = self.layout.extra_offset + self._header[_EXTRA_BYTES]
        stop = start + CHECKSUM_BYTES * self._header[_CHECKSUMS]
        return np.frombuffer(self.buffer[start:stop].numpy().tobytes(), "<u4").tolist()

    def begin(self) -> None:
        """Mark the block as holding no version, while it is written."""
        self._header[_VERSION] = NEVER

    def stamp(self, version: int, extra: bytes, published_ns: int = 0) -> None:
        """Mark the block, whose leaves are written, as holding `version`.

        published_ns: when it was published, if that was not now.
        """
        self.layout.check_extra(extra)
        if extra:
            start = self.layout.extra_offset
            self.buffer[start : start + len(extra)].copy_(
                torch.frombuffer(bytearray(extra), dtype=torch.uint8)
            )
        self._header[_EXTRA_BYTES], self._header[_CHECKSUMS] = len(extra), 0
        self._header[_PUBLISHED_NS] = published_ns or time.perf_counter_ns()
        self._header[_VERSION] = version

    def stamp_as(self, other: Snapshot, checksums: Sequence[int]) -> None:
        """Stamp the block like another one, with these checksums of its numbers, if any."""
        self.stamp(other.version, other.extra, other.published_ns)
        if checksums:
            self.seal(checksums)

    def current_checksums(self) -> list[int]:
        """The checksums of what the block holds now."""
        return checksums_of(self.views, self.version, self.extra)

    def seal(self, checksums: Sequence[int] | None = None) -> None:
        """Add the checksums that a worker must find, after `stamp`; by default those of the block.

        The layout needs room for them: `Layout.with_checksums`.
        """
        data = np.array(self.current_checksums() if checksums is None else checksums, "<u4")
        start = self.layout.extra_offset + self._header[_EXTRA_BYTES]
        self.buffer[start : start + data.nbytes] = torch.from_numpy(data.view(np.uint8))
        self._header[_CHECKSUMS] = len(data)

    def become(self, other: Snapshot) -> None:
        """Copy another block of this layout, byte for byte. Until done, it holds no version."""
        self.begin()
        self._header[_VERSION + 1 :] = other._header[_VERSION + 1 :]
        ours, theirs = (block.buffer[HEADER_BYTES:].view(torch.int64) for block in (self, other))
        copy_leaves([ours], [theirs])
        self._header[_VERSION] = other._header[_VERSION]


def private_snapshot(layout: Layout) -> Snapshot:
    """A block in memory that is not shared."""
    return Snapshot(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))


def free_private(pool: list[Snapshot], layout: Layout, taken: Collection[Snapshot]) -> Snapshot:
    """A block of the pool that is none of `taken`; a new one if there is none."""
    ids = {id(block) for block in taken}
    for block in pool:
        if id(block) not in ids:
            return block
    pool.append(private_snapshot(layout))
    return pool[-1]


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the tensor's numbers, in row-major order, wherever it lies; on one thread."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().data)


def checksums_of(leaves: Sequence[Tensor], version: int, extra: bytes) -> list[int]:
    """One checksum for each leaf, and a last one for the version with its extra state."""
    stamp = version.to_bytes(8, "little", signed=True)
    return [*map(checksum, leaves), zlib.crc32(extra, zlib.crc32(stamp))]
