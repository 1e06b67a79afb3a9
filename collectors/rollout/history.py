"""What a recurrent policy was given in the current episodes, to compute its state anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


class Step(NamedTuple):
    """One call of the policy. The state was zero before it in the environments of `zeroed`."""

    observations: list[Tensor]
    is_init: Array
    zeroed: Array


class History:
    """The policy's calls since the oldest current episode began."""

    def __init__(self, num_envs: int):
        self.steps: list[Step] = []
        self.zeroed = np.ones(num_envs, bool)  # since the last call
        self._since = np.zeros(num_envs, np.int64)  # the first call of each episode

    def zero(self, which: Array | None) -> None:
        """Note that the state of these environments, or of all, is zero now."""
        self.zeroed[slice(None) if which is None else which] = True

    def add(self, observations: Sequence[Tensor], is_init: Array) -> None:
        """Add a call with these inputs."""
        self._since[self.zeroed] = len(self.steps)
        copies = [one.clone() for one in observations]
        self.steps.append(Step(copies, is_init.copy(), self.zeroed.copy()))
        self.zeroed[...] = False

    def trim(self) -> None:
        """Forget the calls of episodes that are over."""
        first = min(self._since[~self.zeroed], default=len(self.steps))
        del self.steps[:first]
        self._since = np.maximum(self._since - first, 0)

    def state_dict(self) -> dict[str, Any]:
        columns = list(zip(*self.steps, strict=True)) or [(), (), ()]
        observations = [torch.stack(rows) for rows in zip(*columns[0], strict=True)]
        flags = ([torch.from_numpy(each) for each in column] for column in columns[1:])
        names = ("observations", "is_init", "zeroed", "since", "now")
        last = (torch.from_numpy(array.copy()) for array in (self._since, self.zeroed))
        return dict(zip(names, (observations, *flags, *last), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        flags = zip(state["is_init"], state["zeroed"], strict=True)
        self.steps = [
            Step([rows[t] for rows in state["observations"]], is_init.numpy(), zeroed.numpy())
            for t, (is_init, zeroed) in enumerate(flags)
        ]
        self._since, self.zeroed = state["since"].numpy().copy(), state["now"].numpy().copy()
