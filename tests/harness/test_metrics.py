from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from harness.measures import Means
from harness.measures.clock import Clock, percentiles, system_metrics
from harness.measures.episodes import Episodes
from harness.measures.lags import Lags, lag_figures, lag_histogram
from harness.measures.meters import split


def batch(ids, rewards, done, versions=None, mask=None, envs=None, going_on=()):
    """Rows of frames; a trajectory starts where its number first appears, but for `going_on`."""
    ids = torch.tensor(ids)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first &= ~torch.isin(ids, torch.tensor(going_on, dtype=ids.dtype))
    rows = torch.arange(ids.shape[0]) if envs is None else torch.tensor(envs)
    return TensorDict(
        {
            "is_init": first,
            "policy_version": torch.zeros_like(ids) if versions is None else torch.tensor(versions),
            "next": {
                "reward": torch.tensor(rewards, dtype=torch.float32),
                "done": torch.tensor(done, dtype=torch.bool),
            },
            "collector": {
                "traj_ids": ids,
                "env": rows[:, None].expand(ids.shape),
                "mask": torch.ones_like(ids, dtype=torch.bool)
                if mask is None
                else torch.tensor(mask, dtype=torch.bool),
            },
        },
        ids.shape,
    )


def test_an_episodes_return_is_summed_over_batches():
    episodes = Episodes()
    episodes.add(batch([[0, 0], [1, 1]], [[1, 2], [5, 5]], [[0, 0], [0, 1]]))
    assert episodes.read() == {"episode/return": 10, "episode/length": 2, "episode/count": 1}
    assert episodes.read() == {}
    again = batch([[0, 3], [2, 2]], [[4, 9], [1, 1]], [[1, 0], [0, 0]], going_on=[0])
    episodes.add(again)
    assert episodes.read() == {"episode/return": 7, "episode/length": 3, "episode/count": 2}
    assert list(episodes.recent) == [10, 7]


def test_several_episodes_may_end_in_one_row():
    episodes = Episodes()
    episodes.add(batch([[0, 1, 1, 2]], [[1, 2, 2, 3]], [[1, 0, 1, 1]]))
    assert list(episodes.recent) == [1, 4, 3]


def test_an_episode_left_without_an_end_does_not_count():
    episodes = Episodes()
    episodes.add(batch([[0, 0]], [[1, 1]], [[0, 0]]))
    episodes.add(batch([[1, 1]], [[1, 1]], [[0, 1]]))
    assert list(episodes.recent) == [2]


def test_padding_counts_for_nothing():
    episodes, lags = Episodes(), Lags()
    padded = batch([[0, 0]], [[1, 99]], [[1, 1]], [[3, 0]], mask=[[1, 0]])
    episodes.add(padded)
    lags.add(padded, 3)
    assert list(episodes.recent) == [1]
    assert dict(lags.all) == {0: 1}


def test_open_episodes_go_on_under_another_number_when_a_run_is_resumed():
    before, after = Episodes(), Episodes()
    before.add(batch([[0, 0]], [[1, 1]], [[0, 0]], envs=[5]))
    after.load_state_dict(before.state_dict())
    after.add(batch([[7]], [[1]], [[1]], envs=[5], going_on=[7]))
    assert list(after.recent) == [3]


def test_lag_counts_the_versions_between():
    lags = Lags()
    lags.add(batch([[0, 0, 0]], [[0, 0, 0]], [[0, 0, 0]], [[-1, 4, 4]]), 5)
    metrics, histograms = split(lags.read())
    assert metrics == {
        "policy/mixed_batches": 0,
        "policy/lag_mean": 1,
        "policy/lag_p95": 1,
        "policy/lag_max": 1,
    }
    assert histograms["histogram/lag"].counts == [2]
    lags.add(batch([[0, 0]], [[0, 0]], [[0, 0]], [[4, 5]]), 5)
    assert split(lags.read())[0]["policy/mixed_batches"] == 1


def test_lag_figures_weigh_by_count():
    found = lag_figures({0: 90, 1: 5, 7: 5})
    assert found == {
        "policy/lag_mean": pytest.approx(0.4),
        "policy/lag_p95": 1,
        "policy/lag_max": 7,
    }
    assert lag_histogram({1: 2, 3: 4}).counts == [2, 0, 4]
    assert lag_histogram({1: 2, 3: 4}).edges == [0.5, 1.5, 2.5, 3.5]
    bins = lag_histogram({5: 1, 205: 2, 206: 3, 500: 4}).counts  # the last has all above it
    assert (len(bins), bins[0], bins[-1], sum(bins)) == (201, 1, 9, 10)


def test_means_are_read_once():
    means = Means()
    means.add({"a": 1, "b": 5})
    means.add({"a": 3})
    assert means.read() == {"a": 2, "b": 5}
    assert means.read() == {}


def test_means_of_tensors_carry_no_gradient_and_are_stored_as_numbers():
    weight = torch.ones((), requires_grad=True)
    means, other = Means(), Means()
    means.add({"a": weight * 2})
    stored = means.state_dict()
    assert stored == {"sums": {"a": 2.0}, "counts": {"a": 1}}
    other.load_state_dict(stored)
    other.add({"a": weight * 4})
    assert other.read() == {"a": 3.0}


def test_the_clock_keeps_totals_and_what_is_new():
    clock = Clock()
    with clock.phase("train"):
        pass
    fresh, elapsed_s = clock.read()
    assert 0 < fresh["time/train_s"] <= elapsed_s
    assert clock.read()[0]["time/train_s"] == 0
    assert clock.total["train"] == fresh["time/train_s"]


def test_the_wall_time_is_that_since_the_start_without_evaluations(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock()
    now[0] = 130.0
    with clock.evaluating():
        now[0] = 137.0
    now[0] = 140.0
    assert clock.wall_s == pytest.approx(33.0)
    assert clock.read()[1] == pytest.approx(33.0)


def test_a_process_reports_its_seconds_its_megabytes_and_the_load_of_a_minute(monkeypatch):
    usage = SimpleNamespace(ru_utime=1.5, ru_stime=0.25, ru_maxrss=3072)
    monkeypatch.setattr("resource.getrusage", lambda of: usage)
    monkeypatch.setattr("os.getloadavg", lambda: (7.0, 8.0, 9.0))
    metrics = system_metrics()
    metrics.pop("system/cuda_memory_mb", None)
    assert metrics == {"system/cpu_s": 1.75, "system/memory_mb": 3.0, "system/load": 7.0}


def test_percentiles_are_of_the_values_themselves():
    assert percentiles([], "x") == {}
    assert percentiles([3.0, 1.0, 2.0], "x") == {"x_p50": 2, "x_p95": 3, "x_p99": 3}
    assert percentiles([*range(100)], "x") == {"x_p50": 50, "x_p95": 94, "x_p99": 98}
