"""What a node passes on and answers, with a node below and a worker that the test moves."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from sync.channel import APPLIED, JOINED, Answer
from sync.model.block import Layout, private_snapshot
from sync.remote import engine, gloo, tree
from sync.remote.engine import PeerDied
from sync.remote.inbox import MISSING, Inbox, Reply, close_inbox, deliver
from sync.remote.tree import Branch, TreeSender, pass_on
from tests.promises.probe import wait_until

LAYOUT = Layout.of({"number": torch.zeros(8, dtype=torch.long)})
PORT = -1  # of a store that there is not
OTHER = Reply(Answer(4, APPLIED, 3), "owner 4", held_ns=5)


class Node:
    """Worker 0's node in this process, below which is worker 4, whom the test plays."""

    def __init__(self, key):
        self.key = key
        self.inbox = Inbox(key, LAYOUT, 0)
        self.inbox.open()
        self.below = []

    def post(self, function, block, *args):
        """What the node sends to the one below."""
        self.below.append(Future())
        return self.below[-1]

    def send(self, block, version=3):
        branch = Branch(0, self.inbox.owner, [Branch(4, "owner 4", [])])
        return pass_on(block, self.key, PORT, branch, version)

    def apply(self):
        assert self.inbox.take() is not None
        self.inbox.answer(Answer(0, APPLIED, 3))


@pytest.fixture
def node(request, monkeypatch):
    node = Node(request.node.name)
    monkeypatch.setitem(gloo._served, (PORT, 0), SimpleNamespace(others={4: node}))
    yield node
    node.inbox.close()
    close_inbox(node.key, 0)


@pytest.fixture
def no_hurry(monkeypatch):
    """A node waits until all have answered, or the test ends."""
    monkeypatch.setattr(tree, "_GATHER_S", 1000.0)


def block(version=3, nbytes=LAYOUT.nbytes):
    whole = private_snapshot(LAYOUT)
    whole.stamp(version, b"")
    memory = engine.lend_block(nbytes)
    memory[: LAYOUT.nbytes] = whole.buffer
    return memory


def kinds(replies):
    return {worker: reply.answer.kind for worker, reply in replies.items()}


def test_a_node_answers_for_its_branch_in_one_message_when_all_have(node, no_hurry):
    sent = node.send(block())
    node.apply()
    assert not sent.done()
    node.below[0].set_result({4: OTHER})
    replies = sent.result(0)
    assert kinds(replies) == {0: APPLIED, 4: APPLIED}
    assert replies[4].answer == OTHER.answer
    assert replies[4].owner == "owner 4"


def test_nobodys_answer_waits_long_for_anothers(node):
    sent = node.send(block())
    node.apply()
    assert kinds(sent.result(20.0)) == {0: APPLIED}
    node.below[0].set_result({4: OTHER})  # too late: the trainer has asked for it


def test_a_node_below_that_cannot_be_reached_keeps_no_answer_back(node, no_hurry):
    sent = node.send(block())
    node.apply()
    node.below[0].set_exception(ConnectionError("it is gone"))
    assert kinds(sent.result(0)) == {0: APPLIED}


@pytest.mark.parametrize("others", [{}, {4: SimpleNamespace()}], ids=["unknown", "broken"])
def test_a_version_is_delivered_although_there_is_no_way_below(node, no_hurry, others):
    gloo._served[PORT, 0].others = others
    sent = node.send(block())
    node.apply()
    assert kinds(sent.result(0)) == {0: APPLIED}


def test_the_time_that_an_answer_waited_is_counted(node, monkeypatch):
    now = [1_000]
    monkeypatch.setattr(tree.time, "monotonic_ns", lambda: now[0])
    sent = node.send(block())
    node.below[0].set_result({4: OTHER})
    now[0] += 70
    node.apply()
    replies = sent.result(20.0)
    assert (replies[4].held_ns, replies[0].held_ns) == (75, 0)


def test_memory_is_not_given_back_before_it_was_passed_on(node, no_hurry):
    nbytes = LAYOUT.nbytes + 1001
    lent = block(nbytes=nbytes)
    node.send(lent)
    node.apply()
    other = engine.lend_block(nbytes)
    assert other is not lent  # a node below may not have read it
    node.below[0].set_result({4: OTHER})
    assert engine.lend_block(nbytes) is lent


def test_memory_that_a_lost_node_may_still_be_sent_is_never_given_back(node, no_hurry):
    nbytes = LAYOUT.nbytes + 1003
    lent = block(nbytes=nbytes)
    node.send(lent)
    node.apply()
    node.below[0].set_exception(ConnectionError("it is gone"))
    assert engine.lend_block(nbytes) is not lent


# -- the trainer's side


class Scripted:
    """An engine that notes what is posted; the test answers."""

    hint = ""
    mechanism = "scripted"
    port = PORT

    def __init__(self):
        self.posts = []

    def introduce(self, peer, other):
        return []  # connected at once

    def pack_block(self, block):
        return SimpleNamespace(content=block, mechanism="scripted")

    def post(self, peer, function, packed, *args):
        self.posts.append((peer, function, packed.content.numel() > 0, Future()))
        return self.posts[-1][-1]

    def call(self, peer, function, *args):
        future = Future()
        future.set_result(None)
        return future

    def gone(self, peer):
        return None

    def describe(self, peer):
        return f"peer {peer}"


class Sending:
    """A tree of workers 0, 2 and 6, each below the one before; the others never come."""

    WORKERS = 0, 2, 6

    def __init__(self):
        self.engine = Scripted()
        self.channel = TreeSender(LAYOUT, 7, self.engine)
        self.publish(0)
        for worker, (_, _, _, future) in zip(self.WORKERS, self.taken(), strict=True):
            future.set_result(Reply(Answer(worker, JOINED), f"owner {worker}"))
        assert len(self.channel.poll()) == 3

    def publish(self, version, workers=WORKERS):
        block = self.channel.free_block([])
        block.stamp(version, b"")
        self.channel.publish(block, workers)
        return block

    def taken(self):
        """What was posted since the last call."""
        posts, self.engine.posts = self.engine.posts, []
        return posts

    def applied(self, worker, version):
        return Reply(Answer(worker, APPLIED, version), f"owner {worker}")

    def acknowledged(self):
        return [answer.worker for answer in self.channel.poll() if answer.kind == APPLIED]

    def relays(self):
        return [self.channel.about(worker).statistics["relay"] for worker in self.WORKERS]


@pytest.fixture
def sending(monkeypatch):
    monkeypatch.setattr(tree, "FAN_OUT", 2)
    sending = Sending()
    yield sending
    sending.channel.close()


def missing(worker):
    return Reply(Answer(worker, MISSING), f"owner {worker}")


def test_a_version_is_sent_once_and_all_are_acknowledged_by_one_reply(sending):
    sending.publish(1)
    ((peer, function, _, call),) = sending.taken()
    assert (peer, function) == (0, pass_on)
    assert sending.channel.due_ns() is not None
    call.set_result({worker: sending.applied(worker, 1) for worker in Sending.WORKERS})
    assert sending.acknowledged() == [0, 2, 6]
    assert sending.relays() == [None, 0, 2]
    assert sending.channel.due_ns() is None
    assert sending.taken() == []


def test_whose_answer_did_not_come_is_asked_and_sent_what_is_missing(sending):
    sending.publish(1)
    ((_, _, _, call),) = sending.taken()
    call.set_result({0: sending.applied(0, 1)})
    assert sending.acknowledged() == [0]
    ask_2, ask_6 = sending.taken()
    assert [(peer, has_block) for peer, _, has_block, _ in (ask_2, ask_6)] == [
        (2, False),
        (6, False),
    ]
    ask_2[-1].set_result(missing(2))
    ask_6[-1].set_result(missing(6))
    assert sending.acknowledged() == []
    sent = sending.taken()
    assert [(peer, function, block) for peer, function, block, _ in sent] == [
        (2, deliver, True),
        (6, deliver, True),
    ]
    for worker, (*_, future) in zip((2, 6), sent, strict=True):
        future.set_result(sending.applied(worker, 1))
    assert sending.acknowledged() == [2, 6]
    sending.publish(2)
    # The trainer now serves 2, which did not get it from 0; that 6 did not was no fault of 2.
    assert [peer for peer, *_ in sending.taken()] == [0, 2]
    assert sending.relays() == [None, None, 2]


def test_workers_are_asked_if_the_reply_of_their_branch_is_overdue(sending, monkeypatch):
    now = [tree.now_ns()]
    monkeypatch.setattr(tree, "now_ns", lambda: now[0])
    sending.publish(1)
    ((_, _, _, call),) = sending.taken()
    assert sending.channel.poll() == []
    now[0] = sending.channel.due_ns()
    assert sending.channel.poll() == []
    asked = sending.taken()
    assert [peer for peer, *_ in asked] == [0, 2, 6]
    asked[1][-1].set_result(sending.applied(2, 1))
    call.set_result({worker: sending.applied(worker, 1) for worker in Sending.WORKERS})
    assert sorted(sending.acknowledged()) == [0, 2, 6]  # each of them once


def test_each_branch_has_the_patience_of_its_own_block(sending, monkeypatch):
    now = [tree.now_ns()]
    monkeypatch.setattr(tree, "now_ns", lambda: now[0])
    sending.publish(1, workers=(1, 4))
    for worker, (*_, future) in zip((1, 4), sending.taken(), strict=True):
        future.set_result(Reply(Answer(worker, JOINED), f"owner {worker}"))
    sending.channel.poll()
    monkeypatch.setattr(tree, "_PATIENCE_S", 100.0)  # as for a large block
    sending.publish(2)
    monkeypatch.setattr(tree, "_PATIENCE_S", 1.0)  # and for a small one that is sent later
    sending.publish(3, workers=(1, 4))
    sending.taken()
    now[0] = sending.channel.due_ns()
    sending.channel.poll()
    assert [peer for peer, *_ in sending.taken()] == [1, 4]


def test_a_block_whose_node_was_lost_is_never_written_again(sending):
    block = sending.publish(1)
    ((_, _, _, call),) = sending.taken()
    call.set_exception(PeerDied("peer 0 is gone"))
    sending.channel.poll()
    for worker, (*_, ask) in zip((0, 2, 6), sending.taken(), strict=True):
        ask.set_result(sending.applied(worker, 1))
    wait_until(lambda: sorted(sending.acknowledged()) == [0, 2, 6])
    for version in range(2, 6):
        assert sending.publish(version) is not block


def test_those_below_a_worker_that_left_are_served_by_the_trainer(sending):
    there = sending.channel._tree
    there.leave(0)
    heads = there.grow({0: "a successor", 2: "owner 2", 6: "owner 6"})
    assert [head.worker for head in heads] == [0, 2]
