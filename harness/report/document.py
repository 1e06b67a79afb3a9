"""What a report says, section by section."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from harness.files import one_line
from harness.measures import BUCKETS, PHASES
from harness.numbers import count
from harness.report import drawing, figures, verdict
from harness.report.pages import Block, Code, Document, Table
from harness.report.scores import (
    EVALUATED,
    PER_1000,
    TRAINED,
    Report,
    Score,
    summaries,
)
from harness.report.statistics import FEW_SEEDS
from harness.report.text import NONE, number, with_interval


class Column(NamedTuple):
    """One column of a table of medians."""

    head: str
    names: tuple[str, ...]  # numbers of the summary; several are percentiles of one thing
    digits: int = 4

    def cell(self, medians: pd.Series) -> str:
        """The medians of one setting."""
        values = [_median(medians, name) for name in self.names]
        if not any(map(math.isfinite, values)):
            return NONE
        return " / ".join(number(value, self.digits) for value in values)


class Medians(NamedTuple):
    """A table of medians over seeds, with a row for each setting that has a number of `needed`."""

    about: str
    columns: list[Column]
    needed: tuple[str, ...]


def _columns(names: Mapping[str, str], digits: int = 4) -> list[Column]:
    """names: number of the summary → what its column is called."""
    return [Column(head, (name,), digits) for name, head in names.items()]


LATENCIES = {"publish": "sync/publish_ms", "acknowledge": "sync/ack_ms", "apply": "sync/apply_ms"}
UPDATE_LAGS = {
    "policy/lag_updates_mean": "mean",
    "policy/lag_updates_p95": "p95",
    "policy/lag_updates_max": "max",
    "policy/lag_publish_mean": "publish",
    "policy/lag_queue_mean": "queue",
    "policy/lag_train_mean": "train",
    "policy/lag_steps_mean": "mean, gradient steps",
}
SYNCHRONISATION = (
    Medians(
        "Milliseconds to publish (as long as the learner is held up), until a worker has "
        "acknowledged, and to apply: 50th / 95th / 99th percentile of each run, the median "
        "over seeds.",
        [
            *(
                Column(head, (f"{name}_p50", f"{name}_p95", f"{name}_p99"), 3)
                for head, name in LATENCIES.items()
            ),
            Column("bytes a run", ("sync/bytes",)),
        ],
        tuple(f"{name}_p50" for name in LATENCIES.values()),
    ),
    Medians(
        "Lag: how many versions behind the newest the weights were that computed an action "
        "the learner trained on. Medians over seeds of each run's figures. Frames that lag "
        "more than max_lag are not learned from; frames whose worker died are dropped, and so "
        "are those that were on their way when the run ended.",
        _columns(
            {
                "policy/lag_mean": "mean",
                "policy/lag_p95": "p95",
                "policy/lag_max": "max",
                "policy/dropped": "frames not learned from",
                "collector/dropped": "frames dropped",
            }
        ),
        ("policy/lag_mean",),
    ),
    Medians(
        "Torn weights: the share of policy calls during which the weights changed, of those "
        "that were checked. Medians over seeds.",
        _columns(
            {
                "sync/tear_rate": "torn",
                "sync/torn_calls": "calls torn",
                "sync/checked_calls": "calls checked",
            }
        ),
        ("sync/tear_rate",),
    ),
    Medians(
        "The same lag in updates of the learner, and the parts of its mean: publish counts "
        "updates that were not published yet, queue those between the weights that acted and "
        "the newest published ones. Train comes on top: how far the learner moves on inside an "
        "update while it uses the frames. The last column is the mean in gradient steps, before "
        "the update. With a replay buffer, it is the lag of the samples.",
        _columns(UPDATE_LAGS),
        tuple(UPDATE_LAGS),
    ),
)
TIME = Medians(
    "Frames a second in the learner's loop, and where its time went in seconds for 1000 "
    "frames; medians over seeds. What no phase accounts for is called other.",
    [
        *_columns({"fps": "frames/s", "wall_s": "wall s"}),
        *_columns({f"{phase}{PER_1000}": phase for phase in (*PHASES, "other")}, 3),
    ],
    ("fps",),
)
HEALTH = {  # of the summary, by bucket of lag → what the column is called
    "policy/share": "share of frames",
    "policy/ess": "ESS",
    "policy/kl": "KL",
    "policy/ratio_max": "largest ratio",
}
MOST_TOLD = 200  # characters of an error
UNSET = ("null", "[]")  # values of an option that is not used
MOST_NAMES = 5  # runs of which one thing is said

Blocks = Iterator[Block | None]  # None is a figure that would show nothing


def write(report: Report, title: str) -> Document:
    """Compose the report and draw its figures, which takes most of its time."""
    tasks = report.plan.tasks
    sections = {"Verdict": verdict.open_with(report), "What was run": _what_was_run(report)}
    for task in tasks:
        about = f" ({task})" if len(tasks) > 1 else ""
        sections |= {
            f"Results{about}": _results(report, task),
            f"Learning{about}": _learning(report, task),
            f"Synchronisation{about}": _medians(report.medians.loc[task], SYNCHRONISATION),
            f"Health by lag{about}": _health(report.medians.loc[task]),
            f"Throughput and time{about}": _time(report, task),
        }
    sections |= {
        "Failures and damage": _failures(report.plan.runs),
        "Provenance": _provenance(report.plan.runs),
    }
    written = {
        heading: [block for block in blocks if block is not None and block != []]
        for heading, blocks in sections.items()
    }
    return Document(title, {heading: blocks for heading, blocks in written.items() if blocks})


def _told(text: object) -> str:
    return one_line(text, MOST_TOLD)


def _what_was_run(report: Report) -> Blocks:
    plan, runs = report.plan, report.plan.runs
    states = runs["state"].value_counts().sort_index()
    counted = ", ".join(f"{n} {state}" for state, n in states.items())
    yield f"{count(len(runs), 'run')}: {counted}. Only finished ones enter the numbers below."
    if plan.differing:
        only = " of one task" if len(plan.tasks) > 1 else ""
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
    common = {key: plan.common.get(key, "null") for key in shared}
    if same := [[key, _told(value)] for key, value in common.items() if value not in UNSET]:
        yield "And what most readers will ask of those that are the same:"
        yield Table(["option", "value"], same)
    for task in plan.tasks:
        yield (
            f"Settings of {task}, each with the seeds and runs that finished, and the updates of a "
            "run (the median):"
        )
        rows = []
        for setting, inside in runs[runs["task"] == task].groupby("setting"):
            rows.append(
                [
                    setting,
                    ", ".join(map(str, sorted(inside["seed"][inside["counts"]]))) or NONE,
                    f"{(inside['state'] == 'done').sum()} of {len(inside)}",
                    number(_median(report.medians.loc[(task, setting)], "updates")),
                ]
            )
        rows.sort(key=lambda row: plan.labels(task).index(row[0]))
        yield Table(["setting", "seeds", "finished runs", "updates"], rows)


def _results(report: Report, task: str) -> Blocks:
    """The score of the verdict and the final one, each with its estimates and comparisons."""
    final = report.final(task)
    scores = [score for score in report.primary if score.task == task and score is not final]
    yield (
        "The unit of replication is the seed. IQM is the mean without the lowest and the highest "
        "quarter of the seeds, in whole seeds. Brackets hold 95 % percentile intervals of a "
        f"bootstrap over seeds (10,000 resamples); with fewer than {FEW_SEEDS} seeds they are "
        "likely too narrow."
    )
    if len(final.comparisons):
        yield (
            "Runs are compared in pairs with one seed. The difference comes with Student's 95 % "
            "interval. p is of Student's paired test, and p of equivalence of two one-sided tests "
            f"that the difference is smaller than the margin, {report.margin}. Holm's method "
            "corrects both for the number of comparisons in a table; below 0.05 settings differ, "
            "or are equivalent."
        )
    for score in (*scores, final):
        yield from _of_score(report, score)
    if report.design is None and (others := len(final.scores) - drawing.MOST_LOOKS) > 0:
        yield (
            f"The best {drawing.MOST_LOOKS} settings have colours, the baseline among them; "
            f"the other {others} are grey in the figures. data/ has all of them. With --x OPTION "
            "an option is the x axis, and colours are those of the others."
        )


def _of_score(report: Report, score: Score) -> Blocks:
    target = score.target
    if not score.scored:
        yield f"No finished run has a final {score.metric}: there is nothing to compare."
        return
    yield f"{score.words.capitalize()} ({score.metric})." + (
        f" The gap is the mean shortfall from the target, {target:g}." if target else ""
    )
    if score.unscored:
        yield f"Without this score, and left out of it: {_some(score.unscored)} ({score.lacking})."
    if score.metric == TRAINED and (names := _without(EVALUATED, report, score.task)):
        yield f"It is {TRAINED}, because {EVALUATED} is not in the summary of {_some(names)}."
    yield _scores(score)
    yield from _comparisons(score, report)


def _without(metric: str, report: Report, task: str) -> list[str]:
    """The names of the finished runs that lack a number which others have."""
    runs = report.plan.counted(task)
    numbers = summaries(runs)
    lacking = numbers[metric].isna() if metric in numbers else pd.Series(True, runs.index)
    return [] if lacking.all() else list(runs["name"][lacking])


def _scores(score: Score) -> Table:
    measures = {"IQM": "iqm", "mean": "mean", "median": "median"}
    if score.target is not None:
        measures["gap"] = "gap"
    rows = []
    for setting in score.scores.index:
        estimates = [score.estimates.get((setting, name)) for name in measures.values()]
        texts = [NONE if e is None else with_interval(e.value, e.low, e.high) for e in estimates]
        rows.append([setting, str(len(score.of(setting))), *texts])
    return Table(["setting", "seeds", *measures], rows, numbers=True)


def _comparisons(score: Score, report: Report) -> Blocks:
    if score.comparisons.empty:
        return
    yield f"Compared with {score.against}:"
    several = score.baseline is None
    rows = [
        [
            row.setting,
            row.verdict,
            *([row.baseline] if several else []),
            with_interval(row.difference, row.low, row.high),
            str(row.pairs),
            number(row.p_corrected, 2),
            number(row.p_equivalent_corrected, 2),
        ]
        for row in score.comparisons.itertuples()
    ]
    columns = ["setting", "verdict", *(["baseline"] if several else []), "difference", "pairs"]
    columns += ["corrected p", "p of equivalence"]
    yield Table(columns, rows, numbers=True, texts=3 if several else 2)


def _learning(report: Report, task: str) -> Blocks:
    if any(len(score.comparisons) for score in report.primary):  # else the verdict opens with it
        yield from figures.of_section("Learning by frames", report, task)
    yield from figures.of_section("Learning", report, task)


def _medians(medians: pd.DataFrame, tables: Sequence[Medians]) -> Blocks:
    """The tables that have a row."""
    for table in tables:
        numbers = medians.reindex(columns=list(table.needed))
        rows = [
            [setting, *(column.cell(row) for column in table.columns)]
            for setting, row in medians[numbers.notna().any(axis=1)].iterrows()
        ]
        if rows:
            yield table.about
            yield Table(["setting", *(column.head for column in table.columns)], rows, numbers=True)


def _median(medians: pd.Series, name: str) -> float:
    return float(medians.get(name, math.nan))


def _health(medians: pd.DataFrame) -> Blocks:
    rows = []
    for setting, row in medians.iterrows():
        for bucket, label in BUCKETS.items():
            values = [_median(row, f"{name}/{bucket}") for name in HEALTH]
            if any(map(math.isfinite, values)):
                rows.append([setting, label, *(number(value, 3) for value in values)])
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


def _time(report: Report, task: str) -> Blocks:
    blocks = list(_medians(report.medians.loc[task], [TIME]))
    yield from blocks
    if blocks:
        yield from figures.of_section("Throughput and time", report, task)


def _failures(runs: pd.DataFrame) -> Blocks:
    is_running, has_problems = runs["state"] == "running", runs["problems"].map(bool)
    unfinished = runs[~is_running & (runs["state"] != "done")]
    damaged = runs[has_problems]
    if is_running.any():
        yield (
            f"Still running, and in no number above: {is_running.sum()} of "
            f"{count(len(runs), 'run')}. "
            "Whether a run on another machine still lives cannot be seen from here."
        )
    elif unfinished.empty and damaged.empty:
        yield "None: every run finished, and every file could be read."
    if len(unfinished):
        yield (
            f"Not finished, and in no number above: {len(unfinished)} of "
            f"{count(len(runs), 'run')}. "
            "If they failed for a reason that is not chance, the scores of their settings are too "
            "good."
        )
        errors = unfinished["error"].map(_told).replace("", NONE)
        rows = [
            [_some(list(alike["name"])), state, _reached(alike["frames"]), error]
            for (state, error), alike in unfinished.groupby(["state", errors], sort=False)
        ]
        yield Table(["run", "state", "frames", "error"], rows)
    if len(damaged):
        yield "Files that are missing or damaged; what could be read was used."
        texts = damaged["problems"].map("; ".join).map(_told)
        groups = damaged.groupby(texts, sort=False)
        yield Table(
            ["run", "problems"], [[_some(list(alike["name"])), text] for text, alike in groups]
        )


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many there are besides."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more (data/runs.csv)" if more > 0 else "")


def _reached(frames: pd.Series) -> str:
    """From how many frames to how many runs got."""
    if frames.isna().all():
        return NONE
    return " to ".join(f"{end:.0f}" for end in sorted({frames.min(), frames.max()}))


def _provenance(runs: pd.DataFrame) -> Blocks:
    facts: dict[str, Counter[str]] = {}
    for manifest in runs["manifest"]:
        for key, value in _facts(manifest):
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
    typed = [manifest.get("command") for manifest in runs["manifest"]]
    if commands := sorted(
        {one_line(text, math.inf) for text in typed if isinstance(text, str)} - {""}
    ):
        yield "The commands that made these runs:"
        yield Code("\n".join(commands))
        if any("skip_done=true" in command for command in commands):
            yield "To run them anew, write `replace_done` for `skip_done` or name another `sweep=`."


def _facts(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    parts = [manifest.get(key) for key in ("git", "hardware", "packages")]
    git, hardware, packages = (part if isinstance(part, dict) else {} for part in parts)
    if git:
        yield "commit", _told(f"{git.get('sha')} on {git.get('branch')}")
        files = str(git.get("diff") or "").count("\ndiff --git ") + bool(git.get("diff"))
        yield "changes on top", count(files, "changed file") if files else "none"
    if manifest.get("python"):
        yield "python", _told(manifest["python"])
    stated = {name: value for name, value in hardware.items() if value not in (None, [], "")}
    for name, value in [*packages.items(), *stated.items()]:
        yield _told(name), _told(value)
