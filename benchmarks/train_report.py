"""What the training benchmark measured, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from rich.console import Console

from benchmarks import contest


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
        ours, theirs = ({turn.seed: turn.fps for turn in row.turns} for row in (self, other))
        return contest.ratio(ours, theirs)


def fastest_peer(rows: Iterable[Row], algo: str) -> Row | None:
    """By the median of its rounds."""
    peers = [row for row in rows if row.is_peer and row.algo == algo and row.turns]
    return max(peers, key=lambda row: row.fps or 0.0, default=None)


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


def show(rows: Sequence[Row], frames: Mapping[str, int]) -> None:
    """Print the table."""
    heads = ["algorithm", "contestant", "frames/s", "min to max", "÷ fastest peer", "return"]
    cells = [
        [
            f"{row.algo}, {frames[row.algo]:,} frames",
            row.contestant,
            *contest.rates([turn.fps for turn in row.turns]),
            contest.cell(row.ratio(fastest_peer(rows, row.algo))),
            in_words(row.returns),
            f"{median(turn.around_s for turn in row.turns):.1f}" if row.turns else "",
            row.problem or row.what,
        ]
        for row in rows
    ]
    heads += ["around, s", "what it is, or what is wrong"]
    table = contest.table("Whole trainings", heads, cells, places=1, numbers=5)
    Console(width=170).print(table)
    print(NOTES)


def save(rows: Sequence[Row], about: Mapping[str, Any], file: Path) -> None:
    """Write everything that was measured, with the ratios."""
    results = []
    for row in rows:
        peer = fastest_peer(rows, row.algo)
        figures = {
            "fps": [turn.fps for turn in row.turns],
            "fps_median": row.fps,
            "fastest_peer": peer.contestant if peer else None,
            "to_fastest_peer": row.ratio(peer),
            "final_return_mean": mean(row.returns) if row.returns else None,
        }
        results.append(asdict(row) | figures)
    contest.save(file, about, results)
