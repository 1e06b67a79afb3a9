"""What a person sees of a run: the config, progress, and a short table at the end."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from harness.callbacks import RunView
from harness.logging.dashboard import Dashboard
from harness.measures import PHASES, Unused
from harness.numbers import readable

log = logging.getLogger(__name__)

LOOK_S = 0.1
LOOKS_PER_DRAWING = 4
JOIN_S = 2.0


class Display:
    """A dashboard on a terminal; a line every few seconds where there is none."""

    def __init__(self, total_frames: int, *, print_every_s: float, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self._total = total_frames
        self._every_s = print_every_s
        self._printed_at = time.monotonic()
        self._started = self._first = self._printed_at, 0  # time and frames, and after a batch
        self._directory: Path | None = None
        self._live: LiveView | None = None

    def _print(self, *shown: Any, **how: Any) -> None:
        """Show something; once it cannot be written (full disk, closed pipe), show no more."""
        try:
            self.console.print(*shown, **how)
        except (OSError, SystemExit):  # rich makes the latter of a closed pipe
            self.console.quiet = True
            # What lies ready to be written goes nowhere, too.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.console.file.fileno())

    def start(
        self,
        options: Mapping[str, Any],
        directory: Any,
        *,
        show_config: bool = True,
        frames: int = 0,
        run: RunView | None = None,
        sync: str = "",
    ) -> None:
        """Show what will run.

        run: what the dashboard looks at while it goes on. sync: how weights travel.
        """
        self._started = self._first = time.monotonic(), frames
        self._directory = _from_here(Path(directory))
        if show_config:
            self._print(config_tree(options))
        if sync:
            self._print(f"sync: {sync}", soft_wrap=True, markup=False)
        self._print(f"writing to {self._directory}", soft_wrap=True, markup=False)
        if self.console.is_terminal:
            collector = options.get("collector")
            name = collector.get("name", "") if isinstance(collector, Mapping) else ""
            dashboard = Dashboard(self._total, collector=name)
            self._live = LiveView(dashboard, self.console, run)
            self._live.start()

    def update(
        self,
        frames: int,
        metrics: Mapping[str, float],
        *,
        episode_return: float,
        updates: int = 0,
    ) -> None:
        """Show how far the run is; cheap enough for every batch."""
        now = time.monotonic()
        if self._first == self._started:
            self._first = now, frames
        if self._live is not None:
            self._live.record(frames, metrics, episode_return, updates)
        elif now - self._printed_at >= self._every_s:
            self._printed_at = now
            words = describe(metrics, episode_return, updates)
            left_s = self._left_s(now, frames)
            self._print(
                f"{frames:,}/{self._total:,} frames  {words}  {left_s:,.0f} s left",
                soft_wrap=True,
            )

    def _left_s(self, now: float, frames: int) -> float:
        """How long the rest takes, if it goes on as since the first batch."""
        started_at, before = self._first if frames > self._first[1] else self._started
        return (now - started_at) / max(frames - before, 1) * max(self._total - frames, 0)

    def stop(self) -> None:
        """No more progress."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def finish(
        self,
        state: str,
        summary: Mapping[str, Any],
        *,
        resumable: bool = True,
        repeatable: bool = True,
        may_wait: bool = True,
        remarks: Sequence[str] = (),
    ) -> None:
        """The table that every run ends with, and what can be done with the run.

        resumable: whether there is a checkpoint. repeatable: whether harness.reproduce accepts the
        run if it is done. may_wait: whether sync.on_stale=wait would help. remarks: of loggers.
        """
        self.stop()
        self._print(summary_table(state, summary))
        if text := warning(Unused.of(summary), may_wait=may_wait):
            self._print(text, soft_wrap=True)
        for text in remarks:
            self._print(text, soft_wrap=True, markup=False)
        if self._directory is not None:
            commands = next_commands(
                state, self._directory, resumable=resumable, repeatable=repeatable
            )
            self._print(commands, soft_wrap=True, markup=False)


def describe(metrics: Mapping[str, float], episode_return: float, updates: int) -> str:
    """The figures worth a glance."""
    shown = "–" if math.isnan(episode_return) else readable(episode_return, 4)  # none has ended yet
    words = [f"return {shown}", f"{updates:,} updates"]
    if "collector/fps" in metrics:
        words.append(f"{metrics['collector/fps']:,.0f} frames/s")
    if "policy/lag_updates_mean" in metrics:
        words.append(f"lag {readable(metrics['policy/lag_updates_mean'], 2)}")
    if "sync/publish_ms" in metrics:
        words.append(f"publish {readable(metrics['sync/publish_ms'], 2)} ms")
    unused = Unused.of(metrics)
    return "  ".join(words + ([f"unused {unused}"] if unused.count else []))


def warning(unused: Unused, *, may_wait: bool = True) -> str:
    """What to say, and to do, if more than a tenth of the frames was not learned from."""
    if not unused.is_much:
        return ""
    warning = f"warning: {unused.count:,} of {unused.total:,} frames were not learned from"
    if unused.refused < unused.lost:
        return f"{warning}: the collector discarded them; run.log says when workers failed"
    advice = "Allow a larger lag, or use fewer workers"
    if may_wait:
        advice = "Allow a larger lag, use fewer workers, or let them wait (sync.on_stale=wait)"
    return f"{warning}: they were older than algo.max_lag, which sync.max_lag sets. {advice}"


def config_tree(options: Mapping[str, Any]) -> Tree:
    """The composed config, a branch a group; a `Text` is shown as it is, without markup."""
    tree = Tree("config")
    for name, value in options.items():
        if isinstance(value, Mapping):
            branch = tree.add(Text(f"{name}: {value['name']}" if "name" in value else name))
            rest = {key: item for key, item in value.items() if key != "name"}
            branch.add(Text(", ".join(f"{key}={_short(item)}" for key, item in rest.items())))
        else:
            tree.add(Text(f"{name}: {_short(value)}"))
    return tree


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_short(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def summary_table(state: str, summary: Mapping[str, Any]) -> Table:
    """Return, speed, what was not learned from, sync latency, lag, and where the time went."""
    table = Table(title=f"run {state}", show_header=False)
    lags = [f"policy/lag_updates_{name}" for name in ("mean", "p95", "max")]
    times = [f"time/{phase}_s" for phase in PHASES]
    rows = [
        ("return of the last 100 episodes", _numbers(summary, 5, "episode/return")),
        ("return in evaluation", _numbers(summary, 5, "eval/return")),
        ("frames", _form(summary, "{:,.0f}", "frames")),
        ("frames a second", _form(summary, "{:,.0f}", "fps")),
        ("updates", _form(summary, "{:,.0f}", "updates")),
        ("frames not learned from", _unused(Unused.of(summary))),
        ("publish ms, p50 / p95", _percentiles(summary, "sync/publish_ms")),
        ("acknowledge ms, p50 / p95", _percentiles(summary, "sync/ack_ms")),
        ("lag, mean / p95 / max", _numbers(summary, 3, *lags)),
        ("simulated seconds", _numbers(summary, 4, "sim/time_s")),
        (f"{' / '.join(PHASES)} s", _form(summary, " / ".join(["{:,.1f}"] * len(times)), *times)),
    ]
    for label, text in rows:
        if text is not None:
            table.add_row(label, text)
    return table


def _unused(unused: Unused) -> Text | None:
    if not unused.count:
        return None
    return Text(str(unused), "bold red" if unused.is_much else "")


def next_commands(
    state: str, directory: Path, *, resumable: bool = True, repeatable: bool = True
) -> str:
    """What to type next. The environment of this run need not be activated for it."""
    command, where = program(), shlex.quote(str(directory))
    if state == "interrupted" and resumable:
        return f"resume:  {command} resume={where}"
    lines = [f"report:  {command} report {where}"]
    if state == "done" and repeatable:
        lines += [f"repeat:  {command} reproduce {where}"]
    return "\n".join(lines)


def program() -> str:
    """Lockstep's command as this process was started, or as any Python can start it."""
    name = Path(sys.argv[0]).name
    if name == "lockstep":
        return _called(sys.argv[0])
    python = _called(sys.executable)
    return f"{python} {_called(sys.argv[0]) if name == 'run.py' else '-m harness.command'}"


def _called(program: str) -> str:
    """A program as a shell finds it from here: by its name, or else by its path."""
    path = Path(program)
    if shutil.which(path.name) == program:
        return path.name
    return shlex.quote(str(_from_here(path)))


def _from_here(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _percentiles(summary: Mapping[str, Any], name: str) -> str | None:
    return _numbers(summary, 3, f"{name}_p50", f"{name}_p95")


def _numbers(summary: Mapping[str, Any], digits: int, *names: str) -> str | None:
    if any(summary.get(name) is None for name in names):
        return None
    return " / ".join(readable(float(summary[name]), digits) for name in names)


def _form(summary: Mapping[str, Any], form: str, *names: str) -> str | None:
    values = [summary.get(name) for name in names]
    return None if any(value is None for value in values) else form.format(*values)


class LiveView:
    """Draws a dashboard a few times a second, between `start` and `stop`."""

    def __init__(self, dashboard: Dashboard, console: Console, run: RunView | None):
        self._dashboard, self._console, self._run = dashboard, console, run
        self._records: deque[tuple[int, Mapping[str, float], float, int]] = deque()
        self._done = threading.Event()
        self._live = Live(dashboard, console=console, auto_refresh=False, vertical_overflow="crop")
        self._size = console.size
        self._thread = threading.Thread(target=self._work, name="lockstep-live", daemon=True)

    def start(self) -> None:
        with contextlib.suppress(OSError, SystemExit):  # rich makes the latter of a closed pipe
            self._live.start()
            self._thread.start()

    def record(
        self, frames: int, metrics: Mapping[str, float], episode_return: float, updates: int
    ) -> None:
        """A record of the run's metrics; returns at once."""
        self._records.append((frames, metrics, episode_return, updates))

    def stop(self) -> None:
        """Draw a last time, and give the terminal back."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        with contextlib.suppress(OSError, SystemExit):
            if not self._thread.is_alive():
                self._take_in()
                self._draw()
            self._live.stop()

    def _work(self) -> None:
        looks = 0
        try:
            while not self._done.wait(LOOK_S):
                self._look()
                self._take_in()
                looks += 1
                if looks % LOOKS_PER_DRAWING == 0:
                    self._draw()
        except (OSError, SystemExit):  # nobody sees it any more
            self._console.quiet = True
        except Exception:
            log.info("the live view failed, the run goes on without it", exc_info=True)

    def _look(self) -> None:
        if (run := self._run) is not None:
            stages = run.collector.worker_stages()
            self._dashboard.sample(time.monotonic(), run.frames, run.clock.total, stages)

    def _take_in(self) -> None:
        while self._records:
            self._dashboard.record(*self._records.popleft())

    def _draw(self) -> None:
        if (size := self._console.size) != self._size:  # lines of the old width were wrapped anew
            self._size = size
            self._console.clear()
        self._live.refresh()
