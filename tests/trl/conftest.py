"""Short trainings of TRL's trainer with a model of 84,000 parameters."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import pytest
import torch

UPDATES = 12


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    from examples import trl_lag

    torch.set_num_threads(1)
    return trl_lag.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path):
    """Train, in a run directory of that name: 16 answers an update, 4 to each prompt."""
    from examples import trl_lag

    def start(name: str, updates: int = UPDATES, model: str = model, **options) -> Trained:
        trained = trl_lag.train(
            model,
            run_dir=tmp_path / name,
            updates=updates,
            **{"batch": 16, "num_generations": 4, "size": 2, "eval_prompts": None, **options},
        )
        return Trained(tmp_path / name, *trained)

    return start


class Trained:
    def __init__(self, path: Path, rollouts, trainer):
        self.path, self.rollouts, self.record = path, rollouts, rollouts.record
        parameters = [one.detach().numpy().tobytes() for one in trainer.model.parameters()]
        self.weights = hashlib.sha256(b"".join(parameters)).hexdigest()

    @functools.cached_property
    def records(self) -> list[dict]:
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if "policy/lag_mean" in line]

    def each(self, metric: str) -> list[float]:
        """One number for each update."""
        return [record[metric] for record in self.records]

    @property
    def acted(self) -> list[list[int]]:
        """The versions of each batch of the schedule, as pairs (token, version)."""
        lines = (self.path / "schedule.jsonl").read_text().splitlines()[1:]
        return [json.loads(line)["versions"] for line in lines]
