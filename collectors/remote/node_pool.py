"""The trainer's side of its hosts: opening, asking, watching and replacing them."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import cloudpickle

from collectors.data.batch import Trajectories
from collectors.remote import node as far
from collectors.remote.launcher import CannotReplace, Launcher
from collectors.remote.node import NodeJob, Reply
from collectors.remote.node_handle import Full, NodeHandle
from collectors.remote.packed_batch import MASK
from collectors.weights.publisher import Publisher
from collectors.workers import interrupts
from sync.errors import WorkerDied, WorkerError, WorkerRaised, WorkerTimeout, combine
from sync.remote.engine import PeerDied

_SLICE_S = 1.0


class NodePool:
    """All hosts of one collector. Its methods may be called from several threads."""

    def __init__(
        self,
        launcher: Launcher,
        publisher: Publisher,
        *,
        capacity: int,
        timeout: float,
        start_timeout: float,
    ):
        self.launcher = launcher
        self.publisher = publisher
        self.capacity = capacity
        self.seats: list[NodeHandle] = []
        self.gone: list[NodeHandle] = []  # removed; their frames still count
        self.jobs: dict[int, NodeJob] = {}
        self.arrived: deque[NodeHandle] = deque()  # one entry for each full batch, in their order
        self.news = threading.Condition(threading.RLock())
        self.held = False
        self.holds = 0  # how often it was said whether to hold
        self._token = secrets.token_hex(4)
        self._numbering: dict[int, Trajectories] = {}
        self._timeout, self._start_timeout = timeout, start_timeout
        self._closed = threading.Event()
        self._pulse: threading.Thread | None = None

    # -- opening

    def open(self, jobs: Iterable[NodeJob]) -> list[NodeHandle]:
        """Make these hosts and have each take the newest weights; raise if one of them fails."""
        new = [self._seat(job) for job in jobs]
        with self.news:
            self.seats = sorted([*self.seats, *new], key=lambda seat: seat.host)
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._watch, name="lockstep-pulse", daemon=True)
            self._pulse.start()
        try:
            self._make(new)
        except BaseException:
            with self.news:
                self.seats = [seat for seat in self.seats if seat not in new]
            raise
        return new

    def _seat(self, job: NodeJob) -> NodeHandle:
        self.jobs[job.host] = job
        numbering = self._numbering.setdefault(job.host, Trajectories(job.host, self.capacity))
        numbering.restart()
        return NodeHandle(job.host, numbering, job.seeds.seed, str(job.policy_device or "cpu"))

    def _make(self, seats: list[NodeHandle]) -> None:
        """Open hosts, all at a time, and connect them to the schemes."""
        asked = {}
        for seat in seats:
            seat.name = f"{self._token}-{seat.host}-{seat.generation}"
            seat.where = self.launcher.engine.describe(seat.host)
            asked[seat.host] = self._ask(seat, far.open_node, self._job(seat).pack())
        self._await(seats, asked, "being made", self._start_timeout, "start_timeout")
        for seat in seats:
            hello = asked[seat.host].result().value
            seat.pid = hello["pid"]
            seat.where += f", pid {seat.pid} on {hello['node']}"
            seat.environment = f"{hello['collector']}, {hello['environment']}"
            self._place(seat, hello["num_envs"])
            with self.news:
                seat.open, seat.asked_at, seat.moved_at = True, time.monotonic(), time.monotonic()
        self._connect(seats)

    def _job(self, seat: NodeHandle) -> NodeJob:
        """What its host is told: of the random frames, only those that its lives left."""
        job = self.jobs[seat.host]
        left = max(0, job.options["random_frames"] - seat.before)
        return dataclasses.replace(job, options={**job.options, "random_frames": left})

    def _place(self, seat: NodeHandle, num_envs: int) -> None:
        """Number its environments; a successor with as many has its predecessor's numbers."""
        if seat.first_env >= 0 and seat.num_envs == num_envs:
            return
        others = [s for s in (*self.seats, *self.gone) if s.first_env >= 0]
        seat.num_envs = num_envs
        seat.first_env = max((s.first_env + s.num_envs for s in others), default=0)

    def _connect(self, seats: list[NodeHandle]) -> None:
        """Meet the hosts' receivers; what went wrong there says the host's own error first."""
        if not self.publisher.schemes:
            return
        asked = {seat.host: self._ask(seat, far.connect_node) for seat in seats}
        try:
            for scheme in self.publisher.schemes.values():
                for seat in seats:
                    scheme.describe_worker(seat.host, f"{seat.where}, {seat.environment}")
                if len(seats) == self.capacity:
                    scheme.connect()
                    continue
                for seat in seats:
                    scheme.connect(worker_idx=seat.host)
        except WorkerError:
            self._await(seats, asked, "taking weights", 0.5, "timeout", patient=True)
            raise
        self._await(seats, asked, "taking weights", self._timeout, "timeout")

    # -- asking

    def _ask(self, seat: NodeHandle, function: Callable[..., Reply], *args: Any) -> Future[Any]:
        try:
            return self.launcher.engine.call(seat.host, function, seat.name, *args)
        except PeerDied as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _failure(self, seat: NodeHandle, answer: Future[Any], doing: str) -> WorkerError | None:
        """What an answer says of its host, if that is no good."""
        error = answer.exception()
        if isinstance(error, PeerDied):
            return WorkerDied(seat.host, f"{seat} died while {doing}: {error}")
        if error is not None:
            notes = "\n".join(getattr(error, "__notes__", []))
            text = f"{type(error).__name__}: {error}\n{notes}".rstrip()
            return WorkerRaised(seat.host, f"{seat} could not be asked while {doing}: {text}")
        reply = answer.result()
        if reply.error is None:
            return None
        return WorkerRaised(seat.host, f"{seat} raised {reply.error} while {doing}:\n{reply.value}")

    def _await(
        self,
        seats: Iterable[NodeHandle],
        asked: dict[int, Future[Any]],
        doing: str,
        timeout: float,
        name: str,
        *,
        patient: bool = False,
    ) -> None:
        """Wait for these answers; raise for all hosts that gave none, or a bad one.

        patient: that there is none yet is no failure.
        """
        deadline = time.monotonic() + timeout
        failures: dict[int, WorkerError] = {}
        for seat in seats:
            answer = asked[seat.host]
            failure: WorkerError | None = None
            while not answer.done() and time.monotonic() < deadline:
                if why := self.launcher.engine.gone(seat.host):
                    failure = WorkerDied(seat.host, f"{seat} died while {doing}: {why}")
                    break
                self._raise_if_closed()
                with contextlib.suppress(TimeoutError, Exception):
                    answer.exception(min(0.2, max(0.0, deadline - time.monotonic())))
            if failure is None and answer.done():
                failure = self._failure(seat, answer, doing)
            elif failure is None and not patient:
                text = f"{seat} did not answer within {name}={timeout:g} s while {doing}"
                failure = WorkerTimeout(seat.host, text)
            if failure is not None:
                failures[seat.host] = failure
        if failures:
            raise combine(failures)

    def call(
        self,
        method: str,
        arguments: Callable[[NodeHandle], tuple[Any, ...]] = lambda seat: (),
        seats: Iterable[NodeHandle] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Have hosts do something; their results."""
        chosen = list(self.seats if seats is None else seats)
        asked = {
            seat.host: self._ask(seat, far.control, method, cloudpickle.dumps(arguments(seat)))
            for seat in chosen
        }
        self._await(chosen, asked, f"asked to {method}", timeout or self._timeout, "timeout")
        return [cloudpickle.loads(asked[seat.host].result().value) for seat in chosen]

    def hold(self, still: bool) -> None:
        """Expect no frames, or expect them from now on."""
        with self.news:
            for seat in self.seats:
                seat.moved_at = time.monotonic()
            self.held = still

    # -- batches

    def order(self, seat: NodeHandle) -> None:
        """Ask for one more batch, with weights no older than those published by now."""
        with interrupts.held():  # a batch that is owed, and was not asked for, never comes
            with self.news:
                serial, generation = seat.serial, seat.generation
                if not seat.owed:
                    seat.moved_at = time.monotonic()
                seat.serial += 1
                versions = dict(self.publisher.promised[seat.host])
            answer = self._ask(seat, far.next_batch, serial, versions)
            answer.add_done_callback(lambda done: self._book(seat, generation, serial, done))

    def _book(self, seat: NodeHandle, generation: int, serial: int, answer: Future[Any]) -> None:
        """Take in what a host answered to an order."""
        full, frame_counts = None, None
        if answer.cancelled():
            return
        if answer.exception() is None and answer.result().error is None:
            packed, frame_counts = answer.result().value
            try:
                entries = packed.open()
            except Exception:  # noqa: BLE001 - an engine's thread would tell nobody
                text = (
                    f"{seat} sent a batch that cannot be read:\n{traceback.format_exc().rstrip()}"
                )
                self._note(seat, generation, WorkerError(seat.host, text))
                return
            full = Full(entries, int(entries[MASK].sum()), generation, serial)
        with self.news:
            if generation != seat.generation:
                return  # nobody waits for it any more; it was counted as dropped
            if full is not None and frame_counts is not None:
                seat.hear(generation, frame_counts)
                seat.early[serial] = full
                while seat.due in seat.early:
                    self._take_in(seat, seat.early.pop(seat.due))
                    seat.due += 1
                self.news.notify_all()
                return
            if answer.exception() is None and answer.result().frame_counts is not None:
                seat.hear(generation, answer.result().frame_counts)
            seat.failure = seat.failure or self._failure(seat, answer, "collecting")
            self.news.notify_all()

    def _take_in(self, seat: NodeHandle, full: Full) -> None:
        if (full.generation, full.serial) < seat.fresh_from:
            seat.drop(full)
            return
        seat.full.append(full)
        self.arrived.append(seat)

    def drop_before(self, seat: NodeHandle, first: int) -> None:
        """From now on only this batch of a host's present life counts, and those after it."""
        with interrupts.held(), self.news:
            seat.fresh_from = seat.generation, first
            here = list(seat.full)
            seat.full.clear()
            self.arrived = deque(other for other in self.arrived if other is not seat)
            for full in here:
                self._take_in(seat, full)

    def take(self, seat: NodeHandle) -> Full:
        """The oldest full batch of a host, which is delivered by that."""
        with self.news:
            full = seat.full.popleft()
            seat.delivered += full.frame_count
            if full.generation == seat.generation:
                seat.handed += full.frame_count
            return full

    def take_first(self) -> tuple[NodeHandle, Full]:
        """The batch that came first."""
        with self.news:
            seat = self.arrived.popleft()
            return seat, self.take(seat)

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`; the pulse sees to it that dead and hanging hosts become failures."""
        with self.news:
            while not done() and not self._closed.is_set():
                self.news.wait(_SLICE_S)

    def failed(self) -> list[NodeHandle]:
        return [seat for seat in self.seats if seat.failure is not None]

    def raise_failures(self) -> None:
        """Raise what went wrong, if anything did."""
        if failures := {s.host: s.failure for s in self.failed() if s.failure is not None}:
            raise combine(failures)

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the collector was shut down")

    # -- watching

    def _watch(self) -> None:
        """The pulse: ask every host how it is, so that both sides know the other lives."""
        every = min(1.0, self._timeout / 8)
        last = time.monotonic()
        while not self._closed.wait(every):
            now = time.monotonic()
            late, last = now - last > every + 5.0, now
            for seat in list(self.seats):
                if late:  # this process was stopped for a while: the time is not theirs
                    seat.asked_at = seat.moved_at = now
                try:
                    self._feel(seat, now)
                except Exception:  # noqa: BLE001 - nobody else would hear of it, or feel the others
                    text = f"{seat} cannot be watched:\n{traceback.format_exc().rstrip()}"
                    self._note(seat, seat.generation, WorkerError(seat.host, text))

    def _feel(self, seat: NodeHandle, now: float) -> None:
        with self.news:
            if not seat.open or seat.failure is not None:
                return
            generation, beat = seat.generation, seat.beat
        failure: WorkerError | None = None
        if why := self.launcher.engine.gone(seat.host):
            failure = WorkerDied(seat.host, f"{seat} died: {why}")
        elif beat is None or beat.done():
            if beat is not None:
                failure = self._failure(seat, beat, "watched")
                if failure is None:
                    with self.news:
                        seat.hear(generation, beat.result().value)
            beat = self._ask(seat, far.beat)
            with self.news:
                if generation == seat.generation:
                    seat.asked_at, seat.beat = now, beat
        elif now - seat.asked_at > self._timeout:
            failure = WorkerTimeout(
                seat.host,
                f"{seat} does not answer: for timeout={self._timeout:g} s nothing came from it, so "
                "it is stopped, stuck or cut off",
            )
        if failure is None and seat.owed and not self.held and now - seat.moved_at > self._timeout:
            failure = WorkerTimeout(
                seat.host,
                f"{seat} hangs: it owes a batch and has made no frame for more than "
                f"timeout={self._timeout:g} s{seat.stages()}",
            )
        if failure is not None:
            self._note(seat, generation, failure)

    def _note(self, seat: NodeHandle, generation: int, failure: WorkerError) -> None:
        """A host failed in this life of its seat."""
        with self.news:
            if generation == seat.generation and seat.open:
                seat.failure = seat.failure or failure
            self.news.notify_all()

    def note(
        self,
        error: WorkerError,
        generations: Mapping[int, int],
        lost: tuple[type[WorkerError], ...],
    ) -> dict[int, WorkerError]:
        """Have the hosts fail that this error says are lost, in these lives; what else it says.

        Nothing that it says of an earlier life matters any more.
        """
        others = {}
        for seat in list(self.seats):
            failure = error.failures.get(seat.host)
            if failure is None or seat.generation != generations.get(seat.host, seat.generation):
                continue
            if isinstance(failure, lost):
                self._note(seat, seat.generation, failure)
            if seat.failure is None:
                others[seat.host] = failure
        return others

    def refresh(self) -> None:
        """Have the accounts be of this moment, as far as hosts answer at once.

        One that did not, last time, is not waited for again before it has.
        """
        asked = [
            (seat, seat.generation, self._ask(seat, far.beat))
            for seat in self.seats
            if seat.open and (seat.unanswered is None or seat.unanswered.done())
        ]
        deadline = time.monotonic() + min(0.5, self._timeout)
        for seat, generation, answer in asked:
            with contextlib.suppress(Exception):
                reply = answer.result(max(0.0, deadline - time.monotonic()))
                if reply.error is None:
                    with self.news:
                        seat.hear(generation, reply.value)
            seat.unanswered = answer

    def all_frame_counts(self) -> list[dict[str, Any]]:
        """Where the frames of every host are; of those that were removed too."""
        with self.news:
            return [seat.frame_counts() for seat in (*self.seats, *self.gone)]

    # -- replacing, adding, removing

    def replace(self, seat: NodeHandle) -> None:
        """Put a fresh host in the place of a failed one, which may fail in its turn."""
        self._raise_if_closed()
        job = self.jobs[seat.host]
        # It stands until the fresh host is met. If that is interrupted, whatever is still being
        # made over there must not live on beside the next: as if it had died.
        failure = WorkerDied(seat.host, f"{seat} was not replaced: that was interrupted")
        try:
            if isinstance(seat.failure, WorkerRaised) and not self.launcher.engine.gone(seat.host):
                self._end(seat, 1.0, close_env=True)
            else:
                self.launcher.replace(seat.host)
            there = True
        except CannotReplace as error:
            assert seat.failure is not None
            seat.failure.add_note(str(error))
            raise seat.failure from None
        except Exception as error:  # noqa: BLE001 - whatever an engine raises: it costs a restart
            text = f"{seat} could not be replaced: {type(error).__name__}: {error}"
            failure, there = WorkerDied(seat.host, text), False
        with self.news:
            seat.settle()
            seat.restarts += 1
            seat.failure = failure
        if not there:
            return
        job.seeds = dataclasses.replace(job.seeds, generation=job.seeds.generation + 1)
        try:
            self._make([seat])
        except WorkerError as error:
            seat.failure = error
        else:
            seat.failure = None

    def remove(self, seat: NodeHandle) -> None:
        """Let a host go; what it had made and not handed over is dropped."""
        self._end(seat, 2.0, close_env=True)
        with self.news:
            self.seats.remove(seat)
            seat.settle()
            self.gone.append(seat)
            self.publisher.promised[seat.host] = {}
            self.news.notify_all()

    def _end(self, seat: NodeHandle, timeout: float, *, close_env: bool) -> None:
        with contextlib.suppress(Exception):
            self._ask(seat, far.close_node, timeout, close_env).result(timeout + 1.0)

    def close(self, timeout: float, *, close_env: bool = True) -> None:
        """End all hosts: first by asking, then with the fleet. Bounded; harmless a second time."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self.news:
            self.news.notify_all()
        deadline = time.monotonic() + timeout
        asked = [
            self._ask(seat, far.close_node, max(0.2, timeout / 2), close_env)
            for seat in self.seats
            if seat.name and self.launcher.engine.gone(seat.host) is None
        ]
        for answer in asked:
            with contextlib.suppress(Exception):
                answer.result(max(0.0, deadline - time.monotonic()))
        if self._pulse is not None and self._pulse is not threading.current_thread():
            self._pulse.join(2.0)
