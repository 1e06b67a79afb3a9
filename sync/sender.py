"""The sending end of a scheme: versions are made here, offered to workers, and settled."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Integral
from typing import Any

from torch import nn

from sync.binding import Binding
from sync.board import now_ns
from sync.errors import WorkerDied, WorkerError, combine
from sync.forms import SenderForm
from sync.layout import Layout
from sync.link import Link, LinkEnd, Outbox
from sync.memory import Watch, must_look
from sync.slots import Slots
from sync.snapshot import NEVER, Snapshot
from sync.stats import SendStats
from sync.strategy import Weights, WeightStrategy
from sync.transport import Transport
from sync.waiting import await_workers
from sync.wire import make_encoder
from sync.wire.coder import EXACT, Deviation

_PATIENCE_S = 1.0  # with other threads' calls
Plan = list[tuple[Weights, list[int]]]  # weights, and the workers that are sent them


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
        wire: str = "float32",
        link: Link | None = None,
    ):
        self.form = form
        self.version = NEVER
        self.lock = threading.RLock()
        self.closed = False
        self.transports: dict[int, Transport] = {}
        self.slots: Slots
        self._strategy = strategy
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._check_finite = check_finite
        self._last: Binding | None = None
        self.registered: Binding | None
        self._everybody: list[int] = []
        self._watched: list[Watch | None] = []
        self._deaths = select.poll()
        self.layout: Layout
        first = Binding(form.weights_for(0), strategy)
        self.layout = first.layout
        self.stats = SendStats(first.layout.nbytes)
        self.registered = first if form.same_for_all else None
        for worker in form.by_worker or ():
            Binding(form.weights_for(worker), strategy, self.layout)
        self._encoder = make_encoder(wire, self.layout, form.num_workers)
        self._link_options = link
        self.link: LinkEnd | None = None

    @property
    def wire_layout(self) -> Layout:
        """Of the blocks that travel."""
        return self.layout if self._encoder is None else self._encoder.layout

    def open(self, slots: Slots, transports: dict[int, Transport]) -> None:
        self.slots, self.transports = slots, transports
        self._everybody = list(transports)
        if self._encoder is not None:
            for worker, transport in transports.items():
                transport.bases = self._encoder.bases_of(worker)
        if self._link_options is not None:
            self.link = LinkEnd(
                self._link_options,
                self.wire_layout,
                transports,
                lock=self.lock,
                deliver=self._deliver,
            )

    def _deliver(self, transport: Transport, arrived: Snapshot, version: int) -> None:
        """Offer what has come to the end of the link."""
        self._notice_deaths()
        slot = self.slots.free(self._held([transport.worker_idx]))
        self.slots[slot].become(arrived)
        self._offer([transport], slot, version)

    def _offer(self, transports: Collection[Transport], slot: int, version: int) -> None:
        for transport in transports:
            transport.offer(slot, version)

    # -- meeting the workers

    def connect(self, worker_idx: int | None, weights: Weights | None) -> None:
        """Give version 0 to all workers, or the current one to a worker that came later."""
        with self.lock:
            self._check_open("connect")
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
                    if not self._offer_again(worker):
                        self._publish(self._plan([worker], None), self.version + 1)
                if self.link is not None:  # one that greeted early may have found an older one
                    self.settle(workers, self._connect_timeout, lambda t: t.connected)
                    return
            self.settle(workers, self._connect_timeout)

    def _offer_again(self, worker: int) -> bool:
        """Offer a newcomer what its predecessor was offered last, so that it can read it."""
        transport = self.transports[worker]
        if transport.offer_again() if self.link is None else self.link.again(worker):
            return True
        if self._encoder is None:
            return False
        pool, held = self._pool([worker])
        number = pool.free(held)
        if not self._encoder.pack_again(worker, pool[number]):
            return False
        self._send_out([worker], number, transport.addressed)
        transport.stats.addressed -= 1  # it was counted when it was offered first
        return True

    def _hand_over(self, workers: list[int], weights: Weights | None, settle: list[int]) -> None:
        version = self.version + 1
        if self.form.same_for_all:
            self._publish(self._plan(workers, weights), version)
            return
        # Each has weights of its own: made and handed over one after the other, so that there is
        # one copy at a time however many workers there are.
        for worker in workers:
            self._publish(self._plan([worker], weights), version)
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
            self._check_open("send")
            if self.version == NEVER:
                raise RuntimeError("send() before connect(): the workers have no weights yet")
            if by_worker:
                workers = self.workers(list(weights))
                if worker_ids is not None and self.workers(worker_ids) != workers:
                    raise ValueError(
                        f"worker_ids={worker_ids} and weights for workers {workers} disagree"
                    )
                plan = [(weights[worker], [worker]) for worker in workers]
            else:
                workers = self.workers(worker_ids)
                plan = self._plan(workers, weights)
            self._notice_deaths()
            if not settling:
                self._take_in()
            if workers:
                self._publish(plan, self.version + 1)
            if failures := self._past_failures(workers):
                raise combine(failures)
            return workers

    def _plan(self, workers: list[int], weights: Weights | None) -> Plan:
        """What each of these workers is sent."""
        if self.form.same_for_all:
            return [(self.form.weights_for(0, weights), workers)]
        return [(self.form.weights_for(worker, weights), [worker]) for worker in workers]

    def _publish(self, plan: Plan, version: int) -> None:
        """Write each distinct set of weights once, then offer it to its workers."""
        if len(plan) > 1:
            plan = _distinct(plan)
        if self._encoder is not None or self.link is not None:
            self._publish_encoded(plan, version)
            return
        # All are written before any is offered: if one is refused, nobody gets any.
        held = self._held(_addressed(plan))
        written: list[tuple[int, list[int], int, int]] = []
        for weights, workers in plan:
            begun = now_ns()
            slot = self.slots.free(held)
            nbytes = self._pack(self._bind(weights), slot, version)
            held.add(slot)
            written.append((slot, workers, now_ns() - begun, nbytes))
        self.version = version
        for slot, workers, pack_ns, nbytes in written:
            begun = now_ns()
            self._offer([self.transports[worker] for worker in workers], slot, version)
            self.stats.add(
                version,
                nbytes,
                pack_ns=pack_ns,
                publish_ns=now_ns() - begun,
                workers=workers,
            )
            self._note_saved(workers, nbytes)

    def _publish_encoded(self, plan: Plan, version: int) -> None:
        """The same through a wire format, or over a link, or both."""
        addressed = _addressed(plan)
        if self._encoder is not None:
            for worker in addressed:
                self.transports[worker].collect()  # what it says it holds
            plan = [(weights, part) for weights, ws in plan for part in self._encoder.split(ws)]
        pool, held = self._pool(addressed)
        written: list[tuple[int, list[int], int, Deviation]] = []
        for weights, workers in plan:
            begun = now_ns()
            number = pool.free(held)
            found = self._write(self._bind(weights), pool[number], version, workers)
            held.add(number)
            written.append((number, workers, now_ns() - begun, found))
        self.version = version
        for number, workers, pack_ns, found in written:
            begun, nbytes = now_ns(), pool[number].wire_bytes
            if self._encoder is not None:
                self._encoder.offering(workers)
            self._send_out(workers, number, version)
            self.stats.add(
                version,
                nbytes,
                pack_ns=pack_ns,
                publish_ns=now_ns() - begun,
                workers=workers,
                max_error=found.max_abs,
                relative_error=found.relative_rms,
            )
            self._note_saved(workers, nbytes)

    def _note_saved(self, workers: list[int], nbytes: int) -> None:
        if saved := self.layout.nbytes - nbytes:
            for worker in workers:
                self.transports[worker].stats.saved_bytes += saved

    def _write(
        self, binding: Binding, block: Snapshot, version: int, workers: list[int]
    ) -> Deviation:
        if self._encoder is None:
            binding.pack(block, version, check_finite=self._check_finite)
            return EXACT
        return self._encoder.pack(binding, block, version, workers, check_finite=self._check_finite)

    def _pool(self, addressed: Collection[int]) -> tuple[Slots | Outbox, set[int]]:
        """Where versions are written before they are sent out, and what of it is in use."""
        if self.link is not None:
            return self.link.outbox, self.link.held()
        return self.slots, self._held(addressed)

    def _send_out(self, workers: list[int], number: int, version: int) -> None:
        if self.link is not None:
            self.link.post(workers, number, version)
        else:
            self._offer([self.transports[worker] for worker in workers], number, version)

    def _held(self, addressed: Collection[int]) -> set[int]:
        """The slots that must not be written: in use, or wanted by whoever replaces a worker.

        Weights of its own can be made again for a worker, so that no memory is spent on them.
        """
        held: set[int] = set()
        for worker, transport in self.transports.items():
            keeps = self.form.same_for_all and worker not in addressed
            held |= transport.kept() if keeps else transport.held()
        return held

    def _pack(self, binding: Binding, slot: int, version: int) -> int:
        """Write a version; how many bytes that took."""
        binding.pack(self.slots[slot], version, check_finite=self._check_finite)
        return self.layout.nbytes

    def _bind(self, weights: Weights) -> Binding:
        for known in (self.registered, self._last):
            if known is not None and known.target is weights:
                return known
        binding = Binding(weights, self._strategy, self.layout)
        if isinstance(weights, nn.Module):  # likely to be sent again; anything else is let go
            self._last = binding
        return binding

    # -- settling

    def settle(
        self,
        workers: Iterable[int],
        timeout: float | None = None,
        done: Callable[[Transport], bool] = lambda t: t.connected and not t.waiting,
    ) -> None:
        """Wait until these workers use what was last addressed to them; raise what went wrong."""
        timeout = self._timeout if timeout is None else timeout
        with self.lock:
            self._check_open("send")
            transports = [self.transports[worker] for worker in workers]
            hungry = [t for t in self.transports.values() if t.hungry and t not in transports]
            failures = await_workers(
                transports,
                done,
                timeout,
                bystanders=hungry,
                link=self.link,
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
                if self.link is not None:
                    self.link.pump()
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

    def _take_in(self) -> None:
        """What workers have said, and who is gone."""
        if self.link is not None:
            self.link.pump()
        for transport in self.transports.values():
            transport.collect()
            transport.judge()

    def _notice_deaths(self) -> None:
        """See which workers are gone: one poll for all of them."""
        watches = [transport.watch for transport in self.transports.values()]
        if watches != self._watched:
            deaths = select.poll()
            for watch in watches:
                for fd in watch.fds() if watch is not None else ():
                    deaths.register(fd, select.POLLIN)
            self._deaths = deaths
            self._watched = watches  # last: an interrupt before it has this done again
        ready = [fd for fd, _ in self._deaths.poll(0)]
        if ready or must_look():
            for watch in watches:
                if watch is not None:
                    watch.notice(ready)

    def workers(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        """The addressed workers, checked."""
        if worker_ids is None:
            return self._everybody
        return chosen_workers(worker_ids, len(self.transports))

    def summary(self) -> dict[str, Any]:
        self.collect()
        sent = self.stats.worker_summaries(len(self.transports))
        workers = {
            w: t.stats.summary(self.layout.nbytes, waiting=t.answered < t.addressed) | sent[w]
            for w, t in self.transports.items()
        }
        if self.link is not None:
            for worker, line in self.link.lines.items():
                workers[worker]["link"] = line.summary()
        wire = self.stats.wire_summary()
        return {"version": self.version, **self.stats.summary(), "wire": wire, "workers": workers}

    def _check_open(self, call: str) -> None:
        if self.closed:
            raise RuntimeError(f"{call}: another thread called shutdown() meanwhile")

    def close(self) -> None:
        """Let a call of another thread end first, unless that takes long."""
        self.closed = True
        alone = self.lock.acquire(timeout=_PATIENCE_S)
        try:
            if self.link is not None:
                self.link.stop()
            for transport in self.transports.values():
                transport.close()
            if alone:
                self.transports, self._last = {}, None
        finally:
            if alone:
                self.lock.release()


def _distinct(plan: Plan) -> Plan:
    """The same, with each set of weights named once."""
    groups: dict[int, tuple[Weights, list[int]]] = {}
    for weights, workers in plan:
        groups.setdefault(id(weights), (weights, []))[1].extend(workers)
    return list(groups.values())


def _addressed(plan: Plan) -> set[int]:
    return {worker for _, workers in plan for worker in workers}


def chosen_workers(worker_ids: int | Iterable[int] | None, num_workers: int) -> list[int]:
    """The workers that `worker_ids` names, all if None; a `ValueError` for one that is not."""
    if worker_ids is None:
        return list(range(num_workers))
    chosen: list[Any] = list(worker_ids) if isinstance(worker_ids, Iterable) else [worker_ids]
    for worker in chosen:
        whole = isinstance(worker, Integral) and not isinstance(worker, bool)
        if not whole or worker not in range(num_workers):
            raise ValueError(f"worker_ids: no worker {worker!r}, only 0 to {num_workers - 1}")
    return sorted(set(chosen))
