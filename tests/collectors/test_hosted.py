"""A collector class hosted in workers: what the trainer tells it gets through, and what it says."""

from __future__ import annotations

import time
from functools import partial

import gymnasium as gym
import pytest

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from sync import WorkerRaised
from tests.collectors.support import (
    Checker,
    CodeEnv,
    CodePolicy,
    all_accounted_for,
    make_env,
    publish,
    same_bits,
)
from tests.collectors.troubled import Plain, Troubled

Forked = partial(MultiSyncCollector, start_method="fork")
NUM_ENVS = [2, 1]  # below each of the trainer's workers


@pytest.fixture(scope="module")
def nested():
    """A worker that hosts two workers, and one that hosts one; and what checks their batches."""
    envs = [
        [partial(CodeEnv, worker, env) for env in range(n)] for worker, n in enumerate(NUM_ENVS)
    ]
    with MultiSyncCollector(
        envs, CodePolicy(), collector_class=Forked, frames_per_batch=[20, 10]
    ) as collector:
        yield collector, Checker(NUM_ENVS, cuts=True, skips=True)


def test_every_frame_is_what_happened_below(nested):
    collector, checker = nested
    for _ in range(6):
        batch = collector.next()
        assert batch.batch_size == (3, 10)
        checker.check(batch)
        assert all_accounted_for(collector.stats())
    assert collector.num_envs == 3
    assert collector.getattr_env("env") == [[0, 1], [0]]


def test_weights_are_passed_down_and_stamped_as_the_trainer_counts_them(nested):
    collector, checker = nested
    for _ in range(3):
        publish(collector)
        publish(collector)
        batch = collector.next()
        checker.check(batch)  # that the weights are those of the stamp
        assert (batch["policy_version"] == collector.policy_version).all()
    before = collector.policy_version
    publish(collector, worker_ids=[1])
    batch = collector.next()
    checker.check(batch)
    of_worker = [batch["policy_version"][batch["collector", "worker"] == i] for i in range(2)]
    assert (of_worker[0] == before).all()
    assert (of_worker[1] == before + 1).all()


def test_resets_and_seeds_get_through(nested):
    collector, checker = nested
    for start in (collector.reset, lambda: collector.set_seed(5)):
        checker.check(collector.next())
        start()
        checker.expect_start()
        checker.check(collector.next())
    for _ in range(20):
        checker.check(collector.next())
        if not any(checker.last[0, env]["done"] for env in range(2)):
            break  # both are in the middle of an episode
    cut = checker.counts["cut"]
    collector.reset([1])
    checker.expect_start((0, 1))
    checker.check(collector.next())
    assert not checker.must_start
    assert checker.counts["cut"] == cut + 1  # and the others were left alone
    seeds = [members[-1] for worker in collector.getattr_env("seeded") for members in worker]
    assert len(set(seeds)) == 3


def test_a_state_gets_through(nested):
    collector, checker = nested
    publish(collector)
    checker.check(collector.next())
    state, version = collector.state_dict(), collector.policy_version
    assert collector.load_state_dict(state) is False  # nobody can repeat these episodes
    checker.expect_start()
    batch = collector.next()
    checker.check(batch)
    assert not checker.must_start
    assert (batch["policy_version"] == version).all()


def test_a_hosted_collector_has_options_of_its_own():
    checker = Checker([1], max_frames=2, set_truncated=True)
    with MultiSyncCollector(
        CodeEnv,
        CodePolicy(),
        collector_class=partial(Collector, max_frames_per_traj=2, set_truncated=True),
        frames_per_batch=15,
        start_method="fork",
    ) as collector:
        for _ in range(2):
            checker.check(collector.next())


def test_next_observations_before_padding_are_those_of_the_hosted_collector():
    checker = Checker([3])
    with MultiAsyncCollector(
        partial(make_env, "native_next_step"),
        CodePolicy(),
        num_workers=1,
        collector_class=Collector,
        frames_per_batch=30,
        start_method="fork",
    ) as collector:
        for _ in range(3):
            checker.check(collector.next())
    assert checker.counts["padding"] > 0


def test_a_hosted_collector_goes_on_where_it_was():
    with MultiSyncCollector(
        partial(gym.make, "CartPole-v1"),
        Plain(),
        num_workers=1,
        collector_class=Collector,
        frames_per_batch=20,
    ) as collector:
        collector.next()
        state = collector.state_dict()
        expected = [collector.next() for _ in range(3)]
        assert collector.load_state_dict(state) is True
        assert all(same_bits(collector.next(), batch) for batch in expected)


def test_an_error_in_a_hosted_collector_reaches_the_trainer_with_its_traceback():
    trouble = {"only": 0, "where": "step", "at": 15}
    with MultiSyncCollector(
        [[Troubled, partial(Troubled, **trouble)]],
        Plain(),
        collector_class=Forked,
        frames_per_batch=20,
    ) as collector:
        collector.next()
        with pytest.raises(
            WorkerRaised, match=r"^worker 0 \(cpu, MultiSyncCollector of 2, "
        ) as raised:
            collector.next()
    text = str(raised.value)
    assert "worker 1 (cpu, Troubled, seed" in text  # of the hosted collector
    assert text.count("Traceback (most recent call last)") == 2
    assert text.endswith("Mishap: the pole fell off")


def test_without_a_policy_a_hosted_collector_acts_randomly_wherever_batches_are():
    with MultiAsyncCollector(
        CodeEnv, num_workers=1, collector_class=Collector, device="cpu", frames_per_batch=20
    ) as collector:
        batch = collector.next()
        assert (batch["policy_version"] == -1).all()
        assert len(batch["action"].unique()) > 1


class Slow(CodeEnv):
    """Takes its time over every step."""

    def step(self, action):
        time.sleep(0.05)
        return super().step(action)


def test_a_batch_may_take_longer_than_what_counts_as_hanging():
    with MultiSyncCollector(
        [Slow],
        CodePolicy(),
        collector_class=Collector,
        frames_per_batch=60,
        timeout=1.5,
        start_method="fork",
    ) as collector:
        assert collector.next().numel() == 60
