"""The lock of a collector that several threads use."""

from __future__ import annotations

import threading

from collectors.workers.fair_lock import FairLock
from tests.collectors.troubled import wait_until


def test_threads_get_the_lock_in_the_order_of_their_requests():
    lock, order = FairLock(), []

    def use(number):
        with lock, lock:
            order.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(5)]
    with lock:
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda n=number: len(lock._queue) == n + 2)
        assert not order
    use("the last")  # who had it comes after those who wait
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, "the last"]


def test_a_thread_that_gives_up_leaves_its_place_in_the_queue():
    lock, found = FairLock(), []
    with lock:
        thread = threading.Thread(target=lambda: found.append(lock.acquire(0.01)))
        thread.start()
        thread.join()
        assert lock.acquire(0.0)  # one more time; each acquire has its release
        lock.release()
    assert found == [False]
    with lock:
        assert len(lock._queue) == 1
