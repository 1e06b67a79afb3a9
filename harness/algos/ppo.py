"""Proximal policy optimisation, for fresh data and for data that lags behind the learner."""

from __future__ import annotations

from dataclasses import dataclass

from harness.checks import above, at_least, between, one_of

OBJECTIVES = ("behaviour", "proximal", "decoupled")


@dataclass
class PPOConfig:
    """The settings of PPO; the defaults are the customary ones for CartPole."""

    name: str = "ppo"
    learning_rate: float = 2.5e-4  # of Adam
    anneal_learning_rate: bool = True  # linearly, to nothing at the last frame
    epochs: int = 4  # passes over each batch
    minibatch_size: int = 256  # frames in one gradient step, or near it: a batch is cut evenly
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # 0: one-step returns; 1: whole returns
    clip: float = 0.2  # how far a probability ratio may move from one
    clip_value: bool = True  # hold value predictions within `clip` of the old ones, too
    normalise_advantages: bool = True  # to mean 0 and variance 1 in each minibatch
    entropy_weight: float = 0.01
    value_weight: float = 0.5
    max_grad_norm: float = 0.5  # of all gradients together; 0: no limit
    target_kl: float | None = None  # ends a batch's epochs once the policy has moved this far
    normalise_observations: bool = False  # by running statistics, which travel with the weights
    normalise_rewards: bool = False  # by the running spread of the discounted return
    # For data that lags behind the learner. What ratios are taken against:
    #   behaviour: the recorded probabilities of the weights that acted
    #   proximal: the learner's own weights at the start of the update, as if the data were fresh
    #   decoupled: clipped against the learner's own, weighted by how far those are from the acting
    objective: str = "behaviour"
    weight_cap: float = 5.0  # decoupled: no frame weighs more than this
    vtrace: bool = False  # V-trace returns, corrected for the lag, in place of GAE
    vtrace_rho: float = 1.0  # V-trace: cap on the weight of a frame's own error
    vtrace_c: float = 1.0  # V-trace: cap on the weight with which later errors are passed back
    max_lag: int | None = None  # versions; frames that lag more are dropped, and counted

    def validate(self) -> None:
        """Raise ValueError, in one line, if a setting makes no sense."""
        one_of("algo.name", self.name, ("ppo",))
        one_of("algo.objective", self.objective, OBJECTIVES)
        above("algo.learning_rate", self.learning_rate, 0)
        at_least("algo.epochs", self.epochs, 1)
        at_least("algo.minibatch_size", self.minibatch_size, 1)
        between("algo.gamma", self.gamma, 0, 1)
        between("algo.gae_lambda", self.gae_lambda, 0, 1)
        above("algo.clip", self.clip, 0)
        at_least("algo.entropy_weight", self.entropy_weight, 0)
        at_least("algo.value_weight", self.value_weight, 0)
        at_least("algo.max_grad_norm", self.max_grad_norm, 0)
        if self.target_kl is not None:
            above("algo.target_kl", self.target_kl, 0)
        above("algo.weight_cap", self.weight_cap, 0)
        above("algo.vtrace_rho", self.vtrace_rho, 0)
        above("algo.vtrace_c", self.vtrace_c, 0)
        if self.max_lag is not None:
            at_least("algo.max_lag", self.max_lag, 0)
