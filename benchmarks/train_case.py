"""What every contestant of the training benchmark trains, and with what settings; stdlib only.

Peers run in their own environment, so this file is what the two sides of a comparison share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import host


@dataclass(frozen=True)
class PPOSettings:
    """PPO on CartPole, as is customary."""

    env: str = "CartPole-v1"
    num_envs: int = 8
    num_steps: int = 128  # of each environment in a batch
    minibatch_size: int = 256
    epochs: int = 4
    learning_rate: float = 2.5e-4  # falls linearly to nothing
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2  # of ratios and of value predictions
    entropy_weight: float = 0.01
    value_weight: float = 0.5  # of half the squared error
    max_grad_norm: float = 0.5
    hidden_sizes: tuple[int, ...] = (64, 64)  # tanh; policy and value apart

    @property
    def batch_frames(self) -> int:
        return self.num_envs * self.num_steps


@dataclass(frozen=True)
class SACSettings:
    """SAC on Pendulum: one environment, one update a frame."""

    env: str = "Pendulum-v1"
    batch_size: int = 256
    learning_starts: int = 1_000  # random frames before the first update
    policy_learning_rate: float = 3e-4
    critic_learning_rate: float = 1e-3  # and the temperature's, which starts at 1
    gamma: float = 0.99
    tau: float = 0.005
    policy_delay: int = 2  # so many policy steps after so many critic steps
    hidden_sizes: tuple[int, ...] = (256, 256)  # relu


@dataclass(frozen=True)
class PongSettings(PPOSettings):
    """PPO on Pong, as is customary for Atari: a step is four frames of the game."""

    env: str = "PongNoFrameskip-v4"
    clip: float = 0.1
    hidden_sizes: tuple[int, ...] = (512,)  # relu, after the three convolutions; shared by both


PPO, PONG, SAC = PPOSettings(), PongSettings(), SACSettings()
FRAMES = {"ppo": 300_000, "pong": 200_000, "sac": 15_000}  # of one training, by default


def ppo_settings(algo: str) -> PPOSettings:
    """Those of the task: CartPole's or Pong's."""
    return PONG if algo == "pong" else PPO


@dataclass(frozen=True)
class Training:
    """One training from nothing; `scratch` is an empty folder for whatever it writes."""

    algo: str
    frames: int
    seed: int
    scratch: str

    def message(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Episodes:
    """`count` episodes, of that mean return, that ended `at` this frame of the training."""

    at: int
    mean_return: float
    count: int = 1


@dataclass
class Trained:
    """A whole training: its frames, the seconds from the first one to the end, its episodes."""

    frames: int
    seconds: float
    episodes: list[Episodes]

    def message(self) -> dict[str, Any]:
        mean, count = last_tenth(self.episodes, self.frames)
        return {
            "frames": self.frames,
            "seconds": self.seconds,
            "final_return": mean,
            "final_episodes": count,
        }


def last_tenth(episodes: Iterable[Episodes], frames: int) -> tuple[float | None, int]:
    """The mean return of what ended in the last tenth of the frames, and how many that were."""
    final = [each for each in episodes if each.at > 0.9 * frames]
    count = sum(each.count for each in final)
    if not count:
        return None, 0
    return sum(each.mean_return * each.count for each in final) / count, count


def serve(train: Callable[[Training, dict[str, Any]], Trained]) -> None:
    """Train whatever the driver asks for: `{"cmd": "train", "training": {}, "options": {}}`."""
    host.serve(lambda ask: train(Training(**ask["training"]), ask["options"]).message())
