"""A score over the factors of a sweep: what is drawn where, and what is compared with what."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.files import read_json, write_json
from harness.report import figures, main
from harness.report.design import Design, _short, make_design
from harness.report.figures import positions
from harness.report.runs import read_runs
from harness.report.scores import ACTING, WANTED, Report, analyse
from harness.report.settings import arrange
from tests.harness.report.synthetic import make_run
from tests.harness.report.test_scores import report

LAGS = (0, 1, 16)
# objective and vtrace are zipped; behaviour is there with vtrace and without
OBJECTIVES = {("behaviour", False): 1.0, ("decoupled", False): 0.0, ("behaviour", True): 0.5}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns of 100, less what a lag costs under each objective."""
    root = tmp_path_factory.mktemp("sweep")
    for (objective, vtrace), cost in OBJECTIVES.items():
        for lag in LAGS:
            for seed in range(1, 5):
                algo = {"name": "ppo", "objective": objective, "vtrace": vtrace, "clip": 0.2}
                sync = {"name": "shared_mem", "lag": lag, "most": 2 * lag}
                level = 100 * (1 - cost * lag / 20)
                run = root / f"{objective},{vtrace},{lag},{seed}"
                make_run(run, seed=seed, level=level, algo=algo, sync=sync)
    return root


def study(
    place: Path, x: str = "sync.lag", hue: str | None = None, facet: str | None = None, **of: Any
) -> tuple[Report, pd.DataFrame]:
    """The numbers, and the cells by line and value of x."""
    runs, records = read_runs([place], WANTED)
    plan = arrange(runs)
    report = analyse(plan, records, design=make_design(plan, x, hue, facet), **of)
    cells = report.response.set_index(["line", "x"], drop=False)
    return report, cells.rename_axis([None, None])


def design_of(*arguments: Any, **options: Any) -> Design:
    design = study(*arguments, **options)[0].design
    assert design is not None
    return design


def baselines(report: Report) -> dict[str, str]:
    """Setting → what it is compared with."""
    return report.primary[0].comparisons.set_index("setting")["baseline"].to_dict()


def test_options_that_have_no_place_join_the_lines_and_zipped_ones_need_none(sweep):
    design = design_of(sweep)
    assert design.x == ("sync.lag",)  # sync.most follows from it
    assert set(design.hue) == {"algo.objective", "algo.vtrace"}
    assert design_of(sweep, hue="algo.objective").hue == ("algo.objective", "algo.vtrace")
    assert design_of(sweep, facet="algo.vtrace").hue == ("algo.objective",)


def test_lines_are_called_by_words_and_by_the_flags_that_are_set(sweep):
    assert design_of(sweep, "algo.objective", hue="sync.lag").lines[0] == "lag=0"  # not a bare 0
    design = design_of(sweep, hue="algo.objective+algo.vtrace")
    assert design.lines == ["behaviour", "behaviour · vtrace", "decoupled"]
    assert design.values == ["0", "1", "16"]


def test_an_option_without_a_group_is_called_by_its_name():
    names = ("total_frames", "env.kwargs.sutton", "algo.vtrace", "algo.objective")
    assert _short(names, ("100", "true", "false", "behaviour")) == (
        "total_frames=100 · sutton · behaviour"
    )


def test_every_setting_is_in_its_place_with_the_mean_over_its_seeds(sweep):
    report, cells = study(sweep, hue="algo.objective")
    assert len(cells) == 9
    cell = cells.loc["behaviour", "16"]
    scores = report.score(cell.task, ACTING).of(cell.setting)
    assert cell.value == pytest.approx(scores.sum() / 4)
    assert cell.low < cell.value < cell.high


def test_each_line_is_compared_with_its_own_first_value(sweep):
    report, cells = study(sweep, hue="algo.objective")
    verdicts = cells["verdict"].dropna()
    assert verdicts["behaviour", "16"] == verdicts["behaviour · vtrace", "16"] == "lower"
    assert verdicts["decoupled", "16"] == "identical"
    assert not any(x == "0" for _, x in verdicts.index)
    setting, first = (cells.loc[("decoupled", x), "setting"] for x in ("16", "0"))
    assert baselines(report)[setting] == first


def test_a_baseline_of_option_values_is_met_by_what_is_otherwise_the_same(sweep):
    wanted = "algo.objective=behaviour+vtrace=false"
    report, cells = study(sweep, hue="algo.objective", baseline=wanted)
    for line in ("decoupled", "behaviour · vtrace"):
        cell = cells.loc[line, "16"]
        assert baselines(report)[cell.setting] == cells.loc[("behaviour", "16"), "setting"]
        assert cell.verdict == "higher"
    assert pd.isna(cells.loc[("behaviour", "16"), "verdict"])


def test_without_a_design_a_baseline_may_be_a_value_too(sweep):
    found = report(sweep, baseline="objective=decoupled").scores[0]
    assert set(found.comparisons["baseline"]) == {
        f"objective=decoupled · vtrace=false · lag={lag} · most={2 * lag}" for lag in LAGS
    }
    with pytest.raises(ValueError, match="--baseline is 'objective=prox'"):
        report(sweep, baseline="objective=prox")


def test_a_facet_has_a_panel_for_each_value_and_so_has_each_task(tmp_path):
    for env in ("CartPole-v1", "Acrobot-v1"):
        for lag in (0, 4):
            for seed in (1, 2):
                sync = {"name": "a", "lag": lag}
                make_run(tmp_path / f"{env}{lag}{seed}", seed=seed, sync=sync, env={"id": env})
    for facet in (None, "env.id"):
        found, cells = study(tmp_path, facet=facet)
        assert list(cells["panel"]) == ["Acrobot-v1"] * 2 + ["CartPole-v1"] * 2
        assert len(figures.response(found).axes) == 2
    assert found.design.lines == [""]


@pytest.mark.parametrize(
    ("values", "places"),
    [
        (["0", "1", "2", "4", "8", "16"], [-1, 0, 1, 2, 3, 4]),
        (["1", "2", "3"], [1, 2, 3]),
        (["0", "2", "8"], [0, 2, 8]),
        (["1", "1024"], [0, 10]),
        (["-1", "0", "100"], [-1, 0, 100]),
        (["2", "null"], [0, 1]),
        (["a", "b", "c"], [0, 1, 2]),
    ],
)
def test_numbers_are_spaced_by_size_and_wide_ranges_by_logarithm(values, places):
    assert positions(values) == pytest.approx(places)


def test_curves_have_a_panel_for_each_line_and_a_colour_for_each_value(sweep):
    found, _ = study(sweep, hue="algo.objective")
    figure = figures.curves(found, "ppo on CartPole-v1", "frames")
    panels = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in panels] == [
        *("behaviour", "behaviour · vtrace", "decoupled")
    ]
    colours = [[line.get_color() for line in axes.lines] for axes in panels]
    assert colours[0] == colours[1] == colours[2]
    assert len(set(colours[0])) == len(LAGS)


def test_the_figure_has_the_means_their_intervals_and_a_name_for_each_line(sweep):
    found, cells = study(sweep, hue="algo.objective")
    design, figure = found.design, figures.response(found)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "16"]
    for container, line in zip(axes.containers, design.lines, strict=True):
        means = [cells.loc[(line, value), "value"] for value in design.values]
        assert container.lines[0].get_ydata() == pytest.approx(means)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == design.lines


@pytest.mark.parametrize(("most", "unit"), [(32, "32"), (20, "20 to 32")])
def test_an_axis_of_lags_says_how_many_gradient_steps_an_update_has(tmp_path, most, unit):
    for seed, lag, steps in ((1, 0, 32), (2, 0, 32), (1, 4, 32), (2, 4, most)):
        run = make_run(tmp_path / f"{seed},{lag}", seed=seed, sync={"name": "a", "lag": lag})
        summary = read_json(run / "summary.json")
        write_json(run / "summary.json", summary | {"updates": 7, "gradient_steps": 7 * steps})
    (axes,) = figures.response(study(tmp_path)[0]).axes
    assert axes.get_xlabel() == f"sync.lag\n(updates of {unit} gradient steps)"


@pytest.mark.parametrize(("x", "joined"), [("sync.lag", "-"), ("algo.objective", "None")])
def test_points_are_joined_over_numbers_and_not_over_categories(sweep, x, joined):
    (axes,) = figures.response(study(sweep, x=x)[0]).axes
    assert {container.lines[0].get_linestyle() for container in axes.containers} == {joined}


def test_the_report_opens_with_the_verdict_its_figure_and_its_table(sweep, tmp_path):
    out = tmp_path / "out"
    place = [str(sweep), "--out", str(out)]
    assert main([*place, "--x", "sync.lag", "--hue", "algo.objective"]) == 0
    text = (out / "report.md").read_text()
    opening = text.split("## ")[1].splitlines()
    assert opening[0] == "Verdict"
    assert opening[2].startswith("By the return of the acting weights, of 6 settings compared with")
    assert "3 differ" in opening[2]
    assert "behaviour · sync.lag=16" in opening[2]
    assert opening[4].startswith("- Only the return of the acting weights was measured: no run was")
    assert opening[6] == "![response](figures/response.png)"
    assert text.count("with fewer than 10 seeds they are likely too narrow") == 1
    assert "\n| behaviour · sync.lag=1 | lower by less than the margin | -2." in text
    assert "\n| behaviour · sync.lag=16 | lower | -4" in text
    with (out / "data" / "response.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 9
    assert {row["sync.lag"] for row in rows} == {"0", "1", "16"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--x", "sync.lagg"], "--x is 'sync.lagg'; did you mean sync.lag?"),
        (["--x", "algo.clip"], "--x is 'algo.clip', of which all runs have the same value"),
        (["--x", "sync.lag", "--hue", "sync.lag"], "--hue sync.lag: sync.lag has a place already"),
        (["--hue", "sync.lag"], "--hue and --facet need --x"),
    ],
)
def test_an_option_that_cannot_be_drawn_is_refused_in_one_line(
    sweep, tmp_path, capsys, arguments, complaint
):
    assert main([str(sweep), "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_what_is_true_of_many_runs_is_said_once(tmp_path):
    for seed in range(30):
        make_run(tmp_path / "runs" / f"lost{seed}", seed=seed, state="failed", error="no memory")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count("no memory") == 1
    assert "and 25 more" in text


def test_a_verdict_counts_only_what_there_is(tmp_path):
    for lag in LAGS:
        for seed in range(1, 5):
            run = tmp_path / "runs" / f"{lag},{seed}"
            make_run(run, seed=seed, sync={"name": "a", "lag": lag})
    assert main([str(tmp_path / "runs"), "--x", "sync.lag", "--out", str(tmp_path / "out")]) == 0
    opening = (tmp_path / "out" / "report.md").read_text().splitlines()[4]
    assert "differ" not in opening
    assert opening.endswith("2 are identical to it in every pair.")
