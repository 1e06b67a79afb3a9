"""The check for leftovers must itself catch what it is there for."""

import multiprocessing
import os
import re
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from tests import conftest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")


def test_a_running_worker_is_seen_and_multiprocessings_own_helpers_are_not():
    context = multiprocessing.get_context("forkserver")
    before = conftest.child_processes()
    stop = context.Event()
    worker = context.Process(target=stop.wait, args=(60,))
    worker.start()
    assert {process.pid for process in conftest.child_processes() - before} == {worker.pid}
    stop.set()
    worker.join(30)
    assert conftest.child_processes() == before


def test_shared_memory_counts_unless_a_program_outside_maps_it():
    block = shared_memory.SharedMemory(create=True, size=64)
    fork = multiprocessing.get_context("fork")
    stop = fork.Event()
    worker = fork.Process(target=stop.wait, args=(60,))  # inherits the mapping
    try:
        assert conftest.describe(set(), {block.name}) == [f"/dev/shm/{block.name}"]
        worker.start()
        file = conftest.SHM / block.name
        assert conftest.is_mapped_outside({os.getpid()}, file)
        assert not conftest.is_mapped_outside({os.getpid(), worker.pid}, file)
    finally:
        stop.set()
        worker.join(30)
        block.close()
        block.unlink()


def test_a_test_that_leaves_something_behind_fails(tmp_path):
    """By a name that tests which run beside this one do not look for."""
    own = Path(conftest.__file__).read_text()
    (tmp_path / "conftest.py").write_text(f"{own}\nLEFTOVER_WAIT_S = 0.1\nOURS = ('of-a-test',)\n")
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    # Alone, it wants no fork server that loads what is shared by the tests of a process.
    alone = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    shown = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=110).stdout
    assert "3 passed, 2 errors" in shown
    assert re.search(r"left behind: process \d+ \(sleep 2\)", shown)
    assert re.search(r"left behind: /dev/shm/of-a-test", shown)


LEAKS = """
import subprocess
from multiprocessing import shared_memory

def test_process():
    subprocess.Popen(["sleep", "2"])

def test_memory():
    shared_memory.SharedMemory(create=True, size=64, name="of-a-test")

def test_neither():
    pass
"""
