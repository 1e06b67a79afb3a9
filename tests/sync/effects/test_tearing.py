"""Torn weights on purpose: which values are older, and that everything else stays as it was."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from sync import Lag, Link, Tear
from tests.sync.support import KINDS, Worker, running, sender

SIZES = (7, 5, 3)


def model():
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def numbered(version):
    """Weights of which every number says which version it is of, and which number."""
    source = model()
    with torch.no_grad():
        start = 0
        for tensor in source.state_dict().values():
            values = torch.arange(start, start + tensor.numel()) + 1000 * version
            tensor.copy_(values.view(tensor.shape))
            start += tensor.numel()
    return source


def values(source):
    """All tensors in the order of the block: by type, then by name."""
    state = source.state_dict()
    return {
        name: state[name].clone()
        for _, names in itertools.groupby(
            sorted(state, key=lambda name: str(state[name].dtype)),
            key=lambda name: str(state[name].dtype),
        )
        for name in names
    }


def torn(tear, version, old, chosen_as=None):
    """What `version` should hold, if it is torn with `old`: written apart from the code.

    chosen_as: the number of `version` in the count of the run.
    """
    new, older = values(numbered(version)), values(numbered(old))
    number = version if chosen_as is None else chosen_as
    names = list(new)
    if tear.unit == "tensor":
        for i in tear.choose(number, len(names)).tolist():
            new[names[i]] = older[names[i]]
        return new
    sizes = [new[name].numel() for name in names]
    for place in tear.choose(number, sum(sizes)).tolist():
        i = 0
        while place >= sizes[i]:
            place -= sizes[i]
            i += 1
        new[names[i]].view(-1)[place] = older[names[i]].view(-1)[place]
    return new


def taken(scheme, mine, version):
    """Wait for a version, and take what else there is; the version, and the model's values."""
    while scheme.version < version:
        assert scheme.receive(20.0) is not None
    while scheme.receive() is not None:
        pass
    return scheme.version, values(mine)


def check(found, version, expected):
    assert found[0] == version
    assert list(found[1]) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[1][name], tensor), name


def tearing(tear, kind="shared_copy", workers=1, **options):
    return sender(kind, numbered(0), workers, tear=tear, sync=False, **options)


@pytest.mark.parametrize(
    ("kind", "wire", "unit"),
    [
        ("shared_copy", "float32", "tensor"),
        ("shared_zero_copy", "float32", "element"),
        ("multiprocess", "float32", "tensor"),
        ("shared_copy", "float32", "element"),
    ],
)
def test_a_version_holds_the_chosen_values_of_so_many_versions_ago(kind, wire, unit):
    tear = Tear(share=0.4, span=2, unit=unit)
    with running(scheme := tearing(tear, kind, workers=2, wire=wire), model) as workers:
        for n in range(1, 8):
            scheme.send(numbered(n))
            for worker in workers:
                check(worker.do(taken, n), n, torn(tear, n, max(0, n - 2)))


@pytest.mark.parametrize(
    ("kind", "link"),
    [("shared_copy", None), ("shared_zero_copy", Link(latency_ms=2)), ("multiprocess", None)],
    ids=str,
)
def test_what_is_torn_is_what_lag_delivers(kind, link):
    tear = Tear(share=0.5, span=1)
    scheme = tearing(tear, kind, workers=2, lag=Lag("cycle", values=(0, 2, 3)), link=link)
    with running(scheme, model) as workers:
        newest = 0
        for n in range(1, 10):
            scheme.send(numbered(n))
            newest = max(newest, n - (0, 2, 3)[n % 3])
            for worker in workers:
                check(worker.do(taken, newest), newest, torn(tear, newest, max(0, newest - 1)))
        assert scheme.history == 4


def test_choices_go_on_from_the_first_version():
    tear = Tear(share=0.4)
    scheme = KINDS["shared_copy"](tear=tear, sync=False)
    scheme.first_version = 7
    scheme.init_on_sender(model=numbered(0), devices=["cpu"])
    with running(scheme, model) as (worker,):
        for n in range(1, 4):
            scheme.send(numbered(n))
            expected = torn(tear, n, n - 1, chosen_as=7 + n)
            check(worker.do(taken, n), n, expected)


def test_a_version_is_torn_with_what_the_same_worker_was_sent():
    tear = Tear(share=0.5)
    with running(scheme := tearing(tear, workers=2), model) as workers:
        sent = {0: [0], 1: [0]}
        for n, to in enumerate([[0, 1], [0], [0], [1], [0, 1]], 1):
            scheme.send(numbered(n), worker_ids=to)
            for index, worker in enumerate(workers):
                if index in to:
                    old = max(v for v in sent[index] if v <= n - 1)
                    check(worker.do(taken, n), n, torn(tear, n, old))
                    sent[index].append(n)
                else:
                    assert worker.do(taken, 0)[0] == sent[index][-1]


@pytest.mark.parametrize("lag", [None, 2])
def test_a_process_that_takes_a_place_gets_the_same_torn_version(lag):
    tear = Tear(share=0.5)
    with running(scheme := tearing(tear, lag=lag), model, method="fork") as (worker,):
        for n in range(1, 6):
            scheme.send(numbered(n))
        version = 5 - (lag or 0)
        check(worker.do(taken, version), version, torn(tear, version, version - 1))
        worker.die()
        with Worker(scheme, model, worker_idx=0) as newcomer:
            newcomer.meet(scheme, worker_idx=0)
            check(newcomer.do(taken, version), version, torn(tear, version, version - 1))
            scheme.send(numbered(6))
            check(newcomer.do(taken, version + 1), version + 1, torn(tear, version + 1, version))


@pytest.mark.parametrize(("share", "count", "at_least"), [(0.3, 10, 3), (0.25, 6, 1), (1.0, 4, 4)])
def test_the_share_is_that_of_every_version_to_the_nearest_one(share, count, at_least):
    tear = Tear(share=share)
    chosen = [tear.choose(version, count).tolist() for version in range(4_000)]
    assert {len(set(one)) for one in chosen} <= {at_least, at_least + (share * count % 1 > 0)}
    assert all(one == sorted(one) for one in chosen)
    often = np.bincount(np.concatenate(chosen), minlength=count) / len(chosen)
    assert often == pytest.approx(share, abs=0.04)
    assert chosen == [tear.choose(version, count).tolist() for version in range(4_000)]
    if share < 1:
        assert chosen != [Tear(share, seed=1).choose(v, count).tolist() for v in range(4_000)]


def test_no_share_puts_nothing_around_the_mechanism():
    for tear in (None, Tear(), Tear(share=0, span=3)):
        with tearing(tear) as scheme:
            assert scheme.tear is None
            assert not hasattr(scheme._sender.channel, "inner")
