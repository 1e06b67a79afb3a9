"""Figures of many settings stay small and can be read; one for dark pages is the same drawing."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from harness.report import drawing, figures
from harness.report.scores import Report
from tests.harness.report.synthetic import make_run, make_sweep
from tests.harness.report.test_factors import study
from tests.harness.report.test_scores import report

MANY = drawing.MOST_LOOKS + 3
TASK = "ppo on CartPole-v1"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Settings a00, a01, ... of which each scores more than the one before."""
    root = tmp_path_factory.mktemp("many")
    schemes = {f"a{place:02d}": 10.0 * place for place in range(MANY)}
    return report(make_sweep(root, schemes=schemes, seeds=range(2)), baseline="a01")


def test_many_settings_share_one_panel_and_bands_do_not_cover_their_curves(many):
    (axes,) = figures.curves(many, TASK, "frames").axes
    assert (len(axes.lines), len(axes.collections)) == (MANY, 0)


def test_of_many_settings_the_baseline_and_the_best_are_told_apart(many):
    (legend,) = figures.curves(many, TASK, "frames").legends
    told = [text.get_text() for text in legend.get_texts()]
    best = [f"a{place:02d}" for place in range(MANY - drawing.MOST_LOOKS + 1, MANY)]
    assert told == ["a01", *best, "3 others"]
    drawn = drawing.looks(many, many.final(TASK))
    assert len({(drawn[label]["color"], drawn[label]["linestyle"]) for label in told[:-1]}) == 12
    assert drawn["a00"]["color"] == drawing.GREY["color"]


def test_no_marker_of_throughput_is_cut_off(many, monkeypatch):
    runs = many.plan.runs
    speeds = {"summary.policy/lag_mean": 4.0, "summary.fps": np.linspace(20e3, 24e3, len(runs))}
    monkeypatch.setattr(many.plan, "runs", runs.assign(**speeds))
    figure = figures.throughput(many, TASK)
    (axes,) = figure.axes
    FigureCanvasAgg(figure).draw()
    for line in axes.lines:
        highest = axes.transData.transform(line.get_xydata())[:, 1].max()
        assert highest + 0.75 * line.get_markersize() * figure.dpi / 72 < axes.bbox.y1


def test_the_figure_for_a_dark_page_has_its_colours_and_no_others(many):
    found = drawing.draw(partial(figures.curves, many, TASK, "frames"), slug="", caption="")
    for light, dark in zip(*drawing.INKS.values(), strict=True):
        assert light in found.svg
        assert light not in found.svg_dark
        assert found.svg_dark.count(dark) == found.svg.count(light)


def test_lines_over_numbers_stand_where_their_numbers_are(tmp_path):
    for lag in (0, 8):
        for epochs in (1, 4, 16):
            for seed in (1, 2):
                options = {
                    "sync": {"name": "a", "lag": lag},
                    "algo": {"name": "ppo", "epochs": epochs},
                }
                make_run(tmp_path / f"{lag}-{epochs}-{seed}", seed=seed, **options)
    found, _ = study(tmp_path, hue="algo.epochs")
    (axes,) = figures.response(found).axes
    for container in axes.containers:
        for x, lag in zip(container.lines[0].get_xdata(), (0, 8), strict=True):
            assert abs(x - lag) <= 0.005 * 8  # half a percent of the axis to each side


def test_a_figure_for_phones_has_one_column_and_no_wider_drawing(tmp_path, many):
    found = drawing.draw(partial(figures.curves, many, TASK, "frames"), slug="", caption="")
    wide, narrow = (
        float(re.search(r'width="([\d.]+)pt"', svg).group(1)) for svg in (found.svg, found.narrow)
    )
    assert wide == pytest.approx(72 * drawing.WIDTHS["wide"])
    assert narrow == pytest.approx(72 * drawing.WIDTHS["narrow"])
    assert drawing.dark(found.narrow) == found.narrow_dark


def test_everything_in_a_picture_is_inside_it(many):
    figures_drawn = []

    def plot():
        figures_drawn.append(figures.scores(many))
        return figures_drawn[-1]

    drawing.draw(plot, slug="", caption="")
    for figure in figures_drawn:
        for axes in figure.axes:
            outline, page = axes.get_tightbbox(), figure.bbox
            assert outline.x0 >= page.x0
            assert outline.y0 >= page.y0
            assert outline.x1 <= page.x1
            assert outline.y1 <= page.y1
