"""Places that are taken again, by whomever: everybody gets what is his, and no more."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import threading

import pytest
import torch
from torch import nn

from sync import RPCWeightSyncScheme, Transport, WeightStrategy, WorkerDied
from sync.board import GREETED
from sync.remote import nearby
from sync.remote.schemes import RemoteSenderEnd
from tests.promises.probe import VERSION, wait_until
from tests.promises.remote_probe import Peers, be_elsewhere, trial
from tests.sync.remote.support import Threads, joined
from tests.sync.support import bits, fill, policy

NEAR_OR_NOT = pytest.mark.parametrize("near", [True, False], ids=["near", "elsewhere"])


class TwoThatCopy(Threads):
    """What is posted is a copy made when it was packed, as in Ray's store."""

    num_peers = 2

    def parcel(self, block):
        return block.clone()


@contextlib.contextmanager
def two(near):
    """A scheme with weights of each worker's own, and how to become one of its workers."""
    engine, own = TwoThatCopy(), {0: policy(100), 1: policy(200)}
    scheme = RPCWeightSyncScheme(timeout=20.0, connect_timeout=20.0, share_memory=near)
    scheme.attach(engine)
    scheme.init_on_sender(params_map=own)
    workers = []

    def begin(worker):
        receiver, model = copy.deepcopy(scheme), policy()
        receiver.init_on_receiver(model=model, worker_idx=worker)
        thread = threading.Thread(target=receiver.connect)
        thread.start()
        workers.append((receiver, thread))
        return receiver, model

    try:
        yield scheme, own, begin
    finally:
        for receiver, thread in workers:
            thread.join(20.0)
            receiver.shutdown()
        scheme.shutdown()
        engine.close()


def has(receiver, model, weights):
    with receiver.reading():
        return bits(model) == bits(weights)


@NEAR_OR_NOT
def test_each_worker_begins_with_weights_of_its_own(near):
    with two(near) as (scheme, own, begin):
        there = [begin(worker) for worker in (0, 1)]
        scheme.connect()
        for worker, (receiver, model) in enumerate(there):
            assert has(receiver, model, own[worker])


@NEAR_OR_NOT
def test_who_takes_a_place_gets_the_weights_of_that_place(near):
    with two(near) as (scheme, own, begin):
        there = [begin(worker) for worker in (0, 1)]
        scheme.connect()
        there[0][0].shutdown()
        receiver, model = begin(0)
        scheme.connect(worker_idx=0)
        assert has(receiver, model, own[0])
        fill(own[0], 101)
        scheme.send(worker_ids=[0])
        assert has(receiver, model, own[0])
        assert has(*there[1], own[1])


def test_one_elsewhere_may_be_followed_by_a_near_one_without_the_trainer_being_told(monkeypatch):
    monkeypatch.setattr(nearby, "POSSIBLE", False)
    monkeypatch.setattr("sync.remote.schemes.POSSIBLE", True)
    with two(True) as (scheme, own, begin):
        there = [begin(worker) for worker in (0, 1)]
        scheme.connect()
        there[0][0].shutdown()
        monkeypatch.setattr(nearby, "POSSIBLE", True)
        receiver, model = begin(0)
        line = scheme.create_transport(worker_idx=0)
        fill(own[0], 101)
        scheme.send_async(worker_ids=[0])
        wait_until(lambda: bool(line._answers))  # that it is near now, which nobody has read yet
        fill(own[1], 201)
        scheme.send(worker_ids=[1])
        scheme.wait_async(20.0)
        assert has(receiver, model, own[0])
        assert has(*there[1], own[1])


def test_a_strategy_of_the_trainers_own_reaches_near_workers():
    class Own(WeightStrategy):
        """Known in this function alone."""

    with joined(nn.Linear(3, 3), nn.Linear(3, 3), share_memory=True, strategy=Own()) as parts:
        scheme, _, receiver, _ = parts
        assert scheme.stats["workers"][0]["near"]
        assert type(receiver._receiver.transport.strategy).__name__ == "Own"


@pytest.mark.parametrize("near", [True])
def test_after_shutdown_no_memory_waits_for_a_collection(near):
    def mappings():
        with open("/proc/self/maps") as file:
            return sum("memfd:lockstep" in line for line in file)

    with joined(nn.Linear(300, 300), nn.Linear(300, 300), share_memory=near):
        pass
    gc.collect()
    gc.disable()
    try:
        before = mappings()
        with joined(nn.Linear(300, 300), nn.Linear(300, 300), share_memory=near) as parts:
            parts[0].send()
        del parts
        assert mappings() == before
    finally:
        gc.enable()


def test_a_shutdown_that_was_interrupted_ends_the_counter_when_it_is_called_again(monkeypatch):
    def counters():
        return sum(thread.name == "lockstep-near" for thread in threading.enumerate())

    before = counters()
    engine, scheme = Threads(), RPCWeightSyncScheme()
    scheme.attach(engine)
    scheme.init_on_sender(model=nn.Linear(3, 3), devices=["cpu"])
    assert counters() == before + 1
    close = RemoteSenderEnd.close

    def interrupted(self):
        close(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RemoteSenderEnd, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheme.shutdown()
    scheme.shutdown()
    assert counters() == before
    engine.close()


def read_and_end(scheme, worker, findings, *_):
    """Be a worker until the line is down."""
    from tests.promises.probe import VersionPolicy

    torch.set_num_threads(1)
    model = VersionPolicy()
    scheme.init_on_receiver(model=model, worker_idx=worker)
    with contextlib.suppress(ConnectionError):
        scheme.connect(background=False)
        while not findings.get(worker, 6):
            scheme.receive(1.0)
            findings.set(worker, VERSION, scheme.version)
    scheme.shutdown()


@pytest.mark.timeout(120)
def test_what_a_predecessor_did_after_it_was_given_up_is_not_held_against_its_successor(tmp_path):
    """One is stopped and given up, one elsewhere has its place; the first goes on and leaves."""
    peers = Peers("distributed", 1, near=True, silence_s=2.0)
    try:
        with trial(peers, tmp_path, target=read_and_end, timeout=3.0) as running:
            old = running.processes[0]
            old.kill(signal.SIGSTOP)
            wait_until(lambda: peers.engine.gone(0) is not None)
            with pytest.raises(WorkerDied):
                running.publish(wait=True)
            peers.replace(0)
            peers.engine.call(0, be_elsewhere, True).result(30.0)
            running.begin(0)
            running.scheme.connect(worker_idx=0)
            running.publish(wait=True)
            old.kill(signal.SIGCONT)  # it hears that the line is down, and leaves
            wait_until(lambda: not old.is_alive())
            far = peers.running[0]
            far.kill()
            wait_until(lambda: not far.is_alive() and peers.engine.gone(0) is not None)
            with pytest.raises(WorkerDied):
                running.publish(wait=True)
            peers.replace(0)
            running.begin(0)
            running.scheme.connect(worker_idx=0)
            version = running.publish(wait=True)
            assert running.scheme.acknowledged == {0: version}
            assert running.scheme.stats["workers"][0]["near"]
    finally:
        peers.close()


def test_what_a_newcomer_says_while_it_is_expected_is_heard(tmp_path, monkeypatch):
    """It greets after the trainer has looked, and answers before the trainer looks again."""
    peers = Peers("rpc", 1, near=True)
    expect = Transport.expect_newcomer
    try:
        with trial(peers, tmp_path, connect_timeout=20.0) as running:
            line = running.scheme.create_transport()
            row, met = line.near.row, line.near._greetings

            def slowly(self):
                answered = row.event_count
                running.begin(0)
                wait_until(lambda: row.state == GREETED and row.greetings != met)
                expect(self)
                wait_until(lambda: row.event_count > answered)

            running.processes[0].kill()
            with pytest.raises(WorkerDied):
                running.publish(wait=True)
            running.findings.set(0, VERSION, 0)
            peers.replace(0)
            with monkeypatch.context() as patch:
                patch.setattr(Transport, "expect_newcomer", slowly)
                running.scheme.connect(worker_idx=0)
            assert running.scheme.acknowledged == {0: running.scheme.version}
    finally:
        peers.close()


def test_many_may_ask_at_once():
    counter = nearby.Counter(lambda worker: worker)
    asked, answers = 200, []
    threads = [
        threading.Thread(target=lambda w=w: answers.append(nearby.ask(counter.address, w)))
        for w in range(asked)
    ]
    for thread in threads:
        thread.start()
    counter.open()
    for thread in threads:
        thread.join(20.0)
    counter.close()
    assert sorted(answers) == list(range(asked))


def test_a_counter_without_descriptors_answers_again_when_there_are_some(monkeypatch):
    counter, accept = nearby.Counter(lambda worker: worker), nearby.socket.socket.accept
    refused = threading.Event()

    def none_left(self):
        if not refused.is_set():
            refused.set()
            raise OSError(24, os.strerror(24))
        return accept(self)

    monkeypatch.setattr(nearby.socket.socket, "accept", none_left)
    counter.open()
    assert refused.wait(20.0)
    assert nearby.ask(counter.address, 1) == 1
    counter.close()
