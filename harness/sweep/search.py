"""A hyperparameter search: its study on disk, and what a trial reports while it runs.

sweeper                         study.db                  trial's process
-------                         --------                  ---------------
ask: parameters   --------->    RUNNING
launch            -------------------------------------->  train
                                intermediate value  <----  each evaluation
                                pruner's decision   ---->  continue, or raise `Pruned`
settle: read the trial's directory, tell the study
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from harness.callbacks import Pruned
from harness.errors import ConfigError
from harness.files import read_json
from harness.run_directory import RunDir, return_of

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution


DIRECTIONS = ("maximize", "minimize")
SAMPLERS = ("tpe", "random")
PRUNERS = ("median", "hyperband", "none")
FILE = "study.db"
WORDS = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed"}
INTERRUPTED = "interrupted"
RETRY_OF = "retry_of"  # attribute of a trial: the number of the interrupted trial it repeats


@dataclass
class SearchConfig:
    """The sweeper's options that describe the study."""

    study_name: str
    folder: Path
    direction: Literal["maximize", "minimize"] = "maximize"
    storage: str | None = None
    sampler: str = "tpe"
    pruner: str = "median"
    seed: int = 1

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("direction", self.direction, DIRECTIONS),
            ("sampler", self.sampler, SAMPLERS),
            ("pruner", self.pruner, PRUNERS),
        ):
            if value not in choices:
                raise ValueError(
                    f"hydra.sweeper.{name}={value}: expected one of {', '.join(choices)}"
                )

    def open_storage(self) -> optuna.storages.RDBStorage:
        """The study's database: the one that was given, or a file among the trials."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        url = self.storage or f"sqlite:///{self.folder.resolve() / FILE}"
        return optuna.storages.RDBStorage(url)

    def open_study(self, storage: optuna.storages.RDBStorage) -> optuna.Study:
        """The study, which is created if it does not exist."""
        import optuna

        return optuna.create_study(
            storage=storage,
            study_name=self.study_name,
            direction=self.direction,
            pruner=_pruner(self.pruner),
            load_if_exists=True,
        )


class Trial:
    """One trial of a study, in the process that runs it."""

    def __init__(self, config: SearchConfig, number: int):
        self.config = config
        self.number = number

    def report(self, step: int, value: float, *, final: bool = False) -> None:
        """Record an evaluation; raise `Pruned` if the trial is to end here."""
        import optuna

        if not math.isfinite(value):
            return
        storage = self.config.open_storage()
        study = self.config.open_study(storage)
        study_id = storage.get_study_id_from_name(self.config.study_name)
        trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, self.number)
        trial = optuna.trial.Trial(study, trial_id)
        trial.report(value, step)
        if not final and trial.should_prune():
            raise Pruned(f"at {step} frames, a return of {value:g} is behind other trials")


class Search:
    """The sweeper's side: asks the study for parameters and tells it how trials ended."""

    def __init__(self, config: SearchConfig, *, num_trials: int):
        self.config = config
        self.num_trials = num_trials
        config.folder.mkdir(parents=True, exist_ok=True)
        self.study = config.open_study(config.open_storage())
        self._recover()

    def directory(self, number: int) -> Path:
        """Where a trial runs."""
        return self.config.folder / f"trial-{number:04d}"

    @property
    def num_left(self) -> int:
        """How many of the wanted trials were not started; interrupted ones do not count."""
        started = [t for t in self._trials() if t.state.name != "WAITING"]
        interrupted = self._interrupted()
        return max(0, self.num_trials - sum(t.number not in interrupted for t in started))

    def check_free(self, *, replace_done: bool) -> None:
        """Raise `ConfigError` if finished runs that the study does not know are in the way."""
        begun = len(self._trials())
        for number in range(begun, begun + self.num_left):
            RunDir(self.directory(number)).check_free("", replace_done=replace_done)

    def ask(self, most: int, space: dict[str, Any]) -> list[optuna.Trial]:
        """The next trials, at most so many; none if all were started."""
        return [self._ask(space) for _ in range(min(most, self.num_left))]

    def _ask(self, space: dict[str, Any]) -> optuna.Trial:
        # Each trial has its own random stream, so that a resumed search draws the same values.
        self.study.sampler = _sampler(self.config, len(self._trials()))
        return self.study.ask(space)

    def settle(self, numbers: Sequence[int]) -> None:
        """Tell the study how these trials ended, by what their directories say."""
        from optuna.trial import TrialState

        trials = self._trials()
        for number in numbers:
            if trials[number].state != TrialState.RUNNING:
                continue
            directory = self.directory(number)
            state = read_json(directory / "status.json").get("state")
            value = return_of(read_json(directory / "summary.json"))
            if state == "done" and math.isfinite(value):
                self.study.tell(number, value)
            elif state == "pruned":
                self.study.tell(number, state=TrialState.PRUNED)
            elif state in ("done", "failed"):
                self.study.tell(number, state=TrialState.FAIL)
            else:
                self.study.enqueue_trial(trials[number].params, user_attrs={RETRY_OF: number})
                self.study.tell(number, state=TrialState.FAIL)

    def _recover(self) -> None:
        """Settle the trials that a killed sweep left behind, except those that still run."""
        left = [t.number for t in self._trials() if t.state.name == "RUNNING"]
        self.settle([number for number in left if not RunDir(self.directory(number)).is_alive()])

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _interrupted(self) -> set[int]:
        """The numbers of the trials that are repeated by another one."""
        return {t.user_attrs[RETRY_OF] for t in self._trials() if RETRY_OF in t.user_attrs}

    def result(self) -> str:
        """How many trials ended in which way."""
        interrupted = self._interrupted()
        states = Counter(
            INTERRUPTED if t.number in interrupted else WORDS[t.state.name]
            for t in self._trials()
            if t.state.is_finished()
        )
        counts = ", ".join(f"{count} {word}" for word, count in states.items()) or "none ended"
        return f"search {self.config.study_name}: {counts}"

    def best(self) -> optuna.trial.FrozenTrial | None:
        """The best trial so far, if any was completed."""
        if not any(t.state.name == "COMPLETE" for t in self._trials()):
            return None
        return self.study.best_trial


def _pruner(name: str) -> optuna.pruners.BasePruner:
    from optuna import pruners

    if name == "median":
        return pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=0)
    return pruners.HyperbandPruner() if name == "hyperband" else pruners.NopPruner()


def _sampler(config: SearchConfig, number: int) -> optuna.samplers.BaseSampler:
    from optuna import samplers

    seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])
    if config.sampler == "random":
        return samplers.RandomSampler(seed)
    return samplers.TPESampler(seed=seed)


# -- the space, written as Hydra's overrides and read as Optuna's distributions


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
        for key, distribution in self.distributions.items():
            space: Any = distribution
            for value in getattr(space, "choices", None) or (space.low, space.high):
                yield self.overrides({key: value})


def split(params: Mapping[str, Any], overrides: Sequence[str]) -> Space:
    """The space of `params` (from the config) and of the command line's overrides.

    An override replaces the entry of `params` for the same option, whatever `+` either has.
    """
    from_config = [f"{key}={value}" for key, value in params.items()]
    parsed = OverridesParser.create().parse_overrides([*from_config, *overrides])
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
