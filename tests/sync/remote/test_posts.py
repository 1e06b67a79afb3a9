"""A version that the engine cannot take is reported as one that failed, and bars no other's way."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from sync import WorkerRaised
from tests.sync.remote.test_at_once import meet, send


def refuse_once(engine):
    """Have the engine's store be full when it is given the next block."""

    def full(block):
        del engine.parcel
        raise MemoryError("the store is full")

    engine.parcel = full


@pytest.mark.parametrize("waits", [False, True], ids=["sent at once", "sent after an answer"])
def test_a_version_that_cannot_be_posted_is_reported_and_the_next_is_applied(waits):
    with meet() as (scheme, ours, receiver, theirs):
        if waits:
            with receiver.reading():
                send(scheme, ours, 1)
                send(scheme, ours, 2)
                refuse_once(scheme._engine)
        else:
            refuse_once(scheme._engine)
            send(scheme, ours, 2)
        with pytest.raises(WorkerRaised, match=r"the store is full\nThe version could not be sent"):
            scheme.wait_async()
        assert receiver.version == (1 if waits else 0)
        send(scheme, ours, 3)
        scheme.wait_async()
        assert (theirs.number.item(), receiver.version) == (3, scheme.version)


def test_a_version_that_is_lost_on_its_way_does_not_hold_up_the_next():
    with meet() as (scheme, ours, receiver, theirs):
        hub, lost = scheme._transports[0].hub, Future()
        post, hub.post = hub.post, lambda *args: lost
        send(scheme, ours, 1)
        hub.post = post
        send(scheme, ours, 2)
        lost.set_exception(RuntimeError("gone astray"))
        with pytest.raises(WorkerRaised, match="gone astray"):
            scheme.wait_async()
        scheme.wait_async()
        assert (theirs.number.item(), receiver.version) == (2, 2)
