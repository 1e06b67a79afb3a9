"""What the pulse may take for a failure of a host, and what it may not."""

from __future__ import annotations

import os
import signal
import threading
import time

from tests.collectors.remote.support import host_pids
from tests.collectors.remote.test_failures import gather, troubled
from tests.collectors.troubled import wait_until

TIMEOUT_S = 3.0


def test_a_pause_may_be_longer_than_what_counts_as_hanging():
    options = {"frames_per_batch": 2000, "timeout": TIMEOUT_S}
    with troubled("distributed", sync=False, **options) as collector:
        gather(collector, 2)
        pid = host_pids(collector)[1]
        with collector.pause():
            assert any(seat.owed for seat in collector.hosts)
            over = time.monotonic() + 1.1 * TIMEOUT_S
            wait_until(lambda: time.monotonic() > over)
            os.kill(pid, signal.SIGSTOP)  # it hears late that the pause is over
            threading.Timer(TIMEOUT_S / 3, os.kill, (pid, signal.SIGCONT)).start()
        gather(collector, 4)
