"""Composes commands without running them: `python -m tests.docs.compose` in an empty folder.

Reads a list of [program, arguments] from stdin, and prints a list of [exit status, stderr].
Everything up to the start of a run is done: options are parsed, the run or some jobs of the sweep
are composed and checked. Of other modules only the arguments are parsed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from typing import Any

from harness import application, command
from harness.sweep import sweep

MOST_JOBS = 2


def compose(arguments: list[str]) -> int:
    """What `run.py` would do, up to the first run; the exit status."""
    try:
        return command.main(arguments)
    except SystemExit as ended:  # of report, reproduce and the like
        return int(ended.code or 0)


def parse(module: str, arguments: list[str]) -> int:
    """Parse the arguments as the module's `main` does; the exit status."""
    try:
        found = importlib.import_module(module)
        if hasattr(found, "main"):
            found.main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def stop_at_the_start() -> None:
    """Let every command end where it would start to work."""

    def stop(*_: Any, **__: Any) -> None:
        raise SystemExit(0)

    def checked(self: sweep.Sweep) -> None:
        check_sweep(self)
        stop()

    def parsed(name: str) -> Any:
        parse_arguments = getattr(argparse.ArgumentParser, name)

        def method(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            options = parse_arguments(self, *args, **kwargs)
            return stop() if (self.prog or "").startswith("lockstep ") else options

        return method

    def some_jobs(*args: Any, **kwargs: Any) -> list[list[str]]:
        found = all_jobs(*args, **kwargs)
        return found[:: 1 + len(found) // MOST_JOBS]

    check_sweep, all_jobs = sweep.Sweep.check, sweep.jobs_of
    sweep.jobs_of = some_jobs
    sweep.Sweep.check = checked
    for name in ("_as_job_of_hydra", "_run", "job"):
        assert hasattr(application, name)
        setattr(application, name, stop)
    for name in ("parse_args", "parse_intermixed_args"):
        setattr(argparse.ArgumentParser, name, parsed(name))


def main() -> None:
    """Compose them all."""
    stop_at_the_start()
    results = []
    for program, arguments in json.load(sys.stdin):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = compose(arguments) if program == "run.py" else parse(program, arguments)
        results.append([status, said.getvalue()])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
