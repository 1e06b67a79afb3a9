"""The loop of a run, on parts that stand for an algorithm and a collector."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tensordict import TensorDict

from harness.run.training_loop import TrainingLoop

BATCH = TensorDict(
    {
        "policy_version": torch.zeros(2, 4, dtype=torch.int64),
        "collector": {
            "mask": torch.ones(2, 4, dtype=torch.bool),
            "traj_ids": torch.arange(2).repeat_interleave(4).view(2, 4),
            "env": torch.arange(2).repeat_interleave(4).view(2, 4),
        },
        "is_init": torch.zeros(2, 4, dtype=torch.bool),
        "next": {"reward": torch.ones(2, 4), "done": torch.zeros(2, 4, dtype=torch.bool)},
    },
    batch_size=[2, 4],
)


class Learner:
    """Says of each batch how many frames it dropped, and how many gradient steps it made."""

    ratios = None

    def __init__(self, dropped: int, gradient_steps: int):
        self.metrics = {"train/dropped": dropped, "train/gradient_steps": gradient_steps}

    def learn(self, batch: Any, version: int) -> dict[str, float]:
        return dict(self.metrics)

    def versions(self, batch: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)


def runner(learner: Any, **config: Any) -> TrainingLoop:
    names = ("collector", "sync", "published", "play", "checkpoints", "loggers")
    parts = {name: MagicMock() for name in (*names, "display", "interruption", "callbacks")}
    parts["collector"].policy_version = 0
    parts["collector"].newest_at_end = None
    config.setdefault("algo", SimpleNamespace(replays=False))
    config.setdefault("model", SimpleNamespace(recurrent=False))
    config["sync"] = SimpleNamespace(
        state_on_update="keep", apply_at="step", **config.get("sync", {})
    )
    config["collector"] = SimpleNamespace(workers=1, workers_of_a_batch=1)
    return TrainingLoop(
        config=SimpleNamespace(**config), directory=Path(), learner=learner, **parts
    )


@pytest.mark.parametrize(
    ("dropped", "gradient_steps", "learned"), [(8, 0, False), (5, 1, True), (0, 0, True)]
)
def test_an_update_that_drops_every_frame_does_not_count(dropped, gradient_steps, learned):
    made = runner(Learner(dropped, gradient_steps))
    assert made.update(BATCH) is learned
    assert (made.updates, made.dropped) == (int(learned), dropped)
    assert made.collector.skip_update.called is not learned


@pytest.mark.parametrize(
    ("metrics", "learned"),
    [({}, False), ({"train/gradient_steps": 0}, False), ({"train/gradient_steps": 2}, True)],
)
def test_a_batch_that_only_fills_the_replay_buffer_is_no_update(metrics, learned):
    learner = Learner(0, 0)
    learner.metrics = metrics
    made = runner(learner, algo=SimpleNamespace(replays=True))
    assert made.update(BATCH) is learned
    assert made.updates == int(learned)
    assert made.collector.skip_update.called is not learned


def test_weights_are_published_at_multiples_of_the_interval():
    made = runner(Learner(0, 1), sync={"interval": 3})
    for _ in range(7):
        made.update(BATCH)
        made.publish()
    assert made.collector.update_policy_weights_.call_count == 2
    assert made.published.add.call_count == 2
