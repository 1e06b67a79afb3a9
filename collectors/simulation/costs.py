"""How long everything takes in a simulation: constants, or numbers drawn from distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from collectors.options.check_types import Milliseconds, Positive, Share, check_fields

Array = np.ndarray[Any, Any]
Kind = Literal["constant", "uniform", "normal", "lognormal", "exponential", "gamma"]
Each = Literal["step", "batch"]
_MS = 1_000_000
# The most spread for which (nearly) no draw is negative.
MOST_CV = {"constant": 0.0, "uniform": 1 / math.sqrt(3), "normal": 1 / 3}


@dataclass(frozen=True)
class Cost:
    """A duration in milliseconds.

    cv: the coefficient of variation, standard deviation / mean.
    each: of a worker's costs, whether one number is drawn for each step, or for each batch.
    """

    mean: Milliseconds = 0.0
    kind: Kind = "constant"
    cv: float | None = None  # of an exponential distribution it is 1
    each: Each = "step"

    def __post_init__(self) -> None:
        check_fields(self)
        fixed = {"constant": 0.0, "exponential": 1.0}.get(self.kind)
        if fixed is not None:
            if self.cv not in (None, fixed):
                raise ValueError(f"cv={self.cv}: kind={self.kind} has cv={fixed:g}; leave cv out")
            return
        if self.cv is None:
            raise ValueError(f"kind={self.kind} needs cv, its standard deviation / mean")
        most = MOST_CV.get(self.kind, 100.0)
        if not 0 <= self.cv <= most:
            other = "; kind=gamma takes more" if self.kind in MOST_CV else ""
            raise ValueError(f"cv={self.cv}: expected 0 to {most:.3g} with kind={self.kind}{other}")

    @property
    def is_constant(self) -> bool:
        """Whether all draws are the mean."""
        return self.kind == "constant" or not self.mean or self.cv == 0

    def draw(self, random: np.random.Generator, count: int = 1) -> Array:
        """This many durations in milliseconds."""
        if self.is_constant:
            return np.full(count, self.mean)
        if self.each == "batch":
            return np.full(count, self._draw(random, 1)[0])
        return self._draw(random, count)

    def _draw(self, random: np.random.Generator, count: int) -> Array:
        mean, cv = self.mean, self.cv or 0.0
        if self.kind == "uniform":
            reach = math.sqrt(3) * cv * mean
            return random.uniform(mean - reach, mean + reach, count)
        if self.kind == "normal":
            return np.maximum(random.normal(mean, cv * mean, count), 0.0)
        if self.kind == "lognormal":
            variance = math.log1p(cv * cv)
            return random.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
        if self.kind == "exponential":
            return random.exponential(mean, count)
        return random.gamma(1 / cv**2, mean * cv**2, count)


@dataclass(frozen=True)
class Stragglers:
    """The last ceil(share * workers) workers take `factor` times as long."""

    share: Share = 0.0
    factor: Positive = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def factor_of(self, worker: int, num_workers: int) -> float:
        """How many times as long this worker takes."""
        slow = worker >= num_workers - math.ceil(self.share * num_workers)
        return self.factor if slow else 1.0


@dataclass(frozen=True)
class Costs:
    """What workers and learner do, each with the time that it takes."""

    step_ms: Cost = Cost()  # worker: one step of its environments
    policy_ms: Cost = Cost()  # worker: one policy call
    take_ms: Cost = Cost()  # learner: assembling a batch
    update_ms: Cost = Cost()  # learner: training on it
    publish_ms: Cost = Cost()  # learner: publishing a version
    log_ms: Cost = Cost()  # learner: whatever else it does for each batch
    stragglers: Stragglers = field(default_factory=Stragglers)


class StepTimes:
    """Draws when the steps of one worker's batch end, each a policy call and a step."""

    def __init__(self, costs: Costs, num_steps: int, seed: int, worker: int, factor: float):
        self._num_steps, self._factor = num_steps, factor
        self._parts = [
            (cost, np.random.default_rng([seed, purpose, worker]))
            for purpose, cost in enumerate((costs.step_ms, costs.policy_ms))
        ]
        constant = all(cost.is_constant for cost, _ in self._parts)
        self._constant = self._draw() if constant else None

    def draw(self) -> list[int]:
        """The end of every step, in nanoseconds since the beginning of the batch."""
        return self._draw() if self._constant is None else self._constant

    def _draw(self) -> list[int]:
        total = sum(cost.draw(random, self._num_steps) for cost, random in self._parts)
        ends: list[int] = np.rint(np.cumsum(total) * self._factor * _MS).astype(np.int64).tolist()
        return ends


class LearnerTimes:
    """Draws the durations of what the learner does, in nanoseconds."""

    def __init__(self, costs: Costs, seed: int):
        names = [f.name for f in fields(costs) if f.name not in ("step_ms", "policy_ms")]
        self._parts = {
            name: (getattr(costs, name), np.random.default_rng([seed, 2 + purpose, 0]))
            for purpose, name in enumerate(name for name in names if name != "stragglers")
        }

    def draw(self, name: str) -> int:
        """The next duration of this cost of `Costs`."""
        cost, random = self._parts[name]
        return round(float(cost.draw(random)[0]) * _MS)
