"""How a report opens: the answer in a sentence, the figure that shows it, and its table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from harness.measures import Unused
from harness.numbers import count, plural
from harness.report import figures
from harness.report.comparisons import (
    EQUIVALENT,
    IDENTICAL,
    POWER,
    UNDECIDED,
    UNTESTED,
    VERDICTS,
    WITHIN,
    Margin,
    has_share,
    in_words,
    is_significant,
    pairs_needed,
)
from harness.report.pages import Block, Table
from harness.report.scores import (
    ACTING,
    EVALUATED,
    FEWEST_EVALUATIONS,
    NEWEST,
    NEWEST_SAMPLED,
    TRAINED,
    Report,
    Score,
    summaries,
)
from harness.report.statistics import LEVEL, student
from harness.report.text import NONE, joined, number, signed, with_interval

SIGNS = dict(zip(VERDICTS, ("▼", "≈▼", "≈", "=", "≈▲", "▲", "?", ""), strict=True))
COLLAPSED = "collapsed"
HEADS = {  # of the scores, as columns of a table
    NEWEST: "newest weights",
    NEWEST_SAMPLED: "sampled",
    EVALUATED: "last policy",
    TRAINED: "last 100 episodes",
    ACTING: "acting weights",
}
MIXES = (
    "It mixes what was learned with how old the acting weights are and how random the policy "
    "still is, so a lower score need not mean that less was learned."
)
DEFINITIONS = {
    NEWEST: "Newest weights: the learner's newest weights are evaluated while it trains, with "
    "greedy actions. The score is the mean over training: an evaluation counts for the frames "
    "since the one before it.",
    NEWEST_SAMPLED: "Sampled: the same, with actions drawn from the policy.",
    EVALUATED: "Last policy: the evaluation at the end of a run.",
    COLLAPSED: "Collapsed: runs whose last policy has lost more than half of what the run had "
    "learned. Its return is nearer to the start, the median of the first evaluations of all runs "
    "of the task, than to the best evaluation of the run. A run that gained less than a fifth of "
    "the largest gain has learned too little to count.",
    ACTING: "Acting weights: the return of the weights that act while training, as a mean over "
    f"all frames. {MIXES}",
}
MIXTURE = (
    "What the differences in the return of the acting weights consist of. Learning is the "
    "difference of the newest weights, greedy. Randomness is what drawing the actions adds to it "
    "(sampled less greedy). Age is the rest: the weights that act are older than the newest."
)
ORDERS = {True: "higher", False: "lower"}


def open_with(report: Report) -> Iterator[Block | None]:
    """The blocks of the first section, about the primary score of each task."""
    scores = report.primary
    yield sentence(report)
    yield warnings(report) or None
    if not any(score.scored for score in scores):
        return
    if any(len(score.comparisons) for score in scores):
        yield from figures.of_section("Verdict", report)
    else:
        for task in report.plan.tasks:
            yield from figures.of_section("Learning by frames", report, task)
    for score in scores:
        if len(scores) > 1:
            yield f"{score.task}:"
        yield overview(report, score)
    yield _key(report)
    yield from _with_interactions(report)
    if notes := [*_opposite(report), *_seeds_needed(report), *_unused(report)]:
        yield notes
    for score in scores:
        yield from _mixture(report, score)
    yield from _delays(report)


def brief(report: Report) -> list[Block]:
    """The verdict for a terminal."""
    tables = [
        overview(report, score, small=True) for score in report.primary if len(score.comparisons)
    ]
    interactions = [_interactions(score) for score in report.primary if len(score.interactions)]
    blocks: list[Block] = [sentence(report), warnings(report), *tables, *interactions]
    return [block for block in blocks if block]


# -- the first sentence


def sentence(report: Report) -> str:
    """The answer: of the interaction that was asked for, or of all comparisons."""
    answer = _answer(report)
    if not report.plan.damaged:
        return answer
    reasons = [f"{name} ({reason})" for name, reason in report.plan.damaged.items()]
    are = plural(len(reasons), "is", "are")
    return f"Without {joined(reasons)}, which {are} damaged: {answer}"


def _answer(report: Report) -> str:
    scores = report.primary
    compared = [score for score in scores if len(score.comparisons)]
    if not any(score.scored for score in scores):
        return _without_scores(report)
    if any(len(score.interactions) for score in scores):
        return " ".join(_interaction(score) for score in scores if len(score.interactions))
    if not compared:
        return _without_comparisons(report)
    comparisons = pd.concat([score.comparisons for score in compared])
    by = f"By the {_words(scores)}, "
    if len(comparisons) == 1:
        (row,) = comparisons.itertuples()
        return f"{by}{in_words(row)}{_at_the_end(report, compared[0], row)}"
    against = joined(dict.fromkeys(score.against for score in compared))
    text = (
        f"{by}of {count(len(comparisons), 'setting')} compared with {against}, "
        f"{joined(_counts(comparisons, report.margin))}"
    )
    if not any(map(is_significant, comparisons.itertuples())):
        return f"{text}."
    return f"{text}; {_largest_difference(report)}"


def _interaction(score: Score) -> str:
    """How many interactions are significant, and the largest one."""
    rows = list(score.interactions.itertuples())
    sure = [row for row in rows if is_significant(row)]
    row = max(sure or rows, key=lambda row: abs(row.difference))
    where = f" ({row.rest})" if row.rest else ""
    return (
        f"By the {score.words}, {len(sure)} of {count(len(rows), 'interaction')} "
        f"{plural(len(rows), 'is', 'are')} significant. The largest: changing {row.change}{where} "
        f"adds {signed(row.effect)} with {row.at} and {signed(row.base_effect)} with {row.base}, a "
        f"difference of {with_interval(row.difference, row.low, row.high)} (corrected p = "
        f"{number(row.p_corrected, 2)})."
    )


def _without_scores(report: Report) -> str:
    runs = report.plan.runs
    if ((runs["state"] == "done") & (runs["task"] != "")).any():
        metrics = joined(dict.fromkeys(score.metric for score in report.primary))
        return f"No finished run has a score ({metrics}): there is nothing to compare."
    return "No run has finished, so there is nothing to compare. See Failures and damage, below."


def _without_comparisons(report: Report) -> str:
    """The score of each task, if it has one setting."""
    if any(len(score.scored) > 1 for score in report.primary):
        return (
            "There is nothing to compare: no setting has a baseline that is otherwise the same. "
            "--baseline names one."
        )
    means = []
    for score in report.primary:
        for setting in score.scored:
            mean = student(score.of(setting))
            value = with_interval(mean.value, mean.low, mean.high)
            text = f"{value} on {score.task} ({count(mean.seeds, 'seed')})"
            final = report.final(score.task)
            if final is not score and setting in final.scored:
                text += f", and at the end {number(final.of(setting).mean())} ({final.words})"
            means.append(text)
    score = report.primary[0]
    over = "" if score is report.final(score.task) else ", as a mean over training,"
    return f"The {_words(report.primary)}{over} is {joined(means)}."


def _counts(comparisons: pd.DataFrame, margin: Margin) -> Iterator[str]:
    """How many settings have which verdict."""
    verdicts = Counter(comparisons["verdict"])
    equal, same, undecided, untested = (
        verdicts[v] for v in (EQUIVALENT, IDENTICAL, UNDECIDED, UNTESTED)
    )
    if differ := verdicts.total() - equal - same - undecided - untested:
        small = sum(n for verdict, n in verdicts.items() if verdict.endswith(WITHIN))
        inside = f" ({small} by less than the margin)" if small else ""
        yield f"{differ} {plural(differ, 'differs', 'differ')}{inside}"
    if equal:
        yield f"{equal} {plural(equal, 'is', 'are')} equivalent within {margin}"
    if same:
        yield f"{same} {plural(same, 'is', 'are')} identical to it in every pair"
    if undecided:
        yield f"no difference is found for {undecided}"
    if untested:
        yield f"{untested} {plural(untested, 'has', 'have')} too few seeds to test"


def _largest_difference(report: Report) -> str:
    """The one of those that are significant, and what the last policies say of it."""
    sure = [
        (score, row)
        for score in report.primary
        for row in score.comparisons.itertuples()
        if is_significant(row)
    ]
    score, row = max(sure, key=lambda each: _size(*each))
    where = f" on {score.task}" if len(report.primary) > 1 else ""
    name = name_of(report, score, row.setting)
    pairs = score.scores.loc[[row.baseline, row.setting]].dropna(axis=1)
    before, after = pairs.mean(axis=1)
    size = number(row.difference) if row.difference < 0 else f"+{number(row.difference)}"
    if has_share(score.scores) and before > 0:
        size += f", {100 * row.difference / before:+.0f} %"
    return (
        f"the largest change is {name}{where}, from {number(before)} to {number(after)} ({size})."
        f"{_at_the_end(report, score, row)}"
    )


def _size(score: Score, row: Any) -> float:
    """Of a difference, as a share of the range of its task's scores."""
    values = score.scores.to_numpy(float)
    values = values[~pd.isna(values)]
    return abs(row.difference) / float(values.max() - values.min() or 1.0)


def _at_the_end(report: Report, score: Score, row: Any) -> str:
    """What the last policies of a setting and its baseline score, and how many runs collapsed."""
    final, texts = report.final(score.task), []
    if final is not score and {row.setting, row.baseline} <= {*final.scored}:
        after, before = (number(final.of(name).mean()) for name in (row.setting, row.baseline))
        texts.append(f"its {HEADS.get(final.metric, final.metric)}: {after} against {before}")
    if collapsed := report.num_collapsed(score.task, row.setting):
        of_baseline = report.num_collapsed(score.task, row.baseline)
        texts.append(f"collapsed runs: {_share(collapsed)} against {_share(of_baseline)}")
    text = "; ".join(texts)
    return f" {text[:1].upper()}{text[1:]}." if text else ""


def _share(collapsed: tuple[int, int] | None) -> str:
    return NONE if collapsed is None else "{} of {}".format(*collapsed)


def name_of(report: Report, score: Score, setting: str) -> str:
    """What the figure calls a setting."""
    design = report.design
    if design is None:
        return setting
    place = design.places.loc[(score.task, setting)]
    panel = place.panel if len(design.panels) > 1 and design.facet != ("env.id",) else ""
    return " · ".join(filter(None, (panel, place.line, f"{' + '.join(design.x)}={place.x}")))


# -- what qualifies it


def warnings(report: Report) -> list[str]:
    """What a reader must know before the numbers."""
    return [*_unmeasured(report), *_unscored(report.primary), *report.plan.notes]


def _unmeasured(report: Report) -> Iterator[str]:
    """Which scores are those of the acting weights, because nothing else was measured."""
    for score in report.primary:
        if score.metric != ACTING or not score.scored:
            continue
        if report.score(score.task, NEWEST) is not None:  # it was asked for
            yield f"The score is the {score.words}. {MIXES}"
            continue
        runs = report.plan.counted(score.task)
        few = report.not_evaluated[score.task]
        which = "no run" if len(few) == len(runs) else f"{len(few)} of {count(len(runs), 'run')}"
        were = "was" if which == "no run" else "were not"
        where = f"{score.task}: " if len(report.primary) > 1 else ""
        yield (
            f"{where}Only the return of the acting weights was measured: {which} {were} evaluated "
            f"{FEWEST_EVALUATIONS} times or more while training. {MIXES}"
        )


def _unscored(scores: Sequence[Score]) -> Iterator[str]:
    """The finished runs that are in no number of the verdict, and why."""
    for score in scores:
        if score.unscored:
            are = plural(len(score.unscored), "is", "are")
            yield f"Left out: {joined(score.unscored)} {are} finished, but {score.lacking}"


def _words(scores: Sequence[Score]) -> str:
    return joined(dict.fromkeys(score.words for score in scores))


# -- the table


def columns_of(report: Report, task: str) -> list[Score]:
    """The scores of a task that stand beside each other, that of the verdict first."""
    scores = [score for score in report.scores if score.task == task]
    order = [NEWEST, NEWEST_SAMPLED, report.final(task).metric, ACTING]
    return sorted(scores, key=lambda score: (not score.is_primary, order.index(score.metric)))


def overview(report: Report, primary: Score, *, small: bool = False) -> Table:
    """A row for each setting: the verdict, and all scores.

    small: without the scores that only explain the others.
    """
    task = primary.task
    scores = columns_of(report, task)
    if small:
        scores = [s for s in scores if s.is_primary or s is report.final(task)]
    has_collapsed = any(report.num_collapsed(task, s) for s in primary.scores.index)
    after = next((n for n, s in enumerate(scores, 1) if s is report.final(task)), len(scores))
    heads = [HEADS.get(score.metric, score.metric) for score in scores]
    if has_collapsed:
        heads.insert(after, COLLAPSED)
    compared = primary.comparisons.set_index("setting")
    baselines = {*compared["baseline"]}
    rows = []
    for setting in _in_order(report, primary):
        if small and not len(primary.of(setting)):
            continue
        verdict, difference = ("baseline" if setting in baselines else NONE), NONE
        if setting in compared.index:
            row = compared.loc[setting]
            verdict = row["verdict"]
            difference = with_interval(row["difference"], row["low"], row["high"])
        cells = [_cell(score, setting) for score in scores]
        if has_collapsed:
            cells.insert(after, _share(report.num_collapsed(task, setting)))
        seeds = str(len(primary.of(setting)))
        rows.append([name_of(report, primary, setting), verdict, difference, *cells, seeds])
    if not len(compared):
        rows = [[row[0], *row[3:]] for row in rows]
        return Table(["setting", *heads, "seeds"], rows, numbers=True)
    return Table(["setting", "verdict", "difference", *heads, "seeds"], rows, True, texts=2)


def _in_order(report: Report, score: Score) -> list[str]:
    """The settings: by panel, line and place on the x axis if there is a design."""
    settings, design = list(score.scores.index), report.design
    if design is None:
        return settings

    def place(setting: str) -> tuple[int, int, int]:
        at = design.places.loc[(score.task, setting)]
        return (
            design.panels.index(at.panel),
            design.lines.index(at.line),
            design.values.index(at.x),
        )

    return sorted(settings, key=place)


def _cell(score: Score, setting: str) -> str:
    """The mean, with its interval if it is the verdict's, and the sign of its own comparison."""
    values = score.of(setting)
    if not len(values):
        return NONE
    mean = student(values)
    text = number(mean.value)
    if score.is_primary:
        return with_interval(mean.value, mean.low, mean.high)
    verdicts = score.comparisons.set_index("setting")["verdict"]
    return f"{text} {SIGNS.get(verdicts.get(setting, ''), '')}".strip()


def _key(report: Report) -> list[str]:
    """What the columns of the table mean."""
    shown = {score.metric for task in report.plan.tasks for score in columns_of(report, task)}
    if report.collapsed.notna().any():
        shown.add(COLLAPSED)
    if NEWEST not in shown:
        shown.discard(ACTING)  # the warning at the top has said what it is
    items = [text for name, text in DEFINITIONS.items() if name in shown]
    if any(len(score.comparisons) for score in report.primary):
        items.append(
            f"The verdict, the difference and the interval are of the {_words(report.primary)}. "
            "In the other columns a sign says what the same test says of them: ▼ lower, ▲ higher, "
            "≈ equivalent within the margin, = identical, ? no difference found. Tests are of "
            "pairs with one seed, so whether two intervals overlap decides nothing."
        )
    if any(_lacks_margin(report, score) for score in report.primary):
        items.append(
            "There is no margin, and so no verdict of equivalence: some returns lie below zero, "
            "where a share of the baseline's mean says nothing. Name one with --margin-points."
        )
    return items


def _lacks_margin(report: Report, score: Score) -> bool:
    has_none = report.margin.points is None and not has_share(score.scores)
    return has_none and len(score.comparisons) > 0


# -- notes


def _opposite(report: Report) -> Iterator[str]:
    """Differences of training whose order is the other one at the end, if one is shown or large."""
    for training in report.primary:
        final = report.final(training.task)
        if final is training:
            continue
        pairs = final.comparisons.merge(training.comparisons, on=["setting", "baseline"])
        for row in pairs.itertuples():
            end_is_sure = row.p_corrected_x < 1 - LEVEL
            is_large = abs(row.difference_x) > row.margin_x
            if not (end_is_sure or row.p_corrected_y < 1 - LEVEL or is_large):
                continue
            if row.difference_x * row.difference_y < 0:
                sure = "" if end_is_sure else ", which could be chance"
                yield (
                    f"At the end of the runs the order is the opposite: by the {final.words}, "
                    f"{name_of(report, final, row.setting)} is {number(abs(row.difference_x))} "
                    f"{ORDERS[row.difference_x > 0]} than "
                    f"{name_of(report, final, row.baseline)} "
                    f"(corrected p = {number(row.p_corrected_x, 2)}){sure}."
                )


def _seeds_needed(report: Report) -> Iterator[str]:
    """How many seeds would decide what these could not."""
    for score in report.primary:
        tests = len(score.comparisons)
        undecided = score.comparisons[score.comparisons["verdict"] == UNDECIDED]
        counts = [pairs_needed(row, row.pairs, tests) for row in undecided.itertuples()]
        if needed := sorted(n for n in counts if n is not None):
            task = f" on {score.task}" if len(report.primary) > 1 else ""
            least, most = needed[0], needed[-1]
            seeds = f"{least}" if least == most else f"{least} to {most}"
            yield (
                f"To show a difference of {report.margin}{task}, you need about {seeds} seeds, "
                f"judged by the variance of these pairs (power {POWER:.0%})."
            )


def _unused(report: Report) -> Iterator[str]:
    """The settings that did not learn from many of their frames."""
    for task in report.plan.tasks:
        runs = report.plan.counted(task)
        numbers = summaries(runs)
        if "updates" not in numbers:
            continue
        numbers = numbers[numbers["updates"].notna()].fillna(0.0)
        for setting, inside in numbers.groupby(runs["setting"], sort=False):
            unused = [Unused.of(summary) for summary in inside.to_dict("records")]
            worst = max(unused, key=lambda one: one.share)
            if worst.is_much:
                updates = joined(dict.fromkeys(map(number, inside["updates"])))
                yield (
                    f"Warning: {setting} did not learn from {worst} of the frames of a run; "
                    f"its runs made {updates} updates."
                )


def _with_interactions(report: Report) -> Iterator[Block]:
    for score in report.primary:
        if score.interactions.empty:
            continue
        yield (
            f"Interactions, by the {score.words}: the effect of one option at one value of the "
            "other less its effect at the first. Seeds are paired, the test is Student's, and "
            f"Holm's method corrects p for {count(len(score.interactions), 'test')}."
        )
        yield _interactions(score)
        if (final := report.final(score.task)) is not score:
            sure = sum(map(is_significant, final.interactions.itertuples()))
            yield f"By the {final.words}, {sure} of {len(final.interactions)} are significant."


def _interactions(score: Score) -> Table:
    rows = [
        [
            " · ".join(filter(None, (row.change, row.rest))),
            f"{row.at} less {row.base}",
            number(row.effect),
            number(row.base_effect),
            with_interval(row.difference, row.low, row.high),
            number(row.p_corrected, 2),
            number(row.seeds_needed),
        ]
        for row in score.interactions.itertuples()
    ]
    columns = ["change", "interaction", "effect", "effect at the first", "difference"]
    return Table([*columns, "corrected p", "seeds needed"], rows, numbers=True, texts=2)


def _mixture(report: Report, score: Score) -> Iterator[Block]:
    """The parts of each difference in the return of the acting weights."""
    names = (NEWEST, NEWEST_SAMPLED, ACTING)
    scores = [report.score(score.task, name) for name in names]
    if any(one is None or one.comparisons.empty for one in scores):
        return
    keys = ["setting", "baseline"]
    greedy, sampled, acting = (
        one.comparisons.set_index(keys)["difference"] for one in scores if one is not None
    )
    parts = {"acting weights": acting, "learning": greedy, "randomness": sampled - greedy}
    table = pd.DataFrame({**parts, "age": acting - sampled}).dropna()
    rows = [
        [name_of(report, score, setting), *map(signed, row)]
        for (setting, _), row in zip(table.index, table.to_numpy(), strict=True)
    ]
    if rows:
        yield MIXTURE
        yield Table(["setting", *table], rows, numbers=True)


def _delays(report: Report) -> Iterator[Block]:
    """How much of the differences that are shown is old weights showing later what was learned.

    An estimate, for where the newest weights were not measured.
    """
    items = []
    for score in report.primary:
        if report.score(score.task, NEWEST) is not None:
            continue
        for row in score.comparisons.itertuples():
            if is_significant(row) and row.setting in score.delays:
                name = name_of(report, score, row.setting)
                delay = signed(score.delays[row.setting])
                items.append(f"{name}: {delay} of {signed(row.difference)}")
    if items:
        yield (
            "The score is the return of the weights that act. Where they are older than the "
            "baseline's, it shows later what was learned. So much of the differences is this "
            "delay, by the baseline's curves moved by the difference in mean lag:"
        )
        yield items
