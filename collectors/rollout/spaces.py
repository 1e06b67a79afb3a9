"""Gymnasium spaces as lists of named arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

Key = tuple[str, ...]
Path = tuple[Any, ...]
ROOT: Key = ("observation",)
RESERVED = {"action", "next", "collector", "policy_version", "is_init"}
ENDS = {"reward", "done", "terminated", "truncated"}
_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class SpaceLeaf(NamedTuple):
    """One array of an observation or an action of one environment."""

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: Path = ()

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


def as_key(key: str | Sequence[str]) -> Key:
    """A key as a tuple."""
    return (key,) if isinstance(key, str) else tuple(key)


def name_of(key: Key | str) -> str:
    """A key as one name, with slashes inside its parts escaped."""
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in as_key(key))


def key_of(name: str) -> Key:
    """The key that has this name."""
    return tuple(part.replace("%2F", "/").replace("%25", "%") for part in name.split("/"))


def observation_leaves(space: spaces.Space[Any]) -> list[SpaceLeaf]:
    """The arrays of an observation: "observation" for a plain space, a Dict space's own keys."""
    texts = text_keys(space)
    leaves = [_leaf(*part) for part in _parts(space) if part[1] not in texts]
    if not leaves:
        raise TypeError(
            "the observation space holds nothing that a policy could be called with"
            + (f", only text: {', '.join(map(name_of, texts))}" if texts else "")
        )
    if taken := {leaf.key[0] for leaf in leaves} & (RESERVED | ENDS):
        raise ValueError(
            f"observation key {min(taken)!r} is one that batches use themselves; rename it"
        )
    return leaves


def text_keys(space: spaces.Space[Any]) -> list[Key]:
    """The spaces of strings inside a Dict or Tuple space, which are left out of batches."""
    return [
        key
        for part, key, _ in _parts(space)
        if key and part.dtype is not None and part.dtype == str
    ]


def action_leaf(space: spaces.Space[Any]) -> SpaceLeaf:
    """The array of an action."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        raise TypeError(
            f"{type(space).__name__} action spaces are not supported: flatten the actions in "
            "create_env_fn, with space = env.action_space, by "
            "gymnasium.wrappers.TransformAction(env, lambda action: "
            "spaces.unflatten(space, action), spaces.flatten_space(space))"
        )
    return _leaf(space, ("action",), ())


def is_reserved(key: Key, observations: Sequence[Key]) -> bool:
    """Whether an output of the policy may not have this name."""
    if key[0] == "next":
        return len(key) == 1 or key[1] in ENDS or key[1:] in observations
    return key in observations or (key[0] in RESERVED and key != ("action",))


def _parts(
    space: spaces.Space[Any], key: Key = (), path: Path = ()
) -> Iterator[tuple[spaces.Space[Any], Key, Path]]:
    """The spaces that Dict and Tuple spaces are made of, each with its key and path."""
    inner: Iterable[tuple[Any, spaces.Space[Any]]]
    if isinstance(space, spaces.Dict):
        inner = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        inner = enumerate(space.spaces)
    else:
        yield space, key, path
        return
    for name, part in inner:
        yield from _parts(part, (*key, str(name)), (*path, name))


def _leaf(space: spaces.Space[Any], key: Key, path: Path) -> SpaceLeaf:
    if not isinstance(space, _ARRAYS):
        raise TypeError(
            f"{type(space).__name__} spaces have no fixed array form; supported are "
            "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them"
        )
    return SpaceLeaf(key or ROOT, tuple(space.shape or ()), np.dtype(space.dtype), path)
