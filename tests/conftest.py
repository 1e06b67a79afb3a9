"""What every test gets: a check that it left nothing running, and skips for absent hardware."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import costs
from tests.selection import divided, is_plain

SHM = Path("/dev/shm")
LEFTOVER_WAIT_S = 30.0
SELECTED = pytest.StashKey[str]()  # how many cases run, of how many
RAY_S = 300.0  # for a test and the start of its cluster, which takes a minute where others run too
# How what multiprocessing, torch and Lockstep put there is called; others put things there too.
OURS = ("sem.mp-", "psm_", "torch_", "lockstep")

# A forked child must not clear away what other tests left in this process: of Ray's objects, some
# crash or wait for ever when that is tried.
os.register_at_fork(after_in_child=gc.freeze)

# Tests run side by side, each with workers: with a thread for each core, small operations would
# mostly wait for each other. Set before torch is imported, and inherited by all processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What a fork server loads for the workers, nodes and probes of tests.
PRELOAD = (
    "collectors.multi",
    "collectors.single",
    "collectors.remote.host",
    "gymnasium.envs.classic_control",
    "sync.remote.rpc_engine",
    "tests.promises.probe",
    "tests.promises.remote_probe",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection", "see tests/selection.py")
    group.addoption("--all", action="store_true", help="run the dear tests, too")
    group.addoption("--rest", action="store_true", help="run what is left out without --all")
    group.addoption("--costs", metavar="FILE", help="write each test's processor time to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Have the tests of a process share a fork server that loads what workers need once."""
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    if config.option.costs:
        config.pluginmanager.register(costs.Costs(config.option.costs))


def pytest_sessionstart() -> None:
    """Where tests run side by side, start that server at once: it loads while others begin."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        forkserver.ensure_running()


@pytest.fixture(autouse=True)
def experiments_register_nothing_for_others() -> Iterator[None]:
    """Forget the parts that an experiment's own module, named by its `plugins`, has registered."""
    yield
    if "benchmarks.dropping" in sys.modules:
        from harness.registry import callbacks

        callbacks._parts.pop("used_episodes", None)
        del sys.modules["benchmarks.dropping"]


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave dear tests out; give Ray time to start; skip `cuda` tests without a CUDA device."""
    if is_plain(config):
        plain, rest = divided(items)
        chosen, others = (rest, plain) if config.option.rest else (plain, rest)
        config.hook.pytest_deselected(items=others)
        config.stash[SELECTED] = f"{len(chosen)} of {len(items)}"
        items[:] = chosen
    for item in items:
        if re.search(r"(?<![a-z])ray(?![a-z])", item.nodeid):
            item.add_marker(pytest.mark.timeout(RAY_S), append=False)
    cuda_items = [item for item in items if item.get_closest_marker("cuda")]
    if cuda_items:
        import torch  # here, since most runs of a few tests need not wait for it

        if not torch.cuda.is_available():
            for item in cuda_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        output = session.config.workeroutput  # type: ignore[attr-defined]
        output["selected"] = session.config.stash.get(SELECTED, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Keep what a process of tests says at its end: all of them collect the same."""
    node.config.stash[SELECTED] = getattr(node, "workeroutput", {}).get("selected", "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    if selected := config.stash.get(SELECTED, ""):
        command = "make test" if config.option.rest else "make rest"
        terminalreporter.write_line(f"selection: {selected} cases; `{command}` runs the others")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is a fresh one: what a test runs writes there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which child processes or entries in /dev/shm remain."""
    processes, shm = child_processes(), shm_entries()
    yield
    deadline = time.monotonic() + LEFTOVER_WAIT_S
    while leftovers := describe(child_processes() - processes, shm_entries() - shm):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {'; '.join(leftovers)}", pytrace=False)
        gc.collect()  # what only a reference cycle still holds is not left behind
        time.sleep(0.02)


def child_processes() -> set[psutil.Process]:
    """Living descendants, without the two helpers that multiprocessing keeps for good."""
    helpers = {
        forkserver._forkserver._forkserver_pid,
        resource_tracker._resource_tracker._pid,
    }
    return {
        child for child in descendants(os.getpid()) if child.pid not in helpers and is_alive(child)
    }


def descendants(pid: int) -> Iterator[psutil.Process]:
    """Children, and theirs. psutil would look at every process of the machine to find them."""
    for child in children_of(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(child)
            yield from descendants(child)


def children_of(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children += map(
                    int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
                )
    return children


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shm_entries() -> set[str]:
    names = os.listdir(SHM) if SHM.is_dir() else []
    return {name for name in names if name.startswith(OURS)}


def describe(processes: set[psutil.Process], shm: set[str]) -> list[str]:
    """Name what is left; shared memory that a program outside this test run maps is its own."""
    ours = {os.getpid()} | {child.pid for child in psutil.Process().children(recursive=True)}
    return [f"process {child.pid} ({command_line(child)})" for child in processes] + [
        f"{SHM / name}" for name in sorted(shm) if not is_mapped_outside(ours, SHM / name)
    ]


def is_mapped_outside(ours: set[int], file: Path) -> bool:
    """Told by the inode: whoever creates a semaphore maps it under another name."""
    try:
        inode = str(file.stat().st_ino)
    except FileNotFoundError:  # it was just removed
        return True
    return any(inode in shared_memory_of(pid) for pid in psutil.pids() if pid not in ours)


def shared_memory_of(pid: int) -> set[str]:
    """The inodes of what a process maps from /dev/shm."""
    lines = [line.split(maxsplit=5) for line in memory_map(pid).splitlines()]
    return {line[4] for line in lines if line[-1].startswith(f"{SHM}/")}


def memory_map(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # gone, or not ours to read
        return ""


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "ended meanwhile"
