"""Checksums of weights: CRC-32 of the bytes of each tensor, computed on one thread."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the tensor's numbers, in row-major order, wherever it lies."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().data)


def checksums_of(leaves: Sequence[Tensor], version: int, extra: bytes) -> list[int]:
    """One checksum for each leaf, and a last one for the version with its extra state."""
    stamp = version.to_bytes(8, "little", signed=True)
    return [*map(checksum, leaves), zlib.crc32(extra, zlib.crc32(stamp))]
