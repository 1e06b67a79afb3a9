"""Turn run directories into a report: numbers with their intervals, figures, what went wrong."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.files import write_atomic
from harness.logging.wandb_report import Upload, upload
from harness.report import data, html, markdown
from harness.report.analysis import WANTED, Findings, analyse
from harness.report.blocks import Document
from harness.report.document import write
from harness.report.read import MARK, Run, find_runs
from harness.report.settings import arrange

USAGE_ERROR = 2
INTERRUPTED = 130
FIGURES, DATA = "figures", "data"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    options = parser().parse_intermixed_args(arguments)
    out = options.out or options.places[0] / "report"
    try:
        while True:
            made = make(options, out)
            progress("")
            tell(made.runs, out)
            running = any(run.state == "running" for run in made.runs)
            if options.watch is None or not running:
                if options.wandb is not None:
                    upload(uploadable(made, out), out, mode=options.wandb, project=options.project)
                return 0
            time.sleep(options.watch)
    except (ValueError, OSError, RuntimeError) as error:
        progress("")
        print(f"report: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def tell(runs: Sequence[Run], out: Path) -> None:
    """One line about what was written."""
    done = sum(run.is_done for run in runs)
    troubled = sum(bool(run.problems) for run in runs)
    print(f"{out / MARK}: {len(runs)} runs, {done} done, {troubled} with damaged files")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m harness.report",
        description=__doc__,
        epilog="Writes report.html (one page that needs nothing else), report.md, figures/ and "
        "data/. Exit status: 0 written, 2 nothing to report on.",
    )
    found.add_argument("places", nargs="+", type=Path, metavar="dir", help="a sweep's or a run's")
    found.add_argument("--out", type=Path, help="where to write; <the first dir>/report")
    found.add_argument("--title", help="of the page; by default the names of the dirs")
    found.add_argument("--baseline", help="the setting that others are compared with, or a part")
    found.add_argument(
        "--metric", help="what summary.json calls the score; by default eval/return, if it is there"
    )
    found.add_argument(
        "--target", type=number, help="the score that counts as reached; by default gymnasium's"
    )
    found.add_argument(
        "--watch",
        type=seconds,
        metavar="S",
        help="make it anew every S seconds, as long as one of the runs is running",
    )
    found.add_argument(
        "--wandb",
        choices=("offline", "online"),
        help="hand the report to W&B, too: a run of its own in the sweep's group",
    )
    found.add_argument("--project", default="lockstep", help="of W&B; by default lockstep")
    found.add_argument(
        "--compare", action="store_true", help="put the dirs side by side, setting by setting"
    )
    return found


def number(text: str) -> float:
    """A finite number; argparse says so if it is none."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def seconds(text: str) -> float:
    """A number above zero; argparse says so if it is none."""
    value = number(text)
    if value <= 0:
        raise ValueError(text)
    return value


@dataclass
class Made:
    """A report, and what it was made of."""

    runs: list[Run]
    found: list[Findings]
    document: Document


def make(options: argparse.Namespace, out: Path) -> Made:
    """Read, compute, draw and write."""
    places = options.places
    if options.compare and len(places) < 2:
        raise ValueError(f"--compare got {len(places)} directory, expected 2 or more")
    if options.compare and options.baseline:
        raise ValueError("--compare takes no --baseline: the first directory is what others meet")
    for folder in (out, out / FIGURES, out / DATA):
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link: name the folder to write to with --out")
    wanted = {*WANTED, options.metric} - {None}
    runs = find_runs(places, wanted, progress)
    plan = arrange(runs, by_source=options.compare)
    found = analyse(
        plan,
        metric=options.metric,
        baseline=options.baseline,
        target=options.target,
        by_source=options.compare,
        progress=progress,
    )
    title = options.title or "Report on " + ", ".join(dict.fromkeys(run.source for run in runs))
    document = write(plan, found, runs, title, progress)
    save(out, document, data.files(found, runs))
    return Made(runs, found, document)


def uploadable(made: Made, out: Path) -> Upload:
    """What W&B gets: figures, the table of results, and each setting's score as a number."""
    columns, rows = data.results(made.found)
    several = len(made.found) > 1
    return Upload(
        name=made.document.title,
        group=next(
            (s for run in made.runs if isinstance(s := run.manifest.get("sweep"), str)), None
        ),
        numbers={
            f"{f'{f.task.name}/' if several else ''}{result.label}/{f.score}": estimate.value
            for f in made.found
            for result in f.results
            if (estimate := result.estimates.get("iqm")) is not None
        },
        figures={drawn.slug: drawn.png for drawn in made.document.pictures()},
        columns=columns,
        rows=rows,
        page=out / MARK,
    )


def save(out: Path, document: Document, tables: dict[str, str]) -> None:
    """Every file of the report. The page comes first: by it a folder is known to be a report."""
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    (out / DATA).mkdir(exist_ok=True)
    write_atomic(out / MARK, html.render(document))
    write_atomic(out / "report.md", markdown.render(document, figures=FIGURES))
    for drawn in document.pictures():
        write_atomic(out / FIGURES / f"{drawn.slug}.png", drawn.png)
        write_atomic(out / FIGURES / f"{drawn.slug}.svg", drawn.svg)
    for name, content in tables.items():
        write_atomic(out / DATA / name, content)


def progress(text: str) -> None:
    """Say what is being done: on one line of a terminal, and not at all elsewhere."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns - 1
        shown = "".join(c if c.isprintable() else "�" for c in text)[:columns]
        print(f"\r{shown:<{columns}}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
