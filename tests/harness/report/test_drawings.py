"""What figures draw, as text: every line, area, name and size, beside those that were looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection, LineCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D

from harness.report import drawing, figures
from harness.report.comparisons import Margin
from harness.report.design import make_design
from harness.report.runs import read_runs
from harness.report.scores import WANTED, analyse
from harness.report.settings import arrange
from tests.harness.report.synthetic import make_run
from tests.harness.report.test_scores import change

GOLDEN = Path(__file__).with_name("golden") / "figures.txt"


def numbers(values: object) -> str:
    return " ".join(f"{value:.4g}" for value in np.ravel(np.asarray(values, float)))


def look(line: Line2D) -> str:
    parts = [line.get_color(), line.get_linestyle(), line.get_drawstyle(), line.get_marker()]
    parts += [line.get_fillstyle(), f"alpha={line.get_alpha()}", f"width={line.get_linewidth():g}"]
    return " ".join([*map(str, parts), f"marker={line.get_markersize():g}"])


def described(figure: Figure) -> Iterator[str]:
    yield f"  size {numbers(figure.get_size_inches())}, y {figure.get_supylabel()!r}"
    yield from (line for legend in figure.legends for line in of_legend(legend))
    for axes in figure.axes:
        yield from of_panel(axes)


def of_legend(legend: Legend) -> Iterator[str]:
    at = f"loc {legend._loc} columns {legend._ncols}"  # type: ignore[attr-defined]
    yield f"  legend {legend.get_title().get_text()!r} {at}"
    for handle, text in zip(legend.get_lines(), legend.get_texts(), strict=True):
        yield f"    {text.get_text()!r}: {look(handle)}"


def of_panel(axes: Axes) -> Iterator[str]:
    yield f"  panel {axes.get_title(loc='left')!r}, axes {axes.axison}"
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        ticks = axis.get_majorticklabels()
        labels = [tick.get_text() for tick in ticks]
        turned = f"{ticks[0].get_rotation():g}" if ticks else ""
        limits = numbers(axis.get_view_interval())
        yield f"    {name} {axis.get_label_text()!r} from {limits}: {labels} {turned}"
    for line in axes.lines:
        xs, ys = line.get_xdata(), line.get_ydata()
        data = f"{numbers(xs)} | {numbers(ys)}" if len(xs) < 5 else f"{len(xs)} points"
        yield f"    line {data}, sums {numbers([np.sum(xs), np.sum(ys)])}: {look(line)}"
    for area in axes.collections:
        yield f"    {of_area(area)}"
    for patch in axes.patches:
        extent = numbers(patch.get_bbox().bounds)
        yield f"    rectangle {extent}: {patch.get_facecolor()} {patch.get_linewidth():g}"
    if legend := axes.get_legend():
        yield from of_legend(legend)


def of_area(area: Collection) -> str:
    if isinstance(area, LineCollection):
        return f"bars {numbers(area.get_segments())}: {numbers(area.get_linewidth())}"
    (path,) = area.get_paths()
    rest = f"{numbers(area.get_facecolor())} {numbers(area.get_linewidth())}"
    return f"area of {len(path.vertices)}, sums {numbers(path.vertices.sum(axis=0))}: {rest}"


def drawn(name: str, figure: Figure | None) -> Iterator[str]:
    yield name
    yield from ["  nothing"] if figure is None else described(figure)


def of_tasks(root: Path) -> Iterator[str]:
    """Settings beside each other, each with three returns."""
    for task, levels in {"Acrobot-v1": (70, 40), "CartPole-v1": (100, 60)}.items():
        for scheme, level in zip(("hogwild", "shared_mem"), levels, strict=True):
            for seed in (1, 2, 3):
                name = f"{task},{scheme},{seed}"
                run = {"scheme": scheme, "seed": seed, "level": level, "env": {"id": task}}
                speeds = {"fps": 900.0 + level * seed, "policy/lag_mean": seed / level}
                change(make_run(root / name, evaluated=True, **run), **speeds)
    runs, records = read_runs([root], WANTED)
    report = analyse(arrange(runs), records, baseline="shared_mem", target=55.0)
    task = report.plan.tasks[1]
    yield from drawn("scores of two tasks", figures.scores(report))
    yield from drawn("seconds", figures.curves(report, task, "seconds"))
    yield from drawn("throughput", figures.throughput(report, task))
    with matplotlib.rc_context({"figure.figsize": (drawing.WIDTHS["narrow"],) * 2}):
        yield from drawn("seconds, narrow", figures.curves(report, task, "seconds"))
    runs, records = read_runs(sorted(root.glob("*v1,hogwild,1")), WANTED)
    report = analyse(arrange(runs), records)
    yield from drawn("three returns of one setting", figures.returns(report, task))


def of_factors(root: Path) -> Iterator[str]:
    """Two factors, each on the x axis once."""
    for objective, cost in {"behaviour": 3.0, "decoupled": 1.0, "importance-weighted": 2.0}.items():
        for lag in (0, 1, 16):
            for seed in (1, 2):
                algo = {"name": "ppo", "objective": objective}
                options = {"algo": algo, "sync": {"name": "shared_mem", "lag": lag}}
                level = 100 + seed - cost * lag
                run = make_run(
                    root / f"{objective},{lag},{seed}", seed=seed, level=level, **options
                )
                change(run, gradient_steps=8.0 + lag, updates=2.0)
    runs, records = read_runs([root], WANTED)
    plan = arrange(runs)
    task = plan.tasks[0]
    by_lag = make_design(plan, "sync.lag", "algo.objective", None)
    report = analyse(plan, records, design=by_lag, baseline="lag=0", margin=Margin(points=7.0))
    yield from drawn("response to the lag", figures.response(report))
    yield from drawn("throughput by lag", figures.throughput(report, task))
    by_objective = make_design(plan, "algo.objective", None, "sync.lag")
    report = analyse(plan, records, design=by_objective)
    yield from drawn("response to the objective", figures.response(report))
    with matplotlib.rc_context({"figure.figsize": (drawing.WIDTHS["narrow"],) * 2}):
        yield from drawn("scores, narrow", figures.scores(report))


def test_every_line_and_size_is_that_of_the_figures_that_were_looked_at(tmp_path):
    """If a change is meant, copy figures.txt, which the error names, to golden/figures.txt."""
    lines = [*of_tasks(tmp_path / "tasks"), *of_factors(tmp_path / "factors")]
    found = tmp_path / "figures.txt"
    found.write_text("".join(f"{line}\n" for line in lines))
    assert found.read_text() == GOLDEN.read_text(), found
