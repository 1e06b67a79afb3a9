"""Copies between a model and a block, and the check for NaN and infinity.

In CPU memory they run on one thread, in pieces that fit into its cache: a piece is checked and then
copied, so that memory is read once.

Copies from and to CUDA devices run on a side stream of each device. It first waits for everything
that the calling thread has launched on the device, and for every use of the model that was
reported to `after_use`. Then the host waits for the copies. So everything that any thread launches
later runs after the copies, and the block may be rewritten.

Nothing here touches CUDA before the first copy, so workers of a CPU model may be forked.
"""

from __future__ import annotations

import cmath
import contextlib
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

# Torch spreads a copy or a sum of 32,768 elements or more over its threads, which then wait for
# each other at a barrier. With a busy worker on every core, one of them is not scheduled: a copy
# that takes 0.3 ms took 23 ms.
PIECE = 32_000
STRETCH = 8 * PIECE  # what is summed and then copied while it is in the cache
# What numpy sums; torch has more dtypes of few bits, whose numbers it widens first.
_WIDE = {torch.float32, torch.float64, torch.complex64, torch.complex128}


def copy_leaves(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source into its target."""
    for target, source in zip(targets, sources, strict=True):
        copy_leaf(target, source)


def copy_leaf(target: Tensor, source: Tensor, *, check: bool = False) -> bool:
    """Copy the source; False if it was checked and may hold NaN or infinity.

    It is read from memory once: each stretch is checked just before it is copied.
    """
    finite = True
    if target.numel() > PIECE and _is_plain(target) and _is_plain(source):
        to, taken = _bytes(target), _bytes(source)
        step = STRETCH * source.element_size()
        for number, stretch in enumerate(source.detach().reshape(-1).split(STRETCH)):
            if check:
                finite = finite and _has_finite_sum(stretch)
            here = slice(number * step, (number + 1) * step)
            np.copyto(to[here], taken[here])  # as fast as memory, and on one thread
        increment_version(target)
        return finite
    for target_piece, source_piece in _pieces(target, source):
        if check:
            finite = finite and _has_finite_sum(source_piece)
        target_piece.copy_(source_piece)
    return finite


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is contiguous CPU memory."""
    on_cpu = tensor.device.type == "cpu"
    return on_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _pieces(target: Tensor, source: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Views of at most `PIECE` elements that cover both tensors."""
    if target.numel() <= PIECE:
        return [(target, source)]
    if target.is_contiguous() and source.is_contiguous():
        target, source = target.view(-1), source.view(-1)
    return zip(_split(target), _split(source), strict=True)


def _split(tensor: Tensor) -> list[Tensor]:
    """Split it in a way that depends only on the shape."""
    row = tensor.numel() // len(tensor)
    if row > PIECE:
        return [piece for part in tensor for piece in _split(part)]
    return list(tensor.split(PIECE // row))


def may_be_infinite(tensors: Iterable[Tensor]) -> bool:
    """Whether one of the tensors may hold NaN or infinity.

    "May" because a sum decides, which overflows if the numbers are large enough. Then the caller
    has to look at each number. On a device there is one sum for all tensors: to check each by
    itself would take five more kernels for each.
    """
    sums: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        if tensor.device.type != "cpu":
            total = widened(tensor.resolve_conj().resolve_neg()).sum()
            sums[tensor.device] = total + sums.get(tensor.device, 0)
            continue
        if not _has_finite_sum(tensor):
            return True
    return not all(cmath.isfinite(total.item()) for total in sums.values())


def _has_finite_sum(tensor: Tensor) -> bool:
    """Whether the sum of a tensor in CPU memory is finite; on one thread, whatever its size."""
    if tensor.dtype in _WIDE and _is_plain(tensor):
        # Of numpy's ways to sum, `sum` is slower, since it adds in pairs, and `dot` has threads.
        return cmath.isfinite(np.einsum("i->", tensor.detach().reshape(-1).numpy()))
    pieces = [tensor] if tensor.numel() <= PIECE else _split(tensor)
    return all(cmath.isfinite(widened(piece).sum().item()) for piece in pieces)


def count_non_finite(tensor: Tensor) -> int:
    """How many of the tensor's numbers are NaN or infinite."""
    return tensor.numel() - int(torch.isfinite(widened(tensor)).sum())


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise if the tensor of that name holds NaN or infinity, so that it is not sent."""
    if count := count_non_finite(tensor):
        raise ValueError(
            f"send refused: {name!r} holds {count} NaN or infinite value(s) "
            "(check_finite=False sends anyway)"
        )


def widened(tensor: Tensor) -> Tensor:
    """A tensor of a small dtype in a dtype that torch can sum without overflow."""
    if tensor.dtype == torch.complex32:
        return tensor.to(torch.complex64)
    return tensor.float() if tensor.element_size() < 4 else tensor


# -- CUDA devices

_READ_ONLY = 8  # cudaHostRegisterReadOnly: needed for memory that is mapped read-only
_USES: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_Copy = tuple[Tensor, Tensor]  # target, source


class CudaCopies:
    """Copies tensors that may be on several devices, some in CPU memory. Belongs to one model."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._uses: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def after_use(self, devices: Iterable[torch.device]) -> None:
        """Let the next copy wait for the work that the calling thread has queued on the devices."""
        for device in devices:
            stream = torch.cuda.current_stream(device)
            self._uses[stream] = stream.record_event()

    def copy(
        self,
        block: Any,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
    ) -> None:
        """Like `copy_leaves`, between the views of a block and leaves that may be on a device."""
        on_device: dict[torch.device, list[_Copy]] = {}
        on_cpu: list[_Copy] = []
        for copy in zip(targets, sources, strict=True):
            device = next((t.device for t in copy if t.is_cuda), None)
            (on_cpu if device is None else on_device.setdefault(device, [])).append(copy)
        page_lock(block, next(iter(on_device)))
        try:
            for device, copies in on_device.items():
                self._launch(device, copies)
            if on_cpu:
                copy_leaves(*zip(*on_cpu, strict=True))
        finally:
            for device in on_device:
                self._stream(device).synchronize()
            self._uses.clear()

    def _launch(self, device: torch.device, copies: list[_Copy]) -> None:
        """Queue the copies of one device."""
        side = self._stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        for event in self._uses.values():
            side.wait_event(event)
        with torch.cuda.stream(side):
            for target, source in copies:
                # Torch would do this on the host, without waiting for the copy.
                plain = source.resolve_conj().resolve_neg()
                target.copy_(plain, non_blocking=True)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def page_lock(block: Any, device: torch.device) -> None:
    """Page-lock the block's memory when it is used a second time, until the block is released.

    A device copies directly from and to such memory. Locking takes longer than one copy, so it does
    not pay for a block that is used once. If it fails, copies are slower but correct.
    """
    uses = _USES[block] = _USES.get(block, 0) + 1
    if uses != 2:
        return
    cudart, address = torch.cuda.cudart(), block.buffer.data_ptr()
    for flags in (0, _READ_ONLY):
        result = cudart.cudaHostRegister(address, block.buffer.nbytes, flags)
        if result == cudart.cudaError.success:
            weakref.finalize(block, _unlock, address, os.getpid())
            return
        # The CUDA runtime keeps the error, and torch would raise it at its next launch.
        with contextlib.suppress(RuntimeError):
            torch.ones((), device=device)


def _unlock(address: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child cannot use its parent's CUDA context
        torch.cuda.cudart().cudaHostUnregister(address)
