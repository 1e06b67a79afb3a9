"""One run from start to end: its directory, its parts, its end and what is said of it."""

from __future__ import annotations

import logging
import math
import secrets
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.checkpoints import Checkpoints
from harness.config import ConfigError, RunPlan
from harness.display import Display
from harness.evaluate import Evaluator
from harness.files import read_json
from harness.learners import Learner
from harness.loggers import Loggers, RunInfo, make_loggers
from harness.pipeline import make_collector, make_learner, make_scheme
from harness.provenance import manifest
from harness.run_dir import RunDir, RunDirInUse
from harness.runner import Runner
from harness.signals import Interrupted, Interruption
from harness.sources import make_source
from harness.sync_metrics import SyncMeter

log = logging.getLogger(__name__)

FAILED = 1
EVALUATION_SEED = 1_000_000  # the same for every run, so that runs can be compared


@dataclass
class Outcome:
    """How a run ended."""

    exit_status: int
    state: str
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def objective(self) -> float:
        """What a sweeper may optimise: the return, in evaluation if there was any."""
        found = self.summary.get("eval/return", self.summary.get("episode/return"))
        return math.nan if found is None else float(found)


def execute(plan: RunPlan) -> Outcome:
    """Do the run. Only `ConfigError` comes out of here; all else is in the outcome."""
    if plan.skip_done and RunDir(plan.directory).is_done_with(plan.yaml):
        print(f"{plan.directory} is done already")
        return Outcome(0, "done", read_json(plan.directory / "summary.json"))
    torch.set_num_threads(plan.config.num_threads)
    torch.manual_seed(plan.config.seed)
    learner = make_learner(plan.config)
    run_dir = open_directory(plan)
    display = Display(plan.config.total_frames, print_every_s=plan.config.print_every_s)
    try:
        with run_dir.logging(), Interruption() as interruption:
            return Execution(plan, run_dir, learner, display, interruption).outcome()
    except Interrupted as again:  # a second signal, while the first one's end was under way
        return Outcome(again.exit_status, "interrupted")


def open_directory(plan: RunPlan) -> RunDir:
    """The run's directory, new or gone on with."""
    if plan.resume:
        try:
            return RunDir.reopen(plan.directory, config=plan.yaml)
        except RunDirInUse as error:
            raise ConfigError(str(error)) from error
    found = manifest(seed=plan.config.seed, overrides=plan.overrides)
    found |= {"sweep": plan.sweep, "wandb_id": secrets.token_hex(4)}
    return RunDir.open(plan.directory, config=plan.yaml, manifest=found)


class Execution:
    """What belongs to one run while it lasts."""

    def __init__(
        self,
        plan: RunPlan,
        run_dir: RunDir,
        learner: Learner,
        display: Display,
        interruption: Interruption,
    ):
        self.plan = plan
        self.run_dir = run_dir
        self.learner = learner
        self.display = display
        self.interruption = interruption
        self.checkpoints = Checkpoints(run_dir.checkpoints, keep=plan.config.checkpoint.keep)
        self.loggers = Loggers([])
        self.runner: Runner | None = None
        self.summary: dict[str, Any] = {}

    def outcome(self) -> Outcome:
        """Run, and whatever happens leave a directory behind that says what did."""
        status, state = 0, "done"
        error: BaseException | None = None
        try:
            self._run()
        except Interrupted as interrupted:
            status, state, error = interrupted.exit_status, "interrupted", interrupted
        except Exception as failure:
            log.info("the run failed", exc_info=True)
            status, state, error = FAILED, "failed", failure
        except BaseException as unforeseen:
            self._end(FAILED, "failed", unforeseen)
            raise
        self._end(status, state, error)
        return Outcome(status, state, self.summary)

    def _run(self) -> None:
        with ExitStack() as stack:
            state = self._load() if self.plan.resume else None
            self.loggers = make_loggers(self.plan.config.logger, self.run_dir, self._info())
            scheme = make_scheme(self.plan.config.sync)
            stack.callback(scheme.shutdown)
            collector = make_collector(self.plan.config, self.learner, scheme)
            stack.callback(collector.shutdown, raise_on_error=False)
            evaluator = self._evaluator()
            stack.callback(evaluator.close)
            runner = self.runner = Runner(
                self.plan.config,
                learner=self.learner,
                collector=collector,
                source=make_source(self.plan.config, collector, self.learner),
                sync=SyncMeter(scheme, self.plan.config.collector.num_workers),
                evaluate=lambda: evaluator.run(self.learner.policy),
                checkpoints=self.checkpoints,
                loggers=self.loggers,
                display=self.display,
                interruption=self.interruption,
            )
            if state is not None:
                runner.load_state_dict(state)
            self.display.start(self.plan.options, self.run_dir.path, frames=runner.frames)
            try:
                runner.run()
            except Interrupted as interrupted:
                if interrupted.whole:
                    self._save(runner)
                raise
            finally:
                self._summarise(runner)
            self._save(runner)

    def _evaluator(self) -> Evaluator:
        config = self.plan.config
        return Evaluator(config.env, episodes=config.evaluation.num_episodes, seed=EVALUATION_SEED)

    def _summarise(self, runner: Runner) -> None:
        """Whatever ended the run is what is reported, and not what that did to the figures."""
        try:
            self.summary = runner.summary()
        except Exception:
            log.exception("the run cannot be summed up")

    def _save(self, runner: Runner) -> None:
        if self.plan.config.checkpoint.at_end:
            runner.save()

    def _load(self) -> dict[str, Any]:
        frames, state = self.checkpoints.load()
        cut = self.run_dir.cut_metrics(frames)
        log.info("going on at frame %d; %d later records taken back", frames, cut)
        return state

    def _info(self) -> RunInfo:
        config = self.plan.config
        known = read_json(self.run_dir.manifest)
        return RunInfo(
            name=self.run_dir.path.name,
            options=self.plan.options,
            group=known.get("sweep"),
            job_type=f"{config.sync.name}/{config.collector.name}",
            wandb_id=known.get("wandb_id") or "",
            resumed=self.plan.resume,
            tags=config.logger.tags,
        )

    def _end(self, status: int, state: str, error: BaseException | None) -> None:
        """The last words, to the loggers, the directory and the person."""
        self.display.stop()
        try:
            self.loggers.finish(self.summary, status)
        finally:
            shown = None if state == "interrupted" else error
            self.run_dir.end(state, summary=self.summary, error=shown)
        if state == "interrupted":
            print(f"run.py: interrupted by {error}", file=sys.stderr)
        elif error is not None:
            print(f"run.py: {state}: {type(error).__name__}: {error}", file=sys.stderr)
            print(f"run.py: the traceback is in {self.run_dir.status}", file=sys.stderr)
        self.display.finish(state, self.summary)
