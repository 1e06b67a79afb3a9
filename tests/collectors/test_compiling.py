"""A policy's first compiled call takes as long as a start may, not as long as a step may."""

from __future__ import annotations

import os
import signal
import time

import pytest

from collectors import MultiAsyncCollector, MultiSyncCollector
from sync.errors import WorkerTimeout
from tests.collectors.remote.support import make as make_remote
from tests.collectors.support import Checker, CodeEnv, CodePolicy
from tests.collectors.troubled import pids

TIMEOUT_S = 8.0


def slow_compiler(module, inputs):
    time.sleep(2 * TIMEOUT_S)
    return module.forward


def hanging_compiler(module, inputs):
    time.sleep(3600.0)


def build(kind, backend=slow_compiler, **options):
    given = {"frames_per_batch": 20, "timeout": TIMEOUT_S, "compile_policy": {"backend": backend}}
    return kind(CodeEnv, CodePolicy(), **{**given, **options})


def distributed(*args, **options):
    return make_remote("distributed", *args, num_collectors=1, **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(MultiSyncCollector, {}, marks=pytest.mark.slow),
        pytest.param(MultiAsyncCollector, {}, marks=pytest.mark.slow),
        pytest.param(distributed, {"sync": False}, marks=pytest.mark.slow),
        (distributed, {"collector_class": MultiSyncCollector}),
    ],
    ids=["sync", "async", "host of one", "host of workers"],
)
def test_a_slow_compiler_is_no_hanging_worker(kind, options):
    checker = Checker([1], cuts=True, skips=True)
    with build(kind, **options) as collector:
        collector.set_seed(1)
        checker.check(collector.next())
        checker.check(collector.next())
        assert collector.stats()["restarts"] == 0


@pytest.mark.slow
def test_a_replacement_may_compile_as_long():
    with build(MultiSyncCollector, on_worker_failure="restart") as collector:
        collector.next()
        os.kill(pids(collector)[0], signal.SIGKILL)
        assert collector.next()["is_init"][0, 0]
        assert collector.stats()["restarts"] == 1


def test_a_compiler_that_hangs_is_named_after_start_timeout():
    with pytest.raises(WorkerTimeout, match="compiling"):
        build(MultiSyncCollector, hanging_compiler, start_timeout=10.0)
