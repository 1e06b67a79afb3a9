"""The workers of a simulation: their orders, the times of their steps, and their versions.

    order()   --> [orders] --> begin: at once if it rests, but not before the versions that were
                     |         published to it by the time of the order have arrived
                     v
              [batch: num_steps steps, whose ends are drawn when it is begun]
                     |   <-- arrive(): a version counts from the next step that begins
                     v
    take()    <-- [finished]

It has the turns of a `WorkerPool`. Versions are counted by the simulator: 0, 1, 2, ...
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from collectors.simulation.costs import StepTimes

ApplyAt = Literal["step", "batch", "episode"]


class Failure(NamedTuple):
    """A worker dies at a time, and comes back later."""

    worker: int
    at_s: float
    back_after_s: float


def checked(failures: Sequence[Failure], num_workers: int) -> list[Failure]:
    """The failures by time; `ValueError` for one of a worker that is down or does not exist."""
    back_s: dict[int, float] = {}
    ordered = sorted((Failure(*one) for one in failures), key=lambda one: one.at_s)
    for one in ordered:
        if not 0 <= one.worker < num_workers:
            raise ValueError(f"failures: no worker {one.worker}, there are {num_workers}")
        if one.at_s < 0 or one.back_after_s < 0:
            raise ValueError(f"failures: {one.at_s:g} and {one.back_after_s:g} must be 0 or more")
        if one.at_s < back_s.get(one.worker, 0.0):
            raise ValueError(
                f"failures: worker {one.worker} fails at {one.at_s:g} s, and is down until "
                f"{back_s[one.worker]:g} s"
            )
        back_s[one.worker] = one.at_s + one.back_after_s
    return ordered


class VirtualClock:
    """The events to come; those of one time happen as they were added. `now` is in nanoseconds."""

    def __init__(self) -> None:
        self.now = 0
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._added = 0

    def __call__(self) -> int:
        return self.now

    def at(self, time_ns: int, action: Callable[..., None], *args: Any) -> None:
        """Schedule an event at this time, or now if that is past."""
        self._added += 1
        heapq.heappush(self._events, (max(time_ns, self.now), self._added, action, args))

    def step(self) -> None:
        """Go on to the next event. `LookupError` if none is left."""
        if not self._events:
            raise LookupError("the simulation has no event left: it is deadlocked")
        self.now, _, action, args = heapq.heappop(self._events)
        action(*args)

    def advance(self, duration_ns: int) -> None:
        """Advance the clock, and process all events until then."""
        end = self.now + duration_ns
        while self._events and self._events[0][0] <= end:
            self.step()
        self.now = end


class SimulatedOrder(NamedTuple):
    """A batch to make.

    version: the newest at its order.
    least: the newest that was published to this worker by then.
    """

    version: int
    least: int


@dataclass(eq=False, slots=True)
class SimulatedBatch:
    """One batch: when its steps end, and from which of them on the worker has which version."""

    version: int  # the newest at its order
    generation: int
    steps_before: int  # that the worker made in earlier generations
    begun_ns: int
    ends: list[int]  # since its begin
    versions: list[tuple[int, int]]  # pairs (step, version)
    newest: int = 0  # the newest published when it was finished

    def step_at(self, now: int) -> int:
        """The first step that begins now or later; the number of steps if there is none."""
        elapsed = now - self.begun_ns
        return bisect_left(self.ends, elapsed) + 1 if elapsed else 0

    def end_of(self, step: int) -> int:
        """When the step before this one ends."""
        return self.begun_ns + (self.ends[step - 1] if step else 0)

    def done_at(self, now: int) -> int:
        """How many steps are done."""
        return bisect_right(self.ends, now - self.begun_ns)


@dataclass(eq=False, slots=True)
class SimulatedWorker:
    """One worker. After a failure it goes on as its next generation."""

    index: int
    times: StepTimes
    generation: int = 0
    steps: int = 0  # that ended in batches before the current one, in all its generations
    steps_before: int = 0  # in earlier generations
    is_up: bool = True
    serial: int = 0  # of the last batch that was ordered
    cut_serial: int = -1
    under_way: int = 0  # batches that were ordered and not taken
    version: int = 0  # the newest that has arrived
    promised: int = 0  # the newest that was published to it
    orders: deque[SimulatedOrder] = field(default_factory=deque)
    batch: SimulatedBatch | None = None
    finished: deque[SimulatedBatch] = field(default_factory=deque)
    group: tuple[SimulatedWorker] = field(init=False)  # each makes a batch alone

    def __post_init__(self) -> None:
        self.group = (self,)


class SimulatedPool:
    """All workers.

    apply_at: with "batch" versions count from the next batch on; with "episode" a batch does not
        wait for the versions published before its order.
    applied: called with a worker, a version and the time at which the worker begins to use it.
    made: called with a worker and a batch that it has finished.
    """

    def __init__(
        self,
        times: Sequence[StepTimes],
        *,
        clock: VirtualClock,
        num_steps: int,
        apply_at: ApplyAt,
        failures: Sequence[Failure],
        applied: Callable[[SimulatedWorker, int, int], None],
        made: Callable[[SimulatedWorker, SimulatedBatch], None],
    ):
        self.workers = [SimulatedWorker(index, one) for index, one in enumerate(times)]
        self.handles = list(self.workers)  # that are up
        self.arrived: deque[tuple[SimulatedWorker]] = deque()
        self.version = 0
        self.changed = False  # whether a worker failed or came back since orders were given
        self.dropped = self.restarts = 0  # steps, workers
        self._clock, self._num_steps, self._apply_at = clock, num_steps, apply_at
        self._applied, self._made = applied, made
        self._under_way: list[int] = []
        for failure in failures:
            clock.at(round(failure.at_s * 1e9), self._fail, failure)

    # -- what turns need

    def look(self) -> None:
        """There is nothing to notice without waiting."""

    def failed(self) -> list[SimulatedWorker]:
        """No worker is to be replaced: they come back by themselves."""
        return []

    def cut(self, worker: SimulatedWorker, /) -> None:
        """Each makes a batch alone, so none waits for another."""

    def attend(self) -> None:
        """Orders will be given to the workers that are up now."""
        self.changed = False

    def await_batch(self, done: Callable[[], bool]) -> None:
        """Let time pass until `done()`, or until a worker fails or comes back."""
        while not done() and not self.changed:
            self._clock.step()

    def order(self, worker: SimulatedWorker, /) -> None:
        """Have one more batch collected, with versions no older than those published by now."""
        worker.serial += 1
        worker.under_way += 1
        worker.orders.append(SimulatedOrder(self.version, worker.promised))
        self._under_way.append(self.version)  # which stays in order: versions only grow
        self._begin(worker)

    def versions_under_way(self) -> list[int]:
        """The version at the order of every batch that was not taken yet, the oldest first."""
        return self._under_way.copy()

    def take(self, worker: SimulatedWorker) -> SimulatedBatch:
        """The oldest finished batch of a worker."""
        batch = worker.finished.popleft()
        worker.under_way -= 1
        self.arrived.remove(worker.group)
        self._under_way.remove(batch.version)
        return batch

    # -- what happens

    def _begin(self, worker: SimulatedWorker) -> None:
        if worker.batch is not None or not worker.orders:
            return
        order = worker.orders[0]
        if worker.version < order.least and self._apply_at != "episode":
            return  # until that has arrived
        worker.orders.popleft()
        batch = worker.batch = SimulatedBatch(
            order.version,
            worker.generation,
            worker.steps_before,
            self._clock.now,
            worker.times.draw(),
            [(0, worker.version)],
        )
        self._clock.at(batch.end_of(self._num_steps), self._finish, worker, batch)

    def _finish(self, worker: SimulatedWorker, batch: SimulatedBatch) -> None:
        if worker.batch is not batch:
            return  # it was lost
        worker.batch = None
        worker.steps += self._num_steps
        batch.newest = self.version
        worker.finished.append(batch)
        self.arrived.append(worker.group)
        self._made(worker, batch)
        self._begin(worker)

    def arrive(self, index: int, version: int) -> None:
        """A version has come to a worker."""
        worker, batch = self.workers[index], self.workers[index].batch
        if not worker.is_up or version <= worker.version:
            return
        worker.version = version
        if batch is None:
            self._applied(worker, version, self._clock.now)
            self._begin(worker)
            return
        step = batch.step_at(self._clock.now)
        if self._apply_at == "batch" and step:
            step = self._num_steps
        self._applied(worker, version, batch.end_of(step))
        if batch.versions[-1][0] == step:
            batch.versions.pop()
        if step < self._num_steps:
            batch.versions.append((step, version))

    def _fail(self, failure: Failure) -> None:
        """The batch under way and all orders are lost."""
        worker = self.workers[failure.worker]
        if not worker.is_up:
            return
        lost = [order.version for order in worker.orders]
        if worker.batch is not None:
            lost.append(worker.batch.version)
            done = worker.batch.done_at(self._clock.now)
            self.dropped += done
            worker.steps += done
        for version in lost:
            self._under_way.remove(version)
        worker.batch, worker.is_up = None, False
        worker.orders.clear()
        worker.under_way = len(worker.finished)
        self.handles.remove(worker)
        self.changed = True
        self._clock.at(self._clock.now + round(failure.back_after_s * 1e9), self._come_back, worker)

    def _come_back(self, worker: SimulatedWorker) -> None:
        worker.generation += 1
        worker.steps_before = worker.steps
        worker.serial = 0
        worker.version = worker.promised
        worker.is_up = self.changed = True
        self.restarts += 1
        self.handles = [worker for worker in self.workers if worker.is_up]

    # -- its state

    def oldest_needed(self) -> int:
        """No batch to come has an older version."""
        versions = [one.version if one.is_up else one.promised for one in self.workers]
        begun = [worker.batch for worker in self.workers if worker.batch is not None]
        waiting = [worker.finished[0] for worker in self.workers if worker.finished]
        return min(versions + [batch.versions[0][1] for batch in (*begun, *waiting)])

    def counts(self) -> dict[str, int]:
        """Where the steps of all workers are, and how often workers came back."""
        now, waiting = self._clock.now, len(self.arrived) * self._num_steps
        begun = [worker.batch for worker in self.workers if worker.batch is not None]
        under_way = sum(batch.done_at(now) for batch in begun)
        return {
            "collected": sum(worker.steps for worker in self.workers) + under_way,
            "dropped": self.dropped,
            "in_flight": waiting + under_way,
            "restarts": self.restarts,
        }
