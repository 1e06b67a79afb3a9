"""Ctrl-Z, or a scheduler, stops a run with all its processes for longer than any timeout."""

from __future__ import annotations

import os
import signal
import time

from tests.collectors.test_shutdown import in_session, wait_for

TIMEOUT_S = 8.0
PROGRAM = f"""
import time
import torch
torch.set_num_threads(1)
from collectors import MultiAsyncCollector
from tests.collectors.troubled import Plain, Troubled


class Slow(Troubled):
    def step(self, action):
        for _ in range(20):  # a long sleep would be over as soon as it is gone on with
            time.sleep(0.02)
        return super().step(action)


options = {{"frames_per_batch": 2, "timeout": {TIMEOUT_S}, "start_method": "fork"}}
with MultiAsyncCollector(Slow, Plain(), num_workers=1, **options) as collector:
    while True:
        collector.next()
        collector.update_policy_weights_()
        print("went on", flush=True)
"""


def test_a_run_that_was_stopped_as_a_whole_goes_on():
    with in_session("-c", PROGRAM) as run:
        wait_for(run, "went on")
        os.killpg(run.pid, signal.SIGSTOP)
        time.sleep(1.5 * TIMEOUT_S)
        os.kill(run.pid, signal.SIGCONT)  # it looks at its worker before that can go on
        time.sleep(0.3)
        os.killpg(run.pid, signal.SIGCONT)
        for _ in range(4):
            wait_for(run, "went on")
