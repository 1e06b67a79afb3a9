"""The line to one worker: small messages, whole and in order, and no end that blocks."""

from __future__ import annotations

import multiprocessing
import socket

import pytest

from sync.channel import DONE, FAIL, SNAPSHOT, TEXT_BYTES, Channel
from sync.memory import wait_for
from tests.sync.support import Handed, Worker


@pytest.fixture(params=["seqpacket", "dgram"])
def line(request, monkeypatch):
    """A line over either kind of socket that keeps message borders."""
    if request.param == "dgram":
        monkeypatch.delattr(socket, "SOCK_SEQPACKET")
    return Channel()


def echo(handed, model, count):
    """At the worker's end: take so many messages, and send them back."""
    if not hasattr(handed, "turned"):
        handed.line.turn_around()
        handed.turned = True
    taken = [handed.line.get(20) for _ in range(count)]
    for message in taken:
        handed.line.put(message.kind, *message.numbers, text=message.text)
    return taken


def test_messages_arrive_whole_and_in_order_in_both_directions(line):
    with Worker(Handed(line=line), None) as worker:
        for number in range(20):
            assert line.put(SNAPSHOT, number, -number, 1 << 62, text="é" * number)
        sent = worker.do(echo, 20)
        assert [m.numbers[:3] for m in sent] == [(n, -n, 1 << 62) for n in range(20)]
        assert [m.text for m in sent] == ["é" * n for n in range(20)]
        assert [line.get(20) for _ in range(20)] == sent
        assert line.get() is None


def test_missing_numbers_are_zero(line):
    with Worker(Handed(line=line), None) as worker:
        line.put(DONE, 5)
        (message,) = worker.do(echo, 1)
        assert message == (DONE, (5, 0, 0, 0, 0), "")


def test_of_a_long_text_the_end_arrives(line):
    with Worker(Handed(line=line), None) as worker:
        line.put(FAIL, 1, text="x" * TEXT_BYTES + "the end")
        (message,) = worker.do(echo, 1)
        assert len(message.text) == TEXT_BYTES
        assert message.text.endswith("x" + "the end")


def test_nothing_to_read_is_none_within_the_time_given(line):
    assert line.get() is None
    assert line.get(0.01) is None
    assert wait_for([line.fd], 0) == []


def test_a_message_makes_the_other_end_readable(line):
    with Worker(Handed(line=line), None) as worker:
        line.put(SNAPSHOT)
        worker.do(echo, 1)
        assert wait_for([line.fd], 20) == [line.fd]


def test_a_line_that_nobody_reads_fills_up_and_does_not_block(line):
    assert any(not line.put(SNAPSHOT, text="x" * TEXT_BYTES) for _ in range(10_000))


def test_a_worker_may_become_the_far_end_more_than_once(line):
    def twice(handed, model):
        handed.line.turn_around()
        handed.line.turn_around()
        return handed.line.put(DONE, 3)

    with Worker(Handed(line=line), None) as worker:
        assert worker.do(twice)
        assert line.get(2) == (DONE, (3, 0, 0, 0, 0), "")


def test_both_ends_stay_with_the_sender_so_that_a_newcomer_gets_the_same_line(line):
    for number in range(3):
        with Worker(Handed(line=line), None) as worker:
            line.put(SNAPSHOT, number)
            (message,) = worker.do(echo, 1)
            assert message.numbers[0] == number
            assert line.get(20).numbers[0] == number


def test_a_line_travels_to_a_child_that_is_not_a_fork():
    line = Channel()
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=answer, args=(line,))
    child.start()
    line.put(SNAPSHOT, 41)
    assert line.get(60).numbers[0] == 42
    child.join(20)


def answer(line):
    line.turn_around()
    line.put(DONE, line.get(20).numbers[0] + 1)
