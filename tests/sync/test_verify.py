"""Workers compare the weights that they use with those that were published."""

from __future__ import annotations

import itertools
import pickle
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

from sync import (
    WIRES,
    Link,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    Tear,
    WeightsDiffer,
    WorkerRaised,
)
from sync.model.block import HEADER_BYTES
from sync.schemes.multiprocess import MultiProcessSender
from sync.schemes.shared_mem import SharedMemSender
from tests.sync.support import (
    EACH,
    KINDS,
    Counting,
    bits,
    held,
    policy,
    receive,
    running,
    version,
)

MODE = pytest.mark.parametrize("verify", ["sampled", "every"])
# Every wire format and each kind; a model cannot point at what has to be decoded.
PAIRS = [
    ("shared_zero_copy", "float32"),
    *zip(itertools.cycle(["multiprocess", "shared_copy"]), WIRES, strict=False),
]
LINKS = {"direct": None, "linked": Link(latency_ms=1, jitter_ms=1)}
INPUTS = torch.ones(2, 3)
SAMPLED = 100  # of so many calls, one is checked


def scheme_of(make, model=None, *, workers=1, **options):
    scheme = make(**options)
    scheme.init_on_sender(model=policy() if model is None else model, devices=["cpu"] * workers)
    return scheme


def train(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def act(scheme, model, calls=1):
    """Policy calls, as a collector makes them: in training mode, so running statistics change."""
    call = scheme.watched(model)
    for _ in range(calls):
        call(INPUTS)


def use(scheme, model):
    with scheme.reading() as version:
        return version


def add_to_first(scheme, model, amount):
    with torch.no_grad():
        next(model.parameters()).add_(amount)


# -- clean runs


@pytest.mark.parametrize(
    ("kind", "wire", "verify", "link"),
    [
        ("shared_copy", "float32", "sampled", "direct"),
        ("shared_zero_copy", "float32", "every", "linked"),
        ("multiprocess", "int8", "every", "direct"),
        ("multiprocess", "float32", "sampled", "linked"),
    ],
)
def test_a_clean_run_passes_and_its_calls_are_counted(verify, kind, wire, link):
    model, link = policy(), LINKS[link]
    scheme = scheme_of(KINDS[kind], model, workers=2, verify=verify, wire=wire, link=link)
    with running(scheme) as workers:
        for _ in range(3):
            for worker in workers:
                worker.do(act, SAMPLED)
            train(model)
            scheme.send_async()
            for worker in workers:
                worker.do(receive, 20.0)
        scheme.wait_async()
        assert scheme.verified_calls == 2 * 3 * (SAMPLED if verify == "every" else 1)
        if wire == "float32":
            assert [worker.do(held) for worker in workers] == [bits(model)] * 2


@pytest.mark.parametrize(("kind", "wire"), PAIRS)
def test_versions_that_are_old_or_torn_on_purpose_pass(kind, wire):
    unit = "tensor" if kind == "multiprocess" else "element"
    model, made = policy(), {"lag": 2, "tear": Tear(share=0.5, span=1, unit=unit)}
    scheme = scheme_of(KINDS[kind], model, verify="every", wire=wire, **made)
    with running(scheme) as (worker,):
        for number in range(6):
            train(model)
            scheme.send_async()
            worker.do(receive, 20.0 if number >= 2 else 0.0)
            worker.do(act)
        assert worker.do(version) == scheme.version - 2


@EACH
def test_calls_of_a_background_receiver_are_verified_in_reading(kind):
    model = policy()
    scheme = scheme_of(KINDS[kind], model, verify="every")
    with running(scheme, background=True) as (worker,):
        for number in range(1, 4):
            train(model)
            scheme.send()
            assert worker.do(use) == number
        assert scheme.verified_calls == 2  # the last is not reported yet


def test_off_is_the_default_and_leaves_blocks_as_they_were():
    off, on = (SharedMemWeightSyncScheme(verify=verify) for verify in ("off", "every"))
    assert SharedMemWeightSyncScheme().verify == "off"
    for scheme in (off, on):
        scheme.init_on_sender(model=policy(), devices=["cpu"])
    room = on.send_stats.whole_bytes - off.send_stats.whole_bytes
    assert 0 < room < 4 * 64
    with running(off, policy) as (worker,):
        call = worker.do(lambda scheme, model: scheme.watched(len) is len)
        assert call
        assert off.verified_calls == 0
    on.shutdown()


# -- damage


@MODE
@pytest.mark.parametrize("kind", ["shared_copy", "multiprocess"])
def test_somebody_else_who_writes_to_the_parameters_is_found(kind, verify):
    scheme = scheme_of(KINDS[kind], verify=verify)
    with running(scheme) as (worker,):
        worker.do(act, SAMPLED)
        worker.do(add_to_first, 0.5)
        with pytest.raises(WeightsDiffer, match="changed in the worker") as caught:
            worker.do(act, SAMPLED)
        assert caught.value.worker_idx == 0
        assert caught.value.version == 0
        assert caught.value.tensors == ["0.weight"]
        with pytest.raises(WeightsDiffer):  # the worker acts no more, although it is sampled
            worker.do(act)


@MODE
def test_a_change_is_found_before_the_next_version_hides_it(verify):
    scheme = scheme_of(MultiProcessWeightSyncScheme, verify=verify, timeout=20.0)
    with running(scheme) as (worker,):
        worker.do(add_to_first, 0.5)
        worker.tell(receive, 20.0)
        with pytest.raises(WorkerRaised, match=r"WeightsDiffer: worker 0, version 0: '0.weight'"):
            scheme.send()
        with pytest.raises(WeightsDiffer):
            worker.hear()
        assert worker.do(version) == 0


class Growing(nn.Module):
    """A policy that adds to a parameter while it acts, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        self.calls += 1
        if self.calls == 3:
            self.weight.data += 1
        return inputs * self.weight


def test_a_policy_that_writes_to_its_parameters_is_found_and_its_buffers_are_its_own():
    scheme = scheme_of(SharedMemWeightSyncScheme, Growing(), verify="every")
    with running(scheme, Growing) as (worker,):
        worker.do(act, 3)
        with pytest.raises(WeightsDiffer, match="version 0: 'weight' changed in the worker"):
            worker.do(act)


@MODE
def test_a_block_that_is_written_while_the_worker_points_at_it_is_found(verify):
    scheme = scheme_of(Scribbled, verify=verify, zero_copy=True)
    with running(scheme) as (worker,):
        worker.do(act, SAMPLED)
        Scribbled.channels[-1].scribble()
        with pytest.raises(WeightsDiffer, match="version 0"):
            worker.do(act, SAMPLED)


class ScribblingSender(SharedMemSender):
    """A trainer that writes to a block that it has published."""

    def scribble(self):
        self.blocks[0].views[0].zero_()


class Scribbled(SharedMemWeightSyncScheme):
    channels: ClassVar[list[ScribblingSender]] = []

    def _make_sender(self, layout, num_workers):
        self.channels.append(ScribblingSender(layout, num_workers, zero_copy=self.zero_copy))
        return self.channels[-1]


def damaged(base):
    """A mechanism that flips one bit of each version but the first."""

    class Damaging(base):
        def publish(self, block, workers):
            if block.version:
                block.buffer[HEADER_BYTES + 1] ^= 4
            super().publish(block, workers)

    return Damaging


class DamagedMessages(MultiProcessWeightSyncScheme):
    sender_channel = damaged(MultiProcessSender)


class DamagedMemory(SharedMemWeightSyncScheme):
    def _make_sender(self, layout, num_workers):
        return damaged(SharedMemSender)(layout, num_workers, zero_copy=self.zero_copy)


DAMAGED = {
    "shared_copy": DamagedMemory,
    "shared_zero_copy": partial(DamagedMemory, zero_copy=True),
    "multiprocess": DamagedMessages,
}


@pytest.mark.parametrize(("kind", "wire"), PAIRS)
def test_a_flipped_bit_is_found_on_arrival_and_the_worker_keeps_its_version(kind, wire):
    model, link = policy(), LINKS["linked" if wire in ("float32", "int8") else "direct"]
    scheme = scheme_of(
        DAMAGED[kind], model, workers=2, verify="sampled", wire=wire, link=link, timeout=20.0
    )
    with running(scheme) as workers:
        before = workers[1].do(held)
        train(model)
        for worker in workers:
            worker.tell(receive, 20.0)
        with pytest.raises(WorkerRaised, match=r"version 1: .* arrived damaged") as caught:
            scheme.send()
        for worker in workers:
            with pytest.raises(WeightsDiffer):
                worker.hear()
        assert set(caught.value.failures) == {0, 1}
        for index, failure in caught.value.failures.items():
            assert f"worker {index}, version 1" in str(failure)
        assert workers[1].do(version) == 0
        assert workers[1].do(held) == before
        workers[1].do(act, SAMPLED)  # with what it has


def test_extra_state_and_versions_are_checked_on_arrival():
    class Damaging(MultiProcessSender):
        def publish(self, block, workers):
            if block.version:
                start = block.layout.extra_offset
                text = bytes(block.buffer[start:].numpy())
                block.buffer[start + text.index(b"steps")] += 1
            super().publish(block, workers)

    class Scheme(MultiProcessWeightSyncScheme):
        sender_channel = Damaging

    model = Counting(extra={"steps": 0})
    scheme = scheme_of(Scheme, model, verify="every", timeout=20.0)
    with running(scheme, lambda: Counting(extra={})) as (worker,):
        worker.tell(receive, 20.0)
        with pytest.raises(WorkerRaised, match="'version or extra state' arrived damaged"):
            scheme.send()
        with pytest.raises(WeightsDiffer):
            worker.hear()


class Untied(nn.Module):
    def __init__(self, tied=""):
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        with torch.no_grad():
            for number, tensor in enumerate((*self.parameters(), *self.buffers())):
                tensor.fill_(number)
        if tied:
            setattr(self.other, tied, getattr(self.one, tied))


@pytest.mark.parametrize("tied", ["weight", "running_mean"])
def test_a_model_that_cannot_hold_what_was_published_is_found(tied):
    scheme = scheme_of(SharedMemWeightSyncScheme, Untied(), verify="every")
    with (
        pytest.raises(WorkerRaised, match=rf"version 0: 'one.{tied}' are not in the model"),
        running(scheme, partial(Untied, tied=tied)),
    ):
        pass


# -- what cannot be


def test_the_error_names_a_few_tensors_and_can_be_pickled():
    error = WeightsDiffer(3, 17, [f"layer.{i}" for i in range(9)], "changed")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error).startswith("worker 3, version 17: 'layer.0', 'layer.1'")
    assert str(error).endswith("'layer.4' and 4 more changed")
