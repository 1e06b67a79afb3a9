"""One run from start to end: its directory, its parts, and how it ended."""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from collectors.rollout.seeds import untouched_streams
from harness.algorithms.interface import Learner
from harness.callbacks import Pruned
from harness.config.plan import RunPlan
from harness.environments.evaluate import Evaluator
from harness.environments.factory import EnvFactory, single
from harness.errors import ConfigError
from harness.files import one_line, read_json
from harness.logging import Loggers, RunInfo, make_loggers
from harness.logging.display import Display
from harness.logging.run_log import run_log
from harness.measures.sync_meter import SyncMeter
from harness.options.collectors import JoiningCollectorConfig
from harness.options.run import Config
from harness.run.build import (
    describe_sync,
    make_callbacks,
    make_collector,
    make_free_running,
    make_learner,
    make_scheme,
    show_observations,
    try_environment,
    try_policy,
)
from harness.run.checkpoints import CheckpointError, Checkpoints
from harness.run.provenance import manifest
from harness.run.published_weights import PublishedWeights
from harness.run.signals import WRITTEN, Interrupted, Interruption
from harness.run.training_loop import TrainingLoop
from harness.run_directory import RunDir, RunDirInUse, return_of
from sync import WeightSyncScheme
from sync.errors import WorkerDied, WorkerTimeout

log = logging.getLogger(__name__)

FAILED, USAGE_ERROR = 1, 2
# What loading a state may raise that somebody else has written, beside what workers report.
MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
EVALUATION_SEED = 1_000_000  # the same for every run, so that runs can be compared


class Ending(NamedTuple):
    """What is said of a run by what ended it."""

    error: type
    state: str
    status: int  # of the program
    sentence: str = ""  # about the error; without one, the error is described line by line
    without_checkpoint: str = ""  # added if the run cannot go on


ENDINGS = (  # the first that fits
    Ending(type(None), "done", 0),
    Ending(
        Interrupted,
        "interrupted",
        128,  # and the number of the signal
        "interrupted by {}",
        " before there was a checkpoint",
    ),
    Ending(CheckpointError, "failed", USAGE_ERROR, "{}"),
    Ending(Pruned, "pruned", 0, "pruned: {}"),
    Ending(BaseException, "failed", FAILED),
)


@dataclass
class Outcome:
    """How a run ended."""

    exit_status: int
    state: str
    summary: dict[str, Any] = field(default_factory=dict)
    signum: int | None = None  # a signal that asked for the end, in time for that or not

    @property
    def objective(self) -> float:
        """What a sweeper may optimise: the return, in evaluation if there was any."""
        return return_of(self.summary) if self.state == "done" else math.nan


def execute(plan: RunPlan) -> Outcome:
    """Do the run. It raises only `ConfigError`; any other error is in the outcome."""
    if collects_for_another(plan.config):
        try:
            collect_for_another(plan.config)
        except ConnectionError as error:
            print(f"lockstep: {one_line(error)}", file=sys.stderr)
            return Outcome(FAILED, "failed")
        return Outcome(0, "done")
    if plan.is_skipped:
        return finished(plan)
    with own_state(seed=plan.config.seed, num_threads=plan.config.num_threads):
        return _execute(plan)


@contextmanager
def own_state(*, seed: int, num_threads: int) -> Iterator[None]:
    """Seed the global random streams and set torch's thread count; restore both afterwards."""
    threads = torch.get_num_threads()
    with untouched_streams():
        torch.set_num_threads(num_threads)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _execute(plan: RunPlan) -> Outcome:
    try_environment(plan.config)
    learner = make_learner(plan.config)
    try_policy(plan.config, learner)
    state = saved_state(plan, learner) if plan.resume else None
    if plan.skip_done and RunDir(plan.directory).is_interrupted_with(plan.yaml):
        try:
            state = saved_state(plan, learner)
        except ConfigError as error:
            print(f"lockstep: {plan.directory} starts anew: {error}", file=sys.stderr)
            learner = make_learner(plan.config)
        else:
            plan = replace(plan, resume=True)
            print(f"{plan.directory} goes on from frame {state[0]:,}", flush=True)
    if state is None and plan.branch is not None:
        state = branch_state(plan, learner)
    if state and state[0] >= plan.config.total_frames and is_complete(plan):
        return finished(plan)
    display = Display(plan.config.total_frames, print_every_s=plan.config.print_every_s)
    # Signals wait while the directory is made, and while the end is written into it.
    with Interruption(WRITTEN) as interruption:
        run_dir = open_directory(plan)
        with run_log(run_dir.log):
            return RunLifetime(plan, run_dir, learner, display, interruption, state).outcome()


def is_complete(plan: RunPlan) -> bool:
    """Whether the directory holds this run with its end and its summary."""
    run_dir = RunDir(plan.directory)
    return run_dir.is_done_with(plan.yaml) and bool(run_dir.read_summary())


def finished(plan: RunPlan) -> Outcome:
    """How the run ended that was done before; its directory is left alone."""
    print(f"{plan.directory} is done already")
    return Outcome(0, "done", RunDir(plan.directory).read_summary())


def saved_state(plan: RunPlan, learner: Learner) -> tuple[int, dict[str, Any]]:
    """The newest sound checkpoint's frame and state, tried on the learner; nothing is changed yet.

    A checkpoint that does not fit is a mistake in what the run was told to go on from.
    """
    run_dir = RunDir(plan.directory)
    try:
        run_dir.check()
        with run_log(run_dir.log):
            frames, state = Checkpoints(run_dir.checkpoints, run=run_dir.read_id()).load()
        with fits_this_run():
            if state["frames"] != frames or not isinstance(state["collector"], dict):
                raise ValueError(f"it is not of frame {frames}")
            learner.load_state_dict(state["learner"])
    except (RunDirInUse, CheckpointError, ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    return frames, state


def branch_state(plan: RunPlan, learner: Learner) -> tuple[int, dict[str, Any]]:
    """The frame and the state that a branch begins with, tried on the learner."""
    assert plan.branch is not None
    try:
        frames, state = plan.branch.load(plan.config)
        with fits_this_run():
            learner.load_state_dict(state["learner"])
    except (CheckpointError, ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    return frames, state


@contextmanager
def fits_this_run() -> Iterator[None]:
    """Whatever loading a state raises, as a `CheckpointError` of one line."""
    try:
        yield
    except (WorkerDied, WorkerTimeout):  # which say nothing of the state
        raise
    except MISFITS as error:
        text = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the checkpoint does not fit this run: {one_line(text)}") from error


def open_directory(plan: RunPlan) -> RunDir:
    """The run's directory, new or resumed."""
    try:
        if plan.resume:
            return RunDir.reopen(plan.directory, config=plan.yaml)
        origin = manifest(seed=plan.config.seed, overrides=plan.overrides)
        resolved = {f"sync.{k}": v for k, v in plan.config.sync.resolved(plan.config).items()}
        origin |= {"sweep": plan.sweep, "wandb_id": secrets.token_hex(4), "resolved": resolved}
        if plan.branch is not None:
            origin["branch"] = plan.branch.origin
        run_dir = RunDir.open(
            plan.directory, config=plan.yaml, manifest=origin, replace_done=plan.replace_done
        )
        if plan.branch is not None:
            from harness.run.branch_start import copy_start  # here: other runs need none of it

            with failing(run_dir):
                copy_start(plan.branch.start, run_dir.path)
        return run_dir
    except OSError as error:
        raise ConfigError(f"{plan.directory} cannot be written: {error}") from error


@contextmanager
def failing(run_dir: RunDir) -> Iterator[None]:
    """Mark the run as failed if its directory cannot be written."""
    try:
        yield
    except OSError as error:
        run_dir.set_state("failed", error)
        raise


@dataclass(eq=False)
class RunLifetime:
    """What belongs to one run while it lasts."""

    plan: RunPlan
    run_dir: RunDir
    learner: Learner
    display: Display
    interruption: Interruption
    state: tuple[int, dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.loggers = Loggers([])
        self.loop: TrainingLoop | None = None
        self.summary: dict[str, Any] = {}

    def outcome(self) -> Outcome:
        """Run, and always leave a directory that says how the run ended."""
        error: BaseException | None = None
        try:
            self._run()
        except BaseException as raised:  # noqa: BLE001 - an environment may raise SystemExit
            error = raised
        return self._end(next(one for one in ENDINGS if isinstance(error, one.error)), error)

    def _run(self) -> None:
        # Whatever ends the run, its parts are shut down in peace.
        with self.interruption.whole(), ExitStack() as stack, self.interruption.anywhere():
            self._cut_metrics()
            self.loggers = make_loggers(self.plan.config.logger, self.run_dir, self._info())
            config = self.plan.config
            for text in (text for part in config.parts() for text in part.warnings(config)):
                log.warning(text)
            if self.state is None:
                show_observations(config, self.learner)
            scheme = make_scheme(config)
            stack.callback(scheme.shutdown)
            published = self._published(scheme)
            collector = make_collector(config, self.learner, scheme, self.run_dir.schedule)
            stack.callback(collector.shutdown, raise_on_error=False)
            evaluator = self._evaluator()
            stack.callback(evaluator.close)
            loop = self.loop = TrainingLoop(
                config=config,
                learner=self.learner,
                collector=collector,
                free_running=make_free_running(config, collector, self.learner),
                sync=SyncMeter(scheme, scheme.num_workers),
                published=published,
                play=lambda: self._evaluate(evaluator),
                checkpoints=Checkpoints(
                    self.run_dir.checkpoints,
                    keep=config.checkpoint.keep,
                    run=self.run_dir.read_id(),
                ),
                loggers=self.loggers,
                display=self.display,
                interruption=self.interruption,
                callbacks=[*make_callbacks(config.callbacks), *self.plan.watchers],
                directory=self.run_dir.path,
            )
            if self.state is not None:
                with fits_this_run():
                    loop.load_state_dict(self.state[1])
                self.state = None
            self.display.start(
                self.plan.options,
                self.run_dir.path,
                show_config=self.plan.sweep is None,
                frames=loop.frames,
                run=loop,
                sync=describe_sync(config, scheme),
            )
            try:
                loop.run()
            except Interrupted as interrupted:
                if interrupted.whole:
                    self._save(loop)
                raise
            finally:
                self._summarise(loop)
            with self.interruption.whole():
                self._save(loop)

    def _published(self, scheme: WeightSyncScheme) -> PublishedWeights:
        """What was published, with which a resumed run begins."""
        kept = scheme.history + 1 if scheme.history or self.plan.config.sync.interval > 1 else 0
        published = PublishedWeights(self.learner.policy, kept)
        if self.state is None:
            published.add()
            return published
        with fits_this_run():
            state = self.state[1]
            follow = published.go_back(state["published"])
            scheme.first_version = int(state["collector"]["policy_version"]) - follow
        return published

    def _evaluator(self) -> Evaluator:
        config = self.plan.config
        return Evaluator(
            EnvFactory(single(config.env), plugins=tuple(config.plugins)),
            episodes=config.evaluation.num_episodes,
            seed=EVALUATION_SEED,
            max_steps=config.evaluation.max_steps,
        )

    def _evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        """Evaluate; a search hears of it, and may have seen enough."""
        scores = evaluator.run(self.learner.policy)
        if self.plan.trial is not None:
            assert self.loop is not None
            frames = self.loop.frames
            final = frames >= self.plan.config.total_frames
            self.plan.trial.report(frames, return_of(scores), final=final)
        return scores

    def _summarise(self, loop: TrainingLoop) -> None:
        """Whatever ended the run is what is reported, and not what that did to the figures."""
        ended_early = sys.exception() is not None  # its parts may be shut down already
        try:
            self.summary = loop.summary()
        except Exception:
            level = logging.INFO if ended_early else logging.ERROR
            log.log(level, "the run cannot be summed up", exc_info=True)
        loop.call("on_run_end", self.summary)

    def _save(self, loop: TrainingLoop) -> None:
        if self.plan.config.checkpoint.at_end:
            loop.save()

    def _cut_metrics(self) -> None:
        if self.state is not None:
            frames, state = self.state
            with fits_this_run():
                logged_at, evaluated_at = int(state["logged_at"]), int(state["evaluated_at"])
            cut = self.run_dir.cut_metrics(logged_at, evaluated_at)
            log.info("going on at frame %d; %d later records taken back", frames, cut)

    def _info(self) -> RunInfo:
        config = self.plan.config
        stored = read_json(self.run_dir.manifest)
        return RunInfo(
            name=self.run_dir.path.name,
            options=self.plan.options,
            group=group if isinstance(group := stored.get("sweep"), str) else None,
            job_type=f"{config.sync.name}/{config.collector.name}",
            wandb_id=self.run_dir.read_id() or "",
            resumed=self.plan.resume,
        )

    def _end(self, ending: Ending, error: BaseException | None) -> Outcome:
        """The last words, to the loggers, the directory and the person."""
        status, state = ending.status, ending.state
        if isinstance(error, Interrupted):
            status = error.exit_status
        elif isinstance(error, Exception) and not ending.sentence:
            log.info("the run failed", exc_info=error)
        self.display.stop()
        try:
            with self.interruption.whole():
                self.loggers.finish(self.summary, status)
        except Interrupted:  # a second signal
            log.warning("not all loggers were waited for")
        finally:
            self.interruption.over()
            if not self._is_written(state, error):
                status, state = status or FAILED, "failed" if state == "done" else state
        resumable = bool(Checkpoints(self.run_dir.checkpoints).files())
        if ending.sentence:
            when = "" if resumable else ending.without_checkpoint
            print(f"lockstep: {ending.sentence.format(error)}{when}", file=sys.stderr)
        elif error is not None:
            from harness.run.failure import describe

            headline, *lines = describe(error)
            print("\n".join([f"lockstep: {state}: {headline}", *lines]), file=sys.stderr)
            if self.run_dir.traceback.is_file():
                print(f"lockstep: the traceback is in {self.run_dir.traceback}", file=sys.stderr)
        # The recording of a resumed run lacks what its workers were at when they were ended.
        whole = not (self.plan.resume and self.run_dir.schedule.exists())
        self.display.finish(
            state,
            self.summary,
            resumable=resumable,
            repeatable=whole,
            may_wait=self._may_wait(),
            remarks=self.loggers.remarks,
        )
        return Outcome(status, state, self.summary, self.interruption.pending)

    def _is_written(self, state: str, error: BaseException | None) -> bool:
        """Write the end into the directory; whether that could be."""
        shown = None if state == "interrupted" else error
        try:
            self.run_dir.end(state, summary=self.summary, error=shown)
        except Exception as unwritten:
            log.info("the end was not written", exc_info=True)
            where = self.run_dir.path
            print(f"lockstep: {where} cannot be written: {unwritten!r}", file=sys.stderr)
            return False
        return True

    def _may_wait(self) -> bool:
        """Whether sync.on_stale=wait is left to be tried, and keeps frames below the limit."""
        config = self.plan.config
        sync = config.sync
        episodes, waits = sync.apply_at == "episode", sync.on_stale == "wait"
        return config.collector.asynchronous and not (episodes or waits)


# -- ranks that a launcher started: all but the first are hosts, which collect for rank 0


def collects_for_another(config: Config) -> bool:
    """Whether this process is a host of the run that rank 0 does."""
    collector = config.collector
    joins = isinstance(collector, JoiningCollectorConfig) and collector.joins_ranks
    return joins and os.environ["RANK"] != "0"


def collect_for_another(config: Config) -> None:
    """Run a host until the trainer stops it or is gone.

    It ignores the signals that launchers send to all ranks, because the trainer needs its hosts to
    end the run with a checkpoint.
    """
    assert isinstance(config.collector, JoiningCollectorConfig)
    remote = config.collector.remote
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    from collectors import DistributedCollector, RPCCollector

    kind = RPCCollector if config.collector.name == "rpc" else DistributedCollector
    kind.serve_rank(
        address=remote.address,
        timeout=remote.start_timeout_s,
        silence_s=config.collector.timeout_s,
    )
