"""Copies between a block and a model of which some tensors are on CUDA devices.

They run on a side stream of each device. It first waits for everything that the calling thread has
launched on the device, and for every use of the model that was reported to `after_use`. Then the
host waits for the copies. So everything that any thread launches later runs after the copies, and
the block may be rewritten.

Nothing here touches CUDA before the first copy, so workers of a CPU model may be forked.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sync.model.block import Snapshot
from sync.model.copying import copy_leaves

_READ_ONLY = 8  # cudaHostRegisterReadOnly: needed for memory that is mapped read-only
_USES: weakref.WeakKeyDictionary[Snapshot, int] = weakref.WeakKeyDictionary()
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
        block: Snapshot,
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


def page_lock(block: Snapshot, device: torch.device) -> None:
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
