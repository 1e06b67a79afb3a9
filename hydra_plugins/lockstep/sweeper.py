"""The sweeper of a search: Optuna chooses each trial's options by how earlier trials ended."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

SWEEP_OPTIONS = ("hydra", "sweep=")  # not repeated in the command that runs the best trial again


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
        self.job_launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> float | None:
        """Run the trials that are missing; the best objective."""
        from harness.sweep.progress import is_stopped
        from harness.sweep.search import Search, SearchConfig, split

        space = split(self.params, arguments)
        search = Search(SearchConfig(folder=self.folder, **self.options), num_trials=self.n_trials)
        search.check_free(replace_done=bool(self.composed.get("replace_done")))
        OmegaConf.save(self.composed, self.folder / "multirun.yaml")
        limit = self.composed.get("stop_after_failures")
        try:
            while not is_stopped(self.folder, limit) and (
                trials := search.ask(self.n_jobs, space.distributions)
            ):
                jobs = [
                    [
                        *space.overrides(trial.params),
                        f"hydra.sweeper.trial={trial.number}",
                        f"hydra.sweep.subdir={search.directory(trial.number).name}",
                    ]
                    for trial in trials
                ]
                try:
                    self.job_launcher.launch(jobs, initial_job_idx=trials[0].number)
                finally:
                    search.settle([trial.number for trial in trials])
        finally:
            print(search.result())
            if search.num_left and is_stopped(self.folder, limit):
                print(f"stop_after_failures={limit}: {search.num_left} trials were not started")
            if (best := search.best()) is not None:
                print(f"best: {best.value:g}, in {search.directory(best.number)}")
                print(f"  python run.py {command(space.overrides(best.params))}")
        return None if best is None else best.value


def command(overrides: list[str]) -> str:
    """The arguments that run one trial again, by itself."""
    options = [override.lstrip("+") for override in overrides]
    return shlex.join(option for option in options if not option.startswith(SWEEP_OPTIONS))
