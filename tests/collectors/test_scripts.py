"""Workers start from scripts of every kind, or the error says what the script lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import gymnasium as gym
import torch
from collectors import MultiSyncCollector


class Mine(gym.Wrapper):
    pass


class Policy(torch.nn.Linear):
    def forward(self, observation):
        return super().forward(observation).argmax(-1)


with MultiSyncCollector(
    lambda: Mine(gym.make("CartPole-v1")), Policy(4, 2), frames_per_batch=10
) as collector:
    collector.update_policy_weights_()
    print(collector.next()["policy_version"].unique().tolist())
"""


def run(*command, **options):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def test_a_script_may_come_by_stdin():
    ended = run("-", input=SCRIPT)
    assert ended.stdout == "[1]\n", ended.stderr


def test_a_script_whose_workers_would_run_it_again_is_told_what_it_lacks(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    ended = run(str(path))
    last = ended.stderr.splitlines()[-1]
    assert "worker 0" in last
    assert "must stand below `if __name__ == '__main__':`" in last
