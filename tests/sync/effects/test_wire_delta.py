"""The delta format brings every bit, whatever is lost on the way and whoever comes and goes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sync import Layout
from sync.channel import APPLIED, JOINED, Answer
from sync.effects.delta import DeltaDecoder, DeltaEncoder, DeltaFormat
from sync.effects.pipeline import Parcel, Pipeline
from sync.model.block import NEVER
from tests.sync.effects.fakes import FakeReceiver, FakeSender
from tests.sync.effects.test_wire import COPYING, made, publish, step
from tests.sync.support import (
    Worker,
    bits,
    held,
    receive,
    running,
    tensors,
    version,
)


def model() -> nn.Module:
    return nn.Linear(40, 30)


def last_bytes(scheme, act) -> int:
    """How many bytes an action published."""
    before = scheme.stats["bytes"]
    act()
    return scheme.stats["bytes"] - before


@COPYING
def test_what_did_not_change_takes_next_to_nothing(kind):
    weights = model()
    with running(scheme := made(kind, "delta", weights), model) as (worker,):
        assert last_bytes(scheme, lambda: publish(scheme, worker)) < 200
        with torch.no_grad():
            weights.bias[3] += 1
        assert last_bytes(scheme, lambda: publish(scheme, worker)) < 300
        assert worker.do(held) == bits(weights)
        assert scheme.stats["workers"][0]["bytes"] == scheme.stats["bytes"]


@COPYING
def test_versions_that_nobody_read_are_not_missed(kind):
    weights = model()
    with running(scheme := made(kind, "delta", weights), model) as (worker,):
        for unread in (0, 1, 2, 7, 30):
            for _ in range(unread + 1):
                step(weights)
                scheme.send_async()
            worker.tell(receive, 20)  # by message, older ones may come first
            assert worker.hear()
            while worker.do(version) < scheme.version:
                worker.do(receive, 20)
            assert worker.do(held) == bits(weights)


@COPYING
def test_workers_that_are_met_late_get_what_was_sent_meanwhile(kind):
    weights = model()
    scheme = made(kind, "delta", weights, workers=2, timeout=20)
    try:
        with (
            Worker(scheme, model, worker_idx=0) as early,
            Worker(scheme, model, worker_idx=1) as late,
        ):
            early.meet(scheme, worker_idx=0)
            for _ in range(3):
                step(weights)
                scheme.send_async()
                assert early.do(receive, 20)
            late.meet(scheme, worker_idx=1)
            for _ in range(3):
                assert early.do(held) == late.do(held) == bits(weights)
                step(weights)
                scheme.send_async()
                assert early.do(receive, 20)
                assert late.do(receive, 20)
    finally:
        scheme.shutdown()


class Pair:
    """Both ends of the format, and between them a queue in which anything may be lost."""

    def __init__(self):
        self.layout = Layout.of(dict(tensors(model())))
        delta = DeltaFormat(self.layout)
        self.channel = FakeSender(delta.layout, 1)
        self.pipeline = Pipeline(self.channel, self.layout, encoder=DeltaEncoder(delta, 1))
        self.last = None
        self.join()

    def join(self):
        """Another process becomes the worker."""
        self.decoder = DeltaDecoder(DeltaFormat(self.layout))
        self.receiver = FakeReceiver(self.channel, 0, self.decoder)
        self.receiver.open()

    def publish(self, weights, version):
        taken = self.pipeline.taken([] if self.last is None else [self.last])
        block = self.pipeline.free_block(taken)
        for view, leaf in zip(block.views, self.layout.leaves, strict=True):
            view.copy_(dict(weights.named_parameters())[leaf.name].detach())
        block.stamp(version, b"")
        self.last = block
        self.offer(block)

    def offer(self, block):
        for outgoing in self.pipeline.write(Parcel(block, [0])):
            self.pipeline.publish(outgoing)

    def poll(self):
        """Hear the worker, and send a newcomer what its predecessor was sent last."""
        if any(answer.kind == JOINED for answer in self.pipeline.poll()) and self.last is not None:
            self.offer(self.last)

    def take(self):
        whole = self.receiver.take()
        if whole is not None:
            self.receiver.answer(Answer(0, APPLIED, whole.version))
        return whole


# What may happen between two publishes, to a worker or on the way to it.
EVENTS = st.lists(
    st.sampled_from(["publish", "arrive", "lose", "acknowledge", "restart"]), max_size=60
)


@given(EVENTS, st.integers(0, 2**16))
@settings(deadline=None, max_examples=200)
def test_whatever_is_lost_every_version_that_arrives_is_decoded_right(events, seed):
    torch.manual_seed(seed)
    weights, pair, sent, taken, newest = model(), Pair(), {}, [], NEVER
    beginning = ["acknowledge", "publish", "arrive", "acknowledge"]
    for event in [*beginning, *events, "publish", "restart", "acknowledge", "arrive"]:
        if event == "publish":
            step(weights)
            newest += 1
            pair.publish(weights, newest)
            leaves = dict(weights.named_parameters())
            sent[newest] = [leaves[leaf.name].detach().clone() for leaf in pair.layout.leaves]
        elif event == "arrive" and (whole := pair.take()) is not None:
            assert all(map(torch.equal, whole.views, sent[whole.version]))
            taken.append(whole.version)
        elif event == "lose":
            del pair.channel.published[0][:1]
        elif event == "acknowledge":
            pair.poll()
        elif event == "restart":
            pair.join()
    assert taken[-1] == newest


@given(st.lists(st.booleans(), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_no_more_than_four_versions_are_kept_whatever_the_worker_reads(reads):
    weights, pair = model(), Pair()
    pair.poll()
    for number, is_read in enumerate(reads):
        pair.publish(weights, number)
        if is_read:
            while pair.take() is not None:
                pair.poll()
        else:
            pair.channel.published[0].clear()
    assert len(pair.pipeline._pool) <= 4
    assert len(pair.decoder._held) <= 2


def test_what_a_worker_applied_is_what_the_next_version_but_one_may_build_on():
    weights, pair = model(), Pair()
    pair.poll()
    blocks = []
    for number in range(4):
        pair.publish(weights, number)
        blocks.append(pair.channel.published[0][-1])
        assert pair.take() is not None
        pair.poll()
    assert [block.builds_on for block in blocks] == [NEVER, 0, 1, 2]
    assert all(block.is_base for block in blocks)


def test_workers_in_step_share_their_blocks():
    weights = model()
    scheme = made("shared_copy", "delta", weights, workers=3)
    with running(scheme, model) as workers:
        for sends in range(1, 4):
            step(weights)
            scheme.send_async()
            for worker in workers:
                assert worker.do(receive, 20)
            scheme.wait_async()
            assert scheme.stats["sends"] == 1 + sends
