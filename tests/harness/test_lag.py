"""Lag and tearing from the command line: what runs, what stays the same, and what resumes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import run
from harness.files import read_json
from harness.run.build import make_scheme
from harness.run_comparison import compare_records, compare_weights
from sync import Lag, Tear
from tests.harness.config.composed import config_of, error_of
from tests.harness.test_run import records, start

pytestmark = pytest.mark.usefixtures("here")

SMALL = (
    "total_frames=1280",  # ten updates
    "collector.frames_per_batch=128",
    "env.num_envs=4",
    "algo.minibatch_size=64",
    "algo.epochs=1",
    "model.hidden_sizes=[16]",
    "evaluation.at_end=false",
    "logger=jsonl",
)
SMALL_SAC = (
    "algo=sac",
    "env=pendulum",
    "total_frames=160",
    "collector.frames_per_batch=16",
    "env.num_envs=4",
    "algo.learning_starts=32",
    "algo.batch_size=16",
    "algo.buffer_size=1000",
    "model.hidden_sizes=[16]",
    "evaluation.at_end=false",
    "logger=jsonl",
)


def same(first, second):
    return compare_records(first, second) or compare_weights(first, second)


# -- what may be said


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        (["collector=single"], None),
        (["collector=single", "sync.lag=2"], "sync.lag=2"),
        (["collector=single", "sync.interval=4"], "sync.interval=4"),
        (["collector=simulated"], "collector=simulated"),
        ([], "collector=multi_async"),
    ],
)
def test_a_ratio_to_a_policy_that_did_not_act_is_warned_of(overrides, cause):
    config = config_of("algo.objective=proximal", *overrides)
    said = config.algo.warnings(config)
    if cause is None:
        assert said == []
    else:
        (line,) = said
        assert line.startswith(f"algo.objective=proximal with {cause}: its ratio is to ")
    other = config_of("algo.objective=behaviour", *overrides)
    assert other.algo.warnings(other) == []


def test_a_run_shows_its_warnings_at_the_start(capfd):
    objective = ("algo.objective=proximal", "sync.lag=1", "collector=single")
    assert start(*SMALL, *objective, "total_frames=128", into="warned")[0] == 0
    assert "WARNING: algo.objective=proximal with sync.lag=1: " in capfd.readouterr().err
    assert "algo.objective=proximal with" in (Path("warned") / "run.log").read_text()


@pytest.mark.parametrize(
    ("overrides", "lag"),
    [
        ([], None),
        (["sync.lag=0"], None),
        (["sync.lag=2", "sync.max_lag=2"], Lag(k=2, seed=1)),
        (["sync.lag=4", "seed=7"], Lag(k=4, seed=7)),
        (
            ["sync.lag={kind: uniform, low: 1, high: 8, per: worker}", "sync.lag_seed=3"],
            Lag("uniform", low=1, high=8, per="worker", seed=3),
        ),
        (["sync.lag={kind: cycle, values: [0, 4]}"], Lag("cycle", values=(0, 4), seed=1)),
        (
            ["sync.lag={kind: two_point, high: 9, share: 0.1}", "sync=multiprocess"],
            Lag("two_point", high=9, share=0.1, seed=1),
        ),
        (
            ["sync.lag={kind: geometric, mean: 2.5, most: 9}"],
            Lag("geometric", mean=2.5, most=9, seed=1),
        ),
    ],
)
def test_a_lag_is_a_number_or_a_mapping(overrides, lag):
    assert make_scheme(config_of(*overrides)).lag == lag


def test_a_tear_is_a_group_and_follows_the_seed():
    def tear(*overrides):
        return make_scheme(config_of(*overrides)).tear

    assert tear() is tear("sync.tear.span=3") is None
    assert tear("sync.tear.share=0.2", "seed=5") == Tear(share=0.2, seed=5)
    whole = "sync.tear={share: 0.1, span: 2, unit: element, seed: 9}"
    assert tear(whole) == Tear(share=0.1, span=2, unit="element", seed=9)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sync.lag=-1"], "sync.lag=-1: expected a whole number .0 or more. or a mapping"),
        (["sync.lag={knd: uniform}"], "sync.lag.knd: .*did you mean sync.lag.kind"),
        (["sync.lag={kind: normal}"], "sync.lag.kind='normal': expected one of constant"),
        (["sync.lag={kind: uniform, k: 2}"], "sync.lag.k=2: kind=uniform has no such option"),
        (["sync.lag=4", "sync.interval=2"], "sync.lag=4 sync.interval=2: an exact lag"),
        (
            ["sync.lag=4", "sync.max_lag=2"],
            "all frames but the first would be dropped; use sync.max_lag=4 or more",
        ),
        (
            ["sync.lag=1", "sync.max_lag=3", "sync.on_stale=wait", "collector=multi_async"],
            "sync.lag=1 sync.on_stale=wait",
        ),
        (["sync=hogwild", "sync.lag=2"], "sync=hogwild has no such option"),
        (["sync=none", "collector=single", "sync.tear.share=1"], "sync=none has no such option"),
        (["sync.tear.share=1.5"], "sync.tear.share=1.5: expected a number .0 to 1."),
        (["sync.tear.span=0"], "sync.tear.span=0: expected a whole number"),
        (["sync.tear.unit=layer"], "sync.tear.unit=layer: expected one of tensor, element"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(overrides, said):
    assert re.search(said, error_of(*overrides))


# -- what comes of it


@pytest.mark.parametrize(
    ("collector", "sync", "blocking"),
    [
        ("single", "shared_mem", True),
        ("multi_sync", "multiprocess", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(
                ("single", "multi_sync"), ("shared_mem", "multiprocess"), (True, False)
            )
        ),
    ],
)
def test_every_frame_after_the_fourth_update_has_a_lag_of_four(collector, sync, blocking):
    given = (f"collector={collector}", f"sync={sync}", f"sync.blocking={blocking}".lower())
    status, directory = start(*SMALL, *given, "sync.lag=4")
    assert status == 0
    found = records(directory)
    assert [r["policy/lag_mean"] for r in found] == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert [r["policy/lag_max"] for r in found] == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert [r["policy/version"] for r in found] == list(range(1, 11))
    summary = read_json(directory / "summary.json")
    for worker in summary["workers"].values():
        assert worker["published"] == 6
        # Nobody waits for the last version of a run unless publishing blocks.
        assert worker["acknowledged"] in ((6,) if blocking else (5, 6))


@pytest.mark.parametrize(
    "collector", [pytest.param("multi_sync", marks=pytest.mark.slow), "multi_async"]
)
def test_hogwild_counts_torn_policy_calls_in_every_run(collector):
    _, directory = start(*SMALL, f"collector={collector}", "sync=hogwild")
    summary = read_json(directory / "summary.json")
    for found in (records(directory)[-1], summary):
        assert found["sync/checked_calls"] > 1280 / 4 / 17 / 2
        assert 0 <= found["sync/torn_calls"] <= found["sync/checked_calls"]
        rate = found["sync/torn_calls"] / found["sync/checked_calls"]
        assert found["sync/tear_rate"] == pytest.approx(rate)


def test_workers_on_their_own_lag_more():
    _, directory = start(*SMALL, "collector=multi_async", "sync.lag=4")
    assert all(r["policy/lag_mean"] >= 4 for r in records(directory)[5:])


@pytest.mark.parametrize(
    "collector", ["single", pytest.param("multi_sync", marks=pytest.mark.slow)]
)
def test_no_lag_and_no_tear_change_no_bit(collector):
    given = (*SMALL, f"collector={collector}")
    _, plain = start(*given, into="plain")
    _, zero = start(*given, "sync.lag=0", "sync.tear.share=0", "sync.tear.span=3", into="zero")
    _, lagging = start(*given, "sync.lag=1", into="lagging")
    _, torn = start(*given, "sync.tear.share=0.5", into="torn")
    assert same(plain, zero) is None
    assert compare_weights(plain, lagging) is not None
    assert compare_weights(plain, torn) is not None


HELD = ("collector=multi_async", "collector.num_workers=1", "sync.max_lag=0", "sync.on_stale=wait")


@pytest.mark.parametrize(
    "more",
    [
        ("model=lstm", "model.lstm_size=8", "model.sequence_length=8"),
        ("algo=impala", "sync=multiprocess", "algo.normalise_observations=true"),
    ],
    ids=["ppo, lstm", "impala"],
)
def test_an_asynchronous_run_held_at_lag_zero_is_the_synchronous_one(more):
    small = [option for option in SMALL if "impala" not in str(more) or "algo." not in option]
    _, first = start(*small, *more, "collector=single", into="synchronous")
    _, second = start(*small, *more, *HELD, "collector.batches_ahead=3", into="asynchronous")
    assert same(first, second) is None
    assert records(second)[-1]["policy/lag_max"] == 0


@pytest.mark.parametrize("on_stale", ["drop", "mask"])
def test_a_run_that_would_never_learn_again_ends_with_a_reason(on_stale, capsys):
    # Version 2 is held back, so that the third batch is too old, and nothing is published any more.
    lag = "sync.lag={kind: cycle, values: [0, 9, 9, 9, 9, 9, 9, 9, 9, 9]}"
    given = ("collector=single", "sync=shared_mem", lag, "sync.max_lag=1", "total_frames=9000")
    assert run.main([*SMALL, *given, f"sync.on_stale={on_stale}", "hydra.run.dir=stuck"]) == 1
    error = capsys.readouterr().err
    assert "nothing was learned from the last 10 batches: all of their frames lag more" in error
    assert "allow a larger sync.max_lag" in error
    summary = read_json(Path("stuck/summary.json"))
    assert (summary["updates"], summary["frames"]) == (2, 12 * 128)


def test_an_objective_that_would_give_no_frame_a_weight_is_refused(capsys):
    objective = "algo.objective={decoupled: {weight_floor: 6, weight_cap: 5}}"
    assert run.main([*SMALL, objective, "hydra.run.dir=refused"]) == 2
    assert "weight_floor=6 weight_cap=5: no frame would have a weight" in capsys.readouterr().err
    assert not Path("refused").exists()
