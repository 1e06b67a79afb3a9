"""What the studies' programs make of data whose answer is known."""

from __future__ import annotations

import itertools
import json
import tarfile
from copy import deepcopy
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
from omegaconf import DictConfig, OmegaConf

from benchmarks import hidden
from docs.findings import (
    collapse,
    dose,
    hypotheses,
    pack,
    pairing,
    predictors,
    rate_lag,
    seeds,
    two_scores,
)
from docs.findings.predictors import Point, damages
from harness.config.compose import compose_run
from harness.report.runs import FILES, read_runs
from harness.report.scores import TRAINED
from tests.harness.config.experiments import jobs_of_experiment
from tests.harness.report.synthetic import make_run, make_sweep

RATES, LAGS = (1e-4, 2e-4, 4e-4), (0, 1, 2, 4, 8)


def scores(loss) -> pd.DataFrame:
    """Scores from 0 to 100 over three rates, five lags and four seeds, with little noise."""
    random = np.random.default_rng(1)
    rows = [
        (rate, lag, seed, 100 * loss(rate, lag) + random.normal(0, 0.5))
        for rate in RATES
        for lag in LAGS
        for seed in range(4)
    ]
    return pd.DataFrame(rows, columns=["rate", "lag", "seed", "score"])


def test_a_law_in_rate_times_lag_is_told_from_one_in_lag_alone():
    of_product = rate_lag.retained(scores(lambda rate, lag: np.exp(-rate * lag * 1e3)), 0.0)
    of_lag = rate_lag.retained(scores(lambda rate, lag: np.exp(-lag / 4)), 0.0)
    assert rate_lag.explained(of_product, by_rate=False) > 0.99
    assert rate_lag.explained(of_lag, by_rate=False) < 0.9
    assert rate_lag.explained(of_lag, by_rate=True) > 0.99
    product, lag, (low, _) = rate_lag.correlations(of_product)
    assert product > lag
    assert low > 0
    assert all(p < 0.05 for *_, p in rate_lag.same_products(of_product))
    assert not all(p < 0.05 for *_, p in rate_lag.same_products(of_lag))


def test_shares_are_told_to_be_equal_only_as_well_as_the_score_at_lag_0_is_known():
    table = scores(lambda rate, lag: 1.0)
    signs = {RATES[0]: (1, -1, 1, -1), RATES[1]: (1, 1, -1, -1), RATES[2]: (1, -1, -1, 1)}
    noise = [30 * signs[run.rate][run.seed] * (run.lag == 0) for run in table.itertuples()]
    for given, equal in ((table, True), (table.assign(score=table["score"] + noise), False)):
        pairs = rate_lag.same_products(rate_lag.retained(given, 0.0))
        assert all((p < 0.05) is equal for *_, p in pairs)


def test_a_rate_that_hardly_learns_is_named_and_left_out():
    table = scores(lambda rate, lag: 0.1 if rate == RATES[0] else 1.0)
    assert rate_lag.learning_rates(table, 0.0) == ([*RATES[1:]], [RATES[0]])
    assert str([RATES[0]]) in next(rate_lag.lines(table, 0.0))


def test_the_floor_can_be_given(tmp_path, monkeypatch, capsys):
    for rate, lag, seed in itertools.product((0.1, 0.2), (0, 2, 4), (1, 2, 3)):
        options = {"sync": {"lag": lag}, "algo": {"name": "ppo", "learning_rate": rate}}
        make_run(tmp_path / f"{rate},{lag},{seed}", seed=seed, level=100.0 - 10 * lag, **options)
    shares = []
    for floor in ("0", "-500"):
        monkeypatch.setattr("sys.argv", ["rate_lag", str(tmp_path), "--floor", floor])
        rate_lag.main()
        said = capsys.readouterr().out
        assert f"floor {floor};" in said
        (row,) = (line for line in said.splitlines() if line.startswith("| 0.1 | 1.00 |"))
        shares.append(float(row.split("|")[3]))
    assert shares[0] < shares[1]


@pytest.mark.parametrize(
    ("returns", "moment"),
    [
        ([*range(100)], None),
        ([*range(60), *[10] * 40], 60),
        ([*range(60), *[10] * 5, *range(60, 95)], None),  # it comes back
        ([*range(5), *[0] * 50], None),  # there was little to lose
    ],
)
def test_a_collapse_is_a_loss_of_half_that_stays(returns, moment):
    assert collapse.collapse(np.array(returns, dtype=float), first=0, span=100) == moment


def test_half_of_what_was_gained_depends_on_the_return_that_a_run_begins_with():
    returns = np.array([*range(60), *[35] * 40], dtype=float)
    assert collapse.collapse(returns, first=0, span=100) is None
    assert collapse.collapse(returns, first=20, span=100) == 60


SETTING = collapse.Setting("cispo", "0.001", 4)


def test_an_alarm_counts_if_it_comes_before_the_collapse_and_not_long_before():
    def course(moment, low_from):
        measure = np.where(np.arange(100) >= low_from, 0.1, 0.9)
        return collapse.Course(SETTING, 2, moment, {"policy/ess": measure}, measure)

    in_time, late, early = course(60, 50), course(60, 70), course(60, 5)
    quiet, false_alarm = course(None, 100), course(None, 50)
    caught, false_alarms = collapse.outcomes(
        [in_time, late, early, quiet, false_alarm], "policy/ess", 0.5
    )
    assert caught == [True, False, False]
    assert false_alarms == [False, True]
    assert collapse.worth(caught, false_alarms) == pytest.approx(1 / 3 - 1 / 2)


def test_a_measure_that_falls_before_each_collapse_is_worth_more_than_one_of_chance():
    random = np.random.default_rng(1)
    courses = []
    for seed in range(80):
        moment = 60 if seed < 40 else None
        size = np.where((np.arange(100) >= 50) & (seed < 40), 0.1, 0.9)
        chance = dict.fromkeys(("policy/kl", "policy/ratio_max"), random.random(100))
        courses.append(collapse.Course(SETTING, seed, moment, {"policy/ess": size, **chance}, size))
    fresh = collapse.Setting("cispo", "0.001", 0)
    alone = collapse.Course(fresh, 1, None, {}, np.ones(100))
    table = list(collapse.by_objective([*courses, alone]))
    assert table[0] == "| objective | lag 0 | lag 4 |"
    assert table[2] == "| cispo | 0 of 1, 1.00 | 40 of 80, 0.70 |"  # 0.1 in half of half the runs
    said = list(collapse.lines(courses))
    assert said[0] == "40 of 80 runs with lag collapsed; 0 of them recover"
    assert "| 20 of 20 | 0 | 0 of 20 | 1.00 [1.00, 1.00] |" in said[3]
    assert said[6].startswith("policy/ess is worth")
    assert "before 40 of 40 collapses" in said[8]
    assert "difference is -0.400 [-0.400, -0.400] over 1 settings" in said[8]  # 10 of 20 records
    assert said[9] == (
        "settings in which an odd seed collapsed have 20 of 20 collapses and 20 of 20 other runs "
        "of the even seeds"
    )
    assert said[-2:] == [
        "| lag 4 | 20 of 20 | 0 of 20 |",
        "| settings with a collapse | 20 of 20 | 0 of 20 |",
    ]
    assert list(collapse.lines(courses[:19]))[1].startswith("fewer than 20")


def test_large_effects_are_seen_with_few_seeds_and_absent_ones_as_often_as_the_test_allows():
    random = np.random.default_rng(3)
    rows = {
        frozenset({f"a={n}", f"sync.lag={lag}"}): random.normal(10 - lag, 1, 10)
        for lag in (0, 4)
        for n in range(12)
    }
    settings = pd.DataFrame(list(rows.values()), pd.Index(list(rows), tupleize_cols=False))
    settings.iloc[0, 5:] = np.nan  # five seeds are paired with five
    classes, *counts = seeds.effects([(settings, "sync.lag=0")])
    assert counts == [12, 0]
    assert len(classes["large"]) == 12
    assert sorted(len(pair.scores) for pair in classes["large"])[:2] == [5, 10]
    assert seeds.power(classes["large"], 5, random) > 0.9
    assert seeds.single(classes["large"][0])[0] > 0.9
    absent = seeds.power(classes[seeds.ABSENT], 3, random)
    assert 0.02 < absent < 0.09
    (axis,) = seeds.figure(classes).axes
    assert axis.lines[1].get_ydata()[1] == pytest.approx(absent, abs=0.02)


def test_what_two_sweeps_share_counts_once(tmp_path):
    random = np.random.default_rng(4)
    names = [frozenset({"a=1", f"sync.lag={lag}"}) for lag in (0, 4)]
    table = pd.DataFrame(
        random.normal(size=(2, 10)), pd.Index(names, tupleize_cols=False), range(1, 11)
    )
    other = table + [[0.0], [1.0]] * np.ones(10)  # only the setting with lag differs
    classes, *counts = seeds.effects([(table, "sync.lag=0"), (other, "sync.lag=0")])
    assert counts == [2, 0]
    assert len(classes[seeds.ABSENT]) == 3 * seeds.DIVISIONS
    again, *counts = seeds.effects([(table, "sync.lag=0")] * 2)
    assert counts == [1, 1]
    assert len(again[seeds.ABSENT]) == 2 * seeds.DIVISIONS

    for sweep in ("one", "two"):
        for seed in (1, 2):
            make_run(tmp_path / sweep / str(seed), seed=seed, sync={"lag": 4})
    sweeps = [tmp_path / sweep for sweep in ("one", "two")]
    courses, repeated = collapse.read_courses(sweeps)
    assert (len(courses), repeated) == (2, 2)


def test_settings_are_told_apart_by_options_and_not_by_those_that_follow_the_seed(tmp_path):
    for seed in (1, 2):
        for lag in (0, 4):
            make_run(tmp_path / f"{lag},{seed}", seed=seed, sync={"lag": lag, "lag_seed": seed})
    table = seeds.read_settings(tmp_path)
    assert list(table.index) == [frozenset({"sync.lag=0"}), frozenset({"sync.lag=4"})]
    assert list(table.columns) == [1, 2]
    assert table.notna().all(axis=None)


def test_hidden_numbers_are_not_shown_and_the_others_are_scaled():
    env = gym.make("CartPole-v1")
    shown = hidden.Shown(env, {0: 1, 2: 10})
    observation, _ = shown.reset(seed=1)
    assert observation in shown.observation_space
    np.testing.assert_allclose(observation, env.unwrapped.state[[0, 2]] * [1, 10], rtol=1e-6)


def test_a_report_of_packed_runs_is_that_of_the_runs(tmp_path):
    sweep = make_sweep(tmp_path / "study", schemes={"shared_mem": 100.0, "hogwild": 50.0})
    (sweep / "sync=hogwild,seed=1" / "checkpoints").mkdir()
    archive = tmp_path / "records" / "study.tar.xz"
    assert pack.pack(sweep, archive) == 6
    with tarfile.open(archive) as packed:
        assert {Path(name).name for name in packed.getnames()} == set(FILES)
        packed.extractall(tmp_path / "again", filter="data")
    before, after = (
        read_runs([root / "study"], [TRAINED]) for root in (tmp_path, tmp_path / "again")
    )
    pd.testing.assert_frame_equal(before.records, after.records, rtol=1e-5)
    assert before.runs["options"].tolist() == after.runs["options"].tolist()


def test_an_archive_is_replaced_whole_or_not_at_all(tmp_path):
    sweep = make_sweep(tmp_path / "study", schemes={"shared_mem": 100.0})
    archive = tmp_path / "study.tar.xz"
    pack.pack(sweep, archive)
    before = archive.read_bytes()
    (sweep / "sync=shared_mem,seed=3" / "metrics.jsonl").write_text("{")
    with pytest.raises(json.JSONDecodeError):
        pack.pack(sweep, archive)
    assert archive.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {"study", "study.tar.xz"}


def test_both_scores_of_a_setting_stand_beside_each_other(tmp_path, monkeypatch, capsys):
    for seed, lag, clip in itertools.product((1, 2, 3), (0, 4), (0.1, 0.2, 0.3, 0.4, 0.5)):
        level = 100.0 - 10 * lag + 100 * clip
        run = make_run(
            tmp_path / "study" / f"{seed},{lag},{clip}",
            seed=seed,
            level=level,
            sync={"lag": lag},
            algo={"name": "ppo", "clip": clip},
        )
        summary = json.loads((run / "summary.json").read_text())
        # Without lag the last policies have the order of the returns, with it the opposite.
        last = level if lag == 0 else -level
        (run / "summary.json").write_text(json.dumps(summary | {"eval/return": last}))
    arguments = ["two_scores", f"T={tmp_path / 'study'}", "--x", "sync.lag", "--hue", "algo.clip"]
    monkeypatch.setattr("sys.argv", [*arguments, "--figure", str(tmp_path / "both.png")])
    two_scores.main()
    table = capsys.readouterr().out.splitlines()
    rows = [
        [cell.strip() for cell in line.split("|")] for line in table if line.startswith("| 0.5")
    ]
    assert [row[2] for row in rows] == ["0", "4"]
    assert [row[5].split()[0] for row in rows] == ["150", "-110"]
    assert 75 < float(rows[0][4].split()[0]) < 85  # the mean of a climb to 150
    correlations = [line.split("|")[1:4] for line in table[-3:-1]]
    assert [[cell.strip() for cell in row] for row in correlations] == [
        ["0", "5", "1.00"],
        ["4", "5", "-1.00"],
    ]
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("sys.argv", [*arguments, "--where", "algo.clip=0.3"])
    two_scores.main()
    assert "| 0.5" not in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*arguments, "--where", "algo.clip=7"])
    with pytest.raises(SystemExit):
        two_scores.main()
    assert "no finished run has algo.clip=7" in capsys.readouterr().err


def outcomes(means, kind, margin=10.0) -> str:
    """The verdict on two settings with these means, ten seeds each."""
    values = pd.DataFrame(
        {
            "sync.lag": np.repeat([0, 4], 10),
            "seed": np.tile(np.arange(10), 2),
            "score": np.repeat(means, 10) + np.random.default_rng(1).normal(0, 5, 20),
        }
    )
    left, right = (hypotheses.Side({"sync.lag": lag}) for lag in (0, 4))
    (row,) = hypotheses.decide(
        values, [hypotheses.Claim(1, left, kind, right)], margin
    ).itertuples()
    return row.verdict


@pytest.mark.parametrize(
    ("means", "kind", "verdict"),
    [
        ((100, 60), "higher", "confirmed"),
        ((60, 100), "higher", "the opposite"),
        ((60, 100), "lower", "confirmed"),
        ((100, 100), "higher", "not significant"),
        ((100, 100), "same", "confirmed"),
        ((100, 60), "same", "not shown"),
        ((100, 60), "at least", "confirmed"),
        ((100, 100), "at least", "confirmed"),
        ((60, 100), "at least", "not shown"),
    ],
)
def test_a_claim_is_confirmed_by_what_it_says(means, kind, verdict):
    assert outcomes(means, kind) == verdict


def composed_jobs(study: str) -> list[DictConfig]:
    """The configs of a study's jobs with the first seed."""
    composed = compose_run([f"experiment={study}"])
    jobs = []
    for overrides in jobs_of_experiment(study, "seed=1"):
        job = deepcopy(composed)
        for name, value in (override.split("=") for override in overrides):
            if name not in ("experiment", "seed"):
                OmegaConf.update(job, name, int(value) if name == "point" else value)
        jobs.append(job)
    return jobs


@pytest.mark.parametrize("study", hypotheses.STUDIES)
def test_each_claim_is_about_settings_of_its_sweep(study):
    claims = list(hypotheses.STUDIES[study].claims())
    jobs = composed_jobs(study)
    for side in (side for claim in claims for side in (claim.left, claim.right)):
        for setting in filter(None, side):
            if setting.get("algo.objective") in hypotheses.REFUSED_TODAY:
                continue
            assert any(
                all(
                    hypotheses.equal(wanted, OmegaConf.select(job, name))
                    for name, wanted in setting.items()
                )
                for job in jobs
            ), setting


def test_a_setting_may_be_an_option_without_a_value(tmp_path):
    for seed in (1, 2):
        for limit in (None, 8):
            make_run(tmp_path / f"{limit},{seed}", seed=seed, sync={"max_lag": limit})
    values = hypotheses.read_values(tmp_path, ["sync.max_lag"], ["score"])
    for limit in (None, 8):
        assert len(hypotheses.of_setting(values, {"sync.max_lag": limit}, "score")) == 2


def test_the_last_policy_stands_beside_the_score_and_a_withdrawn_claim_has_no_verdict(
    tmp_path, monkeypatch
):
    for seed, lag in itertools.product((1, 2, 3, 4), (0, 4)):
        run = make_run(tmp_path / f"{seed},{lag}", seed=seed, level=100.0 - lag, sync={"lag": lag})
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(
            json.dumps(summary | {"eval/return": lag + seed * (lag + 1) / 9})
        )
    left, right = (hypotheses.Side({"sync.lag": lag}) for lag in (0, 4))
    claims = [hypotheses.Claim(number, left, "higher", right) for number in (1, 2)]
    study = hypotheses.Study(lambda: iter(claims), 1, withdrawn={2: "it was not run"})
    monkeypatch.setitem(hypotheses.STUDIES, "mine", study)
    first, second = list(hypotheses.lines("mine", tmp_path))[-2:]
    assert first.split(" | ")[3] == "confirmed"
    assert first.split(" | ")[-1] == "the opposite |"
    assert second.split(" | ")[3] == "withdrawn: it was not run"
    assert second.split(" | ")[-1] == "withdrawn: it was not run |"


def test_a_claim_whose_seeds_do_not_pair_is_refused():
    values = pd.DataFrame({"sync.lag": [0, 0, 4], "seed": [1, 2, 1], "score": [1.0, 2.0, 3.0]})
    left, right = (hypotheses.Side({"sync.lag": lag}) for lag in (0, 4))
    with pytest.raises(ValueError, match="2 and 1 runs, of which 1 have the same seed"):
        hypotheses.decide(values, [hypotheses.Claim(1, left, "same", right)], 1.0)


# -- delay, randomness and learning


def dosed(place: Path, objective: str, lag: int, seed: int, returns: tuple[float, ...]) -> None:
    """A run whose acting, sampled and greedy returns are these, each of them all the time."""
    run = make_run(place, seed=seed, algo={"objective": objective}, sync={"lag": lag})
    acting, sampled, newest = (value + seed / 100 for value in returns)
    figures = {"episode/return": acting, "train/gradient_steps": 10 + lag}
    evaluated = {"eval/return": newest, "eval/return_sampled": sampled, "eval/entropy": 1.0}
    lines = [{"step": step, **figures} for step in range(100, 1100, 100)]
    for line in lines[4::5]:
        line |= evaluated
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(
        json.dumps(summary | {"wall_s": 90.0 - seed, "time/evaluate_s": 10.0 + seed})
    )


def test_a_difference_is_delay_randomness_and_learning(tmp_path, capsys):
    returns = {("behaviour", 0): (70, 75, 80), ("behaviour", 16): (20, 30, 70)}
    returns |= {("decoupled", 16): (50, 58, 60)}
    for (objective, lag), values in returns.items():
        for seed in (1, 2, 3):
            dosed(tmp_path / f"{objective},{lag},{seed}", objective, lag, seed, values)
    dose.main([str(tmp_path), "--study", "dose_tokens", "--figure", str(tmp_path / "a.png")])
    text = capsys.readouterr().out
    assert "9 runs; an update is 10 to 26 gradient steps" in text
    assert "evaluations take 12% of a run's time (median; 11% to 13%)" in text
    row = next(line for line in text.splitlines() if "16 less `behaviour` at lag 0" in line)
    cells = [cell.split(" [")[0] + cell.rpartition("]")[2] for cell in row.split(" | ")[1:]]
    assert cells[:4] == ["-50", "-5, 10%", "-35, 70%", "-10, 20% |"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    dose.main([str(tmp_path), "--study", "dose_tokens", "--seeds", "2-3"])
    assert "6 runs; an update" in capsys.readouterr().out


def test_the_acting_return_is_taken_around_the_evaluations():
    """Of 1,000 frames with evaluations after 500 and 1,000: within 250 frames of each."""
    steps, returns = [100, 300, 600, 1000], [1.0, 2.0, 4.0, 8.0]
    records = pd.DataFrame({"step": steps, TRAINED: returns})
    first = (50 * 2 + 300 * 4 + 150 * 8) / 500
    assert dose.around(records, np.array([500, 1000])) == pytest.approx((first + 8) / 2)


@pytest.mark.parametrize("study", dose.STUDIES)
def test_every_hypothesis_of_a_dose_is_about_settings_that_its_experiment_has(study):
    table = {
        (job.algo.objective, int(job.sync.lag), seed): dict.fromkeys(dose.SCORES, 1.0 * seed)
        for job in composed_jobs(study)
        for seed in (1, 2)
    }
    index = pd.MultiIndex.from_tuples(table, names=["objective", "lag", "seed"])
    scores = dose.Scores(pd.DataFrame(list(table.values()), index).sort_index(), "1", index, [])
    for claim in dose.STUDIES[study]():
        assert len(claim.left(scores)) == len(claim.right(scores)) == 2, claim.text


# -- schedules that are the same, and predictors of damage

FRESH = (0.0, 0.0, 0.0)


def test_the_table_compares_paired_with_unpaired_deviations():
    """The schedules move both scores by the same amount, and each objective adds a little."""
    found = {
        "behaviour": {1: 10.0, 2: 20.0, 3: 30.0},
        "decoupled": {3: 42.0, 2: 30.0, 1: 21.0},
    }
    *_, row, median = pairing.lines(found)
    assert row == "| behaviour, decoupled | 3 | 1.0 | 14.5 | 7% | 100% |"
    assert median == "| median | | | | 7% | 100% |"


def test_too_few_seeds_in_common_are_an_error():
    found = {"behaviour": {1: 10.0, 2: 20.0, 3: 30.0}, "decoupled": {1: 1.0, 2: 2.0, 4: 3.0}}
    with pytest.raises(ValueError, match="behaviour and decoupled have 2 seeds in common"):
        list(pairing.lines(found))


def test_damage_is_the_share_of_the_tasks_largest_loss():
    found = [
        Point("a", "x", 0, 100, FRESH),
        Point("a", "x", 8, 60, (8, 0.1, 0.1)),
        Point("a", "y", 0, 90, FRESH),
        Point("a", "y", 8, 10, (8, 0.2, 0.1)),
        Point("b", "x", 0, 5, FRESH),
        Point("b", "x", 8, 4, (8, 0.1, 0.1)),
    ]
    assert damages(found) == [0, 0.5, 0, 1, 0, 1]


def test_the_table_has_the_rank_correlation_of_damage_with_each_measure():
    found = [
        Point("a", "x", 0, 100, FRESH),
        Point("a", "x", 1, 90, (1, 0.3, 0.1)),
        Point("a", "x", 2, 80, (2, 0.2, 0.2)),
        Point("a", "x", 4, 70, (4, 0.1, 0.4)),
    ]
    assert list(predictors.lines(found))[2:] == [
        "| a | 3 | 1.00 | -1.00 | 1.00 |",
        "| all | 3 | 1.00 | -1.00 | 1.00 |",
    ]


def test_without_a_run_at_lag_0_there_is_nothing_to_compare_with():
    with pytest.raises(ValueError, match=r"no run at lag 0 for \[\('a', 'x'\)\]"):
        damages([Point("a", "x", 8, 60, FRESH)])
