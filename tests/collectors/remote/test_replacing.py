"""Hosts may be lost together, and a replacement may be lost at once: restarts pay for both."""

from __future__ import annotations

import functools
import os
import signal

import pytest

from tests.collectors.remote.support import KINDS, host_pids
from tests.collectors.remote.test_failures import gather, troubled
from tests.collectors.support import all_accounted_for


@pytest.mark.parametrize("kind", KINDS)
def test_hosts_that_are_killed_together_are_all_replaced(kind):
    with troubled(kind, on_worker_failure="restart", max_restarts=2) as collector:
        gather(collector, 2)
        dead = host_pids(collector)
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        gather(collector, 3)
        assert not {*dead} & {*host_pids(collector)}
        stats = collector.stats()
        assert [host["restarts"] for host in stats["workers"]] == [1, 1]
        assert all_accounted_for(stats)


def test_a_replacement_that_ends_before_it_is_met_costs_a_restart(tmp_path):
    with troubled("distributed", on_worker_failure="restart", max_restarts=2) as collector:
        gather(collector, 2)
        fleet = collector.fleet
        fleet._serve = functools.partial(_end_at_first, str(tmp_path / "once"), fleet._serve)
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
