from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.config.compose import LONGEST_NAME, job_name, quoted
from harness.sweep.sweep import fixed_keys, jobs_of
from tests.harness.config.experiments import jobs_of_experiment


def test_a_sweep_is_every_combination():
    assert jobs_of({}, ["seed=1,2", "sync=none,hogwild", "name=x"]) == [
        ["seed=1", "sync=none", "name=x"],
        ["seed=1", "sync=hogwild", "name=x"],
        ["seed=2", "sync=none", "name=x"],
        ["seed=2", "sync=hogwild", "name=x"],
    ]


def test_an_experiment_may_say_what_is_swept_and_the_command_line_wins():
    jobs = jobs_of_experiment("sync_ablation", "seed=7")
    assert len(jobs) == 24
    assert all("seed=7" in job for job in jobs)
    assert {"sync=shared_copy", "collector=multi_sync"} <= {part for job in jobs for part in job}


def test_what_is_not_swept_is_known():
    assert fixed_keys(["seed=1,2", "name=x", "experiment=ppo_cartpole"]) == ["name", "experiment"]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("++env.id=ALE/Pong-v5", "env.id=ALE_Pong-v5,seed=1"),
        ("algo.epochs=4,sync=none", "algo.epochs=4,seed=1,sync=none"),
        ("", "seed=1"),
    ],
)
def test_a_job_is_named_by_what_varies_and_its_seed(overrides, name):
    assert job_name(overrides, 1) == name


def test_long_names_are_cut_and_stay_apart():
    first, second = (job_name("x" * 300 + end, 1) for end in "ab")
    assert first != second
    assert len(first) == len(second) == LONGEST_NAME


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("resume=outputs/mine/seed=1", "outputs/mine/seed=1"),
        ("++resume=it's/here", "it's/here"),
        ("resume='outputs/mine/seed=1'", "outputs/mine/seed=1"),
        ("resume=a,seed=1", "a,seed=1"),
        ("resume=null", None),
        ("collector.replay=outputs/recorded/seed=1", "outputs/recorded/seed=1"),
        ("+collector.replay=a/it's\\", "a/it's\\"),
        ("collector.replay=${oc.env:HOME}/a", "${oc.env:HOME}/a"),
    ],
)
def test_a_path_is_taken_as_it_is_typed(typed, value):
    (override,) = OverridesParser.create().parse_overrides(quoted([typed]))
    assert override.value() == value


def test_paths_of_a_sweep_are_quoted_one_by_one():
    (text,) = quoted(["collector.replay=a/seed=1,a/seed=2"], sweeps=True)
    assert [job for (job,) in jobs_of({}, [text])] == [
        "collector.replay='a/seed=1'",
        "collector.replay='a/seed=2'",
    ]
