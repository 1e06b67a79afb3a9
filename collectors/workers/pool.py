"""The trainer's side of its workers: starting, listening, calling, watching, replacing them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from collectors.data.batch import Trajectories
from collectors.rollout.frame_block import FrameBlock, FrameLayout
from collectors.weights.publisher import Publisher
from collectors.workers import interrupts
from collectors.workers.handle import Full, WorkerHandle
from collectors.workers.pipe import Pipe, PipeClosed
from collectors.workers.process import Job, Setup, main
from collectors.workers.shared_counters import (
    COMPILING,
    FRAMES,
    IDLE,
    MESSAGES,
    REPLAYING,
    STAGE,
    STARTING,
    STEPS,
    SharedCounters,
)
from collectors.workers.startup import interrupts_held
from sync import NoWeightSyncScheme
from sync.errors import WorkerDied, WorkerError, WorkerRaised, WorkerTimeout, combine
from sync.local.memory import AnonymousMemory
from sync.local.process import Watch, must_look
from sync.local.waiting import SLICE_S, awake_s, wait_for

KILL_AFTER_S = 5.0


class WorkerPool:
    """All workers of one collector. Its methods may be called from several threads."""

    def __init__(
        self,
        jobs: list[Job],
        publisher: Publisher,
        *,
        ctx: Any,
        timeout: float,
        start_timeout: float,
        resume_timeout: float,
    ):
        self.members = [
            WorkerHandle(
                i,
                Trajectories(i, len(jobs)),
                seed=job.seeds.seed,
                factory=_name(job.create_env_fn),
                device=str(job.policy_device or "cpu"),
            )
            for i, job in enumerate(jobs)
        ]
        self.publisher = publisher
        self.jobs = jobs
        self.arrived: deque[WorkerHandle] = deque()  # one entry for each full block, in their order
        self._ctx = ctx
        self._timeout = timeout
        self._start_timeout = start_timeout
        # How long a worker may be at what takes longer than a step, and what the limit is called.
        self._limits = {
            COMPILING: (start_timeout, "start_timeout"),
            REPLAYING: (timeout + resume_timeout, "timeout + resume_timeout"),
        }
        self._news = threading.Condition(threading.RLock())
        self._ending = threading.RLock()  # one thread at a time ends a worker
        self._listener: int | None = None  # the thread that listens
        self._numbers = 0
        self._closed = False
        self.held = False  # whether all workers were told to hold still

    # -- starting

    def start(self) -> None:
        """Start all workers and wait until each has its environments and version 0."""
        try:
            memory: AnonymousMemory | None = None
            for member, job in zip(self.members, self.jobs, strict=True):
                memory = job.pack()
                self._launch(member, memory)
            self._await_greetings(self.members)
            self._hand_over(None)
            self._compile(self.members)
        except BaseException:
            self.close(timeout=1.0)
            raise

    def _launch(self, member: WorkerHandle, job: AnonymousMemory) -> None:
        with interrupts_held(), self._news:
            self._raise_if_closed()
            near, far = Pipe.pair()
            setup = Setup(
                worker_idx=member.worker,
                trainer_pid=os.getpid(),
                pipe=far,
                counters=SharedCounters(),
                job=job,
                schemes=self.publisher.schemes,
                version_base=self.publisher.base,
            )
            name = f"lockstep-worker-{member.worker}"
            process = self._ctx.Process(target=main, args=(setup,), name=name, daemon=False)
            member.pipe, member.counters, member.job = near, setup.counters, job
            member.greeted, member.failure, member.ordered = False, None, 0
            member.blocks = []
            try:
                process.start()
            except (EOFError, ConnectionError) as error:
                raise RuntimeError(
                    f"{member} could not be started: the fork server, which starts workers, "
                    f"died at it ({type(error).__name__}: {error}); what it wrote says why"
                ) from error
            member.process = process
            member.watch = Watch(process.pid)
            member.seen_at = awake_s()
            far.close()

    def _await_greetings(self, members: list[WorkerHandle]) -> None:
        def done() -> bool:
            return all(m.greeted or m.failure is not None for m in members)

        self.wait(done, self._start_timeout, watch_hanging=False)
        self._raise_if_closed()
        for member in members:
            if member.failure is None and not member.greeted:
                member.failure = WorkerTimeout(
                    member.worker,
                    f"{member} was not ready within start_timeout={self._start_timeout:g} s: "
                    f"it is {member.counters.stage}",
                )
        failures = {m.worker: m.failure for m in members if m.failure is not None}
        if failures:
            raise combine(failures)
        for member in members:
            for scheme in self.publisher.schemes.values():
                if not isinstance(scheme, NoWeightSyncScheme):
                    scheme.describe_worker(member.worker, member.environment)

    def _hand_over(self, worker: int | None) -> None:
        """Meet the workers' receivers; what went wrong there says the worker's own error first."""
        try:
            for scheme in self.publisher.schemes.values():
                if worker is None:
                    scheme.connect()
                else:
                    scheme.connect(worker_idx=worker)
        except WorkerError:
            self.listen(0.2)
            self.raise_failures()
            raise

    def _compile(self, members: list[WorkerHandle]) -> None:
        """Have compiled policies called for the first time, which may take as long as a start."""
        if self.jobs[0].options["compile_policy"]:
            self.call("compile", members=members, timeout=self._start_timeout)

    def replace(self, member: WorkerHandle) -> None:
        """Put a fresh worker in the place of a failed one, which may fail in its turn."""
        self._end(member, timeout=0.0)
        job = self.jobs[member.worker]
        job.seeds = dataclasses.replace(job.seeds, generation=job.seeds.generation + 1)
        left = max(0, job.options["random_frames"] - member.made)
        packed = dataclasses.replace(job, options={**job.options, "random_frames": left}).pack()
        with self._news:  # who asks finds the old life, whose answer does not come, or the new line
            member.settle()
            member.counters = SharedCounters()
            member.generation += 1
            member.restarts += 1
            self._launch(member, packed)
        try:
            self._await_greetings([member])
            self._hand_over(member.worker)
            self._compile([member])
            if self.held:
                self.tell(member, "pause", True)
        except WorkerError as error:
            if member.failure is None:
                member.failure = error

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the collector was shut down")

    # -- listening

    def wait(
        self, done: Callable[[], bool], timeout: float | None, *, watch_hanging: bool = True
    ) -> bool:
        """Listen until `done()`, or for `timeout` seconds; whether it is done.

        One thread listens at a time, for all that wait.
        """
        deadline = None if timeout is None else awake_s() + timeout
        while True:
            remaining = SLICE_S if deadline is None else deadline - awake_s()
            if self.listen(min(remaining, SLICE_S), unless=done):
                return True
            if remaining <= 0 or self._closed:
                return False
            if watch_hanging:
                self._look_for_hanging()

    def listen(self, timeout: float, unless: Callable[[], bool] = bool) -> bool:
        """Take in what workers say, waiting up to `timeout` for something, `unless()`."""
        me, ready = threading.get_ident(), set[int]()
        with interrupts.held():
            with self._news:
                if unless():
                    return True
                if self._listener not in (None, me):
                    due = time.monotonic() + max(0.0, timeout)
                    awake_s.begin()
                    with interrupts.let_in():
                        self._news.wait(max(0.0, timeout))
                    awake_s.end(due)
                    return unless()
                self._listener = me
                fds = [fd for member in self.members for fd in self._fds(member)]
            try:
                with interrupts.let_in():  # not holding the lock: others may ask and tell meanwhile
                    ready.update(wait_for(fds, timeout))
            finally:
                with self._news:
                    self._listener = None
                    for member in self.members:
                        if self._has_said(member, ready):
                            self._take_in(member)
                    self._news.notify_all()
        with self._news:
            return unless()

    def _fds(self, member: WorkerHandle) -> Iterator[int]:
        if member.pipe is not None and not member.pipe.ended:
            yield member.pipe.fileno()
        if member.watch is not None:
            yield from member.watch.fds()

    def _has_said(self, member: WorkerHandle, ready: set[int]) -> bool:
        if member.watch is None or member.pipe is None:
            return False
        unheard = member.watch.gone and member.failure is None
        return unheard or must_look() or not ready.isdisjoint(self._fds(member))

    def _take_in(self, member: WorkerHandle) -> None:
        assert member.watch is not None
        assert member.pipe is not None
        gone = member.watch.look()  # before what it said last is read
        for message, fds in member.pipe.receive():
            self._book(member, message, fds)
        if gone and member.failure is None:
            member.failure = WorkerDied(member.worker, self._obituary(member))

    def _book(self, member: WorkerHandle, message: tuple[Any, ...], fds: list[int]) -> None:
        kind, *rest = message
        if kind == "batch" and member.blocks:  # none: it failed before
            block, serial, steps, count = rest
            member.ordered -= 1
            member.full.append(
                Full(member.blocks[block], block, serial, steps, count, member.generation)
            )
            self.arrived.append(member)
        elif kind == "result":
            number, good, value = rest
            member.results[number] = (good, value)
        elif kind == "hello":
            (hello,) = rest
            member.num_envs, member.environment = hello["num_envs"], hello["environment"]
            member.greeted = True
        elif kind == "blocks":
            layout, count, nbytes = rest
            try:
                member.blocks = _map_blocks(layout, count, nbytes, fds)
            except OSError as error:
                text = f"{member} cannot hand over its frames, whose memory cannot be had: {error}"
                member.failure = member.failure or WorkerError(member.worker, text)
        elif kind == "error":
            name, text = rest
            member.failure = WorkerRaised(
                member.worker,
                f"{member} raised {name} while {member.counters.stage}:\n{text.rstrip()}",
            )

    def _obituary(self, member: WorkerHandle) -> str:
        member.process.join(1.0)
        code = member.process.exitcode
        how = f"with exit code {code}"
        if code is not None and code < 0:
            known = -code in set(signal.Signals)
            how = f"by {signal.Signals(-code).name if known else f'signal {-code}'}"
        where = member.counters.stage
        hint = _NOT_IMPORTED if code == 1 and member.counters.values[STAGE] == STARTING else ""
        return f"{member} died {how} (pid {member.process.pid}) while {where}{hint}"

    def look(self) -> None:
        """Notice who failed or hangs, without waiting."""
        self.listen(0)
        self._look_for_hanging()

    def _look_for_hanging(self) -> None:
        """A worker that owes something and does not move is a failure."""
        now = awake_s()
        for member in self.members:
            counters = member.counters.values
            seen = (counters[FRAMES], counters[STEPS], counters[STAGE])
            rests = counters[STAGE] == IDLE and (self.held or not member.ordered)
            if seen != member.seen or rests or member.failure is not None:
                member.seen, member.seen_at = seen, now
                continue
            limit, name = self._limits.get(counters[STAGE], (self._timeout, "timeout"))
            if now - member.seen_at > limit and member.greeted:
                member.failure = WorkerTimeout(
                    member.worker,
                    f"{member} hangs: it has been {member.counters.stage} for "
                    f"more than {name}={limit:g} s (pid {member.process.pid})",
                )

    def take(self, member: WorkerHandle) -> Full:
        """The oldest full block of a worker: delivered by that, or dropped if it is outdated."""
        with self._news:
            full = member.full.popleft()
            if full.serial > member.outdated:
                member.delivered += full.frame_count
            else:
                member.dropped += full.frame_count
            if full.generation == member.generation:
                member.handed += full.frame_count
                member.counters.clear(full.block)
            return full

    def take_first(self) -> tuple[WorkerHandle, Full]:
        """The block that was full first."""
        with self._news:
            member = self.arrived.popleft()
            return member, self.take(member)

    def frame_counts(self, member: WorkerHandle) -> dict[str, Any]:
        """The frames of one worker: where each of them is."""
        self.listen(0)
        with self._news:
            return member.frame_counts(len(member.blocks) or self.jobs[member.worker].num_blocks)

    def failed(self) -> list[WorkerHandle]:
        return [member for member in self.members if member.failure is not None]

    def give_up(self, error: WorkerError, generations: Sequence[int]) -> None:
        """Count whom the error names as failed, unless there is another in its place by now."""
        with self._news:
            for worker, failure in error.failures.items():
                member = self.members[worker]
                if member.generation == generations[worker]:
                    member.failure = member.failure or failure

    def raise_failures(self) -> None:
        """Raise what went wrong, if anything did."""
        failures = {m.worker: m.failure for m in self.failed() if m.failure is not None}
        if failures:
            raise combine(failures)

    # -- telling and asking

    def tell(self, member: WorkerHandle, *message: Any) -> None:
        """Send a message; one that cannot be sent is found out by whoever waits for its effect."""
        with self._news:
            if member.pipe is None:
                return
            try:
                member.pipe.send(message, timeout=self._timeout)
            except PipeClosed:
                return
            except TimeoutError as error:  # half of it is sent: the line is of no more use
                member.failure = member.failure or WorkerTimeout(
                    member.worker,
                    f"{member} reads no messages while {member.counters.stage}: {error}",
                )
                return
            member.counters.values[MESSAGES] += 1

    def hold(self, still: bool) -> None:
        """Have all workers stop between two steps, or go on."""
        with self._news:
            for member in self.members:
                member.seen_at = awake_s()
                self.tell(member, "pause", still)
            self.held = still

    def order(self, member: WorkerHandle, block: int, serial: int) -> None:
        """Have a block filled with weights no older than those published by now."""
        versions = dict(self.publisher.promised[member.worker])
        with interrupts.held():
            with self._news:
                if not member.ordered:
                    member.seen_at = awake_s()  # until now it owed nothing
                member.ordered += 1
            self.tell(member, "collect", block, serial, versions)

    def call(
        self,
        method: str,
        *args: Any,
        members: Iterable[WorkerHandle] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Have workers do something between two steps; their results.

        One that another thread replaces meanwhile is asked again.
        """
        chosen = list(self.members if members is None else members)
        timeout = timeout or self._timeout
        deadline = awake_s() + timeout
        answers: dict[int, tuple[bool, Any]] = {}
        while left := [member for member in chosen if member.worker not in answers]:
            answers |= self._ask(left, method, args, timeout, deadline)
        results = []
        for member in chosen:
            good, value = answers[member.worker]
            if not good:
                raise WorkerRaised(member.worker, f"{member}, asked to {method}: {value}")
            results.append(pickle.loads(value))
        return results

    def _ask(
        self,
        members: Iterable[WorkerHandle],
        method: str,
        args: tuple[Any, ...],
        timeout: float,
        deadline: float,
    ) -> dict[int, tuple[bool, Any]]:
        """The answers by worker, without those of whoever was replaced before it gave one."""
        asked = []
        with self._news:
            self._raise_if_closed()
            for member in members:
                self._numbers += 1
                asked.append((member, member.generation, self._numbers))
                given = args[0](member) if len(args) == 1 and callable(args[0]) else args
                self.tell(member, "call", self._numbers, method, given)

        def done() -> bool:
            return all(
                n in m.results or m.failure or m.generation != generation
                for m, generation, n in asked
            )

        self.wait(done, deadline - awake_s())
        with self._news:
            answers = {m.worker: m.results.pop(n) for m, _, n in asked if n in m.results}
            for member, generation, _ in asked:
                if member.worker in answers or (
                    member.generation != generation and not member.failure
                ):
                    continue
                self._raise_if_closed()
                raise member.failure or WorkerTimeout(
                    member.worker,
                    f"{member} did not answer {method!r} within {timeout:g} s: "
                    f"it is {member.counters.stage}",
                )
            return answers

    # -- ending

    def close(self, timeout: float = KILL_AFTER_S, *, close_env: bool = True) -> None:
        """End all workers: first by asking, then by force. Bounded; harmless a second time."""
        deadline = awake_s() + timeout
        try:
            self._tell_to_stop(close_env)
            for member in self.members:
                self._end(member, max(0.0, deadline - awake_s()))
        except BaseException:  # an interrupt: nobody is waited for any more
            for member in self.members:
                self._end(member, 0.0)
            raise

    def _tell_to_stop(self, close_env: bool) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
            for member in self.members:
                if member.pipe is not None and member.process is not None:
                    with contextlib.suppress(TimeoutError, OSError, ValueError):
                        member.pipe.send(("stop", close_env), timeout=0.1)
                        member.counters.values[MESSAGES] += 1

    def _end(self, member: WorkerHandle, timeout: float) -> None:
        with self._ending:
            process, watch = member.process, member.watch
            if process is not None and watch is not None:
                if not watch.wait(timeout):
                    watch.kill()  # `process` knows of nobody any more if the fork server died
                    watch.wait(KILL_AFTER_S)
                process.join(KILL_AFTER_S)
            with self._news:
                if member.pipe is not None:
                    for message, fds in member.pipe.receive():  # what it still managed to say
                        self._book(member, message, fds)
                    member.pipe.close()
                member.process = member.pipe = member.watch = None
            if process is not None:
                with contextlib.suppress(ValueError):
                    process.close()


# A worker that has come to itself sends what it raises.
_NOT_IMPORTED = (
    ". It could not import the script, as it printed: what makes a collector must stand below "
    "`if __name__ == '__main__':`, since workers import the rest"
)


def _name(factory: Any) -> str:
    return str(getattr(factory, "__qualname__", factory))


def _map_blocks(layout: FrameLayout, count: int, nbytes: int, fds: list[int]) -> list[FrameBlock]:
    if not fds:  # it got lost on its way: here was no room for it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    try:
        whole = torch.frombuffer(mmap.mmap(fds[0], nbytes * count), dtype=torch.uint8)
    finally:
        os.close(fds[0])
    return [FrameBlock(layout, whole[i * nbytes : (i + 1) * nbytes]) for i in range(count)]
