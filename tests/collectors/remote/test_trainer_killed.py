"""When the trainer is killed, its workers on other machines notice and end."""

from __future__ import annotations

import os
import signal

import pytest

from tests.collectors.remote.support import RAY_IS_SLOW
from tests.collectors.test_shutdown import in_session, of_session
from tests.collectors.troubled import is_gone, wait_until

PROGRAM = """
import signal, sys
from tests.collectors.remote.support import make
from tests.collectors.troubled import Plain, Troubled, told

if __name__ == "__main__":
    collector = make(
        sys.argv[1], Troubled, Plain(), num_workers_per_collector=2, create_env_kwargs=told(4),
        frames_per_batch=40,
    )
    collector.next()
    print(*(worker["pid"] for worker in collector.stats()["workers"]), flush=True)
    signal.pause()
"""


@pytest.fixture(scope="module", autouse=True)
def a_cluster() -> None:
    """None here: the program starts one of its own."""


@pytest.mark.parametrize("kind", RAY_IS_SLOW)
def test_nothing_outlives_a_trainer_that_is_killed(tmp_path, kind):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with in_session(str(file), kind) as process:
        assert process.stdout is not None
        pids = list(map(int, process.stdout.readline().split()))
        assert len(pids) == 4
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=60.0)
        wait_until(lambda: all(is_gone(pid) for pid in pids))
        if kind != "ray":  # two agents of Ray's own stay for longer
            wait_until(lambda: not of_session(process.pid))
