"""`algo=`: the options of the algorithms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from harness.options.base import Options, linked
from harness.options.errors import ConfigError
from harness.options.typed import Count, NonNegative, NonNegativeInt, Positive, Range, Share


@dataclass
class AlgorithmConfig(Options):
    """Options that every algorithm has."""

    group: ClassVar[str] = "algo"
    replays: ClassVar[bool] = False  # whether it learns from samples of a replay buffer

    name: str = ""  # the registered name

    @property
    def random_frames(self) -> int:
        """How many frames to collect with random actions before the policy acts."""
        return 0

    @property
    def sampled_frames(self) -> int:
        """How many observations the algorithm is shown before anything is published."""
        return 0


@dataclass
class PPOConfig(AlgorithmConfig):
    """Proximal policy optimisation: on-policy, with switches for data that lags behind."""

    name: str = "ppo"
    learning_rate: Positive = 2.5e-4  # of Adam
    anneal_learning_rate: bool = True  # linearly, to zero at the last frame
    epochs: Count = 4  # passes over each batch
    minibatch_size: Count = 256  # frames in one gradient step, approximately: a batch is cut evenly
    gamma: Share = 0.99  # discount
    gae_lambda: Share = 0.95  # 0: one-step returns; 1: whole returns
    clip: Positive = 0.2  # how far a probability ratio may move from one
    clip_value: bool = True  # keep value predictions within `clip` of the old ones, too
    normalise_advantages: bool = True  # to mean 0 and variance 1 in each minibatch
    entropy_weight: NonNegative = 0.01  # weight of the entropy bonus
    value_weight: NonNegative = 0.5  # weight of the value loss
    max_grad_norm: NonNegative = 0.5  # of all gradients together; 0: no limit
    # end a batch's epochs once the policy is this far from what it was at the start of the update
    target_kl: Positive | None = None
    # by running statistics, which travel with the weights; the first are of 1024 random actions
    normalise_observations: bool = False
    normalise_rewards: bool = False  # by the running spread of the discounted return
    # what an update maximises, a registered objective or {name: {options}}: clipped against the
    # weights that acted (behaviour, dual_clip), against the learner's own at the start of the
    # update (proximal, decoupled, ewma), or not clipped (vtrace, truncated_is, cispo, m2po)
    objective: str | dict[str, Any] = "behaviour"
    # the loss, by torch.compile: a slower start, then faster updates; not for recurrent models
    compile: bool = False
    vtrace: bool = False  # V-trace returns, corrected for the lag, in place of GAE
    vtrace_rho: Positive = 1.0  # V-trace: cap on the weight of a frame's own error
    vtrace_c: Positive = 1.0  # V-trace: cap on the weight with which later errors are passed back
    # versions; frames that lag more are dropped, and counted
    max_lag: NonNegativeInt | None = field(default=None, metadata=linked("${sync.max_lag}"))

    @property
    def sampled_frames(self) -> int:
        return 1024 if self.normalise_observations else 0

    def check(self, config: Any) -> None:
        if config.collector.fills_replay_buffer:
            raise ConfigError(
                f"collector.free_running=true algo={self.name}: it has no replay buffer to fill; "
                "take algo=sac"
            )


@dataclass
class SACConfig(AlgorithmConfig):
    """Soft actor-critic: off-policy, for continuous actions, on samples of a replay buffer."""

    replays: ClassVar[bool] = True

    name: str = "sac"
    learning_rate: Positive = 3e-4  # of the policy's Adam
    critic_learning_rate: Positive = 1e-3  # of the critics' Adam and the temperature's
    gamma: Share = 0.99  # discount
    # how far the target critics move to the critics in one update
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    batch_size: Count = 256  # replayed frames in one update
    buffer_size: Count = 1_000_000  # frames that the replay buffer holds
    learning_starts: NonNegativeInt = 5_000  # random frames before the first update
    updates_per_frame: Positive = 1.0  # gradient steps for each collected frame
    policy_delay: Count = 2  # the policy takes this many steps after this many critic steps
    alpha: Positive = 0.2  # temperature: the weight of the entropy; its first value if automatic
    auto_alpha: bool = True  # adapt the temperature to the target entropy
    # in the units of actions; null: minus the number of dimensions for actions from -1 to 1, and
    # moved as far as other bounds are wider
    target_entropy: float | None = None

    @property
    def random_frames(self) -> int:
        return self.learning_starts

    def validate(self) -> None:
        super().validate()
        if self.buffer_size < self.batch_size:
            raise ConfigError(
                f"algo.buffer_size={self.buffer_size}: expected {self.batch_size} or more, which "
                "is algo.batch_size"
            )

    def check(self, config: Any) -> None:
        if config.model.recurrent:
            raise ConfigError(
                f"algo=sac model={config.model.name}: SAC replays single frames; take model=mlp"
            )
        if config.collector.next_observation == "final":
            raise ConfigError(
                "collector.next_observation=final algo=sac: SAC replays frames one by one, each "
                "with its own next observation; it is for algo=ppo"
            )
        if config.sync.max_lag is not None:
            raise ConfigError(
                f"sync.max_lag={config.sync.max_lag} algo=sac: SAC replays old frames on purpose; "
                "max_lag is for algo=ppo"
            )
