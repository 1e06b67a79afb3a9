"""Make a report: read the runs, compute, draw and write."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.files import write_atomic
from harness.logging.wandb_report import Upload, upload
from harness.report import tables
from harness.report.comparisons import Margin
from harness.report.design import make_design
from harness.report.document import write
from harness.report.findings import WANTED, Findings, analyse, primary, respond
from harness.report.import_runs import import_all
from harness.report.pages import Document, to_html, to_markdown
from harness.report.progress import show_progress
from harness.report.read_runs import Run, find_runs
from harness.report.runs import MARK
from harness.report.settings import arrange
from harness.report.text import count

FIGURES, DATA = "figures", "data"


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
    runs = find_runs(places, {*WANTED, options.metric} - {None}, imported)
    plan = arrange(runs, by_source=options.compare)
    design = make_design(plan, options.x, options.hue, options.facet) if options.x else None
    found = analyse(
        plan,
        metric=options.metric,
        score=options.score,
        margin=Margin(options.margin, options.margin_points),
        design=design,
        baseline=options.baseline,
        target=options.target,
        by_source=options.compare,
        interaction=options.interaction,
    )
    title = options.title or "Report on " + ", ".join(dict.fromkeys(run.source for run in runs))
    cells = respond(design, primary(found)) if design else []
    document = write(plan, found, runs, title, cells)
    save(out, document, tables.files(found, runs, cells))
    show_progress("")
    done = sum(run.is_done for run in runs)
    damaged = sum(bool(run.problems) for run in runs)
    print(f"{out / MARK}: {count(len(runs), 'run')}, {done} done, {damaged} with damaged files")
    running = any(run.state == "running" for run in runs)
    if options.wandb and not (running and options.watch):
        given = to_upload(out, document, found, runs)
        upload(given, out, mode=options.wandb, project=options.project)
    return running


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


def to_upload(
    out: Path, document: Document, found: Sequence[Findings], runs: Sequence[Run]
) -> Upload:
    """What W&B gets: figures, the table of results, and each setting's score as a number."""
    columns, *rows = tables.results(found)
    sweeps = [run.manifest.get("sweep") for run in runs]
    return Upload(
        name=document.title,
        group=next((sweep for sweep in sweeps if isinstance(sweep, str)), None),
        numbers={
            f"{f'{f.task.name}/' if len(found) > 1 else ''}{result.label}/{f.score}": iqm.value
            for f in found
            for result in f.results
            if (iqm := result.estimates.get("iqm")) is not None
        },
        figures={picture.slug: picture.png for picture in document.pictures()},
        columns=[str(column) for column in columns],
        rows=rows,
        page=out / MARK,
    )
