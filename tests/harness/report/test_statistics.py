"""Statistics of runs: worked examples, scipy, rliable, and what few seeds allow."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from harness.report.comparisons import (
    MOST_PAIRS,
    Margin,
    compare_pairs,
    has_share,
    in_words,
    is_significant,
    pairs_needed,
)
from harness.report.statistics import (
    band,
    equivalence_test,
    estimate,
    holm,
    interpolate,
    iqm,
    mean,
    median,
    optimality_gap,
    paired_test,
    resample,
    student,
    trailing_mean,
)

TEN = np.arange(1.0, 11.0)
FIVE = np.array([1.0, 2.0, 3.0, 4.0, 100.0])


# -- point estimates


def test_iqm_cuts_a_quarter_of_the_runs_at_each_end():
    assert iqm(np.array([0.0, 1.0, 2.0, 3.0, 1000.0])) == 2  # one of five
    assert iqm(np.array([0.0, 2.0, 4.0, 1000.0])) == 3  # one of four
    assert iqm(np.array([0.0, 3.0, 6.0])) == 3  # none of three
    assert iqm(np.array([7.0])) == 7


def test_iqm_takes_scores_in_any_order():
    assert iqm(np.array([1000.0, 1.0, 3.0, 0.0, 2.0])) == 2


def test_the_optimality_gap_rewards_nothing_above_the_target():
    gap = optimality_gap(475)
    assert gap(np.array([500.0, 475.0, 375.0])) == pytest.approx(100 / 3)
    assert optimality_gap(-100)(np.array([-150.0, -80.0])) == 25


def test_a_target_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="nan"):
        optimality_gap(math.nan)


def test_measures_work_along_the_last_axis():
    table = np.array([FIVE, FIVE + 1])
    for measure in (mean, median, iqm, optimality_gap(3)):
        assert measure(table).tolist() == [measure(FIVE), measure(FIVE + 1)]


# -- intervals


def test_an_estimate_holds_its_own_value_and_counts_the_seeds():
    found = estimate(np.array([1.0, 2.0, 3.0, 6.0]), mean)
    assert found.value == 3
    assert found.low <= 3 <= found.high
    assert found.seeds == 4


def test_two_seeds_give_the_interval_that_can_be_counted():
    # Of [0, 1] the resampled means are 0, 1/2 and 1 with probabilities 1/4, 1/2 and 1/4.
    means = mean(resample(np.array([0.0, 1.0]), 40_000))
    shares = [np.mean(means == value) for value in (0, 0.5, 1)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.01)


def test_the_same_seed_gives_the_same_interval_and_another_does_not():
    scores = np.random.default_rng(0).normal(size=7)
    assert estimate(scores, iqm) == estimate(scores, iqm)
    assert estimate(scores, iqm) != estimate(scores, iqm, rng_seed=1)


def test_one_seed_has_no_interval():
    found = estimate(np.array([4.0]))
    assert found.value == 4
    assert not found.has_interval


def test_intervals_of_as_few_seeds_as_come_with_a_caution_hold_the_truth_too_rarely():
    rng = np.random.default_rng(0)
    for seeds, expected in ((5, 0.84), (20, 0.93)):
        found = [estimate(rng.normal(size=seeds), mean, resamples=500) for _ in range(500)]
        held = np.mean([each.low <= 0 <= each.high for each in found])
        assert held == pytest.approx(expected, abs=0.04)


# -- comparisons


def compare(scores: dict[str, dict[int, float]], *pairs: tuple[str, str], **options) -> list[Any]:
    """scores: setting → seed → score."""
    table = pd.DataFrame(scores.values(), scores, dtype=float)
    return list(compare_pairs(table, pairs, **options).itertuples())


def against(scores: dict[str, dict[int, float]], baseline: str) -> list[Any]:
    return compare(scores, *((name, baseline) for name in scores if name != baseline))


def test_a_paired_test_worked_by_hand():
    # Differences 1, 2, 3, 4, 5: mean 3, spread sqrt(2.5), so t = 3 / sqrt(0.5) = 4.2426.
    found, p = paired_test(np.array([2.0, 4.0, 6.0, 8.0, 10.0]), np.arange(1.0, 6.0))
    assert found.value == 3
    assert found.high - found.value == pytest.approx(2.7764 * math.sqrt(0.5), abs=1e-3)
    assert p == pytest.approx(0.01324, abs=1e-4)


def test_holm_worked_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_holm_leaves_out_what_was_no_test():
    assert holm([math.nan, 0.02]) == pytest.approx([math.nan, 0.02], nan_ok=True)
    assert holm([]) == []


def test_scores_are_paired_by_the_seeds_that_both_have():
    scores = {"left": {3: 1.0, 1: 2.0, 9: 3.0}, "right": {1: 5.0, 3: 6.0, 4: 7.0}}
    (found,) = compare(scores, ("left", "right"))
    assert (found.pairs, found.difference) == (2, -4)


def test_pairs_are_made_by_seed_in_whatever_order_runs_are_listed():
    left = {3: 30.0, 9: 90.0, 1: 10.0, 2: 20.0}
    right = {2: 21.0, 4: 41.0, 3: 31.0, 1: 11.0}
    (found,) = compare({"left": left, "right": right}, ("right", "left"))
    assert (found.pairs, found.low, found.difference, found.high) == (3, 1, 1, 1)


def test_every_strategy_meets_the_baseline_and_the_findings_are_sentences():
    seeds = range(5)
    scores = {
        "base": {seed: 100.0 + seed for seed in seeds},
        "better": {seed: 150.0 + seed + 0.1 * (-1) ** seed for seed in seeds},
        "noise": {seed: 100.0 + seed + 30 * (-1) ** seed for seed in seeds},
        "same": {seed: 100.0 + seed for seed in seeds},
        "lonely": {0: 3.0},
        "elsewhere": {77: 3.0},
    }
    found = {c.setting: c for c in against(scores, "base")}
    assert "base" not in found
    words = {name: in_words(c) for name, c in found.items()}
    assert words["better"].startswith("better is higher than base (difference 50.02 [")
    assert words["noise"].startswith("no difference found between noise and base (difference ")
    same = "same and base are identical (difference 0 [0, 0], 5 pairs, corrected p = 1)."
    assert words["same"] == same
    assert found["same"].verdict == "identical"
    for name, pairs in (("lonely", "1 pair"), ("elsewhere", "0 pairs")):
        assert words[name].startswith(f"{name} and base are not tested (difference ")
        assert f", {pairs}, corrected p = –)." in words[name]
    assert [name for name, c in found.items() if is_significant(c)] == ["better"]


def test_a_difference_without_any_spread_is_said_and_not_tested():
    (found,) = against({"a": {1: 1.0, 2: 2.0}, "b": {1: 2.0, 2: 3.0}}, "b")
    assert not is_significant(found)
    assert found.verdict == "not tested"
    assert in_words(found) == (
        "a and b are not tested (difference -1 [-1, -1], 2 pairs, corrected p = –)."
    )


def test_rounding_is_not_taken_for_a_difference():
    (found,) = against({"a": {1: 0.1 + 0.2, 2: 0.3}, "b": {1: 0.3, 2: 0.3}}, "b")
    assert (found.verdict, found.pairs) == ("identical", 2)


def test_an_equivalence_test_worked_by_hand():
    # Differences -1, 0, 1, 2: mean 0.5, sd sqrt(5/3); against 3, t = 2.5 / (sd / 2) = 3.873.
    left, right = np.array([9.0, 10.0, 11.0, 12.0]), np.full(4, 10.0)
    assert equivalence_test(left, right, 3.0) == pytest.approx(0.01523, abs=1e-4)
    assert equivalence_test(right, left, 3.0) == pytest.approx(0.01523, abs=1e-4)
    assert equivalence_test(left, right, 0.4) > 0.5
    assert equivalence_test(right, right, 0.1) == 0
    assert math.isnan(equivalence_test(left[:1], right[:1], 3.0))
    assert math.isnan(equivalence_test(left, right, 0.0))


def test_settings_are_different_or_equivalent_or_no_difference_is_found():
    rng = np.random.default_rng(0)
    shifts = {"base": 0, "same": 0.1, "a little lower": -5, "lower": -30, "higher": 40}
    scores = {
        name: {seed: 100 + shift + rng.normal() for seed in range(10)}
        for name, shift in shifts.items()
    }
    scores["noise"] = {seed: 100 + 50 * (-1) ** seed for seed in range(10)}
    assert {c.setting: c.verdict for c in against(scores, "base")} == {
        "same": "equivalent",
        "a little lower": "lower by less than the margin",
        "lower": "lower",
        "higher": "higher",
        "noise": "no difference found",
    }


def test_a_margin_is_a_share_of_the_baselines_mean_or_points_of_the_score():
    assert Margin(0.2).of(np.array([-40.0, -60.0])) == 10
    assert Margin(0.2, points=3.0).of(np.array([-40.0, -60.0])) == 3
    scores = {"a": {1: 5.0, 2: 6.0, 3: 5.5}, "b": {1: 1.0, 2: -1.0, 3: 0.0}}
    (found,) = compare(scores, ("a", "b"))
    assert math.isnan(found.p_equivalent)  # a share of 0 is no margin
    (found,) = compare(scores, ("a", "b"), margin=Margin(points=100.0))
    assert found.p_equivalent_corrected < 0.05


def test_a_share_of_scores_below_zero_is_no_margin():
    scores = {"a": {1: -51.0, 2: -50.0, 3: -49.0}, "b": {1: -50.0, 2: -50.2, 3: -49.9}}
    (found,) = compare(scores, ("a", "b"))
    assert math.isnan(found.margin)
    assert math.isnan(found.p_equivalent)


def test_settings_that_differ_by_the_margin_are_rarely_called_equivalent():
    rng = np.random.default_rng(0)
    wrong = sum(
        equivalence_test(rng.normal(1, size=8), rng.normal(0, size=8), 1.0) < 0.05
        for _ in range(600)
    )
    assert wrong / 600 < 0.07


def test_a_family_of_comparisons_without_differences_is_rarely_told_apart():
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(300):
        scores = {
            str(name): dict(enumerate(rng.normal(size=5))) for name in range(8)
        }  # nothing differs
        wrong += any(map(is_significant, against(scores, "0")))
    assert wrong / 300 < 0.08


# -- curves


def test_a_curve_is_linear_between_its_points_and_nowhere_beyond():
    got = interpolate(np.array([10, 20, 40]), np.array([1.0, 2.0, 4.0]), np.array([5, 10, 30, 41]))
    assert got == pytest.approx([math.nan, 1, 3, math.nan], nan_ok=True)


def test_of_several_points_of_a_frame_the_last_counts():
    frames, values = np.array([10, 20, 20, 40]), np.array([1.0, 9.0, 2.0, 4.0])
    assert interpolate(frames, values, np.array([20, 30])) == pytest.approx([2, 3])


def test_a_trailing_mean_looks_back_and_never_ahead():
    frames = np.array([1.0, 2, 3, 4, 10])
    got = trailing_mean(frames, np.array([1.0, 3, 5, 7, 100]), width=2)
    assert got == pytest.approx([1, 2, 4, 6, 100])


def test_a_band_ends_where_the_shortest_run_ends():
    grid = np.array([0.0, 1.0, 2.0])
    found = band(np.array([[1.0, 2.0, 3.0], [3.0, 4.0, math.nan]]), grid)
    assert found[["x", "value"]].to_numpy().tolist() == [[0, 2], [1, 3]]
    assert (found["low"] <= found["value"]).all()
    assert (found["high"] >= found["value"]).all()


def test_a_band_draws_whole_curves():
    # Mirrored curves stay mirrored in each resample, and so do the bounds of the band.
    rising = np.random.default_rng(5).normal(size=7)
    found = band(np.column_stack([rising, -rising]), np.arange(2.0))
    assert found["low"][0] < found["value"][0] < found["high"][0]
    bounds = (-found["high"][0], -found["low"][0])
    assert (found["low"][1], found["high"][1]) == pytest.approx(bounds, rel=1e-9)


def test_a_single_curve_has_no_band():
    found = band(np.array([TEN]), TEN)
    assert found["value"].tolist() == TEN.tolist()
    assert found["low"].isna().all()


# -- against scipy


def test_estimates_and_tests_agree_with_scipy():
    rng = np.random.default_rng(1)
    for n in (2, 3, 4, 5, 8, 11, 30):
        a, b = rng.normal(size=n), rng.normal(0.5, 2, size=n)
        assert iqm(a) == pytest.approx(stats.trim_mean(a, 0.25))
        found, p = paired_test(a, b)
        theirs = stats.ttest_rel(a, b)
        inside = theirs.confidence_interval(0.95)
        assert p == pytest.approx(theirs.pvalue, rel=1e-9)
        assert (found.low, found.high) == pytest.approx((inside.low, inside.high), rel=1e-9)


def test_the_mean_has_students_interval():
    for scores in ([1.0, 6.0], [1.0, 2.0, 3.0, 6.0], [1.0, 2.0, 3.0, 6.0, 3.5], [*range(10), 7.5]):
        found = student(scores)
        theirs = stats.ttest_1samp(scores, 0).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high))
        assert found.value == pytest.approx(sum(scores) / len(scores))
    # by hand: the mean is 4, the variance 7.5, and the 0.975 quantile with 4 degrees 2.776445
    found = student([1.0, 2.0, 4.0, 5.0, 8.0])
    half = 2.776445 * math.sqrt(7.5 / 5)
    assert (found.value, found.low, found.high) == pytest.approx((4, 4 - half, 4 + half))
    assert not student([1.0]).has_interval


def test_bootstrap_intervals_agree_with_scipy():
    scores = np.random.default_rng(2).normal(size=12)
    for measure in (mean, iqm, optimality_gap(0.3)):
        theirs = stats.bootstrap(
            (scores,),
            lambda x, axis, measure=measure: measure(np.moveaxis(x, axis, -1)),
            n_resamples=20_000,
            method="percentile",
            rng=0,
        ).confidence_interval
        found = estimate(scores, measure, resamples=20_000)
        assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.03)


# -- against rliable, in the peers' environment (`make peers`)

PEERS = Path(__file__).resolve().parents[3] / ".venv-peers" / "bin" / "python"
RLIABLE = """
import json, sys
import numpy as np
from rliable import library, metrics

one = np.array(json.load(sys.stdin))[:, None]  # [runs, tasks]
measures = {
    "mean": metrics.aggregate_mean,
    "iqm": metrics.aggregate_iqm,
    "gap": lambda scores: metrics.aggregate_optimality_gap(scores, 0.3),
}
found = {}
for name, measure in measures.items():
    points, intervals = library.get_interval_estimates(
        {"a": one}, lambda scores: np.array([measure(scores)]), reps=20_000
    )
    found[name] = [float(points["a"][0]), *intervals["a"][:, 0].tolist()]
json.dump(found, sys.stdout)
"""


def test_statistics_agree_with_rliable():
    if (
        not PEERS.exists()
        or subprocess.run([PEERS, "-c", "import rliable"], check=False).returncode
    ):
        pytest.skip("the peers' environment has no rliable")
    rng = np.random.default_rng(4)
    left = rng.normal(size=12)
    ran = subprocess.run(
        [PEERS, "-c", RLIABLE],
        input=json.dumps(left.tolist()),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(ran.stdout)
    for name, measure in (("mean", mean), ("iqm", iqm), ("gap", optimality_gap(0.3))):
        found = estimate(left, measure, resamples=20_000)
        assert found.value == pytest.approx(theirs[name][0], rel=1e-9)
        assert (found.low, found.high) == pytest.approx(theirs[name][1:], abs=0.03)


def test_holm_agrees_with_a_plain_walk():
    p = np.random.default_rng(3).uniform(0, 0.2, size=9)
    running, expected = 0.0, {}
    for rank, index in enumerate(np.argsort(p)):
        running = max(running, min(1.0, (9 - rank) * p[index]))
        expected[index] = running
    assert holm(p.tolist()) == pytest.approx([expected[i] for i in range(9)])


def test_the_seeds_that_a_comparison_needs_give_its_test_the_power_that_is_promised():
    rng = np.random.default_rng(3)
    base = dict(enumerate(rng.normal(100, 10, 6)))
    other = {seed: score + rng.normal(0, 12) for seed, score in base.items()}
    (comparison,) = against({"base": base, "other": other}, "base")
    needed = pairs_needed(comparison, 6, 1)
    assert needed is not None
    deviation = np.std([other[seed] - base[seed] for seed in base], ddof=1)
    for pairs, reaches in ((needed, True), (needed - 1, False)):
        draws = rng.normal(comparison.margin, deviation, size=(20_000, pairs))
        power = np.mean(stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05)
        assert (power > 0.79) == reaches or abs(power - 0.8) < 0.01
    assert pairs_needed(comparison, 6, 5) > needed
    assert pairs_needed(comparison._replace(margin=1e6), 6, 1) == 2
    equal = comparison._replace(low=comparison.high)
    for unknown, pairs in ((equal, 6), (comparison._replace(margin=0.0), 6), (comparison, 1)):
        assert pairs_needed(unknown, pairs, 1) is None
    without, smallest = 0.01, comparison.margin  # margins: for which there is no number, and one
    for _ in range(40):
        margin = (without + smallest) / 2
        is_known = pairs_needed(comparison._replace(margin=margin), 6, 1) is not None
        without, smallest = (without, margin) if is_known else (margin, smallest)
    assert pairs_needed(comparison._replace(margin=smallest), 6, 1) == MOST_PAIRS


def test_a_share_of_scores_means_something_from_zero_upwards():
    assert has_share(pd.DataFrame({1: [0.0, 3.0]}))
    assert not has_share(pd.DataFrame({1: [-0.5, 3.0]}))
