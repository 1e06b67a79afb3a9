"""Who is handed the trainer's memory, and who is not."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading

import pytest
import torch
from torch import nn

from sync import WorkerDied
from sync.remote import nearby
from sync.remote.inbox import hang_up
from sync.remote.nearby import Counter, ask
from tests.sync.remote.support import joined


@pytest.fixture
def counter():
    opened = Counter(lambda worker: f"for {worker}")
    opened.open()
    yield opened
    opened.close()


def ask_in_a_child(address):
    """The answer that another process gets."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(
        target=_tell, args=(theirs, address)
    )
    process.start()
    assert mine.poll(30.0)
    answer = mine.recv()
    process.join(30.0)
    return answer


def _tell(pipe, address):
    pipe.send(ask(address, 3))


def test_a_process_of_this_machine_that_knows_the_secret_is_handed_what_is_its(counter):
    assert ask(counter.address, 2) == "for 2"
    assert ask_in_a_child(counter.address) == "for 3"


@pytest.mark.parametrize(
    "change",
    [{"secret": bytes(32)}, {"pid": 1}, {"name": "lockstep-nobody"}],
    ids=["another secret", "another process", "another name"],
)
def test_nobody_else_is(counter, change):
    assert ask(counter.address._replace(**change), 0) is None


def test_a_process_that_says_that_it_is_another_is_not(counter, monkeypatch):
    monkeypatch.setattr(nearby.os, "getpid", lambda: 1)
    assert ask(counter.address, 0) is None


def test_another_user_is_not(counter, monkeypatch):
    monkeypatch.setattr(nearby.os, "geteuid", lambda: os.getuid() + 1)
    assert ask(counter.address, 0) is None


def test_where_there_are_no_such_sockets_nobody_is(counter, monkeypatch):
    monkeypatch.setattr(nearby, "POSSIBLE", False)
    assert ask(counter.address, 0) is None


def test_who_asks_and_is_silent_keeps_nobody_waiting(counter):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(f"\0{counter.address.name}")
        assert ask(counter.address, 1) == "for 1"


def test_a_closed_counter_answers_nobody_and_keeps_no_thread():
    before = threading.active_count()
    counter = Counter(lambda worker: worker)
    counter.open()
    counter.close()
    counter.close()
    assert ask(counter.address, 0) is None
    assert threading.active_count() == before


def test_a_near_worker_takes_versions_past_the_engine_and_hears_that_the_line_is_down():
    ours, theirs = nn.Linear(3, 3), nn.Linear(3, 3)
    with joined(ours, theirs, background=False, share_memory=True) as (scheme, _, receiver, _):
        scheme._engine.close()  # which brings nothing from now on
        with torch.no_grad():
            ours.weight.fill_(7.0)
        scheme.send_async()
        assert receiver.receive(5.0) is not None
        assert torch.equal(theirs.weight, ours.weight)
        scheme.wait_async()
        hang_up("the line is down")
        with pytest.raises(ConnectionError, match="the sender is gone"):
            receiver.receive(30.0)


def test_a_near_worker_that_leaves_is_missed():
    with joined(nn.Linear(3, 3), nn.Linear(3, 3), share_memory=True) as (scheme, _, receiver, _):
        receiver.shutdown()
        with pytest.raises(WorkerDied, match="left"):
            scheme.send()


def test_a_near_worker_without_a_sender_is_told_so():
    with joined(nn.Linear(3, 3), nn.Linear(3, 3), share_memory=True, background=False) as parts:
        scheme, _, receiver, _ = parts
        scheme.shutdown()
        with pytest.raises(ConnectionError, match="the sender is gone"):
            receiver.receive(30.0)
