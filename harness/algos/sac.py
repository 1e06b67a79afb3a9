"""Soft actor-critic, for continuous actions, on samples of a replay buffer."""

from __future__ import annotations

from dataclasses import dataclass

from harness.checks import above, at_least, between, one_of


@dataclass
class SACConfig:
    """The settings of SAC; the defaults are the customary ones."""

    name: str = "sac"
    learning_rate: float = 3e-4  # of the policy's Adam
    critic_learning_rate: float = 1e-3  # of the critics' Adam and the temperature's
    gamma: float = 0.99  # discount
    tau: float = 0.005  # how far the target critics move to the critics in one update
    batch_size: int = 256  # replayed frames in one update
    buffer_size: int = 1_000_000  # frames that the replay buffer holds
    learning_starts: int = 5_000  # random frames before the first update
    updates_per_frame: float = 1.0  # gradient steps for each collected frame
    policy_delay: int = 2  # the policy takes this many steps after this many critic steps
    alpha: float = 0.2  # temperature: what entropy is worth; the first, if it is automatic
    auto_alpha: bool = True  # steer the temperature to the target entropy
    target_entropy: float | None = None  # none: minus the number of action dimensions

    def validate(self) -> None:
        """Raise ValueError, in one line, if a setting makes no sense."""
        one_of("algo.name", self.name, ("sac",))
        above("algo.learning_rate", self.learning_rate, 0)
        above("algo.critic_learning_rate", self.critic_learning_rate, 0)
        between("algo.gamma", self.gamma, 0, 1)
        above("algo.tau", self.tau, 0)
        between("algo.tau", self.tau, 0, 1)
        at_least("algo.batch_size", self.batch_size, 1)
        at_least("algo.buffer_size", self.buffer_size, self.batch_size)
        at_least("algo.learning_starts", self.learning_starts, 0)
        above("algo.updates_per_frame", self.updates_per_frame, 0)
        at_least("algo.policy_delay", self.policy_delay, 1)
        above("algo.alpha", self.alpha, 0)
