"""What the sender records of a worker."""

from __future__ import annotations

from sync.channel import APPLIED, JOINED, LOST, Answer
from sync.model.block import NEVER
from sync.workers import WorkerRecord


def test_a_process_that_takes_a_place_has_acknowledged_nothing():
    record = WorkerRecord(0, None)
    record.book(Answer(0, JOINED, pid=1))
    record.addressed = 3
    record.book(Answer(0, APPLIED, 3))
    assert (record.acknowledged, record.waiting, record.restarts) == (3, False, 0)
    record.book(Answer(0, LOST))
    record.book(Answer(0, JOINED, pid=2))
    assert (record.acknowledged, record.waiting, record.restarts) == (NEVER, True, 1)
    assert (record.connected, record.failure, record.pid) == (False, None, 2)
