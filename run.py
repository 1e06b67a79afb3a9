"""The command: compose the config, check it, run it.

    python run.py --help

Nothing heavy is imported here: every worker process imports this file once more.
"""

import os
import signal
import sys

USAGE_ERROR, INTERRUPTED, UNREAD = 2, 130, 141
# torch's RPC warns of every connection that ends, also of those that are to. Read when torch loads.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def main(arguments: list[str]) -> int:
    """Do what the command line says; the exit status."""
    try:
        status = command(arguments)
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:  # before there was a run to end
        return INTERRUPTED
    except BrokenPipeError:  # nobody reads what was asked for: `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def command(arguments: list[str]) -> int:
    """The same, where Ctrl-C may end it anywhere."""
    from harness.arguments import split_arguments

    flags, overrides = split_arguments(arguments)
    if flags.help:
        from harness.help import UnknownGroup, page

        try:
            print(page(flags.help_topic))
        except UnknownGroup as error:
            print(f"run.py: {error}", file=sys.stderr)
            return USAGE_ERROR
        return 0

    from harness.config import ConfigError, plan_run
    from harness.config.sweep import run_sweep, show_config

    try:
        if flags.show_config:
            return show_config(overrides)
        if flags.multirun:
            return run_sweep(overrides)
        plan = plan_run(overrides)

        from harness.execution import execute

        return execute(plan).exit_status
    except ConfigError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return USAGE_ERROR


if __name__ == "__main__":
    status = main(sys.argv[1:])
    for signum in (signal.SIGINT, signal.SIGTERM):  # all is said, and what is left takes no time
        signal.signal(signum, signal.SIG_IGN)
    sys.exit(status)
