"""What the learner does with a simulator: take a batch, train, publish."""

from __future__ import annotations

from typing import NamedTuple

from collectors.schedule.recording import Delivery, PlannedBatch


class Taken(NamedTuple):
    """A batch, when it was taken, and the version that was the newest then."""

    plan: PlannedBatch
    at_ms: float
    newest: int

    @property
    def lag(self):
        """Of its first step."""
        return self.newest - self.plan.versions[0][1]


def drive(simulator, batches, *, interval=1, nbytes=1000, newest=0):
    """Take so many batches, and publish after every `interval`."""
    taken = []
    for number in range(1, batches + 1):
        plan = simulator.next_batch()
        taken.append(Taken(plan, round(simulator.time_s * 1e3, 6), newest))
        if number % interval == 0:
            newest += 1
            simulator.publish(newest, [Delivery(newest, nbytes, range(simulator.num_workers))])
    return taken
