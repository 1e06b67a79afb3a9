"""What a recurrent policy carries from step to step, and what it becomes with new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from collectors.rollout.policy import NEXT, shown
from collectors.rollout.seeds import Streams
from collectors.rollout.spaces import Key, key_of, name_of

Array = np.ndarray[Any, Any]
State = dict[Key, Tensor]
# Observations, state, and where episodes begin, to outputs.
Call = Callable[[Sequence[Tensor], Mapping[Key, Any], Array], State]


class RecurrentState:
    """The state of a policy by key, which is zero at the start of an episode.

    keys: none if the policy has no state. call: calls the policy.
    on_update: what new weights do: "keep" it, make it "zero", or "recompute" it from the
        observations of the current episodes.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        num_envs: int,
        on_update: Literal["keep", "zero", "recompute"],
        call: Call,
    ):
        if on_update != "keep" and not keys:
            raise ValueError(
                f"state_on_update={on_update!r} is for a policy that carries state: it returns "
                "('next', key) for a key that it takes, and this policy does not"
            )
        self._keys, self._on_update, self._call = keys, on_update, call
        self.values: State = {}
        self.history = History(num_envs) if on_update == "recompute" else None

    def begin(self, rows: Sequence[Tensor], starts: Array) -> None:
        """Find the shapes at the policy's first call: it is called without a state."""
        if not self._keys or self.values:
            return
        streams = Streams()
        try:
            outputs = self._call(rows, dict.fromkeys(self._keys), starts)
        except Exception as error:
            error.add_note(
                f"the policy was called once with None (with a TensorDict: without an entry) to "
                f"find the shape of {shown(self._keys)}; it should then start with zeros"
            )
            raise
        streams.resume()
        self.values = {key: torch.zeros_like(outputs[(NEXT, *key)]) for key in self._keys}

    def follow(self, outputs: State, rows: Sequence[Tensor], starts: Array) -> None:
        """Go on with the state that a call with these inputs returned."""
        self.values = {key: outputs[(NEXT, *key)] for key in self._keys}
        if self.history is not None:
            self.history.add(rows, starts)

    def clear(self, which: Array | None = None) -> None:
        """Begin with zeros in these environments, or in all."""
        if self.history is not None:
            self.history.zero(which)
        self._zero(which)

    def _zero(self, which: Array | None) -> None:
        for key, value in self.values.items():
            if which is None:
                self.values[key] = torch.zeros_like(value)
            else:
                mask = torch.from_numpy(which).to(value.device)
                mask = mask.reshape(-1, *[1] * (value.ndim - 1))
                self.values[key] = value.masked_fill(mask, 0)

    def update(self) -> None:
        """There are new weights."""
        if self._on_update == "zero":
            self.clear()
        elif self.history is not None and self.values:
            self._recompute(self.history)

    def _recompute(self, history: History) -> None:
        """The state as it would be if the current episodes had begun with the present weights."""
        streams = Streams()
        for step in history.steps:
            self._zero(step.zeroed)
            outputs = self._call(step.observations, self.values, step.is_init)
            self.values = {key: outputs[(NEXT, *key)] for key in self._keys}
        self._zero(history.zeroed)
        streams.resume()

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": {name_of(key): value.clone() for key, value in self.values.items()},
            "history": None if self.history is None else self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, under_way: bool) -> None:
        """Go on with a saved state; with zeros if its episodes are not `under_way`."""
        saved = {key_of(name): value.clone() for name, value in state["state"].items()}
        self.values = saved or self.values
        if not under_way or not saved:
            self.clear()
        elif self.history is not None:
            self.history.load_state_dict(state["history"])


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
