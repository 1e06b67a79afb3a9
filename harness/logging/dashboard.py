"""The dashboard of a run: progress, return, learner, workers, lag, latency, verdict.

It stores the newest values, and rich renders them at any width. One thread uses it at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from harness.logging.bottleneck import verdict
from harness.measures import Unused
from harness.numbers import readable

WINDOW = 100  # samples that shares and speeds are of
MOST_POINTS = 1024  # of the return curve
MOST_LANES = 12
LABEL = 10  # columns
WIDE = 76  # columns from which on there is room for words
LAG_SHARE = "policy/share/lag_"

# What a worker is doing, by the stage that it reports; anything else is acting.
STATES = {"": "waiting", "starting": "waiting", "idle": "waiting", "taking weights": "applying"}
STATE_STYLES = {"acting": "green", "waiting": "bright_black", "applying": "magenta"}
PHASE_STYLES = {"collect": "cyan", "train": "yellow", "sync": "magenta", "log": "bright_black"}
PHASE_WORDS = {"collect": "collect", "train": "update", "sync": "publish", "log": "log"}


class Sample(NamedTuple):
    """How far the run was at a moment, and the seconds that it had spent in each phase."""

    at_s: float
    frames: int
    spent: dict[str, float]


class Dashboard:
    """What is shown of a run. collector: the name of its collector, on which the advice depends."""

    def __init__(self, total_frames: int, *, collector: str = ""):
        self._total = total_frames
        self._collector = collector
        self._frames = self._updates = 0
        self._return = math.nan
        self._returns: list[float] = []
        self._each = self._skipped = 1  # of how many records one return is kept
        self._metrics: dict[str, float] = {}
        self._samples: deque[Sample] = deque(maxlen=WINDOW)
        self._lanes: list[deque[str]] = []

    def record(
        self, frames: int, metrics: Mapping[str, float], episode_return: float, updates: int = 0
    ) -> None:
        """Take in a record of the run's metrics."""
        self._frames, self._return = max(self._frames, frames), episode_return
        self._updates = updates
        self._metrics.update(metrics)
        for name in [name for name in self._metrics if name.startswith(LAG_SHARE)]:
            if name not in metrics:
                del self._metrics[name]
        if math.isfinite(episode_return) and self._skipped >= self._each:
            self._returns.append(episode_return)
            self._skipped = 0
        self._skipped += 1
        if len(self._returns) > MOST_POINTS:
            self._returns = self._returns[::2]
            self._each *= 2

    def sample(
        self, at_s: float, frames: int, spent: Mapping[str, float], stages: Sequence[str]
    ) -> None:
        """Note how far the run is at a moment, and what each worker is doing then."""
        self._frames = max(self._frames, frames)
        self._samples.append(Sample(at_s, frames, dict(spent)))
        if not any(stages):  # workers elsewhere, which do not say
            return
        while len(self._lanes) < len(stages):
            self._lanes.append(deque(maxlen=WINDOW))
        for lane, stage in zip(self._lanes, stages, strict=False):
            lane.append(STATES.get(stage, "acting"))

    # -- what it comes to

    def phase_shares(self) -> dict[str, float]:
        """The share of each phase in what the learner has done lately."""
        if len(self._samples) < 2:
            return {}
        first, last = self._samples[0].spent, self._samples[-1].spent
        spent = {name: max(0.0, last[name] - first.get(name, 0.0)) for name in last}
        total = sum(spent.values())
        return {name: value / total for name, value in spent.items()} if total > 0 else {}

    def worker_shares(self) -> dict[str, float]:
        """The share of each state in what all workers have done lately."""
        return _shares([state for lane in self._lanes for state in lane])

    def speed(self) -> float:
        """Frames a second, lately."""
        if len(self._samples) > 1:
            first, last = self._samples[0], self._samples[-1]
            if last.frames > first.frames:
                return (last.frames - first.frames) / max(last.at_s - first.at_s, 1e-9)
        return self._metrics.get("collector/fps", math.nan)

    # -- how it looks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pen = _Pen(options.max_width, ascii_only=options.ascii_only)
        for line in self._lines(pen):
            line.no_wrap = True
            line.rstrip()
            line.truncate(pen.width, overflow="crop" if options.ascii_only else "ellipsis")
            yield line
        bottleneck = verdict(self.phase_shares(), self.worker_shares(), self._collector)
        if bottleneck is not None:
            yield Text.assemble((bottleneck.name, "bold"), f": {bottleneck.reason}.")
            yield Text(f"To go faster, {bottleneck.advice}.")

    def _lines(self, pen: _Pen) -> Iterator[Text]:
        yield self._progress(pen)
        if math.isfinite(self._return):
            curve = pen.bars(_means(self._returns, pen.room))
            yield Text.assemble(
                (f"return {readable(self._return, 4)}".ljust(LABEL + 8), ""), (curve, "cyan")
            )
        if shares := self.phase_shares():
            words = {PHASE_WORDS[name]: share for name, share in shares.items()}
            styles = [PHASE_STYLES[name] for name in shares]
            bar = pen.stacked(list(shares.values()), styles)
            yield Text("learner".ljust(LABEL)) + bar + Text("  ") + pen.words(words, styles)
        yield from self._workers(pen)
        yield from self._lag(pen)
        if (unused := Unused.of(self._metrics)).count:
            line = Text("unused".ljust(LABEL))
            style = "bold red" if unused.is_much else ""
            yield line.append(f"{unused} of the frames, in {self._updates:,} updates", style)
        latencies = [
            f"{word} {readable(self._metrics[name], 2)} ms"
            for word, name in (("publish", "sync/publish_ms"), ("acknowledge", "sync/ack_ms"))
            if name in self._metrics
        ]
        if latencies:
            yield Text("sync".ljust(LABEL) + "  ".join(latencies))

    def _progress(self, pen: _Pen) -> Text:
        speed, share = self.speed(), min(1.0, self._frames / max(self._total, 1))
        words = f"{min(self._frames, self._total):,}/{self._total:,} frames"
        if math.isfinite(speed) and speed > 0:
            left_s = max(0, self._total - self._frames) / speed
            words += f"  {speed:,.0f} frames/s  {duration(left_s)} left"
        return pen.stacked([share, 1 - share], ["green", "bright_black"]) + Text(f"  {words}")

    def _workers(self, pen: _Pen) -> Iterator[Text]:
        for worker, lane in enumerate(self._lanes[:MOST_LANES]):
            shares, styles = _shares(lane), list(STATE_STYLES.values())
            line = Text(f"worker {worker}".ljust(LABEL)) + pen.lane(lane) + Text("  ")
            yield line + pen.words(shares, styles)
        if (more := len(self._lanes) - MOST_LANES) > 0:
            yield Text(f"{'':{LABEL}}and {more} more workers")

    def _lag(self, pen: _Pen) -> Iterator[Text]:
        mean = self._metrics.get("policy/lag_updates_mean")
        if mean is None:
            return
        shares = {
            name.removeprefix(LAG_SHARE).replace("_up", "+").replace("_", "-"): share
            for name, share in self._metrics.items()
            if name.startswith(LAG_SHARE)
        }
        line = Text("lag".ljust(LABEL))
        for (lag, share), bar in zip(
            shares.items(), pen.bars([*shares.values(), 0.0]), strict=False
        ):
            line.append(f"{lag} ").append(bar * 2, "blue").append(f" {share:.0%}  ")
        largest = self._metrics.get("policy/lag_updates_max", mean)
        yield line.append(f"mean {readable(mean, 2)}, at most {largest:.0f} updates")


class _Pen:
    """Draws within a width, with letters alone where a terminal has no more."""

    def __init__(self, width: int, *, ascii_only: bool):
        self.width = width
        self._heights = " .:-=+*#" if ascii_only else "▁▂▃▄▅▆▇█"
        full, light, dark = "#.~" if ascii_only else "█░▓"
        self._full, self._glyphs = full, {"acting": full, "waiting": light, "applying": dark}
        self._wide = width >= WIDE
        words = 46 if self._wide else 18
        self.bar = max(4, min(40, width - LABEL - words))
        self.room = max(4, min(60, width - LABEL - 10))

    def bars(self, values: Sequence[float]) -> str:
        """One bar for each value, between the least and the largest."""
        if not values:
            return ""
        least, most = min(values), max(values)
        steps = len(self._heights) - 1
        scale = steps / (most - least) if most > least else 0.0
        return "".join(self._heights[round((value - least) * scale)] for value in values)

    def stacked(self, shares: Sequence[float], styles: Sequence[str]) -> Text:
        """One bar, divided by shares that add up to 1."""
        bar, total, drawn = Text(), 0.0, 0
        for share, style in zip(shares, styles, strict=True):
            total += share
            upto = round(min(total, 1.0) * self.bar)
            glyph = self._glyphs["waiting"] if style == "bright_black" else self._full
            bar.append(glyph * (upto - drawn), style)
            drawn = upto
        return bar

    def lane(self, states: Sequence[str]) -> Text:
        """The newest states, the last one at the right."""
        shown = list(states)[-self.bar :]
        lane = Text(" " * (self.bar - len(shown)))
        for state, equal in groupby(shown):
            lane.append(self._glyphs[state] * len(list(equal)), STATE_STYLES[state])
        return lane

    def words(self, shares: Mapping[str, float], styles: Sequence[str]) -> Text:
        """The shares in per cent, with their names where there is room."""
        text = Text()
        for (name, share), style in zip(shares.items(), styles, strict=True):
            text.append(f"{name} {share:.0%}  " if self._wide else f"{share:.0%} ", style)
        return text


def _shares(states: Sequence[str]) -> dict[str, float]:
    return {name: list(states).count(name) / max(1, len(states)) for name in STATE_STYLES}


def _means(values: Sequence[float], count: int) -> list[float]:
    """At most `count` means of consecutive values."""
    count = min(count, len(values))
    edges = [len(values) * i // count for i in range(count + 1)] if count else [0]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def duration(seconds: float) -> str:
    """A time in the unit that fits it."""
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"
