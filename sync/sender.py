"""The sending end of a scheme: versions are made here, offered to workers, and settled."""

from __future__ import annotations

import select
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import nn

from sync.binding import Binding
from sync.board import now_ns
from sync.errors import WorkerDied, WorkerError, combine
from sync.forms import SenderForm
from sync.layout import Layout
from sync.memory import Watch, must_look
from sync.slots import Slots
from sync.snapshot import NEVER
from sync.stats import SendStats, Sent
from sync.strategy import Weights, WeightStrategy
from sync.transport import Transport, await_workers


class SenderEnd:
    """Packs weights into free slots and offers them to workers. One lock makes calls take turns."""

    def __init__(
        self,
        form: SenderForm,
        strategy: WeightStrategy,
        *,
        timeout: float,
        connect_timeout: float,
        check_finite: bool,
    ):
        self.form = form
        self.version = NEVER
        self.lock = threading.RLock()
        self.stats = SendStats()
        self.transports: dict[int, Transport] = {}
        self.slots: Slots
        self._strategy = strategy
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._check_finite = check_finite
        self._last: Binding | None = None
        self.registered: Binding | None
        self._watched: list[Watch | None] = []
        self._deaths = select.poll()
        self.layout: Layout
        first = Binding(form.weights_for(0), strategy)
        self.layout = first.layout
        self.registered = first if form.same_for_all else None
        for worker in form.by_worker or ():
            Binding(form.weights_for(worker), strategy, self.layout)

    def open(self, slots: Slots, transports: dict[int, Transport]) -> None:
        self.slots, self.transports = slots, transports

    def _offer(self, transports: Collection[Transport], slot: int, version: int) -> None:
        for transport in transports:
            transport.offer(slot, version)

    # -- meeting the workers

    def connect(self, worker_idx: int | None, weights: Weights | None) -> None:
        """Give version 0 to all workers, or the current one to a worker that came later."""
        with self.lock:
            workers = self.workers(worker_idx)
            for worker in workers:
                self.transports[worker].expect_newcomer()
            if self.version == NEVER and worker_idx is not None:
                # Workers may be met one by one; all of them get the same version 0.
                self._hand_over(self.workers(None), weights, settle=workers)
            elif self.version == NEVER or weights is not None:
                self._hand_over(workers, weights, settle=workers)
            else:
                for worker in workers:
                    if not self.transports[worker].offer_again():
                        self._publish({worker: self.form.weights_for(worker)}, self.version + 1)
            self.settle(workers, self._connect_timeout)

    def _hand_over(self, workers: list[int], weights: Weights | None, settle: list[int]) -> None:
        version = self.version + 1
        if self.form.same_for_all:
            shared = self.form.weights_for(0, weights)
            self._publish(dict.fromkeys(workers, shared), version)
            return
        # Each has weights of its own: made and handed over one after the other, so that there is
        # one copy at a time however many workers there are.
        for worker in workers:
            self._publish({worker: self.form.weights_for(worker, weights)}, version)
            if worker in settle:
                self.settle([worker], self._connect_timeout)

    # -- sending

    def send(
        self,
        weights: Any,
        worker_ids: int | Sequence[int] | None,
        *,
        by_worker: bool,
        settling: bool,
    ) -> list[int]:
        """Publish the next version and return whom it went to. Waits for nobody.

        What went wrong at these workers since the last send is raised, after the healthy ones have
        been offered the new version. With `settling`, `settle` follows and will see who is dead.
        """
        with self.lock:
            if self.version == NEVER:
                raise RuntimeError("send() before connect(): the workers have no weights yet")
            if by_worker:
                workers = self.workers(list(weights))
                if worker_ids is not None and self.workers(worker_ids) != workers:
                    raise ValueError(
                        f"worker_ids={worker_ids} and weights for workers {workers} disagree"
                    )
                plan = {worker: weights[worker] for worker in workers}
            else:
                workers = self.workers(worker_ids)
                plan = {worker: self.form.weights_for(worker, weights) for worker in workers}
            if not settling:
                self._look_for_deaths()
            if plan:
                self._publish(plan, self.version + 1)
            if failures := self._past_failures(workers):
                raise combine(failures)
            return workers

    def _publish(self, plan: Mapping[int, Weights], version: int) -> None:
        """Write each distinct set of weights once, then offer it to its workers."""
        groups: dict[int, list[int]] = {}
        for worker, weights in plan.items():
            groups.setdefault(id(weights), []).append(worker)
        # All are written before any is offered: if one is refused, nobody gets any.
        held = self._held(plan)
        written: list[tuple[int, list[int], int]] = []
        for workers in groups.values():
            begun = now_ns()
            slot = self.slots.free(held)
            self._pack(self._bind(plan[workers[0]]), slot, version)
            held.add(slot)
            written.append((slot, workers, now_ns() - begun))
        self.version = version
        for slot, workers, pack_ns in written:
            begun = now_ns()
            self._offer([self.transports[worker] for worker in workers], slot, version)
            self.stats.add(Sent(version, self.layout.nbytes, pack_ns, now_ns() - begun))

    def _held(self, addressed: Collection[int]) -> set[int]:
        """The slots that must not be written: in use, or wanted by whoever replaces a worker.

        Weights of its own can be made again for a worker, so that no memory is spent on them.
        """
        held: set[int] = set()
        for worker, transport in self.transports.items():
            keeps = self.form.same_for_all and worker not in addressed
            held |= transport.kept() if keeps else transport.held()
        return held

    def _pack(self, binding: Binding, slot: int, version: int) -> None:
        binding.pack(self.slots[slot], version, check_finite=self._check_finite)

    def _bind(self, weights: Weights) -> Binding:
        for known in (self.registered, self._last):
            if known is not None and known.target is weights:
                return known
        binding = Binding(weights, self._strategy, self.layout)
        if isinstance(weights, nn.Module):  # likely to be sent again; anything else is let go
            self._last = binding
        return binding

    # -- settling

    def settle(self, workers: Iterable[int], timeout: float | None = None) -> None:
        """Wait until these workers use what was last addressed to them; raise what went wrong."""
        timeout = self._timeout if timeout is None else timeout
        with self.lock:
            transports = [self.transports[worker] for worker in workers]
            hungry = [t for t in self.transports.values() if t.hungry and t not in transports]
            failures = await_workers(
                transports, lambda t: t.connected and not t.waiting, timeout, bystanders=hungry
            )
            if failures:
                self._past_failures(failures)
                raise combine(failures)

    def collect(self) -> None:
        """Take in answers, unless another thread is at it."""
        if self.lock.acquire(blocking=False):
            try:
                for transport in self.transports.values():
                    transport.collect()
            finally:
                self.lock.release()

    def _past_failures(self, workers: Iterable[int]) -> dict[int, WorkerError]:
        """What is known to be wrong; a worker that lives may try again, a dead one stays dead."""
        failures = {}
        for worker in workers:
            transport = self.transports[worker]
            if transport.failure is not None:
                failures[worker] = transport.failure
                transport.told = True
                if not isinstance(transport.failure, WorkerDied):
                    transport.failure = None
        return failures

    def _look_for_deaths(self) -> None:
        watches = [transport.watch for transport in self.transports.values()]
        if watches != self._watched:
            self._watched, self._deaths = watches, select.poll()
            for watch in watches:
                for fd in watch.fds() if watch is not None else ():
                    self._deaths.register(fd, select.POLLIN)
        ready = [fd for fd, _ in self._deaths.poll(0)]
        if ready or must_look():
            for watch in watches:
                if watch is not None:
                    watch.notice(ready)
        for transport in self.transports.values():
            transport.collect()
            transport.judge()

    def workers(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        """The addressed workers, checked."""
        return chosen_workers(worker_ids, len(self.transports))

    def summary(self) -> dict[str, Any]:
        self.collect()
        workers = {
            w: t.stats.summary(waiting=t.answered < t.addressed) for w, t in self.transports.items()
        }
        return {"version": self.version, **self.stats.summary(), "workers": workers}

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()
        self.transports, self._last = {}, None


def chosen_workers(worker_ids: int | Iterable[int] | None, num_workers: int) -> list[int]:
    """The workers that `worker_ids` names, all if None; a `ValueError` for one that is not."""
    if worker_ids is None:
        return list(range(num_workers))
    chosen: list[Any]
    chosen = [worker_ids] if isinstance(worker_ids, Integral) else list(worker_ids)  # type: ignore[arg-type]
    for worker in chosen:
        if worker not in range(num_workers) or isinstance(worker, bool):
            raise ValueError(f"worker_ids: no worker {worker!r}, only 0 to {num_workers - 1}")
    return sorted(set(chosen))
