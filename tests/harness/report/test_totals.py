"""All tasks together."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from harness.report.document import write
from harness.report.scores import totals
from tests.harness.report.synthetic import make_run
from tests.harness.report.test_scores import report


def make_tasks(root: Path, levels: dict[str, dict[str, float]]) -> Path:
    """Runs of each scheme in each environment, with returns about the value given."""
    for env, schemes in levels.items():
        for scheme, level in schemes.items():
            for seed in (1, 2, 3):
                directory = root / f"{env},{scheme},{seed}"
                make_run(directory, scheme=scheme, seed=seed, level=level, env={"id": env})
    return root


def test_a_setting_is_compared_over_all_tasks_whatever_their_scales(tmp_path):
    levels = {
        "Acrobot-v1": {"a": 4000.0, "b": 9000.0, "c": 4000.0},
        "CartPole-v1": {"a": 50.0, "b": 10.0, "c": 500.0},
    }
    found = report(make_tasks(tmp_path / "runs", levels), baseline="a")
    assert {score.baseline for score in found.scores} == {"a"}
    b, c = totals(found).itertuples()
    assert (b.setting, c.setting) == ("b", "c")
    assert b.p_better == 0.5  # better in one task, worse in the other
    assert (b.low, b.high) == (0.5, 0.5)
    assert 0.5 <= c.p_better < 1.0


def test_a_setting_that_lacks_a_task_is_left_out(tmp_path):
    levels = {"Acrobot-v1": {"a": 1.0, "b": 9.0}, "CartPole-v1": {"a": 1.0, "b": 9.0, "c": 5.0}}
    found = report(make_tasks(tmp_path / "runs", levels), baseline="a")
    assert list(totals(found)["setting"]) == ["b"]


def test_one_task_has_no_total_and_several_have_a_section(tmp_path):
    one = report(make_tasks(tmp_path / "one", {"CartPole-v1": {"a": 1.0, "b": 9.0}}))
    assert totals(one).empty
    levels = {"Acrobot-v1": {"a": 1.0, "b": 9.0}, "CartPole-v1": {"a": 1.0, "b": 9.0}}
    place = make_tasks(tmp_path / "two", levels)
    document = write(report(place), pd.DataFrame(), "both")
    assert "All tasks together" in document.sections
