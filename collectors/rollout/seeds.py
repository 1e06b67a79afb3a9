"""Random streams: one seed makes those of every worker, environment and restart.

Streams are told apart by their place, never by arithmetic on seeds, so that no two runs with
neighbouring seeds share one.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from collectors.rollout import numpy_stream

_ENVIRONMENTS, _POLICY, _ACTIONS, _NEXT = range(4)


@dataclass(frozen=True)
class Seeds:
    """The streams of one worker. `generation` counts its restarts; `static` seeds all alike."""

    seed: int
    worker: int = 0
    generation: int = 0
    static: bool = False

    def environments(self, count: int) -> list[int]:
        """A seed for each environment."""
        if self.static:
            return [self.seed] * count
        return [int(word) for word in self._sequence(_ENVIRONMENTS).generate_state(count)]

    def seed_policy(self) -> None:
        """Seed the global streams, which policies draw from, of this process."""
        torch_seed, numpy_seed, python_seed = self._sequence(_POLICY).generate_state(3)
        torch.manual_seed(int(torch_seed))
        np.random.seed(int(numpy_seed))
        random.seed(int(python_seed))

    def actions(self) -> np.random.Generator:
        """The stream of random actions."""
        return np.random.default_rng(self._sequence(_ACTIONS))

    def _sequence(self, purpose: int) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed, self.worker, self.generation, purpose])


def fresh_seed() -> int:
    """A seed for a run that was given none."""
    return secrets.randbits(31)


def next_seed(seed: int) -> int:
    """What to seed the next thing with, once `seed` is used up."""
    return int(np.random.SeedSequence([seed, 0, 0, _NEXT]).generate_state(1)[0]) >> 1


def check_seed(seed: Any) -> int:
    """`seed`, if it can be one."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed={seed!r}: a seed is an integer, 0 or larger")
    return int(seed)


class Streams:
    """The state of the process's global random streams, kept while somebody else uses them."""

    def __init__(self) -> None:
        self.keep()

    def keep(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy = numpy_stream.keep()
        self._python = random.getstate()

    def resume(self) -> None:
        torch.set_rng_state(self._torch)
        numpy_stream.resume(self._numpy)
        random.setstate(self._python)

    def state_dict(self) -> dict[str, Any]:
        """As tensors and plain lists."""
        name, keys, *rest = self._numpy.told()
        version, words, gauss = self._python
        return {
            "torch": self._torch.clone(),
            "numpy": [name, [int(k) for k in keys], *(float(x) for x in rest)],
            "python": [version, list(words), gauss],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        name, keys, position, has_gauss, gauss = state["numpy"]
        self._torch = state["torch"].clone()
        numbers = (name, np.array(keys, np.uint32), int(position), int(has_gauss), gauss)
        self._numpy = numpy_stream.Kept(state=numbers)
        version, words, python_gauss = state["python"]
        self._python = (version, tuple(words), python_gauss)
