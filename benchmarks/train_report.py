"""What the training benchmark found, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass
class Turn:
    """One whole training of one contestant."""

    seed: int
    frames: int
    seconds: float
    around_s: float  # of its process, before the first frame and after the last update
    final_return: float | None  # mean of the last tenth; None if no episode ended there
    final_episodes: int

    @property
    def fps(self) -> float:
        return self.frames / self.seconds


@dataclass
class Row:
    """One contestant with one algorithm: its trainings, or why there are none."""

    algo: str
    contestant: str
    what: str = ""
    is_peer: bool = False
    turns: list[Turn] = field(default_factory=list)
    problem: str = ""

    @property
    def fps(self) -> float | None:
        return median(turn.fps for turn in self.turns) if self.turns else None

    @property
    def returns(self) -> list[float]:
        return [turn.final_return for turn in self.turns if turn.final_return is not None]

    def ratio(self, other: Row | None) -> float | None:
        """Frames a second over those of `other` in the same round; the median."""
        if other is None:
            return None
        theirs = {turn.seed: turn.fps for turn in other.turns}
        found = [turn.fps / theirs[turn.seed] for turn in self.turns if turn.seed in theirs]
        return median(found) if found else None


def fastest_peer(rows: Iterable[Row], algo: str) -> Row | None:
    """By the median of its rounds."""
    peers = [row for row in rows if row.is_peer and row.algo == algo and row.turns]
    return max(peers, key=lambda row: row.fps or 0.0, default=None)


def table(rows: Sequence[Row], frames: dict[str, int]) -> Table:
    """A section for each algorithm."""
    shown = Table(title="Whole trainings")
    for column in ("algorithm", "contestant"):
        shown.add_column(column, no_wrap=True)
    for column in ("frames/s", "min to max", "÷ fastest peer", "return", "around, s"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("what it is, or what is wrong")
    previous = None
    for row in rows:
        if row.algo != previous:
            shown.add_section()
        ratio = row.ratio(fastest_peer(rows, row.algo))
        rates = [turn.fps for turn in row.turns]
        shown.add_row(
            "" if row.algo == previous else f"{row.algo}, {frames[row.algo]:,} frames",
            row.contestant,
            "-" if row.fps is None else f"{row.fps:,.0f}",
            f"{min(rates):,.0f} to {max(rates):,.0f}" if rates else "",
            "" if ratio is None else f"{ratio:.2f}",
            in_words(row.returns),
            f"{median(turn.around_s for turn in row.turns):.1f}" if row.turns else "",
            row.problem or row.what,
        )
        previous = row.algo
    return shown


def in_words(returns: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds."""
    if not returns:
        return "-"
    spread = f" ± {stdev(returns):.0f}" if len(returns) > 1 else ""
    return f"{mean(returns):.0f}{spread}"


NOTES = """\
frames/s: of a whole training, from its first frame to its last update; the median of the rounds.
÷ fastest peer: over the peer with the highest median, round by round; the median.
return: mean of the episodes that ended in the last tenth; mean and deviation of the rounds' seeds.
around: what its process took besides: imports, environments, networks, workers, its end."""


def show(rows: Sequence[Row], frames: dict[str, int]) -> None:
    """Print the table."""
    Console(width=170).print(table(rows, frames))
    print(NOTES)


def save(rows: Sequence[Row], about: dict[str, Any], file: Path) -> None:
    """Write everything that was measured, with the ratios."""
    file.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for row in rows:
        peer = fastest_peer(rows, row.algo)
        found = {
            "fps": [turn.fps for turn in row.turns],
            "fps_median": row.fps,
            "fastest_peer": peer.contestant if peer else None,
            "to_fastest_peer": row.ratio(peer),
            "final_return_mean": mean(row.returns) if row.returns else None,
        }
        results.append(asdict(row) | found)
    file.write_text(json.dumps({**about, "results": results}, indent=2))
    print(f"saved {file}")
