"""What changed between two blocks of 32-bit words, written down without loss.

    | changed chunks, lengths | one bit a chunk of 16 words | four planes of bytes |

The words of both blocks are combined by exclusive or, so that what is the same in both is zero, to
the last bit and whatever the words mean. Chunks without a change are left out. Of the others, the
first bytes of all words make one plane, the second bytes the next, and so on: after a small step of
training a float's sign and exponent are what they were, so the planes of the upper bytes are mostly
zero. A plane is written as it is, or as one bit a byte and the bytes that are not zero, whichever
is shorter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

CHUNK_WORDS = 16
CHUNK_BYTES = 4 * CHUNK_WORDS
_HEAD_BYTES = 64
_PLANES = 4


def room_for(nbytes: int) -> int:
    """The most that `write_changes` ever needs for blocks of `nbytes`, whole chunks."""
    chunks = nbytes // CHUNK_BYTES
    return _HEAD_BYTES + -(-chunks // 8) + nbytes


def write_changes(base: Array, new: Array, out: Array) -> int:
    """Write into `out` (uint8) what turns `base` into `new` (both uint8); how long it is."""
    difference = np.bitwise_xor(base.view(np.uint64), new.view(np.uint64))
    chunks = difference.reshape(-1, CHUNK_BYTES // 8)
    changed = chunks.any(axis=1)
    bitmap = np.packbits(changed)
    words = chunks[changed].view(np.uint8).reshape(-1, _PLANES)
    head = out[:_HEAD_BYTES].view(np.int64)
    head[0] = len(words) // CHUNK_WORDS
    end = _append(out, _HEAD_BYTES, bitmap)
    for plane in range(_PLANES):
        there = np.ascontiguousarray(words[:, plane])
        kept = there != 0
        count = int(np.count_nonzero(kept))
        if count + len(there) // 8 < len(there):
            head[1 + plane] = count
            end = _append(out, end, np.packbits(kept))
            end = _append(out, end, there[kept])
        else:
            head[1 + plane] = -1
            end = _append(out, end, there)
    return end


def apply_changes(target: Array, changes: Array) -> None:
    """Turn `target` (uint8), which equals the base, into what `write_changes` was given as new."""
    head = changes[:_HEAD_BYTES].view(np.int64)
    chunks = target.view(np.uint64).reshape(-1, CHUNK_BYTES // 8)
    at = _HEAD_BYTES
    bitmap, at = _take(changes, at, -(-len(chunks) // 8))
    changed = np.unpackbits(bitmap, count=len(chunks)).view(bool)
    num_words = int(head[0]) * CHUNK_WORDS
    words = np.zeros((num_words, _PLANES), np.uint8)
    for plane in range(_PLANES):
        count = int(head[1 + plane])
        if count < 0:
            words[:, plane], at = _take(changes, at, num_words)
        else:
            kept, at = _take(changes, at, num_words // 8)
            present = np.unpackbits(kept, count=num_words).view(bool)
            words[present, plane], at = _take(changes, at, count)
    chunks[changed] ^= words.reshape(-1, CHUNK_BYTES).view(np.uint64)


def _append(out: Array, at: int, part: Array) -> int:
    out[at : at + len(part)] = part
    return at + len(part)


def _take(changes: Array, at: int, length: int) -> tuple[Array, int]:
    return changes[at : at + length], at + length
