"""Evaluation of the newest weights, in separate environments with their own seeds.

Each evaluation plays the same episodes twice: once with the most likely actions (greedy), once with
sampled ones. No worker is involved, so neither the age of the weights that act nor the randomness
of the policy is mixed into the greedy return.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor, nn

from collectors.rollout.seeds import Seeds, untouched_streams
from collectors.rollout.spaces import action_leaf
from harness.environments.wrappers import ReportOwnEpisode, as_number

log = logging.getLogger(__name__)

STEPS_AT_ONCE = 100  # whose entropies are computed together


class Episode(NamedTuple):
    """How one episode went, as the environment itself counts, whatever it is wrapped into."""

    total: float
    length: int
    ended: bool  # else it was cut


class Play(NamedTuple):
    """What was played."""

    episodes: list[Episode]
    entropy: float | None  # of the policy, mean over all steps; None if it was not measured


class Evaluator:
    """Plays the same episodes with every policy that it is given.

    Episode i starts from seed + i each time, and is cut after `max_steps`. What is random in the
    actions is drawn from streams that no training uses, and the streams of training are as before.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        *,
        episodes: int = 10,
        seed: int = 0,
        max_steps: int = 100_000,
    ):
        if episodes < 1:
            raise ValueError(f"evaluation: episodes is {episodes}, expected 1 or more")
        self.max_steps = max_steps
        self.seeds = [seed + i for i in range(episodes)]
        self._factory = make_env
        self._envs: list[gym.Env] = []

    def run(self, policy: nn.Module) -> dict[str, float]:
        """Mean and spread of the returns, greedy and sampled, and the policy's entropy."""
        with untouched_streams():
            for seed in self.seeds[len(self._envs) :]:
                Seeds(seed).seed_evaluation()
                env = self._factory()
                assert isinstance(env, gym.Env)
                self._envs.append(env)
            greedy, sampled = (self._play(policy, sampled=sampled) for sampled in (False, True))
        totals = np.array([episode.total for episode in greedy.episodes])
        metrics = {
            "eval/return": float(totals.mean()),
            "eval/return_std": float(totals.std()),
            "eval/length": float(np.mean([episode.length for episode in greedy.episodes])),
            "eval/return_sampled": float(np.mean([episode.total for episode in sampled.episodes])),
        }
        if sampled.entropy is not None:
            metrics["eval/entropy"] = sampled.entropy
        return metrics

    def _play(self, policy: nn.Module, *, sampled: bool) -> Play:
        Seeds(self.seeds[0]).seed_evaluation()
        played = play(policy, self._envs, self.seeds, max_steps=self.max_steps, sampled=sampled)
        if cut := sum(not episode.ended for episode in played.episodes):
            log.warning(
                "%d of %d episodes had not ended after evaluation.max_steps=%d and were cut there",
                cut,
                len(played.episodes),
                self.max_steps,
            )
        return played

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()
        self._envs.clear()


@torch.no_grad()
def play(
    policy: nn.Module,
    envs: list[gym.Env],
    seeds: list[int],
    *,
    max_steps: int,
    sampled: bool = False,
    see: Callable[[gym.Env], Any] | None = None,
) -> Play:
    """Play one episode in each environment, side by side.

    max_steps: where an episode that has not ended is cut.
    sampled: draw the actions from the policy; else it takes the most likely ones.
    see: called with each environment after its reset and after every step.
    """
    observations = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    carried = Carried(policy, len(envs), envs[0].action_space, measures_entropy=sampled)
    mode = InteractionType.RANDOM if sampled else InteractionType.DETERMINISTIC
    episodes = [Episode(0.0, 0, ended=False)] * len(envs)
    playing = list(range(len(envs)))
    if see is not None:
        for env in envs:
            see(env)
    with set_interaction_type(mode):
        for step in range(1, max_steps + 1):
            if not playing:
                break
            inputs = torch.as_tensor(np.stack([observations[i] for i in playing]))
            actions = carried.act(inputs, playing)
            for i, action in zip(list(playing), actions, strict=True):
                observations[i], reward, terminated, truncated, _ = envs[i].step(action)
                ended = bool(terminated or truncated)
                episodes[i] = _after(envs[i], episodes[i].total + as_number(reward), step, ended)
                if see is not None:
                    see(envs[i])
                if ended and (going_on := _go_on(envs[i])) is not None:
                    observations[i] = going_on
                    carried.clear(i)
                    episodes[i] = episodes[i]._replace(ended=False)
                elif ended:
                    playing.remove(i)
    return Play(episodes, carried.entropy)


def _after(env: gym.Env, total: float, length: int, ended: bool) -> Episode:
    """The episode so far: counted by the environment itself if wrappers may alter the counts."""
    if isinstance(env, ReportOwnEpisode):
        total, length = env.counter.total, env.counter.length
    return Episode(total, length, ended)


def _go_on(env: gym.Env) -> Any:
    """The next observation of an episode that only a wrapper ended, at the loss of a life say.

    None if the environment's own episode is over, or ends with the reset that the wrapper wants.
    """
    if not isinstance(env, ReportOwnEpisode) or env.counter.over:
        return None
    number = env.counter.number
    observation, _ = env.reset()
    return observation if env.counter.number == number else None


class Carried:
    """A policy called with tensors, and the state that it carries from step to step.

    measures_entropy: if the policy has a method `entropy`, with the arguments of `forward`.
    """

    def __init__(
        self,
        policy: nn.Module,
        num_envs: int,
        action_space: gym.Space[Any],
        *,
        measures_entropy: bool = False,
    ):
        self.policy = policy
        parameter = next(policy.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.out_keys = list(getattr(policy, "out_keys", ["action"]))
        in_keys = getattr(policy, "in_keys", ["observation"])
        self.state: dict[str, Tensor] = {}
        if len(in_keys) > 1:
            state = policy.initial_state(num_envs)  # type: ignore[operator]
            self.state = {key: state[key] for key in in_keys[1:]}
        self._initial = {key: value.clone() for key, value in self.state.items()}
        self._action_type = action_leaf(action_space).dtype
        self._measures_entropy = measures_entropy and hasattr(policy, "entropy")
        self._inputs: list[list[Tensor]] = []  # of which the entropy is not added up yet
        self._entropy_sum, self._steps = 0.0, 0

    @property
    def entropy(self) -> float | None:
        """The policy's mean entropy where it has acted; None if it was not measured."""
        self._add_entropy()
        return self._entropy_sum / self._steps if self._steps else None

    def _add_entropy(self) -> None:
        """Of many steps at once, which takes a fraction of the time of each by itself."""
        if self._inputs:
            inputs = (torch.cat(parts) for parts in zip(*self._inputs, strict=True))
            entropy = self.policy.entropy(*inputs)  # type: ignore[operator]
            self._entropy_sum += float(entropy.double().sum())
            self._steps += len(entropy)
            self._inputs.clear()

    def clear(self, which: int) -> None:
        """Start anew what is carried for an environment."""
        for key, value in self.state.items():
            value[which] = self._initial[key][which]

    def act(self, observation: Tensor, which: list[int]) -> np.ndarray:
        """Actions for the environments in `which`, whose observations these are."""
        inputs = [observation.to(self.device), *(value[which] for value in self.state.values())]
        if self._measures_entropy:
            self._inputs.append(inputs)
            if len(self._inputs) == STEPS_AT_ONCE:
                self._add_entropy()
        result = self.policy(*inputs)
        values = result if isinstance(result, tuple) else (result,)
        outputs: dict[Any, Tensor] = dict(zip(self.out_keys, values, strict=True))
        for key, value in self.state.items():
            value[which] = outputs["next", key]
        return outputs["action"].cpu().numpy().astype(self._action_type, copy=False)
