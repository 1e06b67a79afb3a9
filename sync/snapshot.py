"""A snapshot: one version of a model's weights in one block of memory, the version inside it.

    | header: version, publish time, bytes of extra state | leaves, by dtype | extra state |

Whoever reads a snapshot reads weights and version from the same block, so a stamp cannot drift
from what it stamps. Wire formats (`wire/`) write their own leaves in the model's place, and three
more words into the header: the version they build on, whether later ones will build on this one,
and how much of the block is filled.
"""

from __future__ import annotations

import cmath
import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from sync.interrupts import held
from sync.layout import HEADER_BYTES, Layout
from sync.memory import as_bytes
from sync.raw import Bytes, copy, few_floats, raw, squares_are_finite

NEVER = -1
_VERSION, _PUBLISHED_NS, _EXTRA_BYTES, _BUILDS_ON, _IS_BASE, _FILLED = range(6)


# From this size on a block is written piece by piece: each is checked where it comes from, and
# copied while it is still in the processor's cache.
PIECEWISE_BYTES = 1 << 20
PIECE_BYTES = 1 << 22

# From this size on pieces are shared out among as many threads as torch may use, a few at most: two
# or three keep a machine's memory busy. Such a thread waits for nobody and is never waited for
# unless it has a piece in hand, so that one which gets no processor costs little.
SHARED_BYTES = 1 << 25
MOST_THREADS = 4


class Snapshot:
    """A block laid out as `layout`, in `buffer` (uint8, on the CPU, at least as long)."""

    def __init__(self, layout: Layout, buffer: Tensor):
        self.layout = layout
        with torch.inference_mode(False):  # or the views could not be written outside of it
            self.buffer = buffer[: layout.nbytes]
            self.views = layout.views(self.buffer)
        self._header = as_bytes(self.buffer[:HEADER_BYTES]).cast("q")

    @cached_property
    def _rest(self) -> Bytes:
        """All but the version."""
        return as_bytes(self.buffer)[8:]

    @cached_property
    def _floats(self) -> list[Tensor]:
        with torch.inference_mode(False):
            return self.layout.floats(self.buffer)

    @cached_property
    def _pieces(self) -> list[Tensor]:
        with torch.inference_mode(False):
            return pieces(self.views, self.layout)

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
    def builds_on(self) -> int:
        """The version without which this one cannot be read; NEVER for most."""
        return self._header[_BUILDS_ON] - 1

    @property
    def is_base(self) -> bool:
        """Whether the reader is to keep this version, because others may build on it."""
        return bool(self._header[_IS_BASE])

    @property
    def wire_bytes(self) -> int:
        """How much has to travel: all, or what is filled and the extra state behind it."""
        filled = self._header[_FILLED]
        return filled + self._header[_EXTRA_BYTES] if filled else self.layout.nbytes

    def mark(self, *, builds_on: int, is_base: bool, filled: int) -> None:
        """What a reader must know who has not the whole model before it; before `stamp`."""
        self._header[_VERSION] = NEVER
        self._header[_BUILDS_ON] = builds_on + 1
        self._header[_IS_BASE] = int(is_base)
        self._header[_FILLED] = filled

    def become(self, other: Snapshot) -> None:
        """Be the same, to the byte, as another block of this layout; until then, no version."""
        self._header[_VERSION] = NEVER
        self._rest[:] = other._rest
        self._header[_VERSION] = other._header[_VERSION]

    def write(
        self, source: list[Tensor] | Tensor, extra: bytes, version: int, *, check_finite: bool
    ) -> None:
        """Fill the block from the `pieces` of leaves in layout order, or from a block on a device.

        While it is being written the block says that it holds no version; if it is refused it goes
        on saying so.
        """
        self._header[_VERSION] = NEVER
        with OneThread(self.layout.nbytes) as alone:
            if isinstance(source, Tensor):
                self.buffer[HEADER_BYTES:].copy_(source[HEADER_BYTES:])
                finite = not check_finite or _all_finite(self._floats)
            elif self.layout.nbytes < PIECEWISE_BYTES:
                if source:
                    torch._foreach_copy_(self.views, source)
                finite = not check_finite or self._is_finite()
            else:
                threads = 1 if self.layout.nbytes < SHARED_BYTES else alone.instead_of
                finite = _check_and_copy(self._pieces, source, check_finite, threads)
            if not finite:
                self._refuse_non_finite()
        self.stamp(version, extra)

    def write_raw(
        self, source: list[Bytes], extra: bytes, version: int, *, check_finite: bool
    ) -> None:
        """The same, of a small model, from the memory of its leaves."""
        assert self.raw is not None
        self._header[_VERSION] = NEVER
        copy(self.raw, source)
        if check_finite and not self._is_finite():
            self._refuse_non_finite()
        self.stamp(version, extra)

    def _is_finite(self) -> bool:
        few, many = self._few_and_many
        return all(map(squares_are_finite, few)) and _all_finite(many)

    @cached_property
    def raw(self) -> list[Bytes] | None:
        """The memory of the leaves, in layout order."""
        return raw(self.views)

    @cached_property
    def _few_and_many(self) -> tuple[list[Any], list[Tensor]]:
        few = [array for s in self._floats if (array := few_floats(s)) is not None]
        return few, [stretch for stretch in self._floats if few_floats(stretch) is None]

    def stamp(self, version: int, extra: bytes) -> None:
        """Say that the block, whose leaves are written elsewhere, now holds `version`."""
        self._write_extra(extra)
        self._header[_EXTRA_BYTES] = len(extra)
        self._header[_PUBLISHED_NS] = time.perf_counter_ns()
        self._header[_VERSION] = version

    def _write_extra(self, extra: bytes) -> None:
        if len(extra) > self.layout.extra_capacity:
            raise ValueError(
                f"extra state takes {len(extra)} bytes, but the block was laid out for at most "
                f"{self.layout.extra_capacity}; nothing was sent"
            )
        if extra:
            start = self.layout.extra_offset
            self.buffer[start : start + len(extra)].copy_(
                torch.frombuffer(bytearray(extra), dtype=torch.uint8)
            )

    def _refuse_non_finite(self) -> None:
        # A sum is finite unless a term is not, or it overflowed: now look leaf by leaf.
        for leaf, view in zip(self.layout.leaves, self.views, strict=True):
            if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
                bad = view.numel() - int(torch.isfinite(_wide(view)).sum())
                if bad:
                    raise ValueError(
                        f"send refused: {leaf.name!r} holds {bad} NaN or infinite value(s), and "
                        "workers stay on the last good version (check_finite=False sends anyway)"
                    )


def pieces(leaves: list[Tensor], layout: Layout) -> list[Tensor]:
    """The leaves, in the portions in which `Snapshot.write` takes them."""
    if layout.nbytes < PIECEWISE_BYTES:
        return leaves
    return [
        piece
        for leaf in leaves
        for piece in leaf.reshape(-1).split(PIECE_BYTES // leaf.element_size())
    ]


def _check_and_copy(
    to: list[Tensor], source: list[Tensor], check_finite: bool, threads: int
) -> bool:
    left = iter(list(zip(to, source, strict=True)))

    def work() -> bool:
        finite = True
        for target, piece in left:
            if check_finite and (piece.is_floating_point() or piece.is_complex()):
                finite = finite and _sum_is_finite(piece)
            target.copy_(piece)
        return finite

    if threads == 1:
        return work()
    helpers = min(threads, MOST_THREADS) - 1
    with held(), ThreadPoolExecutor(helpers, "lockstep-copy") as pool:
        others: list[Future[bool]] = []
        with contextlib.suppress(RuntimeError):  # no more threads can be had, as at the exit
            while len(others) < helpers:
                others.append(pool.submit(work))
        return all([work(), *(other.result() for other in others)])


def _all_finite(stretches: list[Tensor]) -> bool:
    return all(_sum_is_finite(stretch) for stretch in stretches)


def _sum_is_finite(stretch: Tensor) -> bool:
    return cmath.isfinite(_wide(stretch).sum().item())


def _wide(stretch: Tensor) -> Tensor:
    """Types that cannot be summed or overflow easily, widened."""
    if stretch.dtype == torch.complex32:
        return stretch.to(torch.complex64)
    return stretch.float() if stretch.element_size() < 4 else stretch


# Torch does not spread smaller work over its threads.
_SPREAD_BYTES = 1 << 15


class OneThread:
    """`with OneThread(nbytes):` torch does not spread a copy of so many bytes over its threads.

    Its threads meet at a barrier, spinning; with a worker on every core one of them is not running,
    and a copy of a third of a millisecond was seen to take 23.
    """

    __slots__ = ("instead_of",)

    def __init__(self, nbytes: int):
        self.instead_of = torch.get_num_threads() if nbytes > _SPREAD_BYTES else 1

    def __enter__(self) -> Self:
        if self.instead_of > 1:
            torch.set_num_threads(1)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.instead_of > 1:
            torch.set_num_threads(self.instead_of)
