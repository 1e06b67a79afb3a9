"""Shutdown, however it comes, is bounded and silent, and leaves nothing on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.conftest import shm_entries

ROOT = Path(__file__).parents[2]
# Each argument is a life of a scheme: its kind, the start method of its two workers, how they
# receive, and how it ends. A scheme without an end is open until the program ends.
PROGRAM = """
import gc, multiprocessing, signal, sys, warnings
import torch
from tests.promises.probe import SCHEMES, VersionPolicy

# Not with -W: the resource tracker would be started with it too, and keep its word to itself.
warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
open_schemes = []


def work(scheme, worker, background):
    policy = VersionPolicy(300)
    scheme.init_on_receiver(model=policy, worker_idx=worker)
    scheme.connect(background=background)
    try:
        while True:
            scheme.receive(timeout=100.0)
    except ConnectionError:
        pass


def live(kind, method, background, ending):
    torch.set_num_threads(1)
    ctx = multiprocessing.get_context(method)
    scheme, policy = SCHEMES[kind](), VersionPolicy(300)
    scheme.init_on_sender(model=policy, devices=["cpu", "cpu"])
    background = background == "background"
    processes = [ctx.Process(target=work, args=(scheme, w, background)) for w in range(2)]
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
    else:
        open_schemes.append(scheme)


if __name__ == "__main__":
    *lives, end = sys.argv[1:]
    for arguments in lives:
        live(*arguments.split(":"))
    if end == "crash":
        raise RuntimeError("the user's own mistake")
    if end == "wait":
        print("now", flush=True)
        signal.pause()
"""


@contextmanager
def program(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The program in a session of its own, which has ended and left nothing afterwards."""
    before = shm_entries()
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, "-X", "dev", str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    ) as process:
        try:
            yield process
            wait_for_end_of_session(process.pid)
        finally:
            for left in of_session(process.pid):
                left.kill()
    assert shm_entries() <= before


def of_session(session: int) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return processes


def wait_for_end_of_session(session: int) -> None:
    deadline = time.monotonic() + 20.0
    while left := of_session(session):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


OPEN = (
    "shared_copy:fork:polling:open",
    "shared_zero_copy:fork:background:open",
    "multiprocess:fork:polling:open",
    "multiprocess:fork:background:open",
)


def test_shutdown_twice_from_del_and_after_a_crash_is_silent(tmp_path):
    ended = [life.replace("open", ending) for life in OPEN for ending in ("twice", "del")]
    with program(tmp_path, *ended, *OPEN, "crash") as process:
        _, errors = process.communicate(timeout=100.0)
        assert process.returncode == 1
        assert errors.startswith("Traceback")
        assert errors.strip().endswith("RuntimeError: the user's own mistake")
        assert errors.count("Traceback") == 1


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("shared_copy", "spawn"),
        pytest.param("shared_zero_copy", "forkserver", marks=pytest.mark.slow),
        pytest.param("multiprocess", "spawn", marks=pytest.mark.slow),
    ],
)
def test_spawned_workers_and_open_schemes_leave_nothing_at_exit(tmp_path, kind, method):
    with program(tmp_path, f"{kind}:{method}:background:twice", *OPEN, "exit") as process:
        _, errors = process.communicate(timeout=100.0)
        assert (process.returncode, errors) == (0, "")  # no word from the resource tracker


def test_when_the_trainer_is_killed_its_workers_notice_and_end(tmp_path):
    with program(tmp_path, *OPEN, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        os.kill(process.pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=100.0)
        assert errors == ""
