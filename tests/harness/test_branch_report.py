"""What the report of branches says, of scores that are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.branch.report import Result, Results, document, half_lost, sentences, where_it_changes
from harness.report.make import save
from harness.report.runs import Run
from harness.report.statistics import paired_test

METRIC = "eval/return"
NOISE = np.array([3.0, -2.0, 5.0, -4.0, 1.0, -1.0])


def run_of(score: float) -> Run:
    curve = pd.DataFrame({"step": [500, 1000], METRIC: [score / 2, score]})
    return Run(name="1", source="", summary={METRIC: score}, records=curve)


def results_of(effects: dict[int, float], arm: str = "sync.lag=0") -> Results:
    """Six pairs at each moment: the control scores 10 and its noise, the arm so much more."""
    done = []
    for update, effect in effects.items():
        for repeat, noise in enumerate(NOISE, 1):
            own = 0.1 * noise**2  # the noise of the difference
            scores = {"control": 10 + noise, arm: 10 + noise + effect + own - 0.93}
            done += [
                Result(update, 10 * update, name, repeat, run_of(score))
                for name, score in scores.items()
            ]
    return Results(run_of(10), done, 0)


def test_differences_are_paired_and_corrected_together():
    results = results_of({20: 30.0, 40: 0.0, 60: 1.5})
    differences = results.differences(METRIC)
    of_control = [[one.score(METRIC) for one in results.of(u, "control")] for u in (20, 40, 60)]
    of_arm = [[one.score(METRIC) for one in results.of(u, "sync.lag=0")] for u in (20, 40, 60)]
    tests = [paired_test(np.array(a), np.array(b)) for a, b in zip(of_arm, of_control, strict=True)]
    assert [one.difference for one in differences] == [test[0] for test in tests]
    p = [test[1] for test in tests]
    assert p[0] < p[2] < p[1]
    assert [one.p_corrected for one in differences] == pytest.approx([3 * p[0], p[1], 2 * p[2]])
    assert [one.sign for one in differences] == [1, 0, 0 if 2 * p[2] > 0.05 else 1]


def test_the_sentences_claim_no_more_than_the_intervals():
    words = list(sentences(results_of({20: 30.0, 40: 31.0, 60: 0.0}).differences(METRIC)))
    assert words[0] == "sync.lag=0 scores higher than the control after updates 20, 40."
    assert words[1] == "sync.lag=0: no difference found after update 60."
    assert words[2].startswith("sync.lag=0: the effect is half of its largest at update 50, 90 % ")
    worse = list(sentences(results_of({20: -30.0}).differences(METRIC)))
    assert worse == ["sync.lag=0 scores lower than the control after update 20."]


def test_half_of_the_effect_is_interpolated_between_moments():
    half = half_lost(results_of({20: 40.0, 40: 30.0, 60: 10.0, 80: 0.0}).differences(METRIC))
    assert half is not None
    assert half.value == pytest.approx(50, abs=0.1)  # 20 lies half-way between 30 and 10
    assert 45 < half.low <= half.value <= half.high < 55


@pytest.mark.parametrize("effects", [{20: 0.0, 40: 0.0}, {20: 30.0, 40: 29.0}, {20: 30.0}])
def test_there_is_no_half_without_an_effect_or_before_it_is_lost(effects):
    assert half_lost(results_of(effects).differences(METRIC)) is None


def test_moments_are_added_where_the_answer_changes():
    assert where_it_changes(results_of({20: 30.0, 40: 31.0, 60: 0.0, 70: 0.0})) == (40, 60)
    assert where_it_changes(results_of({20: 60.0, 40: 50.0, 70: 20.0, 80: 18.0})) == (40, 70)
    assert where_it_changes(results_of({20: 30.0, 40: 31.0})) is None
    assert where_it_changes(results_of({40: 30.0, 41: 0.0})) is None


def test_the_page_has_the_tables_the_answers_and_a_figure_for_each_moment(tmp_path: Path):
    results = results_of({20: 30.0, 40: 0.0})
    page = document(Results(results.parent, results.done, 2), "Branches of a run")
    assert [one.slug for one in page.pictures()] == ["difference-main", "fans-20", "fans-40"]
    text = str(page.sections["Branches"])
    assert "there are 6 repeats" in text
    assert "2 branches are not done, and are left out." in text
    assert "no difference found after update 40" in text
    save(tmp_path / "report", page, {})
    assert (tmp_path / "report/report.html").is_file()
    assert (tmp_path / "report/figures/fans-20.svg").is_file()
