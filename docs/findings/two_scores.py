"""The two scores of the stored studies beside each other, with the randomness of the policy.

    .venv/bin/python docs/findings/two_scores.py outputs/objectives_at_lag --x sync.lag \
        --hue algo.objective [--where algo.objective=behaviour,decoupled] [--figure FILE]

Acting: the mean over training of the acting weights' return. It mixes what was learned with the age
of the weights and the randomness of the policy. Last: the last policy's return in evaluation, where
it takes its most probable actions. Entropy: that of the learner's policy, the mean over training.
Brackets hold Student's 95 % interval over seeds. With five or more lines, Spearman's rank
correlation over the lines says, at each x, whether the two scores have the same order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import spearmanr

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.report.drawing import Key, draw, line_look, panels  # noqa: E402
from harness.report.runs import read_runs  # noqa: E402
from harness.report.scores import TRAINED, mean_return  # noqa: E402
from harness.report.statistics import student  # noqa: E402

ENTROPY, EVALUATED = "train/entropy", "summary.eval/return"
ACTING, LAST = "acting weights, over training", "last policy, greedy"
FEWEST = 5  # lines whose order is worth a correlation


def read_scores(sweep: Path, x: str, hue: str, wanted: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Of each finished run: its place, its seed, both scores and the mean entropy.

    wanted: for some options, the values of the runs that are kept.
    """
    runs, records = read_runs([sweep], (TRAINED, ENTROPY))
    options = runs["options"]
    kept = (runs["state"] == "done") & pd.Series(
        [all(value_of(one, name) in values for name, values in wanted.items()) for one in options],
        index=runs.index,
    )
    if not kept.any():
        values = " and ".join(f"{name}={','.join(several)}" for name, several in wanted.items())
        raise ValueError(f"{sweep}: no finished run has {values or 'a score'}")
    if EVALUATED not in runs:
        raise ValueError(f"{sweep}: no run has eval/return in its summary.json")
    parts = dict(list(records.groupby("run")))
    rows = [
        {
            "x": value_of(options[run], x),
            "hue": value_of(options[run], hue),
            "seed": int(runs.loc[run, "seed"]),
            ACTING: mean_return(parts[run]),
            LAST: float(runs.loc[run, EVALUATED]),
            "entropy": float(parts[run].get(ENTROPY, pd.Series(dtype=float)).mean()),
        }
        for run in runs.index[kept]
    ]
    return pd.DataFrame(rows)


def value_of(options: Mapping[str, object], names: str) -> str:
    """The values of one option, or of several with + between, as they are typed."""
    values = [options.get(name) for name in names.split("+")]
    return " · ".join("null" if value is None else str(value) for value in values)


def in_order(values: pd.Series) -> list[str]:
    """Numbers by size, then words."""
    return sorted(values.unique(), key=lambda text: (not is_number(text), number(text), text))


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def number(text: str) -> float:
    return float(text) if is_number(text) else 0.0


def short(value: float) -> str:
    """Three digits, or all that are before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def lines(scores: pd.DataFrame, x: str, hue: str) -> Iterator[str]:
    yield f"| {hue} | {x} | seeds | {ACTING} | {LAST} | entropy |"
    yield "|---|---|--:|--:|--:|--:|"
    for line in in_order(scores["hue"]):
        for place in in_order(scores["x"]):
            inside = scores[(scores["hue"] == line) & (scores["x"] == place)]
            if len(inside):
                cells = []
                for name in (ACTING, LAST):
                    value, low, high, _ = student(inside[name].to_numpy())
                    cells.append(f"{short(value)} [{short(low)}, {short(high)}]")
                cells.append(f"{inside['entropy'].mean():.2f}")
                yield f"| {line} | {place} | {len(inside)} | {' | '.join(cells)} |"
    if scores["hue"].nunique() < FEWEST:
        return
    yield ""
    yield f"| {x} | lines | acting with last | acting with entropy | last with entropy |"
    yield "|---|--:|--:|--:|--:|"
    for place in in_order(scores["x"]):
        means = scores[scores["x"] == place].groupby("hue")[[ACTING, LAST, "entropy"]].mean()
        pairs = ((ACTING, LAST), (ACTING, "entropy"), (LAST, "entropy"))
        ranks = [spearmanr(means[one], means[other]).statistic for one, other in pairs]
        yield f"| {place} | {len(means)} | {' | '.join(f'{rank:.2f}' for rank in ranks)} |"


def figure(
    tables: Mapping[str, pd.DataFrame], x: str, called: Mapping[str, str] | None = None
) -> Figure:
    """A row for each sweep: both scores over x, a line for each value of hue.

    called: the values of x in the order wanted, with other names; points are then not connected.
    """
    names = in_order(pd.concat(tables.values())["hue"])
    key: Key = [(name, line_look(place)) for place, name in enumerate(names)]
    titles = [f"{name}{what}" for name in tables for what in ("acting weights", LAST)]
    label = x.rsplit(".", 1)[-1].replace("_", " ")
    drawn, axes = panels(
        titles, 2.3, f"{label}, updates" if label == "lag" else label, "return", key, share=False
    )
    for row, scores in enumerate(tables.values()):
        places = list(called or in_order(scores["x"]))
        for axis, name in zip(axes[2 * row :], (ACTING, LAST), strict=False):
            for line, look in key:
                inside = scores[scores["hue"] == line]
                at = [place for place, text in enumerate(places) if (inside["x"] == text).any()]
                if not at:
                    continue
                estimates = [
                    student(inside.loc[inside["x"] == places[place], name].to_numpy())
                    for place in at
                ]
                values, lows, highs, _ = zip(*estimates, strict=True)
                if called:
                    ranges = [np.subtract(values, lows), np.subtract(highs, values)]
                    axis.errorbar(at, values, ranges, **{**look, "linestyle": ""}, markersize=4)
                else:
                    axis.plot(at, values, **look, markersize=4)
                    shade: Any = {"color": look["color"], "alpha": 0.13, "linewidth": 0}
                    axis.fill_between(at, lows, highs, **shade)
            if called:
                axis.set_xticks(range(len(places)), list(called.values()), fontsize=8)
                axis.set_xlabel("")
            else:
                axis.set_xticks(range(len(places)), places)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sweeps", nargs="+", metavar="[NAME=]SWEEP", help="directories of sweeps")
    parser.add_argument("--x", required=True, metavar="OPTION", help="what the scores are over")
    parser.add_argument("--hue", required=True, metavar="OPTION", help="a line for each value")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="OPTION=VALUE,…",
        help="runs with other values of this option are left out",
    )
    parser.add_argument("--figure", type=Path, metavar="FILE", help="a PNG of all sweeps")
    parser.add_argument(
        "--call",
        action="append",
        default=[],
        metavar="VALUE=NAME",
        help="what the figure calls a value of x; in the order in which it shows them",
    )
    arguments = parser.parse_args()
    pairs = (text.partition("=") for text in arguments.where)
    wanted = {name: values.split(",") for name, _, values in pairs}
    tables: dict[str, pd.DataFrame] = {}
    for text in arguments.sweeps:
        name, sign, place = text.partition("=")
        sweep = Path(place if sign else name)
        try:
            scores = read_scores(sweep, arguments.x, arguments.hue, wanted)
        except ValueError as error:
            parser.error(str(error))
        tables[f"{name}: " if sign else ""] = scores
        print(f"{sweep}\n", *lines(scores, arguments.x, arguments.hue), "", sep="\n")
    if arguments.figure:
        called = dict(text.rsplit("=", 1) for text in arguments.call)
        called = {value: name.replace("\\n", "\n") for value, name in called.items()}
        picture = draw(lambda: figure(tables, arguments.x, called), "two scores", "")
        assert picture is not None
        arguments.figure.write_bytes(picture.png)


if __name__ == "__main__":
    main()
