"""The sweeper that searches: optuna chooses each trial's options by how the earlier ones did."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

OF_THE_SWEEP = ("hydra", "++sweep=", "sweep=")


class OptunaSweeper(Sweeper):
    """`hydra/sweeper=optuna`; its options are described in conf/hydra/sweeper/optuna.yaml."""

    def __init__(
        self, *, n_trials: int, n_jobs: int, params: DictConfig, trial: int | None, **options: Any
    ):
        for name, value in (("n_trials", n_trials), ("n_jobs", n_jobs)):
            if value < 1:
                raise ValueError(f"hydra.sweeper.{name}={value}: expected 1 or more")
        self.n_trials = n_trials
        self.n_jobs = n_jobs
        self.params = {str(key): value for key, value in params.items()}
        self.options = options

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.folder = Path(config.hydra.sweep.dir)
        self.composed = config
        self.jobs = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> float | None:
        """Run the trials that are missing; the best objective."""
        from harness.config.space import split
        from harness.search import Search, SearchConfig

        fixed, space = split(self.params, arguments)
        search = Search(SearchConfig(folder=self.folder, **self.options), num_trials=self.n_trials)
        OmegaConf.save(self.composed, self.folder / "multirun.yaml")
        try:
            while trials := search.ask(self.n_jobs, space):
                jobs = [
                    [
                        *fixed,
                        *(f"++{key}={value}" for key, value in trial.params.items()),
                        f"hydra.sweeper.trial={trial._trial_id}",
                        f"hydra.sweep.subdir={search.directory(trial.number).name}",
                    ]
                    for trial in trials
                ]
                try:
                    self.jobs.launch(jobs, initial_job_idx=trials[0].number)
                finally:
                    search.settle([trial.number for trial in trials])
        finally:
            tell(search, fixed)
        best = search.best()
        return None if best is None else best.value


def tell(search: Any, fixed: list[str]) -> None:
    """Print what was found, and the command that runs it again."""
    print(search.result())
    best = search.best()
    if best is None:
        return
    options = [*fixed, *(f"{key}={value}" for key, value in best.params.items())]
    given = [option.lstrip("+") for option in options if not option.startswith(OF_THE_SWEEP)]
    print(f"best: {best.value:g}, in {search.directory(best.number)}")
    print(f"  python run.py {shlex.join(given)}")
