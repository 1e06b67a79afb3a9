"""Apply each change of the table alone, run its tests, and print which test noticed it.

The tests run in copies of the working tree, so its code is never changed, and slow tests are left
out. The case that noticed a change is recorded in witnesses.txt: it is then among what `make test`
runs (tests/selection.py). Exit status 1 if a change went unnoticed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.table import ROOT, Mutant, read_mutants, read_witnesses, write_witnesses

PASSED, FAILED = 0, 1  # of pytest's exit statuses, those of a run in which the tests ran


@dataclass
class Outcome:
    mutant: Mutant
    noticed_by: str  # the first test that failed, or ""
    seconds: float
    error: str = ""  # why the tests did not run


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    mutants = [m for m in read_mutants() if is_chosen(m, options.names)]
    if not mutants:
        sys.exit(f"mutants: none has {' or '.join(options.names)} in its name or its file")
    for mutant in mutants:
        mutant.applied_to((ROOT / mutant.file).read_text())
    with tempfile.TemporaryDirectory(prefix="lockstep-mutants-") as folder:
        copies = [copy_tree(Path(folder) / str(index)) for index in range(options.jobs)]
        if not options.skip_unchanged:
            check_unchanged(copies[0], mutants, options.jobs)
        outcomes = run_all(mutants, copies)
    print_table(outcomes)
    if options.json:
        rows = [asdict(outcome) for outcome in outcomes]
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(not outcome.noticed_by for outcome in outcomes))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names or files; all changes by default")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="changes at a time (%(default)s)")
    parser.add_argument(
        "--skip-unchanged", action="store_true", help="do not run the tests without a change first"
    )
    parser.add_argument("--json", metavar="FILE", help="write the outcomes to this file, too")
    return parser.parse_args(arguments)


def is_chosen(mutant: Mutant, names: Sequence[str]) -> bool:
    return not names or any(name in mutant.name or name in mutant.file for name in names)


def copy_tree(target: Path) -> Path:
    """A copy of what git tracks or would add, with the times of the files."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def check_unchanged(copy: Path, mutants: Sequence[Mutant], jobs: int) -> None:
    """The tests must pass without a change, or their failures say nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    print(f"{len(tests)} tests without a change", flush=True)
    status, output = run_tests(copy, tests, "-n", str(jobs), write_bytecode=True)
    if status != PASSED:
        sys.exit(f"{output}\nmutants: the tests do not pass without a change")


def run_all(mutants: Sequence[Mutant], copies: Sequence[Path]) -> list[Outcome]:
    """Each change in whichever copy is free."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run(mutant: Mutant) -> Outcome:
        copy = free.get()
        try:
            outcome = run_one(mutant, copy)
        finally:
            free.put(copy)
        word = outcome.error or (outcome.noticed_by and "noticed") or "NOT NOTICED"
        print(f"{outcome.seconds:6.1f} s  {mutant.name}: {word}", flush=True)
        return outcome

    with ThreadPoolExecutor(len(copies)) as threads:
        try:
            outcomes = []
            for outcome in threads.map(run, mutants):
                record([outcome])  # at once: whoever interrupts this loses nothing
                outcomes.append(outcome)
            return outcomes
        except KeyboardInterrupt:
            threads.shutdown(cancel_futures=True)
            raise


def run_one(mutant: Mutant, copy: Path) -> Outcome:
    path = copy / mutant.file
    original, times = path.read_text(), path.stat()
    path.write_text(mutant.applied_to(original))
    start = time.monotonic()
    try:
        status, output = run_tests(copy, mutant.tests, "-x", "-n", "0", write_bytecode=False)
    finally:
        path.write_text(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # so that its bytecode is valid
    seconds = time.monotonic() - start
    if status == PASSED:
        return Outcome(mutant, "", seconds)
    failures = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if status == FAILED and failures:
        return Outcome(mutant, failures[0], seconds)
    return Outcome(mutant, "", seconds, f"the tests did not run: {output[-2000:]}")


def run_tests(
    copy: Path, tests: Sequence[str], *options: str, write_bytecode: bool
) -> tuple[int, str]:
    """pytest's exit status and output. A changed file's bytecode is not written: two texts of one
    size within one second are the same to Python."""
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    if write_bytecode:
        del environment["PYTHONDONTWRITEBYTECODE"]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *options, *tests],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout


def record(outcomes: Sequence[Outcome]) -> None:
    """Keep who noticed; forget changes that are no longer in the table."""
    new = {outcome.mutant.name: outcome.noticed_by for outcome in outcomes}
    names = {mutant.name for mutant in read_mutants()}
    witnesses = {name: test for name, test in read_witnesses().items() if name in names}
    write_witnesses({name: test for name, test in (witnesses | new).items() if test})


def print_table(outcomes: Sequence[Outcome]) -> None:
    print("\n| change | noticed by | s |\n|---|---|--:|")
    for outcome in outcomes:
        test = outcome.noticed_by.split("/")[-1] or "**nothing**"
        what = f"{outcome.mutant.file}: {outcome.mutant.what}"
        print(f"| {what} | {test} | {outcome.seconds:.0f} |")
    noticed = sum(bool(outcome.noticed_by) for outcome in outcomes)
    print(f"\n{noticed} of {len(outcomes)} changes noticed")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
