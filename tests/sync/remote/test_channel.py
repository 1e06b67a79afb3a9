"""What a remote channel does with what the engine tells it, with engines that the test moves."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from torch import nn

from sync import RPCWeightSyncScheme, WorkerRaised
from sync.channel_interface import APPLIED, FAILED, JOINED, LEFT, LOST, Answer
from sync.model.binding import Binding
from sync.model.block import NEVER
from sync.model.strategy import WeightStrategy
from sync.remote.engine import Engine, PeerDied
from sync.remote.inbox import SUPERSEDED, Reply, deliver
from sync.remote.remote_sender import RemoteSender
from tests.sync.remote.support import Model, joined, send


class Scripted(Engine):
    """Notes what is delivered; the test answers."""

    num_peers = 2

    def __init__(self):
        self.deliveries = []
        self.dead = {}

    def call(self, peer, function, *args):
        future = Future()
        if function is deliver:
            block, _, _, owner = args
            self.deliveries.append((peer, block, owner, future))
        else:
            future.set_result(None)
        return future

    def gone(self, peer):
        return self.dead.get(peer)

    def describe(self, peer):
        return f"peer {peer}"

    def close(self):
        """Nothing was started."""


class Sending:
    """A sender channel and its engine."""

    def __init__(self):
        self.model = nn.Linear(3, 2)
        self.binding = Binding(self.model, WeightStrategy())
        self.engine = Scripted()
        self.channel = RemoteSender(self.binding.layout, 2, self.engine)

    def publish(self, version, workers=(0,), keep=()):
        block = self.channel.free_block(keep)
        self.binding.pack(block, version)
        self.channel.publish(block, workers)
        return block

    def join(self, worker=0, owner="a"):
        """Have a worker be there; a first version was published to it."""
        self.answer(reply(JOINED, owner, pid=7))
        assert [(a.worker, a.kind, a.pid) for a in self.channel.poll()] == [(worker, JOINED, 7)]

    def answer(self, found, at=-1):
        worker, _, _, future = self.engine.deliveries[at]
        future.set_result(Reply(found.answer._replace(worker=worker), found.owner))

    def fail(self, error, at=-1):
        self.engine.deliveries[at][-1].set_exception(error)

    def kinds(self):
        return [(answer.kind, answer.version) for answer in self.channel.poll()]

    def delivered(self):
        """The blocks' versions; None for a question who is there."""
        return [_version(block) for _, block, _, _ in self.engine.deliveries]


def reply(kind, owner, **numbers):
    return Reply(Answer(0, kind, **numbers), owner)


def _version(block):
    return int(block[:8].view(np.int64)[0]) if block.size else None


@pytest.fixture
def sending():
    found = Sending()
    yield found
    found.channel.close()


@pytest.fixture
def met(sending):
    """A sender whose worker 0 is there and uses version 0."""
    sending.publish(0)
    sending.join()
    sending.publish(0)
    sending.answer(reply(APPLIED, "a", version=0))
    assert sending.kinds() == [(APPLIED, 0)]
    return sending


def test_a_worker_is_asked_for_before_it_is_sent_anything(sending):
    sending.publish(0)
    assert sending.delivered() == [None]
    sending.join()
    assert sending.delivered() == [None]  # the core publishes again to whoever joined
    sending.publish(0)
    assert sending.delivered() == [None, 0]
    assert sending.engine.deliveries[-1][2] == "a"


def test_one_version_is_on_its_way_and_the_newest_waits(met):
    for version in (1, 2, 3):
        met.publish(version)
    assert met.delivered()[2:] == [1]
    assert met.channel.due_ns() is not None
    met.answer(reply(APPLIED, "a", version=1))
    assert met.kinds() == [(APPLIED, 1)]
    assert met.delivered()[2:] == [1, 3]
    assert met.channel.due_ns() is None


def test_times_are_counted_by_this_machines_clock(met):
    block = met.publish(1)
    published = block.published_ns
    met.answer(reply(APPLIED, "a", version=1, seen_ns=10, applied_ns=15, retries=2))
    (answer,) = met.channel.poll()
    assert (answer.published_ns, answer.retries) == (published, 2)
    assert answer.applied_ns - answer.seen_ns == 5
    assert answer.seen_ns > published


def test_blocks_are_not_written_while_they_are_sent_wait_or_are_kept(met):
    first = met.publish(1)
    second = met.publish(2)
    assert met.channel.free_block([]) not in (first, second)
    met.answer(reply(APPLIED, "a", version=1))
    met.kinds()
    assert met.channel.free_block([second]) is not second
    assert met.channel.free_block([second]) is met.channel.free_block([second])
    met.answer(reply(APPLIED, "a", version=2))
    met.kinds()
    pool = {id(met.channel.free_block([]))}
    assert pool <= {id(first), id(second), *(id(b) for b in met.channel._pool)}


def test_a_block_whose_peer_was_lost_is_never_written_again(met):
    block = met.publish(1)
    met.fail(PeerDied("peer 0 is gone: it gave no sign of life"))
    assert met.kinds() == [(LOST, NEVER)]
    for version in range(2, 6):
        assert met.publish(version, workers=(1,)) is not block


def test_a_lost_worker_is_reported_once_and_then_nothing_is_sent_to_it(met):
    met.publish(1)
    met.engine.dead[0] = "its host is gone"
    (answer,) = met.channel.poll()
    assert (answer.kind, answer.text) == (LOST, "died: peer 0 is gone: its host is gone")
    met.answer(reply(APPLIED, "a", version=1))
    assert met.kinds() == []
    number = len(met.engine.deliveries)
    met.publish(2)
    assert met.kinds() == []
    assert len(met.engine.deliveries) == number


def test_another_process_in_a_lost_ones_place_is_asked_for(met):
    met.publish(1)
    met.engine.dead[0] = "it was killed"
    assert met.kinds() == [(LOST, NEVER)]
    del met.engine.dead[0]
    met.channel.meet(0)
    met.fail(PeerDied("it was killed"), at=-2)  # what was on its way to the predecessor
    assert met.kinds() == []
    met.join(owner="b")
    met.publish(1)
    assert met.engine.deliveries[-1][2] == "b"


def test_a_successor_that_nobody_was_told_of_joins_when_a_version_comes(met):
    met.publish(1)
    met.answer(reply(JOINED, "b", pid=8))
    assert met.kinds() == [(JOINED, NEVER)]
    met.publish(1)
    assert met.engine.deliveries[-1][2] == "b"


def test_a_worker_that_is_there_still_does_not_join_again(met):
    met.publish(1)
    met.channel.meet(0)
    met.answer(reply(JOINED, "a"))
    met.answer(reply(APPLIED, "a", version=1), at=-2)
    assert met.kinds() == [(APPLIED, 1)]


def test_a_worker_that_left_is_told_and_asked_for_when_it_is_sent_something(met):
    met.publish(1)
    met.answer(reply(LEFT, ""))
    assert met.kinds() == [(LEFT, NEVER)]
    met.publish(2)
    assert met.delivered()[-1] is None
    met.answer(reply(SUPERSEDED, ""))
    assert met.kinds() == []


def test_a_model_that_can_take_nothing_ends_the_question_who_is_there(sending):
    sending.publish(0)
    sending.answer(reply(FAILED, "a", text="another shape"))
    (answer,) = sending.channel.poll()
    assert (answer.kind, answer.version, answer.text) == (FAILED, NEVER, "another shape")
    assert sending.channel.poll() == []
    assert len(sending.engine.deliveries) == 1


def test_a_block_is_shared_once_for_all_workers(sending):
    shared = []
    share = sending.engine.share
    sending.engine.share = lambda block: shared.append(block.numel()) or share(block)
    sending.publish(0, workers=(0, 1))
    sending.answer(reply(JOINED, "a"), at=0)
    sending.answer(reply(JOINED, "b"), at=1)
    sending.channel.poll()
    sending.publish(1, workers=(0, 1))
    assert shared == [sending.binding.layout.nbytes]
    nbytes = 2 * sending.binding.layout.nbytes
    assert sending.channel.moved == {"unnamed": {"versions": 2, "bytes": nbytes}}


# -- with a worker in this process


def refuse_once(engine):
    """Have the engine's store be full when it is given the next block."""

    def full(block):
        del engine.share
        raise MemoryError("the store is full")

    engine.share = full


@pytest.mark.parametrize("waits", [False, True], ids=["sent at once", "sent after an answer"])
def test_a_version_that_cannot_be_shared_is_reported_and_the_next_is_applied(waits):
    with joined(Model(), Model()) as (scheme, ours, receiver, theirs):
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
    with joined(Model(), Model()) as (scheme, ours, receiver, theirs):
        engine, lost = scheme._engine, Future()
        engine.call = lambda *args: lost
        send(scheme, ours, 1)
        del engine.call
        send(scheme, ours, 2)
        lost.set_exception(RuntimeError("gone astray"))
        with pytest.raises(WorkerRaised, match="gone astray"):
            scheme.wait_async()
        scheme.wait_async()
        assert (theirs.number.item(), receiver.version) == (2, 2)


def test_a_model_in_use_is_left_alone_and_has_the_version_afterwards():
    with joined(Model(), Model()) as (scheme, ours, receiver, theirs):
        with receiver.reading() as version:
            send(scheme, ours, 1)
            with pytest.raises(Exception, match="did not acknowledge version 1"):
                scheme.wait_async(timeout=0.5)
            assert (theirs.number.item(), version, receiver.version) == (0, 0, 0)
        scheme.wait_async()
        assert (theirs.number.item(), receiver.version) == (1, 1)


def test_after_the_receiver_has_shut_down_nothing_is_applied():
    with joined(Model(), Model()) as (scheme, ours, receiver, theirs):
        receiver.shutdown()
        send(scheme, ours, 1)
        with pytest.raises(Exception, match="left"):
            scheme.wait_async()
        assert theirs.number.item() == 0


def test_a_scheme_needs_its_engine_before_it_is_initialised():
    engine, scheme = Scripted(), RPCWeightSyncScheme()
    with pytest.raises(RuntimeError, match=r"has no engine: call attach\(engine\) before"):
        scheme.init_on_sender(model=nn.Linear(1, 1), devices=["cpu"])
    scheme.attach(engine)
    scheme.init_on_sender(model=nn.Linear(1, 1), devices=["cpu"])
    with pytest.raises(RuntimeError, match=r"attach\(engine\) before init_on_sender"):
        scheme.attach(engine)
    scheme.shutdown()
