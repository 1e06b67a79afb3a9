"""The console command `lockstep`, which does the same as run.py.

Nothing heavy is imported here: every worker process imports the command's file once more.
"""

from __future__ import annotations

import os
import signal
import sys

# torch's RPC warns of every connection that ends, also of those that are to. Read when torch loads.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    from harness.config.application import main as application

    return application(arguments)


def run_command() -> None:
    """Do it and end the process."""
    status = main()
    for signum in (signal.SIGINT, signal.SIGTERM):  # all is done, and the rest takes no time
        signal.signal(signum, signal.SIG_IGN)
    sys.exit(status)
