"""An interrupt (Ctrl-C) anywhere in a call ends the collector, and leaves nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.collectors.support import COLLECTORS, CodeEnv, CodePolicy
from tests.conftest import child_processes
from tests.interrupts import Interrupt, nothing_left, places

EACH = pytest.mark.parametrize("kind", COLLECTORS)
FEW = pytest.param(3, id="few")
ALL = pytest.param(None, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
CODE = ("sync", "collectors")


def make(kind: str, policy: Any = None) -> Any:
    told = [{"worker": worker} for worker in range(2)]
    how = {"num_workers": 2, "create_env_kwargs": told, "start_method": "fork"}
    options = {"create_env_kwargs": told[0]} if kind == "single" else how
    return COLLECTORS[kind](CodeEnv, policy or CodePolicy(), frames_per_batch=12, **options)


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
    "state": lambda collector: collector.state_dict(),
}


@pytest.mark.parametrize(
    ("kind", "call", "most"),
    [
        *((kind, call, 3) for kind, call in zip((*COLLECTORS, "async"), CALLS, strict=True)),
        *(pytest.param(kind, call, None, marks=ALL.marks) for kind in COLLECTORS for call in CALLS),
    ],
)
def test_an_interrupted_call_ends_the_collector(kind, call, most, capfd):
    def act(collector: Any) -> None:
        collector.next()
        CALLS[call](collector)

    with make(kind) as counted:
        act(counted)
        numbers = places(lambda: CALLS[call](counted), *CODE, most=most)
    for number in numbers:
        with nothing_left() as check:
            collector = make(kind)
            collector.next()
            with Interrupt(number, *CODE) as interrupt:
                CALLS[call](collector)
            if not collector._interrupted:  # it came before the call or after it, or not at all
                collector.shutdown()
            with pytest.raises(RuntimeError, match="the collector was shut down"):
                collector.next()
            del collector
            check(f"{number}: {interrupt.where}")
    assert capfd.readouterr() == ("", "")


@EACH
def test_an_interrupt_within_a_pause_leaves_the_collector_as_it_was(kind):
    with make(kind) as collector:
        with pytest.raises(KeyboardInterrupt), collector.pause():
            raise KeyboardInterrupt
        collector.next()
