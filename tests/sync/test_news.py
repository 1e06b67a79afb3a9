"""Asking for something newer, and sleeping until there is."""

from __future__ import annotations

import copy
import threading

import pytest

from sync import NoWeightSyncScheme
from sync.local.waiting import Doorbell, wait_for
from tests.sync.support import EACH_OF_ALL, in_one_thread, policy, running, sender

LONG_S = 20.0


@EACH_OF_ALL
def test_there_is_news_from_an_offer_until_it_is_taken(kind):
    with in_one_thread(scheme := sender(kind)) as (receiver,):
        assert not receiver.has_news()
        for number in range(1, 20):
            scheme.send_async(policy(number))
            assert receiver.has_news()
            assert receiver.wait_for_news(LONG_S)
            assert receiver.receive() is not None
            assert not receiver.has_news()
            assert not receiver.wait_for_news(0.0)
            scheme.wait_async()


@EACH_OF_ALL
def test_what_is_for_another_worker_is_no_news(kind):
    with in_one_thread(scheme := sender(kind, workers=2), 2) as (one, other):
        scheme.send_async(worker_ids=[1])
        assert (one.has_news(), other.has_news()) == (False, True)


def wait_and_take(scheme, model, timeout):
    woken = scheme.wait_for_news(timeout)
    return woken, scheme.receive() is not None


@EACH_OF_ALL
def test_a_sleeping_receiver_is_woken_by_every_offer(kind):
    with running(scheme := sender(kind)) as (worker,):
        for _ in range(50):
            worker.tell(wait_and_take, LONG_S)
            scheme.send_async()
            assert worker.hear() == (True, True)


@EACH_OF_ALL
def test_a_sleeping_receiver_is_woken_by_a_descriptor_of_its_own(kind):
    with in_one_thread(sender(kind)) as (receiver,):
        bell = Doorbell()
        threading.Timer(0.05, bell.ring).start()
        assert not receiver.wait_for_news(LONG_S, [bell.fd])
        assert wait_for([bell.fd], 0) == [bell.fd]


@EACH_OF_ALL
def test_a_sleeping_receiver_is_woken_by_the_senders_end_as_often_as_it_sleeps(kind):
    with running(scheme := sender(kind)) as (worker,):
        worker.tell(lambda s, m: [wait_and_take(s, m, LONG_S) for _ in range(3)])
        scheme.shutdown()
        assert [taken for _, taken in worker.hear()] == [False] * 3


@EACH_OF_ALL
def test_its_descriptors_can_be_polled_beside_others(kind):
    def poll_both(scheme, model):
        bell, heard = Doorbell(), []
        while len(heard) < 10:
            with scheme.sleeping():
                if not scheme.has_news():
                    assert wait_for([bell.fd, *scheme.news_fds()], LONG_S) != []
            if scheme.receive() is not None:
                heard.append(scheme.version)
        return heard

    with running(scheme := sender(kind)) as (worker,):
        worker.tell(poll_both)
        for number in range(1, 11):
            scheme.send(policy(number))
        assert worker.hear() == list(range(1, 11))


@EACH_OF_ALL
def test_one_who_does_not_sleep_is_not_rung(kind):
    with in_one_thread(scheme := sender(kind)) as (receiver,):
        scheme.send_async()
        rings = wait_for(receiver.news_fds(), 0)
        assert rings == [] or kind == "multiprocess"  # there the message itself is what is polled


@EACH_OF_ALL
def test_with_a_background_thread_there_is_nothing_to_wait_for(kind):
    def ask(scheme, model):
        for call in (lambda: scheme.wait_for_news(0.0), scheme.sleeping, scheme.news_fds):
            with pytest.raises(RuntimeError, match="the background thread applies new versions"):
                call()
        scheme.receive(LONG_S)
        return scheme.has_news()

    with running(scheme := sender(kind), background=True) as (worker,):
        scheme.send()
        assert not worker.do(ask)


@EACH_OF_ALL
def test_news_is_for_receivers_between_init_and_shutdown(kind):
    with sender(kind) as scheme:
        for ask in (scheme.has_news, scheme.news_fds, lambda: scheme.wait_for_news(0.0)):
            with pytest.raises(RuntimeError, match="is for a receiver"):
                ask()


def test_without_synchronisation_there_is_never_news():
    sender = NoWeightSyncScheme()
    sender.init_on_sender(model=policy(1), devices=["cpu"])
    scheme = copy.deepcopy(sender)
    scheme.init_on_receiver(model=policy(1), worker_idx=0)
    scheme.connect(background=False)
    bell = Doorbell()
    bell.ring()
    assert not scheme.has_news()
    assert not scheme.wait_for_news(LONG_S, [bell.fd])
    assert not scheme.wait_for_news(0.0)
    with scheme.sleeping():
        assert scheme.news_fds() == []
