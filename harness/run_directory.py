"""The directory of one run: its files, and a lock against a second writer."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.files import (
    check_ordinary,
    is_alive,
    overwrite_json,
    parse_json,
    read_json,
    read_text,
    write_atomic,
    write_json,
)

log = logging.getLogger(__name__)

EARLIER = ".earlier"
SCHEDULE = "schedule.jsonl"
STATES = ("running", "done", "failed", "interrupted", "pruned")
ROOM = 512  # bytes that a file has on any disk, and that are written at once
# Ours, and what safetensors writes before it has a name.
UNFINISHED = re.compile(r"\.(writing-|status-|.+\.)\d+|\.tmp\w{6}")
ID = re.compile(r"[0-9a-z]{1,64}")


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def return_of(summary: Mapping[str, Any]) -> float:
    """The return, of the evaluation if there was one; NaN if there is none."""
    score = summary.get("eval/return", summary.get("episode/return"))
    try:
        return float(score) if isinstance(score, int | float) else math.nan
    except OverflowError:  # a file can hold larger numbers than a float
        return math.nan


class RunDirInUse(RuntimeError):
    """Another living run writes to the directory."""


class RunDir:
    """The files of one run; `open` or `reopen` makes sure that it is the only one writing them."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"
        self.manifest = path / "manifest.json"
        self.status = path / "status.json"
        self.traceback = path / "traceback.txt"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.schedule = path / SCHEDULE
        self.checkpoints = path / "checkpoints"
        self.log = path / "run.log"

    @classmethod
    def open(
        cls, path: Path, *, config: str, manifest: dict[str, Any], replace_done: bool = False
    ) -> RunDir:
        """A new run's directory.

        A run in the way that did not finish is moved aside, not lost; a finished one only with
        `replace_done`, else `ConfigError`. If a living run is in the way, a number is added to the
        name.
        """
        run_dir, number = cls(path), 2
        run_dir.check_free(config, replace_done=replace_done)
        while run_dir.is_alive() or not run_dir._claim(replace_done=replace_done):
            run_dir, number = cls(path.with_name(f"{path.name}-{number}")), number + 1
        try:
            run_dir.checkpoints.mkdir()
            write_atomic(run_dir.config, config)
            write_json(run_dir.manifest, manifest)
            run_dir.metrics.touch()
        except OSError as error:
            run_dir.set_state("failed", error)
            raise
        return run_dir

    @classmethod
    def reopen(cls, path: Path, *, config: str) -> RunDir:
        """The directory of a run that goes on, which is looked at before anything is changed."""
        run_dir = cls(path)
        run_dir.check()
        run_dir._sweep()
        stored = read_json(run_dir.manifest)
        earlier = stored.get("resumed")
        resumed = [*(earlier if isinstance(earlier, list) else []), now()]
        write_atomic(run_dir.config, config)
        write_json(run_dir.manifest, stored | {"ended": None, "resumed": resumed})
        run_dir.summary.unlink(missing_ok=True)
        run_dir.set_state("running")
        run_dir.metrics.touch()
        return run_dir

    @classmethod
    def record_failure(cls, path: Path, *, config: str, error: BaseException) -> None:
        """Record the error of a run that did not begin. A finished run in its place stays."""
        if cls(path).is_done():
            print(f"lockstep: {path}: {error}", file=sys.stderr)
            return
        cls.open(path, config=config, manifest={}).end("failed", summary={}, error=error)

    def check_free(self, config: str, *, replace_done: bool) -> None:
        """Raise `ConfigError` if a finished run is in the way of a new one with this config."""
        if replace_done or not self.is_done():
            return
        same = self.is_done_with(config)
        whose, keep = ("this", "skip_done=true keeps it, ") if same else ("another", "")
        raise ConfigError(
            f"{self.path} holds a finished run of {whose} config: {keep}replace_done=true moves it "
            f"to {EARLIER}/, or name another directory with sweep= or hydra.run.dir="
        )

    def check(self) -> None:
        """Raise if a run cannot go on here: another one does, or these are not a run's files."""
        if (owner := self.owner()) is not None:
            raise RunDirInUse(owner)
        files = (self.config, self.manifest, self.status, self.metrics, self.summary, self.log)
        for file in (*files, self.schedule):
            if file.exists() or file.is_symlink():
                check_ordinary(file)
        for folder in (self.checkpoints, self.path / "wandb", self.path / "tensorboard"):
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                raise ValueError(f"{folder} is a link or no folder, expected one of the run's own")

    def read_id(self) -> str | None:
        """What tells this run from all others; None if the manifest does not say."""
        run_id = read_json(self.manifest).get("wandb_id")
        return run_id if isinstance(run_id, str) and ID.fullmatch(run_id) else None

    def read_status(self) -> dict[str, Any]:
        """What status.json says; empty before a run, and if it is damaged."""
        return _read_or_warn(self.status)

    def owner(self) -> str | None:
        """What is said of a run that may still write here; None if there is none.

        Whether a run of another machine is still alive cannot be seen from here.
        """
        status = self.read_status()
        if status.get("state") != "running":
            return None
        host, pid = _read_or_warn(self.manifest).get("host"), status.get("pid")
        if isinstance(host, str) and host != socket.gethostname():
            return (
                f"{self.path} belongs to a run on host {host} that has not ended; if it is dead, "
                f"delete {self.status}"
            )
        if pid == os.getpid() or not is_alive(pid):
            return None
        return f"{self.path} belongs to a run that is still alive (process {pid})"

    def is_alive(self) -> bool:
        """Whether a run may still write here."""
        return self.owner() is not None

    def is_done(self) -> bool:
        """Whether it holds a finished run."""
        return self.read_status().get("state") == "done"

    def is_done_with(self, config: str) -> bool:
        """Whether it holds a finished run of this very config."""
        return self.is_done() and self.config.is_file() and read_text(self.config) == config

    def is_interrupted_with(self, config: str) -> bool:
        """Whether it holds a run of this very config that can go on from a checkpoint."""
        state = self.read_status().get("state")
        ended = state == "interrupted" or (state == "running" and not self.is_alive())
        same = self.config.is_file() and read_text(self.config) == config
        return ended and same and any(self.checkpoints.glob("[0-9]*.safetensors"))

    def read_summary(self) -> dict[str, Any]:
        """What a finished run came to; empty if there is no summary, or a damaged one."""
        return _read_or_warn(self.summary)

    def set_state(self, state: str, error: BaseException | None = None) -> None:
        """Say in status.json how the run stands."""
        assert state in STATES
        trace = None if error is None else "".join(traceback.format_exception(error))
        status = {
            "state": state,
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "traceback": trace,
            "pid": os.getpid(),
            "changed": now(),
        }
        try:
            write_json(self.status, status)
        except (OSError, MemoryError):  # no room for a second file, say; there is that of the old
            overwrite_json(self.status, status, most_bytes=ROOM)
        self._write_traceback(trace)

    def _write_traceback(self, trace: str | None) -> None:
        """The traceback as text; none of an earlier part of the run is left."""
        try:
            if trace is not None:
                write_atomic(self.traceback, trace)
            else:
                self.traceback.unlink(missing_ok=True)
        except OSError as error:  # status.json has it, too
            log.warning("%s cannot be written: %s", self.traceback, error)

    def end(self, state: str, *, summary: dict[str, Any], error: BaseException | None) -> None:
        """The last words: the summary, the manifest's end, and the state."""
        try:
            write_json(self.summary, summary)
            write_json(self.manifest, read_json(self.manifest) | {"ended": now()})
        except Exception as unwritten:
            self.set_state(state if error is not None else "failed", error or unwritten)
            raise
        self.set_state(state, error)

    def cut_metrics(self, logged_at: int, evaluated_at: int) -> int:
        """Take back what a checkpoint knows nothing of, when a run goes on from it; how many.

        Its last record was of `logged_at`, its last evaluation of `evaluated_at`.
        """
        lines = self.metrics.read_text(errors="replace").splitlines()
        kept = [line + "\n" for line in lines if _is_known(line, logged_at, evaluated_at)]
        write_atomic(self.metrics, "".join(kept))
        return len(lines) - len(kept)

    def _sweep(self) -> None:
        """Remove what a killed run was writing."""
        for folder in (self.path, self.checkpoints):
            for file in folder.glob(".*") if folder.is_dir() else ():
                if UNFINISHED.fullmatch(file.name) and not file.is_dir():
                    file.unlink(missing_ok=True)

    def _claim(self, *, replace_done: bool) -> bool:
        """Make the directory this run's; False if another run was faster, or has finished here."""
        if self.is_done() and not replace_done:
            return False
        self._move_aside()
        self.path.mkdir(parents=True, exist_ok=True)
        mine = RunDir(self.path)
        mine.status = self.path / f".status-{os.getpid()}"
        mine.set_state("running")
        try:
            os.link(mine.status, self.status)  # which fails if there is one, and is whole if not
        except FileExistsError:
            return False
        finally:
            mine.status.unlink()
        return True

    def _move_aside(self) -> None:
        """Keep what an ended run left here, elsewhere."""
        if not self.status.exists():
            return
        earlier = self.path.parent / EARLIER
        earlier.mkdir(exist_ok=True)
        number = 1
        while (place := earlier / f"{self.path.name}-{number}").exists():
            number += 1
        self.path.rename(place)


def _is_known(line: str, logged_at: int, evaluated_at: int) -> bool:
    """Whether it is a record of before; not half a line, from a crash, nor what else is none."""
    try:
        record = parse_json(line)
    except ValueError:
        return False
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int | float) or not 0 <= step <= logged_at:
        return False
    return "eval/return" not in record or step <= evaluated_at


def _read_or_warn(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except ValueError as error:
        log.warning("%s", error)
        return {}
