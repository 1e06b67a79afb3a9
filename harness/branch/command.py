"""Go back to moments of a run, and continue from there with an option changed.

    lockstep branch RUN --at 40,60,80 sync.lag=0 --repeats 8

What would have happened without the lag? From the run's state after each of these updates, this
command continues it `--repeats` times with the option changed, and as often without the change,
as the control. Each repeat has random streams of its own, which both arms share. The run is first
done again up to the last moment, with the same bits: by its seed, or by its recorded schedule.

Each branch is a run directory. The same command with --out continues what was interrupted, and
adds what is new.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.branch.options import check_changes
from harness.branch.study import (
    Arm,
    Study,
    open_study,
    run_branches,
    trusted,
    way_for,
    write_report,
)
from harness.config.stored import add_import_flags
from harness.errors import ConfigError
from harness.files import one_line
from harness.run.checkpoints import CheckpointError

USAGE_ERROR, INTERRUPTED = 2, 130
STATUSES = (
    "Exit status: 0 all branches are done; 1 a branch failed; 2 nothing was started, or the "
    "moments were not reached, or the report cannot be written; 130 interrupted."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    return guarded("branch", _branch, parser().parse_intermixed_args(arguments))


def guarded(
    name: str, command: Callable[[argparse.Namespace], int], options: argparse.Namespace
) -> int:
    """Do what the options say; the exit status. What is wrong is said in one line."""
    try:
        for flag, least in (("repeats", 1), ("jobs", 1), ("refine", 0)):
            if (number := getattr(options, flag, least)) < least:
                raise ConfigError(f"--{flag} {number}: expected {least} or more")
        return command(options)
    except (ValueError, OSError, CheckpointError) as error:
        print(f"{name}: {one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the same command with --out continues", file=sys.stderr)
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(
        prog="lockstep branch",
        description=(__doc__ or "").replace("`", ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=STATUSES,
    )
    flags.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of the parent")
    flags.add_argument("changes", nargs="*", metavar="OPTION=VALUE", help="what to change")
    flags.add_argument(
        "--at",
        type=updates,
        required=True,
        metavar="UPDATES",
        help="the moments: numbers of updates, as 40,60,80",
    )
    flags.add_argument(
        "--refine",
        type=int,
        default=0,
        metavar="N",
        help="add up to N moments, each half-way between two with different answers (0)",
    )
    add_study_flags(flags)
    return flags


def add_study_flags(flags: argparse.ArgumentParser) -> None:
    """The flags of every command that makes branches."""
    flags.add_argument("--repeats", type=int, default=8, metavar="N", help="of each arm (8)")
    flags.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (1)")
    flags.add_argument("--out", type=Path, help="the directory; by default below outputs/")
    flags.add_argument(
        "--real-workers",
        action="store_true",
        help="branches of an asynchronous run have worker processes; by default they are simulated "
        "with the costs measured in the run, so that they repeat to the bit",
    )
    add_import_flags(flags)


def updates(text: str) -> list[int]:
    """Numbers of updates, ascending."""
    try:
        return sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers, as 40,60,80") from None


def _branch(options: argparse.Namespace) -> int:
    stored = trusted(options)
    values = check_changes(options.changes, stored)
    arm = Arm(" ".join(options.changes).replace("/", "_"), values)
    study = open_study(options, stored, [arm], "branch")
    way = way_for(options, study, options.at)
    status = run_branches(study, way, options.at, options.repeats, options.jobs)
    for _ in range(options.refine):
        if status or (update := next_moment(study)) is None:
            break
        status = run_branches(study, way, [update], options.repeats, options.jobs)
    write_report(study)
    return status


def next_moment(study: Study) -> int | None:
    """The update half-way between two moments with different answers."""
    from harness.branch.report import read_results, where_it_changes

    gap = where_it_changes(read_results(study.parent, study.branches()))
    if gap is None:
        print("no further moment: the answer changes between no moments that are further apart")
        return None
    print(f"the answer changes between updates {gap[0]} and {gap[1]}", flush=True)
    return sum(gap) // 2


if __name__ == "__main__":
    sys.exit(main())
