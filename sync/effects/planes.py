"""A lossless encoding of the difference between two blocks of 32-bit words.

    | changed chunks, lengths | one bit per chunk of 16 words | four planes of bytes |

The difference is the exclusive or of the words, so it is zero where the blocks agree to the last
bit, whatever the words mean. Chunks without a change are left out. The bytes of the others are
regrouped: the first bytes of all words form one plane, the second bytes the next, and so on. After
a small training step, the sign and exponent of a float are rarely changed, so the planes of the
upper bytes are mostly zero. A plane is written unchanged, or as one bit per byte followed by the
bytes that are not zero, whichever is shorter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

CHUNK_WORDS = 16
CHUNK_BYTES = 4 * CHUNK_WORDS
_HEAD_BYTES = 64
_PLANES = 4


def max_changes_bytes(nbytes: int) -> int:
    """The most that `write_changes` needs for blocks of `nbytes`, a multiple of the chunk size."""
    chunks = nbytes // CHUNK_BYTES
    return _HEAD_BYTES + -(-chunks // 8) + nbytes


def write_changes(base: Array, new: Array, out: Array) -> int:
    """Write into `out` what turns `base` into `new` (all uint8). Returns the number of bytes."""
    difference = np.bitwise_xor(base.view(np.uint64), new.view(np.uint64))
    chunks = difference.reshape(-1, CHUNK_BYTES // 8)
    changed = chunks.any(axis=1)
    words = chunks[changed].view(np.uint8).reshape(-1, _PLANES)
    head = out[:_HEAD_BYTES].view(np.int64)
    head[0] = len(words) // CHUNK_WORDS
    end = _append(out, _HEAD_BYTES, np.packbits(changed))
    for plane in range(_PLANES):
        plane_bytes = np.ascontiguousarray(words[:, plane])
        nonzero = plane_bytes != 0
        count = int(np.count_nonzero(nonzero))
        if count + len(plane_bytes) // 8 < len(plane_bytes):
            head[1 + plane] = count
            end = _append(out, end, np.packbits(nonzero))
            end = _append(out, end, plane_bytes[nonzero])
        else:
            head[1 + plane] = -1
            end = _append(out, end, plane_bytes)
    return end


def apply_changes(target: Array, changes: Array) -> None:
    """Turn `target`, a copy of `base`, into `new` as given to `write_changes`."""
    head = changes[:_HEAD_BYTES].view(np.int64)
    chunks = target.view(np.uint64).reshape(-1, CHUNK_BYTES // 8)
    position = _HEAD_BYTES
    bitmap, position = _take(changes, position, -(-len(chunks) // 8))
    changed = np.unpackbits(bitmap, count=len(chunks)).view(bool)
    num_words = int(head[0]) * CHUNK_WORDS
    words = np.zeros((num_words, _PLANES), np.uint8)
    for plane in range(_PLANES):
        count = int(head[1 + plane])
        if count < 0:
            words[:, plane], position = _take(changes, position, num_words)
        else:
            bitmap, position = _take(changes, position, num_words // 8)
            nonzero = np.unpackbits(bitmap, count=num_words).view(bool)
            words[nonzero, plane], position = _take(changes, position, count)
    chunks[changed] ^= words.reshape(-1, CHUNK_BYTES).view(np.uint64)


def _append(out: Array, position: int, part: Array) -> int:
    out[position : position + len(part)] = part
    return position + len(part)


def _take(changes: Array, position: int, length: int) -> tuple[Array, int]:
    return changes[position : position + length], position + length
