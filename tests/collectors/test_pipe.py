"""Messages between the trainer and a worker."""

from __future__ import annotations

import pytest

from collectors.workers.pipe import _HEADER, Pipe, PipeClosed, dumps


def test_messages_arrive_whole_and_in_their_order_in_however_many_pieces_they_come():
    near, far = Pipe.pair()
    sent = [b"x" * size for size in (0, 70, 3, 1_000)]
    data = b"".join(_HEADER.pack(len(text)) + text for text in map(dumps, sent))
    received: list[bytes] = []
    for start in range(0, len(data), 7):
        near._socket.send(data[start : start + 7])
        received += far.receive()
    assert received == sent
    near.send(sent)
    assert far.receive() == [sent]
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
    with pytest.raises(PipeClosed, match="in part only"):
        near.send("this would be taken for the rest of it")
    near.close()
    assert far.receive() == []
    assert far.ended
    far.close()
