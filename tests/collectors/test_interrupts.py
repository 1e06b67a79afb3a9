"""An interrupt (Ctrl-C) anywhere: a collector goes on as if there was none, or leaves nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from tests.collectors.support import Checker, CodeEnv, CodePolicy, all_accounted_for
from tests.conftest import child_processes
from tests.interrupts import Interrupt, nothing_left, places

KINDS = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}
EACH = pytest.mark.parametrize("kind", KINDS)
FEW = pytest.param(3, id="few")
ALL = pytest.param(None, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
CODE = ("sync", "collectors")


def make(kind: str, policy: Any = None) -> Any:
    told = [{"worker": worker} for worker in range(2)]
    how = {"num_workers": 2, "create_env_kwargs": told, "start_method": "fork"}
    options = {"create_env_kwargs": told[0]} if kind == "single" else how
    return KINDS[kind](CodeEnv, policy or CodePolicy(), frames_per_batch=12, **options)


def live(kind: str) -> None:
    with make(kind) as collector:
        collector.next()
        collector.update_policy_weights_()
        collector.next()


@pytest.mark.parametrize("most", [FEW, ALL])
@EACH
def test_a_life_that_is_interrupted_anywhere_leaves_nothing(kind, most, capfd):
    live(kind)
    for number in places(lambda: live(kind), *CODE, most=most):
        with nothing_left() as check:
            with Interrupt(number, *CODE) as interrupt:
                live(kind)
            check(f"{number}: {interrupt.where}")
    assert capfd.readouterr() == ("", "")


@EACH
def test_a_shutdown_that_was_interrupted_is_finished_by_the_next(kind):
    before = child_processes()
    collector = make(kind)
    collector.next()
    with Interrupt(2, *CODE) as interrupt:
        collector.shutdown()
    assert interrupt.fired
    collector.shutdown()
    assert child_processes() == before
    with pytest.raises(RuntimeError, match="between init_on_sender"):
        collector.publisher.schemes["policy"].send()


CALLS = {
    "next": lambda collector: collector.next(),
    "update": lambda collector: collector.update_policy_weights_(),
    "stats": lambda collector: collector.stats(),
}


@pytest.mark.parametrize("most", [FEW, ALL])
@pytest.mark.parametrize("call", CALLS)
@EACH
def test_after_an_interrupted_call_every_frame_is_what_happened(kind, call, most):
    policy = CodePolicy()
    with make(kind, policy) as collector:
        alone = kind == "single"  # it starts new episodes
        checker = Checker([1] * collector.num_workers, cuts=alone, skips=alone)

        def act() -> None:
            hold(policy, collector.policy_version + 1)
            found = CALLS[call](collector)
            if call == "next":
                checker.check(found)

        for _ in range(3):
            act()
        for number in places(act, *CODE, most=most):
            with Interrupt(number, *CODE) as interrupt:
                act()
            for _ in range(2):
                checker.check(collector.next())
            hold(policy, collector.policy_version + 1)
            collector.update_policy_weights_()
            for _ in range(2):
                checker.check(collector.next())
            stats = collector.stats()
            assert all_accounted_for(stats), interrupt.where
            assert stats["delivered"] == checker.counts["frames"], interrupt.where


@EACH
def test_workers_go_on_after_a_pause_that_was_interrupted_anywhere(kind):
    with make(kind) as collector:

        def rest():
            with collector.pause():
                pass

        rest()
        for number in places(rest, "collectors"):
            with Interrupt(number, "collectors"):
                rest()
            collector.next()


def hold(policy: CodePolicy, number: int) -> None:
    with torch.no_grad():
        policy.number.fill_(number)
