"""Frames of environments whose observations and actions stay on one device, such as a GPU.

    for each step:  policy(observation)         -> outputs into column t of the batch
                    environments.step(action)   -> reward, ends into column t, observation for t + 1

Everything is a tensor on the environments' device: no frame passes through the memory of the host,
and nothing waits for the device within a step. Two interfaces are adapted: gymnasium's `VectorEnv`
with tensors in place of arrays, and that of rsl_rl's `VecEnv`.
"""

from __future__ import annotations

import sync  # noqa: F401 - before tensordict  # isort: skip
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from collectors.rollout.seeds import Seeds, Streams, untouched_streams
from lockstep_check.ages import of_age

OBSERVATION, ACTION, NEXT = "observation", "action", "next"
Observation = dict[str, Tensor]


class Step(NamedTuple):
    """What a step returns, [environments, ...]."""

    observation: Observation  # with which the next step begins
    final: Observation  # the same, but at the end of an episode its last observation
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    is_frame: Tensor | None = None  # False where the step only reset; None: all are frames


class DeviceVector(Protocol):
    """Environments that step together on one device."""

    num_envs: int
    device: torch.device

    def reset(self, seed: int | None) -> Observation: ...
    def step(self, action: Tensor) -> Step: ...
    def close(self) -> None: ...


class GymnasiumVector:
    """A `gymnasium.vector.VectorEnv` that returns and takes tensors."""

    def __init__(self, env: Any):
        mode = getattr(env.unwrapped, "autoreset_mode", env.metadata.get("autoreset_mode"))
        self.env, self.num_envs, self.mode = env, int(env.num_envs), AutoresetMode(mode)
        if self.mode is AutoresetMode.DISABLED:
            raise ValueError(
                f"{env} has autoreset mode DISABLED, expected SAME_STEP or NEXT_STEP: to reset "
                "some members, the host would have to know which"
            )
        self.device = torch.device("cpu")
        self._ended: Tensor | None = None

    def reset(self, seed: int | None) -> Observation:
        observation, _ = self.env.reset(seed=seed)
        shown = _named(observation)
        self.device = next(iter(shown.values())).device
        self._ended = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return shown

    def step(self, action: Tensor) -> Step:
        shown, reward, terminated, truncated, info = self.env.step(action)
        observation, ended = _named(shown), terminated | truncated
        if self.mode is AutoresetMode.NEXT_STEP:
            assert self._ended is not None
            only_reset, self._ended = self._ended, ended
            return Step(observation, observation, reward, terminated, truncated, ~only_reset)
        final = info.get("final_obs", info.get("final_observation"))
        if final is None:
            raise ValueError(f"{self.env} has autoreset mode SAME_STEP, but no info['final_obs']")
        chosen = _choose(ended, _named(final), observation)
        return Step(observation, chosen, reward, terminated, truncated)

    def close(self) -> None:
        self.env.close()


class RslRlVector:
    """An environment with rsl_rl's interface: `get_observations()`, and `step` with time-outs.

    It does not return the last observation of an episode. In its place is the one before, from
    which rsl_rl's own algorithm estimates the value of what was cut off.
    """

    def __init__(self, env: Any):
        self.env, self.num_envs = env, int(env.num_envs)
        self.device = torch.device(env.device)
        self._observation: Observation = {}

    def reset(self, seed: int | None) -> Observation:
        if seed is not None and hasattr(self.env, "seed"):
            self.env.seed(seed)
        if hasattr(self.env, "reset"):
            self.env.reset()
        self._observation = _named(_first(self.env.get_observations()))
        return self._observation

    def step(self, action: Tensor) -> Step:
        shown, reward, dones, extras = self.env.step(action)
        observation, ended = _named(shown), dones.bool()
        truncated = extras.get("time_outs", torch.zeros_like(ended)).bool() & ended
        final = _choose(ended, self._observation, observation)
        self._observation = observation
        return Step(observation, final, reward, ended & ~truncated, truncated)

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def adapt_device_vector(env: Any) -> DeviceVector:
    """The class for this environment's interface."""
    if hasattr(env, "get_observations"):
        return RslRlVector(env)
    if hasattr(env, "single_observation_space"):
        return GymnasiumVector(env)
    raise TypeError(
        f"{type(env).__name__} is no vector of environments: expected gymnasium's VectorEnv, or "
        "get_observations() and step() of rsl_rl's VecEnv"
    )


class DeviceCollector:
    """Collects on the device of its environments, in this process, a batch when it is requested.

    A copy of the policy acts, which `update_policy_weights_` overwrites on the device. Batches have
    the keys of `Collector`'s, and are tensors of their own.

    create_env_fn: makes the vector of environments.
    policy: takes the tensors that its `in_keys` name, and returns those of its `out_keys`.
    frames_per_batch: a multiple of the number of environments.
    lag: how many updates older than the newest the weights are that act.
    seed: of the environments and of the random streams with which the policy acts.
    """

    def __init__(
        self,
        create_env_fn: Callable[[], Any],
        policy: nn.Module,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        lag: int = 0,
        seed: int = 0,
    ):
        self.environments = adapt_device_vector(create_env_fn())
        self.num_envs = self.environments.num_envs
        if frames_per_batch < 1 or frames_per_batch % self.num_envs:
            raise ValueError(
                f"frames_per_batch={frames_per_batch}: expected a multiple of the "
                f"{self.num_envs} environments"
            )
        if lag < 0:
            raise ValueError(f"lag={lag}: expected 0 or more updates")
        self.frames_per_batch, self.total_frames, self.lag = frames_per_batch, total_frames, lag
        self.policy, self.policy_version, self.frames = policy, 0, 0
        with untouched_streams():
            Seeds(seed).seed_streams()
            self._observation = self.environments.reset(seed)
            self._streams = Streams()
        self.device = self.environments.device
        self.acting = copy.deepcopy(policy).to(self.device).requires_grad_(False)
        self._version = 0  # of the weights that act
        self._waiting: deque[tuple[int, list[Tensor]]] = deque()  # published, and not due yet
        self._starts = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._trajectory = torch.arange(self.num_envs, device=self.device) - self.num_envs

    def __iter__(self) -> Iterator[TensorDict]:
        while not 0 <= self.total_frames <= self.frames:
            yield self.next()

    def __enter__(self) -> DeviceCollector:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Close the environments."""
        self.environments.close()

    @torch.no_grad()
    def update_policy_weights_(self) -> None:
        """Publish the policy's weights as the next version, without a way through the host."""
        self.policy_version += 1
        weights = [tensor.detach().to(self.device, copy=True) for tensor in _weights(self.policy)]
        self._waiting.append((self.policy_version, weights))
        while self._waiting and self._waiting[0][0] <= of_age(self.lag, self.policy_version):
            self._version, due = self._waiting.popleft()
            for target, source in zip(_weights(self.acting), due, strict=True):
                target.copy_(source)

    @torch.no_grad()
    def next(self) -> TensorDict:
        """The next batch, [environments, time], on the device."""
        with untouched_streams():
            self._streams.resume()
            try:
                columns = [self._step() for _ in range(self.frames_per_batch // self.num_envs)]
            finally:
                self._streams.keep()
        batch = TensorDict.stack(columns, dim=1)
        mask = batch["collector", "mask"]
        self.frames += int(mask.sum())
        return batch

    def _step(self) -> TensorDict:
        """One step of all environments, as a column of the batch."""
        observation, starts = self._observation, self._starts
        outputs = _call(self.acting, observation)
        step = self.environments.step(outputs[ACTION].clone())  # it may be clipped in place
        done = step.terminated | step.truncated
        is_frame = torch.ones_like(done) if step.is_frame is None else step.is_frame
        starts = starts & is_frame
        self._trajectory = torch.where(starts, self._trajectory + self.num_envs, self._trajectory)
        self._observation, self._starts = step.observation, done | ~is_frame
        each = torch.full((self.num_envs,), self._version, device=self.device)
        following = {
            **step.final,
            "reward": step.reward.to(torch.float32, copy=True),
            "terminated": step.terminated.clone(),
            "truncated": step.truncated.clone(),
            "done": done,
        }
        numbers = {
            "traj_ids": self._trajectory,
            "env": torch.arange(self.num_envs, device=self.device),
            "worker": torch.zeros_like(each),
            "mask": is_frame,
        }
        entries = {**observation, **outputs, "is_init": starts, "policy_version": each}
        return TensorDict(
            {**entries, NEXT: following, "collector": numbers},
            batch_size=[self.num_envs],
            device=self.device,
        )


def _weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _call(policy: nn.Module, observation: Observation) -> dict[str, Tensor]:
    """The policy's outputs by name."""
    if isinstance(policy, TensorDictModuleBase):
        count = len(next(iter(observation.values())))
        returned = policy(TensorDict(dict(observation), batch_size=[count]))
        return {key: returned[key] for key in policy.out_keys}
    in_keys: Any = getattr(policy, "in_keys", [OBSERVATION])
    out_keys: Any = getattr(policy, "out_keys", [ACTION])
    outputs = policy(*(observation[key] for key in in_keys))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return dict(zip(out_keys, outputs, strict=True))


def _named(observation: Any) -> Observation:
    """Copies by name, as in a batch: of a mapping's tensors, or of the one `observation`.

    Environments may write the next observation into the tensors of the last one.
    """
    if isinstance(observation, Mapping | TensorDict):
        entries = dict(observation.items())
    else:
        entries = {OBSERVATION: observation}
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the observation {name!r} is {type(value).__name__}, expected a tensor on the "
                "device; for environments with arrays use Collector"
            )
    return {name: value.clone() for name, value in entries.items()}


def _first(returned: Any) -> Any:
    """Of rsl_rl's older (observations, extras) the observations."""
    return returned[0] if isinstance(returned, tuple) else returned


def _choose(which: Tensor, one: Observation, other: Observation) -> Observation:
    """The rows of `one` where the environments are chosen, else those of `other`."""
    return {
        name: torch.where(which.reshape(-1, *[1] * (value.ndim - 1)), one[name], value)
        for name, value in other.items()
    }
