"""Adapters for TorchRL: its environments in these collectors, and their batches in its losses.

    Collector(lambda: as_gymnasium(GymEnv("CartPole-v1")), policy, postproc=as_torchrl, ...)

TorchRL is not imported here: an environment and its specs are used through their public attributes.
`examples/from_torchrl/` holds complete programs.
"""

from __future__ import annotations

import sync  # noqa: F401 - before tensordict  # isort: skip
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase
from torch import Tensor

from collectors.data.batch import next_observations
from collectors.rollout.spaces import as_key

Array = np.ndarray[Any, Any]
_ENDS = ("terminated", "truncated", "done")


def as_torchrl(batch: TensorDictBase) -> TensorDictBase:
    """A batch in the layout of TorchRL's collectors; tensors are shared with `batch`, not copied.

    Rewards and flags get a trailing dimension of one, and the root gets `done`, `terminated` and
    `truncated`, which are false: a policy never acts after an end. Full next observations replace
    those of `next_observation="final"`. Where a row has padding, its last frame is marked as
    truncated, so that no return is estimated from padding.
    """
    frames = batch.clone(recurse=False)
    following = frames["next"]
    finals = following.get("finals", None)
    if finals is not None:
        for key in list(finals.keys(True, True)):
            following.set(key, next_observations(batch, key=key))
        following.exclude("finals", "final", inplace=True)
    ends = {name: following[name] for name in _ENDS}
    cut = _cut_by_padding(batch["collector", "mask"]) & ~ends["done"]
    if bool(cut.any()):
        ends["truncated"], ends["done"] = ends["truncated"] | cut, ends["done"] | cut
    for name, value in ends.items():
        following[name] = value.unsqueeze(-1)
        frames[name] = torch.zeros_like(following[name])
    following["reward"] = following["reward"].unsqueeze(-1)
    frames["is_init"] = frames["is_init"].unsqueeze(-1)
    if frames.batch_dims > 1:
        frames.names = [*[None] * (frames.batch_dims - 1), "time"]
    return frames


def _cut_by_padding(mask: Tensor) -> Tensor:
    """The frames that padding follows."""
    cut = torch.zeros_like(mask)
    if mask.ndim > 1:
        cut[..., :-1] = mask[..., :-1] & ~mask[..., 1:]
    return cut


def as_gymnasium(env: Any) -> gym.Env[Any, Any] | VectorEnv[Any, Any, Any]:
    """A TorchRL environment as one that collectors take.

    env: an `EnvBase` without a batch dimension, or with one, such as a `SerialEnv`. It has one
        action, one reward and one set of flags; groups of agents have more.

    Observations keep their keys, shapes and types. Left out is what the collector supplies:
    `is_init`, and the state that a `TensorDictPrimer` adds for a recurrent policy, which starts
    with zeros. Random actions do not follow action masks.
    """
    missing = [n for n in ("batch_size", "action_spec", "observation_spec") if not hasattr(env, n)]
    if missing:
        raise TypeError(f"as_gymnasium takes an EnvBase of TorchRL, got a {type(env).__name__}")
    if len(env.batch_size) > 1:
        raise ValueError(
            f"as_gymnasium: the environment's batch size is {list(env.batch_size)}; it has at most "
            "one dimension, the environments"
        )
    return _VectorFromTorchRL(env) if env.batch_size else _EnvFromTorchRL(env)


class _Steps:
    """Steps an `EnvBase` with arrays, and keeps its state between two steps."""

    def __init__(self, env: Any):
        self.env = env
        self.action_key = _the_one(env.action_keys, "action")
        self.reward_key = _the_one(env.reward_keys, "reward")
        done = _the_one([key for key in env.done_keys if as_key(key)[-1] == "done"], "done flag")
        if done != "done":
            raise ValueError(f"as_gymnasium: the done flag is {done!r}, expected 'done'")
        _check_one_each(env.full_reward_spec[self.reward_key], env, "reward")
        _check_one_each(env.full_done_spec[done], env, "done flag")
        self._action = env.full_action_spec[self.action_key]
        vector = bool(env.batch_size)
        self.action_space = _action_space(self._action[0] if vector else self._action)
        given = env.observation_spec[0] if vector else env.observation_spec
        self.observation_space = _observation_space(given, set(_supplied(env)))
        self._state: Any = None  # what the next step or reset is given

    def reset(self, seed: int | None, which: Array | None = None) -> Any:
        """Start new episodes, in all environments or in those that `which` masks."""
        if seed is not None:
            self.env.set_seed(seed)
        if which is None:
            self._state = self.env.reset()
        else:
            flags = self._state["done"]
            self._state["done"] = flags | torch.from_numpy(which).to(flags.device).view_as(flags)
            self._state = self.env.maybe_reset(self._state)
        return self._observed(self._state)

    def step(self, action: Any) -> tuple[Any, Array, Array, Array]:
        """The next observation, the reward and the two flags; arrays are [environments]."""
        spec = self._action
        given = torch.as_tensor(action).to(device=spec.device, dtype=spec.dtype)
        self._state[self.action_key] = given.reshape(spec.shape)
        stepped = self.env.step(self._state)
        after = stepped["next"]
        self._state = self.env.step_mdp(stepped)
        terminated = after["terminated"]
        truncated = after["done"] & ~terminated  # not every environment has the flag
        if (flag := after.get("truncated", None)) is not None:
            truncated = truncated | flag
        reward, terminated, truncated = (
            value.detach().cpu().numpy().reshape(tuple(self.env.batch_size))
            for value in (after[self.reward_key], terminated, truncated)
        )
        return self._observed(after), reward, terminated, truncated

    def close(self) -> None:
        if not self.env.is_closed:
            self.env.close()

    def _observed(self, frame: TensorDictBase) -> Any:
        def read(space: Any, value: Any) -> Any:
            if isinstance(space, spaces.Dict):
                return {key: read(part, value[key]) for key, part in space.spaces.items()}
            return value.detach().cpu().numpy()

        return read(self.observation_space, frame)


class _EnvFromTorchRL(gym.Env[Any, Any]):
    """An `EnvBase` without a batch dimension."""

    np_random: Any = None  # its random stream is not known, so later episodes cannot be replayed

    def __init__(self, env: Any):
        self._steps = _Steps(env)
        self.action_space = self._steps.action_space
        self.observation_space = self._steps.observation_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._steps.reset(seed), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated = self._steps.step(action)
        return observation, reward.item(), terminated.item(), truncated.item(), {}

    def close(self) -> None:
        self._steps.close()


class _VectorFromTorchRL(VectorEnv[Any, Any, Any]):
    """An `EnvBase` whose batch dimension is the environments."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, env: Any):
        self._steps = _Steps(env)
        self.num_envs = int(env.batch_size[0])
        self.single_action_space = self._steps.action_space
        self.single_observation_space = self._steps.observation_space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._steps.reset(seed, (options or {}).get("reset_mask")), {}

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        return *self._steps.step(actions), {}

    def close_extras(self, **kwargs: Any) -> None:
        self._steps.close()


class OneHot(spaces.Box):
    """One-hot vectors, or several of them in a row; `sizes` are their lengths."""

    def __init__(self, sizes: tuple[int, ...], count: tuple[int, ...] = ()):
        super().__init__(0, 1, (*count, sum(sizes)), np.int64)
        self.sizes, self.count = sizes, count

    def sample(self, mask: None = None, probability: None = None) -> Array:
        chosen = [self.np_random.integers(size, size=self.count) for size in self.sizes]
        hot = [np.eye(s, dtype=np.int64)[c] for s, c in zip(self.sizes, chosen, strict=True)]
        return np.concatenate(hot, axis=-1)


@batch_space.register(OneHot)
def _batch_one_hot(space: OneHot, n: int = 1) -> OneHot:
    return OneHot(space.sizes, (n, *space.count))


def _action_space(spec: Any) -> spaces.Space[Any]:
    """The space of one environment's actions."""
    kinds, shape = _kinds(spec), tuple(spec.shape)
    if "MultiOneHot" in kinds:
        return OneHot(tuple(box.n for box in spec.space))
    if "OneHot" in kinds:
        return OneHot((spec.space.n,))
    if "MultiCategorical" in kinds:
        return spaces.MultiDiscrete(np.asarray(spec.nvec))
    if "Binary" in kinds:
        return spaces.Box(0, 1, shape, np.int8)
    if "Categorical" in kinds:
        return (
            spaces.MultiDiscrete(np.full(shape, spec.space.n))
            if shape
            else spaces.Discrete(spec.space.n)
        )
    if kinds & {"Bounded", "Unbounded"}:
        return _box(spec, "action")
    raise TypeError(f"as_gymnasium: {type(spec).__name__} actions are not supported")


def _observation_space(spec: Any, left_out: set[tuple[str, ...]]) -> spaces.Dict:
    """The space of one environment's observations, without these keys."""

    def build(part: Any, key: tuple[str, ...]) -> spaces.Space[Any] | None:
        if "Composite" not in _kinds(part):
            return _box(part, "/".join(key))
        built = {
            name: space
            for name, inner in part.items()
            if (*key, name) not in left_out and (space := build(inner, (*key, name))) is not None
        }
        return spaces.Dict(built) if built else None

    space = build(spec, ())
    return space if isinstance(space, spaces.Dict) else spaces.Dict()


def _supplied(env: Any) -> Iterator[tuple[str, ...]]:
    """The keys of observations that collectors supply themselves."""
    yield ("is_init",)
    while "TransformedEnv" in _kinds(env):
        transforms = env.transform if "Compose" in _kinds(env.transform) else [env.transform]
        for transform in transforms:
            if "TensorDictPrimer" in _kinds(transform):
                yield from map(as_key, transform.primers.keys(True, True))
        env = env.base_env


def _box(spec: Any, name: str) -> spaces.Box:
    """The arrays that a spec describes, with its bounds if it has any."""
    if not _kinds(spec) & {"Bounded", "Unbounded", "Categorical", "OneHot"}:
        raise TypeError(
            f"as_gymnasium: {name!r} is {type(spec).__name__}, which is no array of numbers; "
            "remove or encode it with a transform"
        )
    dtype = torch.zeros((), dtype=spec.dtype).numpy().dtype
    shape = tuple(spec.shape)
    if any(size < 0 for size in shape):
        raise ValueError(f"as_gymnasium: {name!r} has the variable shape {list(shape)}")
    low: Any
    high: Any
    if "Bounded" in _kinds(spec):
        low, high = (bound.cpu().numpy() for bound in (spec.space.low, spec.space.high))
    elif dtype.kind == "f":
        low, high = -np.inf, np.inf
    else:
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, shape, dtype.type)


def _kinds(value: Any) -> set[str]:
    """The names of a value's classes: TorchRL is not imported to ask for them."""
    return {kind.__name__ for kind in type(value).__mro__}


def _the_one(keys: Any, what: str) -> Any:
    """The only key of its sort."""
    if len(keys) != 1:
        raise ValueError(
            f"as_gymnasium: the environment has {len(keys)} {what}s, {list(keys)}, expected one; "
            "groups of agents are not supported"
        )
    return keys[0]


def _check_one_each(spec: Any, env: Any, what: str) -> None:
    """Refuse a reward or a flag that is not one number for each environment."""
    if spec.shape.numel() != env.batch_size.numel():
        raise ValueError(
            f"as_gymnasium: the {what} is {list(spec.shape)}, expected one number for each of "
            f"{env.batch_size.numel()} environments"
        )
