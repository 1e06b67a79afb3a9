"""The death of a sender, and what is left of schemes."""

from __future__ import annotations

import gc
import os

import pytest

from sync import HogwildWeightSyncScheme
from sync.local.waiting import wait_for
from tests.conftest import describe, shm_entries
from tests.own_process import in_own_process
from tests.sync.support import KINDS, Worker, policy, receive, running

EVERY = {**KINDS, "hogwild": HogwildWeightSyncScheme}


@pytest.mark.parametrize("kind", KINDS)
def test_the_death_of_the_sender_is_seen(kind):
    with Worker(KINDS[kind]()) as grandparent:
        assert "the sender is gone" in grandparent.do(orphaned)


def orphaned(scheme, model):
    """Start a sender whose process ends under its own worker; returns what that worker says."""
    heard, says = os.pipe()
    sender = os.fork()
    if sender == 0:
        try:
            scheme.init_on_sender(model=model, devices=["cpu"])
            if os.fork() == 0:
                os.write(says, outlive(scheme, model).encode())
            else:
                scheme.connect()
        finally:
            os._exit(0)
    os.waitpid(sender, 0)
    assert any(wait_for([heard], 1.0) for _ in range(30))
    return os.read(heard, 1000).decode()


def outlive(scheme, model):
    try:
        scheme.init_on_receiver(model=model, worker_idx=0)
        scheme.connect(background=False)
        return repr(scheme.receive(timeout=20))
    except (ConnectionError, TimeoutError) as error:
        return str(error)


@pytest.mark.parametrize("kind", EVERY)
def test_nothing_has_a_name_at_any_time(kind):
    before = shm_entries()
    scheme = EVERY[kind]()
    scheme.init_on_sender(model=policy(1), devices=["cpu"])
    with running(scheme) as (worker,):
        scheme.send_async(policy(2))
        worker.do(receive)
        assert describe(set(), shm_entries() - before) == []


@pytest.mark.parametrize("kind", EVERY)
@in_own_process
def test_a_scheme_that_is_let_go_leaves_no_descriptor_open(kind):
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def once():
        scheme = EVERY[kind]()
        scheme.init_on_sender(model=policy(1), devices=["cpu"] * 3)
        with running(scheme, background=True):
            for value in (2, 3, 4):
                scheme.send_async(policy(value))
            scheme.wait_async(20)

    once()
    before = descriptors()
    once()
    assert descriptors() == before
