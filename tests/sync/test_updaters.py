"""Updaters: which weights, for whom, mapped how; pulled by workers or pushed by the trainer."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from sync import (
    LocalWeightUpdaterBase,
    MultiProcessedRemoteWeightUpdate,
    RemoteWeightUpdaterBase,
    VanillaLocalWeightUpdater,
    WeightStrategy,
)
from tests.sync.support import bits, fill, held, policy, running


def state(value):
    return WeightStrategy("state_dict").extract_weights(policy(value))


def times_two(weights):
    return {n: t * 2 for n, t in WeightStrategy("state_dict").extract_weights(weights).items()}


class Doubling(VanillaLocalWeightUpdater):
    def _maybe_map_weights(self, server_weights, local_weights):
        assert local_weights is self.policy_weights
        return times_two(server_weights)


class Recording(RemoteWeightUpdaterBase):
    def __init__(self):
        self.sent = []

    def _sync_weights_with_worker(self, worker_id, server_weights):
        self.sent.append((worker_id, server_weights))

    def _get_server_weights(self):
        return "server"

    def all_worker_ids(self):
        return [0, 1, 2]


class Mapping(Recording):
    def _maybe_map_weights(self, server_weights):
        return f"mapped {server_weights}"

    def _skip_update(self, worker_id):
        return worker_id == 1


@pytest.mark.parametrize("call", ["update_weights", "__call__"])
def test_a_worker_pulls_the_servers_weights_when_asked(call):
    server, model = policy(1), policy(0)
    updater = VanillaLocalWeightUpdater(lambda: server, model)
    assert bits(model) == bits(policy(0))
    for value in (2, 3):
        fill(server, value)
        getattr(updater, call)()
        assert bits(model) == bits(server) == bits(policy(value))


@pytest.mark.parametrize(
    "weights", [state, policy, lambda v: WeightStrategy().extract_weights(policy(v))]
)
def test_pulled_weights_may_have_any_form_on_either_side(weights):
    local = weights(0)
    VanillaLocalWeightUpdater(lambda: policy(3), local)()
    assert bits(local) == bits(policy(3))


def test_what_the_mapping_of_a_pull_returns_is_what_is_applied():
    model = policy(0)
    Doubling(lambda: policy(3), model).update_weights()
    assert bits(model) == bits(policy(6))


@pytest.mark.parametrize("call", ["update_weights", "__call__"])
def test_what_is_given_is_taken_in_the_place_of_the_servers_weights(call):
    model = policy(0)
    updater = Doubling(lambda: pytest.fail("the server was asked"), model)
    getattr(updater, call)(policy(3))
    assert bits(model) == bits(policy(6))
    getattr(updater, call)(weights=policy(4))
    assert bits(model) == bits(policy(8))


def test_pulled_weights_that_do_not_fit_are_named_and_nothing_changes():
    model = policy(1)
    weights = state(2)
    del weights["2.bias"]
    with pytest.raises(KeyError, match=r"lacks '2\.bias'"):
        VanillaLocalWeightUpdater(lambda: weights, model)()
    assert bits(model) == bits(policy(1))


def test_a_push_goes_to_all_workers_or_to_those_named():
    updater = Recording()
    updater.update_weights()
    updater.update_weights("given", worker_ids=1)
    updater.update_weights("given", worker_ids=np.int64(2))
    updater(worker_ids=[2, 0])
    updater("given")
    assert updater.sent == [
        *((worker, "server") for worker in (0, 1, 2)),
        (1, "given"),
        (2, "given"),
        *((worker, "server") for worker in (2, 0)),
        *((worker, "given") for worker in (0, 1, 2)),
    ]


def test_what_the_mapping_of_a_push_returns_is_what_is_sent_and_a_skip_is_a_skip():
    updater = Mapping()
    updater.update_weights()
    updater.update_weights("own")
    assert updater.sent == [
        (0, "mapped server"),
        (2, "mapped server"),
        (0, "mapped own"),
        (2, "mapped own"),
    ]


class Collector:
    """Something to be registered with."""


@pytest.mark.parametrize(
    "make", [Recording, lambda: VanillaLocalWeightUpdater(state, state(0))], ids=["push", "pull"]
)
def test_an_updater_serves_one_collector_and_does_not_keep_it_alive(make):
    updater, collector = make(), Collector()
    assert updater.collector is None
    updater.register_collector(collector)
    assert updater.collector is collector
    with pytest.raises(RuntimeError, match="already serves a collector"):
        updater.register_collector(Collector())
    del collector
    gc.collect()
    assert updater.collector is None


@pytest.mark.parametrize("base", [LocalWeightUpdaterBase, RemoteWeightUpdaterBase])
def test_bases_say_what_has_to_be_defined(base):
    with pytest.raises(TypeError, match="_get_server_weights"):
        base()


# Pushed to real workers.


def test_a_push_reaches_the_workers_of_every_device():
    server = policy(3)
    updater = MultiProcessedRemoteWeightUpdate(
        lambda: server, {"cpu": policy(1)}, devices=["cpu"] * 2
    )
    with running(updater.scheme, background=True) as workers:
        assert [w.do(held) for w in workers] == [bits(policy(1))] * 2
        updater.update_weights()
        assert [w.do(held) for w in workers] == [bits(policy(3))] * 2
        updater.update_weights(policy(4), worker_ids=1)
        assert [w.do(held) for w in workers] == [bits(policy(v)) for v in (3, 4)]
        updater(state(5))
        assert [w.do(held) for w in workers] == [bits(policy(5))] * 2
        updater.update_weights(worker_ids=[])
        assert updater.scheme.version == 3


def test_one_push_is_one_version_for_all():
    updater = MultiProcessedRemoteWeightUpdate(None, {"cpu": policy(1)}, devices=["cpu"] * 3)
    with running(updater.scheme, background=True):
        updater.update_weights(policy(2))
        assert updater.scheme.acknowledged == {0: 1, 1: 1, 2: 1}
        assert list(updater.all_worker_ids()) == [0, 1, 2]


def test_mapping_and_skipping_reach_real_workers():
    class Picky(MultiProcessedRemoteWeightUpdate):
        def _maybe_map_weights(self, server_weights):
            return times_two(server_weights)

        def _skip_update(self, worker_id):
            return worker_id == 0

    updater = Picky(lambda: policy(3), {"cpu": policy(1)}, devices=["cpu"] * 2)
    with running(updater.scheme, background=True) as workers:
        updater.update_weights()
        assert [w.do(held) for w in workers] == [bits(policy(v)) for v in (1, 6)]


def test_each_device_starts_from_its_own_weights():
    updater = MultiProcessedRemoteWeightUpdate(
        None, {"cpu": policy(1), torch.device("meta"): policy(2)}, devices=["meta", "cpu", "meta"]
    )
    with running(updater.scheme) as workers:
        assert [w.do(held) for w in workers] == [bits(policy(v)) for v in (2, 1, 2)]


def test_without_devices_there_is_a_worker_for_each_device_of_the_weights():
    updater = MultiProcessedRemoteWeightUpdate(None, {"cpu": policy(1), "meta": policy(2)})
    assert list(updater.all_worker_ids()) == [0, 1]
    updater.scheme.shutdown()


def test_a_device_without_weights_is_named():
    with pytest.raises(ValueError, match="policy_weights has no entry for cuda:1, meta"):
        MultiProcessedRemoteWeightUpdate(
            None, {"cpu": policy(1)}, devices=["cuda:1", "cpu", "meta"]
        )


def test_without_weights_and_without_a_getter_there_is_nothing_to_push():
    updater = MultiProcessedRemoteWeightUpdate(None, {"cpu": policy(1)})
    with updater.scheme, pytest.raises(ValueError, match="needs get_server_weights"):
        updater.update_weights()
