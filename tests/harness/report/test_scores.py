"""The numbers of a report are those of the runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from harness.report.comparisons import is_significant
from harness.report.runs import read_runs
from harness.report.scores import PER_1000, WANTED, Report, Score, analyse, known_target
from harness.report.settings import arrange
from harness.report.verdict import open_with
from tests.harness.report.synthetic import make_run, make_sweep


def report(*places: Path, compare: bool = False, **options) -> Report:
    runs, records = read_runs(places, WANTED)
    plan = arrange(runs, by_source=compare)
    return analyse(plan, records, by_source=compare, **options)


def final(*places: Path, **options) -> Score:
    """The final score of the one task."""
    return report(*places, **options).scores[0]


def by_seed(score: Score, setting: str = "all runs") -> dict[int, float]:
    return score.scores.loc[setting].dropna().to_dict()


def opening(report: Report) -> list:
    """The blocks of the verdict."""
    return list(open_with(report))


def change(directory: Path, **summary: float | None) -> None:
    file = directory / "summary.json"
    changed = json.loads(file.read_text()) | summary
    file.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


def test_scores_are_the_final_evaluations_by_seed(tmp_path):
    for seed in (1, 2, 3):
        change(make_run(tmp_path / str(seed), seed=seed), **{"eval/return": 10.0 * seed})
    found = final(tmp_path)
    assert found.metric == "eval/return"
    assert by_seed(found) == {1: 10, 2: 20, 3: 30}
    assert found.estimates["all runs", "mean"].value == 20
    assert found.estimates["all runs", "gap"].value == 475 - 20


def test_without_an_evaluation_of_every_run_all_are_scored_by_training(tmp_path):
    change(make_run(tmp_path / "1", seed=1), **{"episode/return": 5.0})
    change(make_run(tmp_path / "2", seed=2), **{"episode/return": 7.0, "eval/return": None})
    found = final(tmp_path)
    assert found.metric == "episode/return"
    assert by_seed(found) == {1: 5, 2: 7}


def test_any_number_of_the_summary_may_be_the_score(tmp_path):
    make_run(tmp_path / "run")
    found = final(tmp_path, metric="fps")
    assert by_seed(found) == {1: 80}
    assert found.target is None  # a return's target is none of frames a second


def test_a_score_that_no_run_has_is_refused_by_name(tmp_path):
    make_run(tmp_path / "run")
    with pytest.raises(ValueError, match="--metric is 'evl/return'; did you mean eval/return"):
        report(tmp_path, metric="evl/return")


def test_a_run_without_a_score_is_left_out_of_the_scores_alone(tmp_path):
    make_run(tmp_path / "1", seed=1)
    change(make_run(tmp_path / "2", seed=2), **{"eval/return": None, "episode/return": None})
    found = report(tmp_path)
    assert list(by_seed(found.scores[0])) == [1]
    assert set(found.curves["seeds"]) == {2}


def test_failed_runs_enter_no_number(tmp_path):
    make_run(tmp_path / "1", seed=1)
    make_run(tmp_path / "2", seed=2, state="failed")
    found = report(tmp_path)
    assert list(by_seed(found.scores[0])) == [1]
    assert set(found.curves["seeds"]) == {1}
    assert not found.scores[0].estimates["all runs", "iqm"].has_interval


def test_nothing_finished_is_no_error(tmp_path):
    make_run(tmp_path / "1", state="failed")
    found = report(tmp_path)
    (score,) = found.scores
    assert score.scored == []
    assert score.baseline is None
    assert found.medians.isna().all(axis=None)


def test_curves_end_with_the_shortest_run_of_a_setting(tmp_path):
    make_run(tmp_path / "long", seed=1, frames=2000, total_frames=1)
    make_run(tmp_path / "short", seed=2, frames=1000, total_frames=1)
    curves = report(tmp_path).curves
    shown = curves["x"][curves["axis"] == "frames"]
    assert shown.min() >= 100  # where the first record is
    assert shown.max() == 1000
    assert shown.diff().max() == pytest.approx(20)  # of a grid up to 2000


def test_who_learned_sooner_is_significant_where_the_final_scores_are_equal(tmp_path):
    make_sweep(tmp_path, schemes={"early": 100, "late": 50}, seeds=range(6))
    for place in tmp_path.iterdir():
        change(place, **{"eval/return": 500.0})
    at_end, sooner = report(tmp_path, baseline="late").scores
    assert at_end.comparisons["difference"].tolist() == [0]
    assert sooner.metric == "mean episode/return"
    assert sooner.baseline == "late"
    # twenty records, from 5 % to all of it
    assert sooner.estimates["early", "mean"].value == pytest.approx(52.5, abs=1)
    (comparison,) = sooner.comparisons.itertuples()
    assert comparison.difference == pytest.approx(26.25, abs=2)
    assert is_significant(comparison)


def test_curves_take_evaluations_where_there_are_some_on_the_way(tmp_path):
    directory = make_run(tmp_path / "run")
    assert set(report(tmp_path).curves["metric"]) == {"episode/return"}
    with (directory / "metrics.jsonl").open("a") as stream:
        for step in range(100, 1100, 100):
            stream.write(json.dumps({"step": step, "eval/return": 1.0}) + "\n")
    assert set(report(tmp_path).curves["metric"]) == {"eval/return"}


def test_every_setting_is_compared_with_the_baseline_by_seed(tmp_path):
    make_sweep(tmp_path, schemes={"low": 50, "high": 150, "middle": 100}, seeds=range(6))
    found = final(tmp_path, baseline="middle")
    assert found.baseline == "middle"
    high, low = found.comparisons.itertuples()
    assert (high.setting, low.setting) == ("high", "low")
    assert high.difference == pytest.approx(50, abs=3)
    assert is_significant(high)
    assert is_significant(low)


def test_the_baseline_may_be_named_by_a_part_that_only_one_has(tmp_path):
    make_sweep(tmp_path, schemes={"shared_mem": 1, "shared_disk": 2, "none": 3})
    assert final(tmp_path, baseline="mem").baseline == "shared_mem"
    with pytest.raises(ValueError, match="may be shared_disk, shared_mem: name one"):
        report(tmp_path, baseline="shared")
    with pytest.raises(ValueError, match="did you mean none"):
        report(tmp_path, baseline="nome")


def test_two_sweeps_are_compared_setting_by_setting(tmp_path):
    make_sweep(tmp_path / "old", schemes={"a": 50, "b": 60})
    make_sweep(tmp_path / "new", schemes={"a": 70, "b": 80, "c": 90})
    found = final(tmp_path / "old", tmp_path / "new", compare=True)
    rows = found.comparisons.itertuples()
    pairs = [(row.setting, row.baseline, round(row.difference, -1)) for row in rows]
    assert pairs == [("new · a", "old · a", 20), ("new · b", "old · b", 20)]


def test_time_is_told_per_frame_of_this_part_of_a_resumed_run(tmp_path):
    directory = make_run(tmp_path / "run")
    change(directory, frames=1_000_000)  # most of them before it was resumed
    with (directory / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 1000000}\n')
    (medians,) = report(tmp_path).medians.to_dict("records")
    assert medians[f"train{PER_1000}"] == pytest.approx(2.5)  # 5 s in 2000 frames
    assert medians[f"other{PER_1000}"] == pytest.approx(2.5)


def test_targets_are_those_that_gymnasium_knows():
    assert known_target("CartPole-v1") == 475
    assert known_target("Pendulum-v1") is None
    assert known_target("no:Such-v0") is None


def test_the_same_runs_give_the_same_numbers(tmp_path):
    make_sweep(tmp_path, schemes={"a": 50, "b": 60})
    first, second = report(tmp_path), report(tmp_path)
    for one, other in zip(first.scores, second.scores, strict=True):
        assert one.estimates == other.estimates
    assert first.curves.equals(second.curves)


def test_the_verdict_is_about_the_mean_over_training_unless_told_otherwise(tmp_path):
    make_run(tmp_path / "run", level=100.0)
    scores = {}
    for name in (None, "evaluation"):
        (chosen,) = report(tmp_path, score=name).primary
        scores[name] = chosen.metric, by_seed(chosen)[1]
    # twenty records, from 5 to 100
    assert scores[None] == ("mean episode/return", pytest.approx(52.5, abs=1))
    assert scores["evaluation"] == ("eval/return", pytest.approx(100, abs=5))
    assert report(tmp_path, metric="fps").primary[0].metric == "fps"


def returns(directory: Path, frames: int, *records: tuple[int, float | None]) -> Path:
    """A run of so many frames with these records of `episode/return`."""
    make_run(directory, seed=int(directory.name), frames=frames)
    steps = {**dict(records), frames: dict(records).get(frames)}
    lines = [
        {"step": step} | ({} if value is None else {"episode/return": value})
        for step, value in steps.items()
    ]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return directory


def test_training_is_scored_over_all_frames_whenever_episodes_end(tmp_path):
    returns(tmp_path / "1", 1000, (200, 10.0), (400, 40.0))  # 200 frames with 10, and 800 with 40
    returns(tmp_path / "2", 1000, (100, None), (500, 10.0), (600, None), (1000, 40.0))
    returns(tmp_path / "3", 1000, (900, 7.0))  # one episode
    _, training = report(tmp_path).scores
    assert by_seed(training) == {1: pytest.approx(34), 2: pytest.approx(25), 3: pytest.approx(7)}


def test_every_finished_run_is_scored_or_named_with_the_reason(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / f"a{seed}", seed=seed)
    returns(tmp_path / "3", 2000, (500, None))
    (sentence, left_out, *_) = opening(report(tmp_path))
    assert "(2 seeds)" in sentence
    assert len(left_out) == 2  # the other says that only the acting weights were measured
    assert left_out[1].endswith("/3 is finished, but no episode ended")


def test_a_run_without_evaluation_does_not_change_the_score_that_was_asked_for(tmp_path):
    make_sweep(tmp_path, schemes={"a": 50, "b": 60}, seeds=range(5))
    change(tmp_path / "sync=a,seed=3", **{"eval/return": None})
    found = report(tmp_path, score="evaluation")
    assert found.scores[0].metric == "eval/return"
    assert found.scores[0].scores.notna().sum(axis=1).tolist() == [4, 5]
    sentence, left_out, *_ = opening(found)
    assert sentence.startswith("By the return of the last policy, b is higher than a (difference ")
    assert left_out[0].endswith(
        "sync=a,seed=3 is finished, but no finite eval/return in summary.json"
    )


def test_a_verdict_that_the_final_evaluation_contradicts_says_so(tmp_path):
    make_sweep(tmp_path, schemes={"a": 100, "b": 50}, seeds=range(6))
    for seed in range(6):
        change(tmp_path / f"sync=b,seed={seed}", **{"eval/return": 200.0 + seed})
    *_, items = opening(report(tmp_path))
    assert items[0].startswith(
        "At the end of the runs the order is the opposite: by the return of the last policy, b"
    )


def test_a_curve_that_is_only_later_has_lost_nothing_but_the_delay(tmp_path):
    """The old weights show 200 frames later what the new ones learned: 2 updates of 100 frames."""
    for lag, returned in ((0, (10.0, 20.0, 30.0)), (2, (10.0, 10.0, 20.0)), (4, (10.0, 5.0, 5.0))):
        for seed in range(3):
            place = tmp_path / f"sync=lag{lag},seed={seed}"
            make_run(place, scheme=f"lag{lag}", seed=seed, frames=1000)
            lines = [
                json.dumps({"step": step, "episode/return": value + seed / 100 * (lag + 1)})
                for step, value in zip((200, 400, 1000), returned, strict=True)
            ]
            (place / "metrics.jsonl").write_text("\n".join(lines) + "\n")
            change(place, **{"policy/lag_updates_mean": float(lag), "updates": 10})
    found = report(tmp_path, baseline="lag0")
    (training,) = found.primary
    # By frames, the baseline's 10, 20, 30 for 200, 200, 600 frames: its mean is 24.
    assert training.delays["lag2"] == pytest.approx((4 * 10 + 2 * 20 + 4 * 30) / 10 - 24)
    assert training.delays["lag4"] == pytest.approx((6 * 10 + 2 * 20 + 2 * 30) / 10 - 24)
    *_, said, items = opening(found)
    assert said.startswith("The score is the return of the weights that act.")
    assert items == ["lag2: -4 of -7.98", "lag4: -8 of -17.96"]


def test_frames_that_were_not_learned_from_are_in_the_verdict(tmp_path):
    counts = {"collector/delivered": 1000, "collector/dropped": 0, "updates": 6}
    for name, dropped in (("much", 900), ("little", 50), ("none", 0)):
        directory = make_run(tmp_path / name, scheme=name)
        change(directory, **counts, **{"policy/dropped": dropped})
    *_, items = opening(report(tmp_path))
    assert [item for item in items if "learn" in item] == [
        "Warning: much did not learn from 900 (90%) of the frames of a run; its runs made 6 "
        "updates."
    ]


def test_an_interaction_is_a_difference_of_differences(tmp_path):
    noise = iter(np.random.default_rng(0).normal(size=100))
    effects = {(0, 0.1): 0, (6, 0.1): -10, (0, 0.3): 5, (6, 0.3): -45}
    for (lag, clip), effect in effects.items():
        for seed in range(5):
            place = tmp_path / f"{lag}-{clip}-{seed}"
            make_run(place, seed=seed, clip=clip, lag=lag)
            change(place, **{"eval/return": 100.0 + effect + next(noise)})
    found = final(tmp_path, score="evaluation", interaction="lag*clip")
    (interaction,) = found.interactions.itertuples()
    assert interaction.difference == pytest.approx(-50 - -10, abs=2)
    assert interaction.effect == pytest.approx(-50, abs=2)
    scores = {label: found.of(label) for label in LABELS}
    contrasts = scores[LABELS[0]] - scores[LABELS[1]] - scores[LABELS[2]] + scores[LABELS[3]]
    assert interaction.p == pytest.approx(stats.ttest_1samp(contrasts, 0).pvalue)
    assert (interaction.at, interaction.base) == ("clip=0.3", "clip=0.1")
    assert interaction.p_corrected < 0.05
    with pytest.raises(ValueError, match="--interaction names 'clp'; did you mean clip"):
        report(tmp_path, interaction="lag*clp")


def test_an_interaction_that_seeds_cannot_tell_says_how_many_would(tmp_path):
    noise = iter(np.random.default_rng(1).normal(size=100))
    for lag, clip in ((0, 0.1), (6, 0.1), (0, 0.3), (6, 0.3)):
        for seed in range(4):
            place = tmp_path / f"{lag}-{clip}-{seed}"
            make_run(place, seed=seed, clip=clip, lag=lag)
            change(place, **{"eval/return": 100.0 + 10 * next(noise)})
    found = final(tmp_path, score="evaluation", interaction="lag*clip")
    (interaction,) = found.interactions.itertuples()
    assert interaction.p_corrected > 0.05
    assert interaction.margin == pytest.approx(10, rel=0.2)  # a tenth of the baseline's mean
    assert interaction.seeds_needed > 4


LABELS = [f"clip={clip} · lag={lag}" for clip, lag in ((0.3, 6), (0.3, 0), (0.1, 6), (0.1, 0))]


def test_an_interaction_without_its_four_combinations_is_refused(tmp_path):
    for lag, clip in ((0, 0.1), (6, 0.1), (6, 0.3)):
        make_run(tmp_path / f"{lag}-{clip}", clip=clip, lag=lag)
    with pytest.raises(ValueError, match="--interaction is 'lag\\*clip'; no two values of each"):
        report(tmp_path, interaction="lag*clip")


def test_an_evaluation_that_shows_what_training_cannot_tell_is_in_the_verdict(tmp_path):
    for seed in range(6):
        for scheme in ("a", "b"):
            directory = make_run(tmp_path / f"{scheme}{seed}", scheme=scheme, seed=seed)
            worse = -10.0 if scheme == "b" else 10.0 * (-1) ** seed
            returns_of = json.dumps({"step": 2000, "episode/return": 50.0 + worse})
            (directory / "metrics.jsonl").write_text(f"{returns_of}\n")
            evaluated = 100.0 + seed + (50.0 if scheme == "b" else seed % 2)
            change(directory, **{"eval/return": evaluated})
    found = report(tmp_path)
    *_, items = opening(found)
    assert list(found.primary[0].comparisons["verdict"]) == ["no difference found"]
    assert items[0].startswith("At the end of the runs the order is the opposite: by the return of")


def evaluate(directory: Path, frames: int, *evaluations: float, seed: int = 1, **options) -> Path:
    """A run whose newest weights score so much at equal gaps, and a tenth less sampled."""
    make_run(directory, seed=seed, frames=frames, **options)
    with (directory / "metrics.jsonl").open("a") as stream:
        for place, value in enumerate(evaluations, 1):
            record = {"step": frames * place // len(evaluations), "eval/return": value}
            stream.write(json.dumps(record | {"eval/return_sampled": 0.9 * value}) + "\n")
    change(directory, **{"eval/return": evaluations[-1]})
    return directory


def test_the_newest_weights_decide_the_verdict_where_every_run_was_evaluated(tmp_path):
    for seed in range(4):
        for name, level, rise in (("a", 100.0, 10.0), ("b", 50.0, 20.0)):
            values = [rise * n + seed for n in range(1, 6)]
            place = tmp_path / f"{name}{seed}"
            evaluate(place, 1000, *values, seed=seed, scheme=name, level=level)
    found = report(tmp_path, baseline="a")
    assert [score.metric for score in found.scores] == [
        *("eval/return", "mean eval/return", "mean eval/return_sampled", "mean episode/return")
    ]
    (primary,) = found.primary
    assert primary.metric == "mean eval/return"
    assert by_seed(primary, "b") == {seed: pytest.approx(60 + seed) for seed in range(4)}
    assert by_seed(found.scores[2], "b")[1] == pytest.approx(0.9 * 61)
    assert list(primary.comparisons["verdict"]) != ["lower"]
    assert list(found.scores[3].comparisons["verdict"]) == ["lower"]  # of the acting weights
    assert report(tmp_path, score="acting").primary[0].metric == "mean episode/return"
    assert set(found.curves["metric"]) == {"eval/return"}


def test_the_three_returns_are_shown_of_a_task_with_one_setting(tmp_path):
    evaluate(tmp_path / "a", 1000, 1, 2, 3, 4, 5, scheme="a")
    metrics = ["eval/return", "eval/return_sampled", "episode/return"]
    assert report(tmp_path).returns["metric"].unique().tolist() == metrics
    evaluate(tmp_path / "b", 1000, 1, 2, 3, 4, 5, scheme="b")
    assert report(tmp_path).returns.empty


def test_an_evaluation_counts_for_the_frames_since_the_one_before_it(tmp_path):
    directory = evaluate(tmp_path / "run", 1000, 1.0, 1.0, 1.0, 1.0, 1.0)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = iter((100, 150, 200, 300, 1000))
    for line in lines:
        if "eval/return" in line:
            line["step"] = next(steps)
            line["eval/return"] = 10.0 if line["step"] == 1000 else 1.0
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (primary,) = report(tmp_path).primary
    assert by_seed(primary) == {1: pytest.approx(0.3 * 1 + 0.7 * 10)}


def test_without_evaluations_of_every_run_the_verdict_says_what_alone_was_measured(tmp_path):
    evaluate(tmp_path / "1", 1000, *range(5), seed=1)
    evaluate(tmp_path / "2", 1000, *range(4), seed=2)
    found = report(tmp_path)
    assert found.primary[0].metric == "mean episode/return"
    _, (warning,), *_ = opening(found)
    assert warning.startswith(
        "Only the return of the acting weights was measured: 1 of 2 runs were not evaluated"
    )
    assert "how old the acting weights are and how random the policy" in warning


@pytest.mark.parametrize(
    ("evaluations", "has_collapsed"),
    [
        ((0, 40, 80, 100, 100), False),
        ((0, 80, 100, 80, 51), False),
        ((0, 80, 100, 80, 49), True),
        ((90, 100, 40, 10, 10), True),  # it was good from the first evaluation
        ((0, 5, 18, 5, 0), False),  # it has learned too little to lose it
        ((0, 5, 22, 5, 0), True),
        ((-30, -40, -50, -60, -90), False),  # it has never learned
    ],
)
def test_a_run_has_collapsed_if_its_last_policy_lost_half_of_what_was_learned(
    tmp_path, evaluations, has_collapsed
):
    evaluate(tmp_path / "run", 1000, *map(float, evaluations), seed=1, scheme="this")
    for seed in (1, 2, 3):  # they start at 0, and gain 100
        evaluate(tmp_path / str(seed), 1000, 0, 20, 40, 60, 100, seed=seed, scheme="usual")
    found = report(tmp_path)
    assert found.num_collapsed("ppo on CartPole-v1", "this") == (int(has_collapsed), 1)
    assert found.num_collapsed("ppo on CartPole-v1", "usual") == (0, 3)


@pytest.mark.parametrize(
    ("score", "ending"),
    [
        (None, " Its last policy: 38.67 against 101; collapsed runs: 2 of 3 against 0 of 3."),
        ("evaluation", " Collapsed runs: 2 of 3 against 0 of 3."),  # it is the verdict's already
    ],
)
def test_one_comparison_ends_with_the_last_policies_and_the_collapsed_runs(tmp_path, score, ending):
    for seed, last in enumerate((10.0, 20.0, 86.0)):
        evaluate(tmp_path / f"a{seed}", 1000, 0, 20, 40, 60, 100 + seed, seed=seed, scheme="a")
        evaluate(tmp_path / f"b{seed}", 1000, 0, 30, 60, 90, last, seed=seed, scheme="b")
    sentence, *_ = opening(report(tmp_path, baseline="a", score=score))
    assert sentence.endswith(ending)


def test_the_difference_of_the_acting_weights_is_the_sum_of_its_parts(tmp_path):
    for seed in range(4):
        for name, level in (("a", 100.0), ("b", 50.0)):
            values = [level / 10 * n + seed * len(name) for n in range(1, 6)]
            place = tmp_path / f"{name}{seed}"
            evaluate(place, 1000, *values, seed=seed, scheme=name, level=level)
    found = report(tmp_path, baseline="a")
    *_, about, table = opening(found)
    assert about.startswith("What the differences in the return of the acting weights consist of")
    assert table.columns == ["setting", "acting weights", "learning", "randomness", "age"]
    (row,) = table.rows
    acting, learning, randomness, age = map(float, row[1:])
    assert learning == pytest.approx(-15)
    assert randomness == pytest.approx(1.5)
    assert acting == pytest.approx(learning + randomness + age, abs=0.01)


def test_a_damaged_run_is_left_out_and_named_in_the_first_sentence(tmp_path):
    make_sweep(tmp_path / "runs", schemes={"a": 50, "b": 60}, seeds=range(4))
    file = tmp_path / "runs" / "sync=b,seed=2" / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:9]))
    found = report(tmp_path / "runs")
    sentence, *_ = opening(found)
    assert sentence.startswith(
        "Without runs/sync=b,seed=2 (metrics.jsonl ends at frame 900 of 2000), which is damaged: "
        "By the return of the acting weights, b is higher than a (difference "
    )
    assert list(by_seed(found.primary[0], "b")) == [0, 1, 3]


def test_a_setting_of_which_no_run_finished_is_in_no_comparison(tmp_path):
    make_sweep(tmp_path, schemes={"a": 50, "b": 60})
    for place in tmp_path.iterdir():
        change(place, **{"policy/lag_updates_mean": 1.0, "updates": 10})
    make_run(tmp_path / "failed", scheme="c", seed=1, state="failed")
    verdicts = dict(report(tmp_path).primary[0].comparisons[["setting", "verdict"]].to_numpy())
    assert verdicts["c"] == "not tested"


def test_the_largest_interaction_is_named_with_both_effects(tmp_path):
    noise = iter(np.random.default_rng(2).normal(size=100))
    effects = {(0, 0.1): 0, (6, 0.1): -30, (0, 0.3): 0, (6, 0.3): 10, (0, 0.5): 0, (6, 0.5): -31}
    for (lag, clip), effect in effects.items():
        for seed in range(5):
            place = tmp_path / f"{lag}-{clip}-{seed}"
            make_run(place, seed=seed, clip=clip, lag=lag)
            change(place, **{"eval/return": 100.0 + effect + next(noise)})
    found = report(tmp_path, score="evaluation", interaction="lag*clip")
    sentence, *_ = opening(found)
    assert re.fullmatch(
        r"By the return of the last policy, 1 of 2 interactions are significant\. The largest: "
        r"changing lag from 0 to 6 adds \+\d+\.?\d* with clip=0\.3 and -[23]\d\.?\d* with "
        r"clip=0\.1, a difference of \d+\.?\d* \[.*, .*\] \(corrected p = .*\)\.",
        sentence,
    )


def test_which_task_was_never_evaluated_is_said_if_there_are_several(tmp_path):
    for task in ("CartPole-v1", "Acrobot-v1"):
        make_run(tmp_path / task, env={"id": task})
    one = "".join(map(str, opening(report(tmp_path / "CartPole-v1"))))
    several = "".join(map(str, opening(report(tmp_path))))
    measured = "Only the return of the acting weights was measured: no run was evaluated"
    assert one.count(measured) == 1
    assert "CartPole-v1: Only" not in one
    assert f"ppo on Acrobot-v1: {measured}" in several
    assert f"ppo on CartPole-v1: {measured}" in several
