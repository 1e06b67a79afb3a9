"""Virtual workers: replaced ones, and ones that keep a version for long."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import pytest
import torch

from collectors import SimulatedCollector, Simulator
from collectors.simulation.costs import Cost, Costs
from collectors.simulation.simulated_pool import Failure
from sync import Lag, SimulatedWeightSyncScheme
from tests.collectors.support import (
    Checker,
    CodeEnv,
    CodePolicy,
    all_accounted_for,
    make_env,
    num_envs_of,
    publish,
    workers_of,
)

STEPS = 5


def simulated(make=make_env, failures=(), **options):
    schedule = Simulator(
        num_workers=2,
        num_steps=STEPS,
        costs=Costs(step_ms=Cost(1.0), update_ms=Cost(1.0)),
        failures=failures,
        apply_at=options.get("apply_at", "step"),
    )
    options = {"num_workers": 2, "frames_per_batch": STEPS, **options}
    policy = options.pop("policy", None) or CodePolicy()
    return SimulatedCollector(make, policy, schedule=schedule, **options)


def test_a_replaced_virtual_worker_has_new_episodes_and_no_random_frames_of_its_own():
    checker, random_of = Checker([1, 1], restarts=True), [0, 0]
    failures = [Failure(worker=0, at_s=0.017, back_after_s=0.002)]
    told = {"create_env_kwargs": workers_of("one", 2), "init_random_frames": 16}
    with simulated(failures=failures, **told) as collector:
        for _ in range(12):
            batch = collector.next()
            checker.check(batch)
            for worker in (0, 1):
                mine = batch["collector", "worker"] == worker
                random_of[worker] += int((batch["policy_version"][mine] == -1).sum())
            publish(collector)
            assert all_accounted_for(collector.stats())
        assert collector.stats()["restarts"] == 1
    assert checker.counts["newcomers"] == 1
    assert random_of == [8, 8]


def test_a_version_is_kept_as_long_as_a_virtual_worker_uses_it():
    with simulated(partial(CodeEnv, endless=True), apply_at="episode") as collector:
        batches = []
        for _ in range(8):
            batches.append(collector.next())
            publish(collector)
    for batch in batches:
        assert torch.equal(batch["weights"], batch["policy_version"].float())
    assert {int(version) for batch in batches for version in batch["policy_version"].unique()} == {
        0
    }


class Noisy(CodePolicy):
    """Counts its calls, and draws from a generator of its own."""

    seen: ClassVar[list[tuple[int, int, float]]] = []

    def __init__(self):
        super().__init__()
        self.worker_idx, self.calls = 0, 0
        self.generator, self.noise = torch.Generator(), None

    def forward(self, *inputs):
        self.calls += 1
        self.noise = torch.rand((), generator=self.generator)
        self.seen.append((self.worker_idx, self.calls, float(self.noise)))
        return super().forward(*inputs)


def test_each_virtual_worker_has_its_own_counters_and_generators_of_a_policy():
    Noisy.seen.clear()
    with simulated(policy=Noisy()) as collector:
        for _ in range(4):
            collector.next()
    first, second = ([rest for who, *rest in Noisy.seen if who == w] for w in (0, 1))
    assert len(first) > STEPS
    assert [calls for calls, _ in first] == list(range(1, len(first) + 1))
    assert first[: len(second)] == second[: len(first)]


class Buffered(CodePolicy):
    """Puts out its buffer, which each virtual worker has for itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("copy", torch.zeros(()))

    def forward(self, observation):
        action, seen, _ = super().forward(observation)
        return action, seen, self.copy.expand(len(action)).clone()


def test_buffers_come_with_the_version_that_acts():
    versions = set()
    with simulated(policy=Buffered()) as collector:
        for _ in range(8):
            batch = collector.next()
            assert torch.equal(batch["weights"], batch["policy_version"].float())
            versions |= set(batch["policy_version"].flatten().tolist())
            collector.policy.copy += 1
            publish(collector)
    assert len(versions) > 3


def test_a_resumed_worker_acknowledges_the_versions_that_are_published_after_it():
    with simulated() as first:
        for _ in range(6):
            first.next()
            publish(first)
        state = first.state_dict()
    used = {0: {6}, 1: {6}}  # the resumed run has version 6 from the start
    with simulated() as collector:
        collector.load_state_dict(state)
        for _ in range(5):
            batch = collector.next()
            versions = batch["policy_version"].flatten().tolist()
            used[int(batch["collector", "worker"].max())].update(v for v in versions if v > 6)
            publish(collector)
        workers = collector.stats()["sync"]["policy"]["workers"]
    assert {index: worker["applied"] for index, worker in workers.items()} == {
        index: len(versions) for index, versions in used.items()
    }
    assert [len(versions) for versions in used.values()] == [5, 3]


def test_frames_add_up_where_a_step_only_resets():
    kind, delivered = "native_next_step", 0
    each = num_envs_of(kind)
    told = {"create_env_kwargs": workers_of(kind, 2), "frames_per_batch": STEPS * each}
    with simulated(**told) as collector:
        for _ in range(8):
            delivered += int(collector.next()["collector", "mask"].sum())
            publish(collector)
            stats = collector.stats()
            assert stats["delivered"] == delivered
            assert all_accounted_for(stats)
    assert delivered < 8 * STEPS * each


def test_a_replaced_virtual_worker_goes_on_with_the_random_frames_that_are_left():
    random_of = [0, 0]
    failures = [Failure(worker=0, at_s=0.007, back_after_s=0.002)]
    with simulated(failures=failures, init_random_frames=40) as collector:
        for _ in range(16):
            batch = collector.next()
            for worker in (0, 1):
                mine = batch["collector", "worker"] == worker
                random_of[worker] += int((batch["policy_version"][mine] == -1).sum())
            publish(collector)
        lost = collector.stats()["dropped"]
    assert lost > 0
    assert random_of == [20 - lost, 20]


def lagging(batches=14, **options):
    """For each batch: its worker, the stamps, and the newest version when it was finished."""
    scheme = SimulatedWeightSyncScheme(**options)
    rows = []
    with simulated(weight_sync_schemes={"policy": scheme}) as collector:
        for _ in range(batches):
            batch = collector.next()
            worker, stamps = int(batch["collector", "worker"].max()), batch["policy_version"]
            rows.append((worker, stamps.flatten().tolist(), collector.newest_at_end))
            publish(collector)
    return rows


@pytest.mark.parametrize(
    ("lag", "by_worker"),
    [(Lag(k=2), [2, 2]), (Lag("cycle", values=(0, 3), per="worker"), [0, 3])],
)
def test_an_exact_lag_moves_the_versions_of_a_simulated_schedule_and_nothing_else(lag, by_worker):
    expected = [
        (worker, [max(0, version - by_worker[worker]) for version in stamps], newest)
        for worker, stamps, newest in lagging()
    ]
    assert {worker for worker, _, _ in expected} == {0, 1}
    assert min(expected[-1][1]) > 0
    assert lagging(lag=lag) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 3}, "num_workers=3: the schedule is for 2 workers"),
        ({"num_workers": 1}, "num_workers=1: the schedule is for 2 workers"),
        ({"frames_per_batch": 2 * STEPS}, f"frames_per_batch={2 * STEPS}: .* {STEPS} steps of 1 "),
        ({"frames_per_batch": [5, 5]}, r"frames_per_batch=\[5, 5\]: virtual workers are equal"),
    ],
)
def test_a_schedule_for_other_workers_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        simulated(**options)
