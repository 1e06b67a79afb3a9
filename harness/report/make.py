"""Make a report: read the runs, compute, draw and write."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from harness.files import write_atomic
from harness.numbers import count
from harness.report import tables, verdict
from harness.report.comparisons import Margin
from harness.report.design import make_design
from harness.report.document import write
from harness.report.import_runs import import_all
from harness.report.pages import Document, to_html, to_markdown, to_text
from harness.report.runs import MARK, read_runs
from harness.report.scores import WANTED, Report, analyse
from harness.report.settings import arrange
from harness.report.text import show, show_progress

FIGURES, DATA = "figures", "data"
MOST_COLUMNS = 100  # of a paragraph on a terminal


def make(options: argparse.Namespace) -> bool:
    """Do it as the command line of `harness.report` says; whether a run is still running."""
    places = options.places
    if options.compare and len(places) < 2:
        raise ValueError(f"--compare got {len(places)} directory, expected 2 or more")
    if options.compare and options.baseline:
        raise ValueError("--compare takes no --baseline: the first directory is the baseline")
    if options.x is None and (options.hue or options.facet):
        raise ValueError("--hue and --facet need --x: the option on the x axis")
    out = options.out or (places or [_folder(options.imports[0])])[0] / "report"
    for folder in (out, out / FIGURES, out / DATA):
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link: name the folder to write to with --out")
    imported = import_all(options.imports, options.maps) if options.imports else []
    runs, records = read_runs(places, WANTED, imported)
    plan = arrange(runs, by_source=options.compare)
    report = analyse(
        plan,
        records,
        metric=options.metric,
        score=options.score,
        margin=Margin(options.margin, options.margin_points),
        design=make_design(plan, options.x, options.hue, options.facet) if options.x else None,
        baseline=options.baseline,
        target=options.target,
        by_source=options.compare,
        interaction=options.interaction,
    )
    del records  # the largest table, which nothing below needs
    title = options.title or "Report on " + ", ".join(runs["source"].unique())
    document = write(report, title)
    save(out, document, tables.files(report))
    show_progress("")
    done, running = ((runs["state"] == state).sum() for state in ("done", "running"))
    damaged = runs["problems"].map(bool).sum()
    show(for_terminal(report))
    show(f"\n{out / MARK}: {count(len(runs), 'run')}, {done} done, {damaged} with damaged files")
    return bool(running)


def results(place: Path) -> str:
    """The verdict on the runs in a directory, for a terminal; empty if there is none yet."""
    runs, records = read_runs([place], WANTED)
    report = analyse(arrange(runs), records)
    show_progress("")
    return for_terminal(report) if any(len(score.comparisons) for score in report.primary) else ""


def for_terminal(report: Report) -> str:
    """The verdict, its table and its interactions."""
    return to_text(verdict.brief(report), min(shutil.get_terminal_size().columns, MOST_COLUMNS))


def _folder(place: Path) -> Path:
    return place.parent if place.is_file() else place


def save(out: Path, document: Document, data: dict[str, str]) -> None:
    """Every file of the report; report.html comes first, as it marks the folder as a report."""
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    (out / DATA).mkdir(exist_ok=True)
    write_atomic(out / MARK, to_html(document))
    write_atomic(out / "report.md", to_markdown(document, figures=FIGURES))
    for picture in document.pictures():
        write_atomic(out / FIGURES / f"{picture.slug}.png", picture.png)
        write_atomic(out / FIGURES / f"{picture.slug}.svg", picture.svg)
    for name, content in data.items():
        write_atomic(out / DATA / name, content)
