"""What remote collectors can be told: arguments, seeds, resets, states, free running, new hosts."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial

import pytest
import torch

from collectors import (
    Collector,
    MultiAsyncCollector,
    RayCollector,
    ReplayBuffer,
    RPCCollector,
)
from collectors.remote.torchrun_ranks import Ranks
from sync import RayRemoteWeightUpdater, SharedMemWeightSyncScheme, WorkerError
from tests.collectors.remote.support import KINDS, build, make
from tests.collectors.remote.test_pulse import here
from tests.collectors.support import Checker, CodeEnv, all_accounted_for, same_bits
from tests.collectors.troubled import balance
from tests.promises.collector_probe import VersionPolicy, make_cartpole
from tests.promises.probe import stop, wait_until

# -- what is refused, before anything is started


REFUSED = [
    ({"num_collectors": 0}, ValueError, "num_collectors=0: it must be 1 or more"),
    ({"num_collectors": 1.5}, TypeError, "num_collectors=1.5: it must be a whole number"),
    ({"num_workers": 2}, ValueError, "num_workers_per_collector=2"),
    ({"sync": 1}, TypeError, "sync=1: it must be True or False"),
    (
        {"collector_class": dict},
        ValueError,
        "expected Collector, MultiSyncCollector or MultiAsyncCollector",
    ),
    (
        {"collector_class": Collector, "num_workers_per_collector": 2},
        ValueError,
        "a Collector has no workers; take collector_class=MultiSyncCollector",
    ),
    ({"collector_class": MultiAsyncCollector}, ValueError, "it needs sync=False"),
    (
        {"collector_class": partial(Collector, init_random_frames=9)},
        ValueError,
        "init_random_frames in collector_class: set it on the outer collector",
    ),
    ({"preemptive_threshold": 0.5}, ValueError, "cannot stop remote batches early"),
    ({"cat_results": "stack"}, ValueError, "cat_results='stack' is not for RPCCollector"),
    ({"sync": False, "reset_when_done": False}, ValueError, "not for RPCCollector with sync="),
    ({"copy": False}, ValueError, "it needs local workers"),
    ({"max_lag": 0}, ValueError, "max_lag=0 .* not for RPCCollector with sync=True"),
    ({"batches_ahead": 7}, ValueError, "batches_ahead=7 .* not for RPCCollector with sync=True"),
    ({"record_schedule": "f"}, ValueError, "record_schedule='f' .* RPCCollector with sync=True"),
    ({"frames_per_bach": 3}, TypeError, "did you mean 'frames_per_batch'"),
    ({"num_colectors": 3}, TypeError, "did you mean 'num_collectors'"),
    ({"luncher": "env"}, TypeError, "did you mean 'launcher'"),
    ({"num_collectors": 2, "frames_per_batch": 33}, ValueError, "for instance 32 or 34"),
    ({"num_collectors": 2, "policy_device": ["cpu"]}, ValueError, "1 entries for 2 collectors"),
    ({"policy_device": "gpu"}, ValueError, "no device of torch"),
    (
        {"num_collectors": 2, "policy_device": ["cuda:0", "cpu"], "cudagraph_policy": True},
        ValueError,
        "cudagraph_policy=True needs a CUDA policy_device, but it is cpu",
    ),
    ({"on_worker_failure": "restart"}, ValueError, "cannot replace .* use DistributedCollector"),
    ({"port": 65536}, ValueError, "port=65536: it must be 0 to 65535"),
    ({"launcher": "slurm"}, ValueError, "it must be one of 'local', 'env' or None"),
    ({"launcher": "env"}, ValueError, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"),
    (
        {"weight_sync_schemes": {"policy": SharedMemWeightSyncScheme()}},
        ValueError,
        "'policy' has a SharedMemWeightSyncScheme; RPCCollector takes RPCWeightSyncScheme",
    ),
    (
        {"weight_updater": RayRemoteWeightUpdater(VersionPolicy())},
        ValueError,
        "weight_updater=RayRemoteWeightUpdater: 'policy' has a RayWeightSyncScheme",
    ),
]


def test_arguments_that_make_no_sense_are_refused_in_one_line(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for options, error, message in REFUSED:
        with pytest.raises(error, match=message.replace("(", r"\(")) as raised:
            RPCCollector(CodeEnv, VersionPolicy(), **options)
        assert "\n" not in str(raised.value)


def test_a_host_checks_itself_whether_its_policy_can_have_graphs():
    device = {"policy_device": "cuda:63", "cudagraph_policy": True}
    with pytest.raises(WorkerError, match="cuda:63"):
        make("distributed", CodeEnv, VersionPolicy(), num_collectors=1, **device)


def test_a_part_that_cannot_be_sent_to_a_host_is_named():
    with pytest.raises(TypeError, match=r"^create_env_kwargs cannot be sent to another process"):
        here(create_env_kwargs={"lock": threading.Lock()})


def test_options_of_episodes_reach_the_workers_of_a_host():
    with here(max_frames_per_traj=5) as collector:
        ended = collector.next()["next", "truncated"].squeeze(0)
        assert ended.nonzero().squeeze(-1).tolist() == list(range(4, 40, 5))


def test_a_device_for_a_policy_needs_one():
    with pytest.raises(ValueError, match="policy_device: there is no policy"):
        RPCCollector(CodeEnv, policy_device="cpu")


def test_settings_of_the_collector_are_refused_in_the_config_of_an_actor():
    with pytest.raises(ValueError, match="max_concurrency is set by the collector"):
        RayCollector(CodeEnv, remote_configs={"max_concurrency": 3})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WORLD_SIZE": "1"}, "start two or more"),
        ({"RANK": "first"}, "RANK='first': it must be a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(changed, message):
    env = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert Ranks.of(env).num_workers == 2
    assert [Ranks.of({**env, "RANK": rank}).worker for rank in ("1", "2")] == [0, 1]
    with pytest.raises(ValueError, match=message):
        Ranks.of({**env, **changed})


# -- control


@pytest.mark.parametrize("kind", KINDS)
def test_control_calls_work_in_the_middle_of_iteration(kind):
    collector, counts = build(kind, frames_per_batch=30)
    checker = Checker(counts, cuts=True, skips=True)
    with collector:
        for seed in range(2):
            checker.check(collector.next())
            assert collector.set_seed(seed) != seed
            checker.expect_start()
            checker.check(collector.next())
            collector.reset()
            checker.expect_start()
            checker.check(collector.next())
            collector.reset([4])
            checker.expect_start((1, 1))
            with collector.pause():
                assert all_accounted_for(collector.stats())
        checker.check(collector.next())
        assert len(collector.getattr_env("seeded")) == 2
        assert collector.getattr_policy("number") is collector.policy.number
    assert not checker.must_start


def _cartpole(kind, sync=True, **options):
    options = {"frames_per_batch": 200, "sync": sync, **options}
    return make(kind, make_cartpole, VersionPolicy(), **options)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])  # a process is in one RPC group at a time
def test_the_same_seed_makes_the_same_bits_and_a_saved_state_goes_on_with_them(kind):
    with _cartpole(kind) as first, _cartpole(kind) as second:
        for collector in (first, second):
            collector.set_seed(5)
        for _ in range(3):
            assert same_bits(first.next(), second.next())
        first.update_policy_weights_()
        state = first.state_dict()
        with _cartpole(kind) as third:
            third.update_policy_weights_()
            assert third.load_state_dict(state) is True
            assert third.policy_version == first.policy_version == 1
            for _ in range(2):
                assert same_bits(first.next(), third.next())
            assert third.frames == first.frames


@pytest.mark.parametrize("kind", KINDS)
def test_an_asynchronous_state_goes_on_with_new_episodes_and_numbers(kind):
    with _cartpole(kind, sync=False) as first:
        ids = {int(i) for _ in range(6) for i in first.next()["collector", "traj_ids"].unique()}
        first.update_policy_weights_()
        state = first.state_dict()
    with _cartpole(kind, sync=False) as second:
        assert second.load_state_dict(state) is False
        batch = second.next()
        assert batch["is_init"][:, 0].all()
        assert set(batch["policy_version"].unique().tolist()) == {1}
        assert ids.isdisjoint(batch["collector", "traj_ids"].unique().tolist())


def test_no_batch_of_before_a_state_was_loaded_is_handed_out_after_it():
    with _cartpole("distributed", sync=False) as collector:
        collector.next()
        collector.update_policy_weights_()
        state = collector.state_dict()
        known = set()
        for _ in range(4):
            collector.update_policy_weights_()
            known |= set(collector.next()["collector", "traj_ids"].unique().tolist())
        assert collector.load_state_dict(state) is False
        begun: set[int] = set()
        for _ in range(6):
            batch = collector.next()
            (host,) = batch["collector", "worker"].unique().tolist()
            assert batch["is_init"][:, 0].all() or host in begun
            begun.add(host)
            assert set(batch["policy_version"].unique().tolist()) == {1}
        stats = collector.stats()
        assert stats["dropped"] > 0
        assert balance(collector) == 0


def test_a_state_that_a_host_refuses_changes_nothing():
    with here(max_frames_per_traj=5) as collector:
        collector.next()
        state = collector.state_dict()
        del state["workers"][0]["streams"]
        collector.update_policy_weights_()
        collector.next()
        before = collector.frames, collector.seed, collector.policy_version
        with pytest.raises(WorkerError, match="KeyError: 'streams'"):
            collector.load_state_dict(state | {"seed": collector.seed + 1})
        assert (collector.frames, collector.seed, collector.policy_version) == before
        assert (collector.next()["policy_version"] == collector.policy_version).all()


@pytest.mark.parametrize("kind", KINDS)
def test_running_free_fills_a_replay_buffer(kind):
    buffer = ReplayBuffer(10_000)
    with _cartpole(kind, sync=False, replay_buffer=buffer, total_frames=2_000) as collector:
        collector.start()
        assert buffer.wait(2_000, timeout=60.0) == 2_000
        assert isinstance(buffer.sample(64)["action"], torch.Tensor)


def test_a_host_that_owes_an_account_is_not_waited_for_again_before_it_gave_it(monkeypatch):
    collector, _ = build("distributed", sync=False)
    with collector:
        collector.next()
        silent, engine = collector.pool.handles[1], collector.launcher.engine
        stop(silent.pid)
        collector.stats()
        asked: list[int] = []
        call = engine.call

        def noting(peer, function, *args):
            if threading.current_thread() is threading.main_thread():  # not what asks for events
                asked.append(peer)
            return call(peer, function, *args)

        monkeypatch.setattr(engine, "call", noting)
        collector.stats()
        assert asked == [0]
        os.kill(silent.pid, signal.SIGCONT)
        wait_until(silent.is_fresh)
        collector.stats()
        assert asked == [0, 0, 1]
