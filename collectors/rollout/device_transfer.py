"""One copy to a policy's device and one back for each call.

inputs  --pack-->  page-locked bytes  --copy-->  bytes on the device  --view-->  the policy
outputs --pack-->  bytes on the device  --copy-->  bytes here  --view-->  the frames
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sync.model.block import aligned

_ALIGNMENT = 16  # bytes; vectorised kernels need it


def device_of(policy: Any) -> torch.device | None:
    """Where a module's tensors are, if it has any."""
    tensors = [*policy.parameters(), *policy.buffers()] if isinstance(policy, nn.Module) else []
    return tensors[0].device if tensors else None


class DeviceTransfer:
    """Carries the inputs and outputs of one policy."""

    def __init__(self, device: torch.device):
        self.device = device
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None  # after it, `_staging` may be written again

    def to_device(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """These tensors on the device, in memory that no later call writes to."""
        present = [tensor for tensor in tensors if tensor is not None]
        on_cuda = self.device.type == "cuda"
        if self._copied is not None:
            self._copied.synchronize()
        if self._staging.numel() != _nbytes(present):
            self._staging = torch.empty(_nbytes(present), dtype=torch.uint8, pin_memory=on_cuda)
        _pack(present, self._staging)
        there = iter(_views(self._staging.to(self.device, non_blocking=True, copy=True), present))
        if on_cuda:
            self._copied = torch.cuda.current_stream(self.device).record_event()
        return [None if tensor is None else next(there) for tensor in tensors]

    def to_host(self, values: Sequence[Any]) -> list[Any]:
        """These values with every tensor of the device in the CPU's memory."""
        kind = self.device.type
        there = [v for v in values if isinstance(v, Tensor) and v.device.type == kind]
        packed = torch.empty(_nbytes(there), dtype=torch.uint8, device=self.device)
        _pack(there, packed)
        copies = dict(zip(map(id, there), _views(packed.cpu(), there), strict=True))
        return [copies.get(id(value), value) for value in values]


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(aligned(tensor.nbytes, _ALIGNMENT) for tensor in tensors)


def _pack(tensors: Sequence[Tensor], buffer: Tensor) -> None:
    for view, tensor in zip(_views(buffer, tensors), tensors, strict=True):
        view.copy_(tensor)


def _views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these, one after the other in the buffer's bytes."""
    pieces = buffer.split([aligned(tensor.nbytes, _ALIGNMENT) for tensor in like])
    return [
        piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for piece, tensor in zip(pieces, like, strict=True)
    ]
