"""Each test's processor time, and the list of dear tests that follows: `make costs`.

Wall times of tests that run side by side say little. Counted is what the process of the tests used
between two tests, what its children used that have ended, and the same of its fork server. What
detaches from them is not counted: Ray's daemons.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.selection import DEAR, function_of, read_dear

LIMIT_S = 0.5  # of all cases of a function together
# What tests import only when they need it: the first one in a process would seem dear.
LAZY = ("torch._dynamo", "torch.testing", "scipy.stats", "pandas", "matplotlib.pyplot", "wandb")
TICKS = os.sysconf("SC_CLK_TCK")


class Costs:
    """A plugin of pytest that writes seconds by test, also where tests run side by side."""

    def __init__(self, file: str):
        self.file = Path(file)
        self.seconds: dict[str, float] = defaultdict(float)
        self.before = used()

    def pytest_collection_finish(self) -> None:
        import_what_is_large()
        self.before = used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            now = used()
            report.user_properties.append(("processor_s", now - self.before))
            self.before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.seconds[report.nodeid] += dict(report.user_properties).get("processor_s", 0.0)

    def pytest_sessionfinish(self) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            rounded = {test: round(value, 2) for test, value in sorted(self.seconds.items())}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(rounded, indent=0) + "\n")


def import_what_is_large() -> None:
    for name in LAZY:
        importlib.import_module(name)


def used() -> float:
    """Seconds of this process, of its fork server, and of children of both that have ended."""
    own = os.times()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    try:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # there is none
        fields = ["0"] * 15
    return sum(own[:4]) + sum(map(int, fields[11:15])) / TICKS


def dear(seconds: dict[str, float]) -> list[str]:
    """The functions whose cases take more than the limit together."""
    by_function: dict[str, float] = defaultdict(float)
    for test, value in seconds.items():
        by_function[function_of(test)] += value
    return sorted(name for name, value in by_function.items() if value > LIMIT_S)


def main(file: str) -> None:
    """Write tests/dear.txt from measured seconds, and print what is new and what no longer is."""
    before = set(read_dear())
    names = dear(json.loads(Path(file).read_text()))
    DEAR.write_text("".join(f"{name}\n" for name in names))
    for sign, changed in (("+", set(names) - before), ("-", before - set(names))):
        print("".join(f"{sign} {name}\n" for name in sorted(changed)), end="")
    print(f"{len(names)} dear functions")


if __name__ == "__main__":
    main(*sys.argv[1:])
