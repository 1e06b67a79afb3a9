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
from collectors.starting import context

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
