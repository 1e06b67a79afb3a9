"""`algo=`: the options of the algorithms, and of PPO's objectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from collectors.options.check_types import (
    Count,
    NonNegative,
    NonNegativeInt,
    Positive,
    Range,
    Share,
)
from harness.errors import ConfigError
from harness.options.base import Options, linked
from harness.options.models import ImageConfig

Stale = Literal["drop", "mask", "wait"]  # `wait` leaves nothing to drop


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
        """How many observations the algorithm gets before version 0 is published."""
        return 0

    def check(self, config: Any) -> None:
        if not self.replays and config.collector.fills_replay_buffer:
            raise ConfigError(
                f"collector.free_running=true algo={self.name}: it has no replay buffer to fill; "
                "use algo=sac or algo=dqn"
            )


def _to_normalise(options: Any) -> int:
    """How many observations the statistics of an algorithm that normalises them start from."""
    return 1024 if options.normalise_observations else 0


@dataclass
class PPOConfig(AlgorithmConfig):
    """Proximal policy optimisation: on-policy, with options for lagging data."""

    critic: ClassVar[bool] = True  # whether it learns values

    name: str = "ppo"
    learning_rate: Positive = 2.5e-4  # of Adam
    anneal_learning_rate: bool = True  # linearly, to zero at the last frame
    epochs: Count = 4  # passes over each batch
    minibatch_size: Count = 256  # frames in one gradient step, approximately: a batch is cut evenly
    # draw minibatches at random; false: in the order in which frames were made, so that a minibatch
    # holds whole groups of algo=grpo if their episodes run beside each other
    shuffle: bool = True
    gamma: Share = 0.99  # discount
    gae_lambda: Share = 0.95  # 0: one-step returns; 1: whole returns
    clip: Positive = 0.2  # how far a probability ratio may move from one
    clip_high: Positive | None = None  # and upwards, if that is another distance (DAPO: 0.28)
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
    # weights that acted (behaviour, dual_clip, gspo, geometric), against the learner's own at the
    # start of the update (proximal, decoupled, ewma, a3po), or not clipped (vtrace, truncated_is,
    # cispo, m2po, dppo, sapo, vcpo, vaco, sequence_is, vespo)
    objective: str | dict[str, Any] = "behaviour"
    # the gradient step (loss, gradient, clipping, optimiser), by torch.compile: a slower start,
    # then faster updates; not for models with memory
    compile: bool = False
    # V-trace returns, corrected for lag, instead of GAE; true with an objective that needs them
    vtrace: bool = field(default=False, metadata=linked("${lockstep.vtrace:${algo.objective}}"))
    vtrace_rho: Positive = 1.0  # V-trace: cap on the weight of a frame's own error
    vtrace_c: Positive = 1.0  # V-trace: cap on the weight with which later errors are passed back
    # versions; frames that lag more are not learned from, and counted
    max_lag: NonNegativeInt | None = field(default=None, metadata=linked("${sync.max_lag}"))
    # drop: such frames are left out; mask: they stay in minibatches and trajectories, weightless
    on_stale: Stale = field(default="drop", metadata=linked("${sync.on_stale}"))

    sampled_frames = property(_to_normalise)

    def warnings(self, config: Any) -> list[str]:
        name = self.objective if isinstance(self.objective, str) else next(iter(self.objective))
        if name != "proximal" or not config.cause_of_lag:
            return []
        return [
            f"algo.objective=proximal with {config.cause_of_lag}: its ratio is to the learner's "
            "policy at the start of the update, which is not the one that acted; behaviour and "
            "decoupled correct for that"
        ]


@dataclass
class GRPOConfig(PPOConfig):
    """Group-relative policy optimisation: episodes that begin alike are compared, without critic.

    Values, and with them gamma, gae_lambda, vtrace and the options of values, have no part in it.
    """

    critic: ClassVar[bool] = False

    name: str = "grpo"
    learning_rate: Positive = 1e-3  # of Adam
    anneal_learning_rate: bool = False  # linearly, to zero at the last frame
    epochs: Count = 2  # passes over each batch
    minibatch_size: Count = 288  # frames in one gradient step, approximately
    normalise_advantages: bool = False  # to mean 0 and variance 1 in each minibatch
    entropy_weight: NonNegative = 0.0  # weight of the entropy bonus
    value_weight: NonNegative = 0.0  # weight of the value loss
    max_grad_norm: NonNegative = 1.0  # of all gradients together; 0: no limit
    # what a return is compared with: the mean of its group, or of the others in it (RLOO)
    baseline: Literal["group", "leave_one_out"] = "group"
    scale: bool = True  # divide by the standard deviation of the group

    def check(self, config: Any) -> None:
        super().check(config)
        if self.vtrace:
            raise ConfigError(
                "algo.vtrace=true algo=grpo: returns of whole episodes are not corrected; expected "
                "false"
            )
        env, size = config.env, config.env.kwargs.get("group_size", 1)
        if env.id == "lockstep/Tokens-v0" and (size < 2 or env.vectorisation != "native"):
            named, expected = f"env.kwargs.group_size={size}", "2 or more"
            if size >= 2:
                named, expected = f"env.vectorisation={env.vectorisation}", "native"
            raise ConfigError(
                f"{named} algo=grpo: no two episodes would begin alike; expected {expected}"
            )


@dataclass
class IMPALAConfig(AlgorithmConfig):
    """IMPALA, an actor-critic with V-trace: one gradient step on each batch, corrected for lag."""

    name: str = "impala"
    optimiser: Literal["rmsprop", "adam"] = "rmsprop"  # the gradient method
    learning_rate: Positive = 6e-4  # of the optimiser
    anneal_learning_rate: bool = True  # linearly, to zero at the last frame
    rmsprop_alpha: Share = 0.99  # optimiser=rmsprop: decay of the running mean square
    # optimiser=rmsprop: added to the root of the mean square. Losses are means over frames: divide
    # values meant for sums, as in the paper, by the frames of a batch
    rmsprop_eps: Positive = 1e-5
    rmsprop_momentum: Share = 0.0  # optimiser=rmsprop: momentum
    epochs: Count = 1  # gradient steps on each batch, each with all of its frames
    gamma: Share = 0.99  # discount
    rho_bar: Positive = 1.0  # V-trace: cap on the weight of a frame's own error
    c_bar: Positive = 1.0  # V-trace: cap on the weight with which later errors are passed back
    pg_rho_bar: Positive = 1.0  # cap on a frame's weight in the policy gradient
    entropy_weight: NonNegative = 0.01  # weight of the entropy bonus
    value_weight: NonNegative = 0.5  # weight of the value loss
    max_grad_norm: NonNegative = 0.5  # of all gradients together; 0: no limit
    # the gradient step (loss, gradient, clipping, optimiser), by torch.compile: a slower start,
    # then faster updates; not for models with memory
    compile: bool = False
    clip_rewards: bool = False  # learn from rewards clipped to -1..1; logged returns do not change
    normalise_observations: bool = False  # by running statistics, which travel with the weights
    # versions; frames that lag more are not learned from, and counted
    max_lag: NonNegativeInt | None = field(default=None, metadata=linked("${sync.max_lag}"))
    # drop: such frames are left out; mask: they stay in minibatches and trajectories, weightless
    on_stale: Stale = field(default="drop", metadata=linked("${sync.on_stale}"))

    sampled_frames = property(_to_normalise)


@dataclass
class ReplayConfig(AlgorithmConfig):
    """Options of algorithms that learn from single frames of a replay buffer."""

    replays: ClassVar[bool] = True
    models: ClassVar[str] = "mlp"  # which it learns with, as an error names them

    batch_size: Count = 256  # replayed frames in one update
    buffer_size: Count = 1_000_000  # frames that the replay buffer holds
    learning_starts: NonNegativeInt = 5_000  # random frames before the first update
    updates_per_frame: Positive = 1.0  # gradient steps for each collected frame
    # gradient steps (loss, gradient, clipping, optimiser), by torch.compile: a slower start, then
    # faster updates
    compile: bool = False

    @property
    def random_frames(self) -> int:
        return self.learning_starts

    def check(self, config: Any) -> None:
        super().check(config)
        if self.buffer_size < self.batch_size:
            raise ConfigError(
                f"algo.buffer_size={self.buffer_size}: expected {self.batch_size} or more, which "
                "is algo.batch_size"
            )
        name, title = self.name, self.name.upper()
        if config.model.recurrent:
            raise ConfigError(
                f"algo={name} model={config.model.name}: {title} replays single frames; use "
                f"model={self.models}"
            )
        if config.collector.next_observation == "final":
            raise ConfigError(
                f"collector.next_observation=final algo={name}: {title} replays frames one by one, "
                "each with its own next observation; it is for algo=ppo"
            )
        if config.sync.max_lag is not None:
            raise ConfigError(
                f"sync.max_lag={config.sync.max_lag} algo={name}: {title} replays old frames on "
                "purpose; max_lag is for algo=ppo"
            )


@dataclass
class SACConfig(ReplayConfig):
    """Soft actor-critic: off-policy, for continuous actions, on samples of a replay buffer."""

    name: str = "sac"
    learning_rate: Positive = 3e-4  # of the policy's Adam
    critic_learning_rate: Positive = 1e-3  # of the critics' Adam and the temperature's
    gamma: Share = 0.99  # discount
    # how far the target critics move to the critics in one update
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    policy_delay: Count = 2  # the policy takes this many steps after this many critic steps
    alpha: Positive = 1.0  # temperature: the weight of the entropy; its first value if automatic
    auto_alpha: bool = True  # adapt the temperature to the target entropy
    # in the units of actions; null: minus the number of dimensions for actions from -1 to 1, and
    # moved as far as other bounds are wider
    target_entropy: float | None = None
    # by running statistics, which travel with the weights; the first are of 1024 random actions
    normalise_observations: bool = False

    sampled_frames = property(_to_normalise)

    def check(self, config: Any) -> None:
        super().check(config)
        if isinstance(config.model, ImageConfig):
            raise ConfigError(
                f"algo=sac model={config.model.name}: SAC reads vectors; use model=mlp"
            )


@dataclass
class DQNConfig(ReplayConfig):
    """Deep Q-learning: off-policy, for discrete actions, on samples of a replay buffer."""

    models: ClassVar[str] = "mlp or model=cnn"

    name: str = "dqn"
    learning_rate: Positive = 2.5e-4  # of Adam
    anneal_learning_rate: bool = False  # linearly, to zero at the last frame
    gamma: Share = 0.99  # discount
    batch_size: Count = 32  # replayed frames in one update
    buffer_size: Count = 100_000  # frames that the replay buffer holds
    learning_starts: NonNegativeInt = 5_000  # random frames before the first update
    updates_per_frame: Positive = 0.25  # gradient steps for each collected frame
    max_grad_norm: NonNegative = 10.0  # of all gradients together; 0: no limit
    double: bool = True  # the network chooses the next action, the target network evaluates it
    duelling: bool = False  # separate estimates for state values and action advantages
    n_steps: Count = 1  # rewards that a return sums before it bootstraps
    target_interval: Count = 500  # updates between two updates of the target network
    # how far the target network moves to the network each time; 1: a copy
    target_tau: Annotated[float, Range(0, 1, above=True)] = 1.0
    epsilon_start: Share = 1.0  # probability of a random action after the random frames
    epsilon_end: Share = 0.05  # and after `epsilon_frames` more, which it falls to linearly
    epsilon_frames: Count = 10_000  # see `epsilon_end`
    # constant probabilities instead, as in Ape-X: of worker i among n,
    # epsilon_base ** (1 + epsilon_power * i / (n - 1))
    epsilon_per_worker: bool = False
    epsilon_base: Share = 0.4  # epsilon_per_worker=true: epsilon of the first worker
    epsilon_power: NonNegative = 7.0  # epsilon_per_worker=true: spread over the other workers
    prioritised: bool = False  # draw frames with large errors more often
    priority_exponent: Share = 0.6  # 0: uniformly; 1: in proportion to the error
    # of the importance weights at first; it grows linearly, to 1 at the last frame
    weight_exponent: Share = 0.4

    def check(self, config: Any) -> None:
        super().check(config)
        collector = config.collector
        if self.epsilon_per_worker and collector.simulates and collector.cudagraph_policy:
            raise ConfigError(
                "algo.epsilon_per_worker=true collector.cudagraph_policy=true: all simulated "
                "workers share one graph, which holds one epsilon; expected false for one of them"
            )


class ObjectiveConfig:
    """What an objective needs. Options that derive from it say so; others need none of it."""

    # advantages by V-trace, and so a critic: without them it is not the method of its name
    needs_vtrace: ClassVar[bool] = False
    # one advantage for a whole episode, as algo=grpo has it, and no critic
    needs_episodes: ClassVar[bool] = False
    # minibatches of whole trajectories, each as far as it lies in the batch
    whole_trajectories: ClassVar[bool] = False
    # actions with probabilities and not densities: discrete ones
    needs_probabilities: ClassVar[bool] = False
    # the gradient of each frame's log-probability by the weights of the policy's last layer
    needs_scores: ClassVar[bool] = False
    instead: ClassVar[str] = (
        "behaviour"  # the nearest objective that can do without what is missing
    )

    def check(self, name: str, algo: PPOConfig) -> None:
        """Raise `ConfigError` if it cannot be the method of its name with this algorithm."""
        pair = f"algo.objective={name} algo={algo.name}"
        if self.needs_vtrace and not algo.critic:
            raise ConfigError(
                f"{pair}: its advantages are those of V-trace, which needs a critic; use algo=ppo, "
                f"or algo.objective={self.instead}, which needs none"
            )
        if self.needs_vtrace and not algo.vtrace:
            raise ConfigError(
                f"algo.vtrace=false algo.objective={name}: its advantages are those of V-trace; "
                "expected algo.vtrace=true"
            )
        if self.needs_episodes and algo.critic:
            raise ConfigError(
                f"{pair}: it is for whole episodes with one advantage each, and algo={algo.name} "
                f"has one for each frame; use algo=grpo, or algo.objective={self.instead}"
            )


@dataclass
class DecoupledConfig:
    """Clipped against the proximal policy, weighted by its ratio to the weights that acted."""

    weight_cap: Positive = 5.0  # the largest weight of a frame
    # frames above the cap: weight them by the cap, or (mask) not at all
    above_cap: Literal["truncate", "mask"] = "truncate"
    weight_floor: NonNegative = 0.0  # frames with a smaller weight have none (IcePop)

    def __post_init__(self) -> None:
        if self.weight_floor > self.weight_cap:
            raise ConfigError(
                f"weight_floor={self.weight_floor:g} weight_cap={self.weight_cap:g}: no frame "
                f"would have a weight; expected weight_floor at most {self.weight_cap:g}"
            )


@dataclass
class EWMAConfig(DecoupledConfig):
    """Decoupled, and the proximal policy is a moving average of the learner's weights."""

    # of a weight in the average with each gradient step; 8/9 averages over about 9 steps
    proximal_decay: Annotated[float, Range(0, 1)] = 0.889


@dataclass
class DualClipConfig:
    """Clipped against the acting weights, and ratios of bad actions are bounded above, too."""

    # a ratio counts as at most this where the advantage is negative
    ratio_cap: Annotated[float, Range(1, above=True)] = 3.0


@dataclass
class VTraceConfig(ObjectiveConfig):
    """The policy gradient of V-trace's actor-critic, with its advantages."""

    needs_vtrace: ClassVar[bool] = True
    instead: ClassVar[str] = "cispo"

    rho: Positive = 1.0  # cap on the importance weight of a frame's gradient


@dataclass
class TruncatedISConfig:
    """Truncated importance sampling, without clipping."""

    weight_cap: Positive = 2.0  # a frame above it has no gradient


@dataclass
class CISPOConfig:
    """A policy gradient with clipped importance weights, so that every frame keeps its gradient."""

    low: NonNegative = 1.0  # weights are 1 - low or more; 1: not bounded below
    high: NonNegative = 4.0  # weights are 1 + high or less


@dataclass
class M2POConfig:
    """Importance sampling, masked until the second moment of the log-ratios is small."""

    limit: Positive = 0.04  # on the mean square of the log-ratios that are not masked


@dataclass
class DPPOConfig(ObjectiveConfig):
    """A policy gradient without frames whose probability has moved too far, by a divergence."""

    needs_probabilities: ClassVar[bool] = True
    instead: ClassVar[str] = "m2po"

    # total variation, or Kullback-Leibler, of "this action or another one"
    divergence: Literal["tv", "kl"] = "tv"
    limit: Positive = 0.2  # on the divergence; the paper takes 0.05 for kl
    weight_cap: Positive = 20.0  # the largest importance weight of a frame


@dataclass
class SAPOConfig:
    """The ratio passes a smooth gate in place of a clip."""

    temperature: Positive = 1.0  # of the gate where the advantage is positive
    negative_temperature: Positive = 1.05  # and where it is negative: a larger one closes sooner


@dataclass
class VCPOConfig(ObjectiveConfig):
    """A policy gradient with the baseline of least variance; unequal weights make smaller steps."""

    whole_trajectories: ClassVar[bool] = True
    needs_episodes: ClassVar[bool] = True
    needs_scores: ClassVar[bool] = True
    instead: ClassVar[str] = "sequence_is"

    weight_cap: Positive = 8.0  # the largest importance weight of an episode


@dataclass
class VACOConfig(ObjectiveConfig):
    """Advantages of V-trace, and importance sampling until the total variation reaches a limit."""

    needs_vtrace: ClassVar[bool] = True
    instead: ClassVar[str] = "dppo"

    limit: Positive = 0.1  # on the total variation, estimated over a minibatch


@dataclass
class GSPOConfig(ObjectiveConfig):
    """Clipped against the acting weights, by one ratio for a trajectory."""

    whole_trajectories: ClassVar[bool] = True


@dataclass
class SequenceISConfig(ObjectiveConfig):
    """A policy gradient weighted by the truncated importance weight of each trajectory."""

    whole_trajectories: ClassVar[bool] = True

    weight_cap: Positive = 2.0  # the largest weight of a trajectory


@dataclass
class GeometricConfig(ObjectiveConfig):
    """Clipped against the acting weights, without trajectories that have drifted too far."""

    whole_trajectories: ClassVar[bool] = True

    # on the geometric mean of a trajectory's ratios; one outside of them is left out
    low: Share = 0.9
    high: Annotated[float, Range(1)] = 1.1


@dataclass
class VESPOConfig(ObjectiveConfig):
    """A policy gradient weighted by a smooth, bounded function of each episode's weight W."""

    whole_trajectories: ClassVar[bool] = True
    needs_episodes: ClassVar[bool] = True
    instead: ClassVar[str] = "sequence_is"

    # the weight of a frame is W^power exp(decay (1 - W))
    power: Positive = 2.0  # where the advantage is positive or zero
    decay: Positive = 3.0
    negative_power: Positive = 3.0  # where the advantage is negative
    negative_decay: Positive = 2.0


@dataclass
class A3POConfig(DecoupledConfig):
    """Decoupled, with a proximal policy that is interpolated by the age of each frame."""
