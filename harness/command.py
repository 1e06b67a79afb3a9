"""The console command `lockstep`, which does the same as run.py.

    lockstep group=name option=value      a run or a sweep
    lockstep report RUN_DIRECTORY         one of `COMMANDS`, as does `python -m harness.report`

Nothing heavy is imported here: every worker process imports the command's file once more.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from harness import COMMANDS

# torch's RPC warns of every connection that ends, also of those that are to. Read when torch loads.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and arguments[0] in COMMANDS:
            status: int = import_module(COMMANDS[arguments[0]]).main(arguments[1:])
            return status
        from harness.application import main as application

        return application(arguments)
    except KeyboardInterrupt:  # before there was a run to end, also while modules load
        print("lockstep: interrupted by SIGINT", file=sys.stderr)
        return INTERRUPTED


def run_command() -> None:
    """Do it and end the process."""
    status = main()
    for signum in (signal.SIGINT, signal.SIGTERM):  # all is done, and the rest takes no time
        signal.signal(signum, signal.SIG_IGN)
    sys.exit(status)


if __name__ == "__main__":
    run_command()
