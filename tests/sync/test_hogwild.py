"""Weights without synchronisation, on purpose: what is shared, what is counted, what is left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sync import HogwildWeightSyncScheme
from tests.sync.support import (
    Counting,
    Worker,
    begin_reading,
    bits,
    end_reading,
    fill,
    held,
    policy,
    receive,
    running,
    sender,
)


def scheme_of(model, workers=1, **options):
    return sender("hogwild", model, workers, **options)


def parameters(scheme, model):
    return bits(dict(model.named_parameters()))


def test_workers_see_changes_in_place_at_once_and_without_a_send():
    model = policy(1)
    with running(scheme_of(model, workers=2)) as workers:
        for value in (2, 3):
            fill(model, value)
            for worker in workers:
                assert worker.do(parameters) == bits(dict(policy(value).named_parameters()))
                assert not worker.do(receive)


def test_an_optimisers_steps_reach_workers_and_train_the_same_parameters():
    model = policy(1)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    with running(scheme_of(model)) as (worker,):
        model(torch.ones(4, 3)).sum().backward()
        before = bits(model)
        optimiser.step()
        assert bits(model) != before
        assert worker.do(parameters) == bits(dict(model.named_parameters()))


def test_a_send_counts_a_version_and_brings_buffers_and_extra_state():
    model = nn.Sequential(Counting("first"), nn.BatchNorm1d(2))
    scheme = scheme_of(model)
    with running(scheme, lambda: nn.Sequential(Counting(), nn.BatchNorm1d(2))) as (worker,):
        model[0].extra = "second"
        fill(model, 5)
        assert worker.do(lambda s, m: (m[0].extra, m[1].running_mean[0].item())) == ("first", 0.0)
        scheme.send_async()
        assert worker.do(receive)
        assert worker.do(lambda s, m: (m[0].extra, m[1].running_mean[0].item())) == ("second", 5.0)
        assert worker.do(held) == bits(model)
        assert worker.do(lambda s, m: s.version) == scheme.version == 1
        assert scheme.acknowledged == {0: 1}


def test_bytes_are_those_that_a_send_moves():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    scheme = scheme_of(model, workers=2, sync=False)
    with running(scheme, lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))):
        before = scheme.stats["bytes"]
        scheme.send()
        assert scheme.stats["bytes"] - before == buffers
        whole = sum(tensor.nbytes for tensor in model.state_dict().values())
        scheme.send({name: value.clone() for name, value in model.state_dict().items()})
        assert scheme.stats["bytes"] - before == buffers + whole


def test_nothing_is_moved_but_what_the_trainer_replaced():
    with running(scheme := scheme_of(nn.Linear(3, 3)), lambda: nn.Linear(3, 3)):
        before = scheme.stats["bytes"]
        scheme.send_async()
        assert scheme.stats["bytes"] == before
        assert scheme.stats["moved"]["the trainer's own memory"]["bytes"] == before
        with pytest.raises(ValueError, match="all read the trainer"):
            scheme.send({0: nn.Linear(3, 3)})


def test_a_parameter_that_the_trainer_replaced_is_shared_from_the_next_send_on():
    model = policy(1)
    scheme = scheme_of(model)
    with running(scheme) as (worker,):
        model[0].weight = nn.Parameter(torch.full((4, 3), 8.0))
        model[2].bias.data = torch.full((2,), 8.0)
        scheme.send_async()
        assert worker.do(receive)
        assert worker.do(held) == bits(model)
        fill(model, 9)
        assert worker.do(parameters) == bits(dict(model.named_parameters()))


def test_after_shutdown_the_trainers_model_keeps_its_values_in_memory_of_its_own():
    model = policy(1)
    parameters_before = list(model.parameters())
    with running(scheme := scheme_of(model)) as (worker,):
        shared = [p.data_ptr() for p in model.parameters()]
        fill(model, 3)
        scheme.shutdown()
        assert bits(model) == bits(policy(3))
        assert not set(shared) & {p.data_ptr() for p in model.parameters()}
        assert all(a is b for a, b in zip(parameters_before, model.parameters(), strict=True))
        fill(model, 9)  # a worker that still looks sees nothing of it
        assert worker.do(parameters) == bits(dict(policy(3).named_parameters()))


def test_a_scheme_that_never_connected_leaves_the_model_where_it_is():
    model = policy(1)
    before = [p.data_ptr() for p in model.parameters()]
    scheme_of(model).shutdown()
    assert [p.data_ptr() for p in model.parameters()] == before


def test_a_worker_keeps_the_last_weights_after_its_own_shutdown():
    model = policy(4)
    with running(scheme_of(model)) as (worker,):
        worker.do(lambda s, m: s.shutdown())
        fill(model, 5)
        assert worker.do(held) == bits(policy(4))
        worker.do(lambda s, m: fill(m, 6) and None)
        assert bits(model) == bits(policy(5))


def end(scheme, model):
    end_reading(scheme, model)
    return scheme.torn


def test_uses_during_which_weights_moved_are_counted_as_torn():
    model = policy(1)
    with running(scheme_of(model, check_every=1)) as (worker,):
        assert worker.do(lambda s, m: s.torn) == {"checked": 0, "torn": 0, "fraction": 0.0}
        for change in (False, True, False, True):
            assert worker.do(begin_reading) == 0
            if change:
                with torch.no_grad():
                    model[2].bias.add_(1)
            counted = worker.do(end)
        assert counted == {"checked": 4, "torn": 2, "fraction": 0.5}


@pytest.mark.parametrize(("given", "every"), [({}, 17), ({"check_every": 4}, 4)])
def test_of_so_many_uses_the_first_is_checked(given, every):
    model = policy(1)
    with running(scheme_of(model, **given)) as (worker,):
        for use in range(2 * every + 1):
            worker.do(begin_reading)
            fill(model, use)
            counted = worker.do(end)
            checked = 1 + use // every
            assert counted == {"checked": checked, "torn": checked, "fraction": 1.0}


def test_weights_that_differ_by_worker_are_refused():
    scheme = HogwildWeightSyncScheme()
    with pytest.raises(ValueError, match="hogwild workers all read the trainer's own weights"):
        scheme.init_on_sender(params_map={0: policy(1), 1: policy(2)})
    with pytest.raises(ValueError, match="hogwild workers all read the trainer's own weights"):
        scheme.init_on_sender(model=policy(1), device_map_fn=lambda w, m: m, num_workers=2)


def test_a_model_that_is_not_in_cpu_memory_is_refused():
    scheme = scheme_of(nn.Linear(2, 2, device="meta"))
    with scheme, pytest.raises(ValueError, match="hogwild needs a CPU model; this one is on meta"):
        scheme.connect()


def test_who_takes_a_dead_workers_place_shares_the_same_weights():
    model = policy(1)
    scheme = scheme_of(model)
    with running(scheme, method="fork") as (worker,):
        worker.die()
        with Worker(scheme, worker_idx=0) as newcomer:
            newcomer.meet(scheme, worker_idx=0)
            fill(model, 6)
            assert newcomer.do(parameters) == bits(dict(policy(6).named_parameters()))


class Flat(nn.Module):
    """A layer whose parameters are views of a flat one, which an optimiser steps."""

    def __init__(self, flat=nn.Parameter):
        super().__init__()
        memory = torch.zeros(10)
        if flat is nn.Parameter:
            self.flat = nn.Parameter(memory)
        elif flat is nn.Buffer:
            self.flat = nn.Buffer(memory[:8])
            memory = memory[:8]
        self.layer = nn.Linear(4, 2, bias=flat is not nn.Buffer)
        self.layer.weight.data = memory[:8].view(2, 4)
        if self.layer.bias is not None:
            self.layer.bias.data = memory[8:]


@pytest.mark.parametrize("flat", [nn.Parameter, nn.Buffer, None])
def test_a_parameter_that_shares_memory_is_refused_by_name(flat):
    with pytest.raises(ValueError, match=r"hogwild moves each parameter.*'layer.weight'"):
        scheme_of(Flat(flat))


def test_a_second_scheme_of_one_model_is_refused_and_the_first_goes_on():
    model = policy(1)
    second = HogwildWeightSyncScheme()
    second.init_on_sender(model=model, devices=["cpu"])  # neither has moved anything yet
    with running(scheme_of(model)) as (worker,):
        for refused in (second.connect, lambda: scheme_of(model)):
            with pytest.raises(ValueError, match=r"'0.weight' is part of .* another scheme's"):
                refused()
        fill(model, 2)
        assert worker.do(parameters) == bits(dict(policy(2).named_parameters()))
    second.shutdown()
    scheme_of(model).shutdown()  # its memory is its own again


def test_weights_that_are_not_finite_are_refused_although_workers_have_seen_them():
    model = policy(1)
    with running(scheme := scheme_of(model)) as (worker,):
        model[0].weight.data[0] = torch.nan
        with pytest.raises(ValueError, match=r"send refused: '0.weight' holds 3 NaN or infinite"):
            scheme.send()
        assert not worker.do(receive)
        model[0].weight.data[0] = 1
        expected = bits(model)
        with pytest.raises(ValueError, match=r"send refused: '0.bias' holds"):
            scheme.send({**fill(policy(), 2).state_dict(), "0.bias": torch.full((4,), torch.nan)})
        assert bits(model) == expected
    model = policy(1)
    with running(scheme := scheme_of(model, check_finite=False)) as (worker,):
        model[0].weight.data[0] = torch.nan
        scheme.send_async()
        assert worker.do(receive)
        assert worker.do(parameters) == bits(dict(model.named_parameters()))
