"""`lockstep check RUN_OR_TRACE`: what must hold of stale weights, and whether it does.

Exit status: 0 if no rule is broken, 1 if one is, 2 if there is no trace to check.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep_check import importers
from lockstep_check.check import CheckResult, Finding, check
from lockstep_check.events import FILE, TraceError, find, schema
from lockstep_check.rules import Limit
from lockstep_check.same import first_difference

EPILOG = """examples:
  lockstep check outputs/mine/2026-01-31/12-00-00-ppo --limit 2
  lockstep check events.jsonl --limit 4 --at use --unit versions --explain
  lockstep check asynchronous_at_lag_zero --against synchronous
  lockstep check --from tinker-cookbook a_log_path --limit 4"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check traces; the exit status."""
    options = _parser().parse_args(arguments)
    if options.schema:
        print(json.dumps(schema(), indent=2))
        return 0
    if not options.traces:
        print("lockstep check: name a run directory or a trace; --help says more", file=sys.stderr)
        return 2
    status = 0
    for place in options.traces:
        try:
            status = max(status, _check(place, options))
        except (TraceError, OSError) as error:
            print(f"lockstep check: {error}", file=sys.stderr)
            status = 2
    return status


def _check(place: str, options: argparse.Namespace) -> int:
    if options.source is not None:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(options.write or Path(folder) / FILE)
            importers.write(options.source, Path(place), trace)
            return _check_trace(trace, place, options)
    path = find(place)
    return _check_trace(path, str(path), options)


def _check_trace(path: Path, place: str, options: argparse.Namespace) -> int:
    start = time.perf_counter()
    result = check(path, Limit(options.limit, options.at, options.unit))
    _print(place, result, options.explain, time.perf_counter() - start)
    if options.against is None:
        return 1 if result.broken else 0
    count, difference = first_difference(path, find(options.against))
    if difference:
        print(f"  the same training      broken       {difference}")
    elif not count:
        print("  the same training      not checked  neither trace has an update")
    else:
        print(f"  the same training      holds        {count} updates, as in {options.against}")
    return 1 if result.broken or difference else 0


def _print(place: str, result: CheckResult, explain: bool, seconds: float) -> None:
    program = f" by {result.program}" if result.program else ""
    print(
        f"{place}: {result.events:,} events{program}, at most {result.most_in_flight:,} samples in "
        f"flight; read in {seconds:.1f} s"
    )
    if result.reading.cut:
        print(f"  its last line, {result.reading.lines}, is cut, and is left out")
    for name, count in result.reading.unknown.items():
        print(f"  {count:,} events of an unknown kind, {name!r}, are left out")
    width = max(len(finding.rule.name) for finding in result.findings)
    for finding in result.findings:
        print(f"  {finding.rule.name:{width}}  {finding.verdict:11}  {_detail(finding)}".rstrip())
        if explain and finding.holds is not True:
            _explain(finding, width)
    print(_summary(result))


def _detail(finding: Finding) -> str:
    if finding.holds is None:
        return f"the trace lacks {finding.rule.needs}"
    if finding.holds:
        return "; ".join([f"{finding.judged:,} checked", *([finding.note] if finding.note else [])])
    where = f"line {finding.line}: " if finding.line else ""
    more = f" ({finding.broken:,} in all)" if finding.broken > 1 else ""
    note = f"; {finding.note}" if finding.note else ""
    return f"{where}{finding.first}{more}{note}"


def _explain(finding: Finding, width: int) -> None:
    text = inspect.getdoc(inspect.getmodule(finding.rule)) or ""
    for line in [*text.splitlines(), "", f"What to do: {finding.rule.advice}"]:
        print(f"  {'':{width}}  | {line}".rstrip())


def _summary(result: CheckResult) -> str:
    counts = {True: 0, False: 0, None: 0}
    for finding in result.findings:
        counts[finding.holds] += 1
    return f"{counts[False]} broken, {counts[True]} hold, {counts[None]} not checked"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep check",
        description="Check what must hold of stale weights, in a trace of any program.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traces", nargs="*", help="run directories or files of events")
    parser.add_argument("--limit", type=_age, help="the oldest age that the program allows")
    parser.add_argument(
        "--at", choices=("made", "taken", "use"), default="use", help="when it is judged (use)"
    )
    parser.add_argument(
        "--unit",
        choices=("updates", "steps", "versions"),
        default="updates",
        help="of the limit (updates)",
    )
    parser.add_argument("--against", metavar="TRACE", help="a trace with the same training")
    parser.add_argument(
        "--from",
        dest="source",
        choices=sorted(importers.IMPORTERS),
        help="the program whose records the directory has, in place of a trace",
    )
    parser.add_argument("--write", metavar="TRACE", help="keep the trace that --from makes")
    parser.add_argument(
        "--explain", action="store_true", help="where a rule comes from, and what to do"
    )
    parser.add_argument("--schema", action="store_true", help="print the format as a JSON Schema")
    return parser


def _age(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
