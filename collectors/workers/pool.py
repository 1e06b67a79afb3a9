"""All workers of one collector: starts, watches, calls and replaces them.

One thread at a time receives messages, for all threads that wait. A worker that raises, dies or
makes no progress gets a `failure`. The waiting threads return then, and the collector raises the
failure or replaces the worker.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from collectors.data.batch import Filled
from collectors.weights.publisher import Publisher
from collectors.workers.handle import (
    Answer,
    CannotReplace,
    Event,
    Failed,
    Hello,
    Met,
    WorkerHandle,
)
from sync import NoWeightSyncScheme
from sync.errors import WorkerDied, WorkerError, WorkerRaised, WorkerTimeout, combine
from sync.local.waiting import SLICE_S, Doorbell, awake_s, wait_for

CLOSE_S = 5.0
KEPT = 1000
_REFRESH_S = 0.5


Group = tuple[WorkerHandle, ...]


class WorkerPool:
    """All workers of one collector. Its methods may be called from several threads."""

    def __init__(self, publisher: Publisher, *, timeout: float, start_timeout: float):
        self.publisher = publisher
        self.handles: list[WorkerHandle] = []
        self.arrived: deque[Group] = deque()  # one for each batch that a group has finished
        self.made: deque[Filled] = deque(maxlen=KEPT)  # the newest, until somebody reads them
        self.held = False  # whether no frames are expected
        self.changed = False  # whether a worker was replaced since `attend`
        self._timeout, self._start_timeout = timeout, start_timeout
        self._news = threading.Condition(threading.RLock())
        self._ending = threading.RLock()  # one thread at a time ends a worker
        self._listener: int | None = None  # the thread that listens
        self._wake = Doorbell()  # for the listener: the pool is closed
        self._numbers = 0
        self.closed = False

    # -- starting

    def start(self, groups: Iterable[Group]) -> None:
        """Start these workers, and wait until each has its environments and version 0.

        groups: workers that make batches together.
        """
        groups = list(groups)
        handles = [handle for group in groups for handle in group]
        for group in groups:
            for handle in group:
                handle.group = group
        with self._news:
            self.handles = list(handles)
        try:
            self._start(handles)
        except BaseException:
            for handle in handles:
                handle.tell_to_stop(0.0, True)
            for handle in handles:
                self._end(handle, 0.0)
            with self._news:
                self.handles = []
            raise

    def _start(self, handles: Sequence[WorkerHandle]) -> None:
        for handle in handles:
            with self._news:
                self._raise_if_closed()
                handle.failure, handle.moved_at = None, awake_s()
                handle.start(self._spec(handle))
        self._await(handles, lambda handle: handle.hello is not None)
        for handle in handles:
            self._number_environments(handle)
        self._connect(handles)
        with self._news:
            for handle in handles:
                handle.last_progress, handle.moved_at = None, awake_s()

    def _spec(self, handle: WorkerHandle) -> Any:
        """What the worker is told: of the random frames, those that its predecessors left."""
        spec = handle.spec
        left = max(0, spec.options["random_frames"] - handle.earlier)
        return dataclasses.replace(spec, options={**spec.options, "random_frames": left})

    def _connect(self, handles: Sequence[WorkerHandle]) -> None:
        """Meet the workers' receivers; the worker's own error comes before the scheme's."""
        receivers = sorted({one.receiver for one in handles if not one.is_connected()})
        for handle in handles:
            handle.meet()
        schemes = [
            scheme
            for scheme in self.publisher.schemes.values()
            if not isinstance(scheme, NoWeightSyncScheme)
        ]
        try:
            for scheme in schemes:
                for handle in handles:
                    scheme.describe_worker(handle.receiver, handle.described)
                if len(receivers) == scheme.num_workers:
                    scheme.connect()
                    continue
                for receiver in receivers:
                    scheme.connect(worker_idx=receiver)
            for handle in handles:
                handle.note_connected()
        except WorkerError:
            self.wait(lambda: bool(self._failures(handles)), 0.5)
            if failures := self._failures(handles):
                raise combine(failures) from None
            raise
        self._await(handles, lambda handle: handle.met)

    def _await(self, handles: Sequence[WorkerHandle], done: Callable[[WorkerHandle], bool]) -> None:
        """Wait until `done` for all; raise for those that failed or did not get there."""
        timeout = self._start_timeout
        self.wait(lambda: all(done(h) or h.failure is not None for h in handles), timeout)
        self._raise_if_closed()
        for handle in handles:
            if handle.failure is None and not done(handle):
                activity = handle.activity()
                text = f"{handle} was not ready within start_timeout={timeout:g} s: it {activity}"
                handle.failure = WorkerTimeout(handle.index, text)
        if failures := self._failures(handles):
            raise combine(failures)

    def replace(self, handle: WorkerHandle) -> None:
        """Start a replacement for a failed worker. It may fail as well."""
        self._raise_if_closed()
        try:
            with self._ending:
                handle.make_way()
                self._receive_the_rest(handle)
        except CannotReplace as error:
            assert handle.failure is not None
            handle.failure.add_note(str(error))
            raise handle.failure from None
        except Exception as error:  # noqa: BLE001 - whatever an engine raises: it costs a restart
            text = f"{handle} could not be replaced: {type(error).__name__}: {error}"
            with self._news:
                self._start_generation(handle)
                handle.failure = WorkerDied(handle.index, text)
            return
        with self._news:  # threads that wait for an answer ask the new generation again
            self._start_generation(handle)
        try:
            self._start([handle])
        except WorkerError as error:
            handle.failure = handle.failure or error

    def _start_generation(self, handle: WorkerHandle) -> None:
        handle.start_generation()
        handle.restarts += 1
        self.changed = True

    def _raise_if_closed(self) -> None:
        if self.closed:
            raise RuntimeError("the collector was shut down")

    # -- listening

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Listen until `done()`, or for `timeout` seconds; whether it is done.

        Workers that make no progress meanwhile count as failed.
        """
        deadline = None if timeout is None else awake_s() + timeout
        while True:
            remaining = SLICE_S if deadline is None else deadline - awake_s()
            if self.listen(min(remaining, SLICE_S), unless=done):
                return True
            if remaining <= 0 or self.closed:
                return False
            self._watch()

    def await_batch(self, done: Callable[[], bool]) -> None:
        """Listen until `done()`, or until a worker has failed or was replaced since `attend`."""
        self.wait(lambda: bool(self.failed() or self.changed or done()))

    def listen(self, timeout: float = 0.0, unless: Callable[[], bool] = bool) -> bool:
        """Receive messages of workers, waiting up to `timeout`; not if `unless()` is true."""
        me, ready = threading.get_ident(), set[int]()
        with self._news:
            if unless():
                return True
            if self._listener not in (None, me):
                self._news.wait(max(0.0, timeout))
                return unless()
            self._listener = me
            fds = [self._wake.fd, *(fd for handle in self.handles for fd in handle.fds())]
        try:
            ready.update(wait_for(fds, timeout))  # without the lock: others may ask meanwhile
        finally:
            with self._news:
                self._listener = None
                for handle in self.handles:
                    if handle.must_look() or not ready.isdisjoint(handle.fds()):
                        self._take_in(handle)
                self._news.notify_all()
        with self._news:
            return unless()

    def _take_in(self, handle: WorkerHandle) -> None:
        try:
            how = handle.gone()  # before what it said last is read
            for event in handle.receive():
                self._handle(handle, event)
        except Exception:  # noqa: BLE001 - an engine may raise anything
            text = f"{handle} cannot be watched:\n{traceback.format_exc().rstrip()}"
            handle.failure = handle.failure or WorkerError(handle.index, text)
            return
        if how is not None and handle.failure is None:
            handle.failure = WorkerDied(handle.index, f"{handle} died{how}")

    def _handle(self, handle: WorkerHandle, event: Event) -> None:
        if isinstance(event, Filled):
            event.worker, event.first_env = handle.index, handle.first_env
            event.generation, event.trajectories = handle.generation, handle.trajectories
            event.version = handle.ordered.pop(event.serial)
            event.ended_ns = event.ended_ns or time.perf_counter_ns()
            self.made.append(dataclasses.replace(event, content=None))
            self._deliver(handle, event)
        elif isinstance(event, Answer):
            handle.answers[event.number] = (event.ok, event.value)
        elif isinstance(event, Hello):
            handle.hello, handle.environment = event, event.environment
        elif isinstance(event, Met):
            handle.met = True
        elif isinstance(event, Failed) and handle.failure is None:
            kind = WorkerDied if event.died else WorkerRaised
            handle.failure = kind(handle.index, f"{handle} {event.text}")

    def _number_environments(self, handle: WorkerHandle) -> None:
        """Number the worker's environments after those of the workers before it."""
        assert handle.hello is not None
        count = handle.hello.num_envs
        if handle.first_env >= 0 and count != handle.num_envs:
            text = f"{handle} has {count} environments; the worker that it replaces had "
            raise WorkerRaised(handle.index, f"{text}{handle.num_envs}")
        handle.num_envs = count
        handle.first_env = sum(h.num_envs for h in self.handles if h.index < handle.index)

    def _deliver(self, handle: WorkerHandle, filled: Filled) -> None:
        if handle.is_current(filled):
            handle.finished.append(filled)
            self._note_arrivals(handle.group)
            return
        handle.count(filled)
        self.release(filled)

    def _note_arrivals(self, group: Group) -> None:
        """Have `arrived` say how many batches the group has finished."""
        finished = min(len(handle.finished) for handle in group)
        arrived = self.arrived.count(group)
        self.arrived.extend([group] * (finished - arrived))
        for _ in range(arrived - finished):
            self.arrived.remove(group)

    def _watch(self) -> None:
        """Mark workers that owe a batch but make no progress as failed."""
        now = awake_s()
        for handle in self.handles:
            if handle.failure is not None or not handle.met:
                continue
            progress = handle.progress()
            rests = not handle.is_busy() and (self.held or not handle.owed)
            if progress != handle.last_progress or rests:
                handle.last_progress, handle.moved_at = progress, now
            elif now - handle.moved_at > (limit := handle.patience(self._timeout)):
                text = f"{handle} {handle.stuck(limit)}"
                handle.failure = WorkerTimeout(handle.index, text)

    def look(self) -> None:
        """Notice workers that failed or hang, without waiting."""
        self.listen()
        self._watch()

    # -- failures

    def failed(self) -> list[WorkerHandle]:
        return [handle for handle in self.handles if handle.failure is not None]

    @staticmethod
    def _failures(handles: Iterable[WorkerHandle]) -> dict[int, WorkerError]:
        return {handle.index: handle.failure for handle in handles if handle.failure is not None}

    def raise_failures(self) -> None:
        """Raise the failures of workers, if there are any."""
        if failures := self._failures(self.handles):
            raise combine(failures)

    def generations(self) -> dict[int, int]:
        """The generation of every worker that is not just being replaced."""
        with self._news:
            return {handle.index: handle.generation for handle in self.handles if handle.met}

    def note(
        self,
        error: WorkerError,
        generations: Mapping[int, int],
        lost: tuple[type[WorkerError], ...],
    ) -> dict[int, WorkerError]:
        """Mark workers that this error names as failed; return the failures that remain.

        generations: of the workers when they were asked; failures of predecessors are ignored.
        lost: the kinds of error after which a worker counts as failed.
        """
        others = {}
        with self._news:
            for handle in self.handles:
                failure = error.failures.get(handle.receiver)
                if failure is None or handle.generation != generations.get(handle.index):
                    continue
                if isinstance(failure, lost):
                    handle.failure = handle.failure or failure
                if handle.failure is None:
                    others[handle.index] = failure
        return others

    # -- batches

    @property
    def version(self) -> int:
        """The version last published."""
        return self.publisher.version

    def order(self, handle: WorkerHandle) -> None:
        """Request one more batch, with weights no older than those published by now."""
        with self._news:
            if not handle.owed:
                handle.moved_at = awake_s()  # until now it owed nothing
            handle.serial += 1
            handle.ordered[handle.serial] = self.publisher.version
            versions = dict(self.publisher.promised[handle.receiver])
            self._send(handle, lambda: handle.order(handle.serial, versions))

    def versions_under_way(self) -> list[int]:
        """The version at the order of every batch that was not taken yet, the oldest first."""
        with self._news:
            groups = dict.fromkeys(handle.group for handle in self.handles)
            return sorted(version for group in groups for version in _versions(group))

    def take(self, handle: WorkerHandle) -> Filled:
        """The oldest finished batch of a worker, which counts as delivered to the learner now."""
        with self._news:
            filled = handle.finished.popleft()
            filled.newest = self.publisher.newest_at(filled.ended_ns)
            self._note_arrivals(handle.group)
            handle.count(filled)
            if filled.generation != handle.numbered:
                handle.trajectories.restart()
                handle.numbered = filled.generation
            return filled

    def discard(self, filled: Filled) -> None:
        """The learner cannot use the batch that it took: its frames count as dropped."""
        with self._news:
            self.handles[filled.worker].count_as_dropped(filled)

    def release(self, filled: Filled) -> None:
        """The batch's memory can be written again."""
        with self._news:
            handle = self.handles[filled.worker]
            if filled.generation == handle.generation:
                handle.release(filled)

    def cut(self, handle: WorkerHandle) -> None:
        """Have the worker hand over its current batch as it is."""
        handle.cut(handle.serial)
        handle.cut_serial = handle.serial

    def drop_before(self, handle: WorkerHandle, serial: int) -> None:
        """From now on only this batch of the worker's counts, and those after it."""
        with self._news:
            handle.fresh_from = handle.generation, serial
            waiting, handle.finished = list(handle.finished), deque()
            self._note_arrivals(handle.group)
            for filled in waiting:
                self._deliver(handle, filled)

    def hold(self, still: bool) -> None:
        """Expect no frames, or expect them from now on."""
        with self._news:
            for handle in self.handles:
                handle.moved_at = awake_s()
            self.held = still

    def frame_counts(self) -> list[dict[str, Any]]:
        """Where the frames of every worker are, as of this moment where they can say so at once."""
        handles = list(self.handles)
        for handle in handles:
            handle.refresh()
        self.wait(
            lambda: all(handle.is_fresh() for handle in handles),
            min(_REFRESH_S, self._timeout),
        )
        self.listen()
        with self._news:
            return [handle.frame_counts() for handle in self.handles]

    # -- asking

    def call(
        self,
        method: str,
        arguments: Callable[[WorkerHandle], tuple[Any, ...]] = lambda handle: (),
        handles: Iterable[WorkerHandle] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Have workers do something between two steps; their results."""
        limit = self._timeout if timeout is None else timeout
        asked = []
        with self._news:
            self._raise_if_closed()
            for handle in self.handles if handles is None else handles:
                self._numbers += 1
                number, args = self._numbers, arguments(handle)
                asked.append((handle, handle.generation, number))
                self._send(handle, lambda: handle.ask(number, method, args))  # noqa: B023

        def is_settled(handle: WorkerHandle, generation: int, number: int) -> bool:
            answered = number in handle.answers
            return answered or handle.failure is not None or handle.generation != generation

        self.wait(lambda: all(is_settled(*one) for one in asked), limit)
        answers = []
        failures: dict[int, WorkerError] = {}
        with self._news:
            self._raise_if_closed()
            for handle, generation, number in asked:
                if number in handle.answers:
                    answers.append((handle, *handle.answers.pop(number)))
                elif handle.generation != generation:
                    text = f"{handle} was replaced before it answered {method!r}"
                    failures[handle.index] = WorkerDied(handle.index, text)
                elif handle.failure is not None:
                    failures[handle.index] = handle.failure
                else:
                    text = f"{handle} did not answer {method!r} within timeout={limit:g} s"
                    activity = handle.activity()
                    failures[handle.index] = WorkerTimeout(handle.index, f"{text}: it {activity}")
        if failures:
            raise combine(failures)
        for handle, ok, value in answers:
            if not ok:
                raise WorkerRaised(handle.index, f"{handle} failed in {method}: {value}")
        return [pickle.loads(value) for _, _, value in answers]

    def _send(self, handle: WorkerHandle, send: Callable[[], None]) -> None:
        """Send a message. If the worker is gone, the wait for its answer notices that."""
        try:
            send()
        except ConnectionError:
            return
        except TimeoutError as error:  # half of it is sent: the connection is of no more use
            text = f"{handle} reads no messages; it {handle.activity()}: {error}"
            handle.failure = handle.failure or WorkerTimeout(handle.index, text)

    # -- ending

    def close(self, timeout: float = CLOSE_S, *, close_env: bool = True) -> None:
        """End all workers: first by asking, then by force. Bounded; harmless a second time."""
        deadline = time.monotonic() + timeout
        self.closed = True
        self._wake.ring()
        with self._news:
            self._news.notify_all()
        try:
            for handle in self.handles:
                handle.tell_to_stop(timeout / 2, close_env)
            for handle in self.handles:
                self._end(handle, max(0.0, deadline - time.monotonic()))
        except BaseException:  # an interrupt: wait no longer
            for handle in self.handles:
                self._end(handle, 0.0)
            raise

    def _end(self, handle: WorkerHandle, timeout: float) -> None:
        with self._ending:
            handle.end(timeout)
            self._receive_the_rest(handle)
            if self.closed:
                handle.close()

    def _receive_the_rest(self, handle: WorkerHandle) -> None:
        with self._news:
            for event in handle.receive():
                self._handle(handle, event)


def _versions(group: Group) -> list[int]:
    """The version at the order of each batch of a group that was not taken, the oldest first."""
    of_each = [
        [*(filled.version for filled in handle.finished), *handle.ordered.values()]
        for handle in group
    ]
    return [min(of_one) for of_one in zip_longest(*of_each, fillvalue=sys.maxsize)]
