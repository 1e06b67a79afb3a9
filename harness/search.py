"""A hyperparameter search: its study on disk, its trials, and what one trial tells it on the way.

sweeper                         study.db                  trial's process
-------                         --------                  ---------------
ask: parameters   --------->    running
launch            -------------------------------------->  train
                                intermediate value  <----  each evaluation
                                pruner's word       ---->  go on, or end: `Pruned`
settle: read the trial's directory, tell the study
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from harness.files import read_json
from harness.run_dir import RunDir

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "random")
PRUNERS = ("median", "hyperband", "none")
FILE = "study.db"
INTERRUPTED = "interrupted"  # of a trial: it failed, but is tried again


class Pruned(Exception):
    """The search has seen enough of this run."""


@dataclass
class SearchConfig:
    """What the sweeper's options say."""

    study_name: str
    folder: Path
    direction: Literal["maximize", "minimize"] = "maximize"
    storage: str | None = None
    sampler: str = "tpe"
    pruner: str = "median"
    seed: int = 1

    def __post_init__(self) -> None:
        for name, value, known in (
            ("direction", self.direction, ("maximize", "minimize")),
            ("sampler", self.sampler, SAMPLERS),
            ("pruner", self.pruner, PRUNERS),
        ):
            if value not in known:
                raise ValueError(
                    f"hydra.sweeper.{name}={value}: expected one of {', '.join(known)}"
                )

    @property
    def url(self) -> str:
        """Where the study lives: what was given, or a file among the trials."""
        return self.storage or f"sqlite:///{self.folder.resolve() / FILE}"

    def study(self) -> optuna.Study:
        """The study, new or gone on with."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            storage=self.url,
            study_name=self.study_name,
            direction=self.direction,
            pruner=_pruner(self.pruner),
            load_if_exists=True,
        )


def _pruner(name: str) -> optuna.pruners.BasePruner:
    from optuna import pruners

    if name == "median":
        return pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=0)
    return pruners.HyperbandPruner() if name == "hyperband" else pruners.NopPruner()


def objective(summary: Mapping[str, Any]) -> float:
    """What is optimised: the return, in evaluation if there was any; NaN if there is none."""
    found = summary.get("eval/return", summary.get("episode/return"))
    try:
        return float(found) if isinstance(found, int | float) else math.nan
    except OverflowError:  # a file can hold larger numbers than a float
        return math.nan


class Trial:
    """One trial's line to its study, in the process that runs it."""

    def __init__(self, config: SearchConfig, trial_id: int):
        self.config = config
        self.trial_id = trial_id

    def report(self, step: int, value: float, *, final: bool = False) -> None:
        """An evaluation on the way; `Pruned` if the rest is not worth running."""
        if not math.isfinite(value):
            return
        study = self.config.study()
        study._storage.set_trial_intermediate_value(self.trial_id, step, value)
        trial = study._storage.get_trial(self.trial_id)
        if not final and study.pruner.prune(study, trial):
            raise Pruned(f"at {step} frames, a return of {value:g} is behind other trials")


class Search:
    """The sweeper's side: asks for parameters and tells how trials ended."""

    def __init__(self, config: SearchConfig, *, num_trials: int):
        self.config = config
        self.num_trials = num_trials
        config.folder.mkdir(parents=True, exist_ok=True)
        self.study = config.study()
        self._recover()

    def directory(self, number: int) -> Path:
        """Where a trial runs."""
        return self.config.folder / trial_name(number)

    def ask(self, most: int, space: dict[str, Any]) -> list[optuna.Trial]:
        """The next trials, at most so many; none if all are done."""
        return [self._ask(space) for _ in range(min(most, self.num_left))]

    @property
    def num_left(self) -> int:
        """How many trials of those wanted have not been run or started."""
        trials = self.study.get_trials(deepcopy=False)
        counted = [
            t for t in trials if not t.user_attrs.get(INTERRUPTED) and t.state.name != "WAITING"
        ]
        return max(0, self.num_trials - len(counted))

    def _ask(self, space: dict[str, Any]) -> optuna.Trial:
        # A stream of its own for each trial: a search that goes on draws what it would have drawn.
        number = len(self.study.get_trials(deepcopy=False))
        self.study.sampler = _sampler(self.config, number)
        return self.study.ask(space)

    def settle(self, numbers: Sequence[int]) -> None:
        """Tell the study how these trials ended, by what their directories say."""
        from optuna.trial import TrialState

        trials = self.study.get_trials(deepcopy=False)
        for number in numbers:
            if trials[number].state != TrialState.RUNNING:
                continue
            directory = self.directory(number)
            state = read_json(directory / "status.json").get("state")
            value = objective(read_json(directory / "summary.json"))
            if state == "done" and math.isfinite(value):
                self.study.tell(number, value)
            elif state == "pruned":
                self.study.tell(number, state=TrialState.PRUNED)
            elif state in ("done", "failed"):
                self.study.tell(number, state=TrialState.FAIL)
            else:
                self._try_again(trials[number])

    def _recover(self) -> None:
        """Trials that a sweep left running when it was killed, unless they run still."""
        from optuna.trial import TrialState

        left = self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        self.settle([t.number for t in left if not RunDir(self.directory(t.number)).is_alive()])

    def _try_again(self, trial: optuna.trial.FrozenTrial) -> None:
        from optuna.trial import TrialState

        self.study._storage.set_trial_user_attr(trial._trial_id, INTERRUPTED, True)
        self.study.tell(trial.number, state=TrialState.FAIL)
        self.study.enqueue_trial(trial.params)

    def result(self) -> str:
        """What the search found, in words."""
        trials = [t for t in self.study.get_trials(deepcopy=False) if t.state.is_finished()]
        states = Counter(
            INTERRUPTED if t.user_attrs.get(INTERRUPTED) else WORDS[t.state.name] for t in trials
        )
        counts = ", ".join(f"{count} {word}" for word, count in states.items()) or "none ended"
        return f"search {self.config.study_name}: {counts}"

    def best(self) -> optuna.trial.FrozenTrial | None:
        """The best trial so far, if any was completed."""
        if not any(t.state.name == "COMPLETE" for t in self.study.get_trials(deepcopy=False)):
            return None
        return self.study.best_trial


WORDS = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed"}


def trial_name(number: int) -> str:
    """The name of a trial's directory."""
    return f"trial-{number:04d}"


def _sampler(config: SearchConfig, number: int) -> optuna.samplers.BaseSampler:
    from optuna import samplers

    seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])
    if config.sampler == "random":
        return samplers.RandomSampler(seed)
    return samplers.TPESampler(seed=seed)
