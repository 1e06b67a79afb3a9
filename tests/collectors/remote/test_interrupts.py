"""An interrupt (Ctrl-C) anywhere in a call ends a remote collector, and leaves no process."""

from __future__ import annotations

import pytest

from tests.collectors.remote.support import KINDS, build
from tests.conftest import child_processes
from tests.interrupts import Interrupt, places

EACH = pytest.mark.parametrize("kind", KINDS)
FEW = pytest.param(3, id="few", marks=pytest.mark.slow)
ALL = pytest.param(None, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
CODE = ("sync/remote", "collectors/remote", "collectors/base.py", "collectors/pooled.py")


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


@pytest.mark.parametrize("most", [pytest.param(1, id="one"), FEW, ALL])
@pytest.mark.parametrize("call", CALLS)
@EACH
def test_an_interrupted_call_ends_the_collector(kind, call, most):
    before = child_processes()
    counted, _ = build(kind, "one", timeout=10.0)
    with counted:
        counted.next()
        numbers = places(lambda: CALLS[call](counted), *CODE, most=most)
    for number in numbers:
        collector, _ = build(kind, "one", timeout=10.0)
        with collector:
            collector.next()
            with Interrupt(number, *CODE) as interrupt:
                CALLS[call](collector)
            if interrupt.fired and collector._interrupted:
                with pytest.raises(RuntimeError, match="because a call was interrupted"):
                    collector.next()
        assert child_processes() <= before, interrupt.where
