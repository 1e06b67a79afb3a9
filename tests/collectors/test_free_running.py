"""Collecting in the background into a replay buffer, while a learner samples from it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import InteractionType, interaction_type, set_interaction_type
from torch import nn

from collectors import ReplayBuffer
from sync import WorkerDied, WorkerRaised
from tests.collectors import troubled
from tests.collectors.support import COLLECTORS
from tests.collectors.troubled import Mishap, Plain, balance, hold, pids, wait_until

EACH = pytest.mark.parametrize("kind", COLLECTORS)


def make(kind: str, buffer: ReplayBuffer, **options: Any) -> Any:
    return troubled.make(kind, options.pop("policy", None), replay_buffer=buffer, **options)


def agrees(frames: Any) -> bool:
    """Whether all fields of every frame tell of the same step."""
    step, after = frames["observation"][:, 1], frames["next", "observation"][:, 1]
    same = torch.equal(step + 1, after)
    same &= torch.equal(frames["next", "terminated"], after % 13 == 0)
    same &= torch.equal(frames["is_init"], step == 0)
    same &= torch.equal(frames["observation"][:, 0].long(), frames["collector", "worker"])
    own = frames["policy_version"] >= 0
    return same and torch.equal(frames["weight"][own].long(), frames["policy_version"][own])


def versions_by_worker(frames: Any) -> list[list[int]]:
    workers, versions = frames["collector", "worker"], frames["policy_version"]
    return [versions[workers == worker].tolist() for worker in workers.unique()]


@EACH
def test_a_learner_samples_whole_frames_and_publishes_meanwhile(kind):
    buffer, policy = ReplayBuffer(500), Plain()
    with make(kind, buffer, policy=policy) as collector:
        collector.start()
        buffer.wait(1, timeout=30.0)
        versions: set[int] = set()
        number = 0
        while buffer.written < 1_500 or len(versions) < 5:
            number += 1
            hold(policy, number)
            collector.update_policy_weights_()
            frames = buffer.sample(64)
            assert agrees(frames)
            versions |= set(frames["policy_version"].tolist())
            assert balance(collector) == 0
        assert collector.running
        assert len(buffer) == 500
        assert agrees(buffer[:])
        with pytest.raises(RuntimeError, match=r"next\(\) after start"):
            collector.next()
    assert not collector.running


@EACH
def test_nothing_is_stepped_while_it_pauses(kind):
    buffer, policy = ReplayBuffer(1_000), Plain()
    with make(kind, buffer, policy=policy) as collector:
        collector.start()
        buffer.wait(100, timeout=30.0)
        for apply in range(1, 4):
            with collector.pause():
                with collector.pause():
                    pass  # ends no pause but its own
                before = collector.stats()["collected"], collector.getattr_env("steps")
                hold(policy, apply)
                collector.update_policy_weights_()
                assert (collector.stats()["collected"], collector.getattr_env("steps")) == before
            written = buffer.written
            assert buffer.wait(written + 100, timeout=30.0) >= written + 100
        assert agrees(buffer[:])


def test_frames_from_before_a_pause_are_in_the_buffer():
    class Slow(ReplayBuffer):
        def extend(self, frames):
            begun.set()
            time.sleep(0.3)
            return super().extend(frames)

    begun, buffer = threading.Event(), Slow(500)
    with make("single", buffer) as collector:
        collector.start()
        assert begun.wait(20)
        with collector.pause():
            assert buffer.written == collector.stats()["delivered"] == collector.frames > 0


@pytest.mark.parametrize(
    ("kind", "apply_at"),
    [("single", "step"), ("sync", "batch"), ("async", "step"), ("async", "batch")],
)
def test_an_update_in_a_pause_is_not_waited_for_by_those_who_stand_still(kind, apply_at):
    buffer, policy, workers = ReplayBuffer(100_000), Plain(), 1 if kind == "single" else 2
    with make(kind, buffer, policy=policy, apply_at=apply_at) as collector:
        collector.start()
        buffer.wait(100, timeout=30.0)
        with collector.pause():
            hold(policy, 1)
            collector.update_policy_weights_()
        written = buffer.written
        # One worker may write a good deal before another has woken up.
        wait_until(
            lambda: [seen[-1] for seen in versions_by_worker(buffer[written:])] == [1] * workers
        )
        assert buffer.wait(buffer.written + 300, timeout=30.0)
        # Older are a block on its way into the buffer, one that waited, and one that was begun.
        for seen in versions_by_worker(buffer[written:]):
            assert seen == sorted(seen)
            assert seen.count(0) <= 3 * 40
        assert agrees(buffer[:])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_workers_that_stand_still_sleep_though_a_version_waits_for_them():
    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    policy, options = Plain(), {"apply_at": "batch", "frames_per_batch": 20_000}
    with make("async", ReplayBuffer(1_000), policy=policy, **options) as collector:
        collector.start()
        with collector.pause():  # in the middle of a batch
            hold(policy, 1)
            collector.update_policy_weights_()
            time.sleep(0.1)
            before = [ticks(pid) for pid in pids(collector)]
            time.sleep(0.4)
            used = [ticks(pid) - was for pid, was in zip(pids(collector), before, strict=True)]
            assert max(used) < 0.1 * os.sysconf("SC_CLK_TCK")


def test_the_first_frames_are_random_and_say_so():
    buffer, workers = ReplayBuffer(1_000_000), 2
    with make("async", buffer, init_random_frames=100) as collector:
        collector.start()
        buffer.wait(1, timeout=30.0)
        # One worker may write a good deal before another has woken up.
        wait_until(
            lambda: [0 in seen for seen in versions_by_worker(buffer[:])] == [True] * workers
        )
    versions = buffer[:]["policy_version"]
    assert 100 <= int((versions == -1).sum()) <= 102
    assert agrees(buffer[:])


@pytest.mark.parametrize("kind", ["single", "async"])
def test_total_frames_end_it(kind):
    buffer = ReplayBuffer(1_000)
    with make(kind, buffer, total_frames=400) as collector:
        collector.start()
        wait_until(lambda: not collector.running)
        assert buffer.written == 400
        assert buffer.wait(401) == 400  # nobody waits for frames that will not come
        assert collector.next() is None  # by itself it does not run any more
        assert buffer.written == 440
        collector.start()
        wait_until(lambda: not collector.running)
        assert buffer.written == 440
    collector.async_shutdown()


@pytest.mark.parametrize("kind", ["single", "async"])
def test_an_environment_that_raises_meanwhile_is_heard_by_all(kind):
    buffer = ReplayBuffer(1_000)
    collector = make(kind, buffer, trouble={"where": "step", "at": 150})
    expected = Mishap if kind == "single" else WorkerRaised
    collector.start()
    with pytest.raises(expected, match="the pole fell off"):
        buffer.wait(1_000_000, timeout=30.0)
    with pytest.raises(expected, match="the pole fell off"):
        buffer.sample(3)
    with pytest.raises(expected, match="the pole fell off"):
        collector.update_policy_weights_()
    with pytest.raises(expected, match="the pole fell off"):
        collector.async_shutdown()
    collector.async_shutdown()  # told once


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_worker_killed_meanwhile_is_heard_of_or_replaced(kind):
    buffer = ReplayBuffer(1_000)
    collector = make(kind, buffer)
    collector.start()
    buffer.wait(100, timeout=30.0)
    os.kill(pids(collector)[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="worker 1"):
        buffer.wait(1_000_000, timeout=30.0)
    with pytest.raises(WorkerDied, match="worker 1"):
        collector.async_shutdown()
    buffer = ReplayBuffer(1_000)
    with make(kind, buffer, on_worker_failure="restart") as collector:
        collector.start()
        buffer.wait(100, timeout=30.0)
        os.kill(pids(collector)[1], signal.SIGKILL)
        wait_until(lambda: collector.stats()["restarts"] == 1)
        buffer.wait(buffer.written + 300, timeout=30.0)
        assert agrees(buffer[:])
        assert balance(collector) == 0


def test_a_learner_explores_as_it_likes_meanwhile():
    class Telling(nn.Module):
        out_keys = ("action", "mode")

        def forward(self, observation):
            mode = interaction_type() is InteractionType.MODE
            return torch.zeros(len(observation), dtype=torch.int64), torch.full((1,), mode)

    buffer = ReplayBuffer(10_000)
    with make("single", buffer, policy=Telling()) as collector:
        collector.start()
        with set_interaction_type(InteractionType.MODE):
            for more in range(400, 2_000, 40):
                buffer.wait(more, timeout=30.0)
                assert interaction_type() is InteractionType.MODE
    assert interaction_type() is None
    assert not buffer[:]["mode"].any()


def test_shutdown_wakes_a_learner_that_waits():
    buffer = ReplayBuffer(1_000)
    collector = make("sync", buffer)
    collector.start()
    waited: list[int] = []
    thread = threading.Thread(target=lambda: waited.append(buffer.wait(10**9)))
    thread.start()
    buffer.wait(100, timeout=30.0)
    collector.async_shutdown()
    thread.join(20.0)
    assert not thread.is_alive()
    assert waited[0] == buffer.written < 10**9


def test_several_may_fill_one_buffer():
    buffer = ReplayBuffer(10_000)
    with make("single", buffer) as lasting, make("single", buffer, total_frames=40) as brief:
        lasting.start()
        brief.start()
        wait_until(lambda: not brief.running)
        wanted = buffer.written + 400
        assert buffer.wait(wanted, timeout=30.0) >= wanted
        lasting.shutdown()
        assert buffer.wait(buffer.written + 1) == buffer.written


def test_a_free_running_collector_needs_a_buffer_and_runs_once():
    with make("single", ReplayBuffer(100)) as collector:
        collector.start()
        with pytest.raises(RuntimeError, match="already"):
            collector.start()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.start()
    with (
        troubled.make("single") as bare,
        pytest.raises(RuntimeError, match="replay_buffer"),
    ):
        bare.start()


@EACH
def test_workers_wait_for_a_reader_that_still_needs_the_oldest_frames(kind):
    buffer = ReplayBuffer(250)
    with make(kind, buffer) as collector:
        room = collector.frames_per_batch
        buffer.keep_from(0, room)
        collector.start()
        wait_until(lambda: buffer.written + room > buffer.capacity)
        time.sleep(0.5)  # nothing comes in a time in which batches would
        assert buffer.written <= buffer.capacity
        buffer.keep_from(buffer.written, room)
        assert buffer.wait(300, timeout=30.0) >= 300
