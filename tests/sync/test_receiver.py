"""A worker takes the newest version into use, in one piece, by itself or when it asks."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading

import pytest
import torch
from torch import nn

from sync import WeightStrategy, WorkerDied, WorkerRaised, WorkerTimeout
from tests.sync.remote.support import joined
from tests.sync.support import (
    EACH,
    KINDS,
    Counting,
    ThreadWorker,
    begin_reading,
    bits,
    end_reading,
    fill,
    held,
    policy,
    read,
    receive,
    running,
    sender,
    version,
)


@EACH
def test_receive_returns_the_weights_once_and_then_none(kind):
    with running(scheme := sender(kind)) as (worker,):
        assert worker.do(lambda s, m: s.receive()) is None
        scheme.send_async(policy(2))
        assert worker.do(lambda s, m: bits(s.receive())) == bits(policy(2))
        assert worker.do(lambda s, m: s.receive()) is None


@pytest.mark.parametrize("background", [False, True], ids=["asking", "background"])
@EACH
def test_receive_waits_no_longer_than_told(kind, background):
    with running(sender(kind), background=background) as (worker,):
        for timeout in (None, 0, 0.01):
            assert not worker.do(receive, timeout)


@pytest.mark.parametrize("background", [False, True], ids=["asking", "background"])
@EACH
def test_receive_returns_when_a_version_comes(kind, background):
    with running(scheme := sender(kind), background=background) as (worker,):
        for value in range(2, 6):
            worker.tell(receive, 20)
            scheme.send(policy(value))
            assert worker.hear()
            assert worker.do(held) == bits(policy(value))


@pytest.mark.parametrize("background", [False, True], ids=["asking", "background"])
@EACH
def test_receive_raises_when_the_sender_is_gone_and_the_weights_stay(kind, background):
    with running(scheme := sender(kind, policy(3)), background=background) as (worker,):
        worker.tell(receive, 20)
        scheme.shutdown()
        with pytest.raises(
            ConnectionError, match="the sender is gone; there is no version after 0"
        ):
            worker.hear()
        assert not worker.do(receive)  # only looking is no error
        assert worker.do(held) == bits(policy(3))


@EACH
def test_what_was_sent_before_the_sender_went_is_still_received(kind):
    with running(scheme := sender(kind)) as (worker,):
        scheme.send_async(policy(2))
        scheme.shutdown()
        assert worker.do(receive, 20)
        assert worker.do(held) == bits(policy(2))


@EACH
def test_while_a_model_is_read_it_holds_still_and_afterwards_it_is_the_newest(kind):
    with running(scheme := sender(kind), background=True) as (worker,):
        assert worker.do(begin_reading) == 0
        scheme.send_async(policy(2))
        with pytest.raises(WorkerTimeout):
            scheme.wait_async(0.1)
        assert worker.do(read) == (0, bits(policy(1)))
        assert (worker.do(version), worker.do(held)) == (0, bits(policy(1)))
        worker.do(end_reading)
        scheme.wait_async(20)
        assert (worker.do(version), worker.do(held)) == (1, bits(policy(2)))


@EACH
def test_reading_takes_the_newest_version_also_without_a_background_thread(kind):
    with running(scheme := sender(kind)) as (worker,):
        scheme.send_async(policy(2))
        version, now = worker.do(read)
        assert (version, now) == (1, bits(policy(2)))


@EACH
def test_a_process_forked_from_a_worker_has_a_copy_or_an_error_and_is_no_worker(kind):
    def fork(scheme, model):
        mine, theirs = socket.socketpair()
        if os.fork() == 0:
            theirs.recv(1)
            with pytest.raises(RuntimeError, match="forked"):
                scheme.receive()
            with pytest.raises(RuntimeError, match="forked"):
                scheme.reading()
            if kind == "shared_zero_copy":
                with pytest.raises(RuntimeError, match=r"forked from worker 0.*zero_copy=False"):
                    model(torch.ones(2, 3))
                with pytest.raises(RuntimeError, match="forked from worker 0"):
                    model.state_dict()
                found = None
            else:
                found = bits(model)
            theirs.send(pickle.dumps((scheme.version, found)))
            os._exit(0)
        theirs.close()
        model.child = mine

    def hear_child(scheme, model):
        model.child.send(b"!")
        version, found = pickle.loads(model.child.recv(1 << 16))
        os.wait()
        return version, found

    with running(scheme := sender(kind), method="fork") as (worker,):
        worker.do(fork)
        for value in range(2, 8):
            scheme.send_async(policy(value))
            if value < 7:
                worker.do(receive)
        expected = None if kind == "shared_zero_copy" else bits(policy(1))
        assert worker.do(hear_child) == (0, expected)
        assert scheme.acknowledged == {0: 5}
        assert worker.do(receive)
        assert worker.do(held) == bits(policy(7))


@EACH
def test_a_receivers_thread_ends_with_its_scheme(kind):
    def end(scheme, model):
        before = {thread.name for thread in threading.enumerate()}
        scheme.shutdown()
        return before, {thread.name for thread in threading.enumerate()}

    with running(sender(kind), background=True) as (worker,):
        before, after = worker.do(end)
        assert "lockstep-receive" in before
        assert "lockstep-receive" not in after


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@EACH
def test_a_worker_without_a_model_receives_all_there_is_also_extra_state(kind, strategy):
    source = nn.Sequential(Counting({"seen": 1}), nn.BatchNorm1d(2))
    scheme = sender(kind, source, strategy=strategy)
    with running(scheme, None) as (worker,):
        source[0].extra = {"seen": 2}
        scheme.send_async(fill(source, 5))
        weights = worker.do(lambda s, m: to_dict(s.receive()))
        assert bits({k: v for k, v in weights.items() if "extra" not in k}) == bits(source)
        assert weights["0._extra_state"] == {"seen": 2}


def to_dict(weights):
    flat = WeightStrategy("state_dict").extract_weights(weights)
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in flat.items()}


def counting():
    return nn.Sequential(Counting())


@EACH
def test_an_error_in_the_background_reaches_the_sender_and_the_thread_goes_on(kind):
    source = nn.Sequential(Counting("first"))
    with running(scheme := sender(kind, source), counting, background=True) as (worker,):
        worker.do(lambda s, m: setattr(m[0], "refuses", True))
        with pytest.raises(WorkerRaised, match=r"worker 0 \(cpu\) raised.*\n(.*\n)+.*this owner"):
            scheme.send()
        worker.do(lambda s, m: setattr(m[0], "refuses", False))
        scheme.send()
        assert worker.do(version) == scheme.version == 2


class Middle:
    """A collector in a worker, which has workers of its own."""

    def __init__(self, model, fails=False):
        self.model, self.fails, self.passed = model, fails, []
        self.worker_idx = 0

    def get_model(self, model_id):
        return {"policy": self.model}[model_id]

    def update_policy_weights_(self, weights, *, model_id=None):
        if self.fails:
            raise RuntimeError("the worker's own workers are gone")
        self.passed.append((model_id, bits(weights)))


def join(scheme, middle):
    scheme.init_on_receiver(context=middle)
    scheme.connect(background=False)


@EACH
def test_a_cascade_passes_every_version_on_with_its_model_id(kind):
    scheme = KINDS[kind]()
    scheme.init_on_sender(model_id="policy", model=policy(1), devices=["cpu"])
    with scheme, ThreadWorker(scheme, lambda: Middle(policy())) as worker:
        worker.tell(join)
        scheme.connect()
        worker.hear()
        scheme.send_async(policy(2))
        assert worker.do(receive)
        expected = [("policy", bits(policy(1))), ("policy", bits(policy(2)))]
        assert worker.do(lambda s, m: m.passed) == expected
        assert worker.do(lambda s, m: bits(m.model)) == bits(policy(2))
        assert worker.do(lambda s, m: s.context is m)


@EACH
def test_a_stamp_stays_true_when_passing_weights_on_fails(kind):
    scheme = KINDS[kind]()
    scheme.init_on_sender(model_id="policy", model=policy(0), devices=["cpu"])
    with scheme, ThreadWorker(scheme, lambda: Middle(policy())) as worker:
        worker.tell(join)
        scheme.connect()
        worker.hear()
        worker.do(lambda s, m: setattr(m, "fails", True))
        scheme.send_async(policy(1))
        with pytest.raises(RuntimeError, match="own workers are gone"):
            worker.do(receive)
        with pytest.raises(WorkerRaised, match="own workers are gone"):
            scheme.wait_async(20)
        stamp, now = worker.do(lambda s, m: (s.version, bits(m.model)))
        assert now == bits(policy(stamp))
        # Nor may what the model points at be written over.
        for value in range(2, 6):
            scheme.send_async(policy(value))
        assert worker.do(lambda s, m: (s.version, bits(m.model))) == (stamp, now)


@EACH
def test_a_receiver_may_find_its_model_and_its_index_in_a_context(kind):
    scheme = KINDS[kind]()
    scheme.init_on_sender(model_id="policy", params_map={0: policy(1), 1: policy(2)})
    with scheme, ThreadWorker(scheme, lambda: Middle(policy())) as worker:
        worker.do(lambda s, m: s.init_on_receiver(context=m, worker_idx=1))
        assert worker.do(lambda s, m: (s.worker_idx, s.model is m.model)) == (1, True)
        worker.do(lambda s, m: s.init_on_receiver(context=m))
        assert worker.do(lambda s, m: (s.worker_idx, s.model_id)) == (0, "policy")
        with pytest.raises(KeyError):
            worker.do(lambda s, m: s.init_on_receiver(context=m, model_id="critic"))


@pytest.mark.parametrize("background", [False, True], ids=["asking", "background"])
@EACH
def test_a_shutdown_does_not_wait_for_ever_for_a_thread_that_reads(kind, background, monkeypatch):
    def shut_down(scheme, model):
        entered, leave = threading.Event(), threading.Event()

        def read_on():
            with scheme.reading():
                entered.set()
                leave.wait(60)
                model.read = bits(model)

        reader = threading.Thread(target=read_on)
        reader.start()
        entered.wait(20)
        scheme.shutdown()
        still_reading = reader.is_alive()
        leave.set()
        reader.join(20)
        return still_reading, model.read

    monkeypatch.setattr("sync.receiver._CLOSE_S", 0.2)
    with running(sender(kind), background=background) as (worker,):
        assert worker.do(shut_down) == (True, bits(policy(1)))


@EACH
def test_no_version_is_missed_by_a_background_thread_while_another_waits_for_one(kind):
    def follow(scheme, model, last):
        while scheme.version < last:
            if scheme.receive(10.0) is None:
                return scheme.version
        return scheme.version

    with running(scheme := sender(kind), background=True) as (worker,):
        for _ in range(20):
            last = scheme.version + 40
            worker.tell(follow, last)
            for _ in range(40):
                scheme.send_async()
            assert worker.hear() == last


@pytest.mark.parametrize("call", ["receive", "wait_for_news", "connect"])
@EACH
def test_a_shutdown_from_another_thread_ends_a_receivers_call(kind, call):
    def shut_down_meanwhile(scheme, model):
        if call == "connect":
            scheme.shutdown()
            raise RuntimeError("another thread called shutdown() meanwhile")
        ended = []

        def wait():
            try:
                getattr(scheme, call)(60.0)
            except RuntimeError as error:
                ended.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        while not thread.is_alive():
            continue
        scheme.shutdown()
        thread.join(20)
        assert not thread.is_alive()
        raise RuntimeError(ended[0])

    with running(sender(kind)) as (worker,), pytest.raises(RuntimeError, match=r"shutdown\(\)"):
        worker.do(shut_down_meanwhile)


def test_after_a_shutdown_that_did_not_wait_the_model_has_memory_of_its_own(monkeypatch):
    """The thread that was inside `reading()` gives the block back when it leaves."""

    def shut_down(scheme, model):
        entered, leave = threading.Event(), threading.Event()

        def read_on():
            with scheme.reading():
                entered.set()
                leave.wait(60)

        reader = threading.Thread(target=read_on)
        reader.start()
        entered.wait(20)
        scheme.shutdown()
        leave.set()
        reader.join(20)

    monkeypatch.setattr("sync.receiver._CLOSE_S", 0.2)
    with running(scheme := sender("shared_zero_copy"), method="fork", background=True) as (worker,):
        worker.do(shut_down)
        for value in range(2, 8):
            with contextlib.suppress(WorkerDied):
                scheme.send_async(policy(value))
        assert worker.do(held) == bits(policy(1))
        worker.do(lambda s, m: fill(m, 9))  # which would end a process that points at a block
        assert worker.do(held) == bits(policy(9))


def test_an_error_that_no_encoding_has_reaches_the_sender():
    def refuse(scheme, model):
        def fail(state):
            raise ValueError("a file called \udcff")

        model[0].set_extra_state = fail

    source = nn.Sequential(Counting("first"))
    with running(scheme := sender("multiprocess", source), counting, background=True) as (worker,):
        worker.do(refuse)
        with pytest.raises(WorkerRaised, match="a file called"):
            scheme.send()


@EACH
def test_a_worker_whose_model_fits_no_more_can_be_shut_down(kind):
    def change(scheme, model):
        model[0].weight = nn.Parameter(torch.zeros(7, 7))
        scheme.shutdown()
        return model[0].weight.shape

    with running(scheme := sender(kind)) as (worker,):
        assert worker.do(change) == (7, 7)
        with pytest.raises(WorkerDied, match="left"):
            scheme.send()


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_weights_received_without_a_model_are_in_new_memory_each_time(strategy):
    model = policy(1)
    with joined(model, None, background=False, strategy=strategy) as (scheme, _, receiver, _):
        received = []
        for value in (2, 3):
            fill(model, value)
            scheme.send_async()
            received.append(receiver.receive(20))
        assert [bits(weights) for weights in received] == [bits(policy(2)), bits(policy(3))]
