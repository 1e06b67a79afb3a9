"""The delta format: what changed against a version that the worker is known to hold.

    sender                                    worker
    ------                                    ------
    version 0, whole, "keep it"      ---->    holds {0}
    base = 0                         <----    "0 is in use"
    version 1, on 0, "keep it"       ---->    holds {0, 1}
    version 2, on 0                  ---->    (a newer one took its place: never seen)
    base = 1                         <----    "1 is in use"
    version 3, on 1, "keep it"       ---->    0 is dropped; holds {1, 3}

A version is a base only after the worker said that it uses it, and the worker keeps it until it is
sent something that builds on the next. So whatever is lost on the way in between is of no account,
and each worker is served from its own base: `worker_ids`, late joiners and weights of one's own for
each worker need nothing more. One version at a time is on trial as the next base; if the worker
says that it uses a later one, that version was never read, and another is tried. A worker without
a base (a newcomer, one that took a dead one's place) is sent the whole model, a key frame. So is
everybody if the changes would take more room than that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch

from sync.binding import Binding
from sync.layout import HEADER_BYTES, Layout
from sync.snapshot import NEVER, OneThread, Snapshot
from sync.wire.coder import EXACT, Decoder, Deviation, Encoder, private_snapshot
from sync.wire.planes import Array, apply_changes, room_for, write_changes


class Delta:
    """The layout of the blocks that travel, for a model's layout; and what lies where."""

    def __init__(self, model: Layout):
        self.model = model
        self.whole_bytes = model.extra_offset - HEADER_BYTES
        room = room_for(self.whole_bytes)
        layout = Layout.of({"changes": torch.empty(room, dtype=torch.uint8, device="meta")})
        self.layout = replace(layout, extra_capacity=model.extra_capacity)

    def numbers(self, whole: Snapshot) -> Array:
        """The bytes of a whole model's leaves."""
        return bytes_of(whole)[HEADER_BYTES:][: self.whole_bytes]

    def changes(self, block: Snapshot) -> Array:
        """The bytes of a block that travels."""
        return bytes_of(block)[HEADER_BYTES : block.layout.extra_offset]


def bytes_of(snapshot: Snapshot) -> Array:
    """The block as numpy sees it."""
    found: Array = snapshot.buffer.numpy()
    return found


class Bases:
    """What one worker is known to hold, and what may become that; told by its transport."""

    def __init__(self) -> None:
        self.base: Snapshot | None = None
        self.trial: Snapshot | None = None
        self.offered: Snapshot | None = None
        self.trial_is_whole = False

    def in_use(self, version: int) -> None:
        """The worker uses, or has used, this version."""
        if self.trial is not None and version >= self.trial.version:
            if version == self.trial.version:
                self.base = self.trial
            self.trial = None

    def refused(self, version: int) -> None:
        """The worker could not take this version."""
        if self.trial is not None and version >= self.trial.version:
            self.trial = None

    def forget(self) -> None:
        """Another process took the worker's place: it holds nothing, but may take what is whole."""
        self.base = None
        if not self.trial_is_whole:
            self.trial = None


class _Packed(NamedTuple):
    """A version that is written and not yet offered."""

    whole: Snapshot
    workers: Collection[int]
    is_base: bool
    is_whole: bool


class DeltaEncoder(Encoder):
    """Knows of every worker what it holds; workers with the same base share their blocks."""

    def __init__(self, delta: Delta, num_workers: int):
        self.layout = delta.layout
        self._delta = delta
        self.bases = [Bases() for _ in range(num_workers)]
        self._pool: list[Snapshot] = []
        self._packed: list[_Packed] = []

    def bases_of(self, worker: int) -> Bases:
        return self.bases[worker]

    def split(self, workers: list[int]) -> list[list[int]]:
        """By base, and by whether the next base is still on trial."""
        groups: dict[tuple[int, bool], list[int]] = {}
        for worker in workers:
            bases = self.bases[worker]
            groups.setdefault((id(bases.base), bases.trial is None), []).append(worker)
        return list(groups.values())

    def pack(
        self,
        binding: Binding,
        block: Snapshot,
        version: int,
        workers: Collection[int],
        *,
        check_finite: bool,
    ) -> Deviation:
        bases = self.bases[next(iter(workers))]
        is_base = bases.trial is None
        whole = self._free()
        binding.pack(whole, version, check_finite=check_finite)
        self._write(whole, bases.base, block, is_base=is_base)
        # What is still here for these was refused or interrupted before it was offered.
        self._packed = [p for p in self._packed if set(workers).isdisjoint(p.workers)]
        self._packed.append(_Packed(whole, workers, is_base, block.builds_on == NEVER))
        return EXACT

    def _write(
        self, whole: Snapshot, base: Snapshot | None, block: Snapshot, *, is_base: bool
    ) -> None:
        delta, length = self._delta, 0
        with OneThread(delta.whole_bytes):
            if base is not None:
                length = write_changes(
                    delta.numbers(base), delta.numbers(whole), delta.changes(block)
                )
            if base is None or length >= delta.whole_bytes:
                base, length = None, delta.whole_bytes
                delta.changes(block)[:length] = delta.numbers(whole)
        builds_on = NEVER if base is None else base.version
        block.mark(builds_on=builds_on, is_base=is_base, filled=HEADER_BYTES + length)
        block.stamp(whole.version, whole.extra)

    def _free(self) -> Snapshot:
        """A block that nothing may build on any more."""
        held = {id(whole) for b in self.bases for whole in (b.base, b.trial, b.offered)}
        held |= {id(packed.whole) for packed in self._packed}
        for whole in self._pool:
            if id(whole) not in held:
                return whole
        self._pool.append(private_snapshot(self._delta.model))
        return self._pool[-1]

    def offering(self, workers: Collection[int]) -> None:
        packed = next(p for p in self._packed if p.workers == workers)
        for worker in workers:
            bases = self.bases[worker]
            bases.offered = packed.whole
            if packed.is_base:
                bases.trial, bases.trial_is_whole = packed.whole, packed.is_whole
        self._packed.remove(packed)

    def pack_again(self, worker: int, block: Snapshot) -> bool:
        whole = self.bases[worker].offered
        if whole is None:
            return False
        self._write(whole, None, block, is_base=True)
        bases = self.bases[worker]
        bases.base, bases.trial, bases.trial_is_whole = None, whole, True
        return True


class DeltaDecoder(Decoder):
    """Holds the base and the version on trial; both may be what the next block builds on."""

    def __init__(self, delta: Delta):
        self._delta = delta
        self._held: dict[int, Snapshot] = {}
        self._pool = [private_snapshot(delta.model) for _ in range(3)]

    def can_read(self, block: Snapshot) -> bool:
        return block.builds_on == NEVER or block.builds_on in self._held

    def unpack(self, block: Snapshot) -> Snapshot:
        base = block.builds_on
        held = {version: whole for version, whole in self._held.items() if version >= base}
        whole = next(w for w in self._pool if all(w is not kept for kept in held.values()))
        self._held = held
        numbers, changes = self._delta.numbers(whole), self._delta.changes(block)
        with OneThread(self._delta.whole_bytes):
            if base == NEVER:
                numbers[:] = changes[: self._delta.whole_bytes]
            else:
                numbers[:] = self._delta.numbers(held[base])
                apply_changes(numbers, changes)
        whole.stamp(block.version, block.extra)
        if block.is_base:
            kept = {base: held[base]} if base != NEVER else {}
            self._held = {**kept, block.version: whole}
        return whole
