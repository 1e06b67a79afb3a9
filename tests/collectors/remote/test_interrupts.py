"""An interrupt (Ctrl-C) anywhere in a call: a remote collector goes on as if there was none."""

from __future__ import annotations

import pytest
import torch

from tests.collectors.remote.support import KINDS, build
from tests.collectors.support import Checker, all_accounted_for
from tests.interrupts import Interrupt, places

EACH = pytest.mark.parametrize("kind", KINDS)
FEW = pytest.param(60, id="few")
ALL = pytest.param(None, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
# Where something may be half asked for; what waits and counts is the same for all collectors.
CODE = ("sync/remote", "collectors/remote", "collectors/base.py")


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


@pytest.mark.parametrize("most", [FEW, ALL])
@pytest.mark.parametrize("call", CALLS)
@EACH
def test_after_an_interrupted_call_every_frame_is_what_happened(kind, call, most):
    collector, _ = build(kind, "one", timeout=10.0)
    with collector:
        checker = Checker([1, 1])

        def act():
            hold(collector)
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
            hold(collector)
            collector.update_policy_weights_()
            checker.check(collector.next())
            stats = collector.stats()
            assert all_accounted_for(stats), interrupt.where
            assert stats["delivered"] == checker.counts["frames"], interrupt.where


def hold(collector):
    """Have the policy be the next version's."""
    with torch.no_grad():
        collector.policy.number.fill_(collector.policy_version + 1)
