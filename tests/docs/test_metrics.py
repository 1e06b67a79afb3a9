"""The reference of metrics describes what runs log, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness.command import main
from harness.measures import BUCKETS
from tests.docs.pages import read

SMALL = ("model.hidden_sizes=[16]", "evaluation.num_episodes=1", "env.num_envs=4", "logger=jsonl")
PPO = (*SMALL, "total_frames=384", "collector.frames_per_batch=128", "algo.minibatch_size=64")
REPLAY = (
    *(*SMALL, "total_frames=192", "collector.frames_per_batch=16", "collector=single"),
    *("algo.learning_starts=32", "algo.batch_size=16", "algo.buffer_size=1000"),
)
RUNS = (
    (*PPO, "collector=multi_async", "sync=hogwild", "algo.target_kl=1"),
    (
        *(
            "experiment=grpo_tokens",
            "algo.objective=vcpo",
            "algo.minibatch_size=24",
            "logger=jsonl",
        ),
        *("total_frames=96", "collector.frames_per_batch=48", "env.num_envs=16"),
        *("env.kwargs={task: sort, length: 3, group_size: 4}", "evaluation.num_episodes=1"),
        *("model.hidden_sizes=[16]", "model.width=8", "model.heads=2"),
    ),
    (
        *(*PPO, "collector=multi_sync", "collector.preemptive_threshold=0.5"),
        *("sync.link.preset=lan", "sync.wire=int8", "sync.verify=every"),
        "algo.objective=vaco",
    ),
    (*PPO, "collector=simulated", "algo.objective=geometric", "model=lstm"),
    (*SMALL, "total_frames=384", "collector.frames_per_batch=128", "algo=impala"),
    (*REPLAY, "algo=sac", "env=pendulum"),
    (*REPLAY, "algo=dqn", "collector=multi_async", "collector.free_running=true"),
)
ROWS = re.findall(r"^\| `([^`]+)` \| \S", read("docs/metrics.md"), re.MULTILINE)
DESCRIBED = set(ROWS)
# Logged on a GPU, with wrappers that change rewards, and of lags that no short run has.
RARE = {"system/cuda_memory_mb", "episode/wrapped_return"}
RARE |= {name for name in DESCRIBED if name.rpartition("/")[2] in BUCKETS}


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> set[str]:
    """The names in the records and summaries of small runs of every kind."""
    names: set[str] = set()
    for number, overrides in enumerate(RUNS):
        directory = tmp_path_factory.mktemp("runs") / str(number)
        assert main([*overrides, f"hydra.run.dir={directory}"]) == 0
        names |= names_in(directory)
    return names


def names_in(directory: Path) -> set[str]:
    """The names in a run's records and summary."""
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    summary = json.loads((directory / "summary.json").read_text())
    return {name for record in (*records, summary) for name in record}


def test_every_metric_is_described_once():
    assert len(ROWS) == len(DESCRIBED)


def test_every_logged_metric_is_described(logged):
    assert logged - {"step", "time"} - DESCRIBED == set()


def test_every_described_metric_is_logged(logged):
    assert DESCRIBED - RARE - logged == set()
