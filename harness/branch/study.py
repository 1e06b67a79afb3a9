"""All branches of a run that one command makes, and how they are made.

<out>/branches.json                     whose branches these are
<out>/parent/                           the parent, done again up to the last moment
<out>/moments/40/                       its state after update 40
<out>/update-40/<arm>/<repeat>/         a branch, a run directory
<out>/report/
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.branch.jobs import Job, run_jobs
from harness.branch.moments import (
    MOMENTS,
    check_moments,
    how_it_ended,
    moments_plan,
    saved_moment,
    stored_moments,
    way_to,
)
from harness.branch.options import branch_options, calibrated, check_learner, with_seed
from harness.config.plan import RunPlan
from harness.config.stored import trusted_options
from harness.errors import ConfigError
from harness.files import one_line, read_json, write_json
from harness.numbers import plural, readable
from harness.reproduce import compare, is_recorded
from harness.run.branch_start import Branch, seed_of, share_file
from harness.run_directory import RunDir, return_of

FAILED = 1
CONTROL = "control"
STUDY = "branches.json"
PARTS = ("collect", "train", "sync", "log", "evaluate")  # of the time of the learner's loop


@dataclass(frozen=True)
class Arm:
    """What the branches of one arm change: values by option, none in the control."""

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """Branches of one run: its options, the arms, and where all of it lies."""

    parent: Path
    directory: Path
    stored: Mapping[str, Any]  # the parent's options
    collector: Mapping[str, Any] | None  # the options of another collector, for all branches
    arms: Sequence[Arm]

    @property
    def again(self) -> Path:
        """The parent, done again up to the last moment."""
        return self.directory / "parent"

    def place(self, update: int, arm: Arm, repeat: int) -> Path:
        """The run directory of a branch."""
        return self.directory / f"update-{update}" / arm.name / f"{repeat}"

    @property
    def moments(self) -> Path:
        """The states of the parent, by update."""
        return self.directory / MOMENTS

    def branches(self) -> list[Path]:
        """The run directories of all branches that there are."""
        files = self.directory.glob("update-*/*/*/manifest.json")
        return sorted(file.parent for file in files)

    def plan(self, start: Path, update: int, arm: Arm, repeat: int) -> RunPlan:
        """The plan of one branch; `ConfigError` if its options cannot be."""
        seed = seed_of(int(self.stored["seed"]), update, repeat)
        config, options = with_seed(branch_options(self.stored, self.collector, arm.values), seed)
        origin = {
            "parent": str(self.parent.absolute()),
            "parent_id": RunDir(self.parent).read_id(),
            "update": update,
            "arm": arm.name,
            "changes": dict(arm.values),
            "repeat": repeat,
        }
        return RunPlan(
            config=config,
            options=options,
            directory=self.place(update, arm, repeat),
            overrides=[],
            skip_done=True,
            sweep=self.directory.name,
            branch=Branch(start, origin),
        )


def trusted(options: argparse.Namespace) -> dict[str, Any]:
    """The parent's options, if a person has named all that they would import."""
    return trusted_options(options.run_dir, import_env=options.import_env, plugins=options.plugin)


def open_study(
    options: argparse.Namespace, stored: Mapping[str, Any], arms: Sequence[Arm], command: str
) -> Study:
    """The study of a command line, with the control as the first arm."""
    return Study(
        options.run_dir,
        options.out or default_directory(command),
        stored,
        other_collector(options.run_dir, stored, real=options.real_workers),
        (Arm(CONTROL, {}), *arms),
    )


def way_for(options: argparse.Namespace, study: Study, at: Sequence[int]) -> RunPlan | None:
    """The plan that leads to the moments, None if only checkpoints do.

    `ConfigError` for whatever cannot be; after this something is written.
    """
    way = way_to(study.parent, import_env=options.import_env, plugins=options.plugin)
    check_moments(study.parent, at)
    control, *configs = [study.plan(Path(), at[0], arm, 1).config for arm in study.arms]
    for arm, config in zip(study.arms[1:], configs, strict=True):
        if config.algo != control.algo:
            check_learner(arm.name, config, control)
    note_study(study)
    return way


def default_directory(command: str) -> Path:
    """A new directory below outputs/."""
    now = datetime.now()
    return Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-{command}"


def note_study(study: Study) -> None:
    """Write down whose branches these are. `ConfigError` if there are those of another run."""
    file = study.directory / STUDY
    parent = {"parent": str(study.parent.absolute()), "parent_id": RunDir(study.parent).read_id()}
    noted = read_json(file)
    if noted and noted.get("parent_id") != parent["parent_id"]:
        raise ConfigError(
            f"--out {study.directory} has branches of {one_line(noted.get('parent'))}; "
            "name another directory"
        )
    study.directory.mkdir(parents=True, exist_ok=True)
    write_json(file, parent)


def other_collector(
    parent: Path, stored: Mapping[str, Any], *, real: bool
) -> dict[str, Any] | None:
    """The options of the branches' collector where it is another than the parent's."""
    collector = stored.get("collector")
    name = collector.get("name") if isinstance(collector, Mapping) else None
    if real and name != "multi_async":
        raise ConfigError(
            f"--real-workers: the parent has collector={name}; its branches have the same"
        )
    if name != "multi_async" or real:
        return None
    return calibrated(parent, stored)


def moments(study: Study, way: RunPlan | None, at: Sequence[int]) -> dict[int, Path]:
    """The folder of the saved state by update; the parent is done again if one is missing."""
    if way is None:
        for update, file in stored_moments(study.parent, at).items():
            if saved_moment(study.moments, update) is None:
                folder = study.moments / f"{update}"
                folder.mkdir(parents=True)
                share_file(file, folder)
        return saved_moments(study, at)
    missing = [update for update in at if saved_moment(study.moments, update) is None]
    if missing:
        print(f"repeating {study.parent} up to update {missing[-1]}", flush=True)
        output = study.directory / ".output" / "parent.txt"
        plan = moments_plan(way, study.again, study.moments, missing)
        for ended in run_jobs([Job(plan, output)], 1):
            if ended.status > 128:
                raise KeyboardInterrupt
        check_again(study)
    return saved_moments(study, at)


def saved_moments(study: Study, at: Sequence[int]) -> dict[int, Path]:
    """The folders of all states; `ConfigError` if the repetition did not come so far."""
    starts = {}
    for update in at:
        folder = saved_moment(study.moments, update)
        if folder is None:
            why = how_it_ended(study.again, study.directory / ".output" / "parent.txt")
            raise ConfigError(f"--at {update}: the repetition did not reach this update: {why}")
        starts[update] = folder
    return starts


def check_again(study: Study) -> None:
    """Say so if the repetition is not the parent to the bit."""
    if not (study.again / "metrics.jsonl").is_file():
        return
    difference, _ = compare(
        study.parent, study.again, replayed=is_recorded(study.parent), whole=False
    )
    if difference is not None:
        print(
            "warning: the branches go on from a repetition that differs from the parent, first at "
            f"{one_line(difference)}"
        )


def run_branches(
    study: Study, way: RunPlan | None, at: Sequence[int], repeats: int, parallel: int
) -> int:
    """Do all branches from these moments; the exit status."""
    starts = moments(study, way, at)
    jobs = []
    for repeat in range(1, repeats + 1):
        for update, start in starts.items():
            for arm in study.arms:
                plan = study.plan(start, update, arm, repeat)
                output = study.directory / ".output" / f"{update}-{arm.name}-{repeat}.txt"
                if not plan.is_skipped:
                    jobs.append(Job(plan, output))
    print(f"{len(jobs)} {plural(len(jobs), 'branch', 'branches')} in {study.directory}", flush=True)
    failures, times = 0, []
    with closing(run_jobs(jobs, parallel)) as ended:
        for number, (job, status, seconds) in enumerate(ended, 1):
            if status:
                failures += 1
                result = f"failed: {how_it_ended(job.plan.directory, job.output)}"
            else:
                summary = read_json(job.plan.directory / "summary.json")
                times.append((seconds, seconds_in_loop(job.plan.directory)))
                result = f"return {readable(return_of(summary), 4)}"
            origin = job.plan.branch.origin  # type: ignore[union-attr]
            name = f"update {origin['update']}, {origin['arm']}, repeat {origin['repeat']}"
            print(f"[{number}/{len(jobs)}] {name}: {result}", flush=True)
            if status and (lack := lack_of_room(study, starts.values())):
                print(f"stopped: {lack}; the same command with --out {study.directory} continues")
                break
    if times:
        whole, loop = (sum(one) for one in zip(*times, strict=True))
        print(
            f"a branch took {whole / len(times):.1f} s, of which its start and its end are "
            f"{1 - loop / whole:.0%}"
        )
    return FAILED if failures else 0


def seconds_in_loop(directory: Path) -> float:
    """Of a branch's own records: its summary has those of its parent, too."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return sum(record.get(f"time/{part}_s", 0.0) for record in records for part in PARTS)


def lack_of_room(study: Study, starts: Iterable[Path]) -> str:
    """In words, if the disk has no room for another branch: its last state, and its records."""
    room = 2 * max(file.stat().st_size for start in starts for file in start.iterdir())
    free = shutil.disk_usage(study.directory).free
    if free >= room:
        return ""
    return (
        f"{free // 1000} KB are left on the disk of {study.directory}, and a branch needs "
        f"{room // 1000}"
    )


def write_report(study: Study) -> None:
    """Write the report, and print its tables."""
    # They take time to import.
    from harness.branch.report import brief, document, read_results
    from harness.report.make import save
    from harness.report.pages import to_text
    from harness.report.runs import MARK
    from harness.report.text import show, show_progress

    results = read_results(study.parent, study.branches())
    if not results.done:
        return
    out = study.directory / "report"
    show(f"\n{to_text(brief(results), shutil.get_terminal_size().columns)}\n")
    save(out, document(results, f"Branches of {study.parent.name}"), {})
    show_progress("")
    show(f"{out / MARK}")
