"""An interrupt (Ctrl-C) anywhere in a call ends a remote collector, and leaves no process."""

from __future__ import annotations

import pytest

from tests.collectors.remote.support import KINDS, build
from tests.conftest import child_processes
from tests.interrupts import Interrupt, places

CODE = (
    "sync/remote",
    "collectors/remote",
    "collectors/base.py",
    "collectors/workers/pool.py",
)
MOST = [1, pytest.param(None, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]


def rest(collector):
    with collector.pause():
        pass


CALLS = {
    "next": lambda collector: collector.next(),
    "update": lambda collector: collector.update_policy_weights_(),
    "stats": lambda collector: collector.stats(),
    "state": lambda collector: collector.state_dict(),
    "rest": rest,
}


@pytest.mark.parametrize("most", MOST, ids=["one place of each call", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_call_ends_the_collector(kind, most):
    before = child_processes()
    counted, _ = build(kind, "one")
    with counted:
        counted.next()
        numbers = [
            (call, number)
            for call in CALLS.values()
            for number in places(lambda call=call: call(counted), *CODE, most=most)
        ]
    for call, number in numbers:
        collector, _ = build(kind, "one")
        with collector:
            collector.next()
            with Interrupt(number, *CODE) as interrupt:
                call(collector)
            if interrupt.fired and collector._interrupted:
                with pytest.raises(RuntimeError, match="because a call was interrupted"):
                    collector.next()
        assert child_processes() <= before, interrupt.where
