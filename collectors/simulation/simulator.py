"""A simulated cluster: an asynchronous collector's workers and its learner, in virtual time.

    learner   [take|   update   |publish] [log] [wait] [take|   update   |publish]
                 |                   |                    |
    order <------+                   +--> network -.      +--> order
                                                    \\
    worker 0  [s|s|s|s|s|s|s|s][s|s|s|s|s|s|s|s]     v
    worker 1       [s|s|s|s|s|s|s|s]  rests  [s|s|s|s|s|s|s|s]
                                              begins with the version

A worker's step is a policy call and a step of its environments. The learner's clock moves on when
it is asked: `next_batch` waits for the batch whose turn it is and takes it; the update with it is
charged at the `publish` that follows, or else at the next `next_batch`, unless `skip_update` says
that there is none. What happens by then happens in the order of its times: batches end, versions
arrive, workers fail. Who is ordered what, and whose batch is next, is decided by the turns of real
collectors (workers/turns.py); links are those of sync/effects/slow_link.py on this clock. All
draws come from generators of their own for each cost and worker, so the same calls give the same
schedule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from collectors.schedule.recording import Delivery, PlannedBatch
from collectors.simulation.costs import Costs, LearnerTimes, StepTimes
from collectors.simulation.network import Network, Transfers, Version
from collectors.simulation.simulated_pool import (
    ApplyAt,
    Failure,
    SimulatedBatch,
    SimulatedPool,
    SimulatedWorker,
    VirtualClock,
    checked,
)
from collectors.workers.turns import Turns
from lockstep_check.ages import age, of_age
from sync.effects.slow_link import Link


class Span(NamedTuple):
    """A span of virtual time, of a worker or of the learner (worker -1)."""

    worker: int
    name: str
    began_ns: int
    ended_ns: int
    version: int = -1


class Simulator:
    """Makes a schedule by discrete-event simulation.

    num_steps: of a batch.
    costs: the time that everything takes.
    network, link: how versions come to workers.
    failures: when workers die. The batch under way is lost; finished ones stay.
    batches_ahead, max_lag: of `Turns`.
    blocking: `publish` waits until all workers that are up use the version.

    waited_s: how long the learner waited for the last batch.
    watch: called with every `Span` of virtual time, when it ends or its end is known.
    """

    exact = False  # its versions are those that had arrived, for `apply_at`
    group_size = 1  # workers that make a batch together
    watch: Callable[[Span], None] | None = None

    def __init__(
        self,
        *,
        num_workers: int,
        num_steps: int,
        seed: int = 0,
        costs: Costs | None = None,
        network: Network | None = None,
        link: Link | None = None,
        failures: Sequence[Failure] = (),
        batches_ahead: int = 2,
        max_lag: int | None = None,
        blocking: bool = False,
        apply_at: ApplyAt = "step",
    ):
        self.num_workers, self.num_steps, self.seed = num_workers, num_steps, seed
        self.costs, self.network, self.link = costs or Costs(), network or Network(), link
        self.failures = checked(failures, num_workers)
        self.batches_ahead, self.max_lag = batches_ahead, max_lag
        self.blocking, self.apply_at = blocking, apply_at
        self._first = 0  # the number that the first version was given
        self._start()

    def _start(self) -> None:
        """Everything at time 0."""
        clock = self._clock = VirtualClock()
        slowness, n = self.costs.stragglers, self.num_workers
        self._pool = pool = SimulatedPool(
            [
                StepTimes(self.costs, self.num_steps, self.seed, i, slowness.factor_of(i, n))
                for i in range(n)
            ],
            clock=clock,
            num_steps=self.num_steps,
            apply_at=self.apply_at,
            failures=self.failures,
            applied=self._applied,
            made=self._made,
        )
        self._transfers = Transfers(self.network, self.link, n, clock, pool.arrive)
        self._turns = Turns(pool, self.batches_ahead, self.max_lag)
        self._learner = LearnerTimes(self.costs, self.seed)
        self._names = [self._first]  # by number, the versions as they were given
        self._calls = Calls(self._first)
        self._owes_update = self._owes_log = False
        self._silent: set[int] = set()  # workers that `publish` waits for
        self.waited_s = 0.0
        self._turns.start()

    @property
    def time_s(self) -> float:
        """The virtual time, in seconds."""
        return self._clock.now * 1e-9

    # -- the learner

    def next_batch(self) -> PlannedBatch:
        """The batch that the learner takes now, as soon as there is one."""
        self._calls.add_take()
        self._finish_update()
        if self._owes_log:
            self._spend("log_ms")
        began = self._clock.now
        (worker,) = self._turns.next()
        self.waited_s = (self._clock.now - began) * 1e-9
        batch = self._pool.take(worker)
        self._spend("take_ms")
        self._tell("collect", began)
        self._turns.taken()
        self._owes_update = self._owes_log = True
        versions = tuple((step, self._names[number]) for step, number in batch.versions)
        return PlannedBatch(
            worker.index,
            batch.generation,
            versions,
            newest=self._names[batch.newest],
            steps_before=batch.steps_before,
        )

    def skip_update(self) -> None:
        """Charge no update for the batch taken last: the learner dropped it."""
        if self._owes_update:
            self._owes_update = False
            self._calls.add_skip()

    def publish(self, version: int, deliveries: Sequence[Delivery]) -> None:
        """End the update, publish a version, and send workers this one or older ones."""
        if version <= self._names[-1]:
            raise ValueError(f"version {version} is not newer than {self._names[-1]}")
        self._calls.add_publish(version, deliveries, self.num_workers)
        self._finish_update()
        began = self._clock.now
        self._spend("publish_ms")
        self._names.append(version)
        self._pool.version = len(self._names) - 1
        for delivery in deliveries:
            self._send(delivery)
        while self._silent:
            self._clock.step()
            self._silent -= {w for w in self._silent if not self._pool.workers[w].is_up}
        self._tell("publish", began, version)

    def _send(self, delivery: Delivery) -> None:
        number = bisect_left(self._names, delivery.version)
        workers = [self._pool.workers[index] for index in delivery.workers]
        for worker in workers:
            worker.promised = number
        if self.blocking and self.apply_at != "episode":
            self._silent |= {worker.index for worker in workers if worker.is_up}
        self._transfers.publish(Version(number, delivery.nbytes), delivery.workers)

    def _applied(self, worker: SimulatedWorker, version: int, at_ns: int) -> None:
        """A worker uses a version from this time on, of which the learner hears later."""
        if self.watch is not None:
            self.watch(Span(worker.index, "apply", at_ns, at_ns, self._names[version]))
        if worker.index in self._silent and version == worker.promised:
            heard_ns = at_ns + self._transfers.latency_ns
            self._clock.at(heard_ns, self._hear, worker.index, worker.generation)

    def _hear(self, worker: int, generation: int) -> None:
        if self._pool.workers[worker].generation == generation:
            self._silent.discard(worker)

    def _finish_update(self) -> None:
        if self._owes_update:
            self._owes_update = False
            self._spend("update_ms")

    def _made(self, worker: SimulatedWorker, batch: SimulatedBatch) -> None:
        if self.watch is not None:
            version = self._names[batch.versions[0][1]]
            self.watch(Span(worker.index, "batch", batch.begun_ns, self._clock.now, version))

    def _spend(self, what: str) -> None:
        began = self._clock.now
        self._clock.advance(self._learner.draw(what))
        if what in ("update_ms", "log_ms"):
            self._tell(what.removesuffix("_ms"), began)

    def _tell(self, name: str, began_ns: int, version: int = -1) -> None:
        if self.watch is not None:
            self.watch(Span(-1, name, began_ns, self._clock.now, version))

    def count_from(self, first: int) -> None:
        """Count the versions published so far from `first`: they go on another run's."""
        self._first = first
        self._names = [first + name for name in self._names]
        self._calls.count_from(first)

    # -- what else there is to know

    def oldest_needed(self) -> int:
        """No batch to come names a version older than this one."""
        return self._names[self._pool.oldest_needed()]

    def counts(self) -> dict[str, int]:
        """Where the steps of all workers are, and how often a worker came back."""
        return self._pool.counts()

    def state_dict(self) -> dict[str, Any]:
        """The calls so far, which lead to the same state."""
        return {**self._calls.state_dict(), "time_ns": self._clock.now, "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Simulate the calls again. `ValueError` if the resulting time differs."""
        self._first = int(state.get("first", 0))  # states of earlier versions lack it
        self._start()
        rounds = expanded(state["rounds"], self.num_workers, self._first)
        for takes, skipped, version, deliveries in rounds:
            self._take(takes, skipped)
            self.publish(version, deliveries)
            if self._clock.now > state["time_ns"]:
                break
        self._take(state["takes"], state["skipped"])
        if self._clock.now != state["time_ns"]:
            raise ValueError("the simulated schedule was made with other costs or another seed")

    def _take(self, takes: int, skipped: list[int]) -> None:
        """Take so many batches, and skip the updates with some of them, by their numbers."""
        for number in range(takes):
            self.next_batch()
            if number in skipped:
                self.skip_update()


class Calls:
    """The calls of `next_batch`, `skip_update` and `publish`, equal rounds in one entry.

    A round is a number of batches that are taken, and a version that is published then. Batches
    whose updates were skipped are listed by their numbers in the round. A delivery is written as
    [how many versions older than the one published, bytes, workers], with None for all workers.
    """

    def __init__(self, first: int = 0) -> None:
        # How often, takes, version - the last, deliveries, skipped
        self._rounds: list[list[Any]] = []
        self._takes = 0
        self._skipped: list[int] = []
        self._version = first

    def count_from(self, first: int) -> None:
        """Count versions from `first`, those so far as well: rounds hold their distances."""
        self._version += first

    def add_take(self) -> None:
        """A batch is taken."""
        self._takes += 1

    def add_skip(self) -> None:
        """The update with the batch taken last is skipped."""
        self._skipped.append(self._takes - 1)

    def add_publish(self, version: int, deliveries: Sequence[Delivery], num_workers: int) -> None:
        """A version is published."""
        sent = []
        for one in deliveries:
            everybody = len(one.workers) == num_workers
            workers = None if everybody else list(one.workers)
            sent.append([age(one.version, version), one.nbytes, workers])
        round_ = [self._takes, version - self._version, sent, self._skipped]
        if self._rounds and self._rounds[-1][1:] == round_:
            self._rounds[-1][0] += 1
        else:
            self._rounds.append([1, *round_])
        self._takes, self._skipped, self._version = 0, [], version

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        rounds = [list(one) for one in self._rounds]
        return {"rounds": rounds, "takes": self._takes, "skipped": list(self._skipped)}


def expanded(
    rounds: list[list[Any]], num_workers: int, first: int = 0
) -> Iterator[tuple[Any, ...]]:
    """Yield (takes, skipped, version, deliveries) of every round."""
    if any(len(one) != 5 or not isinstance(one[3], list) for one in rounds):
        raise ValueError(
            "the simulated schedule was saved by an earlier version, and cannot go on; start anew"
        )
    version = first
    for count, takes, step, sent, skipped in rounds:
        for _ in range(count):
            version += step
            yield (
                takes,
                skipped,
                version,
                [
                    Delivery(
                        of_age(lag, version),
                        nbytes,
                        range(num_workers) if workers is None else workers,
                    )
                    for lag, nbytes, workers in sent
                ],
            )
