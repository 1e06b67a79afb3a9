"""Run an experiment or a sweep: `python run.py --help`. Installed, it is called `lockstep`."""

from harness.command import main, run_command

__all__ = ["main"]

if __name__ == "__main__":
    run_command()
