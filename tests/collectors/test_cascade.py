"""Weights from above: a collector that receives some passes them on, stamped by their sender."""

from __future__ import annotations

import copy
import multiprocessing
import threading

import pytest
import torch

from sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from tests.collectors.support import (
    COLLECTORS,
    Checker,
    CodeEnv,
    CodePolicy,
    all_accounted_for,
)


def make(kind, **options):
    if kind != "single":
        kwargs = [{"worker": worker} for worker in range(2)]
        options |= {"num_workers": 2, "create_env_kwargs": kwargs, "start_method": "fork"}
    return COLLECTORS[kind](CodeEnv, CodePolicy(), frames_per_batch=10, **options)


def sender(scheme, num_workers=1):
    """A trainer's policy, and its side of the scheme."""
    policy = CodePolicy()
    scheme.init_on_sender(model_id="policy", model=policy, devices=["cpu"] * num_workers)
    return policy


def send(scheme, policy, times=1, worker_ids=None):
    """Publish weights that say which version they are."""
    for _ in range(times):
        with torch.no_grad():
            policy.number += 1
        scheme.send_async(worker_ids=worker_ids)


def collect(kind, scheme, pipe):
    """Be a process whose collector has its weights from another."""
    with make(kind, weight_recv_schemes={"policy": scheme}, worker_idx=0) as collector:
        while pipe.recv():
            batch = collector.next()
            pipe.send((batch, collector.policy_version, all_accounted_for(collector.stats())))


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("sync", SharedMemWeightSyncScheme), ("async", MultiProcessWeightSyncScheme)],
)
def test_weights_of_another_process_are_passed_on_to_workers_with_their_stamp(kind, scheme):
    scheme, ctx = scheme(), multiprocessing.get_context("fork")
    policy, (here, there) = sender(scheme), ctx.Pipe()
    process = ctx.Process(target=collect, args=(kind, scheme, there))
    process.start()
    checker, used = Checker([1, 1]), set()
    try:
        scheme.connect()
        for number in range(12):
            here.send(True)
            assert here.poll(30.0)
            batch, version, accounted = here.recv()
            checker.check(batch)  # that the weights are those of the stamp
            assert accounted
            used |= set(batch["policy_version"].flatten().tolist())
            if kind == "sync":  # the other scheme may have the newest still on its way
                assert version == scheme.version
                assert (batch["policy_version"] == version).all()
            send(scheme, policy, times=1 + number % 3)
        assert len(used) > 2
        here.send(False)
        process.join(30.0)
        assert process.exitcode == 0
    finally:
        process.kill()
        scheme.shutdown()


def registered(collector, scheme):
    """Have a collector of this process meet its sender, which is here too."""
    meeting = threading.Thread(target=scheme.connect)
    meeting.start()
    collector.register_scheme_receiver(weight_recv_schemes={"policy": copy.deepcopy(scheme)})
    meeting.join(30.0)


@pytest.mark.parametrize("kind", ["single", "sync"])
def test_a_receiver_can_be_registered_later_and_asked_when_one_likes(kind):
    scheme = SharedMemWeightSyncScheme(sync=False)
    policy = sender(scheme, num_workers=2)
    with make(kind, worker_idx=1) as collector, scheme:
        other = copy.deepcopy(scheme)
        other.init_on_receiver(worker_idx=0)
        waiting = threading.Thread(target=other.connect, kwargs={"background": False})
        waiting.start()
        collector.increment_version()
        assert collector.get_policy_version() == 1
        registered(collector, scheme)
        waiting.join(30.0)
        assert collector.get_policy_version() == 0  # as it is counted above from now on
        assert collector.receive_weights() is False
        send(scheme, policy, times=3, worker_ids=[0])
        assert collector.receive_weights() is False  # it was told to be worker 1
        send(scheme, policy, worker_ids=[1])
        assert collector.receive_weights(timeout=30.0) is True
        assert collector.receive_weights() is False
        assert collector.get_policy_version() == collector.stats()["policy_version"] == 4
        batch = collector.next()
        assert (batch["policy_version"] == 4).all()
        assert (batch["weights"] == 4).all()
        other.shutdown()
