"""The delta format: the changes since a version that the worker is known to hold. Exact.

    sender                                    worker
    ------                                    ------
    version 0, whole, is_base        ---->    holds {0}
    base = 0                         <----    applied 0
    version 1, on 0, is_base         ---->    holds {0, 1}
    version 2, on 0                  ---->    (replaced by a newer one before it was read)
    base = 1                         <----    applied 1
    version 3, on 1, is_base         ---->    drops 0, holds {1, 3}

A version becomes a worker's base only when the worker acknowledges it, and the worker keeps it
until it receives a block that builds on the next base. So it does not matter which versions are
dropped on the way. Each worker has its own base, so `worker_ids`, late workers and separate weights
for each worker need no special care. One version at a time is on trial as the next base. If the
worker acknowledges a later one instead, the trial was never read, and another version is tried. A
worker without a base receives the whole model (a key frame). So does every worker when the changes
would take more room than the model.

How the changes are written: the difference of two blocks of 32-bit words, without loss.

    | changed chunks, lengths | one bit per chunk of 16 words | four planes of bytes |

The difference is the exclusive or of the words, so it is zero where the blocks agree to the last
bit, whatever the words mean. Chunks without a change are left out. The bytes of the others are
regrouped: the first bytes of all words form one plane, the second bytes the next, and so on. After
a small training step, the sign and exponent of a float are rarely changed, so the planes of the
upper bytes are mostly zero. A plane is written unchanged, or as one bit per byte followed by the
bytes that are not zero, whichever is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sync.channel import APPLIED, FAILED, JOINED, LEFT, LOST, Answer
from sync.effects.pipeline import Decoder, Encoder
from sync.model.block import HEADER_BYTES, NEVER, Layout, Snapshot, private_snapshot

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


class DeltaFormat:
    """The layout of delta blocks for a model's layout, and where their content lies."""

    def __init__(self, model: Layout):
        self.model = model
        self.whole_bytes = model.extra_offset - HEADER_BYTES
        room = max_changes_bytes(self.whole_bytes)
        layout = Layout.of({"changes": torch.empty(room, dtype=torch.uint8, device="meta")})
        self.layout = layout.with_tail_of(model)

    def numbers(self, whole: Snapshot) -> Array:
        """The bytes of a model's leaves."""
        array: Array = whole.buffer.numpy()
        return array[HEADER_BYTES:][: self.whole_bytes]

    def changes(self, block: Snapshot) -> Array:
        """The bytes of a delta block between its header and the extra state."""
        array: Array = block.buffer.numpy()
        return array[HEADER_BYTES : self.layout.extra_offset]


@dataclass
class _Held:
    """What one worker holds, and the version that may become its next base."""

    base: Snapshot | None = None
    trial: Snapshot | None = None


class DeltaEncoder(Encoder):
    """Tracks what each worker holds. Workers with the same base share their blocks."""

    def __init__(self, delta: DeltaFormat, num_workers: int):
        self.layout = delta.layout
        self._delta = delta
        self._held = [_Held() for _ in range(num_workers)]

    def split(self, workers: Sequence[int]) -> list[Sequence[int]]:
        groups: dict[tuple[int, bool], list[int]] = {}
        for worker in workers:
            held = self._held[worker]
            groups.setdefault((id(held.base), held.trial is None), []).append(worker)
        return list(groups.values())

    def encode(
        self, whole: Snapshot, block: Snapshot, workers: Sequence[int]
    ) -> tuple[float, float]:
        delta, held = self._delta, self._held[workers[0]]
        base, changes, length = held.base, delta.changes(block), 0
        if base is not None:
            length = write_changes(delta.numbers(base), delta.numbers(whole), changes)
        if base is None or length >= delta.whole_bytes:
            base, length = None, delta.whole_bytes
            changes[:length] = delta.numbers(whole)
        block.mark(
            builds_on=NEVER if base is None else base.version,
            is_base=held.trial is None,
            filled=HEADER_BYTES + length,
        )
        return 0.0, 0.0

    def published(self, whole: Snapshot, block: Snapshot, workers: Sequence[int]) -> None:
        if block.is_base:
            for worker in workers:
                self._held[worker].trial = whole

    def heard(self, answer: Answer) -> None:
        held = self._held[answer.worker]
        if answer.kind in (JOINED, LEFT, LOST):
            held.base = held.trial = None
        elif answer.kind in (APPLIED, FAILED) and held.trial is not None:
            if answer.kind == APPLIED and answer.version == held.trial.version:
                held.base = held.trial
            if answer.version >= held.trial.version:
                held.trial = None

    def bases(self) -> list[Snapshot]:
        kept = (whole for held in self._held for whole in (held.base, held.trial))
        return [whole for whole in kept if whole is not None]


class DeltaDecoder(Decoder):
    """Keeps the base and the version on trial: the next block may build on either."""

    def __init__(self, delta: DeltaFormat):
        self.layout = delta.layout
        self._delta = delta
        self._held: dict[int, Snapshot] = {}
        self._pool = [private_snapshot(delta.model) for _ in range(3)]

    def decode(self, block: Snapshot) -> Snapshot:
        base = block.builds_on
        if base != NEVER and base not in self._held:
            raise RuntimeError(
                f"version {block.version} builds on version {base}, which this worker does not "
                "have: the channel delivered a block for the worker's predecessor"
            )
        held = {version: whole for version, whole in self._held.items() if version >= base}
        whole = next(w for w in self._pool if all(w is not kept for kept in held.values()))
        numbers, changes = self._delta.numbers(whole), self._delta.changes(block)
        if base == NEVER:
            numbers[:] = changes[: self._delta.whole_bytes]
        else:
            numbers[:] = self._delta.numbers(held[base])
            apply_changes(numbers, changes)
        if block.is_base:
            held = {base: held[base]} if base != NEVER else {}
            held[block.version] = whole
        self._held = held
        return whole
