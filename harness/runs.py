"""The runs below a directory: a list for the terminal, and tables for Python.

    lockstep runs outputs/mine

In Python `read` gives the same runs as two tables, of runs and of their records.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pandas takes time to import, which the command's help does not need
    import pandas as pd

    from harness.report.runs import Tables

USAGE_ERROR = 2
RETURNS = ("eval/return", "episode/return")  # the first that a run has
UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def read(*places: str | Path) -> Tables:
    """The runs in these directories, and in those below them, as two DataFrames.

    runs       a row for each run: its name, state, seed, error, problems and frames; its options by
               their dotted names, as `sync.lag`; and the numbers of its summary, as
               `summary.eval/return`
    records    a row for each record: `run`, the index of its run; `step`, the frames so far; and
               all metrics, NaN where a record lacks one
    """
    import pandas as pd

    from harness.report.runs import Tables, read_runs

    runs, records = read_runs([Path(place) for place in places], None)
    first = ["name", "state", "seed", "error", "problems", "frames"]
    options = pd.DataFrame(list(runs["options"]), index=runs.index)
    options = options.drop(columns=first, errors="ignore")
    summaries = runs[[name for name in runs if name.startswith("summary.")]]
    return Tables(pd.concat([runs[first], options, summaries], axis=1), records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the list; returns the command's exit status."""
    options = parser().parse_args(arguments)
    from harness.report.pages import Table, to_text
    from harness.report.runs import read_runs
    from harness.report.text import show, show_progress

    try:
        runs, records = read_runs(options.places, RETURNS)
    except (ValueError, OSError) as error:
        show_progress("")
        print(f"runs: {error}", file=sys.stderr)
        return USAGE_ERROR
    show_progress("")
    rows = list(_rows(runs, records))
    table = Table(["run", "state", "frames", "return", "started"], rows)
    show(to_text([table], most_rows=None))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = argparse.ArgumentParser(
        prog="lockstep runs",
        description="List the runs below a directory: how each ended, how far it came, and its "
        "return: of the last evaluation, or of the episodes before.",
        epilog="Exit status: 0 listed; 2 there is no run.",
    )
    line.add_argument("places", nargs="+", type=Path, metavar="DIRECTORY")
    return line


def _rows(runs: pd.DataFrame, records: pd.DataFrame) -> Iterator[list[str]]:
    from harness.report.text import NONE, number

    last = records.groupby("run")[list(RETURNS)].last()
    for run, row in runs.iterrows():
        returns = [row.get(f"summary.{name}") for name in RETURNS]
        returns += [last.at[run, name] for name in RETURNS if run in last.index]
        value = next((each for each in returns if each is not None and each == each), None)
        yield [
            row["name"],
            row["state"],
            f"{row['frames']:,.0f}" if row["frames"] == row["frames"] else NONE,
            NONE if value is None else number(value),
            _age(row["manifest"].get("started")),
        ]


def _age(started: Any) -> str:
    """How long ago something started, in its largest unit."""
    try:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(started)).total_seconds()
    except (ValueError, TypeError):
        return "–"
    unit, size = next((pair for pair in UNITS if seconds >= pair[1]), UNITS[-1])
    return f"{max(seconds, 0) // size:.0f} {unit} ago"


if __name__ == "__main__":
    sys.exit(main())
