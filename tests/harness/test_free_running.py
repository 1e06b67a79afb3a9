from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDict

from collectors import ReplayBuffer
from harness.run.background_batches import BackgroundBatches


class Collector:
    """Puts frames into a buffer when it is told to."""

    def __init__(self, replay: ReplayBuffer):
        self.replay = replay
        self.starts = 0
        self.running = False
        self.collected = 0

    def counts(self) -> dict[str, int]:
        return {"collected": self.collected}

    def start(self) -> None:
        self.starts += 1
        self.running = True

    def put(self, first: int, last: int) -> None:
        self.replay.extend(TensorDict({"x": torch.arange(first, last)}, [last - first]))


def source(
    capacity: int = 100, timeout_s: float = 10.0, overwrite: bool = False
) -> tuple[BackgroundBatches, Collector]:
    replay = ReplayBuffer(capacity)
    collector = Collector(replay)
    free = BackgroundBatches(
        collector,  # type: ignore[arg-type]
        replay,
        frames_per_batch=4,
        timeout_s=timeout_s,
        overwrite=overwrite,
    )
    return free, collector


def shown(free: BackgroundBatches, seen: int) -> tuple[list[int], int]:
    found = free.next(seen)
    assert found is not None
    return found[0]["x"].tolist(), found[1]


def test_frames_are_shown_in_the_order_in_which_they_came():
    free, collector = source()
    collector.put(0, 6)
    collector.put(6, 8)
    assert shown(free, 0) == ([0, 1, 2, 3], 4)
    assert shown(free, 4) == ([4, 5, 6, 7], 8)
    assert collector.starts == 1


def test_a_ring_that_was_overwritten_shows_what_it_still_holds():
    free, collector = source(capacity=5)
    collector.put(0, 5)
    collector.put(5, 7)
    assert shown(free, 0) == ([2, 3], 4)
    collector.put(7, 20)
    assert shown(free, 4) == ([], 8)
    assert shown(free, 16) == ([16, 17, 18, 19], 20)


def test_the_learner_waits_for_a_whole_batch():
    free, collector = source()
    collector.put(0, 3)
    thread = threading.Timer(0.05, collector.put, (3, 5))
    thread.start()
    assert shown(free, 0) == ([0, 1, 2, 3], 4)
    thread.join()


def test_the_last_batch_may_be_smaller_and_then_there_is_none():
    free, collector = source()
    collector.put(0, 4)
    free.next(0)
    collector.put(4, 6)
    collector.running = False
    assert shown(free, 4) == ([4, 5], 6)
    assert free.next(6) is None


def test_a_run_that_goes_on_is_not_shown_what_it_has_seen():
    free, collector = source()
    collector.put(0, 8)
    assert shown(free, 4) == ([4, 5, 6, 7], 8)


def test_frames_that_are_long_in_coming_are_waited_for(monkeypatch):
    free, collector = source(timeout_s=0.01)

    def slowly() -> dict[str, int]:
        collector.collected += 1
        if collector.collected == 4:
            collector.put(0, 4)
        return {"collected": collector.collected}

    monkeypatch.setattr(collector, "counts", slowly)
    assert shown(free, 0) == ([0, 1, 2, 3], 4)


def test_frames_that_do_not_come_are_an_error():
    free, collector = source(timeout_s=0.01)
    collector.put(0, 1)
    with pytest.raises(TimeoutError, match="1 of 4 frames came within"):
        free.next(0)


def test_frames_that_were_overwritten_before_the_learner_came_to_them_are_counted():
    free, collector = source(capacity=5)
    collector.put(0, 5)
    collector.put(5, 7)
    assert free.next(0).overwritten == 2
    collector.put(7, 20)
    assert free.next(4).overwritten == 4
    assert free.next(16).overwritten == 0


def test_workers_wait_with_a_batch_that_would_overwrite_what_the_learner_has_not_seen():
    free, collector = source(capacity=10)
    collector.put(0, 4)
    free.next(0)  # frees 4 frames
    for last in (8, 12):
        assert collector.replay.await_room(0.0)
        collector.put(last - 4, last)
    assert not collector.replay.await_room(0.0)  # 4 more would overwrite frames 4 and 5
    free.next(4)
    assert collector.replay.await_room(0.0)


def test_workers_may_be_allowed_to_overwrite():
    free, collector = source(capacity=10, overwrite=True)
    collector.put(0, 4)
    free.next(0)
    collector.put(4, 13)
    assert collector.replay.await_room(0.0)
