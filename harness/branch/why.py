"""Take away one suspect at a time from a run that became worse, and compare.

    lockstep why RUN

From a moment before the return fell, the run is continued in several arms, each with one change:
without the exact lag or with a shorter queue, without the oldest frames, with half the clip range,
with half the learning rate. As often it is continued unchanged, as the control. A table says which
changes do better than the control. It says nothing about causes that no arm takes away.

By default the moment is the update of the highest return before the fall. All else is as with
lockstep branch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.branch.command import STATUSES, add_study_flags, guarded, updates
from harness.branch.study import (
    Arm,
    open_study,
    run_branches,
    trusted,
    way_for,
    write_report,
)
from harness.config.stored import option
from harness.errors import ConfigError, show
from harness.files import read_json

EVALUATED, ACTING = "eval/return", "episode/return"
FALL = 0.2  # of the span of a run's returns: a smaller fall from the highest one is none


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    return guarded("why", _why, parser().parse_args(arguments))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(
        prog="lockstep why",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=STATUSES,
    )
    flags.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of the parent")
    flags.add_argument(
        "--at",
        type=updates,
        metavar="UPDATES",
        help="the moments: numbers of updates, as 40,60; by default the highest return",
    )
    add_study_flags(flags)
    return flags


def _why(options: argparse.Namespace) -> int:
    stored = trusted(options)
    summary = read_json(options.run_dir / "summary.json")
    at = options.at or [before_the_fall(options.run_dir, summary)]
    arms = list(suspects(stored, summary))
    if not arms:
        raise ConfigError(f"{options.run_dir}: there is nothing that an arm could take away")
    study = open_study(options, stored, arms, "why")
    way = way_for(options, study, at)
    print(f"from update {', '.join(map(str, at))}: {', '.join(arm.name for arm in study.arms)}")
    status = run_branches(study, way, at, options.repeats, options.jobs)
    write_report(study)
    return status


def suspects(stored: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[Arm]:
    """The arms, each without one thing that the run has."""
    if option(stored, "sync.lag") not in (None, 0):
        yield _arm("sync.lag", 0)
    ahead = option(stored, "collector.batches_ahead")
    if isinstance(ahead, int) and ahead > 1:
        yield _arm("collector.batches_ahead", 1)
    oldest, most = (summary.get(f"policy/lag_{name}", 0) for name in ("p95", "max"))
    limit = stored["algo"].get("max_lag", "no such option")
    if limit is None and oldest < most:
        yield _arm("algo.max_lag", int(oldest))
    for name in ("algo.clip", "algo.learning_rate"):
        value = option(stored, name)
        if isinstance(value, int | float) and value > 0:
            yield _arm(name, value / 2)


def _arm(name: str, value: Any) -> Arm:
    return Arm(f"{name}={show(value)}", {name: value})


def before_the_fall(directory: Path, summary: Mapping[str, Any]) -> int:
    """The update of the highest return, if the return fell afterwards.

    `ConfigError` if it did not, or if the records do not say.
    """
    from harness.report.runs import read_run  # takes time to import

    metrics = (EVALUATED, ACTING)
    records = read_run(directory, metrics, name=directory.name, source="").records
    metric = next((name for name in metrics if records[name].notna().sum() > 1), None)
    done, frames = summary.get("updates"), summary.get("frames")
    if metric is None or not isinstance(done, int) or not isinstance(frames, int) or frames < 1:
        raise ConfigError(f"{directory} has no course of returns to look at; name --at UPDATES")
    returns = records[["step", metric]].dropna().to_numpy()
    highest = int(np.argmax(returns[:, 1]))
    fall = returns[highest, 1] - returns[-1, 1]
    if fall <= FALL * np.ptp(returns[:, 1]):
        raise ConfigError(
            f"{directory}: {metric} does not fall after its highest value; name the updates at "
            "which to begin with --at UPDATES"
        )
    return max(1, min(done - 1, int(returns[highest, 0] * done // frames)))


if __name__ == "__main__":
    sys.exit(main())
