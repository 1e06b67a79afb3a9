"""Shutdown, however it comes, is bounded and silent, and leaves nothing on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import shm_entries

ROOT = Path(__file__).parents[2]
PROGRAM = """
import gc, multiprocessing, os, signal, sys, warnings
import torch
from tests.promises.probe import SCHEMES, Findings, VersionPolicy, read

# Not with -W: the resource tracker would be started with it too, and keep its word to itself.
warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)


def work(scheme, worker, background, width):
    policy = VersionPolicy(width)
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    scheme.connect(background=background)
    print("ready", flush=True)
    try:
        while True:
            scheme.receive(timeout=60.0)
    except ConnectionError:
        pass


def main(kind, method, background, ending, width=300):
    torch.set_num_threads(1)
    ctx = multiprocessing.get_context(method)
    scheme, policy = SCHEMES[kind](), VersionPolicy(width)
    scheme.init_on_sender(model=policy, devices=["cpu", "cpu"])
    processes = [ctx.Process(target=work, args=(scheme, w, background, width)) for w in range(2)]
    for process in processes:
        process.start()
    scheme.connect()
    for version in range(1, 20):
        policy.hold(version)
        scheme.send_async()
    scheme.wait_async()
    if ending == "twice":
        scheme.shutdown()
        scheme.shutdown()
    elif ending == "del":
        del scheme
        gc.collect()
    elif ending == "crash":
        raise RuntimeError("the user's own mistake")
    elif ending == "killed":
        print("now", flush=True)
        signal.pause()
    elif ending == "exit":
        pass  # the interpreter goes down with everything open


if __name__ == "__main__":
    kind, method, background, *endings = sys.argv[1:]
    for ending in endings:
        main(kind, method, background == "background", ending)
"""


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, "-X", "dev", str(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def wait_for_end_of_session(session: int) -> None:
    deadline = time.monotonic() + 20.0
    while left := of_session(session):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


# Each program takes seconds to load torch: every scheme and every way is met, not every pair.
EITHER_WAY = [
    ("shared_copy", "polling"),
    ("shared_zero_copy", "background"),
    ("multiprocess", "polling"),
    ("multiprocess", "background"),
]


@pytest.mark.parametrize(("kind", "background"), EITHER_WAY)
def test_shutdown_twice_from_del_and_at_exit_is_silent(tmp_path, kind, background):
    before = shm_entries()
    process = start(tmp_path, kind, "fork", background, "twice", "del", "exit")
    try:
        _, errors = process.communicate(timeout=60.0)
    finally:
        kill_session(process.pid)
    assert (process.returncode, errors) == (0, "")
    assert shm_entries() <= before


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("shared_copy", "spawn"),
        pytest.param("shared_zero_copy", "forkserver", marks=pytest.mark.slow),
        pytest.param("multiprocess", "spawn", marks=pytest.mark.slow),
    ],
)
def test_spawned_workers_leave_nothing_either(tmp_path, kind, method):
    before = shm_entries()
    process = start(tmp_path, kind, method, "background", "twice")
    try:
        _, errors = process.communicate(timeout=60.0)
    finally:
        kill_session(process.pid)
    assert (process.returncode, errors) == (0, "")  # no word from the resource tracker
    assert shm_entries() <= before


@pytest.mark.parametrize("kind", ["shared_zero_copy", "multiprocess"])
def test_a_crash_shows_the_users_error_and_nothing_of_ours(tmp_path, kind):
    before = shm_entries()
    process = start(tmp_path, kind, "fork", "polling", "crash")
    try:
        _, errors = process.communicate(timeout=60.0)
    finally:
        kill_session(process.pid)
    assert process.returncode == 1
    assert errors.strip().endswith("RuntimeError: the user's own mistake")
    assert errors.count("Traceback") == 1
    assert shm_entries() <= before


@pytest.mark.parametrize(("kind", "background"), EITHER_WAY)
def test_when_the_trainer_is_killed_its_workers_notice_and_end(tmp_path, kind, background):
    before = shm_entries()
    process = start(tmp_path, kind, "fork", background, "killed")
    try:
        assert process.stdout is not None
        while process.stdout.readline() != "now\n":
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10.0)
        wait_for_end_of_session(process.pid)
        assert process.stderr is not None
        assert process.stderr.read() == ""
    finally:
        kill_session(process.pid)
        process.stdout.close()
        process.stderr.close()
    assert shm_entries() <= before


def kill_session(session: int) -> None:
    for process in of_session(session):
        process.kill()
