"""The sending end of a scheme: creates versions, publishes them, and waits for the workers.

send():  check the weights and pack them into a free block      (version n)
         channel.publish(block, workers)
         poll the channel until every addressed worker has answered, failed, died, or is overdue
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from tensordict import is_tensor_collection
from torch import nn

from sync.channel_interface import JOINED, LEFT, LOST, SenderChannel, now_ns
from sync.effects.pipeline import Parcel, Pipeline
from sync.errors import WorkerError, combine
from sync.local.waiting import SLICE_S, Doorbell, awake_s, wait_for
from sync.model.binding import Binding
from sync.model.block import NEVER, CheckFinite, Snapshot
from sync.model.strategy import Weights, WeightStrategy
from sync.sender_form import SenderForm
from sync.worker_record import SendStats, Sent, WorkerRecord

_CLOSE_S = 1.0  # how long closing waits for a call of another thread to end
Plan = list[tuple[Weights, list[int]]]  # weights, and the workers that are sent them


class Sender:
    """Publishes versions over a channel and keeps track of its workers. One call at a time.

    pipeline: what happens to a version, and the channel; set before the first call.
    """

    pipeline: Pipeline

    def __init__(
        self,
        form: SenderForm,
        strategy: WeightStrategy,
        *,
        timeout: float,
        connect_timeout: float,
        check_finite: CheckFinite,
        verify: bool = False,
    ):
        self.form = form
        self._same_for_all = form.same_for_all
        self.version = NEVER
        self.workers = [WorkerRecord(i, device) for i, device in enumerate(form.devices)]
        self._strategy = strategy
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._check_finite: CheckFinite = check_finite
        first = Binding(self.weights_for(0), strategy)
        self.layout = first.layout = first.layout.with_checksums() if verify else first.layout
        self._registered = first if self._same_for_all else None
        for worker in form.by_worker or ():
            Binding(self.weights_for(worker), strategy, self.layout)  # raises if it does not fit
        self._recent: Binding | None = None
        self.stats = SendStats(self.layout.nbytes)
        self._lock = threading.RLock()
        self._closed = False
        self._bell = Doorbell()
        self._service: Service | None = None
        self.broken: Exception | None = None  # what ended the service thread

    @property
    def channel(self) -> SenderChannel:
        return self.pipeline.channel

    @contextmanager
    def _exclusive(self, call: str) -> Iterator[None]:
        """One call at a time, until the sender is closed."""
        with self._lock:
            self._check_open(call)
            yield

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise RuntimeError(f"{call}: another thread has called shutdown()")
        if self.broken is not None:
            raise self.broken

    # -- connecting the workers

    def connect(self, worker_idx: int | None, weights: Weights | None) -> None:
        """Give version 0 to all workers, or the current one to a worker that came later."""
        with self._exclusive("connect"):
            deadline = awake_s() + self._connect_timeout
            chosen = self.chosen(worker_idx)
            self._collect()
            for worker in chosen:
                self.workers[worker].reset_for_successor()
                self.channel.meet(worker)
            if self.version == NEVER:
                # Workers may be met one by one; all of them get the same version 0.
                self._send_initial(self.chosen(None), weights, chosen, deadline)
            elif weights is not None:
                self._send_initial(chosen, weights, chosen, deadline)
            else:
                for worker in chosen:
                    if not self.workers[worker].last_block_is_intact():
                        self._publish(self._plan([worker], None), self.version + 1)
            self._settle(chosen, self._connect_timeout, deadline, "connect")

    def _send_initial(
        self, workers: list[int], weights: Weights | None, connecting: list[int], deadline: float
    ) -> None:
        version = self.version + 1
        if self._same_for_all:
            self._publish(self._plan(workers, weights), version)
            return
        # Each worker has its own weights. They are created and sent one after the other, so that
        # there is only one copy at a time.
        for worker in workers:
            self._publish(self._plan([worker], weights), version)
            if worker in connecting:
                self._settle([worker], self._connect_timeout, deadline, "connect")

    # -- publishing

    def send(
        self, weights: Any, worker_ids: int | Sequence[int] | None, *, wait: bool
    ) -> list[int]:
        """Publish the next version; returns the workers that it was sent to. Does not wait.

        Without `wait`, a failure of these workers since the last send is raised after the version
        was published. With `wait`, `settle` follows and raises it.
        """
        with self._exclusive("send"):
            if self.version == NEVER:
                raise RuntimeError("send() before connect(): the workers have no weights yet")
            workers = self.addressees(weights, worker_ids)
            if is_by_worker(weights):
                plan = [(self.weights_for(worker, weights[worker]), [worker]) for worker in workers]
            else:
                plan = self._plan(workers, weights)
            self._collect()
            if workers:
                self._publish(plan, self.version + 1)
            if not wait:
                self._serve()
                if failures := self._failures(workers):
                    raise combine(failures)
            return workers

    def weights_for(self, worker: int, weights: Weights | None = None) -> Weights:
        """The weights for `worker`: its registered ones, or its part of `weights`."""
        form = self.form
        source: Any = weights
        if source is None:
            source = form.source if form.by_worker is None else form.by_worker[worker]
        return source if form.device_map_fn is None else form.device_map_fn(worker, source)

    def _plan(self, workers: list[int], weights: Weights | None) -> Plan:
        """The weights for each of these workers."""
        if self._same_for_all:
            return [(self.weights_for(0, weights), workers)]
        return [(self.weights_for(worker, weights), [worker]) for worker in workers]

    def _publish(self, plan: Plan, version: int) -> None:
        """Publish all of it, or raise: what workers use or may be sent again stays as it is."""
        begun = now_ns()
        bindings = [(self._bind(weights), workers) for weights, workers in _distinct(plan)]
        check = self.pipeline.finite_check(self._check_finite)
        spares = self._same_for_all and self.channel.keeps_last
        if not spares:  # blocks that successors would get are overwritten: check all weights first
            for binding, _ in bindings:
                binding.check(check)
            check = False
        taken = self.pipeline.taken(self._blocks_to_keep(plan, spares))
        parcels = []
        for binding, workers in bindings:
            parcels.append(Parcel(self.pipeline.free_block(taken), workers))
            own = binding is self._registered
            self.channel.pack(binding, parcels[-1].block, version, check, own=own)
        outgoing = self.pipeline.prepare(parcels, taken)
        self.version = version
        pack_ns = (now_ns() - begun) // max(1, len(outgoing))
        for one in outgoing:
            begun, (block, workers) = now_ns(), one.parcel
            self.channel.publish(one.block, workers)
            nbytes, times = self.channel.moved_bytes(one.block), (pack_ns, now_ns() - begun)
            errors = one.max_error, one.relative_error
            self.stats.add(Sent(block.version, nbytes, *times, workers, *errors))
            for worker in workers:
                self.workers[worker].sent(block, self.layout.nbytes - nbytes)

    def _blocks_to_keep(self, plan: Plan, spares: bool) -> list[Snapshot]:
        """Those that a worker, or a process that replaces it, may still need.

        spares: a version that is refused must not have been written over what a worker was sent
            last. Else that is overwritten once the worker has copied it: it takes less memory.
        """
        addressed = {worker for _, workers in plan for worker in workers}
        return [
            record.last
            for record in self.workers
            if record.last is not None
            and (
                record.waiting
                or not self.pipeline.is_direct
                or spares
                or (self._same_for_all and record.index not in addressed)
            )
        ]

    def _bind(self, weights: Weights) -> Binding:
        for binding_before in (self._registered, self._recent):
            if binding_before is not None and binding_before.target is weights:
                return binding_before
        binding = Binding(weights, self._strategy, self.layout)
        if isinstance(weights, nn.Module):  # likely to be sent again; nothing else is kept
            self._recent = binding
        return binding

    # -- answers of the workers

    def _collect(self) -> None:
        """Record the channel's answers, and send new processes the weights of their worker."""
        newcomers: set[int] = set()
        for answer in self.channel.poll():
            self.workers[answer.worker].book(answer)
            if answer.kind == JOINED:
                newcomers.add(answer.worker)
            elif answer.kind in (LEFT, LOST):
                newcomers.discard(answer.worker)
        for worker in newcomers:  # once, although several processes may have come and gone
            record = self.workers[worker]
            if record.last is not None and record.last_block_is_intact():
                again = self.pipeline.write(Parcel(record.last, [worker]))
                self.channel.publish(again.block, [worker])

    def settle(
        self, workers: Iterable[int], timeout: float | None = None, *, call: str = "send"
    ) -> None:
        """Wait until these workers use the version they were sent last; raise their failures."""
        timeout = self._timeout if timeout is None else timeout
        with self._exclusive(call):
            self._settle(workers, timeout, awake_s() + timeout, call)

    def _settle(self, workers: Iterable[int], timeout: float, deadline: float, call: str) -> None:
        """Wait until `deadline`, which is `timeout` after the call began."""
        failures = self._await([self.workers[one] for one in workers], timeout, deadline, call)
        self._serve()  # versions for other workers may still be queued
        self._failures(failures)  # they are reported now
        if failures:
            raise combine(failures)

    def _await(
        self, pending: list[WorkerRecord], timeout: float, deadline: float, call: str
    ) -> dict[int, WorkerError]:
        failures: dict[int, WorkerError] = {}
        while True:
            self._collect()
            for record in pending:
                if record.failure is not None:
                    failures[record.index] = record.failure
            pending = [
                record for record in pending if record.failure is None and self._is_due(record)
            ]
            if not pending:
                return dict(sorted(failures.items()))
            remaining = deadline - awake_s()
            if remaining <= 0:
                return failures | {
                    record.index: self._overdue(record, timeout) for record in pending
                }
            self._bell.silence()
            self._check_open(call)
            wait_for(
                [self._bell.fd, *self.channel.fds()], self._poll_timeout(min(remaining, SLICE_S))
            )

    def _is_due(self, record: WorkerRecord) -> bool:
        """Whether an answer of the worker is outstanding."""
        return record.waiting or not record.connected or self.channel.about(record.index).is_unknown

    def _poll_timeout(self, longest_s: float) -> float:
        """How long to poll, given what the channel has to do without a readable descriptor."""
        due = self.channel.due_ns()
        return longest_s if due is None else min(longest_s, max(0.0, (due - now_ns()) * 1e-9))

    def _overdue(self, record: WorkerRecord, timeout: float) -> WorkerError:
        about = self.channel.about(record.index)
        return record.overdue(timeout, about.process, about.hint)

    def _failures(self, workers: Iterable[int]) -> dict[int, WorkerError]:
        """The failures of these workers, for the caller to raise."""
        reports = {worker: self.workers[worker].report() for worker in workers}
        return {worker: failure for worker, failure in reports.items() if failure is not None}

    def what_to_wait_for(self) -> tuple[list[int], float]:
        """The descriptors to poll, and the longest time until the channel has to be called."""
        with self._lock:
            busy = not self._closed and self.channel.due_ns() is not None
            return (self.channel.fds(), self._poll_timeout(60.0)) if busy else ([], 60.0)

    def collect(self) -> None:
        """Read answers, unless another thread is doing so."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._closed:
                    self._collect()
                    self._serve()
            finally:
                self._lock.release()

    def serve_once(self) -> None:
        """Read answers and make progress on queued versions, for the service thread."""
        with self._lock:
            if not self._closed:
                self._collect()

    def _serve(self) -> None:
        """Let a thread make progress on queued versions while no call waits for them."""
        if not self._closed and self.channel.due_ns() is not None:
            if self._service is None:
                self._service = Service(self)
            self._service.wake()

    def addressees(self, weights: Any, worker_ids: int | Sequence[int] | None) -> list[int]:
        """The workers that get these weights, which may be a dict by worker."""
        workers = self.chosen(worker_ids)
        if is_by_worker(weights):
            named = self.chosen(list(weights))
            if worker_ids is not None and workers != named:
                raise ValueError(
                    f"worker_ids={worker_ids} and weights for workers {named} disagree"
                )
            return named
        return workers

    def chosen(self, worker_ids: int | Iterable[int] | None) -> list[int]:
        """The addressed workers, or all if None; `ValueError` for one that does not exist."""
        if worker_ids is None:
            return list(range(len(self.workers)))
        chosen: list[Any] = list(worker_ids) if isinstance(worker_ids, Iterable) else [worker_ids]
        for worker in chosen:
            whole = isinstance(worker, Integral) and not isinstance(worker, bool)
            if not whole or worker not in range(len(self.workers)):
                last = len(self.workers) - 1
                raise ValueError(f"worker_ids: no worker {worker!r}, only 0 to {last}")
        return sorted(set(chosen))

    def summary(self) -> dict[str, Any]:
        """The content of `scheme.stats`."""
        self.collect()
        sent = self.stats.worker_summaries(len(self.workers))
        workers = {
            record.index: record.summary(self.layout.nbytes)
            | sent[record.index]
            | dict(self.channel.about(record.index).statistics)
            for record in self.workers
        }
        return {
            "version": self.version,
            **self.stats.summary(),
            "wire": self.stats.wire_summary(),
            "moved": copy.deepcopy(self.channel.moved),
            "workers": workers,
        }

    def close(self) -> None:
        """End calls of other threads, then disconnect the workers."""
        self._closed = True
        self._bell.ring()
        alone = self._lock.acquire(timeout=_CLOSE_S)
        try:
            self.channel.close()
            self._recent = None
            for record in self.workers:
                record.last = None
        finally:
            if alone:
                self._lock.release()
            if self._service is not None:
                self._service.stop()


class Service:
    """A thread that polls the channel while versions are queued in it and no call waits."""

    def __init__(self, sender: Sender):
        self._sender = sender
        self._bell = Doorbell()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lockstep-send", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._bell.ring()

    def stop(self) -> None:
        self._stopping = True
        self._bell.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while not self._stopping:
                fds, seconds = self._sender.what_to_wait_for()
                wait_for([self._bell.fd, *fds], seconds)
                self._bell.silence()
                self._sender.serve_once()
        except Exception as error:  # noqa: BLE001 - the next call raises it
            self._sender.broken = error


def is_by_worker(weights: Any) -> bool:
    """Whether this is a dict of weights for each worker, rather than weights."""
    if weights is None or is_tensor_collection(weights) or not isinstance(weights, Mapping):
        return False
    return bool(weights) and all(isinstance(key, Integral) for key in weights)


def _distinct(plan: Plan) -> Plan:
    """The same plan, with each set of weights only once."""
    groups: dict[int, tuple[Weights, list[int]]] = {}
    for weights, workers in plan:
        groups.setdefault(id(weights), (weights, []))[1].extend(workers)
    return list(groups.values())
