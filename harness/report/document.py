"""What a report says, section by section."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from harness.files import one_line
from harness.metric_names import BUCKETS, PHASES
from harness.report import drawing, figures, verdict
from harness.report.findings import (
    EVALUATED,
    HEALTH,
    LAGS,
    LATENCIES,
    TEARING,
    TRAINED,
    UPDATE_LAGS,
    Cell,
    Findings,
    totals,
)
from harness.report.pages import Block, Code, Document, Table
from harness.report.read_runs import Run
from harness.report.settings import Plan
from harness.report.text import NONE, count, number, with_interval

MOST_TOLD = 200  # characters of an error
MOST_SENTENCES = 6  # comparisons of a table that are told in words, too
UNSET = ("null", "[]")  # values of an option that is not used
MOST_NAMES = 5  # runs of which one thing is said

Blocks = Iterator[Block | None]  # None is a figure that would show nothing


def write(
    plan: Plan,
    found: Sequence[Findings],
    runs: Sequence[Run],
    title: str,
    cells: Sequence[Cell] = (),
) -> Document:
    """Compose the report and draw its figures, which takes most of its time."""
    sections = {
        "Verdict": verdict.open_with(found, cells, plan.notes),
        "What was run": _what_was_run(plan, found, runs),
    }
    for place, findings in enumerate(found, 1):
        suffix, about = "", ""
        if len(found) > 1:
            suffix, about = f"-{place}", f" ({findings.task.name})"
        sections |= {
            f"Results{about}": _results(findings, suffix),
            f"Learning{about}": _learning(findings, suffix),
            f"Synchronisation{about}": _sync(findings),
            f"Health by lag{about}": _health(findings),
            f"Throughput and time{about}": _time(findings, suffix),
        }
    sections |= {
        "All tasks together": _together(found),
        "Failures and damage": _failures(runs),
        "Provenance": _provenance(runs),
    }
    written = {
        heading: [block for block in blocks if block is not None]
        for heading, blocks in sections.items()
    }
    return Document(title, {heading: blocks for heading, blocks in written.items() if blocks})


def _told(text: object) -> str:
    return one_line(text, MOST_TOLD)


def _what_was_run(plan: Plan, found: Sequence[Findings], runs: Sequence[Run]) -> Blocks:
    states = Counter(run.state for run in runs)
    counted = ", ".join(f"{n} {state}" for state, n in sorted(states.items()))
    yield f"{count(len(runs), 'run')}: {counted}. Only finished ones enter the numbers below."
    if plan.differing:
        only = " of one task" if len(found) > 1 else ""
        besides = ", or follow from the choice of a part" if plan.implied else ""
        yield f"The options in which runs{only} differ; all others are the same{besides}."
        rows = [
            [key, _told(", ".join(values))]
            for key, values in plan.differing.items()
            if key not in plan.implied
        ]
        yield Table(["option", "values"], rows)
    kwargs = [key for key in plan.common if key.startswith("env.kwargs.")]
    shared = ("algo.name", "env.id", "env.wrappers", "env.max_episode_steps", *kwargs)
    shared += ("total_frames", "collector.name", "sync.name")
    known = {key: plan.common.get(key, "null") for key in shared}
    if same := [[key, _told(value)] for key, value in known.items() if value not in UNSET]:
        yield "And what most readers will ask of those that are the same:"
        yield Table(["option", "value"], same)
    for findings in found:
        rows = [
            [
                setting.label,
                ", ".join(map(str, setting.done)) or NONE,
                f"{sum(run.is_done for run in setting.runs)} of {len(setting.runs)}",
                number(findings.result(setting.label).middle("updates")),
            ]
            for setting in findings.task.settings
        ]
        yield (
            f"Settings of {findings.task.name}, each with the seeds and runs that finished, and "
            "the updates of a run (the median):"
        )
        yield Table(["setting", "seeds", "finished runs", "updates"], rows)


def _results(findings: Findings, suffix: str) -> Blocks:
    if not any(result.scores for result in findings.results):
        yield f"No finished run has a final {findings.score}: there is nothing to compare."
        return
    if runs := findings.unscored():
        yield f"Without this score, and left out of it: {_some(runs)} ({findings.lacking})."
    if findings.score == TRAINED and (runs := _without(EVALUATED, findings)):
        yield f"It is {TRAINED}, because {EVALUATED} is not in the summary of {_some(runs)}."
    target = findings.target
    yield (
        f"{findings.score} at the end of each run; the unit of replication is the seed. IQM is the "
        "mean without the lowest and the highest quarter of the seeds, in whole seeds. Brackets "
        "hold 95 % percentile intervals of a bootstrap over seeds (10,000 resamples)."
        + (f" The gap is the mean shortfall from the target, {target:g}." if target else "")
    )
    yield _scores(findings)
    if findings.design is None and (others := len(findings.results) - drawing.MOST_LOOKS) > 0:
        yield (
            f"Colours tell the best {drawing.MOST_LOOKS} settings apart, the baseline among them; "
            f"the other {others} are grey in the figures. data/ has all of them. With --x OPTION "
            "an option is the x axis, and colours are those of the others."
        )
    yield from _comparisons(findings)
    yield drawing.draw(
        figures.profiles,
        findings,
        f"profiles{suffix}",
        "Performance profiles: the share of runs that score more. Higher is better; where lines "
        "cross, neither setting is better throughout.",
    )


def _without(metric: str, findings: Findings) -> list[Run]:
    """The finished runs that lack a number which others have."""
    done = [run for result in findings.results for run in result.runs]
    lacking = [run for run in done if metric not in run.summary]
    return lacking if len(lacking) < len(done) else []


def _scores(findings: Findings) -> Table:
    measures = {"IQM": "iqm", "mean": "mean", "median": "median"}
    if findings.target is not None:
        measures["gap"] = "gap"
    rows = [
        [
            result.label,
            str(len(result.scores)),
            *(with_interval(result.estimates.get(name)) for name in measures.values()),
        ]
        for result in findings.results
    ]
    return Table(["setting", "seeds", *measures], rows, numbers=True)


def _comparisons(findings: Findings) -> Blocks:
    if not findings.comparisons:
        return
    yield (
        f"Compared with {findings.against}: runs are paired by seed. The difference comes with "
        "Student's 95 % interval for paired samples. p is of Student's paired test, and p of "
        "equivalence of two one-sided tests that the difference is smaller than the margin, "
        f"{findings.margin}. Holm's method corrects both for the number of comparisons in this "
        f"table, {len(findings.comparisons)}; below 0.05 settings differ, or are equivalent. "
        "P(better) is the probability that a run of the setting scores more than one of the "
        "baseline, ties counting half."
    )
    several = findings.baseline is None
    rows = [
        [
            comparison.name,
            *([comparison.baseline] if several else []),
            str(comparison.difference.num_seeds),
            with_interval(comparison.difference),
            number(comparison.p_adjusted, 2),
            number(comparison.p_equivalent_adjusted, 2),
            comparison.verdict(),
            with_interval(findings.improvements.get(comparison.name)),
        ]
        for comparison in findings.comparisons
    ]
    columns = ["setting", *(["baseline"] if several else []), "pairs", "difference"]
    columns += ["corrected p", "corrected p of equivalence", "verdict", "P(better)"]
    yield Table(columns, rows, numbers=True)
    if len(findings.comparisons) <= MOST_SENTENCES:
        yield [comparison.sentence() for comparison in findings.comparisons]


def _together(found: Sequence[Findings]) -> Blocks:
    if not (better := totals(found)):
        return
    yield (
        f"The probability that a run scores more than one of the baseline, {found[0].baseline}, "
        f"in the same task: the mean over {len(found)} tasks, whose scores stay on scales of "
        "their own. Half means no difference. Runs are resampled within tasks."
    )
    rows = [[label, str(len(found)), with_interval(value)] for label, value in better.items()]
    yield Table(["setting", "tasks", "P(better)"], rows, numbers=True)


def _learning(findings: Findings, suffix: str) -> Blocks:
    about = (
        f"{findings.curve}, the mean over seeds with a 95 % bootstrap band. Each point looks back "
        "on 5 % of the run; a line ends where the first of its runs ends."
    )
    yield drawing.draw(
        figures.curves_by_frames, findings, f"learning-frames{suffix}", f"By frames: {about}"
    )
    yield drawing.draw(
        figures.curves_by_seconds,
        findings,
        f"learning-seconds{suffix}",
        f"By wall time: {about} Start-up is left out.",
    )
    yield drawing.draw(
        figures.curves_by_virtual_seconds,
        findings,
        f"learning-virtual-seconds{suffix}",
        f"By the clock of the simulated cluster: {about}",
    )
    if findings.throughout is None:
        return
    yield (
        f"Who learned sooner: {findings.throughout.score}, over the frames of a run. It separates "
        "settings that end with the same score."
    )
    yield _scores(findings.throughout)
    yield from _comparisons(findings.throughout)


def _sync(findings: Findings) -> Blocks:
    if timed := [r for r in findings.results if r.has(*(f"{name}_p50" for name in LATENCIES))]:
        yield (
            "Milliseconds to publish (as long as the learner is held up), until a worker has "
            "acknowledged, and to apply: 50th / 95th / 99th percentile of each run, the median "
            "over seeds."
        )
        rows = [
            [
                result.label,
                *(
                    _percentiles([result.middle(f"{name}_{p}") for p in ("p50", "p95", "p99")])
                    for name in LATENCIES
                ),
                number(result.middle("sync/bytes")),
            ]
            for result in timed
        ]
        yield Table(["setting", *LATENCIES.values(), "bytes a run"], rows, numbers=True)
    yield from _medians(
        findings,
        LAGS,
        ["policy/lag_mean"],
        "Lag: how many versions behind the newest the weights were that computed an action "
        "the learner trained on. Medians over seeds of each run's figures. Frames that lag "
        "more than max_lag are not learned from; frames whose worker died are dropped, and so "
        "are those that were on their way when the run ended.",
    )
    yield from _medians(
        findings,
        TEARING,
        ["sync/tear_rate"],
        "Torn weights: the share of policy calls during which the weights changed, of those "
        "that were checked. Medians over seeds.",
    )
    yield from _medians(
        findings,
        UPDATE_LAGS,
        list(UPDATE_LAGS),
        "The same lag in updates of the learner, and the parts of its mean: publish counts "
        "updates that were not published yet, queue those between the weights that acted and "
        "the newest published ones. Train comes on top: how far the learner moves on inside an "
        "update while it uses the frames. With a replay buffer, it is the lag of the samples.",
    )


def _medians(
    findings: Findings, columns: Mapping[str, str], needed: Sequence[str], about: str
) -> Blocks:
    """Medians over seeds for the settings that have one of the numbers that are needed.

    columns: number of the summary → its column.
    """
    if shown := [result for result in findings.results if result.has(*needed)]:
        yield about
        rows = [[r.label, *(number(r.middle(name)) for name in columns)] for r in shown]
        yield Table(["setting", *columns.values()], rows, numbers=True)


def _health(findings: Findings) -> Blocks:
    rows = [
        [result.label, BUCKETS[bucket], *(number(value, 3) for value in values)]
        for result in findings.results
        for bucket, values in result.health().items()
    ]
    if not rows:
        return
    yield (
        "Importance weights of the learner's policy at the start of an update over the weights "
        "that acted, by lag in updates; medians over seeds of the whole run. ESS is the effective "
        "sample size as a share of the frames: 1 if all weigh the same. KL is the divergence of "
        "the acting policy from the learner's, and the largest ratio that of one frame. The lower "
        "the ESS and the higher the KL, the less the frames say about the learner's policy."
    )
    yield Table(["setting", "lag", *HEALTH.values()], rows, numbers=True)


def _percentiles(values: Sequence[float]) -> str:
    known = any(map(math.isfinite, values))
    return " / ".join(number(value, 3) for value in values) if known else NONE


def _time(findings: Findings, suffix: str) -> Blocks:
    if not (timed := [result for result in findings.results if result.has("fps")]):
        return
    phases = (*PHASES, "other")
    yield (
        "Frames a second in the learner's loop, and where its time went in seconds for 1000 "
        "frames; medians over seeds. What no phase accounts for is called other."
    )
    rows = [
        [
            result.label,
            *(number(result.middle(name)) for name in ("fps", "wall_s")),
            *(number(result.seconds_per_1000_frames(phase), 3) for phase in phases),
        ]
        for result in timed
    ]
    yield Table(["setting", "frames/s", "wall s", *phases], rows, numbers=True)
    yield drawing.draw(
        figures.throughput,
        findings,
        f"throughput{suffix}",
        "Throughput against staleness: a dot for each run, a diamond for the medians of a "
        "setting. Fast and fresh is the upper left.",
    )


def _failures(runs: Sequence[Run]) -> Blocks:
    running = sum(run.state == "running" for run in runs)
    unfinished = [run for run in runs if not run.is_done and run.state != "running"]
    damaged = [run for run in runs if run.problems]
    if running:
        yield (
            f"Still running, and in no number above: {running} of {count(len(runs), 'run')}. "
            "Whether a run on another machine still lives cannot be seen from here."
        )
    elif not unfinished and not damaged:
        yield "None: every run finished, and every file could be read."
    if unfinished:
        yield (
            f"Not finished, and in no number above: {len(unfinished)} of "
            f"{count(len(runs), 'run')}. "
            "If they failed for a reason that is not chance, the scores of their settings are too "
            "good."
        )
        alike: dict[tuple[str, str], list[Run]] = {}
        for run in unfinished:
            alike.setdefault((run.state, _told(run.error) or NONE), []).append(run)
        rows = [
            [_some(group), state, _reached(group), error] for (state, error), group in alike.items()
        ]
        yield Table(["run", "state", "frames", "error"], rows)
    if damaged:
        yield "Files that are missing or damaged; what could be read was used."
        said: dict[str, list[Run]] = {}
        for run in damaged:
            said.setdefault(_told("; ".join(run.problems)), []).append(run)
        yield Table(["run", "problems"], [[_some(group), text] for text, group in said.items()])


def _some(runs: Sequence[Run]) -> str:
    """The names of the first of them, and how many there are besides."""
    names = [run.name for run in runs[:MOST_NAMES]]
    more = len(runs) - len(names)
    return ", ".join(names) + (f" and {more} more (data/runs.csv)" if more else "")


def _reached(runs: Sequence[Run]) -> str:
    """From how many frames to how many they got."""
    reached = [run.steps[-1] for run in runs if len(run.steps)]
    if not reached:
        return NONE
    return " to ".join(f"{frames:.0f}" for frames in sorted({min(reached), max(reached)}))


def _provenance(runs: Sequence[Run]) -> Blocks:
    facts: dict[str, Counter[str]] = {}
    for run in runs:
        for key, value in _facts(run):
            facts.setdefault(key, Counter())[value] += 1
    if not facts:
        yield "No run has a readable manifest: where they come from is not known."
        return
    rows = []
    for key, values in facts.items():
        said = [f"{v} ({count(n, 'run')})" for v, n in sorted(values.items())]
        rows.append([key, "; ".join(said if len(values) > 1 else values)])
    yield Table(["what", "value"], rows)
    if mixed := [key for key, values in facts.items() if len(values) > 1]:
        yield (
            f"These runs differ in where they come from ({_told(', '.join(mixed))}): what looks "
            "like a setting's doing may be that."
        )
    if any(value != "none" for value in facts.get("changes on top", ())):
        yield "The code was not exactly a commit; each run's manifest.json holds the diff."
    told = [run.manifest.get("command") for run in runs]
    if commands := sorted(
        {one_line(said, math.inf) for said in told if isinstance(said, str)} - {""}
    ):
        yield "The commands that made these runs:"
        yield Code("\n".join(commands))
        if any("skip_done=true" in said for said in commands):
            yield "To run them anew, write `replace_done` for `skip_done` or name another `sweep=`."


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    manifest = run.manifest
    git, hardware, packages = (
        found if isinstance(found := manifest.get(key), dict) else {}
        for key in ("git", "hardware", "packages")
    )
    if git:
        yield "commit", _told(f"{git.get('sha')} on {git.get('branch')}")
        files = str(git.get("diff") or "").count("\ndiff --git ") + bool(git.get("diff"))
        yield "changes on top", count(files, "changed file") if files else "none"
    if manifest.get("python"):
        yield "python", _told(manifest["python"])
    known = {name: value for name, value in hardware.items() if value not in (None, [], "")}
    for name, value in [*packages.items(), *known.items()]:
        yield _told(name), _told(value)
