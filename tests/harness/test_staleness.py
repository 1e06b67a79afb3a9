"""Lag in updates, its parts, and importance weights by lag: computed by hand, and in runs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import run
from harness.files import read_json
from harness.measures import BUCKETS
from harness.measures.meters import Ratios, split
from harness.measures.staleness import Health, LagCounts, Publications, Staleness, StateAge
from tests.harness.small import SMALL
from tests.harness.test_run import SMALL_SAC, records

pytestmark = pytest.mark.usefixtures("here")


def published(*points: tuple[int, int]) -> Publications:
    found = Publications()
    for version, updates in points:
        found.note(version, updates)
    return found


def stale(*points: tuple[int, int]) -> Staleness:
    found = Staleness()
    found.publications = published(*points)
    return found


def versions(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def ratios(values: list[float], acted: list[int]) -> Ratios:
    return Ratios(torch.tensor(values).log(), torch.tensor(acted))


# -- when each version was published


@pytest.mark.parametrize("interval", [1, 8])
def test_of_a_steady_interval_two_points_tell_every_version(interval):
    found = published(*((version, version * interval) for version in range(1, 1001)))
    assert found.moments(np.arange(1001)).tolist() == [v * interval for v in range(1001)]
    assert found.newest == 1000 * interval
    assert len(found.state_dict()) == 2


def test_the_interval_may_change_and_publishing_may_be_irregular():
    points = [(1, 8), (2, 16), (3, 18), (4, 20), (5, 27)]
    again = Publications()
    again.load_state_dict(published(*points).state_dict())
    assert again.moments(np.arange(6)).tolist() == [0, 8, 16, 18, 20, 27]


def test_versions_older_than_what_is_kept_count_as_the_oldest(monkeypatch):
    monkeypatch.setattr("harness.measures.lags.MOST_TURNS", 3)
    found = published((1, 1), (2, 3), (3, 4), (4, 9))
    assert found.moments(np.arange(5)).tolist() == [3, 3, 3, 4, 9]


# -- lag


def test_lag_is_counted_in_updates_and_has_parts():
    found = stale((1, 8), (2, 16))
    found.add(versions(2, 2, 1, -1), 19, gradient_steps=4)
    metrics, histograms = split(found.read())
    assert metrics == {
        "policy/lag_updates_mean": (3 + 3 + 11) / 3,
        "policy/lag_updates_p95": 11,
        "policy/lag_updates_max": 11,
        "policy/lag_publish_mean": 3,
        "policy/lag_queue_mean": pytest.approx(8 / 3),
        "policy/lag_train_mean": 3 / 8,  # steps at 0, 1/4, 2/4 and 3/4 of an update
    }
    assert histograms["histogram/lag_updates"].counts == [2, 0, 0, 0, 0, 0, 0, 0, 1]
    assert found.read() == {}
    assert found.summary() == metrics


def test_lag_is_counted_in_gradient_steps_too():
    found = Staleness()
    for version, updates, steps in ((1, 8, 80), (2, 16, 150)):  # the second took fewer steps each
        found.note(version, updates, steps)
    found.add(versions(2, 2, 1, -1), 19, gradient_steps=10, steps=180)
    figures, _ = split(found.read())
    assert figures["policy/lag_updates_mean"] == (3 + 3 + 11) / 3
    assert figures["policy/lag_steps_mean"] == pytest.approx((30 + 30 + 100) / 3)
    assert figures["policy/lag_steps_p95"] == figures["policy/lag_steps_max"] == 100
    found.add(versions(2), 19, gradient_steps=10, steps=180)
    found.add(versions(2), 19, gradient_steps=10)  # not known of all frames
    assert "policy/lag_steps_mean" not in split(found.read())[0]


def test_a_run_has_lag_in_gradient_steps_and_a_resumed_one_the_same():
    given = (*SMALL, "sync=shared_mem", "sync.lag=2", "total_frames=768", "algo.epochs=3")
    whole = start(*given, "checkpoint.every_frames=384", "checkpoint.keep=9")
    in_steps = [record["policy/lag_steps_mean"] for record in records(whole)]
    assert in_steps == [0, 6, 12, 12, 12, 12]  # 3 epochs of 2 minibatches
    summary = read_json(whole / "summary.json")
    assert summary["gradient_steps"] == 36
    newest = sorted((whole / "checkpoints").glob("*.safetensors"))
    for file in newest[1:]:
        file.unlink()
    assert run.main([f"resume={whole}"]) == 0
    assert [record["policy/lag_steps_mean"] for record in records(whole)] == in_steps
    assert read_json(whole / "summary.json")["policy/lag_steps_mean"] == np.mean(in_steps)


def test_what_lies_between_acting_and_use_is_split_at_the_end_of_the_batch():
    found = stale((1, 8), (2, 16), (3, 24))
    found.add(versions(1, 1, 2, 2), 25, newest_at_end=2)
    figures, _ = split(found.read())
    assert figures["policy/lag_updates_mean"] == (17 + 9) / 2
    assert figures["policy/lag_publish_mean"] == 1
    assert figures["policy/lag_queue_mean"] == 12
    assert figures["policy/lag_wait_mean"] == 24 - 16
    assert figures["policy/lag_collect_mean"] == 12 - 8
    found.add(versions(3, 3), 25, newest_at_end=3)
    found.add(versions(3, 3), 25)  # when its batch was finished is not known
    figures, _ = split(found.read())
    assert figures["policy/lag_queue_mean"] == 0
    assert not {"policy/lag_wait_mean", "policy/lag_collect_mean"} & set(figures)


ONE_AHEAD = ("collector=simulated", "collector.num_workers=1", "collector.batches_ahead=2")


@pytest.mark.parametrize(
    ("costs", "collect", "wait"),
    [
        # The worker finishes a batch as soon as the learner takes the last but one.
        ("{step_ms: 0.01, update_ms: 1000}", 0, 2),
        # It begins a batch when it has finished the last one, of which no version is made yet.
        ("{step_ms: 100, update_ms: 0.01}", 1, 0),
    ],
    ids=["a slow learner", "a slow worker"],
)
def test_frames_age_while_they_wait_or_while_their_batch_is_made(costs, collect, wait):
    options = ("sync.apply_at=batch", f"collector.costs={costs}", "total_frames=2560")
    directory = start(*SMALL, *ONE_AHEAD, *options)
    figures = records(directory)[-1]
    assert figures["policy/lag_collect_mean"] == collect
    assert figures["policy/lag_wait_mean"] == wait
    assert figures["policy/lag_queue_mean"] == collect + wait


# -- the age of a recurrent state


def frames(ids, stamps, done=(), mask=None):
    """A batch [E, T] of trajectories; done: those whose last frame here ends them."""
    ids, stamps = torch.tensor(ids), torch.tensor(stamps)
    ends = torch.zeros_like(ids, dtype=torch.bool)
    for traj in done:
        row, t = (ids == traj).nonzero()[-1].tolist()
        ends[row, t] = True
    mask = torch.ones_like(ends) if mask is None else torch.tensor(mask)
    content = {"policy_version": stamps, ("next", "done"): ends, ("collector", "traj_ids"): ids}
    return TensorDict({**content, ("collector", "mask"): mask}, list(ids.shape))


def test_a_carried_state_is_as_old_as_its_episode():
    age = StateAge(carried=True)
    age.add(frames([[0, 0, 0], [1, 1, 2]], [[3, 3, 4], [3, 4, 4]], done=[1]))
    assert age.read() == {"policy/state_age_mean": 2 / 6, "policy/state_age_max": 1}
    age.add(frames([[0, 0, 3], [2, 2, 2]], [[7, -1, 7], [7, 7, 9]], done=[0]))
    # 0 began with version 3, 2 with 4, 3 is new; a random action does not count
    assert age.read() == {
        "policy/state_age_mean": (4 + 0 + 3 + 3 + 5) / 5,
        "policy/state_age_max": 5,
    }
    again = StateAge(carried=True)
    again.load_state_dict(age.state_dict())
    for one in (age, again):
        one.add(frames([[3, 3], [2, 2]], [[9, 9], [9, 9]], mask=[[True, False], [True, True]]))
        assert one.read()["policy/state_age_mean"] == (2 + 5 + 5) / 3
    assert age.summary() == again.summary()


def test_a_state_of_the_first_version_ages_as_any_other():
    age = StateAge(carried=True)
    age.add(frames([[0, 0, 0]], [[0, 1, 3]]))
    assert age.read() == {"policy/state_age_mean": 4 / 3, "policy/state_age_max": 3}


def test_a_state_that_new_weights_compute_has_no_age():
    age = StateAge(carried=False)
    age.add(frames([[0, 0, 0]], [[3, 4, 5]]))
    assert age.summary() == {"policy/state_age_mean": 0, "policy/state_age_max": 0}


def test_a_mean_weighs_each_frame_of_the_window_alike():
    counts = LagCounts()
    counts.add(np.array([3]), 0, 1)
    counts.add(np.array([0, 0, 0, 0, 0, 1]), 5, 2)
    found = counts.figures()
    assert found["policy/lag_updates_mean"] == found["policy/lag_publish_mean"] == 5 / 4
    assert found["policy/lag_train_mean"] == 0.25 / 4


def test_without_a_number_of_gradient_steps_nothing_is_said_of_lag_inside_updates():
    found = stale()
    found.add(versions(0, 0), 1)
    assert set(split(found.read())[0]) == {
        *(f"policy/lag_updates_{name}" for name in ("mean", "p95", "max")),
        *("policy/lag_publish_mean", "policy/lag_queue_mean"),
    }


# -- importance weights


def test_importance_weights_are_figures_of_all_frames_of_the_window():
    found = stale((1, 1), (2, 2))
    found.add(versions(2), 2, ratios=ratios([1.0, 1.0], [2, 2]))
    found.add(versions(2), 2, ratios=ratios([3.0, 0.5], [1, 2]))
    metrics, histograms = split(found.read())
    squares = 1 + 1 + 9 + 0.25
    divergences = [0, 0, 2 - math.log(3), -0.5 - math.log(0.5)]
    assert metrics["policy/ess"] == pytest.approx(5.5**2 / (4 * squares))
    assert metrics["policy/kl"] == pytest.approx(sum(divergences) / 4)
    assert metrics["policy/ratio_max"] == pytest.approx(3)
    assert metrics["policy/ess/lag_0"] == pytest.approx(2.5**2 / (3 * 2.25))
    assert metrics["policy/kl/lag_1"] == pytest.approx(divergences[2])
    assert metrics["policy/ess/lag_1"] == 1
    assert metrics["policy/share/lag_1"] == 0.25
    assert "policy/ess/lag_2" not in metrics
    assert sum(histograms["histogram/log_ratio"].counts) == 4


def test_log_ratios_are_counted_between_the_edges_that_are_named():
    found = stale((1, 1))
    values = [-9.0, -9.0, -9.0, 0.003, 0.003, 0.3, 9.0]
    found.add(versions(1), 1, ratios=Ratios(torch.tensor(values), torch.tensor([1] * 7)))
    histogram = split(found.read())[1]["histogram/log_ratio"]
    edges, counts = histogram.edges, histogram.counts
    assert (counts[0], counts[-1]) == (3, 1)  # beyond the outermost edges, too
    for value in (0.003, 0.3):
        (place,) = (i for i in range(1, len(counts) - 1) if edges[i] <= value < edges[i + 1])
        assert counts[place] == values.count(value)
    assert found.summary()["policy/ratio_max"] == pytest.approx(math.exp(9.0))


def test_buckets_of_lag_are_as_they_are_named():
    def bucket(lag: int) -> str:
        health = Health.of(np.zeros(1), np.array([lag]))
        (name,) = (name for name in health.figures() if name.startswith("policy/ess/"))
        return name.removeprefix("policy/ess/")

    for name in BUCKETS:
        _, first, *last = name.split("_")
        lags = range(int(first), (100 if last == ["up"] else int((last or [first])[0])) + 1)
        assert {bucket(lag) for lag in lags} == {name}


def test_weights_that_overflow_are_still_weighed_against_each_other():
    health = Health.of(np.array([900.0, 900.0, 0.0, -900.0]), np.array([0, 0, 0, 1]))
    health.add(Health.of(np.array([-900.0, -900.0]), np.array([1, 0])))
    assert health.figures()["policy/ess"] == pytest.approx(2 / 6)
    assert health.figures()["policy/ess/lag_0"] == pytest.approx(2 / 4)
    assert health.figures()["policy/ess/lag_1"] == pytest.approx(1)


def test_equal_weights_are_worth_all_frames():
    health = Health()
    for _ in range(3):
        health.add(Health.of(np.full(1000, 0.3), np.arange(1000)))
    assert health.figures()["policy/ess"] == pytest.approx(1)
    assert max(health.figures()["policy/ess"], health.figures()["policy/ess/lag_3_4"]) <= 1


def test_it_goes_on_from_its_state_to_the_bit():
    one, other = stale((1, 2)), Staleness()
    for step in range(6):
        if step == 3:
            other.load_state_dict(one.state_dict())
        for found in (one, other) if step >= 3 else (one,):
            given = torch.Generator().manual_seed(step)
            moved = torch.randn(50, generator=given)
            acted = torch.randint(0, 2, (50,), generator=given)
            found.publications.note(1 + step, 2 + 2 * step)
            found.add(acted, 2 + 2 * step, gradient_steps=3, ratios=Ratios(moved, acted))
    assert one.summary() == other.summary()
    assert one.read() == other.read()


# -- in runs

# Each of both once; the other pairs are slow tests.
HEALTH = [
    pytest.param(objective, given, marks=[] if number % 4 == 0 else pytest.mark.slow)
    for number, (objective, given) in enumerate(
        itertools.product(
            ("behaviour", "proximal", "decoupled"), ((), ("model=lstm",), ("algo.vtrace=true",))
        )
    )
]


def start(*overrides: str, into: str = "run") -> Path:
    assert run.main([*overrides, "evaluation.at_end=false", f"hydra.run.dir={into}"]) == 0
    return Path(into)


def test_lag_by_rare_publishing_is_the_updates_since():
    directory = start(*SMALL, "total_frames=2560", "sync.interval=8", "log_every_frames=1")
    found = records(directory)
    assert len(found) == 20
    for update, record in enumerate(found):
        assert record["policy/lag_mean"] == 0  # no newer version was published
        for name in ("updates_mean", "updates_p95", "updates_max", "publish_mean"):
            assert record[f"policy/lag_{name}"] == update % 8
        assert record["policy/lag_queue_mean"] == 0
        assert record["train/gradient_steps"] == 2 * 2
        assert record["policy/lag_train_mean"] == 3 / 8
    summary = read_json(directory / "summary.json")
    assert summary["policy/lag_publish_mean"] == sum(n % 8 for n in range(20)) / 20
    assert summary["policy/lag_updates_max"] == 7
    assert summary["policy/share/lag_3_4"] == 5 / 20
    assert summary["policy/ess/lag_0"] == pytest.approx(1, abs=1e-4)
    assert 0 < summary["policy/ess/lag_5_8"] < 1
    assert summary["policy/kl/lag_5_8"] > summary["policy/kl/lag_0"]
    assert summary["policy/ratio_max"] > 1


@pytest.mark.parametrize(("objective", "given"), HEALTH)
def test_asynchronous_runs_tell_their_lag_and_health(objective, given):
    directory = start(
        *SMALL, *given, "collector=multi_async", "total_frames=1280", f"algo.objective={objective}"
    )
    for record in records(directory):
        for name in ("mean", "p95", "max"):  # one version an update
            assert record[f"policy/lag_updates_{name}"] == record[f"policy/lag_{name}"]
        assert record["policy/lag_publish_mean"] == 0
        assert 0 < record["policy/ess"] <= 1
        assert record["policy/kl"] > -1e-6
    summary = read_json(directory / "summary.json")
    assert summary["policy/lag_updates_mean"] == summary["policy/lag_mean"] > 0
    shares = [summary.get(f"policy/share/{bucket}", 0) for bucket in BUCKETS]
    assert sum(shares) == pytest.approx(1)


def test_both_parts_of_lag_add_up_in_an_asynchronous_run():
    directory = start(*SMALL, "collector=multi_async", "total_frames=2560", "sync.interval=4")
    summary = read_json(directory / "summary.json")
    parts = [summary[f"policy/lag_{part}_mean"] for part in ("publish", "queue")]
    assert sum(parts) == pytest.approx(summary["policy/lag_updates_mean"])
    assert parts[0] == sum(n % 4 for n in range(20)) / 20
    assert summary["policy/lag_updates_mean"] > summary["policy/lag_mean"]


def test_of_a_replay_buffer_it_is_the_lag_of_the_samples():
    directory = start(*SMALL_SAC, "collector=single", "total_frames=320")
    last = records(directory)[-1]
    assert last["policy/lag_max"] == 0  # what came in was fresh
    assert last["policy/lag_updates_mean"] > 1
    assert last["policy/lag_updates_max"] > 8
    assert last["train/gradient_steps"] == 16
    assert last["policy/lag_train_mean"] == 15 / 32
    assert "policy/ess" not in last
    first = records(directory)[0]
    assert "policy/lag_updates_mean" not in first  # nothing was sampled yet


def test_of_a_collector_that_runs_free_it_is_that_of_the_samples_too():
    given = ("collector=multi_async", "collector.free_running=true", "total_frames=160")
    directory = start(*SMALL_SAC, *given)
    summary = read_json(directory / "summary.json")
    assert 0 <= summary["policy/lag_updates_mean"] <= summary["policy/lag_updates_max"] < 10
