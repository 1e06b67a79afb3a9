"""Hosts may be lost together, and a replacement may be lost at once: restarts pay for both."""

from __future__ import annotations

import functools
import os
import signal
import threading

import pytest

from collectors import ReplayBuffer
from tests.collectors.remote.support import REPLACING, host_pids, make
from tests.collectors.remote.test_failures import gather, troubled
from tests.collectors.support import all_accounted_for
from tests.collectors.troubled import Plain, Troubled, hold, wait_until
from tests.conftest import child_processes


def alone(**options):
    """One host that is replaced when it fails."""
    options = {"num_collectors": 1, "sync": True, "frames_per_batch": 40, **options}
    return make("distributed", Troubled, Plain(), on_worker_failure="restart", **options)


def lose_all_and_go_on(collector):
    """Kill both hosts, and see that each is replaced once."""
    dead = host_pids(collector)
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    gather(collector, 3)
    assert not {*dead} & {*host_pids(collector)}
    stats = collector.stats()
    assert [host["restarts"] for host in stats["workers"]] == [1, 1]
    assert all_accounted_for(stats)


@pytest.mark.parametrize("kind", REPLACING)
def test_hosts_that_are_killed_together_are_all_replaced(kind):
    with troubled(kind, on_worker_failure="restart", max_restarts=2) as collector:
        gather(collector, 2)
        lose_all_and_go_on(collector)


def test_an_interrupt_while_a_host_is_replaced_ends_the_collector(monkeypatch):
    before = child_processes()
    with alone() as collector:
        gather(collector, 1)
        os.kill(host_pids(collector)[0], signal.SIGKILL)
        monkeypatch.setattr("collectors.workers.pool.WorkerPool._connect", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            gather(collector)
        with pytest.raises(RuntimeError, match="shut down because a call was interrupted"):
            collector.next()
        assert child_processes() <= before


def _interrupt(pool, handles):
    raise KeyboardInterrupt


def test_a_replacement_that_ends_before_it_is_met_costs_a_restart(tmp_path):
    options = {"on_worker_failure": "restart", "max_restarts": 2, "start_timeout": 30.0}
    with troubled("distributed", **options) as collector:
        gather(collector, 2)
        launcher = collector.launcher
        launcher._serve = functools.partial(_end_at_first, str(tmp_path / "once"), launcher._serve)
        os.kill(host_pids(collector)[0], signal.SIGKILL)
        gather(collector, 3)
        stats = collector.stats()
        assert [host["restarts"] for host in stats["workers"]] == [2, 0]
        assert all_accounted_for(stats)


def _end_at_first(path, serve, *args, **options):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        serve(*args, **options)
    else:
        os._exit(3)


def test_frames_are_counted_once_however_often_a_host_could_not_be_replaced():
    with alone(max_restarts=3, start_timeout=30.0) as collector:
        gather(collector, 2)
        plain, tries = collector.launcher.replace, iter(("full", "full"))

        def replace(host):
            if (reason := next(tries, None)) is not None:
                raise OSError(reason)
            plain(host)

        collector.launcher.replace = replace
        os.kill(host_pids(collector)[0], signal.SIGKILL)
        gather(collector, 2)
        stats = collector.stats()
        assert [host["restarts"] for host in stats["workers"]] == [3]
        assert all_accounted_for(stats)
        assert stats["dropped"] <= 40  # of the batch that was under way


@pytest.mark.parametrize("kind", REPLACING)
def test_weights_published_right_after_a_host_died_reach_its_successor(kind):
    with troubled(kind, on_worker_failure="restart", max_restarts=1) as collector:
        gather(collector, 2)
        hold(collector.policy, 7)
        os.kill(host_pids(collector)[1], signal.SIGKILL)
        collector.update_policy_weights_()
        batch = collector.next()
        assert (batch["weight"] == 7).all()
        assert (batch["policy_version"] == 1).all()
        stats = collector.stats()
        assert [host["restarts"] for host in stats["workers"]] == [0, 1]
        assert all_accounted_for(stats)


def test_a_host_is_replaced_once_whoever_else_hears_of_its_death_meanwhile():
    buffer = ReplayBuffer(1000)
    with alone(replay_buffer=buffer, max_restarts=3, start_timeout=20.0) as collector:
        launcher, begun, again = collector.launcher, threading.Event(), threading.Event()
        plain = launcher.replace

        def replace(host):
            if begun.is_set():
                again.set()
            begun.set()
            again.wait(0.5)
            plain(host)

        launcher.replace = replace
        collector.start()
        os.kill(host_pids(collector)[0], signal.SIGKILL)
        assert begun.wait(30.0)
        hold(collector.policy, 7)
        collector.update_policy_weights_()
        written = buffer.written
        wait_until(lambda: buffer.written > written + 80)
        assert not again.is_set()
        assert collector.stats()["restarts"] == 1
        frames = buffer[range(len(buffer))]
        assert (frames["weight"] == 7 * frames["policy_version"]).all()
        assert frames["policy_version"].max() == 1
