"""Run a run again, and say whether the result is the same: `python -m harness.reproduce RUN`."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from scipy import stats

from harness.analysis.statistics import LEVEL
from harness.checkpoints import CheckpointError
from harness.comparison import Difference, compare_records, compare_weights, is_repeatable
from harness.config.plan import RunPlan, to_config
from harness.config.resumed import check_stored_imports, read_options
from harness.files import one_line, read_json
from harness.provenance import manifest
from harness.search import objective

SAME, DIFFERENT, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
REPEATS = 3  # of a run whose every repetition is another sample
LONGEST = 100  # characters of a value from a manifest


@dataclass
class Verdict:
    """What was found, and the exit status that says so."""

    word: str  # identical, within the interval, different
    why: str
    status: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    options = parser().parse_args(arguments)
    original = options.run_dir
    try:
        if options.repeats is not None and options.repeats < 1:
            raise ValueError(f"--repeats is {options.repeats}, expected 1 or more")
        plan = stored_plan(
            original, options.out, import_env=options.import_env, plugins=options.plugin
        )
        for line in differences(original):
            print(line)
        verdict = reproduce(original, plan, options.repeats)
    except (ValueError, OSError, CheckpointError) as error:
        print(f"reproduce: {one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"{verdict.word}: {verdict.why}")
    return verdict.status


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m harness.reproduce",
        description=__doc__,
        epilog="Exit status: 0 identical, or within the interval; 1 different, or not to be told; "
        "2 it cannot be run or compared.",
    )
    found.add_argument("run_dir", type=Path, help="the run's directory")
    found.add_argument("--out", type=Path, help="the new run's; by default below outputs/")
    found.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=f"how often to run it; by default once, and {REPEATS} times if its bits depend on "
        "timing, for an interval to compare with",
    )
    found.add_argument(
        "--import-env",
        action="store_true",
        help="import what the run's env.id and env.wrappers name; its code runs",
    )
    found.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a plugin that the run was done with; its code runs (may be repeated)",
    )
    return found


def stored_plan(
    original: Path, out: Path | None, *, import_env: bool = False, plugins: Sequence[str] = ()
) -> RunPlan:
    """The plan that repeats a run: its config as stored, but that nothing is sent anywhere."""
    options = read_options(original)
    state = read_json(original / "status.json").get("state")
    if state != "done":
        raise ValueError(
            f"{original} is {one_line(state)}: only a run that is done can be compared"
        )
    check_stored_imports(options, original, import_env=import_env, plugins=plugins)
    options["logger"] = {}
    if isinstance(options.get("checkpoint"), dict):
        options["checkpoint"] |= {"at_end": True}
    if out is None:
        now = datetime.now()
        out = Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-reproduce"
    return RunPlan(config=to_config(options), options=options, directory=out, overrides=[])


def differences(original: Path) -> Iterator[str]:
    """What is not as it was, by the manifest: packages, code and machine."""
    stored = read_json(original / "manifest.json")
    if not stored:
        yield f"{original} has no manifest: nothing is known of what it ran on"
        return
    here = manifest(seed=0, overrides=[])
    pairs = [("python", stored.get("python"), here["python"])]
    packages = _mapping(stored.get("packages"))
    names = sorted({*packages, *here["packages"]})
    pairs += [(name, packages.get(name), here["packages"].get(name)) for name in names]
    code, own = _mapping(stored.get("git")), here["git"] or {}
    pairs += [("git commit", code.get("sha"), own.get("sha"))]
    if code.get("diff") != own.get("diff"):
        yield f"changes on top of the commit: {_lines(code.get('diff'))} then, " + (
            f"{_lines(own.get('diff'))} now, and not the same"
        )
    hardware = _mapping(stored.get("hardware"))
    pairs += [(name, hardware.get(name), value) for name, value in here["hardware"].items()]
    for name, then, now in pairs:
        if then != now:
            yield f"{one_line(name)}: {_short(then)} then, {_short(now)} now"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _lines(diff: Any) -> str:
    return f"{len(diff.splitlines())} lines" if isinstance(diff, str) else "unknown"


def _short(value: Any) -> str:
    text = "nothing" if value is None else one_line(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def reproduce(original: Path, plan: RunPlan, repeats: int | None) -> Verdict:
    """Run it again, so often as needed, and compare."""
    repeatable = is_repeatable(plan.config)
    count = repeats or (1 if repeatable else REPEATS)
    difference, scores = None, []
    for number in range(count):
        place = plan.directory if count == 1 else plan.directory / f"{number + 1}"
        scores.append(_run(plan, place))
        difference, compared = _compare(original, place)
        if difference is None:
            return Verdict("identical", f"{compared}, in {place}", SAME)
        print(f"first difference: {one_line(difference)}")
    if repeatable and read_json(original / "manifest.json").get("resumed"):
        why = "it was resumed, and the stored config is that of its last part"
        return Verdict(
            "not to be told", f"{why}: earlier ones may have had other options", DIFFERENT
        )
    if repeatable:
        return Verdict("different", "this config promises the same bits for a seed", DIFFERENT)
    return within(objective(read_json(original / "summary.json")), scores)


def _run(plan: RunPlan, place: Path) -> float:
    from harness.execution import execute

    outcome = execute(RunPlan(plan.config, plan.options, place, plan.overrides))
    if outcome.exit_status > 128:
        raise KeyboardInterrupt
    if outcome.state != "done":
        raise ValueError(f"the run in {place} is {outcome.state}: see its status.json")
    return outcome.objective


def _compare(original: Path, place: Path) -> tuple[Difference | None, str]:
    """The first difference, and what was compared; records first, since they say when it was."""
    records = "all metrics but times"
    found = compare_records(original, place)
    if found is not None:
        return found, records
    try:
        return compare_weights(original, place), f"{records}, and the final weights"
    except CheckpointError as error:
        print(f"weights are not compared: {one_line(error)}")
        return None, f"{records} (weights could not be compared)"


def within(score: float, again: Sequence[float]) -> Verdict:
    """Whether a score is one that repetitions lead to expect.

    Between the bounds (Student's prediction interval) the score of one more run would lie with
    95 % probability, if the repetitions and the original are samples of one thing.
    """
    shown = ", ".join(f"{value:g}" for value in again)
    what = f"return {score:g} against {shown}, of the same config and seed"
    if len(again) < 2 or not all(map(math.isfinite, (score, *again))):
        why = f"{what}: too few numbers for an interval; --repeats 3 makes more"
        return Verdict("not to be told", why, DIFFERENT)
    middle = statistics.fmean(again)
    spread = statistics.stdev(again) * math.sqrt(1 + 1 / len(again))
    reach = float(stats.t.ppf((1 + LEVEL) / 2, len(again) - 1)) * spread
    interval = f"95 % interval for one more run {middle - reach:g} to {middle + reach:g}"
    if abs(score - middle) <= reach:
        return Verdict("within the interval", f"{what}; {interval}", SAME)
    return Verdict("different", f"{what}; {interval}", DIFFERENT)


if __name__ == "__main__":
    sys.exit(main())
