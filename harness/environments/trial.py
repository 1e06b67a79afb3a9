"""One reset and one step of an environment before workers start, to name what is wrong with it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
from gymnasium import Env, Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from collectors.rollout.seeds import untouched_streams
from harness.errors import ConfigError

RESET = "(observation, info)"
STEP = "(observation, reward, terminated, truncated, info)"


def try_out(env: Env[Any, Any], env_id: str, *, seed: int) -> None:
    """Reset and step it once; `ConfigError` if what it returns is not what gymnasium defines."""
    with untouched_streams():
        result = _call(env_id, "reset(seed=...)", lambda: env.reset(seed=seed))
        _check_length(env_id, "reset(seed=...)", result, RESET)
        _check_observation(env_id, "reset(seed=...)", result[0], env.observation_space)
        env.action_space.seed(seed)
        action = env.action_space.sample()
        result = _call(env_id, "step(action)", lambda: env.step(action))
        hint = ""
        if isinstance(result, tuple) and len(result) == 4:
            hint = "; `done` of older versions is two values: terminated and truncated"
        _check_length(env_id, "step(action)", result, STEP, hint)
        _check_observation(env_id, "step(action)", result[0], env.observation_space)
        reward = result[1]
        if not isinstance(reward, Real | np.generic) and np.size(reward) != 1:
            raise ConfigError(
                f"env.id={env_id}: step(action) returned the reward {reward!r}; expected a number"
            )


def _call(env_id: str, what: str, call: Any) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"env.id={env_id}: {what} raised {type(error).__name__}: {error}{_place(error)}"
        ) from error


def _place(error: BaseException) -> str:
    """The line in which it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"


def _check_length(env_id: str, what: str, result: Any, expected: str, hint: str = "") -> None:
    count = expected.count(",") + 1
    if isinstance(result, tuple) and len(result) == count:
        return
    got = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
    raise ConfigError(f"env.id={env_id}: {what} returned {got}; expected {count}: {expected}{hint}")


def _check_observation(
    env_id: str, what: str, value: Any, space: Space[Any], path: str = ""
) -> None:
    """Shapes and parts; types of numbers are converted, and ranges are not promised."""
    name = f"observation{path}"
    if isinstance(space, Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            parts = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise ConfigError(
                f"env.id={env_id}: {what} returned the {name} with {parts}; observation_space "
                f"has {', '.join(map(str, space.spaces))}"
            )
        for key, part in space.spaces.items():
            _check_observation(env_id, what, value[key], part, f"{path}[{key!r}]")
    elif isinstance(space, Tuple):
        for number, (part, item) in enumerate(zip(space.spaces, value, strict=False)):
            _check_observation(env_id, what, item, part, f"{path}[{number}]")
    elif isinstance(space, Box | Discrete | MultiBinary | MultiDiscrete):
        shape, expected = np.shape(value), space.shape or ()
        if shape != expected and (math.prod(shape) != 1 or math.prod(expected) != 1):
            raise ConfigError(
                f"env.id={env_id}: {what} returned an {name} of the shape {list(shape)}; "
                f"observation_space has {list(expected)}"
            )
