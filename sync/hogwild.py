"""Weights without synchronisation: workers read the trainer's own parameters while it writes them.

This breaks promises 1 and 2 on purpose. It is the lower bound of what syncing can cost and the
upper bound of what it can spoil, for ablations.

    trainer: optimizer.step()  --writes-->  one memory  <--reads--  worker: policy(observation)
    trainer: send()            counts a version; moves buffers and extra state, nothing else
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from sync.binding import Binding
from sync.forms import SenderForm
from sync.layout import HEADER_BYTES, Layout
from sync.shared_mem import SharedMemSenderEnd, SharedMemTransport, SharedMemWeightSyncScheme
from sync.slots import Slots
from sync.snapshot import NEVER, Snapshot
from sync.strategy import WeightStrategy
from sync.transport import Transport


class HogwildTransport(SharedMemTransport):
    """The board as elsewhere; the one slot is being written all the time."""

    def _is_whole(self, snapshot: Snapshot, version: int) -> bool:
        return True


class HogwildSenderEnd(SharedMemSenderEnd):
    """Publishing is a stamp: the weights are where they are."""

    def __init__(self, form: SenderForm, *args: Any, **options: Any):
        if not form.same_for_all:
            raise ValueError("hogwild workers read the trainer's own weights: all have the same")
        super().__init__(form, *args, **options)

    def connect(self, *args: Any) -> None:
        self._move_in()
        super().connect(*args)

    def _move_in(self) -> None:
        """Make the shared block the memory of the trainer's parameters."""
        assert self.registered is not None
        if self.registered.device.type != "cpu":
            raise ValueError(f"hogwild needs a CPU model; this one is on {self.registered.device}")
        if self.version == NEVER:
            self.registered.pack(self.slots[0], 0, check_finite=False)
            self.registered.point_at(self.slots[0])

    def _held(self, addressed: Collection[int]) -> set[int]:
        return set()

    def _pack(self, binding: Binding, slot: int, version: int) -> int:
        block, nbytes = self.slots[slot], 0
        with torch.no_grad():
            for leaf, view in zip(binding.leaves(), block.views, strict=True):
                if not _same(leaf, view):
                    view.copy_(leaf)
                    nbytes += view.nbytes
        block.stamp(version, binding.extra())
        if binding is self.registered and not binding.points_at(block):
            binding.point_at(block)  # the trainer replaced parameters: they are shared again
        return nbytes

    def close(self) -> None:
        super().close()
        if self.registered is not None and self.version >= 0:
            self.registered.detach_from_snapshots()


class HogwildWeightSyncScheme(SharedMemWeightSyncScheme):
    """The trainer's parameters live in the one block that all workers point at.

    So there is one set of weights, and `send(other_weights)` writes those over the trainer's own.

    check_torn: compare the weights before and after each use, in `reading()` and in the policy
        calls of collectors, and count in `torn` the uses during which they moved. It costs two
        passes over the weights a use.
    """

    _sender_end = HogwildSenderEnd
    _moves_nothing = (
        "hogwild workers read the trainer's own memory, so nothing travels that could be encoded "
        "or delayed; take SharedMemWeightSyncScheme"
    )

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        *,
        check_torn: bool = False,
        **options: Any,
    ):
        super().__init__(strategy, sync=sync, zero_copy=True, **options)
        self.check_torn = check_torn

    def _open(self, layout: Layout, num_workers: int) -> tuple[Slots, dict[int, Transport]]:
        _, transports = super()._open(layout, num_workers)
        slots = Slots(layout, 1)
        for worker, transport in transports.items():
            assert isinstance(transport, SharedMemTransport)
            transports[worker] = HogwildTransport(slots, transport.board, worker)
            transports[worker].segfault_hint = transport.segfault_hint
        return slots, transports

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        with super().reading() as version, self._checking():
            yield version

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        if not self.check_torn:
            return call

        def checked(*inputs: Any) -> Any:
            with self._checking():
                return call(*inputs)

        return checked

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        if not self.check_torn:
            yield
            return
        transport = _hogwild(self._need_receiver("check_torn").transport)
        live = transport.slots[0].buffer[HEADER_BYTES:]
        before = live.clone()
        yield
        transport.row.count_use(torn=not torch.equal(before, live))

    @property
    def torn(self) -> dict[str, float]:
        """Of the uses that were checked, how many there were, and how many torn.

        On a receiver its own; on the sender all workers'.
        """
        if self._is_sender:
            return _shares(self._need_sender("torn").transports.values())
        return _shares([self._need_receiver("torn").transport])

    @property
    def stats(self) -> dict[str, Any]:
        """With `check_torn`, also what `torn` says, of all and of each worker."""
        found = super().stats
        if self.check_torn:
            found["torn"] = self.torn
            for worker, stats in found["workers"].items():
                stats["torn"] = _shares([self.create_transport(worker_idx=worker)])
        return found


def _hogwild(transport: Transport) -> HogwildTransport:
    assert isinstance(transport, HogwildTransport)
    return transport


def _shares(transports: Iterable[Transport]) -> dict[str, float]:
    uses = [_hogwild(transport).row.uses for transport in transports]
    checked, torn = (sum(counts) for counts in zip(*uses, strict=True))
    return {"checked": checked, "torn": torn, "fraction": torn / checked if checked else 0.0}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() != 0
