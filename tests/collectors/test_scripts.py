"""Workers start from scripts of every kind, or the error says what the script lacks."""

from __future__ import annotations

import sys
from types import ModuleType

import gymnasium as gym
import pytest

from collectors import MultiSyncCollector
from sync import WorkerDied


def collect(**options):
    make = [lambda: gym.make("CartPole-v1")]
    with MultiSyncCollector(make, frames_per_batch=10, **options) as collector:
        return collector.next()


@pytest.fixture
def script(monkeypatch):
    """Has this process be that of a script, as workers see it."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return lambda path: setattr(main, "__file__", path)


def test_a_script_that_came_by_stdin_cannot_be_imported_and_may_be_forked(script):
    script("<stdin>")
    with pytest.raises(
        ValueError, match=r"was read from stdin; save it in a file, or use .*'fork'"
    ):
        collect()
    assert collect(start_method="fork").batch_size[1] == 10


def test_a_script_that_workers_cannot_import_is_told_what_it_lacks(script, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("from tests.collectors.test_scripts import collect\n\ncollect()\n")
    script(str(path))
    with pytest.raises(
        WorkerDied, match=r"worker 0.*create the collector below `if __name__ == '__main__':`"
    ):
        collect()
