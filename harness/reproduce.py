"""Repeat a run, and compare the results: `python -m harness.reproduce RUN`.

The same seed gives the same bits if nothing depends on timing. An asynchronous run has recorded its
schedule, and is replayed in one process. `--set` changes options of the new run: the same schedule,
but another learner.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.config.plan import RunPlan, to_config
from harness.config.stored import add_import_flags, changed, trusted_options
from harness.files import one_line, parse_yaml, read_json
from harness.numbers import readable
from harness.options.base import defaults
from harness.options.run import Config
from harness.options.simulated import SimulatedConfig
from harness.run.branch_start import branch_of
from harness.run.checkpoints import CheckpointError
from harness.run.provenance import hardware, manifest, packages
from harness.run_comparison import (
    FirstDifference,
    compare_records,
    compare_weights,
    is_repeatable,
    unshared,
)
from harness.run_directory import SCHEDULE, return_of

SAME, DIFFERENT, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
REPEATS = 3  # of a run whose every repetition is another sample
LONGEST = 200  # characters of a value from a manifest


@dataclass
class Verdict:
    """The result of the comparison, and the exit status."""

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
            original,
            options.out,
            import_env=options.import_env,
            plugins=options.plugin,
            changes=options.set,
        )
        for line in differences(original):
            print(line)
        if options.set:
            verdict = compare_changed(original, plan, options.set)
        elif plan.config.collector.simulates and is_recorded(original):
            verdict = replay(original, plan)
        else:
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
    flags = argparse.ArgumentParser(
        prog="lockstep reproduce",
        description=(__doc__ or "").replace("`", ""),
        epilog="Exit status: 0 identical, or within the interval; 1 different, or undecided; "
        "2 it cannot be run or compared.",
    )
    flags.add_argument("run_dir", type=Path, help="the run's directory")
    flags.add_argument("--out", type=Path, help="the new run's; by default below outputs/")
    flags.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="change an option, as algo.objective=decoupled (may be repeated)",
    )
    flags.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=f"how often to run it; by default once, and {REPEATS} times if its bits depend on "
        "timing, for an interval to compare with",
    )
    add_import_flags(flags)
    return flags


def stored_plan(
    original: Path,
    out: Path | None,
    *,
    import_env: bool = False,
    plugins: Sequence[str] = (),
    changes: Sequence[str] = (),
    unfinished: bool = False,
) -> RunPlan:
    """The plan that repeats a run: its config as stored, but that nothing is sent anywhere.

    changes: options to change, as `algo.objective=decoupled`. unfinished: whether a run that ended
    early may be repeated that has no recording.
    """
    options = trusted_options(original, import_env=import_env, plugins=plugins)
    branch = branch_of(original)
    recorded = is_recorded(original) and branch is None  # a replay begins where a run began
    state = read_json(original / "status.json").get("state")
    early = (recorded or unfinished) and state in ("failed", "interrupted", "pruned")
    if state != "done" and not early:
        raise ValueError(
            f"{original} is {one_line(state)}: only a run that is done can be compared, or one "
            f"that recorded a {SCHEDULE}"
        )
    options["logger"] = {}
    if isinstance(options.get("checkpoint"), dict):
        options["checkpoint"] |= {"at_end": True}
    if recorded:
        options["collector"] = replaying(original, options)
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"--set {change}: expected an option and its value, as algo.clip=0.1")
        options = changed(options, name, parse_yaml(value), f"--set {change}")
    if out is None:
        now = datetime.now()
        out = Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-reproduce"
    config = to_config(options)
    return RunPlan(config=config, options=options, directory=out, overrides=[], branch=branch)


def is_recorded(original: Path) -> bool:
    """Whether the run recorded its schedule."""
    return (original / SCHEDULE).exists()


def replaying(original: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a collector that follows the run's schedule."""
    stored = options.get("collector")
    if not isinstance(stored, dict):
        raise ValueError(f"{original / 'config.yaml'} holds no options of a collector")
    names = defaults(SimulatedConfig)
    header = SimulatedConfig.recording(str(original)).header
    return {key: value for key, value in stored.items() if key in names} | {
        "name": "simulated",
        "replay": str(original),
        "num_workers": header.num_workers,
        "frames_per_batch": header.frames_per_batch,
    }


def differences(original: Path) -> Iterator[str]:
    """What is not as it was, by the manifest: packages, code and machine."""
    stored = read_json(original / "manifest.json")
    if not stored:
        yield f"{original} has no manifest: nothing is known of what it ran on"
        return
    here = manifest(seed=0, overrides=[])
    pairs = [("python", stored.get("python"), here["python"])]
    versions = _mapping(stored.get("packages"))
    names = sorted({*versions, *here["packages"]})
    pairs += [(name, versions.get(name), here["packages"].get(name)) for name in names]
    code, code_here = _mapping(stored.get("git")), here["git"] or {}
    pairs += [("git commit", code.get("sha"), code_here.get("sha"))]
    if code.get("diff") != code_here.get("diff"):
        yield f"changes on top of the commit: {_lines(code.get('diff'))} then, " + (
            f"{_lines(code_here.get('diff'))} now, and not the same"
        )
    machine = _mapping(stored.get("hardware"))
    pairs += [(name, machine.get(name), value) for name, value in here["hardware"].items()]
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
    if not repeatable and (why := why_unrecorded(plan.config)):
        print(why)
    for number in range(count):
        place = plan.directory if count == 1 else plan.directory / f"{number + 1}"
        scores.append(_run(plan, place))
        difference, compared = compare(original, place)
        if difference is None:
            return Verdict("identical", f"{compared}, in {place}", SAME)
        print(f"first difference: {one_line(difference)}")
    if repeatable and read_json(original / "manifest.json").get("resumed"):
        why = "it was resumed, and the stored config is that of its last part"
        return Verdict("undecided", f"{why}: earlier ones may have had other options", DIFFERENT)
    if repeatable:
        return _broken(original, "this config promises the same bits for a seed")
    return within(return_of(read_json(original / "summary.json")), scores)


def replay(original: Path, plan: RunPlan) -> Verdict:
    """Follow the recorded schedule, and compare; of a run that failed, what there is until then."""
    place = plan.directory
    state, failure = _ending(original)
    outcome = _execute(plan, place)
    whole = state == "done"
    difference, compared = compare(original, place, replayed=True, whole=whole)
    if difference is not None:
        print(f"first difference: {one_line(difference)}")
        return _broken(original, "a replay promises the same bits")
    ended, raised = _ending(place)
    if outcome.state == "failed" and raised not in failure:  # a worker's is told with its traceback
        why = f"the replay failed: {one_line(raised)}; it is in {place}"
        return Verdict("different", why, DIFFERENT)
    if whole:
        return Verdict("identical", f"{compared}, in {place}", SAME)
    how = f"it fails alike: {raised}" if ended == "failed" else f"that run was {state}: {failure}"
    return Verdict("identical", f"{compared}, up to its end; {one_line(how)}; in {place}", SAME)


def _broken(original: Path, promise: str) -> Verdict:
    """A promise that was not kept. Other processors compute other last digits."""
    stored, installed = read_json(original / "manifest.json"), packages()
    then, now = _mapping(stored.get("hardware")), hardware()
    versions, names = _mapping(stored.get("packages")), ["processor"]
    if all(versions.get(name) == installed.get(name) for name in ("torch", "numpy")):
        names.append("instructions")  # which other versions name otherwise
    kinds = [(then[name], now[name]) for name in names if name in then and then[name] != now[name]]
    if kinds:
        promise += f", on the same kind of processor: {_short(kinds[0][0])} then, "
        promise += f"{_short(kinds[0][1])} now"
    elif then and "instructions" not in then:
        promise += ", on the same kind of processor. The manifest does not name the instructions "
        promise += f"of then; now: {_short(now['instructions'])}"
    return Verdict("different", promise, DIFFERENT)


def _ending(directory: Path) -> tuple[str, str]:
    """How a run ended, and what it raised."""
    status = read_json(directory / "status.json")
    return str(status.get("state")), str(status.get("error"))


def compare_changed(original: Path, plan: RunPlan, changes: Sequence[str]) -> Verdict:
    """Do the run with changed options, and show both results."""
    score = _run(plan, plan.directory)
    before = return_of(read_json(original / "summary.json"))
    what = "the same schedule" if is_recorded(original) else "the same seed"
    there, here = readable(before, 6), readable(score, 6)
    shown = f"return {there} there, {here} with {' '.join(changes)} and {what}"
    return Verdict("compared", f"{shown}, in {plan.directory}", SAME)


def _execute(plan: RunPlan, place: Path) -> Any:
    from harness.run.run_lifetime import execute

    outcome = execute(replace(plan, directory=place))
    if outcome.exit_status > 128:
        raise KeyboardInterrupt
    return outcome


def why_unrecorded(config: Config) -> str:
    """Why a run of this config, whose bits depend on timing, has no schedule to replay."""
    if not config.sync.versions_travel:
        return f"sync={config.sync.name}: torn reads cannot be recorded, so it is run again"
    if config.collector.fills_replay_buffer:
        return "collector.free_running=true: what a sample finds in the buffer is not recorded"
    return ""


def _run(plan: RunPlan, place: Path) -> float:
    outcome = _execute(plan, place)
    if outcome.state != "done":
        raise ValueError(f"the run in {place} is {outcome.state}: see its status.json")
    return float(outcome.objective)


def compare(
    original: Path, place: Path, *, replayed: bool = False, whole: bool = True
) -> tuple[FirstDifference | None, str]:
    """The first difference, and what was compared; records first, since they say when it was.

    Another version of the code may measure more or less: what only one run has is named.
    """
    compared, left_out = "all metrics but times", set[str]()
    if _code(original) != _code(place):
        there, here = unshared(original, place, replayed=replayed, whole=whole)
        left_out = there | here
        for which, only in (("the stored run", there), ("the new run", here)):
            if only:
                print(
                    f"not compared, since only {which} has it: {one_line(', '.join(sorted(only)))}"
                )
    if left_out:
        compared = "all metrics that both runs have, but times"
    difference = compare_records(original, place, replayed=replayed, whole=whole, without=left_out)
    if difference is not None or not whole:
        return difference, compared
    try:
        return compare_weights(original, place), f"{compared}, and the final weights"
    except CheckpointError as error:
        print(f"weights are not compared: {one_line(error)}")
        return None, f"{compared} (weights could not be compared)"


def _code(run: Path) -> tuple[Any, ...]:
    """What a manifest says of the code that ran."""
    stored = read_json(run / "manifest.json")
    git, versions = _mapping(stored.get("git")), _mapping(stored.get("packages"))
    return git.get("sha"), git.get("diff"), versions.get("lockstep-rl")


def within(score: float, again: Sequence[float]) -> Verdict:
    """Whether a score is one that repetitions lead to expect.

    Between the bounds (Student's prediction interval) the score of one more run would lie with
    95 % probability, if the repetitions and the original are samples of one thing.
    """
    shown = ", ".join(readable(value, 6) for value in again)
    what = f"return {readable(score, 6)} against {shown}, of the same config and seed"
    if len(again) < 2 or not all(map(math.isfinite, (score, *again))):
        why = f"{what}: too few numbers for an interval; --repeats 3 makes more"
        return Verdict("undecided", why, DIFFERENT)
    from harness.report.statistics import LEVEL, student_quantile  # takes time to import

    middle = statistics.fmean(again)
    spread = statistics.stdev(again) * math.sqrt(1 + 1 / len(again))
    reach = student_quantile((1 + LEVEL) / 2, len(again) - 1) * spread
    low, high = readable(middle - reach, 6), readable(middle + reach, 6)
    interval = f"95 % interval for one more run {low} to {high}"
    if abs(score - middle) <= reach:
        return Verdict("within the interval", f"{what}; {interval}", SAME)
    return Verdict("different", f"{what}; {interval}", DIFFERENT)


if __name__ == "__main__":
    sys.exit(main())
