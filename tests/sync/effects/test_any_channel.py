"""Wire formats and slow links, around a channel that knows nothing of them."""

from __future__ import annotations

import pytest
import torch

from sync import WIRES, Layout, Link
from sync.channel_interface import APPLIED, FAILED, JOINED, LEFT, LOST, Answer
from sync.effects.pipeline import Parcel, Pipeline
from sync.effects.rounding import RoundedFormat
from sync.effects.slow_link import SlowLinkSender
from tests.sync.effects.fakes import FakeReceiver, FakeSender

MS = 1_000_000
NUM_WORKERS = 3
LAYOUT = Layout.of(
    {"weight": torch.zeros(20, 10), "steps": torch.zeros((), dtype=torch.long)}, b"x"
)
LOSSY = ("bfloat16", "float16", "int8")
COMBINATIONS = [
    pytest.param(wire, has_link, id=f"{wire}, {'link' if has_link else 'no link'}")
    for has_link in (False, True)
    for wire in WIRES
]


class Core:
    """Does with the outermost channel what a sender and its receivers do."""

    def __init__(self, wire, has_link, clock):
        encoder, self.wire, self.clock = RoundedFormat.of(wire, LAYOUT), wire, clock
        self.mechanism = FakeSender(encoder.layout if encoder else LAYOUT, NUM_WORKERS)
        self.channel = self.mechanism
        if has_link:
            self.channel = SlowLinkSender(self.mechanism, Link(latency_ms=5))
        self.pipeline = Pipeline(self.channel, LAYOUT, encoder=encoder)
        self.receivers = [self.receiver(worker) for worker in range(NUM_WORKERS)]
        self.last, self.version, self.heard = {}, -1, []

    def receiver(self, worker):
        receiver = FakeReceiver(self.mechanism, worker, RoundedFormat.of(self.wire, LAYOUT))
        receiver.open()
        return receiver

    def publish(self, value, workers):
        taken = self.pipeline.taken(self.last.values())
        block = self.pipeline.free_block(taken)
        self.version += 1
        for view in block.views:
            view.fill_(value)
        block.stamp(self.version, b"extra")
        self.last |= dict.fromkeys(workers, block)
        for outgoing in self.pipeline.prepare([Parcel(block, workers)], taken):
            self.channel.publish(outgoing.block, outgoing.parcel.workers)

    def poll(self):
        for answer in self.channel.poll():
            self.heard.append(answer)
            if answer.kind == JOINED and answer.worker in self.last:
                again = Parcel(self.last[answer.worker], [answer.worker])
                self.channel.publish(self.pipeline.write(again).block, again.workers)

    def take(self, worker):
        """Let time pass until the newest version is there; what the worker takes."""
        newest = None
        for _ in range(3):
            self.poll()
            while (whole := self.receivers[worker].take()) is not None:
                assert all((view == view.flatten()[0]).all() for view in whole.views)
                newest = whole.version, [float(view.flatten()[0]) for view in whole.views]
                assert whole.extra == b"extra"
                answer = Answer(worker, APPLIED, whole.version, whole.published_ns)
                self.receivers[worker].answer(answer)
            self.clock.now += 5 * MS
        return newest


@pytest.mark.parametrize(("wire", "has_link"), COMBINATIONS)
def test_versions_reach_the_addressed_workers_and_are_acknowledged(wire, has_link, clock):
    core = Core(wire, has_link, clock)
    core.poll()
    for value, workers in [(1, [0, 1, 2]), (2, [0]), (3, [1, 2]), (3, [0, 1, 2]), (4, [2])]:
        core.publish(value, workers)
        published_ns = core.last[workers[0]].published_ns
        for worker in range(NUM_WORKERS):
            expected = (core.version, [value, value]) if worker in workers else None
            assert core.take(worker) == expected
            applied = [a for a in core.heard if a.kind == APPLIED and a.worker == worker]
            assert (applied[-1].version == core.version) == (worker in workers)
            if worker in workers:
                assert applied[-1].published_ns == published_ns
                assert applied[-1].return_ns == (5 * MS if has_link else 0)


@pytest.mark.parametrize(("wire", "has_link"), COMBINATIONS)
def test_a_process_that_takes_a_place_gets_the_last_version_again(wire, has_link, clock):
    core = Core(wire, has_link, clock)
    core.poll()
    for value in (1, 2):
        core.publish(value, [0, 1])
        assert core.take(0) == core.take(1) == (value - 1, [value, value])
    core.publish(3, [0, 1])
    published_ns = core.last[1].published_ns
    core.mechanism.said.append(Answer(1, LOST, text="died"))
    core.poll()
    assert core.heard[-1].kind == LOST
    core.receivers[1] = core.receiver(1)
    assert core.take(1) == (2, [3, 3])
    assert core.heard[-1].published_ns == published_ns
    assert core.take(0) == (2, [3, 3])
    core.publish(4, [0, 1])
    assert core.take(0) == core.take(1) == (3, [4, 4])


@pytest.mark.parametrize(("wire", "has_link"), COMBINATIONS)
def test_everything_else_is_passed_on(wire, has_link, clock):
    core = Core(wire, has_link, clock)
    core.poll()
    for worker, kind in enumerate([LEFT, LOST, FAILED]):
        core.mechanism.said.append(Answer(worker, kind, text="why"))
        core.poll()
        clock.now += 5 * MS
        core.poll()
        assert core.heard[-1][:2] == (worker, kind)
        assert core.heard[-1].text == "why"
    assert core.channel.mechanism == "lists"
    assert core.channel.handout == "address"
    assert (core.channel.due_ns(), core.channel.fds()) == (None, [])
    assert ("link" in core.channel.about(0).statistics) == (has_link)
    assert not core.receivers[0].has_news()
    assert not core.receivers[0].sender_gone()
    core.channel.close()
    assert core.receivers[0].sender_gone()


@pytest.mark.parametrize("wire", LOSSY)
def test_a_refused_version_reaches_nobody_and_its_block_is_used_again(wire, clock):
    core = Core(wire, False, clock)
    core.poll()
    core.publish(1, [0])
    for _ in range(3):
        taken = core.pipeline.taken([core.last[0]])
        block = core.pipeline.free_block(taken)
        block.views[0].fill_(torch.inf if wire == "int8" else torch.finfo(torch.float32).max)
        with pytest.raises(ValueError, match="send refused: 'weight' holds 200"):
            core.pipeline.prepare([Parcel(block, [0])], taken)
    assert core.take(0) == (0, [1, 1])
    assert len(core.pipeline._pool) == 2


def test_a_link_is_busy_while_anything_is_under_way(clock):
    core = Core("float32", True, clock)
    core.poll()
    core.publish(1, [0])
    assert core.channel.due_ns() == clock.now + 5 * MS
    clock.now += 5 * MS
    core.poll()
    assert core.channel.due_ns() is None
    core.receivers[0].answer(Answer(0, APPLIED, 0, applied_ns=clock.now))
    core.poll()
    assert core.channel.due_ns() == clock.now + 5 * MS
    core.channel.close()
    assert core.channel.due_ns() is None
