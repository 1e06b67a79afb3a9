"""All tasks together."""

from __future__ import annotations

from pathlib import Path

from harness.report.analysis import WANTED, Findings, analyse
from harness.report.document import write
from harness.report.read import find_runs
from harness.report.settings import arrange
from harness.report.totals import totals
from tests.harness.report.synthetic import make_run


def make_tasks(root: Path, levels: dict[str, dict[str, float]]) -> Path:
    """Runs of each scheme in each environment, with returns about the value given."""
    for env, schemes in levels.items():
        for scheme, level in schemes.items():
            for seed in (1, 2, 3):
                directory = root / f"{env},{scheme},{seed}"
                make_run(directory, scheme=scheme, seed=seed, level=level, env={"id": env})
    return root


def findings(root: Path, baseline: str | None = None) -> list[Findings]:
    runs = find_runs([root], WANTED, lambda text: None)
    return analyse(
        arrange(runs),
        metric=None,
        baseline=baseline,
        target=None,
        by_source=False,
        progress=lambda text: None,
    )


def test_a_setting_is_compared_over_all_tasks_whatever_their_scales(tmp_path):
    levels = {
        "Acrobot-v1": {"a": 4000.0, "b": 9000.0, "c": 4000.0},
        "CartPole-v1": {"a": 50.0, "b": 10.0, "c": 500.0},
    }
    found = findings(make_tasks(tmp_path / "runs", levels), baseline="a")
    b, c = totals(found)
    assert (b.name, b.baseline, b.num_tasks) == ("b", "a", 2)
    assert b.better.value == 0.5  # better in one task, worse in the other
    assert (b.better.low, b.better.high) == (0.5, 0.5)
    assert 0.5 <= c.better.value < 1.0


def test_a_setting_that_lacks_a_task_is_left_out(tmp_path):
    levels = {"Acrobot-v1": {"a": 1.0, "b": 9.0}, "CartPole-v1": {"a": 1.0, "b": 9.0, "c": 5.0}}
    found = findings(make_tasks(tmp_path / "runs", levels), baseline="a")
    assert [total.name for total in totals(found)] == ["b"]


def test_one_task_has_no_total_and_several_have_a_section(tmp_path):
    one = findings(make_tasks(tmp_path / "one", {"CartPole-v1": {"a": 1.0, "b": 9.0}}))
    assert totals(one) == []
    levels = {"Acrobot-v1": {"a": 1.0, "b": 9.0}, "CartPole-v1": {"a": 1.0, "b": 9.0}}
    place = make_tasks(tmp_path / "two", levels)
    runs = find_runs([place], WANTED, lambda text: None)
    document = write(arrange(runs), findings(place), runs, "both", lambda text: None)
    assert "All tasks together" in [section.title for section in document.sections]
