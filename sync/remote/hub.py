"""What brings a version from the trainer to its workers elsewhere: once packed, sent to each.

The block of a version is handed to the engine once for all workers; it decides how it travels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sync.memory import Doorbell
from sync.remote import relay
from sync.remote.engine import Engine
from sync.remote.inbox import MISSING, Answer, await_worker
from sync.remote.near import Neighbours
from sync.remote.relay import Errand, keep_and_deliver, take_and_deliver
from sync.slots import Slots
from sync.snapshot import Snapshot


class Way(NamedTuple):
    """A version, its slot, and when it was published."""

    version: int
    slot: int
    published_ns: int


class Hub:
    """What all lines of one sender share: the engine, and the bell that answers ring."""

    def __init__(
        self,
        slots: Slots,
        key: str,
        num_workers: int,
        timeout: float,
        patience_s: float,
        near: Neighbours | None = None,
    ):
        self.engine: Engine | None = None
        self.near = near
        self.bell = Doorbell() if near is None else near.bell
        self.slots, self.key, self.num_workers = slots, key, num_workers
        self.handed_on = 0  # blocks that one peer had from another
        self._handover_s = timeout / 3  # then the trainer sends the block itself
        self._patience_s = patience_s
        self._pays = relay.pays(num_workers, slots.layout.nbytes)
        self._lock = threading.Lock()
        self._packed: tuple[Way, Any] | None = None
        self._sent_to: set[int] = set()  # who was sent the version that is packed

    def await_worker(self, worker: int, patience_s: float | None = None) -> Future[int]:
        """Where that worker takes versions, once it is there."""
        assert self.engine is not None
        patience_s = self._patience_s if patience_s is None else patience_s
        return self.engine.call(worker, await_worker, self.key, worker, patience_s)

    def post(self, worker: int, way: Way) -> Future[Answer]:
        """Bring a slot to a worker: from here, or from a peer that was sent the same before."""
        assert self.engine is not None
        keep = self._hands_on and relay.has_children(worker, self.num_workers)
        errand = Errand(self.key, way.version, worker, keep, self._patience_s)
        parcel, giver = self._pack(worker, way)
        if giver is not None and (route := self.engine.route(worker, giver)) is not None:
            took = self.engine.call(
                worker, take_and_deliver, route, giver, self._handover_s, errand
            )
            answer: Future[Answer] = Future()
            took.add_done_callback(partial(self._settle, errand, parcel, answer))
            return answer
        return self.engine.post(worker, keep_and_deliver, parcel, errand)

    def close(self) -> None:
        if self.near is not None:
            self.near.close()

    @property
    def _hands_on(self) -> bool:
        return self._pays and self.engine is not None and self.engine.hands_on

    def _pack(self, worker: int, way: Way) -> tuple[Any, int | None]:
        """The parcel of this version, and who else than the trainer can hand it over."""
        assert self.engine is not None
        with self._lock:
            if self._packed is None or self._packed[0] != way:  # a slot may be written twice
                block = _travelling(self.slots[way.slot])
                self._packed = way, self.engine.parcel(block)
                self._sent_to.clear()
            giver = relay.parent(worker) if self._hands_on else None
            known = giver in self._sent_to
            self._sent_to.add(worker)
            return self._packed[1], giver if known else None

    def _settle(
        self, errand: Errand, parcel: Any, answer: Future[Answer], took: Future[Answer]
    ) -> None:
        """End `answer` as the handover ended, or as sending the block from here does."""
        assert self.engine is not None
        if took.exception() is None and took.result().kind == MISSING:
            took = attempt(self.engine.post, errand.worker, keep_and_deliver, parcel, errand)
            took.add_done_callback(partial(_pass_on, answer))
        else:
            if took.exception() is None:
                with self._lock:
                    self.handed_on += 1
            _pass_on(answer, took)


def attempt(post: Callable[..., Future[Any]], *args: Any) -> Future[Any]:
    """The future of a post, which has failed if it could not be made."""
    try:
        return post(*args)
    except Exception as error:  # noqa: BLE001 - a full object store, say
        error.add_note("The version could not be sent.")
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _pass_on(answer: Future[Answer], took: Future[Answer]) -> None:
    if (error := took.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(took.result())


def _travelling(snapshot: Snapshot) -> Tensor:
    """As much of a block as has to travel."""
    if snapshot.wire_bytes >= snapshot.layout.nbytes:
        return snapshot.buffer
    start, extra = snapshot.layout.extra_offset, len(snapshot.extra)
    filled = snapshot.wire_bytes - extra
    return torch.cat([snapshot.buffer[:filled], snapshot.buffer[start : start + extra]])
