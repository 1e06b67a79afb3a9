"""Messages between the trainer and a worker."""

from __future__ import annotations

import threading

import pytest

from collectors.workers.pipe import Pipe, PipeClosed


def test_messages_arrive_whole_and_in_their_order_in_however_many_pieces_they_come():
    near, far = Pipe.pair()
    sent = [b"x" * size for size in (0, 70_000, 3, 1_000_000, 5)]
    thread = threading.Thread(target=lambda: [near.send(message) for message in sent])
    thread.start()
    received: list[bytes] = []
    while len(received) < len(sent):
        received += far.receive()
    thread.join()
    assert received == sent
    near.close()
    assert far.receive() == []
    assert far.ended
    with pytest.raises(PipeClosed):
        far.send("too late")
    far.close()


def test_a_message_that_nobody_reads_is_given_up_and_the_part_that_came_is_no_message():
    near, far = Pipe.pair()
    with pytest.raises(TimeoutError, match=r"not read within 0\.01 s"):
        near.send(b"x" * 10_000_000, timeout=0.01)
    near.close()
    assert far.receive() == []
    assert far.ended
    far.close()
