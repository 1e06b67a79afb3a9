"""A host that dies, raises, stops or hangs is named, or replaced with its loss counted."""

from __future__ import annotations

import os
import signal
import threading

import psutil
import pytest

from sync import WorkerDied, WorkerError, WorkerRaised, WorkerTimeout
from tests.collectors.remote.support import KINDS, host_pids, make, needs_ray
from tests.collectors.support import all_accounted_for
from tests.collectors.troubled import Plain, Troubled, hold, is_gone, told, wait_until


def troubled(kind, *, sync=True, trouble=None, workers=1, **options):
    return make(
        kind,
        Troubled,
        Plain(),
        sync=sync,
        num_workers_per_collector=workers,
        create_env_kwargs=told(2 * workers, **(trouble or {})),
        **{"frames_per_batch": 40, **options},
    )


def last_trajectory(batch, worker):
    """The highest number of a trajectory that this worker has in the batch."""
    ids = batch["collector", "traj_ids"][batch["collector", "worker"] == worker]
    return int(ids.max()) if ids.numel() else None


def gather(collector, batches=10_000):
    for _ in range(batches):
        collector.next()


@pytest.mark.parametrize("where", ["make", "step"])
def test_an_environment_that_raises_is_named_with_its_host_and_traceback(where):
    trouble = {"only": 1, "where": where, "at": 1}
    with pytest.raises(WorkerRaised) as raised:  # noqa: SIM117
        with troubled("distributed", trouble=trouble, policy_device="cpu:0") as collector:
            gather(collector)
    text = str(raised.value)
    assert raised.value.worker_idx == 1
    assert "worker 1 (" in text
    assert "127.0.0.1" in text
    assert ", cpu:0" in text
    assert "Traceback (most recent call last)" in text
    assert "Mishap: the pole fell off" in text


@pytest.mark.parametrize("sync", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_host_is_named_and_what_it_made_is_accounted_for(kind, sync):
    with troubled(kind, sync=sync) as collector:
        gather(collector, 3)
        os.kill(host_pids(collector)[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"worker 1 \(") as raised:
            gather(collector)
        assert raised.value.worker_idx == 1
        assert all_accounted_for(collector.stats())


@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        ("distributed", True),
        ("distributed", False),
        pytest.param("ray", True, marks=needs_ray),
    ],
)
def test_a_killed_host_is_replaced_with_the_newest_weights_and_another_seed(kind, sync):
    with troubled(kind, sync=sync, on_worker_failure="restart", max_restarts=2) as collector:
        hold(collector.policy, 7)
        collector.update_policy_weights_()
        gather(collector, 4)
        before = collector.getattr_env("seeded")
        last = None
        while last is None:
            last = last_trajectory(collector.next(), worker=0)
        dead = host_pids(collector)[0]
        os.kill(dead, signal.SIGKILL)
        found = None
        while found is None:
            batch = collector.next()
            assert all_accounted_for(collector.stats())
            if host_pids(collector)[0] != dead and (batch["collector", "worker"] == 0).any():
                found = batch
        while (found["policy_version"] != 1).any():  # made before the update reached its host
            found = collector.next()
        assert (found["weight"] == 7).all()
        stats = collector.stats()
        assert stats["restarts"] == 1
        assert stats["workers"][0]["restarts"] == 1
        assert collector.getattr_env("seeded")[0] != before[0]
        while (newest := last_trajectory(found, worker=0)) is None:
            found = collector.next()
        assert newest > last  # numbers go on where they were


def test_a_host_that_dies_while_it_is_asked_for_its_state_is_replaced_and_asked_again():
    with troubled("distributed", on_worker_failure="restart", max_restarts=2) as collector:
        gather(collector, 2)
        dead = host_pids(collector)[1]
        os.kill(dead, signal.SIGSTOP)  # so that it cannot answer before it is gone
        threading.Timer(0.3, os.kill, (dead, signal.SIGKILL)).start()
        state = collector.state_dict()
        assert len(state["workers"]) == 2
        assert collector.stats()["restarts"] == 1
        gather(collector, 3)
        assert all_accounted_for(collector.stats())


def test_restarts_are_bounded():
    with troubled("distributed", on_worker_failure="restart", max_restarts=1) as collector:
        gather(collector, 2)
        with pytest.raises(WorkerDied) as raised:  # noqa: PT012
            for _ in range(2):
                os.kill(host_pids(collector)[0], signal.SIGKILL)
                gather(collector, 50)
        assert "max_restarts=1 are used up" in "".join(raised.value.__notes__)


def test_a_host_whose_collector_raised_is_opened_anew_in_its_process(tmp_path):
    trouble = {"only": 0, "where": "step", "at": 30, "once": str(tmp_path / "once")}
    with troubled(
        "distributed", trouble=trouble, init_random_frames=40, on_worker_failure="restart"
    ) as collector:
        before = host_pids(collector)
        drawn = [(collector.next()["policy_version"] < 0).any().item() for _ in range(5)]
        assert drawn == [True, False, False, False, False]
        stats = collector.stats()
        assert stats["restarts"] == 1
        assert stats["dropped"] > 0
        assert all_accounted_for(stats)
        assert host_pids(collector) == before


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_stopped_host_is_named_when_its_time_is_over(kind):
    with troubled(kind, timeout=10.0) as collector:
        gather(collector, 2)
        pid = host_pids(collector)[1]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerError, match="worker 1 "):
                gather(collector)
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_host_that_hangs_is_named_with_what_it_does():
    trouble = {"only": 1, "where": "step", "at": 30, "what": "hang"}
    with troubled("distributed", trouble=trouble, timeout=10.0) as collector:
        with pytest.raises(WorkerTimeout, match=r"worker 1 .* hangs: it owes a batch"):
            gather(collector)
        collector.shutdown(timeout=0.5)


def test_a_killed_worker_of_a_collector_is_replaced_alone():
    with troubled("distributed", workers=2, on_worker_failure="restart") as collector:
        gather(collector, 2)
        hold(collector.policy, 7)
        collector.update_policy_weights_()
        before = host_pids(collector)
        os.kill(before[2], signal.SIGKILL)
        gather(collector, 3)
        batch, stats = collector.next(), collector.stats()
        assert (batch["weight"] == 7).all()
        assert (batch["policy_version"] == 1).all()
        assert [one["restarts"] for one in stats["workers"]] == [0, 0, 1, 0]
        after = [one["pid"] for one in stats["workers"]]
        assert [a == b for a, b in zip(after, before, strict=True)] == [True, True, False, True]
        assert all_accounted_for(stats)


def test_a_worker_that_raises_is_replaced_alone_in_its_process(tmp_path):
    trouble = {"only": 3, "where": "step", "at": 30, "once": str(tmp_path / "once")}
    with troubled(
        "distributed", trouble=trouble, workers=2, on_worker_failure="restart"
    ) as collector:
        before = host_pids(collector)
        gather(collector, 8)
        stats = collector.stats()
        assert [one["restarts"] for one in stats["workers"]] == [0, 0, 0, 1]
        assert all_accounted_for(stats)
        assert host_pids(collector) == before


def test_ranks_that_somebody_else_started_cannot_be_replaced_from_here():
    with troubled("distributed", on_worker_failure="restart") as collector:
        gather(collector, 1)
        processes, collector.launcher._processes = collector.launcher._processes, None
        try:
            os.kill(host_pids(collector)[0], signal.SIGKILL)
            with pytest.raises(WorkerDied) as raised:
                gather(collector)
            assert "--max-restarts" in "".join(raised.value.__notes__)
        finally:
            collector.launcher._processes = processes


@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_twice_leaves_no_host(kind):
    collector = troubled(kind)
    gather(collector, 1)
    pids = host_pids(collector)
    collector.shutdown()
    collector.shutdown()
    wait_until(lambda: not any(psutil.pid_exists(pid) and not is_gone(pid) for pid in pids))
    with pytest.raises(RuntimeError, match="was shut down"):
        collector.next()
