"""Where each tensor of a model lies in one flat, aligned block."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

ALIGNMENT = 64
HEADER_BYTES = 64
CHECKSUM_BYTES = 4

# Which values must be finite: those of parameters, those of parameters and buffers, or none.
CheckFinite = bool | Literal["all"]


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

    Grouping by dtype keeps all floats of a model in one contiguous segment. The padding between
    leaves is never written and stays zero.
    """

    leaves: tuple[Leaf, ...]
    extra_offset: int
    extra_capacity: int

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
        """The same with room for the checksums of `Snapshot.seal`, behind the extra state."""
        room = aligned(CHECKSUM_BYTES * (len(self.leaves) + 1))
        return replace(self, extra_capacity=self.extra_capacity + room)

    @property
    def nbytes(self) -> int:
        return self.extra_offset + self.extra_capacity

    def views(self, buffer: Tensor) -> list[Tensor]:
        """One tensor per leaf, in the order of `leaves`, each a view of `buffer` (uint8)."""
        return [
            buffer[leaf.offset : leaf.offset + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
            for leaf in self.leaves
        ]

    def checked(self, check_finite: CheckFinite) -> list[bool]:
        """For each leaf, whether its values must be finite."""
        return [
            bool(check_finite)
            and (check_finite == "all" or not leaf.is_buffer)
            and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
            for leaf in self.leaves
        ]

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
