"""Gymnasium spaces as lists of named arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

Key = tuple[str, ...]
ROOT: Key = ("observation",)


class Leaf(NamedTuple):
    """One array of an observation or an action: its name, and what one environment gives."""

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: tuple[Any, ...] = ()

    def of(self, value: Any) -> Any:
        """This leaf's part of an observation."""
        try:
            for step in self.path:
                value = value[step]
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"an observation lacks {'/'.join(self.key)!r}, which its space has"
            ) from None
        return value


def name_of(key: Key | str) -> str:
    """A key as one name; a slash in a part of it is told from one between parts."""
    parts = (key,) if isinstance(key, str) else key
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)


def key_of(name: str) -> Key:
    """The key that has this name."""
    return tuple(part.replace("%2F", "/").replace("%25", "%") for part in name.split("/"))


def observation_leaves(space: spaces.Space[Any]) -> list[Leaf]:
    """The arrays of an observation: "observation" for a plain space, a Dict space's own keys.

    What `text_keys` gives is left out.
    """
    texts = text_keys(space)
    leaves = [_leaf(*part) for part in _parts(space, (), ()) if part[1] not in texts]
    if not leaves:
        raise TypeError(
            "the observation space holds nothing that a policy could be called with"
            + (f", only text: {', '.join(map(name_of, texts))}" if texts else "")
        )
    taken = {leaf.key[0] for leaf in leaves} & (RESERVED | ENDS)
    if taken:
        raise ValueError(
            f"observation key {sorted(taken)[0]!r} is one that batches use themselves; rename it"
        )
    return leaves


def text_keys(space: spaces.Space[Any]) -> list[Key]:
    """The spaces of strings inside a Dict or Tuple space, which batches do without."""
    parts = _parts(space, (), ())
    return [key for part, key, _ in parts if key and part.dtype is not None and part.dtype == str]


def action_leaf(space: spaces.Space[Any]) -> Leaf:
    """The array of an action."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        raise TypeError(
            f"{type(space).__name__} action spaces are not supported (Box, Discrete, MultiDiscrete "
            "and MultiBinary are): flatten the actions in create_env_fn, with space = "
            "env.action_space, by gymnasium.wrappers.TransformAction(env, lambda action: "
            "spaces.unflatten(space, action), spaces.flatten_space(space))"
        )
    return _leaf(space, ("action",), ())


def _parts(
    space: spaces.Space[Any], key: Key, path: tuple[Any, ...]
) -> Iterator[tuple[spaces.Space[Any], Key, tuple[Any, ...]]]:
    """The spaces that Dict and Tuple spaces are made of, and where each is."""
    if isinstance(space, spaces.Dict):
        inner: Iterable[tuple[Any, spaces.Space[Any]]] = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        inner = enumerate(space.spaces)
    else:
        yield space, key, path
        return
    for name, part in inner:
        yield from _parts(part, (*key, str(name)), (*path, name))


def _leaf(space: spaces.Space[Any], key: Key, path: tuple[Any, ...]) -> Leaf:
    if not isinstance(space, _ARRAYS):
        raise TypeError(
            f"{type(space).__name__} spaces have no fixed array form; supported are "
            "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them"
        )
    return Leaf(key or ROOT, tuple(space.shape or ()), np.dtype(space.dtype), path)


_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
RESERVED = {"action", "next", "collector", "policy_version", "is_init"}
ENDS = {"reward", "done", "terminated", "truncated"}


def is_reserved(key: Key, observations: list[Key]) -> bool:
    """Whether an output of the policy beside the action may not have this name."""
    if key[0] == "next":
        return len(key) == 1 or key[1] in ENDS or key[1:] in observations
    return key in observations or (key[0] in RESERVED and key != ("action",))
