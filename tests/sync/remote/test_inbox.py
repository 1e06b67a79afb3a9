"""Deliveries end when the worker answers, and none waits for a thread."""

from __future__ import annotations

import threading

import pytest
import torch

from sync.channel import APPLIED, FAILED, JOINED, LEFT, Answer
from sync.local.waiting import wait_for
from sync.model.snapshot import NEVER
from sync.remote.inbox import (
    SUPERSEDED,
    Inbox,
    Reply,
    close_all,
    close_inbox,
    deliver,
    expect_worker,
)

NOTHING = torch.empty(0, dtype=torch.uint8)


@pytest.fixture
def key(request):
    yield request.node.name
    close_inbox(request.node.name, 0)


@pytest.fixture
def inbox(key):
    found = Inbox(key, 0)
    yield found
    found.leave()


def block(number):
    return torch.full((4,), number, dtype=torch.uint8)


def kind(future):
    return future.result(0).answer.kind


def test_a_delivery_waits_for_a_worker_that_has_not_come_yet(key):
    threads = threading.active_count()
    older, newer = deliver(NOTHING, key, 0, ""), deliver(NOTHING, key, 0, "")
    assert kind(older) == SUPERSEDED
    assert not newer.done()
    assert threading.active_count() == threads
    inbox = Inbox(key, 0)
    assert newer.result(0).owner == inbox.owner
    inbox.leave()


def test_an_answer_ends_the_delivery_that_was_taken(inbox, key):
    first = deliver(block(1), key, 0, inbox.owner)
    assert inbox.has_news()
    assert inbox.take().tolist() == [1] * 4
    assert not inbox.has_news()
    assert inbox.take() is None
    assert wait_for([inbox.bell.fd], 0) == []
    second = deliver(block(2), key, 0, inbox.owner)
    applied = Answer(0, APPLIED, 1, seen_ns=10, applied_ns=30, retries=3)
    inbox.answer(applied)
    assert first.result(0) == Reply(applied, inbox.owner)
    assert not second.done()
    assert inbox.take().tolist() == [2] * 4


def test_a_newer_delivery_takes_an_older_ones_place(inbox, key):
    older, newer = (deliver(block(n), key, 0, inbox.owner) for n in (1, 2))
    assert kind(older) == SUPERSEDED
    assert inbox.take().tolist() == [2] * 4
    assert not newer.done()


def test_a_delivery_that_comes_on_two_ways_is_taken_once_and_answered_on_both(inbox, key):
    first = deliver(block(1), key, 0, inbox.owner, 5)
    assert inbox.take().tolist() == [1] * 4
    again = deliver(block(1), key, 0, inbox.owner, 5)
    assert not inbox.has_news()
    inbox.answer(Answer(0, APPLIED, 1))
    late = deliver(block(1), key, 0, inbox.owner, 5)
    assert [kind(future) for future in (first, again, late)] == [APPLIED] * 3
    assert not inbox.has_news()


def test_a_delivery_that_was_overtaken_on_another_way_is_dropped(inbox, key):
    newer = deliver(block(2), key, 0, inbox.owner, 6)
    assert kind(deliver(block(1), key, 0, inbox.owner, 5)) == SUPERSEDED
    assert inbox.take().tolist() == [2] * 4
    assert not newer.done()


def test_a_block_for_a_predecessor_is_dropped(inbox, key):
    assert deliver(block(1), key, 0, "another").result(0).owner == inbox.owner
    assert kind(deliver(block(1), key, 0, "another")) == JOINED
    assert not inbox.has_news()


def test_who_can_take_nothing_says_so_to_all(inbox, key):
    waiting = deliver(block(1), key, 0, inbox.owner)
    inbox.answer(Answer(0, FAILED, NEVER, text="another shape"))
    later = deliver(block(2), key, 0, inbox.owner)
    inbox.leave()
    last = deliver(block(3), key, 0, inbox.owner)
    for future in (waiting, later, last):
        assert (kind(future), future.result(0).answer.text) == (FAILED, "another shape")


def test_who_left_says_so_until_another_is_expected(inbox, key):
    taken = deliver(block(1), key, 0, inbox.owner)
    inbox.take()
    waiting = deliver(block(2), key, 0, inbox.owner)
    inbox.leave()
    assert [kind(taken), kind(waiting)] == [LEFT, LEFT]
    assert kind(deliver(NOTHING, key, 0, "")) == LEFT
    expect_worker(key, 0)
    assert not deliver(NOTHING, key, 0, "").done()


@pytest.mark.parametrize("close", [lambda key: close_inbox(key, 0), lambda key: close_all("down")])
def test_when_the_trainer_is_gone_workers_wake_and_deliveries_end(inbox, key, close):
    waiting, absent = deliver(block(1), key, 0, inbox.owner), deliver(NOTHING, key, 0, "x")
    elsewhere = deliver(NOTHING, f"{key} elsewhere", 0, "")
    close(key)
    assert inbox.closed
    assert kind(waiting) == LEFT
    assert absent.done()
    close_all("down")
    assert kind(elsewhere) == LEFT
    assert kind(deliver(block(2), key, 0, inbox.owner)) == LEFT
