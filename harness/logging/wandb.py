"""Weights & Biases, in its own thread: the run does not wait for it and does not fail with it.

run                        thread "lockstep-wandb"
---                        -----------------------
log(...)   --queue-->      init, log, log, ...
                           online, if that cannot be: offline, with a warning, again at the end
finish()   --queue-->      summary, files and exit code, end W&B's own process
waits, at most FINISH_S    an error anywhere: one warning, and all further records are dropped
"""

from __future__ import annotations

import logging
import queue
import shlex
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.logging import Logger, Metrics, RunInfo
from harness.measures.meters import Histogram
from harness.options.run import LoggerConfig
from harness.registry import loggers
from harness.run_directory import RunDir

log = logging.getLogger(__name__)

WAITING = 10_000  # records, before a W&B that does not keep up loses some
FINISH_S = 30.0
SILENT = logging.CRITICAL + 1
STEP = "global_step"
# What CleanRL's users look for, beside the names that all loggers have.
ALIASES = {
    "charts/episodic_return": "episode/return",
    "charts/episodic_length": "episode/length",
    "charts/SPS": "collector/fps",
}


@dataclass
class WandbConfig(LoggerConfig):
    """Weights & Biases, offline unless told otherwise."""

    mode: Literal["offline", "online", "disabled"] = "offline"  # offline runs can be synced later
    project: str = "lockstep"  # the project of the run
    entity: str | None = None  # the account or team; null: your own
    tags: list[str] = field(default_factory=list)  # of the run
    # files of the run to keep there: manifest (with the code's commit and changes), checkpoint
    artifacts: list[Literal["manifest", "checkpoint"]] = field(default_factory=list)
    system_metrics: bool = False  # W&B's own, beside system/* in every record


class WandbLogger(Logger):
    """One W&B run, offline or online."""

    def __init__(self, options: WandbConfig, run_dir: RunDir, info: RunInfo):
        self._options = options
        self._folder = run_dir.path
        self._info = info
        self._jobs: queue.Queue[Callable[[Any], None] | None] = queue.Queue(WAITING)
        self._lost = 0
        self._thread = threading.Thread(target=self._work, name="lockstep-wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics, histograms: Mapping[str, Histogram]) -> None:
        values, bins = dict(metrics), dict(histograms)
        self._put(lambda run: _log(run, step, values, bins))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        if self._lost:
            log.warning("W&B did not keep up: %d records are only in metrics.jsonl", self._lost)
        final = dict(summary)
        self._put(lambda run: self._finish(run, final, exit_code))
        self._put(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            self.remark = (
                f"W&B did not finish within {FINISH_S:g} s, and this program may wait for it at "
                "its end; metrics.jsonl is complete"
            )
            log.warning(self.remark)

    def _put(self, job: Callable[[Any], None] | None) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._lost += 1

    def _work(self) -> None:
        run = None
        try:
            run = self._start()
            while (job := self._jobs.get()) is not None:
                job(run)
        except Exception as error:  # noqa: BLE001, whatever happens in there, the run goes on
            log.warning("W&B failed, and the run continues without it: %s", error)
            while self._jobs.get() is not None:
                pass
        finally:
            _tear_down()

    def _start(self) -> Any:
        # Its log would print a traceback for each line that a full disk does not take.
        logging.getLogger("wandb").setLevel(SILENT)
        if self._options.mode != "online":
            return self._init(self._options.mode)
        try:
            return self._init("online")
        except Exception as error:  # noqa: BLE001 - no key, no network, an account that may not
            reason = str(error)
        _tear_down()
        run = self._init("offline")
        self.remark = (
            f"W&B could not be reached, and has the run offline: {reason.rstrip('.')}. To upload "
            f"it: wandb sync {shlex.quote(str(Path(run.dir).parent))}"
        )
        log.warning(self.remark)
        return run

    def _init(self, mode: Any) -> Any:
        import wandb

        options = self._options
        run = wandb.init(
            dir=str(self._folder),
            mode=mode,
            project=options.project,
            entity=options.entity,
            name=self._info.name,
            group=self._info.group,
            job_type=self._info.job_type,
            tags=options.tags,
            config=self._info.options,
            id=self._info.wandb_id or None,
            resume="allow" if self._info.resumed else None,
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                init_timeout=FINISH_S,
                x_disable_stats=not options.system_metrics,
            ),
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def _finish(self, run: Any, summary: dict[str, Any], exit_code: int) -> None:
        for name, value in summary.items():
            run.summary[name] = value
        try:
            keep(run, self._folder, self._options.artifacts)
        except (ValueError, OSError) as error:
            log.warning("the run's files are not in W&B: %s", error)
        run.finish(exit_code=exit_code)


def _log(run: Any, step: int, metrics: dict[str, float], bins: dict[str, Histogram]) -> None:
    import wandb

    drawn = {
        name: wandb.Histogram(np_histogram=(np.array(bin.counts), np.array(bin.edges)))
        for name, bin in bins.items()
    }
    aliases = {alias: metrics[name] for alias, name in ALIASES.items() if name in metrics}
    run.log({STEP: step, **metrics, **aliases, **drawn}, step=step)


def _tear_down() -> None:
    """End W&B's own process, which would otherwise stay until this one ends."""
    import wandb

    try:
        wandb.teardown()
    except Exception as error:  # noqa: BLE001, nothing depends on it any more
        log.warning("W&B did not end cleanly: %s", error)


@loggers.register("wandb", options=WandbConfig)
def make(options: WandbConfig, run_dir: RunDir, info: RunInfo) -> WandbLogger | None:
    """`logger=wandb`; None where it is disabled."""
    return None if options.mode == "disabled" else WandbLogger(options, run_dir, info)


# -- the files of a run that W&B keeps as artifacts


def keep(run: Any, folder: Path, kinds: Sequence[str]) -> None:
    """Log the chosen files; a file that the run does not have is left out."""
    import wandb

    for kind in kinds:
        artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
        for file in files(folder, kind):
            if kind == "manifest":  # which may change before the run is sent
                copy = Path(run.dir, "artifacts", file.name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                file = shutil.copyfile(file, copy)
            # Else W&B copies the file into the home directory.
            artifact.add_file(str(file), name=file.name, policy="immutable")
        if artifact.manifest.entries:
            run.log_artifact(artifact)


def files(folder: Path, kind: str) -> list[Path]:
    """The files of a run's directory that are kept: its manifest and config, or a checkpoint."""
    if kind == "checkpoint":
        return sorted((folder / "checkpoints").glob("[0-9]*.safetensors"))[-1:]
    return [file for name in ("manifest.json", "config.yaml") if (file := folder / name).is_file()]
