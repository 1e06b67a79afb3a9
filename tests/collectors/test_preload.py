"""A fork server tidies up after a trainer that cannot any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.collectors.troubled import is_gone, wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = """
import signal
from multiprocessing import forkserver
from collectors.workers.startup import context

context("forkserver")
print(forkserver._forkserver._forkserver_pid, flush=True)
signal.pause()
"""


def test_the_fork_server_of_a_killed_trainer_leaves_no_socket(tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        server = int(program.stdout.readline())
        assert list(tmp_path.glob("pymp-*/listener-*"))
        program.send_signal(signal.SIGKILL)
        program.wait()
        wait_until(lambda: is_gone(server))
        assert not list(tmp_path.glob("pymp-*"))
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


AFTER_ONE_FAILED = """
import os, socket
from multiprocessing import forkserver
from collectors.workers.startup import context

ctx, server = context("forkserver"), forkserver._forkserver
with socket.socket(socket.AF_UNIX) as line:
    line.connect(server._forkserver_address)  # and asks for nothing, which it does not bear
os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT)
process = ctx.Process(target=print, args=("started",))
process.start()
process.join()
"""


def test_where_a_fork_server_failed_another_can_be_started(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", AFTER_ONE_FAILED],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    assert done.stdout == "started\n", done.stderr
    assert not list(tmp_path.glob("pymp-*"))


AFTER_A_FORK = """
import os
from multiprocessing import forkserver
from collectors.workers.startup import context

context("forkserver")
held = forkserver._forkserver._forkserver_alive_fd
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    os.fstat(held)
    print("held")
except OSError:
    pass
process = context("forkserver").Process(target=print, args=("started",))
process.start()
process.join()
"""


def test_a_fork_of_the_trainer_starts_a_fork_server_of_its_own():
    """And holds on to none of the trainer's, which would not end with the trainer."""
    done = subprocess.run(
        [sys.executable, "-c", AFTER_A_FORK],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
