"""What a report says, section by section."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from harness.analysis.statistics import Estimate, caution
from harness.metrics import PHASES
from harness.report import figures
from harness.report.analysis import LAGS, LATENCIES, Findings, Result
from harness.report.blocks import Block, Bullets, Code, Document, Picture, Section, Table, Text
from harness.report.read import Run
from harness.report.settings import Plan
from harness.report.totals import totals

NONE = "–"
MOST_TOLD = 200  # characters of an error
WORDS = {"publish": "publish", "ack": "acknowledge", "apply": "apply"}


def number(value: float, digits: int = 4) -> str:
    """A number as a reader wants it."""
    if not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.{digits}g}"


def with_interval(found: Estimate | None) -> str:
    """A value and, where there is one, its interval."""
    if found is None or not math.isfinite(found.value):
        return NONE
    if not found.has_interval:
        return number(found.value)
    return f"{number(found.value)} [{number(found.low)}, {number(found.high)}]"


def write(
    plan: Plan,
    found: Sequence[Findings],
    runs: Sequence[Run],
    title: str,
    progress: Callable[[str], None],
) -> Document:
    """Compose the report; the figures are drawn here, which takes most of its time."""
    sections = [Section("What was run", list(_what_was_run(plan, found, runs)))]
    for place, findings in enumerate(found):
        suffix = f"-{place + 1}" if len(found) > 1 else ""
        about = f" ({findings.task.name})" if len(found) > 1 else ""
        progress(f"drawing the figures of {findings.task.name}")
        for name, blocks in (
            ("Results", list(_results(findings, suffix))),
            ("Learning", list(_learning(findings, suffix))),
            ("Synchronisation", list(_sync(findings, suffix))),
            ("Throughput and time", list(_time(findings, suffix))),
        ):
            if blocks:
                sections.append(Section(name + about, blocks))
    if together := list(_together(found)):
        sections.append(Section("All tasks together", together))
    sections.append(Section("Failures and damage", list(_failures(plan, runs))))
    sections.append(Section("Provenance", list(_provenance(runs))))
    return Document(title, sections)


def _what_was_run(plan: Plan, found: Sequence[Findings], runs: Sequence[Run]) -> Iterator[Block]:
    states: dict[str, int] = {}
    for run in runs:
        states[run.state] = states.get(run.state, 0) + 1
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield Text(f"{_runs(len(runs))}: {counted}. Only finished ones enter the numbers below.")
    if plan.notes:
        yield Bullets(plan.notes)
    if plan.differing:
        only = " of one task" * (len(found) > 1)
        yield Text(f"The options in which runs{only} differ; all others are the same.")
        rows = [[key, _told(", ".join(values))] for key, values in plan.differing.items()]
        yield Table(["option", "values"], rows, numbers=False)
    shared = ("algo.name", "env.id", "total_frames", "collector.name", "sync.name")
    same = [[key, plan.common[key]] for key in shared if key in plan.common]
    if same:
        yield Text("And what most readers will ask of those that are the same:")
        yield Table(["option", "value"], same, numbers=False)
    for findings in found:
        columns = ["setting", "seeds done", "of"]
        rows = [
            [setting.label, _seeds(setting.done), str(len(setting.runs))]
            for setting in findings.task.settings
        ]
        yield Text(f"Settings of {findings.task.name}, each with the seeds that finished:")
        yield Table(columns, rows, numbers=False)


def _seeds(done: dict[int, Run]) -> str:
    return ", ".join(str(seed) for seed in sorted(done)) or NONE


def _results(findings: Findings, suffix: str) -> Iterator[Block]:
    scored = [result for result in findings.results if result.scores]
    if not scored:
        yield Text(f"No finished run has a final {findings.score}: there is nothing to compare.")
        return
    target = findings.target
    yield Text(
        f"{findings.score} at the end of each run; the unit of replication is the seed. IQM is the "
        "mean without the lowest and the highest quarter of the seeds, in whole seeds. Brackets "
        "hold 95 % percentile intervals of a bootstrap over seeds (10,000 resamples)."
        + (f" The gap is the mean shortfall from the target, {target:g}." if target else "")
    )
    yield _scores(findings)
    if (others := len(findings.results) - figures.MOST_LOOKS) > 0:
        yield Text(
            f"Colours tell the best {figures.MOST_LOOKS} settings apart, the baseline among them; "
            f"the other {others} are grey in the figures. data/ has all of them."
        )
    cautions = [
        f"{result.label}: {said}"
        for result in findings.results
        if (said := caution(len(result.scores)))
    ]
    if cautions:
        yield Bullets(cautions)
    yield from _picture(
        figures.scores,
        findings,
        f"scores{suffix}",
        f"{findings.score}: a dot for each seed, below them the IQM and its interval"
        + ("; the dashed line is the target." if target is not None else "."),
    )
    yield from _comparisons(findings)
    yield from _picture(
        figures.profiles,
        findings,
        f"profiles{suffix}",
        "Performance profiles: the share of runs that score more. Higher is better; where lines "
        "cross, neither setting is better throughout.",
    )


def _scores(findings: Findings) -> Table:
    columns, names = ["setting", "seeds", "IQM", "mean", "median"], ["iqm", "mean", "median"]
    if findings.target is not None:
        columns, names = [*columns, "gap"], [*names, "gap"]
    rows = [
        [r.label, str(len(r.scores))] + [with_interval(r.estimates.get(n)) for n in names]
        for r in findings.results
    ]
    return Table(columns, rows)


def _comparisons(findings: Findings) -> Iterator[Block]:
    if not findings.comparisons:
        return
    against = f"with the baseline, {findings.baseline}" if findings.baseline else "across sweeps"
    yield Text(
        f"Compared {against}: runs are paired by seed. The difference comes with Student's 95 % "
        "interval for paired samples; p is corrected by Holm's method for the number of "
        f"comparisons in this table, {len(findings.comparisons)}, and below 0.05 it counts as a "
        "difference. P(better) is the probability that a run of the setting scores more than one "
        "of the baseline, ties counting half."
    )
    rows = [
        [
            comparison.name,
            str(comparison.difference.num_seeds),
            with_interval(comparison.difference),
            number(comparison.p, 2),
            number(comparison.p_adjusted, 2),
            with_interval(findings.improvements.get(comparison.name)),
        ]
        for comparison in findings.comparisons
    ]
    yield Table(["setting", "pairs", "difference", "p", "corrected p", "P(better)"], rows)
    yield Bullets([comparison.sentence() for comparison in findings.comparisons])


def _together(found: Sequence[Findings]) -> Iterator[Block]:
    counted = totals(found)
    if not counted:
        return
    yield Text(
        f"The probability that a run scores more than one of the baseline, {counted[0].baseline}, "
        f"in the same task: the mean over {len(found)} tasks, whose scores stay on scales of "
        "their own. Half means no difference. Runs are resampled within tasks."
    )
    rows = [[total.name, str(total.num_tasks), with_interval(total.better)] for total in counted]
    yield Table(["setting", "tasks", "P(better)"], rows)


def _learning(findings: Findings, suffix: str) -> Iterator[Block]:
    about = (
        f"{findings.curve}, the mean over seeds with a 95 % bootstrap band. Each point looks back "
        "on 5 % of the run; a line ends where the first of its runs ends."
    )
    yield from _picture(
        figures.curves_by_frames, findings, f"learning-frames{suffix}", f"By frames: {about}"
    )
    yield from _picture(
        figures.curves_by_seconds,
        findings,
        f"learning-seconds{suffix}",
        f"By wall time: {about} Start-up is left out.",
    )
    if findings.throughout is None:
        return
    yield Text(
        f"Who learned sooner: the mean of {findings.curve} over all frames of a run, which is the "
        "area below its curve divided by the curve's length. It tells apart what ends at one score."
    )
    yield _scores(findings.throughout)
    yield from _comparisons(findings.throughout)


def _sync(findings: Findings, suffix: str) -> Iterator[Block]:
    names = [f"sync/{name}_ms" for name in LATENCIES]
    timed = [r for r in findings.results if any(len(r.each(f"{n}_p50")) for n in names)]
    if timed:
        yield Text(
            "Milliseconds to publish (as long as the learner is held up), until a worker has "
            "acknowledged, and to apply: 50th / 95th / 99th percentile of each run, the median "
            "over seeds."
        )
        columns = ["setting", *WORDS.values(), "bytes a run"]
        rows = [
            [r.label, *(_percentiles(r, n) for n in names), number(r.middle("sync/bytes"))]
            for r in timed
        ]
        yield Table(columns, rows)
        yield from _picture(
            figures.latencies,
            findings,
            f"latencies{suffix}",
            "Distributions of sync latencies: the share of records, of all seeds together, whose "
            "mean is at most that many milliseconds.",
        )
    lagged = [r for r in findings.results if len(r.each(LAGS[0]))]
    if lagged:
        yield Text(
            "Lag: how many versions behind the newest the weights were that computed an action "
            "the learner trained on. Medians over seeds of each run's figures. Frames that lag "
            "more than max_lag are not learned from; frames whose worker died are dropped, and so "
            "are those that were on their way when the run ended."
        )
        columns = ["setting", "mean", "p95", "max", "frames not learned from", "frames dropped"]
        told = (*LAGS, "policy/dropped", "collector/dropped")
        rows = [[r.label, *(number(r.middle(name)) for name in told)] for r in lagged]
        yield Table(columns, rows)
        yield from _picture(
            figures.lags,
            findings,
            f"lags{suffix}",
            "Distribution of lag: the share of records, of all seeds together, whose frames lag "
            "at most so much on average.",
        )


def _percentiles(result: Result, name: str) -> str:
    values = [result.middle(f"{name}_{label}") for label in ("p50", "p95", "p99")]
    if not any(map(math.isfinite, values)):
        return NONE
    return " / ".join(number(value, 3) for value in values)


def _time(findings: Findings, suffix: str) -> Iterator[Block]:
    timed = [result for result in findings.results if len(result.each("fps"))]
    if not timed:
        return
    phases = (*PHASES, "other")
    yield Text(
        "Frames a second in the learner's loop, and where its time went in seconds for 1000 "
        "frames; medians over seeds. What no phase accounts for is called other."
    )
    rows = [
        [
            r.label,
            number(r.middle("fps")),
            number(r.middle("wall_s")),
            *(number(r.seconds_per_1000_frames(phase), 3) for phase in phases),
        ]
        for r in timed
    ]
    yield Table(["setting", "frames/s", "wall s", *phases], rows)
    yield from _picture(figures.times, findings, f"times{suffix}", "Where the learner's time went.")
    yield from _picture(
        figures.throughput,
        findings,
        f"throughput{suffix}",
        "Throughput against staleness: a dot for each run, a diamond for the medians of a "
        "setting. Fast and fresh is the upper left.",
    )


def _picture(plot: figures.Plot, findings: Findings, slug: str, caption: str) -> Iterator[Block]:
    labels = ", ".join(result.label for result in findings.results)
    drawn = figures.draw(plot, findings, slug=slug, caption=caption, alt=f"{caption} ({labels})")
    if drawn is not None:
        yield Picture(drawn)


def _failures(plan: Plan, runs: Sequence[Run]) -> Iterator[Block]:
    running = sum(run.state == "running" for run in runs)
    unfinished = [run for run in runs if not run.is_done and run.state != "running"]
    damaged = [run for run in runs if run.problems]
    if running:
        yield Text(
            f"Still running, and in no number above: {running} of {_runs(len(runs))}. Whether a "
            "run on another machine still lives cannot be seen from here."
        )
    elif not unfinished and not damaged:
        yield Text("None: every run finished, and every file could be read.")
    if unfinished:
        yield Text(
            f"Not finished, and in no number above: {len(unfinished)} of {_runs(len(runs))}. "
            "If what failed is not chance, the numbers flatter the settings it happened to."
        )
        rows = [
            [run.name, run.state, _reached(run), _told(run.error) or NONE] for run in unfinished
        ]
        yield Table(["run", "state", "frames", "error"], rows, numbers=False)
    if damaged:
        yield Text("Files that are missing or damaged; what could be read was used.")
        yield Table(
            ["run", "problems"],
            [[run.name, _told("; ".join(run.problems))] for run in damaged],
            numbers=False,
        )


def _reached(run: Run) -> str:
    return f"{run.steps[-1]:.0f}" if len(run.steps) else NONE


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"


def _told(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_TOLD else f"{line[:MOST_TOLD]}…"


def _provenance(runs: Sequence[Run]) -> Iterator[Block]:
    facts: dict[str, dict[str, int]] = {}
    for run in runs:
        for key, value in _facts(run):
            values = facts.setdefault(key, {})
            values[value] = values.get(value, 0) + 1
    if not facts:
        yield Text("No run has a readable manifest: where they come from is not known.")
        return
    rows = []
    for key, values in facts.items():
        said = [f"{v} ({_runs(n)})" if len(values) > 1 else v for v, n in sorted(values.items())]
        rows.append([key, "; ".join(said)])
    yield Table(["what", "value"], rows, numbers=False)
    mixed = [key for key, values in facts.items() if len(values) > 1]
    if mixed:
        yield Text(
            f"These runs differ in where they come from ({_told(', '.join(mixed))}): what looks "
            "like a setting's doing may be that."
        )
    changed = facts.get("changes on top", {})
    if any(value != "none" for value in changed):
        yield Text("The code was not exactly a commit; each run's manifest.json holds the diff.")
    commands = sorted({_command(run) for run in runs} - {""})
    if commands:
        yield Text("The commands that made these runs; given again, they make them anew:")
        yield Code("\n".join(commands))


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    manifest = run.manifest
    git, hardware, packages = (
        found if isinstance(found := manifest.get(key), dict) else {}
        for key in ("git", "hardware", "packages")
    )
    if git:
        yield "commit", _told(f"{git.get('sha')} on {git.get('branch')}")
        files = str(git.get("diff") or "").count("\ndiff --git ") + bool(git.get("diff"))
        yield "changes on top", f"{files} changed file{'s' * (files != 1)}" if files else "none"
    if manifest.get("python"):
        yield "python", _told(str(manifest["python"]))
    for name, version in packages.items():
        yield _told(str(name)), _told(str(version))
    for name, value in hardware.items():
        if value not in (None, [], ""):
            yield _told(str(name)), _told(str(value))


def _command(run: Run) -> str:
    command = run.manifest.get("command")
    text = command if isinstance(command, str) else ""
    return " ".join("".join(c if c.isprintable() else "�" for c in text).split())
