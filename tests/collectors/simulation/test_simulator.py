"""Small clusters whose schedules can be worked out by hand, and what holds for all of them."""

from __future__ import annotations

import json

import pytest

from collectors.schedule.recording import Delivery, PlannedBatch
from collectors.simulation.costs import Cost, Costs, Stragglers
from collectors.simulation.network import Network
from collectors.simulation.simulated_pool import Failure
from collectors.simulation.simulator import Simulator
from collectors.simulation.virtual_weights import RANDOM_VERSION, random_steps
from sync import Link
from tests.collectors.simulation.driving import drive


def make(num_workers=2, num_steps=4, batches_ahead=1, costs=None, **options):
    """A cluster with steps of 10 ms and updates of 15 ms."""
    costs = costs or Costs(step_ms=Cost(10), update_ms=Cost(15))
    return Simulator(
        num_workers=num_workers,
        num_steps=num_steps,
        batches_ahead=batches_ahead,
        costs=costs,
        **options,
    )


def varied(**options):
    """A cluster in which everything varies."""
    costs = Costs(
        step_ms=Cost(2, "gamma", 0.5),
        policy_ms=Cost(0.5, "lognormal", 0.8, "batch"),
        take_ms=Cost(1, "uniform", 0.3),
        update_ms=Cost(9, "exponential"),
        publish_ms=Cost(0.5, "normal", 0.1),
        log_ms=Cost(0.1),
        stragglers=Stragglers(0.3, 2.0),
    )
    given = {
        "num_workers": 5,
        "num_steps": 8,
        "seed": 3,
        "costs": costs,
        "network": Network(port_mbps=10, topology="tree"),
        "link": Link(latency_ms=2, jitter_ms=3, bandwidth_mbps=5, loss=0.1),
        "failures": [Failure(1, 0.1, 0.05), Failure(4, 0.2, 0.3), Failure(1, 0.5, 0.0)],
    }
    return Simulator(**{**given, **options})


# -- by hand


def test_versions_count_from_the_next_step_on():
    # worker 0  0 ---------- 40 [40 50 60 70] 80      published: 1 at 55, 2 at 70, 3 at 95
    # worker 1  0 ---------- 40 .. 55 [55 65 75 85] 95
    taken = drive(make(), 4)
    assert [(one.plan.worker, one.at_ms) for one in taken] == [(0, 40), (1, 55), (0, 80), (1, 95)]
    assert [one.plan.versions for one in taken] == [
        ((0, 0),),
        ((0, 0),),
        ((0, 0), (2, 1), (3, 2)),
        ((0, 1), (2, 2)),
    ]


def test_versions_count_from_the_next_batch_on_if_they_are_applied_there():
    taken = drive(make(apply_at="batch"), 5)
    assert [one.plan.versions for one in taken] == [
        *[((0, 0),)] * 3,
        ((0, 1),),
        ((0, 2),),
    ]


def test_a_worker_runs_ahead_by_so_many_batches_and_rests_then():
    # Batches of 20 ms, ready at 20 and 40; the learner takes one in 100 ms.
    costs = Costs(step_ms=Cost(5), update_ms=Cost(100))
    taken = drive(make(1, costs=costs, batches_ahead=2), 4)
    assert [one.at_ms for one in taken] == [20, 120, 220, 320]
    # Begun at 20, 40 and 120, the last as the batch before was taken.
    assert [one.plan.versions for one in taken] == [((0, 0),), ((0, 0),), ((0, 0),), ((0, 1),)]


def test_the_learner_pays_for_each_thing_it_does():
    costs = Costs(
        step_ms=Cost(1), take_ms=Cost(2), update_ms=Cost(10), publish_ms=Cost(3), log_ms=Cost(0.5)
    )
    simulator = make(1, costs=costs, batches_ahead=2)
    assert [one.at_ms for one in drive(simulator, 2)] == [4 + 2, 6 + 10 + 3 + 0.5 + 2]
    assert simulator.time_s == pytest.approx(21.5e-3 + 13e-3)


def test_without_a_publish_the_update_is_paid_before_the_next_batch():
    costs = Costs(step_ms=Cost(1), update_ms=Cost(10), publish_ms=Cost(3))
    simulator = make(1, costs=costs, batches_ahead=2)
    assert [one.at_ms for one in drive(simulator, 4, interval=2)] == [4, 14, 27, 37]


def test_an_update_that_is_skipped_costs_nothing():
    simulator = make(1, batches_ahead=2, costs=Costs(step_ms=Cost(1), update_ms=Cost(9)))
    times = []
    for number in range(4):
        simulator.next_batch()
        times.append(round(simulator.time_s * 1e3, 6))
        if number == 1:
            simulator.skip_update()
            simulator.skip_update()
    assert times == [4, 13, 13, 22]


def test_random_actions_last_until_the_first_version():
    def steps(*versions):
        return random_steps(PlannedBatch(0, 0, versions), 9)

    assert steps((0, RANDOM_VERSION), (4, 0), (7, 1)) == 4
    assert steps((0, RANDOM_VERSION)) == 9
    assert steps((0, 0), (4, 1)) is None


def test_the_last_workers_are_stragglers():
    costs = Costs(step_ms=Cost(10), update_ms=Cost(1), stragglers=Stragglers(0.25, 3.0))
    taken = drive(make(4, costs=costs, batches_ahead=2), 10)
    assert [(one.plan.worker, one.at_ms) for one in taken] == [
        *[(0, 40), (1, 41), (2, 42)],
        *[(0, 80), (1, 81), (2, 82)],
        *[(3, 120), (0, 121), (1, 122), (2, 123)],
    ]


def test_a_batch_waits_for_the_versions_that_were_published_before_its_order():
    # One worker, batches of 40 ms; 30 ms from the trainer to the worker.
    # Taken at 40, when the worker begins its second; version 1 is published at 55, is there at 85.
    # Taken at 80, when the third is ordered, after version 1: it begins at 85.
    taken = drive(make(1, link=Link(latency_ms=30)), 3)
    assert [one.at_ms for one in taken] == [40, 80, 125]
    # Version 2, published at 95, is there at 125.
    assert [one.plan.versions for one in taken] == [((0, 0),), ((0, 0),), ((0, 1),)]


def test_a_version_that_waits_for_the_link_is_replaced_by_a_newer_one():
    # Published every 10 ms, and the link takes 30 ms for one: 1 goes at 10, 3 at 40, 6 at 70, ...
    costs = Costs(step_ms=Cost(1), update_ms=Cost(10))
    link = Link(bandwidth_mbps=8e-3 * 1000 / 30)
    taken = drive(make(1, costs=costs, link=link, batches_ahead=9), 60)
    used = {version for one in taken for _, version in one.plan.versions}
    assert used == {0, 1, *range(3, max(used) + 1, 3)}
    assert max(used) > 30


def test_publishing_waits_for_the_workers_if_it_blocks():
    # Worker 0 begins anew at 40. Published at 55, there at 56, used at 60, heard of at 61.
    # Worker 1 rests, and uses it at 56.
    simulator = make(blocking=True, link=Link(latency_ms=1))
    drive(simulator, 1)
    assert simulator.time_s == pytest.approx(61e-3)


def test_publishing_waits_for_the_end_of_batches_if_versions_are_applied_there():
    simulator = make(blocking=True, apply_at="batch")
    drive(simulator, 1)
    assert simulator.time_s == pytest.approx(80e-3)


def test_publishing_does_not_wait_for_who_dies_before_using_it():
    simulator = make(blocking=True, apply_at="batch", failures=[Failure(0, 0.06, 1.0)])
    drive(simulator, 1)
    assert simulator.time_s == pytest.approx(60e-3)


def test_a_version_is_sent_to_the_named_workers_only():
    simulator = make()
    simulator.next_batch()
    simulator.publish(1, [Delivery(1, 1000, [1])])
    plans = [simulator.next_batch() for _ in range(3)]
    assert [(plan.worker, plan.versions[-1][1]) for plan in plans] == [(1, 0), (0, 0), (1, 1)]


def test_a_blocking_publish_of_older_versions_waits_for_each_worker_to_use_its_own():
    # Taken at 40. Published at 55: worker 0 uses version 1 at 60, and worker 1 gets nothing.
    # The batch of worker 1, ready since 40, is taken at 60, and worker 1 begins anew. Published at
    # 75: worker 0 uses version 2 at 80, and worker 1 version 1 at 80.
    simulator = make(blocking=True)
    for version, deliveries, at_ms in (
        (1, [Delivery(1, 1000, [0])], 60),
        (2, [Delivery(2, 1000, [0]), Delivery(1, 1000, [1])], 80),
    ):
        simulator.next_batch()
        simulator.publish(version, deliveries)
        assert simulator.time_s == pytest.approx(at_ms * 1e-3)


def test_a_failure_costs_the_batch_under_way_and_the_successor_has_the_newest_version():
    # Worker 0 ends a batch at 40, dies at 65 in the next, is back at 75 with version 1. The learner
    # trains until 70 and takes nothing before 95: it is ordered a batch when the learner waits.
    simulator = make(failures=[Failure(0, 0.065, 0.010)])
    taken = drive(simulator, 4)
    assert [(one.plan.worker, one.plan.generation, one.at_ms) for one in taken] == [
        (0, 0, 40),
        (1, 0, 55),
        (1, 0, 95),
        (0, 1, 115),
    ]
    assert taken[3].plan.versions == ((0, 2),)
    counts = simulator.counts()
    assert counts["dropped"] == 2  # at 50 and 60
    assert counts["restarts"] == 1


def test_finished_batches_of_a_worker_that_dies_are_taken():
    simulator = make(failures=[Failure(1, 0.045, 10.0)])
    taken = drive(simulator, 3)
    assert [(one.plan.worker, one.plan.generation) for one in taken] == [(0, 0), (1, 0), (0, 0)]
    assert simulator.counts()["dropped"] == 0


def test_a_version_that_comes_after_a_newer_one_changes_nothing():
    # Worker 0 comes back with the newest version, while older ones are on their way to it.
    link, failures = Link(latency_ms=6), [Failure(0, 0.0105, 0.001)]
    costs = Costs(step_ms=Cost(1.0))
    simulator = Simulator(num_workers=2, num_steps=4, costs=costs, link=link, failures=failures)
    for one in drive(simulator, 12):
        versions = [version for _, version in one.plan.versions]
        assert versions == sorted(set(versions))


# -- what always holds


def test_the_same_seed_and_calls_give_the_same_schedule():
    assert drive(varied(), 300) == drive(varied(), 300)
    assert drive(varied(), 300) != drive(varied(seed=4), 300)


def test_a_state_is_small_and_leads_to_the_same_future():
    simulator = varied()
    drive(simulator, 200)
    state = json.loads(json.dumps(simulator.state_dict()))
    assert len(json.dumps(state)) < 200
    other = varied()
    drive(other, 7, nbytes=5)
    other.load_state_dict(state)
    assert (other.time_s, other.counts()) == (simulator.time_s, simulator.counts())
    assert drive(other, 50, newest=200) == drive(simulator, 50, newest=200)


def test_a_state_of_another_simulation_is_refused():
    simulator = varied()
    drive(simulator, 20)
    with pytest.raises(ValueError, match="another seed"):
        varied(seed=4).load_state_dict(simulator.state_dict())


def test_a_state_of_an_earlier_version_is_refused_in_words():
    simulator = make()
    drive(simulator, 3)
    state = simulator.state_dict()
    state["rounds"] = [[3, 1, 1, 1000, None]]
    with pytest.raises(ValueError, match="saved by an earlier version"):
        make().load_state_dict(state)


def test_versions_may_be_counted_from_anywhere():
    simulator, other = varied(), varied()
    first, second = drive(simulator, 100), drive(other, 100, newest=1000)
    for one, two in zip(first, second, strict=True):
        assert one.at_ms == two.at_ms
        moved = [(step, version and version + 1000) for step, version in one.plan.versions]
        assert list(two.plan.versions) == moved
    state = other.state_dict()
    assert len(state["rounds"]) == 2
    again = varied()
    again.load_state_dict(state)
    assert again.next_batch() == other.next_batch()


def test_versions_must_grow():
    simulator = make()
    drive(simulator, 3)
    with pytest.raises(ValueError, match="version 3 is not newer than 3"):
        simulator.publish(3, [Delivery(3, 1000, [0, 1])])


def test_no_batch_names_a_version_that_is_not_needed_any_more_or_not_published():
    simulator = varied()
    for newest in range(300):
        oldest = simulator.oldest_needed()
        plan = simulator.next_batch()
        versions = [version for _, version in plan.versions]
        assert versions == sorted(set(versions))
        assert oldest <= versions[0]
        assert versions[-1] <= newest
        steps = [step for step, _ in plan.versions]
        assert steps == sorted(set(steps))
        assert steps[0] == 0
        assert steps[-1] < 8
        simulator.publish(newest + 1, [Delivery(newest + 1, 1000, range(5))])


def test_every_step_is_delivered_dropped_or_in_flight():
    simulator = varied()
    for delivered in range(1, 200):
        drive(simulator, 1, newest=delivered - 1)
        counts = simulator.counts()
        assert counts["collected"] == delivered * 8 + counts["dropped"] + counts["in_flight"]
    assert counts["restarts"] == 3
    assert 0 < counts["dropped"] <= 3 * 8


@pytest.mark.parametrize("max_lag", [0, 1, 3, 8])
@pytest.mark.parametrize("apply_at", ["step", "batch"])
def test_no_batch_is_older_than_max_lag_if_workers_wait(max_lag, apply_at):
    simulator = varied(max_lag=max_lag, batches_ahead=3, failures=[], apply_at=apply_at)
    lags = [one.lag for one in drive(simulator, 300)]
    assert max(lags) <= max_lag
    assert max_lag == 0 or max(lags) > 0


def test_failures_must_be_of_workers_that_are_there_and_up():
    for failure in ([Failure(5, 1.0, 1.0)], [Failure(0, 1.0, 1.0), Failure(0, 1.5, 1.0)]):
        with pytest.raises(ValueError, match="failures"):
            varied(failures=failure)
