"""Random streams: one seed makes those of every worker, environment and restart.

A stream's seed is a hash of the run's seed and the stream's place, so that runs with neighbouring
seeds share no stream.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

_ENVIRONMENTS, _POLICY, _ACTIONS, _NEXT, _FACTORY, _EVALUATION = range(6)


@dataclass(frozen=True)
class Seeds:
    """The streams of one worker. `generation` counts its restarts; `static` seeds all alike."""

    seed: int
    worker: int = 0
    generation: int = 0
    static: bool = False

    def of_worker(self, index: int) -> Seeds:
        """Those of the worker `index` places further on."""
        return replace(self, worker=self.worker + index)

    def environments(self, count: int) -> list[int]:
        """A seed for each environment."""
        if self.static:
            return [self.seed] * count
        return self._words(_ENVIRONMENTS, count)

    def factory(self) -> int:
        """A seed for `create_env_fn`, of 31 bits."""
        return self.seed if self.static else self._words(_FACTORY)[0] >> 1

    def seed_streams(self) -> None:
        """Seed this process's global streams, which policies and environments draw from."""
        self._seed_streams(_POLICY)

    def seed_evaluation(self) -> None:
        """Seed the global streams for an evaluation, which shares no stream with training."""
        self._seed_streams(_EVALUATION)

    def _seed_streams(self, purpose: int) -> None:
        torch_seed, numpy_seed, python_seed = self._words(purpose, 3)
        torch.manual_seed(torch_seed)
        np.random.seed(numpy_seed)
        random.seed(python_seed)

    def actions(self) -> int:
        """A seed for random actions."""
        return self._words(_ACTIONS)[0]

    def _words(self, purpose: int, count: int = 1) -> list[int]:
        place = [self.seed, self.worker, self.generation, purpose]
        return [int(word) for word in np.random.SeedSequence(place).generate_state(count)]


def fresh_seed() -> int:
    """A seed for a run that was given none."""
    return secrets.randbits(31)


def next_seed(seed: int) -> int:
    """A seed for whatever is seeded next, after `seed`."""
    return Seeds(seed)._words(_NEXT)[0] >> 1


def check_seed(seed: Any) -> int:
    """Return `seed` if it is a valid one."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed={seed!r}: a seed is an integer, 0 or larger")
    return int(seed)


class Streams:
    """A saved state of the process's global random streams."""

    def __init__(self) -> None:
        self._cuda: list[torch.Tensor] = []  # one a device; empty until CUDA is initialised
        self.keep()

    def keep(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy: Any = np.random.get_state(legacy=False)
        self._python = random.getstate()
        if torch.cuda.is_initialized():
            self._cuda = torch.cuda.get_rng_state_all()

    def resume(self) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if torch.cuda.is_initialized():
            if not self._cuda:  # saved before CUDA's first use, which seeds it like torch
                torch.cuda.manual_seed_all(torch.initial_seed())
            for device, state in zip(range(torch.cuda.device_count()), self._cuda, strict=False):
                torch.cuda.set_rng_state(state, device)

    def state_dict(self) -> dict[str, Any]:
        """As tensors and plain lists."""
        numpy, (version, words, gauss) = self._numpy, self._python
        mersenne = numpy["state"]
        return {
            "torch": self._torch.clone(),
            "cuda": [state.clone() for state in self._cuda],
            "numpy": [
                numpy["bit_generator"],
                mersenne["key"].tolist(),
                *(float(x) for x in (mersenne["pos"], numpy["has_gauss"], numpy["gauss"])),
            ],
            "python": [version, list(words), gauss],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        name, keys, position, has_gauss, gauss = state["numpy"]
        self._torch = state["torch"].clone()
        self._cuda = [one.clone() for one in state.get("cuda", [])]
        self._numpy = {
            "bit_generator": name,
            "state": {"key": np.array(keys, np.uint32), "pos": int(position)},
            "has_gauss": int(has_gauss),
            "gauss": gauss,
        }
        version, words, python_gauss = state["python"]
        self._python = (version, tuple(words), python_gauss)


@contextlib.contextmanager
def untouched_streams() -> Iterator[None]:
    """Restore the process's random streams afterwards."""
    outside = Streams()
    try:
        yield
    finally:
        outside.resume()
        if not torch.cuda.is_initialized():  # undo torch.manual_seed for CUDA's first use
            torch.cuda.manual_seed_all(torch.initial_seed())
