"""How a worker finds its sender on this machine, and what goes over their connection."""

from __future__ import annotations

import os
import pickle
import socket
import struct

import pytest

from sync.local.unix_connection import (
    DONE,
    FAIL,
    HELLO,
    TEXT_BYTES,
    WELCOME,
    Connection,
    Listener,
    Message,
    connect,
)
from sync.local.waiting import wait_for
from tests.sync.support import KINDS, bits, held, policy, receive, running, sender

HELLO_UMLAUT = struct.pack("<2i6q", HELLO, 2, 0, 1, 0, 0, 0, 0) + "ä".encode()


def arrived(connection):
    assert wait_for([connection.fd], 20) == [connection.fd]
    return connection.receive()


@pytest.fixture
def both():
    """Two ends of a connection."""
    pair = socket.socketpair(type=socket.SOCK_SEQPACKET)
    ends = [Connection(end) for end in pair]
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_whole_and_in_order(both):
    ours, theirs = both
    ours.send(DONE, 1, 2, 3)
    ours.send(FAIL, -1, text="Äh\nnein")
    assert arrived(theirs) == [
        Message(DONE, (1, 2, 3, 0, 0, 0), ""),
        Message(FAIL, (-1, 0, 0, 0, 0, 0), "Äh\nnein"),
    ]
    assert theirs.receive() == []
    theirs.send(DONE, 2**62)
    assert arrived(ours)[0].numbers[0] == 2**62


def test_of_a_long_text_the_end_arrives(both):
    ours, theirs = both
    ours.send(FAIL, 1, text="x" * 10 * TEXT_BYTES + "the error")
    (message,) = arrived(theirs)
    assert message.text.endswith("the error")
    assert len(message.text) == TEXT_BYTES


def test_what_was_said_before_the_end_is_heard(both):
    ours, theirs = both
    ours.send(DONE, 1)
    ours.close()
    assert [message.kind for message in arrived(theirs)] == [DONE]
    assert theirs.ended
    theirs.send(DONE, 2)  # into the void


def test_what_was_said_before_the_end_is_heard_by_whoever_had_said_more(both):
    ours, theirs = both
    theirs.send(DONE, 1)  # unread when the other side ends: the kernel reports a reset
    ours.send(FAIL, 1, text="the error")
    ours.close()
    assert [message.text for message in arrived(theirs)] == ["the error"]
    assert theirs.ended


def test_who_does_not_read_does_not_stop_the_sender(both):
    ours, _ = both
    for _ in range(10_000):
        ours.send(DONE, 1)


def test_descriptors_come_with_the_first_message(both):
    ours, theirs = both
    reader, writer = os.pipe()
    ours.send(WELCOME, fds=[reader])
    ours.send(DONE, 1)
    assert wait_for([theirs.fd], 20)
    messages = theirs.receive(1)
    (received,) = theirs.fds
    assert [message.kind for message in messages] == [WELCOME, DONE]
    os.write(writer, b"!")
    assert os.read(received, 1) == b"!"
    assert not os.get_inheritable(received)
    for fd in (reader, writer, received):
        os.close(fd)


def test_a_worker_is_known_by_the_secret_of_the_address():
    listener = Listener()
    address = pickle.loads(pickle.dumps(listener.address))
    knowing, guessing = connect(address, 3), connect(address._replace(secret="?"), 3)
    assert wait_for([listener.fd], 20)
    first, second = listener.accept()
    (hello,), (guess,) = arrived(first), arrived(second)
    assert hello == (HELLO, (3, 0, 0, 0, 0, 0), address.secret)
    assert first.pid == knowing.pid == os.getpid()
    assert [listener.is_known(message) for message in (hello, guess)] == [True, False]
    assert not listener.is_known(hello._replace(kind=DONE))
    for each in (knowing, guessing, first, second, listener):
        each.close()


def test_where_nobody_listens_any_more_the_sender_is_gone():
    listener = Listener()
    listener.close()
    with pytest.raises(ConnectionError, match="the sender is gone"):
        connect(listener.address, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "noise", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\0" * 500, b"\xff" * 500, HELLO_UMLAUT]
)
def test_strangers_at_a_senders_socket_disturb_nobody(kind, noise):
    with running(scheme := sender(kind)) as (worker,):
        strangers = []
        for _ in range(3):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(scheme._handout.name)
            if noise:
                stranger.send(noise)
            strangers.append(stranger)
        for value in (2, 3):
            worker.tell(receive, 20)
            scheme.send(policy(value))
            assert worker.hear()
            assert worker.do(held) == bits(policy(value))
        silent = len(scheme._sender.channel._unidentified)
        assert silent == (0 if noise else 3)
        for stranger in strangers:
            stranger.close()
        scheme.send_async()
        assert not scheme._sender.channel._unidentified


def test_a_message_to_a_connection_that_this_side_closed_is_dropped(both):
    ours, _ = both
    ours.close()
    ours.send(0, text="too late")
