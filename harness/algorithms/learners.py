"""The runner's view of an algorithm: batches go in, metrics come out.

An on-policy algorithm learns from each batch once. An off-policy one keeps batches in a replay
buffer and draws a number of samples for each new frame.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from collectors import ReplayBuffer
from harness.algorithms.interface import Algorithm, Ratios, ReplayAlgorithm
from harness.means import Means


class OnPolicy:
    """Each batch is learned from once."""

    def __init__(self, algorithm: Algorithm):
        self.algorithm: Any = algorithm

    @property
    def policy(self) -> nn.Module:
        """What is sent to the workers."""
        policy: nn.Module = self.algorithm.policy
        return policy

    def learn(self, batch: TensorDictBase, version: int) -> dict[str, float]:
        """Take in a batch while the newest published weights are of `version`; metrics."""
        return self.algorithm.update(batch, version)

    def versions(self, batch: TensorDictBase) -> Tensor:
        """The version behind each frame that `learn` has just used, given its batch."""
        stamps: Tensor = batch["policy_version"][batch["collector", "mask"]]
        return stamps

    @property
    def ratios(self) -> Ratios | None:
        """Importance ratios of the frames that `learn` has just used, if they are known."""
        return getattr(self.algorithm, "ratios", None)

    def state_dict(self) -> dict[str, Any]:
        return {"algorithm": self.algorithm.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.algorithm.load_state_dict(state["algorithm"])


class OffPolicy:
    """Batches go into a replay buffer, samples out of it.

    extend: whether to put batches there; not if the collector does.
    """

    ratios: Ratios | None = None  # of replayed frames they are not known

    def __init__(self, algorithm: ReplayAlgorithm, replay: ReplayBuffer, *, extend: bool = True):
        self.algorithm: Any = algorithm
        self.replay = replay
        self._extend = extend
        self._frames = 0
        self._sampled: list[Tensor] = []  # versions, by sample

    @property
    def policy(self) -> nn.Module:
        return self.algorithm.policy

    def learn(self, batch: TensorDictBase, version: int) -> dict[str, float]:
        if self._extend:
            self.replay.extend(batch)
        self._sampled = []
        num_frames = int(batch["collector", "mask"].sum())
        config = self.algorithm.config
        self._frames += num_frames
        if config.sampled_frames:
            self.algorithm.observe(batch["observation"][batch["collector", "mask"]])
        metrics = {"train/replay_frames": float(len(self.replay))}
        if self._frames < max(config.learning_starts, config.batch_size):
            return metrics
        means = Means()
        gradient_steps = self.algorithm.updates_due(num_frames)
        for _ in range(gradient_steps):
            samples = self.replay.sample(config.batch_size)
            if (stamps := samples.get("policy_version", None)) is not None:
                self._sampled.append(stamps)
            means.add(self.algorithm.update(samples))
        metrics["train/gradient_steps"] = float(gradient_steps)
        return metrics | means.read()

    def versions(self, batch: TensorDictBase) -> Tensor:
        """Of the samples; of the batch it is how old the data was that came in."""
        return torch.cat(self._sampled) if self._sampled else torch.empty(0, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm.state_dict(),
            "replay": self.replay.state_dict(),
            "frames": self._frames,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.algorithm.load_state_dict(state["algorithm"])
        self.replay.load_state_dict(state["replay"])
        self._frames = state["frames"]


Learner = OnPolicy | OffPolicy
