"""A search space, written as Hydra's overrides and read as Optuna's distributions.

algo.learning_rate=tag(log,interval(1e-5,1e-2))    a number, evenly over magnitudes
algo.epochs=int(interval(2,10))                     a whole number
algo.minibatch_size=choice(64,128,256) or 64,128    one of these
model.hidden_sizes=[64,64],[256,256]                one of these lists
algo.gae_lambda=range(0.8,1.0,0.05)                 one of these steps
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from harness.options.errors import ConfigError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass
class Space:
    """What a search keeps fixed and what it varies, by option."""

    fixed: list[str]  # overrides of all trials
    distributions: dict[str, BaseDistribution]
    prefixes: dict[str, str]  # "", "+" or "++", as the option was written

    def overrides(self, params: Mapping[str, Any]) -> list[str]:
        """The overrides of the trial with these parameters."""
        return [
            *self.fixed,
            *(f"{self.prefixes[key]}{key}={value}" for key, value in params.items()),
        ]

    def corners(self) -> Iterator[list[str]]:
        """The overrides of jobs that set one option to each of its values, or to both its ends."""
        for key, found in self.distributions.items():
            for value in getattr(found, "choices", None) or (found.low, found.high):  # type: ignore[attr-defined]
                yield self.overrides({key: value})


def split(params: Mapping[str, Any], overrides: Sequence[str]) -> Space:
    """The space of `params` (from the config) and of the command line's overrides.

    An override replaces the entry of `params` for the same option, whatever `+` either has.
    """
    given = [f"{key}={value}" for key, value in params.items()]
    parsed = OverridesParser.create().parse_overrides([*given, *overrides])
    by_key = {o.key_or_group: o for o in parsed}
    searched = {key: o for key, o in by_key.items() if o.is_sweep_override()}
    return Space(
        fixed=[o.input_line or "" for o in by_key.values() if not o.is_sweep_override()],
        distributions={key: distribution(o) for key, o in searched.items()},
        prefixes={key: _prefix(o) for key, o in searched.items()},
    )


def _prefix(override: Override) -> str:
    return "++" if override.is_force_add() else "+" if override.is_add() else ""


def distribution(override: Override) -> BaseDistribution:
    """The distribution of an option's values."""
    from optuna.distributions import CategoricalDistribution

    value = override.value()
    if isinstance(value, IntervalSweep | RangeSweep):
        try:
            return _numbers(value)
        except ValueError as error:
            raise ConfigError(f"{override.input_line}: {error}") from None
    if override.is_discrete_sweep():
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    raise ConfigError(f"{override.input_line}: expected values, choice, range or interval")


def _numbers(value: IntervalSweep | RangeSweep) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    low, log = value.start, "log" in value.tags
    if isinstance(value, IntervalSweep):
        high, step = value.end, None
    else:
        assert value.step is not None and value.stop is not None  # noqa: PT018
        assert low is not None
        step = value.step
        last = math.ceil(round((value.stop - low) / step, 9)) - 1  # a range ends before its end
        high = round(low + last * step, 12)
    assert low is not None
    assert high is not None
    if isinstance(low, int) and isinstance(high, int) and not isinstance(step, float):
        return IntDistribution(low, high, log=log, step=step or 1)
    return FloatDistribution(float(low), float(high), log=log, step=step)
