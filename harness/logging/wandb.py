"""Weights & Biases, in its own thread: the run does not wait for it and does not fail with it.

runner                     thread "lockstep-wandb"
------                     -----------------------
log(...)   --queue-->      init, log, log, ...
                           online, if that cannot be: offline, with a warning, again at the end
finish()   --queue-->      summary, files and exit code, end W&B's own process
waits, at most FINISH_S    an error anywhere: one warning, and all further records are let go
and then ends W&B's own process, whose answer the thread may wait for
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.logging import Histogram, Logger, Metrics, RunInfo
from harness.options.loggers import WandbConfig
from harness.run.directory import RunDir
from harness.run.provenance import ROOT

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
        chosen, plugins = self._options.artifacts, self._info.options.get("plugins") or ()
        files = Files(self._folder, chosen, plugins)
        self._put(lambda run: _finish(run, final, exit_code, files))
        self._put(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            log.warning("W&B did not finish within %g s; metrics.jsonl is complete", FINISH_S)
            _kill_service()
            self._thread.join(FINISH_S / 10)

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
            if run is None:  # there is nothing to be finished
                _kill_service()
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
            settings=quiet(init_timeout=FINISH_S, x_disable_stats=not options.system_metrics),
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run


def _log(run: Any, step: int, metrics: dict[str, float], bins: dict[str, Histogram]) -> None:
    import wandb

    drawn = {
        name: wandb.Histogram(np_histogram=(np.array(bin.counts), np.array(bin.edges)))
        for name, bin in bins.items()
    }
    aliases = {alias: metrics[name] for alias, name in ALIASES.items() if name in metrics}
    run.log({STEP: step, **metrics, **aliases, **drawn}, step=step)


def _finish(run: Any, summary: dict[str, Any], exit_code: int, files: Files) -> None:
    for name, value in summary.items():
        run.summary[name] = value
    try:
        keep(run, files)
    except (ValueError, OSError) as error:
        log.warning("the run's files are not in W&B: %s", error)
    run.finish(exit_code=exit_code)


def _kill_service() -> None:
    """Kill W&B's own process, for which `finish`, `teardown` and the end of this program wait.

    `finish_timeout` is kept by that process itself, so it does not help when the process hangs.
    """
    for tasks in Path("/proc/self/task").glob("*/children"):
        children: list[str] = []
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            children = tasks.read_text().split()
        for pid in children:
            with contextlib.suppress(OSError):
                if Path("/proc", pid, "comm").read_text().startswith("wandb"):
                    os.kill(int(pid), signal.SIGKILL)


def _tear_down() -> None:
    """End W&B's own process, which would otherwise stay until this one ends."""
    import wandb

    try:
        wandb.teardown()
    except Exception as error:  # noqa: BLE001, nothing depends on it any more
        log.warning("W&B did not end cleanly: %s", error)


def make(options: WandbConfig, run_dir: RunDir, info: RunInfo) -> WandbLogger | None:
    """`logger=wandb`; None where it is disabled."""
    return None if options.mode == "disabled" else WandbLogger(options, run_dir, info)


# -- the files of a run that W&B keeps as artifacts: manifest, code, last checkpoint

MANIFEST, CODE, CHECKPOINT = "manifest", "code", "checkpoint"
PACKAGES = ("harness", "collectors", "sync", "conf", "hydra_plugins/lockstep")
CODE_SUFFIXES = (".py", ".yaml")


@dataclass
class Files:
    """What is kept of a run."""

    folder: Path
    chosen: Sequence[str]
    plugins: Sequence[str] = ()


def keep(run: Any, files: Files) -> None:
    """Log the chosen files; a file that the run does not have is left out."""
    import wandb

    for kind in files.chosen:
        paths = dict(_found(files, kind))
        if not paths:
            continue
        artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
        for name, file in paths.items():
            if kind in (MANIFEST, CODE):  # which may change before the run is sent
                file = _copied(file, Path(run.dir, "artifacts", kind, name))
            # Else W&B copies the file into the home directory.
            artifact.add_file(str(file), name=name, policy="immutable")
        run.log_artifact(artifact)


def _copied(file: Path, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(file, place))


def _found(files: Files, kind: str) -> Iterator[tuple[str, Path]]:
    """Names and places of the files of one kind."""
    if kind == MANIFEST:
        for name in ("manifest.json", "config.yaml"):
            if (files.folder / name).is_file():
                yield name, files.folder / name
    elif kind == CHECKPOINT:
        saved = sorted((files.folder / "checkpoints").glob("[0-9]*.safetensors"))
        yield from ((file.name, file) for file in saved[-1:])
    elif kind == CODE:
        yield from _code(files.plugins)


def _code(plugins: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Lockstep's own files, and those of the plugins that the run named."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*")):
            if file.suffix in CODE_SUFFIXES and file.is_file():
                yield file.relative_to(ROOT).as_posix(), file
    if (ROOT / "run.py").is_file():  # a checkout
        yield "run.py", ROOT / "run.py"
    for plugin in plugins:
        source = getattr(sys.modules.get(plugin), "__file__", None)
        if source is not None:
            yield f"plugins/{plugin}.py", Path(source)


# -- a report as a W&B run of its own, in the group of the sweep that it is about


def upload(
    page: Path,
    *,
    mode: str,
    project: str,
    name: str,
    group: str | None,
    numbers: Mapping[str, float],
    figures: Mapping[str, bytes],
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
) -> None:
    """Write the run beside the page, and online to the server; `RuntimeError` if that cannot be.

    numbers: for the run's summary. figures: PNG. columns, rows: of the table of results.
    """
    import wandb

    try:
        with wandb.init(
            dir=str(page.parent),
            mode=mode,  # type: ignore[arg-type]
            project=project,
            name=name,
            group=group,
            job_type="report",
            settings=quiet(),
        ) as run:
            pictures = {
                f"figures/{slug}": wandb.Image(open_png(png)) for slug, png in figures.items()
            }
            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            run.log({"results": table, **pictures})
            run.summary.update(dict(numbers))
            run.save(str(page), base_path=str(page.parent), policy="now")
    except (wandb.Error, OSError) as error:
        raise RuntimeError(f"W&B did not take the report: {error}") from error
    finally:
        wandb.teardown()


def quiet(**given: Any) -> Any:
    """Settings of W&B that print nothing and record nothing of the machine or the code."""
    import wandb

    defaults = {"x_disable_stats": True}
    return wandb.Settings(
        silent=True, console="off", disable_git=True, disable_code=True, **{**defaults, **given}
    )


def open_png(data: bytes) -> Any:
    """A picture as W&B takes it."""
    from PIL import Image

    return Image.open(io.BytesIO(data))
