"""All workers of one collector: starts, watches, calls and replaces them.

One thread at a time receives messages, for all threads that wait. A worker that raises, dies or
makes no progress gets a `failure`. The waiting threads return then, and the pool raises the failure
or replaces the worker, as the collector's options say.
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

import numpy as np

from collectors.data.batch import BatchSpan, WorkerBatch
from collectors.options.collector_options import CollectorOptions
from collectors.rollout.environment import Restored
from collectors.rollout.seeds import Seeds
from collectors.schedule.recording import Recorder
from collectors.weights.publisher import Publisher
from collectors.workers.handle import FRAME_COUNTS, CannotReplace, WorkerHandle, failures_of
from collectors.workers.messages import CallResult, Event, Failed, Filled, Hello, Met
from sync import NoWeightSyncScheme
from sync.errors import WorkerDied, WorkerError, WorkerRaised, WorkerTimeout, combine
from sync.local.waiting import SLICE_S, Doorbell, awake_s, wait_for

CLOSE_S = 5.0
KEPT = 1000
_REFRESH_S = 0.5


Group = tuple[WorkerHandle, ...]


def _never() -> bool:
    return False


class WorkerPool:
    """All workers of one collector. Its methods may be called from several threads.

    check_open: raises if the collector has ended.
    shares_batch: whether workers make batches together.
    recorder: what records the schedule, if something does.
    """

    def __init__(
        self,
        publisher: Publisher,
        options: CollectorOptions,
        *,
        check_open: Callable[[], None],
        shares_batch: bool,
    ):
        self.publisher = publisher
        self.options = options
        self._check_open = check_open
        self._shares_batch = shares_batch
        self.recorder: Recorder | None = None
        self.handles: list[WorkerHandle] = []
        self.arrived: deque[Group] = deque()  # one for each batch that a group has finished
        self.made: deque[BatchSpan] = deque(maxlen=KEPT)  # the newest, until somebody reads them
        self.held = False  # whether no frames are expected
        self.changed = False  # whether a worker was replaced since `attend`
        self.preempted = 0  # frames that stopped workers did not make
        self.news = threading.Condition(threading.RLock())
        self._ending = threading.RLock()  # one thread at a time ends a worker
        self._recovering = threading.RLock()  # one thread at a time replaces workers
        self._listener: int | None = None  # the thread that listens
        self._wake = Doorbell()  # for the listener: the pool is closed
        self._numbers = 0
        self.closed = False

    @property
    def num_envs(self) -> int:
        """The environments of all workers."""
        return sum(handle.num_envs for handle in self.handles)

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
        with self.news:
            self.handles = list(handles)
        try:
            self._start_all(handles)
        except BaseException:
            for handle in handles:
                handle.tell_to_stop(0.0, True)
            for handle in handles:
                self._end(handle, 0.0)
            with self.news:
                self.handles = []
            raise

    def _start_all(self, handles: Sequence[WorkerHandle]) -> None:
        """Start these workers, and wait until each has its environments and version 0."""
        for handle in handles:
            with self.news:
                self._raise_if_closed()
                handle.failure, handle.moved_at = None, awake_s()
                handle.start(_spec(handle))
        self._await_all(handles, lambda handle: handle.hello is not None)
        for handle in handles:
            self._number_environments(handle)
        self._connect(handles)
        with self.news:
            for handle in handles:
                handle.last_progress, handle.moved_at = None, awake_s()

    def _connect(self, handles: Sequence[WorkerHandle]) -> None:
        """Meet the workers' receivers; the worker's own error comes before the scheme's."""
        schemes = [
            scheme
            for scheme in self.publisher.schemes.values()
            if not isinstance(scheme, NoWeightSyncScheme)
        ]
        try:
            for scheme in schemes:
                for handle in handles:
                    scheme.describe_worker(handle.index, handle.described)
                if len(handles) == scheme.num_workers:
                    scheme.connect()
                    continue
                for handle in handles:
                    scheme.connect(worker_idx=handle.index)
        except WorkerError:
            self.wait(lambda: bool(failures_of(handles)), 0.5)
            if failures := failures_of(handles):
                raise combine(failures) from None
            raise
        self._await_all(handles, lambda handle: handle.met)

    def _await_all(
        self, handles: Sequence[WorkerHandle], done: Callable[[WorkerHandle], bool]
    ) -> None:
        """Wait until `done` for all; raise for those that failed or did not get there."""
        timeout = self.options.start_timeout
        self.wait(lambda: all(done(h) or h.failure is not None for h in handles), timeout)
        self._raise_if_closed()
        for handle in handles:
            if handle.failure is None and not done(handle):
                activity = handle.activity()
                text = f"{handle} was not ready within start_timeout={timeout:g} s: it {activity}"
                handle.failure = WorkerTimeout(handle.index, text)
        if failures := failures_of(handles):
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
            with self.news:
                self._start_generation(handle)
                handle.failure = WorkerDied(handle.index, text)
            return
        with self.news:  # threads that wait for an answer ask the new generation again
            self._start_generation(handle)
        try:
            self._start_all([handle])
        except WorkerError as error:
            handle.failure = handle.failure or error
        except Exception as error:
            text = f"{handle} could not be replaced: {type(error).__name__}: {error}"
            handle.failure = handle.failure or WorkerDied(handle.index, text)
            raise

    def _number_environments(self, handle: WorkerHandle) -> None:
        """Number the worker's environments after those of the workers before it."""
        assert handle.hello is not None
        count = handle.hello.num_envs
        if handle.first_env >= 0 and count != handle.num_envs:
            text = f"{handle} has {count} environments; the worker that it replaces had "
            raise WorkerRaised(handle.index, f"{text}{handle.num_envs}")
        handle.num_envs = count
        handle.first_env = sum(h.num_envs for h in self.handles if h.index < handle.index)

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

    def listen(self, timeout: float = 0.0, unless: Callable[[], bool] = _never) -> bool:
        """Receive messages of workers, waiting up to `timeout`; not if `unless()` is true."""
        me, ready = threading.get_ident(), set[int]()
        with self.news:
            if unless():
                return True
            if self._listener not in (None, me):
                self.news.wait(max(0.0, timeout))
                return unless()
            self._listener = me
            fds = [self._wake.fd, *(fd for handle in self.handles for fd in handle.fds())]
        try:
            ready.update(wait_for(fds, timeout))  # without the lock: others may ask meanwhile
        finally:
            with self.news:
                self._listener = None
                for handle in self.handles:
                    if handle.must_look() or not ready.isdisjoint(handle.fds()):
                        self._take_in(handle)
                self.news.notify_all()
        with self.news:
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
            batch = handle.finish(event)
            self.made.append(batch.span)
            self._deliver(handle, batch)
        elif isinstance(event, CallResult):
            handle.answers[event.number] = (event.ok, event.value)
        elif isinstance(event, Hello):
            handle.hello, handle.environment = event, event.environment
        elif isinstance(event, Met):
            handle.met = True
        elif isinstance(event, Failed) and handle.failure is None:
            kind = WorkerDied if event.died else WorkerRaised
            handle.failure = kind(handle.index, f"{handle} {event.text}")

    def _deliver(self, handle: WorkerHandle, batch: WorkerBatch) -> None:
        if handle.is_current(batch):
            handle.finished.append(batch)
            self._note_arrivals(handle.group)
            return
        handle.count(batch)
        self.release(batch)

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
        with self.news:  # else another thread may replace the worker meanwhile
            for handle in self.handles:
                if handle.failure is not None or not handle.met:
                    continue
                progress = handle.progress()
                rests = not handle.is_busy() and (self.held or not handle.owed)
                if progress != handle.last_progress or rests:
                    handle.last_progress, handle.moved_at = progress, now
                elif now - handle.moved_at > (limit := handle.patience(self.options.timeout)):
                    text = f"{handle} {handle.stuck(limit)}"
                    handle.failure = WorkerTimeout(handle.index, text)

    def look(self) -> None:
        """Notice workers that failed or hang, without waiting."""
        self.listen()
        self._watch()

    # -- failures

    def failed(self) -> list[WorkerHandle]:
        return [handle for handle in self.handles if handle.failure is not None]

    def generations(self) -> dict[int, int]:
        """The generation of every worker that is not just being replaced."""
        with self.news:
            return {handle.index: handle.generation for handle in self.handles if handle.met}

    def _note(
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
        with self.news:
            for handle in self.handles:
                failure = error.failures.get(handle.index)
                if failure is None or handle.generation != generations.get(handle.index):
                    continue
                if isinstance(failure, lost):
                    handle.failure = handle.failure or failure
                if handle.failure is None:
                    others[handle.index] = failure
        return others

    def attend(self) -> None:
        """Replace failed workers if `on_worker_failure` says so; else raise their failures."""
        self._check_open()
        self.changed = False
        self._see_to_failures()

    def _see_to_failures(self) -> None:
        with self._recovering:
            while failed := self.failed():
                if self.options.on_worker_failure == "raise":
                    self._record_failure(failed[0])
                    raise combine(failures_of(failed))
                failure = failed[0].failure
                assert failure is not None
                restarts = sum(handle.restarts for handle in self.handles)
                if restarts >= self.options.max_restarts:
                    self._record_failure(failed[0])
                    if not getattr(failure, "__notes__", None):
                        failure.add_note(
                            f"all max_restarts={self.options.max_restarts} are used up"
                        )
                    raise failure
                self.replace(failed[0])

    def _record_failure(self, handle: WorkerHandle) -> None:
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            so_far = handle.stamps_so_far(min(handle.ordered)) if handle.ordered else None
            recorder.note_failure(handle.index, handle.generation, handle.finished, so_far)

    def _recover(
        self, error: WorkerError, generations: Mapping[int, int], *lost: type[WorkerError]
    ) -> None:
        """Replace the workers that failed in these generations; raise other failures.

        lost: the kinds of errors after which a worker counts as failed.
        """
        self.wait(lambda: bool(self.failed()), 0.2)  # prefer the worker's own error
        with self._recovering:
            others = self._note(error, generations, lost)
            self._see_to_failures()
        if others:
            raise combine(others)

    # -- batches

    @property
    def version(self) -> int:
        """The version last published."""
        return self.publisher.version

    def order(self, handle: WorkerHandle) -> None:
        """Request one more batch, with weights no older than those published by now."""
        with self.news:
            if not handle.owed:
                handle.moved_at = awake_s()  # until now it owed nothing
            handle.serial += 1
            handle.ordered[handle.serial] = self.publisher.version
            versions = dict(self.publisher.promised[handle.index])
            self._send(handle, lambda: handle.order(handle.serial, versions))

    def versions_under_way(self) -> list[int]:
        """The version at the order of every batch that was not taken yet, the oldest first."""
        with self.news:
            groups = dict.fromkeys(handle.group for handle in self.handles)
            return sorted(version for group in groups for version in _versions(group))

    def take(self, handle: WorkerHandle) -> WorkerBatch:
        """The oldest finished batch of a worker, which counts as delivered to the learner now."""
        with self.news:
            batch = handle.finished.popleft()
            batch.newest = self.publisher.newest_at(batch.ended_ns)
            self._note_arrivals(handle.group)
            handle.count(batch)
            if batch.generation != handle.numbered:
                handle.trajectories.restart()
                handle.numbered = batch.generation
        if self.recorder is not None:
            try:
                self.recorder.note(batch)
            except BaseException:  # the disk is full, say: the recording ends with the last batch
                self.recorder = None
                self.discard(batch)
                self.release(batch)
                raise
        return batch

    def discard(self, batch: WorkerBatch) -> None:
        """The learner cannot use the batch that it took: its frames count as dropped."""
        with self.news:
            self.handles[batch.worker].count_as_dropped(batch)

    def release(self, batch: WorkerBatch) -> None:
        """The batch's memory can be written again."""
        with self.news:
            handle = self.handles[batch.worker]
            if batch.generation == handle.generation:
                handle.release(batch.block)

    def cut(self, handle: WorkerHandle) -> None:
        """Have the worker hand over its current batch as it is."""
        handle.cut(handle.serial)
        handle.cut_serial = handle.serial

    def drop_before(self, handle: WorkerHandle, serial: int) -> None:
        """From now on only this batch of the worker's counts, and those after it."""
        with self.news:
            handle.fresh_from = handle.generation, serial
            waiting, handle.finished = list(handle.finished), deque()
            self._note_arrivals(handle.group)
            for batch in waiting:
                self._deliver(handle, batch)

    def hold(self, still: bool) -> None:
        """Expect no frames, or expect them from now on."""
        with self.news:
            for handle in self.handles:
                handle.moved_at = awake_s()
            self.held = still

    def counters(self) -> dict[str, Any]:
        """Where all frames are, in all and by worker, now or as they were reported last."""
        handles = list(self.handles)
        for handle in handles:
            handle.refresh()
        self.wait(
            lambda: all(handle.is_fresh() for handle in handles),
            min(_REFRESH_S, self.options.timeout),
        )
        self.listen()
        with self.news:
            workers = [handle.frame_counts() for handle in self.handles]
        totals = {name: sum(worker[name] for worker in workers) for name in FRAME_COUNTS}
        return {**totals, "preempted": self.preempted, "workers": workers}

    def stages(self) -> list[str]:
        """What each worker does, if it reports that."""
        return [str(handle.reported_counts().get("stage", "")) for handle in self.handles]

    # -- weights

    def publish(self, by_model: Mapping[str, Any], worker_ids: Any) -> None:
        """Publish the next version of these models to workers."""
        generations = self.generations()
        # An episode may last long, or until the next batch is ordered. A worker that is paused
        # during a batch applies weights after it. Do not wait for either.
        at = self.options.apply_at
        wait = False if at == "episode" or (at == "batch" and self.held) else None
        try:
            self.publisher.publish(by_model, worker_ids, wait=wait)
        except WorkerError as error:  # a replacement gets the newest weights when it starts
            if self.options.on_worker_failure == "restart":
                self._fail_hanging(error, generations)
            self._recover(error, generations, WorkerDied)

    def _fail_hanging(self, error: WorkerError, generations: Mapping[int, int]) -> None:
        """Of the workers that did not answer in time, those have failed that do nothing at all.

        `_watch` does not see it if they owe no batch. One that is busy may still answer.
        """

        def state(handle: WorkerHandle) -> tuple[int, Any]:
            return handle.generation, handle.progress()

        late = {
            handle: state(handle)
            for handle in self.handles
            if handle.generation == generations.get(handle.index)
            and isinstance(error.failures.get(handle.index), WorkerTimeout)
        }

        def are_busy() -> bool:
            return all(h.failure is not None or state(h) != late[h] for h in late)

        if late and not self.wait(are_busy, self.options.timeout):
            with self.news:
                for handle, before in late.items():
                    if state(handle) == before:
                        handle.failure = handle.failure or error.failures[handle.index]

    # -- asking

    def ask(
        self,
        method: str,
        arguments: Callable[[WorkerHandle], tuple[Any, ...]] = lambda handle: (),
        handles: Sequence[WorkerHandle] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a method of workers between two steps; the results, in worker order.

        Workers that fail are replaced and called again.
        """
        self._check_open()
        restarts = self.options.on_worker_failure == "restart"
        lost = (WorkerDied, WorkerTimeout) if restarts else ()
        while True:
            generations = self.generations()
            try:
                return self.call(method, arguments, handles, timeout)
            except WorkerError as error:
                if self.closed:
                    raise
                self._recover(error, generations, *lost)

    def call(
        self,
        method: str,
        arguments: Callable[[WorkerHandle], tuple[Any, ...]] = lambda handle: (),
        handles: Iterable[WorkerHandle] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Have workers do something between two steps; their results."""
        limit = self.options.timeout if timeout is None else timeout
        asked = []
        with self.news:
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
        with self.news:
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

    # -- control

    def attributes(self, name: str) -> list[Any]:
        """This attribute of each worker's environments, in worker order."""
        return self.ask("getattr_env", lambda handle: (name,))

    def reseed(self, seeds: Seeds) -> None:
        """Seed all workers, and start new episodes."""
        self._check_not_recording("set_seed")
        for handle in self.handles:
            handle.spec.seeds = dataclasses.replace(
                handle.spec.seeds, seed=seeds.seed, static=seeds.static
            )
        self.ask("set_seed", lambda handle: (handle.spec.seeds,))

    def reset(self, which: np.ndarray[Any, Any] | None) -> None:
        """Start new episodes in all environments, or in those of a mask over all workers."""
        self._check_not_recording("reset")
        if which is None:
            self.ask("reset", lambda handle: (None,))
            return
        of = {h: which[h.first_env : h.first_env + h.num_envs] for h in self.handles}
        self.ask("reset", lambda handle: (of[handle],), [h for h in of if of[h].any()])

    def pause(self, still: bool) -> None:
        """Have workers rest, or go on."""
        self.hold(True)
        try:
            self.ask("hold", lambda handle: (still,))
        finally:
            self.hold(still)

    def _check_not_recording(self, call: str) -> None:
        """Refuse a call that changes what workers do, and that a recording does not have."""
        if self.recorder is not None:
            raise RuntimeError(
                f"{call}(): a recording of a schedule has no such call, so its replay would "
                f"differ: leave record_schedule={self.options.record_schedule!r} out"
            )

    # -- saving

    def states(self) -> list[dict[str, Any]]:
        """The state of each worker, and the numbering of its trajectories."""
        states: list[dict[str, Any]] = self.ask("state_dict")
        for handle, state in zip(self.handles, states, strict=True):
            state["trajectories"] = handle.trajectories.state_dict()
        return states

    def load_states(self, states: list[dict[str, Any]], base: int) -> list[Restored]:
        """Restore each worker's state, with versions counted from `base`; whether each one was
        restored to the bit."""
        # Asynchronous workers were ahead of what was delivered. Those frames are gone, and so are
        # the frames that they collected here before.
        if self.recorder is not None:
            self.recorder.note_resumed()
        of = dict(zip(self.handles, states, strict=True))
        timeout, held = self.options.timeout + self.options.resume_timeout, self.held
        self.hold(True)  # no frames are expected of a worker that replays episodes
        try:
            answers = self.ask(
                "load_state_dict",
                lambda handle: (of[handle], base, self._shares_batch),
                timeout=timeout,
            )
        finally:
            self.hold(held)
        for (handle, state), (restored, first) in zip(of.items(), answers, strict=True):
            self.drop_before(handle, first)
            handle.trajectories.load_state_dict(state["trajectories"], under_way=restored.under_way)
            handle.numbered = handle.generation
            spec = handle.spec
            spec.seeds = Seeds(**state["seeds"])
            spec.options["random_frames"] = handle.collected + state.get("random_frames", 0)
        return [restored for restored, _ in answers]

    # -- ending

    def close(self, timeout: float = CLOSE_S, *, close_env: bool = True) -> None:
        """End all workers: first by asking, then by force. Bounded; harmless a second time."""
        deadline = time.monotonic() + timeout
        self.closed = True
        self._wake.ring()
        with self.news:
            self.news.notify_all()
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
        with self.news:
            for event in handle.receive():
                self._handle(handle, event)


def _versions(group: Group) -> list[int]:
    """The version at the order of each batch of a group that was not taken, the oldest first."""
    of_each = [
        [*(batch.version for batch in handle.finished), *handle.ordered.values()]
        for handle in group
    ]
    return [min(of_one) for of_one in zip_longest(*of_each, fillvalue=sys.maxsize)]


def _spec(handle: WorkerHandle) -> Any:
    """What the worker is told: of the random frames, those that its predecessors left."""
    spec = handle.spec
    left = max(0, spec.options["random_frames"] - handle.earlier)
    return dataclasses.replace(spec, options={**spec.options, "random_frames": left})
