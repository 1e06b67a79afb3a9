"""Any history of sends, receives, refusals and successors, over every mechanism: a worker has what
was sent to it last, in one piece, and the sender knows it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from sync import (
    Lag,
    MultiProcessWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
    WorkerRaised,
    WorkerTimeout,
)
from tests.promises.probe import wait_until
from tests.sync.remote.support import Threads
from tests.sync.test_any_model import PROFILE

NUM_WORKERS = 3
WAIT_S = 10.0


class Numbered(nn.Module):
    """A parameter, a buffer and extra state, all of one number."""

    def __init__(self, number: int = 0):
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(3))
        self.register_buffer("buffer", torch.zeros(2))
        self.register_buffer("constant", torch.ones(2000))
        self.refuses = False
        self.set(number)

    def set(self, number: int) -> None:
        with torch.no_grad():
            self.parameter.fill_(number)
            self.buffer.fill_(number)
        self.extra = number

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        if self.refuses:
            raise RuntimeError("this model refuses")
        self.extra = state

    @property
    def numbers(self) -> set[float]:
        return {*self.parameter.tolist(), *self.buffer.tolist(), float(self.extra)}


class Expected:
    """What one worker should have, kept apart from the code under test.

    published: what was published to it, by version.
    due: the newest version that it was sent, or takes after it has refused one.
    """

    def __init__(self) -> None:
        self.published = {0: 0}
        self.due = self.version = 0
        self.sent = [0]
        self.applied = {0}
        self.refused: set[int] = set()
        self.restarts = 0

    def publish(self, version: int, number: int, lag: int) -> None:
        self.published[version] = number
        due = max((one for one in self.published if one <= version - lag), default=-1)
        if due > self.sent[-1]:
            self.due = due
            self.sent.append(due)


class History:
    """A sender and its receivers in this process, and what is expected of them."""

    def __init__(self, make: Any, lag: tuple[Lag, Callable[[int, int], int]], **options: Any):
        self.engine, self.lag_of = Threads(NUM_WORKERS), lag[1]
        self.scheme: WeightSyncScheme = make(lag=lag[0], connect_timeout=WAIT_S, **options)
        if isinstance(self.scheme, RPCWeightSyncScheme):
            self.scheme.attach(self.engine)
        self.model = Numbered()
        self.scheme.init_on_sender(model=self.model, devices=["cpu"] * NUM_WORKERS)
        self.expected = [Expected() for _ in range(NUM_WORKERS)]
        self.receivers: list[WeightSyncScheme] = []
        self.number = self.sends = 0
        self.meet(range(NUM_WORKERS))

    def meet(self, workers: Sequence[int]) -> None:
        """Connect new receivers, which take the places of those there are."""
        for worker in workers:
            receiver = copy.deepcopy(self.scheme)
            receiver.init_on_receiver(model=Numbered(-1), worker_idx=worker)
            self.receivers[worker : worker + 1] = [receiver]
        with ThreadPoolExecutor(1) as thread:
            which = workers[0] if len(workers) == 1 else None
            meeting = thread.submit(self.scheme.connect, worker_idx=which)
            for worker in workers:
                self.receivers[worker].connect(background=False)
            meeting.result(WAIT_S)

    # -- steps

    def send(self, workers: list[int], *, by_worker: bool = False) -> None:
        self.number += 1
        self.sends += 1
        if by_worker:
            self.scheme.send_async({w: Numbered(self.number + 64 * w) for w in workers})
        else:
            self.model.set(self.number)
            self.scheme.send_async(worker_ids=workers)
        self.note_send(workers, by_worker=by_worker)
        self.model.set(999)  # never sent

    def note_send(self, workers: list[int], *, by_worker: bool = False) -> None:
        for worker in workers:
            number = self.number + 64 * worker * by_worker
            lag = self.lag_of(self.scheme.version, worker)
            self.expected[worker].publish(self.scheme.version, number, lag)
        assert self.scheme.version == self.sends

    def refuse_to_send(self, workers: list[int]) -> None:
        with pytest.raises(ValueError, match="NaN"):
            self.scheme.send_async(Numbered(float("nan")), worker_ids=workers)  # type: ignore[arg-type]

    def receive(self, worker: int) -> None:
        """Take all there is."""
        receiver, expected = self.receivers[worker], self.expected[worker]
        at_once = isinstance(self.scheme, SharedMemWeightSyncScheme)
        while True:
            waits = not at_once and receiver.version < expected.due
            received = receiver.receive(WAIT_S if waits else None)
            if received is None:
                break
            assert receiver.version > expected.version
            expected.version = receiver.version
            expected.applied.add(receiver.version)
            assert set(received["parameter"].tolist()) == receiver.model.numbers
            self.look(worker)
        assert receiver.version == expected.version == expected.due

    def refuse(self, worker: int) -> None:
        """Let a worker refuse one version, which is an error on both sides."""
        self.receive(worker)
        receiver, expected = self.receivers[worker], self.expected[worker]
        receiver.model.refuses = True
        before = expected.due
        self.send([worker])
        if expected.due > before:
            with pytest.raises(RuntimeError, match="this model refuses"):
                receiver.receive(WAIT_S)
            expected.refused.add(expected.due)
            self.look(worker)
            with pytest.raises(WorkerRaised, match="this model refuses"):
                self.scheme.wait_async(WAIT_S, worker_ids=[worker])
            late = f"did not acknowledge version {expected.due}"
            with pytest.raises(WorkerTimeout, match=late):  # it is still waited for
                self.scheme.wait_async(0, worker_ids=[worker])
            assert self.scheme.acknowledged[worker] == expected.version
            expected.due = expected.version  # until it is sent a newer one
        receiver.model.refuses = False

    def succeed(self, worker: int) -> None:
        """Put another process in the place of a worker; it gets what was sent last."""
        expected = self.expected[worker]
        expected.due = expected.sent[-1]  # also if the predecessor refused it
        self.receivers[worker].shutdown()
        answered = expected.sent[-1] in expected.applied | expected.refused
        if isinstance(self.scheme, RPCWeightSyncScheme) and not answered:
            wait_until(lambda: self.scheme.stats and not self.scheme.synchronized_on_sender)
        self.meet([worker])
        expected.version = expected.due
        expected.applied |= {expected.due} - expected.refused  # which counts as a failure
        expected.restarts += 1
        self.look(worker)

    # -- checks

    def look(self, worker: int) -> None:
        receiver, expected = self.receivers[worker], self.expected[worker]
        number = expected.published[expected.version]
        assert receiver.version == expected.version
        assert receiver.model.numbers == {float(number)}

    def count(self) -> None:
        stats = self.scheme.stats
        assert stats["version"] == self.sends
        for worker, expected in enumerate(self.expected):
            counts = stats["workers"][worker]
            past = set(expected.sent[:-1]) - expected.applied - expected.refused
            assert counts["addressed"] == len(expected.sent)
            assert counts["applied"] == len(expected.applied)
            assert counts["coalesced"] == len(past)
            assert counts["restarts"] == expected.restarts

    def end(self) -> None:
        for worker, expected in enumerate(self.expected):
            self.receive(worker)
            if expected.sent[-1] not in expected.refused:
                self.scheme.wait_async(WAIT_S, worker_ids=[worker])
                assert self.scheme.acknowledged[worker] == expected.due
            assert self.scheme.addressed[worker] == expected.sent[-1]
        self.count()

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.shutdown()
        self.scheme.shutdown()
        self.engine.close()


MECHANISMS: dict[str, Any] = {
    "shared_mem": lambda **options: SharedMemWeightSyncScheme(per_worker_weights=True, **options),
    "zero_copy": lambda **options: SharedMemWeightSyncScheme(
        per_worker_weights=True, zero_copy=True, **options
    ),
    "multiprocess": MultiProcessWeightSyncScheme,
    "remote": RPCWeightSyncScheme,
}
# What is asked for, and the lag of each worker when a version is published.
CYCLE, BY_WORKER = (0, 3, 1, 1, 2), (0, 2, 8)
LAGS: list[tuple[Lag, Callable[[int, int], int]]] = [
    *[(Lag(), lambda version, worker: 0)] * 3,
    (Lag(k=2), lambda version, worker: 2),
    (Lag("cycle", values=CYCLE), lambda version, worker: CYCLE[version % 5]),
    (Lag("cycle", values=BY_WORKER, per="worker"), lambda version, worker: BY_WORKER[worker]),
]
WORKER = st.integers(0, NUM_WORKERS - 1)
WORKERS = st.sets(WORKER, min_size=1).map(sorted) | st.just([*range(NUM_WORKERS)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), WORKERS),
        st.tuples(st.just("send"), WORKERS),
        st.tuples(st.just("send_by_worker"), WORKERS),
        st.tuples(st.just("receive"), WORKER),
        st.tuples(st.just("receive"), WORKER),
        st.tuples(st.just("refuse"), WORKER),
        st.tuples(st.just("refuse_to_send"), WORKERS),
        st.tuples(st.just("succeed"), WORKER),
    ),
    max_size=15,
)


def check(mechanism: str, wire: str, lag: Any, verify: str, steps: list[tuple[str, Any]]) -> None:
    if mechanism == "zero_copy":
        wire = "float32"
    history = History(MECHANISMS[mechanism], lag, wire=wire, verify=verify)
    try:
        for step, argument in steps:
            if step == "send_by_worker":
                history.send(argument, by_worker=True)
            else:
                getattr(history, step)(argument)
            for worker in range(NUM_WORKERS):
                history.look(worker)
            if mechanism in ("shared_mem", "zero_copy"):  # others are answered later
                history.count()
        history.end()
    finally:
        history.close()


WAYS = st.tuples(
    st.sampled_from(list(MECHANISMS)),
    st.sampled_from(["float32", "float32", "bfloat16"]),
    st.sampled_from(LAGS),
    st.sampled_from(["off", "off", "every"]),
)


# A history that fails may wait for what does not come, so that a shorter one is not looked for.
QUICK = {**PROFILE, "phases": [Phase.generate]}


@given(WAYS, STEPS)
@settings(max_examples=200, **QUICK)
def test_each_worker_has_what_it_was_sent_last_and_the_sender_knows_it(way, steps):
    check(*way, steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(WAYS, STEPS)
@settings(max_examples=2000, **QUICK)
def test_more_histories(way, steps):
    check(*way, steps)


def with_long_extra_state():
    model = Numbered(3)
    model.extra = "x" * 100_000
    return model


@pytest.mark.parametrize("mechanism", ["shared_mem", "multiprocess", "remote"])
@pytest.mark.parametrize(
    ("refused", "wire", "why"),
    [
        (lambda: Numbered(float("nan")), "float32", "NaN"),
        (with_long_extra_state, "float32", "extra state takes"),
        (lambda: Numbered(1e6), "float16", "too large"),  # it is packed before that is noticed
    ],
    ids=["infinite", "long_extra_state", "too_large"],
)
def test_a_successor_gets_what_was_sent_before_a_version_was_refused(mechanism, refused, wire, why):
    history = History(MECHANISMS[mechanism], LAGS[0], wire=wire)
    try:
        history.send([0, 1, 2])
        for worker in range(NUM_WORKERS):
            history.receive(worker)
        history.scheme.wait_async(WAIT_S)
        with pytest.raises(ValueError, match=why):
            history.scheme.send_async({0: Numbered(2), 1: refused(), 2: Numbered(2)})
        history.succeed(0)
        history.end()
    finally:
        history.close()
