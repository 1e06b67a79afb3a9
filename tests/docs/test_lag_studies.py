"""The program that decides the studies of docs/findings/designs.md, where the answer is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from docs.findings import ages_warm, lag_studies
from docs.findings.lag_studies import Claim, Study
from tests.docs.test_studies import composed_jobs


def values_of(means: dict[str, float], seeds: int = 20) -> pd.DataFrame:
    """Scores of settings about these means, with a standard deviation of 0.02."""
    random = np.random.default_rng(1)
    rows = [
        {"setting": name, "seed": seed, "newest": mean + random.normal(0, 0.02)}
        for name, mean in means.items()
        for seed in range(1, seeds + 1)
    ]
    return pd.DataFrame(rows).set_index(["setting", "seed"])


def verdict(means: tuple[float, float], kind: str, seeds: int = 20) -> str:
    values = values_of(dict(zip("ab", means, strict=True)), seeds)
    study = Study({"a": {}, "b": {}}, [Claim("primary", "1", "a", kind, "b")], range(1, 21))
    (decision,) = lag_studies.decide(values, study)
    return decision.verdict


@pytest.mark.parametrize(
    ("means", "kind", "expected"),
    [
        ((0.70, 0.70), "same", "shown"),
        ((0.70, 0.60), "same", "contradicted"),
        ((0.60, 0.70), "same", "contradicted"),
        ((0.70, 0.67), "same", "not shown"),
        ((0.60, 0.70), "lower", "shown"),
        ((0.70, 0.60), "lower", "contradicted"),
        ((0.70, 0.70), "lower", "not shown"),
        ((0.70, 0.60), "higher", "shown"),
        ((0.70, 0.70), "at least", "shown"),
        ((0.60, 0.70), "at least", "contradicted"),
        ((0.67, 0.70), "at least", "not shown"),
    ],
)
def test_a_claim_is_decided_by_what_it_says(means, kind, expected):
    assert verdict(means, kind) == expected


def test_a_claim_has_no_verdict_before_all_seeds_are_done():
    assert verdict((0.70, 0.60), "higher", seeds=19) == "19 of 20"


def test_a_claim_without_runs_counts_in_the_correction():
    assert lag_studies.corrected([0.01, float("nan"), 0.02]) == pytest.approx(
        [0.03, float("nan"), 0.04], nan_ok=True
    )


def test_a_run_has_collapsed_if_it_ends_nearer_to_the_start_than_to_its_best():
    values = pd.DataFrame(
        {"first": [0.1] * 4, "best": [0.9, 0.9, 0.9, 0.2], "last": [0.8, 0.55, 0.45, 0.1]}
    )
    assert lag_studies.collapsed(values).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("returns", "share"),
    [
        ([0.2, 0.8, 0.9, 0.8], None),
        ([0.2, 0.8, 0.3, 0.8], None),  # it recovers
        ([0.2, 0.8, 0.3, 0.2], 0.75),
        ([0.2, 0.8, 0.8, 0.2], 1.0),
        ([0.1, 0.2, 0.1, 0.1], None),  # it has not learned
    ],
)
def test_a_collapse_for_good_is_dated_by_its_first_evaluation(returns, share):
    found = lag_studies.collapse_share(np.array(returns))
    assert (None if np.isnan(found) else found) == share


def runs_that_collapse(b: float, c: float, noise: float = 0.2) -> pd.DataFrame:
    """Times of collapse, known up to step 2,000, that follow a law with these exponents."""
    random, rows = np.random.default_rng(2), []
    for seed in range(10):
        for rate in lag_studies.RATES:
            for lag in (40, 160, 640):
                log_time = 6.5 - b * np.log(rate / 2e-3) - c * np.log(lag / 160)
                time = np.exp(log_time + random.normal(0, noise))
                rows.append(
                    {
                        "setting": f"decoupled, rate {rate:g}, lag {lag}",
                        "seed": seed,
                        "steps": 2000.0,
                        "collapse_step": time if time < 2000 else np.nan,
                    }
                )
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("b", "c", "regime"),
    [
        (1.0, 0.0, "rate times horizon"),
        (1.0, 1.0, "rate times lag"),
        (1.0, 0.5, "neither is shown"),
    ],
)
def test_the_exponents_of_a_law_are_estimated_although_some_runs_do_not_collapse(
    b, c, regime, monkeypatch
):
    monkeypatch.setattr(lag_studies, "RESAMPLES", 5)
    runs = runs_that_collapse(b, c)
    assert runs["collapse_step"].isna().mean() > 0.1
    parts = runs["setting"].str.extract(r"rate (?P<rate>\S+), lag (?P<lag>\d+)").astype(float)
    assert lag_studies.exponents(runs.assign(**parts)) == pytest.approx((b, c), abs=0.1)
    (row,) = (
        line
        for line in lag_studies.law(runs.set_index(["setting", "seed"]))
        if line.startswith("| decoupled")
    )
    assert regime in row


@pytest.mark.parametrize("study", lag_studies.STUDIES)
def test_the_sweep_of_a_study_has_its_settings_and_no_others(study):
    jobs = composed_jobs(study)
    for job in jobs:
        text = job.algo.objective.replace(":", ": ")
        if text.startswith("{"):  # an objective with its options
            OmegaConf.update(job, "algo.objective", OmegaConf.create(text))
    settings = lag_studies.STUDIES[study].settings
    keys = {key for setting in settings.values() for key in setting}
    options = [{key: OmegaConf.select(job, key) for key in keys} for job in jobs]
    for name, setting in settings.items():
        matching = [
            job
            for job in options
            if all(lag_studies.equal(value, job[key]) for key, value in setting.items())
        ]
        assert len(matching) == 1, name
    assert len(jobs) == len({tuple(sorted(setting.items())) for setting in settings.values()})


def test_each_setting_with_claims_is_a_branch_of_the_on_policy_run():
    changes = ages_warm.arms()
    assert len(changes) == 14
    assert ["collector.frames_per_batch=16384"] in changes
    assert ["algo.objective=vespo", "sync.lag=63"] in changes
    (job,) = (job for job in composed_jobs("ages") if job.point == ages_warm.FRESH_POINT)
    fresh = lag_studies.STUDIES["ages"].settings[lag_studies.FRESH]
    assert all(lag_studies.equal(x, OmegaConf.select(job, key)) for key, x in fresh.items())


def test_the_seed_of_a_branch_is_its_parents():
    parent = {"branch": {"parent": "outputs/ages/point=0,seed=7"}}
    assert lag_studies.seed_of({"seed": 65799401}, parent) == 7
    assert lag_studies.seed_of({"seed": 3}, {}) == 3


@pytest.mark.parametrize("study", lag_studies.STUDIES)
def test_claims_name_settings(study):
    settings = lag_studies.STUDIES[study].settings
    assert {
        name for claim in lag_studies.STUDIES[study].claims for name in (claim.left, claim.right)
    } <= set(settings)
